"""One page of HTML from a report's data: styles, pictures and the data itself inside, nothing fetched from anywhere."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from exporter.errors import InputError
from exporter.output import write_file
from validate import plot
from validate.report_blocks import blocks
from validate.report_view import Reader

MARKS = {"pass": "✓", "fail": "✗", "done": "•", "not run": "○", "left out": "–", "nothing checked": "○", "none": "○"}


def html(data: dict[str, Any]) -> str:
    """The page of `report.collect`'s data."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {}  # sections stay in their order
    environment.filters["picture"] = Markup  # ours, escaped where it was drawn
    template = environment.from_string((files("validate") / "report.html.j2").read_text(encoding="utf-8"))
    reader = Reader(data)
    shown = [{"name": name, **section, "blocks": blocks(reader, name)} for name, section in data["sections"].items()
             if section["state"] != "left out"]
    left_out = [section["title"] for section in data["sections"].values() if section["state"] == "left out"]
    return template.render(data=data, sections=shown, left_out=left_out, marks=MARKS, plot_style=Markup(plot.STYLE),
                           highlights=_highlights(reader, data))


def _highlights(reader: Reader, data: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for i, h in enumerate(data["highlights"]):
        path = f"highlights.{i}"
        made.append({**h, "cell": reader.unit(f"{path}.value", h["unit"]),
                     "unit_word": {"bytes": "B", "MB": "MB", "rel": ""}[h["unit"]],
                     "beside_cell": None if h["beside"] is None else reader.unit(f"{path}.beside", h["unit"]),
                     "ratio_cell": reader.figure(f"{path}.ratio", "times") if h.get("ratio") else None})
    return made


def check_target(out: Path, overwrite: bool) -> None:
    """Before anything is run: the page can be written. InputError where it cannot."""
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; expected the name of a file, such as {out / 'report.html'}")
    if out.exists() and not overwrite:
        raise InputError(f"--out {out} exists; choose another name, or pass --overwrite to replace it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; make it first")


def write(data: dict[str, Any], out: Path) -> None:
    """The page as a file that appears whole."""
    write_file(out, html(data).encode())
