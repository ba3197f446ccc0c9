"""RoPE and the softmax scale of the references, in float64 and apart from the exporter's own.

float32 angles are off by 7e-5 at position 1000 and 9e-3 at 160k (contract.md, rule 5); here only the finished cos and
sin are rounded to the reference's dtype.
"""

from __future__ import annotations

import math

import torch

from exporter.config import MLAConfig, RopeParameters


def yarn_mscale(factor: float | None, mscale: float = 1.0) -> float:
    """YaRN's correction 0.1·m·ln f + 1, and 1 where nothing is stretched (arXiv 2309.00071, section 3.4)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor is not None and factor > 1 else 1.0


def softmax_scale(config: MLAConfig) -> float:
    """The factor on the scores: (nope + rope)^-0.5, times mscale² where the checkpoint states `mscale_all_dim`.

    Never (rank + rope)^-0.5: absorption changes how wide the dot product is, not what it equals.
    """
    if config.softmax_scale is not None:
        return config.softmax_scale
    scale = 1 / math.sqrt(config.qk_nope_head_dim + config.qk_rope_head_dim)
    if config.rope.rope_type != "default" and config.rope.mscale_all_dim:
        scale *= yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def inverse_frequencies(config: MLAConfig, max_context: int) -> tuple[torch.Tensor, float]:
    """Angle per position of each column pair, float64 [d_r/2] (radians), and the factor on cos and sin.

    As transformers' `ROPE_INIT_FUNCTIONS`, in float64. `max_context` picks LongRoPE's factor set: one set must serve a
    whole cache, since the rows in it are already rotated.
    """
    rope, dim = config.rope, config.qk_rope_head_dim
    plain = rope.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)  # [d_r/2]
    if rope.rope_type == "yarn":
        return _yarn(rope, plain, rope.original_max_position_embeddings or config.max_position_embeddings)
    if rope.rope_type == "longrope":
        return _longrope(rope, plain, config.max_position_embeddings, max_context)
    if rope.rope_type == "none":  # NoPE: the columns are kept and nothing turns
        return torch.zeros_like(plain), 1.0
    if rope.rope_type == "explicit":
        assert rope.inv_freq is not None
        return torch.tensor(rope.inv_freq, dtype=torch.float64), 1.0 if rope.attention_factor is None else \
            rope.attention_factor
    return plain, 1.0


def _yarn(rope: RopeParameters, plain: torch.Tensor, original: int) -> tuple[torch.Tensor, float]:
    """Columns that turn often within `original` positions stay, slow ones are stretched by `factor`, a ramp between."""
    dim = 2 * len(plain)

    def column(turns: float) -> float:
        """The (fractional) column pair that makes `turns` full turns within `original` positions."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    # The upper bound is dim - 1 although there are dim/2 pairs: so in the original code, and so were models trained.
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a division by zero
    stretched = ((torch.arange(dim // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)  # [d_r/2], 1 = stretch
    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = yarn_mscale(rope.factor, rope.mscale) / yarn_mscale(rope.factor, rope.mscale_all_dim)
        else:
            factor = yarn_mscale(rope.factor)
    return plain * (1 - stretched) + plain / (rope.factor or 1.0) * stretched, factor


def _longrope(rope: RopeParameters, plain: torch.Tensor, maximum: int, max_context: int) -> tuple[torch.Tensor, float]:
    original = rope.original_max_position_embeddings or maximum
    factors = rope.long_factor if max_context > original else rope.short_factor
    attention_factor = rope.attention_factor
    if attention_factor is None:
        ratio = maximum / original if rope.factor is None else rope.factor  # a stated factor wins, as there
        attention_factor = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    return plain / torch.tensor(factors, dtype=torch.float64), attention_factor


class Rope:
    """Rotation of the d_r rotary columns of one configuration by absolute position."""

    def __init__(self, config: MLAConfig, max_context: int, device: torch.device | str = "cpu") -> None:
        inv_freq, self.attention_factor = inverse_frequencies(config, max_context)
        self.inv_freq = inv_freq.to(device)  # [d_r/2], float64
        self.layout = config.rope_layout

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """`x` [B, T, …, d_r] rotated by `positions` [B, T]; shape, dtype and order of the columns stay.

        Keeping the order matters for `pairs`: a cache row is the row an exported graph stores.
        """
        angles = positions.to(torch.float64).unsqueeze(-1) * self.inv_freq  # [B, T, d_r/2]
        while angles.dim() < x.dim():
            angles = angles.unsqueeze(2)  # one per axis between tokens and columns (heads)
        cos = (angles.cos() * self.attention_factor).to(x.dtype)
        sin = (angles.sin() * self.attention_factor).to(x.dtype)
        if self.layout == "pairs":
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
