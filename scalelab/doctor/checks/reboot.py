"""Has a host just come back, when its peers have long been up?"""

from __future__ import annotations

import statistics

from ..registry import NotChecked, Seen, check, ok, probe, skip, warn

JUST = 600  # s
LONG = 3600  # s


@probe("uptime")
def uptime(context: dict) -> dict:
    """Seconds since this machine started."""
    try:
        with open("/proc/uptime") as f:
            return {"seconds": float(f.read().split()[0])}
    except OSError as e:
        raise NotChecked(f"/proc/uptime: {e.strerror}") from None


@check("reboot", needs=["uptime"])
def reboot(seen: Seen):
    up = {}
    for host in seen.hosts:
        try:
            up[host.name] = seen.facts(host, "uptime")["seconds"]
        except NotChecked as e:
            yield skip(host, str(e))
    for host in seen.hosts:
        if host.name not in up:
            continue
        peers = [s for name, s in up.items() if name != host.name]
        words = f"up for {_time(up[host.name])}"
        if peers and up[host.name] < JUST and statistics.median(peers) > LONG:
            yield warn(host, f"{words}, its peers for {_time(statistics.median(peers))}: it has "
                       "just restarted", "`journalctl -b -1 -e` and `last -x reboot` say why; see "
                       "that mounts, drivers and firewall are as before")  # fmt: skip
        else:
            yield ok(host, words)


def _time(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
