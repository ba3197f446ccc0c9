"""`manifest.json`: what a folder of graphs or engines holds, where it came from, and how to know that it is intact."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from exporter import __version__
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.signature import CACHE_DTYPES, TensorSpec, row_bytes
from exporter.weight_store import LINKED, check_linked

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class GraphEntry:
    """One graph of an export. `default` marks the one a session opens for its kind."""

    name: str
    kind: str
    formulation: str
    prefill_form: str
    default: bool
    file: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form, shapes as lists."""
        data = asdict(self)
        for side in ("inputs", "outputs"):
            data[side] = [{"name": t.name, "shape": list(t.shape), "dtype": t.dtype} for t in getattr(self, side)]
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> GraphEntry:
        """Inverse of `to_dict`."""
        sides = {side: tuple(TensorSpec(t["name"], tuple(t["shape"]), t["dtype"]) for t in data[side])
                 for side in ("inputs", "outputs")}
        return cls(**{**data, **sides})


@dataclass(frozen=True)
class Export:
    """An export that was opened and found intact."""

    folder: Path
    data: dict[str, Any]
    config: MLAConfig
    graphs: tuple[GraphEntry, ...]

    @property
    def cache(self) -> str:
        """append, scatter, concat or none."""
        return str(self.data["cache"])

    @property
    def dtype(self) -> str:
        """Compute dtype: fp32, fp16 or bf16."""
        return str(self.data["dtype"])

    @property
    def cache_dtype(self) -> str:
        """Of the cached latents: the compute dtype, or fp8 or int8."""
        return str(self.data.get("cache_dtype") or self.dtype)

    @property
    def quantised_cache(self) -> bool:
        """Whether a cache row is a latent in 8 bits, its scale, and the rotary key."""
        return self.cache_dtype in CACHE_DTYPES

    @property
    def max_context(self) -> int:
        """Largest number of past rows."""
        return int(self.data["max_context"])

    @property
    def row_multiple(self) -> int:
        """What the rows of past that are offered should be a multiple of: a decode step is then fastest."""
        return int(self.data.get("row_multiple", 1))

    @property
    def contract(self) -> str:
        """layer (one attention) or model (a decoder, or a slice of one)."""
        return str(self.data["contract"])

    @property
    def attentions(self) -> int:
        """Attentions of each graph, and so latent caches."""
        return int(self.data.get("attentions", 1))

    @property
    def decoder(self) -> DecoderConfig:
        """The whole decoder's configuration; InputError at layer scope, which has none."""
        if self.contract != "model":
            raise InputError(f"{self.folder}: holds one attention, not a model; export with --scope model")
        return DecoderConfig.from_dict(self.data["decoder"])

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one token takes in all latent caches together."""
        return self.attentions * row_bytes(self.config, self.dtype, self.cache_dtype)

    def graph(self, kind: str, formulation: str | None = None) -> GraphEntry:
        """The default graph of a kind, or the one of `formulation`."""
        found = [g for g in self.graphs if g.kind == kind and (g.default if formulation is None
                                                               else g.formulation == formulation)]
        if not found:
            have = ", ".join(g.name for g in self.graphs)
            raise InputError(
                f"{self.folder}: no {kind} graph{f' of formulation {formulation}' if formulation else ''}; "
                f"present: {have}"
            )
        return found[0]


def library_versions(*packages: str) -> dict[str, str]:
    """Installed versions, those absent left out."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def file_record(path: Path) -> dict[str, Any]:
    """Size, mtime and SHA-256 of a file."""
    with path.open("rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    stat = path.stat()
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}


def write(folder: Path, data: dict[str, Any], among: Sequence[Path] | None = None) -> None:
    """Write the manifest, last of all files, with the records of all others (or of those `among` them)."""
    files = {str(p.relative_to(folder)): file_record(p) for p in (sorted(folder.rglob("*")) if among is None else among)
             if p.is_file() and p.parent.name != LINKED}  # those have records of their own
    full = {"format": FORMAT, "toolkit": __version__, **data, "files": files}
    (folder / NAME).write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")


def rewrite(folder: Path, data: dict[str, Any]) -> None:
    """Replace a manifest at once, its file records as they are."""
    partial = folder / f".{NAME}.partial"
    partial.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    partial.replace(folder / NAME)


def read(folder: Path, what: str, rebuild: str, verify: bool = False) -> dict[str, Any]:
    """Read and check a manifest of `what`. Any mismatch is an InputError with the command that rebuilds it.

    `verify` hashes large files too, not only when their size or time differs.
    """
    path = folder / NAME
    if not path.is_file():
        if (folder / "config.json").is_file():
            raise InputError(f"{folder}: a checkpoint, not {what}; export it first, to a folder of its own: python -m "
                             f"exporter export {shlex.quote(str(folder))} --out DIR")
        if not folder.exists() and rank_of(folder) is None:  # what a rank is missing from is there
            rebuild = rebuild.removesuffix(" --overwrite")
        raise InputError(f"{folder}: no {NAME}; expected {what}; make it with: {rebuild}")
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found, files = data["format"], dict(data["files"])
        if "arguments" in data:  # an export knows how it was made
            rebuild = _named(rebuild, data["arguments"])
        if "tensor_parallel" in data and data.get("contract") != "tensor_parallel" and rank_of(folder) is None:
            rebuild = _named("python -m exporter export MODEL --out DIR", data.get("arguments"))  # a rank by itself
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        cut = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        wrong = "no valid JSON, cut off or altered" if cut else "not a manifest of this toolkit"
        raise InputError(f"{path}: {wrong}; rebuild with: {rebuild}") from None
    if found != FORMAT:
        raise InputError(f"{path}: format {found}, this version reads {FORMAT}; rebuild with: {rebuild}")
    try:
        for name, record in files.items():
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise InputError(f"{path}: names a file outside its folder, {name!r}; rebuild with: {rebuild}")
            _check_file(folder / name, name, record, rebuild, verify)
    except (KeyError, TypeError):
        raise InputError(f"{path}: a file's size, mtime_ns or sha256 is missing; rebuild with: {rebuild}") from None
    return data


def rank_of(folder: Path) -> Path | None:
    """The tensor-parallel export that `folder` is, or would be, a rank of; None for any other folder."""
    place = folder if folder.name not in ("", "..") else folder.resolve()
    if re.fullmatch(r"rank\d+", place.name) is None:
        return None
    return place.parent if _facts(place.parent).get("contract") == "tensor_parallel" else None


def export_command(folder: Path, more: str = "", part: bool = False) -> str:
    """The command that makes the export in `folder` again. Of a rank (`part`: it is known to be one) it is the whole
    export's: a rank is never made by itself, and an export of all ranks has no place within one."""
    whole = folder.parent if part else rank_of(folder)
    command = f"python -m exporter export MODEL --out {shlex.quote(str(whole or folder))}{more} --overwrite"
    return command if whole is None else _named(command, _facts(whole).get("arguments"))


def _facts(folder: Path) -> dict[str, Any]:
    """What a folder's manifest says, unchecked; nothing where there is none to read."""
    try:
        data = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def _named(command: str, arguments: Any) -> str:
    """A command with the arguments that an export was made by; as it is where they are not known."""
    if not isinstance(arguments, list) or not all(isinstance(word, str) for word in arguments):
        return command
    if "--tensor-parallel" in arguments:
        command = command.replace(" --tensor-parallel N", "")
    return command.replace("export MODEL ", f"export {shlex.join(arguments)} ", 1)


def _check_file(path: Path, name: str, record: dict[str, Any], rebuild: str, verify: bool) -> None:
    if not path.is_file():
        raise InputError(f"{path.parent}: {name} is missing; rebuild with: {rebuild}")
    stat = path.stat()
    if stat.st_size != record["size"]:
        raise InputError(f"{path}: {stat.st_size} bytes, the manifest says {record['size']}; rebuild with: {rebuild}")
    # small files are always hashed; a large one (weights) only when its time differs, after a copy for example
    if verify or stat.st_size < 1 << 22 or stat.st_mtime_ns != record["mtime_ns"]:
        digest = file_record(path)["sha256"]
        if digest != record["sha256"]:
            raise InputError(f"{path}: SHA-256 {digest[:12]}…, the manifest says {record['sha256'][:12]}…; it was "
                             f"changed; rebuild with: {rebuild}")


def open_export(folder: Path | str, verify: bool = False, part: bool = False) -> Export:
    """Open an export folder, checked; `verify` hashes the weights as well. `part`: a rank of a tensor-parallel export,
    which nobody else can run."""
    folder = Path(folder)
    rebuild = export_command(folder, part=part)
    data = read(folder, "an exported folder", rebuild, verify)
    if "tensor_parallel" in data and not part:
        whole = folder if data.get("contract") == "tensor_parallel" else rank_of(folder)
        what = "a tensor-parallel export" if whole == folder else "one rank of a tensor-parallel export"
        where = "DIR, the folder of all its ranks" if whole is None else shlex.quote(str(whole))
        raise InputError(f"{folder}: {what}, which runs with: python -m engines parallel {where}; for one graph export "
                         "without --tensor-parallel")
    if "graphs" not in data or "config" not in data:
        raise InputError(f"{folder / NAME}: not an export's manifest; make one with: {rebuild}")
    try:
        check_linked(folder, data["weights"])
        return Export(folder, data, MLAConfig.from_dict(data["config"]),
                      tuple(GraphEntry.from_dict(g) for g in data["graphs"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{folder / NAME}: malformed ({type(error).__name__}: {error}); rebuild with: {rebuild}"
                         ) from None
