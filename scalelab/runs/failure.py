"""Who failed first, and how to say it."""

from __future__ import annotations

import signal
from math import inf
from typing import TYPE_CHECKING

from . import record

if TYPE_CHECKING:
    from .run import Run


def first(run: Run, codes: dict[str, int | None]) -> dict | None:
    """What failed first in a run that has ended, as {"rank", "node", "error"}; None if nothing.

    codes: how each node's agent ended. The first by time is the cause; what its peers then say of a
    lost connection is not.
    """
    failed = [r for r in run.ranks if r["exit"] and r.get("failed_at", inf) < run.ending_at]
    if run.ending == "timed_out" and not failed:
        return _hang(run, codes)
    first = min(failed, key=lambda r: r["failed_at"], default=None)
    lost = min(run.lost, key=run.lost.get, default=None)
    if lost and run.ending != "stopped" and not (
        first and first["failed_at"] < run.lost[lost]
    ):  # fmt: skip
        code = codes[lost]
        down = not run.cluster_node(lost).up
        error = "this host went down" if down else f"agent {describe_exit(code)}"
        if run.cluster.closed:
            error = "the cluster was closed"
        ranks = [r["rank"] for r in run.ranks if r["node"] == lost]
        return {"rank": ranks[0] if ranks else None, "node": lost, "error": error}
    if first:
        why = first["why"] or ""
        how = describe_exit(first["exit"])
        return {
            "rank": first["rank"],
            "node": first["node"],
            "error": why if why.startswith("Traceback") else f"{how}\n{why}".strip(),
        }
    if run.ending == "stopped":
        return None
    for name in sorted(codes, key=lambda n: run.agents[n].ended_at or inf):
        code = codes[name]
        if code not in (0, None):
            words = last_error(record.read_log(run.dir, name))
            error = f"agent {describe_exit(code)}\n{words}".strip()
            # Those that never reported an end: their keeper was ended from outside.
            ranks = [r["rank"] for r in run.ranks if r["node"] == name and r["why"] is None]
            if ranks:
                error = f"{describe_exit(-signal.SIGKILL)}, with the process that watched it"
            return {"rank": ranks[0] if ranks else None, "node": name, "error": error}
    if len(run.ranks) < run.manifest["world_size"]:
        error = f"only {len(run.ranks)} of {run.manifest['world_size']} ranks ever ran"
        return {"rank": None, "node": None, "error": error}
    return None


def _hang(run: Run, codes: dict) -> dict:
    """A run over its time limit: who still ran, and where the first of them stood."""
    if not run.hung:
        words = "; ".join(f"{n}: agent {describe_exit(c)}" for n, c in codes.items() if c)
        return {
            "rank": None, "node": None,
            "error": f"timed out after {run.timeout:g} s with no rank running: the agents "
            f"did not find each other (rendezvous). {words}".strip(),
        }  # fmt: skip
    first = next(r for r in run.ranks if r["rank"] == run.hung[0])
    ranks = ", ".join(str(r) for r in run.hung)
    stack = first["why"] or ""
    at = stack.rfind("Fatal Python error: Aborted")
    return {
        "rank": first["rank"], "node": first["node"],
        "error": f"timed out after {run.timeout:g} s; still running: rank {ranks}\n"
        + (stack[at:] if at >= 0 else stack),
    }  # fmt: skip


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "did not end"
    if code < 0:
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"
    return f"exited with code {code}"


def last_error(words: str) -> str:
    """The line of an agent's log that says most: its last error, else its last line."""
    lines = [line for line in words.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return (errors or lines or [""])[-1]


def who(failure: dict) -> str:
    """"rank 1 on node1", as far as it is known."""
    rank, node = failure["rank"], failure["node"]
    text = "no rank" if rank is None else f"rank {rank}"
    return f"{text} on {node}" if node else text
