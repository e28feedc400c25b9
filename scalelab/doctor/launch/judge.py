"""Whether the launch lines of a job's nodes fit one another, cause before consequence."""

from __future__ import annotations

import re
from collections import Counter

from .addresses import endpoints, identifiers
from .env import interfaces, variables
from .facts import Finding, Node, finding, label, whole
from .programs import base
from .shell import UNKNOWN, known, shown

ORDER = ("character", "quote", "line", "option", "variable", "nnodes", "node rank", "endpoint",
         "rdzv id", "nproc", "lines", "interface", "script", "arguments")  # fmt: skip
WORST = ("fail", "warn", "skip", "pass")
# Options whose value is meant to differ between nodes
EACH_ITS_OWN = re.compile(r"rank|host|addr|\bip\b|port|log|out|save|dir|path|name|cache|device|gpu")


def judge(nodes: list[Node], text: str) -> list[Finding]:
    """Findings on all lines, worst first. text: the whole file, in which variables are used."""
    found: list[Finding] = []
    for node in nodes:
        found += [finding(name, status, node, detail, fix)
                  for name, status, detail, fix in node.problems]  # fmt: skip
    found += variables(nodes, set(re.findall(r"\$\{?(\w+)", text)))
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault({"launch": "torchrun"}.get(node.launcher, node.launcher), []).append(node)
    if len(groups) > 1:
        found.append(finding("lines", "warn", None, "different launchers in one file: "
                             f"{', '.join(groups)}; each is judged by itself",
                             "one file for each job"))  # fmt: skip
    for group in groups.values():
        found += _job(group, found)
    return ordered(found)


def ordered(found: list[Finding]) -> list[Finding]:
    """Worst first, then cause before consequence; what holds for several lines once."""
    merged: dict[tuple, Finding] = {}
    for f in found:
        first = merged.setdefault((f["name"], f["status"], f["detail"], f["fix"]), dict(f))
        names = first["node"].split(", ")
        names += [n for n in f["node"].split(", ") if n not in names]
        if len(", ".join(names)) < 60:
            first["node"] = ", ".join(names)
    return sorted(merged.values(), key=lambda f: (WORST.index(f["status"]), ORDER.index(f["name"])))


def _job(nodes: list[Node], before: list[Finding]) -> list[Finding]:
    named = {f["name"] for f in before if f["status"] == "fail"}
    if _separate(nodes):
        return []
    found = _nnodes(nodes, before)
    if not any(f["status"] == "fail" for f in found) and "nnodes" not in named:
        unread = any(f["name"] == "variable" and f["status"] == "fail" and "RANK" in f["detail"]
                     for f in before)  # fmt: skip
        found += [] if unread else _ranks(nodes)
    found += endpoints(nodes, before + found)
    found += identifiers(nodes)
    found += _nproc(nodes)
    if not any(f["name"] in ("node rank", "nnodes") and f["status"] == "fail" for f in found):
        found += _lines(nodes)
    found += interfaces(nodes)
    found += _scripts(nodes)
    return found


def _separate(nodes: list[Node]) -> bool:
    """Whether these are jobs of one machine each, that have nothing to do with one another."""
    if not all(n.alone and not n.rank_said for n in nodes):
        return False
    machines = {n.command.node for n in nodes}
    return len(machines) < 2 or len({n.script for n in nodes}) > 1


def _nnodes(nodes: list[Node], before: list[Finding]) -> list[Finding]:
    found = []
    if any(f["name"] == "variable" and "NNODES" in f["detail"] and f["status"] == "fail"
           for f in before):  # fmt: skip
        return found
    spans = {(n.least, n.most) for n in nodes if n.least}
    name = nodes[0].names.get("nnodes", "--nnodes")
    if len(spans) > 1:
        said = ", ".join(f"{label(n)} says {shown(n.nnodes)}" for n in nodes if n.least)
        found.append(finding("nnodes", "fail", None, f"{name} disagrees: {said}",
                             f"one {name} on all nodes"))  # fmt: skip
    elif spans and len(nodes) > 1 and all(n.alone for n in nodes) and not any(
        (n.number() or 0) > 0 for n in nodes
    ):  # fmt: skip
        found.append(
            finding(
                "nnodes",
                "fail",
                None,
                f"{len(nodes)} nodes, and each is told of 1: each would train by itself",
                f"{name}={len(nodes)} on all nodes",
            )
        )
    for node in nodes:
        slurm = node.command.slurm
        if node.command.everywhere and node.most and slurm.get("nodes", node.most) != node.most:
            found.append(finding("nnodes", "fail", node, f"Slurm starts {slurm['nodes']} nodes, "
                                 f"{name} is {shown(node.nnodes)}",
                                 f"{name}=$SLURM_NNODES"))  # fmt: skip
        if node.command.everywhere and slurm.get("tasks", 1) > 1 and node.launcher in (
            "torchrun", "launch", "accelerate"
        ):  # fmt: skip
            found.append(finding("lines", "fail", node, f"srun starts {slurm['tasks']} times "
                                 f"{node.program} on each node, which starts the ranks itself",
                                 "--ntasks-per-node=1"))  # fmt: skip
    return found


def early(node: Node, word: str | None) -> str:
    """A variable of the node that is expanded before the line gets there, or ""."""
    marks = UNKNOWN * (2 if node.command.each_shell else 1)
    match = re.search(re.escape(marks) + r"\$\{?(SLURM_(?:NODEID|PROCID))\b", word or "")
    return match[1] if match and node.command.everywhere else ""


def _ranks(nodes: list[Node]) -> list[Finding]:
    """Numbers of nodes (of processes for a plain python), where the launcher goes by them."""
    found: list[Finding] = []
    told = [n for n in nodes if n.backend == "static" and n.launcher != "deepspeed"
            or n.launcher == "deepspeed" and n.rank_said]  # fmt: skip
    numbers: dict[int, list[Node]] = {}
    for node in told:
        name, size = node.names.get("rank", "--node-rank"), node.names.get("nnodes", "--nnodes")
        number = node.number()
        many = (node.most or 2) > 1
        variable = early(node, node.rank)
        if variable and many:
            found.append(finding("node rank", "fail", node, f"${variable} is expanded before srun "
                                 "starts the tasks: every node gets the number 0",
                                 f"srun bash -c 'torchrun … {name} ${variable} …', in single "
                                 "quotes"))  # fmt: skip
        if number is None:
            if node.rank is not None and known(node.rank):
                found.append(finding("node rank", "fail", node, f"{name}={shown(node.rank)} is not "
                                     "a number", f"{name}=0, 1, … one for each node"))  # fmt: skip
            continue
        if number < 0:
            found.append(
                finding(
                    "node rank",
                    "fail",
                    node,
                    f"{name}={number}: negative; the others wait for it without a word",
                    "count from 0",
                )
            )
            continue
        if node.most and number >= node.most:
            what = "it is ignored and the node trains by itself" if node.alone else \
                "it waits for ever, without a word"  # fmt: skip
            found.append(finding("node rank", "fail", node, f"{name}={number} is not below {size}="
                                 f"{shown(node.nnodes)}: {what}", "count from 0: the last is "
                                 f"{size} - 1; mend whichever of the two is wrong"))  # fmt: skip
            continue
        if node.command.everywhere and many and node.rank is not None and not node.alone:
            found.append(finding("node rank", "fail", node, f"one line for all nodes, and {name} "
                                 + (f"is {number} on all" if node.rank_said else "is not given: "
                                    "0 on all"), f"{name} from a variable that differs, such as "
                                 "$SLURM_NODEID within bash -c '…'"))  # fmt: skip
            continue
        numbers.setdefault(number, []).append(node)
    if any(f["status"] == "fail" for f in found):
        return found
    return _repeated(told, numbers)


def _repeated(told: list[Node], numbers: dict[int, list[Node]]) -> list[Finding]:
    found: list[Finding] = []
    for number, same in sorted(numbers.items()):
        if len(same) < 2:
            continue
        name = same[0].names.get("rank", "--node-rank")
        default = [n for n in same if not n.rank_said]
        how = f"{name} is not given on {' and '.join(label(n) for n in default)}, so 0; " \
            if default else ""  # fmt: skip
        also = ""
        if same[0].options.get("rdzv_endpoint") and same[0].launcher == "torchrun":
            also = ", or add --rdzv-backend=c10d"
        found.append(finding("node rank", "fail", None, f"{how}{' and '.join(map(label, same))} "
                             f"{'both' if len(same) == 2 else 'all'} are number {number}: each "
                             "waits for the others without a word",
                             f"{name} 0, 1, … one for each node{also}"))  # fmt: skip
    everyone = len(numbers) == len(told) > 1 and len({n.most for n in told}) == 1
    most = told[0].most if told else None
    if everyone and most and not found:
        given = sorted(numbers)
        missing = [i for i in range(min(most, max(given) + 1)) if i not in numbers]
        if missing:
            name = told[0].names.get("rank", "--node-rank")
            found.append(finding("node rank", "fail", None, f"no line has {name} "
                                 f"{', '.join(map(str, missing[:8]))}: given are "
                                 f"{', '.join(map(str, given[:8]))} of {most}",
                                 f"{name} 0 to {most - 1}, each once"))  # fmt: skip
    return found


def _nproc(nodes: list[Node]) -> list[Finding]:
    """torch 2.13 adds up what the agents say, static and c10d alike: unequal is legal on gloo.
    NCCL 2.31 was seen to hang on 7 + 8 (NVIDIA/nccl#2385)."""
    given = [n for n in nodes if whole(n.nproc) is not None]
    found = []
    for node in given:
        if whole(node.nproc) < 1:
            found.append(finding("nproc", "fail", node, f"{node.nproc} processes a node",
                                 "1 or more"))  # fmt: skip
    counts = Counter(whole(n.nproc) for n in given)
    if len(counts) > 1 and not found:
        said = ", ".join(f"{label(n)} starts {n.nproc}" for n in given)
        same = any(n.command.env.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1" for n in given)
        name = given[0].names.get("nproc", "--nproc-per-node")
        found.append(
            finding(
                "nproc",
                "fail" if same else "warn",
                None,
                f"{said}: torchrun and "
                "gloo take it, as another world size and global batch; NCCL was seen "
                "to hang",
                f"one {name} on all nodes, unless it is meant",
            )
        )
    for node in nodes:
        text = node.nproc
        if node.launcher in ("torchrun", "launch") and known(text) and whole(text) is None and (
            text not in ("auto", "cpu", "gpu", "xpu", "npu", "mlu", "hpu")
        ):  # fmt: skip
            found.append(
                finding(
                    "nproc",
                    "fail",
                    node,
                    f"--nproc-per-node={shown(text)} is not a number, nor auto, cpu, gpu or xpu",
                    "--nproc-per-node=8",
                )
            )
    return found


def _lines(nodes: list[Node]) -> list[Finding]:
    if any(n.command.everywhere for n in nodes):
        if nodes[0].launcher == "deepspeed" and len(nodes) > 1 and len(
            {n.command.node for n in nodes}
        ) > 1:  # fmt: skip
            return [finding("lines", "warn", None, f"{len(nodes)} deepspeed lines: one starts all "
                            "nodes of its hostfile by ssh", "start it on one node, or add --no_ssh "
                            "--node_rank … on each")]  # fmt: skip
        return []
    spans = {(n.least, n.most) for n in nodes}
    if len(spans) != 1 or not nodes[0].least:
        return []
    (least, most), count = spans.pop(), len(nodes)
    python = nodes[0].launcher in ("python", "shell script")
    name = nodes[0].names.get("nnodes", "--nnodes")
    if count > most and most > 1:
        return [finding("lines", "warn", None, f"{count} lines for {name}={most}: what is too many "
                        "stays outside and waits", f"{name}={count}, or fewer lines")]  # fmt: skip
    # one text for all nodes is right where nothing in it is a node's own
    own = nodes[0].backend == "static" and all(known(n.rank) or n.rank is None for n in nodes)
    if count < least and (count > 1 or own):
        what = "processes; python starts one a line" if python and count > 1 else \
            "are expected"  # fmt: skip
        word = "line" if count == 1 else "lines"
        extra, hint = "", "give the lines of all nodes"
        if count == 1 and not nodes[0].rank_said and not python:
            extra = "; without a node rank it is number 0 on every node"
            if nodes[0].options.get("rdzv_endpoint"):
                hint = "add --rdzv-backend=c10d, or --node-rank on each node"
        return [finding("lines", "warn", None, f"{count} {word} for {name}={nodes[0].nnodes}: "
                        f"{least} {what}{extra}", hint)]  # fmt: skip
    return []


def _scripts(nodes: list[Node]) -> list[Finding]:
    found = []
    scripts = {}
    for node in nodes:
        if known(node.script):
            scripts.setdefault(base(node.script), node)
    if len(scripts) > 1:
        said = ", ".join(f"{label(n)} starts {shown(s)}" for s, n in scripts.items())
        found.append(finding("script", "fail", None, f"the nodes start different scripts: {said}",
                             "one script on all nodes"))  # fmt: skip
        return found
    full = {n.script for n in nodes if known(n.script)}
    if len(full) > 1:
        found.append(
            finding(
                "script",
                "warn",
                None,
                "the script is at different places: "
                + ", ".join(shown(s) for s in sorted(full)[:4]),
                "make sure that it is one text: compare sha256sum of both",
            )
        )
    everyone = [_arguments(n.args) for n in nodes]
    for option in dict.fromkeys(o for options in everyone for o in options):
        values = [options.get(option, "(absent)") for options in everyone]
        if len({v for v in values if known(v)}) < 2 or EACH_ITS_OWN.search(option.lower()):
            continue
        if all(re.match(r"[./~]", v) for v in values if known(v)):
            continue  # a path of each node's own
        said = ", ".join(f"{shown(v)} on {label(n)}" for v, n in zip(values, nodes))
        found.append(finding("arguments", "warn", None, f"{shown(option)} differs: {said}",
                             "the same arguments on all nodes, unless it is meant"))  # fmt: skip
    return found[:8]


def _arguments(words: list[str]) -> dict[str, str]:
    """Options of the script; what is none of them by its place."""
    out: dict[str, str] = {}
    i = place = 0
    while i < len(words):
        word = words[i]
        i += 1
        if word.startswith("--") or re.match(r"-[A-Za-z]", word):
            name, equals, value = word.partition("=")
            if not equals and i < len(words) and not re.match(r"-{1,2}[A-Za-z]", words[i]):
                value, i = words[i], i + 1
            out[name.replace("_", "-")] = value or "given"
        else:
            place += 1
            out[f"argument {place}"] = word
    return out
