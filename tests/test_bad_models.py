"""Whole models that cannot be exported: one line naming what arrived, what was expected and what to do; nothing left.

The helpers are those of test_bad_input.py. Every case damages a tiny checkpoint that exports as it is.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines.ort import OrtSession
from exporter.export import ExportRequest, export
from exporter.families import FAMILIES, REFUSED
from exporter.manifest import Export, open_export
from exporter.rope import frequencies
from tests.checkpoints import FACTOR, HEADS, HIDDEN, KV_RANK, NOPE, ORIGINAL_POSITIONS, POSITIONS, ROPE, V, hot_
from tests.model_checkpoints import EXPERTS, VOCAB, tiny_checkpoint
from tests.quantised_checkpoints import Checkpoint
from tests.test_bad_input import INDEX, SINGLE, Cli, Damage, set_config, tree, with_value
from validate.metrics import compare

LAYER = "model.layers.1."
EXPERT = f"{LAYER}mlp.experts.3."
BELONG = r"\(does config.json belong to these weights\?\)$"
Change = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    return Cli(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by their name, each made once and never changed."""
    folder, made = tmp_path_factory.mktemp("pristine"), dict[str, Path]()

    def make(name: str, **options: Any) -> Path:
        key = "-".join([name, *options])
        if key not in made:
            made[key] = tiny_checkpoint(folder / key, name, **options)
        return made[key]

    return make


@pytest.fixture
def v3(pristine: Callable[..., Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine("v3"), tmp_path / "model"))


def tensors(**changes: torch.Tensor | Change | None) -> Damage:
    """Rewrite model.safetensors: tensors by full name (`__` for a dot); None removes one."""
    def damage(folder: Path) -> None:
        found = load_file(folder / SINGLE)
        for key, change in changes.items():
            name = key.replace("__", ".")
            if change is None:
                del found[name]
            else:
                found[name] = (change(found[name].clone()) if callable(change) else change).contiguous()
        save_file(found, folder / SINGLE, metadata={"format": "pt"})
    return damage


def tensor(name: str, change: torch.Tensor | Change | None) -> Damage:
    return tensors(**{name.replace(".", "__"): change})


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


@pytest.mark.parametrize("name", ["v3", "youtu", "longcat", "glm4"])
def test_undamaged_models_export(name: str, pristine: Callable[..., Path], command: Cli) -> None:
    code, out, err = command.run("export", pristine(name), "--out", command.out, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["folder"] == str(command.out)
    assert [p.name for p in command.out.parent.iterdir()] == ["out"]


# --- Tensors ----------------------------------------------------------------------------------------------------------


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1]


_OTHER_DTYPE = r"has dtype I32; expected one of F64, F32, F16, BF16; dequantise the checkpoint first, or use its bf16"
_AS_CONFIG = r"; config.json asks for "
TENSORS: dict[str, tuple[Damage, str]] = {
    "integers": (tensor(f"{EXPERT}up_proj.weight", lambda t: t.to(torch.int32)),
                 rf"tensor {EXPERT}up_proj.weight {_OTHER_DTYPE}"),
    "integer embedding": (tensor("model.embed_tokens.weight", lambda t: t.to(torch.int32)),
                          rf"tensor model.embed_tokens.weight {_OTHER_DTYPE}"),
    "integer norm": (tensor(f"{LAYER}input_layernorm.weight", lambda t: t.to(torch.int32)),
                     rf"tensor {LAYER}input_layernorm.weight {_OTHER_DTYPE}"),
    "vocabulary": (tensor("model.embed_tokens.weight", cut),
                   rf"tensor model.embed_tokens.weight has shape \[{VOCAB - 1}, 64\]{_AS_CONFIG}\[{VOCAB}, 64\] "
                   rf"{BELONG}"),
    "head": (tensor("lm_head.weight", cut),
             rf"tensor lm_head.weight has shape \[{VOCAB - 1}, 64\]{_AS_CONFIG}\[{VOCAB}, 64\] {BELONG}"),
    "no head": (tensor("lm_head.weight", None), rf"tensor lm_head.weight \[{VOCAB}, 64\] is missing{_AS_CONFIG}it"),
    "no norm": (tensor("model.norm.weight", None),
                rf"tensor model.norm.weight \[64\] is missing{_AS_CONFIG}it {BELONG}"),
    "one expert wider": (tensor(f"{EXPERT}gate_proj.weight", torch.zeros(48, 64)),
                         rf"tensor {EXPERT}gate_proj.weight has shape \[48, 64\]{_AS_CONFIG}\[40, 64\] {BELONG}"),
    "one expert transposed": (tensor(f"{EXPERT}down_proj.weight", lambda t: t.T),
                              rf"tensor {EXPERT}down_proj.weight has shape \[40, 64\]{_AS_CONFIG}\[64, 40\] {BELONG}"),
    "one expert gone": (tensor(f"{EXPERT}down_proj.weight", None),
                        rf"tensor {EXPERT}down_proj.weight \[64, 40\] is missing{_AS_CONFIG}it {BELONG}"),
    "router": (tensor(f"{LAYER}mlp.gate.weight", cut),
               rf"tensor {LAYER}mlp.gate.weight has shape \[{EXPERTS - 1}, 64\]{_AS_CONFIG}\[{EXPERTS}, 64\] {BELONG}"),
    "router bias": (tensor(f"{LAYER}mlp.gate.e_score_correction_bias", cut),
                    rf"e_score_correction_bias has shape \[{EXPERTS - 1}\]{_AS_CONFIG}\[{EXPERTS}\] {BELONG}"),
    "no router bias": (tensor(f"{LAYER}mlp.gate.e_score_correction_bias", None),
                       rf"e_score_correction_bias \[{EXPERTS}\] is missing{_AS_CONFIG}it {BELONG}"),
    "attention": (tensor(f"{LAYER}self_attn.o_proj.weight", cut),
                  r"model.layers.1.self_attn: tensor o_proj.weight has shape \[63, 48\]; the configuration expects"),
    "attention, extra": (tensor(f"{LAYER}self_attn.k_norm.weight", torch.ones(10)),
                         r"model.layers.1.self_attn: unknown tensor k_norm.weight; the graph would leave it out, so"),
    "extra": (tensor(f"{LAYER}mlp.gate.tid2eid", torch.ones(10)),
              rf"unknown tensor {LAYER}mlp.gate.tid2eid; the graph would leave it out, so the export is refused "
              rf"{BELONG}"),
    "a norm more": (tensor(f"{LAYER}pre_mlp_layernorm.weight", torch.ones(64)),
                    rf"unknown tensor {LAYER}pre_mlp_layernorm.weight; the graph would leave it out"),
    "a tensor beside": (tensor("hyper_head.weight", torch.ones(64)),
                        r"unknown tensor hyper_head.weight; the graph would leave it out, so the export is refused"),
    "NaN in an expert": (tensor(f"{EXPERT}up_proj.weight", with_value(float("nan"))),
                         rf"tensor {EXPERT}up_proj.weight: 1 of 2560 values are NaN or infinite; expected finite fp32"),
    "infinite in an expert": (tensor(f"{EXPERT}gate_proj.weight", with_value(float("-inf"))),
                              rf"tensor {EXPERT}gate_proj.weight: 1 of 2560 values are NaN or infinite; expected"),
    "NaN in an expert's last": (tensor(f"{EXPERT}down_proj.weight", with_value(float("nan"))),
                                rf"tensor {EXPERT}down_proj.weight: 1 of 2560 values are NaN or infinite; expected"),
    "NaN in a router": (tensor(f"{LAYER}mlp.gate.weight", with_value(float("nan"))),
                        rf"tensor {LAYER}mlp.gate.weight: 1 of {64 * EXPERTS} values are NaN or infinite; expected"),
    "NaN in an attention": (tensor(f"{LAYER}self_attn.kv_b_proj.weight", with_value(float("nan"))),
                            r"model.layers.1.self_attn: 1 of 2048 values of tensor kv_b_proj.weight are NaN or"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, v3: Path, command: Cli) -> None:
    damage, pattern = TENSORS[case]
    damage(v3)
    command.refuses_model(pattern, v3)


@pytest.mark.parametrize("target", ["ort", "trt", "trt-rtx"])
@pytest.mark.parametrize("name", [
    f"{EXPERT}gate_proj", f"{EXPERT}up_proj", f"{EXPERT}down_proj", f"{LAYER}mlp.shared_experts.up_proj",
    "model.layers.0.mlp.down_proj", f"{LAYER}self_attn.kv_a_proj_with_mqa", f"{LAYER}self_attn.q_a_layernorm",
    "model.norm", "lm_head"])
def test_fp16_overflow(name: str, target: str, v3: Path, command: Cli) -> None:
    """Named as the checkpoint names it, whatever it becomes (interleaved with another, stacked, renamed)."""
    tensor(f"{name}.weight", with_value(65520.0))(v3)  # the first float32 that rounds to infinity
    command.refuses_model(rf"^error: tensor {re.escape(name)}.weight: 1 of \d+ values are too large for fp16; expected "
                          r"finite fp16 weights \(bf16 and fp32 have the "
                          r"range\)$", v3, "--dtype", "fp16", "--target", target)
    tensor(f"{name}.weight", with_value(65519.0))(v3)
    assert command.run("export", v3, "--out", command.out, "--dtype", "fp16", "--target", target)[0] == 0


def test_fp16_overflow_of_a_product(v3: Path, command: Cli) -> None:
    """W_O W_UV is in no checkpoint: the plan's own name is all there is."""
    both(tensor(f"{LAYER}self_attn.o_proj.weight", lambda t: t * 1e3),
         tensor(f"{LAYER}self_attn.kv_b_proj.weight", lambda t: t * 1e3))(v3)
    command.refuses_model(r"^error: tensor layers.1.attn.\w+_folded.weight: \d+ of \d+ values are too large for", v3,
                          "--dtype", "fp16", "--absorb", "folded")


# --- The index --------------------------------------------------------------------------------------------------------


def test_missing_shard(pristine: Callable[..., Path], tmp_path: Path, command: Cli) -> None:
    folder = Path(shutil.copytree(pristine("v3", sharded=True), tmp_path / "model"))
    files = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    assert len(files) > 3
    (folder / files[1]).unlink()
    command.refuses_model(rf"model: the index names {files[1]}, which is not in the folder; fetch the missing shard$",
                          folder)


@pytest.mark.parametrize(("shard", "pattern"), [
    ("model-00099-of-00099.safetensors", r"the index names model-00099-of-00099.safetensors, which is not in the"),
    ("../outside.safetensors", r"the index names '../outside.safetensors'; expected the plain name of a file"),
    (None, r"the index names None; expected the plain name of a file in the folder$")])
def test_expert_in_a_shard_that_is_not_there(shard: Any, pattern: str, pristine: Callable[..., Path], tmp_path: Path,
                                             command: Cli) -> None:
    folder = Path(shutil.copytree(pristine("v3", sharded=True), tmp_path / "model"))
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][f"{EXPERT}up_proj.weight"] = shard
    (folder / INDEX).write_text(json.dumps(index))
    command.refuses_model(pattern, folder)


# --- config.json and weights that disagree ----------------------------------------------------------------------------

_LEFT_OUT = r"; the graph would leave it out, so the export is refused \("
_MAKES = r"the configuration makes layer {} {}, these weights make it {}; does config.json belong to these weights\?\)$"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "fewer layers": ({"num_hidden_layers": 2}, r"num_hidden_layers is 2, and the weights hold a layer 2, which is no "
                     r"prediction block \(no eh_proj, enorm or hnorm\); config.json and weights disagree$"),
    "more layers": ({"num_hidden_layers": 4},
                    rf"tensor model.layers.3.input_layernorm.weight \[64\] is missing{_AS_CONFIG}it {BELONG}"),
    "fewer experts": ({"n_routed_experts": 9}, r"unknown tensor \S+, \S+, \S+ and 15 more" + _LEFT_OUT
                      + r"n_routed_experts is 9, and the weights hold expert 1\d; does config.json belong to these"),
    "more experts": ({"n_routed_experts": 15},
                     rf"mlp.gate.weight has shape \[{EXPERTS}, 64\]{_AS_CONFIG}\[15, 64\] {BELONG}"),
    "no experts": ({"n_routed_experts": None}, _LEFT_OUT + _MAKES.format(1, "dense", "sparse")),
    "experts in no groups": ({"n_routed_experts": 11}, r"n_group is 3 and topk_group 2; expected groups that divide"),
    "experts wider": ({"moe_intermediate_size": 48},
                      rf"mlp.experts.0.gate_proj.weight has shape \[40, 64\]{_AS_CONFIG}\[48, 64\] {BELONG}"),
    "more shared experts": ({"n_shared_experts": 2},
                            rf"mlp.shared_experts.gate_proj.weight has shape \[40, 64\]{_AS_CONFIG}\[80, 64\] "
                            rf"{BELONG}"),
    "no shared experts": ({"n_shared_experts": 0},
                          r"unknown tensor model.layers.1.mlp.shared_experts.down_proj.weight, "),
    "no dense layer": ({"first_k_dense_replace": 0}, _LEFT_OUT + _MAKES.format(0, "sparse", "dense")),
    "two dense layers": ({"first_k_dense_replace": 2}, _LEFT_OUT + _MAKES.format(1, "dense", "sparse")),
    "all dense": ({"first_k_dense_replace": 3}, _LEFT_OUT + _MAKES.format(1, "dense", "sparse")),
    "dense by default": ({"first_k_dense_replace": None}, _LEFT_OUT + _MAKES.format(1, "dense", "sparse")),
    "every second sparse": ({"moe_layer_freq": 2}, _LEFT_OUT + _MAKES.format(1, "dense", "sparse")),
    "layer types": ({"mlp_layer_types": ["dense"] * 2}, r"mlp_layer_types has 2 entries of dense; expected 3, each"),
    "tied": ({"tie_word_embeddings": True},
             rf"tensor lm_head.weight \[{VOCAB}, 64\] differs from model.embed_tokens.weight; expected a copy of it, "
             rf"since tie_word_embeddings is true {BELONG}"),
    "FFN": ({"intermediate_size": 95}, rf"mlp.gate_proj.weight has shape \[96, 64\]{_AS_CONFIG}\[95, 64\] {BELONG}"),
    "too many chosen": ({"num_experts_per_tok": 9},
                        r"num_experts_per_tok is 9; topk_group 2 of 3 groups hold 8 experts$"),
    "no vocabulary": ({"vocab_size": None},
                      r"config.json: vocab_size is missing; expected it of model_type 'deepseek_v3'$"),
    "gelu": ({"hidden_act": "gelu"}, r"config.json: hidden_act is 'gelu'; expected silu, which all MLA families use$"),
    "positions beyond memory": ({"max_position_embeddings": 10**13},
                                r"max_position_embeddings is 10000000000000, at most 16777216 .* --max-context N$"),
    "AWQ": ({"quantization_config": {"quant_method": "awq", "bits": 4}},
            r"weights are quantised \(awq\); expected fp32, fp16 or bf16 weights; dequantise the checkpoint first, or"),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
             r"weights are quantised \(gptq\); expected fp32, fp16 or bf16 weights; dequantise the checkpoint first,"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(case: str, v3: Path, command: Cli) -> None:
    changes, pattern = CONFIGS[case]
    set_config(**changes)(v3)
    command.refuses_model(pattern, v3)


def test_untied_without_a_head(pristine: Callable[..., Path], tmp_path: Path, command: Cli) -> None:
    folder = Path(shutil.copytree(pristine("youtu"), tmp_path / "model"))
    set_config(tie_word_embeddings=False)(folder)
    command.refuses_model(rf"tensor lm_head.weight \[{VOCAB}, 64\] is missing; config.json asks for it "
                          rf"{BELONG}", folder)


def test_a_tied_head_stored_as_well(pristine: Callable[..., Path], tmp_path: Path, command: Cli) -> None:
    """A copy of the embedding is left out; anything else would be another model."""
    folder = Path(shutil.copytree(pristine("youtu"), tmp_path / "model"))
    embedding = load_file(folder / SINGLE)["model.embed_tokens.weight"]
    tensor("lm_head.weight", embedding.clone())(folder)
    assert command.run("export", folder, "--out", command.out)[0] == 0
    assert "lm_head.weight" not in open_export(command.out).data["weights"]["parameters"]
    shutil.rmtree(command.out)
    for changed in (with_value(0.5)(embedding.clone()), embedding[:-1]):
        tensor("lm_head.weight", changed)(folder)
        command.refuses_model(rf"tensor lm_head.weight \[{len(changed)}, 64\] differs from "
                              rf"model.embed_tokens.weight", folder)
        assert command.run("export", folder, "--out", command.out, "--layers", "0:1")[0] == 0  # has no head
        shutil.rmtree(command.out.parent.parent)


def test_awq_tensors_without_a_word_in_the_config(v3: Path, command: Cli) -> None:
    both(tensor(f"{EXPERT}up_proj.weight", None),
         tensor(f"{EXPERT}up_proj.qweight", torch.zeros(64, 5, dtype=torch.int32)))(v3)
    command.refuses_model(rf"tensor {EXPERT}up_proj.qweight \[64, 5\] I32 belongs to AWQ or GPTQ weights, which are "
                          r"not read here; dequantise the checkpoint first, or use its bf16 release$", v3)


def test_a_quantised_model_that_lacks_a_scale(v3: Path, tmp_path: Path, command: Cli) -> None:
    made = Checkpoint.read(v3).fp8_block((16, 16))
    del made.tensors[f"{EXPERT}up_proj.weight_scale_inv"]
    command.refuses_model(rf"tensor {EXPERT}up_proj.weight has dtype F8_E4M3; expected one of F64.*\(or fetch its "
                          r"missing scale, weight_scale_inv\)$", made.write(tmp_path / "fp8"))


def test_config_without_weights(v3: Path, command: Cli) -> None:
    (v3 / SINGLE).unlink()
    for options in ([], ["--weights", "link"], ["--layers", "0:1"]):
        command.refuses_model(r"model: config.json alone, no weights; expected model.safetensors or its shards \(or "
                              r"--weights none, for the graphs alone\)$", v3, *options)
    assert command.run("export", v3, "--out", command.out, "--weights", "none")[0] == 0
    assert open_export(command.out).data["weights"]["mode"] == "none"


@pytest.mark.parametrize("options", [{"head_dim": 192}, {"head_dim": None}, {"head_dim": 192, "qk_head_dim": 256}])
def test_head_dim_is_not_the_rotary_width(options: dict[str, Any], pristine: Callable[..., Path],
                                          tmp_path: Path) -> None:
    """GLM-4.7-Flash's config.json states a head_dim of 192 beside qk_rope_head_dim 64."""
    digests = []
    for i, changes in enumerate(({}, options)):
        folder = Path(shutil.copytree(pristine("glm4"), tmp_path / f"{i}" / "model"))
        set_config(**changes)(folder)
        made = export(ExportRequest(str(folder), tmp_path / f"{i}" / "out"))
        assert made.config.qk_rope_head_dim == ROPE
        digests.append({n: r["sha256"] for n, r in made.data["files"].items() if n.endswith((".onnx", ".safetensors"))})
    assert digests[0] == digests[1]
    assert len(digests[0]) > 4


# --- Families ---------------------------------------------------------------------------------------------------------

LAYER_ONLY = {"deepseek_v32": r"its sparse indexer \(DSA\) chooses the keys of each query",
              "glm_moe_dsa": r"its sparse indexer \(DSA\) chooses the keys of each query",
              "kimi_linear": r"most of its layers are linear attention, which keeps a state and no latent cache"}
NOT_MLA = {"axk2": r"its query is gated and comes from two normed inputs, and a sparse indexer chooses the keys",
           "bailing_hybrid": r"its MLA layers gate every head before o_proj, and most of its layers are linear",
           "bailing_moe_v2_5": r"its MLA layers stand between linear-attention layers, and gate their output",
           "dots3_note": r"it norms the rotary key, gates the output, and mixes layers of different latent shapes",
           "hy_v4": r"its attention has sinks, an element-wise gate and hyper-connections",
           "mistral_large4": r"its inverse frequencies are learned, layers share a cache, a sparse indexer chooses",
           "glm5_next": r"it is a hybrid with a sparse indexer; its attention is not MLA alone",
           "deepseek_v4": r"it shares one key and value head \(MQA, head size 512\), which is not MLA"}


def test_every_refused_family_is_below() -> None:
    assert set(NOT_MLA) == set(REFUSED)
    assert set(LAYER_ONLY) == {name for name, family in FAMILIES.items() if family.layer_only}


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("family", [*LAYER_ONLY, *NOT_MLA])
def test_refused_families(family: str, wrapped: bool, v3: Path, command: Cli) -> None:
    """By name alone, before a tensor is looked at; a layer too, unless its attention is plain MLA."""
    (v3 / SINGLE).unlink()
    set_config(model_type=family)(v3)
    if wrapped:
        inner = json.loads((v3 / "config.json").read_text())
        (v3 / "config.json").write_text(json.dumps({"model_type": f"{family}_vl", "text_config": inner}))
    reason = LAYER_ONLY.get(family, "") or NOT_MLA[family]
    verdict = "cannot be exported whole" if family in LAYER_ONLY else "is not supported"
    pattern = rf"config.json: model_type '{family}' {verdict}: {reason}"
    command.refuses_model(pattern, v3, "--scope", "model")
    command.refuses_model(pattern, v3)
    command.refuses_model(pattern, v3, "--weights", "none")
    if family in LAYER_ONLY:
        command.refuses_model(r"\(--scope layer --layer N\)", v3)
    else:
        command.refuses_model(pattern, v3, "--layer", "0")


def test_ling_2_5_under_the_name_of_another(v3: Path, command: Cli) -> None:
    set_config(model_type="bailing_hybrid", architectures=["BailingMoeV2_5ForCausalLM"])(v3)
    command.refuses_model(r"model_type 'bailing_hybrid' is not supported \(architectures BailingMoeV2_5ForCausalLM: "
                          r"this is Ling-2.5, another architecture under the same name\)", v3)


def test_mha2mla(v3: Path, command: Cli) -> None:
    """One rotary key per KV head, by its configuration or by its tensors."""
    config = (v3 / "config.json").read_text()
    for section in ({"SVD": {"method": 7, "low_rank": 8}}, {"RoPE": {"partial_rope_version": 4, "top_k_rope_dim": 4}}):
        set_config(**section)(v3)
        command.refuses_model(r"config.json: an MHA2MLA checkpoint: it keeps one rotary key per KV head, and MLA has "
                              r"one that all heads share; expected shared-rope MLA such as DeepSeek's or "
                              r"TransMLA's$", v3)
        (v3 / "config.json").write_text(config)
    found = load_file(v3 / SINGLE)
    names = {"kv_a_proj_with_mqa": "W_k_r", "kv_b_proj": "W_down_k"}
    save_file({re.sub("|".join(names), lambda m: names[m[0]], n): t for n, t in found.items()}, v3 / SINGLE)
    pattern = (r"no tensor model.layers.0.self_attn.kv_a_proj_with_mqa.weight; expected an MLA attention there \(this "
               r"is MHA2MLA: one rotary key per KV head, not MLA's shared one\)$")
    command.refuses_model(pattern, v3)
    command.refuses_model(pattern, v3, "--layer", "0")


# --- Options ----------------------------------------------------------------------------------------------------------

_SLICE = r"expected A:B with 0 <= A < B <= 3, .*layers A to B - 1$"
OPTIONS: list[tuple[list[str], str]] = [
    *[(["--layers", given], rf"--layers '{re.escape(given)}': {_SLICE}")
      for given in ("0:4", "2:2", "2:1", "-1:2", "1", "a:b", "1:b", "0:1:2", "", "1-2", "0:99999999999999999999")],
    (["--layer", "1", "--scope", "model"], r"--layer 1: names one attention; with --scope model give --layers A:B$"),
    (["--layer", "1", "--layers", "0:1"], r"--layers 0:1: a slice of a decoder; give --scope model$"),
    (["--layers", "0:1", "--scope", "layer"], r"--layers 0:1: a slice of a decoder; give --scope model$"),
    (["--logits", "all", "--scope", "layer"], r"--logits all: one attention has none; give --scope model$"),
    (["--experts", "dense", "--layer", "0"], r"--experts dense: one attention has none; give --scope model$"),
    (["--merge-q"], r"--merge-q: no decoder has a query low rank without a norm; it is for --scope layer$"),
    (["--merge-q", "--scope", "model"], r"--merge-q: no decoder has a query low rank without a norm; it is for"),
    (["--causal", "off"], r"--causal off: a decoder is causal; for one attention alone give --scope layer$"),
    (["--causal", "off", "--scope", "model"], r"--causal off: a decoder is causal; for one attention alone give"),
    (["--experts", "fused", "--target", "trt-rtx"], r"--experts fused: ONNX Runtime's operator; --target trt-rtx"),
    (["--experts", "fused", "--target", "trt"], r"--experts fused: ONNX Runtime's operator; --target trt takes gather"),
    (["--experts", "sparse"], r"--experts 'sparse': expected one of auto, fused, gather, dense$"),
    (["--scope", "decoder"], r"--scope 'decoder': expected one of model, layer$"),
    (["--weights", "move"], r"--weights 'move': expected one of copy, link, none$"),
    (["--logits", "none"], r"--logits 'none': expected one of last, all$"),
    (["--max-context", "16777217"], r"--max-context 16777217: expected 1 to 16777216$"),
    (["--max-context", str(10**30)], r"--max-context 10{30}: expected 1 to 16777216$"),
    (["--cache", "scatter"], r"--cache scatter preallocates its rows: give their number with --max-context N$"),
]


@pytest.mark.parametrize(("options", "pattern"), OPTIONS, ids=[" ".join(o) for o, _ in OPTIONS])
def test_option(options: list[str], pattern: str, v3: Path, command: Cli) -> None:
    command.refuses_model(pattern, v3, *options)


@pytest.mark.parametrize(("model", "options", "pattern"), [
    ("article", ["--scope", "model"], r"article: one attention, not a whole model; export it with --scope layer$"),
    ("deepseek-v3", ["--layers", "0:1"], r"--layers 0:1: a slice of a decoder; give --scope model$"),
    ("deepseek-v3", ["--scope", "model", "--layers", "60:62"], r"--layers '60:62': expected A:B with 0 <= A < B <= 61"),
    ("deepseek-v9", ["--scope", "model"], r"MODEL 'deepseek-v9' is neither a preset nor an existing path; presets:"),
    ("/nowhere/model", ["--scope", "model"], r"MODEL '/nowhere/model' does not exist; expected a checkpoint folder or"),
])
def test_models_that_are_no_folder(model: str, options: list[str], pattern: str, command: Cli) -> None:
    command.refuses_model(pattern, model, *options)


def test_state_dict_as_a_model(tmp_path: Path, command: Cli) -> None:
    save_file({"fc.weight": torch.zeros(2, 2)}, tmp_path / "layer.safetensors")
    command.refuses_model(r"layer.safetensors: one attention, not a whole model; export it with --scope layer$",
                          tmp_path / "layer.safetensors", "--scope", "model")


# --- Linked weights ---------------------------------------------------------------------------------------------------


@pytest.fixture
def linked(v3: Path, command: Cli) -> Path:
    """An export whose weights lie in the checkpoint, and could not be hard-linked (as on another disk)."""
    assert command.run("export", v3, "--out", command.out, "--weights", "link")[0] == 0
    path = command.out / "manifest.json"
    data = json.loads(path.read_text())
    assert list(data["weights"]["linked"]) == [f"linked/{SINGLE}"]
    data["weights"]["linked"][f"linked/{SINGLE}"]["how"] = "handed"
    path.write_text(json.dumps(data))
    (command.out / "linked" / SINGLE).unlink()
    assert command.run("inspect", command.out)[0] == 0
    return command.out


def relink(command: Cli, pattern: str, checkpoint: str | Path, out: Path) -> None:
    command.refused(pattern, "export", checkpoint, "--out", out, "--relink")


def test_a_moved_checkpoint(linked: Path, v3: Path, tmp_path: Path, command: Cli) -> None:
    v3.rename(tmp_path / "moved")
    command.refused(rf"{linked}: its weights lie in {v3 / SINGLE}, which is not there; if the checkpoint moved, point "
                    rf"the export to it with: python -m exporter export CHECKPOINT --out {linked} --relink$",
                    "inspect", linked)
    assert command.run("export", tmp_path / "moved", "--out", linked, "--relink")[0] == 0
    assert command.run("inspect", linked)[0] == 0
    assert open_export(linked).data["source"]["path"] == str(tmp_path / "moved")


def flip(at: int) -> Damage:
    def damage(folder: Path) -> None:
        raw = bytearray((folder / SINGLE).read_bytes())
        raw[at] ^= 1
        (folder / SINGLE).write_bytes(raw)
    return damage


CHANGED: dict[str, Damage] = {
    "a byte of the header": flip(20), "a byte of the values": flip(-9),
    "shorter": lambda folder: os.truncate(folder / SINGLE, (folder / SINGLE).stat().st_size - 4),
    "empty": lambda folder: os.truncate(folder / SINGLE, 0),
}


@pytest.mark.parametrize("case", CHANGED)
def test_relink_to_a_changed_file(case: str, linked: Path, v3: Path, tmp_path: Path, command: Cli) -> None:
    changed = Path(shutil.copytree(v3, tmp_path / "changed"))
    CHANGED[case](changed)
    relink(command, rf"--relink: {changed / SINGLE} differs from the file that {linked} was exported from; export "
                    rf"again$",
           changed, linked)
    CHANGED[case](v3)  # where it lies
    command.refused(rf"{linked}: {v3 / SINGLE} was changed since the export \(its size or time differs\); export "
                    r"again, or, if its content is the same, point to it anew with: .* --relink$", "inspect", linked)


def test_relink_to_another_checkpoint(linked: Path, pristine: Callable[..., Path], tmp_path: Path,
                                      command: Cli) -> None:
    relink(command, r"--relink: .*model.safetensors differs from the file that .*out was exported from; export again$",
           pristine("v3", seed=1), linked)
    relink(command, rf"--relink: {tmp_path} has no {SINGLE}; expected the checkpoint that {linked} was exported from$",
           tmp_path, linked)
    for model in ("deepseek-v3", tmp_path / "nowhere", linked / "manifest.json"):
        relink(command, rf"--relink: {model} is not a folder; expected the checkpoint in its new place$", model, linked)


def test_nothing_to_relink(v3: Path, command: Cli) -> None:
    relink(command, r"out: no manifest.json; expected an exported folder; make it with: .* --weights "
                    r"link$", v3, command.out)
    assert command.run("export", v3, "--out", command.out)[0] == 0
    relink(command, r"--relink: the weights of .*out do not lie in a checkpoint, nothing is to be pointed anew$", v3,
           command.out)


def test_relink_changes_all_files_or_none(pristine: Callable[..., Path], tmp_path: Path, command: Cli) -> None:
    folder = Path(shutil.copytree(pristine("v3", sharded=True), tmp_path / "model"))
    assert command.run("export", folder, "--out", command.out, "--weights", "link")[0] == 0
    files = [Path(name).name for name in open_export(command.out).data["weights"]["linked"]]
    assert len(files) > 3
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    (moved / files[-1]).unlink()
    relink(command, rf"--relink: {moved} has no {files[-1]}; expected the checkpoint", moved, command.out)
    raw = bytearray((folder / files[-1]).read_bytes())
    raw[-1] ^= 1
    (moved / files[-1]).write_bytes(raw)
    inodes = {p: p.stat().st_ino for p in (command.out / "linked").iterdir()}
    relink(command, rf"--relink: {moved / files[-1]} differs from the file", moved, command.out)
    assert {p: p.stat().st_ino for p in (command.out / "linked").iterdir()} == inodes


# --- Families of which one attention can be exported, against transformers --------------------------------------------

TOP_K, TOKENS, REL = 64, 50, 1e-4
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": FACTOR, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": ORIGINAL_POSITIONS, "beta_fast": 32.0, "beta_slow": 1.0}
INDEXER = {"index_topk": TOP_K, "index_n_heads": 4, "index_head_dim": 16}
SINGLE_LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v32": INDEXER | {"first_k_dense_replace": 2, "rope_parameters": YARN, "q_lora_rank": 24},
    "glm_moe_dsa": INDEXER | {"mlp_layer_types": ["dense"] * 2, "rope_parameters": YARN, "q_lora_rank": 24},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 2,
                    "q_lora_rank": None, "linear_head_dim": 16, "linear_num_heads": 4, "pad_token_id": None},
}


def transformers_model(model_type: str) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        model_type, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=128, kv_lora_rank=KV_RANK, qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE,
        v_head_dim=V, max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=1, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=32, attn_implementation="eager",
        **SINGLE_LAYERS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        hot_(name, parameter, generator)
    return model


def their_attention(model: Any, made: Export, hidden: np.ndarray) -> np.ndarray:
    """Layer 1's own attention over all tokens at once, causal, with our angles (float64, rounded once)."""
    T = hidden.shape[1]
    arguments: dict[str, Any] = {
        "attention_mask": torch.full((T, T), torch.finfo(torch.float32).min).triu(1).expand(len(hidden), 1, T, T)}
    if made.config.rope.rope_type != "none":
        inv_freq, factor = frequencies(made.config, made.max_context)
        angles = torch.outer(torch.arange(T).double(), torch.from_numpy(inv_freq))[None]
        angles = torch.cat([angles, angles], dim=-1)
        arguments |= {"position_ids": torch.arange(T)[None],
                      "position_embeddings": ((angles.cos() * factor).float(), (angles.sin() * factor).float())}
    if made.config.model_type == "glm_moe_dsa":
        arguments["prev_topk_indices"] = None
    with torch.no_grad():
        found = model.model.layers[1].self_attn(hidden_states=torch.from_numpy(hidden), **arguments)[0]
    result: np.ndarray = found.numpy()
    return result


@pytest.mark.parametrize("model_type", SINGLE_LAYERS)
def test_one_attention_of_a_family_that_is_refused_whole(model_type: str, tmp_path: Path, command: Cli) -> None:
    """With no more rows than the indexer keeps, it equals transformers' own attention, in two pieces with a cache."""
    model = transformers_model(model_type)
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    command.refuses_model(rf"model_type '{model_type}' cannot be exported whole: {LAYER_ONLY[model_type]}", folder)
    assert command.run("export", folder, "--out", command.out, "--scope", "layer", "--layer", "1", "--max-context",
                       str(TOP_K))[0] == 0
    made = open_export(command.out)
    hidden = np.random.default_rng(5).standard_normal((2, TOKENS, HIDDEN), dtype=np.float32)
    expected = their_attention(model, made, hidden)
    for graph in made.graphs:
        if graph.kind != "prefill":
            continue
        with OrtSession(made, graph) as session:
            rows, outputs, start = np.zeros((2, 1, made.config.row_dim), np.float32), [], 0
            for piece in (20, TOKENS - 20):
                found = session.infer({"hidden_states": hidden[:, start:start + piece], "past_latent.0": rows,
                                       "past_lengths": np.full(2, start, np.int64)})
                rows = np.concatenate([rows[:, :start], found["new_latent.0"]], axis=1)
                outputs.append(found["attn_output"])
                start += piece
        assert compare(np.concatenate(outputs, axis=1), expected).rel < REL, graph.name


def test_a_linear_attention_layer_has_no_latent(tmp_path: Path, command: Cli) -> None:
    folder = tmp_path / "model"
    transformers_model("kimi_linear").save_pretrained(folder)
    command.refuses_model(r"no tensor model.layers.0.self_attn.kv_a_proj_with_mqa.weight; expected an MLA attention "
                          r"there \(present: ", folder, "--layer", "0")
    command.refuses_model(r"--layer 2 is out of range; model has layers 0 to 1$", folder, "--layer", "2")


def test_a_refused_model_leaves_the_earlier_export(v3: Path, command: Cli) -> None:
    assert command.run("export", v3, "--out", command.out)[0] == 0
    before = tree(command.out)
    tensor(f"{EXPERT}up_proj.weight", with_value(float("nan")))(v3)
    command.refuses_model(r"NaN or infinite", v3, "--overwrite")
    assert tree(command.out) == before
