"""Pictures of small tensors on ranks, coloured by whose numbers are in them.

The numbers are those of notebooks/scripts/collectives.py: rank r's are 1 to 9 times 10**r, so the
decimal places of a sum that are not 0 say which ranks are in it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#8ecae6", "#ffd166", "#95d5b2", "#f4a6c0")  # of ranks 0 to 3; black text reads on all
SOME, ALL, EMPTY = "#c9c9c9", "#3d405b", "#ffffff"


def owners(number: int) -> list[int]:
    """The ranks whose numbers are in a sum: 1010 holds those of ranks 1 and 3."""
    return [place for place, digit in enumerate(reversed(str(int(number)))) if digit != "0"]


def draw(rows: Sequence[tuple[str, Sequence[Sequence[Sequence[int]]]]], titles: Sequence[str],
         width: float = 9.0):  # fmt: skip
    """One row of panels for each (name, states): states[k][r] is what rank r held in panel k.

    titles: of the panels. Every panel has one line a rank. Returns a Picture, which a notebook
    shows as the last value of a cell.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    world_size = len(rows[0][1][0])
    height = len(rows) * (0.36 * world_size + 0.35) + 0.9
    figure = Figure(figsize=(width, height), layout="constrained", dpi=100)
    axes = figure.subplots(len(rows), len(titles), squeeze=False)
    for number, (line, (name, states)) in enumerate(zip(axes, rows)):
        for column, (axis, title, held) in enumerate(zip(line, titles, states)):
            _panel(axis, held, world_size)
            if number == 0:
                axis.set_title(title, fontsize=10)
            if column == 0:
                axis.set_yticks([r + 0.5 for r in range(world_size)])
                axis.set_yticklabels([f"rank {r}" for r in range(world_size)], fontsize=9)
                axis.tick_params(length=0)
                axis.set_ylabel(name, fontsize=10, fontweight="bold")
    patches = [Patch(fc=COLORS[r % 4], label=f"from rank {r}") for r in range(world_size)]
    if world_size > 2:
        patches.append(Patch(fc=SOME, label="sum of some ranks"))
    patches.append(Patch(fc=ALL, label="sum of all ranks"))
    figure.legend(handles=patches, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return Picture(png.getvalue(), _words(rows, titles))


@dataclass(frozen=True)
class Picture:
    """A PNG, and the same in words for where pictures are not shown."""

    png: bytes
    words: str

    def __repr__(self) -> str:
        return self.words

    def _repr_mimebundle_(self, include=None, exclude=None):
        return {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.words}


def _words(rows, titles) -> str:
    lines = []
    for name, states in rows:
        for rank, moments in enumerate(zip(*states)):
            held = [" ".join(map(str, numbers)) or "-" for numbers in moments]
            text = "; ".join(map(": ".join, zip(titles, held)))
            lines.append(f"{name}, rank {rank}: {text}")
    return "\n".join(lines)


def _panel(axis, held, world_size: int) -> None:
    for rank, numbers in enumerate(held):
        for i, number in enumerate(numbers):
            who = owners(number)
            color = EMPTY if not who else COLORS[who[0] % 4] if len(who) == 1 else (
                ALL if len(who) == world_size else SOME)  # fmt: skip
            axis.add_patch(_box(i, rank, color))
            axis.text(i + 0.5, rank + 0.5, str(number), ha="center", va="center", fontsize=9,
                      color="white" if color == ALL else "black")  # fmt: skip
    axis.set_xlim(-0.05, world_size + 0.05)
    axis.set_ylim(world_size + 0.05, -0.05)
    axis.set_xticks([])
    axis.set_yticks([])
    for side in axis.spines.values():
        side.set_visible(False)


def _box(x: float, y: float, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle((x + 0.03, y + 0.06), 0.94, 0.88, fc=color, ec="#555555", lw=0.7)
