"""The interpreter's operators of attention: RotaryEmbedding, Attention, TensorScatter (opset 24 semantics), and the
project's own `mla::LatentAttention`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engines.onnx_ops import Value, one_type, operator, rounded
from exporter.errors import InputError


def _heads(data: Tensor, heads: int) -> Tensor:
    """[B,T,heads*d] as [B,T,heads,d]."""
    return data.reshape(*data.shape[:2], heads, data.shape[2] // heads)


@operator("RotaryEmbedding")
def _rotary_embedding(x: Value, cos: Value, sin: Value, position_ids: Value | None = None, *, interleaved: int = 0,
                      num_heads: int = 0, rotary_embedding_dim: int = 0) -> Value:  # fmt: skip
    """x is [B,heads,T,d] or, with num_heads, [B,T,heads*d]; caches [B,T,r/2] or, with position_ids [B,T], [P,r/2]."""
    dtype = one_type(x, cos, sin)
    flat = x.data.dim() == 3
    if flat and not num_heads:
        raise InputError("RotaryEmbedding of a 3-D tensor lacks num_heads; expected the attribute")
    heads = _heads(x.data, num_heads) if flat else x.data.transpose(1, 2)  # [B,T,heads,d]
    width = rotary_embedding_dim or heads.shape[3]
    turned, kept = heads[..., :width], heads[..., width:]
    c, s = (v.data if position_ids is None else v.data[position_ids.data] for v in (cos, sin))
    if c.shape[-1] != width // 2 or s.shape[-1] != width // 2:
        raise InputError(f"RotaryEmbedding turns {width} columns by caches of {c.shape[-1]} and {s.shape[-1]} columns; "
                         f"expected {width // 2}")  # fmt: skip
    c, s = c.unsqueeze(2), s.unsqueeze(2)  # [B,T,1,r/2]
    first, second = (turned[..., 0::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pair = (c * first - s * second, s * first + c * second)
    result = torch.cat([torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), kept], -1)
    return rounded(result.flatten(2) if flat else result.transpose(1, 2), dtype)


def _causal(queries: int, keys: int, offset: Tensor | int) -> Tensor:
    """True where query i may see key j <= i + offset: [T,S], or [B,1,T,S] for an offset per sample [B]."""
    frontier = torch.arange(queries).unsqueeze(1)
    if isinstance(offset, Tensor):
        frontier = frontier + offset.reshape(-1, 1, 1, 1)
    else:
        frontier = frontier + offset
    return torch.arange(keys) <= frontier


def _attention_bias(scores: Tensor, mask: Value | None, past: int | None, lengths: Value | None,
                    is_causal: bool) -> Tensor:  # fmt: skip
    """The sum of all masks, 0 or -inf or a float mask's numbers, broadcastable to the scores [B,H,T,S].

    Causality is aligned bottom-right: the offset is the past's length, or lengths - T, or 0 (errata of ONNX 1.23).
    """
    queries, keys = scores.shape[-2:]
    bias = torch.zeros((1, keys))
    allowed = torch.ones((1, keys), dtype=torch.bool)
    if mask is not None:
        short = keys - mask.data.shape[-1]  # a mask shorter than the keys hides the rest
        if mask.dtype == torch.bool:
            allowed = torch.nn.functional.pad(mask.data, (0, short), value=False)
        else:
            bias = torch.nn.functional.pad(mask.data.to(scores.dtype), (0, short), value=-math.inf)
    if is_causal:
        offset = past if past is not None else lengths.data - queries if lengths is not None else 0
        allowed = allowed & _causal(queries, keys, offset)
    if lengths is not None:
        allowed = allowed & (torch.arange(keys) < lengths.data.reshape(-1, 1, 1, 1))
    return torch.where(allowed, bias, -math.inf)


@operator("Attention")
def _attention(q: Value, k: Value, v: Value, mask: Value | None = None, past_key: Value | None = None,
               past_value: Value | None = None, lengths: Value | None = None, *, is_causal: int = 0,
               kv_num_heads: int = 0, q_num_heads: int = 0, scale: float | None = None, softcap: float = 0.0,
               softmax_precision: int = 1, qk_matmul_output_mode: int = 0) -> tuple[Value, Value, Value]:  # fmt: skip
    """q [B,H,T,d], k [B,G,S,d], v [B,G,S,d_v], or 3-D with the heads as attributes; H is a multiple of G.

    Returns the output, [B,H,T,d_v] or [B,T,H*d_v], with the present key and value, [B,G,past+S,·]. A row that sees no
    key is zero. softmax_precision is moot (float32 throughout); qk_matmul_output and so its mode are not offered.
    """
    flat = q.data.dim() == 3
    one_type(q, k)
    if (past_key is None) != (past_value is None) or (past_key is not None and lengths is not None):
        raise InputError("Attention has one of past_key and past_value, or nonpad_kv_seqlen beside them; expected both "
                         "pasts, or nonpad_kv_seqlen, or neither")  # fmt: skip
    if flat and not (q_num_heads and kv_num_heads):
        raise InputError("Attention of 3-D tensors lacks q_num_heads or kv_num_heads; expected both attributes")
    query, key, value = q.data, k.data, v.data
    if flat:
        query = _heads(query, q_num_heads).transpose(1, 2)
        key, value = (_heads(x, kv_num_heads).transpose(1, 2) for x in (key, value))
    past = None
    if past_key is not None and past_value is not None:
        past = past_key.data.shape[2]
        key, value = torch.cat([past_key.data, key], 2), torch.cat([past_value.data, value], 2)
    (batch, heads, queries, width), groups = query.shape, key.shape[1]
    # the query heads of one key head stand below each other: no key is repeated in memory
    grouped = query.reshape(batch, groups, heads // groups * queries, width)
    scores = torch.matmul(grouped, key.mT).reshape(batch, heads, queries, key.shape[2])
    scores = scores * (scale if scale is not None else width**-0.5)
    if softcap > 0:
        scores = torch.tanh(scores / softcap) * softcap
    bias = _attention_bias(scores, mask, past, lengths, bool(is_causal))
    weights = torch.softmax(scores + bias, -1)
    weights = weights.masked_fill((bias == -math.inf).all(-1, keepdim=True), 0.0)
    output = torch.matmul(weights.reshape(batch, groups, heads // groups * queries, key.shape[2]), value)
    output = output.reshape(batch, heads, queries, value.shape[3])
    return rounded(output.transpose(1, 2).flatten(2) if flat else output, q.dtype), k.moved(key), v.moved(value)


@operator("TensorScatter")
def _tensor_scatter(past: Value, update: Value, write_indices: Value | None = None, *, axis: int = -2,
                    mode: str = "linear") -> Value:  # fmt: skip
    """past [B,…,S,…] with update [B,…,T,…] written from write_indices [B] (0 without) on, along `axis`."""
    one_type(past, update)
    cache, rows = past.data.movedim(axis, 1), update.data.movedim(axis, 1)  # [B,S,…], [B,T,…]
    (batch, written), size = rows.shape[:2], cache.shape[1]
    position = torch.arange(written).expand(batch, written)
    if write_indices is not None:
        position = position + write_indices.data.reshape(-1, 1)
    if mode == "circular":
        position = position % size
    elif not position.is_meta and bool(((position < 0) | (position >= size)).any()):
        first, last = int(position.min()), int(position.max())
        raise InputError(f"TensorScatter sets rows {first} to {last} of a cache of {size}; expected rows inside it")
    sample = torch.arange(batch).unsqueeze(1)
    return past.moved(torch.index_put(cache, (sample, position), rows).movedim(1, axis))


@operator("mla:LatentAttention")
def _latent_attention(q: Value, past: Value, lengths: Value, new: Value, *, latent: int) -> Value:
    """The project's own operator: queries [B,T*H,R], token-major, over the first `lengths` [B] rows of past [B,S,R] and
    the new rows [B,T,R] up to their own token -> the mix of the rows' first `latent` numbers, [B,T*H,latent]."""
    dtype = one_type(q, past, new)
    if q.data.is_meta:
        return q.moved(q.data.new_empty((*q.data.shape[:2], latent)))
    S, T = past.data.shape[1], new.data.shape[1]
    token = torch.arange(q.data.shape[1]) // (q.data.shape[1] // T)
    seen = (torch.arange(S) < lengths.data.reshape(-1, 1, 1)).expand(-1, len(token), -1)
    fresh = (torch.arange(T) <= token.unsqueeze(1)).expand(len(seen), -1, -1)
    rows = torch.cat([past.data, new.data], 1)
    scores = q.data @ rows.transpose(1, 2)
    weights = torch.softmax(torch.where(torch.cat([seen, fresh], 2), scores, -math.inf), -1)
    return rounded(weights @ rows[..., :latent], dtype)
