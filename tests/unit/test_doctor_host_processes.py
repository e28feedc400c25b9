"""What the doctor finds of processes and devices: stuck, left over, ill. Wrong states first."""

import json
import os
import subprocess
import sys

import pytest
from host_facts import is_fine, seen, verdicts, worst

from scalelab.doctor.checks import gpu, leftovers, matmul, stuck
from scalelab.doctor.registry import NotChecked

# stuck processes and leftovers


def both(probe, before, after):
    what = seen(probe, before)
    what.hosts[0].facts[f"{probe} again"] = {"value": after}
    return what


def test_stuck_processes():
    one = {"12:5:7:0": {"pid": 12, "command": "cp /nfs/x", "where": "rpc_wait"}}
    ran = {"12:5:8:0": one["12:5:7:0"]}  # in D again, having run in between
    finding = worst(stuck.none_stuck, both("stuck", {"stuck": one}, {"stuck": one}))
    assert finding.status == "warn" and "pid 12 (cp /nfs/x) in rpc_wait" in finding.detail
    is_fine(stuck.none_stuck, both("stuck", {"stuck": one}, {"stuck": ran}))
    is_fine(stuck.none_stuck, both("stuck", {"stuck": {}}, {"stuck": one}))


def test_a_process_in_state_d_is_seen_and_a_kernel_thread_is_not(tmp_path):
    def process(pid, state, flags):
        at = tmp_path / str(pid)
        at.mkdir()
        rest = ["0"] * 40
        rest[0], rest[6], rest[19] = state, str(flags), "99"
        (at / "stat").write_text(f"{pid} (a b) c) {' '.join(rest)}\n")
        (at / "status").write_text("voluntary_ctxt_switches:\t4\nnonvoluntary_ctxt_switches:\t1\n")
        (at / "cmdline").write_bytes(b"cp\0-r\0/x\0")

    process(11, "S", 0), process(12, "D", 0), process(13, "D", stuck.KERNEL_THREAD)
    found = stuck.waiting(str(tmp_path))
    assert list(found) == ["12:99:4:1"] and found["12:99:4:1"]["command"] == "cp -r /x"


# A rank, and a launcher that goes before it.
RANK = """
import socket, time
s = socket.create_server(("127.0.0.1", 0))
print(s.getsockname()[1], flush=True)
time.sleep(60)
"""
LAUNCHER = f"""
import subprocess, sys
rank = [sys.executable, "-c", {RANK!r}]
p = subprocess.Popen(rank, start_new_session=SESSION, stdout=subprocess.PIPE, text=True)
print(p.pid, p.stdout.readline(), flush=True)
STAY
"""


def launched(session, stay, env):
    code = LAUNCHER.replace("SESSION", str(session)).replace("STAY", "p.wait()" if stay else "")
    launcher = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env},
                                stdout=subprocess.PIPE, text=True)  # fmt: skip
    pid, port = map(int, launcher.stdout.readline().split())
    if not stay:
        launcher.wait(10)
    return launcher, pid, port


ELASTIC = {"RANK": "3", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc")
@pytest.mark.parametrize(
    "env, session, stay, found",
    [(ELASTIC, True, False, True),
     ({"RANK": "3", "LOCAL_RANK": "1"}, False, False, True),
     (ELASTIC, True, True, False),  # a running job is no leftover
     ({"RANK": "3"}, False, False, False),
     ({"LOCAL_RANK": "1"}, False, False, False),
     ({"RANK": "3", "LOCAL_RANK": "1"}, True, False, False)],  # started to be on its own
)  # fmt: skip
def test_a_rank_without_launcher_is_left_over(env, session, stay, found, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    launcher, pid, port = launched(session, stay, env)
    try:
        parent = leftovers._stat(str(pid))[1]
        if not stay and parent != "1" and leftovers._comm(parent) not in leftovers.REAPERS:
            pytest.skip("orphans here are adopted by a process of another kind")
        ranks = leftovers.leftovers({})["ranks"]
        mine = [r for r in ranks.values() if r["pid"] == pid]
        assert bool(mine) == found
        if found:
            assert mine[0]["ports"] == [port] and mine[0]["rank"] == "3"
            finding = worst(leftovers.nothing_left,
                            both("leftovers", {"ranks": ranks}, {"ranks": ranks}))  # fmt: skip
            assert finding.status == "warn" and str(pid) in finding.fix
            is_fine(leftovers.nothing_left, both("leftovers", {"ranks": ranks}, {"ranks": {}}))
    finally:
        os.kill(pid, 9)
        launcher.kill()
        launcher.wait(10)
        launcher.stdout.close()


# gpu: nvidia-smi is a stand-in here

HEALTHY = "0, NVIDIA H200, 550.54.15, 143771, 4, 31, Enabled, 0, [N/A], No, No, Not Active"


def smi(tmp_path, monkeypatch, script):
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")


def gpu_seen(*hosts, **options):
    return seen("gpu", *hosts, **options)


def gpus(*lines):
    keys = [*gpu.FIELDS, *gpu.HEALTH]
    return {"gpus": [dict(zip(keys, line.split(", "))) for line in lines]}


@pytest.mark.parametrize(
    "column, value, status, words",
    [(4, "90000", "warn", "90000 of 143771 MiB"), (7, "3", "fail", "3 memory errors"),
     (8, "Yes", "warn", "bad memory"), (9, "Yes", "warn", "bad memory"),
     (10, "Yes", "fail", "spare"), (11, "Active", "warn", "slowed down")],
)  # fmt: skip
def test_an_ill_gpu_is_named(tmp_path, monkeypatch, column, value, status, words):
    line = HEALTHY.split(", ")
    line[column] = value
    smi(tmp_path, monkeypatch, f"echo '{HEALTHY}'; echo '1{', '.join(line)[1:]}'")
    what = gpu_seen(gpu.gpu({}))
    assert (worst(gpu.healthy, what).status, worst(gpu.healthy, what).node) == (status, "node0")
    assert words in worst(gpu.healthy, what).detail and "GPU 1" in worst(gpu.healthy, what).detail
    is_fine(gpu.healthy, gpu_seen(gpus(HEALTHY, HEALTHY)))


def test_an_old_nvidia_smi_is_asked_for_less(tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, """case "$1" in
    *remapped*) echo 'Field "remapped_rows.pending" is not a valid field to query.'; exit 2;;
    *) echo '0, Tesla K80, 470, 11441, 0, 40, Disabled';; esac""")  # fmt: skip
    is_fine(gpu.healthy, gpu_seen(gpu.gpu({})))


def test_nvidia_smi_that_fails_hangs_or_is_not_there(tmp_path, monkeypatch):
    smi(tmp_path, monkeypatch, "echo 'Failed to initialize NVML: Driver/library mismatch'; exit 18")
    finding = worst(gpu.healthy, gpu_seen(gpu.gpu({})))
    assert finding.status == "fail" and "mismatch" in finding.detail
    monkeypatch.setattr(gpu, "SECONDS", 0.2)
    smi(tmp_path, monkeypatch, "exec sleep 5")
    finding = worst(gpu.healthy, gpu_seen(gpu.gpu({})))
    assert finding.status == "fail" and "no answer within" in finding.detail
    smi(tmp_path, monkeypatch, "echo what; exit 0")
    assert "no table" in worst(gpu.healthy, gpu_seen(gpu.gpu({}))).detail
    monkeypatch.setenv("PATH", str(tmp_path / "none"))
    with pytest.raises(NotChecked):
        gpu.gpu({})


def test_a_gpu_that_its_peers_have():
    two, one = gpus(HEALTHY, HEALTHY), gpus(HEALTHY)
    assert verdicts(gpu.healthy, gpu_seen(two, one, two))[0] == ("fail", "node1")
    assert verdicts(gpu.healthy, gpu_seen(two, "no NVIDIA GPU here", two))[0] == ("fail", "node1")
    assert verdicts(gpu.healthy, gpu_seen(one, one, nproc=2))[0] == ("warn", "node0")
    is_fine(gpu.healthy, gpu_seen(one, one, nproc=2, separate=False))
    assert verdicts(gpu.healthy, gpu_seen("no NVIDIA GPU here")) == [("skip", "node0")]


# matmul

DEVICE = {"device": "cpu", "name": "", "seconds": 0.001, "finite": True, "right": True}


@pytest.mark.parametrize(
    "odd, status, words",
    [({"devices": [DEVICE, {**DEVICE, "device": "cuda:0", "right": False}]}, "fail", "is wrong"),
     ({"devices": [{**DEVICE, "finite": False, "right": False}]}, "fail", "not finite"),
     ({"error": "ModuleNotFoundError: No module named 'torch'"}, "fail", "does not work"),
     ("no result within 9 s", "warn", "2 of its peers had one"),
     ({"devices": []}, "skip", "no device"), ("its doctor has gone", "skip", "gone")],
)  # fmt: skip
def test_matmul(odd, status, words):
    fine = {"devices": [DEVICE]}
    finding = worst(matmul.matmul, seen("matmul", fine, odd, fine))
    assert (finding.status, finding.node) == (status, "node1") and words in finding.detail
    is_fine(matmul.matmul, seen("matmul", fine, fine))


def test_a_matmul_that_is_late_everywhere_or_on_one_busy_machine_is_not_checked():
    late, fine = "no result within 9 s", {"devices": [DEVICE]}
    what = seen("matmul", fine, late, fine, separate=False)
    assert verdicts(matmul.matmul, what)[0] == ("skip", "node1")
    assert verdicts(matmul.matmul, seen("matmul", late, late)) == [
        ("skip", "node0"),
        ("skip", "node1"),
    ]


@pytest.mark.slow
def test_the_matmul_child_says_right_and_would_say_wrong():
    done = subprocess.run([sys.executable, "-m", "scalelab.doctor.matmul"], capture_output=True,
                          text=True, timeout=120)  # fmt: skip
    first = json.loads(done.stdout.splitlines()[0])
    assert first["device"] == "cpu" and first["finite"] and first["right"]
    code = ("import torch; plain = torch.Tensor.__matmul__;"
            "torch.Tensor.__matmul__ = lambda a, b: plain(a, b) + (a.dtype == torch.float32);"
            "from scalelab.doctor import matmul; matmul.main()")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert not json.loads(done.stdout.splitlines()[0])["right"]
