"""The first process of one host: starts commands there and says how they end.

On a virtual cluster it is PID 1 of the host's own PID namespace, so ending it is pulling the
plug: the kernel ends everything in that host at once. On a local cluster it has no namespaces
and ends its descendants itself.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import time

from . import linux, wire
from .link import Link


def descendants(pid: int | None = None) -> list[int]:
    """PIDs of all living descendants of `pid` (default: this process)."""
    import psutil

    try:
        found = psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return [p.pid for p in found]


def end_descendants(keep: tuple[int, ...] = ()) -> list[tuple[int, int]]:
    """SIGKILL every descendant of this process but the children `keep` and theirs, until none is
    left. Returns what ended meanwhile, as `reap` does.

    Repeats, since a process may fork between the listing and the kill.
    """
    import psutil

    ended, deadline = reap(), time.monotonic() + 5
    while time.monotonic() < deadline:
        left = [p for p in psutil.Process().children() if p.pid not in keep]
        if not left:
            break
        for child in left:
            for pid in (*descendants(child.pid), child.pid):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        ended += reap()
        time.sleep(0.002)
    return ended


def reap() -> list[tuple[int, int]]:
    """(pid, exit code) of every child that has ended; a negative code is a signal's number."""
    ended = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def wake_on_child() -> tuple[socket.socket, socket.socket]:
    """(a socket that becomes readable whenever a child ends, its other end, to be kept)."""
    wake, poke = socket.socketpair()
    for s in (wake, poke):
        s.setblocking(False)
    signal.set_wakeup_fd(poke.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake, poke


class Host:
    """The loop. `sock` leads to the owner; its end is this host's end."""

    def __init__(self, name: str, sock: socket.socket, separate: bool, scratch: str = "") -> None:
        self.name, self.sock, self.separate = name, sock, separate
        self.running: set[int] = set()
        self.view = self.net = None
        self.extra_env: dict[str, str] = {}
        if separate:
            from .mounts import View

            linux.unshare(
                linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWUTS | linux.CLONE_NEWIPC
            )
            linux.sethostname(name)
            self.view = View(name, scratch)
            # Temporary files of this host die with it.
            self.extra_env = {"HOSTNAME": name, "TMPDIR": "/dev/shm"}
        else:
            linux.adopt_orphans()

    def serve(self) -> None:
        """Answer requests until the owner goes away."""
        wake, _poke = wake_on_child()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)
        watch = selectors.DefaultSelector()
        watch.register(self.sock, selectors.EVENT_READ)
        watch.register(wake, selectors.EVENT_READ)
        wire.send(self.sock, {"event": "ready"})
        while True:
            for key, _ in watch.select():
                if key.fileobj is wake:
                    wake.recv(4096)
                    self._report(reap())
                else:
                    try:
                        request, fds = wire.receive(self.sock)
                    except (EOFError, OSError):
                        return
                    self._answer(request, fds)

    def _report(self, ended: list[tuple[int, int]]) -> None:
        for pid, code in ended:
            if pid in self.running:
                self.running.discard(pid)
                wire.send(self.sock, {"event": "exit", "pid": pid, "code": code})

    def _answer(self, request: dict, fds: list[int]) -> None:
        reply: dict = {"id": request["id"]}
        try:
            result = getattr(self, "do_" + request["op"])(*fds, **request.get("args", {}))
            reply["result"] = result
        except Exception as e:  # whatever went wrong belongs to the caller, not to this host
            reply["error"] = str(e)
            if isinstance(e, OSError) and e.strerror:
                reply["error"] = f"{e.filename}: {e.strerror}" if e.filename else e.strerror
            reply["type"] = type(e).__name__
        finally:
            for fd in fds:
                os.close(fd)
        wire.send(self.sock, reply)

    def do_up(self, hosts: str, nics: list[dict], forward: bool, dirs: dict[str, str]) -> None:
        """Names, addresses and directories, once, before the first command."""
        from .net import HostNet

        self.view.set_hosts(hosts)
        self.net = HostNet()
        for nic in nics:
            link = Link(**nic.pop("link"))
            self.net.up(link=link, forward=forward, **nic)
        for path, mode in dirs.items():
            self.view.set_dir(path, mode)

    def do_link(self, link: dict, nic: str = "eth0") -> None:
        self.net.apply(Link(**link), nic=nic)

    def do_firewall(self, rules: list[dict], policy: str) -> None:
        self.net.firewall(rules, policy)

    def do_hosts(self, text: str) -> None:
        self.view.set_hosts(text)

    def do_dir(self, path: str, mode: str) -> None:
        self.view.set_dir(path, mode)

    def do_spawn(
        self, out: int, err: int, *stdin: int, argv: list[str], env: dict, cwd: str, admin: bool
    ) -> int:
        """Start `argv` in a session of its own; returns its PID as this host counts. A third
        file, if given, is its stdin."""

        def in_child() -> None:
            linux.die_with_parent(signal.SIGKILL)
            for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(sig, signal.SIG_DFL)  # an ignored signal stays ignored over exec
            if admin and self.separate:
                linux.keep_capabilities_over_exec()

        child = subprocess.Popen(
            argv,
            stdin=stdin[0] if stdin else subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=cwd,
            env={**self.extra_env, **env},
            start_new_session=True,
            preexec_fn=in_child,
        )
        child.returncode = 0  # reap() above waits for it; keep Popen from complaining
        self.running.add(child.pid)
        return child.pid

    def do_signal(self, pid: int, sig: int, group: bool) -> bool:
        """Send `sig` to a process (or its group). False if it is gone already."""
        try:
            (os.killpg if group else os.kill)(pid, sig)
            return True
        except ProcessLookupError:
            return False

    def do_end_all(self) -> None:
        """SIGKILL every process of this host but this one."""
        if self.separate:
            try:
                os.kill(-1, signal.SIGKILL)  # all of this PID namespace but its PID 1
            except ProcessLookupError:
                pass
            self._report(reap())
        else:
            self._report(end_descendants())

    def do_free_port(self, address: str) -> int:
        """A TCP port that nothing listens on. Below the range that outgoing connections use, so
        that none of those takes it before torchrun does."""
        import random

        for _ in range(200):
            port = random.randrange(20000, 32000)
            with socket.socket() as s:
                try:
                    s.bind((address, port))
                except OSError:
                    continue
                return port
        raise OSError(f"no free port on {self.name}")


def run(name: str, sock: socket.socket, separate: bool, scratch: str) -> None:
    """Be the host `name` until the owner goes; never returns."""
    try:
        Host(name, sock, separate, scratch).serve()
    except BaseException as e:
        try:
            wire.send(sock, {"event": "failed", "error": str(e)})
        except OSError:
            pass
    finally:
        if not separate:
            end_descendants()
        os._exit(0)
