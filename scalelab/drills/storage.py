"""Pit 1: storage and data that are not the same on every host."""

from __future__ import annotations

import os
import re
from functools import partial

from .fault import FILES, JOB, Fault, Lab, everything, finished, said, torchrun, values


def _data(lab: Lab) -> dict[int, str]:
    return torchrun(lab, args="--data data")


def _save(lab: Lab) -> dict[int, str]:
    return torchrun(lab, args="--save checkpoints/last.pt")


def _asks_data(lab: Lab) -> dict:
    return {"data": [lab.data]}


def _asks_shared(lab: Lab) -> dict:
    return {"shared": [lab.checkpoints]}


def _set(index: int, which: str, mode: str, lab: Lab) -> None:
    lab.node(index).set_dir(str(getattr(lab, which)), mode)


def _own_copy(lab: Lab, index: int, numbers) -> None:
    """A directory of the host's own in place of the data, filled in this order."""
    lab.node(index).set_dir(str(lab.data), "private")
    parts = " ".join(map(str, numbers))
    lab.admin(index, f"cd {lab.data} && rm -f part-* && for i in {parts}; do "
                     f"head -c 1000 /dev/zero | tr '\\0' $i > part-$i.txt; done")  # fmt: skip


def _two_sizes(lab: Lab) -> None:
    """A copy for each host, as without shared storage; the second one broke off."""
    _own_copy(lab, 0, range(FILES))
    _own_copy(lab, 1, range(5))


def _two_orders(lab: Lab) -> None:
    """Two copies filled in other orders, and a script that takes them as they are listed."""
    _own_copy(lab, 0, range(FILES))
    _own_copy(lab, 1, reversed(range(FILES)))
    lab.script("sorted(os.listdir(directory))", "os.listdir(directory)")


def _sort_in_script(lab: Lab) -> None:
    lab.fixed = True


def _fewer(run) -> str | None:
    seen = values(run, r"sees (\d+) files")
    read = values(run, r"all ranks together have read (\d+) files")
    if not finished(run) or len({n for (n,) in seen.values()}) < 2 or not read:
        return None
    counts = ", ".join(f"rank {r} sees {n} files" for r, (n,) in sorted(seen.items()))
    return f"no error; {counts}; all ranks together have read {read['0'][0]} of {FILES}"


def _overlap(run) -> str | None:
    taken = re.findall(r"reads \d+: (.*)", everything(run))
    names = [name for line in taken for name in line.split()]
    if not finished(run) or len(taken) < 2 or len(set(names)) == len(names):
        return None
    return (f"no error; {len(names)} files read, but only {len(set(names))} different ones: "
            f"{FILES - len(set(names))} of {FILES} are never seen")  # fmt: skip


def _small_shm(lab: Lab) -> None:
    lab.admin(1, "mount -t tmpfs -o size=8m,mode=1777 tmpfs /dev/shm")


def _as_root() -> str:
    return "root may write anywhere; as an ordinary user it is refused" if not os.geteuid() else ""


STORAGE = (
    Fault(
        id="data-on-one-host", pit="storage", node="node1",
        title="The training data lies on node0 only",
        inject=partial(_set, 1, "data", "missing"), cure=partial(_set, 1, "data", "shared"),
        lines=_data, asks=_asks_data,
        symptom=lambda run: said(run, "No such file or directory", node=1),
        named="data",
    ),
    Fault(
        id="fewer-files", pit="storage",
        title="One host has fewer files than the other, and trains on less",
        inject=_two_sizes,
        cure=lambda lab: _own_copy(lab, 1, range(FILES)),
        lines=_data, asks=_asks_data, symptom=_fewer, named="data",
    ),
    Fault(
        id="listing-order", pit="storage", incidents=("DAT03",), stays=True,
        title="Both hosts have all files, but list them in another order",
        inject=_two_orders, cure=_sort_in_script,
        lines=lambda lab: torchrun(lab, job=JOB.name if lab.fixed else "spoiled.py",
                                   args="--data data"),
        asks=_asks_data, symptom=_overlap, named="data",
    ),
    Fault(
        id="checkpoint-on-own-disk", pit="storage", incidents=("CKP04",),
        title="Checkpoints go to each host's own disk",
        inject=partial(_set, 1, "checkpoints", "private"),
        cure=partial(_set, 1, "checkpoints", "shared"),
        lines=_save, asks=_asks_shared,
        symptom=lambda run: said(run, "No such file or directory", node=1),
        named="shared directory",
    ),
    Fault(
        id="read-only", pit="storage", incidents=("STO03",), node="node0",
        title="The host that saves the checkpoint may only read the directory",
        inject=partial(_set, 0, "checkpoints", "readonly"),
        cure=partial(_set, 0, "checkpoints", "shared"),
        lines=_save, asks=_asks_shared,
        symptom=lambda run: said(run, "Read-only file system", "cannot be opened", node=0),
        named="shared directory",
    ),
    Fault(
        id="another-uid", pit="storage", incidents=("STO03",),
        title="The directory belongs to another uid: this user may not write",
        inject=lambda lab: lab.checkpoints.chmod(0o555),
        cure=lambda lab: lab.checkpoints.chmod(0o755),
        lines=_save, asks=_asks_shared, unless=_as_root,
        symptom=lambda run: said(run, "Permission denied", "cannot be opened", node=0),
        named="shared directory",
    ),
    Fault(
        id="small-shm", pit="storage", incidents=("DAT05",), node="node1",
        title="/dev/shm of one host is too small for a DataLoader's workers",
        inject=_small_shm, cure=lambda lab: lab.admin(1, "mount -o remount,size=1g /dev/shm"),
        lines=lambda lab: torchrun(lab, args="--epochs 1 --workers 1"),
        symptom=lambda run: said(
            run, "No space left on device", "Bus error", "out of shared memory", node=1
        ),
        named="shared memory",
    ),
)  # fmt: skip
