"""The three machines of 04.4: which link joins each two of 8 GPUs, in nvidia-smi's words.

Made here from how such machines are wired, with a numbering of our own: no machine's output.
"""

from __future__ import annotations

import itertools
import random

GPUS = range(8)
SHARED = ("PHB", "NODE", "SYS")  # through the processor: all that crosses shares it


def speed(link: str) -> int:
    """The order of links: NV# by its number, then PIX, PXB, PHB, NODE, SYS. Larger is quicker."""
    if link.startswith("NV"):
        return 4 + int(link[2:])
    return ("SYS", "NODE", "PHB", "PXB", "PIX").index(link)


def between(links: dict[str, str], a: int, b: int) -> str:
    """The link of two GPUs, in either order."""
    return links[f"{min(a, b)}-{max(a, b)}"]


def hops(links: dict[str, str], ring) -> list[tuple[int, int, str]]:
    """(from, to, link) all round the ring, the hop from the last GPU to the first one too."""
    ring = list(ring)
    return [(a, b, between(links, a, b)) for a, b in zip(ring, ring[1:] + ring[:1])]


def score(links: dict[str, str], ring) -> tuple[int, int]:
    """How good a ring is, to be compared: its slowest hop's speed; then, where that hop goes
    through a processor, as few such hops as possible, since they share it."""
    names = [link for _, _, link in hops(links, ring)]
    slowest = min(names, key=speed)
    return speed(slowest), -names.count(slowest) if slowest in SHARED else 0


def rings(gpus):
    """All rings of some GPUs, each once: 3 of 4 GPUs, 2520 of 8."""
    first, *rest = gpus
    return ([first, *p] for p in itertools.permutations(rest) if p[0] < p[-1])


def best(links: dict[str, str]) -> dict:
    """The best {"eight": ring, "fours": [ring, ring]}, by trying all. Of the two small rings the
    worse one counts first."""
    eight = max(rings(GPUS), key=lambda r: score(links, r))
    splits = []
    for others in itertools.combinations(range(1, 8), 3):
        halves = ([0, *others], [g for g in GPUS if g not in (0, *others)])
        splits.append([max(rings(h), key=lambda r: score(links, r)) for h in halves])
    return {"eight": eight, "fours": max(splits, key=lambda f: fours_score(links, f))}


def fours_score(links, fours) -> list:
    return sorted(score(links, ring) for ring in fours)


def _make(link_of) -> dict[str, str]:
    return {f"{a}-{b}": link_of(a, b) for a, b in itertools.combinations(GPUS, 2)}


def cube_mesh() -> dict[str, str]:
    """Six NVLinks a GPU: all of its own four, one of the other four; two of these four doubled.
    No link to the three others: through both processors."""
    near, far = [0, 5, 2, 7], [4, 6, 1, 3]  # near[i] is joined to far[i]
    ring = near + far[::-1]
    double = {frozenset(pair) for pair in zip(ring, ring[1:] + ring[:1])}
    cross = {frozenset(pair) for pair in zip(near, far)}

    def link(a, b):
        pair = frozenset((a, b))
        if pair in double:
            return "NV2"
        return "NV1" if pair in cross or (a in near) == (b in near) else "SYS"

    return _make(link)


def bridged_pairs() -> dict[str, str]:
    """PCIe cards in a two-socket server: bridges over pairs; two cards a host bridge."""
    socket = [(g % 2) for g in GPUS]
    bridge = [{0, 4}, {2, 6}, {1, 7}, {3, 5}]
    host_bridge = [{0, 2}, {4, 6}, {1, 3}, {5, 7}]

    def link(a, b):
        if {a, b} in bridge:
            return "NV4"
        if {a, b} in host_bridge:
            return "PHB"
        return "NODE" if socket[a] == socket[b] else "SYS"

    return _make(link)


def nvswitch() -> dict[str, str]:
    """Every GPU at full speed to every other, through the switches."""
    return _make(lambda a, b: "NV18")


GIVEN = {"cube mesh": cube_mesh(), "bridged pairs": bridged_pairs(), "nvswitch": nvswitch()}


def renumbered(links: dict[str, str], seed: int) -> dict[str, str]:
    """The same machine, its GPUs numbered otherwise."""
    name = list(GPUS)
    random.Random(seed).shuffle(name)
    return _make(lambda a, b: between(links, name[a], name[b]))


def table(links: dict[str, str]) -> str:
    """The matrix as nvidia-smi topo -m shows it."""
    rows = ["      " + "".join(f"GPU{g:<4}" for g in GPUS)]
    for a in GPUS:
        row = ["X" if a == b else between(links, a, b) for b in GPUS]
        rows.append(f"GPU{a}  " + "".join(f"{link:<7}" for link in row).rstrip())
    return "\n".join(rows)
