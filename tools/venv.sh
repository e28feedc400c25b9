#!/bin/sh
# Makes or mends .venv: `sh tools/venv.sh learner` or `... author`. Says nothing and takes no time where
# nothing has changed; where something is missing, says so in one line.
#   PYTHON    the interpreter to use           PIP_ARGS  more arguments for pip install
#   NEED_GB   free disk to ask for (default 4)
set -eu
cd "$(dirname "$0")/.."
here=$(pwd -P)
case "${1:-}" in
    learner) list=requirements.txt ;;
    author) list=requirements-dev.txt ;;
    *) echo "usage: sh tools/venv.sh learner|author" >&2; exit 2 ;;
esac

stop() { echo "ScaleLab: $*" >&2; exit 1; }

# "3.11", or nothing where it does not run (a name on the PATH can be a shim for a version that is not there)
version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

suits() { case "$1" in 3.10 | 3.11 | 3.12 | 3.13) return 0 ;; *) return 1 ;; esac; }

choose_python() {
    if [ -n "${PYTHON:-}" ]; then set -- "$PYTHON"; else set -- python3 python3.13 python3.12 python3.11 python3.10; fi
    found="" ; bare=""
    for candidate; do
        v=$(version "$candidate")
        if [ -z "$v" ]; then continue
        elif ! suits "$v"; then found="${found:+$found, }$candidate is $v"
        elif ! "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then bare=$candidate
        else python=$candidate; return
        fi
    done
    [ -z "$bare" ] || stop "$bare has no venv module: on Debian or Ubuntu run apt-get install python3-venv, elsewhere install a full Python."
    stop "needs Python 3.10 to 3.13, but ${found:-found none${PYTHON:+ at $PYTHON}}. Install one, or name it: make lab PYTHON=/path/to/python3.12"
}

# A .venv serves if it runs, has a fitting Python, and still lies where it was made (pip writes its full path).
serves() {
    [ -x .venv/bin/python ] && [ -f .venv/bin/pip ] || return 1
    v=$(version .venv/bin/python)
    suits "$v" || return 1
    [ -z "${PYTHON:-}" ] || [ "$(version "$PYTHON")" = "$v" ] || return 1
    head -n 3 .venv/bin/pip | grep -qF "$here/.venv/bin/"
}

# What is installed depends on these files alone; an author's .venv serves a learner too.
key=$(cat requirements.txt requirements-dev.txt pyproject.toml tools/venv.sh | cksum)
stamped() { [ -f ".venv/.scalelab-$1" ] && [ "$(cat ".venv/.scalelab-$1")" = "$key" ]; }
if serves; then
    if stamped author || stamped "$1"; then exit 0; fi
else
    choose_python
    need=${NEED_GB:-4}
    free_kb=$(df -Pk . | awk 'NR == 2 { print $4 }')
    [ "$free_kb" -ge $((need * 1024 * 1024)) ] ||
        stop "the disk is too full: PyTorch and JupyterLab need about $need GB, and $here has $((free_kb / 1024)) MB free."
    echo "ScaleLab: making .venv with $python ($(version "$python"))"
    "$python" -m venv --clear .venv || stop "could not make .venv here: see above."
fi

echo "ScaleLab: installing $list into .venv (a few minutes the first time)"
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
quiet=""
[ -t 1 ] || quiet=-q
# shellcheck disable=SC2086  # PIP_ARGS is several words
pip install $quiet ${PIP_ARGS:-} -r "$list" || stop "pip could not install $list: see above."
# torch has brought setuptools, so the package itself needs no download; a fresh one is tried where that fails
pip install -q --no-deps --no-build-isolation -e . 2>/dev/null || pip install -q --no-deps -e . ||
    stop "pip could not install the package scalelab itself: see above."
printf '%s\n' "$key" > ".venv/.scalelab-$1"
