"""Every exercise rejects at least three wrong answers that people write, each by the name of its
mistake; its stub is told apart; headers in the labs say what the checker says. That the solution
passes is shown by solutions/, which nbval runs strictly."""

import importlib.util
import re
import sys
from pathlib import Path

import nbformat
import pytest

from scalelab import grading

ROOT = Path(__file__).resolve().parents[2]
WRONG_DIR = Path(__file__).parent / "wrong"


def wrong_answers():
    import cloudpickle

    found = {}
    for path in sorted(WRONG_DIR.glob("lab*.py")):
        spec = importlib.util.spec_from_file_location(f"wrong_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[spec.name] = module
        cloudpickle.register_pickle_by_value(module)  # as a notebook's functions are sent
        found.update(module.WRONG)
    return found


WRONG = wrong_answers()
CASES = [(i, name, answer, says) for i, cases in WRONG.items() for name, answer, says in cases]


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "home"))


def test_every_exercise_has_three_wrong_answers_or_more():
    assert grading.exercises(), "no exercises found"
    short = {i: len(WRONG.get(i, ())) for i in grading.exercises() if len(WRONG.get(i, ())) < 3}
    assert not short, f"fewer than three wrong answers: {short}"
    assert not set(WRONG) - set(grading.exercises()), "wrong answers to no exercise"


@pytest.mark.parametrize(
    "exercise, name, answer, says", CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES]
)
def test_a_wrong_answer_is_rejected_by_the_name_of_its_mistake(exercise, name, answer, says):
    verdict = grading.check(exercise, answer)
    assert not verdict.passed, f"{exercise}: {name!r} passed"
    assert re.search(says, verdict.message), f"{says!r} is not in: {verdict.message}"


@pytest.mark.parametrize("exercise", list(grading.exercises()))
def test_a_stub_does_not_pass(exercise):
    def stub(*args, **kwargs):
        raise NotImplementedError("your turn")

    with pytest.raises(NotImplementedError):
        grading.check(exercise, stub)


@pytest.mark.parametrize("path", sorted((ROOT / "solutions").glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_lab_checks_every_exercise_and_its_headers_say_what_the_checker_says(path):
    cells = nbformat.read(path, as_version=4).cells
    prose = "\n".join(c.source for c in cells if c.cell_type == "markdown")
    code = "\n".join(c.source for c in cells if c.cell_type == "code")
    mine = [e for e in grading.exercises().values() if e.lab == path.stem]
    assert mine
    for exercise in mine:
        assert f'check("{exercise.id}"' in code, f"{exercise.id} is never checked"
        assert exercise.header() in prose, f"its header should be: {exercise.header()}"
        assert 2 <= len(exercise.hints), f"{exercise.id} has no hints in steps"
