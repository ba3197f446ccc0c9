"""Decode time of one attention, side by side in one run.

The physics: a decode step at batch 1 must read its weights and its cache once, so it is bytes over bandwidth; the
expanding step does H (nope + v) d_c multiply-adds per past row on top, so it is flops, and grows with context a hundred
times steeper. Subjects take turns (machines are noisy and drift), outputs are compared before anything is timed, and
medians are reported with their spread.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from exporter.errors import CheckError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from validate.metrics import compare
from validate.references import AbsorbedMLA, ComposedMHA, ExpandingMLA, NaiveMLA, load_tensors

Step = Callable[[], np.ndarray]
BURST = 6
SETTLE_S = 0.05  # the neighbour's OpenMP threads spin on for some milliseconds
EQUAL = 1e-3  # rel between fp32 subjects; they are timed only if they compute the same


@dataclass(frozen=True)
class Row:
    """One subject at one context. `ms` is the median of all timed steps, `spread` half the interquartile range over it;
    `ratio` is against the eager expanding step of the same run."""

    suite: str
    subject: str
    context: int
    batch: int
    ms: float
    spread: float
    ratio: float
    outputs_equal: bool


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


def take_turns(steps: dict[str, Step], rounds: int, budget_s: float) -> dict[str, list[float]]:
    """Timings in ms. In each round every subject runs untimed for SETTLE_S and then BURST timed steps: decoding is one
    step after another, and a neighbour's spinning threads and cold caches would else be charged to whoever follows.
    A slow subject stops when `budget_s` is spent, after at least 3 timed steps.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            if len(times[name]) >= 3 and sum(times[name]) > 1e3 * budget_s:
                continue
            settled = time.perf_counter() + SETTLE_S
            while time.perf_counter() < settled:
                step()
            for _ in range(BURST):
                start = time.perf_counter()
                step()
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def decode_rows(model: str, contexts: Sequence[int], *, batch: int = 1, threads: int = 2, rounds: int = 5,
                budget_s: float = 10.0, progress: Callable[..., None] = lambda message, share=None: None) -> list[Row]:
    """Decode one token at each context: eager references and every ONNX Runtime formulation of the append form."""
    torch.set_num_threads(threads)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as temporary:
        made = export(ExportRequest(model, Path(temporary) / "export", max_context=max(contexts)))
        tensors = load_tensors(made.data["source"], made.config)
        for context in contexts:
            progress(f"context {context}")
            rng = np.random.default_rng(context)
            rows = rng.standard_normal((batch, context, made.config.row_dim), np.float32)
            hidden = rng.standard_normal((batch, 1, made.config.hidden_size), np.float32)
            default = made.graph("decode").formulation
            steps = {"eager, expanding": _eager(ExpandingMLA, made, tensors, rows, hidden),
                     "eager, expanded K/V cache": _eager(NaiveMLA, made, tensors, rows, hidden),
                     "eager, MHA full cache": _eager(ComposedMHA, made, tensors, rows, hidden),
                     "eager, absorbed": _eager(AbsorbedMLA, made, tensors, rows, hidden)}
            for g in made.graphs:
                if g.kind == "decode":
                    name = f"ort, {g.formulation}" + (" (default)" if g.formulation == default else "")
                    steps[name] = session_step(made, g.formulation, threads, rows, hidden)
            found += _compare_and_time(steps, context, batch, rounds, budget_s)
    return found


def _compare_and_time(steps: dict[str, Step], context: int, batch: int, rounds: int, budget_s: float) -> list[Row]:
    expected = next(iter(steps.values()))()
    for name, step in steps.items():
        rel = compare(step(), expected).rel
        if rel > EQUAL:
            raise CheckError(
                f"{name} differs from the eager expanding step at context {context}: rel {rel:.1e}; not timed"
            )
    times = take_turns(steps, rounds, budget_s)
    base = statistics.median(next(iter(times.values())))
    rows = []
    for name, values in times.items():
        median = statistics.median(values)
        quartiles = statistics.quantiles(values, n=4)
        rows.append(
            Row("layer", name, context, batch, median, (quartiles[2] - quartiles[0]) / 2 / median, base / median, True)
        )
    return rows


def to_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """JSON form."""
    return {"rows": [asdict(r) for r in rows], "machine": {"torch_threads": torch.get_num_threads()}}
