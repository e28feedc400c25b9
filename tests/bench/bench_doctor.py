"""How long the doctor takes: healthy hosts, and hosts of which none answers any other.

    make bench TEST_ARGS="-k doctor"        or: python -m pytest -s tests/bench/bench_doctor.py

Prints a table and writes build/bench_doctor.json. With the start and end of the hosts, as a person
waits for it.
"""

import json
import os
import platform
import statistics
import time

import pytest
from bench_runs import ROOT, quiet, summary

from scalelab import cluster, doctor
from scalelab.cluster.firewall import find_nft

RESULTS = ROOT / "build" / "bench_doctor.json"
HEALTHY_LIMIT, DEAF_LIMIT = 5.0, 20.0  # seconds, for 4 hosts
REPEATS = 7


def seconds(kind: str, nodes: int, deaf: bool = False, repeats: int = REPEATS) -> list[float]:
    """Of the whole command's work, once a repetition. `deaf`: every host drops everything."""
    took = []
    for _ in range(repeats):
        quiet()
        began = time.perf_counter()
        with cluster.start(kind, nodes) as hosts:
            for node in hosts.nodes if deaf else []:
                node.firewall([], policy="drop")
            found = doctor.examine(hosts)
        took.append(time.perf_counter() - began)
        assert deaf != found.ok, found.table()
    return took


def show(rows: dict[str, list[float]]) -> None:
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "rows": {name: summary(values) for name, values in rows.items()},
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1))
    for name, row in result["rows"].items():
        print(f"{name:<28} {row['median']:6.2f} s  ({row['min']:.2f} to {row['max']:.2f}, "
              f"n = {row['n']})")  # fmt: skip


@pytest.mark.skipif(bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-")
def test_doctor_is_quick():
    rows = {f"{n} hosts, healthy": seconds("virtual", n) for n in (1, 2, 4, 8)}
    rows["4 hosts, healthy, local"] = seconds("local", 4)
    if find_nft():
        rows["4 hosts, none answers"] = seconds("virtual", 4, deaf=True, repeats=3)
    show(rows)
    assert statistics.median(rows["4 hosts, healthy"]) <= HEALTHY_LIMIT
    assert max(rows.get("4 hosts, none answers", [0])) <= DEAF_LIMIT
