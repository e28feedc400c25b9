"""What a panel shows, as plain data, and the two ways to draw it: HTML and PNG.

Nothing here knows widgets, threads or clusters. A figure is made with `matplotlib.figure.Figure`
and never with pyplot, whose state belongs to the main thread: these functions run in a watcher.
"""

from __future__ import annotations

import io
import statistics
import textwrap
from dataclasses import dataclass, field
from html import escape

from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers tell apart; dashes do it in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
DASHES = ("-", "--", "-.", ":")
LOG_LINES = 200
TABLE_ROWS = 16


@dataclass
class View:
    """One moment of a panel. `loss` maps a rank to its (steps, losses in nats per token)."""

    title: str = ""
    status: str = ""
    where: str = ""
    failed: bool = False
    steps: int = 1
    world: int = 1  # ranks asked for
    loss: dict = field(default_factory=dict)
    ranks: list = field(default_factory=list)  # dicts: rank, node, addr, pid, state
    tokens_per_step: int = 0  # all ranks together
    tokens_per_second: float = 0.0

    def label(self, rank: int) -> str:
        """The words for a rank: `rank 0 on node0 (10.77.0.1)`."""
        for row in self.ranks:
            if row["rank"] == rank:
                return f"rank {rank} on {row['node']} ({row['addr']})"
        return f"rank {rank}"

    @property
    def step(self) -> int:
        """The last step that every rank has reported; 0 before the first."""
        if not self.loss or len(self.loss) < self.world:
            return 0
        return min(steps[-1] for steps, _ in self.loss.values())

    @property
    def speed(self) -> str:
        """Tokens a second of the whole job, with the tokens of one step beside it."""
        if not self.tokens_per_second:
            return ""
        return (
            f"{self.tokens_per_second:,.0f} tokens/s over all ranks, "
            f"{self.tokens_per_step:,} tokens a step"
        )


def by_rank(metrics: list) -> dict:
    """Loss per rank from a run's metrics: {rank: (steps, losses)}, in step order."""
    out: dict = {}
    for row in metrics:
        steps, losses = out.setdefault(row["rank"], ([], []))
        steps.append(row["step"])
        losses.append(row["loss"])
    return dict(sorted(out.items()))


def speed(metrics: list, last: int = 50) -> tuple:
    """(tokens a step, tokens a second) of the whole job: the median over its last steps.

    A step is over when its slowest rank is. Fewer than three whole steps give a speed of 0.
    """
    ranks = {row["rank"] for row in metrics}
    tokens: dict = {}
    ends: dict = {}
    seen: dict = {}
    for row in metrics:
        step = row["step"]
        tokens[step] = tokens.get(step, 0) + row["tokens"]
        ends[step] = max(ends.get(step, 0.0), row["time"])
        seen[step] = seen.get(step, 0) + 1
    whole = sorted(step for step, count in seen.items() if count == len(ranks))[-last:]
    if not whole:
        return 0, 0.0
    gaps = [ends[b] - ends[a] for a, b in zip(whole, whole[1:]) if b == a + 1]
    middle = statistics.median(gaps) if len(gaps) >= 2 else 0.0
    return tokens[whole[-1]], tokens[whole[-1]] / middle if middle > 0 else 0.0


class Curve:
    """The loss curve as a PNG. Keeps its figure between pictures: moving lines costs a third."""

    def __init__(self, width: float = 8.0, height: float = 3.2, dpi: int = 100):
        self.dpi = dpi
        self.figure = Figure(figsize=(width, height), layout="constrained")
        self.axes = self.figure.add_subplot()
        self._lines: dict = {}
        self._labels: list = []

    def png(self, view: View) -> bytes:
        """Draw `view`."""
        if set(self._lines) - set(view.loss):
            self.axes.clear()
            self._lines, self._labels = {}, []
        draw_loss(self.axes, view, self._lines)
        labels = [line.get_label() for line in self._lines.values()]
        if labels and labels != self._labels:
            legend(self.axes, len(labels))
            self._labels = labels
        return png(self.figure, self.dpi)


def draw_loss(axes, view: View, lines: dict) -> None:
    """Put every rank's loss on `axes`; `lines` holds the lines drawn so far and is added to."""
    for rank, (steps, losses) in view.loss.items():
        if rank not in lines:
            style = {
                "color": COLOURS[rank % len(COLOURS)],
                "linestyle": DASHES[(rank // len(COLOURS) + rank) % len(DASHES)],
                "marker": "." if view.steps <= 100 else "",
                "markersize": 4,
                "linewidth": 1.3,
            }
            (lines[rank],) = axes.plot([], [], **style)
        lines[rank].set_data(steps, losses)
        lines[rank].set_label(view.label(rank))
    for text in list(axes.texts):
        text.remove()
    if view.loss:
        axes.relim()
        axes.autoscale(True, axis="y")
    else:
        axes.set_ylim(0, 5)
        axes.text(
            0.5, 0.5, "no step yet", transform=axes.transAxes, ha="center", color="0.45", size=11
        )
    axes.tick_params(labelleft=bool(view.loss))
    last = max((steps[-1] for steps, _ in view.loss.values()), default=view.steps)
    # A long run's axis grows with it, or its first minute would be a line one pixel wide.
    axes.set_xlim(0, max(1, min(view.steps, max(60, 1.5 * last))))
    axes.set_title(view.speed, loc="right", fontsize=9, color="0.35")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss (nats per token)")
    plain(axes)


def plain(axes) -> None:
    """A faint grid behind the curves, and no box around them."""
    axes.grid(True, color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def legend(axes, count: int) -> None:
    """A legend that leaves room for the curve however many ranks there are."""
    columns = 1 if count <= 4 else 2
    axes.legend(loc="upper right", frameon=False, fontsize=9 if count <= 8 else 7, ncols=columns)


def picture(view: View, dpi: int = 100) -> bytes:
    """The whole panel as one PNG: settings, status, loss per rank, ranks with their addresses.

    This is what shows where no widget can: on GitHub, in HTML, in a clone not yet trusted.
    """
    head = ("rank", "node", "address", "process", "state")
    rows = [
        (str(r["rank"]), r["node"], r["addr"], str(r["pid"] or ""), r["state"]) for r in view.ranks
    ]
    figure, bottom, height = frame(view, head, rows, (0.085, 0.16, 0.32, 0.53, 0.67), "ranks", 2.9)
    axes = figure.add_axes((0.085, bottom + 0.5 / height, 0.885, 2.3 / height))
    lines: dict = {}
    draw_loss(axes, view, lines)
    if lines:
        legend(axes, len(lines))
    return png(figure, dpi)


def frame(view, head: tuple, rows: list, columns: tuple, what: str, curve: float):
    """A figure with a view's words above and a table of `rows` below, at most TABLE_ROWS of them;
    columns: where each begins, as a fraction of the width. Between them is room for a plot of
    `curve` inches. Returns the figure, where that room begins (a fraction) and the height."""
    above = [(view.title, "bold", "black")]
    above += [(line, "normal", "#B00020" if view.failed else "black") for line in wrap(view.status)]
    above += [(line, "normal", "0.35") for line in wrap(view.where)]
    table = [head, *rows[:TABLE_ROWS]] if rows else []
    if len(rows) > TABLE_ROWS:
        table.append(("", f"and {len(rows) - TABLE_ROWS} more {what}"))
    line = 0.21
    top, bottom = line * (len(above) + 1.2), line * (len(table) + 0.8)
    height = top + curve + bottom
    figure = Figure(figsize=(8.0, height))
    for i, (text, weight, colour) in enumerate(above):
        y = 1 - line * (i + 0.4) / height
        figure.text(0.02, y, text, weight=weight, color=colour, size=10, va="top")
    for i, cells in enumerate(table):
        y, colour = (bottom - line * (i + 1)) / height, "0.35" if i == 0 else "black"
        for x, cell in zip(columns, cells):
            figure.text(x, y, cell, size=9.5, va="baseline", color=colour)
    return figure, bottom / height, height


def wrap(text: str, width: int = 110) -> list:
    """`text` as lines that fit the picture."""
    return [part for line in text.splitlines() for part in textwrap.wrap(line, width)][:6]


def png(figure: Figure, dpi: int) -> bytes:
    """The figure as PNG bytes on white, the same bytes for the same figure."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=dpi, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def table_html(view: View) -> str:
    """The ranks as an HTML table. Colours come from JupyterLab's theme, light or dark."""
    if not view.ranks:
        return ""
    names = ("rank", "node", "address", "process id", "state")
    keys = ("rank", "node", "addr", "pid", "state")
    rows = [["" if row[key] is None else row[key] for key in keys] for row in view.ranks]
    return rows_html(names, rows)


def rows_html(names, rows) -> str:
    """An HTML table. Its text can be selected."""
    cell = "padding:2px 14px 2px 0;text-align:left;"
    head = "".join(f'<th style="{cell}font-weight:600">{escape(name)}</th>' for name in names)
    body = ""
    for cells in rows:
        body += "<tr>" + "".join(f'<td style="{cell}">{escape(str(c))}</td>' for c in cells)
        body += "</tr>"
    return f'<table style="border-collapse:collapse;line-height:1.4"><tr>{head}</tr>{body}</table>'


def log_html(text: str) -> str:
    """The last lines of one rank's log, in a box that scrolls."""
    lines = text.splitlines()
    kept = lines[-LOG_LINES:]
    if len(lines) > len(kept):
        kept.insert(0, f"... {len(lines) - len(kept)} earlier lines are in the run's folder")
    body = escape("\n".join(line[:500] for line in kept)) or "(nothing written yet)"
    # The reversed column keeps the box scrolled to its end while lines arrive.
    return (
        '<div style="height:9em;overflow:auto;display:flex;flex-direction:column-reverse;'
        'border:1px solid var(--jp-border-color2,#ccc)">'
        '<pre style="flex:none;overflow:visible;margin:0 0 auto;padding:6px;line-height:1.35;'
        'white-space:pre-wrap">'
        f"{body}</pre></div>"
    )


def count(n: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{n} {what}" if n == 1 else f"{n} {what}s"


def capital(text: str) -> str:
    """The text as a sentence begins."""
    return text[:1].upper() + text[1:]
