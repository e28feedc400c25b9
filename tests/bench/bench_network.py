"""Bandwidth that an all-reduce reaches, latency that a fit finds, and DDP steps predicted.

    make bench            or: python -m pytest -s tests/bench/bench_network.py

Each figure beside what it is held against, taken in the same run. Writes build/bench_network.json.
"""

import json
import os
import shutil
import statistics
import time
from pathlib import Path

import pytest
from bench_links import SECONDS, SEND, SERVE, between

from scalelab import cluster, runs
from scalelab.measure import step, sweep
from scalelab.measure.fit import fit

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "build" / "bench_network.json"
TRIES = 5

pytestmark = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-"
)


def keep(name, value):
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = value
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def stream(hosts) -> tuple[str, float]:
    """(by what, GB/s) that one stream carries from node 0 to node 1: iperf3's, where it is
    installed, else plain TCP's."""
    if not shutil.which("iperf3"):
        return "plain TCP", between(hosts, SERVE, SEND, SECONDS)[0] / 8e3
    with open(os.devnull, "w") as quiet:
        to = quiet.fileno()
        serving = hosts.node(1).spawn(["iperf3", "-s", "-1"], out=to, err=to)
    until = time.monotonic() + 5
    while True:  # the server may be a moment late
        said = hosts.node(0).sh(f"iperf3 -J -t {SECONDS:g} -c {hosts.node(1).addr}", timeout=30)
        if said.returncode == 0 or time.monotonic() > until:
            break
        time.sleep(0.1)
    assert serving.wait(10) == 0, said.stdout
    return "iperf3", json.loads(said.stdout)["end"]["sum_received"]["bits_per_second"] / 8e9


@pytest.mark.parametrize(("rate", "least"), [("1gbit", 0.93), ("100mbit", 0.95)])
@pytest.mark.parametrize("nodes", [2, 4])
def test_busbw_is_what_a_stream_carries(nodes, rate, least):
    found = []
    with cluster.start("virtual", nodes, rate=rate) as c:
        for _ in range(TRIES):
            by, carried = stream(c)
            row = sweep.measure(c, "all-reduce", "16M", timeout=200)["rows"][0]
            found.append((row["busbw"], carried, row["wire_bytes"] / row["theory_bytes"]))
    ratios = [busbw / carried for busbw, carried, _ in found]
    wire = [w for *_, w in found]
    middle = statistics.median(ratios)
    print(f"{nodes} hosts, {rate}: busbw / {by} {middle:.3f} ({min(ratios):.3f} to "
          f"{max(ratios):.3f}, n = {TRIES}); busbw {statistics.median(f[0] for f in found):.4f} "
          f"GB/s; wire / theory {min(wire):.4f} to {max(wire):.4f}")  # fmt: skip
    keep(f"busbw {nodes} {rate}", {"by": by, "busbw, stream, wire": found})
    assert middle >= least
    if rate == "1gbit":
        assert max(abs(w - 1) for w in wire) <= 0.02


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("rate", [None, "1gbit"])
def test_alpha_is_the_delay(nodes, rate):
    with cluster.start("virtual", nodes, rate=rate) as c:
        for delay in (5, 20):
            c.set_link(delay=f"{delay}ms")
            found = sweep.measure(c, "all-reduce", "4K:4M:4", timeout=200)
            off = found["alpha_us"] / delay / 1e3 - 1
            print(f"{nodes} hosts, {rate or 'unlimited'}, {delay} ms: alpha "
                  f"{found['alpha_us'] / 1e3:.2f} ± {found['alpha_us_error'] / 1e3:.2f} ms "
                  f"({off:+.1%})")  # fmt: skip
            keep(f"alpha {nodes} {rate} {delay} ms", found["alpha_us"] / 1e3)
            assert abs(off) <= 0.15


SCRIPT = ROOT / "notebooks" / "scripts" / "step_time.py"
RATES, LAYERS, MICRO = ("100mbit", "250mbit", "1gbit"), ("4", "16"), ("1", "4")


def steps(c, *args):
    run = runs.launch(SCRIPT, ["--steps", "8", "--layers", *LAYERS, *args], cluster=c, timeout=300)
    assert run.wait().status == "succeeded", run.words()
    return {(m["layers"], m["micro_batches"]): m for m in run.metrics()}


def test_step_time_is_predicted():
    """2 and 4 hosts, three rates, 4 and 17 MB of gradients, 1 and 4 micro-batches. Predicted before
    the run: the parts from a run that never uses the network, alpha and beta from a sweep."""
    print("\nhosts    rate  MB  micro  predicted s  measured s   error  exposed")
    errors = []
    for nodes in (2, 4):
        with cluster.start("virtual", nodes) as c:
            parts = {layers: line for (layers, _), line in steps(c, "--compute-only").items()}
            for rate in RATES:
                c.set_link(rate=rate)
                rows = sweep.measure(c, "all-reduce", "64K:16M:4", timeout=200)["rows"]
                line = fit(sweep.points_of(rows), nodes)
                predicted = {
                    (layers, int(micro)): step.predict(
                        m["forward"], m["backward"], m["update"],
                        step.buckets(m["parameter_bytes"]), line.seconds, int(micro),
                    )
                    for layers, m in parts.items() for micro in MICRO
                }  # fmt: skip
                for key, m in steps(c, "--micro-batches", *MICRO).items():
                    error = predicted[key].seconds / m["step_seconds"] - 1
                    errors.append(error)
                    print(f"{nodes:5} {rate:>7} {sum(m['parameter_bytes']) / 1e6:3.0f} {key[1]:6} "
                          f"{predicted[key].seconds:12.4f} {m['step_seconds']:11.4f} {error:+7.1%} "
                          f"{predicted[key].share:8.0%}")  # fmt: skip
    off = sorted(abs(e) for e in errors)
    print(f"median error {statistics.median(off):.1%}, worst {off[-1]:.1%}, n = {len(off)}")
    keep("step errors", errors)
    assert len(off) >= 12
    assert statistics.median(off) <= 0.10 and off[-1] <= 0.25
