"""One MLA attention as an ONNX graph: projections, the cache row, a formulation of the core, the output.

    hidden --q--> q_nope --W_UK--+--> q_rows --+
              \\-> q_rope --RoPE--+             |
    hidden --kv_a--> latent --norm--+          core(rows it may see) --W_UV--> W_O --> attn_output
                 \\-> k_rope --RoPE--+--> row --+--> cache form

Tokens are flattened to N = B*T so that every projection is one Gemm over a weight as stored ([out, in], transB = 1),
and the absorption products run heads first ([H, N, .] @ [H, ., .]): no weight is ever transposed or broadcast.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from exporter import nbits
from exporter.cache_forms import FORMS, Dims, Segment, append_quantised
from exporter.config import MLAConfig, RopeLayout
from exporter.dtypes import DTYPES
from exporter.formulations import Formulation
from exporter.formulations.common import CoreInputs
from exporter.graph import GraphBuilder
from exporter.rope import BLOCK
from exporter.weight_file import SCALE

_FP32 = DTYPES["fp32"]
FP8_UNIT = 2.0**-12  # what a code of 1 becomes in a product: the least code is 2^-9, float16 ends at 2^-24


@dataclass(frozen=True)
class GraphOptions:
    """What varies between the graphs of one export. `few`, `on_cpu`: as in `CoreInputs`; `cache_dtype`: fp8 or int8 for
    a quantised cache."""

    config: MLAConfig
    formulation: Formulation
    cache: str
    folded: bool
    rope_layout: RopeLayout
    softmax_scale: float
    few: bool = False
    on_cpu: bool = False
    cache_dtype: str | None = None

    @property
    def absorbed(self) -> bool:
        """Whether the core attends latent rows (else it rebuilds K and V)."""
        return self.formulation.prefill_form == "absorbed"


def build_layer(g: GraphBuilder, options: GraphOptions) -> None:
    """One attention alone, between the inputs and outputs that `exporter.signature` names at layer scope."""
    d, angles = prepare(g, options, "hidden_states")
    tokens = g.op("Reshape", "hidden_states", g.ints(-1, options.config.hidden_size), name="tokens")  # [N, D]
    projected = build_attention(g, options, d, angles, tokens, 0)
    shape = g.op("Concat", d.B, d.T, g.ints(options.config.hidden_size), name="output/shape", axis=0)
    g.op("Reshape", projected, shape, name="output/attn_output", output="attn_output")


def prepare(g: GraphBuilder, options: GraphOptions, first_input: str) -> tuple[Dims, Angles]:
    """What all attentions of a graph share: sizes (from `first_input` [B, T, ...]), positions and their angles."""
    with g.scope("shapes"):
        d = _dims(g, options, first_input)
    with g.scope("rope"):
        return d, Angles(g, options.config, options.rope_layout, options.softmax_scale, d)


def build_attention(g: GraphBuilder, options: GraphOptions, d: Dims, angles: Angles, tokens: str, index: int) -> str:
    """Attention number `index` of the graph over normed tokens [N, D] -> [N, D], N = B*T; its cache outputs with it."""
    c = options.config
    segments = _segments(g, options, d, angles, tokens, index)
    with g.scope("query"):
        q_nope, q_rope = _query(g, options, d, angles, tokens)
    if options.absorbed:
        with g.scope("query"):
            q_rows = _absorbed_query(g, options, d, q_nope, q_rope)
        core = CoreInputs(c, d, segments, q_rows=q_rows, few=options.few, on_cpu=options.on_cpu)
    else:
        core = CoreInputs(c, d, segments, q_nope=q_nope, q_rope=q_rope, on_cpu=options.on_cpu)
    with g.scope("core"):
        mixed = options.formulation.build(g, core)
    with g.scope("output"):
        return _output(g, options, d, mixed)


def _dims(g: GraphBuilder, options: GraphOptions, first_input: str) -> Dims:
    c, cache = options.config, options.cache
    batch = g.op("Shape", first_input, name="B", start=0, end=1)
    new = g.op("Shape", first_input, name="T", start=1, end=2)
    t = g.op("Range", g.int_scalar(0), g.op("Squeeze", new, name="T_scalar"), g.int_scalar(1), name="t")
    past = None
    if cache in ("append", "concat"):
        past = g.op("Shape", "past_latent.0", name="S", start=1, end=2)
    elif cache == "scatter":
        past = g.op("Shape", "latent_cache.0", name="S_max", start=2, end=3)
    query_token = t
    heads = options.formulation.heads(c)
    if options.absorbed:  # one query row per token and head of a product
        grid = g.op("Concat", new, g.ints(heads), name="query_grid", axis=0)
        spread = g.op("Expand", g.op("Unsqueeze", t, g.ints(1), name="t_column"), grid, name="t_per_head")
        query_token = g.op("Reshape", spread, g.ints(-1), name="query_token")
    return Dims(batch, new, past, t, query_token, None if cache == "none" else "past_lengths")


class Angles:
    """cos and sin of every new token's position, [B, T, d_r / 2] in float32, for keys and (scaled) for queries."""

    def __init__(self, g: GraphBuilder, config: MLAConfig, layout: RopeLayout, softmax_scale: float, d: Dims) -> None:
        self.g, self.d = g, d
        self.width, self.interleaved = config.qk_rope_head_dim, int(layout == "pairs")
        position = g.op("Unsqueeze", d.t, g.ints(0), name="t_row")  # [1, T]
        if d.past_lengths is not None:
            position = g.op(
                "Add", g.op("Unsqueeze", d.past_lengths, g.ints(1), name="offset"), position, name="position"
            )
        else:  # no past: every sequence starts at 0
            position = g.op("Expand", position, g.op("Concat", d.B, d.T, name="BT", axis=0), name="position")
        block = g.int_scalar(BLOCK)
        coarse = g.op("Div", position, block, name="block")
        fine = g.op("Sub", position, g.op("Mul", coarse, block, name="block_start"), name="in_block")
        cos_c, sin_c, cos_f, sin_f = (
            g.op("Gather", g.weight(f"rope.{table}"), index, name=table, axis=0)
            for table, index in (("cos_coarse", coarse), ("sin_coarse", coarse), ("cos_fine", fine), ("sin_fine", fine))
        )
        # the addition theorem, see exporter/rope.py
        self.cos = g.op("Sub", g.op("Mul", cos_c, cos_f, name="cc"), g.op("Mul", sin_c, sin_f, name="ss"), name="cos")
        self.sin = g.op("Add", g.op("Mul", sin_c, cos_f, name="sc"), g.op("Mul", cos_c, sin_f, name="cs"), name="sin")
        self.query_temperature = _query_temperature(g, config, position) if config.rope.llama_4_scaling_beta else None
        scale = g.scalar("softmax_scale", softmax_scale, _FP32)
        self.cos_scaled = g.op("Mul", self.cos, scale, name="cos_scaled")
        self.sin_scaled = g.op("Mul", self.sin, scale, name="sin_scaled")

    def rotate(self, value: str, heads: int, name: str, scaled: bool) -> str:
        """[N, heads * d_r] -> rotated [N, heads, d_r], in float32 inside (it measures no memory in TensorRT)."""
        g, d = self.g, self.d
        shape = g.op("Concat", d.B, d.T, g.ints(heads * self.width), name=f"{name}_shape", axis=0)
        value = g.op("Reshape", value, shape, name=f"{name}_3d")
        half = g.dtype.name != "fp32"
        if half:
            value = g.to(value, TensorProto.FLOAT, f"{name}_fp32")
        cos, sin = (self.cos_scaled, self.sin_scaled) if scaled else (self.cos, self.sin)
        value = g.op("RotaryEmbedding", value, cos, sin, name=f"{name}_rotated", interleaved=self.interleaved,
                     num_heads=heads)
        if half:
            value = g.to(value, g.dtype.onnx, f"{name}_rounded")
        return g.op("Reshape", value, g.ints(-1, heads, self.width), name=f"{name}_heads")


def _query_temperature(g: GraphBuilder, config: MLAConfig, position: str) -> str:
    """1 + beta ln(1 + floor(position / original)) of every new token, [N, 1] in the compute dtype."""
    assert config.rope.llama_4_scaling_beta
    original = g.int_scalar(config.rope.original_max_position_embeddings or 0)
    periods = g.to(g.op("Div", position, original, name="periods"), TensorProto.FLOAT, "periods_fp32")
    one = g.scalar("const/one_fp32", 1.0, _FP32)
    grown = g.op("Mul", g.op("Log", g.op("Add", periods, one, name="periods_1"), name="log_periods"),
                 g.scalar("llama_4_scaling_beta", config.rope.llama_4_scaling_beta, _FP32), name="growth")
    column = g.op("Reshape", g.op("Add", grown, one, name="temperature"), g.ints(-1, 1), name="temperature_column")
    return column if g.dtype.name == "fp32" else g.to(column, g.dtype.onnx, "temperature_rounded")


def linear(g: GraphBuilder, value: str, name: str, output: str | None = None) -> str:
    """A projection [N, in] -> [N, out] over the weight as stored, [out, in], and its bias where it has one."""
    bias = [g.weight(f"{name}.bias")] if g.has_weight(f"{name}.bias") else []
    return product(g, value, f"{name}.weight", bias, name, output)


def product(g: GraphBuilder, value: str, weight: str, bias: list[str], name: str, output: str | None = None) -> str:
    """value @ weight^T + bias, over codes where the weight is stored as such.

    With a scale per output channel (FP8) the product is scaled, not the weight, whose codes become numbers by a power
    of two, exactly. TensorRT-RTX 1.7 keeps weights that are dequantised per channel beside the products of a single
    token, all layers' at once.
    """
    if nbits.is_packed(g, weight):
        return nbits.product(g, value, weight, bias, name, output)
    if g.stored_dtype(weight) != "fp8":
        return g.op("Gemm", value, g.matrix(weight), *bias, name=name, transB=1, output=output)
    unit = g.scalar("const/fp8_unit", FP8_UNIT)
    numbers = g.op("DequantizeLinear", g.weight(weight), unit, name=f"{weight}/numbers")
    product = g.op("Gemm", value, numbers, name=name, transB=1)
    factor = g.op("Mul", g.weight(f"{weight}{SCALE}"), g.scalar("const/per_fp8_unit", 1 / FP8_UNIT),
                  name=f"{weight}/factor")  # [out]
    scaled = g.op("Mul", product, factor, name=f"{name}/scaled", output=None if bias else output)
    return g.op("Add", scaled, *bias, name=f"{name}/biased", output=output) if bias else scaled


def norm(g: GraphBuilder, value: str, name: str, epsilon: float) -> str:
    """RMS norm over the last axis, reduced in float32; left out where the source has none."""
    if not g.has_weight(f"{name}.weight"):
        return value
    return g.op("RMSNormalization", value, g.weight(f"{name}.weight"), name=name, axis=-1, epsilon=epsilon)


def _segments(g: GraphBuilder, options: GraphOptions, d: Dims, angles: Angles, tokens: str, index: int
              ) -> list[Segment]:
    """The new rows made and returned, and all rows that the core may see."""
    c = options.config

    def by_sequence(value: str, width: int, name: str, output: str | None = None) -> str:
        shape = g.op("Concat", d.B, d.T, g.ints(width), name="shape" if name == "new_rows" else f"{name}_shape", axis=0)
        return g.op("Reshape", value, shape, name=name, output=output)

    with g.scope("row"):
        latent, k_rope = _row(g, c, angles, tokens)
        if options.cache_dtype:
            latent = by_sequence(latent, c.kv_lora_rank, "new_latent")
            k_rope = by_sequence(k_rope, c.qk_rope_head_dim, "new_rope", f"new_rope.{index}")
        else:  # [B, T, R]
            rows = by_sequence(g.op("Concat", latent, k_rope, name="row", axis=1), c.row_dim, "new_rows",
                               f"new_latent.{index}" if options.cache == "append" else None)
    with g.scope("cache"):
        if options.cache_dtype:
            return append_quantised(g, d, latent, k_rope, index, options.cache_dtype)
        return FORMS[options.cache](g, d, rows, index)


def _row(g: GraphBuilder, c: MLAConfig, angles: Angles, tokens: str) -> tuple[str, str]:
    """What a token's cache row is made of: the normed latent [N, d_c] and the rotary key [N, d_r]. RoPE never touches
    the latent."""
    latent, k_rope = g.ops("Split", linear(g, tokens, "kv_a_proj"), g.ints(c.kv_lora_rank, c.qk_rope_head_dim),
                           name="split", axis=1, count=2)
    latent = norm(g, latent, "kv_a_norm", c.latent_norm_eps)
    rotated = angles.rotate(k_rope, 1, "k_rope", scaled=False)  # [N, 1, d_r]
    return latent, g.op("Squeeze", rotated, g.ints(1), name="k_rope")


def _query(g: GraphBuilder, options: GraphOptions, d: Dims, angles: Angles, tokens: str) -> tuple[str, str]:
    """q_nope ([N, H, nope], or [N, H, d_c] when W_UK is folded in) and the rotated, scaled q_rope [N, H, d_r]."""
    c, H = options.config, options.config.num_attention_heads
    source = tokens
    if g.has_weight("q_a_proj.weight"):
        source = norm(g, linear(g, tokens, "q_a_proj"), "q_a_norm", c.latent_norm_eps)
    if angles.query_temperature:  # the last projection has no bias, so its input may carry the factor
        source = g.op("Mul", source, angles.query_temperature, name="tempered")
    last = "q_b_proj" if g.has_weight("q_a_proj.weight") else "q_proj"
    if options.folded and options.absorbed:
        q_nope = g.op("Reshape", linear(g, source, "q_folded"), g.ints(-1, H, c.kv_lora_rank), name="q_latent")
        q_rope = linear(g, tokens if _rope_from_hidden(g, options) else source, "q_rope_proj")
    elif _rope_from_hidden(g, options):
        q_nope = g.op("Reshape", linear(g, source, last), g.ints(-1, H, c.qk_nope_head_dim), name="q_nope")
        q_rope = linear(g, tokens, "q_rope_proj")
    else:
        heads = g.op("Reshape", linear(g, source, last), g.ints(-1, H, c.qk_head_dim), name="q_heads")
        q_nope, q_rope = g.ops("Split", heads, g.ints(c.qk_nope_head_dim, c.qk_rope_head_dim), name="q_split", axis=2,
                               count=2)
    return q_nope, angles.rotate(q_rope, H, "q_rope", scaled=True)


def _rope_from_hidden(g: GraphBuilder, options: GraphOptions) -> bool:
    """Whether the rotary query has its own projection of the hidden state (and was not merged into one W_Q).

    Merging leaves no q_a_proj; q_rope_proj alone says nothing, a folded W_Q leaves its rotary rows under that name too.
    """
    return options.config.query_rope_from_hidden and g.has_weight("q_a_proj.weight")


def _absorbed_query(g: GraphBuilder, options: GraphOptions, d: Dims, q_nope: str, q_rope: str) -> str:
    """[N, H, nope] @ W_UK, beside the rotary part: query rows [B, T*H, R] that meet cache rows directly."""
    if not options.folded:
        first = g.op("Transpose", q_nope, name="heads_first", perm=[1, 0, 2])  # [H, N, nope]
        q_latent = g.op("MatMul", first, g.weight("w_uk"), name="absorb_w_uk")  # [H, N, d_c]
        q_nope = g.op("Transpose", q_latent, name="tokens_first", perm=[1, 0, 2])
    rows = g.op("Concat", q_nope, q_rope, name="q_rows_by_head", axis=2)  # [N, H, R]
    shape = g.op("Concat", d.B, g.ints(-1), g.ints(options.config.row_dim), name="q_rows_shape", axis=0)
    return g.op("Reshape", rows, shape, name="q_rows")


def _output(g: GraphBuilder, options: GraphOptions, d: Dims, mixed: str) -> str:
    c, H = options.config, options.config.num_attention_heads
    if not options.absorbed:
        by_token = g.op("Transpose", mixed, name="tokens_first", perm=[0, 2, 1, 3])  # [B, T, H, v]
        flat, last = g.op("Reshape", by_token, g.ints(-1, H * c.v_head_dim), name="values"), "o_proj"
    elif options.folded:
        flat, last = g.op("Reshape", mixed, g.ints(-1, H * c.kv_lora_rank), name="latents"), "o_folded"
    else:
        heads = g.op("Reshape", mixed, g.ints(-1, H, c.kv_lora_rank), name="latent_heads")  # [N, H, d_c]
        first = g.op("Transpose", heads, name="heads_first", perm=[1, 0, 2])
        value = g.op("MatMul", first, g.weight("w_uv"), name="absorb_w_uv")  # [H, N, v]
        by_token = g.op("Transpose", value, name="tokens_first", perm=[1, 0, 2])
        flat, last = g.op("Reshape", by_token, g.ints(-1, H * c.v_head_dim), name="values"), "o_proj"
    bias = [g.weight("o_proj.bias")] if g.has_weight("o_proj.bias") else []
    return product(g, flat, f"{last}.weight", bias, last)
