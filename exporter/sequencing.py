"""One part of a graph after another, where nothing else orders them.

A builder that may run parts in any order runs what is ready first, and holds every part's scratch at once: all chosen
experts' gathered weights, every head's K and V. Here a part's input is picked by an index that is known only when the
result before it is. The index never changes: it is the greater of itself and 0 or -1, by whether one element of that
result is a NaN, which no builder can know ahead.
"""

from __future__ import annotations

from onnx import TensorProto

from exporter.graph import GraphBuilder


def index_after(g: GraphBuilder, index: str, finished: str, name: str, *axes: int) -> str:
    """`index` [N] (all at least 0) as it is, but after `finished`, of which one element along `axes` is looked at: N
    elements, or one, must be left."""
    one = g.op("Slice", finished, g.ints(*[0] * len(axes)), g.ints(*[1] * len(axes)), g.ints(*axes), name=f"{name}_one")
    nan = g.op("IsNaN", g.op("Reshape", one, g.ints(-1), name=f"{name}_flat"), name=f"{name}_nan")
    least = g.op("Sub", g.to(nan, TensorProto.INT64, f"{name}_bit"), g.int_scalar(1), name=f"{name}_least")
    return g.op("Max", index, least, name=f"{name}_after")


def values_after(g: GraphBuilder, values: str, finished: str, name: str, *axes: int) -> str:
    """`values` [1, ...] as they are, but after `finished`; `axes` are all of its axes."""
    return g.op("Gather", values, index_after(g, g.ints(0), finished, f"{name}_index", *axes), name=name, axis=0)
