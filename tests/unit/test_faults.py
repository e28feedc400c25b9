"""Every fault of the catalogue, for real: injected, the bare job shows the symptom in time; the
doctor (or the reader of launch lines) names it first; its cure lets the same job pass, and the
doctor has nothing more to say.

The stories of several faults run at the same time, each on a cluster of its own: a job that hangs
costs no processor.
"""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from outside import ORDINARY, ROOT, cannot

from scalelab import cluster, doctor
from scalelab.cluster import UsageError
from scalelab.doctor.launch import read_launch
from scalelab.drills import FAULTS, Lab, by_id
from scalelab.drills import fault as bench
from scalelab.drills.fault import finished

NO_VIRTUAL = cluster.virtual_problem()
needs_virtual = pytest.mark.skipif(bool(NO_VIRTUAL), reason=NO_VIRTUAL or "-")
INCIDENTS = ROOT.parent / "shared" / "facts" / "incidents.json"
AT_ONCE = 4  # stories
PATIENCE = 120.0  # seconds that anything may take on a machine that has other work
# Of the incidents that belong here, what is no fault of a cluster or of its launch lines: lesson
# 03 and lesson 08 have padding and the global batch.
ELSEWHERE = {"DAT02", "DAT07"}
examining = threading.Lock()  # a doctor beside a doctor would measure the other one's bursts


# The stories


def tell(fault) -> dict:
    """What happened, from the healthy cluster to the cured one."""
    told = {}
    with Lab(fault) as lab:
        lab.inject()
        with lab.run(timeout=PATIENCE + 10) as run:
            told["symptom"], told["after"] = lab.watch(run, PATIENCE), run.seconds
            told["broken"] = run.table(12)
        told["named"] = look(lab)
        lab.cure()
        with lab.run(timeout=PATIENCE) as run:
            run.wait(PATIENCE)
            told["symptom when cured"] = fault.symptom(run)
            told["passes"], told["cured"] = finished(run), run.table(12)
        told["left"] = look(lab)
    return told


def look(lab) -> list[dict]:
    """What is wrong, worst first: {"name", "status", "node", "detail", "fix"}."""
    if not lab.fault.named:
        return []
    if lab.fault.by == "launch":
        return read(lab)
    with examining:
        report = doctor.examine(lab.cluster, without=["matmul"], **lab.asks())
    return bad(report.json()["checks"])


def read(lab) -> list[dict]:
    """The same of the launch lines alone."""
    names = {n.index: n.name for n in lab.cluster.nodes}
    text = "".join(f"# {names[i]}\n{line}\n" for i, line in lab.lines().items())
    return bad(read_launch(text, str(lab.dir))["checks"])


def bad(found) -> list[dict]:
    return [f for f in found if f["status"] in ("fail", "warn")]


@pytest.fixture(scope="module")
def stories(request):
    """story(id): what was told. All that this session will ask for are begun at once."""
    wanted = [
        item.callspec.params["fault"] for item in request.session.items
        if getattr(item, "callspec", None) and item.function.__name__ == "test_fault"
    ]  # fmt: skip
    # the ones that wait longest first
    wanted.sort(key=lambda f: f.symptom is not bench.silent)
    pool = ThreadPoolExecutor(AT_ONCE)
    begun = {f.id: pool.submit(tell, f) for f in wanted if not f.unless()}
    yield lambda fault: begun[fault.id].result(timeout=600)
    pool.shutdown(cancel_futures=True)


@needs_virtual
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_fault(stories, fault):
    if fault.unless():
        pytest.skip(fault.unless())
    told = stories(fault)
    print(json.dumps({k: v for k, v in told.items() if k not in ("broken", "cured")}, indent=1))
    assert told["symptom"], f"no symptom:\n{told['broken']}"
    assert told["after"] < PATIENCE
    if fault.named:
        assert told["named"], "nothing is found"
        first = told["named"][0]
        assert first["name"] == fault.named, told["named"]
        assert first["fix"] and "\n" not in first["detail"] + first["fix"]
        if fault.node:
            assert fault.node in (first["node"] or ""), first
    assert told["symptom when cured"] is None, told["cured"]
    assert told["passes"], told["cured"]
    assert {f["name"] for f in told["left"]} == ({fault.named} if fault.stays else set())


# Permission needs a user whom it is refused to: root is not


@needs_virtual
@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="test_fault has it as this user")
def test_another_uid_as_an_ordinary_user(tmp_path):
    if reason := cannot(ORDINARY):
        pytest.skip(reason)
    code = (
        "import json, sys; sys.path[:0] = sys.argv[1:3]\n"
        "import test_faults as t\n"
        "print(json.dumps(t.tell(t.by_id('another-uid'))))"
    )
    tmp_path.chmod(0o777)
    done = subprocess.run(
        [*ORDINARY, sys.executable, "-c", code, str(ROOT), str(ROOT / "tests" / "unit")],
        env={**os.environ, "SCALELAB_HOME": str(tmp_path / "home"), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=180, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert "Permission denied" in told["symptom"], told
    assert told["named"][0]["name"] == "shared directory", told["named"]
    assert told["passes"] and told["left"] == [], told


# The catalogue itself


def test_ids_are_unique_and_found():
    ids = [f.id for f in FAULTS]
    assert len(ids) == len(set(ids))
    assert by_id(ids[-1]) is FAULTS[-1]
    with pytest.raises(UsageError, match="name-is-loopback"):
        by_id("no-such-fault")


def test_all_five_pits():
    pits = ["storage", "network", "environment", "launch", "checkpoint"]
    assert list(dict.fromkeys(f.pit for f in FAULTS)) == pits


@pytest.mark.skipif(not INCIDENTS.exists(), reason="needs the collection of incidents")
def test_every_incident_that_belongs_here():
    wanted = {
        i["id"] for i in json.loads(INCIDENTS.read_text())["incidents"]
        if i["category"] in ("network", "rendezvous", "storage", "data")
        and i["cpu_reproducible"] != "no"
    }  # fmt: skip
    here = {i for f in FAULTS for i in f.incidents}
    assert wanted - ELSEWHERE <= here
    assert ELSEWHERE <= wanted and not ELSEWHERE & here


def test_named_by_a_check_that_exists():
    from scalelab.doctor.checks import CHECKS
    from scalelab.doctor.launch.judge import ORDER

    for fault in FAULTS:
        names = ORDER if fault.by == "launch" else [c.name for c in CHECKS]
        assert fault.named in names or fault.pit == "checkpoint", fault.id


# Symptoms are not seen where they are not: on what a healthy job prints, and before its time


class Printed:
    """A run that has printed this, a (node, seconds, line) each."""

    def __init__(self, said, seconds, exits=(None, None)):
        self.said, self.seconds = said, seconds
        self.exits = dict(enumerate(exits))
        self.lines, self.cluster = dict.fromkeys(self.exits, ""), self

    running = property(lambda self: None in self.exits.values())

    def stamped(self, index):
        return [(at, line) for i, at, line in self.said if i == index]

    def node(self, index):
        return type("Node", (), {"name": f"node{index}"})

    def output(self, index):
        return "\n".join(line for _, line in self.stamped(index))


HEALTHY = [
    (rank, at, f"rank {rank}: {line}")
    for rank in (0, 1)
    for at, line in [
        (3.0, f"started on node{rank}, 1 threads, torch 2.13.0+cpu, CPU AVX2"),
        (3.1, "joined, 2 ranks"), (3.1, "small all-reduce ok, 2 ranks, 0.7 ms"),
        (3.2, "large all-reduce ok, bus bandwidth 110.5 MB/s"),
        (3.2, f"sees 8 files and reads 4: part-{rank}.txt part-{rank + 2}.txt part-{rank + 4}.txt"),
        (3.2, "all ranks together have read 8 files"),
        (3.3, f"epoch 0 begins with samples {rank} 4 7"),
        (3.3, f"epoch 1 begins with samples {rank} 9 2"),
        (3.3, "begins at step 0"), (4.5, "lost at step 12"), (6.5, "begins at step 12"),
        (6.9, "ended at step 15"), (7.0, "done"),
    ]
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.id)
def test_no_symptom_in_a_healthy_job(fault):
    for upto in (0, 2.0, 3.05, 3.15, 4.0, 8.0):
        said = [s for s in HEALTHY if s[1] <= upto]
        over = (0, 0) if upto > 7 else (None, None)
        assert fault.symptom(Printed(said, upto, over)) is None, (fault.id, upto)


def test_silence_has_to_last():
    assert bench.silent(Printed([], bench.SILENT - 1)) is None
    assert bench.silent(Printed([], bench.SILENT + 1))
    assert bench.silent(Printed([(1, 5.0, "a warning of torchrun")], bench.SILENT + 1))
    assert bench.silent(Printed(HEALTHY[:1], bench.SILENT + 1)) is None
    assert bench.silent(Printed([], bench.SILENT + 1, (1, 1))) is None  # it has given up


def test_stalled_is_between_two_stages():
    joined = [(r, 3.0, f"rank {r}: joined, 2 ranks") for r in (0, 1)]
    late = 3 + bench.STALLED + 1

    def seen(said, seconds):
        return bench.stalled(Printed(said, seconds), "joined", "small all-reduce ok")

    assert seen(joined, late) and "joined" in seen(joined, late)
    assert seen(joined, 5) is None
    assert seen(joined[:1], late) is None
    assert seen([*joined, (0, 4.0, "rank 0: small all-reduce ok")], late) is None


@needs_virtual
@pytest.mark.slow
def test_a_lab_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    with Lab(by_id("port-taken")) as lab:
        began = time.monotonic()
        lab.inject()
        assert time.monotonic() - began < 20 and lab.held
        assert sorted(p.name for p in lab.data.iterdir())[-1] == "part-7.txt"
    assert list(tmp_path.iterdir()) == [] and lab.cluster.closed
    with pytest.raises(UsageError):
        Lab(bench.Fault(id="x", title="", pit="", inject=None, cure=None, lines=None, symptom=None,
                        named="", cluster={"rate": "fast"}))  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@needs_virtual
def test_a_script_is_spoiled_in_one_place_only(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    with Lab(by_id("set-epoch-forgotten")) as lab:
        lab.inject()
        assert "set_epoch" not in (lab.dir / "spoiled.py").read_text()
        for old in ("import", "no such words"):
            with pytest.raises(ValueError):
                lab.script(old, "")
        with pytest.raises(RuntimeError, match="node1"):
            lab.admin(1, "echo so >&2; exit 3")


# Two at once


TWO = [
    ("name-is-loopback", "only-rendezvous-port"),
    ("name-unknown", "data-on-one-host"),
    ("wrong-interface", "slow-link"),
    ("mtu-black-hole", "checkpoint-on-own-disk"),
    ("rendezvous-port-closed", "small-shm"),
    ("endpoint-alias", "another-setting"),
    ("behind-a-bridge", "only-rendezvous-port"),
    ("port-taken", "another-version"),
]


@needs_virtual
@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), TWO, ids=" and ".join)
def test_two_faults_at_once_are_both_named(one, other):
    faults = by_id(one), by_id(other)
    for reason in filter(None, (f.unless() for f in faults)):
        pytest.skip(reason)
    settings, env = {}, {}
    for fault in faults:
        settings |= {k: v for k, v in fault.cluster.items() if k != "env"}
        for index, variables in fault.cluster.get("env", {}).items():
            env[index] = env.get(index, {}) | variables
    with cluster.start("virtual", 2, env=env, **settings) as hosts, ExitStack() as stack:
        labs = [stack.enter_context(bench.Lab(fault, cluster=hosts)) for fault in faults]
        asks = {}
        for lab in labs:
            lab.inject()
            asks |= lab.asks()
        report = doctor.examine(hosts, **asks)
    bad = [f.name for f in report.findings if f.status in ("fail", "warn")]
    assert {f.named for f in faults} == set(bad), report.table()
