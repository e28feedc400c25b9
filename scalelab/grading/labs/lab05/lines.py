"""05.1: launch lines, read as torchrun itself reads them, and then typed on emulated hosts."""

from __future__ import annotations

import random
import re
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path

from .... import cluster as clusters
from ....runs.lines import LinesRun
from ...bench import Bench
from ...verdict import Wrong
from . import parts

CASES = (  # hosts, ranks a node, port, job; only to be read
    (["node0", "node1", "node2"], 2, 29400, "train.py"),
    (["gpu-a", "gpu-b"], 8, 29612, "pretrain.py --config large.yaml"),
    (["r1-n7", "r1-n9", "r2-n1", "r2-n4"], 4, 23456, "job.py"),
)
RUN_SECONDS = 60.0  # 5 s on an idle machine
# Imports no torch, so that six of them are light; torchrun tells each rank who it is by these.
SCRIPT = """
import os, socket, sys
env, words = os.environ, " ".join(sys.argv[1:])
line = (f"rank {env['RANK']} of {env['WORLD_SIZE']} local {env['LOCAL_RANK']} "
        f"on {socket.gethostname()} argument {words}\\n")
os.write(1, line.encode())  # in one piece, beside the other rank's
"""
LOCAL = ("localhost", "127.", "0.0.0.0", "::1", "[::1]")


def _returned(answer: Callable, cases) -> list:
    out = []
    for hosts, ranks, port, job in cases:
        where = f"hosts {', '.join(hosts)}, {ranks} ranks a node, port {port}, {job}"
        out.append((where, parts.call(answer, list(hosts), ranks, port, job, where=where)))
    return out


def judge_lines(bench: Bench, answer) -> str:
    found = parts.tried(bench, _returned, answer, CASES)
    for (hosts, ranks, port, job), (where, lines) in zip(CASES, found):
        words = mistake(lines, hosts, ranks, port, job)
        if words:
            raise Wrong(f"{where}: {words}")
    on = parts.tried(bench, _really, answer)
    return (f"right for {len(CASES)} clusters as torchrun reads them; then typed on {on}, where 6 "
            "ranks started, 2 on each node")  # fmt: skip


def mistake(lines, hosts, ranks, port, job) -> str:
    """What is wrong with the lines of all nodes; "" if nothing is seen."""
    n = len(hosts)
    if not isinstance(lines, dict) or not all(isinstance(v, str) for v in lines.values()):
        return f'got {lines!r:.60}; return a dict of one line a node: {{0: "torchrun …", …}}'
    if set(lines) != set(range(n)):
        return (f"there are lines for {sorted(lines, key=str)!r:.60}; the nodes are 0 to {n - 1}, "
                "and each needs one")  # fmt: skip
    read = []
    for i in range(n):
        args = understood(lines[i])
        if isinstance(args, str):
            return f"node {i}: {args}"
        read.append(args)
    for look in (_script, _counts, _meeting):
        words = look(read, hosts, ranks, port, job)
        if words:
            return words
    return ""


def understood(line: str):
    """A launch line as torchrun's own parser reads it, or what keeps it from being read."""
    from torch.distributed.run import get_args_parser

    if "\n" in line.strip():
        return "more than one line; all of it belongs into one"
    try:
        words = shlex.split(line)
    except ValueError as e:
        return f"a shell cannot read this line: {e}"
    while words and re.fullmatch(r"\w+=.*", words[0]):
        words.pop(0)
    if not words or Path(words[0]).name not in ("torchrun", "python", "python3"):
        return f"{line!r:.80} does not start torchrun"
    program = Path(words.pop(0)).name
    if program != "torchrun":
        if words[:2] != ["-m", "torch.distributed.run"]:
            return ("this starts one process, which no torchrun tells its rank; begin with "
                    "torchrun")  # fmt: skip
        words = words[2:]
    parser = get_args_parser()

    def refuse(message):
        raise ValueError(message)

    parser.error = refuse
    try:
        return parser.parse_args(words)
    except (ValueError, SystemExit) as e:
        return f"torchrun refuses this line: {e}"


def _script(read, hosts, ranks, port, job) -> str:
    script, *options = job.split()
    for i, args in enumerate(read):
        rest = list(args.training_script_args)
        late = [w for w in rest if re.match(r"--(nnodes|nproc|rdzv|node.rank|master)", w)]
        if late:
            return (f"node {i}: {late[0]} stands behind the script, so the script gets it and "
                    "torchrun does not: torchrun's own options come first")  # fmt: skip
        if args.training_script != script or rest != options:
            got = " ".join([args.training_script, *rest])
            return f"node {i}: this runs {got!r}; the job is {job!r}"
    return ""


def _counts(read, hosts, ranks, port, job) -> str:
    n = len(hosts)
    for i, args in enumerate(read):
        if args.standalone:
            return f"node {i}: --standalone means this node alone, whatever else the line says"
        if str(args.nnodes) not in (str(n), f"{n}:{n}"):
            if str(args.nnodes) == str(n * ranks):
                return (f"node {i}: --nnodes={args.nnodes} counts ranks; it is the number of "
                        f"machines, {n}: torchrun would wait for {args.nnodes} of "
                        "them")  # fmt: skip
            if str(args.nnodes) == "1:1":
                return f"node {i}: without --nnodes each node is a job of its own; they are {n}"
            return f"node {i}: --nnodes={args.nnodes}, and there are {n} nodes"
        if str(args.nproc_per_node) != str(ranks):
            if str(args.nproc_per_node) == str(n * ranks):
                return (
                    f"node {i}: --nproc-per-node={args.nproc_per_node} starts "
                    f"{n * n * ranks} ranks: it is the number on each node, {ranks}"
                )
            if str(args.nproc_per_node) == "1":
                return f"node {i}: one rank a node; --nproc-per-node={ranks} is missing"
            return f"node {i}: --nproc-per-node={args.nproc_per_node}; {ranks} on each node"
    return ""


def _meeting(read, hosts, ranks, port, job) -> str:
    kinds = {args.rdzv_backend for args in read}
    if len(kinds) > 1:
        return f"the nodes meet in different ways: {', '.join(sorted(kinds))}"
    kind = kinds.pop()
    if kind not in ("c10d", "static"):
        return f"--rdzv-backend={kind} needs a server that nobody has started; use c10d"
    if len({args.rdzv_id for args in read}) > 1:
        return "the nodes have different --rdzv-id: each waits for others of its own job"
    numbers = [args.node_rank for args in read]
    meet = [a.rdzv_endpoint or f"{a.master_addr}:{a.master_port or 29500}" for a in read]
    if kind == "c10d":
        if not all(args.rdzv_endpoint for args in read):
            if read[0].master_addr != "127.0.0.1":
                return ("--master-addr is not read with --rdzv-backend=c10d, and there is no "
                        "--rdzv-endpoint: each node would wait at its own")  # fmt: skip
            return "no --rdzv-endpoint=HOST:PORT: where are the nodes to meet?"
        head = None
    else:
        if sorted(numbers) != list(range(len(hosts))):
            return _numbers(numbers, read)
        head = hosts[numbers.index(0)]
    return _places(meet, hosts, port, head)


def _numbers(numbers, read) -> str:
    if set(numbers) == {0}:
        if read[0].rdzv_endpoint:
            return ("without --rdzv-backend=c10d the nodes are numbered by --node-rank, and all "
                    "say 0 here: two and more wait to be the first")  # fmt: skip
        return ("every node says that it is node 0 (--node-rank): all wait, without a word, for "
                "the others")  # fmt: skip
    if sorted(numbers) == list(range(1, len(numbers) + 1)):
        return "--node-rank counts from 0; a node whose number is not below nnodes waits for ever"
    return f"--node-rank is {numbers} on the nodes; each number from 0 to {len(numbers) - 1} once"


def _places(meet, hosts, port, head) -> str:
    for i, place in enumerate(meet):
        host, colon, at = place.rpartition(":")
        if (host or place).startswith(LOCAL):
            return (f"node {i} looks for the others at {host or place}, which is itself on every "
                    f"machine: {hosts[0]} is where they can meet")  # fmt: skip
        if not colon or not at.isdigit():
            return f"node {i}: {place!r} has no port; torchrun would take its own, not {port}"
        if "/" in place:
            return f"node {i}: {place!r} is a URL; torchrun takes HOST:PORT"
        if host not in hosts:
            return f"node {i}: no node is called {host!r}; they are {', '.join(hosts)}"
        if int(at) != port:
            return f"node {i}: port {at}, and the port that is free there is {port}"
    if len(set(meet)) > 1:
        return (f"the nodes do not meet in one place: {', '.join(meet)}. One of them is the host "
                "for all")  # fmt: skip
    if head and not meet[0].startswith(f"{head}:"):
        return f"the node of rank 0 is {head}, and it waits at {meet[0]}; it has to be its own"
    return ""


def _really(answer) -> str:
    """Type the lines on three nodes of two ranks. Raises Wrong unless six ranks start."""
    local = bool(parts.why_not())
    job = f"who_{random.randrange(100, 1000)}.py"
    port = random.randrange(20000, 30000)
    with tempfile.TemporaryDirectory(prefix="scalelab-") as name:
        path = Path(name).resolve()
        path.chmod(0o755)
        (path / job).write_text(SCRIPT)
        with clusters.start("local" if local else "virtual", 3) as c:
            hosts = [n.addr if local else n.name for n in c.nodes]
            if local:
                port = c.node(0).free_port()
            where = f"three nodes of two ranks, port {port}"
            lines = parts.call(answer, list(hosts), 2, port, f"{job} --seed 7", where=where)
            with LinesRun(c, lines, timeout=RUN_SECONDS, cwd=str(path)) as run:
                run.wait()
                words = _ran(run, local)
                if words:
                    raise Wrong(f"{where}: {words}\n{run.table(last=3)}{_reader(lines)}")
    return "three nodes of this machine's loopback" if local else "three emulated hosts"


def _ran(run: LinesRun, local: bool) -> str:
    pattern = r"^rank (\d+) of (\d+) local (\d+) on (\S+) argument (.*)$"
    found = {i: re.findall(pattern, run.output(i), re.M) for i in run.lines}
    if run.timed_out:
        return f"not done after {RUN_SECONDS:g} s"
    if any(run.exits.values()):
        return "torchrun ended with an error"
    ranks = sorted(int(f[0]) for said in found.values() for f in said)
    if ranks != list(range(6)) or {len(said) for said in found.values()} != {2}:
        return f"ranks {ranks} started, {[len(s) for s in found.values()]} on the nodes"
    if {f[1] for said in found.values() for f in said} != {"6"}:
        return "the ranks do not agree that they are 6"
    if {f[4] for said in found.values() for f in said} != {"--seed 7"}:
        return "the job's own argument has not reached the ranks"
    if not local and [{f[3] for f in said} for said in found.values()] != [
        {f"node{i}"} for i in run.lines
    ]:
        return "the ranks are not where they should be"
    return ""


def _reader(lines) -> str:
    """What `scalelab doctor --launch` says of the lines, if it finds something."""
    try:
        from ....doctor.launch import read_launch

        found = read_launch("\n".join(f"node{i}: {line}" for i, line in lines.items()))
    except Exception:  # it is there to help, and not to judge
        return ""
    bad = [c for c in found["checks"] if c["status"] == "fail"]
    return f"\nscalelab doctor --launch says: {bad[0]['detail']}" if bad else ""
