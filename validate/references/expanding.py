"""MLA as transformers runs it: the latent is cached, and K and V of every row are rebuilt at every step."""

from __future__ import annotations

import torch

from validate.references.absorbed import AbsorbedMLA
from validate.references.base import per_head_attention


class ExpandingMLA(AbsorbedMLA):
    """Caches R numbers per token and pays H (nope + v) d_c multiply-adds per past row and step for it.

    The baseline of the benchmark: small cache, slow step.
    """

    def _attend(self, q_nope: torch.Tensor, q_rope: torch.Tensor, cached: tuple[torch.Tensor, ...],
                past: int | None) -> torch.Tensor:
        latent, k_rope = self._split_rows(cached[0])
        k_nope, v = self._expand_latent(latent)  # [S, H, nope], [S, H, v]
        k = torch.cat((k_nope, k_rope.unsqueeze(-2).expand(*k_nope.shape[:-1], -1)), dim=-1)
        return per_head_attention(torch.cat((q_nope, q_rope), dim=-1), k, v, self.scale, past)
