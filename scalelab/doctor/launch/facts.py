"""What one launch line tells its launcher: node numbers, endpoint, script. One `Node` a line.

Rules are torch 2.13's (torch/distributed/run.py, elastic/rendezvous), read there and tried:
- without --nnodes there is one node; without --master-port or --rdzv-endpoint as well, torchrun
  starts alone on a port of its own and a --node-rank is ignored: every machine trains by itself;
- the static rendezvous does not check that node_rank is below nnodes: it waits without a word;
- static needs a port in --rdzv-endpoint (ValueError), c10d takes 29400; --master-port is 29500;
- ranks are counted from what each agent says of itself, so that nproc may differ.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .options import FLAGS_OF_TORCHRUN, parse
from .programs import base
from .shell import UNKNOWN, Command, known, shown

C10D_PORT, STATIC_PORT = 29400, 29500
TORCHRUN_LIKE = {"torchrun", "launch", "llamafactory", "swift", "accelerate"}
READS = {  # variables that a launcher reads
    "torchrun": {}, "launch": {}, "accelerate": {}, "deepspeed": {},
    "llamafactory": {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"},
    "swift": {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT"},
    "python": {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"},
    "shell script": {"NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT",
                     "RANK", "WORLD_SIZE"},
}  # fmt: skip
PROGRAM = {
    "launch": "torch.distributed.launch",
    "accelerate": "accelerate launch",
    "llamafactory": "llamafactory-cli",
    "swift": "ms-swift",
    "python": "the script",
}


@dataclass
class Node:
    """One line. None where it says nothing, a word with UNKNOWN where only a shell would know."""

    command: Command
    launcher: str
    nnodes: str | None = None  # as written
    least: int | None = None
    most: int | None = None
    rank: str | None = None  # node's number; for `python` the process's
    rank_said: bool = False
    nproc: str | None = None
    backend: str = "static"
    endpoint: str = ""  # as written
    host: str | None = None
    port: str | None = None
    port_said: bool = False
    rdzv_id: str = "none"
    script: str | None = None
    module: bool = False
    args: list[str] = field(default_factory=list)
    alone: bool = False  # a rendezvous of its own: standalone
    options: dict = field(default_factory=dict)
    problems: list[tuple[str, str, str, str]] = field(default_factory=list)
    names: dict[str, str] = field(default_factory=dict)  # how the line spells each of them

    @property
    def line(self) -> int:
        return self.command.line

    @property
    def program(self) -> str:
        return PROGRAM.get(self.launcher, self.launcher)

    def number(self) -> int | None:
        return whole(self.rank)

    def say(self, name: str, status: str, detail: str, fix: str) -> None:
        self.problems.append((name, status, detail, fix))


Finding = dict  # name, status, node, detail, fix, line


def finding(name: str, status: str, node: Node | None, detail: str, fix: str = "") -> Finding:
    return {"name": name, "status": status, "node": label(node) if node else "", "detail": detail,
            "fix": fix, "line": node.line if node else None}  # fmt: skip


def label(node: Node) -> str:
    return shown(node.command.node) or f"line {node.line}"


def whole(text: str | None) -> int | None:
    """The whole number in a word, or None."""
    try:
        return int(text) if known(text) and len(text) < 12 else None
    except (TypeError, ValueError):
        return None


def split_endpoint(node: Node, endpoint: str, default: int | None) -> None:
    """As torch.distributed.elastic.rendezvous.utils.parse_rendezvous_endpoint does."""
    node.endpoint = endpoint
    if endpoint.startswith("[") and endpoint.endswith("]"):
        host, port = endpoint, None
    else:
        host, colon, port = endpoint.rpartition(":")
        host, port = (host, port) if colon else (endpoint, None)
    if UNKNOWN in endpoint and (port is None or "{" in endpoint or "(" in endpoint):
        tail = port if port and port.isdigit() else None
        node.host, node.port, node.port_said = endpoint if tail is None else host, tail, True
        if tail is None:
            node.port = UNKNOWN
        return
    node.host, node.port_said = host.strip("[]"), port is not None
    node.port = port if port is not None else (str(default) if default else None)


def torchrun(node: Node, words: list[str]) -> None:
    options, problems = parse(node.launcher, words)
    opaque = False
    while known(options["script"]) is False and options["script"] and options["args"]:
        # torchrun $ARGS train.py: the variable holds options that are not known here
        words = list(words)
        words.remove(options["script"])
        opaque = True
        options, problems = parse(node.launcher, words)
    for name, detail, fix in problems:
        node.say(name, "fail", detail, fix)
    if opaque:
        for name in ("nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_id"):
            options[name] = options[name] or UNKNOWN
        if not options["rdzv_endpoint"]:
            options["master_addr"] = options["master_addr"] or UNKNOWN
            options["master_port"] = options["master_port"] or UNKNOWN
    env = node.command.env
    for name in list(options):  # torch.distributed.argparse_util.env
        if options[name] in (None, False) and f"PET_{name.upper()}" in env:
            options[name] = env[f"PET_{name.upper()}"]
    node.options = options
    node.names = {k: "--" + k.replace("_", "-") for k in options}
    node.names["rank"] = "--node-rank"
    node.script, node.args, node.module = options["script"], options["args"], options["module"]
    node.nnodes, node.nproc = options["nnodes"] or "1", options["nproc_per_node"] or "1"
    node.rank, node.rank_said = options["node_rank"] or "0", options["node_rank"] is not None
    node.backend = options["rdzv_backend"] or "static"
    node.rdzv_id = options["rdzv_id"] or "none"
    endpoint = options["rdzv_endpoint"] or ""
    if options["standalone"]:
        node.alone = True
        if node.nnodes not in ("1", "1:1"):
            node.say(
                "nnodes",
                "fail",
                f"--standalone beside --nnodes={shown(node.nnodes)}: each "
                "node meets itself on localhost and waits for the others",
                "replace --standalone by --rdzv-backend=c10d --rdzv-endpoint=HOST:29400",
            )
        return
    if node.backend == "static" and not endpoint:
        if options["master_port"] is None and whole(node.nnodes.split(":")[-1]) == 1:
            node.alone = True
        # --master-addr is not split: a port in it stays part of the name
        node.host = options["master_addr"] or "127.0.0.1"
        node.port = options["master_port"] or str(STATIC_PORT)
        node.port_said = options["master_port"] is not None
        node.endpoint = f"{node.host}:{node.port}"
    elif node.backend == "c10d" and not endpoint:
        node.host = "localhost"
    elif node.backend in ("static", "c10d"):
        split_endpoint(node, endpoint, C10D_PORT if node.backend == "c10d" else None)
    _static_beside_c10d(node, options, endpoint)
    _behind_script(node)


def _static_beside_c10d(node: Node, options: dict, endpoint: str) -> None:
    c10d = node.backend == "c10d"
    masters = [f"--{m.replace('_', '-')}" for m in ("master_addr", "master_port") if options[m]]
    many = node.nnodes not in ("1", "1:1")
    if c10d and not endpoint and many:
        ignored = f"{' and '.join(masters)} {'are' if len(masters) > 1 else 'is'} read by the " \
                  "static rendezvous only; " if masters else ""  # fmt: skip
        host = options["master_addr"] or "HOST"
        port = options["master_port"] or str(C10D_PORT)
        node.say("endpoint", "fail", f"c10d without --rdzv-endpoint: {ignored}each node opens a "
                 "rendezvous on its own localhost and waits for the others",
                 f"add --rdzv-endpoint={shown(host)}:{shown(port)}")  # fmt: skip
    elif c10d and (masters or options["node_rank"] not in (None, "0")):
        ignored = masters + (["--node-rank"] if options["node_rank"] else [])
        node.say(
            "endpoint",
            "warn",
            f"{' and '.join(ignored)}: not read by the c10d rendezvous, "
            "which gives the numbers itself",
            f"leave {' and '.join(ignored)} out",
        )
    elif node.backend == "static" and endpoint and masters:
        node.say("endpoint", "warn", f"{' and '.join(masters)}: not read where --rdzv-endpoint is "
                 "given", f"leave {' and '.join(masters)} out, or --rdzv-endpoint")  # fmt: skip


def _behind_script(node: Node) -> None:
    given = {names for names, value in node.options.items() if value not in (None, False)}
    late = [
        word.partition("=")[0] for word in node.args
        if word.partition("=")[0] in FLAGS_OF_TORCHRUN
        and word.partition("=")[0].lstrip("-").replace("-", "_") not in given
    ]  # fmt: skip
    if late and node.script:
        node.say("option", "fail", f"{', '.join(dict.fromkeys(late))} behind {shown(node.script)}: "
                 "what follows the script's name goes to the script, not to torchrun",
                 f"put {late[0]} before {shown(base(node.script))}")  # fmt: skip


def counts(node: Node) -> None:
    """nnodes as numbers; what is none is said."""
    text = node.nnodes
    if text is None or not known(text):
        return
    name = node.names.get("nnodes", "--nnodes")
    parts = text.split(":") if node.launcher in ("torchrun", "launch", "llamafactory") else [text]
    numbers = [whole(p) for p in parts]
    if len(parts) > 2 or None in numbers:
        node.say(
            "nnodes",
            "fail",
            f"{name}={shown(text)} is not a number"
            + (", nor MIN:MAX" if node.launcher == "torchrun" else ""),
            f"{name}=2",
        )
        return
    node.least, node.most = numbers[0], numbers[-1]
    if node.least < 1 or node.least > node.most:
        node.say("nnodes", "fail", f"{name}={shown(text)}: must be 1 or more"
                 + (", and MIN not above MAX" if len(parts) == 2 else ""), f"{name}=2")  # fmt: skip
        node.least = node.most = None
    elif node.least < node.most and node.backend == "static" and node.launcher == "torchrun":
        node.say("nnodes", "warn", f"--nnodes={text} without --rdzv-backend=c10d: the static "
                 f"rendezvous waits for all {node.most} nodes", "add --rdzv-backend=c10d "
                 "--rdzv-endpoint=HOST:29400, or give one number")  # fmt: skip
