"""The backends, one row each: what they build from, how they build, how they run. Adding one: a row and its file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engines.session import Session
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

if TYPE_CHECKING:
    from engines.records import EngineRecord
    from engines.trt_runtime import LoadOptions

OpenSession = Callable[..., Session]  # of an export, one of its graphs and, perhaps, `load`


@dataclass(frozen=True)
class Backend:
    """`target` names the formulations that it takes (exporter.formulations), `builds` whether `engines build` knows it.

    `open` gets an export, a graph and, where the backend has any, load options (engines.trt_runtime), and returns a
    running session; heavy imports happen inside.
    """

    name: str
    target: str
    builds: bool
    tensorrt: bool
    open: OpenSession
    about: str


def _ort(export: Export, graph: GraphEntry) -> Session:
    from engines.ort import OrtSession

    return OrtSession(export, graph)


def _ort_cuda(export: Export, graph: GraphEntry, load: LoadOptions | None = None) -> Session:
    from engines.ort_cuda import CudaOrtSession

    return CudaOrtSession(export, graph, graphs=load is None or load.cuda_graphs)


def _interpreter(export: Export, graph: GraphEntry) -> Session:
    from engines.interpreter_session import InterpreterSession

    return InterpreterSession(export, graph)


def _network(export: Export, graph: GraphEntry) -> Session:
    from engines.network_session import NetworkSession

    return NetworkSession(export, graph)


def _tensorrt(backend: str) -> OpenSession:
    return lambda export, graph, load=None: open_engine(export, graph, backend, load)


def open_engine(export: Export, graph: GraphEntry, backend: str, load: LoadOptions | None = None) -> Session:
    """A session of the TensorRT engine that was kept for a graph, loaded as `load` says."""
    from engines.records import open_engines, require_loadable
    from engines.trt_session import require_cuda

    require_cuda(backend)
    made = open_engines(export, backend)
    require_loadable(export, made)
    return open_plan(export, graph, backend, made.folder, made.record(graph.name), load)


def open_plan(export: Export, graph: GraphEntry, backend: str, folder: Path, record: EngineRecord,
              load: LoadOptions | None = None) -> Session:
    """A session of a TensorRT engine in `folder` for a graph that it serves."""
    from engines.trt_session import TensorRTSession

    built_from = next(g for g in export.graphs if g.name == record.graph)
    return TensorRTSession(export, graph, backend, folder / str(record.file), record.profile_of(graph.kind) or 0,
                           built_from, load)


BACKENDS = {b.name: b for b in (
    Backend("ort", "ort", True, False, _ort, "ONNX Runtime on the CPU"),
    Backend("ort-cuda", "ort", False, False, _ort_cuda, "ONNX Runtime on CUDA, CPU fallback disabled"),
    Backend("trt", "trt", True, True, _tensorrt("trt"), "TensorRT, built on the GPU that it will run on"),
    Backend("trt-rtx", "trt-rtx", True, True, _tensorrt("trt-rtx"), "TensorRT-RTX, builds without a GPU"),
    Backend("interpreter", "ort", False, False, _interpreter, "torch, every tensor rounded to its dtype"),
    Backend("trt-network", "trt-rtx", False, False, _network, "what TensorRT's parser made of the graph, in torch"),
)}


def backend(name: str) -> Backend:
    """A backend by name; InputError lists the known ones."""
    if name not in BACKENDS:
        built, run = (", ".join(b.name for b in BACKENDS.values() if b.builds == builds) for builds in (True, False))
        raise InputError(f"--backend {name!r}: expected one of {built} (`engines build` knows them) or {run} (they run "
                         "graphs as they are)")
    return BACKENDS[name]


def open_session(export: Export, kind: str, backend_name: str, formulation: str | None = None,
                 load: LoadOptions | None = None) -> Session:
    """Open the default graph of a kind (or the one of `formulation`) on a backend; `load`: how TensorRT loads it."""
    if load is not None:
        load.check(backend(backend_name).name)
    graph = export.graph(kind, formulation) if formulation else default_graph(export, kind, backend_name)
    return backend(backend_name).open(export, graph, *(() if load is None else (load,)))


def default_graph(export: Export, kind: str, backend_name: str) -> GraphEntry:
    """What a backend's session of a kind opens: the export's default; with TensorRT the graph whose engine was kept."""
    graph = export.graph(kind)
    if not backend(backend_name).tensorrt:
        return graph
    from engines.records import open_engines
    from engines.trt_session import require_cuda

    require_cuda(backend_name)
    kept = open_engines(export, backend_name).kept(kind)
    return next(g for g in export.graphs if g.name == kept.serves[kind]) if kept else graph


def plan_path(export: Export, backend_name: str) -> Path:
    """Where a backend's engines lie: inside the export that they were built from."""
    return export.folder / "engines" / backend_name
