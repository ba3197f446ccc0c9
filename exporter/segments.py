"""A decoder cut where the ranks of a tensor-parallel model add up their partial sums: 2A + 1 graphs for A attentions.

    0         embedding, first attention         -> hidden_states_out, partial
    1         + reduced, first FFN               -> hidden_states_out, partial
    ...       one segment an attention, one an FFN
    2A        + reduced, final norm, head        -> logits of the rank's part of the vocabulary

`partial` [B, T, D] float32 is the rank's term of a branch; `reduced` is the sum over ranks, which the next segment
normalises where the family does, scales, and adds to `hidden_states` [B, T, D], the residual stream that every rank
has. Each graph keeps the latent-cache contract with one attention, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import TensorProto

from exporter.attention_graph import build_attention, prepare
from exporter.cache_forms import Dims
from exporter.decoder_config import DecoderConfig
from exporter.decoder_graph import DecoderOptions, block_norm, embed, head, residual, selection
from exporter.graph import GraphBuilder
from exporter.moe_graph import build_moe, gated_ffn


@dataclass(frozen=True)
class Segment:
    """`part` is attention, ffn or head; `half` counts the attentions of a layer (LongCat has two, others one)."""

    index: int
    part: str
    layer: int
    half: int = 0


def segments_of(decoder: DecoderConfig) -> list[Segment]:
    """The segments of a whole decoder, in order."""
    cuts = [(part, layer, half) for layer in range(decoder.layers) for half in range(decoder.attentions_per_layer)
            for part in ("attention", "ffn")]
    return [Segment(i, *cut) for i, cut in enumerate([*cuts, ("head", decoder.layers - 1, 0)])]


def segment_parts(decoder: DecoderConfig, segment: Segment, logits: str, prefill: bool) -> tuple[str, ...]:
    """The rows of `signature.TABLE` that a segment's tensors are."""
    enters = ("reduced-in",) if segment.index else ("tokens-in",)
    if segment.part == "head":
        return (*enters, "all-logits") if logits == "all" else (
            (*enters, "last-logits", "last-token") if prefill else (*enters, "last-logits"))
    carried: tuple[str, ...] = ()
    if decoder.shortcut and segment.part == "ffn":
        carried = ("shortcut-in",) if segment.half else ("shortcut-out",)
    return (*enters, *carried, "partial-out")


def build_segment(g: GraphBuilder, options: DecoderOptions, segment: Segment, rank: int) -> None:
    """Add one segment between the inputs and outputs that `exporter.signature` names."""
    c = options.decoder
    if segment.part == "attention":
        d, angles = prepare(g, options.attention, "hidden_states" if segment.index else "input_ids")
        hidden, shape = _enter(g, options, segment)
        with g.block(f"layers.{segment.layer}"):
            place = f".{segment.half}" if c.shortcut else ""
            normed = block_norm(g, c, hidden, f"input_norm{place}")
            with g.block(f"attn{place}"):
                branch = build_attention(g, options.attention, d, angles, normed, 0)
    else:
        hidden, shape = _enter(g, options, segment)
        if segment.part == "head":
            _leave(g, options, hidden)
            return
        with g.block(f"layers.{segment.layer}"):
            branch = _ffn(g, options, segment, hidden, rank, lambda value, name: _give(g, value, shape, name))
    g.op("Reshape", hidden, shape, name="hidden_states_out", output="hidden_states_out")
    _give(g, branch, shape, "partial")


def _enter(g: GraphBuilder, o: DecoderOptions, segment: Segment) -> tuple[str, str]:
    """The residual stream [N, D] with the branch before added to it, and the shape [B, T, D]."""
    c = o.decoder
    if not segment.index:
        size = g.op("Shape", "input_ids", name="ids_shape")
        return embed(g, c), g.op("Concat", size, g.ints(c.attention.hidden_size), name="hidden_shape", axis=0)
    shape = g.op("Shape", "hidden_states", name="hidden_shape")
    hidden, branch = (g.op("Reshape", name, g.ints(-1, c.attention.hidden_size), name=f"{name}_tokens")
                      for name in ("hidden_states", "reduced"))
    if g.dtype.name != "fp32":
        branch = g.to(branch, g.dtype.onnx, "reduced_rounded")
    before = segments_of(c)[segment.index - 1]
    sparse = before.part == "ffn" and before.layer in c.sparse_layers
    if sparse and c.moe is not None and c.moe.output_norm:
        with g.block(f"layers.{before.layer}"):
            branch = block_norm(g, c, branch, "post_mlp_norm")
    if _with_shortcut(c, before):
        return g.op("Add", hidden, branch, name="shortcut_residual"), shape
    return residual(g, c, hidden, branch, before.part), shape


def _with_shortcut(c: DecoderConfig, segment: Segment) -> bool:
    """Whether a segment's partial sum has the layer's MoE in it, and so its scale already."""
    return c.shortcut and segment.part == "ffn" and segment.half == 1


def _ffn(g: GraphBuilder, o: DecoderOptions, segment: Segment, hidden: str, rank: int,
         give: Callable[[str, str], None]) -> str:
    c = o.decoder
    place = f".{segment.half}" if c.shortcut else ""
    normed = block_norm(g, c, hidden, f"post_norm{place}")

    def moe() -> str:
        assert c.moe is not None
        return build_moe(g, c.moe, o.experts, normed, c.attention.hidden_size, c.attention.rms_norm_eps, rank)

    if not c.shortcut:
        return moe() if segment.layer in c.sparse_layers else gated_ffn(g, normed, "mlp.")
    if not segment.half:
        give(moe(), "shortcut_out")
    with g.scope(f"ffn_{segment.half}"):
        branch = gated_ffn(g, normed, f"mlps{place}.")
    if not _with_shortcut(c, segment):
        return branch
    if c.residual_scale != 1:
        branch = g.op("Mul", branch, g.scalar("residual_scale", c.residual_scale), name="ffn_scaled")
    shortcut = g.op("Reshape", "shortcut", g.ints(-1, c.attention.hidden_size), name="shortcut_tokens")
    wide = branch if g.dtype.name == "fp32" else g.to(branch, TensorProto.FLOAT, "ffn_fp32")
    return g.op("Add", wide, shortcut, name="with_shortcut")


def _give(g: GraphBuilder, value: str, shape: str, output: str) -> None:
    """[N, D] as an output [B, T, D] in float32."""
    g.op("Reshape", g.to(value, TensorProto.FLOAT, f"{output}_fp32"), shape, name=output, output=output)


def _leave(g: GraphBuilder, o: DecoderOptions, hidden: str) -> None:
    batch, new = (g.op("Shape", "hidden_states", name=name, start=i, end=i + 1) for i, name in enumerate("BT"))
    d = Dims(batch, new, None, "", "", None)
    if "all-logits" not in o.parts:
        hidden = selection(g, d, o.parts)(hidden, "hidden")
    head(g, o, d, hidden)
