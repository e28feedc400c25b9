"""Is the shared directory one directory, and can a job write, rename and lock in it?"""

from __future__ import annotations

from ..registry import Finding, Host, NotChecked, Seen, check, fail, ok, skip, warn
from ..shared_exchange import exchange
from ..shared_ops import SharedOps

__all__ = ["SharedOps", "exchange", "shared_directory"]


@check("shared directory")
def shared_directory(seen: Seen):
    if not seen.shared:
        raise NotChecked("no --shared directory was given")
    for path in dict.fromkeys(seen.shared):
        found = {}
        for host in seen.hosts:
            here = seen.facts(host, "shared").get(path)
            if here is None:
                yield skip(host, f"{path}: the hosts' turns on it were not over in time")
            else:
                found[host.name] = here
        yield from _judge(seen, path, {h.name: h for h in seen.hosts if h.name in found}, found)


def _judge(seen: Seen, path: str, hosts: dict[str, Host], found: dict[str, dict]):
    first = {name: _there(path, found[name], hosts[name]) for name in found}
    if first and all(f and f.status == "fail" for f in first.values()) and len(first) > 1:
        if len({f.detail for f in first.values()}) == 1:  # the same everywhere: one line
            word = next(iter(first.values()))
            yield fail(None, f"{word.detail}, on every host", word.fix)
            return
    wrong = {name for name, finding in first.items() if finding}
    groups = _groups({n: f for n, f in found.items() if n not in wrong})
    usual = groups[0] if groups and 2 * len(groups[0]) > sum(map(len, groups)) else None
    apart: dict[str, Finding] = {}
    if len(groups) > 1 and usual:
        for name in (n for g in groups[1:] for n in g):
            apart[name] = fail(hosts[name], _apart(path, found, [usual, [name]]), _share(path))
    elif len(groups) > 1:
        pair = hosts[groups[0][0]], hosts[groups[1][0]]
        finding = fail(pair, _apart(path, found, groups), _share(path))
        apart = {
            pair[0].name: finding,
            **dict.fromkeys((n for g in groups[1:] for n in g), finding),
        }
    said: list[int] = []
    for name, host in hosts.items():
        finding = first[name] or apart.get(name) or _use(seen, path, host, found, groups)
        if id(finding) not in said:
            said.append(id(finding))
            yield finding


def _there(path: str, found: dict, host: Host) -> Finding | None:
    """What is wrong with the path on this host by itself, and so bars all else."""
    enter = found.get("enter", {})
    if found.get("silent") and "directory" not in enter:
        at = enter.get("mount", {})
        return fail(host, f"{path}: does not answer within {found['silent']:.0f} s: its file "
                    "server is away", f"`grep ' {at.get('at', path)} ' /proc/mounts` names the "
                    f"server; once it is back all goes on, else `umount -f -l {path}`")  # fmt: skip
    if "lost" in enter or not enter:
        return skip(host, f"{path}: {enter.get('lost', 'not asked in time')}")
    if "error" in enter:
        error = enter["error"]
        if error["errno"] == "ENOENT":
            return fail(host, f"{path}: does not exist", f"mount the shared file system there, or "
                        f"name a path that is on every host (`ls -d {path}`)")  # fmt: skip
        return fail(host, f"{path}: {error['words']} ({error['errno']}), as uid "
                    f"{enter['me']['user']}", f"`namei -l {path}` shows whose folder bars the way"
                    if error["errno"] == "EACCES" else f"mount it anew: {path}")  # fmt: skip
    if not enter["directory"]:
        return fail(host, f"{path}: is a file, not a directory", "name the directory")
    return None


def _groups(found: dict[str, dict]) -> list[list[str]]:
    """Names of hosts that see the same directory, largest group first. [] if nobody could write,
    so that it cannot be told."""
    if not any(f["enter"].get("written") for f in found.values()):
        return []
    groups: list[list[str]] = []
    for name in found:
        with_me = [
            g for g in groups
            if any(name in _seen(found[o]) or o in _seen(found[name]) for o in g)
        ]  # fmt: skip
        merged = [n for g in with_me for n in g] + [name]
        groups = [g for g in groups if g not in with_me] + [merged]
    return sorted(groups, key=len, reverse=True)


def _seen(found: dict) -> list[str]:
    look = found.get("look", {})
    return [*look.get("seen", ()), *look.get("unreadable", ())]


def _apart(path: str, found: dict[str, dict], groups: list[list[str]]) -> str:
    kinds = [
        f"{', '.join(g)} ({found[g[0]]['enter']['mount'].get('type', 'unknown file system')})"
        for g in groups
    ]
    return (f"{path}: not one directory: what {kinds[0]} writes is not seen by "
            + " nor ".join(kinds[1:]))  # fmt: skip


def _share(path: str) -> str:
    return (f"mount the same export at {path} on every host, e.g. `mount -t nfs SERVER:/EXPORT "
            f"{path}`; or give each host a copy and save checkpoints from rank 0")  # fmt: skip


def _use(seen: Seen, path: str, host: Host, found: dict[str, dict], groups: list) -> Finding:
    """Whether a job on this host can use the directory."""
    here = found[host.name]
    enter = here["enter"]
    me, owner, mode = enter["me"]["user"], enter["owner"], enter["mode"]
    if "write_error" in enter:
        error = enter["write_error"]["errno"]
        words = f"{path}: uid {me} cannot write: {enter['write_error']['words']}"
        if error == "EROFS" or (error == "EACCES" and enter["mount"].get("readonly")):
            return fail(host, f"{path}: mounted read-only here",
                        f"mount -o remount,rw {enter['mount'].get('at', path)}")  # fmt: skip
        if error in ("EACCES", "EPERM"):
            squash = "; root may be squashed to nobody there" if enter["me"]["uid"] == 0 else ""
            return fail(host, f"{words}; it belongs to uid {owner}, mode {mode}{squash}",
                        f"run as uid {owner}, or let {me.split()[0]} write: `setfacl -m "
                        f"u:{me.split()[0]}:rwx {path}` (or `chmod g+w`)")  # fmt: skip
        if error in ("ENOSPC", "EDQUOT"):
            return fail(host, f"{words}; {_space(enter)}",
                        f"`df -h {path}; df -i {path}; quota -s`, then delete or move")  # fmt: skip
        return fail(host, words, f"mount it anew: {path}")
    look = here.get("look", {})
    if look.get("unreadable"):
        return fail(host, f"{path}: uid {me} cannot read what {', '.join(look['unreadable'])} "
                    "writes", "run as one uid everywhere, or set `umask 022`")  # fmt: skip
    if here.get("silent") or "lost" in look:
        return fail(host, f"{path}: stopped answering while in use",
                    "look at the file server and the network to it")  # fmt: skip
    free, fraction = enter["space"]["free"], enter["space"]["free"] / (enter["space"]["total"] or 1)
    files = enter["space"]
    if free < 1e6 or (free < 100e6 and fraction < 0.01):
        return fail(host, f"{path}: {_space(enter)}", f"`df -h {path}`, then delete or move")
    if files["files"] and files["files free"] < 100:
        return fail(host, f"{path}: {files['files free']} more files can be made (inodes)",
                    f"`df -i {path}`; delete small files, or pack them into archives")  # fmt: skip
    if enter["squashed"]:
        return warn(host, f"{path}: files written as uid {me} belong to uid {enter['file owner']} "
                    "(squashed by the server)", "run as an ordinary user whom the server knows, or "
                    "export with no_root_squash")  # fmt: skip
    read = here.get("read", {})
    if read.get("torn") or read.get("absent"):
        return fail(host, f"{path}: a file replaced by rename was {read.get('absent', 0)} times "
                    f"absent and {read.get('torn', 0)} times torn in {read.get('reads', 0)} reads",
                    "a checkpoint there is not safe: write to a new name each time, and read it "
                    "after a barrier")  # fmt: skip
    for step, words in (("rename", "cannot rename over a file"), ("list", "cannot be listed")):
        if "error" in here.get(step, {}):
            return fail(host, f"{path}: {words}: {here[step]['error']['words']}",
                        "use a file system that can, for checkpoints")  # fmt: skip
    if free < 100e6:
        return warn(host, f"{path}: {_space(enter)}", "a checkpoint may not fit: make room")
    odd = _listing(path, host, found) or _lock(path, host, found)
    return odd or _fine(path, host, enter, groups)


def _listing(path: str, host: Host, found: dict[str, dict]) -> Finding | None:
    hashes = {n: f["list"]["hash"] for n, f in found.items() if f.get("list", {}).get("hash")}
    usual = Seen.majority(hashes)
    mine = hashes.get(host.name)
    if mine is None or len(set(hashes.values())) == 1 or mine == usual:
        return None
    other = next(n for n, h in hashes.items() if h != mine and usual in (None, h))
    ours, theirs = found[host.name]["list"], found[other]["list"]
    names = sorted(set(ours["names"]) ^ set(theirs["names"]))[:3]
    return warn(host, f"{path}: lists {ours['count']} entries, {other} lists {theirs['count']}"
                + (f"; they differ in {', '.join(names)}" if names else ""),
                "names are cached: list once on rank 0 and broadcast, or mount with a short "
                "`actimeo`")  # fmt: skip


def _lock(path: str, host: Host, found: dict[str, dict]) -> Finding | None:
    lock = found[host.name].get("lock")
    leader = next((n for n, f in found.items() if "renames" in f.get("rename", {})), None)
    fix = "do not lean on file locks there (caches, datasets downloads): let rank 0 do it alone"
    if not lock or leader is None:
        return None
    if "error" in lock:
        return warn(host, f"{path}: locks do not work: {lock['error']['words']}", fix)
    if host.name != leader and lock.get("got"):
        return warn(host, f"{path}: could lock a file that {leader} had locked", fix)
    return None


def _fine(path: str, host: Host, enter: dict, groups: list[list[str]]) -> Finding:
    group = next((g for g in groups if host.name in g), [host.name])
    what = f"one directory on {len(group)} hosts, writable" if len(group) > 1 else "writable"
    return ok(host, f"{path}: {what}; {enter['mount'].get('type', 'unknown')}, {_space(enter)}")


def _space(enter: dict) -> str:
    return f"{_size(enter['space']['free'])} free of {_size(enter['space']['total'])}"


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
