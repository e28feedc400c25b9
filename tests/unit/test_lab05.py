"""What lab 05's judges rest on: every trouble breaks the bare job, and the solutions pass."""

import contextlib
import pickle
import sys
import time
from pathlib import Path

import cloudpickle
import nbformat
import pytest

from scalelab import cluster, doctor, grading
from scalelab.cluster.firewall import find_nft
from scalelab.grading.bench import Answer, Bench
from scalelab.grading.labs.lab05 import (
    lines,
    mending,
    names,
    opening,
    own_check,
    parts,
    practice,
    storage,
)
from scalelab.grading.verdict import Stub, Wrong
from scalelab.runs.lines import LinesRun

ROOT = Path(__file__).resolve().parents[2]
slow = pytest.mark.slow
needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=f"emulated hosts: {cluster.virtual_problem()}"
)
needs_nft = pytest.mark.skipif(not find_nft(), reason="nft is missing")
SILENT = 25.0  # seconds; a healthy job is done after 4 on an idle machine


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "home"))


def solutions():
    """The functions of the solved lab, by the exercise that they are handed in for."""
    space, found = {}, {}
    for cell in nbformat.read(ROOT / "solutions" / "05.ipynb", as_version=4).cells:
        if cell.cell_type == "code" and cell.source.startswith("grading.check"):
            exercise, name = cell.source.split('"')[1], cell.source.split(", ")[1].rstrip(")")
            found[exercise] = space[name]
        elif cell.cell_type == "code" and "broken_cluster" not in cell.source:
            exec(compile(cell.source, "lab 05", "exec"), space)
    return found


def sent(function):
    return Answer(cloudpickle.dumps(function))


def stub(*args):
    raise NotImplementedError("your turn")


# Each trouble, as the bare job shows it


def what_a_job_shows(b, args=""):
    """ "passes", "error" (some line has ended with one) or "silent"; and what was printed."""
    at_most = max(SILENT, 3 * what_a_job_shows.healthy)
    with LinesRun(b.cluster, parts.lines_of(b.cluster, args), timeout=120, cwd=str(b.folder)) as r:
        until = time.monotonic() + at_most
        while time.monotonic() < until and not r.wait(0.2):
            if any(code for code in r.exits.values()):
                return "error", [r.output(0), r.output(1)]
        said = [r.output(0), r.output(1)]
        if r.running:
            return "silent", said
        return ("error" if any(r.exits.values()) else "passes"), said


what_a_job_shows.healthy = 0.0  # seconds

SHOWN = {
    "loopback": "error", "unknown": "error or silent", "stale": "silent or error",
    "no such nic": "error", "lo": "error", "mtu": "silent", "missing": "error",
    "fewer": "passes", "order": "passes", "own disk": "error", "read-only": "error",
}  # fmt: skip


@slow
@needs_virtual
@pytest.mark.parametrize("family", [names.FAMILY, storage.FAMILY], ids=["names", "storage"])
def test_every_trouble_breaks_the_bare_job_and_a_healthy_cluster_does_not(family):
    with mending.bed(family) as b:
        family.settle(b)
        assert family.broken(b) == family.harm(b, "") == ""
        what_a_job_shows.healthy, began = 60.0, time.monotonic()
        shown, said = what_a_job_shows(b, family.args)
        assert shown == "passes" and not family.said(said), said
        what_a_job_shows.healthy = time.monotonic() - began
        for trouble, host in family.drawn():
            family.settle(b)
            trouble.inject(b, host)
            assert family.broken(b), trouble.id
            shown, said = what_a_job_shows(b, family.args)
            assert shown in SHOWN[trouble.id], (trouble.id, host, shown, said)
            if shown == "passes":  # quiet: no error, but not all files, or some twice
                assert family.said(said), (trouble.id, host, said)


@slow
@needs_virtual
@needs_nft
def test_the_firewall_as_it_is_stops_the_job():
    p = practice.broken("05.3")
    try:
        shown = p.job(SILENT)
        assert shown.count("still running") == 2 and "joined" not in shown, shown
    finally:
        p.close()


@slow
@needs_virtual
def test_a_broken_cluster_to_practise_on_is_ended_by_the_next_one():
    first = practice.broken("05.4")
    assert first.folder.exists() and first.cluster.node(1).sh("hostname").stdout == "node1\n"
    second = practice.broken("05.2")
    assert first.cluster.closed and not first.folder.exists()
    second.close()
    with pytest.raises(KeyError, match="05.2, 05.3, 05.4"):
        practice.broken("05.1")


# The solutions, and others that are as good


@slow
@needs_virtual
@needs_nft
@pytest.mark.parametrize("exercise", ["05.1", "05.2", "05.3", "05.4", "05.5"])
def test_the_solution_passes(exercise):
    verdict = grading.check(exercise, solutions()[exercise])
    assert verdict.passed, verdict.message


def by_the_doctor(cluster):
    """Does what the doctor says first, on every host of which it says so."""
    report = doctor.examine(cluster)
    if report.first is None:
        return None
    if report.first.name == "mtu":
        for node in cluster.nodes:
            code = (
                "import pyroute2\nwith pyroute2.IPRoute() as ip:\n"
                "    ip.link('set', index=ip.link_lookup(ifname='eth0')[0], mtu=1500)"
            )
            assert node.sh(f'{sys.executable} -c "{code}"').returncode == 0
        return "network"
    named = {f.node for f in report.findings if f.status == "fail" and f.name == report.first.name}
    nodes = [n for n in cluster.nodes if n.name in named]
    for node in nodes:
        if report.first.name == "interface":
            node.env["GLOO_SOCKET_IFNAME"] = "eth0"
            continue
        right = {n.name: n.addr for n in cluster.nodes}
        old = node.sh("cat /etc/hosts").stdout.splitlines()
        kept = [line for line in old if not set(line.split()[1:]) & set(right)]
        node.set_hosts("\n".join(kept + [f"{a} {n}" for n, a in right.items()]) + "\n")
    return "all" if len(nodes) == len(cluster.nodes) else nodes[0].name


@slow
@needs_virtual
def test_doing_what_the_doctor_says_mends_every_cluster_that_does_not_come_together():
    verdict = grading.check("05.2", by_the_doctor)
    assert verdict.passed, verdict.message


def with_node_ranks(hosts, ranks, port, job):
    rest = f"--master-addr={hosts[0]} --master-port={port} {job}"
    return {i: f"torchrun --nnodes {len(hosts)} --nproc_per_node {ranks} --node_rank {i} {rest}"
            for i in range(len(hosts))}  # fmt: skip


def test_other_right_lines_are_right():
    for hosts, ranks, port, job in lines.CASES:
        assert not lines.mistake(with_node_ranks(hosts, ranks, port, job), hosts, ranks, port, job)
        last = (f"OMP_NUM_THREADS=1 python -m torch.distributed.run --nnodes={len(hosts)}:"
                f"{len(hosts)} --nproc-per-node {ranks} --rdzv_backend c10d --rdzv_endpoint "
                f"{hosts[-1]}:{port} {job}")  # fmt: skip
        given = dict.fromkeys(range(len(hosts)), last)
        assert not lines.mistake(given, hosts, ranks, port, job)


# Where this machine cannot


@pytest.fixture
def no_virtual(monkeypatch):
    def why(firewall=False):
        return "user namespaces are barred"

    for module in (parts, mending):
        monkeypatch.setattr(module.parts if module is mending else module, "why_not", why)


@slow
@pytest.mark.parametrize(
    "judge", [names.judge_names, storage.judge_storage, opening.judge_opening],
    ids=["names", "storage", "opening"],
)  # fmt: skip
def test_without_emulated_hosts_an_answer_is_not_passed_and_a_stub_is_a_stub(judge, no_virtual):
    with pytest.raises(Wrong, match="cannot be tried on this machine.*namespaces are barred"):
        judge(Bench(), sent(lambda *args: None))
    with pytest.raises(Stub):
        judge(Bench(), sent(stub))


@slow
@pytest.mark.parametrize(
    "judge, exercise", [(lines.judge_lines, "05.1"), (own_check.judge_own_check, "05.5")]
)
def test_without_emulated_hosts_the_others_are_tried_on_this_machine(judge, exercise, no_virtual):
    assert "this machine" in judge(Bench(), sent(solutions()[exercise]))


# What an answer may do


def test_an_answer_that_does_not_return_is_ended_even_if_it_catches_everything(monkeypatch):
    monkeypatch.setattr(parts, "CALL_SECONDS", 0.3)

    def deaf():
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.05)

    began = time.monotonic()
    with pytest.raises(Wrong, match=r"^here: your function had not returned after 0.3 s"):
        parts.call(deaf, where="here")
    assert time.monotonic() - began < 3
    with pytest.raises(NotImplementedError):
        parts.call(stub, where="here")


def test_made_up_hosts_tell_what_posix_tells(tmp_path):
    plenty, *_ = own_check._made_up(tmp_path)
    row = plenty.sh(f"df -P -k -- '{own_check.FOLDER}' | tail -1").stdout.split()
    assert int(row[3]) == 700_000_000 and int(row[1]) > int(row[2]) + int(row[3])
    assert plenty.sh("df -Pk /elsewhere").returncode == 1
    assert pickle.loads(pickle.dumps(own_check.HOSTS)) == own_check.HOSTS
