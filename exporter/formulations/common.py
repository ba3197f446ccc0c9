"""What the formulations share: their inputs, and the masked softmax over joined segments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnx import TensorProto

from exporter.cache_forms import Dims, Segment
from exporter.config import MLAConfig
from exporter.graph import GraphBuilder


@dataclass(frozen=True)
class CoreInputs:
    """`q_rows` [B, T*H, R] for absorbed cores, else `q_nope` [N, H, nope] and `q_rope` [N, H, rope], N = B*T.

    The softmax scale is inside the weights already. `few`: the graph is for few new tokens (decode); `on_cpu`: for
    ONNX Runtime's CPU.
    """

    config: MLAConfig
    dims: Dims
    segments: Sequence[Segment]
    q_rows: str | None = None
    q_nope: str | None = None
    q_rope: str | None = None
    few: bool = False
    on_cpu: bool = False


HEADS_AT_ONCE = 4


def heads_at_once(config: MLAConfig) -> int:
    """How many heads go together where they go group by group: the largest divisor of them up to HEADS_AT_ONCE."""
    return max(n for n in range(1, HEADS_AT_ONCE + 1) if config.num_attention_heads % n == 0)


def masked_softmax(g: GraphBuilder, scores: Sequence[str], segments: Sequence[Segment], rows_axis: int,
                   softmax_axis: int, mask_axes: tuple[int, ...] = (), wide: bool = True) -> list[str]:
    """Mask each segment's scores, softmax over all rows at once, and split back per segment. `wide`: in float32; else
    in the compute dtype, its reductions left to the runtime.

    The mask value is the dtype's lowest finite number, not -inf: a kernel that walks the rows in blocks meets blocks
    that are wholly masked, and -inf minus -inf is NaN. `mask_axes` are unsqueezed where scores have a head axis.
    """
    cast = wide and g.dtype.name != "fp32"
    lowest = g.scalar("const/lowest", g.dtype.lowest)
    masked = []
    for segment, score in zip(segments, scores, strict=True):
        mask = segment.visible(rows_axis)
        if mask is not None:
            if mask_axes:
                mask = g.op("Unsqueeze", mask, g.ints(*mask_axes), name=f"{segment.name}_mask")
            score = g.op("Where", mask, score, lowest, name=f"{segment.name}_masked")
        masked.append(score)
    joined = masked[0] if len(masked) == 1 else g.op("Concat", *masked, name="join_scores", axis=softmax_axis)
    if cast:
        joined = g.to(joined, TensorProto.FLOAT, "scores_fp32")
    probs = g.op("Softmax", joined, name="softmax", axis=softmax_axis)
    if cast:
        probs = g.to(probs, g.dtype.onnx, "probs")
    if len(segments) == 1:
        return [probs]
    sizes = g.op("Concat", *[s.n for s in segments], name="segment_rows", axis=0)
    return g.ops("Split", probs, sizes, name="split_probs", axis=softmax_axis, count=len(segments))


def total(g: GraphBuilder, parts: Sequence[str], name: str) -> str:
    """Sum of the segments' contributions."""
    result = parts[0]
    for i, part in enumerate(parts[1:]):
        result = g.op("Add", result, part, name=name if len(parts) == 2 else f"{name}_{i}")
    return result


def latent_columns(g: GraphBuilder, mixed: str, d_c: int, axis: int = 2) -> str:
    """The first d_c of R columns. Slicing the small product costs nothing; slicing the cache before it costs a copy."""
    return g.op("Slice", mixed, g.ints(0), g.ints(d_c), g.ints(axis), name="latent_columns")


def clean_rows(g: GraphBuilder, segment: Segment) -> str:
    """A segment's rows with zeros where nothing was written.

    For forms that add a mask to the scores, or rebuild K and V: what lies in an unwritten row could overflow there, and
    0 x inf is NaN. The absorbed products select after the score and need no such copy.
    """
    mask = segment.written()
    if mask is None:
        return segment.rows
    return g.op("Where", mask, segment.rows, g.scalar("const/zero", 0.0), name=f"{segment.name}_clean")


def joined_rows(g: GraphBuilder, segments: Sequence[Segment]) -> str:
    """All rows to attend as one clean [B, n, R]: a copy of the cache."""
    rows = [clean_rows(g, s) for s in segments]
    return rows[0] if len(rows) == 1 else g.op("Concat", *rows, name="join_rows", axis=1)


def joined_mask(g: GraphBuilder, core: CoreInputs) -> str | None:
    """All segments' visibility as one full boolean [B, T*H, n] (queries x rows), for the Attention operator."""
    if any(segment.visible(2) is None for segment in core.segments):
        return None
    return g.once("joined_mask", lambda: _joined_mask(g, core))


def additive_mask(g: GraphBuilder, core: CoreInputs) -> str | None:
    """All segments' visibility as [B, 1, queries, n] in the compute dtype, 0 or the lowest number, made once for all
    attentions: TensorRT turns a boolean mask into this form for each of them, and holds all the copies at once."""
    mask = joined_mask(g, core)
    if mask is None:
        return None

    def make() -> str:
        zero, lowest = g.scalar("const/zero", 0.0), g.scalar("const/lowest", g.dtype.lowest)
        return g.op("Where", g.op("Unsqueeze", mask, g.ints(1), name="mask_4d"), zero, lowest, name="additive")

    return g.once("additive_mask", make)


def _joined_mask(g: GraphBuilder, core: CoreInputs) -> str:
    if len(core.segments) == 1:  # full as it is (scatter, concat); TensorRT-RTX fails on an Expand that layers share
        return core.segments[0].visible(2) or ""
    masks = []
    for segment in core.segments:
        mask = segment.visible(2) or ""
        queries = g.op("Shape", core.dims.query_token, name=f"{segment.name}_queries")
        full = g.op("Concat", core.dims.B, queries, segment.n, name=f"{segment.name}_mask_shape", axis=0)
        masks.append(g.op("Expand", mask, full, name=f"{segment.name}_mask"))
    return g.op("Concat", *masks, name="join_masks", axis=2)


def expanded_query(g: GraphBuilder, core: CoreInputs) -> str:
    """[N, H, nope] | [N, H, rope] -> [B, H, T, nope + rope]."""
    assert core.q_nope is not None
    assert core.q_rope is not None
    c, d = core.config, core.dims
    query = g.op("Concat", core.q_nope, core.q_rope, name="query", axis=2)
    shape = g.op("Concat", d.B, d.T, g.ints(c.num_attention_heads, c.qk_head_dim), name="query_shape", axis=0)
    return g.op("Transpose", g.op("Reshape", query, shape, name="query_4d"), name="query_heads", perm=[0, 2, 1, 3])


def expand_rows(g: GraphBuilder, core: CoreInputs, segment: Segment) -> tuple[str, str]:
    """K [B, H, n, nope + rope] (scaled) and V [B, H, n, v] of one segment, rebuilt from its latent rows."""
    rows = latent_rows(g, core, segment)
    return expand_heads(g, core, rows, rows.flat, 0, core.config.num_attention_heads)


@dataclass(frozen=True)
class LatentRows:
    """A segment's rows ready to be expanded: latents `flat` [B*n, d_c], rotary keys `k_rope` [B, 1, n, d_r], and n."""

    flat: str
    k_rope: str
    n: str


def latent_rows(g: GraphBuilder, core: CoreInputs, segment: Segment) -> LatentRows:
    """Split a segment's rows, zeros where nothing was written."""
    c = core.config
    latent, k_rope = g.ops("Split", clean_rows(g, segment), g.ints(c.kv_lora_rank, c.qk_rope_head_dim),
                           name="split_rows", axis=2, count=2)
    flat = g.op("Reshape", latent, g.ints(-1, c.kv_lora_rank), name="latent_flat")
    return LatentRows(flat, g.op("Unsqueeze", k_rope, g.ints(1), name="k_rope_4d"), segment.n)


def all_latent_rows(g: GraphBuilder, core: CoreInputs) -> LatentRows:
    """Every segment's rows joined and split: a copy of the cache."""
    joined = joined_rows(g, core.segments)
    n = core.segments[0].n
    for i, s in enumerate(core.segments[1:]):
        n = g.op("Add", n, s.n, name=f"rows_{i + 1}")
    return latent_rows(g, core, Segment("all", lambda: joined, n, lambda rows_axis: None))


def expand_heads(g: GraphBuilder, core: CoreInputs, rows: LatentRows, flat: str, first: int, count: int,
                 ) -> tuple[str, str]:
    """K [B, count, n, nope + rope] (scaled) and V [B, count, n, v] of the heads from `first` on, from `flat`."""
    c, d = core.config, core.dims
    each, whole = c.qk_nope_head_dim + c.v_head_dim, count == c.num_attention_heads
    part = f"{first}_{first + count}"
    # kv_b holds head after head, so some heads' rows are one piece of it
    shape = (count * each, c.kv_lora_rank)
    weight = g.weight("kv_b") if whole else g.weight("kv_b", shape, f"kv_b.{part}", first * each)
    up = g.op("Gemm", flat, weight, name="kv_b", transB=1)  # [B*n, count (nope + v)]
    # the rows' own count, not -1: TensorRT must see that K and V are as long as each other
    up_shape = g.op("Concat", d.B, rows.n, g.ints(count, each), name="kv_shape", axis=0)
    heads = g.op("Transpose", g.op("Reshape", up, up_shape, name="kv_rows"), name="kv_heads", perm=[0, 2, 1, 3])
    k_nope, value = g.ops("Split", heads, g.ints(c.qk_nope_head_dim, c.v_head_dim), name="split_kv", axis=3, count=2)
    if g.has_weight("b_uk"):
        per_head = (count, 1, c.qk_nope_head_dim)
        bias = g.weight("b_uk", per_head, "b_uk.heads" if whole else f"b_uk.heads.{part}", None if whole else first)
        k_nope = g.op("Add", k_nope, bias, name="k_nope_biased")
    shape_of_rope = g.op("Concat", d.B, g.ints(count), rows.n, g.ints(c.qk_rope_head_dim), name="k_rope_shape", axis=0)
    k_rope = g.op("Expand", rows.k_rope, shape_of_rope, name="k_rope_heads")
    return g.op("Concat", k_nope, k_rope, name="key", axis=3), value
