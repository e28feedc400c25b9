"""The repository as a whole. `make quick` runs this file too, so it stays fast."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*args, cwd=ROOT):
    return subprocess.run([sys.executable, *args], cwd=cwd, capture_output=True, text=True)


def test_lint():
    done = run("-m", "ruff", "check", "--output-format=concise", ".")
    assert done.returncode == 0, done.stdout + done.stderr


def test_lint_rejects_an_unused_import(tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text("import os\n")
    done = run("-m", "ruff", "check", "--config", str(ROOT / "pyproject.toml"), str(bad))
    assert done.returncode == 1 and "F401" in done.stdout


def test_notebooks_match_their_sources():
    done = run("tools/build.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr
