"""A whole decoder, or a slice of its layers, as one ONNX graph over latent caches.

Tokens are flattened to N = B*T from the embedding to the head. Sizes, angles and masks are made once and shared by all
attentions. In the last layer everything after the attention runs for the tokens whose logits are asked for, no others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import TensorProto

from exporter.attention_graph import GraphOptions, build_attention, norm, prepare, product
from exporter.cache_forms import Dims
from exporter.decoder_config import DecoderConfig
from exporter.graph import GraphBuilder
from exporter.moe_graph import build_moe, gated_ffn


@dataclass(frozen=True)
class DecoderOptions:
    """What varies between the decoder graphs of one export. `layers` is the slice; `experts` the form of the MoE."""

    decoder: DecoderConfig
    attention: GraphOptions
    layers: range
    parts: tuple[str, ...]
    experts: str

    @property
    def last(self) -> bool:
        """Whether the slice ends with the head."""
        return self.layers.stop == self.decoder.layers


def build_decoder(g: GraphBuilder, options: DecoderOptions) -> None:
    """Add the decoder between the inputs and outputs that `exporter.signature` names."""
    c, parts = options.decoder, options.parts
    first_input = "input_ids" if "tokens-in" in parts else "hidden_states"
    d, angles = prepare(g, options.attention, first_input)
    hidden = embed(g, c) if first_input == "input_ids" else (
        g.op("Reshape", "hidden_states", g.ints(-1, c.attention.hidden_size), name="tokens"))
    index = 0

    def attend(normed: str) -> str:
        nonlocal index
        index += 1
        return build_attention(g, options.attention, d, angles, normed, index - 1)

    for layer in options.layers:
        chosen = options.last and layer == options.layers.stop - 1 and "all-logits" not in parts
        select = selection(g, d, parts) if chosen else lambda value, name: value
        with g.block(f"layers.{layer}"):
            build = _shortcut_layer if c.shortcut else _layer
            hidden = build(g, options, layer, hidden, attend, select)
    if options.last:
        head(g, options, d, hidden)
    else:
        shape = g.op("Concat", d.B, d.T, g.ints(c.attention.hidden_size), name="hidden_shape", axis=0)
        g.op("Reshape", hidden, shape, name="hidden_states_out", output="hidden_states_out")


Attend = Callable[[str], str]
Select = Callable[[str, str], str]


def embed(g: GraphBuilder, c: DecoderConfig) -> str:
    """input_ids [B, T] -> [N, D]."""
    ids = g.op("Reshape", "input_ids", g.ints(-1), name="flat_ids")
    hidden = g.op("Gather", g.weight("embed_tokens.weight"), ids, name="embedding", axis=0)  # [N, D]
    if c.embedding_scale != 1:
        hidden = g.op("Mul", hidden, g.scalar("embedding_scale", c.embedding_scale), name="scaled_embedding")
    return hidden


def selection(g: GraphBuilder, d: Dims, parts: tuple[str, ...]) -> Select:
    """Picks, of [N, D], the row of each sequence's last token: `last_token` says which it is, else it is T - 1."""
    def rows() -> str:
        one = g.int_scalar(1)
        last = "last_token" if "last-token" in parts else g.op("Sub", d.T, one, name="last")
        batch = g.op("Range", g.int_scalar(0), g.op("Squeeze", d.B, name="B_scalar"), one, name="sequence")
        return g.op("Add", g.op("Mul", batch, d.T, name="start"), last, name="row")

    chosen = g.once("last_rows", rows)
    return lambda value, name: g.op("Gather", value, chosen, name=f"{name}_of_last", axis=0)


def residual(g: GraphBuilder, c: DecoderConfig, hidden: str, branch: str, name: str) -> str:
    """The residual stream [N, D] with a branch added, in the family's scale."""
    if c.residual_scale != 1:
        branch = g.op("Mul", branch, g.scalar("residual_scale", c.residual_scale), name=f"{name}_scaled")
    return g.op("Add", hidden, branch, name=f"{name}_residual")


def block_norm(g: GraphBuilder, c: DecoderConfig, value: str, name: str) -> str:
    """The RMS norm `name` of the block, [N, D]."""
    return norm(g, value, name, c.attention.rms_norm_eps)


def _layer(g: GraphBuilder, o: DecoderOptions, layer: int, hidden: str, attend: Attend, select: Select) -> str:
    c = o.decoder
    normed = block_norm(g, c, hidden, "input_norm")
    with g.block("attn"):
        attended = attend(normed)
    hidden = select(residual(g, c, hidden, attended, "attention"), "hidden")
    normed = block_norm(g, c, hidden, "post_norm")
    if layer in c.sparse_layers:
        assert c.moe is not None
        ffn = build_moe(g, c.moe, o.experts, normed, c.attention.hidden_size, c.attention.rms_norm_eps)
    else:
        ffn = gated_ffn(g, normed, "mlp.")
    return residual(g, c, hidden, ffn, "ffn")


def _shortcut_layer(g: GraphBuilder, o: DecoderOptions, layer: int, hidden: str, attend: Attend, select: Select) -> str:
    """Two attentions and two dense FFNs; the MoE sees what the first FFN sees and is added at the end (LongCat)."""
    c = o.decoder
    assert c.moe is not None
    shortcut = ""
    for half in (0, 1):
        normed = block_norm(g, c, hidden, f"input_norm.{half}")
        with g.block(f"attn.{half}"):
            attended = attend(normed)
        hidden = residual(g, c, hidden, attended, f"attention_{half}")
        if half:
            hidden = select(hidden, "hidden")
        normed = block_norm(g, c, hidden, f"post_norm.{half}")
        if not half:
            shortcut = build_moe(g, c.moe, o.experts, select(normed, "normed"), c.attention.hidden_size,
                                 c.attention.rms_norm_eps)
        with g.scope(f"ffn_{half}"):
            ffn = gated_ffn(g, normed, f"mlps.{half}.")
        hidden = residual(g, c, hidden, ffn, f"ffn_{half}")
    return g.op("Add", hidden, shortcut, name="shortcut_residual")


def head(g: GraphBuilder, o: DecoderOptions, d: Dims, hidden: str) -> None:
    """Final norm, head and logits in float32, of `vocabulary_part` where the decoder has a part alone."""
    c, half = o.decoder, g.dtype.name != "fp32"
    hidden = norm(g, hidden, "norm", c.attention.rms_norm_eps)
    every = "all-logits" in o.parts
    output = None if half or every else "logits"
    if not c.tie_word_embeddings:
        logits = product(g, hidden, "lm_head.weight", [], "head", output)
    else:
        part = c.vocabulary_part
        weight = g.weight("embed_tokens.weight") if part is None else g.weight(
            "embed_tokens.weight", (c.head_rows, c.attention.hidden_size), "head_rows.weight", part[0])
        logits = g.op("Gemm", hidden, weight, name="head", transB=1, output=output)
    if half:
        logits = g.op("Cast", logits, name="head_fp32", to=TensorProto.FLOAT, output=None if every else "logits")
    if every:
        shape = g.op("Concat", d.B, d.T, g.ints(c.head_rows), name="logits_shape", axis=0)
        g.op("Reshape", logits, shape, name="all_logits", output="logits")
