"""Grading a whole lab: run its notebook from top to bottom and collect what its checks say."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from .exercise import exercises

VERDICTS = "SCALELAB_VERDICTS"  # a file to which check() adds a line a verdict


def note_verdict(exercise: str, passed: bool, message: str) -> None:
    """Called by check(): tell whoever runs this notebook."""
    path = os.environ.get(VERDICTS)
    if path:
        with open(path, "a") as f:
            f.write(json.dumps({"id": exercise, "passed": passed, "message": message}) + "\n")


def find_notebook(lab: str, folder: Path | None = None) -> Path:
    """labs/NN.ipynb for "2", "02", "lab 02" or a path. Raises FileNotFoundError in one line."""
    if lab.endswith(".ipynb"):
        path = Path(lab)
    else:
        number = lab.strip().lower().removeprefix("lab").strip()
        name = f"{number.zfill(2)}.ipynb"
        here = folder or Path.cwd()
        places = [here / "labs" / name, here / name, here.parent / "labs" / name]
        path = next((p for p in places if p.is_file()), places[0])
    if not path.is_file():
        raise FileNotFoundError(f"no such lab: {path}")
    return path


def grade(path: Path, timeout: float = 600) -> list[dict]:
    """Run the notebook in a kernel of its own and return, for each exercise of its lab, in order:
    {"id", "title", "passed", "message"}. A cell that fails does not stop the others. The file
    itself is not changed."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    nb = nbformat.read(path, as_version=4)
    trouble = ""
    with tempfile.NamedTemporaryFile("w+", suffix=".jsonl") as said:
        client = NotebookClient(
            nb, timeout=timeout, allow_errors=True, kernel_name="python3",
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        try:
            client.execute(env={**os.environ, VERDICTS: said.name, "OMP_NUM_THREADS": "1"})
        except CellTimeoutError:
            trouble = f"a cell ran longer than {timeout:g} s"
        except DeadKernelError:
            trouble = "the notebook's kernel died"
        verdicts = {}
        for line in Path(said.name).read_text().splitlines():
            verdict = json.loads(line)
            verdicts[verdict["id"]] = verdict
    lab = path.stem.split("_")[0]
    rows = []
    for exercise in exercises().values():
        if exercise.lab == lab:
            missing = trouble or _first_error(nb) or "its check was never reached"
            verdict = verdicts.get(exercise.id, {"passed": False, "message": missing})
            rows.append({"id": exercise.id, "title": exercise.title,
                         "passed": verdict["passed"], "message": verdict["message"]})  # fmt: skip
    return rows


def _first_error(nb) -> str:
    for number, cell in enumerate(nb.cells, 1):
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                return f"cell {number} raised {output.ename}: {output.evalue}"[:300]
    return ""
