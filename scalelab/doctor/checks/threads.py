"""Do the thread settings fit the processors?"""

from __future__ import annotations

import os

from ..registry import Host, Seen, check, ok, probe, warn

SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@probe("threads")
def threads(context: dict) -> dict:
    """Processors there are, those this process may use, and what the settings say."""
    count = os.cpu_count() or 1
    may = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else count
    return {"cores": count, "usable": may, "quota": _quota(),
            "settings": {k: os.environ[k] for k in SETTINGS if k in os.environ}}  # fmt: skip


def _quota() -> float | None:
    """Processors' worth of time that the control group allows; None: all."""
    try:
        with open("/sys/fs/cgroup/cpu.max") as f:
            quota, period = f.read().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


@check("threads", needs=["threads"], each=True)
def fitting(host: Host, seen: Seen):
    found = seen.facts(host, "threads")
    usable, nproc = found["usable"], seen.nproc
    if found["quota"] is not None:
        usable = max(1, min(usable, round(found["quota"])))
    fits = max(1, usable // nproc)
    words = f"{usable} cores for {nproc} rank{'s' * (nproc > 1)}"
    for name, value in found["settings"].items():
        first = value.split(",")[0].strip()  # OMP_NUM_THREADS may list one number a nesting level
        if not (first.isascii() and first.isdigit() and int(first) > 0):
            yield warn(host, f"{name}={value[:40]}: no number of threads, so it is ignored",
                       f"export {name}={fits}")  # fmt: skip
            return
        total = int(first) * nproc
        # One thread a rank is the least there is, however few the cores: nothing to mend there.
        if int(first) > 1 and total > usable:
            yield warn(host, f"{name}={first} x {nproc} ranks = {total} threads on {usable} cores: "
                       "they wait for one another", f"export {name}={fits}")  # fmt: skip
            return
    if usable < nproc <= found["cores"] and seen.separate:
        yield warn(host, f"may use {usable} of {found['cores']} cores, for {nproc} ranks",
                   "see `taskset -p $$` and the container's or job's limit of processors "
                   "(--cpus, --cpus-per-task)")  # fmt: skip
        return
    settings = ", ".join(f"{k}={v}" for k, v in found["settings"].items())
    unset = "OMP_NUM_THREADS unset" + (": torchrun sets 1" if nproc > 1 else "")
    yield ok(host, f"{words}, {settings or unset}")
