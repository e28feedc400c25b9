"""How long hosts take to come and go, and what `scalelab run` adds to torchrun.

    make bench            or: python -m pytest -s tests/bench/bench_runs.py
    python tests/bench/bench_runs.py        the same, and figures only: nothing is judged

Prints a table and writes build/bench_runs.json. Medians over repetitions, with the spread; the
two ways of running alternate, so that a machine that is slow for a while is slow for both.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scalelab import cluster  # noqa: E402

HOSTS, REPEATS, PAIRS = 8, 20, 9
UP_LIMIT = DOWN_LIMIT = 0.5  # seconds
RATIO_LIMIT, CONSTANT_LIMIT = 1.05, 0.3
RESULTS = ROOT / "build" / "bench_runs.json"
# One that does nothing shows every tenth of a second that is added; one that trains shows whether
# training itself is slowed down.
SCRIPTS = {
    "nothing": ["nothing.py"],
    "training": [str(ROOT / "notebooks" / "scripts" / "train_ddp.py"), "--steps", "60"],
}


def quiet(patience: float = 10) -> None:
    """Wait until this machine has little else to do, but not for ever."""
    until = time.monotonic() + patience
    while psutil.cpu_percent(0.5) > 20 and time.monotonic() < until:
        pass


def summary(values: list[float]) -> dict:
    quartiles = statistics.quantiles(values, n=4)
    return {
        "median": round(statistics.median(values), 4), "q1": round(quartiles[0], 4),
        "q3": round(quartiles[2], 4), "min": round(min(values), 4), "max": round(max(values), 4),
        "n": len(values),
    }  # fmt: skip


def up_and_down(hosts: int = HOSTS, repeats: int = REPEATS) -> dict:
    up, down = [], []
    for _ in range(repeats):
        quiet(2)
        began = time.perf_counter()
        c = cluster.start("virtual", nodes=hosts)
        ready = time.perf_counter()
        c.close()
        up.append(ready - began)
        down.append(time.perf_counter() - ready)
    return {"hosts": hosts, "up": summary(up), "down": summary(down)}


def by_hand(hosts: cluster.Cluster, script: list[str], folder: Path) -> float:
    """Seconds that torchrun takes when started by hand on every host."""
    head = hosts.node(0)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(hosts.nodes)}",
        "--nproc-per-node=1", "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head.name}:{head.free_port()}", f"--rdzv-id={time.time_ns()}", *script,
    ]  # fmt: skip
    quiet()
    with open(folder / "by_hand.log", "w") as out:
        began = time.perf_counter()
        agents = [
            node.spawn(command, out=out.fileno(), err=out.fileno(), cwd=str(folder),
                       env={"OMP_NUM_THREADS": "1"})
            for node in hosts.nodes
        ]  # fmt: skip
        codes = [agent.wait(120) for agent in agents]
        seconds = time.perf_counter() - began
    if codes != [0] * len(agents):
        raise RuntimeError(f"torchrun by hand: {codes}\n{(folder / 'by_hand.log').read_text()}")
    return seconds


def by_scalelab(script: list[str], folder: Path) -> float:
    """Seconds that the whole command takes: Python, cluster, run, record, all ended."""
    command = [sys.executable, "-m", "scalelab", "run", "--cluster", "virtual", "--json", *script]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "SCALELAB_HOME": str(folder), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    quiet()
    began = time.perf_counter()
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
    seconds = time.perf_counter() - began
    if done.returncode != 0:
        raise RuntimeError(f"scalelab run: {done.returncode}\n{done.stderr}")
    return seconds


def pairs(name: str, count: int = PAIRS) -> dict:
    hand, ours = [], []
    with tempfile.TemporaryDirectory(prefix="scalelab-bench-") as folder:
        folder = Path(folder)
        (folder / "nothing.py").write_text("")
        with cluster.start("virtual", nodes=2) as hosts:
            by_hand(hosts, SCRIPTS[name], folder)  # once, for the file cache
            for i in range(count):
                if i % 2:
                    ours.append(by_scalelab(SCRIPTS[name], folder))
                    hand.append(by_hand(hosts, SCRIPTS[name], folder))
                else:
                    hand.append(by_hand(hosts, SCRIPTS[name], folder))
                    ours.append(by_scalelab(SCRIPTS[name], folder))
    over = [o - RATIO_LIMIT * h for h, o in zip(hand, ours)]
    return {
        "script": name, "by_hand": summary(hand), "scalelab_run": summary(ours),
        "ratio": summary([o / h for h, o in zip(hand, ours)]),
        "difference": summary([o - h for h, o in zip(hand, ours)]),
        "above_1.05x": summary(over),
    }  # fmt: skip


def keep(name: str, value: dict) -> None:
    """Into the results file, with what it was measured on."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept[name] = {
        **value, "cores": os.cpu_count(), "load_before": [round(x, 2) for x in os.getloadavg()],
        "kernel": platform.release(), "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(kept, indent=1) + "\n")


def show(title: str, rows: dict[str, dict]) -> None:
    print(f"\n{title}")
    columns = ("median", "q1", "q3", "min", "max", "n")
    print(f"  {'':24}" + "".join(f"{c:>9}" for c in columns))
    for name, row in rows.items():
        values = (f"{row[c]:9.3f}" if c != "n" else f"{row[c]:9}" for c in columns)
        print(f"  {name:24}" + "".join(values))


def hosts_bench() -> dict:
    got = up_and_down()
    keep("hosts", got)
    show(f"{HOSTS} hosts, seconds", {"up": got["up"], "down": got["down"]})
    return got


def run_bench(name: str) -> dict:
    got = pairs(name)
    keep(f"run {name}", got)
    rows = ("by_hand", "scalelab_run", "ratio", "difference", "above_1.05x")
    show(f"two hosts, a script of {name}, seconds", {r: got[r] for r in rows})
    return got


needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-"
)


@needs_virtual
def test_hosts_up_and_down():
    got = hosts_bench()
    assert got["up"]["median"] <= UP_LIMIT
    assert got["down"]["median"] <= DOWN_LIMIT


@needs_virtual
@pytest.mark.parametrize("name", SCRIPTS)
def test_run_against_torchrun_by_hand(name):
    got = run_bench(name)
    assert got["above_1.05x"]["median"] <= CONSTANT_LIMIT


if __name__ == "__main__":
    hosts_bench()
    for each in SCRIPTS:
        run_bench(each)
