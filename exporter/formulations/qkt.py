"""`q @ rows^T`, softmax over the last axis: how attention is usually written.

A product on the CPU packs its right operand, which of few queries and a long cache should be what belongs to the
queries. A decode step there has the cached rows on the left of both products, which reads them as they lie:

    scores   rows @ q^T
    mix      rows^T @ probabilities^T, the rows in PIECES equal pieces whose mixes are summed

A piece belongs to one thread, which then reads whole rows. Rows that PIECES does not divide are one piece.
"""

from __future__ import annotations

from onnx import TensorProto, helper

from exporter.cache_forms import Segment
from exporter.config import MLAConfig
from exporter.formulations.common import CoreInputs, latent_columns, masked_softmax, total
from exporter.graph import GraphBuilder

PIECES = 32  # as measured from 2048 to 32768 rows: 8 to 64 are alike, and take an eighth less than one
LEAST_ROWS = 2048  # below, one piece is as quick
MOST_HEADS = 32  # beyond, products outweigh the reading, and every piece writes a mix of all heads


def row_multiple(config: MLAConfig, target: str) -> int:
    """What a host should let divide the rows of past that it offers."""
    return PIECES if target == "ort" and config.num_attention_heads <= MOST_HEADS else 1


def build(g: GraphBuilder, core: CoreInputs) -> str:
    """[B, T*H, R] queries over the segments -> [B, T*H, d_c]."""
    assert core.q_rows is not None
    rows_left = core.few and core.on_cpu
    scores = [(_scores_by_row if rows_left else _scores)(g, core.q_rows, s) for s in core.segments]
    probs = masked_softmax(g, scores, core.segments, rows_axis=2, softmax_axis=2)
    parts = [_mix_by_column(g, core, s, p) if rows_left and s.n != core.dims.T else
             g.op("MatMul", p, s.rows, name=f"{s.name}_mix") for s, p in zip(core.segments, probs, strict=True)]
    return latent_columns(g, total(g, parts, "mix"), core.config.kv_lora_rank)


def _scores(g: GraphBuilder, q_rows: str, s: Segment) -> str:
    """[B, T*H, n]."""
    columns = g.op("Transpose", s.rows, name=f"{s.name}_as_columns", perm=[0, 2, 1])  # [B, R, n]
    return g.op("MatMul", q_rows, columns, name=f"{s.name}_scores")


def _scores_by_row(g: GraphBuilder, q_rows: str, s: Segment) -> str:
    """[B, T*H, n], the small result transposed."""
    queries = g.op("Transpose", q_rows, name=f"{s.name}_queries_as_columns", perm=[0, 2, 1])  # [B, R, T*H]
    by_row = g.op("MatMul", s.rows, queries, name=f"{s.name}_scores_by_row")  # [B, n, T*H]
    return g.op("Transpose", by_row, name=f"{s.name}_scores", perm=[0, 2, 1])


def _mix_by_column(g: GraphBuilder, core: CoreInputs, s: Segment, probs: str) -> str:
    """[B, T*H, R], the small result transposed.

    ONNX Runtime fuses both transposes into the product. The Reshape between keeps it from moving that of the
    probabilities to the softmax instead, which would then run over the rows axis, five times slower.
    """
    B, R = core.dims.B, core.config.row_dim
    append = len(core.segments) > 1  # in the other forms the host does not choose how many rows there are
    in_pieces = append and core.config.num_attention_heads <= MOST_HEADS
    count = g.once(f"{s.name}_pieces", lambda: _pieces(g, s.n)) if in_pieces else g.ints(1)

    def shape(name: str, *sizes: str) -> str:
        return g.once(f"{s.name}_{name}", lambda: g.op("Concat", *sizes, name="shape", axis=0))

    size = g.once(f"{s.name}_piece", lambda: g.op("Div", s.n, count, name="rows"))
    every = g.once(f"{s.name}_pieces_of_all", lambda: g.op("Mul", B, count, name="count"))
    rows = g.op("Reshape", s.rows, shape("rows_shape", every, size, g.ints(R)), name=f"{s.name}_piece_rows")
    columns = g.op("Transpose", rows, name=f"{s.name}_as_columns", perm=[0, 2, 1])  # [B*pieces, R, size]
    split = g.op("Reshape", probs, shape("probs_shape", g.ints(0, 0), count, size), name=f"{s.name}_probs_split")
    turned = g.op("Transpose", split, name=f"{s.name}_probs_by_piece", perm=[0, 2, 1, 3])  # [B, pieces, T*H, size]
    by_query = g.op("Reshape", turned, shape("probs_flat_shape", every, g.ints(-1), size), name=f"{s.name}_probs")
    by_row = g.op("Transpose", by_query, name=f"{s.name}_probs_by_row", perm=[0, 2, 1])  # [B*pieces, size, T*H]
    mix = g.op("MatMul", columns, by_row, name=f"{s.name}_mix")  # [B*pieces, R, T*H]
    if in_pieces:  # summed by a product with ones, which is three times as quick as ReduceSum
        flat = g.op("Reshape", mix, shape("mixes_shape", B, count, g.ints(-1)), name=f"{s.name}_mixes")
        sums = g.op("MatMul", g.once(f"{s.name}_ones", lambda: _ones(g, count)), flat, name=f"{s.name}_mix_sum")
        mix = g.op("Reshape", sums, shape("mix_shape", B, g.ints(R, -1)), name=f"{s.name}_mix_by_column")
    return g.op("Transpose", mix, name=f"{s.name}_mix_by_query", perm=[0, 2, 1])


def _pieces(g: GraphBuilder, n: str) -> str:
    """PIECES where it divides n rows, at least LEAST_ROWS of them; else 1. In integers alone: a boolean would be more
    than shape arithmetic to a runtime that places operators."""
    one, most = g.ints(1), g.ints(PIECES)
    covered = g.op("Mul", g.op("Div", n, most, name="size"), most, name="covered")
    rest = g.op("Min", g.op("Sub", n, covered, name="remainder"), one, name="has_remainder")
    long = g.op("Min", g.op("Div", n, g.ints(LEAST_ROWS), name="lengths"), one, name="is_long")
    split = g.op("Mul", g.op("Sub", one, rest, name="divides"), long, name="in_pieces")
    return g.op("Max", g.op("Mul", split, most, name="most"), one, name="count")


def _ones(g: GraphBuilder, count: str) -> str:
    """[1, count] in the compute dtype."""
    shape = g.op("Concat", g.ints(1), count, name="shape", axis=0)
    ones = g.op("ConstantOfShape", shape, name="ones", value=helper.make_tensor("value", TensorProto.FLOAT, [1], [1.0]))
    return ones if g.dtype.name == "fp32" else g.to(ones, g.dtype.onnx, "ones_rounded")
