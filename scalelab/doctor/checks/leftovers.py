"""Is anything of an earlier job still running, on this user's account?

A rank whose launcher has gone belongs to no job: it holds its port, its memory and its GPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..registry import Host, NotChecked, Seen, check, ok, probe, warn

# Processes that adopt orphans, besides PID 1.
REAPERS = {"systemd", "init", "tini", "dumb-init", "docker-init", "catatonit", "containerd-shim",
           "conmon", "s6-svscan", "slurmstepd"}  # fmt: skip


@probe("leftovers", again=True)
def leftovers(context: dict) -> dict:
    """{"PID:start": what it is} of ranks of this user whose launcher has gone."""
    if sys.platform != "linux":
        raise NotChecked("needs Linux's /proc")
    mine = ancestors(os.getpid())
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in mine:
            try:
                if os.stat(f"/proc/{entry}").st_uid == os.geteuid() and orphan(entry):
                    found[f"{entry}:{_stat(entry)[19]}"] = _about(entry)
            except (OSError, ValueError, IndexError):
                continue  # it has ended, or may not be looked at
    return {"ranks": found}


def orphan(pid: str) -> bool:
    """Whether this process is a rank (or a helper of one) that no launcher minds any more."""
    environ = _environ(pid)
    if not {"RANK", "LOCAL_RANK"} <= environ.keys() or _stat(pid)[0] in "ZX":
        return False
    parent, session = _stat(pid)[1], _stat(pid)[3]
    if parent == "0":
        return False  # the first process of a container, or of a namespace
    if parent != "1" and _comm(parent) not in REAPERS and not _adopts(parent):
        return False
    if "RANK" in _environ(parent):
        return False  # the whole container was given a rank
    # torchrun's ranks have a session each. Of those started otherwise, the leader of a session was
    # started to be on its own (setsid, a service, an emulated host), and is no orphan.
    return "TORCHELASTIC_RUN_ID" in environ or session != pid


def _adopts(pid: str) -> bool:
    """Whether it is the process that minds a local cluster's host, and inherits its orphans."""
    command = Path("/proc", pid, "cmdline").read_bytes()
    return b"from scalelab.cluster import owner" in command


def ancestors(pid: int) -> set[int]:
    found = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(_stat(str(pid))[1])
        except (OSError, ValueError, IndexError):
            break
    return found


def _stat(pid: str) -> list[str]:
    """Fields of /proc/PID/stat from the third on: state, parent, group, session, … 19: start."""
    return Path("/proc", pid, "stat").read_text(errors="replace").rpartition(")")[2].split()


def _comm(pid: str) -> str:
    return Path("/proc", pid, "comm").read_text(errors="replace").strip()


def _environ(pid: str) -> dict[str, str]:
    try:
        text = Path("/proc", pid, "environ").read_bytes().decode(errors="replace")
    except PermissionError:
        return {}
    return dict(pair.split("=", 1) for pair in text.split("\0") if "=" in pair)


def _about(pid: str) -> dict:
    environ = _environ(pid)
    command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ")
    words = command.decode(errors="replace").strip()[:80]
    return {"pid": int(pid), "rank": environ["RANK"], "command": words, "ports": ports(pid)}


def ports(pid: str) -> list[int]:
    """TCP ports that a process listens on."""
    sockets = set()
    try:
        for file in os.listdir(f"/proc/{pid}/fd"):
            to = os.readlink(f"/proc/{pid}/fd/{file}")
            if to.startswith("socket:["):
                sockets.add(to[8:-1])
    except OSError:
        pass
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path("/proc", pid, "net", table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if words[3] == "0A" and words[9] in sockets:  # LISTEN
                found.add(int(words[1].rpartition(":")[2], 16))
    return sorted(found)


@check("leftovers", needs=["leftovers"], each=True)
def nothing_left(host: Host, seen: Seen):
    before, after = seen.facts(host, "leftovers")["ranks"], seen.again(host, "leftovers")["ranks"]
    # Those there both times: a job that is just being ended is none.
    left = [what for key, what in after.items() if key in before]
    if not left:
        yield ok(host, "no rank of this user without its launcher")
        return
    shown = [
        f"pid {r['pid']} (rank {r['rank']}: {r['command']})"
        + (f" on port {', '.join(map(str, r['ports']))}" if r["ports"] else "")
        for r in left[:3]
    ]
    more = f", and {len(left) - 3} more" if len(left) > 3 else ""
    yield warn(host, f"left by a job whose launcher has gone: {'; '.join(shown)}{more}",
               f"kill {' '.join(str(r['pid']) for r in left[:20])}")  # fmt: skip
