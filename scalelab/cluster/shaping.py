"""Queueing disciplines and offloads of one interface, over netlink and ethtool's ioctl.

tbf gives a link its rate; netem, where the kernel has it, its delay and loss.
"""

from __future__ import annotations

import array
import errno
import fcntl
import socket
import struct

from .link import Link
from .netlink import IPRoute, NetlinkError

# A bucket of tokens lets so much of an idle link's rate through at once. A larger one hides the
# rate from short messages, a smaller one loses tokens whenever a busy machine wakes the shaper
# late: at 1 gbit and both cores busy, 0.14 ms carried 86 % of the rate and 0.3 to 0.6 ms 93 %.
BURST_SECONDS = 0.5e-3
# What may wait before a drop, as in a switch's port buffer.
QUEUE_SECONDS = 0.05
QUEUE_MIN = 128 * 1024
# tbf counts bytes a second in 32 bits. Above that nothing is shaped; no laptop gets there.
TBF_MAX = 8 * (2**32 - 1)

GSO_MAX = 65536  # the kernel's own default

_ROOT = 0xFFFFFFFF
_ETHERNET = 14  # bytes of header, which the qdisc counts and the MTU does not
_SIOCETHTOOL, _STSO, _SGSO = 0x8946, 0x1F, 0x24

_netem: bool | None = None  # found out once a process; a forked host inherits the answer


def netem_works() -> bool:
    """True where this kernel has netem, found by trying on lo of this network namespace."""
    global _netem
    if _netem is None:
        with IPRoute() as ipr:
            try:
                ipr.tc("add", "netem", 1, parent=_ROOT, handle=0x10000, delay=1, limit=1)
                ipr.tc("del", index=1, parent=_ROOT, handle=0x10000)
                _netem = True
            except NetlinkError:
                _netem = False
    return _netem


def burst(rate: int, mtu: int) -> int:
    """Bytes that a link of `rate` bit/s may send at once. At least one full frame, and what is
    lost when the kernel keeps it as whole microseconds."""
    return max(mtu + _ETHERNET + 64 + int(rate / 8 * 2e-6), int(rate / 8 * BURST_SECONDS))


def segment_limit(rate: int | None, mtu: int) -> int:
    """Bytes of the largest packet (GSO) that TCP should hand to such a link.

    Half a bucket: tbf would have to cut up, frame by frame, what is larger than its bucket.
    """
    if rate is None or rate > TBF_MAX:
        return GSO_MAX
    return min(GSO_MAX, max(mtu + 512, burst(rate, mtu) // 2))


class Egress:
    """What leaves through one interface: shaped by `set`, which may be called in mid-traffic."""

    def __init__(self, ipr: IPRoute, index: int) -> None:
        self.ipr, self.index = ipr, index
        self.shape: tuple[str, ...] = ()
        self.mtu, self.segments = Link.mtu, (GSO_MAX, True)  # as a new cable has them

    def set(self, rate: int | None, mtu: int, delay: float = 0.0, loss: float = 0.0) -> None:
        """`rate` in bit/s or None, `mtu` in bytes, `delay` in s, `loss` a fraction.

        Delay and loss need netem. The rate may change without losing what is queued.
        """
        limited = rate is not None and rate <= TBF_MAX
        shape = ("netem",) * bool(delay or loss) + ("tbf",) * limited
        if shape != self.shape:
            self._clear()
        parent = _ROOT
        if "netem" in shape:
            # The limit is in packets: 50 ms of 10 gbit in full frames.
            self.ipr.tc(
                "replace",
                "netem",
                self.index,
                parent=parent,
                handle=0x10000,
                delay=round(delay * 1e6),
                loss=loss * 100,
                limit=50_000,
            )
            # The rate comes after the delay here, so its queue's drops stay true to its size:
            # netem in a sender's own queue is unseen by TCP's own limit on queued bytes.
            parent = 0x10001
        if limited:
            size = burst(rate, mtu)
            self.ipr.tc(
                "replace",
                "tbf",
                self.index,
                parent=parent,
                handle=0x20000,
                rate=rate // 8,
                burst=size,
                limit=max(QUEUE_MIN, int(rate / 8 * QUEUE_SECONDS)) + size,
            )
        self.shape = shape

    def _clear(self) -> None:
        try:
            self.ipr.tc("del", index=self.index, parent=_ROOT, handle=0)
        except NetlinkError as e:
            if e.code not in (errno.ENOENT, errno.EINVAL):  # nothing was set
                raise
        self.shape = ()

    def set_mtu(self, mtu: int) -> None:
        """Bytes of the largest IP packet."""
        if mtu != self.mtu:
            self.ipr.link("set", index=self.index, mtu=mtu)
            self.mtu = mtu

    def set_segments(self, nic: str, limit: int, whole: bool) -> None:
        """How large TCP's packets (GSO, TSO) may be: `limit` bytes or, not `whole`, one frame."""
        if (limit, whole) == self.segments:
            return
        try:
            self.ipr.link("set", index=self.index, gso_max_size=limit)
        except NetlinkError:
            pass  # an old kernel: tbf cuts up instead
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            for command in (_STSO, _SGSO):
                value = array.array("B", struct.pack("II", command, whole))
                request = struct.pack("16sP", nic.encode(), value.buffer_info()[0])
                fcntl.ioctl(s, _SIOCETHTOOL, request)
        self.segments = limit, whole
