"""A cluster and a run that follow the real ones' interface and start no process."""

import math
import threading
import time
from types import SimpleNamespace


def until(true, timeout=10.0):
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


class UsageError(ValueError):
    pass


class ClusterError(RuntimeError):
    pass


class Cluster:
    def __init__(self, kind, nodes, log, why="", **link):
        self.kind, self.why, self.link, self.closed, self._log = kind, why, link, False, log
        self.nodes = [
            SimpleNamespace(
                index=i,
                name=f"node{i}",
                addr=f"10.77.0.{i + 1}" if kind == "virtual" else "127.0.0.1",
            )
            for i in range(nodes)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.closed = True
        self._log.append("closed")


class Clusters:
    """Stands in for the module `scalelab.cluster`."""

    UsageError, ClusterError = UsageError, ClusterError

    def __init__(self, problem="", slow=0.0):
        self.problem, self.slow, self.log, self.started = problem, slow, [], []

    def virtual_problem(self):
        return self.problem

    def start(self, kind="auto", nodes=2, *, rate=None, delay=None, **_):
        if rate == "fast":
            raise UsageError("rate: 'fast' is not a rate; write it like 1gbit or 100mbit")
        if delay == "5":
            raise UsageError("delay: '5' has no unit; write it like 5ms")
        if nodes < 1:
            raise UsageError(f"nodes: {nodes} is not accepted, 1 or more is")
        time.sleep(self.slow)
        chosen = "local" if self.problem or kind == "local" else "virtual"
        made = Cluster(chosen, nodes, self.log, self.problem, rate=rate, delay=delay)
        self.started.append(made)
        self.log.append("started")
        return made


class Run:
    """Losses appear by the clock. `breaks` is a step at which the last rank raises."""

    def __init__(self, steps, cluster, nproc, rate, breaks=None, lost=0):
        self.id, self.status, self.first_failure = "fake", "running", None
        self._steps, self._rate, self._breaks = steps, rate, breaks
        self._began, self._over = time.time(), threading.Event()
        self._end = None
        self.ranks = [
            {
                "rank": r,
                "local_rank": r % nproc,
                "node": cluster.nodes[r // nproc].name,
                "hostname": cluster.nodes[r // nproc].name,
                "addr": cluster.nodes[r // nproc].addr,
                "pid": 1000 + r,
                "exit": None,
            }
            for r in range(len(cluster.nodes) * nproc - lost)
        ]
        threading.Thread(target=self._go, daemon=True).start()

    def _go(self):
        last = self._breaks or self._steps
        if not self._over.wait(last / self._rate):
            if self._breaks:
                worst = self.ranks[-1]
                self.first_failure = {
                    "rank": worst["rank"],
                    "node": worst["node"],
                    "error": "Traceback (most recent call last):\n ...\nValueError: on purpose",
                }
                self._finish("failed", 1, last)
            else:
                self._finish("succeeded", 0, last)

    def _finish(self, status, code, step):
        self._end = step
        for rank in self.ranks:
            rank["exit"] = code
        self.status = status
        self._over.set()

    def step(self):
        if self._end is not None:
            return self._end
        return min(int((time.time() - self._began) * self._rate), self._steps)

    def wait(self, timeout=None):
        self._over.wait(timeout)
        return self

    def stop(self):
        self._finish("stopped", -2, self.step())

    def metrics(self):
        return [
            {
                "step": s,
                "rank": r["rank"],
                "loss": 4.6 * math.exp(-s / 80) + 0.05 * math.sin(s * (1 + r["rank"])),
                "tokens": 512,
                "time": self._began + s / self._rate,
                "seconds": {},
            }
            for s in range(1, self.step() + 1)
            for r in self.ranks
        ]

    def log(self, rank):
        return "".join(f"step {s} on rank {rank}\n" for s in range(1, self.step() + 1))

    def words(self):
        return f"{self.status}: {len(self.ranks)} ranks, step {self.step()}"


class Runs:
    """Stands in for the module `scalelab.runs`."""

    RunError = ClusterError

    def __init__(self, rate=200.0, breaks=None, lost=0):
        self.rate, self.breaks, self.lost, self.launched = rate, breaks, lost, []

    def who(self, failure):
        return f"rank {failure['rank']} on {failure['node']}"

    def launch(self, script, args=(), *, cluster, nproc_per_node=1, **_):
        steps = int(args[args.index("--steps") + 1])
        run = Run(steps, cluster, nproc_per_node, self.rate, self.breaks, self.lost)
        self.launched.append((script, list(args), run))
        return run
