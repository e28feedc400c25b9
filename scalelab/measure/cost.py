"""What a collective costs by the alpha-beta model: a message of S bytes takes alpha + S/beta.

alpha is seconds for each message, whatever its size; beta is bytes a second. An algorithm is a
pattern of messages, so its time is latency(n) * alpha + bandwidth(n) * S / beta for n ranks. The
forms are those of Thakur, Rabenseifner and Gropp (2005), doi 10.1177/1094342005051521, and of the
nccl-tests' PERFORMANCE.md. Adding numbers up is taken to cost nothing.

Every function raises ValueError for what no cluster has: less than one rank, beta 0, a size below
0, NaN. An alpha below 0 is accepted, since one that was fitted to noisy times can lie there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Form:
    """seconds = latency(n) * alpha + bandwidth(n) * nbytes / beta, for n ranks."""

    name: str
    latency: Callable[[int], float]
    bandwidth: Callable[[int], float]


def rounds(n: int) -> int:
    """Rounds of a binary tree that reaches n ranks: log2(n), rounded up."""
    return max(n - 1, 0).bit_length()


FORMS = {
    form.name: form
    for form in (
        # All-reduce. A ring passes pieces of S/n, 2(n-1) times, and all links work all the time.
        Form("ring", lambda n: 2 * (n - 1), lambda n: 2 * (n - 1) / n),
        # One tree: the whole of S up to one rank, and down again, without pipelining.
        Form("tree", lambda n: 2 * rounds(n), lambda n: 2 * rounds(n)),
        Form("recursive-doubling", rounds, rounds),
        Form("halving-doubling", lambda n: 2 * rounds(n), lambda n: 2 * (n - 1) / n),
        # Two trees at once, each of half the data, pipelined: as little traffic as a ring's.
        Form("double-tree", lambda n: 2 * rounds(n), lambda n: 2.0 if n > 1 else 0.0),
        # The other collectives. nbytes is the whole: what all ranks together hold at the end
        # (all-gather) or each held at the start (reduce-scatter).
        Form("ring-all-gather", lambda n: n - 1, lambda n: (n - 1) / n),
        Form("ring-reduce-scatter", lambda n: n - 1, lambda n: (n - 1) / n),
        Form("broadcast-tree", rounds, rounds),
        Form("send-recv", lambda n: 1 if n > 1 else 0, lambda n: 1 if n > 1 else 0),
    )
}

# busbw / algbw: how much each rank must send at least, over the size that the operation is said
# to have. Source: nccl-tests, doc/PERFORMANCE.md.
BUS_FACTORS: dict[str, Callable[[int], float]] = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "send-recv": lambda n: 1.0,
}


def seconds(form: str, nbytes: float, n: int, alpha: float, beta: float) -> float:
    """Time of one collective of `nbytes` among n ranks; alpha in seconds, beta in bytes/s."""
    f, n = _form(form), count("n", n)
    _check(nbytes, alpha, beta)
    return f.latency(n) * alpha + f.bandwidth(n) * nbytes / beta


def bus_factor(op: str, n: int) -> float:
    """busbw = algbw * bus_factor. Raises ValueError for an unknown op. 0 where n is 1: nothing
    has to leave the rank, so there is no bus bandwidth to speak of."""
    if op not in BUS_FACTORS:
        raise ValueError(f"operation {op!r}: use one of {', '.join(BUS_FACTORS)}")
    return BUS_FACTORS[op](n) if count("n", n) > 1 else 0.0


def hierarchical(
    nbytes: float,
    per_node: int,
    nodes: int,
    inner: tuple[float, float],
    outer: tuple[float, float],
) -> float:
    """All-reduce in three stages: reduce-scatter inside each node, a ring across nodes of each
    piece, all-gather inside. inner, outer: (alpha, beta) inside a node and between two."""
    piece = nbytes / count("per_node", per_node)
    return (
        seconds("ring-reduce-scatter", nbytes, per_node, *inner)
        + seconds("ring", piece, nodes, *outer)
        + seconds("ring-all-gather", nbytes, per_node, *inner)
    )


def torus(nbytes: float, rows: int, columns: int, alpha: float, beta: float) -> float:
    """All-reduce on a two-dimensional torus, each rank with a link along its row and one along its
    column: the two halves of the data go rows-first and columns-first at the same time."""

    def half(first: int, second: int) -> float:
        return hierarchical(nbytes / 2, first, second, (alpha, beta), (alpha, beta))

    rows, columns = count("rows", rows), count("columns", columns)
    return max(half(columns, rows), half(rows, columns))


def crossover(
    n: int, alpha: float, beta: float, few: str = "tree", many: str = "ring"
) -> float:
    """The bytes from which `many` (less traffic, more messages) is quicker than `few` (fewer
    messages). 0 if `many` always is, infinity if it never is."""
    a, b, n = _form(few), _form(many), count("n", n)
    _check(0, alpha, beta)
    messages = b.latency(n) - a.latency(n)  # that `many` has more
    traffic = a.bandwidth(n) - b.bandwidth(n)  # that `few` has more, in sizes
    if messages <= 0:
        return 0.0 if traffic >= 0 else math.inf
    return max(messages * alpha * beta / traffic, 0.0) if traffic > 0 else math.inf


def count(what: str, n: int) -> int:
    """n as a whole number. Raises ValueError, which names it `what`, if it is not one above 0."""
    try:
        whole = operator.index(n)
    except TypeError:
        whole = 0
    if whole < 1:
        raise ValueError(f"{what} {n!r}: use a whole number above 0")
    return whole


def number(what: str, value: float, above: float = -math.inf, finite: bool = True) -> float:
    """value as a float. Raises ValueError if it is none, NaN, or below `above`."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if math.isnan(found) or found < above or (finite and math.isinf(found)):
        least = "" if above == -math.inf else f", {above:g} or more"
        raise ValueError(f"{what} {value!r}: use a number{least}")
    return found


def _check(nbytes: float, alpha: float, beta: float) -> None:
    number("nbytes", nbytes, 0)
    number("alpha", alpha)
    if number("beta", beta, 0, finite=False) == 0:
        raise ValueError("beta 0: a link that carries nothing never ends a message")


def _form(name: str) -> Form:
    if name not in FORMS:
        raise ValueError(f"form {name!r}: use one of {', '.join(FORMS)}")
    return FORMS[name]
