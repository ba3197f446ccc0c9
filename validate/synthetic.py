"""Hugging Face checkpoint folders of any size, seeded, written tensor by tensor: what scale checks and benchmarks load.

Values are one block of normal numbers, drawn once and laid end to end from a place of its own in every tensor; its
length is prime, so no two rows of a matrix are alike. A checkpoint costs little more than writing its bytes.
Weights have std 1/sqrt(fan_in), gains lie near 1, an embedding has std 1: activations and logits stay of order one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.output import new_folder

BLOCK = 1_048_583  # prime
GAIN, BIAS = 0.1, 0.02  # std of gains around 1, and of biases around 0
NAMES = ("bf16", "fp32")

_V3_CLASS: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 3328, "num_hidden_layers": 4, "first_k_dense_replace": 4,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16384, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "max_position_embeddings": 65536, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "rope_interleave": True, "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 512,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "bos_token_id": 0,
    "eos_token_id": 1, "num_nextn_predict_layers": 0, "initializer_range": 0.02, "use_cache": True}

# name -> (dtype to store, config.json); float32 of v3-class is 778 MB, bfloat16 of v3-class-7gb 7.0 GB
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "v3-class": ("fp32", _V3_CLASS),
    "v3-class-7gb": ("bf16", {
        **_V3_CLASS, "hidden_size": 4096, "intermediate_size": 13312, "num_hidden_layers": 16,
        "first_k_dense_replace": 16, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32768,
        "q_lora_rank": 1536}),
}


def named_config(name: str) -> tuple[str, dict[str, Any]]:
    """(dtype, config.json) of a named checkpoint; an unknown name is an InputError that lists the known ones."""
    if name not in CONFIGS:
        raise InputError(f"synthetic checkpoint {name!r}: expected one of {', '.join(CONFIGS)}")
    dtype, config = CONFIGS[name]
    return dtype, dict(config)


def tensor_shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a deepseek_v3 model in the order of its layers, named and shaped as transformers saves it."""
    if config.get("model_type") != "deepseek_v3":
        raise InputError(f"model_type {config.get('model_type')!r}: synthetic checkpoints are deepseek_v3")
    hidden, vocabulary, layers = (config[n] for n in ("hidden_size", "vocab_size", "num_hidden_layers"))
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, shape in _attention(config):
            yield f"{layer}self_attn.{name}", shape
        for name, shape in _feed_forward(config, dense=i < config.get("first_k_dense_replace", 0)):
            yield f"{layer}mlp.{name}", shape
        yield f"{layer}input_layernorm.weight", (hidden,)
        yield f"{layer}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (vocabulary, hidden)


def _attention(c: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, heads, latent, rope = (c[n] for n in ("hidden_size", "num_attention_heads", "kv_lora_rank",
                                                  "qk_rope_head_dim"))
    nope, v, low, bias = c["qk_nope_head_dim"], c["v_head_dim"], c.get("q_lora_rank"), c.get("attention_bias")
    if low is None:
        yield "q_proj.weight", (heads * (nope + rope), hidden)
    else:
        yield "q_a_proj.weight", (low, hidden)
        if bias:
            yield "q_a_proj.bias", (low,)
        yield "q_a_layernorm.weight", (low,)
        yield "q_b_proj.weight", (heads * (nope + rope), low)
    yield "kv_a_proj_with_mqa.weight", (latent + rope, hidden)
    if bias:
        yield "kv_a_proj_with_mqa.bias", (latent + rope,)
    yield "kv_a_layernorm.weight", (latent,)
    yield "kv_b_proj.weight", (heads * (nope + v), latent)
    yield "o_proj.weight", (hidden, heads * v)
    if bias:
        yield "o_proj.bias", (hidden,)


def _feed_forward(c: Mapping[str, Any], dense: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    def gated(prefix: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}{name}.weight", (width, c["hidden_size"])
        yield f"{prefix}down_proj.weight", (c["hidden_size"], width)

    if dense:
        yield from gated("", c["intermediate_size"])
        return
    yield "gate.weight", (c["n_routed_experts"], c["hidden_size"])
    yield "gate.e_score_correction_bias", (c["n_routed_experts"],)
    for e in range(c["n_routed_experts"]):
        yield from gated(f"experts.{e}.", c["moe_intermediate_size"])
    yield from gated("shared_experts.", c["moe_intermediate_size"] * c["n_shared_experts"])


class _Filler:
    """Seeded values of any tensor, as pieces of one block that is scaled and rounded once for each scale."""

    def __init__(self, seed: int, tied: bool) -> None:
        self._seed, self._tied = seed, tied
        self._normal = np.random.Generator(np.random.SFC64(seed)).standard_normal(BLOCK, dtype=np.float32)
        self._scaled = lru_cache(maxsize=16)(self._scale)

    def _scale(self, mean: float, std: float, dtype: str) -> np.ndarray:
        block = self._normal * np.float32(std) + np.float32(mean)
        return block.astype(DTYPES[dtype].numpy).view(np.uint8)

    def write(self, out: BinaryIO, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Write one tensor's bytes."""
        block = self._scaled(*_distribution(name, shape, self._tied), dtype)
        left = int(np.prod(shape)) * DTYPES[dtype].itemsize
        at = zlib.crc32(f"{self._seed}/{name}".encode()) % BLOCK * DTYPES[dtype].itemsize
        while left:
            piece = block[at : at + left]
            out.write(piece.data)
            left -= len(piece)
            at = 0


def _distribution(name: str, shape: tuple[int, ...], tied: bool) -> tuple[float, float]:
    """Mean and std of a tensor's values; a tied embedding is the head as well."""
    if name.endswith("bias"):
        return 0.0, BIAS
    if len(shape) == 1:
        return 1.0, GAIN
    return 0.0, 1.0 if name == "model.embed_tokens.weight" and not tied else float(shape[1] ** -0.5)


def _stored_dtype(name: str, dtype: str) -> str:
    return "fp32" if ".mlp.gate." in name else dtype  # transformers keeps the router in float32


def _shards(config: Mapping[str, Any], dtype: str, limit: int) -> list[list[tuple[str, tuple[int, ...], str, int]]]:
    """(name, shape, dtype, bytes) of every tensor, in files of at most `limit` bytes (or one tensor)."""
    shards: list[list[tuple[str, tuple[int, ...], str, int]]] = [[]]
    for name, shape in tensor_shapes(config):
        kind = _stored_dtype(name, dtype)
        size = int(np.prod(shape)) * DTYPES[kind].itemsize
        if shards[-1] and sum(t[3] for t in shards[-1]) + size > limit:
            shards.append([])
        shards[-1].append((name, shape, kind, size))
    return shards


def checkpoint_bytes(config: Mapping[str, Any], dtype: str) -> int:
    """Bytes of all tensors."""
    return sum(t[3] for shard in _shards(config, dtype, 1 << 62) for t in shard)


def write_checkpoint(folder: Path, config: Mapping[str, Any], dtype: str = "bf16", *, shard_bytes: int = 2_000_000_000,
                     seed: int = 0, overwrite: bool = False,
                     progress: Callable[..., None] = lambda message, share=None: None) -> Path:
    """Write `folder` (config.json, shards, index), which appears whole or not at all; memory stays at some blocks.

    The same config, dtype and seed give the same values, however they are sharded. InputError on a bad request or where
    `folder` is not empty (`overwrite` replaces a folder that holds a config.json).
    """
    if dtype not in NAMES:
        raise InputError(f"dtype {dtype!r}: synthetic checkpoints are stored as {' or '.join(NAMES)}")
    if shard_bytes < 1 or seed < 0:
        raise InputError(f"shard_bytes is {shard_bytes}, seed is {seed}; expected at least 1 and at least 0")
    try:
        shards = _shards(config, dtype, shard_bytes)
    except KeyError as missing:
        raise InputError(f"synthetic checkpoint: the config does not state {missing}") from None
    filler, where = _Filler(seed, bool(config.get("tie_word_embeddings"))), {}
    with new_folder(Path(folder), overwrite=overwrite, marker="config.json") as partial:
        for i, shard in enumerate(shards, 1):
            file = f"model-{i:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            progress(f"{file} ({i} of {len(shards)})")
            _write_shard(partial / file, shard, filler)
            where.update({t[0]: file for t in shard})
        if len(shards) > 1:
            total = sum(t[3] for shard in shards for t in shard)
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        stated = {**config, "dtype": {"bf16": "bfloat16", "fp32": "float32"}[dtype]}
        (partial / "config.json").write_text(json.dumps(stated, indent=1) + "\n")
    return Path(folder)


def _write_shard(path: Path, shard: list[tuple[str, tuple[int, ...], str, int]], filler: _Filler) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, ordered = 0, sorted(shard, key=lambda t: -DTYPES[t[2]].itemsize)  # wider dtypes first: all stay aligned
    for name, shape, kind, size in ordered:
        entries[name] = {"dtype": DTYPES[kind].safetensors, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        for name, shape, kind, _ in ordered:
            filler.write(out, name, shape, kind)
