"""Running a TensorRT engine: an execution context, addresses set by name, CUDA graphs of steps that come again.

Needs a CUDA device; without one, opening is an InputError that says so. A cache in the session's `memory` stays on the
device; what a feed has on the host is uploaded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines.cuda_graphs import FEW, Binding, CapturedSteps
from engines.device_memory import DeviceMemory
from engines.device_steps import DeviceSteps
from engines.handed import graph_weights
from engines.records import rebuild_command
from engines.session import Feed, Outputs, Session, external_places
from engines.trt import load, reasons
from engines.trt_runtime import AS_BUILT, LoadOptions, loaded
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry


def require_cuda(backend: str) -> Any:
    """torch with a usable CUDA device, else InputError."""
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"not run: no CUDA device; {backend} engines build here but run only on a GPU")
    return torch


class TensorRTSession(Session):
    """One engine on the current CUDA device, in its optimisation profile number `profile`.

    `graph` is what the session answers to, `built_from` the graph that the engine was built from where that is another:
    decode steps run in an engine of a prefill graph, whose `last_token` is then every sequence's last one, T - 1.
    """

    def __init__(self, export: Export, graph: GraphEntry, backend: str, plan: Path, profile: int = 0,
                 built_from: GraphEntry | None = None, options: LoadOptions | None = None) -> None:
        super().__init__(export, graph)
        self._built_from = source = built_from or graph
        added = {t.name for t in source.inputs} - {t.name for t in graph.inputs}
        if added - {"last_token"} or {t.name for t in source.outputs} != {t.name for t in graph.outputs}:
            raise InputError(f"{plan}: an engine of {source.name} cannot serve {graph.name}: their inputs or outputs "
                             "differ by more than last_token")
        options = options or AS_BUILT
        self._torch = require_cuda(backend)
        self._stream, self._profile = self._torch.cuda.Stream(), profile
        self._loaded = loaded(backend, plan, rebuild_command(export, backend), options,
                              lambda: graph_weights(export.folder / source.file, external_places(export)))
        self._context: Any = self._loaded.context(profile, self._stream.cuda_stream)
        self._stream.synchronize()
        host = load(backend).TensorLocation.HOST  # a tensor that shapes depend on is read on the host
        self.memory = memory = DeviceMemory(self._torch)
        on_host = {t.name for t in source.inputs if self._loaded.engine.get_tensor_location(t.name) == host}
        self._steps = DeviceSteps(memory, self._stream, on_host)
        self._scratch: Any = None
        self.graphs = CapturedSteps(self._torch, self._stream, self._lean_context, self._enqueue,
                                    lambda: self._steps.staged_outputs, _no_graphs(backend, options, on_host))

    def _lean_context(self) -> Any:
        """A context for a graph; all of them use one block of scratch memory, one after the other."""
        size = self._loaded.scratch_bytes(self._profile)
        if self._scratch is None:
            self._scratch = self._steps.memory.empty((size,), np.dtype(np.uint8))
        return self._loaded.lean_context(self._profile, self._stream.cuda_stream, self._scratch.address, size)

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        return self._run_into(feed, sizes, {})

    def _run_into(self, feed: Feed, sizes: Mapping[str, int], out: Feed) -> Outputs:
        arrays = {spec.name: feed[spec.name] for spec in self._built_from.inputs if spec.name in feed}
        if len(arrays) < len(self._built_from.inputs):
            arrays["last_token"] = np.full(sizes["B"], sizes["T"] - 1, np.int64)
        binding = Binding({name: array.shape for name, array in arrays.items()},
                          self._steps.bind(arrays, self.graph.outputs, sizes, out))
        if sizes["T"] > FEW or not self.graphs.run(binding):
            self._enqueue(self._context, binding)
        return self._steps.collect()

    def _enqueue(self, context: Any, binding: Binding) -> None:
        for name, shape in binding.shapes.items():
            if not context.set_input_shape(name, shape):
                raise InputError(f"{self.graph.name}: {name} {list(shape)} is outside the engine's profile; rebuild "
                                 "with larger limits")
        for name, place in binding.addresses.items():
            context.set_tensor_address(name, place)
        self._loaded.logger.lines.clear()  # what it says from here on is about this step
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise InputError(f"{self.graph.name}: the engine refused to run: {reasons(self._loaded.logger)}")

    def close(self) -> None:
        """Free the contexts, and with the last session of its plan the engine."""
        if self._context is not None:
            self.graphs.clear()
            self._context = self._scratch = None
            self._loaded.release()
            del self._loaded


def _no_graphs(backend: str, options: LoadOptions, on_host: Collection[str]) -> str | None:
    """Why steps are not captured here."""
    if not options.cuda_graphs:
        return "not asked for"
    if backend == "trt-rtx":
        return "TensorRT-RTX captures by itself"
    if on_host:
        return f"the engine reads {', '.join(sorted(on_host))} on the host"
    return "weights are streamed" if options.weight_budget is not None else None
