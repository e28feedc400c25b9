# `make help` lists what there is. Every target does its own set-up and is quick the second time.
export PYTHON PIP_ARGS NEED_GB
SHELL := /bin/sh
PY := .venv/bin/python
FIRST := notebooks/00_start_here.ipynb
# JupyterLab refuses to run as root unless told; a container often is nothing else. The token stays on.
ROOT_ARG := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help venv venv-author lab test quick build bench lint clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-7s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'variables: PYTHON=/path/to/python3.12  PIP_ARGS="..."  LAB_ARGS="--no-browser --port 8899"'
	@echo '           NAMES="00_start_here" (build)  TEST_ARGS="-k name" (test, quick, bench)'

venv:  ## make .venv and install what a learner needs
	@sh tools/venv.sh learner

venv-author:
	@sh tools/venv.sh author

# A notebook that came with the clone is trusted: `make lab` runs its code anyway, and an untrusted
# one shows a still picture in place of a panel after a reload.
lab: venv  ## open JupyterLab on lesson 00 (LAB_ARGS go to jupyter-lab)
	@.venv/bin/jupyter-trust notebooks/*.ipynb $(wildcard labs/*.ipynb) >/dev/null 2>&1 || true
	@exec .venv/bin/jupyter-lab --ServerApp.root_dir="$(CURDIR)" --LabApp.default_url=/lab/tree/$(FIRST) \
		$(ROOT_ARG) $(LAB_ARGS)

test: venv-author  ## every test: lint, build --check, unit, curriculum, browser
	@$(PY) -m pytest $(TEST_ARGS)

quick: venv-author  ## fast unit tests, lint and build --check, in under three minutes
	@$(PY) -m pytest -m "not slow" tests/unit tests/curriculum/test_repository.py $(TEST_ARGS)

build: venv-author  ## build notebooks, labs and solutions from source/ (NAMES="..." for some)
	@$(PY) tools/build.py $(NAMES)

bench: venv-author  ## measure what must be fast
	@$(PY) -m pytest -s -o python_files="bench_*.py" tests/bench $(TEST_ARGS)

lint: venv-author  ## ruff
	@$(PY) -m ruff check .

clean:  ## remove caches and test leftovers in this folder (remove .venv by hand)
	@rm -rf .pytest_cache .ruff_cache build
	@find . -name .venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +
