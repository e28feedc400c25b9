"""Run a command as on a machine that allows less: `python jail.py WHAT… -- COMMAND…`.

user[=UID]   an ordinary user: no capability, no new privileges
no-userns    user namespaces switched off (user.max_user_namespaces is 0); implies user
deny=CALL    a container's system-call filter that refuses CALL: unshare, netns or mount
tmp=DIR      DIR/tmp for /tmp and DIR/shm for /dev/shm, so that what it leaves there is its own

Needs neither root nor a tool: namespaces, prctl(2) and seccomp(2) by way of ctypes.
"""

import ctypes
import os
import platform
import struct
import sys

CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWNS = 0x10000000, 0x40000000, 0x20000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 22, 38, 2
EPERM = 1
# (unshare, mount) by machine
CALLS = {"x86_64": (272, 165), "aarch64": (97, 40)}
libc = ctypes.CDLL(None, use_errno=True)


def check(result):
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def cover(folder):
    if os.geteuid() != 0:
        become_user(os.geteuid())
    check(libc.unshare(CLONE_NEWNS))
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None))
    for name, place in (("tmp", b"/tmp"), ("shm", b"/dev/shm")):
        source = os.fsencode(os.path.join(folder, name))
        check(libc.mount(source, place, None, ctypes.c_ulong(MS_BIND), None))


def become_user(uid, bar_userns=False):
    outside = os.geteuid(), os.getegid()
    check(libc.unshare(CLONE_NEWUSER))
    for name, text in (
        ("setgroups", "deny"),
        ("gid_map", f"{uid} {outside[1]} 1"),
        ("uid_map", f"{uid} {outside[0]} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as f:
            f.write(text)
    if bar_userns:
        with open("/proc/sys/user/max_user_namespaces", "w") as f:
            f.write("0")
    # exec takes the capabilities away: the uid is not 0


def deny(call):
    unshare, mount = CALLS[platform.machine()]

    def op(code, k, yes=0, no=0):
        return struct.pack("=HBBI", code, yes, no, k)

    load, equal, bits, answer = 0x20, 0x15, 0x45, 0x06
    allow, refuse = op(answer, 0x7FFF0000), op(answer, 0x00050000 | EPERM)
    if call == "netns":  # unshare(…CLONE_NEWNET…): its flags are the first argument, at 16
        program = [op(load, 0), op(equal, unshare, 0, 2)]
        program += [op(load, 16), op(bits, CLONE_NEWNET, 1, 0)]
    else:
        program = [op(load, 0), op(equal, unshare if call == "unshare" else mount, 1, 0)]
    code = b"".join([*program, allow, refuse])
    held = ctypes.create_string_buffer(code)
    given = struct.pack("HP", len(code) // 8, ctypes.addressof(held))
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, given, 0, 0))


def main():
    at = sys.argv.index("--")
    words, command = sys.argv[1:at], sys.argv[at + 1 :]
    for word in words:
        name, _, value = word.partition("=")
        if name == "tmp":
            cover(value)
        if name in ("user", "no-userns"):
            become_user(int(value or 1000), name == "no-userns")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), 0, 0, 0))
    for word in words:
        if word.startswith("deny="):
            deny(word[5:])
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
