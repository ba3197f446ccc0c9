"""`rows @ q^T` with its softmax in the compute dtype: the leanest decode step that takes the cache in one piece.

Two buffers of scores where `kqt` holds three. What costs the third is the cast to float32 (how a 16-bit softmax reduces
inside is then the runtime's affair), and from three new tokens on the product over the new rows, which wants its
probabilities copied: of few tokens it is written as multiply and sum, which the builder fuses.
"""

from __future__ import annotations

from exporter.cache_forms import Segment
from exporter.formulations import kqt
from exporter.formulations.common import CoreInputs
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    parts = []
    for segment, probs in zip(core.segments, kqt.probabilities(g, core, core.q_rows, wide=False), strict=True):
        few = core.few and segment.n == core.dims.T
        parts.append(_mix_few(g, segment, probs) if few else kqt.mix(g, segment, probs))
    return kqt.mixed(g, core, parts)


def _mix_few(g: GraphBuilder, segment: Segment, probs: str) -> str:
    """[B, T, T*H] x [B, T, R] -> [B, T*H, R]."""
    weights = g.op("Unsqueeze", probs, g.ints(3), name=f"{segment.name}_weights")
    rows = g.op("Unsqueeze", segment.rows, g.ints(2), name=f"{segment.name}_rows")
    shares = g.op("Mul", weights, rows, name=f"{segment.name}_shares")
    return g.op("ReduceSum", shares, g.ints(1), name=f"{segment.name}_mix", keepdims=0)
