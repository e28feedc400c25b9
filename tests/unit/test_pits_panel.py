"""The panel of pits: first with a lab and a doctor that start no process, then on real hosts."""

import base64
import io
import re
import signal
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

ipywidgets = pytest.importorskip("ipywidgets")
PIL = pytest.importorskip("PIL.Image")

from fake_runs import until  # noqa: E402

from scalelab import cluster as clusters  # noqa: E402
from scalelab import drills  # noqa: E402
from scalelab.panels import PitsPanel, RunFailed, pits_picture  # noqa: E402
from scalelab.panels import pits as panel_module  # noqa: E402
from scalelab.panels import pits_view as drawing  # noqa: E402
from scalelab.panels import pits_work as work  # noqa: E402

FAULT = "data-on-one-host"
HEALTHY = [(0.05, "rank: started"), (0.1, "done")]
MISSING = [(0.05, "rank: started"), (0.1, "FileNotFoundError: No such file or directory: 'data'")]


class Lines:
    """A LinesRun by the clock. said: by node, (seconds, text); ends: by node, (seconds, code)."""

    def __init__(self, cluster, lines, said, ends):
        self.cluster, self.lines, self._said, self._ends = cluster, lines, said, ends
        self.began, self._over = time.monotonic(), None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    @property
    def seconds(self):
        return (self._over or time.monotonic()) - self.began

    @property
    def exits(self):
        codes = {}
        for i in self.lines:
            at, code = self._ends.get(i, (1e9, None))
            codes[i] = code if self.seconds >= at else 143 if self._over else None
        return codes

    @property
    def running(self):
        return None in self.exits.values()

    def stamped(self, index):
        return [(at, text) for at, text in self._said.get(index, []) if at <= self.seconds]

    def output(self, index):
        return "\n".join(text for _, text in self.stamped(index))

    def wait(self, seconds=None):
        end = time.monotonic() + (seconds or 0)
        while self.running and time.monotonic() < end:
            time.sleep(0.005)
        if not self.running:
            self._over = self._over or time.monotonic()
        return not self.running

    def stop(self):
        self._over = self._over or time.monotonic()


class Labs:
    """Makes labs, and says what was done with them."""

    def __init__(self):
        self.log, self.made, self.runs = [], [], []
        self.slow = {}  # seconds that a step takes: start, inject, cure, doctor
        self.broken = ({0: HEALTHY, 1: MISSING}, {0: (0.2, 1), 1: (0.15, 1)})
        self.well = ({0: HEALTHY, 1: HEALTHY}, {0: (0.2, 0), 1: (0.2, 0)})
        self.says = None  # what the doctor names instead of the fault's own check
        self.fails = ""  # a step that raises

    def step(self, name):
        if name == self.fails:
            raise clusters.ClusterError(f"{name} went wrong")
        self.log.append(name)
        end = time.monotonic() + self.slow.get(name, 0)
        while time.monotonic() < end and not (self.made and self.made[-1].closed):
            time.sleep(0.01)

    def lab(self, fault, *, cluster=None):
        return Lab(self, fault)

    def examine(self, lab, fault, progress):
        self.step("doctor")
        progress("looking at 2 hosts")
        name = self.says if self.says is not None else fault.named if lab.broken else ""
        detail = "<data> does not exist"
        first = {"name": name, "node": "node1", "status": "fail", "detail": detail, "fix": "copy"}
        return (first if name else None), "FAIL data node1"


class Lab:
    def __init__(self, labs, fault):
        labs.step("start")
        self.labs, self.fault, self.closed = labs, fault, False
        self.fixed = self.broken = False
        labs.made.append(self)
        link = SimpleNamespace(rate=1e9, mtu=1500)
        nodes = [
            SimpleNamespace(
                index=i, name=f"node{i}", addr=f"10.77.0.{i + 1}", nics=[{"nic": "eth0", "port": i}]
            )
            for i in range(2)
        ]
        self.cluster = SimpleNamespace(
            kind="virtual", nodes=nodes, node=lambda i: nodes[i], links={0: link, 1: link}
        )
        self.node = self.cluster.node

    def inject(self):
        self.labs.step("inject")
        self.broken, self.fixed = True, False

    def cure(self):
        self.labs.step("cure")
        self.broken, self.fixed = False, True

    def lines(self):
        return {i: f"torchrun two_nodes.py --fixed={self.fixed}" for i in range(2)}

    def run(self, timeout):
        self.labs.step("run")
        made = Lines(self.cluster, self.lines(), *(self.labs.broken if self.broken
                                                   else self.labs.well))  # fmt: skip
        self.labs.runs.append(made)
        return made

    def close(self):
        self.closed = True
        self.labs.log.append("close")


@pytest.fixture
def labs(monkeypatch):
    made = Labs()
    monkeypatch.setattr(work.drills, "Lab", made.lab)
    monkeypatch.setattr(work, "examine", made.examine)
    monkeypatch.setattr(work, "GRACE", 0.2)
    monkeypatch.setattr(panel_module.clusters, "virtual_problem", lambda: "")
    # What is drawn is tested above; here, that it is drawn when it must be.
    monkeypatch.setattr(pits_picture, "cluster", lambda view: repr(view).encode())
    yield made
    assert all(lab.closed for lab in made.made), "a test ends the hosts of its panel"


@pytest.fixture
def panel(labs):
    made = PitsPanel(fault=FAULT)
    yield made
    made.close()


def press(panel, *steps, timeout=10):
    panel.press(*steps)
    assert panel.wait(timeout), panel.status


# What is drawn


def test_every_fault_has_a_place_in_the_picture_and_none_is_left_over():
    assert set(drawing.HINTS) == {fault.id for fault in drills.FAULTS}


def drawn(name, **how):
    """The words in the picture, as matplotlib has them, at one moment of a fault."""
    from matplotlib.figure import Figure

    nodes = range(drills.by_id(name).nodes)
    hosts = [drawing.Host(f"node{i}", f"10.77.0.{i + 1}", rate=1e9) for i in nodes]
    screens = [drawing.Screen(host.name, "", [], "ended here") for host in hosts]
    view = drawing.View(hosts=hosts, hint=drawing.HINTS[name], screens=screens, **how)
    axes = Figure(figsize=(pits_picture.WIDTH, pits_picture.HEIGHT)).add_axes((0, 0, 1, 1))
    pits_picture.draw(axes, view)
    return axes.texts


def broken_words(name, **how):
    words = [text.get_text().replace("\n", " ") for text in drawn(name, **how)]
    return [one for one in words if "✗" in one]


@pytest.mark.slow
def test_no_words_overlap_or_leave_the_picture():
    for name in drawing.HINTS:
        boxes = [(t.get_text(), t.get_window_extent()) for t in drawn(name, broken=True)]
        for i, (words, one) in enumerate(boxes):
            inside = one.x0 >= 0 and one.x1 <= 800 and one.y0 >= 0 and one.y1 <= 370
            assert inside, (name, words)
            for other_words, other in boxes[i + 1 :]:
                assert not one.overlaps(other), (name, words, other_words)


@pytest.mark.parametrize("part", sorted({hint.part for hint in drawing.HINTS.values()}))
def test_what_is_broken_is_drawn_at_every_host_that_has_it(part):
    for name, hint in drawing.HINTS.items():
        if hint.part == part:
            words = broken_words(name, broken=True)
            assert all(f"✗ {hint.words[:8]}" in one for one in words)
            once = part in ("switch", "shared disk")
            assert len(words) == (1 if once else len(hint.hosts or (0, 1))), name


@pytest.mark.parametrize("how", [{}, {"broken": True, "secret": True}], ids=["well", "a secret"])
def test_what_is_not_broken_or_not_to_be_told_is_not_drawn(how):
    for name in ("slow-link", "only-rendezvous-port", "fewer-files", "mtu-black-hole"):
        assert broken_words(name, **how) == [], name


def test_the_picture_is_another_one_when_something_is_broken():
    hosts = [drawing.Host("node0", "10.77.0.1"), drawing.Host("node1", "10.77.0.2")]
    hint = drawing.HINTS["another-uid"]
    well, hurt, secret = (
        pits_picture.cluster(drawing.View(hosts=hosts, hint=hint, **how), 40)
        for how in ({}, {"broken": True}, {"broken": True, "secret": True})
    )
    assert well == secret != hurt


def test_what_nodes_say_is_escaped_and_has_seconds():
    screen = drawing.Screen("node1", "torchrun a && b", [(2.25, "<b>x")], "running", ", 3 s")
    html = drawing.screen_html(screen)
    assert "&lt;b&gt;x" in html and "<b>x" not in html and "   2.2 s" in html
    assert "node1$ torchrun a &amp;&amp; b" in html and "running, 3 s" in html


# Break, run, doctor, mend, run


def test_run_does_it_all_and_says_what_happened(labs, capfd):
    panel = PitsPanel(fault=FAULT)
    found = panel.run()
    assert labs.log == ["start", "inject", "run", "doctor", "cure", "run", "close"]
    assert found["fault"] == FAULT and "No such file or directory" in found["symptom"]
    assert found["found"]["name"] == "data" and found["found"]["node"] == "node1"
    assert found["passes"] is True and found["passes_exits"] == {"node0": 0, "node1": 0}
    assert found["lines"]["node0"].endswith("--fixed=False")
    assert panel.lab is None and not panel.running and not panel._view.failed
    assert capfd.readouterr() == ("", ""), "run() prints nothing"
    view = panel._view  # a picture of the end tells all of it
    told = [view.symptom, *(text for text, _ in drawing.verdict_lines(view))]
    for part, line in zip(("Seen: node1", "Doctor: data", "fix: copy", "Mended: exit"), told):
        assert line.startswith(part)
    assert len(told) == 4 and [host.addr for host in view.hosts] == ["10.77.0.1", "10.77.0.2"]


def test_step_by_step_the_buttons_the_words_and_the_picture_follow(panel, labs):
    def enabled():
        names = ("break", "launch", "doctor", "mend", "stop", "close")
        return [n for n in names if not getattr(panel, f"_{n}_button").disabled]

    assert enabled() == ["break", "launch", "doctor"] and labs.log == [], "nothing starts by itself"
    healthy = panel._image.value
    press(panel, "break")
    assert enabled() == ["launch", "doctor", "mend", "close"] and panel.lab is labs.made[0]
    assert panel._view.drawn is drawing.HINTS[FAULT] and panel._image.value != healthy
    press(panel, "job")
    assert "node1: FileNotFoundError" in panel._symptom.value
    assert "exit 1" in panel._screens.children[1].value
    assert "node1$ torchrun two_nodes.py" in panel._screens.children[1].value
    press(panel, "ask")
    assert "data (node1): &lt;data&gt; does not exist" in panel._verdict.value
    assert "fix: copy" in panel._verdict.value and "FAIL data" in panel._verdict.value
    assert "FileNotFoundError" in panel._symptom.value, "what was seen stays beside the verdict"
    press(panel, "mend")
    assert enabled() == ["break", "launch", "doctor", "close"] and panel._view.drawn is None
    press(panel, "job")
    assert panel._view.passed and "exit code 0" in panel._symptom.value
    press(panel, "close")
    assert enabled() == ["break", "launch", "doctor"] and labs.made[0].closed
    assert len(labs.made) == 1, "all of it on one set of hosts"


def test_a_second_break_is_on_fresh_hosts(panel, labs):
    for step in ("break", "mend", "break"):
        press(panel, step)
    assert labs.log == ["start", "inject", "cure", "close", "start", "inject"]


def test_run_before_break_is_on_hosts_that_are_as_after_the_cure(panel, labs):
    press(panel, "job")
    assert labs.log == ["start", "inject", "cure", "run"] and panel._view.passed


def test_mend_without_break_says_so(panel, labs):
    press(panel, "mend")
    assert panel.status == "Not started: nothing is broken: break it first" and labs.log == []


def test_the_nodes_words_come_while_they_run(panel, labs):
    labs.broken = ({0: [(0.1, "rank 0: started")], 1: []}, {0: (1.5, 1), 1: (1.5, 1)})
    values, pictures, words = set(), set(), set()
    panel._image.observe(lambda c: pictures.add(c.new), names="value")
    press(panel, "break")
    panel.press("job")

    def look():
        if panel._screens.children:
            values.add(panel._screens.children[0].value)
            words.add(panel._screens.children[1].value)
        return not panel.running

    until(look)
    assert any("rank 0: started" in v and "running" in v for v in values)
    assert len(pictures) <= 5, "the picture is not drawn again for the seconds alone"
    assert panel._view.failed and "no symptom was seen" in panel.status


def test_a_node_that_says_nothing_is_shown_as_silent(panel, labs, monkeypatch):
    monkeypatch.setattr(work, "SILENCE", 0.1)
    labs.broken = ({}, {})
    press(panel, "break")
    panel.press("job")
    until(lambda: "not a word for" in panel._screens.children[0].value)
    panel.stop()
    assert panel.wait(5)


def test_a_job_that_hangs_is_ended_soon_after_its_symptom(panel, labs):
    labs.broken = ({1: MISSING}, {})
    press(panel, "break")
    press(panel, "job", timeout=5)
    assert "ended here" in panel._screens.children[0].value
    assert labs.runs[0]._over is not None and not panel._view.failed


# What must not pass for a success


def test_no_symptom_is_a_failure(labs):
    labs.broken = labs.well
    with pytest.raises(RunFailed, match="no symptom was seen"):
        PitsPanel(fault=FAULT).run()
    assert labs.log[-1] == "close"


@pytest.mark.parametrize("says", ["", "connect"])
def test_a_doctor_that_names_another_check_first_is_a_failure(labs, says):
    labs.says = says
    with pytest.raises(RunFailed, match=f"names {says or 'nothing'} first, not data"):
        PitsPanel(fault=FAULT).run()
    assert labs.log[-1] == "close"


@pytest.mark.parametrize(
    "said, codes", [(HEALTHY, (0, 1)), (MISSING, (0, 0))], ids=["an exit code", "the symptom"]
)
def test_a_mended_job_that_does_not_pass_is_a_failure(labs, said, codes):
    labs.well = ({0: HEALTHY, 1: said}, {i: (0.2, code) for i, code in enumerate(codes)})
    panel = PitsPanel(fault=FAULT)
    with pytest.raises(RunFailed, match="Nothing is broken, but"):
        panel.run()
    assert panel._view.failed and not panel._view.passed


@pytest.mark.parametrize("step", ["start", "inject", "doctor", "cure"])
def test_an_error_is_one_line_and_ends_the_hosts(labs, step):
    labs.fails = step
    panel = PitsPanel(fault=FAULT)
    with pytest.raises(clusters.ClusterError, match=f"{step} went wrong"):
        panel.run()
    assert f"{step} went wrong" in panel.status and "\n" not in panel.status
    assert panel.lab is None and not panel._break_button.disabled


def test_hosts_that_are_half_broken_are_ended_after_a_single_press_too(panel, labs):
    labs.fails = "inject"
    press(panel, "break")
    assert panel.lab is None and labs.made[0].closed and panel._view.failed
    assert panel._view.drawn is None and panel._close_button.disabled
    labs.fails = ""
    press(panel, "break")
    assert panel._view.broken and not panel._view.failed


def test_a_fault_of_the_panel_itself_does_not_leave_it_running(labs, monkeypatch):
    monkeypatch.setattr(Lines, "stamped", lambda *_: 1 / 0)
    panel = PitsPanel(fault=FAULT)
    with pytest.raises(ZeroDivisionError):
        panel.run()
    assert not panel.running and labs.log[-1] == "close"


# Stop


def test_stop_in_a_run_ends_the_run_and_leaves_the_hosts_for_the_doctor(panel, labs):
    labs.broken = ({}, {})
    press(panel, "break")
    panel.press("job")
    until(lambda: labs.runs)
    panel.stop()
    assert panel.wait(5) and labs.runs[0]._over
    assert panel.status == "Stopped. The hosts are still up." and not panel._view.failed
    press(panel, "ask")
    assert panel._view.found["name"] == "data"


@pytest.mark.parametrize("step", ["start", "inject", "doctor", "cure"])
def test_stop_in_all_else_ends_the_hosts(labs, step):
    panel = PitsPanel(fault=FAULT)
    labs.slow = {step: 2.0}
    began = time.monotonic()
    threading.Timer(0.1, lambda: until(lambda: step in labs.log) or panel.stop()).start()
    with pytest.raises(RunFailed, match="stopped"):
        panel.run()
    assert panel.lab is None and panel.status == "Stopped. The hosts are ended."
    if step != "start":  # hosts that are just starting are waited for
        assert time.monotonic() - began < 5
        assert labs.made[-1].closed


def test_an_interrupted_cell_stops_all(labs):
    labs.broken = ({}, {})
    panel = PitsPanel(fault=FAULT)

    def interrupt():
        until(lambda: labs.runs)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        panel.run()
    assert not panel.running and labs.log[-1] == "close"


def test_another_fault_or_another_panel_ends_the_hosts(panel, labs):
    press(panel, "break")
    panel._which.value = "fewer-files"
    assert panel.wait(5) and labs.made[0].closed and "fewer files" in panel._view.title
    press(panel, "break")
    other = PitsPanel(fault="slow-link")
    press(other, "break")
    assert labs.made[1].closed and panel.lab is None and not labs.made[2].closed
    assert panel._mend_button.disabled
    other.close()


def test_the_kernels_end_ends_the_hosts(labs, monkeypatch):
    at_exit = []
    monkeypatch.setattr(work.atexit, "register", at_exit.append)
    panel = PitsPanel(fault=FAULT)
    press(panel, "break")
    for function in at_exit:
        function()
    assert labs.made[0].closed and panel.lab is None


# What cannot be had here; which is it; names


def test_on_local_only_lines_are_read_and_there_is_no_run_button(labs, monkeypatch):
    monkeypatch.setattr(
        panel_module.clusters, "virtual_problem", lambda: "User namespaces are off here."
    )
    started = []
    monkeypatch.setattr(
        work.clusters, "start", lambda *a: started.append(a) or SimpleNamespace(close=lambda: None)
    )
    panel = PitsPanel(fault=FAULT)
    assert "needs emulated hosts. User namespaces are off" in panel.status
    buttons = [b for b in panel._buttons.children if b.layout.display != "none"]
    assert buttons == []
    with pytest.raises(clusters.ClusterError, match="User namespaces are off here"):
        panel.run()
    assert labs.log == []
    panel._pit.value = "launch"
    names = [b.description for b in panel._buttons.children if b.layout.display != "none"]
    assert "Run" not in names and "Doctor" in names
    found = panel.run()
    assert started == [("local", 2)] and "run" not in labs.log
    assert found["found"]["name"] == "node rank" and found["finds_nothing_more"] is True
    assert found["symptom"] is None and found["passes"] is None


def test_a_fault_that_cannot_be_had_is_listed_and_says_why(labs, monkeypatch):
    fault = drills.by_id("another-uid")
    monkeypatch.setattr(panel_module.drills, "by_id", lambda name: SimpleNamespace(
        **{**vars(fault), "unless": lambda: "root may write anywhere"}))  # fmt: skip
    panel = PitsPanel(pit="storage")
    assert fault.title in [title for title, _ in panel._which.options]
    panel._which.value = "another-uid"
    assert "Not here: root may write anywhere" in panel.status
    with pytest.raises(clusters.ClusterError, match="root may write anywhere"):
        panel.run()


def test_which_is_it_hides_the_title_and_the_place_until_the_doctor_is_asked(labs):
    panel = PitsPanel(pit="network")
    panel._which.value = panel_module.WHICH
    fault = panel._fault
    assert fault.pit == "network" and "Which is it?" in panel._view.title
    press(panel, "break")
    assert panel._view.broken and panel._view.drawn is None
    for text in (panel._view.title, panel.status, repr(panel), panel._place.value):
        assert fault.title not in text and fault.id not in text
    press(panel, "ask")
    assert fault.title in panel._view.title and panel._view.drawn is drawing.HINTS[fault.id]
    panel.close()


@pytest.mark.parametrize(
    "pit, fault, words",
    [
        ("storag", None, "pit 'storag': use one of storage, network"),
        (None, "slow", "fault 'slow': use one of"),
        ("storage", "slow-link", "is of the pit network, not storage"),
    ],
)
def test_names_that_there_are_not(labs, pit, fault, words):
    with pytest.raises(clusters.UsageError, match=re.escape(words)):
        PitsPanel(pit=pit, fault=fault)


def test_it_shows_as_widgets_as_a_picture_and_as_the_same_text_everywhere(labs):
    panel = PitsPanel(fault=FAULT)
    before = panel._repr_mimebundle_()
    panel.run()
    after = panel._repr_mimebundle_()
    for bundle in (before, after):
        assert "application/vnd.jupyter.widget-view+json" in bundle
        image = PIL.open(io.BytesIO(base64.b64decode(bundle["image/png"])))
        assert image.format == "PNG" and image.width >= 700
    assert before["image/png"] != after["image/png"]
    assert before["text/plain"] == after["text/plain"]


# On real hosts


@pytest.fixture
def real(tmp_path, monkeypatch):
    problem = clusters.virtual_problem()
    if problem:
        pytest.skip(f"no emulated hosts: {problem}")
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    before = children()
    yield tmp_path
    assert children() <= before
    assert list(tmp_path.glob("drill-*")) == []


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.mark.slow
def test_a_real_fault_is_seen_named_and_mended(real):
    panel = PitsPanel(fault=FAULT)
    found = panel.run()
    assert found["symptom"].startswith("node1: ") and "No such file" in found["symptom"]
    assert found["found"]["name"] == "data" and found["found"]["node"] == "node1"
    assert found["passes"] and set(found["passes_exits"].values()) == {0}


@pytest.mark.slow
def test_stop_on_real_hosts_leaves_nothing(real):
    panel = PitsPanel(fault="two-ids")
    press(panel, "break", timeout=30)
    up = children()
    panel.press("job")
    until(lambda: children() - up, 20)
    panel.stop()
    assert panel.wait(20) and panel.lab is not None
    press(panel, "ask", timeout=30)
    assert panel._view.found["name"] == "rdzv id"
    assert panel.lab.node(1).sh("hostname").stdout.strip() == "node1"
    panel.close()


@pytest.mark.slow
def test_lines_are_read_on_a_real_local_cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("SCALELAB_HOME", str(tmp_path))
    found = PitsPanel(fault="two-nodes-zero", cluster="local").run()
    assert found["found"]["name"] == "node rank" and found["finds_nothing_more"]
    assert list(tmp_path.glob("drill-*")) == []
