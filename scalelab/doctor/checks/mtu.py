"""Do packets of full size pass between every two hosts?

Small messages and ping pass where they do not, and a job hangs at its first large collective. The
ICMP message that would tell the sender is as a rule filtered, so the test is TCP itself.
"""

from __future__ import annotations

from ..blame import blame
from ..registry import NotChecked, Seen, check, fail, ok, skip, warn
from .interface import reached_by


@check("mtu", needs=["interface"])
def mtu(seen: Seen):
    if len(seen.hosts) < 2:
        raise NotChecked("one host: no pairs")
    by_name = {h.name: h for h in seen.hosts}
    tried, bad = [], {}
    for pair, found in seen.pairs.items():
        where = tuple(by_name[n] for n in pair)
        result = found.get("burst", {})
        if not found["addr"]:
            yield skip(where, "cannot connect: see connect")
        elif "passes" not in result:
            yield skip(where, result.get("error", "no time was left"))
        else:
            tried.append(pair)
            if not result["passes"]:
                bad[pair] = result
    nics = {h.name: reached_by(h, seen) for h in seen.hosts}
    for where, pairs in blame(bad, tried):
        result = min((bad[p] for p in pairs), key=lambda r: r["largest"])
        place = by_name.get(where) if isinstance(where, str) else where and tuple(
            by_name[n] for n in where
        )  # fmt: skip
        name = where or "all hosts"
        between = f"{pairs[0][0]} and {pairs[0][1]}" if isinstance(where, tuple) else (
            f"{where} and the others" if where else "all hosts"
        )  # fmt: skip
        size, largest, blocked = result["size"], result["largest"], result["blocked"]
        said = (
            f"passes {largest}, not {blocked}: small messages arrive, large ones never do"
            if largest else "passes no packet of 576 bytes or more"
        )  # fmt: skip
        nic = (nics[pairs[0][0]] or {}).get("name", "<interface>")
        yield fail(
            place,
            f"interface MTU {size}, the path between {between} {said}",
            f"`ip link set dev {nic} mtu {largest or 1500}` on all nodes, "
            f"or MTU {size} on every switch port of {name if isinstance(name, str) else between}",
        )
    yield from _differences(nics, by_name, seen)
    for pair in tried:
        if pair not in bad:
            size = seen.pairs[pair]["burst"]["size"]
            yield ok(tuple(by_name[n] for n in pair), f"full packets of {size} bytes pass")


def _differences(nics: dict, by_name: dict, seen: Seen):
    sizes = {name: nic["mtu"] for name, nic in nics.items() if nic}
    if len(set(sizes.values())) < 2 or not seen.separate:
        return
    usual = seen.majority(sizes)
    fix = "`ip link set dev {} mtu {}` there: one MTU on all nodes and switch ports"
    if usual is None:
        listed = ", ".join(f"{size} on {name}" for name, size in sizes.items())
        where = tuple(by_name[n] for n in sizes) if len(sizes) == 2 else None
        nic = next(n["name"] for n in nics.values() if n)
        yield warn(where, f"MTU differs: {listed}", fix.format(nic, min(sizes.values())))
        return
    for name, size in sizes.items():
        if size != usual:
            yield warn(by_name[name], f"MTU {size} on {nics[name]['name']}; the others have "
                       f"{usual}", fix.format(nics[name]["name"], usual))  # fmt: skip
