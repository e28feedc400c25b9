"""The broken clusters of lab 05, to walk about on before anything is written."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
from pathlib import Path

from .... import cluster as clusters
from ....runs.lines import LinesRun
from . import names, opening, parts, storage
from .mending import Bed, Family

FAMILIES: dict[str, Family] = {"05.2": names.FAMILY, "05.4": storage.FAMILY}
_open: list[Practice] = []


class Practice:
    """A broken cluster. `cluster` (None where this machine cannot have one) and `folder` are what
    `mend` will be given; the job's launch lines are right, so `job()` shows the symptoms."""

    def __init__(self, exercise: str) -> None:
        self.exercise, self.cluster, self.folder = exercise, None, None
        self.why = parts.why_not(firewall=exercise == "05.3")
        if self.why:
            return
        self.folder = Path(tempfile.mkdtemp(prefix="scalelab-")).resolve()
        try:
            self.folder.chmod(0o755)
            parts.write_job(self.folder)
            self._break()
        except BaseException:
            self.close()
            raise

    def _break(self) -> None:
        if self.exercise == "05.3":
            case = opening.CASES[-1]
            self.cluster = clusters.start("virtual", len(case.hosts))
            for node in self.cluster.nodes:
                node.firewall(opening.present(case), policy="drop")
            return
        family = FAMILIES[self.exercise]
        self.cluster = clusters.start("virtual", 2, **family.cluster)
        bed = Bed(self.cluster, self.folder)
        family.settle(bed)
        trouble, host = random.choice(family.drawn())
        trouble.inject(bed, host)

    def job(self, seconds: float = 25) -> str:
        """Type the launch lines on both nodes; after `seconds` at most, what each has said."""
        if self.why:
            return f"cannot be shown on this machine: {self.why}"
        args = FAMILIES[self.exercise].args if self.exercise in FAMILIES else ""
        lines = parts.lines_of(self.cluster, args)
        with LinesRun(self.cluster, lines, timeout=seconds, cwd=str(self.folder)) as run:
            run.wait(seconds - 1)  # what still runs then is shown as running
            said = re.sub(r"(?<![\w.:/])/[^\s:'\"]*/", "…/", run.table(last=4))
            return f"on each node: {lines[0]}\n{said}"

    def close(self) -> None:
        """End the cluster; nothing of it is left."""
        if self.cluster:
            self.cluster.close()
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)


def broken(exercise: str) -> Practice:
    """Another broken cluster; the one before is ended. Raises KeyError if the exercise has none."""
    known = sorted([*FAMILIES, "05.3"])
    if exercise not in known:
        raise KeyError(f"no broken cluster for {exercise!r}; there are some for {', '.join(known)}")
    while _open:
        _open.pop().close()
    _open.append(Practice(exercise))
    return _open[-1]
