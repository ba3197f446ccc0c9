"""The references agree with each other, with transformers, and with a plain transcription of the article's layer."""

from __future__ import annotations

import ast
import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import validate.references
from exporter.config import MLAConfig, RopeParameters
from exporter.errors import InputError
from exporter.presets import PRESETS, hot_tensor
from tests.conftest import DISTINCT
from validate.references import AbsorbedMLA, ComposedMHA, NaiveMLA, Reference, base, load_tensors
from validate.references.rope import Rope, inverse_frequencies, softmax_scale

ALL: list[type[Reference]] = [NaiveMLA, AbsorbedMLA, ComposedMHA]
EXACT = 1e-10  # float64 against float64


def rel(value: torch.Tensor, reference: torch.Tensor) -> float:
    """max|a - b| / std(reference) (numerics.md)."""
    assert torch.isfinite(value).all()
    assert torch.isfinite(reference).all()
    return ((value.double() - reference.double()).abs().max() / reference.double().std()).item()


def narrowed(preset: str, **changes: Any) -> MLAConfig:
    """A preset's kind of attention at a size where float64 takes milliseconds; nope, v and rope all differ."""
    c = PRESETS[preset]
    rope = c.rope
    if rope.rope_type == "longrope":
        rope = replace(rope, original_max_position_embeddings=64, short_factor=(1.0, 1.3, 2.1, 3.7),
                       long_factor=(1.1, 2.0, 5.0, 9.0))
    small: dict[str, Any] = {
        "hidden_size": 48, "num_attention_heads": 3, "q_lora_rank": c.q_lora_rank and 14, "kv_lora_rank": 12,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 6, "rope": rope}
    return replace(c, **(small | changes))


def preset_tensors(config: MLAConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    return load_tensors({"kind": "preset", "name": "narrowed", "seed": seed}, config)


def build(config: MLAConfig, tensors: dict[str, torch.Tensor] | None = None, **kw: Any) -> list[Reference]:
    tensors = preset_tensors(config) if tensors is None else tensors
    return [cls(config, tensors, **({"max_context": 128} | kw)) for cls in ALL]


def random_hidden(batch: int, tokens: int, size: int, seed: int = 1) -> torch.Tensor:
    return torch.randn((batch, tokens, size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- The three against each other ---------------------------------------------------------------------------------

VARIANTS = [(name, layout, rank) for name in DISTINCT for layout in ("pairs", "half") for rank in (None, 14)
            if not (name == "article" and rank is None)]


@pytest.mark.parametrize(("preset", "layout", "rank"), VARIANTS)
def test_three_forms_agree_on_a_ragged_batch(preset: str, layout: Any, rank: int | None) -> None:
    config = narrowed(preset, rope_layout=layout, q_lora_rank=rank)
    models = build(config)
    for model in models:
        model.reset(3)
    for step, (tokens, counts) in enumerate([(9, [9, 0, 4]), (3, None), (1, [1, 1, 0]), (5, [2, 5, 1])]):
        hidden = random_hidden(3, tokens, config.hidden_size, seed=step)
        reference, *others = [model.forward(hidden, counts) for model in models]
        for other in others:
            assert rel(other, reference) <= EXACT  # padding too: it is computed like any token
    assert all(model.lengths == [15, 9, 8] for model in models)


@pytest.mark.parametrize("changes", [
    {"rope": RopeParameters(rope_type="yarn", factor=40, original_max_position_embeddings=16)},
    {"rope": RopeParameters(rope_type="yarn", factor=8, original_max_position_embeddings=16, mscale=1.0,
                            mscale_all_dim=0.5, truncate=False)},
    {"v_head_dim": 10}, {"v_head_dim": 20}, {"num_attention_heads": 1}, {"kv_lora_rank": 60}, {"latent_norm": False},
], ids=lambda changes: "-".join(changes))
def test_three_forms_agree_on_other_shapes(changes: dict[str, Any]) -> None:
    config = narrowed("deepseek-v2", **changes)
    hidden = random_hidden(2, 11, config.hidden_size)
    reference, *others = [model.forward(hidden) for model in build(config)]
    assert max(rel(other, reference) for other in others) <= EXACT


def test_biases_on_every_projection() -> None:
    config = narrowed("deepseek-v3")
    tensors = preset_tensors(config)
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"):
        tensors[f"{name}.bias"] = torch.from_numpy(
            hot_tensor(f"{name}.bias", tuple(tensors[f"{name}.weight"].shape[:1]), 3))
    hidden = random_hidden(2, 8, config.hidden_size)
    reference, *others = [model.forward(hidden) for model in build(config, tensors)]
    assert max(rel(other, reference) for other in others) <= EXACT
    without = NaiveMLA(config, preset_tensors(config), max_context=128).forward(hidden)
    assert rel(without, reference) > 0.1


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "minicpm3-4b", "article"])
def test_chunking_is_invisible(cls: type[Reference], preset: str) -> None:
    config = narrowed(preset)
    hidden = random_hidden(2, 20, config.hidden_size)
    model = cls(config, preset_tensors(config), max_context=64)
    whole = model.forward(hidden)
    for chunks in ([1] * 20, [7, 1, 12]):
        model.reset(2)
        pieces = [model.forward(piece) for piece in hidden.split(chunks, dim=1)]
        assert rel(torch.cat(pieces, dim=1), whole) <= EXACT


@pytest.mark.parametrize("cls", ALL)
def test_each_sequence_of_a_ragged_batch_is_as_if_alone(cls: type[Reference]) -> None:
    config = narrowed("kimi-k2")
    tensors, rows = preset_tensors(config), random_hidden(3, 9, config.row_dim, seed=4)
    hidden = random_hidden(3, 4, config.hidden_size)
    together = cls(config, tensors, max_context=64)
    together.seed_rows(rows, [9, 0, 5])
    outputs = together.forward(hidden)
    for b, length in enumerate([9, 0, 5]):
        alone = cls(config, tensors, max_context=64)
        alone.seed_rows(rows[b:b + 1], torch.tensor([length]))
        assert rel(alone.forward(hidden[b:b + 1]), outputs[b:b + 1]) <= EXACT


@pytest.mark.parametrize("preset", ["deepseek-v3", "glm-4.7-flash", "minicpm3-4b", "article"])
def test_seeded_far_into_the_context(preset: str) -> None:
    config = narrowed(preset)
    rows = random_hidden(2, 1500, config.row_dim, seed=5)  # crosses the chunks in which a seed is expanded
    models = build(config, max_context=20000)
    hidden = random_hidden(2, 3, config.hidden_size)
    outputs = []
    for model in models:
        model.seed_rows(rows, [1500, 700])
        outputs.append(model.forward(hidden))
    assert max(rel(output, outputs[0]) for output in outputs[1:]) <= EXACT
    assert [model.lengths for model in models] == [[1503, 703]] * 3


def test_rows_seed_every_form_to_the_same_continuation() -> None:
    config = narrowed("deepseek-v2-lite")
    naive, absorbed, mha = build(config)
    assert isinstance(absorbed, AbsorbedMLA)
    absorbed.forward(random_hidden(2, 12, config.hidden_size), [12, 6])
    assert [absorbed.rows(b).shape for b in range(2)] == [(12, config.row_dim), (6, config.row_dim)]
    rows = nn.utils.rnn.pad_sequence([absorbed.rows(0), absorbed.rows(1)], batch_first=True)
    hidden = random_hidden(2, 2, config.hidden_size, seed=2)
    reference = absorbed.forward(hidden)
    for model in (naive, mha):
        model.seed_rows(rows, [12, 6])
        assert rel(model.forward(hidden), reference) <= EXACT


def test_small_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = narrowed("deepseek-v2")
    hidden = random_hidden(1, 24, config.hidden_size)
    models = build(config)
    whole = [model.forward(hidden) for model in models]
    monkeypatch.setattr(base, "_BLOCK_BYTES", 24 * 8 * 7)  # seven queries of one head
    assert len(list(base.blocks(3, 24, 24, 16, 8))) == 12
    for model, expected in zip(models, whole, strict=True):
        model.reset(1)
        assert rel(model.forward(hidden), expected) <= EXACT


def test_cache_bytes_count_real_rows_only() -> None:
    config = narrowed("deepseek-v3")
    models = build(config)
    for model in models:
        model.forward(random_hidden(2, 10, config.hidden_size), [10, 3])
    assert [model.cache_bytes() for model in models] == [
        13 * config.expanded_dim * 8, 13 * config.row_dim * 8, 13 * config.expanded_dim * 8]


def test_bidirectional_has_no_cache_and_sees_everything() -> None:
    config = narrowed("deepseek-v3")
    hidden = random_hidden(2, 9, config.hidden_size)
    models = build(config, causal=False)
    reference, *others = [model.forward(hidden) for model in models]
    assert max(rel(other, reference) for other in others) <= EXACT
    assert all(model.lengths == [] and model.cache_bytes() == 0 for model in models)
    causal = NaiveMLA(config, preset_tensors(config), max_context=128).forward(hidden)
    assert rel(reference[:, -1], causal[:, -1]) <= EXACT  # the last token sees everything either way
    assert rel(reference[:, :1], causal[:, :1]) > 0.1


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 3e-5), (torch.bfloat16, 0.15)])
def test_narrower_dtypes_stay_within_the_tolerances(dtype: torch.dtype, bound: float) -> None:
    config = narrowed("deepseek-v3", rope=RopeParameters())
    hidden = random_hidden(1, 30, config.hidden_size).to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in preset_tensors(config).items()}
    exact = NaiveMLA(config, tensors, max_context=128).forward(hidden)
    for model in build(config, tensors, dtype=dtype):
        output = model.forward(hidden)
        assert output.dtype == dtype
        assert rel(output, exact) <= bound


def test_composed_mha_is_a_plain_mha_where_there_is_no_norm() -> None:
    config = narrowed("article")
    model = ComposedMHA(config, preset_tensors(config), max_context=16)
    assert model.w_k.weight.shape == (3 * 10, 48)
    assert model.w_v.weight.shape == (3 * 6, 48)
    hidden = random_hidden(1, 1, 48)
    model.forward(hidden)
    key = model._caches[0][0].kept()[0, :, :10].flatten()  # position 0, the nope columns
    bias = model.weights.b_uk
    assert bias is not None
    assert torch.allclose(key, model.w_k(hidden)[0, 0] + bias.flatten(), rtol=1e-12)


# --- RoPE and scale ---------------------------------------------------------------------------------------------

def test_softmax_scale_is_the_published_one() -> None:
    plain = 192 ** -0.5
    assert softmax_scale(PRESETS["deepseek-v3"]) / plain == pytest.approx(1.8739, abs=1e-4)
    assert softmax_scale(PRESETS["deepseek-v2-lite"]) / plain == pytest.approx(1.5896, abs=1e-4)
    assert softmax_scale(PRESETS["glm-4.7-flash"]) == pytest.approx(256 ** -0.5)
    assert softmax_scale(PRESETS["article"]) == pytest.approx(90 ** -0.5)
    bare = replace(PRESETS["deepseek-v3"], rope=RopeParameters(
        rope_type="yarn", factor=40, original_max_position_embeddings=4096))
    assert softmax_scale(bare) == pytest.approx(plain)  # without the keys, YaRN scales cos and sin instead
    assert inverse_frequencies(bare, 4096)[1] == pytest.approx(1.3689, abs=1e-4)


def test_longrope_set_follows_max_context() -> None:
    config = narrowed("minicpm3-4b", max_position_embeddings=256)
    short, factor = inverse_frequencies(config, 64)
    long, _ = inverse_frequencies(config, 65)
    assert factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))
    assert (short / long).tolist() == pytest.approx([1.1, 2.0 / 1.3, 5.0 / 2.1, 9.0 / 3.7])


def test_layouts_are_one_rotation_of_other_columns() -> None:
    config = narrowed("glm-4.7-flash")
    x, positions = random_hidden(1, 5, 8), torch.arange(5)[None]
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    pairs = Rope(replace(config, rope_layout="pairs"), 8).rotate(x, positions)
    half = Rope(replace(config, rope_layout="half"), 8).rotate(x[..., order], positions)
    assert torch.equal(pairs[..., order], half)
    assert torch.equal(pairs[:, 0], x[:, 0])  # position 0 turns nothing and keeps the order
    turned = torch.view_as_complex(x[..., 2:4].contiguous()) * torch.exp(1j * positions.double() * 1e6 ** -0.25)
    assert torch.allclose(pairs[..., 2:4], torch.view_as_real(turned), rtol=1e-12)


# --- Against transformers ---------------------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
        "beta_slow": 1.0, "rope_theta": 10000.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "rope_theta": 10000.0,
        "short_factor": [1.0, 1.3, 2.1, 3.7], "long_factor": [1.1, 2.0, 5.0, 9.0]}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}

# model type, class prefix, rope parameters, changes of the configuration, tokens
CASES = [
    ("deepseek_v2", "DeepseekV2", YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, {}, 200),
    ("deepseek_v2", "DeepseekV2", YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}, {"q_lora_rank": None}, 200),
    ("deepseek_v2", "DeepseekV2", YARN, {}, 200),  # no mscale keys: cos and sin are scaled
    ("deepseek_v2", "DeepseekV2", PLAIN, {"attention_bias": True}, 200),
    ("deepseek_v3", "DeepseekV3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, {"rope_interleave": True}, 200),
    ("deepseek_v3", "DeepseekV3", YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, {"rope_interleave": False}, 200),
    ("deepseek_v3", "DeepseekV3", YARN | {"mscale": 1.0, "mscale_all_dim": 0.5}, {"attention_bias": True}, 200),
    ("deepseek_v3", "DeepseekV3", YARN | {"attention_factor": 1.2, "truncate": False}, {"q_lora_rank": None}, 200),
    ("glm4_moe_lite", "Glm4MoeLite", PLAIN | {"rope_theta": 1e6}, {"rms_norm_eps": 1e-5}, 200),
    ("glm4_moe_lite", "Glm4MoeLite", PLAIN, {"rope_interleave": False}, 200),
    ("minicpm3", "MiniCPM3", LONG, {"max_position_embeddings": 256}, 64),
    ("minicpm3", "MiniCPM3", LONG, {"max_position_embeddings": 256}, 200),
    ("minicpm3", "MiniCPM3", LONG, {"max_position_embeddings": 64}, 64),
    ("minicpm3", "MiniCPM3", LONG | {"attention_factor": 1.5}, {"max_position_embeddings": 256}, 200),
]


def transformers_attention(model_type: str, prefix: str, rope: dict[str, Any], changes: dict[str, Any],
                           ) -> tuple[Any, Any, Any]:
    """A tiny (config, rotary embedding, eager attention) of transformers' own classes, hot weights, float64."""
    pytest.importorskip("transformers")
    folder = f"transformers.models.{model_type}"
    configuration = importlib.import_module(f"{folder}.configuration_{model_type}")
    modeling = importlib.import_module(f"{folder}.modeling_{model_type}")
    settings = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 24,
                "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
                "num_hidden_layers": 1, "vocab_size": 32, "intermediate_size": 32, "max_position_embeddings": 1280}
    config = getattr(configuration, f"{prefix}Config")(**(settings | changes), rope_parameters=dict(rope))
    config._attn_implementation = "eager"
    attention = getattr(modeling, f"{prefix}Attention")(config, layer_idx=0).double().eval()
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            parameter.copy_(torch.from_numpy(hot_tensor(name, tuple(parameter.shape), seed=7)))
    return config, getattr(modeling, f"{prefix}RotaryEmbedding")(config), attention


def our_config(config: Any, rope: dict[str, Any]) -> MLAConfig:
    parameters = {name: tuple(value) if isinstance(value, list) else value for name, value in rope.items()}
    pairs = config.model_type != "minicpm3" and getattr(config, "rope_interleave", True)
    names = ("model_type", "hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
             "qk_rope_head_dim", "v_head_dim", "max_position_embeddings", "q_lora_rank", "rms_norm_eps")
    return MLAConfig(**{name: getattr(config, name) for name in names}, rope=RopeParameters(**parameters),
                     rope_layout="pairs" if pairs else "half")


@pytest.mark.parametrize("loudness", [1.0, 1e-3], ids=["", "quiet"])  # quiet: latent variance near its epsilon
@pytest.mark.parametrize(("model_type", "prefix", "rope", "changes", "tokens"), CASES)
def test_against_transformers_eager_attention(model_type: str, prefix: str, rope: dict[str, Any],
                                              changes: dict[str, Any], tokens: int, loudness: float) -> None:
    config, rotary, attention = transformers_attention(model_type, prefix, rope, changes)
    tensors = {name: tensor.detach() for name, tensor in attention.state_dict().items()}
    hidden = loudness * random_hidden(2, tokens, config.hidden_size)
    ours = [model.forward(hidden) for model in build(our_config(config, rope), tensors, max_context=tokens)]
    mask = torch.full((tokens, tokens), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        embeddings = rotary(hidden, torch.arange(tokens)[None])
        theirs = attention(hidden_states=hidden, attention_mask=mask, position_embeddings=embeddings)[0]
    # Their norms, softmax and angles are float32 even in a float64 module.
    assert max(rel(output, theirs) for output in ours) <= 1e-4


@pytest.mark.parametrize("preset", [name for name in DISTINCT if PRESETS[name].rope.rope_type != "default"])
@pytest.mark.parametrize("changes", [{}, {"truncate": False}, {"mscale": None, "mscale_all_dim": None},
                                     {"mscale": 2.0, "mscale_all_dim": None}, {"beta_slow": 1e-3}],
                         ids=["published", "untruncated", "no mscale", "half an mscale", "ramp past the last pair"])
@pytest.mark.parametrize("seq_len", [4096, 100000])
def test_inverse_frequencies_at_full_size(preset: str, changes: dict[str, Any], seq_len: int) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    c = replace(PRESETS[preset], rope=replace(PRESETS[preset].rope, **changes))
    r = c.rope
    if r.rope_type == "yarn":
        kept: dict[str, Any] = {"factor": r.factor, "beta_fast": r.beta_fast, "beta_slow": r.beta_slow,
                                "truncate": r.truncate, "mscale": r.mscale, "mscale_all_dim": r.mscale_all_dim}
    else:
        kept = {"short_factor": list(r.short_factor or ()), "long_factor": list(r.long_factor or ())}
    theirs = transformers.DeepseekV3Config(
        hidden_size=c.hidden_size, num_attention_heads=c.num_attention_heads, qk_rope_head_dim=c.qk_rope_head_dim,
        max_position_embeddings=c.max_position_embeddings, rope_parameters={
            "rope_type": r.rope_type, "rope_theta": r.rope_theta,
            "original_max_position_embeddings": r.original_max_position_embeddings} | kept)
    expected, expected_factor = utils.ROPE_INIT_FUNCTIONS[r.rope_type](theirs, seq_len=seq_len)
    ours, factor = inverse_frequencies(c, max_context=seq_len)
    assert factor == pytest.approx(expected_factor, rel=1e-12)
    # They round 1 - ramp to float32: an error of 2^-24 of the unscaled frequency, and near the ramp's end the result is
    # hardly more than 1/factor of that. A ramp that is not truncated may end close enough to a pair for it to show.
    rounding = 2**-24 * (r.factor or 1) if not r.truncate else 0.0
    assert ((ours - expected).abs() / ours).max().item() < max(1e-6, rounding)


# --- Against the article's layer, transcribed ---------------------------------------------------------------------

class ArticleRope(nn.Module):
    """Rotate-half RoPE with its tables as buffers, so that they are in the state_dict as the article's are."""

    def __init__(self, dim: int, max_len: int = 512) -> None:
        super().__init__()
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(max_len, dtype=torch.float64), inv_freq)
        table = torch.cat((angles, angles), dim=-1)
        self.register_buffer("inv_freq", inv_freq)
        self.register_buffer("cos_cached", table.cos()[None, None])
        self.register_buffer("sin_cached", table.sin()[None, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, h, S, dim]
        cos, sin = self.cos_cached[:, :, :x.shape[2]], self.sin_cached[:, :, :x.shape[2]]
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class ArticleLayer(nn.Module):
    """article.md, section 3, line by line; nothing of the references is used."""

    def __init__(self, d_model: int, down_dim: int, up_dim: int, num_heads: int, rope_head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.rope_head_dim = num_heads, rope_head_dim
        self.head_dim, self.v_head_dim = d_model // num_heads, up_dim // num_heads
        self.down_proj_kv = nn.Linear(d_model, down_dim)
        self.up_proj_k = nn.Linear(down_dim, up_dim)
        self.up_proj_v = nn.Linear(down_dim, up_dim)
        self.down_proj_q = nn.Linear(d_model, down_dim)
        self.up_proj_q = nn.Linear(down_dim, up_dim)
        self.proj_qr = nn.Linear(d_model, rope_head_dim * num_heads)
        self.proj_kr = nn.Linear(d_model, rope_head_dim)
        self.rope_q, self.rope_k = ArticleRope(rope_head_dim), ArticleRope(rope_head_dim)
        self.fc = nn.Linear(up_dim, d_model)

    def forward(self, h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # [B, S, d_model], [B, S, S]
        B, S, _ = h.shape
        c_kv = self.down_proj_kv(h)
        k_c = self.up_proj_k(c_kv).reshape(B, S, self.num_heads, -1).transpose(1, 2)
        v_c = self.up_proj_v(c_kv).reshape(B, S, self.num_heads, self.v_head_dim).transpose(1, 2)
        q_c = self.up_proj_q(self.down_proj_q(h)).reshape(B, S, self.num_heads, -1).transpose(1, 2)
        q_r = self.rope_q(self.proj_qr(h).reshape(B, S, self.num_heads, self.rope_head_dim).transpose(1, 2))
        k_r = self.rope_k(self.proj_kr(h).unsqueeze(1)).expand(-1, self.num_heads, -1, -1)
        q, k = torch.cat((q_c, q_r), dim=-1), torch.cat((k_c, k_r), dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim + self.rope_head_dim)
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        out = torch.softmax(scores, dim=-1) @ v_c
        return self.fc(out.transpose(1, 2).reshape(B, S, -1))


def article_layer(config: MLAConfig) -> ArticleLayer:
    """The layer with the preset's seeded weights, float64."""
    H = config.num_attention_heads
    layer = ArticleLayer(config.hidden_size, config.kv_lora_rank, H * config.v_head_dim, H, config.qk_rope_head_dim)
    report = layer.double().load_state_dict(preset_tensors(config), strict=False)
    assert not report.unexpected_keys
    assert all(name.startswith("rope_") for name in report.missing_keys)
    return layer


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_against_the_articles_layer(causal: bool) -> None:
    config = PRESETS["article"]  # its real size is small enough
    layer = article_layer(config)
    hidden = random_hidden(2, 100, config.hidden_size)
    mask = torch.ones(2, 100, 100)
    with torch.no_grad():
        expected = layer(hidden, mask.tril() if causal else mask)
    for model in build(config, dict(layer.state_dict()), causal=causal):
        assert rel(model.forward(hidden), expected) <= EXACT


@pytest.mark.parametrize("pickled", [False, True])
def test_article_state_dict_from_a_file(tmp_path: Path, pickled: bool) -> None:
    config = PRESETS["article"]
    state = {name: tensor.float().contiguous() for name, tensor in article_layer(config).state_dict().items()}
    path = tmp_path / ("layer.pt" if pickled else "layer.safetensors")
    torch.save(state, path) if pickled else save_file({k: v.clone() for k, v in state.items()}, path)
    tensors = load_tensors({"kind": "article", "path": str(path), "pickle": pickled})
    assert {"rope_q.cos_cached", "rope_k.inv_freq", "fc.bias"} <= set(tensors)
    hidden = random_hidden(1, 5, config.hidden_size)
    expected = NaiveMLA(config, preset_tensors(config), max_context=64).forward(hidden)
    assert torch.equal(NaiveMLA(config, tensors, max_context=64).forward(hidden), expected)


# --- Sources ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("wrapper", ["model.", "language_model.model.", "model.language_model.", ""])
@pytest.mark.parametrize("sharded", [False, True])
def test_checkpoint_layer_keeps_names_and_dtype(tmp_path: Path, wrapper: str, sharded: bool) -> None:
    config = narrowed("deepseek-v3")
    layers = [{name: tensor.bfloat16() for name, tensor in preset_tensors(config, seed).items()} for seed in range(12)]
    everything = {f"{wrapper}layers.{n}.self_attn.{name}": tensor
                  for n, layer in enumerate(layers) for name, tensor in layer.items()}
    everything["vision_tower.layers.1.self_attn.q_proj.weight"] = torch.zeros(2, 2)
    everything["model.mtp.layers.1.self_attn.kv_a_proj_with_mqa.weight"] = torch.zeros(2, 2)
    if sharded:
        files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(everything)}
        for file in set(files.values()):
            save_file({name: everything[name] for name in files if files[name] == file}, tmp_path / file)
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(everything, tmp_path / "model.safetensors")
    tensors = load_tensors({"kind": "checkpoint", "path": str(tmp_path), "layer": 1}, config)
    assert set(tensors) == set(layers[1])
    assert all(torch.equal(tensors[name], layers[1][name]) and tensors[name].dtype == torch.bfloat16
               for name in tensors)


def test_source_errors_name_what_arrived_and_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="kind is 'hub'; expected 'preset'"):
        load_tensors({"kind": "hub"})
    with pytest.raises(InputError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        load_tensors({"kind": "checkpoint", "path": tmp_path, "layer": 0})
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="found: none; check the layer number and that the model uses MLA"):
        load_tensors({"kind": "checkpoint", "path": tmp_path, "layer": 0})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(InputError, match="no safetensors index"):
        load_tensors({"kind": "checkpoint", "path": tmp_path, "layer": 0})
    torch.save({"a": torch.zeros(1)}, tmp_path / "layer.pt")
    with pytest.raises(InputError, match="cannot be read as safetensors"):
        load_tensors({"kind": "article", "path": tmp_path / "layer.pt"})
    torch.save({"model": {"a": torch.zeros(1)}}, tmp_path / "nested.pt")
    with pytest.raises(InputError, match="does not hold a plain state_dict"):
        load_tensors({"kind": "article", "path": tmp_path / "nested.pt", "pickle": True})
    torch.save(nn.Linear(2, 2), tmp_path / "module.pt")
    with pytest.raises(InputError, match="cannot be read as a state_dict"):
        load_tensors({"kind": "article", "path": tmp_path / "module.pt", "pickle": True})


def test_weights_that_do_not_fit_are_refused() -> None:
    config = narrowed("deepseek-v3")
    tensors = preset_tensors(config)
    with pytest.raises(InputError, match=r"kv_b_proj\.weight has shape \[48, 12\]; the configuration expects \[60, 12"):
        NaiveMLA(replace(config, v_head_dim=10), tensors | {"o_proj.weight": torch.zeros(48, 30)}, max_context=8)
    with pytest.raises(InputError, match=r"kv_a_proj_with_mqa\.weight is missing"):
        NaiveMLA(config, {k: v for k, v in tensors.items() if "mqa" not in k}, max_context=8)
    with pytest.raises(InputError, match=r"do not know the tensors kv_b_proj\.weight_scale_inv"):
        NaiveMLA(config, tensors | {"kv_b_proj.weight_scale_inv": torch.ones(1, 1)}, max_context=8)


def test_misuse_is_refused() -> None:
    config = narrowed("deepseek-v3")
    model = AbsorbedMLA(config, preset_tensors(config), max_context=8)
    hidden, rows = random_hidden(2, 3, config.hidden_size), random_hidden(2, 3, config.row_dim)
    model.forward(hidden)
    with pytest.raises(InputError, match=r"batch 1, the caches 2; call reset\(1\)"):
        model.forward(hidden[:1])
    with pytest.raises(InputError, match=r"counts are \[1, 4\]; expected 2 numbers from 0 to 3"):
        model.forward(hidden, [1, 4])
    with pytest.raises(InputError, match="would reach 9 positions; max_context is 8"):
        model.forward(random_hidden(2, 6, config.hidden_size))
    with pytest.raises(InputError, match=r"rows have shape \[2, 3, 48\]; expected \[B, S, R\] with R = 20"):
        model.seed_rows(hidden, [1, 1])
    both_ways = AbsorbedMLA(config, preset_tensors(config), max_context=8, causal=False)
    with pytest.raises(InputError, match="causal=False, which has no cache"):
        both_ways.seed_rows(rows, [1, 1])
    with pytest.raises(InputError, match="counts were given with causal=False"):
        both_ways.forward(hidden, [1, 1])


# --- Independence -------------------------------------------------------------------------------------------------

def test_references_import_nothing_of_the_exporter_but_its_data() -> None:
    allowed = {"exporter.config", "exporter.decoder_config", "exporter.presets", "exporter.errors"}
    folder = Path(validate.references.__file__).parent
    files = [folder.parent / "__init__.py", *sorted(folder.rglob("*.py"))]
    assert len(files) >= 9
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: relative import"
                # `from exporter import rope` hides the module in its names
                names = [f"exporter.{a.name}" for a in node.names] if node.module == "exporter" else [node.module or ""]
            ours = {name for name in names if name.split(".")[0] in ("exporter", "engines", "validate")}
            extra = {name for name in ours - allowed if not name.startswith("validate.references")}
            assert not extra, f"{file.name} imports {extra}"
            assert "importlib" not in names, f"{file.name}: imports by name cannot be checked"
