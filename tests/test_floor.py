"""The floor of a step: bytes and operations counted by hand, rates that are rates. Nothing here asserts a time."""

from __future__ import annotations

import math

import pytest

from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig, MoEConfig
from exporter.presets import preset_config
from validate import floor
from validate.floor import Need, Probe, Rates, attention_need, model_need

D, H, Q, LATENT, NOPE, ROPE, V, INNER, WORDS = 64, 4, 24, 16, 20, 10, 12, 96, 128
TINY = MLAConfig(model_type="deepseek_v3", hidden_size=D, num_attention_heads=H, q_lora_rank=Q, kv_lora_rank=LATENT,
                 qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=V, num_hidden_layers=3,
                 max_position_embeddings=512)
MODEL = DecoderConfig(TINY, WORDS, INNER)
ATTENTION = (Q * D + Q + H * (NOPE + ROPE) * Q + (LATENT + ROPE) * D + LATENT + H * (NOPE + V) * LATENT + D * H * V)
FFN = 3 * D * INNER


def test_a_decode_step_counted_by_hand() -> None:
    need = model_need(MODEL, batch=2, tokens=1, rows=50)
    weights = 3 * (ATTENTION + FFN) + WORDS * D
    cache = 3 * 2 * 50 * (LATENT + ROPE)
    assert need.bytes == 4 * (weights + cache + 2 * D)  # and a row of the embedding for each token
    # each sequence meets 50 rows and its own; a head multiplies a row's latent and rotary key, and its latent again
    core = 3 * 2 * 51 * H * (LATENT + ROPE + LATENT)
    assert need.flops == 2 * (2 * weights + core)


def test_a_row_of_context_costs_its_cache_and_what_heads_make_of_it() -> None:
    short, long = (model_need(MODEL, 1, 1, rows) for rows in (100, 101))
    assert long.bytes - short.bytes == 4 * 3 * (LATENT + ROPE)
    assert long.flops - short.flops == 2 * 3 * H * (2 * LATENT + ROPE)
    half = model_need(MODEL, 1, 1, 100, "fp16")
    assert half.bytes == short.bytes / 2
    assert half.flops == short.flops


def test_a_prompt_is_multiplied_in_the_cheaper_form() -> None:
    tokens = 64
    need, pairs = model_need(MODEL, 1, tokens, 0), tokens * (tokens + 1) / 2
    projections = 2 * tokens * 3 * (ATTENTION + FFN) + 2 * WORDS * D  # the head meets the last token alone
    absorbed = projections + 2 * 3 * H * pairs * (2 * LATENT + ROPE)
    expanded = projections + 2 * 3 * H * pairs * (NOPE + ROPE + V)  # nothing past: kv_b meets the new rows alone
    assert need.flops == min(absorbed, expanded)


def test_experts_that_nobody_chose_are_not_read() -> None:
    moe = MoEConfig(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=40)
    need = model_need(DecoderConfig(TINY, WORDS, INNER, sparse_layers=(1, 2), moe=moe), 1, 1, 0)
    dense = model_need(DecoderConfig(TINY, WORDS, INNER), 1, 1, 0)
    assert need.bytes - dense.bytes == pytest.approx(4 * 2 * (2 * 3 * D * 40 + 8 * D - FFN))


@pytest.mark.parametrize("preset", ["deepseek-v2-lite", "article"])
def test_one_attention(preset: str) -> None:
    c = preset_config(preset)
    R, heads = c.row_dim, c.num_attention_heads
    first, second = attention_need(c, 1, 1, 10), attention_need(c, 1, 1, 11)
    assert second.bytes - first.bytes == 4 * R
    assert second.flops - first.flops == 2 * heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    weights = (first.bytes - 40 * R) / 4
    assert first.flops == 2 * weights + 11 * 2 * heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)
    if preset == "article":  # its own layer: latents down, keys, values and queries up, rotary parts, output, biases
        matrices = 2 * 128 * 512 + 3 * 8 * 32 * 128 + 26 * 512 + 8 * 26 * 512 + 512 * 256
        assert weights == matrices + 2 * 128 + 3 * 8 * 32 + 26 + 8 * 26 + 512


def rates(**others: object) -> Rates:
    return Rates(read=10e9, read_median=9e9, read_bytes=1 << 30, flops=100e9, flops_median=90e9, product="p",
                 **others)  # type: ignore[arg-type]


def test_a_floor_is_bytes_and_products_together() -> None:
    found = rates().floor(Need(bytes=20e6, flops=300e6))
    assert (found.bytes_ms, found.flops_ms) == pytest.approx((2.0, 3.0))
    assert found.ms == pytest.approx(5.0)


def test_a_working_set_that_a_cache_holds_is_read_at_its_rate() -> None:
    near = rates(near={1_000_000: 15e9, 2_000_000: 40e9, 8_000_000: 20e9, 16_000_000: 5e9})
    times = [near.floor(Need(n, 0)).bytes_ms for n in (4e5, 1e6, 2e6, 4e6, 8e6, 9e6)]
    # a smaller set is read no slower than a larger one, none slower than memory: more bytes never take less time
    assert times == pytest.approx([0.01, 0.025, 0.05, 0.2, 0.4, 0.9])


def test_the_same_floor_at_median_rates() -> None:
    found = rates(near={1_000_000: 40e9}, near_median={1_000_000: 30e9})
    best, median = (r.floor(Need(bytes=9e5, flops=9e6)) for r in (found, found.at_medians()))
    assert (best.bytes_ms, best.flops_ms) == pytest.approx((0.0225, 0.09))
    assert (median.bytes_ms, median.flops_ms) == pytest.approx((0.03, 0.1))
    assert found.at_medians().floor(Need(9e6, 0)).ms == pytest.approx(1.0)  # beyond every working set: from memory


def test_the_best_and_the_median_of_what_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    again, seconds = iter([(50e9, 30e9), (40e9, 20e9), (45e9, 10e9)]), iter([1.0, 2.0, 4.0] * 3)
    monkeypatch.setattr(Probe, "_memory", lambda self: [4e9, 5e9, 9e9])
    monkeypatch.setattr(Probe, "_again", lambda self, part: next(again))
    monkeypatch.setattr(floor, "_seconds", lambda run: next(seconds))
    with Probe(threads=1, read_bytes=1 << 20) as probe:
        probe._products = {"p": (8e9, lambda: None)}
        probe.working_sets([Need(4096, 0)])
        for _ in range(3):
            probe.sample()
        found = probe.rates()
    assert found is not None
    assert (found.read, found.read_median, found.flops, found.flops_median) == (9e9, 5e9, 8e9, 4e9)
    assert (found.near, found.near_median) == ({4096: 50e9}, {4096: 20e9})


def test_the_probe_measures_every_product_and_working_set() -> None:
    with Probe(threads=2, read_bytes=1 << 22) as probe:
        probe.working_sets([Need(1 << 20, 0), Need(1 << 24, 0)])  # the second is more than is read at all
        probe.products(TINY, INNER)
        probe.sample()
        probe.working_sets([])
        found = probe.rates()
    assert found is not None
    assert set(found.near) == set(found.near_median) == {1 << 20}
    assert found.near[1 << 20] >= found.near_median[1 << 20] > 0
    assert found.samples >= 4  # two shapes by two libraries
    assert found.product in {f"[512, {n}] x [{n}, 64], {who}" for n in (H * V, INNER) for who in ("ONNX Runtime",
                                                                                                  "torch")}
    values = (found.read, found.read_median, found.flops, found.flops_median, *found.near.values())
    assert all(math.isfinite(v) and v > 0 for v in values)
    assert found.read >= found.read_median
    assert found.flops >= found.flops_median
    assert found.to_dict()["read_bytes"] == 1 << 22


def test_nothing_multiplied_has_no_rates() -> None:
    with Probe(threads=1, read_bytes=1 << 20) as probe:
        probe.sample()
        assert probe.rates() is None


def test_memory_is_read_beyond_the_last_level_cache() -> None:
    assert floor.last_level_cache() >= 1 << 20
    assert floor.CACHES >= 2
