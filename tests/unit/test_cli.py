"""`scalelab run` as a person uses it: real torchrun, a process of its own, seen from outside."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from outside import (
    NO_NAMESPACES,
    ORDINARY,
    OTHER_UID,
    ROOT,
    Call,
    cannot,
    eventually,
    running,
    scalelab,
    small_disk,
    write,
)  # fmt: skip

from scalelab import cluster
from scalelab.cluster.leftovers import client_mark

# DESIGN.md, command line
KEYS = {"run", "dir", "cluster", "status", "world_size", "nodes", "ranks", "first_failure",
        "seconds", "metrics"}  # fmt: skip
RANK_KEYS = {"rank", "local_rank", "node", "pid", "exit"}

HELLO = """
import json, os, socket, sys
names = ("RANK", "WORLD_SIZE", "ONLY_NODE_1")
print(json.dumps([*map(os.environ.get, names), socket.gethostname(), sys.argv[1:]]))
"""

needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-"
)
slow = pytest.mark.slow


@pytest.fixture
def hello(tmp_path):
    return write(tmp_path / "hello.py", HELLO)


def said_by_rank(text: str) -> list:
    """The JSON lines that ranks printed, in the order in which the command printed them."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("[")]


def check_keys(record: dict) -> None:
    assert set(record) == KEYS
    assert all(set(n) == {"name", "addr"} for n in record["nodes"])
    assert all(set(r) == RANK_KEYS for r in record["ranks"])
    if record["first_failure"]:
        assert set(record["first_failure"]) == {"rank", "node", "error"}


# Bad input: one line that says what is wrong, exit 2, nothing left (Call.finish looks)

BAD = {
    "no such script": (["no_such.py"], "no_such.py"),
    "a directory for a script": (["."], "'.'"),
    "no script": ([], "SCRIPT"),
    "no nodes": (["--nodes", "0", "S"], "nodes 0"),
    "-1 nodes": (["--nodes", "-1", "S"], "nodes -1"),
    "nodes in words": (["--nodes", "two", "S"], "'two'"),
    "65 nodes": (["--nodes", "65", "S"], "1 to 64"),
    "no ranks": (["--nproc-per-node", "0", "S"], "nproc-per-node 0"),
    "-2 ranks": (["--nproc-per-node=-2", "S"], "nproc-per-node -2"),
    "rate in words": (["--rate", "fast", "S"], "'fast'"),
    "rate 0": (["--rate", "0", "S"], "'0'"),
    "rate 0gbit": (["--rate", "0gbit", "S"], "'0gbit'"),
    "rate below 0": (["--rate", "-1gbit", "S"], "'-1gbit'"),
    "a unit that is no rate": (["--rate", "1 parsec", "S"], "'1 parsec'"),
    "delay without a unit": (["--delay", "5", "S"], "'5'"),
    "delay below 0": (["--delay", "-5ms", "S"], "'-5ms'"),
    "loss above 100 %": (["--loss", "101%", "S"], "'101%'"),
    "mtu 1": (["--mtu", "1", "S"], "'1'"),
    "node 7 of two": (["--node-env", "7:X=1", "S"], "nodes 0 to 1"),
    "node-env without =": (["--node-env", "1:X", "S"], "I:NAME=VALUE"),
    "node-env without a node": (["--node-env", "X=1", "S"], "I:NAME=VALUE"),
    "node-env without a name": (["--node-env", "1:=1", "S"], "I:NAME=VALUE"),
    "node-env of an odd digit": (["--node-env", "²:X=1", "S"], "I:NAME=VALUE"),
    "node-env of a name that is taken": (["--node-env", "0:SCALELAB_NODE=z", "S"], "taken"),
    "run directory of nobody": (["--run-dir", "~no_such_user/x", "S"], "run directory"),
    "run directory of no name": (["--run-dir", "", "S"], "--run-dir"),
    "node-env below 0": (["--node-env", "-1:X=1", "S"], "I:NAME=VALUE"),
    "timeout 0": (["--timeout", "0", "S"], "timeout 0"),
    "timeout in words": (["--timeout", "soon", "S"], "'soon'"),
    "timeout that is no number": (["--timeout", "nan", "S"], "timeout nan"),
    "no such cluster": (["--cluster", "moon", "S"], "'moon'"),
    "a shaped link on local": (["--cluster", "local", "--rate", "1gbit", "S"], "rate"),
    "no such flag": (["--fast", "S"], "--fast"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_2(case, hello, tmp_path):
    args, word = BAD[case]
    call = scalelab(tmp_path, "run", *[hello if a == "S" else a for a in args])
    assert call.code == 2, call.err
    assert call.line.startswith("scalelab run: ") and word in call.line
    assert call.out == ""
    assert not call.home.exists() or not list(call.home.rglob("manifest.json"))


def test_bad_input_with_json_leaves_stdout_empty(tmp_path):
    call = scalelab(tmp_path, "run", "--json", "no_such.py")
    assert (call.code, call.out) == (2, "")
    assert "no_such.py" in call.line


def test_no_such_command(tmp_path):
    call = scalelab(tmp_path, "fly")
    assert call.code == 2
    assert "fly" in call.line


def test_help_of_every_command(tmp_path):
    for args in ([], ["--help"], ["run", "--help"], ["clean", "--help"], ["--version"]):
        call = scalelab(tmp_path, *args)
        assert call.code == 0 and "scalelab" in call.out and call.err == ""


def test_run_directory_that_cannot_be_made(hello, tmp_path):
    write(tmp_path / "a file", "")
    call = scalelab(tmp_path, "run", "--run-dir", tmp_path / "a file" / "run", hello)
    assert call.code == 2 and "Not a directory" in call.line


def test_run_directory_that_cannot_be_written(hello, tmp_path):
    problem = cannot(ORDINARY)
    if problem:
        pytest.skip(f"an ordinary user: {problem}")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    call = scalelab(tmp_path, "run", "--run-dir", closed / "run", hello, prefix=ORDINARY)
    assert call.code == 2 and "Permission denied" in call.line


def test_run_directory_that_holds_a_run(hello, tmp_path):
    write(tmp_path / "run" / "manifest.json", "{}")
    call = scalelab(tmp_path, "run", "--run-dir", tmp_path / "run", hello)
    assert call.code == 2 and "holds a run already" in call.line


def test_full_disk(hello, tmp_path):
    """That a run fits on a larger disk is shown by test_disk_that_fills_up."""
    prefix = small_disk(tmp_path / "disk", 4)
    if problem := cannot(prefix):
        pytest.skip(f"a disk of its own: {problem}")
    call = scalelab(tmp_path, "run", "--run-dir", tmp_path / "disk" / "run", hello, prefix=prefix)
    assert call.code == 2 and "disk is full" in call.line


# Runs that end well

AWKWARD = ["--lr", "-1", "--json", "--", "-x", "", "two words", '"', "--rate=fast", "$HOME"]


@slow
@needs_virtual
def test_success(tmp_path):
    """One run tells: the keys, two hosts, arguments untouched, --node-env, an odd path."""
    script = write(tmp_path / "it's a \"test\" $HOME" / "of paths.py", HELLO)
    call = scalelab(
        tmp_path, "run", "--cluster", "virtual", "--nodes", "2", "--rate", "1gbit", "--json",
        "--node-env", "1:ONLY_NODE_1=a=b c", script, *AWKWARD,
    )  # fmt: skip
    assert call.code == 0, call.err
    record = call.json
    check_keys(record)
    assert (record["status"], record["cluster"]) == ("succeeded", "virtual")
    assert (record["world_size"], record["first_failure"]) == (2, None)
    assert record["nodes"] == [
        {"name": "node0", "addr": "10.77.0.1"}, {"name": "node1", "addr": "10.77.0.2"},
    ]  # fmt: skip
    assert [(r["rank"], r["local_rank"], r["exit"]) for r in record["ranks"]] == [
        (0, 0, 0), (1, 0, 0),
    ]  # fmt: skip
    assert {r["node"] for r in record["ranks"]} == {"node0", "node1"}
    assert all(r["pid"] > 0 for r in record["ranks"])
    assert 0 < record["seconds"] < call.seconds
    assert Path(record["dir"]) == call.home / "runs" / record["run"]
    # rank order, whichever was first
    said = said_by_rank(call.err)
    assert [line[0] for line in said] == ["0", "1"]
    for rank, world, only, host, args in said:
        node = record["ranks"][int(rank)]["node"]
        assert (world, host, args) == ("2", node, AWKWARD)
        assert only == ("a=b c" if node == "node1" else None)
    assert "warning" not in call.err
    manifest = json.loads((Path(record["dir"]) / "manifest.json").read_text())
    assert manifest["link"] == {"rate": "1gbit"} and manifest["separate_hosts"] is True


@slow
def test_more_ranks_than_the_machine_holds(hello, tmp_path):
    """On one core that is two. (That fewer give no warning: test_success.)"""
    call = scalelab(
        tmp_path, "run", "--nodes", "1", "--nproc-per-node", "3", hello,
        cpus={min(os.sched_getaffinity(0))},
    )  # fmt: skip
    assert call.code == 0
    warnings = [line for line in call.err.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1 and "3 ranks are more than this machine holds" in warnings[0]
    assert [line[0] for line in said_by_rank(call.out)] == ["0", "1", "2"]


CHATTY = """
import time
began = time.time()
for second in range(3):
    for part in range(10):
        print(("x" * 99 + "\\n") * 1000, end="")
        time.sleep(max(0, began + second + (part + 1) / 10 - time.time()))
print("paced", round(time.time() - began, 1))
print(("y" * 99 + "\\n") * 180_000, end="")
print("the last word")
"""


@slow
def test_a_megabyte_a_second(tmp_path):
    script = write(tmp_path / "chatty.py", CHATTY)
    call = scalelab(tmp_path, "run", "--nodes", "1", script)
    assert call.code == 0, call.err
    log = next(call.home.rglob("rank0.log")).read_text()
    paced = next(line for line in log.splitlines() if line.startswith("paced"))
    assert 2.9 <= float(paced.split()[1]) < 4.5, "the script was held up by its own output"
    assert log.startswith("x" * 99 + "\n") and log.endswith("the last word\n")
    assert len(log) < 18.5e6 and "bytes of output not kept" in log
    # and the person sees its end, not 21 MB
    assert len(call.out) < 50_000 and "the last word" in call.out and "earlier lines" in call.out


# Runs that fail

ONE_RAISES = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise KeyError("the batch of rank 1")
dist.all_reduce(torch.ones(1))
"""


@slow
@needs_virtual
def test_a_script_that_raises_on_rank_1_only(tmp_path):
    script = write(tmp_path / "one_raises.py", ONE_RAISES)
    call = scalelab(tmp_path, "run", "--cluster", "virtual", "--json", script, timeout=90)
    assert call.code == 1
    record = call.json
    check_keys(record)
    first = record["first_failure"]
    assert record["status"] == "failed"
    # ranks are given to nodes in the order in which agents arrive, so ask the record
    assert first["rank"] == 1 and first["node"] == record["ranks"][1]["node"]
    assert first["error"].startswith("Traceback")
    assert first["error"].endswith("KeyError: 'the batch of rank 1'")
    assert str(script) in first["error"] and "[rank1]" not in first["error"]
    assert "ChildFailedError" not in first["error"]
    # must-fail: rank 0 did fail as well, in words of its own
    assert record["ranks"][0]["exit"] not in (0, None)
    assert f"first failure: rank 1 on {first['node']}\nTraceback" in call.err


@slow
def test_a_script_that_exits_3(tmp_path):
    script = write(tmp_path / "three.py", "print('so long')\nraise SystemExit(3)")
    call = scalelab(tmp_path, "run", "--nodes", "1", script)
    assert call.code == 1
    assert "first failure: rank 0 on node0\nexited with code 3\nso long" in call.err
    assert "failed after" in call.out and "Traceback" not in call.err


HANGS = """
import time
def deeper(n):
    if n:
        deeper(n - 1)
    else:
        wait_for_godot()
def wait_for_godot():
    print("waiting")
    time.sleep(1000)
deeper(12)
"""


@slow
def test_a_script_that_hangs(tmp_path):
    script = write(tmp_path / "hangs.py", HANGS)
    for seconds in (7, 40):  # the second only where this machine is so busy that no rank began
        call = scalelab(tmp_path, "run", "--nodes", "1", "--timeout", seconds, "--json", script)
        if call.json["ranks"]:
            break
    assert call.code == 1
    record = call.json
    check_keys(record)
    first = record["first_failure"]
    assert record["status"] == "timed_out" and (first["rank"], first["node"]) == (0, "node0")
    assert first["error"].startswith(f"timed out after {seconds} s; still running: rank 0")
    # the stack, from where it hangs
    stack = [line for line in first["error"].splitlines() if line.lstrip().startswith("File")]
    assert "in wait_for_godot" in stack[0] and "in deeper" in stack[1] and len(stack) == 15
    assert seconds <= call.seconds < seconds + 10


@slow
def test_timeout_before_the_ranks_have_begun(hello, tmp_path):
    call = scalelab(tmp_path, "run", "--timeout", "0.3", "--json", hello)
    assert call.code == 1 and call.json["status"] == "timed_out"
    check_keys(call.json)
    assert call.json["first_failure"]["rank"] is None
    assert "no rank running" in call.json["first_failure"]["error"]
    assert call.seconds < 8


FILLS = """
import os
path = os.path.join(os.environ["SCALELAB_RUN_DIR"], "checkpoint")
with open(path, "wb", buffering=0) as f:
    while True:
        f.write(b"0" * 65536)
"""


@slow
def test_disk_that_fills_up(tmp_path):
    prefix = small_disk(tmp_path / "disk", 48)
    if problem := cannot(prefix):
        pytest.skip(f"a disk of its own: {problem}")
    script = write(tmp_path / "fills.py", FILLS)
    call = scalelab(
        tmp_path, "run", "--nodes", "1", "--json", "--run-dir", tmp_path / "disk" / "run", script,
        prefix=prefix,
    )  # fmt: skip
    assert call.code == 1
    check_keys(call.json)
    first = call.json["first_failure"]
    assert call.json["status"] == "failed" and first["rank"] == 0
    assert first["error"].startswith("Traceback")
    assert first["error"].endswith("OSError: [Errno 28] No space left on device")
    assert "warning: " in call.err  # its log or its manifest


# Ctrl-C and kill

STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: print("told to end"))
signal.signal(signal.SIGINT, lambda *_: print("told to end"))
open(os.path.join(os.environ["SCALELAB_RUN_DIR"], "begun" + os.environ["RANK"]), "w").close()
until = time.time() + 300
while time.time() < until:
    time.sleep(1)
"""
PLAIN = STUBBORN.replace("signal.signal", "#")


def in_mid_run(tmp_path, script: str, *args, ranks=1) -> Call:
    path = write(tmp_path / "sleeps.py", script)
    run_dir = tmp_path / "run"
    call = Call(tmp_path, ("run", *args, "--run-dir", run_dir, path)).start()
    begun = eventually(lambda: len(list(run_dir.glob("begun*"))) == ranks, 60)
    if not begun:
        call.finish(1)
    assert len(running(call.mark)) >= ranks + 3  # must-fail of "nothing left": command, agent, …
    return call


@slow
def test_ctrl_c(tmp_path):
    call = in_mid_run(tmp_path, PLAIN, "--json", ranks=2).ctrl_c().finish()
    assert call.code == 130, call.err
    record = call.json
    check_keys(record)
    assert (record["status"], record["first_failure"]) == ("stopped", None)
    assert all(r["exit"] for r in record["ranks"])
    assert "Traceback" not in call.err


@slow
def test_kill_is_like_ctrl_c(tmp_path):
    call = in_mid_run(tmp_path, PLAIN, "--nodes", "1").ctrl_c(signal.SIGTERM).finish()
    assert call.code == 130
    assert "stopped after" in call.out and "Traceback" not in call.err
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["status"] == "stopped"


@slow
def test_ctrl_c_on_ranks_that_will_not_listen(tmp_path):
    call = in_mid_run(tmp_path, STUBBORN, "--nodes", "1", "--json").ctrl_c().finish(20)
    assert call.code == 130 and call.json["status"] == "stopped"
    assert call.json["ranks"][0]["exit"] == -signal.SIGKILL
    assert "told to end" in (tmp_path / "run" / "logs" / "rank0.log").read_text()


@slow
def test_ctrl_c_twice(tmp_path):
    call = in_mid_run(tmp_path, STUBBORN, "--nodes", "1").ctrl_c()
    time.sleep(0.5)  # within the time that ranks are given to end by themselves
    call.ctrl_c().finish(20)
    assert call.code == 130 and "Traceback" not in call.err


def test_ctrl_c_before_the_ranks_have_begun(hello, tmp_path):
    for i, after in enumerate((0.1, 0.25, 0.4, 0.9)):
        call = Call(tmp_path / str(i), ("run", hello)).start()
        time.sleep(after)
        call.ctrl_c().finish(20)
        # -SIGINT: Python itself was not up yet
        assert call.code in (130, -signal.SIGINT), call.err


# Whoever runs it, wherever

def see_two_ranks(call: Call, kind: str) -> None:
    assert call.code == 0, call.err
    record = call.json
    assert (record["cluster"], record["status"], record["world_size"]) == (kind, "succeeded", 2)
    hosts = [line[3] for line in said_by_rank(call.err)]
    assert len(hosts) == 2
    assert len({n["addr"] for n in record["nodes"]}) == (2 if kind == "virtual" else 1)
    assert len(set(hosts)) == (2 if kind == "virtual" else 1)


@slow
@needs_virtual
def test_ordinary_user(hello, tmp_path):
    if problem := cannot(ORDINARY):
        pytest.skip(f"an ordinary user: {problem}")
    who = [*ORDINARY, sys.executable, "-c",
           "import os; print(os.getuid(), int(open('/proc/self/status').read()"
           ".split('CapEff:')[1].split()[0], 16))"]  # fmt: skip
    assert subprocess.run(who, capture_output=True, text=True).stdout == "1000 0\n"
    call = scalelab(tmp_path, "run", "--json", hello, prefix=ORDINARY)
    see_two_ranks(call, "virtual")


@slow
def test_where_user_namespaces_are_off(hello, tmp_path):
    if problem := cannot(NO_NAMESPACES):
        pytest.skip(f"user namespaces switched off: {problem}")
    assert cannot([*NO_NAMESPACES, "unshare", "-Ur"])
    call = scalelab(tmp_path, "run", "--json", hello, prefix=NO_NAMESPACES)
    see_two_ranks(call, "local")
    said = [line for line in call.err.splitlines() if line.startswith("cluster local")]
    assert len(said) == 1 and "user.max_user_namespaces is 0" in said[0]
    manifest = json.loads((Path(call.json["dir"]) / "manifest.json").read_text())
    assert manifest["separate_hosts"] is False
    assert "user.max_user_namespaces is 0" in manifest["why_local"]


def test_what_needs_emulated_hosts_says_why_there_are_none(hello, tmp_path):
    if problem := cannot(NO_NAMESPACES):
        pytest.skip(f"user namespaces switched off: {problem}")
    for args in (["--cluster", "virtual"], ["--rate", "1gbit"]):
        call = scalelab(tmp_path, "run", *args, hello, prefix=NO_NAMESPACES)
        assert call.code == 1 and "user.max_user_namespaces is 0" in call.line


@pytest.fixture
def other_user():
    """A folder of another user's, a prefix that makes one be that user, and a Python for it."""
    if os.getuid() != 0:
        pytest.skip("another user: only root can become one")
    prefix = ["setpriv", f"--reuid={OTHER_UID}", f"--regid={OTHER_UID}", "--clear-groups"]
    packages = Path(psutil.__file__).parents[1]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    check = (
        "import importlib.util, os, sys, scalelab.cli, pyroute2\n"
        "sys.exit(not (importlib.util.find_spec('torch') and os.access(sys.executable, os.X_OK)))"
    )
    folder = Path(tempfile.mkdtemp(prefix="scalelab-other-user-"))
    try:
        os.chown(folder, OTHER_UID, OTHER_UID)
        for python in (sys.executable, *(f"/usr{d}/bin/{version}" for d in ("", "/local"))):
            path = f"{ROOT}:{packages}"
            tried = subprocess.run(
                [*prefix, python, "-c", check],
                env={**os.environ, "PYTHONPATH": path}, cwd=folder, capture_output=True,
            )  # fmt: skip
            if tried.returncode == 0:
                yield folder, {"prefix": prefix, "python": python, "env": {"PYTHONPATH": path}}
                return
        pytest.skip("another user: no Python here that another user can run, with torch")
    except FileNotFoundError:
        pytest.skip("another user: needs setpriv (util-linux)")
    finally:
        shutil.rmtree(folder)


@slow
@needs_virtual
def test_another_user(other_user):
    folder, how = other_user
    script = write(folder / "hello.py", HELLO)
    call = Call(folder, ("run", "--json", script), **how).start()
    os.chown(call.temporary, OTHER_UID, OTHER_UID)
    call.finish()
    see_two_ranks(call, "virtual")
    assert Path(call.json["dir"]).stat().st_uid == OTHER_UID


# clean

def test_clean_when_there_is_nothing(tmp_path):
    call = scalelab(tmp_path, "clean", "--json")
    assert call.code == 0 and call.json["ended"] == []


def test_clean_ends_leftovers_and_leaves_clusters_in_use(tmp_path):
    namespace = client_mark().split(":")[2]
    dead = f"1:0:{namespace}"  # PID 1, but not started at the boot's first tick
    leftover = subprocess.Popen(
        ["sleep", "300"], env={**os.environ, "SCALELAB_CLIENT": dead}, start_new_session=True
    )
    try:
        with cluster.start("local", nodes=1) as hosts:
            call = scalelab(tmp_path, "clean", "--json")
            assert call.json["ended"] == [leftover.pid]
            assert hosts.channel.owner.pid in call.json["in_use"]
            assert leftover.wait(5) == -signal.SIGKILL
            assert hosts.node(0).sh("echo alive").stdout == "alive\n"
    finally:
        leftover.kill()
        leftover.wait()
