"""What the exercises of lab 04 share."""

from __future__ import annotations

import errno
import itertools
import math
import pickle
import traceback
from collections.abc import Iterator, MappingView

from ...bench import TRIAL_SECONDS, Bench, raise_if_broken
from ...verdict import Wrong

MANY = 100  # of what an iterator gives are looked at: it may be endless


def numbers(value, count: int | None = None) -> list[float] | None:
    """`count` finite numbers (or however many) as floats, from a tuple, list, array or tensor;
    None where it is not that."""
    try:
        got = [number(v) for v in value]
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: torch's
        return None
    return got if len(got) == (count or len(got)) and None not in got else None


def number(value) -> float | None:
    """A finite number as a float (an array or tensor of one element too), or None."""
    if isinstance(value, (str, bytes)):
        return None
    try:
        got = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return got if math.isfinite(got) else None


def close(a: float, b: float, by: float = 1e-6) -> bool:
    """Equal to the relative tolerance `by`, of b; 0 only to 0."""
    return abs(a - b) <= by * abs(b)


def plain(value):
    """What an answer returned, with its iterators and views as lists, so that it can be sent."""
    if isinstance(value, (Iterator, MappingView)):
        return [plain(v) for v in itertools.islice(value, MANY)]
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(plain(v) for v in value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value


def sendable(value):
    """A copy of it, so that an answer may use its list again; else what it looks like."""
    value = plain(value)
    try:
        return pickle.loads(pickle.dumps(value))
    except Exception:  # of a class that only the answer has
        return repr(value)[:60]


def try_each(rank, world_size, answer, cases):
    """For each case what the answer returned, or {"error": words} where it raised. A stub's
    NotImplementedError goes through, and so does what the bench has words for."""
    out = []
    for case in cases:
        try:
            out.append({"got": sendable(answer(*case))})
        except NotImplementedError:
            raise
        except Exception as e:
            if isinstance(e, OSError) and e.errno == errno.EFBIG:  # it has printed too much
                raise
            words = f"{type(e).__name__}: {str(e)[:200]}{_line(e)}"
            out.append({"error": words, "kind": type(e).__name__})
    return out


def _line(e: BaseException) -> str:
    """Where in the answer it was raised."""
    own = [f for f in traceback.extract_tb(e.__traceback__)[1:]
           if "site-packages" not in f.filename and "scalelab" not in f.filename]  # fmt: skip
    return f" (line {own[-1].lineno}, in {own[-1].name})" if own else ""


def tried(bench: Bench, answer, cases, seconds: float = TRIAL_SECONDS, advice: str = "") -> list:
    """`try_each` on a rank of its own; raises Wrong, in words, where it does not come to its end
    within `seconds`."""
    found = bench.ranks(1, try_each, answer, cases, group=False, timeout=seconds)
    try:
        raise_if_broken(found)
    except Wrong as e:
        if not found[0].hung:
            raise
        at = str(e).partition("\n")[2]
        raise Wrong(f"not done after {seconds:g} s with {len(cases)} case{'s' * (len(cases) > 1)}."
                    f"{' ' * bool(advice)}{advice}" + f"\n{at}" * bool(at)) from None  # fmt: skip
    return found[0].value
