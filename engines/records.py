"""What a build leaves: records of its engines and attempts, the manifest that holds them, and opening them again."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines.backends import backend, plan_path
from engines.build_options import BuildOptions
from exporter import manifest
from exporter.errors import InputError
from exporter.manifest import Export

UNIFIED = "unified"  # the kind of an engine that serves decode (profile 0) and prefill (profile 1) over one plan


@dataclass(frozen=True)
class Attempt:
    """One candidate at one opt point: figures in bytes, or why there are none.

    `profiles`: min, opt and max of B, T and S, one dictionary per optimisation profile. `at_default`: whether the opt
    point is the one that kernels are usually chosen for. `seconds`: the build's own wall time, also where `cached` says
    that it was not built now.
    """

    engine: str
    graph: str
    kind: str
    formulation: str
    profiles: list[dict[str, list[int]]]
    at_default: bool
    activation_bytes: int | None = None
    profile_activation_bytes: list[int] | None = None
    weight_bytes: int | None = None
    plan_bytes: int | None = None
    seconds: float | None = None
    cached: bool = False
    refused: str | None = None


@dataclass(frozen=True)
class EngineRecord:
    """One candidate at its best opt point: the builder's figures in bytes, the limits of its profiles, the prediction.

    `activation_bytes` is the largest of `profile_activation_bytes`. `engine` is its own name, `graph` the ONNX graph
    that it is made of; they differ for a unified engine, whose `limits` are those of its prefill. `serves`: kind -> the
    graph whose sessions it answers, in the order of its optimisation profiles. `file` is None for a
    candidate that was measured and not kept. `milliseconds` is the median time of a step at the opt point, None where
    no device ran it. `command` builds the same with the vendor's own tool.
    """

    engine: str
    graph: str
    kind: str
    formulation: str
    default: bool
    file: str | None
    activation_bytes: int
    profile_activation_bytes: list[int]
    weight_bytes: int
    plan_bytes: int
    predicted_bytes: int
    limits: dict[str, list[int]]
    profiles: list[dict[str, list[int]]]
    serves: dict[str, str]
    seconds: float
    cached: bool = False
    milliseconds: float | None = None
    command: str | None = None

    def profile_of(self, kind: str) -> int | None:
        """The index of the optimisation profile that serves a kind; None if none does."""
        return list(self.serves).index(kind) if kind in self.serves else None


@dataclass(frozen=True)
class Engines:
    """A backend's engines of one export, opened and found intact."""

    folder: Path
    data: dict[str, Any]
    engines: tuple[EngineRecord, ...]

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every candidate at every opt point that was tried."""
        return tuple(Attempt(**a) for a in self.data["attempts"])

    def kept(self, kind: str) -> EngineRecord | None:
        """The engine with a plan that serves a kind."""
        return next((e for e in self.engines if e.file and e.profile_of(kind) is not None), None)

    def record(self, graph: str) -> EngineRecord:
        """The engine with a plan that computes a graph, by the graph's name; InputError lists those that were kept."""
        found = next((e for e in self.engines if e.file and graph in e.serves.values()), None)
        if found is not None:
            return found
        kept = ", ".join(e.engine for e in self.engines if e.file)
        raise InputError(f"{self.folder}: no engine of {graph} was kept; kept: {kept}")

    def plan(self, graph: str) -> Path:
        """The plan file of a graph."""
        return self.folder / str(self.record(graph).file)


def limits_of(profile: dict[str, list[int]]) -> dict[str, int]:
    """The largest sizes of one optimisation profile."""
    return {name: limits[2] for name, limits in profile.items()}


def rebuild_command(export: Export, backend_name: str) -> str:
    """The command that builds a backend's engines again."""
    return f"python -m engines build {shlex.quote(str(export.folder))} --backend {backend_name} --overwrite"


def _digest(export: Export) -> str:
    return hashlib.sha256((export.folder / manifest.NAME).read_bytes()).hexdigest()


def _stated(options: BuildOptions) -> dict[str, Any]:
    return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(options).items()}


def write_manifest(folder: Path, export: Export, backend_name: str, options: BuildOptions, facts: dict[str, Any],
                   ) -> None:
    """Write a backend's manifest, the last file of a build; `facts`: engines, attempts and what was decided."""
    tensorrt = backend(backend_name).tensorrt
    packages = ("tensorrt", "tensorrt-cu13", "tensorrt-rtx-cu13") if tensorrt else ("onnxruntime", "onnxruntime-gpu")
    manifest.write(folder, {
        "engines_of": _digest(export), "backend": backend_name, "sm": list(options.sm), "options": _stated(options),
        "libraries": manifest.library_versions(*packages), **facts})


def open_engines(export: Export, backend_name: str) -> Engines:
    """Open a backend's engines; refuses those that were changed, or built from another export."""
    folder, rebuild = plan_path(export, backend_name), rebuild_command(export, backend_name)
    data = manifest.read(folder, f"engines of {backend_name}", rebuild)
    if data.get("engines_of") != _digest(export):
        raise InputError(f"{folder}: built from another export than the one beside it; rebuild with: {rebuild}")
    try:
        made = Engines(folder, data, tuple(EngineRecord(**e) for e in data["engines"]))
        _ = made.attempts, data["options"]["version_compatible"]
        _ = [data[name] for name in ("timing", "refused", "notes")], [data["layout"][name] for name in ("kept", "why")]
        if (data["backend"], data["libraries"]) != (backend_name, dict(data["libraries"])):
            raise ValueError(f"backend {data['backend']!r}")
        for e in made.engines:
            if e.file is not None and e.file not in data["files"]:
                raise ValueError(f"no record of {e.file!r}")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / manifest.NAME}: malformed ({type(error).__name__}: {error}); rebuild with: "
                         f"{rebuild}") from None
    return made


def stale(made: Engines) -> str | None:
    """Why plans cannot be loaded by the library that is installed; None if they can, or if it is not installed."""
    from engines import trt

    name, built = str(made.data["backend"]), made.data.get("builder")
    if not backend(name).tensorrt or made.data["options"]["version_compatible"] or not trt.available(name):
        return None
    here = trt.load(name).__version__
    return None if here == built else f"built with {trt.MODULES[name][0]} {built}, installed is {here}"


def inspected(export: Export, names: Sequence[str]) -> tuple[list[Engines], dict[str, str]]:
    """The engines of several backends, and by backend what is wrong: damaged ones are not opened, stale ones are."""
    found, problems = list[Engines](), dict[str, str]()
    for name in names:
        try:
            found.append(open_engines(export, name))
            require_loadable(export, found[-1])
        except InputError as error:
            problems[name] = str(error)
    return found, problems


def require_loadable(export: Export, made: Engines) -> None:
    """InputError where plans are of another version of the library: they load in exactly their own."""
    reason = stale(made)
    if reason:
        raise InputError(f"{made.folder}: {reason}; a plan loads in the version that built it (or build it "
                         f"--version-compatible); rebuild with: {rebuild_command(export, str(made.data['backend']))}")


def built_backends(export: Export) -> list[str]:
    """Backends that have engines beside an export."""
    return sorted(p.parent.name for p in (export.folder / "engines").glob(f"*/{manifest.NAME}"))


def kept_bytes(records: Sequence[EngineRecord]) -> int:
    """What engines take on a device when all are loaded and one step runs at a time: plans, and the largest scratch."""
    return sum(e.plan_bytes for e in records) + max(e.activation_bytes for e in records)
