"""The export of a whole decoder, or of a slice of its layers (`--scope model`, `--layers A:B`)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import onnx

from exporter import __version__, manifest
from exporter.attention_graph import GraphOptions
from exporter.decoder_config import DecoderConfig, tensor_shapes
from exporter.decoder_graph import DecoderOptions, build_decoder
from exporter.decoder_weights import DecoderPlan
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.export import (
    ExportRequest,
    graph_entry,
    graph_metadata,
    graphs_to_write,
    rope_positions,
    rows_of_past,
    shared_facts,
    write_graph,
)
from exporter.formulations import Formulation
from exporter.graph import GraphBuilder
from exporter.manifest import GraphEntry
from exporter.moe_graph import dense_from, experts_form, gather_scratch
from exporter.output import new_folder
from exporter.signature import decoder_parts, signature
from exporter.source import open_model
from exporter.weight_file import StoredTensor
from exporter.weight_store import linkable, store

TEXT_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
              "special_tokens_map.json")


def export_model(request: ExportRequest, progress: Callable[..., None]) -> manifest.Export:
    """Export a decoder; returns the opened result."""
    source = open_model(request.model, seed=request.seed, weights=request.weights != "none", layers=request.slice)
    decoder, config = source.decoder, source.decoder.attention
    layers = request.slice(decoder.layers)
    if request.logits == "all" and layers.stop < decoder.layers:
        raise InputError(f"--logits all with --layers {request.layers}: the slice ends before the head, so no logits")
    max_context = rows_of_past(request, config, source.name)
    with new_folder(request.out, overwrite=request.overwrite) as folder:
        plan = DecoderPlan(
            source, dtype=request.dtype, folded=request.absorb == "folded", expanded=request.prefill == "expanded",
            max_context=max_context, layers=layers, interleaved=interleaved(request), coded=coded(request, decoder),
            linkable=lambda stored, dtype: (request.weights == "link" and request.quantise is None
                                            and linkable(stored, dtype)))
        stored, record = store(folder, plan.tensors(rope_positions(max_context)), request.weights, progress,
                               request.scheme)
        entries, forms = [], {}
        for kind, formulation, default in graphs_to_write(request, config):
            progress(f"{kind}.{formulation.name}")
            experts = experts_of(request, decoder, kind)
            entry, model = _graph(request, decoder, layers, plan.sample.softmax_scale, max_context, stored, kind,
                                  formulation, default, experts)
            write_graph(folder, entry, model)
            entries.append(entry)
            forms[entry.name] = experts
        if source.record["kind"] == "checkpoint" and request.weights != "none":
            copy_text_files(Path(source.record["path"]), folder)
        facts = shared_facts(request, config, source.name, max_context, plan.sample.softmax_scale, record)
        manifest.write(folder, facts | {
            "contract": "model", "source": source.record, "decoder": decoder.to_dict(),
            "layers": [layers.start, layers.stop], "attentions": len(layers) * decoder.attentions_per_layer,
            "logits": request.logits, "experts": experts_facts(request, decoder, forms),
            "source_parameters": parameters(decoder, layers), "graphs": [e.to_dict() for e in entries]})
    return manifest.open_export(request.out)


def copy_text_files(checkpoint: Path, folder: Path) -> None:
    """What turns text into ids and back, so that the folder generates without the checkpoint (data files, no code)."""
    for name in TEXT_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, folder / name)


def parameters(decoder: DecoderConfig, layers: range | None = None) -> int:
    """Parameters of a decoder, or of a slice, as its checkpoint holds them."""
    return sum(prod(shape) for shape in tensor_shapes(decoder, layers).values())


def active_parameters(decoder: DecoderConfig) -> int:
    """Parameters that one token meets: all but the experts that were not chosen."""
    moe = decoder.moe
    if moe is None:
        return parameters(decoder)
    idle = max(0, moe.n_routed_experts - moe.num_experts_per_tok)
    return parameters(decoder) - (idle * 3 * moe.moe_intermediate_size * decoder.attention.hidden_size
                                  * len(decoder.sparse_layers))


def interleaved(request: ExportRequest) -> bool:
    """Whether experts are written for ONNX Runtime's MoE operator; its gate and up rows alternate."""
    if request.experts == "fused" and request.target != "ort":
        raise InputError(f"--experts fused: ONNX Runtime's operator; --target {request.target} takes gather or dense")
    return request.target == "ort" and request.experts in ("auto", "fused")


def coded(request: ExportRequest, decoder: DecoderConfig) -> frozenset[str]:
    """What may be codes beside attentions and FFNs, of a decoder's `head` and `experts`. TensorRT's head stays wide;
    QMoE takes one block size for all matrices of an expert."""
    scheme = request.scheme
    if scheme is None or request.target != "ort":
        return frozenset({"experts"})
    moe = decoder.moe
    alike = moe is not None and scheme.alike(decoder.attention.hidden_size, moe.moe_intermediate_size)
    return frozenset({"head", "experts"} if alike else {"head"})


def experts_of(request: ExportRequest, decoder: DecoderConfig, kind: str) -> str | None:
    """The MoE form of a kind of graph; None where every FFN is dense."""
    if decoder.moe is None or not decoder.sparse_layers:
        return None
    if request.experts != "auto":
        return request.experts
    # a prefill brings hundreds of tokens; a decode step one of each sequence
    tokens = request.max_batch if kind == "decode" else 1 << 20
    return experts_form(decoder.moe, request.target, tokens, decoder.attention.hidden_size)


def experts_facts(request: ExportRequest, decoder: DecoderConfig, forms: dict[str, str | None]) -> dict[str, Any]:
    """What the manifest says of the experts, `forms` by graph."""
    moe = decoder.moe
    if moe is None or not any(forms.values()):
        return {}
    hidden, itemsize = decoder.attention.hidden_size, DTYPES[request.dtype].itemsize
    facts: dict[str, Any] = {"forms": forms}
    if request.target != "ort":
        facts |= {"dense_from_tokens": dense_from(moe, hidden),
                  "gather_bytes_per_token": gather_scratch(moe, hidden, 1, itemsize)}
    return facts


def _graph(request: ExportRequest, decoder: DecoderConfig, layers: range, softmax_scale: float, max_context: int,
           stored: dict[str, StoredTensor], kind: str, formulation: Formulation, default: bool, experts: str | None,
           ) -> tuple[GraphEntry, onnx.ModelProto]:
    c = decoder.attention
    parts = decoder_parts(layers.start == 0, layers.stop == decoder.layers, request.logits, kind == "prefill")
    sig = signature(c, cache=request.cache, dtype=request.dtype, max_context=max_context, parts=parts,
                    attentions=len(layers) * decoder.attentions_per_layer, vocab_size=decoder.vocab_size,
                    cache_dtype=request.cache_dtype)
    entry = graph_entry(kind, formulation, default, sig)
    g = GraphBuilder(DTYPES[request.dtype], stored, request.inside)
    attention = GraphOptions(c, formulation, request.cache, request.absorb == "folded", c.rope_layout, softmax_scale,
                             kind == "decode", request.target == "ort", request.cache_dtype)
    build_decoder(g, DecoderOptions(decoder, attention, layers, parts, experts or ""))
    return entry, g.model(entry.name, sig.inputs, sig.outputs, __version__, graph_metadata(request, entry, c))
