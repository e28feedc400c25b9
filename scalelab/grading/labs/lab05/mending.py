"""05.2 and 05.4: clusters with one thing wrong, which an answer finds and mends.

A family of troubles shares a cluster. Each is put in for real, the answer is called, and questions
to the hosts show whether it is mended and what else has been changed; after the last one the job
itself has to pass.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from .... import cluster as clusters
from ....cluster import Cluster
from ...bench import Bench
from ...verdict import Wrong
from . import parts


@dataclass(frozen=True)
class Bed:
    """A cluster, and a directory that all of its hosts see."""

    cluster: Cluster
    folder: Path


@dataclass(frozen=True)
class Trouble:
    """One thing that is wrong, on host k."""

    id: str
    words: str  # what it is, in the verdict; {k} is the host's number
    inject: Callable[[Bed, int], None]
    hosts: tuple[int, ...] = (0, 1)  # on which of them it harms the job
    culprit: str = "node{k}"  # what the answer is to return
    unless: Callable[[], str] = lambda: ""  # why it cannot be had on this machine


@dataclass(frozen=True)
class Family:
    """Troubles of one kind."""

    troubles: tuple[Trouble, ...]
    settle: Callable[[Bed], None]  # make everything right
    broken: Callable[[Bed], str]  # what is wrong, found out by asking the hosts; "" if nothing
    harm: Callable[[Bed, str], str]  # what else was changed, "" if nothing; told the trouble's id
    call: Callable  # (answer, bed, where): what the answer returns
    args: str = ""  # of the job
    said: Callable[[list[str]], str] = lambda said: ""  # what is wrong with a job that has passed
    cluster: dict = field(default_factory=dict)  # further arguments of cluster.start

    def drawn(self) -> list[tuple[Trouble, int]]:
        """Every trouble in a random order, hosts in turn so that each has some."""
        troubles = [t for t in self.troubles if not t.unless()]
        random.shuffle(troubles)
        first, found = random.randrange(2), []
        for free in (t for t in troubles if len(t.hosts) > 1):
            found.append((free, first))
            first = 1 - first
        found += [(t, t.hosts[0]) for t in troubles if len(t.hosts) == 1]
        random.shuffle(found)
        return found


@contextmanager
def bed(family: Family) -> Iterator[Bed]:
    with parts.folder() as path, clusters.start("virtual", 2, **family.cluster) as c:
        yield Bed(c, path)


def judge(bench: Bench, answer, family: Family) -> str:
    why = parts.why_not()
    if why:
        parts.tried(bench, parts.stub_or_nothing, answer, None, None)
        raise parts.cannot(why)
    count = parts.tried(bench, _try, answer, family)
    return (f"{count} faults found and mended, each on the host that had it, and a healthy cluster "
            "left alone; then the job passed on both hosts")  # fmt: skip


def _try(answer, family: Family) -> int:
    with bed(family) as b:
        nodes = list(b.cluster.nodes)
        family.settle(b)
        if family.broken(b):
            raise RuntimeError(f"a healthy cluster is broken: {family.broken(b)}")
        where = "a cluster where nothing is wrong"
        _one(answer, family, b, nodes, None, 0, where)
        cases = family.drawn()
        for trouble, k in cases:
            family.settle(b)
            trouble.inject(b, k)
            if not family.broken(b):
                raise RuntimeError(f"{trouble.id} on node{k} breaks nothing")
            where = "a cluster where " + trouble.words.format(k=k)
            _one(answer, family, b, nodes, trouble, k, where)
        said = parts.pass_or_raise(b.cluster, b.folder, where, family.args)
        if words := family.said(said):
            raise Wrong(f"{where}: the job ends without an error, but {words}")
        return len(cases)


def _one(answer, family, b: Bed, nodes, trouble: Trouble | None, k: int, where: str) -> None:
    got = family.call(answer, b, where)
    if b.cluster.closed or b.cluster.nodes != nodes or not all(n.up for n in nodes):
        raise Wrong(f"{where}: a host is gone. The job asks for both; a host that is left out, or "
                    "switched off, is not mended")  # fmt: skip
    want = trouble and trouble.culprit.format(k=k)
    words = family.broken(b)
    if words:
        raise Wrong(f"{where}: {'not mended' if trouble else 'it was fine, and is not any more'}; "
                    f"{words}")  # fmt: skip
    words = family.harm(b, trouble.id if trouble else "")
    if words:
        raise Wrong(f"{where}: {words}")
    if got != want:
        raise Wrong(f"{where}: {'mended' if trouble else 'left as it was'}, but you return "
                    f"{got!r:.60} where it is {want!r}")  # fmt: skip
