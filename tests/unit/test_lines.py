"""Command lines typed on the nodes of a cluster: what they print, how they end, what is left."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from outside import MARK, ROOT, all_gone, eventually, running

from scalelab import cluster
from scalelab.cluster import UsageError
from scalelab.runs import lines as module
from scalelab.runs.lines import LinesRun

NO_VIRTUAL = cluster.virtual_problem()
needs_virtual = pytest.mark.skipif(bool(NO_VIRTUAL), reason=NO_VIRTUAL or "-")
# as torchrun's workers: a session of its own, and an agent that does not wait for it
WORKER = "setsid sleep 300 & "


@pytest.fixture(scope="module")
def clusters():
    started = {}

    def get(kind):
        if kind not in started:
            started[kind] = cluster.start(kind, nodes=2, env={1: {"OMP_NUM_THREADS": "3"}})
        return started[kind]

    yield get
    for c in started.values():
        c.close()


both = pytest.mark.parametrize(
    "hosts", ["local", pytest.param("virtual", marks=needs_virtual)], indirect=True
)
slow = pytest.mark.slow


@pytest.fixture
def hosts(request, clusters):
    return clusters(getattr(request, "param", "local"))


@pytest.fixture
def typed(hosts):
    """typed({0: line}, **options): the run; looks afterwards that nothing of it is left."""
    mark, begun = uuid.uuid4().hex, []

    def start(lines, on=hosts, **options):
        options = {"timeout": 30, **options, "env": {MARK: mark, **options.get("env", {})}}
        begun.append(LinesRun(on, lines, **options))
        begun[-1].mark = mark
        return begun[-1]

    yield start
    for run in begun:
        run.stop()
        assert not run.running
    assert all_gone(mark), "processes were left running"


@both
def test_what_each_line_prints_and_how_it_ends(typed, hosts):
    run = typed({0: "echo one; echo two >&2; exit 3", 1: "sleep 0.3; echo late"})
    assert run.wait(20)
    assert run.output(0) == "one\ntwo" and run.output(1) == "late"
    assert run.exits == {0: 3, 1: 0} and not run.running and not run.timed_out
    ((at, text),) = run.stamped(1)
    assert text == "late" and 0.3 <= at <= run.seconds
    assert "node0: exit 3" in run.table() and "late" in run.table()


def test_a_line_is_a_shell_command_as_it_stands(typed, hosts):
    run = typed({0: 'for i in 1 2; do echo "$i $HOME"; done | sort -r && kill -9 $$'})
    assert run.wait(20)
    assert run.output(0).splitlines()[0].startswith("2 /") and run.exits == {0: 137}


def test_output_comes_while_the_line_runs(typed):
    run = typed({0: f"{sys.executable} -c 'import time; print(1); time.sleep(60)'"})
    assert eventually(lambda: run.output(0) == "1", 10)
    assert run.running and run.exits == {0: None} and "still running" in run.table()
    assert not run.wait(0.1)


@both
def test_environment_is_the_notebooks(typed, hosts, tmp_path):
    line = "command -v torchrun; command -v python; echo $OMP_NUM_THREADS; pwd; echo $RANK; id -u"
    run = typed({0: line, 1: line}, cwd=str(tmp_path), env={"RANK": "7"})
    assert run.wait(20)
    torchrun, python, threads, where, rank, uid = run.output(0).splitlines()
    here = str(Path(sys.executable).parent)
    assert torchrun == f"{here}/torchrun" and python == f"{here}/python"
    assert (threads, where, rank, uid) == ("1", str(tmp_path), "7", str(os.getuid()))
    assert run.output(1).splitlines()[2] == "3"  # the host's own


def test_no_escapes_and_no_colours(typed):
    run = typed({0: r"printf '\033[31mred\033[0m \033]0;title\007x\rnext\b\n\033(Bthird'"})
    assert run.wait(20)
    assert run.output(0).splitlines() == ["red x", "next", "third"]


@slow
def test_a_flood_is_kept_in_bounds(typed):
    run = typed({0: "seq 1 200000; head -c 20000000 /dev/zero | tr '\\0' y; echo; echo end"})
    assert run.wait(25)
    said = run.stamped(0)
    assert len(said) <= module.HEAD_LINES + module.TAIL_LINES + 1
    assert said[0][1] == "1" and said[-1][1] == "end"
    assert max(len(text) for _, text in said) <= module.LINE_CHARS
    assert any("lines not kept" in text for _, text in said)


def test_bytes_that_are_no_text(typed):
    run = typed({0: r"printf 'a\377b\0c\n'"})
    assert run.wait(20) and run.output(0) == "a�bc"


@both
def test_stop_ends_what_a_line_started_in_a_session_of_its_own(typed, hosts):
    run = typed({0: WORKER + "echo up; wait", 1: WORKER + "trap '' TERM INT; echo up; sleep 300"})
    assert eventually(lambda: run.output(0) == run.output(1) == "up", 10)
    assert len(running(run.mark)) >= 4
    began = time.monotonic()
    run.stop()
    assert time.monotonic() - began < 5
    assert all_gone(run.mark) and not run.running and set(run.exits.values()) == {143}
    run.stop()  # once more does nothing


@both
def test_such_a_session_would_outlive_a_plain_kill(hosts):
    """What the test above would miss if it could not see it."""
    mark = uuid.uuid4().hex
    with open(os.devnull, "w") as null:
        process = hosts.node(0).spawn(["/bin/sh", "-c", WORKER + "wait"], out=null.fileno(),
                                      err=null.fileno(), env={MARK: mark})  # fmt: skip
    try:
        # not merely begun: it must be in its session before the kill
        assert eventually(lambda: len({os.getsid(pid) for pid in running(mark)}) >= 2, 10)
        process.signal(signal.SIGKILL, group=True)
        process.wait(5)
        assert not all_gone(mark, within=0.5)
    finally:
        hosts.node(0).end_all()
    assert all_gone(mark)


def test_a_line_that_ends_takes_its_background_with_it(typed):
    run = typed({0: WORKER + "echo over"})
    assert run.wait(10) and run.exits == {0: 0}
    assert all_gone(run.mark)


@slow
def test_time_is_up(typed):
    run = typed({0: "sleep 300", 1: "echo fine"}, timeout=1)
    assert run.wait(10) and run.timed_out
    assert run.exits == {0: 143, 1: 0} and 1 <= run.seconds < 6


def test_other_lines_on_the_host_go_on(typed):
    other = typed({0: "sleep 300"})
    run = typed({0: "sleep 300"})
    run.stop()
    assert other.running and not run.running


@both
def test_it_is_a_context_manager(hosts):
    mark = uuid.uuid4().hex
    with pytest.raises(ZeroDivisionError):
        with LinesRun(hosts, {0: "sleep 300", 1: WORKER + "wait"}, env={MARK: mark}):
            assert eventually(lambda: len(running(mark)) >= 3, 10)
            raise ZeroDivisionError
    assert all_gone(mark)


@slow
@needs_virtual
def test_a_host_whose_plug_is_pulled(clusters):
    with cluster.start("virtual", nodes=2) as c, LinesRun(c, {0: "sleep 1", 1: "sleep 300"}) as run:
        c.node(1).kill()
        assert run.wait(10) and run.exits == {0: 0, 1: -9}


def test_a_cluster_that_is_closed_under_it():
    c = cluster.start("local", nodes=1)
    with LinesRun(c, {0: "echo up; sleep 300"}) as run:
        assert eventually(lambda: run.output(0) == "up", 10)
        c.close()
        assert run.wait(10) and not run.running


@slow
@pytest.mark.parametrize("kind", ["local", pytest.param("virtual", marks=needs_virtual)])
def test_ctrl_c(tmp_path, kind):
    mark = uuid.uuid4().hex
    code = (
        "from scalelab import cluster\nfrom scalelab.runs.lines import LinesRun\n"
        f"with cluster.start({kind!r}, nodes=2) as c:\n"
        f"    with LinesRun(c, {{0: {WORKER + 'wait'!r}, 1: 'sleep 300'}}) as run:\n"
        "        print('up', flush=True)\n        run.wait(60)\n"
    )
    client = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), MARK: mark},
    )  # fmt: skip
    try:
        assert client.stdout.readline() == b"up\n"
        time.sleep(0.3)
        client.send_signal(signal.SIGINT)
        _, said = client.communicate(timeout=10)
        assert b"KeyboardInterrupt" in said
        assert all_gone(mark)
    finally:
        client.kill()
        client.wait()


@pytest.mark.parametrize("lines, words", [
    ({}, "no lines"), ({0: ""}, "line for node 0"), ({0: ["ls"]}, "as text"), ({9: "ls"}, "node 9"),
    ({0: "a\0b"}, "line for node 0"),
])  # fmt: skip
def test_what_cannot_be_typed(clusters, lines, words):
    with pytest.raises(UsageError) as error:
        LinesRun(clusters("local"), lines)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_bad_values(clusters):
    for options in ({"timeout": 0}, {"env": {"A=": "b"}}):
        with pytest.raises(UsageError):
            LinesRun(clusters("local"), {0: "true"}, **options)
    with LinesRun(clusters("local"), {0: "true"}) as run, pytest.raises(UsageError):
        run.output(1)
