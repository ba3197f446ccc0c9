"""MLA as a plain implementation runs it: K and V expanded per head, and the expanded ones cached."""

from __future__ import annotations

import torch

from validate.references.base import Reference, per_head_attention


class NaiveMLA(Reference):
    """Expands every latent once to per-head K and V (arXiv 2405.04434, section 2.1.2) and caches those.

    H·(nope + rope + v) numbers per token: what a memory measurement compares the latent cache with.
    """

    def _entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        c = self.config
        return (c.num_attention_heads, c.qk_head_dim), (c.num_attention_heads, c.v_head_dim)

    def _entries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._expand(self._latent(hidden), self._rotated_k_rope(hidden, positions))

    def _entries_of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._expand(*self._split_rows(rows))

    def _expand(self, latent: torch.Tensor, k_rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[..., d_c] and [..., d_r] -> K [..., H, nope + rope] and V [..., H, v]."""
        k_nope, v = self._expand_latent(latent)
        shared = k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)  # the same rope key for every head
        return torch.cat((k_nope, shared), dim=-1), v

    def _attend(self, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: tuple[torch.Tensor, ...],
                past: int | None) -> torch.Tensor:
        k, v = cached
        return per_head_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, self.scale, past)
