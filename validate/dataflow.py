"""What each tensor of an attention graph carries: weights, positions, tokens, cache rows, or scores of rows.

Cache rows are what descends from a cache input and still has one entry for each cached row. Shapes are taken at two
numbers of cached rows; what a tensor gains between them, by the rows gained and the batch, is its *width*: the numbers
that it holds per cached row. A product of rows with weights makes rows again (K or V expanded from the cache), one with
tokens makes scores, one of scores with rows mixes the rows and has no entry for each of them any more.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from onnx import TensorProto

from exporter.errors import InputError
from validate.graph_shapes import Graph, Node, Shape, Shapes

BATCH, NEW, FEW_ROWS, MANY_ROWS = 3, 5, 112, 208  # the rows divide by 16, so that blocks of them grow evenly
PRODUCTS = {"MatMul", "Gemm", "Einsum", "Conv", "MatMulInteger", "QLinearMatMul", "com.microsoft:FusedMatMul",
            "com.microsoft:MatMulNBits"}
ATTENTION, FUSED = "Attention", "mla:LatentAttention"
WHOLE = {ATTENTION, FUSED}  # scores and mix are inside
NORMS = {"RMSNormalization", "LayerNormalization", "SimplifiedLayerNormalization", "LpNormalization",
         "com.microsoft:SkipSimplifiedLayerNormalization", "com.microsoft:SkipLayerNormalization"}
_KEEPS = {"Expand", "Tile", "Reshape", "Flatten", "Unsqueeze", "Squeeze", "Transpose", "Cast", "CastLike", "Identity"}
_JOINS = _KEEPS | {"Concat", "TensorScatter", "ScatterND", "ScatterElements", "Where", "Gather", "GatherND",
                   "GatherElements", "Slice", "Split", "Pad"}
_EACH = {"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Mod", "Sum", "Neg", "Abs", "Sign", "Exp", "Log", "Sqrt",
         "Reciprocal", "Sigmoid", "Tanh", "Erf", "Sin", "Cos", "Clip", "Floor", "Ceil", "Round", "Not", "And", "Or",
         "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "Dropout", "Softmax",
         "LogSoftmax", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "RotaryEmbedding",
         "com.microsoft:RotaryEmbedding", "Shape", "Size", "CumSum", "Trilu", "TopK", "ArgMax", "ArgMin", "Split"}
KNOWN = PRODUCTS | NORMS | _JOINS | _EACH | WHOLE  # and reductions: what rows may pass and be followed
_ROW_DTYPES = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.INT8,
               TensorProto.UINT8, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2}
_NO_CACHE = re.compile(r"mask|bias|cos|sin|posit|hidden|embed|angle|freq", re.IGNORECASE)
_TOKENS = ("input_ids", "hidden_states", "inputs_embeds")


class Tag(Enum):
    """What a tensor carries."""

    CONST = "weights"
    POS = "shapes, positions and masks"
    ACT = "tokens"
    ROWS = "cache rows"
    SCORES = "scores of cache rows"


@dataclass(frozen=True)
class CacheInput:
    """One input that holds a part of an attention's cache; `axis` runs over its rows."""

    name: str
    attention: int
    axis: int


@dataclass(frozen=True)
class Roles:
    """Which input is what: the tokens, the caches, and the sizes of every input's dimensions by number of rows."""

    tokens: str
    caches: tuple[CacheInput, ...]
    batch: int
    new: int
    sizes: Mapping[int, Mapping[str, Shape]]


@dataclass(frozen=True)
class Product:
    """A product in which cache rows take part: `rows` and `other`, each with the axis of it that is summed over."""

    node: Node
    rows: str
    rows_axis: int
    other: str
    other_axis: int


def number_in(name: str) -> int:
    """The last whole number in a name (`past_key_values.3.key` -> 3), 0 where there is none."""
    return int((re.findall(r"\d+", name) or ["0"])[-1])


def einsum_terms(node: Node) -> tuple[str, str, str] | None:
    """Both operands' letters and the result's; None for another node, and for what is not one plain product of two."""
    equation = node.attributes.get("equation", b"").decode().replace(" ", "") if node.op == "Einsum" else ""
    found = re.fullmatch(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)", equation)
    return None if found is None else (found[1], found[2], found[3])


def find_roles(graph: Graph) -> Roles:
    """Tokens and caches among the inputs. InputError where the graph has no cache."""
    tokens = _tokens_of(graph)
    main = graph.dims(tokens)
    symbols: dict[str, int] = {}
    for dim, size in zip(main, (BATCH, NEW), strict=False):
        if isinstance(dim, str):
            symbols[dim] = size
    caches = [c for name in graph.inputs if name != tokens and (c := _cache(graph, name, symbols)) is not None]
    if not caches:
        raise InputError(f"{graph.path}: no cache among the inputs {', '.join(graph.inputs)}; expected past rows to "
                         "come in (a decode graph, or a prefill graph over a past), as [batch, rows, ...] or [batch, "
                         "heads, rows, ...]")
    by_rows = {rows: _sizes(graph, symbols, caches, rows) for rows in (FEW_ROWS, MANY_ROWS)}
    first = by_rows[FEW_ROWS][tokens]
    return Roles(tokens, tuple(caches), first[0], first[1] if len(first) > 1 else 1, by_rows)


def _tokens_of(graph: Graph) -> str:
    for name in _TOKENS:
        if name in graph.inputs:
            return name
    for name in map(str, graph.inputs):
        if len(graph.dims(name)) in (2, 3) and not re.search(r"mask|posit|past|cache|cos|sin", name, re.IGNORECASE):
            return name
    raise InputError(f"{graph.path}: no tokens among the inputs {', '.join(graph.inputs) or '(none)'}; expected "
                     "input_ids [batch, new] or hidden_states [batch, new, hidden]")


def _cache(graph: Graph, name: str, symbols: Mapping[str, int]) -> CacheInput | None:
    """An input as a cache, if it is one: of rank 3 or more, of numbers, not a mask or a table of angles."""
    dims = graph.dims(name)
    new = next((symbol for symbol, size in symbols.items() if size == NEW), None)
    if len(dims) < 3 or graph.dtype(name) not in _ROW_DTYPES or _NO_CACHE.search(name) or new in dims:
        return None
    dynamic = [i for i, d in enumerate(dims) if isinstance(d, str) and d not in symbols]
    named = re.search(r"past|cache|key|value|latent|kv|state", name, re.IGNORECASE)
    if not dynamic and not named and new is None:
        return None  # all sizes fixed, nothing tells it from a table
    at = next((i for i in dynamic if i), dynamic[0] if dynamic and len(dims) > dynamic[0] + 2 else len(dims) - 2)
    return CacheInput(name, number_in(name), at)


def _sizes(graph: Graph, symbols: Mapping[str, int], caches: list[CacheInput], rows: int) -> dict[str, Shape]:
    known = dict(symbols)
    by_name = {c.name: c for c in caches}
    for cache in caches:
        dim = graph.dims(cache.name)[cache.axis]
        if isinstance(dim, str):
            known[dim] = rows
    new = next((size for size in symbols.values() if size == NEW), 1)
    sizes = {}
    for name in graph.inputs:
        dims = graph.dims(name)
        shape = [d if isinstance(d, int) else _size(d, i, name, known, rows, new) for i, d in enumerate(dims)]
        if name in by_name:
            shape[by_name[name].axis] = rows
        sizes[name] = tuple(shape)
    return sizes


def _size(dim: str, axis: int, name: str, known: Mapping[str, int], rows: int, new: int) -> int:
    """The size of a symbolic dimension: bound, a sum or product of bound ones, or by where it stands."""
    if dim in known:
        return known[dim]
    try:
        tree = ast.parse(dim, mode="eval")
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        if names and names <= set(known) and all(isinstance(n, ast.Expression | ast.BinOp | ast.Name | ast.Constant
                                                            | ast.operator | ast.Load) for n in ast.walk(tree)):
            return int(eval(compile(tree, dim, "eval"), {"__builtins__": {}}, dict(known)))
    except SyntaxError:
        pass
    if "mask" in name.lower() or "total" in dim.lower() or "+" in dim:
        return rows + new if axis else BATCH
    return BATCH if axis == 0 else new


class Flow:
    """Tags of all tensors; the products that rows take part in; rows that were repeated (`widened`), that passed a norm
    (`normed`), were multiplied with queries element by element (`by_element`), or went where nothing follows them
    (`lost`)."""

    def __init__(self, graph: Graph, roles: Roles, few: Shapes, many: Shapes) -> None:
        self.graph, self.roles, self.few, self.many = graph, roles, few, many
        self.tags: dict[str, Tag] = {"": Tag.CONST, **dict.fromkeys(graph.constants, Tag.CONST)}
        self.attentions: dict[str, frozenset[int]] = {}
        self.expansions: list[Product] = []
        self.scores: list[Product] = []
        self.mixes: list[Product] = []
        self.widened: list[tuple[Node, str]] = []
        self.normed: list[Node] = []
        self.by_element: list[tuple[Node, str]] = []
        self.lost: list[Node] = []
        self._behind: set[str] = set()  # rows that an expansion made, or that were made of those
        caches = {c.name: c.attention for c in roles.caches}
        for name in graph.inputs:
            if name in caches:
                self.tags[name], self.attentions[name] = Tag.ROWS, frozenset([caches[name]])
            else:
                self.tags[name] = Tag.ACT if name == roles.tokens else Tag.POS
        for node in graph.nodes:
            self._visit(node)

    def width(self, name: str) -> Fraction | None:
        """Numbers per cached row and sequence; 0 for what has no entry per row, None where the shape is unknown."""
        few, many = self.few.elements(name), self.many.elements(name)
        if few is None or many is None:
            return None
        return Fraction(many - few, (MANY_ROWS - FEW_ROWS) * self.roles.batch)

    def operands(self, node: Node) -> tuple[tuple[str, int], tuple[str, int]]:
        """Both operands of a product, each with the axis that is summed over (of an Einsum, by its equation)."""
        a, b = node.inputs[0], node.inputs[3 if node.op == "QLinearMatMul" else 1]
        ranks = [len(self.few.shape.get(n, ())) for n in (a, b)]
        if node.op == "Gemm":
            return (a, 0 if node.attributes.get("transA") else 1), (b, 1 if node.attributes.get("transB") else 0)
        terms = einsum_terms(node)
        if terms is not None:
            left, right, result = terms
            summed = [c for c in left if c in right and c not in result] or [left[-1]]
            return (a, left.index(summed[0])), (b, max(right.find(summed[0]), 0))
        if node.op == "com.microsoft:MatMulNBits":
            return (a, ranks[0] - 1), (b, 0)
        flipped = [bool(node.attributes.get(key)) for key in ("transA", "transB")]  # FusedMatMul has them
        return (a, ranks[0] - (2 if flipped[0] else 1)), (b, max(ranks[1] - (1 if flipped[1] else 2), 0))

    def _visit(self, node: Node) -> None:
        found = [self.tags.get(name, Tag.POS) for name in node.inputs if name]
        rows = [n for n in node.inputs if self.tags.get(n) in (Tag.ROWS, Tag.SCORES)]
        if node.name in self.few.blind or node.name in self.many.blind:  # whatever it does, it may hold rows
            tags = [Tag.ROWS if rows else Tag.ACT if Tag.ACT in found else Tag.POS]
        elif node.op in ("Shape", "Size"):
            tags = [Tag.POS]
        elif not rows and node.op in _KEEPS:
            tags = [self.tags.get(node.inputs[0], Tag.POS)]  # sizes made of shapes leave weights what they are
        elif not rows:
            tags = [Tag.ACT if Tag.ACT in found else Tag.POS if Tag.POS in found else Tag.CONST]
        elif node.op == ATTENTION:
            self._attend(node)
            tags = [Tag.ACT, Tag.ROWS, Tag.ROWS]
        elif node.op == FUSED:
            self._attend_rows(node)
            tags = [Tag.ACT]
        else:
            tags = [self._of_rows(node, found)]
        origin = frozenset[int]().union(*(self.attentions.get(n, frozenset()) for n in rows))
        for i, name in enumerate(node.outputs):
            tag = tags[min(i, len(tags) - 1)]
            if tag in (Tag.ROWS, Tag.SCORES) and self.width(name) == 0:
                tag = Tag.ACT
            self.tags[name] = tag
            if tag in (Tag.ROWS, Tag.SCORES):
                self.attentions[name] = origin
        if rows:
            self._watch(node, rows)
            known = node.op in KNOWN or node.op.startswith("Reduce")
            if not known or (node.op == "Einsum" and einsum_terms(node) is None):
                self.lost.append(node)

    def _of_rows(self, node: Node, found: list[Tag]) -> Tag:
        """The tag of what a node makes of rows or scores, if it still has an entry per row."""
        if node.op in PRODUCTS:
            return self._multiply(node)
        if Tag.SCORES in found and not (node.op in _JOINS and self.tags[node.inputs[0]] is Tag.ROWS):
            return Tag.SCORES
        if node.op not in _JOINS and node.op not in NORMS and any(
                self.tags.get(n) is Tag.ACT and self._varied(n) for n in node.inputs):
            return Tag.SCORES  # rows times tokens, element by element
        return Tag.ROWS

    def _varied(self, name: str) -> bool:
        """Whether a tensor is more than one number."""
        return self.few.elements(name) != 1

    def _multiply(self, node: Node) -> Tag:
        (a, axis_a), (b, axis_b) = self.operands(node)
        if self.tags.get(a) not in (Tag.ROWS, Tag.SCORES) or (self.tags.get(b) is Tag.ROWS
                                                              and self.tags.get(a) is Tag.SCORES):
            a, axis_a, b, axis_b = b, axis_b, a, axis_a
        grows = any(self.width(name) != 0 for name in node.outputs)
        product = Product(node, a, axis_a, b, axis_b)
        first, second = self.tags[a], self.tags.get(b, Tag.POS)
        if first is Tag.ROWS and second in (Tag.CONST, Tag.POS):
            if grows:
                self.expansions.append(product)
            return Tag.ROWS
        if first is Tag.ROWS and grows:
            self.scores.append(product)
        elif first is Tag.ROWS:
            self.mixes.append(product)  # with scores, or with probabilities that were gathered out of them
        return Tag.SCORES

    def _attend(self, node: Node) -> None:
        """The Attention operator: scores with its key, a mix of its value, either from an input or from a past."""
        q, k, v, _, past_k, past_v = (*node.inputs, *[""] * 6)[:6]
        for key, value in ((k, v), (past_k, past_v)):
            if self.tags.get(key) is Tag.ROWS:
                self.scores.append(Product(node, key, self._last(key), q, self._last(q)))
            if self.tags.get(value) is Tag.ROWS:
                self.mixes.append(Product(node, value, max(self._last(value) - 1, 0), "", 0))

    def _attend_rows(self, node: Node) -> None:
        """The project's own operator: scores with whole rows of the past, a mix of their latents."""
        queries, past = node.inputs[:2]
        self.scores.append(Product(node, past, self._last(past), queries, self._last(queries)))
        self.mixes.append(Product(node, past, max(self._last(past) - 1, 0), "", 0))

    def _last(self, name: str) -> int:
        return max(len(self.few.shape.get(name, ())) - 1, 0)

    def _watch(self, node: Node, rows: list[str]) -> None:
        """Rows that are repeated (per head), and rows that pass a norm."""
        made = [n for n in node.outputs if self.tags.get(n) is Tag.ROWS]
        if self._behind & set(rows) or (self.expansions and self.expansions[-1].node is node):
            self._behind |= set(made)
        makers = [self.graph.producer.get(n) for n in rows]
        squared = all(m is not None and m.op in ("Mul", "Pow") for m in makers)
        reduced = made and (node.op in ("ReduceL2", "ReduceSumSquare") or (node.op == "ReduceMean" and squared))
        if reduced or (node.op in NORMS and self.tags[node.inputs[0]] is Tag.ROWS):
            self.normed.append(node)
        if node.op in PRODUCTS or node.op in {"Pad"} | WHOLE:
            return
        before = {n: self.width(n) or Fraction(0) for n in rows}
        for name in node.outputs:
            width = self.width(name) or Fraction(0)
            if self.tags[name] is Tag.ROWS and width > sum(before.values()) and not self._behind & set(rows):
                self.widened.append((node, name))
            if self.tags[name] is Tag.SCORES and node.op != "Concat" and width > max(before.values()):
                self.by_element.append((node, name))
