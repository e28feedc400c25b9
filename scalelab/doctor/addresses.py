"""What a host would tell its peers to dial, and what they could dial instead. Pure: reads facts."""

from __future__ import annotations

import ipaddress

from .registry import Host, NotChecked, Seen

# Docker's default pools; an address from them is as a rule known on its own machine only.
CONTAINER_NETWORKS = [ipaddress.ip_network(n) for n in ("172.16.0.0/12", "192.168.240.0/20")]


def is_loopback(addr: str) -> bool:
    return ipaddress.ip_address(addr.partition("%")[0]).is_loopback


def from_container_range(addr: str) -> bool:
    ip = ipaddress.ip_address(addr.partition("%")[0])
    return any(ip in n for n in CONTAINER_NETWORKS if n.version == ip.version)


def nics(host: Host, seen: Seen) -> list[dict]:
    """A host's interfaces, see nics.interfaces. Raises NotChecked."""
    return seen.facts(host, "interface")["nics"]


def own_addresses(host: Host, seen: Seen) -> set[str]:
    """All addresses of a host's interfaces but loopback; empty where they are not known."""
    try:
        found = nics(host, seen)
    except NotChecked:
        return set()
    return {a for n in found if not n["loopback"] for a, _ in (*n["addrs"], *n["addrs6"])}


def nic_of(addr: str | None, host: Host, seen: Seen) -> dict | None:
    """The interface that has this address; None where none has, or they are not known."""
    try:
        found = nics(host, seen)
    except NotChecked:
        return None
    return next(
        (n for n in found if addr in [a for a, _ in (*n["addrs"], *n["addrs6"])]), None
    )  # fmt: skip


def networks(host: Host, seen: Seen) -> list[tuple[dict, str, ipaddress.IPv4Network]]:
    """(interface, IPv4 address, its network) of every interface that is up, but loopback."""
    return [
        (n, addr, ipaddress.IPv4Interface(f"{addr}/{prefix}").network)
        for n in nics(host, seen) if n["up"] and not n["loopback"] for addr, prefix in n["addrs"]
    ]  # fmt: skip


def lan_address(host: Host, seen: Seen) -> str | None:
    """The address by which this host should be known: the cluster's, if it is its own, else the
    one on the network that it shares with most peers, rather no container's."""
    try:
        mine = networks(host, seen)
    except NotChecked:
        return host.addr
    if host.addr in [addr for _, addr, _ in mine] or (host.addr and not seen.separate):
        return host.addr
    theirs = []
    for peer in seen.hosts:
        try:
            theirs += [net for _, _, net in networks(peer, seen)] if peer is not host else []
        except NotChecked:
            continue
    ranked = sorted(mine, key=lambda m: (from_container_range(m[1]), -theirs.count(m[2])))
    return ranked[0][1] if ranked else host.addr


def lan_nic(host: Host, seen: Seen) -> str:
    """Name of that address's interface, for a fix that can be pasted."""
    nic = nic_of(lan_address(host, seen), host, seen)
    return nic["name"] if nic else "<interface>"


def published(host: Host, seen: Seen) -> tuple[str | None, str]:
    """(the address that gloo would tell peers to dial, or None; where it has that from)."""
    try:
        wanted = seen.facts(host, "interface")["gloo"]
        if wanted:
            for name in wanted.split(","):
                for nic in nics(host, seen):
                    if nic["name"] == name and nic["addrs"]:
                        return nic["addrs"][0][0], f"GLOO_SOCKET_IFNAME={wanted}"
            return None, f"GLOO_SOCKET_IFNAME={wanted}"
    except NotChecked:
        pass
    try:
        return seen.facts(host, "own name")["usable"], "its own name"
    except NotChecked:
        return None, "its own name"


def to_dial(host: Host, seen: Seen) -> list[str]:
    """Addresses at which to try a host: what it publishes, if that can work, then what it should
    be known by, so that a second fault is found behind a bad name; then NCCL's choice."""
    first, _ = published(host, seen)
    tried = [first] if first and not (seen.separate and is_loopback(first)) else []
    tried.append(lan_address(host, seen))
    try:
        facts = seen.facts(host, "interface")
        if facts["nccl"]:
            chosen = nccl_choice(facts["nccl"], nics(host, seen))
            tried += [chosen[0]["addrs"][0][0]] if chosen else []
    except NotChecked:
        pass
    tried = [a for a in tried if a and not (seen.separate and is_loopback(a))]
    if not seen.separate:  # one machine: gloo without a usable name takes loopback, and that works
        tried = tried[:1] or ["127.0.0.1"]
    return list(dict.fromkeys(tried))


def nccl_choice(wanted: str, found: list[dict]) -> list[dict]:
    """Interfaces that NCCL would use, best first, by its rules: a list of prefixes, "=" for exact
    names, "^" for all but those; unset: InfiniBand's, then any but docker and lo, then those."""
    ready = [n for n in found if n["up"] and n["addrs"]]
    if not wanted:
        return (
            [n for n in ready if n["name"].startswith("ib")]
            or [n for n in ready if not n["name"].startswith(("docker", "lo"))]
            or [n for n in ready if n["name"].startswith("docker")]
            or ready
        )
    exclude, exact = wanted.startswith("^"), wanted.lstrip("^").startswith("=")
    words = [w for w in wanted.lstrip("^").lstrip("=").split(",") if w]

    def named(nic: dict) -> bool:
        return any(nic["name"] == w if exact else nic["name"].startswith(w) for w in words)

    return [n for n in ready if named(n) != exclude]


def head(seen: Seen) -> Host:
    """The host that is to hold the rendezvous: the one that knows the endpoint as itself, else
    the one that has its address, else the first."""
    know, have = [], []
    for host in seen.hosts:
        try:
            facts = seen.facts(host, "endpoint")
        except NotChecked:
            continue
        know += [host] if facts["itself"] else []
        others = [
            h.facts.get("endpoint", {}).get("value", {}).get("addrs", [])
            for h in seen.hosts if h is not host
        ]  # fmt: skip
        dialled = {a for addrs in (*others, facts["addrs"]) for a in addrs[:1]}
        have += [host] if dialled & own_addresses(host, seen) else []
    both = [h for h in know if h in have]
    return (both or know or have or seen.hosts)[0]
