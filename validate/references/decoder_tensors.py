"""Tensors of a whole decoder by canonical Hugging Face names, read with safetensors' own reader when asked for.

A vision-language wrapper's prefix is taken off, and fused experts [E, 2I, D] and [E, D, I] are cut into the matrices of
one expert. Quantised checkpoints are refused: a reference that dequantised as the exporter does would share its faults.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from exporter.decoder_config import DecoderConfig, tensor_shapes
from exporter.errors import InputError
from exporter.presets import hot_tensor
from validate.references.source import tensor_files

_ATTENTION = re.compile(r"((?:.*\.)?)layers\.\d+\.self_attn\.(?:\d+\.)?kv_a_proj_with_mqa\.\w+")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_QUANTISED = re.compile(r".+_(?:scale_inv|packed|scale)|.+\.(?:qweight|qzeros|weight_scale)")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class QuantisedError(InputError):
    """The checkpoint's weights are codes, which the references do not read."""


class DecoderTensors(ABC):
    """Tensors of one decoder; nothing is kept."""

    @abstractmethod
    def get(self, name: str) -> torch.Tensor:
        """One tensor in its stored dtype; InputError where there is none."""

    @abstractmethod
    def within(self, prefix: str) -> dict[str, torch.Tensor]:
        """All tensors below a prefix, under the rest of their names (an attention, biases included)."""


def open_decoder_tensors(source: Mapping[str, Any], config: DecoderConfig) -> DecoderTensors:
    """The tensors that a manifest's `source` record names: a checkpoint folder, or a preset's seeded weights.

    InputError where it is gone or damaged, QuantisedError where it is quantised.
    """
    if source["kind"] == "preset":
        return _Seeded(config, int(source["seed"]))
    if source["kind"] == "checkpoint":
        return _Folder(Path(source["path"]))
    raise InputError(f"source kind is {source['kind']!r}; expected 'preset' or 'checkpoint' of a whole decoder")


class _Seeded(DecoderTensors):
    def __init__(self, config: DecoderConfig, seed: int) -> None:
        self._shapes, self._seed = tensor_shapes(config), seed

    def get(self, name: str) -> torch.Tensor:
        if name not in self._shapes:
            raise InputError(f"a preset has no tensor {name}")
        return torch.from_numpy(hot_tensor(name, self._shapes[name], self._seed))

    def within(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): self.get(name) for name in self._shapes if name.startswith(prefix)}


class _Folder(DecoderTensors):
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        _refuse_quantisation(folder)
        self._files = tensor_files(folder)  # stored name -> file
        self._root = wrapper_prefix(self._files, folder)

    def get(self, name: str) -> torch.Tensor:
        stored = self._stored(name)
        if stored is not None:
            return self._read(stored)
        expert = _EXPERT.fullmatch(name)
        if expert:
            return self._fused(expert[1], int(expert[2]), expert[3])
        raise InputError(f"{self._folder} has no tensor {name}; the configuration asks for it")

    def within(self, prefix: str) -> dict[str, torch.Tensor]:
        root = self._prefix(prefix)
        names = [n for n in self._files if n.startswith(root)]
        if not names:
            raise InputError(f"{self._folder} has no tensors {prefix}*; the configuration asks for them")
        return {n.removeprefix(root): self._read(n) for n in names}

    def _prefix(self, canonical: str) -> str:
        """A wrapper ends in `model.` itself, or has a whole `model.` inside, or there is no wrapper."""
        bare = canonical.removeprefix("model.")
        for candidate in (f"{self._root}model.{bare}", f"{self._root}{bare}"):
            if any(n.startswith(candidate) for n in self._files):
                return candidate
        return self._root + canonical

    def _stored(self, canonical: str) -> str | None:
        bare = canonical.removeprefix("model.")
        for name in (self._root + canonical, self._root + bare, canonical):
            if name in self._files:
                return name
        return None

    def _fused(self, experts: str, index: int, matrix: str) -> torch.Tensor:
        """One matrix of one expert out of a fused stack: gate above up, [E, 2I, D], and down, [E, D, I]."""
        fused = "down_proj" if matrix == "down" else "gate_up_proj"
        stored = self._stored(f"{experts}.{fused}") or self._stored(f"{experts}.{fused}.weight")
        if stored is None:
            raise InputError(f"{self._folder} has neither {experts}.{index}.{matrix}_proj.weight nor "
                             f"{experts}.{fused}; the configuration asks for them")
        part = self._read(stored, index)
        if matrix == "down":
            return part
        half = len(part) // 2
        return part[:half] if matrix == "gate" else part[half:]

    def _read(self, name: str, index: int | None = None) -> torch.Tensor:
        path = self._folder / self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
        except (SafetensorError, FileNotFoundError) as error:
            raise InputError(f"{path} cannot be read as safetensors ({error})") from error
        if tensor.dtype not in _FLOATS or _QUANTISED.fullmatch(name):
            raise QuantisedError(f"{self._folder} is quantised ({name} is {str(tensor.dtype).removeprefix('torch.')}), "
                                 "and the references read floats only")
        return tensor


def wrapper_prefix(names: Iterable[str], folder: Path) -> str:
    """What stands before `model.` (or before `layers.`, where a wrapper leaves that out) in a checkpoint's names."""
    prefixes = {m[1] for m in map(_ATTENTION.fullmatch, names) if m and "mtp" not in m[1].split(".")}
    if len(prefixes) != 1:
        found = ", ".join(sorted(prefixes)) or "none"
        raise InputError(f"{folder} should have one text decoder with '…layers.N.self_attn.kv_a_proj_with_mqa', found "
                         f"prefixes: {found}; expected a Hugging Face MLA model")
    return prefixes.pop().removesuffix("model.")


def canonical_name(name: str, prefix: str) -> str:
    """A stored name of the text decoder without its wrapper."""
    bare = name.removeprefix(prefix)
    return f"model.{bare}" if bare.startswith(("layers.", "embed_tokens.", "norm.")) else bare


def _refuse_quantisation(folder: Path) -> None:
    try:
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        sections = [raw, *(raw[key] for key in ("text_config", "language_config") if isinstance(raw.get(key), dict))]
    except (OSError, ValueError, AttributeError):
        raise InputError(f"{folder}: no readable config.json; expected a Hugging Face checkpoint folder") from None
    for section in sections:
        config = section.get("quantization_config")
        if config:
            method = config.get("quant_method") if isinstance(config, dict) else config
            raise QuantisedError(f"{folder} is quantised ({method}), and the references read floats only")
