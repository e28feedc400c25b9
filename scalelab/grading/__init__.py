"""Checks for labs, hints, predictions, self-check questions, and progress.

    from scalelab import grading
    grading.check("02.2", ring_all_reduce)     # real ranks, a verdict in words, never an exception
    grading.hint("02.2")                       # the next hint

An answer is tried in processes of its own, with a time limit: whatever it does (hang, exit, kill
its rank), the notebook goes on, and nothing of it is left running.
"""

from __future__ import annotations

import json
import os
import pickle
import selectors
import signal
import sys
import tempfile
import time
from typing import Any

from .. import cluster
from . import progress
from .exercise import Exercise, exercises, find
from .notebook import find_notebook, grade, note_verdict
from .question import Question, predict
from .verdict import Verdict, Wrong

__all__ = [
    "Exercise", "Question", "Verdict", "Wrong", "check", "exercises", "find", "find_notebook",
    "grade", "header", "hint", "predict", "progress", "summary",
]  # fmt: skip


def check(exercise_id: str, answer: Any) -> Verdict:
    """Try `answer` and say how it did.

    Raises NotImplementedError where the answer is still the lab's stub, and KeyError for an
    unknown exercise; nothing else, whatever the answer does.
    """
    exercise = find(exercise_id)
    began = time.monotonic()
    try:
        import cloudpickle  # a notebook's function has no module that a process could import

        raw = cloudpickle.dumps(answer)
    except Exception as e:
        found = {"passed": False, "message": f"this answer cannot be sent to a rank: {e}"}
    else:
        found = _try(exercise, raw)
    note_verdict(exercise.id, found["passed"], found["message"])
    if found.get("stub"):
        raise NotImplementedError(found["message"])
    seconds = time.monotonic() - began
    progress.note("check", exercise.id, passed=found["passed"], message=found["message"][:2000])
    left = len(exercise.hints) - progress.hints_taken(exercise.id)
    more = "" if found["passed"] or left <= 0 else f'stuck? grading.hint("{exercise.id}")'
    return Verdict(exercise.id, exercise.title, found["passed"], found["message"], more, seconds)


def hint(exercise_id: str) -> str:
    """The next hint of an exercise, from a nudge to nearly the answer."""
    exercise = find(exercise_id)
    taken = progress.hints_taken(exercise_id)
    if taken < len(exercise.hints):
        progress.note("hint", exercise_id)
    at = min(taken, len(exercise.hints) - 1)
    return Words(f"hint {at + 1} of {len(exercise.hints)}: {exercise.hints[at]}")


def header(exercise_id: str) -> str:
    """The line above an exercise: id, difficulty, minutes, target."""
    return find(exercise_id).header()


def summary() -> dict:
    """What is done and what is next: {"labs": {"02": {"passed": ["02.1"], "of": 5}, …},
    "questions": right answers, "predictions": made, "next": the next exercise's id or None}."""
    done = progress.passed()
    labs: dict[str, dict] = {}
    following = None
    for exercise in exercises().values():
        row = labs.setdefault(exercise.lab, {"passed": [], "of": 0})
        row["of"] += 1
        if exercise.id in done:
            row["passed"].append(exercise.id)
        elif following is None:
            following = exercise.id
    seen = progress.events()
    right = {e["id"] for e in seen if e["event"] == "question" and e.get("correct")}
    return {"labs": labs, "questions": len(right), "predictions": len(progress.predictions()),
            "next": following}  # fmt: skip


class Words(str):
    """Text that a notebook shows as it is, without quotes."""

    __repr__ = str.__str__


def _try(exercise: Exercise, raw: bytes) -> dict:
    """Run the bench on a host of its own (so that nothing of it outlives us), in bounded time."""
    job = tempfile.TemporaryFile()  # has no name
    job.write(pickle.dumps({"exercise": exercise.id, "answer": raw}))
    job.seek(0)
    errors = tempfile.TemporaryFile()
    r, w = os.pipe()
    try:
        with cluster.start("local", nodes=1) as host:
            process = host.node(0).spawn(
                [sys.executable, "-m", "scalelab.grading.bench"],
                out=w, err=errors.fileno(), stdin=job.fileno(),
                env={"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )  # fmt: skip
            os.close(w)
            w = -1
            said = _read(r, exercise.seconds)
            if said is None:
                process.signal(signal.SIGKILL, group=True)
    finally:
        os.close(r)
        if w >= 0:
            os.close(w)
    if said is None:
        message = f"the check was not done after {exercise.seconds:g} s and was ended"
    else:
        try:
            return json.loads(said)
        except ValueError:
            errors.seek(0)
            last = errors.read()[-2000:].decode(errors="replace").strip().splitlines()
            message = "the checker's process ended early: " + (last[-1] if last else "no words")
    return {"passed": False, "message": message}


def _read(fd: int, seconds: float) -> bytes | None:
    """All of a pipe, or None if its end has not come after `seconds`."""
    data, deadline = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as watch:
        watch.register(fd, selectors.EVENT_READ)
        while time.monotonic() < deadline:
            if watch.select(0.1):
                more = os.read(fd, 65536)
                if not more:
                    return data
                data += more
                if data.endswith(b"\n"):  # one line is all it says; a stray child may hold the pipe
                    return data
    return None
