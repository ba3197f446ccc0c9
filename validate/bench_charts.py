"""The benchmark's charts, from a run's JSON: time over context and over the floor, tokens per second of a prompt, and
where a step's time goes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from validate import profile_tables
from validate.plot import Chart, Line, Panel, svg

FLOOR = "the floor"
COLUMNS = {"profile": 1}  # charts side by side, where not 2
CODES = ("int8", "int4", "q8_0", "q4_0")  # weights as codes have a chart of their own


def panels(data: dict[str, Any], suite: str) -> Sequence[Chart]:
    """The charts of one suite; none where it has nothing over a context."""
    return profile_tables.bars(data) if suite == "profile" else _lines_of(data, suite)


def _lines_of(data: dict[str, Any], suite: str) -> list[Panel]:
    rows = [r for r in data["rows"] if r["suite"] == suite and not r.get("lengths")]
    if suite not in ("layer", "model", "prefill") or not rows:
        return []
    rows = rows if suite == "layer" else _best(rows)
    if suite == "prefill":
        return [Panel(title, _lines(rows, lambda r, key=key: (r["context"] + r["tokens"], r[key])), "up to token", unit,
                      log=True, log_x=True, mark=mark)
                for title, key, unit, mark in (("Prefill", "tokens_per_s", "tokens/s", None),
                                               ("Over the floor", "ratio_to_floor", "times the floor", 1.0))]
    found = []
    for batch, coded in sorted({(r["batch"], _coded(r)) for r in rows}):
        some = [r for r in rows if (r["batch"], _coded(r)) == (batch, coded)]
        first = some[0]["subject"]  # ours: others have floors of their own where their dtypes differ
        floor = sorted({(r["context"], r["floor_ms"]) for r in some if r["subject"] == first})
        of = f", batch {batch}{', 8 and 4 bits' if coded else ''}"
        found.append(Panel(f"A decode step{of}", [*_lines(some, lambda r: (r["context"], r["ms"])),
                                                  Line(FLOOR, floor, dashed=True)], "context, tokens", "ms", log=True,
                           log_x=True))
        found.append(Panel(f"Over the floor{of}", _lines(some, lambda r: (r["context"], r["ratio_to_floor"])),
                           "context, tokens", "times the floor", log=True, log_x=True, mark=1.0))
    return found


def _coded(row: dict[str, Any]) -> bool:
    return any(code in str(row["subject"]).split() for code in CODES)


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the graphs and variants of one subject and precision the quickest in each case, under their common name."""
    found: dict[Any, dict[str, Any]] = {}
    for row in rows:
        named = row | {"subject": row["subject"].partition(",")[0]}
        key = (named["subject"], row["batch"], row["context"], row.get("tokens"))
        if key not in found or row["ms"] < found[key]["ms"]:
            found[key] = named
    return list(found.values())


def _lines(rows: list[dict[str, Any]], point: Any) -> list[Line]:
    names = dict.fromkeys(r["subject"] for r in rows)
    return [Line(name, sorted(point(r) for r in rows if r["subject"] == name)) for name in names]


def write(data: dict[str, Any], folder: Path) -> list[Path]:
    """`SUITE.svg` of every suite that has charts."""
    made = []
    for suite in data["suites"]:
        if charts := panels(data, suite):
            file = folder / f"{suite}.svg"
            title = f"{data['models'][suite]}, fp32, {data['threads']} threads"
            file.write_text(svg(title, charts, columns=COLUMNS.get(suite, 2)), encoding="utf-8")
            made.append(file)
    return made
