"""The agent's hands on a shared directory: small files of ours, written, looked for, renamed,
locked and taken away again.

Everything on a path is waited for in a thread for a few seconds, since a dead file server makes any
call on it wait for ever. A path that once did not answer is not touched again.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import pwd
import re
import stat
import threading
import time
from contextlib import contextmanager

PREFIX = ".scalelab-doctor-"  # of every file we make; then the token of one examination
STALE = 600  # s after which a file of ours belongs to no living doctor
MOST = 20_000  # directory entries that are listed
BODY = 64 << 10  # bytes of the file that is renamed over


def bounded(function, seconds: float, *args):
    """function(*args) in a thread. Raises TimeoutError after `seconds`; the thread is left behind,
    since nothing can interrupt it."""
    answer: list = []

    def run() -> None:
        try:
            answer.append((True, function(*args)))
        except BaseException as e:
            answer.append((False, e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not answer:
        raise TimeoutError(f"no answer within {seconds:g} s")
    fine, value = answer[0]
    if not fine:
        raise value
    return value


def mount_of(path: str, table: str = "/proc/self/mounts") -> dict:
    """{"type", "source", "at", "readonly"} of the file system that holds an absolute path, without
    touching it; {} where that is not known."""
    found: dict = {}
    try:
        with open(table, errors="surrogateescape") as f:
            lines = f.read().splitlines()
    except OSError:
        return {}
    for line in lines:  # a later mount covers an earlier one
        words = [re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), w) for w in line.split()]
        if len(words) < 4:
            continue
        source, at, kind, options = words[:4]
        inside = path == at or path.startswith(at.rstrip("/") + "/")
        if inside and len(at) >= len(found.get("at", "")):
            found = {"type": kind, "source": source, "at": at,
                     "readonly": "ro" in options.split(",")}  # fmt: skip
    return found


def problem(e: OSError) -> dict:
    """An error as JSON: {"errno": "EACCES", "words": "Permission denied"}."""
    return {"errno": errno.errorcode.get(e.errno or 0, "?"), "words": e.strerror or str(e)}


def user(uid: int) -> str:
    """ "1000 (ann)", or "1000" where nobody is called so."""
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return str(uid)


class SharedOps:
    """One examination's files on this host. `close` takes away those that are still there."""

    def __init__(self, context: dict) -> None:
        self.name = re.sub(r"[^\w.-]", "_", context["name"])
        self.silent: set[str] = set()  # paths that did not answer
        self.entered: set[tuple[str, str]] = set()
        self.locks: dict[tuple[str, str], int] = {}  # open files that hold a lock
        self.making: dict[str, threading.Lock] = {}  # by path: held while a file is made there
        self.left: set[tuple[str, str]] = set()
        self.closed = False

    def close(self) -> None:
        self.closed = True
        for path, token in list(self.entered):
            self._bounded(self._leave, path, token, 2)

    def op_shared_enter(self, path: str, token: str, timeout: float) -> dict:
        """What `path` is here, and whether a file can be written in it."""
        return self._bounded(self._enter, path, token, timeout)

    def op_shared_look(self, path: str, token: str, peers: list, timeout: float, wait: float):
        """Which peers' files are seen here, waiting up to `wait` s for those that are not."""
        return self._bounded(self._look, path, token, timeout, peers, wait)

    def op_shared_list(self, path: str, token: str, timeout: float) -> dict:
        """Names of the entries, but for our own."""
        return self._bounded(self._list, path, token, timeout)

    def op_shared_rename(self, path: str, token: str, timeout: float, seconds: float) -> dict:
        """Replace one file by rename, again and again for `seconds`."""
        return self._bounded(self._rename, path, token, timeout, seconds)

    def op_shared_read(self, path: str, token: str, timeout: float, seconds: float) -> dict:
        """Read that file again and again meanwhile; how often it was not whole."""
        return self._bounded(self._read, path, token, timeout, seconds)

    def op_shared_lock(self, path: str, token: str, timeout: float) -> dict:
        """Try to lock one file; the lock is kept."""
        return self._bounded(self._lock, path, token, timeout)

    def op_shared_leave(self, path: str, token: str, timeout: float) -> dict:
        """Take every file of this examination away, whoever made it."""
        return self._bounded(self._leave, path, token, timeout)

    def _bounded(self, function, path: str, token: str, timeout: float, *args) -> dict:
        if path in self.silent:
            return {"silent": True}
        try:
            return bounded(function, timeout, path, token, *args)
        except TimeoutError:
            self.silent.add(path)
            return {"silent": True}
        except OSError as e:
            return {"error": problem(e)}

    @contextmanager
    def _make(self, path: str, token: str):
        """Around the making of a file: once this host has left, a request that is still at work
        must make none, since nobody would take it away. Raises OSError."""
        with self.making.setdefault(path, threading.Lock()):
            if self.closed or (path, token) in self.left:
                raise OSError(errno.ECANCELED, "the examination is over")
            yield

    def _file(self, path: str, token: str, what: str) -> str:
        return os.path.join(path, f"{PREFIX}{token}-{what}")

    def _enter(self, path: str, token: str) -> dict:
        me = {"uid": os.geteuid(), "user": user(os.geteuid())}
        found: dict = {"mount": mount_of(path), "me": me}
        try:
            at = os.stat(path)
            found["mount"] = mount_of(os.path.realpath(path))
        except OSError as e:
            return {**found, "error": problem(e)}
        found["directory"] = stat.S_ISDIR(at.st_mode)
        found["owner"], found["mode"] = user(at.st_uid), oct(at.st_mode & 0o7777)[2:]
        if not found["directory"]:
            return found
        space = os.statvfs(path)
        found["space"] = {
            "free": space.f_bavail * space.f_frsize, "total": space.f_blocks * space.f_frsize,
            "files free": space.f_favail, "files": space.f_files,
        }  # fmt: skip
        self.entered.add((path, token))
        mine = self._file(path, token, self.name)
        try:
            with self._make(path, token), open(mine, "x") as f:
                f.write(token)
                f.flush()
                os.fsync(f.fileno())
            made = os.stat(mine)
            # squashed: the server gave the file to another than whoever wrote it
            found |= {"written": True, "squashed": made.st_uid != os.geteuid(),
                      "file owner": user(made.st_uid)}  # fmt: skip
            _sweep(path, made.st_mtime)
        except OSError as e:
            found["write_error"] = problem(e)
        return found

    def _look(self, path: str, token: str, peers: list, wait: float) -> dict:
        until, poked = time.monotonic() + wait, time.monotonic()
        while True:
            seen, unreadable = [], []
            for peer in peers:
                try:
                    with open(self._file(path, token, re.sub(r"[^\w.-]", "_", peer))) as f:
                        seen += [peer] if f.read(100) == token else []
                except PermissionError:
                    unreadable.append(peer)
                except OSError:
                    pass
            now = time.monotonic()
            if len(seen) + len(unreadable) == len(peers) or now > until:
                return {"seen": seen, "unreadable": unreadable}
            if now - poked > 0.5:  # changing a directory makes a client ask its server anew
                poked = now
                try:
                    poke = self._file(path, token, f"poke-{self.name}")
                    with self._make(path, token):
                        os.close(os.open(poke, os.O_CREAT | os.O_WRONLY, 0o600))
                        os.unlink(poke)
                except OSError:
                    pass
            time.sleep(0.1)

    def _list(self, path: str, token: str) -> dict:
        names = []
        with os.scandir(path) as entries:
            for entry in entries:
                if not entry.name.startswith(PREFIX):
                    names.append(entry.name)
                if len(names) >= MOST:
                    break
        names.sort()
        digest = hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()
        shown = [n.encode(errors="replace").decode() for n in names[:200]]
        return {"count": len(names), "hash": digest[:16], "names": shown}

    def _rename(self, path: str, token: str, seconds: float) -> dict:
        number, until = 0, time.monotonic() + seconds
        part = self._file(path, token, "part")
        while True:
            number += 1
            with self._make(path, token):
                with open(part, "wb") as f:
                    f.write(b"%015d\n" % number * (BODY // 16))
                os.replace(part, self._file(path, token, "whole"))
            if time.monotonic() >= until:
                return {"renames": number}

    def _read(self, path: str, token: str, seconds: float) -> dict:
        count = {"reads": 0, "absent": 0, "torn": 0, "stale": 0}
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            try:
                with open(self._file(path, token, "whole"), "rb") as f:
                    data = f.read()
                count["reads"] += 1
                if len(data) != BODY or data != data[:16] * (BODY // 16):
                    count["torn"] += 1
            except FileNotFoundError:
                count["absent"] += 1
            except OSError as e:
                if e.errno != errno.ESTALE:
                    raise
                count["stale"] += 1  # NFS says so of a file replaced while open; open it again
            time.sleep(0.002)
        return count

    def _lock(self, path: str, token: str) -> dict:
        with self._make(path, token):
            file = os.open(self._file(path, token, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(file)
            if e.errno in (errno.EACCES, errno.EAGAIN):
                return {"got": False}
            return {"got": False, "error": problem(e)}
        self.locks[path, token] = file
        return {"got": True}

    def _leave(self, path: str, token: str) -> dict:
        with self.making.setdefault(path, threading.Lock()):
            self.left.add((path, token))
        held = self.locks.pop((path, token), None)
        if held is not None:
            os.close(held)
        ours, left = f"{PREFIX}{token}", []
        with os.scandir(path) as entries:
            names = [entry.name for entry in entries if entry.name.startswith(ours)]
        for name in names:
            try:
                os.unlink(os.path.join(path, name))
            except FileNotFoundError:
                pass  # a peer was quicker
            except OSError:
                left.append(name)
        if not left:
            self.entered.discard((path, token))
        return {"left": left}


def _sweep(path: str, now: float) -> None:
    """Take away what an examination by this user that was killed left here. `now`: the time by the
    file server's clock, not by this host's."""
    with os.scandir(path) as entries:
        names = [e.name for e in entries if e.name.startswith(PREFIX)]
    for name in names:
        file = os.path.join(path, name)
        try:
            at = os.lstat(file)
            if at.st_uid == os.geteuid() and now - at.st_mtime > STALE:
                os.unlink(file)
        except OSError:
            continue
