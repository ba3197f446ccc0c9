"""The weights that a graph names, mapped where they lie: beside it, or handed over (a checkpoint on another disk)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

Places = Mapping[str, Path]  # a weight file as the graph names it -> where it really is


@dataclass(frozen=True)
class Weight:
    """An initializer: its shape, its onnx.TensorProto data type, and its values `data` [n] uint8, mapped where they are
    `stored` in a weight file."""

    shape: tuple[int, ...]
    dtype: int
    data: np.ndarray
    stored: bool

    @property
    def count(self) -> int:
        """Numbers, not bytes."""
        return math.prod(self.shape)


def handed_weights(graph: Path | onnx.ModelProto, places: Places) -> Iterator[tuple[onnx.TensorProto, np.ndarray]]:
    """Every initializer of a graph that lies in one of `places`, with its bytes [n] uint8, memory-mapped."""
    if not places:
        return
    model = graph if isinstance(graph, onnx.ModelProto) else onnx.load(graph, load_external_data=False)
    for tensor, location in _stored(model):
        if location in places:
            yield tensor, _mapped(tensor, places[location])


def graph_weights(graph: Path, places: Places) -> dict[str, Weight]:
    """Every initializer of a graph by name."""
    model = onnx.load(graph, load_external_data=False)
    files = {tensor.name: places.get(location, graph.parent / location) for tensor, location in _stored(model)}
    found = {}
    for tensor in model.graph.initializer:
        if tensor.name in files:
            data = _mapped(tensor, files[tensor.name])
        else:
            data = np.frombuffer(numpy_helper.to_array(tensor).tobytes(), np.uint8)
        found[tensor.name] = Weight(tuple(tensor.dims), tensor.data_type, data, tensor.name in files)
    return found


def _stored(model: onnx.ModelProto) -> Iterator[tuple[onnx.TensorProto, str]]:
    """Every initializer whose bytes lie in a file, with that file as the graph names it."""
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                yield tensor, entry.value


def _mapped(tensor: onnx.TensorProto, file: Path) -> np.ndarray:
    entry = {e.key: e.value for e in tensor.external_data}
    return np.memmap(file, np.uint8, "r", int(entry["offset"]), (int(entry["length"]),))


def weight_bytes(graph: Path) -> int:
    """Bytes of the stored weights that a graph names."""
    model = onnx.load(graph, load_external_data=False)
    return sum(int(e.value) for i in model.graph.initializer for e in i.external_data if e.key == "length")
