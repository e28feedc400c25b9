"""Bandwidth reports for 04.5: a claim, and an output in the form of nccl-tests.

Made up: hosts and figures are invented, times follow from alpha, beta and a few percent of noise.
The form (device lines, columns, last lines) is that of nccl-tests, so that an answer reads real
outputs too.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

COLUMNS = """#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)"""  # noqa: E501
CARDS = {"H100": "NVIDIA H100 80GB HBM3", "A100": "NVIDIA A100-SXM4-80GB",
         "V100": "Tesla V100-SXM2-32GB", "L4": "NVIDIA L4"}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A claim about a job and the output that it stands on."""

    name: str
    claim: dict  # {"ranks", "nodes", "busbw" (GB/s)}
    text: str
    jobs: tuple  # ((ranks, nodes), …), what really ran, sorted
    supported: bool
    why: str  # what an answer that gets it wrong is told


def job_lines(hosts, card, busbw, rng, old=False, wrong=(0, 0), alpha=12e-6, in_place=1.0,
              last=1.0) -> list[str]:  # fmt: skip
    """One job's output. `hosts`: one for each rank. `busbw`: what large sizes come near to, GB/s.
    `old`: as before there were groups. `wrong`: values that are wrong in the last row, out of place
    and in place. `in_place`, `last`: how quick the in-place half and the last row are beside the
    others."""
    n = len(hosts)
    head = [f"# nThread 1 nGpus 1 minBytes 8388608 maxBytes 8589934592 step: 4(factor) warmup "
            f"iters: 5 iters: 20 agg iters: 1 validation: 1{'' if old else ' graph: 0'}", "#",
            "# Using devices"]  # fmt: skip
    pid, local = rng.randrange(1000, 90000), {}
    for rank, host in enumerate(hosts):
        local[host] = local.get(host, -1) + 1
        bus, pid = f"0x{27 + 24 * local[host]:02x}", pid + rng.randrange(1, 4)
        group = f"Pid {pid:6d} on {host:>10} device" if old else (
            f"Group  0 Pid {pid:6d} on {host:>10} device")  # fmt: skip
        head.append(f"#  Rank {rank:2d} {group} {local[host]:2d} [{bus}] {CARDS[card]}")
    rows, seen = [], []
    for size in [8 << 20 << 2 * k for k in range(6)]:
        times = []
        for inside in (False, True):
            seconds = 2 * max(n - 1, 1) * alpha + size / 1e9 / busbw * (2 * (n - 1) / n or 1)
            seconds *= 1 + abs(rng.gauss(0, 0.01))
            seconds /= (in_place if inside else 1) * (last if size == 8 << 30 else 1)
            if n == 1 and inside:
                seconds = rng.uniform(0.29e-6, 0.33e-6)  # nothing to do
            algbw = size / seconds / 1e9
            times.append((seconds * 1e6, algbw, algbw * 2 * (n - 1) / n))
            seen.append(times[-1][2])
        bad = wrong if size == 8 << 30 else (0, 0)
        rows.append(f"{size:13d} {size // 4:13d}     float     sum      -1 " + " ".join(
            f"{t:8.1f} {a:7.2f} {b:7.2f} {w:7d}" for (t, a, b), w in zip(times, bad)))  # fmt: skip
    end = [f"# Out of bounds values : {sum(wrong)} {'FAILED' if sum(wrong) else 'OK'}",
           f"# Avg bus bandwidth    : {sum(seen) / len(seen):.4f}", "#"]  # fmt: skip
    return [*head, *COLUMNS.split("\n"), *rows, *end]


def interleaved(outputs, rng) -> list[str]:
    """Several jobs' lines as one terminal shows them: each in its order, mixed among each other."""
    left, lines = [list(o) for o in outputs], []
    while any(left):
        pick = rng.choice([o for o in left if o])
        take = rng.randrange(1, 3)
        lines += pick[:take]
        del pick[:take]
    return lines


def top(text: str) -> float:
    """The largest busbw in the tables, GB/s."""
    rows = [line.split() for line in text.splitlines() if line[:1] == " "]
    return max(float(row[at]) for row in rows for at in (-6, -2))


def _three(value: float) -> float:
    """To three digits, as people quote it."""
    return float(f"{value:.3g}")


def _hosts(*each) -> list[str]:
    return [host for host, ranks in each for _ in range(ranks)]


def reports(seed: int = 4) -> list[Report]:
    """All reports, in the order in which an answer is tried."""
    rng, other = random.Random(seed), seed % 2  # what cannot be in one report is in the other
    a, b, c, d = (f"{tree}{rng.randrange(10, 99)}" for tree in ("birch", "alder", "maple", "rowan"))

    def one(*args, **options):
        return job_lines(*args, rng, **options)

    made = []

    def add(name, claimed, jobs, lines, supported, why, busbw=None, times=1.0):
        text = "\n".join(lines) + "\n"
        busbw = busbw or _three(times * top(text))
        claim = {"ranks": claimed[0], "nodes": claimed[1], "busbw": busbw}
        made.append(Report(name, claim, text, tuple(sorted(jobs)), supported, why))

    two = [_hosts((a, 8)), _hosts((b, 8))]
    add("an honest job on two nodes", (16, 2), [(16, 2)],
        one(_hosts((a, 8), (b, 8)), "H100", 362), True,
        "ranks 0 to 15 stand there once each: one job, over both nodes")
    add("two single-node runs, one after the other", (16, 2), [(8, 1), (8, 1)],
        one(two[0], "H100", 481) + one(two[1], "H100", 479), False,
        "Rank 0 stands there twice: two jobs, and nothing ever crossed the network between them")
    add("two single-node runs, their lines mixed", (16, 2), [(8, 1), (8, 1)],
        interleaved([one(two[0], "H100", 480), one(two[1], "H100", 482)], rng), False,
        "Rank 0 stands there twice: two jobs at the same time, their lines mixed")
    add("above the line rate of its NICs, inside one node", (8, 1), [(8, 1)],
        one(two[0], "H100", 478), True,
        "one job inside one node: its bytes go over NVLink and its switches, and the NICs' line "
        "rate is no limit to it")
    add("one GPU on each of two hosts", (2, 2), [(1, 1), (1, 1)],
        interleaved([one([c], "V100", 240, old=True), one([d], "V100", 236, old=True)], rng),
        False, "Rank 0 stands there twice, on two hosts: two jobs of one rank, whose busbw is 0",
        239.0)
    add("sixteen runs of one rank", (16, 2), [(1, 1)] * 16,
        interleaved([one([h], "A100", 700) for h in _hosts((a, 8), (b, 8))], rng), False,
        "Rank 0 stands there sixteen times: no rank knew of another", 698.0)
    add("less than claimed", (8, 2), [(8, 2)], one(_hosts((c, 4), (d, 4)), "A100", 21.3), False,
        "one job as claimed, but no row of the table reaches the busbw that is claimed",
        **({"times": 1.06} if other else {"busbw": 170.0}))  # fmt: skip
    add("one node in place of two", (8, 2), [(8, 1)], one(two[1], "H100", 476), False,
        "one job of 8 ranks, as claimed, but on one node: nothing crossed the network")
    add("half of the ranks", (16, 2), [(8, 2)], one(_hosts((c, 4), (d, 4)), "H100", 184), False,
        "one job over two nodes, as claimed, but of 8 ranks, not of 16")
    add("wrong values", (16, 2), [(16, 2)],
        one(_hosts((a, 8), (b, 8)), "H100", 371, wrong=(2048, 0) if other else (0, 2048)), False,
        "the column #wrong is not 0: a sum that is wrong has no bandwidth")
    add("three nodes, not equally full", (5, 3), [(5, 3)],
        one(_hosts((b, 2), (c, 1), (d, 2)), "L4", 2.9, old=True, alpha=40e-6,
            in_place=0.9 if other else 1.1), True,
        "ranks 0 to 4 stand there once each, on three hosts: one job")
    add("a job of two nodes and one of a single node", (16, 2), [(8, 1), (16, 2)],
        one(_hosts((c, 8), (d, 8)), "H100", 188) + one(two[0], "H100", 477), False,
        "two jobs, and the figure is the single node's")
    add("an honest slow one", (16, 2), [(16, 2)],
        one(_hosts((a, 8), (b, 8)), "A100", 1.1, alpha=30e-6, last=0.9), True,
        "one job on two nodes reaches what is claimed, little as it is", times=1.012)
    return made


def examples() -> list[Report]:
    """Two small ones to look at in the lab; not among those that are tried."""
    rng = random.Random(2)
    honest = job_lines(_hosts(("pine01", 2), ("pine02", 2)), "L4", 2.8, rng)
    apart = interleaved([job_lines(_hosts((host, 2)), "L4", 9.5, rng) for host in
                         ("pine01", "pine02")], rng)  # fmt: skip
    found = []
    for name, lines, jobs in (("one job", honest, ((4, 2),)), ("two jobs", apart,
                                                               ((2, 1), (2, 1)))):
        text = "\n".join(lines) + "\n"
        claim = {"ranks": 4, "nodes": 2, "busbw": _three(top(text))}
        found.append(Report(name, claim, text, jobs, len(jobs) == 1, ""))
    return found
