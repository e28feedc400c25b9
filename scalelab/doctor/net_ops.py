"""The network exchange, on a host: listens, dials, and measures towards its peers.

Methods op_… are requests to the agent (agent.py); each is bounded by its `timeout` in seconds.
`exchange.py` says who does what when. Standard library only; nothing of torch.
"""

from __future__ import annotations

import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable

from . import tcp
from .dialling import dial_all
from .nics import port_range, reserved_ports
from .registry import NotChecked

# IP packet sizes (bytes) tried where full ones do not pass: what links, tunnels and clouds have.
LADDER = (8950, 8500, 8000, 6000, 4470, 4000, 3000, 2000, 1600, 1500, 1492, 1480, 1460, 1450, 1420,
          1400, 1380, 1350, 1300, 1280, 1200, 1000, 576)  # fmt: skip
IP_TCP = 40  # bytes of an IPv4 and a TCP header
SERVED = 20.0  # seconds that any one connection is served
BLOCK = bytes(128 * 1024)
SETTLE = 0.25  # of a throughput measurement: not counted, since a queue's first burst is free
STAMPS = struct.Struct("!dd")


class NetOps:
    """One host's part. `clock`: the wall clock, in seconds."""

    clock: Callable[[], float] = staticmethod(time.time)

    def __init__(self, context: dict) -> None:
        self.name = str(context.get("name", "?"))
        self.lock = threading.Lock()
        self.open: set[socket.socket] = set()
        self.token, self.closed = "", False
        self.wake: socket.socket | None = None

    # What others reach.
    def op_listen(
        self, token: str, addrs: list[str], rendezvous: int | None = None, spread: int = 5,
        timeout: float = 3,
    ) -> dict:  # fmt: skip
        """Listen at each address on `spread` ports over the ephemeral range and one that the
        kernel chooses; on the rendezvous port as well if it is free. {"ports": {addr: [port]},
        "range": [low, high], "rendezvous": "listening", "taken", a reason, or ""}."""
        low, high = port_range()
        found: dict = {"ports": {}, "range": [low, high], "rendezvous": ""}
        listeners: list[socket.socket] = []
        try:
            for addr in addrs:
                mine = [self._spread(addr, low, high, i, spread) for i in range(spread)]
                mine.append(self._listen(addr, 0))
                kept = [s for s in mine if s is not None]
                listeners += kept
                found["ports"][addr] = [s.getsockname()[1] for s in kept]
            for addr in addrs if rendezvous else []:
                try:
                    listeners.append(self._listen(addr, rendezvous))
                    found["rendezvous"] = "listening"
                except OSError as e:
                    code = tcp.reason(e.errno)
                    found["rendezvous"] = "taken" if code == "EADDRINUSE" else str(e.strerror)
        except BaseException:
            for s in listeners:
                self._close(s)
            raise
        self.token = token
        near, self.wake = socket.socketpair()
        threading.Thread(target=self._serve, args=(listeners, near), daemon=True).start()
        return found

    def _spread(self, addr: str, low: int, high: int, i: int, count: int) -> socket.socket | None:
        reserved = reserved_ports()
        start = low + (high - low) * (2 * i + 1) // (2 * count)
        for port in range(start, min(start + 50, high + 1)):
            if not any(a <= port <= b for a, b in reserved):
                try:
                    return self._listen(addr, port)
                except OSError:
                    continue  # taken
        return None

    def _listen(self, addr: str, port: int) -> socket.socket:
        s = tcp.new(addr)
        try:
            # What an earlier job left in TIME_WAIT does not stop torch's store, so not us either.
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind((addr, port))
            s.listen(256)
        except BaseException:
            s.close()
            raise
        return self._keep(s)

    def _serve(self, listeners: list[socket.socket], wake: socket.socket) -> None:
        """Greet whoever knows the token; bulk work goes to a thread of its own."""
        with wake, selectors.DefaultSelector() as watch:
            for s in (*listeners, wake):
                s.setblocking(False)
                watch.register(s, selectors.EVENT_READ)
            said: dict[socket.socket, bytes] = {}
            while not self.closed:
                for key, _ in watch.select():
                    s = key.fileobj
                    if s is wake:
                        return
                    try:
                        if s in listeners:
                            guest = self._keep(s.accept()[0])
                            tcp.abort_on_close(guest)
                            guest.setblocking(False)
                            watch.register(guest, selectors.EVENT_READ)
                            said[guest] = b""
                            continue
                        more = s.recv(tcp.HEADER_BYTES - len(said[s]))
                        said[s] += more
                        words = said[s].split(b"\n")[0].decode(errors="replace").split()
                        if b"\n" in said[s] and words[:1] == [self.token] and len(words) == 3:
                            if words[1] == "hello":
                                s.send(f"{self.token} {self.name}\n".encode())
                                said[s] = b""  # the dialling side closes first
                                continue
                            watch.unregister(s)
                            rest = said.pop(s).split(b"\n", 1)[1]
                            run = threading.Thread(
                                target=self._attend, args=(s, words, rest), daemon=True
                            )
                            run.start()
                            continue
                        if more and b"\n" not in said[s] and len(said[s]) < tcp.HEADER_BYTES:
                            continue
                    except (BlockingIOError, InterruptedError):
                        continue
                    except (OSError, ValueError):
                        if s in listeners:
                            continue
                    watch.unregister(s)  # gone, or no doctor
                    said.pop(s, None)
                    self._close(s)

    def _attend(self, s: socket.socket, words: list[str], rest: bytes) -> None:
        try:
            s.settimeout(SERVED)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if words[1] == "echo":
                waiting = len(rest)
                while waiting or s.recv(1):
                    waiting = max(0, waiting - 1)
                    came = self.clock()
                    s.send(STAMPS.pack(came, self.clock()))
            elif words[1] == "burst":
                tcp.read(s, int(words[2]) - len(rest))
                s.send(b"+")
                s.recv(1)
            elif words[1] == "sink":
                s.send(b"+")
                room = memoryview(bytearray(256 * 1024))
                while s.recv_into(room):
                    pass
        except (OSError, ValueError):
            pass  # the dialling side has what it wanted
        finally:
            self._close(s)

    # What this host asks of others.
    def op_dial(self, token: str, targets: list, timeout: float) -> list[dict]:
        """For each [address, port]: {"result", "who", "seconds"}, see dialling.py."""
        return dial_all(token, targets, timeout)

    def op_ping(self, token: str, targets: list, timeout: float, count: int = 10) -> list[dict]:
        """For each [address, port]: {"rtt" (s, the least of `count`), "offset" (s by which the
        peer's clock is ahead, give or take half of "span")}, or {"error"}."""
        return _side_by_side(lambda t: self._ping(token, *t, count, timeout), targets)

    def _ping(self, token: str, addr: str, port: int, count: int, timeout: float) -> dict:
        end = time.monotonic() + timeout
        best = (float("inf"), 0.0)
        with tcp.dial(addr, port, token, "echo", timeout=timeout) as s:
            for i in range(count):
                if i >= 3 and time.monotonic() > end - timeout / 2:
                    break  # a long way: three will do
                sent, began = self.clock(), time.perf_counter()
                s.send(b".")
                there, back = STAMPS.unpack(tcp.read(s, STAMPS.size))
                whole = time.perf_counter() - began
                # Four timestamps, as NTP has it: the time spent there does not count.
                offset = ((there - sent) + (back - sent - whole)) / 2
                best = min(best, (whole - max(0.0, back - there), offset))
            try:
                # The kernel's own figure holds no waiting for a processor, as this program's does.
                kernel = tcp.info(s)["min_rtt"] or best[0]
            except NotChecked:
                kernel = best[0]
        return {"rtt": min(kernel, best[0]), "offset": best[1], "span": best[0]}

    def op_burst(self, token: str, targets: list, timeout: float) -> list[dict]:
        """Do full-sized segments arrive? For each [address, port]: {"size" (bytes of the IP packet
        tried), "passes": bool, "largest": bytes of the largest that did pass, 0 for none,
        "blocked": the smallest that did not}, or {"error"}."""
        return _side_by_side(lambda t: self._burst_or_ladder(token, *t, timeout), targets)

    def _burst_or_ladder(self, token: str, addr: str, port: int, timeout: float) -> dict:
        try:
            size, passes = self._burst(token, addr, port, timeout * 0.4)
        except TimeoutError:  # a lossy link ate the SYN
            size, passes = self._burst(token, addr, port, timeout * 0.4)
        if passes:
            return {"size": size, "passes": True, "largest": size, "blocked": None}
        # All at once, the full size among them: what a lossy link ate is not blamed on its size.
        sizes = [size, *(s for s in LADDER if s < size)]
        tried = _side_by_side(
            lambda s: {"ok": self._burst(token, addr, port, timeout * 0.55, s - IP_TCP)[1]}, sizes
        )
        passed = [s for s, t in zip(sizes, tried) if t.get("ok")]
        largest = max(passed, default=0)
        if largest == size:
            return {"size": size, "passes": True, "largest": size, "blocked": None}
        blocked = min(s for s in sizes if s > largest)
        return {"size": size, "passes": False, "largest": largest, "blocked": blocked}

    def _burst(
        self, token: str, addr: str, port: int, timeout: float, segment: int | None = None
    ) -> tuple[int, bool]:
        """(bytes of a full IP packet on this connection, whether four of them were read)."""
        end = time.monotonic() + timeout
        # The size is not known before there is a connection; the greeting may not name it before.
        with tcp.new(addr) as s:
            s.settimeout(timeout)
            s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if segment:
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, segment)
            s.connect((addr, port))
            size = segment or tcp.full_segment(s)
            data = bytes(4 * size)
            try:
                s.sendall(tcp.header(token, "burst", len(data)))
                s.sendall(data)
                s.settimeout(max(0.05, end - time.monotonic()))
                return size + IP_TCP, s.recv(1) == b"+"
            except OSError:
                return size + IP_TCP, False

    def op_send(self, token: str, addr: str, port: int, seconds: float, timeout: float) -> dict:
        """Send as fast as it goes for `seconds`. {"rate": bytes/s, "alone": bytes/s while nothing
        but the network held it up, "share": the part of the time that this was so, "flight": mean
        bytes on their way, "min_rtt" (s), "late": s until the reader was ready, beside the
        round trip, "cpu": part of the time that this side computed, "retrans": fraction of
        segments sent again}. Raises NotChecked, OSError."""
        with tcp.dial(addr, port, token, "sink", timeout=timeout) as s:
            asked = time.monotonic()
            tcp.read(s, 1)
            began = time.monotonic()
            late = began - asked - tcp.info(s)["rtt"]
            s.settimeout(0.02)
            first, flights, now, cpu = None, [], began, time.thread_time()
            while now < began + seconds:
                try:
                    s.send(BLOCK)
                except TimeoutError:
                    pass  # a full buffer; look at the clock
                state, now = tcp.info(s), time.monotonic()
                flights.append(state["flight"])
                if first is None and now > began + SETTLE * seconds:
                    first, start = state, now
            cpu = time.thread_time() - cpu
            if first is None:
                raise NotChecked("this host was too busy to send")
        gone = {k: state[k] - first[k] for k in state}
        wall = max(1e-6, now - start)
        alone = max(0.0, gone["busy"] - gone["rwnd"] - gone["sndbuf"])
        time.sleep(min(0.1, state["rtt"]))  # what is queued on the way is not the next one's
        return {
            "rate": gone["acked"] / wall, "alone": gone["acked"] / max(alone, 0.05 * wall),
            "share": alone / wall,
            "flight": sum(flights) / len(flights), "min_rtt": state["min_rtt"],
            "late": max(0.0, late), "retrans": state["retrans"] / max(1, state["segments"]),
            "cpu": cpu / seconds,
        }  # fmt: skip

    def op_hush(self, timeout: float = 1) -> None:
        """Close everything that listens or is connected; takes no time."""
        self.close()
        self.closed = False

    def close(self) -> None:
        self.closed, self.token = True, ""
        if self.wake:
            try:
                self.wake.send(b"!")
            except OSError:
                pass
            self.wake.close()
            self.wake = None
        with self.lock:
            left, self.open = self.open, set()
        for s in left:
            _shut(s)

    def _keep(self, s: socket.socket) -> socket.socket:
        with self.lock:
            self.open.add(s)
        return s

    def _close(self, s: socket.socket) -> None:
        with self.lock:
            self.open.discard(s)
        s.close()


def _shut(s: socket.socket) -> None:
    try:
        s.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it
    except OSError:
        pass
    s.close()


def _side_by_side(one: Callable[..., dict], targets: list) -> list[dict]:
    """`one` of each target, all at the same time; {"error": why} where it failed."""
    results: list[dict] = [{"error": "no answer in time"} for _ in targets]

    def run(i: int, target) -> None:
        try:
            results[i] = one(target)
        except (OSError, NotChecked, ValueError) as e:
            results[i] = {"error": str(getattr(e, "strerror", None) or e)}

    threads = [
        threading.Thread(target=run, args=(i, t), daemon=True) for i, t in enumerate(targets)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SERVED)
    return list(results)
