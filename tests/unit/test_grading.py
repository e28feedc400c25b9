"""Checks end in bounded time, say what happened, and leave nothing; progress loses nothing."""

import dataclasses
import json
import multiprocessing
import os
import re
import sys
import time

import psutil
import pytest

from scalelab import grading
from scalelab.grading import bench, progress
from scalelab.grading.verdict import Wrong


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def ring(t):
    import torch
    import torch.distributed as dist

    n, r = dist.get_world_size(), dist.get_rank()
    chunks = list(t.tensor_split(n))
    for k in range(2 * (n - 1)):
        out, into = (r - k) % n, (r - k - 1) % n
        got = torch.empty_like(chunks[into])
        going = dist.isend(chunks[out].contiguous(), (r + 1) % n)
        dist.recv(got, (r - 1) % n)
        going.wait()
        if k < n - 1:
            chunks[into] += got
        else:
            chunks[into].copy_(got)
    return t


def by_value(function):
    """As a notebook sends it: with its code, not by the name of a test module."""
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return function


def check(function):
    return grading.check("02.2", by_value(function))


def test_the_right_answer_passes_and_is_noted():
    assert not progress.passed()
    verdict = check(ring)
    assert verdict.passed, verdict
    assert progress.passed() == {"02.2"}
    assert grading.summary()["labs"]["02"]["passed"] == ["02.2"]


def returns_none(t):
    return None


def wrong_shape(t):
    return t[:2]


def not_a_number(t):
    return t * float("nan")


def calls_exit(t):
    sys.exit(0)


def ends_its_process(t):
    os._exit(0)


def kills_its_rank(t):
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), 9)
    return ring(t)


def leaves_a_group(t):
    import torch.distributed as dist

    dist.new_group([0, 1])
    return ring(t)


def prints_a_lot(t):
    while True:
        print("x" * 100_000)


def raises(t):
    return t.no_such_thing


def starts_a_process(t):
    import subprocess

    subprocess.Popen(["sleep", "600"])
    return t * 0


BAD = [
    (returns_none, "as before"),
    (wrong_shape, r"\(2,\)"),
    (not_a_number, "NaN"),
    (calls_exit, r"sys\.exit"),
    (ends_its_process, "ended its process"),
    (kills_its_rank, "rank 1 of 2 was killed by SIGKILL"),
    (leaves_a_group, "left a process group open"),
    (prints_a_lot, "more than 64 MiB"),
    (raises, "no_such_thing"),
    (starts_a_process, "differs"),
]


@pytest.mark.slow
@pytest.mark.parametrize("answer, says", BAD, ids=[f.__name__ for f, _ in BAD])
def test_whatever_an_answer_does_the_check_ends_and_says_what_happened(answer, says):
    before = set(psutil.Process().children(recursive=True))
    began = time.monotonic()
    verdict = check(answer)
    assert not verdict.passed
    assert re.search(says, verdict.message), verdict
    assert time.monotonic() - began < 40
    assert not set(psutil.Process().children(recursive=True)) - before
    assert not progress.passed()


def hangs(t):
    time.sleep(600)


@pytest.mark.slow
def test_a_hang_is_ended_and_shown_and_the_next_check_works():
    verdict = check(hangs)
    assert not verdict.passed and "never returned" in verdict.message
    assert "in hangs" in verdict.message
    assert check(ring).passed


def test_a_check_that_outlasts_its_own_limit_is_ended(monkeypatch):
    hasty = dataclasses.replace(grading.find("02.2"), seconds=0.2)
    monkeypatch.setattr(grading, "find", lambda _: hasty)
    before = set(psutil.Process().children(recursive=True))
    verdict = check(ring)
    assert not verdict.passed and "not done after 0.2 s" in verdict.message
    assert not set(psutil.Process().children(recursive=True)) - before


def test_a_stub_is_told_apart_and_an_unknown_exercise_named():
    def stub(t):
        raise NotImplementedError("lab 02, part 2: your turn")

    with pytest.raises(NotImplementedError, match="your turn"):
        check(stub)
    with pytest.raises(KeyError, match="02.2"):
        grading.check("77.7", ring)
    assert not progress.passed()


def test_an_answer_that_cannot_be_sent_says_so():
    import threading

    verdict = grading.check("02.2", threading.Lock())
    assert not verdict.passed and "cannot be sent" in verdict.message


def test_no_pass_without_ranks():
    with pytest.raises(ValueError, match="a rank or more"):
        bench.Bench().ranks(0, lambda rank, world_size: None)
    assert bench.Bench().ran == 0


def test_the_cause_is_named_before_its_consequences():
    first = bench.Rank(0, error="RuntimeError: Connection closed by peer [10.0.0.2]", exit=1)
    with pytest.raises(Wrong, match="rank 1 of 2 raised ValueError"):
        bench.raise_if_broken([first, bench.Rank(1, error="ValueError: mine", exit=1)])
    with pytest.raises(Wrong, match="rank 1 of 2 was killed by SIGKILL"):
        bench.raise_if_broken([first, bench.Rank(1, exit=-9)])
    with pytest.raises(Wrong, match="rank 0 of 2 raised RuntimeError"):
        bench.raise_if_broken([first, bench.Rank(1, exit=0)])
    bench.raise_if_broken([bench.Rank(0, exit=0), bench.Rank(1, exit=0)])


def test_hints_come_in_steps_and_stay_at_the_last():
    known = grading.find("02.2").hints
    told = [grading.hint("02.2") for _ in range(len(known) + 1)]
    assert [t.split(": ", 1)[1] for t in told] == [*known, known[-1]]


def append(home, name, count):
    os.environ["SCALELAB_HOME"] = str(home)
    for i in range(count):
        progress.note("prediction", f"{name}.{i}", value="v" * 200)


def test_two_notebooks_at_once_lose_nothing(own_home):
    spawn = multiprocessing.get_context("fork")
    writers = [spawn.Process(target=append, args=(own_home, n, 200)) for n in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    lines = (own_home / "progress.jsonl").read_text().splitlines()
    assert len(lines) == 400 and len(progress.events()) == 400
    assert len(progress.predictions()) == 400


def test_a_damaged_line_costs_only_itself(own_home):
    progress.note("check", "01.1", passed=True)
    with open(own_home / "progress.jsonl", "a") as f:
        f.write('{"event": "check", "id": "01.2", "pass')  # cut short by a kill
    progress.note("check", "01.3", passed=True)
    assert progress.passed() == {"01.1", "01.3"}


def test_progress_moves_with_its_home_and_an_unwritable_one_costs_no_lesson(tmp_path, monkeypatch):
    progress.note("check", "01.1", passed=True)
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "elsewhere"))
    assert not progress.passed()
    monkeypatch.setenv("SCALELAB_HOME", "/proc/no/such/place")
    progress.note("check", "01.1", passed=True)
    assert not progress.passed()


def test_a_question_records_the_answer_and_does_not_give_it_away():
    ask = grading.Question("02.q1", "Who reduces?", ["backward", "step"], 0, "Hooks do.")
    assert "Who reduces?" in repr(ask) and "Hooks" not in repr(ask)
    assert ask.answer(1).startswith("Not that one") and ask.answer(0).startswith("Right")
    assert grading.summary()["questions"] == 1
    with pytest.raises(ValueError):
        grading.Question("q", "?", ["a"], 1, "")
    bundle = ask._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle and "text/plain" in bundle


def test_predictions_are_kept_and_none_is_no_prediction():
    assert grading.predict("02.bytes", None) is None and not progress.predictions()
    assert grading.predict("02.bytes", 3) == 3
    assert progress.predictions() == {"02.bytes": 3}


def test_verdicts_show_in_a_notebook_without_running_what_they_say():
    verdict = grading.Verdict("02.2", "ring", False, "<script>x</script>\nline", "more")
    html = verdict._repr_html_()
    assert "<script>" not in html and "not yet" in html and "line" in html
    assert json.dumps(str(verdict))
