"""Mistakes of the field, made in what a reference reads: an attention's configuration and tensors, a decoder's fields.

Every function gives a change (configuration, tensors) -> (configuration, tensors), or None where the mistake does not
exist there. They are written against the source's own tensors, by their Hugging Face or article names, and share
nothing with the exporter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from validate.references.rope import inverse_frequencies, softmax_scale, yarn_mscale

Tensors = dict[str, torch.Tensor]
Change = Callable[[MLAConfig, Tensors], tuple[MLAConfig, Tensors] | None]
DecoderChange = Callable[[DecoderConfig], DecoderConfig | None]


# --- The softmax scale ------------------------------------------------------------------------------------------------


def scale_mistakes(c: MLAConfig) -> dict[str, tuple[str, float]]:
    """Wrong softmax scales of the field for one attention: ailment, with `:` and a word where it has several ->
    (the formula in numbers, its value). Those equal to the right one are left out."""
    r, right = c.rope, softmax_scale(c)
    stated = yarn_mscale(r.factor, r.mscale_all_dim) if r.rope_type != "default" and r.mscale_all_dim else 1.0
    plain, row = c.qk_head_dim**-0.5, f"({c.kv_lora_rank} + {c.qk_rope_head_dim})^-1/2"
    words = f"({c.qk_nope_head_dim} + {c.qk_rope_head_dim})^-1/2"
    times = f" x {stated:.4f}^2" if stated != 1 else ""
    found = {"mscale-dropped": (f"{words}, without mscale^2", plain),
             "mscale-once": (f"{words} x {stated:.4f}, mscale not squared", plain * stated),
             "scale-from-rank": (f"{row}{times}, of the latent row's width",
                                 right * (c.qk_head_dim / c.row_dim) ** 0.5),
             "scale-from-rank:plain": (f"{row}, of the latent row's width", c.row_dim**-0.5),
             "scale-from-rank:latent": (f"{c.kv_lora_rank}^-1/2, of the latent alone", c.kv_lora_rank**-0.5),
             "scale-from-nope": (f"{c.qk_nope_head_dim}^-1/2{times}, without the rotary columns",
                                 c.qk_nope_head_dim**-0.5 * stated**2),
             "scale-missing": ("1, no scale at all", 1.0),
             "scale-twice": (f"{right:.5f}^2, applied twice", right**2)}
    if r.mscale and r.mscale != r.mscale_all_dim and r.rope_type != "default":
        other = yarn_mscale(r.factor, r.mscale)
        found["mscale-field"] = (f"{words} x {other:.4f}^2, from mscale, not mscale_all_dim", plain * other**2)
    if stated == 1 and (r.factor or 1) > 1:
        uncalled = yarn_mscale(r.factor)
        found["mscale-uncalled-for"] = (f"{words} x {uncalled:.4f}^2, with an mscale that the configuration does not "
                                        "ask for", plain * uncalled**2)
    if stated == 1:
        found = {name: pair for name, pair in found.items() if name not in ("mscale-dropped", "mscale-once")}
    if c.softmax_scale is not None:  # the article's own: sqrt(d_model / heads + rope), not of its keys' width
        found["scale-from-keys"] = (f"{words}, of the keys' real width", plain)
    return {name: pair for name, pair in found.items() if abs(pair[1] / right - 1) > 1e-3}


def other_scale(ailment: str) -> Change:
    """One of the wrong softmax scales, by its key."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        wrong = scale_mistakes(c).get(ailment)
        return None if wrong is None else (replace(c, softmax_scale=wrong[1]), t)

    return change


# --- RoPE -------------------------------------------------------------------------------------------------------------


def rotary(make: Callable[[MLAConfig], dict[str, object] | None]) -> Change:
    """Fields of the RoPE parameters changed, the softmax scale held where it was."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        fields = make(c)
        if fields is None:
            return None
        return replace(c, softmax_scale=softmax_scale(c), rope=replace(c.rope, **fields)), t  # type: ignore[arg-type]

    return change


def other_layout(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
    """Pairs for halves, or the reverse, on both sides."""
    return None if c.rope.rope_type == "none" else (
        replace(c, rope_layout="half" if c.rope_layout == "pairs" else "pairs"), t)


def _deinterleave(rows: torch.Tensor) -> torch.Tensor:
    """Rows [d_r, ...] where pairs (0, 1), (2, 3) ... were split into halves."""
    return torch.cat((rows[0::2], rows[1::2]))


def _interleave(rows: torch.Tensor) -> torch.Tensor:
    """The inverse: halves woven into pairs."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def one_side(queries: bool) -> Change:
    """One of query and key rotated in the other layout. The scores are then those of a sound layer of which that side's
    rotary rows are permuted."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        move = _interleave if c.rope_layout == "pairs" else _deinterleave
        changed = dict(t)
        for name in _rotary_query(t) if queries else _rotary_key(t):
            if queries:
                heads = t[name].reshape(c.num_attention_heads, -1, *t[name].shape[1:])
                turned = [torch.cat((h[:-c.qk_rope_head_dim], move(h[-c.qk_rope_head_dim:]))) for h in heads]
                changed[name] = torch.stack(turned).reshape(t[name].shape)
            else:
                changed[name] = torch.cat((t[name][:-c.qk_rope_head_dim], move(t[name][-c.qk_rope_head_dim:])))
        return None if c.rope.rope_type == "none" else (c, changed)

    return change


def _rotary_query(t: Tensors) -> list[str]:
    names = ("proj_qr",) if "proj_qr.weight" in t else ("q_proj", "q_b_proj")
    return [f"{n}.{p}" for n in names for p in ("weight", "bias") if f"{n}.{p}" in t]


def _rotary_key(t: Tensors) -> list[str]:
    return [f"{n}.{p}" for n in ("proj_kr", "kv_a_proj_with_mqa") for p in ("weight", "bias") if f"{n}.{p}" in t]


def _explicit(c: MLAConfig, inv_freq: torch.Tensor, factor: float) -> dict[str, object]:
    """RoPE parameters that state these very frequencies."""
    return {"rope_type": "explicit", "inv_freq": tuple(inv_freq.tolist()), "attention_factor": factor}


def unstretched(c: MLAConfig) -> dict[str, object] | None:
    """Plain frequencies, the factor on cos and sin as it is."""
    if c.rope.rope_type not in ("yarn", "longrope"):
        return None
    plain = c.rope.rope_theta ** -(torch.arange(0, c.qk_rope_head_dim, 2).double() / c.qk_rope_head_dim)
    return _explicit(c, plain, inverse_frequencies(c, 1)[1])


def interpolated(c: MLAConfig) -> dict[str, object] | None:
    """Every frequency divided by YaRN's factor."""
    if c.rope.rope_type != "yarn":
        return None
    plain = c.rope.rope_theta ** -(torch.arange(0, c.qk_rope_head_dim, 2).double() / c.qk_rope_head_dim)
    return _explicit(c, plain / (c.rope.factor or 1), inverse_frequencies(c, 1)[1])


def narrow_frequencies(c: MLAConfig) -> dict[str, object] | None:
    """Frequencies rounded to float32."""
    if c.rope.rope_type in ("none", "longrope"):  # longrope's factor set depends on the context
        return None
    right, factor = inverse_frequencies(c, 1)
    return _explicit(c, right.float().double(), factor)


def other_base(c: MLAConfig) -> dict[str, object] | None:
    """The base that is everyone's default."""
    return {"rope_theta": 10000.0} if c.rope.rope_theta != 10000 and c.rope.rope_type in ("default", "yarn") else None


def other_factor(twice: bool) -> Callable[[MLAConfig], dict[str, object] | None]:
    """The factor on cos and sin: YaRN's applied although mscale^2 is in the scale, or none where one belongs."""
    def make(c: MLAConfig) -> dict[str, object] | None:
        right = inverse_frequencies(c, 1)[1]
        wrong = yarn_mscale(c.rope.factor) if twice else 1.0
        applies = c.rope.rope_type == "yarn" if twice else c.rope.rope_type in ("yarn", "longrope")
        return {"attention_factor": wrong} if applies and abs(right - wrong) > 1e-6 else None

    return make


def other_set(c: MLAConfig) -> dict[str, object] | None:
    """longrope's two sets exchanged."""
    r = c.rope
    if r.rope_type != "longrope" or r.short_factor == r.long_factor:
        return None
    return {"short_factor": r.long_factor, "long_factor": r.short_factor}


# --- Norms, factors, biases, W_UK and W_UV ----------------------------------------------------------------------------


def fields(**wrong: object) -> Change:
    """Fields of the configuration that hold other values than these."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        same = all(getattr(c, name) == value for name, value in wrong.items())
        return None if same else (replace(c, **wrong), t)  # type: ignore[arg-type]

    return change


def main_epsilon(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
    """The latent norms with the main norms' epsilon."""
    if not c.latent_norm or c.rms_norm_eps == c.latent_norm_eps:
        return None
    return replace(c, latent_norm_eps=c.rms_norm_eps), t


def no_gain(name: str, factor: str) -> Change:
    """A latent norm's gain left out, and with it the factor that it carries."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        if name not in t or not c.latent_norm:
            return None
        return replace(c, **{factor: 1.0}), {**t, name: torch.ones_like(t[name])}  # type: ignore[arg-type]

    return change


def without(*names: str) -> Change:
    """Tensors that are not there."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        if not any(n in t for n in names):
            return None
        return c, {n: v for n, v in t.items() if n not in names}

    return change


def no_norm(name: str) -> Change:
    """A latent norm skipped."""
    return lambda c, t: without(name)(c, t) if c.latent_norm else None


def all_k_first(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
    """What a reader sees who takes all rows of K first and those of V behind them: head h gets other rows."""
    H, nope = c.num_attention_heads, c.qk_nope_head_dim
    changed = dict(t)
    for name in [n for n in ("kv_b_proj.weight", "kv_b_proj.bias") if n in t]:
        k, v = t[name][:H * nope], t[name][H * nope:]
        parts = (k.reshape(H, nope, *k.shape[1:]), v.reshape(H, c.v_head_dim, *v.shape[1:]))
        changed[name] = torch.cat(parts, dim=1).reshape(t[name].shape)
    if "up_proj_k.weight" in t:  # the article's two projections, read as one interleaved by heads
        joined = [t[f"up_proj_{s}.weight"].reshape(H, -1, c.kv_lora_rank) for s in "kv"]
        rows = torch.cat(joined, dim=1).flatten(0, 1)
        changed["up_proj_k.weight"], changed["up_proj_v.weight"] = rows[:H * nope], rows[H * nope:]
    return c, changed


def value_bias(factor: float) -> Change:
    """The values' bias lost (factor 0) or added twice (2)."""
    def change(c: MLAConfig, t: Tensors) -> tuple[MLAConfig, Tensors] | None:
        if "up_proj_v.bias" in t:
            return c, {**t, "up_proj_v.bias": t["up_proj_v.bias"] * factor}
        if "kv_b_proj.bias" not in t:
            return None
        bias = t["kv_b_proj.bias"].reshape(c.num_attention_heads, -1).clone()
        bias[:, c.qk_nope_head_dim:] *= factor
        return c, {**t, "kv_b_proj.bias": bias.flatten()}

    return change


# --- Around the attentions --------------------------------------------------------------------------------------------


def around(**wrong: object) -> DecoderChange:
    """Fields of the decoder that hold other values than these."""
    def change(d: DecoderConfig) -> DecoderConfig | None:
        same = all(getattr(d, name) == value for name, value in wrong.items())
        return None if same else replace(d, **wrong)  # type: ignore[arg-type]

    return change


def experts(applies: Callable[[DecoderConfig], bool], **wrong: object) -> DecoderChange:
    """Fields of the experts' router, where there are experts and `applies`."""
    def change(d: DecoderConfig) -> DecoderConfig | None:
        if d.moe is None or not d.sparse_layers or not applies(d):
            return None
        return replace(d, moe=replace(d.moe, **wrong))  # type: ignore[arg-type]

    return change


def scales_experts(d: DecoderConfig) -> bool:
    """Whether routed_scaling_factor does anything."""
    return d.moe is not None and d.moe.routed_scaling_factor != 1
