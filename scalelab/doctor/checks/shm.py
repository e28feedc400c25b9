"""Is there shared memory for what data loaders and ranks hand to one another?"""

from __future__ import annotations

import os
import sys

from ..registry import Host, NotChecked, Seen, check, fail, ok, probe, warn

SHM = "/dev/shm"
# A DataLoader worker hands every batch over through /dev/shm and prepares two (prefetch_factor)
# ahead. What a batch weighs is not known here; a rank with two workers and batches of 4 MiB (a few
# dozen small images) is about the least worth calling training.
RANK = 2 * 2 * 4 << 20
DOCKER = 64 << 20  # bytes that Docker gives a container unless told otherwise


@probe("shm")
def shm(context: dict) -> dict:
    """Bytes of /dev/shm, and whether this user may write there."""
    if sys.platform != "linux":
        raise NotChecked("no /dev/shm on this system")
    try:
        space = os.statvfs(SHM)
    except OSError as e:
        return {"error": e.strerror}
    return {"total": space.f_blocks * space.f_frsize, "free": space.f_bavail * space.f_frsize,
            "writable": os.access(SHM, os.W_OK)}  # fmt: skip


@check("shared memory", needs=["shm"], each=True)
def shared_memory(host: Host, seen: Seen):
    found = seen.facts(host, "shm")
    if "error" in found:
        yield fail(host, f"{SHM}: {found['error']}", f"mount -t tmpfs -o mode=1777 none {SHM}")
        return
    if not found["writable"]:
        yield fail(host, f"{SHM}: this user may not write there", f"chmod 1777 {SHM}")
        return
    total, free, need = found["total"], found["free"], seen.nproc * RANK
    words = (
        f"{SHM}: {_mib(free)} MiB free of {_mib(total)} MiB; ranks x 2 loader workers x 2 batches "
        f"of 4 MiB: {_mib(need)} MiB"
    )
    fix = (
        f"mount -o remount,size=50% {SHM}; a container: start it with --shm-size=8g or --ipc=host; "
        "else num_workers=0"
    )
    if free < RANK:
        yield fail(host, words, fix)
    elif free < need:
        yield warn(host, words, fix)
    # Emulated and local hosts in a container are for small jobs; real machines that have been left
    # at Docker's default are about to lose a data loader.
    elif seen.separate and total <= DOCKER:
        yield warn(
            host, f"{words}: Docker's default, too little for data loaders with workers", fix
        )
    else:
        yield ok(host, words)


def _mib(count: int) -> int:
    return count >> 20
