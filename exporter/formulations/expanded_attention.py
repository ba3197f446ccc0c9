"""Prefill with K and V rebuilt from the latent rows, through the fused `Attention` operator.

TensorRT fuses it only with one head size for Q, K and V, a multiple of 8 up to 256, in fp16 or bf16: V (or Q and K) is
padded with zeros to max(nope + rope, v) rounded up to 8, and the padding of the result is cut off again.

Its scratch is K and V of all heads several times over (the expansion, the padding, the kernel's own copies), so heads
go a few at a time, each group after the one before: 4 of 16 heads at once take less than half, 4 of 128 a twelfth.
"""

from __future__ import annotations

from exporter.config import MLAConfig
from exporter.formulations.common import (
    CoreInputs,
    additive_mask,
    all_latent_rows,
    expand_heads,
    expanded_query,
    heads_at_once,
)
from exporter.graph import GraphBuilder
from exporter.sequencing import values_after


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
    """-> [B, H, T, v], a few heads at a time."""
    c, size = core.config, head_size(core.config)
    at_once, H = heads_at_once(c), c.num_attention_heads
    rows = all_latent_rows(g, core)
    query = _padded(g, expanded_query(g, core), c.qk_head_dim, size, "query_padded")
    queries = [query] if at_once == H else (
        g.ops("Split", query, g.ints(*[at_once] * (H // at_once)), name="split_query", axis=1, count=H // at_once))
    mask = additive_mask(g, core)
    extra = [] if mask is None else [mask]
    stacked = g.op("Unsqueeze", rows.flat, g.ints(0), name="latent_stacked") if at_once < H else ""  # [1, B*n, d_c]
    parts: list[str] = []
    for first in range(0, H, at_once):
        with g.scope(f"heads_{first}"):
            flat = rows.flat
            if parts:
                waiting = values_after(g, stacked, parts[-1], "latent_after", 0, 1, 2, 3)
                flat = g.op("Squeeze", waiting, g.ints(0), name="latent_flat")
            key, value = expand_heads(g, core, rows, flat, first, at_once)
            key = _padded(g, key, c.qk_head_dim, size, "key_padded")
            value = _padded(g, value, c.v_head_dim, size, "value_padded")
            attended = g.op("Attention", queries[first // at_once], key, value, *extra, name="attend", scale=1.0)
            parts.append(g.op("Slice", attended, g.ints(0), g.ints(c.v_head_dim), g.ints(3), name="value_columns"))
    return parts[0] if len(parts) == 1 else g.op("Concat", *parts, name="all_heads", axis=1)
