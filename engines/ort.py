"""ONNX Runtime sessions: IO binding over the caller's arrays, so that no cache is ever copied on the way in or out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from engines.session import Feed, Outputs, Session, output_shape
from exporter.dtypes import NUMPY_OF_NAME, ONNX_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@dataclass(frozen=True)
class OrtOptions:
    """`threads` 0 lets ONNX Runtime choose; `cuda` runs on the GPU with CPU fallback disabled.

    `spin` keeps idle threads busy-waiting: it saves about 1 % of a step and takes the cores from everyone else, which
    costs a server with several sessions far more.
    """

    threads: int = 0
    cuda: bool = False
    spin: bool = False


def cuda_available() -> bool:
    """Whether the installed ONNX Runtime has the CUDA provider (the device itself may still be missing)."""
    import onnxruntime as ort

    return CUDA in ort.get_available_providers()


def _require_cuda() -> None:
    if cuda_available():
        return
    both = []
    for package in ("onnxruntime", "onnxruntime-gpu"):
        try:
            both.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    raise InputError(f"ort-cuda: ONNX Runtime here ({' and '.join(both)}) has no {CUDA}; on a machine with a GPU: "
                     "pip uninstall onnxruntime; pip install --force-reinstall onnxruntime-gpu")


class OrtSession(Session):
    """A graph in ONNX Runtime, on the CPU or on CUDA."""

    def __init__(self, export: Export, graph: GraphEntry, options: OrtOptions | None = None) -> None:
        import onnxruntime as ort

        super().__init__(export, graph)
        cuda = bool(options and options.cuda)
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.threads if options else 0
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(bool(options and options.spin))))
        if cuda:
            _require_cuda()
            # a node that lands on the CPU is an error, not a slow surprise
            settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        providers = [CUDA] if cuda else [CPU]
        try:
            self._session = ort.InferenceSession(str(export.folder / graph.file), settings, providers=providers)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"ONNX Runtime cannot open {graph.file} ({export.dtype}): {reason}") from None

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        binding = self._session.io_binding()
        arrays = {}
        for spec in self.graph.inputs:
            arrays[spec.name] = np.ascontiguousarray(feed[spec.name])
            self._bind(binding.bind_input, spec.name, spec.dtype, arrays[spec.name])
        outputs: Outputs = {}
        for spec in self.graph.outputs:
            if spec.name.startswith("latent_cache_out."):  # same address as its input: updated in place
                cache = spec.name.replace("_out", "")
                if arrays[cache] is not feed[cache] and not np.shares_memory(arrays[cache], feed[cache]):
                    raise InputError(f"{self.graph.name}: {cache} must be contiguous, it is updated in place")
                outputs[spec.name] = arrays[cache]
            else:
                outputs[spec.name] = np.empty(output_shape(spec.shape, sizes), NUMPY_OF_NAME[spec.dtype])
            self._bind(binding.bind_output, spec.name, spec.dtype, outputs[spec.name])
        self._session.run_with_iobinding(binding)
        return outputs

    @staticmethod
    def _bind(bind: Any, name: str, dtype: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, ONNX_OF_NAME[dtype], array.shape, array.ctypes.data)
