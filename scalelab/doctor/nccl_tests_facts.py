"""What nccl-tests' lines came to: facts, as far as they are printed or follow from the rows."""

from __future__ import annotations

import re
from collections import Counter

from . import nccl_tests_verdict


def read(tests) -> dict:
    """Kind, facts, verdict, why, next. Raises ValueError where the file breaks off early."""
    if not (tests.measured or tests.devices or tests.failures or tests.usings):
        raise ValueError(
            "nccl-tests' output breaks off in its header: no device, row or failure is left"
        )
    runs = [r for r in tests.runs if r.rows or r.average is not None or r.bounds is not None]
    independent = _independent(tests, runs)
    # runs one after the other may be of different machines; jobs at once are of all of them
    nodes = len({d[3] for d in tests.devices}) if independent else max(
        map(len, tests.hosts), default=0
    )  # fmt: skip
    ranks = _ranks(tests, runs, independent)
    best = max(
        (r for r in runs if r.best is not None), key=lambda r: r.best, default=None
    )  # fmt: skip
    averages = [r.average for r in runs if r.average is not None]
    if best is not None:
        max_busbw = best.best
        average = best.average if best.average is not None else next(iter(averages), None)
    else:  # footers alone: the largest busbw was at least the average
        max_busbw = average = max(averages, default=None)
    facts = {
        "test": _test(tests, runs, ranks),
        "nodes": nodes or None,
        "ranks": ranks,
        "max_busbw": max_busbw,
        "avg_busbw": average,
        "wrong": _wrong(tests, runs),
        "independent_runs": independent,
        "runs": [
            {"rows": r.rows, "max_busbw": r.best, "avg_busbw": r.average} for r in runs[:100]
        ],
        "largest_bytes": max((r.largest[0] for r in runs if r.largest), default=None),
        "gpus": list(dict.fromkeys(d[6] for d in tests.devices if d[6])),
        "shared_gpus": _shared(tests),
    }
    judged = nccl_tests_verdict.judge(facts, tests, runs)
    return {"kind": "nccl-tests", "facts": facts, **judged}


def _wrong(tests, runs: list) -> int | None:
    """Values that compared unequal; None where nothing was compared, or nothing says so."""
    counted = sum(r.wrong for r in runs)
    bounds = [r.bounds for r in runs if r.bounds is not None]
    if any(r.checked for r in runs):
        return max(counted, sum(bounds))
    # with -c 0 the footer says "0 OK" too, and the columns N/A
    return sum(bounds) if bounds and (tests.old_columns or not tests.rows) else None


def _independent(tests, runs: list) -> bool:
    """Whether several runs, each believing itself alone, were started in place of one."""
    if tests.together or tests.devices:
        return tests.together
    # rows only: the same sizes again and again, and busbw 0, which is one rank by definition
    repeated = any(count > 1 for r in runs for count in r.sizes.values())
    return repeated and bool(tests.rows) and all(r.best == 0 for r in runs if r.rows)


def _ranks(tests, runs: list, independent: bool) -> int | None:
    if tests.devices:
        return len({d[0] for d in tests.devices}) if independent else (
            max(d[0] for d in tests.devices) + 1
        )  # fmt: skip
    if len(tests.comms) == 1:
        return next(iter(tests.comms))
    if tests.rows and all(r.best == 0 and r.sent for r in runs if r.rows):
        peak = [r for r in runs if r.rows and r.peak]
        if all(r.sent and max(r.sizes) >= 1 << 20 for r in peak):
            return 1
    return _from_ratio(tests, runs)


def _from_ratio(tests, runs: list) -> int | None:
    """busbw / algbw is 2(n-1)/n for an all-reduce: n from rows alone, if it comes out whole."""
    ratio = _ratio(runs)
    test = next(iter(tests.names), None) if len(tests.names) == 1 else None
    if ratio is None:
        return None
    reducing = any(r.redop not in (None, "none") for r in runs) or tests.old_columns
    if test == "all_reduce" or (test is None and reducing and ratio > 1.005):
        left = 2 - ratio
        factor = 2
    elif test in ("all_gather", "reduce_scatter", "alltoall", "gather", "scatter"):
        left, factor = 1 - ratio, 1
    else:
        return None
    if left <= 0.004:  # beyond some hundred ranks the digits printed do not tell
        return None
    n = factor / left
    return round(n) if abs(n - round(n)) < 0.02 * n and n > 1.5 else None


def _ratio(runs: list) -> float | None:
    """busbw / algbw, of the rows with the most digits."""
    peaks = [r.peak for r in runs if r.peak and r.peak[1] >= 1]
    if not peaks:
        return None
    _, alg, bus = max(peaks, key=lambda p: p[1] if p[2] else 0)
    return bus / alg if bus else None


def _test(tests, runs: list, ranks: int | None) -> str | None:
    """Name of the test, as the file gives it or as only one of them has this factor."""
    if tests.names:
        return ", ".join(f"{name}_perf" for name in tests.names)
    ratio = _ratio(runs)
    redop = next((r.redop for r in runs if r.redop), None)
    root = next((r.root for r in runs if r.root is not None), None)
    if not any(r.rows for r in runs):
        return None
    even = ratio is not None and abs(ratio - 1) < 0.005  # busbw equals algbw
    if redop in (None, "none", "all"):
        if ratio is None:
            return None
        if root is not None and root >= 0:
            return "broadcast_perf" if even else "gather_perf or scatter_perf"
        return "sendrecv_perf" if even else "all_gather_perf or alltoall_perf"
    if root is not None and root >= 0:
        return "reduce_perf"
    if ratio is not None and ratio > 1.005:
        return "all_reduce_perf"
    if even:  # with two ranks that of an all-reduce is 1 as well
        return "sendrecv_perf" if ranks is not None and ranks > 2 else "all_reduce_perf"
    if ratio is not None and (ranks is None or ranks > 1):
        return "reduce_scatter_perf"
    return "all_reduce_perf or reduce_scatter_perf"


def _shared(tests) -> bool:
    """Whether two ranks sat on one GPU. A short address holds the bus only, not the domain."""
    seen: Counter = Counter()
    for _rank, _, _, host, device, bus, name in set(tests.devices):
        if ":" in bus:
            seen[host, bus] += 1
        elif bus not in ("0x00", "0x0") and not re.search(r"G[HB]\d00", name):
            seen[host, bus, device] += 1
    return any(count > 1 for count in seen.values()) and not _doubled(tests)


def _doubled(tests) -> bool:
    """Several runs one after the other list the same devices again."""
    return Counter(d[0] for d in tests.devices)[0] > 1
