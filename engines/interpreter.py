"""The judge of half-precision graphs: evaluates an ONNX file node by node, rounding every tensor to its declared dtype.

ONNX Runtime's CPU computes float16 products in float32 and has no bfloat16 MatMul, so what it says of such graphs does
not count. Here each float tensor holds only values its declared dtype can hold: one operator is computed in float32
(float64 for double), then its result is rounded, to nearest even, overflow to inf. What an operator accumulates inside
stays in float32: that is the kernel's own affair, and no kernel is modelled. Integers and booleans are exact.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from engines import attention_ops as _attention_ops  # noqa: F401  (enter their operators in the table)
from engines import moe_ops as _moe_ops  # noqa: F401
from engines import nbits_ops as _nbits_ops  # noqa: F401
from engines import quantise_ops as _quantise_ops  # noqa: F401
from engines.onnx_ops import (
    DTYPES,
    INT4,
    OPERATORS,
    Operator,
    UnsupportedOperator,
    Value,
    dtype_name,
    onnx_dtype,
    storage,
    stored_bytes,
)
from exporter.errors import InputError

__all__ = ["Interpreter", "TensorInfo", "UnsupportedOperator"]

Array = np.ndarray[Any, Any]
OPSETS = range(18, 25)  # the table's operators keep one meaning from 18 on
# dtypes that NumPy has from ml_dtypes: theirs, and the integers that torch shares memory as
_NARROW: dict[torch.dtype, tuple[np.dtype[Any], type[Any]]] = {
    torch.bfloat16: (np.dtype(ml_dtypes.bfloat16), np.int16),
    torch.float8_e4m3fn: (np.dtype(ml_dtypes.float8_e4m3fn), np.uint8), INT4: (np.dtype(ml_dtypes.int4), np.int8)}
REAL_LIMIT = 1_000_000  # elements: a larger integer or boolean result is not made real by `shapes`


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a graph at one profile: `bytes` in its declared dtype; `node` and `op` name what produces it.

    A graph input has the op `input` and no node, an initializer the op `initializer` and no node.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    elements: int
    bytes: int
    node: str
    op: str


@dataclass(frozen=True)
class _Node:
    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    operator: Operator

    def __str__(self) -> str:
        return f"node {self.name!r} ({self.op})"


@dataclass(frozen=True)
class _Constant:
    """An initializer or a Constant node's tensor, its bytes possibly still in a file."""

    proto: TensorProto
    node: str = ""
    op: str = "initializer"


class Interpreter:
    """One ONNX file, ready to run on `device` ("cpu", "cuda"); weights are read at first use and kept as float32, from
    files beside it, or in the folder `weights`.

    Raises UnsupportedOperator for a node outside the table in `onnx_ops.py`, before anything is computed, and
    InputError for a file that cannot be used.
    """

    def __init__(self, path: Path | str, *, device: str = "cpu", weights: Path | None = None) -> None:
        self.path = Path(path)
        self._folder = weights or self.path.parent
        self.device = torch.device(device)
        model = onnx.load(self.path, load_external_data=False)
        _check_model(model, self.path)
        graph = model.graph
        self._constants = {proto.name: _Constant(proto) for proto in graph.initializer}
        self._inputs = {i.name: i.type.tensor_type for i in graph.input if i.name not in self._constants}
        self._outputs = [o.name for o in graph.output]
        self._nodes: list[_Node] = []
        for proto in graph.node:
            if proto.op_type == "Constant" and proto.domain in ("", "ai.onnx"):
                self._constants[proto.output[0]] = _Constant(_constant_tensor(proto), proto.name, "Constant")
            else:
                self._nodes.append(_parse_node(proto))
        self._dying = self._last_uses()
        self._weights: dict[str, Value] = {}

    def run(self, feed: Mapping[str, Array]) -> dict[str, Array]:
        """The graph's outputs for one feed, both by name, in the declared dtypes (bfloat16 as ml_dtypes.bfloat16)."""
        if torch.get_float32_matmul_precision() != "highest":
            raise InputError(f"torch's float32 matmul precision is {torch.get_float32_matmul_precision()!r}; "
                             "a judge needs 'highest': call torch.set_float32_matmul_precision('highest')")  # fmt: skip
        self._check_feed(feed)
        values = {name: from_numpy(array, self.device) for name, array in feed.items()}
        for index, node in enumerate(self._nodes):
            inputs = [self._lookup(name, values) for name in node.inputs]
            values.update(zip(node.outputs, _evaluate(node, inputs, self.device), strict=False))
            for name in self._dying[index]:
                values.pop(name, None)
        found = {name: self._lookup(name, values) for name in self._outputs}
        return {name: to_numpy(value) for name, value in found.items() if value is not None}

    def shapes(self, dims: Mapping[str, int]) -> list[TensorInfo]:
        """Every tensor's exact shape when the inputs' symbolic dimensions have the sizes in `dims`; no memory is used.

        Floats, inputs and what depends on them are shapes without data (torch's meta device). Integers and booleans
        made of shapes and constants alone are computed, because Reshape, Range and Expand need their numbers, unless
        they pass REAL_LIMIT elements (masks). InputError where a dimension lacks a size or a size depends on data.
        """
        meta = torch.device("meta")
        values: dict[str, Value] = {}
        for name, kind in self._inputs.items():
            dtype = onnx_dtype(kind.elem_type)
            sizes = [_size(name, dim, dims) for dim in kind.shape.dim]
            values[name] = Value(torch.empty(sizes, dtype=storage(dtype), device=meta), dtype)
        infos = [_info(name, value, "", "input") for name, value in values.items()]
        for name, constant in self._constants.items():
            dtype = onnx_dtype(constant.proto.data_type)
            sizes = list(constant.proto.dims)
            if dtype.is_floating_point or math.prod(sizes) > REAL_LIMIT:
                values[name] = Value(torch.empty(sizes, dtype=storage(dtype), device=meta), dtype)
            else:
                values[name] = from_numpy(_read(constant.proto, self._folder), torch.device("cpu"))
            infos.append(_info(name, values[name], constant.node, constant.op))
        for node in self._nodes:
            inputs = [values[name] if name else None for name in node.inputs]
            produced = dict(zip(node.outputs, _evaluate_shapes(node, inputs), strict=False))
            values.update(produced)
            infos += [_info(name, value, node.name, node.op) for name, value in produced.items() if name]
        return infos

    def _last_uses(self) -> list[list[str]]:
        """Per node, the tensors nothing reads after it (also results nothing reads at all)."""
        last = {name: index for index, node in enumerate(self._nodes) for name in (*node.outputs, *node.inputs)}
        dying: list[list[str]] = [[] for _ in self._nodes]
        for name, index in last.items():
            if name not in self._outputs:
                dying[index].append(name)
        return dying

    def _lookup(self, name: str, values: Mapping[str, Value]) -> Value | None:
        if not name:
            return None  # an optional input left out
        if name in values:
            return values[name]
        if name not in self._weights:
            if name not in self._constants:
                raise InputError(f"{self.path.name}: nothing produces the tensor {name!r}; expected a sorted graph")
            self._weights[name] = from_numpy(_read(self._constants[name].proto, self._folder), self.device)
        return self._weights[name]

    def _check_feed(self, feed: Mapping[str, Array]) -> None:
        """Names, dtypes, ranks and sizes of the feed against the graph's inputs; one size per symbolic dimension."""
        if set(feed) != set(self._inputs):
            raise InputError(f"the feed has {sorted(feed)}; {self.path.name} expects {sorted(self._inputs)}")
        bound: dict[str, int] = {}
        for name, kind in self._inputs.items():
            array, expected = feed[name], dtype_name(onnx_dtype(kind.elem_type))
            if array.dtype.name != expected:
                raise InputError(f"input {name!r} is {array.dtype.name}; expected {expected}")
            asked = list(kind.shape.dim)
            sizes = [d.dim_value if d.HasField("dim_value") else bound.setdefault(d.dim_param or f"{name}[{i}]", size)
                     for i, (d, size) in enumerate(zip(asked, array.shape, strict=False))]  # fmt: skip
            if len(asked) != array.ndim or sizes != list(array.shape):
                words = ", ".join(d.dim_param or str(d.dim_value) for d in asked)
                raise InputError(f"input {name!r} has shape {list(array.shape)}; expected [{words}] with {bound}")


def _check_model(model: Any, path: Path) -> None:
    """Refuse what the table's meanings do not cover: other opsets, local functions, sparse weights, non-tensors."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), None)
    if opset not in OPSETS:
        raise InputError(f"{path.name} is of opset {opset}; the interpreter expects {OPSETS[0]} to {OPSETS[-1]}")
    if model.functions or model.graph.sparse_initializer:
        raise UnsupportedOperator(f"{path.name} has local functions or sparse initializers; expected neither")
    for value in model.graph.input:
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise InputError(f"input {value.name!r} is no tensor with a shape; expected one")


def _parse_node(proto: Any) -> _Node:
    """A node with its row of the table and plain attributes; UnsupportedOperator for what the row does not know."""
    name = proto.name or f"-> {proto.output[0]}"
    known = OPERATORS.get(proto.op_type if proto.domain in ("", "ai.onnx") else f"{proto.domain}:{proto.op_type}")
    if known is None:
        raise UnsupportedOperator(f"node {name!r}: operator {proto.op_type} of domain {proto.domain or 'ai.onnx'!r} is "
                                  f"not in the interpreter's table; expected one of {', '.join(sorted(OPERATORS))}")
    attributes: dict[str, Any] = {}
    for attribute in proto.attribute:
        if attribute.name not in known.attributes:
            raise UnsupportedOperator(f"node {name!r} ({proto.op_type}): the attribute {attribute.name} is unknown; "
                                      f"expected some of {', '.join(sorted(known.attributes)) or 'none'}")
        value = helper.get_attribute_value(attribute)
        if isinstance(value, TensorProto):
            value = numpy_helper.to_array(value)
        attributes[attribute.name] = value.decode() if isinstance(value, bytes) else value
    return _Node(name, proto.op_type, tuple(proto.input), tuple(proto.output), attributes, known)


def _constant_tensor(proto: Any) -> TensorProto:
    """The tensor of a Constant node, whichever attribute states it."""
    (attribute,) = proto.attribute
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return value
    dtypes = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    if attribute.name not in dtypes:
        raise UnsupportedOperator(f"node {proto.name!r} (Constant): the attribute {attribute.name} is unknown; "
                                  f"expected value, {', '.join(dtypes)}")
    return numpy_helper.from_array(np.array(value, dtype=dtypes[attribute.name]), proto.output[0])


def _evaluate(node: _Node, inputs: Sequence[Value | None], device: torch.device) -> tuple[Value, ...]:
    """One operator on its inputs; new tensors are made on `device`. An error gets a note naming the node."""
    try:
        # on the CPU, torch's default, the context would only slow every call down
        with torch.device(device) if device.type != "cpu" else nullcontext():
            result = node.operator.call(*inputs, **node.attributes)
    except Exception as error:
        shapes = [(n, list(v.data.shape)) for n, v in zip(node.inputs, inputs, strict=True) if v is not None]
        error.add_note(f"at {node} with inputs {shapes}")
        raise
    values = result if isinstance(result, tuple) else (result,)
    if any(node.outputs[len(values) :]):
        raise UnsupportedOperator(f"{node} has outputs {list(node.outputs)}; expected at most {len(values)}")
    return values


def _evaluate_shapes(node: _Node, inputs: Sequence[Value | None]) -> tuple[Value, ...]:
    """Shapes alone first; then the numbers too, where all inputs are known and the result is integer and small."""
    host = node.operator.host
    blank = [value if value is None or index in host else value.moved(value.data.to("meta"))
             for index, value in enumerate(inputs)]  # fmt: skip
    outputs = _evaluate(node, blank, torch.device("meta"))
    known = node.operator.shape_only or not any(value is not None and value.data.is_meta for value in inputs)
    small = all(not v.dtype.is_floating_point and v.data.numel() <= REAL_LIMIT for v in outputs)
    return _evaluate(node, inputs, torch.device("cpu")) if known and small else outputs


def _size(name: str, dim: Any, dims: Mapping[str, int]) -> int:
    """The size of one dimension of the input `name`."""
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if dim.dim_param not in dims:
        raise InputError(f"input {name!r}: the dimension {dim.dim_param or '?'!r} has no size; dims gives {dict(dims)}")
    return dims[dim.dim_param]


def _info(name: str, value: Value, node: str, op: str) -> TensorInfo:
    elements = value.data.numel()
    size = stored_bytes(elements, value.dtype)
    return TensorInfo(name, tuple(value.data.shape), dtype_name(value.dtype), elements, size, node, op)


def _read(proto: TensorProto, folder: Path) -> Array:
    """A tensor's array: inline, or mapped from its external file, which must lie in the model's folder."""
    dtype = onnx_dtype(proto.data_type)
    if proto.data_location != TensorProto.EXTERNAL:
        return np.asarray(numpy_helper.to_array(proto))
    entries = {entry.key: entry.value for entry in proto.external_data}
    location = entries.get("location", "")
    parts = {*PurePosixPath(location).parts, *PureWindowsPath(location).parts}
    absolute = PurePosixPath(location).is_absolute() or PureWindowsPath(location).drive or location.startswith("\\")
    if not location or absolute or ".." in parts:
        raise InputError(f"initializer {proto.name!r} is stored at {location!r}; expected a relative path without '..'")
    if not (folder / location).is_file():
        raise InputError(f"initializer {proto.name!r} is stored in {location}, which is not in {folder}; put it there")
    shape, offset = tuple(proto.dims), int(entries.get("offset", 0))
    needed = stored_bytes(math.prod(shape), dtype)
    stated, held = int(entries.get("length", needed)), (folder / location).stat().st_size
    if stated != needed or offset < 0 or offset + needed > held:
        raise InputError(f"initializer {proto.name!r} has {stated} bytes at {offset} of {location} ({held} bytes); "
                         f"its shape {list(shape)} expects {needed}")  # fmt: skip
    kind = _NARROW[dtype][0] if dtype in _NARROW else np.dtype(dtype_name(dtype))
    if needed == 0:
        return np.empty(shape, kind)  # a map cannot be empty
    if dtype == INT4:  # two to a byte, the first in its low half
        raw = np.memmap(folder / location, np.int8, "r", offset, (needed,))
        pairs = np.stack([raw << 4, raw], axis=-1) >> 4  # the shift to the right keeps the sign
        return pairs.reshape(-1)[:math.prod(shape)].reshape(shape).astype(kind)
    # copy-on-write, though nothing writes: torch warns of a read-only array
    mapped = np.memmap(folder / location, dtype=kind, mode="c", offset=offset, shape=shape)
    return mapped if mapped.flags.aligned else mapped.copy()


def from_numpy(array: Array, device: torch.device) -> Value:
    """A Value of the array's dtype; float32 and integers share the array's memory on the CPU."""
    array = np.require(array, requirements=["C", "W"])  # torch has no negative strides and warns of read-only memory
    if array.dtype == ml_dtypes.int4:
        return Value(torch.from_numpy(array.astype(np.int8)).to(device), INT4)
    narrow = next((t for t, (kind, _) in _NARROW.items() if kind == array.dtype), None)
    tensor = torch.from_numpy(array if narrow is None else array.view(_NARROW[narrow][1]))
    if narrow is not None:
        tensor = tensor.view(narrow)
    if tensor.dtype not in DTYPES.values():
        known = ", ".join(map(dtype_name, DTYPES.values()))
        raise UnsupportedOperator(f"an array is {array.dtype}; expected one of {known}")
    return Value(tensor.to(device=device, dtype=storage(tensor.dtype)), tensor.dtype)


def to_numpy(value: Value) -> Array:
    """A fresh array in the declared dtype: never memory shared with a feed or a weight."""
    if value.dtype == INT4:
        return value.data.cpu().numpy().astype(ml_dtypes.int4)
    data = value.data.cpu().to(value.dtype, copy=True, memory_format=torch.contiguous_format)
    if value.dtype in _NARROW:
        kind, raw = _NARROW[value.dtype]
        return np.asarray(data.view(torch.int16 if raw == np.int16 else torch.uint8).numpy().view(kind))
    return np.asarray(data.numpy())
