"""Refitting: the weights of an export into an engine that was built without them, or from an earlier checkpoint.

What an engine is given is every initializer of the graph, by name: the absorbed products W_UK (with the softmax scale
in it) and W_UV included, since another checkpoint's export has computed them anew. `engines refit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from engines.backends import backend as find_backend
from engines.backends import plan_path
from engines.handed import Weight, graph_weights
from engines.records import open_engines, rebuild_command, require_loadable
from engines.session import external_places
from engines.trt import make_logger
from engines.trt_runtime import Refitter, deserialise, serialise
from engines.trt_session import require_cuda
from exporter import manifest
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry, open_export
from exporter.output import new_folder


def check_same_network(own: Export, other: Export, graph: GraphEntry) -> None:
    """InputError unless `other` has this graph, the same but for the values in its weight files."""
    if graph.name not in {g.name for g in other.graphs}:
        raise InputError(f"{other.folder}: has no {graph.name}, which the engine was built from; export it with the "
                         f"options of {own.folder}")
    kind, formulation = graph.kind, graph.formulation
    models = [onnx.load(e.folder / e.graph(kind, formulation).file, load_external_data=False) for e in (own, other)]
    old, new = ({t.name: t for t in model.graph.initializer} for model in models)
    for name in [*old, *(n for n in new if n not in old)]:
        if name not in new or name not in old:
            raise InputError(f"{graph.name}: weight {name} is in {(own if name in old else other).folder} alone; "
                             "expected two exports of one configuration, made with the same options")
        a, b = old[name], new[name]
        if list(a.dims) != list(b.dims) or a.data_type != b.data_type:
            raise InputError(f"{graph.name}: weight {name} has shape {list(b.dims)} of {_dtype(b)} in {other.folder}; "
                             f"expected {list(a.dims)} of {_dtype(a)}, as in {own.folder}")
        if bool(a.external_data) != bool(b.external_data) or (not a.external_data and a != b):
            raise InputError(f"{graph.name}: constant {name} of {other.folder} is not that of {own.folder}; expected "
                             "two exports of one configuration, made with the same options")
    for model in models:
        del model.graph.initializer[:], model.graph.value_info[:]
    if models[0].graph != models[1].graph:
        raise InputError(f"{graph.name}: the graph in {other.folder} is not the one in {own.folder}; expected two "
                         "exports of one configuration, made with the same options")


def _dtype(tensor: onnx.TensorProto) -> str:
    return str(TensorProto.DataType.Name(tensor.data_type))


def fixed(names: set[str], old: Mapping[str, Weight], new: Mapping[str, Weight]) -> list[str]:
    """Weights that changed and that an engine whose refittable weights are `names` cannot take: it would go on with
    the old values."""
    return [name for name, weight in new.items()
            if weight.stored and name not in names and not np.array_equal(weight.data, old[name].data)]


def refit_engines(folder: Path, weights_of: Path, backend: str, overwrite: bool = False,
                  progress: Callable[..., None] = lambda message, share=None: None) -> Path:
    """Engines of `folder` with the weights of the export `weights_of`, in that export's own engines folder; returns it.

    InputError where the two exports are not of one network, the engines were not built with --refit, or there is no
    CUDA device; CheckError, by name, for weights that an engine does not take.
    """
    own, other = open_export(folder), open_export(weights_of)
    if not find_backend(backend).tensorrt:
        raise InputError(f"--backend {backend}: has no engines to refit; expected trt or trt-rtx")
    made = open_engines(own, backend)
    graphs = {graph.name: graph for graph in own.graphs}
    plans = {record.file: graphs[record.graph] for record in made.engines if record.file}
    for graph in plans.values():
        check_same_network(own, other, graph)
    options, same = made.data["options"], own.folder.resolve() == other.folder.resolve()
    if not (options["refit"] or (options["strip"] and same)):
        raise InputError(f"{made.folder}: built without --refit, its weights are fixed; build it again with --refit")
    external_places(other)  # says so where there are no weights
    require_cuda(backend)
    require_loadable(own, made)
    with new_folder(plan_path(other, backend), overwrite=overwrite) as partial:
        sizes = {}
        for number, (file, graph) in enumerate(plans.items()):
            progress(f"{backend}: {graph.name}", number / len(plans))
            sizes[file] = _refit_plan(backend, made.folder / file, own, other, graph, partial / file)
        records = [r if r["file"] is None else r | {"plan_bytes": sizes[r["file"]]} for r in made.data["engines"]]
        manifest.write(partial, _carried(made.data) | {"engines_of": _digest(other), "engines": records})
    return plan_path(other, backend)


def _refit_plan(backend: str, plan: Path, own: Export, other: Export, graph: GraphEntry, target: Path) -> int:
    """Bytes of the new plan."""
    logger = make_logger(backend)
    engine = deserialise(backend, plan, rebuild_command(own, backend), logger)
    refitter = Refitter(backend, engine, logger)
    old, new = (graph_weights(e.folder / graph.file, external_places(e)) for e in (own, other))
    stuck = fixed(refitter.names(), old, new)
    if stuck:
        raise InputError(f"{plan}: {', '.join(stuck)} changed, and this engine cannot take new values for them; build "
                         f"engines of {other.folder} instead")
    refitter.refit(new)
    return target.write_bytes(serialise(backend, engine))


def _carried(data: dict[str, Any]) -> dict[str, Any]:
    """A manifest without what `manifest.write` states itself."""
    return {key: value for key, value in data.items() if key not in ("format", "toolkit", "files")}


def _digest(export: Export) -> str:
    return hashlib.sha256((export.folder / manifest.NAME).read_bytes()).hexdigest()
