"""Rotary tables and the softmax scale, computed once in float64.

A graph looks its angles up in two small tables instead of one row per position: cos and sin of `BLOCK * i` (coarse)
and of `j < BLOCK` (fine) give those of `BLOCK * i + j` by the addition theorem. For 160k positions that is 0.4 MB
where the full table takes 42, more than the weights of a small attention, at an error of 2e-7, and no position costs
accuracy: the angles themselves are float64 (float32 angles are off by 2e-3 at position 32k).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from exporter.config import MLAConfig

BLOCK = 256


def mscale(factor: float | None, m: float) -> float:
    """YaRN's attention temperature, 0.1 m ln(factor) + 1 for factor > 1 (arXiv 2309.00071, as DeepSeek uses it)."""
    return 1.0 if factor is None or factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def softmax_scale(config: MLAConfig) -> float:
    """(nope + rope)^-1/2, times mscale^2 where the RoPE is scaled and states mscale_all_dim; or the source's own.

    Never (rank + rope)^-1/2: absorption changes the width of the product, not the attention.
    """
    if config.softmax_scale is not None:
        return config.softmax_scale
    scale: float = config.qk_head_dim**-0.5
    if config.rope.rope_type != "default" and config.rope.mscale_all_dim:
        scale *= mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
    return scale


def _yarn(config: MLAConfig) -> tuple[np.ndarray, float]:
    r, dim = config.rope, config.qk_rope_head_dim
    original = r.original_max_position_embeddings or config.max_position_embeddings

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(r.rope_theta))

    low, high = correction_dim(r.beta_fast), correction_dim(r.beta_slow)
    if r.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / ((high - low) or 0.001), 0, 1)
    extrapolated = r.rope_theta ** (-np.arange(0, dim, 2) / dim)
    inv_freq = extrapolated / (r.factor or 1.0) * ramp + extrapolated * (1 - ramp)
    if r.attention_factor is not None:
        return inv_freq, r.attention_factor
    if r.mscale and r.mscale_all_dim:
        return inv_freq, mscale(r.factor, r.mscale) / mscale(r.factor, r.mscale_all_dim)
    return inv_freq, mscale(r.factor, 1.0)


def longrope_set(config: MLAConfig, max_context: int) -> str | None:
    """Which of longrope's factor sets an export of `max_context` rows uses: short, long, or None without longrope."""
    if config.rope.rope_type != "longrope":
        return None
    original = config.rope.original_max_position_embeddings or config.max_position_embeddings
    return "long" if max_context > original else "short"


def _longrope(config: MLAConfig, max_context: int) -> tuple[np.ndarray, float]:
    r, dim = config.rope, config.qk_rope_head_dim
    original = r.original_max_position_embeddings or config.max_position_embeddings
    factors = np.asarray(r.long_factor if longrope_set(config, max_context) == "long" else r.short_factor, np.float64)
    inv_freq = r.rope_theta ** (-np.arange(0, dim, 2) / dim) / factors
    if r.attention_factor is not None:
        return inv_freq, r.attention_factor
    growth = r.factor or config.max_position_embeddings / original
    return inv_freq, 1.0 if growth <= 1 else math.sqrt(1 + math.log(growth) / math.log(original))


def frequencies(config: MLAConfig, max_context: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies [d_r / 2] in float64 and the factor on cos and sin.

    `max_context` decides longrope's factor set once, at export: a set that switched with the longest position seen
    would mix two rotations in one cache.
    """
    if config.rope.rope_type == "yarn":
        return _yarn(config)
    if config.rope.rope_type == "longrope":
        return _longrope(config, max_context)
    dim = config.qk_rope_head_dim
    if config.rope.rope_type == "none":
        return np.zeros(dim // 2), 1.0
    if config.rope.inv_freq is not None:
        return np.array(config.rope.inv_freq), config.rope.attention_factor or 1.0
    return config.rope.rope_theta ** (-np.arange(0, dim, 2) / dim), 1.0


@dataclass(frozen=True)
class RopeTables:
    """cos and sin, float32: coarse [ceil(positions / BLOCK), d_r / 2] (carrying the factor), fine [BLOCK, d_r / 2]."""

    cos_coarse: np.ndarray
    sin_coarse: np.ndarray
    cos_fine: np.ndarray
    sin_fine: np.ndarray


def tables(inv_freq: np.ndarray, factor: float, positions: int) -> RopeTables:
    """Two-level tables that cover positions 0 .. positions - 1 (rounded up to whole blocks)."""
    coarse = np.outer(np.arange(-(-positions // BLOCK)) * float(BLOCK), inv_freq)
    fine = np.outer(np.arange(BLOCK, dtype=np.float64), inv_freq)
    cast = np.float32
    return RopeTables((np.cos(coarse) * factor).astype(cast), (np.sin(coarse) * factor).astype(cast),
                      np.cos(fine).astype(cast), np.sin(fine).astype(cast))
