"""The panel of pits as PNG: the cluster alone, and all of the panel. See pits_view.py."""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyBboxPatch, Rectangle

from scalelab.panels import live
from scalelab.panels.bandwidth_view import show_rate
from scalelab.panels.pits_view import (
    BROKEN,
    GREY,
    INK,
    WELL,
    Host,
    Screen,
    View,
    state_colour,
    verdict_lines,
)  # fmt: skip

LAST_LINES = 12  # of a node's output
WIDTH, HEIGHT = 8.0, 3.7  # of the cluster's picture, inches
ROW = 0.2  # inches from one line of words to the next
CHARS = 98  # of the words below and above, which fit the width


# The cluster


def cluster(view: View, dpi: int = 100) -> bytes:
    """The cluster alone as PNG."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    draw(figure.add_axes((0, 0, 1, 1)), view)
    return live.png(figure, dpi)


def draw(axes, view: View) -> None:
    """Switch above, hosts below it, disks at the bottom. The axes are in inches."""
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0, HEIGHT)
    axes.set_axis_off()
    if not view.hosts:
        return
    wide = min(3.1, (WIDTH - 0.2) / len(view.hosts) - 0.15)
    step = (WIDTH - wide - 0.3) / max(len(view.hosts) - 1, 1)
    lefts = [0.15 + step * i for i in range(len(view.hosts))]
    if len(lefts) == 1:
        lefts = [(WIDTH - wide) / 2]
    if view.kind == "virtual":
        draw_switch(axes, view)
    for index, (host, left) in enumerate(zip(view.hosts, lefts)):
        draw_host(axes, view, index, host, left, wide)
        if view.kind == "virtual":
            draw_link(axes, view, index, host, left + wide / 2)
            draw_disks(axes, view, index, left, wide)
    if view.kind == "virtual":
        words = view.hit("shared disk")
        draw_disk(axes, WIDTH / 2, 0.42, 1.25, 0.45, "shared disk", words)
        below = words or "data/ and checkpoints/"
        axes.text(WIDTH / 2, 0.12, mark(words, below), ha="center", va="center", size=8.5,
                  color=BROKEN if words else GREY)  # fmt: skip


def mark(broken: str, words: str) -> str:
    """Colour is not all that tells what is broken."""
    return f"✗ {words}" if broken else words


def draw_switch(axes, view: View) -> None:
    words = view.hit("switch")
    colour = BROKEN if words else INK
    x = WIDTH / 2
    axes.add_patch(box(x - 1.75, 3.25, 3.5, 0.36, colour, "#F7E9EB" if words else "#EEF2F6"))
    text = mark(words, words or "switch")
    axes.text(x, 3.43, text, ha="center", va="center", size=9, color=colour)


def draw_link(axes, view: View, index: int, host: Host, x: float) -> None:
    words = view.hit("link", index)
    colour = BROKEN if words else INK
    end = min(max(x, WIDTH / 2 - 1.6), WIDTH / 2 + 1.6)
    if view.hit("firewall", index):
        axes.add_patch(Rectangle((x - 0.3, 2.62), 0.6, 0.13, fc="#F7E9EB", ec=BROKEN, hatch="++"))
    axes.plot([x, end], [2.6, 3.25], color=colour, lw=2.2 if words else 1.4,
              ls="--" if words else "-", zorder=0)  # fmt: skip
    rate = f"{show_rate(host.rate)}/s" if host.rate else "no rate limit"
    text = f"{rate}, MTU {host.mtu}" + (f"\n{mark(words, words)}" if words else "")
    right = x > WIDTH / 2
    axes.text(x + (0.1 if right else -0.1), 2.92, text, ha="left" if right else "right",
              va="center", size=8.5, color=colour)  # fmt: skip


def draw_host(axes, view: View, index: int, host: Host, left: float, wide: float) -> None:
    rows = host_rows(view, index, host)
    hurt = any(broken for _, broken in rows)
    axes.add_patch(box(left, 1.3, wide, 1.3, BROKEN if hurt else INK, "white"))
    axes.text(left + 0.12, 2.42, host.name, weight="bold", size=10.5, va="center")
    screen = next((s for s in view.screens if s.name == host.name), None)
    if screen and screen.state:
        axes.text(left + wide - 0.12, 2.42, screen.state, ha="right", va="center", size=8.5,
                  color=state_colour(screen))  # fmt: skip
    chars = max(int(wide * 14.5), 12)
    lines = [
        (part, broken)
        for text, broken in rows
        for part in textwrap.wrap(mark(broken, text), chars, subsequent_indent="   ")
    ]
    for i, (text, broken) in enumerate(lines[:5]):
        axes.text(left + 0.12, 2.2 - ROW * i, text, size=8.5, va="center",
                  color=BROKEN if broken else GREY,
                  weight="bold" if broken else "normal")  # fmt: skip


def host_rows(view: View, index: int, host: Host) -> list[tuple[str, str]]:
    """(text, what is broken in it or "") of a host's box."""
    if view.kind != "virtual":
        well = [("nic", "this machine, on its loopback address")]
    elif not host.addr:
        well = [("nic", f"{host.nic}, not started yet")]
    else:
        well = [("nic", f"{host.nic} {host.addr}"), ("name", f"own name means {host.addr}"),
                ("firewall", "no firewall")]  # fmt: skip
    rows = []
    for part, text in well:
        words = view.hit(part, index)
        if part == "nic" and words:
            rows.append((text, ""))
        rows.append((words or text, words))
    for part in ("settings", "memory", "port", "line", "script"):
        words = view.hit(part, index)
        if words:
            rows.append((words, words))
    return rows


def draw_disks(axes, view: View, index: int, left: float, wide: float) -> None:
    """A host's own disk on its outer side, and its way to the shared one."""
    middle = left + wide / 2
    right = middle > WIDTH / 2
    own, cut = view.hit("own disk", index), view.hit("join", index)
    x = left + wide - 0.35 if right else left + 0.35
    axes.plot([x, x], [0.85, 1.3], color=BROKEN if own else "0.6", lw=1.2, zorder=0)
    draw_disk(axes, x, 0.5, 0.5, 0.4, "", own)
    axes.text(x, 0.32, "own disk", ha="center", va="center", size=8,
              color=BROKEN if own else GREY)  # fmt: skip
    inner = left + 0.5 if right else left + wide - 0.5
    edge = WIDTH / 2 + (0.63 if right else -0.63)
    lost = own or cut
    axes.plot([inner, edge], [1.3, 0.6], color=BROKEN if lost else INK, lw=1.4,
              ls=":" if lost else "-", zorder=0)  # fmt: skip
    if lost:
        text = "\n".join(textwrap.wrap(mark(lost, lost), 22))
        axes.text(x + (-0.4 if right else 0.4), 0.3, text, ha="right" if right else "left",
                  va="center", size=8.5, color=BROKEN, weight="bold")  # fmt: skip


def draw_disk(axes, x: float, y: float, wide: float, high: float, text: str, broken: str) -> None:
    colour, fill = (BROKEN, "#F7E9EB") if broken else (INK, "#EEF2F6")
    flat = wide / 5
    axes.add_patch(Ellipse((x, y), wide, flat, fc=fill, ec=colour, lw=1.2))
    axes.add_patch(Rectangle((x - wide / 2, y), wide, high, fc=fill, ec="none"))
    for side in (x - wide / 2, x + wide / 2):
        axes.plot([side, side], [y, y + high], color=colour, lw=1.2)
    axes.add_patch(Ellipse((x, y + high), wide, flat, fc=fill, ec=colour, lw=1.2))
    if text:
        axes.text(x, y + high / 2 - 0.06, text, ha="center", va="center", size=9, color=colour)


def box(x: float, y: float, wide: float, high: float, edge: str, face: str) -> FancyBboxPatch:
    return FancyBboxPatch((x, y), wide, high, boxstyle="round,pad=0,rounding_size=0.08",
                          ec=edge, fc=face, lw=1.3)  # fmt: skip


# The whole panel as one picture


def picture(view: View, dpi: int = 100) -> bytes:
    """The panel as PNG: title, status, cluster, the nodes' screens, the doctor's verdict."""
    above = [(view.title, "bold", "black")]
    above += [
        (line, "normal", BROKEN if view.failed else "black") for line in live.wrap(view.status)
    ]
    above += [(line, "normal", "0.35") for line in live.wrap(view.where)]
    screens = [screen_lines(s, len(view.screens)) for s in view.screens]
    rows = max(map(len, screens), default=0)
    below = [(line, BROKEN if not view.passed else WELL) for line in live.wrap(view.symptom, CHARS)]
    below += [
        (line, colour) for text, colour in verdict_lines(view) for line in live.wrap(text, CHARS)
    ]
    top, middle = ROW * (len(above) + 1), 0.16 * (rows + 1) * bool(rows)
    bottom = ROW * (len(below) + 0.8)
    height = top + HEIGHT + middle + bottom
    figure = Figure(figsize=(WIDTH, height))
    for i, (text, weight, colour) in enumerate(above):
        figure.text(0.02, 1 - ROW * (i + 0.5) / height, text, weight=weight, color=colour,
                    size=10, va="top")  # fmt: skip
    draw(figure.add_axes((0, (middle + bottom) / height, 1, HEIGHT / height)), view)
    for column, lines in enumerate(screens):
        for i, (text, colour) in enumerate(lines):
            figure.text(0.02 + column * 0.97 / len(screens),
                        (bottom + middle - 0.16 * (i + 1)) / height, text, size=6.6,
                        family="monospace", color=colour)  # fmt: skip
    for i, (text, colour) in enumerate(below):
        figure.text(0.02, (bottom - ROW * (i + 0.9)) / height, text, size=10, color=colour)
    return live.png(figure, dpi)


def screen_lines(screen: Screen, of: int) -> list[tuple[str, str]]:
    """A node's screen as lines that fit its column, each with its colour."""
    chars = max(int(158 / max(of, 1)) - 3, 20)
    head = f"{screen.name}: {screen.state}{screen.clock}"
    lines = [(head, state_colour(screen))] if screen.state else []
    if screen.line:
        typed = textwrap.wrap(f"{screen.name}$ {screen.line}", chars, break_on_hyphens=False)
        lines += [(text, "black") for text in typed]
    said = [f"{at:5.1f} s  {text}" for at, text in screen.said[-LAST_LINES:]]
    return lines + [(text.replace("\t", " ")[:chars], "0.3") for text in said]
