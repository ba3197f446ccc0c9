"""One part of a graph after another, where nothing else orders them.

A builder that may run parts in any order runs what is ready first, and holds every part's scratch at once: all chosen
experts' gathered weights, every head's K and V. Here a part's input is made to depend on the result before it, by an
operation that changes nothing and that no optimiser can prove so: a NaN test of the finished result.
"""

from __future__ import annotations

from onnx import TensorProto

from exporter.graph import GraphBuilder


def _nan_bit(g: GraphBuilder, finished: str, axes: tuple[int, ...], dtype: int) -> str:
    """0 where `finished` is a number, 1 where it is NaN, reduced over `axes`, in `dtype`."""
    top = g.op("ReduceMax", finished, g.ints(*axes), name="after_max", keepdims=0)
    return g.to(g.op("IsNaN", top, name="after_nan"), dtype, "after_bit")


def index_after(g: GraphBuilder, index: str, finished: str) -> str:
    """Indices [N], all at least 0, known only when `finished` [N, D] is: the greater of each and (0 or 1) - 1."""
    bit = _nan_bit(g, finished, (1,), TensorProto.INT64)
    return g.op("Max", index, g.op("Sub", bit, g.int_scalar(1), name="after"), name="index_after")


def values_after(g: GraphBuilder, values: str, finished: str, rank: int) -> str:
    """Values known only when `finished` (of `rank` axes) is: themselves plus 0, or plus 1 when that is NaN anyway."""
    bit = _nan_bit(g, finished, tuple(range(rank)), g.dtype.onnx)
    return g.op("Add", values, bit, name="values_after")
