"""What the doctor found, for people and for programs."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from .registry import STATUSES, Finding, Seen

WORDS = {"fail": "FAIL", "warn": "warn", "skip": "not checked", "pass": "pass"}
WIDTH = 100


@dataclass
class Report:
    """The findings, worst first, and a verdict on every host."""

    findings: list[Finding]
    seen: Seen
    seconds: float
    kind: str  # of the cluster, or "joined"

    @property
    def first(self) -> Finding | None:
        """What to mend first; None where nothing is wrong."""
        return next((f for f in self.findings if f.status in ("fail", "warn")), None)

    @property
    def failed(self) -> bool:
        return any(f.status == "fail" for f in self.findings)

    @property
    def ok(self) -> bool:
        """Whether there is nothing to mend: no fail, no warn."""
        return self.first is None

    @property
    def verdicts(self) -> dict[str, str]:
        """By host: "fail" (a check blames it), "suspect" (it is one of a failing pair), "warn",
        "pass"."""
        order = ["pass", "warn", "suspect", "fail"]
        found = {h.name: "pass" for h in [*self.seen.hosts, *self.seen.missing]}
        blamed = {f.hosts for f in self.findings if f.status == "fail" and len(f.hosts) == 1}
        for finding in self.findings:
            verdict = finding.status
            if verdict == "fail" and len(finding.hosts) == 2:
                if any((name,) in blamed for name in finding.hosts):
                    continue  # the one that is blamed explains the pair
                verdict = "suspect"
            for name in finding.hosts:
                if verdict in order and name in found:
                    found[name] = max(found[name], verdict, key=order.index)
        return found

    def json(self) -> dict:
        """As `--json` prints it."""
        verdicts = self.verdicts
        unknown = {h.name for h in self.seen.missing if h.addr is None}  # that never came
        return {
            "checks": [
                {"name": f.name, "status": f.status, "node": f.node, "detail": f.detail,
                 "fix": f.fix}
                for f in self.findings
            ],
            "nodes": [
                {"name": h.name, "addr": h.addr, "verdict": verdicts[h.name]}
                for h in [*self.seen.hosts, *self.seen.missing]
            ],
            "passing": ",".join(n for n, v in verdicts.items() if v in ("pass", "warn")),
            "failing": ",".join(
                n for n, v in verdicts.items() if v in ("suspect", "fail") and n not in unknown
            ),
            "seconds": round(self.seconds, 3),
            "cluster": self.kind,
        }  # fmt: skip

    def table(self) -> str:
        """For people: worst first, then a verdict a host."""
        rows = self._rows()
        names = max((len(r[1]) for r in rows), default=0)
        nodes = max((len(r[2]) for r in rows), default=0)
        lines = []
        for status, name, node, detail, fix, table in rows:
            head = f"{WORDS[status]:<12}{name:<{names}}  {node:<{nodes}}  "
            lines += _hang(head, detail)
            if fix:
                lines += _hang(" " * (len(head) - 5) + "fix: ", fix)
            lines += [" " * 12 + line for line in table]
        counts = {s: sum(f.status == s for f in self.findings) for s in STATUSES}
        lines.append("")
        for name, verdict in self.verdicts.items():
            lines.append(f"{name}: {WORDS.get(verdict, verdict)}")
        lines.append(
            f"{counts['fail']} failed, {counts['warn']} warnings, {counts['skip']} not checked, "
            f"{counts['pass']} passed, in {self.seconds:.1f} s"
        )
        return "\n".join(lines)

    def _rows(self) -> list[tuple]:
        """(status, name, node, detail, fix, table); passes of one check, and what was not checked
        for one reason, on one row each."""
        rows: dict[tuple, list] = {}
        for i, f in enumerate(self.findings):
            key: tuple = (i,)
            if f.status == "pass":
                key = (f.status, f.name)
            elif f.status == "skip":
                key = (f.status, f.name, f.detail)
            rows.setdefault(key, []).append(f)
        return [_row(same) for same in rows.values()]


def _row(same: list[Finding]) -> tuple:
    first = same[0]
    nodes = first.node or "all"
    if len(same) > 1:
        nodes = "all" if len({f.node for f in same}) == len(same) else nodes
    others = len({f.detail for f in same}) - 1
    detail = first.detail + (f" (and {others} more)" if others else "")
    return first.status, first.name, nodes, detail, first.fix, first.table


def _hang(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, max(WIDTH, len(head) + 40), initial_indent=head, subsequent_indent=" " * len(head),
        break_long_words=False, break_on_hyphens=False,
    ) or [head.rstrip()]  # fmt: skip
