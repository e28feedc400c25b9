"""Published speeds of links and accelerators. All rates are GB/s of 1e9 bytes.

`one_way` is what a collective can use; makers like to print `duplex`, both directions added.
Network ports are given one way. Every row names its source, a key of SOURCES.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SOURCES = {
    "open-book": "ML Engineering Open Book, network chapter: github.com/stas00/ml-engineering",
    "pcie": "PCI Express 3.0: 8 GT/s a lane, 128b/130b, 16 lanes (15.75 GB/s)",
    "links": "links of the card times one way a link of its NVLink generation",
    "usual": "a port as fast as one GPU's share of a DGX of that generation",
    "ethernet": "IEEE 802.3: the name of the port in Gb/s, by 8 bits",
    "bridge": "NVIDIA data sheets RTX A6000, A40, RTX 3090: NVLink bridge 112.5 GB/s both ways",
    "turing": "NVIDIA data sheet Quadro RTX 8000: NVLink bridge 100 GB/s both ways",
    "nvl": "NVIDIA data sheets A100 PCIe, H100 PCIe and NVL: bridge 600 GB/s both ways",
    "h200-nvl": "NVIDIA data sheet H200 NVL: bridge 900 GB/s both ways",
    "nccl-290": "github.com/NVIDIA/nccl-tests issue 290: H100, NVIDIA's answer",
    "a100-sweep": "8 A100, all_reduce_perf: 234.89 GB/s: ML Engineering Open Book",
}


@dataclass(frozen=True)
class Link:
    """A kind of link. `links`: how many a GPU has (NVLink only)."""

    name: str
    one_way: float
    source: str
    links: int | None = None
    gpu: str = ""

    @property
    def duplex(self) -> float:
        """Both directions added, as makers print it."""
        return 2 * self.one_way


NVLINK = (  # of one GPU, all its links together
    Link("NVLink 1", 80, "open-book", 4, "P100"),
    Link("NVLink 2", 150, "open-book", 6, "V100"),
    Link("NVLink 3", 300, "open-book", 12, "A100"),
    Link("NVLink 4", 450, "open-book", 18, "H100/H200"),
    Link("NVLink 5", 900, "open-book", 18, "B200/GB200"),
    Link("NVLink 6", 1800, "open-book", 36, "Rubin (announced)"),
)
PCIE = (  # 16 lanes
    Link("PCIe 3 x16", 15.75, "pcie"),
    Link("PCIe 4 x16", 31, "open-book"),
    Link("PCIe 5 x16", 63, "open-book"),
    Link("PCIe 6 x16", 121, "open-book"),
    Link("PCIe 7 x16", 242, "open-book"),
)
INFINIBAND = (  # a port of four lanes
    Link("EDR InfiniBand", 12.5, "open-book"),
    Link("HDR InfiniBand", 25, "open-book"),
    Link("NDR InfiniBand", 50, "open-book"),
    Link("XDR InfiniBand", 100, "open-book"),
)
ETHERNET = tuple(
    Link(f"{gbit} Gb/s Ethernet", gbit / 8, "ethernet") for gbit in (1, 10, 25, 40, 50, 100,
                                                                    200, 400, 800)
)  # fmt: skip
NODES = (  # all ports of a server of eight GPUs together
    Link("DGX H100 (8 ports of 400 Gb/s)", 400, "open-book", gpu="H100"),
    Link("AWS P5 (EFA)", 400, "open-book", gpu="H100"),
    Link("GCP A3 Mega", 200, "open-book", gpu="H100"),
    Link("GCP A3 High", 100, "open-book", gpu="H100"),
    Link("AWS P4d (EFA)", 50, "open-book", gpu="A100"),
    Link("AWS P6-B300 (EFA)", 800, "open-book", gpu="B300"),
)


@dataclass(frozen=True)
class Gpu:
    """What a GPU's name says about its links; `source` is of `nvlink` and `pcie`.

    nvlink: GB/s one way, all links together, 0 without; fabric: "sxm" (each GPU may reach every
    other one), "bridge" (pairs, where a bridge is fitted at all) or "none"; mesh: GB/s one way to
    each peer on a board of four without a switch; port: GB/s of the network port usual beside it
    (source: "usual"), None if there is no usual one; pcie: GB/s one way of its slot.
    """

    name: str
    nvlink: float
    fabric: str
    pcie: float
    mesh: float = 0.0
    port: float | None = None
    source: str = "open-book"


# The first pattern that is found in the name wins: special models before the general one.
_GPUS: tuple[tuple[str, Gpu], ...] = (
    (r"GB[23]00|B[23]00", Gpu("B200 class", 900, "sxm", 63, 300, 50)),
    (r"GH200", Gpu("GH200", 450, "sxm", 63, 150, 50)),
    (r"H200 NVL", Gpu("H200 NVL", 450, "bridge", 63, source="h200-nvl")),
    (r"H100 NVL|H100 PCIe|H800 PCIe", Gpu("H100 PCIe", 300, "bridge", 63, source="nvl")),
    (r"H800", Gpu("H800", 200, "sxm", 63, 0, 50, "links")),
    (r"H100|H200|H20\b", Gpu("H100 class", 450, "sxm", 63, 150, 50)),
    (r"A800.*SXM", Gpu("A800", 200, "sxm", 31, 0, 25, "links")),
    (r"A800", Gpu("A800 PCIe", 200, "bridge", 31, source="links")),
    (r"A100.*PCI", Gpu("A100 PCIe", 300, "bridge", 31, source="nvl")),
    (r"A100", Gpu("A100", 300, "sxm", 31, 100, 25)),
    (r"V100.*SXM|V100.*DGX", Gpu("V100", 150, "sxm", 15.75, 25, 12.5)),
    (r"V100.*PCI", Gpu("V100 PCIe", 0, "none", 15.75)),
    (r"P100.*SXM", Gpu("P100", 80, "sxm", 15.75, 20, 12.5)),
    (r"P100", Gpu("P100 PCIe", 0, "none", 15.75)),
    (r"RTX PRO .*Blackwell|RTX 50[5-9]0", Gpu("RTX Blackwell", 0, "none", 63)),
    (r"RTX A6000|RTX A5500|RTX A5000|RTX A4500|A40\b|A10M|RTX 3090",
     Gpu("Ampere with bridge", 56.25, "bridge", 31, source="bridge")),
    (r"Quadro RTX|TITAN RTX|RTX 2080", Gpu("Turing with bridge", 50, "bridge", 15.75,
                                           source="turing")),
    (r"L40S?\b|L20\b|L4\b|L2\b|RTX 6000 Ada|RTX [45]\d00 Ada|RTX 4000 SFF|RTX 40[5-9]0",
     Gpu("Ada", 0, "none", 31)),
    (r"RTX 30[5-8]0|A10G?\b|A16\b|A2\b|A30\b|RTX A[24]000", Gpu("Ampere", 0, "none", 31)),
    (r"\bT4G?\b|T600|T1000|GTX|TITAN|Quadro|Tesla [KMP]\d+", Gpu("older PCIe card", 0, "none",
                                                                15.75, source="pcie")),
)  # fmt: skip


def gpu(name: str) -> Gpu | None:
    """What is known of a GPU by its name, as nvidia-smi or nccl-tests print it."""
    for pattern, found in _GPUS:
        if re.search(pattern, name, re.IGNORECASE):
            return found
    return None


def node_rate(card: Gpu, ranks: int) -> tuple[float, float] | None:
    """(lowest, highest) line rate in GB/s, one way, between `ranks` GPUs of one machine.

    Two figures where the name leaves it open: a board of four without a switch shares its links
    among its peers, a bridge may not be fitted. None where there is nothing to say (one rank).
    """
    if ranks < 2:
        return None
    if card.fabric == "none":
        return card.pcie, card.pcie
    if card.fabric == "bridge":  # only pairs are bridged: a ring of more passes PCIe
        return card.pcie, max(card.nvlink, card.pcie) if ranks == 2 else card.pcie
    low = min(card.nvlink, card.mesh * (ranks - 1)) if card.mesh else card.nvlink
    return low, card.nvlink


def port_like(rate: float, least: float = 0.85) -> Link | None:
    """The network port that `rate` GB/s would fill to at least `least`, or None."""
    for port in sorted({p.one_way: p for p in ETHERNET + INFINIBAND}.values(),
                       key=lambda p: p.one_way):  # fmt: skip
        if least * port.one_way <= rate <= 1.02 * port.one_way:
            return port
    return None
