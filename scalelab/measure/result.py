"""The result of a sweep: alpha and beta from its rows, doubts in words, its table, its file."""

from __future__ import annotations

import json
from pathlib import Path

from ..runs import RunError
from .cost import BUS_FACTORS
from .fit import fit

OPS = tuple(BUS_FACTORS)
ROW = ("bytes", "count", "time_us", "algbw", "busbw", "wrong", "spread", "rounds", "per_round",
       "wire_bytes", "wire_packets")  # fmt: skip
# Before a message gloo's receiver tells the sender that it is ready, and the sender waits for
# that: each message costs two latencies. Found by measuring at 5 and 20 ms with 2, 3 and 4 ranks.
LATENCIES = {"gloo": 2, "nccl": 1}
# What is fitted. gloo makes a reduce-scatter from an all-reduce. The root of a broadcast sends the
# next one before the last has arrived, so its times hold no clean latency: no fit.
FORMS = {
    "all-reduce": ("ring", "tree"),
    "all-gather": ("ring-all-gather",),
    "reduce-scatter": ("ring-reduce-scatter",),
    "send-recv": ("send-recv",),
    "broadcast": (),
}
GLOO_FORMS = {"reduce-scatter": ("ring",)}


def load(path: str | Path) -> dict:
    """A result that was saved. Raises RunError, in one line, if the file is not one."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise RunError(f"{path}: {e}") from None
    if not _is_result(found):
        raise RunError(f"{path}: not the result of a sweep")
    return found


def _is_result(found: object) -> bool:
    """Whether it has what `table`, the lessons and `plan` read."""
    return (
        isinstance(found, dict)
        and {"rows", "op", "world_size", "fits"} <= set(found)
        and found["op"] in OPS
        and type(found["world_size"]) is int
        and isinstance(found["fits"], dict)
        and isinstance(found["rows"], list)
        and all(isinstance(row, dict) and set(ROW) <= set(row) for row in found["rows"])
    )


def table(result: dict) -> str:
    """A result as text, in the columns of nccl-tests, with what was fitted below."""
    head = f"{'size':>8} {'time us':>11} {'algbw':>8} {'busbw':>8} {'#wrong':>7} {'spread':>7}"
    lines = [head + f" {'wire B':>11} {'theory B':>11}", ""]
    for row in result["rows"]:
        wire, theory = row["wire_bytes"], row["theory_bytes"]
        lines.append(
            f"{show_bytes(row['bytes']):>8} {row['time_us']:>11.1f} {row['algbw']:>8.4g} "
            f"{row['busbw']:>8.4g} {row['wrong']:>7} {row['spread']:>7.1%} "
            f"{'-' if wire is None else format(wire, '11.0f'):>11} "
            f"{'-' if theory is None else format(theory, '11.0f'):>11}"
        )
    lines[1] = f"{'':>8} {'(median)':>11} {'GB/s':>8} {'GB/s':>8}"
    if result["alpha_us"] is not None:
        lines.append(
            f"alpha {result['alpha_us']:.0f} ± {result['alpha_us_error']:.0f} us a message, "
            f"beta {result['beta_gbs']:.4g} ± {result['beta_gbs_error']:.2g} GB/s "
            f"({next(iter(result['fits']))})"
        )
    if result["efficiency"] is not None:
        lines.append(
            f"best busbw is {result['efficiency']:.1%} of the line rate, "
            f"{result['line_rate_gbs']:.4g} GB/s"
        )
    if result["note"]:
        lines.append(result["note"])
    return "\n".join(lines)


def show_bytes(nbytes: float) -> str:
    """4096 as "4K", as nccl-tests' own flags count (1K = 1024)."""
    for power, letter in ((3, "G"), (2, "M"), (1, "K")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g}{letter}"
    return f"{nbytes:g}"


def points_of(rows: list[dict]) -> list[tuple[float, float, float]]:
    """(bytes, seconds, relative error) of each row, for `fit`. The error is one of the median of
    so many rounds: 1.25 / 1.35 of the quartiles' distance over the root of their number."""
    return [
        (row["bytes"], row["time_us"] / 1e6, 0.93 * row["spread"] / row["rounds"] ** 0.5)
        for row in rows
    ]


def doubts(result: dict) -> list[str]:
    """What a reader of the figures should know before believing them, a line each."""
    found = []
    if (result["efficiency"] or 0) > 1.05:
        found.append(
            "more than the line rate: it is higher than told, or the sizes fit into the buffers on "
            "the way: measure larger ones"
        )
    if result["alpha_us"] is not None and result["alpha_us"] < 0:
        found.append(
            "no latency is below 0: alpha is too small to be told from the noise; "
            "measure smaller sizes, on a quiet machine"
        )
    if result["op"] == "reduce-scatter" and result["backend"] == "gloo":
        found.append(
            "gloo makes a reduce-scatter from an all-reduce: twice the bytes of theory, and at "
            "most half the line rate"
        )
    return found


def add_fits(result: dict) -> None:
    """alpha and beta by each form that the operation may have; the first is the one at the top."""
    rows, n, gloo = result["rows"], result["world_size"], result["backend"] == "gloo"
    forms = (GLOO_FORMS if gloo else {}).get(result["op"]) or FORMS[result["op"]]
    each = LATENCIES.get(result["backend"], 1)
    points = points_of(rows)
    for form in forms:
        try:
            found = fit(points, n, form)
        except ValueError as e:
            result["note"] = f"no alpha and beta: {e}"
            return
        result["fits"][form] = {
            "alpha_us": found.alpha / each * 1e6, "alpha_us_error": found.alpha_error / each * 1e6,
            "beta_gbs": found.beta / 1e9, "beta_gbs_error": found.beta_error / 1e9,
            "misfit": found.misfit, "latencies_a_message": each,
        }  # fmt: skip
    if forms:
        result.update({k: v for k, v in result["fits"][forms[0]].items() if k in result})
    else:
        result["note"] = "no alpha and beta: broadcasts overlap, so their times hold no latency"
