"""Faults of hosts injected into emulated ones: doctor names each first, and nothing without."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scalelab import cluster, doctor
from scalelab.cluster import virtual_problem
from scalelab.doctor.shared_ops import PREFIX

PROBLEM = virtual_problem()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(PROBLEM), reason=f"no emulated hosts here: {PROBLEM}"),
]
MINE = {"shared directory", "data", "environment", "shared memory", "limits", "threads",
        "leftovers", "stuck processes", "reboot", "gpu", "matmul"}  # fmt: skip
PY = sys.executable


@pytest.fixture(scope="module")
def three():
    with cluster.start("virtual", nodes=3) as c:
        yield c


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Pairs of hosts have tests of their own, and are slow to measure on a busy machine."""
    monkeypatch.setattr("scalelab.doctor.exchange.measure", lambda *_, **__: None)


@pytest.fixture
def folder(tmp_path):
    for i in range(8):
        (tmp_path / f"part-{i}").write_text(str(i) * 100)
    yield str(tmp_path)
    left = [p.name for p in tmp_path.rglob("*") if p.name.startswith(PREFIX)]
    assert left == [], "files of the doctor's were left"


def examined(c, **options):
    """(the first finding of these checks that is bad, all of theirs that are)"""
    # importing torch on every host each time would take most of these tests' time
    report = doctor.examine(c, without=["matmul"], **options)
    assert report.seen.broken == []
    bad = [f for f in report.findings if f.name in MINE and f.status in ("fail", "warn")]
    return (bad[0] if bad else None), bad


def named(c, name, node, words, status="fail", **options):
    first, bad = examined(c, **options)
    assert first and (first.name, first.node, first.status) == (name, node, status), bad
    assert words in first.detail, first.detail
    assert {f.node for f in bad} == {node}, bad  # no healthy host is blamed
    return bad


def fine(c, **options):
    assert examined(c, **options) == (None, [])


def test_healthy_hosts_are_not_warned_of(three, folder):
    fine(three, shared=[folder], data=[folder], nproc=2)


@pytest.mark.parametrize("mode, words", [("missing", "does not exist"), ("private", "no file")])
def test_data_only_elsewhere(three, folder, mode, words):
    three.node(1).set_dir(folder, mode)
    try:
        named(three, "data", "node1", words, data=[folder])
    finally:
        three.node(1).set_dir(folder, "shared")


def test_fewer_files_and_another_order(three, folder):
    node, copy = three.node(2), f"mkdir /dev/shm/held; cp {folder}/* /dev/shm/held"
    assert node.sh(copy).returncode == 0
    node.set_dir(folder, "private")
    try:
        assert node.sh(f"cp /dev/shm/held/part-[0-5] {folder}").returncode == 0
        bad = named(three, "data", "node2", "6 files", data=[folder])
        assert "part-6" in bad[0].detail
        # tmpfs lists what was made last first: made in this order, it is listed in another
        assert node.sh(f"cp /dev/shm/held/part-[67] {folder}").returncode == 0
        named(three, "data", "node2", "another order", status="warn", data=[folder])
    finally:
        node.set_dir(folder, "shared")
        node.sh("rm -r /dev/shm/held")


@pytest.mark.parametrize(
    "mode, words",
    [("private", "not one directory"), ("missing", "does not exist"), ("readonly", "read-only")],
)
def test_a_shared_directory_that_is_not(three, folder, mode, words):
    three.node(1).set_dir(folder, mode)
    try:
        named(three, "shared directory", "node1", words, shared=[folder])
    finally:
        three.node(1).set_dir(folder, "shared")


def test_shared_memory_of_8_megabytes(three):
    node = three.node(1)
    assert node.sh("mount -t tmpfs -o size=8m,mode=1777 none /dev/shm").returncode == 0
    try:
        named(three, "shared memory", "node1", "8 MiB free of 8 MiB")
    finally:
        assert node.sh("umount /dev/shm").returncode == 0


def test_a_setting_on_one_host(three):
    env = {2: {"ATEN_CPU_CAPABILITY": "default"}}
    named(three, "environment", "node2", "cpu capability default", status="warn", node_env=env)


def test_a_package_of_another_version_on_one_host(three, tmp_path):
    from importlib.metadata import version

    (tmp_path / "numpy-0.1.dist-info").mkdir()
    env = {1: {"PYTHONPATH": str(tmp_path)}}
    words = f"numpy 0.1, others {version('numpy')}"
    named(three, "environment", "node1", words, status="warn", node_env=env)


def test_a_rank_left_over(three):
    code = "import os, time; os.setsid(); time.sleep(50)"
    env = "RANK=1 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=none"
    node = three.node(1)
    assert node.sh(f"{env} {PY} -c '{code}' </dev/null >/dev/null 2>&1 &").returncode == 0
    time.sleep(0.5)
    try:
        bad = named(three, "leftovers", "node1", "rank 1", status="warn")
        assert node.sh(bad[0].fix).returncode == 0  # the fix, as it is printed
    finally:
        node.end_all()


HANG = """
import ctypes, os, time
device = os.open("/dev/fuse", os.O_RDWR)  # and nobody will ever read from it
options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
libc = ctypes.CDLL(None, use_errno=True)
done = libc.mount(b"none", PATH.encode(), b"fuse", ctypes.c_ulong(6), options)
print("up" if done == 0 else os.strerror(ctypes.get_errno()), flush=True)
os.close(1), os.close(2)
time.sleep(0 if done else 100)
"""


def test_a_path_that_hangs(three, folder):
    node = three.node(1)
    code = HANG.replace("PATH", repr(folder))
    said = node.sh(f"{PY} - <<'CODE' &\n{code}\nCODE\nsleep 0.5").stdout.strip()
    try:
        if said != "up":
            pytest.skip(f"no file system to hang on here: {said or 'no /dev/fuse'}")
        assert node.sh(f"stat {folder} >/dev/null 2>&1 &").returncode == 0
        began = time.monotonic()
        bad = named(three, "shared directory", "node1", "does not answer", shared=[folder],
                    data=[folder])  # fmt: skip
        assert time.monotonic() - began < 20
        assert [f.name for f in bad] == ["shared directory", "stuck processes"]
        assert f"stat {folder}" in bad[1].detail  # the job's, not the doctor's own
    finally:
        node.end_all()  # with the server's end its mount is dead, and waits no more
        node.sh(f"umount -l {folder}")


def test_mended_hosts_are_not_warned_of(three, folder):
    """After all of the above: what mended each fault has cleared it for the doctor too."""
    fine(three, shared=[folder], data=[folder], nproc=2)


JAIL = str(Path(__file__).with_name("jail.py"))
AS_USER = """
import json, os, sys
from scalelab import cluster, doctor
with cluster.start("virtual", nodes=2) as c:
    for mode in (0o755, 0o555):
        os.chmod(sys.argv[1], mode)
        found = doctor.examine(c, shared=[sys.argv[1]]).json()["checks"]
        print(json.dumps([f for f in found if f["name"] in sys.argv[2].split(",")]))
"""


def test_an_ordinary_user_who_may_not_write(tmp_path, request):
    (tmp_path / "s").mkdir()
    env = {**os.environ, "PYTHONPATH": str(request.config.rootpath)}
    done = subprocess.run(
        [PY, JAIL, "user=1000", "--", PY, "-c", AS_USER, str(tmp_path / "s"), ",".join(MINE)],
        capture_output=True, text=True, timeout=120, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    allowed, barred = map(json.loads, done.stdout.splitlines())
    assert [f for f in allowed if f["status"] in ("fail", "warn")] == []
    bad = [f for f in barred if f["status"] in ("fail", "warn")]
    assert {f["node"] for f in bad} == {"node0", "node1"}
    assert all("uid 1000" in f["detail"] and "mode 555" in f["detail"] for f in bad), bad
    assert all("chmod g+w" in f["fix"] for f in bad)
