"""Do processes wait in the kernel and never come back (state D: a dead disk or file server)?"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from ..registry import Host, NotChecked, Seen, check, ok, probe, warn

KERNEL_THREAD = 0x00200000  # PF_KTHREAD in the flags of /proc/PID/stat
GAP = 0.15  # s between the two samples of one call


@probe("stuck", again=True)
def stuck(context: dict) -> dict:
    """{"pid": what waits there} of the processes in state D in two samples."""
    if sys.platform != "linux":
        raise NotChecked("needs Linux's /proc")
    first = waiting()
    if first:
        time.sleep(GAP)
        second = waiting()
        first = {key: what for key, what in second.items() if key in first}
    return {"stuck": first}


def waiting(proc: str = "/proc") -> dict[str, dict]:
    """{"PID:start:switches": …} of processes in state D. The count of context switches is part of
    the key: a process that is busy with a disk is in D at every look too, but runs in between."""
    found = {}
    for entry in os.listdir(proc):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            text = Path(proc, entry, "stat").read_text(errors="replace")
            name, fields = text[text.index("(") + 1 : text.rindex(")")], text.rpartition(")")[2]
            state, flags, start = (fields.split()[i] for i in (0, 6, 19))
            if state != "D" or int(flags) & KERNEL_THREAD:
                continue
            status = Path(proc, entry, "status").read_text(errors="replace")
            switches = [x.split()[1] for x in status.splitlines() if "ctxt_switches" in x]
            command = Path(proc, entry, "cmdline").read_bytes().replace(b"\0", b" ")
        except (OSError, ValueError, IndexError):
            continue  # it has ended
        words = command.decode(errors="replace").strip() or f"[{name}]"
        if "scalelab.doctor" in words:
            continue  # another doctor, whose own look at a dead path says more than this
        found[":".join([entry, start, *switches])] = {
            "pid": int(entry), "command": words[:80], "where": _where(proc, entry),
        }  # fmt: skip
    return found


def _where(proc: str, pid: str) -> str:
    """The kernel's function that it waits in, "" where that may not be read."""
    try:
        where = Path(proc, pid, "wchan").read_text().strip()
        return "" if where == "0" else where
    except OSError:
        return ""


@check("stuck processes", needs=["stuck"], each=True)
def none_stuck(host: Host, seen: Seen):
    before, after = seen.facts(host, "stuck")["stuck"], seen.again(host, "stuck")["stuck"]
    still = [what for key, what in after.items() if key in before]
    if not still:
        yield ok(host, "none in state D throughout")
        return
    shown = [
        f"pid {s['pid']} ({s['command']})" + (f" in {s['where']}" if s["where"] else "")
        for s in still[:3]
    ]
    more = f", and {len(still) - 3} more" if len(still) > 3 else ""
    yield warn(host, f"in state D and not running at all: {', '.join(shown)}{more}",
               f"`cat /proc/{still[0]['pid']}/stack` and `dmesg | tail` (as root) name the disk or "
               "file server; no signal ends it")  # fmt: skip
