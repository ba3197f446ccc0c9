"""Weights that lie where no runtime looks for them (a checkpoint on another disk): mapped, and handed over by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx

Places = Mapping[str, Path]  # a weight file as the graph names it -> where it really is


def handed_weights(graph: Path, places: Places) -> Iterator[tuple[onnx.TensorProto, np.ndarray]]:
    """Every initializer of a graph that lies in one of `places`, with its bytes [n] uint8, memory-mapped."""
    for tensor in onnx.load(graph, load_external_data=False).graph.initializer if places else ():
        entry = {e.key: e.value for e in tensor.external_data}
        if entry.get("location") in places:
            length = int(entry["length"])
            yield tensor, np.memmap(places[entry["location"]], np.uint8, "r", int(entry["offset"]), (length,))
