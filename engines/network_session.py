"""TensorRT's parsed network behind the session contract: every layer in torch on the CPU, in place of a GPU.

Each tensor is rounded to the dtype that TensorRT declares, and its shape must be the one that TensorRT inferred: where
a layer is read otherwise than TensorRT reads it, that shows. One tensor is not rounded: a product that a constant bias
is added to, which is one operator in the graph (Gemm) and one kernel in an engine, and two layers only in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engines import network as reader
from engines import trt as tensorrt_door
from engines.interpreter import from_numpy, to_numpy
from engines.network import Layer, Network
from engines.network_ops import TABLE
from engines.onnx_ops import UnsupportedOperator, Value, dtype_name, rounded, storage
from engines.session import Feed, Outputs, Session, external_places, into_caches
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, GraphEntry

Array = np.ndarray[Any, Any]


class Runner:
    """A network, ready to run. Raises UnsupportedOperator for a layer that the table does not know, or knows otherwise,
    before anything is computed."""

    def __init__(self, network: Network) -> None:
        self.network = network
        for layer in network.layers:
            _require_known(layer)
        kept = {t.name for t in network.outputs}
        last = {name: i for i, layer in enumerate(network.layers)
                for name in (*(t.name for t in layer.outputs), *layer.inputs) if name}
        self._dying: list[list[str]] = [[] for _ in network.layers]
        for name, index in last.items():
            if name not in kept:
                self._dying[index].append(name)
        self._constants: dict[str, Value] = {}
        self._biased = _biased_products(network)

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The network's outputs for one feed, both by name, in the declared dtypes."""
        values = self._given(feed)
        for index, layer in enumerate(self.network.layers):
            if layer.kind != "CONSTANT":
                inputs = [values[name].data if name else None for name in layer.inputs]
                made = _evaluate(layer, inputs, exact=layer.outputs[0].name in self._biased)
            elif layer.outputs[0].name in self._constants:
                made = (self._constants[layer.outputs[0].name],)
            else:
                made = _evaluate(layer, [])
                self._constants[layer.outputs[0].name] = made[0]
            values.update(zip((t.name for t in layer.outputs), made, strict=True))
            for name in self._dying[index]:
                values.pop(name, None)
        return {t.name: to_numpy(values[t.name]) for t in self.network.outputs}

    def _given(self, feed: Mapping[str, Array]) -> dict[str, Value]:
        """The feed as values. The parser leaves out an input that nothing reads; what it kept must be fed."""
        values = {}
        for tensor in self.network.inputs:
            if tensor.name not in feed:
                raise InputError(f"{self.network.file}: the feed has {sorted(feed)}; its network reads {tensor.name!r}")
            value = from_numpy(feed[tensor.name], torch.device("cpu"))
            if value.dtype != tensor.dtype or not _fits(value, tensor.shape):
                raise InputError(f"{self.network.file}: {tensor.name!r} is {dtype_name(value.dtype)} "
                                 f"{list(value.data.shape)}; its network declares {_declared(tensor)}")
            values[tensor.name] = value
        return values


def _biased_products(network: Network) -> set[str]:
    """Results of matrix products whose only reader adds a constant to them."""
    made = {t.name: layer for layer in network.layers for t in layer.outputs}
    readers: dict[str, list[Layer]] = {t.name: [] for t in network.outputs}
    for layer in network.layers:
        for name in layer.inputs:
            readers.setdefault(name, []).append(layer)

    def constant(name: str) -> bool:
        layer = made.get(name)
        return layer is not None and (layer.kind == "CONSTANT" or (
            layer.kind == "SHUFFLE" and len(layer.inputs) == 1 and constant(layer.inputs[0])))

    found = set()
    for name, layer in made.items():
        reader = readers[name][0] if layer.kind == "MATRIX_MULTIPLY" and len(readers.get(name, [])) == 1 else None
        if reader is not None and reader.kind == "ELEMENTWISE" and reader.attributes["op"] == "SUM":
            other = reader.inputs[1 - reader.inputs.index(name)]
            if constant(other) and name not in {t.name for t in network.outputs}:
                found.add(name)
    return found


def _require_known(layer: Layer) -> None:
    known = TABLE.get(layer.kind)
    if known is None:
        raise UnsupportedOperator(f"{layer}: no meaning of this kind is known; expected one of "
                                  f"{', '.join(sorted(TABLE))}")
    for name, allowed in known.modes.items():
        value = layer.attributes.get(name)
        if value not in allowed:
            words = ", ".join(dtype_name(a) if isinstance(a, torch.dtype) else str(a) for a in allowed)
            raise UnsupportedOperator(f"{layer}: {name} is {value}; it is modelled for {words}")


def _evaluate(layer: Layer, inputs: list[torch.Tensor | None], exact: bool = False) -> tuple[Value, ...]:
    """One layer; each result rounded (unless `exact`) to its declared dtype and held against its declared shape."""
    try:
        result = TABLE[layer.kind].call(*inputs, **layer.attributes)
    except CheckError as error:
        raise CheckError(f"{layer}: {error}") from None
    except Exception as error:
        shapes = [None if x is None else list(x.shape) for x in inputs]
        error.add_note(f"at {layer} with inputs of {shapes}")
        raise
    values = []
    for data, tensor in zip(result if isinstance(result, tuple) else (result,), layer.outputs, strict=True):
        if tensor.dtype.is_floating_point != data.is_floating_point() or (
                not tensor.dtype.is_floating_point and layer.kind != "TOPK" and data.dtype != storage(tensor.dtype)):
            raise CheckError(f"{layer}: gives {dtype_name(data.dtype)}; TensorRT declares {_declared(tensor)}")
        value = Value(data, tensor.dtype) if exact else rounded(data, tensor.dtype)
        if not _fits(value, tensor.shape):
            raise CheckError(f"{layer}: gives {list(data.shape)}; TensorRT declares {_declared(tensor)}")
        values.append(value)
    return tuple(values)


def _fits(value: Value, shape: tuple[int, ...] | None) -> bool:
    sizes = value.data.shape
    return shape is None or (len(sizes) == len(shape) and all(d in (-1, n) for n, d in zip(sizes, shape, strict=True)))


def _declared(tensor: reader.Tensor) -> str:
    return f"{dtype_name(tensor.dtype)} {'of any rank' if tensor.shape is None else list(tensor.shape)}"


def default_module() -> str:
    """The backend whose TensorRT parses: RTX, which needs no GPU, where it is installed."""
    return "trt-rtx" if tensorrt_door.available("trt-rtx") or not tensorrt_door.available("trt") else "trt"


class NetworkSession(Session):
    """A graph as TensorRT's parser understood it. Slow, and tells of engines without a GPU."""

    def __init__(self, export: Export, graph: GraphEntry, backend: str | None = None) -> None:
        super().__init__(export, graph)
        path = export.folder / graph.file
        self.network = reader.read(backend or default_module(), path, external_places(export))
        self._runner = Runner(self.network)

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        return into_caches(feed, self._runner.run(feed))
