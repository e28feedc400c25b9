"""Do all hosts mean the same machine by the rendezvous endpoint, and does that machine know it?"""

from __future__ import annotations

import ipaddress
import os
import socket

from ..addresses import head, is_loopback, lan_address, own_addresses
from ..nics import port_range, reserved_ports
from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, skip, warn
from ..sockets import holder, next_free, taken
from .names import PATIENCE, is_named, resolve


@probe("endpoint", limit=3 * PATIENCE)
def endpoint(context: dict) -> dict:
    """What the endpoint's host resolves to here, and whether this is the host ("itself")."""
    host = context["endpoint"][0]
    found, error = resolve(host, proto=socket.IPPROTO_TCP)
    addrs = sorted(dict.fromkeys(f[4][0] for f in found), key=lambda a: ":" in a)  # IPv4 first
    return {"addrs": addrs, "error": error, "itself": knows_itself(host),
            "hostname": socket.gethostname()}  # fmt: skip


def knows_itself(host: str) -> bool:
    """Whether c10d here would hold the store of `host`: the rule of _matches_machine_hostname in
    torch/distributed/elastic/rendezvous/utils.py (torch 2.13). An alias, or an address of another
    interface than the one that the own name leads to, is nobody's."""
    if host == "localhost":
        return True
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        literal = None
    if literal and literal.is_loopback:
        return True
    options = {"proto": socket.IPPROTO_TCP, "flags": socket.AI_CANONNAME}
    its = [f[4][0] for f in resolve(host, **options)[0]]
    own = socket.gethostname()
    if host == own:
        return True
    return any(  # torch ends with gaierror if its own name does not resolve: no host either
        (canonical and canonical == host) or (literal and addr[0] == str(literal))
        or addr[0] in its
        for *_, canonical, addr in resolve(own, **options)[0]
    )  # fmt: skip


@check("endpoint", needs=["endpoint", "own name"])
def endpoints(seen: Seen):
    name, port = seen.endpoint
    facts: dict[str, dict] = {}
    for host in seen.hosts:
        try:
            facts[host.name] = seen.facts(host, "endpoint")
        except NotChecked as e:
            yield skip(host, str(e))
    asked = [h for h in seen.hosts if h.name in facts]
    lost = [h for h in asked if facts[h.name]["error"]]
    top = head(seen)
    for host in lost:
        yield fail(host, f"{name} (the endpoint) does not resolve: {facts[host.name]['error']}",
                   f"in /etc/hosts of {host.name}: `{lan_address(top, seen)} {name}`")  # fmt: skip
    asked = [h for h in asked if h not in lost]
    if not asked:
        return
    real = facts.get(top.name, {}).get("hostname", top.name)
    if seen.separate and all(is_loopback(facts[h.name]["addrs"][0]) for h in asked):
        yield fail(None, f"{name} is every machine's own loopback: each would wait alone",
                   f"the same on all: --rdzv-endpoint={real}:{port}")  # fmt: skip
        return
    wrong = list(_elsewhere(asked, top, facts, seen))
    for host, detail in wrong:
        yield fail(host, detail,
                   f"in /etc/hosts of {host.name}: `{lan_address(top, seen)} {name}`")  # fmt: skip
    blamed = {h.name for h, _ in wrong}
    yield from _who_holds_it(asked, top, facts, seen, blamed, real)


def _elsewhere(asked: list[Host], top: Host, facts: dict, seen: Seen):
    """(host, words) of each that means another machine than the rest do."""
    if not seen.separate:
        return
    name = seen.endpoint[0]
    right = own_addresses(top, seen)
    firsts = {h.name: facts[h.name]["addrs"][0] for h in asked if h is not top}
    usual = seen.majority(firsts)
    meant = {*firsts.values(), *(facts[top.name]["addrs"] if top in asked else [])}
    for host in asked:
        addr = facts[host.name]["addrs"][0]
        if host is top:
            continue  # its own loopback serves it: the store listens on every address
        if is_loopback(addr):
            yield host, f"{name} resolves to {addr} here: this host would dial itself"
        elif addr not in right and (right & meant or (usual and addr != usual)):
            others = sorted(a for a in {*right, *meant} if a != addr)
            yield host, f"{name} resolves to {addr} here, but is {', '.join(others[:2])}"


def _who_holds_it(asked, top, facts, seen, blamed, real):
    name, port = seen.endpoint
    holders = [h for h in asked if facts[h.name]["itself"]]
    if not holders:
        if is_named(top, seen):
            yield skip(top, "whether it knows the endpoint as itself: see own name")
            return
        yield fail(
            top,
            f"no machine knows {name} as itself, so none holds the rendezvous: all wait as clients",
            f"--rdzv-endpoint={real}:{port} on all; "
            f"or --rdzv-conf is_host=1 on {top.name} (is_host=0 on the others)",
        )
        return
    for host in holders if seen.separate else []:
        if host is not top and host.name not in blamed:
            blamed.add(host.name)
            if is_named(host, seen):
                yield skip(host, f"takes {name} for itself, as {top.name} does: see own name")
            else:
                yield fail(host, f"takes {name} for itself, as {top.name} does: two rendezvous",
                           f"--rdzv-endpoint={real}:{port} on all, and in /etc/hosts of "
                           f"{host.name} no address of {top.name} for itself")  # fmt: skip
    for host in asked:
        if host.name not in blamed:
            addr = facts[host.name]["addrs"][0]
            yield ok(host, f"{name} is {addr}" + (", itself" if host in holders else ""))


@probe("rendezvous port")
def rendezvous_port(context: dict) -> dict:
    """Whether the rendezvous could be held here on its port, as far as this host goes."""
    port = context["endpoint"][1]
    low, high = port_range()
    reserved = any(a <= port <= b for a, b in reserved_ports())
    held = holder(port)
    if held and held.get("pid") == os.getppid():
        held = None  # the doctor that others join listens there until all are here
    if held is None and context["head"] and taken(port):
        held = {"pid": None, "why": "something that does not listen: an outgoing connection?"}
    return {"held": held, "range": [low, high], "reserved": reserved, "free": next_free(port),
            "privileged": _privileged(port)}  # fmt: skip


def _privileged(port: int) -> bool:
    """Whether this user may not listen on the port."""
    try:
        with open("/proc/sys/net/ipv4/ip_unprivileged_port_start") as f:
            first = int(f.read())
        with open("/proc/thread-self/status") as f:
            rights = int(next(s for s in f if s.startswith("CapEff")).split()[1], 16)
        return port < first and not rights >> 10 & 1  # CAP_NET_BIND_SERVICE
    except (OSError, ValueError, StopIteration):
        return port < 1024 and os.geteuid() != 0


@check("rendezvous port", needs=["rendezvous port", "endpoint"])
def port_is_good(seen: Seen):
    top = head(seen)
    facts, port = seen.facts(top, "rendezvous port"), seen.endpoint[1]
    low, high = facts["range"]
    other = (f"another port on all nodes, such as {facts['free']} (in --rdzv-endpoint, or "
             "--master-port where the lines have that)")  # fmt: skip
    if facts["privileged"]:
        yield fail(top, f"port {port} is privileged: this user may not listen on it", other)
    elif facts["held"]:
        held = facts["held"]
        if held["pid"]:
            words = f"process {held['pid']} ({held['command']}), {_ago(held['seconds'])}"
            fix = f"if that is a leftover of yours: kill {held['pid']}; else {other}"
        else:
            words, fix = held["why"], other
        yield fail(top, f"port {port} is taken by {words}", fix)
    elif low <= port <= high and not facts["reserved"]:
        yield warn(
            top,
            f"port {port} lies in the range that outgoing connections use ({low}-{high}): "
            "now and then one will have it",
            f"a port below {low}, such as {facts['free']}; "
            f"or on {top.name}: sysctl -w net.ipv4.ip_local_reserved_ports={port}",
        )
    else:
        yield ok(top, f"port {port} is free")


def _ago(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"started {seconds / size:.0f} {unit} ago"
    return f"started {seconds:.0f} s ago"
