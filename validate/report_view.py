"""What a page is made of: tables, facts, charts and notes, every figure read from the report's data by its path.

A cell keeps the path of its figure and how it is written, so that the page can be held against the data that it embeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

DASH = "–"


@dataclass(frozen=True)
class Cell:
    """One figure or word. `path` into the data and `form` say where a figure comes from; `state` colours and marks it;
    `share` draws a bar behind it, 0 to 1."""

    text: str
    path: str = ""
    form: str = ""
    kind: str = "text"
    state: str = ""
    share: float | None = None


@dataclass(frozen=True)
class Column:
    """A heading, with its unit; figures are right-aligned."""

    title: str
    unit: str = ""
    figures: bool = False


@dataclass(frozen=True)
class Table:
    """Columns and rows under a caption. On a narrow screen rows become cards, or scroll where they are `wide`."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    wide: bool = False
    kind: str = "table"


@dataclass(frozen=True)
class Facts:
    """Names and values side by side; `long` ones below one another."""

    caption: str
    items: Sequence[tuple[str, Cell]]
    long: bool = False
    kind: str = "facts"


@dataclass(frozen=True)
class Notes:
    """Remarks; `lines` of commands are written as such where `code`."""

    caption: str
    lines: Sequence[str]
    code: bool = False
    kind: str = "notes"


@dataclass(frozen=True)
class Charts:
    """Pictures, SVG each, with a caption."""

    caption: str
    pictures: Sequence[str]
    kind: str = "charts"


@dataclass(frozen=True)
class Fold:
    """Blocks that open on a click."""

    summary: str
    blocks: Sequence[Any]
    kind: str = "fold"


Block = Table | Facts | Notes | Charts | Fold


def written(value: Any, form: str) -> str:
    """A figure as the page writes it; `form` is a name, after a colon the decimals. None, and what JSON has no word
    for, is a dash."""
    name, _, decimals = form.partition(":")
    if value is None:
        return DASH
    if name == "mb":
        return f"{value / 1e6:,.{decimals}f}"
    if name == "kb":
        return f"{value / 1e3:,.{decimals}f}"
    if name == "exp":
        return f"{value:.1e}"
    if name == "percent":
        return f"{100 * value:.{decimals or 0}f}\u00a0%"
    if name == "times":
        return f"{value:,.{decimals or 1}f}\u00a0×"
    if name == "fixed":
        return f"{value:,.{decimals}f}"
    if name == "one-minus":
        return f"{1 - value:.0e}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


@dataclass
class Reader:
    """Reads the report's data by path: `sections.parity.data.groups.3.rel`."""

    data: dict[str, Any]
    _units: dict[str, str] = field(default_factory=lambda: {"MB": "mb:1", "rel": "exp", "bytes": "int"})

    def at(self, path: str) -> Any:
        """What lies there; None where nothing does."""
        found: Any = self.data
        for step in path.split("."):
            found = found[int(step)] if isinstance(found, list) else (found or {}).get(step)
        return found

    def figure(self, path: str, form: str, *, state: str = "", share: float | None = None) -> Cell:
        """A figure's cell."""
        return Cell(written(self.at(path), form), path, form, "figure", state, share)

    def unit(self, path: str, unit: str) -> Cell:
        """A figure in one of the units of the head's figures."""
        value = self.at(path)
        form = _decimals([value]) if unit == "MB" else self._units[unit]
        return self.figure(path, form)

    def megabytes(self, paths: Sequence[str]) -> list[Cell]:
        """A column of bytes in MB, all with the same decimals."""
        form = _decimals([self.at(path) for path in paths])
        return [self.figure(path, form) for path in paths]


def _decimals(values: Sequence[Any]) -> str:
    most = max((abs(v) for v in values if v is not None), default=0) / 1e6
    return f"mb:{1 if most >= 10 else 2 if most >= 1 else 4}"


def word(text: Any) -> Cell:
    """A cell of words."""
    return Cell(DASH if text in (None, "") else str(text))


def code(text: Any) -> Cell:
    """A cell of a name as it is typed."""
    return Cell(str(text), kind="code")


def state(passed: bool | None, counted: bool = True) -> Cell:
    """A verdict, in words and by a mark, never by colour alone."""
    if passed is None:
        return Cell("not run", kind="state", state="none")
    if not counted:
        return Cell("not counted", kind="state", state="none")
    return Cell("pass" if passed else "FAIL", kind="state", state="pass" if passed else "fail")
