"""The builder on a tiny curriculum: every kind of drift is seen, and a failure changes nothing."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest

import build

NOTEBOOK, LAB, SOLUTION = "notebooks/00_tiny.ipynb", "labs/00.ipynb", "solutions/00.ipynb"
LESSON_SOURCE, LAB_SOURCE = "source/notebooks/00_tiny.py", "source/labs/00.py"


def check(root, capsys):
    capsys.readouterr()
    code = build.main(["--check", "--root", str(root)])
    return code, capsys.readouterr().out


def edit(path, old, new):
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {path.name}"
    path.write_text(text.replace(old, new))


def change(path, spoil):
    nb = nbformat.read(path, as_version=4)
    spoil(nb)
    path.write_text(build.to_text(nb))


def files(root):
    return {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_fresh_build_matches(tree, capsys):
    assert check(tree, capsys) == (0, "2 sources, every notebook matches\n")


def spoil_source(root):
    edit(root / LESSON_SOURCE, 'print("ranks:"', 'print("all ranks:"')


def spoil_tags(root):
    change(root / NOTEBOOK, lambda nb: nb.cells[1].metadata.update(tags=["other"]))


def spoil_id(root):
    change(root / NOTEBOOK, lambda nb: nb.cells[1].update(id="abc"))


def spoil_metadata(root):
    change(root / NOTEBOOK, lambda nb: nb.metadata.language_info.update(version="3.11.7"))


def spoil_header(root):
    edit(root / LESSON_SOURCE, "# minutes: 1\n", "# minutes: 2\n")


def drop_cell(root):
    change(root / NOTEBOOK, lambda nb: nb.cells.pop())


def drop_notebook(root):
    (root / NOTEBOOK).unlink()


def drop_lab(root):
    (root / LAB).unlink()


def drop_source(root):
    (root / LAB_SOURCE).unlink()


def break_notebook(root):
    (root / NOTEBOOK).write_text("<<<<<<< HEAD\n")


def indent_otherwise(root):
    path = root / NOTEBOOK
    path.write_text(json.dumps(json.loads(path.read_text()), indent=2))


def clear_outputs(root):
    change(root / SOLUTION, lambda nb: nb.cells[2].update(outputs=[], execution_count=None))


def run_out_of_order(root):
    change(root / NOTEBOOK, lambda nb: nb.cells[2].update(execution_count=7))


def save_error(root):
    error = nbformat.v4.new_output("error", ename="E", evalue="e", traceback=[])
    change(root / NOTEBOOK, lambda nb: nb.cells[2].outputs.append(error))


def save_path(root):
    spoil = nbformat.v4.new_output("stream", name="stdout", text="kept in /home/ada/runs/1\n")
    change(root / NOTEBOOK, lambda nb: nb.cells[2].outputs.append(spoil))


def save_own_path(root):
    page = nbformat.v4.new_output("display_data", data={"text/html": f"<b>{root}/x</b>"})
    change(root / NOTEBOOK, lambda nb: nb.cells[2].outputs.append(page))


def run_stub(root):
    spoil = nbformat.v4.new_output("stream", name="stdout", text="solved\n")
    change(root / LAB, lambda nb: nb.cells[2].outputs.append(spoil))


def solve_stub(root):
    shutil.copy(root / SOLUTION, root / LAB)


def leak_in_comment(root):
    leak = "#     return num_nodes * nproc_per_node\n"
    change(root / LAB, lambda nb: nb.cells[2].update(source=leak + nb.cells[2].source))


def stale_map(root):
    edit(root / "README.md", "Count to four", "Count to five")


def no_map(root):
    edit(root / "README.md", build.MAP_END, "")


DRIFTS = {
    spoil_source: f"{NOTEBOOK}: cell 3: source differs from {LESSON_SOURCE}",
    spoil_tags: f"{NOTEBOOK}: cell 2: metadata differs from {LESSON_SOURCE}",
    spoil_id: f"{NOTEBOOK}: cell 2: id differs from {LESSON_SOURCE}",
    spoil_metadata: f"{NOTEBOOK}: metadata of the notebook differ from {LESSON_SOURCE}",
    spoil_header: "README.md: the map of lessons is not current",
    drop_cell: f"{NOTEBOOK}: 3 cells, {LESSON_SOURCE} has 4",
    drop_notebook: f"{NOTEBOOK}: missing, {LESSON_SOURCE} makes it",
    drop_lab: f"{LAB}: missing, {LAB_SOURCE} makes it",
    drop_source: f"{LAB}: orphan, no source makes it",
    break_notebook: f"{NOTEBOOK}: not a notebook",
    indent_otherwise: f"{NOTEBOOK}: not the bytes that the builder writes",
    clear_outputs: f"{SOLUTION}: cell 3: run as number None, not 2",
    run_out_of_order: f"{NOTEBOOK}: cell 3: run as number 7, not 2",
    save_error: f"{NOTEBOOK}: cell 3: saved with an error",
    save_path: f"{NOTEBOOK}: cell 3: its output holds a path of the author's machine: /home/ada",
    save_own_path: f"{NOTEBOOK}: cell 3: its output holds a path of the author's machine: ",
    run_stub: f"{LAB}: cell 3: has outputs",
    solve_stub: f"{LAB}: cell 2 holds the text of a solution",
    leak_in_comment: f"{LAB}: cell 3 holds the text of a solution",
    stale_map: "README.md: the map of lessons is not current",
    no_map: "README.md: needs the lines",
}


@pytest.mark.parametrize("spoil", DRIFTS, ids=lambda spoil: spoil.__name__)
def test_drift_is_named_in_one_line(tree, spoil, capsys):
    spoil(tree)
    code, out = check(tree, capsys)
    assert code == 1
    assert [line for line in out.splitlines() if line.startswith(DRIFTS[spoil])], out


BEGIN, END = f"    {build.BEGIN}\n", f"    {build.END}\n"
BAD_SOURCES = {
    "no header": (LESSON_SOURCE, "# ---\n# title", "# title", "must begin with a header"),
    "key missing": (LESSON_SOURCE, "# minutes: 1\n", "", "must begin with a header"),
    "key unknown": (LESSON_SOURCE, "# minutes:", "# minuets:", "must begin with a header"),
    "bad yaml": (LESSON_SOURCE, "# minutes: 1", "# minutes: [1", "header: while parsing"),
    "no begin": (LAB_SOURCE, BEGIN, "", "without its other half"),
    "no end": (LAB_SOURCE, END, "", "without its other half"),
    "begin twice": (LAB_SOURCE, BEGIN, BEGIN + BEGIN, "without its other half"),
    "typing error": (LAB_SOURCE, BEGIN, "    ### BEGIN SOLUTON\n", "is not '### BEGIN SOLUTION'"),
    "in prose": (LAB_SOURCE, "# # Count", "# ### BEGIN SOLUTION\n# # Count", "in a code cell"),
    "given away": (
        LAB_SOURCE,
        "# # Count",
        "# `return num_nodes*nproc_per_node`\n# # Count",
        "cell 1 holds the text of a solution",
    ),
}


@pytest.mark.parametrize("name", BAD_SOURCES)
def test_bad_source_is_refused_by_build_and_check(tree, name, capsys):
    path, old, new, message = BAD_SOURCES[name]
    edit(tree / path, old, new)
    before = files(tree)
    code, out = check(tree, capsys)
    assert code == 1 and message in out
    assert build.main(["--root", str(tree), Path(path).stem]) == 1
    assert message in capsys.readouterr().out
    assert files(tree) == before


def test_lab_without_a_solution_is_refused(tree, capsys):
    edit(tree / LAB_SOURCE, BEGIN, "")
    edit(tree / LAB_SOURCE, END, "")
    code, out = check(tree, capsys)
    assert code == 1 and f"{LAB_SOURCE}: a lab without '### BEGIN SOLUTION'" in out


FAILURES = {
    "1 / 0": "ZeroDivisionError: division by zero",
    "import time; time.sleep(60)": "ran longer than 3 s",
    "import os; os._exit(1)": "its kernel died",
    'print("/home/ada/x")': "its output holds a path of the author's machine: /home/ada/x",
    'import os; print(os.environ["SCALELAB_HOME"])': "its output holds a path",
}


@pytest.mark.parametrize("code", FAILURES)
def test_failed_run_leaves_everything_as_it_was(tree, code, capsys):
    edit(tree / LAB_SOURCE, 'print("solved")', code)
    before = files(tree)
    assert build.main(["--root", str(tree), "--timeout", "3", "00"]) == 1
    out = capsys.readouterr().out
    assert FAILURES[code] in out and "cell 3" in out and "the old notebook stays" in out
    assert files(tree) == before


def test_one_failure_does_not_stop_the_others(tree, capsys):
    edit(tree / LESSON_SOURCE, "time.time()", "1 / 0")
    (tree / LAB).unlink()
    assert build.main(["--root", str(tree)]) == 1
    assert (tree / LAB).exists()


def test_same_bytes_twice_but_for_outputs(built_once, tmp_path, capsys):
    again = tmp_path / "elsewhere"
    shutil.copytree(built_once / "source", again / "source")
    shutil.copy(built_once / "README.md", again)
    assert build.main(["--root", str(again)]) == 0
    for name in (LAB, "README.md"):
        assert (again / name).read_bytes() == (built_once / name).read_bytes()
    for name in (NOTEBOOK, SOLUTION):
        one, two = (json.loads((root / name).read_text()) for root in (built_once, again))
        for nb in one, two:
            for cell in nb["cells"]:
                cell.pop("outputs", None)
        assert json.dumps(one) == json.dumps(two)


def test_stub_keeps_indentation_ids_and_nothing_else(tree):
    lab, solution = (nbformat.read(tree / name, as_version=4) for name in (LAB, SOLUTION))
    assert [c.id for c in lab.cells] == [c.id for c in solution.cells]
    assert lab.cells[1].source == (
        "def world_size(num_nodes, nproc_per_node):\n"
        '    raise NotImplementedError("lab 00, part 1: your turn")'
    )


def test_ids_survive_an_edit_elsewhere(tree):
    source = build.Source(tree, tree / LESSON_SOURCE)
    before = [cell.id for cell in build.read_source(source).cells]
    twin = '# %% [markdown]\n# # Count to four\n\n# %% tags=["parameters"]'
    edit(tree / LESSON_SOURCE, '# %% tags=["parameters"]', twin)
    after = [cell.id for cell in build.read_source(source).cells]
    assert [i for i in after if i in before] == before
    assert len(set(after)) == len(before) + 1, "equal cells have ids of their own"


def test_saved_widget_keeps_its_picture_only():
    view = {build.WIDGET_VIEW: {"model_id": "x"}, "image/png": "aGk=", "text/plain": "Panel"}
    nb = nbformat.v4.new_notebook(metadata={"widgets": {"state": {}}})
    output = nbformat.v4.new_output("display_data", data=view)
    nb.cells = [nbformat.v4.new_code_cell("panel", outputs=[output])]
    build.tidy(nb)
    assert "widgets" not in nb.metadata
    assert dict(nb.cells[0].outputs[0].data) == {"image/png": "aGk=", "text/plain": "Panel"}


def test_url_is_not_a_path():
    nb = nbformat.v4.new_notebook()
    url = nbformat.v4.new_output("stream", name="stdout", text="https://a.org/home/x ../tmp/y\n")
    nb.cells = [nbformat.v4.new_code_cell("x", outputs=[url])]
    assert build.private_paths(nb, Path("/nowhere/at/all")) == []


def test_unknown_name_is_bad_usage(tree, capsys):
    assert build.main(["--root", str(tree), "99"]) == 2
    assert capsys.readouterr().err == "build: no source 99; there are: 00_tiny, 00\n"
