"""A checkpoint as a GGUF file of llama.cpp's architecture `deepseek2`: its keys, and where each tensor comes from.

A plan is JSON and reads no value: `llama_child.py`, in the peer's own environment, writes the file from it. llama.cpp
has two forms of the attention. Absorbed: one key head of d_c + d_r columns, W_UK transposed and W_UV, head by head.
Expanded: keys and values per head from `attn_kv_b`. Experts are not written: a sparse layer is refused, like all else
that the architecture cannot say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.safetensors_file import SourceTensor
from exporter.source import ModelSource, open_model
from validate.peers import AbsentError

FORMS = ("absorbed", "expanded")
DTYPES = ("f32", "f16", "q8_0", "q4_0")  # of the matrices; gains stay float32
_LITE = (26, 27)  # layers by which llama.cpp knows the Lite model, the one that has no query rank
_ATTENTION = {"q_a_proj.weight": "attn_q_a.weight", "q_a_layernorm.weight": "attn_q_a_norm.weight",
              "q_b_proj.weight": "attn_q_b.weight", "q_proj.weight": "attn_q.weight",
              "kv_a_proj_with_mqa.weight": "attn_kv_a_mqa.weight", "kv_a_layernorm.weight": "attn_kv_a_norm.weight",
              "o_proj.weight": "attn_output.weight"}
_LAYER = {"input_layernorm.weight": "attn_norm.weight", "post_attention_layernorm.weight": "ffn_norm.weight",
          **{f"mlp.{kind}_proj.weight": f"ffn_{kind}.weight" for kind in ("gate", "up", "down")}}
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
          "lm_head.weight": "output.weight"}


def plan(checkpoint: Path, form: str, dtype: str) -> dict[str, Any]:
    """Keys (name -> value, the architecture's without its prefix) and tensors of the file; AbsentError if llama.cpp's
    deepseek2 cannot hold this model."""
    if form not in FORMS or dtype not in DTYPES:
        raise InputError(f"GGUF form {form!r}, dtype {dtype!r}: expected one of {', '.join(FORMS)}, and of "
                         f"{', '.join(DTYPES)}")
    source = open_model(str(checkpoint))
    if refused := _refused(source.decoder):
        raise AbsentError(f"llama.cpp's deepseek2 {refused}")
    return {"architecture": "deepseek2", "keys": _keys(source.decoder, checkpoint.name, form),
            "tensors": list(_tensors(source, form, dtype))}


def _refused(d: DecoderConfig) -> str:
    """What the architecture cannot say of this model."""
    a, rope = d.attention, d.attention.rope
    if d.sparse_layers:
        return f"is written here for dense layers; layer {d.sparse_layers[0]} has experts"
    scales = (d.embedding_scale, d.residual_scale, d.logits_scale, a.query_scale, a.latent_scale)
    if set(scales) != {1.0} or a.softmax_scale is not None or d.shortcut or d.vocabulary_part or \
            a.query_rope_from_hidden or not a.latent_norm or a.latent_norm_eps != a.rms_norm_eps:
        return f"does not compute what {a.model_type} does"
    if (a.num_hidden_layers in _LITE) != (a.q_lora_rank is None):
        return (f"has no query rank in models of {_LITE[0]} or {_LITE[1]} layers, and one in all others; this one has "
                f"{a.num_hidden_layers} layers and the query rank {a.q_lora_rank}")
    if rope.rope_type not in ("default", "yarn") or rope.llama_4_scaling_beta:
        return f"has RoPE of type default and yarn; this one's is {rope.rope_type}" + (
            " with a query scale" if rope.llama_4_scaling_beta else "")
    if rope.rope_type == "yarn" and (not rope.mscale_all_dim or rope.mscale != rope.mscale_all_dim or
                                     rope.attention_factor is not None or not rope.truncate):
        return ("takes YaRN with mscale equal to mscale_all_dim alone; this one has mscale "
                f"{rope.mscale}, mscale_all_dim {rope.mscale_all_dim}, attention_factor {rope.attention_factor}")
    return ""


def _keys(d: DecoderConfig, name: str, form: str) -> dict[str, Any]:
    a, width = d.attention, d.attention.qk_head_dim
    heads = ({"head_count_kv": 1, "key_length": a.row_dim, "value_length": a.kv_lora_rank, "key_length_mla": width,
              "value_length_mla": a.v_head_dim} if form == "absorbed" else
             {"head_count_kv": a.num_attention_heads, "key_length": width, "value_length": a.v_head_dim})
    attention = {"head_count": a.num_attention_heads, **heads, "kv_lora_rank": a.kv_lora_rank,
                 **({"q_lora_rank": a.q_lora_rank} if a.q_lora_rank else {}), "layer_norm_rms_epsilon": a.rms_norm_eps}
    experts = {"expert_count": 1, "expert_used_count": 1, "expert_shared_count": 0,  # must be there, without any too
               "expert_feed_forward_length": d.intermediate_size, "expert_weights_scale": 1.0,
               "expert_weights_norm": False, "expert_gating_func": 2}
    return {"general.name": name, "tokenizer.ggml.model": "none", "block_count": a.num_hidden_layers,
            "leading_dense_block_count": a.num_hidden_layers, "context_length": a.max_position_embeddings,
            "embedding_length": a.hidden_size, "feed_forward_length": d.intermediate_size, "vocab_size": d.vocab_size,
            **{f"attention.{k}": v for k, v in attention.items()}, **experts, **_rope_keys(a)}


def _rope_keys(a: MLAConfig) -> dict[str, Any]:
    rope = a.rope
    keys: dict[str, Any] = {"dimension_count": a.qk_rope_head_dim, "freq_base": float(rope.rope_theta)}
    if rope.rope_type == "yarn":
        assert rope.mscale_all_dim
        assert rope.factor
        keys |= {"scaling.type": "yarn", "scaling.factor": float(rope.factor),
                 "scaling.original_context_length": rope.original_max_position_embeddings or a.max_position_embeddings,
                 "scaling.yarn_beta_fast": float(rope.beta_fast), "scaling.yarn_beta_slow": float(rope.beta_slow),
                 "scaling.yarn_log_multiplier": 0.1 * rope.mscale_all_dim}  # a tenth, which llama.cpp takes out again
    return {f"rope.{name}": value for name, value in keys.items()}


def _tensors(source: ModelSource, form: str, dtype: str) -> Iterator[dict[str, Any]]:
    """Each tensor: its name and type in the GGUF, where its values lie, and what is taken of them."""
    a = source.decoder.attention
    layers = range(a.num_hidden_layers)
    names = _WHOLE | {f"model.layers.{i}.{theirs}": f"blk.{i}.{name}" for i in layers
                      for theirs, name in _LAYER.items()}
    for theirs, tensor in source.others.items():
        if theirs not in names:
            raise AbsentError(f"llama.cpp's deepseek2 has no place for tensor {theirs}")
        yield _tensor(names[theirs], theirs, tensor, tensor.shape, dtype, {"part": "whole"})
    halves = a.rope_layout == "half"
    for i, tensors in enumerate(source.attentions.values()):
        for theirs, tensor in tensors.items():
            if theirs == "kv_b_proj.weight":
                yield from _kv_b(a, f"blk.{i}.", tensor, form, dtype)
                continue
            if theirs not in _ATTENTION:
                raise AbsentError(f"llama.cpp's deepseek2 has no place for tensor model.layers.{i}.self_attn.{theirs}")
            heads = {"q_b_proj.weight": a.num_attention_heads, "q_proj.weight": a.num_attention_heads,
                     "kv_a_proj_with_mqa.weight": 1}.get(theirs, 0)
            take = {"part": "paired", "heads": heads, "rope": a.qk_rope_head_dim} if halves and heads else {
                "part": "whole"}
            yield _tensor(f"blk.{i}.{_ATTENTION[theirs]}", theirs, tensor, tensor.shape, dtype, take)


def _kv_b(a: MLAConfig, block: str, tensor: SourceTensor, form: str, dtype: str) -> Iterator[dict[str, Any]]:
    heads, nope, v, latent = a.num_attention_heads, a.qk_nope_head_dim, a.v_head_dim, a.kv_lora_rank
    if form == "expanded":
        yield _tensor(f"{block}attn_kv_b.weight", "kv_b_proj", tensor, tensor.shape, dtype, {"part": "whole"})
        return
    for name, part, shape in (("attn_k_b", "keys", (heads, latent, nope)), ("attn_v_b", "values", (heads, v, latent))):
        yield _tensor(f"{block}{name}.weight", "kv_b_proj", tensor, shape, dtype,
                      {"part": part, "heads": heads, "nope": nope})


def _tensor(name: str, theirs: str, tensor: SourceTensor, shape: tuple[int, ...], dtype: str,
            take: Mapping[str, Any]) -> dict[str, Any]:
    stored = tensor.stored
    if stored is None:
        raise AbsentError(f"a GGUF is written from float weights; {theirs} is quantised")
    if stored.dtype not in ("F32", "F16", "BF16"):
        raise AbsentError(f"a GGUF is written from F32, F16 or BF16; {theirs} is {stored.dtype}")
    return {"name": name, "dtype": _dtype(name, shape, dtype), "shape": list(shape), **take,
            "file": str(stored.file.absolute()), "stored": stored.dtype, "offset": stored.offset,
            "stored_shape": list(stored.shape)}


def _dtype(name: str, shape: tuple[int, ...], dtype: str) -> str:
    if len(shape) == 1:
        return "f32"
    if dtype.startswith("q") and shape[-1] % 32:  # rows are quantised in blocks of 32
        return "f16"
    if dtype == "q4_0" and name in ("token_embd.weight", "output.weight"):  # llama.cpp's own quantiser: q6_K
        return "q8_0"
    return dtype


def matrix_bytes(plan: Mapping[str, Any]) -> int:
    """Bytes of all tensors of the file."""
    per_block = {"f32": 128, "f16": 64, "q8_0": 34, "q4_0": 18}  # 32 values
    return sum(int(np.prod(t["shape"])) * per_block[t["dtype"]] // 32 for t in plan["tensors"])
