"""The client's end of a cluster: requests, answers, and how started processes end."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path

from . import wire
from .leftovers import MARK, client_mark

ROOT = str(Path(__file__).resolve().parents[2])


class ClusterError(RuntimeError):
    """A cluster cannot do what was asked; the message is one line."""


class UsageError(ValueError):
    """A value makes no sense; the message is one line: what is wrong and what is accepted."""


class Answer(Future):
    """What a request will be answered with."""

    def result(self, timeout: float | None = None):
        """As of a Future; a late answer is a ClusterError too."""
        try:
            return super().result(timeout)
        except FutureTimeout:
            raise ClusterError(f"no answer from the cluster after {timeout:g} s") from None


class Process:
    """A process started on a node. `pid` counts as that node counts; see `Cluster.outside_pid`."""

    def __init__(self, channel: Channel, node: str, pid: int) -> None:
        self.channel, self.node, self.pid = channel, node, pid
        self.returncode: int | None = None
        self.ended_at: float | None = None  # unix seconds
        self.ended = threading.Event()

    def _end(self, code: int) -> None:
        self.returncode, self.ended_at = code, time.time()
        self.ended.set()

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit code (negative: the signal's number), or None if it still runs after `timeout` s."""
        self.ended.wait(timeout)
        return self.returncode

    def signal(self, sig: int = signal.SIGTERM, group: bool = False) -> None:
        """Send a signal to it, or to its whole process group."""
        if not self.ended.is_set():
            args = {"pid": self.pid, "sig": int(sig), "group": group}
            try:
                self.channel.ask(self.node, "signal", **args).result(10)
            except ClusterError:
                pass  # the host is down: so is the process


class Channel:
    """Starts an owner process of `kind` and talks to it. Thread-safe."""

    def __init__(self, kind: str, on_down=None) -> None:
        ours, theirs = socket.socketpair()
        self.sock, self.on_down = ours, on_down
        self.lock = threading.Lock()
        # Apart from `lock`, so that answers are read while a request waits for room to be sent.
        self.sending = threading.Lock()
        self.waiting: dict[int, tuple[str | None, str, Future]] = {}
        self.processes: dict[tuple[str, int], Process] = {}
        self.counter = 0
        self.closed = threading.Event()
        self.stderr = tempfile.TemporaryFile()  # has no name: nothing to leave behind
        code = (
            f"import sys; sys.path[0] = {ROOT!r}; from scalelab.cluster import owner; owner.main()"
        )
        self.owner = subprocess.Popen(
            [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid()), kind],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.stderr,
            env={**os.environ, MARK: client_mark()},
            start_new_session=True,  # the terminal's Ctrl-C is for the client to handle
        )
        theirs.close()
        try:
            said, _ = wire.receive(ours)
        except (EOFError, OSError):
            said = {"event": "failed", "error": self._last_words()}
        except BaseException:  # Ctrl-C
            ours.close()  # the owner ends when it sees that
            self.owner.wait(5)
            raise
        if said.get("event") != "ready":
            self.owner.wait()
            ours.close()
            raise ClusterError(said.get("error") or "the cluster's owner process did not start")
        threading.Thread(target=self._read, name="scalelab-cluster", daemon=True).start()

    def _last_words(self) -> str:
        self.owner.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the owner process ended with {self.owner.returncode}"

    def ask(self, to: str | None, op: str, fds: tuple[int, ...] = (), **args) -> Answer:
        """Send a request; the Answer holds its result or a ClusterError or UsageError."""
        future = Answer()
        with self.lock:
            if self.closed.is_set():
                future.set_exception(ClusterError("the cluster is closed"))
                return future
            self.counter += 1
            number = self.counter
            self.waiting[number] = (to, op, future)
        try:
            with self.sending:
                wire.send(self.sock, {"id": number, "to": to, "op": op, "args": args}, fds)
        except (OSError, TypeError, ValueError) as e:
            with self.lock:
                unanswered = self.waiting.pop(number, None)
            gone = isinstance(e, OSError) and e.errno in (errno.EPIPE, errno.ECONNRESET)
            if unanswered:
                why = "the cluster's owner process is gone" if gone else f"not sent: {e}"
                future.set_exception(ClusterError(why))
        return future

    def spawn(self, node: str, files: tuple[int, ...], **args) -> Process:
        """Start a process on a node. `files`: open files for its stdout, stderr, and (or nothing)
        its stdin."""
        return self.ask(node, "spawn", files, **args).result(30)

    def _read(self) -> None:
        while True:
            try:
                message, _ = wire.receive(self.sock)
            except (EOFError, OSError):
                break
            if "id" in message:
                self._answered(message)
            elif message["event"] == "exit":
                self._exited(message["from"], message["pid"], message["code"])
            elif message["event"] == "down":
                self._down(message["from"])
        with self.lock:
            self.closed.set()
        self._down(None)

    def _answered(self, message: dict) -> None:
        with self.lock:
            to, op, future = self.waiting.pop(message["id"], (None, "", None))
            if future is None:
                return
            if "error" in message:
                result = None
            elif op == "spawn":  # known from here on, so that its end, told next, finds it
                result = Process(self, to, message["result"])
                self.processes[to, result.pid] = result
            else:
                result = message["result"]
        if "error" in message:
            kind = UsageError if message["type"] == "ValueError" else ClusterError
            future.set_exception(kind(message["error"]))
        else:
            future.set_result(result)

    def _exited(self, node: str, pid: int, code: int) -> None:
        with self.lock:
            process = self.processes.pop((node, pid), None)
        if process:
            process._end(code)

    def _down(self, node: str | None) -> None:
        """A host (or, with None, the whole cluster) died: nothing of it will answer any more."""
        with self.lock:
            ended = [p for (n, _), p in self.processes.items() if node in (None, n)]
            self.processes = {k: p for k, p in self.processes.items() if p not in ended}
            lost = [k for k, (n, _, _) in self.waiting.items() if node is None or n == node]
            futures = [self.waiting.pop(k)[2] for k in lost]
        for process in ended:
            process._end(-signal.SIGKILL)
        for future in futures:
            future.set_exception(ClusterError(f"{node or 'the cluster'} is down"))
        if self.on_down:
            self.on_down(node)

    def close(self) -> None:
        """End the owner, and with it every host. Idempotent; returns when all are gone."""
        # While a request waits for room to be sent, the owner has to go without a word.
        if not self.closed.is_set() and self.sending.acquire(timeout=1):
            try:
                wire.send(self.sock, {"id": 0, "to": None, "op": "close"})
            except OSError:
                pass
            finally:
                self.sending.release()
        deadline = time.monotonic() + 5
        while self.owner.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
        if self.owner.poll() is None:
            self.owner.kill()  # PID 1 inside dies with it (die_with_parent)
            self.owner.wait()
        try:
            self.sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold it open
        except OSError:
            pass
        self.closed.wait(5)
        self.sock.close()
        self.stderr.close()
