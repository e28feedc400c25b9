"""04.4: where one job of 8 GPUs and two of 4 run best."""

from __future__ import annotations

from ...bench import Bench
from ...verdict import Wrong
from .parts import numbers, tried
from .topologies import GIVEN, GPUS, best, fours_score, hops, renumbered, score, speed

SECONDS = 20.0  # for all machines together; trying every ring takes one
SEEDS = (11, 12)  # of the numberings that are not given


def judge_placing(bench: Bench, answer) -> str:
    machines = [(name, "as given", links) for name, links in GIVEN.items()]
    for seed in SEEDS:
        machines += [(name, "numbered otherwise", renumbered(links, seed)) for name, links in
                     GIVEN.items()]  # fmt: skip
    cases = [(dict(links),) for _, _, links in machines]
    found = tried(bench, answer, cases, SECONDS, "8 GPUs make 2520 different rings (7! / 2), and "
                  "there are 35 ways to share them out: trying all takes a second")  # fmt: skip
    for (name, how, links), f in zip(machines, found):
        where = f"{name}, {how}"
        if "error" in f:
            raise Wrong(f"{where}: {f['error']}")
        _judge_one(where, links, f["got"], how != "as given")
    return (f"{len(machines)} machines (three, and each with other numbers): no ring of 8 and no "
            "two of 4 are better than yours")  # fmt: skip


def _ring(where, what, value, size) -> list[int]:
    ring = numbers(value)
    if ring is None or not all(g == int(g) for g in ring):
        raise Wrong(f"{where}: {what} is {value!r:.60}, not a list of {size} GPU "
                    "numbers")  # fmt: skip
    ring = [int(g) for g in ring]
    if len(ring) == size + 1 and ring[0] == ring[-1]:
        raise Wrong(f"{where}: {what} names GPU {ring[0]} at both ends; name each GPU once, the "
                    "ring is closed by itself")  # fmt: skip
    if len(ring) != size or len(set(ring)) != size or not set(ring) <= set(GPUS):
        raise Wrong(f"{where}: {what} is {ring}; it must name {size} different GPUs of 0 to 7")
    return ring


def _judge_one(where, links, got, hidden) -> None:
    try:
        eight, fours = got["eight"], list(got["fours"])
    except (TypeError, KeyError, IndexError):
        raise Wrong(f'{where}: got {got!r:.60}; return {{"eight": [8 GPUs], "fours": [[4 GPUs], '
                    "[4 GPUs]]}") from None  # fmt: skip
    eight = _ring(where, "eight", eight, 8)
    if len(fours) != 2:
        raise Wrong(f'{where}: "fours" has {len(fours)} rings; there are two jobs')
    fours = [_ring(where, f"job {i + 1} of fours", ring, 4) for i, ring in enumerate(fours)]
    both = sorted(set(fours[0]) & set(fours[1]))
    if both:
        raise Wrong(f"{where}: GPU {', '.join(map(str, both))} is in both jobs of fours; they run "
                    "at the same time, each on GPUs of its own")  # fmt: skip
    known = best(links)
    if score(links, eight) < score(links, known["eight"]):
        _say(f"{where}, one job of 8, ring {eight}", links, eight, known["eight"], hidden)
    if fours_score(links, fours) < fours_score(links, known["fours"]):
        mine = min(fours, key=lambda r: score(links, r))
        aim = min(known["fours"], key=lambda r: score(links, r))
        if score(links, mine) == score(links, aim):
            mine, aim = (max(r, key=lambda r: score(links, r)) for r in (fours, known["fours"]))
        inside = max((r for r in _orders(mine)), key=lambda r: score(links, r))
        more = ""
        if score(links, inside) > score(links, mine):
            more = f" In another order these four do better: {inside}."
        elif score(links, inside) < score(links, aim):
            more = " No order of these four does better: share the eight out otherwise."
        _say(f"{where}, two jobs of 4, ring {mine}", links, mine, aim, hidden, more)


def _orders(ring):
    from .topologies import rings

    return rings(sorted(ring))


def _say(where, links, ring, aim, hidden, more="") -> None:
    round_ = hops(links, ring)
    a, b, slowest = min(round_, key=lambda h: speed(h[2]))
    target = min((h[2] for h in hops(links, aim)), key=speed)
    number = sum(h[2] == slowest for h in round_)
    if slowest == target:
        least = sum(h[2] == target for h in hops(links, aim))
        words = (f"{number} hops are {slowest}, and {least} are enough: such hops go through the "
                 "processors, and share them")  # fmt: skip
    else:
        words = f"its slowest hop is {slowest}, from GPU {a} to GPU {b}"
        if number == 1 and (a, b) == round_[-1][:2]:
            words += ", the one from the last back to the first, which a ring has too"
        words += f". A ring is as quick as that hop, and there is one with {target} as its slowest"
        if speed(slowest) == min(map(speed, links.values())) and number == len(ring):
            words += ". Is your order of the links upside down?"
    if hidden:
        words += ". With the numbers as given it was right: work it out from `links` each time"
    raise Wrong(f"{where}: {words}.{more}".replace("?.", "?"))
