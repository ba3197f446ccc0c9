"""A Hugging Face checkpoint folder: config.json, the shards its index names, and their tensors in canonical names.

No code is run from a checkpoint, no path leaves its folder (the hub cache's symlinks are followed by name only), and no
value is read before it is needed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from exporter.errors import InputError
from exporter.layouts import canonical
from exporter.safetensors_file import SourceTensor, StoredSource, read_header

PICKLES = (".pt", ".pth", ".bin")


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder: the parsed config.json, canonical tensors (name -> tensor) and the files that hold them."""

    folder: Path
    raw: Mapping[str, Any]
    tensors: Mapping[str, SourceTensor]
    files: tuple[Path, ...]

    @property
    def where(self) -> str:
        """The config's path, for messages."""
        return str(self.folder / "config.json")

    def record(self, **more: Any) -> dict[str, Any]:
        """What finds this source again, with sizes and times of its files."""
        config = self.folder / "config.json"
        codes = sum(t.stored is None for t in self.tensors.values())  # all others are read as they lie
        return {"kind": "checkpoint", "path": str(self.folder.resolve()), **more, "config_sha256": sha256(config),
                **({"dequantised_tensors": codes} if codes else {}), "files": [stamp(p) for p in self.files]}


def stamp(path: Path) -> dict[str, Any]:
    """Name, size and mtime of a file."""
    stat = path.stat()
    return {"name": path.name, "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; anything else is an InputError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a checkpoint folder."""
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder")
    return read_json(config)


def _shard(folder: Path, name: Any) -> Path:
    """A shard the index names: a file of the folder, by name. (The hub cache's symlinks are fine, paths are not.)"""
    if not isinstance(name, str) or PurePosixPath(name).name != name or name in ("", ".", ".."):
        raise InputError(f"{folder.name}: the index names {name!r}; expected the plain name of a file in the folder")
    return folder / name


def _stored(folder: Path, wanted: re.Pattern[str]) -> dict[str, StoredSource]:
    """Wanted tensors by name. A single file wins over an index, as in transformers; of the shards only those that hold
    wanted tensors need be there, so one layer of a partial download can be exported."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return {n: t for n, t in read_header(single).items() if wanted.match(n)}
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
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


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights, or says where they should be, not only a config.json."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return any((folder / n).exists() for n in names) or any(p.suffix in PICKLES for p in folder.iterdir())


def attention_of(layer: int) -> str:
    """Pattern of the tensor names of one layer's attention, in any layout."""
    return rf"(?:.*\.)?layers\.{layer}\.(?:self_attn|attn)\."


def slice_of(layers: range, depth: int) -> str:
    """Pattern of the tensor names of a slice of the decoder, with embedding, norm and head where it has that end."""
    wanted = [rf"(?:.*\.)?layers\.(?:{'|'.join(map(str, layers))})\."]
    if layers.start == 0 or layers.stop == depth:  # a tied head is the embedding
        wanted.append(r"(?:.*\.)?embed(?:_tokens)?\.")
    if layers.stop == depth:
        wanted.append(r"(?:\w+\.)?(?:model\.)?(?:norm|lm_head|head)\.")
    return "|".join(wanted)


def open_checkpoint(folder: Path, wanted: str = "", weights: bool = True) -> Checkpoint:
    """Open a folder; only tensors whose stored names match `wanted` and their shards, without `weights` none at all."""
    raw = read_config(folder)
    if not weights:
        return Checkpoint(folder, raw, {}, ())
    stored = _stored(folder, re.compile(wanted))
    tensors = canonical(stored, raw, str(folder / "config.json"))
    files = sorted({t.file for t in stored.values()})
    return Checkpoint(folder, raw, tensors, tuple(files))
