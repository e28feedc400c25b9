"""`scalelab check` and `scalelab progress` as a learner types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scalelab import grading

ROOT = Path(__file__).resolve().parents[2]
LABS = sorted(p.stem for p in (ROOT / "labs").glob("[0-9]*.ipynb"))


@pytest.fixture
def scalelab(tmp_path):
    def call(*args):
        env = {**os.environ, "SCALELAB_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "scalelab", *map(str, args)]
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )

    return call


def test_an_unsolved_lab_does_not_pass_and_a_solved_one_does(scalelab):
    assert LABS, "no labs found"
    lab = LABS[-1]
    unsolved = scalelab("check", lab, "--json")
    found = json.loads(unsolved.stdout)
    count = sum(e.lab == lab for e in grading.exercises().values())
    assert unsolved.returncode == 1 and (found["passed"], found["of"]) == (0, count)
    assert all("your turn" in row["message"] for row in found["exercises"]), found
    assert json.loads(scalelab("progress", "--json").stdout)["labs"][lab]["passed"] == []

    before = (ROOT / "solutions" / f"{lab}.ipynb").read_bytes()
    solved = scalelab("check", f"solutions/{lab}.ipynb", "--json")
    found = json.loads(solved.stdout)
    assert solved.returncode == 0 and (found["passed"], found["of"]) == (count, count), found
    assert (ROOT / "solutions" / f"{lab}.ipynb").read_bytes() == before
    done = json.loads(scalelab("progress", "--json").stdout)
    assert len(done["labs"][lab]["passed"]) == count
    assert f"lab {lab}" in scalelab("progress").stdout


@pytest.mark.parametrize("lab", ["77", "no such.ipynb", "README.md", "--fast"])
def test_no_such_lab_is_one_line_and_exit_2(scalelab, lab):
    done = scalelab("check", lab)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert not done.stdout
