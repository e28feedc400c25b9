"""Throughput of pairs, judged by the link's rate or by the peers; never by a constant.

A measurement acquits a pair if it was fast, or if the window rather than the link held it up: on a
long way TCP moves at most a window a round trip, and a slow link is told from that by its queue:
far more bytes are on their way than the round trip of an idle link accounts for. It accuses only
if neither, and if the processor was not the limit.
"""

from __future__ import annotations

from statistics import median

from ..blame import blame
from ..registry import NotChecked, Seen, check, fail, ok, skip

OF_LINE, OF_PEERS = 0.4, 1 / 3  # of the link's rate, of the peers' median: less is slow
OF_SHARED = 1 / 8  # the same of peers that share a processor: what each gets of it is chance
LOSSY = 0.003  # part of the segments sent again from which on loss keeps the window small
OF_WINDOW = 0.5  # of what is in flight, a round trip: as much, and the window is the limit
ALL_PAIRS = 4  # hosts; of more, neighbours are measured
CPU = 0.3  # part of the time that the sender computed: more, and the processor is the limit
SHARE = 0.7  # part of the time that the network was the limit; of a slow link it is all of it
STEADY = 2  # a slow link gives the same each time; what a busy processor leaves is chance
LATE = 0.1  # seconds that a side may come late without being called busy


def partners(names: list[str]) -> list[tuple[str, str]]:
    """Directed pairs to measure first: all of a few hosts, else two rounds of neighbours (each
    host with the next, in a ring), both ways. Neighbouring entries are disjoint where possible."""
    n = len(names)
    if n <= ALL_PAIRS:
        some = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    else:
        ring = [(names[i], names[(i + 1) % n]) for i in range(n)]
        some = ring[0::2] + ring[1::2]
    return some + [(b, a) for a, b in some]


def _sends(seen: Seen) -> dict[tuple[str, str], list[dict]]:
    return {p: f["sends"] for p, f in seen.pairs.items() if f.get("sends")}


def reference(seen: Seen) -> tuple[float, str] | None:
    """(bytes/s below which a pair is slow, in words); None where there is nothing to go by: the
    link's rate is not given, and fewer than three hosts are no peers."""
    if seen.line_rate:
        return OF_LINE * seen.line_rate, f"the link's rate is {_rate(seen.line_rate)}"
    best: dict[str, float] = {}
    for pair, sends in _sends(seen).items():
        for host in pair:
            best[host] = max(best.get(host, 0.0), *(s["rate"] for s in sends))
    if len(best) < 3:
        return None
    # Each host's best: of three, one that is slow is an end of most pairs.
    usual = median(best.values())
    boots = [h.facts.get("identity", {}).get("value", {}).get("boot_id") for h in seen.hosts]
    shared = len(set(boots)) < len(boots)
    return (OF_SHARED if shared else OF_PEERS) * usual, f"usual here is {_rate(usual)}"


def _verdict(send: dict, rtt: float, floor: float) -> str:
    """ "" if it acquits, "busy" if it says nothing, "slow"."""
    window = send["flight"] / max(1e-6, min(rtt, send["min_rtt"] or rtt))
    if send["alone"] >= floor or send["alone"] >= OF_WINDOW * window:
        return ""
    if window < floor and send["retrans"] > LOSSY:
        return ""  # the best of links carries no more of so small a window
    busy = send["cpu"] > CPU or send["share"] < SHARE or send["late"] > LATE
    return "busy" if busy else "slow"


def verdicts(seen: Seen) -> dict[tuple[str, str], str]:
    """By pair: "" for fast enough, "slow" (at least two measurements agree on it and none is
    against it), "busy" (that cannot be said)."""
    against = reference(seen)
    found = {}
    for pair, sends in _sends(seen).items() if against else []:
        rtt = seen.pairs[pair].get("ping", {}).get("rtt", 1.0)
        each = [_verdict(s, rtt, against[0]) for s in sends]
        slow = [s["alone"] for s, verdict in zip(sends, each) if verdict == "slow"]
        steady = slow and max(slow) <= STEADY * min(slow)
        found[pair] = "" if "" in each else "slow" if steady and len(slow) > 1 else "busy"
    return found


def suspects(seen: Seen) -> list[tuple[str, str]]:
    """Pairs that no measurement has acquitted yet."""
    return [p for p, verdict in verdicts(seen).items() if verdict]


@check("speed", needs=["interface"])
def speed(seen: Seen):
    if len(seen.hosts) < 2:
        raise NotChecked("one host: no pairs")
    by_name = {h.name: h for h in seen.hosts}
    sends, against, found = _sends(seen), reference(seen), verdicts(seen)
    asked = set(partners([h.name for h in seen.hosts]))
    for pair, state in seen.pairs.items():
        if pair not in sends and pair in asked:
            yield skip(tuple(by_name[n] for n in pair), _why_not(state))
    if against is None:
        for pair, tries in sends.items():
            best = max(s["rate"] for s in tries)
            yield skip(tuple(by_name[n] for n in pair), f"{_rate(best)}, with nothing to judge it "
                       "by: give --line-rate, or three hosts")  # fmt: skip
        return
    slow = [p for p, verdict in found.items() if verdict == "slow"]
    for where, pairs in blame(slow, [p for p, v in found.items() if v != "busy"]):
        best = max(s["rate"] for p in pairs for s in sends[p])
        said = f"{_rate(best)} at best, of {len(sends[pairs[0]])} measurements; {against[1]}"
        place = by_name.get(where) if isinstance(where, str) else where and tuple(
            by_name[n] for n in where
        )  # fmt: skip
        if isinstance(where, tuple):
            said += "; which of the two it is cannot be told"
            where = " and ".join(where)
        yield fail(place, said, f"cable, switch port and negotiated speed of {where or 'all'} "
                   "(`ethtool <interface>`); what else uses it (`sar -n DEV 1`)")  # fmt: skip
    for pair, tries in sends.items():
        where = tuple(by_name[n] for n in pair)
        if found[pair] == "busy":
            yield skip(where, f"{_rate(max(s['rate'] for s in tries))}, but node busy: the "
                       "processor was the limit, not the link")  # fmt: skip
        elif found[pair] == "":
            yield ok(where, _rate(max(s["rate"] for s in tries)))


def _why_not(state: dict) -> str:
    if not state["addr"]:
        return "cannot connect: see connect"
    if not state.get("burst", {}).get("passes", True):
        return "full packets do not pass: see mtu"
    return state.get("unsent", state.get("error", "no time was left"))


def _rate(per_second: float) -> str:
    bits = per_second * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"
