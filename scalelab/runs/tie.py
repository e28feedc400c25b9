"""Run a command, and end with everything it started: python tie.py COMMAND [ARGS…]

torchrun gives each worker a session of its own, so a signal to torchrun's process group does not
reach them, and they outlive an agent that is killed. All that the command starts, and whatever
of it is orphaned, stays a descendant of this process, which ends it on SIGTERM and on its own way
out. Exit code: the command's (128 + n for the signal n).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # this file's folder holds no packages
from scalelab.cluster import hostd, linux  # noqa: E402


def end_all() -> None:
    """SIGKILL whatever is left of the command."""
    try:
        own_proc = os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        own_proc = sys.platform != "linux"
    if own_proc:
        hostd.end_descendants()
    else:
        # An emulated host in a container that forbids a fresh /proc: the numbers there are not
        # this host's. All but its first process and this one.
        os.kill(-1, signal.SIGKILL)


def main() -> int:
    def stop(*_) -> None:
        end_all()
        os._exit(128 + signal.SIGTERM)

    linux.adopt_orphans() if linux.LINUX else None
    signal.signal(signal.SIGTERM, stop)
    child = subprocess.Popen(
        sys.argv[1:],
        preexec_fn=lambda: linux.die_with_parent(signal.SIGKILL),
    )
    code = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_all()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
