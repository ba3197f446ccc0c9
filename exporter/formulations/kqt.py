"""`rows @ q^T`, softmax over the rows axis.

Scores lie as [B, n, T*H]: the cache is the left operand as it is stored, no product needs it transposed. TensorRT-RTX
runs the whole decode attention in a few score-sized buffers where `q @ k^T` asks for copies of the cache.
"""

from __future__ import annotations

from exporter.formulations.common import CoreInputs, latent_columns, masked_softmax, total
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    queries = g.op("Transpose", core.q_rows, name="queries_as_columns", perm=[0, 2, 1])  # [B, R, T*H]
    scores = [g.op("MatMul", s.rows, queries, name=f"{s.name}_scores") for s in core.segments]  # [B, n, T*H]
    probs = masked_softmax(g, scores, core.segments, rows_axis=1, softmax_axis=1)
    parts = []
    for segment, p in zip(core.segments, probs, strict=True):
        by_query = g.op("Transpose", p, name=f"{segment.name}_probs_by_query", perm=[0, 2, 1])  # [B, T*H, n]
        parts.append(g.op("MatMul", by_query, segment.rows, name=f"{segment.name}_mix"))  # [B, T*H, R]
    return latent_columns(g, total(g, parts, "mix"), core.config.kv_lora_rank)
