"""Small line charts side by side as one SVG: text that any browser shows, in the reader's light or dark scheme.

Written out: a plotting library would be a dependency for some polylines, and could not follow the reader's scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 300, 226  # of a panel, pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 52, 40  # margins of a panel
_STYLE = """
svg { color-scheme: light dark; background: #ffffff; font: 11px system-ui, sans-serif }
text { fill: #24292f } .title { font-size: 13px; font-weight: 600 } .head { font-size: 15px; font-weight: 600 }
.grid { stroke: #d0d7de } .line { fill: none; stroke: #0969da; stroke-width: 2 } .dot { fill: #0969da }
.mark { stroke: #bc4c00; stroke-dasharray: 4 3 } .note { fill: #57606a }
@media (prefers-color-scheme: dark) {
  svg { background: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .line { stroke: #58a6ff }
  .dot { fill: #58a6ff } .mark { stroke: #f0883e } .note { fill: #8b949e }
}"""


@dataclass(frozen=True)
class Panel:
    """One chart: `values` over the shared x; `log` scales them; `zero`: their axis starts there; `mark` is a level to
    compare with, dashed."""

    title: str
    values: Sequence[float]
    log: bool = False
    zero: bool = False
    mark: float | None = None


def _ticks(low: float, high: float, log: bool) -> list[float]:
    """Round numbers from low to high, both ends covered: about four, or powers of ten."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        powers = range(first, max(last, first + 1) + 1)
        return [10.0**p for p in powers if (p - first) % -(-len(powers) // 6) == 0 or p == powers[-1]]
    span = (high - low) or abs(high) or 1.0
    rough = span / 4
    step = next(m * 10.0 ** math.floor(math.log10(rough)) for m in (1, 2, 5, 10)
                if m * 10.0 ** math.floor(math.log10(rough)) >= rough)
    first = math.floor(low / step)
    return [step * i for i in range(first, math.ceil((high or step) / step) + 1)]


def _number(value: float) -> str:
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e") if 0 < abs(value) < 1e-3 else f"{value:g}"


def _panel(p: Panel, x: Sequence[float], labels: Sequence[str], x_title: str) -> str:
    shown = [v for v in p.values if math.isfinite(v) and (v > 0 or not p.log)]
    if not shown:
        return f'<text class="title" x="{_LEFT}" y="{_TOP - 24}">{escape(p.title)}: no figures</text>'
    levels = [*shown, *([] if p.mark is None else [p.mark]), *([0.0] if p.zero else [])]
    ticks = _ticks(min(levels), max(levels), p.log)
    scale = math.log10 if p.log else float
    low, high, left, right = scale(ticks[0]), scale(ticks[-1]), 0.0, max(x) * 1.05

    def across(value: float) -> float:
        return _LEFT + (value - left) / (right - left) * (WIDTH - _LEFT - _RIGHT)

    def up(value: float) -> float:
        return HEIGHT - _BOTTOM - (scale(value) - low) / ((high - low) or 1) * (HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text class="title" x="{_LEFT}" y="{_TOP - 24}">{escape(p.title)}</text>']
    for t in ticks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(t):.1f}" y2="{up(t):.1f}"/>'
                     f'<text x="{_LEFT - 6}" y="{up(t) + 4:.1f}" text-anchor="end">{_number(t)}</text>')
    for t in _ticks(0, max(x), False)[:-1]:
        parts.append(f'<text x="{across(t):.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{_number(t)}</text>')
    parts.append(f'<text class="note" x="{(WIDTH + _LEFT - _RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
                 f"{escape(x_title)}</text>")
    if p.mark is not None:
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{up(p.mark):.1f}" '
                     f'y2="{up(p.mark):.1f}"/>')
    at = [(across(a), up(v), label) for a, v, label in zip(x, p.values, labels, strict=True)
          if math.isfinite(v) and (v > 0 or not p.log)]
    parts.append('<polyline class="line" points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in at) + '"/>')
    last = (-float(WIDTH), 0.0)
    for a, b, label in at:
        parts.append(f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="3"/>')
        if a - last[0] > 6 * len(label) + 4 or abs(b - last[1]) > 12:  # clear of the label before
            parts.append(f'<text class="note" x="{a:.1f}" y="{b - 7:.1f}" text-anchor="middle">{escape(label)}</text>')
            last = (a, b)
    return "".join(parts)


def svg(title: str, x: Sequence[float], x_title: str, labels: Sequence[str], panels: Sequence[Panel]) -> str:
    """Panels over one x, every point with its label where there is room."""
    width, height = WIDTH * len(panels), HEIGHT + 24
    body = "".join(f'<g transform="translate({WIDTH * i},24)">{_panel(p, x, labels, x_title)}</g>'
                   for i, p in enumerate(panels))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img"><title>{escape(title)}</title><style>{_STYLE}\n</style>'
            f'<text class="head" x="14" y="24">{escape(title)}</text>{body}</svg>\n')
