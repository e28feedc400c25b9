"""Output of nccl-tests (all_reduce_perf and the others), all versions since 2.0.

The rows say how many bytes, how long, algbw and busbw in GB/s, out of place and in place. Old
versions print a largest `error` where new ones count `#wrong`, and no root. With NCCL_DEBUG=INFO
log lines stand between the two halves of a row, so a row is put together from its pieces.
"""

from __future__ import annotations

import re
from collections import Counter

from . import nccl_tests_facts
from .nccl_tests_jobs import Device, Jobs

OPS = (
    "all_reduce", "all_gather", "reduce_scatter", "alltoallv", "alltoall", "broadcast", "reduce",
    "sendrecv", "gather", "scatter", "hypercube",
)  # fmt: skip
NAMED = re.compile(rf"(?<![A-Za-z])({'|'.join(OPS)})(?:_perf|(?=\.cu:\d))")
# "nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) …"
BEGIN = re.compile(r"\bnThreads? \d+\s+nGpus \d+\s+minBytes \d+\s+maxBytes \d+")
USING = re.compile(r"\bUsing devices\b")
# "#  Rank  0 Group  0 Pid 418 on node-a device  0 [0000:1b:00] NVIDIA H100 80GB HBM3"
DEVICE = re.compile(
    r"\bRank\s+(\d{1,7})\s+(?:Group\s+(\d+)\s+)?(?:Pid\s+(\d+)\s+)?on\s+(\S+)\s+device\s+(\d{1,5})"
    r"\s+\[([0-9a-fA-Fx:.]+)\]\s*(.*)"
)
COLUMNS = re.compile(
    r"\b(?:size|bytes)\s+(?:count|N)\s+type\b.*\balgbw\s+busbw\s+(#wrong|error|res)"
)
NUMBER = r"(?:[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:inf|nan))"
TYPES = (
    "char|u?int(?:8|32|64)?|half|float|double|bfloat16|bf16|f?fp?8_?e\\d+m\\d+|f8e\\dm\\d|float8\\w*"
    "|int4|fp32|fp16|fp64"
)
# wrong values are counted, or N/A, or (old) a largest error: never a number with a point, as the
# figure before it has in a row that is cut
WRONG = r"(?:\d+(?:\.\d+)?[eE][-+]?\d+|\d+|N/A|[-+]?(?:inf|nan))"
TYPE, IS_WRONG = re.compile(TYPES), re.compile(WRONG)
HEAD = re.compile(rf"(?:^|[\s>|:])(\d{{1,15}})\s+(\d{{1,15}})\s+({TYPES})\b[ \t]*(.*)$")
REDOP = re.compile(r"^(sum|prod|max|min|avg|mulsum|none|all)\b\s*(.*)$")
GROUP = re.compile(rf"({NUMBER})\s+({NUMBER})\s+({NUMBER})\s+({WRONG})(?=\s|$)")
ONLY_GROUPS = re.compile(rf"^\s*(?:{NUMBER}\s+{NUMBER}\s+{NUMBER}\s+{WRONG}\s*){{1,2}}$")
AVERAGE = re.compile(r"\bAvg bus bandwidth\s*:\s*(\S+)")
BOUNDS = re.compile(r"\bOut of bounds values\s*:\s*(\d{1,15})\s*(OK|FAILED)?")
FAILURE = re.compile(
    r"(Test (?:NCCL|CUDA|MPI) failure \S+ .*|Test failure \S+|(?:CUDA|Cuda) failure \S+:\d+ .*"
    r"|NCCL failure \S+ .*|Test timeout.*)"
)
KILLED = re.compile(
    r"(Segmentation fault|Bus error|Signal: \w.*|exited on signal \d+.*|CANCELLED AT .*"
    r"|TIME LIMIT|mpirun noticed.*|srun: error: .*|Killed)"
)
TAG = re.compile(r"(?:^|(?<=\s))\d{1,4}: |\[\d+\]")  # of srun or mpiexec, even within a row
MOST = 5000  # of whatever is kept


class Run:
    """One table: from its header to its average."""

    def __init__(self):
        self.name = None  # of the test, as it stands before the table
        self.devices: list[Device] | None = None  # that were listed for it
        self.rows = 0
        self.sizes: Counter = Counter()  # (bytes, operation, root) of each row
        self.smallest = None  # (bytes, busbw)
        self.best = None  # largest busbw
        self.peak = None  # (bytes, algbw, busbw) of the row with the largest busbw
        self.largest = None  # (bytes, busbw) of the largest message
        self.half = None  # busbw one row before it
        self.sent = False  # algbw above zero was seen
        self.ratio = [0.0, 9.0]  # busbw / algbw lies between these, by the digits printed
        self.redop = self.root = None
        self.wrong = 0
        self.checked = False
        self.average = self.bounds = None
        self.bounds_failed = False
        self.ended = False


class NcclTests:
    """Collects one or many runs as lines go by; `result` says what they mean."""

    def __init__(self):
        self.runs: list[Run] = []
        self.lines = 0
        self.headers = 0
        self.name = None  # of the test that was named last
        self.names: Counter = Counter()
        self.jobs = Jobs()
        self.using = False
        self.failures: list[str] = []
        self.killed: list[str] = []
        self.old_columns = False
        self.rooted: bool | None = None  # whether rows have a root; None: no header said so
        self.comms: set[int] = set()  # nranks that NCCL's own lines name
        self.log = None  # the NcclLog of the same file
        self.pending = False  # a row's head stands, its figures have not come

    @property
    def rows(self) -> int:
        return sum(run.rows for run in self.runs)

    @property
    def measured(self) -> bool:
        return bool(self.rows) or any(run.average is not None for run in self.runs)

    def feed(self, number: int, line: str, in_log: bool) -> bool:
        """Takes the line in; whether it is of the test's own output."""
        if in_log:  # "8  2  float  sum  -1 node-a:25:25 [0] NCCL INFO …"
            comm = re.search(r"\bn[Rr]anks (\d{1,7})\b", line)
            if comm and len(self.comms) < MOST:
                self.comms.add(int(comm[1]))
            line = re.split(r"\S+:\d+:\d+ \[|NCCL (?:INFO|WARN)", line, maxsplit=1)[0]
            if not line.strip():
                return False
        before = self.lines
        named = NAMED.search(line)
        if named:
            self.names[named[1]] += 1
            self.name = named[1]
            if self.runs and "concluded" in line:
                self.runs[-1].name, self.name = named[1], None
        self._parse(line)
        return self.lines > before

    def _parse(self, line: str) -> None:
        if BEGIN.search(line):
            self.lines += 1
            self.headers += 1
            self.jobs.begin(bool(self.runs and self.runs[-1].rows))
            self._new()
        elif device := DEVICE.search(line):
            self.lines += 1
            self.jobs.device(
                Device(int(device[1]), device[3], device[4], int(device[5]), device[6].lower(),
                       device[7].strip())
            )  # fmt: skip
        elif USING.search(line):
            self.lines += 1
            self.using = True
        elif columns := COLUMNS.search(line):
            self.lines += 1
            self.rooted = bool(re.search(r"\broot\b", line))
            self.old_columns |= columns[1] != "#wrong"
            self._new()
        elif bounds := BOUNDS.search(line):
            self.lines += 1
            run = self._open(ends="bounds")
            run.bounds = (run.bounds or 0) + int(bounds[1])
            run.bounds_failed |= bounds[2] == "FAILED" or int(bounds[1]) > 0
        elif average := AVERAGE.search(line):
            self.lines += 1
            try:
                value = float(average[1])
            except ValueError:
                return
            run = self._open(ends="average")
            run.average, run.ended = (value if 0 <= value < 1e9 else None), True
            self._of(run)
            self.jobs.end(footer=True)
        elif failure := FAILURE.search(line):
            self.lines += "Test " in failure[1]
            self.jobs.end()
            if len(self.failures) < 40:
                self.failures.append(failure[1].strip())
        elif killed := KILLED.search(line):
            if len(self.killed) < 20:
                self.killed.append(killed[1].strip())
        elif head := HEAD.search(line):
            self._head(head)
        elif self.pending and ONLY_GROUPS.match(TAG.sub(" ", line)):
            self._figures(GROUP.findall(TAG.sub(" ", line))[:2])

    def _new(self) -> Run:
        """A table begins, unless the last one has not begun to be filled."""
        last = self.runs[-1] if self.runs else None
        if last is None or last.rows or last.ended or last.bounds is not None:
            if len(self.runs) < MOST:
                self.runs.append(Run())
        self.pending = False
        return self.runs[-1]

    def _of(self, run: Run) -> None:
        """What was said before the table is of it."""
        run.name = run.name or self.name
        if run.devices is None and self.jobs.open:
            run.devices = self.jobs.open[-1]

    def _open(self, ends: str) -> Run:
        """The run that a footer belongs to."""
        last = self.runs[-1] if self.runs else None
        if last is None or last.ended or (ends == "bounds" and last.bounds is not None
                                          and not self._several()):  # fmt: skip
            return self._new()
        return last

    def _several(self) -> bool:
        """Whether several processes print into this file at once."""
        return self.headers > 1 and len(self.jobs.open) > 1

    def _head(self, head: re.Match) -> None:
        rest = TAG.sub(" ", head[4])
        redop = root = None
        if found := REDOP.match(rest):
            redop, rest = found[1], found[2]
        found = re.match(r"(-?\d{1,7})(?:\s+(.*))?$", rest)
        if found and self._has_root(found[1], len(rest.split())):
            root, rest = int(found[1]), found[2] or ""
        groups = GROUP.findall(rest)
        if not groups and rest.strip() and redop is None and root is None:
            return  # a sentence with two numbers and the word "float"
        self._began(int(head[1]), redop, root)
        if groups:
            self._figures(groups[:2])
        else:
            self.pending = True
            self.lines += 1

    def row(self, line: str) -> bool:
        """Takes the line in if it is a whole row as every version prints it: quick, for most of
        a long file is that."""
        words = line.split()
        if not (7 <= len(words) <= 13 and words[0].isdecimal() and words[1].isdecimal()):
            return False
        if len(words[0]) > 15:
            return False
        if not TYPE.fullmatch(words[2]):
            return False
        at, redop, root = 3, None, None
        if words[at].isalpha():
            redop, at = words[at], at + 1
        if self._has_root(words[at], len(words) - at):
            root, at = words[at], at + 1
        if len(words) - at not in (4, 8):
            return False
        try:
            _ = [float(word) for i in range(at, len(words), 4) for word in words[i : i + 3]]
        except ValueError:
            return False
        if not all(IS_WRONG.fullmatch(words[i + 3]) for i in range(at, len(words), 4)):
            return False
        self._began(int(words[0]), redop, None if root is None else int(root))
        self._figures([words[i : i + 4] for i in range(at, len(words), 4)])
        return True

    def _has_root(self, word: str, left: int) -> bool:
        """Whether this is the root, and not a time: both can be whole numbers."""
        if not re.fullmatch(r"-?\d{1,7}", word, re.ASCII):
            return False
        return word.startswith("-") or (left in (5, 9) if self.rooted is None else self.rooted)

    def _began(self, nbytes: int, redop: str | None, root: int | None) -> None:
        if not self.runs or self.runs[-1].ended:
            self._new()
        run = self.runs[-1]
        run.redop, run.root = redop or run.redop, root if root is not None else run.root
        self.nbytes, self.kind = nbytes, (redop, root)
        self._of(run)

    def _figures(self, groups: list) -> None:
        self.pending = False
        self.lines += 1
        run = self.runs[-1]
        run.rows += 1
        if self.nbytes and len(run.sizes) < MOST:
            run.sizes[(self.nbytes, *self.kind)] += 1
        top = 0.0
        for _, alg_text, bus_text, wrong in groups:
            alg, bus = float(alg_text), float(bus_text)
            if not (0 <= alg < 1e12 and 0 <= bus < 1e9):  # nan, inf
                continue
            run.sent |= alg > 0
            top = max(top, bus)
            if run.best is None or bus > run.best:
                run.best, run.peak = bus, (self.nbytes, alg, bus)
            if alg > 0.5 and bus > 0:
                a, b = _half_digit(alg_text), _half_digit(bus_text)
                run.ratio[0] = max(run.ratio[0], (bus - b) / (alg + a))
                run.ratio[1] = min(run.ratio[1], (bus + b) / (alg - a))
            if not self.old_columns and wrong.isdecimal() and len(wrong) < 16:
                run.checked = True
                run.wrong += int(wrong)
        if run.largest is None or self.nbytes >= run.largest[0]:
            run.half = run.largest[1] if run.largest else None
            run.largest = (self.nbytes, top)
        if run.smallest is None or self.nbytes < run.smallest[0]:
            run.smallest = (self.nbytes, top)

    def result(self) -> dict:
        """Kind, facts, verdict, why, next. Raises ValueError where the file breaks off early."""
        return nccl_tests_facts.read(self)


def _half_digit(text: str) -> float:
    """Half a unit of the last digit printed: how far rounding may have moved the figure."""
    return 0.5 * 10 ** -len(text.partition(".")[2]) if "e" not in text.lower() else 0.01 * float(
        text)  # fmt: skip
