"""What a fault is, and the bench on which one is tried.

with Lab(faults.by_id("name-is-loopback")) as lab:
    lab.inject()
    with lab.run() as run:
        print(lab.watch(run))       # what is seen first, in words
    print(doctor.examine(lab.cluster, **lab.asks()).first)
    lab.cure()
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .. import cluster as clusters
from ..cluster import Cluster, Node
from ..runs import home
from ..runs.lines import LinesRun

JOB = Path(__file__).resolve().parents[2] / "notebooks" / "scripts" / "two_nodes.py"
FILES = 8  # of the training data, each of so many bytes
FILE_BYTES = 1000
PORT, STATIC_PORT = 29400, 29500  # what torchrun takes by itself, with and without c10d
# A healthy job of these lines has begun after 4 s and ended after 6 s on an idle machine of two
# cores. So much longer without a word is a symptom; torch itself gives up after 1 to 15 minutes.
SILENT = 20.0
STALLED = 10.0  # seconds between one stage of the job and the next one, which take milliseconds


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, and all that belongs to it."""

    id: str
    title: str  # one line for people
    pit: str  # storage, network, environment, launch or checkpoint
    inject: Callable[[Lab], None]  # break the cluster
    cure: Callable[[Lab], None]  # what the doctor's fix says
    lines: Callable[[Lab], dict[int, str]]  # typed on each node
    symptom: Callable[[LinesRun], str | None]  # what is seen, in words; None: it is not seen
    named: str  # the doctor's check, or finding of the launch lines, that names it first; "": none
    by: str = "doctor"  # or "launch": seen in the lines alone
    node: str | None = None  # the host to blame, where there is one
    incidents: tuple[str, ...] = ()  # of facts/incidents.json
    nodes: int = 2
    cluster: dict = field(default_factory=dict)  # further arguments of cluster.start
    asks: Callable[[Lab], dict] = lambda lab: {}  # further arguments of doctor.examine
    within: float = 45.0  # seconds from the start of the job in which the symptom must be seen
    stays: bool = False  # the cure is in the script, and the doctor, who looks at hosts, goes on
    unless: Callable[[], str] = lambda: ""  # why it cannot be had on this machine


class Lab:
    """A cluster for a fault, with a directory that all of its hosts see: the job (two_nodes.py),
    data/ with 8 files, checkpoints/ for what it saves. A context manager."""

    def __init__(self, fault: Fault, *, cluster: Cluster | None = None) -> None:
        self.fault, self.fixed = fault, False  # fixed: the lines, or the script, are put right
        self.held: list[LinesRun] = []  # other people's programs, on which a fault depends
        self._own = cluster is None
        home().mkdir(parents=True, exist_ok=True)
        self.dir = Path(tempfile.mkdtemp(prefix="drill-", dir=home())).resolve()
        try:
            self._fill()
            self.cluster = cluster or clusters.start("virtual", fault.nodes, **fault.cluster)
        except BaseException:
            shutil.rmtree(self.dir, ignore_errors=True)
            raise

    def _fill(self) -> None:
        self.dir.chmod(0o755)
        self.data, self.checkpoints = self.dir / "data", self.dir / "checkpoints"
        self.data.mkdir()
        self.checkpoints.mkdir()
        for i in range(FILES):
            (self.data / f"part-{i}.txt").write_text(f"{i}" * FILE_BYTES)
        shutil.copy(JOB, self.dir)

    def inject(self) -> None:
        """Break the cluster, or write the lines wrongly."""
        self.fixed = False
        self.fault.inject(self)

    def cure(self) -> None:
        """Do what the doctor's fix says."""
        self.fault.cure(self)

    def lines(self) -> dict[int, str]:
        """The job's command lines as they stand now, by node."""
        return self.fault.lines(self)

    def asks(self) -> dict:
        """Arguments of doctor.examine for this job."""
        return self.fault.asks(self)

    def run(self, timeout: float = 120) -> LinesRun:
        """Type the lines."""
        return LinesRun(self.cluster, self.lines(), timeout=timeout, cwd=str(self.dir))

    def watch(self, run: LinesRun, within: float | None = None) -> str | None:
        """The symptom, as soon as it is seen; None if the job has ended without, or time is up."""
        until = run.began + (within or self.fault.within)
        while True:
            over = run.wait(0.2)
            seen = self.fault.symptom(run)
            if seen or over or time.monotonic() > until:
                return seen

    # For faults

    def node(self, index: int) -> Node:
        return self.cluster.node(index)

    def admin(self, index: int, command: str) -> str:
        """Run a command as the host's administrator. Raises RuntimeError if it fails."""
        done = self.node(index).sh(command, timeout=30)
        if done.returncode:
            raise RuntimeError(f"{self.node(index).name}: {command}: {done.stderr.strip()}")
        return done.stdout

    def hold(self, index: int, code: str) -> None:
        """Start another program (Python) on a host; returns once it has printed a line."""
        path = self.dir / f"other{len(self.held)}.py"
        path.write_text(code)
        line = {index: f"python {path.name}"}
        run = LinesRun(self.cluster, line, timeout=3600, cwd=str(self.dir))
        self.held.append(run)
        until = time.monotonic() + 20
        while not run.output(index):
            if run.wait(0.05) or time.monotonic() > until:
                raise RuntimeError(f"the program on node {index} did not start: {run.table()}")

    def let_go(self) -> None:
        """End the other programs."""
        while self.held:
            self.held.pop().stop()

    def script(self, old: str, new: str) -> None:
        """Write the job with `old` replaced by `new`, as spoiled.py. ValueError unless `old` is
        there once."""
        text = JOB.read_text()
        if text.count(old) != 1:
            raise ValueError(f"{JOB.name} has {text.count(old)} times: {old!r}")
        (self.dir / "spoiled.py").write_text(text.replace(old, new))

    def close(self) -> None:
        try:
            self.let_go()
            if self._own:
                self.cluster.close()
        finally:
            shutil.rmtree(self.dir, ignore_errors=True)

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *_) -> None:
        self.close()


# Lines


def torchrun(lab: Lab, *, job: str = "two_nodes.py", args: str = "", endpoint: str = "node0:29400",
             **options) -> dict[int, str]:  # fmt: skip
    """One line for every node, with the c10d rendezvous."""
    given = {"nnodes": len(lab.cluster.nodes), "rdzv_backend": "c10d", "rdzv_endpoint": endpoint,
             "rdzv_id": "job", **options}  # fmt: skip
    words = [f"--{k.replace('_', '-')}={v}" for k, v in given.items() if v is not None]
    line = " ".join(["torchrun", *words, job, args]).strip()
    return {node.index: line for node in lab.cluster.nodes}


def static(lab: Lab, *, ranks=(0, 1), nnodes=(2, 2), port: int = STATIC_PORT, args: str = "",
           address: str = "node0") -> dict[int, str]:  # fmt: skip
    """One line a node, which numbers its node itself."""
    return {
        i: f"torchrun --nnodes={nnodes[i]} --node-rank={ranks[i]} --master-addr={address} "
           f"--master-port={port} two_nodes.py {args}".strip()
        for i in range(2)
    }  # fmt: skip


# Symptoms


def everything(run: LinesRun) -> str:
    return "\n".join(run.output(i) for i in run.lines)


def said(run: LinesRun, *words: str, node: int | None = None) -> str | None:
    """The first line of a node (or of any) that holds one of these words; what stands far before
    the word is left out."""
    for index in run.lines if node is None else [node]:
        for _, line in run.stamped(index):
            at = [line.find(w) for w in words if w in line]
            if at:
                start = max(0, min(at) - 60)
                shown = ("… " if start else "") + line[start : start + 200].strip()
                return f"{run.cluster.node(index).name}: {shown}"
    return None


def silent(run: LinesRun, seconds: float = SILENT) -> str | None:
    """No rank of any node has started."""
    if run.running and run.seconds > seconds and not said(run, "started on"):
        return f"{run.seconds:.0f} s, and no rank has started on any node"
    return None


def stalled(run: LinesRun, after: str, before: str, seconds: float = STALLED) -> str | None:
    """Every node's rank has got as far as `after`, and none to `before`."""
    times = [[at for at, line in run.stamped(i) if after in line] for i in run.lines]
    if not run.running or not all(times) or said(run, before):
        return None
    waited = run.seconds - max(t[0] for t in times)
    if waited < seconds:
        return None
    return f"every rank says “{after}”; {waited:.0f} s later none says “{before}”"


def finished(run: LinesRun) -> bool:
    """Whether every line has ended well."""
    return all(code == 0 for code in run.exits.values())


def values(run: LinesRun, pattern: str) -> dict[str, tuple[str, ...]]:
    """What each rank said: {rank: groups of the last match of `pattern` behind "rank N: "}."""
    found = re.findall(rf"^rank (\d+): {pattern}", everything(run), re.MULTILINE)
    return {rank: tuple(rest) for rank, *rest in found}


def python(code: str) -> str:
    """A shell command that runs Python code, as this environment would."""
    return f"{sys.executable} - <<'END'\n{code}\nEND"
