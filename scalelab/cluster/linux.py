"""The few Linux calls that emulated hosts need and Python (before 3.12) lacks.

Thin ctypes wrappers: each raises OSError with the kernel's errno. Sources: unshare(2), setns(2),
mount(2), prctl(2), capabilities(7), user_namespaces(7).
"""

from __future__ import annotations

import ctypes
import os
import sys

LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 47, 2
_CAP_VERSION_3 = 0x20080522


def _check(result: int, what: str) -> None:
    if result != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{what}: {os.strerror(errno)}")


def unshare(flags: int) -> None:
    """Leave the namespaces named by `flags` (CLONE_NEW…) for new ones."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def setns(fd: int, flag: int) -> None:
    """Join the namespace behind `fd`."""
    _check(_libc.setns(ctypes.c_int(fd), ctypes.c_int(flag)), "setns")


def sethostname(name: str) -> None:
    """Name this UTS namespace."""
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")


def mount(source: str, target: str, fstype: str = "", flags: int = 0, data: str = "") -> None:
    """mount(2). Empty `fstype` and `data` are passed as NULL."""
    _check(
        _libc.mount(
            os.fsencode(source),
            os.fsencode(target),
            fstype.encode() or None,
            ctypes.c_ulong(flags),
            data.encode() or None,
        ),
        f"mount {target}",
    )


def umount(target: str) -> None:
    """Detach the mount on top of `target`; files still open stay readable."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(MNT_DETACH)), f"umount {target}")


def bind(source: str, target: str, readonly: bool = False) -> None:
    """Show `source` at `target`."""
    mount(source, target, flags=MS_BIND | MS_REC)
    if readonly:
        # A remount inside a user namespace must repeat the flags that are locked from outside.
        have = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | have)


def die_with_parent(sig: int) -> None:
    """The kernel sends `sig` to this process when the thread that forked it ends (Linux only)."""
    if LINUX:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(sig), 0, 0, 0), "prctl")


def adopt_orphans() -> None:
    """Orphaned descendants become children of this process instead of init's (Linux only)."""
    if LINUX:
        _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0), "prctl")


class _CapHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _CapData(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint32) for n in ("effective", "permitted", "inheritable")]


def keep_capabilities_over_exec() -> None:
    """Raise every permitted capability into the ambient set.

    A process whose uid is not 0 loses its capabilities at exec; the admin's shell inside an
    emulated host must not, or it could neither change a route nor load a firewall.
    """
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    _check(_libc.capget(ctypes.byref(header), data), "capget")
    for part in data:
        part.inheritable = part.permitted
    _check(_libc.capset(ctypes.byref(header), data), "capset")
    for cap in range(64):
        if data[cap // 32].permitted >> (cap % 32) & 1:
            _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, ctypes.c_ulong(cap), 0, 0)


def has_sys_admin() -> bool:
    """True where this process may already make namespaces without a user namespace."""
    header, data = _CapHeader(_CAP_VERSION_3, 0), (_CapData * 2)()
    return _libc.capget(ctypes.byref(header), data) == 0 and bool(data[0].effective >> 21 & 1)


def new_user_namespace() -> None:
    """Enter a new user namespace that maps just this user's uid and gid to themselves.

    Keeping them (rather than becoming root inside) makes a file permission behave as on a real
    machine, and shows learners their own name.
    """
    uid, gid = os.geteuid(), os.getegid()
    unshare(CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("gid_map", f"{gid} {gid} 1"),
        ("uid_map", f"{uid} {uid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)
