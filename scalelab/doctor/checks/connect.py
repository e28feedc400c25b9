"""Can every host connect to every other, on the rendezvous port and on those the kernel gives out?

Only the store uses the rendezvous port. The ranks of gloo and NCCL listen on ports of the kernel's
choice, from ip_local_port_range, and dial each other directly.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import subprocess

from ..addresses import networks, nic_of
from ..blame import blame
from ..net_ops import NetOps as NetOps  # the agent takes its requests from here
from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, skip

CHAIN = "inet filter input"  # what distributions ship
WORDS = {
    "timeout": "time out", "refused": "are refused", "unreachable": "are unreachable",
    "silent": "connect, but nothing comes back", "stranger": "are answered by somebody else",
    "another": "are answered by another host: two have one address",
}  # fmt: skip
CAUSES = {
    "timeout": "a firewall drops them, or there is no way back",
    "refused": "a firewall rejects them, for the doctor listens there",
    "unreachable": "there is no route, or a firewall says so",
}


@probe("firewall", limit=3)
def firewall(context: dict) -> dict:
    """Name of the nftables chain that incoming packets meet here, "" where it is not known."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        raise NotChecked("no nft here")
    done = subprocess.run(
        [nft, "-j", "list", "chains"], capture_output=True, timeout=2.5, stdin=subprocess.DEVNULL
    )
    try:
        rows = [row["chain"] for row in json.loads(done.stdout)["nftables"] if "chain" in row]
    except (ValueError, KeyError, TypeError):
        raise NotChecked("nft shows its rules to root only") from None
    hooked = [c for c in rows if c.get("hook") == "input" and c.get("family") in ("inet", "ip")]
    return {"chain": next((f"{c['family']} {c['table']} {c['name']}" for c in hooked), "")}


def kind(pair: dict) -> str:
    """What is wrong with one direction of a pair, as scope and result; "" for nothing. Only the
    way to the head has a rendezvous port, so that scope "range" (none of it passes) does not say
    whether the rendezvous port does."""
    rows = pair.get("dialled", {}).get(pair["at"], [])
    bad = [r for r in rows if r["result"] != "ok"]
    if not bad:
        return ""
    if all(r["kind"] == "rendezvous" for r in bad):
        return "rendezvous " + _usual(bad)
    passing = any(r["kind"] == "range" for r in rows if r not in bad)
    return f"{'some' if passing else 'range'} {_usual(bad)}"


def _usual(rows: list[dict]) -> str:
    found = [r["result"] for r in rows]
    return max(sorted(set(found)), key=found.count)


@check("connect", needs=["interface", "firewall"])
def connects(seen: Seen):
    if len(seen.hosts) < 2:
        raise NotChecked("one host: no pairs")
    by_name = {h.name: h for h in seen.hosts}
    tried, kinds = [], {}
    for (a, b), pair in seen.pairs.items():
        if not pair.get("dialled"):
            yield skip((by_name[a], by_name[b]), pair.get("error", "was not tried"))
            continue
        tried.append((a, b))
        if kind(pair):
            kinds[a, b] = kind(pair)
    # A host may be behind two faults: each kind is explained apart, whole silence first.
    for one in sorted(set(kinds.values()), key=lambda k: (not k.startswith("range"), k)):
        bad = [p for p, k in kinds.items() if k == one]
        for where, pairs in blame(bad, tried, directed=True):
            place = by_name.get(where) if isinstance(where, str) else where and tuple(
                by_name[n] for n in where
            )  # fmt: skip
            yield _finding(place, pairs, one, kinds, seen)
    for p in tried:
        if p not in kinds:
            rows = seen.pairs[p]["dialled"][seen.pairs[p]["at"]]
            yield ok((by_name[p[0]], by_name[p[1]]), f"{len(rows)} of {len(rows)} ports connect")


def _finding(where, pairs, what, kinds, seen: Seen):
    by_name = {h.name: h for h in seen.hosts}
    ways = _ways(where, pairs, kinds)
    outward = isinstance(where, Host) and any(a == where.name for a, _ in pairs)
    if isinstance(where, Host):  # what gets in tells most
        pairs = [p for p in pairs if p[1] == where.name] or pairs
    first = seen.pairs[pairs[0]]
    rows = first["dialled"][first["at"]]
    scope, result = what.split()
    port, (low, high) = seen.endpoint[1], _range(by_name[pairs[0][1]], seen)
    words = WORDS.get(result, result)
    good = ", ".join(str(r["port"]) for r in rows if r["result"] == "ok")
    bad = ", ".join(str(r["port"]) for r in rows if r["result"] != "ok")
    doors = [
        r["result"] for p in pairs for r in seen.pairs[p]["dialled"][seen.pairs[p]["at"]]
        if r["kind"] == "rendezvous"
    ]  # fmt: skip
    if scope == "range" and "ok" in doors:
        said = (f"the rendezvous port {port} is open, but ports {low}-{high}, which ranks listen "
                f"on, {words}")  # fmt: skip
    elif scope == "range":
        also = f" and the rendezvous port {port}" if doors else ""
        said = f"all ports tried of {low}-{high}, which ranks listen on,{also} {words}"
    elif scope == "rendezvous":
        said = f"the rendezvous port {port} alone is closed: connections to it {words}"
    else:
        said = f"of ports {low}-{high}, {bad} {words}; {good} pass"
    cause = CAUSES.get(result, "")
    fix = _fix(where, pairs, scope, result, seen)
    if outward and pairs[0][1] == where.name:
        fix += "; and let TCP out to them"
    return fail(where, f"{ways}: {said}" + (f" ({cause})" if cause else ""), fix)


def _ways(where, pairs, kinds) -> str:
    if where is None:
        return "between all hosts"
    if isinstance(where, tuple):
        (a, b), back = pairs[0], pairs[0][::-1]
        return f"{a} → {b}" + (
            ", and back" if back in pairs else "" if back in kinds else ", though not back"
        )  # fmt: skip
    into = [a for a, b in pairs if b == where.name]
    out = [b for a, b in pairs if a == where.name]
    if into and out:
        return f"to {where.name} and from it"
    back = [p for p in pairs if p[::-1] in kinds]
    one_way = "" if back else ", though not back"
    if into:
        return f"from {_some(into)} to {where.name}{one_way}"
    return f"from {where.name} to {_some(out)}{one_way}"


def _some(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} hosts"


def _range(host: Host, seen: Seen) -> tuple[int, int]:
    return tuple(seen.facts(host, "listening")["range"])


def _fix(where, pairs, scope: str, result: str, seen: Seen) -> str:
    by_name = {h.name: h for h in seen.hosts}
    if result == "another":
        return "give every host an address of its own; in containers: --network=host"
    if isinstance(where, Host) and all(a == where.name for a, _ in pairs):
        return (f"on {where.name}: let TCP out to the other nodes (nft list ruleset, the output "
                "chain; egress rules of its security group)")  # fmt: skip
    to = list(dict.fromkeys(b for _, b in pairs))
    host = by_name[to[0]]
    low, high = _range(host, seen)
    port = seen.endpoint[1]
    doors = any(
        r["kind"] == "rendezvous" and r["result"] != "ok"
        for p in pairs for r in seen.pairs[p]["dialled"][seen.pairs[p]["at"]]
    )  # fmt: skip
    ports = str(port) if scope == "rendezvous" else f"{low}-{high}"
    if doors and scope != "rendezvous":
        ports = f"{{ {port}, {ports} }}"
    try:
        chain = seen.facts(host, "firewall")["chain"] or CHAIN
    except NotChecked:
        chain = CHAIN
    fix = (f"on {_some(sorted(to))}: nft insert rule {chain} ip saddr {_peers(host, pairs, seen)} "
           f"tcp dport {ports} accept (or the same in ufw or the security group)")  # fmt: skip
    if scope in ("range", "some"):
        fix += (f"; or open fewer: sysctl -w net.ipv4.ip_local_port_range='{high - 999} {high}' on "
                "all nodes, and let in only that")  # fmt: skip
    return fix


def _peers(host: Host, pairs, seen: Seen) -> str:
    """The network that the peers dial from, as a firewall rule has it."""
    at = seen.pairs[pairs[0]]["at"]
    nic = nic_of(at, host, seen)
    mine = [net for n, addr, net in networks(host, seen) if nic and addr == at]
    theirs = [
        seen.pairs[b, a]["at"] for a, b in pairs
        if b == host.name and seen.pairs.get((b, a), {}).get("at")
    ]  # fmt: skip
    inside = [n for n in mine if all(ipaddress.ip_address(t) in n for t in theirs)]
    if inside:
        return str(inside[0])
    return "{ " + ", ".join(sorted(set(theirs))) + " }" if theirs else "<the other nodes>"
