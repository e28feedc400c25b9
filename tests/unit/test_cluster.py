"""Clusters, virtual and local: what a host has of its own, what can change, what is refused."""

import contextlib
import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from scalelab import cluster
from scalelab.cluster import ClusterError, UsageError

JAIL = str(Path(__file__).with_name("jail.py"))
PROBLEM = cluster.virtual_problem()
KINDS = ["virtual", "local"]
needs_virtual = pytest.mark.skipif(bool(PROBLEM), reason=f"no emulated hosts here: {PROBLEM}")
needs_jail = pytest.mark.skipif(
    bool(PROBLEM), reason=f"this machine cannot take a right away for a test: {PROBLEM}"
)
PY = sys.executable


def until(true, timeout=10.0, step=0.01):
    end = time.monotonic() + timeout
    while not (value := true()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(step)
    return value


def out(node, command, timeout=30):
    done = node.sh(command, timeout)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def python(node, code, timeout=30):
    """What a Python program printed on a node."""
    return out(node, f"{PY} - <<'CODE'\n{code}\nCODE", timeout)


@pytest.fixture(params=KINDS)
def kind(request):
    if request.param == "virtual" and PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    return request.param


@contextlib.contextmanager
def sleeping(node, seconds=100):
    """A process on a node that ends only when it is made to."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        process = node.spawn(["/bin/sleep", str(seconds)], out=null, err=null)
        yield process
        process.signal(signal.SIGKILL)
    finally:
        os.close(null)


def background(node):
    """PID of one that left its group and session, as a rank's own helpers may."""
    return out(node, "setsid sleep 100 >/dev/null 2>&1 & echo $!")


def alive(node, pid):
    state = node.sh(f"cut -d ' ' -f 3 /proc/{int(pid)}/stat").stdout.strip()
    return state not in ("", "Z")


@pytest.fixture(scope="module")
def two():
    """Two emulated hosts that tests only look at, or leave as they found them."""
    if PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    with cluster.start("virtual", 2) as c:
        yield c


@pytest.fixture(scope="module")
def two_local():
    with cluster.start("local", 2) as c:
        yield c


@pytest.fixture
def each(kind, request):
    """Two nodes of either kind."""
    return request.getfixturevalue("two" if kind == "virtual" else "two_local")


# Up and down


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_hosts_come_up_and_go(kind, nodes):
    with cluster.start(kind, nodes) as c:
        assert c.kind == kind and c.why == ""
        assert [n.name for n in c.nodes] == [f"node{i}" for i in range(nodes)]
        assert [n.index for n in c.nodes] == list(range(nodes))
        if kind == "virtual":
            assert [n.addr for n in c.nodes] == [f"10.77.0.{i + 1}" for i in range(nodes)]
        else:
            assert {n.addr for n in c.nodes} == {"127.0.0.1"}
        owner = c.channel.owner.pid
        assert len({out(n, "readlink /proc/self/ns/net") for n in c.nodes}) == (
            nodes if kind == "virtual" else 1
        )
    assert not os.path.exists(f"/proc/{owner}")
    with pytest.raises(ClusterError, match="closed"):
        c.node(0).sh("true")
    c.close()  # again does no harm


def test_hosts_have_their_own_names_and_addresses(two):
    for node in two.nodes:
        assert out(node, "hostname") == out(node, "cat /etc/hostname") == node.name
        assert out(node, "echo $HOSTNAME") == node.name
        found = python(
            node,
            "import socket; print(socket.gethostname(), *[socket.gethostbyname(n) for n in "
            "('node0', 'node1', 'localhost')])",
        )
        assert found.split() == [node.name, "10.77.0.1", "10.77.0.2", "127.0.0.1"]
        assert out(node, "cat /etc/hosts").splitlines() == [
            "127.0.0.1 localhost", "10.77.0.1 node0", "10.77.0.2 node1",
        ]  # fmt: skip
    assert socket.gethostname() not in ("node0", "node1")


def test_hosts_have_their_own_interface(two):
    code = (
        "from pyroute2 import IPRoute\n"
        "with IPRoute() as ip:\n"
        "  print(sorted(l.get_attr('IFLA_IFNAME') for l in ip.get_links()))\n"
        "  print([a.get_attr('IFA_ADDRESS') for a in ip.get_addr(family=2)])"
    )
    for node in two.nodes:
        names, addresses = python(node, code).splitlines()
        assert names == "['eth0', 'lo']"
        assert addresses == str(["127.0.0.1", node.addr])


def test_hosts_see_only_their_own_processes(two):
    with sleeping(two.node(0)) as process:
        assert out(two.node(0), f"cat /proc/{process.pid}/comm") == "sleep"
        seen = out(two.node(1), "cat /proc/[0-9]*/comm").split()
        assert "sleep" not in seen and len(seen) < 10
    assert len({out(n, "readlink /proc/self/ns/pid") for n in two.nodes}) == 2


def test_shared_memory_and_temporary_files_are_a_hosts_own(two):
    before = set(os.listdir("/dev/shm"))
    out(two.node(0), "echo mine > /dev/shm/planted; test $TMPDIR = /dev/shm")
    assert "planted" not in out(two.node(1), "ls -A /dev/shm").split()
    assert set(os.listdir("/dev/shm")) == before
    out(two.node(0), "rm /dev/shm/planted")


def test_hosts_reach_each_other(two):
    with ThreadPoolExecutor(1) as pool:
        port = two.node(1).free_port()
        code = (
            f"import socket; s = socket.create_server(('node1', {port})); s.settimeout(20)\n"
            "c, peer = s.accept(); print(peer[0])"
        )
        peer = pool.submit(python, two.node(1), code)
        python(
            two.node(0),
            "import socket, time\n"
            "for _ in range(200):\n"
            f"  try: socket.create_connection(('node1', {port}), 5); break\n"
            "  except ConnectionRefusedError: time.sleep(0.05)",
        )
        assert peer.result(30) == "10.77.0.1"


def test_environment_of_one_node(kind):
    with cluster.start(kind, 2, env={1: {"COLOUR": "a b'\"é"}}) as c:
        assert out(c.node(0), "echo -$COLOUR-") == "--"
        assert out(c.node(1), 'printf %s "$COLOUR"') == "a b'\"é"


def test_launcher_variables_do_not_leak_in(each, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("ONE_OF_MINE", "y")
    assert out(each.node(0), "echo -$RANK-$TORCHELASTIC_RUN_ID-$ONE_OF_MINE-") == "---y-"


# A shell on a host


def test_sh_output_and_exit_code(each):
    done = each.node(1).sh("echo one; echo two >&2; exit 3")
    assert (done.returncode, done.stdout, done.stderr) == (3, "one\n", "two\n")
    assert each.node(0).sh("kill -9 $$").returncode == -9
    assert out(each.node(0), "pwd") == os.getcwd()


def test_sh_times_out_and_ends_the_command(each):
    node, began = each.node(0), time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired) as e:
        node.sh("echo started; echo $$; sleep 60", timeout=1)
    assert time.monotonic() - began < 8
    assert e.value.output.startswith("started")
    pid = e.value.output.split()[1]
    until(lambda: not alive(node, pid))


@pytest.mark.slow
def test_sh_waits_for_a_command_that_closed_its_output(each):
    done = each.node(0).sh("exec >/dev/null 2>&1; sleep 2.5; exit 4", timeout=30)
    assert done.returncode == 4


@pytest.mark.parametrize("child", ["sleep 100", "while :; do echo noise; done"])
def test_sh_does_not_wait_for_a_background_child(each, child):
    began = time.monotonic()
    done = each.node(0).sh(f"({child}) & echo $!", timeout=40)
    assert time.monotonic() - began < 10
    assert done.returncode == 0 and done.stdout
    each.node(0).end_all()


def test_sh_big_output(each):
    size = 60_000_000
    began = time.monotonic()
    done = each.node(0).sh(f"head -c {size} /dev/zero; echo end >&2", timeout=60)
    assert len(done.stdout) == size and done.stderr == "end\n"
    assert time.monotonic() - began < 20


def test_sh_leaves_no_file_open(each):
    fds = "/proc/self/fd"
    each.node(0).sh("true")
    before = len(os.listdir(fds))
    for _ in range(5):
        each.node(0).sh("true")
    with pytest.raises(ClusterError):
        each.node(0).spawn(["/no/such/program"], out=1, err=2)
    with pytest.raises(subprocess.TimeoutExpired):
        each.node(0).sh("sleep 9", timeout=0.2)
    assert len(os.listdir(fds)) == before


def test_an_interrupted_sh_ends_its_command(each, tmp_path):
    """Ctrl-C in the cell that waits for it."""
    node = each.node(0)
    main, pid = threading.main_thread().ident, tmp_path / "pid"

    def ctrl_c():
        until(lambda: pid.exists() and pid.read_text())
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=ctrl_c)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        node.sh(f"echo $$ > {pid}; exec sleep 100", timeout=30)
    thread.join()
    until(lambda: not alive(node, pid.read_text()))


def test_spawn_of_what_does_not_exist_is_one_line(each):
    with pytest.raises(ClusterError) as e:
        each.node(0).spawn(["/no/such/program"], out=1, err=2)
    assert "No such file" in str(e.value) and "\n" not in str(e.value)


def test_many_commands_from_many_threads(each):
    """Large environments, short lives, all at once: no answer is lost, none is mixed up."""
    padding = {f"PAD_{i}": "x" * 2000 for i in range(20)}

    def one(i):
        r, w = os.pipe()
        argv = ["/bin/sh", "-c", f"echo {i}; exit {i % 7}"]
        process = each.node(i % 2).spawn(argv, out=w, err=w, env=padding)
        os.close(w)
        with open(r) as f:
            assert f.read() == f"{i}\n"
        return process.wait(30) == i % 7

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(200)))


# Death of a host


def test_a_killed_host_ends_its_processes_and_no_others(kind):
    with cluster.start(kind, 3) as c, sleeping(c.node(0)) as first, sleeping(c.node(2)) as last:
        with sleeping(c.node(1)) as victim:
            helper = background(c.node(1))
            c.node(1).kill()
            assert victim.wait(5) == -signal.SIGKILL
        assert [n.up for n in c.nodes] == [True, False, True]
        assert first.wait(0.5) is None and last.returncode is None
        assert out(c.node(0), "echo alive") == "alive"
        if kind == "local":
            until(lambda: not alive(c.node(0), helper))
        with pytest.raises(ClusterError, match="node1 is down"):
            c.node(1).sh("true")
        c.node(1).kill()  # again does no harm


def test_all_hosts_die_at_once(kind):
    with cluster.start(kind, 4) as c, sleeping(c.node(0)) as kept:
        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(n.kill) for n in c.nodes[1:]]:
                done.result(15)
        assert [n.up for n in c.nodes] == [True, False, False, False]
        assert out(c.node(0), "echo alive") == "alive" and kept.returncode is None


def test_a_host_started_again(kind, tmp_path):
    (tmp_path / "kept").mkdir()
    dirs = {1: {str(tmp_path / "kept"): "private"}} if kind == "virtual" else {}
    with cluster.start(kind, 2, dirs=dirs) as c:
        node = c.node(1)
        out(node, f"echo old > {tmp_path}/kept/file")
        if kind == "virtual":
            out(node, "echo old > /dev/shm/file")
        for _ in range(2):
            node.kill()
            node.start()
            assert node.up
        assert out(node, "hostname") == ("node1" if kind == "virtual" else socket.gethostname())
        if kind == "virtual":
            address = "import socket; print(socket.gethostbyname('node1'))"
            assert python(node, address) == "10.77.0.2"
            assert out(node, f"cat {tmp_path}/kept/file") == "old"
            assert out(node, "ls -A /dev/shm") == ""
            assert os.listdir(tmp_path / "kept") == []
            connect(c.node(0), node)
        with sleeping(node) as process:
            assert process.wait(0.2) is None
        node.start()  # of one that is up: nothing happens


def connect(a, b, timeout=5):
    """A TCP connection from a to b; False if it does not come about."""
    port = b.free_port()
    serve = f"import socket; s = socket.create_server(('{b.addr}', {port})); print(s.accept()[1])"
    r, w = os.pipe()
    server = b.spawn([PY, "-c", serve], out=w, err=w)
    os.close(w)
    try:
        dial = (
            "import socket, time\n"
            f"end = time.monotonic() + {timeout}\n"
            "while time.monotonic() < end:\n"
            "  try: socket.create_connection(('%s', %d), 0.5); print('yes'); break\n"
            "  except OSError: time.sleep(0.05)" % (b.addr, port)
        )
        return python(a, dial) == "yes"
    finally:
        server.signal(signal.SIGKILL)
        os.close(r)


@needs_virtual
def test_a_host_that_died_by_itself_starts_again():
    """kill -9 of its first process from outside, not through the cluster."""
    with cluster.start("virtual", 2) as c, sleeping(c.node(1)) as process:
        space = out(c.node(1), "readlink /proc/self/ns/pid")
        os.kill(c.outside_pid(1, space), signal.SIGKILL)
        assert process.wait(5) == -signal.SIGKILL
        until(lambda: not c.node(1).up)
        c.node(1).start()
        assert connect(c.node(0), c.node(1))


def test_a_host_dies_while_commands_are_starting(kind):
    """Whatever was asked comes to an end: with an error, or as a process that has ended."""
    with cluster.start(kind, 2) as c:
        null = os.open(os.devnull, os.O_RDWR)
        going, processes, errors = threading.Event(), [], []

        def spawn():
            while not going.is_set():
                try:
                    processes.append(c.node(1).spawn(["/bin/sleep", "99"], out=null, err=null))
                except ClusterError as e:
                    errors.append(str(e))
                    time.sleep(0.01)

        threads = [threading.Thread(target=spawn) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(6):
            enough = len(processes) + 3
            until(lambda enough=enough: len(processes) > enough)
            c.node(1).kill()
            c.node(1).start()
        c.node(1).kill()
        going.set()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        os.close(null)
        assert all(p.wait(5) == -signal.SIGKILL for p in processes)
        assert set(errors) <= {"node1 is down"}
        assert c.node(0).sh("true").returncode == 0


def test_end_all_spares_the_host(kind):
    with cluster.start(kind, 2) as c, sleeping(c.node(0)) as other:
        with sleeping(c.node(1)) as process:
            helper = background(c.node(1))
            c.node(1).end_all()
            assert process.wait(5) == -signal.SIGKILL
            until(lambda: not alive(c.node(1), helper))
        assert c.node(1).up and c.node(1).sh("true").returncode == 0
        assert other.wait(0.2) is None


def test_closing_ends_what_is_pending(kind):
    c = cluster.start(kind, 2)
    null = os.open(os.devnull, os.O_RDWR)
    process = c.node(0).spawn(["/bin/sleep", "99"], out=null, err=null)
    os.close(null)
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(c.node(i % 2).sh, "sleep 50", 60) for i in range(8)]
        time.sleep(0.3)
        began = time.monotonic()
        c.close()
        assert time.monotonic() - began < 5
        for future in waiting:  # ended with the cluster, or refused by it; never left hanging
            try:
                assert future.result(10).returncode == -signal.SIGKILL
            except ClusterError:
                pass
    assert process.wait(1) == -signal.SIGKILL


def test_the_owners_death_is_noticed(kind):
    with cluster.start(kind, 2) as c, sleeping(c.node(0)) as process:
        c.channel.owner.kill()
        assert process.wait(5) == -signal.SIGKILL
        with pytest.raises(ClusterError):
            c.node(0).sh("true")
        until(lambda: not any(n.up for n in c.nodes))


# Directories


@pytest.fixture
def tree(tmp_path):
    """A directory that looks the same after a test as before, whatever a host did to it."""
    (tmp_path / "data" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "data" / "file").write_text("real")
    (tmp_path / "data" / "deep" / "file").write_text("deep")
    (tmp_path / "data" / "link").symlink_to("file")
    (tmp_path / "beside").write_text("beside")

    def listing():
        return sorted((str(p), p.is_dir() or p.read_text()) for p in tmp_path.rglob("*"))

    before = listing()
    yield tmp_path / "data"
    assert listing() == before


def test_a_directory_in_every_mode(two, tree):
    node, other = two.nodes
    look = f"cat {tree}/file || ls -A {tree}"
    node.set_dir(str(tree), "private")
    assert out(node, f"ls -A {tree}") == "" and out(other, look) == "real"
    out(node, f"echo mine > {tree}/own")
    node.set_dir(str(tree), "missing")
    assert node.sh(f"ls {tree}").returncode == 2
    assert out(node, f"cat {tree.parent}/beside; ls -A {tree.parent}") == "besidebeside"
    assert out(other, look) == "real"
    node.set_dir(str(tree), "readonly")
    assert out(node, look) == "real"
    assert "Read-only" in node.sh(f"echo x > {tree}/file").stderr
    assert "Read-only" in node.sh(f"touch {tree}/deep/new").stderr
    node.set_dir(str(tree), "private")
    assert out(node, f"cat {tree}/own") == "mine"
    node.set_dir(str(tree), "shared")
    assert out(node, look) == "real"
    out(node, f"echo x > {tree}/new && rm {tree}/new")  # shared is shared


def test_a_file_can_be_missing_or_readonly_but_not_private(two, tree):
    node, path = two.node(0), str(tree / "file")
    node.set_dir(path, "missing")
    assert node.sh(f"cat {path}").returncode == 1
    assert out(node, f"ls -A {tree}; cat {tree}/deep/file").split() == ["deep", "link", "deep"]
    node.set_dir(path, "readonly")
    assert out(node, f"cat {path}") == "real"
    assert "Read-only" in node.sh(f"echo x > {path}").stderr
    with pytest.raises(UsageError, match="only a directory can be private"):
        node.set_dir(path, "private")
    assert out(node, f"cat {path}") == "real"
    node.set_dir(path, "shared")


def test_running_processes_see_the_change(two, tree):
    node = two.node(0)
    code = (
        "import os, sys, time\n"
        f"for _ in range(600):\n"
        f"  print(os.path.exists('{tree}/file'), flush=True); time.sleep(0.05)"
    )
    r, w = os.pipe()
    process = node.spawn([PY, "-c", code], out=w, err=w)
    os.close(w)
    with open(r) as f:
        assert f.readline() == "True\n"
        for mode, seen in (("private", "False\n"), ("shared", "True\n"), ("missing", "False\n"),
                           ("shared", "True\n")):  # fmt: skip
            node.set_dir(str(tree), mode)
            until(lambda want=seen: f.readline() == want, step=0)
        process.signal(signal.SIGKILL)


def test_two_missing_in_one_directory_and_nested_modes(two, tree):
    node = two.node(1)
    one, other, deep = str(tree / "file"), str(tree / "link"), str(tree / "deep")
    node.set_dir(one, "missing")
    node.set_dir(other, "missing")
    assert out(node, f"ls -A {tree}") == "deep"
    node.set_dir(one, "shared")
    assert out(node, f"ls -A {tree}").split() == ["deep", "file"]
    node.set_dir(deep, "private")
    node.set_dir(f"{tree}/deep", "shared")
    node.set_dir(other, "shared")
    assert out(node, f"ls -A {tree}").split() == ["deep", "file", "link"]
    # one inside another, the outer undone first
    node.set_dir(str(tree), "private")
    out(node, f"mkdir -p {tree}/in")
    node.set_dir(f"{tree}/in", "missing")
    assert out(node, f"ls -A {tree}") == ""
    node.set_dir(str(tree), "shared")
    assert out(node, f"cat {tree}/file") == "real"
    node.set_dir(f"{tree}/in", "shared")
    assert out(node, f"ls -A {tree}").split() == ["deep", "file", "link"]
    # the outer made private while the inner is read-only
    node.set_dir(deep, "readonly")
    node.set_dir(str(tree), "private")
    node.set_dir(str(tree), "shared")
    assert "Read-only" in node.sh(f"touch {deep}/new").stderr
    node.set_dir(deep, "shared")
    mounts = out(node, "cat /proc/self/mountinfo")
    assert str(tree.parent) not in mounts


@pytest.mark.parametrize("odd", ["with space", "quote'\"", "per%cent", "ünï", "x" * 200])
def test_paths_with_odd_names(two, tmp_path, odd):
    path = tmp_path / odd
    path.mkdir()
    (path / "file").write_text("real")
    for mode in ("private", "readonly", "missing", "shared"):
        two.node(0).set_dir(str(path), mode)
    assert (path / "file").read_text() == "real"


def test_paths_that_cannot_be_changed_are_one_line(two, tree):
    for path, mode, words in (
        (f"{tree}/nowhere", "private", "no such file or directory"),
        (f"{tree}/nowhere", "missing", "no such file or directory"),
        (str(tree), "invisible", "use one of shared, private, missing, readonly"),
        ("/", "missing", "/"),
    ):
        with pytest.raises(UsageError, match=words) as e:
            two.node(0).set_dir(path, mode)
        assert "\n" not in str(e.value)
    assert two.node(0).sh(f"cat {tree}/file /etc/hosts").returncode == 0


@needs_virtual
def test_directories_from_the_start(tree):
    dirs = {0: {str(tree): "missing"}, 1: {str(tree): "readonly"}}
    with cluster.start("virtual", 3, dirs=dirs) as c:
        seen = [n.sh(f"cat {tree}/file; touch {tree}/file") for n in c.nodes]
        assert [s.stdout for s in seen] == ["", "real", "real"]
        assert "Read-only" in seen[1].stderr and seen[2].returncode == 0
        c.node(0).kill()
        c.node(0).start()
        assert c.node(0).sh(f"ls {tree}").returncode == 2


def test_mounts_of_hosts_do_not_show_outside(two, tree):
    before = Path("/proc/self/mountinfo").read_text()
    for mode in ("private", "readonly", "missing", "shared"):
        two.node(0).set_dir(str(tree), mode)
        assert Path("/proc/self/mountinfo").read_text() == before


def test_names_of_one_host(two):
    real = Path("/etc/hosts").read_text()
    lookup = "import socket; print(socket.gethostbyname('other'))"
    two.node(0).set_hosts("127.0.0.1 localhost\n10.77.0.2 node1 other\n")
    assert python(two.node(0), lookup) == "10.77.0.2"
    assert two.node(1).sh(f'{PY} -c "{lookup}"').returncode != 0
    assert Path("/etc/hosts").read_text() == real
    two.node(0).set_hosts("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")


# Racks, links, firewall


@pytest.fixture(scope="module")
def racks():
    if PROBLEM:
        pytest.skip(f"no emulated hosts here: {PROBLEM}")
    with cluster.start("virtual", 4, racks=2) as c:
        yield c


def test_racks_are_two_networks_behind_a_router(racks):
    assert [n.addr for n in racks.nodes] == ["10.77.0.1", "10.77.0.2", "10.77.1.1", "10.77.1.2"]
    assert racks.router.name == "router" and racks.router.index is None
    assert out(racks.router, "hostname") == "router"
    assert connect(racks.node(0), racks.node(3)) and connect(racks.node(2), racks.node(1))
    assert connect(racks.node(0), racks.node(1))


def test_the_way_across_goes_through_the_router(racks):
    """A datagram that may pass one router only arrives from next door, not from across."""

    def arrives(a, b, ttl):
        port = b.free_port()
        serve = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            f"s.bind(('{b.addr}', {port})); s.settimeout(2); print('ready', flush=True)\n"
            "try: print(s.recv(10).decode())\n"
            "except OSError: print('nothing')"
        )
        r, w = os.pipe()
        b.spawn([PY, "-c", serve], out=w, err=w)
        os.close(w)
        with open(r) as f:
            assert f.readline() == "ready\n"
            python(
                a,
                "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
                f"s.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, {ttl})\n"
                f"for _ in range(3): s.sendto(b'here', ('{b.addr}', {port}))",
            )
            return f.readline() == "here\n"

    assert arrives(racks.node(0), racks.node(1), ttl=1)
    assert not arrives(racks.node(0), racks.node(2), ttl=1)
    assert arrives(racks.node(0), racks.node(2), ttl=2)


@pytest.mark.slow
def test_racks_share_no_broadcast_domain(racks):
    """Without the router's route there is no way across, and neighbours stay reachable."""
    node = racks.node(0)
    route = (
        "from pyroute2 import IPRoute\n"
        "with IPRoute() as ip: ip.route('%s', dst='default', gateway='10.77.0.254')"
    )
    out(node, f'{PY} -c "{route % "del"}"')
    try:
        # even where the host takes the other rack for a part of its own network
        direct = route.replace("dst='default', gateway='10.77.0.254'", "dst='10.77.1.0/24', oif=2")
        index = "import socket; print(socket.if_nametoindex('eth0'))"
        direct = direct.replace("oif=2", f"oif={python(node, index)}, scope=253")
        out(node, f'{PY} -c "{direct % "add"}"')
        assert not connect(node, racks.node(2), timeout=1.5)
        assert connect(node, racks.node(1))
        out(node, f'{PY} -c "{direct % "del"}"')
    finally:
        out(node, f'{PY} -c "{route % "add"}"')
    assert connect(node, racks.node(2))


STREAM = """
import socket, sys, time
s = socket.create_connection(('{addr}', {port}))
block, end = bytes(1 << 16), time.monotonic() + {seconds}
while time.monotonic() < end:
    s.sendall(block)
"""
SINK = """
import socket, time
s = socket.create_server(('{addr}', {port})); print('ready', flush=True)
c = s.accept()[0]; held, began = 0, time.monotonic()
while True:
    data = c.recv(1 << 20)
    if not data: break
    held += len(data)
    if time.monotonic() - began > 0.25:
        print(held * 8 / (time.monotonic() - began) / 1e6, flush=True)
        held, began = 0, time.monotonic()
"""


@contextlib.contextmanager
def stream(a, b, seconds=60):
    """Yields a function: Mbit/s that arrived at b from a in the latest quarter of a second."""
    port = b.free_port()
    r, w = os.pipe()
    sink = b.spawn([PY, "-c", SINK.format(addr=b.addr, port=port)], out=w, err=w)
    os.close(w)
    null = os.open(os.devnull, os.O_RDWR)
    with open(r) as f:
        assert f.readline() == "ready\n"
        code = STREAM.format(addr=b.addr, port=port, seconds=seconds)
        source = a.spawn([PY, "-c", code], out=null, err=null)
        os.close(null)
        yield lambda: float(f.readline())
        for process in (source, sink):
            process.signal(signal.SIGKILL)


def settles(rate, low, high, timeout=15):
    """Three readings running within the bounds, soon enough."""
    held, seen, end = 0, [], time.monotonic() + timeout
    while held < 3:
        seen.append(rate())
        held = held + 1 if low <= seen[-1] <= high else 0
        assert time.monotonic() < end, seen


def test_a_link_changes_while_a_stream_runs(two):
    """Coarse on purpose: how exact a rate is, is another test's matter."""
    with stream(two.node(0), two.node(1)) as rate:
        two.set_link(rate="50mbit")
        settles(rate, 25, 60)
        two.set_link(1, rate="20mbit")
        settles(rate, 10, 25)
        two.set_link(rate=None)
        settles(rate, 100, 1e6)


@pytest.mark.slow
def test_the_routers_link_is_set_apart(racks):
    with stream(racks.node(0), racks.node(2)) as across:
        racks.set_link("router", rate="20mbit")
        settles(across, 10, 25)
        with stream(racks.node(3), racks.node(2)) as inside:
            settles(inside, 60, 1e6)
        racks.set_link("router", rate=None)
        settles(across, 60, 1e6)


def test_links_of_hosts_that_are_down(two):
    with cluster.start("virtual", 2) as c:
        c.node(1).kill()
        c.set_link(rate="50mbit")
        c.node(1).start()
        with stream(c.node(0), c.node(1)) as rate:  # it came back with its link as set
            settles(rate, 25, 60)


@pytest.mark.skipif(
    not PROBLEM and not cluster.capabilities()["firewall"],
    reason="no firewall here: nft (nftables) is missing",
)
def test_a_firewall_closes_one_port_and_opens_it_again(two):
    a, b = two.nodes
    shut = b.free_port()
    serve = (
        "import socket; s = [socket.create_server(('%s', p)) for p in (%d, %d)]\n"
        "print('ready', flush=True)\n"
        "import time; time.sleep(60)"
    )
    other = b.free_port()
    r, w = os.pipe()
    server = b.spawn([PY, "-c", serve % (b.addr, shut, other)], out=w, err=w)
    os.close(w)

    def dial(port):
        code = f"import socket; socket.create_connection(('{b.addr}', {port}), 1)"
        return a.sh(f'{PY} -c "{code}"').returncode == 0

    with open(r) as f:
        assert f.readline() == "ready\n"
        assert dial(shut) and dial(other)
        b.firewall([{"action": "drop", "proto": "tcp", "ports": str(shut), "direction": "in"}])
        assert not dial(shut) and dial(other)
        b.firewall([])
        assert dial(shut)
        server.signal(signal.SIGKILL)


def test_a_bad_firewall_rule_is_one_line(two):
    with pytest.raises(UsageError) as e:
        two.node(0).firewall([{"action": "burn"}])
    assert "\n" not in str(e.value)


# What makes no sense


@pytest.mark.parametrize(
    "asked",
    [
        {"kind": "cloud"}, {"nodes": 0}, {"nodes": -1}, {"nodes": 65}, {"nodes": "2"},
        {"nodes": 1.5}, {"nodes": True}, {"racks": 0}, {"racks": 3}, {"racks": "2"},
        {"racks": 1.5}, {"rate": "fast"}, {"rate": "0"}, {"rate": "-1gbit"}, {"rate": "1 parsec"},
        {"rate": 5}, {"delay": "5"}, {"delay": "-1ms"}, {"delay": "1h"}, {"jitter": "x"},
        {"loss": "2"}, {"loss": "200%"}, {"mtu": 1}, {"mtu": "big"}, {"env": {2: {"A": "1"}}},
        {"env": {-1: {"A": "1"}}}, {"dirs": {2: {"/tmp": "private"}}},
        {"kind": "local", "rate": "1gbit"}, {"kind": "local", "racks": 2},
        {"kind": "local", "dirs": {0: {"/tmp": "private"}}},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_make_no_sense(asked):
    with pytest.raises(UsageError) as e:
        cluster.start(**asked).close()
    assert str(e.value) and "\n" not in str(e.value)


@needs_virtual
@pytest.mark.parametrize(
    "dirs", [{"/": "missing"}, {"/no/such/place": "private"}, {"/tmp": "invisible"}], ids=str
)
def test_directories_that_make_no_sense(dirs):
    with pytest.raises(UsageError) as e:
        cluster.start("virtual", 2, dirs={1: dirs}).close()
    assert str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "node, changes",
    [
        (None, {"rate": "fast"}), (None, {"speed": "1gbit"}), (2, {"rate": "1gbit"}),
        (-1, {"rate": "1gbit"}), ("router", {"rate": "1gbit"}), ("node0", {"rate": "1gbit"}),
        (0, {"delay": "5"}), (0, {"port_mtu": "x"}), (1.0, {"rate": "1gbit"}),
    ],
    ids=str,
)  # fmt: skip
def test_link_changes_that_make_no_sense(two, node, changes):
    before = dict(two.links)
    with pytest.raises(UsageError) as e:
        two.set_link(node, **changes)
    assert "\n" not in str(e.value)
    assert two.links == before


@pytest.mark.parametrize("index", [-1, 2, "0", 0.0, None, True])
def test_nodes_that_do_not_exist(two_local, index):
    with pytest.raises(UsageError, match="nodes 0 to 1"):
        two_local.node(index)


# The local kind


def test_local_has_the_same_interface_and_says_what_it_lacks(two_local, tmp_path):
    node = two_local.node(1)
    for refused in (
        lambda: node.set_dir(str(tmp_path), "private"),
        lambda: node.set_hosts("127.0.0.1 localhost\n"),
        lambda: node.firewall([]),
        lambda: two_local.set_link(rate="1gbit"),
    ):
        with pytest.raises(ClusterError, match="needs emulated hosts; this cluster is local") as e:
            refused()
        assert str(e.value) == str(e.value).strip() and "\n" not in str(e.value)
    assert two_local.router is None and node.nics == []
    assert 20000 <= node.free_port() < 32000


def test_an_unlimited_link_needs_no_emulated_hosts():
    with cluster.start("local", 1, rate="unlimited", delay="0ms") as c:
        assert c.link == {"rate": "unlimited", "delay": "0ms"}


# Machines that allow less


def jailed(*words, code):
    """What a program printed, as JSON, that ran as on a lesser machine."""
    env = {**os.environ, "PYTHONPATH": str(Path(cluster.__file__).parents[2])}
    done = subprocess.run(
        [PY, JAIL, *words, "--", PY, "-c", code],
        capture_output=True, text=True, timeout=90, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TRY = """
import json
from scalelab import cluster
said = {"capabilities": cluster.capabilities(), "problem": cluster.virtual_problem()}
with cluster.start("auto", 2) as c:
    said.update(kind=c.kind, why=c.why, out=[n.sh("echo $((1 + 1))").stdout for n in c.nodes])
    try:
        c.node(0).set_hosts("127.0.0.1 localhost")
    except cluster.ClusterError as e:
        said["hosts"] = str(e)
for name, asked in (("virtual", {"kind": "virtual"}), ("needs", {"rate": "1gbit"})):
    try:
        cluster.start(**asked).close()
    except cluster.ClusterError as e:
        said[name] = str(e)
print(json.dumps(said))
"""


@needs_jail
@pytest.mark.parametrize(
    "words, part",
    [
        (["no-userns"], "switched off here (user.max_user_namespaces is 0)"),
        (["user", "deny=unshare"], "bars user namespaces"),
        (["user", "deny=netns"], "bars network namespaces"),
        (["user", "deny=mount"], "bars mounts inside a namespace"),
        (["deny=netns"], "bars network namespaces"),
    ],
    ids=" ".join,
)
def test_where_namespaces_are_barred(words, part):
    if words == ["deny=netns"] and os.geteuid() != 0:
        pytest.skip("the case of a container's root: this user is not root")
    said = jailed(*words, code=TRY)
    reason = said["problem"]
    assert part in reason and reason.endswith(".") and reason.count(".") <= 2
    assert said["kind"] == "local" and said["why"] == reason and said["out"] == ["2\n", "2\n"]
    assert said["virtual"] == reason and reason in said["hosts"]
    assert said["needs"].startswith(reason) and "rate" in said["needs"]
    had = said["capabilities"]
    assert (had["virtual"], had["why_not"], had["delay"], had["firewall"]) == (
        False, reason, "", False,
    )  # fmt: skip


@needs_jail
def test_an_ordinary_user_has_emulated_hosts():
    said = jailed("user", code=TRY)
    assert said["problem"] == "" and said["kind"] == "virtual" and said["why"] == ""
    assert said["out"] == ["2\n", "2\n"]
    assert not {"virtual", "needs", "hosts"} & set(said)
    assert said["capabilities"]["virtual"] is True


PERMISSIONS = """
import json, os, sys, tempfile
from scalelab import cluster
said = {}
with tempfile.TemporaryDirectory() as d, cluster.start("virtual", 2) as c:
    path = os.path.join(d, "secret")
    open(path, "w").write("x")
    os.chmod(path, 0)
    with open(os.path.join(d, "out"), "w+") as f:
        argv = ["/bin/sh", "-c", f"id -u; cat {path}"]
        c.node(0).spawn(argv, out=f.fileno(), err=f.fileno()).wait(20)
        f.seek(0)
        said["rank"] = f.read()
        f.seek(0), f.truncate()
        route = ("from pyroute2 import IPRoute\\n"
                 "with IPRoute() as ip: ip.route('add', dst='10.99.0.0/24', gateway='10.77.0.2')")
        c.node(0).spawn([sys.executable, "-c", route], out=f.fileno(), err=f.fileno()).wait(20)
        f.seek(0)
        said["rank_route"] = f.read()
    done = c.node(0).sh(f'{sys.executable} -c "{route}"; cat /proc/net/route')
    said["admin"] = done.stdout, done.stderr
    with open("/proc/sys/kernel/hostname") as f:
        said["hostname"] = f.read().strip()
    said["rename"] = c.node(1).sh("echo other > /proc/sys/kernel/hostname; hostname").stdout
print(json.dumps(said))
"""


@needs_jail
def test_permissions_are_real_for_ranks_and_an_admin_can_set_routes():
    said = jailed("user", code=PERMISSIONS)
    assert said["rank"].startswith("1000\n") and "Permission denied" in said["rank"]
    assert "Operation not permitted" in said["rank_route"]
    routes, errors = said["admin"]
    assert errors == "" and "0000630A" in routes  # 10.99.0.0 as the kernel prints it
    assert said["rename"].split()[-1] in ("other", "node1")
    assert said["hostname"] == socket.gethostname()


def test_capabilities_are_true(monkeypatch):
    had = cluster.capabilities()
    assert had["virtual"] is (cluster.virtual_problem() == "")
    assert had["cores"] == len(os.sched_getaffinity(0))
    assert had["delay"] in (("netem", "user-space switch") if had["virtual"] else ("",))
    assert 0 < had["memory_gb"] < 100_000 and 1 <= had["max_ranks"] <= 2 * had["cores"]
    assert had["max_ranks"] == cluster.max_ranks()
    assert had["firewall"] is (had["virtual"] and bool(shutil.which(
        "nft", path=os.environ["PATH"] + ":/usr/sbin:/sbin")))  # fmt: skip
    if had["virtual"]:
        with cluster.start("auto", 1) as c:
            assert c.kind == "virtual"


# Several at once


def test_two_clusters_do_not_touch_each_other(kind):
    with cluster.start(kind, 2) as kept, sleeping(kept.node(0)) as process:
        with cluster.start(kind, 2) as other:
            assert [n.addr for n in other.nodes] == [n.addr for n in kept.nodes]
            if kind == "virtual":
                spaces = {out(c.node(0), "readlink /proc/self/ns/net") for c in (kept, other)}
                assert len(spaces) == 2
            other.node(0).kill()
            other.node(0).start()
        assert process.wait(0.2) is None and all(n.up for n in kept.nodes)
        assert connect(kept.node(0), kept.node(1))


def test_a_cluster_outlives_the_thread_that_started_it(kind):
    made = []
    thread = threading.Thread(target=lambda: made.append(cluster.start(kind, 2)))
    thread.start()
    thread.join()
    with made[0] as c:
        time.sleep(0.3)
        assert [n.sh("echo alive").stdout for n in c.nodes] == ["alive\n"] * 2


def test_inherited_files_do_not_reach_hosts(each, tmp_path):
    """An open file of the client, even an inheritable one, is not the ranks'."""
    with open(tmp_path / "held", "w") as f:
        fcntl.fcntl(f.fileno(), fcntl.F_SETFD, 0)
        assert "held" not in out(each.node(0), "ls -l /proc/self/fd")
