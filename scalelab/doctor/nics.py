"""This network namespace's interfaces and addresses, asked of the kernel (rtnetlink).

Not of /sys, which in an emulated host or a container may show another namespace's interfaces.
Standard library only.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct

from .registry import NotChecked

_GETLINK, _GETADDR, _DUMP = 18, 22, 0x301  # request, root, match
_DONE, _ERROR = 3, 2
_UP, _LOOPBACK, _RUNNING = 0x1, 0x8, 0x40
_SIOCETHTOOL, _GSET, _UNKNOWN = 0x8946, 0x1, (0, 0xFFFF, 0xFFFFFFFF)
# Counters of struct rtnl_link_stats64 that mean a bad cable, plug or port; others may be load.
_ERRORS = {4: "receive errors", 5: "send errors", 12: "checksum errors", 13: "frame errors"}


def interfaces() -> list[dict]:
    """[{name, index, up, loopback, mtu (bytes), kind ("" for hardware), addrs [[IPv4, prefix
    length]], addrs6, errors {what: count}, flaps (carrier changes since it is there), speed
    (bits/s negotiated, None where the kernel does not say)}]. Raises NotChecked."""
    try:
        links = {}
        for body in _dump(_GETLINK, struct.pack("BxHiII", 0, 0, 0, 0, 0)):
            _, _, index, flags, _ = struct.unpack_from("BxHiII", body)
            links[index] = _link(index, flags, _attributes(body[16:]))
        for body in _dump(_GETADDR, struct.pack("BBBBi", 0, 0, 0, 0, 0)):
            family, prefix, _, _, index = struct.unpack_from("BBBBi", body)
            found = _attributes(body[8:])
            raw = found.get(2) or found.get(1)  # a point-to-point link's own, else the address
            if index in links and raw:
                addr = str(ipaddress.ip_address(raw))
                key = "addrs" if family == socket.AF_INET else "addrs6"
                links[index][key].append([addr, prefix])
    except (OSError, AttributeError, struct.error) as e:
        raise NotChecked(f"this system does not list its interfaces: {e}") from None
    return list(links.values())


def _link(index: int, flags: int, found: dict[int, bytes]) -> dict:
    name = found[3].rstrip(b"\0").decode()
    kind = _attributes(found[18]).get(1, b"") if 18 in found else b""
    stats = found.get(23, b"")
    counts = struct.unpack(f"{len(stats) // 8}Q", stats[: len(stats) // 8 * 8])
    nic = {
        "name": name, "index": index,
        "up": bool(flags & _UP) and bool(flags & _RUNNING), "loopback": bool(flags & _LOOPBACK),
        "mtu": struct.unpack("I", found[4])[0], "kind": kind.rstrip(b"\0").decode(),
        "addrs": [], "addrs6": [],
        "errors": {what: counts[i] for i, what in _ERRORS.items() if i < len(counts)},
        "flaps": struct.unpack("I", found[35])[0] if 35 in found else 0,
    }  # fmt: skip
    nic["speed"] = None if nic["kind"] or nic["loopback"] else _speed(name)
    return nic


def _speed(name: str) -> int | None:
    """Bits/s that a hardware interface has negotiated; virtual ones name a figure of fancy."""
    request = array.array("B", struct.pack("I40x", _GSET))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            fcntl.ioctl(
                s, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), request.buffer_info()[0])
            )
        except OSError:
            return None
    raw = request.tobytes()
    low, high = struct.unpack_from("H", raw, 12)[0], struct.unpack_from("H", raw, 28)[0]
    megabits = low | high << 16
    return None if low in _UNKNOWN and high in (0, 0xFFFF) else megabits * 1_000_000


def _dump(kind: int, body: bytes):
    """Bodies of the kernel's answers to one rtnetlink question."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as s:
        s.settimeout(2)
        s.send(struct.pack("IHHII", 16 + len(body), kind, _DUMP, 1, 0) + body)
        while True:
            data = s.recv(1 << 18)
            while data:
                size, what = struct.unpack_from("IH", data)
                if what == _DONE:
                    return
                if what == _ERROR:
                    code = -struct.unpack_from("i", data, 16)[0]
                    raise OSError(code, os.strerror(code))
                yield data[16:size]
                data = data[(size + 3) & ~3 :]


def _attributes(data: bytes) -> dict[int, bytes]:
    found = {}
    while len(data) >= 4:
        size, kind = struct.unpack_from("HH", data)
        if size < 4:
            break
        found[kind & 0x3FFF] = data[4:size]
        data = data[(size + 3) & ~3 :]
    return found


def port_range() -> tuple[int, int]:
    """Lowest and highest port that the kernel gives out by itself. Raises NotChecked."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as f:
            low, high = map(int, f.read().split())
        return low, high
    except (OSError, ValueError) as e:
        raise NotChecked(f"ip_local_port_range cannot be read: {e}") from None


def reserved_ports() -> list[tuple[int, int]]:
    """Ranges within it that the kernel leaves alone; [] where it does not say."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_reserved_ports") as f:
            text = f.read().strip()
    except OSError:
        return []
    ranges = [part.partition("-") for part in text.split(",") if part]
    return [(int(low), int(high or low)) for low, _, high in ranges]
