"""Figures that verdicts and lessons rest on: each has a source and is the published one."""

import json
import os
from pathlib import Path

import pytest

from scalelab.plan import hardware

ROOT = Path(__file__).parents[2]
FACTS = Path(os.environ.get("SCALELAB_FACTS", ROOT.parent / "shared" / "facts" / "published.json"))
LINKS = hardware.NVLINK + hardware.PCIE + hardware.INFINIBAND + hardware.ETHERNET + hardware.NODES


def test_every_figure_has_a_source():
    assert all(link.source in hardware.SOURCES for link in LINKS)
    assert all(card.source in hardware.SOURCES for _, card in hardware._GPUS)
    assert all(link.duplex == 2 * link.one_way for link in LINKS)


@pytest.mark.skipif(not FACTS.exists(), reason=f"no {FACTS} (set SCALELAB_FACTS)")
def test_figures_are_the_published_ones():
    tables = {t["id"]: t["rows"] for t in json.loads(FACTS.read_text())["tables"]}
    nvlink = [[int(k.name[-1]), k.gpu, k.links, k.one_way, k.duplex] for k in hardware.NVLINK]
    assert nvlink == [[int(row[0]), *row[1:]] for row in tables["nvlink"]]
    pcie = {k.name.split()[1]: (k.one_way, k.duplex) for k in hardware.PCIE}
    assert all(pcie[str(gen)] == (one, both) for gen, one, both in tables["pcie"])
    ports = {k.name.split()[0]: k.one_way for k in hardware.INFINIBAND}
    assert ports == {name: rate for name, _, rate in tables["ib"]}


@pytest.mark.parametrize(
    "name, nvlink, fabric",
    [
        ("NVIDIA H100 80GB HBM3", 450, "sxm"),
        ("NVIDIA H100 PCIe", 300, "bridge"),
        ("NVIDIA H800", 200, "sxm"),
        ("NVIDIA A100-SXM4-40GB", 300, "sxm"),
        ("NVIDIA A100 80GB PCIe", 300, "bridge"),
        ("NVIDIA A800-SXM4-80GB", 200, "sxm"),
        ("NVIDIA GB200", 900, "sxm"),
        ("NVIDIA GH200 120GB", 450, "sxm"),
        ("Tesla V100-SXM2-16GB", 150, "sxm"),
        ("Tesla V100-PCIE-32GB", 0, "none"),
        ("NVIDIA GeForce RTX 3090", 56.25, "bridge"),
        ("NVIDIA GeForce RTX 4090", 0, "none"),
        ("NVIDIA L40S", 0, "none"),
    ],
)
def test_a_gpu_is_known_by_its_name(name, nvlink, fabric):
    card = hardware.gpu(name)
    assert (card.nvlink, card.fabric) == (nvlink, fabric)


def test_what_is_not_known_is_none():
    for name in ("NVIDIA Graphics Device", "AMD Instinct MI300X", ""):
        assert hardware.gpu(name) is None
    assert hardware.node_rate(hardware.gpu("NVIDIA H200"), 1) is None
    assert hardware.port_like(30) is None
    assert hardware.port_like(48).one_way == 50


def test_rates_between_gpus_of_one_machine():
    a100, rtx = hardware.gpu("A100-SXM4"), hardware.gpu("RTX 3090")
    assert hardware.node_rate(a100, 8) == (300, 300)
    assert hardware.node_rate(a100, 2) == (100, 300)  # a board of four shares its links
    assert hardware.node_rate(rtx, 2) == (31, 56.25)  # with a bridge or without
    assert hardware.node_rate(rtx, 4) == (31, 31)
