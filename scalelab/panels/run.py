"""The run panel: settings, Launch and Stop, and a real distributed run drawn while it goes on.

The widgets live in the kernel, so a reloaded page finds them again. All work is done by one daemon
thread a launch: it starts the cluster, launches, follows, and closes the cluster whatever happens.
Callbacks only start that thread or set an event, so Stop answers at any time. A kernel that dies
takes the thread with it, and the cluster ends with the process that started it.
"""

from __future__ import annotations

import base64
import threading
import time
from dataclasses import dataclass
from html import escape

import ipywidgets as w

from scalelab import cluster as clusters
from scalelab import runs
from scalelab.panels import live

TICK = 0.1  # seconds between looks at the Stop event
REFRESH = 0.4  # seconds between pictures, or longer where drawing is slow
WORDS = {
    "succeeded": "Succeeded",
    "failed": "Failed",
    "stopped": "Stopped",
    "timed_out": "Ended: over its time limit",
}


class RunFailed(RuntimeError):
    """A run did not do what was asked: which rank failed first, where, and its own traceback."""


@dataclass(frozen=True)
class Settings:
    """What the fields held when Launch was pressed. Rate and delay are None where not applied."""

    nodes: int
    nproc_per_node: int
    rate: str | None
    delay: str | None
    steps: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


class RunPanel:
    """A panel that launches `script` on `nodes` hosts with `nproc_per_node` ranks each.

    `rate` and `delay` shape every host's link ("1gbit", "5ms"; one way). `steps` goes to the script
    as `--steps`, `args` after it. `cluster` is "auto", "virtual" or "local". Show the panel as the
    last line of a cell, or call `run()` to do the same without a hand on the mouse.
    """

    def __init__(
        self,
        script="scripts/train_ddp.py",
        nodes=2,
        nproc_per_node=1,
        rate="1gbit",
        delay="0ms",
        steps=60,
        cluster="auto",
        args=(),
    ):
        self.script, self.args, self.kind = str(script), tuple(map(str, args)), cluster
        self.last = None  # the last Run that was launched from here
        # An event, not Thread.join: once interrupted, that takes a live thread for a dead one.
        self._idle = threading.Event()
        self._idle.set()
        self._stop = threading.Event()
        self._error = None  # why the last launch did not succeed
        self._shown = None  # the run whose curve and logs are on show
        self._why_local = self._reason_for_local()
        self._view = live.View()
        self._curve = live.Curve()
        self._build(nodes, nproc_per_node, rate, delay, steps)
        self._view = self._blank("Not started. Press Launch.")
        self._show()

    # What a notebook calls

    def launch(self) -> None:
        """Start a run with the fields' settings and return at once; nothing while one is on."""
        if self.running:
            return
        self._idle.clear()
        self._stop.clear()
        self._error = None
        settings = self._settings()
        self._busy(True)
        threading.Thread(
            target=self._work, args=(settings,), daemon=True, name="scalelab-panel"
        ).start()

    def stop(self) -> None:
        """End the run now. Returns at once; the status says when it is over."""
        if self.running:
            self._stop.set()
            self._stop_button.disabled = True
            self._say("Stopping.")

    def wait(self, timeout=None) -> bool:
        """Block until nothing is on, or `timeout` seconds. True when nothing is on."""
        return self._idle.wait(timeout)

    def run(self):
        """Launch, wait for the end and return the Run: the panel without a hand on the mouse.

        A run already on is waited for instead. Raises RunFailed if it did not succeed or reported
        fewer ranks or steps than asked, and the cluster's own error if it could not start.
        """
        self.launch()
        try:
            self.wait()
        except BaseException:  # the learner interrupts the cell: nothing may go on without it
            self.stop()
            self.wait(30)
            raise
        if self._error is not None:
            raise self._error
        return self.last

    @property
    def running(self) -> bool:
        """Whether a run, or the building or closing of its cluster, is going on."""
        return not self._idle.is_set()

    @property
    def status(self) -> str:
        """The status line, in words."""
        return self._view.status

    def picture(self):
        """The panel as a picture: settings, status, loss per rank, ranks with their addresses."""
        from IPython.display import Image

        return Image(data=live.picture(self._view), format="png")

    def __repr__(self) -> str:
        s = self._settings()
        size = f"{count(s.nodes, 'node')} of {count(s.nproc_per_node, 'rank')}"
        return f"RunPanel: {size}, {count(s.steps, 'step')} of {self.script}"

    def _repr_mimebundle_(self, **kwargs):
        """The widgets; a picture of them where no widget can be shown; and a line of text."""
        bundle = dict(self.box._repr_mimebundle_(**kwargs) or {})
        bundle["image/png"] = base64.b64encode(live.picture(self._view)).decode()
        bundle["text/plain"] = repr(self)
        return bundle

    # The work of one launch, in its own thread

    def _work(self, settings: Settings) -> None:
        try:
            self._view, self._shown = self._blank("Starting the hosts.", settings), None
            self._show()
            if settings.steps < 1:
                raise clusters.UsageError(f"steps: {settings.steps} is not accepted, 1 or more is")
            with clusters.start(
                self.kind, settings.nodes, rate=settings.rate, delay=settings.delay
            ) as cluster:
                self._view.where = self._where(cluster, settings)
                if self._stop.is_set():
                    self._error = RunFailed("stopped before any rank was started")
                    self._view.status = "Stopped before any rank was started."
                    return
                self.last = runs.launch(
                    self.script,
                    ["--steps", str(settings.steps), *self.args],
                    cluster=cluster,
                    nproc_per_node=settings.nproc_per_node,
                )
                self._follow(self.last, cluster, settings)
        except (clusters.UsageError, clusters.ClusterError, runs.RunError, OSError) as error:
            self._fail(error, f"Not started: {error}")
        except Exception as error:  # a fault of ours must not leave the panel in "running"
            self._fail(error, f"Not finished: {type(error).__name__}: {error}")
        finally:
            self._show()
            self._busy(False)
            self._idle.set()

    def _follow(self, run, cluster, settings: Settings) -> None:
        """Redraw until the run is over. Drawing takes at most a quarter of one core."""
        asked, due = False, 0.0
        while run.status == "running":
            if self._stop.is_set() and not asked:
                asked = True
                run.stop()
            elif time.monotonic() >= due:
                began = time.monotonic()
                self._look(run, cluster, settings)
                self._view.status = "Stopping." if asked else capital(run.words())
                self._show()
                due = time.monotonic() + max(REFRESH, 3 * (time.monotonic() - began))
            run.wait(TICK)
        self._look(run, cluster, settings)
        self._error = verdict(run, settings)
        self._view.failed = self._error is not None and run.status != "stopped"
        self._view.status = self._last_words(run)

    def _look(self, run, cluster, settings: Settings) -> None:
        """Read what the run has written so far into the view."""
        metrics = run.metrics()
        view = self._view
        view.loss = live.by_rank(metrics)
        view.tokens_per_step, view.tokens_per_second = live.speed(metrics)
        view.ranks = [row(rank, run, cluster) for rank in run.ranks]
        self._shown = run

    def _last_words(self, run) -> str:
        """How it ended, in one line, and for a failure the last line of the rank's traceback."""
        if self._error is None or run.status == "stopped":
            return capital(run.words())
        first = run.first_failure
        if not first:
            return f"{WORDS[run.status]}: {str(self._error).splitlines()[0]}"
        lines = (first["error"] or "").strip().splitlines()
        why = f": {lines[-1]}" if lines else ", without a traceback"
        return f"{WORDS[run.status]}. {capital(runs.who(first))} failed first{why}"

    def _fail(self, error: BaseException, words: str) -> None:
        self._error = error
        self._view.failed = True
        self._view.status = words

    # The view and the widgets

    def _reason_for_local(self) -> str:
        """Why link settings cannot be applied here; "" where they can."""
        if self.kind == "local":
            return "This panel was asked for a local cluster."
        return clusters.virtual_problem() if self.kind == "auto" else ""

    def _settings(self) -> Settings:
        shaped = not self._why_local
        return Settings(
            nodes=self._nodes.value,
            nproc_per_node=self._nproc.value,
            rate=self._rate.value.strip() or None if shaped else None,
            delay=self._delay.value.strip() or None if shaped else None,
            steps=self._steps.value,
        )

    def _blank(self, status: str, settings: Settings | None = None) -> live.View:
        """The view before anything has run."""
        s = settings or self._settings()
        link = f", {s.rate or 'unlimited'} links, delay {s.delay or '0ms'}"
        if self._why_local:
            link = ""
        return live.View(
            title=f"{self.script} on {count(s.nodes, 'node')}, "
            f"{count(s.nproc_per_node, 'rank')} each, {count(s.steps, 'step')}{link}",
            status=status,
            where=self._before(),
            steps=s.steps,
            world=s.world_size,
        )

    def _before(self) -> str:
        """Which cluster a launch will use."""
        if self._why_local:
            return (
                "Cluster: local. Every node is this host, on its loopback address. "
                f"{self._why_local} Rate and delay cannot be set here."
            )
        return "Cluster: virtual. Every node is an emulated host with its own name and address."

    def _where(self, cluster, settings: Settings) -> str:
        """Which cluster the run is on."""
        if cluster.kind == "local":
            self._why_local = self._why_local or cluster.why or "It was asked for."
            self._lock_links()
            return self._before()
        hosts = ", ".join(f"{node.name} ({node.addr})" for node in cluster.nodes)
        return f"Cluster: {cluster.kind}. {count(len(cluster.nodes), 'emulated host')}: {hosts}."

    def _build(self, nodes, nproc_per_node, rate, delay, steps) -> None:
        def number(value, text):
            return w.IntText(value, description=text, layout=w.Layout(width="150px"), style=wide)

        def words(value, text):
            return w.Text(value, description=text, layout=w.Layout(width="150px"), style=wide)

        wide = {"description_width": "initial"}
        self._nodes = number(nodes, "nodes")
        self._nproc = number(nproc_per_node, "ranks a node")
        self._rate = words(rate or "", "rate")
        self._delay = words(delay or "", "delay")
        self._steps = number(steps, "steps")
        self._fields = (self._nodes, self._nproc, self._rate, self._delay, self._steps)
        small = w.Layout(width="100px")
        self._launch_button = w.Button(
            description="Launch", button_style="primary", icon="play", layout=small
        )
        self._stop_button = w.Button(description="Stop", icon="stop", disabled=True, layout=small)
        self._launch_button.on_click(lambda _: self.launch())
        self._stop_button.on_click(lambda _: self.stop())
        self._bar = w.IntProgress(0, 0, max(steps, 1), layout=w.Layout(width="200px"))
        self._count = w.HTML()
        self._status = w.HTML()
        self._place = w.HTML()
        self._image = w.Image(format="png", layout=w.Layout(width="800px", max_width="100%"))
        self._table = w.HTML()
        self._which = w.Dropdown(
            options=[("rank 0", 0)], description="log of", layout=w.Layout(width="320px")
        )
        self._which.style.description_width = "initial"
        self._log = w.HTML(layout=w.Layout(width="800px", max_width="100%"))
        self._which.observe(lambda _: self._show_log(), names="value")
        row = w.Layout(flex_flow="row wrap", align_items="center", grid_gap="2px 10px")
        self._lock_links()
        self.box = w.VBox(
            [
                w.HBox(self._fields, layout=row),
                w.HBox(
                    [self._launch_button, self._stop_button, self._bar, self._count], layout=row
                ),
                self._status,
                self._place,
                self._image,
                self._table,
                self._which,
                self._log,
            ]
        )
        self.box.add_class("scalelab-run-panel")
        self._image.add_class("scalelab-curve")
        self._status.add_class("scalelab-status")

    def _lock_links(self) -> None:
        """Where links cannot be shaped, say so in the fields themselves."""
        if self._why_local:
            for link in (self._rate, self._delay):
                link.disabled = True
                link.tooltip = f"Cannot be set here: {self._why_local}"

    def _busy(self, on: bool) -> None:
        self._launch_button.disabled = on
        self._stop_button.disabled = not on
        for one in self._fields:
            one.disabled = on
        self._lock_links()

    def _say(self, status: str) -> None:
        self._view.status = status
        colour = "var(--jp-error-color0,#b00020)" if self._view.failed else "inherit"
        self._status.value = f'<span style="font-weight:600;color:{colour}">{escape(status)}</span>'

    def _show(self) -> None:
        """Send the view to the browser."""
        view = self._view
        self._say(view.status)
        self._place.value = f"<span>{escape(view.where)}</span>"
        self._bar.max, self._bar.value = max(view.steps, 1), view.step
        self._bar.bar_style = "danger" if view.failed else ""
        self._count.value = f"step {view.step} of {view.steps}"
        self._image.value = self._curve.png(view)
        self._table.value = live.table_html(view)
        ranks = [row["rank"] for row in view.ranks] or [0]
        options = [(view.label(rank), rank) for rank in ranks]
        if tuple(options) != tuple(self._which.options):
            chosen = self._which.value
            self._which.options = options
            self._which.value = chosen if chosen in ranks else ranks[0]
        self._show_log()

    def _show_log(self) -> None:
        run = self._shown
        self._log.value = live.log_html(run.log(self._which.value) if run else "")


def verdict(run, settings: Settings) -> RunFailed | None:
    """None if the run did all that was asked, else the error that says what it did not."""
    first = run.first_failure
    if run.status != "succeeded":
        if first:
            return RunFailed(
                f"the run {run.status.replace('_', ' ')}: {runs.who(first)} failed first\n\n"
                f"{first['error'] or '(it left no traceback)'}"
            )
        return RunFailed(f"the run did not succeed: {run.words()}")
    if len(run.ranks) != settings.world_size:
        return RunFailed(f"{len(run.ranks)} ranks reported, {settings.world_size} were asked for")
    done = {rank: steps[-1] for rank, (steps, _) in live.by_rank(run.metrics()).items()}
    for rank in range(settings.world_size):
        if done.get(rank, 0) != settings.steps:
            return RunFailed(
                f"rank {rank} reported {done.get(rank, 0)} steps, {settings.steps} were asked for"
            )
    return None


def row(rank: dict, run, cluster) -> dict:
    """One line of the table of ranks."""
    node = rank["node"]
    name = cluster.nodes[node].name if isinstance(node, int) else str(node)
    return {
        "rank": rank["rank"],
        "node": name,
        "addr": rank.get("addr") or "",
        "pid": rank.get("pid"),
        "state": state(rank.get("exit"), run.status),
    }


def state(code: int | None, status: str) -> str:
    """A rank's exit code in words."""
    if code == 0:
        return "finished"
    if code is None:
        return "running" if status == "running" else "ended"
    if status == "stopped":
        return "stopped"
    return f"ended by signal {-code}" if code < 0 else f"failed (exit {code})"


def count(n: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return text[:1].upper() + text[1:]
