"""Charts as SVG, drawn by matplotlib: text stays text, and colours follow the reader's light or dark scheme.

matplotlib writes fixed colours and ids that are the same in every picture. Here it draws with placeholder colours,
which become CSS variables with a light and a dark value (STYLE), and every id gets a prefix, so that pictures may share
a page. A file for itself carries STYLE; a page that holds several states it once.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from xml.sax.saxutils import escape

from exporter.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 360, 290  # of a panel, CSS pixels: on a narrow phone its text is still about 10 pixels high
_PIXELS = 72.0  # matplotlib's points are then CSS pixels
# name: placeholder for matplotlib, light, dark. Lines differ in marker and dash too, never by colour alone.
COLOURS = {
    "ink": ("#0a0b01", "#24292f", "#e6edf3"), "note": ("#0a0b02", "#57606a", "#9198a1"),
    "grid": ("#0a0b03", "#d0d7de", "#30363d"), "mark": ("#0a0b04", "#bc4c00", "#f0883e"),
    "paper": ("#0a0b05", "#ffffff", "#0d1117"),
    "line-0": ("#0a0b10", "#0969da", "#58a6ff"), "line-1": ("#0a0b11", "#bc4c00", "#f0883e"),
    "line-2": ("#0a0b12", "#1a7f37", "#3fb950"), "line-3": ("#0a0b13", "#8250df", "#bc8cff"),
    "line-4": ("#0a0b14", "#bf3989", "#f778ba"), "line-5": ("#0a0b15", "#0e7490", "#39c5cf"),
    "line-6": ("#0a0b16", "#6e5a00", "#d4a72c")}
LINES, _MARKERS = 7, "os^Dvpx"


def _variables(scheme: int) -> str:
    return " ".join(f"--plot-{name}: {values[1 + scheme]};" for name, values in COLOURS.items())


STYLE = (f".plot {{ {_variables(0)} }}\n"
         f"@media screen and (prefers-color-scheme: dark) {{ .plot {{ {_variables(1)} }} }}\n"
         ".plot * { stroke-linejoin: round } .plot text { font-family: system-ui, sans-serif !important }")
_OWN_STYLE = (f"{STYLE}\n.plot {{ color-scheme: light dark; background: {COLOURS['paper'][1]} }}\n"
              f"@media screen and (prefers-color-scheme: dark) {{ .plot {{ background: {COLOURS['paper'][2]} }} }}")


@dataclass(frozen=True)
class Line:
    """Points (x, y) by ascending x, with `labels` beside them if given; `dashed` for what was not measured. `style`: a
    number that gives the same colour and marker wherever it comes (default: the place among the panel's lines)."""

    name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    dashed: bool = False
    style: int | None = None


class Chart(Protocol):
    """What stands in one place of a picture."""

    @property
    def title(self) -> str:
        """Its heading."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, CSS pixels."""

    def draw(self, ax: Axes) -> None:
        """Draw it."""

    def words(self) -> str:
        """What it shows, a sentence."""


@dataclass(frozen=True)
class Panel:
    """A chart of lines. `log` scales y, `log_x` x; `zero`: y starts there; `mark`: a level to compare with, dashed."""

    title: str
    lines: Sequence[Line]
    x_title: str
    y_title: str = ""
    log: bool = False
    log_x: bool = False
    zero: bool = False
    mark: float | None = None

    @property
    def size(self) -> tuple[int, int]:
        """See Chart."""
        return WIDTH, HEIGHT

    def draw(self, ax: Axes) -> None:
        """See Chart."""
        _draw(self, ax)

    def words(self) -> str:
        """See Chart: each line's first and last point."""
        lines = [f"{line.name}: from {number(points[0][1])} at {number(points[0][0])} to {number(points[-1][1])} at "
                 f"{number(points[-1][0])}" for _, line, points in _shown(self)]
        unit = f", {self.y_title}" if self.y_title else ""
        return f"{self.title}{unit}, over {self.x_title}: {'; '.join(lines) or 'no figures'}."


def svg(title: str, panels: Sequence[Chart], *, prefix: str = "plot", columns: int = 2, alone: bool = True) -> str:
    """Panels in a grid as one SVG. `alone`: a file for itself, with its own style and a heading; else a fragment for a
    page that has STYLE, as wide as its place. `prefix` must be another one for each picture of a page."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    columns = min(columns, len(panels))
    heights = [max(p.size[1] for p in panels[i:i + columns]) for i in range(0, len(panels), columns)]
    width, height = max(p.size[0] for p in panels) * columns, sum(heights) + (34 if alone else 0)
    with warnings.catch_warnings(), matplotlib.rc_context({
            "svg.fonttype": "none", "svg.hashsalt": prefix, "font.size": 11.5, "text.parse_math": False,
            **dict.fromkeys(("xtick.color", "ytick.color"), COLOURS["note"][0]),
            **dict.fromkeys(("text.color", "axes.labelcolor"), COLOURS["ink"][0]),
            **dict.fromkeys(("axes.edgecolor", "grid.color"), COLOURS["grid"][0])}):
        warnings.filterwarnings("ignore", "Glyph .* missing")  # of the font that measures; the reader's will have it
        figure = Figure(figsize=(width / _PIXELS, height / _PIXELS), dpi=_PIXELS,
                        layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        figure.patch.set_alpha(0)
        if alone:
            figure.suptitle(title, fontsize=15, fontweight="bold")
        axes = list(figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights).flat)
        for panel, ax in zip(panels, axes, strict=False):
            panel.draw(ax)
        for ax in axes[len(panels):]:
            ax.set_axis_off()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return _finished(file.getvalue(), title, panels, prefix, (width, height), alone)


def check_file(plot: Path | None) -> None:
    """Before anything is measured: the file of `--plot` can be made. InputError where it cannot."""
    if plot is None:
        return
    if plot.suffix != ".svg":
        raise InputError(f"--plot {plot}: expected a name that ends in .svg")
    if plot.exists():
        raise InputError(f"--plot {plot} exists; choose another name")
    if not plot.parent.is_dir():
        raise InputError(f"--plot {plot}: there is no folder {plot.parent}; make it first")


def _shown(panel: Panel) -> list[tuple[int, Line, list[tuple[float, float]]]]:
    """The lines that have figures, by their number, and those: finite, and above zero on a log axis."""
    kept = [(i, line, [(x, y) for x, y in line.points if math.isfinite(y) and (y > 0 or not panel.log)
                       and (x > 0 or not panel.log_x)]) for i, line in enumerate(panel.lines)]
    return [entry for entry in kept if entry[2]]


def _draw(panel: Panel, ax: Axes) -> None:
    shown = _shown(panel)
    ax.set_title(panel.title if shown else f"{panel.title}: no figures", fontsize=13, fontweight="bold", loc="left")
    if not shown:
        ax.set_axis_off()
        return
    ax.patch.set_alpha(0)
    ax.grid(True, linewidth=0.8)
    ax.tick_params(length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.set_xlabel(panel.x_title)
    ax.set_ylabel(panel.y_title)
    ax.margins(x=0.06, y=0.12)
    for i, line, points in shown:
        look = (i if line.style is None else line.style) % LINES
        ax.plot(*zip(*points, strict=True), color=COLOURS[f"line-{look}"][0], linewidth=2,
                marker=_MARKERS[look], markersize=5.5, linestyle="--" if line.dashed else "-", label=line.name,
                clip_on=False)
        _label(ax, line, points)
    _scale(panel, ax, [point for _, _, points in shown for point in points])
    if panel.mark is not None:
        ax.axhline(panel.mark, color=COLOURS["mark"][0], linestyle=(0, (4, 3)), linewidth=1.2)
    if len(shown) > 1:
        ax.legend(fontsize=10.5, frameon=False, loc="upper center", bbox_to_anchor=(0.43, -0.19), ncols=2,
                  columnspacing=1.2, handlelength=1.8)


def _scale(panel: Panel, ax: Axes, points: Sequence[tuple[float, float]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    x, y = zip(*points, strict=True)
    if panel.log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if max(y) > 30 * min(y) else (1.0, 2.0, 5.0)))
        ax.yaxis.set_minor_locator(NullLocator())
    if panel.log_x:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(set(x)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rows_label(value)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    if panel.zero:
        ax.set_ylim(bottom=0)


def _label(ax: Axes, line: Line, points: Sequence[tuple[float, float]]) -> None:
    named = dict(zip(line.points, line.labels, strict=True)) if line.labels else {}
    for point in points:
        if point in named:
            ax.annotate(named[point], point, xytext=(0, 7), textcoords="offset points", ha="center", fontsize=10,
                        color=COLOURS["note"][0])


def rows_label(count: float) -> str:
    """A context as engineers say it: 32768 is 32k."""
    return f"{count / 1024:g}k" if count >= 1024 and count % 512 == 0 else f"{count:g}"


def number(value: float) -> str:
    """A figure in as few digits as tell it."""
    if 0 < abs(value) < 1e-3:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"


def described(panels: Sequence[Chart]) -> str:
    """What the picture shows, in words."""
    return " ".join(panel.words() for panel in panels)


def _finished(drawn: str, title: str, panels: Sequence[Chart], prefix: str, size: tuple[int, int], alone: bool) -> str:
    """matplotlib's SVG with our head, colours as variables, ids of its own."""
    body = drawn[drawn.index(">", drawn.index("<svg")) + 1:]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    for name, (placeholder, light, _) in COLOURS.items():
        body = body.replace(placeholder, f"var(--plot-{name}, {light})")
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", body)
    own = f' width="{size[0]}" height="{size[1]}"' if alone else ""
    style = f"<style>\n{_OWN_STYLE}\n</style>" if alone else ""
    return (f'<svg class="plot" xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {size[0]} {size[1]}"{own} role="img" aria-labelledby="{prefix}-title {prefix}-desc">'
            f'<title id="{prefix}-title">{escape(title)}</title><desc id="{prefix}-desc">{escape(described(panels))}'
            f"</desc>{style}{_no_style(body)}")


def _no_style(body: str) -> str:
    """Without matplotlib's own style element, whose rule would reach the whole page."""
    return re.sub(r"<defs>\s*<style[^>]*>.*?</style>\s*</defs>", "", body, flags=re.DOTALL)
