"""The standard `Attention` operator (opset 23): T*H query rows over one latent head, V the first d_c columns of K.

For ONNX Runtime. TensorRT refuses it: its Attention takes one head size for Q, K and V, and at most 256 columns.
"""

from __future__ import annotations

from exporter.formulations.common import CoreInputs, joined_mask, joined_rows, latent_columns
from exporter.graph import GraphBuilder


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    rows = joined_rows(g, core.segments)
    one_head = g.ints(1)
    query = g.op("Unsqueeze", core.q_rows, one_head, name="query_4d")  # [B, 1, T*H, R]
    key = g.op("Unsqueeze", rows, one_head, name="key_4d")  # [B, 1, n, R]
    value = latent_columns(g, key, core.config.kv_lora_rank, axis=3)  # [B, 1, n, d_c]
    mask = joined_mask(g, core)
    inputs = [query, key, value]
    if mask is not None:
        inputs.append(g.op("Unsqueeze", mask, one_head, name="mask_4d"))
    mixed = g.op("Attention", *inputs, name="attend", scale=1.0, softmax_precision=1)
    return g.op("Squeeze", mixed, one_head, name="mixed_3d")
