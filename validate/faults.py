"""Faults of the field, planted after the weights are loaded, each with the rung that must turn red.

They show that a green ladder means something: `python -m validate parity MODEL --plant NAME` must exit with 1. Each row
says what a user would see and which rungs find it first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import TensorProto, helper

from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.export import Tamper
from exporter.weights import AttentionWeights


@dataclass(frozen=True)
class Fault:
    """`red` names rungs (by prefix) that must fail; `applies` tells for which layers the fault exists at all, and
    `cache` in which cache form alone."""

    name: str
    what: str
    red: tuple[str, ...]
    tamper: Tamper
    applies: Callable[[MLAConfig], bool] = lambda config: True
    cache: str | None = None


def _kv_b_order(w: AttentionWeights) -> None:
    H, nope, d_c = w.w_uk.shape
    rows = np.concatenate([w.w_uk, w.w_uv], axis=1).reshape(-1, d_c)  # as kv_b_proj stores them: per head K, V
    w.w_uk, w.w_uv = rows[:H * nope].reshape(H, nope, d_c), rows[H * nope:].reshape(H, -1, d_c)


def _scale_from_rank(w: AttentionWeights) -> None:
    w.softmax_scale *= (w.config.qk_head_dim / w.config.row_dim) ** 0.5


def _mscale_dropped(w: AttentionWeights) -> None:
    w.softmax_scale = w.config.qk_head_dim**-0.5


def _rope_layout(w: AttentionWeights) -> None:
    w.rope_layout = "half" if w.rope_layout == "pairs" else "pairs"


def _gain_dropped(w: AttentionWeights) -> None:
    assert w.kv_a_norm is not None
    w.kv_a_norm = np.ones_like(w.kv_a_norm)


def _raw_latent(w: AttentionWeights) -> None:
    w.kv_a_norm = None


def _bias_lost(name: str) -> Callable[[AttentionWeights], None]:
    def plant(w: AttentionWeights) -> None:
        setattr(w, name, None)

    return plant


def _rope_on_latent(model: onnx.ModelProto) -> None:
    """Rotate the first d_r columns of the latent as if position belonged there, before the row is cached."""
    nodes = model.graph.node
    index = next(i for i, n in enumerate(nodes) if n.name == "row/row")
    latent, key = nodes[index].input
    c = {p.key: p.value for p in model.metadata_props}["mla.config"]
    config = MLAConfig.from_dict(json.loads(c))
    dtype = DTYPES[{p.key: p.value for p in model.metadata_props}["mla.dtype"]].onnx
    model.graph.initializer.extend([
        helper.make_tensor("fault/columns", TensorProto.INT64, [1], [config.kv_lora_rank]),
        helper.make_tensor("fault/flat", TensorProto.INT64, [2], [-1, config.kv_lora_rank])])
    made = [
        helper.make_node("Concat", ["shapes/B", "shapes/T", "fault/columns"], ["fault/shape"], "fault/shape", axis=0),
        helper.make_node("Reshape", [latent, "fault/shape"], ["fault/latent_3d"], "fault/latent_3d"),
        helper.make_node("Cast", ["fault/latent_3d"], ["fault/wide"], "fault/wide", to=TensorProto.FLOAT),
        helper.make_node("RotaryEmbedding", ["fault/wide", "rope/cos", "rope/sin"], ["fault/rotated"],
                         "fault/rotated", num_heads=1, rotary_embedding_dim=config.qk_rope_head_dim),
        helper.make_node("Cast", ["fault/rotated"], ["fault/rounded"], "fault/rounded", to=dtype),
        helper.make_node("Reshape", ["fault/rounded", "fault/flat"], ["fault/latent"], "fault/latent"),
    ]
    nodes[index].input[:] = ["fault/latent", key]
    for offset, node in enumerate(made):
        nodes.insert(index + offset, node)


def one_row_too_many(graph: onnx.GraphProto) -> int:
    """Every update of a scatter cache writes its last row twice, the second time behind the new tokens. No output shows
    it, nor any row that counts: it is hidden now and overwritten by the next step. Returns how many updates there are.
    """
    places = [i for i, n in enumerate(graph.node) if n.op_type == "TensorScatter"]
    if places:
        graph.initializer.extend([helper.make_tensor(f"fault/{name}", TensorProto.INT64, [1], [value])
                                  for name, value in (("last", -1), ("end", 2**62), ("axis", 2))])
    for index in reversed(places):
        update, name = graph.node[index].input[1], graph.node[index].name
        graph.node[index].input[1] = f"{name}/longer"
        made = [helper.make_node("Slice", [update, "fault/last", "fault/end", "fault/axis"], [f"{name}/last"],
                                 f"{name}/fault_last"),
                helper.make_node("Concat", [update, f"{name}/last"], [f"{name}/longer"], f"{name}/fault_join", axis=2)]
        for offset, node in enumerate(made):
            graph.node.insert(index + offset, node)
    return len(places)


def _scatter_too_far(model: onnx.ModelProto) -> None:
    one_row_too_many(model.graph)


def _has_norm(config: MLAConfig) -> bool:
    return config.latent_norm


def _has_mscale(config: MLAConfig) -> bool:
    return config.rope.rope_type != "default" and bool(config.rope.mscale_all_dim)


def _has_up_bias(config: MLAConfig) -> bool:
    return config.model_type == "article"


_GRAPH = ("interpreter/prefill", "interpreter/decode", "ort/prefill", "ort/decode")
FAULTS = {f.name: f for f in (
    Fault("kv-b-order", "kv_b read as all K then all V, not head by head", ("weights", *_GRAPH), Tamper(_kv_b_order)),
    Fault("scale-from-rank", "softmax scale (rank + rope)^-1/2", ("weights", *_GRAPH), Tamper(_scale_from_rank)),
    Fault("mscale-dropped", "YaRN's mscale^2 missing from the softmax scale", ("weights", *_GRAPH),
          Tamper(_mscale_dropped), _has_mscale),
    Fault("rope-layout", "interleaved pairs and halves mixed up", ("interpreter/prefill/cache", *_GRAPH),
          Tamper(_rope_layout)),
    Fault("norm-gain-dropped", "the latent norm's gain left out", ("weights", "interpreter/prefill/cache", *_GRAPH),
          Tamper(_gain_dropped), _has_norm),
    Fault("raw-latent-cached", "the latent cached before its norm", ("weights", "interpreter/prefill/cache", *_GRAPH),
          Tamper(_raw_latent), _has_norm),
    Fault("rope-on-latent", "RoPE applied to the latent, position lost in the content",
          ("interpreter/prefill/cache", *_GRAPH), Tamper(graph=_rope_on_latent)),
    Fault("up-k-bias-lost", "up_proj_k's bias dropped from the export (softmax hides it from every output)",
          ("weights",), Tamper(_bias_lost("b_uk")), _has_up_bias),
    Fault("up-v-bias-lost", "up_proj_v's bias not carried into the output", ("weights", *_GRAPH),
          Tamper(_bias_lost("b_uv")), _has_up_bias),
    Fault("scatter-one-too-many", "the scatter cache written one row too far", ("interpreter/untouched",
          "ort/untouched"), Tamper(graph=_scatter_too_far), cache="scatter"),
)}


def fault(name: str, config: MLAConfig) -> Fault:
    """A fault by name that exists for this layer; else an InputError listing those that do."""
    known = [f for f in FAULTS.values() if f.applies(config)]
    if name not in {f.name for f in known}:
        raise InputError(
            f"--plant {name!r}: expected one of {', '.join(f.name for f in known)} for {config.model_type}"
        )
    return FAULTS[name]
