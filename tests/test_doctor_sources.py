"""The doctor on checkpoints, state_dicts and training: shapes, traps of config.json, FP8 scales, bytes of a step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from exporter.__main__ import cli as exporter_cli
from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.presets import PRESETS
from tests.checkpoints import article_state_dict
from tests.conftest import narrowed
from tests.model_checkpoints import tiny_checkpoint
from tests.quantised_checkpoints import Checkpoint, fp8_block
from validate.__main__ import cli
from validate.doctor import DoctorRequest, examine
from validate.doctor_ailments import AILMENTS, Report
from validate.doctor_training import KEPT, training_step

pytest.importorskip("transformers")
Tensors = dict[str, torch.Tensor]


def names(report: Report) -> set[str]:
    return {f.name for f in report.findings}


# ---- the article's layer


def state_dict(path: Path, change: Callable[[Tensors], None] = lambda t: None) -> Report:
    tensors = article_state_dict()
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path)
    return examine(DoctorRequest(str(path)))


def test_sound_state_dict(tmp_path: Path) -> None:
    report = state_dict(tmp_path / "s.safetensors")
    assert report.findings == []
    assert report.examined


def cut(name: str, rows: int) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        for part in ("weight", "bias"):
            t[f"{name}.{part}"] = t[f"{name}.{part}"][:rows]

    return change


def both(*changes: Callable[[Tensors], None]) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        for c in changes:
            c(t)

    return change


def narrow(name: str, columns: int) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        t[f"{name}.weight"] = t[f"{name}.weight"][:, :columns]

    return change


def without_buffers(t: Tensors) -> None:
    for name in [n for n in t if n.startswith("rope_")]:
        del t[name]


def key_for_every_head(t: Tensors) -> None:
    """proj_kr as wide as proj_qr: the field's mistake."""
    for part in ("weight", "bias"):
        t[f"proj_kr.{part}"] = t[f"proj_qr.{part}"].clone()


def spoiled(t: Tensors) -> None:
    t["fc.weight"][0, 0] = float("nan")


SHAPES: list[tuple[Callable[[Tensors], None], str, str]] = [
    (cut("proj_qr", 26), "shape-mismatch", "proj_qr is [26, 512], one head's rotary columns; expected rope_head_dim x "
     "heads, a multiple of proj_kr's 26 (52 for 2 heads, 104 for 4 heads, 208 for 8 heads); the file's inv_freq says "
     "26 rotary columns"),
    (cut("proj_qr", 200), "shape-mismatch", "7.69 heads' rotary columns"),
    (cut("up_proj_q", 250), "shape-mismatch", "up_proj_q is [250, 128]; expected 256 rows, as up_proj_k"),
    (narrow("fc", 250), "shape-mismatch", "fc is [512, 250]; expected 256 columns, heads x v"),
    (narrow("up_proj_k", 100), "shape-mismatch", "expected 128 columns, the latent's width"),
    (both(cut("proj_kr", 25), cut("proj_qr", 200)), "odd-rope-dim", "proj_kr gives 25 columns"),
    (key_for_every_head, "shape-mismatch", "proj_kr is [208, 512]; expected 26 rows, the rotary columns that the "
     "file's inv_freq says: one key for all 8 heads"),
    (both(key_for_every_head, without_buffers), "shape-mismatch", "either proj_qr is [208, 512], one head's rotary "
     "columns; expected rope_head_dim x heads, a multiple of proj_kr's 208 (416 for 2 heads, 832 for 4 heads, 1664 for "
     "8 heads); or proj_kr is [208, 512], made for every head where one key serves all; expected proj_qr's 208 / heads "
     "rows (104 for 2 heads, 52 for 4 heads, 26 for 8 heads). The shapes do not say how many heads there are"),
    (both(cut("proj_qr", 26), without_buffers), "shape-mismatch", "no number of heads divides 26 into even widths"),
    (lambda t: t.pop("up_proj_v.weight"), "tensor-missing", "up_proj_v not there"),
    (both(lambda t: t.pop("fc.weight"), narrow("up_proj_k", 100)), "shape-mismatch", "up_proj_k is [256, 100]; "
     "expected 128 columns"),
    (narrow("down_proj_kv", 500), "shape-mismatch", "down_proj_kv is [128, 500]; expected 512 columns, d_model"),
    (lambda t: t.pop("fc.bias"), "tensor-missing", "fc.bias [512] is not there"),
    (spoiled, "not-finite", "fc.weight: 1 of 131072 values")]


@pytest.mark.parametrize(("change", "name", "words"), SHAPES, ids=lambda v: v[:30] if isinstance(v, str) else "")
def test_shapes_that_do_not_match(change: Callable[[Tensors], None], name: str, words: str, tmp_path: Path) -> None:
    report = state_dict(tmp_path / "s.safetensors", change)
    assert not report.passed
    assert any(f.name == name and words in f.evidence for f in report.findings), report.findings


def test_what_is_there_is_examined(tmp_path: Path) -> None:
    """Two projections that do not fit, and six that are missing."""
    save_file({"down_proj_kv.weight": torch.zeros(128, 512), "up_proj_k.weight": torch.zeros(512, 130)},
              tmp_path / "s.safetensors")
    report = examine(DoctorRequest(str(tmp_path / "s.safetensors")))
    assert any("up_proj_k is [512, 130]; expected 128 columns" in f.evidence for f in report.findings)
    assert all("fetch the checkpoint" not in f.cure for f in report.findings)
    assert [why for name, why in report.not_examined if name.startswith("shapes of up_proj_v, ")]


def test_heads_that_are_a_guess_are_said(tmp_path: Path) -> None:
    """Shapes of one head export; that they may not be meant so is said."""
    for name, heads, said in (("one", 1, True), ("four", 4, False)):
        save_file(article_state_dict(d_model=64, down_dim=16, up_dim=32, num_heads=heads, rope_head_dim=8, max_len=64),
                  tmp_path / f"{name}.safetensors")
        words = (["inspect", str(tmp_path / f"{name}.safetensors")],
                 ["export", str(tmp_path / f"{name}.safetensors"), "--out", str(tmp_path / name)])
        assert [("1 head, a guess" in CliRunner().invoke(exporter_cli, w).stdout) for w in words] == [said, said]


def test_no_layer_of_the_article(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "s.safetensors")
    with pytest.raises(InputError, match="no state_dict of the article"):
        examine(DoctorRequest(str(tmp_path / "s.safetensors")))


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "s.pt").write_bytes(b"never read")
    with pytest.raises(InputError, match=r"expected \.safetensors"):
        examine(DoctorRequest(str(tmp_path / "s.pt")))


# ---- checkpoints


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("v3") / "c", "v3")


def altered(source: Path, out: Path, config: dict[str, Any] | None = None,
            change: Callable[[Tensors], None] = lambda t: None) -> Report:
    out.mkdir()
    raw = json.loads((source / "config.json").read_text()) | (config or {})
    (out / "config.json").write_text(json.dumps(raw))
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return examine(DoctorRequest(str(out)))


A = "model.layers.1.self_attn."


def drop_norms(t: Tensors) -> None:
    for name in [n for n in t if n.endswith(("kv_a_layernorm.weight", "q_a_layernorm.weight"))]:
        del t[name]


CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[Tensors], None], str]] = {
    "shape-mismatch": ({}, lambda t: t.update({f"{A}kv_b_proj.weight": t[f"{A}kv_b_proj.weight"][:100]}),
                       "is [100, 16]; expected [128, 16], heads x (nope + v) = 4 x (20 + 12)"),
    "odd-rope-dim": ({"qk_rope_head_dim": 9}, lambda t: None, "qk_rope_head_dim is 9"),
    "head-dim-mismatch": ({"qk_head_dim": 26}, lambda t: None, "qk_head_dim is 26; nope + rope = 20 + 10 = 30"),
    "rope-type-missing": ({"rope_parameters": {"rope_theta": 1e4, "factor": 40.0, "mscale_all_dim": 1.0}},
                          lambda t: None, "states factor, mscale_all_dim and no rope_type"),
    "latent-norm-missing": ({}, drop_norms, "layernorm.weight [24] is not there, and 2 more like it"),
    "latent-norm-unused": ({"qk_latent_layernorm": False}, lambda t: None, "is not used"),
    "tensor-missing": ({}, lambda t: t.pop(f"{A}o_proj.weight"), "o_proj.weight [64, 48] is not there"),
    "tensor-unknown": ({}, lambda t: t.update({f"{A}gate.weight": torch.zeros(2, 2)}), "gate.weight [2, 2]"),
    "depth-mismatch": ({"num_hidden_layers": 2}, lambda t: None, "the weights hold a layer 2"),
    "not-finite": ({}, lambda t: t[f"{A}o_proj.weight"].fill_(float("inf")), "values are NaN or infinite")}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, v3: Path, tmp_path: Path) -> None:
    config, change, words = CHECKPOINTS[name]
    report = altered(v3, tmp_path / "c", config, change)
    assert name in names(report)
    assert any(words in f.evidence for f in report.findings if f.name == name), report.findings


CORRECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what config.json states, what the tensors imply
    "latent": ({"kv_lora_rank": 36}, {"kv_lora_rank": 16}), "query": ({"q_lora_rank": 20}, {"q_lora_rank": 24}),
    "no-query-rank": ({"q_lora_rank": None}, {"q_lora_rank": 24}),
    "heads": ({"num_attention_heads": 8}, {"num_attention_heads": 4}),
    "split": ({"qk_nope_head_dim": 24, "v_head_dim": 8}, {"qk_nope_head_dim": 20, "v_head_dim": 12}),
    "rope": ({"qk_rope_head_dim": 12}, {"qk_rope_head_dim": 10}),
    "all-of-heads": ({"num_attention_heads": 2, "qk_nope_head_dim": 30, "v_head_dim": 30, "qk_rope_head_dim": 8},
                     {"num_attention_heads": 4, "qk_nope_head_dim": 20, "v_head_dim": 12, "qk_rope_head_dim": 10}),
    "hidden": ({"hidden_size": 128}, {"hidden_size": 64}), "vocab": ({"vocab_size": 200}, {"vocab_size": 160}),
    "ffn": ({"intermediate_size": 100}, {"intermediate_size": 96}),
    "experts": ({"n_routed_experts": 6}, {"n_routed_experts": 12}),
    "expert-width": ({"moe_intermediate_size": 20}, {"moe_intermediate_size": 40}),
    "shared": ({"n_shared_experts": 3}, {"n_shared_experts": 1}),
    "dense": ({"first_k_dense_replace": 0}, {"first_k_dense_replace": 1}),
    "two": ({"kv_lora_rank": 36, "first_k_dense_replace": 2}, {"kv_lora_rank": 16, "first_k_dense_replace": 1})}


@pytest.mark.parametrize("name", CORRECTED)
def test_fields_that_the_tensors_contradict(name: str, v3: Path, tmp_path: Path) -> None:
    """Named with the value that the tensors imply; all findings are of config.json, none says to fetch weights."""
    stated, implied = CORRECTED[name]
    report = altered(v3, tmp_path / "c", stated)
    assert not report.passed
    assert {f.where for f in report.findings} == {"config.json"}, report.findings
    told = " ".join(f.cure for f in report.findings)
    assert "fetch the checkpoint" not in told
    for field in json.loads((v3 / "config.json").read_text()):
        assert (f" {field}: " in told) == (field in implied), told
    for field, value in implied.items():
        assert f"{field}: {value}" in told
        assert any(f"{field} is {json.dumps(stated[field])}; the tensors imply {value} (" in f.cause
                   for f in report.findings)


def test_findings_of_one_ailment_are_one(v3: Path, tmp_path: Path) -> None:
    altered(v3, tmp_path / "c", {"kv_lora_rank": 36, "first_k_dense_replace": 0})
    shown = CliRunner().invoke(cli, ["doctor", str(tmp_path / "c")], standalone_mode=False)
    assert shown.stdout.count("symptom") == 3
    assert str(shown.exception) == "3 found: shape-mismatch x 3, tensor-missing x 7, tensor-unknown x 3"
    assert "and 1 more: see --json" in shown.stdout
    data = json.loads(CliRunner().invoke(cli, ["doctor", str(tmp_path / "c"), "--json"]).stdout)
    assert [len(f["evidence"].split("\n")) for f in data["findings"]] == [3, 7, 3]


def lost(part: str) -> Callable[[Tensors], None]:
    def change(t: Tensors) -> None:
        for name in [n for n in t if part in n]:
            del t[name]

    return change


@pytest.mark.parametrize(("change", "name"), [
    (lost("layers.1.mlp."), "tensor-missing"), (lost("layers.0.mlp."), "tensor-missing"),
    (lost("embed_tokens"), "tensor-missing"), (lost("q_a_proj"), "tensor-missing"),
    (CHECKPOINTS["shape-mismatch"][1], "shape-mismatch")])
def test_weights_that_are_broken_blame_no_configuration(change: Callable[[Tensors], None], name: str, v3: Path,
                                                        tmp_path: Path) -> None:
    report = altered(v3, tmp_path / "c", change=change)
    assert names(report) == {name}
    assert {f.where for f in report.findings} == {""}
    assert {f.cure for f in report.findings} == {AILMENTS[name].cure}


def test_a_configuration_and_a_tensor_are_both_wrong(v3: Path, tmp_path: Path) -> None:
    """What is left is held against the configuration that the others imply."""
    report = altered(v3, tmp_path / "c", {"kv_lora_rank": 36}, CHECKPOINTS["shape-mismatch"][1])
    ours, theirs = report.findings
    assert (ours.where, theirs.where) == ("config.json", "")
    assert "is [100, 16]; expected [128, 16], heads x (nope + v)" in theirs.evidence


def test_another_architecture_is_bad_input(v3: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not an MLA family"):
        altered(v3, tmp_path / "c", {"model_type": "llama"})


def test_config_alone(v3: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((v3 / "config.json").read_text())
    report = examine(DoctorRequest(str(tmp_path / "config.json")))
    assert report.findings == []
    assert ("tensors", "the folder holds a config.json and no weights") in report.not_examined


# ---- FP8


@pytest.mark.parametrize("powers", [None, "F32"])
def test_sound_codes(powers: str | None, v3: Path, tmp_path: Path) -> None:
    report = examine(DoctorRequest(str(Checkpoint.read(v3).fp8_block((8, 8), ue8m0=powers).write(tmp_path / "q"))))
    assert report.findings == []
    assert any(line.startswith("FP8: codes of") for line in report.examined)


def recoded(source: Path, out: Path, change: Callable[[Tensors, str], None]) -> Report:
    """A quantised checkpoint of which each matrix's codes or scales are changed."""
    quantised = Checkpoint.read(source).fp8_block((8, 8))
    tensors = dict(quantised.tensors)
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        change(tensors, name.removesuffix("_scale_inv"))
    return examine(DoctorRequest(str(Checkpoint(tensors, quantised.config, quantised.exact).write(out))))


def test_blocks_of_another_size(v3: Path, tmp_path: Path) -> None:
    """26 rows of kv_a are 4 blocks of 8 rows, and of 7: the same scales' shape, other borders."""
    exact = load_file(v3 / "model.safetensors")

    def change(t: Tensors, name: str) -> None:
        if "kv_a_proj" in name:
            t[name], t[f"{name}_scale_inv"], _ = fp8_block(exact[name], (7, 8))

    report = recoded(v3, tmp_path / "q", change)
    assert names(report) == {"fp8-block"}
    assert "in blocks of 7 rows all do" in report.findings[0].evidence


def test_scales_to_be_divided_by(v3: Path, tmp_path: Path) -> None:
    def change(t: Tensors, name: str) -> None:
        t[f"{name}_scale_inv"] = 1 / t[f"{name}_scale_inv"]

    report = recoded(v3, tmp_path / "q", change)
    assert names(report) == {"fp8-scale-inverted"}
    assert "divided by the scale" in report.findings[0].evidence


def test_no_scale(v3: Path, tmp_path: Path) -> None:
    def change(t: Tensors, name: str) -> None:
        if "1.self_attn.o_" in name:
            del t[f"{name}_scale_inv"]

    report = recoded(v3, tmp_path / "q", change)
    assert names(report) == {"fp8-scale-missing"}


# ---- training


@pytest.mark.parametrize("model", ["article", "deepseek-v3", "deepseek-v2-lite", "minicpm3-4b"])
@pytest.mark.parametrize(("dtype", "batch"), [("fp32", 2), ("bf16", 1)])
def test_formula_and_count_agree(model: str, dtype: str, batch: int) -> None:
    """Byte for byte; in float32 the layer really runs, forward and backward."""
    step = training_step(model, narrowed(model), batch=batch, tokens=24, dtype=dtype)
    for held in (step.with_rank, step.without):
        assert held.measured == held.activations
        assert held.really_run == (dtype == "fp32")
        assert set(held.activations) == set(KEPT)
        assert held.optimiser == held.parameters * (8 if dtype == "fp32" else 12)


def test_formulas_parameters_are_the_layers() -> None:
    """AdamW's states after a real step, and the article's own parameters."""
    weights = {n: torch.zeros(4, 3, requires_grad=True) for n in "ab"}
    optimiser = torch.optim.AdamW(weights.values())
    sum(w.sum() for w in weights.values()).backward()  # type: ignore[union-attr]
    optimiser.step()
    held = sum(t.nbytes for s in optimiser.state.values() for n, t in s.items() if n != "step")
    assert held == 8 * 24
    step = training_step("article", PRESETS["article"], batch=1, tokens=8, dtype="fp32")
    own = sum(t.numel() for n, t in article_state_dict().items() if not n.startswith("rope_"))
    assert step.with_rank.parameters == own


def test_training_report(tmp_path: Path) -> None:
    code = CliRunner().invoke(cli, ["doctor", "deepseek-v3", "--training", "--json"], standalone_mode=False)
    data = json.loads(code.stdout)
    assert data["pass"]
    assert data["training"]["with_rank"]["parameters"] == 187107328
    shown = CliRunner().invoke(cli, ["doctor", "article", "--training", "--tokens", "64"])
    assert "the low rank may be switched off at inference" in shown.stdout
    assert "the same bytes" in shown.stdout


def test_query_without_a_low_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of DeepSeek-V3's width it is worth one; of V2-Lite's 16 heads it is not, and nothing is said."""
    from dataclasses import replace

    wide: MLAConfig = replace(PRESETS["deepseek-v3"], q_lora_rank=None)
    monkeypatch.setitem(PRESETS, "wide", wide)
    report = examine(DoctorRequest("wide", training=True, tokens=512))
    assert names(report) == {"query-not-compressed"}
    assert report.passed  # advice
    assert names(examine(DoctorRequest("deepseek-v2-lite", training=True, tokens=512))) == set()
