"""The interpreter's products over packed codes: ONNX Runtime's `com.microsoft.MatMulNBits` and `QMoE`.

Weights are decoded exactly, (code - zero) * scale, and multiplied in float32 whatever `accuracy_level` allows a kernel
to round: what a kernel does to its activations is its own affair, and is judged against this.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from engines.moe_ops import mixture
from engines.onnx_ops import UnsupportedOperator, Value, one_type, operator, rounded
from exporter.errors import InputError


def _numbers(raw: Tensor, bits: int) -> Tensor:
    """Bytes [..., n] as codes counted from 0, [..., n * 8 / bits]; of four bits the first is in the low half."""
    if bits == 8:
        return raw.float()
    return torch.stack([raw & 15, raw >> 4], dim=-1).flatten(-2).float()


def _decoded(codes: Value, scales: Value, zeros: Value | None, rows: tuple[int, ...], columns: int, bits: int,
             block: int, name: str) -> Tensor:
    """Weights [..., out, in]. InputError where codes or scales have another size than attributes say."""
    if bits not in (4, 8):
        raise UnsupportedOperator(f"{name} has {bits} bits; expected 4 or 8")
    blocks = -(-columns // block)
    found = codes.data.numel(), scales.data.numel()
    wanted = prod(rows) * blocks * block * bits // 8, prod(rows) * blocks
    if found != wanted:
        raise InputError(f"{name} has {found[0]} bytes of codes and {found[1]} scales for weights {[*rows, columns]} "
                         f"in blocks of {block}; expected {wanted[0]} and {wanted[1]}")
    numbers = _numbers(codes.data.reshape(*rows, -1), bits).reshape(*rows, blocks, block)
    zero: Tensor | float = 2.0 ** (bits - 1)
    if zeros is not None and zeros.dtype == torch.uint8:
        zero = _numbers(zeros.data.reshape(*rows, -1), bits)[..., :blocks, None]
    elif zeros is not None:
        zero = zeros.data.reshape(*rows, blocks, 1)
    return ((numbers - zero) * scales.data.reshape(*rows, blocks, 1)).flatten(-2)[..., :columns]


@operator("com.microsoft:MatMulNBits")
def _matmul_nbits(a: Value, b: Value, scales: Value, zeros: Value | None = None, g_idx: Value | None = None,
                  bias: Value | None = None, *, K: int, N: int, bits: int = 4, block_size: int,
                  accuracy_level: int = 0) -> Value:
    """a [..., K] @ decoded [N, K]^T + bias."""
    if g_idx is not None:
        raise UnsupportedOperator("MatMulNBits has g_idx; expected rows in their own order")
    dtype = one_type(a, scales)
    if a.data.is_meta:
        return a.moved(a.data.new_empty((*a.data.shape[:-1], N)))
    product = a.data @ _decoded(b, scales, zeros, (N,), K, bits, block_size, "MatMulNBits").T
    return rounded(product if bias is None else product + bias.data, dtype)


@operator("com.microsoft:QMoE")
def _qmoe(x: Value, router: Value, fc1: Value, fc1_scales: Value, fc1_bias: Value | None, fc2: Value,
          fc2_scales: Value, fc2_bias: Value | None = None, *, k: int, activation_type: str = "relu",
          swiglu_fusion: int = 0, activation_alpha: float = 1.0, activation_beta: float = 0.0,
          normalize_routing_weights: int = 0, expert_weight_bits: int = 4, block_size: int = 0,
          accuracy_level: int = 0) -> Value:  # fmt: skip
    """`MoE` over decoded weights."""
    if fc1_bias is not None or fc2_bias is not None or not block_size:
        raise UnsupportedOperator("QMoE is known without biases and with a block size only")
    one_type(x, router, fc1_scales, fc2_scales)
    options = (activation_type, swiglu_fusion, activation_alpha, activation_beta, normalize_routing_weights)
    if x.data.is_meta:
        return mixture(x, router, None, None, k, "QMoE", *options)
    hidden, experts = x.data.shape[-1], fc1.data.shape[0]
    inner = fc1.data.shape[1]
    up, down = (_decoded(codes, scales, None, rows, columns, expert_weight_bits, block_size, "QMoE")
                for codes, scales, rows, columns in ((fc1, fc1_scales, (experts, inner), hidden),
                                                     (fc2, fc2_scales, (experts, hidden), inner // 2)))
    return mixture(x, router, up, down, k, "QMoE", *options)
