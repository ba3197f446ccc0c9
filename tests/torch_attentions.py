"""One absorbed attention as people write it in plain PyTorch, exported by torch.onnx: the doctor's foreign patients.

What differs between writers is a field: where the softmax scale is put, how scores are made, how RoPE is spelled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

D, H, RANK, NOPE, ROPE, V = 64, 4, 32, 16, 8, 16
SCALE = (NOPE + ROPE) ** -0.5
NAMES = ["hidden_states", "position_ids", "past_row"]


@dataclass(frozen=True)
class Style:
    """`scores`: sum (two products, the scale behind their sum), query (the scale in both queries), early (in the query
    before RoPE), joined (one product), capped (a tanh behind the scale). `rope`: halves, stacked (pairs, stacked and
    flattened), sorted (pairs turned as halves, in sorted order). `key_rope`: the key's, where it is another."""

    scores: str = "sum"
    rope: str = "halves"
    key_rope: str | None = None
    scale: float = SCALE
    stretch: tuple[float, ...] = (1.0,) * (ROPE // 2)  # a factor on each frequency
    bias: bool = False


class Attention(torch.nn.Module):
    """[B, T, D], positions [B, T] and past rows [B, S, R] to [B, T, D] and rows [B, S + T, R]."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        drawn, self.style = torch.Generator().manual_seed(1), style

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=drawn) * 2 / shape[-1] ** 0.5)

        self.q, self.kv_a, self.o = weight(H * (NOPE + ROPE), D), weight(RANK + ROPE, D), weight(D, H * V)
        self.uk, self.uv, self.gain = weight(H, NOPE, RANK), weight(H, V, RANK), weight(RANK)
        self.q_bias = weight(H * (NOPE + ROPE)) if style.bias else None

    def rotate(self, x: torch.Tensor, positions: torch.Tensor, spelled: str) -> torch.Tensor:
        """[..., T, d_r] by positions that broadcast over its first axes."""
        frequencies = 10000.0 ** (-torch.arange(0, ROPE, 2) / ROPE) * torch.tensor(self.style.stretch)
        angles = positions[..., None].float() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if spelled == "stacked":
            even, odd = x[..., ::2], x[..., 1::2]
            return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
        if spelled == "sorted":
            x = x.unflatten(-1, (ROPE // 2, 2)).transpose(-1, -2).flatten(-2)
        first, second = x.chunk(2, -1)
        return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor, past: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed: the latent is attended as it lies."""
        style, (batch, new, _) = self.style, hidden.shape
        q = hidden @ self.q.T if self.q_bias is None else hidden @ self.q.T + self.q_bias
        q = q * style.scale if style.scores == "early" else q
        nope, q_rope = q.view(batch, new, H, NOPE + ROPE).transpose(1, 2).split([NOPE, ROPE], -1)
        q_rope = self.rotate(q_rope, positions[:, None], style.rope)
        latent, k_rope = (hidden @ self.kv_a.T).split([RANK, ROPE], -1)
        latent = latent * torch.rsqrt(latent.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
        k_rope = self.rotate(k_rope, positions, style.key_rope or style.rope)
        rows = torch.cat([past, torch.cat([latent, k_rope], -1)], 1)
        scores = self.scores(torch.einsum("bhtn,hnr->bhtr", nope, self.uk), q_rope, rows[:, None])
        total = rows.shape[1]
        seen = torch.arange(total)[None, :] <= torch.arange(new)[:, None] + (total - new)
        mixed = scores.masked_fill(~seen, -1e9).softmax(-1) @ rows[:, None, :, :RANK]
        heads = torch.einsum("bhtr,hvr->bhtv", mixed, self.uv)
        return heads.transpose(1, 2).reshape(batch, new, H * V) @ self.o.T, rows

    def scores(self, nope: torch.Tensor, rope: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[B, H, T, S + T] of queries [B, H, T, d_c] and [B, H, T, d_r] and rows [B, 1, S + T, R]."""
        where, scale = self.style.scores, self.style.scale
        if where == "joined":
            return torch.cat([nope, rope], -1) @ rows.transpose(-1, -2) * scale
        latent, keys = rows.split([RANK, ROPE], -1)
        if where == "query":
            nope, rope = nope * scale, rope * scale
        found = nope @ latent.transpose(-1, -2) + rope @ keys.transpose(-1, -2)
        if where in ("query", "early"):
            return found
        return torch.tanh(found * scale) if where == "capped" else found * scale


def saved(path: Path, style: Style, dynamo: bool = False) -> Path:
    """That attention as a file of one of torch's two exporters."""
    dims = [{0: "batch", 1: "new"}] * 2 + [{0: "batch", 1: "past"}]
    how: dict[str, Any] = {"dynamic_axes": dict(zip(NAMES, dims, strict=True))}
    if dynamo:
        how = {"dynamic_shapes": [dict.fromkeys(d, torch.export.Dim.AUTO) for d in dims]}
    inputs = (torch.randn(2, 3, D), torch.arange(5, 8).repeat(2, 1), torch.randn(2, 5, RANK + ROPE))
    torch.onnx.export(Attention(style).eval(), inputs, str(path), input_names=NAMES, dynamo=dynamo, opset_version=18,
                      output_names=["attn_output", "present_row"], **how)
    return path


def config_file(folder: Path, style: Style, **changed: Any) -> Path:
    """The config.json that such an attention is right by, with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps({
        "model_type": "deepseek_v3", "rope_interleave": style.rope != "halves", "hidden_size": D,
        "num_attention_heads": H, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE,
        "v_head_dim": V, "q_lora_rank": None, "max_position_embeddings": 512, "rope_theta": 10000.0,
        "num_hidden_layers": 1} | changed))
    return path
