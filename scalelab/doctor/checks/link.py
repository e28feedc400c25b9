"""Errors, flaps and negotiated speed of the interface in use."""

from __future__ import annotations

from statistics import median

from ..nics import interfaces
from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, warn
from .interface import reached_by

MANY_FLAPS = 10  # beyond four times what peers have: as many come with a few reboots of a switch


@probe("link", again=True)
def link(context: dict) -> dict:
    """Errors and carrier changes of every interface, by its name, since it is there."""
    return {n["name"]: {k: n[k] for k in ("errors", "flaps", "speed", "kind", "up")}
            for n in interfaces()}  # fmt: skip


@check("link", needs=["link", "interface"], each=True)
def links(host: Host, seen: Seen):
    if not seen.separate:
        raise NotChecked("all hosts are one machine: no link is used" if len(seen.hosts) > 1
                         else "one host: no link is used")  # fmt: skip
    nic = _name(host, seen)
    before, after = seen.facts(host, "link").get(nic), seen.again(host, "link").get(nic)
    if not before or not after:
        raise NotChecked(f"{nic} came or went meanwhile")
    good = True
    rising = {w: n - before["errors"][w] for w, n in after["errors"].items()
              if n > before["errors"].get(w, n)}  # fmt: skip
    if rising:
        good = False
        listed = ", ".join(f"{n} {what}" for what, n in rising.items())
        yield fail(
            host,
            f"{nic}: {listed} while the doctor worked",
            f"another cable or port for {nic} of {host.name}; see `ethtool -S {nic}`",
        )
    if after["flaps"] > before["flaps"]:
        good = False
        yield fail(
            host,
            f"{nic} lost and found its carrier {after['flaps'] - before['flaps']} "
            "times while the doctor worked",
            f"cable, plug and port of {nic} of {host.name}; see `dmesg | grep {nic}`",
        )
    peers = [p for h in seen.hosts if h is not host for p in [_state(h, seen)] if p]
    usual = median([p["flaps"] for p in peers]) if peers else before["flaps"]
    if good and before["flaps"] > 4 * usual + MANY_FLAPS:
        good = False
        yield warn(
            host,
            f"{nic} has lost and found its carrier {before['flaps']} times, others {usual:.0f}",
            f"cable, plug and port of {nic} of {host.name}",
        )
    speeds = {h.name: s["speed"] for h in seen.hosts for s in [_state(h, seen)] if s and s["speed"]}
    mine, best = speeds.get(host.name), seen.majority(speeds)
    if best is None and len(speeds) == 2:
        best = max(speeds.values())  # of two, the slower is no choice that anybody made
    if mine and best and mine < best:
        good = False
        yield fail(
            host,
            f"{nic} has negotiated {_rate(mine)}, others {_rate(best)}",
            f"cable and switch port of {nic} of {host.name}; `ethtool -s {nic} autoneg on`",
        )
    if good:
        yield ok(host, f"{nic}: no errors, no flaps" + (f", {_rate(mine)}" if mine else ""))


def _name(host: Host, seen: Seen) -> str:
    nic = reached_by(host, seen)
    if nic is None:
        raise NotChecked("the interface in use is not known")
    return nic["name"]


def _state(host: Host, seen: Seen) -> dict | None:
    try:
        return seen.facts(host, "link").get(_name(host, seen))
    except NotChecked:
        return None


def _rate(bits: float) -> str:
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"
