"""Any ONNX graph as an audit reads it: nodes, what makes and what reads each tensor, and exact shapes without weights.

Every operator that ONNX has an inference for is known, at whichever opset; of others, those in `_LIKE` are. Small
integers are computed on the way (Reshape, Expand and Range need their numbers), so sizes that a graph derives from its
inputs' shapes are exact. What cannot be told is said by node, never guessed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, inliner, numpy_helper, shape_inference
from onnx.reference import ReferenceEvaluator

from exporter.errors import InputError

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
BEHIND = "the shape of its input"  # how the reason of a node begins that only follows another
KNOWN_LIMIT = 4096  # elements of a tensor whose numbers are computed
_HOST = {TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.FLOAT, TensorProto.DOUBLE}


@dataclass(frozen=True)
class Node:
    """One node; `op` carries its domain where that is not ONNX's own (`com.microsoft:MoE`)."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    proto: Any = field(repr=False)

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


@dataclass(frozen=True)
class Shapes:
    """Shapes by tensor, the numbers of small tensors that are known, and by node why one could not be seen through."""

    shape: dict[str, Shape]
    known: dict[str, Array]
    blind: dict[str, str]

    def elements(self, name: str) -> int | None:
        """Elements of a tensor, None where its shape is not known."""
        found = self.shape.get(name)
        return None if found is None else math.prod(found)


def _first(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    return [shapes[0]]


def _skip_norm(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    row = (*shapes[0][:-1], 1)
    return [shapes[0], row, row, shapes[0]]


def _packed_product(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    return [(*shapes[0][:-1], int(attributes["N"]))]


def _latent_attention(shapes: Sequence[Shape], attributes: Mapping[str, Any]) -> list[Shape]:
    return [(*shapes[0][:-1], int(attributes["latent"]))]


# shapes of outputs from those of inputs, for ONNX Runtime's operators and ours, which ONNX has no inference for
_LIKE: dict[str, Callable[[Sequence[Shape], Mapping[str, Any]], list[Shape]]] = {
    "com.microsoft:MoE": _first, "com.microsoft:QMoE": _first, "com.microsoft:RotaryEmbedding": _first,
    "com.microsoft:QuickGelu": _first, "com.microsoft:FastGelu": _first, "com.microsoft:BiasGelu": _first,
    "com.microsoft:SkipSimplifiedLayerNormalization": _skip_norm,
    "com.microsoft:SkipLayerNormalization": _skip_norm, "SimplifiedLayerNormalization": _first,
    "com.microsoft:MatMulNBits": _packed_product, "mla:LatentAttention": _latent_attention,
}


class Graph:
    """One ONNX file without its weights. InputError for what is no ONNX graph."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = _load(path)
        graph = model.graph
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}
        self._opsets = list(model.opset_import)
        self._versions = {entry.domain or "ai.onnx": entry.version for entry in self._opsets}
        self._ir_version = model.ir_version
        self.constants = {t.name: t for t in graph.initializer}
        self.inputs = {i.name: i.type for i in graph.input if i.name not in self.constants}
        self.outputs = [o.name for o in graph.output]
        self.nodes: list[Node] = []
        named = set[str]()
        for number, proto in enumerate(graph.node):
            if proto.op_type == "Constant" and _constant(proto) is not None:
                self.constants[proto.output[0]] = _constant(proto)
                continue
            domain = "" if proto.domain in ("", "ai.onnx") else f"{proto.domain}:"
            attributes = {a.name: helper.get_attribute_value(a) for a in proto.attribute if not a.ref_attr_name}
            name = proto.name or f"{proto.op_type}_{number}"
            name = name if name not in named else f"{name} ({number})"
            named.add(name)
            self.nodes.append(Node(name, domain + proto.op_type, (*proto.input, *_captured(proto)), tuple(proto.output),
                                   attributes, proto))
        self.nodes = _alive(self.nodes, self.outputs)
        self._check_order()
        self.producer = {o: n for n in self.nodes for o in n.outputs if o}
        self.consumers: dict[str, list[Node]] = {}
        for node in self.nodes:
            for name in dict.fromkeys(node.inputs):
                self.consumers.setdefault(name, []).append(node)

    def _check_order(self) -> None:
        """Refuse a graph of which a node reads what nothing before it makes."""
        made = {"", *self.inputs, *self.constants}
        for node in self.nodes:
            missing = next((name for name in node.inputs if name not in made), None)
            if missing is not None:
                raise InputError(f"{self.path}: node {node} reads {missing!r}, which nothing before it makes; expected "
                                 "a whole, sorted graph")
            made.update(node.outputs)

    def dims(self, name: str) -> list[int | str]:
        """Declared dimensions of an input: numbers, or symbols (one of its own where it has none)."""
        if not self.inputs[name].tensor_type.HasField("shape"):
            return []
        return [d.dim_value if d.HasField("dim_value") else d.dim_param or f"{name}[{i}]"
                for i, d in enumerate(self.inputs[name].tensor_type.shape.dim)]

    def dtype(self, name: str) -> int:
        """ONNX element type of an input."""
        return int(self.inputs[name].tensor_type.elem_type)

    def shapes(self, sizes: Mapping[str, Shape]) -> Shapes:
        """Every tensor's shape where the inputs have these."""
        types: dict[str, Any] = {}
        found = Shapes({}, {}, {})
        for name, shape in sizes.items():
            types[name] = helper.make_tensor_type_proto(self.dtype(name), list(shape))
            found.shape[name] = tuple(shape)
        for name, tensor in self.constants.items():
            types[name] = helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            found.shape[name] = tuple(tensor.dims)
            if (tensor.data_type in _HOST and tensor.data_location != TensorProto.EXTERNAL
                    and math.prod(tensor.dims) <= KNOWN_LIMIT):
                found.known[name] = numpy_helper.to_array(tensor)
        for node in self.nodes:
            reason = self._infer(node, types, found)
            if reason:
                found.blind[node.name] = reason
        return found

    def _infer(self, node: Node, types: dict[str, Any], found: Shapes) -> str:
        """Enter the outputs of one node; why that could not be done, or nothing."""
        if _subgraphs(node.proto):
            return "a subgraph is not looked into"
        given = [name for name in node.inputs if name]
        missing = [name for name in given if name not in types]
        if missing:
            return f"{BEHIND} {missing[0]} is not known"
        if node.op in _LIKE:
            made = _LIKE[node.op]([found.shape[name] for name in given], node.attributes)
            for name, shape in zip(node.outputs, made, strict=False):
                if name:
                    found.shape[name] = shape
                    types[name] = helper.make_tensor_type_proto(types[given[0]].tensor_type.elem_type, list(shape))
            return ""
        domain, _, operator = node.op.rpartition(":")
        try:
            schema = defs.get_schema(operator, self._versions.get(domain or "ai.onnx", 1), domain)
            data = {n: numpy_helper.from_array(found.known[n], n) for n in given if n in found.known}
            made_types = shape_inference.infer_node_outputs(
                schema, node.proto, {n: types[n] for n in given}, data, opset_imports=self._opsets,
                ir_version=self._ir_version)
        except defs.SchemaError:
            return "an operator that ONNX has no definition of"
        except Exception as error:  # whatever inference says of a node that does not fit
            return " ".join(str(error).split())[:160]
        for name, made in made_types.items():
            dims = made.tensor_type.shape.dim
            if not made.tensor_type.HasField("shape") or not all(d.HasField("dim_value") for d in dims):
                return "the shape of its result depends on data"
            found.shape[name], types[name] = tuple(d.dim_value for d in dims), made
        if any(name and name not in found.shape for name in node.outputs):
            return "ONNX infers no shape of its result"
        self._compute(node, given, found)
        return ""

    def _compute(self, node: Node, given: Sequence[str], found: Shapes) -> None:
        """The numbers of a small result that follows from shapes and small constants alone."""
        if node.op == "Shape":
            span = slice(node.attributes.get("start", 0), node.attributes.get("end"))
            found.known[node.outputs[0]] = np.array(found.shape[given[0]][span], np.int64)
        elif (given and all(n in found.known for n in given)
              and all(math.prod(found.shape[n]) <= KNOWN_LIMIT for n in node.outputs if n)):
            try:
                evaluator = ReferenceEvaluator(node.proto, opsets=self._versions)
                values = evaluator.run(None, {n: found.known[n] for n in given})
            except Exception:  # an operator that the reference lacks: its numbers stay unknown, its shape is known
                return
            found.known.update((n, np.asarray(v)) for n, v in zip(node.outputs, values, strict=False) if n)


def _subgraphs(proto: Any) -> list[Any]:
    return [g for a in proto.attribute for g in ([a.g] if a.HasField("g") else a.graphs)]


def _captured(proto: Any) -> list[str]:
    """What the subgraphs of a node (If, Loop, Scan) read from around them."""
    found: list[str] = []
    for graph in _subgraphs(proto):
        own = {n.name for n in (*graph.input, *graph.initializer)} | {o for n in graph.node for o in n.output}
        read = [name for n in graph.node for name in (*n.input, *_captured(n))] + [o.name for o in graph.output]
        found += [name for name in read if name and name not in own]
    return list(dict.fromkeys(found))


def _alive(nodes: Sequence[Node], outputs: Sequence[str]) -> list[Node]:
    """The nodes that outputs depend on: no runtime computes the others."""
    wanted, kept = set(outputs), list[Node]()
    for node in reversed(nodes):
        if wanted & set(node.outputs):
            wanted |= set(node.inputs)
            kept.append(node)
    return kept[::-1]


def _load(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"{path}: no such file; expected an ONNX graph")
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception:  # protobuf's own errors, and what broken bytes look like as another format
        raise InputError(f"{path}: not an ONNX file; expected a .onnx graph, or a folder that `python -m exporter "
                         "export` made") from None
    if not model.graph.node:
        raise InputError(f"{path}: no ONNX graph, or one without a node; expected a .onnx graph of an attention")
    return inliner.inline_local_functions(model) if model.functions else model


def _constant(proto: Any) -> Any | None:
    """The tensor of a Constant node; None for one that states something else (a string, a sparse tensor)."""
    (attribute,) = proto.attribute
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        tensor = TensorProto()
        tensor.CopyFrom(value)
        tensor.name = proto.output[0]
        return tensor
    dtypes = {"value_int": np.int64, "value_ints": np.int64, "value_float": np.float32, "value_floats": np.float32}
    if attribute.name not in dtypes:
        return None
    return numpy_helper.from_array(np.array(value, dtype=dtypes[attribute.name]), proto.output[0])
