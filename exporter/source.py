"""MODEL, whatever it is, as one `Source`: a configuration, lazily loaded tensors, and a record that finds it again.

A preset draws its tensors from a seed, a Hugging Face folder maps them from safetensors, the article's layer comes from
its state_dict. No code is run from a checkpoint, no path leaves its folder, no pickle is read unless asked for.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from exporter.config import MLAConfig, RopeParameters
from exporter.errors import InputError
from exporter.families import ATTENTION_SCOPE, IGNORED_TENSORS, config_from_hf
from exporter.presets import PRESETS, hot_tensor, preset_config, source_shapes
from exporter.safetensors_file import SourceTensor, StoredSource, read_header

PICKLES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Source:
    """One attention's source. `record` goes into the manifest: parity goes back to it, never to exported weights."""

    name: str
    config: MLAConfig
    tensors: Mapping[str, SourceTensor]
    record: dict[str, Any]


def open_source(model: str, *, layer: int | None = None, seed: int = 0, allow_pickle: bool = False) -> Source:
    """Resolve MODEL: a preset name, a checkpoint folder, or a state_dict file of the article's layer."""
    path = Path(model)
    if path.is_dir():
        return _checkpoint(path, layer or 0)
    if path.is_file():
        if layer not in (None, 0):
            raise InputError(f"--layer {layer} given for {path.name}; a state_dict holds one layer, leave --layer out")
        return _article(path, allow_pickle)
    if model not in PRESETS and ("/" in model or path.suffix):  # `glm-4.7-flash` has no suffix
        raise InputError(f"MODEL {model!r} does not exist; expected a checkpoint folder, a state_dict file or a preset")
    config = preset_config(model)
    if layer is not None and not 0 <= layer < config.num_hidden_layers:
        raise InputError(f"--layer {layer} is out of range; {model} has layers 0 to {config.num_hidden_layers - 1}")
    return seeded_source(model, config, seed)


def seeded_source(name: str, config: MLAConfig, seed: int) -> Source:
    """Hot seeded weights of any configuration, under a preset's name."""
    tensors = {tensor: SourceTensor(shape, partial(hot_tensor, tensor, shape, seed))
               for tensor, shape in source_shapes(config).items()}
    return Source(name, config, tensors, {"kind": "preset", "name": name, "seed": seed})


def reopen(record: Mapping[str, Any]) -> Source:
    """The source that a manifest's `source` record names."""
    if record["kind"] == "preset":
        return open_source(record["name"], seed=record["seed"])
    return open_source(record["path"], layer=record.get("layer"), allow_pickle=bool(record.get("pickle")))


def _stamp(path: Path) -> dict[str, Any]:
    stat = path.stat()
    return {"name": path.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _shard(folder: Path, name: Any) -> Path:
    """A shard the index names: a file of the folder, by name. (The hub cache's symlinks are fine, paths are not.)"""
    if not isinstance(name, str) or PurePosixPath(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{folder.name}: the index names {name!r}; expected the plain name of a file in the folder")
    return folder / name


def _checkpoint_tensors(folder: Path, wanted: re.Pattern[str]) -> dict[str, StoredSource]:
    """Wanted tensors by name. A single file wins over an index, as in transformers; of the shards only those that hold
    wanted tensors need be there, so one layer of a partial download can be exported."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {n: t for n, t in read_header(single).items() if wanted.match(n)}
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise InputError(f"{index}: expected an object `weight_map` (tensor -> file)")
        shards = {name: _shard(folder, shard) for name, shard in weight_map.items()}
        needed = {shards[n] for n in shards if wanted.match(n)}
        for shard in sorted(needed):
            if not shard.is_file():
                raise InputError(f"{folder.name}: the index names {shard.name}, which is not in the folder; fetch the "
                                 "missing shard")
        headers = {p: read_header(p) for p in needed}
        found = {}
        for name, shard in shards.items():
            if wanted.match(name):
                if name not in headers[shard]:
                    raise InputError(f"{shard.name}: lacks tensor {name}, which the index places there")
                found[name] = headers[shard][name]
        return found
    pickles = [p.name for p in folder.iterdir() if p.suffix in PICKLES]
    hint = f" ({pickles[0]} is a pickle: convert it with save_pretrained(safe_serialization=True))" if pickles else ""
    raise InputError(f"{folder}: neither model.safetensors nor model.safetensors.index.json found{hint}")


def _checkpoint(folder: Path, layer: int) -> Source:
    config_file = folder / "config.json"
    if not config_file.is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    raw = _read_json(config_file)
    config = config_from_hf(raw, str(config_file))
    if not 0 <= layer < config.num_hidden_layers:
        raise InputError(
            f"--layer {layer} is out of range; {folder.name} has layers 0 to {config.num_hidden_layers - 1}"
        )
    quantised = raw.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "method not stated") if isinstance(quantised, dict) else quantised
        raise InputError(f"{config_file}: weights are quantised ({method}); expected fp32, fp16 or bf16 weights; "
                         "dequantise the checkpoint first")
    wanted = re.compile(rf"^((?:.*\.)?layers\.{layer}\.{re.escape(ATTENTION_SCOPE)})(.+)$")
    found = {wanted.match(n): t for n, t in _checkpoint_tensors(folder, wanted).items()}
    # a vision tower has layers.N.self_attn too, but no latent projection; prediction blocks are no layer of the model
    prefixes = {m[1] for m in found if m and m[2] == "kv_a_proj_with_mqa.weight" and "mtp" not in m[1].split(".")}
    if len(prefixes) != 1:
        raise InputError(f"{folder}: {len(prefixes)} tensors named *layers.{layer}.{ATTENTION_SCOPE}kv_a_proj_with_mqa."
                         f"weight; expected one, the MLA attention of layer {layer}")
    stored = {m[2]: t for m, t in found.items() if m and m[1] in prefixes}
    tensors = {name: SourceTensor(t.shape, t.load) for name, t in stored.items() if name not in IGNORED_TENSORS}
    files = sorted({t.file for t in stored.values()})
    record = {"kind": "checkpoint", "path": str(folder.resolve()), "layer": layer,
              "config_sha256": _sha256(config_file), "files": [_stamp(p) for p in files]}
    return Source(f"{folder.name} layer {layer}", config, tensors, record)


def _article_config(shapes: Mapping[str, tuple[int, ...]], where: Path) -> MLAConfig:
    """The article's MLAConfig from the tensor shapes; its scale divides by sqrt(d_model / heads + rope_head_dim)."""
    try:
        (d_c, hidden), rope = shapes["down_proj_kv.weight"], shapes["proj_kr.weight"][0]
        heads = shapes["proj_qr.weight"][0] // rope
        if shapes["proj_qr.weight"][0] % rope or shapes["up_proj_k.weight"][0] % heads or (
                shapes["up_proj_v.weight"][0] % heads):
            raise InputError(f"{where.name}: proj_qr {list(shapes['proj_qr.weight'])} must be rope_head_dim x heads, "
                             f"with rope_head_dim {rope} from proj_kr, and the heads must divide the other projections")
        positions = shapes.get("rope_q.cos_cached", shapes.get("rope_k.cos_cached", (512,)))
        return MLAConfig(
            model_type="article", hidden_size=hidden, num_attention_heads=heads, kv_lora_rank=d_c,
            q_lora_rank=shapes["down_proj_q.weight"][0], qk_nope_head_dim=shapes["up_proj_k.weight"][0] // heads,
            qk_rope_head_dim=rope, v_head_dim=shapes["up_proj_v.weight"][0] // heads, rope=RopeParameters(),
            max_position_embeddings=max(positions), rope_layout="half", latent_norm=False,
            query_rope_from_hidden=True, softmax_scale=(hidden // heads + rope) ** -0.5)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{where.name}: not a state_dict of the article's MLALayer ({error} is missing or misshapen); "
                         "expected down_proj_kv, up_proj_k, up_proj_v, down_proj_q, up_proj_q, proj_qr, proj_kr, fc"
                         ) from None


def _check_article_rope(tensors: Mapping[str, SourceTensor], config: MLAConfig, where: Path) -> None:
    """Rotary buffers are not exported, the graph has its own tables: those of another base would silently be lost."""
    d_r, theta = config.qk_rope_head_dim, config.rope.rope_theta
    expected = theta ** (-np.arange(0, d_r, 2) / d_r)
    for name in ("rope_q.inv_freq", "rope_k.inv_freq"):
        if name in tensors:
            found = tensors[name].load().astype(np.float64)
            if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-2, atol=1e-6):
                raise InputError(f"{where.name}: {name} {list(found.shape)} is not the article's RoPE; expected "
                                 f"{theta:.0f}^(-2i / {d_r}) for {d_r} rotary columns (is this another layer?)")


def _article(path: Path, allow_pickle: bool) -> Source:
    if path.suffix in PICKLES:
        if not allow_pickle:
            raise InputError(
                f"{path.name} is a pickle; expected .safetensors (or pass --allow-pickle for weights you trust)"
            )
        tensors = _pickled(path)
    else:
        tensors = {name: SourceTensor(t.shape, t.load) for name, t in read_header(path).items()}
    config = _article_config({name: t.shape for name, t in tensors.items()}, path)
    _check_article_rope(tensors, config, path)
    kept = {name: t for name, t in tensors.items() if not name.startswith(("rope_q.", "rope_k."))}
    record = {"kind": "article", "path": str(path.resolve()), "pickle": path.suffix in PICKLES,
              "files": [_stamp(path) | {"sha256": _sha256(path)}]}
    return Source(path.name, config, kept, record)


def _pickled(path: Path) -> dict[str, SourceTensor]:
    import torch  # heavy, and only here

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{path.name}: torch.load(weights_only=True) refused it "
                         f"({type(error).__name__}: {str(error).partition(chr(10))[0]})") from None
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, torch.Tensor)
                                              for n, t in state.items()):
        raise InputError(f"{path.name}: expected a plain state_dict (name -> tensor)")
    for name, t in state.items():
        if not t.is_floating_point() or t.layout != torch.strided:
            raise InputError(f"{path.name}: tensor {name} is {t.dtype}, {t.layout}; expected dense floating-point "
                             "tensors")
    return {name: SourceTensor(tuple(t.shape), partial(_as_float32, t)) for name, t in state.items()}


def _as_float32(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().numpy()
    return array
