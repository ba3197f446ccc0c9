"""The MHA that an MLA is: the same function with composed K and V matrices and a full per-head cache."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from exporter.config import MLAConfig
from validate.references.base import Reference, per_head, per_head_attention
from validate.references.weights import Affine


class ComposedMHA(Reference):
    """Multi-head attention whose K and V come straight from the hidden state by one matrix each.

    W_K = W_UK·diag(gain)·W_DKV, [H·nope, D], and W_V likewise, [H·v, D]; the shared rope key is projected per head with
    repeated weights. Where the latent has an RMS norm, the layer is not linear: the norm's gain is composed in, and the
    one scalar per token, 1/rms of the latent, multiplies the composed product,
        k_nope = (W_K·x + W_UK·diag(gain)·b_DKV) / rms(W_DKV·x + b_DKV) + b_UK.
    Without a norm (the article's layer) it is a plain MHA. An MHA of unrelated weights has cosine 0 with any MLA; this
    one equals it to rounding. Its cache holds H·(nope + rope + v) numbers per token.
    """

    def __init__(self, config: MLAConfig, tensors: Mapping[str, torch.Tensor], *, max_context: int,
                 dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", causal: bool = True) -> None:
        super().__init__(config, tensors, max_context=max_context, dtype=dtype, device=device, causal=causal)
        w, H = self.weights, config.num_attention_heads
        self.w_k = self._compose(w.w_uk)  # [H*nope, D]
        self.w_v = self._compose(w.w_uv)  # [H*v, D]
        bias = None if w.k_rope.bias is None else w.k_rope.bias.repeat(H)
        self.w_k_rope = Affine(w.k_rope.weight.repeat(H, 1), bias)  # [H*rope, D]

    def _compose(self, up: torch.Tensor) -> Affine:
        """W_UK or W_UV [H, n, d_c] with the down projection behind it: [H*n, D], and W_U·diag(gain)·b_DKV [H*n].

        The up projection's own bias is not in it: it is added after the division by rms.
        """
        w = self.weights
        up = up.flatten(0, 1) if w.kv_gain is None else up.flatten(0, 1) * w.kv_gain  # [H*n, d_c]
        return Affine(up @ w.kv_down.weight, None if w.kv_down.bias is None else up @ w.kv_down.bias)

    def _entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        c = self.config
        return (c.num_attention_heads, c.qk_head_dim), (c.num_attention_heads, c.v_head_dim)

    def _entries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        w, H = self.weights, self.config.num_attention_heads
        k_nope, v = self.w_k(hidden), self.w_v(hidden)  # [B, T, H*nope], [B, T, H*v]
        if w.kv_gain is not None:
            inverse_rms = self._inverse_rms(w.kv_down(hidden)).to(self.dtype)  # [B, T, 1]
            k_nope, v = k_nope * inverse_rms, v * inverse_rms
        k_nope, v = per_head(k_nope, H), per_head(v, H)
        k_nope = k_nope if w.b_uk is None else k_nope + w.b_uk
        v = v if w.b_uv is None else v + w.b_uv
        k_rope = self.rope.rotate(per_head(self.w_k_rope(hidden), H), positions)  # [B, T, H, rope]
        return torch.cat((k_nope, k_rope), dim=-1), v

    def _entries_of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """A row is past the down projection, so only the up half of the composed matrices is left to apply."""
        latent, k_rope = self._split_rows(rows)
        k_nope, v = self._expand_latent(latent)
        per_head = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)  # [N, H, rope]
        return torch.cat((k_nope, per_head), dim=-1), v

    def _attend(self, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: tuple[torch.Tensor, ...],
                past: int | None) -> torch.Tensor:
        k, v = cached
        return per_head_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, self.scale, past)
