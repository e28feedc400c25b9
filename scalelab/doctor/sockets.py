"""Who holds a TCP port on this host. Standard library only."""

from __future__ import annotations

import errno
import os
import socket

from .nics import port_range
from .registry import NotChecked

_LISTEN = "0A"


def listening() -> dict[int, set[int]]:
    """Inodes of the sockets that listen, by port."""
    found: dict[int, set[int]] = {}
    for name in ("tcp", "tcp6"):
        for state, port, inode in _table(name):
            if state == _LISTEN:
                found.setdefault(port, set()).add(inode)
    return found


def _table(name: str) -> list[tuple[str, int, int]]:
    """(state, local port, inode) of every socket of this network namespace."""
    try:
        with open(f"/proc/thread-self/net/{name}") as f:
            rows = [line.split() for line in f.readlines()[1:]]
    except OSError:
        return []
    return [(r[3], int(r[1].rpartition(":")[2], 16), int(r[9])) for r in rows if len(r) > 9]


def holder(port: int) -> dict | None:
    """{"pid", "command", "seconds" since it started} of who listens on the port; {"pid": None,
    "why"} if that is another user's; None if nobody does."""
    inodes = listening().get(port)
    if not inodes:
        return None
    links = {f"socket:[{inode}]" for inode in inodes}
    for pid in (int(p) for p in os.listdir("/proc") if p.isdigit()):
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{fd}") in links:
                    return {"pid": pid, "command": _command(pid), "seconds": _age(pid)}
        except OSError:
            continue  # gone, or another user's
    return {"pid": None, "why": "another user's process, or one out of sight here"}


def _command(pid: int) -> str:
    with open(f"/proc/{pid}/cmdline", "rb") as f:
        words = f.read().decode(errors="replace").split("\0")
    text = " ".join(words).strip()
    return text if len(text) <= 80 else text[:77] + "..."


def _age(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
    with open("/proc/uptime") as f:
        return max(0.0, float(f.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))


def taken(port: int) -> bool:
    """Whether a listener cannot be bound to the port on all addresses, as torch's store is."""
    for family, every in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as s:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                s.bind((every, port))
            return False
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                return True
    return False


def next_free(port: int) -> int:
    """A port near this one that nobody listens on, unprivileged and below the ephemeral range."""
    used = listening()
    try:
        low, _ = port_range()
    except NotChecked:
        low = 32768
    first = port + 1 if 1024 <= port < low - 1 else 29400
    if first >= low:
        first = max(1024, low - 1000)
    return next((p for p in range(first, low) if p not in used), first)
