"""One attention layer's configuration: Hugging Face field names, derived sizes as properties, bad values refused.

It holds what a source *states* (dimensions, RoPE parameters, epsilons). What follows from it, such as the softmax
scale and the inverse frequencies, is computed apart by the exporter (`exporter/rope.py`) and again by the references,
so that a fault in one shows against the other.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from exporter.errors import InputError

RopeLayout = Literal["pairs", "half"]
ROPE_TYPES = ("default", "yarn", "longrope", "none", "explicit")


@dataclass(frozen=True)
class RopeParameters:
    """RoPE as a checkpoint states it (`rope_parameters` in transformers 5, `rope_theta` + `rope_scaling` before).

    `llama_4_scaling_beta` scales the whole query by 1 + beta ln(1 + floor(position / original)). `rope_type` none
    leaves the rotary columns as they are (NoPE); explicit takes `inv_freq` as stated, radians per position and pair.
    """

    rope_theta: float = 10000.0
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    llama_4_scaling_beta: float | None = None
    inv_freq: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise InputError(f"rope_type {self.rope_type!r} is not supported; expected one of {', '.join(ROPE_TYPES)}")
        if not 0 < self.rope_theta < float("inf"):
            raise InputError(f"rope_theta is {self.rope_theta}; expected a positive, finite number")
        if self.rope_type == "yarn" and not (self.factor or 0) >= 1:
            raise InputError(f"rope factor is {self.factor}; yarn expects a factor of at least 1")
        if self.rope_type == "longrope" and not (self.short_factor and self.long_factor):
            raise InputError("rope_type longrope needs short_factor and long_factor; at least one is missing")
        if (self.rope_type == "explicit") != (self.inv_freq is not None):
            stated = "missing" if self.inv_freq is None else "given"
            raise InputError(f"rope_type is {self.rope_type} and inv_freq {stated}; expected it with rope_type "
                             "explicit and no other")
        if self.inv_freq is not None and not all(0 <= f < float("inf") for f in self.inv_freq):
            raise InputError("inv_freq holds a negative or infinite frequency; expected radians per position")
        if self.llama_4_scaling_beta and not self.original_max_position_embeddings:
            raise InputError("llama_4_scaling_beta counts in original_max_position_embeddings, which is missing")


@dataclass(frozen=True)
class MLAConfig:
    """One MLA attention. Symbols of the paper beside the fields: `d_c` latent, `d_r` rotary columns, R = d_c + d_r.

    `rope_layout` says which columns rotate together: `pairs` (0,1), (2,3), … or `half` (i, i + d_r/2).
    `softmax_scale` is set only where a source has its own; otherwise it follows from head width and YaRN's mscale.
    `query_rope_from_hidden` marks layers whose rotary query is projected from the hidden state, not from the low rank.
    `exact_rows`: rows of past beyond which the model itself would attend only some (a sparse indexer), None: no end.
    `query_scale` and `latent_scale` multiply the normed query latent and the normed latent (LongCat: (D / rank)^1/2).
    """

    model_type: str
    hidden_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    max_position_embeddings: int
    q_lora_rank: int | None = None
    rope: RopeParameters = field(default_factory=RopeParameters)
    rope_layout: RopeLayout = "pairs"
    rms_norm_eps: float = 1e-6
    latent_norm_eps: float = 1e-6
    latent_norm: bool = True
    softmax_scale: float | None = None
    query_rope_from_hidden: bool = False
    query_scale: float = 1.0
    latent_scale: float = 1.0
    exact_rows: int | None = None
    num_hidden_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
                     "v_head_dim", "max_position_embeddings", "num_hidden_layers"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; expected a positive integer")
        if self.q_lora_rank is not None and (not isinstance(self.q_lora_rank, int) or self.q_lora_rank < 1):
            raise InputError(f"q_lora_rank is {self.q_lora_rank!r}; expected a positive integer or null")
        if self.qk_rope_head_dim % 2:
            raise InputError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE rotates pairs, so it must be even")
        if self.rope_layout not in ("pairs", "half"):
            raise InputError(f"rope_layout is {self.rope_layout!r}; expected 'pairs' or 'half'")
        for name, factors in (("short_factor", self.rope.short_factor), ("long_factor", self.rope.long_factor),
                              ("inv_freq", self.rope.inv_freq)):
            if factors is not None and len(factors) != self.qk_rope_head_dim // 2:
                raise InputError(f"{name} has {len(factors)} entries; expected qk_rope_head_dim / 2 = "
                                 f"{self.qk_rope_head_dim // 2}")

    @property
    def qk_head_dim(self) -> int:
        """Columns of one head's query and key: nope + rope."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """R: numbers of one cache row, latent and rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def expanded_dim(self) -> int:
        """Numbers per token of an expanded K/V cache: H x (nope + rope + v)."""
        return self.num_attention_heads * (self.qk_head_dim + self.v_head_dim)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> MLAConfig:
        """Rebuild from `to_dict` (a manifest's `config`)."""
        rope = dict(data["rope"])
        for name in ("short_factor", "long_factor", "inv_freq"):
            if rope.get(name) is not None:
                rope[name] = tuple(rope[name])
        return cls(**{**data, "rope": RopeParameters(**rope)})
