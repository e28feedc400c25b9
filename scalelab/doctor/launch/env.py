"""Variables of launch lines: those that nobody reads, and those that name an interface."""

from __future__ import annotations

import re

from .facts import READS, Finding, Node, finding, whole
from .shell import known, shown
from .variables import DEAD, OLD, RENDEZVOUS, STILL, meant

MOST = 60  # variables of one line looked at
# what torchrun would have to be told by an option
OPTION = {"MASTER_ADDR": ("master_addr", "--master-addr"),
          "NODE_RANK": ("node_rank", "--node-rank"),
          "RANK": ("node_rank", "--node-rank"), "NNODES": ("nnodes", "--nnodes"),
          "WORLD_SIZE": ("nnodes", "--nnodes"),
          "NPROC_PER_NODE": ("nproc_per_node", "--nproc-per-node"),
          "MASTER_PORT": ("master_port", "--master-port")}  # fmt: skip


def variables(nodes: list[Node], used: set[str]) -> list[Finding]:
    """used: names that the text itself expands, so that somebody reads them."""
    found = []
    for node in nodes:
        if node.launcher in ("torchrun", "launch"):
            found += _torchrun(node, nodes)
        elif node.launcher in ("llamafactory", "swift"):
            found += _by_environment(node)
        elif node.launcher == "python":
            found += _python(node)
        for name in list(node.command.env)[:MOST]:
            found += _one(node, name, used)
        found += _expanded_early(node)
    return found


def _one(node: Node, name: str, used: set[str]) -> list[Finding]:
    if name in DEAD:
        return [finding("variable", "warn", node, f"nothing reads {name}: not NCCL, not gloo, not "
                         "torch", DEAD[name])]  # fmt: skip
    if name in OLD:
        read = "still read, with a warning" if name in STILL else "no longer read"
        return [finding("variable", "warn", node, f"{name} is an old name, {read}",
                         f"{OLD[name]}")]  # fmt: skip
    right = None if name in used else meant(name)
    if right and right not in node.command.env:
        serious = right in RENDEZVOUS or right.endswith("_SOCKET_IFNAME")
        return [finding("variable", "fail" if serious else "warn", node, f"nothing reads {name}; "
                         f"{right} is what is read", f"write {right}")]  # fmt: skip
    return []


def _torchrun(node: Node, nodes: list[Node]) -> list[Finding]:
    """torchrun reads options and PET_…, and sets MASTER_ADDR and the like for the workers only."""
    found, env, options = [], node.command.env, node.options
    several = len(nodes) > 1 or any((n.most or 1) > 1 for n in nodes) or any(
        (whole(env.get(v)) or 1) > 1 for v in ("NNODES", "WORLD_SIZE")
    )  # fmt: skip
    if not several or options.get("standalone"):
        return []
    seen = set()
    for name, (option, flag) in OPTION.items():
        value = env.get(name)
        if value is None or option in seen or options.get(option) not in (None, False):
            continue
        if option in ("master_addr", "master_port", "node_rank") and node.backend != "static":
            continue
        if option in ("master_addr", "master_port") and options.get("rdzv_endpoint"):
            continue
        if name == "MASTER_PORT" and value == "29500" or name == "NPROC_PER_NODE" and value == "1":
            continue
        if name in ("NNODES", "WORLD_SIZE") and value == "1":
            continue
        seen.add(option)
        zero = name in ("NODE_RANK", "RANK") and value == "0"
        default = {"master_addr": "127.0.0.1", "master_port": "29500", "node_rank": "0",
                   "nnodes": "1", "nproc_per_node": "1"}[option]  # fmt: skip
        mild = zero or option in ("master_port", "nproc_per_node")
        found.append(finding("variable", "warn" if mild else "fail", node, f"torchrun does not "
                              f"read {name}: without {flag} it takes {default}",
                              f"{flag}={shown(value) or 'VALUE'}"))  # fmt: skip
    return found


def _by_environment(node: Node) -> list[Finding]:
    found, env, unset = [], node.command.env, node.command.unexported
    for wrong, right in (("RANK", "NODE_RANK"), ("WORLD_SIZE", "NNODES")):
        if wrong in env and right not in env and not node.command.sourced:
            extra = "; one release renamed it" if wrong == "RANK" and node.launcher == \
                "llamafactory" else ""  # fmt: skip
            default = "0 on every node" if right == "NODE_RANK" else "1"
            found.append(finding("variable", "fail", node, f"{node.program} does not read {wrong} "
                                  f"but {right}{extra}: without it, {default}",
                                  f"write {right}=… for {wrong}=…"))  # fmt: skip
    return found + _unexported(node, unset)


def _unexported(node: Node, unset: dict[str, str]) -> list[Finding]:
    hidden = sorted(READS[node.launcher] & set(unset))
    if not hidden:
        return []
    return [finding("variable", "fail", node, f"{', '.join(hidden)}: set in the shell and not "
                     f"exported, so {node.program} does not see it",
                     f"export {' '.join(hidden)}")]  # fmt: skip


def _python(node: Node) -> list[Finding]:
    env = node.command.env
    found = _unexported(node, node.command.unexported)
    if found or node.command.sourced or "MASTER_ADDR" not in env and "RANK" not in env:
        return found
    if "NODE_RANK" in env and "RANK" not in env:
        if any(a.startswith(("--num_nodes", "--num-nodes", "--trainer.num_nodes"))
               for a in node.args):  # fmt: skip
            return []
        # Lightning reads NODE_RANK; init_process_group does not
        return [finding("variable", "warn", node, "NODE_RANK and no RANK: init_process_group "
                         "reads RANK, a number for each process (Lightning reads NODE_RANK)",
                         "RANK=0, 1, … or start it with torchrun")]  # fmt: skip
    by_option = any(a.startswith(("--rank", "--world", "--dist-url", "--dist_url", "--init",
                                  "--node")) for a in node.args)  # fmt: skip
    missing = [n for n in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if n not in env]
    if missing and not by_option and "NODE_RANK" not in env and not node.command.everywhere:
        return [finding("variable", "warn", node, f"no {', '.join(missing)}: init_process_group "
                         "with env:// needs all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT",
                         f"{missing[0]}=…, or start it with torchrun")]  # fmt: skip
    return found


def _expanded_early(node: Node) -> list[Finding]:
    """`A=1 torchrun --x $A`: the shell expands $A before it sets it."""
    for word in node.command.words:
        for name in re.findall(r"\0\$\{?(\w+)", word):
            if name in node.command.inline:
                return [
                    finding(
                        "variable",
                        "fail",
                        node,
                        f"${name} on the line that sets it is expanded before it is set",
                        f"export {name}=… on a line before",
                    )
                ]
    return []


def interfaces(nodes: list[Node]) -> list[Finding]:
    """Interfaces that cannot be between machines, or that gloo cannot read."""
    found = []
    several = len(nodes) > 1 or any((n.most or 1) > 1 for n in nodes)
    for node in nodes:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
            value = node.command.env.get(name)
            if not known(value):
                continue
            listed = [v.strip().lstrip("=") for v in value.split(",")]
            if several and all(re.match(r"lo\d*$", v) for v in listed) and not value[:1] == "^":
                found.append(
                    finding(
                        "interface",
                        "fail",
                        node,
                        f"{name}={shown(value)}: the loopback interface reaches no other node",
                        f"{name}=eth0, the one that `ip route get NODE` names",
                    )
                )
            elif name == "GLOO_SOCKET_IFNAME" and value[:1] in ("^", "="):
                found.append(finding("interface", "fail", node, f"{name}={shown(value)}: gloo "
                                      "takes names only; ^ and = are NCCL's",
                                      f"{name}=eth0"))  # fmt: skip
    return found
