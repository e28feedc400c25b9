"""What this machine can emulate, and why not where it cannot."""

from __future__ import annotations

import importlib.util
import os
import sys

from . import linux


def _sysctl(path: str) -> str:
    try:
        with open(f"/proc/sys/{path}") as f:
            return f.read().strip()
    except OSError:
        return ""


def virtual_problem(quick: bool = False) -> str:
    """Why emulated hosts do not work here, in one sentence; "" if they do.

    `quick` looks only at what can be read in no time; the full form tries it in a child.
    """
    if sys.platform != "linux":
        return "Emulated hosts need Linux (network namespaces)."
    if importlib.util.find_spec("pyroute2") is None:
        return "Emulated hosts need the Python package pyroute2."
    if linux.has_sys_admin():
        return "" if quick else _try_it()
    if _sysctl("user/max_user_namespaces") == "0":
        return "User namespaces are switched off here (user.max_user_namespaces is 0)."
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "User namespaces are root's alone here (kernel.unprivileged_userns_clone is 0)."
    return "" if quick else _try_it()


def _try_it() -> str:
    pid = os.fork()
    if pid == 0:
        step = 1
        try:
            if not linux.has_sys_admin():
                linux.new_user_namespace()
            step = 2
            linux.unshare(linux.CLONE_NEWNET | linux.CLONE_NEWNS | linux.CLONE_NEWPID)
            step = 3
            linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
            linux.mount("tmpfs", "/dev/shm", "tmpfs")
            step = 0
        finally:
            os._exit(step)
    step = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if step == 0:
        return ""
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "User namespaces are restricted here by AppArmor "
            "(kernel.apparmor_restrict_unprivileged_userns is 1)."
        )
    return {
        1: "This system bars user namespaces (many containers do).",
        2: "This system bars network namespaces (many containers do).",
    }.get(step, "This system bars mounts inside a namespace (many containers do).")


def outside_pid(pid: int, namespace: str) -> int:
    """See Cluster.outside_pid. Reads /proc: the kernel tells each process's PID in every PID
    namespace it is in (NSpid)."""
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            if os.readlink(f"/proc/{name}/ns/pid") != namespace:
                continue
            with open(f"/proc/{name}/status") as f:
                inner = next(line for line in f if line.startswith("NSpid:")).split()[-1]
        except (OSError, StopIteration):
            continue
        if int(inner) == pid:
            return int(name)
    return -1


def gpus() -> int:
    """NVIDIA devices of this machine, counted without importing torch."""
    names = os.listdir("/dev") if os.path.isdir("/dev") else []
    return sum(1 for n in names if n.startswith("nvidia") and n[6:].isdigit())


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_gb() -> float:
    """Memory free for use now, in units of 1e9 bytes."""
    import psutil

    return psutil.virtual_memory().available / 1e9


def max_ranks() -> int:
    """How many ranks this machine can hold: two a core (beyond that one measures the scheduler),
    0.4 GB each (a rank with torch imported and a small model)."""
    return max(1, min(2 * cores(), int(memory_gb() / 0.4)))
