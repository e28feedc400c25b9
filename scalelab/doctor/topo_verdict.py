"""What a GPU topology means for placing jobs: its class, the best sets, the slowest hop."""

from __future__ import annotations

import re
from itertools import combinations

MOST_LINKS = 18  # NVLinks of an H100, H200 or B200; no GPU in a server today has more
RANK = {"PIX": 1, "PSB": 1, "PXB": 2, "PHB": 3, "NODE": 4, "SYS": 5, "SOC": 5}
MEANING = {
    "PIX": "through one PCIe switch",
    "PSB": "through one PCIe switch",
    "PXB": "through several PCIe switches",
    "PHB": "through the CPU's PCIe host bridge",
    "NODE": "between host bridges of one socket",
    "SYS": "between CPU sockets",
    "SOC": "between CPU sockets",
    "N/A": "over a path the driver does not name",
}
GDR_LIMIT = 2  # NCCL uses GPUDirect RDMA by default up to PXB (NCCL_NET_GDR_LEVEL)


def nvlinks(label: str) -> int:
    """Number of bonded NVLinks in a label; 0 for a path over PCIe."""
    found = re.fullmatch(r"NV(\d+)", label)
    return int(found[1]) if found else 0


def cost(label: str) -> float:
    """Smaller is nearer: NV18 < NV1 < PIX < … < SYS; what is not named comes last."""
    return -nvlinks(label) / 100 if nvlinks(label) else RANK.get(label, 6)


def classify(gpus: list[int], links: dict[str, str]) -> str | None:
    """nvswitch, nvlink-mesh, nvlink-pairs, pcie-switch, pcie-host, cross-socket; None: 1 GPU."""
    labels = list(links.values())
    if not labels:
        return None
    counts = [nvlinks(label) for label in labels]
    if any(counts):
        if all(counts) and len(gpus) > 2 and len(set(counts)) == 1:
            # So many links to each peer that no GPU has enough for all of them: a switch.
            return "nvswitch" if counts[0] * (len(gpus) - 1) > MOST_LINKS else "nvlink-mesh"
        groups = islands(gpus, links)
        return "nvlink-mesh" if max(map(len, groups)) > 2 else "nvlink-pairs"
    worst = max(RANK.get(label, 6) for label in labels)
    if worst <= 2:
        return "pcie-switch"
    return "pcie-host" if worst <= 4 else "cross-socket" if worst == 5 else None


def islands(gpus: list[int], links: dict[str, str], limit: float = 0) -> list[list[int]]:
    """GPUs joined by paths no farther than `limit` (a cost; 0: NVLink only)."""
    group = {g: {g} for g in gpus}
    for pair, label in links.items():
        a, b = map(int, pair.split("-"))
        if cost(label) <= limit and group[a] is not group[b]:
            joined = group[a] | group[b]
            for g in joined:
                group[g] = joined
    return sorted({tuple(sorted(g)) for g in group.values()})  # type: ignore[return-value]


def label_of(links: dict[str, str], a: int, b: int) -> str:
    return links[f"{min(a, b)}-{max(a, b)}"]


def worst_in(members, links: dict[str, str]) -> str:
    """The slowest path inside a set of GPUs."""
    return max((label_of(links, a, b) for a, b in combinations(members, 2)), key=cost)


def best_split(gpus: list[int], links: dict[str, str], size: int) -> list[tuple[int, ...]]:
    """Two sets of `size` GPUs: the least far within, together over both."""

    def far(members) -> tuple[float, float]:
        costs = [cost(label_of(links, a, b)) for a, b in combinations(members, 2)]
        return max(costs), sum(costs)

    best = None
    for first in combinations(gpus, size):
        if first[0] != gpus[0]:
            break
        others = [g for g in gpus if g not in first]
        for second in combinations(others, size) if len(others) > size else [tuple(others)]:
            one, two = far(first), far(second)
            score = (max(one[0], two[0]), one[1] + two[1])
            if best is None or score < best[0]:
                best = (score, [first, second])
    return best[1]


def ring(gpus: list[int], links: dict[str, str]) -> tuple[list[int], str]:
    """A ring through all GPUs whose slowest hop is as fast as can be, and that hop's label."""
    for limit in sorted({cost(label) for label in links.values()}):
        path = _walk([gpus[0]], gpus, links, limit)
        if path:
            hops = [label_of(links, a, b) for a, b in zip(path, path[1:] + path[:1])]
            return path, max(hops, key=cost)
    raise AssertionError("with the largest limit every order is a ring")


def _walk(path, gpus, links, limit):
    if len(path) == len(gpus):
        return path if len(path) < 3 or cost(label_of(links, path[-1], path[0])) <= limit else None
    for g in gpus:
        if g not in path and cost(label_of(links, path[-1], g)) <= limit:
            if found := _walk([*path, g], gpus, links, limit):
                return found
    return None


def braces(members) -> str:
    return "{" + ",".join(map(str, members)) + "}"


def judge(gpus: list[int], facts: dict) -> dict:
    """Verdict, why and next for a matrix's facts."""
    links, kind, n = facts["links"], facts["class"], len(gpus)
    nic_words, nic_next = _nics(gpus, facts)
    if n == 1:
        return {
            "verdict": "one GPU: nothing to place on this machine",
            "why": ("The matrix shows a single GPU, so no path between GPUs." + nic_words).strip(),
            "next": nic_next or "run nvidia-smi topo -m outside the job's container or allocation "
            "to see the machine's other GPUs",
        }
    verdict, why, step = _between(gpus, links, kind, facts["peer_access"])
    numa = facts["gpu_numa"]
    if len(set(links.values()) & {"SYS", "SOC"}) == len(set(links.values())) and any(
        numa[str(a)] is not None and numa[str(a)] == numa[str(b)] for a, b in combinations(gpus, 2)
    ):
        why += " GPUs of one NUMA node are SYS apart too: the BIOS or a virtual machine hides how."
    return {"verdict": verdict, "why": why + nic_words, "next": nic_next or step}


def pci_only(judged: dict) -> dict:
    """The verdict where NVLink, if there is any, was left out by the command."""
    return {
        "verdict": "unknown: topo -mp shows PCIe only, and no NVLink where there is one",
        "why": f"Over PCIe alone: {judged['verdict']}."
        + judged["why"].removeprefix("No NVLink."),
        "next": "nvidia-smi topo -m",
    }


def _between(gpus: list[int], links: dict[str, str], kind: str | None, peers: dict[str, str]):
    """(verdict, why, next) for two GPUs or more."""
    n = len(gpus)
    ask = "" if peers else "; nvidia-smi topo -p2p r says whether peer access is on"
    worst = worst_in(gpus, links)
    crossing = [pair for pair, label in links.items() if label == worst]
    tests = f"all_reduce_perf -b 8 -e 8G -f 2 -g {n}"
    if kind == "nvswitch":
        return (
            f"one {n}-GPU job: NVSwitch, every pair over {worst}; two jobs of {n // 2} may take "
            "any sets",
            f"All {len(links)} pairs have the same {worst}, more links to each peer than a GPU "
            "has in all, so a switch joins them and any set of GPUs is as good as another.",
            f"measure it: {tests}",
        )
    if n == 2:
        if kind == "nvlink-pairs":
            return (
                f"one 2-GPU job over NVLink ({worst})",
                f"The two GPUs share {worst}: a bridge, or two GPUs of an NVSwitch machine (the "
                "matrix does not tell them apart).",
                f"measure it: {tests}",
            )
        return (
            f"one 2-GPU job over PCIe ({worst}), no NVLink" if cost(worst) < 5
            else f"one 2-GPU job goes at the speed of {worst}; two 1-GPU jobs wait for nothing",
            f"The two GPUs reach each other {_meaning(worst)}. {_pcie(links.values(), peers)}",
            f"measure it: {tests}{ask}",
        )  # fmt: skip
    size = n // 2
    sets = best_split(gpus, links, size) if size > 1 and n <= 16 else []
    inside = [worst_in(s, links) for s in sets]
    pair_sets = " and ".join(f"{braces(s)} ({w})" for s, w in zip(sets, inside))
    many = f"two {size}-GPU jobs on {pair_sets}" if sets else ""
    hop = f"The slowest of all pairs is {worst} ({_some(crossing)}), {_meaning(worst)}."
    if kind == "nvlink-mesh":
        path, slowest = ring(gpus, links) if n <= 8 else (gpus, worst)
        if nvlinks(slowest):
            return (
                f"one {n}-GPU job, in a ring over {slowest} or better"
                + (f"; or {many}" if many else ""),
                "NVLink joins the GPUs directly, without a switch; a ring over NVLink alone exists "
                f"({'-'.join(map(str, path))}). {hop}"
                + ("" if nvlinks(worst) else " Sets that mix the two sides pass it."),
                f"measure it: {tests}; for part of the GPUs use a set above "
                "(CUDA_VISIBLE_DEVICES)",
            )
        return (
            f"{many} rather than one {n}-GPU job",
            f"NVLink does not reach all GPUs: a ring through all of them passes {slowest}. {hop}",
            _give(sets or [gpus]),
        )
    if kind == "nvlink-pairs":
        many = many if size > 2 else ""
        pairs = [g for g in islands(gpus, links) if len(g) == 2]
        return (
            f"{_numbered(len(pairs), '2-GPU job')} on the bridged pairs "
            + " ".join(braces(p) for p in pairs)
            + (f"; else {many}" if many else "")
            + f"; one {n}-GPU job goes at the speed of {worst}",
            f"NVLink joins pairs only; a job on more GPUs passes PCIe. {hop}",
            _give(pairs),
        )
    if sets and cost(max(inside, key=cost)) < cost(worst):
        return (
            f"{many} rather than one {n}-GPU job at the speed of {worst}",
            f"No NVLink. {hop} {_pcie(links.values(), peers)}",
            _give(sets) + ask,
        )  # fmt: skip
    closer = max((cost(label) for label in links.values() if cost(label) < cost(worst)), default=0)
    groups = [g for g in islands(gpus, links, limit=closer) if len(g) > 1]
    if closer and len(groups) > 1 and sum(map(len, groups)) == n:
        each = " and ".join(f"{len(g)} on {braces(g)} ({worst_in(g, links)})" for g in groups)
        return (
            f"one job of {each.replace(' and ', ', one of ')} rather than one {n}-GPU job at the "
            f"speed of {worst}",
            f"No NVLink. {hop} {_pcie(links.values(), peers)}",
            _give(groups) + ask,
        )
    near = islands(gpus, links, limit=min(cost(label) for label in links.values()))
    near = [g for g in near if len(g) > 1]
    uneven = len(set(links.values())) > 1
    return (
        f"one {n}-GPU job over PCIe at the speed of {worst}"
        + (f"; for fewer GPUs first {' or '.join(braces(g) for g in near)} "
           f"({worst_in(near[0], links)})" if uneven else
           "; any split is as good, and smaller jobs wait less"),
        f"No NVLink. {hop} {_pcie(links.values(), peers)}",
        f"measure it: {tests}{ask}",
    )  # fmt: skip


def _pcie(labels, peers: dict[str, str]) -> str:
    """Whether peer access is on: what topo -p2p says, or why the matrix cannot show it."""
    said = set(peers.values())
    if said == {"OK"}:
        words = "Peer access is on (topo -p2p in the same file)."
    elif said and "OK" not in said:
        words = (f"Peer access is off ({', '.join(sorted(said))} in topo -p2p), so data goes "
                 "through host memory.")  # fmt: skip
    elif said:
        off = [pair for pair, text in peers.items() if text != "OK"]
        words = f"Peer access is off for {_some(off)} (topo -p2p in the same file)."
    else:
        words = ("GeForce cards of the 40 and 50 series have peer access off in the stock driver, "
                 "whatever the matrix shows.")  # fmt: skip
    if {"PIX", "PXB"} & set(labels):
        words += " If a pair behind a PCIe switch hangs, suspect ACS or the IOMMU."
    return words


def _give(sets) -> str:
    """How each job gets its GPUs; the first two sets are enough to see it."""
    return "one set a job: " + ", then ".join(
        "CUDA_VISIBLE_DEVICES=" + ",".join(map(str, s)) for s in list(sets)[:2]
    )


def _meaning(label: str) -> str:
    return "NVLink" if nvlinks(label) else MEANING.get(label, MEANING["N/A"])


def _numbered(count: int, what: str) -> str:
    word = {1: "one", 2: "two", 3: "three", 4: "four"}.get(count, str(count))
    return f"{word} {what}" + "s" * (count != 1)


def _some(pairs: list[str]) -> str:
    return ", ".join(pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")


def _nics(gpus: list[int], facts: dict) -> tuple[str, str]:
    """(words on NICs, what to do first if they are badly placed)."""
    if not facts["nics"]:
        return " No RDMA NIC is shown.", ""
    distance = facts["gpu_nic_distance"]
    if not distance:
        return " How far the NICs are from the GPUs is not shown.", ""
    unknown = [str(g) for g in gpus if str(g) not in distance]
    gpus = [g for g in gpus if str(g) in distance]
    far = [g for g in gpus if RANK.get(distance[str(g)], 6) > GDR_LIMIT]
    users: dict[str, list[int]] = {}
    for g in gpus:
        if g not in far:
            users.setdefault(facts["gpu_nic"][str(g)], []).append(g)
    words = ""
    if users:
        words = " Near NICs (PIX or PXB, where GPUDirect RDMA is on by default): " + ", ".join(
            f"{nic} for GPU {','.join(map(str, of))}" for nic, of in users.items()
        ) + "."  # fmt: skip
    if unknown:
        words += f" The NIC of GPU {','.join(unknown)} is not shown: its row is missing."
    if not far:
        return words, ""
    steps = ", ".join(
        f"{','.join(str(g) for g in far if distance[str(g)] == d)} {d}"
        for d in dict.fromkeys(distance[str(g)] for g in far)
    )
    words += (
        f" GPUs without a near NIC: {steps}; beyond PXB NCCL leaves GPUDirect RDMA off unless a "
        "cloud's topology file or Grace's C2C allows it."
    )
    if not users:
        if all(RANK.get(distance[str(g)], 6) == 5 for g in gpus):
            return words, (
                "move the NIC to the GPUs' socket (or set NPS4 in the BIOS on EPYC); to test, run "
                "all_reduce_perf across two machines with NCCL_NET_GDR_LEVEL=SYS and without"
            )
        best = min(RANK.get(d, 6) for d in distance.values())
        first = [g for g in gpus if RANK.get(distance[str(g)], 6) == best]
        if len(first) < len(gpus):
            words += f" For work over the network take GPU {','.join(map(str, first))} first."
        return words, ""
    return words, ""
