"""A switch in user space: delays, jitters, loses and measures frames where the kernel cannot.

One process a rack, forked by the Fabric. It takes Ethernet frames off the rack's ends of the
hosts' cables (AF_PACKET), learns who is where as any switch does, holds each frame for its
sender's delay and passes it on. No root, no /dev/net/tun.

Frames carry a virtio header (PACKET_VNET_HDR), so TCP's large packets, up to 64 KiB, cross whole:
Python touches one packet instead of 45 frames. Loss and MTU still count single frames
(frames.py).

One sender's frames never overtake each other, jitter or not: TCP would take it for loss. So under
dense traffic jitter bunches frames rather than shuffling them.
"""

from __future__ import annotations

import json
import random
import select
import socket
import struct
import time
from collections import deque

from .frames import VNET, frame_size, frames_in, without

_ETH_P_ALL = 0x0003
_SOL_PACKET, _PACKET_VNET_HDR, _PACKET_IGNORE_OUTGOING = 263, 15, 23
_SO_TIMESTAMPNS, _TIMESPEC = 35, struct.Struct("@ll")

RECEIVE = 66_000  # the largest packet, with its headers
HELD = 32 * 2**20  # bytes on their way per sender: 50 ms of 5 gbit
WAITING = 2**20  # bytes that wait for a busy port, as in a switch's port buffer
BATCH = 16  # packets taken from one port before the others have their turn
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
        self.sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
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
        receive, where, stats = port.sock.recvmsg, self.where, port.stats
        delay, jitter, loss = port.delay, port.jitter, port.loss
        now, clock = time.monotonic(), time.time()
        for _ in range(BATCH):
            try:
                packet, stamps, _, _ = receive(RECEIVE, 64)
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
                    # Counted from its arrival, as the kernel saw it, not from when this process
                    # got a core: on a busy machine that is milliseconds later.
                    due = now + delay
                    if stamps:
                        seconds, nanoseconds = _TIMESPEC.unpack(stamps[0][2])
                        late = clock - seconds - nanoseconds * 1e-9
                        due -= late if 0 < late < delay else 0
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
        target = None if packet[VNET] & 1 else self.where.get(packet[10:16])
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
