"""Building engines from an export: profiles from the signature, lint, build, choose, record.

Engines of one backend lie in `DIR/engines/BACKEND` with a manifest of their own and appear together or not at all.
"""

from __future__ import annotations

import hashlib
import shlex
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engines import lint, predict, trt
from engines.backends import backend, plan_path
from engines.build_options import BuildOptions
from engines.interpreter import Interpreter
from engines.measure import available_memory, measure
from engines.ort import require_products
from engines.session import external_places
from exporter import manifest
from exporter.errors import CheckError, InputError
from exporter.formulations import BY_NAME
from exporter.manifest import Export, GraphEntry, open_export
from exporter.output import new_folder
from exporter.signature import Range, profile

DEFAULT_CHUNK = 512
ORT_CONTEXT = 8192
OPT_CONTEXT = 4096  # the profile's opt point for S: where most decoding happens


@dataclass(frozen=True)
class BuildRequest:
    """What `python -m engines build` was asked for. `None` limits come from the export."""

    folder: Path
    backend: str = "trt-rtx"
    max_batch: int | None = None
    prefill_batch: int = 1
    max_context: int | None = None
    chunk: int = DEFAULT_CHUNK
    decode_tokens: int = 1
    sm: tuple[str, ...] = ()
    formulation: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_batch", "max_context", "chunk", "decode_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: expected at least 1")


@dataclass(frozen=True)
class EngineRecord:
    """One built engine: the builder's figures in bytes, the profile's limits, and the prediction beside them.

    `file` is None for a candidate that was measured and not kept.
    """

    graph: str
    kind: str
    formulation: str
    default: bool
    file: str | None
    activation_bytes: int
    weight_bytes: int
    plan_bytes: int
    predicted_bytes: int
    limits: dict[str, list[int]]
    seconds: float


@dataclass(frozen=True)
class Engines:
    """A backend's engines of one export, opened and found intact."""

    folder: Path
    data: dict[str, Any]
    engines: tuple[EngineRecord, ...]

    def plan(self, graph: str) -> Path:
        """The plan file of a graph."""
        for engine in self.engines:
            if engine.graph == graph and engine.file:
                return self.folder / engine.file
        kept = ", ".join(e.graph for e in self.engines if e.file)
        raise InputError(f"{self.folder}: no engine of {graph} was kept; kept: {kept}")


def ranges(export: Export, graph: GraphEntry, request: BuildRequest) -> dict[str, Range]:
    """min, opt and max of B, T and S for one graph."""
    decode = graph.kind == "decode"
    batch = (request.max_batch or int(export.data["max_batch"])) if decode else request.prefill_batch
    context = request.max_context or export.max_context
    tokens = request.decode_tokens if decode else min(request.chunk, export.max_context)
    found = {"B": Range(1, 1, batch), "T": Range(1, tokens, tokens), "S": Range(1, min(OPT_CONTEXT, context), context)}
    used = {d for t in graph.inputs for d in t.shape if isinstance(d, str)}
    return {name: r for name, r in found.items() if name in used}


def _candidates(export: Export, request: BuildRequest) -> list[GraphEntry]:
    target = backend(request.backend).target
    takes = [g for g in export.graphs if export.dtype in BY_NAME[g.formulation].dtypes.get(target, ())]
    if not takes:
        raise InputError(f"{export.folder}: no graph that {request.backend} takes at {export.dtype}; export with "
                         f"--target {target}")
    if request.formulation == "auto":
        return takes
    chosen = [g for g in takes if g.formulation == request.formulation]
    if not chosen:
        raise InputError(f"--formulation {request.formulation}: this export has {', '.join(g.name for g in takes)} for "
                         f"{request.backend}")
    # a formulation of one kind leaves the other kind to the search
    kinds = {g.kind for g in chosen}
    return [*[g for g in takes if g.kind not in kinds], *chosen]


def build(request: BuildRequest, progress: Callable[..., None] = lambda message, share=None: None) -> Engines:
    """Build every candidate, keep per kind the one with the least activation, and record all figures."""
    export = open_export(request.folder)
    row = backend(request.backend)
    if not row.builds:
        raise InputError(f"--backend {request.backend}: runs graphs as they are, there is nothing to build")
    if request.max_context and request.max_context > export.max_context:
        raise InputError(f"--max-context {request.max_context}: the export takes up to {export.max_context} rows of "
                         "past; export again with a larger --max-context")
    external_places(export)  # says so where there are no weights
    if request.backend == "ort":
        require_products(export, str(export.folder))
    if request.sm:
        if request.backend != "trt-rtx":
            raise InputError(f"--sm is for trt-rtx; {request.backend} builds for the device that it runs on")
        trt.compute_capabilities(trt.load(request.backend), request.sm, request.backend)
    if row.tensorrt:
        trt.load(request.backend)
    candidates = _candidates(export, request)
    with new_folder(plan_path(export, request.backend), overwrite=request.overwrite) as folder:
        made, refused = _build_candidates(export, candidates, request, folder, progress)
        manifest.write(folder, _manifest(export, request, _choose(made, folder)) | {"refused": refused})
    return open_engines(export, request.backend)


def _build_candidates(export: Export, candidates: list[GraphEntry], request: BuildRequest, folder: Path,
                      progress: Callable[..., None]) -> tuple[list[EngineRecord], dict[str, str]]:
    """Lint all, then build all. A candidate that is only too large at these limits, or that the builder itself fails
    on, is left out with its reason, as long as its kind has another and it was not asked for by name; any other finding
    ends the build."""
    tensorrt = backend(request.backend).tensorrt
    refused = _too_large(export, candidates, request) if tensorrt else {}
    fitting = [g for g in candidates if g.name not in refused]
    named = [g.name for g in candidates if g.name in refused and g.formulation == request.formulation]
    lost = [g.name for g in candidates if g.kind not in {f.kind for f in fitting}]
    if named or lost:
        raise CheckError("; ".join(refused[name] for name in named or lost))
    made = []
    for graph in fitting:
        progress(f"{request.backend}: {graph.name}")
        try:
            made.append((_build_tensorrt if tensorrt else _build_ort)(export, graph, request, folder))
        except trt.BuildError as failure:
            rivals = [g for g in fitting if g.kind == graph.kind and g.name not in refused and g is not graph]
            if graph.formulation == request.formulation or not rivals:
                raise
            refused[graph.name] = f"{graph.name} was not built: {failure}"
    return made, refused


def _too_large(export: Export, candidates: list[GraphEntry], request: BuildRequest) -> dict[str, str]:
    """Lint every candidate; those that are too large at the limits, with the reason. Other findings are errors."""
    refused = {}
    for graph in candidates:
        sizes = {name: r.max for name, r in ranges(export, graph, request).items()}
        findings = lint.lint(export.folder / graph.file, sizes)
        if findings:
            first, more = findings[0], len(findings) - 1
            reason = (f"{graph.name} was not built: [{first.rule}] {first.node}: {first.message}"
                      + (f" (and {more} more)" if more else ""))
            if any(f.rule != lint.TOO_LARGE for f in findings):
                raise CheckError(reason)
            refused[graph.name] = reason
    return refused


def _build_tensorrt(export: Export, graph: GraphEntry, request: BuildRequest, folder: Path) -> EngineRecord:
    limits = ranges(export, graph, request)
    sizes = {name: r.max for name, r in limits.items()}
    path = export.folder / graph.file
    shapes, places = profile(graph.inputs, limits), external_places(export)
    plan = trt.build(request.backend, path, [shapes], BuildOptions(sm=request.sm), places)
    file = f"{graph.name}.engine"
    (folder / file).write_bytes(plan.data)
    predicted = predict.predicted(export, graph, sizes, request.backend, plan.version)
    return _record(graph, file, limits, plan.activation_bytes, plan.weight_bytes, plan.plan_bytes,
                   predicted.bytes if predicted else lint.live_peak(path, sizes), plan.seconds)


def _build_ort(export: Export, graph: GraphEntry, request: BuildRequest, folder: Path) -> EngineRecord:
    """ONNX Runtime has no plan of its own: its engine is the graph over the weight file. What a build adds is the proof
    that it opens and runs at the limits, and what that takes. It really runs: without --max-context up to ORT_CONTEXT
    rows, and never more than half of the memory that is free (the record's limits say what was measured)."""
    path = export.folder / graph.file
    limits = _affordable(path, graph, ranges(export, graph, request), request.max_context is None)
    sizes = {name: r.max for name, r in limits.items()}
    started = time.perf_counter()
    found = measure(path, graph.inputs, graph.outputs, sizes, handed=external_places(export))
    weights = int(export.data["weights"]["bytes"])
    return _record(graph, None, limits, found.activation_bytes, weights, path.stat().st_size + weights,
                   lint.live_peak(path, sizes), time.perf_counter() - started)


def _affordable(path: Path, graph: GraphEntry, limits: dict[str, Range], cap: bool) -> dict[str, Range]:
    """Limits whose tensors fit in half of the free memory: S is halved until they do, then T."""
    fitted = dict(limits)
    if cap and "S" in fitted:
        fitted["S"] = _shrunk(fitted["S"], ORT_CONTEXT)
    free = available_memory()
    for name in ("S", "T"):
        while name in fitted and fitted[name].max > 1:
            sizes = {n: r.max for n, r in fitted.items()}
            inputs = sum(t.bytes for t in Interpreter(path).shapes(sizes) if t.op == "input")
            # a runtime copies some of what the estimate counts once: leave it room
            if inputs + 3 * lint.live_peak(path, sizes) < free / 2:
                return fitted
            fitted[name] = _shrunk(fitted[name], fitted[name].max // 2)
    return fitted


def _shrunk(limit: Range, most: int) -> Range:
    high = min(limit.max, most)
    return Range(min(limit.min, high), min(limit.opt, high), high)


def _record(graph: GraphEntry, file: str | None, limits: dict[str, Range], activation: int, weights: int, plan: int,
            predicted: int, seconds: float) -> EngineRecord:
    return EngineRecord(graph.name, graph.kind, graph.formulation, graph.default, file, activation, weights, plan,
                        predicted, {n: [r.min, r.opt, r.max] for n, r in limits.items()}, round(seconds, 3))


def _choose(made: list[EngineRecord], folder: Path) -> list[EngineRecord]:
    """Per kind, the least activation becomes the default and keeps its file; the others keep their figures.

    ONNX Runtime (no files) keeps the export's default: there speed decides, and memory is reported.
    """
    def preference(engine: EngineRecord) -> tuple[bool, int]:
        return engine.file is None and not engine.default, engine.activation_bytes

    best = {kind: min((e for e in made if e.kind == kind), key=preference).graph for kind in {e.kind for e in made}}
    chosen = []
    for engine in made:
        kept = engine.graph in best.values()
        if engine.file and not kept:
            (folder / engine.file).unlink()
        chosen.append(EngineRecord(**{**asdict(engine), "default": kept, "file": engine.file if kept else None}))
    return chosen


def _digest(export: Export) -> str:
    return hashlib.sha256((export.folder / manifest.NAME).read_bytes()).hexdigest()


def _manifest(export: Export, request: BuildRequest, records: list[EngineRecord]) -> dict[str, Any]:
    row = backend(request.backend)
    packages = (
        ("tensorrt", "tensorrt-cu13", "tensorrt-rtx-cu13") if row.tensorrt else ("onnxruntime", "onnxruntime-gpu")
    )
    return {"engines_of": _digest(export), "backend": request.backend, "sm": list(request.sm),
            "libraries": manifest.library_versions(*packages), "engines": [asdict(r) for r in records]}


def open_engines(export: Export, backend_name: str) -> Engines:
    """Open a backend's engines; refuses those that were built from another export."""
    folder = plan_path(export, backend_name)
    rebuild = f"python -m engines build {shlex.quote(str(export.folder))} --backend {backend_name} --overwrite"
    data = manifest.read(folder, f"engines of {backend_name}", rebuild)
    if data.get("engines_of") != _digest(export):
        raise InputError(f"{folder}: built from another export than the one beside it; rebuild with: {rebuild}")
    try:
        return Engines(folder, data, tuple(EngineRecord(**e) for e in data["engines"]))
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder / manifest.NAME}: malformed ({type(error).__name__}: {error}); rebuild with: "
                         f"{rebuild}") from None


def built_backends(export: Export) -> list[str]:
    """Backends that have engines beside an export."""
    return sorted(p.parent.name for p in (export.folder / "engines").glob(f"*/{manifest.NAME}"))


def build_elsewhere(export: Export, request: BuildRequest) -> tuple[EngineRecord, ...]:
    """Build for the figures only, leaving the export untouched."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        made, _ = _build_candidates(export, _candidates(export, request), request, folder,
                                    lambda message, share=None: None)
        return tuple(_choose(made, folder))
