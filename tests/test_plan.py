"""The plan's figures against first principles: every number below is worked out here from the published shapes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engines.gpus import GPUS
from engines.plan import PlanRequest, plan
from engines.roofline import crossover
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.presets import preset_config
from tests.model_checkpoints import tiny_checkpoint


@pytest.fixture(scope="module")
def v3() -> dict:
    return plan(PlanRequest("deepseek-v3", gpu="h200", dtype="bf16"))


@pytest.fixture(scope="module")
def lite() -> dict:
    return plan(PlanRequest("deepseek-v2-lite", gpu="l4"))


def test_v3_weights(v3: dict) -> None:
    """61 layers, 3 of them dense; 58 x 256 experts of 2048 over D 7168; 2 bytes a number, 4 in the router."""
    parts = v3["weights"]["parts"]
    expert = 3 * 7168 * 2048
    assert parts["experts"] == 58 * 256 * expert * 2 == 1_307_817_541_632
    assert parts["shared experts"] == 58 * expert * 2
    assert parts["dense FFN"] == 3 * 3 * 7168 * 18432 * 2
    assert parts["embedding"] == parts["head"] == 129280 * 7168 * 2
    assert parts["W_UK and W_UV, absorbed"] == 61 * 128 * (128 + 128) * 512 * 2
    q_a, q_b, kv_a, o = 1536 * 7168, 128 * 192 * 1536, 576 * 7168, 7168 * 128 * 128
    assert parts["attention projections"] == 61 * (q_a + q_b + kv_a + o) * 2
    assert parts["router"] == 58 * 256 * (7168 + 1) * 4
    assert v3["weights"]["bytes"] == sum(parts.values())
    assert v3["weights"]["bytes"] / 2 == pytest.approx(671e9, rel=0.001)  # the published 671 B parameters
    assert v3["weights"]["kv_b_bytes"] == parts["W_UK and W_UV, absorbed"]


def test_v3_cache(v3: dict) -> None:
    cache = v3["cache_bytes"]
    assert cache["latent_per_token"] == 61 * 576 * 2 == 70272
    assert cache["latent"] == 70272 * 8 * 32768
    assert cache["expanded_per_token"] == 61 * 128 * (128 + 64 + 128) * 2
    assert cache["expanded_per_token"] / cache["latent_per_token"] == pytest.approx(71.1, abs=0.05)


def test_v3_needs_twelve_h200_for_its_weights(v3: dict) -> None:
    """A layer with experts is 23.0 GB, so 5 fit the 134 GB that the reserve leaves: 3 + 5, then ten times 5, then 3."""
    assert v3["memory_bytes"] == 141e9
    assert v3["reserve_bytes"] == pytest.approx(7.05e9)
    attention = 1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 128 * 256 * 512 + 7168 * 128 * 128
    layer = 2 * (257 * 3 * 7168 * 2048 + attention) + 4 * 256 * 7169
    assert 5 * layer < 141e9 - 7.05e9 < 6 * layer
    assert v3["fits"]["decode"]["gpus_for_weights"] == 12
    assert v3["fits"]["both"]["gpus_for_weights"] > 2 * 12  # twice the weights a GPU: 2 layers of 46 GB each
    assert v3["fits"]["unified"]["gpus_for_weights"] == 12  # weights once
    assert v3["backend"] == "trt"
    assert v3["predictor"] == "predicted with coefficients of tensorrt-rtx 1.7.1"
    assert v3["expert_stacks"] == 2  # 256 x 2048 x 7168 > 2^31 > 128 x 2048 x 7168
    assert v3["dense_from_tokens"] == 256 // (8 * 2) + 1


def test_v3_decode_floor_on_an_h200(v3: dict) -> None:
    """8 tokens choose 256 (1 - (31/32)^8) = 57.4 experts; every byte once at 4.8 TB/s."""
    decode = v3["floors"][0]
    distinct = 256 * (1 - (1 - 8 / 256) ** 8)
    assert v3["distinct_experts"] == pytest.approx(distinct)
    assert distinct == pytest.approx(57.42, abs=0.01)
    attention = 1536 * 7168 + 128 * 192 * 1536 + 576 * 7168 + 128 * 256 * 512 + 7168 * 128 * 128
    read = (61 * attention * 2 + 61 * 576 * 2 * 8 * 32768 + 9 * 7168 * 18432 * 2
            + 58 * distinct * 3 * 7168 * 2048 * 2 + 58 * 256 * 7168 * 4 + 58 * 3 * 7168 * 2048 * 2
            + (129280 + 8) * 7168 * 2)
    assert decode["bytes"] == pytest.approx(read, rel=1e-4)  # norms are not counted
    assert decode["seconds"] == pytest.approx(read / 4.8e12, rel=1e-4)
    assert decode["bound"] == "bandwidth"
    assert decode["tokens_per_second"] == pytest.approx(8 / (read / 4.8e12), rel=1e-4)
    scores_and_mix = 2 * 61 * 128 * 8 * 32769 * (512 + 64 + 512)
    active = 61 * attention + 9 * 7168 * 18432 + 58 * (9 * 3 * 7168 * 2048 + 256 * 7168) + 129280 * 7168
    assert decode["flops"] == pytest.approx(scores_and_mix + 2 * 8 * active, rel=1e-4)


def test_v3_prefill_crosses_at_171_tokens(v3: dict) -> None:
    """A = 512 x 256 numbers rebuilt per row and head; absorbed costs 2 x 512 - 256 = 768 more per pair."""
    assert v3["crossover"]["limit"] == pytest.approx(512 * 256 / 768) == pytest.approx(170.7, abs=0.05)
    at = {row["past"]: row["tokens"] for row in v3["crossover"]["at"]}
    assert at[2048] == pytest.approx(512 * 256 * 2048 / (768 * 2048 + 512 * 256))
    absorbed, expanded = v3["floors"][1], v3["floors"][2]
    assert absorbed["flops"] > expanded["flops"]  # 512 new tokens over 32768
    assert crossover(preset_config("deepseek-v2-lite"), None) == pytest.approx(512 * 256 / 768)


def test_lite_does_not_fit_one_l4(lite: dict) -> None:
    """27 layers, the first dense; 26 x 64 experts of 1408 over D 2048: 28.8 GB of experts alone."""
    parts = lite["weights"]["parts"]
    assert parts["experts"] == 26 * 64 * 3 * 2048 * 1408 * 2 == 28_789_702_656
    assert parts["shared experts"] == 26 * 3 * 2048 * 2816 * 2
    assert parts["dense FFN"] == 3 * 2048 * 10944 * 2
    assert parts["attention projections"] == 27 * (16 * 192 * 2048 + 576 * 2048 + 2048 * 2048) * 2
    assert lite["weights"]["bytes"] == pytest.approx(15.7e9 * 2, rel=0.01)
    assert lite["backend"] == "trt-rtx"
    assert lite["fits"]["decode"]["gpus_for_weights"] == 2
    assert lite["cache_bytes"]["latent_per_token"] == 27 * 576 * 2


def test_lite_decode_floor_on_an_l4(lite: dict) -> None:
    decode = lite["floors"][0]
    distinct = 64 * (1 - (58 / 64) ** 8)
    attention = 16 * 192 * 2048 + 576 * 2048 + 16 * 256 * 512 + 2048 * 2048
    read = (27 * attention * 2 + 27 * 576 * 2 * 8 * 32768 + 3 * 2048 * 10944 * 2
            + 26 * distinct * 3 * 2048 * 1408 * 2 + 26 * 64 * 2048 * 4 + 26 * 3 * 2048 * 2816 * 2
            + (102400 + 8) * 2048 * 2)
    assert decode["bytes"] == pytest.approx(read, rel=1e-4)
    assert decode["seconds"] == pytest.approx(read / 300e9, rel=1e-4)


def test_largest_batch_fills_the_memory() -> None:
    """On one H200 the decode engine of V2-Lite leaves room for as many caches of 32768 rows as fit."""
    data = plan(PlanRequest("deepseek-v2-lite", gpu="h200", max_batch=8))
    fits = data["fits"]["decode"]
    assert fits["gpus"] == 1
    batch = next(row["batch"] for row in fits["batch_at"] if row["context"] == 32768)
    one, free = 27 * 576 * 2 * 32768, 141e9 * 0.95 - data["weights"]["bytes"]
    assert 0.85 * free / one < batch <= free / one  # the rest is activation, which grows with the batch
    contexts = [row["context"] for row in fits["context_at"]]
    assert contexts == sorted(contexts, reverse=True)
    assert all(a["batch"] >= b["batch"] for a, b in zip(fits["batch_at"], fits["batch_at"][1:], strict=False))
    both = data["fits"]["both"]
    assert next(row["batch"] for row in both["batch_at"] if row["context"] == 32768) < batch
    unified = next(row["batch"] for row in data["fits"]["unified"]["batch_at"] if row["context"] == 32768)
    lost = batch - unified  # to the prefill's scratch alone, an absorbed one
    assert 0 <= lost * one < 0.1 * data["weights"]["bytes"]


def test_leanest_form_is_named(lite: dict) -> None:
    decode = [row for row in lite["activation"] if row["kind"] == "decode"]
    assert [row["formulation"] for row in decode if row["leanest"]] == ["kqt"]
    by_name = {row["formulation"]: row["bytes"] for row in decode}
    assert by_name["qkt"] > 20 * by_name["kqt"]  # it holds transposed copies of every layer's cache


@pytest.mark.parametrize(("fields", "message"), [
    ({"gpu": "h300"}, "h200"), ({}, "--gpu NAME and --memory GB"), ({"gpu": "l4", "memory": 24.0}, "one of"),
    ({"memory": -1.0}, "positive"), ({"memory": 24.0, "dtype": "fp8"}, "fp32, fp16, bf16"),
    ({"memory": 24.0, "max_batch": 0}, "positive"), ({"memory": 2.0, "reserve": 3.0}, "all of the memory"),
])
def test_bad_requests(fields: dict, message: str) -> None:
    with pytest.raises(InputError, match=message):
        plan(PlanRequest("deepseek-v2-lite", **fields))


def test_unknown_model() -> None:
    with pytest.raises(InputError, match="presets:"):
        plan(PlanRequest("deepseek-v9", gpu="l4"))


def test_config_alone_and_memory_alone(tmp_path: Path) -> None:
    """A downloaded config.json is enough, and a size of memory in place of a GPU: no floor then, all else the same."""
    config = Path(__file__).resolve().parent.parent / "exporter" / "configs" / "minicpm3-4b.json"
    (tmp_path / "config.json").write_text(config.read_text())
    from_file = plan(PlanRequest(str(tmp_path / "config.json"), memory=24))
    from_folder = plan(PlanRequest(str(tmp_path), memory=24))
    preset = plan(PlanRequest("minicpm3-4b", memory=24))
    assert from_file["weights"] == from_folder["weights"] == preset["weights"]
    assert "seconds" not in preset["floors"][0]
    assert "head" not in preset["weights"]["parts"] or preset["weights"]["parts"]["head"] > 0


def test_shortcut_layers_hold_two_caches() -> None:
    """LongCat-Flash: 28 layers of two attentions; identity experts cost nothing."""
    data = plan(PlanRequest("longcat-flash", gpu="b200"))
    c = preset_config("longcat-flash")
    assert data["cache_bytes"]["latent_per_token"] == 2 * c.num_hidden_layers * c.row_dim * 2
    assert data["distinct_experts"] < 512


def test_command_line() -> None:
    """One JSON object; an unknown GPU is exit code 2 with the known names."""
    command = [sys.executable, "-m", "engines", "plan", "deepseek-v2-lite"]
    good = subprocess.run([*command, "--gpu", "l4", "--json"], capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert json.loads(good.stdout)["model"] == "deepseek-v2-lite"
    bad = subprocess.run([*command, "--gpu", "gtx-1080"], capture_output=True, text=True)
    assert bad.returncode == 2
    assert all(name in bad.stderr for name in GPUS)
    shown = subprocess.run([*command, "--gpu", "l4"], capture_output=True, text=True)
    assert shown.returncode == 0
    assert "What fits" in shown.stdout


def test_gpus_are_plausible() -> None:
    for g in GPUS.values():
        assert g.source
        assert g.fp8 is None or g.fp8 == pytest.approx(2 * g.fp16, rel=0.03)
        assert (g.backend == "trt") == (g.capability in ("9.0", "10.0"))


def test_a_quantised_cache_is_counted_by_its_row() -> None:
    """512 codes, one scale and 64 rotary columns: 642 bytes at fp16 where 1152 are without."""
    wide = plan(PlanRequest("deepseek-v2-lite", gpu="l4"))
    narrow = plan(PlanRequest("deepseek-v2-lite", gpu="l4", cache_dtype="int8"))
    assert narrow["cache_bytes"]["latent_per_token"] == 27 * (512 + 2 + 2 * 64)
    assert wide["cache_bytes"]["latent_per_token"] == 27 * 2 * 576
    least = [row for row in narrow["activation"] if row["leanest"] and row["kind"] == "decode"]
    assert [row["formulation"] for row in least] == ["kqt-blocks"]
    saved = wide["floors"][0]["bytes"] - narrow["floors"][0]["bytes"]
    assert saved == 27 * 8 * 32768 * (1152 - 642)
    with pytest.raises(InputError, match="--cache-dtype int8 with the scatter form: only the append form"):
        plan(PlanRequest("deepseek-v2-lite", gpu="l4", cache="scatter", cache_dtype="int8"))
    with pytest.raises(InputError, match="--cache-dtype 'fp4': expected one of fp8, int8"):
        PlanRequest("deepseek-v2-lite", gpu="l4", cache_dtype="fp4")


@pytest.mark.parametrize(("name", "scheme"), [("v3", "fp8"), ("kimi-k2", "int4"), ("v2-lite", "int4"),
                                              ("longcat", "fp8")])
def test_codes_are_counted_as_an_export_stores_them(name: str, scheme: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", name)
    asked: dict[str, Any] = {"memory": 8, "max_context": 64, "reserve": 0.5}
    data = plan(PlanRequest(str(checkpoint), dtype="fp16", quantise=scheme, **asked))
    made = export(ExportRequest(str(checkpoint), tmp_path / "export", dtype="fp16", quantise=scheme, target="trt-rtx",
                                max_context=64))
    raw = (made.folder / "weights.safetensors").read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    stored = sum(t["data_offsets"][1] - t["data_offsets"][0] for n, t in header.items()
                 if n != "__metadata__" and not n.startswith("rope."))
    assert data["weights"]["bytes"] == stored
    assert plan(PlanRequest(str(made.folder), **asked))["weights"] == data["weights"]  # the export says it itself


def test_codes_are_read_in_place_of_numbers(v3: dict) -> None:
    """FP8: a byte a number and two a channel, but for W_UK, W_UV, embedding, head, norms and router."""
    codes = plan(PlanRequest("deepseek-v3", gpu="h200", dtype="bf16", quantise="fp8"))
    ours, wide = codes["weights"]["parts"], v3["weights"]["parts"]
    assert ours["experts"] == wide["experts"] // 2 + 58 * 256 * 2 * (2 * 2048 + 7168)
    same = [part for part in wide if ours[part] == wide[part]]
    assert sorted(same) == ["W_UK and W_UV, absorbed", "embedding", "head", "norms", "router"]
    parts = {p["part"]: p["bytes"] for p in codes["floors"][0]["parts"]}
    assert parts["experts chosen"] == pytest.approx(ours["experts"] * codes["distinct_experts"] / 256)
    absorbed, norms = ours["W_UK and W_UV, absorbed"], 61 * 2 * (1536 + 512)  # of the two latents
    assert parts["attention projections"] == ours["attention projections"] + absorbed + norms
    assert codes["fits"]["decode"]["gpus"] == 6
    with pytest.raises(InputError, match="--quantise 'nf4': expected one of fp8, int8, int4"):
        PlanRequest("deepseek-v3", gpu="h200", quantise="nf4")
