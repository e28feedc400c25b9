"""Starting, asking and ending the user-space switch of one rack."""

from __future__ import annotations

import gc
import json
import os
import platform
import signal
import socket
import struct

from . import linux
from .switch import Switch

_PR_SET_TIMERSLACK = 29


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


def _come_first() -> None:
    """Get a core soon after waking, though training keeps all of them busy.

    Linux 6.12 and later lets anyone ask for short turns, which come sooner; before, it takes root.
    On two cores with four busy processes a round trip of 10 ms was 27 ms without, 10.4 ms with.
    """
    number = {"x86_64": 314, "aarch64": 274}.get(platform.machine())  # sched_setattr(2)
    if number:
        turn = 100_000  # ns, the shortest there is
        attr = struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, turn, 0, 0)
        linux._libc.syscall(number, 0, attr, 0)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -15)
    except OSError:
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
    _come_first()
    gc.freeze()
    gc.disable()  # no cycles are made here, and a collection would be a delay
    Switch(control, seed).run()
