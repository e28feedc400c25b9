"""For every test: nothing is left running, and the last line counts ran, failed and skipped."""

import os
import time
import uuid
from collections import Counter

import psutil
import pytest

# Everything the tests start inherits this, so that a process whose parent died is still found.
TAG = "SCALELAB_TEST_SESSION"
SECONDS_TO_END = 5
MARK = uuid.uuid4().hex
left_behind: list[str] = []
skipped: Counter = Counter()


def pytest_sessionstart():
    # appended: a session inside a test's subprocess also stays marked as ours
    os.environ[TAG] = f"{os.environ.get(TAG, '')} {MARK}".strip()


def leftovers() -> list[psutil.Process]:
    me = psutil.Process()
    found = {p.pid: p for p in me.children(recursive=True)}
    for process in psutil.process_iter():
        try:
            if MARK in process.environ().get(TAG, "").split():
                found[process.pid] = process
        except (psutil.Error, OSError):  # gone meanwhile, or another user's
            continue
    found.pop(me.pid, None)
    return [p for p in found.values() if is_left(p, me)]


def is_left(process: psutil.Process, me: psutil.Process) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # Python's own helper of multiprocessing in this very process ends with it
        ours = process.ppid() == me.pid
        return not (ours and "multiprocessing.resource_tracker" in " ".join(process.cmdline()))
    except psutil.Error:
        return False


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    end = time.monotonic() + SECONDS_TO_END
    while (left := leftovers()) and time.monotonic() < end:
        time.sleep(0.1)
    for process in left:
        try:
            left_behind.append(f"{process.pid} {' '.join(process.cmdline())[:150]}")
            process.kill()
        except psutil.Error:
            continue
    if left_behind:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_runtest_logreport(report):
    if report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.wasxfail
        skipped[reason.removeprefix("Skipped: ")] += 1


def pytest_collectreport(report):  # a whole module can be skipped
    if report.skipped and isinstance(report.longrepr, tuple):
        skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config):
    """Printed after pytest's own closing line, so that it is the last."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return
    for line in left_behind:
        print(f"LEFT RUNNING by the tests (ended now): {line}")
    for reason, count in skipped.most_common():
        print(f"skipped {count}: {reason}")
    count = {key: len(reporter.stats.get(key, ())) for key in ("passed", "failed", "error")}
    failed = count["failed"] + count["error"] + len(left_behind)
    print(f"total: {count['passed']} passed, {failed} failed, {sum(skipped.values())} skipped")
