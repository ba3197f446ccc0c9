"""`rows @ q^T` block by block of cached rows, each block after the one before: one block's scores exist at a time.

A block is gathered out of the cache by indices that are known only when the block before is done. So a prefill never
holds the scores of all rows, and a quantised cache, which TensorRT-RTX otherwise dequantises whole before it
multiplies, is in 16 bits only by the block: the builder fuses dequantising and gathering. The softmax runs along: every
block is normalised by itself, and joined to what came before by the share that it has of the sum so far (Milakov and
Gimelshein 2018; what FlashAttention does inside one kernel).

For TensorRT alone: over a quantised cache ONNX Runtime fuses neither, and would hold the whole cache and the blocks.

Blocks are equal: their last rows may lie beyond the end, where the last row is read again and hidden by its number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from onnx import TensorProto

from exporter.cache_forms import Segment
from exporter.dtypes import DTYPES
from exporter.formulations.common import CoreInputs, latent_columns, total
from exporter.graph import GraphBuilder
from exporter.sequencing import index_after

BLOCKS = 16  # of the past, as measured: half as many take nearly twice the memory, twice as many twice the nodes


@dataclass(frozen=True)
class _Part:
    """Attention over some of the rows alone: `mixed` [B, T*H, .], the scores' `peak` and their `sum` of exp(score -
    peak), both [B, 1, T*H]; all in float32."""

    mixed: str
    peak: str
    sum: str


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    c = core.config
    queries = [g.op("Transpose", core.q_rows, name="queries_as_columns", perm=[0, 2, 1])]  # [B, R, T*H]
    if core.segments[0].narrow:
        queries = g.ops("Split", queries[0], g.ints(c.kv_lora_rank, c.qk_rope_head_dim), name="split_queries", axis=1,
                        count=2)
    so_far: _Part | None = None
    # new rows first: every query sees one of them, so that a block which is hidden wholly meets a peak above its own
    for segment in reversed(core.segments):
        blocks = 1 if segment.n == core.dims.T else BLOCKS
        with g.scope(segment.name):
            rows = _Rows.of(g, segment)
        for number in range(blocks):
            with g.scope(segment.name if blocks == 1 else f"{segment.name}_{number}"):
                block, visible = rows, segment.visible(1) if blocks == 1 else None
                if blocks > 1:
                    asked, held = _numbers(g, segment, number, blocks)
                    visible = g.once(f"{segment.name}_block_{number}_visible", partial(_among, segment, asked))
                    if so_far is not None:
                        held = index_after(g, held, so_far.mixed, "block", 0, 1, 2)
                    block = rows.block(g, held)
                part = _attend(g, block, queries, visible)
                so_far = part if so_far is None else _joined(g, so_far, part)
    assert so_far is not None
    mixed = so_far.mixed if g.dtype.name == "fp32" else g.to(so_far.mixed, g.dtype.onnx, "mixed_rounded")
    return mixed if core.segments[0].narrow else latent_columns(g, mixed, c.kv_lora_rank)


@dataclass(frozen=True)
class _Rows:
    """Rows by what queries meet: `columns` [B, n, .], one whole or latents and rotary keys; `scale` of the latents."""

    columns: tuple[str, ...]
    scale: str | None

    @classmethod
    def of(cls, g: GraphBuilder, segment: Segment) -> _Rows:
        """A segment's, without copying it."""
        if segment.narrow is None:
            return cls((segment.rows,), None)
        return cls((segment.narrow.latent(g, "latent"), segment.narrow.rope), segment.narrow.scale)

    def block(self, g: GraphBuilder, index: str) -> _Rows:
        """Those with the numbers `index` [m]."""
        columns = [g.op("Gather", rows, index, name=f"block_{i}", axis=1) for i, rows in enumerate(self.columns)]
        return _Rows(tuple(columns), self.scale and g.op("Gather", self.scale, index, name="block_scale", axis=1))


def _numbers(g: GraphBuilder, segment: Segment, number: int, blocks: int) -> tuple[str, str]:
    """Row numbers of a block as they come, which may pass the end, and cut off there: [m] each, shared by all
    attentions. The segment has at least one row, so a block has."""
    name = f"{segment.name}_block"

    def size() -> str:
        return g.op("Div", g.op("Add", segment.n, g.ints(blocks - 1), name="padded"), g.ints(blocks), name="rows")

    def index() -> str:
        count = g.op("Squeeze", rows, name="row_count")
        return g.op("Range", g.int_scalar(0), count, g.int_scalar(1), name="index")

    def asked() -> str:
        return g.op("Add", first, g.op("Mul", rows, g.ints(number), name="start"), name="asked")

    rows = g.once(f"{name}_rows", size)
    first = g.once(f"{name}_index", index)
    last = g.once(f"{name}_last", lambda: g.op("Sub", segment.n, g.ints(1), name="last"))
    numbers = g.once(f"{name}_{number}", asked)
    return numbers, g.once(f"{name}_{number}_held", lambda: g.op("Min", numbers, last, name="held"))


def _among(segment: Segment, index: str) -> str:
    mask = segment.among(index)
    assert mask is not None, "rows that go in blocks have lengths"
    return mask


def _wide(g: GraphBuilder, value: str, name: str) -> str:
    return value if g.dtype.name == "fp32" else g.to(value, TensorProto.FLOAT, f"{name}_fp32")


def _attend(g: GraphBuilder, rows: _Rows, queries: Sequence[str], visible: str | None) -> _Part:
    """Attention over `rows` alone."""
    products = [_wide(g, g.op("MatMul", r, q, name=f"scores_{i}"), f"scores_{i}")  # [B, m, T*H]
                for i, (r, q) in enumerate(zip(rows.columns, queries, strict=True))]
    scale = rows.scale and _wide(g, rows.scale, "scale")
    if scale:
        products[0] = g.op("Mul", products[0], scale, name="scores_scaled")
    scores = total(g, products, "scores")
    if visible is not None:
        scores = g.op("Where", visible, scores, g.scalar("const/lowest_fp32", DTYPES["fp32"].lowest, DTYPES["fp32"]),
                      name="scores_masked")
    peak = g.op("ReduceMax", scores, g.ints(1), name="peak", keepdims=1)
    shares = g.op("Exp", g.op("Sub", scores, peak, name="below_peak"), name="shares")
    sum_ = g.op("ReduceSum", shares, g.ints(1), name="sum", keepdims=1)
    probs = g.op("Div", shares, sum_, name="probs")
    if scale:
        probs = g.op("Mul", probs, scale, name="probs_scaled")
    if g.dtype.name != "fp32":
        probs = g.to(probs, g.dtype.onnx, "probs_rounded")
    by_query = g.op("Transpose", probs, name="probs_by_query", perm=[0, 2, 1])  # [B, T*H, m]
    mixed = g.op("MatMul", by_query, rows.columns[0], name="mix")  # [B, T*H, d_c or R]
    return _Part(_wide(g, mixed, "mix"), peak, sum_)


def _joined(g: GraphBuilder, a: _Part, b: _Part) -> _Part:
    """Attention over the rows of both: each mean by its part of the sum. A part that is hidden wholly has none."""
    peak = g.op("Max", a.peak, b.peak, name="joined_peak")
    sums = [g.op("Mul", part.sum, g.op("Exp", g.op("Sub", part.peak, peak, name=f"{n}_below"), name=f"{n}_factor"),
                 name=f"{n}_sum") for n, part in (("before", a), ("here", b))]
    sum_ = g.op("Add", *sums, name="joined_sum")
    means = []
    for n, part, own in zip(("before", "here"), (a, b), sums, strict=True):
        weight = g.op("Div", own, sum_, name=f"{n}_weight")
        by_query = g.op("Transpose", weight, name=f"{n}_weight_by_query", perm=[0, 2, 1])
        means.append(g.op("Mul", part.mixed, by_query, name=f"{n}_mean"))
    return _Part(g.op("Add", *means, name="joined_mix"), peak, sum_)
