"""The benchmark's tables, from a run's JSON: the same on a terminal and in a page."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exporter import console
from validate import profile_tables
from validate.marked_page import markdown

if TYPE_CHECKING:
    from rich.console import Console

Data = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of a suite: its title, columns, and the rows that a run's JSON makes; the first `left` are text."""

    title: str
    columns: tuple[str, ...]
    rows: Callable[[Data], list[list[Any]]]
    left: int = 1


def _ms(r: Data) -> str:
    return f"{r['ms']:.3g}" if r["ms"] < 1000 else f"{r['ms']:.0f}"


def _times(r: Data, key: str, digits: int = 2) -> str:
    value = r.get(key)
    return "–" if value is None else f"{value:.{digits}f}x"


def _floors(r: Data) -> tuple[str, str]:
    """Over the floor, and at the median rates, which runs kept from before there were any lack."""
    return _times(r, "ratio_to_floor"), _times(r, "ratio_to_median_floor")


def _spread(r: Data) -> str:
    return f"{100 * r['spread']:.0f} %" if r.get("steps", 2) > 1 else "–"


def _equal(r: Data) -> str:
    said = "–" if r["outputs_equal"] is None else "yes" if r["outputs_equal"] else "no"
    return said + (f" ({r['rel']:.0e})" if r.get("rel") else "")


def _optional(value: Any, form: Callable[[Any], str] = str) -> str:
    return "–" if value is None else form(value)


def _layer(r: Data) -> list[str]:
    return [r["subject"], r["batch"], r["context"], _ms(r), _spread(r), _times(r, "ratio"), *_floors(r), _equal(r)]


def _model(r: Data) -> list[str]:
    batch = f"{r['batch']}, of {min(r['lengths'])} to {max(r['lengths'])} rows" if r.get("lengths") else r["batch"]
    gain = r.get("tokens_per_s_of_batch_1")
    return [r["subject"], batch, r["context"], _ms(r), _spread(r), _times(r, "ratio"), *_floors(r),
            f"{r['tokens_per_s']:.1f}", "–" if gain is None else f"{r['tokens_per_s'] / gain:.2f}x",
            f"{r['cache_bytes_per_token']} B", _equal(r)]


def _prefill(r: Data) -> list[str]:
    at_once = min(r.get("at_once", r["tokens"]), r["tokens"])
    return [r["subject"], f"{r['context']} to {r['context'] + r['tokens']}", at_once,
            f"{r['tokens_per_s']:.1f}", f"{r['ms'] / 1e3:.2f}", _spread(r),
            _times(r, "ratio"), *_floors(r), _equal(r)]


def _export(r: Data) -> list[str]:
    return [r["subject"], f"{r['ms'] / 1e3:.2f}", _spread(r), _times(r, "ratio", 1), _times(r, "ratio_to_floor", 1),
            console.size(r["peak_bytes"]), _optional(r.get("bytes_written"), console.size), _equal(r)]


def _engine(r: Data) -> list[str]:
    return [r["subject"], f"{r['ms'] / 1e3:.2f}", _optional(r.get("builder_ms"), lambda v: f"{v / 1e3:.2f}"),
            _optional(r.get("engines")), _optional(r.get("from_store")),
            _optional(r.get("peak_bytes"), console.size), _optional(r.get("bytes_written"), console.size)]


def _profile(r: Data) -> list[str]:
    return [r["subject"], r["batch"], r["context"], _ms(r), _spread(r), *_floors(r),
            f"{r['profiled_ms']:.3g}", f"{r['nodes_ms']:.3g}", _equal(r)]


def _each(suite: str, cells: Callable[[Data], list[str]]) -> Callable[[Data], list[list[Any]]]:
    """A line for each of the suite's rows."""
    return lambda data: [cells(r) for r in data["rows"] if r["suite"] == suite]


_STEP = ("subject", "batch", "context", "ms", "± spread", "against ours", *profile_tables.FLOORS)
TABLES = {
    "layer": (Table("A decode step of one attention of {model}", (*_STEP, "equal (rel)"), _each("layer", _layer)),),
    "model": (Table("A decode step of {model}", (*_STEP, "tokens/s", "of batch 1", "cache per token", "equal (rel)"),
                    _each("model", _model)),),
    "profile": (Table("A decode step of {model}, and as ONNX Runtime's profile has it", profile_tables.STEPS,
                      lambda data: [_profile(r) for r in profile_tables.steps(data)]),
                Table("Where its time goes, by part of {model}", profile_tables.PARTS, profile_tables.part_rows, 2),
                Table("Where its time goes, by operator of {model}", profile_tables.OPERATORS,
                      profile_tables.operator_rows, 2)),
    "prefill": (Table("A piece of prompt through {model}", ("subject", "tokens", "at once", "tokens/s", "s", "± spread",
                      "against ours", *profile_tables.FLOORS, "equal (rel)"), _each("prefill", _prefill)),),
    "export": (Table("Export of {model}, a process each", ("subject", "s", "± spread", "against linked",
                     "over a plain copy", "peak memory", "written", "equal (rel)"), _each("export", _export)),),
    "engine": (Table("TensorRT-RTX engines built: {model}", ("build", "s", "in the builder, s", "engines tried",
                     "from the store", "peak memory", "plans kept"), _each("engine", _engine)),)}


def remarks(data: Data) -> list[str]:
    """What was measured beside the rows: the machine's rates, straight lines, versions."""
    found = []
    if rates := data["rates"]:
        near, sizes, speeds = "", [int(size) for size in rates["near"]], list(rates["near"].values())
        if sizes:
            near = (f", working sets of {console.size(min(sizes))} to {console.size(max(sizes))} at "
                    f"{_span(speeds)} GB/s")
            if medians := rates.get("near_median"):
                near += f" ({_span(medians.values())})"
        found.append(f"the floor's rates, best of {rates['samples']} samples (medians in brackets): memory is read at "
                     f"{rates['read'] / 1e9:.1f} GB/s ({rates['read_median'] / 1e9:.1f}), by "
                     f"{console.size(rates['read_bytes'])} at a time{near}; float32 products "
                     f"{rates['flops'] / 1e9:.0f} GFLOP/s ({rates['flops_median'] / 1e9:.0f}), {rates['product']}")
    for fit in data["fits"]:
        found.append(f"{fit['subject']}, batch {fit['batch']}: ms = {fit['intercept_ms']:.2f} + "
                     f"{fit['us_per_row']:.3f} us a row over {len(fit['contexts'])} contexts, "
                     f"{fit['contexts'][0]} to {fit['contexts'][-1]}; R2 {fit['r2']:.4f}; the floor's slope is "
                     f"{fit['floor_us_per_row']:.3f} us, ours {fit['slope_to_floor']:.2f}x that"
                     + (f" ({fit['slope_to_median_floor']:.2f}x at median rates)" if "slope_to_median_floor" in fit
                        else ""))
    found += [f"not run: {line}" for line in data["not_run"]]
    m = data["machine"]
    found.append(f"{m['processor']}, {data['threads']} threads, pinned to cores {', '.join(map(str, data['cores']))}; "
                 f"{data['when']}; " + ", ".join(f"{name} {v}" for name, v in data["versions"].items()))
    return found


def _span(speeds: Collection[float]) -> str:
    return f"{min(speeds) / 1e9:.1f} to {max(speeds) / 1e9:.1f}"


def _title(data: Data, suite: str, table: Table) -> str:
    return (table.title.format(model=data["models"][suite])
            + ("" if suite in ("export", "engine") else f", fp32, {data['threads']} threads (medians)"))


def show(out: Console, data: Data) -> None:
    """All of a run for a person."""
    from rich.markup import escape

    for suite in data["suites"]:
        for table in TABLES[suite]:
            console.table(out, escape(_title(data, suite, table)), table.columns, table.rows(data))
    console.note_list(out, remarks(data))
    for line in data["warnings"]:
        out.print(f"[yellow]warning:[/yellow] {escape(line)}", soft_wrap=True)


def page_tables(data: Data) -> dict[str, str]:
    """By the name of its markers, what a page shows of each suite in the run, and of the run."""
    found = {}
    for suite in data["suites"]:
        made = (f"{_title(data, suite, table)}:\n\n{markdown(table.columns, table.rows(data), table.left)}\n"
                for table in TABLES[suite])
        found[f"bench-{suite}"] = "".join(made) + _under(data)
    return found


def _under(data: Data) -> str:
    lines = [*remarks(data), *(f"warning: {line}" for line in data["warnings"])]
    return "".join(f"- {line}\n" for line in lines)
