"""Running a TensorRT engine: device buffers in torch, one execution context, addresses set by name.

Needs a CUDA device; without one, opening is an InputError that says so. The scatter form's cache is one device buffer
for input and output, as the engine demands.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from engines import trt as tensorrt_door
from engines.session import Feed, Outputs, Session, output_shape
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry


def require_cuda(backend: str) -> Any:
    """torch with a usable CUDA device, else InputError."""
    import torch

    if not torch.cuda.is_available():
        raise InputError(f"not run: no CUDA device; {backend} engines build here but run only on a GPU")
    return torch


class TensorRTSession(Session):
    """One engine on the current CUDA device."""

    def __init__(self, export: Export, graph: GraphEntry, backend: str, plan: Path) -> None:
        super().__init__(export, graph)
        self._torch = require_cuda(backend)
        trt = tensorrt_door.load(backend)
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._engine = trt.Runtime(self._logger).deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise InputError(
                f"{plan}: {backend} {trt.__version__} could not load this engine on this GPU; build it here "
                f"with: python -m engines build {shlex.quote(str(export.folder))} --backend {backend} "
                "--overwrite"
            )
        self._context = self._engine.create_execution_context()
        self._stream = self._torch.cuda.Stream()

    def _tensor(self, array: np.ndarray) -> Any:
        torch = self._torch
        array = np.ascontiguousarray(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
        return torch.from_numpy(array).cuda()

    def _array(self, tensor: Any, dtype: np.dtype[Any]) -> np.ndarray:
        host = tensor.cpu()
        if dtype.name == "bfloat16":
            return np.asarray(host.view(self._torch.int16).numpy().view(dtype))
        return np.asarray(host.numpy())

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        torch = self._torch
        device = {spec.name: self._tensor(feed[spec.name]) for spec in self.graph.inputs}
        for spec in self.graph.inputs:
            if not self._context.set_input_shape(spec.name, tuple(device[spec.name].shape)):
                raise InputError(f"{self.graph.name}: {spec.name} {list(device[spec.name].shape)} is outside the "
                                 "engine's profile; rebuild with larger limits")
        for spec in self.graph.outputs:
            if spec.name.startswith("latent_cache_out."):
                device[spec.name] = device[spec.name.replace("_out", "")]
            else:
                like = device["hidden_states"]
                device[spec.name] = torch.empty(output_shape(spec.shape, sizes), dtype=like.dtype, device=like.device)
        for name, tensor in device.items():
            self._context.set_tensor_address(name, tensor.data_ptr())
        torch.cuda.current_stream().synchronize()
        if not self._context.execute_async_v3(self._stream.cuda_stream):
            raise InputError(f"{self.graph.name}: the engine refused to run; see TensorRT's messages above")
        self._stream.synchronize()
        outputs = {
            spec.name: self._array(device[spec.name], feed["hidden_states"].dtype) for spec in self.graph.outputs
        }
        for name in outputs:
            if name.startswith("latent_cache_out."):
                cache = feed[name.replace("_out", "")]
                cache[...] = outputs[name]
                outputs[name] = cache
        return outputs

    def close(self) -> None:
        """Free the context and the engine."""
        self._context = self._engine = None
