"""04.3: the time of a DDP step, predicted from its parts and a link's alpha and beta."""

from __future__ import annotations

from ....measure import cost
from ....measure import step as measured_step
from ...bench import Bench
from ...verdict import Wrong
from .live import live_case
from .parts import close, number, tried

WITHIN = 0.15
MIB = 1 << 20
LINKS = {  # alpha (s), beta (bytes/s)
    "100 mbit": (90e-6, 0.0118e9),
    "1 gbit": (60e-6, 0.118e9),
    "10 gbit": (25e-6, 1.1e9),
    "5 ms away": (5.1e-3, 0.1e9),
    "an NVLink": (9e-6, 22e9),
}
DDP = (1 * MIB, 25 * MIB, 25 * MIB, 9 * MIB)  # the first one is small: it is ready early
CASES = (  # forward, backward, update (s), buckets (bytes, in order of readiness), n, link, k
    (0.05, 0.10, 0.01, DDP, 4, "1 gbit", 1),
    (0.05, 0.10, 0.01, DDP, 2, "1 gbit", 1),
    (0.05, 0.10, 0.01, DDP, 4, "1 gbit", 4),
    (0.30, 0.60, 0.03, DDP, 4, "10 gbit", 1),
    (0.30, 0.60, 0.03, DDP, 8, "10 gbit", 8),
    (0.12, 0.25, 0.12, DDP, 8, "an NVLink", 1),
    (0.02, 0.04, 0.09, (MIB, 2 * MIB, 3 * MIB), 8, "5 ms away", 1),
    (0.02, 0.04, 0.005, (MIB // 4,) * 6, 4, "5 ms away", 2),
    (0.40, 0.80, 0.02, (MIB, 25 * MIB, 80 * MIB), 2, "1 gbit", 1),
    (0.40, 0.80, 0.02, (80 * MIB, 25 * MIB, MIB), 2, "1 gbit", 1),
    (0.10, 0.20, 0.01, (MIB, 2 * MIB), 3, "100 mbit", 2),
    (0.15, 0.60, 0.01, (3 * MIB,) * 12, 4, "1 gbit", 1),  # nearly all of it can be hidden
    (0.02, 0.04, 0.08, (2 * MIB,) * 2, 2, "10 gbit", 4),
    (0.05, 1.40, 0.01, (4 * MIB,) * 10 + (40 * MIB,), 2, "1 gbit", 1),  # the large one is last
    (0.05, 0.10, 0.01, DDP, 1, "1 gbit", 2),
)


def ring(nbytes, n, alpha, beta) -> float:
    """Seconds of a ring all-reduce."""
    return cost.seconds("ring", nbytes, n, alpha, beta)


def step_time(forward, backward, update, buckets, world_size, alpha, beta, micro_batches,
              price=ring, begin="share", one_bucket=False) -> float:  # fmt: skip
    """Seconds of one step: `right`, spelt out so that `price` (of an all-reduce), `begin` (when a
    bucket is ready) and `one_bucket` can be wrong in it."""
    if one_bucket:
        buckets = (sum(buckets),)
    done, end = 0, 0.0
    for i, nbytes in enumerate(buckets, 1):
        done += nbytes
        ready = {"share": backward * done / sum(buckets), "equal": backward * i / len(buckets),
                 "start": 0.0, "forward": -forward}[begin]  # fmt: skip
        end = max(ready, end if i > 1 else ready) + price(nbytes, world_size, alpha, beta)
    quiet = (micro_batches - 1) * (forward + backward)
    return quiet + forward + max(backward, end) + update


def right(case) -> float:
    """What scalelab.measure predicts for a case."""
    forward, backward, update, buckets, n, alpha, beta, micro_batches = case
    found = measured_step.predict(
        forward, backward, update, buckets, lambda b: ring(b, n, alpha, beta), micro_batches
    )
    return found.seconds


def _comm(case) -> float:
    return sum(ring(b, *case[4:7]) for b in case[3])


def _variant(**changes):
    return lambda *case: step_time(*case, **changes)


def _each_micro(f, b, u, buckets, n, alpha, beta, k):
    one = step_time(f, b, 0, buckets, n, alpha, beta, 1)
    return k * one + u


def _parallel(f, b, u, buckets, n, alpha, beta, k):
    total, done, end = sum(buckets), 0, b
    for nbytes in buckets:
        done += nbytes
        end = max(end, b * done / total + ring(nbytes, n, alpha, beta))
    return (k - 1) * (f + b) + f + end + u


def _update_hides(f, b, u, *rest):
    return max(step_time(f, b, 0, *rest), rest[-1] * (f + b) + u)


MISTAKES = [  # (what the answer would give, what to say); looked through in this order
    (lambda *c: c[7] * (c[0] + c[1]) + c[2], "the network costs nothing here: what of the "
     "all-reduce ends after backward has ended?"),
    (lambda *c: c[7] * (c[0] + c[1]) + c[2] + _comm(c), "backward and all-reduce one after the "
     "other: DDP all-reduces a bucket while backward works on the next ones, so some of it is "
     "hidden"),
    (lambda *c: c[7] * (c[0] + c[1]) + c[2] + c[7] * _comm(c), "backward and all-reduce one after "
     "the other, and that in each micro-batch: they overlap, and only the last micro-batch "
     "synchronises"),
    (_each_micro, "every micro-batch pays for the network; under no_sync only the last one "
     "does"),
    (_variant(begin="start"), "the all-reduces start with backward; a bucket must wait until its "
     "gradients are there: its share of backward, by bytes, together with those before it"),
    (_variant(begin="forward"), "forward hides communication too; there are no gradients before "
     "backward has begun"),
    (lambda *c: (c[7] - 1) * (c[0] + c[1]) + max(c[0] + c[1], _comm(c)) + c[2],
     "forward hides communication too; there are no gradients before backward has begun"),
    (lambda *c: c[7] * c[0] + max(c[7] * c[1], _comm(c)) + c[2], "the backward of all "
     "micro-batches hides communication; only the last one's does, the others are under no_sync"),
    (_variant(one_bucket=True), "all gradients in one bucket: it is ready only when backward ends, "
     "and nothing overlaps. Go through the buckets"),
    (_parallel, "all buckets at once, each as if it had the link to itself: they go one after "
     "another, so a bucket starts when it is ready and the one before it has ended"),
    (_variant(begin="equal"), "every bucket gets an equal share of backward; the share goes by "
     "bytes"),
    (lambda *c: step_time(*c[:3], c[3][::-1], *c[4:]), "the buckets from the last to the first; "
     "they are in the order in which backward fills them already"),
    (_update_hides, "the update hides communication too; it needs all gradients, so it begins when "
     "backward and the last all-reduce have both ended"),
    (lambda *c: step_time(*c) - c[2], "the optimizer's update is missing"),
    (lambda *c: step_time(*c) + (c[7] - 1) * c[2], "one update in a step, not one for each "
     "micro-batch"),
    (lambda *c: step_time(*c[:7], 1), "micro_batches is not used: k-1 times forward and backward "
     "come before the last one"),
    (lambda *c: step_time(c[0] / c[7], c[1] / c[7], *c[2:]), "forward and backward are of one "
     "micro-batch already: do not divide them"),
    (lambda *c: step_time(*c) - c[0] * c[7], "forward is missing"),
    (_variant(price=lambda s, n, a, b: s / b if n > 1 else 0.0), "an all-reduce is more than "
     "bytes / beta: 2(n-1) alpha + 2(n-1)/n bytes / beta"),
    (_variant(price=lambda s, n, a, b: s / b), "an all-reduce is more than bytes / beta: "
     "2(n-1) alpha + 2(n-1)/n bytes / beta"),
    (_variant(price=lambda s, n, a, b: a + s / b), "alpha + bytes / beta is one message from one "
     "rank to another; a ring all-reduce is 2(n-1) alpha + 2(n-1)/n bytes / beta"),
    (_variant(price=lambda s, n, a, b: 2 * (n - 1) * a + s / b), "the bytes lack the factor "
     "2(n-1)/n of an all-reduce"),
    (_variant(price=lambda s, n, a, b: 2 * (n - 1) * a + 2 * s / b), "the bytes' factor is "
     "2(n-1)/n, not 2"),
    (_variant(price=lambda s, n, a, b: ring(s, n, a, b) / 2), "an all-reduce goes round the ring "
     "twice: 2(n-1) messages, 2(n-1)/n of the bytes"),
    (_variant(price=lambda s, n, a, b: ring(s, n, 0, b)), "alpha is forgotten: on a far link it "
     "is most of the time, 2(n-1) alpha a bucket"),
    (_variant(price=lambda s, n, a, b: ring(s, n, a / (2 * (n - 1) or 1), b)), "one alpha a "
     "bucket; a ring all-reduce sends 2(n-1) messages one after another"),
    (_variant(price=lambda s, n, a, b: 2 * (n - 1) * (a + s / b)), "each of the 2(n-1) messages "
     "has bytes/n, not all the bytes"),
    (_variant(price=lambda s, n, a, b: ring(8 * s, n, a, b)), "bytes are not bits: beta is in "
     "bytes a second"),
    (lambda *c: step_time(*c[:3], (8 * sum(c[3]),), *c[4:]), "bytes are not bits: beta is in bytes "
     "a second"),
]  # fmt: skip


def judge_step(bench: Bench, answer) -> str:
    cases = [(*c[:3], list(c[3]), c[4], *LINKS[c[5]], c[6]) for c in CASES]
    found = tried(bench, answer, cases)
    bad = []
    for case, f, (*_, link, _) in zip(cases, found, CASES):
        got = _time(f, _where(case, link))
        if not close(got, right(case), WITHIN):
            bad.append((case, link, got))
    if bad:
        _say(bad)
    words = f"{len(cases)} settings of model, link, ranks and micro-batches, each within 15 %"
    return f"{words}; {_judge_live(bench, answer)}"


def _judge_live(bench, answer) -> str:
    """One step that is measured now. It counts only where the model itself comes near: on a busy
    machine it may not, and that is not the answer's fault."""
    live = live_case()
    if "why" in live:
        return f"no real step was measured here: {live['why']}"
    found = tried(bench, answer, [live["arguments"]])
    got, want = _time(found[0], live["where"]), live["seconds"]
    words = f"{live['where']}: predicted {got:.3f} s, measured {want:.3f} s"
    if not close(right(live["arguments"]), want, WITHIN):
        return f"{words} (not counted: this machine was busy, or its link is not as the model)"
    if not close(got, want, WITHIN):
        raise Wrong(f"{words}; the model comes to {right(live['arguments']):.3f} s")
    return words


def _where(case, link) -> str:
    f, b, u, buckets, n, _, _, k = case
    sizes = ", ".join(f"{s / MIB:g}" for s in buckets)
    return (f"forward {f:g} s, backward {b:g} s, update {u:g} s, buckets of {sizes} MiB, {n} "
            f"rank{'s' * (n > 1)}, {link}, {k} micro-batch{'es' * (k > 1)}")  # fmt: skip


def _time(f, where) -> float:
    if "error" in f:
        raise Wrong(f"{where}: {f['error']}")
    got = number(f["got"])
    if got is None:
        raise Wrong(f"{where}: got {f['got']!r:.60}; return the seconds of one step, a number")
    return got


def _say(bad) -> None:
    """Name the mistake that gives exactly these numbers, in each setting that was missed."""
    case, link, got = max(bad, key=lambda b: abs(b[2] / right(b[0]) - 1))
    want = right(case)
    shown = f"{_where(case, link)}: {want:.3f} s, not {got:.3f} s"
    if all(close(g, 1e3 * right(c), 0.01) for c, _, g in bad):
        raise Wrong(f"{shown}: that is milliseconds; return seconds")
    for model, words in MISTAKES:
        if all(close(g, model(*c), 1e-4) for c, _, g in bad):
            raise Wrong(f"{shown}: {words}")
    f, b, _, buckets, n, alpha, beta, _ = case
    rows, done, end = [], 0, 0.0
    for i, s in enumerate(buckets, 1):
        done += s
        ready = b * done / sum(buckets)
        begin = max(ready, end)
        end = begin + ring(s, n, alpha, beta)
        rows.append(f"  bucket {i}: ready {ready:.3f}, all-reduced from {begin:.3f} to {end:.3f}")
    raise Wrong(f"{shown}. From the start of the last backward ({b:g} s), in seconds:\n" +
                "\n".join(rows))  # fmt: skip
