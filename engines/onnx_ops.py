"""The interpreter's operator table: ONNX operators (opset 24 semantics) on torch tensors, one function each.

A function's positional parameters are the node's inputs, its keyword-only parameters the node's attributes with the
defaults of the specification. Floats are computed in float32 (float64 where declared so) and only the *result* of an
operator is rounded to its declared dtype: accumulation inside one operator is the kernel's own affair.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import torch
from onnx import TensorProto
from torch import Tensor

from exporter.errors import InputError

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # torch's stubs lack it
DTYPES: dict[int, torch.dtype] = {
    TensorProto.FLOAT: torch.float32, TensorProto.FLOAT16: torch.float16, TensorProto.BFLOAT16: torch.bfloat16,
    TensorProto.DOUBLE: torch.float64, TensorProto.BOOL: torch.bool, TensorProto.UINT8: torch.uint8,
    TensorProto.INT8: torch.int8, TensorProto.INT16: torch.int16, TensorProto.INT32: torch.int32,
    TensorProto.INT64: torch.int64, TensorProto.FLOAT8E4M3FN: torch.float8_e4m3fn, TensorProto.INT4: INT4,
}  # fmt: skip
FP8_MAX = 448.0  # of float8_e4m3fn, which has no infinity
_HELD_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float8_e4m3fn: torch.float32,
            INT4: torch.int8}


class UnsupportedOperator(NotImplementedError):  # noqa: N818  # named for what it finds
    """A node the table has no meaning for: an unknown operator, attribute, output or case of one."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name NumPy and ml_dtypes give this dtype: `float16`, `bfloat16`, `int64`, `bool`."""
    return str(dtype).removeprefix("torch.")


def onnx_dtype(code: int) -> torch.dtype:
    """The torch dtype of a TensorProto data type; UnsupportedOperator for one the interpreter cannot hold."""
    if code not in DTYPES:
        known = ", ".join(map(dtype_name, DTYPES.values()))
        raise UnsupportedOperator(f"data type {TensorProto.DataType.Name(code)} is not supported; expected {known}")
    return DTYPES[code]


@dataclass(frozen=True)
class Value:
    """A tensor of the graph: `dtype` as ONNX declares it, `data` its exact values (narrower floats held in float32,
    int4 in int8)."""

    data: Tensor
    dtype: torch.dtype

    def moved(self, data: Tensor) -> Value:
        """The same values in another arrangement: nothing to round."""
        return Value(data, self.dtype)


def storage(dtype: torch.dtype) -> torch.dtype:
    """The dtype a tensor declared as `dtype` is held in."""
    return _HELD_IN.get(dtype, dtype)


def rounded(data: Tensor, dtype: torch.dtype) -> Value:
    """A result rounded to its declared dtype: nearest, ties to even; overflow becomes inf, in float8_e4m3fn the largest
    number (it has no inf)."""
    if dtype == INT4:  # of whole numbers in its range
        return Value(data.to(torch.int8), dtype)
    if dtype == torch.float8_e4m3fn:
        data = data.clamp(-FP8_MAX, FP8_MAX)
    return Value(data.to(dtype).to(storage(dtype)), dtype)


def stored_bytes(elements: int, dtype: torch.dtype) -> int:
    """Bytes that a tensor takes in its declared dtype; int4 lies two to a byte."""
    return -(-elements // 2) if dtype == INT4 else elements * dtype.itemsize


@dataclass(frozen=True)
class Operator:
    """One row of the table.

    host: indices of the inputs whose *values* shape the result (a Reshape's shape); they must be known, also in
        `Interpreter.shapes`. shape_only: nothing but the inputs' shapes is read.
    """

    call: Callable[..., Value | tuple[Value, ...]]
    host: frozenset[int] = frozenset()
    shape_only: bool = False
    attributes: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        keywords = (p.name for p in inspect.signature(self.call).parameters.values() if p.kind is p.KEYWORD_ONLY)
        object.__setattr__(self, "attributes", frozenset(keywords))


OPERATORS: dict[str, Operator] = {}
Handler = Callable[..., Value | tuple[Value, ...]]


def operator(name: str, host: Iterable[int] = (), shape_only: bool = False) -> Callable[[Handler], Handler]:
    """Enter a function in the table under the ONNX operator `name` of the default domain."""

    def enter(call: Handler) -> Handler:
        OPERATORS[name] = Operator(call, frozenset(host), shape_only)
        return call

    return enter


def host(value: Value) -> list[Any]:
    """The numbers of a small tensor as Python numbers; InputError where only the data would tell them."""
    if value.data.is_meta:
        raise InputError("a size depends on the data of an input; expected one made of shapes and constants only")
    return value.data.flatten().tolist()


def one_type(*values: Value) -> torch.dtype:
    """The dtype all the values share; InputError where they differ (ONNX has no implicit promotion)."""
    if len({v.dtype for v in values}) != 1:
        raise InputError(f"operands are {', '.join(dtype_name(v.dtype) for v in values)}; expected one data type")
    return values[0].dtype


# ---- elementwise


def _unary(compute: Callable[[Tensor], Tensor]) -> Handler:
    def call(x: Value) -> Value:
        return rounded(compute(x.data), x.dtype)

    return call


def _binary(compute: Callable[[Tensor, Tensor], Tensor], result: torch.dtype | None = None) -> Handler:
    def call(a: Value, b: Value) -> Value:
        shared = one_type(a, b)
        return rounded(compute(a.data, b.data), result or shared)

    return call


def _variadic(compute: Callable[[Tensor, Tensor], Tensor]) -> Handler:
    def call(*values: Value) -> Value:
        return rounded(reduce(compute, [v.data for v in values]), one_type(*values))

    return call


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Neg": torch.neg, "Exp": torch.exp, "Tanh": torch.tanh, "Sigmoid": torch.sigmoid,
    "Erf": torch.erf, "Sqrt": torch.sqrt, "Reciprocal": torch.reciprocal, "Not": torch.logical_not,
    "Identity": lambda x: x,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide, "MatMul": torch.matmul,
}  # fmt: skip
_PREDICATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Less": torch.lt, "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Equal": torch.eq,
    "And": torch.logical_and, "Or": torch.logical_or,
}  # fmt: skip
for _name, _compute in _UNARY.items():
    operator(_name)(_unary(_compute))
for _name, _function in _ARITHMETIC.items():
    operator(_name)(_binary(_function))
for _name, _function in _PREDICATES.items():
    operator(_name)(_binary(_function, torch.bool))
operator("Min")(_variadic(torch.minimum))
operator("Max")(_variadic(torch.maximum))


@operator("Pow")
def _pow(base: Value, exponent: Value) -> Value:
    return rounded(torch.pow(base.data, exponent.data), base.dtype)  # the two types may differ; the base's counts


@operator("Where")
def _where(condition: Value, a: Value, b: Value) -> Value:
    one_type(a, b)
    return a.moved(torch.where(condition.data, a.data, b.data))


@operator("Cast")
def _cast(x: Value, *, to: int, saturate: int = 1, round_mode: str = "up") -> Value:
    dtype = onnx_dtype(to)
    if dtype == INT4 or (not saturate and dtype == torch.float8_e4m3fn):
        raise UnsupportedOperator(f"Cast to {dtype_name(dtype)} with saturate {saturate} is not modelled; expected "
                                  "another type, or saturate 1")
    return rounded(x.data, dtype)  # round_mode speaks of float8_e8m0 only


# ---- products, norms, reductions


@operator("Gemm")
def _gemm(a: Value, b: Value, c: Value | None = None, *, alpha: float = 1.0, beta: float = 1.0, transA: int = 0,
          transB: int = 0) -> Value:  # fmt: skip
    product = torch.matmul(a.data.mT if transA else a.data, b.data.mT if transB else b.data)
    if alpha != 1.0:
        product = product * alpha
    if c is not None:
        product = product + (c.data if beta == 1.0 else beta * c.data)
    return rounded(product, one_type(a, b, *([c] if c is not None else [])))


@operator("Softmax")
def _softmax(x: Value, *, axis: int = -1) -> Value:
    """In float64: torch sums a strided axis one element at a time, and over 8192 rows a float32 sum would show."""
    return rounded(torch.softmax(x.data, axis, dtype=torch.float64), x.dtype)


@operator("RMSNormalization")
def _rms_normalization(x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1) -> Value:
    """Two roundings, as the operator's function body has them: Cast(x / rms) to the type of x, then Mul by scale."""
    if stash_type != TensorProto.FLOAT:
        raise UnsupportedOperator(f"RMSNormalization has stash_type {stash_type}; expected 1 (float32)")
    dims = list(range(axis % x.data.dim(), x.data.dim()))
    rms = torch.sqrt(torch.mean(x.data * x.data, dims, keepdim=True) + epsilon)
    normalized = rounded(x.data / rms, x.dtype)
    return rounded(normalized.data * scale.data, one_type(x, scale))


def _maximum(data: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    if all(data.shape[d] for d in dims):
        return torch.amax(data, dims, keepdim)
    lowest = -math.inf if data.is_floating_point() else torch.iinfo(data.dtype).min  # the maximum of nothing
    return torch.full_like(torch.sum(data, dims, keepdim), lowest)


def _reduction(compute: Callable[[Tensor, list[int], bool], Tensor]) -> Handler:
    def call(x: Value, axes: Value | None = None, *, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Value:
        dims = host(axes) if axes is not None else []
        if not dims and noop_with_empty_axes:
            return x
        return rounded(compute(x.data, dims or list(range(x.data.dim())), bool(keepdims)), x.dtype)

    return call


operator("ReduceMean", host=(1,))(_reduction(lambda data, dims, keep: torch.mean(data, dims, keep)))
operator("ReduceSum", host=(1,))(_reduction(lambda data, dims, keep: torch.sum(data, dims, keep)))
operator("ReduceMax", host=(1,))(_reduction(_maximum))


# ---- shapes and movement


@operator("Shape", shape_only=True)
def _shape(x: Value, *, start: int = 0, end: int | None = None) -> Value:
    return Value(torch.tensor(list(x.data.shape[start:end]), dtype=torch.int64), torch.int64)


@operator("Reshape", host=(1,))
def _reshape(x: Value, shape: Value, *, allowzero: int = 0) -> Value:
    asked = host(shape)
    sizes = [x.data.shape[i] if size == 0 and not allowzero else size for i, size in enumerate(asked)]
    if -1 in sizes:
        known = math.prod(size for size in sizes if size != -1)
        if known == 0 or sizes.count(-1) > 1:  # torch and ONNX agree that nothing tells the -1 then
            raise InputError(f"Reshape of {list(x.data.shape)} to {asked}: the -1 is ambiguous; expected a fixed size")
        sizes[sizes.index(-1)] = x.data.numel() // known
    return x.moved(x.data.reshape(sizes))


@operator("Transpose")
def _transpose(x: Value, *, perm: Sequence[int] | None = None) -> Value:
    return x.moved(x.data.permute(tuple(perm) if perm is not None else tuple(reversed(range(x.data.dim())))))


@operator("Squeeze", host=(1,))
def _squeeze(x: Value, axes: Value | None = None) -> Value:
    rank = x.data.dim()
    dims = {d % rank for d in host(axes)} if axes is not None else {d for d in range(rank) if x.data.shape[d] == 1}
    if any(x.data.shape[d] != 1 for d in dims):
        raise InputError(f"Squeeze of axes {sorted(dims)} from {list(x.data.shape)}; expected axes of size 1")
    return x.moved(x.data.reshape([size for d, size in enumerate(x.data.shape) if d not in dims]))


@operator("Unsqueeze", host=(1,))
def _unsqueeze(x: Value, axes: Value) -> Value:
    dims = host(axes)
    rank = x.data.dim() + len(dims)  # axes count in the result
    data = x.data
    for d in sorted(d % rank for d in dims):
        data = data.unsqueeze(d)
    return x.moved(data)


@operator("Concat")
def _concat(*values: Value, axis: int) -> Value:
    return Value(torch.cat([v.data for v in values], axis), one_type(*values))


@operator("Split", host=(1,))
def _split(x: Value, split: Value | None = None, *, axis: int = 0, num_outputs: int | None = None) -> tuple[Value, ...]:
    if split is not None:
        sizes = host(split)
    elif num_outputs is not None:
        total, part = x.data.shape[axis], -(-x.data.shape[axis] // num_outputs)
        sizes = [part] * (num_outputs - 1) + [total - part * (num_outputs - 1)]  # the last part may be smaller
    else:
        raise InputError("Split has neither the input split nor the attribute num_outputs; expected one of them")
    return tuple(x.moved(part) for part in torch.split(x.data, sizes, axis))


@operator("Slice", host=(1, 2, 3, 4))
def _slice(x: Value, starts: Value, ends: Value, axes: Value | None = None, steps: Value | None = None) -> Value:
    begins, stops = host(starts), host(ends)
    dims = host(axes) if axes is not None else list(range(len(begins)))
    strides = host(steps) if steps is not None else [1] * len(begins)
    index = [slice(None)] * x.data.dim()
    for d, begin, stop, stride in zip(dims, begins, stops, strides, strict=True):
        if stride < 1:
            raise UnsupportedOperator(f"Slice has step {stride}; expected a positive step")
        index[d] = slice(*slice(begin, stop, stride).indices(x.data.shape[d]))  # clamps as ONNX does
    return x.moved(x.data[tuple(index)])


@operator("Gather")
def _gather(x: Value, indices: Value, *, axis: int = 0) -> Value:
    axis %= x.data.dim()
    size, index = x.data.shape[axis], indices.data
    picked = torch.index_select(x.data, axis, torch.where(index < 0, index + size, index).flatten())
    return x.moved(picked.reshape(x.data.shape[:axis] + index.shape + x.data.shape[axis + 1 :]))


@operator("Range", host=(0, 1, 2))
def _range(start: Value, limit: Value, delta: Value) -> Value:
    (first,), (last,), (step,) = host(start), host(limit), host(delta)
    count = max(0, math.ceil((last - first) / step))
    return rounded(first + step * torch.arange(count, dtype=storage(start.dtype)), one_type(start, limit, delta))


@operator("Expand", host=(1,))
def _expand(x: Value, shape: Value) -> Value:
    return x.moved(torch.broadcast_to(x.data, np.broadcast_shapes(x.data.shape, tuple(host(shape)))))


@operator("ConstantOfShape", host=(0,))
def _constant_of_shape(shape: Value, *, value: np.ndarray[Any, Any] | None = None) -> Value:
    number = np.float32(0) if value is None else value.reshape(())
    dtype: torch.dtype = getattr(torch, number.dtype.name)
    fill = float(number) if dtype.is_floating_point else int(number)
    return Value(torch.full(host(shape), fill, dtype=storage(dtype)), dtype)


@operator("Pad", host=(1, 3))
def _pad(x: Value, pads: Value, constant_value: Value | None = None, axes: Value | None = None, *,
         mode: str = "constant") -> Value:  # fmt: skip
    if mode != "constant":
        raise UnsupportedOperator(f"Pad has mode {mode!r}; expected 'constant'")
    rank, amounts = x.data.dim(), host(pads)
    dims = [d % rank for d in host(axes)] if axes is not None else list(range(rank))
    before_after = [0] * (2 * rank)  # torch counts pairs from the last axis
    for i, d in enumerate(dims):
        before_after[2 * (rank - 1 - d) : 2 * (rank - d)] = [amounts[i], amounts[i + len(dims)]]
    known = constant_value is not None and not constant_value.data.is_meta  # the number does not change the shape
    number = constant_value.data.item() if constant_value is not None and known else 0
    return x.moved(torch.nn.functional.pad(x.data, before_after, value=number))
