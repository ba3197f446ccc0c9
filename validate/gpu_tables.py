"""How a GPU check looks on a terminal: the device, then one table per group of rungs, then what was not run.

`sections` gives the tables as data, so that they can be printed where rich is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exporter import console
from validate.gpu_rungs import Report, Result

if TYPE_CHECKING:
    from rich.console import Console

Section = tuple[str, list[str], list[list[str]]]


def show(out: Console, report: Report) -> None:
    """With rich."""
    for title, columns, rows in sections(report):
        console.table(out, title, columns, rows)
    console.note_list(out, notes(report))
    colour = "green" if report.passed else "red" if report.count("failed") else "yellow"
    out.print(f"[{colour}]{report.summary}[/{colour}]")


def plain(report: Report) -> str:
    """Without rich: columns by tabs."""
    parts = ["\n".join([title, *("\t".join(row) for row in [columns, *rows])]) for title, columns, rows in
             sections(report)]
    return "\n\n".join([*parts, "\n".join([*(f"- {line}" for line in notes(report)), report.summary])])


def notes(report: Report) -> list[str]:
    """Failures first, then what was not run, rungs of one reason on one line."""
    reasons: dict[str, list[str]] = {}
    for r in report.results:
        if r.state == "not run":
            reasons.setdefault(r.note, []).append(r.name)
    failed = [f"FAIL {r.name}: {r.note or 'beyond its tolerance'}" for r in report.results if r.state == "failed"]
    return failed + [f"{_names(names)}: not run: {reason}" for reason, names in reasons.items()]


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def sections(report: Report) -> list[Section]:
    """Title, columns and rows of every table that has something to show."""
    ran = [r for r in report.results if r.state != "not run"]
    if not ran:
        return [("What a GPU would be asked", ["rung", "what"], [[r.name, r.what] for r in report.results])]
    groups = {name: [r for r in ran if r.name.split("/")[0] == name]
              for name in ("device", "parity", "memory", "time", "cache", "engine")}
    makers = {"device": _device, "parity": _parity, "memory": _memory, "time": _time, "cache": _cache,
              "engine": _engine}
    return [section for name, results in groups.items() if results for section in makers[name](results)]


def _verdict(r: Result) -> str:
    return "pass" if r.state == "passed" else "FAIL"


def _number(value: Any, form: str = ".1e") -> str:
    return "–" if value is None else format(value, form)


def _size(value: Any) -> str:
    return "–" if value is None else console.size(value)


def _device(results: list[Result]) -> list[Section]:
    f = results[0].figures
    if not f:
        return []
    copied = f"{f['copy_gbs']:.0f} GB/s" + (f" of {f['sheet_gbs']:.0f}" if "sheet_gbs" in f else "")
    return [("Device", ["name", "capability", "memory", "driver", "torch", "CUDA", "copy, of the data sheet's"],
             [[str(f["name"]), str(f["capability"]), _size(f["memory_bytes"]), str(f["driver"]), str(f["torch"]),
               str(f["cuda"]), copied]])]


def _parity(results: list[Result]) -> list[Section]:
    keys = ("rel", "tolerance", "worst_rel", "one_minus_cosine", "cosine_tolerance")
    rows = [[r.name, *(_number(r.figures.get(key)) for key in keys), _verdict(r)] for r in results]
    return [("Eager layers on the device: rel = max|a - b| / std(float64 reference on the CPU), the median of the "
             "seeds and their worst; 1 - cosine of the worst",
             ["rung", "rel", "tolerance", "worst seed", "1 - cos", "tolerance", ""], rows)]


def _memory(results: list[Result]) -> list[Section]:
    keys = ("weight_bytes", "cache_bytes", "step_peak_bytes", "formula_bytes")
    rows = [[r.name, *(_size(r.figures.get(key)) for key in keys),
             _number(r.figures.get("ratio"), ".2f"), _size(r.figures.get("total_bytes")), _verdict(r)] for r in results]
    return [("Device memory of one step beside weights and cache (formula: tensors that must be alive together)",
             ["rung", "weights", "cache", "step", "formula", "step / formula", "total", ""], rows)]


def _time(results: list[Result]) -> list[Section]:
    rows = [[r.name, *_against(r.figures), _verdict(r)] for r in results]
    return [(f"One decode step, eager; floor: bytes over bandwidth ({_whose(results)})",
             ["rung", "ms", "floor", "ms / floor", "outputs equal"], rows)]


def _whose(results: list[Result]) -> str:
    return next((r.figures["bandwidth"] for r in results if "bandwidth" in r.figures), "unknown")


def _against(figures: dict[str, Any]) -> list[str]:
    return [_number(figures.get(key), form) for key, form in (("ms", ".3f"), ("floor_ms", ".3f"), ("ratio", ".1f"))]


def _cache(results: list[Result]) -> list[Section]:
    rows = [[r.name, *_against(r.figures), _crossed(r.figures), _verdict(r)] for r in results]
    return [("The cache on the device: rows written as the host writes them, and a step whose past stays there",
             ["rung", "ms", "floor", "ms / floor", "bytes up / down", "equal to the host's"], rows)]


def _crossed(figures: dict[str, Any]) -> str:
    up, down = figures.get("uploaded_bytes"), figures.get("downloaded_bytes")
    return "–" if up is None else f"{up} / {down}"


def _engine(results: list[Result]) -> list[Section]:
    rows = []
    for r in results:
        built = r.figures.get("decode_engine", {})
        rows.append([r.name, _size(built.get("activation_bytes")), _size(r.figures.get("device_memory_bytes")),
                     _size(built.get("plan_bytes")), _number(r.figures.get("rel")), _number(r.figures.get("tolerance")),
                     _verdict(r)])
    found = [("Engines (activation: the builder's figure; device memory: the loaded engine's)",
              ["rung", "activation", "device memory", "plan", "rel", "tolerance", ""], rows)]
    for key, title in (("steps", "One decode step of an engine"),
                       ("session", "The same through a session: hidden states cross, the past stays on the device")):
        steps = [[r.name, str(step["rows"]), *_against(step), _crossed(step)]
                 for r in results for step in r.figures.get(key, ())]
        if steps:
            found.append((title, ["rung", "rows of past", "ms", "floor", "ms / floor", "bytes up / down"], steps))
    return found
