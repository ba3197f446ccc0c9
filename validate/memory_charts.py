"""The charts of memory over context: caches, scratch and peaks; a line a subject, of one look in all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exporter.output import write_file
from validate.memory_curve import EAGER
from validate.plot import Line, Panel, svg


def panels(data: dict[str, Any]) -> list[Panel]:
    """The charts of `Curves.to_dict()`: caches, scratch and peaks over context, a scope and a kind of step each."""
    def lines(scope: str, step: str, key: str, without: Sequence[str] = ()) -> list[Line]:
        found: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
        for r in data["rows"]:
            if (r["scope"], r["step"]) == (scope, step) and r["subject"] not in without and r["how"] != "builder":
                found.setdefault((r["subject"], r["device"], r["how"]), []).append((r["context"], r[key] / 1e6))
        return [Line(subject + (f" ({device})" if device not in ("cpu", "-") else "")
                     + (f", {how}" if how != "measured" else ""), points, dashed=how != "measured",
                     style=kinds.index(subject.removesuffix(f", {step}")))
                for (subject, device, how), points in found.items()]

    kinds = list(dict.fromkeys([*EAGER.values(), *(r["subject"].removesuffix(f", {r['step']}") for r in data["rows"])]))
    made = []
    words = {"attention": "one attention", "model": "model"}
    several = len({r["scope"] for r in data["rows"]}) > 1
    for scope in ("attention", "model"):
        # an expanding MLA caches what an absorbed one does: one line for both
        for step, key, title, without in (
                ("decode", "cache_bytes", "Cache", [EAGER["expanding"]]),
                ("decode", "step_bytes", "Scratch of a decode step", ()),
                ("decode", "peak_bytes", "Weights, cache and scratch", ()),
                ("prefill", "step_bytes", "Scratch of a prefill chunk", ())):
            found = lines(scope, step, key, without)
            if found:
                of = f", {words[scope]}" if several else ""
                made.append(Panel(title + of, found, "context, tokens", "MB", log=True, log_x=True))
    return made


def draw(data: dict[str, Any], title: str, file: Path) -> None:
    """The charts as one SVG file."""
    write_file(file, svg(title, panels(data)).encode())
