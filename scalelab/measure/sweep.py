"""A collective timed over a range of sizes by real ranks, in the terms of nccl-tests.

    with cluster.start(nodes=2, rate="1gbit") as c:
        found = sweep.measure(c, sizes="4K:16M")
        print(sweep.table(found))
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from .. import runs
from ..cluster import Cluster, UsageError
from ..cluster.probe import gpus, memory_gb
from ..cluster.units import parse_rate, parse_size
from ..runs import RunError
from ..runs.record import write_json
from .cost import bus_factor
from .recorded import describe_machine
from .result import OPS, ROW, add_fits, doubts, load, points_of, show_bytes, table

__all__ = ["DTYPES", "OPS", "Sweep", "check", "least_seconds", "link_of", "load", "measure",
           "parse_line_rate", "parse_sizes", "points_of", "show_bytes", "table"]  # fmt: skip

RANKS = Path(__file__).with_name("collective_ranks.py")
DTYPES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8,
          "uint8": 1, "int8": 1}  # fmt: skip
BACKENDS = ("auto", "gloo", "nccl")
MOST_SIZES = 64


class Sweep:
    """One sweep: started when it is made, followed by `rows` and `words`, ended by `wait` or
    `stop`. `result` has what was found."""

    def __init__(
        self,
        cluster: Cluster,
        op: str = "all-reduce",
        sizes: str | list[int] = "4K:64M",
        *,
        dtype: str = "float32",
        nproc_per_node: int = 1,
        backend: str = "auto",
        line_rate: str | None = None,
        timeout: float = 600,
        run_dir: str | Path | None = None,
    ) -> None:
        """sizes: "4K:64M" (doubling), "4K:64M:4" (by four), "4K,1M", or a list of bytes.
        line_rate: what each host's link can carry one way, such as "100gbit" or "450GB/s"; on
        emulated hosts it is known. timeout: seconds for the whole. Raises UsageError."""
        if not hasattr(cluster, "nodes"):
            raise UsageError(f"cluster {str(cluster)[:60]!r}: use what cluster.start() gives")
        sizes = parse_sizes(sizes)  # once: it may be a generator
        check(op, sizes, dtype, backend, line_rate)
        runs.check_count("nproc-per-node", nproc_per_node)
        runs.check_timeout(timeout)
        if backend == "nccl" and cluster.kind in ("local", "virtual") and gpus() == 0:
            raise UsageError("backend 'nccl': there is no NVIDIA GPU here: use gloo")
        self.op, self.dtype, self.cluster = op, dtype, cluster
        self.world_size = len(cluster.nodes) * nproc_per_node
        unit = DTYPES[dtype] * (self.world_size if op in ("all-gather", "reduce-scatter") else 1)
        # What the ranks will make of them: whole numbers, and the same for each rank.
        self.sizes = sorted({max(size // unit, 1) * unit for size in sizes})
        self.link = link_of(cluster)
        told = parse_line_rate(line_rate)
        self.line_rate = told or (self.link["rate"] or 0) / 8e9 or None  # GB/s
        self._check_memory()
        self._check_time(timeout)
        self.run = runs.launch(
            RANKS, ["--op", op, "--dtype", dtype, "--backend", backend, "--sizes", *self.sizes],
            cluster=cluster, nproc_per_node=nproc_per_node, timeout=timeout, run_dir=run_dir,
        )  # fmt: skip

    @property
    def rows(self) -> list[dict]:
        """What has been measured so far, by size: see `result`."""
        found = [{key: line[key] for key in ROW} for line in self._lines()]
        for row in found:
            row["theory_bytes"] = self._theory(row)
        return found

    def _lines(self) -> list[dict]:
        return [
            line for line in self.run.metrics()
            if line.get("op") == self.op and set(ROW) <= set(line)
        ]  # fmt: skip

    @property
    def done(self) -> bool:
        return self.run.done

    def wait(self, timeout: float | None = None) -> Sweep:
        """Until it has ended, or `timeout` seconds are over."""
        self.run.wait(timeout)
        return self

    def stop(self) -> Sweep:
        """End it now; `rows` keeps what there is."""
        self.run.stop()
        return self

    def words(self) -> str:
        """Its state in one line."""
        rows = self.rows
        if not rows:
            return self.run.words()
        last = rows[-1]
        return (
            f"{self.op} on {self.world_size} ranks: {len(rows)} of {len(self.sizes)} sizes, "
            f"{show_bytes(last['bytes'])} at {last['busbw']:.4g} GB/s"
        )

    def result(self, partial: bool = False) -> dict:
        """What was found, as `scalelab bench --json` prints it, and kept as sweep.json in the
        run's directory.

        rows: bytes, time_us (median), algbw and busbw (GB/s of 1e9), wrong (results that were not
        what they must be), spread (distance of the quartiles over the median), wire_bytes (sent by
        a host for one operation, headers included, as its interface counted), theory_bytes (what
        it has to send). alpha_us is one message's latency one way, beta_gbs what a link carries;
        each with one standard error. Raises RunError if the sweep did not succeed, unless
        `partial`.
        """
        rows, run = self.rows, self.run
        said = (self._lines() or [{"backend": None, "device": None, "world_size": None}])[0]
        if not partial:
            if run.status != "succeeded":
                raise RunError(run.words())
            if len(rows) != len(self.sizes) or said["world_size"] != self.world_size:
                raise RunError(
                    f"{len(rows)} of {len(self.sizes)} sizes came from {run.world_size} of "
                    f"{self.world_size} ranks: see {run.dir}"
                )
        record = run.record()
        result = {
            "op": self.op, "dtype": self.dtype, "backend": said["backend"],
            "device": said["device"],
            "cluster": self.cluster.kind, "world_size": self.world_size,
            "nodes": record["nodes"], "link": self.link, "machine": describe_machine(),
            "date": run.id[:4] + "-" + run.id[4:6] + "-" + run.id[6:8], "run": run.id,
            "dir": str(run.dir), "status": run.status, "rows": rows,
            "line_rate_gbs": self.line_rate, "efficiency": None,
            "alpha_us": None, "alpha_us_error": None, "beta_gbs": None, "beta_gbs_error": None,
            "fits": {}, "note": "",
        }  # fmt: skip
        best = max((row["busbw"] for row in rows), default=0.0)
        if self.line_rate and best:
            result["efficiency"] = best / self.line_rate
        add_fits(result)
        result["note"] = "\n".join(filter(None, [result["note"], *doubts(result)]))
        if not partial:
            try:
                write_json(run.dir / "sweep.json", result)
            except OSError as e:  # what was measured is worth more than its copy
                problem = f"sweep.json: {e.strerror}"
                run.problems += [problem] * (problem not in run.problems)
        return result

    def _theory(self, row: dict) -> float | None:
        """Bytes that a host has to send for one operation: a ring crosses each host once. Where
        all ranks share one host, all of them are on its loopback."""
        nodes, n = len(self.cluster.nodes), self.world_size
        if n == 1 or row.get("wire_bytes") is None:
            return None
        if self.op == "broadcast":  # on the average of the hosts, of which one sends nothing
            return row["bytes"] * (n - 1) / n if n == nodes else None
        each = row["bytes"] * bus_factor(self.op, n)
        return each * n if nodes == 1 or self.cluster.kind == "local" else each

    def _check_memory(self) -> None:
        buffers = 1 if self.op in ("all-reduce", "broadcast") else 2
        need = (buffers * max(self.sizes) * 1.1 + 0.3e9) * self.world_size / 1e9
        if gpus() == 0 and need > memory_gb():
            raise UsageError(
                f"size {show_bytes(max(self.sizes))}: {self.world_size} ranks would need "
                f"{need:.1f} GB of memory, {memory_gb():.1f} GB are free"
            )

    def _check_time(self, timeout: float) -> None:
        """A link of known rate says how long it takes at least."""
        if not self.link["rate"]:
            return
        least = least_seconds(self.op, self.sizes, self.world_size, self.link["rate"])
        if least > timeout:
            raise UsageError(
                f"sizes up to {show_bytes(max(self.sizes))} take {least:.0f} s at least on this "
                f"link, the time limit is {timeout:g} s: use smaller sizes or a higher limit"
            )


def check(op, sizes, dtype="float32", backend="auto", line_rate=None) -> None:
    """Raises UsageError for what a Sweep could not be made of."""
    for what, value, known in (
        ("operation", op, OPS), ("dtype", dtype, DTYPES), ("backend", backend, BACKENDS)
    ):  # fmt: skip
        if not isinstance(value, str) or value not in known:
            raise UsageError(f"{what} {value!r}: use one of {', '.join(known)}")
    parse_sizes(sizes)
    parse_line_rate(line_rate)


def measure(cluster: Cluster, op: str = "all-reduce", sizes: str | list[int] = "4K:64M",
            **options) -> dict:  # fmt: skip
    """The result of one Sweep, waited for; options are Sweep's. Stops it if interrupted."""
    sweep = Sweep(cluster, op, sizes, **options)
    try:
        sweep.wait()
    except BaseException:
        sweep.stop()
        raise
    return sweep.result()


def least_seconds(op: str, sizes: list[int], world_size: int, rate: float) -> float:
    """What a sweep takes at least on links of `rate` bits/s: each size is sent four times."""
    return sum(4 * 8 * size * bus_factor(op, world_size) / rate for size in sizes)


def parse_sizes(sizes: str | list[int] | tuple[int, ...]) -> list[int]:
    """Bytes, each once, growing. "4K:64M" doubles from the first to the last, "4K:64M:4" takes
    every fourth power; "4K,1M" is a list. Raises UsageError."""
    try:
        if isinstance(sizes, str) and ":" in sizes:
            low, high, *rest = sizes.split(":")
            if len(rest) > 1 or (rest and not re.fullmatch(r"[0-9]{1,4}", rest[0])):
                raise ValueError("use LOW:HIGH or LOW:HIGH:FACTOR, such as 4K:64M")
            factor = int(rest[0]) if rest else 2
            first, last = parse_size(low), parse_size(high)
            if first > last or factor < 2:
                raise ValueError("the first must not be above the last, the factor at least 2")
            count = int(math.log(last / first, factor) + 1e-9) + 1
            found = [first * factor**i for i in range(count)]
        else:
            if isinstance(sizes, (bytes, bytearray)):  # a list of its letters' codes, otherwise
                raise ValueError("use a string or a list")
            parts = sizes.split(",") if isinstance(sizes, str) else list(sizes)
            found = [parse_size(part) for part in parts]
    except (ValueError, TypeError) as e:
        raise UsageError(f"sizes {str(sizes)[:60]!r}: {e}") from None
    if not 1 <= len(found) <= MOST_SIZES:
        raise UsageError(f"sizes {str(sizes)[:60]!r}: 1 to {MOST_SIZES} sizes, not {len(found)}")
    return sorted(set(found))


def parse_line_rate(text: str | None) -> float | None:
    """GB/s from "100gbit" (bits) or "450GB/s" (bytes of 1e9); None for None."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9.]+)\s*GB/s", str(text).strip(), re.IGNORECASE)
    try:
        rate = float(found[1]) if found else (parse_rate(text) or 0) / 8e9
    except ValueError as e:
        raise UsageError(f"line rate: {e}, or with GB/s") from None
    if not 0 < rate < 1e6:
        raise UsageError(f"line rate {text!r}: use a rate such as 100gbit or 450GB/s")
    return rate


def link_of(cluster: Cluster) -> dict:
    """What every host's link is set to now: rate (bits/s or None), delay (s one way), mtu…; the
    slowest, where they differ."""
    if cluster.kind != "virtual":
        return {"rate": None, "delay": None, "jitter": None, "loss": None, "mtu": None}
    links = [vars(link) for link in cluster.links.values()]
    rates = [link["rate"] for link in links if link["rate"]]
    return {
        "rate": min(rates, default=None),
        **{key: max(link[key] for link in links) for key in ("delay", "jitter", "loss")},
        "mtu": min(link["mtu"] for link in links),
    }
