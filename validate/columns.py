"""Where the columns of a tensor come from: walked back through splits, joins, reshapes, norms and rotations.

The walk stops at what makes new numbers, a product or an input, and brings back pieces: columns within a range of that
leaf, and what was done to them on the way. A join of cached rows with new ones along another axis is followed on the
side asked for. Where a reshape regroups columns a piece keeps the range that they lie in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from validate.dataflow import ATTENTION, NORMS, Flow, Tag
from validate.graph_shapes import Node

NORMED, SCALED = "normed", "scaled"
_SAME = {"Identity", "Cast", "CastLike", "Neg", "Dropout", "DequantizeLinear", "QuantizeLinear", "Clip", "Expand",
         "Unsqueeze", "Squeeze", "Reshape", "Flatten", "Transpose", "Contiguous"}
_PAIRS = {"Add", "Sub", "Mul", "Div", "Max", "Min", "Pow"}
_ROTARY = {"RotaryEmbedding", "com.microsoft:RotaryEmbedding"}
_UPDATE = {"TensorScatter": 1, "ScatterND": 2, "ScatterElements": 2}  # the input that holds the new rows
_MEANS = {"ReduceMean", "ReduceL2", "ReduceSumSquare", "ReduceSum"}


@dataclass(frozen=True)
class Piece:
    """`width` columns that come from columns `start` to `stop` - 1 of the tensor `leaf` along its own axis; the `marks`
    of what was done to them (normed, scaled by a number of each row), and the names of the nodes that rotated them."""

    width: int
    leaf: str
    start: int
    stop: int
    marks: frozenset[str] = frozenset()
    turned_by: frozenset[str] = frozenset()

    @property
    def exact(self) -> bool:
        """Whether it is those columns in their order, not some arrangement of them."""
        return self.stop - self.start == self.width


Pieces = tuple[Piece, ...]


class Columns:
    """Columns of one graph's tensors; `new` follows new rows where they meet cached ones, else the cached."""

    def __init__(self, flow: Flow, new: bool) -> None:
        self.flow, self.graph, self.new = flow, flow.graph, new
        self._found: dict[tuple[str, int], Pieces] = {}

    def size(self, name: str, axis: int) -> int:
        """Size of an axis; 0 where it is not known."""
        shape = self.flow.few.shape.get(name)
        return shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else 0

    def rank(self, name: str) -> int:
        """Axes of a tensor."""
        return len(self.flow.few.shape.get(name, ()))

    def rotated(self, node: Node) -> Pieces:
        """The columns that a node rotates, of its result's last axis; none where it is no rotation."""
        axis = self.rank(node.outputs[0]) - 1
        if node.op not in _ROTARY and self.rotation(node, axis) is None:
            return ()
        return tuple(p for p in self.of(node.outputs[0], axis) if node.name in p.turned_by)

    def of(self, name: str, axis: int) -> Pieces:
        """The pieces that the columns of `name` along `axis` (counted from the front) are made of, in order."""
        key = (name, axis)
        if key not in self._found:
            self._found[key] = self._leaf(name, axis)  # what a walk in a circle would meet
            node = self.graph.producer.get(name)
            if node is not None and self.size(name, axis):
                self._found[key] = self._through(node, name, axis)
        return self._found[key]

    def rotation(self, node: Node, axis: int) -> str | None:
        """The x of `x cos + y sin`, if `node` is one."""
        if node.op not in ("Add", "Sub"):
            return None
        found = []
        for name in node.inputs:
            made = self.graph.producer.get(name)
            if made is None or made.op != "Mul":
                return None
            angles = [n for n in made.inputs if self.flow.tags[n] is Tag.POS and self._wide(n, made.outputs[0], axis)]
            data = [n for n in made.inputs if n not in angles]
            if len(angles) != 1 or len(data) != 1:
                return None
            found.append(data[0])
        return found[0]

    def _wide(self, name: str, result: str, axis: int) -> bool:
        """Whether an operand has more than one number along `axis` of the result."""
        return self.size(name, axis - self.rank(result)) > 1

    def _leaf(self, name: str, axis: int) -> Pieces:
        size = self.size(name, axis)
        return (Piece(size, name, 0, size),)

    def _through(self, node: Node, name: str, axis: int) -> Pieces:
        if node.op in _SAME:
            return self._same(node, name, axis)
        if node.op in NORMS:
            return _marked(self.of(node.inputs[0], axis), NORMED)
        if node.op in _ROTARY:
            return self._rotary(node, axis)
        if node.op in _PAIRS:
            return self._pair(node, name, axis)
        walk: dict[str, Callable[[Node, str, int], Pieces]] = {
            "Concat": self._concat, "Split": self._split, "Slice": self._slice, "Gather": self._gather,
            "Pad": self._pad, "Where": self._where}
        if node.op in walk:
            return walk[node.op](node, name, axis)
        if node.op in _UPDATE:
            source = node.inputs[_UPDATE[node.op] if self.new else 0]
            return self.of(source, self.rank(source) + axis - self.rank(name))
        if node.op == ATTENTION and name in node.outputs[1:3]:
            place = node.outputs.index(name)
            source = node.inputs[place if self.new or len(node.inputs) < 6 else place + 3]
            return self._heads(source, name, axis)
        return self._leaf(name, axis)

    def _heads(self, source: str, name: str, axis: int) -> Pieces:
        """A key or value as the Attention operator returns it: by heads, from one that may have them side by side."""
        if self.rank(source) == self.rank(name):
            return self.of(source, axis)
        made = self.graph.producer.get(source)
        if made is not None and made.op == "Reshape":
            by_head = made.inputs[0]
            if self.size(by_head, self.rank(by_head) - 1) == self.size(name, axis):
                return self.of(by_head, self.rank(by_head) - 1)
        return self._regrouped(source, self.rank(source) - 1, self.size(name, axis), name, axis)

    def _same(self, node: Node, name: str, axis: int) -> Pieces:
        """Through what moves columns, or changes each by itself."""
        source = node.inputs[0]
        before, after = self.flow.few.shape.get(source, ()), self.flow.few.shape[name]
        if node.op == "Transpose":
            perm = node.attributes.get("perm") or list(reversed(range(len(after))))
            return self.of(source, perm[axis])
        if node.op == "Expand":
            at = axis - len(after) + len(before)
            return self.of(source, at) if at >= 0 and before[at] == after[axis] else self._leaf(name, axis)
        if len(before) == len(after) and before == after:
            return self.of(source, axis)
        for at, size in enumerate(before):  # the axis with as much before it, and as much after
            if size == after[axis] and math.prod(before[:at]) == math.prod(after[:axis]):
                return self.of(source, at)
        return self._regrouped(source, len(before) - 1, after[axis], name, axis)

    def _regrouped(self, source: str, at: int, size: int, name: str, axis: int) -> Pieces:
        """Columns in another arrangement: of one leaf still, or a leaf of its own."""
        if at < 0:
            return self._leaf(name, axis)
        pieces = self.of(source, at)
        if len({p.leaf for p in pieces}) != 1:
            return self._leaf(name, axis)
        marks, turned = (frozenset[str]().union(*sets) for sets in zip(*((p.marks, p.turned_by) for p in pieces),
                                                                       strict=True))
        first, last = min(p.start for p in pieces), max(p.stop for p in pieces)
        return (Piece(size, pieces[0].leaf, first, last, marks, turned),)

    def _rotary(self, node: Node, axis: int) -> Pieces:
        pieces = self.of(node.inputs[0], axis)
        turned = int(node.attributes.get("rotary_embedding_dim", 0))
        heads = int(node.attributes.get("num_heads", 0))
        if turned and (heads <= 1 or self.rank(node.inputs[0]) == 4):
            return (*_turned(cut(pieces, 0, turned), node), *cut(pieces, turned, sum(p.width for p in pieces)))
        return _turned(pieces, node)

    def _pair(self, node: Node, name: str, axis: int) -> Pieces:
        """Through arithmetic: the operand with data in every column; the other is a bias, a gain, a number per row."""
        turned = self.rotation(node, axis)
        if turned is not None:
            return _turned(self._aligned(turned, name, axis), node)
        data = [n for n in node.inputs if self.flow.tags[n] in (Tag.ACT, Tag.ROWS)]
        wide = [n for n in dict.fromkeys(data) if self._wide(n, name, axis) or self.size(name, axis) == 1]
        if len(wide) != 1:
            return self._leaf(name, axis)
        pieces = self._aligned(wide[0], name, axis)
        per_row = [n for n in data if n != wide[0]]
        if not per_row or node.op not in ("Mul", "Div"):
            return pieces
        return _marked(pieces, NORMED if self._is_mean(per_row[0]) else SCALED)

    def _aligned(self, operand: str, name: str, axis: int) -> Pieces:
        return self.of(operand, axis - self.rank(name) + self.rank(operand))

    def _is_mean(self, name: str) -> bool:
        """Whether a number per row is a mean or a norm over the row, within a few steps."""
        front = [name]
        for _ in range(8):
            made = [node for n in front if (node := self.graph.producer.get(n)) is not None]
            if any(node.op in _MEANS for node in made):
                return True
            front = [n for node in made for n in node.inputs if n]
        return False

    def _concat(self, node: Node, name: str, axis: int) -> Pieces:
        parts = [n for n in node.inputs if n]
        if node.attributes["axis"] % self.rank(name) == axis:
            return tuple(piece for part in parts for piece in self.of(part, axis))
        cached = [n for n in parts if self.flow.tags[n] is Tag.ROWS]
        fresh = [n for n in parts if self.flow.tags[n] is Tag.ACT]
        chosen = (fresh or cached) if self.new else (cached or fresh)
        found = [self.of(n, axis) for n in chosen]
        alike = len({tuple((p.width, p.start, p.stop) for p in pieces) for pieces in found}) == 1  # heads side by side
        return found[0] if alike else self._leaf(name, axis)

    def _split(self, node: Node, name: str, axis: int) -> Pieces:
        pieces = self.of(node.inputs[0], axis)
        if int(node.attributes.get("axis", 0)) % self.rank(name) != axis:
            return pieces
        place = node.outputs.index(name)
        start = sum(self.size(n, axis) for n in node.outputs[:place])
        return cut(pieces, start, start + self.size(name, axis))

    def _slice(self, node: Node, name: str, axis: int) -> Pieces:
        pieces, rank = self.of(node.inputs[0], axis), self.rank(name)
        if self.size(node.inputs[0], axis) == self.size(name, axis):
            return pieces
        given = [self.flow.few.known.get(n) for n in node.inputs[1:] if n]
        if len(given) < 3 or any(g is None for g in given):
            return self._leaf(name, axis)
        starts, _, axes, *steps = ([int(x) for x in g] for g in given if g is not None)
        place = [a % rank for a in axes].index(axis)
        if steps and steps[0][place] != 1:  # every second column: within the range still
            return self._regrouped(node.inputs[0], axis, self.size(name, axis), name, axis)
        start = starts[place] + (self.size(node.inputs[0], axis) if starts[place] < 0 else 0)
        return cut(pieces, start, start + self.size(name, axis))

    def _gather(self, node: Node, name: str, axis: int) -> Pieces:
        source, indices = node.inputs[0], self.flow.few.known.get(node.inputs[1])
        at = int(node.attributes.get("axis", 0)) % max(self.rank(source), 1)
        added = self.rank(node.inputs[1])  # axes that the index puts in the place of one
        if axis < at or axis >= at + added:
            return self.of(source, axis if axis < at else axis - added + 1)
        if indices is not None and indices.ndim == 1 and list(indices) == list(
                range(int(indices[0]), int(indices[0]) + len(indices))):
            return cut(self.of(source, at), int(indices[0]), int(indices[0]) + len(indices))
        return self._regrouped(source, at, self.size(name, axis), name, axis) if added else self._leaf(name, axis)

    def _pad(self, node: Node, name: str, axis: int) -> Pieces:
        pieces, size = self.of(node.inputs[0], axis), self.size(name, axis)
        extra = size - sum(p.width for p in pieces)
        return pieces if extra <= 0 else (*pieces, Piece(extra, "", 0, extra))

    def _where(self, node: Node, name: str, axis: int) -> Pieces:
        data = [n for n in node.inputs[1:] if self.flow.tags[n] in (Tag.ACT, Tag.ROWS)]
        return self._aligned(data[0], name, axis) if len(data) == 1 else self._leaf(name, axis)


def cut(pieces: Sequence[Piece], start: int, stop: int) -> Pieces:
    """Columns `start` to `stop` - 1 of pieces laid end to end."""
    found, at = [], 0
    for piece in pieces:
        first, last = max(start - at, 0), min(stop - at, piece.width)
        at += piece.width
        if first >= last:
            continue
        if piece.exact:
            piece = replace(piece, start=piece.start + first, stop=piece.start + last)
        found.append(replace(piece, width=last - first))
    return tuple(found)


def _marked(pieces: Pieces, mark: str) -> Pieces:
    return tuple(replace(p, marks=p.marks | {mark}) for p in pieces)


def _turned(pieces: Pieces, node: Node) -> Pieces:
    return tuple(replace(p, turned_by=p.turned_by | {node.name}) for p in pieces)
