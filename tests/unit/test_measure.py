"""The cost model, the fit and the prediction of a step: each against a count or a simulation of
its own, and each shown to reject what is commonly written instead."""

import json
import os
import random
import subprocess
import sys
from statistics import median

import pytest

from scalelab.cluster import UsageError
from scalelab.measure import cost, step, sweep
from scalelab.measure.fit import fit
from scalelab.runs import RunError

# --- cost: messages counted one by one


def simulate_ring(n):
    """(rounds, share of the whole that a rank sends) of a ring all-reduce, by doing it."""
    held = [[{r} for _ in range(n)] for r in range(n)]  # held[rank][chunk]: whose numbers are in
    sent, rounds = [0] * n, 0
    for phase in range(2):
        for k in range(n - 1):
            moving = [((r + phase - k) % n, held[r][(r + phase - k) % n]) for r in range(n)]
            for r, (chunk, content) in enumerate(moving):
                sent[r] += 1
                right = (r + 1) % n
                held[right][chunk] = content | (held[right][chunk] if phase == 0 else set())
            rounds += 1
    assert all(chunk == set(range(n)) for rank in held for chunk in rank)
    return rounds, max(sent) / n


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_a_ring_costs_the_rounds_and_bytes_that_it_takes(n):
    rounds, share = simulate_ring(n)
    assert cost.FORMS["ring"].latency(n) == rounds
    assert cost.FORMS["ring"].bandwidth(n) == pytest.approx(share)
    assert cost.bus_factor("all-reduce", n) == pytest.approx(share)


@pytest.mark.parametrize(("n", "up"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_a_tree_goes_up_and_down(n, up):
    assert cost.FORMS["tree"].latency(n) == 2 * up
    assert cost.FORMS["recursive-doubling"].latency(n) == up


def test_bus_factors_are_those_of_nccl_tests():
    """PERFORMANCE.md: all-reduce 2(n-1)/n, all-gather and reduce-scatter (n-1)/n, others 1."""
    assert [cost.bus_factor(op, 4) for op in sweep.OPS] == [1.5, 0.75, 0.75, 1, 1]
    assert {cost.bus_factor(op, 1) for op in sweep.OPS} == {0}
    with pytest.raises(ValueError, match="all-reduce"):
        cost.bus_factor("allreduce", 4)


def test_hierarchical_moves_what_was_published_for_4_nodes_of_8():
    """Of 4 GiB: 7 GiB inside a node, 0.75 GiB between nodes (ML Engineering Open Book)."""
    slow = (0.0, 1.0)  # one byte a second: seconds are bytes
    never = (0.0, float("inf"))
    assert cost.hierarchical(4, 8, 4, slow, never) == pytest.approx(7)
    assert cost.hierarchical(4, 8, 4, never, slow) == pytest.approx(0.75)
    assert cost.hierarchical(4, 8, 4, (1.0, 1e30), (0.0, 1e30)) == pytest.approx(14)  # 2(g-1)
    assert cost.hierarchical(4, 8, 4, (0.0, 1e30), (1.0, 1e30)) == pytest.approx(6)  # 2(k-1)


def test_a_torus_uses_both_links_of_a_rank():
    """As much traffic as a flat ring over two links at once: half the time, far fewer rounds."""
    flat = cost.seconds("ring", 1e9, 64, 0, 1e9)
    assert cost.torus(1e9, 8, 8, 0, 1e9) == pytest.approx(flat / 2)
    assert cost.torus(0, 8, 8, 1.0, 1e9) == 2 * 7 + 2 * 7 < cost.seconds("ring", 0, 64, 1.0, 1e9)


@pytest.mark.parametrize("n", [4, 8, 64])
def test_at_the_crossover_both_take_alike_long(n):
    alpha, beta = 1e-3, 1e8
    at = cost.crossover(n, alpha, beta)
    tree, ring = (cost.seconds(form, at, n, alpha, beta) for form in ("tree", "ring"))
    assert tree == pytest.approx(ring)
    tree, ring = (cost.seconds(form, at / 2, n, alpha, beta) for form in ("tree", "ring"))
    assert tree < ring
    # No more messages than a tree, and fewer bytes: always quicker.
    assert cost.crossover(2, alpha, beta) == cost.crossover(3, alpha, beta) == 0


# --- fit


def noisy(seed, n=4, alpha=5e-4, beta=1.2e8, noise=0.04):
    rng = random.Random(seed)
    sizes = [4096 * 2**i for i in range(15)]
    return [(s, cost.seconds("ring", s, n, alpha, beta) * (1 + rng.gauss(0, noise))) for s in sizes]


def plain_least_squares(points, n):
    """What is usually written: seconds over bytes, all points alike."""
    x, y = [p[0] for p in points], [p[1] for p in points]
    mx, my = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)
    return (my - slope * mx) / (2 * (n - 1)), 2 * (n - 1) / n / slope


def test_alpha_and_beta_come_back_from_exact_times():
    for form in ("ring", "tree", "ring-all-gather", "send-recv"):
        points = [(s, cost.seconds(form, s, 4, 3e-4, 1e8)) for s in (1e3, 1e5, 1e7)]
        found = fit(points, 4, form)
        assert (found.alpha, found.beta) == pytest.approx((3e-4, 1e8))
        assert found.misfit < 1e-9 and found.alpha_error < 1e-9
        assert found.seconds(5e6) == pytest.approx(cost.seconds(form, 5e6, 4, 3e-4, 1e8))


def test_noise_of_4_percent_leaves_alpha_within_10_and_its_error_says_so():
    found = [fit(noisy(seed), 4) for seed in range(200)]
    assert median(abs(f.alpha / 5e-4 - 1) for f in found) < 0.02
    assert max(abs(f.alpha / 5e-4 - 1) for f in found) < 0.1
    assert max(abs(f.beta / 1.2e8 - 1) for f in found) < 0.08
    inside = sum(abs(f.alpha - 5e-4) < 2 * f.alpha_error for f in found)
    assert 175 <= inside <= 200  # two standard errors: about 19 of 20
    inside = sum(abs(f.beta - 1.2e8) < 2 * f.beta_error for f in found)
    assert 175 <= inside <= 200


def test_plain_least_squares_would_not_do():
    """Must fail: the large sizes' noise is larger than the whole of a small size's time."""
    wrong = [plain_least_squares(noisy(seed), 4)[0] for seed in range(50)]
    assert median(abs(alpha / 5e-4 - 1) for alpha in wrong) > 0.3


def test_an_unsure_point_counts_for_less():
    points = [(s, cost.seconds("ring", s, 4, 5e-4, 1e8), 0.02) for s in (1e3, 1e4, 1e5, 1e6, 1e7)]
    points[0] = (points[0][0], points[0][1] * 2, 1.0)  # a scheduler's hiccup, seen as spread
    assert fit(points, 4).alpha == pytest.approx(5e-4, rel=0.01)
    assert fit([p[:2] for p in points], 4).alpha > 5.5e-4


@pytest.mark.parametrize(
    ("points", "n", "words"),
    [
        ([(1, 1.0), (2, 2.0)], 1, "one rank"),
        ([(1, 1.0), (1, 1.1)], 2, "two sizes"),
        ([], 2, "two sizes"),
        ([(1e3, 2.0), (1e6, 1.0), (1e9, 0.5)], 2, "do not grow"),
        ([(1e3, 0.0), (1e6, 1.0)], 2, "above 0"),
        ([(1e3, float("nan")), (1e6, 1.0)], 2, "above 0"),
    ],
)
def test_what_cannot_be_fitted_is_said(points, n, words):
    with pytest.raises(ValueError, match=words):
        fit(points, n)


@pytest.mark.parametrize(
    ("points", "n"),
    [
        ([(float("nan"), 1.0), (2, 2.0)], 2), ([(float("inf"), 1.0), (2, 2.0)], 2),
        ([(-1, 1.0), (2, 2.0)], 2), ([(1, 1e-300), (2, 2e-300)], 2),
        ([(1, 1.0), (2, 2.0)], 2.5), ([(1, 1.0), (2, 2.0)], float("nan")),
        ([(1, 1.0), (2, 2.0)], "2"), ([(1, 1.0, float("nan")), (2, 2.0, 0.1)], 2),
        ([(1, 1.0, -0.5), (2, 2.0, 0.1)], 2),
    ],
)  # fmt: skip
def test_a_fit_of_nonsense_is_refused(points, n):
    with pytest.raises(ValueError):
        fit(points, n)


def test_two_points_are_no_proof():
    """Must fail: a line through two points leaves nothing over, so its error came out as 0."""
    exact = [(s, cost.seconds("ring", s, 2, 5e-4, 1e8)) for s in (65536, 1 << 20)]
    found = fit(exact, 2)
    assert found.alpha == pytest.approx(5e-4)
    assert 0.01 < found.beta_error / found.beta < 0.1
    unsure = fit([(*point, 0.2) for point in exact], 2)
    assert unsure.alpha_error == pytest.approx(10 * found.alpha_error)
    # The error is right: what noise of 2 % does to such a fit.
    rng = random.Random(4)
    tries = [fit([(s, t * (1 + rng.gauss(0, 0.02))) for s, t in exact], 2) for _ in range(500)]
    off = median(abs(f.alpha - 5e-4) for f in tries) / 0.6745
    assert off == pytest.approx(found.alpha_error, rel=0.15)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "asked",
    [
        *(lambda n=n: cost.seconds("ring", 1e6, n, 1e-4, 1e9) for n in (0, -1, 2.5, NAN, "2")),
        *(lambda n=n: cost.bus_factor("all-reduce", n) for n in (0, -1, 2.5, NAN, "2")),
        *(lambda b=b: cost.seconds("ring", 1e6, 2, 1e-4, b) for b in (0, -1, NAN, None)),
        *(lambda a=a: cost.seconds("ring", 1e6, 2, a, 1e9) for a in (NAN, INF, "x")),
        *(lambda s=s: cost.seconds("ring", s, 2, 1e-4, 1e9) for s in (-1, NAN, INF)),
        *(lambda n=n: cost.crossover(n, 1e-4, 1e9) for n in (0, -1)),
        lambda: cost.crossover(4, 1e-4, 0),
        *(lambda n=n: cost.hierarchical(1, n, 2, (1, 1), (1, 1)) for n in (0, -1, 1.5)),
        lambda: cost.hierarchical(1, 2, 0, (1, 1), (1, 1)),
        *(lambda n=n: cost.torus(1, n, 2, 1, 1) for n in (0, -1)),
        *(lambda m=m: step.predict(1, 1, 1, [1], abs, m) for m in (0, -1, 1.5, NAN)),
        *(lambda b=b: step.predict(1, 1, 1, [b], abs) for b in (-1, NAN, INF)),
        *(lambda s=s: step.predict(s, 1, 1, [1], abs) for s in (-1, NAN)),
        *(lambda s=s: step.predict(1, s, 1, [1], abs) for s in (-1, NAN)),
        lambda: step.predict(1, 1, 1, [1], lambda b: NAN),
        lambda: step.buckets([4], -1),
        *(lambda b=b: step.buckets([b]) for b in (-4, NAN)),
        lambda: fit([(1, 1.0), (2, 2.0)], 2).seconds(-1),
    ],
)  # fmt: skip
def test_what_no_cluster_has_is_refused_in_words(asked):
    with pytest.raises(ValueError, match="use a|carries nothing"):
        asked()


def test_what_is_odd_but_has_an_answer():
    assert cost.seconds("ring", 0, 2, 1e-4, 1e9) == 2e-4
    assert cost.seconds("ring", 1e6, 1, 1e-4, 1e9) == 0 == cost.bus_factor("all-gather", 1)
    assert cost.crossover(4, -1e-6, 1e9) == 0  # as fitted to noise
    assert step.predict(0, 0, 0, [], abs).share == 0
    assert step.predict(1, 1, 1, [0, 0], abs).seconds == 3
    assert step.predict(1, 1, 1, [], abs).communication == 0


# --- step


def test_all_hidden_all_exposed_and_between():
    def comm(nbytes):
        return nbytes / 100

    # backward 1 s, four buckets of 25 bytes ready at .25, .5, .75 and 1 s
    fast = step.predict(0.5, 1.0, 0.1, [25] * 4, lambda b: b / 1000)
    assert fast.seconds == pytest.approx(0.5 + 1.0 + 0.025 + 0.1)  # the last bucket only
    slow = step.predict(0.5, 1.0, 0.1, [25] * 4, comm)
    assert slow.seconds == pytest.approx(0.5 + 0.25 + 4 * 0.25 + 0.1)  # first ready, then the wire
    assert slow.communication == pytest.approx(1.0) and slow.exposed == pytest.approx(0.25)
    one = step.predict(0.5, 1.0, 0.1, [100], comm)
    assert one.exposed == pytest.approx(1.0)  # one bucket overlaps nothing
    assert one.share == pytest.approx(1.0 / 2.6)


def test_accumulation_pays_once():
    four = step.predict(0.5, 1.0, 0.1, [100], lambda b: b / 100, micro_batches=4)
    assert four.seconds == pytest.approx(4 * 1.5 + 1.0 + 0.1)


def test_buckets_are_those_of_ddp(tmp_path):
    """Asked of DDP itself, after it has sorted them."""
    script = tmp_path / "ask.py"
    script.write_text(
        "import json, sys, torch, torch.distributed as dist\n"
        "from torch import nn\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0,"
        " world_size=1)\n"
        "for widths, cap in json.loads(sys.argv[2]):\n"
        "    layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:])]\n"
        "    model = DDP(nn.Sequential(*layers), bucket_cap_mb=cap)\n"
        "    for _ in range(3):\n"
        "        model(torch.randn(2, widths[0])).sum().backward()\n"
        "    sizes = [p.numel() * 4 for p in model.parameters()]\n"
        "    said = model._get_ddp_logging_data()['rebuilt_bucket_sizes']\n"
        "    print(json.dumps([sizes, [int(w) for w in said.split(',')]]))\n"
        "dist.destroy_process_group()\n"
    )
    shapes = [[64, 64], [512] * 6, [1024, 256, 1024, 64, 8], [300, 900, 900, 300], [256] * 40]
    cases = [(widths, cap) for widths in shapes for cap in (None, 2)] + [([1024] * 9, None)]
    done = subprocess.run(
        [sys.executable, script, tmp_path / "store", json.dumps(cases)], check=True,
        capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(lines) == len(cases)
    for (_, cap), (sizes, said) in zip(cases, lines):
        assert step.buckets(sizes, cap=cap and cap << 20) == said
    assert len(lines[-1][1]) == 2 and sum(len(said) > 2 for _, said in lines) >= 2


# --- what is asked of a sweep


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("4K:32K", [4096, 8192, 16384, 32768]),
        ("4K:64K:4", [4096, 16384, 65536]),
        ("4K:60K", [4096, 8192, 16384, 32768]),
        ("1M,4,1M", [4, 1 << 20]),
        ([8, 4], [4, 8]),
        ("8:8", [8]),
        ("1:1G:1000", [1, 1000, 10**6, 10**9]),
    ],
)
def test_sizes(text, sizes):
    assert sweep.parse_sizes(text) == sizes


@pytest.mark.parametrize(
    "text",
    ["", ":", "4K:", "4X", "64M:4K", "4K:64K:1", "4K:64K:0", "4K:64K:2:2", "1:2:x", "-4", "0",
     "nan", [], None, [0], 7, b"4K", "1:1024G:2:", ",".join(map(str, range(1, 70)))],
)  # fmt: skip
def test_sizes_that_make_no_sense(text):
    with pytest.raises(UsageError, match="^sizes"):
        sweep.parse_sizes(text)


@pytest.mark.parametrize(
    ("text", "gbs"), [("1gbit", 0.125), ("400gbit", 50), ("450GB/s", 450), ("0.9 gb/s", 0.9)]
)
def test_line_rates(text, gbs):
    assert sweep.parse_line_rate(text) == pytest.approx(gbs)
    assert sweep.parse_line_rate(None) is None


@pytest.mark.parametrize("text", ["", "3", "GB/s", "1.2.3GB/s", "-1gbit", "0GB/s", "unlimited"])
def test_line_rates_that_make_no_sense(text):
    with pytest.raises(UsageError, match="^line rate"):
        sweep.parse_line_rate(text)


def test_a_saved_result_is_read_and_nothing_else_is(tmp_path):
    for name, text in {"a": "", "b": "[]", "c": "{}", "d": "\0", "e": '{"rows": []}',
                       "deep": "[" * 99999,
                       "f": '{"rows": 5, "op": "all-reduce", "world_size": 2, "fits": {}}',
                       "g": '{"rows": [{}], "op": "all-reduce", "world_size": 2, "fits": {}}',
                       "h": '{"rows": [], "op": "all-reduce", "world_size": NaN, "fits": {}}',
                       }.items():  # fmt: skip
        (tmp_path / name).write_text(text)
        with pytest.raises(RunError) as told:
            sweep.load(tmp_path / name)
        assert "\n" not in str(told.value) and str(tmp_path / name) in str(told.value)
    with pytest.raises(RunError):
        sweep.load(tmp_path / "missing")


def result_of(op="all-reduce", alpha=5e-4, beta=1e8, **told):
    """As Sweep makes one, of times that are exact."""
    form = "ring"  # what gloo uses for both
    rows = [
        {"bytes": s, "time_us": 1e6 * cost.seconds(form, s, 2, 2 * alpha, beta), "spread": 0.02,
         "rounds": 5}
        for s in (65536, 1 << 20, 1 << 24)
    ]  # fmt: skip
    found = {"op": op, "rows": rows, "world_size": 2, "backend": "gloo", "alpha_us": None,
             "alpha_us_error": None, "beta_gbs": None, "beta_gbs_error": None, "fits": {},
             "efficiency": 0.9, "note": "", **told}  # fmt: skip
    sweep.add_fits(found)
    return found


def test_doubts_are_said():
    assert sweep.doubts(result_of()) == []
    (said,) = sweep.doubts(result_of(efficiency=9447.0))
    assert "more than the line rate" in said
    (said,) = sweep.doubts(result_of(alpha=-2e-5))
    assert "no latency is below 0" in said
    (said,) = sweep.doubts(result_of("reduce-scatter"))
    assert "twice the bytes" in said


def test_a_sweep_needs_a_cluster():
    for what in (None, "local", 2):
        with pytest.raises(UsageError, match="^cluster"):
            sweep.Sweep(what)
    for what in (["float32"], None, {}):
        with pytest.raises(UsageError, match="^dtype"):
            sweep.check("all-reduce", "4K", what)
