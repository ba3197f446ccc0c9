"""`q @ rows^T`, softmax over the last axis: how attention is usually written."""

from __future__ import annotations

from exporter.cache_forms import Segment
from exporter.formulations.common import CoreInputs, latent_columns, masked_softmax, total
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    scores = [_scores(g, core, s) for s in core.segments]
    probs = masked_softmax(g, scores, core.segments, rows_axis=2, softmax_axis=2)
    parts = [g.op("MatMul", p, s.rows, name=f"{s.name}_mix") for s, p in zip(core.segments, probs, strict=True)]
    return latent_columns(g, total(g, parts, "mix"), core.config.kv_lora_rank)


def _scores(g: GraphBuilder, core: CoreInputs, s: Segment) -> str:
    """[B, T*H, n]. A product on the CPU packs its right operand, which of few queries and a long cache should be the
    queries: there it is taken as rows @ q^T, and the small result is transposed."""
    assert core.q_rows is not None
    if core.few and core.on_cpu:
        queries = g.op("Transpose", core.q_rows, name=f"{s.name}_queries_as_columns", perm=[0, 2, 1])  # [B, R, T*H]
        by_row = g.op("MatMul", s.rows, queries, name=f"{s.name}_scores_by_row")  # [B, n, T*H]
        return g.op("Transpose", by_row, name=f"{s.name}_scores", perm=[0, 2, 1])
    columns = g.op("Transpose", s.rows, name=f"{s.name}_as_columns", perm=[0, 2, 1])  # [B, R, n]
    return g.op("MatMul", core.q_rows, columns, name=f"{s.name}_scores")
