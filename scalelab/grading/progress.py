"""What a learner has done: one line for each event in $SCALELAB_HOME/progress.jsonl.

Lines are only ever appended, each in one write under a lock, so two notebooks open at once lose
nothing. Events: {"event": "check"|"prediction"|"question"|"hint", "id", "time", …}.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from ..runs import home

FILE = "progress.jsonl"


def note(event: str, key: str, **details) -> None:
    """Append one event. A home that cannot be written costs the record, never the lesson."""
    path = home() / FILE
    line = json.dumps({"event": event, "id": key, "time": round(time.time(), 3), **details})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab", buffering=0) as f:
            _lock(f)
            # A line cut short by a full disk or a kill must not swallow the next one.
            whole = f.tell() == 0 or _ends_line(path)
            f.write((b"" if whole else b"\n") + line.encode() + b"\n")
    except OSError:
        pass


def _lock(f) -> None:
    try:
        import fcntl

        fcntl.flock(f, fcntl.LOCK_EX)  # given back when the file is closed
    except (ImportError, OSError):
        pass  # a shared disk without locks: one write of one line is still whole


def _ends_line(path: Path) -> bool:
    with open(path, "rb") as f:
        f.seek(-1, os.SEEK_END)
        return f.read(1) == b"\n"


def events() -> list[dict]:
    """All events so far, oldest first. Damaged lines are passed over."""
    try:
        text = (home() / FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and {"event", "id"} <= value.keys():
            found.append(value)
    return found


def passed() -> set[str]:
    """Ids of the exercises that have passed at least once."""
    return {e["id"] for e in events() if e["event"] == "check" and e.get("passed")}


def hints_taken(exercise: str) -> int:
    """How many hints this learner has asked for."""
    return sum(e["event"] == "hint" and e["id"] == exercise for e in events())


def predictions() -> dict[str, object]:
    """The latest prediction of each key."""
    return {e["id"]: e.get("value") for e in events() if e["event"] == "prediction"}
