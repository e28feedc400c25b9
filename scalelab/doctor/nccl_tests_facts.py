"""What nccl-tests' lines came to: facts, as far as they are printed or follow from the rows."""

from __future__ import annotations

from math import ceil, floor

from . import nccl_tests_verdict
from .nccl_tests_jobs import hosts, shared

REDUCING = ("all_reduce", "reduce_scatter", "reduce")
SHARING = ("all_gather", "reduce_scatter", "alltoall", "gather", "scatter")  # factor (n-1)/n


def read(tests) -> dict:
    """Kind, facts, verdict, why, next. Raises ValueError where the file breaks off early."""
    lists = tests.jobs.lists
    if not (tests.measured or lists or tests.failures or tests.using):
        raise ValueError(
            "nccl-tests' output breaks off in its header: no device, row or failure is left"
        )
    runs = [r for r in tests.runs if r.rows or r.average is not None or r.bounds is not None]
    independent = _independent(tests, runs)
    best = _best(runs)
    # figures, ranks and nodes are of one run; of jobs apart the nodes are those of all
    devices = (best.devices if best else lists[-1] if lists else None) or []
    nodes = devices
    if independent and lists:
        apart = tests.jobs.apart_lists(runs)
        devices = devices or max(apart, key=len)
        nodes = [d for each in apart for d in each]
    ranks = max(d.rank for d in devices) + 1 if devices else _ranks(tests, best)
    whole = len({d.rank for d in devices}) == ranks  # else the list is cut: hosts are missing
    averages = [r.average for r in runs if r.average is not None]
    if best is not None and best.rows:
        max_busbw = best.best
        average = best.average if best.average is not None or len(runs) > 1 else (
            next(iter(averages), None))  # fmt: skip
    else:  # footers alone: the largest busbw was at least the average
        max_busbw = average = max(averages, default=None)
    facts = {
        "test": _test(tests, best, ranks),
        "nodes": len(hosts(nodes)) if nodes and (whole or independent) else None,
        "ranks": ranks,
        "max_busbw": max_busbw,
        "avg_busbw": average,
        "wrong": _wrong(tests, runs),
        "independent_runs": independent,
        "runs": [_run(r) for r in runs[:100]],
        "largest_bytes": best.largest[0] if best and best.largest else None,
        "gpus": list(dict.fromkeys(d.name for d in nodes if d.name)),
        "shared_gpus": not independent and shared(devices),
    }
    judged = nccl_tests_verdict.judge(facts, tests, runs, best)
    return {"kind": "nccl-tests", "facts": facts, **judged}


def _best(runs: list):
    """The run that the figures are of: the quickest with rows, else the best average."""
    rows = [r for r in runs if r.best is not None]
    if rows:
        return max(rows, key=lambda r: r.best)
    return max((r for r in runs if r.average is not None), key=lambda r: r.average, default=None)


def _run(run) -> dict:
    found = {"rows": run.rows, "max_busbw": run.best, "avg_busbw": run.average}
    if run.devices:
        found |= {"ranks": len(run.devices), "nodes": len(hosts(run.devices))}
    return found


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
    if any(_mixed(run, after) for run, after in zip(runs, runs[1:])):
        return True
    if tests.jobs.lists:
        return tests.jobs.apart(runs)
    # rows only: the same sizes again and again, and busbw 0, which is one rank by definition
    repeated = any(
        count > 1 for r in runs for (size, *_), count in r.sizes.items() if size >= 1 << 20
    )
    return repeated and all(r.best == 0 for r in runs if r.rows)


def _mixed(run, after) -> bool:
    """Whether two tables stand in one: each size twice, and a second last line follows."""
    twice = sum(count > 1 for count in run.sizes.values())
    return twice > 1 and 2 * twice >= len(run.sizes) and not after.rows and (
        after.average is not None)  # fmt: skip


def _ranks(tests, run) -> int | None:
    """Where no device is listed: as NCCL's own lines say, or as follows from the rows."""
    if len(tests.comms) == 1:
        return next(iter(tests.comms))
    if run is None or not run.rows:
        return None
    if run.best == 0 and run.sent and max((s[0] for s in run.sizes), default=0) >= 1 << 20:
        return 1
    return _from_ratio(tests, run)


def _from_ratio(tests, run) -> int | None:
    """busbw / algbw is 2(n-1)/n for an all-reduce, (n-1)/n for others: the only n within the
    rounding of what is printed, or None."""
    low, high = run.ratio
    name, reducing = _name(tests, run), _reducing(tests, run)
    if name == "all_reduce" or (name is None and reducing and low > 1):
        factor = 2
    elif name in SHARING or (name is None and reducing is not None and high < 0.995):
        factor = 1
    else:
        return None
    if not low <= high < factor:
        return None
    first, last = ceil(factor / (factor - low)), floor(factor / (factor - high))
    return first if first == last and first > 1 else None


def _reducing(tests, run) -> bool | None:
    """Whether the test adds values; None: the rows of this version do not say so."""
    if run.redop is None:
        return None
    return run.redop != "none"


def _name(tests, run) -> str | None:
    """Name of the test of this run, unless its rows contradict it."""
    name = run.name
    if name is None and len(tests.names) == 1 and len(tests.runs) == 1:
        name = next(iter(tests.names))
    reducing = _reducing(tests, run)
    if name in (None, "sendrecv") or reducing is None:  # that one prints a sum and makes none
        return name
    return name if reducing == (name in REDUCING) else None


def _test(tests, run, ranks: int | None) -> str | None:
    """Name of the test, as the file gives it or as only one of them has this factor."""
    if run is None:
        return ", ".join(f"{name}_perf" for name in tests.names) or None
    if name := _name(tests, run):
        return f"{name}_perf"
    if not run.rows or (reducing := _reducing(tests, run)) is None:
        return None
    low, high = run.ratio
    told = low > 0 and low <= high
    even = told and low <= 1 <= high and high - low < 0.05  # busbw equals algbw
    rooted = run.root is not None and run.root >= 0
    if not reducing:
        if rooted:
            return "broadcast_perf" if even else "gather_perf or scatter_perf"
        if not told:
            return None
        return "sendrecv_perf" if even else "all_gather_perf or alltoall_perf"
    if rooted:
        return "reduce_perf"
    if even and ranks is not None and ranks > 2:
        return "sendrecv_perf"
    if told and (low > 1 or even):  # with two ranks that of an all-reduce is 1 as well
        return "all_reduce_perf"
    if told and high < 1 and (ranks is None or ranks > 1):
        return "reduce_scatter_perf"
    return "all_reduce_perf or reduce_scatter_perf"
