"""The softmax scale as a graph applies it, measured: unit rows in the cache read queries back, scaled as scores are.

A cached row that is 1 in one rotary column and 0 elsewhere has the score scale x (that column of the rotated query).
Over all rotary columns the squares sum to scale^2 x factor^2 x |query before its rotation|^2, whatever the position,
since a rotation keeps lengths. So the scale follows from scores and from the query's projection in one run, wherever it
was put: on the scores, in the query, in the weights, on cos and sin.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import numpy_helper

from validate.absorption_parts import Attention, Parts, meet
from validate.dataflow import ATTENTION, Product
from validate.doctor_angles import Turned
from validate.doctor_patient import Call, CannotRunError, Patient
from validate.graph_shapes import Graph

_KEEP = {"Cast", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze"}


@dataclass(frozen=True)
class Scale:
    """The scale of the rotary half of the scores, the factor on cos and sin included, and where scores are made."""

    value: float
    node: str
    outside: float  # the part that scalars behind the product give


def measure(patient: Patient, parts: Parts, a: Attention, query: Turned, rotary: int, rng: np.random.Generator,
            ) -> Scale:
    """CannotRunError where scores cannot be read."""
    products = [(p, list(_rope_columns(parts, a, p))) for p in a.scores if p.node.op != ATTENTION]
    if not products:
        raise CannotRunError("scores are inside the Attention operator")
    product, columns = next((pair for pair in products if len(pair[1]) == rotary), products[0])
    if len(columns) != rotary:
        raise CannotRunError(f"{len(columns)} rotary columns of the cache meet queries at {product.node.name}, not "
                             f"{rotary}")
    name = product.node.outputs[0]
    call, rows = _unit_rows(patient, columns, rng)
    found = patient.run(call, (name, query.before))
    scores = _past_scores(found[name].astype(np.float64), rows, call.new, rotary)
    raw = found[query.before].astype(np.float64)
    outside = behind(parts.graph, name)
    inside = float(np.sqrt((scores**2).sum() / max((raw**2).sum(), 1e-300)))
    return Scale(inside * outside, product.node.name, outside)


def _rope_columns(parts: Parts, a: Attention, product: Product) -> Iterator[tuple[str, int]]:
    """(cache, column) of those columns of cached rows that are not latent, as this product reads them."""
    met = parts.cached(parts.past.of(product.rows, product.rows_axis))
    for name, start, stop in sorted(met):
        for column in range(start, stop):
            if not any(meet((name, column, column + 1), latent) for latent in a.latent):
                yield name, column


def _unit_rows(patient: Patient, columns: list[tuple[str, int]], rng: np.random.Generator) -> tuple[Call, int]:
    """One token behind as many rows as there are columns, each 1 in its own; and how many rows the step is given."""
    count = len(columns)
    if patient.fixed_rows is not None and patient.fixed_rows <= count + 1:
        raise CannotRunError(f"{patient.fixed_rows} rows of cache are too few for {count} rotary columns")
    rows = patient.rows_for(count + 3)
    pasts = patient.empty(1, rows)
    axes = {c.name: c.axis for c in patient.roles.caches}
    for row, (name, column) in enumerate(columns):
        at: list[int | slice] = [0] * pasts[name].ndim
        at[axes[name]], at[-1] = row, column
        pasts[name][tuple(at)] = 1
    valid = count + 3 if patient.fixed_rows is None else count + 1
    return Call(patient.draw(rng, 1, 1), pasts, np.array([valid])), rows


def _past_scores(scores: np.ndarray, rows: int, new: int, count: int) -> np.ndarray:
    """The scores of the first `count` rows less that of an empty row (a bias of keys), along whichever axis runs over
    rows."""
    axes = [i for i, size in enumerate(scores.shape) if size in (rows, rows + new)]
    if len(axes) != 1:
        raise CannotRunError(f"scores of shape {list(scores.shape)}: which axis runs over {rows} rows is not clear")
    found: np.ndarray = np.take(scores, range(count), axes[0]) - np.take(scores, [count], axes[0])
    return found


def behind(graph: Graph, name: str) -> float:
    """The product of the scalars that scores are multiplied or divided by before anything else happens to them."""
    value = 1.0
    for _ in range(12):
        readers = graph.consumers.get(name, [])
        if len(readers) != 1:
            return value
        node = readers[0]
        if node.op in ("Mul", "Div"):
            other = next((n for n in node.inputs if n != name), name)
            number = _scalar(graph, other)
            if number is None or (node.op == "Div" and node.inputs[0] != name):
                return value
            value = value * number if node.op == "Mul" else value / number
        elif node.op not in _KEEP:
            return value
        name = node.outputs[0]
    return value


def _scalar(graph: Graph, name: str) -> float | None:
    """A constant of one element; None for anything else."""
    tensor = graph.constants.get(name)
    if tensor is None:
        made = graph.producer.get(name)
        same = made is not None and made.op in ("Cast", "Identity", "Reshape")
        return _scalar(graph, made.inputs[0]) if made is not None and same else None
    if tensor.external_data or int(np.prod(tensor.dims)) != 1:
        return None
    return float(numpy_helper.to_array(tensor).astype(np.float64).reshape(-1)[0])
