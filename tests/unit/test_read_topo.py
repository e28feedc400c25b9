"""`nvidia-smi topo -m`: facts, class and placement, over drivers, sizes and screens."""

from pathlib import Path

import pytest
from read_outputs import topo

from scalelab.cluster import UsageError
from scalelab.doctor.read import read

OUTPUTS = Path(__file__).parent / "outputs"


def of(tmp_path, text: str) -> dict:
    path = tmp_path / "topo.txt"
    path.write_text(text)
    result = read(str(path))
    assert result["kind"] == "topo"
    return result


def half(i, j, size, near, far):
    return near if i // size == j // size else far


CLASSES = {
    # GPUs, label of each pair, class
    "8 on a switch": (8, lambda i, j: "NV18", "nvswitch"),
    "8 with fewer links": (8, lambda i, j: "NV8", "nvswitch"),
    "16 on a switch": (16, lambda i, j: "NV6", "nvswitch"),
    "4 on a switch": (4, lambda i, j: "NV18", "nvswitch"),
    "4 of 12 links each, no switch": (4, lambda i, j: "NV4", "nvlink-mesh"),
    "4 of 18 links each, no switch": (4, lambda i, j: "NV6", "nvlink-mesh"),
    "4 of 6 links each, no switch": (4, lambda i, j: "NV2", "nvlink-mesh"),
    "unequal links": (4, lambda i, j: "NV2" if i + j == 3 else "NV1", "nvlink-mesh"),
    "two boards of four": (8, lambda i, j: half(i, j, 4, "NV6", "SYS"), "nvlink-mesh"),
    "a bridge": (2, lambda i, j: "NV4", "nvlink-pairs"),
    "bridges": (8, lambda i, j: half(i, j, 2, "NV12", "NODE"), "nvlink-pairs"),
    "one bridge of two": (4, lambda i, j: "NV4" if i + j == 1 else "PHB", "nvlink-pairs"),
    "one switch": (4, lambda i, j: "PIX", "pcie-switch"),
    "two switches": (8, lambda i, j: half(i, j, 4, "PIX", "PXB"), "pcie-switch"),
    "host bridge": (4, lambda i, j: half(i, j, 2, "PIX", "PHB"), "pcie-host"),
    "host bridges": (4, lambda i, j: "NODE", "pcie-host"),
    "two sockets": (8, lambda i, j: half(i, j, 4, "PIX", "SYS"), "cross-socket"),
    "two sockets, old label": (4, lambda i, j: half(i, j, 2, "PHB", "SOC"), "cross-socket"),
    "one GPU": (1, None, None),
}


@pytest.mark.parametrize("name", CLASSES)
def test_class(tmp_path, name):
    gpus, link, expected = CLASSES[name]
    facts = of(tmp_path, topo(gpus, link))["facts"]
    assert (facts["gpus"], facts["class"]) == (gpus, expected)
    assert len(facts["links"]) == gpus * (gpus - 1) // 2
    assert all(facts["links"][f"{i}-{j}"] == link(i, j) for i in range(gpus) for j in range(i))\
        if gpus == 1 else facts["links"]["0-1"] == link(0, 1)  # fmt: skip


def test_placement(tmp_path):
    def verdict(gpus, link):
        return of(tmp_path, topo(gpus, link))["verdict"]

    assert verdict(8, lambda i, j: "NV18").startswith("one 8-GPU job")
    apart = verdict(8, lambda i, j: half(i, j, 4, "NODE", "SYS"))
    assert apart.startswith("two 4-GPU jobs on {0,1,2,3} (NODE) and {4,5,6,7} (NODE)")
    # the sets are found, not taken in order
    odd = verdict(8, lambda i, j: "PIX" if i % 2 == j % 2 else "SYS")
    assert odd.startswith("two 4-GPU jobs on {0,2,4,6} (PIX) and {1,3,5,7} (PIX)")
    boards = verdict(8, lambda i, j: half(i, j, 4, "NV6", "SYS"))
    assert "two 4-GPU jobs" in boards and "rather than one 8-GPU job" in boards
    pairs = verdict(8, lambda i, j: half(i, j, 2, "NV4", "NODE"))
    assert pairs.startswith("four 2-GPU jobs on the bridged pairs {0,1} {2,3} {4,5} {6,7}")


def test_a_ring_of_nvlink_through_a_cube_mesh(tmp_path):
    double = {(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (0, 4), (3, 7)}
    single = {(0, 2), (1, 3), (0, 3), (4, 6), (5, 7), (4, 7), (1, 5), (2, 6)}

    def link(i, j):
        pair = (min(i, j), max(i, j))
        return "NV2" if pair in double else "NV1" if pair in single else "SYS"

    result = of(tmp_path, topo(8, link))
    assert result["facts"]["class"] == "nvlink-mesh"
    assert result["verdict"].startswith("one 8-GPU job, in a ring over NV2")
    assert "0-1-2-3-7-6-5-4" in result["why"]


def test_nics_and_their_distance(tmp_path):
    text = topo(4, lambda i, j: "NV18", ["NIC0", "NIC1", "NIC2"],
                lambda i, k: "PIX" if (i, k) in ((0, 1), (0, 2)) else "PXB" if i == 1 and k == 0
                else "NODE" if i == 2 else "SYS", numa=lambda i: str(i // 2))  # fmt: skip
    result = of(tmp_path, text + "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: bnxt_re0\n")
    facts = result["facts"]
    assert facts["nics"] == ["NIC0", "NIC1", "NIC2"]
    assert facts["nic_names"] == {"NIC0": "mlx5_0", "NIC1": "bnxt_re0"}
    assert facts["gpu_nic"] == {"0": "NIC1", "1": "NIC0", "2": "NIC0", "3": "NIC0"}
    assert facts["gpu_nics"]["0"] == ["NIC1", "NIC2"]
    assert facts["gpu_nic_distance"] == {"0": "PIX", "1": "PXB", "2": "NODE", "3": "SYS"}
    assert "2 NODE, 3 SYS; beyond PXB" in result["why"]
    assert facts["numa_nodes"] == 2


@pytest.mark.parametrize("nic", ["mlx5_0", "mlx5_bond_0", "bnxt_re0", "hfi1_0", "rdmap79s0"])
def test_names_of_nics(tmp_path, nic):
    facts = of(tmp_path, topo(2, lambda i, j: "SYS", [nic], lambda i, k: "NODE"))["facts"]
    assert (facts["nics"], facts["gpu_nic"]["1"]) == ([nic], nic)


def test_numa_nodes(tmp_path):
    def nodes(label="PHB", **kwargs):
        return of(tmp_path, topo(4, lambda i, j: label, **kwargs))["facts"]["numa_nodes"]

    assert nodes() == 1
    assert nodes(numa=lambda i: str(2 * i + 1)) == 4
    assert nodes(cpus=lambda i: "0-15" if i < 2 else "16-31") == 2  # drivers without the column
    assert nodes("SYS") == 2  # all GPUs on one node, the link leads to another
    assert nodes(numa=lambda i: f"{i // 2},{2 + i}-{9 + i}") == 2  # Grace: its GPU's memory too


def test_a_screen_of_80_columns_wraps_header_and_rows():
    facts = read(str(OUTPUTS / "topo_wrapped_at_80.txt"))["facts"]
    assert (facts["gpus"], len(facts["nics"]), facts["numa_nodes"]) == (8, 12, 2)
    assert facts["gpu_nic"] == {str(i): f"NIC{i}" for i in range(8)}


def test_cells_that_the_screen_glued_together(tmp_path):
    text = topo(2, lambda i, j: "NV12", ["NIC0", "NIC1"], lambda i, k: "PXB")
    facts = of(tmp_path, text.replace("PXB\tPXB\t0-31", "PXBPXB\t0-31"))["facts"]
    assert facts["gpu_nics"] == {"0": ["NIC0", "NIC1"], "1": ["NIC0", "NIC1"]}


def test_a_row_that_is_missing_is_read_from_its_column(tmp_path):
    text = topo(8, lambda i, j: f"NV{1 + min(i, j)}").split("\n\n")[0]
    whole = of(tmp_path, text)["facts"]["links"]
    assert of(tmp_path, text.rsplit("\n", 1)[0])["facts"]["links"] == whole
    with pytest.raises(UsageError, match="GPU6 to GPU7 is not shown"):
        of(tmp_path, text.rsplit("\n", 2)[0])


def test_without_header_and_legend(tmp_path):
    rows = topo(3, lambda i, j: "PIX" if i + j == 1 else "PHB").split("\n\n")[0]
    facts = of(tmp_path, rows.split("\n", 1)[1])["facts"]
    assert facts["links"] == {"0-1": "PIX", "0-2": "PHB", "1-2": "PHB"}


def test_other_tools_around_it(tmp_path):
    text = "| NVIDIA-SMI 550.54 |\n$ nvidia-smi topo -m\n" + topo(2, lambda i, j: "SYS")
    text += (OUTPUTS / "topo_p2p.txt").read_text()
    assert of(tmp_path, text)["facts"]["links"] == {"0-1": "SYS"}


P2P = "\tGPU0\tGPU1\n GPU0\tX\t{0}\n GPU1\t{0}\tX\n\nLegend:\n\n  OK   = Status Ok\n"


@pytest.mark.parametrize("said, words", [("OK", "Peer access is on"), ("GNS", "is off (GNS"),
                                         ("NS", "is off (NS"), ("CNS", "is off (CNS")])  # fmt: skip
def test_peer_access_in_the_same_file(tmp_path, said, words):
    """`topo -p2p` below the matrix is no second matrix, and says what the matrix cannot."""
    result = of(tmp_path, topo(2, lambda i, j: "PHB") + P2P.format(said))
    assert result["facts"]["peer_access"] == {"0-1": said} and words in result["why"]
    assert "matrices" not in result["why"] and "GeForce" not in result["why"]
    assert "topo -p2p" not in result["next"]


def test_a_second_matrix_is_counted_when_it_has_rows(tmp_path):
    one = topo(2, lambda i, j: "PHB")
    assert "holds 2 matrices" in of(tmp_path, one + topo(2, lambda i, j: "SYS"))["why"]
    assert "matrices" not in of(tmp_path, one + "\tGPU0\tGPU1\tCPU Affinity\n")["why"]


def test_the_nic_of_a_gpu_whose_row_is_missing_is_not_shown(tmp_path):
    text = topo(4, lambda i, j: "NV18", ["NIC0"], lambda i, k: "PIX").split("GPU3\t ")[0]
    text = "\n".join(line for line in text.splitlines() if not line.startswith(("GPU3", "NIC0")))
    result = of(tmp_path, text)
    assert result["facts"]["gpu_nic"] == {"0": "NIC0", "1": "NIC0", "2": "NIC0"}
    assert "The NIC of GPU 3 is not shown" in result["why"]
    assert "without a near NIC" not in result["why"]


def test_sockets_that_are_not_equally_full(tmp_path):
    result = of(tmp_path, topo(6, lambda i, j: "NODE" if (i < 4) == (j < 4) else "SYS"))
    assert result["verdict"].startswith("one job of 4 on {0,1,2,3} (NODE), one of 2 on {4,5}")
    assert "CUDA_VISIBLE_DEVICES=0,1,2,3, then CUDA_VISIBLE_DEVICES=4,5" in result["next"]


def test_what_is_not_shown_is_not_said(tmp_path):
    """No NIC in the matrix may mean a container without them, or EFA."""
    assert "TCP" not in of(tmp_path, topo(2, lambda i, j: "SYS"))["why"]


def test_a_number_below_the_rows_is_no_affinity(tmp_path):
    rows = topo(2, lambda i, j: "PHB").split("\n\n")[0].splitlines()
    bare = "\n".join(["\tGPU0\tGPU1", *("\t".join(r.split("\t")[:3]) for r in rows[1:]), "6", ""])
    assert of(tmp_path, bare)["facts"]["gpu_numa"] == {"0": None, "1": None}


def test_a_matrix_of_pcie_alone_says_nothing_of_nvlink(tmp_path):
    matrix = topo(8, lambda i, j: half(i, j, 4, "NODE", "SYS"))
    result = of(tmp_path, "$ nvidia-smi topo -mp\n" + matrix)
    assert result["verdict"].startswith("unknown: topo -mp shows PCIe only")
    assert result["facts"]["class"] is None and "No NVLink" not in result["why"]
    assert of(tmp_path, "$ nvidia-smi topo -m\n" + matrix)["facts"]["class"] == "cross-socket"


@pytest.mark.parametrize("label", ["NV0", "N/A"])
def test_a_path_that_no_driver_names(tmp_path, label):
    result = of(tmp_path, topo(2, lambda i, j: label))
    assert result["facts"]["class"] is None and "does not name" in result["why"]


def test_paths_that_a_virtual_machine_hides(tmp_path):
    flat = of(tmp_path, topo(4, lambda i, j: "SYS", numa=lambda i: str(i // 2)))
    assert "hides how" in flat["why"]
    apart = of(tmp_path, topo(2, lambda i, j: "SYS", numa=lambda i: str(i)))
    assert "hides how" not in apart["why"]
