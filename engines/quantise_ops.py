"""The interpreter's quantised values: `QuantizeLinear` and `DequantizeLinear`, per tensor, per axis and in blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from engines.onnx_ops import INT4, UnsupportedOperator, Value, dtype_name, onnx_dtype, operator, rounded
from exporter.errors import InputError

CODES = (torch.float8_e4m3fn, torch.int8, torch.uint8, INT4)
_RANGES = {torch.int8: (-128, 127), torch.uint8: (0, 255), INT4: (-8, 7)}


def _spread(values: Tensor, shape: torch.Size, axis: int, block: int) -> Tensor:
    """Scales or zero points as they meet each element of `shape`: one of all, one per index of `axis`, or one per
    `block` elements along it (the last block may be short). InputError where their shape is none of these."""
    axis %= max(1, len(shape))
    if values.numel() == 1 and not block:
        return values.reshape(())
    expected = list(shape[axis:axis + 1])
    if block:
        expected = [-(-n // block) if d == axis else n for d, n in enumerate(shape)]
    if list(values.shape) != expected:
        raise InputError(f"scales or zero points are {list(values.shape)} for values {list(shape)}, axis {axis}, block "
                         f"size {block}; expected {expected}")
    if block:
        return values.repeat_interleave(block, axis).narrow(axis, 0, shape[axis])
    return values.reshape([-1 if d == axis else 1 for d in range(len(shape))])


@operator("DequantizeLinear")
def _dequantize(x: Value, scale: Value, zero: Value | None = None, *, axis: int = 1, block_size: int = 0,
                output_dtype: int = 0) -> Value:
    """(x - zero) * scale in the scale's dtype, rounded once."""
    codes = x.data.float()
    if zero is not None:
        codes = codes - _spread(zero.data.float(), x.data.shape, axis, block_size)
    factor = _spread(scale.data, x.data.shape, axis, block_size)
    return rounded(codes * factor, onnx_dtype(output_dtype) if output_dtype else scale.dtype)


@operator("QuantizeLinear")
def _quantize(x: Value, scale: Value, zero: Value | None = None, *, axis: int = 1, saturate: int = 1,
              block_size: int = 0, output_dtype: int = 0, precision: int = 0) -> Value:
    """round(x / scale) + zero, to nearest even and into the codes' range; the quotient is of the scale's dtype."""
    dtype = onnx_dtype(output_dtype) if output_dtype else zero.dtype if zero is not None else torch.uint8
    if dtype not in CODES or not saturate:
        raise UnsupportedOperator(f"QuantizeLinear to {dtype_name(dtype)} with saturate {saturate}; expected one of "
                                  f"{', '.join(map(dtype_name, CODES))}, saturated")
    quotient = rounded(x.data / _spread(scale.data, x.data.shape, axis, block_size),
                       onnx_dtype(precision) if precision else scale.dtype).data
    if dtype.is_floating_point:
        return rounded(quotient, dtype)
    codes = torch.round(quotient)
    if zero is not None:
        codes = codes + _spread(zero.data.float(), x.data.shape, axis, block_size)
    return rounded(codes.clamp(*_RANGES[dtype]), dtype)
