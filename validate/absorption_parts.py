"""The attentions of a graph as the audit sees them: their caches, what is written into each, which columns are latent.

Latent are the cached columns that values are made of: those of the mix that go on to the output, or those that a
product with weights expands. The other columns of a row are rotary keys (or a scale per row, of a quantised cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from validate.absorption_costs import Sizes
from validate.columns import Columns, Pieces, cut
from validate.dataflow import PRODUCTS, CacheInput, Flow, Product, Tag, number_in
from validate.graph_shapes import Node

_MAIN = ("logits", "hidden_states", "attn_output", "last_hidden_state")
Range = tuple[str, int, int]  # a cache input, and columns of it from one to before another


def meet(a: Range, b: Range) -> int:
    """How many columns two ranges share."""
    return max(0, min(a[2], b[2]) - max(a[1], b[1])) if a[0] == b[0] else 0


@dataclass
class Attention:
    """One attention: its caches, the output that each comes out as, the columns written into it (or the cache in
    `unwritten`: no output has its shape), its latent columns, and the products of its rows."""

    index: int
    caches: list[CacheInput]
    outputs: dict[str, str] = field(default_factory=dict)
    written: dict[str, Pieces] = field(default_factory=dict)
    unwritten: list[str] = field(default_factory=list)
    latent: list[Range] = field(default_factory=list)
    expansions: list[Product] = field(default_factory=list)
    scores: list[Product] = field(default_factory=list)
    mixes: list[Product] = field(default_factory=list)


class Parts:
    """The attentions of one graph, in the order of their numbers."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.graph = flow, flow.graph
        self.past, self.new = Columns(flow, new=False), Columns(flow, new=True)
        self.attentions = [self._gather(i) for i in sorted({c.attention for c in flow.roles.caches})]

    def _gather(self, index: int) -> Attention:
        flow = self.flow
        a = Attention(index, [c for c in flow.roles.caches if c.attention == index])

        def own(products: list[Product]) -> list[Product]:
            return [p for p in products if index in flow.attentions.get(p.rows, ())]

        a.expansions, a.scores, a.mixes = own(flow.expansions), own(flow.scores), own(flow.mixes)
        free = [o for o in self.graph.outputs if self._cache_output(o, index)]
        for cache in a.caches:
            shape = self._without_rows(cache.name, cache.axis)
            match = next((o for o in free if len(flow.few.shape[o]) > cache.axis
                          and self._without_rows(o, cache.axis) == shape), None)
            if match is None:
                a.unwritten.append(cache.name)
            else:
                free.remove(match)
                a.outputs[cache.name] = match
                a.written[cache.name] = self.new.of(match, self._columns_axis(cache))
        a.latent = self._latent(a)
        return a

    def _cache_output(self, name: str, index: int) -> bool:
        """Whether a graph output can be a cache of this attention: rows of it, or new rows under its number."""
        if name in _MAIN or name not in self.flow.few.shape:
            return False
        if self.flow.tags.get(name) is Tag.ROWS:
            return index in self.flow.attentions[name]
        return self.flow.tags.get(name) is Tag.ACT and number_in(name) == index

    def _without_rows(self, name: str, axis: int) -> tuple[int, ...]:
        shape = self.flow.few.shape[name]
        return (*shape[:axis], *shape[axis + 1:])

    def _columns_axis(self, cache: CacheInput) -> int:
        last = len(self.flow.few.shape[cache.name]) - 1
        return last if cache.axis != last else last - 1

    def per_head(self, cache: CacheInput) -> bool:
        """Whether a cache has an axis for heads beside its columns."""
        shape = self.flow.few.shape[cache.name]
        return sum(size > 1 for i, size in enumerate(shape) if i not in (0, cache.axis)) > 1

    def _latent(self, a: Attention) -> list[Range]:
        """The columns of the cache that values are made of: of the mix what goes on, or what is expanded."""
        found: set[Range] = set()
        for p in a.expansions:
            found |= self.cached(self.past.of(p.rows, p.rows_axis))
        for p in a.mixes if not a.expansions else ():
            rank = len(self.flow.few.shape.get(p.rows, ()))
            feature = rank - 1 if p.rows_axis != rank - 1 else rank - 2
            pieces = self.past.of(p.rows, feature)
            out = self.out_product(p.node)
            if out is not None:
                used = self.past.of(*self.data_operand(out))
                pieces = cut(pieces, min(u.start for u in used), max(u.stop for u in used))
            found |= self.cached(pieces)
        return sorted(found)

    def cached(self, pieces: Pieces) -> set[Range]:
        """Those of the pieces that are columns of cache inputs."""
        names = {c.name for c in self.flow.roles.caches}
        return {(p.leaf, p.start, p.stop) for p in pieces if p.leaf in names}

    def out_product(self, mix: Node) -> Node | None:
        """The first product with weights behind a mix."""
        front, seen = [mix.outputs[0]], {mix.outputs[0]}
        while front:
            for node in self.graph.consumers.get(front.pop(0), []):
                if node.op in PRODUCTS and self.weighted(node):
                    return node
                for name in node.outputs:
                    if name and name not in seen and self.flow.tags.get(name) is Tag.ACT:
                        seen.add(name)
                        front.append(name)
        return None

    def weighted(self, node: Node) -> bool:
        """Whether a node is a product with weights."""
        return node.op in PRODUCTS and Tag.CONST in {self.flow.tags.get(n) for n in node.inputs[:2]}

    def data_operand(self, node: Node) -> tuple[str, int]:
        """The operand of a product with weights that is not the weights, and its axis that is summed over."""
        first, second = self.flow.operands(node)
        return second if self.flow.tags.get(first[0]) is Tag.CONST else first

    def _rank_behind(self, a: Attention) -> int | None:
        """The columns that cached keys and values are projected from: d_c, where the latent itself is not cached."""
        for pieces in a.written.values():
            for piece in pieces:
                made = self.graph.producer.get(piece.leaf)
                if made is not None and self.weighted(made) and not piece.turned_by:
                    return self.past.size(*self.data_operand(made)) or None
        return None

    def sizes(self) -> Sizes:
        """H, d_c and d_r as the first attention shows them."""
        a = self.attentions[0]
        turned = [p.width for pieces in a.written.values() for p in pieces if p.turned_by]
        shapes = [self.flow.few.shape[c.name] for c in a.caches if self.per_head(c)]
        if shapes:
            heads = max(n for shape in shapes for i, n in enumerate(shape[:-1]) if i not in (0, a.caches[0].axis))
            return Sizes(heads, self._rank_behind(a), turned[0] if len(set(turned)) == 1 else None)
        latent = sum(stop - start for _, start, stop in a.latent)
        others = sum(int(self.flow.width(c.name) or 0) for c in a.caches) - latent
        widths = [self.flow.width(p.node.outputs[0]) or Fraction(0) for p in a.scores]
        scores = max(widths, default=Fraction(0)) / self.flow.roles.new
        whole = scores > 0 and scores.denominator == 1
        return Sizes(int(scores) if whole else None, latent or None, min(sum(turned), others) or None)
