"""Sweeps by real ranks: results checked, bytes counted, alpha found, failures told."""

import json

import pytest
from outside import Call, eventually, scalelab, write

from scalelab import cli, cluster, commands
from scalelab.cluster.probe import gpus
from scalelab.measure import sweep
from scalelab.measure.sweep import RANKS, Sweep
from scalelab.runs import RunError

needs_virtual = pytest.mark.skipif(
    bool(cluster.virtual_problem()), reason=cluster.virtual_problem() or "-"
)
slow = pytest.mark.slow

# DESIGN.md, command line
KEYS = {"rows", "alpha_us", "beta_gbs", "line_rate_gbs", "efficiency", "world_size", "nodes"}
ROW_KEYS = {"bytes", "time_us", "algbw", "busbw", "wrong", "spread"}


@slow
@pytest.mark.parametrize(
    ("op", "dtype"),
    [("all-reduce", "bfloat16"), ("all-gather", "uint8"), ("reduce-scatter", "float16"),
     ("broadcast", "int64"), ("send-recv", "float64")],
)  # fmt: skip
def test_every_operation_is_checked_on_odd_sizes(op, dtype):
    with cluster.start("local", 1) as c:
        found = sweep.measure(c, op, [1, 1000, 70001], dtype=dtype, nproc_per_node=3, timeout=90)
    assert [row["wrong"] for row in found["rows"]] == [0, 0, 0]
    assert found["world_size"] == 3 and found["backend"] == "gloo"
    for row in found["rows"]:
        assert row["algbw"] == pytest.approx(row["bytes"] / row["time_us"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"] * sweep.bus_factor(op, 3))
        assert row["rounds"] >= 3


@slow
@pytest.mark.parametrize(
    ("op", "name", "spoil"),
    [("all-reduce", "all_reduce", "a[0][-1] += (dist.get_rank() == 1)"),
     ("all-reduce", "all_reduce", "a[0].copy_(a[0].roll(1))"),
     ("all-gather", "all_gather_single", "a[0].copy_(a[0].roll(a[1].numel()))"),
     ("reduce-scatter", "reduce_scatter_single", "a[0].copy_(a[0].roll(2))"),
     ("broadcast", "broadcast", "a[0][0] += dist.get_rank()")],
)  # fmt: skip
def test_a_damaged_result_is_counted(op, name, spoil, tmp_path, monkeypatch):
    """Must fail: one number off on one rank, pieces in the wrong place."""
    damaged = write(tmp_path / "damaged.py", f"""
import sys
sys.path.insert(0, {str(RANKS.parent)!r})
import torch.distributed as dist
whole = dist.{name}
def spoiled(*a, **k):
    done = whole(*a, **k)
    if a[0].element_size() == 4:  # the script's own sums, of float64, stay as they are
        {spoil}
    return done
dist.{name} = spoiled
import collective_ranks
collective_ranks.main()
""")  # fmt: skip
    monkeypatch.setattr(sweep, "RANKS", damaged)
    with cluster.start("local", 1) as c:
        found = sweep.measure(c, op, [4096], nproc_per_node=2, timeout=90)
    assert found["rows"][0]["wrong"] > 0


@pytest.mark.slow
@needs_virtual
@pytest.mark.parametrize("nodes", [2, pytest.param(4, marks=slow)])
def test_wire_bytes_are_those_of_theory(nodes):
    """At 16 MB and 1 gbit within 2 %, as the interface counts them."""
    with cluster.start("virtual", nodes, rate="1gbit") as c:
        found = sweep.measure(c, "all-reduce", "16M", timeout=120)
    (row,) = found["rows"]
    assert row["theory_bytes"] == 2 * (nodes - 1) / nodes * (16 << 20)
    assert row["wire_bytes"] == pytest.approx(row["theory_bytes"], rel=0.02)
    # Must fail: what other formulas would have said.
    for wrong in (16 << 20, (nodes - 1) / nodes * (16 << 20), 2 * (16 << 20)):
        if wrong != row["theory_bytes"]:
            assert row["wire_bytes"] != pytest.approx(wrong, rel=0.02)
    assert 0.5 < found["efficiency"] <= 1.0  # make bench holds it tighter
    assert found["line_rate_gbs"] == 0.125


@slow
@needs_virtual
def test_alpha_is_the_delay_that_was_set():
    with cluster.start("virtual", 2, rate="1gbit", delay="20ms") as c:
        found = sweep.measure(c, "all-reduce", "1K:1M:4", timeout=120)
        c.set_link(delay="5ms")
        nearer = sweep.measure(c, "all-reduce", "1K:1M:4", timeout=120)
    assert found["alpha_us"] == pytest.approx(20_000, rel=0.15)
    assert nearer["alpha_us"] == pytest.approx(5_000, rel=0.15)
    assert found["alpha_us_error"] < 0.15 * found["alpha_us"]
    assert found["link"]["delay"] == 0.02 and nearer["link"]["delay"] == 0.005


@slow
def test_a_rank_that_dies_is_named_and_the_rows_are_kept(tmp_path, monkeypatch):
    dies = write(tmp_path / "dies.py", f"""
import os, sys
sys.path.insert(0, {str(RANKS.parent)!r})
import collective_ranks
def measure(op, nbytes, *rest, m=collective_ranks.measure):
    if nbytes > 100 and os.environ["RANK"] == "1":
        raise RuntimeError("the cable is out")
    return m(op, nbytes, *rest)
collective_ranks.measure = measure
collective_ranks.main()
""")  # fmt: skip
    monkeypatch.setattr(sweep, "RANKS", dies)
    with cluster.start("local", 2) as c:
        going = Sweep(c, "all-reduce", [64, 4096], timeout=90).wait()
        with pytest.raises(RunError, match="first failure: rank 1.*"):
            going.result()
        assert "the cable is out" in going.run.first_failure["error"]
        assert [row["bytes"] for row in going.result(partial=True)["rows"]] == [64]


@slow
def test_one_rank_has_no_bus_bandwidth():
    with cluster.start("local", 1) as c:
        found = sweep.measure(c, "all-reduce", "4K,8K", timeout=90)
    assert {row["busbw"] for row in found["rows"]} == {0}
    assert found["alpha_us"] is None and "one rank" in found["note"]


@slow
@needs_virtual
def test_a_pair_of_ranks_on_a_host_is_not_quicker_than_the_link():
    """Must fail: the mean over ranks, of which those that send across the link are done as soon
    as the kernel has their bytes, was 1.8 times the line rate."""
    with cluster.start("virtual", 2, rate="500mbit") as c:
        found = sweep.measure(c, "send-recv", "1M", nproc_per_node=2, timeout=90)
    assert 0.7 < found["efficiency"] < 1.05


@slow
def test_hosts_are_counted_by_what_they_share():
    """Two nodes of a local cluster are one host: all bytes go through its loopback."""
    with cluster.start("local", 2) as c:
        found = sweep.measure(c, "all-reduce", "4M", timeout=90)
    (row,) = found["rows"]
    assert row["theory_bytes"] == 2 * (4 << 20)
    assert row["wire_bytes"] == pytest.approx(row["theory_bytes"], rel=0.1)


@slow
def test_sizes_below_a_number_are_one_row():
    with cluster.start("local", 1) as c:
        going = Sweep(c, "all-gather", [1, 2, 3, 9], dtype="float64", nproc_per_node=2, timeout=90)
        assert going.sizes == [16]
        assert [row["bytes"] for row in going.wait().result()["rows"]] == [16]


# --- the command


@pytest.mark.slow
def test_the_command_keeps_its_contract(tmp_path):
    out = tmp_path / "kept.json"
    call = scalelab(tmp_path, "bench", "all-reduce", "--cluster", "local", "--sizes", "4K:64K:4",
                    "--json", "--line-rate", "10gbit", "--out", out)  # fmt: skip
    assert call.code == 0, call.err
    found = call.json
    assert KEYS <= set(found) and found["world_size"] == 2 and len(found["nodes"]) == 2
    assert [row["bytes"] for row in found["rows"]] == [4096, 16384, 65536]
    assert all(ROW_KEYS <= set(row) for row in found["rows"])
    assert found["line_rate_gbs"] == 1.25 and found["efficiency"] > 0
    assert sweep.load(out) == found == sweep.load(f"{found['dir']}/sweep.json")
    assert "busbw" in call.err  # the table, for the person


@slow
def test_the_table_goes_to_stdout_without_json(tmp_path):
    call = scalelab(tmp_path, "bench", "send-recv", "--cluster", "local", "--sizes", "1K,64K")
    assert call.code == 0, call.err
    assert "busbw" in call.out and "64K" in call.out and "alpha" in call.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["allreduce"], "all-reduce"), ([], "OP"), (["all-reduce", "--sizes", "4X"], "4X"),
        (["all-reduce", "--sizes", ""], "sizes"), (["all-reduce", "--dtype", "f32"], "float32"),
        (["all-reduce", "--backend", "mpi"], "gloo"),
        pytest.param(["all-reduce", "--backend", "nccl"], "no NVIDIA GPU",
                     marks=pytest.mark.skipif(gpus() > 0, reason="there is a GPU")),
        (["all-reduce", "--line-rate", "3"], "line rate"),
        (["all-reduce", "--out", "/nonexistent/x.json"], "--out"),
        (["all-reduce", "--out", "/"], "--out"), (["all-reduce", "--timeout", "0"], "timeout"),
        (["all-reduce", "--out", "~nobody-of-this-name/x"], "--out"),
        (["all-reduce", "--out", "a" * 300], "--out"), (["all-reduce", "--out", ""], "--out"),
        (["all-reduce", "--out", "/dev/null"], "--out"),  # it would be replaced by a file
        (["all-reduce", "--nproc-per-node", "0"], "nproc-per-node"),
        (["all-reduce", "--sizes", "900G"], "memory"), (["all-reduce", "extra"], "extra"),
        (["all-reduce", "--size", "4K"], "--size"),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line(args, words, tmp_path):
    call = scalelab(tmp_path, "bench", *args)
    assert call.code == 2 and not call.out
    assert words in call.line


@needs_virtual
def test_sizes_that_would_outlast_the_limit_are_refused(tmp_path):
    call = scalelab(tmp_path, "bench", "all-reduce", "--rate", "1mbit", "--sizes", "64M")
    assert call.code == 2 and "the time limit is 600 s" in call.line


@slow
@needs_virtual
def test_ctrl_c_keeps_what_was_measured_and_leaves_nothing(tmp_path):
    call = Call(tmp_path, ("bench", "all-reduce", "--rate", "10mbit", "--sizes", "4K,4M")).start()
    assert eventually(lambda: any(f.stat().st_size for f in tmp_path.rglob("metrics/rank0.jsonl")))
    call.ctrl_c().finish(30)
    assert call.code == 130, call.err
    assert "4K" in call.out and "4M" not in call.out and "Traceback" not in call.err


@slow
def test_rows_that_never_came_are_missed(tmp_path, monkeypatch, capsys):
    """All ranks ended well, but not with all that was asked: the object is there, exit 1."""
    few = write(tmp_path / "few.py", f"""
import os, sys
sys.path.insert(0, {str(RANKS.parent)!r})
import collective_ranks
sys.argv = sys.argv[:-1]  # one size less
open(os.environ["SCALELAB_METRICS"], "a").write('{{"op": "all-reduce", "step": 0, "rank": 0}}\\n')
collective_ranks.main()
""")  # fmt: skip
    monkeypatch.setattr(sweep, "RANKS", few)
    monkeypatch.setattr(commands, "end_on_signals", lambda: None)  # not in this process
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path / "home"))
    out = tmp_path / "kept.json"
    assert cli.main(["bench", "all-reduce", "--cluster", "local", "--nodes", "1", "--sizes",
                     "4K,8K", "--json", "--out", str(out)]) == 1  # fmt: skip
    said = capsys.readouterr()
    assert [row["bytes"] for row in json.loads(said.out)["rows"]] == [4096]
    assert "1 of 2 sizes" in said.err and "was not written" in said.err and not out.exists()


@slow
def test_an_out_that_fails_late_costs_the_copy_only(tmp_path):
    """The name fits; the one beside it that is written first does not."""
    out = tmp_path / ("a" * 253)
    call = scalelab(tmp_path, "bench", "all-reduce", "--cluster", "local", "--nodes", "1",
                    "--nproc-per-node", "2", "--sizes", "4K", "--json", "--out", out)  # fmt: skip
    assert call.code == 1 and call.json["rows"] and "was not written" in call.err


@slow
def test_a_link_stays_one_and_its_file_is_written(tmp_path):
    out, link = write(tmp_path / "kept.json", "old"), tmp_path / "link.json"
    link.symlink_to(out)
    call = scalelab(tmp_path, "bench", "all-reduce", "--cluster", "local", "--nodes", "1",
                    "--nproc-per-node", "2", "--sizes", "4K", "--json", "--out", link)  # fmt: skip
    assert call.code == 0 and link.is_symlink() and sweep.load(out) == call.json


@slow
def test_a_result_that_cannot_be_saved_is_still_given(tmp_path):
    (tmp_path / "run" / "sweep.json").mkdir(parents=True)  # a file cannot take its place
    with cluster.start("local", 1) as c:
        going = Sweep(c, sizes="4K", nproc_per_node=2, timeout=90, run_dir=tmp_path / "run").wait()
        assert going.result()["rows"] == going.result()["rows"] != []
    assert len(going.run.problems) == 1 and "sweep.json" in going.run.problems[0]
