"""TCP as the doctor's probes use it: a greeting with a secret, and what the kernel says of a
connection. Standard library only.

Every connection begins with one line, "TOKEN COMMAND ARGUMENT". Whoever does not know the token,
which is drawn anew for each examination, is no doctor and is hung up on.
"""

from __future__ import annotations

import errno
import socket
import struct

from .registry import NotChecked

HEADER_BYTES = 200
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: close resets, so that no port is held in TIME_WAIT
_UNREACHABLE = {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EPERM, errno.EACCES,
                errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}  # fmt: skip


def new(addr: str) -> socket.socket:
    """A socket for connections to, or from, this numeric address, that ends abruptly."""
    family = socket.AF_INET6 if ":" in addr else socket.AF_INET
    s = socket.socket(family, socket.SOCK_STREAM)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    return s


def abort_on_close(s: socket.socket) -> None:
    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)


def header(token: str, command: str, argument: int = 0) -> bytes:
    return f"{token} {command} {argument}\n".encode()


def dial(
    addr: str, port: int, token: str, command: str, argument: int = 0, *,
    timeout: float, segment: int | None = None,
) -> socket.socket:  # fmt: skip
    """A connection on which `command` has been given. segment: bytes of the largest TCP segment.
    Raises OSError."""
    s = new(addr)
    try:
        s.settimeout(timeout)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if segment:
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
        s.connect((addr, port))
        s.sendall(header(token, command, argument))
        return s
    except BaseException:
        s.close()
        raise


def read(s: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises OSError."""
    got = b""
    while len(got) < size:
        more = s.recv(size - len(got))
        if not more:
            raise ConnectionError("closed by the other end")
        got += more
    return got


def reason(code: int) -> str:
    """What a failed connect means: refused, timeout, unreachable, or the system's word."""
    if code == errno.ECONNREFUSED:
        return "refused"
    if code in (errno.ETIMEDOUT, errno.EAGAIN):
        return "timeout"
    return "unreachable" if code in _UNREACHABLE else errno.errorcode.get(code, str(code))


def full_segment(s: socket.socket) -> int:
    """Bytes of this connection's largest TCP segment, options such as timestamps included."""
    try:
        stamped = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)[5] & 1
    except (OSError, AttributeError, IndexError):
        stamped = 0
    return s.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) + (12 if stamped else 0)


def info(s: socket.socket) -> dict[str, float]:
    """Linux's TCP_INFO: acked (bytes), busy, rwnd, sndbuf (seconds: something to send; stopped by
    the reader's window; by the send buffer), flight (bytes on their way), rtt, min_rtt
    (seconds), retrans (segments sent again), segments (sent). Raises NotChecked."""
    try:
        raw = s.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except (OSError, AttributeError):
        raw = b""
    if len(raw) < 192:  # Linux before 4.10
        raise NotChecked("this system does not tell what holds a connection up (TCP_INFO)")
    (mss,) = struct.unpack_from("I", raw, 16)
    (rtt,) = struct.unpack_from("I", raw, 68)
    (unacked,) = struct.unpack_from("I", raw, 24)
    (retrans,) = struct.unpack_from("I", raw, 100)
    (acked,) = struct.unpack_from("Q", raw, 120)
    (segments,) = struct.unpack_from("I", raw, 156)
    (min_rtt,) = struct.unpack_from("I", raw, 148)
    busy, rwnd, sndbuf = struct.unpack_from("QQQ", raw, 168)
    return {
        "acked": acked, "busy": busy * 1e-6, "rwnd": rwnd * 1e-6, "sndbuf": sndbuf * 1e-6,
        "flight": unacked * mss, "rtt": rtt * 1e-6, "min_rtt": min_rtt * 1e-6,
        "retrans": retrans, "segments": segments,
    }  # fmt: skip
