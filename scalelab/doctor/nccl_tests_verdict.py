"""Good, slow, broken, not-one-job or unknown: nccl-tests' figures against what the links carry."""

from __future__ import annotations

from ..plan import hardware

GOOD, SLOW = 0.70, 0.50  # of the one-way line rate; rings reach 78 to 92 %
ENOUGH = 1 << 28  # bytes: below 256 MB a fast link is not yet filled
CAUSES = (
    ("busy or unavailable", "a GPU is in use or in Exclusive_Process mode, and another process "
     "(often MPI itself, on GPU 0) holds it", "nvidia-smi -q -d COMPUTE; nvidia-smi -c 0 (as "
     "root), or keep MPI off the GPUs: OMPI_MCA_mtl_ofi_disable_hmem=true"),
    ("out of memory", "a GPU has too little free memory", "nvidia-smi, end what holds the "
     "memory, or use a smaller -e"),
    ("invalid device ordinal", "more GPUs were asked for than a process can see",
     "nvidia-smi -L; lower -g, or check CUDA_VISIBLE_DEVICES"),
    ("no CUDA-capable device", "no GPU can be seen", "nvidia-smi -L inside the container or job"),
    ("driver version is insufficient", "the driver is older than the CUDA of this build",
     "nvidia-smi; update the driver or use an older CUDA"),
    ("no kernel image", "the binary was not built for this GPU's architecture",
     "rebuild nccl-tests (and NCCL) with NVCC_GENCODE for this GPU"),
    ("unhandled system error", "a call to the system failed inside NCCL (network, shared memory)",
     "run again with NCCL_DEBUG=INFO and read that"),
    ("unhandled cuda error", "a CUDA call failed inside NCCL before the first row; a NCCL older "
     "than the GPU is a common reason", "run again with NCCL_DEBUG=INFO, and try a newer NCCL"),
    ("remote process exited", "another rank died first, or the network failed",
     "look for the first error on the other nodes; run again with NCCL_DEBUG=INFO"),
    ("invalid usage", "NCCL refused the call (ranks, devices or arguments do not fit)",
     "run again with NCCL_DEBUG=WARN"),
    ("internal error", "NCCL failed inside", "run again with NCCL_DEBUG=INFO"),
)  # fmt: skip


def judge(facts: dict, tests, runs: list) -> dict:
    """Verdict (its first word is one of the five), why and next."""
    verdict, why, step = _judge(facts, tests, runs)
    if facts["max_busbw"] is not None and not tests.rows:
        why += " Without rows the largest average stands for the largest busbw, which was no less."
    return {"verdict": verdict, "why": why.strip(), "next": step}


def _judge(facts: dict, tests, runs: list) -> tuple[str, str, str]:
    if facts["independent_runs"]:
        return _not_one_job(facts, tests)
    if facts["wrong"]:
        return (
            f"broken: {facts['wrong']} wrong values",
            "Results were compared with what they must be and differ: data is damaged on the way, "
            "so no speed counts until that is mended.",
            "test pairs of GPUs one at a time (CUDA_VISIBLE_DEVICES), then NCCL_P2P_DISABLE=1, "
            "NCCL_SHM_DISABLE=1 and NCCL_IB_DISABLE=1 in turn; nvidia-smi -q -d ECC, dmesg",
        )
    if tests.failures:
        return _failed(facts, tests)
    if not tests.measured:
        return _no_rows(tests)
    ended = all(r.ended for r in runs)
    if tests.killed and not ended:
        return (
            f"broken: it ended before the table did ({tests.killed[0][:80]})",
            f"The rows that were printed reach {_figure(facts)}." if tests.rows else "",
            "find which rank ended first; run again with NCCL_DEBUG=INFO",
        )
    if facts["shared_gpus"]:
        return (
            f"unknown: {facts['ranks']} ranks share one GPU, so this says nothing of the hardware",
            "The same device is listed for more than one rank; figures were of memory or sockets "
            f"inside one machine ({_figure(facts)}).",
            "give each rank a GPU of its own: one rank a GPU, -g 1, and check CUDA_VISIBLE_DEVICES",
        )
    if facts["ranks"] == 1:
        return (
            "unknown: one rank, whose busbw is 0 by definition",
            "busbw is algbw times 2(n-1)/n, which is 0 for n = 1: nothing was sent, and nothing is "
            "broken.",
            "use two GPUs or more: -g 2, or mpirun -np 2 with a binary built with MPI=1",
        )
    if facts["max_busbw"] is None:
        return "unknown: no bandwidth was printed", "The output holds no complete row.", (
            "run the test to its end")  # fmt: skip
    if facts["max_busbw"] == 0 and tests.rows:
        return (
            "unknown: busbw is 0 in every row",
            "That is so by definition with one rank, and with messages too small to show; this "
            "output does not say how many ranks there were.",
            "run with -g 2 or more, or with a binary built with MPI=1, to at least -e 1G",
        )
    if uneven := _uneven(runs):
        return uneven
    verdict, why, step = _against_hardware(facts, tests, runs)
    if not ended:
        why += " The output stops before the average: it was cut, or the run did not end."
    return verdict, why, step


def _not_one_job(facts: dict, tests) -> tuple[str, str, str]:
    many = max(tests.usings, sum(d[0] == 0 for d in tests.devices))
    each = facts["ranks"] or 1
    count = f"{many} separate" if many > 1 else "several separate"
    seen = (
        "the header or rank 0 is printed more than once" if many > 1
        else "the same sizes come again and again, with busbw 0, as each process prints its own "
        "table"
    )  # fmt: skip
    return (
        f"not-one-job: {count} runs of {each} rank{'s' * (each != 1)}, not one run over all",
        f"No process knew of the others: {seen}. The binary was built without MPI, or its MPI is "
        "not the one that mpirun or srun belongs to, so no figure here is of the network.",
        "make clean && make MPI=1 MPI_HOME=…, then mpirun -np N ./build/all_reduce_perf -g 1 "
        "(under srun add --mpi=pmix); ranks 0 to N-1 must stand in one list",
    )


def _failed(facts: dict, tests) -> tuple[str, str, str]:
    first = next((f for f in tests.failures if "'" in f), tests.failures[0])
    when = "before the first row" if not tests.rows else f"after {tests.rows} rows"
    cause, step = "", "run again with NCCL_DEBUG=INFO and read that log"
    for sign, what, then in CAUSES:
        if any(sign.lower() in f.lower() for f in tests.failures):
            cause, step = what, then
            break
    if tests.log is not None and tests.log.errors:
        told = tests.log.result()
        return f"broken {when}: {told['verdict'].removeprefix('broken: ')}", (
            f"{first[:160]}. {told['why']}"), told["next"]  # fmt: skip
    blackwell = "unhandled cuda error" in first and any("RTX 50" in g for g in facts["gpus"])
    if blackwell:
        cause += "; on RTX 50 cards NCCL before 2.26.2 asks for more shared memory than there is"
    return f"broken {when}: {cause or first[:100]}", f"{first[:200]}.", step


def _no_rows(tests) -> tuple[str, str, str]:
    if tests.log is not None and tests.log.errors:
        told = tests.log.result()
        return f"broken before the first row: {told['verdict'].removeprefix('broken: ')}", (
            told["why"]), told["next"]  # fmt: skip
    if tests.killed:
        if any("TIME LIMIT" in k for k in tests.killed):
            return (
                "broken before the first row: it hung until the job's time limit",
                "Devices are listed and no row follows: the set-up between the ranks did not end.",
                "run again with NCCL_DEBUG=INFO and a short time limit; scalelab read on that log",
            )
        return (
            f"broken before the first row: {tests.killed[0][:100]}",
            "The run was ended from outside or crashed before it measured anything.",
            "find which rank ended first; run again with NCCL_DEBUG=INFO",
        )
    return (
        "unknown: no row was measured",
        "The header is there and nothing after it: the run hung in its set-up, or was cut here.",
        "run again with NCCL_DEBUG=INFO and a time limit, and read that log with scalelab read",
    )


def _uneven(runs: list) -> tuple[str, str, str] | None:
    """Several runs of the same sizes, one far slower: told by themselves, whatever the hardware."""
    figures = [
        (r.best if r.best is not None else r.average, set(r.sizes), r.redop, r.root) for r in runs
    ]
    figures = [f for f in figures if f[0]]
    if len(figures) < 2:
        return None
    alike = all(f[1:] == figures[0][1:] for f in figures)
    values = [f[0] for f in figures]
    if not alike or min(values) > SLOW * max(values):
        return None
    place = values.index(min(values)) + 1
    return (
        f"slow: run {place} of {len(values)} reaches {min(values):g} GB/s, "
        f"{min(values) / max(values):.0%} of the {max(values):g} GB/s of the best",
        "The runs in this file differ: " + ", ".join(f"{v:g}" for v in values[:8]) + " GB/s. If "
        "they are the same test on the same machines, what changed between them costs the rest.",
        "compare both runs' NCCL_DEBUG=INFO logs: transport, GDRDMA, channels; a kernel change "
        "can turn GPUDirect RDMA off (try iommu=pt, check nvidia_peermem)",
    )


def _figure(facts: dict) -> str:
    return f"{facts['max_busbw']:g} GB/s busbw"


def _against_hardware(facts: dict, tests, runs: list) -> tuple[str, str, str]:
    best, ranks, nodes = facts["max_busbw"], facts["ranks"], facts["nodes"]
    cards = {hardware.gpu(name) for name in facts["gpus"]}
    say = f"Largest busbw {best:g} GB/s"
    if facts["largest_bytes"]:
        say += f", messages up to {_size(facts['largest_bytes'])}"
    if facts["avg_busbw"] is not None and facts["avg_busbw"] < 0.6 * best and tests.rows:
        say += f"; the average of {facts['avg_busbw']:g} counts small messages too"
    say += "."
    if len(cards) != 1 or None in cards or ranks is None or nodes is None:
        known = "no GPU is named to hold it against"
        if len(facts["gpus"]) > 1:
            known = "different GPUs take part"
        elif facts["gpus"]:
            known = f"no figure is known for {facts['gpus'][0]}"
        return (
            f"unknown: {best:g} GB/s, and {known}",
            f"{say} {_ports(best)}",
            "hold it against the line rate: NVLink or PCIe inside a machine, the sum of its NICs "
            "between machines (nvidia-smi topo -m, ibstat); keep the '# Using devices' lines",
        )
    card = cards.pop()
    if nodes == 1:
        return _one_node(best, ranks, card, facts, runs, say)
    return _many_nodes(best, ranks, nodes, card, facts, runs, say)


def _one_node(best, ranks, card, facts, runs, say) -> tuple[str, str, str]:
    low, high = hardware.node_rate(card, ranks)
    kind = {"sxm": "NVLink", "bridge": "NVLink or PCIe", "none": "PCIe"}[card.fabric]
    rate = f"{high:g}" if low == high else f"{low:g} to {high:g}"
    against = f"{kind} of {card.name} carries {rate} GB/s one way between {ranks} GPUs"
    share = best / low
    if best > high:
        say += (" Above the line rate: with NVLS the switch adds up, so less is sent than busbw "
                "counts.")  # fmt: skip
    if card.fabric != "sxm":
        return _pcie_node(best, low, high, card, against, say, facts, runs)
    if share >= GOOD:
        return f"good: {best:g} GB/s is {share:.0%} of the line rate" + (
            " of NVLink" if low == high else ", at the least"), (
            f"{say} {against}; a ring reaches about 80 % of it."), (
            "next, the network: the same test over two machines and over more")  # fmt: skip
    if _rising(facts, runs):
        return _unfilled(best, share, against, say)
    if share < SLOW or low == high:
        return (
            f"slow: {best:g} GB/s is {best / low:.0%} of the line rate",
            f"{say} {against}; a ring reaches about 80 % of it. Traffic may go over PCIe or host "
            "memory, or a link is down.",
            "nvidia-smi topo -m and nvidia-smi nvlink -s; run with NCCL_DEBUG=INFO and look for "
            "P2P (not SHM); unset NCCL_P2P_DISABLE, NCCL_MAX_NCHANNELS and NCCL_ALGO",
        )
    return f"unknown: {best:g} GB/s, and what this board carries is not known", (
        f"{say} {against}."), "nvidia-smi topo -m, and count the NVLinks of each pair"  # fmt: skip


def _pcie_node(best, low, high, card, against, say, facts, runs) -> tuple[str, str, str]:
    """Cards in slots: how wide the slot is and whether peer access is on is not in the output."""
    share = best / low
    if best > 1.05 * low and high > low:
        return (
            f"good: {best:g} GB/s, above PCIe: the NVLink bridge is used",
            f"{say} {against}.",
            "next, the network: the same test over two machines",
        )
    if share >= 0.45:
        return (
            f"good: {best:g} GB/s is {share:.0%} of a PCIe slot of 16 lanes",
            f"{say} {against}; cards in slots rarely reach more than 40 to 80 % of it.",
            "nvidia-smi topo -m shows whether a bridge or a common PCIe switch could give more",
        )
    if _rising(facts, runs):
        return _unfilled(best, share, against, say)
    if share < 0.15:
        return (
            f"slow: {best:g} GB/s is {share:.0%} of a PCIe slot of 16 lanes",
            f"{say} {against}. Host memory between sockets, a narrow slot or a virtual machine "
            "explain this much.",
            "nvidia-smi -q -d PCIE (width and generation under load); nvidia-smi topo -m and "
            "topo -p2p r; NCCL_DEBUG=INFO shows P2P or SHM",
        )
    return (
        f"unknown: {best:g} GB/s is {share:.0%} of a PCIe slot of 16 lanes",
        f"{say} {against}. That is usual where peer access is off and traffic goes through host "
        "memory (GeForce 40 and 50, or GPUs on two sockets), and low where it is on.",
        "nvidia-smi topo -p2p r; NCCL_DEBUG=INFO shows P2P or SHM",
    )


def _many_nodes(best, ranks, nodes, card, facts, runs, say) -> tuple[str, str, str]:
    each = ranks // nodes
    gpus = "one GPU" if each == 1 else f"{each} GPUs"
    say += f" {nodes} nodes of {gpus}, NICs not named in the output."
    two = (" On two nodes tree and NVLS count up to twice what passes a NIC, so do not take it for "
           "the fabric's figure: use four." if nodes == 2 else "")  # fmt: skip
    compare = ("compare with the sum of a node's NICs (ibstat or ibv_devinfo); NCCL_DEBUG=INFO "
               "must show NET/IB (or the cloud's plugin) with GDRDMA")  # fmt: skip
    if card.fabric == "sxm" and each > 1 and best >= GOOD * card.nvlink:
        return (
            f"good: {best:g} GB/s between {nodes} nodes, {best / card.nvlink:.0%} of NVLink's "
            "line rate inside one",
            f"{say} NVLink of {card.name} carries {card.nvlink:g} GB/s one way, so the network is "
            f"not what limits.{two}",
            "run on all nodes you will use, and on each pair, to find a slow one",
        )
    total, one = card.port * each if card.port else None, "one"
    if total and facts["test"] == "alltoall_perf":  # of n-1 peers, n-each sit on other nodes
        total, one = card.port * (ranks - 1) / max(1, ranks - each), "what all-to-all makes of one"
    elif total and facts["test"] == "sendrecv_perf":  # one GPU of a node sends to the next node
        total = card.port
    if total and best >= 0.8 * total:
        return (
            f"good: {best:g} GB/s is {best / total:.0%} of {one} {8 * card.port:g} Gb/s port a GPU",
            f"{say} That port for each GPU makes {total:g} GB/s one way.{two}",
            "run on all nodes you will use, and on each pair, to find a slow one; do not compare "
            "with a figure from inside one machine" if each == 1 else compare,
        )
    if total and _rising(facts, runs):
        return _unfilled(best, best / total, f"One usual port a GPU makes {total:g} GB/s", say)
    if card.fabric == "sxm" and each >= 4 and card.nvlink >= 200 and best < 6.25:
        return (
            f"slow: {best:g} GB/s between nodes of {each} {card.name}",
            f"{say} {_ports(best)} That is the speed of TCP over ordinary Ethernet: RDMA is not "
            "used, or there is none.",
            "run with NCCL_DEBUG=INFO: NET/Socket there means RDMA is off; ibstat, and unset "
            "NCCL_IB_DISABLE",
        )
    known = [n for n in hardware.NODES if n.gpu in card.name] if each == 8 else []
    if known:
        listed = ", ".join(f"{node.name} {node.one_way:g}" for node in known)
        say += f" Servers of eight have, in GB/s: {listed}."
    usual = f" One {8 * card.port:g} Gb/s port a GPU would make {total:g} GB/s." if total else ""
    return (
        f"unknown: {best:g} GB/s between {nodes} nodes, whose NICs the output does not name",
        f"{say}{usual} {_ports(best)}{two}",
        compare,
    )


def _ports(best: float) -> str:
    """Which port this rate would fill: a hint, no claim that it is there."""
    port = hardware.port_like(best)
    if port is None and best > 50:
        return (
            "No single port carries that: it takes links inside a machine (NVLink), or "
            f"{best / 50:.2g} ports of 400 Gb/s a node (on two nodes, where a tree counts twice, "
            "half as many can be enough)."
        )
    if port is None:
        return ""
    return (f"It would be {best / port.one_way:.0%} of one {8 * port.one_way:g} Gb/s port, if that "
            "is what the machine has.")  # fmt: skip


def _rising(facts: dict, runs: list) -> bool:
    """Whether the sweep ended before busbw had levelled off: it says nothing of the link then."""
    size = facts["largest_bytes"]
    if size is None or size >= ENOUGH:
        return False
    run = max((r for r in runs if r.largest), key=lambda r: r.largest[0])
    if run.half is None:  # a single size
        return size < ENOUGH / 8
    return run.largest[1] > 1.15 * run.half or size < 1 << 20


def _unfilled(best, share, against, say) -> tuple[str, str, str]:
    return (
        f"unknown: {best:g} GB/s ({share:.0%} of the line rate), but the messages were too small "
        "to fill the link",
        f"{say} {against}; below 256 MB busbw still rises with the size.",
        "the same test to larger sizes: -b 8 -e 8G -f 2",
    )


def _size(nbytes: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << power:
            return f"{nbytes / (1 << power):g} {unit}" if nbytes % (1 << power) == 0 else (
                f"{nbytes / (1 << power):.3g} {unit}")  # fmt: skip
    return f"{nbytes} bytes"
