"""What a step must read and compute at least, counted from a decoder's shapes, and the time that sets on a GPU.

Every weight that the step's tokens meet is read once, the cache once; a multiply-add is two operations. Products that
a graph makes beyond these (padding, copies, a gather's second pass) come on top: this is a floor, not a forecast.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from engines.gpus import GPU
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig, MoEConfig, attention_shapes
from exporter.dtypes import DTYPES
from exporter.quantise import Scheme, matrix_bytes


@dataclass(frozen=True)
class Cost:
    """One part of a step: bytes read and floating-point operations."""

    part: str
    bytes: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """The least time of a step on a GPU, and which of the two sets it."""

    seconds: float
    bound: str


def crossover(c: MLAConfig, rows: int | None) -> float:
    """New tokens below which an absorbed prefill over `rows` of past (None: very many) is cheaper than an expanded."""
    a = c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    saved = 2 * c.kv_lora_rank - c.qk_nope_head_dim - c.v_head_dim
    if saved <= 0 and (rows is None or saved * rows + a <= 0):
        return float("inf")  # the latent is no wider than a head: absorbed is never dearer
    return a / saved if rows is None else a * rows / (saved * rows + a)


def distinct_experts(moe: MoEConfig, tokens: int) -> float:
    """Experts that `tokens` tokens choose together, expected where each chooses k of all at random."""
    choices = moe.n_routed_experts + moe.zero_experts
    return moe.n_routed_experts * (1 - (1 - moe.num_experts_per_tok / choices) ** tokens)


def attention_parameters(c: MLAConfig) -> int:
    """Numbers of one attention's weights; W_UK and W_UV are kv_b_proj's own."""
    return sum(prod(shape) for _, shape in attention_shapes(c))


def step(d: DecoderConfig, dtype: str, batch: int, tokens: int, rows: int, form: str = "absorbed",
         row_bytes: int | None = None, quantise: Scheme | None = None) -> list[Cost]:
    """A step of `batch` sequences with `tokens` new tokens each over `rows` of past; logits of the last token only.
    `row_bytes`: of one row in one cache (default: in the compute dtype). `quantise`: projections are codes."""
    c, w, N = d.attention, DTYPES[dtype].itemsize, batch * tokens
    count, H = d.layers * d.attentions_per_layer, c.num_attention_heads
    weights = count * attention_parameters(c)
    # causal among the new tokens: each meets the past and, on average, half of the new ones
    pairs = N * (rows + (tokens + 1) / 2)
    absorb = count * H * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    if form == "absorbed":
        projections = 2 * N * weights
        core = 2 * count * H * pairs * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    else:  # kv_b meets every row, not every new token
        projections = 2 * N * (weights - absorb) + 2 * batch * (rows + tokens) * absorb
        core = 2 * count * H * pairs * (c.qk_head_dim + c.v_head_dim)
    read = count * sum(matrix_bytes(shape, dtype, quantise if _coded(name, shape) else None)
                       for name, shape in attention_shapes(c))
    costs = [Cost("attention projections", read, projections),
             Cost("attention over the cache", count * batch * rows * (row_bytes or w * c.row_dim), core)]
    dense = d.layers if d.shortcut else d.layers - len(d.sparse_layers)
    ffn = 3 * c.hidden_size * d.intermediate_size * dense * (2 if d.shortcut else 1)
    if ffn:
        each = _ffn_bytes(c.hidden_size, d.intermediate_size, dtype, quantise)
        costs.append(Cost("dense FFN", dense * (2 if d.shortcut else 1) * each, 2 * N * ffn))
    if d.moe is not None and d.sparse_layers:
        costs += _moe(d, d.moe, N, dtype, quantise)
    head = c.hidden_size * d.vocab_size
    coded = quantise if quantise and quantise.operator == "MatMulNBits" and not d.tie_word_embeddings else None
    read = matrix_bytes((d.vocab_size, c.hidden_size), dtype, coded) + w * N * c.hidden_size
    return [*costs, Cost("embedding and head", read, 2 * batch * head)]


def _coded(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a quantised export stores an attention's tensor as codes: W_UK and W_UV stay wide."""
    return len(shape) > 1 and "kv_b" not in name


def _ffn_bytes(hidden: int, intermediate: int, dtype: str, quantise: Scheme | None) -> int:
    """One FFN's gate, up and down."""
    shapes = [(intermediate, hidden)] * 2 + [(hidden, intermediate)]
    return sum(matrix_bytes(shape, dtype, quantise) for shape in shapes)


def _moe(d: DecoderConfig, moe: MoEConfig, N: int, dtype: str, quantise: Scheme | None) -> list[Cost]:
    layers, D = len(d.sparse_layers), d.attention.hidden_size
    expert = 3 * D * moe.moe_intermediate_size
    choices = moe.n_routed_experts + moe.zero_experts
    chosen = moe.num_experts_per_tok * moe.n_routed_experts / choices  # identity experts cost nothing
    shared = 3 * D * moe.shared_intermediate_size
    router = choices * D
    alike = quantise is not None and quantise.alike(D, moe.moe_intermediate_size)
    one = _ffn_bytes(D, moe.moe_intermediate_size, dtype, quantise if alike else None)
    found = [Cost("experts chosen", layers * distinct_experts(moe, N) * one, 2 * N * layers * chosen * expert),
             Cost("router", 4 * layers * router, 2 * N * layers * router)]
    if shared:
        both = _ffn_bytes(D, moe.shared_intermediate_size, dtype, quantise)
        found.append(Cost("shared experts", layers * both, 2 * N * layers * shared))
    return found


def floor(costs: list[Cost], gpu: GPU, dtype: str) -> Floor:
    """The larger of bytes over bandwidth and operations over dense throughput."""
    memory = sum(c.bytes for c in costs) / (gpu.bandwidth_gbs * 1e9)
    compute = sum(c.flops for c in costs) / (gpu.tflops(dtype) * 1e12)
    return Floor(max(memory, compute), "bandwidth" if memory >= compute else "arithmetic")
