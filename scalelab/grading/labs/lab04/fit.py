"""04.2: alpha and beta from noisy sweeps."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from ....measure import cost
from ....measure.fit import fit as measured_fit
from ...bench import Bench
from ...verdict import Wrong
from .parts import close, numbers, tried

SIZES = [1 << k for k in range(10, 27)]  # 1 KiB to 64 MiB
ALPHA_WITHIN, BETA_WITHIN = 0.10, 0.05
NOISE = 0.04  # of each point, one standard deviation
LINKS = (  # alpha (s), beta (bytes/s), world sizes
    (60e-6, 0.118e9, (2, 4)),  # 1 gbit
    (25e-6, 1.1e9, (3, 8)),  # 10 gbit
    (9e-6, 22e9, (4, 16)),  # a fast fabric
    (5.1e-3, 0.06e9, (2, 4)),  # between buildings
)
MEASURED = Path(__file__).parent / "sweep.json"  # a real one, with date and machine


def data_sets() -> list[dict]:
    """Sweeps with known alpha and beta: {"sizes", "seconds", "world_size", "alpha", "beta"}."""
    found = []
    for number, (alpha, beta, worlds) in enumerate(LINKS):
        for n in worlds:
            rng = random.Random(1000 * number + n)
            seconds = [cost.seconds("ring", s, n, alpha, beta) * math.exp(rng.gauss(0, NOISE))
                       for s in SIZES]  # fmt: skip
            found.append({"sizes": SIZES, "seconds": seconds, "world_size": n, "alpha": alpha,
                          "beta": beta})  # fmt: skip
    return found


def line(sizes, seconds, weights) -> tuple[float, float]:
    """Intercept and slope of the weighted least-squares line; each residual times its weight."""
    w = [v * v for v in weights]
    total = sum(w)
    x0 = sum(a * b for a, b in zip(w, sizes)) / total
    y0 = sum(a * b for a, b in zip(w, seconds)) / total
    sxx = sum(a * (x - x0) ** 2 for a, x in zip(w, sizes))
    slope = sum(a * (x - x0) * (y - y0) for a, x, y in zip(w, sizes, seconds)) / sxx
    return y0 - slope * x0, slope


def _ring(n, intercept, slope) -> tuple[float, float]:
    return intercept / (2 * (n - 1)), 2 * (n - 1) / n / slope


def reference(sizes, seconds, world_size) -> tuple[float, float]:
    """alpha and beta by relative residuals."""
    found = measured_fit(zip(sizes, seconds), world_size)
    return found.alpha, found.beta


def _flat(sizes, seconds, n):
    return _ring(n, *line(sizes, seconds, [1.0] * len(sizes)))


def _two_points(sizes, seconds, n):
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    return _ring(n, seconds[0] - slope * sizes[0], slope)


def _two_points_bare(sizes, seconds, n):
    return seconds[0] / (2 * (n - 1)), 2 * (n - 1) / n * sizes[-1] / seconds[-1]


def _power(p):
    return lambda sizes, seconds, n: _ring(n, *line(sizes, seconds, [t**p for t in seconds]))


def judge_fit(bench: Bench, answer) -> str:
    sets = data_sets()
    cases = [(list(d["sizes"]), list(d["seconds"]), d["world_size"]) for d in sets]
    real = json.loads(MEASURED.read_text()) if MEASURED.exists() else None
    if real:
        cases.append((real["sizes"], real["seconds"], real["world_size"]))
    found = tried(bench, answer, cases)
    bad = []
    for case, d, f in zip(cases, sets, found):
        where = f"{d['world_size']} ranks, alpha {_us(d['alpha'])}, beta {d['beta'] / 1e9:g} GB/s"
        if "error" in f:
            raise Wrong(f"{where}: {f['error']}")
        got = numbers(f["got"], 2)
        if got is None:
            raise Wrong(f"{where}: got {f['got']!r:.60}; return (alpha, beta), two numbers, in "
                        "seconds and bytes a second")  # fmt: skip
        off = got[0] / d["alpha"] - 1, got[1] / d["beta"] - 1
        if abs(off[0]) > ALPHA_WITHIN or abs(off[1]) > BETA_WITHIN:
            bad.append((where, case, d, got, off))
    if bad:
        _say(bad)
    words = f"{len(sets)} noisy sweeps of 2 to 16 ranks: alpha within 10 %, beta within 5 %"
    if real:
        words += _judge_measured(cases[-1], found[-1], real)
    return words


def _judge_measured(case, f, real) -> str:
    """A sweep that was measured: nobody knows the truth, so what the fit says of each point."""
    where = f"the sweep recorded on {real['date']} on {real['machine']}"
    if "error" in f:
        raise Wrong(f"{where}: {f['error']}")
    got, want = numbers(f["got"], 2), reference(*case)
    if got is None:
        raise Wrong(f"{where}: got {f['got']!r:.60}; return (alpha, beta)")
    if not (close(got[0], want[0], 2 * ALPHA_WITHIN) and close(got[1], want[1], 2 * BETA_WITHIN)):
        raise Wrong(f"{where}: alpha {_us(got[0])} and beta {got[1] / 1e9:.3g} GB/s; relative "
                    f"residuals give {_us(want[0])} and {want[1] / 1e9:.3g} GB/s")  # fmt: skip
    return (f"; a sweep recorded on {real['date']} on {real['machine']}, {real['link']}: alpha "
            f"{_us(got[0])} ({real['note']}), beta {got[1] / 1e9:.3g} GB/s")  # fmt: skip


def _say(bad) -> None:
    """Name the mistake that explains every sweep that was missed; else show the worst one."""
    worst = max(bad, key=lambda b: max(abs(b[4][0]) / ALPHA_WITHIN, abs(b[4][1]) / BETA_WITHIN))
    where, case, d, got, _ = worst
    shown = (f"{where}: you found alpha {_us(got[0])} and beta {got[1] / 1e9:.4g} GB/s")
    for test, words in MISTAKES:
        if all(test(c, d, g) for _, c, d, g, _ in bad):
            raise Wrong(f"{shown}: {words}")
    if all(abs(off[1]) <= BETA_WITHIN for *_, off in bad):
        raise Wrong(f"{shown}: beta is right, alpha is lost. It shows in the small sizes only, "
                    "whose few microseconds weigh nothing beside the seconds of the large ones: "
                    "make every size count alike, by relative residuals")  # fmt: skip
    if all(abs(off[0]) <= ALPHA_WITHIN for *_, off in bad):
        raise Wrong(f"{shown}: alpha is right, beta is not. Do all large sizes count, and is the "
                    "bandwidth's part 2(n-1)/n * size / beta?")  # fmt: skip
    raise Wrong(f"{shown}. Both have to come out of t = 2(n-1) alpha + 2(n-1)/n size / beta: how "
                "far is this curve from the points, relative to each?")  # fmt: skip


def _near(a, b, by=0.02) -> bool:
    return close(a, b, by)


def _as(function):
    """The answer is what `function` of the data gives, both numbers."""
    def test(case, d, got):
        want = function(*case)
        return _near(got[0], want[0], 0.003) and _near(got[1], want[1], 0.003)

    return test


def _scaled(a, b):
    """The answer is the reference times a(n), b(n)."""
    def test(case, d, got):
        want, n = reference(*case), case[2]
        return (_near(got[0], want[0] * a(n), ALPHA_WITHIN) and
                _near(got[1], want[1] * b(n), BETA_WITHIN))  # fmt: skip

    return test


def _one(n) -> float:
    return 1.0


MISTAKES = [
    (_as(_flat), "plain least squares on seconds. The largest sizes have the largest errors, in "
                 "seconds, and drown the small ones, where alpha shows. Divide each row by its t, "
                 "so that every size counts alike"),
    (_as(_power(-0.5)), "each error is divided by the square root of its t; the noise is a share "
                        "of t, so divide by t itself (np.polyfit squares its w: w=1/t)"),
    (_as(_power(-2)), "each error is divided by t twice, and now the large sizes count for "
                      "nothing; once is right (np.polyfit squares its w by itself: w=1/t)"),
    (_as(_two_points), "that is the line through the smallest and the largest size alone: two "
                       "noisy points. Use all of them"),
    (_as(_two_points_bare), "that is the smallest size for alpha and the largest for beta: two "
                            "noisy points, and each also holds some of the other's time. Use all "
                            "of them"),
    (lambda c, d, g: _near(g[0], d["beta"], 0.2) or _near(g[1], d["alpha"], 0.2),
     "these two have changed places: alpha (seconds) comes first"),
    (_scaled(lambda n: 1e6, _one), "alpha is in microseconds; return seconds"),
    (_scaled(_one, lambda n: 1e-9), "beta is in GB/s; return bytes a second"),
    (_scaled(lambda n: 1e6, lambda n: 1e-9), "in microseconds and GB/s; return seconds and bytes "
                                             "a second"),
    (_scaled(_one, lambda n: 8.0), "beta is in bits a second; return bytes a second"),
    (_scaled(_one, lambda n: 8e-9), "beta is in Gbit/s; return bytes a second"),
    (lambda c, d, g: _near(g[1] * d["beta"], 1, 0.2), "beta is upside down: seconds a byte in "
                                                      "place of bytes a second"),
    (lambda c, d, g: _near(g[1] * d["beta"], c[2] / 2 / (c[2] - 1), 0.2),
     "beta is the slope of the line; the slope is 2(n-1)/n / beta"),
    (_scaled(lambda n: 2.0 * (n - 1), lambda n: n / 2 / (n - 1)),
     "that is the intercept and the slope of the line; a ring has 2(n-1) alpha in the one and "
     "2(n-1)/n / beta in the other: divide these out"),
    (_scaled(lambda n: 2.0 * (n - 1), _one), "alpha is one message; the intercept is 2(n-1) of "
                                             "them: divide"),
    (_scaled(lambda n: 2.0, _one), "alpha is one message, and a ring sends 2(n-1) of them, not n-1 "
                                   "(once to sum, once to hand round)"),
    (_scaled(_one, lambda n: n / 2 / (n - 1)), "that beta is algbw; 2(n-1)/n of the bytes cross "
                                               "each link, so beta is busbw"),
    (_scaled(_one, lambda n: 0.5), "beta is half of what it is: a ring sends 2(n-1)/n of the "
                                   "bytes, not (n-1)/n"),
    (_scaled(lambda n: 2.0, lambda n: 0.5), "that is a reduce-scatter's formula; an all-reduce has "
                                            "2(n-1) messages, and 2(n-1)/n of the bytes"),
    (_scaled(_one, lambda n: float(n)), "beta is n times too large: a message has size/n bytes"),
]  # fmt: skip


def _us(seconds) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} µs"
