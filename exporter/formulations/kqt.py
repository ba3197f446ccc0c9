"""`rows @ q^T`, softmax over the rows axis.

Scores lie as [B, n, T*H]: the cache is the left operand as it is stored, no product needs it transposed. TensorRT-RTX
runs the whole decode attention in a few score-sized buffers where `q @ k^T` asks for copies of the cache.
"""

from __future__ import annotations

from exporter.cache_forms import Segment
from exporter.formulations.common import CoreInputs, latent_columns, masked_softmax, total
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    probs = probabilities(g, core, core.q_rows)
    return mixed(g, core, [mix(g, s, p) for s, p in zip(core.segments, probs, strict=True)])


def probabilities(g: GraphBuilder, core: CoreInputs, q_rows: str, wide: bool = True) -> list[str]:
    """Softmax of each segment's scores, [B, n, T*H]; `wide` as in `masked_softmax`."""
    queries = g.op("Transpose", q_rows, name="queries_as_columns", perm=[0, 2, 1])  # [B, R, T*H]
    scores = [g.op("MatMul", s.rows, queries, name=f"{s.name}_scores") for s in core.segments]
    return masked_softmax(g, scores, core.segments, rows_axis=1, softmax_axis=1, wide=wide)


def mix(g: GraphBuilder, segment: Segment, probs: str) -> str:
    """A segment's rows by their probabilities, [B, T*H, R]."""
    by_query = g.op("Transpose", probs, name=f"{segment.name}_probs_by_query", perm=[0, 2, 1])  # [B, T*H, n]
    return g.op("MatMul", by_query, segment.rows, name=f"{segment.name}_mix")


def mixed(g: GraphBuilder, core: CoreInputs, parts: list[str]) -> str:
    """The segments together, [B, T*H, d_c]."""
    return latent_columns(g, total(g, parts, "mix"), core.config.kv_lora_rank)
