"""TensorRT's parsed network as a runtime of the parity ladder: whether it can judge an export, and which graphs.

It climbs the same traces as every runtime, with the interpreter's tolerances. An export for TensorRT takes it along
by itself: it costs about as much as the interpreter does, and no GPU.
"""

from __future__ import annotations

from engines import trt
from engines.backends import default_graph
from engines.network_session import default_module
from exporter import formulations
from exporter.manifest import Export, GraphEntry

NETWORK = "trt-network"


def climbs(made: Export, asked: bool | None) -> bool:
    """Whether the ladder of an export has these rungs: as `asked`, or where it was exported for TensorRT."""
    return made.data.get("target") in trt.MODULES if asked is None else asked


def absent() -> str | None:
    """Why it cannot run here at all; None if it can be tried."""
    if trt.available(default_module()):
        return None
    return f"{NETWORK}: not run: no TensorRT is installed; pip install -e '.[rtx]' reads its networks without a GPU"


def refused(made: Export, graph: GraphEntry) -> str | None:
    """Why TensorRT does not take a graph; None if it does."""
    module = default_module()
    if (made.data.get("experts") or {}).get("forms", {}).get(graph.name) == "fused":
        return (f"{NETWORK}, {graph.name}: not run: its experts are ONNX Runtime's own operator; export with --target "
                f"{module}")
    why = formulations.refused(graph.formulation, module, made.dtype)
    return why and f"{NETWORK}, {graph.name}: not run: {why}"


def beside(made: Export, graph: GraphEntry, backend: str) -> dict[str, GraphEntry]:
    """The graph of each kind that a backend runs while `graph` is judged: of the other kind the default, or the first
    that TensorRT takes."""
    chosen = {}
    for kind in dict.fromkeys(g.kind for g in made.graphs):
        default = default_graph(made, kind, backend)
        taken = [g for g in (default, *made.graphs) if g.kind == kind and not (backend == NETWORK and refused(made, g))]
        chosen[kind] = taken[0] if taken else default
    return chosen | {graph.kind: graph}
