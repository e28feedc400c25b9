"""The run panel, against a cluster and a run that start no process."""

import base64
import io
import signal
import threading
import time
from pathlib import Path

import pytest

ipywidgets = pytest.importorskip("ipywidgets")
PIL = pytest.importorskip("PIL.Image")

import fake_runs  # noqa: E402
from fake_runs import until  # noqa: E402

from scalelab import cluster as clusters  # noqa: E402
from scalelab.panels import RunFailed, RunPanel, live  # noqa: E402
from scalelab.panels import run as panel_module  # noqa: E402


@pytest.fixture
def world(monkeypatch):
    """Put a fake cluster and fake runs under the panel; returns a function that sets them up."""

    def make(problem="", slow=0.0, **runs):
        fake, launcher = fake_runs.Clusters(problem, slow), fake_runs.Runs(**runs)
        monkeypatch.setattr(panel_module, "clusters", fake)
        monkeypatch.setattr(panel_module, "runs", launcher)
        return fake, launcher

    return make


def test_run_returns_the_finished_run_and_closes_the_cluster(world):
    clusters, launcher = world()
    panel = RunPanel(nodes=2, nproc_per_node=2, steps=20, args=("--lr", 0.1))
    run = panel.run()
    assert run.status == "succeeded" and run is panel.last
    assert launcher.launched[0][1] == ["--steps", "20", "--lr", "0.1"]
    assert clusters.log == ["started", "closed"]
    assert panel._bar.value == 20 and "step 20 of 20" in panel._count.value
    assert not panel._launch_button.disabled and panel._stop_button.disabled


def test_launch_returns_at_once_and_the_picture_changes(world):
    world(rate=50.0)
    panel = RunPanel(steps=3000)
    began = time.monotonic()
    panel.launch()
    assert time.monotonic() - began < 1.0
    assert panel._launch_button.disabled and not panel._stop_button.disabled
    seen = set()
    until(lambda: seen.add(panel._image.value) or len(seen) >= 4)
    panel.stop()
    assert panel.wait(5)
    still = panel._image.value
    time.sleep(1.0)
    assert panel._image.value == still, "the picture moves though nothing runs"


def test_pictures_are_drawn_two_to_four_times_a_second_at_most(world):
    world(rate=20.0)
    panel = RunPanel(steps=60)
    times = []
    panel._image.observe(lambda _: times.append(time.monotonic()), names="value")
    panel.run()
    live_ones = len(times) - 2  # the first blank one and the last one come when they must
    assert live_ones / 3.0 <= 4


def test_stop_while_running(world):
    clusters, _ = world(rate=10.0)
    panel = RunPanel(steps=1000)
    panel.launch()
    until(lambda: panel.last is not None)
    panel.stop()
    assert panel.wait(5)
    assert panel.last.status == "stopped" and "stopped" in panel.status.lower()
    assert clusters.log == ["started", "closed"]
    assert not panel._view.failed, "a stop that was asked for is not an error"


def test_stop_while_the_cluster_is_being_built(world):
    clusters, launcher = world(slow=0.5)
    panel = RunPanel()
    panel.launch()
    time.sleep(0.1)
    panel.stop()
    assert panel.wait(5)
    assert launcher.launched == [] and clusters.log == ["started", "closed"]
    assert panel.status == "Stopped before any rank was started."


def test_launch_again_after_stop_and_after_the_end(world):
    clusters, launcher = world(rate=400.0)
    panel = RunPanel(steps=1000)
    panel.launch()
    until(lambda: panel.last is not None)
    panel.stop()
    panel.wait(5)
    panel._steps.value = 20
    assert panel.run().status == "succeeded"
    assert panel.run().status == "succeeded"
    assert len(launcher.launched) == 3 and clusters.log == ["started", "closed"] * 3


def test_launch_while_running_starts_nothing_and_run_waits_for_it(world):
    _, launcher = world(rate=50.0)
    panel = RunPanel(steps=40)
    panel.launch()
    panel.launch()
    run = panel.run()
    assert len(launcher.launched) == 1 and run is panel.last


@pytest.mark.parametrize(
    "field, value, words",
    [
        ("_rate", "fast", "'fast' is not a rate"),
        ("_delay", "5", "'5' has no unit"),
        ("_nodes", 0, "nodes: 0"),
        ("_steps", 0, "steps: 0"),
        ("_steps", -3, "steps: -3"),
    ],
)
def test_bad_input_shows_one_line_and_launches_nothing(world, field, value, words):
    clusters, launcher = world()
    panel = RunPanel()
    getattr(panel, field).value = value
    panel.launch()
    assert panel.wait(5)
    assert words in panel.status and "\n" not in panel.status
    assert panel._view.failed and launcher.launched == [] and clusters.started == []
    assert not panel._launch_button.disabled
    with pytest.raises(fake_runs.UsageError, match=words):
        panel.run()


def test_an_error_is_forgotten_by_the_next_launch(world):
    world()
    panel = RunPanel(rate="fast", steps=10)
    panel.launch()
    panel.wait(5)
    panel._rate.value = "1gbit"
    assert panel.run().status == "succeeded"
    assert not panel._view.failed


def test_a_failed_run_raises_with_the_first_failing_rank_and_its_traceback(world):
    clusters, _ = world(breaks=5)
    panel = RunPanel(steps=20)
    with pytest.raises(RunFailed) as caught:
        panel.run()
    assert "rank 1 on node1 failed first" in str(caught.value)
    assert "ValueError: on purpose" in str(caught.value)
    assert "Rank 1 on node1 failed first: ValueError" in panel.status
    assert clusters.log == ["started", "closed"]


def test_fewer_ranks_than_asked_is_a_failure(world):
    world(lost=1)
    with pytest.raises(RunFailed, match="1 ranks reported, 2 were asked for"):
        RunPanel(steps=10).run()


def test_fewer_steps_than_asked_is_a_failure(world, monkeypatch):
    _, launcher = world()
    real = fake_runs.Run.metrics
    monkeypatch.setattr(fake_runs.Run, "metrics", lambda s: [m for m in real(s) if m["step"] < 7])
    panel = RunPanel(steps=10)
    with pytest.raises(RunFailed, match="rank 0 reported 6 steps, 10 were asked for"):
        panel.run()
    assert panel._view.failed


def test_a_fault_of_the_panel_itself_does_not_leave_it_running(world, monkeypatch):
    clusters, _ = world()
    monkeypatch.setattr(fake_runs.Run, "metrics", lambda s: 1 / 0)
    panel = RunPanel(steps=10)
    with pytest.raises(ZeroDivisionError):
        panel.run()
    assert not panel.running and clusters.log == ["started", "closed"]
    assert "ZeroDivisionError" in panel.status and not panel._launch_button.disabled


def test_on_local_the_link_fields_are_closed_and_say_why(world):
    clusters, _ = world(problem="User namespaces are off here.")
    panel = RunPanel(steps=10)
    assert panel._rate.disabled and panel._delay.disabled and not panel._steps.disabled
    assert "User namespaces are off" in panel._rate.tooltip
    assert "User namespaces are off here." in panel._place.value
    assert panel.run().status == "succeeded"
    assert clusters.started[0].link == {"rate": None, "delay": None}
    assert panel._rate.disabled and not panel._steps.disabled


def test_no_thread_keeps_the_kernel_alive(world):
    world(rate=10.0)
    panel = RunPanel(steps=1000)
    panel.launch()
    until(lambda: panel.last is not None)
    mine = [t for t in threading.enumerate() if t.name == "scalelab-panel"]
    assert mine and all(t.daemon for t in mine)
    panel.stop()
    panel.wait(5)


def test_an_interrupted_cell_stops_the_run(world):
    clusters, _ = world(rate=10.0)
    panel = RunPanel(steps=1000)

    def interrupt():
        until(lambda: panel.last is not None)
        # what the kernel does to a cell that is interrupted
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    assert not panel.running, "run() must not return before the run is over"
    assert panel.last.status == "stopped" and clusters.log == ["started", "closed"]


def test_run_prints_nothing(world, capfd):
    world()
    RunPanel(steps=10).run()
    assert capfd.readouterr() == ("", "")


def test_it_shows_as_widgets_as_a_picture_and_as_the_same_text_everywhere(world):
    world()
    panel = RunPanel(steps=10)
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


def test_log_of_each_rank_is_escaped_and_cut(world):
    assert "&lt;b&gt;" in live.log_html("<b>")
    long = live.log_html("\n".join(f"line {i}" for i in range(500)))
    assert "line 499" in long and "line 299\n" not in long and "300 earlier lines" in long


def test_the_log_shown_is_that_of_the_chosen_rank(world):
    world()
    panel = RunPanel(steps=10)
    panel.run()
    assert [label for label, _ in panel._which.options] == [
        "rank 0 on node0 (10.77.0.1)",
        "rank 1 on node1 (10.77.0.2)",
    ]
    panel._which.value = 1
    assert "step 10 on rank 1" in panel._log.value


def test_speed_is_tokens_a_second_of_the_whole_job():
    rows = [
        {"step": s, "rank": r, "loss": 1.0, "tokens": 512, "time": s * 0.1 + r * 0.01}
        for s in range(1, 11)
        for r in range(2)
    ]
    tokens, per_second = live.speed(rows)
    assert tokens == 1024 and per_second == pytest.approx(10240)
    assert live.speed(rows[:1]) == (512, 0.0)
    assert live.speed([]) == (0, 0.0)


def test_the_step_shown_is_the_slowest_ranks():
    view = live.View(world=2, loss={0: ([1, 2, 3], [1, 1, 1]), 1: ([1], [1])})
    assert view.step == 1
    assert live.View(world=2, loss={0: ([1, 2, 3], [1, 1, 1])}).step == 0


@pytest.mark.parametrize("ranks", [0, 1, 2, 8, 40])
def test_a_picture_of_any_number_of_ranks(ranks):
    view = live.View(
        title="t",
        status="s" * 300,
        where="w",
        world=ranks,
        steps=5,
        loss={r: ([1, 2], [2.0, 1.0]) for r in range(ranks)},
        ranks=[
            {"rank": r, "node": "node0", "addr": "10.77.0.1", "pid": 1, "state": "running"}
            for r in range(ranks)
        ],
    )
    assert live.picture(view).startswith(b"\x89PNG")
    assert live.Curve().png(view).startswith(b"\x89PNG")


# The same panel on real clusters, with real ranks


SCRIPT = Path(__file__).resolve().parents[2] / "notebooks" / "scripts" / "train_ddp.py"


@pytest.mark.slow
def test_a_real_run_on_two_hosts(tmp_path, monkeypatch):
    problem = clusters.virtual_problem()
    if problem:
        pytest.skip(f"no emulated hosts: {problem}")
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    panel = RunPanel(SCRIPT, steps=5, cluster="virtual")
    run = panel.run()
    assert [(r["node"], r["addr"]) for r in panel._view.ranks] == [
        ("node0", "10.77.0.1"),
        ("node1", "10.77.0.2"),
    ]
    assert {r["state"] for r in panel._view.ranks} == {"finished"}
    assert len(run.metrics()) == 10 and panel._view.tokens_per_step == 1024
    assert "rank 1 of 2 on node1" in run.log(1)


@pytest.mark.slow
def test_a_real_run_on_local_and_one_that_fails(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    run = RunPanel(SCRIPT, steps=3, cluster="local").run()
    assert run.status == "succeeded" and len(run.ranks) == 2

    broken = tmp_path / "broken.py"
    broken.write_text(
        "import os, time\n"
        "if os.environ['RANK'] == '1':\n    raise ValueError('on purpose')\n"
        "time.sleep(60)\n"
    )
    panel = RunPanel(broken, nodes=1, nproc_per_node=2, steps=3, cluster="local")
    with pytest.raises(RunFailed, match="(?s)rank 1 on node0 failed first.*ValueError: on purpose"):
        panel.run()
    assert panel._view.failed and "ValueError: on purpose" in panel.status


@pytest.mark.parametrize(
    "field, value", [("_rate", "fast"), ("_delay", "5"), ("_nodes", 0), ("_nproc", 0)]
)
def test_the_real_cluster_refuses_bad_input_in_one_line(field, value):
    if clusters.virtual_problem():
        pytest.skip("the link fields are closed on a local cluster")
    panel = RunPanel(SCRIPT)
    getattr(panel, field).value = value
    panel.launch()
    assert panel.wait(20)
    assert panel.last is None and panel._view.failed
    assert str(value) in panel.status and "\n" not in panel.status


def test_no_such_script_is_one_line():
    panel = RunPanel("no/such/script.py")
    panel.launch()
    assert panel.wait(20)
    assert panel.last is None and "no/such/script.py" in panel.status
