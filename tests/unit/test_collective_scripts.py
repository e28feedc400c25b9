"""The scripts of lesson 02: short, plain, and they say how to start them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "notebooks" / "scripts"
NAMES = ["show_ranks.py", "collectives.py", "ring_and_tree.py", "wrong.py"]


def python(*args):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    return subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True,
                          timeout=60, env=env)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_short_and_plain(name):
    source = (SCRIPTS / name).read_text()
    assert len(source.splitlines()) <= 150
    for node in ast.walk(ast.parse(source)):
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else (
            [node.module] if isinstance(node, ast.ImportFrom) else [])  # fmt: skip
        for module in modules:
            root = module.split(".")[0]
            assert root == "torch" or root in sys.stdlib_module_names, module


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_help_and_a_start_without_torchrun(name):
    helped = python(SCRIPTS / name, "--help")
    assert helped.returncode == 0 and "usage" in helped.stdout
    alone = python(SCRIPTS / name, *(["mended"] if name == "wrong.py" else []))
    assert alone.returncode == 2 and "torchrun --nproc-per-node" in alone.stderr
    assert len(alone.stderr.splitlines()) == 1 and "Traceback" not in alone.stderr


def test_an_unknown_case_is_one_line():
    done = python(SCRIPTS / "wrong.py", "nonsense")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
