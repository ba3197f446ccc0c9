"""ONNX Runtime sessions on a GPU: every node but shape arithmetic there, and the cache too.

Steps run on a stream of torch's, over the addresses that engines.device_steps gives: a cache of the session's `memory`
never crosses the bus. A step that comes again with the same addresses is captured as a CUDA graph, which ONNX Runtime
keeps by a number. With a torch that has no CUDA device, arrays stay on the host and ONNX Runtime copies them each step.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import onnx

from engines import operator_library
from engines.cuda_graphs import FEW, Repeats
from engines.device_memory import DeviceMemory
from engines.device_steps import DeviceSteps
from engines.ort import CPU, OrtOptions, OrtSession
from engines.session import Feed, Outputs
from exporter.dtypes import ONNX_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

CUDA = "CUDAExecutionProvider"
MOST_GRAPHS = 64  # ONNX Runtime never forgets one
NO_GRAPH = -1  # its number for a run outside of graphs


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


def cuda_torch() -> Any:
    """torch where it has a CUDA device; else None."""
    import torch

    return torch if torch.cuda.is_available() else None


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


class CudaOrtSession(OrtSession):
    """A graph in ONNX Runtime on the current CUDA device, CPU fallback disabled. `graphs`: capture steps that repeat;
    `no_graphs` says why that is not done, None where it is."""

    def __init__(self, export: Export, graph: GraphEntry, options: OrtOptions | None = None, graphs: bool = True,
                 ) -> None:
        if operator_library.needed(graph.formulation):
            raise InputError(f"{graph.name}: its operator mla::LatentAttention is for the CPU; use --backend ort, or "
                             "export without --fused-decode")
        _require_cuda()
        self._torch = cuda_torch()
        self.no_graphs = None if graphs and self._torch else "torch has no CUDA device" if graphs else "not asked for"
        self._stream: Any = self._torch.cuda.Stream() if self._torch else None
        super().__init__(export, graph, options)
        if self._torch:
            self.memory = DeviceMemory(self._torch)
            self._steps = DeviceSteps(self.memory, self._stream)
            self._repeats, self._numbers = Repeats(), dict[Hashable, int]()

    def _open(self, path: Path, settings: Any) -> Any:
        device: dict[str, str] = {}
        if self._torch:
            device = {"device_id": str(self._torch.cuda.current_device()),
                      "user_compute_stream": str(self._stream.cuda_stream)}
        if self.no_graphs is None:
            try:
                return _open_on_cuda(path, settings, device | {"enable_cuda_graph": "1"})
            except InputError:
                raise
            except Exception as error:
                self.no_graphs = str(error).splitlines()[0]
        return _open_on_cuda(path, settings, device)

    def _run_into(self, feed: Feed, sizes: Mapping[str, int], out: Feed) -> Outputs:
        if not self._torch:
            return super()._run_into(feed, sizes, out)
        import onnxruntime as ort

        addresses = self._steps.bind(feed, self.graph.outputs, sizes, out)
        binding = self._session.io_binding()
        for spec in self.graph.inputs:
            self._bind_at(binding.bind_input, spec.name, spec.dtype, feed[spec.name].shape, addresses)
        for spec in self.graph.outputs:
            self._bind_at(binding.bind_output, spec.name, spec.dtype, self._steps.shape(spec.name), addresses)
        run = ort.RunOptions()
        if self.no_graphs is None:
            number = NO_GRAPH if sizes["T"] > FEW else self._graph((*sizes.items(), *addresses.values()))
            run.add_run_config_entry("gpu_graph_id", str(number))
        self._session.run_with_iobinding(binding, run)
        return self._steps.collect()

    def _graph(self, key: Hashable) -> int:
        """The number of the graph of a binding, from its second time on; as many as there may be."""
        if key not in self._numbers and len(self._numbers) < MOST_GRAPHS and self._repeats.again(key):
            self._numbers[key] = len(self._numbers) + 1
        return self._numbers.get(key, NO_GRAPH)

    def _bind_at(self, bind: Any, name: str, dtype: str, shape: tuple[int, ...], addresses: Mapping[str, int]) -> None:
        bind(name, "cuda", self._torch.cuda.current_device(), ONNX_OF_NAME[dtype], shape, addresses[name])


def _open_on_cuda(path: Path, settings: Any, options: dict[str, str]) -> Any:
    """A session with CPU fallback disabled; where only shape arithmetic stands in the way, one that was checked.

    The CUDA provider itself leaves shape arithmetic to the CPU, which `disable_cpu_ep_fallback` counts as fallback.
    """
    import onnxruntime as ort

    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        return ort.InferenceSession(str(path), settings, providers=[(CUDA, options)])
    except Exception as error:
        if "fallback to CPU EP" not in str(error):
            raise
    settings.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
    settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(str(path), settings, providers=[(CUDA, options)])
    on_cpu = [(node.name, node.op_type) for part in session.get_provider_graph_assignment_info()
              if part.ep_name == CPU for node in part.get_nodes()]
    wrong = misplaced(path, on_cpu)
    if wrong:
        raise InputError(f"ort-cuda: {path.name}: placed on the CPU: {', '.join(wrong)}; expected every node but shape "
                         "arithmetic on CUDA; use a formulation or dtype that this ONNX Runtime runs there")
    return session
