"""05.4: the hosts do not see the same files."""

from __future__ import annotations

import json
import random
import re
import shutil
from pathlib import Path

from ...bench import Bench
from . import mending, parts
from .mending import Bed, Family, Trouble

FILES, FEWER = 8, 5
DATA, CHECKPOINTS, SCRATCH, REFERENCE = "datasets/books", "checkpoints", "scratch", "reference"
OLD, NEW = "step-000020.pt", "step-000040.pt"
ARGS = f"--data {DATA} --save {CHECKPOINTS}/probe.pt"

# On a host. First a token is written into the checkpoints; then all is looked at.
WRITE = """
import os, sys
path = sys.argv[1]
try:
    open(path, "w").close()
    print("null")
except OSError as e:
    print('"' + os.strerror(e.errno) + '"')
"""
LOOK = """
import json, os, sys
def files(path):
    try:
        return [(n, os.path.getsize(os.path.join(path, n))) for n in os.listdir(path)]
    except OSError as e:
        return os.strerror(e.errno)
def text(path):
    try:
        with open(path, errors="replace") as f:
            return f.read(100)
    except OSError:
        return None
def writable(path):
    token = os.path.join(path, ".token")
    try:
        open(token, "w").close()
        os.unlink(token)
        return True
    except OSError:
        return False
data, checkpoints, scratch, reference = sys.argv[1:]
print(json.dumps({
    "data": files(data),
    "checkpoints": {n: text(os.path.join(checkpoints, n)) for n, _ in files(checkpoints)}
    if os.path.isdir(checkpoints) else None,
    "scratch": files(scratch), "reference": files(reference),
    "number": os.stat(data).st_ino if os.path.isdir(data) else None,
    "reference writable": writable(reference), "scratch writable": writable(scratch)}))
"""


def paths(bed: Bed) -> dict[str, Path]:
    return {name: bed.folder / name for name in (DATA, CHECKPOINTS, SCRATCH, REFERENCE)}


def _content(i: int) -> str:
    return f"{i}" * 1000


def settle(bed: Bed) -> None:
    for node in bed.cluster.nodes:
        for path in paths(bed).values():
            if path.exists():
                node.set_dir(str(path), "shared")
    for path in bed.folder.iterdir():  # what an answer has left there too
        if path.name != parts.JOB.name:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in paths(bed).values():
        path.mkdir(parents=True)
    for i in range(FILES):
        (bed.folder / DATA / f"part-{i}.txt").write_text(_content(i))
    for name in (OLD, NEW):
        (bed.folder / CHECKPOINTS / name).write_text(_checkpoint(bed, name))
    (bed.folder / REFERENCE / "model.txt").write_text("as published")
    for node in bed.cluster.nodes:
        _private(bed, node.index, SCRATCH, {f"cache-of-{node.name}": "warm"})
        node.set_dir(str(bed.folder / REFERENCE), "readonly")


def _checkpoint(bed: Bed, name: str) -> str:
    return f"{name} of {bed.folder.name}"


def _private(bed: Bed, k: int, name: str, files: dict[str, str]) -> None:
    """A directory of the host's own in place of a shared one, with these files made in order."""
    node, path = bed.cluster.node(k), bed.folder / name
    node.set_dir(str(path), "private")
    code = ("import json, os, sys\npath = sys.argv[1]\n"
            "for name in os.listdir(path):\n    os.unlink(os.path.join(path, name))\n"
            "for name, text in json.loads(sys.argv[2]).items():\n"
            "    with open(os.path.join(path, name), 'w') as f:\n        f.write(text)\n"
            "print('null')")  # fmt: skip
    parts.ask(node, code, path, json.dumps(files))


def _own_data(numbers):
    def inject(bed: Bed, k: int) -> None:
        _private(bed, k, DATA, {f"part-{i}.txt": _content(i) for i in numbers()})

    return inject


def _missing(bed: Bed, k: int) -> None:
    bed.cluster.node(k).set_dir(str(bed.folder / DATA), "missing")


def _own_disk(bed: Bed, k: int) -> None:
    (bed.folder / CHECKPOINTS / NEW).unlink()  # written since, and only there
    files = {name: _checkpoint(bed, name) for name in (OLD, NEW)}
    _private(bed, k, CHECKPOINTS, files)


def _read_only(bed: Bed, k: int) -> None:
    bed.cluster.node(k).set_dir(str(bed.folder / CHECKPOINTS), "readonly")


def _other_order():
    """Numbers such that a listing of one's own differs from what it was: newest first there."""
    order = list(range(FILES))
    while True:
        random.shuffle(order)
        if order not in (sorted(order), sorted(order, reverse=True)):
            return order


def _looked(bed: Bed) -> dict:
    return parts.ask_all(bed.cluster, LOOK, *paths(bed).values())


def broken(bed: Bed) -> str:
    nodes = bed.cluster.nodes
    for node in nodes:
        token = bed.folder / CHECKPOINTS / f".{node.name}"
        problem = parts.ask(node, WRITE, token)
        if problem:
            return f"{node.name} still cannot write a checkpoint: {problem}"
    found = _looked(bed)
    listings = {}
    for node in nodes:
        data, saved = found[node.name]["data"], found[node.name]["checkpoints"]
        if isinstance(data, str):
            return f"{node.name} still does not see the data: {data}"
        lacking = {f".{n.name}" for n in nodes} - set(saved or ())
        if lacking:
            other = sorted(lacking)[0][1:]
            return (f"{node.name} still does not see what {other} writes into {CHECKPOINTS}: these "
                    "are two directories")  # fmt: skip
        listings[node.name] = data
    for node in nodes:
        parts.ask(node, "import os, sys\nos.unlink(sys.argv[1])\nprint('null')",
                  bed.folder / CHECKPOINTS / f".{node.name}")  # fmt: skip
    a, b = listings.values()
    if len(a) > FILES or len(b) > FILES:
        return f"the hosts see {len(a)} and {len(b)} files of the data, where {FILES} belong"
    if sorted(a) != sorted(b) or len(a) != FILES:
        return (f"the hosts still see {len(a)} and {len(b)} files of the data, and not the same "
                "ones: no error, but the job trains on something else")  # fmt: skip
    if a != b:
        return (f"both hosts see {len(a)} files, but still list them in another order: rank 0 and "
                "rank 1 share them out differently, some are read twice and some "
                "never")  # fmt: skip
    if len({seen["number"] for seen in found.values()}) > 1:
        return ("both hosts see the same files, but in two directories: what is added to one of "
                "them the other host does not see")  # fmt: skip
    return ""


def harm(bed: Bed, trouble: str) -> str:
    found = _looked(bed)
    for name, seen in found.items():
        if [n for n, _ in seen["scratch"]] != [f"cache-of-{name}"] or not seen["scratch writable"]:
            return (f"{name}'s {SCRATCH} is another directory than before, and its cache is out of "
                    f"sight. Each host is meant to have a {SCRATCH} of its own")  # fmt: skip
        if seen["reference writable"]:
            return (f"{name} may write into {REFERENCE} now, which is meant to be read-only: any "
                    "job could spoil it")  # fmt: skip
        if [n for n, _ in seen["reference"]] != ["model.txt"]:
            return f"{name} does not see what is in {REFERENCE} any more"
        for saved in (OLD, NEW):
            if seen["checkpoints"].get(saved) != _checkpoint(bed, saved):
                return _lost(name, saved, trouble)
    left = sorted(p.name for p in (bed.folder / DATA).iterdir())
    if left != [f"part-{i}.txt" for i in range(FILES)]:
        return f"the shared data are {len(left)} files now, and were {FILES}"
    return ""


def _lost(name: str, saved: str, trouble: str) -> str:
    if trouble == "own disk":
        return (f"{name} does not see {saved} now. It lay on one host's own disk, out of sight "
                "once the shared directory is back in its place: the run would begin again 20 "
                "steps earlier. Copy it to the shared storage first")  # fmt: skip
    return f"{name} does not see the checkpoint {saved} as it was any more"


def said(outputs: list[str]) -> str:
    text = "\n".join(outputs)
    names = [n for line in re.findall(r"reads \d+: (.*)", text) for n in line.split()]
    if len(set(names)) != FILES or len(names) != FILES:
        return f"its ranks have read {len(set(names))} of {FILES} files"
    return ""


FAMILY = Family(
    troubles=(
        Trouble("missing", "node{k} does not see the data", _missing),
        Trouble("fewer", f"node{{k}} sees {FEWER} of {FILES} files of the data",
                _own_data(lambda: range(FEWER))),
        Trouble("order", "node{k} lists the data in another order", _own_data(_other_order)),
        Trouble("own disk", "node{k} writes its checkpoints to its own disk", _own_disk),
        Trouble("read-only", "node{k} may only read the checkpoints", _read_only, hosts=(0,)),
    ),
    settle=settle, broken=broken, harm=harm, args=ARGS, said=said,
    call=lambda answer, bed, where: parts.call(answer, bed.cluster, bed.folder, where=where),
)  # fmt: skip


def judge_storage(bench: Bench, answer) -> str:
    return mending.judge(bench, answer, FAMILY)
