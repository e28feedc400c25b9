"""What a doctor's check is made of: a probe that runs on a host, a judgement of what probes saw.

    @probe("disk", limit=5)
    def disk(context):                      # runs on every host
        return {"free": shutil.disk_usage("/").free}

    @check("disk", needs=["disk"], each=True)
    def enough_disk(host, seen):            # runs once a host, where the doctor was started
        free = seen.facts(host, "disk")["free"]
        yield ok(host, f"{free / 1e9:.0f} GB free") if free > 1e9 else fail(host, …, fix=…)

What could not be found out is NotChecked, with the reason; it is never counted as good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

STATUSES = ("fail", "warn", "skip", "pass")  # worst first


class NotChecked(Exception):
    """Something could not be found out; the message says why, in one line."""


@dataclass
class Host:
    """One machine, as the coordinator knows it."""

    name: str
    addr: str | None  # the address that the cluster, or the machine itself, knows it by
    facts: dict[str, dict] = field(default_factory=dict)  # by probe: {"value"} or {"not_checked"}
    run: Callable | None = None  # runs a shell command there; None over a network
    missing: str = ""  # why it does not answer, if it does not
    lost: str = ""  # why it did so no more at the end

    def sh(self, command: str, timeout: float = 5):
        """Run a shell command on this host, for checks of one's own: .stdout, .stderr and
        .returncode. Raises NotChecked on machines that only joined, since those run nothing but
        the doctor's own probes for whoever reaches them, and after `timeout` seconds."""
        if self.run is None:
            raise NotChecked("commands run only on hosts of a cluster started here")
        return self.run(command, timeout)


@dataclass
class Finding:
    """What a check says of a host, of a pair (first to second), or, with None, of them all."""

    status: str
    where: Host | tuple[Host, Host] | None
    detail: str
    fix: str = ""
    name: str = ""  # of its check, filled in by the engine
    table: list[str] = field(default_factory=list)  # lines for people, such as a diff

    @property
    def hosts(self) -> tuple[str, ...]:
        """Names of the hosts concerned."""
        if self.where is None:
            return ()
        return tuple(h.name for h in self.where) if isinstance(self.where, tuple) else (
            self.where.name,
        )  # fmt: skip

    @property
    def node(self) -> str | None:
        """ "node1", "node0→node1" or None."""
        return "→".join(self.hosts) or None


def ok(where, detail: str) -> Finding:
    return Finding("pass", where, detail)


def warn(where, detail: str, fix: str) -> Finding:
    return Finding("warn", where, detail, fix)


def fail(where, detail: str, fix: str) -> Finding:
    return Finding("fail", where, detail, fix)


def skip(where, reason: str) -> Finding:
    return Finding("skip", where, reason)


@dataclass
class Seen:
    """Everything that was seen, for the checks to judge."""

    hosts: list[Host]  # those that answer
    missing: list[Host] = field(default_factory=list)
    pairs: dict[tuple[str, str], dict] = field(default_factory=dict)  # by names, from and to
    endpoint: tuple[str, int] = ("node0", 29400)
    line_rate: float | None = None  # bytes/s that a host's link carries one way, where known
    nproc: int = 1  # ranks a host
    shared: list[str] = field(default_factory=list)
    data: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)  # exchanges that failed by a mistake of ours

    def facts(self, host: Host, probe: str) -> dict:
        """What a probe found on a host. Raises NotChecked where it found nothing."""
        found = host.facts.get(probe, {"not_checked": "was not asked"})
        if "value" not in found:
            raise NotChecked(found["not_checked"])
        return found["value"]

    def again(self, host: Host, probe: str) -> dict:
        """What a probe declared with again=True found at the end of the doctor's work."""
        return self.facts(host, probe + " again")

    @property
    def separate(self) -> bool:
        """Whether the hosts are more than one machine (or network namespace)."""
        found = [h.facts.get("identity", {}).get("value") for h in self.hosts]
        return len({(f["boot_id"], f["net"]) for f in found if f}) > 1

    @staticmethod
    def majority(values: dict[str, object]):
        """The value that more than half of the hosts have, else None. `values`: by host name."""
        if not values:
            return None
        value, count = Counter(values.values()).most_common(1)[0]
        return value if 2 * count > len(values) else None


@dataclass(frozen=True)
class Probe:
    """A function that runs on every host, for `limit` seconds at most."""

    name: str
    run: Callable[[dict], dict]
    limit: float
    again: bool


@dataclass(frozen=True)
class Check:
    """A judgement. `each`: called once a host."""

    name: str
    run: Callable[..., Iterable[Finding]]
    needs: tuple[str, ...]
    each: bool

    def __call__(self, *args) -> list[Finding]:
        return list(self.run(*args) or ())


PROBES: dict[str, Probe] = {}


def probe(name: str, *, limit: float = 5, again: bool = False):
    """Declare a probe. `again`: it runs a second time when the doctor has done all else."""

    def declare(function):
        PROBES[name] = Probe(name, function, limit, again)
        return function

    return declare


def check(name: str, *, needs: Iterable[str] = (), each: bool = False):
    """Declare a check: the function becomes a Check."""
    return lambda function: Check(name, function, tuple(needs), each)


def judge(checks: Iterable[Check], seen: Seen) -> list[Finding]:
    """Every check's findings, worst first, causes before consequences."""
    found: list[Finding] = []
    for one in checks:
        for host in seen.hosts if one.each else [None]:
            args = (host, seen) if one.each else (seen,)
            try:
                findings = one(*args)
            except NotChecked as e:
                findings = [skip(host, str(e))]
            except Exception as e:  # a check with a mistake in it must not hide what others found
                findings = [skip(host, f"this check itself failed: {type(e).__name__}: {e}")]
            for finding in findings:
                finding.name = one.name
            found += findings
    return sorted(found, key=lambda f: STATUSES.index(f.status))  # stable: keeps causal order
