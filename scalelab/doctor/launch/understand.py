"""A command -> what it tells its launcher: torchrun, accelerate, deepspeed, LLaMA-Factory,
ms-swift, or plain processes told by variables."""

from __future__ import annotations

import re

from .facts import STATIC_PORT, Node, counts, split_endpoint, torchrun, whole
from .options import parse
from .programs import launcher
from .shell import Command, known, shown


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
        torchrun(node, words)
    elif kind == "accelerate":
        _accelerate(node, words)
    elif kind == "deepspeed":
        _deepspeed(node, words)
    elif kind in ("llamafactory", "swift"):
        _by_environment(node, words)
    else:
        _python(node, words)
    counts(node)
    return node


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
