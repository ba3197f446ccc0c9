"""Where an export's weights lie: copied beside the graphs, left in the checkpoint's files, or nowhere yet.

`link` leaves a tensor where it is when the checkpoint holds it in the layout and dtype that the graph reads. Loaders
take external data from real files at or below the graph's folder and refuse paths out of it and symlinks, so every such
file is hard-linked into `linked/`: no byte is copied, and the export survives a checkpoint that is moved. Where the
file system cannot (another disk, another owner), the manifest says where the file is and sessions hand its values over.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from exporter.dtypes import STORED
from exporter.errors import InputError
from exporter.quantise import Scheme, quantise_plan, quantised_record
from exporter.safetensors_file import StoredSource
from exporter.weight_file import PlannedTensor, StoredTensor, lay_out, write_weights

WEIGHT_FILE = "weights.safetensors"
LINKED = "linked"
MODES = ("copy", "link", "none")
_PROBES, _BLOCK = 64, 4096


def linkable(stored: StoredSource | None, dtype: str) -> bool:
    """Whether a graph of this dtype can read the stored tensor as it lies."""
    kind = STORED[dtype]
    return stored is not None and stored.dtype == kind.safetensors and stored.offset % kind.itemsize == 0


def store(folder: Path, wide: Sequence[PlannedTensor], mode: str, progress: Callable[..., None],
          scheme: Scheme | None = None) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Put a plan's tensors where `mode` says, its projections as codes of `scheme`; returns where each lies and the
    manifest's record of it all."""
    plan = quantise_plan(wide, scheme)
    stored, record = _store(folder, plan, mode, progress)
    return stored, record | ({} if scheme is None else {"quantised": quantised_record(wide, stored, scheme)})


def _store(folder: Path, plan: Sequence[PlannedTensor], mode: str, progress: Callable[..., None],
           ) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    if mode == "none":
        _, _, stored = lay_out(plan, WEIGHT_FILE)
        return stored, _record(mode, stored, {})
    stays = [t for t in plan if mode == "link" and linkable(t.stored, t.dtype)]
    names = {t.name for t in stays}
    stored = write_weights(folder / WEIGHT_FILE, [t for t in plan if t.name not in names], progress)
    linked: dict[Path, str] = {}
    for t in stays:
        assert t.stored is not None
        name = linked.setdefault(t.stored.file, f"{LINKED}/{t.stored.file.name}")  # one folder, so names are unique
        stored[t.name] = StoredTensor(t.shape, t.dtype, t.stored.offset, t.nbytes, name)
    return stored, _record(mode, stored, {name: _link(folder / name, file) for file, name in linked.items()})


def _record(mode: str, stored: Mapping[str, StoredTensor], linked: dict[str, Any]) -> dict[str, Any]:
    written = [t for t in stored.values() if t.file == WEIGHT_FILE]
    return {
        "mode": mode,
        "file": WEIGHT_FILE,
        "bytes": sum(t.nbytes for t in stored.values()),
        "written_bytes": 0 if mode == "none" else sum(t.nbytes for t in written),
        "parameters": {name: prod(t.shape) for name, t in stored.items()},
        "linked": linked,
    }


def _link(place: Path, file: Path) -> dict[str, Any]:
    """Hard-link a checkpoint's file, symlinks resolved, to `place`; what finds it again if that cannot be."""
    real = file.resolve()
    place.parent.mkdir(exist_ok=True)
    try:
        os.link(real, place)
        how = "hardlink"
    except OSError:
        how = "handed"
    stat = real.stat()
    return {"how": how, "path": str(real), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "probe": probe(real)}


def probe(file: Path) -> str:
    """SHA-256 of a file's size and of 64 blocks spread over it: tells two checkpoints apart without reading them."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as f:
        for i in range(_PROBES):
            f.seek(max(0, (size - _BLOCK) * i // (_PROBES - 1)))
            digest.update(f.read(_BLOCK))
    return digest.hexdigest()


def check_linked(folder: Path, weights: Mapping[str, Any]) -> None:
    """Every linked file is where the manifest says, in its size and time; else an InputError with the way out."""
    for name, record in dict(weights.get("linked") or {}).items():
        place = linked_path(folder, name, record)
        again = f"python -m exporter export CHECKPOINT --out {shlex.quote(str(folder))} --relink"
        if not place.is_file():
            raise InputError(f"{folder}: its weights lie in {place}, which is not there; if the checkpoint moved, "
                             f"point the export to it with: {again}")
        stat = place.stat()
        if (stat.st_size, stat.st_mtime_ns) != (record["size"], record["mtime_ns"]):
            raise InputError(f"{folder}: {place} was changed since the export (its size or time differs); export "
                             f"again, or, if its content is the same, point to it anew with: {again}")


def linked_path(folder: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Where a linked file is to be read."""
    return folder / name if record["how"] == "hardlink" else Path(record["path"])


def relinked(folder: Path, weights: Mapping[str, Any], checkpoint: Path) -> dict[str, Any]:
    """The manifest's `weights` after pointing `folder` to the same files in another place."""
    records = dict(weights.get("linked") or {})
    for name, record in records.items():  # all of them, before anything is changed
        file = checkpoint / Path(name).name
        if not file.is_file():
            raise InputError(f"--relink: {checkpoint} has no {file.name}; expected the checkpoint that {folder} was "
                             "exported from")
        if probe(file.resolve()) != record["probe"]:
            raise InputError(f"--relink: {file} differs from the file that {folder} was exported from; export again")
    linked = {}
    for name in records:
        file, place = checkpoint / Path(name).name, folder / name
        partial = place.with_name(f".{place.name}.partial")
        partial.unlink(missing_ok=True)
        fresh = _link(partial, file)
        if fresh["how"] == "hardlink":
            partial.replace(place)
            partial.unlink(missing_ok=True)  # a rename between two names of one file leaves both
        elif place.is_file():
            place.unlink()
        linked[name] = fresh
    return {**weights, "linked": linked}
