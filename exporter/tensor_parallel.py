"""The tensor-parallel export (`--tensor-parallel N`): a folder of N ranks, each a model's export of its own whose
graphs are the segments between all-reduces.

    OUT/manifest.json           ranks, bytes, all-reduces; the whole model's configuration and source
    OUT/rank0/ ... rankN-1/     weights.safetensors, prefill.000.qkt.onnx ..., manifest.json

A rank's manifest names, for each kind of graph, the segments in order; its `graphs` are what they make together, with
the inputs and outputs of a model's graph but for the logits, which are its part of the vocabulary's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from exporter import __version__, manifest
from exporter.attention_graph import GraphOptions
from exporter.decoder_config import DecoderConfig
from exporter.decoder_graph import DecoderOptions
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
from exporter.manifest import Export, GraphEntry
from exporter.model_export import copy_text_files, experts_facts, experts_of, interleaved, parameters
from exporter.output import new_folder
from exporter.segments import Segment, build_segment, segment_parts, segments_of
from exporter.shards import check_ranks, rank_source
from exporter.signature import NO_CACHE, decoder_parts, signature
from exporter.source import ModelSource, open_model
from exporter.weight_file import PlannedTensor, StoredTensor
from exporter.weight_store import linkable, store

CONTRACT = "tensor_parallel"


@dataclass(frozen=True)
class Ranks:
    """A tensor-parallel export that was opened: its own manifest, and every rank's export."""

    folder: Path
    data: dict[str, Any]
    ranks: tuple[Export, ...]

    @property
    def decoder(self) -> DecoderConfig:
        """The whole model's configuration."""
        return DecoderConfig.from_dict(self.data["decoder"])


def export_ranks(request: ExportRequest, progress: Callable[..., None]) -> Ranks:
    """Export every rank of a decoder; returns the opened result. InputError where the ranks do not divide it."""
    source = open_model(request.model, seed=request.seed, weights=request.weights != "none", layers=request.slice)
    ranks, config = request.tensor_parallel, source.decoder.attention
    check_ranks(source.decoder, ranks, source.name)
    max_context = rows_of_past(request, config, source.name)
    whole = _plan(request, source, max_context)
    with new_folder(request.out, overwrite=request.overwrite) as folder:
        plans = []
        for rank in range(ranks):
            plan = _plan(request, rank_source(source, ranks, rank), max_context)
            plans.append(plan.tensors(rope_positions(max_context)))
            place = folder / f"rank{rank}"
            place.mkdir()
            _write_rank(request, place, plan, plans[-1], rank, max_context, progress)
        if source.record["kind"] == "checkpoint" and request.weights != "none":
            copy_text_files(Path(source.record["path"]), folder)
        facts = shared_facts(request, config, source.name, max_context, whole.sample.softmax_scale, {})
        manifest.write(folder, facts | {
            "contract": CONTRACT, "source": source.record, "decoder": source.decoder.to_dict(),
            "source_parameters": parameters(source.decoder),
            CONTRACT: _figures(source.decoder, whole.tensors(rope_positions(max_context)), plans)},
            [p for p in sorted(folder.iterdir()) if p.is_file()])
    return open_ranks(request.out)


def _plan(request: ExportRequest, source: ModelSource, max_context: int) -> DecoderPlan:
    return DecoderPlan(source, dtype=request.dtype, folded=request.absorb == "folded",
                       expanded=request.prefill == "expanded", max_context=max_context,
                       layers=range(source.decoder.layers), interleaved=interleaved(request),
                       linkable=lambda stored, dtype: request.weights == "link" and linkable(stored, dtype))


def _write_rank(request: ExportRequest, folder: Path, plan: DecoderPlan, tensors: list[PlannedTensor], rank: int,
                max_context: int, progress: Callable[..., None]) -> None:
    decoder = plan.decoder
    stored, record = store(folder, tensors, request.weights,
                           lambda name, share=None: progress(f"rank {rank}: {name}", share))
    graphs, segments, forms = [], dict[str, list[dict[str, Any]]](), {}
    for kind, formulation, default in graphs_to_write(request, decoder.attention):
        if not default:  # one formulation a kind: there are 2A + 1 files of each
            continue
        progress(f"rank {rank}: {kind}.{formulation.name}")
        experts = experts_of(request, decoder, kind)
        sig = signature(decoder.attention, cache=request.cache, dtype=request.dtype, max_context=max_context,
                        parts=decoder_parts(True, True, request.logits, kind == "prefill"),
                        attentions=decoder.layers * decoder.attentions_per_layer, vocab_size=decoder.head_rows,
                        cache_dtype=request.cache_dtype)
        entry = graph_entry(kind, formulation, True, sig)
        graphs.append(replace(entry, file=""))
        forms[entry.name] = experts
        made = [_write_segment(request, folder, plan, stored, segment, kind, formulation, experts or "", rank)
                for segment in segments_of(decoder)]
        segments[kind] = [e.to_dict() for e in made]
    facts = shared_facts(request, decoder.attention, plan.source.name, max_context, plan.sample.softmax_scale, record)
    manifest.write(folder, facts | {
        "contract": "model", "source": plan.source.record, "decoder": decoder.to_dict(), "layers": [0, decoder.layers],
        "attentions": decoder.layers * decoder.attentions_per_layer, "logits": request.logits,
        "experts": experts_facts(request, decoder, forms), "source_parameters": parameters(decoder),
        "graphs": [g.to_dict() for g in graphs],
        CONTRACT: {"ranks": request.tensor_parallel, "rank": rank, "segments": segments}})


def _write_segment(request: ExportRequest, folder: Path, plan: DecoderPlan, stored: dict[str, StoredTensor],
                   segment: Segment, kind: str, formulation: Formulation, experts: str, rank: int) -> GraphEntry:
    decoder = plan.decoder
    c, attends = decoder.attention, segment.part == "attention"
    parts = segment_parts(decoder, segment, request.logits, kind == "prefill")
    sig = signature(c, cache=request.cache if attends else NO_CACHE, dtype=request.dtype, max_context=plan.max_context,
                    parts=parts, vocab_size=decoder.head_rows, cache_dtype=request.cache_dtype if attends else None)
    name = f"{kind}.{segment.index:03d}.{formulation.name}"
    entry = replace(graph_entry(kind, formulation, True, sig), name=name, file=f"{name}.onnx")
    attention = GraphOptions(c, formulation, request.cache, request.absorb == "folded", c.rope_layout,
                             plan.sample.softmax_scale, kind == "decode", request.target == "ort", request.cache_dtype)
    g = GraphBuilder(DTYPES[request.dtype], stored)
    build_segment(g, DecoderOptions(decoder, attention, plan.layers, parts, experts), segment, rank)
    about = graph_metadata(request, entry, c) | {"mla.rank": f"{rank} of {request.tensor_parallel}",
                                                 "mla.segment": f"{segment.index}: {segment.part}, layer "
                                                                f"{segment.layer}"}
    write_graph(folder, entry, g.model(name, sig.inputs, sig.outputs, __version__, about))
    return entry


def _figures(decoder: DecoderConfig, whole: list[PlannedTensor], ranks: list[list[PlannedTensor]]) -> dict[str, Any]:
    """Bytes of a rank beside the whole model's, what every rank holds alike, and what a step of one token sums up."""
    sizes = {t.name: prod(t.shape) for t in whole}
    alike: dict[str, int] = {}
    for t in ranks[0]:
        if prod(t.shape) == sizes[t.name]:
            group = _group(t.name)
            alike[group] = alike.get(group, 0) + t.nbytes
    reduces = 2 * decoder.layers * decoder.attentions_per_layer
    return {"ranks": len(ranks), "bytes": [sum(t.nbytes for t in r) for r in ranks],
            "whole_bytes": sum(t.nbytes for t in whole), "replicated_bytes": alike, "all_reduces": reduces,
            "all_reduce_bytes_per_token": reduces * decoder.attention.hidden_size * DTYPES["fp32"].itemsize,
            "gathered_bytes_per_sequence": decoder.vocab_size * DTYPES["fp32"].itemsize}


def _group(name: str) -> str:
    """What a replicated tensor is for."""
    for part, group in (("embed_tokens", "embedding"), ("kv_a_", "latent projection"), ("q_a_", "query latent"),
                        ("router", "router"), ("rope.", "rotary tables")):
        if part in name:
            return group
    return "norms and biases"


def open_ranks(folder: Path | str, verify: bool = False) -> Ranks:
    """Open a tensor-parallel export, every rank checked; InputError for another folder, or a rank of another export."""
    folder = Path(folder)
    rebuild = manifest.export_command(folder, " --tensor-parallel N")
    data = manifest.read(folder, "a tensor-parallel export", rebuild, verify)
    if CONTRACT in data and data.get("contract") != CONTRACT:
        raise InputError(f"{folder}: one rank of a tensor-parallel export; expected the folder of all its ranks: "
                         f"{folder.resolve().parent if folder.name in ('', '..') else folder.parent}")
    if data.get("contract") != CONTRACT:
        raise InputError(f"{folder}: an export of one graph; expected one of ranks; make it with: {rebuild}")
    try:
        count = int(data[CONTRACT]["ranks"])
        ranks = tuple(open_rank(folder, rank, verify) for rank in range(count))
        DecoderConfig.from_dict(data["decoder"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / manifest.NAME}: malformed ({type(error).__name__}: {error}); rebuild with: "
                         f"{rebuild}") from None
    return Ranks(folder, data, ranks)


def open_rank(folder: Path, rank: int, verify: bool = False) -> Export:
    """One rank's export, checked."""
    made = manifest.open_export(folder / f"rank{rank}", verify, part=True)
    about, again = made.data.get(CONTRACT, {}), manifest.export_command(made.folder, part=True)
    if about.get("rank") != rank or any(g.kind not in about.get("segments", {}) for g in made.graphs):
        raise InputError(f"{made.folder}: not rank {rank} of a tensor-parallel export; export again with: {again}")
    for entry in (e for g in made.graphs for e in segment_entries(made, g.kind)):
        if entry.file not in made.data["files"]:  # what has a record was found intact, and lies in the folder
            raise InputError(f"{made.folder}: no record of {entry.file!r}, a segment; export again with: {again}")
    return made


def segment_entries(made: Export, kind: str) -> list[GraphEntry]:
    """A rank's segments of a kind of graph, in order."""
    return [GraphEntry.from_dict(e) for e in made.data[CONTRACT]["segments"][kind]]
