"""Synthetic checkpoints: what transformers would have saved, whatever the shards, in little memory."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from exporter.errors import InputError
from exporter.safetensors_file import read_header
from validate import synthetic
from validate.synthetic import checkpoint_bytes, named_config, tensor_shapes, write_checkpoint


def tiny(**changes: Any) -> dict[str, Any]:
    """A model of the same traits at a width that runs in milliseconds; every size differs from the others."""
    return {**named_config("v3-class")[1], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
            "first_k_dense_replace": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128,
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 20, "qk_rope_head_dim": 10, "v_head_dim": 12,
            "moe_intermediate_size": 40, "n_routed_experts": 4, "max_position_embeddings": 512, **changes}


def stored(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            found.update({name: f.get_tensor(name) for name in f.keys()})  # noqa: SIM118
    return found


VARIANTS = {"dense": {}, "experts": {"first_k_dense_replace": 1}, "no query rank": {"q_lora_rank": None},
            "biases": {"attention_bias": True}, "tied": {"tie_word_embeddings": True}}


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_loads_it_and_would_save_the_same_tensors(
        tmp_path: Path, changes: dict[str, Any], dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path / "made", tiny(**changes), dtype, shard_bytes=60_000)
    torch_dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    model, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch_dtype, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    with torch.no_grad():
        logits = model.eval()(torch.arange(12)[None]).logits.float()
    assert torch.isfinite(logits).all()
    assert 0.3 < logits.std() < 3
    model.save_pretrained(tmp_path / "saved")
    ours, theirs = stored(folder), stored(tmp_path / "saved")
    assert {n: (t.shape, t.dtype) for n, t in ours.items()} == {n: (t.shape, t.dtype) for n, t in theirs.items()}
    assert all(torch.equal(t, theirs[n]) for n, t in ours.items())


def test_values_depend_on_the_seed_and_not_on_the_shards(tmp_path: Path) -> None:
    first, again, other = (stored(write_checkpoint(tmp_path / name, tiny(), "fp32", shard_bytes=size, seed=seed))
                           for name, size, seed in (("a", 1 << 40, 0), ("b", 30_000, 0), ("c", 1 << 40, 1)))
    assert list(tmp_path.glob("a/*.safetensors")) == [tmp_path / "a" / "model.safetensors"]
    assert len(list(tmp_path.glob("b/*.safetensors"))) > 3
    assert all(torch.equal(t, again[n]) for n, t in first.items())
    assert not any(torch.equal(t, other[n]) for n, t in first.items())
    layers = [first[f"model.layers.{i}.self_attn.o_proj.weight"] for i in range(3)]
    assert not torch.equal(layers[0], layers[1])


def test_index_names_every_tensor_where_it_lies(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "made", tiny(), "bf16", shard_bytes=40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {name: t.file.name for file in folder.glob("*.safetensors") for name, t in read_header(file).items()}
    assert index["weight_map"] == found
    assert set(found) == {name for name, _ in tensor_shapes(tiny())}
    assert index["metadata"]["total_size"] == checkpoint_bytes(tiny(), "bf16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    largest = max(f.stat().st_size for f in folder.glob("*.safetensors"))
    assert largest < 40_000 + 8_000  # the header on top


def test_weights_are_of_full_rank_and_of_order_one(tmp_path: Path) -> None:
    config = tiny(hidden_size=256, intermediate_size=300, vocab_size=400)
    for name, t in stored(write_checkpoint(tmp_path / "made", config, "fp32")).items():
        if t.ndim == 1:
            assert abs(t.mean() - 1) < 0.2, name
        else:
            expected = 1.0 if "embed" in name else t.shape[1] ** -0.5
            assert float(t.std()) == pytest.approx(expected, rel=0.1), name
            assert int(torch.linalg.matrix_rank(t)) == min(t.shape), name


def test_memory_stays_small(tmp_path: Path) -> None:
    config = tiny(vocab_size=300_000)
    size = checkpoint_bytes(config, "fp32")
    assert size > 150_000_000
    tracemalloc.start()
    write_checkpoint(tmp_path / "made", config, "fp32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * 4 * synthetic.BLOCK
    assert peak < size / 2
    assert sum(f.stat().st_size for f in (tmp_path / "made").glob("*.safetensors")) > size


def test_named_configs_have_the_promised_sizes() -> None:
    dtype, config = named_config("v3-class")
    assert (dtype, checkpoint_bytes(config, "fp32")) == ("fp32", 778_137_600)
    dtype, config = named_config("v3-class-7gb")
    assert dtype == "bf16"
    assert 6.9e9 < checkpoint_bytes(config, "bf16") < 7.1e9


def test_bad_requests_leave_nothing(tmp_path: Path) -> None:
    for message, config, options in (("deepseek_v3", tiny(model_type="llama"), {}), ("fp16", tiny(), {"dtype": "fp16"}),
                                     ("shard_bytes", tiny(), {"shard_bytes": 0}),
                                     ("v_head_dim", {k: v for k, v in tiny().items() if k != "v_head_dim"}, {})):
        with pytest.raises(InputError, match=message):
            write_checkpoint(tmp_path / "out", config, **{"dtype": "fp32", **options})
    with pytest.raises(InputError, match="v3-class"):
        named_config("v4")
    assert not list(tmp_path.iterdir())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").touch()
    with pytest.raises(InputError, match="not empty"):
        write_checkpoint(tmp_path / "full", tiny(), "fp32")
    assert np.all([p.name == "kept" for p in (tmp_path / "full").iterdir()])
