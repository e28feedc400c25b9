"""tools/venv.sh says in one line what is missing, before it changes anything.

Interpreters of other versions are played by a few lines of shell: the script asks an interpreter
only for its version and whether it has venv.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """A folder with a space in its name that has what venv.sh reads."""
    root = tmp_path / "fresh clone"
    (root / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools" / "venv.sh", root / "tools")
    for name in ("requirements.txt", "requirements-dev.txt"):
        (root / name).write_text("# nothing to install\n")
    (root / "pyproject.toml").write_text('[project]\nname = "tiny"\nversion = "1"\n')
    (root / "bin").mkdir()
    return root


def player(clone, name, version, has_venv=True):
    path = clone / "bin" / name
    answer = f'echo "{version}"' if version else "exit 127"
    venv = f'case "$2" in *ensurepip*) exit {0 if has_venv else 1};; esac'
    path.write_text(f"#!/bin/sh\n{venv}\n{answer}\n")
    path.chmod(0o755)
    return str(path)


def set_up(clone, **env):
    """venv.sh with only the clone's own interpreters on the PATH."""
    tools = ("sh", "dirname", "cat", "cksum", "df", "awk", "head", "grep")
    for tool in tools:
        if not (clone / "bin" / tool).exists():
            (clone / "bin" / tool).symlink_to(shutil.which(tool))
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PIP_ARGS", "NEED_GB")}
    env = {**inherited, "PATH": str(clone / "bin"), **env}
    return subprocess.run(
        ["sh", "tools/venv.sh", "learner"], cwd=clone, env=env, capture_output=True, text=True
    )


def refused(done, clone):
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not (clone / ".venv").exists()
    return done.stderr


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
def test_python_too_old_or_too_new(clone, version):
    player(clone, "python3", version)
    line = refused(set_up(clone), clone)
    assert f"needs Python 3.10 to 3.13, but python3 is {version}" in line


def test_no_python(clone):
    assert "found none." in refused(set_up(clone), clone)
    player(clone, "python3", "")  # a shim for a version that is not installed
    assert "found none." in refused(set_up(clone), clone)


def test_named_python_that_is_not_there(clone):
    done = set_up(clone, PYTHON="/no/such/python")
    assert "found none at /no/such/python" in refused(done, clone)


def test_named_python_is_not_replaced_by_another(clone):
    player(clone, "python3", "3.11")
    old = player(clone, "old", "3.9")
    assert f"{old} is 3.9" in refused(set_up(clone, PYTHON=old), clone)


def test_no_venv_module(clone):
    player(clone, "python3", "3.11", has_venv=False)
    assert "python3 has no venv module" in refused(set_up(clone), clone)


def test_disk_too_full(clone):
    player(clone, "python3", "3.11")
    line = refused(set_up(clone, NEED_GB="9999999"), clone)
    assert "the disk is too full" in line and "need about 9999999 GB" in line


def test_later_candidate_serves_where_python3_does_not(clone):
    player(clone, "python3", "3.9")
    player(clone, "python3.12", "3.12")
    line = refused(set_up(clone, NEED_GB="9999999"), clone)  # it got past the choice
    assert "too full" in line


@pytest.mark.slow
def test_makes_adopts_and_rebuilds(clone):
    (clone / "bin" / "python3").symlink_to(sys._base_executable)
    (clone / "tiny").mkdir()
    (clone / "tiny" / "__init__.py").touch()
    # setuptools stands in for torch, which brings it
    (clone / "requirements.txt").write_text("setuptools\n")
    python = clone / ".venv" / "bin" / "python"

    done = set_up(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "making .venv" in done.stdout
    check = [python, "-c", "import tiny"]
    assert subprocess.run(check, cwd="/").returncode == 0

    done = set_up(clone)
    assert (done.returncode, done.stdout + done.stderr) == (0, ""), "nothing to do, nothing said"

    (clone / ".venv" / ".scalelab-learner").unlink()  # as one made by hand
    done = set_up(clone)
    assert done.returncode == 0 and "making" not in done.stdout and "installing" in done.stdout

    with (clone / "requirements.txt").open("a") as file:
        file.write("# a change\n")
    assert "installing" in set_up(clone).stdout

    moved = clone.rename(clone.with_name("moved clone"))  # its scripts name a folder that is gone
    (moved / "bin" / "python3").unlink()
    (moved / "bin" / "python3").symlink_to(sys._base_executable)
    done = set_up(moved)
    assert done.returncode == 0 and "making .venv" in done.stdout, done.stdout + done.stderr
