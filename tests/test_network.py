"""What TensorRT's parser makes of our graphs, run without a GPU: every kind of layer, every graph, planted faults."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from engines import trt as door
from engines.backends import open_session
from engines.interpreter import Interpreter
from engines.network import plain, read
from engines.network_ops import TABLE
from engines.network_session import NetworkSession, Runner
from engines.onnx_ops import UnsupportedOperator
from engines.session import Session
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from tests.conftest import DISTINCT
from tests.marks import fast
from tests.model_checkpoints import tiny_checkpoint
from validate import __main__ as command_line
from validate.network import PLANTS, Result, check, plant, planted
from validate.parity import check_model

trt: Any = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
RNG = np.random.default_rng(3)
Array = np.ndarray[Any, Any]
LOGGER = trt.Logger(trt.Logger.INTERNAL_ERROR)
BUILDER = trt.Builder(LOGGER)
E, M, I64 = trt.ElementWiseOperation, trt.MatrixOperation, trt.int64


def f(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def i(*values: Any) -> Array:
    return np.array(values, np.int64)


class Net:
    """A network definition made by hand. Constants and inputs are made where they are named."""

    def __init__(self) -> None:
        self.network, self.feed, self.kept = BUILDER.create_network(0), dict[str, Array](), list[Array]()

    def give(self, array: Array, dynamic: bool = True) -> Any:
        """An input of this value, with no size known to TensorRT."""
        name = f"x{len(self.feed)}"
        self.feed[name] = array
        dtype = {"float32": trt.float32, "float16": trt.float16, "int64": trt.int64, "bool": trt.bool}[array.dtype.name]
        return self.network.add_input(name, dtype, [-1] * array.ndim if dynamic else array.shape)

    def constant(self, array: Array) -> Any:
        self.kept.append(np.ascontiguousarray(array))
        return self.network.add_constant(array.shape, self.kept[-1]).get_output(0)

    def ran(self, *layers: Any) -> list[Array]:
        """The outputs of these layers, run by the judge."""
        for layer in layers:
            for index in range(layer.num_outputs):
                self.network.mark_output(layer.get_output(index))
        network = plain(trt, self.network, "made by hand")
        found = Runner(network).run(self.feed)
        return [found[t.name] for t in network.outputs]

    def shape(self, sizes: Any) -> list[int]:
        """The numbers of a constant expression, computed by TensorRT itself: as the shape of what it fills."""
        fill = self.network.add_fill((1,), trt.FillOperation.LINSPACE, I64)
        fill.set_input(0, sizes)
        fill.set_input(1, self.constant(np.array(0, np.int64)))
        fill.set_input(2, self.constant(np.zeros(sizes.shape[0], np.int64)))
        return [int(n) for n in fill.get_output(0).shape]


# ---- each kind of layer

Built = Callable[[Net], Any]


@dataclass(frozen=True)
class Case:
    """One layer or a few, and what NumPy says of their outputs."""

    kind: str
    build: Built
    expected: tuple[Array, ...]
    name: str = ""


CASES: list[Case] = []


def case(kind: str, build: Built, *expected: Any, name: str = "") -> None:
    CASES.append(Case(kind, build, tuple(np.asarray(e) for e in expected), name))


def mended(layer: Any, /, *inputs: tuple[int, Any], **attributes: Any) -> Any:
    """A layer with more inputs and attributes."""
    for name, value in attributes.items():
        setattr(layer, name, value)
    for index, tensor in inputs:
        layer.set_input(index, tensor)
    return layer


DIVIDENDS, DIVISORS = i(-7, 7, -7, 7, 6, 0), i(2, -2, -2, 2, 3, 5)
X23, X34, X234, Y34 = f(2, 3), f(3, 4), f(2, 3, 4), f(3, 4)
for op_, result_ in (("SUM", X34 + Y34[:1]), ("SUB", X34 - Y34[:1]), ("PROD", X34 * Y34[:1]), ("DIV", X34 / Y34[:1]),
                     ("MAX", np.maximum(X34, Y34[:1])), ("MIN", np.minimum(X34, Y34[:1])),
                     ("LESS", np.less(X34, Y34[:1])), ("GREATER", np.greater(X34, Y34[:1])),
                     ("POW", np.abs(X34) ** Y34[:1]), ("FLOOR_DIV", X34 // Y34[:1])):
    base_ = np.abs(X34) if op_ == "POW" else X34
    case("ELEMENTWISE", lambda n, o=op_, b=base_: n.network.add_elementwise(n.give(b), n.give(Y34[:1]), getattr(E, o)),
         result_, name=op_)
for op_, result_ in (("DIV", i(-3, -3, 3, 3, 2, 0)), ("FLOOR_DIV", i(-4, -4, 3, 3, 2, 0)),
                     ("EQUAL", DIVIDENDS == DIVISORS), ("PROD", DIVIDENDS * DIVISORS)):
    case("ELEMENTWISE", lambda n, o=op_: n.network.add_elementwise(n.give(DIVIDENDS), n.give(DIVISORS), getattr(E, o)),
         result_, name=f"{op_}-int64")
TRUTH = np.array([True, True, False, False]), np.array([True, False, True, False])
for op_, result_ in (("AND", TRUTH[0] & TRUTH[1]), ("OR", TRUTH[0] | TRUTH[1]), ("XOR", TRUTH[0] ^ TRUTH[1])):
    case("ELEMENTWISE", lambda n, o=op_: n.network.add_elementwise(n.give(TRUTH[0]), n.give(TRUTH[1]), getattr(E, o)),
         result_, name=op_)
for op_, result_ in (("SQRT", np.sqrt(np.abs(X34))), ("LOG", np.log(np.abs(X34))), ("EXP", np.exp(np.abs(X34))),
                     ("RECIP", 1 / np.abs(X34)), ("ISNAN", np.isnan(X34)), ("NEG", -np.abs(X34))):
    case("UNARY", lambda n, o=op_: n.network.add_unary(n.give(np.abs(X34)), getattr(trt.UnaryOperation, o)), result_,
         name=op_)
case("UNARY", lambda n: n.network.add_unary(n.give(TRUTH[0]), trt.UnaryOperation.NOT), ~TRUTH[0], name="NOT")
for op_, result_ in (("SIGMOID", 1 / (1 + np.exp(-X34))), ("TANH", np.tanh(X34)), ("RELU", np.maximum(X34, 0))):
    case("ACTIVATION", lambda n, o=op_: n.network.add_activation(n.give(X34), getattr(trt.ActivationType, o)), result_,
         name=op_)
case("SELECT", lambda n: n.network.add_select(n.give(X34[:, :1] > 0), n.give(X34), n.give(Y34)),
     np.where(X34[:, :1] > 0, X34, Y34))
case("IDENTITY", lambda n: n.network.add_identity(n.give(X34)), X34)
case("CAST", lambda n: n.network.add_cast(n.give(np.array([-1.7, 1.7, 2.5], np.float32)), I64), i(-1, 1, 2))
case("CAST", lambda n: n.network.add_cast(n.give(np.array([0, 0.5, -2], np.float32)), trt.bool), [False, True, True],
     name="bool")
case("CAST", lambda n: n.network.add_cast(n.give(np.array([2049, 65520, 1e-9], np.float32)), trt.float16),
     np.array([2048, np.inf, 0], np.float16), name="fp16")
case("MATRIX_MULTIPLY", lambda n: n.network.add_matrix_multiply(n.give(X234), M.NONE, n.give(Y34[None]), M.TRANSPOSE),
     X234 @ Y34.T)
case("MATRIX_MULTIPLY", lambda n: n.network.add_matrix_multiply(n.give(X34), M.TRANSPOSE, n.give(Y34), M.NONE),
     X34.T @ Y34, name="left")
case("MATRIX_MULTIPLY", lambda n: n.network.add_matrix_multiply(n.give(X234), M.NONE, n.give(f(1, 4) * 0 + 2),
                                                                M.VECTOR), X234.sum(-1) * 2, name="vectors")
case("MATRIX_MULTIPLY", lambda n: n.network.add_matrix_multiply(n.give(X234[:, :, 0]), M.VECTOR, n.give(X234), M.NONE),
     np.einsum("bi,bij->bj", X234[:, :, 0], X234), name="vector-matrix")
for op_, result_ in (("SUM", X234.sum((0, 2), keepdims=True)), ("AVG", X234.mean((0, 2), keepdims=True)),
                     ("MAX", X234.max((0, 2), keepdims=True)), ("MIN", X234.min((0, 2), keepdims=True))):
    case("REDUCE", lambda n, o=op_: n.network.add_reduce(n.give(X234), getattr(trt.ReduceOperation, o), 0b101, True),
         result_, name=op_)
case("REDUCE", lambda n: n.network.add_reduce(n.give(X234), trt.ReduceOperation.SUM, 0b010, False), X234.sum(1),
     name="dropped")
case("SOFTMAX", lambda n: mended(n.network.add_softmax(n.give(X234)), axes=0b010),
     np.exp(X234) / np.exp(X234).sum(1, keepdims=True))
TIED = np.array([[1, 3, 3, 2], [5, 0, 5, 5]], np.float32)
case("TOPK", lambda n: n.network.add_topk(n.give(TIED), trt.TopKOperation.MAX, 3, 0b10, I64),
     [[3, 3, 2], [5, 5, 5]], i([1, 2, 3], [0, 2, 3]))
case("TOPK", lambda n: n.network.add_topk(n.give(TIED), trt.TopKOperation.MIN, 1, 0b01), TIED.min(0, keepdims=True),
     np.array([[0, 1, 0, 0]], np.int32), name="min-int32")
case("TOPK", lambda n: mended(n.network.add_topk(n.give(TIED), trt.TopKOperation.MAX, 1, 0b10, I64),
                              (1, n.constant(np.array(2, np.int64)))), [[3, 3], [5, 5]], i([1, 2], [0, 2]),
     name="input")
case("CONSTANT", lambda n: n.network.add_constant((2, 3), n.kept.append(X23) or n.kept[-1]), X23)
case("SHAPE", lambda n: n.network.add_shape(n.give(X234)), i(2, 3, 4))
case("SHUFFLE", lambda n: mended(n.network.add_shuffle(n.give(X234)), first_transpose=(2, 0, 1), reshape_dims=(0, -1),
                                 second_transpose=(1, 0)), X234.transpose(2, 0, 1).reshape(4, 6).T)
case("SHUFFLE", lambda n: mended(n.network.add_shuffle(n.give(X234)), first_transpose=(0, 2, 1)),
     X234.transpose(0, 2, 1), name="transpose")
case("SHUFFLE", lambda n: mended(n.network.add_shuffle(n.give(X234)), (1, n.constant(i(0, 0, 2, -1)))),
     X234.reshape(2, 3, 2, 2), name="input")
case("SHUFFLE", lambda n: mended(n.network.add_shuffle(n.give(f(0, 4))), reshape_dims=(0, 3),
                                 zero_is_placeholder=False),
     np.empty((0, 3), np.float32), name="zero")
case("SQUEEZE", lambda n: n.network.add_squeeze(n.give(f(2, 1, 3, 1) * 0 + 1), n.constant(i(-1, 1))), np.ones((2, 3)))
case("UNSQUEEZE", lambda n: n.network.add_unsqueeze(n.give(X23), n.constant(i(0, -1))), X23[None, ..., None])
case("CONCATENATION", lambda n: mended(n.network.add_concatenation([n.give(X34), n.give(Y34[:, :1])]), axis=1),
     np.concatenate([X34, Y34[:, :1]], 1))
S = np.arange(20, dtype=np.float32).reshape(4, 5)
case("SLICE", lambda n: n.network.add_slice(n.give(S), (1, 4), (2, 3), (2, -2)), S[1::2, 4::-2])
case("SLICE", lambda n: n.network.add_slice(n.give(S[:, :1]), (0, 0), (4, 3), (1, 0)), np.repeat(S[:, :1], 3, 1),
     name="repeat")
case("SLICE", lambda n: mended(n.network.add_slice(n.give(S), (0, 0), (0, 0), (0, 0)), (1, n.constant(i(1, 2))),
                               (2, n.constant(i(3, 0))), (3, n.constant(i(1, 1)))), S[1:4, 2:2], name="inputs")
case("SLICE", lambda n: mended(n.network.add_slice(n.give(S), (2,), (2,), (1,)), axes=(1,)), S[:, 2:4], name="axes")
case("SLICE", lambda n: mended(n.network.add_slice(n.give(S), (-1, 3), (6, 4), (1, 1)),
                               (4, n.constant(np.array(7, np.float32))), mode=trt.SampleMode.FILL),
     np.pad(S, ((1, 1), (0, 2)), constant_values=7)[:, 3:], name="fill")
case("GATHER", lambda n: n.network.add_gather(n.give(S), n.give(i([4, 0], [1, 1])), 1), S[:, i([4, 0], [1, 1])])
PICK = i([0, 4], [3, 3], [1, 0], [2, 2])
case("GATHER", lambda n: mended(n.network.add_gather_v2(n.give(S), n.give(PICK), trt.GatherMode.ELEMENT), axis=1),
     np.take_along_axis(S, PICK, 1), name="element")
case("GATHER", lambda n: n.network.add_gather_v2(n.give(S), n.constant(i([0, 4], [3, 1])), trt.GatherMode.ND),
     S[[0, 3], [4, 1]], name="nd")
SCATTERED, SCATTERED_ND = S.copy(), S.copy()
np.put_along_axis(SCATTERED, PICK[:, :1], -1, 1)
SCATTERED_ND[[0, 3]] = -2
case("SCATTER", lambda n: mended(n.network.add_scatter(n.give(S), n.give(PICK[:, :1]), n.give(S[:, :1] * 0 - 1),
                                                       trt.ScatterMode.ELEMENT), axis=1), SCATTERED)
case("SCATTER", lambda n: n.network.add_scatter(n.give(S), n.constant(i([0], [3])), n.give(S[:2] * 0 - 2),
                                                trt.ScatterMode.ND), SCATTERED_ND, name="nd")
case("FILL", lambda n: mended(n.network.add_fill((4,), trt.FillOperation.LINSPACE, trt.float32), alpha=1.0, beta=0.5),
     [1, 1.5, 2, 2.5])
case("FILL", lambda n: mended(n.network.add_fill((1,), trt.FillOperation.LINSPACE, I64), (0, n.constant(i(3, 4))),
                              (1, n.constant(np.array(1, np.int64))), (2, n.constant(i(100, 10)))),
     1 + 100 * np.arange(3)[:, None] + 10 * np.arange(4), name="inputs")
ROTATED, ANGLE = f(2, 3, 4, 6), RNG.uniform(-3, 3, (2, 4, 3))


def rotated(x: Array, interleaved: bool, width: int = 6) -> Array:
    """The same turn by complex numbers."""
    pairs = (x[..., 0:width:2], x[..., 1:width:2]) if interleaved else (x[..., :width // 2], x[..., width // 2:width])
    turned = (pairs[0] + 1j * pairs[1]) * np.exp(1j * ANGLE[:, None, :, :width // 2])
    both = np.stack([turned.real, turned.imag], -1 if interleaved else -2).reshape(*x.shape[:3], width)
    return np.concatenate([both, x[..., width:]], -1)


def rotary(n: Net, interleaved: bool, width: int, table: bool = False) -> Any:
    c, s = (fn(ANGLE[..., :(width or 6) // 2]).astype(np.float32) for fn in (np.cos, np.sin))
    if table:  # rows in the order 7..0, picked by position
        c, s = c.reshape(8, 3)[::-1], s.reshape(8, 3)[::-1]
    layer = n.network.add_rotary_embedding(*(n.give(x, dynamic=False) for x in (ROTATED, c, s)), interleaved, width)
    return mended(layer, (3, n.give(7 - np.arange(8).reshape(2, 4), dynamic=False))) if table else layer


case("ROTARY_EMBEDDING", lambda n: rotary(n, True, 0), rotated(ROTATED, True))
case("ROTARY_EMBEDDING", lambda n: rotary(n, False, 0), rotated(ROTATED, False), name="halves")
case("ROTARY_EMBEDDING", lambda n: rotary(n, True, 4), rotated(ROTATED, True, 4), name="partly")
case("ROTARY_EMBEDDING", lambda n: rotary(n, False, 0, True), rotated(ROTATED, False), name="positions")
Q, K, V = f(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 8)
MASK = (RNG.random((2, 1, 3, 5)) < 0.5) | np.eye(3, 5, dtype=bool)


def attended(allowed: Array, added: Array | float = 0.0) -> Array:
    keys, values = np.repeat(K, 2, 1), np.repeat(V, 2, 1)
    scores = np.where(allowed, np.einsum("bhtd,bhsd->bhts", Q, keys) + added, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ values


def attention(n: Net, kind: str = "NONE", mask: Array | None = None) -> Any:
    """IAttention is no layer: its boundary's output layer is found behind it."""
    made = n.network.add_attention_v2(n.give(Q), n.give(K), n.give(V), trt.AttentionNormalizationOp.SOFTMAX,
                                      getattr(trt.CausalMaskKind, kind))
    if mask is not None:
        made.mask = n.give(mask, dynamic=False)
    return next(layer for layer in (n.network.get_layer(k) for k in range(n.network.num_layers))
                if layer.type == trt.LayerType.ATTENTION_OUTPUT)


for kind_ in ("ATTENTION_INPUT", "ATTENTION_OUTPUT"):
    case(kind_, attention, attended(np.ones((3, 5), bool)))
case("ATTENTION_INPUT", partial(attention, kind="UPPER_LEFT"), attended(np.tri(3, 5, 0, bool)), name="upper-left")
case("ATTENTION_INPUT", partial(attention, kind="LOWER_RIGHT"), attended(np.tri(3, 5, 2, bool)), name="lower-right")
case("ATTENTION_INPUT", partial(attention, mask=MASK), attended(MASK), name="mask")
ADDED = f(2, 1, 3, 5)
case("ATTENTION_INPUT", partial(attention, mask=ADDED), attended(MASK | True, ADDED), name="added-mask")
CACHE, UPDATE = f(2, 1, 6, 3), f(2, 1, 2, 3)
UPDATED = CACHE.copy()
UPDATED[0, :, 4:6], UPDATED[1, :, 0:2] = UPDATE[0], UPDATE[1]
case("KV_CACHE_UPDATE", lambda n: n.network.add_kv_cache_update(
    n.give(CACHE, dynamic=False), n.give(UPDATE), n.give(i(4, 0)), trt.KVCacheMode.LINEAR), UPDATED)
CODES = RNG.integers(-128, 128, (3, 8)).astype(np.int8)
for shape_, expanded_ in (((), (1, 1)), ((3,), (3, 1)), ((3, 2), (3, 2))):
    scale_ = np.asarray(np.abs(f(*shape_)) + 0.1, np.float32)
    spread_ = np.repeat(scale_.reshape(expanded_), 8 // expanded_[1], 1)
    case("DEQUANTIZE", lambda n, s=scale_: mended(n.network.add_dequantize(
        n.constant(CODES), n.constant(s), trt.float32), **({"axis": 0} if s.ndim == 1 else {})), CODES * spread_,
         name=f"{len(shape_)}d")
case("QUANTIZE", lambda n: n.network.add_quantize(n.give(X34 * 60), n.constant(np.array(0.5, np.float32)), trt.int8),
     np.clip(np.rint(X34 * 60 / np.float32(0.5)), -128, 127).astype(np.int8))
case("QUANTIZE", lambda n: mended(n.network.add_quantize(n.give(X34, dynamic=False), n.constant(np.abs(Y34[0])),
                                                         trt.int8), axis=1),
     np.clip(np.rint(X34 / np.abs(Y34[0])), -128, 127).astype(np.int8), name="axis")


@pytest.mark.parametrize("one", CASES, ids=lambda c: f"{c.kind}{'-' * bool(c.name)}{c.name}")
def test_layer_computes_what_numpy_does(one: Case) -> None:
    net = Net()
    for got, expected in zip(net.ran(one.build(net)), one.expected, strict=True):
        assert got.shape == expected.shape
        assert got.dtype.kind == expected.dtype.kind or expected.dtype == int  # a list of whole numbers
        np.testing.assert_allclose(got.astype(np.float64), expected.astype(np.float64), rtol=2e-6, atol=2e-6)


def test_every_kind_has_a_case() -> None:
    assert {c.kind for c in CASES} == set(TABLE)


@pytest.mark.parametrize("op", ["SUM", "SUB", "PROD", "DIV", "FLOOR_DIV", "MIN", "MAX", "POW"])
def test_integers_are_what_tensorrt_itself_computes(op: str) -> None:
    """It folds shapes without a GPU, so its own integer arithmetic can be read off a shape."""
    a, b = (DIVIDENDS, DIVISORS) if op != "POW" else (i(-7, 7, 3, 0), i(2, 3, 0, 4))
    net = Net()
    made = net.network.add_elementwise(net.constant(a), net.constant(b), getattr(E, op)).get_output(0)
    far = net.network.add_elementwise(made, net.constant(np.full(len(a), 1000)), E.SUM).get_output(0)
    truth = net.shape(far)
    net = Net()
    (ours,) = net.ran(net.network.add_elementwise(net.give(a), net.give(b), getattr(E, op)))
    assert [int(n) + 1000 for n in ours] == truth


@pytest.mark.parametrize(("build", "words"), [
    (lambda n: n.network.add_gather(n.give(S), n.give(i(5)), 1), "gathers 5 to 5 of 5"),
    (lambda n: n.network.add_gather(n.give(S), n.give(i(-1)), 1), "gathers -1 to -1 of 5"),
    (lambda n: n.network.add_slice(n.give(S), (3, 0), (2, 5), (1, 1)), "slices 3 to 4 of 4 rows"),
    (lambda n: n.network.add_kv_cache_update(n.give(CACHE, dynamic=False), n.give(UPDATE), n.give(i(5, 0)),
                                             trt.KVCacheMode.LINEAR), "writes rows 5 to 6 of 6"),
])
def test_what_lies_outside_stops_with_the_layers_name(build: Built, words: str) -> None:
    net = Net()
    layer = build(net)
    layer.name = "the layer"
    with pytest.raises(CheckError, match=rf"layer 'the layer' \([A-Z_]+\): {words}"):
        net.ran(layer)


UNKNOWN: list[tuple[Built, str]] = [
    (lambda n: n.network.add_einsum([n.give(X34)], "ij->ji"), r"\(EINSUM\): no meaning of this kind is known"),
    (lambda n: n.network.add_non_zero(n.give(X34)), r"\(NON_ZERO\): no meaning"),
    (lambda n: mended(n.network.add_slice(n.give(S), (0, 0), (9, 9), (1, 1)), mode=trt.SampleMode.WRAP),
     r"\(SLICE\): mode is WRAP; it is modelled for STRICT_BOUNDS, FILL"),
    (lambda n: mended(n.network.add_gather(n.give(S), n.give(PICK), 1), num_elementwise_dims=1),
     r"\(GATHER\): num_elementwise_dims is 1"),
    (lambda n: n.network.add_fill((4,), trt.FillOperation.RANDOM_UNIFORM, trt.float32),
     r"\(FILL\): operation is RANDOM_UNIFORM"),
    (lambda n: n.network.add_reduce(n.give(S), trt.ReduceOperation.PROD, 1, True), r"\(REDUCE\): op is PROD"),
    (lambda n: n.network.add_activation(n.give(S), trt.ActivationType.ELU), r"\(ACTIVATION\): type is ELU"),
    (lambda n: n.network.add_unary(n.give(S), trt.UnaryOperation.SINH), r"\(UNARY\): op is SINH"),
]


@pytest.mark.parametrize(("build", "words"), UNKNOWN)
def test_unknown_kind_or_mode_stops_with_the_layers_name(build: Built, words: str) -> None:
    """Before anything is computed: with an empty feed."""
    net = Net()
    layer = build(net)
    layer.name = "the layer"
    net.feed.clear()
    with pytest.raises(UnsupportedOperator, match=f"^layer 'the layer' {words}") as caught:
        net.ran(layer)
    assert "\n" not in str(caught.value)


def test_attention_over_packed_tokens_is_not_modelled() -> None:
    net = Net()
    attention(net)
    network = plain(trt, net.network, "x")
    layers = tuple(replace(la, attributes={**la.attributes, "query_form": "PACKED_NHD"})
                   if la.kind == "ATTENTION_INPUT" else la for la in network.layers)
    with pytest.raises(UnsupportedOperator, match=r"\(ATTENTION_INPUT\): query_form is PACKED_NHD"):
        Runner(replace(network, layers=layers))


def test_a_reading_that_differs_from_tensorrts_shapes_stops() -> None:
    net = Net()
    net.network.mark_output(net.network.add_concatenation([net.give(X34, False), net.give(Y34, False)]).get_output(0))
    network = plain(trt, net.network, "x")
    layer = replace(network.layers[0], name="join", attributes={"axis": 1})
    with pytest.raises(CheckError, match=r"layer 'join' \(CONCATENATION\): gives \[3, 8\]; TensorRT declares float32"):
        Runner(replace(network, layers=(layer,))).run(net.feed)


# ---- the reader


def graph(path: Path, nodes: list[Any], inputs: dict[str, tuple[int, list[Any]]], output: str,
          initializers: list[Any] = []) -> Path:  # noqa: B006
    infos = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
    made = helper.make_graph(nodes, "g", infos, [onnx.ValueInfoProto(name=output)], initializers)
    made.output[0].CopyFrom(helper.make_tensor_value_info(output, next(iter(inputs.values()))[0], None))
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    path.write_bytes(model.SerializeToString())
    return path


def test_bfloat16_constants_are_read_bit_for_bit(tmp_path: Path) -> None:
    weight = f(4, 3).astype(ml_dtypes.bfloat16)
    tensor = helper.make_tensor("w", TensorProto.BFLOAT16, weight.shape, weight.tobytes(), raw=True)
    path = graph(tmp_path / "m.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])],
                 {"x": (TensorProto.BFLOAT16, ["N", 4])}, "y", [tensor])
    (found,) = [la.attributes["weights"] for la in read("trt-rtx", path).layers if la.kind == "CONSTANT"]
    assert found.dtype == weight.dtype
    assert found.tobytes() == weight.tobytes()


@pytest.mark.parametrize(("dtype", "attributes", "scales"), [
    (ml_dtypes.float8_e4m3fn, {"axis": 0}, (6,)), (ml_dtypes.int4, {"axis": 1, "block_size": 32}, (6, 2)),
    (np.int8, {"axis": 0}, (6,))], ids=["fp8", "int4", "int8"])
def test_quantised_constants_are_read_and_dequantised(dtype: Any, attributes: dict[str, int], scales: tuple[int, ...],
                                                      tmp_path: Path) -> None:
    """Code for code, and the product over them is the one over the weight that ONNX means."""
    codes = np.resize(np.arange(-8, 8), (6, 64)).astype(dtype)
    scale, x = (np.abs(f(*scales)) + 0.1).astype(np.float16), np.eye(64, dtype=np.float16)
    nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["wide"], **attributes),
             helper.make_node("Gemm", ["x", "wide"], ["y"], transB=1)]
    path = graph(tmp_path / "m.onnx", nodes, {"x": (TensorProto.FLOAT16, ["N", 64])}, "y",
                 [onnx.numpy_helper.from_array(codes, "w"), onnx.numpy_helper.from_array(scale, "s")])
    network = read("trt-rtx", path)
    found = next(la.attributes["weights"] for la in network.layers if la.kind == "CONSTANT"
                 and la.attributes["weights"].shape == codes.shape)
    assert found.dtype == codes.dtype
    np.testing.assert_array_equal(found.astype(np.float32), codes.astype(np.float32))
    factors = np.repeat(scale.reshape(6, -1), 64 // scale.reshape(6, -1).shape[1], 1)
    expected = (codes.astype(np.float32) * factors.astype(np.float32)).astype(np.float16).T
    np.testing.assert_array_equal(Runner(network).run({"x": x})["y"], expected)


def test_layers_come_behind_what_they_read(layer: Callable[..., Export]) -> None:
    """The parser lists some before: they are there, and they are moved."""
    made = layer("narrow-deepseek-v3")
    path = made.folder / made.graphs[0].file
    network = read("trt-rtx", path)
    known = {t.name for t in network.inputs}
    for one in network.layers:
        assert {name for name in one.inputs if name} <= known, one
        known |= {t.name for t in one.outputs}
    with door.parsed("trt-rtx", path) as (_, raw):
        listed = [raw.get_layer(k).name for k in range(raw.num_layers)]
    assert sorted(listed) == sorted(la.name for la in network.layers)
    assert listed != [la.name for la in network.layers]
    assert sum(network.kinds.values()) == len(network.layers)


def test_parsers_refusal_is_one_line(tmp_path: Path) -> None:
    path = graph(tmp_path / "m.onnx", [helper.make_node("Attention", ["x", "x", "x"], ["y"], softmax_precision=1)],
                 {"x": (TensorProto.FLOAT16, ["B", 2, "T", 16])}, "y")
    with pytest.raises(CheckError, match=r"^m\.onnx: the TensorRT parser refused it: .*[Ss]oftmax") as caught:
        read("trt-rtx", path)
    assert "\n" not in str(caught.value)


# ---- exports


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory, narrow: list[str]) -> Callable[..., Export]:
    """Layer exports for TensorRT-RTX by their options."""

    def make(name: str, **options: Any) -> Export:
        folder = tmp_path_factory.mktemp("layer") / "export"
        return export(ExportRequest(name, folder, **{"target": "trt-rtx", "max_context": 160} | options))

    return make


def passes(made: Export, only: Sequence[str] = ()) -> Result:
    """Every graph passes and was held against another runtime, which ONNX Runtime is where it can multiply."""
    result = check(made, only=only)
    assert result.passed, result.failure
    assert not result.not_run
    assert {r.graph for r in result.rows} == set(only or [g.name for g in made.graphs])
    for row in result.rows:
        assert row.other == ("interpreter" if made.dtype == "bf16" else "ort")
        assert row.other_passed or made.dtype == "fp16", row  # ONNX Runtime's fp16 is no judge
        assert row.other_rel is not None
        assert row.other_rel <= row.tolerance, row
    return result


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
def test_layer_graphs(layer: Callable[..., Export], cache: str, prefill: str, dtype: str) -> None:
    result = passes(layer("narrow-deepseek-v3", cache=cache, prefill=prefill, dtype=dtype))
    found = {r.graph for r in result.rows}
    assert {"decode.kqt", "decode.qkt"} <= found
    assert ("prefill.expanded-attention" in found) == (prefill == "expanded" and dtype != "fp32")
    kinds = {kind for r in result.rows for kind in r.kinds or {}}
    assert ("KV_CACHE_UPDATE" in kinds) == (cache == "scatter")


ROUND = [("append", "expanded", "fp16"), ("scatter", "expanded", "fp32"), ("concat", "expanded", "bf16"),
         ("scatter", "absorbed", "bf16"), ("append", "absorbed", "fp32")]


FAMILIES = [(n, k) for k, n in enumerate(DISTINCT) if n != "deepseek-v3"]


@pytest.mark.parametrize(("name", "which"), fast(FAMILIES, FAMILIES[::2]))
def test_layers_of_other_families(layer: Callable[..., Export], name: str, which: int) -> None:
    cache, prefill, dtype = ROUND[which % len(ROUND)]
    passes(layer(f"narrow-{name}", cache=cache, prefill=prefill, dtype=dtype))


@pytest.mark.parametrize("options", [
    {"name": "narrow-deepseek-v3", "absorb": "folded"}, {"name": "narrow-deepseek-v2-lite", "absorb": "folded",
                                                         "dtype": "bf16", "cache": "scatter"},
    {"name": "article", "causal": False, "prefill": "expanded", "dtype": "fp16"},
    {"name": "article", "merge_q": True, "dtype": "bf16", "max_context": 48}], ids=str)
def test_layers_of_other_options(layer: Callable[..., Export], options: dict[str, Any]) -> None:
    """Folded weights; no cache; biases (the article's layer has them) and a merged query."""
    passes(layer(**options))


MODELS = [("v3", "gather", "fp32", "absorbed", "append"), ("v3", "dense", "fp16", "expanded", "scatter"),
          ("v2-lite", "gather", "bf16", "absorbed", "scatter"), ("v3-bias", "dense", "fp32", "expanded", "concat"),
          ("longcat", "dense", "fp32", "expanded", "append"), ("mistral4", "gather", "fp32", "absorbed", "append"),
          ("minicpm3", "auto", "fp16", "expanded", "scatter")]


@pytest.mark.parametrize(("name", "experts", "dtype", "prefill", "cache"), MODELS)
def test_models(tmp_path: Path, name: str, experts: str, dtype: str, prefill: str, cache: str) -> None:
    fields = {"first_k_dense_replace": 0} if name.startswith("v") else {}  # the one layer is a MoE
    source = tiny_checkpoint(tmp_path / "source", name, layers=1 if name != "minicpm3" else 2, **fields)
    made = export(ExportRequest(str(source), tmp_path / "made", dtype=dtype, prefill=prefill, cache=cache,
                                experts=experts, target="trt-rtx", max_context=96))
    result = passes(made, [made.graph(kind).name for kind in ("prefill", "decode")])
    assert {r.judge for r in result.rows} == {"float64 reference"}
    kinds = {kind for r in result.rows for kind in r.kinds or {}}
    assert ("TOPK" in kinds) == (name != "minicpm3")
    assert ("SCATTER" in kinds) == (experts == "dense")


def test_without_its_source_a_model_is_held_against_its_own_graphs(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "minicpm3", layers=1)
    made = export(ExportRequest(str(source), tmp_path / "made", target="trt-rtx", max_context=64))
    (source / "model.safetensors").rename(source / "gone")
    result = check(made, only=["prefill.kqt", "decode.kqt"])
    assert result.passed, result.failure
    assert {r.judge for r in result.rows} == {"default decode graph in the interpreter"}


def test_16_bit_network_is_the_interpreters_graph_bit_for_bit(layer: Callable[..., Export]) -> None:
    """Two readings of one graph, one through TensorRT's parser, and the same roundings: nothing differs."""
    made = layer("narrow-deepseek-v2-lite", dtype="bf16", cache="append")
    for entry in made.graphs:
        B, T, S = 2, 3, 5
        sizes = {"B": B, "T": T, "S": S}
        feed: dict[str, Array] = {"past_lengths": i(5, 2)}
        for spec in entry.inputs:
            shape = [sizes.get(d, d) for d in spec.shape]
            feed.setdefault(spec.name, f(*shape).astype(ml_dtypes.bfloat16))
        path = made.folder / entry.file
        ours, theirs = Runner(read("trt-rtx", path)).run(feed), Interpreter(path).run(feed)
        assert set(ours) == set(theirs)
        for name, array in ours.items():
            assert array.tobytes() == theirs[name].tobytes(), name


def test_session_keeps_the_contract(layer: Callable[..., Export]) -> None:
    made = layer("narrow-deepseek-v2-lite", cache="scatter", max_context=20)
    config = made.config
    cache = np.zeros((2, 1, 20, config.row_dim), np.float32)
    feed = {"hidden_states": f(2, 3, config.hidden_size), "past_lengths": i(0, 4), "latent_cache.0": cache}
    with open_session(made, "prefill", "trt-network") as session, open_session(made, "prefill", "ort") as other:
        assert isinstance(session, NetworkSession)
        assert isinstance(session, Session)
        theirs = other.infer({**feed, "latent_cache.0": cache.copy()})
        found = session.infer(feed)
        assert found["latent_cache_out.0"] is cache  # in place
        np.testing.assert_allclose(cache, theirs["latent_cache_out.0"], atol=1e-5)
        np.testing.assert_allclose(found["attn_output"], theirs["attn_output"], atol=1e-4)
        with pytest.raises(InputError, match="18 rows and 3 new tokens exceed S_max 20"):
            session.infer({**feed, "past_lengths": i(0, 18)})


def test_ladder_climbs_the_network(narrow: list[str]) -> None:
    """The session fits the parity ladder: unwritten rows, ragged batches and chunks are as invisible as elsewhere."""
    request = ExportRequest("narrow-deepseek-v3", Path("unused"), target="trt-rtx", max_context=160)
    ladder = check_model([request], backends=["trt-network"])
    assert ladder.passed, ladder.failure
    assert {"trt-network/tail", "trt-network/ragged/alone", "trt-network/chunked/invisible"} <= {
        r.name for r in ladder.rungs if r.counted}


@pytest.mark.parametrize("how", ["hardlink", "handed"])
def test_weights_in_the_checkpoint_are_read_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           how: str) -> None:
    """Each expert is a tensor of its own there, and the network joins them."""
    if how == "handed":
        monkeypatch.setattr(os, "link", lambda *paths, **options: os.stat(tmp_path / "on another disk"))
    source = tiny_checkpoint(tmp_path / "source", "v3", layers=1, first_k_dense_replace=0)
    made = export(ExportRequest(str(source), tmp_path / "made", target="trt-rtx", max_context=64, weights="link",
                                experts="gather"))
    assert {r["how"] for r in made.data["weights"]["linked"].values()} == {how}
    passes(made, ["decode.kqt"])


def test_graphs_that_tensorrt_does_not_take_are_named(layer: Callable[..., Export]) -> None:
    result = check(layer("narrow-deepseek-v3", target="ort", prefill="expanded"))
    assert result.passed
    assert result.not_run == ["prefill.expanded-attention: not run: trt-rtx does not take expanded-attention in fp32",
                              "decode.attention: not run: trt-rtx does not take attention"]


def test_refused_graph_is_a_red_row(tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "source", "v3", layers=2)
    made = export(ExportRequest(str(source), tmp_path / "made", target="ort", max_context=64))
    result = check(made)
    assert not result.passed
    assert "the TensorRT parser refused it" in result.failure
    assert "\n" not in result.failure


# ---- planted faults


@pytest.fixture(scope="module")
def fused(layer: Callable[..., Export]) -> Export:
    return layer("narrow-deepseek-v3", cache="scatter", prefill="expanded", dtype="fp16")


@pytest.mark.parametrize("name", list(PLANTS))
def test_planted_fault_is_right_in_onnx_runtime_alone(fused: Export, tmp_path: Path, name: str) -> None:
    made, names = planted(fused, name, tmp_path / "planted")
    assert names == ["prefill.expanded-attention"]
    (row,) = check(made, only=names).rows
    assert row.other == "ort"
    assert row.other_passed
    assert row.other_reference_rel is not None
    assert row.other_reference_rel <= row.tolerance
    assert not row.passed
    assert row.rel is not None
    assert row.rel > 50 * row.tolerance
    assert "ONNX Runtime answers the same graph rightly" in row.note


@pytest.mark.parametrize("name", list(PLANTS))
def test_planted_fault_in_every_attention_of_a_model(tmp_path: Path, name: str) -> None:
    source = tiny_checkpoint(tmp_path / "source", "minicpm3", layers=2)
    made = export(ExportRequest(str(source), tmp_path / "made", target="trt-rtx", max_context=64, cache="scatter",
                                prefill="expanded", dtype="fp16"))
    bad, names = planted(made, name, tmp_path / "bad")
    (row,) = check(bad, only=names).rows
    assert row.other_passed
    assert not row.passed


def attend(path: Path, lengths: bool, causal: int) -> Path:
    """A fused Attention over keys of which `lengths` are real."""
    kinds: dict[str, tuple[int, list[Any]]] = {n: (TensorProto.FLOAT16, ["B", 2, d, 16])
                                               for n, d in (("q", "T"), ("k", "S"), ("v", "S"))}
    names = ["q", "k", "v"]
    if lengths:
        kinds["lengths"] = (TensorProto.INT64, ["B"])
        names += ["", "", "", "lengths"]
    return graph(path, [helper.make_node("Attention", names, ["y"], name="attend", is_causal=causal)], kinds, "y")


@pytest.mark.parametrize(("causal", "real"), [(0, i(2, 5)), (1, i(5, 5))], ids=["nonpad", "top-left"])
def test_parser_drops_the_lengths_silently(tmp_path: Path, causal: int, real: Array) -> None:
    """Of three graphs only that with lengths is misread; with full lengths it is causality alone that turns."""
    ort = pytest.importorskip("onnxruntime")
    path = attend(tmp_path / "lengths.onnx", True, causal)
    feed = {n: f(2, 2, size, 16).astype(np.float16) for n, size in (("q", 3), ("k", 5), ("v", 5))} | {"lengths": real}
    (truth,) = ort.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, feed)
    np.testing.assert_allclose(Interpreter(path).run(feed)["y"], truth, atol=2e-3)
    network = read("trt-rtx", path)
    assert not any("lengths" in la.inputs for la in network.layers)
    found = Runner(network).run(feed)["y"]
    assert np.abs(found.astype(np.float32) - truth.astype(np.float32)).max() > 0.1
    kinds = {la.attributes["causal_kind"] for la in network.layers if la.kind == "ATTENTION_INPUT"}
    assert kinds == {"UPPER_LEFT" if causal else "NONE"}
    # without lengths both say the same
    bare = attend(tmp_path / "bare.onnx", False, causal)
    del feed["lengths"]
    (truth,) = ort.InferenceSession(bare, providers=["CPUExecutionProvider"]).run(None, feed)
    np.testing.assert_allclose(Runner(read("trt-rtx", bare)).run(feed)["y"], truth, atol=2e-3)


def test_plant_needs_a_graph_that_can_hold_it(layer: Callable[..., Export], fused: Export, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no graph with the fused Attention over a scatter cache"):
        planted(layer("narrow-deepseek-v3", prefill="absorbed"), "nonpad", tmp_path / "a")
    with pytest.raises(InputError, match="--plant 'x': expected one of nonpad, top-left-causal"):
        planted(fused, "x", tmp_path / "b")
    model = onnx.load(fused.folder / "decode.kqt.onnx", load_external_data=False)
    assert not plant(model, "nonpad")


# ---- the command


def run(*words: str) -> Any:
    return CliRunner().invoke(command_line.cli, ["network", *words], catch_exceptions=True)


def test_command_passes_and_says_what_it_saw(fused: Export) -> None:
    result = run(str(fused.folder), "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["pass"]
    assert data["backend"] == "trt-rtx"
    assert [g["graph"] for g in data["graphs"]] == [g.name for g in fused.graphs]
    assert all(g["pass"] and g["layers"] == sum(g["kinds"].values()) for g in data["graphs"])
    table = run(str(fused.folder))
    assert table.exit_code == 0
    assert f"{len(fused.graphs)} graphs: pass" in table.stdout


@pytest.mark.parametrize("name", list(PLANTS))
def test_command_with_a_plant_fails(fused: Export, name: str) -> None:
    before = {p.name: p.read_bytes() for p in fused.folder.iterdir() if p.is_file()}
    result = run(str(fused.folder), "--plant", name, "--json")
    assert result.exit_code == 1
    (graph_,) = json.loads(result.stdout)["graphs"]
    assert not graph_["pass"]
    assert graph_["other_pass"]
    assert {p.name: p.read_bytes() for p in open_export(fused.folder).folder.iterdir() if p.is_file()} == before


def test_command_takes_a_model_and_refuses_an_unknown_backend(narrow: list[str]) -> None:
    assert run("narrow-deepseek-v2-lite", "--dtype", "fp32", "--max-context", "24").exit_code == 0
    refused = run("narrow-deepseek-v2-lite", "--backend", "ort", "--max-context", "40")
    assert isinstance(refused.exception, InputError)
    assert "--backend 'ort': expected one of trt, trt-rtx" in str(refused.exception)


def test_weights_left_out_are_an_input_error(layer: Callable[..., Export]) -> None:
    with pytest.raises(InputError, match="--weights none"):
        check(layer("narrow-deepseek-v2-lite", weights="none"))


