"""What a link does to traffic. Apart from net.py so that reading it costs no netlink library."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One host's link to its rack's switch.

    rate: bits/s in each direction, None for no limit; delay and jitter: seconds, one way; loss:
    fraction of packets, one way, both applied on the host's way out; mtu and port_mtu: bytes of
    the largest IP packet that the host sends, and that the switch's port lets through.
    """

    rate: int | None = None
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0
    # Ethernet's own. On veth a larger one gains nothing: TCP's packets pass whole (GSO) either way.
    mtu: int = 1500
    port_mtu: int | None = None
