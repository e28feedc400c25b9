"""What one launch line tells its launcher: node numbers, endpoint, script. One `Node` a line.

Rules are torch 2.13's (torch/distributed/run.py, elastic/rendezvous), read there and tried:
- without --nnodes there is one node; without --master-port or --rdzv-endpoint as well, torchrun
  starts alone on a port of its own and a --node-rank is ignored: every machine trains by itself;
- the static rendezvous does not check that node_rank is below nnodes: it waits without a word;
- static needs a port in --rdzv-endpoint (ValueError), c10d takes 29400; --master-port is 29500;
- ranks are counted from what each agent says of itself, so that nproc may differ.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .launch_commands import base, launcher
from .launch_options import FLAGS_OF_TORCHRUN, parse
from .launch_shell import UNKNOWN, Command, known, shown

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


def understand(command: Command) -> Node:
    """What a command tells its launcher."""
    kind, words = launcher(command.words)
    node = Node(command, kind)
    for note in command.notes:
        node.say(*note)
    holes = [m[0] for w in command.words for m in re.finditer(r"(?<=\0)<[^>]*>", w)]
    if holes:
        node.say("line", "warn", f"{shown(' '.join(dict.fromkeys(holes)))}: a placeholder, which "
                 "is not judged", "put the value in its place")  # fmt: skip
    if kind in ("torchrun", "launch"):
        _torchrun(node, words)
    elif kind == "accelerate":
        _accelerate(node, words)
    elif kind == "deepspeed":
        _deepspeed(node, words)
    elif kind in ("llamafactory", "swift"):
        _by_environment(node, words)
    else:
        _python(node, words)
    _counts(node)
    return node


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


def _torchrun(node: Node, words: list[str]) -> None:
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


def _accelerate(node: Node, words: list[str]) -> None:
    options, _ = parse("accelerate", words)
    node.options, node.script, node.args = options, options["script"], options["args"]
    node.module = bool(options.get("module"))
    configured = "config_file" in options  # may hold what the line does not
    node.nnodes = options.get("num_machines") or (None if configured else "1")
    node.rank, node.rank_said = options.get("machine_rank"), "machine_rank" in options
    node.host, node.port = options.get("main_process_ip"), options.get("main_process_port")
    node.backend = options.get("rdzv_backend", "static")
    node.port_said = node.port is not None
    node.port = node.port or (None if configured else str(STATIC_PORT))
    node.endpoint = f"{node.host}:{node.port}" if node.host else ""
    node.names = {
        "rank": "--machine_rank",
        "nnodes": "--num_machines",
        "nproc": "--num_processes",
        "master_addr": "--main_process_ip",
        "master_port": "--main_process_port",
    }
    machines, total = whole(node.nnodes), whole(options.get("num_processes"))
    if machines and machines > 1:
        if total is not None and (total < machines or total % machines):
            node.say("nproc", "fail", f"--num_processes={total} over {machines} machines: "
                     "accelerate counts all machines together and shares them out equally",
                     "--num_processes = machines times processes a machine")  # fmt: skip
        elif total:
            node.nproc = str(total // machines)
        if not configured and not node.host:
            node.say("endpoint", "fail", "no --main_process_ip for more than one machine",
                     "add --main_process_ip ADDRESS of machine 0, on all")  # fmt: skip
        if not configured and not node.rank_said:
            node.say("node rank", "warn", "no --machine_rank: it comes from each machine's own "
                     "accelerate configuration", "add --machine_rank 0, 1, … on each")  # fmt: skip
    elif not configured and node.nnodes == "1":
        node.alone = True


def _deepspeed(node: Node, words: list[str]) -> None:
    options, problems = parse("deepspeed", words)
    for name, detail, fix in problems:
        node.say(name, "fail", detail, fix)
    node.options, node.script, node.args = options, options["script"], options["args"]
    node.module, node.nproc = options["module"], options["num_gpus"]
    node.host, node.port = options["master_addr"], options["master_port"] or str(STATIC_PORT)
    node.port_said = options["master_port"] is not None
    node.endpoint = f"{node.host}:{node.port}" if node.host else ""
    node.names = {"rank": "--node_rank", "nnodes": "--num_nodes", "master_addr": "--master_addr",
                  "master_port": "--master_port"}  # fmt: skip
    if options["no_ssh"]:
        node.nnodes = options["num_nodes"]
        node.rank, node.rank_said = options["node_rank"], options["node_rank"] is not None
        if not node.rank_said:
            node.say("node rank", "fail", "--no_ssh without --node_rank: deepspeed refuses it",
                     "add --node_rank 0, 1, … on each node")  # fmt: skip
        if not node.host:
            node.say("endpoint", "fail", "--no_ssh without --master_addr: each node takes its own "
                     "address", "add --master_addr ADDRESS of node 0, on all")  # fmt: skip
        return
    # one line starts all nodes by ssh
    node.command.everywhere = True
    if options["node_rank"] is not None:
        node.say("node rank", "warn", "--node_rank: deepspeed reads it with --no_ssh only",
                 "leave it out, or add --no_ssh and start a line on each node")  # fmt: skip


def _by_environment(node: Node, words: list[str]) -> None:
    """LLaMA-Factory and ms-swift build a static torchrun line from variables."""
    env = node.command.env
    node.script, node.args = (words[0], words[1:]) if node.launcher == "llamafactory" and words \
        else (None, words)  # fmt: skip
    node.nnodes, node.nproc = env.get("NNODES", "1"), env.get("NPROC_PER_NODE")
    node.rank, node.rank_said = env.get("NODE_RANK", "0"), "NODE_RANK" in env
    node.host, node.port = env.get("MASTER_ADDR", "127.0.0.1"), env.get("MASTER_PORT")
    node.names = {"rank": "NODE_RANK", "nnodes": "NNODES", "nproc": "NPROC_PER_NODE",
                  "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}  # fmt: skip
    node.port_said = node.port is not None
    if node.launcher == "llamafactory":
        if "RDZV_ID" in env:
            node.backend, node.rdzv_id = "c10d", env["RDZV_ID"]
            low, high = env.get("MIN_NNODES"), env.get("MAX_NNODES")
            node.nnodes = f"{low}:{high}" if low and high else node.nnodes
        if node.port is None and node.nnodes != "1":
            node.say("endpoint", "fail", "no MASTER_PORT: llamafactory-cli takes a free port of "
                     "its own on each node", "MASTER_PORT=29500 on every node")  # fmt: skip
        forced = env.get("FORCE_TORCHRUN", "0").lower() in ("1", "true", "y")
        if node.nnodes != "1" and not forced and known(env.get("FORCE_TORCHRUN", "0")) and \
                not node.command.sourced:  # fmt: skip
            node.say("variable", "warn", "no FORCE_TORCHRUN=1: with one GPU a node "
                     "llamafactory-cli does not start torchrun, and NNODES is not read",
                     "FORCE_TORCHRUN=1 on every node")  # fmt: skip
    else:
        node.port = node.port or str(STATIC_PORT)
        if "NNODES" not in env and "NPROC_PER_NODE" not in env and {"NODE_RANK", "MASTER_ADDR"} & \
                set(env) and not node.command.sourced:  # fmt: skip
            node.say("nnodes", "fail", "neither NNODES nor NPROC_PER_NODE: ms-swift does not start "
                     "torchrun, and each node trains by itself", "add NNODES=2")  # fmt: skip
    node.endpoint = f"{node.host}:{node.port}" if node.port else ""


def _option(words: list[str], *names: str) -> str | None:
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") in names and name.startswith("--"):
            return value if equals else (words[i + 1] if i + 1 < len(words) else None)
    return None


def _python(node: Node, words: list[str]) -> None:
    """Processes that are started one by one and told by variables, or by their own options."""
    env = node.command.env
    if words[:1] == ["-m"]:
        node.module, words = True, words[1:]
    node.script, node.args = words[0], words[1:]
    script = node.launcher == "shell script"
    node.rank = env.get("RANK", env.get("NODE_RANK") if script else None)
    node.nnodes = env.get("WORLD_SIZE")
    if script and "NODE_RANK" in env:
        node.rank, node.nnodes = env["NODE_RANK"], env.get("NNODES")
    elif script and "NNODES" in env:
        node.nnodes = env["NNODES"]
    node.names = {"rank": "NODE_RANK" if script and "NODE_RANK" in env else "RANK",
                  "nnodes": "NNODES" if script and "NNODES" in env else "WORLD_SIZE",
                  "master_addr": "MASTER_ADDR", "master_port": "MASTER_PORT"}  # fmt: skip
    node.host, node.port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not script and node.rank is None:
        for name in ("rank", "node_rank"):
            if _option(words[1:], name) is not None:
                node.rank, node.names["rank"] = _option(words[1:], name), f"--{name}"
    if not script and node.nnodes is None:
        for name in ("world_size", "num_nodes", "nnodes"):
            if _option(words[1:], name) is not None:
                node.nnodes, node.names["nnodes"] = _option(words[1:], name), f"--{name}"
    url = _option(words[1:], "dist_url", "init_method")
    if url and url.startswith("tcp://"):
        split_endpoint(node, url.removeprefix("tcp://"), None)
    node.rank_said, node.port_said = node.rank is not None, node.port is not None
    node.endpoint = node.endpoint or (f"{node.host}:{node.port}" if node.host and node.port else "")


def _counts(node: Node) -> None:
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
