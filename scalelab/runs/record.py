"""The files of a run's directory.

manifest.json        command, versions, link settings, seed, times, how it ended, and of each rank
                     its exit and peak memory (memory_mb, of 1e6 bytes)
logs/rankN.log       what rank N printed (stdout and stderr, in order)
logs/nodeN.log       what node N's torchrun agent said
metrics/rankN.jsonl  one JSON object per optimizer step, written by the script:
    step     int, from 1
    rank     int
    loss     mean loss of this rank's batch, nats per token
    tokens   tokens this rank processed in this step
    time     unix seconds at the end of the step
    seconds  {"data", "forward", "backward", "communication", "update"}: seconds of each phase;
             communication is the exposed part only, null where it cannot be told apart
    Further keys are kept.
metrics.jsonl        all ranks together, by step and rank; written when the run ends
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from ..cluster import UsageError
from ..cluster.leftovers import is_alive

MIN_FREE = 32 << 20  # bytes
MANIFEST_KEYS = {"run", "attempt", "script", "args", "nproc_per_node", "node_env", "env",
                 "max_restarts", "status", "client"}  # fmt: skip


class RunError(RuntimeError):
    """A run cannot be followed or read; the message is one line."""


def home() -> Path:
    """Where ScaleLab keeps what outlives a command: $SCALELAB_HOME, or ~/.scalelab."""
    return Path(os.environ.get("SCALELAB_HOME") or Path.home() / ".scalelab")


def make_run_dir(path: Path) -> Path:
    """Create a run's directory. Raises UsageError if it cannot be written or its disk is full."""
    try:
        path = path.expanduser().absolute()
    except (RuntimeError, OSError) as e:  # ~nobody; the current directory was deleted
        raise UsageError(f"run directory {path}: {e}") from None
    try:
        for sub in ("logs", "metrics"):
            (path / sub).mkdir(parents=True, exist_ok=True)
        probe = path / ".probe"
        probe.write_bytes(b"0" * 4096)
        probe.unlink()
    except OSError as e:
        raise UsageError(f"run directory {path}: {e.strerror}") from None
    free = shutil.disk_usage(path).free
    if free < MIN_FREE:
        raise UsageError(
            f"run directory {path}: the disk is full "
            f"({free >> 20} MiB free, a run needs {MIN_FREE >> 20} MiB)"
        )
    return path


def write_json(path: Path, value: dict) -> None:
    """Replace `path` in one step, so that no reader sees half of it."""
    aside = path.with_name(path.name + ".new")
    try:
        aside.write_text(json.dumps(value, indent=1) + "\n")
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def read_manifest(run_dir: str | Path) -> dict:
    """A run's manifest; its status is "lost" where its launcher was killed before it could write
    how it ended. Raises RunError if the directory is not a run's."""
    problem = RunError(f"{run_dir}: not the directory of a run (no manifest.json of one)")
    try:
        manifest = json.loads((Path(run_dir) / "manifest.json").read_text())
    except (OSError, ValueError):
        raise problem from None
    if not isinstance(manifest, dict) or not MANIFEST_KEYS <= manifest.keys():
        raise problem
    if manifest["status"] == "running" and not is_alive(manifest["client"]):
        manifest["status"] = "lost"  # whoever launched it was killed, and the run with it
    return manifest


class MetricsReader:
    """Follows the metrics files while they grow."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir / "metrics"
        self.offsets: dict[str, int] = {}
        self.lines: list[dict] = []

    def read(self) -> list[dict]:
        """All lines so far, by step and rank. A half-written last line waits for its rest."""
        fresh = []
        for path in sorted(self.dir.glob("rank*.jsonl")):
            with open(path, "rb") as f:
                f.seek(self.offsets.get(path.name, 0))
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            self.offsets[path.name] = self.offsets.get(path.name, 0) + len(whole)
            for line in whole.splitlines():
                try:
                    value = json.loads(line)
                except ValueError:
                    continue  # a rank killed in mid-line, then resumed
                if well_formed(value):
                    fresh.append(value)
        if fresh:
            self.lines = sorted(
                [*self.lines, *fresh], key=lambda m: (m["step"], m.get("rank", 0))
            )
        return self.lines


def well_formed(line) -> bool:
    """Whether a line has what everything here relies on: whole step and rank, and a loss that is
    a number if there is one. A script of the learner's own may write anything."""
    return (
        isinstance(line, dict)
        and type(line.get("step")) is int
        and type(line.get("rank", 0)) is int
        and (line.get("loss") is None or type(line["loss"]) in (int, float))
    )


def read_metrics(run_dir: str | Path) -> list[dict]:
    """All metrics of a run, by step and rank."""
    return MetricsReader(Path(run_dir)).read()


def merge_metrics(run_dir: Path, lines: list[dict]) -> Path:
    """Write metrics.jsonl and return its path."""
    path = run_dir / "metrics.jsonl"
    aside = path.with_name("metrics.jsonl.new")
    aside.write_text("".join(json.dumps(m) + "\n" for m in lines))
    os.replace(aside, path)
    return path


def read_log(run_dir: Path, name: str, limit: int = 1 << 20) -> str:
    """The last `limit` bytes of a log, as text; "" if there is none yet."""
    try:
        with open(run_dir / "logs" / f"{name}.log", "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - limit))
            return f.read().decode(errors="replace")
    except OSError:
        return ""
