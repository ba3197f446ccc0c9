"""Results of builds, kept for the user by the hash of all that went in, so that nothing is built twice.

The folder is MLA_EXPORT_CACHE, else `mla-export/engines` in XDG_CACHE_HOME or ~/.cache. An entry is `KEY.json`, the
builder's figures, and for engines that were kept `KEY.engine`, the plan. Files appear whole (written beside, renamed)
and are checked when read; what was used longest ago goes when all take more than MLA_EXPORT_CACHE_GB (10).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx

from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry, file_record

FORMAT = 1
LIMIT_GB = 10.0
_BLOCK = 1 << 24
_ABANDONED = 86400.0  # seconds after which a partial file has no writer any more


@dataclass(frozen=True)
class Figures:
    """What the builder said of a plan, in bytes; `seconds` of wall time, `version` of the library.

    `activation_bytes` is the largest of `profile_activation_bytes`, one figure per optimisation profile.
    """

    activation_bytes: int
    profile_activation_bytes: list[int]
    weight_bytes: int
    plan_bytes: int
    seconds: float
    version: str


def cache_folder() -> Path:
    """Where results are kept."""
    moved = os.environ.get("MLA_EXPORT_CACHE")
    return Path(moved) if moved else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / (
        "mla-export/engines")


def cache_limit() -> float:
    """Bytes that the results may take together."""
    stated = os.environ.get("MLA_EXPORT_CACHE_GB", "")
    try:
        return 1e9 * (float(stated) if stated else LIMIT_GB)
    except ValueError:
        raise InputError(f"MLA_EXPORT_CACHE_GB={stated!r}: expected a number of GB (10^9 bytes)") from None


def key_of(export: Export, graph: GraphEntry, **others: Any) -> str:
    """The hash of a graph's bytes, of the weights that it names and of `others` (profiles, options, versions)."""
    path = export.folder / graph.file
    named = {e.value for i in onnx.load(path, load_external_data=False).graph.initializer for e in i.external_data
             if e.key == "location"}
    linked = export.data["weights"].get("linked") or {}
    weights = {}
    for name in sorted(named):  # a copied file by its hash, a checkpoint's own by what the manifest knows it by
        record = linked[name] if name in linked else export.data["files"][name]
        weights[name] = {k: record[k] for k in ("size", "mtime_ns", "probe") if name in linked} or record["sha256"]
    facts = {"format": FORMAT, "graph": file_record(path)["sha256"], "weights": weights, **others}
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


class Store:
    """The kept results. `notes` says what was found damaged, or why nothing can be kept; no fault of it ends a build.

    Safe beside other processes: each file is replaced at once, and one that vanishes is one that is not there.
    """

    def __init__(self, folder: Path | None, limit: float = 1e9 * LIMIT_GB) -> None:
        self.folder, self.limit, self.notes = folder, limit, list[str]()

    @classmethod
    def of_user(cls, wanted: bool = True) -> Store:
        """The user's own, or one that holds nothing."""
        return cls(cache_folder() if wanted else None, cache_limit())

    def figures(self, key: str) -> Figures | None:
        """The figures of an earlier build."""
        entry = self._entry(key)
        return None if entry is None else Figures(**entry["figures"])

    def plan(self, key: str, to: Path) -> bool:
        """Copy the plan of an earlier build to a new file, checked; whether there was one."""
        entry = self._entry(key)
        if entry is None or entry["plan"] is None or self.folder is None:
            return False
        try:
            digest = _copy(self.folder / f"{key}.engine", to)
        except FileNotFoundError:
            return False
        if digest != entry["plan"]:
            to.unlink()
            self._damaged(key, f"{key[:12]}….engine")
            return False
        return True

    def keep(self, key: str, figures: Figures, plan: Path | None = None) -> None:
        """Keep a result: its figures, and the plan where one is given and fits the limit."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            digest = None
            if plan is not None and plan.stat().st_size <= self.limit:
                digest = self._place(f"{key}.engine", plan)
            body = {"figures": asdict(figures), "plan": digest}
            self._place(f"{key}.json", json.dumps({"sha256": _digest(body), **body}, indent=1) + "\n")
            self._shrink(key)
        except OSError as error:
            self._note(f"cache {self.folder}: {error.strerror or error}; nothing is kept for later builds")

    def _place(self, name: str, content: Path | str) -> str | None:
        """Write a file beside its place and move it there; the digest of a plan."""
        assert self.folder is not None
        handle, partial = tempfile.mkstemp(prefix=f".{name}.partial-", dir=self.folder)
        os.close(handle)
        try:
            digest = None
            if isinstance(content, str):
                Path(partial).write_text(content, encoding="utf-8")
            else:
                digest = _copy(content, Path(partial))
            os.replace(partial, self.folder / name)
            return digest
        except BaseException:
            Path(partial).unlink(missing_ok=True)
            raise

    def _entry(self, key: str) -> dict[str, Any] | None:
        """A whole and intact entry, marked as used now."""
        if self.folder is None:
            return None
        path = self.folder / f"{key}.json"
        try:
            entry: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            body = {name: entry[name] for name in ("figures", "plan")}
            if entry["sha256"] != _digest(body):
                raise ValueError
            Figures(**body["figures"])
        except FileNotFoundError:
            return None
        except OSError as error:
            self._note(f"cache {self.folder}: {error.strerror or error}; nothing is taken from earlier builds")
            return None
        except (ValueError, KeyError, TypeError):
            self._damaged(key, path.name)
            return None
        with suppress(OSError):
            os.utime(path)
        return body

    def _damaged(self, key: str, what: str) -> None:
        self._note(f"cache: {what} was damaged; built again")
        self._remove(key)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)

    def _remove(self, key: str) -> None:
        assert self.folder is not None
        for suffix in ("json", "engine"):
            with suppress(OSError):
                (self.folder / f"{key}.{suffix}").unlink()

    def _shrink(self, newest: str) -> None:
        """Remove what was used longest ago until all fit, the newest last; and what a killed writer left."""
        assert self.folder is not None
        sizes: dict[str, int] = {}
        used: dict[str, float] = {}
        for path in self.folder.iterdir():
            with suppress(OSError):
                stat = path.stat()
                if path.name.startswith("."):
                    if ".partial-" in path.name and time.time() - stat.st_mtime > _ABANDONED:
                        path.unlink()
                elif path.suffix in (".json", ".engine"):
                    sizes[path.stem] = sizes.get(path.stem, 0) + stat.st_size
                    used[path.stem] = max(used.get(path.stem, 0.0), stat.st_mtime)
        total = sum(sizes.values())
        for key in sorted(sizes, key=lambda k: (k == newest, used[k])):
            if total <= self.limit:
                return
            self._remove(key)
            total -= sizes[key]


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _copy(source: Path, to: Path) -> str:
    """Copy a file, block by block, onto the disk; its SHA-256."""
    digest = hashlib.sha256()
    with source.open("rb") as read, to.open("wb") as write:
        while block := read.read(_BLOCK):
            digest.update(block)
            write.write(block)
        write.flush()
        os.fsync(write.fileno())
    return digest.hexdigest()
