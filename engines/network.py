"""The network that TensorRT's parser made of a graph, as plain data: its layers in order, their attributes, constants.

What an engine will compute is what this network says, not what the ONNX file says: the parser drops what it does not
implement and replaces what it has no layer for. The parser lists layers as it made them, also before their inputs; here
each stands behind what it reads.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch

from engines import trt as tensorrt_door
from engines.handed import Places
from engines.onnx_ops import INT4, UnsupportedOperator
from exporter.errors import CheckError

Array = np.ndarray[Any, Any]
DTYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT8": torch.int8,
          "UINT8": torch.uint8, "INT32": torch.int32, "INT64": torch.int64, "BOOL": torch.bool,
          "FP8": torch.float8_e4m3fn, "INT4": INT4}
_CLOSED = {"BF16": np.dtype(ml_dtypes.bfloat16), "FP8": np.dtype(ml_dtypes.float8_e4m3fn),
           "INT4": np.dtype(ml_dtypes.int4)}  # constants that NumPy has no name for
# kind of layer -> its class and what is read of it; a kind that is not here is read by name alone
ATTRIBUTES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ACTIVATION": ("IActivationLayer", ("type", "alpha", "beta")),
    "ATTENTION_INPUT": ("IAttentionInputLayer", ("attention",)),
    "CAST": ("ICastLayer", ("to_type",)),
    "CONCATENATION": ("IConcatenationLayer", ("axis",)),
    "CONSTANT": ("IConstantLayer", ("shape", "weights")),
    "DEQUANTIZE": ("IDequantizeLayer", ("axis", "block_shape", "to_type")),
    "ELEMENTWISE": ("IElementWiseLayer", ("op",)),
    "FILL": ("IFillLayer", ("operation", "shape", "alpha", "beta", "to_type")),
    "GATHER": ("IGatherLayer", ("axis", "mode", "num_elementwise_dims")),
    "KV_CACHE_UPDATE": ("IKVCacheUpdateLayer", ("cache_mode", "update_form", "update_lengths")),
    "MATRIX_MULTIPLY": ("IMatrixMultiplyLayer", ("op0", "op1")),
    "QUANTIZE": ("IQuantizeLayer", ("axis", "block_shape", "to_type")),
    "REDUCE": ("IReduceLayer", ("op", "axes", "keep_dims")),
    "ROTARY_EMBEDDING": ("IRotaryEmbeddingLayer", ("interleaved", "rotary_embedding_dim")),
    "SCATTER": ("IScatterLayer", ("axis", "mode")),
    "SHUFFLE": ("IShuffleLayer", ("first_transpose", "reshape_dims", "second_transpose", "zero_is_placeholder")),
    "SLICE": ("ISliceLayer", ("start", "shape", "stride", "axes", "mode")),
    "SOFTMAX": ("ISoftMaxLayer", ("axes",)),
    "TOPK": ("ITopKLayer", ("op", "k", "axes")),
    "UNARY": ("IUnaryLayer", ("op",)),
}
_ATTENTION = ("norm_op", "causal_kind", "query_form", "key_value_form", "query_lengths", "key_value_lengths",
              "normalization_quantize_scale", "num_ranks")


@dataclass(frozen=True)
class Tensor:
    """A tensor as TensorRT declares it; -1 in `shape` is known at run time only, no shape at all is None."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] | None


@dataclass(frozen=True)
class Layer:
    """One layer. `inputs` are tensor names, "" for an optional one left out; attributes are names of enum members,
    tuples for sizes and permutations (None where an input gives them), torch dtypes and numbers."""

    kind: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[Tensor, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f"layer {self.name!r} ({self.kind})"


@dataclass(frozen=True)
class Network:
    """A parsed graph. Every layer stands behind those that produce its inputs."""

    file: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    layers: tuple[Layer, ...]

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers of each kind there are, the most frequent first."""
        return dict(Counter(layer.kind for layer in self.layers).most_common())


def read(backend: str, path: Path, handed: Places | None = None) -> Network:
    """Parse an ONNX file with the TensorRT of `backend`. CheckError if the parser refuses it; `handed` as in
    `engines.trt.build`."""
    with tensorrt_door.parsed(backend, path, handed) as (trt, network):
        return plain(trt, network, path.name)


def plain(trt: Any, network: Any, file: str) -> Network:
    """A network definition as plain data, its constants copied."""
    inputs = tuple(_tensor(network.get_input(i)) for i in range(network.num_inputs))
    outputs = tuple(_tensor(network.get_output(i)) for i in range(network.num_outputs))
    layers = [_layer(trt, network.get_layer(i)) for i in range(network.num_layers)]
    return Network(file, inputs, outputs, _in_order(file, inputs, layers))


def _tensor(tensor: Any) -> Tensor:
    if tensor.dtype.name not in DTYPES:
        raise UnsupportedOperator(f"tensor {tensor.name!r} is {tensor.dtype.name}; expected one of {', '.join(DTYPES)}")
    try:
        shape = tuple(int(size) for size in tensor.shape)
    except ValueError:  # its length is negative: not even the rank is known
        shape = None
    return Tensor(tensor.name, DTYPES[tensor.dtype.name], shape)


def _layer(trt: Any, layer: Any) -> Layer:
    kind = layer.type.name  # before the class changes: an activation's `type` is another thing
    read_inputs = [layer.get_input(i) for i in range(layer.num_inputs)]
    inputs = tuple("" if tensor is None else tensor.name for tensor in read_inputs)
    outputs = tuple(_tensor(layer.get_output(i)) for i in range(layer.num_outputs))
    attributes: dict[str, Any] = {}
    if kind in ATTRIBUTES:
        name, wanted = ATTRIBUTES[kind]
        layer.__class__ = getattr(trt, name)
        attributes = {a: _attribute(layer, a) for a in wanted}
        if kind == "CONSTANT":
            attributes = {"weights": _weights(trt, attributes["weights"]).reshape(tuple(attributes["shape"]))}
        if kind == "ATTENTION_INPUT":
            attributes = _attention(attributes["attention"])
    return Layer(kind, layer.name, inputs, outputs, {a: _plain(trt, value) for a, value in attributes.items()})


def _attribute(layer: Any, name: str) -> Any:
    """None for one that this TensorRT does not have, or that is not set (it raises then)."""
    try:
        return getattr(layer, name, None)
    except RuntimeError:
        return None


def _attention(attention: Any) -> dict[str, Any]:
    """What the two boundary layers have in common; a TensorRT without `causal_kind` anchors its one flag top-left."""
    attributes = {a: getattr(attention, a, None) for a in _ATTENTION}
    if attributes["causal_kind"] is None:
        attributes["causal_kind"] = "UPPER_LEFT" if attention.causal else "NONE"
    return attributes


def _plain(trt: Any, value: Any) -> Any:
    if isinstance(value, trt.DataType):
        return DTYPES.get(value.name, value.name)
    if isinstance(value, (trt.Dims, trt.Permutation)):
        return tuple(int(size) for size in value) if len(value) >= 0 else None
    return value.name if hasattr(value, "name") else value  # a member of an enum, a tensor; else a number


class _Weights(ctypes.Structure):
    """nvinfer1::Weights: a DataType, a pointer and a count."""

    _fields_ = [("dtype", ctypes.c_int32), ("values", ctypes.c_void_p), ("count", ctypes.c_int64)]


def _weights(trt: Any, weights: Any) -> Array:
    """A constant's elements, copied. The Python API gives bfloat16, FP8 and INT4, which NumPy has no name for, as a
    closed object: its fields are read in memory, once it was seen that a known object's lie where they are looked for.
    """
    if isinstance(weights, np.ndarray):
        return weights.copy()
    known = np.arange(3, dtype=np.float32)
    probe, found = _fields(trt.Weights(known)), _fields(weights)
    seen = (probe.dtype, probe.values, probe.count) == (int(trt.DataType.FLOAT), known.ctypes.data, known.size)
    name, kind = weights.dtype.name, _CLOSED.get(weights.dtype.name)
    if kind is None or not seen or (found.dtype, found.count) != (int(getattr(trt.DataType, name)), weights.size):
        raise UnsupportedOperator(f"constants of {name} cannot be read from TensorRT {trt.__version__}")
    if name == "INT4":  # two to a byte, the first in its low half
        raw = np.frombuffer(ctypes.string_at(found.values, -(-found.count // 2)), np.uint8)
        unsigned = np.stack([raw % 16, raw // 16], axis=1).reshape(-1)[:found.count].astype(np.int8)
        return np.where(unsigned < 8, unsigned, unsigned - 16).astype(kind)
    return np.frombuffer(ctypes.string_at(found.values, kind.itemsize * found.count), kind).copy()


def _fields(weights: Any) -> _Weights:
    """The C++ object behind a Python one: the pointer behind the object's reference count and type."""
    pointer = ctypes.c_void_p.from_address(id(weights) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    return _Weights.from_buffer_copy(ctypes.string_at(pointer, ctypes.sizeof(_Weights)))  # type: ignore[arg-type]


def _in_order(file: str, inputs: tuple[Tensor, ...], layers: list[Layer]) -> tuple[Layer, ...]:
    """Layers behind what they read. CheckError where a tensor has two producers, or none."""
    producer: dict[str, int] = {}
    for index, layer in enumerate(layers):
        for output in layer.outputs:
            if producer.setdefault(output.name, index) != index:
                raise CheckError(f"{file}: two layers of its network produce the tensor {output.name!r}")
    ordered, placed, given = [], [False] * len(layers), {tensor.name for tensor in inputs}
    for first in range(len(layers)):
        stack = [first]
        while stack:
            index = stack[-1]
            missing = [n for n in layers[index].inputs if n and n not in given]
            if unknown := next((n for n in missing if n not in producer or producer[n] in stack), None):
                raise CheckError(f"{file}: nothing produces {unknown!r}, which {layers[index]} of its network reads")
            if missing:
                stack.append(producer[missing[0]])
                continue
            if not placed[index]:
                placed[index] = True
                ordered.append(layers[index])
                given |= {output.name for output in layers[index].outputs}
            stack.pop()
    return tuple(ordered)
