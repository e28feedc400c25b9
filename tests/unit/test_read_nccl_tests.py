"""Output of nccl-tests: facts over its versions, and a verdict only where the hardware is known."""

from pathlib import Path

import pytest
from read_outputs import COLUMNS, HEADER, devices, footer, rows, run

from scalelab.cluster import UsageError
from scalelab.doctor.read import read

OUTPUTS = Path(__file__).parent / "outputs"
H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"


def of(tmp_path, text: str) -> dict:
    path = tmp_path / "tests.txt"
    path.write_text(text)
    result = read(str(path))
    assert result["kind"] == "nccl-tests"
    return result


def facts_of(name: str, *keys: str) -> list:
    facts = read(str(OUTPUTS / name))["facts"]
    return [facts[key] for key in keys]


VERDICTS = {
    # ranks, per node, GPU, busbw reached, first word
    "A100, its ring": (8, 8, A100, 234, "good"),
    "A100, more than its links": (8, 8, A100, 420, "unknown"),
    "two A100, of four or of eight": (2, 2, A100, 190, "unknown"),
    "two A100 of a board of four": (2, 2, A100, 90, "good"),
    "A100, over PCIe": (8, 8, A100, 20, "slow"),
    "H100 with NVLS": (8, 8, H100, 480, "good"),
    "H100, half the links": (8, 8, H100, 200, "slow"),
    "A800 has 8 links": (8, 8, "NVIDIA A800-SXM4-80GB", 160, "good"),
    "B200": (8, 8, "NVIDIA B200", 830, "good"),
    "B200 like an H100": (8, 8, "NVIDIA B200", 360, "slow"),
    "3090 with a bridge": (2, 2, "NVIDIA GeForce RTX 3090", 48, "good"),
    "4090, patched": (4, 4, "NVIDIA GeForce RTX 4090", 24, "good"),
    "4090, as it is sold": (4, 4, "NVIDIA GeForce RTX 4090", 8, "unknown"),
    "4090, worse": (4, 4, "NVIDIA GeForce RTX 4090", 1.5, "slow"),
    "V100, two of a mesh": (2, 2, "Tesla V100-SXM2-16GB", 45, "good"),
    "two nodes at NVLink's speed": (16, 8, H100, 480, "good"),
    "two nodes, some NICs": (16, 8, H100, 180, "unknown"),
    "two nodes over TCP": (16, 8, H100, 1.1, "slow"),
    "one GPU a node, its port full": (4, 1, H100, 48.5, "good"),
    "one GPU a node, another port": (4, 1, H100, 24, "unknown"),
    "T4 over some Ethernet": (2, 1, "Tesla T4", 1.1, "unknown"),
    "a GPU nobody knows": (8, 8, "NVIDIA Graphics Device", 300, "unknown"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_against_the_line_rate(tmp_path, name):
    ranks, per_node, gpu, rate, word = VERDICTS[name]
    result = of(tmp_path, run(ranks, per_node, gpu, rate))
    assert result["verdict"].split(":")[0] == word, result
    facts = result["facts"]
    assert (facts["nodes"], facts["ranks"]) == (ranks // per_node, ranks)
    assert facts["max_busbw"] == pytest.approx(rate, rel=0.02)
    assert (facts["avg_busbw"], facts["wrong"], facts["independent_runs"]) == (50, 0, False)


@pytest.mark.parametrize(
    "op", ["all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "sendrecv"]
)
def test_every_test_is_named(tmp_path, op):
    assert of(tmp_path, run(8, 8, A100, 230, op=op))["facts"]["test"] == f"{op}_perf"


def test_ranks_and_test_follow_from_rows_alone(tmp_path):
    for ranks in (2, 8, 16, 48):
        text = rows(200, 2 * (ranks - 1) / ranks, smallest=1 << 30)
        facts = of(tmp_path, text)["facts"]
        if ranks > 2:  # with two, every factor is 1 or a half
            assert facts["ranks"] == ranks
        assert (facts["test"], facts["nodes"]) == ("all_reduce_perf", None)
    assert of(tmp_path, text)["verdict"].startswith("unknown")
    gathered = of(tmp_path, rows(200, 7 / 8, smallest=1 << 30, redop="none"))["facts"]
    assert gathered["test"] == "all_gather_perf or alltoall_perf"  # the rows are the same


def test_ranks_are_not_guessed_beyond_the_digits_printed(tmp_path):
    for ranks in (249, 256, 1024):
        text = rows(74, 2 * (ranks - 1) / ranks, smallest=1 << 25, largest=1 << 30)
        assert of(tmp_path, text)["facts"]["ranks"] in (None, ranks)
    for ranks in (4, 16):
        text = rows(300, (ranks - 1) / ranks, smallest=1 << 30, redop="none")
        assert of(tmp_path, text)["facts"]["ranks"] == ranks


def test_an_average_below_all_rows_is_of_others_too(tmp_path):
    text = run(8, 8, H100, 360, smallest=1 << 30)
    assert "rows that are not shown" in of(tmp_path, text)["why"]
    assert "small messages too" in of(tmp_path, run(8, 8, H100, 360))["why"]


def test_a_sweep_that_ends_before_the_link_is_full_is_not_slow(tmp_path):
    result = of(tmp_path, run(8, 8, H100, 360, largest=1 << 22))
    assert result["verdict"].startswith("unknown") and "too small" in result["verdict"]
    flat = of(tmp_path, run(8, 8, H100, 12, largest=1 << 27))  # levelled off: it is slow
    assert flat["verdict"].startswith("slow")


def test_wrong_values(tmp_path):
    text = run(8, 8, H100, 360, smallest=1 << 28, wrong=("0", "512"))
    result = of(tmp_path, text.replace("0 OK", "6 FAILED"))
    assert result["verdict"] == "broken: 3072 wrong values"
    unchecked = of(tmp_path, run(8, 8, H100, 360, wrong=("N/A", "N/A")))
    assert unchecked["facts"]["wrong"] is None and unchecked["verdict"].startswith("good")
    half = of(tmp_path, run(8, 8, H100, 360, wrong=("0", "N/A")))
    assert half["facts"]["wrong"] == 0


def test_one_rank_has_busbw_0_by_definition(tmp_path):
    result = of(tmp_path, run(1, 1, "NVIDIA GeForce RTX 5090", 700, redop="sum"))
    assert result["verdict"] == "unknown: one rank, whose busbw is 0 by definition"
    assert (result["facts"]["ranks"], result["facts"]["max_busbw"]) == (1, 0)


def test_single_rank_runs_taken_for_one(tmp_path):
    keys = ("nodes", "ranks", "independent_runs")
    assert facts_of("tests_four_jobs.txt", *keys) == [4, 1, True]
    assert read(str(OUTPUTS / "tests_four_jobs.txt"))["verdict"].startswith("not-one-job: 4 ")
    # rows alone, of many processes at once
    once = rows(1, 1e-9, smallest=1 << 27, largest=1 << 30).splitlines()
    result = of(tmp_path, "\n".join(line for line in once for _ in range(3)) + "\n" + footer(0))
    assert result["facts"]["independent_runs"] is True
    # two jobs of eight
    two = HEADER * 2 + devices(8, 8, H100) + devices(8, 8, H100).replace("node-a", "node-b")
    two += COLUMNS * 2 + "".join(
        line + "\n" for line in rows(360, 1.75).splitlines() for _ in range(2)
    )
    result = of(tmp_path, two + footer() * 2)
    assert [result["facts"][key] for key in keys] == [2, 8, True]


KEYS = ("nodes", "ranks", "independent_runs")


def test_repeats_on_the_same_machines_are_no_mistake(tmp_path):
    first, second = run(8, 8, H100, 360), run(8, 8, H100, 350).replace("Pid   40", "Pid   51")
    result = of(tmp_path, first + second)
    assert [result["facts"][key] for key in KEYS] == [1, 8, False]
    assert len(result["facts"]["runs"]) == 2 and result["verdict"].startswith("good")
    for rest in (second[:3000], second.replace("# Avg", "# Gone"), HEADER):  # the second one broke
        assert of(tmp_path, first + rest)["facts"]["independent_runs"] is False
        assert of(tmp_path, first.split("# Out")[0] + rest)["facts"]["independent_runs"] is False
    slow = of(tmp_path, first + run(8, 8, H100, 90))
    assert slow["verdict"].startswith("slow: run 2 of 2")


def test_runs_on_other_machines_one_after_the_other_are_not_one_job(tmp_path):
    first, second = run(8, 8, H100, 480), run(8, 8, H100, 470).replace("node-a", "node-b")
    for rest in (second, second[:3000], second.replace("# Avg", "# Gone")):
        result = of(tmp_path, first + rest)
        assert [result["facts"][key] for key in KEYS] == [2, 8, True]
        assert result["verdict"].startswith("not-one-job: 2 separate runs of 8 ranks each inside")
        assert "mpirun -np 16 -H node-a:8,node-b:8 ./build/all_reduce_perf" in result["next"]
    assert of(tmp_path, first + HEADER)["facts"]["independent_runs"] is False
    pairs = run(16, 8, H100, 360) + run(16, 8, H100, 365).replace("node-b", "node-c")
    result = of(tmp_path, pairs)
    assert [result["facts"][key] for key in KEYS] == [3, 16, True]
    assert "inside one machine" not in result["verdict"]


@pytest.mark.parametrize("one, two", [((8, 8), (16, 8)), ((16, 8), (8, 8))])
def test_a_series_over_more_machines_is_read_run_by_run(tmp_path, one, two):
    text = "".join(run(*size, H100, 480 if size[0] == 8 else 190) for size in (one, two))
    result = of(tmp_path, text)
    assert [result["facts"][key] for key in KEYS] == [1, 8, False]  # of the run of the figure
    assert result["verdict"].startswith("good: 479")
    assert "2 runs: " in result["why"] and f"the figures are of run {1 + (one[0] == 16)}" in (
        result["why"])  # fmt: skip
    assert [r["ranks"] for r in result["facts"]["runs"]] == [one[0], two[0]]


def test_other_tests_in_the_file_are_not_held_against_each_other(tmp_path):
    text = run(8, 8, H100, 480) + run(8, 8, H100, 180, op="sendrecv")
    result = of(tmp_path, text)
    assert result["verdict"].startswith("good")
    assert result["facts"]["test"] == "all_reduce_perf" and "sendrecv" in result["why"]


def test_a_first_try_that_broke_off_is_no_second_job(tmp_path):
    """Devices are listed twice before a run ends; only one table follows."""
    hung = (HEADER + devices(8, 8, H100) + COLUMNS).replace("Pid   40", "Pid   61")
    for host in ("node-a", "node-b"):
        result = of(tmp_path, hung.replace("node-a", host) + run(8, 8, H100, 480))
        assert [result["facts"][key] for key in KEYS] == [1, 8, False]
        assert result["verdict"].startswith("good")
    # two at once, in turns: twice as many rows, or last lines
    mixed = HEADER + devices(8, 8, H100) + hung.replace("node-a", "node-b") + COLUMNS
    twice = "".join(line + "\n" for line in rows(480, 1.75).splitlines() for _ in range(2))
    for text in (mixed + twice, mixed + rows(480, 1.75) + footer() * 2, mixed):
        assert of(tmp_path, text)["facts"]["independent_runs"] is True


def test_lists_of_devices_whose_lines_are_mixed(tmp_path):
    a, b = (devices(8, 8, H100).replace("node-a", host).splitlines() for host in ("n1", "n2"))
    lists = "".join(f"{x}\n{y}\n" for x, y in zip(a, b))
    twice = "".join(line + "\n" for line in rows(480, 1.75).splitlines() for _ in range(2))
    result = of(tmp_path, HEADER * 2 + lists + COLUMNS * 2 + twice + footer() * 2)
    assert result["verdict"].startswith("not-one-job: 2 separate runs of 8 ranks each inside")


def test_rows_without_bytes_say_nothing_of_jobs(tmp_path):
    """A reduce-scatter of a few bytes over many ranks has rows of size 0."""
    zero = "           0             0     float     sum      -1     5.70    0.00    0.00      0 "
    facts = of(tmp_path, COLUMNS + (zero + "    5.54    0.00    0.00      0\n") * 3)["facts"]
    assert (facts["independent_runs"], facts["ranks"]) == (False, None)


def test_footers_alone(tmp_path):
    text = " Out of bounds values : 0 OK\n Avg bus bandwidth    : 300 \n"
    result = of(tmp_path, text + text.replace("300", "70"))
    facts = result["facts"]
    assert (facts["max_busbw"], facts["ranks"], facts["test"]) == (300, None, None)
    assert result["verdict"].startswith("slow: run 2 of 2 reaches 70")
    assert "no less" in result["why"] and "nothing of each other" not in result["why"]
    alike = of(tmp_path, text + text.replace("300", "301"))
    assert alike["verdict"].startswith("unknown") and "nothing of each other" in alike["why"]


def test_old_versions():
    keys = ("test", "nodes", "ranks", "max_busbw", "avg_busbw", "wrong", "independent_runs")
    assert facts_of("tests_old_columns.txt", *keys) == [
        "all_reduce_perf", 1, 4, 71.24, 46.4, 0, False
    ]  # fmt: skip
    assert facts_of("tests_v20.txt", *keys) == ["all_reduce_perf", 1, 2, 9.87, 3.5, 0, False]


def test_rows_that_log_lines_cut_in_two():
    facts = read(str(OUTPUTS / "tests_with_log_lines.txt"))["facts"]
    assert facts["runs"][0]["rows"] == 13
    assert (facts["ranks"], facts["nodes"], facts["max_busbw"]) == (16, 2, 44.99)


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[0]", "0: ", "[prterun-a-7@1,0]<stdout>:"])
def test_launchers_tags_within_rows(tmp_path, tag):
    text = run(8, 8, H100, 360)
    whole = of(tmp_path, text)
    tagged = text.replace("  -1  ", f"  -1 {tag}  ")
    assert of(tmp_path, tagged) == whole
    assert of(tmp_path, "".join(tag + line + "\n" for line in tagged.splitlines())) == whole
    # and a row whose figures came a line later
    split = text.replace("  -1  ", f"  -1 {tag}node-a:1:2 [0] NCCL INFO Channel 00\n{tag}  ", 1)
    assert of(tmp_path, split) == whole


def test_two_ranks_on_one_gpu_say_nothing_of_the_hardware(tmp_path):
    text = run(2, 2, "NVIDIA GeForce RTX 5090", 2.3).replace("device  1", "device  0")
    result = of(tmp_path, text.replace("0000:11:00", "0000:10:00"))
    assert result["facts"]["shared_gpus"] and result["verdict"].startswith("unknown: 2 ranks share")
    # virtual machines show no address at all
    virtual = run(8, 8, A100, 230)
    for bus in range(16, 24):
        virtual = virtual.replace(f"[0000:{bus:02x}:00]", "[0x00]")
    assert of(tmp_path, virtual)["verdict"].startswith("good")


def test_failures(tmp_path):
    start = HEADER + devices(2, 2, A100) + COLUMNS
    busy = "node-a: Test CUDA failure common.cu:1304 'CUDA-capable device(s) is/are busy'\n"
    result = of(tmp_path, start + busy.replace("busy", "busy or unavailable"))
    assert result["verdict"].startswith("broken before the first row: a GPU is in use")
    assert result["facts"]["max_busbw"] is None
    after = of(tmp_path, start + rows(200, 1, largest=64) + busy)
    assert after["verdict"].startswith("broken after 4 rows")
    crash = of(tmp_path, start + rows(200, 1, largest=64) + "*** Signal: Segmentation fault (11)\n")
    assert crash["verdict"].startswith("broken: it ended before the table did")
    limit = "slurmstepd: error: *** JOB 7 ON a CANCELLED AT 1 DUE TO TIME LIMIT ***\n"
    hung = of(tmp_path, start + limit)
    assert "hung until the job's time limit" in hung["verdict"]
    nothing = of(tmp_path, start)
    assert nothing["verdict"] == "unknown: no row was measured"


def test_a_file_cut_anywhere_is_read_up_to_there_or_refused(tmp_path):
    text = run(8, 8, H100, 360)
    whole = of(tmp_path, text)["facts"]["max_busbw"]
    for end in range(0, len(text) - 40, 37):
        (tmp_path / "tests.txt").write_text(text[:end])
        try:
            result = read(str(tmp_path / "tests.txt"))
        except UsageError as e:
            assert end < 500 and "\n" not in str(e)
            continue
        facts = result["facts"]
        assert (facts["wrong"] or 0) == 0 and (facts["max_busbw"] or 0) <= whole
        assert result["verdict"].startswith(("unknown", "good")), (end, result["verdict"])
        assert facts["avg_busbw"] is None and "independent" not in result["verdict"]


def test_the_log_in_the_file_tells_why_it_failed():
    result = read(str(OUTPUTS / "tests_no_route.txt"))
    assert result["verdict"].startswith("broken before the first row: there is no route")
