"""Whole models from quantised checkpoints: the same logits as the dequantised float32 copy, and as transformers on it.

FP8 at DeepSeek's own block size with 576 ragged rows (4.5 blocks), ue8m0 scales, DeepSeek's layout, packed int4 experts
in a vision-language wrapper, fused experts. Export and copy must agree bit for bit: dequantising is exact.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engines.backends import open_session
from engines.cache import LatentCache
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests.model_checkpoints import tiny_checkpoint
from tests.quantised_checkpoints import Checkpoint
from tests.transformers_oracle import Oracle

TOKENS, STEPS, CONTEXT = 40, 8, 128
# latent 512 + 64 rotary = 576 rows: four and a half blocks of 128
RAGGED: dict[str, Any] = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "hidden_size": 192, "intermediate_size": 288,
                          "moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def ragged(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.read(tiny_checkpoint(tmp_path_factory.mktemp("ragged"), "v3", layers=2, **RAGGED))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.read(tiny_checkpoint(tmp_path_factory.mktemp("small"), "v3", layers=2, hidden_size=64,
                                           moe_intermediate_size=32))


def exact_copy(folder: Path, checkpoint: Checkpoint) -> Path:
    """The dequantised float32 copy, as transformers would have saved it."""
    folder.mkdir()
    tensors = {name: t.float().contiguous() for name, t in checkpoint.exact.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def token_ids(made: Export) -> np.ndarray:
    return np.random.default_rng(5).integers(0, made.decoder.vocab_size, (1, TOKENS))


def logits(made: Export) -> np.ndarray:
    """Logits after a prefill of TOKENS - STEPS tokens and of STEPS decode steps, [STEPS + 1, V]."""
    ids, cache = token_ids(made), LatentCache(made, 1, TOKENS)
    start, found = TOKENS - STEPS, []
    with open_session(made, "prefill", "ort") as prefill, open_session(made, "decode", "ort") as decode:
        outputs = prefill.infer({"input_ids": ids[:, :start], "last_token": np.array([start - 1]), **cache.feed()})
        cache.commit(outputs, start)
        found.append(outputs["logits"][0])
        for step in range(STEPS):
            outputs = decode.infer({"input_ids": ids[:, start + step:start + step + 1], **cache.feed()})
            cache.commit(outputs, 1)
            found.append(outputs["logits"][0])
    return np.stack(found)


def made_from(folder: Path, out: Path, **options: Any) -> Export:
    return export(ExportRequest(str(folder), out, max_context=CONTEXT, **options))


FORMS = {
    "fp8": lambda c: c.fp8_block(),
    "fp8, ue8m0": lambda c: c.fp8_block(ue8m0="F8_E8M0"),
    "fp8, deepseek's layout": lambda c: c.fp8_block().deepseek_names(),
    "bf16 weights, deepseek's layout": lambda c: c.deepseek_names(),
    "fused experts": lambda c: c.fused_experts(),
}


@pytest.mark.parametrize("form", FORMS)
def test_ragged_fp8_and_layouts(ragged: Checkpoint, tmp_path: Path, form: str) -> None:
    stored = FORMS[form](ragged)
    if "fp8" in form:
        scales = [n for n in stored.tensors if "wkv_a" in n or "kv_a_proj_with_mqa" in n]
        assert {tuple(stored.tensors[n].shape) for n in scales} >= {(576, 192), (5, 2)}, "576 rows, 5 rows of scales"
    stored.write(tmp_path / "stored")
    exact = exact_copy(tmp_path / "exact", stored)
    found = logits(made_from(tmp_path / "stored", tmp_path / "a"))
    np.testing.assert_array_equal(found, logits(made_from(exact, tmp_path / "b")))
    theirs = Oracle(exact).logits(token_ids(made_from(exact, tmp_path / "c")))[0, TOKENS - STEPS - 1:]
    assert np.abs(found - theirs).max() / theirs.std() <= 1e-4


@pytest.mark.parametrize("form", ["plain", "wrapped"])
def test_packed_int4_experts(small: Checkpoint, tmp_path: Path, form: str) -> None:
    stored = small.int4_packed()
    exact = exact_copy(tmp_path / "exact", stored)
    if form == "wrapped":
        stored = stored.wrapped()
    stored.write(tmp_path / "stored")
    found = logits(made_from(tmp_path / "stored", tmp_path / "a"))
    np.testing.assert_array_equal(found, logits(made_from(exact, tmp_path / "b")))
    unquantised = exact_copy(tmp_path / "unquantised", small)
    assert np.abs(found - logits(made_from(unquantised, tmp_path / "c"))).max() > 1e-2  # it was quantised at all


def test_a_wrong_scale_would_show(ragged: Checkpoint, tmp_path: Path) -> None:
    """One block's scale off by 2: rel far above any tolerance, so the equality above means something."""
    stored = ragged.fp8_block()
    exact = exact_copy(tmp_path / "exact", stored)
    name = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    scale = stored.tensors[name].clone()
    scale[4, 1] *= 2  # the ragged corner: rows 512 to 575 are the rotary key
    Checkpoint(stored.tensors | {name: scale}, stored.config, stored.exact).write(tmp_path / "stored")
    found, right = (logits(made_from(f, tmp_path / f.name[0])) for f in (tmp_path / "stored", exact))
    assert np.abs(found - right).max() / right.std() > 1e-2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_one_attention_of_a_quantised_checkpoint(ragged: Checkpoint, tmp_path: Path, dtype: str) -> None:
    stored = ragged.fp8_block()
    stored.write(tmp_path / "stored")
    exact = exact_copy(tmp_path / "exact", stored)
    hidden = np.random.default_rng(1).standard_normal((1, 9, 192)).astype(np.float32 if dtype == "fp32" else np.float16)
    outputs = []
    for folder in (tmp_path / "stored", exact):
        made = made_from(folder, tmp_path / f"out-{folder.name}", layer=1, dtype=dtype)
        with open_session(made, "prefill", "ort") as session:
            outputs.append(session.infer({"hidden_states": hidden, **LatentCache(made, 1, 16).feed()})["attn_output"])
    np.testing.assert_array_equal(*outputs)
    assert torch.isfinite(torch.from_numpy(outputs[0].astype(np.float32))).all()
