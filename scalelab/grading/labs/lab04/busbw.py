"""04.1: busbw from a timing, by the formula, and against bytes that real ranks have sent."""

from __future__ import annotations

from ....measure.cost import BUS_FACTORS, bus_factor
from ... import count
from ...bench import Bench, raise_if_broken
from ...verdict import Wrong
from .parts import close, numbers, tried

WORLDS = (1, 2, 3, 4, 8, 16)
TIMINGS = ((1 << 26, 0.0157), (1_000_000_000, 0.02), (4096, 38e-6))

# What people take instead of the factor: (its value, what to say). Looked through in this order.
MISTAKES = {
    "all-reduce": [
        (lambda n: 1.0, "this is algbw again: each byte crosses the network nearly twice, once to "
                        "be summed and once to be handed round"),
        (lambda n: (n - 1) / n, "half of it is missing: (n-1)/n is a reduce-scatter; an all-reduce "
                                "hands the sums round as well"),
        (lambda n: 2.0, "n stands where n-1 belongs: no rank sends its own last part to itself, so "
                        "of n parts n-1 go out, twice"),
        (lambda n: n / (2 * (n - 1)) if n > 1 else 0.0,
         "the factor is upside down: n/(2(n-1)) in place of 2(n-1)/n"),
        (lambda n: 2.0 * (n - 1), "not divided by n: a rank sends 2(n-1) parts, each of bytes/n"),
        (lambda n: (n - 1.0), "n-1 is what a rank sends that sends its whole buffer to everybody; "
                              "in a ring it sends 2(n-1) parts of bytes/n"),
        (lambda n: float(n), "busbw is what one rank's link carries, not all links together"),
        (lambda n: 2 * (n - 1.0) / n * n, "busbw is what one rank's link carries, not all links "
                                          "together"),
        (lambda n: 2 * n / (n - 1) if n > 1 else 0.0, "n and n-1 have changed places"),
        (lambda n: 2 * (n + 1) / n, "n+1 stands where n-1 belongs"),
    ],
    "half": [
        (lambda n: 2 * (n - 1) / n, "2(n-1)/n is the factor of all-reduce; here each part is sent "
                                    "n-1 times and not handed round again"),
        (lambda n: 1.0, "this is algbw again: each rank holds one of the n parts already, or keeps "
                        "it, so (n-1)/n of the bytes cross"),
        (lambda n: (n - 1.0), "bytes is taken for one rank's part; as in nccl-tests it is the "
                              "whole, all n parts together"),
        (lambda n: n / (n - 1) if n > 1 else 0.0, "the factor is upside down"),
        (lambda n: float(n), "bytes is taken for one rank's part; it is the whole, n parts"),
        (lambda n: (n - 1) / n / 2, "half of it is missing"),
    ],
    "whole": [
        (lambda n: 2 * (n - 1) / n, "2(n-1)/n is the factor of all-reduce; here all bytes go over "
                                    "a link once, whatever n is"),
        (lambda n: (n - 1) / n, "(n-1)/n is the factor of all-gather and reduce-scatter; here all "
                                "bytes go over a link once, whatever n is"),
        (lambda n: n - 1.0, "a root that sends to each rank in turn sends n-1 times; passed on "
                            "from rank to rank, all bytes go over a link once"),
        (lambda n: 2.0, "all bytes go over a link once: sent by one, received by the next"),
    ],
}  # fmt: skip
KIND = {"all-reduce": "all-reduce", "all-gather": "half", "reduce-scatter": "half",
        "broadcast": "whole", "send-recv": "whole"}  # fmt: skip

UNITS = [
    (1e9 / 2**30, "that is GiB/s, of 2**30; these are GB/s, of 1e9"),
    (8.0, "that is Gbit/s; a byte is 8 bits, and these are GB/s"),
    (1 / 8, "divided by 8: bytes are bytes already, it was bits that had to be divided"),
    (1e9, "that is bytes a second; divide by 1e9"),
    (1e3, "1000 times too much: MB/s? These are GB/s, of 1e9"),
    (1e-6, "a million times too little: the time is in seconds, not in microseconds"),
    (1e6, "a million times too much: the time is in seconds, not in microseconds"),
    (1e-3, "1000 times too little: the time is in seconds"),
]


def _cases():
    """(op, bytes, seconds, world_size). What one rank broadcasts to itself has no sense, and
    nccl-tests' figure for it none either: not asked."""
    return [(op, size, seconds, n) for op in BUS_FACTORS for n in WORLDS
            for size, seconds in TIMINGS if n > 1 or KIND[op] != "whole"]  # fmt: skip


def judge_busbw(bench: Bench, answer) -> str:
    cases = _cases()
    found = tried(bench, answer, cases)
    for op in BUS_FACTORS:
        _judge_op(op, [(c, f) for c, f in zip(cases, found) if c[0] == op])
    for n in (2, 3):
        _judge_real(bench, answer, n)
    return (f"{len(cases)} timings by the formula; on 2 and 3 real ranks rings of sends timed and "
            "their bytes counted: busbw times seconds is what each rank has sent")  # fmt: skip


def _judge_op(op, pairs) -> None:
    wrong = []
    for (_, size, seconds, n), f in pairs:
        where = f"{op}, {size} bytes in {seconds:g} s, {n} rank{'s' * (n > 1)}"
        algbw = size / seconds / 1e9
        want = algbw * bus_factor(op, n)
        if "error" in f:
            if n == 1 and f["kind"] == "ZeroDivisionError":
                raise Wrong(f"{where}: {f['error']}. One rank sends nothing: its busbw is 0")
            raise Wrong(f"{where}: {f['error']}")
        got = numbers(f["got"], 2)
        if got is None:
            raise Wrong(f"{where}: got {f['got']!r:.60}; return (algbw, busbw), two numbers in "
                        "GB/s")  # fmt: skip
        if close(got[0], want) and close(got[1], algbw) and not close(want, algbw):
            raise Wrong(f"{where}: these two have changed places; algbw comes first")
        if not close(got[0], algbw):
            raise Wrong(f"{where}: algbw is {algbw:.6g} GB/s, not {got[0]:.6g}: "
                        f"{_unit(got[0] / algbw, n)}")  # fmt: skip
        if not close(got[1], want):
            wrong.append((where, n, algbw, got[1], want))
    if not wrong:
        return
    for factor, words in MISTAKES[KIND[op]]:
        if all(close(got, algbw * factor(n)) for _, n, algbw, got, _ in wrong if n > 1) and any(
            n > 1 for _, n, *_ in wrong
        ):
            where, _, _, got, want = next(w for w in wrong if w[1] > 1)
            raise Wrong(f"{where}: busbw is {want:.6g} GB/s, not {got:.6g}: {words}")
    where, n, algbw, got, want = wrong[0]
    if n == 1:
        raise Wrong(f"{where}: busbw is 0, not {got:.6g}: one rank sends nothing, however quick it "
                    "is")  # fmt: skip
    for unit, words in UNITS:
        if close(got / want, unit):
            raise Wrong(f"{where}: busbw is {want:.6g} GB/s, not {got:.6g}: {words}")
    raise Wrong(f"{where}: busbw is {want:.6g} GB/s, not {got:.6g}, with algbw {algbw:.6g}. What "
                "share of the bytes does the busiest rank send?")  # fmt: skip


def _unit(ratio, n) -> str:
    for unit, words in UNITS:
        if close(ratio, unit):
            return words
    if n > 1 and close(ratio, n):
        return ("multiplied by the number of ranks; bytes is the size as nccl-tests gives it, and "
                "algbw is bytes / seconds whatever the operation")  # fmt: skip
    if n > 1 and close(ratio, 1 / n):
        return "divided by the number of ranks; algbw is bytes / seconds, whatever n is"
    if close(ratio, 1, 0.01):
        return "nearly; leave out the rounding"
    return "algbw is bytes / seconds, in units of 1e9"


def _ring(rank, n, parts, first, add):
    """n-1 rounds: send the part `first` to the right, receive the one before it, add or keep."""
    import torch
    import torch.distributed as dist

    for k in range(n - 1):
        out, come = (first - k) % n, (first - k - 1) % n
        got = torch.empty_like(parts[come])
        handle = dist.isend(parts[out].clone(), (rank + 1) % n)
        dist.recv(got, (rank - 1) % n)
        handle.wait()
        parts[come].copy_(parts[come] + got if add else got)


def _measured(rank, n, answer, op, elements):
    """Time `op` as a ring of sends and ask the answer for its busbw; the bench counts the sends."""
    import time

    import torch
    import torch.distributed as dist

    x = torch.full([elements], float(rank + 1))
    parts = list(x.chunk(n))  # n divides
    dist.barrier()
    began = time.perf_counter()
    if op in ("all-reduce", "reduce-scatter"):
        _ring(rank, n, parts, rank, add=True)
    if op == "all-reduce":
        _ring(rank, n, parts, rank + 1, add=False)
    if op == "all-gather":
        _ring(rank, n, parts, rank, add=False)
    if op == "broadcast":  # passed on from rank to rank
        if rank > 0:
            dist.recv(x, rank - 1)
        if rank < n - 1:
            dist.send(x, rank + 1)
    seconds = time.perf_counter() - began
    total = n * (n + 1) / 2
    right = {"all-reduce": x.eq(total).all(), "all-gather": all(
        p.eq(r + 1).all() for r, p in enumerate(parts)), "broadcast": x.eq(1).all(),
        "reduce-scatter": parts[(rank + 1) % n].eq(total).all()}  # fmt: skip
    size = x.numel() * x.element_size()
    return {"seconds": seconds, "bytes": size, "right": bool(right[op]),
            "got": numbers(answer(op, size, seconds, n), 2)}  # fmt: skip


def _judge_real(bench, answer, n) -> None:
    for op in ("all-reduce", "all-gather", "broadcast") if n == 3 else ("all-reduce",):
        found = bench.ranks(n, _measured, answer, op, n * 120_000)
        raise_if_broken(found)
        if not all(f.value["right"] for f in found):
            raise RuntimeError(f"the check's own ring of sends is wrong: {op} on {n} ranks")
        sent = max(count.sent(f.calls) for f in found)
        for f in found:
            v = f.value
            moved = v["got"][1] * 1e9 * v["seconds"] if v["got"] else 0.0
            if not close(moved, sent):
                raise Wrong(f"{op} of {v['bytes']} bytes on {n} real ranks, {v['seconds']:.4f} s: "
                            f"your busbw times seconds is {moved:.0f} bytes, and the busiest rank "
                            f"has sent {sent}")  # fmt: skip
