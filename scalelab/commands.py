"""What each command of `scalelab` does: thin, since the work is in the layers below.

With --json one JSON object goes to stdout and everything else to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from . import cluster, runs
from .cluster import UsageError
from .measure import sweep
from .runs import Run, RunError
from .runs.record import write_json

LOG_LINES, LINE_CHARS = 200, 1000  # of each rank's log, printed at the end


def start_cluster(args: argparse.Namespace, ranks: int) -> cluster.Cluster:
    """The cluster that the flags ask for. Warns where it is more than this machine holds."""
    started = cluster.start(
        args.cluster, args.nodes, rate=args.rate, delay=args.delay, jitter=args.jitter,
        loss=args.loss, mtu=args.mtu,
    )  # fmt: skip
    most = cluster.max_ranks()
    if ranks > most:
        say(f"warning: {ranks} ranks are more than this machine holds well ({most}): expect "
            "timings that tell of its scheduler rather than of training")  # fmt: skip
    if started.why:
        say(f"cluster local, without separate hosts: {started.why}")
    return started


def do_run(args: argparse.Namespace) -> int:
    """`scalelab run`."""
    by_node = node_env(args.node_env, args.nodes)
    # Before anything is started; launch() would refuse these too.
    runs.read_script(args.script)
    runs.check_count("nproc-per-node", args.nproc_per_node)
    runs.check_timeout(args.timeout)
    for settings in by_node.values():
        runs.check_env(settings)
    if args.run_dir == "":
        raise UsageError("--run-dir '': use the path of a directory")
    end_on_signals()
    with start_cluster(args, args.nodes * args.nproc_per_node) as hosts:
        run = runs.launch(
            args.script, args.args, cluster=hosts, nproc_per_node=args.nproc_per_node,
            timeout=args.timeout, run_dir=args.run_dir, node_env=by_node,
        )  # fmt: skip
        interrupted = _follow(run)
    _show(run, to=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(run.record()))
    if interrupted:
        return 130
    return 0 if run.status == "succeeded" else 1


def do_bench(args: argparse.Namespace) -> int:
    """`scalelab bench OP`."""
    # Before a cluster is started; Sweep would refuse these too.
    sweep.check(args.op, args.sizes, args.dtype, args.backend, args.line_rate)
    runs.check_count("nproc-per-node", args.nproc_per_node)
    runs.check_timeout(args.timeout)
    out = writable(args.out) if args.out is not None else None
    end_on_signals()
    with start_cluster(args, args.nodes * args.nproc_per_node) as hosts:
        going = sweep.Sweep(
            hosts, args.op, args.sizes, dtype=args.dtype, backend=args.backend,
            nproc_per_node=args.nproc_per_node, line_rate=args.line_rate, timeout=args.timeout,
        )  # fmt: skip
        interrupted = _follow(going)
    run, doubt = going.run, ""
    whole = run.status == "succeeded"
    try:
        result = going.result(partial=not whole)
    except RunError as e:  # some of the rows never came
        whole, doubt, result = False, str(e), going.result(partial=True)
    print(sweep.table(result), file=sys.stderr if args.json else sys.stdout)
    wrong = sum(row["wrong"] for row in result["rows"])
    if wrong:
        say(f"{wrong} results were wrong: this network or its software damages data")
    _show_end(run)
    if doubt:
        say(doubt)
    kept = whole and out and keep(out, result)
    say(f"record: {run.dir}" + (f", {out}" if kept else ""))
    if out and not whole:
        say(f"{out} was not written: the sweep is not complete")
    if args.json:
        print(json.dumps(result))
    if interrupted:
        return 130
    return 0 if whole and not wrong and (kept or not out) else 1


def do_clean(args: argparse.Namespace) -> int:
    """`scalelab clean`."""
    ended, alive = cluster.clean()
    if args.json:
        print(json.dumps({"ended": ended, "in_use": alive}))
    else:
        print(f"ended {len(ended)} leftover processes" if ended else "nothing was left behind")
        if alive:
            print(f"left alone: {len(alive)} processes of clusters in use")
    return 0


def do_check(args: argparse.Namespace) -> int:
    """`scalelab check`."""
    from . import grading

    try:
        path = grading.find_notebook(args.lab)
    except FileNotFoundError as e:
        raise UsageError(str(e)) from None
    runs.check_timeout(args.timeout)
    say(f"grading {path} …")
    rows = grading.grade(path, args.timeout)
    if not rows:
        raise UsageError(f"{path}: no exercises of this lab are known")
    passed = sum(row["passed"] for row in rows)
    if args.json:
        result = {"lab": path.stem, "passed": passed, "of": len(rows), "exercises": rows}
        print(json.dumps(result))
    else:
        for row in rows:
            print(f"{'passed ' if row['passed'] else 'not yet'}  {row['id']}  {row['title']}")
            print("         " + row["message"].replace("\n", "\n         "))
        print(f"{passed} of {len(rows)} passed")
    return 0 if passed == len(rows) else 1


def do_progress(args: argparse.Namespace) -> int:
    """`scalelab progress`."""
    from . import grading

    done = grading.summary()
    if args.json:
        print(json.dumps(done))
        return 0
    for lab, row in done["labs"].items():
        bar = "■" * len(row["passed"]) + "□" * (row["of"] - len(row["passed"]))
        print(f"lab {lab}  {bar}  {len(row['passed'])} of {row['of']}")
    print(f"questions answered rightly: {done['questions']}; predictions: {done['predictions']}")
    if done["next"]:
        exercise = grading.find(done["next"])
        print(f"next: {exercise.id} {exercise.title} ({exercise.minutes} minutes), "
              f"labs/{exercise.lab}.ipynb")  # fmt: skip
    else:
        print("every exercise has passed")
    return 0


def do_read(args: argparse.Namespace) -> int:
    """`scalelab read`."""
    from .doctor.read import read, table

    result = read(args.file)
    if args.json:
        print(json.dumps(result))
        return 0
    print(f"{result['kind']}: {result['verdict']}")
    for key in ("why", "next"):
        print(f"{key + ':':<6}{result[key]}")
    print()
    print("\n".join(table(result["facts"])))
    return 0


def end_on_signals() -> None:
    """`kill` and a closed terminal end a run like Ctrl-C does."""
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _interrupt)


def _follow(going: Run | sweep.Sweep) -> bool:
    """Until it has ended; on a terminal, with its state in one line. True if it was interrupted,
    and so ended early."""
    try:
        live = sys.stderr.isatty()
        while not going.done:
            going.wait(0.25 if live else 1.0)
            if live:
                show_state(going.words())
        show_state()
    except KeyboardInterrupt:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)  # it is being done, in bounded time
        say("stopping …")
        going.stop()
        return True
    return False


def show_state(words: str = "") -> None:
    """On a terminal, what is going on, in one line that the next one is written over; "" to leave
    nothing of it."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns - 1
        print("\r\033[K" + words[:width], end="", file=sys.stderr, flush=True)


def _show(run: Run, to) -> None:
    """What each rank printed, in rank order, then how it ended."""
    for entry in run.ranks:
        lines = run.log(entry["rank"]).splitlines()
        print(f"── rank {entry['rank']} on {entry['node']} ({entry['addr']})", file=to)
        if len(lines) > LOG_LINES:
            print(f"… {len(lines) - LOG_LINES} earlier lines in {run.dir / 'logs'}", file=to)
        for line in lines[-LOG_LINES:]:
            print(line if len(line) <= LINE_CHARS else line[:LINE_CHARS] + " …", file=to)
    _show_end(run)
    print(f"{run.words()}\nrecord: {run.dir}", file=to)


def _show_end(run: Run) -> None:
    """What went wrong, if anything: which rank failed first and why."""
    for problem in dict.fromkeys(run.problems):
        say(f"warning: {problem}")
    if run.first_failure:
        failure = run.first_failure
        say(f"first failure: {runs.who(failure)}\n{failure['error']}")
    elif run.status == "timed_out":
        say(run.words())


def writable(text: str) -> Path:
    """A file's path, once it is known that it can be written. Raises UsageError."""
    try:
        path = Path(text).expanduser().resolve()  # a link stays one
        # It is replaced in one step, which takes the right to write into its directory, and would
        # put an end to a device or a pipe.
        new = not path.exists()
        if not os.access(path.parent, os.W_OK | os.X_OK) or not (
            new or (path.is_file() and os.access(path, os.W_OK))
        ):
            raise OSError
    except (OSError, RuntimeError):  # RuntimeError: ~nobody, links in a circle
        raise UsageError(f"--out {text[:200]!r}: no file can be written there") from None
    return path


def keep(path: Path, result: dict) -> bool:
    """Write a result to where the person wants it; said, not raised, where that fails."""
    try:
        write_json(path, result)
    except OSError as e:
        say(f"warning: {path} was not written: {e.strerror}")
        return False
    return True


def node_env(values: list[str], nodes: int) -> dict[int, dict[str, str]]:
    """--node-env flags by node index. Raises UsageError."""
    found: dict[int, dict[str, str]] = {}
    for value in values:
        index, colon, setting = value.partition(":")
        name, equals, text = setting.partition("=")
        if not (colon and equals and name and re.fullmatch("[0-9]+", index)):
            raise UsageError(f"--node-env {value!r}: use I:NAME=VALUE, such as 1:OMP_NUM_THREADS=2")
        if int(index) >= nodes:
            raise UsageError(f"--node-env {value!r}: there are nodes 0 to {nodes - 1}")
        found.setdefault(int(index), {})[name] = text
    return found


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """To the person, not to the program that reads stdout."""
    print(text, file=sys.stderr, flush=True)
