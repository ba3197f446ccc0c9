"""Eager attention as one would run it: sequences of one length over one preallocated cache, all in one product.

The references attend one sequence after another, block by block, so that any ragged case fits in memory; that hides
what an eager step costs. These take weights, queries and cache entries from them and attend anew. The formula beside
each says which tensors must be alive together at the worst moment of a step.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch

from exporter.config import MLAConfig
from validate.references import AbsorbedMLA, ComposedMHA, ExpandingMLA, Reference

_FILL_ROWS = 512  # rows of every sequence that become cache entries at once

DrawRows = Callable[[int], torch.Tensor]


class EagerStep(Reference):
    """A decode step or a prefill chunk of T new tokens over S rows of past, the same for all sequences.

    `load` fills the cache, `step` may then be called any number of times: it writes its T entries into the last T
    places and moves nothing, so that every call does the same work.
    """

    _held: tuple[torch.Tensor, ...] = ()
    _positions: torch.Tensor

    def load(self, batch: int, rows: int, tokens: int, draw: DrawRows) -> None:
        """Allocate [B, S + T, …] and fill S rows; `draw(n)` gives n latent rows of every sequence, [B, n, R]."""
        self._held = tuple(self._allocate((batch, rows + tokens, *shape)) for shape in self._entry_shapes())
        for start in range(0, rows, _FILL_ROWS):
            drawn = draw(min(_FILL_ROWS, rows - start)).to(device=self.device, dtype=self.dtype)
            for b, sequence in enumerate(drawn):
                for held, entry in zip(self._held, self._entries_of_rows(sequence), strict=True):
                    held[b, start:start + len(entry)] = entry
        self._positions = torch.arange(rows, rows + tokens, device=self.device).expand(batch, tokens)

    def _allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @property
    def held_bytes(self) -> int:
        """Bytes of the preallocated cache."""
        return sum(held.nbytes for held in self._held)

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """Attention output [B, T, D] of `hidden` [B, T, D], on the device and in the dtype of the weights."""
        tokens = hidden.shape[1]
        q_nope, q_rope = self._queries(hidden, self._positions)
        for held, entry in zip(self._held, self._entries(hidden, self._positions), strict=True):
            held[:, held.shape[1] - tokens:] = entry
        heads = self._attend_all(q_nope * self.scale, q_rope * self.scale)  # [B, T, H, v]
        return self.weights.out(heads.flatten(2))

    @abstractmethod
    def _attend_all(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        """Scaled queries [B, T, H, nope] and [B, T, H, rope] over all that is held -> [B, T, H, v]."""


class AbsorbedStep(EagerStep, AbsorbedMLA):
    """Attention over the latent rows themselves."""

    def _attend_all(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        (rows,), w, d_c = self._held, self.weights, self.config.kv_lora_rank  # rows [B, S + T, R]
        B, T, H = q_nope.shape[:3]
        by_head = q_nope.permute(2, 0, 1, 3).flatten(1, 2) @ w.w_uk  # [H, B*T, d_c]
        latent = by_head.view(H, B, T, d_c).permute(1, 2, 0, 3)  # [B, T, H, d_c]
        query = torch.cat((latent, q_rope), dim=-1).flatten(1, 2)  # [B, T*H, R]
        scores = (query @ rows.transpose(1, 2)).view(B, T, H, -1)
        attended = _causal_softmax(scores, tokens_axis=1).flatten(1, 2) @ rows[..., :d_c]  # [B, T*H, d_c]
        by_head = attended.view(B, T, H, d_c).permute(2, 0, 1, 3).flatten(1, 2)  # [H, B*T, d_c]
        out = (by_head @ w.w_uv.transpose(1, 2)).view(H, B, T, -1).permute(1, 2, 0, 3)
        return out if w.b_uv is None else out + w.b_uv

    @staticmethod
    def peak_bytes(c: MLAConfig, batch: int, rows: int, tokens: int, width: int) -> int:
        """Scores and their softmax."""
        return _scores(c, batch, rows, tokens, width)


class ExpandingStep(EagerStep, ExpandingMLA):
    """K and V of every row rebuilt at every step, as transformers does."""

    def _attend_all(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        latent, k_rope = self._split_rows(self._held[0])
        k_nope, v = self._expand_latent(latent)  # [B, S + T, H, nope], [B, S + T, H, v]
        k_nope = k_nope.transpose(1, 2)
        k = torch.cat((k_nope, k_rope.unsqueeze(1).expand(*k_nope.shape[:-1], -1)), dim=-1)  # [B, H, S + T, e]
        del k_nope
        v = v.transpose(1, 2).contiguous()
        return _attend_heads(torch.cat((q_nope, q_rope), dim=-1), k, v)

    @staticmethod
    def peak_bytes(c: MLAConfig, batch: int, rows: int, tokens: int, width: int) -> int:
        """K without and with its rotary columns beside V, or V twice; or K, V, scores and their softmax."""
        e, v = c.qk_head_dim, c.v_head_dim
        row = batch * (rows + tokens) * c.num_attention_heads * width
        return max(row * (c.qk_nope_head_dim + v + e), row * (e + 2 * v),
                   row * (e + v) + _scores(c, batch, rows, tokens, width))


class MHAStep(EagerStep, ComposedMHA):
    """Multi-head attention of the same width over a full K/V cache, laid out head by head."""

    def _allocate(self, shape: tuple[int, ...]) -> torch.Tensor:
        B, S, H, n = shape
        return torch.zeros((B, H, S, n), dtype=self.dtype, device=self.device).transpose(1, 2)

    def _attend_all(self, q_nope: torch.Tensor, q_rope: torch.Tensor) -> torch.Tensor:
        k, v = self._held
        return _attend_heads(torch.cat((q_nope, q_rope), dim=-1), k.transpose(1, 2), v.transpose(1, 2))

    @staticmethod
    def peak_bytes(c: MLAConfig, batch: int, rows: int, tokens: int, width: int) -> int:
        """Scores and their softmax."""
        return _scores(c, batch, rows, tokens, width)


FORMS: dict[str, type[AbsorbedStep] | type[ExpandingStep] | type[MHAStep]] = {
    "absorbed": AbsorbedStep, "expanding": ExpandingStep, "mha": MHAStep}


def cache_bytes(c: MLAConfig, form: str, batch: int, rows: int, width: int) -> int:
    """What a form must cache: R numbers per token, or K and V of every head."""
    return batch * rows * width * (c.expanded_dim if form == "mha" else c.row_dim)


def weight_numbers(c: MLAConfig, form: str, mla: int) -> int:
    """Numbers of a form's weights; `mla` counts the MLA's own (engines.roofline). An MHA has W_K and W_V of its own
    in place of kv_a_proj and kv_b_proj."""
    if form != "mha":
        return mla
    H, D = c.num_attention_heads, c.hidden_size
    latent = D * c.row_dim + H * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim)
    return mla - latent + D * H * (c.qk_head_dim + c.v_head_dim)


def _scores(c: MLAConfig, batch: int, rows: int, tokens: int, width: int) -> int:
    return 2 * batch * tokens * c.num_attention_heads * (rows + tokens) * width


def _causal_softmax(scores: torch.Tensor, tokens_axis: int) -> torch.Tensor:
    """Softmax over the last axis, S + T keys, of which new token t sees S + t + 1; torch reduces it in float32."""
    T, keys = scores.shape[tokens_axis], scores.shape[-1]
    if T > 1:
        t = torch.arange(T, device=scores.device).unsqueeze(1)
        hidden = torch.arange(keys, device=scores.device) > keys - T + t  # [T, S + T]
        scores.masked_fill_(hidden.unsqueeze(1) if tokens_axis == 1 else hidden, float("-inf"))
    return torch.softmax(scores, dim=-1)


def _attend_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [B, T, H, e] over k [B, H, S + T, e] and v [B, H, S + T, v] -> [B, T, H, v]."""
    probs = _causal_softmax(q.transpose(1, 2) @ k.transpose(2, 3), tokens_axis=2)
    return (probs @ v).transpose(1, 2)
