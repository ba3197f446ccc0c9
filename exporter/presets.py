"""Presets: the published configurations of `exporter/configs`, and seeded *hot* weights in the source's tensor names.

Hot means std 2/sqrt(fan_in) and norm gains in [0.5, 1.5]: at a default initialisation most of the field's bugs (a wrong
softmax scale, a dropped gain, a swapped RoPE layout) stay below any tolerance; here they stand out.
A preset's weights are a function of its name, the tensor name and the seed, so exporter and references draw the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import numpy as np

from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig, attention_shapes
from exporter.errors import InputError
from exporter.families import config_from_hf, decoder_from_hf

_ARTICLE = MLAConfig(
    model_type="article", hidden_size=512, num_attention_heads=8, q_lora_rank=128, kv_lora_rank=128,
    qk_nope_head_dim=32, qk_rope_head_dim=26, v_head_dim=32, max_position_embeddings=512, rope_layout="half",
    latent_norm=False, query_rope_from_hidden=True, softmax_scale=(512 // 8 + 26) ** -0.5)


def _published() -> dict[str, dict[str, Any]]:
    """The published configurations that lie beside this file, by the name of their file."""
    folder = files("exporter") / "configs"
    return {file.name.removesuffix(".json"): json.loads(file.read_text(encoding="utf-8"))
            for file in sorted(folder.iterdir(), key=lambda f: f.name) if file.name.endswith(".json")}


_PUBLISHED = _published()
PRESETS: dict[str, MLAConfig] = {name: config_from_hf(raw, name) for name, raw in _PUBLISHED.items()} | {
    "article": _ARTICLE}


def preset_config(name: str) -> MLAConfig:
    """The configuration of preset `name`; an unknown name is an InputError that lists the known ones."""
    if name not in PRESETS:
        raise InputError(f"MODEL {name!r} is neither a preset nor an existing path; presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_decoder(name: str) -> DecoderConfig:
    """The whole decoder of a preset, from the published configuration in `exporter/configs`."""
    preset_config(name)
    if name not in _PUBLISHED:
        raise InputError(f"preset {name} is one attention; there is no published decoder around it")
    return decoder_from_hf(_PUBLISHED[name], name)


def source_shapes(config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Tensor names and shapes of one attention as its source stores them (`nn.Linear` weights are [out, in])."""
    c, H, D = config, config.num_attention_heads, config.hidden_size
    if c.model_type == "article":
        linears = {"down_proj_kv": (c.kv_lora_rank, D), "up_proj_k": (H * c.qk_nope_head_dim, c.kv_lora_rank),
                   "up_proj_v": (H * c.v_head_dim, c.kv_lora_rank), "down_proj_q": (c.q_lora_rank or 0, D),
                   "up_proj_q": (H * c.qk_nope_head_dim, c.q_lora_rank or 0), "proj_qr": (H * c.qk_rope_head_dim, D),
                   "proj_kr": (c.qk_rope_head_dim, D), "fc": (D, H * c.v_head_dim)}
        return {f"{name}.{part}": shape if part == "weight" else shape[:1]
                for name, shape in linears.items() for part in ("weight", "bias")}
    return dict(attention_shapes(c))


def hot_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One seeded tensor, float32: weights std 2/sqrt(fan_in), gains uniform in [0.5, 1.5], biases std 0.5."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    if name.endswith("bias"):
        return 0.5 * rng.standard_normal(shape, dtype=np.float32)
    if len(shape) == 1:
        return 0.5 + rng.random(shape, dtype=np.float32)
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(2 / np.sqrt(shape[-1]))


def hot_weights(config: MLAConfig, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """All tensors of one seeded attention, one at a time."""
    for name, shape in source_shapes(config).items():
        yield name, hot_tensor(name, shape, seed)
