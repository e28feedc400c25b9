"""The run panel: settings, Launch and Stop, and a real distributed run drawn while it goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape

import ipywidgets as w

from scalelab import cluster as clusters
from scalelab import runs
from scalelab.panels import live
from scalelab.panels.base import (
    REFRESH,
    ROW,
    TICK,
    Panel,
    RunFailed,
    failed_rank,
    failure_in_one_line,
    number,
    words,
)
from scalelab.panels.live import capital, count


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


class RunPanel(Panel):
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
        if isinstance(args, str):
            raise clusters.UsageError(f"args {args!r}: use a list, such as {args.split()!r}")
        why = "This panel was asked for a local cluster." if cluster == "local" else ""
        super().__init__(cluster, why or (clusters.virtual_problem() if cluster == "auto" else ""))
        self.script, self.args = str(script), tuple(map(str, args))
        self.last = None  # the last Run that was launched from here
        self._shown = None  # the run whose curve and logs are on show
        self._view = live.View()
        self._curve = live.Curve()
        self._build(nodes, nproc_per_node, rate, delay, steps)
        self._view = self._blank("Not started. Press Launch.")
        self._show()

    def __repr__(self) -> str:
        s = self._settings()
        size = f"{count(s.nodes, 'node')} of {count(s.nproc_per_node, 'rank')}"
        return f"RunPanel: {size}, {count(s.steps, 'step')} of {self.script}"

    def _picture(self) -> bytes:
        return live.picture(self._view)

    def _found(self):
        return self.last

    # The work of one launch, in its own thread

    def _expected(self) -> tuple:
        return (clusters.UsageError, clusters.ClusterError, runs.RunError, OSError)

    def _do(self, settings: Settings) -> None:
        self._view, self._shown = self._blank("Starting the hosts.", settings), None
        self._show()
        if settings.steps < 1:
            raise clusters.UsageError(f"steps: {settings.steps} is not accepted, 1 or more is")
        with clusters.start(
            self.kind, settings.nodes, rate=settings.rate, delay=settings.delay
        ) as cluster:
            self._view.where = self._where(cluster)
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
        return failure_in_one_line(run, self._error)

    # The view and the widgets

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

    def _build(self, nodes, nproc_per_node, rate, delay, steps) -> None:
        self._nodes = number(nodes, "nodes")
        self._nproc = number(nproc_per_node, "ranks a node")
        self._rate = words(rate or "", "rate")
        self._delay = words(delay or "", "delay")
        self._steps = number(steps, "steps")
        self._fields = (self._nodes, self._nproc, self._rate, self._delay, self._steps)
        self._links = (self._rate, self._delay)
        self._lock_links()
        self._which = w.Dropdown(
            options=[("rank 0", 0)], description="log of", layout=w.Layout(width="320px")
        )
        self._which.style.description_width = "initial"
        self._log = w.HTML(layout=w.Layout(width="800px", max_width="100%"))
        self._which.observe(lambda _: self._show_log(), names="value")
        self.box = w.VBox(
            [
                w.HBox(self._fields, layout=w.Layout(**ROW)),
                self._buttons,
                self._status,
                self._place,
                self._image,
                self._table,
                self._which,
                self._log,
            ]
        )
        self.box.add_class("scalelab-run-panel")

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
    if run.status != "succeeded":
        return failed_rank(run)
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
