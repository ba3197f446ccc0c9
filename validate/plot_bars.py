"""Horizontal stacked bars for validate.plot: a bar a case, in pieces of the same names and order in all of them.

Pieces follow one another as the legend has them, and those with room for it carry their name and value, so that no
piece is told by its colour alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from validate.plot import COLOURS, LINES, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BAR, FRAME, LEGEND = 46, 124, 36  # CSS pixels of height: of a bar, of what stands around them, above the legend
LETTER, MARGIN = 5.8, 3.0  # pixels that a letter takes, and that stay free around a word


@dataclass(frozen=True)
class Bar:
    """One bar: its label, and the length of each piece."""

    label: str
    pieces: Sequence[float]


@dataclass(frozen=True)
class Bars:
    """One chart of bars, the first on top. `names`: of the pieces; the last is drawn in grey where `rest` says so.
    `looks`: a number for each that gives the same colour in every chart (default: its place among them)."""

    title: str
    bars: Sequence[Bar]
    names: Sequence[str]
    x_title: str
    rest: bool = True
    looks: Sequence[int] | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, CSS pixels."""
        return 2 * WIDTH, FRAME + BAR * len(self.bars)

    def draw(self, ax: Axes) -> None:
        """The bars on `ax`."""
        from matplotlib.transforms import ScaledTranslation

        ax.set_title(self.title, fontsize=13, fontweight="bold", loc="left")
        ax.patch.set_alpha(0)
        ax.grid(True, axis="x", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(length=0)
        for side in ("top", "right", "left"):
            ax.spines[side].set_visible(False)
        longest = max(sum(bar.pieces) for bar in self.bars)
        per_pixel = longest / (0.83 * self.size[0])  # of the axis; labels and margins have the rest
        places = range(len(self.bars))
        starts = [[0.0, *accumulate(bar.pieces)] for bar in self.bars]
        for i, name in enumerate(self.names):
            number = i if self.looks is None else self.looks[i]
            look = "note" if self.rest and i == len(self.names) - 1 else f"line-{number % LINES}"
            ax.barh(places, [bar.pieces[i] for bar in self.bars], left=[s[i] for s in starts], height=0.72,
                    color=COLOURS[look][0], edgecolor=COLOURS["paper"][0], linewidth=1, label=name)
            for y, bar in enumerate(self.bars):
                if said := _said(name, bar.pieces[i], per_pixel):
                    ax.text(starts[y][i] + bar.pieces[i] / 2, y, said, ha="center", va="center", fontsize=10,
                            color=COLOURS["paper"][0], linespacing=1.15)
        for y, bar in enumerate(self.bars):
            ax.text(sum(bar.pieces) + 4 * per_pixel, y, _short(sum(bar.pieces)), va="center", fontsize=10.5)
        ax.set_yticks(list(places), [bar.label for bar in self.bars])
        ax.invert_yaxis()
        ax.set_xlim(0, longest * 1.08)
        ax.set_xlabel(self.x_title)
        figure = ax.get_figure(root=True)
        assert figure is not None
        below = ax.transAxes + ScaledTranslation(0, -LEGEND / 72, figure.dpi_scale_trans)
        ax.legend(fontsize=10.5, frameon=False, loc="upper center", ncols=4, columnspacing=1.2, handlelength=1.2,
                  bbox_to_anchor=(0.46, 0), bbox_transform=below)

    def words(self) -> str:
        """What the chart shows."""
        told = []
        for bar in self.bars:
            pieces = ", ".join(f"{name} {_short(value)}" for name, value in zip(self.names, bar.pieces, strict=True)
                               if value)
            told.append(f"{bar.label}: {_short(sum(bar.pieces))}, of it {pieces}")
        return f"{self.title}, {self.x_title}: {'; '.join(told) or 'no figures'}."


def _short(value: float) -> str:
    """Three digits."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _said(name: str, value: float, per_pixel: float) -> str:
    """Of a piece its name and value, its value alone, or nothing, as it has room."""
    said, room = _short(value), value / per_pixel - MARGIN
    if room < LETTER * len(said):
        return ""
    names = (name, name.split()[-1]) if name.count(" ") == 1 else (name,)  # "attention projections" are "projections"
    return next((f"{short}\n{said}" for short in names if room >= LETTER * len(short)), said)
