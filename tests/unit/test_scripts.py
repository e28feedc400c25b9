"""The training scripts that learners read: plain, short, repeatable, and DDP equals one device."""

import ast
import difflib
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SCRIPTS = NOTEBOOKS / "scripts"
ONE, DDP = SCRIPTS / "train_one.py", SCRIPTS / "train_ddp.py"
BOOKS = NOTEBOOKS / "data" / "books.txt"
SHA256 = "3fe904f49d068ebc89ed6227f44028bb3fbc78f6114cc2954560e00175144819"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def python(*args, **variables):
    env = {k: v for k, v in os.environ.items()
           if k not in LAUNCHER_VARIABLES and not k.startswith(("SCALELAB_", "TORCHELASTIC_"))}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    return subprocess.run([sys.executable, *map(str, args)], env=env, timeout=120,
                          capture_output=True, text=True)


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def refuse(monkeypatch, capsys):
    """Calls a script's main() in this process, which must end it; the exit status and the words."""
    for name in ("SCALELAB_METRICS", *LAUNCHER_VARIABLES):
        monkeypatch.delenv(name, raising=False)

    def call(script, *args):
        monkeypatch.setattr(sys, "argv", [str(script), *map(str, args)])
        with pytest.raises(SystemExit) as end:
            load(script).main()
        out, err = capsys.readouterr()
        assert out == ""
        # sys.exit("words") prints them and exits 1
        return (1, end.value.code + "\n") if isinstance(end.value.code, str) else (
            end.value.code, err)

    return call


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Runs a script and hands back its output, its metrics and its final weights."""
    saver = tmp_path_factory.mktemp("saver") / "save.py"
    saver.write_text(
        "import os, runpy, sys, torch\n"
        "script, target, *sys.argv[1:] = sys.argv[1:]\n"
        "model = runpy.run_path(script)['main']()\n"
        "torch.save(model.state_dict(), target + os.environ.get('RANK', '0'))\n")

    def run(script, *args, launcher=()):
        folder = tmp_path_factory.mktemp("run")
        done = python(*launcher, saver, script, folder / "weights", *args,
                      "--metrics", folder / "metrics.jsonl")
        assert done.returncode == 0, done.stderr
        ranks = len(list(folder.glob("weights*")))
        weights = [torch.load(folder / f"weights{rank}") for rank in range(ranks)]
        return done.stdout, lines(folder / "metrics.jsonl"), weights

    return run


@pytest.fixture(scope="module")
def one_run(train):
    return train(ONE, "--steps", 100)


def check_schema(rows, steps, ranks, tokens):
    assert sorted((row["step"], row["rank"]) for row in rows) == [
        (step, rank) for step in range(1, steps + 1) for rank in range(ranks)]
    for row in rows:
        assert {"step", "rank", "loss", "tokens", "time", "seconds"} <= set(row)
        assert row["tokens"] == tokens
        assert isinstance(row["loss"], float) and 0 < row["loss"] < 10
        assert row["time"] > 1.6e9
        assert list(row["seconds"]) == ["data", "forward", "backward", "communication", "update"]
        assert all(0 <= seconds < 60 for seconds in row["seconds"].values())


# --- the text -----------------------------------------------------------------------------------


def test_the_text_is_the_one_the_readme_describes():
    data = BOOKS.read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256
    assert len(data) == 737_794
    text = data.decode("utf-8")
    assert len(set(text)) == 81 and "\r" not in text and "\t" not in text
    assert not any(word in text.lower() for word in ("gutenberg", "copyright"))
    readme = (NOTEBOOKS / "data" / "README.md").read_text()
    assert SHA256 in readme and "737,794 bytes" in readme and "public domain" in readme


# --- the code as a reader meets it --------------------------------------------------------------


def foreign_imports(source):
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module if not node.level else "." * node.level)
    return {n for n in names if n.split(".")[0] not in {"torch", *sys.stdlib_module_names}}


@pytest.mark.parametrize("script", [ONE, DDP], ids=lambda p: p.name)
def test_scripts_are_short_and_import_torch_and_the_standard_library_only(script):
    source = script.read_text()
    assert len(source.splitlines()) <= 151
    assert foreign_imports(source) == set()
    for planted in ("import scalelab", "from numpy import array", "from . import helper"):
        assert foreign_imports(source + f"\n\ndef late():\n    {planted}\n")


def test_ddp_is_a_small_diff_from_one_device():
    changes = [line[0] for line in difflib.ndiff(ONE.read_text().splitlines(),
                                                 DDP.read_text().splitlines())]
    assert 0 < changes.count("+") <= 20
    assert 0 < changes.count("-") <= 6


def test_scripts_never_wait_for_others_in_a_finally():
    for script in (ONE, DDP):
        tree = ast.parse(script.read_text())
        assert not any(isinstance(node, ast.Try) and node.finalbody for node in ast.walk(tree))


def test_the_embedding_gets_its_gradient_last():
    """train_ddp takes that moment for the end of backward and the start of waiting."""
    script = load(DDP)
    sizes = type("Args", (), {"width": 32, "heads": 4, "layers": 3, "block_size": 16})
    model, order = script.GPT(81, sizes), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    x = torch.randint(81, (2, 17))
    model(x[:, :-1], x[:, 1:]).backward()
    assert order[-1] == "token.weight" and len(order) == len(list(model.parameters()))


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("args, words", [
    (["--steps", "0"], "--steps must be a whole number from 1 up"),
    (["--batch-size", "-1"], "--batch-size"),
    (["--steps", "many"], "invalid int value: 'many'"),
    (["--width", "30"], "--width 30 must be a multiple of --heads 4"),
    (["--lr", "nan"], "--lr nan must lie between 0 and 1"),
    (["--seed", "-1"], "--seed -1"),
    (["--stepz", "3"], "unrecognized arguments: --stepz 3"),
], ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_bad_flag_gives_one_line_and_exit_2(args, words, refuse):
    status, said = refuse(ONE, *args)
    assert status == 2 and said.count("\n") == 1
    assert said.startswith("train_one.py: ") and words in said


@pytest.mark.parametrize("kind", ["missing", "too short", "not text", "metrics"])
def test_a_bad_file_gives_one_line_and_exit_1(kind, tmp_path, refuse):
    path = tmp_path / "text.txt"
    if kind == "too short":
        path.write_text("to be or not to be")
    elif kind == "not text":
        path.write_bytes(b"\xff" * 5000)
    args = ["--metrics", tmp_path / "no" / "m.jsonl"] if kind == "metrics" else ["--data", path]
    status, said = refuse(ONE, *args)
    assert status == 1 and said.startswith("train_one.py: ") and said.count("\n") == 1
    if kind in ("missing", "too short"):
        assert str(path) in said


def test_ddp_without_torchrun_says_how_to_start_it(refuse):
    status, said = refuse(DDP)
    assert status == 2 and said.count("\n") == 1
    assert "torchrun --nproc-per-node 2 train_ddp.py" in said


def test_the_same_holds_for_a_real_process(tmp_path):
    done = python(ONE, "--steps", "0")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    done = python(ONE, "--data", tmp_path / "nowhere.txt")
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1


# --- training -----------------------------------------------------------------------------------


def test_one_device_learns_and_records_every_step(one_run):
    printed, rows, _ = one_run
    check_schema(rows, steps=100, ranks=1, tokens=8 * 64)
    assert all(row["seconds"]["communication"] == 0 for row in rows)
    assert 4.2 < rows[0]["loss"] < 4.9
    assert sum(row["loss"] for row in rows[-10:]) / 10 < 2.9
    first, *_, last = printed.splitlines()
    assert first.startswith("rank 0 of 1 on ") and "global batch 8" in printed
    assert last.startswith("validation loss ") and printed.count("validation loss") == 1
    assert 2.0 < float(last.split()[-1]) < 2.9


@pytest.mark.slow
def test_two_runs_on_one_thread_are_bit_identical(one_run, train):
    _, rows, (weights,) = train(ONE, "--steps", 15)
    losses = [row["loss"] for row in rows]
    assert losses == [row["loss"] for row in one_run[1][:15]]
    _, other, _ = train(ONE, "--steps", 15, "--seed", 1)
    assert losses != [row["loss"] for row in other]


def test_metrics_go_where_the_environment_says(tmp_path):
    path = tmp_path / "m.jsonl"
    done = python(ONE, "--steps", 2, SCALELAB_METRICS=str(path))
    assert done.returncode == 0, done.stderr
    check_schema(lines(path), steps=2, ranks=1, tokens=8 * 64)


def parted(rows, weights, alone_rows, alone_weights):
    """How far two ranks are from one device: the largest difference in loss and in a weight."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    means = [(a["loss"] + b["loss"]) / 2 for a, b in pairs]
    loss = max(abs(m - row["loss"]) for m, row in zip(means, alone_rows, strict=True))
    weight = max((weights[k] - alone_weights[k]).abs().max().item() for k in alone_weights)
    return loss, weight


@pytest.mark.slow
def test_ddp_on_two_ranks_equals_one_device_with_twice_the_batch(train):
    steps = ["--steps", 20, "--layers", 1, "--width", 32]
    printed, rows, weights = train(DDP, *steps, "--batch-size", 4, launcher=TORCHRUN)
    rows.sort(key=lambda row: (row["step"], row["rank"]))
    check_schema(rows, steps=20, ranks=2, tokens=4 * 64)
    assert printed.count("validation loss") == 1 and "global batch 8 " in printed
    assert "rank 0 of 2 on " in printed and "rank 1 of 2 on " in printed
    # the ranks read different samples and hold the same weights
    assert all(a["loss"] != b["loss"] for a, b in zip(rows[::2], rows[1::2], strict=True))
    assert all(torch.equal(weights[0][k], weights[1][k]) for k in weights[0])

    _, alone_rows, (alone,) = train(ONE, *steps, "--batch-size", 8)
    loss, weight = parted(rows, weights[0], alone_rows, alone)
    assert loss < 1e-6 and weight < 1e-6

    _, other_rows, (other,) = train(ONE, *steps, "--batch-size", 8, "--seed", 1)
    loss, weight = parted(rows, weights[0], other_rows, other)
    assert loss > 1e-3 and weight > 1e-3


@pytest.mark.slow
def test_an_error_on_a_rank_ends_the_run_with_its_own_words(tmp_path):
    done = python(*TORCHRUN, DDP, "--data", tmp_path / "nowhere.txt")
    assert done.returncode == 1
    words = f"train_ddp.py: [Errno 2] No such file or directory: '{tmp_path}/nowhere.txt'"
    assert words in done.stderr.splitlines()


ENDED = """
import glob, pathlib, runpy, sys, time
script, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(script, run_name="__main__")
def threads():
    found = 0
    for name in glob.glob("/proc/self/task/*/comm"):
        try:
            found += "gloo" in pathlib.Path(name).read_text()
        except OSError:
            pass  # it has just ended
    return found
until = time.monotonic() + 2  # the kernel lists a thread a moment longer than it is waited for
while threads() and time.monotonic() < until:
    time.sleep(0.05)
print(f"threads of gloo: {threads()}\\n", end="", flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are listed on Linux only")
@pytest.mark.parametrize(
    ("spoil", "left"),
    [
        (("", ""), False),
        (("import torch.distributed.nn ", "pass "), True),
    ],
    ids=["as it is", "without the import"],
)
def test_no_thread_of_gloo_outlives_the_group(tmp_path, spoil, left):
    """One that does may abort the rank at its very end, once in some dozens of runs."""
    source = DDP.read_text()
    assert spoil[0] in source
    script = tmp_path / "train.py"
    script.write_text(source.replace(*spoil) if spoil[0] else source)
    (tmp_path / "ended.py").write_text(ENDED)
    done = python(*TORCHRUN, tmp_path / "ended.py", script, "--data", BOOKS, "--steps", 2,
                  "--layers", 1, "--width", 16)
    counts = [line.split()[-1] for line in done.stdout.splitlines() if "threads of gloo" in line]
    if left:  # or the end of it was too much for the rank
        assert done.returncode or counts != ["0", "0"], done.stdout
    else:
        assert counts == ["0", "0"], done.stdout + done.stderr
