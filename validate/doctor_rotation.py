"""Where a graph rotates its rotary key and query: a tensor before and one behind whatever operators do it.

Behind it are the rotary columns of a new cache row, and those of the query that meet the cache's; both are followed
back to a tensor of their own. Before it are the tensors of as many numbers that everything behind it has to pass on its
way from the projection. Which of them it is, measuring tells: the first from which on the columns turn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from validate.absorption_parts import Attention, Parts, meet
from validate.columns import Piece
from validate.dataflow import ATTENTION, Product, Tag
from validate.doctor_angles import Turned
from validate.graph_shapes import Graph, Node

_BY_ELEMENT = {"Mul", "Div", "Cast", "CastLike", "Identity", "Neg"}
_ARRANGE = {"Reshape", "Unsqueeze", "Squeeze", "Flatten", "Expand"}
_NEW_ROWS = {"TensorScatter": 1, "ScatterND": 2, "ScatterElements": 2}
_STEPS = 40


def rotations(parts: Parts, a: Attention, rotary: int) -> dict[str, list[Turned]]:
    """By side (key, query) the rotations that it may be, those with most of the graph inside first."""
    keys = [p for written in a.written.values() for p in written]
    queries = [p for s in a.scores for p in parts.new.of(s.other, s.other_axis)]
    found = {}
    for side, pieces, behind in (("key", keys, _key(parts, a, rotary)), ("query", queries, _query(parts, a, rotary))):
        node = next((t for p in pieces if (t := _of_one_node(parts, p, side))), None)
        wide = [] if behind is None else list(_before(parts, behind, side, None if node is None else node.node))
        found[side] = [*wide, *([] if node is None else [node])]
    return {side: turned for side, turned in found.items() if turned}


def rotary_columns(parts: Parts, a: Attention, product: Product) -> list[tuple[int, str, int]]:
    """(place along the sum, cache, column) of those columns of cached rows that are not latent, as a product reads
    them."""
    caches, found, at = {c.name for c in parts.flow.roles.caches}, [], 0
    for piece in parts.past.of(product.rows, product.rows_axis):
        if piece.leaf in caches and piece.exact:
            found += [(at + i, piece.leaf, piece.start + i) for i in range(piece.width)
                      if not _latent(a, piece.leaf, piece.start + i)]
        at += piece.width
    return found


def _latent(a: Attention, cache: str, column: int) -> bool:
    return any(meet((cache, column, column + 1), latent) for latent in a.latent)


# ---- behind the rotation


def _key(parts: Parts, a: Attention, rotary: int) -> str | None:
    """The tensor that a new row's rotary columns are written from."""
    for cache in a.caches:
        out = a.outputs.get(cache.name)
        if out is None:
            continue
        rank = parts.new.rank(cache.name)
        axis = rank - 1 if cache.axis != rank - 1 else rank - 2
        columns = [i for i in range(parts.new.size(cache.name, axis)) if not _latent(a, cache.name, i)]
        if len(columns) == rotary == columns[-1] - columns[0] + 1:
            return _own(parts, out, axis, columns[0], rotary)
    return None


def _query(parts: Parts, a: Attention, rotary: int) -> str | None:
    """The tensor of the query's columns that meet the cache's rotary columns."""
    for product in a.scores:
        places = [at for at, _, _ in rotary_columns(parts, a, product)] if product.node.op != ATTENTION else []
        if len(places) == rotary == places[-1] - places[0] + 1:
            found = _own(parts, product.other, product.other_axis, places[0], rotary)
            if found is not None:
                return found
    return None


def _own(parts: Parts, name: str, axis: int, start: int, width: int) -> str | None:
    """The tensor of tokens whose last axis is columns `start` to `start + width - 1` of `name` along `axis`."""
    at: tuple[str, int, int] | None = (name, axis, start)
    for _ in range(_STEPS):
        if at is None:
            return None
        name, axis, start = at
        rank = parts.new.rank(name)
        if start == 0 and axis == rank - 1 and parts.new.size(name, axis) == width and (
                parts.flow.tags.get(name) is Tag.ACT):
            return name
        node = parts.graph.producer.get(name)
        at = None if node is None else _back(parts, node, name, axis, start)
    return None


def _back(parts: Parts, node: Node, name: str, axis: int, start: int) -> tuple[str, int, int] | None:
    """One step of that: the input that holds those columns, its axis, and where they begin in it."""
    size, rank, tags = parts.new.size, parts.new.rank, parts.flow.tags
    source = node.inputs[0] if node.inputs else ""
    if node.op == "Concat":
        if node.attributes["axis"] % rank(name) != axis:  # cached rows and new ones
            fresh = [n for n in node.inputs if tags.get(n) is Tag.ACT]
            return (fresh[0], axis, start) if len(fresh) == 1 else None
        for part in node.inputs:
            if start < size(part, axis):
                return part, axis, start
            start -= size(part, axis)
        return None
    if node.op in _NEW_ROWS:
        source = node.inputs[_NEW_ROWS[node.op]]
        return source, axis - rank(name) + rank(source), start
    if node.op == "Transpose":
        perm = node.attributes.get("perm") or list(reversed(range(rank(name))))
        return source, perm[axis], start
    if node.op in _BY_ELEMENT:
        data = [n for n in node.inputs if tags.get(n) in (Tag.ACT, Tag.ROWS)]
        moved = axis - rank(name) + rank(data[0]) if len(data) == 1 else -1
        return (data[0], moved, start) if moved >= 0 and size(data[0], moved) == size(name, axis) else None
    if node.op in _ARRANGE:
        before, after = parts.flow.few.shape.get(source, ()), parts.flow.few.shape[name]
        for i, columns in enumerate(before):
            if columns == after[axis] and math.prod(before[:i]) == math.prod(after[:axis]):
                return source, i, start
    return None


# ---- before the rotation


def _before(parts: Parts, behind: str, side: str, node: str | None) -> Iterator[Turned]:
    """What stands before a tensor and has as many numbers, so that all its data passes there; nearest to the projection
    first. `node`: the name to report, where one node is known to rotate."""
    made, ends = _ancestors(parts, behind)
    if not ends:
        return
    named = node or parts.graph.producer[behind].name
    count = parts.flow.few.elements(behind)
    for name in made:
        if name != behind and parts.flow.few.elements(name) == count and not (
                _ancestors(parts, behind, without=name)[1] - {name}):
            yield Turned(side, named, min(ends), name, behind)


def _ancestors(parts: Parts, name: str, without: str = "") -> tuple[list[str], set[str]]:
    """Tensors of tokens that one is made of, back to products with weights, in the graph's order; and those products'
    results. `without`: where not to go on."""
    found, ends, front = {name}, set[str](), [name]
    while front:
        at = front.pop()
        node = parts.graph.producer.get(at)
        if at == without:
            continue
        if node is None or parts.weighted(node):
            ends.add(at)
            continue
        for n in node.inputs:
            if n not in found and parts.flow.tags.get(n) is Tag.ACT:
                found.add(n)
                front.append(n)
    order = {o: i for i, node in enumerate(parts.graph.nodes) for o in node.outputs}
    return sorted(found, key=lambda n: order.get(n, -1)), ends


# ---- a rotation by one node


def _of_one_node(parts: Parts, piece: Piece, side: str) -> Turned | None:
    """A rotation by one node, of columns of one product."""
    if len(piece.turned_by) != 1 or not piece.leaf:
        return None
    (name,) = piece.turned_by
    node = next(n for n in parts.graph.nodes if n.name == name)
    return Turned(side, name, piece.leaf, _input(parts.graph, node), node.outputs[0])


def _input(graph: Graph, node: Node) -> str:
    """What a rotation turns: the operator's input, or the x of x cos + rotate(x) sin (the rotated x is a Concat)."""
    if node.op not in ("Add", "Sub"):
        return node.inputs[0]
    data = []
    for product in (graph.producer[n] for n in node.inputs):
        wide = [n for n in product.inputs if n in graph.producer]
        data += [n for n in wide if _reaches(graph, n)]
    plain = [n for n in data if graph.producer[n].op != "Concat"]
    return (plain or data or [node.inputs[0]])[0]


def _reaches(graph: Graph, name: str, depth: int = 12) -> bool:
    """Whether a product with weights stands a few steps before a tensor: data, not angles."""
    front = {name}
    for _ in range(depth):
        made = [graph.producer[n] for n in front if n in graph.producer]
        if any(m.op in ("MatMul", "Gemm", "Einsum", "com.microsoft:FusedMatMul", "com.microsoft:MatMulNBits")
               and any(n in graph.constants for n in m.inputs) for m in made):
            return True
        front = {n for m in made if m.op not in ("Cos", "Sin") for n in m.inputs[:1 if m.op == "Gather" else None] if n}
    return False
