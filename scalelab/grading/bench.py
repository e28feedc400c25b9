"""The process in which an answer is tried: a fresh interpreter that forks real ranks.

    python -m scalelab.grading.bench < JOB    (started by grading.check; not for people)

JOB is a pickle of an exercise's id and the learner's answer. The verdict is one JSON line on
stdout. torch is imported once; each trial then forks its ranks, so that a check with a dozen
trials takes a second or two, and a rank that hangs, exits or is killed takes nothing else along.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import pickle
import resource
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from typing import Any

from scalelab.grading.verdict import Stub, Wrong

TRIAL_SECONDS = 15.0
OUTPUT_BYTES = 64 << 10  # of what one rank prints, kept
FILE_BYTES = 64 << 20  # of any file a rank writes, its output among them


@dataclasses.dataclass
class Rank:
    """How one rank of a trial ended."""

    rank: int
    value: Any = None  # what the trial returned there
    error: str = ""  # "ValueError: …" where it raised
    where: str = ""  # the line of the learner's code that raised, or the stack of a hang
    exit: int | None = None  # exit code, negative for a signal; None while it ran
    silent: bool = False  # it ended without saying how it went
    hung: bool = False
    sys_exit: bool = False
    output: str = ""
    group_left_open: bool = False
    calls: list = dataclasses.field(default_factory=list)  # [(operation, bytes)] on this rank


class Answer:
    """The learner's answer, not yet unpickled: each rank does that for itself, after its calls of
    torch.distributed are being counted, so that a function imported by name is counted too."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def load(self) -> Any:
        """The object itself. Only in a rank: what it does there harms nothing else."""
        return pickle.loads(self.raw)


class Bench:
    """What an exercise's judge works with. `ran` counts the ranks that answered so far."""

    ran = 0

    def ranks(self, world_size: int, trial, *args, timeout: float = TRIAL_SECONDS,
              group: bool = True) -> list[Rank]:  # fmt: skip
        """Run `trial(rank, world_size, *args)` on `world_size` real ranks and return how each
        ended, in rank order. `group`: with a gloo process group made before and ended after.
        An Answer among `args` arrives as the learner's own object. Never raises for what an answer
        does; see `values`. This process must not have run a backward pass: autograd's threads do
        not survive a fork, so references are computed on ranks too.
        """
        if world_size < 1:
            raise ValueError(f"a trial needs a rank or more, not {world_size}")
        port = free_port()
        pids, pipes, found = [], [], [Rank(r) for r in range(world_size)]
        outputs = [tempfile.TemporaryFile() for _ in range(world_size)]
        for rank in range(world_size):
            r, w = os.pipe()
            pid = os.fork()
            if pid == 0:
                for fd in [r, *pipes]:
                    os.close(fd)
                _be_rank(w, outputs[rank].fileno(), rank, world_size, port, trial, args, group)
            os.close(w)
            pids.append(pid)
            pipes.append(r)
        data = _collect(pids, pipes, found, timeout)
        for rank, raw in enumerate(data):
            found[rank].silent = not raw
            if raw:
                try:
                    for name, value in pickle.loads(raw).items():
                        setattr(found[rank], name, value)
                except Exception as e:
                    found[rank].error = f"what it returned cannot be sent back: {e}"
            outputs[rank].seek(0)
            text = outputs[rank].read(OUTPUT_BYTES).decode(errors="replace")
            found[rank].output = text
            if found[rank].hung:
                at = text.rfind("Fatal Python error: Aborted")
                found[rank].where = text[at:] if at >= 0 else ""
            outputs[rank].close()
        self.ran += sum(1 for raw in data if raw)
        return found

    def values(self, world_size: int, trial, *args, **options) -> list[Any]:
        """The ranks' return values; raises Wrong, in words, for a rank that did not return."""
        found = self.ranks(world_size, trial, *args, **options)
        raise_if_broken(found)
        return [f.value for f in found]


# What a rank says when another one is gone: a consequence, never the cause.
PEER_LOST = ("closed by peer", "Connection reset", "Connection refused", "Broken pipe",
              "DistNetworkError", "DistStoreError")  # fmt: skip


def raise_if_broken(found: list[Rank]) -> None:
    """Say what happened if any rank raised, hung, exited, died, or left its group open: the cause
    first, not what it did to the others."""
    n = len(found)
    raised = [f for f in found if f.error]
    lost = [f for f in raised if any(words in f.error for words in PEER_LOST)]
    for f in raised:
        if f not in lost:
            _say_raised(f, n)
    for f in found:
        if f.sys_exit:
            raise Wrong(f"rank {f.rank} of {n} called sys.exit: a function must return, not end "
                        "its process")  # fmt: skip
    for f in found:
        if f.exit not in (None, 0) and not f.hung and not f.error:
            how = f"was killed by {signal.Signals(-f.exit).name}" if f.exit < 0 else (
                f"ended with exit code {f.exit}")  # fmt: skip
            raise Wrong(f"rank {f.rank} of {n} {how} before it returned")
        if f.exit == 0 and f.silent and not f.hung:
            raise Wrong(f"rank {f.rank} of {n} ended its process (os._exit) before it returned: "
                        "a function must return")  # fmt: skip
    hung = [f for f in found if f.hung]
    if hung:
        names = ", ".join(str(f.rank) for f in hung)
        stack = _own_lines(hung[0].where)
        raise Wrong(f"rank {names} of {n} never returned (a hang, ended by the checker). Where "
                    f"rank {hung[0].rank} stood:\n{stack}".rstrip())  # fmt: skip
    for f in lost:
        _say_raised(f, n)
    for f in found:
        if f.group_left_open:
            raise Wrong(f"rank {f.rank} of {n} left a process group open that it had made itself: "
                        "end it with dist.destroy_process_group(group)")  # fmt: skip


def _say_raised(f: Rank, n: int) -> None:
    if f.error.startswith("NotImplementedError"):
        raise Stub(f.error.partition(": ")[2] or "your turn")
    if "File too large" in f.error:
        raise Wrong(f"rank {f.rank} of {n} wrote more than {FILE_BYTES >> 20} MiB of output")
    raise Wrong(f"rank {f.rank} of {n} raised {f.error}\n{f.where}".strip())


def _own_lines(stack: str) -> str:
    """The frames of a faulthandler stack that are the learner's, innermost first."""
    lines = [line for line in stack.splitlines() if line.lstrip().startswith("File")]
    foreign = ("site-packages", "/scalelab/", "<frozen")
    own = [n for n in lines if not any(f in n for f in foreign)]
    return "\n".join((own or lines)[:6])


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing uses now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _collect(pids, pipes, found, timeout) -> list[bytes]:
    """Read every rank's result; end those that are late, with their stack printed first."""
    data = [b"" for _ in pids]
    deadline = time.monotonic() + timeout
    with selectors.DefaultSelector() as watch:
        for rank, fd in enumerate(pipes):
            watch.register(fd, selectors.EVENT_READ, rank)
        while watch.get_map() and time.monotonic() < deadline:
            for key, _ in watch.select(0.05):
                more = os.read(key.fd, 1 << 20)
                data[key.data] += more
                if not more:
                    watch.unregister(key.fd)
        late = {key.data for key in watch.get_map().values()}
    for rank in late:
        found[rank].hung = True
        os.kill(pids[rank], signal.SIGABRT)
    until = time.monotonic() + 1.0
    for rank, pid in enumerate(pids):
        while True:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() > until and rank in late or time.monotonic() > until + 4:
                os.killpg(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                break
            time.sleep(0.005)
        found[rank].exit = os.waitstatus_to_exitcode(status)
        try:
            os.killpg(pid, signal.SIGKILL)  # what the rank itself has started
        except (ProcessLookupError, PermissionError):
            pass
    for fd in pipes:
        os.close(fd)
    return data


def _be_rank(w, output, rank, world_size, port, trial, args, group) -> None:
    """In the fork: be one rank, send back how it went, and end. Never returns."""
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))  # fmt: skip
    result: dict[str, Any] = {}
    code = 0
    try:
        import torch.distributed as dist

        from scalelab.grading import count

        if group:
            dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}",
                                    rank=rank, world_size=world_size)  # fmt: skip
        with count.calls() as seen:
            loaded = [a.load() if isinstance(a, Answer) else a for a in args]
            result["value"] = trial(rank, world_size, *loaded)
        result["calls"] = list(seen)
        made = dist.distributed_c10d._world.pg_map
        result["group_left_open"] = len(made) > (1 if group else 0)
        if group and dist.is_initialized():
            dist.barrier()
    except SystemExit:
        result["sys_exit"] = True
    except BaseException as e:
        result["error"] = f"{type(e).__name__}: {str(e)[:500]}"
        result["where"] = _where(e)
        code = 1
    try:
        raw = pickle.dumps(result)
    except Exception as e:
        raw = pickle.dumps({"error": f"what it returned cannot be sent back: {e}"})
    try:
        view = memoryview(raw)
        while view:
            view = view[os.write(w, view) :]
    finally:
        os._exit(code)


def _where(e: BaseException) -> str:
    """The innermost line of the learner's own code, as Python shows it."""
    frames = traceback.extract_tb(e.__traceback__)
    own = [f for f in frames if "scalelab" not in f.filename and "site-packages" not in f.filename]
    return "".join(traceback.format_list(own[-2:])).rstrip()


def main() -> None:
    """Read a job from stdin, judge it, print the verdict. Output of the judge goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    verdict: dict[str, Any] = {"passed": False}
    try:
        job = pickle.loads(sys.stdin.buffer.read())
        import torch

        from scalelab.grading.exercise import find

        torch.set_num_threads(1)
        bench = Bench()
        verdict["message"] = find(job["exercise"]).judge(bench, Answer(job["answer"]))
        # A judge that tried nothing has found nothing: no pass with zero ranks.
        verdict["passed"] = bench.ran > 0
    except Stub as e:
        verdict.update(message=str(e), stub=True)
    except Wrong as e:
        verdict["message"] = str(e)
    except Exception as e:
        # An answer that breaks its judge is wrong too; where is said for whoever mends the judge.
        verdict["message"] = f"{type(e).__name__}: {e}\n{_where(e)}".strip()
        traceback.print_exc()
    os.write(out, json.dumps(verdict).encode() + b"\n")
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
