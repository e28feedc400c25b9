"""Hosts for the tests of scalelab.cluster.net: an owner process with a Fabric, and a forked process
a host, each in its own network namespace. They run functions of test modules on request.

Everything is a child of the owner and dies with it.
"""

import contextlib
import encodings.idna  # noqa: F401  an ordinary user's fork may not be able to read it
import hashlib
import os
import pickle
import signal
import socket
import threading
import time
import traceback

from scalelab.cluster import linux
from scalelab.cluster.link import Link
from scalelab.cluster.net import Fabric, HostNet

PATIENCE = 20  # seconds any one request may take

OPEN = (5020, 5021)  # TCP ports on which every host answers


class Far(Exception):
    """What went wrong in another process, with its own traceback."""


class Actor:
    """The near end of a process that runs functions of test modules."""

    def __init__(self):
        self.near, self.far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.near.settimeout(PATIENCE)
        self.number = 0

    def serve(self, state):
        """In the other process: until the near end is gone."""
        self.near.close()
        while raw := self.far.recv(2**18):
            number, function, args = pickle.loads(raw)
            try:
                answer = number, True, function(state, *args)
            except BaseException:
                answer = number, False, traceback.format_exc()
            self.far.send(pickle.dumps(answer))

    def begin(self, function, *args):
        self.number += 1
        self.near.send(pickle.dumps((self.number, function, args)))

    def end(self):
        number = None
        while number != self.number:  # a test that failed may have left an answer behind
            number, fine, result = pickle.loads(self.near.recv(2**18))
        if not fine:
            raise Far(result)
        return result

    def __call__(self, function, *args):
        self.begin(function, *args)
        return self.end()


class Lab:
    """`racks[i]` is the list of racks that host i is plugged into, one NIC each."""

    def __init__(self, racks, as_user=False):
        self.hosts = [Actor() for _ in racks]
        self.racks = racks
        self.fabric = Actor()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                linux.die_with_parent(signal.SIGKILL)
                self.fabric.serve(Owner(self.hosts, as_user))
            finally:
                os._exit(0)
        for actor in (*self.hosts, self.fabric):
            actor.far.close()

    def start(self):
        """Seconds from nothing to every host forked, plugged in and addressed."""
        begun = time.monotonic()
        pids = self.fabric(start, self.racks)
        for i, host in enumerate(self.hosts):
            host.begin(
                up, [(f"10.77.{rack}.{i + 1}", f"eth{k}") for k, rack in enumerate(self.racks[i])]
            )
        for host in self.hosts:
            host.end()
        self.pids = pids
        return time.monotonic() - begun

    def set(self, link, only=None):
        """Bring both sides of every link, or of the hosts listed, to this state."""
        hosts = range(len(self.hosts)) if only is None else only
        for i in hosts:
            self.hosts[i](shape, link)
        ports = [f"p{i}n{k}" for i in hosts for k in range(len(self.racks[i]))]
        self.fabric(apply, dict.fromkeys(ports, link))

    def close(self):
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        for actor in (*self.hosts, self.fabric):
            actor.near.close()


class Owner:
    def __init__(self, hosts, as_user):
        if as_user or not linux.has_sys_admin():
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(1000)
                os.setuid(1000)
                linux._libc.prctl(4, 1, 0, 0, 0)  # dumpable again, so that uid_map is ours
            linux.new_user_namespace()
        linux.unshare(linux.CLONE_NEWNET)
        self.hosts = hosts
        self.fabric = Fabric()

    def fork(self, actors):
        """A host each; all at once, since a new network namespace takes the kernel 10 ms."""
        held, told = os.pipe()
        pids = []
        for actor in actors:
            pids.append(os.fork())
            if pids[-1] == 0:
                try:
                    linux.die_with_parent(signal.SIGKILL)
                    linux.unshare(linux.CLONE_NEWNET)
                    os.write(told, b"1")
                    actor.serve(HostNet())
                finally:
                    os._exit(0)
        ready = 0
        while ready < len(pids):
            ready += len(os.read(held, 99))
        os.close(held)
        os.close(told)
        return pids


# What an owner runs: the first argument is the Owner.
def start(owner, racks):
    for rack in sorted({r for host in racks for r in host}):
        owner.fabric.add_rack(rack)
    pids = owner.fork(owner.hosts)
    for i, pid in enumerate(pids):
        for k, rack in enumerate(racks[i]):
            owner.fabric.connect(f"p{i}n{k}", pid, rack, f"eth{k}")
    return pids


def apply(owner, links):
    owner.fabric.apply(links)


def stats(owner, rack=0):
    return owner.fabric.stats(rack)


def switches(owner):
    return [s.pid for s in owner.fabric.switches.values() if s.alive()]


def mend(owner):
    owner.fabric.mend()


def pull(owner, index, pid):
    """The host dies, then its cable is taken away."""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    owner.fabric.disconnect(f"p{index}n0")
    owner.fabric.disconnect(f"p{index}n0")  # nothing to complain about


# What a host runs: the first argument is its HostNet.
def up(net, nics):
    for addr, nic in nics:
        net.up(addr, 24, Link(), nic=nic, forward=len(nics) > 1)
    echo()
    for port in OPEN:
        listen(port)


def shape(net, link):
    for nic in net.egress:
        net.apply(link, nic=nic)


def gateway(net, addr):
    net.ipr.route("replace", dst="default", gateway=addr)


def firewall(net, rules, policy="accept"):
    net.firewall(rules, policy)


def read(net, path):
    with open(path) as f:
        return f.read()


def write(net, path, text):
    with open(path, "w") as f:
        f.write(text)


def sink(net, port=5001):
    """Receive one TCP stream. (Mbit/s, sha256, [(seconds, bytes) so far, every 50 ms])"""
    with socket.create_server(("", port)) as server:
        server.settimeout(PATIENCE / 4)
        stream, _ = server.accept()
    with stream:
        stream.settimeout(PATIENCE / 4)
        digest, total, marks, begun = hashlib.sha256(), 0, [], None
        while data := stream.recv(2**18):
            now = time.monotonic()
            total += len(data)
            digest.update(data)
            if begun is None:
                begun = now
            if not marks or now - begun - marks[-1][0] >= 0.05:
                marks.append((now - begun, total))
    marks.append((now - begun, total))
    return rate(marks), digest.hexdigest(), marks


def rate(marks, since=0.0, until=1e9):
    """Mbit/s between two moments of a stream."""
    inside = [m for m in marks if since <= m[0] <= until]
    (first, before), (last, after) = inside[0], inside[-1]
    return (after - before) * 8e-6 / max(last - first, 1e-9)


def source(net, addr, seconds, port=5001):
    """Send a TCP stream whose bytes are all different runs. sha256 of what was sent."""
    digest, end, number = hashlib.sha256(), time.monotonic() + seconds, 0
    with connect(addr, port) as stream:
        while time.monotonic() < end:
            block = number.to_bytes(8, "little") * 4096
            stream.sendall(block)
            digest.update(block)
            number += 1
    return digest.hexdigest()


def connect(addr, port):
    """The server's process may be a moment late."""
    end = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((addr, port), timeout=PATIENCE / 4)
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


def echo(port=5002):
    """Send UDP datagrams back, in a thread, for as long as the host lives."""
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.bind(("", port))

    def run():
        while True:
            with contextlib.suppress(OSError):  # refused by a firewall, or no way back
                s.sendto(*s.recvfrom(2**16))

    threading.Thread(target=run, daemon=True).start()


def udp():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(PATIENCE / 4)
    return s


def round_trips(net, addr, count=15, size=8, port=5002, whole=False, patience=1.0):
    """Milliseconds of each round trip, None for a lost one; `whole`: may not be fragmented."""
    times = []
    with udp() as s:
        s.settimeout(patience)
        if whole:
            s.setsockopt(socket.IPPROTO_IP, 10, 2)  # IP_MTU_DISCOVER, IP_PMTUDISC_DO
        s.connect((addr, port))
        for i in range(count):
            data, begun = i.to_bytes(size, "little"), time.perf_counter()
            try:
                s.send(data)
                while s.recv(2**16) != data:
                    pass
                times.append((time.perf_counter() - begun) * 1e3)
            except (TimeoutError, ConnectionRefusedError):
                times.append(None)
            time.sleep(0.005)
    return times


def datagrams(net, addr, count, port=5003):
    """Send numbered UDP datagrams, slowly enough for any buffer."""
    with udp() as s:
        s.connect((addr, port))
        for i in range(count):
            s.send(i.to_bytes(4, "little"))
            if i % 20 == 19:
                time.sleep(0.002)
        with contextlib.suppress(ConnectionRefusedError):  # it has heard one and is gone
            for _ in range(20):
                s.send(b"end")
                time.sleep(0.05)


def arrivals(net, port=5003):
    """Numbers of the datagrams that came, in order."""
    with udp() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
        s.bind(("", port))
        came = []
        while (data := s.recv(64)) != b"end":
            came.append(int.from_bytes(data, "little"))
        return came


def listen(port):
    """Answer each connection with one byte, in a thread, for as long as the host lives."""
    server = socket.create_server(("", port), backlog=16)

    def run():
        kept = []
        while True:
            stream, _ = server.accept()
            with contextlib.suppress(OSError):
                stream.send(b"!")
            kept = [*kept[-8:], stream]  # unread, and open for a while

    threading.Thread(target=run, daemon=True).start()


def knock(net, addr, ports, patience=0.4):
    """For each TCP port: open, refused, or silent."""
    found = []
    for port in ports:
        try:
            with socket.create_connection((addr, port), timeout=patience) as stream:
                found.append("open" if stream.recv(1) == b"!" else "closed")
        except ConnectionRefusedError:
            found.append("refused")
        except OSError:
            found.append("silent")
    return found
