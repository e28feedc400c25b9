"""`scalelab doctor`: of a cluster started here, of machines that join, or of launch lines."""

from __future__ import annotations

import argparse
import json
import os
import sys

from . import runs
from .cluster import UsageError
from .commands import end_on_signals, keep, node_env, say, show_state, start_cluster, writable
from .measure.sweep import parse_line_rate


def do_doctor(args: argparse.Namespace) -> int:
    """`scalelab doctor`."""
    if args.launch is not None:
        return _launch(args)
    from . import doctor

    runs.check_count("nproc-per-node", args.nproc_per_node)
    runs.check_timeout(args.timeout)
    line_rate = (parse_line_rate(args.line_rate) or 0) * 1e9 or None
    given = args.endpoint if args.join is None else args.join
    endpoint = doctor.parse_endpoint(given) if given is not None else None
    settings = node_env(args.node_env, args.nodes)
    out = writable(args.out) if args.out is not None else None
    end_on_signals()
    common = {
        "shared": args.shared, "data": args.data, "nproc": args.nproc_per_node,
        "line_rate": line_rate, "progress": show_state,
    }  # fmt: skip
    joined = args.join is not None or args.cluster == "slurm" or (
        args.cluster == "auto" and "SLURM_PROCID" in os.environ
        and "SLURM_NODEID" in os.environ
    )  # fmt: skip
    if joined:
        report = _meet(args, endpoint, common)
        if report is None:
            return 0
    else:
        with start_cluster(args, args.nodes) as hosts:
            report = doctor.examine(
                hosts, endpoint=args.endpoint, node_env=settings, **common
            )  # fmt: skip
    show_state()
    sent = isinstance(report, dict)
    result = report["json"] if sent else report.json()
    code = 1 if any(c["status"] == "fail" for c in result["checks"]) else 0
    if sent and not args.join:
        return code  # under srun all tasks share one screen: the head's report is on it
    print(report["table"] if sent else report.table(), file=sys.stderr if args.json else sys.stdout)
    if result["failing"] and len(result["nodes"]) > 1:
        say(f"to leave out the failing: --exclude={result['failing']}")
    if out and not keep(out, result):
        code = 1
    if args.json:
        print(json.dumps(result))
    return code


def _meet(args: argparse.Namespace, endpoint: tuple[str, int] | None, common: dict):
    """The report of machines that meet at --join, or of an srun; None for a task of srun that is
    not its node's first."""
    from .doctor.examine import PORT
    from .doctor.join import join, slurm_task

    if args.join:
        return join(endpoint, args.nodes, timeout=args.timeout, **common)
    task = slurm_task(os.environ)
    if task is None:
        raise UsageError("--cluster slurm: this is not a task of srun (no SLURM_NODEID)")
    if not task["first"]:
        return None
    port = os.environ.get("MASTER_PORT", "")
    endpoint = endpoint or (task["head"], int(port) if port.isdigit() else PORT)
    return join(endpoint, task["nodes"], timeout=args.timeout, head=task["is_head"],
                name=task["name"], **common)  # fmt: skip


def _launch(args: argparse.Namespace) -> int:
    from .doctor import launch

    result = launch.read(args.launch)
    print(launch.table(result), file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(result))
    return 1 if any(c["status"] == "fail" for c in result["checks"]) else 0
