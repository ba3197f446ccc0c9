"""What a matrix product of a decode graph must read and multiply, from its weights' shapes and its profile's.

A product reads both operands once, codes with their scales, and makes two operations a multiply-add. Of experts those
are read that the step's tokens choose; where several tokens choose, as many as they would of experts chosen at random.
Scores and mix in one operator read the cache once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx

from validate.floor import Need
from validate.node_parts import exported_name

DENSE, PACKED, EXPERTS, FUSED = ("MatMul", "Gemm"), ("MatMulNBits",), ("MoE", "QMoE"), ("LatentAttention",)
OPERATORS = (*DENSE, *PACKED, *EXPERTS, *FUSED)  # as graphs are exported; ONNX Runtime may fuse others into them
_ITEM = {"float": 4, "float16": 2, "double": 8}  # bytes of what a profile names


@dataclass(frozen=True)
class Shape:
    """An input or output of a node as it ran: its dtype in the profile's words, and its sizes."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Numbers in it."""
        return prod(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.count * _ITEM.get(self.dtype, 1)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Every node, those of subgraphs with them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.GRAPH:
                yield from nodes_of(attribute.g)


class Products:
    """The matrix products of one exported graph, by name."""

    def __init__(self, file: Path) -> None:
        graph = onnx.load(file, load_external_data=False).graph
        self._weights = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = {node.name: node for node in nodes_of(graph) if node.op_type in OPERATORS}

    def need(self, name: str, inputs: Sequence[Shape], output: Shape) -> Need | None:
        """What the node `name` of ONNX Runtime's graph must do, from the shapes it ran with (without those of weights
        that the runtime laid out for itself); None where it is no product, or one whose shapes do not say it."""
        node = self._nodes.get(exported_name(name))
        if node is None or not inputs or not output.count:
            return None
        values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        weights = [self._weights[i] for i in node.input if i in self._weights]
        if node.op_type in EXPERTS:
            return _experts(values, weights, inputs[0])
        if node.op_type in FUSED:
            queries, past, _, new = inputs
            rows = past.sizes[1] + new.sizes[1]
            return Need(queries.nbytes + past.nbytes + new.nbytes,
                        2.0 * prod(queries.sizes[:2]) * rows * (queries.sizes[2] + values["latent"]))
        stored = sum(_stored(weight) for weight in weights)
        if node.op_type in PACKED:
            return Need(stored + inputs[0].nbytes, 2.0 * output.count * values["K"])
        right = self._weights.get(node.input[1])
        if right is None and len(inputs) < 2:
            return None
        sizes = tuple(right.dims) if right is not None else inputs[1].sizes
        # of [..., K, N] or [..., N, K], whichever the runtime made of it
        inner = prod(sizes) / (prod(sizes[:-2]) * output.sizes[-1])
        read = stored + inputs[0].nbytes + (0 if right is not None else inputs[1].nbytes)
        return Need(read, 2.0 * output.count * inner)


def _experts(values: dict[str, Any], weights: Sequence[onnx.TensorProto], tokens: Shape) -> Need:
    """Stacks [E, out, in] of weights, or of codes with scales: the first dimension is the experts."""
    count, chosen, rows = weights[0].dims[0], values["k"], tokens.count // tokens.sizes[-1]
    touched = count * (1 - (1 - chosen / count) ** rows)
    per_code = 8 // values.get("expert_weight_bits", 8)
    matrices = [w for w in weights if w.data_type == onnx.TensorProto.UINT8] or weights
    numbers = sum(prod(w.dims[1:]) * (per_code if w.data_type == onnx.TensorProto.UINT8 else 1) for w in matrices)
    return Need(touched / count * sum(_stored(w) for w in weights) + tokens.nbytes, 2.0 * rows * chosen * numbers)


def _stored(weight: onnx.TensorProto) -> int:
    """Bytes of a weight."""
    found: int = prod(weight.dims) * onnx.helper.tensor_dtype_to_np_dtype(weight.data_type).itemsize
    return found
