"""Tiny checkpoints as transformers itself writes them, and the article's state_dict, all with hot weights.

Hot means std 2/sqrt(fan_in), gains in [0.5, 1.5] and biases of std 0.5: a default initialisation hides most faults.
Every size differs from every other one it could be mistaken for (nope 20, rope 10, v 12, ranks 24 and 16).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

HIDDEN, LAYERS, HEADS, KV_RANK, NOPE, ROPE, V = 64, 2, 4, 16, 20, 10, 12
ORIGINAL_POSITIONS, FACTOR = 64, 40.0
POSITIONS = int(ORIGINAL_POSITIONS * FACTOR)


def hot_(name: str, tensor: torch.Tensor, generator: torch.Generator) -> None:
    """Fill one parameter in place."""
    with torch.no_grad():
        if name.endswith("bias"):
            tensor.normal_(0, 0.5, generator=generator)
        elif tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
        else:
            tensor.normal_(0, 2 / tensor.shape[-1] ** 0.5, generator=generator)


def _rope(model_type: str, long: bool) -> dict[str, Any]:
    if not long:
        return {"rope_type": "default", "rope_theta": 10000.0}
    if model_type == "minicpm3":
        return {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_POSITIONS,
                "short_factor": [1.0, 1.3, 2.1, 3.7, 4.5], "long_factor": [1.1, 2.0, 5.0, 9.0, 16.0]}
    mscale = 0.707 if model_type == "deepseek_v2" else 1.0
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "mscale": mscale, "mscale_all_dim": mscale,
            "original_max_position_embeddings": ORIGINAL_POSITIONS, "beta_fast": 32.0, "beta_slow": 1.0}


def tiny_model(model_type: str = "deepseek_v3", *, q_lora_rank: int | None = 24, rope_interleave: bool = True,
               yarn: bool = True, attention_bias: bool = False, seed: int = 0) -> Any:
    """A tiny causal language model of transformers' own classes, every layer dense, float32, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    extra: dict[str, Any] = {}
    if model_type != "minicpm3":
        extra = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
                 "moe_intermediate_size": 32}
    if model_type == "glm4_moe_lite":
        extra["mlp_layer_types"] = ["dense"] * LAYERS
    elif model_type != "minicpm3":
        extra["first_k_dense_replace"] = LAYERS
    if model_type in ("deepseek_v3", "glm4_moe_lite"):
        extra["rope_interleave"] = rope_interleave
    config = AutoConfig.for_model(
        model_type, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=128, q_lora_rank=q_lora_rank, kv_lora_rank=KV_RANK, qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE, v_head_dim=V, max_position_embeddings=POSITIONS, attention_bias=attention_bias,
        rope_parameters=_rope(model_type, yarn), attn_implementation="eager", **extra)
    model = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        hot_(name, parameter, generator)
    return model


def tiny_checkpoint(folder: Path, model_type: str = "deepseek_v3", *, q_lora_rank: int | None = 24,
                    rope_interleave: bool = True, yarn: bool = True, attention_bias: bool = False,
                    sharded: bool = False, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """Save `tiny_model` in `folder`, stored as `dtype`; `sharded` splits it over several files with an index.

    `yarn` means the family's long-context RoPE: longrope with differing factor sets for minicpm3, else YaRN by 40.
    """
    model = tiny_model(model_type, q_lora_rank=q_lora_rank, rope_interleave=rope_interleave, yarn=yarn,
                       attention_bias=attention_bias, seed=seed).to(dtype)
    model.save_pretrained(folder, max_shard_size="8KB" if sharded else "1GB")
    return folder


def article_state_dict(seed: int = 0, *, d_model: int = 512, down_dim: int = 128, up_dim: int = 256, num_heads: int = 8,
                       rope_head_dim: int = 26, max_len: int = 512) -> dict[str, torch.Tensor]:
    """A state_dict of the article's `MLALayer`, buffers of both rotary modules included."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, columns, rows in (
            ("down_proj_kv", d_model, down_dim), ("up_proj_k", down_dim, up_dim), ("up_proj_v", down_dim, up_dim),
            ("down_proj_q", d_model, down_dim), ("up_proj_q", down_dim, up_dim),
            ("proj_qr", d_model, rope_head_dim * num_heads), ("proj_kr", d_model, rope_head_dim),
            ("fc", up_dim, d_model)):
        for part, shape in (("weight", (rows, columns)), ("bias", (rows,))):
            state[f"{name}.{part}"] = torch.empty(shape)
            hot_(part, state[f"{name}.{part}"], generator)
    inv_freq = 1.0 / 10000 ** (torch.arange(0, rope_head_dim, 2).float() / rope_head_dim)
    angles = torch.outer(torch.arange(max_len).float(), inv_freq)
    angles = torch.cat([angles, angles], dim=-1)  # [max_len, rope_head_dim], rotate-half
    for module in ("rope_q", "rope_k"):
        state[f"{module}.inv_freq"] = inv_freq.clone()
        state[f"{module}.cos_cached"], state[f"{module}.sin_cached"] = angles.cos(), angles.sin()
    return state
