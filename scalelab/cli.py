"""The command line: words to arguments, and what goes wrong to one line and an exit status.

Exit 0 done; 1 the thing failed; 2 bad usage. What each command does is in commands.py.
"""

from __future__ import annotations

import argparse
import os
import re
import sys

from . import __version__, commands, commands_doctor
from .cluster import ClusterError, UsageError
from .commands import say
from .measure import sweep
from .runs import RunError

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
    args, unknown = parser.parse_known_args(_join_negatives(sys.argv[1:] if argv is None else argv))
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
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    run = subparsers.add_parser(
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
    run.set_defaults(function=commands.do_run, parser=run)

    bench = subparsers.add_parser(
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
    bench.set_defaults(function=commands.do_bench, parser=bench)

    doctor = subparsers.add_parser(
        "doctor", allow_abbrev=False, help="is this cluster fit for a job?",
        description="Examine every host and every pair of hosts before a job: names, ports, MTU, "
        "speed, storage, environment. Ends within 20 seconds. With --join, of machines that are "
        "there already: run it on each, with one HOST:PORT. With --launch, of launch lines.",
        epilog="Exit status: 0 nothing failed, 1 something did, 2 bad usage, 130 stopped by "
        "Ctrl-C. What could not be checked is said, and does not count as good.",
    )  # fmt: skip
    add_cluster_flags(doctor)
    doctor.add_argument("--node-env", action="append", default=[], metavar="I:K=V",
                        help="a variable of the job on node I only; may be repeated")  # fmt: skip
    doctor.add_argument("--nproc-per-node", type=_whole, default=1, metavar="P",
                        help="ranks on each node that the job will have (default 1)")  # fmt: skip
    doctor.add_argument("--endpoint", metavar="HOST:PORT", help="where the job's ranks will meet "
                        "(default: the first node, port 29400)")  # fmt: skip
    doctor.add_argument("--shared", action="append", default=[], metavar="DIR",
                        help="a directory that all nodes must share; may be repeated")  # fmt: skip
    doctor.add_argument("--data", action="append", default=[], metavar="PATH",
                        help="files that all nodes must see alike; may be repeated")  # fmt: skip
    doctor.add_argument("--line-rate", metavar="RATE", help="what a host's link should carry one "
                        "way, such as 100gbit (default: --rate, else judged by peers)")  # fmt: skip
    doctor.add_argument("--join", metavar="HOST:PORT", help="meet the other machines that run "
                        "this there; --nodes says how many there are in all")  # fmt: skip
    doctor.add_argument("--launch", metavar="FILE", help="read the launch lines of all nodes "
                        "instead, and start nothing; - for standard input")  # fmt: skip
    doctor.add_argument("--timeout", type=_seconds, default=60.0, metavar="S",
                        help="how long --join waits for the others (default 60)")  # fmt: skip
    doctor.add_argument("--out", metavar="FILE", help="keep the JSON result here too")
    doctor.add_argument("--json", action="store_true", help="one JSON object on stdout")
    doctor.set_defaults(function=commands_doctor.do_doctor, parser=doctor)

    clean = subparsers.add_parser(
        "clean", allow_abbrev=False, help="end this user's own leftovers, and nobody else's",
        description="End processes of clusters of yours whose notebook or command is gone.",
    )  # fmt: skip
    clean.add_argument("--json", action="store_true", help="one JSON object on stdout")
    clean.set_defaults(function=commands.do_clean, parser=clean)

    check = subparsers.add_parser(
        "check", allow_abbrev=False, help="grade a lab", epilog=EPILOG,
        description="Run a lab's notebook in a kernel of its own and grade every exercise.",
    )  # fmt: skip
    check.add_argument("lab", metavar="LAB", help="a lab's number, or the path of its notebook")
    check.add_argument("--timeout", type=_seconds, default=600.0, metavar="S",
                       help="limit of one cell, in seconds (default 600)")  # fmt: skip
    check.add_argument("--json", action="store_true", help="one JSON object on stdout")
    check.set_defaults(function=commands.do_check, parser=check)

    progress = subparsers.add_parser(
        "progress", allow_abbrev=False, help="what is done, what is next",
        description="What you have passed, and the next exercise.",
    )  # fmt: skip
    progress.add_argument("--json", action="store_true", help="one JSON object on stdout")
    progress.set_defaults(function=commands.do_progress, parser=progress)

    read = subparsers.add_parser(
        "read", allow_abbrev=False, help="what another tool's output means",
        description="Read the output of nvidia-smi topo -m, of nccl-tests or of NCCL_DEBUG=INFO: "
        "facts, a verdict, why, and what to do next.",
        epilog="Exit status: 0 the file was read, whatever its verdict; 2 it cannot be read, or is "
        "none of the three.",
    )  # fmt: skip
    read.add_argument("file", metavar="FILE", help="what the tool printed; - for standard input")
    read.add_argument("--json", action="store_true", help="one JSON object on stdout")
    read.set_defaults(function=commands.do_read, parser=read)
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
