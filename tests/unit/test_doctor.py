"""The doctor itself: how it judges, reports, meets other machines, and ends. What each check says
is tested beside it (test_doctor_net…, test_doctor_host…) and against real faults (test_faults)."""

import json
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time

import pytest
import slurm
from outside import MARK, ROOT, Call, all_gone, running, scalelab

from scalelab import cluster, doctor
from scalelab.cluster import UsageError
from scalelab.doctor import Host, NotChecked, Seen, check, fail, ok, remote, warn
from scalelab.doctor.join import HELLO, HERE, expand, join, slurm_task
from scalelab.doctor.registry import judge
from scalelab.doctor.report import Report

slow = pytest.mark.slow
needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=f"emulated hosts: {cluster.virtual_problem()}"
)


def three() -> Seen:
    return Seen([Host(f"node{i}", f"10.0.0.{i + 1}") for i in range(3)])


def report(checks, seen) -> Report:
    return Report(judge(checks, seen), seen, 1.0, "virtual")


# ── judging ──────────────────────────────────────────────────────────────────────────────────────


@check("cause")
def cause(seen):
    yield fail(seen.hosts[1], "the cause", "mend it")


@check("consequence")
def consequence(seen):
    yield fail((seen.hosts[0], seen.hosts[1]), "follows", "mend the cause")


@check("slight")
def slight(seen):
    yield warn(seen.hosts[0], "odd", "look at it")


@check("fine", needs=["thing"], each=True)
def fine(host, seen):
    yield ok(host, f"thing is {seen.facts(host, 'thing')['size']}")


def test_worst_first_and_causes_before_consequences():
    seen = three()
    found = report([slight, cause, consequence], seen)
    assert [f.name for f in found.findings] == ["cause", "consequence", "slight"]
    assert (found.first.name, found.first.node) == ("cause", "node1")
    assert report([slight], seen).first.name == "slight"
    assert not report([slight], seen).failed and not report([slight], seen).ok


def test_what_was_not_seen_is_not_good():
    seen = three()
    seen.hosts[0].facts["thing"] = {"value": {"size": 4}}
    seen.hosts[1].facts["thing"] = {"not_checked": "no answer within 5 s"}
    found = report([fine], seen)
    assert [(f.status, f.node) for f in found.findings] == [
        ("skip", "node1"), ("skip", "node2"), ("pass", "node0"),
    ]  # fmt: skip
    assert "no answer within 5 s" in found.findings[0].detail
    assert found.ok  # nothing to mend, yet:
    assert "2 not checked, 1 passed" in found.table()


def test_a_check_with_a_mistake_hides_no_other():
    @check("broken")
    def broken(seen):
        yield ok(None, "before")
        raise KeyError("x")

    found = report([broken, cause], three())
    assert [(f.name, f.status) for f in found.findings] == [("cause", "fail"), ("broken", "skip")]


def test_verdicts_name_the_host_to_leave_out_and_not_its_partner():
    seen = three()
    assert report([cause, consequence], seen).verdicts == {
        "node0": "pass", "node1": "fail", "node2": "pass",
    }  # fmt: skip
    pair = report([consequence], seen)
    assert pair.verdicts == {"node0": "suspect", "node1": "suspect", "node2": "pass"}
    assert (pair.json()["passing"], pair.json()["failing"]) == ("node2", "node0,node1")


def test_a_majority_decides_and_two_have_none():
    assert Seen.majority({"a": 1, "b": 2, "c": 1}) == 1
    assert Seen.majority({"a": 1, "b": 2}) is None
    assert Seen.majority({"a": 1, "b": 2, "c": 3}) is None
    assert Seen.majority({}) is None


def test_table_says_what_to_do_in_lines_a_person_can_read():
    text = report([slight, cause, consequence], three()).table()
    assert text.splitlines()[0].startswith("FAIL")
    assert "node0→node1" in text and "fix: mend it" in text
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("text", ["", "node0", "node0:", ":29400", "node0:0", "node0:70000",
                                  "node0:x", "node0:２９"])  # fmt: skip
def test_an_endpoint_is_host_and_port(text):
    with pytest.raises(UsageError, match="use HOST:PORT"):
        doctor.parse_endpoint(text)


def test_endpoints():
    assert doctor.parse_endpoint("node0:29400") == ("node0", 29400)
    assert doctor.parse_endpoint("[::1]:29400") == ("::1", 29400)


# ── a cluster started here ───────────────────────────────────────────────────────────────────────


@slow
@pytest.mark.parametrize("nodes", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", ["local", pytest.param("virtual", marks=needs_virtual)])
def test_nothing_is_wrong_with_a_healthy_cluster(kind, nodes, tmp_path):
    (tmp_path / "part-0.txt").write_text("data")
    with cluster.start(kind, nodes) as hosts:
        found = doctor.examine(hosts, shared=[tmp_path], data=[tmp_path])
    assert found.ok, found.table()
    assert not found.seen.broken
    said = {f.name for f in found.findings if f.status == "pass"}
    assert {"host", "shared directory", "data", "environment", "matmul"} <= said
    if nodes > 1:
        assert {"connect", "mtu"} <= said
        # two hosts without a line rate have nothing to be compared with
        assert nodes == 2 or "speed" in said
    assert os.listdir(tmp_path) == ["part-0.txt"]
    assert found.seconds < 20  # generous: the bound is measured in the benchmarks


@slow
@needs_virtual
def test_every_probe_timing_out_ends_within_20_seconds():
    with cluster.start("virtual", 4) as hosts:
        for node in hosts.nodes:
            node.firewall([], policy="drop")
        began = time.monotonic()
        found = doctor.examine(hosts)
        assert time.monotonic() - began < 20
    assert found.first.name == "connect", found.table()
    assert not [f for f in found.findings if f.name in ("mtu", "speed") and f.status != "skip"]


@slow
@needs_virtual
def test_a_dead_host_is_named_and_the_others_are_examined():
    with cluster.start("virtual", 3) as hosts:
        hosts.node(1).kill()
        found = doctor.examine(hosts)
    assert (found.first.name, found.first.node) == ("host", "node1")
    assert found.json()["failing"] == "node1"
    assert any(f.name == "connect" and f.status == "pass" for f in found.findings)


@slow
@pytest.mark.parametrize("sig", [signal.SIGSTOP, signal.SIGKILL])
def test_a_host_that_stops_midway_is_named(sig):
    """Otherwise all of it would be "not checked", and the exit status 0."""
    ended = []

    def end(words):
        for pid in running("node1's", MARK) if "pairs" in words else []:
            os.kill(pid, sig)
            ended.append(pid)

    with cluster.start("local", 2, env={1: {MARK: "node1's"}}) as hosts:
        began = time.monotonic()
        found = doctor.examine(hosts, progress=end)
        assert time.monotonic() - began < 20
    assert ended
    assert (found.first.name, found.first.node) == ("host", "node1"), found.table()
    assert found.json()["failing"] == "node1"


def test_silence_is_told_from_a_long_answer(monkeypatch):
    monkeypatch.setattr(remote, "SILENT", 0.2)
    answers, says = os.pipe()
    reads, asks = os.pipe()
    far = remote.Remote("far", os.fdopen(answers, "rb"), os.fdopen(asks, "wb"))
    far.ask("matmul", 0.1)  # its product takes long …
    time.sleep(0.3)
    far.ask("listen", 9)
    assert far.lost() == ""
    far.ask("hush", 0.1)
    time.sleep(0.3)
    assert "has answered nothing" in far.lost()
    os.write(says, b'{"id": 2, "result": {}}\n')  # … and it was there all the time
    time.sleep(0.2)
    assert far.lost() == ""
    os.close(says)
    time.sleep(0.2)
    assert "gone" in far.lost()
    os.close(reads)


@slow
def test_a_check_of_ones_own():
    @check("colour", each=True)
    def colour(host, seen):
        said = host.sh("echo $COLOUR").stdout.strip()
        yield ok(host, said) if said == "blue" else fail(host, f"colour {said!r}", "paint it")

    with cluster.start("local", 2, env={1: {"COLOUR": "blue"}}) as hosts:
        found = doctor.examine(hosts, checks=[colour])
    assert (found.first.name, found.first.node, found.first.fix) == ("colour", "node0", "paint it")
    joined = Host("far", "10.0.0.9")  # no commands over a network
    with pytest.raises(NotChecked, match="only on hosts of a cluster started here"):
        joined.sh("true")


@slow
def test_the_command_prints_one_object_and_exits_by_it(tmp_path):
    good = scalelab(tmp_path, "doctor", "--cluster", "local", "--nodes", "2", "--json")
    assert good.code == 0, good.err
    result = json.loads(good.out)
    assert {"name", "status", "node", "detail", "fix"} == set(result["checks"][0])
    assert (result["passing"], result["failing"]) == ("node0,node1", "")
    bad = scalelab(tmp_path, "doctor", "--cluster", "local", "--nodes", "2",
                   "--shared", tmp_path / "nowhere", "--out", tmp_path / "report.json")  # fmt: skip
    assert bad.code == 1
    assert re.match(r"FAIL +shared directory", bad.out) and "nowhere" in bad.out
    assert json.loads((tmp_path / "report.json").read_text())["checks"][0]["status"] == "fail"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--nodes", "0"], "nodes 0"),
        (["--endpoint", "node0"], "use HOST:PORT"),
        (["--join", "node0:"], "use HOST:PORT"),
        (["--join", ""], "use HOST:PORT"),
        (["--endpoint", ""], "use HOST:PORT"),
        (["--join", f"{'n' * 300}:29400"], "use HOST:PORT"),
        (["--join", "no..host:29400"], "use HOST:PORT"),
        (["--join", "node0:29400", "--nodes", "100000"], "nodes 100000"),
        (["--join", "node0:29400", "--nodes", "0"], "nodes 0"),
        (["--join", "[fd00::1]:29400"], "use a name or an IPv4 address"),
        (["--nproc-per-node", "0"], "nproc-per-node"),
        (["--line-rate", "fast"], "fast"),
        (["--node-env", "7:A=b"], "nodes 0 to 1"),
        (["--cluster", "slurm"], "not a task of srun"),
        (["--out", "/nowhere/at/all"], "no file can be written there"),
        (["--launch", "/nowhere/at/all"], "nowhere"),
        (["--timeout", "-1", "--join", "a:1"], "timeout"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(tmp_path, args, said):
    call = scalelab(tmp_path, "doctor", *args)
    assert call.code == 2, (call.out, call.err)
    assert said in call.err and len(call.err.strip().splitlines()) == 1


# ── machines that join ───────────────────────────────────────────────────────────────────────────


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def joined(hosts, args, timeout=40, env=None):
    """`scalelab doctor ARGS` on hosts by index: {index: (exit status, what it printed)}."""
    files = {i: tempfile.TemporaryFile() for i in args}
    started = {
        i: hosts.node(i).spawn(
            [sys.executable, "-m", "scalelab", "doctor", *map(str, words)],
            out=files[i].fileno(), err=files[i].fileno(), env=(env or {}).get(i),
        )
        for i, words in args.items()
    }  # fmt: skip
    ended = {}
    for i, process in started.items():
        code = process.wait(timeout)
        files[i].seek(0)
        ended[i] = code, files[i].read().decode()
    return ended


@slow
@needs_virtual
def test_machines_meet_and_all_print_the_same(tmp_path):
    with cluster.start("virtual", 3) as hosts:
        words = ["--join", "node0:29400", "--nodes", 3, "--shared", tmp_path, "--timeout", 30]
        ended = joined(hosts, dict.fromkeys(range(3), words))
        assert {code for code, _ in ended.values()} == {0}, ended
        assert len({text for _, text in ended.values()}) == 1
        assert all(f"node{i}: pass" in ended[0][1] for i in range(3))
        assert re.search(r"pass +connect", ended[0][1])
        for node in hosts.nodes:  # nothing is left: no process, no port in use
            assert "scalelab.doctor" not in node.sh("ps -eo args").stdout
        assert os.listdir(tmp_path) == []
        # the port of the rendezvous is free at once
        bound = "import socket; s = socket.socket(); s.bind(('10.77.0.1', 29400)); s.listen()"
        assert hosts.node(0).sh(f'{sys.executable} -c "{bound}"').returncode == 0


@slow
@needs_virtual
def test_a_host_that_never_joins_is_said_and_the_others_are_examined():
    with cluster.start("virtual", 3) as hosts:
        words = ["--join", "node0:29400", "--nodes", 3, "--timeout", 10]
        ended = joined(hosts, {0: words, 2: words}, timeout=90)
    assert {code for code, _ in ended.values()} == {1}
    first = ended[0][1].splitlines()[0]
    assert first.startswith("FAIL") and "machine 3 of 3" in first
    assert re.search(r"pass +connect", ended[2][1])


@slow
@needs_virtual
def test_an_address_that_does_not_answer_gives_the_report_of_one_machine():
    with cluster.start("virtual", 2) as hosts:
        hosts.node(0).firewall([], policy="drop")
        ended = joined(hosts, {1: ["--join", "node0:29400", "--timeout", 2]})
        code, text = ended[1]
        assert code == 1
        assert "met no other machine" in text and "no answer" in text
        assert re.search("not checked +join", text) and re.search(r"pass +host", text)
        ended = joined(hosts, {1: ["--join", "nobody:29400", "--timeout", 2]})
        assert ended[1][0] == 1 and "has no address here" in ended[1][1]


@slow
def test_whatever_else_listens_there_is_not_taken_for_a_doctor():
    server = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def answer():
        guest, _ = server.accept()
        guest.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        stop.wait(30)
        guest.close()

    threading.Thread(target=answer, daemon=True).start()
    found = join(server.getsockname(), 2, timeout=3)
    stop.set()
    server.close()
    assert found.first.name == "join" and "is not this doctor" in found.first.detail


@slow
def test_a_stranger_that_connects_to_the_head_is_sent_away():
    port, found = free_port(), []
    head = threading.Thread(
        target=lambda: found.append(join(("127.0.0.1", port), 2, timeout=6)), daemon=True
    )
    head.start()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), 1)
            break
        except OSError:
            time.sleep(0.1)
    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 5000 + b"\n")
    head.join(40)
    stranger.close()
    assert "machine 2 of 2" in found[0].first.node


@slow
@pytest.mark.parametrize("lines", [1, 2])
def test_a_doctor_that_left_before_it_began_is_not_counted(lines):
    """Stopped while it waits (2 lines said), or given up before it was greeted (1): it comes
    again, and is one machine, not two."""
    port, found = free_port(), []
    head = threading.Thread(
        target=lambda: found.append(join(("127.0.0.1", port), 2, timeout=40)), daemon=True
    )
    head.start()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            guest = socket.create_connection(("127.0.0.1", port), 1)
            break
        except OSError:
            time.sleep(0.05)
    guest.sendall(json.dumps({"hello": HELLO, "name": "gone"}).encode() + b"\n")
    if lines == 2:
        guest.settimeout(30)
        guest.recv(1000)
        guest.sendall(json.dumps(HERE).encode() + b"\n")
    guest.close()
    again = join(("127.0.0.1", port), 2, timeout=40, head=False, name="came again")
    head.join(60)
    assert "came again" in found[0].verdicts and "gone" not in found[0].verdicts, found[0].table()
    assert not found[0].failed and again["json"] == found[0].json()


@slow
@needs_virtual
def test_killed_halfway_nothing_is_left(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    call = Call(tmp_path, ("doctor", "--nodes", "3", "--shared", str(shared))).start()
    time.sleep(0.8)
    call.process.kill()
    call.finish(20)
    assert all_gone(call.mark)


# ── under srun ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("node0", ["node0"]),
        ("a[1-2]b[3-4]", ["a1b3", "a1b4", "a2b3", "a2b4"]),
        ("n[098-101]-ib", ["n098-ib", "n099-ib", "n100-ib", "n101-ib"]),
    ],
)
def test_nodelists(text, names):
    assert expand(text) == names


def test_outside_srun_there_is_no_task():
    assert slurm_task({}) is None
    assert slurm_task({"SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1"}) is None
    assert slurm_task({"SLURM_JOB_NODELIST": "[", "SLURM_NNODES": "1", "SLURM_NODEID": "0",
                       "SLURM_LOCALID": "0"}) is None  # fmt: skip


@slow
@needs_virtual
@pytest.mark.skipif(bool(slurm.missing()), reason=f"Slurm: {slurm.missing()}")
def test_tasks_of_a_real_srun_meet(tmp_path):
    with cluster.start("virtual", 2) as hosts:
        real = slurm.Slurm(hosts, tmp_path / "slurm")
        srun = f"srun -N2 --ntasks-per-node=2 {sys.executable} -m scalelab doctor"
        done = real.sh(f"PYTHONPATH={ROOT} {srun} --json")
        assert done.returncode == 0, (done.stdout, done.stderr)
        result = json.loads(done.stdout)  # one object: of the head, and of no other task
        assert result["passing"] == "node0,node1"
        assert {"connect", "speed"} <= {c["name"] for c in result["checks"]}
        folder = tmp_path / "shared"
        folder.mkdir()
        hosts.node(1).set_dir(str(folder), "missing")
        missing = real.sh(f"PYTHONPATH={ROOT} {srun} --shared {folder}")
        assert missing.returncode != 0
        assert missing.stdout.count("FAIL        shared directory") == 1
        assert "--exclude=node1\n" in missing.stderr


@slow
@needs_virtual
def test_tasks_of_an_srun_that_cannot_meet_say_so():
    """The variables that srun sets, without a Slurm; and no head."""
    with cluster.start("virtual", 2) as hosts:
        env = {
            1: {"SLURM_STEP_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "SLURM_PROCID": "1",
                "SLURM_NODEID": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "node1"}
        }  # fmt: skip
        ended = joined(hosts, {1: ["--timeout", 2]}, env=env)
        assert ended[1][0] == 1 and "met no other machine" in ended[1][1]
        env[1]["SLURM_LOCALID"] = "1"  # its node's second task has nothing to do
        assert joined(hosts, {1: []}, env=env)[1] == (0, "")


# ── who ──────────────────────────────────────────────────────────────────────────────────────────


def test_another_user_on_one_host_fails_there():
    from scalelab.doctor.checks.host import answers

    seen = three()
    for host, uid in zip(seen.hosts, (1000, 1000, 1001), strict=True):
        host.facts["identity"] = {"value": {"uid": uid, "user": f"u{uid}"}}
    found = report([answers], seen)
    assert (found.first.status, found.first.node) == ("fail", "node2")
    assert "1001 (u1001)" in found.first.detail and "one user" in found.first.fix
    seen.hosts[2].facts["identity"]["value"]["uid"] = 1000
    assert report([answers], seen).ok


@slow
def test_what_is_left_out_is_not_asked_for():
    with cluster.start("local", 2) as hosts:
        found = doctor.examine(hosts, without=["matmul", "speed"])
    assert not {"matmul", "speed"} & {f.name for f in found.findings}
    assert all("matmul" not in h.facts for h in found.seen.hosts)
    assert found.ok, found.table()
