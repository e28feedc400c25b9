"""The command line: thin. Exit 0 done; 1 the thing failed; 2 bad usage, in one line.

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

from . import __version__, cluster, runs
from .cluster import ClusterError, UsageError
from .measure import sweep
from .runs import Run, RunError
from .runs.record import write_json

LOG_LINES, LINE_CHARS = 200, 1000  # of each rank's log, printed at the end
SWITCHES = ("--json", "--help", "--version")  # flags without a value
EPILOG = (
    "Exit status: 0 done, 1 it failed (the first failing rank is named), 2 bad usage, 130 stopped "
    "by Ctrl-C. With --json there is no object where no run was started."
)


class Parser(argparse.ArgumentParser):
    """argparse, with errors in one line."""

    def error(self, message: str) -> None:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `scalelab` command."""
    _open_outputs()
    parser = _parser()
    args, unknown = parser.parse_known_args(
        _join_negatives(sys.argv[1:] if argv is None else argv)
    )
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if not args.command:
        parser.print_help()
        return 0
    try:
        return args.function(args)
    except UsageError as e:
        say(f"scalelab {args.command}: {e}")
        return 2
    except (ClusterError, RunError) as e:
        say(f"scalelab {args.command}: {e}")
        return 1
    except KeyboardInterrupt:
        say(f"scalelab {args.command}: interrupted; nothing is left running")
        return 130
    except BrokenPipeError:  # the reader of our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except OSError as e:
        say(f"scalelab {args.command}: {e}")
        return 1


def _open_outputs() -> None:
    """A closed stderr must not make stdout hold what was for it; a terminal of few characters
    must not end a run in an error."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        elif hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="replace")


def _join_negatives(argv: list[str]) -> list[str]:
    """["--rate", "-1gbit"] to ["--rate=-1gbit"]: argparse would take the value for a flag, and
    its complaint would not say what is wrong with it. What follows SCRIPT is left as it is."""
    joined: list[str] = []
    for i, arg in enumerate(argv):
        flag = argv[i - 1] if i else ""
        takes_value = flag.startswith("--") and "=" not in flag and flag not in SWITCHES
        if takes_value and re.match(r"-[\d.]", arg):
            joined[-1] = f"{flag}={arg}"
        elif arg == "--" or (i and not takes_value and not arg.startswith("-")):
            return joined + argv[i:]
        else:
            joined.append(arg)
    return joined


def _parser() -> Parser:
    parser = Parser(prog="scalelab", description="Distributed training on emulated hosts.",
                    allow_abbrev=False)  # fmt: skip
    parser.set_defaults(parser=parser)
    parser.add_argument("--version", action="version", version=f"scalelab {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    run = commands.add_parser(
        "run", allow_abbrev=False, help="real torchrun on every node of a cluster", epilog=EPILOG,
        description="Start SCRIPT under torchrun on every node, follow it, and record it.",
    )  # fmt: skip
    add_cluster_flags(run)
    run.add_argument("--nproc-per-node", type=_whole, default=1, metavar="P",
                     help="ranks on each node (default 1)")  # fmt: skip
    run.add_argument("--node-env", action="append", default=[], metavar="I:K=V",
                     help="set a variable for node I's ranks only; may be repeated")  # fmt: skip
    run.add_argument("--timeout", type=_seconds, default=600.0, metavar="S",
                     help="end everything after S seconds (default 600)")  # fmt: skip
    run.add_argument("--run-dir", metavar="DIR", help="where the record goes (default: a new "
                     "directory under $SCALELAB_HOME/runs, or ~/.scalelab/runs)")  # fmt: skip
    run.add_argument("--json", action="store_true", help="one JSON object on stdout")
    run.add_argument("script", metavar="SCRIPT", help="a training script")
    run.add_argument("args", nargs=argparse.REMAINDER, metavar="…", help="its own arguments")
    run.set_defaults(function=do_run, parser=run)

    bench = commands.add_parser(
        "bench", allow_abbrev=False, help="time a collective, as nccl-tests does", epilog=EPILOG,
        description="Time a collective over a range of sizes on every node, check its results, "
                    "count the bytes on the wire, and fit latency (alpha) and bandwidth (beta).",
    )  # fmt: skip
    bench.add_argument("op", metavar="OP", help=f"one of {', '.join(sweep.OPS)}")
    add_cluster_flags(bench)
    bench.add_argument("--nproc-per-node", type=_whole, default=1, metavar="P",
                       help="ranks on each node (default 1)")  # fmt: skip
    bench.add_argument("--sizes", default="4K:64M", help="bytes: 4K:64M doubles (the default), "
                       "4K:64M:4 takes every fourth, 4K,1M is a list")  # fmt: skip
    bench.add_argument("--dtype", default="float32", help=f"one of {', '.join(sweep.DTYPES)}")
    bench.add_argument("--backend", default="auto", help="auto (default), gloo or nccl")
    bench.add_argument("--line-rate", metavar="RATE", help="what a host's link carries one way, "
                       "such as 100gbit or 450GB/s (emulated links: known)")  # fmt: skip
    bench.add_argument("--timeout", type=_seconds, default=600.0, metavar="S",
                       help="end everything after S seconds (default 600)")  # fmt: skip
    bench.add_argument("--out", metavar="FILE", help="keep the JSON result here as well as in the "
                       "run's directory")  # fmt: skip
    bench.add_argument("--json", action="store_true", help="one JSON object on stdout")
    bench.set_defaults(function=do_bench, parser=bench)

    clean = commands.add_parser(
        "clean", allow_abbrev=False, help="end this user's own leftovers, and nobody else's",
        description="End processes of clusters of yours whose notebook or command is gone.",
    )  # fmt: skip
    clean.add_argument("--json", action="store_true", help="one JSON object on stdout")
    clean.set_defaults(function=do_clean, parser=clean)

    check = commands.add_parser(
        "check", allow_abbrev=False, help="grade a lab", epilog=EPILOG,
        description="Run a lab's notebook in a kernel of its own and grade every exercise.",
    )  # fmt: skip
    check.add_argument("lab", metavar="LAB", help="a lab's number, or the path of its notebook")
    check.add_argument("--timeout", type=_seconds, default=600.0, metavar="S",
                       help="limit of one cell, in seconds (default 600)")  # fmt: skip
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")
    check.set_defaults(function=do_check, parser=check)

    progress = commands.add_parser(
        "progress", allow_abbrev=False, help="what is done, what is next",
        description="What you have passed, and the next exercise.",
    )  # fmt: skip
    progress.add_argument("--json", action="store_true", help="one JSON object on stdout")
    progress.set_defaults(function=do_progress, parser=progress)

    read = commands.add_parser(
        "read", allow_abbrev=False, help="what another tool's output means",
        description="Read the output of nvidia-smi topo -m, of nccl-tests or of NCCL_DEBUG=INFO: "
        "facts, a verdict, why, and what to do next.",
        epilog="Exit status: 0 the file was read, whatever its verdict; 2 it cannot be read, or is "
        "none of the three.",
    )  # fmt: skip
    read.add_argument("file", metavar="FILE", help="what the tool printed; - for standard input")
    read.add_argument("--json", action="store_true", help="one JSON object on stdout")
    read.set_defaults(function=do_read, parser=read)
    return parser


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """The flags that every command with a cluster shares; read by `start_cluster`."""
    parser.add_argument("--cluster", default="auto", metavar="KIND",
                        help="auto (default), local or virtual")  # fmt: skip
    parser.add_argument("--nodes", type=_whole, default=2, metavar="N", help="hosts (default 2)")
    link = parser.add_argument_group("links of emulated hosts")
    link.add_argument("--rate", help="each way, e.g. 100mbit, 1gbit (default: not limited)")
    link.add_argument("--delay", help="one way, e.g. 200us, 5ms; a round trip takes twice that")
    link.add_argument("--jitter", help="added to the delay at random, up to this much, e.g. 1ms")
    link.add_argument("--loss", help="of packets, one way, e.g. 0.1%%")
    link.add_argument("--mtu", help="bytes, e.g. 9000 (default 1500)")


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
    node_env = _node_env(args.node_env, args.nodes)
    # Before anything is started; launch() would refuse these too.
    runs.read_script(args.script)
    runs.check_count("nproc-per-node", args.nproc_per_node)
    runs.check_timeout(args.timeout)
    for settings in node_env.values():
        runs.check_env(settings)
    if args.run_dir == "":
        raise UsageError("--run-dir '': use the path of a directory")
    _end_on_signals()
    with start_cluster(args, args.nodes * args.nproc_per_node) as hosts:
        run = runs.launch(
            args.script, args.args, cluster=hosts, nproc_per_node=args.nproc_per_node,
            timeout=args.timeout, run_dir=args.run_dir, node_env=node_env,
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
    out = _writable(args.out) if args.out is not None else None
    _end_on_signals()
    with start_cluster(args, args.nodes * args.nproc_per_node) as hosts:
        going = sweep.Sweep(
            hosts, args.op, args.sizes, dtype=args.dtype, backend=args.backend,
            nproc_per_node=args.nproc_per_node, line_rate=args.line_rate, timeout=args.timeout,
        )  # fmt: skip
        interrupted = _follow(going)
    run = going.run
    whole = run.status == "succeeded"
    result = going.result(partial=not whole)
    print(sweep.table(result), file=sys.stderr if args.json else sys.stdout)
    wrong = sum(row["wrong"] for row in result["rows"])
    if wrong:
        say(f"{wrong} results were wrong: this network or its software damages data")
    if not whole:
        _show_end(run)
    elif out:
        write_json(out, result)
    say(f"record: {run.dir}" + (f", {out}" if whole and out else ""))
    if args.json:
        print(json.dumps(result))
    if interrupted:
        return 130
    return 0 if whole and not wrong else 1


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


def _end_on_signals() -> None:
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
                width = shutil.get_terminal_size().columns - 1
                print("\r\033[K" + going.words()[:width], end="", file=sys.stderr, flush=True)
        if live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(sig, signal.SIG_IGN)  # it is being done, in bounded time
        say("stopping …")
        going.stop()
        return True
    return False


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


def _writable(text: str) -> Path:
    """A file's path, once it is known that it can be written. Raises UsageError."""
    path = Path(text).expanduser().absolute()
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--out {text!r}: no file can be written there")
    return path


def _node_env(values: list[str], nodes: int) -> dict[int, dict[str, str]]:
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


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds") from None


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """To the person, not to the program that reads stdout."""
    print(text, file=sys.stderr, flush=True)
