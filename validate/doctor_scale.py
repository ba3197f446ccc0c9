"""The softmax scale as a graph applies it, measured: unit rows in the cache read queries back, scaled as scores are.

A cached row that is 1 in one rotary column and 0 elsewhere has the score scale x (that column of the rotated query).
Over all rotary columns the squares sum to scale^2 x factor^2 x |query before its rotation|^2, whatever the position,
since a rotation keeps lengths. Scores are read where they enter the softmax, so the scale follows from them and from
the query's projection in one run, wherever it was put: on the scores or their sum, in the query, on cos and sin. A mask
and a bias of keys are the same for an empty row, and fall out. Rows of a half show whether scores grow as rows do;
where they do not, nothing is said.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from onnx import numpy_helper

from validate.absorption_parts import Attention, Parts
from validate.dataflow import PRODUCTS, WHOLE, Tag
from validate.doctor_angles import Turned
from validate.doctor_patient import Call, CannotRunError, Patient
from validate.doctor_rotation import rotary_columns
from validate.graph_shapes import Graph

_KEEP = {"Cast", "Reshape", "Transpose", "Identity", "Squeeze", "Unsqueeze", "Add", "Sub", "Where", "Concat"}
_SOFTMAX = {"Softmax", "LogSoftmax", "Exp"}  # e^x: of scores less their maximum, which is the same for all rows
LINEAR = 0.02  # how far scores of half a row may be from half of its scores (float16 rows: 1e-3)


@dataclass(frozen=True)
class Scale:
    """The scale of the rotary half of the scores, the factor on cos and sin included, and where scores are made."""

    value: float
    node: str


def measure(patient: Patient, parts: Parts, a: Attention, query: Turned, rotary: int, rng: np.random.Generator,
            ) -> Scale:
    """CannotRunError where scores cannot be read."""
    products = [(p, rotary_columns(parts, a, p)) for p in a.scores if p.node.op not in WHOLE]
    if not products:
        raise CannotRunError("scores are inside an operator of attention")
    product, columns = next((pair for pair in products if len(pair[1]) == rotary), products[0])
    if len(columns) != rotary:
        raise CannotRunError(f"{len(columns)} rotary columns of the cache meet queries at {product.node.name}, not "
                             f"{rotary}")
    name = _into_softmax(parts, product.node.outputs[0])
    if name is None:
        raise CannotRunError(f"no softmax was found behind {product.node.name}")
    call, rows = _unit_rows(patient, [(cache, column) for _, cache, column in columns], rng)
    halves = Call(call.tokens, {n: past / 2 for n, past in call.pasts.items()}, call.lengths)
    early = _scaled_before(parts, query.before)
    wanted = [name, query.before, *(n for pair in early for n in pair)]
    found = {n: v.astype(np.float64) for n, v in patient.run(call, wanted).items()}
    again = patient.run(halves, wanted)[name].astype(np.float64)
    scores, half = (_past_scores(s, rows, call.new, rotary) for s in (found[name], again))
    if not np.isfinite(scores).all() or np.abs(scores - 2 * half).max() > LINEAR * np.abs(scores).max():
        raise CannotRunError(f"scores at {name} do not grow as cached rows do (masked, normalised, capped on the way)")
    value = _norm(scores) / max(_norm(found[query.before]), 1e-300)
    for before, after in early:
        value *= _norm(found[after]) / max(_norm(found[before]), 1e-300)
    return Scale(value, product.node.name)


def _norm(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).sum()))


def _scaled_before(parts: Parts, name: str) -> list[tuple[str, str]]:
    """Where a query is multiplied by one number between its projection and its rotation: tensors before and after.
    CannotRunError where it is by several: whether they are a scale is not to be told."""
    found = []
    while (node := parts.graph.producer.get(name)) is not None and not parts.weighted(node):
        data = [n for n in node.inputs if parts.flow.tags.get(n) is Tag.ACT]
        if len(data) != 1:  # a norm: what goes on is the query
            break
        if node.op in ("Mul", "Div"):
            if any(parts.flow.few.elements(n) != 1 for n in node.inputs if n != data[0]):
                raise CannotRunError(f"{node.name} multiplies the query's columns each by its own number")
            found.append((data[0], name))
        name = data[0]
    return found


def _into_softmax(parts: Parts, name: str) -> str | None:
    """What enters the first softmax that a product's scores reach."""
    front, seen = [name], {name}
    while front:
        at = front.pop(0)
        for node in parts.graph.consumers.get(at, []):
            if node.op in _SOFTMAX:
                return at
            if node.op in PRODUCTS or node.op in WHOLE:
                continue
            fresh = [n for n in node.outputs if n and n not in seen and parts.flow.tags.get(n) is Tag.SCORES]
            seen.update(fresh)
            front += fresh
    return None


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
    """The product of the scalars that scores are multiplied or divided by before their softmax, alone or in a sum."""
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
