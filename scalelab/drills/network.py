"""Pit 2: names, interfaces, ports, firewalls, MTU, a slow link."""

from __future__ import annotations

from functools import partial

from ..cluster.firewall import find_nft
from .fault import (
    PORT,
    STATIC_PORT,
    Fault,
    Lab,
    python,
    said,
    silent,
    stalled,
    static,
    torchrun,
    values,
)  # fmt: skip

ALIAS, ALIAS_ADDR = "head-ib", "10.77.0.101"
BRIDGE_ADDR = "172.17.0.2"
GIGABIT = 125e6  # bytes/s


def hosts_text(lab: Lab, **other: str | None) -> str:
    """/etc/hosts with some names leading elsewhere, or (None) nowhere."""
    names = {n.name: n.addr for n in lab.cluster.nodes} | other
    lines = [f"{addr} {name}" for name, addr in names.items() if addr]
    return "\n".join(["127.0.0.1 localhost", *lines]) + "\n"


def _names(lab: Lab, index: int, **other: str | None) -> None:
    lab.node(index).set_hosts(hosts_text(lab, **other))


def _own_names(addr: str | None, lab: Lab) -> None:
    for node in lab.cluster.nodes:
        _names(lab, node.index, **{node.name: addr})


def _names_as_they_were(lab: Lab) -> None:
    for node in lab.cluster.nodes:
        _names(lab, node.index)


def _second_address(lab: Lab) -> None:
    """node0 gets a second address, and a name for it: as of another NIC."""
    lab.admin(0, python(
        "import pyroute2\n"
        "with pyroute2.IPRoute() as ip:\n"
        "    eth0 = ip.link_lookup(ifname='eth0')[0]\n"
        f"    ip.addr('add', index=eth0, address='{ALIAS_ADDR}', prefixlen=24)"
    ))  # fmt: skip
    for node in lab.cluster.nodes:
        node.set_hosts(hosts_text(lab, **{ALIAS: ALIAS_ADDR}))


def _endpoint(lab: Lab) -> str:
    return f"{'node0' if lab.fixed else ALIAS}:{PORT}"


def _behind_bridge(lab: Lab) -> None:
    """Every host's own name is its container's address on a bridge of its own: the first one that
    such a bridge gives, and so the same on all of them."""
    for node in lab.cluster.nodes:
        lab.admin(node.index, python(
            "import pyroute2\n"
            "with pyroute2.IPRoute() as ip:\n"
            "    ip.link('add', ifname='docker0', kind='bridge')\n"
            "    docker0 = ip.link_lookup(ifname='docker0')[0]\n"
            "    ip.link('set', index=docker0, state='up')\n"
            f"    ip.addr('add', index=docker0, address='{BRIDGE_ADDR}', prefixlen=16)"
        ))  # fmt: skip
    _own_names(BRIDGE_ADDR, lab)


def _put_right(lab: Lab) -> None:
    lab.fixed = True


def _no_firewall(lab: Lab) -> None:
    for node in lab.cluster.nodes:
        node.firewall([])


def _only_rendezvous(lab: Lab) -> None:
    allowed = [{"action": "accept", "proto": "tcp", "ports": str(PORT)},
               {"action": "accept", "proto": "icmp"}]  # fmt: skip
    for node in lab.cluster.nodes:
        node.firewall(allowed, policy="drop")


def _slow(run) -> str | None:
    rates = values(run, r"large all-reduce ok, bus bandwidth ([\d.]+) MB/s")
    if len(rates) < len(run.lines):
        return None
    rate = min(float(r) for (r,) in rates.values())
    if rate * 1e6 > GIGABIT / 5:
        return None
    return f"no error; {rate:.0f} MB/s where the link should carry {GIGABIT / 1e6:.0f} MB/s"


def _no_nft() -> str:
    return "" if find_nft() else "needs nft (Debian package nftables)"


# What gloo says where it was told a peer's address that does not lead there
UNREACHABLE = ("Gloo connectFullMesh failed", "Connection refused", "Network is unreachable")

NETWORK = (
    Fault(
        id="name-is-loopback", pit="network", incidents=("NET01",),
        title="Every host's own name means 127.0.1.1 there, as Debian installs it",
        inject=partial(_own_names, "127.0.1.1"), cure=_names_as_they_were, lines=torchrun,
        symptom=lambda run: said(run, *UNREACHABLE), named="own name",
    ),
    Fault(
        id="name-unknown", pit="network", node="node1",
        title="node1 does not know its own name",
        inject=lambda lab: _names(lab, 1, node1=None), cure=_names_as_they_were, lines=torchrun,
        symptom=lambda run: said(run, "Name or service not known", node=1), named="own name",
    ),
    Fault(
        id="name-falls-back", pit="network", incidents=("NET02",),
        title="No host knows its own name, and gloo falls back to loopback",
        inject=partial(_own_names, None), cure=_names_as_they_were,
        lines=lambda lab: static(lab, address=lab.node(0).addr),
        asks=lambda lab: {"endpoint": f"{lab.node(0).addr}:{STATIC_PORT}"},
        symptom=lambda run: said(run, *UNREACHABLE) and said(run, "Unable to resolve hostname"),
        named="own name",
    ),
    Fault(
        id="endpoint-alias", pit="network", incidents=("RDZ01",),
        title="The rendezvous endpoint is a name that node0 does not know as its own",
        inject=_second_address, cure=_put_right,
        lines=lambda lab: torchrun(lab, endpoint=_endpoint(lab)),
        asks=lambda lab: {"endpoint": _endpoint(lab)}, symptom=silent, named="endpoint",
    ),
    Fault(
        id="wrong-interface", pit="network", incidents=("NET04",), node="node1",
        title="GLOO_SOCKET_IFNAME names an interface that node1 does not have",
        inject=lambda lab: lab.node(1).env.update(GLOO_SOCKET_IFNAME="enp5s0"),
        cure=lambda lab: lab.node(1).env.update(GLOO_SOCKET_IFNAME="eth0"),
        lines=torchrun, symptom=lambda run: said(run, "Unable to find address for", node=1),
        named="interface",
    ),
    Fault(
        id="behind-a-bridge", pit="network", incidents=("NET08",),
        title="Every host publishes the address of its container, behind a bridge of its own",
        inject=_behind_bridge, cure=_names_as_they_were, lines=torchrun,
        symptom=lambda run: said(run, *UNREACHABLE), named="interface",
    ),
    Fault(
        id="rendezvous-port-closed", pit="network", node="node0",
        title="node0's firewall drops what comes to the rendezvous port",
        inject=lambda lab: lab.node(0).firewall(
            [{"action": "drop", "proto": "tcp", "ports": str(PORT)}]
        ),
        cure=_no_firewall, lines=torchrun, symptom=silent, named="connect", unless=_no_nft,
    ),
    Fault(
        id="only-rendezvous-port", pit="network", incidents=("NET05",),
        title="The firewalls let the rendezvous port through, and nothing else",
        inject=_only_rendezvous, cure=_no_firewall, lines=torchrun,
        symptom=lambda run: stalled(run, "started on", "joined"), named="connect",
        unless=_no_nft,
    ),
    Fault(
        id="mtu-black-hole", pit="network", incidents=("NET06",), cluster={"mtu": 9000},
        title="Hosts at MTU 9000, a switch port in between that carries 1500",
        inject=lambda lab: lab.cluster.set_link(port_mtu=1500),
        cure=lambda lab: lab.cluster.set_link(mtu=1500, port_mtu=None), lines=torchrun,
        symptom=lambda run: stalled(run, "small all-reduce ok", "large all-reduce ok"),
        named="mtu",
    ),
    Fault(
        id="slow-link", pit="network", cluster={"rate": "1gbit"},
        title="One link works at a tenth of its rate",
        inject=lambda lab: lab.cluster.set_link(1, rate="100mbit"),
        cure=lambda lab: lab.cluster.set_link(1, rate="1gbit"), lines=torchrun,
        symptom=_slow, named="speed",
    ),
)  # fmt: skip
