"""Many TCP connections tried at once, and what became of each. Standard library only."""

from __future__ import annotations

import errno
import selectors
import socket
import time

from . import tcp

# Fractions of the time after which a silent target is dialled once more: a SYN that a lossy link
# ate is sent again by the kernel only after a second.
AGAIN = (0.2, 0.4, 0.6, 0.75)
FEW = 200  # targets; of more, each is dialled less often, since a process has so many sockets


class _Tries:
    """The sockets out for one target."""

    def __init__(self) -> None:
        self.socks: dict[socket.socket, bytes | None] = {}  # what was heard; None: connecting
        self.result: dict | None = None
        self.met = False  # there was a connection


def dial_all(token: str, targets: list, timeout: float) -> list[dict]:
    """For each [address, port], within `timeout` seconds:

    {"result": "ok" (a doctor answers; "who" is its name), "refused", "timeout", "unreachable",
    "silent" (connected, but nothing came back), "stranger" (somebody else answers, or hangs up),
    or an error's name, "seconds": until that was known}
    """
    began = time.monotonic()
    tries = [_Tries() for _ in targets]
    again = list(AGAIN if len(targets) <= FEW else AGAIN[1:2])
    with selectors.DefaultSelector() as watch:

        def finish(one: _Tries, result: str, who: str = "") -> None:
            if one.result is None:
                one.result = {"result": result, "who": who,
                              "seconds": round(time.monotonic() - began, 4)}  # fmt: skip
            for s in list(one.socks):
                drop(one, s)

        def drop(one: _Tries, s: socket.socket) -> None:
            watch.unregister(s)
            del one.socks[s]
            s.close()

        def start(one: _Tries, addr: str, port: int) -> None:
            s = tcp.new(addr)
            s.setblocking(False)
            code = s.connect_ex((addr, port))
            if code not in (0, errno.EINPROGRESS):
                s.close()
                finish(one, tcp.reason(code))
                return
            one.socks[s] = None
            watch.register(s, selectors.EVENT_WRITE, one)

        def event(one: _Tries, s: socket.socket) -> None:
            heard = one.socks[s]
            if heard is None:
                code = s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == errno.ETIMEDOUT:
                    return drop(one, s)
                if code:
                    return finish(one, tcp.reason(code))
                one.met = True
                s.send(tcp.header(token, "hello"))
                one.socks[s] = b""
                watch.modify(s, selectors.EVENT_READ, one)
                return
            more = s.recv(tcp.HEADER_BYTES)
            heard = one.socks[s] = heard + more
            if heard.startswith(f"{token} ".encode()) and heard.endswith(b"\n"):
                finish(one, "ok", heard.decode(errors="replace").split(maxsplit=1)[1].strip())
            elif not more or len(heard) > 2 * tcp.HEADER_BYTES:
                finish(one, "stranger")

        try:
            for one, target in zip(tries, targets):
                start(one, *target)
            while any(t.result is None for t in tries):
                gone = (time.monotonic() - began) / timeout
                if gone >= 1:
                    break
                if again and gone >= again[0]:
                    again.pop(0)
                    for one, target in zip(tries, targets):
                        if one.result is None:
                            start(one, *target)
                step = (again[0] if again else 1) - gone
                for key, _ in watch.select(max(0.001, step * timeout)):
                    if key.fileobj in key.data.socks:
                        try:
                            event(key.data, key.fileobj)
                        except (BlockingIOError, InterruptedError):
                            continue
                        except OSError as e:
                            finish(key.data, "stranger" if key.data.met else tcp.reason(e.errno))
        finally:
            for one in tries:
                finish(one, "silent" if one.met else "timeout")
    return [one.result for one in tries]
