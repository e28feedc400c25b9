"""One real step for 04.3, on emulated hosts, at a rate at which nothing was measured before.

alpha and beta come from a sweep at one rate; beta is carried over to the other in proportion to
the rate. Then the link is set to that rate, and a DDP step is measured.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from .... import cluster, runs
from ....measure import sweep
from ....measure.step import buckets

SCRIPT = Path(__file__).parents[4] / "notebooks" / "scripts" / "step_time.py"
SWEPT, RATES = 100, (40, 50, 60, 75, 140)  # mbit: measured with, and one that follows
LIMIT = 60.0  # seconds for each of the two runs


def live_case() -> dict:
    """{"where", "arguments" of predict, "seconds" measured}, or {"why"} it was not measured."""
    why = cluster.virtual_problem()
    if why:
        return {"why": why}
    rate = random.choice(RATES)
    try:
        with tempfile.TemporaryDirectory(prefix="scalelab-") as folder:
            return _measured(rate, Path(folder))
    except (cluster.ClusterError, cluster.UsageError, runs.RunError, OSError) as e:
        return {"why": str(e)}


def _measured(rate: int, folder: Path) -> dict:
    with cluster.start("virtual", nodes=2, rate=f"{SWEPT}mbit") as c:
        found = sweep.measure(c, sizes="4K,64K,1M,4M", timeout=LIMIT, run_dir=folder / "sweep")
        if found["alpha_us"] is None:
            raise runs.RunError(found["note"])
        ring = found["fits"]["ring"]
        for node in range(2):
            c.set_link(node, rate=f"{rate}mbit")
        run = runs.launch(
            SCRIPT, ["--width", 512, "--layers", 6, "--batch-size", 1024, "--micro-batches", 2,
                     "--steps", 4], cluster=c, timeout=LIMIT, run_dir=folder / "step",
        ).wait()  # fmt: skip
        if run.status != "succeeded":
            raise runs.RunError(run.words())
        line = run.metrics()[-1]
    # gloo's messages cost two latencies; a fit of so few sizes can come out below nothing
    alpha = max(ring["alpha_us"], 0.0) * ring["latencies_a_message"] / 1e6
    beta = ring["beta_gbs"] * 1e9 * rate / SWEPT
    arguments = (line["forward"], line["backward"], line["update"],
                 buckets(line["parameter_bytes"]), 2, alpha, beta, 2)  # fmt: skip
    where = (f"2 emulated hosts at {rate} mbit, alpha and beta measured at {SWEPT} mbit, "
             f"{sum(line['parameter_bytes']) / 1e6:.1f} MB of gradients, 2 micro-batches")
    return {"where": where, "arguments": arguments, "seconds": line["step_seconds"]}
