"""05.3: a firewall, opened as far as a job needs it and no further; tried by knocking at ports."""

from __future__ import annotations

import copy
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from .... import cluster as clusters
from ....cluster import Cluster, ClusterError, Node, UsageError
from ...bench import Bench
from ...verdict import Wrong
from . import parts

SSH, METRICS = 22, 9100
NODES = 4  # the job's, and others in the same network
COLLECTOR = "10.77.0.4"  # node3, which collects figures
RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"


@dataclass(frozen=True)
class Case:
    """One job. hosts: the job's; low, high: the ports that the kernel gives out on all hosts."""

    hosts: tuple[int, ...]
    head: int
    port: int
    low: int
    high: int
    dropped: str  # ports for which a rule of the present firewall says drop, in so many words

    @property
    def where(self) -> str:
        return (
            f"a job on {', '.join(f'node{i}' for i in self.hosts)}, rendezvous on "
            f"node{self.head}, port {self.port}, ephemeral ports {self.low} to {self.high}"
        )


CASES = (  # the job is run for the last one
    Case((0, 1, 2), 1, 29612, 50000, 50199, "1024-65535"),
    Case((0, 1), 0, 29400, 32768, 60999, "20000-65535"),
)

# Connects to every [address, port] at once. A refusal has come through the firewall as well.
KNOCK = """
import errno, json, select, socket, sys, time
waiting, passed = {}, []
poll = select.poll()
for addr, port in json.loads(sys.argv[1]):
    s = socket.socket()
    s.setblocking(False)
    code = s.connect_ex((addr, port))
    waiting[s.fileno()] = (s, addr, port)
    poll.register(s, select.POLLOUT)
until = time.monotonic() + 1.5
while waiting and time.monotonic() < until:
    for fd, _ in poll.poll(100):
        s, addr, port = waiting.pop(fd)
        poll.unregister(fd)
        if s.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in (0, errno.ECONNREFUSED):
            passed.append([addr, port])
        s.close()
print(json.dumps(passed))
"""


def present(case: Case) -> list[dict]:
    """The firewall as it is: first match wins, then drop."""
    return [
        {"action": "accept", "proto": "icmp"},
        {"action": "accept", "proto": "tcp", "ports": str(SSH)},
        {"action": "accept", "proto": "tcp", "ports": str(METRICS), "peer": COLLECTOR},
        {"action": "drop", "proto": "tcp", "ports": case.dropped},
    ]


def judge_opening(bench: Bench, answer) -> str:
    why = parts.why_not(firewall=True)
    if why:
        parts.tried(bench, parts.stub_or_nothing, answer, [], True, [], 29400, 32768, 60999)
        raise parts.cannot(why)
    parts.tried(bench, _try, answer)
    return (f"{len(CASES)} jobs: what they need is open to their own hosts, and to nobody else; "
            "all that was open still is; a real job passed behind it")  # fmt: skip


def _try(answer) -> None:
    with parts.folder() as path, clusters.start("virtual", NODES) as c:
        for case in CASES:
            for node in c.nodes:
                node.sh(f"echo {case.low} {case.high} > {RANGE_FILE}")
            rules = {i: _asked(answer, case, c, i) for i in case.hosts}
            for i, given in rules.items():
                try:
                    c.node(i).firewall(given, policy="drop")
                except (ClusterError, UsageError) as e:
                    raise Wrong(f"{case.where}: node{i} refuses these rules: {e}") from None
            _judge(case, c, rules)
            if case is not CASES[-1]:
                for node in c.nodes:
                    node.firewall([])
        pair = _Pair(c, case.hosts)
        parts.pass_or_raise(pair, path, case.where, port=case.port)


class _Pair:
    """The hosts of a job, as a cluster of their own."""

    def __init__(self, cluster: Cluster, hosts) -> None:
        self.nodes, self.node = [cluster.node(i) for i in hosts], cluster.node
        self.kind = cluster.kind


def _asked(answer, case: Case, c: Cluster, i: int) -> list[dict]:
    peers = [c.node(j).addr for j in case.hosts if j != i]
    before = present(case)
    got = parts.call(answer, copy.deepcopy(before), i == case.head, peers, case.port, case.low,
                     case.high, where=f"{case.where}: rules of node{i}")  # fmt: skip
    if not isinstance(got, (list, tuple)) or not all(isinstance(r, dict) for r in got):
        raise Wrong(f"{case.where}: for node{i} got {got!r:.60}; return a list of rules, each a "
                    "dict as in `rules`")  # fmt: skip
    return list(got)


def _judge(case: Case, c: Cluster, rules: dict[int, list[dict]]) -> None:
    outside = c.node(NODES - 1)
    with ThreadPoolExecutor(NODES) as pool:
        passed = dict(zip((n.name for n in c.nodes),
                          pool.map(lambda n: _knocked(n, case, c), c.nodes)))  # fmt: skip
    for i in sorted(case.hosts, key=lambda i: i != case.head):  # the head first: it needs more
        node, before = c.node(i), present(case)
        new = [r for r in rules[i] if r not in before]
        where = f"{case.where}: on node{i}"

        def through(other: Node, port: int, node=node) -> bool:
            return (node.addr, port) in passed[other.name]

        if not through(outside, SSH):
            raise Wrong(f"{where} port {SSH} is closed now: you have locked yourself out. Keep the "
                        "rules that are there")  # fmt: skip
        if not through(outside, METRICS):
            raise Wrong(f"{where} port {METRICS} was open to {outside.addr}, which collects "
                        "figures, and is not any more")  # fmt: skip
        peers = [c.node(j) for j in case.hosts if j != i]
        for port in _needed(case, i):
            shut = [p for p in peers if not through(p, port)]
            if shut:
                raise Wrong(f"{where} port {port} is closed to {shut[0].name}: "
                            f"{_why_shut(case, i, port, rules[i], new, node.addr)}")  # fmt: skip
        for other in c.nodes:
            if other.index not in case.hosts:
                for port in sorted({case.port, *_unneeded(case, i), *_needed(case, i)}):
                    if through(other, port) and not (other is outside and port == METRICS):
                        raise Wrong(f"{where} {other.name}, which is no host of this job, gets "
                                    f"through to port {port}: {_why_open(new)}")  # fmt: skip
        for peer in peers:
            for port in _unneeded(case, i):
                if through(peer, port):
                    raise Wrong(f"{where} port {port} is open to {peer.name}, and the job does not "
                                f"use it there: {_why_wide(case, i, port, new)}")  # fmt: skip
        loose = [r for r in new if r.get("action") == "accept" and r.get("proto") != "tcp"]
        if loose:
            raise Wrong(f"{where} {loose[0].get('proto') or 'any'} is let in as well: the job uses "
                        "tcp and nothing else")  # fmt: skip


def _needed(case: Case, i: int) -> list[int]:
    ends = [case.low, (case.low + case.high) // 2, case.high]
    return [case.port, *ends] if i == case.head else ends


def _unneeded(case: Case, i: int) -> list[int]:
    near = {case.low - 1, case.high + 1, case.port - 1, case.port + 1, case.port, 80, 1024, 8888,
            20000, 65535}  # fmt: skip
    needed = _needed(case, i)
    return sorted(p for p in near if p not in needed and not case.low <= p <= case.high)


def _knocked(node: Node, case: Case, c: Cluster) -> set[tuple[str, int]]:
    doors = [
        [c.node(i).addr, port]
        for i in case.hosts if i != node.index
        for port in {SSH, METRICS, *_needed(case, i), *_unneeded(case, i)}
    ]  # fmt: skip
    return {tuple(p) for p in parts.ask(node, KNOCK, json.dumps(doors))}


def _holds(rule: dict, port: int) -> bool:
    if rule.get("ports") is None:
        return True
    low, _, high = str(rule["ports"]).partition("-")
    return int(low) <= port <= int(high or low)


def _why_shut(case: Case, i: int, port: int, rules, new, addr: str) -> str:
    if not new:
        return "the rules are as they were, so the job is as stuck as it was"
    if any(r.get("direction") == "out" for r in new):
        return ("direction out is about what this host begins, and that passes anyway; the peers "
                "come in")  # fmt: skip
    mine = [r for r in new if r.get("action") == "accept" and _holds(r, port)]
    if mine and all(r.get("proto") == "udp" for r in mine):
        return "the rule is for udp; the job uses tcp"
    if mine and all(r.get("peer") == addr for r in mine):
        return "peer is the other end of a connection that comes in, not this host"
    before = present(case)
    drops = [at for at, r in enumerate(rules) if r in before and r["action"] == "drop"
             and _holds(r, port)]  # fmt: skip
    if mine and drops and drops[0] < min(rules.index(r) for r in mine):
        return ("the rule that opens it stands behind one that drops it, and the first that "
                "matches wins")  # fmt: skip
    if mine and len(case.hosts) > 2:
        return "it is open to some of the peers; each of them needs it"
    if port == case.port:
        return "the rendezvous is on this host, and nobody reaches it"
    accepts = [r for r in new if r.get("action") == "accept"]
    part = any(_holds(r, p) for r in accepts for p in range(case.low, case.high + 1))
    if any(_holds(r, case.port) for r in accepts) and not part:
        return ("the rendezvous port alone is not enough: the ranks then connect to each other, on "
                f"ports that the kernel chooses, {case.low} to {case.high}")  # fmt: skip
    return f"the ranks listen on ports that the kernel chooses, all of {case.low} to {case.high}"


def _why_open(new: list[dict]) -> str:
    accepts = [r for r in new if r.get("action") == "accept"]
    if any(r.get("peer") is None for r in accepts):
        return "a rule without peer is for everybody"
    if any("/" in str(r.get("peer")) for r in accepts):
        return "a whole network is more than the job's hosts; a rule for each peer"
    return "only the job's own hosts should"


def _why_wide(case: Case, i: int, port: int, new: list[dict]) -> str:
    if port == case.port:
        return (f"the rendezvous is on node{case.head}; what nothing listens on needs no "
                "opening")  # fmt: skip
    return (f"it needs {case.low} to {case.high}" +
            (f" and {case.port}" if i == case.head else "") + ", not more")  # fmt: skip
