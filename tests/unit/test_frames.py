"""A large packet of TCP, less the frames that were lost: what is left is checked from scratch."""

import random
import struct

import pytest

from scalelab.cluster.frames import frame_size, frames_in, without

FIRST_SEQUENCE, FIRST_NUMBER = 0xFFFF_FFF0, 65_530  # both wrap inside a packet


def total(data):
    """The Internet checksum's sum (RFC 1071), not complemented."""
    words = struct.unpack(f"!{(len(data) + 1) // 2}H", data + b"\0" * (len(data) % 2))
    result = sum(words)
    while result > 0xFFFF:
        result = (result & 0xFFFF) + (result >> 16)
    return result


def pseudo(ip, length):
    return total(bytes(ip[12:20]) + struct.pack("!HH", 6, length))


def large(body, mss, ip_options, tcp_options):
    """What a packet socket reads for one TCP packet of many frames, checksum left to the NIC."""
    ip_size, tcp_size = 20 + ip_options, 20 + tcp_options
    length = tcp_size + len(body)
    ip = bytearray(
        struct.pack(
            "!BBHHHBBH", 0x40 | ip_size // 4, 0, ip_size + length, FIRST_NUMBER, 0, 64, 6, 0
        )
    )
    ip += bytes([10, 77, 0, 1, 10, 77, 0, 2]) + b"\1" * ip_options
    struct.pack_into("!H", ip, 10, ~total(bytes(ip)) & 0xFFFF)
    offset, flags = tcp_size // 4 << 4, 0x98  # CWR, ACK, PSH
    tcp = struct.pack(
        "!HHIIBBHHH", 1, 2, FIRST_SEQUENCE, 7, offset, flags, 9, pseudo(ip, length), 0
    )
    vnet = struct.pack("<BBHHHH", 1, 1, 14 + ip_size + tcp_size, mss, 14 + ip_size, 16)
    return vnet + b"\xaa" * 12 + b"\x08\0" + bytes(ip) + tcp + b"\1" * tcp_options + body


@pytest.mark.parametrize("seed", range(200))
def test_what_is_left_is_valid_and_complete(seed):
    dice = random.Random(seed)
    mss = dice.choice([36, 1000, 1448])
    body = dice.randbytes(dice.randrange(mss + 1, mss * 12))
    ip_options, tcp_options = dice.choice([0, 4]), dice.choice([0, 12])
    packet = large(body, mss, ip_options, tcp_options)
    count = -(-len(body) // mss)
    assert frames_in(packet) == count
    assert frame_size(packet) == 40 + ip_options + tcp_options + mss
    hit = sorted(dice.sample(range(count), dice.randrange(1, count + 1)))
    left = []
    for piece in without(packet, hit):
        ip_size = (piece[24] & 15) * 4
        ip, tcp = piece[24 : 24 + ip_size], piece[24 + ip_size :]
        data = tcp[(tcp[12] >> 4) * 4 :]
        length, number = struct.unpack("!HH", ip[2:6])
        start = (struct.unpack("!I", tcp[4:8])[0] - FIRST_SEQUENCE) & 0xFFFF_FFFF
        assert total(ip) == 0xFFFF and length == len(piece) - 24
        assert struct.unpack("!H", tcp[16:18])[0] == pseudo(ip, len(tcp))
        assert (number - FIRST_NUMBER) & 0xFFFF == start // mss
        assert data == body[start : start + len(data)]
        assert bool(tcp[13] & 0x08) == (start + len(data) == len(body))  # PSH: the last only
        assert bool(tcp[13] & 0x80) == (start == 0)  # CWR: the first only
        assert (piece[1] == 1) == (len(data) > mss)
        left += range(start // mss, -(-(start + len(data)) // mss))
    assert left == [i for i in range(count) if i not in hit]


def test_a_plain_frame_is_one():
    plain = b"\0" * 10 + b"\xaa" * 12 + b"\x08\x06" + b"\0" * 46
    assert frames_in(plain) == 1 and frame_size(plain) == 46
