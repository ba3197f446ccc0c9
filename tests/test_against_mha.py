"""An MLA is the multi-head attention that its weights compose: equal to rounding, and caught where it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.presets import PRESETS
from tests.conftest import DISTINCT
from tests.model_checkpoints import MODELS, tiny_checkpoint
from validate import against_mha as module
from validate.__main__ import cli
from validate.against_mha import against_mha, compared
from validate.faults import FAULTS
from validate.references import load_tensors


@pytest.mark.parametrize("name", DISTINCT)
def test_every_preset_is_its_mha(narrow: list[str], name: str) -> None:
    found = against_mha(f"narrow-{name}")
    assert found.passed
    assert [r.what for r in found.rows] == ["MLA, float64"]
    assert found.rows[0].rel < 1e-9  # to rounding, far below the limit
    c = PRESETS[f"narrow-{name}"]
    assert found.mla_bytes == 2 * (c.kv_lora_rank + c.qk_rope_head_dim)
    assert found.mha_bytes == 2 * c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim)
    assert found.rows[0].verdict == "sound (cosine >= 0.95)"


@pytest.mark.parametrize("name", ["v3", "longcat", "minicpm3", "transmla", "v3-bias"])
def test_every_attention_of_a_model(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    assert name in MODELS
    folder = tiny_checkpoint(tmp_path / "c", name)
    found = against_mha(str(folder))
    made = export(ExportRequest(str(folder), tmp_path / "x", max_context=60))
    again = against_mha(str(made.folder))
    assert found.passed
    assert again.passed
    assert len(found.rows) == len(again.rows) == made.attentions
    assert any("a model's are held against whole decoders" in line for line in again.not_run)


@pytest.mark.parametrize("request_", [{}, {"cache": "scatter"}, {"cache": "concat"}, {"dtype": "bf16"},
                                      {"prefill": "expanded"}, {"causal": False}])
@pytest.mark.parametrize("name", ["deepseek-v3", "article"])
def test_graphs_are_held_against_it(narrow: list[str], tmp_path: Path, name: str, request_: dict[str, Any]) -> None:
    made = export(ExportRequest(f"narrow-{name}", tmp_path / "x", max_context=60, **request_))
    found = against_mha(str(made.folder))
    assert found.passed, found.failure
    assert {r.what.split(".")[0] for r in found.rows[1:]} == {g.kind for g in made.graphs}
    assert found.dtype == made.dtype


def test_another_mha_is_told_apart(narrow: list[str]) -> None:
    """K and V read the wrong way round: the verdict is the article's, and the place is named."""
    config = PRESETS["narrow-deepseek-v3"]
    tensors = load_tensors({"kind": "preset", "name": "narrow-deepseek-v3", "seed": 0}, config)
    wrong = dict(tensors)
    H, nope, v = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    heads = tensors["kv_b_proj.weight"].reshape(H, nope + v, -1)
    wrong["kv_b_proj.weight"] = torch.cat([heads[:, :nope].flatten(0, 1), heads[:, nope:].flatten(0, 1)])
    found = compared(config, tensors, wrong, max_context=60)
    assert not found.within(module.TOLERANCE)
    assert "worst at step" in found.sentence
    assert module.verdict(found.cosine).startswith("unsound")
    scaled = tensors | {"kv_a_layernorm.weight": tensors["kv_a_layernorm.weight"] * 1.0001}
    assert not compared(config, tensors, scaled, max_context=60).within(module.TOLERANCE)


def test_a_faulty_export_is_told_apart(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", max_context=60),
                  tamper=FAULTS["rope-layout"].tamper)
    result = CliRunner().invoke(cli, ["parity", str(made.folder), "--against", "mha", "--json"])
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert not data["pass"]
    assert [r["pass"] for r in data["rows"]] == [True, False, False]
    assert data["rows"][1]["worst"]["axes"] == ["step", "sequence", "token", "column"]


def test_the_command(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", max_context=60))
    shown = CliRunner().invoke(cli, ["parity", str(made.folder), "--against", "mha"])
    assert shown.exit_code == 0
    assert "sound (cosine >= 0.95)" in shown.stdout
    assert "MLA 224 B, MHA 2880 B" in shown.stdout
    refused = CliRunner().invoke(cli, ["parity", str(made.folder), "--against", "mha", "--dtype", "fp16"])
    assert isinstance(refused.exception, InputError)
    both = CliRunner().invoke(cli, ["parity", str(made.folder), "--against", "mha", "--find-layer"])
    assert isinstance(both.exception, InputError)
