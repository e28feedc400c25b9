"""Which lists of devices in nccl-tests' output are of one job, and which of jobs apart.

Rank 0 of each job prints "# Using devices" and one line a rank. A list that begins before the last
run has ended belongs to a job at the same time, or to a first try that broke off; which of the
two is only clear from what follows.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

MOST = 5000  # devices kept


class Device(NamedTuple):
    """One line of the list."""

    rank: int
    pid: str | None
    host: str
    device: int
    bus: str
    name: str


def hosts(devices: list[Device]) -> frozenset[str]:
    """Machines in a list."""
    return frozenset(d.host for d in devices)


class Jobs:
    """Collects lists of devices; `apart` says whether they are of jobs that were taken for one."""

    def __init__(self):
        self.lists: list[list[Device]] = []
        self.open: list[list[Device]] = []  # begun since a run last ended
        self.kept = 0
        self.begun = 0  # headers since then
        self.begun_first = 0  # of them, before the first list
        self.begun_last = 0  # and before the last
        self.together = False  # two jobs ran at the same time
        self.doubt = False  # or perhaps the first of them broke off before the second
        self.footers = 0  # since the doubt

    def begin(self, measured: bool) -> None:
        """A header; `measured`: rows of the run before it were seen."""
        if measured and self.open and len(self.open[-1]) > 1:
            self.end()
        self.begun += 1

    def device(self, device: Device) -> None:
        if self.kept >= MOST or any(device in devices for devices in self.open):
            return
        self.kept += 1
        if device.rank:
            follows = [d for d in self.open or self.lists if d[-1].rank == device.rank - 1]
            near = [d for d in follows if d[-1].host == device.host]
            if goes_on := near or follows or self.open:
                goes_on[-1].append(device)
                if self.open:  # another's header or list stands within this one
                    mixed = self.begun > self.begun_last or goes_on[-1] is not self.open[-1]
                    self.together |= mixed
                return
        if not self.open:
            self.begun_first = self.begun
        elif self.begun_first > 1 or len(self.open[-1]) == 1:
            self.together = True
        else:
            self.doubt = True
        self.begun_last = self.begun
        self.open.append([device])
        self.lists.append(self.open[-1])

    def end(self, footer: bool = False) -> None:
        """A run has ended, by its last line or by a failure."""
        self.footers += footer and self.doubt
        self.open, self.begun = [], 0

    def apart(self, runs: list) -> bool:
        """Whether several jobs stand there where one may be meant: at the same time, or one after
        the other on other machines. The same machines again are a repeat, and more of them a
        series."""
        if self.together:
            return True
        if self.doubt:
            repeated = any(count > 1 for run in runs for count in run.sizes.values())
            others = len({hosts(devices) for devices in self.lists}) > 1
            rows = any(run.rows for run in runs)
            if self.footers > 1 or repeated or (others and not rows):
                return True
        measured = list({id(run.devices): run.devices for run in runs if run.devices}.values())
        return any(
            hosts(a) != hosts(b) and (len(a) == len(b) or not hosts(a) & hosts(b))
            for i, a in enumerate(measured)
            for b in measured[:i]
        )

    def apart_lists(self, runs: list) -> list[list[Device]]:
        """The lists of the jobs apart: all, if none of their figures can be told from another's."""
        measured = list({id(run.devices): run.devices for run in runs if run.devices}.values())
        return self.lists if self.together or self.doubt or len(measured) < 2 else measured


def shared(devices: list[Device]) -> bool:
    """Whether two ranks sat on one GPU. A short address holds the bus only, not the domain."""
    seen: Counter = Counter()
    for d in set(devices):
        if ":" in d.bus:
            seen[d.host, d.bus] += 1
        elif d.bus not in ("0x00", "0x0") and not re.search(r"G[HB]\d00", d.name):
            seen[d.host, d.bus, d.device] += 1
    return any(count > 1 for count in seen.values())
