"""Each notebook with a `parameters` cell also runs with another cluster, in three minutes."""

import subprocess
import sys
import time
from pathlib import Path

import nbformat
import papermill
import pytest

import build
from scalelab import runs

ROOT = Path(__file__).resolve().parents[2]
SECOND_SET = {"num_nodes": 1, "nproc_per_node": 2}
LIMIT_S = 180
SHARED_MACHINE = 1.5  # other work may be on the same cores
RANK_MB = 400  # peak resident memory of a rank, in units of 1e6 bytes


def has_parameters(path):
    cells = nbformat.read(path, as_version=4).cells
    return any("parameters" in cell.metadata.get("tags", []) for cell in cells)


NOTEBOOKS = [path for path in sorted((ROOT / "notebooks").glob("*.ipynb")) if has_parameters(path)]


def run_with_second_set(path, tmp_path, env):
    known = papermill.inspect_notebook(str(path))
    chosen = {name: value for name, value in SECOND_SET.items() if name in known}
    out = tmp_path / "out.ipynb"
    command = [sys.executable, "-m", "papermill", str(path), str(out), "--cwd", str(path.parent)]
    command += ["--no-progress-bar", "--execution-timeout", str(LIMIT_S), "-k", "python3"]
    for name, value in chosen.items():
        command += ["-p", name, str(value)]
    start = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr[-6000:]
    cells = nbformat.read(out, as_version=4).cells
    injected = [c for c in cells if "injected-parameters" in c.metadata.get("tags", [])]
    assert len(injected) == (1 if chosen else 0), "the second set did not reach the notebook"
    code = [cell for cell in cells if cell.cell_type == "code" and cell.source.strip()]
    assert code and all(cell.execution_count for cell in code), "a cell was not run"
    assert seconds <= LIMIT_S * SHARED_MACHINE, f"took {seconds:.0f} s"
    return cells


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS or [None], ids=lambda path: path and path.stem)
def test_runs_with_a_second_parameter_set(path, tmp_path, kernel_env):
    if path is None:
        pytest.skip("there is no notebook with a parameters cell yet")
    run_with_second_set(path, tmp_path, kernel_env)
    peaks = rank_peaks(Path(kernel_env["SCALELAB_HOME"]))
    assert not peaks or max(peaks) <= RANK_MB, peaks
    # Lesson 01 trains in the notebook itself; the others on ranks.
    assert bool(peaks) == (not path.stem.startswith("01")), f"{len(peaks)} ranks have run"


def rank_peaks(home):
    """Peak memory (MB) of every rank of every run below `home` that told it."""
    manifests = [runs.read_manifest(path.parent) for path in home.glob("runs/*/manifest.json")]
    ranks = [rank for manifest in manifests for rank in manifest["ranks"]]
    return [rank["memory_mb"] for rank in ranks if rank.get("memory_mb")]


@pytest.mark.slow
def test_fixture_sees_the_set_and_a_notebook_fixed_to_one_is_rejected(tree, tmp_path, kernel_env):
    path = tree / "notebooks" / "00_tiny.ipynb"
    cells = run_with_second_set(path, tmp_path, kernel_env)
    assert [c.outputs[0].text for c in cells if "ranks:" in c.source] == ["ranks: 2\n"]
    nb = nbformat.read(path, as_version=4)
    nb.cells[-1].source = "assert num_nodes == 2"
    path.write_text(build.to_text(nb))
    with pytest.raises(AssertionError, match="assert num_nodes == 2"):
        run_with_second_set(path, tmp_path, kernel_env)
