"""What the doctor finds of data and shared directories, wrong states first. The hosts' turns on a
shared directory are taken for real, by processes of their own on directories of this machine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from host_facts import is_fine, seen, verdicts, worst

from scalelab.doctor.checks import data as data_check
from scalelab.doctor.checks import shared
from scalelab.doctor.registry import NotChecked, judge
from scalelab.doctor.shared_ops import PREFIX, SharedOps, bounded, mount_of

# data


def folder(at: Path, files) -> str:
    at.mkdir(parents=True, exist_ok=True)
    for name, text in files:
        place = at / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return str(at)


FILES = [(f"part-{i}", f"{i}" * 40) for i in range(6)]


def looked(at):
    return data_check.data({"data": [str(at)]})[str(at)]


def data_seen(*values):
    return seen("data", *({"/d": v} for v in values), data=["/d"])


@pytest.fixture
def right(tmp_path):
    return looked(folder(tmp_path / "right", FILES))


def test_the_data_probe_sees_files_below_and_behind_links(tmp_path):
    at = Path(folder(tmp_path / "d", [("a", "12"), ("sub/b", "345"), (f"{PREFIX}x-y", "")]))
    (at / "loop").symlink_to(at)
    (at / "nowhere").symlink_to(at / "gone")
    facts = looked(at)
    assert (facts["files"], facts["whole"], facts["barred"]) == (3, True, [])
    assert ["sub/b", 3] in facts["listing"] and ["nowhere", -1] in facts["listing"]
    json.dumps(facts)
    assert looked(at / "a")["files"] == 1  # a file instead of a directory
    assert looked(at / "missing")["error"]["errno"] == "ENOENT"


def test_data_is_counted_no_longer_than_its_time(tmp_path):
    facts = data_check.examine(folder(tmp_path / "d", FILES), time.monotonic() - 1)
    assert not facts["whole"]
    (finding,) = judge([data_check.same_data], data_seen(facts))
    assert finding.status == "skip" and "not checked further" in finding.detail


def test_data_missing_on_one_host(right, tmp_path):
    what = data_seen(right, looked(tmp_path / "none"))
    finding = worst(data_check.same_data, what)
    assert (finding.status, finding.node) == ("fail", "node1")
    assert "does not exist here" in finding.detail and "rsync -a node0:" in finding.fix


def test_data_missing_everywhere_is_one_line(tmp_path):
    gone = looked(tmp_path / "none")
    assert verdicts(data_check.same_data, data_seen(gone, gone)) == [("fail", None)]


def test_fewer_files_on_one_of_three(right, tmp_path):
    fewer = looked(folder(tmp_path / "fewer", FILES[:-2]))
    what = data_seen(right, right, fewer)
    finding = worst(data_check.same_data, what)
    assert (finding.status, finding.node) == ("fail", "node2")
    assert "4 files" in finding.detail and "part-4" in finding.detail


def test_of_two_hosts_with_other_files_neither_is_blamed(right, tmp_path):
    fewer = looked(folder(tmp_path / "fewer", FILES[:-1]))
    (finding,) = judge([data_check.same_data], data_seen(right, fewer))
    assert finding.status == "fail" and finding.hosts == ("node0", "node1")
    assert "5 files" in finding.detail and "6 files" in finding.detail


def test_other_contents_of_one_size(right, tmp_path):
    other = looked(folder(tmp_path / "other", [*FILES[:-1], ("part-5", "x" * 40)]))
    finding = worst(data_check.same_data, data_seen(right, right, other))
    assert (finding.status, finding.node) == ("fail", "node2")
    assert "other contents" in finding.detail and "part-5" in finding.detail


def test_another_order_of_the_same_files(right):
    turned = {**right, "order": "other", "first": right["first"][::-1]}
    finding = worst(data_check.same_data, data_seen(right, right, turned))
    assert (finding.status, finding.node) == ("warn", "node2")
    assert "another order" in finding.detail and "sorted(" in finding.fix


def test_an_empty_silent_or_barred_path(right, tmp_path):
    for odd, words in (
        (looked(folder(tmp_path / "empty", [])), "holds no file"),
        ({"silent": True}, "does not answer"),
        ({**right, "barred": ["part-1"]}, "may not read 1 entries"),
        ({"error": {"errno": "EACCES", "words": "Permission denied"}, "me": "7"}, "as uid 7"),
    ):
        finding = worst(data_check.same_data, data_seen(right, odd))
        assert (finding.status, finding.node) == ("fail", "node1") and words in finding.detail


def test_what_was_said_of_the_shared_directory_is_not_said_again(right, tmp_path):
    missing = {"errno": "ENOENT", "words": "No such file or directory"}
    what = data_seen(right, right, {"error": missing, "me": "7"})
    what.shared = ["/d"]
    for i, host in enumerate(what.hosts):
        found = {**HERE, "rename": {"renames": 1}} if i < 2 else {"enter": {"error": missing}}
        host.facts["shared"] = {"value": {"/d": found}}
    assert worst(shared.shared_directory, what).node == "node2"
    assert verdicts(data_check.same_data, what)[0] == ("skip", "node2")
    what.shared = ["/elsewhere"]
    assert verdicts(data_check.same_data, what)[0] == ("fail", "node2")


def test_equal_data_is_fine(right, tmp_path):
    copy = looked(shutil.copytree(tmp_path / "right", tmp_path / "copy"))
    copy["order"] = right["order"]  # two directories may list in two orders
    is_fine(data_check.same_data, data_seen(right, copy))
    assert verdicts(data_check.same_data, seen("data", {}, data=[])) == [("skip", None)]


# shared directory: the steps for real, an agent a process, since a lock belongs to a process

AGENT = """
import json, sys
from scalelab.doctor.shared_ops import SharedOps
ops = SharedOps({"name": sys.argv[1]})
for line in sys.stdin:
    op, args = json.loads(line)
    print(json.dumps(getattr(ops, "op_" + op)(**args)), flush=True)
ops.close()
"""


class Agents:
    """Stands in for the engine: `ask` as the exchange calls it."""

    def __init__(self, names, alias=None):
        self.alias = alias or {}
        self.processes = {
            n: subprocess.Popen([sys.executable, "-c", AGENT, n], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, text=True)
            for n in names
        }  # fmt: skip

    def ask(self, host, op, limit=None, **args):
        agent, alias = self.processes[host.name], self.alias.get(host.name, {})

        class Answer:
            @staticmethod
            def result():
                if agent.poll() is not None:
                    raise NotChecked("its doctor has gone")
                return json.loads(agent.stdout.readline())

        args["path"] = alias.get(args["path"], args["path"])
        if agent.poll() is None:
            agent.stdin.write(json.dumps([op, args]) + "\n")
            agent.stdin.flush()
        return Answer

    def close(self):
        for agent in self.processes.values():
            agent.stdin.close()
            agent.wait(10)
            agent.stdout.close()


def walked(path, *others, nodes=2):
    """A Seen after the hosts' turns on `path`; the last hosts see `others` there instead."""
    what = seen("shared", *[{}] * nodes, shared=[str(path)])
    alias = {f"node{nodes - 1 - i}": {str(path): str(o)} for i, o in enumerate(others)}
    agents = Agents([h.name for h in what.hosts], alias)
    try:
        shared.exchange(what, agents.ask, time.monotonic() + 30)
    finally:
        agents.close()
    assert what.broken == []
    return what


def test_one_directory_is_fine_and_nothing_is_left_in_it(tmp_path):
    (tmp_path / "mine").write_text("kept")
    what = walked(tmp_path, nodes=3)
    is_fine(shared.shared_directory, what)
    here = [h.facts["shared"]["value"][str(tmp_path)] for h in what.hosts]
    assert here[0]["lock"]["got"] and not here[1]["lock"]["got"]
    assert here[0]["rename"]["renames"] > 3 and here[2]["read"]["reads"] > 3
    assert os.listdir(tmp_path) == ["mine"]


@pytest.mark.slow
def test_two_directories_of_one_name(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    three = walked(tmp_path / "a", tmp_path / "b", nodes=3)
    finding = worst(shared.shared_directory, three)
    assert (finding.status, finding.node) == ("fail", "node2")
    assert "not one directory" in finding.detail
    two = walked(tmp_path / "a", tmp_path / "b")
    assert worst(shared.shared_directory, two).hosts == ("node0", "node1")
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def test_a_path_that_is_missing_or_a_file(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "file").write_text("")
    for other, words in (("none", "does not exist"), ("file", "is a file")):
        what = walked(tmp_path / "a", tmp_path / other)
        finding = worst(shared.shared_directory, what)
        assert (finding.status, finding.node) == ("fail", "node1") and words in finding.detail
    what = walked(tmp_path / "none")
    assert verdicts(shared.shared_directory, what) == [("fail", None)]


def test_only_own_old_files_are_swept(tmp_path):
    old, new = tmp_path / f"{PREFIX}dead-node0", tmp_path / f"{PREFIX}alive-node0"
    theirs = tmp_path / "theirs"
    for file in (old, new, theirs):
        file.write_text("")
    for file in (old, theirs):
        os.utime(file, (0, 0))
    walked(tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([new.name, "theirs"])


def test_an_agent_killed_midway_leaves_nothing(tmp_path):
    agents = Agents(["node0", "node1"])
    what = seen("shared", {}, {}, shared=[str(tmp_path)])
    begun = []

    def ask(host, op, limit=None, **args):
        answer = agents.ask(host, op, limit, **args)
        if op == "shared_look" and not begun:
            begun.append(os.listdir(tmp_path))
            agents.processes["node1"].kill()
            agents.processes["node1"].wait()
        return answer

    try:
        shared.exchange(what, ask, time.monotonic() + 20)
    finally:
        agents.close()
    assert len(begun[0]) == 2  # there were files
    assert os.listdir(tmp_path) == []


def test_a_request_that_outlives_the_examination_makes_no_file(tmp_path, monkeypatch):
    """Ctrl-C, while a thread is about to write."""
    ops, go, on = SharedOps({"name": "node0"}), threading.Event(), threading.Event()
    really = os.statvfs

    def slow(path):
        on.set()
        go.wait(20)
        return really(path)

    monkeypatch.setattr(os, "statvfs", slow)
    late = threading.Thread(target=ops.op_shared_enter, args=(str(tmp_path), "t", 20))
    late.start()
    assert on.wait(20)
    ops.close()
    go.set()
    late.join(20)
    assert os.listdir(tmp_path) == []
    for what in (ops.op_shared_lock, lambda *a: ops.op_shared_rename(*a, 0)):
        what(str(tmp_path), "t", 5)
        assert os.listdir(tmp_path) == []
    ops = SharedOps({"name": "node0"})  # sent away from one directory, it works on in others
    assert ops.op_shared_enter(str(tmp_path), "t", 5)["written"]
    ops.op_shared_leave(str(tmp_path), "t", 5)
    assert "error" in ops.op_shared_rename(str(tmp_path), "t", 5, 0)
    assert ops.op_shared_enter(str(tmp_path), "u", 5)["written"]
    ops.close()
    assert os.listdir(tmp_path) == []


def test_what_hangs_is_left_alone(tmp_path):
    with pytest.raises(TimeoutError):
        bounded(time.sleep, 0.05, 1)
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, 1)
    ops = SharedOps({"name": "node0"})
    ops._enter = lambda *_: time.sleep(1)
    assert ops.op_shared_enter(str(tmp_path), "t", 0.05) == {"silent": True}
    began = time.monotonic()
    assert ops.op_shared_list(str(tmp_path), "t", 5) == {"silent": True}
    assert time.monotonic() - began < 0.5


def test_a_file_that_is_not_whole_is_noticed(tmp_path):
    ops, at = SharedOps({"name": "node0"}), str(tmp_path)
    whole = tmp_path / f"{PREFIX}t-whole"
    assert ops.op_shared_read(at, "t", 5, 0.02)["absent"] > 0
    ops.op_shared_rename(at, "t", 5, 0)
    count = ops.op_shared_read(at, "t", 5, 0.02)
    assert count["reads"] > 0 and count["absent"] == count["torn"] == 0
    data = whole.read_bytes()
    for torn in (data[:-16], data[:-16] + b"%015d\n" % 2, b""):
        whole.write_bytes(torn)
        assert ops.op_shared_read(at, "t", 5, 0.02)["torn"] > 0
    assert ops.op_shared_leave(at, "t", 5) == {"left": []} and os.listdir(at) == []


def test_the_mount_that_holds_a_path(tmp_path):
    table = tmp_path / "mounts"
    table.write_text(
        "/dev/a / ext4 rw 0 0\nsrv:/x /data nfs4 rw 0 0\n/dev/b /data/my\\040disk xfs ro,x 0 0\n"
    )
    assert mount_of("/data/set", str(table))["type"] == "nfs4"
    assert mount_of("/database", str(table))["type"] == "ext4"
    inner = mount_of("/data/my disk/x", str(table))
    assert (inner["type"], inner["readonly"]) == ("xfs", True)
    assert mount_of("/", str(tmp_path / "none")) == {}


ENTER = {
    "mount": {"type": "nfs4", "source": "s:/x", "at": "/s", "readonly": False},
    "me": {"uid": 7, "user": "7 (ann)"}, "directory": True, "owner": "0 (root)", "mode": "755",
    "space": {"free": 10**12, "total": 10**13, "files free": 10**6, "files": 10**7},
    "written": True, "squashed": False, "file owner": "7 (ann)",
}  # fmt: skip
HERE = {
    "enter": ENTER, "look": {"seen": ["node0", "node1", "node2"], "unreadable": []},
    "list": {"count": 2, "hash": "h", "names": ["a", "b"]}, "lock": {"got": False},
}  # fmt: skip
READ = {"reads": 90, "absent": 0, "torn": 0, "stale": 2}


def not_written(name, **change):
    error = {"errno": name, "words": f"words of {name}"}
    return {"enter": {k: v for k, v in {**ENTER, **change, "write_error": error}.items()
                      if k != "written"}}  # fmt: skip


def space(**change):
    return {"enter": {**ENTER, "space": {**ENTER["space"], **change}}}


@pytest.mark.parametrize(
    "odd, status, words, fix",
    [
        ({"enter": {"mount": ENTER["mount"]}, "silent": 5.0}, "fail", "does not answer within 5 s",
         "/proc/mounts"),
        (not_written("EROFS"), "fail", "mounted read-only here", "remount,rw /s"),
        (not_written("EACCES"), "fail", "uid 7 (ann) cannot write", "setfacl -m u:7:rwx /s"),
        (not_written("EACCES", me={"uid": 0, "user": "0 (root)"}), "fail", "squashed", "run as"),
        (not_written("EDQUOT"), "fail", "words of EDQUOT", "quota"),
        (not_written("EIO"), "fail", "words of EIO", "mount"),
        ({"look": {"seen": ["node0", "node1"], "unreadable": ["node2"]}}, "fail",
         "cannot read what node2 writes", "umask"),
        ({"look": {"lost": "gone"}, "silent": 5.0}, "fail", "stopped answering", "server"),
        (space(free=0), "fail", "0 B free of 10.0 TB", "df -h"),
        (space(free=5 * 10**7), "fail", "50 MB free", "df -h"),
        (space(free=5 * 10**7, total=10**8), "warn", "50 MB free of 100 MB", "make room"),
        (space(**{"files free": 0}), "fail", "0 more files", "df -i"),
        ({"enter": {**ENTER, "squashed": True, "file owner": "65534 (nobody)"}}, "warn",
         "belong to uid 65534", "no_root_squash"),
        ({"read": {**READ, "absent": 3}}, "fail", "3 times absent", "barrier"),
        ({"read": {**READ, "torn": 1}}, "fail", "1 times torn", "barrier"),
        ({"list": {"count": 1, "hash": "x", "names": ["a"]}}, "warn", "differ in b", "broadcast"),
        ({"lock": {"got": True}}, "warn", "node0 had locked", "rank 0"),
        ({"lock": {"got": False, "error": {"errno": "ENOLCK", "words": "No locks"}}}, "warn",
         "locks do not work", "rank 0"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_shared_directory_is_named(odd, status, words, fix):
    first = {**HERE, "rename": {"renames": 9}, "lock": {"got": True}}
    fine = {**HERE, "read": READ}
    facts = [first, {**fine, **odd}, fine]
    what = seen("shared", *({"/s": f} for f in facts), shared=["/s"])
    finding = worst(shared.shared_directory, what)
    assert (finding.status, finding.node) == (status, "node1")
    assert words in finding.detail and fix in finding.fix
    is_fine(shared.shared_directory, seen("shared", *({"/s": f} for f in (first, fine, fine)),
                                          shared=["/s"]))  # fmt: skip


def test_a_shared_directory_that_was_not_asked_about_or_not_looked_at():
    assert verdicts(shared.shared_directory, seen("shared", {})) == [("skip", None)]
    what = seen("shared", {}, {"/s": HERE}, shared=["/s"])
    assert ("skip", "node0") in verdicts(shared.shared_directory, what)
