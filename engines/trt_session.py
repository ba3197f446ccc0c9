"""Running a TensorRT engine: device buffers in torch, an execution context, addresses set by name.

Needs a CUDA device; without one, opening is an InputError that says so. The scatter form's cache is one device buffer
for input and output, as the engine demands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines.handed import graph_weights
from engines.records import rebuild_command
from engines.session import Feed, Outputs, Session, external_places, into_caches, output_shape
from engines.trt import load, reasons
from engines.trt_runtime import AS_BUILT, LoadOptions, loaded
from exporter.dtypes import NUMPY_OF_NAME
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
        self._torch = require_cuda(backend)
        self._device = self._torch.device("cuda")
        self._stream = self._torch.cuda.Stream()
        self._loaded = loaded(backend, plan, rebuild_command(export, backend), options or AS_BUILT,
                              lambda: graph_weights(export.folder / source.file, external_places(export)))
        self._context: Any = self._loaded.context(profile, self._stream.cuda_stream)
        self._stream.synchronize()
        host = load(backend).TensorLocation.HOST  # a tensor that shapes depend on is read on the host
        self._on_host = {t.name for t in source.inputs if self._loaded.engine.get_tensor_location(t.name) == host}

    def _upload(self, name: str, array: np.ndarray) -> Any:
        """An array's bytes on the device: addresses are all that the engine wants, and torch lacks some dtypes."""
        raw = self._torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return raw if name in self._on_host else raw.to(self._device)

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        torch, context = self._torch, self._context
        arrays = dict(feed)
        if "last_token" not in arrays:
            arrays["last_token"] = np.full(sizes["B"], sizes["T"] - 1, np.int64)
        device = {spec.name: self._upload(spec.name, arrays[spec.name]) for spec in self._built_from.inputs}
        for name in device:
            if not context.set_input_shape(name, arrays[name].shape):
                raise InputError(f"{self.graph.name}: {name} {list(arrays[name].shape)} is outside the engine's "
                                 "profile; rebuild with larger limits")
        shapes = {spec.name: output_shape(spec.shape, sizes) for spec in self.graph.outputs}
        for spec in self.graph.outputs:
            if spec.name.startswith("latent_cache_out."):
                device[spec.name] = device[spec.name.replace("_out", "")]
            else:
                count = int(np.prod(shapes[spec.name])) * NUMPY_OF_NAME[spec.dtype].itemsize
                device[spec.name] = torch.empty(count, dtype=torch.uint8, device=self._device)
        for name, tensor in device.items():
            context.set_tensor_address(name, tensor.data_ptr())
        torch.cuda.current_stream().synchronize()
        self._loaded.logger.lines.clear()  # what it says from here on is about this step
        if not context.execute_async_v3(self._stream.cuda_stream):
            raise InputError(f"{self.graph.name}: the engine refused to run: {reasons(self._loaded.logger)}")
        self._stream.synchronize()
        return into_caches(feed, {
            spec.name: device[spec.name].cpu().numpy().view(NUMPY_OF_NAME[spec.dtype]).reshape(shapes[spec.name])
            for spec in self.graph.outputs})

    def close(self) -> None:
        """Free the context, and with the last session of its plan the engine."""
        if self._context is not None:
            self._context = None
            self._loaded.release()
            del self._loaded
