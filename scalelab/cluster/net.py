"""Interfaces, links and addresses of emulated hosts.

A `Fabric` holds the switches: one kernel bridge a rack, in the owner's network namespace. A
`HostNet` holds one host's side. A veth pair joins them: `port` at the rack, `eth0` at the host.

A link's rate holds in both directions: the host shapes what it sends, the rack what it receives.
Delay, jitter and loss are one-way and applied once, on the way out of the sender, so a round trip
between two hosts with 5 ms each takes 10 ms. The kernel's bridge cannot delay or lose a frame, and
lets TCP's large packets through a smaller port MTU; a rack with such a link is run by the
user-space switch (switch.py) for as long as it has one.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

from . import firewall, shaping
from .link import Link
from .netlink import IPRoute, NetlinkError
from .switch_process import SwitchProcess

# The rack's ends take whatever the hosts send: a host's own MTU, or `port_mtu`, sets the limit.
PORT_MTU = 65535


class NetError(RuntimeError):
    """The network could not be brought to the state asked for; one sentence."""


def by_netem(link: Link) -> bool:
    """True where the host's own kernel delays and loses. netem reorders under jitter."""
    return bool(link.delay or link.loss) and not link.jitter and shaping.netem_works()


def by_switch(link: Link) -> bool:
    """True where only the user-space switch can delay and lose."""
    return bool(link.jitter or ((link.delay or link.loss) and not shaping.netem_works()))


@dataclass
class _Port:
    index: int
    rack: int
    egress: shaping.Egress
    link: Link
    mtu: int = PORT_MTU
    bridged: bool = True


class Fabric:
    """The racks' switches. Lives in a single-threaded process with CAP_NET_ADMIN in its own
    network namespace; `seed` decides which frames a lossy link loses."""

    def __init__(self, seed: int = 0) -> None:
        self.ipr, self.seed = IPRoute(), seed
        self.bridges: dict[int, int] = {}
        self.ports: dict[str, _Port] = {}
        self.switches: dict[int, SwitchProcess] = {}
        _no_ipv6()
        # Packet filters of the machine must not see, or put together, what a bridge carries.
        _sysctl("net/bridge/bridge-nf-call-iptables", "0")

    def add_rack(self, rack: int) -> None:
        """A kernel bridge named rack0, rack1, …"""
        name = f"rack{rack}"
        self.ipr.link(
            "add",
            ifname=name,
            kind="bridge",
            br_forward_delay=0,
            br_stp_state=0,
            br_mcast_snooping=0,
        )
        self.bridges[rack] = index = socket.if_nametoindex(name)
        self.ipr.link("set", index=index, mtu=PORT_MTU, state="up")

    def connect(self, port: str, pid: int, rack: int, nic: str = "eth0") -> None:
        """A cable: one end stays here as `port` on `rack`, the other becomes `nic` of `pid`."""
        self.ipr.link(
            "add",
            ifname=port,
            kind="veth",
            mtu=PORT_MTU,
            master=self.bridges[rack],
            state="up",
            peer={"ifname": nic, "net_ns_pid": pid, "attrs": [["IFLA_MTU", Link.mtu]]},
        )
        index = socket.if_nametoindex(port)
        self.ports[port] = _Port(index, rack, shaping.Egress(self.ipr, index), Link())

    def disconnect(self, port: str) -> None:
        """Pull the cable. No error if it is gone, as after its host died."""
        gone = self.ports.pop(port, None)
        if gone is None:
            return
        try:
            self.ipr.link("del", index=gone.index)
        except NetlinkError as e:
            if e.code != errno.ENODEV:
                raise
        if gone.rack in self.switches and self.switches[gone.rack].alive():
            self._configure(gone.rack)

    def apply(self, links: dict[str, Link]) -> None:
        """Bring the rack's side of these links to this state; traffic may be running."""
        racks = set()
        for name, link in links.items():
            port = self.ports.get(name)
            if port is None:
                continue  # its host died meanwhile
            port.link = link
            racks.add(port.rack)
            try:
                port.egress.set(link.rate, link.mtu)
            except NetlinkError as e:
                if e.code != errno.ENODEV:
                    raise
        for rack in racks:
            self._run_rack(rack)

    def mend(self) -> None:
        """Start again any user-space switch whose process has died. Cheap if none has."""
        for rack, switch in list(self.switches.items()):
            if not switch.alive():
                self._run_rack(rack)

    def close(self) -> None:
        """Take everything down."""
        for switch in self.switches.values():
            switch.kill()
        self.switches.clear()
        for port in list(self.ports):
            self.disconnect(port)
        for index in self.bridges.values():
            self.ipr.link("del", index=index)
        self.bridges.clear()
        self.ipr.close()

    def stats(self, rack: int) -> dict[str, dict[str, int]]:
        """Frames a port of a user-space switch took in, lost, or dropped; {} on a bridge."""
        return self.switches[rack].ask({"op": "stats"})["stats"] if rack in self.switches else {}

    def _on(self, rack: int) -> dict[str, _Port]:
        return {name: port for name, port in self.ports.items() if port.rack == rack}

    def _run_rack(self, rack: int) -> None:
        """Kernel bridge or user-space switch, whichever these links need."""
        ports = self._on(rack)
        largest = max((port.link.mtu for port in ports.values()), default=0)
        if any(
            by_switch(p.link) or (p.link.port_mtu is not None and p.link.port_mtu < largest)
            for p in ports.values()
        ):
            switch = self.switches.get(rack)
            if switch is None or not switch.alive():
                self.switches[rack] = SwitchProcess(f"rack{rack}", self.seed + rack)
            self._configure(rack)
        elif rack in self.switches:
            # It delivers what it still holds, then ends: a stream lives through the change.
            self.switches.pop(rack).stop()
        bridged = rack not in self.switches
        for port in ports.values():
            if port.bridged != bridged:
                self._quiet(port, master=self.bridges[rack] if bridged else 0)
                port.bridged = bridged
        if not bridged:
            self.switches[rack].ask({"op": "go"})

    def _configure(self, rack: int) -> None:
        ports = {}
        for name, port in self._on(rack).items():
            link = port.link
            here = by_switch(link)
            ports[name] = {
                "delay": link.delay if here else 0.0,
                "jitter": link.jitter if here else 0.0,
                "loss": link.loss if here else 0.0,
                "mtu": link.port_mtu,
            }
        self.switches[rack].ask({"op": "ports", "ports": ports})

    def _quiet(self, port: _Port, **change) -> None:
        try:
            self.ipr.link("set", index=port.index, **change)
        except NetlinkError as e:
            if e.code != errno.ENODEV:  # its host died meanwhile
                raise


class HostNet:
    """One host's own side; lives in a process inside that host's network namespace."""

    def __init__(self) -> None:
        self.ipr = IPRoute()
        self.egress: dict[str, shaping.Egress] = {}

    def up(
        self,
        addr: str,
        prefixlen: int,
        link: Link,
        *,
        nic: str = "eth0",
        gateway: str | None = None,
        forward: bool = False,
    ) -> None:
        """Address and start `nic` (and lo). `gateway` becomes the default route; a router has
        `forward` and one call a NIC."""
        _no_ipv6()
        _loss_based_tcp()
        self.ipr.link("set", index=1, state="up")
        index = socket.if_nametoindex(nic)
        self.egress[nic] = shaping.Egress(self.ipr, index)
        self.ipr.addr("add", index=index, address=addr, prefixlen=prefixlen)
        self.apply(link, nic=nic)
        self.ipr.link("set", index=index, state="up")
        if gateway:
            self.ipr.route("replace", dst="default", gateway=gateway)
        if forward and not _sysctl("net/ipv4/ip_forward", "1"):
            raise NetError("this host cannot route: /proc/sys/net/ipv4/ip_forward is not writable")

    def apply(self, link: Link, *, nic: str = "eth0") -> None:
        """Bring `nic` to this state; traffic may be running."""
        egress = self.egress[nic]
        egress.set_mtu(link.mtu)
        delay, loss = (link.delay, link.loss) if by_netem(link) else (0.0, 0.0)
        egress.set(link.rate, link.mtu, delay, loss)
        # netem loses a packet as it gets it: whole messages of 64 KiB, unless they are cut first.
        egress.set_segments(nic, shaping.segment_limit(link.rate, link.mtu), whole=not loss)

    def firewall(self, rules: list[dict], policy: str = "accept") -> None:
        """Replace this host's whole firewall; see firewall.py. NetError if that is impossible."""
        problem = firewall.load(rules, policy)
        if problem:
            raise NetError(problem)

    def close(self) -> None:
        """Let go of the netlink socket; the host's network stays as it is."""
        self.ipr.close()


def _sysctl(name: str, value: str) -> bool:
    """True if it is set. In containers /proc/sys is often read-only."""
    try:
        with open(f"/proc/sys/{name}", "r+") as f:
            if f.read().strip() != value:
                f.seek(0)
                f.write(value)
        return True
    except OSError:
        return False


def _no_ipv6() -> None:
    """Its discovery traffic only blurs what a lesson counts; where barred it stays on."""
    for scope in ("all", "default"):
        _sysctl(f"net/ipv6/conf/{scope}/disable_ipv6", "1")


def _loss_based_tcp() -> None:
    """Linux's usual congestion control, whatever this machine has been set to: BBR paces small
    messages by the little that they have used so far, and a delay of 20 ms would look like 40."""
    for name in ("cubic", "reno"):  # a user namespace may choose among those allowed only
        if _sysctl("net/ipv4/tcp_congestion_control", name):
            return
