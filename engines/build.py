"""Building engines from an export: lint, build every candidate, choose, record.

Engines of one backend lie in `DIR/engines/BACKEND` with a manifest of their own and appear together or not at all.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engines import bounded, trt
from engines.backends import backend, plan_path
from engines.build_request import BuildRequest
from engines.ort import require_products
from engines.ort_build import build_ort
from engines.records import Attempt, EngineRecord, Engines, built_backends, open_engines, write_manifest
from engines.search import OPT_CONTEXT, Candidate, Choice, candidates, choose, layouts_to_build, ranges
from engines.session import external_places
from engines.store import Store
from engines.trials import Progress, Trials
from exporter.errors import InputError
from exporter.manifest import Export, open_export
from exporter.output import new_folder

__all__ = ["OPT_CONTEXT", "BuildRequest", "EngineRecord", "Engines", "build", "build_elsewhere", "built_backends",
           "open_engines", "ranges"]


def build(request: BuildRequest, progress: Progress = lambda message, share=None: None) -> Engines:
    """Build every candidate at every opt point, keep the best engine per kind, and record all figures.

    Best: the fastest where a CUDA device can time steps, else the least activation. InputError for a request that
    cannot be; CheckError where a graph would be misread, or no candidate of a kind builds.
    """
    export = open_export(request.folder)
    _check(export, request)
    found = candidates(export, request)
    target = plan_path(export, request.backend)
    with bounded.locked(target), new_folder(target, overwrite=request.overwrite) as folder:
        if not backend(request.backend).tensorrt:
            write_manifest(folder, export, request.backend, request.options,
                           _built_ort(export, found, request, progress))
        else:
            with bounded.Builder(request.timeout) as builder:
                trials = Trials(export, request, folder, builder, Store.of_user(request.cache), progress)
                trials.run(found)
                facts = _kept(trials, target)
            write_manifest(folder, export, request.backend, request.options, facts)
    return open_engines(export, request.backend)


def build_elsewhere(export: Export, request: BuildRequest) -> tuple[EngineRecord, ...]:
    """Build for the figures only, leaving the export untouched; what was built before is not built again."""
    with tempfile.TemporaryDirectory() as temporary, bounded.Builder(request.timeout) as builder:
        trials = Trials(export, request, Path(temporary), builder, Store.of_user(request.cache))
        trials.run(candidates(export, request))
        records = trials.records()
        return tuple(_marked(records, _choice(trials, records)))


def _check(export: Export, request: BuildRequest) -> None:
    """Everything about a request that can be known before a folder is touched."""
    row = backend(request.backend)
    if not row.builds:
        raise InputError(f"--backend {request.backend}: runs graphs as they are, there is nothing to build")
    if request.max_context and request.max_context > export.max_context:
        raise InputError(f"--max-context {request.max_context}: the export takes up to {export.max_context} rows of "
                         "past; export again with a larger --max-context")
    external_places(export)  # says so where there are no weights
    sm = request.options.sm
    if sm and request.backend != "trt-rtx":
        raise InputError(f"--sm is for trt-rtx; {request.backend} builds for the device that it runs on")
    if not row.tensorrt:
        request.refuse_tensorrt_options()
        require_products(export, str(export.folder))
        return
    trt.check_options(request.backend, request.options)


def _built_ort(export: Export, found: list[Candidate], request: BuildRequest, progress: Progress) -> dict[str, Any]:
    """Every graph run at its limits; the manifest's facts."""
    attempts, records = [], []
    for candidate in found:
        progress(f"{request.backend}: {candidate.name}")
        attempt, record = build_ort(export, candidate, request)
        attempts.append(attempt)
        records.append(record)
    choice = choose(records, layouts_to_build(export, request)[1], defaults=True)
    return _facts(_marked(records, choice), attempts, choice, {}, "the export's default graphs are kept") | {
        "notes": [], "builder": None}


def _kept(trials: Trials, target: Path) -> dict[str, Any]:
    """Choose, leave the chosen plans alone in the folder, which will be `target`, and say all that was found."""
    records, timing = trials.timed(trials.records())
    choice = _choice(trials, records)
    kept = []
    for record in _marked(records, choice):
        if record.default:
            record = trials.with_plan(record)
            if not record.cached:
                trials.remember(record)
            record = replace(record, command=trials.command(record, target))
        kept.append(record)
    for path in trials.folder.iterdir():
        if path.name not in {r.file for r in kept}:
            path.unlink()
    return _facts(kept, trials.attempts, choice, trials.refused, timing) | {
        "builder": trials.version, "notes": trials.store.notes}


def _choice(trials: Trials, records: list[EngineRecord]) -> Choice:
    limit = trials.request.activation_limit
    why = layouts_to_build(trials.export, trials.request)[1]
    return choose(records, why, None if limit is None else 1e6 * limit)


def _marked(records: list[EngineRecord], choice: Choice) -> list[EngineRecord]:
    return [replace(r, default=r.engine in choice.engines) for r in records]


def _facts(records: list[EngineRecord], attempts: list[Attempt], choice: Choice, refused: dict[str, str], timing: str,
           ) -> dict[str, Any]:
    return {"layout": {"kept": choice.layout, "why": choice.why, "bytes": dict(choice.bytes)}, "timing": timing,
            "engines": [asdict(r) for r in records], "attempts": [asdict(a) for a in attempts], "refused": refused}
