"""Raw tensors of a source -> the matrices the references compute with, for both naming schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from exporter.config import MLAConfig
from exporter.errors import InputError


@dataclass(frozen=True)
class Affine:
    """y = x·Wᵀ + b with `weight` [out, in] and `bias` [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., in] -> [..., out]."""
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True)
class AttentionWeights:
    """One attention. Gains are None where the layer has no latent norm; biases are None where the source has none."""

    q_low: Affine | None  # [r_q, D]; None where the query has no low rank
    q_gain: torch.Tensor | None  # [r_q]
    q_nope: Affine  # [H*nope, r_q or D]
    q_rope: Affine  # [H*rope, r_q or D]
    rope_from_hidden: bool  # the article's layer: q_rope takes the hidden state although q_nope takes the low rank
    kv_down: Affine  # [d_c, D], W_DKV
    kv_gain: torch.Tensor | None  # [d_c]
    k_rope: Affine  # [d_r, D], one for all heads
    w_uk: torch.Tensor  # [H, nope, d_c]
    b_uk: torch.Tensor | None  # [H, nope]
    w_uv: torch.Tensor  # [H, v, d_c]
    b_uv: torch.Tensor | None  # [H, v]
    out: Affine  # [D, H*v]


def attention_weights(config: MLAConfig, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype,
                      device: torch.device | str) -> AttentionWeights:
    """Split and convert raw tensors (see `source.load_tensors`). The names tell which of the two schemes it is.

    InputError for a missing tensor, a wrong shape, or a tensor this reading would silently leave out (a quantised
    checkpoint's scales, say): a reference that ignores part of its source proves nothing.
    """
    reader = _Reader(tensors, dtype, device)
    article = "down_proj_kv.weight" in tensors
    weights = _article(config, reader) if article else _hugging_face(config, reader)
    reader.check_all_used()
    return weights


class _Reader:
    """Checked access to raw tensors that remembers which were used."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device | str) -> None:
        self.tensors, self.dtype, self.device = tensors, dtype, device
        self.used: set[str] = set()

    def optional(self, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
        if name not in self.tensors:
            return None
        tensor = self.tensors[name]
        if tuple(tensor.shape) != shape:
            raise InputError(f"{name} has shape {list(tensor.shape)}; the configuration expects {list(shape)}")
        self.used.add(name)
        return tensor.detach().to(device=self.device, dtype=self.dtype)

    def affine(self, name: str, out: int, inner: int) -> Affine:
        weight = self.optional(f"{name}.weight", (out, inner))
        if weight is None:
            raise InputError(f"{name}.weight is missing; the source has {', '.join(sorted(self.tensors)) or 'nothing'}")
        return Affine(weight, self.optional(f"{name}.bias", (out,)))

    def check_all_used(self) -> None:
        # RoPE tables are derived data; `rotary_emb.inv_freq` lies in old Hugging Face checkpoints.
        tables = ("rope_q.", "rope_k.", "rotary_emb.")
        unknown = sorted(name for name in set(self.tensors) - self.used if not name.startswith(tables))
        if unknown:
            raise InputError(f"the references do not know the tensors {', '.join(unknown)}; expected a plain MLA "
                             "attention without quantisation or extra modules")


def _split_heads(affine: Affine, heads: int, sizes: tuple[int, int]) -> tuple[Affine, Affine]:
    """[H*(a + b), in] -> [H*a, in] and [H*b, in]: every head holds its a rows, then its b rows."""
    weight = affine.weight.reshape(heads, sum(sizes), -1)  # [H, a + b, in]
    bias = None if affine.bias is None else affine.bias.reshape(heads, sum(sizes))
    first, second = (Affine(weight[:, part].flatten(0, 1), None if bias is None else bias[:, part].flatten())
                     for part in (slice(sizes[0]), slice(sizes[0], None)))
    return first, second


def _up(affine: Affine, heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[H*n, d_c] -> [H, n, d_c], and the bias [H, n]."""
    bias = None if affine.bias is None else affine.bias.reshape(heads, -1)
    return affine.weight.reshape(heads, -1, affine.weight.shape[1]), bias


def _hugging_face(config: MLAConfig, reader: _Reader) -> AttentionWeights:
    c, H, D = config, config.num_attention_heads, config.hidden_size
    q_low = q_gain = None
    if c.q_lora_rank is None:
        query = reader.affine("q_proj", H * c.qk_head_dim, D)
    else:
        q_low = reader.affine("q_a_proj", c.q_lora_rank, D)
        q_gain = reader.optional("q_a_layernorm.weight", (c.q_lora_rank,))
        query = reader.affine("q_b_proj", H * c.qk_head_dim, c.q_lora_rank)
    q_nope, q_rope = _split_heads(query, H, (c.qk_nope_head_dim, c.qk_rope_head_dim))

    kv_a = reader.affine("kv_a_proj_with_mqa", c.row_dim, D)
    kv_down, k_rope = (Affine(kv_a.weight[part], None if kv_a.bias is None else kv_a.bias[part])
                       for part in (slice(c.kv_lora_rank), slice(c.kv_lora_rank, None)))
    kv_gain = reader.optional("kv_a_layernorm.weight", (c.kv_lora_rank,))

    # Head-major: every head's K rows, then its V rows. All K before all V is the commonest misreading.
    kv_b = reader.affine("kv_b_proj", H * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank)
    up_k, up_v = _split_heads(kv_b, H, (c.qk_nope_head_dim, c.v_head_dim))
    w_uk, b_uk = _up(up_k, H)
    w_uv, b_uv = _up(up_v, H)
    return AttentionWeights(
        q_low=q_low, q_gain=_factored(q_gain, c.query_scale) if c.latent_norm else None, q_nope=q_nope, q_rope=q_rope,
        rope_from_hidden=False, kv_down=kv_down, k_rope=k_rope,
        kv_gain=_factored(kv_gain, c.latent_scale) if c.latent_norm else None,
        w_uk=w_uk, b_uk=b_uk, w_uv=w_uv, b_uv=b_uv, out=reader.affine("o_proj", D, H * c.v_head_dim))


def _factored(gain: torch.Tensor | None, factor: float) -> torch.Tensor | None:
    """A norm's gain with the latent's own factor (LongCat's scaled latents)."""
    return None if gain is None else gain * factor


def _article(config: MLAConfig, reader: _Reader) -> AttentionWeights:
    c, H, D = config, config.num_attention_heads, config.hidden_size
    if c.q_lora_rank is None:
        raise InputError("q_lora_rank is null; the article's layer has down_proj_q and up_proj_q, so set its rank")
    w_uk, b_uk = _up(reader.affine("up_proj_k", H * c.qk_nope_head_dim, c.kv_lora_rank), H)
    w_uv, b_uv = _up(reader.affine("up_proj_v", H * c.v_head_dim, c.kv_lora_rank), H)
    return AttentionWeights(
        q_low=reader.affine("down_proj_q", c.q_lora_rank, D), q_gain=None,
        q_nope=reader.affine("up_proj_q", H * c.qk_nope_head_dim, c.q_lora_rank),
        q_rope=reader.affine("proj_qr", H * c.qk_rope_head_dim, D), rope_from_hidden=True,
        kv_down=reader.affine("down_proj_kv", c.kv_lora_rank, D), kv_gain=None,
        k_rope=reader.affine("proj_kr", c.qk_rope_head_dim, D),
        w_uk=w_uk, b_uk=b_uk, w_uv=w_uv, b_uv=b_uv, out=reader.affine("fc", D, H * c.v_head_dim))
