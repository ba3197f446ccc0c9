"""The export itself: a source in, a folder of graphs over one set of weights out; one attention, or a whole decoder."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import onnx

from exporter import __version__, manifest
from exporter.attention_graph import GraphOptions, build_layer
from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.formulations import TARGETS, Formulation, choose
from exporter.graph import OPSET, GraphBuilder, infer_and_check
from exporter.manifest import GraphEntry
from exporter.moe_graph import FORMS
from exporter.output import new_folder
from exporter.quantise import ACCURACY_LEVELS, BLOCK_SIZES, SCHEMES, Scheme, scheme_for
from exporter.rope import BLOCK, longrope_set
from exporter.signature import CACHE_DTYPES, CACHE_FORMS, NO_CACHE, Signature, signature
from exporter.source import Source, open_source
from exporter.weight_file import StoredTensor
from exporter.weight_store import MODES, relinked, store
from exporter.weights import (
    AttentionWeights,
    folding_price,
    load_attention,
    merge_query,
    plan_rope,
    plan_weights,
)

MAX_ROWS = 1 << 24


@dataclass(frozen=True)
class ExportRequest:
    """What `python -m exporter export` was asked for; see its --help for each option."""

    model: str
    out: Path
    scope: str | None = None
    layer: int | None = None
    layers: str | None = None
    dtype: str = "fp32"
    cache: str = "append"
    cache_dtype: str | None = None
    target: str = "ort"
    prefill: str = "absorbed"
    absorb: str = "factored"
    causal: bool = True
    merge_q: bool = False
    max_context: int | None = None
    max_batch: int = 8
    seed: int = 0
    weights: str = "copy"
    logits: str = "last"
    experts: str = "auto"
    quantise: str | None = None
    block_size: int | None = None
    accuracy_level: int | None = None
    fused_decode: bool = False
    tensor_parallel: int = 1
    overwrite: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("dtype", tuple(DTYPES)), ("cache", CACHE_FORMS),
                              ("cache_dtype", (None, *CACHE_DTYPES)), ("target", TARGETS),
                              ("prefill", ("absorbed", "expanded")), ("absorb", ("factored", "folded")),
                              ("scope", (None, "model", "layer")), ("weights", MODES), ("logits", ("last", "all")),
                              ("experts", ("auto", *FORMS)), ("quantise", (None, *SCHEMES))):
            if getattr(self, name) not in allowed:
                choices = ", ".join(a for a in allowed if a)
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)!r}: expected one of {choices}")
        if not self.causal and self.cache != "append":
            raise InputError(f"--cache {self.cache} with --causal off: there is no cache then; leave --cache out")
        if self.cache == "scatter" and self.max_context is None and self.causal:
            raise InputError("--cache scatter preallocates its rows: give their number with --max-context N")
        if self.cache_dtype and (self.cache != "append" or not self.causal):
            what = f"--cache {self.cache}" if self.causal else "--causal off, which has no cache"
            raise InputError(f"--cache-dtype {self.cache_dtype} with {what}: only the append form has quantised rows; "
                             "leave one of the two out")
        for name in ("max_context", "max_batch"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_ROWS:
                raise InputError(f"--{name.replace('_', '-')} {value}: expected 1 to {MAX_ROWS}")
        self._check_operator_options()
        if self.fused_decode:
            self._check_fused()
        if self.quantise and (self.absorb == "folded" or self.merge_q):
            raise InputError(f"--quantise {self.quantise} with {'--merge-q' if self.merge_q else '--absorb folded'}: "
                             "products of weights stay wide, and these would be most of the weights; leave it out")
        if self.tensor_parallel != 1:
            self._check_ranks_options()
        if not 0 <= self.seed < 1 << 63:
            raise InputError(f"--seed {self.seed}: expected a number from 0 up")
        if self.whole:
            self._check_model_options()
        else:
            self._check_layer_options()
        if self.scheme and self.target == "ort" and self.experts not in ("auto", "fused"):
            raise InputError(f"--quantise {self.quantise} with --target ort and --experts {self.experts}: only the "
                             "fused form, ONNX Runtime's QMoE, computes with codes; leave --experts out")

    @property
    def scheme(self) -> Scheme | None:
        """How weights are quantised. InputError for a scheme that the target does not have."""
        return scheme_for(self.quantise, self.target, self.block_size, self.accuracy_level) if self.quantise else None

    @property
    def inside(self) -> int | None:
        """The accuracy level of products over packed codes; None where there are none."""
        return self.scheme.accuracy_level if self.scheme else None

    @property
    def whole(self) -> bool:
        """Whether MODEL is exported as a decoder: asked for, or a checkpoint folder of which no layer was named."""
        folder = Path(self.model).is_dir() or Path(self.model).name == "config.json"
        return self.scope == "model" or (self.scope is None and self.layer is None and folder)

    def _check_operator_options(self) -> None:
        """Options of ONNX Runtime's operators over codes."""
        for name, allowed in (("block_size", BLOCK_SIZES), ("accuracy_level", ACCURACY_LEVELS)):
            value = getattr(self, name)
            if value is None:
                continue
            option = f"--{name.replace('_', '-')} {value}"
            if value not in allowed:
                raise InputError(f"{option}: expected one of {', '.join(map(str, sorted(allowed)))}")
            if self.target != "ort" or not self.quantise:
                given = f"--target {self.target}" if self.quantise else "no --quantise"
                raise InputError(f"{option} with {given}: it is of MatMulNBits; give --target ort and --quantise int8 "
                                 "or int4, or leave it out")

    def _check_fused(self) -> None:
        """What the operator takes."""
        for option, given, expected in (("--target", self.target, "ort"), ("--dtype", self.dtype, "fp32"),
                                        ("--cache", self.cache, "append"), ("--cache-dtype", self.cache_dtype, None),
                                        ("--causal", "on" if self.causal else "off", "on")):
            if given != expected:
                remedy = f"give {option} {expected}" if expected else f"leave {option} out"
                raise InputError(f"--fused-decode with {option} {given}: the operator mla::LatentAttention decodes in "
                                 f"float32 over an append cache of float32, in ONNX Runtime; {remedy}, or leave "
                                 "--fused-decode out")

    def _check_ranks_options(self) -> None:
        """Options that the ranks of a tensor-parallel export cannot have."""
        if not self.whole:
            raise InputError(f"--tensor-parallel {self.tensor_parallel}: splits a model; give --scope model")
        if self.layers is not None:
            raise InputError(f"--layers {self.layers} with --tensor-parallel: ranks hold whole models; leave one out")
        if self.quantise:
            raise InputError(f"--quantise {self.quantise} with --tensor-parallel: a rank's scales would be of its own "
                             "columns, not the whole model's; leave one of the two out")

    def _check_model_options(self) -> None:
        """Options that mean something for one attention only."""
        if self.layer is not None:
            raise InputError(f"--layer {self.layer}: names one attention; with --scope model give --layers A:B")
        if not self.causal:
            raise InputError("--causal off: a decoder is causal; for one attention alone give --scope layer")
        if self.merge_q:
            raise InputError("--merge-q: no decoder has a query low rank without a norm; it is for --scope layer")

    def _check_layer_options(self) -> None:
        """Options that mean something for a decoder only."""
        if self.layers is not None:
            raise InputError(f"--layers {self.layers}: a slice of a decoder; give --scope model")
        for name in ("logits", "experts"):
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise InputError(f"--{name} {value}: one attention has none; give --scope model")

    def slice(self, depth: int) -> range:
        """`--layers A:B` of a decoder of `depth` layers."""
        if self.layers is None:
            return range(depth)
        start, colon, stop = self.layers.partition(":")
        try:
            chosen = range(int(start or 0), int(stop or depth))
        except ValueError:
            chosen = range(0)
        if not colon or not chosen or chosen.start < 0 or chosen.stop > depth:
            raise InputError(f"--layers {self.layers!r}: expected A:B with 0 <= A < B <= {depth}, layers A to B - 1")
        return chosen


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


def export(request: ExportRequest, progress: Callable[..., None] = lambda message, share=None: None,
           tamper: Tamper | None = None) -> manifest.Export:
    """Export one attention, or a decoder; returns the opened result. InputError on bad input, nothing left behind."""
    if request.tensor_parallel != 1:
        raise InputError(f"--tensor-parallel {request.tensor_parallel}: makes an export of ranks, not of one graph")
    if request.whole:
        from exporter.model_export import export_model

        return export_model(request, progress)
    source = open_source(request.model, layer=request.layer, seed=request.seed, allow_pickle=request.allow_pickle)
    return export_attention(request, source, progress, tamper)


def export_attention(request: ExportRequest, source: Source,
                     progress: Callable[..., None] = lambda message, share=None: None,
                     tamper: Tamper | None = None) -> manifest.Export:
    """Export one attention whose source is open already; parity finds it again only if its record says where."""
    max_context = rows_of_past(request, source.config, source.name)
    with new_folder(request.out, overwrite=request.overwrite) as folder:
        weights = load_attention(source, max_context)
        if request.merge_q:
            merge_query(weights)
        if tamper and tamper.weights:
            tamper.weights(weights)
        plan = plan_weights(weights, dtype=request.dtype, folded=request.absorb == "folded",
                            expanded=request.prefill == "expanded")
        plan += plan_rope(weights.inv_freq, weights.rope_factor, rope_positions(max_context))
        stored, record = store(folder, plan, request.weights, progress, request.scheme)
        entries = []
        for kind, formulation, default in graphs_to_write(request, source.config):
            progress(f"{kind}.{formulation.name}")
            entry, model = build_graph(request, weights, max_context, stored, kind, formulation, default)
            if tamper and tamper.graph:
                tamper.graph(model)
            write_graph(folder, entry, model)
            entries.append(entry)
        facts = shared_facts(request, source.config, source.name, max_context, weights.softmax_scale, record)
        manifest.write(folder, facts | {"contract": "layer", "source": source.record,
                                        "graphs": [e.to_dict() for e in entries]})
    return manifest.open_export(request.out)


def rows_of_past(request: ExportRequest, config: MLAConfig, name: str) -> int:
    """`--max-context`, or the source's own; an InputError where that is beyond any cache."""
    trained = config.max_position_embeddings
    rows = request.max_context or (min(trained, config.exact_rows) if config.exact_rows else trained)
    if config.exact_rows and rows > config.exact_rows:
        raise InputError(f"--max-context {rows}: {name} attends all rows up to index_topk = {config.exact_rows} and "
                         f"only chosen ones beyond, which this graph does not; give at most {config.exact_rows}")
    if rows > MAX_ROWS:
        raise InputError(f"{name}: max_position_embeddings is {rows}, at most {MAX_ROWS} rows are possible; choose "
                         "their number with --max-context N")
    return rows


def write_graph(folder: Path, entry: GraphEntry, model: onnx.ModelProto) -> None:
    """Infer shapes, check, and write one graph."""
    (folder / entry.file).write_bytes(infer_and_check(model, folder).SerializeToString())


def _cache(request: ExportRequest) -> str:
    return request.cache if request.causal else NO_CACHE


def graphs_to_write(request: ExportRequest, config: MLAConfig) -> list[tuple[str, Formulation, bool]]:
    """(kind, formulation, default) of every graph to write."""
    kinds = [("prefill", request.prefill)] + ([("decode", "absorbed")] if request.causal else [])
    graphs = []
    for kind, form in kinds:
        options = choose(config, target=request.target, dtype=request.dtype, prefill_form=form, kind=kind,
                         quantised=request.cache_dtype is not None, operator=request.fused_decode)
        graphs += [(kind, f, i == 0) for i, f in enumerate(options)]
    return graphs


def graph_entry(kind: str, formulation: Formulation, default: bool, sig: Signature) -> GraphEntry:
    """The manifest's entry of a graph."""
    name = f"{kind}.{formulation.name}"
    return GraphEntry(name, kind, formulation.name, formulation.prefill_form, default, f"{name}.onnx", sig.inputs,
                      sig.outputs)


def graph_metadata(request: ExportRequest, entry: GraphEntry, config: MLAConfig) -> dict[str, str]:
    """What a graph says of itself."""
    return {"mla.kind": entry.kind, "mla.formulation": entry.formulation, "mla.prefill_form": entry.prefill_form,
            "mla.cache": _cache(request), "mla.dtype": request.dtype,
            "mla.cache_dtype": request.cache_dtype or request.dtype, "mla.config": json.dumps(config.to_dict())}


def build_graph(request: ExportRequest, weights: AttentionWeights, max_context: int, stored: dict[str, StoredTensor],
                kind: str, formulation: Formulation, default: bool) -> tuple[GraphEntry, onnx.ModelProto]:
    """One attention's graph and its manifest entry; any registered formulation, whether or not the target takes it."""
    c, cache = weights.config, _cache(request)
    sig = signature(c, cache=cache, dtype=request.dtype, max_context=max_context, cache_dtype=request.cache_dtype)
    entry = graph_entry(kind, formulation, default, sig)
    g = GraphBuilder(DTYPES[request.dtype], stored, request.inside)
    build_layer(g, GraphOptions(c, formulation, cache, request.absorb == "folded", weights.rope_layout,
                                weights.softmax_scale, kind == "decode", request.target == "ort", request.cache_dtype))
    return entry, g.model(entry.name, sig.inputs, sig.outputs, __version__, graph_metadata(request, entry, c))


def shared_facts(request: ExportRequest, config: MLAConfig, name: str, max_context: int, softmax_scale: float,
                 weights: dict[str, Any]) -> dict[str, Any]:
    """The manifest's facts that both scopes have."""
    same = ("dtype", "cache_dtype", "target", "prefill", "absorb", "causal", "merge_q", "max_batch")
    return {"arguments": arguments(request), "opset": OPSET, "model": name, "config": config.to_dict(),
            "cache": _cache(request), **{field: getattr(request, field) for field in same}, "max_context": max_context,
            "row_multiple": _row_multiple(request, config), "softmax_scale": softmax_scale,
            "rope_positions": rope_positions(max_context), "longrope": longrope_set(config, max_context),
            "folding_price": folding_price(config), "weights": weights,
            "libraries": manifest.library_versions("numpy", "onnx", "ml_dtypes")}


def _row_multiple(request: ExportRequest, config: MLAConfig) -> int:
    """What S should be a multiple of in a decode step, by the default graph: 1 where it does not matter."""
    found = [f for kind, f, default in graphs_to_write(request, config) if kind == "decode" and default]
    return found[0].row_multiple(config, request.target) if found and _cache(request) == "append" else 1


def relink(folder: Path, checkpoint: Path) -> manifest.Export:
    """Point an export whose weights lie in a checkpoint (`--weights link`) to that checkpoint in another place."""
    data = manifest.read(folder, "an exported folder", "python -m exporter export MODEL --out DIR --weights link")
    if not data.get("weights", {}).get("linked"):
        raise InputError(f"--relink: the weights of {folder} do not lie in a checkpoint, nothing is to be pointed anew")
    if not checkpoint.is_dir():
        raise InputError(f"--relink: {checkpoint} is not a folder; expected the checkpoint in its new place")
    data["weights"] = relinked(folder, data["weights"], checkpoint)
    data["source"] = {**data["source"], "path": str(checkpoint.resolve())}
    manifest.rewrite(folder, data)
    return manifest.open_export(folder, part="tensor_parallel" in data)
