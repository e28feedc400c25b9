"""What tests/conftest.py promises: leftovers fail the session, and the last line counts."""

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
ORPHAN = """
import subprocess, sys
def test_leaves_an_orphan():  # its parent is gone: only its environment tells whose it is
    start = "subprocess.Popen(['sleep', '321'], stdout=-3, stderr=-3)"
    code = f"import subprocess; print('pid', {start}.pid)"
    subprocess.run([sys.executable, "-c", code])
"""
CHILD = """
import os, subprocess
def test_leaves_a_child():  # one that has dropped its environment
    env = {"PATH": os.environ["PATH"]}
    print("pid", subprocess.Popen(["sleep", "322"], stdout=-3, stderr=-3, env=env).pid)
"""
COUNTED = """
import pytest
def test_good(): pass
def test_bad(): assert False
@pytest.mark.parametrize("n", [1, 2])
def test_skipped(n): pytest.skip("no GPU here")
def test_error(no_such_fixture): pass
"""


def session(tmp_path, text, *args):
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_it.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args, "test_it.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("text", [ORPHAN, CHILD], ids=["orphan", "child"])
def test_leftover_fails_the_session_and_is_ended(tmp_path, text):
    code, lines = session(tmp_path, text, "-s")
    pid = next(int(line.split()[-1]) for line in lines if "pid " in line)
    assert code == 1
    assert lines[-1] == "total: 1 passed, 1 failed, 0 skipped"
    assert lines[-2].startswith(f"LEFT RUNNING by the tests (ended now): {pid} sleep")
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_last_lines_count_and_give_reasons(tmp_path):
    code, lines = session(tmp_path, COUNTED)
    assert code == 1
    assert lines[-2:] == ["skipped 2: no GPU here", "total: 1 passed, 2 failed, 2 skipped"]


def test_clean_session_passes(tmp_path):
    code, lines = session(tmp_path, "def test_good(): pass\n")
    assert (code, lines[-1]) == (0, "total: 1 passed, 0 failed, 0 skipped")
