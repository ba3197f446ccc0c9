"""The layer search: every family sound part by part, any fault in layer 37 of 61 found, in the memory of one layer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import helper

from exporter import manifest
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from tests.model_checkpoints import MODELS, tiny_checkpoint
from validate.__main__ import cli
from validate.layer_search import Search, search
from validate.model_faults import FAULTS as KNOWN
from validate.model_faults import plant
from validate.parity import check_model

pytest.importorskip("transformers")
LAYER, LAYERS = 37, 61
Change = Callable[[onnx.GraphProto], int]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def exported(folder: Path, out: Path, name: str, **request: Any) -> Export:
    made = folder / name
    if not made.is_dir():
        tiny_checkpoint(made, name)
    return export(ExportRequest(str(made), out, **{"max_context": 1000} | request))


def departing(found: Search) -> list[tuple[str, str]]:
    return [(p.name, p.departs) for p in found.departing]


# --- Sound models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_right_part_by_part(folder: Path, tmp_path: Path, name: str) -> None:
    made = exported(folder, tmp_path / "x", name)
    found = search(made)
    assert found.passed, departing(found)
    layers = made.data["layers"][1]
    kinds = {(p.layer, p.part.split()[0]) for p in found.parts}
    assert kinds >= {(n, part) for n in range(layers) for part in ("attention", "mlp")}
    assert {"embedding", "head", "last"} <= {p.part.split()[0] for p in found.parts if p.layer is None}
    assert {p.graph.split(".")[0] for p in found.parts} == {"prefill", "decode"}
    if name == "longcat":
        assert {p.part for p in found.parts if p.layer == 1} == {
            "attention 0", "mlp 0", "attention 1", "mlp 1", "experts", "sum"}
    assert all({"rows", "output", "sum"} == set(p.differences) for p in found.parts if p.part.startswith("attention"))


@pytest.mark.parametrize(("name", "request_"), [
    *(("v3", each) for each in (
        {"cache": "scatter", "prefill": "expanded"}, {"cache": "concat"}, {"dtype": "fp16"}, {"dtype": "bf16"},
        {"weights": "link"}, {"logits": "all"}, {"absorb": "folded"}, {"layers": "0:1"}, {"layers": "1:2"},
        {"target": "trt-rtx", "experts": "gather"}, {"target": "trt-rtx", "experts": "dense", "dtype": "bf16"},
        {"quantise": "fp8", "dtype": "fp16", "target": "trt"}, {"quantise": "int8", "dtype": "fp16"},
        {"max_context": 9}, {"max_context": 1})),
    *(("longcat", each) for each in ({"cache": "scatter"}, {"dtype": "bf16"}, {"logits": "all"}, {"layers": "1:2"}))])
def test_every_kind_of_export(folder: Path, tmp_path: Path, name: str, request_: dict[str, Any]) -> None:
    made = exported(folder, tmp_path / "x", name, **request_)
    found = search(made)
    assert found.passed, departing(found)
    assert found.runtime == ("ort" if made.dtype == "fp32" else "interpreter")
    assert all(p.tokens >= p.excluded for p in found.parts)


# --- Faults in layer 37 of 61 -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound export of 61 narrow layers."""
    root = tmp_path_factory.mktemp("deep")
    checkpoint = tiny_checkpoint(root / "c", "youtu", layers=LAYERS)
    return export(ExportRequest(str(checkpoint), root / "x", max_context=60)).folder


def faulty(deep: Path, out: Path, change: Change | str) -> Export:
    """A copy with the default graphs changed, or with one tensor of the weight file 1 % larger."""
    shutil.copytree(deep, out)
    made = open_export(deep)
    if isinstance(change, str):
        spoil(out / "weights.safetensors", change)
    else:
        for graph in (g for g in made.graphs if g.default):
            model = onnx.load(out / graph.file, load_external_data=False)
            assert change(model.graph)
            (out / graph.file).write_bytes(model.SerializeToString())
    return recorded(made, out)


def recorded(made: Export, out: Path) -> Export:
    """The manifest made to fit what was changed in a folder."""
    manifest.rewrite(out, {**made.data, "files": {n: manifest.file_record(out / n) for n in made.data["files"]}})
    return open_export(out)


def spoil(path: Path, tensor: str) -> None:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(size))[tensor]["data_offsets"]
    values = np.memmap(path, np.float32, "r+", 8 + size + start, ((end - start) // 4,))
    values *= np.float32(1.01)
    values.flush()


def nodes(graph: onnx.GraphProto, name: str) -> list[onnx.NodeProto]:
    return [n for n in graph.node if n.name == f"layers/{LAYER}/{name}"]


def attribute(name: str, key: str, value: Any) -> Change:
    def change(graph: onnx.GraphProto) -> int:
        for found in nodes(graph, name):
            kept = [a for a in found.attribute if a.name != key]
            del found.attribute[:]
            found.attribute.extend([*kept, helper.make_attribute(key, value)])
        return len(nodes(graph, name))
    return change


def wire(name: str, index: int, value: str) -> Change:
    def change(graph: onnx.GraphProto) -> int:
        for found in nodes(graph, name):
            found.input[index] = value
        return len(nodes(graph, name))
    return change


def subtract(graph: onnx.GraphProto) -> int:
    (found,) = nodes(graph, "ffn_residual")
    found.op_type = "Sub"
    return 1


FAULTS: list[tuple[str, Change, str, str]] = [
    ("rotation", attribute("attn/row/k_rope_rotated", "interleaved", 0), "attention", "cache rows"),
    ("norm of the latent", attribute("attn/row/kv_a_norm", "epsilon", 0.1), "attention", "cache rows"),
    ("softmax over queries", attribute("attn/core/softmax", "axis", 1), "attention", "output"),
    ("norm before the MLP", attribute("post_norm", "epsilon", 0.1), "mlp", "output"),
    ("gate without its sigmoid", wire("hidden_silu", 1, f"layers/{LAYER}/mlp.gate_proj"), "mlp", "output"),
    ("branch taken off", subtract, "mlp", "sum"),
    ("reads the layer before", wire("input_norm", 0, f"layers/{LAYER - 2}/ffn_residual"), "attention", "wiring")]


def test_the_deep_model_is_sound(deep: Path) -> None:
    found = search(open_export(deep))
    assert found.passed, departing(found)
    assert len(found.parts) == 2 * (2 * LAYERS + 3)


@pytest.mark.parametrize(("change", "part", "departs"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_in_one_node_of_layer_37(deep: Path, tmp_path: Path, change: Change, part: str, departs: str) -> None:
    found = search(faulty(deep, tmp_path / "x", change))
    assert departing(found) == [(f"layer {LAYER}, {part}", departs)] * 2  # in both graphs, and nowhere else
    assert found.verdict.startswith(f"first to depart: layer {LAYER}, {part}")


@pytest.mark.parametrize(("tensor", "part", "departs"), [
    ("attn.kv_a_proj.weight", "attention", "cache rows"), ("attn.w_uv", "attention", "output"),
    ("mlp.down_proj.weight", "mlp", "output")])
def test_a_fault_in_one_weight_of_layer_37(deep: Path, tmp_path: Path, tensor: str, part: str, departs: str) -> None:
    found = search(faulty(deep, tmp_path / "x", f"layers.{LAYER}.{tensor}"))
    assert departing(found) == [(f"layer {LAYER}, {part}", departs)] * 2


def test_faults_of_two_layers_are_both_listed(deep: Path, tmp_path: Path) -> None:
    made = faulty(deep, tmp_path / "x", "layers.52.mlp.down_proj.weight")
    spoil(made.folder / "weights.safetensors", f"layers.{LAYER}.attn.o_proj.weight")
    found = search(recorded(made, made.folder))
    assert departing(found) == [(f"layer {LAYER}, attention", "output")] * 2 + [("layer 52, mlp", "output")] * 2


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_fault_shows_in_16_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    made = exported(folder, tmp_path / "x", "v3", dtype=dtype, max_context=60)
    found = search(plant(made, KNOWN["choice-bias-as-weight"]))
    assert departing(found) == [(f"layer {n}, mlp", "output") for n in (1, 1, 2, 2)]


# --- The ends, the ladder and the command -----------------------------------------------------------------------------


def test_the_wrong_last_token_is_no_layer(folder: Path, tmp_path: Path) -> None:
    made = exported(folder, tmp_path / "x", "v3", max_context=60)
    found = search(plant(made, KNOWN["last-token-off-by-one"]))
    assert departing(found) == [("last token", "output")]


@pytest.mark.parametrize(("tensor", "part"), [("embed_tokens.weight", "embedding"), ("lm_head.weight", "head"),
                                              ("norm.weight", "head")])
def test_a_fault_at_an_end(folder: Path, tmp_path: Path, tensor: str, part: str) -> None:
    made = exported(folder, tmp_path / "x", "v3", max_context=60)
    spoil(made.folder / "weights.safetensors", tensor)
    assert departing(search(recorded(made, made.folder))) == [(part, "output")] * 2


def test_a_red_ladder_searches_by_itself(folder: Path, tmp_path: Path) -> None:
    exported(folder, tmp_path / "x", "v3", max_context=60)
    request = ExportRequest(str(folder / "v3"), Path("unused"), max_context=60)
    ladder = check_model([request], backends=["ort"], fault=KNOWN["choice-bias-as-weight"], find_layer=True)
    assert ladder.layers is not None
    assert ladder.failure.endswith("first to depart: layer 1, mlp (prefill.qkt): its output departs")
    sound = check_model([request], backends=["ort"], find_layer=True)
    assert sound.layers is None


def test_a_scatter_that_writes_too_far_is_no_layers_fault(folder: Path) -> None:
    request = ExportRequest(str(folder / "v3"), Path("unused"), max_context=60, cache="scatter")
    ladder = check_model([request], backends=["ort"], fault=KNOWN["scatter-one-too-many"], find_layer=True)
    assert not ladder.passed
    assert ladder.layers is None


def test_the_command(folder: Path, deep: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(cli, ["parity", str(deep), "--find-layer", "--json"])
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["pass"]
    assert data["layers"]["first"] is None
    made = faulty(deep, tmp_path / "x", f"layers.{LAYER}.mlp.down_proj.weight")
    result = CliRunner().invoke(cli, ["parity", str(made.folder), "--find-layer", "--json"])
    assert result.exit_code == 1
    layers = json.loads(result.stdout)["layers"]
    assert layers["first"] == {"layer": LAYER, "part": "mlp", "graph": "prefill.qkt", "departs": "output"}
    worst = next(p for p in layers["parts"] if not p["pass"])["compared"]["output"]["worst"]
    assert worst["axes"] == ["sequence", "token", "column"]
    shown = CliRunner().invoke(cli, ["parity", str(made.folder), "--find-layer"]).stdout
    assert f"layer {LAYER}, mlp" in shown
    assert "layer 12," not in shown  # sound, and far from it


@pytest.mark.parametrize(("request_", "words"), [
    ({"layer": 1}, "holds one attention"), ({"cache_dtype": "int8", "target": "trt-rtx"}, "a cache in int8"),
    ({"weights": "none"}, "have no weights")])
def test_what_cannot_be_searched_says_why(folder: Path, tmp_path: Path, request_: dict[str, Any], words: str) -> None:
    made = exported(folder, tmp_path / "x", "v3", **{"max_context": 60} | request_)
    with pytest.raises(InputError, match=words):
        search(made)


def test_weights_on_another_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links refused: ONNX Runtime is handed the checkpoint's values, the interpreter says that it is not."""
    def refuse(*paths: Any) -> None:
        raise OSError("another disk")

    monkeypatch.setattr("os.link", refuse)
    made = exported(folder, tmp_path / "x", "youtu", weights="link", max_context=60)
    assert search(made).passed
    stored = tiny_checkpoint(tmp_path / "c", "youtu", dtype=torch.bfloat16)
    half = export(ExportRequest(str(stored), tmp_path / "y", weights="link", dtype="bf16", max_context=60))
    with pytest.raises(InputError, match="reads no weights outside the folder"):
        search(half)


# --- Memory -----------------------------------------------------------------------------------------------------------

WIDE = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
        "hidden_size": 640, "intermediate_size": 1280, "num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 64, "q_lora_rank": 256, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_interleave": True,
        "rms_norm_eps": 1e-6, "attention_bias": False, "tie_word_embeddings": False, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64, "n_group": 2, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "bos_token_id": 0, "eos_token_id": 1}
MEASURE = """
import json, sys
import torch
from engines.measure import high_water, reset_high_water, resident
from exporter.manifest import open_export
from validate.layer_search import search

torch.set_num_threads(1)
made = open_export(sys.argv[1])
search(made, layers=range(1))  # libraries, threads and what else a first run brings
base, found = resident(), {}
for name, layers in (("one", range(1)), ("all", None)):
    reset_high_water()
    result = search(made, layers=layers)
    assert result.passed
    found[name] = high_water() - base
print(json.dumps(found | {"base": base, "parts": len(result.parts)}))
"""


@pytest.mark.slow
def test_a_search_of_61_layers_takes_the_memory_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The memory of one layer is what the search of the first layer alone takes at its peak above what the process
    held before it: the reference's float64 weights of one part, and those of the same part of a graph."""
    from validate.synthetic import checkpoint_bytes, write_checkpoint

    checkpoint = write_checkpoint(tmp_path / "c", WIDE, "fp32")
    made = export(ExportRequest(str(checkpoint), tmp_path / "x", max_context=30, weights="link"))
    child = subprocess.run([sys.executable, "-c", MEASURE, str(made.folder)], capture_output=True, text=True,
                           cwd=Path(__file__).resolve().parent.parent)
    assert child.returncode == 0, child.stderr
    found = json.loads(child.stdout)
    layer = checkpoint_bytes(WIDE, "fp32") / LAYERS
    with capsys.disabled():
        print(f"\na layer's weights {layer / 1e6:.1f} MB, all {layer * LAYERS / 1e6:.0f} MB; search above "
              f"{found['base'] / 1e6:.0f} MB: one layer {found['one'] / 1e6:.1f} MB, {LAYERS} layers "
              f"{found['all'] / 1e6:.1f} MB")
    assert found["parts"] == 2 * (2 * LAYERS + 3)
    assert found["one"] > layer / 2  # it is weights that are measured
    assert found["all"] <= 2 * found["one"]
