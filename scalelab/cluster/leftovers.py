"""Find and end what a cluster left behind, should that ever happen.

Every process of a cluster carries, in its environment, which client it belongs to. A process
whose client is gone is a leftover. Nothing is ever found by its name.
"""

from __future__ import annotations

import os

MARK = "SCALELAB_CLIENT"


def client_mark(pid: int | None = None) -> str:
    """"PID:start time" of a process (default: this one); a PID alone may be used again."""
    import psutil

    process = psutil.Process(pid)
    return f"{process.pid}:{process.create_time():.2f}"


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
        try:
            mine = client_mark(int(mark.split(":")[0])) == mark
        except (psutil.Error, ValueError):
            mine = False
        (alive if mine else gone).append(process.pid)
    return gone, alive


def clean() -> tuple[list[int], list[int]]:
    """End this user's leftovers. Returns (PIDs ended, PIDs of clusters in use, untouched)."""
    import psutil

    ended, alive = leftovers()
    processes = []
    for pid in ended:
        try:
            processes.append(psutil.Process(pid))
            os.kill(pid, 9)
        except (psutil.Error, OSError):
            pass
    psutil.wait_procs(processes, timeout=5)
    return ended, alive
