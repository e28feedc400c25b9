"""Read what other tools print: `nvidia-smi topo -m`, nccl-tests, NCCL_DEBUG=INFO logs.

    read("out.log")  ->  {"kind": "nccl-tests", "facts": {…}, "verdict": …, "why": …, "next": …}

A file is read as a stream, once, in bounded memory: each line is offered to one collector a kind,
which keeps only what it needs. What is none of the three is refused in one line; a figure that
the file does not hold is None and never guessed.
"""

from __future__ import annotations

import codecs
import html
import json
import os
import re
import select
import stat
import sys
import time
from collections.abc import Iterator

from ..cluster import UsageError
from .nccl_log import NcclLog
from .nccl_tests import NcclTests
from .topo import Topo
from .unwrap import unwrapped

CHUNK = 1 << 16  # bytes
LINE = 8192  # characters kept of one line; the widest real one (a matrix row) has under 2000
MOST = 1 << 30  # bytes looked at
CPU_SECONDS = 15.0  # spent looking; what was read by then is judged, and the reader told
SILENCE = 10.0  # seconds that a pipe given by name may stay without data
CONTROL = re.compile(r"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")
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
NO_DIGITS = str.maketrans("", "", "0123456789")
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


class Source:
    """The bytes of a file, a pipe or standard input, as numbered lines of text."""

    def __init__(self, path: str):
        self.name = "standard input" if path == "-" else _shown(path)
        self.standard = path == "-"
        self.size = 0
        self.cut = ""  # how much was looked at, if not all
        self.wait = None
        if path == "-":
            self.fd = _stdin()
            return
        if not path:
            raise UsageError("no file is named: use a path, or - for standard input")
        try:
            mode = os.stat(path).st_mode
            ordinary = stat.S_ISREG(mode) or stat.S_ISFIFO(mode)
            # without O_NONBLOCK, opening a pipe that nobody writes to would never return
            self.fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if ordinary else -1
        except FileNotFoundError:
            raise UsageError(f"{self.name}: there is no such file") from None
        except (OSError, ValueError) as e:
            why = e.strerror if isinstance(e, OSError) else str(e)
            raise UsageError(f"{self.name} cannot be read: {why}") from None
        if stat.S_ISDIR(mode):
            raise UsageError(f"{self.name} is a directory: name a file in it")
        if not ordinary:
            raise UsageError(f"{self.name} is a device or a socket, not a file")
        self.wait = SILENCE if stat.S_ISFIFO(mode) else None

    def close(self) -> None:
        if not self.standard:
            os.close(self.fd)

    def _chunks(self) -> Iterator[bytes]:
        began = time.process_time()
        heard = time.monotonic()
        while True:
            try:
                if self.wait is not None:
                    select.select([self.fd], [], [], 0.2)
                chunk = os.read(self.fd, CHUNK)
            except BlockingIOError:
                chunk = b""
            except OSError as e:
                raise UsageError(f"{self.name} cannot be read: {e.strerror}") from None
            if not chunk:
                # a pipe opened before its writer looks as if it had ended
                if self.wait and not self.size and time.monotonic() - heard < self.wait:
                    time.sleep(0.05)
                    continue
                if self.wait and self._writer_left() and time.monotonic() - heard < self.wait:
                    continue
                return
            heard = time.monotonic()
            self.size += len(chunk)
            yield chunk
            if self.size >= MOST or time.process_time() - began > CPU_SECONDS:
                self.cut = f"the first {self.size / 1e6:.0f} MB"
                return

    def _writer_left(self) -> bool:
        """Whether a pipe still has somebody at its other end."""
        poll = select.poll()
        poll.register(self.fd, select.POLLIN)
        return not any(event & select.POLLHUP for _, event in poll.poll(0))

    def lines(self) -> Iterator[tuple[int, str, str]]:
        """(line number from 1, text, text without digits), blank lines too.

        Raises UsageError for an empty or a binary file.
        """
        decoder, left, number = None, "", 0
        for chunk in self._chunks():
            if decoder is None:
                decoder = codecs.getincrementaldecoder(_encoding(chunk))("replace")
                text = decoder.decode(chunk)
                self._refuse_binary(chunk, text)
                text = text.removeprefix("\ufeff")
            else:
                text = decoder.decode(chunk)
            held = text.endswith("\r")  # the other half of CRLF may be in the next chunk
            if held:
                text = text[:-1]
            text = (left + text).replace("\r\n", "\n").replace("\r", "\n")
            whole, shapes = text.split("\n"), text.translate(NO_DIGITS).split("\n")
            left = whole.pop()[:LINE] + ("\r" if held else "")
            for line, shape in zip(whole, shapes):
                number += 1
                yield number, line[:LINE], shape
        if left.strip():
            yield number + 1, left, ""
        if not self.size:
            raise UsageError(f"{self.name} is empty")

    def _refuse_binary(self, chunk: bytes, text: str) -> None:
        for magic, what in ((b"\x1f\x8b", "gunzip"), (b"BZh", "bunzip2"), (b"\xfd7zXZ", "unxz"),
                            (b"\x28\xb5\x2f\xfd", "unzstd"), (b"PK\x03\x04", "unzip")):  # fmt: skip
            if chunk.startswith(magic):
                raise UsageError(f"{self.name} is compressed: {what} it first")
        if len(CONTROL.findall(text)) > 0.02 * len(text) + 1:
            raise UsageError(f"{self.name} is a binary file, not the text a tool printed")
        if text.count("\ufffd") > 0.3 * len(text):
            raise UsageError(f"{self.name} is not text in UTF-8 or UTF-16")


def _shown(path: str) -> str:
    """A path for one line of a terminal: nothing that moves its cursor, of long ones the end."""
    name = "".join(c if c.isprintable() else "?" for c in path)
    return name if len(name) <= 120 else "…" + name[-119:]


def _stdin() -> int:
    try:
        return sys.stdin.fileno()
    except (AttributeError, ValueError, OSError):
        raise UsageError("standard input is closed: name a file") from None


def _encoding(head: bytes) -> str:
    """PowerShell's `>` writes UTF-16."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    even, odd = head[0:2000:2], head[1:2000:2]
    if len(odd) > 8 and odd.count(0) > 0.8 * len(odd) and even.count(0) < 0.1 * len(even):
        return "utf-16-le"
    if len(odd) > 8 and even.count(0) > 0.8 * len(even) and odd.count(0) < 0.1 * len(odd):
        return "utf-16-be"
    return "utf-8"


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
