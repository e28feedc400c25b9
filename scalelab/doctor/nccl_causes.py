"""What NCCL's messages mean, and what its choices cost: the verdict on a log."""

from __future__ import annotations

import re

# (sign in an error, cause, what to do). The first that is found decides, so particular signs stand
# before general ones, and what a victim says stands last.
CAUSES: tuple[tuple[str, str, str], ...] = (
    (r"Duplicate GPU detected",
     "two ranks use the same GPU",
     "call torch.cuda.set_device(LOCAL_RANK) before the first collective, start no more ranks than "
     "GPUs, and check CUDA_VISIBLE_DEVICES"),
    (r"Mismatched NCCL version|version mismatch|(?:mismatch|different).*NCCL version",
     "ranks run different versions of NCCL",
     "use the same image or environment on every node: python -c 'import torch; "
     "print(torch.cuda.nccl.version())'"),
    (r"MaxSharedMem \d+ exceeds",
     "this NCCL asks for more shared memory than the GPU allows: it is older than the GPU",
     "upgrade NCCL (RTX 50 cards need 2.26.2 or later) and run again"),
    (r"no kernel image is available|invalid device function",
     "this NCCL or program was not built for the GPU", "install a build for this GPU and CUDA"),
    (r"driver version is insufficient|CUDA driver version",
     "the driver is older than the CUDA that NCCL was built with", "nvidia-smi; update the driver"),
    (r"[Rr]emote IB device is incompatible",
     "ports of different kinds meet: InfiniBand on one node, RoCE on another",
     "ibv_devinfo on every node; NCCL_IB_HCA with ports of one fabric on each"),
    (r"async fatal event",
     "a NIC reported a fatal error on a connection",
     "dmesg and firmware of that NIC; ACS and IOMMU settings for GPUDirect RDMA; "
     "NCCL_NET_GDR_LEVEL=LOC shows whether that is it"),
    (r"async event ?: (?:port error|link down|device fatal|local catastrophic)|port (?:error|down)",
     "a NIC's port went down",
     "ibstat and dmesg on that node: cable, transceiver or switch port; the errors of other ranks "
     "follow from it"),
    (r"attaching to shared memory segment.*No such file|Call to (?:shm_)?open failed ?: No such",
     "one rank cannot open the shared memory that another one made",
     "ranks of one node must share /dev/shm (one container, or --ipc=host), and nothing may clean "
     "it (systemd RemoveIPC=no); NCCL_SHM_DISABLE=1 or NCCL_CUMEM_HOST_ENABLE=0 to test"),
    (r"No space left on device|posix_fallocate|/dev/shm|shm_open|shared memory segment|"
     r"Error while (?:creating|attaching) (?:to )?shared memory|shmutils|Call to ftruncate",
     "shared memory (/dev/shm) is too small or cannot be opened",
     "df -h /dev/shm; docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium "
     "Memory at /dev/shm"),
    (r"Address family not supported|no (?:NCCL_SOCKET_IFNAME )?(?:socket )?interface found|"
     r"No interface found|"
     r"No usable listening interface|with family \d+ is neither|No socket interface|"
     r"interface .* not found",
     "NCCL finds no network interface with the given name, or none at all",
     "ip -br addr on every node; set NCCL_SOCKET_IFNAME to a name that exists on all of them, or "
     "unset it"),
    (r"ibv_modify_qp failed with (?:error )?(?:110|Connection timed out)",
     "the peer's NIC cannot be reached at the RDMA level (ibv_modify_qp timed out)",
     "ib_write_bw between the two NICs named (same GID index); on rail-only networks set "
     "NCCL_CROSS_NIC=0, on RoCE check routes between the subnets and NCCL_IB_GID_INDEX"),
    (r"ibv_modify_qp failed with (?:error )?(?:101|113|Network is unreachable|No route to host)",
     "there is no route from this NIC to the peer's (RoCE)",
     "give the RoCE interfaces addresses that reach each other, or choose the right ones with "
     "NCCL_IB_HCA; then ib_write_bw"),
    (r"ibv_modify_qp failed with (?:error )?(?:22|61|19|Invalid argument|No data|No such)",
     "the queue pair cannot be set up: wrong GID index, or ports of different kinds are mixed",
     "show_gids; set NCCL_IB_GID_INDEX (3 is usual for RoCE v2) and NCCL_IB_HCA to ports of one "
     "fabric"),
    (r"ibv_(?:reg_mr\w*|create_\w+|alloc_\w+) failed.*(?:12|Cannot allocate|memory)|"
     r"ibv_(?:reg_mr|create_\w+).*(?:Cannot allocate memory|ENOMEM)",
     "memory cannot be locked for RDMA: the limit on locked memory is too low",
     "ulimit -l must say unlimited (docker --ulimit memlock=-1; Slurm PropagateResourceLimits); "
     "nvidia_peermem loaded"),
    (r"ibv_reg_mr\w* failed|ibv_reg_dmabuf",
     "GPU memory cannot be registered with the NIC",
     "load nvidia_peermem or use DMA-BUF; NCCL_NET_GDR_LEVEL=LOC to try without GPUDirect RDMA"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?12\b",
     "InfiniBand or RoCE packets to a peer are not answered (error 12, retries exceeded)",
     "ib_write_bw between the two nodes on the same NICs; ibstat on both; all NICs listed must be "
     "of one fabric (NCCL_IB_HCA), in a cloud all machines of one placement group; RoCE: "
     "NCCL_IB_GID_INDEX and lossless settings"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?13\b",
     "the peer was not ready to receive (error 13, RNR retries exceeded)",
     "look for the rank that stalled or died; then PFC or lossless settings of the fabric"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?(?:4|10|9|11)\b.*(?:vendor err|opcode)",
     "the NIC refused access to memory (local or remote protection error)",
     "ACS and IOMMU off for GPUDirect RDMA; try NCCL_NET_GDR_LEVEL=LOC and newer firmware"),
    (r"(?:error|status)[ =](?:IBV_WC_\w+\()?5\b.*(?:vendor err|opcode)",
     "the connection to a peer was flushed: this rank is a victim of an earlier error",
     "look for the first error of the peer that is named"),
    (r"ibv_\w+ failed|ibv_\w+\(\) failed|ibv_\w+ .*error",
     "a call to the RDMA driver failed", "ibstat, ibv_devinfo; dmesg; same driver on all nodes"),
    (r"NET/OFI .*(?:failed|error)|UNDELIVERABLE|libfabric.*(?:fail|error)",
     "libfabric could not set up or deliver on this fabric",
     "fi_info -p on each node; versions of libfabric and the plugin; FI_LOG_LEVEL=warn"),
    (r"peer access is not supported|peer mapping resources exhausted|P2P is disabled|"
     r"could not enable P2P|cudaIpcOpenMemHandle|IPC mem handle|cuMemImport",
     "one GPU cannot open another one's memory (peer access)",
     "nvidia-smi topo -p2p r; same container or --ipc=host; NCCL_P2P_DISABLE=1 shows whether this "
     "is it; NCCL_CUMEM_ENABLE=0 on drivers that lack it"),
    (r"NVLS|[Mm]ulticast|Fabric Manager|CUDA failure 802|system not yet initialized",
     "the NVSwitch fabric is not ready (Fabric Manager, NVLS multicast)",
     "systemctl status nvidia-fabricmanager, same version as the driver; NCCL_NVLS_ENABLE=0 shows "
     "whether NVLS is it"),
    (r"libnvidia-ml|nvmlInit|nvmlDevice|nvmlwrap",
     "NCCL cannot use the driver's library NVML", "nvidia-smi inside the container; mount the "
     "driver's libraries (NVIDIA_DRIVER_CAPABILITIES=compute,utility)"),
    (r"out of memory|Failed to CUDA (?:malloc|calloc)|Cuda failure 2\b",
     "a GPU has too little free memory for NCCL's buffers",
     "nvidia-smi; leave a GB free on each GPU, end leftovers"),
    (r"unspecified launch failure|illegal memory access|Cuda failure (?:700|719)|uncorrectable ECC|"
     r"Cuda failure (?:214|46)\b",
     "a GPU failed under the program (illegal access, ECC or a dead GPU)",
     "dmesg | grep -i xid on that node; CUDA_LAUNCH_BLOCKING=1 to find the kernel"),
    (r"Cuda failure|CUDA error|ncclUnhandledCudaError",
     "a CUDA call failed inside NCCL",
     "compute-sanitizer or CUDA_LAUNCH_BLOCKING=1; check that NCCL, CUDA and driver fit the GPU"),
    (r"connect to .*(?:127\.|::1)|peer (?:127\.|::1)",
     "a rank was told a loopback address",
     "set NCCL_SOCKET_IFNAME to the interface between the nodes"),
    (r"(?:onnect|socketStart|ocket).*(?:timed out|Connection timed out|ETIMEDOUT)|"
     r"Call to connect (?:failed|timeout|returned).*timed out",
     "connections between the nodes are dropped: a firewall, or no route (timed out)",
     "open all TCP ports between the nodes, or nc -vz the address and port named; then "
     "NCCL_SOCKET_IFNAME"),
    (r"No route to host|Network is unreachable",
     "there is no route between the nodes on the chosen interface",
     "ip route get the peer's address; set NCCL_SOCKET_IFNAME to the interface between the nodes"),
    (r"Connection refused",
     "nobody listens at the address this rank was given: the peer died, or the address is wrong",
     "check that the address in the log is the peer's (NCCL_SOCKET_IFNAME); look for an earlier "
     "error on the peer"),
    (r"Message truncated|instead of \d+|size mismatch|mismatch|wrong type \d|magic",
     "ranks disagree: they made different calls, or belong to different jobs",
     "TORCH_DISTRIBUTED_DEBUG=DETAIL; check that all ranks run the same code and versions"),
    (r"[Ii]nvalid argument|[Ii]nvalid (?:rank|usage|config)|ncclInvalid",
     "NCCL refused a call", "check ranks, world size, devices and the arguments of the call"),
    (r"Watchdog caught|timed out|[Tt]imeout",
     "a collective did not end in time: some rank did not take part, or its traffic stopped",
     "py-spy dump on the rank that is missing; TORCH_NCCL_DUMP_ON_TIMEOUT=1; compare each rank's "
     "last lines"),
    (r"Segmentation fault|signal 11|Bus error|Caught signal",
     "a process crashed", "find which rank; gdb or faulthandler; look at its first error"),
    (r"oom-kill|Out of memory: Kill|signal 9",
     "the system killed a process, usually for host memory", "dmesg | grep -i oom on that node"),
)  # fmt: skip
VICTIM = (
    r"Broken pipe|[Cc]onnection closed by remote peer|Connection reset by peer|"
    r"remote process exited|ncclRemoteError|Failed to execute operation|Proxy Call to rank|"
    r"socketProgress|socketPollConnect|closed by peer|commAbort|Abort(?:ed|ing)?\b"
)
VIRTUAL = r"docker|virbr|br-|veth|cni|flannel|cali|lxc|podman|vmnet|tailscale|tun\d|wg\d"
RDMA = re.compile(
    r"NET/(?:IB|OFI|AWS|Plugin|UCX|SHARP|FasTrak|gIB|GPUDirect|SRD|Libfabric|CXI|Slingshot)",
    re.IGNORECASE,
)


def judge(facts: dict, log) -> dict:
    """Verdict in words, why and next."""
    errors = list(log.errors.values())
    evidence = [e["text"] for e in errors] + log.tail
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
    why = [f"Line {first['line']}: {first['text'][:160]}" + (f" ({first['who']})" if first["who"]
                                                             else "") + "."]  # fmt: skip
    extra = _extra(facts, log, text)
    if loopback := _loopback(facts, text):
        cause, step = loopback
    elif log.notes and log.tail and "exceeds" in " ".join(log.tail):
        why.insert(0, f"{log.tail[0]} (line {next(iter(log.notes.values()))}).")
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
            line = next((e for e in fatal if re.search(sign, e["text"])), None)
            return cause, step, line
    return None, "", None


def _loopback(facts: dict, text: str) -> tuple[str, str] | None:
    """Loopback or a container's bridge among the interfaces, and a peer that is not reached."""
    inner = [n for n in facts["bootstrap"] or facts["interfaces"] if re.match(VIRTUAL, n)]
    if inner and re.search("timed out|refused|No route|unreachable", text):
        return (
            f"NCCL took the interface {inner[0]}, which leads to no other machine",
            "NCCL_SOCKET_IFNAME with the name of the interface between the nodes, on every node",
        )
    if "lo" in facts["interfaces"] and re.search("refused|onnect", text):
        others = [n for n in facts["interfaces"] if n != "lo"]
        return (
            "NCCL took the loopback interface lo, so other nodes are told to connect to themselves",
            f"NCCL_SOCKET_IFNAME={others[0] if others else 'eth0'} on every node (or ^lo,docker0)",
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
            "next": f"NCCL_IB_HCA=^{','.join(few)} (or name the {max(map(len, by))} that belong "
            "together)",
        }
    if not transport and not facts["interfaces"]:
        return {
            "verdict": "no error, and too little to tell which transport is used",
            "why": f"{log.lines} lines of NCCL's log, none with a transport or an interface.",
            "next": "run again with NCCL_DEBUG=INFO (not VERSION or WARN), and save all of it",
        }
    inside = [t for t in transport if not t.startswith("NET/")]
    ways = ", ".join(transport) or "none yet"
    why = [f"{'Channels use' if began else 'Chosen, before any channel stands:'} {ways}."]
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
    one = facts["nodes"] == 1 or (len(log.hosts) == 1 and not began)
    if one:
        reason += " On one machine that is harmless: the network is not used between its GPUs."
    verb = "uses" if began else "has chosen"
    return {
        "verdict": f"{'works' if began else 'no error'}, over TCP: NCCL {verb} sockets, not RDMA",
        "why": " ".join(why) + reason,
        "next": step,
    }
