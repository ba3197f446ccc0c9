"""A whole decoder's configuration: the attention of `exporter/config.py` and what stands around it.

Field names are Hugging Face's where it has one name for the thing; families that say it otherwise are read in
`exporter/families.py`. `tensor_shapes` lists every tensor that such a decoder is made of, in canonical names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from exporter.config import MLAConfig
from exporter.errors import InputError


@dataclass(frozen=True)
class MoEConfig:
    """One mixture-of-experts FFN and its router (arXiv 2405.04434, 2412.19437).

    scores = `scoring`(x W^T) in float32; the choice adds a bias (`choice_bias`) and, with `n_group` > 1, is limited to
    the `topk_group` best groups, scored by their `group_score`; the weights are the chosen scores, `normalise`d to sum
    to 1, times `routed_scaling_factor`. `zero_experts` give their input back (LongCat). `output_norm`: an RMS norm over
    routed and shared output (A.X-K1).
    """

    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_intermediate_size: int = 0
    scoring: Literal["sigmoid", "softmax"] = "sigmoid"
    choice_bias: bool = True
    n_group: int = 1
    topk_group: int = 1
    group_score: Literal["top2", "max"] = "top2"
    normalise: bool = True
    routed_scaling_factor: float = 1.0
    zero_experts: int = 0
    output_norm: bool = False

    def __post_init__(self) -> None:
        for name in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; expected a positive integer")
        experts = self.n_routed_experts + self.zero_experts
        if self.num_experts_per_tok > experts:
            raise InputError(f"num_experts_per_tok is {self.num_experts_per_tok}; there are {experts} experts")
        if experts % self.n_group or self.topk_group > self.n_group:
            raise InputError(f"n_group is {self.n_group} and topk_group {self.topk_group}; expected groups that divide "
                             f"{experts} experts, and no more chosen than there are")
        if self.limited and self.group_score == "top2" and experts // self.n_group < 2:
            raise InputError(f"n_group is {self.n_group} for {experts} experts; a group's score is the sum of its two "
                             "best, so it needs at least two")
        if self.num_experts_per_tok > experts // self.n_group * self.topk_group:
            raise InputError(f"num_experts_per_tok is {self.num_experts_per_tok}; topk_group {self.topk_group} of "
                             f"{self.n_group} groups hold {experts // self.n_group * self.topk_group} experts")

    @property
    def limited(self) -> bool:
        """Whether the choice is limited to some of the groups."""
        return self.topk_group < self.n_group


@dataclass(frozen=True)
class DecoderConfig:
    """Embedding, layers, final norm and head. `sparse_layers` have an MoE, the others a dense FFN.

    `shortcut` layers hold two attentions and two dense FFNs, with the MoE beside the second pair (LongCat). The
    embedding is multiplied by `embedding_scale`, each residual branch by `residual_scale`, the final hidden state by
    `logits_scale` (MiniCPM3). `vocabulary_part`: the rows [first, end) of the vocabulary whose logits it gives, None
    for all (one rank of a tensor-parallel model has a part).
    """

    attention: MLAConfig
    vocab_size: int
    intermediate_size: int
    sparse_layers: tuple[int, ...] = ()
    moe: MoEConfig | None = None
    tie_word_embeddings: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    shortcut: bool = False
    vocabulary_part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "intermediate_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}; expected a positive integer")

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.attention.num_hidden_layers

    @property
    def head_rows(self) -> int:
        """Rows of the vocabulary that the head has."""
        return self.vocab_size if self.vocabulary_part is None else self.vocabulary_part[1] - self.vocabulary_part[0]

    @property
    def attentions_per_layer(self) -> int:
        """Attentions, and so latent caches, of one decoder layer."""
        return 2 if self.shortcut else 1

    def attention_scopes(self, layer: int) -> list[str]:
        """Canonical tensor prefixes of a layer's attentions."""
        base = f"model.layers.{layer}.self_attn."
        return [f"{base}{i}." for i in range(2)] if self.shortcut else [base]

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready dictionary, inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DecoderConfig:
        """Rebuild from `to_dict` (a manifest's `decoder`)."""
        moe = None if data["moe"] is None else MoEConfig(**data["moe"])
        part = data.get("vocabulary_part")
        return cls(**{**data, "attention": MLAConfig.from_dict(data["attention"]), "moe": moe,
                      "sparse_layers": tuple(data["sparse_layers"]), "vocabulary_part": part and tuple(part)})


Shapes = Iterator[tuple[str, tuple[int, ...]]]


def attention_shapes(c: MLAConfig) -> Shapes:
    """Tensors of one attention, `nn.Linear` weights [out, in]; biases, which few checkpoints have, not among them."""
    H, D = c.num_attention_heads, c.hidden_size
    if c.q_lora_rank is None:
        yield "q_proj.weight", (H * c.qk_head_dim, D)
    else:
        yield "q_a_proj.weight", (c.q_lora_rank, D)
        if c.latent_norm:
            yield "q_a_layernorm.weight", (c.q_lora_rank,)
        yield "q_b_proj.weight", (H * c.qk_head_dim, c.q_lora_rank)
    yield "kv_a_proj_with_mqa.weight", (c.row_dim, D)
    if c.latent_norm:
        yield "kv_a_layernorm.weight", (c.kv_lora_rank,)
    yield "kv_b_proj.weight", (H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    yield "o_proj.weight", (D, H * c.v_head_dim)


def _ffn_shapes(prefix: str, hidden: int, inner: int) -> Shapes:
    yield f"{prefix}gate_proj.weight", (inner, hidden)
    yield f"{prefix}up_proj.weight", (inner, hidden)
    yield f"{prefix}down_proj.weight", (hidden, inner)


def _moe_shapes(layer: str, moe: MoEConfig, hidden: int, router: str) -> Shapes:
    choices = moe.n_routed_experts + moe.zero_experts
    yield f"{layer}mlp.{router}.weight", (choices, hidden)
    if moe.choice_bias:
        yield f"{layer}mlp.{router.split('.')[0]}.e_score_correction_bias", (choices,)
    for expert in range(moe.n_routed_experts):
        yield from _ffn_shapes(f"{layer}mlp.experts.{expert}.", hidden, moe.moe_intermediate_size)
    if moe.shared_intermediate_size:
        yield from _ffn_shapes(f"{layer}mlp.shared_experts.", hidden, moe.shared_intermediate_size)
    if moe.output_norm:
        yield f"{layer}post_mlp_layernorm.weight", (hidden,)


def layer_shapes(d: DecoderConfig, layer: int) -> Shapes:
    """Tensors of one decoder layer in canonical names."""
    prefix, D = f"model.layers.{layer}.", d.attention.hidden_size
    places = [".0", ".1"] if d.shortcut else [""]
    for scope, place in zip(d.attention_scopes(layer), places, strict=True):
        yield f"{prefix}input_layernorm{place}.weight", (D,)
        for name, shape in attention_shapes(d.attention):
            yield scope + name, shape
        yield f"{prefix}post_attention_layernorm{place}.weight", (D,)
        if d.shortcut:
            yield from _ffn_shapes(f"{prefix}mlps{place}.", D, d.intermediate_size)
    if layer in d.sparse_layers:
        assert d.moe is not None
        yield from _moe_shapes(prefix, d.moe, D, "router.classifier" if d.shortcut else "gate")
    elif not d.shortcut:
        yield from _ffn_shapes(f"{prefix}mlp.", D, d.intermediate_size)


def tensor_shapes(d: DecoderConfig, layers: range | None = None) -> dict[str, tuple[int, ...]]:
    """Every tensor of the decoder (or of the slice `layers`) in canonical names, with its shape."""
    chosen = layers if layers is not None else range(d.layers)
    D = d.attention.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if chosen.start == 0 or (chosen.stop == d.layers and d.tie_word_embeddings):
        shapes["model.embed_tokens.weight"] = (d.vocab_size, D)
    for layer in chosen:
        shapes.update(layer_shapes(d, layer))
    if chosen.stop == d.layers:
        shapes["model.norm.weight"] = (D,)
        if not d.tie_word_embeddings:
            shapes["lm_head.weight"] = (d.head_rows, D)
    return shapes
