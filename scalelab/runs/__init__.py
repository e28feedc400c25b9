"""Launch real torchrun on every node of a cluster, and follow it.

    with cluster.start(nodes=2) as c:
        run = runs.launch("scripts/train_ddp.py", ["--steps", "50"], cluster=c).wait()
        print(run.words())
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shlex
import sys
import time
from pathlib import Path

from ..cluster import Cluster, UsageError
from ..cluster.leftovers import client_mark
from ..cluster.probe import gpus
from .failure import who
from .record import (
    RunError,
    home,
    make_run_dir,
    read_log,
    read_manifest,
    read_metrics,
)  # fmt: skip
from .run import KEEPER, Run, versions

__all__ = [
    "Run", "RunError", "home", "launch", "read_log", "read_manifest",
    "read_metrics", "resume", "who",
]  # fmt: skip


# What a rank's keeper is told; a run could not be followed with other values.
OWN_NAMES = {"SCALELAB_RUN_DIR", "SCALELAB_NODE", "SCALELAB_METRICS", "SCALELAB_TIED",
             "SCALELAB_SAFE_PATH", "SCALELAB_CLIENT"}  # fmt: skip


def launch(
    script: str | Path,
    args: list[str] | tuple[str, ...] = (),
    *,
    cluster: Cluster,
    nproc_per_node: int = 1,
    timeout: float = 600,
    run_dir: str | Path | None = None,
    node_env: dict[int, dict[str, str]] | None = None,
    env: dict[str, str] | None = None,
    max_restarts: int = 0,
) -> Run:
    """Start `script` under torchrun on every node, and return at once.

    timeout: seconds after which everything is ended, whatever torch thinks. env: for every rank;
    node_env: for one node's ranks, by node index. run_dir: where the record goes (default:
    a new directory under $SCALELAB_HOME/runs). Raises UsageError, in one line, for a value that
    makes no sense or a directory that cannot be used.
    """
    path, _ = read_script(script)
    if isinstance(args, str):
        raise UsageError(f"args {args!r}: use a list, such as {args.split()!r}")
    check_count("ranks a node", nproc_per_node)
    check_timeout(timeout)
    for index, settings in [*(node_env or {}).items(), (0, env or {})]:
        if index not in range(len(cluster.nodes)):
            last = len(cluster.nodes) - 1
            raise UsageError(f"environment for node {index}: there are nodes 0 to {last}")
        check_env(settings)
    run_id = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(3)
    directory = make_run_dir(Path(run_dir) if run_dir else home() / "runs" / run_id)
    if (directory / "manifest.json").exists():
        raise UsageError(f"run directory {directory}: holds a run already; use another")
    return _launch(
        path, [str(arg) for arg in args], cluster, nproc_per_node, timeout, directory, run_id,
        {i: dict(v) for i, v in (node_env or {}).items()}, dict(env or {}), max_restarts, 1,
    )  # fmt: skip


def read_script(script: str | Path) -> tuple[Path, bytes]:
    """A script's absolute path and what it holds. Raises UsageError if it cannot be read."""
    try:
        path = Path(script).expanduser().absolute()
        return path, path.read_bytes()
    except (OSError, RuntimeError, ValueError) as e:
        why = e.strerror if isinstance(e, OSError) and e.strerror else str(e)
        raise UsageError(f"script {str(script)!r}: {why[:1].lower()}{why[1:]}") from None


def resume(run_dir: str | Path, *, cluster: Cluster, timeout: float = 600) -> Run:
    """Launch a run's command again in the same directory, as its next attempt.

    The script finds there what it saved (`$SCALELAB_RUN_DIR`); logs and metrics are continued.
    The cluster may have another number of nodes. Raises RunError if it is not a run's directory.
    """
    old = read_manifest(run_dir)
    if old["status"] == "running":
        raise UsageError(f"run directory {run_dir}: this run is still going on")
    check_timeout(timeout)
    path, _ = read_script(old["script"])
    return _launch(
        path, old["args"], cluster, old["nproc_per_node"], timeout,
        make_run_dir(Path(run_dir)), old["run"],
        {int(i): v for i, v in old["node_env"].items() if int(i) < len(cluster.nodes)},
        old["env"], old["max_restarts"], old["attempt"] + 1,
    )  # fmt: skip


def check_count(what: str, value: int) -> None:
    """Raises UsageError unless `value` is a whole number from 1 to 1024."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise UsageError(f"{what} {value!r}: use a whole number from 1 to 1024")


def check_timeout(seconds: float) -> None:
    """Raises UsageError unless `seconds` is a number above 0."""
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not 0 < seconds < 1e7:
        raise UsageError(f"timeout {seconds!r}: use a number of seconds above 0")


def check_env(settings: dict[str, str]) -> None:
    """Raises UsageError for what cannot be a variable of a rank, or is ScaleLab's own."""
    for name, value in settings.items():
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name:
            raise UsageError(f"environment {name!r}={value!r}: use a name and a text")
        if "\0" in name + value:
            raise UsageError(f"environment {name!r}: a null byte cannot be passed on")
        if name in OWN_NAMES:
            raise UsageError(f"environment {name}: this name is taken by ScaleLab itself")


def _launch(script, args, cluster, nproc, timeout, directory, run_id, node_env, env,
            max_restarts, attempt) -> Run:  # fmt: skip
    head = cluster.nodes[0]
    local = cluster.kind == "local"
    # By name where names mean something: what a person would type.
    endpoint = f"{head.addr if local else head.name}:{head.free_port()}"
    torchrun = [
        f"--nnodes={len(cluster.nodes)}",
        f"--nproc-per-node={nproc}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}-{attempt}",
    ]
    if max_restarts:
        torchrun.append(f"--max-restarts={max_restarts}")
    commands, envs = {}, {}
    for node in cluster.nodes:
        # On loopback every agent would take itself for the rendezvous host.
        extra = [f"--rdzv-conf=is_host={int(node is head)}", f"--local-addr={head.addr}"]
        commands[node.name] = [
            sys.executable, "-m", "torch.distributed.run", *torchrun, *(extra if local else []),
            f"--log-dir={directory / 'torchrun'}", str(KEEPER), str(script), *args,
        ]  # fmt: skip
        envs[node.name] = {
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            "SCALELAB_RUN_DIR": str(directory),
            "SCALELAB_NODE": node.name,
            # `python -m` would import a random.py of the learner's directory in torch's place.
            **({} if "PYTHONSAFEPATH" in os.environ else
               {"PYTHONSAFEPATH": "1", "SCALELAB_SAFE_PATH": "1"}),
            **_devices(node.index, nproc, len(cluster.nodes)),
            **({"SCALELAB_TIED": "1"} if local else {}),
            **({"GLOO_SOCKET_IFNAME": _loopback()} if local else {}),
            **env,
            **node_env.get(node.index, {}),
        }
    by_hand = ["torchrun", *torchrun, str(script), *args]
    manifest = {
        "run": run_id, "attempt": attempt, "script": str(script), "args": args,
        "script_sha256": hashlib.sha256(read_script(script)[1]).hexdigest(),
        "command": shlex.join(by_hand), "agents": commands, "env": env,
        "node_env": {str(i): v for i, v in node_env.items()},
        "seed": _seed(args), "cluster": cluster.kind,
        "separate_hosts": not local, "why_local": cluster.why, "link": cluster.link,
        "racks": cluster.racks, "nproc_per_node": nproc, "max_restarts": max_restarts,
        "nodes": [{"name": n.name, "addr": n.addr} for n in cluster.nodes],
        "world_size": nproc * len(cluster.nodes), "timeout": timeout, "began": time.time(),
        "client": client_mark(),
    }  # fmt: skip
    run = Run(cluster, directory, manifest)
    run.save()
    if run.problems:
        raise UsageError(f"run directory {directory}: {run.problems[0]}")
    try:
        run._start(commands, envs, timeout)
        run.manifest["versions"] = versions()  # looked up while torch is being imported
        run.save()
    except BaseException:
        run.status = "failed"
        run.save()
        raise
    return run


def _devices(index: int, nproc: int, nodes: int) -> dict[str, str]:
    """The GPUs of this machine that node `index` may use.

    Emulated hosts share one machine, and every host's first rank would take its GPU 0, which NCCL
    refuses: so each host is given GPUs of its own, or, where there are too few, none.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    have = visible.split(",") if visible else [str(i) for i in range(gpus())]
    if visible == "" or not have:
        return {}
    enough = len(have) >= nproc * nodes
    mine = have[index * nproc : (index + 1) * nproc] if enough else []
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def _seed(args: list[str]) -> int | None:
    """The value of a script's --seed, for the record."""
    words = [part for arg in args for part in arg.split("=", 1)]
    for flag, value in zip(words, words[1:]):
        if flag == "--seed" and re.fullmatch(r"-?[0-9]+", value):
            return int(value)
    return None


def _loopback() -> str:
    """The name of the loopback interface ("lo", or "lo0" on macOS)."""
    return "lo0" if sys.platform == "darwin" else "lo"
