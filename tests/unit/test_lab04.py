"""What lab 04's judges compare with is itself right."""

import itertools
import math
import random
import re

import numpy as np
import pytest

from scalelab.grading.bench import Rank
from scalelab.grading.labs.lab04 import fit, parts, reports, step, topologies
from scalelab.grading.verdict import Wrong


def test_the_reference_fit_is_well_within_what_is_asked():
    for d in fit.data_sets():
        alpha, beta = fit.reference(d["sizes"], d["seconds"], d["world_size"])
        assert alpha == pytest.approx(d["alpha"], rel=0.5 * fit.ALPHA_WITHIN)
        assert beta == pytest.approx(d["beta"], rel=0.8 * fit.BETA_WITHIN)


def test_a_fit_of_logarithms_passes_too():
    """Another sound method than the one in the solution."""
    np = pytest.importorskip("numpy")
    for d in fit.data_sets():
        n, s, t = d["world_size"], np.array(d["sizes"], float), np.array(d["seconds"])
        a, b = np.log(d["alpha"] * 1.5), np.log(d["beta"] * 0.7)
        for _ in range(50):  # Gauss-Newton on log t
            parts = np.stack([2 * (n - 1) * np.exp(a) * s**0, 2 * (n - 1) / n * s / np.exp(b)])
            model = parts.sum(0)
            slopes = (parts * [[1], [-1]] / model).T
            da, db = np.linalg.lstsq(slopes, np.log(t / model), rcond=None)[0]
            a, b = a + da, b + db
        assert np.exp(a) == pytest.approx(d["alpha"], rel=fit.ALPHA_WITHIN)
        assert np.exp(b) == pytest.approx(d["beta"], rel=fit.BETA_WITHIN)


def cases():
    return [(*c[:3], list(c[3]), c[4], *step.LINKS[c[5]], c[6]) for c in step.CASES]


def test_the_spelt_out_step_is_the_one_of_measure():
    for case in cases():
        assert step.step_time(*case) == pytest.approx(step.right(case))


def test_every_wrong_model_of_a_step_is_off_by_more_than_is_allowed_and_named():
    for model, words in step.MISTAKES:
        off = [c for c in cases() if abs(model(*c) / step.right(c) - 1) > 1.05 * step.WITHIN]
        assert off, words
        named = [w for m, w in step.MISTAKES if
                 all(m(*c) == pytest.approx(model(*c), rel=1e-4) for c in off)]  # fmt: skip
        assert named[0] == words, f"{words!r} would be called {named[0]!r}"


def test_rings_are_all_rings_once():
    assert sum(1 for _ in topologies.rings(range(8))) == 2520
    assert len(list(topologies.rings([0, 1, 2, 3]))) == 3


@pytest.mark.parametrize("name", topologies.GIVEN)
def test_other_numbers_change_no_best(name):
    links = topologies.GIVEN[name]
    other = topologies.renumbered(links, 3)
    one, two = topologies.best(links), topologies.best(other)
    assert topologies.score(links, one["eight"]) == topologies.score(other, two["eight"])
    assert topologies.fours_score(links, one["fours"]) == topologies.fours_score(
        other, two["fours"]
    )


def test_a_cube_mesh_has_six_links_a_gpu_and_a_ring_of_doubled_ones():
    links = topologies.cube_mesh()
    for gpu in topologies.GPUS:
        names = [topologies.between(links, gpu, g) for g in topologies.GPUS if g != gpu]
        assert sorted(names) == ["NV1", "NV1", "NV2", "NV2", "SYS", "SYS", "SYS"]
    ring = topologies.best(links)["eight"]
    assert {link for *_, link in topologies.hops(links, ring)} == {"NV2"}


def test_by_number_is_not_the_best_where_there_is_a_choice():
    for name in ("cube mesh", "bridged pairs"):
        for links in (topologies.GIVEN[name], *(topologies.renumbered(topologies.GIVEN[name], s)
                      for s in (11, 12))):  # fmt: skip
            best = topologies.best(links)
            assert topologies.score(links, range(8)) < topologies.score(links, best["eight"])


def test_links_are_in_order():
    names = ["SYS", "NODE", "PHB", "PXB", "PIX", "NV1", "NV2", "NV12", "NV18"]
    assert sorted(names, key=topologies.speed) == names


@pytest.mark.parametrize("seed", (4, 5))
def test_a_report_says_what_ran(seed):
    for r in reports.reports(seed):
        starts = r.text.count("Rank  0 ")
        lines = [line for line in r.text.splitlines() if " Rank " in line]
        assert starts == len(r.jobs) and len(lines) == sum(n for n, _ in r.jobs), r.name
        honest = r.jobs == ((r.claim["ranks"], r.claim["nodes"]),)
        reached = reports.top(r.text) >= 0.98 * r.claim["busbw"]
        assert r.supported == (honest and reached and "FAILED" not in r.text), r.name


@pytest.mark.parametrize("value, want", [
    (3, 3.0), (np.float32(0.5), 0.5), (np.array([2.0]), 2.0), (np.True_, 1.0), (math.inf, None),
    (-math.inf, None), (math.nan, None), (10**400, None), ("3", None), (None, None), ([3], None),
    (np.zeros(2), None), (1j, None),
])  # fmt: skip
def test_a_number_is_finite_and_one(value, want):
    assert parts.number(value) == want


def test_nothing_is_close_to_infinity_and_within_is_of_the_truth():
    assert parts.numbers((math.inf, 1), 2) is None
    assert not parts.close(math.inf, 1.0, 0.15)
    assert not parts.close(1.16, 1.0, 0.15) and not parts.close(0.84, 1.0, 0.15)
    assert parts.close(1.14, 1.0, 0.15) and parts.close(0.86, 1.0, 0.15)


def test_iterators_and_views_are_sent_as_lists_and_endless_ones_cut():
    assert parts.sendable(i for i in (1, 2)) == [1, 2]
    assert parts.sendable((True, {1: (8, 1)}.values())) == (True, [(8, 1)])
    assert parts.sendable({"fours": map(list, [(1,)])}) == {"fours": [[1]]}
    assert len(parts.sendable(itertools.count())) == parts.MANY
    assert parts.sendable(lambda: 1).startswith("<function")


def test_what_an_answer_uses_again_is_copied():
    again = np.zeros(1)

    def answer(v):
        again[:] = v
        return again

    got = parts.try_each(0, 1, answer, [(1.0,), (2.0,)])
    assert [float(f["got"][0]) for f in got] == [1.0, 2.0]


def test_an_error_says_where_in_the_answer():
    def answer(v):
        return v.nothing

    (found,) = parts.try_each(0, 1, answer, [(1,)])
    assert re.search(r"AttributeError: .* \(line \d+, in answer\)$", found["error"])
    assert found["kind"] == "AttributeError"


def test_mixed_lines_lose_none():
    outputs = [[f"{k}{i}" for i in range(9)] for k in "abc"]
    mixed = reports.interleaved(outputs, random.Random(1))
    assert sorted(mixed) == sorted(itertools.chain(*outputs))
    assert [line for line in mixed if line[0] == "a"] == outputs[0]
    assert mixed != list(itertools.chain(*outputs))


class OneRank:
    """A bench whose ranks are this process."""

    def ranks(self, n, trial, answer, cases, **options):
        return [Rank(0, value=trial(0, n, answer, cases))]


@pytest.mark.parametrize("measured, factor, says", [
    (1.0, 1.0, r"predicted .* measured"), (1.0, 1.3, None), (1.4, 1.0, r"not counted"),
])  # fmt: skip
def test_a_real_step_counts_only_where_the_model_comes_near(monkeypatch, measured, factor, says):
    case = cases()[0]
    live = {"where": "here", "arguments": case, "seconds": measured * step.right(case)}
    monkeypatch.setattr(step, "live_case", lambda: live)

    def answer(*case):
        return factor * step.right(case)

    if says is None:
        with pytest.raises(Wrong, match="the model comes to"):
            step._judge_live(OneRank(), answer)
    else:
        assert re.search(says, step._judge_live(OneRank(), answer))


def test_a_real_step_that_cannot_be_measured_is_said(monkeypatch):
    monkeypatch.setattr(step, "live_case", lambda: {"why": "no user namespaces"})
    assert "no user namespaces" in step._judge_live(OneRank(), None)
