"""`scalelab read`: the kind is recognised, everything else is refused in one line."""

import gzip
import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from read_outputs import HEADER, run, topo

from scalelab import cli
from scalelab.cluster import UsageError
from scalelab.doctor.read import read

OUTPUTS = Path(__file__).parent / "outputs"
ROOT = Path(__file__).parents[2]
SAMPLES = Path(os.environ.get("SCALELAB_SAMPLES", ROOT.parent / "shared" / "facts" / "outputs"))
LOG = "node-a:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM\n"


def refused(path) -> str:
    with pytest.raises(UsageError) as error:
        read(str(path))
    words = str(error.value)
    assert "\n" not in words and len(words) < 300
    return words


def written(tmp_path, data: bytes | str) -> Path:
    path = tmp_path / "out.txt"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


NOT_OURS = {
    "empty": (b"", "empty"),
    "spaces only": (b" \n\n", "not nvidia-smi"),
    "binary": (bytes(range(256)) * 40, "binary"),
    "random": (os.urandom(20000), "binary"),
    "compressed": (gzip.compress(LOG.encode()), "gunzip"),
    "a picture": (b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(2000), "binary"),
    "prose": (b"Set NCCL_DEBUG=INFO and look for NCCL INFO lines.\n", "not nvidia-smi"),
    "a script": (b'grep "NCCL INFO NET/IB : Using" job.log\n', "not nvidia-smi"),
    "another logger": (b"10.0.0.1:80:90 [0] INFO hello\n", "not nvidia-smi"),
    "its version alone": (b"NCCL version 2.20.5+cuda12.4\nloss 2.3\n", "NCCL_DEBUG=INFO"),
    "a traceback": (b"Traceback (most recent call last):\nRuntimeError: NCCL error\n",
                    "run again with NCCL_DEBUG=INFO"),
    "nvidia-smi": (b"| NVIDIA-SMI 550.54   Driver Version: 550.54   CUDA Version: 12.4 |\n",
                   "topo -m"),
    "peer access": ((OUTPUTS / "topo_p2p.txt").read_bytes(), "topo -p2p"),
    "AMD's": ((OUTPUTS / "amd_topology.txt").read_bytes(), "AMD"),
    "Intel's": (b"        GPU 0/0|GPU 0/1|CPU Affinity\nGPU 0/0|S |MDF |0-55\n", "Intel"),
    "a matrix without rows": (b"\tGPU0\tGPU1\tCPU Affinity\n", "rows are missing"),
    "a matrix that is cut": ("\n".join(topo(8, lambda i, j: "NV18").splitlines()[:5]).encode(),
                             "GPU4 to GPU5 is not shown"),
    "a matrix that lost a cell": (
        topo(4, lambda i, j: "NV4").replace("GPU2\tNV4\t", "GPU2\t").encode(), "does not fit"),
    "a header of nccl-tests": (HEADER.splitlines()[0].encode(), "breaks off"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_OURS)
def test_what_is_none_of_the_three_is_refused_in_one_line(tmp_path, name):
    data, words = NOT_OURS[name]
    assert words in refused(written(tmp_path, data))


def test_what_cannot_be_read_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path / "missing")
    assert "is a directory" in refused(tmp_path)
    assert "no file is named" in refused("")
    assert "cannot be read" in refused("a\0b")
    for device in ("/dev/zero", "/dev/null", "/dev/urandom"):
        assert "device" in refused(device)
    if os.geteuid():
        path = written(tmp_path, LOG)
        path.chmod(0)
        assert "Permission denied" in refused(path)


def test_names_that_would_break_the_line(tmp_path):
    for name in ("new\nline", "tab\tand\x1b[31mred", "\udcff\udcfe", "x" * 3000):
        words = refused(tmp_path / name)
        assert words.isprintable() and ("such file" in words or "too long" in words)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert "symbolic links" in refused(loop)


def test_nothing_in_a_file_moves_the_readers_cursor(tmp_path):
    text = LOG + "node-a:1:2 [0] misc/socket.cc:1 NCCL WARN "
    text += "Connection \x08\x9b\x07refused\u2028 now\n"
    result = read(str(written(tmp_path, text)))
    said = json.dumps([result["why"], *result["facts"]["errors"]], ensure_ascii=False)
    assert said.isprintable() and "Connection refused now" in said


def test_a_pipe_that_nobody_writes_to_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr("scalelab.doctor.source.SILENCE", 0.3)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    began = time.monotonic()
    assert "empty" in refused(path)
    assert time.monotonic() - began < 5


def test_a_command_may_stand_in_the_place_of_the_file(tmp_path):
    path = written(tmp_path, LOG)
    command = f"exec {sys.executable} -m scalelab read --json <(sleep 0.3; cat {path})"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT,
                          timeout=60)  # fmt: skip
    assert json.loads(done.stdout)["kind"] == "nccl-log", done.stderr


WRAPPED = {
    "as it is": lambda line: line,
    "quoted": lambda line: "> " + line,
    "mpirun": lambda line: "[1,0]<stdout>:" + line,
    "srun --label": lambda line: " 0: " + line,
    "torchrun": lambda line: "[rank0]: " + line,
    "Ray": lambda line: "(RayWorkerWrapper pid=12, ip=10.0.0.2) " + line,
    "docker compose": lambda line: "worker-1  | " + line,
    "kubectl": lambda line: "[pod/job-0/main] " + line,
    "a container runtime": lambda line: "2026-01-01T10:00:00.123456789Z stdout F " + line,
    "pdsh": lambda line: "node-a: " + line,
    "colours": lambda line: f"\x1b[4m{line}\x1b[0m",
    "HTML": lambda line: line.replace(">", "&gt;"),
    "HTML with tags": lambda line: f'<span class="l">{html.escape(line)}</span><br>',
    "Docker's own file": lambda line: json.dumps({"log": line + "\n", "stream": "stdout"}),
    "a diff": lambda line: "+" + line,
    "cat -n": lambda line: "     7\t" + line,
    "grep -n": lambda line: "12:" + line,
    "a frame": lambda line: "│ " + line + "   │",
    "other spaces": lambda line: line.replace(" ", "\xa0"),
    "carriage returns": lambda line: line + "\r",
}


@pytest.mark.parametrize("how", WRAPPED)
def test_prefixes_and_colours_do_not_matter(tmp_path, how):
    outputs = {
        "topo": topo(4, lambda i, j: "NV2" if i // 2 == j // 2 else "SYS", ["mlx5_0"],
                     lambda i, k: "PIX" if i < 2 else "SYS"),
        "nccl-tests": run(8, 8, "NVIDIA A100-SXM4-80GB", 234),
        "nccl-log": LOG,
    }  # fmt: skip
    for kind, text in outputs.items():
        plain = read(str(written(tmp_path, text)))
        assert plain["kind"] == kind
        lines = [WRAPPED[how](line) for line in text.splitlines()]
        assert read(str(written(tmp_path, "\n".join(lines)))) == plain


@pytest.mark.parametrize("columns", [80, 100, 120])
@pytest.mark.parametrize("blanks", ["kept", "cut"])
def test_a_screen_that_wraps(tmp_path, columns, blanks):
    outputs = {
        "topo": topo(8, lambda i, j: "NV18", [f"NIC{k}" for k in range(8)],
                     lambda i, k: "PIX" if i == k else "NODE").expandtabs(),
        "nccl-tests": run(8, 8, "NVIDIA A100-SXM4-80GB", 234),
        "nccl-log": 3 * LOG.replace("P2P/CUMEM", "NET/IB/0(8)/GDRDMA/Shared")
        .replace("node", "n" * 30)
        + "node-a:10:20 [0] NCCL INFO NET/IB : Using "
        + " ".join(f"[{i}]mlx5_{i}:1/IB/SHARP" for i in range(9)) + " [RO]; OOB eth0:10.0.0.1<0>\n"
        + "NCCL version 2.27.7+cuda12.9\n",
    }  # fmt: skip
    for text in outputs.values():
        plain = read(str(written(tmp_path, text)))
        wrapped = [line[i : i + columns] for line in text.splitlines()
                   for i in range(0, max(1, len(line)), columns)]  # fmt: skip
        if blanks == "cut":
            wrapped = [line.rstrip() for line in wrapped]
        found = read(str(written(tmp_path, "\n".join(wrapped))))
        assert (found["verdict"], found["facts"]) == (plain["verdict"], plain["facts"])


def test_lines_as_long_as_each_other_are_not_joined(tmp_path):
    same = "node-a:10:20 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read\n"
    text = same * 4 + "loss 2.3\n" + same * 4 + "NCCL version 2.20.5+cuda12.4\n"
    facts = read(str(written(tmp_path, text)))["facts"]
    assert facts["channels"] == {"P2P/CUMEM": 8} and facts["version"] == "2.20.5+cuda12.4"


def test_what_else_a_file_holds_is_named(tmp_path):
    matrix = topo(8, lambda i, j: "NV18")
    result = read(str(written(tmp_path, matrix + run(8, 8, "NVIDIA H100", 480, smallest=1 << 33))))
    assert result["kind"] == "topo" and "also holds nccl-tests' output" in result["why"]
    result = read(str(written(tmp_path, matrix + run(8, 8, "NVIDIA H100", 480))))
    assert result["kind"] == "nccl-tests" and "nvidia-smi topo -m, which is not" in result["why"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_text_as_powershell_saves_it(tmp_path, encoding):
    text = run(8, 8, "NVIDIA A100-SXM4-80GB", 234).replace("\n", "\r\n")
    plain = read(str(written(tmp_path, text)))
    assert read(str(written(tmp_path, text.encode(encoding)))) == plain


def test_a_table_within_a_log_is_nccl_tests(tmp_path):
    result = read(str(written(tmp_path, LOG * 400 + run(8, 8, "NVIDIA H100", 360))))
    assert (result["kind"], result["facts"]["ranks"]) == ("nccl-tests", 8)
    begun = HEADER + LOG * 400  # no row, and little else than the log
    assert read(str(written(tmp_path, begun)))["kind"] == "nccl-log"


def test_command_line(tmp_path, capsys):
    path = written(tmp_path, run(8, 8, "NVIDIA A100-SXM4-80GB", 234))
    assert cli.main(["read", str(path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"kind", "facts", "verdict", "why", "next"}
    assert cli.main(["read", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "nccl-tests: good" in shown and re.search(r"max_busbw +233", shown)
    assert cli.main(["read", str(OUTPUTS / "log_port_down.txt")]) == 0  # broken, but read
    assert "broken: a NIC's port went down" in capsys.readouterr().out
    assert cli.main(["read", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1


BIG = {  # one chunk, repeated to 200 MB
    "another log": "2026-01-01 10:00:00,123 INFO step 1234/5000 loss 2.345 tokens/s 123456\n",
    "NCCL's log": LOG + LOG.replace("00/0", "01/0"),
    "one line": "words without end, NCCL among them ",
    "nothing": "\0",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BIG)
def test_200_megabytes_take_bounded_memory_and_time(tmp_path, name):
    path = tmp_path / "big"
    block = (BIG[name] * (1_000_000 // len(BIG[name]))).encode()
    with open(path, "wb") as out:
        for _ in range(200):
            out.write(block)
    code = (  # not ru_maxrss: across an exec it keeps what the parent, this whole session, had
        "import sys\nfrom scalelab import cli\ncode = cli.main(['read', sys.argv[1]])\n"
        "print(open('/proc/self/status').read())\nsys.exit(code)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True,
                          cwd=ROOT, timeout=120)  # fmt: skip
    assert time.monotonic() - began < 60
    assert int(re.search(r"VmHWM:\s+(\d+) kB", done.stdout)[1]) < 150_000, "kB"
    assert done.returncode == (0 if name == "NCCL's log" else 2), done.stderr
    assert "Traceback" not in done.stderr


def samples(letter: str) -> list[dict]:
    if not (SAMPLES / "index.json").exists():
        return []
    listed = json.loads((SAMPLES / "index.json").read_text())["samples"]
    return [entry for entry in listed if entry["file"].startswith(letter)]


needs_samples = pytest.mark.skipif(
    not samples("a"), reason=f"no samples at {SAMPLES} (set SCALELAB_SAMPLES)"
)


@needs_samples
def test_samples_of_topologies():
    for entry in samples("a"):
        result = read(str(SAMPLES / entry["file"]))
        facts, said = result["facts"], entry["verdict"]
        assert result["kind"] == "topo"
        assert facts["gpus"] == int(re.search(r"_(\d+)(?:x|gpu)", entry["file"])[1])
        assert facts["numa_nodes"] == int(re.search(r"\d+", str(said["numa_nodes"]))[0])
        label = re.match(r"(NV\d+|PIX|PHB|NODE)", said["fast_pairs"])
        for pair in re.findall(r"\b\d-\d\b", said["fast_pairs"].split(";")[0]) if label else ():
            assert facts["links"][pair] == label[1], (entry["file"], pair)
        expected = {"NVSwitch": "nvswitch", "hybrid": "nvlink-mesh", "bridge": "nvlink-pairs"}
        for word, kind in expected.items():
            if word in said["topology"] and "no " + word not in said["topology"]:
                assert facts["class"] == kind, entry["file"]


@needs_samples
def test_samples_of_nccl_tests():
    for entry in samples("b"):
        result = read(str(SAMPLES / entry["file"]))
        facts, said = result["facts"], entry["verdict"]
        assert result["kind"] == "nccl-tests"
        assert result["verdict"].split(":")[0].split()[0] in (
            "good", "slow", "broken", "not-one-job", "unknown"
        )  # fmt: skip
        if isinstance(said["max_busbw_GBs"], int | float):
            assert facts["max_busbw"] == said["max_busbw_GBs"], entry["file"]
        if isinstance(said["ranks"], int) and facts["ranks"] is not None:
            assert facts["ranks"] == said["ranks"], entry["file"]
        if isinstance(said["nodes"], int) and facts["nodes"] is not None:
            assert facts["nodes"] == said["nodes"], entry["file"]
        apart = "independent" in str(said["nodes"]) or "separate" in str(said["nodes"])
        assert facts["independent_runs"] == apart, entry["file"]
        if "good" in entry["file"]:
            assert result["verdict"].startswith("good"), entry["file"]
        assert result["verdict"].startswith("not-one-job") == apart


@needs_samples
def test_samples_of_logs():
    for entry in samples("c"):
        result = read(str(SAMPLES / entry["file"]))
        facts, said = result["facts"], entry["verdict"]
        assert result["kind"] == "nccl-log"
        assert result["verdict"].startswith("broken") == ("BROKEN" in said["verdict"]), entry
        for network in re.findall(r"NET/\w+|P2P/\w+", said["transport"]):
            assert any(network in used for used in facts["transport"]), entry["file"]
        if said["gdr"].startswith("yes"):
            assert facts["gdr"] is True, entry["file"]
        elif re.match(r"no\b", said["gdr"]):
            assert facts["gdr"] is False, entry["file"]
        elif said["gdr"] in ("unknown", "n/a"):
            assert facts["gdr"] is None, entry["file"]
        version = re.search(r"NCCL (\d+\.\d+\.\d+)", entry["software"])
        if version and facts["version"]:
            assert facts["version"].startswith(version[1]), entry["file"]


@needs_samples
def test_samples_of_other_kinds_are_refused():
    assert samples("d")
    for entry in samples("d"):
        refused(SAMPLES / entry["file"])
