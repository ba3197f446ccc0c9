"""What each kind of TensorRT layer computes, one function per kind, in torch and in TensorRT's own terms.

Positional parameters are a layer's inputs (None for an optional one left out), keyword-only ones its attributes as
`engines.network` reads them. `modes` lists the values of an attribute that are modelled; whoever runs a network stops
at others. Nothing is shared with the ONNX operators: two readings of one graph must be able to differ. Results are
rounded to their declared dtype by the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.interpreter import from_numpy
from engines.onnx_ops import INT4
from exporter.errors import CheckError

Result = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Kind:
    """One row: the function, and per attribute the values that it knows (any, where an attribute is not listed)."""

    call: Callable[..., Result]
    modes: Mapping[str, tuple[Any, ...]]


TABLE: dict[str, Kind] = {}


def kind(name: str, **modes: tuple[Any, ...]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Enter a function in the table."""

    def enter(call: Callable[..., Result]) -> Callable[..., Result]:
        TABLE[name] = Kind(call, modes)
        return call

    return enter


def _numbers(value: Tensor | None, otherwise: Sequence[int] | None) -> list[int]:
    """Sizes, axes or steps: of the input that gives them, else of the attribute."""
    if value is not None:
        return [int(n) for n in value.flatten().tolist()]
    if otherwise is None:
        raise CheckError("neither an input nor an attribute gives its sizes")
    return list(otherwise)


def _bits(mask: int, rank: int) -> list[int]:
    """The axes of a bit mask."""
    return [axis for axis in range(rank) if mask >> axis & 1]


def _inside(what: str, index: Tensor, size: int) -> Tensor:
    """Indices, all in 0..size-1. A negative one is undefined along a dynamic axis, one past the end reads a zero."""
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= size):
        raise CheckError(f"{what} {int(index.min())} to {int(index.max())} of {size}; expected indices inside")
    return index


# ---- elementwise


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Integers are divided as C++ divides them, toward zero."""
    return torch.div(a, b, rounding_mode=None if a.is_floating_point() else "trunc")


_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "SUM": torch.add, "PROD": torch.mul, "MAX": torch.maximum, "MIN": torch.minimum, "SUB": torch.sub, "DIV": _divide,
    "POW": torch.pow, "FLOOR_DIV": lambda a, b: torch.div(a, b, rounding_mode="floor"), "AND": torch.logical_and,
    "OR": torch.logical_or, "XOR": torch.logical_xor, "EQUAL": torch.eq, "GREATER": torch.gt, "LESS": torch.lt}
_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "EXP": torch.exp, "LOG": torch.log, "SQRT": torch.sqrt, "RECIP": torch.reciprocal, "ABS": torch.abs,
    "NEG": torch.neg, "SIN": torch.sin, "COS": torch.cos, "CEIL": torch.ceil, "FLOOR": torch.floor, "ERF": torch.erf,
    "NOT": torch.logical_not, "SIGN": torch.sign, "ISINF": torch.isinf, "ISNAN": torch.isnan}
_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "RELU": torch.relu, "SIGMOID": torch.sigmoid, "TANH": torch.tanh}


@kind("ELEMENTWISE", op=tuple(_ELEMENTWISE))
def _elementwise(a: Tensor, b: Tensor, *, op: str) -> Tensor:
    return _ELEMENTWISE[op](a, b)


@kind("UNARY", op=tuple(_UNARY))
def _unary(x: Tensor, *, op: str) -> Tensor:
    return _UNARY[op](x)


@kind("ACTIVATION", type=tuple(_ACTIVATION))
def _activation(x: Tensor, *, type: str, alpha: float, beta: float) -> Tensor:  # noqa: A002
    return _ACTIVATION[type](x)  # alpha and beta are of other types


@kind("SELECT")
def _select(condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@kind("IDENTITY")
def _identity(x: Tensor) -> Tensor:
    return x


@kind("CAST", to_type=(torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool))
def _cast(x: Tensor, *, to_type: torch.dtype) -> Tensor:
    return x.float() if to_type.is_floating_point else x.to(to_type)  # floats toward zero, as C++ casts


# ---- products and reductions


@kind("MATRIX_MULTIPLY", op0=("NONE", "TRANSPOSE", "VECTOR"), op1=("NONE", "TRANSPOSE", "VECTOR"))
def _matrix_multiply(a: Tensor, b: Tensor, *, op0: str, op1: str) -> Tensor:
    """An operand that is a collection of vectors has one axis less, and so has the result."""
    left = a.mT if op0 == "TRANSPOSE" else a.unsqueeze(-2) if op0 == "VECTOR" else a
    right = b.mT if op1 == "TRANSPOSE" else b.unsqueeze(-1) if op1 == "VECTOR" else b
    product = torch.matmul(left, right)
    if op1 == "VECTOR":
        product = product.squeeze(-1)
    return product.squeeze(-1 if op1 == "VECTOR" else -2) if op0 == "VECTOR" else product


_REDUCE: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "SUM": lambda x, dims, keep: torch.sum(x, dims, keep), "AVG": lambda x, dims, keep: torch.mean(x, dims, keep),
    "MAX": lambda x, dims, keep: torch.amax(x, dims, keep), "MIN": lambda x, dims, keep: torch.amin(x, dims, keep)}


@kind("REDUCE", op=tuple(_REDUCE))
def _reduce(x: Tensor, *, op: str, axes: int, keep_dims: bool) -> Tensor:
    dims = _bits(axes, x.dim())
    return _REDUCE[op](x, dims, keep_dims) if dims else x


@kind("SOFTMAX")
def _softmax(x: Tensor, *, axes: int) -> Tensor:
    """In float64: a float32 sum along a strided axis of thousands of rows would show."""
    (axis,) = _bits(axes, x.dim())
    return torch.softmax(x, axis, dtype=torch.float64)


@kind("TOPK", op=("MAX", "MIN"))
def _top_k(x: Tensor, count: Tensor | None = None, *, op: str, k: int, axes: int) -> Result:
    """Sorted values and their indices; of equal values the lower index first, which TensorRT does not promise."""
    (axis,) = _bits(axes, x.dim())
    values, indices = torch.sort(x, dim=axis, descending=op == "MAX", stable=True)
    wanted = int(count) if count is not None else k
    return values.narrow(axis, 0, wanted), indices.narrow(axis, 0, wanted)


# ---- quantised values


_CODES = (torch.float8_e4m3fn, torch.int8, INT4)


def _scaled(x: Tensor, scale: Tensor, axis: int) -> Tensor:
    """Scales as they meet the elements of x: one of all, one per index of `axis`, or, in the rank of x, one per block
    whose sizes are the quotients of the two shapes."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() == 1 and x.dim() != 1:
        if scale.shape[0] != x.shape[axis]:
            raise CheckError(f"scales {list(x.shape)} along axis {axis} by {list(scale.shape)}")
        return scale.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])
    if scale.dim() != x.dim() or any(n % m for n, m in zip(x.shape, scale.shape, strict=True)):
        raise CheckError(f"scales {list(x.shape)} by {list(scale.shape)}; expected a divisor of every size")
    for d in range(x.dim()):
        scale = scale.repeat_interleave(x.shape[d] // scale.shape[d], d)
    return scale


@kind("DEQUANTIZE", block_shape=(None,), to_type=(torch.float32, torch.float16, torch.bfloat16))
def _dequantize(x: Tensor, scale: Tensor, *, axis: int, block_shape: None, to_type: torch.dtype) -> Tensor:
    return x.float() * _scaled(x, scale, axis)


@kind("QUANTIZE", block_shape=(None,), to_type=_CODES)
def _quantize(x: Tensor, scale: Tensor, *, axis: int, block_shape: None, to_type: torch.dtype) -> Tensor:
    """x / scale to the nearest code, ties to even, clamped; the caller rounds to FP8."""
    quotient = x / _scaled(x, scale, axis)
    if to_type == torch.float8_e4m3fn:
        return quotient
    low, high = (-8, 7) if to_type == INT4 else (-128, 127)
    return torch.round(quotient).clamp(low, high).to(torch.int8)


# ---- shapes and movement


@kind("CONSTANT")
def _constant(*, weights: Any) -> Tensor:
    return from_numpy(weights, torch.device("cpu")).data


@kind("SHAPE")
def _shape(x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape), dtype=torch.int64)


@kind("SHUFFLE")
def _shuffle(x: Tensor, dims: Tensor | None = None, *, first_transpose: Sequence[int],
             reshape_dims: Sequence[int] | None, second_transpose: Sequence[int], zero_is_placeholder: bool) -> Tensor:
    """Transpose, reshape where there are sizes, transpose; permutations name eight axes, whatever the rank."""
    x = x.permute(tuple(first_transpose[:x.dim()]))
    if dims is not None or reshape_dims is not None:
        sizes = _numbers(dims, reshape_dims)
        if zero_is_placeholder:
            sizes = [x.shape[i] if size == 0 else size for i, size in enumerate(sizes)]
        known = math.prod(size for size in sizes if size != -1)
        if -1 in sizes:
            if sizes.count(-1) > 1 or known == 0:
                raise CheckError(f"reshapes {list(x.shape)} to {sizes}: nothing tells the size of -1")
            sizes[sizes.index(-1)] = x.numel() // known
        x = x.reshape(sizes)
    return x.permute(tuple(second_transpose[:x.dim()]))


@kind("SQUEEZE")
def _squeeze(x: Tensor, axes: Tensor | None = None) -> Tensor:
    dims = {d % x.dim() for d in axes.tolist()} if axes is not None else {d for d, n in enumerate(x.shape) if n == 1}
    if any(x.shape[d] != 1 for d in dims):
        raise CheckError(f"squeezes axes {sorted(dims)} of {list(x.shape)}; expected axes of size 1")
    return x.reshape([size for d, size in enumerate(x.shape) if d not in dims])


@kind("UNSQUEEZE")
def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    dims = axes.flatten().tolist()
    for d in sorted(d % (x.dim() + len(dims)) for d in dims):  # they count in the result
        x = x.unsqueeze(d)
    return x


@kind("CONCATENATION")
def _concatenation(*parts: Tensor, axis: int) -> Tensor:
    return torch.cat(parts, axis)


@kind("SLICE", mode=("STRICT_BOUNDS", "FILL"))
def _slice(x: Tensor, starts: Tensor | None = None, sizes: Tensor | None = None, strides: Tensor | None = None,
           filling: Tensor | None = None, dims: Tensor | None = None, *, start: Sequence[int] | None,
           shape: Sequence[int] | None, stride: Sequence[int] | None, axes: Sequence[int] | None, mode: str) -> Tensor:
    """Per axis `size` elements, `stride` apart, from `start` on; a stride of 0 repeats one. `sizes` count elements of
    the result, there is no end. Mode FILL gives what lies outside a number (0 without an input)."""
    along = _numbers(dims, axes) if dims is not None or axes is not None else list(range(x.dim()))
    asked = (along, _numbers(starts, start), _numbers(sizes, shape), _numbers(strides, stride))
    for axis, first, size, step in zip(*asked, strict=True):
        if mode == "FILL":
            x = _slice_filled(x, axis % x.dim(), first, size, step, 0 if filling is None else filling.item())
            continue
        last, length = first + (size - 1) * step, x.shape[axis]
        if size > 0 and (min(first, last) < 0 or max(first, last) >= length):
            raise CheckError(f"slices {first} to {last} of {length} rows along axis {axis}; expected rows inside")
        if step == 0 and size > 0:
            x = x.narrow(axis, first, 1).expand([size if d == axis % x.dim() else -1 for d in range(x.dim())])
        elif step == 1 or size == 0:
            x = x.narrow(axis, first if size else 0, size)
        else:
            x = x.index_select(axis, first + step * torch.arange(size))
    return x


def _slice_filled(x: Tensor, axis: int, first: int, size: int, step: int, number: float) -> Tensor:
    index, length = first + step * torch.arange(size), x.shape[axis]
    inside = ((index >= 0) & (index < length)).reshape([-1 if d == axis else 1 for d in range(x.dim())])
    if length == 0:
        return torch.full([size if d == axis else n for d, n in enumerate(x.shape)], number, dtype=x.dtype)
    picked = x.index_select(axis, index.clamp(0, length - 1))
    return torch.where(inside, picked, torch.tensor(number, dtype=x.dtype))


@kind("GATHER", mode=("DEFAULT", "ELEMENT", "ND"), num_elementwise_dims=(0,))
def _gather(x: Tensor, indices: Tensor, *, axis: int, mode: str, num_elementwise_dims: int) -> Tensor:
    index = indices.long()
    if mode == "ND":
        parts = index.unbind(-1)
        return x[tuple(_inside("gathers", part, x.shape[d]) for d, part in enumerate(parts))]
    _inside("gathers", index, x.shape[axis])
    if mode == "ELEMENT":
        return torch.gather(x, axis, index)
    picked = x.index_select(axis, index.flatten())
    return picked.reshape(x.shape[:axis] + index.shape + x.shape[axis + 1:])


@kind("SCATTER", mode=("ELEMENT", "ND"))
def _scatter(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int, mode: str) -> Tensor:
    index = indices.long()
    if mode == "ELEMENT":
        return torch.scatter(x, axis, _inside("scatters to", index, x.shape[axis]), updates)
    result = x.clone()
    result[tuple(_inside("scatters to", part, x.shape[d]) for d, part in enumerate(index.unbind(-1)))] = updates
    return result


@kind("FILL", operation=("LINSPACE",), to_type=(torch.int32, torch.int64, torch.float32))
def _fill(sizes: Tensor | None = None, start: Tensor | None = None, steps: Tensor | None = None, *, operation: str,
          shape: Sequence[int] | None, alpha: float, beta: float, to_type: torch.dtype) -> Tensor:
    """alpha + beta[0] i + beta[1] j + ...: `beta` has a number per axis, the attribute is one of one axis."""
    made, wide = _numbers(sizes, shape), torch.float64 if to_type.is_floating_point else torch.int64
    first = start.to(wide).reshape(()) if start is not None else torch.tensor(alpha).to(wide)
    slopes = steps.to(wide).flatten() if steps is not None else torch.tensor([beta]).to(wide)
    if len(slopes) != len(made):
        raise CheckError(f"fills {made} with {len(slopes)} slopes; expected one per axis")
    result = first.expand(made)
    for axis, (slope, size) in enumerate(zip(slopes, made, strict=True)):
        result = result + (slope * torch.arange(size)).reshape([-1 if d == axis else 1 for d in range(len(made))])
    return result.to(to_type)


# ---- attention


@kind("ROTARY_EMBEDDING")
def _rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool,
                      rotary_embedding_dim: int) -> Tensor:
    """x [B, heads, T, d], cos and sin [B, T, r/2], or [P, r/2] picked by positions [B, T]; r is 0 for all d columns."""
    width = rotary_embedding_dim or x.shape[-1]
    if positions is not None:
        cos, sin = (table[_inside("rotates by", positions.long(), len(table))] for table in (cos, sin))
    if cos.shape[-1] != width // 2 or sin.shape != cos.shape:
        raise CheckError(f"rotates {width} columns by {list(cos.shape)} and {list(sin.shape)}; expected {width // 2}")
    c, s, turned = cos.unsqueeze(1), sin.unsqueeze(1), x[..., :width].clone()
    half = width // 2
    first, second = (slice(0, width, 2), slice(1, width, 2)) if interleaved else (slice(0, half), slice(half, width))
    real, imaginary = x[..., first], x[..., second]
    turned[..., first], turned[..., second] = real * c - imaginary * s, real * s + imaginary * c
    return torch.cat([turned, x[..., width:]], -1)


@kind("ATTENTION_INPUT", norm_op=("SOFTMAX",), causal_kind=("NONE", "UPPER_LEFT", "LOWER_RIGHT"),
      query_form=(None, "PADDED_BHND"), key_value_form=(None, "PADDED_BHND"), query_lengths=(None,),
      key_value_lengths=(None,), normalization_quantize_scale=(None,), num_ranks=(None, 1))
def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, causal_kind: str,
               **moot: Any) -> Tensor:
    """query [B, H, T, d], key and value [B, G, S, d], H a multiple of G -> [B, H, T, d]; nothing is scaled.

    A boolean mask is true where a query may look, another is added. UPPER_LEFT lets query i see keys up to i,
    LOWER_RIGHT up to i + S - T. A query that sees no key is NaN.
    """
    (batch, heads, queries, width), groups = query.shape, key.shape[1]
    rows = key.shape[2]
    grouped = query.reshape(batch, groups, heads // groups * queries, width)
    scores = torch.matmul(grouped, key.mT).reshape(batch, heads, queries, rows)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    if causal_kind != "NONE":
        reach = torch.arange(queries).unsqueeze(1) + (rows - queries if causal_kind == "LOWER_RIGHT" else 0)
        scores = torch.where(torch.arange(rows) <= reach, scores, -math.inf)
    weights = torch.softmax(scores, -1).reshape(batch, groups, heads // groups * queries, rows)
    return torch.matmul(weights, value).reshape(batch, heads, queries, value.shape[3])


@kind("ATTENTION_OUTPUT")
def _attention_output(x: Tensor) -> Tensor:
    return x  # the boundary's other side: everything was computed at the input


@kind("KV_CACHE_UPDATE", cache_mode=("LINEAR",), update_form=(None, "PADDED_BHND"), update_lengths=(None,))
def _kv_cache_update(cache: Tensor, update: Tensor, write_indices: Tensor, *, cache_mode: str, update_form: str | None,
                     update_lengths: None) -> Tensor:
    """cache [B, N, S_max, d] with update [B, N, T, d] written from row write_indices[b] on."""
    result = cache.clone()
    for sample, start in enumerate(write_indices.tolist()):
        _inside("writes rows", start + torch.arange(update.shape[2]), cache.shape[2])
        result[sample, :, start:start + update.shape[2]] = update[sample]
    return result
