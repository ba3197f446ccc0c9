"""Raw tensors of one attention from a manifest's `source` record, read without any of the exporter's own readers."""

from __future__ import annotations

import json
import pickle
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.presets import hot_weights, preset_config

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_tensors(source: Mapping[str, Any], config: MLAConfig | None = None) -> dict[str, torch.Tensor]:
    """Tensors of one attention in the source's own names without prefix (`kv_b_proj.weight`), stored dtype kept.

    `source` is one of
      {"kind": "preset", "name", "seed"}                 seeded hot weights, float32; `config` replaces the preset's own
      {"kind": "checkpoint", "path", "layer"}            a Hugging Face folder, sharded or not
      {"kind": "article", "path", "pickle"}              the article's state_dict: safetensors, or .pt if `pickle`
    InputError where the kind is unknown, or a file or the layer is missing or unreadable.
    """
    kind = source.get("kind")
    if kind == "preset":
        shape_config = config if config is not None else preset_config(source["name"])
        return {name: torch.from_numpy(array) for name, array in hot_weights(shape_config, int(source["seed"]))}
    if kind == "checkpoint":
        return _checkpoint(Path(source["path"]), int(source["layer"]))
    if kind == "article":
        return _article(Path(source["path"]), bool(source.get("pickle", False)))
    raise InputError(f"source kind is {kind!r}; expected 'preset', 'checkpoint' or 'article'")


def _checkpoint(folder: Path, layer: int) -> dict[str, torch.Tensor]:
    files = tensor_files(folder)
    prefix = _attention_prefix(files, folder, layer)
    by_file: dict[str, list[str]] = defaultdict(list)
    for name, file in files.items():
        if name.startswith(prefix):
            by_file[file].append(name)
    tensors: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        tensors.update(_read(folder / file, names))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def tensor_files(folder: Path) -> dict[str, str]:
    """Tensor name -> file name inside `folder`. A single file wins over an index, as in transformers."""
    if (folder / _INDEX).is_file() and not (folder / _SINGLE).is_file():
        try:
            weight_map = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError) as error:
            raise InputError(f"{folder / _INDEX} is no safetensors index with a weight_map; fetch it again") from error
        return {str(name): str(file) for name, file in weight_map.items()}
    if not (folder / _SINGLE).is_file():
        raise InputError(f"{folder} has neither {_INDEX} nor {_SINGLE}; expected a Hugging Face checkpoint folder")
    try:
        with safe_open(folder / _SINGLE, framework="pt") as file:
            return dict.fromkeys(file.keys(), _SINGLE)
    except SafetensorError as error:
        raise InputError(f"{folder / _SINGLE} cannot be read as safetensors ({error}); fetch it again") from error


def _attention_prefix(files: Mapping[str, str], folder: Path, layer: int) -> str:
    """The prefix of the layer's MLA tensors: `model.layers.N.self_attn.`, with a wrapper's prefix before it or not.

    A vision tower has `layers.N.self_attn.` too, but no `kv_a_proj_with_mqa`; multi-token-prediction blocks have it,
    but are no layer of the model.
    """
    pattern = re.compile(rf"((?:.*\.)?layers\.{layer}\.self_attn\.)kv_a_proj_with_mqa\.weight")
    prefixes = {match[1] for match in map(pattern.fullmatch, files) if match and "mtp" not in match[1].split(".")}
    if len(prefixes) != 1:
        found = ", ".join(sorted(prefixes)) or "none"
        raise InputError(f"{folder} should have one '…layers.{layer}.self_attn.kv_a_proj_with_mqa.weight', found: "
                         f"{found}; check the layer number and that the model uses MLA")
    return prefixes.pop()


def _read(path: Path, names: list[str] | None = None) -> dict[str, torch.Tensor]:
    """Named tensors (default: all) of one safetensors file, dtype as stored."""
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected a safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in (names if names is not None else list(file.keys()))}
    except SafetensorError as error:
        raise InputError(f"{path} cannot be read as safetensors ({error})") from error


def _article(path: Path, pickled: bool) -> dict[str, torch.Tensor]:
    if not pickled:
        return _read(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected a state_dict saved by torch.save")
    # weights_only: a pickle from elsewhere must not run code here.
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise InputError(f"{path} cannot be read as a state_dict of plain tensors; save model.state_dict()") from error
    if not isinstance(state, dict) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"{path} does not hold a plain state_dict (name -> tensor); save model.state_dict()")
    return dict(state)
