"""What the doctor finds of a host's software, limits and start: every judgement against made-up
facts, wrong ones first, and every probe for real on this machine."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from host_facts import is_fine, seen, verdicts, worst

from scalelab.doctor.checks import environment, limits, reboot, shm, threads
from scalelab.doctor.registry import judge
from scalelab.measure import fingerprint as fp

MIB = 1 << 20


# fingerprint


def test_a_fingerprint_is_quick_flat_and_without_torch():
    code = (
        "import json, sys, time; from scalelab.measure.fingerprint import fingerprint as f; f();"
        "t = time.perf_counter(); facts = f(); s = time.perf_counter() - t;"
        "print(json.dumps([facts, s, 'torch' in sys.modules]))"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "3", "NCCL_AUTH_TOKEN": "hush",
           "NCCL_SOCKET_IFNAME": "eth0", "CUDA_PROXY": "http://me:pass@there/x",
           "RANK": "1"}  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    facts, seconds, torch = json.loads(done.stdout)
    assert not torch and seconds < 0.3
    assert all(isinstance(v, str) for v in facts.values())
    assert facts["variable OMP_NUM_THREADS"] == "3"
    assert facts["variable CUDA_PROXY"] == "http://…@there/x"
    own = {"variable NCCL_SOCKET_IFNAME", "variable NCCL_AUTH_TOKEN", "variable RANK"}
    assert not own & facts.keys() and "hush" not in done.stdout and "pass@" not in done.stdout
    from importlib.metadata import version

    assert facts["torch"].split("+")[0] == version("torch").split("+")[0]
    assert facts["package pytest"] == version("pytest")


def test_the_first_package_on_the_path_counts(tmp_path):
    for folder, version in (("a", "2.0"), ("b", "1.0")):
        (tmp_path / folder / f"Some_Thing-{version}.dist-info").mkdir(parents=True)
    path = [str(tmp_path / "a"), str(tmp_path / "missing"), str(tmp_path / "b")]
    assert fp.packages(path) == {"some-thing": "2.0"}
    assert fp.packages(path[1:]) == {"some-thing": "1.0"}


def test_versions_of_torch_are_read_as_text(tmp_path):
    place = tmp_path / "torch" / "version.py"
    place.parent.mkdir()
    place.write_text("__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\nhip = None\n")
    path = [str(tmp_path)]
    facts = fp.torch_versions({"nvidia-nccl-cu12": "2.27.3"}, path)
    assert facts == {"torch": "2.13.0+cu126", "cuda": "12.6", "nccl": "2.27.3"}
    assert "nccl" not in fp.torch_versions({}, path)  # it has one, of a version not known
    assert fp.torch_versions({}, []) == {"torch": "none", "cuda": "none", "nccl": "none"}


def test_gpus_of_a_driver(tmp_path):
    assert fp.gpus({}, str(tmp_path)) == {"driver": "none", "gpus": "none"}
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\n"
    )
    for i in range(2):
        about = tmp_path / "gpus" / f"0000:0{i}:00.0" / "information"
        about.parent.mkdir(parents=True)
        about.write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert fp.gpus({}, str(tmp_path)) == {"driver": "550.54.15", "gpus": "2 x NVIDIA H200"}
    assert fp.gpus({"CUDA_VISIBLE_DEVICES": "1"}, str(tmp_path))["gpus"] == "1 x NVIDIA H200"
    assert fp.gpus({"CUDA_VISIBLE_DEVICES": ""}, str(tmp_path))["gpus"] == "none"


WIDE = {"avx512f", "avx512vl", "avx512bw", "avx512dq", "fma", "avx2"}


@pytest.mark.parametrize(
    "flags, asked, chosen",
    [(WIDE, "", "avx512"), (WIDE - {"avx512dq"}, "", "avx2"), (WIDE - {"fma"}, "", "default"),
     (WIDE, "avx2", "avx2"), (WIDE, "default", "default"), (WIDE, "nonsense", "avx512"),
     ({"asimd"}, "avx2", "default"), ({"asimd", "sve"}, "", "sve")],
)  # fmt: skip
def test_cpu_capability(flags, asked, chosen):
    assert fp.capability(flags, {"ATEN_CPU_CAPABILITY": asked}) == chosen


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, "default"])
def test_cpu_capability_is_what_torch_says(asked):
    env = {k: v for k, v in os.environ.items() if k != "ATEN_CPU_CAPABILITY"}
    env |= {"ATEN_CPU_CAPABILITY": asked} if asked else {}
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    ours = fp.processor(env).get("cpu capability")
    if said.stdout.strip().lower() not in ("avx512", "avx2", "default"):
        pytest.skip(f"torch has another kind of processor here: {said.stdout.strip()}")
    assert ours == said.stdout.strip().lower()


def test_the_commit_and_what_differs_from_it(tmp_path):
    if not shutil.which("git"):
        pytest.skip("needs git")

    def git(*args):
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e",
                        *args], check=True, capture_output=True)  # fmt: skip

    outside = fp.code(str(tmp_path))
    assert outside == {"code": "none", "code changes": "none"} or "code place" in outside
    git("init")
    assert "code" not in fp.code(str(tmp_path))  # no commit yet: not known
    (tmp_path / "train.py").write_text("lr = 1\n")
    git("add", "train.py")
    git("commit", "-m", "first")
    (tmp_path / "deep").mkdir()
    clean = fp.code(str(tmp_path / "deep"))
    assert len(clean["code"]) == 12 and clean["code changes"] == "none"
    (tmp_path / "train.py").write_text("lr = 2\n")
    dirty = fp.code(str(tmp_path))
    assert dirty["code"] == clean["code"] and "uncommitted" in dirty["code changes"]
    (tmp_path / "train.py").write_text("lr = 3\n")
    assert fp.code(str(tmp_path))["code changes"] != dirty["code changes"]


# environment

BASE = {"python": "3.11.7", "torch": "2.13.0", "cuda": "12.6", "nccl": "2.27.3", "driver": "550",
        "gpus": "8 x H200", "cpu capability": "avx512", "code": "abc", "code changes": "none",
        "code place": "x", "variable OMP_NUM_THREADS": "1", "package numpy": "2.0"}  # fmt: skip


@pytest.mark.parametrize(
    "change, status, words, fix",
    [
        ({"torch": "2.12.0"}, "fail", "torch 2.12.0, others 2.13.0", "pip install 'torch==2.13.0'"),
        ({"nccl": "2.20"}, "fail", "nccl 2.20, others 2.27.3", "torch wheel"),
        ({"cuda": "12.1"}, "fail", "cuda 12.1", "torch wheel"),
        ({"python": "3.10.2"}, "fail", "python 3.10.2", "Python 3.11.7"),
        ({"python": "3.11.9"}, "warn", "python 3.11.9", "Python 3.11.7"),
        ({"code": "def", "code place": "y"}, "fail", "code def", "git checkout abc"),
        ({"code": "none", "code place": "y"}, "warn", "code none", "git checkout abc"),
        ({"driver": "470"}, "warn", "driver 470", "driver 550"),
        ({"gpus": "7 x H200"}, "warn", "gpus 7 x H200", ""),
        ({"cpu capability": "avx2"}, "warn", "losses part", "ATEN_CPU_CAPABILITY=avx2"),
        ({"variable OMP_NUM_THREADS": "8"}, "warn", "OMP_NUM_THREADS 8, others 1 (another number",
         "export OMP_NUM_THREADS=1"),
        ({"variable MKL_CBWR": "COMPATIBLE"}, "warn", "MKL_CBWR COMPATIBLE, others not there (it",
         "unset MKL_CBWR"),
        ({"package numpy": "1.9"}, "warn", "numpy 1.9, others 2.0", "pip install 'numpy==2.0'"),
        ({"package evil": "1"}, "warn", "evil 1, others not there", "pip uninstall evil"),
    ],
)  # fmt: skip
def test_an_odd_environment_is_named(change, status, words, fix):
    what = seen("environment", BASE, {**BASE, **change}, BASE)
    finding = worst(environment.same_environment, what)
    assert (finding.status, finding.node) == (status, "node1")
    assert words in finding.detail and fix in finding.fix
    assert finding.table[0].split() == ["node0", "node1", "node2"]
    assert verdicts(environment.same_environment, what)[1:] == [
        ("pass", "node0"),
        ("pass", "node2"),
    ]


def test_of_two_environments_both_are_shown_and_neither_blamed():
    what = seen("environment", BASE, {**BASE, "torch": "2.12.0", "package numpy": "1.9"})
    (finding,) = judge([environment.same_environment], what)
    assert finding.status == "fail" and finding.hosts == ("node0", "node1")
    assert "torch 2.13.0 on node0, 2.12.0 on node1" in finding.detail and "numpy" in finding.detail


def test_the_table_shows_all_that_differs_and_once():
    odd = {**BASE, "cpu": "other", "package numpy": "1.9"}
    what = seen("environment", {**BASE, "cpu": "usual"}, odd, {**odd, "torch": "2.12.0"})
    findings = judge([environment.same_environment], what)
    rows = [line.split()[0] for f in findings for line in f.table[1:]]
    assert rows == ["torch", "cpu", "numpy"]
    kinds = [{**BASE, "cpu": cpu} for cpu in ("usual", "other", "usual")]
    is_fine(environment.same_environment, seen("environment", *kinds))


def test_one_copy_of_the_code_and_what_is_not_known_differ_in_nothing():
    racing = {**BASE, "code changes": "uncommitted (1)"}  # saved between two looks at one file
    is_fine(environment.same_environment, seen("environment", BASE, racing, BASE))
    unknown = {k: v for k, v in BASE.items() if k not in ("nccl", "code")}
    is_fine(environment.same_environment, seen("environment", BASE, unknown))
    is_fine(environment.same_environment, seen("environment", BASE))
    what = seen("environment", BASE, "no answer within 6 s", BASE)
    assert verdicts(environment.same_environment, what)[0] == ("skip", "node1")


# shared memory, limits, threads


def test_shared_memory():
    def judged(total, free=None, **options):
        facts = {"total": total * MIB, "free": (free or total) * MIB, "writable": True}
        return worst(shm.shared_memory, seen("shm", facts, facts, **options)).status

    assert judged(8) == "fail"
    assert judged(4096, free=3) == "fail"  # filled up by others
    assert judged(64, nproc=8) == "warn"
    assert judged(64) == "warn"  # separate machines in Docker
    assert judged(64, separate=False) == "pass"
    assert judged(4096, nproc=8) == "pass"
    for odd in ({"error": "No such file"}, {"total": 1 << 33, "free": 1 << 33, "writable": False}):
        assert worst(shm.shared_memory, seen("shm", odd)).status == "fail"
    is_fine(shm.shared_memory, seen("shm", shm.shm({})))


def test_limits():
    def judged(files, memlock=8 << 20, rdma=(), may_lock=False, **options):
        facts = {"files": files, "memlock": [memlock, None], "rdma": list(rdma),
                 "may lock": may_lock}  # fmt: skip
        return worst(limits.enough, seen("limits", facts, facts, **options))

    assert judged([100, 4096]).status == "fail"
    assert "ulimit -n 4096" in judged([100, 4096]).fix
    assert judged([1024, 1024], nproc=512).status == "fail"
    assert "limits.conf" in judged([1024, 1024], nproc=512).fix
    assert judged([1024, None], nproc=128).status == "warn"
    assert judged([1024, None], nproc=8).status == "pass"
    assert judged([None, None], nproc=512).status == "pass"
    assert judged([1024, None], rdma=["mlx5_0"]).status == "fail"
    assert judged([1024, None], memlock=1 << 30, rdma=["mlx5_0"]).status == "warn"
    assert judged([1024, None], memlock=None, rdma=["mlx5_0"]).status == "pass"
    assert judged([1024, None], rdma=["mlx5_0"], may_lock=True).status == "pass"


def test_the_limits_probe_reads_this_process():
    code = (
        "import json; from scalelab.doctor.checks import limits;"
        "print(json.dumps(limits.limits({})))"
    )
    command = f"ulimit -Sn 77; exec {sys.executable} -c '{code}'"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert json.loads(done.stdout)["files"][0] == 77


@pytest.mark.parametrize(
    "settings, options, status",
    [({"OMP_NUM_THREADS": "16"}, {"nproc": 8}, "warn"), ({"OMP_NUM_THREADS": "65"}, {}, "warn"),
     ({"OMP_NUM_THREADS": "0"}, {}, "warn"), ({"MKL_NUM_THREADS": "all"}, {}, "warn"),
     ({"OMP_NUM_THREADS": "8,2"}, {"nproc": 8}, "pass"), ({"OMP_NUM_THREADS": "64"}, {}, "pass"),
     ({"OMP_NUM_THREADS": "1"}, {"nproc": 100}, "pass"), ({}, {"nproc": 8}, "pass"),
     ({}, {"nproc": 8, "usable": 1}, "warn"), ({}, {"nproc": 8, "quota": 2.0}, "warn"),
     ({}, {"nproc": 8, "usable": 1, "separate": False}, "pass")],
)  # fmt: skip
def test_threads(settings, options, status):
    facts = {"cores": 64, "usable": options.pop("usable", 64), "settings": settings,
             "quota": options.pop("quota", None)}  # fmt: skip
    assert worst(threads.fitting, seen("threads", facts, facts, **options)).status == status


def test_the_threads_probe_sees_what_it_may_use():
    code = ("import os, json; from scalelab.doctor.checks import threads;"
            "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
            "print(json.dumps(threads.threads({})))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "5"})  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["usable"] == 1 and facts["settings"]["OMP_NUM_THREADS"] == "5"
    is_fine(threads.fitting, seen("threads", {**threads.threads({}), "settings": {}}))


# reboot


def test_reboot():
    def up(*seconds):
        return seen("uptime", *({"seconds": s} for s in seconds))

    assert worst(reboot.reboot, up(9000, 90, 9000)).node == "node1"
    assert worst(reboot.reboot, up(9000, 90)).status == "warn"
    is_fine(reboot.reboot, up(90, 80, 70))  # all have
    is_fine(reboot.reboot, up(90))
    is_fine(reboot.reboot, up(9000, 700))
    assert reboot.uptime({})["seconds"] > 0
