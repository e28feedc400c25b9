"""A switch in user space: delays, jitters, loses and measures frames where the kernel cannot.

One process a rack, forked by the Fabric. It takes Ethernet frames off the rack's ends of the
hosts' cables (AF_PACKET), learns who is where as any switch does, holds each frame for its
sender's delay and passes it on. No root, no /dev/net/tun.

Frames carry a virtio header (PACKET_VNET_HDR), so TCP's large packets, up to 64 KiB, cross whole:
Python touches one packet instead of 45 frames. Loss and MTU still count single frames: of a large
packet only the frames that the dice hit are missing (`without`), and its frame size, not its own,
is held against a port's MTU.

One sender's frames never overtake each other, jitter or not: TCP would take it for loss. So under
dense traffic jitter bunches frames rather than shuffling them.
"""

from __future__ import annotations

import gc
import json
import os
import random
import select
import signal
import socket
import struct
import time
from collections import deque

from . import linux

_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_PR_SET_TIMERSLACK = 29

# Layout of what is read: 10 bytes of virtio header, 14 of Ethernet, 20 or more of IPv4, then TCP.
_VNET, _IP = 10, 24
_GSO_TCPV4 = 1
_FIN_PSH, _CWR = 0x09, 0x80

RECEIVE = 66_000  # the largest packet, with its headers
HELD = 32 * 2**20  # bytes on their way per sender: 50 ms of 5 gbit
WAITING = 2**20  # bytes that wait for a busy port, as in a switch's port buffer
BATCH = 64  # packets taken from one port before the others have their turn
RCVBUF = 4 * 2**20  # asked for; the kernel gives what its limit allows


class Port:
    """One host's cable, seen from the switch."""

    def __init__(self, name: str, seed: str) -> None:
        self.name = name
        self.delay = self.jitter = self.loss = 0.0
        self.mtu: int | None = None
        self.dice = random.Random(seed)
        self.held: deque[tuple[float, bytes]] = deque()  # (due, packet), in order
        self.held_bytes = 0
        self.waiting: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.due = 0.0  # of the last packet taken in
        self.stats = dict.fromkeys(("frames", "lost", "too_big", "dropped"), 0)
        self.sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
        self.sock.setblocking(False)
        for option in (_PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING):
            self.sock.setsockopt(_SOL_PACKET, option, 1)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self.sock.setsockopt(socket.SOL_SOCKET, option, RCVBUF)
        self.alive = True

    def fileno(self) -> int:
        return self.sock.fileno()


class Switch:
    """The loop. `control` is one end of a SEQPACKET pair: JSON requests in, answers out."""

    def __init__(self, control: socket.socket, seed: int) -> None:
        self.control, self.seed = control, seed
        self.ports: dict[str, Port] = {}
        self.where: dict[bytes, Port] = {}
        self.going = False

    def run(self) -> None:
        while True:
            wait = self.deliver()
            alive = [p for p in self.ports.values() if p.alive]
            reading = [self.control, *alive] if self.going else [self.control]
            ready, writable, _ = select.select(reading, [p for p in alive if p.waiting], [], wait)
            for port in writable:
                self.resume(port)
            for port in ready:
                if port is self.control:
                    if not self.obey():
                        return
                else:
                    self.take(port)

    def deliver(self, everything: bool = False) -> float | None:
        """Pass on what is due. Seconds until the next is, or None."""
        now = float("inf") if everything else time.monotonic()
        first = float("inf")
        for port in self.ports.values():
            held = port.held
            while held and held[0][0] <= now:
                packet = held.popleft()[1]
                port.held_bytes -= len(packet)
                self.forward(port, packet)
            if held and held[0][0] < first:
                first = held[0][0]
        return None if first == float("inf") else max(0.0, first - time.monotonic())

    def take(self, port: Port) -> None:
        """Read what has arrived from one host and hold it, or pass it on."""
        receive, where, stats = port.sock.recv, self.where, port.stats
        delay, jitter, loss = port.delay, port.jitter, port.loss
        now = time.monotonic()
        for _ in range(BATCH):
            try:
                packet = receive(RECEIVE)
            except BlockingIOError:
                return
            except OSError:  # the host is gone
                self.forget(port)
                return
            stats["frames"] += 1
            source = packet[16:22]
            if where.get(source) is not port:
                where[source] = port
            if port.mtu is not None and frame_size(packet) > port.mtu:
                stats["too_big"] += 1
                continue
            if loss:
                packets = self.lose(port, packet)
            else:
                packets = (packet,)
            for packet in packets:
                if not delay and not jitter and not port.held:
                    self.forward(port, packet)
                elif port.held_bytes + len(packet) > HELD:
                    stats["dropped"] += 1
                else:
                    due = now + delay
                    if jitter:
                        due += port.dice.uniform(-min(jitter, delay), jitter)
                    port.due = due = max(due, port.due if port.held else 0.0)
                    port.held.append((due, packet))
                    port.held_bytes += len(packet)

    def lose(self, port: Port, packet: bytes) -> tuple[bytes, ...] | list[bytes]:
        """Throw the dice for every frame of a packet; what is left of it."""
        count, dice = frames_in(packet), port.dice.random
        hit = [i for i in range(count) if dice() < port.loss]
        if not hit:
            return (packet,)
        port.stats["lost"] += len(hit)
        return without(packet, hit) if count > 1 else ()

    def forward(self, source: Port, packet: bytes) -> None:
        target = None if packet[_VNET] & 1 else self.where.get(packet[10:16])
        if target is not None:
            if target is not source:
                self.emit(target, packet)
            return
        for port in self.ports.values():  # broadcast, or nobody knows where
            if port is not source:
                self.emit(port, packet)

    def emit(self, port: Port, packet: bytes) -> None:
        if port.mtu is not None and frame_size(packet) > port.mtu:
            port.stats["too_big"] += 1
        elif port.waiting:
            self.queue(port, packet)
        elif port.alive:
            try:
                port.sock.send(packet)
            except BlockingIOError:
                self.queue(port, packet)
            except OSError:  # its shaper's queue is full, or the host is gone
                port.stats["dropped"] += 1

    def queue(self, port: Port, packet: bytes) -> None:
        if port.waiting_bytes + len(packet) > WAITING:
            port.stats["dropped"] += 1
        else:
            port.waiting.append(packet)
            port.waiting_bytes += len(packet)

    def resume(self, port: Port) -> None:
        """Send what waited for room."""
        waiting, port.waiting, port.waiting_bytes = port.waiting, deque(), 0
        for packet in waiting:
            self.emit(port, packet)

    def forget(self, port: Port) -> None:
        port.alive = False
        self.where = {mac: p for mac, p in self.where.items() if p is not port}

    def obey(self) -> bool:
        """One request from the Fabric. False when it is the last."""
        raw = self.control.recv(2**16)
        if not raw:
            return False
        request, answer = json.loads(raw), {}
        try:
            if request["op"] == "ports":
                self.set_ports(request["ports"])
            elif request["op"] == "go":
                for port in self.ports.values():
                    if port.alive and port.sock.getsockname()[1] == 0:
                        port.sock.bind((port.name, _ETH_P_ALL))
                self.going = True
            elif request["op"] == "stats":
                answer["stats"] = {name: port.stats for name, port in self.ports.items()}
            elif request["op"] == "stop":
                for port in self.ports.values():
                    if port.alive:
                        self.take(port)
                self.deliver(everything=True)
        except OSError as e:
            answer["error"] = str(e)
        self.control.send(json.dumps(answer).encode())
        return request["op"] != "stop"

    def set_ports(self, wanted: dict[str, dict]) -> None:
        for name in set(self.ports) - set(wanted):
            gone = self.ports.pop(name)
            self.forget(gone)
            gone.sock.close()
        for name, settings in wanted.items():
            port = self.ports.get(name)
            if port is None:
                port = self.ports[name] = Port(name, f"{self.seed}/{name}")
                try:
                    # Protocol 0 receives nothing yet: the bridge still has this cable.
                    port.sock.bind((name, 0))
                except OSError:  # its host died meanwhile
                    port.alive = False
            port.delay, port.jitter = settings["delay"], settings["jitter"]
            port.loss, port.mtu = settings["loss"], settings["mtu"]


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


class SwitchProcess:
    """The Fabric's handle on one switch. It dies with the process that made this."""

    def __init__(self, name: str, seed: int) -> None:
        self.name = name
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(10)
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _child(theirs, seed, parent)
            finally:
                os._exit(1)
        theirs.close()

    def alive(self) -> bool:
        """False once its process has ended, whoever reaped it."""
        try:
            return os.waitpid(self.pid, os.WNOHANG) == (0, 0)
        except ChildProcessError:
            return False

    def ask(self, request: dict) -> dict:
        """Send a request, wait for the answer. OSError if the switch failed or is gone."""
        self.control.send(json.dumps(request).encode())
        raw = self.control.recv(2**16)
        answer = json.loads(raw) if raw else {"error": "it ended"}
        if "error" in answer:
            raise OSError(f"the switch of {self.name} failed: {answer['error']}")
        return answer

    def stop(self) -> None:
        """Let it deliver what it holds, then end."""
        try:
            self.ask({"op": "stop"})
        except OSError:
            pass
        self.kill()

    def kill(self) -> None:
        """End it now."""
        self.control.close()
        if self.alive():
            os.kill(self.pid, signal.SIGKILL)
            try:
                os.waitpid(self.pid, 0)
            except ChildProcessError:
                pass


def _child(control: socket.socket, seed: int, parent: int) -> None:
    linux.die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before that took hold
        return
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C is the owner's to act on
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Every descriptor of the owner is in here too; one kept open would hide its closing.
    keep = control.fileno()
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
    linux._libc.prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns; the default adds 50 us to each wait
    gc.freeze()
    gc.disable()  # no cycles are made here, and a collection would be a delay
    Switch(control, seed).run()
