"""05.5: a check of the learner's own, on made-up hosts and on real ones."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import tempfile
from pathlib import Path

from .... import cluster as clusters
from .... import doctor
from ....doctor.checks import CHECKS
from ....doctor.registry import Check, Host, judge
from ...bench import Bench
from ...verdict import Wrong
from . import parts

FOLDER = "/mnt/local scratch"
NEEDED = 40_000_000 * 1024  # bytes: 41 GB
TOTAL = 900_000_000  # KiB, of a made-up disk
SMALL, LARGE = "8m", "256m"  # of a real tmpfs; only a limit, no memory is used
REALLY_NEEDED = 64 << 20

# A df of a made-up host. It prints what POSIX says of `df -Pk`, and no other form of it.
DF = """#!/bin/sh
flags=; last=
for word in "$@"; do
    case $word in -*) flags="$flags$word";; *) last=$word;; esac
done
case $flags in
*P*k*|*k*P*) ;;
*) echo "df: these made-up hosts know df -Pk FOLDER only" >&2; exit 64;;
esac
[ "$last" = {folder} ] || {{ echo "df: '$last': No such file or directory" >&2; exit 1; }}
{body}
"""
TABLE = """cat <<'END'
Filesystem     1024-blocks      Used Available Capacity Mounted on
/dev/nvme1n1p1   {total} {used} {free}      90% {folder}
END"""
# What the made-up hosts have: (name, KiB free or why it is unknown, what the check must say)
HOSTS = (
    ("plenty", 700_000_000, "pass"),
    ("enough", NEEDED // 1024, "pass"),
    ("short", NEEDED // 1024 - 1, "fail"),
    ("no-such-folder", "missing", "skip"),
    ("full", 0, "fail"),
    ("joined", "joined", "skip"),
    ("hangs", "hangs", "skip"),
    ("last", 500_000_000, "pass"),
)


def _made_up(where: Path) -> list[Host]:
    hosts = []
    for i, (name, free, _) in enumerate(HOSTS):
        hosts.append(Host(name, f"10.1.0.{i + 1}", run=None if free == "joined" else
                          _runner(where, name, free)))  # fmt: skip
    return hosts


def _runner(where: Path, name: str, free):
    """How a command runs on a made-up host: in a real shell, with a df of its own."""
    folder = where / name
    folder.mkdir()
    body = "echo \"df: '$last': No such file or directory\" >&2; exit 1"
    if isinstance(free, int):
        # 5 % of a disk is kept for root: free is less than all less used
        body = TABLE.format(total=TOTAL, used=int(TOTAL * 0.95) - free, free=free, folder=FOLDER)
    (folder / "df").write_text(DF.format(folder=shlex.quote(FOLDER), body=body))
    (folder / "df").chmod(0o755)

    def run(command: str, timeout: float):
        if free == "hangs":
            raise doctor.NotChecked(f"`{command}` took more than {timeout:g} s")
        env = {**os.environ, "PATH": f"{folder}:{os.environ.get('PATH', os.defpath)}"}
        return subprocess.run(["/bin/sh", "-c", command], env=env, text=True, capture_output=True,
                              timeout=timeout)  # fmt: skip

    return run


def judge_own_check(bench: Bench, answer) -> str:
    parts.tried(bench, _on_made_up_hosts, answer)
    on = parts.tried(bench, _on_real_hosts, answer)
    return (f"right on {len(HOSTS)} made-up hosts, and not checked where it cannot be known; as a "
            f"part of the doctor {on}")  # fmt: skip


def _made(answer, folder: str, needed: int) -> Check:
    check = parts.call(answer, folder, needed, where="make_check")
    if not isinstance(check, Check):
        kind = "a plain function" if callable(check) else f"{check!r:.60}"
        raise Wrong(f"make_check returns {kind}; return the check: a function under "
                    '@doctor.check("a name", each=True)')  # fmt: skip
    if check.name in {c.name for c in CHECKS}:
        raise Wrong(f"the doctor has a check {check.name!r} already; give yours another name")
    return check


def _on_made_up_hosts(answer) -> None:
    check = _made(answer, FOLDER, NEEDED)
    with tempfile.TemporaryDirectory(prefix="scalelab-") as name:
        hosts = _made_up(Path(name))
        found = parts.call(judge, [check], doctor.Seen(hosts), where="made-up hosts")
    broken = [f for f in found if f.detail.startswith("this check itself failed")]
    if broken:
        _say_broken(broken[0])
    if not check.each and any(f.status == "skip" and f.where is None for f in found):
        raise Wrong("one host where df tells nothing, and the check says nothing of any host: with "
                    "each=True it is called once a host, and NotChecked concerns that one "
                    "alone")  # fmt: skip
    said = {f.where.name: f.status for f in found if f.where in hosts}
    if [said.get(name) for name in ("plenty", "short", "full")] == ["fail", "pass", "pass"]:
        raise Wrong("upside down: the hosts with too little pass, and the one with plenty fails")
    for host, (_, free, want) in zip(hosts, HOSTS):
        mine = [f for f in found if f.where is host]
        _judge_host(host.name, free, want, mine)
    extra = [f for f in found if not isinstance(f.where, Host)]
    if extra:
        raise Wrong(f"a finding is about {extra[0].where!r:.60}; give it the host: "
                    "doctor.fail(host, …)")  # fmt: skip


def _say_broken(finding) -> None:
    where = f"on host {finding.where.name}" if finding.where else "with several hosts"
    words = finding.detail.partition(": ")[2]
    if "not iterable" in words:
        raise Wrong(f"{where}: {words}: a check yields its findings (yield doctor.ok(…)), or "
                    "returns a list of them")  # fmt: skip
    if finding.where and finding.where.name == "no-such-folder":
        raise Wrong(f"{where} df ends with an error and prints no table: {words}. Look at "
                    "returncode, and raise doctor.NotChecked with what df said")  # fmt: skip
    if words.startswith("FileNotFoundError"):
        raise Wrong(f"{where} {words}: it looks at this machine, where the doctor was started; "
                    "host.sh runs a command on the host")  # fmt: skip
    raise Wrong(f"{where} the check itself fails: {words}")


def _judge_host(name: str, free, want: str, mine) -> None:
    facts = f"{free:,} KiB free of {NEEDED // 1024:,} needed" if isinstance(free, int) else {
        "missing": "df says: No such file or directory", "joined": "runs no commands for others",
        "hangs": "df does not come to its end"}[free]  # fmt: skip
    where = f"host {name} ({facts})"
    if not mine:
        raise Wrong(f"{where}: nothing is said of it; of a check that passes, too, say so "
                    "(doctor.ok), or nobody knows that it was looked at")  # fmt: skip
    if len(mine) > 1:
        raise Wrong(f"{where}: {len(mine)} findings; one a host")
    got = mine[0]
    if want == "skip" and got.status == "pass":
        raise Wrong(f"{where}: counted as good, and nobody knows: raise doctor.NotChecked with the "
                    "reason")  # fmt: skip
    if want == "skip" and got.status != "skip":
        raise Wrong(f"{where}: blamed for what nobody knows: raise doctor.NotChecked with the "
                    "reason")  # fmt: skip
    if got.status == "skip" and "df -Pk FOLDER only" in got.detail:
        raise Wrong("these made-up hosts know df -Pk FOLDER and no other form of it: it is the one "
                    "that prints the same on every system")  # fmt: skip
    if got.status == "skip" and want != "skip":
        blank = ""
        if "scratch'" in got.detail and FOLDER not in got.detail:
            blank = f". shlex.quote keeps the shell from parting {FOLDER!r} at its blank"
        raise Wrong(f"{where}: not checked, “{got.detail:.80}”, though its df answers{blank}")
    if got.status == "skip" and not got.detail.strip():
        raise Wrong(f"{where}: not checked, and no reason: NotChecked(why)")
    if got.status == "warn" and want == "fail":
        raise Wrong(f"{where}: a warning; a job that runs out of space dies, so it is a fail")
    if got.status != want:
        raise Wrong(f"{where}: {got.status} where it is {want}{_why(name, want)}")
    if want == "fail" and not str(got.fix).strip():
        raise Wrong(f"{where}: no fix; say in one line what to do")


def _why(name: str, want: str) -> str:
    if name == "plenty":
        return ". df -k counts in KiB of 1024 bytes, `needed` is in bytes"
    if name == "enough":
        return ". Exactly as much as is needed is enough; and a KiB is 1024 bytes"
    if name == "short" and want == "fail":
        return (". It lacks 1 KiB. Is it the column Available that you read, in units of 1024 "
                "bytes?")  # fmt: skip
    return ""


def _on_real_hosts(answer) -> str:
    if parts.why_not():
        return _on_this_machine(answer)
    with parts.folder() as path, clusters.start("virtual", 2) as c:
        disk = path / "local scratch"
        disk.mkdir()
        check = _made(answer, str(disk), REALLY_NEEDED)
        bad = random.randrange(2)
        for node in c.nodes:
            size = SMALL if node.index == bad else LARGE
            _mount(node, f"-t tmpfs -o size={size} tmpfs", disk)
        report = doctor.examine(c, checks=[check], without=["matmul"])
        want = {n.name: "fail" if n.index == bad else "pass" for n in c.nodes}
        _compare(report, check, want, f"node{bad} has {SMALL} there, the other {LARGE}")
        _mount(c.node(bad), f"-o remount,size={LARGE}", disk)
        report = doctor.examine(c, checks=[check], without=["matmul"])
        _compare(report, check, dict.fromkeys(want, "pass"), f"both have {LARGE} now")
    return f"it blamed the one of two emulated hosts that had {SMALL}, and neither once mended"


def _mount(node, what: str, folder: Path) -> None:
    done = node.sh(f"mount {what} {shlex.quote(str(folder))}", timeout=20)
    if done.returncode:
        raise RuntimeError(f"{node.name}: mount {what}: {done.stderr.strip()}")


def _on_this_machine(answer) -> str:
    with parts.folder() as path, clusters.start("local", 2) as c:
        for needed, want in ((1, "pass"), (10**18, "fail")):
            check = _made(answer, str(path), needed)
            report = doctor.examine(c, checks=[check], without=["matmul"])
            _compare(report, check, {n.name: want for n in c.nodes}, f"{needed} bytes needed")
    return "it passed this machine's disk, and failed it where 10**18 bytes were needed"


def _compare(report, check: Check, want: dict[str, str], where: str) -> None:
    got = {f.node: f.status for f in report.findings if f.name == check.name}
    if got != want:
        details = "; ".join(f"{f.node}: {f.detail:.80}" for f in report.findings
                            if f.name == check.name)  # fmt: skip
        raise Wrong(f"in the doctor, on real hosts ({where}): {got} where it is {want}. "
                    f"{details}")  # fmt: skip
