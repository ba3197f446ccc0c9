"""The activation survey: what TensorRT-RTX asks for each form, orientation, dtype, head count and number of tokens.

Identical mathematics, up to hundreds of times apart. Every figure comes from a build made by this run; the expanding
baseline, which rebuilds K and V at every step, stands beside.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from engines import lint, trt
from engines.search import OPT_CONTEXT
from exporter.errors import CheckError
from exporter.formulations import BY_NAME
from exporter.presets import preset_config
from exporter.signature import Range, profile
from exporter.source import seeded_source
from validate.baselines import Workbench
from validate.marked_page import markdown as tabled

BACKEND = "trt-rtx"
COLUMNS = (("append", "kqt-half"), ("append", "kqt"), ("append", "kqt-blocks"), ("append", "kqt-groups"),
           ("append", "qkt"), ("concat", "kqt"), ("concat", "qkt"), ("scatter", "kqt"), ("scatter", "qkt"),
           ("concat", "expanded"), ("append", "expanded-attention"))
_ORIENTED = {"kqt": "`past @ qᵀ`", "kqt-half": "`past @ qᵀ`, 16-bit softmax", "kqt-groups": "`past @ qᵀ`, head groups",
             "kqt-blocks": "`past @ qᵀ`, row blocks",
             "qkt": "`q @ kᵀ`"}


@dataclass(frozen=True)
class Limits:
    """Profile maxima of one row of the table: batch, new tokens, rows of past."""

    batch: int
    tokens: int
    context: int


ROWS = (Limits(8, 1, 32768), Limits(8, 4, 32768), Limits(1, 512, 8192), Limits(1, 2048, 32768))


@dataclass(frozen=True)
class Figure:
    """One build. `activation_bytes` is None where the target does not take it, `note` says why."""

    cache: str
    formulation: str
    dtype: str
    heads: int
    limits: Limits
    activation_bytes: int | None
    plan_bytes: int | None
    note: str = ""


def survey(*, preset: str = "deepseek-v2-lite", dtypes: Sequence[str] = ("fp16", "bf16", "fp32"),
           heads: Sequence[int] = (16, 128), rows: Sequence[Limits] = ROWS,
           progress: Callable[..., None] = lambda message, share=None: None) -> list[Figure]:
    """Build everything; the attention is `preset`'s with its number of heads replaced."""
    if not trt.available(BACKEND):
        trt.load(BACKEND)  # raises with the install command
    figures = []
    context = max(r.context for r in rows)
    for dtype in dtypes:
        for count in heads:
            source = seeded_source(preset, replace(preset_config(preset), num_attention_heads=count), 0)
            with tempfile.TemporaryDirectory(prefix="mla-activation-") as folder:
                bench = Workbench.make(Path(folder), source, dtype, context)
                for limits in rows:
                    for cache, formulation in COLUMNS:
                        progress(f"{dtype}, {count} heads, T {limits.tokens}: {cache} {formulation}")
                        figures.append(_figure(bench, cache, formulation, dtype, count, limits))
    return figures


def _figure(bench: Workbench, cache: str, formulation: str, dtype: str, heads: int, limits: Limits) -> Figure:
    """Build one cell; where that is refused, the cell is empty and the note says why."""
    label = _label(cache, formulation)

    def cell(activation: int | None, plan_bytes: int | None, note: str = "") -> Figure:
        return Figure(cache, formulation, dtype, heads, limits, activation, plan_bytes, note)

    kind, form = "prefill" if limits.tokens > 4 else "decode", BY_NAME[formulation]
    if dtype not in form.dtypes[BACKEND]:
        return cell(None, None, f"{label}: for 16 bits only")
    if kind not in form.kinds(quantised=False):
        return cell(None, None, f"{label}: for {' and '.join(form.kinds(quantised=False))} only")
    if cache == "scatter":  # its S_max is static: the row's own
        bench = replace(bench, max_context=limits.context)
    path, entry = bench.graph(kind, formulation, cache)
    ranges = {"B": Range(1, 1, limits.batch), "T": Range(1, limits.tokens, limits.tokens),
              "S": Range(1, min(OPT_CONTEXT, limits.context), limits.context)}
    findings = lint.lint(path, {n: r.max for n, r in ranges.items()})
    if any(f.rule == lint.TOO_LARGE for f in findings):
        return cell(None, None, f"{label}, {heads} heads, T ≤ {limits.tokens}: a tensor of more than 2^31 - 1 elements")
    if findings:
        return cell(None, None, f"{label}: {findings[0].message}")
    try:
        plan = trt.build(BACKEND, path, [profile(entry.inputs, ranges)])
    except CheckError as error:
        reason = "no fused kernel" if "dedicated kernel" in str(error) else str(error)
        return cell(None, None, f"{label}: {reason} at T {limits.tokens}")
    return cell(plan.activation_bytes, plan.plan_bytes)


def _label(cache: str, formulation: str) -> str:
    return f"{cache} {_ORIENTED[formulation]}" if formulation in _ORIENTED else formulation.replace("-", " ")


def table(figures: Sequence[Figure]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for people, activation in MB (10^6 bytes)."""
    columns = ["dtype", "heads", "B ≤", "T ≤", "S ≤", *[_label(*c) for c in COLUMNS]]
    rows: list[list[str]] = []
    keys = list(dict.fromkeys((f.dtype, f.heads, f.limits) for f in figures))
    for dtype, heads, limits in keys:
        cells = {(f.cache, f.formulation): f for f in figures if (f.dtype, f.heads, f.limits) == (dtype, heads, limits)}
        shown = [cells[c].activation_bytes for c in COLUMNS]
        rows.append([dtype, str(heads), str(limits.batch), str(limits.tokens), str(limits.context),
                     *["–" if b is None else f"{b / 1e6:.1f}" if b < 1e8 else f"{b / 1e6:.0f}" for b in shown]])
    return columns, rows


def markdown(figures: Sequence[Figure]) -> str:
    """The table as Markdown, with the notes of what was not built."""
    columns, rows = table(figures)
    notes = sorted({f.note for f in figures if f.note})
    return "\n".join([tabled(columns, rows), *(f"–: {n}." for n in notes)]) + "\n"


def to_dict(figures: Sequence[Figure]) -> list[dict[str, object]]:
    """JSON rows."""
    return [asdict(f) for f in figures]
