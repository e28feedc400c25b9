"""What the exercises of lab 05 share: an answer that runs in bounded time, questions put to a host,
and the job that has to pass at the end."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from .... import cluster as clusters
from ....cluster import Cluster, ClusterError, Node
from ....cluster.firewall import find_nft
from ....runs.lines import LinesRun
from ...bench import Bench, raise_if_broken
from ...verdict import Wrong

JOB = Path(__file__).parents[4] / "notebooks" / "scripts" / "two_nodes.py"
CALL_SECONDS = 30.0  # for one call of an answer: the doctor takes 5 s, more on a busy machine
CHECK_SECONDS = 170.0  # 15 s on an idle machine, and commands that answer at once
JOB_SECONDS = 90.0  # 5 s on an idle machine


class Late(BaseException):
    """Not an Exception, so that an answer's own `except Exception` does not swallow it."""


def call(answer: Callable, *args, where: str):
    """What an answer returns. Raises Wrong, in words that begin with `where`, if it raises or does
    not return in time; a stub's NotImplementedError goes through."""

    def late(*_):
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, CALL_SECONDS)
    try:
        return answer(*args)
    except NotImplementedError:
        raise
    except Late as e:
        words = f"your function had not returned after {CALL_SECONDS:g} s"
        raise Wrong(f"{where}: {words}{line_of(e)}") from None
    except Exception as e:
        words = f"{type(e).__name__}: {str(e)[:300]}"
        raise Wrong(f"{where}: {words}{line_of(e)}") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def line_of(e: BaseException) -> str:
    """Where in the answer it was raised."""
    foreign = ("site-packages", "scalelab", "<frozen", "/lib/python")
    frames = traceback.extract_tb(e.__traceback__)[1:]
    own = [f for f in frames if not any(words in f.filename for words in foreign)]
    return f" (line {own[-1].lineno}, in {own[-1].name})" if own else ""


def _guarded(rank, world_size, trial, answer, args):
    try:
        return {"said": trial(answer, *args)}
    except Wrong as e:
        return {"wrong": str(e)}
    except ClusterError as e:  # an answer may have closed it, or pulled a host's plug
        return {"wrong": f"a host of the cluster does not answer any more: {e}"}


def tried(bench: Bench, trial: Callable, answer, *args):
    """`trial(answer, *args)` in a process of its own. Raises Wrong as it does."""
    found = bench.ranks(
        1, _guarded, trial, answer, args, group=False, timeout=CHECK_SECONDS - 10
    )  # fmt: skip
    if found[0].hung:
        raise Wrong("the check had not come to its end after "
                    f"{CHECK_SECONDS - 10:g} s\n{found[0].where}".strip())  # fmt: skip
    raise_if_broken(found)
    if "wrong" in found[0].value:
        raise Wrong(found[0].value["wrong"])
    return found[0].value["said"]


def why_not(firewall: bool = False) -> str:
    """Why this machine cannot give an exercise the hosts that it needs; "" where it can."""
    why = clusters.virtual_problem()
    if not why and firewall and not find_nft():
        why = "the program nft is missing (Debian package nftables)"
    return why


def cannot(why: str) -> Wrong:
    return Wrong(f"this exercise cannot be tried on this machine: it needs emulated hosts. {why}")


def stub_or_nothing(answer, *args) -> None:
    """On a machine that cannot try it: is it a stub, at least? Raises NotImplementedError if so."""
    try:
        answer(*args)
    except NotImplementedError:
        raise
    except BaseException:
        pass


@contextmanager
def folder():
    """A directory that all hosts see, with the job in it."""
    with tempfile.TemporaryDirectory(prefix="scalelab-") as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        write_job(path)
        yield path


def write_job(path: Path) -> None:
    """The job, as many are: it takes files in the order in which a directory lists them."""
    text, right, usual = JOB.read_text(), "sorted(os.listdir(directory))", "os.listdir(directory)"
    if text.count(right) != 1:
        raise RuntimeError(f"{JOB.name} does not sort what it lists: mend this exercise")
    (path / JOB.name).write_text(text.replace(right, usual))


def ask(node: Node, code: str, *args, seconds: float = 10):
    """The JSON that Python code prints on a host, in the environment of a job there."""
    line = shlex.join([sys.executable, "-I", "-S", "-c", code, *map(str, args)])
    try:
        done = node.sh(line, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{node.name}: no answer in {seconds:g} s") from None
    if done.returncode:
        raise ClusterError(f"{node.name}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return json.loads(done.stdout)


def ask_all(cluster: Cluster, code: str, *args, seconds: float = 10) -> dict[str, object]:
    """`ask` of every host at the same time, by name."""
    with ThreadPoolExecutor(len(cluster.nodes)) as pool:
        jobs = {n.name: pool.submit(ask, n, code, *args, seconds=seconds) for n in cluster.nodes}
        return {name: job.result() for name, job in jobs.items()}


def lines_of(cluster: Cluster, args: str = "", port: int = 29400) -> dict[int, str]:
    """The job's launch lines: the same one on every host."""
    line = (f"torchrun --nnodes={len(cluster.nodes)} --nproc-per-node=1 --rdzv-backend=c10d "
            f"--rdzv-endpoint=node0:{port} --rdzv-id=job {JOB.name} {args}").strip()  # fmt: skip
    return {node.index: line for node in cluster.nodes}


def pass_or_raise(cluster: Cluster, path: Path, where: str, args: str = "",
                  port: int = 29400) -> list[str]:  # fmt: skip
    """Run the job for real; what every node said. Raises Wrong if it does not pass."""
    lines = lines_of(cluster, args, port)
    with LinesRun(cluster, lines, timeout=JOB_SECONDS, cwd=str(path)) as run:
        run.wait()
        said = [run.output(i) for i in lines]
        joined = [f"joined, {len(lines)} ranks" in text and ": done" in text for text in said]
        if not all(joined) or any(run.exits.values()):
            late = f" (ended after {JOB_SECONDS:g} s)" if run.timed_out else ""
            raise Wrong(f"{where}: the job itself does not pass{late}:\n{run.table(last=3)}")
    return said
