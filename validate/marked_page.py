"""Tables of measured figures in a page of text: what stands between two marker lines is made anew by a command.

`<!-- NAME:begin -->` and `<!-- NAME:end -->`, each on a line of its own; figures are never typed by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from exporter.errors import InputError
from exporter.output import write_file


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def check_page(page: Path, names: Collection[str]) -> str:
    """The page's text; InputError, before anything is measured, where it has no place for one of the tables."""
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"--update {page}: no such file; expected a page with the table's markers") from None
    except UnicodeDecodeError:
        raise InputError(f"--update {page}: not UTF-8 text") from None
    for name in names:
        begin, end = _markers(name)
        if not 0 <= text.find(begin) < text.find(end):
            raise InputError(f"--update {page}: markers {begin} and {end} not found in this order; put them on "
                             "lines of their own where the table shall be")
    return text


def update(page: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between the markers of each name; the page changes at once or not at all."""
    text = check_page(page, tables)
    for name, table in tables.items():
        begin, end = _markers(name)
        head, rest = text.split(begin, 1)
        text = f"{head}{begin}\n{table}{end}{rest.split(end, 1)[1]}"
    write_file(page, text.encode())


def markdown(columns: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """A table; the first `left` columns are text, the others figures."""
    lines = [columns, ["---" if i < left else "---:" for i in range(len(columns))], *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)
