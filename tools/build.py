"""Builds the notebooks from their sources, and proves that they match.

    python tools/build.py [NAMES...]     build all, or those named (00_start_here, 01)
    python tools/build.py --check        exit 1 and one line for each thing that has drifted

source/notebooks/NN_name.py -> notebooks/NN_name.ipynb   executed, outputs kept
source/labs/NN.py           -> labs/NN.ipynb             solutions cut out, no outputs
                            -> solutions/NN.ipynb        executed
README.md                      the map of lessons, between its two markers

A source is py:percent text that begins with a header of the keys in HEADER. Everything written but
the outputs follows from the source alone, to the byte. A notebook is replaced only once it has run
to its end.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jupytext
import nbformat
import yaml
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

HEADER = ("title", "minutes", "ranks", "cluster", "objective")
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
NEAR_MARK = re.compile(r"#+\s*(begin|end)\s*[-_]*\s*sol", re.IGNORECASE)  # also with a typing error
MAP_BEGIN, MAP_END = "<!-- lessons: made by tools/build.py -->", "<!-- end of lessons -->"
SHORTEST_LEAK = 12  # characters without blanks: `return x` stands in any program, a leak is longer
WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# A path that tells where its author keeps things. A URL's path has a letter before the slash.
PRIVATE_PATH = re.compile(
    r"(?<![\w.~/-])/(?:home|root|Users|tmp|private|var/folders)/[^\s'\"<>,;)]+"
)

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {  # as ipykernel gives it, without the version: that is the author's
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
}


class SourceError(Exception):
    """A source that cannot be built; the message is one line."""


@dataclass(frozen=True)
class Source:
    root: Path
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def shown(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def is_lab(self) -> bool:
        return self.path.parent.name == "labs"

    @property
    def executed(self) -> Path:
        """The notebook that is run and keeps its outputs."""
        return self.root / ("solutions" if self.is_lab else "notebooks") / f"{self.name}.ipynb"

    @property
    def stub(self) -> Path | None:
        """The notebook with the solutions cut out."""
        return self.root / "labs" / f"{self.name}.ipynb" if self.is_lab else None


def find_sources(root: Path) -> list[Source]:
    folders = (root / "source" / "notebooks", root / "source" / "labs")
    return [Source(root, path) for folder in folders for path in sorted(folder.glob("*.py"))]


# -- from source to notebook ---------------------------------------------------------------------


def read_source(source: Source) -> nbformat.NotebookNode:
    """The whole notebook, solutions in, not run."""
    nb = jupytext.reads(source.path.read_text(encoding="utf-8"), fmt="py:percent")
    header = read_header(source, nb.cells)
    seen: dict[str, int] = {}
    for cell in nb.cells:
        cell.metadata.pop("lines_to_next_cell", None)  # spacing of the source
        # An id follows from what the cell holds (and its place among equals), so that an edit
        # elsewhere does not move it, and lab and solution share it.
        digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:12]
        seen[digest] = seen.get(digest, 0) + 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    nb.metadata = nbformat.from_dict(
        {"kernelspec": KERNELSPEC, "language_info": LANGUAGE, "scalelab": header}
    )
    nb.nbformat, nb.nbformat_minor = 4, 5
    return nb


def read_header(source: Source, cells: list) -> dict:
    """Takes the header off the cells (jupytext leaves it as a first, raw cell)."""
    wanted = f"{source.shown}: must begin with a header of {', '.join(HEADER)}"
    if not cells or cells[0].cell_type != "raw" or not cells[0].source.startswith("---"):
        raise SourceError(wanted)
    try:
        header = yaml.safe_load(cells.pop(0).source.strip("-\n"))
    except yaml.YAMLError as error:
        raise SourceError(f"{source.shown}: header: {' '.join(str(error).split())}") from None
    if not isinstance(header, dict) or set(header) != set(HEADER):
        raise SourceError(wanted)
    return header


def cut_solutions(source: Source, nb) -> tuple[nbformat.NotebookNode, list[str]]:
    """A lab's stub, each solution replaced by a NotImplementedError, and the solutions cut out."""
    stub = copy.deepcopy(nb)
    solutions: list[str] = []
    for number, cell in enumerate(stub.cells, 1):
        where = f"{source.shown}: cell {number}"
        kept: list[str] = []
        block: list[str] | None = None
        for line in cell.source.splitlines():
            mark = line.strip()
            if mark in (BEGIN, END) and cell.cell_type == "code":
                if (mark == BEGIN) != (block is None):
                    raise SourceError(f"{where}: {mark!r} without its other half")
                if block is None:
                    block = []
                    part = f"lab {source.name}, part {len(solutions) + 1}: your turn"
                    indent = line[: len(line) - len(line.lstrip())]
                    kept.append(f'{indent}raise NotImplementedError("{part}")')
                else:
                    solutions.append("\n".join(block))
                    block = None
            elif NEAR_MARK.search(line):
                raise SourceError(f"{where}: {mark!r} is not {BEGIN!r} or {END!r} in a code cell")
            else:
                (kept if block is None else block).append(line)
        if block is not None:
            raise SourceError(f"{where}: {BEGIN!r} without its other half")
        cell.source = "\n".join(kept)
    if not solutions:
        raise SourceError(f"{source.shown}: a lab without {BEGIN!r}")
    for problem in solution_leaks(stub, solutions):
        raise SourceError(f"{source.shown}: {problem}")
    return stub, solutions


def solution_leaks(stub: nbformat.NotebookNode, solutions: list[str]) -> list[str]:
    def bare(text: str) -> str:  # comment signs go too: a solution commented out is a leak
        return "".join("".join(line.lstrip("# \t").split()) for line in text.splitlines())

    found = []
    for number, cell in enumerate(stub.cells, 1):
        text = bare(cell.source)
        if any(len(bare(s)) >= SHORTEST_LEAK and bare(s) in text for s in solutions):
            found.append(f"cell {number} holds the text of a solution")
        elif NEAR_MARK.search(cell.source):
            found.append(f"cell {number} holds the mark of a solution")
    return found


def to_text(nb: nbformat.NotebookNode) -> str:
    return nbformat.writes(nb) + "\n"


# -- running -------------------------------------------------------------------------------------


def execute(nb: nbformat.NotebookNode, folder: Path, timeout: int, progress) -> str:
    """Runs every cell in place. Returns "" or what went wrong, in one line."""
    at = {"number": 0, "source": ""}

    def started(cell, cell_index):
        at.update(number=cell_index + 1, source=cell.source)
        progress(cell_index + 1, len(nb.cells))

    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="scalelab-build-") as home:
        env = dict(
            os.environ,
            OMP_NUM_THREADS="1",
            SCALELAB_HOME=f"{home}/scalelab",
            SCALELAB_RECORD="1",
            IPYTHONDIR=f"{home}/ipython",  # not the author's start-up files
        )
        client = NotebookClient(
            nb,
            timeout=timeout,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            record_timing=False,
            store_widget_state=False,
            coalesce_streams=True,
            extra_arguments=["--log-level=ERROR"],  # not a warning about TCP for each kernel
            on_cell_start=started,
        )
        try:
            client.execute(env=env)
        except CellExecutionError as error:
            why = f"{error.ename}: {error.evalue}"
        except CellTimeoutError:
            why = f"ran longer than {timeout} s"
        except DeadKernelError:
            why = "its kernel died"
        else:
            tidy(nb)
            return "; ".join(private_paths(nb, folder.parent))
    first = next((line for line in at["source"].splitlines() if line.strip()), "")
    return f"cell {at['number']} ({first.strip()[:60]}): {' '.join(why.split())[:300]}"


def tidy(nb: nbformat.NotebookNode) -> None:
    """Takes out what belongs to this one execution."""
    nb.metadata["language_info"] = nbformat.from_dict(LANGUAGE)
    nb.metadata.pop("widgets", None)
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            # The view's model died with the kernel: JupyterLab would show an error in its place,
            # where the picture or text in the same bundle can be shown.
            output.get("data", {}).pop(WIDGET_VIEW, None)


def private_paths(nb: nbformat.NotebookNode, root: Path) -> list[str]:
    """Where saved outputs name a folder of the machine they were made on."""
    here = [str(root), sys.prefix]
    found = []
    for number, cell in enumerate(nb.cells, 1):
        text = "\n".join(output_texts(cell))
        hit = PRIVATE_PATH.search(text)
        path = hit.group() if hit else next((p for p in here if len(p) > 1 and p in text), "")
        if path:
            found.append(f"cell {number}: its output holds a path of the author's machine: {path}")
    return found


def output_texts(cell):
    for output in cell.get("outputs", []):
        yield output.get("text", "")
        yield "\n".join([output.get("evalue", ""), *output.get("traceback", [])])
        for kind, value in output.get("data", {}).items():
            if not kind.startswith("image/") or kind == "image/svg+xml":
                yield str(value)


# -- the map of lessons in README.md -------------------------------------------------------------


def lesson_map(built: dict[Source, nbformat.NotebookNode]) -> str:
    labs = {source.name for source in built if source.is_lab}
    rows = ["| # | lesson | you can afterwards | minutes | ranks | cluster | lab |"]
    rows.append("|---" * 7 + "|")
    for source, nb in built.items():
        if source.is_lab:
            continue
        h, number = nb.metadata.scalelab, source.name.split("_")[0]
        lab = f"[lab](labs/{number}.ipynb)" if number in labs else ""
        cells = (number, f"[{h.title}](notebooks/{source.name}.ipynb)", h.objective, h.minutes)
        rows.append("| " + " | ".join(map(str, (*cells, h.ranks, h.cluster, lab))) + " |")
    return "\n".join(rows)


def with_map(readme: str, table: str) -> str:
    before, begin, rest = readme.partition(MAP_BEGIN)
    _, end, after = rest.partition(MAP_END)
    if not (begin and end):
        raise SourceError(f"needs the lines {MAP_BEGIN} and {MAP_END}")
    return f"{before}{MAP_BEGIN}\n{table}\n{MAP_END}{after}"


# -- the two commands ----------------------------------------------------------------------------


def replace(path: Path, text: str) -> None:
    """The old file or the new one, never half of it."""
    path.parent.mkdir(exist_ok=True)
    part = path.parent / f".{path.name}.tmp"
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def build(root: Path, names: list[str], timeout: int) -> int:
    sources = find_sources(root)
    chosen = [s for s in sources if not names or s.name in names]
    unknown = set(names) - {s.name for s in sources}
    if unknown:
        known = ", ".join(s.name for s in sources) or "none: source/ is empty"
        print(f"build: no source {', '.join(sorted(unknown))}; there are: {known}", file=sys.stderr)
        return 2
    failed = 0
    for count, source in enumerate(chosen, 1):
        label = f"[{count}/{len(chosen)}] {source.executed.relative_to(root).as_posix()}"

        def progress(cell, cells, label=label):
            if sys.stdout.isatty():
                print(f"\r{label}: cell {cell}/{cells} ", end="", flush=True)

        start = time.monotonic()
        try:
            nb = read_source(source)
            stub = cut_solutions(source, nb)[0] if source.is_lab else None
            problem = execute(nb, source.executed.parent, timeout, progress)
        except SourceError as error:
            problem = str(error)
        back = "\r" if sys.stdout.isatty() else ""
        if problem:
            failed += 1
            kept = "the old notebook stays" if source.executed.exists() else "nothing written"
            print(f"{back}{label}: FAILED, {kept}: {problem}", flush=True)
            continue
        replace(source.executed, to_text(nb))
        if stub is not None:
            replace(source.stub, to_text(stub))
        print(f"{back}{label}: built in {time.monotonic() - start:.1f} s", flush=True)
    try:
        readme = root / "README.md"
        old = readme.read_text(encoding="utf-8")
        new = with_map(old, lesson_map({s: read_source(s) for s in sources}))
        if new != old:
            replace(readme, new)
            print("README.md: map of lessons renewed")
    except (SourceError, OSError) as error:
        failed += 1
        print(f"README.md: map of lessons not renewed: {error}")
    return 1 if failed else 0


def drift(root: Path) -> list[str]:
    """One line for each thing that is not as the sources say."""
    lines: list[str] = []
    built: dict[Source, nbformat.NotebookNode] = {}
    known: set[Path] = set()
    for source in find_sources(root):
        known |= {source.executed, source.stub}
        try:
            nb = built[source] = read_source(source)
            lines += compare(source, source.executed, nb, executed=True)
            if source.is_lab:
                stub, solutions = cut_solutions(source, nb)
                lines += compare(source, source.stub, stub, executed=False, solutions=solutions)
        except SourceError as error:
            lines.append(str(error))
    for folder in ("notebooks", "labs", "solutions"):
        for path in sorted((root / folder).rglob("*.ipynb")):
            if path not in known and ".ipynb_checkpoints" not in path.parts:
                lines.append(f"{path.relative_to(root).as_posix()}: orphan, no source makes it")
    try:
        readme = (root / "README.md").read_text(encoding="utf-8")
        if with_map(readme, lesson_map(built)) != readme:
            lines.append("README.md: the map of lessons is not current")
    except (SourceError, OSError) as error:
        lines.append(f"README.md: {error}")
    return lines


def compare(source: Source, path: Path, expected, *, executed: bool, solutions=()) -> list[str]:
    shown = path.relative_to(source.root).as_posix()
    if not path.exists():
        return [f"{shown}: missing, {source.shown} makes it"]
    text = path.read_text(encoding="utf-8")
    try:
        found = nbformat.reads(text, as_version=4)
    except Exception as error:  # nbformat raises its own, json's and jsonschema's
        return [f"{shown}: not a notebook: {' '.join(str(error).split())[:120]}"]
    lines = []
    if len(found.cells) != len(expected.cells):
        lines.append(f"{len(found.cells)} cells, {source.shown} has {len(expected.cells)}")
    for number, (have, want) in enumerate(zip(found.cells, expected.cells), 1):
        for what in ("cell_type", "source", "metadata", "id"):
            if have.get(what) != want.get(what):
                lines.append(f"cell {number}: {what} differs from {source.shown}")
    if found.metadata != expected.metadata:
        lines.append(f"metadata of the notebook differ from {source.shown}")
    lines += outputs_missing(found) if executed else outputs_left(found)
    lines += solution_leaks(found, solutions) if solutions else []
    lines += private_paths(found, source.root)
    if not lines:
        whole = copy.deepcopy(expected)
        for have, want in zip(found.cells, whole.cells):
            if want.cell_type == "code":
                want.outputs, want.execution_count = have.outputs, have.execution_count
        if to_text(whole) != text:
            lines.append("not the bytes that the builder writes")
    return [f"{shown}: {line}" for line in lines]


def outputs_left(nb: nbformat.NotebookNode) -> list[str]:
    code = [(n, c) for n, c in enumerate(nb.cells, 1) if c.cell_type == "code"]
    return [f"cell {n}: has outputs" for n, c in code if c.outputs or c.execution_count is not None]


def outputs_missing(nb: nbformat.NotebookNode) -> list[str]:
    """A notebook that was run once, from top to bottom, has cells counted 1, 2, 3..."""
    lines, count = [], 0
    for number, cell in enumerate(nb.cells, 1):
        if cell.cell_type != "code" or not cell.source.strip():
            continue
        count += 1
        if cell.execution_count != count:
            lines.append(f"cell {number}: run as number {cell.execution_count}, not {count}")
        expected = "raises-exception" in cell.metadata.get("tags", [])
        if not expected and any(o.output_type == "error" for o in cell.outputs):
            lines.append(f"cell {number}: saved with an error")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="build.py", description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a source, e.g. 00_start_here")
    parser.add_argument("--check", action="store_true", help="build nothing, report drift")
    parser.add_argument("--timeout", type=int, default=180, help="seconds a cell may take (180)")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="repository")
    args = parser.parse_args(argv)
    root = args.root.resolve()
    if not args.check:
        return build(root, args.names, args.timeout)
    if args.names:
        parser.error("--check takes no names: it proves all")
    lines = drift(root)
    for line in lines:
        print(line)
    if not lines:
        print(f"{len(find_sources(root))} sources, every notebook matches")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
