"""ONNX Runtime sessions: IO binding over the caller's arrays, so that no cache is ever copied on the way in or out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from engines.handed import Places, handed_weights
from engines.session import Feed, Outputs, Session, external_places, output_shape
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


def require_products(export: Export, what: str) -> None:
    """InputError for an export whose dtype ONNX Runtime's CPU cannot multiply."""
    if export.dtype == "bf16":
        raise InputError(f"{what}: ONNX Runtime's CPU has no bfloat16 products; export with --dtype fp32 or fp16 for "
                         "it, or use --backend interpreter or a GPU")


def misplaced(path: Path, on_cpu: Iterable[tuple[str, str]]) -> list[str]:
    """Of the nodes (name, operator) that ONNX Runtime put on the CPU, those that are more than shape arithmetic.

    Shapes and index ranges are integers that the host needs anyway; anything else there is a silent slowdown. A fused
    node whose name the file does not know counts as misplaced.
    """
    graph = onnx.load(path, load_external_data=False).graph
    kinds = {v.name: v.type.tensor_type for v in (*graph.value_info, *graph.output)}

    def is_shape(name: str) -> bool:
        return name in kinds and kinds[name].elem_type == onnx.TensorProto.INT64 and len(kinds[name].shape.dim) <= 1

    host = {node.name for node in graph.node if all(is_shape(output) for output in node.output)}
    return [f"{name} ({op})" for name, op in on_cpu if name not in host]


def _open_on_cuda(path: Path, settings: Any) -> Any:
    """A session with CPU fallback disabled; where only shape arithmetic stands in the way, one that was checked.

    The CUDA provider itself leaves shape arithmetic to the CPU, which `disable_cpu_ep_fallback` counts as fallback.
    """
    import onnxruntime as ort

    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        return ort.InferenceSession(str(path), settings, providers=[CUDA])
    except Exception as error:
        if "fallback to CPU EP" not in str(error):
            raise
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(str(path), settings, providers=[CUDA])
    on_cpu = [(node.name, node.op_type) for part in session.get_provider_graph_assignment_info()
              if part.ep_name == CPU for node in part.get_nodes()]
    wrong = misplaced(path, on_cpu)
    if wrong:
        raise InputError(f"ort-cuda: {path.name}: placed on the CPU: {', '.join(wrong)}; expected every node but shape "
                         "arithmetic on CUDA; use a formulation or dtype that this ONNX Runtime runs there")
    return session


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
    """A graph in ONNX Runtime, on the CPU or on CUDA."""

    def __init__(self, export: Export, graph: GraphEntry, options: OrtOptions | None = None) -> None:
        import onnxruntime as ort

        super().__init__(export, graph)
        options = options or OrtOptions()
        path = export.folder / graph.file
        settings = ort.SessionOptions()
        settings.log_severity_level = 3
        settings.intra_op_num_threads = options.threads
        settings.add_session_config_entry("session.intra_op.allow_spinning", str(int(options.spin)))
        self._handed = hand_over(path, external_places(export), settings)
        if not options.cuda:
            require_products(export, graph.file)
        try:
            if options.cuda:
                _require_cuda()
                self._session = _open_on_cuda(path, settings)
            else:
                self._session = ort.InferenceSession(str(path), settings, providers=[CPU])
        except InputError:
            raise
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"ONNX Runtime cannot open {graph.file} ({export.dtype}): {reason}") from None

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
