"""One attention's weights in the paper's terms, split and absorbed once; no graph ever re-derives them.

`load_attention` checks the source's tensors against the configuration; `plan_weights` turns them into what the graphs
read. The softmax scale is folded here, in float64: into W_UK for the content part and (as one scalar on cos and sin)
into the rotary query, so that no graph multiplies scores and no rounding of the scale is systematic.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from exporter.config import MLAConfig, RopeLayout
from exporter.errors import InputError
from exporter.rope import frequencies, softmax_scale, tables
from exporter.safetensors_file import SourceTensor, StoredSource
from exporter.source import Source
from exporter.weight_file import PlannedTensor, count_nonfinite


@dataclass
class Linear:
    """`y = x @ weight.T + bias`, weight [out, in]. `stored`: where a file holds this very weight, if one does."""

    weight: np.ndarray
    bias: np.ndarray | None = None
    stored: StoredSource | None = None


@dataclass
class AttentionWeights:
    """Everything the graphs need of one attention, in the source's dtype.

    Query: `q` [H (nope + rope), D], or `q_a` [q_rank, D], `q_a_norm` [q_rank] and `q_b` [H (nope + rope), q_rank];
    where the rotary query has a projection of its own, `q`/`q_b` give H nope columns and `q_rope` [H rope, D] the rest.
    Latent: `kv_a` [d_c + d_r, D], `kv_a_norm` [d_c]. Up: `w_uk` [H, nope, d_c], `w_uv` [H, v, d_c] with biases
    [H, nope], [H, v]. Output: `o` [D, H v].
    """

    config: MLAConfig
    kv_a: Linear
    w_uk: np.ndarray
    w_uv: np.ndarray
    o: Linear
    softmax_scale: float
    inv_freq: np.ndarray
    rope_factor: float
    rope_layout: RopeLayout
    q: Linear | None = None
    q_a: Linear | None = None
    q_b: Linear | None = None
    q_rope: Linear | None = None
    q_a_norm: np.ndarray | None = None
    kv_a_norm: np.ndarray | None = None
    b_uk: np.ndarray | None = None
    b_uv: np.ndarray | None = None
    notes: list[str] = field(default_factory=list)


class _Reader:
    """Takes tensors by name with the shape that the configuration demands, and knows which were never taken."""

    def __init__(self, source: Source, dry: bool) -> None:
        self.name, self.tensors, self.taken, self.dry = source.name, source.tensors, set[str](), dry

    def take(self, name: str, shape: tuple[int, ...], optional: bool = False) -> np.ndarray | None:
        tensor: SourceTensor | None = self.tensors.get(name)
        if tensor is None:
            if optional:
                return None
            raise InputError(
                f"{self.name}: tensor {name} {list(shape)} is missing; present: {', '.join(sorted(self.tensors))}"
            )
        if tensor.shape != shape:
            raise InputError(f"{self.name}: tensor {name} has shape {list(tensor.shape)}; the configuration expects "
                             f"{list(shape)}")
        self.taken.add(name)
        if self.dry:
            return np.broadcast_to(np.zeros((), np.float32), shape)
        values = tensor.load()
        bad = count_nonfinite(values)  # here, where it still has the name that the user knows
        if bad:
            raise InputError(f"{self.name}: {bad} of {values.size} values of tensor {name} are NaN or infinite; "
                             "expected finite weights")
        return values

    def need(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = self.take(name, shape)
        assert value is not None
        return value

    def linear(self, name: str, out: int, columns: int, bias: bool | None = None) -> Linear:
        """`bias` True: must be there; None: taken if there; False: its presence is an unknown tensor."""
        weight = self.need(f"{name}.weight", (out, columns))
        return Linear(weight, None if bias is False else self.take(f"{name}.bias", (out,), optional=bias is None),
                      self.tensors[f"{name}.weight"].stored)

    def finish(self) -> None:
        extra = sorted(set(self.tensors) - self.taken)
        if extra:
            raise InputError(f"{self.name}: unknown tensor {', '.join(extra)}; the graph would leave it out, so the "
                             "export is refused (is this another architecture?)")


def load_attention(source: Source, max_context: int, dry: bool = False) -> AttentionWeights:
    """Read, check and split one attention. `max_context` picks longrope's factor set.

    `dry` reads no values: every array has its shape and no memory, enough to plan what will be written.
    """
    c, reader = source.config, _Reader(source, dry)
    inv_freq, factor = frequencies(c, max_context)
    read = _read_article if c.query_rope_from_hidden else _read_hf
    weights = read(reader, c)
    weights.softmax_scale, weights.inv_freq, weights.rope_factor = softmax_scale(c), inv_freq, factor
    reader.finish()
    return weights


def _blank(c: MLAConfig, kv_a: Linear, w_uk: np.ndarray, w_uv: np.ndarray, o: Linear) -> AttentionWeights:
    return AttentionWeights(c, kv_a, w_uk, w_uv, o, softmax_scale=0.0, inv_freq=np.empty(0), rope_factor=1.0,
                            rope_layout=c.rope_layout)


def _read_hf(r: _Reader, c: MLAConfig) -> AttentionWeights:
    H, D, nope = c.num_attention_heads, c.hidden_size, c.qk_nope_head_dim
    # kv_b_proj interleaves K and V head by head: rows are [H, nope + v], never all K and then all V
    kv_b = r.need("kv_b_proj.weight", (H * (nope + c.v_head_dim), c.kv_lora_rank)).reshape(H, -1, c.kv_lora_rank)
    w = _blank(c, r.linear("kv_a_proj_with_mqa", c.row_dim, D), kv_b[:, :nope], kv_b[:, nope:],
               r.linear("o_proj", D, H * c.v_head_dim))
    kv_b_bias = r.take("kv_b_proj.bias", (H * (nope + c.v_head_dim),), optional=True)
    if kv_b_bias is not None:
        w.b_uk, w.b_uv = np.split(kv_b_bias.reshape(H, -1), [nope], axis=1)
    if c.q_lora_rank is None:
        w.q = r.linear("q_proj", H * c.qk_head_dim, D)
    else:
        w.q_a = r.linear("q_a_proj", c.q_lora_rank, D)
        w.q_b = r.linear("q_b_proj", H * c.qk_head_dim, c.q_lora_rank)
    if c.latent_norm:
        # the latents' factors ride on their norms' gains, and so reach the cache row and both parts of the query
        w.kv_a_norm = _gain(r, "kv_a_layernorm.weight", c.kv_lora_rank, c.latent_scale)
        if c.q_lora_rank is not None:
            w.q_a_norm = _gain(r, "q_a_layernorm.weight", c.q_lora_rank, c.query_scale)
    return w


def _gain(r: _Reader, name: str, size: int, factor: float) -> np.ndarray:
    gain = r.need(name, (size,))
    return gain if factor == 1 else gain.astype(np.float64) * factor


def _read_article(r: _Reader, c: MLAConfig) -> AttentionWeights:
    H, D, rank = c.num_attention_heads, c.hidden_size, c.q_lora_rank or 0
    down, key_rope = r.linear("down_proj_kv", c.kv_lora_rank, D, True), r.linear("proj_kr", c.qk_rope_head_dim, D, True)
    up_k = r.linear("up_proj_k", H * c.qk_nope_head_dim, c.kv_lora_rank, True)
    up_v = r.linear("up_proj_v", H * c.v_head_dim, c.kv_lora_rank, True)
    assert down.bias is not None
    assert key_rope.bias is not None
    assert up_k.bias is not None
    assert up_v.bias is not None
    kv_a = Linear(np.concatenate([down.weight, key_rope.weight]), np.concatenate([down.bias, key_rope.bias]))
    w = _blank(c, kv_a, up_k.weight.reshape(H, -1, c.kv_lora_rank), up_v.weight.reshape(H, -1, c.kv_lora_rank),
               r.linear("fc", D, H * c.v_head_dim, True))
    w.b_uk, w.b_uv = up_k.bias.reshape(H, -1), up_v.bias.reshape(H, -1)
    w.q_a = r.linear("down_proj_q", rank, D, True)
    w.q_b = r.linear("up_proj_q", H * c.qk_nope_head_dim, rank, True)
    w.q_rope = r.linear("proj_qr", H * c.qk_rope_head_dim, D, True)
    return w


def merge_query(w: AttentionWeights) -> None:
    """Merge the query low rank, and a separate rotary query, into one W_Q [H (nope + rope), D], in float64.

    Only possible without a norm between the two: with one it is an InputError.
    """
    if w.q_a is None or w.q_b is None:
        raise InputError("--merge-q: this attention has no query low rank to merge")
    if w.q_a_norm is not None:
        raise InputError(
            "--merge-q: the query low rank has an RMS norm between its halves, so no single W_Q equals it; "
            "leave --merge-q out"
        )
    c, H = w.config, w.config.num_attention_heads
    up = w.q_b.weight.astype(np.float64)
    merged = up @ w.q_a.weight.astype(np.float64)
    bias = np.zeros(len(up)) if w.q_b.bias is None else w.q_b.bias.astype(np.float64)
    if w.q_a.bias is not None:
        bias = bias + up @ w.q_a.bias.astype(np.float64)
    if w.q_rope is not None:
        rope_bias = np.zeros(len(w.q_rope.weight)) if w.q_rope.bias is None else w.q_rope.bias
        merged = np.concatenate([merged.reshape(H, c.qk_nope_head_dim, -1),
                                 w.q_rope.weight.reshape(H, c.qk_rope_head_dim, -1)], axis=1).reshape(-1, c.hidden_size)
        bias = np.concatenate([bias.reshape(H, -1), rope_bias.reshape(H, -1)], axis=1).reshape(-1)
    w.q, w.q_a, w.q_b, w.q_rope = Linear(merged, bias if bias.any() else None), None, None, None


def plan_weights(w: AttentionWeights, *, dtype: str, folded: bool, expanded: bool) -> list[PlannedTensor]:
    """What the weight file holds of one attention, each tensor made only when it is written.

    `folded` adds W_UK folded into the query projection and W_UV into the output; `expanded` adds both in one
    kv_b, for the prefill that rebuilds K and V. W_UK carries the softmax scale.
    """
    plan = [*_query(w, dtype, folded, expanded), *_linear("kv_a_proj", w.kv_a, dtype)]
    if w.kv_a_norm is not None:
        plan.append(plain_tensor("kv_a_norm.weight", w.kv_a_norm, dtype))
    if not folded or expanded:
        plan.append(PlannedTensor("w_uk", w.w_uk.shape, dtype, lambda: _scaled_uk(w)))  # [H, nope, d_c]
        H, v, d_c = w.w_uv.shape
        plan.append(PlannedTensor("w_uv", (H, d_c, v), dtype, lambda: w.w_uv.transpose(0, 2, 1)))
        plan.append(plain_tensor("o_proj.weight", w.o.weight, dtype, w.o.stored, projection=True))
    if expanded:
        H, nope, d_c = w.w_uk.shape
        plan.append(PlannedTensor("kv_b", (H * (nope + w.w_uv.shape[1]), d_c), dtype, lambda: _scaled_kv_b(w)))
    if folded:
        plan.append(PlannedTensor("o_folded.weight", (w.config.hidden_size, w.w_uv.shape[0] * w.w_uv.shape[2]), dtype,
                                  lambda: _folded_output(w)))
    if w.b_uk is not None:
        # adds q.b to every key's score alike, which softmax drops; kept so that the file holds the whole source
        b_uk = w.b_uk
        plan.append(PlannedTensor("b_uk", b_uk.shape, dtype, lambda: b_uk * w.softmax_scale))
    if w.o.bias is not None or w.b_uv is not None:
        plan.append(PlannedTensor("o_proj.bias", (w.config.hidden_size,), dtype, lambda: _output_bias(w)))
    return plan


def plan_rope(inv_freq: np.ndarray, factor: float, positions: int) -> list[PlannedTensor]:
    """The rotary tables, shared by all attentions of an export."""
    return [plain_tensor(f"rope.{name}", values, "fp32")
            for name, values in vars(tables(inv_freq, factor, positions)).items()]


def plain_tensor(name: str, values: np.ndarray, dtype: str, stored: StoredSource | None = None,
                 projection: bool = False) -> PlannedTensor:
    """A tensor that is written as it is; `stored` where a source's file holds it already."""
    return PlannedTensor(name, values.shape, dtype, lambda: values, stored, projection=projection)


def _linear(name: str, linear: Linear, dtype: str) -> Iterator[PlannedTensor]:
    yield plain_tensor(f"{name}.weight", linear.weight, dtype, linear.stored, projection=True)
    if linear.bias is not None:
        yield plain_tensor(f"{name}.bias", linear.bias, dtype)


def _query(w: AttentionWeights, dtype: str, folded: bool, expanded: bool) -> Iterator[PlannedTensor]:
    """The query's projections; folded, the last one is split into its absorbed content part and its rotary rows."""
    c, H = w.config, w.config.num_attention_heads
    name, last = ("q_proj", w.q) if w.q is not None else ("q_b_proj", w.q_b)
    assert last is not None
    if w.q_a is not None:
        yield from _linear("q_a_proj", w.q_a, dtype)
    if w.q_a_norm is not None:
        yield plain_tensor("q_a_norm.weight", w.q_a_norm, dtype)
    if w.q_rope is not None:
        yield from _linear("q_rope_proj", w.q_rope, dtype)
    if not folded or expanded:
        yield from _linear(name, last, dtype)
    if folded:
        columns = last.weight.shape[1]
        yield PlannedTensor("q_folded.weight", (H * c.kv_lora_rank, columns), dtype, lambda: _folded_query(w, last))
        if last.bias is not None:
            yield PlannedTensor("q_folded.bias", (H * c.kv_lora_rank,), dtype, lambda: _folded_query_bias(w, last))
        if w.q_rope is None:
            rows = Linear(_rope_rows(w, last.weight), None if last.bias is None else _rope_rows(w, last.bias))
            yield from _linear("q_rope_proj", rows, dtype)


def _rope_rows(w: AttentionWeights, values: np.ndarray) -> np.ndarray:
    """The rotary rows of a query projection [H (nope + rope), ...] -> [H rope, ...]."""
    c, tail = w.config, values.shape[1:]
    return values.reshape(c.num_attention_heads, c.qk_head_dim, *tail)[:, c.qk_nope_head_dim:].reshape(-1, *tail)


def _scaled_kv_b(w: AttentionWeights) -> np.ndarray:
    """[H (nope + v), d_c], head by head as the source has it, its K rows scaled."""
    return np.concatenate([_scaled_uk(w), w.w_uv], axis=1).reshape(-1, w.w_uk.shape[2])


def _scaled_uk(w: AttentionWeights) -> np.ndarray:
    return w.w_uk.astype(np.float64) * w.softmax_scale


def _folded_query(w: AttentionWeights, last: Linear) -> np.ndarray:
    """W_UK^T W_Q per head, [H d_c, in]: the article's wording of absorption on the query side."""
    H, nope, _ = w.w_uk.shape
    per_head = last.weight.reshape(H, -1, last.weight.shape[1])[:, :nope]  # [H, nope, in]
    return np.concatenate([u.T @ q.astype(np.float64) for u, q in zip(_scaled_uk(w), per_head, strict=True)])


def _folded_query_bias(w: AttentionWeights, last: Linear) -> np.ndarray:
    assert last.bias is not None
    H, nope, _ = w.w_uk.shape
    bias = last.bias.reshape(H, -1)[:, :nope].astype(np.float64)
    folded: np.ndarray = np.einsum("hnc,hn->hc", _scaled_uk(w), bias).reshape(-1)
    return folded


def _folded_output(w: AttentionWeights) -> np.ndarray:
    """W_O W_UV per head, [D, H d_c]: the article's wording of absorption on the output side."""
    H, v, _ = w.w_uv.shape
    o = w.o.weight.reshape(-1, H, v)
    return np.concatenate([o[:, h].astype(np.float64) @ w.w_uv[h].astype(np.float64) for h in range(H)], axis=1)


def _output_bias(w: AttentionWeights) -> np.ndarray:
    """o_proj's bias plus W_O b_uv: attention weights sum to 1, so up_proj_v's bias passes through unchanged."""
    bias = np.zeros(w.config.hidden_size) if w.o.bias is None else w.o.bias.astype(np.float64)
    if w.b_uv is not None:
        bias = bias + w.o.weight.astype(np.float64) @ w.b_uv.reshape(-1).astype(np.float64)
    return bias


def folding_price(config: MLAConfig) -> dict[str, int]:
    """Parameters that absorption touches, factored against folded: content query (query) and values (output)."""
    c, H = config, config.num_attention_heads
    columns = c.q_lora_rank or c.hidden_size
    return {"query_factored": H * c.qk_nope_head_dim * (columns + c.kv_lora_rank),
            "query_folded": H * c.kv_lora_rank * columns,
            "output_factored": H * c.v_head_dim * (c.kv_lora_rank + c.hidden_size),
            "output_folded": H * c.kv_lora_rank * c.hidden_size}
