"""Find and end what a cluster left behind, should that ever happen.

Every process of a cluster carries, in its environment, which client it belongs to. A process
whose client is gone is a leftover. Nothing is ever found by its name.
"""

from __future__ import annotations

import os
import re
import sys

MARK = "SCALELAB_CLIENT"


def client_mark(pid: int | None = None) -> str:
    """PID, start and PID namespace of a process (default: this one), with ":" between: a PID alone
    may be used again, and means another in a container. OSError if there is no such process."""
    if sys.platform != "linux":
        import psutil

        try:
            process = psutil.Process(pid)
            return f"{process.pid}:{process.create_time():.2f}:"
        except psutil.Error as e:
            raise ProcessLookupError(str(e)) from None
    # In ticks since boot: a time of day would move when the machine's clock is set.
    with open(f"/proc/{pid or 'self'}/stat") as f:
        before, _, after = f.read().rpartition(")")
    fields = after.split()
    if fields[0] in "ZX":
        raise ProcessLookupError(f"process {pid} has ended")
    return f"{before.split()[0]}:{fields[19]}:{_namespace()}"


def _namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]") if sys.platform == "linux" else ""


def is_alive(mark: str) -> bool:
    """Whether the client of this mark still lives."""
    try:
        return client_mark(int(mark.partition(":")[0])) == mark
    except (OSError, ValueError):
        return False


def leftovers() -> tuple[list[int], list[int]]:
    """PIDs of this user's processes in clusters: (whose client is gone, whose client lives)."""
    import psutil

    gone, alive = [], []
    for process in psutil.process_iter():
        try:
            if process.uids().real != os.getuid():
                continue
            mark = process.environ().get(MARK)
            if not mark or process.status() == psutil.STATUS_ZOMBIE:
                continue
        except (psutil.Error, OSError):
            continue  # it ended meanwhile, or is not ours to look at
        known = re.fullmatch(r"[0-9]+:[0-9.]+:([0-9]*)", mark)
        if not known or known[1] not in ("", _namespace()):
            # Not a mark of ours; or a client in another container, which cannot be seen from here.
            continue
        (alive if is_alive(mark) else gone).append(process.pid)
    return gone, alive


def clean() -> tuple[list[int], list[int]]:
    """End this user's leftovers. Returns (PIDs ended, PIDs of clusters in use, untouched)."""
    import psutil

    found, alive = leftovers()
    processes = []
    for pid in found:
        try:
            processes.append(psutil.Process(pid))
            os.kill(pid, 9)
        except (psutil.Error, OSError):
            pass
    _, waiting = psutil.wait_procs(processes, timeout=2)
    left = {p.pid for p in waiting if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    return [pid for pid in found if pid not in left], alive
