"""Round trips and clocks of pairs."""

from __future__ import annotations

from statistics import median

from ..blame import blame
from ..registry import NotChecked, Seen, check, fail, ok, skip, warn

TIMES, MORE = 3, 1e-3  # a round trip is far if it is 3 times the usual and 1 ms more
WARN, FAIL = 0.05, 1.0  # seconds between two clocks, beside half the round trip


def round_trips(seen: Seen) -> dict[tuple[str, str], float]:
    """Seconds, by pair."""
    return {p: f["ping"]["rtt"] for p, f in seen.pairs.items() if "rtt" in f.get("ping", {})}


def usual_round_trip(seen: Seen) -> float | None:
    """What is normal: the median over hosts of each one's best, so that one far host, which is an
    end of most pairs among three, does not make itself the rule. None for fewer than three."""
    times = round_trips(seen)
    best: dict[str, float] = {}
    for (a, b), seconds in times.items():
        for host in (a, b):
            best[host] = min(best.get(host, seconds), seconds)
    return median(best.values()) if len(best) > 2 else None


def far(seen: Seen) -> list[tuple[str, str]]:
    """Pairs whose round trip is far from the usual."""
    usual = usual_round_trip(seen)
    if usual is None:
        return []
    limit = max(TIMES * usual, usual + MORE)
    return [p for p, seconds in round_trips(seen).items() if seconds > limit]


@check("round trip")
def round_trip(seen: Seen):
    if len(seen.hosts) < 2:
        raise NotChecked("one host: no pairs")
    by_name = {h.name: h for h in seen.hosts}
    times, odd = round_trips(seen), far(seen)
    usual = usual_round_trip(seen)
    yield from _unknown(seen, by_name)
    for where, pairs in blame(odd, times):
        place = by_name[where] if isinstance(where, str) else where and tuple(
            by_name[n] for n in where
        )  # fmt: skip
        least = min(times[p] for p in pairs)
        name = where if isinstance(where, str) else "→".join(where or ("all",))
        yield warn(
            place,
            f"round trip {_ms(least)}, usual here {_ms(usual)}",
            f"place {name} near the others (same rack, switch or zone), or leave it out",
        )
    for pair, seconds in times.items():
        if pair not in odd:
            yield ok(tuple(by_name[n] for n in pair), f"round trip {_ms(seconds)}")


@check("clock")
def clock(seen: Seen):
    if len(seen.hosts) < 2:
        raise NotChecked("one host: no pairs")
    by_name = {h.name: h for h in seen.hosts}
    pings = {p: f["ping"] for p, f in seen.pairs.items() if "rtt" in f.get("ping", {})}
    yield from _unknown(seen, by_name)

    def limit(pair, base: float) -> float:
        return base + pings[pair]["span"] / 2

    off = [p for p, x in pings.items() if abs(x["offset"]) > limit(p, WARN)]
    fix = "on {}: `timedatectl set-ntp true`, or start chronyd; see `chronyc tracking`"
    for where, pairs in blame(off, pings):
        most = max(pairs, key=lambda p: abs(pings[p]["offset"]))
        bad = abs(pings[most]["offset"]) > limit(most, FAIL)
        offset = pings[most]["offset"]  # of the second's clock
        if isinstance(where, str):
            offset = offset if most[1] == where else -offset
            said = f"its clock is {_apart(offset)} the others'"
            place, names = by_name[where], where
        elif where is None:
            said, place, names = f"clocks differ by up to {_s(offset)}", None, "all hosts"
        else:
            said = f"{most[1]}'s clock is {_apart(offset)} {most[0]}'s"
            place, names = tuple(by_name[n] for n in where), "both"
        yield (fail if bad else warn)(place, said, fix.format(names))
    for pair, x in pings.items():
        if pair not in off:
            within = max(abs(x["offset"]), 1e-5)  # less than that is no clock's doing
            yield ok(tuple(by_name[n] for n in pair), f"clocks within {_ms(within)}")


def _unknown(seen: Seen, by_name: dict):
    for pair, found in seen.pairs.items():
        if "rtt" not in found.get("ping", {}):
            why = found.get("ping", {}).get("error", "cannot connect: see connect")
            yield skip(tuple(by_name[n] for n in pair), why)


def _apart(offset: float) -> str:
    return f"{_s(offset)} {'ahead of' if offset > 0 else 'behind'}"


def _s(seconds: float) -> str:
    seconds = abs(seconds)
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2g} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"
