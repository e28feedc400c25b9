"""The bandwidth panel: one or two links, a collective timed on each, and both in one plot."""

from __future__ import annotations

import time
from dataclasses import dataclass
from html import escape

import ipywidgets as w

from scalelab import cluster as clusters
from scalelab import runs
from scalelab.cluster.units import parse_delay, parse_rate
from scalelab.measure import sweep as sweeps
from scalelab.panels import bandwidth_view as drawing
from scalelab.panels.base import (
    REFRESH,
    TICK,
    Panel,
    RunFailed,
    failed_rank,
    failure_in_one_line,
    gently,
    number,
    words,
)
from scalelab.panels.live import COLOURS

TIMEOUT = 600  # seconds for one link
LOOPBACK = "loopback, no link set"
TO_COPY = (
    "<style>.scalelab-copy textarea {white-space: pre; overflow-x: auto}</style>"
    "<span>To copy the numbers: click into the box, select all, copy. The columns are separated "
    "by tabs, as spreadsheets take them.</span>"
)


@dataclass(frozen=True)
class Settings:
    """What the fields held when Launch was pressed. links: (name, rate, delay) of each that is to
    be measured, as written; rate and delay are None where they do not apply."""

    nodes: int
    sizes: str
    links: tuple


class BandwidthPanel(Panel):
    """A panel that times a collective on `nodes` hosts over link A, then over link B, and draws
    the bus bandwidth of both against the size of the message.

    `rate` and `delay` are link A's, `rate_b` and `delay_b` link B's ("1gbit", "5ms"; one way);
    `rate_b=None` leaves link B out. `sizes` are bytes: "4K:16M:4" is from 4K to 16M, each four
    times the one before. `cluster` is "auto", "virtual" or "local"; on local no link can be set,
    and there is one measurement. `op` is one of scalelab.measure.sweep.OPS. Show the panel as the
    last line of a cell, or call `run()`, which returns a list with each link's result: see
    `scalelab.measure.sweep.Sweep.result`. Raises UsageError for an operation there is not.
    """

    def __init__(
        self,
        rate="1gbit",
        delay="0ms",
        nodes=2,
        sizes="4K:16M:4",
        cluster="auto",
        op="all-reduce",
        rate_b="100mbit",
        delay_b="0ms",
    ):
        sweeps.check(op, "4K")
        why = "This panel was asked for a local cluster." if cluster == "local" else ""
        super().__init__(cluster, why or (clusters.virtual_problem() if cluster == "auto" else ""))
        self.op = op
        self.results: list = []  # one a link that was measured to its end, since the last Launch
        self._drawn = None  # what the picture on show was made from
        self._build(rate, delay, rate_b, delay_b, nodes, sizes)
        self._view: drawing.View = self._blank("Not started. Press Launch.", self._settings())
        self._check_fields()
        self._show()

    def __repr__(self) -> str:
        s = self._settings()
        links = " and ".join(_label(link) for link in s.links)
        return f"BandwidthPanel: {self.op} of {s.sizes} on {s.nodes} hosts, {links}"

    def _picture(self) -> bytes:
        return drawing.picture(self._view)

    def _found(self) -> list:
        return list(self.results)

    # The work of one launch, in its own thread

    def _expected(self) -> tuple:
        return (clusters.UsageError, clusters.ClusterError, runs.RunError, OSError)

    def _do(self, settings: Settings) -> None:
        self.results = []
        self._view = self._blank("Starting the hosts.", settings)
        self._show()
        problem = problem_with(settings, self.op)
        if problem:
            raise clusters.UsageError(problem)
        for shown, (name, rate, delay) in zip(list(self._view.links), settings.links):
            if self._why_local and name != "A":
                break  # found only now: emulated hosts did not start, and there is one loopback
            if self._stop.is_set():
                return self._stopped(f"link {name} was not measured")
            self._view.status = f"{shown.sentence}: starting the hosts."
            self._show()
            try:
                self._measure(shown, settings, rate, delay)
            except self._expected() as error:
                return self._fail(error, f"{shown.sentence}: {error}")
            if self._error is not None:
                return
        best = [f"{link.name} {_best(link)}" for link in self._view.links if link.rows]
        self._view.status = f"Measured. Best busbw: {', '.join(best)}."

    def _measure(self, shown: drawing.Link, settings: Settings, rate, delay) -> None:
        """One link, on hosts of its own: nothing of one can be under way on the other."""
        with clusters.start(self.kind, settings.nodes, rate=rate, delay=delay) as cluster:
            self._view.where = self._where(cluster) + self._crowd(settings.nodes)
            if cluster.kind == "local":
                shown.rate, shown.words = None, LOOPBACK
                self._view.links = [shown]
            if self._stop.is_set():
                return self._stopped(f"no rank was started on link {shown.name}")
            sweep = sweeps.Sweep(cluster, self.op, settings.sizes, timeout=TIMEOUT)
            self._follow(sweep, shown)

    def _follow(self, sweep, shown: drawing.Link) -> None:
        """Redraw until the sweep is over. Drawing takes at most a quarter of one core."""
        due = 0.0
        while not sweep.done:
            if self._stop.is_set():
                sweep.stop()
            elif time.monotonic() >= due:
                began = time.monotonic()
                shown.result = sweep.result(partial=True)
                self._view.status = f"{shown.sentence}: {sweep.words()}."
                self._show()
                due = time.monotonic() + max(REFRESH, 3 * (time.monotonic() - began))
            sweep.run.wait(TICK)
        shown.result = sweep.result(partial=True)
        if sweep.run.status == "stopped":
            return self._stopped(f"{shown.sentence}: {sweep.words()}")
        error = failed_rank(sweep.run)
        if error is not None:
            words = failure_in_one_line(sweep.run, error)
            return self._fail(error, f"{shown.sentence}: {words}")
        result = shown.result = sweep.result()  # raises where fewer sizes came than were asked for
        wrong = [row for row in result["rows"] if row["wrong"]]
        if wrong:
            at = ", ".join(f"{row['wrong']} at {sweeps.show_bytes(row['bytes'])}" for row in wrong)
            words = f"{shown.sentence}: the {self.op} gave wrong numbers ({at})"
            return self._fail(RunFailed(words), words)
        self.results.append(result)

    def _stopped(self, words: str) -> None:
        words = words[:1].lower() + words[1:]
        self._error = RunFailed(f"stopped: {words}")
        self._view.status = f"Stopped: {words}."

    # The view and the widgets

    def _settings(self) -> Settings:
        if self._why_local:
            links = (("A", None, None),)
        else:
            both = (("A", self._rate, self._delay), ("B", self._rate_b, self._delay_b))
            links = tuple(
                (name, rate.value.strip() or None, delay.value.strip() or None)
                for name, rate, delay in both
                if name == "A" or self._with_b.value
            )
        return Settings(self._nodes.value, self._sizes.value.strip(), links)

    def _blank(self, status: str, s: Settings) -> drawing.View:
        """The view before anything has run, as far as the fields make sense."""
        sizes, links = [], []
        if not problem_with(s, self.op):
            sizes = sweeps.parse_sizes(s.sizes)
            for name, rate, delay in s.links:
                link = LOOPBACK if self._why_local else _link_words(rate, delay)
                bits = None if self._why_local else parse_rate(rate)
                links.append(drawing.Link(name, link, bits))
        where = "this host's loopback" if self._why_local else f"{s.nodes} hosts"
        ranks = f"{s.nodes} ranks on {where}" if self._why_local else f"{where}, 1 rank each"
        return drawing.View(
            title=f"{self.op} of {s.sizes} (bytes) on {ranks}",
            status=status,
            where=self._before() + self._crowd(s.nodes),
            op=self.op,
            sizes=sizes,
            links=links,
        )

    def _crowd(self, nodes: int) -> str:
        """A warning where there are more ranks than this machine can run at the same time."""
        most = clusters.max_ranks()
        return f" More than {most} ranks here measure the processor too." if nodes > most else ""

    def _build(self, rate, delay, rate_b, delay_b, nodes, sizes) -> None:
        self._rate, self._rate_b = words(rate, "rate"), words(rate_b or rate, "rate")
        self._delay, self._delay_b = (words(d, "delay, one way") for d in (delay, delay_b))
        self._with_b = w.Checkbox(
            rate_b is not None, description="link B", indent=False, layout=w.Layout(width="auto")
        )
        self._nodes, self._sizes = number(nodes, "hosts"), words(sizes, "sizes")
        for one in (self._rate, self._delay, self._rate_b, self._delay_b, self._nodes, self._sizes):
            one.layout.width = "190px"
        self._rate.placeholder = self._rate_b.placeholder = "unlimited"
        self._links = (self._rate, self._delay, self._with_b, self._rate_b, self._delay_b)
        self._fields = (*self._links, self._nodes, self._sizes)
        for one in self._fields:
            one.observe(lambda _: self._check_fields(), names="value")
        self._hint = w.HTML()
        self._hint.add_class("scalelab-hint")
        self._copy_words = w.HTML(TO_COPY)
        self._copy = w.Textarea(layout=w.Layout(width="800px", max_width="100%", height="7em"))
        self._copy.add_class("scalelab-copy")

        def column(head, *fields):
            return w.VBox([head, *fields], layout=w.Layout(margin="0 24px 0 0"))

        def mark(index, text):
            colour = COLOURS[index]
            return w.HTML(f'<b><span style="color:{colour}">{"●■"[index]}</span> {text}</b>')

        b_head = w.HBox([mark(1, ""), self._with_b], layout=w.Layout(align_items="center"))
        top = w.Layout(flex_flow="row wrap", align_items="flex-start")
        self.box = w.VBox(
            [
                w.HBox(
                    [
                        column(mark(0, "link A"), self._rate, self._delay),
                        column(b_head, self._rate_b, self._delay_b),
                        column(w.HTML("<b>both links</b>"), self._nodes, self._sizes),
                    ],
                    layout=top,
                ),
                self._hint,
                self._buttons,
                self._status,
                self._place,
                self._image,
                self._table,
                self._copy_words,
                self._copy,
            ]
        )
        self.box.add_class("scalelab-bandwidth-panel")
        self._lock_links()

    def _lock_links(self) -> None:
        super()._lock_links()
        if not self._with_b.value:
            self._rate_b.disabled = self._delay_b.disabled = True

    def _check_fields(self) -> None:
        """Beside the fields: what is wrong with them, as they are typed. Before the first point
        the plot follows them too."""
        settings = self._settings()
        problem = problem_with(settings, self.op)
        self._hint.value = (
            f'<span style="color:var(--jp-error-color0,#b00020)">{escape(problem)}</span>'
        )
        self._hint.layout.display = "" if problem else "none"
        if not self.running:
            self._busy(False)
            if not problem and not self._view.done:
                self._view = self._blank("Not started. Press Launch.", settings)
                self._show()

    def _show(self) -> None:
        """Send the view to the browser."""
        view = self._view
        self._say(view.status)
        self._place.value = f"<span>{escape(view.where)}</span>"
        self._bar.max, self._bar.value = max(view.of, 1), view.done
        self._bar.bar_style = "danger" if view.failed else ""
        self._count.value = f"{view.done} of {view.of} points"
        drawn = (view.title, tuple((link.label, len(link.rows)) for link in view.links))
        if drawn == self._drawn:  # a picture takes longer than all the rest
            return
        self._drawn = drawn
        self._image.value = gently(drawing.curve, view)
        self._table.value = drawing.table_html(view)
        self._copy.value = drawing.tsv(view)
        for one in (self._copy_words, self._copy):
            one.layout.display = "" if self._copy.value else "none"


def problem_with(settings: Settings, op: str) -> str:
    """Why these settings cannot be measured, in one line; "" where they can."""
    nodes = settings.nodes
    if not 2 <= nodes <= clusters.MAX_NODES:
        return f"hosts: {nodes} is not accepted, 2 to {clusters.MAX_NODES} are"
    try:
        sizes = sweeps.parse_sizes(settings.sizes)
    except clusters.UsageError as error:
        return str(error)
    for name, rate, delay in settings.links:
        try:
            bits, _ = parse_rate(rate), parse_delay(delay)
        except ValueError as error:
            return f"link {name}: {error}"
        if bits:
            # What Sweep asks too; here before link A has been measured for nothing.
            least = sweeps.least_seconds(op, sizes, nodes, bits)
            if least > TIMEOUT:
                return (
                    f"link {name}: sizes up to {sweeps.show_bytes(sizes[-1])} take {least:,.0f} s "
                    f"at least at {drawing.show_rate(bits)}/s, the limit is {TIMEOUT} s"
                )
    return ""


def _link_words(rate: str | None, delay: str | None) -> str:
    return f"{drawing.show_rate(parse_rate(rate))}, {drawing.show_delay(parse_delay(delay))}"


def _label(link: tuple) -> str:
    """A link as its fields were filled, whether or not that makes sense."""
    name, rate, delay = link
    return f"{name} ({rate or 'unlimited'}, {delay or '0ms'})"


def _best(link: drawing.Link) -> str:
    best = max(link.rows, key=lambda row: row["busbw"])
    share = f" ({link.share(best)} of the line rate)" if link.line_rate else ""
    return f"{best['busbw']:.4g} GB/s{share}"
