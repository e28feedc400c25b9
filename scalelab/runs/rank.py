"""What torchrun starts in place of the script: it runs the script and watches it.

    python rank.py SCRIPT [ARGS…]        (standard library only; torchrun sets RANK and the rest)

The script runs untouched, in a process of its own. The keeper copies its output to this rank's
log, reports the rank's start and end on the agent's stderr (one JSON line each, read by
scalelab.runs), and ends the way the script ended, so that torchrun sees what it would have seen.
"""

from __future__ import annotations

import collections
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time

MARK = "\x1escalelab "  # begins a report on the agent's stderr; no program prints it by chance
MARKED = rb"\[rank\d+\]: Traceback \(most recent call last\)"
TRACEBACK, FATAL = "Traceback (most recent call last)", "Fatal Python error: "
HEAD_BYTES, TAIL_BYTES = 16 << 20, 1 << 20  # of a log that is too long: kept from each end
ERROR_CHARS = 2400
DRAIN_SECONDS = 1.0  # for what a script had printed when it ended, if a helper of it prints on
ATOMIC_BYTES = 4096  # of a write to a pipe, on Linux; ranks of one node share the pipe


def report(**event) -> None:
    """One line to whoever launched this run."""
    while True:
        line = (MARK + json.dumps(event, ensure_ascii=False) + "\n").encode(errors="replace")
        if len(line) <= ATOMIC_BYTES or not event.get("error"):
            break
        event["error"] = shorten(event["error"], len(event["error"]) * 9 // 10)
    try:
        os.write(2, line)
    except OSError:
        pass  # the launcher is gone, and this host is about to be


def shorten(text: str, most: int) -> str:
    """At most `most` characters: a third from the beginning, the rest from the end."""
    if len(text) <= most:
        return text
    return text[: most // 3] + "\n…\n" + text[len(text) - (most - most // 3 - 3) :]


def own_address(towards: str) -> str:
    """The address this host uses to reach `towards`. Nothing is sent: UDP connect only looks
    up the route."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
            s.connect((socket.gethostbyname(towards), 9))
            return s.getsockname()[0]
    except OSError:
        return ""


class Log:
    """A log file that cannot fill the disk, and whose failure never ends the run."""

    def __init__(self, path: str) -> None:
        self.written = self.overflow = self.tail_bytes = 0
        self.tail: collections.deque[bytes] = collections.deque()
        self.problem = ""
        self.error_time: float | None = None  # when the last traceback began to appear
        self.last_time = 0.0  # of any output
        self.closed_time = 0.0  # when the script had ended
        self.recent = b""
        try:
            self.file = open(path, "ab", buffering=0)
        except OSError as e:
            self.file, self.problem = None, f"{path}: {e.strerror}"

    def add(self, data: bytes) -> None:
        self.last_time = time.time()
        if TRACEBACK.encode() in self.recent[-40:] + data:
            self.error_time = self.last_time
        self.recent = (self.recent + data)[-65536:]
        if self.written < HEAD_BYTES:
            self._write(data)
        else:
            self.tail.append(data)
            self.overflow += len(data)
            self.tail_bytes += len(data)
            while self.tail_bytes > TAIL_BYTES:
                self.tail_bytes -= len(self.tail.popleft())

    def _write(self, data: bytes) -> None:
        self.written += len(data)
        if self.file:
            try:
                self.file.write(data)
            except OSError as e:
                self.problem = self.problem or f"{self.file.name}: {e.strerror}"

    def close(self) -> None:
        self.closed_time = time.time()
        if self.tail:
            gone = self.overflow - self.tail_bytes
            note = f"\n… {gone:,} bytes of output not kept …\n" if gone else ""
            self._write(note.encode() + b"".join(self.tail))

    def failed_at(self, code: int) -> float | None:
        """When the traceback that ended the script appeared; None if none did."""
        if self.error_time is None or code > 1:  # an uncaught exception exits with 1 …
            return None
        # … or hangs on its way out and is ended by a signal. torch.distributed marks what nobody
        # caught; without its mark, a script that dealt with an exception goes on talking, or goes
        # on for a while, and one that did not ends in silence and soon.
        marks = [m.start() for m in re.finditer(MARKED, self.recent)]
        if marks and self.recent.rfind(TRACEBACK.encode()) < marks[-1] + 64:
            return self.error_time
        silent = self.last_time < self.error_time + 0.5
        soon = self.closed_time < self.error_time + 2.0
        return self.error_time if code == 1 and silent and soon else None

    def last_error(self, code: int) -> str:
        """What explains the exit code: the traceback that led to it, the stack at a signal, or
        the last lines of the output."""
        text = self.recent.decode(errors="replace")
        if self.failed_at(code) and TRACEBACK in text:
            error = last_traceback(text)
        elif code < 0 and FATAL in text:
            return fatal_stack(text)[:ERROR_CHARS].strip()  # the most recent call is first
        else:  # a traceback in it was dealt with by the script
            error = "\n".join(text.splitlines()[-10:])
        # torch.distributed writes "[rank1]: " before each line; who it was is told apart from this.
        error = re.sub(r"^\[rank\d+\]: ?", "", error, flags=re.MULTILINE)
        return shorten(error, ERROR_CHARS).strip()


def last_traceback(text: str) -> str:
    """From the last traceback on, with those it is chained to."""
    at = text.rfind(TRACEBACK)
    chained = ("During handling of", "The above exception")
    while at > 0 and any(c in text[max(0, at - 160) : at] for c in chained):
        earlier = text.rfind(TRACEBACK, 0, at)
        if earlier < 0:
            break
        at = earlier
    return text[at:]


def fatal_stack(text: str) -> str:
    """What Python's faulthandler says of the thread that a signal hit; other threads left out."""
    said = text[text.rfind(FATAL) :]
    first = said.partition("\n")[0]
    current = said[max(0, said.find("Current thread")) :].partition("\n\n")[0]
    return current if current.startswith(FATAL) else f"{first}\n{current}"


def main() -> int:
    env, rank = os.environ, int(os.environ["RANK"])
    run_dir = env["SCALELAB_RUN_DIR"]
    tied = "SCALELAB_TIED" in env
    if tied:  # no PID namespace will clean up: end with the agent
        _die_with_parent()
    # torchrun signals the whole group, so the script hears these itself; the keeper must live on
    # to report its end. (A handler, unlike SIG_IGN, is not inherited over exec.)
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    for sig in (getattr(signal, n) for n in names):
        signal.signal(sig, lambda *_: None)
    if "SCALELAB_SAFE_PATH" in env:  # was meant for the agent and for this process
        del env["PYTHONSAFEPATH"], env["SCALELAB_SAFE_PATH"]
    child_env = {
        **env,
        "SCALELAB_METRICS": os.path.join(run_dir, "metrics", f"rank{rank}.jsonl"),
        # A hang is ended by SIGABRT; this makes Python say where it hung.
        "PYTHONFAULTHANDLER": env.get("PYTHONFAULTHANDLER", "1"),
    }
    child = subprocess.Popen(
        [sys.executable, "-u", *sys.argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=child_env,
        preexec_fn=_in_child if sys.platform == "linux" else None,
    )
    attempt = int(env.get("TORCHELASTIC_RESTART_COUNT", 0))
    report(
        event="start", rank=rank, local_rank=int(env["LOCAL_RANK"]),
        world_size=int(env["WORLD_SIZE"]), node=env["SCALELAB_NODE"],
        hostname=socket.gethostname(), addr=own_address(env["MASTER_ADDR"]),
        pid=child.pid, keeper=os.getpid(), pid_ns=_pid_namespace(), attempt=attempt,
        time=time.time(),
    )  # fmt: skip
    log = Log(os.path.join(run_dir, "logs", f"rank{rank}.log"))
    _copy(child, log)
    code = child.wait()
    log.close()
    report(
        event="exit", rank=rank, code=code, time=time.time(),
        error_time=log.failed_at(code),
        error=log.last_error(code) if code else "", log_problem=log.problem, attempt=attempt,
        memory_mb=_peak_mb(),
    )  # fmt: skip
    if code < 0:
        _no_core_file()
        signal.signal(-code, signal.SIG_DFL) if -code not in (9, 19) else None
        os.kill(os.getpid(), -code)
    return code


def _copy(child: subprocess.Popen, log: Log) -> None:
    """Output to the log until it ends, or the script has ended and a helper holds the pipe (which
    may go on printing)."""
    fd = child.stdout.fileno()
    over_at = None
    while over_at is None or time.monotonic() < over_at + DRAIN_SECONDS:
        ready, _, _ = select.select([fd], [], [], 0.2)
        if ready:
            data = os.read(fd, 65536)
            if not data:
                return
            log.add(data)
        elif over_at is not None:
            return
        if over_at is None and child.poll() is not None:
            over_at = time.monotonic()


def _peak_mb() -> float:
    """Peak resident memory of the script, or of its largest helper, in units of 1e6 bytes."""
    import resource

    kib = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * kib / 1e6, 1)


def _in_child() -> None:
    _no_core_file()
    _die_with_parent()


def _no_core_file() -> None:
    """Beside the learner's script, of a size of gigabytes."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _die_with_parent() -> None:
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
