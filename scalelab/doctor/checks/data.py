"""Does every host see the same data, in the same order?"""

from __future__ import annotations

import hashlib
import os
import time

from ..registry import Finding, Host, NotChecked, Seen, check, fail, ok, probe, skip, warn
from ..shared_ops import PREFIX, bounded, problem, user
from . import shared

SECONDS = 4.5  # for all paths of a host; a network file system lists some 10 000 files in that
SAMPLE = 200  # files, evenly spread over the sorted names, of which both ends are read
END = 64 << 10  # bytes of either end
LISTED = 5000  # files whose names and sizes are told, to name those that differ


@probe("data", limit=6)
def data(context: dict) -> dict:
    """{path: what is there}, for each of the job's data paths."""
    until = time.monotonic() + SECONDS
    found = {}
    for path in dict.fromkeys(context["data"]):
        left = until - time.monotonic()
        try:
            found[path] = bounded(examine, max(0.5, left) + 0.5, path, until)
        except TimeoutError:
            found[path] = {"silent": True}
        except OSError as e:
            found[path] = {"error": problem(e), "me": user(os.geteuid())}
    return found


def examine(path: str, until: float) -> dict:
    """Files below `path` in the order in which a program would find them, and what is in a sample
    of them. Stops at `until` (time.monotonic()) and then says so."""
    os.stat(path)  # raises if there is nothing
    files, barred, whole = walk(path, until)
    listing = sorted(files)
    facts = {
        "files": len(files), "bytes": sum(size for _, size in files), "whole": whole,
        "barred": barred, "me": user(os.geteuid()),
        "set": digest(f"{name}\0{size}" for name, size in listing),
        "order": digest(name for name, _ in files),
        "listing": [[_text(name), size] for name, size in listing[:LISTED]],
        "first": [_text(name) for name, _ in files[:3]],
        "contents": {},
    }  # fmt: skip
    chosen = listing[:: max(1, -(-len(listing) // SAMPLE))]
    for name, size in chosen if whole else ():
        if time.monotonic() > until:
            break
        try:
            facts["contents"][_text(name)] = ends(os.path.join(path, name) if name else path, size)
        except PermissionError:
            facts["barred"].append(_text(name))
        except OSError:
            facts["contents"][_text(name)] = "unreadable"
    facts["barred"] = facts["barred"][:LISTED]
    return facts


def walk(path: str, until: float) -> tuple[list[tuple[str, int]], list[str], bool]:
    """([(name below path, bytes)] unsorted, names that may not be looked into, whether that is
    all). Symbolic links are followed, a directory once. A file alone is named ""."""
    if not os.path.isdir(path):
        return [("", os.path.getsize(path))], [], True
    files: list[tuple[str, int]] = []
    barred: list[str] = []
    visited, waiting = set(), [""]
    while waiting:
        below = waiting.pop()
        folder = os.path.join(path, below)
        try:
            at = os.stat(folder)
            if (at.st_dev, at.st_ino) in visited:
                continue
            visited.add((at.st_dev, at.st_ino))
            with os.scandir(folder) as entries:
                for entry in entries:
                    if time.monotonic() > until:
                        return files, barred, False
                    name = os.path.join(below, entry.name)
                    if entry.name.startswith(PREFIX):
                        continue  # the doctor's own, if the data lies on the shared directory
                    try:
                        if entry.is_dir():
                            waiting.append(name)
                        else:
                            files.append((name, entry.stat().st_size))
                    except OSError:  # a link to nowhere, or gone meanwhile
                        files.append((name, -1))
        except PermissionError:
            barred.append(_text(below))
    return files, barred, True


def ends(file: str, size: int) -> str:
    """A digest of the first and last 64 KiB of a file."""
    with open(file, "rb") as f:
        text = hashlib.sha256(f.read(END))
        if size > END:
            f.seek(max(END, size - END))
            text.update(f.read(END))
    return text.hexdigest()[:16]


def digest(lines) -> str:
    text = hashlib.sha256()
    for line in lines:
        text.update(line.encode(errors="surrogateescape") + b"\n")
    return text.hexdigest()[:16]


def _text(name: str) -> str:
    return name.encode(errors="replace").decode()  # a name that is no UTF-8


@check("data", needs=["data"])
def same_data(seen: Seen):
    if not seen.data:
        raise NotChecked("no --data path was given")
    for path in dict.fromkeys(seen.data):
        found: dict[str, dict] = {}
        for host in seen.hosts:
            try:
                found[host.name] = seen.facts(host, "data")[path]
            except NotChecked as e:
                yield skip(host, f"{path}: {e}")
        named = _named_before(seen, path)
        for finding in _judge(path, {h.name: h for h in seen.hosts if h.name in found}, found):
            explained = None in named or any(h in named for h in finding.hosts)
            if finding.status == "fail" and explained:
                finding = skip(finding.where, f"{path}: differs as said of the shared directory")
            yield finding


def _named_before(seen: Seen, path: str) -> set[str | None]:
    """Hosts of which the shared directory's check has said that this path, or one above it, is not
    what it should be (None: of all)."""
    try:
        findings = shared.shared_directory(seen)
    except NotChecked:
        return set()
    return {
        name for f in findings for above in seen.shared
        if f.status == "fail" and f.detail.startswith(f"{above}: ")
        and (path == above or path.startswith(above.rstrip("/") + "/"))
        for name in (f.hosts or (None,))
    }  # fmt: skip


def _judge(path: str, hosts: dict[str, Host], found: dict[str, dict]):
    there = {}
    gone = [n for n, f in found.items() if f.get("error", {}).get("errno") == "ENOENT"]
    if gone and len(gone) == len(found) > 1:
        yield fail(None, f"{path}: exists on no host", "name the path as it is on the hosts")
        return
    for name, facts in found.items():
        finding = _alone(path, hosts[name], facts, [n for n in found if n not in gone])
        if finding:
            yield finding
        else:
            there[name] = facts
    cut = [n for n, f in there.items() if not f["whole"]]
    for name in cut:
        count = there[name]["files"]
        yield skip(hosts[name], f"{path}: counted {count} files in {SECONDS:g} s: not checked "
                   "further")  # fmt: skip
    if cut and len(cut) < len(there):
        for name in set(there) - set(cut):
            yield ok(hosts[name], f"{path}: {_size(there[name])}")
    if cut or not there:
        return
    yield from (
        _odd(path, hosts, there, "set", _fewer)
        or _odd(path, hosts, _common(there), "sample", _other)
        or _odd(path, hosts, there, "order", _order)
        or [ok(hosts[n], f"{path}: {_size(f)}") for n, f in there.items()]
    )


def _alone(path: str, host: Host, facts: dict, others: list[str]) -> Finding | None:
    """What is wrong on this host whatever the others have."""
    if facts.get("silent"):
        return fail(host, f"{path}: does not answer: its file server is away",
                    f"look at the server (`grep {path} /proc/mounts`), or copy the data to "
                    "each host")  # fmt: skip
    if "error" in facts:
        if facts["error"]["errno"] == "ENOENT":
            where = f"; {', '.join(others[:4])} has it" if len(others) == 1 else ""
            source = others[0] if others else "HOST"
            return fail(host, f"{path}: does not exist here{where}",
                        f"copy it, `rsync -a {source}:{path}/ {path}/`, or mount it")  # fmt: skip
        return fail(host, f"{path}: {facts['error']['words']}, as uid {facts['me']}",
                    f"`namei -l {path}` shows whose folder bars the way")  # fmt: skip
    if facts["barred"]:
        return fail(host, f"{path}: uid {facts['me']} may not read {len(facts['barred'])} entries, "
                    f"such as {facts['barred'][0] or path}",
                    f"let it read: `chmod -R a+rX {path}`")  # fmt: skip
    if facts["files"] == 0 and facts["whole"]:
        return fail(host, f"{path}: holds no file here", f"copy or mount the data at {path}")
    return None


def _common(found: dict[str, dict]) -> dict[str, dict]:
    """Each host's facts with one digest, "sample", over the files that all had time to read."""
    names = set.intersection(*(set(f["contents"]) for f in found.values()))
    return {
        host: {**f, "sample": digest(f"{n}\0{f['contents'][n]}" for n in sorted(names))}
        for host, f in found.items()
    }


def _odd(path: str, hosts: dict[str, Host], found: dict[str, dict], key: str, words) -> list:
    """Findings where hosts differ in `key`: on the odd ones, or where there is no majority on a
    pair of which neither is blamed. [] where all agree."""
    values = {name: facts[key] for name, facts in found.items()}
    if len(set(values.values())) <= 1:
        return []
    usual = Seen.majority(values)
    if usual is None:
        a = next(iter(values))
        b = next(n for n, v in values.items() if v != values[a])
        return [words((hosts[a], hosts[b]), path, (a, found[a]), (b, found[b]))]
    right = next(n for n, v in values.items() if v == usual)
    return [
        words(hosts[n], path, (n, found[n]), (right, found[right]))
        if v != usual else ok(hosts[n], f"{path}: {_size(found[n])}")
        for n, v in values.items()
    ]  # fmt: skip


def _fewer(where, path: str, a: tuple, b: tuple) -> Finding:
    (name, mine), (other, theirs) = a, b
    ours, others = dict(map(tuple, mine["listing"])), dict(map(tuple, theirs["listing"]))
    differ = [n for n in sorted({*ours, *others}) if ours.get(n) != others.get(n)][:3]
    shown = f"; they differ in {', '.join(differ)}" if differ else ""
    return fail(where, f"{path}: {name} has {_size(mine)}, {other} has {_size(theirs)}{shown}",
                f"make them equal: `rsync -a --delete {other}:{path}/ {path}/` on {name}, if "
                f"{other} is right")  # fmt: skip


def _other(where, path: str, a: tuple, b: tuple) -> Finding:
    (name, mine), (other, theirs) = a, b
    differ = sorted(
        n for n in mine["contents"]
        if n in theirs["contents"] and mine["contents"][n] != theirs["contents"][n]
    )  # fmt: skip
    return fail(where, f"{path}: names and sizes agree, but {len(differ)} of "
                f"{len(mine['contents'])} files looked into have other contents on {name} than on "
                f"{other}, such as {', '.join(differ[:3])}",
                f"copy again by content: `rsync -ac {other}:{path}/ {path}/` on {name}, if "
                f"{other} is right")  # fmt: skip


def _order(where, path: str, a: tuple, b: tuple) -> Finding:
    (name, mine), (other, theirs) = a, b
    # no more than a warning: a script that sorts is right on any file system
    return warn(
        where,
        f"{path}: the same files are listed in another order: {name} begins with "
        f"{', '.join(mine['first'])}; {other} with {', '.join(theirs['first'])}",
        "sort what is listed, e.g. `files = sorted(os.listdir(path))`, before "
        "`files[rank::world_size]` (this warning stays unless all mount one directory)",
    )


def _size(facts: dict) -> str:
    count, size = facts["files"], float(facts["bytes"])
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{count} file{'s' * (count != 1)}, {size:.3g} {unit}"
