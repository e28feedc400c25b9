"""A lab as a learner finds it runs to the first part that is theirs, and no further."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = Path(__file__).resolve().parents[2]
LABS = sorted((ROOT / "labs").glob("*.ipynb"))


def stops_at_first_part(path, env):
    nb = nbformat.read(path, as_version=4)
    client = NotebookClient(
        nb,
        timeout=180,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        extra_arguments=["--log-level=ERROR"],
    )
    try:
        client.execute(env=env)
    except CellExecutionError as error:
        stopped = f"{error.ename}: {error.evalue}"
    else:
        stopped = "nothing: it ran to its end"
    assert stopped == f"NotImplementedError: lab {path.stem}, part 1: your turn", stopped


@pytest.mark.slow
@pytest.mark.parametrize("path", LABS or [None], ids=lambda path: path and path.stem)
def test_runs_to_the_first_part(path, kernel_env):
    if path is None:
        pytest.skip("there is no lab yet")
    stops_at_first_part(path, kernel_env)


@pytest.mark.slow
def test_fixture_stops_and_a_solved_or_broken_one_is_rejected(tree, kernel_env):
    path = tree / "labs" / "00.ipynb"
    stops_at_first_part(path, kernel_env)
    stub = path.read_text()
    path.write_text((tree / "solutions" / "00.ipynb").read_text())
    with pytest.raises(AssertionError, match="it ran to its end"):
        stops_at_first_part(path, kernel_env)
    path.write_text(stub.replace("def world_size", "undefined\\n\",\n    \"def world_size"))
    with pytest.raises(AssertionError, match="NameError"):
        stops_at_first_part(path, kernel_env)
