"""Device and process memory, predicted and measured: per token, per layer, per engine, for MLA and for MHA.

Formulas say what a cache must hold, the eager references what theirs does hold, TensorRT's builder what a step needs
beside it, and ONNX Runtime's peak is read in a process of its own. What cannot run here is named, never estimated.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engines import lint, trt
from engines.build import BuildRequest, build_elsewhere
from engines.measure import measure
from engines.search import OPT_CONTEXT
from engines.session import external_places
from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, GraphEntry
from exporter.signature import Range, profile, row_bytes
from exporter.source import reopen
from validate.baselines import Workbench
from validate.gpu_device import CudaDevice, Device
from validate.references import AbsorbedMLA, ComposedMHA, NaiveMLA, load_tensors

GIB = 1 << 30
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class MemoryLimits:
    """Sizes to measure at: engines at batch x context and `chunk` new tokens; ONNX Runtime at 1 x `ort_context`."""

    batch: int
    context: int
    chunk: int
    ort_context: int

    @classmethod
    def of(cls, made: Export, batch: int | None, context: int | None, chunk: int) -> MemoryLimits:
        """Defaults: the export's batch, its context up to 32768, ONNX Runtime's up to 8192 (it really runs)."""
        rows = min(context or 32768, made.max_context)
        return cls(batch or int(made.data["max_batch"]), rows, min(chunk, rows), min(rows, 8192))


def per_token(config: MLAConfig, dtype: str, cache_dtype: str | None = None) -> dict[str, Any]:
    """Cache bytes per token and attention: the latent row, K and V expanded, and an MHA of the same width."""
    width = DTYPES[dtype].itemsize
    latent, expanded = row_bytes(config, dtype, cache_dtype), width * config.expanded_dim
    # an MHA at the same width caches K (nope + rope) and V (v) of every head: the same numbers as the expanded cache
    mha = width * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    return {"latent_bytes_per_token": latent, "expanded_bytes_per_token": expanded, "mha_bytes_per_token": mha,
            "ratio": expanded / latent}


def article_case() -> dict[str, float]:
    """The article's example: 32 layers, 32 heads of 128, d_c 512, 32768 tokens, fp16, in GiB.

    Its MLA formula leaves out the rotary key, which must be cached too: both are given.
    """
    layers, heads, head, d_c, d_r, tokens, width = 32, 32, 128, 512, 64, 32768, 2
    mha = 2 * layers * heads * head * tokens * width
    latent, row = layers * d_c * tokens * width, layers * (d_c + d_r) * tokens * width
    return {"mha_gib": mha / GIB, "latent_gib": latent / GIB, "latent_and_rope_gib": row / GIB,
            "ratio": mha / latent, "ratio_with_rope": mha / row}


def eager_caches(made: Export, tensors: Mapping[str, torch.Tensor], tokens: int, meter: Device | None = None
                 ) -> list[dict[str, Any]]:
    """What the eager references really cache per token, in the export's dtype: on the CPU, or on the device of a meter,
    which also reads a decode step's peak."""
    rows, device = [], "cpu" if meter is None else meter.torch
    for name, kind in (("MLA, absorbed (latent rows)", AbsorbedMLA), ("MLA, expanded K/V", NaiveMLA),
                       ("MHA, same width", ComposedMHA)):
        reference = kind(
            made.config, tensors, max_context=made.max_context, dtype=TORCH_DTYPES[made.dtype], device=device
        )
        seed = torch.zeros(1, tokens, made.config.row_dim)
        reference.seed_rows(seed, [tokens])
        row: dict[str, Any] = {
            "subject": name,
            "device": device,
            "tokens": tokens,
            "cache_bytes": reference.cache_bytes(),
            "bytes_per_token": reference.cache_bytes() // tokens,
        }
        if meter is not None:
            hidden = torch.zeros(1, 1, made.config.hidden_size)
            reference.forward(hidden, [0])  # keeps no row; libraries take their workspaces once
            before = meter.allocated()
            meter.reset_peak()
            reference.forward(hidden, [0])
            row["step_peak_bytes"] = meter.peak() - before
        rows.append(row)
    return rows


def _engine_row(record: Any, backend: str) -> dict[str, Any]:
    keys = (
        "graph",
        "kind",
        "formulation",
        "default",
        "activation_bytes",
        "plan_bytes",
        "weight_bytes",
        "predicted_bytes",
        "limits",
    )
    return {"backend": backend, **{k: getattr(record, k) for k in keys}}


def _engines(
    made: Export, limits: MemoryLimits, bench: Workbench, progress: Callable[..., None]
) -> list[dict[str, Any]]:
    request = BuildRequest(
        made.folder, "trt-rtx", max_batch=limits.batch, max_context=_context(made, limits), chunk=limits.chunk
    )
    progress("trt-rtx: the export's graphs")
    rows = [_engine_row(r, "trt-rtx") for r in build_elsewhere(made, request)]
    if made.cache == "none":
        return rows
    for label, (path, graph) in (("expanding", bench.graph("decode", "expanded", "concat")), ("mha", bench.mha())):
        progress(f"trt-rtx: {label}")
        context = Range(1, min(OPT_CONTEXT, limits.context), limits.context)
        row = _baseline(path, graph, {"B": Range(1, 1, limits.batch), "T": Range(1, 1, 1), "S": context})
        rows.append({**row, "formulation": label, "graph": f"decode.{label}"})
    return rows


def _context(made: Export, limits: MemoryLimits) -> int:
    return made.max_context if made.cache == "scatter" else limits.context


def _baseline(path: Path, graph: GraphEntry, limits: dict[str, Range]) -> dict[str, Any]:
    sizes = {n: r.max for n, r in limits.items()}
    row: dict[str, Any] = {"backend": "trt-rtx", "kind": "decode", "default": False, "activation_bytes": None,
                           "plan_bytes": None, "weight_bytes": None, "predicted_bytes": lint.live_peak(path, sizes),
                           "limits": {n: [r.min, r.opt, r.max] for n, r in limits.items()}}
    findings = lint.lint(path, sizes)
    if findings:
        return row | {"note": findings[0].message}
    try:
        plan = trt.build("trt-rtx", path, [profile(graph.inputs, limits)])
    except CheckError as error:
        return row | {"note": str(error)}
    return row | {
        "activation_bytes": plan.activation_bytes,
        "plan_bytes": plan.plan_bytes,
        "weight_bytes": plan.weight_bytes,
    }


def _ort(made: Export, limits: MemoryLimits, bench: Workbench, progress: Callable[..., None]) -> list[dict[str, Any]]:
    """Peak of one decode step at batch 1, each subject in a process of its own."""
    if made.cache == "none":
        subjects = [("bidirectional", made.folder / made.graph("prefill").file, made.graph("prefill"))]
        sizes = {"B": 1, "T": limits.chunk}
    else:
        ours = made.graph("decode")
        subjects = [
            ("MLA, latent cache", made.folder / ours.file, ours),
            ("MLA, expanding", *bench.graph("decode", "expanded", "append")),
            ("MHA, full K/V cache", *bench.mha()),
        ]
        sizes = {"B": 1, "T": 1, "S": limits.ort_context}
    rows = []
    for name, path, graph in subjects:
        progress(f"ort: {name}")
        found = measure(path, graph.inputs, graph.outputs, sizes)
        rows.append({"subject": name, "graph": graph.name, "sizes": sizes, "loaded_bytes": found.loaded_bytes,
                     "io_bytes": found.io_bytes, "activation_bytes": found.activation_bytes,
                     "predicted_bytes": lint.live_peak(path, sizes)})
    return rows


def unmeasurable(made: Export) -> str | None:
    """Why ONNX Runtime cannot run a step of this export in a process of its own; None if it can."""
    if made.dtype == "bf16":
        return "ort: not run: ONNX Runtime's CPU has no bfloat16 MatMul"
    try:
        places = external_places(made)
    except InputError as error:
        return f"ort: not run: {error}"
    if places:
        return (f"ort: not run: weights lie outside the folder, in {next(iter(places.values()))}, where a process that "
                "loads the graph alone does not take them; export with --weights copy")
    return None


def report(
    made: Export, limits: MemoryLimits, progress: Callable[..., None] = lambda message, share=None: None
) -> dict[str, Any]:
    """Everything, as one JSON-ready dictionary."""
    if made.contract == "model":
        from validate import model_memory

        return model_memory.report(made, limits, progress)
    not_run: list[str] = []
    tensors = load_tensors(made.data["source"], made.config)
    layers, tokens = made.config.num_hidden_layers, limits.batch * limits.context
    figures = per_token(made.config, made.dtype, made.cache_dtype)
    data: dict[str, Any] = {
        "model": made.data["model"],
        "dtype": made.dtype,
        "cache": made.cache,
        **figures,
        "layers": layers,
        "batch": limits.batch,
        "context": limits.context,
        "cache_bytes": {
            name: figures[f"{name}_bytes_per_token"] * layers * tokens for name in ("latent", "expanded", "mha")
        },
        "cache_bytes_per_layer": {
            name: figures[f"{name}_bytes_per_token"] * tokens for name in ("latent", "expanded", "mha")
        },
        "article": article_case(),
    }
    progress("eager caches")
    data["eager"] = eager_caches(made, tensors, min(64, limits.context)) if made.cache != "none" else []
    if torch.cuda.is_available():
        if made.cache != "none":
            data["eager"] += eager_caches(made, tensors, limits.ort_context, CudaDevice())
    else:
        not_run.append("eager MLA and MHA on CUDA: not run: no CUDA device")
    with tempfile.TemporaryDirectory(prefix="mla-memory-") as temporary:
        # kv_b for the baselines needs its own weight file; the export stays as it is
        bench = Workbench.make(Path(temporary), reopen(made.data["source"]), made.dtype, made.max_context)
        if trt.available("trt-rtx"):
            data["engines"] = _engines(made, limits, bench, progress)
        else:
            data["engines"] = []
            not_run.append("trt-rtx: not run: tensorrt_rtx is not installed (pip install -e '.[rtx]')")
        reason = unmeasurable(made)
        if reason:
            data["ort"] = []
            not_run.append(reason)
        else:
            data["ort"] = _ort(made, limits, bench, progress)
    not_run.append("engines on a device: not run: no CUDA device" if not torch.cuda.is_available() else
                   "engines on a device: run `python -m validate parity` after building them here")
    return data | {"not_run": not_run}
