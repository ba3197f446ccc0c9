"""Products over packed integer codes, by ONNX Runtime's own operators: `MatMulNBits`, and `QMoE` for routed experts.

Both read codes and scales as the weight file holds them and never make the weight wide. Codes count from 0: without
zero points 8 (of four bits) and 128 (of eight) stand for 0.
"""

from __future__ import annotations

from exporter.graph import GraphBuilder

DOMAIN = "com.microsoft"
BITS = {"uint4": 4, "uint8": 8}  # of the codes, by the dtype that they are stored in


def is_packed(g: GraphBuilder, weight: str) -> bool:
    """Whether this block's weight is stored as such codes."""
    return g.stored_dtype(weight) in BITS


def product(g: GraphBuilder, value: str, weight: str, bias: list[str], name: str, output: str | None = None) -> str:
    """value [N, in] @ weight [out, in]^T + bias -> [N, out]."""
    out, columns = g.weight_shape(weight)
    codes, scales, block = g.packed(weight)
    result = g.op("MatMulNBits", value, codes, scales, *(["", "", *bias] if bias else []), name=name, output=output,
                  domain=DOMAIN, K=columns, N=out, bits=BITS[g.stored_dtype(weight) or ""], block_size=block,
                  accuracy_level=g.accuracy_level or 0)
    if output is None:
        g.declare(result, g.dtype.onnx, [None, out])
    return result


def experts(g: GraphBuilder, tokens: str, router: str, gate_up: str, down: str, chosen: int) -> str:
    """The `chosen` best of `router` [N, E] mixed by softmax over them, of tokens [N, D] -> [N, D]; `gate_up` has gate
    and up row by row."""
    (up_codes, up_scales, block), (down_codes, down_scales, same) = g.packed(gate_up), g.packed(down)
    if block != same:
        raise ValueError(f"{gate_up} has blocks of {block} and {down} of {same}; QMoE takes one size")
    return g.op("QMoE", tokens, router, up_codes, up_scales, "", down_codes, down_scales, name="moe", domain=DOMAIN,
                k=chosen, activation_type="swiglu", swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0,
                normalize_routing_weights=1, expert_weight_bits=BITS[g.stored_dtype(gate_up) or ""], block_size=block,
                accuracy_level=g.accuracy_level or 0)
