"""The repository as a whole. `make quick` runs this file too, so it stays fast."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


def dead_links(page):
    links = re.findall(r"\]\(([^)#:]+)\)", page.read_text())  # without those that name a scheme
    return [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    assert dead_links(ROOT / name) == []


def test_dead_link_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("[here](page.md) [away](https://example.org/x) ![gone](docs/gone.png)")
    assert dead_links(page) == ["docs/gone.png"]
