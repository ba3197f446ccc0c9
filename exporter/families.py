"""Families as data: which model_type is read how. Adding a family is one row here (docs/architecture.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from exporter.config import MLAConfig, RopeLayout, RopeParameters
from exporter.errors import InputError


@dataclass(frozen=True)
class Family:
    """What differs between families whose attention is plain MLA.

    `rope` is the layout, or `flag` where the checkpoint's `rope_interleave` (default true) decides.
    """

    rope: Literal["pairs", "half", "flag"]
    latent_norm_eps: float = 1e-6


FAMILIES: dict[str, Family] = {
    "deepseek_v2": Family(rope="pairs"),
    "deepseek_v3": Family(rope="flag"),
    "kimi_k2": Family(rope="flag"),  # DeepSeek-V3's attention
    "glm4_moe_lite": Family(rope="flag"),
    "minicpm3": Family(rope="half"),
}

# parts of the attention that are the same tensor names in every family above
ATTENTION_SCOPE = "self_attn."
IGNORED_TENSORS = ("rotary_emb.inv_freq",)


def _rope_parameters(raw: Mapping[str, Any]) -> RopeParameters:
    """RoPE of either config generation: `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`."""
    stated: dict[str, Any] = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    stated.setdefault("rope_theta", raw.get("rope_theta") or 10000.0)
    kind = stated.pop("rope_type", None) or stated.pop("type", None) or "default"
    stated["rope_type"] = "yarn" if kind == "deepseek_yarn" else kind
    fields = RopeParameters.__dataclass_fields__
    values = {k: v for k, v in stated.items() if k in fields and v is not None}
    for name in ("short_factor", "long_factor"):
        if name in values:
            values[name] = tuple(float(x) for x in values[name])
    values["rope_type"] = str(values["rope_type"])
    if "original_max_position_embeddings" not in values and raw.get("original_max_position_embeddings"):
        values["original_max_position_embeddings"] = int(raw["original_max_position_embeddings"])
    return RopeParameters(**values)


def config_from_hf(raw: Mapping[str, Any], where: str) -> MLAConfig:
    """MLAConfig from a parsed Hugging Face config.json; anything that is not a known MLA family is an InputError."""
    model_type = raw.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise InputError(f"{where}: model_type {model_type!r} is not an MLA family known here; expected one of "
                         f"{', '.join(FAMILIES)}")
    required = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                "v_head_dim")
    missing = [name for name in required if raw.get(name) is None]
    if missing:
        raise InputError(f"{where}: an MLA config states {', '.join(required)}; missing: {', '.join(missing)}")
    layout: RopeLayout = "half" if family.rope == "half" else "pairs"
    if family.rope == "flag" and raw.get("rope_interleave") is False:
        layout = "half"
    try:
        return MLAConfig(
            model_type=str(model_type), rope=_rope_parameters(raw), rope_layout=layout,
            q_lora_rank=raw.get("q_lora_rank"), rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            latent_norm_eps=family.latent_norm_eps, latent_norm=raw.get("qk_latent_layernorm") is not False,
            max_position_embeddings=int(raw.get("max_position_embeddings") or 4096),
            num_hidden_layers=int(raw.get("num_hidden_layers") or 1), **{name: raw[name] for name in required})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{where}: a field has the wrong type ({error})") from None
