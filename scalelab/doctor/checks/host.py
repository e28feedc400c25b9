"""Does every host answer, and who is it?"""

from __future__ import annotations

import os
import pwd
import socket

from ..registry import NotChecked, Seen, check, fail, ok, probe


@probe("identity")
def identity(context: dict) -> dict:
    """What tells one machine (or network namespace) from another, and the user there."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as f:
            boot_id = f.read().strip()
        net = os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        boot_id = net = socket.gethostname()
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = ""
    return {"boot_id": boot_id, "net": net, "hostname": socket.gethostname(),
            "uid": os.getuid(), "gid": os.getgid(), "user": user}  # fmt: skip


@check("host", needs=["identity"])
def answers(seen: Seen):
    for host in seen.missing:
        yield fail(host, f"does not answer: {host.missing}",
                   "start the doctor there, or leave this host out of the job")  # fmt: skip
    for host in seen.hosts:
        if host.lost:
            yield fail(host, f"stopped answering while it was examined: {host.lost}",
                       "see whether that machine is up, and its doctor was not stopped; then "
                       "run this again")  # fmt: skip
    uids = {}
    for host in seen.hosts:
        try:
            uids[host.name] = seen.facts(host, "identity")["uid"]
        except NotChecked:
            pass
    usual = seen.majority(uids)
    for host in seen.hosts:
        who = seen.facts(host, "identity")
        odd = len(set(uids.values())) > 1 and (usual is None or who["uid"] != usual)
        if odd:
            name = f" ({who['user']})" if who["user"] else ""
            yield fail(
                host,
                f"runs as uid {who['uid']}{name}, others as "
                + ", ".join(f"{u} on {h}" for h, u in uids.items() if u != who["uid"]),
                "run the job as one user everywhere: shared files belong to a uid",
            )
        elif not host.lost:
            yield ok(host, f"answers, as uid {who['uid']}")
