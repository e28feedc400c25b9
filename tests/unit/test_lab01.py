"""What lesson and lab 01 stand on: the slow data set, and that the lab grades train_one's model."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from scalelab.grading.labs.lab01 import memory

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lab_counts_the_model_of_train_one():
    args = SimpleNamespace(block_size=16, layers=3, width=32, heads=4)
    graded = memory.build_gpt(81, args)
    torch.manual_seed(0)
    trained = load("train_one").GPT(81, args)
    assert list(graded.state_dict()) == list(trained.state_dict())
    x, y = torch.randint(81, (2, 2, 16))
    with torch.no_grad():
        assert torch.equal(graded(x, y), trained(x, y))


def test_slow_books_are_the_text_and_the_characters_that_follow():
    books = load("slow_books").SlowBooks(samples=5, block_size=16)
    text = (SCRIPTS.parent / "data" / "books.txt").read_text(encoding="utf-8")
    known = sorted(set(text))
    for i in range(len(books)):
        x, y = books[i]
        assert "".join(known[n] for n in x) == text[16 * i : 16 * i + 16]
        assert "".join(known[n] for n in y) == text[16 * i + 1 : 16 * i + 17]


@pytest.mark.parametrize("workers", [0, 2])
def test_slow_books_count_what_workers_read(workers):
    books = load("slow_books").SlowBooks(samples=20, block_size=16)
    batches = list(DataLoader(books, batch_size=8, num_workers=workers))
    assert [len(x) for x, _ in batches] == [8, 8, 4]
    assert books.read.tolist() == [1] * 20


def script(*args):
    return subprocess.run([sys.executable, SCRIPTS / "slow_books.py", *args],
                          capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_slow_books_as_a_script():
    done = script("--workers", "2", "--wait", "0.0001")
    assert done.returncode == 0 and done.stdout.startswith("2 workers: ")
    for bad in (["--workers", "-1"], ["--wait", "nan"], ["--compute", "x"], ["--speed", "1"]):
        done = script(*bad)
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and not done.stdout
