"""NCCL_DEBUG=INFO logs: what is used, what failed, and who is only a victim."""

from pathlib import Path

import pytest

from scalelab.doctor.read import read

OUTPUTS = Path(__file__).parent / "outputs"
IB = "NET/IB : Using [0]mlx5_0:1/{} [1]mlx5_1:1/{} [RO]; OOB eth0:10.0.0.1<0>"


def info(*bodies: str) -> str:
    return "".join(f"node-a:10:20 [0] NCCL INFO {body}\n" for body in bodies)


def warn(body: str, where: str = "misc/socket.cc:48") -> str:
    return f"\nnode-b:11:21 [1] {where} NCCL WARN {body}\n"


def of(tmp_path, text: str) -> dict:
    path = tmp_path / "log.txt"
    path.write_text(text)
    result = read(str(path))
    assert result["kind"] == "nccl-log"
    return result


def test_a_healthy_log_of_this_time():
    result = read(str(OUTPUTS / "log_ib_gdr.txt"))
    facts = result["facts"]
    assert facts["version"] == "2.27.7+cuda12.9"
    assert facts["transport"] == ["NET/IB", "NVLS", "P2P/CUMEM"]
    assert facts["interfaces"] == ["eth0", "mlx5_0", "mlx5_1"]
    assert facts["hcas"] == {"mlx5_0": "IB", "mlx5_1": "IB"}
    assert (facts["gdr"], facts["errors"], facts["ranks"], facts["nodes"]) == (True, [], 16, 2)
    assert result["verdict"] == "healthy: NET/IB with GPUDirect RDMA"


def test_a_log_of_2018_without_the_tag():
    facts = read(str(OUTPUTS / "log_nccl22.txt"))["facts"]
    assert facts["version"] == "2.2.13+cuda9.0"
    assert facts["transport"] == ["NET/IB", "P2P/IPC"] and facts["gdr"] is True
    assert facts["interfaces"] == ["ib0", "mlx5_0"]


VIA = {
    "P2P/IPC": "P2P/IPC",
    "P2P/CUMEM/read": "P2P/CUMEM",
    "P2P/direct pointer": "P2P/direct",
    "SHM/direct/direct": "SHM",
    "direct shared memory": "SHM",
    "NET/IB/0/GDRDMA": "NET/IB",
    "NET/IB/3(2)/GDRDMA/Shared": "NET/IB",
    "NET/IBext_v8/0": "NET/IBext_v8",
    "NET/Socket/0": "NET/Socket",
    "NET/AWS Libfabric/4/GDRDMA": "NET/AWS Libfabric",
    "NET/FasTrak/0/GDRDMA": "NET/FasTrak",
    "COLLNET/SHARP/0/GDRDMA": "CollNet",
}


@pytest.mark.parametrize("text", VIA)
def test_transports(tmp_path, text):
    for line in ("Channel 00/0 : 0[0] -> 1[1] via ", "Ring 00 : 0 -> 8 [send] via "):
        facts = of(tmp_path, info(line + text))["facts"]
        assert facts["transport"] == [VIA[text]]
        network = text.startswith(("NET", "COLL"))
        assert facts["gdr"] is (("GDRDMA" in text) if network else None)


def test_interfaces(tmp_path):
    def names(*bodies):
        return of(tmp_path, info(*bodies))["facts"]["interfaces"]

    assert names("Bootstrap : Using [0]ib1:10.0.0.1<0> [1]ib4:10.0.0.2<0>") == ["ib1", "ib4"]
    assert names("Bootstrap: Using eno1:fe80::1%eno1<0>") == ["eno1"]
    assert names("Bootstrap : Using [0]ib0:10.0.0.1<0> [1]ib0:0:10.0.0.2<0>") == ["ib0", "ib0:0"]
    assert names("NET : Using interface lo:127.0.0.1<0>") == ["lo"]
    assert names("CUDA Dev 0, IP Interfaces : eth0(PXB) eth1(SOC)") == ["eth0", "eth1"]
    assert names(IB.format("IB", "IB/SHARP")) == ["mlx5_0", "mlx5_1", "eth0"]
    cut = info(IB.format("IB", "IB"))  # by a screen
    at = cut.index("_1:1/IB")
    assert of(tmp_path, cut[:at] + "\n" + cut[at:])["facts"]["interfaces"][2:] == ["eth0"]


def test_gdr_on_one_machine_is_not_shown(tmp_path):
    text = info("Channel 00 : 0[0] -> 1[1] via P2P/IPC", "Connected rings, use ring PXN 0 GDR 1")
    assert of(tmp_path, text)["facts"]["gdr"] is None
    far = info("NET/IB : GPU Direct RDMA Disabled for GPU 0[0] / HCA 0 'mlx5_0' (no module)")
    assert of(tmp_path, far)["facts"]["gdr"] is False
    assert of(tmp_path, info("DMA-BUF is available on GPU device 0", "Using network IB"))[
        "facts"]["gdr"] is None  # fmt: skip


WORKS = {
    "over TCP, as told": (
        info("NCCL_IB_DISABLE set by environment to 1.", "Using network Socket",
             "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"), "NCCL_IB_DISABLE=1 is set"),
    "over TCP, no device": (
        info("NET/IB : No device found.", "Using network Socket",
             "Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0"), "finds no RDMA device"),
    "without GPUDirect": (
        info(IB.format("IB", "IB"), "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0"),
        "without GPUDirect RDMA"),
    "forced": (
        info("NCCL_NET_GDR_LEVEL set by environment to SYS",
             "Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA"), "forced"),
    "mixed ports": (info(IB.format("IB", "RoCE")), "NCCL_IB_HCA=^"),
    "host memory": (info("Channel 00 : 0[0] -> 1[1] via SHM/direct/direct"), "host memory (SHM)"),
    "between machines over NVLink": (
        info("comm 0x5 rank 0 nRanks 8 nNodes 2 localRanks 4 localRank 0 MNNVL 1",
             "Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM"), "over NVLink between machines"),
    "harmless": (
        info("Using network Socket") + warn("Failed to open libibverbs.so[.1]"), "no error"),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_what_works_is_not_called_broken(tmp_path, name):
    text, words = WORKS[name]
    result = of(tmp_path, text)
    assert not result["verdict"].startswith("broken") and result["facts"]["errors"] == []
    assert words in " ".join((result["verdict"], result["why"], result["next"]))


BROKEN = {
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 3000": "same GPU",
    "Call to connect to 10.0.0.2<34567> failed : Connection timed out": "firewall",
    "socketStartConnect: Connect to 10.0.0.2<34567> failed : No route to host": "no route",
    "socketStartConnect: Connect to 10.0.0.2<34567> failed : Connection refused": "nobody listens",
    "Bootstrap : no socket interface found": "no network interface",
    "Call to posix_fallocate failed : No space left on device": "/dev/shm",
    "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_2:1": "RDMA level",
    "Call to ibv_modify_qp failed with error Network is unreachable": "no route from this NIC",
    "Call to ibv_reg_mr failed with error Cannot allocate memory": "locked",
    "NET/IB : Got completion from peer 10.0.0.2<9> with error 12, opcode 1, len 0": "error 12",
    "NET/IB: Got completion from peer 10.0.0.2<9> with status=12 opcode=1 len=0": "error 12",
    "NET/IB: Got completion from peer 10.0.0.2<9> with status=IBV_WC_RETRY_EXC_ERR(12)": "error 12",
    "NET/IB : mlx5_3:1 async fatal event on QP (0x73): local work queue error": "fatal error",
    "NET/IB : Remote IB device is incompatible with the local [0]mlx5_0:1/RoCE": "different kinds",
    "Failed to CUDA calloc async 608 bytes": "free memory",
    "Cuda failure 802 'system not yet initialized'": "NVSwitch",
    "Cuda failure 'uncorrectable ECC error encountered'": "GPU failed",
    "Message truncated : received 1024 bytes instead of 256": "ranks disagree",
    "Net : Connection closed by remote peer node-b<47861>": "victim",
    "Net : Call to recv from 10.0.0.1<58355> failed : Connection reset by peer": "victim",
    "NET/OFI Unable to register memory (type = 1) for device 0. RC: 12": "network adapter",
    "NET/OFI Request 0x7f completed with error. RC: 103. (Unresponsive receiver)": "EFA",
    "A message that nobody has seen yet": "A message that nobody has seen yet",
}


@pytest.mark.parametrize("message", BROKEN)
def test_errors(tmp_path, message):
    result = of(tmp_path, info("NCCL version 2.20.5+cuda12.4") + warn(message) * 3)
    assert result["verdict"].startswith("broken: ") and BROKEN[message] in result["verdict"]
    (error,) = result["facts"]["errors"]
    assert error.startswith(f"line 3: {message}") and error.endswith("[3 times]")
    assert "Line 3: " in result["why"] and "node-b, GPU 1" in result["why"]


def test_the_cause_comes_before_what_follows_from_it():
    result = read(str(OUTPUTS / "log_port_down.txt"))
    assert result["verdict"] == "broken: a NIC's port went down"
    assert len(result["facts"]["errors"]) == 2


def test_a_victim_of_an_error_that_is_in_the_same_log(tmp_path):
    text = info("Using network IB") + warn("Connection closed by remote peer node-c<1>")
    text += warn("Cuda failure 'unspecified launch failure'")
    assert "GPU failed" in of(tmp_path, text)["verdict"]


def test_interfaces_that_lead_nowhere(tmp_path):
    result = read(str(OUTPUTS / "log_docker0.txt"))
    assert "docker0, which leads to no other machine" in result["verdict"]
    text = info("Bootstrap : Using [0]lo:127.0.0.1<0> [1]eth0:10.0.0.1<0>")
    text += warn("Call to connect failed : Connection refused")
    result = of(tmp_path, text)
    assert "loopback" in result["verdict"] and "NCCL_SOCKET_IFNAME=eth0" in result["next"]
    retry = info("Bootstrap : Using eth0:10.0.0.1<0>",
                 "Call to connect returned Connection timed out, retrying")  # fmt: skip
    assert of(tmp_path, retry)["verdict"].startswith("hangs while connecting")


def test_what_stands_after_nccls_lines(tmp_path):
    begun = info("NCCL version 2.20.5", "Using network IB")
    limit = "slurmstepd: error: *** STEP 1.0 ON a CANCELLED AT 2026-01-01 DUE TO TIME LIMIT ***\n"
    assert "time limit" in of(tmp_path, begun + limit)["verdict"]
    watchdog = "[rank1]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4)\n"
    assert "did not end in time" in of(tmp_path, begun + watchdog)["verdict"]
    aborted = info("comm 0x1 rank 0 nranks 2 cudaDev 0 busId 1 - Abort COMPLETE")
    assert "aborted" in of(tmp_path, begun + aborted)["verdict"]


@pytest.mark.parametrize("label", ["10: ", " 10: ", "[rank10]: "])
def test_the_rank_that_a_launcher_names(tmp_path, label):
    text = info("Using network IB") + label + warn("Cuda failure 'out of memory'").strip() + "\n"
    (error,) = of(tmp_path, text)["facts"]["errors"]
    assert error.endswith("(rank 10, node-b, GPU 1)")


def test_a_log_without_its_warnings(tmp_path):
    result = of(tmp_path, info("Using network IB", "transport/net.cc:533 -> 2", "group.cc:64 -> 2"))
    assert result["verdict"].startswith("broken: NCCL returned a system error")
    assert "Line 2: transport/net.cc:533" in result["why"]


def test_two_versions_in_one_job(tmp_path):
    text = "NCCL version 2.14.3+cuda11.7\nNCCL version 2.18.1+cuda12.1\n"
    text += warn("Message truncated : received 64 bytes instead of 32")
    assert "2.14.3+cuda11.7, 2.18.1+cuda12.1" in of(tmp_path, text)["verdict"]


def test_where_a_message_comes_from_counts(tmp_path):
    """A CUDA failure means other things in NVLS and in shared memory than elsewhere."""
    failure = "Cuda failure 1 'invalid argument'"
    said = {"transport/nvls.cc:254": "NVLS", "misc/shmutils.cc:103": "refused the shared memory",
            "enqueue.cc:47": "a CUDA call failed"}  # fmt: skip
    for place, words in said.items():
        text = warn(failure, place)
        if "shm" in place:
            text += warn("Error while creating shared memory segment /dev/shm/nccl-a (size 1)")
        result = of(tmp_path, text)
        assert words in result["verdict"] and place in result["why"]
    twice = f"NCCL WARN {failure}\n" + warn(failure, "transport/nvls.cc:254")  # the place is later
    assert "NVLS" in of(tmp_path, twice)["verdict"]


def test_a_plugin_that_does_not_start_is_no_failure(tmp_path):
    text = warn("NET/OFI Only EFA provider is supported", "ofi_init:700")
    text += warn("NET/OFI aws-ofi-nccl initialization failed", "ofi_init:701")
    result = of(tmp_path, text)
    assert result["verdict"].startswith("no error") and result["facts"]["transport"] == []
    assert len(result["facts"]["warnings"]) == 2
    text += info("NET/Socket : Using [0]eth0:10.0.0.1<0>", "Using network Socket")
    result = of(tmp_path, text)
    assert result["facts"]["transport"] == ["NET/Socket"] and "did not start" in result["why"]


def test_infiniband_is_known_by_its_errors(tmp_path):
    text = warn("NET/IB : Got completion from peer 10.0.0.2<9> with status=12", "ib_plugin.c:1615")
    assert of(tmp_path, text)["facts"]["transport"] == ["NET/IB"]


def test_peer_access_that_is_off(tmp_path):
    result = of(tmp_path, info("P2P is disabled between connected GPUs 2 and 1. You can"))
    assert "peer access is off" in result["verdict"] and "Line 1" in result["why"]


def test_ranks_that_are_connected_by_what_is_not_shown(tmp_path):
    result = of(tmp_path, info("comm 0x7 rank 0 nranks 8 cudaDev 0 busId 92000 - Init COMPLETE"))
    assert result["verdict"].startswith("no error: the ranks are connected")


def test_the_interface_to_take_is_named(tmp_path):
    text = info("Bootstrap : Using [0]veth1:10.0.0.1<0> [1]eno1:10.0.1.1<0>")
    result = of(tmp_path, text + warn("Connect to 10.0.0.2<5> failed : Connection timed out"))
    assert "veth1" in result["verdict"]
    assert result["next"].startswith("export NCCL_SOCKET_IFNAME=eno1 ")


def test_the_last_error_that_pytorch_repeats(tmp_path):
    text = info("NCCL_SOCKET_IFNAME set by environment to eth9")
    text += "[w0|0]:ncclInternalError: Internal check failed.\n[w0|0]:Last error:\n"
    text += "[w0|0]:ncclSocketInit: connecting to address  with family 7 is neither AF_INET(2)\n"
    result = of(tmp_path, text)
    assert "finds no network interface" in result["verdict"] and "Line 4" in result["why"]
    assert ".." not in result["why"]
