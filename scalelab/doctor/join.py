"""The doctor over machines that are there already: one runs it as the head, the others join it.

Every machine runs the same command with the same HOST:PORT. The one that HOST belongs to is the
head. All look at themselves first, which takes no network, so that there is a report even where
nobody meets.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable

from ..cluster import UsageError
from .agent import Agent
from .examine import AGENT, conclude, look
from .registry import Host, Seen, fail, skip
from .remote import Remote
from .report import Report

HELLO = "scalelab doctor 1"  # both ends say it first: whatever else listens there does not
HERE = {"here": True}  # the guest's answer to the head's hello: it is still waiting
ALONE = "nobody to check it with"
MOST_NODES = 1024
PATIENCE = 40.0  # seconds that a joined host waits for the examination, once all are there


def join(
    endpoint: tuple[str, int],
    nodes: int,
    *,
    timeout: float = 60,
    head: bool | None = None,
    name: str | None = None,
    shared: list[str] = (),
    data: list[str] = (),
    nproc: int = 1,
    line_rate: float | None = None,
    progress: Callable[[str], None] = lambda words: None,
) -> Report | dict:
    """Examine this machine and the `nodes` - 1 others that run this, meeting at `endpoint`.

    timeout: seconds to wait for the others, once this machine has looked at itself. head: whether
    this machine is the head (default: it is if HOST is an address of its own). Returns the Report;
    on a machine that joined, what the head sent of it: {"json": …, "table": …}. Never raises for a
    machine that does not come. Raises UsageError for an IPv6 address, or `nodes` beyond 1024.
    """
    if ":" in endpoint[0]:  # else each machine would wait for a head that cannot listen
        raise UsageError(f"--join {endpoint[0][:60]}: use a name or an IPv4 address")
    if not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"nodes {nodes}: use a whole number from 1 to {MOST_NODES}")
    name = name or socket.gethostname()
    told = {"shared": shared, "data": data, "nproc": nproc, "line_rate": line_rate}
    began = time.monotonic()
    alone = _Alone(name, endpoint, told, progress)
    deadline = time.monotonic() + timeout
    listener, why = _listen(endpoint) if head in (None, True) else (None, "")
    try:
        if listener is None and head:
            return alone.report(began, why)
        if listener is None:
            return _as_guest(endpoint, name, deadline, timeout, alone, began, progress)
        return _as_head(listener, endpoint, nodes, name, deadline, timeout, told, began, progress)
    finally:
        if listener:
            listener.close()


def _listen(endpoint: tuple[str, int]) -> tuple[socket.socket | None, str]:
    """A listening socket if the endpoint's host is this machine and nothing listens there yet;
    else None and why."""
    try:
        addr = socket.getaddrinfo(*endpoint, socket.AF_INET, socket.SOCK_STREAM)[0][4]
    except OSError as e:
        return None, f"{endpoint[0]} has no address here: {e.strerror or e}"
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(addr)
        listener.listen(128)
        return listener, ""
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRNOTAVAIL:
            return None, f"{addr[0]} is no address of this machine"
        return None, f"{addr[0]} port {addr[1]} cannot be listened on: {e.strerror}"


def _own_agent(name: str) -> Remote:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True, cwd=os.getcwd(),
    )  # fmt: skip

    def end() -> None:
        try:
            process.wait(1)
        except subprocess.TimeoutExpired:
            process.kill()

    return Remote(name, process.stdout, process.stdin, end)


class _Alone:
    """What this machine can say without any other."""

    def __init__(self, name: str, endpoint: tuple[str, int], told: dict, progress) -> None:
        self.seen = _seen([Host(name, None)], endpoint, told)
        progress("looking at this machine")
        remote = _own_agent(name)
        try:
            look(self.seen, {name: remote}, one_at_a_time=True, progress=lambda words: None)
        finally:
            remote.end()

    def report(self, began: float, why: str) -> Report:
        """The report of a machine that met nobody, for the reason `why`."""
        report = conclude(self.seen, (), time.monotonic() - began, "joined")
        host = (self.seen.hosts or self.seen.missing)[0]
        met = fail(
            host,
            f"met no other machine: {why}",
            "see that the head runs this command, "
            "that HOST is its own name or address, and that its firewall lets PORT in",
        )
        rest = skip(None, f"pairs, storage, environment of the others: {ALONE}")
        met.name, rest.name = "join", "join"
        report.findings.insert(0, met)
        report.findings.append(rest)
        return report


def _seen(hosts: list[Host], endpoint: tuple[str, int], told: dict) -> Seen:
    return Seen(
        hosts, endpoint=endpoint, line_rate=told["line_rate"], nproc=told["nproc"],
        shared=[os.path.abspath(p) for p in told["shared"]],
        data=[os.path.abspath(p) for p in told["data"]],
    )  # fmt: skip


def _as_head(listener, endpoint, nodes, name, deadline, timeout, told, began, progress) -> Report:
    own = Host(name, listener.getsockname()[0])
    hosts, remotes, sockets = [own], {}, {}
    try:
        while time.monotonic() < deadline:
            for host in [h for h in hosts[1:] if remotes[h.name].gone]:  # somebody stopped it
                hosts.remove(host)
                remotes.pop(host.name).end()
                sockets.pop(host.name).close()
            if len(hosts) >= nodes:
                break
            progress(
                f"{len(hosts)} of {nodes} machines are here ({', '.join(h.name for h in hosts)})"
            )
            listener.settimeout(min(1.0, max(0.05, deadline - time.monotonic())))
            try:
                guest, (addr, _) = listener.accept()
            except OSError:
                continue
            said = _greet(guest)
            if said is None:
                guest.close()  # no doctor
                continue
            host = Host(_unused(said, hosts), addr)
            sockets[host.name] = guest
            hosts.append(host)
            remotes[host.name] = Remote(host.name, guest.makefile("rb"), guest.makefile("wb"))
        listener.close()  # so that the rendezvous port is as free as it was
        remotes[name] = _own_agent(name)
        seen = _seen(hosts, endpoint, told)
        look(seen, remotes, one_at_a_time=not _spread(hosts), progress=progress)
        for i in range(nodes - len(hosts)):
            seen.missing.append(
                Host(f"machine {len(hosts) + i + 1} of {nodes}", None,
                     missing=f"did not join within {timeout:g} s")
            )  # fmt: skip
        report = conclude(seen, (), time.monotonic() - began, "joined")
        for remote in remotes.values():
            remote.end(json=report.json(), table=report.table())
        until = time.monotonic() + 2
        for guest in sockets.values():
            _wait_for_end(guest, until)
        return report
    finally:
        for remote in remotes.values():
            remote.end()
        for guest in sockets.values():
            guest.close()


def _spread(hosts: list[Host]) -> bool:
    return len({h.addr for h in hosts}) == len(hosts)


def _greet(guest: socket.socket) -> str | None:
    """The name that a joining doctor gives, or None if it is none, or has given up waiting: one
    that got no answer in time calls again, and must not be taken for two."""
    guest.settimeout(5)
    try:
        said = json.loads(_line(guest))
        guest.sendall(json.dumps({"hello": HELLO}).encode() + b"\n")
        if said["hello"] != HELLO or json.loads(_line(guest)) != HERE:
            return None
        guest.settimeout(None)
        # One that has stopped reading must not hold up the report to all others.
        guest.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 5, 0))
        return str(said["name"])[:100]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _line(sock: socket.socket) -> bytes:
    """One short line, and not a byte more of what follows."""
    got = b""
    while not got.endswith(b"\n") and len(got) < 1000:
        byte = sock.recv(1)
        if not byte:
            raise OSError("closed")
        got += byte
    return got


def _unused(name: str, hosts: list[Host]) -> str:
    taken = {h.name for h in hosts}
    return name if name not in taken else next(
        f"{name}#{i}" for i in range(2, len(taken) + 2) if f"{name}#{i}" not in taken
    )  # fmt: skip


def _wait_for_end(guest: socket.socket, until: float) -> None:
    """The guest closes first: else the head's port would be held by what is left of this."""
    guest.settimeout(max(0.01, until - time.monotonic()))
    try:
        while guest.recv(4096):
            pass
    except OSError:
        pass


def _as_guest(endpoint, name, deadline, timeout, alone, began, progress) -> Report | dict:
    where = f"{endpoint[0]}:{endpoint[1]}"
    head, why = None, "no time was left"
    while head is None:
        progress(f"waiting for {where}")
        try:
            head = socket.create_connection(endpoint, timeout=3)
            head.sendall(json.dumps({"hello": HELLO, "name": name}).encode() + b"\n")
            head.settimeout(5)
            if json.loads(_line(head))["hello"] != HELLO:
                raise ValueError
            head.sendall(json.dumps(HERE).encode() + b"\n")
        except (ValueError, KeyError, TypeError):
            head.close()
            return alone.report(began, f"what answers at {where} is not this doctor")
        except socket.gaierror as e:
            return alone.report(began, f"{endpoint[0]} has no address here: {e.strerror}")
        except OSError as e:
            head = head and head.close()
            why = _why(e)
            if time.monotonic() > deadline:
                return alone.report(began, f"{where} could not be reached in {timeout:g} s ({why})")
            time.sleep(0.5)
    progress("joined; waiting for the others")
    head.settimeout(max(0.0, deadline - time.monotonic()) + PATIENCE)
    with head:
        lines, out = head.makefile("rb"), head.makefile("wb")
        agent = Agent(lines, out)
        said = agent.serve()
    if not said or "json" not in said:
        return alone.report(began, f"the doctor at {where} went away before it was done")
    return said


def _why(error: OSError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "refused: nothing listens there, or a firewall rejects it"
    if isinstance(error, TimeoutError):
        return "no answer: the machine is down, or a firewall drops it"
    return error.strerror or str(error)


def slurm_task(environ) -> dict | None:
    """What a task under srun needs to know: {"head": name, "nodes", "is_head", "name", "first"}
    (`first`: it is its node's first task). None outside srun."""
    try:
        names = expand(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
        nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ["SLURM_NNODES"])
        node, local = int(environ["SLURM_NODEID"]), int(environ["SLURM_LOCALID"])
    except (KeyError, ValueError):
        return None
    return {"head": names[0], "nodes": nodes, "is_head": node == 0,
            "name": environ.get("SLURMD_NODENAME", socket.gethostname()),
            "first": local == 0}  # fmt: skip


def expand(nodelist: str) -> list[str]:
    """Slurm's "gpu[01-03,7],login" to ["gpu01", "gpu02", "gpu03", "gpu7", "login"]. Raises
    ValueError."""
    names = []
    for part in re.findall(r"[^,\[\]]+(?:\[[^\]]*\][^,\[\]]*)*", nodelist):
        found = [""]
        for text, ranges in re.findall(r"([^\[\]]*)(?:\[([^\]]*)\])?", part):
            found = [f + text for f in found]
            if ranges:
                found = [f + n for f in found for r in ranges.split(",") for n in _numbers(r)]
        names += found
    if not names:
        raise ValueError(f"{nodelist!r} names no host")
    return names


def _numbers(text: str) -> list[str]:
    low, _, high = text.partition("-")
    high = high or low
    return [str(i).zfill(len(low)) for i in range(int(low), int(high) + 1)]
