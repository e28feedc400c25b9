"""What the tests of runs and of the command line share: scripts to launch, a stand-in for
torchrun, ways to be another user, and a look from outside at what is left running."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MARK = "SCALELAB_TEST_CALL"  # every process of one call carries it in its environment

# One step a line, as a training script would write it; no torch, so a rank starts at once.
COUNT = """
import json, os, sys, time
rank, steps = int(os.environ["RANK"]), int(sys.argv[1])
pause = float(sys.argv[2]) if len(sys.argv) > 2 else 0
out = open(os.environ["SCALELAB_METRICS"], "a")
for step in range(1, steps + 1):
    line = {"step": step, "rank": rank, "loss": 5.0 - step / 100, "tokens": 64,
            "time": time.time(), "seconds": {"data": 0.0, "forward": 0.0, "backward": 0.0,
            "communication": None, "update": 0.0}}
    print(json.dumps(line), file=out, flush=True)
    time.sleep(pause)
print("rank", rank, "counted to", steps)
"""

# `python -m torch.distributed.run` finds this first, with its folder on PYTHONPATH. It starts
# the ranks as torchrun does (a session each, SIGTERM to the group), without a rendezvous.
STAND_IN = """
import os, signal, subprocess, sys, time
args, flags = sys.argv[1:], {}
while args[0].startswith("--"):
    name, _, value = args.pop(0)[2:].partition("=")
    flags[name] = value
node, per_node = int(os.environ["SCALELAB_NODE"][4:]), int(flags["nproc-per-node"])
if os.environ.get("NO_RANKS_ON") == str(node):
    sys.exit(0)
ranks = []
for i in range(per_node):
    env = dict(os.environ, RANK=str(node * per_node + i), LOCAL_RANK=str(i),
               WORLD_SIZE=str(per_node * int(flags["nnodes"])),
               MASTER_ADDR=flags["rdzv-endpoint"].split(":")[0],
               TORCHELASTIC_RESTART_COUNT="0")
    ranks.append(subprocess.Popen([sys.executable, "-u", *args], env=env, start_new_session=True))
def end():
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGTERM)
def asked_to_end(*_):
    end()
    time.sleep(0.3)
    sys.exit(1)
signal.signal(signal.SIGTERM, asked_to_end)
while any(r.poll() is None for r in ranks):
    if any(r.returncode for r in ranks):
        end()
        break
    time.sleep(0.02)
time.sleep(0.1)
if any(r.poll() for r in ranks):
    sys.exit("torch.distributed.elastic.multiprocessing.errors.ChildFailedError: stand-in")
"""


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def stand_in(folder: Path) -> dict[str, str]:
    """The environment in which torchrun is the stand-in."""
    write(folder / "torch" / "__init__.py", "")
    write(folder / "torch" / "distributed" / "__init__.py", "")
    write(folder / "torch" / "distributed" / "run.py", STAND_IN)
    return {"PYTHONPATH": str(folder)}


def running(mark: str, name: str = MARK) -> list[int]:
    """PIDs, as this machine counts, of the processes with `name`=`mark` in their environment."""
    wanted, found = f"{name}={mark}".encode(), []
    for entry in os.listdir("/proc"):
        try:
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            with open(f"/proc/{entry}/environ", "rb") as f:
                if wanted in f.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue  # ended meanwhile, or another user's
    return found


def all_gone(mark: str, within: float = 2, name: str = MARK) -> bool:
    until = time.monotonic() + within
    while left := running(mark, name):
        if time.monotonic() > until:
            print("left running:", left)
            return False
        time.sleep(0.05)
    return True


def eventually(true, within: float = 30) -> bool:
    """Whether true() holds before `within` seconds are over."""
    until = time.monotonic() + within
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


# Other users. Each is a command to put in front of another, or "" and why it is not to be had.

ORDINARY = ["unshare", "-U", "--map-user=1000", "--map-group=1000", "setpriv", "--no-new-privs"]
# The limit is this new namespace's own, and nobody inside has the right to lift it.
NO_NAMESPACES = [
    "unshare", "-Ur", "sh", "-c",
    'echo 0 > /proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all '
    '--inh-caps=-all --no-new-privs "$@"', "sh",
]  # fmt: skip
OTHER_UID = 12345


def cannot(prefix: list[str]) -> str:
    """Why commands cannot be run with this prefix here, or ""."""
    for tool in ("unshare", "setpriv"):
        if not shutil.which(tool):
            return f"needs {tool} (util-linux)"
    tried = subprocess.run([*prefix, "true"], capture_output=True, text=True, timeout=20)
    words = (tried.stderr.strip().splitlines() or [f"exit {tried.returncode}"])[-1]
    return f"cannot become that user here: {words}" if tried.returncode else ""


def small_disk(at: Path, megabytes: int) -> list[str]:
    """A prefix: the command sees a disk of this size at `at`; nobody else does."""
    at.mkdir(parents=True, exist_ok=True)
    unshare = "-m" if os.getuid() == 0 else "-Urm"
    script = f'mount -t tmpfs -o size={megabytes}m none "$0" && exec "$@"'
    return ["unshare", unshare, "sh", "-c", script, str(at)]


# The command line, as a person would use it.


@dataclass
class Call:
    """`python -m scalelab ARGS`, in a session, home and temporary directory of its own."""

    folder: Path
    args: tuple
    prefix: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    python: str = sys.executable
    cpus: set[int] | None = None
    code: int | None = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0

    def start(self) -> "Call":
        self.mark, self.home = uuid.uuid4().hex, self.folder / "home"
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True, exist_ok=True)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {
            **os.environ, "PYTHONPATH": path, MARK: self.mark, "SCALELAB_HOME": str(self.home),
            "TMPDIR": str(self.temporary), "HOME": str(self.folder), **self.env,
        }  # fmt: skip
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*self.prefix, self.python, "-m", "scalelab", *map(str, self.args)],
            env=env, cwd=self.folder, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, self.cpus)) if self.cpus else None,
        )  # fmt: skip
        return self

    def ctrl_c(self, sig: int = signal.SIGINT) -> "Call":
        os.killpg(self.process.pid, sig)
        return self

    def finish(self, timeout: float = 60) -> "Call":
        """Wait for its end; whatever happened, nothing may be left of it."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"not over after {timeout} s; it said: {self.err}") from None
        finally:
            self.seconds = time.monotonic() - self.began
            self.code = self.process.returncode
            gone = all_gone(self.mark)
        assert gone, "processes were left running"
        files = sorted(p.name for p in self.temporary.iterdir())
        assert files == [], f"temporary files were left: {files}"
        return self

    @property
    def json(self) -> dict:
        """What it printed; one JSON object and nothing else."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """What it said on stderr: one line."""
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        return self.err.strip()


def scalelab(folder: Path, *args, timeout: float = 60, **kw) -> Call:
    return Call(folder, args, **kw).start().finish(timeout)
