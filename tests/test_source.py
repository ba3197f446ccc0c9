"""Checkpoints as transformers writes them give the tensors that the safetensors library reads, split rightly."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from exporter.errors import InputError
from exporter.presets import PRESETS
from exporter.source import Source, open_source
from exporter.weights import AttentionWeights, Linear, load_attention
from tests.checkpoints import (
    FACTOR,
    HEADS,
    HIDDEN,
    KV_RANK,
    LAYERS,
    NOPE,
    POSITIONS,
    ROPE,
    V,
    article_state_dict,
    tiny_checkpoint,
)

FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
NUMPY = {torch.float32: np.dtype(np.float32), torch.float16: np.dtype(np.float16),
         torch.bfloat16: np.dtype(ml_dtypes.bfloat16)}
BITS = {torch.float32: (torch.int32, np.int32), torch.float16: (torch.int16, np.int16),
        torch.bfloat16: (torch.int16, np.int16)}


def stored(folder: Path, layer: int, prefix: str = "model.layers.") -> dict[str, torch.Tensor]:
    """The layer's attention as the safetensors library reads it from all files, without the index."""
    full, found = f"{prefix}{layer}.self_attn.", {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            found |= {name.removeprefix(full): f.get_tensor(name) for name in f.keys() if name.startswith(full)}  # noqa: SIM118
    return found


def same(array: np.ndarray | None, tensor: torch.Tensor | None) -> None:
    """Bit-equal, dtype included; both None is equal too."""
    if array is None or tensor is None:
        assert array is None
        assert tensor is None
        return
    assert array.dtype == NUMPY[tensor.dtype]
    assert array.shape == tuple(tensor.shape)
    as_torch, as_numpy = BITS[tensor.dtype]
    assert np.array_equal(np.ascontiguousarray(array).view(as_numpy), tensor.contiguous().view(as_torch).numpy())


def same_linear(linear: Linear | None, tensors: Mapping[str, torch.Tensor], name: str) -> None:
    assert linear is not None
    same(linear.weight, tensors[f"{name}.weight"])
    same(linear.bias, tensors.get(f"{name}.bias"))


def check(source: Source, expected: Mapping[str, torch.Tensor]) -> AttentionWeights:
    """`open_source` and `load_attention` against the stored tensors; written anew from the layout of kv_b_proj."""
    assert expected, "no tensor to compare with"
    assert set(source.tensors) == set(expected)
    for name, tensor in source.tensors.items():
        assert tensor.shape == tuple(expected[name].shape)
        same(tensor.load(), expected[name])
    w = load_attention(source, POSITIONS)
    if "q_proj.weight" in expected:
        same_linear(w.q, expected, "q_proj")
        assert (w.q_a, w.q_b, w.q_a_norm) == (None, None, None)
    else:
        same_linear(w.q_a, expected, "q_a_proj")
        same_linear(w.q_b, expected, "q_b_proj")
        same(w.q_a_norm, expected["q_a_layernorm.weight"])
        assert w.q is None
    same_linear(w.kv_a, expected, "kv_a_proj_with_mqa")
    same(w.kv_a_norm, expected["kv_a_layernorm.weight"])
    same_linear(w.o, expected, "o_proj")
    for head in range(HEADS):  # rows of kv_b_proj: head by head, first K's nope rows, then V's
        rows = expected["kv_b_proj.weight"][head * (NOPE + V):(head + 1) * (NOPE + V)]
        same(w.w_uk[head], rows[:NOPE])
        same(w.w_uv[head], rows[NOPE:])
    assert w.w_uk.shape == (HEADS, NOPE, KV_RANK)
    assert w.w_uv.shape == (HEADS, V, KV_RANK)
    assert (w.b_uk, w.b_uv, w.q_rope) == (None, None, None)
    return w


# --- Every family, stored every way -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_family(model_type: str, dtype: torch.dtype, sharded: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type, dtype=dtype, sharded=sharded, seed=3)
    seen = []
    for layer in range(LAYERS):
        source = open_source(str(folder), layer=layer)
        expected = stored(folder, layer)
        check(source, expected)
        assert {t.dtype for t in expected.values()} == {dtype}
        assert source.name == f"model layer {layer}"
        record = source.record
        assert (record["kind"], record["path"], record["layer"]) == ("checkpoint", str(folder), layer)
        for stamp in record["files"]:
            stat = (folder / stamp["name"]).stat()
            assert (stamp["size"], stamp["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)
        assert (len(record["files"]) > 1) == sharded  # 8 KB shards: an attention lies in several
        seen.append(expected["o_proj.weight"])
    assert not torch.equal(*seen), "layers that are alike would hide a wrong layer"
    assert open_source(str(folder)).record["layer"] == 0


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize("q_lora_rank", [24, None])
def test_config(model_type: str, q_lora_rank: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type, q_lora_rank=q_lora_rank)
    source = open_source(str(folder), layer=1)
    c = source.config
    assert c.model_type == model_type
    assert (c.hidden_size, c.num_attention_heads, c.num_hidden_layers) == (HIDDEN, HEADS, LAYERS)
    assert (c.q_lora_rank, c.kv_lora_rank) == (q_lora_rank, KV_RANK)
    assert (c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim) == (NOPE, ROPE, V)
    assert c.max_position_embeddings == POSITIONS
    assert c.rms_norm_eps == (1e-6 if model_type.startswith("deepseek") else 1e-5)
    assert c.latent_norm_eps == 1e-6
    if model_type == "minicpm3":
        assert c.rope.rope_type == "longrope"
        assert c.rope.long_factor == (1.1, 2.0, 5.0, 9.0, 16.0)
        assert c.rope.short_factor == (1.0, 1.3, 2.1, 3.7, 4.5)
    else:
        assert (c.rope.rope_type, c.rope.factor) == ("yarn", FACTOR)
        assert c.rope.mscale == c.rope.mscale_all_dim == (0.707 if model_type == "deepseek_v2" else 1.0)
    check(source, stored(folder, 1))


@pytest.mark.parametrize(("model_type", "interleave", "layout"), [
    ("deepseek_v2", True, "pairs"), ("deepseek_v3", True, "pairs"), ("deepseek_v3", False, "half"),
    ("glm4_moe_lite", True, "pairs"), ("glm4_moe_lite", False, "half"), ("minicpm3", True, "half"),
])
def test_rope_layout(model_type: str, interleave: bool, layout: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type, rope_interleave=interleave, yarn=False)
    source = open_source(str(folder))
    assert source.config.rope_layout == layout
    assert source.config.rope.rope_type == "default"
    assert load_attention(source, POSITIONS).rope_layout == layout


def test_old_and_new_rope_fields_agree(tmp_path: Path) -> None:
    """`rope_theta` with `rope_scaling` (before transformers 5) says the same as `rope_parameters`."""
    folder = tiny_checkpoint(tmp_path / "model")
    new = open_source(str(folder)).config
    config = json.loads((folder / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    scaling["type"] = scaling.pop("rope_type")
    (folder / "config.json").write_text(json.dumps(config))
    assert open_source(str(folder)).config == new


@pytest.mark.parametrize("q_lora_rank", [24, None])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_attention_bias(model_type: str, q_lora_rank: int | None, tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", model_type, attention_bias=True, q_lora_rank=q_lora_rank)
    expected = stored(folder, 1)
    biases = {name for name in expected if name.endswith(".bias")}
    assert biases == {"kv_a_proj_with_mqa.bias", "o_proj.bias"} | ({"q_a_proj.bias"} if q_lora_rank else set())
    assert all(expected[name].any() for name in biases)
    check(open_source(str(folder), layer=1), expected)


# --- How files lie ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["single", "sharded"])
def test_hub_cache_symlinks(sharded: bool, tmp_path: Path) -> None:
    """models--org--name/snapshots/REVISION/FILE -> ../../blobs/HASH, as the hub's cache lies on disk."""
    folder = tiny_checkpoint(tmp_path / "plain", sharded=sharded, dtype=torch.bfloat16)
    expected = stored(folder, 1)
    repository = tmp_path / "models--org--name"
    snapshot, blobs = repository / "snapshots" / "0a1b2c", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / f"{number:040x}")
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", f"{number:040x}"))
    source = open_source(str(snapshot), layer=1)
    check(source, expected)
    assert all(stamp["name"].startswith("model") and stamp["size"] > 1000 for stamp in source.record["files"])


def renamed(folder: Path, old: str, new: str, extra: Mapping[str, torch.Tensor] | None = None) -> None:
    tensors = {name.replace(old, new): t for name, t in load_file(folder / "model.safetensors").items()}
    save_file(tensors | dict(extra or {}), folder / "model.safetensors", metadata={"format": "pt"})


def test_wrapper_prefix(tmp_path: Path) -> None:
    """A vision-language wrapper: a prefix before the text model, and a vision tower with attentions of its own."""
    folder = tiny_checkpoint(tmp_path / "model")
    tower = {f"vision_tower.encoder.layers.1.self_attn.{n}_proj.weight": torch.ones(8, 8) for n in ("q", "k", "v", "o")}
    renamed(folder, "model.layers.", "language_model.model.layers.", tower)
    check(open_source(str(folder), layer=1), stored(folder, 1, "language_model.model.layers."))


def test_no_prefix(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    renamed(folder, "model.layers.", "layers.")
    check(open_source(str(folder), layer=1), stored(folder, 1, "layers."))


def test_prediction_blocks_are_no_layers(tmp_path: Path) -> None:
    """Multi-token prediction under `model.mtp.layers`, or as a layer behind the last."""
    folder = tiny_checkpoint(tmp_path / "model")
    expected = stored(folder, 0)
    extra = {f"model.mtp.layers.0.self_attn.{name}": torch.zeros_like(t) for name, t in expected.items()}
    extra |= {f"model.layers.{LAYERS}.self_attn.{name}": torch.zeros_like(t) for name, t in expected.items()}
    renamed(folder, "\0", "\0", extra)
    check(open_source(str(folder), layer=0), expected)
    with pytest.raises(InputError, match=rf"--layer {LAYERS} is out of range; model has layers 0 to {LAYERS - 1}"):
        open_source(str(folder), layer=LAYERS)


def test_two_attentions_of_one_number_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    renamed(folder, "\0", "\0", {f"draft.layers.0.self_attn.{n}": t.clone() for n, t in stored(folder, 0).items()})
    with pytest.raises(InputError, match=r"2 tensors named \*layers.0.self_attn.kv_a_proj_with_mqa.weight; expected"):
        open_source(str(folder))


def test_layer_1_is_not_layer_10(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model")
    extra = {f"model.layers.1{digit}.self_attn.{name}": torch.zeros_like(t)
             for name, t in stored(folder, 1).items() for digit in (0, 1)}
    renamed(folder, "\0", "\0", extra)
    check(open_source(str(folder), layer=1), stored(folder, 1))


def test_stored_frequencies_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints carry `rotary_emb.inv_freq`, which follows from the configuration."""
    folder = tiny_checkpoint(tmp_path / "model")
    expected = stored(folder, 0)
    renamed(folder, "\0", "\0", {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(ROPE // 2)})
    check(open_source(str(folder)), expected)


def test_a_single_file_wins_over_an_index(tmp_path: Path) -> None:
    """As in transformers and in the references' reader."""
    folder = tiny_checkpoint(tmp_path / "model", sharded=True)
    other = tiny_checkpoint(tmp_path / "other", seed=1)
    expected = stored(other, 0)
    (other / "model.safetensors").rename(folder / "model.safetensors")
    check(open_source(str(folder)), expected)


def test_one_layer_of_a_partial_download(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "model", sharded=True)
    expected = stored(folder, 0)
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    needed = {file for name, file in files.items() if ".layers.0.self_attn." in name}
    gone = set(files.values()) - needed
    assert gone
    for file in gone:
        (folder / file).unlink()
    check(open_source(str(folder)), expected)


def test_tensors_are_mapped_not_read(tmp_path: Path) -> None:
    """A view into the file, read-only: opening a 400 MB attention costs no memory."""
    source = open_source(str(tiny_checkpoint(tmp_path / "model", dtype=torch.bfloat16)))
    values = source.tensors["o_proj.weight"].load()
    base: Any = values
    while not isinstance(base, np.memmap):
        base = base.base
    assert not values.flags.writeable


# --- Presets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_opens(name: str) -> None:
    source = open_source(name, seed=4)
    assert (source.name, source.config) == (name, PRESETS[name])
    assert source.record == {"kind": "preset", "name": name, "seed": 4}


def test_a_path_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user has made is what the user means."""
    monkeypatch.chdir(tmp_path)
    tiny_checkpoint(tmp_path / "article")
    assert open_source("article").record["kind"] == "checkpoint"
    assert open_source("deepseek-v3").record["kind"] == "preset"


# --- The article's state_dict -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth", "bin", "st"])
@pytest.mark.parametrize("dims", [{}, {"d_model": 96, "down_dim": 24, "up_dim": 60, "num_heads": 6, "rope_head_dim": 8,
                                       "max_len": 40}], ids=["article", "other"])
def test_article(dims: dict[str, int], suffix: str, tmp_path: Path) -> None:
    state, file = article_state_dict(seed=5, **dims), tmp_path / f"layer.{suffix}"
    pickled = suffix in ("pt", "pth", "bin")
    torch.save(state, file) if pickled else save_file(state, file)
    source = open_source(str(file), allow_pickle=pickled)
    assert source.record["pickle"] is pickled
    d = {"d_model": 512, "down_dim": 128, "up_dim": 256, "num_heads": 8, "rope_head_dim": 26, "max_len": 512} | dims
    c, H = source.config, d["num_heads"]
    assert (c.hidden_size, c.num_attention_heads, c.kv_lora_rank, c.q_lora_rank) == (d["d_model"], H, d["down_dim"],
                                                                                    d["down_dim"])
    assert c.qk_nope_head_dim == c.v_head_dim == d["up_dim"] // H
    assert c.qk_rope_head_dim == d["rope_head_dim"]
    assert c.max_position_embeddings == d["max_len"]
    assert c.softmax_scale == pytest.approx((d["d_model"] // H + d["rope_head_dim"]) ** -0.5, rel=1e-15)
    w = load_attention(source, d["max_len"])
    same_linear(w.q_a, state, "down_proj_q")
    same_linear(w.q_b, state, "up_proj_q")
    same_linear(w.q_rope, state, "proj_qr")
    same_linear(w.o, state, "fc")
    same(w.kv_a.weight, torch.cat([state["down_proj_kv.weight"], state["proj_kr.weight"]]))
    same(w.kv_a.bias, torch.cat([state["down_proj_kv.bias"], state["proj_kr.bias"]]))
    for name, weight, bias in (("up_proj_k", w.w_uk, w.b_uk), ("up_proj_v", w.w_uv, w.b_uv)):
        same(weight, state[f"{name}.weight"].reshape(H, -1, d["down_dim"]))
        same(bias, state[f"{name}.bias"].reshape(H, -1))
    assert (w.q, w.q_a_norm, w.kv_a_norm) == (None, None, None)
    assert np.allclose(w.inv_freq, state["rope_q.inv_freq"].numpy(), rtol=1e-6)
