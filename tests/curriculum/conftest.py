"""A tiny curriculum, built once a session; each test gets a copy of its own to spoil."""

import os
import shutil
from pathlib import Path

import pytest

import build

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="session")
def built_once(tmp_path_factory):
    root = tmp_path_factory.mktemp("curriculum") / "tree"
    shutil.copytree(FIXTURES, root)
    assert build.main(["--root", str(root)]) == 0
    return root


@pytest.fixture
def tree(built_once, tmp_path):
    return Path(shutil.copytree(built_once, tmp_path / "tree"))


@pytest.fixture
def kernel_env(tmp_path):
    """The environment that a notebook under test runs in."""
    env = dict(os.environ, OMP_NUM_THREADS="1", SCALELAB_HOME=str(tmp_path / "home"))
    # ipykernel stops capturing what child processes print where it sees this
    env.pop("PYTEST_CURRENT_TEST", None)
    env.pop("PYTEST_ADDOPTS", None)
    return env
