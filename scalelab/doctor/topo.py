"""`nvidia-smi topo -m`: which GPU reaches which, and which NIC, over what.

The matrix is symmetric, so a row that is cut is filled from its columns; a pair that neither
shows makes the matrix unreadable. Drivers differ in labels (SOC is the old name of SYS), in the
names of NICs (mlx5_0, NIC0 and a legend) and in the columns after them.
"""

from __future__ import annotations

import re

from . import topo_verdict

# nearest first; NV# is nearer than all of them. SOC: SYS before 2018.
DISTANCES = ("PIX", "PSB", "PXB", "PHB", "NODE", "SYS", "SOC")
LABEL = r"(?:NV\d{1,2}|PIX|PSB|PXB|PHB|NODE|SYS|SOC|N/A|X)"
CELL = re.compile(LABEL)
CELLS = re.compile(rf"{LABEL}+")  # a screen's edge glues two of them together
P2P = re.compile(r"^(?:OK|[CGT]?NS|DR|U|X)$")  # cells of topo -p2p
NAME = r"[A-Za-z][\w.+-]*\d[\w.+-]*"  # GPU0, NIC12, mlx5_bond_0, bnxt_re0, rdmap16s27
BEFORE = r"(?:^|[\s>|:`\])+\-\"'])"  # a launcher's tag, a quote, a diff's mark
ROW = re.compile(rf"{BEFORE}({NAME})[ \t|]+((?:X|OK|U|DR|[CGT]?NS|N/A|{LABEL})(?:[\s|].*)?)$")
HEADER = re.compile(rf"{BEFORE}(GPU\d{{1,4}}(?:[\s|]|$).*)$")
LEGEND = re.compile(r"\b(NIC\d+)\s*[:=]\s*([\w.+-]+)\s*$")
RANGES = re.compile(r"^\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*,?$")
COMMAND = re.compile(r"\btopo\s+(?:(-mp\b|--matrix_pci)|-m\b|--matrix\b)")
WORDS = ("topo", "GPU", "NIC", "PIX", "PXB", "PHB", "NODE", "SYS", "SOC")  # none: not of a matrix
MOST = 600  # rows and columns kept


class Topo:
    """Collects the matrix as lines go by; `result` says what it means."""

    def __init__(self):
        self.names: list[str] = []  # columns
        self.cells: dict[str, list[str]] = {}  # of each row, as far as they go
        self.rest: dict[str, list[str]] = {}  # what follows them: affinities
        self.legend: dict[str, str] = {}
        self.open: str | None = None  # "header" or the row that may go on in the next line
        self.peer: dict[str, list[str]] = {}  # rows of topo -p2p
        self.header_seen = False
        self.after = 0  # columns after the matrix, by its header
        self.pci_only = False  # of `topo -mp`, which leaves NVLink out
        self.again = False  # another header stands below
        self.matrices = 0  # whose rows followed

    @property
    def rows(self) -> int:
        return len(self.cells)

    def feed(self, number: int, line: str) -> bool:
        """Takes the line in; whether it is of the matrix."""
        was_open, self.open = self.open, None
        if not (was_open or any(word in line for word in WORDS)):
            return False
        if not self.cells and (command := COMMAND.search(line)):
            self.pci_only = bool(command[1])
            return False
        if " = " in line or "NCCL" in line:  # the legend, or a log that names a GPU
            return False
        line = line.replace("|", " ").replace("\\_", "_")
        if legend := LEGEND.search(line):
            if len(self.legend) < MOST:
                self.legend[legend[1]] = legend[2]
            return True
        if (row := ROW.search(line)) and not CELL.fullmatch(row[1]):
            return self._row(row[1], row[2].split())
        header = HEADER.search(line)
        more = was_open == "header" and header and header[1].split()[0] not in self.names
        if header and not more and ("Affinity" in line or _is_header(header[1].split())):
            self._header(header[1].split())
            self.after = 3 if "CPU" in line else 0
            return True
        words = line.split()
        if was_open == "header" and ("Affinity" in line or _all_names(words)):
            self.names += _names(words)
            self.after = 3 if "Affinity" in line else self.after
            self.open = "header"
            return True
        if was_open and was_open != "header" and words and self._goes_on(was_open, words):
            self._fill(was_open, words)
            return True
        return False

    def _goes_on(self, name: str, words: list[str]) -> bool:
        """Whether these words can be the rest of a row that was wrapped."""
        if not all(CELLS.fullmatch(w) or RANGES.match(w) or w == "N/A" for w in words):
            return False
        left = max(0, len(self.names) - len(self.cells[name])) if not self.rest[name] else 0
        return left > 0 or len(self.rest[name]) + len(words) <= self.after

    def _header(self, words: list[str]) -> None:
        names = _names(words)
        if self.cells:
            if names[: len(self.names)] == self.names[: len(names)] or self.complete():
                self.again = True  # the first one is read
                return
            # what came before was no matrix after all
            self.names, self.cells, self.rest, self.matrices = [], {}, {}, self.matrices + 1
        self.names, self.open, self.header_seen = names[:MOST], "header", True

    def _row(self, name: str, words: list[str]) -> bool:
        if self.header_seen and all(P2P.match(w) for w in words) and set(words) - {"X"}:
            if len(self.peer) < MOST:
                self.peer[name] = words
            return False
        if self.again and name in self.cells:
            self.matrices, self.again = self.matrices + 1, False
        if name in self.cells or len(self.cells) >= MOST or (self.names and name not in self.names):
            return False
        self.cells[name], self.rest[name] = [], []
        self._fill(name, words)
        return True

    def _fill(self, name: str, words: list[str]) -> None:
        self.open = name
        for word in words:
            columns = len(self.names) or MOST
            if not self.rest[name] and CELLS.fullmatch(word) and len(self.cells[name]) < columns:
                self.cells[name] += CELL.findall(word)
            elif len(self.rest[name]) < 8:
                self.rest[name].append(word)

    def complete(self) -> bool:
        try:
            self._matrix()
        except ValueError:
            return False
        return True

    def _matrix(self) -> tuple[list[str], dict[tuple[str, str], str]]:
        """Names of columns, and the label of each pair that is known."""
        names = list(self.names)
        if not names:  # posted without its first line: as many columns as rows
            names = list(self.cells)
            # the last cells of a row without a header may be an affinity of N/A
            for name in names:
                extra = self.cells[name][len(names) :]
                self.cells[name] = self.cells[name][: len(names)]
                self.rest[name] = extra + self.rest[name]
        label: dict[tuple[str, str], str] = {}
        for row in self.cells:
            for column, text in zip(names, self.cells[row]):
                if (text == "X") != (row == column):
                    raise ValueError(
                        f"the matrix does not fit together at row {row}, column {column}: "
                        "is a line or a column missing? Save nvidia-smi topo -m again"
                    )
                if row != column:
                    label.setdefault((row, column), text)
                    label.setdefault((column, row), text)
        return names, label

    def result(self) -> dict:
        """Kind, facts, verdict, why, next. Raises ValueError for a matrix that is cut."""
        names, label = self._matrix()
        gpus = [n for n in names if re.fullmatch(r"GPU\d{1,4}", n)]
        nics = [n for n in names if n not in gpus]
        if not gpus or not any(g in self.cells for g in gpus):
            raise ValueError("a matrix without rows of GPUs: save nvidia-smi topo -m again")
        missing = [
            (a, b) for i, a in enumerate(gpus) for b in gpus[i + 1 :] if (a, b) not in label
        ]
        if missing:
            raise ValueError(
                f"the matrix is cut: {missing[0][0]} to {missing[0][1]} is not shown "
                f"({len(missing)} pairs are missing); save nvidia-smi topo -m again"
            )
        number = {g: int(g[3:]) for g in gpus}
        links = {
            "-".join(map(str, sorted((number[a], number[b])))): label[a, b]
            for i, a in enumerate(gpus)
            for b in gpus[i + 1 :]
        }
        near, nearest, distance = {}, {}, {}
        for g in gpus:
            known = [n for n in nics if (g, n) in label and label[g, n] in DISTANCES]
            if known:
                best = min(DISTANCES.index(label[g, n]) for n in known)
                ties = [n for n in known if DISTANCES.index(label[g, n]) == best]
                near[str(number[g])] = ties
                nearest[str(number[g])] = ties[0]
                distance[str(number[g])] = label[g, ties[0]]
        cpus, numa = zip(*(self._affinity(g) for g in gpus))
        facts = {
            "gpus": len(gpus),
            "nics": nics,
            "numa_nodes": _numa_nodes(cpus, numa, label.values()),
            "links": links,
            "class": topo_verdict.classify([number[g] for g in gpus], links),
            "gpu_nic": nearest,
            "gpu_nic_distance": distance,
            "gpu_nics": near,
            "nic_names": {n: self.legend[n] for n in nics if n in self.legend},
            "gpu_numa": {str(number[g]): n for g, n in zip(gpus, numa)},
            "peer_access": self._peers(gpus, number),
        }
        judged = topo_verdict.judge([number[g] for g in gpus], facts)
        if self.pci_only and len(gpus) > 1 and not any(v.startswith("NV") for v in links.values()):
            facts["class"] = None
            judged = topo_verdict.pci_only(judged)
        if self.matrices:
            judged["why"] += f" The file holds {self.matrices + 1} matrices; this is the first."
        return {"kind": "topo", "facts": facts, **judged}

    def _peers(self, gpus: list[str], number: dict[str, int]) -> dict[str, str]:
        """What topo -p2p says of each pair, where the file holds that too: OK, NS, GNS …"""
        return {
            f"{number[a]}-{number[b]}": self.peer[a][k]
            for i, a in enumerate(gpus)
            for k, b in enumerate(gpus)
            if k > i and k < len(self.peer.get(a, ()))
        }

    def _affinity(self, gpu: str) -> tuple[str | None, int | None]:
        """(CPU list, NUMA node) of a GPU, each None where it is not shown."""
        words = self.rest.get(gpu, [])
        cpus, numa = None, None
        ranges = [w for w in words if RANGES.match(w)]
        if ranges and not (len(ranges) == 1 and words[0] == "N/A"):
            cpus = ranges[0]
            later = words[words.index(cpus) + 1 :][:1]
            if later and RANGES.match(later[0]):  # Grace lists its GPU's memory nodes too
                numa = int(re.match(r"\d{1,6}", later[0])[0])
        return cpus, numa


def _names(words: list[str]) -> list[str]:
    """The column names at the head of these words: up to `CPU Affinity`."""
    names = []
    for word in words:
        if not re.fullmatch(NAME, word):
            break
        names.append(word)
    return names


def _is_header(words: list[str]) -> bool:
    """Names, and what a screen's width has left of "CPU Affinity"."""
    return "CPU Affinity".startswith(" ".join(words[len(_names(words)) :]))


def _all_names(words: list[str]) -> bool:
    return bool(words) and len(_names(words)) == len(words)


def _numa_nodes(cpus, numa, labels) -> int | None:
    """NUMA nodes that hold a GPU, by affinity; two at least where a link crosses between nodes."""
    shown = {n for n in numa if n is not None} or {c for c in cpus if c is not None}
    crossing = any(label in ("SYS", "SOC") for label in labels)
    return max(len(shown), 2) if crossing else len(shown) or None
