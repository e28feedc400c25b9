"""`scalelab doctor --launch FILE`: what is wrong with the launch lines of all nodes.

    read("lines.txt")  ->  {"nodes": [{…} a line], "checks": [{"name", "status", "node", "detail",
                            "fix", "line"}, …]}

Nothing is started and nothing is asked of a network. `shell` finds the commands,
`facts` what each tells its launcher, `judge` whether they fit one another, and
`script` reads the script that they start.
"""

from __future__ import annotations

import os
import textwrap

from ...cluster import UsageError
from ..source import Source
from .commands import Reader
from .facts import Node, label
from .judge import judge, ordered
from .script import find, judge_script
from .shell import known, shown
from .understand import understand

ACCEPTED = (
    "torchrun, python -m torch.distributed.run, accelerate launch, deepspeed, "
    "llamafactory-cli train, swift sft, or RANK=0 WORLD_SIZE=2 … python train.py"
)
MOST_TEXT = 300_000  # characters: launch lines, not logs
MOST_LINES = 1000  # launch lines
WORDS = {"fail": "FAIL", "warn": "warn", "skip": "not checked", "pass": "pass"}
WIDTH = 100


def read(path: str) -> dict:
    """The verdict on a file's launch lines. "-" is standard input.

    Raises UsageError, in one line, for what cannot be read or holds no launch line.
    """
    source = Source(path)
    lines, size = [], 0
    try:
        for _, line, _ in source.lines():
            lines.append(line)
            size += len(line) + 1
            if size > MOST_TEXT:
                raise UsageError(f"{source.name} is too large for launch lines: over "
                                 f"{MOST_TEXT // 1000} kB")  # fmt: skip
    finally:
        source.close()
    folder = "." if path == "-" else os.path.dirname(path) or "."
    try:
        return read_launch("\n".join(lines), folder)
    except UsageError as e:
        raise UsageError(f"{source.name}: {e}") from None


def read_launch(text: str, base_dir: str = ".") -> dict:
    """The verdict on launch lines. base_dir: where the script may be, besides the cwd.

    Raises UsageError where no launch line is found.
    """
    reader = Reader()
    commands = reader.read(text[:MOST_TEXT])
    if not commands:
        more = f"; line {reader.found_in_comment} has one behind a #" if reader.found_in_comment \
            else ""  # fmt: skip
        raise UsageError(f"no launch line found{more}; accepted: {ACCEPTED}")
    if len(commands) > MOST_LINES:
        raise UsageError(f"{len(commands)} launch lines: at most {MOST_LINES}")
    nodes = [understand(command) for command in commands]
    found = judge(nodes, text)
    scripts: dict = {}
    for node in nodes:
        path = find(node, base_dir)
        if path is not None:
            scripts.setdefault(os.path.realpath(path), (path, []))[1].append(node)
    for path, lines in list(scripts.values())[:8]:
        found += judge_script(path, lines)
    found += _passes(nodes, found, [path.name for path, _ in scripts.values()])
    return {"nodes": [_understood(n) for n in nodes], "checks": ordered(found)}


def _passes(nodes: list[Node], found: list[dict], scripts: list[str]) -> list[dict]:
    """What was looked at and is well."""
    named = {f["name"] for f in found}
    count = f"{len(nodes)} line{'s' if len(nodes) > 1 else ''}"
    first = nodes[0]
    said = {
        "lines": f"{count} of {', '.join(dict.fromkeys(n.program for n in nodes))}",
        "option": f"{first.program} knows every option",
        "variable": "no variable that nothing reads",
    }
    sizes = {n.nnodes for n in nodes if known(n.nnodes)}
    if len(sizes) == 1:
        said["nnodes"] = f"{first.names.get('nnodes', 'nnodes')} {shown(sizes.pop())} on {count}"
    numbers = sorted({n.number() for n in nodes if n.number() is not None})
    if all(n.backend != "static" for n in nodes):
        said["node rank"] = "given out by the rendezvous"
    elif numbers and not any(n.alone for n in nodes):
        said["node rank"] = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    places = {n.endpoint for n in nodes if known(n.endpoint) and n.endpoint and not n.alone}
    if len(places) == 1:
        said["endpoint"] = shown(places.pop())
    if scripts:
        said["script"] = f"{', '.join(shown(s) for s in scripts)} read"
    return [{"name": name, "status": "pass", "node": "", "detail": detail, "fix": "", "line": None}
            for name, detail in said.items() if name not in named]  # fmt: skip


def _understood(node: Node) -> dict:
    """What was understood of one line; None: not said, or known to that node's shell only."""

    def value(text):
        return shown(text) if known(text) and text else None

    return {
        "line": node.line, "node": label(node), "launcher": node.program,
        "all_nodes": node.command.everywhere, "nnodes": value(node.nnodes),
        "node_rank": node.number(), "nproc": value(node.nproc),
        "backend": "standalone" if node.alone else node.backend,
        "endpoint": None if node.alone else value(node.endpoint),
        "rdzv_id": None if node.rdzv_id == "none" else value(node.rdzv_id),
        "script": value(node.script),
    }  # fmt: skip


def table(result: dict) -> str:
    """For people: what was understood, then the findings, worst first."""
    lines = []
    columns = ("node", "launcher", "nnodes", "node_rank", "nproc", "endpoint", "script")
    rows = [columns] + [tuple("all nodes" if c == "node" and n["all_nodes"] and
                              n["node"].startswith("line ") else str(n[c]) if n[c] is not None
                              else "-" for c in columns) for n in result["nodes"][:40]]  # fmt: skip
    widths = [min(40, max(len(r[i]) for r in rows)) for i in range(len(columns))]
    lines += ["  ".join(f"{c:<{w}}" for c, w in zip(row, widths)).rstrip() for row in rows]
    if len(result["nodes"]) > 40:
        lines.append(f"… {len(result['nodes']) - 40} more lines")
    lines.append("")
    names = max(len(f["name"]) for f in result["checks"])
    places = max(len(f["node"] or "all") for f in result["checks"])
    places = min(places, 24)
    for f in result["checks"]:
        head = f"{WORDS[f['status']]:<12}{f['name']:<{names}}  {f['node'] or 'all':<{places}}  "
        lines += _hang(head, f["detail"])
        if f["fix"]:
            lines += _hang(" " * (len(head) - 5) + "fix: ", f["fix"])
    counts = [sum(f["status"] == s for f in result["checks"]) for s in ("fail", "warn", "pass")]
    lines += ["", f"{counts[0]} failed, {counts[1]} warnings, {counts[2]} passed"]
    return "\n".join(lines)


def _hang(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, max(WIDTH, len(head) + 40), initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
