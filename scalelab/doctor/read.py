"""Read what other tools print: `nvidia-smi topo -m`, nccl-tests, NCCL_DEBUG=INFO logs.

    read("out.log")  ->  {"kind": "nccl-tests", "facts": {…}, "verdict": …, "why": …, "next": …}

A file is read as a stream, once, in bounded memory: each line is offered to one collector a kind,
which keeps only what it needs. What is none of the three is refused in one line; a figure that
the file does not hold is None and never guessed.
"""

from __future__ import annotations

import html
import json
import re

from ..cluster import UsageError
from .nccl_log import NcclLog
from .nccl_tests import NcclTests
from .source import Source
from .topo import Topo
from .unwrap import unwrapped

STRAY = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")  # in text: none of them is meant

ANSI = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b\][^\x07]*\x07|\^\[\[[0-9;]*m|\[[04]m"
)
# `mpirun --tag-output` and its successors put this anywhere in a line, even inside a row
MPI_TAG = re.compile(r"\[[^\[\]\s]{1,80},\d+\]\s?<std(?:out|err|diag)>:?")
HTML_TAG = re.compile(
    r"</?(?:pre|code|br|span|div|td|th|tr|p|li|a|b|i|em|strong|font|details|summary)\b[^<>]*>", re.I
)
# A line without any of these words belongs to no collector; most of a training log is that.
WORDS = (
    "NCCL", "INFO", "WARN", "GPU", "NIC", "PIX", "PXB", "PHB", "SYS", "NODE", "SOC", "Affinity",
    "busbw", "_perf", "Rank", "bandwidth", "Using devices", "Out of bounds", "nThread", "ailure",
    "float", "half", "double", "int", "char", "bf16", "fp8", "f8e", "slurm", "srun", "ignal",
    "ault", "FAILED", "CANCELLED", "Killed", "-smi", "-SMI", "Traceback", "torch.", "XGMI", "rror",
    "imeout", "rccl", "mpirun", "elink", "memory", "topo", "nccl",
)  # fmt: skip
QUIET = (  # facts beside the main ones: left out of a person's table where they are empty
    "nic_names", "gpu_numa", "peer_access", "warnings", "bootstrap", "hcas", "channels",
    "gdr_channels", "env", "runs", "shared_gpus", "gpus",
)  # fmt: skip
SHAPES = 20_000  # kinds of line remembered, each without its digits
ENOUGH, DULL = 2000, 100  # a kind of line is passed over after 2000 of NCCL's, or 20 of no use


def read(path: str) -> dict:
    """What the file holds and means. "-" is standard input.

    Returns kind ("topo", "nccl-tests" or "nccl-log"), facts, verdict, why and next.
    Raises UsageError, in one line, for what cannot be read or is none of the three.
    """
    source = Source(path)
    topo, tests, log = Topo(), NcclTests(), NcclLog()
    foreign = Foreign()
    seen: dict[str, int] = {}  # how often a kind of line came, weighted
    try:
        for number, line, shape in unwrapped(source.lines()):
            weight = seen.get(shape, 0)
            # within a row that is cut, any line may be its rest
            if not (tests.pending or topo.open or log.unfinished):
                if weight >= ENOUGH:
                    continue
                if not any(word in line for word in WORDS):
                    continue
            line = clean(line)
            if tests.row(line):
                continue
            taken = topo.feed(number, line)
            in_log = log.feed(number, line)
            taken |= tests.feed(number, line, in_log)
            if not in_log:
                foreign.feed(line)
            if not taken and (weight or len(seen) < SHAPES) and len(shape) < 500:
                seen[shape] = weight + (1 if in_log else DULL)
    finally:
        source.close()
    chosen = choose(topo, tests, log)
    if chosen is None:
        raise UsageError(f"{source.name}: {foreign.words(topo, source)}")
    if chosen is tests:
        tests.log = log
    try:
        result = chosen.result()
    except ValueError as e:
        raise UsageError(f"{source.name}: {e}") from None
    for other, held, what in (
        (topo, topo.rows > 1, "a matrix of nvidia-smi topo -m"),
        (tests, tests.measured, "nccl-tests' output"),
        (log, log.spoken > 2 and chosen is topo, "a log of NCCL's"),
    ):
        if held and other is not chosen:
            result["why"] += f" The file also holds {what}, which is not judged here."
    if source.cut:
        result["why"] += f" Only {source.cut} were looked at."
    return result


def choose(topo: Topo, tests: NcclTests, log: NcclLog) -> Topo | NcclTests | NcclLog | None:
    """What the file is mainly about, or None."""
    if topo.rows and topo.rows > tests.rows and topo.rows * 3 > log.lines:
        return topo
    # nccl-tests run with NCCL_DEBUG=INFO print hundreds of lines of log around their table; a
    # log in which the table never began, and in which its header is a small part, is a log.
    if tests.measured or (tests.lines and tests.lines * 5 >= log.lines):
        return tests
    if log.known:
        return log
    return topo if topo.rows else None


def table(facts: dict) -> list[str]:
    """Facts as lines for a person: name, then what it is; long ones are shortened."""
    lines = []
    for name, value in facts.items():
        if name in QUIET and not _holds(value):
            continue
        if name == "links" and len(value) > 1 and len(set(value.values())) == 1:
            text = f"{next(iter(value.values()))} between all {len(value)} pairs"
        elif value is None:
            text = "not shown"
        elif isinstance(value, bool):
            text = "yes" if value else "no"
        elif isinstance(value, dict):
            text = ", ".join(f"{k}: {_short(v)}" for k, v in value.items()) or "none"
        elif isinstance(value, list):
            text = ", ".join(map(_short, value)) or "none"
        else:
            text = _short(value)
        if len(text) > 400:
            text = text[:400] + " … (all with --json)"
        lines.append(f"{name:<18}{text}")
    return lines


def _holds(value) -> bool:
    """Whether anything in it is known."""
    within = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (
        [value])  # fmt: skip
    return any(v not in (None, False, 0, "", []) for v in within)


def _short(value) -> str:
    if isinstance(value, dict):
        return " ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list):
        return " ".join(map(_short, value))
    return f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)


def clean(line: str) -> str:
    """Without colours, mpirun's tags, HTML, a container's JSON around it, and a table's border."""
    if line.startswith("{"):
        line = _logged(line)
    if "<" in line:
        line = HTML_TAG.sub(" ", line)
    if "&" in line:
        line = html.unescape(line)
    if "\x1b" in line or "[" in line:
        line = MPI_TAG.sub(" ", ANSI.sub("", line))
    if not line.isprintable():
        line = STRAY.sub("", line.replace("\xa0", " ").replace("\u200b", ""))
    return line.rstrip(" \t|│")


def _logged(line: str) -> str:
    """What was logged, where each line is an object: {"log": "…\\n", "stream": "stdout", …}."""
    try:
        entry = json.loads(line)
    except ValueError:
        return line
    for key in ("log", "message", "msg", "textPayload", "MESSAGE"):
        if isinstance(entry.get(key), str):
            return entry[key].strip("\n")
    return line


class Foreign:
    """What a file that is none of the three might be, so that its reader knows what to run."""

    SIGNS = (
        (r"\| NVIDIA-SMI\b|\bNVIDIA-SMI \d", "this is nvidia-smi's table, which shows no links: "
         "run nvidia-smi topo -m"),
        (r"rocm-smi|ROCm System Management|\bXGMI\b|amd-smi", "this is of AMD's tools: only "
         "nvidia-smi topo -m, nccl-tests and NCCL logs are read"),
        (r"xpu-smi|\bXelink\b|GPU \d/\d\|", "this is of Intel's tools: only nvidia-smi topo -m, "
         "nccl-tests and NCCL logs are read"),
        (r"NCCL version \d", "this names NCCL's version only: run with NCCL_DEBUG=INFO"),
        (r"Watchdog caught|torch\.distributed|NCCL error|Traceback|slurmstepd", "this is a log of "
         "a failed job without NCCL_DEBUG=INFO lines: run again with NCCL_DEBUG=INFO"),
    )  # fmt: skip
    PATTERN = re.compile("|".join(f"({p})" for p, _ in SIGNS))

    def __init__(self):
        self.found: set[int] = set()

    def feed(self, line: str) -> None:
        match = self.PATTERN.search(line)
        if match:
            self.found.add(match.lastindex - 1)

    def words(self, topo: Topo, source: Source) -> str:
        accepted = "not nvidia-smi topo -m, nccl-tests output or an NCCL_DEBUG=INFO log"
        where = f"in {source.cut} " if source.cut else ""
        if topo.peer:
            return ("this is the matrix of nvidia-smi topo -p2p, which says what peer access is "
                    "supported: run nvidia-smi topo -m")  # fmt: skip
        if topo.header_seen and not self.found & {1, 2}:
            return "a matrix of nvidia-smi topo -m begins here, but its rows are missing"
        if self.found:
            return self.SIGNS[min(self.found)][1]
        return f"{where}{accepted}"
