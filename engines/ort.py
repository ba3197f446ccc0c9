"""ONNX Runtime sessions on the CPU: IO binding over the caller's arrays, so that no cache is ever copied on the way in
or out. Those on a GPU are in engines.ort_cuda."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from engines import operator_library
from engines.handed import Places, handed_weights
from engines.session import Feed, Outputs, Session, external_places, output_shape
from exporter.dtypes import NUMPY_OF_NAME, ONNX_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

CPU = "CPUExecutionProvider"


@dataclass(frozen=True)
class OrtOptions:
    """`threads` 0 lets ONNX Runtime choose.

    `spin` keeps idle threads busy-waiting: it saves about 1 % of a step and takes the cores from everyone else, which
    costs a server with several sessions far more. `profile`: a folder in which ONNX Runtime writes down what each node
    of each step took, which slows the steps; `OrtSession.end_profile` gives the file.
    """

    threads: int = 0
    spin: bool = False
    profile: Path | None = None


def require_products(export: Export, what: str) -> None:
    """InputError for an export whose dtype ONNX Runtime's CPU cannot multiply."""
    if export.dtype == "bf16":
        raise InputError(f"{what}: ONNX Runtime's CPU has no bfloat16 products; export with --dtype fp32 or fp16 for "
                         "it, or use --backend interpreter or a GPU")


def hand_over(path: Path | onnx.ModelProto, places: Places, settings: Any) -> list[Any]:
    """Give a session the weights that lie where ONNX Runtime will not look (a checkpoint on another disk):
    memory-mapped, not copied. Returns what must live as long as the session."""
    import onnxruntime as ort

    names, values = [], []
    for tensor, raw in handed_weights(path, places):
        kind = np.dtype(f"u{raw.nbytes // max(1, math.prod(tensor.dims))}")
        array = raw.view(np.float32 if tensor.data_type == onnx.TensorProto.FLOAT else kind).reshape(tensor.dims)
        names.append(tensor.name)
        values.append(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, tensor.data_type))
    if names:
        settings.add_external_initializers(names, values)
    return values


class OrtSession(Session):
    """A graph in ONNX Runtime, on the CPU."""

    def __init__(self, export: Export, graph: GraphEntry, options: OrtOptions | None = None) -> None:
        import onnxruntime as ort

        super().__init__(export, graph)
        options = options or OrtOptions()
        path = export.folder / graph.file
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spin)))
        if options.profile is not None:
            settings.enable_profiling, settings.profile_file_prefix = True, str(options.profile / "profile")
        self._handed = hand_over(path, external_places(export), settings)
        operator_library.register(settings, operator_library.needed(graph.formulation))
        try:
            self._session = self._open(path, settings)
        except InputError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"ONNX Runtime cannot open {graph.file} ({export.dtype}): {reason}") from None

    def _open(self, path: Path, settings: Any) -> Any:
        import onnxruntime as ort

        require_products(self.export, path.name)
        return ort.InferenceSession(str(path), settings, providers=[CPU])

    def end_profile(self) -> Path:
        """The file of the profile so far, whole; nothing is written down any more."""
        return Path(self._session.end_profiling())

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        return self._run_into(feed, sizes, {})

    def _run_into(self, feed: Feed, sizes: Mapping[str, int], out: Feed) -> Outputs:
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
            elif spec.name in out:
                outputs[spec.name] = out[spec.name]
            else:
                outputs[spec.name] = np.empty(output_shape(spec.shape, sizes), NUMPY_OF_NAME[spec.dtype])
            self._bind(binding.bind_output, spec.name, spec.dtype, outputs[spec.name])
        self._session.run_with_iobinding(binding)
        return outputs

    @staticmethod
    def _bind(bind: Any, name: str, dtype: str, array: np.ndarray) -> None:
        bind(name, "cpu", 0, ONNX_OF_NAME[dtype], array.shape, array.ctypes.data)
