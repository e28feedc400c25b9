"""04.5: does an nccl-tests output support what is claimed about it?"""

from __future__ import annotations

from ...bench import Bench
from ...verdict import Wrong
from .parts import number, tried
from .reports import reports, top


def judge_claims(bench: Bench, answer) -> str:
    asked = [r for seed in (4, 5) for r in reports(seed)]
    found = tried(bench, answer, [(dict(r.claim), r.text) for r in asked])
    said = []
    for r, f in zip(asked, found):
        if "error" in f:
            raise Wrong(f"{_where(r)}: {f['error']}")
        said.append(_read(r, f["got"]))
    _judge_believer(asked, said)
    for r, (_, jobs) in zip(asked, said):
        if jobs != list(r.jobs):
            _say_jobs(r, jobs)
    _judge_alike(asked, said)
    for r, (supported, _) in zip(asked, said):
        if supported != r.supported:
            verb = "does not support" if supported else "supports"
            more = f". {_figures(r)}" if r.supported else ""
            raise Wrong(f"{_where(r)}: the output {verb} it. {r.why[0].upper()}{r.why[1:]}{more}")
    good = sum(r.supported for r in asked)
    return (f"{len(asked)} reports read right, {good} that hold and {len(asked) - good} that do "
            "not, each with its jobs")  # fmt: skip


def _where(r) -> str:
    c = r.claim
    return f'{r.name} ("{c["ranks"]} ranks on {c["nodes"]} nodes, busbw {c["busbw"]:g} GB/s")'


def _read(r, got):
    """(supported, sorted jobs) of what an answer returned."""
    try:
        given, jobs = got
        jobs = sorted((_count(ranks), _count(nodes)) for ranks, nodes in jobs)
    except (TypeError, ValueError):
        raise Wrong(f"{_where(r)}: got {got!r:.60}; return (supported, jobs): True or False, and a "
                    "list with (ranks, nodes) of each job") from None  # fmt: skip
    supported = number(given)  # numpy's and torch's True too
    if supported not in (0.0, 1.0):
        raise Wrong(f"{_where(r)}: supported is {given!r:.40}; it must be True or False")
    return bool(supported), jobs


def _count(value) -> int:
    got = number(value)
    if got is None or got != int(got):
        raise ValueError("not a count")
    return int(got)


def _figures(r) -> str:
    """What a claim that holds is compared with."""
    least = 0.98 * r.claim["busbw"]
    return (f"The largest busbw in its table is {top(r.text):g} GB/s, 98 % of the claim is "
            f"{least:.4g}, and no value is wrong")  # fmt: skip


def _judge_believer(asked, said) -> None:
    if all(jobs == [(r.claim["ranks"], r.claim["nodes"])] for r, (_, jobs) in zip(asked, said)):
        raise Wrong("the jobs are those of the claims; read them from the output")


def _judge_alike(asked, said) -> None:
    """Comes after the jobs: where they are wrong, that is why all claims seem wrong."""
    verdicts = {supported for supported, _ in said}
    if len(verdicts) > 1:
        return
    good = [r for r in asked if r.supported]
    word, more = "supported", ""
    if verdicts == {False}:
        word = "not supported"
        more = (f", the first of them {_where(good[0])}. {_figures(good[0])}. Is it the "
                "largest busbw that you compare, and a list of pairs with a list of "
                "pairs?")  # fmt: skip
    raise Wrong(f"every report is {word}, says your answer; {len(good)} of {len(asked)} are "
                f"supported{more}")  # fmt: skip


def _say_jobs(r, jobs) -> None:
    want = list(r.jobs)
    ranks, hosts = sum(n for n, _ in want), {w for line in r.text.splitlines() if "# " in line
                                             for w in _host(line)}  # fmt: skip
    shown = f"{_where(r)}: its jobs are {_words(want)}, not {_words(jobs)}"
    starts = sum("Rank  0 " in line for line in r.text.splitlines())
    if not jobs:
        why = "every line `#  Rank  0 …` begins a job"
    elif len(want) == 1 and len(jobs) == len(hosts) > 1:
        why = f"ranks 0 to {ranks - 1} stand there once each: one job, over {len(hosts)} hosts"
    elif len(jobs) < len(want) and len(jobs) == len(hosts):
        why = (f"Rank 0 stands there {starts} times: as many jobs, though on {len(hosts)} hosts")
    elif len(jobs) < len(want):
        why = (f"Rank 0 stands there {starts} times: as many jobs, even if all wrote into one "
               "file")  # fmt: skip
    elif len(jobs) > len(want):
        why = f"there are {starts} lines of Rank 0, and each job has one"
    elif sum(n for n, _ in jobs) != ranks:
        why = f"{ranks} lines name a rank, each of one job"
    elif [n for n, _ in jobs] == [n for n, _ in want]:
        why = "a job's nodes are the different hosts in its lines"
    else:
        why = ("the lines of two jobs are mixed: a line belongs to the job that has come as far as "
               "its rank, on the same host if there is a choice")  # fmt: skip
    raise Wrong(f"{shown}: {why}")


def _host(line):
    words = line.split()
    return [words[words.index("on") + 1]] if "Rank" in words and "on" in words else []


def _words(jobs) -> str:
    if len(jobs) > 3 and len(set(jobs)) == 1:
        return f"{len(jobs)} times {jobs[0]}"
    return str(jobs[:4])[:-1] + (", …]" if len(jobs) > 4 else "]")
