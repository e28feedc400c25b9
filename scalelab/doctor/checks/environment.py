"""Do all hosts run the same software with the same settings?"""

from __future__ import annotations

from ...measure.fingerprint import ABSENT, fingerprint
from ..registry import Finding, Host, NotChecked, Seen, check, fail, ok, probe, skip, warn

# In the order in which they are worth reading.
FIRST = ("python", "torch", "cuda", "nccl", "driver", "gpus", "code", "code changes",
         "cpu capability", "cpu", "platform")  # fmt: skip
# Ranks that differ in one of these do not understand one another, or train different things.
FATAL = ("python", "torch", "cuda", "nccl", "code")
# One kind of instance comes with several processors; what they compute is "cpu capability".
SHOWN = ("cpu",)
MISSING = "not there"

# Why a setting matters where it is not obvious from its name.
WHY = {
    "cpu capability": "other vector instructions add in another order: losses part after some "
    "hundred steps",
    "ATEN_CPU_CAPABILITY": "it chooses the vector instructions of torch's kernels, and so the last "
    "digits of every sum",
    "MKL_CBWR": "it chooses the order of additions in MKL, and so the last digits of every product",
    "MKL_ENABLE_INSTRUCTIONS": "it chooses MKL's vector instructions, and so the last digits",
    "OMP_NUM_THREADS": "another number of threads adds in another order, and at another speed",
    "MKL_NUM_THREADS": "another number of threads adds in another order, and at another speed",
    "PYTHONHASHSEED": "sets and dicts of names are walked in another order",
    "NVIDIA_TF32_OVERRIDE": "it decides between 10 and 23 bits of mantissa in matrix products",
    "CUBLAS_WORKSPACE_CONFIG": "it decides whether cuBLAS repeats its results",
    "NCCL_ALGO": "ranks must agree on it, or they hang",
    "NCCL_PROTO": "ranks must agree on it, or they hang",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL adds collectives that the other ranks do not make",
    "gpus": "the slowest sets the pace, and nproc must suit every host",
}


@probe("environment", limit=6)
def environment(context: dict) -> dict:
    """The fingerprint of the environment that the job would have on this host."""
    return fingerprint()


@check("environment", needs=["environment"])
def same_environment(seen: Seen):
    found: dict[str, dict[str, str]] = {}
    for host in seen.hosts:
        try:
            found[host.name] = seen.facts(host, "environment")
        except NotChecked as e:
            yield skip(host, str(e))
    hosts = {h.name: h for h in seen.hosts if h.name in found}
    if not hosts:
        return
    rows = differences(found)
    lines = table(rows, list(found))
    blamed: dict[str | None, list[str]] = {}
    for key, values in rows.items():
        if key in SHOWN:
            continue
        usual = Seen.majority(values)
        for name in [n for n, v in values.items() if v != usual] if usual else [None]:
            blamed.setdefault(name, []).append(key)
    for name, keys in blamed.items():
        yield _differs(name, keys, rows, hosts, lines)
        lines = []  # once is enough
    for name, host in hosts.items():
        if name not in blamed and None not in blamed:
            yield ok(host, _summary(found[name]))


def differences(found: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """{key: {host: value}} of all that differs, worst first. Not counted: what some host could not
    find out, and the state of code that hosts see as one copy."""
    keys = list(dict.fromkeys(k for facts in found.values() for k in facts))
    places = {facts.get("code place") for facts in found.values()}
    rows = {}
    for key in keys:
        named = key.startswith(("package ", "variable "))
        values = {h: facts.get(key, MISSING if named else None) for h, facts in found.items()}
        if key == "code place" or (key.startswith("code") and len(places) == 1):
            continue
        if key == "package torch":
            continue  # has a row of its own, with what it was built for
        if len(set(values.values())) > 1 and None not in values.values():
            rows[key] = values
    return dict(sorted(rows.items(), key=lambda row: _rank(row[0])))


def _rank(key: str) -> tuple:
    if key in FIRST:
        return (0, FIRST.index(key), key)
    # a setting that is known to matter, then other settings, then packages
    return (1 + key.startswith("package "), _bare(key) not in WHY, key)


def _bare(key: str) -> str:
    return key.removeprefix("variable ").removeprefix("package ")


def table(rows: dict[str, dict[str, str]], names: list[str]) -> list[str]:
    """The differences for people: a line a key, a column a host."""
    cells = [["", *names], *([_bare(k), *(v[n] for n in names)] for k, v in rows.items())]
    cells = [[c if len(c) <= 28 else c[:27] + "…" for c in row] for row in cells]
    widths = [max(map(len, column)) for column in zip(*cells)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip() for row in cells]


def _differs(name: str | None, keys: list[str], rows: dict, hosts: dict[str, Host],
             lines: list[str]) -> Finding:  # fmt: skip
    """One finding on one host against the others, or on a pair where it cannot be told who is
    right; `name` None."""
    where: Host | tuple[Host, Host] | None
    if name is None:
        values = rows[keys[0]]
        a = next(iter(values))
        where = hosts[a], hosts[next(n for n, v in values.items() if v != values[a])]
        words = [_both(key, rows[key]) for key in keys]
    else:
        where = hosts[name]
        words = [f"{_bare(k)} {rows[k][name]}, others {Seen.majority(rows[k])}" for k in keys]
    worst = next((k for k in keys if _fatal(k, rows[k])), None)
    lead = worst or keys[0]
    words.insert(0, words.pop(keys.index(lead)))
    why = WHY.get(_bare(lead))
    detail = words[0] + (f" ({why})" if why else "")
    if words[1:]:
        detail += "; " + "; ".join(words[1:4])
    if words[4:]:
        detail += f"; and {len(words) - 4} more"
    right = None if name is None else Seen.majority(rows[lead])
    finding = (fail if worst else warn)(where, detail, _fix(lead, right))
    finding.table = lines
    return finding


def _fatal(key: str, values: dict[str, str]) -> bool:
    if key == "python":  # 3.11.2 and 3.11.7 understand one another; 3.10 and 3.11 may not
        return len({v.rpartition(".")[0] for v in values.values()}) > 1
    if key == "code":
        return ABSENT not in values.values()  # no repository at all is no other commit
    return key in FATAL


def _both(key: str, values: dict[str, str]) -> str:
    hosts: dict[str, list[str]] = {}
    for name, value in values.items():
        hosts.setdefault(value, []).append(name)
    return f"{_bare(key)} " + ", ".join(f"{v} on {'/'.join(n)}" for v, n in hosts.items())


def _fix(key: str, right: str | None) -> str:
    bare = _bare(key)
    if key.startswith("variable "):
        if right == MISSING:
            return f"unset {bare}"
        return f"export {bare}={right}" if right else f"set {bare} alike on every host"
    if key == "torch" or key.startswith("package "):
        name = f"{bare}=={right}" if right not in (None, MISSING) else bare
        if right == MISSING:
            return f"pip uninstall {bare}, or install it on every host"
        return f"pip install '{name}'" if right else "install from one lock file on every host"
    if key == "python":
        return f"make the environment anew with Python {right or 'of one version'}"
    if key in ("cuda", "nccl"):
        return "install the same torch wheel on every host: `pip install torch==VERSION`"
    if key == "driver":
        return f"install driver {right or 'of one version'} (an old one may lack what CUDA needs)"
    if key.startswith("code"):
        return f"git checkout {right}" if key == "code" and right else (
            "commit, and check the same commit out on every host"
        )  # fmt: skip
    if key == "cpu capability":
        return "export ATEN_CPU_CAPABILITY=avx2 on every host, where runs must agree"
    return "take hosts of one kind, or give each the work it can do"


def _summary(facts: dict[str, str]) -> str:
    shown = [f"{key} {facts[key]}" for key in ("python", "torch", "cuda", "nccl", "driver", "gpus")
             if facts.get(key, ABSENT) != ABSENT]  # fmt: skip
    shown += [f"cpu capability {facts['cpu capability']}"] if "cpu capability" in facts else []
    packages = sum(key.startswith("package ") for key in facts)
    return ", ".join([*shown, f"{packages} packages"])
