"""The script whose ranks are started by hand, lesson 05's third starting point: it works on one
machine, as it stands, and what goes from it on the way to train_ddp.py is what it hard-codes."""

import difflib
import sys
from pathlib import Path

import pytest

from scalelab import cluster
from scalelab.runs.lines import LinesRun

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"
BY_HAND, DDP = SCRIPTS / "by_hand_ddp.py", SCRIPTS / "train_ddp.py"
PROBLEM = cluster.virtual_problem()


def changed(old, new):
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), n=0, lineterm=""))[2:]
    return [line for line in diff if line.startswith("-")]


def test_only_start_and_addresses_differ_from_train_ddp():
    gone = changed(BY_HAND.read_text(), DDP.read_text())
    assert 0 < len(gone) <= 10
    words = ("by hand", "ADDRESS", "rank", "WORLD_SIZE")
    assert all(any(word in line for word in words) for line in gone), gone
    trained = BY_HAND.read_text().replace("optimizer.step()", "pass")
    gone = changed(trained, DDP.read_text())
    assert not all(any(word in line for word in words) for line in gone)


@pytest.mark.slow
@pytest.mark.skipif(bool(PROBLEM), reason=f"its port is written into it: {PROBLEM}")
def test_two_ranks_by_hand_train_as_two_under_torchrun():
    hand = f"'{sys.executable}' '{BY_HAND}' --steps 5 --rank"
    line = f"{hand} 1 & {hand} 0; wait; torchrun --nproc-per-node=2 --standalone '{DDP}' --steps 5"
    with cluster.start("virtual", nodes=1) as c, LinesRun(c, {0: line}, timeout=150) as run:
        run.wait()
        said = run.output(0).splitlines()
    losses = [text for text in said if text.startswith("validation loss")]
    assert run.exits == {0: 0} and len(losses) == 2 and len(set(losses)) == 1, said


@pytest.mark.slow
@pytest.mark.skipif(bool(PROBLEM), reason=f"needs two machines: {PROBLEM}")
def test_on_two_machines_each_rank_looks_for_the_other_on_its_own():
    lines = {i: f"'{sys.executable}' '{BY_HAND}' --steps 5 --rank {i}" for i in (0, 1)}
    with cluster.start("virtual", nodes=2) as c, LinesRun(c, lines, timeout=60) as run:
        assert not run.wait(12), run.table()
        assert "rank 0 of 2" not in run.output(0) and "rank 1 of 2" not in run.output(1)
