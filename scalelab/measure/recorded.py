"""Results that only some clusters can produce: measured there, recalled and labelled elsewhere.

A lesson's cell that needs shaped links or separate hosts wraps its measurement:

    result = recall("all_reduce_1gbit", lambda: sweep(c), cluster=c)
    draw(result.value)

On a cluster that can, the measurement runs. With SCALELAB_RECORD=1, which the notebook builder
sets, its value is also kept in recorded/all_reduce_1gbit.json beside the notebook. On one that
cannot, the kept value comes back and one printed line says that it is recorded, when and on what,
and why it was not run here.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("local", "virtual", "slurm")


class RecordError(RuntimeError):
    """There is no usable record; the message is one line."""


@dataclass(frozen=True)
class Result:
    value: Any
    recorded: bool  # False: measured on this machine, just now
    date: str  # ISO day of the measurement
    machine: str  # e.g. "2 cores, x86_64, Linux 6.18, Python 3.11, torch 2.13.0"


def recall(
    key: str,
    measure: Callable[[], Any],
    *,
    cluster,
    needs: str | tuple[str, ...] = "virtual",
    folder: str | Path = "recorded",
) -> Result:
    """measure() where `cluster.kind` is one of `needs`; else the record of `key`, printed as such.

    measure returns something JSON can hold. An error that it raises is the caller's: a record never
    stands in for a measurement that failed. Raises RecordError where there is no usable record,
    ValueError on a bad key or kind.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]+", key):
        raise ValueError(f"key {key!r}: letters, digits, - and _ only, since it names a file")
    accepted = (needs,) if isinstance(needs, str) else tuple(needs)
    if not accepted or not set(accepted) <= set(KINDS):
        raise ValueError(f"needs={needs!r}: one or more of {', '.join(KINDS)}")
    path = Path(folder) / f"{key}.json"
    if cluster.kind in accepted:
        result = Result(measure(), False, datetime.date.today().isoformat(), describe_machine())
        if os.environ.get("SCALELAB_RECORD") == "1":
            _save(path, result)
        return result
    why = cluster.why.strip().rstrip(".") or f"the cluster is {cluster.kind}"
    result = _load(path, why)
    print(f"Recorded on {result.date} on {result.machine}; not run here because {why}.")
    return result


def describe_machine() -> str:
    """What matters to a figure; neither the host's name nor the processor's model."""
    try:  # asked of the package's metadata: importing torch takes a second
        torch = importlib.metadata.version("torch").split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        torch = "not installed"
    cores = os.cpu_count() or 1
    system = f"{platform.system()} {'.'.join(platform.release().split('.')[:2])}"
    python = ".".join(platform.python_version_tuple()[:2])
    return f"{cores} cores, {platform.machine()}, {system}, Python {python}, torch {torch}"


def _save(path: Path, result: Result) -> None:
    """Atomic: a reader sees the old record or the new one."""
    record = {"date": result.date, "machine": result.machine, "value": result.value}
    # allow_nan would write what is not JSON; a NaN is a failed measurement, so say so now
    text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _load(path: Path, why: str) -> Result:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Result(record["value"], True, str(record["date"]), str(record["machine"]))
    except FileNotFoundError:
        missing = f"{path.name}: not recorded yet, and not run here because {why}"
        raise RecordError(missing) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        kind = type(error).__name__
        raise RecordError(f"{path.name}: the record is damaged ({kind}: {error})") from None
