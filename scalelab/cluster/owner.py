"""The process whose death ends a cluster.

A client (the command line, a notebook kernel) starts it with one end of a socket. On a virtual
cluster it makes the namespaces and lives twice: outside as a thin waiter, inside as PID 1 of a
new PID namespace. Whichever dies, by whatever signal, everything inside dies with it: the
kernel empties a PID namespace when its PID 1 ends. On a local cluster it is one process, which
adopts orphans and ends them.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys

from . import hostd, linux, wire
from .link import Link

SECONDS_TO_END = 3.0
SCRATCH = "/dev/shm"  # covered by a tmpfs of the cluster's own, so nothing of it is left behind


class Owner:
    """Starts hosts, joins them to the fabric, and carries frames between client and hosts."""

    def __init__(self, client: socket.socket, separate: bool, watched: list[int]) -> None:
        self.client, self.separate = client, separate
        self.hosts: dict[str, tuple[int, socket.socket]] = {}  # name -> (pid, socket)
        self.ports: dict[str, list[str]] = {}  # name -> its ends of cables at the racks
        self.watch = selectors.DefaultSelector()
        self.watch.register(client, selectors.EVENT_READ, "client")
        for fd in watched:
            self.watch.register(fd, selectors.EVENT_READ, "gone")
        self.fabric = None
        if separate:
            from .net import Fabric

            self.fabric = Fabric()
            self.outside = os.open("/proc/self/ns/pid", os.O_RDONLY)
        else:
            linux.adopt_orphans()

    def serve(self) -> None:
        """Until the client, or the waiter outside, is gone, or the client says close."""
        wake, _poke = hostd.wake_on_child()
        self.watch.register(wake, selectors.EVENT_READ, "child")
        self._tell({"event": "ready"})
        while True:
            for key, _ in self.watch.select():
                if key.data == "gone":
                    return
                if key.data == "child":
                    wake.recv(4096)
                    self._reap()
                elif key.data == "client":
                    try:
                        request, fds = wire.receive(self.client)
                    except (EOFError, OSError):
                        return
                    if request["op"] == "close":
                        return
                    self._route(request, fds)
                else:
                    self._from_host(key.data, key.fileobj)

    def _tell(self, message: dict) -> None:
        try:
            wire.send(self.client, message)
        except OSError:
            pass  # the client is gone; its socket's end is seen in serve()

    def _route(self, request: dict, fds: list[int]) -> None:
        to = request.pop("to", None)
        try:
            if to is None:
                result = getattr(self, "do_" + request["op"])(**request.get("args", {}))
                self._tell({"id": request["id"], "result": result})
            else:
                try:
                    wire.send(self.hosts[to][1], request, tuple(fds))
                except (KeyError, OSError):  # it is gone, or just going
                    down = {"error": f"{to} is down", "type": "HostDown"}
                    self._tell({"id": request["id"], **down})
        except Exception as e:
            self._tell({"id": request["id"], "error": str(e), "type": type(e).__name__})
        finally:
            for fd in fds:
                os.close(fd)

    def _from_host(self, name: str, sock: socket.socket) -> None:
        if sock.fileno() < 0:
            return  # it died, and was reaped since select() saw this
        try:
            message, _ = wire.receive(sock)
        except (EOFError, OSError):
            self.watch.unregister(sock)
            return  # its exit is reported by _reap
        message["from"] = name
        self._tell(message)

    def _reap(self) -> None:
        ended = hostd.reap()
        for pid, code in ended:  # grows in here
            for name, (host_pid, sock) in list(self.hosts.items()):
                if pid == host_pid:
                    while sock in self.watch.get_map():  # what it said before it died comes first
                        self._from_host(name, sock)
                    sock.close()
                    del self.hosts[name]
                    for port in self.ports.pop(name, ()):
                        self.fabric.disconnect(port)
                    if not self.separate:  # its orphans are ours now
                        keep = tuple(p for p, _ in self.hosts.values())
                        ended += hostd.end_descendants(keep)
                    self._tell({"event": "down", "from": name, "code": code})
        if self.fabric:
            self.fabric.mend()

    def do_add_host(self, name: str, ports: list[dict]) -> None:
        """Fork a host and plug its interfaces in. Addresses follow, in the host's own `up`."""
        ours, theirs = socket.socketpair()
        if self.separate:
            # Children of this process land in a new PID namespace until it is set back.
            linux.unshare(linux.CLONE_NEWPID)
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            # A fork holds every socket of its parent; closing them keeps "the other end is gone"
            # a fact that every party can see.
            for sock in [self.client, ours, *(s for _, s in self.hosts.values())]:
                sock.close()
            self.watch.close()
            hostd.run(name, theirs, self.separate, SCRATCH)
        if self.separate:
            linux.setns(self.outside, linux.CLONE_NEWPID)
        theirs.close()
        self.hosts[name] = (pid, ours)
        said, _ = wire.receive(ours)
        if said.get("event") != "ready":
            raise OSError(f"{name} did not start: {said.get('error')}")
        for port in ports:
            self.fabric.connect(port=port["port"], pid=pid, rack=port["rack"], nic=port["nic"])
            self.ports.setdefault(name, []).append(port["port"])
        self.watch.register(ours, selectors.EVENT_READ, name)

    def do_add_rack(self, rack: int) -> None:
        self.fabric.add_rack(rack)

    def do_links(self, links: dict[str, dict]) -> None:
        """Bring the rack side of every link to this state; traffic may be running."""
        self.fabric.apply({port: Link(**link) for port, link in links.items()})

    def do_facts(self) -> dict:
        """What this kernel offers, tried out in the cluster's own network namespace."""
        from .shaping import netem_works

        return {"netem": netem_works()}

    def do_kill_host(self, name: str) -> None:
        """Pull the plug of one host."""
        if name in self.hosts:
            os.kill(self.hosts[name][0], signal.SIGKILL)
            for port in self.ports.pop(name, ()):
                self.fabric.disconnect(port)


def main() -> None:
    """`owner SOCKET CLIENT_PID KIND`, started by Cluster; not for people."""
    client = socket.socket(fileno=int(sys.argv[1]))
    client.set_inheritable(False)
    client_pid, separate = int(sys.argv[2]), sys.argv[3] == "virtual"
    # The socket says when the client is gone, unless a fork of the client holds its end too.
    try:
        watched = [os.pidfd_open(client_pid)]
    except (AttributeError, OSError):  # not Linux, or one before 5.3; or the client is gone
        watched = []
    if os.getppid() != client_pid:
        return
    try:
        if separate:
            _enter_namespaces(client, watched)
        Owner(client, separate, watched).serve()
    except Exception as e:
        wire.send(client, {"event": "failed", "error": str(e) or type(e).__name__})
    finally:
        if not separate:
            hostd.end_descendants()
    os._exit(0)


def _wait_for(pid: int, watched: list[int]) -> int:
    """Until process `pid` has ended; it has seconds to do so once one of `watched` is ready. The
    exit code to end with."""
    with selectors.DefaultSelector() as watch:
        for fd in watched:
            watch.register(fd, selectors.EVENT_READ)
        if watched:
            inside = os.pidfd_open(pid)
            watch.register(inside, selectors.EVENT_READ, "inside")
            if all(key.data is None for key, _ in watch.select()):
                for fd in watched:
                    watch.unregister(fd)
                if not watch.select(SECONDS_TO_END):
                    os.kill(pid, signal.SIGKILL)  # it is stuck
    _, status = os.waitpid(pid, 0)
    return 0 if status == 0 else 1


def _enter_namespaces(client: socket.socket, watched: list[int]) -> None:
    """Return only in the new PID namespace's first process; the caller becomes the waiter."""
    if not linux.has_sys_admin():
        linux.new_user_namespace()
    linux.unshare(
        linux.CLONE_NEWPID
        | linux.CLONE_NEWNS
        | linux.CLONE_NEWNET
        | linux.CLONE_NEWUTS
        | linux.CLONE_NEWIPC
    )
    alive, held = os.pipe()
    pid = os.fork()
    if pid:
        os.close(alive)
        client.close()
        os._exit(_wait_for(pid, watched))
    # The pipe covers the moment before prctl takes hold.
    linux.die_with_parent(signal.SIGKILL)
    os.close(held)
    watched.append(alive)
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755")
    try:
        linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
    except OSError:
        pass  # see mounts.View
