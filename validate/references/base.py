"""What the references have in common: queries, positions, ragged caches. What they cache and attend is theirs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch

from exporter.config import MLAConfig
from exporter.errors import InputError
from validate.references.rope import Rope, softmax_scale
from validate.references.weights import attention_weights

_BLOCK_BYTES = 128 << 20  # of scores, and of copied keys and values; several such blocks are alive at once
_SEED_ROWS = 512  # rows expanded at once when a cache is seeded
_SLACK_ROWS = 64  # spare rows, so that decoding does not copy the cache at every token

Counts = Sequence[int] | torch.Tensor


class RowBuffer:
    """One sequence's cached tensor [rows, *shape]: kept rows first, then rows staged by the current forward."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> None:
        self._data = torch.empty((0, *shape), dtype=dtype, device=device)
        self.length = 0

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all."""
        if rows > len(self._data):
            grown = self._data.new_empty((max(rows + _SLACK_ROWS, self.length * 5 // 4), *self._data.shape[1:]))
            grown[:self.length] = self._data[:self.length]
            self._data = grown

    def stage(self, rows: torch.Tensor) -> torch.Tensor:
        """Write `rows` [T, *shape] behind the kept ones; a view of both, [length + T, *shape]."""
        end = self.length + len(rows)
        self.reserve(end)
        self._data[self.length:end] = rows
        return self._data[:end]

    def kept(self) -> torch.Tensor:
        """A view of the kept rows, [length, *shape]."""
        return self._data[:self.length]


class Reference(ABC):
    """One attention with its cache, eager, in any dtype (norms and softmax in float32 at least).

    `tensors` are raw, see `source.load_tensors`. `max_context` bounds the positions and picks LongRoPE's factors.
    With `causal=False` every token attends every token of the same call and nothing is cached.
    """

    def __init__(self, config: MLAConfig, tensors: Mapping[str, torch.Tensor], *, max_context: int,
                 dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", causal: bool = True) -> None:
        self.config, self.max_context, self.causal = config, max_context, causal
        self.dtype, self.device = dtype, torch.device(device)
        self.weights = attention_weights(config, tensors, dtype, self.device)
        self.rope = Rope(config, max_context, self.device)
        self.scale = softmax_scale(config)
        self._caches: list[tuple[RowBuffer, ...]] = []

    # What a subclass is: the form of its cache, and the attention over it.

    @abstractmethod
    def _entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of one token in each cached tensor."""

    @abstractmethod
    def _entries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """New tokens ([B, T, D] at positions [B, T]) in the form of the cache, each [B, T, *shape]."""

    @abstractmethod
    def _entries_of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Latent rows [N, R] in the form of the cache, each [N, *shape]."""

    @abstractmethod
    def _attend(self, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: tuple[torch.Tensor, ...],
                past: int | None) -> torch.Tensor:
        """Queries [T, H, nope] and rotated [T, H, rope] over cached tensors [S, *shape] -> [T, H, v].

        Query t sees keys up to `past + t`; None: all.
        """

    # The common interface.

    @property
    def lengths(self) -> list[int]:
        """Cached tokens of each sequence."""
        return [buffers[0].length for buffers in self._caches]

    def cache_bytes(self) -> int:
        """Bytes of all cached tensors, counting real rows only (not spare capacity)."""
        return sum(buffer.kept().nbytes for buffers in self._caches for buffer in buffers)

    def reset(self, batch: int) -> None:
        """Empty caches for `batch` sequences."""
        self._caches = [tuple(RowBuffer(shape, self.dtype, self.device) for shape in self._entry_shapes())
                        for _ in range(batch)]

    def seed_rows(self, rows: torch.Tensor, lengths: Counts) -> None:
        """Reset to B sequences, of which the first `lengths[b]` of `rows` [B, S, R] count as cached already.

        The rows are `[normed latent | rotated rope key]`, so a test may start at position 20000 without a prefill.
        """
        if not self.causal:
            raise InputError("seed_rows was called with causal=False, which has no cache; build with causal=True")
        if rows.dim() != 3 or rows.shape[2] != self.config.row_dim:
            raise InputError(f"rows have shape {list(rows.shape)}; expected [B, S, R] with R = {self.config.row_dim}")
        lengths = _checked_counts(lengths, len(rows), min(rows.shape[1], self.max_context), "lengths")
        self.reset(len(rows))
        for buffers, sequence, length in zip(self._caches, rows, lengths, strict=True):
            for buffer in buffers:
                buffer.reserve(length)
            for start in range(0, length, _SEED_ROWS):
                chunk = sequence[start:min(start + _SEED_ROWS, length)].to(device=self.device, dtype=self.dtype)
                for buffer, entry in zip(buffers, self._entries_of_rows(chunk), strict=True):
                    buffer.stage(entry)
                    buffer.length += len(chunk)

    def forward(self, hidden: torch.Tensor, counts: Counts | None = None,
                rows: torch.Tensor | None = None) -> torch.Tensor:
        """Attention output [B, T, D] of `hidden` [B, T, D] (normed input, no residual).

        Token t of sequence b is at position `lengths[b] + t`, sees all cached tokens and the new ones up to itself.
        Only the first `counts[b]` (default T) are kept; the rest is right padding, whose output is finite but means
        nothing. `rows` [B, T, R] are cached and attended in place of those that `hidden` makes. The first call after
        construction resets to its batch.
        """
        if hidden.dim() != 3 or hidden.shape[2] != self.config.hidden_size:
            raise InputError(f"hidden has shape {list(hidden.shape)}; expected [B, T, {self.config.hidden_size}]")
        hidden = hidden.detach().to(device=self.device, dtype=self.dtype)
        batch, tokens = hidden.shape[:2]
        if not self.causal:
            return self._forward_all_to_all(hidden, counts)
        if not self._caches:
            self.reset(batch)
        if batch != len(self._caches):
            raise InputError(f"hidden has batch {batch}, the caches {len(self._caches)}; call reset({batch}) before it")
        counts = _checked_counts(counts if counts is not None else [tokens] * batch, batch, tokens, "counts")
        self._check_context(max((n + new for n, new in zip(self.lengths, counts, strict=True)), default=0))

        past = torch.tensor(self.lengths, dtype=torch.int64, device=self.device)
        positions = past[:, None] + torch.arange(tokens, device=self.device)  # [B, T]
        q_nope, q_rope = self._queries(hidden, positions)
        entries = self._entries(hidden, positions) if rows is None else self._given(rows)
        heads = hidden.new_empty((batch, tokens, self.config.num_attention_heads, self.config.v_head_dim))
        for b, buffers in enumerate(self._caches):
            cached = tuple(buffer.stage(entry[b]) for buffer, entry in zip(buffers, entries, strict=True))
            heads[b] = self._attend(q_nope[b], q_rope[b], cached, buffers[0].length)
            for buffer in buffers:
                buffer.length += counts[b]
        return self.weights.out(heads.flatten(2))  # [B, T, H*v] -> [B, T, D]

    def new_rows(self, hidden: torch.Tensor) -> torch.Tensor:
        """Cache rows [B, T, R] that a `forward` of the same `hidden` would keep: [normed latent | rotated rope key]."""
        hidden = hidden.detach().to(device=self.device, dtype=self.dtype)
        past = torch.tensor(self.lengths or [0] * len(hidden), dtype=torch.int64, device=self.device)
        positions = past[:, None] + torch.arange(hidden.shape[1], device=self.device)
        return torch.cat((self._latent(hidden), self._rotated_k_rope(hidden, positions)), dim=-1)

    # Parts shared by the subclasses.

    def _given(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Rows [B, T, R] in the form of the cache, each [B, T, *shape]."""
        flat = self._entries_of_rows(rows.flatten(0, 1).to(device=self.device, dtype=self.dtype))
        return tuple(entry.reshape(*rows.shape[:2], *entry.shape[1:]) for entry in flat)

    def _forward_all_to_all(self, hidden: torch.Tensor, counts: Counts | None) -> torch.Tensor:
        """One call without a cache, every token over every token: [B, T, D] -> [B, T, D]."""
        if counts is not None:
            raise InputError("counts were given with causal=False, where padding would be attended; pass none")
        batch, tokens = hidden.shape[:2]
        self._check_context(tokens)
        positions = torch.arange(tokens, device=self.device).expand(batch, tokens)  # [B, T]
        q_nope, q_rope = self._queries(hidden, positions)
        entries = self._entries(hidden, positions)
        heads = [self._attend(q_nope[b], q_rope[b], tuple(entry[b] for entry in entries), None) for b in range(batch)]
        return self.weights.out(torch.stack(heads).flatten(2))

    def _check_context(self, end: int) -> None:
        if end > self.max_context:
            raise InputError(f"the call would reach {end} positions; max_context is {self.max_context}, so build the "
                             "reference with a larger one")

    def _queries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T, D] -> q_nope [B, T, H, nope] and rotated q_rope [B, T, H, rope]."""
        w, H = self.weights, self.config.num_attention_heads
        low = hidden if w.q_low is None else self._norm(w.q_low(hidden), w.q_gain)  # [B, T, r_q or D]
        q_nope = per_head(w.q_nope(low), H)
        q_rope = per_head(w.q_rope(hidden if w.rope_from_hidden else low), H)
        q_rope = self.rope.rotate(q_rope, positions)
        beta, original = self.config.rope.llama_4_scaling_beta, self.config.rope.original_max_position_embeddings
        if beta and original:  # the whole query grows with its position (Mistral 4)
            growth = 1 + beta * torch.log1p(torch.floor(positions.double() / original))  # [B, T]
            growth = growth[..., None, None].to(q_nope.dtype)
            return q_nope * growth, q_rope * growth
        return q_nope, q_rope

    def _latent(self, hidden: torch.Tensor) -> torch.Tensor:
        """The latent as it is cached, after its norm: [B, T, D] -> [B, T, d_c]."""
        return self._norm(self.weights.kv_down(hidden), self.weights.kv_gain)

    def _rotated_k_rope(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The shared rotary key: [B, T, D] -> [B, T, d_r]."""
        return self.rope.rotate(self.weights.k_rope(hidden), positions)

    def _inverse_rms(self, x: torch.Tensor) -> torch.Tensor:
        """1 / rms over the last axis, [..., n] -> [..., 1]. Latent norms have their own epsilon, not `rms_norm_eps`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.latent_norm_eps)

    def _norm(self, x: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
        """RMS norm of a latent, or the latent itself where the layer has no such norm."""
        return x if gain is None else (x * self._inverse_rms(x)).to(x.dtype) * gain

    def _split_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [..., R] -> latent [..., d_c] and rotated shared key [..., d_r]."""
        return rows[..., :self.config.kv_lora_rank], rows[..., self.config.kv_lora_rank:]

    def _expand_latent(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Per-head K (without rope) and V from latents: [..., d_c] -> [..., H, nope] and [..., H, v]."""
        w, H = self.weights, self.config.num_attention_heads
        k_nope = per_head(latent @ w.w_uk.flatten(0, 1).T, H)
        v = per_head(latent @ w.w_uv.flatten(0, 1).T, H)
        return (k_nope if w.b_uk is None else k_nope + w.b_uk), (v if w.b_uv is None else v + w.b_uv)


def per_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., H*n] -> [..., H, n], head-major."""
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads)


def _checked_counts(counts: Counts, batch: int, limit: int, name: str) -> list[int]:
    values = [int(count) for count in counts]
    if len(values) != batch or any(not 0 <= value <= limit for value in values):
        raise InputError(f"{name} are {values}; expected {batch} numbers from 0 to {limit}")
    return values


def blocks(heads: int, tokens: int, rows: int, width: int, itemsize: int) -> Iterator[tuple[slice, slice]]:
    """(heads, queries) blocks whose scores [h, t, rows] plus copied K and V ([h, rows, width]) stay within a bound.

    128 heads over 5000 float64 rows of K and V are 1.3 GB, so never all heads at once.
    """
    budget = _BLOCK_BYTES // itemsize
    query_step = max(1, min(tokens, budget // max(1, rows)))
    head_step = max(1, min(heads, budget // max(1, rows * (query_step + width))))
    for head in range(0, heads, head_step):
        for query in range(0, tokens, query_step):
            yield slice(head, min(head + head_step, heads)), slice(query, min(query + query_step, tokens))


def masked_softmax(scores: torch.Tensor, last: int | None) -> torch.Tensor:
    """Softmax over keys of scaled scores [h, t, S]; query i sees keys up to `last + i`, or all if None.

    A token always sees itself, so no row is empty, also with no past.
    """
    if last is not None:
        queries = torch.arange(scores.shape[1], device=scores.device) + last
        hidden_keys = torch.arange(scores.shape[2], device=scores.device) > queries[:, None]  # [t, S]
        scores = scores.masked_fill(hidden_keys, float("-inf"))
    return torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)


def per_head_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float,
                       past: int | None) -> torch.Tensor:
    """Ordinary multi-head attention: q [T, H, e], k [S, H, e], v [S, H, v] -> [T, H, v]; `past` as in `_attend`."""
    tokens, heads = q.shape[:2]
    out = q.new_empty((tokens, heads, v.shape[-1]))
    for hs, ts in blocks(heads, tokens, len(k), k.shape[-1] + v.shape[-1], q.element_size()):
        scores = q[ts, hs].transpose(0, 1) @ k[:, hs].permute(1, 2, 0) * scale  # [h, t, S]
        weights = masked_softmax(scores, None if past is None else past + ts.start)
        out[ts, hs] = (weights @ v[:, hs].transpose(0, 1)).transpose(0, 1)
    return out
