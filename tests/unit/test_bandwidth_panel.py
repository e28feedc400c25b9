"""The bandwidth panel: first with a cluster and runs that start no process, then on real hosts."""

import base64
import io
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

ipywidgets = pytest.importorskip("ipywidgets")
PIL = pytest.importorskip("PIL.Image")

import fake_runs  # noqa: E402
from fake_runs import until  # noqa: E402

from scalelab import cluster as clusters  # noqa: E402
from scalelab.cluster.units import parse_delay, parse_rate  # noqa: E402
from scalelab.measure import sweep as sweeps  # noqa: E402
from scalelab.panels import BandwidthPanel, RunFailed  # noqa: E402
from scalelab.panels import bandwidth as panel_module  # noqa: E402
from scalelab.panels import bandwidth_view as drawing  # noqa: E402

SIZES = "4K:16M:4"


class Hosts(fake_runs.Clusters):
    """Emulated hosts whose links know what they were set to."""

    def start(self, kind="auto", nodes=2, *, rate=None, delay=None, **_):
        made = super().start(kind, nodes, rate=rate, delay=delay)
        link = SimpleNamespace(
            rate=parse_rate(rate), delay=parse_delay(delay), jitter=0.0, loss=0.0, mtu=1500
        )
        made.links = {node.name: link for node in made.nodes}
        return made


class Timed(fake_runs.Run):
    """A run that reports one size after another, timed exactly as alpha and beta say."""

    alpha, wrong_at = 1e-4, None

    def __init__(self, sizes, cluster, nproc, rate, **how):
        self._sizes, self._cluster, self.dir = sizes, cluster, Path("nowhere")
        super().__init__(len(sizes), cluster, nproc, rate, **how)
        self.id, self.world_size = "20260101-000000-fake", len(cluster.nodes) * nproc

    @property
    def done(self):
        return self.status != "running"

    def record(self):
        return {"nodes": [{"name": node.name, "addr": node.addr} for node in self._cluster.nodes]}

    def metrics(self):
        link, n = next(iter(self._cluster.links.values())), self.world_size
        beta = (link.rate or 1e11) / 8
        rows = []
        for step, size in enumerate(self._sizes[: self.step()], start=1):
            seconds = 2 * (n - 1) * (2 * (self.alpha + link.delay) + size / n / beta)
            busbw = size / seconds / 1e9 * 2 * (n - 1) / n
            rows.append({
                **dict.fromkeys(sweeps.ROW, 1), "bytes": size, "world_size": n,
                "step": step, "rank": 0, "op": "all-reduce",
                "backend": "gloo", "device": "cpu", "time_us": seconds * 1e6, "spread": 0.04,
                "algbw": size / seconds / 1e9, "busbw": busbw, "wire_bytes": size * 1.03,
                "wrong": 3 if size == self.wrong_at else 0,
            })  # fmt: skip
        return rows


@pytest.fixture
def world(monkeypatch):
    """Put fake hosts and fake runs under the panel, the sweep between them being the real one;
    returns a function that sets them up."""

    def make(problem="", slow=0.0, rate=40.0, **how):
        """rate: sizes a second."""
        fake, launched = Hosts(problem, slow), []

        def launch(_script, args, *, cluster, nproc_per_node=1, **_):
            assert len(fake.started) - fake.log.count("closed") == 1, "two links at the same time"
            sizes = args[args.index("--sizes") + 1 :]
            launched.append(Timed(sizes, cluster, nproc_per_node, rate, **how))
            return launched[-1]

        monkeypatch.setattr(panel_module.clusters, "start", fake.start)
        monkeypatch.setattr(panel_module.clusters, "virtual_problem", fake.virtual_problem)
        monkeypatch.setattr(sweeps, "write_json", lambda *_: None)
        monkeypatch.setattr(sweeps.runs, "launch", launch)
        return fake, launched

    return make


def test_both_links_are_measured_one_after_the_other_and_fitted(world):
    hosts, launched = world()
    panel = BandwidthPanel("1gbit", "0ms", rate_b="100mbit", delay_b="5ms", sizes=SIZES)
    a, b = panel.run()
    assert panel.results == [a, b] and len(launched) == 2
    assert hosts.log == ["started", "closed"] * 2
    assert [one.link for one in hosts.started] == [
        {"rate": "1gbit", "delay": "0ms"},
        {"rate": "100mbit", "delay": "5ms"},
    ]
    assert a["alpha_us"] == pytest.approx(100) and a["beta_gbs"] == pytest.approx(0.125)
    assert b["alpha_us"] == pytest.approx(5100) and b["beta_gbs"] == pytest.approx(0.0125)
    assert panel._bar.value == panel._bar.max == 14
    assert panel.status.startswith("Measured. Best busbw: A 0.124") and "B 0.012" in panel.status
    assert not panel._launch_button.disabled and panel._stop_button.disabled


def test_the_fitted_curve_goes_through_what_was_measured(world):
    world()
    panel = BandwidthPanel("1gbit", "2ms", rate_b=None, sizes=SIZES)
    panel.run()
    (link,) = panel._view.links
    assert link.curve(panel._view.sizes) == pytest.approx([row["busbw"] for row in link.rows])
    link.result["fits"]["ring"]["alpha_us"] *= 2
    off = link.curve(panel._view.sizes)
    assert off != pytest.approx([row["busbw"] for row in link.rows])  # the check above can fail


def test_a_fit_that_makes_no_sense_is_told_and_not_drawn(world, monkeypatch):
    world()
    monkeypatch.setattr(Timed, "alpha", -1e-5)
    panel = BandwidthPanel(rate_b=None, sizes="64K:16M:4")
    panel.run()
    (link,) = panel._view.links
    assert link.curve(panel._view.sizes) == [] and link.fitted.startswith("no fit: alpha would be")


def test_one_link_alone(world):
    hosts, _ = world()
    panel = BandwidthPanel("1gbit", rate_b=None, sizes="4K,1M")
    assert panel._rate_b.disabled and panel._delay_b.disabled
    (result,) = panel.run()
    assert result["line_rate_gbs"] == 0.125 and len(hosts.started) == 1
    assert panel._rate_b.disabled, "after the run too"
    panel._with_b.value = True
    assert not panel._rate_b.disabled
    assert len(panel.run()) == 2


@pytest.mark.slow
def test_the_plot_comes_alive_and_the_status_says_what_is_measured(world):
    world(rate=5.0)
    panel = BandwidthPanel(sizes=SIZES)
    began = time.monotonic()
    panel.launch()
    assert time.monotonic() - began < 1.0
    pictures, words = set(), set()

    def look():
        pictures.add(panel._image.value)
        words.add(panel.status)
        return not panel.running

    until(look)
    assert len(pictures) >= 5
    for link in ("Link A (1 gbit, 0 ms)", "Link B (100 mbit, 0 ms)"):
        assert any(w.startswith(f"{link}: all-reduce on 2 ranks: ") for w in words), words
    still = panel._image.value
    time.sleep(0.6)
    assert panel._image.value == still


def test_stop_in_mid_sweep_keeps_what_there_is_and_starts_no_other_link(world):
    hosts, launched = world(rate=4.0)
    panel = BandwidthPanel(sizes=SIZES)
    panel.launch()
    until(lambda: panel._view.done >= 2)
    panel.stop()
    assert panel.wait(5)
    assert len(launched) == 1 and launched[0].status == "stopped"
    assert hosts.log == ["started", "closed"]
    assert panel.results == [] and 2 <= panel._view.done < 7
    assert panel.status.startswith("Stopped: link A") and not panel._view.failed
    assert "4096" in panel._copy.value


def test_stop_in_the_second_link_keeps_the_first_result(world):
    hosts, launched = world(rate=5.0)
    panel = BandwidthPanel(sizes=SIZES)
    panel.launch()
    until(lambda: panel._view.done >= 9)
    panel.stop()
    assert panel.wait(5)
    assert len(panel.results) == 1 and panel.results[0]["line_rate_gbs"] == 0.125
    assert hosts.log == ["started", "closed"] * 2
    assert "Stopped: link B (100 mbit, 0 ms)" in panel.status


def test_stop_while_the_hosts_are_started(world):
    hosts, launched = world(slow=0.5)
    panel = BandwidthPanel()
    panel.launch()
    time.sleep(0.1)
    panel.stop()
    assert panel.wait(5)
    assert launched == [] and hosts.log == ["started", "closed"]
    assert panel.status == "Stopped: no rank was started on link A."


def test_run_raises_when_it_was_stopped_and_measures_again_after_that(world):
    world(rate=4.0)
    panel = BandwidthPanel(sizes="4K:1M:4", rate_b=None)
    threading.Timer(0.5, panel.stop).start()
    with pytest.raises(RunFailed, match="stopped: link A"):
        panel.run()
    assert len(panel.run()) == 1 and not panel._view.failed


def test_an_interrupted_cell_stops_the_sweep(world):
    hosts, launched = world(rate=2.0)
    panel = BandwidthPanel()

    def interrupt():
        until(lambda: launched)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    assert not panel.running and launched[0].status == "stopped"
    assert hosts.log == ["started", "closed"]


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("_rate", "fast", "link A: rate 'fast'"),
        ("_rate_b", "0", "link B: rate '0'"),
        ("_delay", "5", "link A: delay '5'"),
        ("_delay_b", "-1ms", "link B: delay '-1ms'"),
        ("_nodes", 1, "hosts: 1 is not accepted"),
        ("_nodes", 65, "hosts: 65 is not accepted"),
        ("_sizes", "64M:4K", "sizes '64M:4K'"),
        ("_sizes", "", "sizes ''"),
        ("_rate_b", "20kbit", "link B: sizes up to 16M take"),
    ],
)
def test_bad_fields_say_so_at_once_and_start_nothing(world, field, value, words):
    hosts, _ = world()
    panel = BandwidthPanel()
    assert panel._hint.layout.display == "none"
    getattr(panel, field).value = value
    hint = panel._hint.value.replace("&#x27;", "'")
    assert words in hint and "\n" not in hint and panel._hint.layout.display == ""
    with pytest.raises(clusters.UsageError) as caught:
        panel.run()
    assert words in str(caught.value) and words in panel.status and "\n" not in panel.status
    assert panel._view.failed and hosts.started == [] and not panel._launch_button.disabled


def test_a_bad_field_made_good_is_forgotten(world):
    world()
    panel = BandwidthPanel(rate="fast", sizes="4K,1M")
    with pytest.raises(clusters.UsageError):
        panel.run()
    panel._rate.value = "1gbit"
    assert panel._hint.layout.display == "none"
    assert len(panel.run()) == 2 and not panel._view.failed


def test_an_operation_there_is_not_is_refused_at_once():
    with pytest.raises(clusters.UsageError, match="all-reduce"):
        BandwidthPanel(op="all-together")


def test_before_the_first_point_the_plot_follows_the_fields(world):
    world()
    panel = BandwidthPanel()
    before = panel._image.value
    panel._rate.value = "10gbit"
    assert panel._image.value != before and panel._view.links[0].line_rate == 1.25


def test_a_failed_run_says_which_rank_and_the_second_link_is_not_tried(world):
    hosts, launched = world(breaks=3)
    panel = BandwidthPanel(sizes=SIZES)
    with pytest.raises(RunFailed) as caught:
        panel.run()
    assert "rank 1 on node1 failed first" in str(caught.value)
    assert "ValueError: on purpose" in str(caught.value)
    assert panel.status.startswith("Link A (1 gbit, 0 ms): Failed. Rank 1 on node1 failed first:")
    assert "\n" not in panel.status and panel._view.failed
    assert len(launched) == 1 and hosts.log == ["started", "closed"]


def test_wrong_sums_are_a_failure_however_quick_they_were(world, monkeypatch):
    world()
    monkeypatch.setattr(Timed, "wrong_at", 65536)
    panel = BandwidthPanel(sizes=SIZES)
    with pytest.raises(RunFailed, match="wrong numbers .3 at 64K"):
        panel.run()
    assert panel._view.failed and panel.results == []


def test_fewer_sizes_than_asked_is_a_failure(world, monkeypatch):
    world()
    real = Timed.metrics
    monkeypatch.setattr(Timed, "metrics", lambda self: real(self)[:5])
    panel = BandwidthPanel(sizes=SIZES)
    with pytest.raises(sweeps.RunError, match="5 of 7 sizes"):
        panel.run()
    assert panel._view.failed and panel.results == []


def test_a_fault_of_the_panel_itself_does_not_leave_it_running(world, monkeypatch):
    hosts, _ = world()
    monkeypatch.setattr(Timed, "metrics", lambda self: 1 / 0)
    panel = BandwidthPanel()
    with pytest.raises(ZeroDivisionError):
        panel.run()
    assert not panel.running and hosts.log == ["started", "closed"]
    assert "ZeroDivisionError" in panel.status and not panel._launch_button.disabled


def test_on_local_there_is_one_measurement_and_the_fields_say_why(world, monkeypatch):
    hosts, _ = world(problem="User namespaces are off here.")
    panel = BandwidthPanel(sizes="4K,1M")
    locked = (panel._rate, panel._delay, panel._with_b, panel._rate_b, panel._delay_b)
    assert all(field.disabled for field in locked) and not panel._sizes.disabled
    assert "User namespaces are off here." in panel._rate.tooltip
    assert "User namespaces are off here." in panel._place.value
    (result,) = panel.run()
    assert hosts.started[0].link == {"rate": None, "delay": None}
    assert result["line_rate_gbs"] is None and result["efficiency"] is None
    assert panel._view.links[0].label == "A: loopback, no link set"
    assert all(field.disabled for field in locked) and "line rate" not in panel.status


def test_the_numbers_to_copy_are_a_table_with_units_and_nothing_rounded_away(world):
    world()
    panel = BandwidthPanel(sizes="4K,64K,1M", delay_b="5ms")
    assert panel._copy.layout.display == "none", "nothing to copy yet"
    a, b = panel.run()
    assert panel._copy.layout.display == "" and not panel._copy.disabled
    measured, fitted = panel._copy.value.rstrip().split("\n\n")
    head, *rows = [line.split("\t") for line in measured.split("\n")]
    assert len(rows) == 6 and {len(row) for row in rows} == {len(head)}
    table = [dict(zip(head, row)) for row in rows]
    for line, row in zip(table, a["rows"] + b["rows"]):
        assert int(line["bytes"]) == row["bytes"] and line["wrong"] == "0"
        assert float(line["time_us"]) == pytest.approx(row["time_us"], rel=1e-5)
        assert float(line["busbw_GBps"]) == pytest.approx(row["busbw"], rel=1e-5)
    assert [line["link"] for line in table] == list("AAABBB")
    assert table[3]["setting"] == "100 mbit, 5 ms" and table[3]["line_rate_GBps"] == "0.0125"
    head, *rows = [line.split("\t") for line in fitted.split("\n")]
    assert [float(row[head.index("alpha_us")]) for row in rows] == pytest.approx([100, 5100])
    assert panel._table.value.count("<tr>") == 7 and "busbw (GB/s)" in panel._table.value


def test_it_shows_as_widgets_as_a_picture_and_as_the_same_text_everywhere(world):
    world()
    panel = BandwidthPanel(sizes="4K,1M")
    before = panel._repr_mimebundle_()
    panel.run()
    after = panel._repr_mimebundle_()
    for bundle in (before, after):
        assert "application/vnd.jupyter.widget-view+json" in bundle
        image = PIL.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
        assert image.format == "PNG" and image.width >= 700
    assert before["image/png"] != after["image/png"]
    assert before["text/plain"] == after["text/plain"]
    assert panel.picture().data == base64.b64decode(after["image/png"])


def test_no_words_of_the_picture_overlap_or_leave_it():
    """With what is hardest to place: two nearly equal rates, an unlimited one, long delays."""
    from matplotlib.figure import Figure

    row = {"bytes": 4096, "time_us": 3e5, "algbw": 1e-5, "busbw": 1e-5, "spread": 2.5, "wrong": 0}
    fit = {"alpha_us": 30123.4, "alpha_us_error": 120, "beta_gbs": 0.0123, "beta_gbs_error": 1e-5}
    fit["fits"] = {"ring": {**fit, "misfit": 0.3, "latencies_a_message": 2}}
    found = {"rows": [row] * 3, "world_size": 2, "op": "all-reduce", **fit}
    for rates in ((1e9, 1.05e9), (1e9, 1e9), (None, 1e8), (1e12, 1e4), (None, None)):
        links = [
            drawing.Link(name, f"{drawing.show_rate(rate)}, 30 ms", rate, result)
            for name, rate, result in zip("AB", rates, (found, {}))
        ]
        view = drawing.View(sizes=[4096 * 2**i for i in range(17)], links=links)
        figure = Figure(figsize=(8.0, 3.9))
        axes = figure.add_axes((drawing.BOX[0], 0.30, drawing.BOX[1], 0.63))
        drawing.draw(axes, view)
        figure.draw_without_rendering()
        margin = [text for text in axes.texts if "line rate" in text.get_text()]
        texts = [axes.xaxis.label, axes.yaxis.label, *margin, axes.get_legend()]
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels()]
        boxes = [text.get_window_extent() for text in texts]
        for i, box in enumerate(boxes):
            assert box.x0 >= 0 and box.x1 <= 800 and box.y0 >= 0 and box.y1 <= 390, texts[i]
            assert not any(box.overlaps(other) for other in boxes[i + 1 :]), (rates, texts[i])


@pytest.mark.parametrize(
    "value, error, words",
    [
        (75.81, 11.9, "76 ± 12"),
        (4.98, 0.062, "4.98 ± 0.06"),
        (0.1197, 0.000275, "0.1197 ± 0.0003"),
        (81.5, 0, "81.5"),
    ],
)
def test_a_value_has_no_more_digits_than_its_error_leaves(value, error, words):
    assert drawing.pair(value, error) == words


# The same panel on real hosts, with real ranks


@pytest.mark.slow
def test_two_real_links_one_ten_times_slower(tmp_path, monkeypatch, capfd):
    problem = clusters.virtual_problem()
    if problem:
        pytest.skip(f"no emulated hosts: {problem}")
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    panel = BandwidthPanel("500mbit", rate_b="50mbit", sizes="64K,1M", cluster="virtual")
    a, b = panel.run()
    assert capfd.readouterr() == ("", ""), "run() prints nothing"
    assert [node["addr"] for node in a["nodes"]] == ["10.77.0.1", "10.77.0.2"]
    assert [row["bytes"] for row in b["rows"]] == [65536, 1048576]
    fast, slow = (result["rows"][-1]["busbw"] for result in (a, b))
    assert slow < 50e6 / 8e9 < fast < 500e6 / 8e9
    assert all(row["wrong"] == 0 for row in a["rows"] + b["rows"])


@pytest.mark.slow
def test_stop_on_real_hosts_leaves_no_process(tmp_path, monkeypatch):
    problem = clusters.virtual_problem()
    if problem:
        pytest.skip(f"no emulated hosts: {problem}")
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    before = children()
    panel = BandwidthPanel("20mbit", rate_b=None, sizes="4K,16M", cluster="virtual")
    panel.launch()
    until(lambda: panel._view.done == 1, 60)  # what is left takes half a minute
    assert children() - before, "ranks are running"
    panel.stop()
    assert panel.wait(20)
    assert children() <= before
    assert panel.status.startswith("Stopped: link A (20 mbit, 0 ms)") and panel.results == []


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}
