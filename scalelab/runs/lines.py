"""Command lines typed on the nodes of a cluster, exactly as they stand, and what each one prints.

    lines = {0: "torchrun --nnodes=2 --node-rank=0 … job.py", 1: "torchrun --nnodes=2 …"}
    with LinesRun(c, lines, timeout=60) as run:
        run.wait(20)
        print(run.table())

`runs.launch` writes the right lines itself; this is for lines that a learner has written, right or
wrong. It adds nothing to them but an end: of the whole, and of all that a line has started.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import sys
import threading
import time
from collections import deque
from pathlib import Path

from ..cluster import Cluster, ClusterError, Process, UsageError

TIE = Path(__file__).with_name("tie.py")
HEAD_LINES, TAIL_LINES, LINE_CHARS = 500, 1500, 2000  # kept of one node's output
ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[ -/]+[0-~]|[@-Z\\-_])"
)
SECONDS_TO_END = 10.0


class LinesRun:
    """One shell command a node, started when this is made; ends all of it on leaving `with`.

    lines: by node index. timeout: seconds after which everything is ended. env: added to every
    line's environment; what differs between hosts belongs to `Node.env`. Raises UsageError for a
    line that cannot be typed, ClusterError where a host is down.
    """

    def __init__(self, cluster: Cluster, lines: dict[int, str], *, timeout: float = 120,
                 env: dict[str, str] | None = None, cwd: str | None = None) -> None:  # fmt: skip
        from . import check_env, check_timeout

        check_timeout(timeout)
        check_env(env or {})
        for index, line in lines.items():
            if not isinstance(line, str) or not line.strip() or "\0" in line:
                raise UsageError(f"line for node {index}: {line!r}: use a shell command as text")
        if not lines:
            raise UsageError("no lines: use {node index: shell command}, for one node or more")
        self.cluster, self.lines = cluster, dict(lines)
        self.began, self.timed_out, self._over = time.monotonic(), False, None
        self._deadline = self.began + timeout
        self._said = {index: _Said() for index in lines}
        self._stop, self._done = threading.Event(), threading.Event()
        self.processes: dict[int, Process] = {}
        self._watch = selectors.DefaultSelector()
        usual = _usual(cluster)
        try:
            for index, line in lines.items():
                node = cluster.node(index)
                self._start(node, line, {**usual, **node.env, **(env or {})}, cwd)
        except BaseException:
            self._end()
            self._close()
            raise
        threading.Thread(target=self._follow, name="scalelab-lines", daemon=True).start()

    def _start(self, node, line: str, env: dict, cwd: str | None) -> None:
        r, w = os.pipe()
        self._watch.register(r, selectors.EVENT_READ, node.index)
        try:
            argv = [sys.executable, str(TIE), "/bin/sh", "-c", line]
            self.processes[node.index] = node.spawn(argv, out=w, err=w, env=env, cwd=cwd)
        finally:
            os.close(w)

    # What is asked of it while it runs

    @property
    def exits(self) -> dict[int, int | None]:
        """Each line's exit code; None while it runs. 137 or -9: ended by SIGKILL; 143: by stop."""
        return {index: process.returncode for index, process in self.processes.items()}

    @property
    def running(self) -> bool:
        """Whether any line has not ended yet."""
        return any(not p.ended.is_set() for p in self.processes.values())

    @property
    def seconds(self) -> float:
        """Since the start; once all is over, how long it took."""
        return (self._over or time.monotonic()) - self.began

    def output(self, index: int) -> str:
        """What the line of this node has printed so far, both streams in the order they came."""
        return "\n".join(text for _, text in self.stamped(index))

    def stamped(self, index: int) -> list[tuple[float, str]]:
        """(seconds since the start, line) of this node's output."""
        try:
            return self._said[index].lines()
        except KeyError:
            raise UsageError(f"node {index!r}: lines were typed on {sorted(self._said)}") from None

    def table(self, last: int = 6) -> str:
        """Every node's state and its last lines."""
        rows = []
        for index, code in self.exits.items():
            state = f"exit {code}" if code is not None else f"still running at {self.seconds:.0f} s"
            rows.append(f"{self.cluster.node(index).name}: {state}")
            said = self.stamped(index)[-last:]
            rows += [f"  {at:5.1f} s  {text[:160]}" for at, text in said] or ["  (not a word)"]
        return "\n".join(rows)

    def wait(self, seconds: float | None = None) -> bool:
        """Until every line has ended, or `seconds` are over; whether they have."""
        return self._done.wait(seconds)

    def stop(self) -> None:
        """End every line and all that it started; returns when nothing of them is left."""
        self._stop.set()
        self._done.wait(SECONDS_TO_END + 5)

    def __enter__(self) -> LinesRun:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    # The watcher

    def _follow(self) -> None:
        try:
            while self.running and not self._stop.is_set():
                self._read(0.1)
                if time.monotonic() > self._deadline:
                    self.timed_out = True
                    break
            self._end()
            until = time.monotonic() + 1
            while self._watch.get_map() and time.monotonic() < until:
                self._read(0.05)
        finally:
            self._over = time.monotonic()
            self._close()
            self._done.set()

    def _read(self, timeout: float) -> None:
        if not self._watch.get_map():  # every pipe is at its end; the exits are about to be told
            time.sleep(min(timeout, 0.02))
        for key, _ in self._watch.select(timeout):
            data = os.read(key.fd, 65536)
            self._said[key.data].feed(data, time.monotonic() - self.began)
            if not data:
                self._watch.unregister(key.fd)
                os.close(key.fd)

    def _end(self) -> None:
        for process in self.processes.values():
            process.signal(signal.SIGTERM)  # see tie.py: it ends all that the line has started
        until = time.monotonic() + SECONDS_TO_END
        while self.running and time.monotonic() < until:
            self._read(0.05)
        for index, process in self.processes.items():
            if not process.ended.is_set():
                try:
                    self.cluster.node(index).end_all()
                except ClusterError:
                    pass  # that host is down
                process.wait(2)

    def _close(self) -> None:
        for key in list(self._watch.get_map().values()):
            os.close(key.fd)
        self._watch.close()


class _Said:
    """One node's output as lines with their times: the first and the last ones, no escapes."""

    def __init__(self) -> None:
        self.head: list[tuple[float, str]] = []
        self.tail: deque[tuple[float, str]] = deque(maxlen=TAIL_LINES)
        self.dropped, self.partial = 0, b""

    def feed(self, data: bytes, at: float) -> None:
        """More of it; b"" is the end."""
        lines = re.split(rb"[\r\n]+", self.partial + data)
        self.partial = lines.pop()[: 4 * LINE_CHARS]
        if not data and self.partial:
            lines.append(self.partial)
            self.partial = b""
        for raw in lines:
            text = ESCAPES.sub("", raw.decode(errors="replace"))
            text = "".join(c for c in text if c == "\t" or c.isprintable()).rstrip()
            if text:
                self._keep((at, text[:LINE_CHARS]))

    def _keep(self, line: tuple[float, str]) -> None:
        if len(self.head) < HEAD_LINES:
            self.head.append(line)
            return
        self.dropped += len(self.tail) == TAIL_LINES
        self.tail.append(line)

    def lines(self) -> list[tuple[float, str]]:
        head, tail = list(self.head), list(self.tail)
        gap = [(tail[0][0], f"… {self.dropped:,} lines not kept …")] if self.dropped else []
        return head + gap + tail


def _usual(cluster: Cluster) -> dict[str, str]:
    """What a terminal on any of these nodes is set to."""
    here = os.path.dirname(sys.executable)
    path = os.environ.get("PATH", os.defpath)
    env = {
        "PATH": f"{here}{os.pathsep}{path}",  # torchrun and python are this environment's
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",  # as in a terminal: what is printed is seen at once
    }
    if cluster.kind == "local":  # this machine's own name need not lead back to it
        env["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return env
