"""`q @ rows^T`, softmax over the last axis: how attention is usually written."""

from __future__ import annotations

from exporter.formulations.common import CoreInputs, latent_columns, masked_softmax, total
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    scores = []
    for s in core.segments:
        columns = g.op("Transpose", s.rows, name=f"{s.name}_as_columns", perm=[0, 2, 1])  # [B, R, n]
        scores.append(g.op("MatMul", core.q_rows, columns, name=f"{s.name}_scores"))  # [B, T*H, n]
    probs = masked_softmax(g, scores, core.segments, rows_axis=2, softmax_axis=2)
    parts = [g.op("MatMul", p, s.rows, name=f"{s.name}_mix") for s, p in zip(core.segments, probs, strict=True)]
    return latent_columns(g, total(g, parts, "mix"), core.config.kv_lora_rank)
