"""A run: one torchrun agent a host, followed until it ends."""

from __future__ import annotations

import json
import os
import selectors
import signal
import threading
import time
from math import inf
from pathlib import Path

from .. import __version__
from ..cluster import Cluster, ClusterError, Process
from . import failure, record
from .rank import MARK

KEEPER = Path(__file__).with_name("rank.py")
# After the first failure the others get this long to end by themselves: their own last words
# (a connection closed by its peer) are part of the lesson. Seconds.
GRACE_FAILED, GRACE_STOP = 5.0, 3.0
# A process that these end is gone before its keeper hears of it, and on a busy machine a peer can
# have noticed and said so by then. Nobody dies of them in answer to a peer's failure, so such a
# death counts as this much earlier. Seconds.
NO_LAST_WORDS, SUDDEN = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL), 1.0


class Run:
    """Made by `launch`; a thread of its own watches it. All methods may be called any time."""

    def __init__(self, cluster: Cluster, run_dir: Path, manifest: dict) -> None:
        self.cluster, self.dir, self.manifest = cluster, run_dir, manifest
        self.id: str = manifest["run"]
        self.status = "running"
        self.ranks: list[dict] = []
        self.first_failure: dict | None = None
        self.problems: list[str] = []  # what went wrong beside the training, one line each
        self.began = time.time()
        self.seconds = 0.0
        self.agents: dict[str, Process] = {}
        self.ending_at = inf  # from then on, ranks end because they are told to
        self.lost: dict[str, float] = {}  # nodes whose agent was ended by a signal, and when
        self._reader = record.MetricsReader(run_dir)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._done = threading.Event()

    @property
    def world_size(self) -> int:
        """As torch told the ranks; before any has started, as asked."""
        asked = self.manifest["world_size"]
        return max((r["world_size"] for r in self.ranks), default=asked)

    # What is asked of it while it runs

    def wait(self, timeout: float | None = None) -> Run:
        """Until the run has ended, or `timeout` seconds are over."""
        self._done.wait(timeout)
        return self

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def stop(self) -> Run:
        """End it now: SIGTERM first, then SIGKILL; returns when nothing of it is left."""
        self._stop.set()
        return self.wait(GRACE_STOP + 20)

    def kill_rank(self, rank: int, sig: int = signal.SIGKILL) -> None:
        """Send a signal (SIGKILL) to one rank's own process. Raises RunError if it is not there."""
        for entry in self.ranks:
            if entry["rank"] == rank and entry["exit"] is None:
                self._signal(entry["node"], entry["inner_pid"], sig, group=False)
                return
        raise record.RunError(f"rank {rank} is not running")

    def kill_host(self, index: int) -> None:
        """Pull the plug of one node."""
        node = self.cluster.node(index)
        if node.name in self.agents and not self.done:
            # Its peers may notice, and fail, sooner than this process hears that it is down.
            self.lost.setdefault(node.name, time.time())
        node.kill()

    def metrics(self) -> list[dict]:
        """What the ranks have measured so far: see record.py for the fields."""
        with self._lock:
            return self._reader.read()

    def log(self, rank: int) -> str:
        """What a rank has printed so far (its last MiB)."""
        return record.read_log(self.dir, f"rank{rank}")

    def logs(self) -> dict[int, str]:
        """Every rank's log, in rank order."""
        return {r["rank"]: self.log(r["rank"]) for r in self.ranks}

    def words(self) -> str:
        """Its state in one line."""
        lines = self.metrics()
        at = ""
        if lines:
            loss = lines[-1].get("loss")
            at = f", step {lines[-1]['step']}" + ("" if loss is None else f", loss {loss:.3f}")
        count = f"{len(self.ranks)} of {self.world_size} ranks"
        nodes = ", ".join(dict.fromkeys(r["node"] for r in self.ranks))
        if self.status == "running":
            if not self.ranks:
                return "running: the agents are looking for each other (rendezvous)"
            return f"running: {count} on {nodes}{at}"
        text = f"{self.status.replace('_', ' ')} after {self.seconds:.1f} s: {count}{at}"
        if self.first_failure and self.status == "failed":
            text += f"; first failure: {failure.who(self.first_failure)}"
        return text

    def record(self) -> dict:
        """What `scalelab run --json` prints: see DESIGN.md, command line."""
        seen = {r["node"]: {"name": r["hostname"], "addr": r["addr"]} for r in self.ranks}
        nodes = []
        for node in self.cluster.nodes:
            said = {"name": node.name, "addr": node.addr}
            # What the ranks themselves found is the proof; on local all share one host name.
            nodes.append(seen.get(node.name, said) if self.cluster.kind != "local" else said)
        keys = ("rank", "local_rank", "node", "pid", "exit")
        merged = self.dir / "metrics.jsonl"
        return {
            "run": self.id,
            "dir": str(self.dir),
            "cluster": self.cluster.kind,
            "status": self.status,
            "world_size": self.world_size,
            "nodes": nodes,
            "ranks": [{k: r[k] for k in keys} for r in self.ranks],
            "first_failure": self.first_failure,
            "seconds": round(self.seconds or time.time() - self.began, 3),
            "metrics": str(merged) if merged.exists() else None,
        }

    # The watcher

    def _start(self, commands: dict[str, list[str]], envs: dict[str, dict], timeout: float) -> None:
        self.deadline = self.began + timeout
        self.timeout = timeout
        watch = selectors.DefaultSelector()
        pipes = []
        try:
            for node in self.cluster.nodes:
                r, w = os.pipe()
                pipes.append(r)
                try:
                    self.agents[node.name] = node.spawn(
                        commands[node.name], out=w, err=w, env=envs[node.name]
                    )
                finally:
                    os.close(w)
                watch.register(r, selectors.EVENT_READ, _Lines(node.name, self.dir))
        except BaseException:
            for agent in self.agents.values():
                agent.signal(signal.SIGKILL, group=True)
            for r in pipes:
                os.close(r)
            raise
        thread = threading.Thread(target=self._watch, args=(watch,), name=self.id, daemon=True)
        thread.start()

    def _watch(self, watch: selectors.BaseSelector) -> None:
        try:
            self._follow(watch)
            self._finish()
        except Exception as e:  # a bug here must not leave a run that never ends
            self.seconds, self.status = time.time() - self.began, "failed"
            error = f"the watcher failed: {type(e).__name__}: {e}"
            self.first_failure = {"rank": None, "node": None, "error": error}
            self._end_processes(0)
            self.save()
        finally:
            for key in list(watch.get_map().values()):
                os.close(key.fd)
                key.data.close()
            watch.close()
            self._done.set()

    def _follow(self, watch: selectors.BaseSelector) -> None:
        """Read the agents until all have ended, or it is time to end them."""
        failed_at = None
        ending: str | None = None
        while True:
            self._read(watch, 0.1)
            for name, agent in self.agents.items():
                if agent.ended.is_set() and agent.returncode < 0:
                    self.lost.setdefault(name, agent.ended_at)
            over = all(a.ended.is_set() for a in self.agents.values())
            if over or ending:
                break
            now = time.time()
            if self._stop.is_set():
                ending = "stopped"
            elif now > self.deadline:
                ending = "timed_out"
            elif failed_at is None and self._has_failed():
                failed_at = now
            elif failed_at is not None and now > failed_at + GRACE_FAILED:
                ending = "failed"
        self.ending_at = time.time()
        if ending == "timed_out":
            self._ask_for_stacks(watch)
        if not over:
            self._end_processes(GRACE_STOP if ending == "stopped" else 1.0, watch)
        self._end_orphans(watch)
        self.ending = ending

    def _has_failed(self) -> bool:
        if any(a.returncode not in (None, 0) for a in self.agents.values()):
            return True
        # With restarts left, a rank's end is the agent's to handle.
        return self.manifest["max_restarts"] == 0 and any(r["exit"] for r in self.ranks)

    def _read(self, watch: selectors.BaseSelector, timeout: float) -> bool:
        if not watch.get_map():
            # Every pipe is at its end; the agents' exits are about to be told.
            running = [a for a in self.agents.values() if not a.ended.is_set()]
            if running:
                running[0].wait(timeout)
            return False
        ready = watch.select(timeout)
        for key, _ in ready:
            data = os.read(key.fd, 65536)
            for event in key.data.feed(data):
                self._heard(event)
            if not data:
                watch.unregister(key.fd)
                os.close(key.fd)
                key.data.close()
        return bool(ready)

    def _heard(self, event: dict) -> None:
        if event["event"] == "start":
            entry = {k: event[k] for k in ("rank", "local_rank", "node", "hostname", "addr")}
            entry["inner_pid"], entry["keeper"] = event["pid"], event["keeper"]
            entry["pid"] = self.cluster.outside_pid(event["pid"], event["pid_ns"])
            entry["exit"], entry["attempt"], entry["why"] = None, event["attempt"], None
            entry["world_size"] = event["world_size"]
            others = [r for r in self.ranks if r["rank"] != event["rank"]]
            self.ranks = sorted([*others, entry], key=lambda r: r["rank"])
        elif event["event"] == "exit":
            for entry in self.ranks:
                if entry["rank"] == event["rank"] and entry["attempt"] == event["attempt"]:
                    entry["exit"] = event["code"]
                    # A traceback is older than the exit it leads to, by the time that Python
                    # takes to shut down; a peer can notice and exit sooner.
                    at = event["error_time"] or event["time"]
                    entry["failed_at"] = at - SUDDEN if -event["code"] in NO_LAST_WORDS else at
                    entry["why"], entry["memory_mb"] = event["error"], event["memory_mb"]
            if event["log_problem"]:
                self.problems.append(f"rank {event['rank']}'s log: {event['log_problem']}")

    def _signal(self, node: str, pid: int, sig: int, group: bool) -> None:
        try:
            self.cluster.channel.ask(node, "signal", pid=pid, sig=int(sig), group=group).result(10)
        except ClusterError:
            pass  # that host is down

    def _ask_for_stacks(self, watch: selectors.BaseSelector) -> None:
        """SIGABRT makes Python's faulthandler print where each rank hangs, into its log."""
        self.hung = [r["rank"] for r in self.ranks if r["exit"] is None]
        for entry in self.ranks:
            if entry["exit"] is None:
                self._signal(entry["node"], entry["inner_pid"], signal.SIGABRT, group=False)
        until = time.time() + 2
        while time.time() < until and any(r["exit"] is None for r in self.ranks):
            self._read(watch, 0.1)

    def _end_processes(self, grace: float, watch: selectors.BaseSelector | None = None) -> None:
        for agent in self.agents.values():
            agent.signal(signal.SIGTERM)
        until = time.time() + grace
        while time.time() < until and not all(a.ended.is_set() for a in self.agents.values()):
            self._read(watch, 0.1) if watch else time.sleep(0.1)
        for entry in self.ranks:
            if entry["exit"] is None:
                self._signal(entry["node"], entry["keeper"], signal.SIGKILL, group=True)
        for agent in self.agents.values():
            agent.signal(signal.SIGKILL, group=True)
            agent.wait(10)

    def _end_orphans(self, watch: selectors.BaseSelector) -> None:
        """Read the pipes to their ends. An agent's pipe stays open while a keeper of its lives on,
        which happens when the agent was killed, perhaps before the keeper could say that it is
        there: end it, once it is known."""
        until = time.time() + 5
        while watch.get_map() and time.time() < until:
            self._read(watch, 0.05)
            for entry in self.ranks:
                if entry["exit"] is None:
                    self._signal(entry["node"], entry["keeper"], signal.SIGKILL, group=True)

    def _finish(self) -> None:
        self.seconds = time.time() - self.began
        codes = {name: a.returncode for name, a in self.agents.items()}
        for entry in self.ranks:
            if entry["exit"] is None:  # ended with its host or its keeper: by SIGKILL
                entry["exit"] = -int(signal.SIGKILL)
        self.first_failure = failure.first(self, codes)
        if self.ending in ("stopped", "timed_out"):
            self.status = self.ending
        else:
            self.status = "failed" if self.first_failure else "succeeded"
        if self.status == "stopped":
            self.first_failure = None
        try:
            record.merge_metrics(self.dir, self.metrics())
        except OSError as e:
            self.problems.append(f"metrics.jsonl: {e.strerror}")
        self.save()

    def cluster_node(self, name: str):
        """The node of this name."""
        return next(n for n in self.cluster.nodes if n.name == name)

    def save(self) -> None:
        """Write the manifest; a full disk is noted in `problems`, not raised."""
        hidden = ("inner_pid", "keeper")
        ranks = [{k: v for k, v in r.items() if k not in hidden} for r in self.ranks]
        self.manifest.update(
            status=self.status, ranks=ranks, first_failure=self.first_failure,
            problems=self.problems, ended=time.time() if self.status != "running" else None,
            seconds=round(self.seconds, 3),
        )  # fmt: skip
        try:
            record.write_json(self.dir / "manifest.json", self.manifest)
        except OSError as e:
            self.problems.append(f"manifest.json: {e.strerror}")


class _Lines:
    """An agent's output: reports are taken out, the rest goes to its log."""

    def __init__(self, node: str, run_dir: Path) -> None:
        self.rest = b""
        try:
            self.file = open(run_dir / "logs" / f"{node}.log", "ab", buffering=0)
        except OSError:
            self.file = None

    def feed(self, data: bytes) -> list[dict]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if not data and self.rest:
            lines, self.rest = [*lines, self.rest], b""
        events = []
        for line in lines:
            # The agent's own words may stand before a report on the same line.
            before, mark, report = line.partition(MARK.encode())
            if mark:
                try:
                    events.append(json.loads(report))
                    line = before
                except ValueError:
                    pass
            if self.file and line:
                try:
                    self.file.write(line + b"\n")
                except OSError:
                    pass  # disk full; the keeper's report says so
        return events

    def close(self) -> None:
        if self.file:
            self.file.close()
            self.file = None


def versions() -> dict[str, str]:
    """Python's, torch's and ScaleLab's, without importing torch."""
    import platform
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return {"python": platform.python_version(), "torch": torch, "scalelab": __version__}
