"""What an exercise is, and where they are found."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Exercise:
    """One graded exercise.

    judge(bench, answer) returns what to say when it passes, and raises Wrong with the mistake
    otherwise; it runs in the bench's own process, never in the notebook's.
    """

    id: str  # "02.1": lab, exercise
    title: str
    difficulty: int  # 1 to 5
    minutes: int
    target: str  # what must be reached, with units
    hints: tuple[str, ...]
    judge: Callable = field(repr=False)
    seconds: float = 60.0  # wall-clock limit of one check

    @property
    def lab(self) -> str:
        return self.id.split(".")[0]

    def header(self) -> str:
        """The line that stands above an exercise in its lab."""
        stars = "★" * self.difficulty + "☆" * (5 - self.difficulty)
        return f"**Exercise {self.id}** · {stars} · {self.minutes} minutes · target: {self.target}"


def exercises() -> dict[str, Exercise]:
    """All exercises by id, in order. Importing them costs no torch."""
    from . import labs

    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(labs.__path__)):
        for exercise in importlib.import_module(f"{labs.__name__}.{module}").EXERCISES:
            found[exercise.id] = exercise
    return dict(sorted(found.items()))


def find(exercise_id: str) -> Exercise:
    """Raises KeyError, in words, if there is none of this id."""
    known = exercises()
    if exercise_id not in known:
        raise KeyError(f"no exercise {exercise_id!r}; there are {', '.join(known)}")
    return known[exercise_id]
