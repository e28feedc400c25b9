"""Arithmetic on TCP's large packets (GSO): what they are on a wire, and what is left after loss.

Layout of a packet: 10 bytes of virtio header (struct virtio_net_hdr: flags, gso_type, hdr_len,
gso_size, csum_start, csum_offset), 14 of Ethernet, 20 or more of IPv4, then TCP.
"""

from __future__ import annotations

import struct

VNET, _IP = 10, 24
_GSO_TCPV4 = 1
_FIN_PSH, _CWR = 0x09, 0x80


def _tcp(packet: bytes) -> tuple[int, int] | None:
    """(where TCP starts, where its data starts) in a large packet of TCP over IPv4."""
    if packet[1] & 0x7F != _GSO_TCPV4 or packet[22:24] != b"\x08\x00":
        return None
    tcp = _IP + (packet[_IP] & 15) * 4
    return tcp, tcp + (packet[tcp + 12] >> 4) * 4


def frame_size(packet: bytes) -> int:
    """Bytes of the largest IP packet that this becomes on a wire."""
    tcp = _tcp(packet) if packet[1] else None
    if tcp:
        return min(tcp[1] + int.from_bytes(packet[4:6], "little"), len(packet)) - _IP
    if packet[1]:  # another kind of large packet: its frame size stands in the header, roughly
        return int.from_bytes(packet[2:4], "little") + int.from_bytes(packet[4:6], "little") - 14
    return len(packet) - _IP


def frames_in(packet: bytes) -> int:
    """How many frames a packet makes on a wire; 1 for what `without` cannot cut."""
    tcp = _tcp(packet) if packet[1] else None
    return -(-(len(packet) - tcp[1]) // int.from_bytes(packet[4:6], "little")) if tcp else 1


def without(packet: bytes, hit: list[int]) -> list[bytes]:
    """A large packet less the frames numbered in `hit`: the runs between them, as packets."""
    size = int.from_bytes(packet[4:6], "little")
    runs, start = [], 0
    for stop in [*hit, frames_in(packet)]:
        if stop > start:
            runs.append(_cut(packet, start, stop, size))
        start = stop + 1
    return runs


def _cut(packet: bytes, start: int, stop: int, size: int) -> bytes:
    """Frames start..stop-1 of a large packet, with headers as if they had been sent alone.

    Its TCP checksum is left to the receiving kernel, so the field holds the sum of the pseudo
    header, of which only the length changes.
    """
    tcp, data = _tcp(packet)
    body = packet[data + start * size : data + stop * size]
    head = bytearray(packet[:data])
    last = data + stop * size >= len(packet)
    if len(body) <= size:
        head[1] = 0  # a plain frame now
        head[4:6] = b"\0\0"
    length = data - _IP + len(body)
    (old,) = struct.unpack_from("!H", head, _IP + 2)
    (number,) = struct.unpack_from("!H", head, _IP + 4)
    struct.pack_into("!HH", head, _IP + 2, length, (number + start) & 0xFFFF)
    head[_IP + 10 : _IP + 12] = b"\0\0"
    words = struct.unpack_from(f"!{(tcp - _IP) // 2}H", head, _IP)
    struct.pack_into("!H", head, _IP + 10, ~_fold(sum(words)) & 0xFFFF)
    (sequence,) = struct.unpack_from("!I", head, tcp + 4)
    struct.pack_into("!I", head, tcp + 4, (sequence + start * size) & 0xFFFFFFFF)
    if not last:
        head[tcp + 13] &= ~_FIN_PSH & 0xFF
    if start:
        head[tcp + 13] &= ~_CWR & 0xFF
    (pseudo,) = struct.unpack_from("!H", head, tcp + 16)
    struct.pack_into("!H", head, tcp + 16, _fold(pseudo + (~old & 0xFFFF) + length))
    return bytes(head) + body


def _fold(total: int) -> int:
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
