"""Prefill with K and V rebuilt from the latent rows, by plain products: cheaper than absorbed for long prompts.

Per (query, key) pair and head it costs nope + rope + v multiply-adds against 2 d_c + d_r; rebuilding costs
d_c (nope + v) per row and head, which about 171 new tokens repay (DeepSeek-V3, V2-Lite).
"""

from __future__ import annotations

from exporter.formulations.common import CoreInputs, expand_rows, expanded_query, masked_softmax, total
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """-> [B, H, T, v]."""
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
