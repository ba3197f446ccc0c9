"""Tiny whole language models of every family, as transformers itself builds and saves them, with hot weights.

Hot means std 1.6/sqrt(fan_in), gains in [0.5, 1.5], biases of std 0.5 and a router bias large enough to change choices.
Sizes differ from one another, YaRN stretches 64 positions by 40 and Llama 4's query scaling starts at 64, so a test of
a few hundred tokens is well past every original context. Logits have a standard deviation between 1 and 3.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, HEADS, KV_RANK, Q_RANK, NOPE, ROPE, V = 64, 4, 16, 24, 20, 10, 12
FFN, EXPERT_FFN, VOCAB = 96, 40, 160
EXPERTS, TOP_K, GROUPS, TOP_GROUPS, ZERO_EXPERTS = 12, 3, 3, 2, 5
ORIGINAL_POSITIONS, FACTOR = 64, 40.0
POSITIONS = int(ORIGINAL_POSITIONS * FACTOR)
CHOICE_BIAS = "e_score_correction_bias"

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": ORIGINAL_POSITIONS, "beta_fast": 32.0, "beta_slow": 1.0}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": ORIGINAL_POSITIONS,
            "short_factor": [1.0, 1.3, 2.1, 3.7, 4.5], "long_factor": [2.0, 1.5, 5.0, 9.0, 16.0]}
V2_YARN = YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}
LLAMA4_YARN = YARN | {"llama_4_scaling_beta": 0.3, "partial_rotary_factor": ROPE / (NOPE + ROPE)}

GROUPED = {"n_group": GROUPS, "topk_group": TOP_GROUPS}
UNGROUPED = {"n_group": 1, "topk_group": 1}
ROUTER = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": EXPERT_FFN,
          "n_shared_experts": 1}
V3_ROUTER = ROUTER | GROUPED | {"routed_scaling_factor": 1.7, "norm_topk_prob": True}
V2_ROUTER = ROUTER | {"n_shared_experts": 2, "routed_scaling_factor": 2.3, "topk_method": "greedy"}


@dataclass(frozen=True)
class Tiny:
    """How one named model is built: transformers' model_type, its config fields, and how its release differs.

    `mlp` says which field lays out dense and MoE layers: `first` (first_k_dense_replace), `types` (mlp_layer_types),
    `dense` (no MoE in the family) or `always` (no dense layer in it). `tied` shares embedding and head.
    `hot` is std x sqrt(fan_in), less where queries are scaled up besides: scores grow with its square, and float32
    noise with them (at 2, two orders of summation differ by 2e-4 of the logits' std after three layers).
    `legacy` writes config.json as releases older than transformers 5 do; `wrapped` puts it into text_config.
    """

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=lambda: YARN)
    mlp: str = "first"
    dense_first: int = 1
    layers: int = 3
    tied: bool = False
    hot: float = 1.6
    embedding_std: float = 1.0
    choice_std: float = 0.2
    released_type: str | None = None
    legacy: bool = False
    wrapped: bool = False


MODELS: dict[str, Tiny] = {
    "v2": Tiny("deepseek_v2", V2_ROUTER | {"q_lora_rank": Q_RANK}, V2_YARN),
    "v2-lite": Tiny("deepseek_v2", V2_ROUTER | {"q_lora_rank": None}, V2_YARN),
    "v2-grouped": Tiny("deepseek_v2", V2_ROUTER | GROUPED | {"topk_method": "group_limited_greedy"}, V2_YARN),
    "v3": Tiny("deepseek_v3", V3_ROUTER),
    "v3-no-q-rank": Tiny("deepseek_v3", V3_ROUTER | {"q_lora_rank": None}),
    "v3-half": Tiny("deepseek_v3", V3_ROUTER | {"rope_interleave": False}),
    "v3-bias": Tiny("deepseek_v3", V3_ROUTER | {"attention_bias": True}),
    "v3-dense": Tiny("deepseek_v3", V3_ROUTER, dense_first=3),
    "kimi-k2": Tiny("deepseek_v3", V3_ROUTER | UNGROUPED | {"rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827},
                    YARN | {"beta_fast": 1.0}, released_type="kimi_k2", legacy=True),
    "kimi-k25": Tiny("deepseek_v3", V3_ROUTER | UNGROUPED | {"rms_norm_eps": 1e-5}, released_type="kimi_k2",
                     legacy=True, wrapped=True),
    "sarvam": Tiny("sarvam_mla", V3_ROUTER | {"q_lora_rank": None}, legacy=True),
    "transmla": Tiny("deepseek_v3", {"rms_norm_eps": 1e-5}, PLAIN, dense_first=3, legacy=True),
    "glm4": Tiny("glm4_moe_lite", V3_ROUTER | {"rms_norm_eps": 1e-5}, PLAIN, mlp="types"),
    "minicpm3": Tiny("minicpm3", {"scale_emb": 5.0, "scale_depth": 1.7, "dim_model_base": 40, "rms_norm_eps": 1e-5},
                     LONGROPE, mlp="dense", tied=True, embedding_std=0.3),
    "youtu": Tiny("youtu", {}, PLAIN, mlp="dense", tied=True, embedding_std=0.25),
    "longcat": Tiny("longcat_flash", {"n_routed_experts": EXPERTS, "zero_expert_num": ZERO_EXPERTS, "moe_topk": TOP_K,
                                      "expert_ffn_hidden_size": EXPERT_FFN, "routed_scaling_factor": 3.1,
                                      "rms_norm_eps": 1e-5, "head_dim": ROPE}, PLAIN, mlp="always", layers=2, hot=1.3,
                    choice_std=0.1),
    "mistral4": Tiny("mistral4", V3_ROUTER | {"routed_scaling_factor": 1.3}, LLAMA4_YARN, dense_first=0, hot=1.3),
    "axk1": Tiny("axk1", V3_ROUTER, mlp="types"),
}
DENSE_ONLY = tuple(n for n, t in MODELS.items() if t.mlp == "dense" or t.dense_first >= t.layers)
MOE = tuple(n for n in MODELS if n not in DENSE_ONLY)
ALWAYS_MOE = tuple(n for n, t in MODELS.items() if t.mlp == "always")
LONG_CONTEXT = tuple(n for n, t in MODELS.items() if t.rope["rope_type"] != "default")


def attentions(name: str, layers: int | None = None) -> int:
    """Attentions, hence latent caches, of a named model."""
    tiny = MODELS[name]
    return (layers or tiny.layers) * (2 if tiny.model_type == "longcat_flash" else 1)


def tiny_config(name: str, *, moe: bool | None = None, layers: int | None = None, **fields: Any) -> Any:
    """transformers' configuration of a named model; `fields` override single ones."""
    from transformers import AutoConfig

    tiny = MODELS[name]
    moe = name in MOE if moe is None else moe
    if (moe and name in DENSE_ONLY) or (not moe and name in ALWAYS_MOE):
        raise ValueError(f"{name} is {'dense' if moe else 'MoE'} throughout")
    layers = layers or tiny.layers
    dense = tiny.dense_first if moe else layers
    sizes: dict[str, Any] = {
        "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "q_lora_rank": Q_RANK,
        "kv_lora_rank": KV_RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V,
        "vocab_size": VOCAB, "max_position_embeddings": POSITIONS, "rope_parameters": dict(tiny.rope),
        "tie_word_embeddings": tiny.tied, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
        "intermediate_size": FFN, "num_hidden_layers": layers, "attn_implementation": "eager"}
    if tiny.model_type == "longcat_flash":
        sizes |= {"num_layers": sizes.pop("num_hidden_layers"), "ffn_hidden_size": sizes.pop("intermediate_size")}
    if tiny.mlp == "types":
        sizes["mlp_layer_types"] = ["dense"] * dense + ["sparse"] * (layers - dense)
    elif tiny.mlp == "first":
        sizes["first_k_dense_replace"] = dense
    return AutoConfig.for_model(tiny.model_type, **sizes | tiny.config | fields)


def tiny_model(name: str, *, moe: bool | None = None, seed: int = 0, layers: int | None = None,
               choice_bias: bool = True, **fields: Any) -> Any:
    """A tiny causal language model of transformers' own classes, float32, in eval mode.

    `moe` false makes every layer dense, None takes what the family has; `choice_bias` false zeroes the router's bias.
    `transmla` has identities for latent norms, so it is its own reference.
    """
    config = tiny_config(name, moe=moe, layers=layers, **fields)
    model = model_class(config.model_type)(config).eval()
    if name == "transmla":
        without_latent_norms(model)
    _fill(model, MODELS[name], torch.Generator().manual_seed(seed), choice_bias)
    return model


def model_class(model_type: str) -> Any:
    """transformers' causal language model of a model_type (Mistral 4's is in no automatic mapping)."""
    import transformers

    if model_type == "mistral4":
        return transformers.Mistral4ForCausalLM
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[transformers.CONFIG_MAPPING[model_type]]


def without_latent_norms(model: Any) -> None:
    """Replace the latent norms by identities, as TransMLA's converted models have none."""
    for layer in model.model.layers:
        for norm in ("q_a_layernorm", "kv_a_layernorm"):
            if hasattr(layer.self_attn, norm):
                setattr(layer.self_attn, norm, torch.nn.Identity())


def _fill(model: Any, tiny: Tiny, generator: torch.Generator, choice_bias: bool) -> None:
    with torch.no_grad():
        for name, tensor in _filled(model):
            if name.endswith(CHOICE_BIAS):
                tensor.normal_(0, tiny.choice_std, generator=generator).mul_(float(choice_bias))
            elif name.endswith("bias"):
                tensor.normal_(0, 0.5, generator=generator)
            elif "embed_tokens" in name:
                tensor.normal_(0, tiny.embedding_std, generator=generator)
            elif tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5, generator=generator)
            else:
                tensor.normal_(0, tiny.hot / tensor.shape[-1] ** 0.5, generator=generator)


def _filled(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, and the router biases, which are buffers."""
    yield from model.named_parameters()
    yield from ((n, b) for n, b in model.named_buffers() if n.endswith(CHOICE_BIAS))


def tiny_checkpoint(folder: Path, name: str, *, moe: bool | None = None, seed: int = 0, sharded: bool = False,
                    dtype: torch.dtype = torch.float32, layers: int | None = None, choice_bias: bool = True,
                    legacy: bool | None = None, **fields: Any) -> Path:
    """Save `tiny_model` in `folder` as its release looks; `sharded` splits it over several files with an index.

    Router biases stay float32 in any `dtype`. Without `choice_bias`, A.X-K1's checkpoint has no such tensor at all.
    """
    tiny = MODELS[name]
    model = tiny_model(name, moe=moe, seed=seed, layers=layers, choice_bias=choice_bias, **fields)
    exact = {n: b.clone() for n, b in model.named_buffers() if n.endswith(CHOICE_BIAS)}
    model.to(dtype)
    for buffer, tensor in exact.items():
        model.get_buffer(buffer).data = tensor
    model.save_pretrained(folder, max_shard_size="64KB" if sharded else "1GB")
    if name == "axk1" and not choice_bias:
        _rewrite_tensors(folder, lambda n: None if n.endswith(CHOICE_BIAS) else n)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    if tiny.legacy if legacy is None else legacy:
        raw = _legacy(raw)
    if name == "transmla":
        raw = _transmla(raw)
    if tiny.released_type:
        raw["model_type"] = tiny.released_type
    if tiny.wrapped:
        raw = _wrap(folder, raw)
    path.write_text(json.dumps(raw, indent=2))
    return folder


# --- As releases look -------------------------------------------------------------------------------------------------


def _legacy(raw: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling instead of rope_parameters, torch_dtype, and Sarvam's own names."""
    raw = dict(raw)
    rope = dict(raw.pop("rope_parameters"))
    raw["rope_theta"], kind = rope.pop("rope_theta"), rope.pop("rope_type")
    raw["rope_scaling"] = None if kind == "default" else rope | {"type": kind}
    raw["torch_dtype"] = raw.pop("dtype", "float32")
    if raw["model_type"] == "sarvam_mla":
        raw |= {"num_experts": raw.pop("n_routed_experts"), "num_shared_experts": raw.pop("n_shared_experts"),
                "q_head_dim": raw.pop("qk_head_dim", NOPE + ROPE), "head_dim": KV_RANK + ROPE,
                "architectures": ["SarvamMLAForCausalLM"]}
        raw["rope_scaling"]["type"] = "deepseek_yarn"
    return raw


def _transmla(raw: dict[str, Any]) -> dict[str, Any]:
    """A Llama config with MLA sizes added: it says deepseek_v3 and nothing about experts or dense layers."""
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias",
            "tie_word_embeddings", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling", "rope_parameters",
            "torch_dtype", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {n: raw[n] for n in kept if n in raw} | {
        "architectures": ["LlamaMLAForCausalLM"], "model_type": "deepseek_v3", "head_dim": raw["qk_rope_head_dim"],
        "mlp_bias": False, "qk_latent_layernorm": False, "auto_map": {
            "AutoConfig": "configuration_llamamla.LlamaMLAConfig",
            "AutoModelForCausalLM": "modeling_llamamla.LlamaMLAForCausalLM"}}


def _wrap(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """A vision-language wrapper: the text under `language_model.`, a few tensors of the vision side beside it."""
    _rewrite_tensors(folder, lambda n: f"language_model.{n}", {
        "vision_tower.patch_embed.proj.weight": torch.ones(8, 3, 2, 2), "mm_projector.pre_norm.weight": torch.ones(8)})
    return {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": raw,
            "tie_word_embeddings": raw["tie_word_embeddings"], "vision_config": {"vt_hidden_size": 8}}


def _rewrite_tensors(folder: Path, rename: Callable[[str], str | None],
                     extra: dict[str, torch.Tensor] | None = None) -> None:
    """Rename (or, on None, drop) the tensors of every file, and add `extra` ones to the first."""
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        renamed = {new: t for old, t in load_file(path).items() if (new := rename(old)) is not None} | (extra or {})
        save_file(renamed, path, metadata={"format": "pt"})
        files |= dict.fromkeys(renamed, path.name)
        extra = None
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        index.write_text(json.dumps(json.loads(index.read_text()) | {"weight_map": files}, indent=2))
