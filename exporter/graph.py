"""A small builder over onnx.helper: named nodes, scopes, shared constants, weights kept in an external file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from exporter.dtypes import CODES, ONNX_OF_NAME, STORED, DType
from exporter.signature import TensorSpec
from exporter.weight_file import SCALE, StoredTensor

OPSET = 24  # TensorScatter; Attention and RotaryEmbedding came with 23
IR_VERSION = 11


class GraphBuilder:
    """Collects nodes under `scope/name` names; a value is its name. The caller names every node for what it is."""

    def __init__(self, dtype: DType, weights: Mapping[str, StoredTensor], accuracy_level: int | None = None) -> None:
        self.dtype, self.accuracy_level = dtype, accuracy_level  # the latter of products over packed codes
        self._weights, self._block = weights, ""
        self._shared: dict[str, str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, TensorProto] = {}
        self._scopes: list[str] = []
        self._names: set[str] = set()
        self._domains: set[str] = set()
        self._declared: list[onnx.ValueInfoProto] = []

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Prefix the names of the nodes made inside."""
        self._scopes.append(name)
        yield
        self._scopes.pop()

    @contextmanager
    def block(self, name: str) -> Iterator[None]:
        """A part of a model with weights of its own: `name/` before its nodes, `name.` before its weights."""
        outer, self._block = self._block, f"{self._block}{name}."
        with self.scope(name.replace(".", "/")):
            yield
        self._block = outer

    def once(self, name: str, make: Callable[[], str]) -> str:
        """A value that all blocks share: made where it is first asked for, under `shared/name`."""
        if name not in self._shared:
            scopes, self._scopes = self._scopes, ["shared", name]
            self._shared[name] = make()
            self._scopes = scopes
        return self._shared[name]

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
        if attrs.get("domain"):
            self._domains.add(attrs["domain"])
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
        """Whether this block has a weight `name`."""
        return self._block + name in self._weights

    def weight_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this block's weight as stored."""
        return self._weights[self._block + name].shape

    def stored_dtype(self, name: str) -> str | None:
        """The dtype in which this block's weight is stored; None where there is no such weight."""
        stored = self._weights.get(self._block + name)
        return None if stored is None else stored.dtype

    def weight(self, name: str, shape: Sequence[int] | None = None, alias: str | None = None,
               first: int | None = None) -> str:
        """An initializer of this block that lies in a weight file. `shape` views its bytes otherwise, under `alias`:
        all of them, or only some from row `first` of the leading axis on."""
        stored, label = self._weights[self._block + name], self._block + (alias or name)
        if label not in self._initializers:
            dims = tuple(shape or stored.shape)
            begin = (first or 0) * (stored.nbytes // stored.shape[0])
            nbytes = STORED[stored.dtype].nbytes(prod(dims))
            if begin + nbytes > stored.nbytes or (first is None and nbytes != stored.nbytes):
                raise ValueError(f"{name} {stored.shape} cannot be viewed as {dims}")
            self._initializers[label] = _external(label, dims, ONNX_OF_NAME[stored.dtype], stored, begin, nbytes)
        return label

    def packed(self, name: str) -> tuple[str, str, int]:
        """This block's codes as ONNX Runtime's operators take them, their scales, and the block size: bytes of a matrix
        [out, blocks, bytes of a block], of a stack [E, out, bytes of a row]."""
        stored, label, scale = self._weights[self._block + name], self._block + name, f"{name}{SCALE}"
        *rows, columns = stored.shape
        blocks = self.weight_shape(scale)[-1]
        row = STORED[stored.dtype].nbytes(columns)
        if label not in self._initializers:
            dims = (*rows, blocks, row // blocks) if len(rows) == 1 else (*rows, row)
            self._initializers[label] = _external(label, dims, TensorProto.UINT8, stored, 0, stored.nbytes)
        return label, self.weight(scale), columns // blocks

    def matrix(self, name: str, alias: str | None = None, part: range | None = None) -> str:
        """This block's weight in the compute dtype: as it lies, or dequantised where codes are stored with a scale for
        each block of a row. `part` of a stack (consecutive indices of its leading axis) goes by `alias`."""
        stored, scale = self._weights[self._block + name], f"{name}{SCALE}"

        def view(name: str, alias: str | None) -> str:
            shape = self.weight_shape(name)
            return self.weight(name) if part is None else (
                self.weight(name, (len(part), *shape[1:]), alias, part.start))

        codes = view(name, alias)
        if stored.dtype not in CODES:
            return codes
        block = stored.shape[-1] // self.weight_shape(scale)[-1]
        return self.op("DequantizeLinear", codes, view(scale, f"{alias}{SCALE}"), name=f"{alias or name}/dequantised",
                       axis=len(stored.shape) - 1, block_size=block)

    def declare(self, value: str, dtype: int, shape: Sequence[int | str | None]) -> None:
        """State a value's type where no shape inference can know it (operators of another domain)."""
        self._declared.append(helper.make_tensor_value_info(value, dtype, list(shape)))

    def to(self, value: str, dtype: int, name: str) -> str:
        """Cast to an ONNX element type."""
        return self.op("Cast", value, name=name, to=dtype)

    def model(self, name: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], producer_version: str,
              metadata: Mapping[str, str]) -> onnx.ModelProto:
        """The finished graph, with metadata; unused constants are dropped by construction (nobody asked for them)."""
        def info(spec: TensorSpec) -> onnx.ValueInfoProto:
            return helper.make_tensor_value_info(spec.name, ONNX_OF_NAME[spec.dtype], list(spec.shape))

        graph = helper.make_graph(self._nodes, name, [info(s) for s in inputs], [info(s) for s in outputs],
                                  list(self._initializers.values()), value_info=self._declared)
        opsets = [helper.make_opsetid("", OPSET), *(helper.make_opsetid(d, 1) for d in sorted(self._domains))]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION,
                                  producer_name="mla-export", producer_version=producer_version)
        for key, value in metadata.items():
            model.metadata_props.add(key=key, value=value)
        return model


def _external(label: str, dims: Sequence[int], dtype: int, stored: StoredTensor, begin: int, nbytes: int
              ) -> TensorProto:
    """An initializer over `nbytes` of a stored tensor, from its byte `begin` on."""
    proto = TensorProto(name=label, dims=dims, data_type=dtype, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", stored.file), ("offset", stored.offset + begin), ("length", nbytes)):
        proto.external_data.add(key=key, value=str(value))
    return proto


def infer_and_check(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Strict shape inference, then the ONNX checker, in a folder of its own below `folder`.

    The result keeps the inferred shapes, so that any viewer or audit sees them. The checker wants a file of each weight
    file's name and reads none of it, but refuses one with several hard links, so empty ones stand in.
    """
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    locations = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    with tempfile.TemporaryDirectory(prefix=".check-", dir=folder) as place:
        for name in locations:
            stand_in = Path(place) / name
            stand_in.parent.mkdir(exist_ok=True)
            stand_in.touch()
        path = Path(place) / "model.onnx"
        path.write_bytes(inferred.SerializeToString())
        onnx.checker.check_model(str(path), full_check=False)
    return inferred
