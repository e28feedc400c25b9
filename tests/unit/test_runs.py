"""scalelab.runs: what is recorded, who failed first, and that a lost rank is never a success.

Quick tests start the ranks by a stand-in for torchrun (see outside.py); keeper, cluster and
watcher are the real ones. Tests marked slow use the real torchrun.
"""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from outside import COUNT, ROOT, all_gone, eventually, running, stand_in, write

from scalelab import cluster, runs
from scalelab.cluster import UsageError
from scalelab.runs import RunError, rank, record
from scalelab.runs import run as watcher

NO_VIRTUAL = cluster.virtual_problem()
needs_virtual = pytest.mark.skipif(bool(NO_VIRTUAL), reason=NO_VIRTUAL or "-")
slow = pytest.mark.slow
PHASES = ["data", "forward", "backward", "communication", "update"]
TRAIN = ROOT / "notebooks" / "scripts" / "train_ddp.py"
MARK = "SCALELAB_TEST_RUN"


@pytest.fixture(scope="module")
def clusters():
    """By kind, started once."""
    started = {}

    def get(kind):
        if kind not in started:
            started[kind] = cluster.start(kind, nodes=2)
        return started[kind]

    yield get
    for c in started.values():
        c.close()


@pytest.fixture(params=["local", pytest.param("virtual", marks=needs_virtual)])
def hosts(request, clusters):
    return clusters(request.param)


@pytest.fixture
def impatient(monkeypatch):
    """After the first failure the other ranks get less time than usual to end by themselves."""
    monkeypatch.setattr(watcher, "GRACE_FAILED", 1.0)


@pytest.fixture
def launch(tmp_path, hosts, impatient):
    """launch(script text, *args, **keywords of runs.launch) with the stand-in; ends what it began,
    and looks that nothing is left."""
    env, begun = stand_in(tmp_path / "stand in"), []

    def start(text, *args, on=hosts, **kw):
        script = write(tmp_path / f"script {len(begun)}.py", text)
        mark = uuid.uuid4().hex
        kw = {"timeout": 30, "run_dir": tmp_path / f"run {len(begun)}", **kw}
        kw["env"] = {**env, MARK: mark, **kw.get("env", {})}
        run = runs.launch(script, [str(a) for a in args], cluster=on, **kw)
        begun.append((run, mark))
        return run

    yield start
    for run, mark in begun:
        run.stop()
        assert run.done
        assert all_gone(mark, name=MARK), "processes were left running"


def started(run, ranks=2) -> bool:
    return eventually(lambda: len(run.ranks) == ranks or run.done) and not run.done


# What ranks print and measure

def test_metrics_logs_and_record(launch, hosts):
    run = launch(COUNT, 3, nproc_per_node=2).wait(30)
    assert run.status == "succeeded" and run.first_failure is None and run.problems == []
    assert [(m["step"], m["rank"]) for m in run.metrics()] == [
        (s, r) for s in (1, 2, 3) for r in range(4)
    ]
    # the merged file is the same lines in the same order; with more ranks than were asked for, no
    merged = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    assert merged == run.metrics() and len(merged) == 12
    assert list(run.logs()) == [0, 1, 2, 3]
    assert [run.log(r) for r in range(4)] == [f"rank {r} counted to 3\n" for r in range(4)]
    assert [r["local_rank"] for r in run.ranks] == [0, 1, 0, 1]
    assert [r["node"] for r in run.ranks] == ["node0", "node0", "node1", "node1"]
    assert run.words().endswith("4 of 4 ranks, step 3, loss 4.970")
    seen = run.record()
    assert seen["cluster"] == hosts.kind and seen["world_size"] == 4
    assert seen["metrics"] == str(run.dir / "metrics.jsonl")
    assert len({r["pid"] for r in seen["ranks"]}) == 4
    manifest = runs.read_manifest(run.dir)
    assert manifest["status"] == "succeeded" and manifest["args"] == ["3"]
    assert manifest["began"] <= manifest["ended"] and manifest["command"].startswith("torchrun ")


def test_pids_are_this_machines(launch):
    run = launch("import time; time.sleep(30)")
    assert started(run)
    for entry in run.ranks:
        words = Path(f"/proc/{entry['pid']}/cmdline").read_bytes().split(b"\0")
        assert words[-2].endswith(b"script 0.py")


def test_lines_that_are_no_metrics_are_left_out(tmp_path):
    whole = json.dumps({"step": 2, "rank": 1, "loss": 1.0})
    folder = tmp_path / "metrics"
    write(folder / "rank1.jsonl", f"{whole}\nnot json\n[1]\n{{\"rank\": 1}}\n" + whole[:9])
    write(folder / "rank0.jsonl", json.dumps({"step": 2, "rank": 0, "extra": [1]}) + "\n")
    reader = record.MetricsReader(tmp_path)
    assert [m["rank"] for m in reader.read()] == [0, 1]
    assert reader.read()[0]["extra"] == [1]
    with open(folder / "rank1.jsonl", "a") as f:  # the rest of the half-written line arrives
        f.write(whole[9:].replace("2", "3") + "\n")
    assert len(reader.read()) == 3


def test_seed_and_link_are_in_the_manifest(launch):
    run = launch("", "--seed=7", "--seed", "8").wait(30)
    manifest = runs.read_manifest(run.dir)
    assert manifest["seed"] == 7 and manifest["link"] == {}
    assert set(manifest["versions"]) == {"python", "torch", "scalelab"}
    assert all(manifest["versions"].values())


WHO = """
import json, os, socket
print(json.dumps([socket.gethostname(), os.environ.get("EVERY"), os.environ.get("ONE")]))
"""


def test_environment_of_one_node_reaches_that_node_only(launch):
    run = launch(WHO, env={"EVERY": "x"}, node_env={1: {"ONE": "y"}}, nproc_per_node=2).wait(30)
    assert run.status == "succeeded"
    said = {entry["rank"]: json.loads(run.log(entry["rank"]))[1:] for entry in run.ranks}
    assert said == {0: ["x", None], 1: ["x", None], 2: ["x", "y"], 3: ["x", "y"]}
    assert runs.read_manifest(run.dir)["node_env"] == {"1": {"ONE": "y"}}


# Who failed first

EARLY_BUT_SLOW = """
import atexit, os, sys, time, traceback
if os.environ["RANK"] == "1":
    # as torch.distributed does in every rank of a process group
    sys.excepthook = lambda *e: print(*("[rank1]: " + line for line in
        "".join(traceback.format_exception(*e)).splitlines()), sep=chr(10), file=sys.stderr)
    atexit.register(time.sleep, float(sys.argv[1]))     # raises first, takes its time to end
    raise ValueError("the cause")
time.sleep(0.5)
raise ConnectionError("closed by peer")     # fails later, ends sooner
"""


@pytest.mark.slow
@pytest.mark.parametrize("seconds, code", [(1.2, 1), (60, -signal.SIGTERM)])
def test_first_failure_is_the_first_to_raise_not_the_first_to_end(launch, seconds, code):
    run = launch(EARLY_BUT_SLOW, seconds).wait(30)
    assert run.status == "failed"
    assert (run.first_failure["rank"], run.first_failure["node"]) == (1, "node1")
    assert run.first_failure["error"].endswith("ValueError: the cause")
    assert "first failure: rank 1 on node1" in run.words()
    # must-fail: rank 0 failed too, and says so in its own log
    assert run.ranks[0]["exit"] == 1 and "closed by peer" in run.log(0)
    assert run.ranks[1]["exit"] == code


@pytest.mark.slow
def test_a_traceback_that_was_dealt_with_is_not_the_failure(launch):
    run = launch("""
import os, time, traceback
if os.environ["RANK"] == "0":
    try:
        {}["no harm"]
    except KeyError:
        traceback.print_exc()
    time.sleep(0.7)
    print("going on")
    time.sleep(30)      # ended by torchrun, on account of rank 1
time.sleep(1)
raise ValueError("the cause")
""", nproc_per_node=2).wait(30)  # fmt: skip
    assert run.status == "failed" and "no harm" in run.log(0)
    assert run.first_failure["rank"] in (1, 2, 3)
    assert run.first_failure["error"].endswith("ValueError: the cause")


@pytest.mark.slow
def test_a_traceback_long_before_an_exit_with_1_is_not_the_failure(launch):
    run = launch("""
import os, sys, time, traceback
if os.environ["RANK"] == "0":
    try:
        {}["no harm"]
    except KeyError:
        traceback.print_exc()
    time.sleep(4)       # in silence
    sys.exit(1)
time.sleep(1.5)
raise ValueError("the cause")
""").wait(30)  # fmt: skip
    assert run.first_failure["error"].endswith("ValueError: the cause")


def test_a_peer_that_is_quicker_than_the_news_of_a_kill_is_not_named(launch):
    """A helper holds the dead script's pipe, so that its keeper takes a moment to notice."""
    run = launch("""
import os, signal, subprocess, time
flag = os.path.join(os.environ["SCALELAB_RUN_DIR"], "down")
if os.environ["RANK"] == "1":
    subprocess.Popen(["sleep", "1"])
    open(flag, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
while not os.path.exists(flag):
    time.sleep(0.005)
raise ConnectionError("closed by peer")
""").wait(30)  # fmt: skip
    assert run.ranks[0]["exit"] == 1
    assert run.first_failure == {"rank": 1, "node": "node1", "error": "was ended by SIGKILL"}


def test_chained_tracebacks_are_told_whole(launch):
    run = launch("""
try:
    {}["the root of it"]
except KeyError as e:
    raise RuntimeError("what it led to") from e
""").wait(30)  # fmt: skip
    error = run.first_failure["error"]
    assert error.startswith("Traceback") and error.count("Traceback") == 2
    assert "KeyError: 'the root of it'" in error and error.endswith("what it led to")


ALL_AT_ONCE = """
import os, pathlib, time
here = pathlib.Path(os.environ["SCALELAB_RUN_DIR"])
(here / ("here" + os.environ["RANK"])).touch()
while len(list(here.glob("here*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("letter", ["x", "\N{CJK UNIFIED IDEOGRAPH-9519}", '"', "\n", "\x01"])
def test_long_errors_in_any_script_arrive(launch, letter):
    """All ranks of a node report through one pipe: what is longer than it takes in one piece
    would be mixed with what another says."""
    run = launch(ALL_AT_ONCE + f"raise ValueError({letter!r} * 15_000 + 'the end')",
                 nproc_per_node=2).wait(30)  # fmt: skip
    assert all(r["exit"] for r in run.ranks) and len(run.ranks) == 4
    assert run.first_failure["error"].startswith("Traceback")
    assert run.first_failure["error"].endswith("the end")


def test_peak_memory_of_each_rank_is_recorded(launch):
    run = launch("""
import os
held = b"x" * (200_000_000 * int(os.environ["RANK"]))
""").wait(30)
    small, large = (rank["memory_mb"] for rank in runs.read_manifest(run.dir)["ranks"])
    assert 5 < small < 100 and 200 < large < small + 250


def test_exit_code_without_a_traceback(launch):
    run = launch("import sys; print('so long'); sys.exit(3)").wait(30)
    assert run.first_failure["error"] == "exited with code 3\nso long"


def test_a_crash_shows_the_stack(launch):
    run = launch("""
import ctypes
def innocent():
    ctypes.string_at(0)
innocent()
""").wait(30)  # fmt: skip
    assert run.ranks[0]["exit"] == -signal.SIGSEGV
    error = run.first_failure["error"]
    assert error.startswith("was ended by SIGSEGV\nFatal Python error: Segmentation fault")
    assert "in innocent" in error
    assert not list(Path.cwd().glob("core*"))


# A run that lost a rank is never a success

SLEEP = "import time; time.sleep(60)"


def test_a_node_without_ranks_is_a_failure(launch):
    """The agent ends well, all ranks that ran ended well: still one is missing."""
    run = launch("", env={"NO_RANKS_ON": "1"}).wait(30)
    assert [r["exit"] for r in run.ranks] == [0]
    assert run.status == "failed"
    assert run.first_failure["error"] == "only 1 of 2 ranks ever ran"


def test_kill_rank(launch):
    run = launch(SLEEP)
    assert started(run)
    began = time.monotonic()
    run.kill_rank(1)
    run.wait(30)
    assert time.monotonic() - began < 12
    assert run.status == "failed"
    assert run.first_failure == {"rank": 1, "node": "node1", "error": "was ended by SIGKILL"}
    with pytest.raises(RunError, match="rank 1 is not running"):
        run.kill_rank(1)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["keeper", "agent"])
def test_a_killed_keeper_or_agent_is_a_failure(launch, victim):
    run = launch(SLEEP)
    assert started(run)
    if victim == "keeper":
        run._signal("node1", run.ranks[1]["keeper"], signal.SIGKILL, group=False)
    else:
        run.agents["node1"].signal(signal.SIGKILL)
    run.wait(30)
    assert run.status == "failed" and run.first_failure["node"] == "node1"
    assert run.first_failure["rank"] == 1


@pytest.mark.slow
@needs_virtual
@pytest.mark.parametrize("kind", ["virtual", "local"])
def test_kill_host_names_it_and_leaves_other_clusters_alone(tmp_path, kind, impatient):
    env, script = stand_in(tmp_path / "stand_in"), write(tmp_path / "s.py", COUNT)
    with cluster.start(kind, nodes=2) as one, cluster.start(kind, nodes=2) as other:
        dying = runs.launch(script, ["300", "0.1"], cluster=one, env=env, timeout=30,
                            run_dir=tmp_path / "dying")  # fmt: skip
        living = runs.launch(script, ["30", "0.1"], cluster=other, env=env, timeout=30,
                             run_dir=tmp_path / "living")  # fmt: skip
        assert started(dying) and started(living)
        began = time.monotonic()
        dying.kill_host(1)
        dying.wait(30)
        assert time.monotonic() - began < 12
        assert dying.status == "failed"
        first = dying.first_failure
        assert (first["rank"], first["node"]) == (1, "node1"), first
        assert first["error"] == "this host went down"
        assert living.wait(30).status == "succeeded"
        assert len(living.metrics()) == 60 and len({m["rank"] for m in living.metrics()}) == 2
        if kind == "virtual":  # same names, same addresses, no meeting
            assert dying.record()["nodes"] == living.record()["nodes"]


def test_a_peer_that_fails_because_a_host_went_down_is_not_named(tmp_path, hosts, impatient):
    """The survivor notices at once and says so; the host can say nothing any more."""
    env = stand_in(tmp_path / "stand_in")
    script = write(tmp_path / "s.py", """
import os, time
flag = os.path.join(os.environ["SCALELAB_RUN_DIR"], "down")
while os.environ["RANK"] == "1" or not os.path.exists(flag):
    time.sleep(0.01)
raise ConnectionError("closed by peer")
""")  # fmt: skip
    with cluster.start(hosts.kind, nodes=2) as own:
        run = runs.launch(script, cluster=own, env=env, timeout=30, run_dir=tmp_path / "run")
        assert started(run)
        run.kill_host(1)
        write(tmp_path / "run" / "down", "")
        run.wait(30)
    assert "closed by peer" in run.log(0)
    assert run.first_failure == {"rank": 1, "node": "node1", "error": "this host went down"}


# Stop, time, resume

def test_stop(launch):
    run = launch("""
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
print("ready")
time.sleep(60)
""")  # fmt: skip
    assert eventually(lambda: all("ready" in run.log(r) for r in (0, 1)))
    began = time.monotonic()
    assert run.stop() is run
    assert time.monotonic() - began < 5
    assert run.status == "stopped" and run.first_failure is None and run.done
    assert "told to end" in run.log(0) and "told to end" in run.log(1)
    assert runs.read_manifest(run.dir)["status"] == "stopped"
    assert run.stop().status == "stopped"  # once more is no harm


def test_stop_at_once(launch):
    assert launch(SLEEP).stop().status == "stopped"


def test_stop_after_the_end_changes_nothing(launch):
    run = launch("").wait(30)
    assert run.stop().status == "succeeded"


@pytest.mark.slow
def test_own_clock(launch):
    run = launch(SLEEP, timeout=2).wait(20)
    assert run.status == "timed_out" and 2 <= run.seconds < 8
    assert run.first_failure["error"].startswith("timed out after 2 s; still running: rank 0, 1")
    assert "script 0.py" in run.first_failure["error"]


def test_one_that_failed_before_the_others_hung_is_named(launch):
    run = launch("""
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("the cause")
time.sleep(60)
""", timeout=3).wait(20)  # fmt: skip
    assert run.first_failure["rank"] == 1
    assert run.first_failure["error"].endswith("ValueError: the cause")


SAVES = """
import os, sys
path = os.path.join(os.environ["SCALELAB_RUN_DIR"], "count" + os.environ["RANK"])
count = int(open(path).read()) if os.path.exists(path) else 0
open(path, "w").write(str(count + 1))
print("from", count)
if count == 0 and "--fail-once" in sys.argv:
    sys.exit(5)
"""


def test_resume_goes_on_in_the_same_directory(launch, hosts):
    first = launch(SAVES, "--fail-once", node_env={1: {"ONE": "y"}}).wait(30)
    assert first.status == "failed"
    run = runs.resume(first.dir, cluster=hosts, timeout=30).wait(30)
    assert run.status == "succeeded" and run.dir == first.dir and run.id == first.id
    assert run.log(0) == "from 0\nfrom 1\n"
    manifest = runs.read_manifest(run.dir)
    assert manifest["attempt"] == 2 and manifest["args"] == ["--fail-once"]
    assert manifest["node_env"] == {"1": {"ONE": "y"}}
    assert manifest["status"] == "succeeded" and manifest["first_failure"] is None


def test_resume_needs_a_run(tmp_path, hosts):
    for manifest in (None, "[1]", '{"run": "x"}', "not json"):
        if manifest:
            write(tmp_path / "manifest.json", manifest)
        with pytest.raises(RunError, match="not the directory of a run"):
            runs.resume(tmp_path, cluster=hosts)


def test_a_run_that_goes_on_is_not_resumed_and_one_whose_launcher_died_is_lost(launch, hosts):
    run = launch("import time; time.sleep(30)")
    with pytest.raises(UsageError, match="still going on"):
        runs.resume(run.dir, cluster=hosts)
    run.stop()
    manifest = runs.read_manifest(run.dir)
    assert manifest["status"] == "stopped"
    manifest.update(status="running", client="1:1:")
    record.write_json(run.dir / "manifest.json", manifest)
    assert runs.read_manifest(run.dir)["status"] == "lost"


def test_numbers_among_the_arguments_are_fine(launch):
    run = launch("import sys; print(sys.argv[1:])", "--steps", 5, "--seed", "²").wait(30)
    assert run.log(0) == "['--steps', '5', '--seed', '²']\n" and run.status == "succeeded"


def test_odd_metrics_do_not_end_a_good_run(launch):
    run = launch("""
import os
lines = ['{"step": 1, "rank": 0}', '{"step": "a"}', '{"step": 2, "loss": "low"}', "[1]", ""]
open(os.environ["SCALELAB_METRICS"], "a").write(chr(10).join(lines))
""").wait(30)  # fmt: skip
    assert run.status == "succeeded" and "step 1" in run.words()
    assert {m["step"] for m in run.metrics()} == {1}


def test_a_closed_cluster_is_told_from_a_host_that_went_down(tmp_path):
    with cluster.start("local", nodes=1) as c:
        script = write(tmp_path / "s.py", "import time; time.sleep(60)")
        run = runs.launch(script, cluster=c, env=stand_in(tmp_path), run_dir=tmp_path / "run")
        assert eventually(lambda: run.ranks)
    assert run.wait(20).status == "failed"
    assert run.first_failure["error"] == "the cluster was closed"


# What launch refuses, in one line, before anything is started

@pytest.mark.parametrize(
    "change, words",
    [
        ({"nproc_per_node": 0}, "ranks a node 0"),
        ({"nproc_per_node": True}, "ranks a node True"),
        ({"nproc_per_node": 1.5}, "ranks a node 1.5"),
        ({"nproc_per_node": 2000}, "1 to 1024"),
        ({"timeout": 0}, "timeout 0"),
        ({"timeout": -1}, "timeout -1"),
        ({"timeout": float("nan")}, "timeout nan"),
        ({"node_env": {2: {}}}, "nodes 0 to 1"),
        ({"node_env": {-1: {}}}, "nodes 0 to 1"),
        ({"timeout": "5"}, "timeout '5'"),
        ({"script": "no such.py"}, "no such file"),
        ({"script": "."}, "is a directory"),
        ({"args": "--steps 5"}, "['--steps', '5']"),
        ({"env": {"A": 1}}, "'A'=1"),
        ({"env": {"SCALELAB_NODE": "x"}}, "taken"),
        ({"run_dir": __file__}, "run directory"),
    ],
)
def test_launch_refuses(change, words, tmp_path, clusters):
    hosts = clusters("local")
    script = change.pop("script", None) or write(tmp_path / "s.py", "")
    change.setdefault("run_dir", tmp_path / "run")
    with pytest.raises(UsageError) as refused:
        runs.launch(script, cluster=hosts, **change)
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "run" / "manifest.json").exists()


def test_a_directory_takes_one_run(launch):
    run = launch("").wait(30)
    with pytest.raises(UsageError, match="holds a run already"):
        launch("", run_dir=run.dir)


def test_default_directory(launch, tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "home"))
    run = launch("", run_dir=None).wait(30)
    assert run.dir == tmp_path / "home" / "runs" / run.id


# The keeper by itself

@pytest.fixture
def keep(tmp_path):
    """Runs a script under the keeper; returns (its exit code, its reports, the log)."""

    def run(text: str, **kw):
        for sub in ("logs", "metrics"):
            (tmp_path / sub).mkdir(exist_ok=True)
        env = {
            **os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "SCALELAB_NODE": "node0",
            "SCALELAB_RUN_DIR": str(tmp_path),
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, rank.__file__, str(write(tmp_path / "s.py", text)), "an arg"],
            env=env, stderr=subprocess.PIPE, timeout=30, **kw,
        )  # fmt: skip
        marked = [line for line in done.stderr.decode().split("\n") if line.startswith(rank.MARK)]
        reports = [json.loads(line[len(rank.MARK) :]) for line in marked]
        return done.returncode, reports, (tmp_path / "logs" / "rank0.log").read_text()

    return run


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_keeper_passes_the_exit_code_on(keep, code):
    got, reports, _ = keep(f"raise SystemExit({code})")
    assert got == code
    assert [r["event"] for r in reports] == ["start", "exit"] and reports[1]["code"] == code


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_keeper_passes_the_signal_on(keep, sig, tmp_path):
    import resource

    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    got, reports, _ = keep(
        f"import os; os.kill(os.getpid(), {int(sig)})", cwd=tmp_path,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
    )  # fmt: skip
    assert got == -sig and reports[1]["code"] == -sig
    assert not list(tmp_path.glob("core*"))


def test_keeper_shows_the_script_its_own_arguments_and_files(keep, tmp_path):
    _, reports, log = keep("import sys, os; print(sys.argv[1:], os.environ['SCALELAB_METRICS'])")
    assert log == f"['an arg'] {tmp_path}/metrics/rank0.jsonl\n"
    assert reports[0]["addr"] == "127.0.0.1" and reports[0]["pid"] != reports[0]["keeper"]


def test_keeper_does_not_wait_for_a_helper_that_holds_the_pipe(keep):
    began = time.monotonic()
    _, _, log = keep("import subprocess; p = subprocess.Popen(['sleep', '5']); print(p.pid)")
    assert time.monotonic() - began < 4
    os.kill(int(log), signal.SIGKILL)


def test_keeper_does_not_wait_for_a_helper_that_goes_on_printing(keep):
    began = time.monotonic()
    keep("""
import subprocess, sys
subprocess.Popen([sys.executable, "-uc", "import time" + chr(10) +
                  "for _ in range(120): print(1); time.sleep(0.05)"])
""")
    assert time.monotonic() - began < 5


def test_log_keeps_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "HEAD_BYTES", 1000)
    monkeypatch.setattr(rank, "TAIL_BYTES", 500)
    log = rank.Log(str(tmp_path / "log"))
    for i in range(100):
        log.add(b"%099d\n" % i)
    log.close()
    text = (tmp_path / "log").read_text()
    kept = [int(line) for line in text.splitlines() if line.isdigit()]
    assert kept == [*range(10), *range(95, 100)]
    assert "… 8,500 bytes of output not kept …" in text


def test_log_of_moderate_length_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rank, "HEAD_BYTES", 1000)
    log = rank.Log(str(tmp_path / "log"))
    for i in range(100):
        log.add(b"%099d\n" % i)
    log.close()
    assert (tmp_path / "log").read_text() == "".join(f"{i:099d}\n" for i in range(100))


# Real torchrun, the real training script

PROBED = """
import json, os, runpy, socket, sys
print(json.dumps([socket.gethostname(), os.environ.get("EVERY"), os.environ.get("ONE")]))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module", params=["local", pytest.param("virtual", marks=needs_virtual)])
def trained(request, tmp_path_factory, clusters):
    """One run a kind, looked at by the tests below."""
    folder = tmp_path_factory.mktemp(f"trained-{request.param}")
    mark = uuid.uuid4().hex
    run = runs.launch(
        write(folder / "probed.py", PROBED),
        [str(TRAIN), "--steps", "3", "--batch-size", "4", "--block-size", "16", "--width", "32"],
        cluster=clusters(request.param), timeout=90, run_dir=folder / "run",
        env={"EVERY": "x", MARK: mark}, node_env={1: {"ONE": "y"}},
    )  # fmt: skip
    try:
        run.wait(100)
    finally:
        run.stop()
    assert run.status == "succeeded", (run.words(), run.logs())
    assert all_gone(mark, name=MARK)
    return run


def separate(run) -> bool:
    """Proof of more than one host, by what the ranks found out themselves."""
    names, addresses = ({r[key] for r in run.ranks} for key in ("hostname", "addr"))
    said = {json.loads(run.log(r["rank"]).splitlines()[0])[0] for r in run.ranks}
    return len(names) == len(addresses) == len(said) == run.world_size == 2


@slow
def test_two_hosts_are_proven_by_names_and_addresses(trained):
    virtual = trained.cluster.kind == "virtual"
    assert separate(trained) is virtual  # on local it must fail
    manifest = runs.read_manifest(trained.dir)
    assert manifest["separate_hosts"] is virtual
    assert {r["addr"] for r in manifest["ranks"]} == (
        {"10.77.0.1", "10.77.0.2"} if virtual else {"127.0.0.1"}
    )
    assert trained.world_size == 2


@slow
def test_metrics_of_real_training(trained):
    lines = trained.metrics()
    assert [(m["step"], m["rank"]) for m in lines] == [(s, r) for s in (1, 2, 3) for r in (0, 1)]
    for line in lines:
        assert isinstance(line["loss"], float) and 0 < line["loss"] < 20
        assert line["tokens"] == 4 * 16
        assert trained.manifest["began"] < line["time"] < trained.manifest["ended"]
        assert list(line["seconds"]) == PHASES
        for phase, seconds in line["seconds"].items():
            assert seconds is None and phase == "communication" or seconds >= 0
    text = (trained.dir / "metrics.jsonl").read_text()
    assert [json.loads(line) for line in text.splitlines()] == lines


@slow
def test_environment_reaches_the_right_ranks_under_torchrun(trained):
    for entry in trained.ranks:
        _, every, one = json.loads(trained.log(entry["rank"]).splitlines()[0])
        assert every == "x" and one == ("y" if entry["node"] == "node1" else None)


@slow
def test_record_has_the_same_shape_on_every_kind(trained):
    seen = trained.record()
    assert seen["status"] == "succeeded" and seen["cluster"] == trained.cluster.kind
    assert [r["exit"] for r in seen["ranks"]] == [0, 0]
    assert [n["name"] for n in seen["nodes"]] == ["node0", "node1"]
    shape = {k: type(v).__name__ for k, v in seen.items()}
    assert shape == {
        "run": "str", "dir": "str", "cluster": "str", "status": "str", "world_size": "int",
        "nodes": "list", "ranks": "list", "first_failure": "NoneType", "seconds": "float",
        "metrics": "str",
    }  # fmt: skip
    json.dumps(seen)


JOINED = """
import os, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
while True:
    dist.all_reduce(torch.ones(1))
    open(os.path.join(os.environ["SCALELAB_RUN_DIR"], "joined"), "a").close()
    time.sleep(0.01)
"""


@slow
@needs_virtual
@pytest.mark.parametrize("what", ["rank", "host"])
def test_the_killed_one_is_named_under_real_torchrun(tmp_path, what):
    """Its peers fail in their collective, with words of their own; they are not the cause."""
    mark = uuid.uuid4().hex
    script = write(tmp_path / "joined.py", JOINED)
    with cluster.start("virtual", nodes=2) as hosts:
        run = runs.launch(script, cluster=hosts, timeout=90, run_dir=tmp_path / "run",
                          env={MARK: mark})  # fmt: skip
        assert eventually((tmp_path / "run" / "joined").exists, 60)
        assert len(running(mark, MARK)) >= 6  # two agents, keepers and ranks
        began = time.monotonic()
        victim = next(r for r in run.ranks if r["node"] == "node1")
        run.kill_rank(victim["rank"]) if what == "rank" else run.kill_host(1)
        run.wait(40)
        assert time.monotonic() - began < 20
        assert run.status == "failed"
        first = run.first_failure
        assert (first["rank"], first["node"]) == (victim["rank"], "node1"), first
        expected = "was ended by SIGKILL" if what == "rank" else "this host went down"
        assert first["error"].startswith(expected)
        assert all(r["exit"] for r in run.ranks)
    assert all_gone(mark, name=MARK)


@slow
@needs_virtual
def test_two_runs_at_once_in_two_clusters(tmp_path):
    """Same names, same addresses, their own ranks."""
    script = write(tmp_path / "who.py", WHO)
    with cluster.start("virtual", nodes=1) as one, cluster.start("virtual", nodes=1) as other:
        both = [
            runs.launch(script, cluster=c, timeout=60, run_dir=tmp_path / name, env={"EVERY": name})
            for c, name in ((one, "one"), (other, "other"))
        ]
        assert [run.wait(70).status for run in both] == ["succeeded", "succeeded"]
    assert both[0].record()["nodes"] == both[1].record()["nodes"]
    assert both[0].ranks[0]["pid"] != both[1].ranks[0]["pid"]
    assert [json.loads(run.log(0))[1] for run in both] == ["one", "other"]
