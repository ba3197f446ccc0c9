"""The latent's width swept: similarity with the original's outputs against memory and time, one attention.

The physics: a cache row has d_c + d_r numbers, so bytes per token fall in step with d_c, and a decode step reads them;
what is lost is what the up projections had outside the latent. Similarity is of the float64 reference over whole
sequences; every export is held against that reference before it is timed. Times are this machine's, and only reported.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export_attention
from exporter.source import Source
from validate.bench import session_step
from validate.bench_timing import take_turns
from validate.metrics import TOLERANCES, compare
from validate.narrowed import Candidate, Subject, answers, open_subject
from validate.parity import verdict
from validate.references import NaiveMLA

GRID = (128, 192, 256, 384, 512)
ITEMSIZE = 2  # bytes of a cached number: 16 bits, as caches are served


@dataclass(frozen=True)
class SweepRequest:
    """What `python -m validate sweep` was asked for; see its --help for each option."""

    model: str
    ranks: str | None = None
    rope_columns: int | None = None
    layer: int | None = None
    tokens: Path | None = None
    text: Path | None = None
    context: int | None = None
    threads: int = 2
    rounds: int = 3
    seed: int = 0
    allow_pickle: bool = False


@dataclass(frozen=True)
class Point:
    """One rank. `rel` (max|a - b| / std) and cosine of the attention's outputs against the original's; `share` of the
    energy in the latent; bytes of one token's cache in this attention; `ms` the median decode step, `spread` half its
    interquartile range over it; the whole model's perplexity where tokens were given."""

    rank: int
    cosine: float
    rel: float
    share: float
    cache_bytes_per_token: int
    ms: float
    spread: float
    verdict: str
    perplexity: float | None


def ranks_of(asked: str | None, full: int) -> list[int]:
    """The grid: as asked, or the usual one up to full rank; where few of it fit, quarters of that."""
    if asked is None:
        usual = [r for r in GRID if r < full]
        return [*usual, full] if len(usual) > 1 else sorted({max(1, full * i // 4) for i in range(1, 5)})
    try:
        ranks = sorted({int(r) for r in asked.split(",")})
    except ValueError:
        raise InputError(f"--ranks {asked!r}: expected numbers such as 128,256") from None
    if ranks[0] < 1 or ranks[-1] > full:
        raise InputError(f"--ranks {asked}: expected numbers from 1 to {full}, the full rank of this attention")
    return ranks


def run(request: SweepRequest, progress: Callable[..., None] = lambda message, share=None: None) -> dict[str, Any]:
    """Every rank measured; JSON-ready. InputError on bad input, CheckError where an export does not compute what its
    reference does."""
    progress(f"opening {request.model}")
    torch.set_num_threads(request.threads)
    subject = open_subject(request.model, layer=request.layer, seed=request.seed, allow_pickle=request.allow_pickle,
                           rope_columns=request.rope_columns, tokens=request.tokens, text=request.text)
    ranks, points, context = ranks_of(request.ranks, subject.full_rank), list[Point](), 0
    for i, candidate in enumerate(subject.narrow(ranks, progress)):
        progress(f"d_c {ranks[i]}", i / len(ranks))
        context = _context(request, candidate.source)
        points.append(_measured(subject, candidate, request, context))
    return {"model": request.model, "attention": subject.name, "full_rank": subject.full_rank, "context": context,
            "original_cache_bytes_per_token": ITEMSIZE * subject.numbers, "original_perplexity": subject.perplexity,
            "points": [asdict(p) for p in points], "notes": subject.notes}


def _context(request: SweepRequest, source: Source) -> int:
    trained = source.config.max_position_embeddings
    context = min(1024, trained - 1) if request.context is None else request.context
    if not 1 <= context < trained:
        raise InputError(f"--context {context}: expected 1 to {trained - 1} rows of past, one less than the model's "
                         "positions")
    return context


def _measured(subject: Subject, candidate: Candidate, request: SweepRequest, context: int) -> Point:
    found = answers(candidate.source, subject.inputs)
    d = compare(np.concatenate(found), np.concatenate(subject.expected))
    times = _times(candidate.source, request, context)
    quartiles = statistics.quantiles(times, n=4)
    median = statistics.median(times)
    c = candidate.source.config
    return Point(c.kv_lora_rank, d.cosine, d.rel, candidate.share, ITEMSIZE * c.row_dim, median,
                 (quartiles[2] - quartiles[0]) / 2 / median, verdict(d.cosine), candidate.perplexity)


def _times(source: Source, request: SweepRequest, context: int) -> list[float]:
    """Decode steps of an fp32 export in ONNX Runtime, ms, once it has answered as the reference does."""
    c, rng = source.config, np.random.default_rng([request.seed, context])
    rows = rng.standard_normal((1, context, c.row_dim), np.float32)
    hidden = rng.standard_normal((1, 1, c.hidden_size), np.float32)
    tensors = {name: torch.from_numpy(np.array(t.load(), np.float64)) for name, t in source.tensors.items()}
    reference = NaiveMLA(c, tensors, max_context=context + 1)
    reference.seed_rows(torch.from_numpy(rows), [context])
    expected = reference.forward(torch.from_numpy(hidden)).numpy()
    with tempfile.TemporaryDirectory(prefix="mla-sweep-") as folder:
        made = export_attention(ExportRequest(source.name, Path(folder) / "export", scope="layer",
                                              max_context=context + 1), source)
        step = session_step(made, made.graph("decode").formulation, request.threads, rows, hidden)
        d = compare(step(), expected)
        if not d.within(TOLERANCES["fp32"]):
            raise CheckError(f"{source.name}: the exported step differs from the float64 reference, rel {d.rel:.1e}, "
                             f"1 - cosine {1 - d.cosine:.1e}; expected {TOLERANCES['fp32'].rel:.0e}; not timed")
        return take_turns({"step": step}, request.rounds, 10.0)["step"].ms
