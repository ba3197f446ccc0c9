"""ONNX Runtime's part of a build: its engine is the graph over the weight file; a build is the proof that it runs."""

from __future__ import annotations

import time
from pathlib import Path

from engines import lint, operator_library
from engines.build_request import BuildRequest
from engines.interpreter import Interpreter
from engines.measure import available_memory, measure
from engines.records import Attempt, EngineRecord
from engines.search import Candidate, profiles
from engines.session import external_places
from exporter.manifest import Export
from exporter.signature import Range

ORT_CONTEXT = 8192


def build_ort(export: Export, candidate: Candidate, request: BuildRequest) -> tuple[Attempt, EngineRecord]:
    """Open a graph, run it at the limits, and measure what that takes.

    It really runs: without --max-context up to ORT_CONTEXT rows, and never more than half of the memory that is free
    (the record's limits say what was measured).
    """
    graph = candidate.graph
    if operator_library.needed(graph.formulation):
        operator_library.library()  # bad input where there is none, not a step that failed
    path = export.folder / graph.file
    limits = affordable(path, profiles(export, candidate, request)[0], request.max_context is None)
    sizes = {name: r.max for name, r in limits.items()}
    started = time.perf_counter()
    found = measure(path, graph.inputs, graph.outputs, sizes, handed=external_places(export), timeout=request.timeout)
    weights, seconds = int(export.data["weights"]["bytes"]), round(time.perf_counter() - started, 3)
    stated = {name: [r.min, r.opt, r.max] for name, r in limits.items()}
    plan = path.stat().st_size + weights
    return (Attempt(candidate.name, graph.name, graph.kind, graph.formulation, [stated], True, found.activation_bytes,
                    [found.activation_bytes], weights, plan, seconds),
            EngineRecord(candidate.name, graph.name, graph.kind, graph.formulation, graph.default, None,
                         found.activation_bytes, [found.activation_bytes], weights, plan,
                         lint.live_peak(path, sizes), stated, [stated], {graph.kind: graph.name}, seconds))


def affordable(path: Path, limits: dict[str, Range], cap: bool) -> dict[str, Range]:
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
