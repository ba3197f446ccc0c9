"""Families as data: which model_type is read how. Adding a family is one row here (docs/architecture.md).

Dispatch is on `model_type` and, where one name covers several architectures, on `architectures`. What is not plain MLA
is refused with its reason; where only the attention is plain, one of its layers can still be exported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exporter.config import MLAConfig, RopeLayout, RopeParameters
from exporter.decoder_config import DecoderConfig, MoEConfig
from exporter.errors import InputError


@dataclass(frozen=True)
class Router:
    """How a family's router differs; sizes come from the config. `normalise` None: `norm_topk_prob` decides.

    `topk_method`: the config's own field says whether groups limit the choice (DeepSeek-V2). `bias_optional`: without a
    choice bias in the checkpoint there is none.
    """

    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    choice_bias: bool = True
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool | None = None
    topk_method: bool = False
    bias_optional: bool = False
    output_norm: bool = False
    scale: float = 1.0  # routed_scaling_factor where the config states none


@dataclass(frozen=True)
class Family:
    """What differs between families whose attention is plain MLA.

    `rope` is the layout, or `flag` where the checkpoint's `rope_interleave` (default true) decides, or `none` (NoPE).
    `router` None: every FFN is dense. `first_dense`: dense layers at the front where the config states none.
    `lora_scaling`: query latent x (D / q_rank)^1/2 and latent x (D / kv_rank)^1/2. `shortcut`, `depth_scaling`: see
    DecoderConfig. `layer_only` is the reason why a whole model is refused and one attention is not.
    """

    rope: Literal["pairs", "half", "flag", "none"]
    latent_norm_eps: float = 1e-6
    router: Router | None = None
    first_dense: int = 0
    lora_scaling: bool = False
    shortcut: bool = False
    depth_scaling: bool = False
    layer_only: str = ""


_SPARSE = ("its sparse indexer (DSA) chooses the keys of each query, which a plain MLA graph does not; one attention "
           "alone (--scope layer --layer N) equals it up to index_topk rows of past")
_V3 = Family(rope="flag", router=Router(scale=2.5), first_dense=3)

FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family("pairs", router=Router("softmax", False, "max", normalise=False, topk_method=True)),
    "deepseek_v3": _V3,
    "kimi_k2": _V3,  # DeepSeek-V3 under its own name
    "sarvam_mla": Family("flag", router=Router(scale=2.5), first_dense=1),
    "glm4_moe_lite": Family("flag", router=Router(scale=1.8), first_dense=1),
    "minicpm3": Family("half", depth_scaling=True),
    "youtu": Family("flag"),
    "llama_mla": Family("half"),  # exporter/convert.py
    "longcat_flash": Family("pairs", router=Router("softmax", normalise=False, scale=6.0), lora_scaling=True,
                            shortcut=True),
    "mistral4": Family("flag", router=Router("softmax", False)),
    "axk1": Family("flag", router=Router(bias_optional=True, output_norm=True, scale=2.5), first_dense=1),
    "deepseek_v32": Family("pairs", layer_only=_SPARSE),
    "glm_moe_dsa": Family("pairs", layer_only=_SPARSE),
    "kimi_linear": Family("none", layer_only="most of its layers are linear attention, which keeps a state and no "
                          "latent cache; an MLA layer alone works (--scope layer --layer N)"),
}

# Recognised, and refused whole: their attention is more than MLA.
REFUSED = {
    "axk2": "its query is gated and comes from two normed inputs, and a sparse indexer chooses the keys",
    "bailing_hybrid": "its MLA layers gate every head before o_proj, and most of its layers are linear attention",
    "bailing_moe_v2_5": "its MLA layers stand between linear-attention layers, and gate their output",
    "dots3_note": "it norms the rotary key, gates the output, and mixes layers of different latent shapes",
    "hy_v4": "its attention has sinks, an element-wise gate and hyper-connections",
    "mistral_large4": "its inverse frequencies are learned, layers share a cache, a sparse indexer chooses the keys",
    "glm5_next": "it is a hybrid with a sparse indexer; its attention is not MLA alone",
    "deepseek_v4": "it shares one key and value head (MQA, head size 512), which is not MLA",
}

# Rotary buffers: the graph has tables of its own.
IGNORED_TENSORS = ("rotary_emb.inv_freq",)
_REQUIRED = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def text_config(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config: `text_config` of a vision-language wrapper, else the config itself."""
    inner = raw.get("text_config") or raw.get("language_config")
    if isinstance(inner, Mapping) and raw.get("kv_lora_rank") is None:
        return inner
    return raw


def family_of(raw: Mapping[str, Any], where: str) -> Family:
    """The row of a config's family. Unknown, refused and look-alike families are an InputError that says why."""
    raw = text_config(raw)
    model_type = str(raw.get("model_type")).lower()  # A.X-K1's releases shout theirs
    architectures = ", ".join(map(str, raw.get("architectures") or []))
    if isinstance(raw.get("SVD"), Mapping) or isinstance(raw.get("RoPE"), Mapping):
        raise InputError(f"{where}: an MHA2MLA checkpoint: it keeps one rotary key per KV head, and MLA has one that "
                         "all heads share; expected shared-rope MLA such as DeepSeek's or TransMLA's")
    name = next((n for n in REFUSED if model_type == n or model_type.startswith(f"{n}_")), None)
    if name:
        other = ""
        if name == "bailing_hybrid" and "V2_5" in architectures.replace(".", "_"):
            other = f" (architectures {architectures}: this is Ling-2.5, another architecture under the same name)"
        raise InputError(f"{where}: model_type {model_type!r} is not supported{other}: {REFUSED[name]}")
    family = FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(n for n, f in FAMILIES.items() if not f.layer_only)
        raise InputError(f"{where}: model_type {raw.get('model_type')!r} is not an MLA family known here; expected one "
                         f"of {known}")
    return family


def rope_parameters(raw: Mapping[str, Any]) -> RopeParameters:
    """RoPE of either config generation: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    stated: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    stated.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
    stated["rope_type"] = "yarn" if kind == "deepseek_yarn" else kind
    fields = RopeParameters.__dataclass_fields__
    values = {k: v for k, v in stated.items() if k in fields and v is not None}
    for name in ("short_factor", "long_factor", "inv_freq"):
        if name in values:
            values[name] = tuple(float(x) for x in values[name])
    values["rope_type"] = str(values["rope_type"])
    if "original_max_position_embeddings" not in values and raw.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = int(raw["original_max_position_embeddings"])
    return RopeParameters(**values)


def _read(raw: Mapping[str, Any], where: str, make: Any) -> Any:
    """Run a reader; missing keys and wrong types become one line."""
    try:
        return make()
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except KeyError as error:
        raise InputError(f"{where}: {error.args[0]} is missing; expected it of model_type {raw.get('model_type')!r}"
                         ) from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: a field has the wrong type ({error})") from None


def config_from_hf(raw: Mapping[str, Any], where: str) -> MLAConfig:
    """MLAConfig from a parsed Hugging Face config.json; anything that is not a known MLA family is an InputError."""
    family, raw = family_of(raw, where), dict(text_config(raw))
    if family.depth_scaling and raw.get("v_head_dim") is None and raw.get("num_attention_heads"):
        raw["v_head_dim"] = raw.get("hidden_size", 0) // raw["num_attention_heads"]  # MiniCPM3 leaves it out
    missing = [name for name in _REQUIRED if raw.get(name) is None]
    if missing:
        raise InputError(f"{where}: an MLA config states {', '.join(_REQUIRED)}; missing: {', '.join(missing)}")

    def make() -> MLAConfig:
        layout: RopeLayout = "half" if family.rope == "half" else "pairs"
        if family.rope == "flag" and raw.get("rope_interleave") is False:
            layout = "half"
        hidden, q_rank = raw["hidden_size"], raw.get("q_lora_rank")
        scaled = family.lora_scaling
        return MLAConfig(
            model_type=str(raw["model_type"]).lower(), rope_layout=layout, q_lora_rank=q_rank,
            rope=RopeParameters(rope_type="none") if family.rope == "none" else rope_parameters(raw),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)), latent_norm_eps=family.latent_norm_eps,
            latent_norm=raw.get("qk_latent_layernorm") is not False,
            query_scale=(hidden / q_rank) ** 0.5 if scaled and q_rank else 1.0,
            exact_rows=raw.get("index_topk") if family.layer_only else None,
            latent_scale=(hidden / raw["kv_lora_rank"]) ** 0.5 if scaled else 1.0,
            max_position_embeddings=int(raw.get("max_position_embeddings") or raw.get("model_max_length") or 4096),
            num_hidden_layers=int(raw.get("num_layers") or raw.get("num_hidden_layers") or 1),
            **{name: raw[name] for name in _REQUIRED})

    config: MLAConfig = _read(raw, where, make)
    return config


def decoder_from_hf(raw: Mapping[str, Any], where: str) -> DecoderConfig:
    """DecoderConfig from a parsed config.json; a family of which only the attention is plain MLA is an InputError."""
    family, attention = family_of(raw, where), config_from_hf(raw, where)
    outer, raw = raw, text_config(raw)
    if family.layer_only:
        raise InputError(f"{where}: model_type {raw['model_type']!r} cannot be exported whole: {family.layer_only}")
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise InputError(f"{where}: hidden_act is {act!r}; expected silu, which all MLA families use")

    def make() -> DecoderConfig:
        depth, moe = attention.num_hidden_layers, _moe(raw, family)
        scales = {}
        if family.depth_scaling:
            hidden = attention.hidden_size
            scales = {"embedding_scale": float(raw.get("scale_emb", 12)),
                      "residual_scale": float(raw.get("scale_depth", 1.4) or depth**0.5) / depth**0.5,
                      "logits_scale": float(raw.get("dim_model_base", 256) or hidden) / hidden}
        tied = raw.get("tie_word_embeddings", outer.get("tie_word_embeddings"))
        return DecoderConfig(
            attention=attention, vocab_size=raw["vocab_size"], moe=moe, shortcut=family.shortcut,
            intermediate_size=raw["ffn_hidden_size"] if family.shortcut else raw["intermediate_size"],
            sparse_layers=tuple(range(depth)) if family.shortcut else _sparse_layers(raw, family, depth) if moe else (),
            tie_word_embeddings=attention.model_type in _TIED_BY_DEFAULT if tied is None else bool(tied),
            **scales)

    decoder: DecoderConfig = _read(raw, where, make)
    return decoder


_TIED_BY_DEFAULT = ("youtu", "minicpm3")


def _moe(raw: Mapping[str, Any], family: Family) -> MoEConfig | None:
    experts = raw.get("n_routed_experts") or raw.get("num_experts") or raw.get("num_local_experts")
    router = family.router
    if router is None or not experts:  # a converted dense model (TransMLA) states no experts
        return None
    shared = raw.get("n_shared_experts", raw.get("num_shared_experts")) or 0
    inner = raw["expert_ffn_hidden_size" if "expert_ffn_hidden_size" in raw else "moe_intermediate_size"]
    grouped = not family.shortcut and (not router.topk_method or raw.get("topk_method") == "group_limited_greedy")
    normalise = bool(raw.get("norm_topk_prob", True)) if router.normalise is None else router.normalise
    scale = raw.get("routed_scaling_factor")
    return MoEConfig(
        n_routed_experts=experts, num_experts_per_tok=raw["moe_topk" if "moe_topk" in raw else "num_experts_per_tok"],
        moe_intermediate_size=inner, shared_intermediate_size=0 if family.shortcut else inner * shared,
        scoring=router.scoring, choice_bias=router.choice_bias, group_score=router.group_score,
        n_group=(raw.get("n_group") or 1) if grouped else 1, topk_group=(raw.get("topk_group") or 1) if grouped else 1,
        normalise=normalise, routed_scaling_factor=float(router.scale if scale is None else scale),
        zero_experts=(raw.get("zero_expert_num") or 0) if family.shortcut else 0, output_norm=router.output_norm)


def _sparse_layers(raw: Mapping[str, Any], family: Family, depth: int) -> tuple[int, ...]:
    kinds = raw.get("mlp_layer_types")
    if kinds is not None:
        if len(kinds) != depth or set(kinds) - {"dense", "sparse"}:
            raise InputError(f"mlp_layer_types has {len(kinds)} entries of {', '.join(sorted(map(str, set(kinds))))}; "
                             f"expected {depth}, each dense or sparse")
        return tuple(i for i, kind in enumerate(kinds) if kind == "sparse")
    first, every = raw.get("first_k_dense_replace"), raw.get("moe_layer_freq") or 1
    first = family.first_dense if first is None else int(first)
    if isinstance(every, list):
        return tuple(i for i, sparse in enumerate(every) if sparse and i >= first)
    return tuple(i for i in range(first, depth) if i % int(every) == 0)
