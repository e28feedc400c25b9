"""A log of NCCL_DEBUG=INFO (or WARN), NCCL 2.2 and later.

"host:pid:tid [gpu] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC". Prefixes of launchers
stand before that and wrapped lines after it, so a line is known by its tag, not by its start.
"""

from __future__ import annotations

import re
from collections import Counter

from . import nccl_log_verdict

# 2.2 wrote no "NCCL" before the level; prose and shell scripts quote the tag
LINE = re.compile(
    r"(?:^|(?<=[^\"'`/\w=]))NCCL (INFO|WARN|ERROR|TRACE|ABORT)\s+(.*)"
    r"|(?:\S+:\d+:\d+ \[-?\d+\] |^)(?:(\S+\.(?:h|cc|cu):\d+) )?(?<=[\] \d] )(INFO|WARN) (.*)"
)
# what NCCL says: needed where a file holds only a line or two of it
KNOWN = re.compile(
    r"Bootstrap|NET\b|NET/|Channel|Ring |Trees?\b|comm 0x|\bUsing|\bvia\b|-> \d|version|Connected"
    r"|Setting affinity|NCCL_\w+ set|NCCL_\w+ is|cudaDriver|MaxSharedMem|P2P|SHM|NVLS|Init|DMA-BUF"
    r"|P[Rr]OFILER|TUNER|ENV/|Plugin|failed|Failed|error|timed? ?out|Duplicate|Cuda failure|closed"
    r"|coll channels|threadThresholds|No |not |Abort|misc/|transport|Latency|nranks|CUDA Dev"
)
VERSION = re.compile(r"\b[NR]CCL version\s*:?\s*(\d+\.\d+(?:\.\d+)?(?:[.+-][\w.]+)*)")
SET = re.compile(r"\b(NCCL_\w+) (?:is )?set (?:by environment )?to (.+?)\.?$")
VIA = re.compile(r"\bvia (direct shared memory|[A-Za-z][\w.-]*(?:[ /].*)?)")
DEVICES = re.compile(r"\[\d+\]\s*([\w.+-]+(?::\d+(?=/))?)(?:\.\d+)?(?::\d+)?/(IB|RoCE|iWARP|ROCE)")
ADDRESSED = re.compile(r"(?:\[\d+\])?([A-Za-z][\w.@-]*(?::\d+)?):(?:\[?[0-9a-fA-F.:x]+|<)")
MORE = re.compile(r"\[\d+\][a-zA-Z]|\bOOB |<\d+>|/(?:IB|RoCE)\b")  # the rest of such a list
OOB = re.compile(r"\bOOB ([\w.@-]+):")
WHERE = re.compile(r"(\S+\.(?:cc|cu|h|cpp|c):\d+)\s+NCCL (?:WARN|ERROR|ABORT)")
SENDER = re.compile(r"(\S+?):(\S+?):(\S+?) \[(-?\d+)\]")
RANK = re.compile(r"\s*\[?(?:rank|default)?(\d{1,5})\]?: ")
RANK_LINE = re.compile(r"\brank (\d{1,7}) n[Rr]anks (\d{1,7})\b")
NODES = re.compile(r"\bnNodes (\d{1,7})\b")
# harmless on their own: a missing plugin or library only means that TCP or the built-in is used
HARMLESS = re.compile(
    r"Failed to open libibverbs|No plugin found|Could not find real path|NET/Plugin|Plugin load"
    r"|PROFILER/Plugin|TUNER/Plugin|ENV/Plugin|COLLNET/Plugin|NUMA (?:auto )?balancing"
    r"|Missing .*iommu|Could not get speed|Could not find NET|MSCCL|MSCCLPP|libmlx5|perfmance|"
    r"reduce performance|Resiliency is enabled|GID table change|reregist|LID change|SM change|"
    r"environment variable .* deprecated|GPU_MAX_HW|HSA_|Memory is not|Only EFA provider|"
    r"aws-ofi-\w+ initialization failed|Failed to initialize (?:sendrecv|rdma) protocol|"
    r"NET/OFI (?:pciPath|Error opening file|Failed to initialize GDRCopy|No eligible)"
)
# lines that are no WARN of NCCL and yet say that it ended badly
FATAL = re.compile(
    r"Watchdog caught collective operation timeout.*|ncclRemoteError.*|ncclSystemError.*"
    r"|ncclUnhandledCudaError.*|ncclInternalError.*|ncclInvalidUsage.*"
    r"|(?:Test )?NCCL failure .*|Test CUDA failure .*|CANCELLED AT .*DUE TO TIME LIMIT.*"
    r"|CANCELLED AT .*|Segmentation fault.*|Caught signal \d+.*|exited on signal \d+.*"
    r"|oom-kill.*|Out of memory: Kill.*|CUDA error: .*|\bBus error\b.*|RuntimeError: NCCL .*"
    r"|Some NCCL operations have failed or timed out"
)
DECISIVE = re.compile(
    r"ncclMaxSharedMem \d+ exceeds.*|P2P is disabled between connected GPUs|No device found"
    r"|NET/IB : No device|Could not enable P2P"
    r"|no NCCL_SOCKET_IFNAME interface|Mismatched NCCL version|GID table changed"
)
MOST = 200


class NcclLog:
    """Collects what NCCL says of itself; `result` says what it means."""

    def __init__(self):
        self.lines = 0
        self.spoken = 0  # of them, lines that NCCL is known to print
        self.versions: Counter = Counter()
        self.paths: Counter = Counter()  # transports of channels
        self.net_paths = self.gdr_paths = 0
        self.network: Counter = Counter()  # "Using network X"
        self.hinted: Counter = Counter()  # networks that only a line of set-up names
        self.interfaces: dict[str, None] = {}
        self.bootstrap: dict[str, None] = {}
        self.hcas: dict[str, str] = {}  # device: IB or RoCE
        self.env: dict[str, str] = {}
        self.errors: dict[str, dict] = {}  # text without its numbers: line, text, who, count
        self.warnings: dict[str, dict] = {}
        self.gdr_off = self.gdr_on = 0
        self.nvls = self.collnet = self.mnnvl = False
        self.ranks: set[int] = set()
        self.nranks: set[int] = set()
        self.nodes: set[int] = set()
        self.hosts: dict[str, None] = {}
        self.complete = 0
        self.notes: dict[str, int] = {}  # decisive remarks that are no WARN: first line
        self.tail: list[str] = []
        self.retry: tuple[int, str] | None = None  # first connection that had to be tried again
        self.aborted = False
        self.returned: tuple[int, str, int] | None = None  # line, place, first result not 0
        self.told = False  # "Last error:" stood in the line before
        self.unfinished = ""  # a list of devices that the screen's width has cut

    @property
    def known(self) -> bool:
        return self.spoken > 0

    def feed(self, number: int, line: str) -> bool:
        """Takes the line in; whether it is NCCL's own."""
        match = LINE.search(line) if "NCCL " in line or "INFO" in line or "WARN" in line else None
        if match is None:
            if self.unfinished and line and not line[0].isspace() and MORE.search(line):
                self._info(number, self.unfinished + line)
                self.unfinished = ""
                return True
            self.unfinished = ""
            self._other(number, line)
            return False
        level, body = (match[1], match[2]) if match[1] else (match[4], match[5])
        self.lines += 1
        if KNOWN.search(body):
            self.spoken += 1
        sender = SENDER.search(line[: match.start()] + line[match.start() : match.start() + 80])
        if sender and len(self.hosts) < MOST * 10:
            self.hosts.setdefault(sender[1].rsplit("|", 1)[-1])
        if level in ("WARN", "ERROR", "ABORT"):
            where = WHERE.search(line)
            place = where[1] if where else match[3] or ""
            self.spoken += bool(place)  # of NCCL's own source
            if not self._warn(number, body, place, sender, line):
                return True
        self._info(number, body)
        cut = " : Using [" in body and not (
            OOB.search(body) if "NET/IB" in body else body.endswith(">")
        )
        self.unfinished = body if cut and len(body) < 4000 else ""
        return True

    def _other(self, number: int, line: str) -> None:
        told, self.told = self.told, line.endswith("Last error:")
        if told and self.lines and line.strip():  # of a NCCL that says it through PyTorch only
            self._error(number, line, "", None, line)
        elif version := VERSION.search(line):
            self.versions[version[1]] += 1
        elif fatal := FATAL.search(line):
            if self.lines:
                self._error(number, fatal[0], "", None, line)

    def _warn(self, number: int, body: str, place: str, sender, line: str) -> bool:
        """Whether the warning matters."""
        if HARMLESS.search(body):
            if len(self.warnings) < MOST:
                self.warnings.setdefault(_shape(body), {"line": number, "text": body[:200]})
            return False
        if re.search(r"net_ib|ibvwrap|ib/|ib_plugin", place) or re.search(r"ibv_|NET/IB", body):
            self.hinted["NET/IB"] += 1
        elif "net_socket" in place:
            self.hinted["NET/Socket"] += 1
        self._error(number, body, place, sender, line)
        return True

    def _error(self, number: int, body: str, place: str, sender, line: str = "") -> None:
        shape = _shape(body)
        if shape in self.errors:
            self.errors[shape]["count"] += 1
            self.errors[shape]["place"] = self.errors[shape]["place"] or place
        elif len(self.errors) < MOST:
            who = f"{sender[1]}, GPU {sender[4]}" if sender else ""
            if rank := RANK.match(line):  # as srun --label and torchrun put before a line
                who = f"rank {rank[1]}" + (f", {who}" if who else "")
            self.errors[shape] = {
                "line": number, "text": body.strip()[:240], "who": who, "place": place, "count": 1,
            }  # fmt: skip

    def _info(self, number: int, body: str) -> None:
        if via := VIA.search(body):
            if "->" in body or ":" in body:
                return self._path(via[1])
        if version := VERSION.search("NCCL " + body if body.startswith("version") else body):
            self.versions[version[1]] += 1
        if found := SET.search(body):
            if len(self.env) < MOST:
                self.env[found[1]] = found[2].strip()[:100]
        elif "Using network" in body:
            self.network["NET/" + body.split("Using network", 1)[1].strip().rstrip(".")[:40]] += 1
        elif found := re.search(r"Using internal Network (\S+)", body):
            self.network[f"NET/{found[1]}"] += 1
        elif body.startswith("Bootstrap"):
            self._addressed(body, self.bootstrap)
        elif "NET/IB" in body:
            self._infiniband(body)
        elif re.search(r"NET/Socket|NET ?: Using interface|IP Interfaces", body):
            self._sockets(body)
        elif "GPU Direct RDMA" in body or "GDRDMA" in body:
            self._gdr(body)
        elif re.search(r"transport/net_ib|ibvwrap", body):
            self.hinted["NET/IB"] += 1
        elif "net_socket" in body:
            self.hinted["NET/Socket"] += 1
        elif "net_ofi" in body or "NET/OFI" in body:
            self.hinted["NET/OFI"] += 1
        if "NVLS" in body or "nvls" in body:
            channels = re.search(r"(\d+) nvls channels", body)
            if "Connected NVLS" in body or "NVLS comm" in body or (channels and channels[1] != "0"):
                self.nvls = True
        elif re.search(r"Connected (?:all )?collnet|COLLNET.*connected", body, re.IGNORECASE):
            self.collnet = True
        if "MNNVL 1" in body or "MNNVL is enabled" in body:
            self.mnnvl = True
        if rank := RANK_LINE.search(body):
            if len(self.ranks) < MOST * 50:
                self.ranks.add(int(rank[1]))
            self.nranks.add(int(rank[2]))
        if nodes := NODES.search(body):
            self.nodes.add(int(nodes[1]))
        if self.returned is None and (found := re.match(r"(\S+\.\w+:\d+) -> ([1-6])\b", body)):
            self.returned = (number, found[1], int(found[2]))
        if "Init COMPLETE" in body:
            self.complete += 1
        elif "Abort COMPLETE" in body:
            self.aborted = True
        elif self.retry is None and re.search(r"[Cc]onnect.*retrying", body):
            self.retry = (number, body[:160])
        if (note := DECISIVE.search(body)) and len(self.notes) < MOST:
            self.notes.setdefault(_shape(note[0]), number)
            self.tail.append(note[0]) if note[0] not in self.tail and len(self.tail) < 20 else None

    def _path(self, text: str) -> None:
        """"NET/AWS Libfabric/4/GDRDMA", "P2P/IPC/read", "direct shared memory" …"""
        parts = text.strip().split("/")
        head = parts[0].strip()
        if head in ("NET", "COLLNET") or head.startswith("NET"):
            name = parts[1].strip() if len(parts) > 1 else ""
            self.paths[f"NET/{name}" if head != "COLLNET" else "CollNet"] += 1
            self.net_paths += 1
            self.gdr_paths += "GDRDMA" in text
        elif head == "P2P":
            name = parts[1].split("[")[0].strip() if len(parts) > 1 else ""
            self.paths[f"P2P/{name.removesuffix(' pointer')}" if name else "P2P"] += 1
        elif head == "SHM" or head == "direct shared memory":
            self.paths["SHM"] += 1
        elif head == "NVLS":
            self.nvls = True
        elif head.split(" ")[0] in ("direct", "indirect"):
            self.paths["P2P/" + head.split(" ")[0]] += 1

    def _infiniband(self, body: str) -> None:
        if "GPU Direct RDMA" in body:
            return self._gdr(body)
        if "No device" in body:
            self.notes.setdefault("NET/IB : No device found", 0)
            return
        for name, kind in DEVICES.findall(body):
            name = name.split(":")[0]
            self.hcas.setdefault(name, "RoCE" if kind.lower() == "roce" else kind)
            self.interfaces.setdefault(name)
            self.hinted["NET/IB"] += 1
        if oob := OOB.search(body):
            self.interfaces.setdefault(oob[1])
        elif found := re.search(r"Using interface (\S+) for sideband", body):
            self.interfaces.setdefault(found[1])
        if found := re.search(r"on dev ([\w.+-]+)", body):
            self.interfaces.setdefault(found[1])

    def _sockets(self, body: str) -> None:
        if "NET/Socket" in body:
            self.hinted["NET/Socket"] += 1
        if "IP Interfaces" in body:
            for name in re.findall(r"([\w.@-]+)\((?:PIX|PXB|PHB|NODE|SYS|SOC)\)", body):
                self.interfaces.setdefault(name)
            return
        self._addressed(body, self.interfaces)

    def _addressed(self, body: str, into: dict) -> None:
        text = body.split("Using", 1)[-1].removeprefix(" interface")
        for word in text.split():
            if found := ADDRESSED.match(word):
                into.setdefault(found[1])
                self.interfaces.setdefault(found[1])

    def _gdr(self, body: str) -> None:
        if re.search(r"Disabled|not supported|no module", body):
            self.gdr_off += 1
        elif re.search(r"Enabled", body):
            self.gdr_on += 1

    # what it came to

    def chosen(self) -> list[str]:
        """Networks that NCCL took, most certain source first."""
        for source in (self.network, self.hinted):
            if source:
                return sorted(source)
        return []

    def transports(self) -> list[str]:
        """What the channels use; before there is any, the network that was chosen."""
        found = set(self.paths)
        if not found:
            early = any("Duplicate GPU" in e["text"] for e in self.errors.values())
            found = set() if early else set(self.chosen())
        if self.nvls:
            found.add("NVLS")
        if self.collnet:
            found.add("CollNet")
        if self.mnnvl:
            found.add("MNNVL")
        return sorted(found)

    def gdr(self) -> bool | None:
        """Whether GPUDirect RDMA is used: by the channels' own suffix, else by what NCCL says."""
        if self.gdr_paths:
            return True
        nets = {p for p in self.paths if p.startswith("NET/")}
        if nets:  # GPUDirect-TCPX and its like write to the GPU without saying GDRDMA
            return None if any("GPUDirect" in net for net in nets) else False
        if self.gdr_on != self.gdr_off and not (self.gdr_on and self.gdr_off):
            return bool(self.gdr_on)
        if not self.paths or not nets:
            if self.chosen() == ["NET/Socket"]:
                return False
        return None

    def result(self) -> dict:
        """Kind, facts, verdict, why, next."""
        for name in re.findall(r"on dev ([\w.+-]+)", " ".join(
                e["text"] for e in self.errors.values())):  # fmt: skip
            self.interfaces.setdefault(name)
        facts = {
            "version": next(iter(self.versions), None),
            "transport": self.transports(),
            "interfaces": list(self.interfaces),
            "gdr": self.gdr(),
            "errors": [
                f"line {e['line']}: {e['text']}"
                + (f" ({e['who']})" if e["who"] else "")
                + (f" [{e['count']} times]" if e["count"] > 1 else "")
                for e in self.errors.values()
            ][:50],
            "warnings": [f"line {w['line']}: {w['text']}" for w in self.warnings.values()][:20],
            "bootstrap": list(self.bootstrap),
            "hcas": self.hcas,
            "channels": dict(self.paths),
            "gdr_channels": [self.gdr_paths, self.net_paths],
            "ranks": max(self.nranks, default=None),
            "nodes": max(self.nodes, default=None),
            "env": self.env,
        }
        return {"kind": "nccl-log", "facts": facts, **nccl_log_verdict.judge(facts, self)}


def _shape(text: str) -> str:
    """The message without what differs between ranks: numbers and addresses."""
    return re.sub(r"0x[0-9a-f]+|[0-9a-f]*[:.][0-9a-f:.]+(?:<\d+>)?|<\d+>|\d+", "#", text)[:160]
