"""Endpoints, ports and ids of the lines of one job."""

from __future__ import annotations

import ipaddress
import re

from .facts import C10D_PORT, Finding, Node, finding, label, whole
from .shell import UNKNOWN, known, shown

EPHEMERAL = range(32768, 61000)  # Linux: net.ipv4.ip_local_port_range unless set otherwise
HOSTNAME = re.compile(r"[\w.:-]+$")
EACH_TIME = re.compile(r"\$\{?RANDOM\b|\$\$|uuidgen|\bdate\b|/dev/urandom|shuf|openssl rand|"
                       r"\bmktemp\b|uuid4|randint")  # fmt: skip


def loopback(host: str | None) -> bool:
    if not known(host):
        return False
    return (host.lower().rstrip(".") in ("localhost", "localhost.localdomain", "ip6-localhost",
                                         "::1", "0.0.0.0", "::", "0")
            or re.match(r"127\.[\d.]+$", host) is not None)  # fmt: skip


def numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        return False


def where(node: Node) -> tuple[str, str]:
    """How the line gives host and port."""
    if node.launcher in ("torchrun", "launch"):
        if node.options.get("rdzv_endpoint") or node.backend != "static":
            return "--rdzv-endpoint", "--rdzv-endpoint"
        return "--master-addr", "--master-port"
    return node.names.get("master_addr", "MASTER_ADDR"), node.names.get(
        "master_port", "MASTER_PORT"
    )


def endpoints(nodes: list[Node], before: list[Finding]) -> list[Finding]:
    used = [n for n in nodes if not n.alone and n.backend in ("static", "c10d")]
    several = len(nodes) > 1 or any((n.most or 1) > 1 for n in nodes)
    unread = any(f["name"] == "variable" and f["status"] == "fail" and "MASTER_ADDR" in f["detail"]
                 for f in before)  # fmt: skip
    found: list[Finding] = []
    for node in used:
        found += _valid(node, several)
    if any(f["status"] == "fail" for f in found):
        return found
    said = [n for n in used if known(n.host) and (n.endpoint or n.backend == "static")]
    if several and not unread:
        found += _on_localhost(said)
    remote = [n for n in said if not loopback(n.host)]
    found += _disagree(remote, used)
    if not any(f["name"] == "node rank" and f["status"] == "fail" for f in before):
        found += _not_the_head(remote)
    return found


def _valid(node: Node, several: bool) -> list[Finding]:
    found = []
    address, port_name = where(node)
    host, port = node.host, node.port
    if known(host):
        if "://" in host:
            found.append(finding("endpoint", "fail", node, f"{address}={shown(host)}…: an address "
                                  "of the rendezvous has no scheme; torch refuses it",
                                  f"{address}={shown(host.split('://')[1] or 'HOST')}"
                                  + (":PORT" if address == port_name else "")))  # fmt: skip
        elif address != port_name and re.search(r"[^:]:\d+$", host) and not numeric(host):
            found.append(finding("endpoint", "fail", node, f"{address}={shown(host)}: the port is "
                                  "taken for a part of the name, which then is not found",
                                  f"{address}={shown(host.rpartition(':')[0])} {port_name}="
                                  f"{host.rpartition(':')[2]}"))  # fmt: skip
        elif host and not HOSTNAME.match(host) or not host and node.endpoint:
            found.append(
                finding(
                    "endpoint",
                    "fail",
                    node,
                    f"{shown(host) or '(nothing)'} is not the name or address of a machine",
                    f"{address}=HOST",
                )
            )
        elif re.match(r"\d+(\.\d+){3}$", host) and not numeric(host):
            found.append(finding("endpoint", "fail", node, f"{shown(host)} is not an IP address",
                                  "four numbers from 0 to 255"))  # fmt: skip
    if port is None:
        if (
            node.endpoint
            and known(node.endpoint)
            and node.backend == "static"
            and node.launcher in ("torchrun", "launch")
            and node.options.get("rdzv_endpoint")
        ):
            found.append(finding("endpoint", "fail", node, f"{port_name}={shown(node.endpoint)} "
                                  "has no port: the static rendezvous refuses it (\"port is "
                                  "missing in endpoint\")",
                                  f"{port_name}={shown(node.endpoint)}:{C10D_PORT}"))  # fmt: skip
        return found
    if not known(port):
        return found
    number = whole(port)
    if number is None or not 0 <= number < 65536 or not re.match(r"\d{1,5}$", port):
        found.append(finding("endpoint", "fail", node, f"port {shown(port) or '(nothing)'} is not "
                              "a number from 1 to 65535", f"port {C10D_PORT}"))  # fmt: skip
    elif number == 0 and several:
        found.append(finding("endpoint", "fail", node, "port 0: a free port that the other nodes "
                              "do not know", f"port {C10D_PORT}"))  # fmt: skip
    elif 0 < number < 1024:
        found.append(
            finding(
                "endpoint",
                "fail",
                node,
                f"port {number} is privileged: only root can listen there",
                f"a port from 1024 to 32767, such as {C10D_PORT}",
            )
        )
    elif number in EPHEMERAL:
        found.append(
            finding(
                "endpoint",
                "warn",
                node,
                f"port {number} is one that the kernel "
                "gives to outgoing connections (32768 to 60999): now and then it is "
                "taken, EADDRINUSE",
                f"a port from 1024 to 32767, such as {C10D_PORT}",
            )
        )
    elif not node.port_said and node.backend == "c10d" and node.endpoint:
        found.append(finding("endpoint", "warn", node, f"--rdzv-endpoint={shown(node.endpoint)} "
                              f"has no port: c10d takes {C10D_PORT}",
                              f"--rdzv-endpoint={shown(node.endpoint)}:{C10D_PORT}"))  # fmt: skip
    return found


def _on_localhost(said: list[Node]) -> list[Finding]:
    local = [n for n in said if loopback(n.host)]
    if not local:
        return []
    name = where(local[0])[0]
    default = [n for n in local if n.launcher in ("torchrun", "launch", "llamafactory", "swift")
               and not n.options.get("master_addr") and not n.options.get("rdzv_endpoint")
               and "MASTER_ADDR" not in n.command.env]  # fmt: skip
    how = f"no {name}, so {shown(local[0].host)}" if default == local else \
        f"{name} is {shown(local[0].host)}"  # fmt: skip
    fix = f"{name}: the name or address of node 0 that the others reach, the same on all nodes"
    if len(local) == len(said):
        return [
            finding(
                "endpoint",
                "fail",
                local[0] if len(local) == 1 else None,
                f"{how}: each node meets itself there and waits for the others",
                fix,
            )
        ]
    head = len(local) == 1 and (local[0].number() == 0 or local[0].backend == "c10d")
    return [finding("endpoint", "warn" if head else "fail", n, f"{how}, the others' is not: "
                     + ("it works only where this is the head itself" if head else
                        "this node meets itself there and waits for the others"), fix)
            for n in local]  # fmt: skip


def _disagree(remote: list[Node], used: list[Node]) -> list[Finding]:
    found = []
    hosts: dict[str, Node] = {}
    for node in remote:
        hosts.setdefault(node.host.lower().rstrip("."), node)
    if len(hosts) > 1:
        name = where(remote[0])[0]
        said = ", ".join(f"{shown(n.host)} on {label(n)}" for n in hosts.values())
        addresses = {numeric(h) for h in hosts}
        same = len({h.split(".")[0] for h in hosts}) == 1 and True not in addresses
        if same or len(addresses) == 2:
            found.append(finding("endpoint", "warn", None, f"{name} is written differently: {said}",
                                  "one name on all nodes: whether two are one machine cannot be "
                                  "seen here"))  # fmt: skip
        else:
            found.append(finding("endpoint", "fail", None, f"{name} disagrees: {said}",
                                  f"one {name}, that of node 0, on all nodes"))  # fmt: skip
    ports: dict[int, Node] = {}
    for node in used:
        if whole(node.port) is not None:
            ports.setdefault(whole(node.port), node)
    if len(ports) > 1:
        name = where(used[0])[1]
        said = ", ".join(f"{p} on {label(n)}" for p, n in ports.items())
        found.append(finding("endpoint", "fail", None, f"the ports disagree: {said}",
                              f"one port in {name} on all nodes"))  # fmt: skip
    for node in used:
        if node.port and EACH_TIME.search(node.port) and _typed_on_each(node, used):
            found.append(
                finding(
                    "endpoint",
                    "fail",
                    node,
                    f"the port is {shown(node.port)}: another on each node",
                    f"one port on all, such as {C10D_PORT}",
                )
            )
            break
    return found


def _typed_on_each(node: Node, nodes: list[Node]) -> bool:
    """Whether the line's substitutions are made on every node by itself."""
    if node.command.everywhere:
        return node.command.each_shell and not re.search(
            UNKNOWN * 2, node.rdzv_id + (node.port or "")
        )
    return len(nodes) > 1 or (node.most or 1) > 1


def _not_the_head(remote: list[Node]) -> list[Finding]:
    """The endpoint is on the host of another line than that of number 0, which would listen."""
    for node in remote:
        number, name = node.number(), node.command.node.lower()
        if node.backend != "static" or node.command.everywhere or node.launcher == "deepspeed":
            continue
        if name and name == node.host.lower() and number and len({n.host for n in remote}) == 1:
            return [finding("endpoint", "fail", node, f"the address is {shown(node.host)}'s, and "
                             f"that node is number {number}: number 0 listens, so nobody does "
                             "there", "make the node that the address names number 0")]  # fmt: skip
    return []


def identifiers(nodes: list[Node]) -> list[Finding]:
    """--rdzv-id is a prefix of every key in the store, static and c10d alike."""
    used = [
        n for n in nodes if n.launcher in ("torchrun", "launch", "llamafactory") and not n.alone
    ]
    for node in used:
        if (
            EACH_TIME.search(node.rdzv_id)
            and UNKNOWN in node.rdzv_id
            and _typed_on_each(node, used)
        ):
            return [finding("rdzv id", "fail", node, f"--rdzv-id={shown(node.rdzv_id)}: another "
                             "on each node, and the nodes never meet",
                             "one fixed --rdzv-id on all nodes, such as job1")]  # fmt: skip
    ids: dict[str, Node] = {}
    for node in used:
        if known(node.rdzv_id):
            ids.setdefault(node.rdzv_id, node)
    if len(ids) > 1:
        said = ", ".join(f"{'none' if i == 'none' else shown(i)} on {label(n)}"
                         for i, n in ids.items())  # fmt: skip
        return [finding("rdzv id", "fail", None, f"--rdzv-id disagrees: {said}; each id is a job "
                         "of its own, which waits for its nodes",
                         "one --rdzv-id on all nodes")]  # fmt: skip
    return []
