"""Before a build: everything about a graph that a target would refuse, misread or under-report, found in advance.

The rules are what TensorRT-RTX 1.7 was seen to do; each row of RULES says why it is there. A finding is an error: a
graph that imports and computes something else is worse than one that fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import NodeProto, helper

from engines.interpreter import Interpreter, TensorInfo, UnsupportedOperator
from exporter.errors import InputError
from exporter.moe_graph import MAX_ELEMENTS

TOO_LARGE = "tensor-too-large"  # the one finding that smaller limits cure
WEIGHT_TOO_LARGE = "weight-too-large"
FUSED_HEAD = 256  # the widest head that TensorRT's fused attention takes


@dataclass(frozen=True)
class Finding:
    """One reason not to build."""

    rule: str
    node: str
    message: str


@dataclass(frozen=True)
class Graph:
    """What the rules look at: nodes, attributes, and every tensor's shape at the profile's maximum."""

    nodes: list[NodeProto]
    tensors: Mapping[str, TensorInfo]
    inputs: frozenset[str]
    outputs: frozenset[str]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors[name].shape


Rule = Callable[[Graph, NodeProto, Mapping[str, object]], str | None]


def _present(node: NodeProto, index: int) -> bool:
    return len(node.input) > index and bool(node.input[index])


def _head_sizes(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    shapes = [graph.shape(name) for name in node.input[:3]]
    heads = [attrs.get(f"{side}_num_heads", 0) for side in ("q", "kv", "kv")]
    # [B, T, heads * size], or [B, heads, T, size]
    sizes = {s[-1] // h if len(s) == 3 and isinstance(h, int) and h else s[-1]
             for s, h in zip(shapes, heads, strict=True)}
    if len(sizes) > 1:
        return f"Q, K and V have head sizes {sorted(sizes)}; TensorRT takes one: pad them"
    size = sizes.pop()
    if size % 8 or not 16 <= size <= 256:
        return f"head size {size}; TensorRT fuses 16 to 256 in multiples of 8"
    return None


def _attention_state(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    if _present(node, 4) or _present(node, 5) or len([o for o in node.output if o]) > 1:
        return "past and present inside Attention; TensorRT takes one output only: keep the cache outside"
    return None


def _nonpad(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    if _present(node, 6):
        return "nonpad_kv_seqlen is silently ignored by TensorRT's parser: mask explicitly"
    return None


def _attention_dtype(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    dtype = graph.tensors[node.input[0]].dtype
    return f"Attention in {dtype}; TensorRT fuses float16 and bfloat16 only" if dtype == "float32" else None


def _attention_mask(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    if _present(node, 3) and attrs.get("is_causal"):
        return "a mask and is_causal exclude each other in TensorRT"
    return None


def _control_flow(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str:
    return f"{node.op_type} around attention fails to build in TensorRT: export separate graphs"


def _scatter(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    shape = graph.shape(node.input[0])
    if (
        len(shape) != 4
        or attrs.get("axis", -2) not in (-2, 2)
        or attrs.get("mode", b"linear") not in (b"linear", "linear")
    ):
        return f"TensorScatter over {list(shape)}; TensorRT takes [B, 1, S_max, R], axis -2, linear"
    if node.input[0] not in graph.inputs or node.output[0] not in graph.outputs:
        return "TensorScatter's cache must be a network input and its result a network output, at the same address"
    return None


def _domain(graph: Graph, node: NodeProto, attrs: Mapping[str, object]) -> str | None:
    return (
        f"domain {node.domain}: TensorRT imports only standard operators; export with --target trt-rtx or trt"
        if node.domain not in ("", "ai.onnx")
        else None
    )


RULES: tuple[tuple[str, str, Rule], ...] = (  # name, operator ("*": any), rule
    ("standard-domain", "*", _domain),
    ("attention-head-sizes", "Attention", _head_sizes),
    ("attention-past-present", "Attention", _attention_state),
    ("attention-nonpad-ignored", "Attention", _nonpad),
    ("attention-dtype", "Attention", _attention_dtype),
    ("attention-mask-and-causal", "Attention", _attention_mask),
    ("control-flow", "Loop", _control_flow),
    ("control-flow", "If", _control_flow),
    ("control-flow", "Scan", _control_flow),
    ("scatter-form", "TensorScatter", _scatter),
)


def lint(path: Path, sizes: Mapping[str, int]) -> list[Finding]:
    """Findings for TensorRT at the profile's maximum `sizes` (B, T, S)."""
    model = onnx.load(path, load_external_data=False)
    unsupported = [n for n in model.graph.node if n.op_type in ("Loop", "If", "Scan")
                   or n.domain not in ("", "ai.onnx")]
    try:
        tensors = {} if unsupported else {t.name: t for t in Interpreter(path).shapes(sizes)}
    except (InputError, UnsupportedOperator) as error:  # mixed dtypes, a shape made of data, an unknown operator
        where = "; ".join(getattr(error, "__notes__", ()))
        return [Finding("not-understood", path.stem, f"{error}{f' ({where})' if where else ''}")]
    graph = Graph(list(model.graph.node), tensors, frozenset(i.name for i in model.graph.input),
                  frozenset(o.name for o in model.graph.output))
    findings = []
    for node in unsupported or graph.nodes:
        attrs = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        for name, op, rule in RULES:
            known = op == "*" or (op == node.op_type and node.domain in ("", "ai.onnx"))
            message = rule(graph, node, attrs) if known else None
            if message:
                findings.append(Finding(name, node.name, message))
    return findings + oversized(tensors.values(), _constants(model))


def _constants(model: onnx.ModelProto) -> frozenset[str]:
    """Weights, and what is made of weights alone: joined before anything runs."""
    found = {i.name for i in model.graph.initializer}
    for node in model.graph.node:
        if all(name in found for name in node.input if name):
            found.update(node.output)
    return frozenset(found)


def oversized(tensors: Iterable[TensorInfo], constants: frozenset[str] = frozenset()) -> list[Finding]:
    """Tensors past 2^31 - 1 elements, of which TensorRT's builder reports a fraction without a word."""
    return [_weight_finding(t) if t.name in constants else
            Finding(TOO_LARGE, t.node, f"{t.name} {list(t.shape)} has {t.elements} elements at the profile's "
                    f"maximum; beyond {MAX_ELEMENTS} TensorRT under-reports memory: lower batch, context or chunk")
            for t in tensors if t.elements > MAX_ELEMENTS]


def _weight_finding(t: TensorInfo) -> Finding:
    """What no limit cures."""
    cure = ("export with --experts dense, which takes a few experts at a time, or give each GPU fewer experts"
            if ".experts." in t.name else "split it")
    return Finding(WEIGHT_TOO_LARGE, t.node or t.name, f"{t.name} {list(t.shape)} has {t.elements} elements, whatever "
                   f"the limits; beyond {MAX_ELEMENTS} TensorRT under-reports memory: {cure}")


def live_peak(path: Path, sizes: Mapping[str, int]) -> int:
    """Bytes of the graph's own tensors that are alive together at most: no fusion, inputs, outputs and weights not
    counted. The prediction that measurements are held against."""
    model = onnx.load(path, load_external_data=False)
    tensors = {t.name: t for t in Interpreter(path).shapes(sizes)}
    external = {*(i.name for i in model.graph.input), *(o.name for o in model.graph.output), *_constants(model)}
    views = {"Reshape", "Squeeze", "Unsqueeze", "Identity"}  # share their input's memory
    root: dict[str, str] = {}
    last: dict[str, int] = {}
    for index, node in enumerate(model.graph.node):
        for name in node.input:
            last[root.get(name, name)] = index
        if node.op_type in views:
            root[node.output[0]] = root.get(node.input[0], node.input[0])
    live = peak = 0
    for index, node in enumerate(model.graph.node):
        made = [o for o in node.output if o and o not in external and o not in root]
        live += sum(tensors[o].bytes for o in made)
        peak = max(peak, live)
        owners = {root.get(n, n) for n in (*node.input, *node.output)}
        live -= sum(
            tensors[n].bytes for n in owners if n in tensors and n not in external and last.get(n, index) <= index
        )
    return peak


def score_product(path: Path, sizes: Mapping[str, int]) -> tuple[str, int] | None:
    """The largest score product that a step holds whole, with its least bytes: no honest builder's figure is below it.

    A fused attention never holds its scores, so only products over more than FUSED_HEAD columns count, which no
    attention kernel takes: those of absorbed forms. They are what a softmax is made of; a cast on the way, which a
    product's kernel may do as it writes, counts in its narrower dtype. None where a graph has no such product.
    """
    model = onnx.load(path, load_external_data=False)
    tensors = {t.name: t for t in Interpreter(path).shapes(sizes)}
    producer = {name: node for node in model.graph.node for name in node.output}
    found: dict[str, int] = {}
    for softmax in (n for n in model.graph.node if n.op_type == "Softmax"):
        ways, seen = [(softmax.input[0], 8)], set[str]()
        while ways:
            name, width = ways.pop()
            node, t = producer.get(name), tensors.get(name)
            if node is None or t is None or name in seen:
                continue
            seen.add(name)
            width = min(width, t.bytes // max(1, t.elements)) if t.dtype != "bool" else width
            if node.op_type != "MatMul":
                ways += [(i, width) for i in node.input if i]
            elif tensors[node.input[0]].shape[-1] > FUSED_HEAD:
                found[name] = t.elements * width
    return max(found.items(), key=lambda item: item[1], default=None)
