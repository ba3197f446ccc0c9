"""MLA with absorbed weights: attention over the latent rows themselves, nothing per head cached or rebuilt."""

from __future__ import annotations

import torch

from validate.references.base import Reference, blocks, masked_softmax


class AbsorbedMLA(Reference):
    """Caches rows `[normed latent | rotated rope key]`, R numbers per token (arXiv 2405.04434, section 2.1.2).

    W_UK acts on the query, W_UV on the attended latent: q·(W_UK c) = (W_UKᵀ q)·c and Σ p (W_UV c) = W_UV (Σ p c).
    """

    def rows(self, b: int) -> torch.Tensor:
        """A copy of sequence b's cache rows, [len, R]."""
        return self._caches[b][0].kept().clone()

    def _entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.config.row_dim,),)

    def _entries(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.cat((self._latent(hidden), self._rotated_k_rope(hidden, positions)), dim=-1),)

    def _entries_of_rows(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (rows,)

    def _attend(self, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: tuple[torch.Tensor, ...],
                past: int | None) -> torch.Tensor:
        (rows,) = cached  # [S, R]
        w, d_c = self.weights, self.config.kv_lora_rank
        tokens, heads = q_nope.shape[:2]
        out = q_nope.new_empty((tokens, heads, self.config.v_head_dim))
        # The block bound counts a query's score row and its two latents, [.., R] before and [.., d_c] after.
        for hs, ts in blocks(heads, tokens, len(rows) + 2 * self.config.row_dim, 0, rows.element_size()):
            # b_uk is left out: it adds q_nope·b_uk to all of a query's scores alike, which the softmax cancels.
            q_latent = q_nope[ts, hs].transpose(0, 1) @ w.w_uk[hs]  # [h, t, d_c]
            query = torch.cat((q_latent, q_rope[ts, hs].transpose(0, 1)), dim=-1)  # [h, t, R]
            weights = masked_softmax(query @ rows.T * self.scale, None if past is None else past + ts.start)
            attended = weights @ rows[:, :d_c]  # [h, t, d_c]
            out[ts, hs] = (attended @ w.w_uv[hs].transpose(1, 2)).transpose(0, 1)
        # b_uv comes through whole, because the weights of a softmax sum to 1.
        return out if w.b_uv is None else out + w.b_uv
