"""nbval, strict: every notebook and solution runs again and prints what is saved in it."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import nbformat
import pytest

import build

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = [path for name in ("notebooks", "solutions") for path in (ROOT / name).glob("*.ipynb")]
CELL_SECONDS = 180  # nbval's own is 2000


def nbval(path, tmp_path, env, cell_seconds=CELL_SECONDS):
    """Runs a notebook in a pytest of its own. Returns how many cells it counted, by outcome."""
    report = tmp_path / "report.xml"
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # not this repository's
    command = [sys.executable, "-m", "pytest", "--nbval", "-q", "-p", "no:cacheprovider"]
    command += ["-c", str(tmp_path / "pytest.ini"), f"--nbval-cell-timeout={cell_seconds}"]
    command += [f"--junitxml={report}", str(path)]
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=900
    )
    counted = ET.parse(report).find("testsuite").attrib
    names = ("tests", "failures", "errors", "skipped")
    return {name: int(counted[name]) for name in names}, done.stdout


def all_passed(path):
    cells = nbformat.read(path, as_version=4).cells
    code = sum(cell.cell_type == "code" for cell in cells)
    assert code > 0, "a notebook without code proves nothing"
    return {"tests": code, "failures": 0, "errors": 0, "skipped": 0}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(NOTEBOOKS) or [None], ids=lambda p: p and p.stem)
def test_prints_what_is_saved(path, tmp_path, kernel_env):
    if path is None:
        pytest.skip("there is no notebook yet")
    counted, output = nbval(path, tmp_path, kernel_env)
    assert counted == all_passed(path), output[-6000:]


@pytest.mark.slow
def test_fixture_passes_and_a_tampered_output_is_rejected(tree, tmp_path, kernel_env):
    path = tree / "notebooks" / "00_tiny.ipynb"
    assert nbval(path, tmp_path, kernel_env)[0] == all_passed(path)
    text = path.read_text()
    assert text.count("ranks: 4") == 1
    path.write_text(text.replace("ranks: 4", "ranks: 5"))
    counted, _ = nbval(path, tmp_path, kernel_env)
    assert counted == all_passed(path) | {"failures": 1}


@pytest.mark.slow
def test_cell_that_hangs_is_ended(tree, tmp_path, kernel_env):
    path = tree / "notebooks" / "00_tiny.ipynb"
    nb = nbformat.read(path, as_version=4)
    nb.cells[-1].source = "import time; time.sleep(300)"
    path.write_text(build.to_text(nb))
    counted, output = nbval(path, tmp_path, kernel_env, cell_seconds=3)
    assert counted == all_passed(path) | {"failures": 1} and "Timeout" in output, output
