"""The export itself: a source in, a folder of graphs over one weight file out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx

from exporter import __version__, manifest
from exporter.attention_graph import GraphOptions, build_attention
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.formulations import TARGETS, Formulation, choose
from exporter.graph import OPSET, GraphBuilder, infer_and_check
from exporter.manifest import GraphEntry
from exporter.output import new_folder
from exporter.rope import BLOCK
from exporter.signature import CACHE_FORMS, NO_CACHE, signature
from exporter.source import Source, open_source
from exporter.weight_file import StoredTensor, write_weights
from exporter.weights import AttentionWeights, folding_price, load_attention, merge_query, plan_weights

WEIGHT_FILE = "weights.safetensors"
MAX_ROWS = 1 << 24


@dataclass(frozen=True)
class ExportRequest:
    """What `python -m exporter export` was asked for; see its --help for each option."""

    model: str
    out: Path
    layer: int | None = None
    dtype: str = "fp32"
    cache: str = "append"
    target: str = "ort"
    prefill: str = "absorbed"
    absorb: str = "factored"
    causal: bool = True
    merge_q: bool = False
    max_context: int | None = None
    max_batch: int = 8
    seed: int = 0
    overwrite: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", tuple(DTYPES)), ("cache", CACHE_FORMS), ("target", TARGETS),
                              ("prefill", ("absorbed", "expanded")), ("absorb", ("factored", "folded"))):
            if getattr(self, name) not in allowed:
                raise InputError(f"--{name} {getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        if self.cache == "scatter" and self.max_context is None and self.causal:
            raise InputError("--cache scatter preallocates its rows: give their number with --max-context N")
        for name in ("max_context", "max_batch"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_ROWS:
                raise InputError(f"--{name.replace('_', '-')} {value}: expected 1 to {MAX_ROWS}")
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed {self.seed}: expected a number from 0 up")


def arguments(request: ExportRequest) -> list[str]:
    """The command line that makes this export again, without --out."""
    words = [request.model]
    for field in fields(request):
        value = getattr(request, field.name)
        if field.name in ("model", "out", "overwrite") or value == field.default:
            continue
        option = f"--{field.name.replace('_', '-')}"
        words += [option] if value is True else [option, "off"] if value is False else [option, str(value)]
    return words


@dataclass(frozen=True)
class Tamper:
    """Faults to plant after the weights are loaded, so that a check can be shown to catch them."""

    weights: Callable[[AttentionWeights], None] | None = None
    graph: Callable[[onnx.ModelProto], None] | None = None


def rope_positions(max_context: int) -> int:
    """Positions that the rotary tables cover: a full past, and as many new tokens (padding included) behind it."""
    return 2 * max_context + BLOCK


def export(request: ExportRequest, progress: Callable[[str], None] = lambda message: None,
           tamper: Tamper | None = None) -> manifest.Export:
    """Export one attention; returns the opened result. InputError on bad input, with nothing left behind."""
    source = open_source(request.model, layer=request.layer, seed=request.seed, allow_pickle=request.allow_pickle)
    max_context = request.max_context or source.config.max_position_embeddings
    if max_context > MAX_ROWS:
        raise InputError(f"{source.name}: max_position_embeddings is {max_context}, at most {MAX_ROWS} rows are "
                         "possible; choose their number with --max-context N")
    with new_folder(request.out, overwrite=request.overwrite) as folder:
        weights = load_attention(source, max_context)
        if request.merge_q:
            merge_query(weights)
        if tamper and tamper.weights:
            tamper.weights(weights)
        plan = plan_weights(weights, dtype=request.dtype, folded=request.absorb == "folded",
                            expanded=request.prefill == "expanded", positions=rope_positions(max_context))
        stored = write_weights(folder / WEIGHT_FILE, plan, progress)
        entries = []
        for kind, formulation, default in _graphs(request, source):
            progress(f"{kind}.{formulation.name}")
            entry, model = build_graph(request, weights, max_context, stored, kind, formulation, default)
            if tamper and tamper.graph:
                tamper.graph(model)
            model = infer_and_check(model, folder)
            (folder / entry.file).write_bytes(model.SerializeToString())
            entries.append(entry)
        manifest.write(folder, _manifest(request, source, weights, max_context, stored, entries))
    return manifest.open_export(request.out)


def _cache(request: ExportRequest) -> str:
    return request.cache if request.causal else NO_CACHE


def _graphs(request: ExportRequest, source: Source) -> list[tuple[str, Formulation, bool]]:
    """(kind, formulation, default) of every graph to write."""
    kinds = [("prefill", request.prefill)] + ([("decode", "absorbed")] if request.causal else [])
    graphs = []
    for kind, form in kinds:
        options = choose(source.config, target=request.target, dtype=request.dtype, prefill_form=form)
        graphs += [(kind, f, i == 0) for i, f in enumerate(options)]
    return graphs


def build_graph(request: ExportRequest, weights: AttentionWeights, max_context: int, stored: dict[str, StoredTensor],
                kind: str, formulation: Formulation, default: bool) -> tuple[GraphEntry, onnx.ModelProto]:
    """One graph and its manifest entry; any registered formulation, whether or not the request's target takes it."""
    c, cache = weights.config, _cache(request)
    sig = signature(c, cache=cache, dtype=request.dtype, max_context=max_context)
    entry = GraphEntry(f"{kind}.{formulation.name}", kind, formulation.name, formulation.prefill_form, default,
                       f"{kind}.{formulation.name}.onnx", sig.inputs, sig.outputs)
    g = GraphBuilder(DTYPES[request.dtype], stored, WEIGHT_FILE)
    build_attention(g, GraphOptions(c, formulation, cache, request.absorb == "folded", weights.rope_layout,
                                    weights.softmax_scale))
    metadata = {"mla.kind": kind, "mla.formulation": formulation.name, "mla.prefill_form": formulation.prefill_form,
                "mla.cache": cache, "mla.dtype": request.dtype, "mla.config": json.dumps(c.to_dict())}
    return entry, g.model(entry.name, sig.inputs, sig.outputs, __version__, metadata)


def _manifest(request: ExportRequest, source: Source, weights: AttentionWeights, max_context: int,
              stored: dict[str, StoredTensor], entries: list[GraphEntry]) -> dict[str, Any]:
    return {
        "contract": "layer",
        "arguments": arguments(request),
        "opset": OPSET,
        "source": source.record,
        "model": source.name,
        "config": source.config.to_dict(),
        "cache": _cache(request),
        "dtype": request.dtype,
        "target": request.target,
        "prefill": request.prefill,
        "absorb": request.absorb,
        "causal": request.causal,
        "merge_q": request.merge_q,
        "max_context": max_context,
        "max_batch": request.max_batch,
        "softmax_scale": weights.softmax_scale,
        "rope_positions": rope_positions(max_context),
        "folding_price": folding_price(source.config),
        "weights": {
            "file": WEIGHT_FILE,
            "bytes": sum(t.nbytes for t in stored.values()),
            "parameters": {name: int(t.nbytes // DTYPES[t.dtype].itemsize) for name, t in stored.items()},
        },
        "libraries": manifest.library_versions("numpy", "onnx", "ml_dtypes"),
        "graphs": [e.to_dict() for e in entries],
    }
