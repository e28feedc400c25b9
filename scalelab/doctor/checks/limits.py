"""May the job open as many files and lock as much memory as it needs?"""

from __future__ import annotations

import os
import resource

from ..registry import Host, Seen, check, fail, ok, probe, warn

RDMA = "/sys/class/infiniband"
# Counted in /proc/self/fd of gloo ranks (torch 2.13, worlds of 1, 2 and 4): a rank has 1 connection
# to the store, and for every process group world - 1 connections to its peers, 1 listener, 2 ends
# of a pipe and 1 epoll: world + 3. Python, its logs and a data loader's tensors add their own.
OWN = 128
GROUPS = 4  # default group and those that sharding and sub-groups add
RDMA_LEAST = 64 << 20  # bytes that registering a few buffers takes; 64 KiB to 8 MiB is the default


def files_needed(world: int, groups: int) -> int:
    return OWN + 1 + groups * (world + 3)


@probe("limits")
def limits(context: dict) -> dict:
    """Soft and hard limits (None: unlimited), and RDMA devices."""
    try:
        devices = sorted(os.listdir(RDMA))
    except OSError:
        devices = []
    found = {"rdma": devices}
    names = {"files": resource.RLIMIT_NOFILE, "memlock": getattr(resource, "RLIMIT_MEMLOCK", None)}
    for name, which in names.items():
        soft, hard = resource.getrlimit(which) if which is not None else (-1, -1)
        found[name] = [None if n == resource.RLIM_INFINITY else n for n in (soft, hard)]
    # CAP_IPC_LOCK (14) lifts the limit of locked memory
    found["may lock"] = os.geteuid() == 0 or bool(_capabilities() >> 14 & 1)
    return found


def _capabilities() -> int:
    try:
        with open("/proc/self/status") as f:
            return int(next(line for line in f if line.startswith("CapEff")).split()[1], 16)
    except (OSError, StopIteration, ValueError):
        return 0


@check("limits", needs=["limits"], each=True)
def enough(host: Host, seen: Seen):
    found = seen.facts(host, "limits")
    soft, hard = found["files"]
    world = (len(seen.hosts) + len(seen.missing)) * seen.nproc
    least, usual = files_needed(world, 1), files_needed(world, GROUPS)
    words = f"{'unlimited' if soft is None else soft} open files"
    if soft is not None and soft < usual:
        need = f"{words}; {world} ranks need {least} with one process group, {usual} with {GROUPS}"
        wish = max(65536, usual)
        fix = f"ulimit -n {wish if hard is None else min(hard, wish)}"
        if hard is not None and hard < usual:
            fix += f" is too little: raise `nofile` in /etc/security/limits.conf to {wish}"
        yield (fail if soft < least else warn)(host, need, fix)
        return
    lock = found["memlock"][0]
    words += f", {'unlimited' if lock is None else f'{lock >> 10} KiB'} locked memory"
    if found["rdma"] and lock is not None and not found["may lock"]:
        fix = (
            "`* - memlock unlimited` in /etc/security/limits.conf and log in again; a container: "
            "--ulimit memlock=-1"
        )
        short = f"{words}; {', '.join(found['rdma'][:2])} registers its buffers in locked memory"
        yield (fail if lock < RDMA_LEAST else warn)(host, short, fix)
        return
    yield ok(host, words + ("" if found["rdma"] else " (no RDMA device that needs it)"))
