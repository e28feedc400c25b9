"""What the bandwidth panel shows, as plain data: the plot, the table, and the text to copy.

Nothing here knows widgets, threads or clusters: see live.py, of which this is the sibling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from scalelab.measure import cost
from scalelab.measure.sweep import show_bytes
from scalelab.panels import live

MARKERS = ("o", "s")
BOX = (0.11, 0.68)  # of the figure's width: where the axes begin, and how wide they are
POOR = 0.15  # a fit whose median miss is larger is told to be poor
COLUMNS = ("link", "size", "time (us)", "algbw (GB/s)", "busbw (GB/s)", "of line rate", "spread",
           "wrong")  # fmt: skip


@dataclass
class Link:
    """One link on show. rate: bits/s, None where nothing limits it. result: what a Sweep has found
    so far, {} before the first row."""

    name: str
    words: str  # "1 gbit, 0 ms"
    rate: float | None = None
    result: dict = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.name}: {self.words}"

    @property
    def sentence(self) -> str:
        """How a line about it begins."""
        return f"Link {self.name} ({self.words})"

    @property
    def rows(self) -> list:
        return self.result.get("rows", [])

    @property
    def line_rate(self) -> float | None:
        """GB/s."""
        return self.rate / 8e9 if self.rate else None

    @property
    def colour(self) -> str:
        return live.COLOURS[ord(self.name) - ord("A")]

    @property
    def fitted(self) -> str:
        """alpha and beta in words, or why there are none; "" before two sizes are measured."""
        found = self.result
        if found.get("alpha_us") is None:
            return ""
        # Two points lie on any line: what they leave over says nothing of an error.
        sure = len(self.rows) > 2
        errors = [found[key] if sure else 0 for key in ("alpha_us_error", "beta_gbs_error")]
        unit, size = ("ms", 1e3) if abs(found["alpha_us"]) >= 1e3 else ("us", 1)
        alpha = f"{pair(found['alpha_us'] / size, errors[0] / size)} {unit}"
        if found["alpha_us"] <= 0:  # no time: the repeats were too uneven, or it is too small
            return f"no fit: alpha would be {alpha}, the times are too uneven"
        miss = next(iter(found["fits"].values()))["misfit"]
        missed = f"; misses by {miss:.0%}" if miss > POOR else ""
        beta = pair(found["beta_gbs"], errors[1])
        return f"fit: alpha {alpha} a message, beta {beta} GB/s{missed}"

    def curve(self, sizes: list) -> list:
        """busbw (GB/s) by the fit at each size (bytes); [] where there is no fit to draw."""
        form, fitted = next(iter(self.result.get("fits", {}).items()), (None, None))
        if form is None or fitted["alpha_us"] <= 0:
            return []
        n, op = self.result["world_size"], self.result["op"]
        alpha = fitted["alpha_us"] / 1e6 * fitted["latencies_a_message"]
        beta, factor = fitted["beta_gbs"] * 1e9, cost.bus_factor(op, n)
        return [size / cost.seconds(form, size, n, alpha, beta) / 1e9 * factor for size in sizes]

    def share(self, row: dict) -> str:
        """busbw over the line rate."""
        return f"{row['busbw'] / self.line_rate:.1%}" if self.line_rate else "-"


@dataclass
class View:
    """One moment of the panel. sizes: the bytes asked for; links: those that are measured."""

    title: str = ""
    status: str = ""
    where: str = ""
    failed: bool = False
    op: str = "all-reduce"
    sizes: list = field(default_factory=list)
    links: list = field(default_factory=list)

    @property
    def of(self) -> int:
        """Points asked for, of all links together."""
        return len(self.sizes) * len(self.links)

    @property
    def done(self) -> int:
        return sum(len(link.rows) for link in self.links)


def curve(view: View, dpi: int = 100) -> bytes:
    """The plot alone as PNG."""
    figure = Figure(figsize=(8.0, 3.9))
    axes = figure.add_axes((BOX[0], 0.30, BOX[1], 0.63))
    draw(axes, view)
    return live.png(figure, dpi)


def picture(view: View, dpi: int = 100) -> bytes:
    """The whole panel as one PNG: settings, status, plot, numbers."""
    columns = (0.04, 0.10, 0.19, 0.32, 0.47, 0.62, 0.76, 0.88)
    rows = [cells(link, row) for link in view.links for row in link.rows]
    figure, bottom, height = live.frame(view, COLUMNS, rows, columns, "rows", 3.9)
    axes = figure.add_axes((BOX[0], bottom + 1.2 / height, BOX[1], 2.45 / height))
    draw(axes, view)
    return live.png(figure, dpi)


def draw(axes, view: View) -> None:
    """busbw over size on two logarithmic axes: measured, fitted, and the rate of the line."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    handles = [entry for link in view.links for entry in draw_link(axes, view, link)]
    sizes = view.sizes or [4096, 1 << 24]
    axes.set_xlim(sizes[0] / 1.6, sizes[-1] * 1.6)
    every = math.ceil(len(sizes) / 9)  # labels further than that would touch
    ticks = sizes[::-1][::every][::-1]
    axes.set_xticks(ticks, [show_bytes(size) for size in ticks])
    axes.set_xticks([], minor=True)
    set_range(axes, view)
    draw_line_rates(axes, view)
    if not view.done:
        axes.text(0.5, 0.4, "nothing measured yet", transform=axes.transAxes, ha="center",
                  color="0.45", size=11)  # fmt: skip
    axes.set_xlabel(f"size of one {view.op} (bytes; 1K = 1024)")
    axes.set_ylabel("busbw (GB/s of 1e9 bytes)")
    if any(row["spread"] > 0.03 for link in view.links for row in link.rows):
        axes.set_title("bars: spread of the repeats, quartile to quartile", loc="right",
                       fontsize=9, color="0.35")  # fmt: skip
    live.plain(axes)
    if handles:
        axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(-0.12, -0.24), frameon=False,
                    fontsize=9, ncols=1, borderaxespad=0, labelspacing=0.35)  # fmt: skip


def draw_link(axes, view: View, link: Link) -> list:
    """One link's points and curve. Returns its entry in the legend."""
    rows, colour = link.rows, link.colour
    marker = MARKERS[(ord(link.name) - ord("A")) % len(MARKERS)]
    x, y = [row["bytes"] for row in rows], [row["busbw"] for row in rows]
    ends = [ends_of(row) for row in rows]
    if rows:
        low = [b - low for b, (low, _) in zip(y, ends)]
        high = [high - b for b, (_, high) in zip(y, ends)]
        axes.errorbar(x, y, yerr=[low, high], fmt=marker, color=colour, markersize=5, capsize=3,
                      elinewidth=1.2, zorder=3)  # fmt: skip
    wrong = [(row["bytes"], row["busbw"]) for row in rows if row["wrong"]]
    if wrong:
        axes.plot(*zip(*wrong), "x", color="#B00020", markersize=11, markeredgewidth=2, zorder=4)
    first, last = math.log(view.sizes[0]), math.log(view.sizes[-1])
    fine = [math.exp(first + (last - first) * i / 80) for i in range(81)]
    fitted = link.curve(fine)
    if fitted:
        axes.plot(fine, fitted, color=colour, linewidth=1.3, alpha=0.8)
    text = f"{link.label}; {link.fitted}" if link.fitted else link.label
    if not rows:
        text += " (not measured yet)"
    return [Line2D([], [], color=colour, marker=marker, markersize=5,
                   linestyle="-" if fitted else "", label=text)]  # fmt: skip


def ends_of(row: dict) -> tuple:
    """The ends of a point's bar, in GB/s. The spread is of the times, quartile to quartile; half
    of it is taken to lie on either side."""
    return row["busbw"] / (1 + row["spread"] / 2), row["busbw"] * (1 + row["spread"] / 2)


def set_range(axes, view: View) -> None:
    """Room for all that is drawn; labels enough to read a value where the range is small."""
    rows = [row for link in view.links for row in link.rows]
    values = [end for row in rows for end in ends_of(row)]
    rates = [link.line_rate for link in view.links if link.line_rate]
    low = min(values, default=min(rates, default=1) / 300)
    high = max(values + rates, default=1)
    low, high = min(low / 1.4, high / 20), high * 1.6
    axes.set_ylim(low, high)
    axes.tick_params(labelleft=bool(values or rates))
    steps = (1, 2, 5) if high / low < 300 else (1, 3) if high / low < 1e4 else (1,)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**d for d in decades for step in steps if low <= step * 10.0**d <= high]
    axes.set_yticks(ticks, [f"{tick:.10g}" if tick >= 1e-4 else f"{tick:.0e}" for tick in ticks])
    axes.set_yticks([], minor=True)


def draw_line_rates(axes, view: View) -> None:
    """Dashed, and named in the margin on the right, where no point can lie under the words."""
    by_rate: dict = {}
    for link in view.links:
        if link.line_rate:
            by_rate.setdefault(link.rate, []).append(link)
    rates = sorted(by_rate)
    low, high = (math.log(edge) for edge in axes.get_ylim())
    places = [(math.log(rate / 8e9) - low) / (high - low) for rate in rates]
    if len(places) == 2:  # the words of two rates that are nearly the same must not touch
        inches = axes.get_position().height * axes.figure.get_size_inches()[1]
        apart = max(0.36 / inches - (places[1] - places[0]), 0)
        up = min(apart / 2, max(1 - places[1], 0))
        places = [places[0] - (apart - up), places[1] + up]
    for rate, y in zip(rates, places):
        links = by_rate[rate]
        colour = links[0].colour if len(links) == 1 else "0.25"
        axes.axhline(rate / 8e9, color=colour, linestyle="--", linewidth=1.1)
        whose = " and ".join(link.name for link in links)
        axes.text(1.015, y, f"line rate {whose}: {show_rate(rate)}/s\n= {rate / 8e9:.4g} GB/s",
                  transform=axes.transAxes, color=colour, fontsize=8.5, va="center")  # fmt: skip
    free = [link.name for link in view.links if not link.rate]
    if free and by_rate:
        axes.text(1.015, 0.02, f"{' and '.join(free)}: no line rate", transform=axes.transAxes,
                  color="0.35", fontsize=8.5, va="bottom")  # fmt: skip


def cells(link: Link, row: dict) -> tuple:
    """One line of the table, as words."""
    return (link.name, show_bytes(row["bytes"]), f"{row['time_us']:,.0f}", f"{row['algbw']:.4g}",
            f"{row['busbw']:.4g}", link.share(row), f"{row['spread']:.1%}",
            str(row["wrong"]))  # fmt: skip


def table_html(view: View) -> str:
    """The numbers, and what was fitted, as HTML."""
    rows = [cells(link, row) for link in view.links for row in link.rows]
    return live.rows_html(COLUMNS, rows) if rows else ""


def tsv(view: View) -> str:
    """The numbers with tabs between them, as spreadsheets take them: measured, then fitted."""
    keys = ("bytes", "time_us", "algbw", "busbw", "spread", "wrong", "wire_bytes", "theory_bytes")
    lines = ["link\tsetting\tline_rate_GBps\tbytes\ttime_us\talgbw_GBps\tbusbw_GBps\tspread\twrong"
             "\twire_bytes\ttheory_bytes"]  # fmt: skip
    for link in view.links:
        start = [link.name, link.words, plain_number(link.line_rate)]
        for row in link.rows:
            lines.append("\t".join(start + [plain_number(row.get(key)) for key in keys]))
    if len(lines) == 1:
        return ""
    found = ("alpha_us", "alpha_us_error", "beta_gbs", "beta_gbs_error")
    fitted = [link for link in view.links if link.fitted]
    if fitted:
        lines += ["", "link\tform\talpha_us\talpha_us_error\tbeta_GBps\tbeta_GBps_error"]
    for link in fitted:
        numbers = [plain_number(link.result[key]) for key in found]
        lines.append("\t".join([link.name, next(iter(link.result["fits"])), *numbers]))
    return "\n".join(lines) + "\n"


def plain_number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def show_rate(bits: float | None) -> str:
    """1e9 as "1 gbit"."""
    if not bits:
        return "unlimited"
    for unit, size in (("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)):
        if bits >= size:
            return f"{bits / size:.6g} {unit}"
    return f"{bits:g} bit"


def show_delay(seconds: float) -> str:
    """0.005 as "5 ms"."""
    if 0 < seconds < 1e-3:
        return f"{seconds * 1e6:.6g} us"
    return f"{seconds * 1e3:.6g} ms"


def pair(value: float, error: float) -> str:
    """`76 ± 12`: no more digits than the error leaves sure; three where there is no error."""
    if not 0 < error < float("inf"):
        return f"{value:.3g}"
    digits = max(0, -math.floor(math.log10(error)) + (1 if f"{error:e}"[0] == "1" else 0))
    return f"{value:.{digits}f} ± {error:.{digits}f}"
