"""The verdict on an NCCL log: what failed and who is a victim, or what its choices cost."""

from __future__ import annotations

import re

from .nccl_causes import CAUSES, VICTIM

RESULTS = {
    1: "a CUDA error", 2: "a system error", 3: "an internal error", 4: "invalid argument",
    5: "invalid usage", 6: "a remote error",
}  # fmt: skip
VIRTUAL = r"docker|virbr|br-|veth|cni|flannel|cali|lxc|podman|vmnet|tailscale|tun\d|wg\d"
RDMA = re.compile(
    r"NET/(?:IB|OFI|AWS|Plugin|UCX|SHARP|FasTrak|gIB|GPUDirect|SRD|Libfabric|CXI|Slingshot)",
    re.IGNORECASE,
)


def judge(facts: dict, log) -> dict:
    """Verdict in words, why and next."""
    errors = list(log.errors.values())
    evidence = [f"{e['place']} {e['text']}" for e in errors]
    evidence += [note for note in log.tail if "exceeds" in note]
    fatal = [e for e in errors if not re.search(r"CANCELLED", e["text"])]
    cancelled = next((e for e in errors if "CANCELLED" in e["text"]), None)
    if fatal:
        return _broken(fatal, evidence, facts, log, cancelled)
    if cancelled:
        return {
            "verdict": "ended from outside: the job was cancelled"
            + (" at its time limit" if "TIME LIMIT" in cancelled["text"] else ""),
            "why": f"Line {cancelled['line']}: {cancelled['text'][:120]}. NCCL reports no error; "
            "if no step was done, it hung.",
            "next": "see whether steps were done before; if not, run again with a short time limit "
            "and NCCL_DEBUG=INFO, and look for the rank whose lines stop first",
        }
    if log.returned:
        number, place, code = log.returned
        return {
            "verdict": f"broken: NCCL returned {RESULTS[code]}; the line that says why is missing",
            "why": f"Line {number}: {place} returned {code}; the WARN line before it is not here.",
            "next": "look for 'NCCL WARN' in the whole log, on all ranks; the first one tells",
        }
    return _healthy(facts, log)


def _broken(fatal: list, evidence: list, facts: dict, log, cancelled) -> dict:
    text = "\n".join(evidence)
    cause, step, decisive = _cause(text, fatal)
    first = decisive or fatal[0]
    if cause is None:
        if re.search(VICTIM, text):
            cause, step = (
                "this rank is a victim: its peer closed the connection, so the peer failed first",
                "look for the first error (of NCCL or not: a crash, an OOM) in the logs of the "
                "other ranks and nodes",
            )
        else:
            cause = f"NCCL reports: {fatal[0]['text'][:120]}"
            step = "look for the first such line over all ranks; run again with NCCL_DEBUG=INFO"
    if len(log.versions) > 1 and re.search("mismatch|truncated|wrong type|instead of|Broken", text):
        cause = "ranks run different versions of NCCL: " + ", ".join(log.versions)
        step = "use the same image or environment on every node"
    said = ", ".join(word for word in (first["place"], first["who"]) if word)
    text_of = first["text"][:160].rstrip(".")
    why = [f"Line {first['line']}: {text_of}" + (f" ({said})" if said else "") + "."]
    extra = _extra(facts, log, text)
    if loopback := _loopback(facts, text):
        cause, step = loopback
        why.append(f"Interfaces: {', '.join(facts['interfaces'][:8])}.")
    elif log.notes and log.tail and "exceeds" in " ".join(log.tail):
        why.insert(0, f"{log.tail[0]} (line {next(iter(log.notes.values()))}).")
    if few := _fewer(facts["hcas"]):
        if any("mixed" in words for words in extra):
            step = f"export NCCL_IB_HCA=^{','.join(few)} on every node; if that is not it, {step}"
    if cancelled:
        extra.append("The job then hung until it was cancelled.")
    if log.gdr_off and facts["gdr"] is False and "NET/IB" in str(facts["transport"]):
        extra.append("GPUDirect RDMA is off as well (nvidia_peermem not loaded or not supported).")
    return {
        "verdict": f"broken: {cause}",
        "why": " ".join(why + extra[:3]),
        "next": step,
    }


def _cause(text: str, fatal: list) -> tuple[str | None, str, dict | None]:
    for sign, cause, step in CAUSES:
        if re.search(sign, text):
            line = next((e for e in fatal if re.search(sign, f"{e['place']} {e['text']}")), None)
            return cause, step, line
    return None, "", None


def _loopback(facts: dict, text: str) -> tuple[str, str] | None:
    """Loopback or a container's bridge among the interfaces, and a peer that is not reached."""
    taken = facts["bootstrap"] or facts["interfaces"]
    inner = [n for n in taken if re.match(VIRTUAL, n)]
    if inner and re.search("timed out|refused|No route|unreachable", text):
        outer = [n for n in taken if n not in inner and n != "lo"]
        return (
            f"NCCL took the interface {inner[0]}, which leads to no other machine",
            f"export NCCL_SOCKET_IFNAME={outer[0]} on every node (where the interface between them "
            "is called so)" if outer else "ip -br addr; then export NCCL_SOCKET_IFNAME= with the "
            "name of the interface between the nodes, on every node",
        )
    if "lo" in facts["interfaces"] and re.search("refused|onnect", text):
        others = [n for n in facts["interfaces"] if n != "lo"]
        return (
            "NCCL took the loopback interface lo, so other nodes are told to connect to themselves",
            f"export NCCL_SOCKET_IFNAME={others[0] if others else '^lo,docker0'} on every node",
        )
    return None


def _extra(facts: dict, log, text: str) -> list[str]:
    found = []
    kinds = {k for k in facts["hcas"].values()}
    if len(kinds) > 1 and re.search(r"(?:error|status)[ =]\S*12|ibv_", text):
        found.append("InfiniBand and RoCE ports are mixed: " + _mixed(facts["hcas"]) + ".")
    if facts["env"].get("NCCL_SOCKET_IFNAME") and re.search("interface", text):
        found.append(f"NCCL_SOCKET_IFNAME is {facts['env']['NCCL_SOCKET_IFNAME']}.")
    return found


def _fewer(hcas: dict[str, str]) -> list[str]:
    """The ports of the fabric that has fewer of them; none where there is one, or as many."""
    roce = [name for name, kind in hcas.items() if kind == "RoCE"]
    others = [name for name in hcas if name not in roce]
    return [] if len(roce) == len(others) else min(roce, others, key=len)


def _mixed(hcas: dict[str, str]) -> str:
    by: dict[str, list[str]] = {}
    for name, kind in hcas.items():
        by.setdefault(kind, []).append(name)
    return "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by.items())


def _healthy(facts: dict, log) -> dict:
    transport, env = facts["transport"], facts["env"]
    if log.retry and not (log.paths or log.complete):
        where = (_loopback(facts, log.retry[1] + " timed out") or (
            "connections to other ranks do not come about", "nc -vz the address named, from this "
            "node; a firewall, the wrong interface (NCCL_SOCKET_IFNAME) or a rank that never "
            "started"))  # fmt: skip
        return {
            "verdict": f"hangs while connecting: {where[0]}",
            "why": f"Line {log.retry[0]}: {log.retry[1]}; no channel follows.",
            "next": where[1],
        }
    if log.aborted:
        return {
            "verdict": "no error of NCCL's is shown, but the communicator was aborted",
            "why": "The line 'Abort COMPLETE' is what the program asks for after an error of its "
            "own or a time-out.",
            "next": "look for the program's own error before that line, on all ranks",
        }
    nets = [t for t in transport if t.startswith("NET/")]
    kinds = set(facts["hcas"].values())
    began = bool(log.paths)
    if len(kinds) > 1:
        roce = [n for n, k in facts["hcas"].items() if k == "RoCE"]
        few = min(by := [roce, [n for n in facts["hcas"] if n not in roce]], key=len)
        bond = [n for n in few if "bond" in n]
        return {
            "verdict": "works, perhaps slowly: ports of different fabrics are used together",
            "why": f"{_mixed(facts['hcas'])}. NCCL spreads channels over all of them, so the "
            f"slowest sets the pace{' (a bond is usually for management)' if bond else ''}.",
            "next": f"export NCCL_IB_HCA=^{','.join(few)} on every node (or name the "
            f"{max(map(len, by))} that belong together)",
        }
    if log.complete and not transport:
        return {
            "verdict": "no error: the ranks are connected, by a transport that is not shown",
            "why": f"'Init COMPLETE' stands there {log.complete} times, and no line 'via …'.",
            "next": "save the whole log with NCCL_DEBUG=INFO",
        }
    if not transport and not facts["interfaces"]:
        if any("P2P is disabled" in note for note in log.tail):
            return {
                "verdict": "no error; peer access is off between GPUs that NVLink or PCIe connects",
                "why": f"Line {min(log.notes.values())}: 'P2P is disabled between connected GPUs'; "
                "data goes through host memory then.",
                "next": "echo $NCCL_P2P_DISABLE $NCCL_P2P_LEVEL; nvidia-smi topo -p2p r",
            }
        return {
            "verdict": "no error, and too little to tell which transport is used",
            "why": f"{log.lines} lines of NCCL's log, none with a transport or an interface."
            + "".join(f" It warns ({w[:100]}) and goes on." for w in facts["warnings"][:1]),
            "next": "run again with NCCL_DEBUG=INFO (not VERSION or WARN), and save all of it",
        }
    inside = [t for t in transport if not t.startswith("NET/")]
    ways = ", ".join(transport) or "no transport"
    why = [f"{'Channels use' if began else 'Before any channel stands:'} {ways}."]
    if facts["interfaces"]:
        why.append(f"Interfaces: {', '.join(facts['interfaces'][:12])}.")
    used, total = facts["gdr_channels"]
    if not nets or (began and not log.net_paths):
        return _one_machine(inside, why, env, facts)
    if any("Socket" in n for n in nets) and not any(RDMA.match(n) for n in nets):
        return _sockets(why, env, facts, log, began)
    if facts["gdr"]:
        forced = env.get("NCCL_NET_GDR_LEVEL") or env.get("NCCL_IB_CUDA_SUPPORT")
        why.append(f"{used} of {total} network channels have the suffix GDRDMA." if total else
                   "GPUDirect RDMA is enabled.")  # fmt: skip
        if forced:
            return {
                "verdict": f"works, GPUDirect RDMA forced: {', '.join(nets)}",
                "why": " ".join(why) + f" NCCL_NET_GDR_LEVEL is {forced}: beyond PXB the data "
                "crosses the CPU's links, which can be slow.",
                "next": "nvidia-smi topo -m: a NIC nearer to the GPU (or NPS4 in the BIOS) is "
                "better than the variable; measure with all_reduce_perf with and without it",
            }
        part = " on part of the channels" if total and used < total else ""
        return {
            "verdict": f"healthy: {', '.join(nets)} with GPUDirect RDMA{part}",
            "why": " ".join(why),
            "next": "measure: all_reduce_perf -b 8 -e 8G -f 2 on two machines, then on more",
        }
    if facts["gdr"] is False:
        return {
            "verdict": f"works without GPUDirect RDMA: {', '.join(nets)} through host memory",
            "why": " ".join(why) + (" NCCL says it is disabled (no kernel module, or the GPU is "
                                    "too far from the NIC)." if log.gdr_off else
                                    " No channel has the suffix GDRDMA."),
            "next": "lsmod | grep nvidia_peermem (or DMA-BUF), and nvidia-smi topo -m: a NIC at "
            "PIX or PXB; NCCL_NET_GDR_LEVEL only to test",
        }  # fmt: skip
    return {
        "verdict": f"no error: {', '.join(nets)} is chosen; whether GPUDirect RDMA is used is not "
        "shown",
        "why": " ".join(why),
        "next": "save the whole log: the lines 'via NET/…' end in GDRDMA where it is used",
    }


def _one_machine(inside: list[str], why: list[str], env: dict, facts: dict) -> dict:
    if "SHM" in inside and not any(t.startswith("P2P") for t in inside):
        off = env.get("NCCL_P2P_DISABLE") == "1"
        return {
            "verdict": "works through host memory (SHM), without peer access between GPUs",
            "why": " ".join(why) + (" NCCL_P2P_DISABLE=1 is set." if off else
                                    " Peer access is off or not supported: usual on GeForce 40 "
                                    "and 50, across sockets and in virtual machines."),
            "next": "unset NCCL_P2P_DISABLE" if off else
            "nvidia-smi topo -p2p r and topo -m; measure with all_reduce_perf -g 2",
        }  # fmt: skip
    if not inside:
        return {
            "verdict": "no error so far: no transport is chosen yet",
            "why": " ".join(why),
            "next": "save the whole log with NCCL_DEBUG=INFO, to 'Init COMPLETE' and beyond",
        }
    place = "over NVLink between machines" if "MNNVL" in inside else "inside one machine"
    return {
        "verdict": f"healthy {place}: {', '.join(inside)}",
        "why": " ".join(why) + " No channel goes over a network"
        + (", so 'GDR' in other lines says nothing." if facts["gdr"] is None else "."),
        "next": "measure: all_reduce_perf -b 8 -e 8G -f 2 -g 8",
    }  # fmt: skip


def _sockets(why: list[str], env: dict, facts: dict, log, began: bool) -> dict:
    reason = ""
    step = "ibstat and ibv_devinfo inside the container; mount /dev/infiniband; or accept TCP"
    if env.get("NCCL_IB_DISABLE") == "1":
        reason, step = " NCCL_IB_DISABLE=1 is set.", "unset NCCL_IB_DISABLE if the nodes have RDMA"
    elif env.get("NCCL_NET", "").lower() == "socket":
        reason, step = " NCCL_NET=Socket is set.", "unset NCCL_NET if the nodes have RDMA"
    elif any("No device" in note for note in log.notes):
        reason = " NCCL finds no RDMA device."
    elif any("libibverbs" in w for w in facts["warnings"]):
        reason = " The library libibverbs is missing, so RDMA was not tried."
    elif any("aws-ofi" in w or "EFA provider" in w for w in facts["warnings"]):
        reason = " The plugin for EFA did not start."
    one = facts["nodes"] == 1 or (len(log.hosts) == 1 and not began)
    if one:
        reason += " On one machine that is harmless: the network is not used between its GPUs."
    verb = "uses" if began else "has chosen"
    return {
        "verdict": f"{'works' if began else 'no error'}, over TCP: NCCL {verb} sockets, not RDMA",
        "why": " ".join(why) + reason,
        "next": step,
    }
