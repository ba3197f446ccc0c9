"""Faults of the field in whole models, planted in the graphs of an export made aside, each with its red rungs.

`python -m validate parity CHECKPOINT --plant NAME` must exit with 1. What a misread configuration would change is
planted where it ends up: as a constant or a wire of the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporter import manifest
from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.manifest import Export
from validate.faults import one_row_too_many

Plant = Callable[[onnx.GraphProto, DecoderConfig], int]


@dataclass(frozen=True)
class ModelFault:
    """`red` names rungs that must fail; `plant` changes a graph and says in how many places; `applies` tells for which
    models the fault exists at all, `cache` in which cache form alone."""

    name: str
    what: str
    red: tuple[str, ...]
    plant: Plant
    applies: Callable[[DecoderConfig], bool]
    cache: str | None = None


def _constant(name: str, value: float) -> Plant:
    """A named scalar takes another value."""
    def plant(graph: onnx.GraphProto, decoder: DecoderConfig) -> int:
        found = [t for t in graph.initializer if t.name == name]
        for tensor in found:
            values = numpy_helper.to_array(tensor)
            tensor.CopyFrom(numpy_helper.from_array(np.full(values.shape, value).astype(values.dtype), name))
        return len(found)

    return plant


def _routers(graph: onnx.GraphProto) -> dict[str, dict[str, onnx.NodeProto]]:
    """Router nodes by the layer's scope, then by their own name."""
    found: dict[str, dict[str, onnx.NodeProto]] = {}
    for node in graph.node:
        scope, _, name = node.name.rpartition("/")
        if scope.rpartition("/")[2] == "router":
            found.setdefault(scope, {})[name] = node
    return found


def _weigh_with_bias(graph: onnx.GraphProto, decoder: DecoderConfig) -> int:
    routers = _routers(graph).values()
    for nodes in routers:
        nodes["chosen_scores"].input[0] = nodes["choice"].output[0]
    return len(routers)


def _ungroup(graph: onnx.GraphProto, decoder: DecoderConfig) -> int:
    routers = _routers(graph).values()
    for nodes in routers:
        nodes["top_k"].input[0] = nodes["by_group"].input[0]
    return len(routers)


def _unscale_latent(graph: onnx.GraphProto, decoder: DecoderConfig) -> int:
    """Divide every normed latent by the factor that its gain carries."""
    norms = [(i, n) for i, n in enumerate(graph.node) if n.name.endswith("row/kv_a_norm")]
    kind = next(t.data_type for t in graph.initializer if t.name == norms[0][1].input[1])
    factor = np.array(1 / decoder.attention.latent_scale).astype(helper.tensor_dtype_to_np_dtype(kind))
    graph.initializer.append(numpy_helper.from_array(factor, "fault/latent_scale"))
    for place, norm in reversed(norms):
        name = norm.output[0]
        norm.output[0] = f"{name}/scaled"
        graph.node.insert(place + 1, helper.make_node("Mul", [norm.output[0], "fault/latent_scale"], [name],
                                                      name=f"{norm.name}/fault"))
    return len(norms)


def _token_before_last(graph: onnx.GraphProto, decoder: DecoderConfig) -> int:
    readers = [n for n in graph.node if "last_token" in n.input]
    for node in readers:
        node.input[:] = ["fault/before" if name == "last_token" else name for name in node.input]
    if readers:
        graph.initializer.extend([helper.make_tensor("fault/one", TensorProto.INT64, [], [1]),
                                  helper.make_tensor("fault/zero", TensorProto.INT64, [], [0])])
        graph.node.insert(0, helper.make_node("Sub", ["last_token", "fault/one"], ["fault/less"], name="fault/less"))
        graph.node.insert(1, helper.make_node("Max", ["fault/less", "fault/zero"], ["fault/before"], name="fault/max"))
    return len(readers)


def _scaled_router(d: DecoderConfig) -> bool:
    return d.moe is not None and d.moe.routed_scaling_factor != 1


_PREFILL, _DECODE = ("interpreter/prefill", "ort/prefill"), ("interpreter/decode", "ort/decode")
_BOTH = (*_PREFILL, *_DECODE)
FAULTS = {f.name: f for f in (
    ModelFault("routed-scale-dropped", "the experts' weights not multiplied by routed_scaling_factor", _BOTH,
               _constant("routed_scaling_factor", 1.0), _scaled_router),
    ModelFault("choice-bias-as-weight", "the bias that only chooses experts also weighs them", _BOTH, _weigh_with_bias,
               lambda d: d.moe is not None and d.moe.choice_bias),
    ModelFault("groups-ignored", "experts chosen among all, not among the best groups", _BOTH, _ungroup,
               lambda d: d.moe is not None and d.moe.limited),
    ModelFault("residual-scale-dropped", "branches added without their factor", _BOTH, _constant("residual_scale", 1.0),
               lambda d: d.residual_scale != 1),
    ModelFault("embedding-scale-dropped", "the embedding not multiplied by its factor", _BOTH,
               _constant("embedding_scale", 1.0), lambda d: d.embedding_scale != 1),
    ModelFault("latent-scale-dropped", "the latent cached without its factor",
               ("interpreter/prefill/cache", "ort/prefill/cache", *_BOTH), _unscale_latent,
               lambda d: d.attention.latent_scale != 1),
    ModelFault("query-temperature-dropped", "the query does not grow with its position",
               ("interpreter/far", "ort/far"), _constant("llama_4_scaling_beta", 0.0),
               lambda d: bool(d.attention.rope.llama_4_scaling_beta)),
    ModelFault("last-token-off-by-one", "logits of the token before the last", _PREFILL, _token_before_last,
               lambda d: True),
    ModelFault("scatter-one-too-many", "the scatter cache written one row too far",
               ("interpreter/untouched", "ort/untouched"), lambda graph, decoder: one_row_too_many(graph),
               lambda d: True, "scatter"),
)}


def fault(name: str, decoder: DecoderConfig) -> ModelFault:
    """A fault by name that exists for this model; else an InputError listing those that do."""
    known = [f.name for f in FAULTS.values() if f.applies(decoder)]
    if name not in known:
        raise InputError(f"--plant {name!r}: expected one of {', '.join(known)} for {decoder.attention.model_type}")
    return FAULTS[name]


def plant(made: Export, chosen: ModelFault) -> Export:
    """Change an export's graphs in place, its manifest with them; returns it opened anew."""
    places = 0
    for graph in made.graphs:
        path = made.folder / graph.file
        model = onnx.load(path, load_external_data=False)
        places += chosen.plant(model.graph, made.decoder)
        path.write_bytes(model.SerializeToString())
    if not places:
        raise InputError(f"--plant {chosen.name}: no graph of {made.folder} has a place for it")
    data = dict(made.data)
    data["files"] = {name: manifest.file_record(made.folder / name) for name in data["files"]}
    manifest.rewrite(made.folder, data)
    return manifest.open_export(made.folder)
