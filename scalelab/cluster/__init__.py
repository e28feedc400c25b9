"""Clusters of hosts: `local` (agents on this machine's loopback) and `virtual` (emulated hosts).

    with cluster.start("virtual", nodes=2, rate="1gbit") as c:
        print(c.node(1).sh("hostname").stdout)

A virtual host has its own network, host name, /etc/hosts, /dev/shm, processes and view of the
file system, made without root. Every process of a cluster ends when its client ends, however
that ends.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import time
from dataclasses import asdict, dataclass, fields, replace
from functools import partial

from . import probe, units
from .channel import Channel, ClusterError, Process, UsageError
from .firewall import find_nft
from .leftovers import MARK, clean, client_mark
from .link import Link
from .probe import max_ranks, virtual_problem

__all__ = [
    "Cluster", "ClusterError", "Node", "Process", "UsageError",
    "capabilities", "clean", "max_ranks", "start", "virtual_problem",
]  # fmt: skip

KINDS = ("auto", "local", "virtual")
MAX_NODES = 64
ROUTER = "router"


@dataclass
class Node:
    """One host of a cluster."""

    cluster: Cluster
    index: int | None  # None for the router
    name: str
    addr: str
    env: dict[str, str]
    nics: list[dict]  # [{"nic", "addr", "port", "rack"}]; empty on a local cluster
    up: bool = True

    def spawn(
        self,
        argv: list[str],
        *,
        out: int,
        err: int,
        stdin: int | None = None,
        env: dict | None = None,
        cwd: str | None = None,
        admin: bool = False,
    ) -> Process:
        """Start `argv` on this host, output going to the open file descriptors `out` and `err`,
        input (if any) coming from `stdin`.

        `env` is added to the client's environment and this host's own. `admin`: with the rights
        of an administrator of this host. Raises ClusterError if it cannot be started.
        """
        full = {**base_env(self.cluster.kind), MARK: client_mark(), **self.env, **(env or {})}
        try:
            cwd = cwd or os.getcwd()
        except FileNotFoundError:
            raise ClusterError("the current directory is gone; change to another") from None
        files = (out, err) if stdin is None else (out, err, stdin)
        return self.cluster.channel.spawn(
            self.name, files, argv=argv, env=full, cwd=cwd, admin=admin
        )

    def sh(self, command: str, timeout: float = 60) -> subprocess.CompletedProcess:
        """Run a shell command on this host, as its administrator, and return what it printed.

        Raises subprocess.TimeoutExpired after `timeout` seconds; the command is ended then.
        """
        deadline = time.monotonic() + timeout
        pipes = [os.pipe(), os.pipe()]
        reads = [r for r, _ in pipes]
        try:
            try:
                process = self.spawn(
                    ["/bin/sh", "-c", command], out=pipes[0][1], err=pipes[1][1], admin=True
                )
            finally:
                for _, w in pipes:
                    os.close(w)
            try:
                texts = _read_all(reads, process, deadline)
                if not process.ended.wait(max(0.0, deadline - time.monotonic())):
                    raise subprocess.TimeoutExpired(command, timeout, *texts)
            except BaseException:  # late, or Ctrl-C
                process.signal(signal.SIGKILL, group=True)
                raise
        finally:
            for r in reads:
                os.close(r)
        return subprocess.CompletedProcess(command, process.returncode, *texts)

    def kill(self) -> None:
        """Pull this host's plug: every process in it ends at once, and its link goes dead."""
        channel = self.cluster.channel
        if not self.up:
            return
        if self.cluster.kind == "local":
            try:
                channel.ask(self.name, "end_all").result(20)
            except ClusterError:
                pass  # it is going already
        channel.ask(None, "kill_host", name=self.name).result(20)
        deadline = time.monotonic() + 10
        while self.up and time.monotonic() < deadline:
            time.sleep(0.01)

    def start(self) -> None:
        """Switch a killed host on again: same name, address and private directories; empty else."""
        if not self.up:
            self.cluster._boot([self])

    def end_all(self) -> None:
        """SIGKILL every process on this host; the host itself stays up."""
        if self.up:
            self.cluster.channel.ask(self.name, "end_all").result(20)

    def free_port(self) -> int:
        """A TCP port of this host that nothing uses now."""
        return self.cluster.channel.ask(self.name, "free_port", address=self.addr).result(10)

    def firewall(self, rules: list[dict], policy: str = "accept") -> None:
        """Replace this host's firewall. A rule: {"action": drop|reject|accept, "proto":
        tcp|udp|icmp|any, "ports": "29500"|"1024-65535"|None, "peer": address|None, "direction":
        in|out}; the first that matches wins, then `policy`. [] with "accept" removes it."""
        self.cluster._need_virtual("a firewall")
        self.cluster.channel.ask(self.name, "firewall", rules=rules, policy=policy).result(20)

    def set_dir(self, path: str, mode: str) -> None:
        """Show `path` on this host as "shared", "private" (its own, empty at first), "missing" or
        "readonly". Running processes see the change."""
        self.cluster._need_virtual("a file system of its own")
        path = os.path.abspath(path)
        self.cluster.channel.ask(self.name, "dir", path=path, mode=mode).result(20)
        dirs = self.cluster.dirs.setdefault(self.index, {})
        dirs.pop(path, None)
        dirs[path] = mode  # last: a host started again gets them in the order they were set in

    def set_hosts(self, text: str) -> None:
        """Rewrite this host's /etc/hosts."""
        self.cluster._need_virtual("names of its own")
        self.cluster.channel.ask(self.name, "hosts", text=text).result(10)


class Cluster:
    """Hosts and the links between them; a context manager. Made by `start`."""

    def __init__(self, kind: str, nodes: int, link: Link | None, asked: dict, racks: int,
                 env: dict, dirs: dict, why: str = "") -> None:  # fmt: skip
        self.kind, self.why, self.link, self.racks, self.dirs = kind, why, asked, racks, dirs
        self.nodes: list[Node] = []
        self.router: Node | None = None
        self.links: dict[str, Link] = {}  # by port
        began = time.monotonic()
        self.channel = Channel(kind, self._went_down)
        try:
            self._plan(nodes, link, env)
            if kind == "virtual":
                for rack in range(racks):
                    self.channel.ask(None, "add_rack", rack=rack)
            self._boot(self._machines())
        except BaseException:
            self.close()
            raise
        self.seconds_to_start = time.monotonic() - began

    def _plan(self, nodes: int, link: Link | None, env: dict) -> None:
        for i in range(nodes):
            if self.kind == "local":
                self.nodes.append(Node(self, i, f"node{i}", "127.0.0.1", env.get(i, {}), []))
                continue
            rack = i * self.racks // nodes
            place = i - -(-rack * nodes // self.racks)
            nic = {"nic": "eth0", "addr": f"10.77.{rack}.{place + 1}", "port": f"n{i}"}
            nic["rack"] = rack
            self.nodes.append(Node(self, i, f"node{i}", nic["addr"], env.get(i, {}), [nic]))
        if self.racks > 1:
            nics = [
                {"nic": f"eth{r}", "addr": f"10.77.{r}.254", "port": f"r{r}", "rack": r}
                for r in range(self.racks)
            ]
            self.router = Node(self, None, ROUTER, nics[0]["addr"], {}, nics)
        plain = replace(link, rate=None, delay=0.0, jitter=0.0, loss=0.0) if link else None
        for node in self._machines():
            for nic in node.nics:  # the router adds nothing unless set_link says so
                self.links[nic["port"]] = plain if node is self.router else link

    def _machines(self) -> list[Node]:
        return [*self.nodes, *([self.router] if self.router else [])]

    def _boot(self, machines: list[Node]) -> None:
        ask = self.channel.ask
        virtual = self.kind == "virtual"
        first = [ask(None, "add_host", name=m.name, ports=m.nics) for m in machines]
        if virtual:
            first.append(ask(None, "links", links=self._wire_links()))
        for future in first:
            future.result(30)
        if virtual:
            started = [
                ask(m.name, "up", hosts=self._hosts_file(), forward=m is self.router,
                    nics=[self._nic(m, n) for n in m.nics], dirs=self.dirs.get(m.index, {}))
                for m in machines
            ]  # fmt: skip
            for future in started:
                future.result(30)
        for machine in machines:
            machine.up = True

    def _nic(self, machine: Node, nic: dict) -> dict:
        routed = self.racks > 1 and machine is not self.router
        return {
            "nic": nic["nic"], "addr": nic["addr"], "prefixlen": 24,
            "gateway": f"10.77.{nic['rack']}.254" if routed else None,
            "link": asdict(self.links[nic["port"]]),
        }  # fmt: skip

    def _hosts_file(self) -> str:
        lines = ["127.0.0.1 localhost", *(f"{m.addr} {m.name}" for m in self._machines())]
        return "\n".join(lines) + "\n"

    def _wire_links(self) -> dict[str, dict]:
        return {port: asdict(link) for port, link in self.links.items()}

    def _went_down(self, name: str | None) -> None:
        for machine in self._machines():
            if name in (None, machine.name):
                machine.up = False

    def _need_virtual(self, what: str) -> None:
        if self.kind != "virtual":
            text = f"{what} needs emulated hosts; this cluster is local. {self.why}"
            raise ClusterError(text.strip())

    def node(self, index: int) -> Node:
        """The host with this index. Raises UsageError if there is none."""
        if not _is_whole(index) or not 0 <= index < len(self.nodes):
            raise UsageError(f"node {index!r}: this cluster has nodes 0 to {len(self.nodes) - 1}")
        return self.nodes[index]

    def set_link(self, node: int | str | None = None, **changes) -> None:
        """Change links now, in mid-traffic. `node`: an index, "router", or None for every host.

        Keywords: rate, delay, jitter, loss, mtu, port_mtu, as text with a unit; None unsets.
        Raises UsageError for a value that makes no sense, ClusterError on a local cluster.
        """
        self._need_virtual("a link that can be shaped")
        parsed = _parse_link(changes)
        if node == ROUTER and self.router:
            machines = [self.router]
        else:
            machines = self.nodes if node is None else [self.node(node)]
        for machine in machines:
            for nic in machine.nics:
                self.links[nic["port"]] = replace(self.links[nic["port"]], **parsed)
        # Both ends of a link, in one go.
        asked = [self.channel.ask(None, "links", links=self._wire_links())]
        for machine in machines:
            for nic in machine.nics if machine.up else []:
                link = asdict(self.links[nic["port"]])
                asked.append(self.channel.ask(machine.name, "link", link=link, nic=nic["nic"]))
        for future in asked:
            future.result(20)

    def outside_pid(self, pid: int, namespace: str) -> int:
        """The PID by which this machine knows a host's process `pid` of the PID namespace
        `namespace` ("pid:[…]"); -1 if it is gone."""
        return pid if self.kind == "local" else probe.outside_pid(pid, namespace)

    @property
    def closed(self) -> bool:
        """Whether nothing of this cluster is left, by `close` or by its owner's death."""
        return self.channel.closed.is_set()

    def close(self) -> None:
        """End every process and host of this cluster. Idempotent."""
        self.channel.close()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def start(
    kind: str = "auto",
    nodes: int = 2,
    *,
    rate: str | None = None,
    delay: str | None = None,
    jitter: str | None = None,
    loss: str | None = None,
    mtu: int | str | None = None,
    racks: int = 1,
    env: dict[int, dict[str, str]] | None = None,
    dirs: dict[int, dict[str, str]] | None = None,
) -> Cluster:
    """Start a cluster of `nodes` hosts.

    kind: "virtual", "local", or "auto" (virtual where this machine allows it; else local, and
    `Cluster.why` says why). rate limits a host's link in each direction; delay, jitter and loss
    are one-way and applied once, on the sending host's way out: a round trip between two hosts
    takes twice the delay. env and dirs are per node index; racks > 1 puts a router between
    equal groups of hosts. Raises UsageError (a value makes no sense) or ClusterError (it does,
    but cannot be had here), both with one line.
    """
    if kind not in KINDS:
        raise UsageError(f"cluster {kind!r}: use one of {', '.join(KINDS)}")
    if not _is_whole(nodes) or not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"nodes {nodes!r}: use a whole number from 1 to {MAX_NODES}")
    if not _is_whole(racks) or not 1 <= racks <= nodes:
        raise UsageError(f"racks {racks!r}: use 1 to {nodes}, at least one node each")
    for what, by_node in (("environment", env), ("directory", dirs)):
        for index in by_node or {}:
            if index not in range(nodes):
                raise UsageError(f"{what} for node {index}: there are nodes 0 to {nodes - 1}")
    asked = {"rate": rate, "delay": delay, "jitter": jitter, "loss": loss, "mtu": mtu}
    asked = {k: v for k, v in asked.items() if v is not None}
    parsed = _parse_link(asked)
    env = {i: dict(v) for i, v in (env or {}).items()}
    dirs = {i: {os.path.abspath(p): m for p, m in v.items()} for i, v in (dirs or {}).items()}
    # A rate of "unlimited" or a delay of 0 asks for nothing that a plain loopback does not do.
    needs = sorted(k for k, v in parsed.items() if v) + (["racks"] if racks > 1 else [])
    needs += ["dirs"] if dirs else []
    if kind == "local" and needs:
        raise UsageError(f"{', '.join(needs)}: need emulated hosts; use the cluster virtual")
    why = ""
    if kind != "local":
        problem = virtual_problem(quick=True)
        try:
            if problem:
                raise ClusterError(problem)
            return Cluster("virtual", nodes, Link(**parsed), asked, racks, env, dirs)
        except ClusterError as e:
            why = problem or virtual_problem() or f"emulated hosts did not start: {e}"
            if kind == "virtual" or needs:
                asks = f" ({', '.join(needs)} need them)" if needs and kind == "auto" else ""
                raise ClusterError(f"{why}{asks}") from None
    return Cluster("local", nodes, None, asked, 1, env, dirs, why)


def capabilities() -> dict:
    """What this machine can emulate, found by starting one emulated host: `virtual` (bool),
    `why_not` (a sentence or ""), `delay` ("netem", "user-space switch" or ""), `firewall` (bool),
    `cores`, `memory_gb` (free now, of 1e9 bytes), `gpus`, `max_ranks` (more than that measures
    the scheduler, not the program)."""
    why_not, delay = "", ""
    try:
        with start("virtual", nodes=1) as one:
            netem = one.channel.ask(None, "facts").result(10)["netem"]
            delay = "netem" if netem else "user-space switch"
    except ClusterError as e:
        why_not = str(e)
    return {
        "virtual": not why_not,
        "why_not": why_not,
        "delay": delay,
        "firewall": not why_not and bool(find_nft()),
        "cores": probe.cores(),
        "memory_gb": round(probe.memory_gb(), 1),
        "gpus": probe.gpus(),
        "max_ranks": max_ranks(),
    }


def _is_whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_link(values: dict) -> dict:
    parsers = {
        "rate": units.parse_rate, "delay": units.parse_delay,
        "jitter": partial(units.parse_delay, what="jitter"),
        "loss": units.parse_loss, "mtu": units.parse_mtu,
        "port_mtu": partial(units.parse_mtu, what="port_mtu"),
    }  # fmt: skip
    unset = {field.name: field.default for field in fields(Link)}
    parsed = {}
    for name, value in values.items():
        if name not in parsers:
            raise UsageError(f"link setting {name!r}: use one of {', '.join(parsers)}")
        try:
            parsed[name] = unset[name] if value is None else parsers[name](value)
        except ValueError as e:
            raise UsageError(str(e)) from None
    return parsed


def base_env(kind: str) -> dict[str, str]:
    """The client's environment less what is not for a host: what another torchrun or a test runner
    left in it, the real machine's interfaces, and (on an emulated host) its name and TMPDIR."""
    drop = {"RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK",
            "MASTER_ADDR", "MASTER_PORT", "PYTEST_CURRENT_TEST",
            "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME",
            *(("HOSTNAME", "TMPDIR") if kind == "virtual" else ())}  # fmt: skip
    return {
        k: v for k, v in os.environ.items()
        if k not in drop and not k.startswith("TORCHELASTIC_")
    }  # fmt: skip


def _read_all(fds: list[int], process: Process, deadline: float) -> list[str]:
    """Read the pipes to their ends; stop early once the process is over or late."""
    data = {fd: bytearray() for fd in fds}
    with selectors.DefaultSelector() as watch:
        for fd in fds:
            watch.register(fd, selectors.EVENT_READ)
        while watch.get_map() and time.monotonic() < deadline:
            ended = process.ended.is_set()
            ready = watch.select(0 if ended else 0.05)
            if ended:  # what it wrote is in the pipes by now; a child may hold them open
                if not ready:
                    break
                deadline = min(deadline, time.monotonic() + 1)
            for key, _ in ready:
                more = os.read(key.fd, 65536)
                data[key.fd] += more
                if not more:
                    watch.unregister(key.fd)
    return [data[fd].decode(errors="replace") for fd in fds]
