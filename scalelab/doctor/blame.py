"""Which host explains that pairs fail. Pairs are directed: (from, to), by name."""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[str, str]


def blame(
    bad: Iterable[Pair], tried: Iterable[Pair], *, directed: bool = False
) -> list[tuple[str | Pair | None, list[Pair]]]:
    """[(a host, a pair, or None for all of them; the bad pairs that this explains)].

    A host is blamed if all that was tried with it is bad, and something without it is good.
    directed: all that was tried towards it (a firewall at its entrance) or from it is enough, and
    with two hosts and one way bad, the one that cannot be reached.
    """
    tried = set(tried)
    left = sorted(set(bad) & tried)
    hosts = sorted({h for p in tried for h in p})
    if not left:
        return []
    if len(hosts) <= 2:
        one_way = directed and len(left) == 1
        return [(left[0][1] if one_way else left[0], left)]
    if set(left) == tried:
        return [(None, left)]
    all_bad, found = set(left), []
    while left:
        best: tuple[int, int, str, list[Pair]] | None = None
        for host in hosts:
            into = [p for p in tried if p[1] == host]
            out = [p for p in tried if p[0] == host]
            sets = [into, out] if directed else [into + out]
            explained = {
                p for s in sets if len(s) > (1 if directed else 2) and all_bad >= set(s) for p in s
            }
            towards = len(explained & set(into))
            mine = sorted(explained & set(left))
            if mine and (best is None or (len(mine), towards) > best[:2]):
                best = (len(mine), towards, host, mine)
        if best is None:
            break
        found.append((best[2], best[3]))
        left = [p for p in left if p not in best[3]]
    # What is left is a matter of two: both ways of a pair are one finding.
    for pair in list(left):
        if pair in left:
            both = [p for p in (pair, pair[::-1]) if p in left]
            found.append((pair, both))
            left = [p for p in left if p not in both]
    return found
