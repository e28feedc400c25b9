"""How much of its rate a shaped link carries, and how long its delay is.

    make bench            or: python -m pytest -s tests/bench/bench_links.py

A plain TCP stream between two emulated hosts, received bytes over receiving time; medians of
TRIES streams. Writes build/bench_links.json.
"""

import json
import os
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scalelab import cluster  # noqa: E402

TRIES, SECONDS = 5, 2.0
RESULTS = ROOT / "build" / "bench_links.json"

SERVE = """
import socket, sys, time
with socket.create_server(("", 5001)) as server:
    print("ready", flush=True)
    stream, _ = server.accept()
    total, begun = 0, None
    while data := stream.recv(1 << 18):
        now = time.monotonic()
        begun = begun or now
        total += len(data)
    print(total * 8e-6 / (now - begun))
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5001)) as stream:
    block, end = bytes(1 << 16), time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        stream.sendall(block)
"""
ECHO = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind(("", 5002))
    print("ready", flush=True)
    for _ in range(20):
        data, where = s.recvfrom(64)
        s.sendto(data, where)
"""
ASK = """
import socket, statistics, sys, time
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.settimeout(5)
    times = []
    for _ in range(20):
        began = time.monotonic()
        s.sendto(b"x", (sys.argv[1], 5002))
        s.recv(64)
        times.append((time.monotonic() - began) * 1e3)
print(statistics.median(times))
"""


def between(hosts, server: str, client: str, *args) -> list[float]:
    """Start `server` on node 1 and `client` on node 0; the figures that they print."""
    read, write = os.pipe()
    far = hosts.node(1).spawn([sys.executable, "-c", server], out=write, err=write)
    os.close(write)
    with os.fdopen(read) as said:
        assert said.readline() == "ready\n"
        words = " ".join(map(str, (hosts.node(1).addr, *args)))
        near = hosts.node(0).sh(f"{sys.executable} -c '{client}' {words}", timeout=30)
        assert near.returncode == 0, near.stderr
        figures = [float(word) for word in (near.stdout + said.read()).split()]
    assert far.wait(10) == 0
    return figures


def keep(name: str, values: list[float], unit: str) -> float:
    """Print a line, add it to RESULTS, return the median."""
    median = statistics.median(values)
    spread = f"{min(values):.1f} to {max(values):.1f}"
    print(f"{name:20} median {median:8.1f} {unit}   ({spread}, n = {len(values)})")
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    known[name] = {"values": values, "unit": unit}
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")
    return median


needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-"
)


@needs_virtual
@pytest.mark.parametrize("rate, mbit", [("100mbit", 100), ("1gbit", 1000)])
def test_a_stream_gets_90_to_100_percent_of_the_rate(rate, mbit):
    with cluster.start("virtual", nodes=2, rate=rate) as hosts:
        found = [between(hosts, SERVE, SEND, SECONDS)[0] for _ in range(TRIES)]
    assert 0.9 * mbit <= keep(rate, found, "Mbit/s") <= mbit


@needs_virtual
@pytest.mark.parametrize("ms", [5, 20, 50])
def test_a_round_trip_takes_twice_the_delay_within_10_percent(ms):
    with cluster.start("virtual", nodes=2, delay=f"{ms}ms") as hosts:
        found = [between(hosts, ECHO, ASK)[0] for _ in range(TRIES)]
    assert 2 * ms <= keep(f"{ms} ms one way", found, "ms") <= 2.2 * ms
