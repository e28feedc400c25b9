"""Lines that a terminal's width has cut, put together again.

Copied from a screen, a line longer than the screen comes as several, all but the last of them as
long as the screen is wide. Lines of a table may be as long by chance, so two are only joined where
the second cannot stand alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain, islice

LOOKED_AT = 400  # lines, to find the width
NARROW, WIDE = 60, 260  # columns
MOST = 4096  # characters of a line put together
LOG = re.compile(r"NCCL (?:INFO|WARN|ERROR)|\S+:\d+:\d+ \[-?\d+\]")
FRESH = re.compile(  # begins something of its own
    r"\s*(?:$|[#$>`({\[]|\S+@|NCCL version|Traceback|\S*Error\b|\S+: Test )"
    r"|.*(?:NCCL (?:INFO|WARN|ERROR)|:\d+:\d+ \[-?\d+\])"
)
DEVICE = re.compile(r"\bRank\s+\d+\b.*\bdevice\s+\d+ \[")
FIGURES = r"(?:\s+[\d.e+/NAinf-]+)"
CUT_ROW = re.compile(rf"^\s*\d+\s+\d+\s+[a-z]\w*(?:\s+[a-z]+)?{FIGURES}{{0,8}}\s*$")
ROW = re.compile(rf"^\s*\d+\s+\d+\s+[a-z]\w*(?:\s+[a-z]+)?(?:\s+-?\d+)?{FIGURES}{{8}}\s*$")
REST = re.compile(rf"^{FIGURES}{{1,8}}\s*$")
BLANKS = 16  # at a row's end, which a copy leaves out

Line = tuple[int, str, str]  # number, text, text without digits


def unwrapped(lines: Iterator[Line]) -> Iterator[Line]:
    """The same lines, joined where a screen cut them."""
    first = list(islice(lines, LOOKED_AT))
    width = _width([line for _, line, _ in first])
    rest = chain(first, lines)
    return rest if width is None else _joined(rest, width)


def _width(lines: list[str]) -> int | None:
    """Columns of the screen: what some lines reach, none passes, and cuts text."""
    width = max(map(len, lines), default=0)
    if not NARROW <= width <= WIDE:
        return None
    cut = others = 0
    begin = last = ""
    for line in lines:
        if last and _goes_on(begin, last, line, width):
            cut += 2 if CUT_ROW.match(begin) else 1  # a row that becomes whole is no chance
            last = line
            continue
        others += len(last) == width and bool(LOG.search(begin))
        begin = last = line
    return width if cut >= 2 and cut >= others else None


def _goes_on(begin: str, last: str, after: str, width: int) -> bool:
    """Whether a line goes on in `after`; so far it is `begin`, or several pieces up to `last`."""
    if width - BLANKS <= len(begin) <= width and CUT_ROW.match(begin) and REST.match(" " + after):
        return bool(ROW.match(begin.ljust(width) + after))
    if len(last) != width:
        return False
    if LOG.search(begin):
        return not (FRESH.match(after) or _tagged_alike(begin, after))
    if DEVICE.search(begin):
        return 0 < len(after) < 40 and not FRESH.match(after) and "Rank" not in after
    return False


def _tagged_alike(line: str, after: str) -> bool:
    """Whether a launcher or a logger put the same before both: a rest has no such tag."""
    one, two = (re.sub(r"\d+", "#", text) for text in (line, after.rstrip()))
    return one.startswith(two[:10] if two[:10].strip() else two)


def _joined(lines: Iterator[Line], width: int) -> Iterator[Line]:
    held: Line | None = None
    last = ""  # the piece that came last
    for number, line, shape in lines:
        if held is not None:
            if len(held[1]) < MOST and _goes_on(held[1], last, line, width):
                held = (held[0], held[1].ljust(width) + line, held[2] + shape)
                last = line
                continue
            yield held
        held, last = (number, line, shape), line
    if held is not None:
        yield held
