"""Prefill with K and V rebuilt from the latent rows, through the fused `Attention` operator.

TensorRT fuses it only with one head size for Q, K and V, a multiple of 8 up to 256, in fp16 or bf16: V (or Q and K) is
padded with zeros to max(nope + rope, v) rounded up to 8, and the padding of the result is cut off again.
"""

from __future__ import annotations

from exporter.cache_forms import Segment
from exporter.config import MLAConfig
from exporter.formulations.common import CoreInputs, expand_rows, expanded_query, joined_mask, joined_rows
from exporter.graph import GraphBuilder


def head_size(config: MLAConfig) -> int:
    """The common, padded head size."""
    return -(-max(config.qk_head_dim, config.v_head_dim) // 8) * 8


def fits(config: MLAConfig, target: str) -> bool:
    """TensorRT's fused attention takes head sizes 16 to 256; ONNX Runtime any."""
    return target == "ort" or 16 <= head_size(config) <= 256


def _padded(g: GraphBuilder, value: str, width: int, to: int, name: str) -> str:
    if width == to:
        return value
    return g.op("Pad", value, g.ints(0, 0, 0, 0, 0, 0, 0, to - width), g.scalar("const/zero", 0.0), name=name)


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """-> [B, H, T, v]."""
    c, size = core.config, head_size(core.config)
    rows = joined_rows(g, core.segments)
    n = core.segments[0].n
    for i, s in enumerate(core.segments[1:]):
        n = g.op("Add", n, s.n, name=f"rows_{i + 1}")
    key, value = expand_rows(g, core, Segment("all", rows, n, lambda rows_axis: None))
    inputs = [_padded(g, expanded_query(g, core), c.qk_head_dim, size, "query_padded"),
              _padded(g, key, c.qk_head_dim, size, "key_padded"), _padded(g, value, c.v_head_dim, size, "value_padded")]
    mask = joined_mask(g, core)
    if mask is not None:
        inputs.append(g.op("Unsqueeze", mask, g.ints(1), name="mask_4d"))  # [B, 1, T, n]
    mixed = g.op("Attention", *inputs, name="attend", scale=1.0)  # [B, H, T, size]
    return g.op("Slice", mixed, g.ints(0), g.ints(c.v_head_dim), g.ints(3), name="value_columns")
