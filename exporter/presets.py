"""Presets: published attention shapes, and seeded *hot* weights for them in the source's own tensor names.

Hot means std 2/sqrt(fan_in) and norm gains in [0.5, 1.5]: at a default initialisation most of the field's bugs (a wrong
softmax scale, a dropped gain, a swapped RoPE layout) stay below any tolerance; here they stand out.
A preset's weights are a function of its name, the tensor name and the seed, so exporter and references draw the same.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from importlib.resources import files

import numpy as np

from exporter.config import MLAConfig, RopeParameters
from exporter.decoder_config import DecoderConfig, attention_shapes
from exporter.errors import InputError
from exporter.families import decoder_from_hf

_MINICPM3_FACTORS = (
    1.0591234137867171, 1.1241891283591912, 1.2596935748670968, 1.5380380402321725, 2.093982484148734,
    3.1446935121267696, 4.937952647693647, 7.524541999994549, 10.475458000005451, 13.062047352306353,
    14.85530648787323, 15.906017515851266, 16.461961959767827, 16.740306425132903, 16.87581087164081,
    16.940876586213285,
)


def _yarn(factor: float, mscale: float, **kw: float) -> RopeParameters:
    return RopeParameters(rope_type="yarn", factor=factor, original_max_position_embeddings=4096, mscale=mscale,
                          mscale_all_dim=mscale, **kw)  # type: ignore[arg-type]


_DEEPSEEK = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
             "max_position_embeddings": 163840}

PRESETS: dict[str, MLAConfig] = {
    "deepseek-v2-lite": MLAConfig(
        model_type="deepseek_v2", hidden_size=2048, num_attention_heads=16, num_hidden_layers=27,
        rope=_yarn(40, 0.707), **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek-v2": MLAConfig(
        model_type="deepseek_v2", hidden_size=5120, num_attention_heads=128, num_hidden_layers=60, q_lora_rank=1536,
        rope=_yarn(40, 1.0), **_DEEPSEEK),  # type: ignore[arg-type]
    "deepseek-v3": MLAConfig(
        model_type="deepseek_v3", hidden_size=7168, num_attention_heads=128, num_hidden_layers=61, q_lora_rank=1536,
        rope=_yarn(40, 1.0), **_DEEPSEEK),  # type: ignore[arg-type]
    "kimi-k2": MLAConfig(
        model_type="kimi_k2", hidden_size=7168, num_attention_heads=64, num_hidden_layers=61, q_lora_rank=1536,
        rms_norm_eps=1e-5, rope=_yarn(64, 1.0, rope_theta=50000.0, beta_fast=1.0),
        **{**_DEEPSEEK, "max_position_embeddings": 262144}),  # type: ignore[arg-type]
    "glm-4.7-flash": MLAConfig(
        model_type="glm4_moe_lite", hidden_size=2048, num_attention_heads=20, num_hidden_layers=47, q_lora_rank=768,
        kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256, rms_norm_eps=1e-5,
        max_position_embeddings=202752, rope=RopeParameters(rope_theta=1e6)),
    "minicpm3-4b": MLAConfig(
        model_type="minicpm3", hidden_size=2560, num_attention_heads=40, num_hidden_layers=62, q_lora_rank=768,
        kv_lora_rank=256, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, rms_norm_eps=1e-5,
        max_position_embeddings=32768, rope_layout="half",
        rope=RopeParameters(rope_type="longrope", original_max_position_embeddings=32768,
                            short_factor=_MINICPM3_FACTORS, long_factor=_MINICPM3_FACTORS)),
    "article": MLAConfig(
        model_type="article", hidden_size=512, num_attention_heads=8, q_lora_rank=128, kv_lora_rank=128,
        qk_nope_head_dim=32, qk_rope_head_dim=26, v_head_dim=32, max_position_embeddings=512, rope_layout="half",
        latent_norm=False, query_rope_from_hidden=True, softmax_scale=(512 // 8 + 26) ** -0.5),
}


def preset_config(name: str) -> MLAConfig:
    """The configuration of preset `name`; an unknown name is an InputError that lists the known ones."""
    if name not in PRESETS:
        raise InputError(f"MODEL {name!r} is neither a preset nor an existing path; presets: {', '.join(PRESETS)}")
    return PRESETS[name]


def preset_decoder(name: str) -> DecoderConfig:
    """The whole decoder of a preset, from the published configuration in `exporter/configs`."""
    preset_config(name)
    file = files("exporter") / "configs" / f"{name}.json"
    if not file.is_file():
        raise InputError(f"preset {name} is one attention; there is no published decoder around it")
    return decoder_from_hf(json.loads(file.read_text()), name)


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
