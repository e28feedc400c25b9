"""The examination: agents on all hosts, what they see, and what the checks make of it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable

from ..cluster import Cluster, ClusterError, Node, UsageError
from ..cluster.units import parse_rate
from .agent import ROOT
from .registry import PROBES, STATUSES, Check, Host, NotChecked, Seen, judge, skip
from .remote import Remote
from .report import Report

PORT = 29400  # torchrun's own, for the c10d rendezvous
LONGEST = 17.0  # seconds for everything that is asked of hosts
TELLING = 0.5  # seconds between two looks at counters and stuck processes, at least


def examine(
    cluster: Cluster,
    *,
    endpoint: str | None = None,
    shared: Iterable[str] = (),
    data: Iterable[str] = (),
    nproc: int = 1,
    line_rate: float | None = None,
    checks: Iterable[Check] = (),
    without: Iterable[str] = (),
    node_env: dict[int, dict[str, str]] | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Report:
    """Examine every host and every pair of a cluster that is up, within 20 seconds.

    endpoint: "HOST:PORT" of the rendezvous to be (default: node0's name, port 29400). shared,
    data: directories that every host must see alike. nproc: ranks a host. line_rate: bytes/s that
    a host's link is meant to carry one way (default: what the cluster was started with). node_env:
    the job's variables on one host, by its index. checks: your own, beside all of ScaleLab's.
    without: names of checks to leave out, such as "matmul", which imports torch on every host.
    progress: told in a few words what is going on. Raises UsageError for an endpoint that is none.
    """
    head, without = cluster.nodes[0], frozenset(without)
    where = parse_endpoint(endpoint) if endpoint else (
        head.name if cluster.kind == "virtual" else head.addr, PORT
    )  # fmt: skip
    if line_rate is None and cluster.link.get("rate"):
        bits = parse_rate(cluster.link["rate"])
        line_rate = bits / 8 if bits else None
    hosts = [Host(n.name, n.addr, run=_shell(n)) for n in cluster.nodes]
    remotes: dict[str, Remote] = {}
    began = time.monotonic()
    try:
        for node, host in zip(cluster.nodes, hosts, strict=True):
            try:
                remotes[host.name] = start_agent(node, (node_env or {}).get(node.index, {}))
            except (ClusterError, OSError) as e:
                host.missing = str(e)
        seen = Seen(
            [h for h in hosts if not h.missing], [h for h in hosts if h.missing],
            endpoint=where, line_rate=line_rate, nproc=nproc,
            shared=[os.path.abspath(p) for p in shared], data=[os.path.abspath(p) for p in data],
        )  # fmt: skip
        look(seen, remotes, one_at_a_time=True, progress=progress, without=without)
    finally:
        for remote in remotes.values():
            remote.end()
    return conclude(seen, checks, time.monotonic() - began, cluster.kind, without)


def conclude(
    seen: Seen, checks: Iterable[Check], seconds: float, kind: str, without: Iterable[str] = ()
) -> Report:
    """Judge what was seen."""
    from .checks import CHECKS

    findings = judge([c for c in (*CHECKS, *checks) if c.name not in without], seen)
    for words in seen.broken:
        lost = skip(None, f"a part of the examination itself failed: {words}")
        lost.name = "doctor"
        findings.append(lost)
    findings.sort(key=lambda f: STATUSES.index(f.status))
    return Report(findings, seen, seconds, kind)


def parse_endpoint(text: str) -> tuple[str, int]:
    """ "node0:29400" to ("node0", 29400). Raises UsageError."""
    host, colon, port = text.strip().rpartition(":")
    host = host.strip("[]")  # an IPv6 address
    try:
        host.encode("idna")  # as the resolver will
    except UnicodeError:
        host = ""
    if not (colon and host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise UsageError(f"endpoint {text[:100]!r}: use HOST:PORT, such as node0:29400")
    return host, int(port)


def start_agent(node: Node, env: dict[str, str]) -> Remote:
    """An agent on a host of a cluster, over pipes: a broken network does not matter to it."""
    ours_in, theirs_out = os.pipe()
    theirs_in, ours_out = os.pipe()
    try:
        with tempfile.TemporaryFile() as errors:
            process = node.spawn(
                [sys.executable, "-c", AGENT], out=theirs_out, err=errors.fileno(),
                stdin=theirs_in, env=env,
            )  # fmt: skip
    except BaseException:
        os.close(ours_in), os.close(ours_out)
        raise
    finally:
        os.close(theirs_out), os.close(theirs_in)

    def end() -> None:
        if process.wait(1) is None:  # a thread of it hangs in a file system, say
            process.signal(9, group=True)

    return Remote(node.name, os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb"), end)


AGENT = f"import sys; sys.path[0] = {ROOT!r}; from scalelab.doctor import agent; agent.main()"


def _shell(node: Node) -> Callable:
    def run(command: str, timeout: float):
        try:
            return node.sh(command, timeout)
        except subprocess.TimeoutExpired:
            raise NotChecked(f"`{command}` took more than {timeout:g} s") from None
        except ClusterError as e:
            raise NotChecked(str(e)) from None

    return run


def look(
    seen: Seen,
    remotes: dict[str, Remote],
    *,
    one_at_a_time: bool,
    progress: Callable[[str], None],
    without: Iterable[str] = (),
) -> None:
    """Ask the agents everything, and fill `seen` with the answers. Never raises for a host that
    does not answer: it moves to `seen.missing`, or its facts say why they are not there."""
    from . import exchange
    from .checks import CHECKS, shared

    until = time.monotonic() + LONGEST
    progress(f"looking at {len(seen.hosts)} hosts")
    _begin(seen, remotes)

    def ask(host: Host, op: str, limit: float | None = None, **args):
        """limit: seconds to wait for the answer; by default a little more than the op's own
        `timeout`."""
        left = max(0.0, until - time.monotonic())
        limit = min(left, (float(args.get("timeout", 4)) if limit is None else limit) + 1)
        return remotes[host.name].ask(op, limit, **args)

    def probes(names: Iterable[str], suffix: str = "") -> None:
        asked = [
            (h, name, ask(h, "probe", limit=PROBES[name].limit, name=name))
            for name in names for h in seen.hosts
        ]  # fmt: skip
        for host, name, answer in asked:
            try:
                host.facts[name + suffix] = answer.result()
            except NotChecked as e:
                host.facts[name + suffix] = {"not_checked": str(e)}

    products = seen.hosts if "matmul" not in without else []
    for host in products:
        ask(host, "matmul_start")
    wanted = list(dict.fromkeys(n for c in CHECKS for n in c.needs if n in PROBES))
    probes(["identity", *(n for n in wanted if n != "identity")])
    first = time.monotonic()

    # Storage does not wait for the network, nor the network for storage.
    storage = threading.Thread(target=_quietly(shared.exchange), args=(seen, ask, until - 2))
    if seen.shared:
        progress(f"looking at {len(seen.hosts)} hosts' storage and network")
        storage.start()
    if len(seen.hosts) > 1:
        progress(f"looking at {len(seen.hosts) * (len(seen.hosts) - 1)} pairs of hosts")
        _quietly(exchange.measure)(
            seen, ask, one_at_a_time=one_at_a_time, deadline=until - 2
        )  # fmt: skip
    if seen.shared:
        storage.join(max(0.0, until - time.monotonic()))
    if products:
        progress("waiting for a small matrix product on every host")
    limit = max(0.5, until - 1 - time.monotonic())
    for host, answer in [(h, ask(h, "matmul", timeout=limit)) for h in products]:
        try:
            host.facts["matmul"] = {"value": answer.result()}
        except NotChecked as e:
            host.facts["matmul"] = {"not_checked": str(e)}
    time.sleep(max(0.0, first + TELLING - time.monotonic()))
    probes([n for n in wanted if PROBES[n].again], " again")
    for host in seen.hosts:
        host.lost = remotes[host.name].lost()


def _quietly(exchange: Callable) -> Callable:
    """An exchange with a mistake in it leaves its checks without facts, and the others alone."""

    def run(*args, **options) -> None:
        try:
            exchange(*args, **options)
        except Exception as e:
            args[0].broken.append(f"{exchange.__module__}: {type(e).__name__}: {e}")

    return run


def _begin(seen: Seen, remotes: dict[str, Remote]) -> None:
    nodes = len(seen.hosts) + len(seen.missing)
    asked = []
    for i, host in enumerate(seen.hosts):
        context = {
            "name": host.name, "addr": host.addr, "endpoint": list(seen.endpoint),
            "head": i == 0, "shared": seen.shared, "data": seen.data, "nproc": seen.nproc,
            "nodes": nodes,
        }  # fmt: skip
        asked.append((host, remotes[host.name].ask("begin", 8, context=context)))
    for host, answer in asked:
        try:
            answer.result()
        except NotChecked as e:
            host.missing = str(e)
    seen.missing += [h for h in seen.hosts if h.missing]
    seen.hosts[:] = [h for h in seen.hosts if not h.missing]
