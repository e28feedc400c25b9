"""nccl-tests' busbw against the line rate of the links, where the hardware is known."""

from __future__ import annotations

from ..plan import hardware

GOOD, SLOW = 0.70, 0.50  # of the one-way line rate; rings reach 78 to 92 %
NETWORK = ("the network, over two machines, then over all: mpirun -np 2 -H host1:1,host2:1 "
           "./build/all_reduce_perf -b 8 -e 8G -f 2 -g 1, and with all GPUs of each")  # fmt: skip
ENOUGH = 1 << 28  # bytes: below 256 MB a fast link is not yet filled


def judge(facts: dict, tests, run) -> tuple[str, str, str]:
    """(verdict, why, next) of a run that ended well."""
    best, ranks, nodes = facts["max_busbw"], facts["ranks"], facts["nodes"]
    cards = {hardware.gpu(name) for name in facts["gpus"]}
    say = f"Largest busbw {best:g} GB/s"
    if facts["largest_bytes"]:
        say += f", messages up to {_size(facts['largest_bytes'])}"
    average = facts["avg_busbw"]
    if average is not None and average < 0.6 * best and tests.rows:
        shown = average >= run.smallest[1]
        say += f"; the average of {average:g} counts " + (
            "small messages too" if shown else "rows that are not shown")  # fmt: skip
    say += "."
    if facts["largest_bytes"] is not None and facts["largest_bytes"] < 1 << 20:
        return (
            f"unknown: messages up to {_size(facts['largest_bytes'])} are too small to fill a link",
            say, "the same test to larger sizes: -b 8 -e 8G -f 2",
        )  # fmt: skip
    if len(cards) != 1 or None in cards or ranks is None or nodes is None:
        known = "no GPU is named to hold it against"
        if len(facts["gpus"]) > 1:
            known = "different GPUs take part"
        elif facts["gpus"]:
            known = f"no figure is known for {facts['gpus'][0]}"
        return (
            f"unknown: {best:g} GB/s, and {known}",
            f"{say} {_ports(best)}",
            "nvidia-smi topo -m and ibstat: NVLink or PCIe inside a machine, the sum of its NICs "
            "between machines; run again and keep the lines below '# Using devices'",
        )
    card = cards.pop()
    if nodes == 1:
        return _one_node(best, ranks, card, facts, run, say)
    return _many_nodes(best, ranks, nodes, card, facts, run, say)


def _one_node(best, ranks, card, facts, run, say) -> tuple[str, str, str]:
    low, high = hardware.node_rate(card, ranks)
    kind = {"sxm": "NVLink", "bridge": "NVLink or PCIe", "none": "PCIe"}[card.fabric]
    rate = f"{high:g}" if low == high else f"{low:g} to {high:g}"
    against = f"{kind} of {card.name} carries {rate} GB/s one way between {ranks} GPUs"
    if best > 1.05 * low:  # pairs of P100 and V100 have one or two links, or a switch
        low = 2 * low if card.name in ("P100", "V100") and best <= 2.04 * low else high
    share = best / low
    if best > 1.02 * high and not (card.nvlink >= 450 or "H800" in card.name):
        return (
            f"unknown: {best:g} GB/s is more than the links carry",
            f"{say} {against}.",
            "run again and save all of it: do the GPUs and the rows belong together?",
        )
    if best > high:
        say += (" Above the line rate: with NVLS the switch adds up, so less is sent than busbw "
                "counts.")  # fmt: skip
    if card.fabric != "sxm":
        return _pcie_node(best, low, high, card, against, say, facts, run)
    if share >= GOOD:
        return f"good: {best:g} GB/s" + (
            f", above NVLink's line rate of {high:g} GB/s" if best > high else
            f" is {share:.0%} of the line rate" + (" of NVLink" if low == high else
                                                   ", at the least")), (
            f"{say} {against}; a ring reaches about 80 % of it."), NETWORK  # fmt: skip
    if _rising(facts, run):
        return _unfilled(best, share, against, say)
    if share < SLOW or (low == high and ranks > 2):
        return (
            f"slow: {best:g} GB/s is {best / low:.0%} of the line rate",
            f"{say} {against}; a ring reaches about 80 % of it. Traffic may go over PCIe or host "
            "memory, or a link is down.",
            "nvidia-smi topo -m and nvidia-smi nvlink -s; run with NCCL_DEBUG=INFO and look for "
            "P2P (not SHM); unset NCCL_P2P_DISABLE, NCCL_MAX_NCHANNELS and NCCL_ALGO",
        )
    return f"unknown: {best:g} GB/s, and how many NVLinks these {ranks} GPUs share is not shown", (
        f"{say} {against}."), "nvidia-smi topo -m, and count the NVLinks of each pair"  # fmt: skip


def _pcie_node(best, low, high, card, against, say, facts, run) -> tuple[str, str, str]:
    """Cards in slots: how wide the slot is and whether peer access is on is not in the output."""
    share = best / low
    if best > 1.05 * low and high > low:
        return (
            f"{'good' if best > SLOW * high else 'unknown'}: {best:g} GB/s, above PCIe: "
            "the NVLink bridge is used" + ("" if best > SLOW * high else ", far from filled"),
            f"{say} {against}.",
            NETWORK if best > SLOW * high else
            "nvidia-smi nvlink -s: all links of the bridge up? Then larger sizes: -b 8 -e 8G -f 2",
        )
    if share >= 0.45:
        return (
            f"good: {best:g} GB/s is {share:.0%} of a PCIe slot of 16 lanes",
            f"{say} {against}; cards in slots rarely reach more than 40 to 80 % of it.",
            "nvidia-smi topo -m shows whether a bridge or a common PCIe switch could give more",
        )
    if _rising(facts, run):
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


def _many_nodes(best, ranks, nodes, card, facts, run, say) -> tuple[str, str, str]:
    each, uneven = divmod(ranks, nodes)
    gpus = "one GPU" if each == 1 else f"{each} GPUs"
    say += f" {ranks} GPUs on {nodes} nodes," if uneven else f" {nodes} nodes of {gpus},"
    say += " NICs not named in the output."
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
    total, one = card.port * each if card.port and not uneven else None, "one"
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
    if total and _rising(facts, run):
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
    if port is None:
        two = " (a tree on two nodes counts twice, so half as many can be enough)"
        return f"In ports of 400 Gb/s a node that is {best / 50:.2g}{two}." if best > 6.25 else ""
    return (f"It would be {best / port.one_way:.0%} of one {8 * port.one_way:g} Gb/s port, if that "
            "is what the machine has.")  # fmt: skip


def _rising(facts: dict, run) -> bool:
    """Whether the sweep ended before busbw had levelled off: it says nothing of the link then."""
    size = facts["largest_bytes"]
    if size is None or size >= ENOUGH:
        return False
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
