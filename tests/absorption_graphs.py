"""One attention as other exporters write it: opset 18, plain operators, no metadata, names of its own; and wrong ones.

RoPE is `x cos + rotate_half(x) sin` over a table gathered by position, norms are spelled out, the cache is past ->
present. `Layer` holds the sizes and the parts; a graph is a function of it that leaves one part out or puts it wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

D, H, LATENT, ROPE, NOPE, V = 30, 4, 16, 6, 20, 12
R = LATENT + ROPE
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


class Layer:
    """Nodes and weights collected; every method adds nodes and returns the name of a tensor."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs = [helper.make_tensor_value_info("hidden_states", FLOAT, ["batch", "seq", D]),
                       helper.make_tensor_value_info("position_ids", INT64, ["batch", "seq"])]
        self.outputs: list[Any] = []
        self.cos, self.sin = (self.op("Gather", self.weight(f"{n}_table", 4096, ROPE), "position_ids", axis=0)
                              for n in ("cos", "sin"))  # [B, T, d_r]

    def op(self, kind: str, *inputs: str, count: int = 1, **attributes: Any) -> Any:
        made = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        name = attributes.pop("name", f"node_{kind}_{len(self.nodes)}")
        self.nodes.append(helper.make_node(kind, list(inputs), made, name=name, **attributes))
        return made[0] if count == 1 else made

    def weight(self, name: str, *shape: int) -> str:
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
        return name

    def ints(self, *values: int) -> str:
        name = "i_" + "_".join(map(str, values))
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def cache(self, name: str, *columns: int | str, dtype: int = FLOAT) -> str:
        """A cache input [batch, past, columns], or of other dimensions where `columns` says `past` itself."""
        dims = list(columns) if "past" in columns else ["past", *columns]
        self.inputs.append(helper.make_tensor_value_info(name, dtype, ["batch", *dims]))
        return name

    def give(self, value: str, name: str, dtype: int = FLOAT, rank: int = 3) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"give_{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, dtype, [None] * rank))

    def linear(self, x: str, name: str, width_in: int, width_out: int) -> str:
        return self.op("MatMul", x, self.weight(f"{name}.weight", width_in, width_out), name=name)

    def norm(self, x: str, width: int) -> str:
        squares = self.op("Pow", x, self.scalar("two", 2.0))
        mean = self.op("ReduceMean", squares, self.ints(-1), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.scalar("epsilon", 1e-6)))
        return self.op("Mul", self.op("Div", x, root), self.weight(f"gain_{width}", width))

    def scalar(self, name: str, value: float) -> str:
        if all(w.name != name for w in self.weights):
            self.weights.append(numpy_helper.from_array(np.array(value, np.float32), name))
        return name

    def turn(self, x: str, width: int = ROPE, heads: bool = False, name: str = "turn") -> str:
        """RoPE of [B, T, width], or of [B, H, T, width]."""
        half = width // 2
        cos, sin = self.cos, self.sin
        if width != ROPE:
            cos, sin = (self.op("Gather", self.weight(f"{n}_{width}", 4096, width), "position_ids", axis=0)
                        for n in ("cos", "sin"))
        if heads:
            cos, sin = (self.op("Unsqueeze", t, self.ints(1)) for t in (cos, sin))
        first = self.op("Slice", x, self.ints(0), self.ints(half), self.ints(-1))
        second = self.op("Slice", x, self.ints(half), self.ints(width), self.ints(-1))
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin), name=name)

    def split(self, x: str, *widths: int) -> Sequence[str]:
        return self.op("Split", x, self.ints(*widths), axis=-1, count=len(widths))

    def rows(self) -> tuple[str, str]:
        """New normed latents [B, T, d_c] and rotated keys [B, T, d_r]."""
        latent, key = self.split(self.linear("hidden_states", "kv_a", D, R), LATENT, ROPE)
        return self.norm(latent, LATENT), self.turn(key, name="turn_key")

    def query(self) -> tuple[str, str]:
        """[B, H, T, nope] and, rotated, [B, H, T, d_r]."""
        q = self.op("Reshape", self.linear("hidden_states", "q", D, H * (NOPE + ROPE)), self.ints(0, 0, H, NOPE + ROPE))
        nope, rope = self.split(self.op("Transpose", q, perm=[0, 2, 1, 3]), NOPE, ROPE)
        return nope, self.turn(rope, heads=True, name="turn_query")

    def latent_query(self) -> str:
        """[B, H, T, R]: W_UK on the query's side."""
        nope, rope = self.query()
        latent = self.op("MatMul", nope, self.weight("w_uk", H, NOPE, LATENT), name="uk")
        return self.op("Concat", latent, rope, axis=-1)

    def join(self, past: str, new: str, axis: int = 1) -> str:
        present = self.op("Concat", past, new, axis=axis)
        self.give(present, past.replace("past", "present"), rank=2 + axis)
        return present

    def probabilities(self, query: str, keys: str, perm: Sequence[int] = (0, 1, 3, 2)) -> str:
        """[B, H, T, d] by [B, H or 1, n, d]."""
        scores = self.op("MatMul", query, self.op("Transpose", keys, perm=perm), name="scores")
        return self.op("Softmax", self.op("Mul", scores, self.scalar("scale", 0.2)), axis=-1)

    def out(self, heads: str, width: int = V) -> None:
        """[B, H, T, v] to the layer's output."""
        by_token = self.op("Transpose", heads, perm=[0, 2, 1, 3])
        flat = self.op("Reshape", by_token, self.ints(0, 0, H * width))
        self.give(self.linear(flat, "o", H * width, D), "attn_output")

    def by_heads(self, rows: str, width: int) -> str:
        """[B, n, H * width] as [B, H, n, width]."""
        return self.op("Transpose", self.op("Reshape", rows, self.ints(0, 0, H, width)), perm=[0, 2, 1, 3])

    def one_head(self, rows: str) -> str:
        return self.op("Unsqueeze", rows, self.ints(1))

    def latent_of(self, rows: str) -> str:
        return self.op("Slice", rows, self.ints(0), self.ints(LATENT), self.ints(-1))

    def up(self, mixed: str) -> str:
        """[B, H, T, d_c] through W_UV."""
        return self.op("MatMul", mixed, self.weight("w_uv", H, LATENT, V), name="uv")

    def attend(self, rows: str) -> None:
        """The absorbed attention over rows [B, n, R]."""
        keys = self.one_head(rows)
        probs = self.probabilities(self.latent_query(), keys)
        self.out(self.up(self.op("MatMul", probs, self.latent_of(keys), name="mix")))

    def save(self, path: Path) -> Path:
        graph = helper.make_graph(self.nodes, "layer", self.inputs, self.outputs, self.weights)
        domains = sorted({n.domain for n in self.nodes} | {""})
        opsets = [helper.make_opsetid(d, 1 if d else 18) for d in domains]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=9), path)
        return path


# ---- right ones


def absorbed(g: Layer) -> None:
    g.attend(g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1)))


def absorbed_in_two(g: Layer) -> None:
    """Latents and rotary keys in caches of their own, scores in two products."""
    latent, key = g.rows()
    latents, keys = g.join(g.cache("past_c", LATENT), latent), g.join(g.cache("past_k", ROPE), key)
    nope, rope = g.query()
    columns = [g.op("Transpose", g.one_head(x), perm=[0, 1, 3, 2]) for x in (latents, keys)]
    scores = g.op("Add", g.op("MatMul", g.op("MatMul", nope, g.weight("w_uk", H, NOPE, LATENT), name="uk"), columns[0]),
                  g.op("MatMul", rope, columns[1]))
    g.out(g.up(g.op("MatMul", g.op("Softmax", scores, axis=-1), g.one_head(latents))))


def absorbed_with_copies(g: Layer) -> None:
    """A row that is stored transposed in 8 bits, dequantised, transposed and padded: copies, but of the latent."""
    past = g.cache("past_row", R, "past", dtype=TensorProto.INT8)
    scale = g.scalar("step", 0.1)
    row = g.op("Transpose", g.op("Concat", *g.rows(), axis=-1), perm=[0, 2, 1])
    zero = numpy_helper.from_array(np.array(0, np.int8), "zero")
    g.weights.append(zero)
    codes = g.op("QuantizeLinear", row, scale, "zero")
    present = g.op("Concat", past, codes, axis=2)
    g.give(present, "present_row", TensorProto.INT8)
    rows = g.op("Transpose", g.op("DequantizeLinear", present, scale), perm=[0, 2, 1])
    padded = g.op("Pad", rows, g.ints(0, 0, 0, 0, 0, 2))
    g.attend(g.op("Slice", padded, g.ints(0), g.ints(R), g.ints(2)))


def absorbed_scattered(g: Layer) -> None:
    """Rows written into a preallocated cache of 64 by ScatterElements, einsums for products."""
    past = g.cache("cache_row", "past", R)
    g.inputs[-1].type.tensor_type.shape.dim[1].dim_value = 64
    row = g.op("Concat", *g.rows(), axis=-1)
    at = g.op("Expand", g.op("Unsqueeze", "position_ids", g.ints(2)), g.op("Shape", row))
    rows = g.op("ScatterElements", past, at, row, axis=1)
    g.give(rows, "cache_row_out")
    scores = g.op("Einsum", g.latent_query(), rows, equation="bhtr,bsr->bhts")
    probs = g.op("Softmax", scores, axis=-1)
    g.out(g.up(g.op("Einsum", probs, g.latent_of(rows), equation="bhts,bsc->bhtc")))


RIGHT = (absorbed, absorbed_in_two, absorbed_with_copies, absorbed_scattered)


# ---- wrong ones


def _expanded(g: Layer, rows: str) -> tuple[str, str, str]:
    """Keys' nope columns and values of every row, and the rows' rotary keys, by heads."""
    latent, key = g.split(rows, LATENT, ROPE)
    k = g.by_heads(g.linear(latent, "uk_on_rows", LATENT, H * NOPE), NOPE)
    v = g.by_heads(g.linear(latent, "uv_on_rows", LATENT, H * V), V)
    return k, v, key


def _attend_expanded(g: Layer, keys: str, values: str) -> None:
    query = g.op("Concat", *g.query(), axis=-1)
    g.out(g.op("MatMul", g.probabilities(query, keys), values))


def _for_heads(g: Layer, key: str, like: str) -> str:
    """[B, n, d_r] repeated for the heads of [B, H, n, .]."""
    shape = g.op("Concat", g.op("Shape", like, start=0, end=3), g.ints(ROPE), axis=0)
    return g.op("Expand", g.one_head(key), shape)


def expanded_each_step(g: Layer) -> None:
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    k, v, key = _expanded(g, rows)
    _attend_expanded(g, g.op("Concat", k, _for_heads(g, key, k), axis=-1), v)


def expanded_cache(g: Layer) -> None:
    k, v, key = _expanded(g, g.op("Concat", *g.rows(), axis=-1))
    new = g.op("Concat", k, _for_heads(g, key, k), axis=-1)
    keys = g.join(g.cache("past_key", H, "past", NOPE + ROPE), new, 2)
    _attend_expanded(g, keys, g.join(g.cache("past_value", H, "past", V), v, 2))


def expanded_flat_cache(g: Layer) -> None:
    """The same cached without an axis for heads: [B, n, H * d]."""
    def flat(x: str, width: int) -> str:
        return g.op("Reshape", g.op("Transpose", x, perm=[0, 2, 1, 3]), g.ints(0, 0, H * width))

    k, v, key = _expanded(g, g.op("Concat", *g.rows(), axis=-1))
    new = g.op("Concat", k, _for_heads(g, key, k), axis=-1)
    keys = g.join(g.cache("past_key", H * (NOPE + ROPE)), flat(new, NOPE + ROPE))
    values = g.join(g.cache("past_value", H * V), flat(v, V))
    _attend_expanded(g, g.by_heads(keys, NOPE + ROPE), g.by_heads(values, V))


def nope_keys_beside_latent(g: Layer) -> None:
    """Latent rows, and beside them the keys that are made from them, flat."""
    latent, key = g.rows()
    k_nope = g.linear(latent, "uk_on_rows", LATENT, H * NOPE)
    rows = g.join(g.cache("past_row", R), g.op("Concat", latent, key, axis=-1))
    keys = g.by_heads(g.join(g.cache("past_k_nope", H * NOPE), k_nope), NOPE)
    nope, rope = g.query()
    _, roped = g.split(rows, LATENT, ROPE)
    scores = g.op("Add", g.op("MatMul", nope, g.op("Transpose", keys, perm=[0, 1, 3, 2])),
                  g.op("MatMul", rope, g.op("Transpose", g.one_head(roped), perm=[0, 1, 3, 2])))
    g.out(g.up(g.op("MatMul", g.op("Softmax", scores, axis=-1), g.one_head(g.latent_of(rows)))))


def rope_on_row(g: Layer) -> None:
    """RoPE over all R columns of the row."""
    latent, key = g.split(g.linear("hidden_states", "kv_a", D, R), LATENT, ROPE)
    row = g.turn(g.op("Concat", latent, key, axis=-1), R, name="turn_row")
    g.attend(g.join(g.cache("past_row", R), row))


def rope_on_latent(g: Layer) -> None:
    latent, key = g.rows()
    g.attend(g.join(g.cache("past_row", R), g.op("Concat", g.turn(latent, LATENT, name="turn_latent"), key, axis=-1)))


def rope_on_some_latent(g: Layer) -> None:
    """The first d_r columns turned instead of the last: the operator's rotary_embedding_dim counts from the front."""
    latent, key = g.split(g.linear("hidden_states", "kv_a", D, R), LATENT, ROPE)
    first, rest = g.split(g.op("Concat", latent, key, axis=-1), ROPE, R - ROPE)
    g.attend(g.join(g.cache("past_row", R), g.op("Concat", g.turn(first, name="turn_first"), rest, axis=-1)))


def rope_on_latent_when_read(g: Layer) -> None:
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    latent, key = g.split(rows, LATENT, ROPE)
    count = g.op("Squeeze", g.op("Shape", rows, start=1, end=2), g.ints(0))
    zero, one = (numpy_helper.from_array(np.array(n, np.int64), f"int_{n}") for n in (0, 1))
    g.weights += [zero, one]
    index = g.op("Range", "int_0", count, "int_1")
    cos, sin = (g.op("Gather", g.weight(f"{n}_rows", 4096, LATENT), index, axis=0) for n in ("cos", "sin"))
    half = [g.op("Slice", latent, g.ints(a), g.ints(b), g.ints(-1)) for a, b in ((0, 8), (8, 16))]
    other = g.op("Concat", g.op("Neg", half[1]), half[0], axis=-1)
    turned = g.op("Add", g.op("Mul", latent, cos), g.op("Mul", other, sin), name="turn_rows")
    g.attend(g.op("Concat", turned, key, axis=-1))


def rope_key_from_latent(g: Layer) -> None:
    latent = g.norm(g.linear("hidden_states", "kv_a", D, LATENT), LATENT)
    key = g.turn(g.linear(latent, "key_of_latent", LATENT, ROPE))
    g.attend(g.join(g.cache("past_row", R), g.op("Concat", latent, key, axis=-1)))


def no_rope(g: Layer) -> None:
    latent, key = g.split(g.linear("hidden_states", "kv_a", D, R), LATENT, ROPE)
    g.attend(g.join(g.cache("past_row", R), g.op("Concat", g.norm(latent, LATENT), key, axis=-1)))


def values_expanded(g: Layer) -> None:
    """Keys absorbed, but W_UV over cached rows."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    probs = g.probabilities(g.latent_query(), g.one_head(rows))
    g.out(g.op("MatMul", probs, g.by_heads(g.linear(g.latent_of(rows), "uv_on_rows", LATENT, H * V), V)))


def keys_expanded(g: Layer) -> None:
    """Values absorbed, but W_UK over cached rows."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    k, _, key = _expanded(g, rows)
    keys = g.op("Concat", k, _for_heads(g, key, k), axis=-1)
    probs = g.probabilities(g.op("Concat", *g.query(), axis=-1), keys)
    g.out(g.up(g.op("MatMul", probs, g.one_head(g.latent_of(rows)))))


def one_head_expanded(g: Layer) -> None:
    """W_UV over cached rows a head at a time: no tensor is wide, each row is expanded all the same."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    probs = g.op("Split", g.probabilities(g.latent_query(), g.one_head(rows)), axis=1, count=H, num_outputs=H)
    heads = [g.op("MatMul", p, g.one_head(g.linear(g.latent_of(rows), f"uv_{i}", LATENT, V)))
             for i, p in enumerate(probs)]
    g.out(g.op("Concat", *heads, axis=1))


def cached_before_norm(g: Layer) -> None:
    latent, key = g.split(g.linear("hidden_states", "kv_a", D, R), LATENT, ROPE)
    rows = g.join(g.cache("past_row", R), g.op("Concat", latent, g.turn(key), axis=-1))
    raw, keys = g.split(rows, LATENT, ROPE)
    g.attend(g.op("Concat", g.norm(raw, LATENT), keys, axis=-1))


def rows_repeated(g: Layer) -> None:
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    keys = g.op("Concat", *[g.one_head(rows)] * H, axis=1, name="repeat")
    probs = g.probabilities(g.latent_query(), keys)
    g.out(g.up(g.op("MatMul", probs, g.latent_of(keys))))


def scores_by_element(g: Layer) -> None:
    """Rows times queries, then summed: [B, H, T, n, R] exists in between."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    query = g.op("Unsqueeze", g.latent_query(), g.ints(3))
    products = g.op("Mul", query, g.op("Unsqueeze", rows, g.ints(1, 2)), name="products")
    scores = g.op("ReduceSum", products, g.ints(-1), keepdims=0)
    g.out(g.up(g.op("MatMul", g.op("Softmax", scores, axis=-1), g.one_head(g.latent_of(rows)))))


def unknown_operator(g: Layer) -> None:
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    mixed = g.op("FlashMLA", g.latent_query(), rows, domain="my.kernels", name="flash")
    g.out(g.up(mixed))


def never_written(g: Layer) -> None:
    g.attend(g.op("Concat", g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1), axis=1))


def values_expanded_by_a_wide_weight(g: Layer) -> None:
    """W_UV spread over the batch before it meets cached rows: its shape depends on inputs, what it holds does not."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    probs = g.probabilities(g.latent_query(), g.one_head(rows))
    batch = g.op("Shape", rows, start=0, end=1)
    weight = g.op("Expand", g.weight("w_uv", H, LATENT, V), g.op("Concat", batch, g.ints(H, LATENT, V), axis=0))
    values = g.op("MatMul", g.one_head(g.latent_of(rows)), weight, name="uv_on_rows")
    g.out(g.op("MatMul", probs, values))


def values_expanded_in_a_branch(g: Layer) -> None:
    """W_UV over cached rows inside an If, which reads them from around it."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    probs = g.probabilities(g.latent_query(), g.one_head(rows))
    latent = g.latent_of(rows)
    g.weight("w_uv_flat", LATENT, H * V)
    bodies = [helper.make_graph([helper.make_node("MatMul", [latent, "w_uv_flat"], [f"inside_{i}"])], f"branch_{i}", [],
                                [helper.make_tensor_value_info(f"inside_{i}", FLOAT, [None, None, H * V])])
              for i in range(2)]
    g.weights.append(numpy_helper.from_array(np.array(True), "yes"))
    values = g.op("If", "yes", then_branch=bodies[0], else_branch=bodies[1], name="branch")
    g.out(g.op("MatMul", probs, g.by_heads(values, V)))


def rows_through_a_recurrence(g: Layer) -> None:
    """An operator that ONNX knows, with weights inside, that is no product."""
    rows = g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    by_time = g.op("Transpose", rows, perm=[1, 0, 2])
    weights = [g.weight(f"gru_{i}", *shape) for i, shape in enumerate(((1, 3 * R, R), (1, 3 * R, R)))]
    out = g.op("GRU", by_time, *weights, hidden_size=R, name="recurrence")
    g.attend(g.op("Transpose", g.op("Squeeze", out, g.ints(1)), perm=[1, 0, 2]))


def key_and_value_of_one_head(g: Layer) -> None:
    """Multi-query attention: one head of keys and of values cached, no latent at all."""
    k, v = g.split(g.linear("hidden_states", "kv", D, ROPE + V), ROPE, V)
    keys, values = g.join(g.cache("past_key", ROPE), g.turn(k)), g.join(g.cache("past_value", V), v)
    _, query = g.query()
    g.out(g.op("MatMul", g.probabilities(query, g.one_head(keys)), g.one_head(values)))


def cache_unused(g: Layer) -> None:
    """Rows are kept, and nothing attends them."""
    g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1))
    g.give(g.linear("hidden_states", "o", D, D), "attn_output")


def no_weights_around(g: Layer) -> None:
    """Columns of the hidden state are the queries, the mix is the output."""
    keys = g.one_head(g.join(g.cache("past_row", R), g.op("Concat", *g.rows(), axis=-1)))
    query = g.one_head(g.op("Slice", "hidden_states", g.ints(0), g.ints(R), g.ints(-1)))
    g.give(g.op("MatMul", g.probabilities(query, keys), g.latent_of(keys), name="mix"), "attn_output", rank=4)


# graph -> codes of its findings, words of one of them, and a node that must be named
WRONG: dict[Any, tuple[set[str], str, str]] = {
    expanded_each_step: ({"expanded-each-step", "rows-per-head"}, "keys are rebuilt", "uk_on_rows"),
    expanded_cache: ({"cache-per-head"}, "keys of every head are cached, 4 x 26 = 104", "past_key"),
    expanded_flat_cache: ({"cache-per-head"}, "104 columns meet queries of 26", "scores"),
    nope_keys_beside_latent: ({"cached-expansion", "cache-per-head"}, "80 columns", "uk_on_rows"),
    rope_on_row: ({"rope-on-latent"}, "16 latent columns", "turn_row"),
    rope_on_latent: ({"rope-on-latent"}, "16 latent columns", "turn_latent"),
    rope_on_some_latent: ({"rope-on-latent"}, "6 latent columns", "turn_first"),
    rope_on_latent_when_read: ({"rope-on-latent"}, "16 latent columns", "turn_rows"),
    rope_key_from_latent: ({"rope-from-latent"}, "6 rotated columns", "key_of_latent"),
    no_rope: ({"rope-unseen"}, "", "past_row"),
    values_expanded: ({"expanded-each-step"}, "values are rebuilt", "uv_on_rows"),
    values_expanded_by_a_wide_weight: ({"expanded-each-step"}, "values are rebuilt", "uv_on_rows"),
    values_expanded_in_a_branch: ({"cannot-see-through"}, "a subgraph is not looked into", "branch"),
    rows_through_a_recurrence: ({"cannot-see-through"}, "GRU", "recurrence"),
    keys_expanded: ({"expanded-each-step", "rows-per-head"}, "keys are rebuilt", "uk_on_rows"),
    one_head_expanded: ({"expanded-each-step"}, "values are rebuilt", "uv_3"),
    cached_before_norm: ({"norm-on-read"}, "before its norm", ""),
    rows_repeated: ({"rows-per-head"}, "88 numbers a row", "repeat"),
    scores_by_element: ({"wide-scores"}, "88 numbers per row and query", "products"),
    unknown_operator: ({"cannot-see-through"}, "FlashMLA", "flash"),
    never_written: ({"cache-not-written"}, "", "past_row"),
    cache_unused: ({"no-attention"}, "meet no queries", "past_row"),
    no_weights_around: ({"absorption-unseen"}, "W_UV was not found", "mix"),
    key_and_value_of_one_head: ({"latent-not-scored"}, "", "past_value"),
}
