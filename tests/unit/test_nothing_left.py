"""kill -9 of anything, at any moment: no process, namespace, mount, port or file is left.

Looked at from outside. What belongs to a client is told by a token in its environment, which every
process below it inherits, and by the namespaces, sockets and PIDs its processes were seen to have;
so the tests hold while the machine does other things too. Files: the client has a /tmp, /dev/shm,
TMPDIR and home directory of its own.

SCALELAB_TEST_SEED repeats a sequence of moments, SCALELAB_TEST_ROUNDS asks for more of them.
"""

import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import psutil
import pytest

from scalelab import cluster
from scalelab.cluster.leftovers import MARK, client_mark

pytestmark = pytest.mark.slow

PY, ROOT = sys.executable, Path(__file__).resolve().parents[2]
JAIL = str(Path(__file__).with_name("jail.py"))
TOKEN = "SCALELAB_TEST_TOKEN"
PROBLEM = cluster.virtual_problem()
# torch's cache of compiled code, one for all of a user's programs: importing torch._dynamo makes
# it, as DDP does, also when run by hand. (On emulated hosts it is in their own /dev/shm.)
TORCHS_CACHE = "torchinductor_"
SEED = os.environ.get("SCALELAB_TEST_SEED") or secrets.token_hex(4)
ROUNDS = int(os.environ.get("SCALELAB_TEST_ROUNDS", "1"))
SECONDS_TO_GO = 5.0  # everything is gone so soon after the client's end
SECONDS_TO_END = 40.0  # a client ends by itself so soon after a part of it was killed


def until(true, timeout=20.0, step=0.01, what="it"):
    end = time.monotonic() + timeout
    while not (value := true()):
        assert time.monotonic() < end, f"waited too long for {what}"
        time.sleep(step)
    return value


def read(path):
    try:
        return Path(path).read_bytes()
    except OSError:  # it ended meanwhile, or is another user's
        return b""


def link(path):
    try:
        return os.readlink(path)
    except OSError:
        return ""


def pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def started(pid):
    """When a process began, in ticks; 0 if it has ended, a zombie included."""
    fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    return int(fields[19]) if fields and fields[0] not in (b"Z", b"X") else 0


def listening():
    """Inodes of the machine's listening TCP sockets."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in read(f"/proc/net/{name}").decode().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.add(int(fields[9]))
    return found


def own_tmp_problem(base):
    """Why a client cannot have a /tmp of its own here, or ""."""
    for path in (base, ROOT, PY, os.path.realpath(PY), sys.prefix):
        if Path(path).is_relative_to("/tmp"):
            return f"{path} is below /tmp"
    return PROBLEM and f"no mount namespaces here: {PROBLEM}"


class Outside:
    """One client, and a look from outside at everything that is, or was, part of it."""

    def __init__(self):
        place = "/var/tmp" if os.access("/var/tmp", os.W_OK) else None
        self.base = Path(tempfile.mkdtemp(prefix="scalelab-test-", dir=place))
        for name in ("tmp", "shm", "tmpdir", "home", "ipython"):
            (self.base / name).mkdir()
        self.token = uuid.uuid4().hex
        self.mounts = read("/proc/self/mountinfo")
        self.spaces, self.sockets, self.seen = set(), set(), set()
        self.mine = {link(f"/proc/self/ns/{kind}") for kind in ("net", "pid")}
        self.process = None

    def start(self, *argv, jail=(), **kw):
        env = {
            **os.environ, TOKEN: self.token, "TMPDIR": str(self.base / "tmpdir"),
            "HOME": str(self.base / "home"), "SCALELAB_HOME": str(self.base / "home"),
            "IPYTHONDIR": str(self.base / "ipython"), "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        if not own_tmp_problem(self.base):
            jail = (*jail, f"tmp={self.base}")
        if jail:
            argv = (PY, JAIL, *jail, "--", *argv)
        self.process = subprocess.Popen(
            argv, env=env, cwd=self.base, start_new_session=True,
            **{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, **kw},
        )  # fmt: skip
        return self.process

    def processes(self):
        wanted = f"{TOKEN}={self.token}".encode()
        found = [p for p in pids() if wanted in read(f"/proc/{p}/environ").split(b"\0")]
        return [p for p in found if started(p) and p != os.getpid()]

    def look(self):
        """Note what the client's processes have now, to know it again when they are gone."""
        ports = listening()
        for pid in self.processes():
            self.seen.add((pid, started(pid)))
            for kind in ("net", "pid"):
                self.spaces.add(link(f"/proc/{pid}/ns/{kind}"))
            try:
                files = os.listdir(f"/proc/{pid}/fd")
            except OSError:
                continue
            for fd in files:
                target = link(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:[") and int(target[8:-1]) in ports:
                    self.sockets.add(int(target[8:-1]))
        self.spaces -= {*self.mine, ""}

    def left(self):
        """What is left of it, in words."""
        found = [f"process {p}: {read(f'/proc/{p}/cmdline')[:200]!r}" for p in self.processes()]
        found += [f"process {p} seen before" for p, when in self.seen if when == started(p) > 0]
        for pid in pids():
            for kind in ("net", "pid", "pid_for_children"):
                if (space := link(f"/proc/{pid}/ns/{kind}")) in self.spaces:
                    found.append(f"process {pid} in the namespace {space}")
        found += [f"listening socket {s}" for s in self.sockets & listening()]
        if read("/proc/self/mountinfo") != self.mounts:
            found.append("mounts have changed")
        for name in ("tmp", "shm", "tmpdir"):
            files = (self.base / name).iterdir()
            found += [f"file {p}" for p in files if not p.name.startswith(TORCHS_CACHE)]
        found += [f"file {p}" for p in (self.base / "home").iterdir() if p.name != "runs"]
        return found

    def assert_gone(self, within=SECONDS_TO_GO):
        end = time.monotonic() + within
        while (left := self.left()) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left, f"left {within:g} s later (seed {SEED}): {left}"

    def end(self):
        """After a test, however it went."""
        if self.process and self.process.poll() is None:
            self.process.kill()
        if self.process:
            self.process.wait()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe:
                    pipe.close()
        time.sleep(0.05)
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.base, ignore_errors=True)


@pytest.fixture
def outside():
    made = []

    def make():
        made.append(Outside())
        return made[-1]

    yield make
    for one in made:
        one.end()


@pytest.fixture(params=["virtual", "local"])
def kind(request):
    if request.param == "virtual" and PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    return request.param


# The checks themselves: each finds what it is there to find


def test_a_process_left_behind_is_found(outside):
    it = outside()
    it.start("/bin/sh", "-c", "setsid sleep 100 & exit 0").wait()
    assert any("sleep" in line for line in it.left())


def test_a_process_that_hid_its_environment_is_found(outside):
    it = outside()
    code = "import os, sys, time; time.sleep(0.5); os.execve('/bin/sleep', ['sleep', '60'], {})"
    process = it.start(PY, "-c", code)
    until(it.processes, what="the process")
    it.look()
    until(lambda: read(f"/proc/{process.pid}/comm") == b"sleep\n", what="exec")
    assert it.processes() == [] and any("seen before" in line for line in it.left())


def test_a_namespace_left_behind_is_found(outside):
    if PROBLEM:
        pytest.skip(f"no namespaces here: {PROBLEM}")
    it = outside()
    code = (
        "import os, sys; from scalelab.cluster import linux as l\n"
        "l.has_sys_admin() or l.new_user_namespace(); l.unshare(l.CLONE_NEWNET)\n"
        "if os.fork() == 0: os.execve('/bin/sleep', ['sleep', '60'], {})\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    process = it.start(PY, "-c", code, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "there\n"
    it.look()
    hidden = [c.pid for c in psutil.Process(process.pid).children()]
    process.kill()
    process.wait()
    try:
        until(lambda: it.processes() == [])
        assert any("in the namespace net:[" in line for line in it.left())
    finally:
        for pid in hidden:
            os.kill(pid, signal.SIGKILL)
    it.assert_gone()


def test_a_port_left_behind_is_found(outside):
    it = outside()
    code = (
        "import os, socket, sys; s = socket.create_server(('127.0.0.1', 0))\n"
        "if os.fork() == 0: os.set_inheritable(s.fileno(), True); "
        "os.execve('/bin/sleep', ['sleep', '60'], {})\n"
        "print('there', flush=True); sys.stdin.read()"
    )
    process = it.start(PY, "-c", code, stdin=subprocess.PIPE)
    assert process.stdout.readline() == "there\n"
    it.look()
    hidden = [c.pid for c in psutil.Process(process.pid).children()]
    process.kill()
    process.wait()
    try:
        assert any(line.startswith("listening socket") for line in it.left())
    finally:
        for pid in hidden:
            os.kill(pid, signal.SIGKILL)
    it.assert_gone()


@pytest.mark.parametrize("place", ["/tmp", "/dev/shm", "$TMPDIR", "$HOME"])
def test_a_file_left_behind_is_found(outside, place):
    it = outside()
    problem = own_tmp_problem(it.base)
    if place.startswith("/") and problem:
        pytest.skip(f"no /tmp of its own for a client: {problem}")
    it.start("/bin/sh", "-c", f"echo x > {place}/planted").wait()
    assert [line for line in it.left() if line.endswith("/planted")] and len(it.left()) == 1
    assert not os.path.exists("/tmp/planted") and not os.path.exists("/dev/shm/planted")


def test_a_mount_left_behind_is_found(outside):
    it = outside()
    assert it.left() == []
    it.mounts = b"".join(it.mounts.splitlines(keepends=True)[:-1])  # one fewer than there are now
    assert it.left() == ["mounts have changed"]


# Twenty moments

# What a notebook does, without torchrun: up, commands on every host, down. Says where it is.
PLAIN = """
import os, sys, time
from scalelab import cluster
def say(text): print(text, flush=True)
say("starting")
c = cluster.start(sys.argv[1], 2)
null = os.open(os.devnull, os.O_RDWR)
argv = ["/bin/sh", "-c", "sleep 60 & setsid sleep 60 & exec sleep 60"]
listen = "import socket, time; s = socket.create_server(('', 0)); time.sleep(60)"
say("up")
held = [n.spawn(argv, out=null, err=null) for n in c.nodes]
held += [n.spawn([sys.executable, "-c", listen], out=null, err=null) for n in c.nodes]
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end and not any(p.ended.is_set() for p in held):
    time.sleep(0.01)
say("ending")
c.close()
"""

# A rank that says where it is by files in its run's record.
SCRIPT = """
import os, pathlib, time
place = pathlib.Path(os.environ["SCALELAB_RUN_DIR"])
(place / ("up" + os.environ["RANK"])).touch()
time.sleep(1)
(place / ("ending" + os.environ["RANK"])).touch()
"""

CELL = """
from scalelab import cluster, runs
c = cluster.start({kind!r}, 2)
run = runs.launch({script!r}, cluster=c, timeout=60)
run.wait()
c.close()
"""

# How long after a stage was reached the blow falls, at most: s
STAGES = {"starting": 0.6, "up": 0.5, "ending": 0.03}
STAGES_OF_RUN = {"starting": 4.0, "up": 0.9, "ending": 0.3}

CASES = [
    *[("plain", "virtual", v) for v in ("client", "owner", "inside", "host")] * 2,
    *[("plain", "local", v) for v in ("client", "owner", "host", "client")],
    *[("run", "virtual", v) for v in ("client", "agent", "keeper", "rank")],
    *[("run", "local", v) for v in ("client", "agent", "keeper", "rank")],
    ("kernel", "virtual", "client"),
    ("kernel", "local", "client"),
]


def family(client, kind):
    """The parts of a client's cluster, by what they are."""
    def below(processes, words=""):
        found = []
        for process in processes:
            try:
                for child in process.children():
                    if words in " ".join(child.cmdline()):
                        found.append(child)
            except psutil.Error:
                continue
        return found

    client = [psutil.Process(client)]
    owner = below(client, "owner.main()")
    inside = below(owner) if kind == "virtual" else []
    hosts = below(inside or owner, "owner.main()") if inside or kind == "local" else []
    agents = below(hosts, "torch.distributed.run")
    keepers = below(agents, "rank.py")
    return {
        "client": client, "owner": owner, "inside": inside, "host": hosts, "agent": agents,
        "keeper": keepers, "rank": below(keepers),
    }  # fmt: skip


class Life:
    """A client on its way, and where it is."""

    def __init__(self, it, what, kind):
        self.it, self.what = it, what
        if what == "plain":
            self.process = it.start(PY, "-c", PLAIN, kind, "0.6")
            return
        script = it.base / "script.py"
        script.write_text(SCRIPT)
        if what == "run":
            self.process = it.start(
                PY, "-m", "scalelab", "run", "--cluster", kind, "--timeout", "60", script,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        else:
            self.process = self.kernel(CELL.format(kind=kind, script=str(script)))

    def kernel(self, cell):
        """A notebook's kernel that has been given a cell to run."""
        from jupyter_client import BlockingKernelClient
        from jupyter_client.connect import write_connection_file

        file = str(self.it.base / "connection.json")
        write_connection_file(file, transport="ipc", ip=str(self.it.base / "ipc"))
        argv = [PY, "-m", "ipykernel_launcher", "-f", file]
        process = self.it.start(*argv, stdout=subprocess.DEVNULL)
        client = BlockingKernelClient(connection_file=file)
        client.load_connection_file()
        client.start_channels()
        end = time.monotonic() + 60
        while True:
            try:
                client.wait_for_ready(timeout=20)
                break
            except RuntimeError:  # a busy machine's kernel is late, and is then taken for dead
                assert process.poll() is None and time.monotonic() < end, "no kernel"
        client.execute(cell)
        client.stop_channels()
        return process

    def wait_for(self, stage):
        """Until the client has got there, or has ended."""
        if self.what == "plain":
            for line in self.process.stdout:
                if line.strip() == stage:
                    break
        elif stage != "starting":
            there = self.it.base / "home" / "runs"
            until(lambda: self.over() or [*there.glob(f"*/{stage}*")], 60, what=stage)

    def over(self):
        return self.process.poll() is not None


@pytest.mark.parametrize("number", range(ROUNDS * len(CASES)))
def test_kill_9_at_a_random_moment(outside, number):
    what, kind, victim = CASES[number % len(CASES)]
    if kind == "virtual" and PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    dice = random.Random(f"{SEED} {number}")
    stages = STAGES if what == "plain" else STAGES_OF_RUN
    stage = dice.choice(list(stages))
    late = dice.uniform(0, stages[stage])
    print(f"seed {SEED}, {number}: {what} {kind}: kill -9 {victim} {late:.3f} s after {stage}")

    it = outside()
    life = Life(it, what, kind)
    found = []
    if stage == "ending":  # an end is over before one has looked around
        life.wait_for("up")
        it.look()
        found = until(lambda: family(life.process.pid, kind)[victim] or life.over(), what=victim)
    life.wait_for(stage)
    time.sleep(late)
    if stage != "ending":
        it.look()

    def strike():
        try:
            if some := found or family(life.process.pid, kind)[victim]:
                dice.choice(some).kill()
                return "struck"
        except psutil.Error:
            pass
        return "over before" if life.over() else ""

    print(until(strike, 60, what=victim))
    it.look()
    if victim != "client":
        until(life.over, SECONDS_TO_END, what="the client's own end")
    life.process.wait(10)
    it.assert_gone()


def test_a_life_without_a_blow_leaves_nothing_but_its_record(outside, kind):
    it = outside()
    life = Life(it, "run", kind)
    life.wait_for("up")
    it.look()
    assert len(it.seen) >= 8 and it.left()
    assert life.process.wait(60) == 0
    assert len(it.spaces) == (6 if kind == "virtual" else 0)  # owner and two hosts: net and PID
    it.assert_gone()
    assert len(os.listdir(it.base / "home" / "runs")) == 1


def test_a_stuck_owner_does_not_outlive_its_client(outside):
    """The first process inside is stopped, and cannot notice anything."""
    if PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    it = outside()
    life = Life(it, "plain", "virtual")
    life.wait_for("up")
    (inside,) = family(life.process.pid, "virtual")["inside"]
    it.look()
    inside.suspend()
    life.process.kill()
    life.process.wait()
    it.assert_gone(within=10)


# A client's own doings

FORKS = """
import multiprocessing, os, sys, time
from scalelab import cluster
c = cluster.start(sys.argv[1], 2)
def live_on():
    os.environ.clear()
    time.sleep(60)
child = multiprocessing.get_context("fork").Process(target=live_on, daemon=False)
child.start()
print(child.pid, flush=True)
time.sleep(60) if sys.argv[2] == "killed" else os._exit(0)
"""


@pytest.mark.parametrize("how", ["killed", "exits"])
def test_a_fork_that_outlives_the_client_does_not_keep_the_cluster(outside, kind, how):
    it = outside()
    process = it.start(PY, "-c", FORKS, kind, how)
    child = int(process.stdout.readline())
    it.look()
    if how == "killed":
        process.kill()
    process.wait(10)
    until(lambda: it.processes() == [child], SECONDS_TO_GO, what="all but the fork to go")
    os.kill(child, signal.SIGKILL)
    it.assert_gone()


# Commands on stdin, one JSON line for each on stdout.
TALK = """
import json, os, sys
from scalelab import cluster
with cluster.start(sys.argv[1], 2) as c:
    ask = "hostname; readlink /proc/self/ns/net; readlink /proc/self/ns/pid"
    for line in sys.stdin:
        if line == "kill\\n":
            c.node(1).kill(), c.node(1).start()
        print(json.dumps([[n.addr, *n.sh(ask).stdout.split()] for n in c.nodes]), flush=True)
"""


def talk(process, word="look"):
    process.stdin.write(word + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("users", [(), ("user=1000", "user=1001")], ids=["one", "two"])
def test_two_clients_clusters_do_not_touch_each_other(outside, kind, users):
    if users and PROBLEM:
        pytest.skip(f"no second user here: {PROBLEM}")
    one, other = outside(), outside()
    first, second = (
        it.start(PY, "-c", TALK, kind, jail=users[i : i + 1], stdin=subprocess.PIPE)
        for i, it in enumerate((one, other))
    )
    seen = talk(first), talk(second)
    one.look(), other.look()
    addresses = [[row[0] for row in rows] for rows in seen]
    assert addresses[0] == addresses[1]
    if kind == "virtual":
        assert addresses[0] == ["10.77.0.1", "10.77.0.2"]
        assert [row[1] for rows in seen for row in rows] == ["node0", "node1"] * 2
        assert len({row[2] for rows in seen for row in rows}) == 4
        assert one.spaces and not one.spaces & other.spaces
    talk(second, "kill")
    second.stdin.close()
    assert second.wait(15) == 0
    other.assert_gone()
    assert talk(first) == seen[0]
    first.kill()
    first.wait()
    one.assert_gone()


# scalelab clean


def clean():
    done = subprocess.run(
        [PY, "-m", "scalelab", "clean", "--json"],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return said["ended"], said["in_use"]


def sleeper(mark=None, **kw):
    env = {k: v for k, v in os.environ.items() if k != MARK}
    if mark:
        env[MARK] = mark
    return subprocess.Popen(["/bin/sleep", "100"], env=env, start_new_session=True, **kw)


@pytest.fixture
def sleepers():
    made = []

    def make(*a, **kw):
        made.append(sleeper(*a, **kw))
        return made[-1]

    yield make
    for process in made:
        process.kill()
        process.wait()


def test_clean_ends_leftovers_and_nothing_else(outside, sleepers):
    dead = subprocess.Popen(["/bin/sleep", "100"])
    zombie = subprocess.Popen(["/bin/sleep", "100"])
    marks = [client_mark(p.pid) for p in (dead, zombie)]
    for process in (dead, zombie):
        process.kill()
    dead.wait()  # the other is left for its parent to reap, as a kernel's server may
    planted = [sleepers(mark) for mark in (*marks, f"{os.getpid()}:1:")]

    pid, start, space = client_mark().split(":")
    spared = [sleepers(), sleepers(client_mark()), sleepers(f"{pid}:1:{int(space) + 1}")]
    spared.append(sleepers("rubbish"))  # whatever set that, it was not ScaleLab
    if os.getuid() == 0:
        spared.append(sleepers(marks[0], user=65534))  # another user's leftover
    live = outside()
    client = live.start(PY, "-c", TALK, "local" if PROBLEM else "virtual", stdin=subprocess.PIPE)
    before = talk(client)

    ended, in_use = clean()
    for process in planted:
        assert process.wait(5) == -signal.SIGKILL and process.pid in ended
    for process in spared:
        assert process.poll() is None and process.pid not in ended
    assert spared[1].pid in in_use
    assert set(live.processes()) - {client.pid} <= set(in_use)
    assert talk(client) == before
    zombie.wait()


def test_clean_sees_another_users_leftovers_no_more_than_anyones(sleepers):
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    process = sleepers("1:1:", user=65534)
    ended, in_use = clean()
    assert process.pid not in (*ended, *in_use) and process.poll() is None


def test_clean_works_for_an_ordinary_user(outside):
    """Its own processes in namespaces of their own are seen, and known to be in use."""
    if PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    it = outside()
    code = (
        "import subprocess, sys, json; from scalelab import cluster\n"
        "with cluster.start('virtual', 2) as c:\n"
        "  found = json.loads(subprocess.run([sys.executable, '-m', 'scalelab', 'clean', '--json'],"
        " capture_output=True, text=True, check=True).stdout)\n"
        "  said = [n.sh('echo alive').stdout for n in c.nodes]\n"
        "print(json.dumps([found, said, c.channel.owner.pid]))"
    )
    process = it.start(PY, "-c", code, jail=("user",))
    found, said, owner = json.loads(process.stdout.read())
    assert owner in found["in_use"] and len(found["in_use"]) >= 4
    assert owner not in found["ended"] and said == ["alive\n"] * 2
    assert process.wait(10) == 0
    it.assert_gone()
