"""What one emulated host sees of the file system: its own /etc/hosts, /dev/shm, /proc, and
directories that are shared, private, missing or read-only there.

Runs inside a host's own mount namespace; nothing here touches the machine outside.
"""

from __future__ import annotations

import hashlib
import os

from . import linux

MODES = ("shared", "private", "missing", "readonly")
MAX_SIBLINGS = 2000


class View:
    """One host's view. `scratch` is a directory of the owner's tmpfs that outlives the host."""

    def __init__(self, name: str, scratch: str) -> None:
        self.changed: list[tuple[str, str, str]] = []  # (path, mode, where its mount sits)
        self.own_hosts = False
        os.makedirs(f"{scratch}/{name}", exist_ok=True)
        # Opened before /dev/shm is covered below; stays reachable through /proc/self/fd.
        self.scratch = os.open(f"{scratch}/{name}", os.O_PATH | os.O_DIRECTORY)
        self._proc_and_sys()
        # These lie in the owner's tmpfs, out of this host's sight once /dev/shm is covered. (Bound
        # from a file that is then unlinked, a cluster inside this host could not bind over them.)
        self.etc = f"{scratch}/{name}.etc"
        os.makedirs(self.etc, exist_ok=True)
        self.own_hosts = self._own_file("/etc/hosts", "")
        self._own_file("/etc/hostname", f"{name}\n")
        # A resolver service of the real machine would answer before /etc/hosts on some systems.
        self._own_file("/etc/nsswitch.conf", "passwd: files\ngroup: files\nhosts: files\n")
        linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777")

    def _proc_and_sys(self) -> None:
        try:
            linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV)
        except OSError:
            pass  # a container that masks parts of /proc forbids a fresh one; the old one serves
        cgroups = "/sys/fs/cgroup"
        try:
            held = os.open(cgroups, os.O_PATH | os.O_DIRECTORY)
            linux.mount("sysfs", "/sys", "sysfs", linux.MS_NOSUID | linux.MS_NODEV)
            linux.mount(f"/proc/self/fd/{held}", cgroups, flags=linux.MS_BIND | linux.MS_REC)
            os.close(held)
        except OSError:
            pass  # /sys/class/net then lists the machine's interfaces; nothing here reads it

    def _own_file(self, path: str, text: str) -> bool:
        there = os.path.exists(path)
        if there:
            mine = f"{self.etc}/{os.path.basename(path)}"
            with open(mine, "w") as f:
                f.write(text)
            linux.bind(mine, path)
        return there

    def set_hosts(self, text: str) -> None:
        """Rewrite this host's /etc/hosts in place."""
        if not self.own_hosts:  # never the machine's own
            raise OSError("this machine has no /etc/hosts for emulated hosts to have their own of")
        with open("/etc/hosts", "w") as f:
            f.write(text)

    def set_dir(self, path: str, mode: str) -> None:
        """Make `path` shared (as outside), private (this host's own, empty at first), missing,
        or readonly on this host. Raises ValueError with one line for what cannot be done."""
        path = os.path.abspath(path)
        if mode not in MODES:
            raise ValueError(f"directory mode {mode!r}: use one of {', '.join(MODES)}")
        if path == "/":
            raise ValueError("/: the root directory is what it is; name one below it")
        # Mounts lie on one another: those above the one to undo come off first, and go back on.
        above = []
        if any(p == path for p, _, _ in self.changed):
            while True:
                top, its_mode, where = self.changed.pop()
                linux.umount(where)
                if top == path:
                    break
                above.insert(0, (top, its_mode))
        for other, its_mode in above:
            try:
                self._apply(other, its_mode)
            except (OSError, ValueError):
                pass  # it was inside what has just been undone
        if mode != "shared":
            self._apply(path, mode)

    def _apply(self, path: str, mode: str) -> None:
        # A link whose target is missing here can be missing too.
        if not (os.path.lexists if mode == "missing" else os.path.exists)(path):
            raise ValueError(f"{path}: no such file or directory")
        where = path
        if mode == "missing":
            where = os.path.dirname(path)
            self._hide(where, os.path.basename(path))
        elif mode == "readonly":
            linux.bind(path, path, readonly=True)
        else:
            if not os.path.isdir(path):
                raise ValueError(f"{path}: only a directory can be private")
            name = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
            own = f"/proc/self/fd/{self.scratch}/{name}"
            os.makedirs(own, exist_ok=True)
            linux.bind(own, path)
        self.changed.append((path, mode, where))

    def _hide(self, parent: str, name: str) -> None:
        # A name cannot be removed for one host alone, so its parent is replaced by a tmpfs that
        # shows all the parent's other entries. What this host newly creates there is its own.
        entries = sorted(os.listdir(parent))
        if len(entries) > MAX_SIBLINGS:
            raise ValueError(f"{parent} has over {MAX_SIBLINGS} entries: hide something smaller")
        old = os.open(parent, os.O_PATH | os.O_DIRECTORY)
        mode = os.stat(parent).st_mode & 0o7777
        linux.mount("tmpfs", parent, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, f"mode={mode:o}")
        try:
            for entry in entries:
                if entry != name:
                    self._show(f"/proc/self/fd/{old}/{entry}", os.path.join(parent, entry))
        except OSError:
            linux.umount(parent)
            raise
        finally:
            os.close(old)

    def _show(self, source: str, target: str) -> None:
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
            return
        is_dir = os.path.isdir(source)
        if is_dir:
            os.mkdir(target)
        else:
            open(target, "w").close()
        try:
            linux.bind(source, target)
        except FileNotFoundError:  # gone since it was listed, as happens in /tmp
            (os.rmdir if is_dir else os.unlink)(target)
