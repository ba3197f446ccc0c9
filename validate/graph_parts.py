"""A decoder graph of an export, cut into the parts that the residual stream passes, without loading a weight.

Nodes are named by scope (exporter/decoder_graph.py): every branch ends in an `Add` of its own, as
`layers/37/ffn_residual` is. A part is what lies between two such places; it is walked back from its outputs, so it
holds the records of its own weights and no others, and runs as a small graph of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
from onnx import helper

from exporter.dtypes import DTYPES
from exporter.errors import CheckError
from exporter.manifest import Export, GraphEntry

CACHES = ("new_latent", "latent_cache_out", "present_latent")


@dataclass(frozen=True)
class Branch:
    """An `Add` onto the residual stream: the value behind it, and the branch that is added."""

    total: str
    added: str


class GraphParts:
    """One graph's nodes and the records of its weights. `all_tokens` parts do not drop the tokens whose logits nobody
    asked for: the last layer's branches then run over every token, as all others do."""

    def __init__(self, made: Export, entry: GraphEntry) -> None:
        self.made, self.entry = made, entry
        self.model = onnx.load(made.folder / entry.file, load_external_data=False)
        graph = self.model.graph
        self._nodes = list(graph.node)
        self._producers = {output: i for i, node in enumerate(self._nodes) for output in node.output}
        self._named = {node.name: node for node in self._nodes}
        self._weights = {t.name: t for t in graph.initializer}
        self._inputs = {i.name: i for i in graph.input}
        self._types = {v.name: v for v in (*graph.value_info, *graph.output)}
        self.element = DTYPES[made.dtype].onnx
        # the value that a selected one was picked from
        self._picked = {n.output[0]: n.input[0] for n in self._nodes if n.op_type == "Gather"
                        and n.name.rpartition("/")[2] in ("hidden_of_last", "normed_of_last")}

    def has(self, name: str) -> bool:
        """Whether there is a node of this name."""
        return name in self._named

    def branch(self, name: str) -> Branch:
        """The `Add` that is called so. CheckError where the graph has none."""
        node = self._named.get(name)
        if node is None or len(node.input) != 2:
            raise CheckError(f"{self.entry.name}: no node {name!r} that adds a branch to the residual stream, so it "
                             "cannot be cut there; export again with this version")
        return Branch(node.output[0], node.input[1])

    @property
    def entrance(self) -> str:
        """The residual stream before the first layer."""
        return next(n for n in ("scaled_embedding", "embedding", "tokens") if n in self._named)

    @property
    def selection(self) -> tuple[str, str] | None:
        """The value of each sequence's last token, and what it is picked from; None where every token's is kept."""
        return next(((name, source) for name, source in self._picked.items() if name.endswith("hidden_of_last")), None)

    def rows(self, attention: int) -> str:
        """The output that holds an attention's new cache rows."""
        names = [str(o.name) for o in self.model.graph.output]
        return next(name for name in names if name in {f"{c}.{attention}" for c in CACHES})

    def cut(self, starts: Sequence[str], outputs: Sequence[str], walls: Mapping[str, str] | None = None,
            all_tokens: bool = True) -> onnx.ModelProto:
        """The part between the values `starts` [N, D] and `outputs`. CheckError where it reads the stream at one of
        `walls` (value -> its place in words) that is no start: a wire that leads elsewhere."""
        picked, nodes, reached = self._picked if all_tokens else {}, set[int](), set[str]()
        needed, weights = dict[str, onnx.ValueInfoProto](), list[onnx.TensorProto]()
        waiting = list(outputs)
        while waiting:
            name = waiting.pop()
            name = picked.get(name, name)
            if not name or name in reached or name in starts:
                continue
            reached.add(name)
            if walls and name in walls and name not in outputs:
                raise CheckError(f"reads the residual stream {walls[name]} ({name})")
            if name in self._weights:
                weights.append(self._weights[name])
            elif name in self._inputs:
                needed[name] = self._inputs[name]
            elif name in self._producers:
                nodes.add(self._producers[name])
                waiting += self._nodes[self._producers[name]].input
            else:
                raise CheckError(f"{self.entry.name}: nothing produces {name!r}")
        copies = [_rewired(self._nodes[i], picked) for i in sorted(nodes)]
        made = {output for node in copies for output in node.output}
        inputs = [helper.make_tensor_value_info(s, self.element, [None, self.made.config.hidden_size]) for s in starts]
        graph = helper.make_graph(
            copies, self.entry.name, [*inputs, *needed.values()],
            [helper.make_tensor_value_info(o, self._element_of(o), None) for o in outputs], weights,
            value_info=[v for name, v in self._types.items() if name in made and name not in outputs])
        return helper.make_model(graph, opset_imports=self.model.opset_import, ir_version=self.model.ir_version)

    def _element_of(self, name: str) -> int:
        known = {o.name: o for o in self.model.graph.output}.get(name)
        return self.element if known is None else int(known.type.tensor_type.elem_type)


def _rewired(node: onnx.NodeProto, picked: Mapping[str, str]) -> onnx.NodeProto:
    if not any(name in picked for name in node.input):
        return node
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.input[:] = [picked.get(name, name) for name in node.input]
    return copy
