"""The audit's findings: one check per way in which a graph can fail to attend its latent cache as it lies.

Every check looks at one attention and says what it found with the nodes at fault; findings that differ in nothing but
the attention are one, so that 61 layers are not 61 lines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from validate.absorption_costs import Sizes
from validate.absorption_parts import Attention, Parts, Range, meet
from validate.columns import NORMED
from validate.dataflow import WHOLE, Product, Tag
from validate.graph_shapes import BEHIND, Node


@dataclass(frozen=True)
class Finding:
    """One fault: a code of docs/absorption.md, what was found, and where. `nodes` are those of all `attentions`."""

    code: str
    text: str
    attentions: tuple[int, ...]
    nodes: tuple[str, ...] = ()

    @property
    def where(self) -> str:
        """The attentions in short: `0 to 60`, `0, 2`."""
        a = self.attentions
        whole = len(a) > 2 and a == tuple(range(a[0], a[-1] + 1))
        return f"{a[0]} to {a[-1]}" if whole else ", ".join(map(str, a)) or "-"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"code": self.code, "text": self.text, "attentions": list(self.attentions), "nodes": list(self.nodes)}


class Audit:
    """The checks over one graph. `expanded`: K and V may be rebuilt from the cache (a prefill graph that says so).

    Once `findings` has run, `notes` tells what was not seen through but does not matter, and `absorbed_at` the first
    attention's products with W_UK and W_UV.
    """

    def __init__(self, parts: Parts, sizes: Sizes, expanded: bool) -> None:
        self.parts, self.flow, self.graph, self.sizes = parts, parts.flow, parts.graph, sizes
        self.expanded = expanded
        self.notes: list[str] = []
        self.absorbed_at: dict[str, str] = {}
        self._turned_rows = [(node, sorted(parts.cached(parts.past.rotated(node)))) for node in self.graph.nodes
                             if self.flow.tags.get(node.outputs[0]) is Tag.ROWS]

    def findings(self) -> list[Finding]:
        """All of them, those of several attentions as one."""
        found: dict[tuple[str, str], Finding] = {}
        for finding in self._all():
            same = found.get((finding.code, finding.text))
            if same is not None:
                finding = replace(same, attentions=tuple(sorted({*same.attentions, *finding.attentions})),
                                  nodes=tuple(dict.fromkeys((*same.nodes, *finding.nodes))))
            found[finding.code, finding.text] = finding
        return list(found.values())

    def _all(self) -> Iterator[Finding]:
        blind = list(self._blind())
        yield from blind
        for a in self.parts.attentions:
            expanded = [*self._heads_cached(a), *self._heads_met(a)]
            yield from expanded
            yield from self._cache_shapes(a, bool(expanded))
            yield from self._written_from_latent(a)
            yield from self._norms(a)
            if not expanded:
                yield from self._rope(a)
            if self.expanded:
                continue
            repeated = [*self._repeated(a), *self._by_element(a)]
            yield from self._expansions(a)
            yield from repeated
            if not any((blind, expanded, repeated, a.expansions)):  # each tells by itself why nothing is absorbed
                yield from self._absorbed(a)

    def _blind(self) -> Iterator[Finding]:
        """Nodes that could not be seen through, if cached rows pass them or anything behind them."""
        blind = {**self.flow.many.blind, **self.flow.few.blind}
        passed = {Tag.ROWS, Tag.SCORES}
        reached = any(self.flow.tags.get(name) in passed for node in self.graph.nodes if node.name in blind
                      for name in node.inputs)
        for node in self.graph.nodes:
            why = blind.get(node.name)
            if why is None or why.startswith(BEHIND):
                continue
            if reached:
                at = {i for name in node.inputs for i in self.flow.attentions.get(name, ())}
                yield Finding("cannot-see-through", f"cannot see through {node.op}: {why}", tuple(sorted(at)),
                              (node.name,))
            else:
                self.notes.append(f"cannot see through {node}, which no cached row passes: {why}")
        for node in self.flow.lost:
            if node.name not in blind:
                at = {i for name in node.inputs for i in self.flow.attentions.get(name, ())}
                yield Finding("cannot-see-through", f"cannot see through {node.op}: not an operator that cached rows "
                              "are followed through", tuple(sorted(at)), (node.name,))

    # ---- what is cached

    def _heads_cached(self, a: Attention) -> Iterator[Finding]:
        """A cache with an axis for heads beside its columns."""
        for cache in filter(self.parts.per_head, a.caches):
            shape = self.flow.few.shape[cache.name]
            heads = max(n for i, n in enumerate(shape[:-1]) if i not in (0, cache.axis))
            what = " and ".join(sorted(self._sides(cache.name))) or "keys or values"
            yield Finding("cache-per-head", f"{what} of every head are cached, {heads} x {shape[-1]} = "
                          f"{self.flow.width(cache.name)} numbers a row: expanded, not latent", (a.index,),
                          (cache.name,))

    def _heads_met(self, a: Attention) -> Iterator[Finding]:
        """A cache without such an axis, of which queries meet the columns of one head at a time."""
        repeated = bool(self._of(self.flow.widened, a))
        for p in () if repeated or a.expansions or any(map(self.parts.per_head, a.caches)) else a.scores:
            summed, width = self.parts.past.size(p.rows, p.rows_axis), self.flow.width(p.rows)
            if p.node.op not in WHOLE and width is not None and width >= 2 * summed:
                yield Finding("cache-per-head", f"cached rows of {width} columns meet queries of {summed}: keys of "
                              "every head are cached, expanded", (a.index,), (p.node.name,))

    def _cache_shapes(self, a: Attention, expanded: bool) -> Iterator[Finding]:
        """R numbers a row (and one scale, of a quantised row), in and out."""
        widths = [self.flow.width(c.name) or 0 for c in a.caches]
        numbers = sum(w for w in widths if w != 1)
        names = tuple(c.name for c in a.caches)
        if self.sizes.row is not None and not expanded and numbers != self.sizes.row:
            yield Finding("cache-width", f"the cache holds {numbers} numbers a row; a latent one holds d_c + d_r = "
                          f"{self.sizes.latent} + {self.sizes.rope} = {self.sizes.row}", (a.index,), names)
        for name in a.unwritten:
            yield Finding("cache-not-written", "no output has the cache's shape: new rows do not leave the graph as "
                          "rows of it", (a.index,), (name,))

    def _written_from_latent(self, a: Attention) -> Iterator[Finding]:
        """Cached columns that are a product of other cached columns: keys or values, or a rotary key of the latent."""
        leaves = {p.leaf for pieces in a.written.values() for p in pieces}
        for cache in a.caches:
            for piece in a.written.get(cache.name, ()):
                made = self.graph.producer.get(piece.leaf)
                if made is None or not self.parts.weighted(made):
                    continue
                behind = {p.leaf for p in self.parts.new.of(*self.parts.data_operand(made))}
                if not behind & (leaves - {piece.leaf}):
                    continue
                if piece.turned_by:
                    yield Finding("rope-from-latent", f"{piece.width} rotated columns of the cache are projected from "
                                  "its latent columns; a rotary key comes from the hidden state", (a.index,),
                                  (made.name,))
                elif not self.parts.per_head(cache):
                    yield Finding("cached-expansion", f"{piece.width} columns of the cache are projected from its "
                                  "latent columns: keys or values cached beside what they are made from", (a.index,),
                                  (made.name, cache.name))

    def _norms(self, a: Attention) -> Iterator[Finding]:
        nodes = [n for n in self.flow.normed if a.index in self.flow.attentions.get(n.inputs[0], ())]
        if nodes:
            yield Finding("norm-on-read", "cached rows pass a norm at every step: the cache holds the latent from "
                          "before its norm", (a.index,), tuple(n.name for n in nodes))

    # ---- what has a position

    def _rope(self, a: Attention) -> Iterator[Finding]:
        """Rotation of cached columns, where they are written and where they are read."""
        turned: list[tuple[Range, frozenset[str]]] = []
        whole, normed = True, frozenset[str]()  # every column is rotated; what rotates normed ones, which are latent
        for name, pieces in a.written.items():
            at = 0
            for p in pieces:
                turned += [((name, at, at + p.width), p.turned_by)] if p.turned_by else []
                normed |= p.turned_by if NORMED in p.marks else frozenset()
                whole &= bool(p.turned_by)
                at += p.width
        names = {c.name for c in a.caches}
        turned += [(r, frozenset([node.name])) for node, ranges in self._turned_rows for r in ranges if r[0] in names]
        touched = [(columns, by) for r, by in turned if (columns := sum(meet(r, latent) for latent in a.latent))]
        if touched or normed or (turned and whole):
            by = normed.union(*(nodes for _, nodes in touched)) or frozenset().union(*(nodes for _, nodes in turned))
            count = sum(columns for columns, _ in touched) or "the"
            yield Finding("rope-on-latent", f"RoPE turns {count} latent columns of the cache; only rope columns have a "
                          "position", (a.index,), tuple(sorted(by)))
        elif not turned and not a.unwritten:
            yield Finding("rope-unseen", "no cached column is rotated, neither when written nor when read: the rotary "
                          "key was not found", (a.index,), tuple(sorted(names)))

    # ---- what is computed per cached row

    def _expansions(self, a: Attention) -> Iterator[Finding]:
        for p in a.expansions:
            sides = self._sides(p.node.outputs[0])
            what = " and ".join(sorted(sides)) or "keys or values"
            matrix = " and ".join(m for m, w in (("W_UK", "keys"), ("W_UV", "values")) if w in sides) or "weights"
            yield Finding("expanded-each-step", f"{what} are rebuilt from the cache at every step: cached rows are "
                          f"multiplied by {matrix}, {self.flow.width(p.node.outputs[0])} numbers a row", (a.index,),
                          (p.node.name,))

    def _sides(self, name: str) -> set[str]:
        """Whether rows end in scores (keys) or in a mix (values)."""
        found, front, seen = set[str](), [name], {name}
        ends = {"keys": {(p.node.name, p.rows) for p in self.flow.scores},
                "values": {(p.node.name, p.rows) for p in self.flow.mixes}}
        while front:
            at = front.pop()
            for node in self.graph.consumers.get(at, []):
                found |= {side for side, products in ends.items() if (node.name, at) in products}
                for out in node.outputs:
                    if out not in seen and self.flow.tags.get(out) is Tag.ROWS:
                        seen.add(out)
                        front.append(out)
        return found or {side for side, products in ends.items() if name in {rows for _, rows in products}}

    def _repeated(self, a: Attention) -> Iterator[Finding]:
        for node, name in self._of(self.flow.widened, a):
            yield Finding("rows-per-head", f"cached rows are repeated, {self.flow.width(name)} numbers a row: what is "
                          "one for all heads is held for each", (a.index,), (node.name,))

    def _by_element(self, a: Attention) -> Iterator[Finding]:
        for node, name in self._of(self.flow.by_element, a):
            each = (self.flow.width(name) or 0) / self.flow.roles.new
            yield Finding("wide-scores", f"rows are multiplied element by element before anything is summed: {each} "
                          "numbers per row and query token", (a.index,), (node.name,))

    def _of(self, found: list[tuple[Node, str]], a: Attention) -> list[tuple[Node, str]]:
        return [(node, name) for node, name in found if a.index in self.flow.attentions[name]]

    def _absorbed(self, a: Attention) -> Iterator[Finding]:
        """Queries that have been through W_UK meet whole rows, and what was mixed goes through W_UV."""
        names = tuple(c.name for c in a.caches)
        if not a.scores or not a.mixes:
            missing = "queries" if not a.scores else "probabilities"
            yield Finding("no-attention", f"cached rows meet no {missing} in any product", (a.index,), names)
            return
        met = {r for p in a.scores for r in self.parts.cached(self.parts.past.of(p.rows, p.rows_axis))}
        if not a.latent or any(not any(meet(latent, r) for r in met) for latent in a.latent):
            yield Finding("latent-not-scored", "the columns that values are made of meet no query: values are cached, "
                          "not a latent", (a.index,), names)
            return
        up = next((name for p in a.scores if (name := self._absorbing(p, a)) is not None), None)
        down = next((out for p in a.mixes if (out := self.parts.out_product(p.node)) is not None), None)
        if up is None:
            yield Finding("absorption-unseen", "queries reach the latent columns through no product with weights: W_UK "
                          "was not found on their side", (a.index,), (a.scores[0].node.name,))
        if down is None:
            yield Finding("absorption-unseen", "what is mixed from latent rows meets no weights: W_UV was not found on "
                          "the output's side", (a.index,), (a.mixes[0].node.name,))
        if up and down and not self.absorbed_at:
            self.absorbed_at = {"W_UK": up, "W_UV": down.name}

    def _absorbing(self, p: Product, a: Attention) -> str | None:
        """The product with weights that the query's columns over the latent come from."""
        met = self.parts.cached(self.parts.past.of(p.rows, p.rows_axis))
        if not any(meet(r, latent) for r in met for latent in a.latent):
            return None
        for piece in self.parts.new.of(p.other, p.other_axis):
            made = self.graph.producer.get(piece.leaf)
            if made is not None and not piece.turned_by and self.parts.weighted(made):
                return made.name
        return None
