"""Faults of the field, planted after the weights are loaded, each with the rungs that must turn red.

They show that a green ladder means something: `python -m validate parity MODEL --plant NAME` must exit with 1. Each row
says what a user would see and which rungs find it first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.export import Tamper
from exporter.rope import frequencies, mscale
from exporter.weights import AttentionWeights


@dataclass(frozen=True)
class Fault:
    """`red` names rungs (by prefix) that must fail, none where only `validate doctor` looks closely enough; `applies`
    tells for which layers the fault exists at all, and `cache` in which cache form alone."""

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


def _mscale_once(w: AttentionWeights) -> None:
    plain = w.config.qk_head_dim**-0.5
    w.softmax_scale = plain * (w.softmax_scale / plain) ** 0.5


def _one_side_deinterleaved(w: AttentionWeights) -> None:
    """The query's rotary rows in the other layout than the key's: the scores are those of one side left unsorted."""
    c = w.config
    d_r = c.qk_rope_head_dim
    halves = np.arange(d_r).reshape(2, -1).T if w.rope_layout == "pairs" else np.arange(d_r).reshape(-1, 2).T
    last = w.q_rope or w.q_b or w.q
    assert last is not None
    for name, values in (("weight", last.weight), ("bias", last.bias)):
        if values is not None:
            heads = values.reshape(c.num_attention_heads, -1, *values.shape[1:]).copy()
            heads[:, -d_r:] = heads[:, -d_r:][:, halves.reshape(-1)]
            setattr(last, name, heads.reshape(values.shape))


def _factor_twice(w: AttentionWeights) -> None:
    w.rope_factor = mscale(w.config.rope.factor, 1.0)


def _other_factors(w: AttentionWeights) -> None:
    r = w.config.rope
    swapped = replace(w.config, rope=replace(r, short_factor=r.long_factor, long_factor=r.short_factor))
    short, long = frequencies(w.config, 1)[0], frequencies(swapped, 1)[0]
    w.inv_freq = long if np.allclose(short, w.inv_freq) else short


def _narrow_frequencies(w: AttentionWeights) -> None:
    w.inv_freq = w.inv_freq.astype(np.float32).astype(np.float64)


def _unscaled(name: str, factor: str) -> Callable[[AttentionWeights], None]:
    def plant(w: AttentionWeights) -> None:
        setattr(w, name, getattr(w, name) / getattr(w.config, factor))

    return plant


def _main_epsilon(model: onnx.ModelProto) -> None:
    """rms_norm_eps in the latent norms."""
    config = _config_of(model)
    for node in model.graph.node:
        if node.name.endswith(("kv_a_norm", "q_a_norm")):
            next(a for a in node.attribute if a.name == "epsilon").f = config.rms_norm_eps


def _no_temperature(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name == "llama_4_scaling_beta":
            tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))


def _config_of(model: onnx.ModelProto) -> MLAConfig:
    return MLAConfig.from_dict(json.loads({p.key: p.value for p in model.metadata_props}["mla.config"]))


def _bias_lost(name: str) -> Callable[[AttentionWeights], None]:
    def plant(w: AttentionWeights) -> None:
        setattr(w, name, None)

    return plant


def _rope_on_latent(model: onnx.ModelProto) -> None:
    """Rotate the first d_r columns of the latent as if position belonged there, before the row is cached."""
    nodes = model.graph.node
    index = next(i for i, n in enumerate(nodes) if n.name == "row/row")
    latent, key = nodes[index].input
    config = _config_of(model)
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


def _has_yarn_scale(config: MLAConfig) -> bool:
    return config.rope.rope_type == "yarn" and _has_mscale(config)


def _has_two_sets(config: MLAConfig) -> bool:
    return config.rope.rope_type == "longrope" and config.rope.short_factor != config.rope.long_factor


def _has_rope(config: MLAConfig) -> bool:
    return config.rope.rope_type != "none"


def _has_own_epsilon(config: MLAConfig) -> bool:
    return _has_norm(config) and config.rms_norm_eps != config.latent_norm_eps


_GRAPH = ("interpreter/prefill", "interpreter/decode", "ort/prefill", "ort/decode")
FAULTS = {f.name: f for f in (
    Fault("kv-b-order", "kv_b read as all K then all V, not head by head", ("weights", *_GRAPH), Tamper(_kv_b_order)),
    Fault("scale-from-rank", "softmax scale (rank + rope)^-1/2", ("weights", *_GRAPH), Tamper(_scale_from_rank)),
    Fault("mscale-dropped", "YaRN's mscale^2 missing from the softmax scale", ("weights", *_GRAPH),
          Tamper(_mscale_dropped), _has_mscale),
    Fault("rope-layout", "interleaved pairs and halves mixed up", ("interpreter/prefill/cache", *_GRAPH),
          Tamper(_rope_layout)),
    Fault("mscale-once", "YaRN's mscale in the softmax scale once, not squared", ("weights", *_GRAPH),
          Tamper(_mscale_once), _has_mscale),
    Fault("rope-factor-twice", "YaRN's factor on cos and sin although the softmax scale has it",
          ("interpreter/prefill/cache", *_GRAPH), Tamper(_factor_twice), _has_yarn_scale),
    Fault("key-only-deinterleaved", "one of query and key brought into the layout that is rotated, the other not",
          ("weights", *_GRAPH), Tamper(_one_side_deinterleaved), _has_rope),
    Fault("long-factors-unused", "longrope's other set of factors", ("interpreter/prefill/cache", *_GRAPH),
          Tamper(_other_factors), _has_two_sets),
    Fault("float32-angles", "frequencies rounded to float32: angles are off by 5e-4 at position 32k", (),
          Tamper(_narrow_frequencies), _has_rope),
    Fault("latent-eps", "rms_norm_eps in the latent norms: it shows where latents are small, and nowhere else", (),
          Tamper(graph=_main_epsilon), _has_own_epsilon),
    Fault("latent-scale-dropped", "the latent without its factor", ("weights", "interpreter/prefill/cache", *_GRAPH),
          Tamper(_unscaled("kv_a_norm", "latent_scale")), lambda config: config.latent_scale != 1),
    Fault("query-scale-dropped", "the query latent without its factor", ("weights", *_GRAPH),
          Tamper(_unscaled("q_a_norm", "query_scale")), lambda config: config.query_scale != 1),
    Fault("query-temperature-dropped", "the query does not grow with its position", ("interpreter/far", "ort/far"),
          Tamper(graph=_no_temperature), lambda config: bool(config.rope.llama_4_scaling_beta)),
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
    if not FAULTS[name].red:
        raise InputError(f"--plant {name}: {FAULTS[name].what}; no rung turns red, `validate doctor` finds it")
    return FAULTS[name]
