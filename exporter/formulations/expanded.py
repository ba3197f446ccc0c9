"""Prefill with K and V rebuilt from the latent rows, by plain products: cheaper than absorbed for long prompts.

Per (query, key) pair and head it costs nope + rope + v multiply-adds against 2 d_c + d_r; rebuilding costs
d_c (nope + v) per row and head, which about 171 new tokens repay (DeepSeek-V3, V2-Lite).

ONNX Runtime's CPU copies what is joined and split, and selects on one thread. There the latent rows are joined, not the
scores of all heads, and the mask is added: rows that nobody wrote are zeros by then, so nothing can overflow.
"""

from __future__ import annotations

from functools import partial

from onnx import TensorProto

from exporter.formulations.common import (
    CoreInputs,
    additive_mask,
    all_latent_rows,
    expand_heads,
    expand_rows,
    expanded_query,
    masked_softmax,
    total,
)
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """-> [B, H, T, v]."""
    return _over_all_rows(g, core) if core.on_cpu else _by_segment(g, core)


def _by_segment(g: GraphBuilder, core: CoreInputs) -> str:
    query = expanded_query(g, core)
    scores, values = [], []
    for s in core.segments:
        with g.scope(f"expand_{s.name}"):
            key, value = expand_rows(g, core, s)
            columns = g.op("Transpose", key, name="key_as_columns", perm=[0, 1, 3, 2])
        scores.append(g.op("MatMul", query, columns, name=f"{s.name}_scores"))  # [B, H, T, n]
        values.append(value)
    probs = masked_softmax(g, scores, core.segments, rows_axis=2, softmax_axis=3, mask_axes=(1,))
    parts = [g.op("MatMul", p, v, name=f"{s.name}_mix")
             for s, p, v in zip(core.segments, probs, values, strict=True)]
    return total(g, parts, "mix")


def _over_all_rows(g: GraphBuilder, core: CoreInputs) -> str:
    query, narrow = expanded_query(g, core), g.dtype.name != "fp32"
    with g.scope("expand"):
        rows = all_latent_rows(g, core)
        key, value = expand_heads(g, core, rows, rows.flat, 0, core.config.num_attention_heads)
        columns = g.op("Transpose", key, name="key_as_columns", perm=[0, 1, 3, 2])
    scores, mask = g.op("MatMul", query, columns, name="scores"), additive_mask(g, core)  # [B, H, T, n]
    if narrow:
        scores = g.to(scores, TensorProto.FLOAT, "scores_fp32")
        mask = mask and g.once("additive_mask_fp32", partial(g.to, mask, TensorProto.FLOAT, "additive_fp32"))
    if mask is not None:
        scores = g.op("Add", scores, mask, name="scores_masked")
    probs = g.op("Softmax", scores, name="softmax", axis=3)
    return g.op("MatMul", g.to(probs, g.dtype.onnx, "probs") if narrow else probs, value, name="mix")
