"""A small builder over onnx.helper: named nodes, scopes, shared constants, weights kept in an external file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporter.dtypes import ONNX_OF_NAME, DType
from exporter.signature import TensorSpec
from exporter.weight_file import StoredTensor

OPSET = 24  # TensorScatter; Attention and RotaryEmbedding came with 23
IR_VERSION = 11


class GraphBuilder:
    """Collects nodes under `scope/name` names; a value is its name. The caller names every node for what it is."""

    def __init__(self, dtype: DType, weights: Mapping[str, StoredTensor], weight_file: str) -> None:
        self.dtype = dtype
        self._weights, self._weight_file = weights, weight_file
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._scopes: list[str] = []
        self._names: set[str] = set()

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the nodes made inside."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    def _unique(self, name: str) -> str:
        full = "/".join([*self._scopes, name])
        if full in self._names:
            raise ValueError(f"two nodes are called {full}")
        self._names.add(full)
        return full

    def op(self, op_type: str, *inputs: str, name: str, output: str | None = None, **attrs: Any) -> str:
        """Add a node with one output, called after the node unless `output` names a graph output."""
        return self.ops(op_type, *inputs, name=name, outputs=[output] if output else None, **attrs)[0]

    def ops(self, op_type: str, *inputs: str, name: str, outputs: Sequence[str] | None = None, count: int = 1,
            **attrs: Any) -> list[str]:
        """Add a node with several outputs."""
        full = self._unique(name)
        made = list(outputs or ([full] if count == 1 else [f"{full}.{i}" for i in range(count)]))
        self._nodes.append(helper.make_node(op_type, list(inputs), made, name=full, **attrs))
        return made

    def ints(self, *values: int) -> str:
        """A 1-D int64 constant, shared by content."""
        return self._constant("const/" + "_".join(str(v) for v in values).replace("-", "m"),
                              np.array(values, np.int64))

    def int_scalar(self, value: int) -> str:
        """A 0-D int64 constant."""
        return self._constant(f"const/scalar_{value}", np.array(value, np.int64))

    def scalar(self, name: str, value: float, dtype: DType | None = None) -> str:
        """A 0-D float constant in the compute dtype (or `dtype`)."""
        return self._constant(name, np.array(value).astype((dtype or self.dtype).numpy))

    def _constant(self, name: str, array: np.ndarray) -> str:
        if name not in self._initializers:
            self._initializers[name] = numpy_helper.from_array(array, name)
        return name

    def has_weight(self, name: str) -> bool:
        """Whether the weight file holds `name`."""
        return name in self._weights

    def weight(self, name: str, shape: Sequence[int] | None = None, alias: str | None = None) -> str:
        """An initializer that lies in the weight file; `shape` views the same bytes otherwise, under `alias`."""
        stored, label = self._weights[name], alias or name
        if label not in self._initializers:
            dims = tuple(shape or stored.shape)
            if int(np.prod(dims)) != int(np.prod(stored.shape)):
                raise ValueError(f"{name} {stored.shape} cannot be viewed as {dims}")
            proto = TensorProto(name=label, dims=dims, data_type=ONNX_OF_NAME[stored.dtype],
                                data_location=TensorProto.EXTERNAL)
            for key, value in (("location", self._weight_file), ("offset", stored.offset), ("length", stored.nbytes)):
                proto.external_data.add(key=key, value=str(value))
            self._initializers[label] = proto
        return label

    def to(self, value: str, dtype: int, name: str) -> str:
        """Cast to an ONNX element type."""
        return self.op("Cast", value, name=name, to=dtype)

    def model(self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], producer_version: str,
              metadata: Mapping[str, str]) -> onnx.ModelProto:
        """The finished graph, with metadata; unused constants are dropped by construction (nobody asked for them)."""
        def info(spec: TensorSpec) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(spec.name, ONNX_OF_NAME[spec.dtype], list(spec.shape))

        graph = helper.make_graph(self._nodes, name, [info(s) for s in inputs], [info(s) for s in outputs],
                                  list(self._initializers.values()))
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION,
                                  producer_name="mla-export", producer_version=producer_version)
        for key, value in metadata.items():
            model.metadata_props.add(key=key, value=value)
        return model


def infer_and_check(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Strict shape inference, then the ONNX checker on the file as it will lie in `folder` (weights included).

    The result keeps the inferred shapes, so that any viewer or audit sees them.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    path = folder / ".check.onnx"
    path.write_bytes(inferred.SerializeToString())
    try:
        onnx.checker.check_model(str(path), full_check=False)
    finally:
        path.unlink()
    return inferred
