"""The suite layer: one decode step of one attention, eager references and ONNX Runtime's formulations side by side.

The expanding step does H (nope + v) d_c multiply-adds per past row beyond what validate.floor says a step must do, so
it grows with context a hundred times steeper. Subjects take turns (machines are noisy and drift), outputs are compared
before anything is timed, and medians are reported with their spread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import operator_library
from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from exporter.errors import CheckError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from validate.bench_rows import DEFAULT, Row, Run
from validate.bench_timing import Step, take_turns, watch
from validate.floor import attention_need
from validate.metrics import compare
from validate.references import AbsorbedMLA, ComposedMHA, ExpandingMLA, NaiveMLA, load_tensors

EQUAL = 1e-3  # rel between fp32 subjects; they are timed only if they compute the same


def _eager(kind: Any, made: Export, tensors: dict[str, torch.Tensor], rows: np.ndarray, hidden: np.ndarray) -> Step:
    context = rows.shape[1]
    reference = kind(made.config, tensors, max_context=context + 1, dtype=torch.float32)
    x = torch.from_numpy(hidden)
    reference.seed_rows(torch.from_numpy(rows), [context] * len(rows))

    def step() -> np.ndarray:
        with torch.inference_mode():
            return np.asarray(reference.forward(x, [0] * len(rows)).numpy())  # keeps no row: the context stays fixed

    return step


def session_step(made: Export, formulation: str, threads: int, rows: np.ndarray, hidden: np.ndarray) -> Step:
    """A decode step of `hidden` [B, 1, D] behind cache rows [B, S, R] in ONNX Runtime, its output."""
    session = OrtSession(made, made.graph("decode", formulation), OrtOptions(threads=threads))
    cache = LatentCache(made, len(rows), rows.shape[1])
    cache.load(rows, np.full(len(rows), rows.shape[1]))
    feed = {"hidden_states": hidden, **cache.feed()}
    return lambda: session.infer(feed)["attn_output"]


def bench_layer(run: Run, model: str, contexts: Sequence[int], batches: Sequence[int] = (1,)) -> None:
    """Decode one token at each batch and context: eager references and every formulation of the append form."""
    torch.set_num_threads(run.threads)
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as temporary:
        missing = operator_library.missing()
        if missing:
            run.result.not_run.append(f"ort, fused: {missing}")
        made = export(ExportRequest(model, Path(temporary) / "export", max_context=max(contexts),
                                    fused_decode=missing is None))
        tensors = load_tensors(made.data["source"], made.config)
        run.probe.products(made.config)
        for batch in batches:
            for context in contexts:
                run.progress(f"layer, batch {batch}, context {context}: comparing")
                rng = np.random.default_rng(context)
                rows = rng.standard_normal((batch, context, made.config.row_dim), np.float32)
                hidden = rng.standard_normal((batch, 1, made.config.hidden_size), np.float32)
                _compare_and_time(run, made, _subjects(made, tensors, run.threads, rows, hidden), batch, context)
    run.result.models["layer"] = model


def _subjects(made: Export, tensors: dict[str, torch.Tensor], threads: int, rows: np.ndarray, hidden: np.ndarray,
              ) -> dict[str, Step]:
    steps = {"eager, expanding": _eager(ExpandingMLA, made, tensors, rows, hidden),
             "eager, expanded K/V cache": _eager(NaiveMLA, made, tensors, rows, hidden),
             "eager, MHA full cache": _eager(ComposedMHA, made, tensors, rows, hidden),
             "eager, absorbed": _eager(AbsorbedMLA, made, tensors, rows, hidden)}
    graphs = [g for g in made.graphs if g.kind == "decode"]
    default = next(g for g in graphs if not operator_library.needed(g.formulation))  # without being asked for another
    for g in graphs:
        steps[f"ort, {g.formulation}" + DEFAULT * (g is default)] = session_step(made, g.formulation, threads, rows,
                                                                                hidden)
    return steps


def _compare_and_time(run: Run, made: Export, steps: dict[str, Step], batch: int, context: int) -> None:
    expected, rels = next(iter(steps.values()))(), {}
    for name, step in steps.items():
        rels[name] = compare(step(), expected).rel
        if rels[name] > EQUAL:
            raise CheckError(
                f"{name} differs from the eager expanding step at context {context}: rel {rels[name]:.1e}; not timed"
            )
    need = attention_need(made.config, batch, 1, context)
    run.probe.working_sets([need])
    with watch(f"layer, batch {batch}, context {context}", run.threads, run.result.load):
        timed = take_turns(steps, run.rounds, run.budget_s, between=run.sample, progress=run.progress,
                           where=f"layer, context {context}, ")
    ours = next(t.median for name, t in timed.items() if name.endswith(DEFAULT))
    run.result.rows += [Row.of("layer", name, t, context=context, batch=batch, need=need, ours_ms=ours, rel=rels[name],
                               cpu=t.cpu_per_wall, tokens=1) for name, t in timed.items()]
