"""Router and experts as graphs: against a float64 router written anew, in every form, at the memory they should take.

The router here follows the papers (DeepSeek-V2 2405.04434, V3 2412.19437, LongCat-Flash 2509.01322) token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from engines import lint, trt
from engines.interpreter import Interpreter
from exporter import moe_graph
from exporter.decoder_config import MoEConfig
from exporter.dtypes import DTYPES
from exporter.graph import GraphBuilder, infer_and_check
from exporter.signature import Profile, TensorSpec
from exporter.weight_file import PlannedTensor, write_weights
from validate.metrics import TOLERANCES, compare

ort = pytest.importorskip("onnxruntime")

EDGE = 1e-5  # scores closer than this to the edge of a choice are left to float32
D, INNER = 40, 24
KINDS = {
    "sigmoid, bias, groups by top 2, normalised": MoEConfig(16, 4, INNER, 0, "sigmoid", True, 4, 2, "top2", True, 2.5),
    "sigmoid, bias, one group": MoEConfig(12, 3, INNER, 0, "sigmoid", True, 1, 1, "top2", True, 2.827),
    "softmax, groups by max": MoEConfig(16, 3, INNER, 0, "softmax", False, 4, 2, "max", False, 16.0),
    "softmax": MoEConfig(13, 3, INNER, 0, "softmax", False, 1, 1, "max", False, 1.0),
    "softmax, normalised": MoEConfig(12, 3, INNER, 0, "softmax", False, 1, 1, "max", True, 1.3),
    "softmax, bias, identity experts": MoEConfig(12, 5, INNER, 0, "softmax", True, 1, 1, "max", False, 6.0, 5),
    "one choice": MoEConfig(9, 1, INNER, 0, "sigmoid", True, 1, 1, "top2", False, 1.0),
}
GROUPED = KINDS["sigmoid, bias, groups by top 2, normalised"]
IDENTITY = KINDS["softmax, bias, identity experts"]


# --- The router and the experts, written anew -------------------------------------------------------------------------


@dataclass
class Weights:
    """One MoE's weights, float32: router [E, D], bias [E], gate and up [E, I, D], down [E, D, I]."""

    router: np.ndarray
    bias: np.ndarray
    gate: np.ndarray
    up: np.ndarray
    down: np.ndarray

    @classmethod
    def hot(cls, moe: MoEConfig, hidden: int = D, seed: int = 0) -> Weights:
        rng, inner = np.random.default_rng(seed), moe.moe_intermediate_size
        choices, experts = moe.n_routed_experts + moe.zero_experts, moe.n_routed_experts

        def drawn(*shape: int) -> np.ndarray:
            return rng.standard_normal(shape, dtype=np.float32) * np.float32(1.6 / np.sqrt(shape[-1]))

        bias = rng.standard_normal(choices).astype(np.float32) * np.float32(0.2)
        return cls(drawn(choices, hidden), bias, drawn(experts, inner, hidden), drawn(experts, inner, hidden),
                   drawn(experts, hidden, inner))

    def named(self) -> dict[str, tuple[np.ndarray, bool]]:
        """The names of the weight file, and whether a tensor stays float32."""
        both = np.stack([self.gate, self.up], axis=2).reshape(len(self.gate), -1, self.gate.shape[2])
        return {"mlp.router.weight": (self.router, True), "mlp.router.bias": (self.bias, True),
                "mlp.experts.gate": (self.gate, False), "mlp.experts.up": (self.up, False),
                "mlp.experts.down": (self.down, False), "mlp.experts.gate_up": (both, False)}

    def rounded(self, dtype: str) -> Weights:
        """Experts as a compute dtype holds them."""
        kind = DTYPES[dtype].numpy
        return replace(self, **{n: getattr(self, n).astype(kind).astype(np.float32) for n in ("gate", "up", "down")})


@dataclass
class Token:
    """What one token's router does: chosen experts in order, their weights, and how near it came to another choice."""

    chosen: list[int]
    weights: np.ndarray
    margin: float


def route_one(moe: MoEConfig, w: Weights, x: np.ndarray) -> Token:
    logits = w.router.astype(np.float64) @ x.astype(np.float64)
    if moe.scoring == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
    else:
        e = np.exp(logits - logits.max())
        scores = e / e.sum()
    ranked = scores + w.bias.astype(np.float64) if moe.choice_bias else scores.copy()
    gaps = []
    if moe.n_group > 1:
        groups = ranked.reshape(moe.n_group, -1)
        worth = [np.sort(g)[-2:].sum() if moe.group_score == "top2" else g.max() for g in groups]
        order = sorted(range(moe.n_group), key=lambda i: -worth[i])
        gaps.append(worth[order[moe.topk_group - 1]] - worth[order[moe.topk_group]])
        for shut in order[moe.topk_group:]:
            groups[shut] = -np.inf
    experts = sorted(range(len(ranked)), key=lambda e: -ranked[e])
    k = moe.num_experts_per_tok
    gaps += [ranked[experts[i]] - ranked[experts[i + 1]] for i in range(k)]
    weights = scores[experts[:k]]
    if moe.normalise:
        weights = weights / weights.sum()
    return Token(experts[:k], weights * moe.routed_scaling_factor, min(gaps))


def mixed_one(moe: MoEConfig, w: Weights, x: np.ndarray, token: Token) -> np.ndarray:
    x, total = x.astype(np.float64), np.zeros(len(x))
    for expert, weight in zip(token.chosen, token.weights, strict=True):
        if expert >= moe.n_routed_experts:
            total += weight * x
        else:
            gate, up = w.gate[expert].astype(np.float64) @ x, w.up[expert].astype(np.float64) @ x
            total += weight * (w.down[expert].astype(np.float64) @ (gate / (1 + np.exp(-gate)) * up))
    return total


# --- The graphs -------------------------------------------------------------------------------------------------------


def graph(folder: Path, w: Weights, dtype: str, hidden: int, outputs: dict[str, tuple[tuple[Any, ...], str]],
          build: Callable[[GraphBuilder], list[str]], name: str = "moe") -> Path:
    """A graph over tokens x [N, hidden] whose outputs are what `build` returns."""
    folder.mkdir(exist_ok=True)
    plan = [PlannedTensor(n, t.shape, "fp32" if exact else dtype, partial(np.asarray, t))
            for n, (t, exact) in w.named().items()]
    g = GraphBuilder(DTYPES[dtype], write_weights(folder / "weights.safetensors", plan, lambda *what: None))
    for made, output in zip(build(g), outputs, strict=True):
        g.op("Identity", made, name=f"{output}_out", output=output)
    specs = [TensorSpec(n, shape, kind) for n, (shape, kind) in outputs.items()]
    model = g.model(name, [TensorSpec("x", ("N", hidden), dtype)], specs, "0", {})
    path = folder / f"{name}.onnx"
    path.write_bytes(infer_and_check(model, folder).SerializeToString())
    return path


def moe_file(folder: Path, moe: MoEConfig, w: Weights, form: str, dtype: str = "fp32", hidden: int = D) -> Path:
    return graph(folder, w, dtype, hidden, {"y": (("N", hidden), dtype)},
                 lambda g: [moe_graph.build_moe(g, moe, form, "x", hidden, 1e-6)], form)


def run(path: Path, x: np.ndarray) -> list[np.ndarray]:
    found: list[np.ndarray] = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    return found


def tokens(count: int, hidden: int = D, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, hidden), dtype=np.float32)


def clear(moe: MoEConfig, w: Weights, x: np.ndarray, edge: float = EDGE) -> tuple[np.ndarray, list[Token]]:
    """The tokens whose choice float32 cannot miss."""
    routed = [route_one(moe, w, row) for row in x]
    kept = [i for i, token in enumerate(routed) if token.margin > edge]
    return x[kept], [routed[i] for i in kept]


def router_outputs(folder: Path, moe: MoEConfig, w: Weights,
                   x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(index [N, k], weight [N, k], identity [N]) of the graph's own router."""
    k = moe.num_experts_per_tok
    outputs: dict[str, tuple[tuple[Any, ...], str]] = {"index": (("N", k), "int64"), "weight": (("N", k), "fp32")}
    if moe.zero_experts:
        outputs["identity"] = (("N", 1), "fp32")

    def build(g: GraphBuilder) -> list[str]:
        chosen = moe_graph._route(g, moe, "x")
        return [chosen.index, chosen.weight, *([chosen.identity] if chosen.identity else [])]

    index, weight, *identity = run(graph(folder, w, "fp32", D, outputs, build, "router"), x)
    return index, weight, identity[0][:, 0] if identity else np.zeros(len(x))


def check_router(folder: Path, moe: MoEConfig, w: Weights, x: np.ndarray) -> list[Token]:
    x, routed = clear(moe, w, x)
    index, weight, identity = router_outputs(folder, moe, w, x)
    real = moe.n_routed_experts
    for n, token in enumerate(routed):
        assert index[n].tolist() == [min(e, real) for e in token.chosen]
        expected = [0.0 if e >= real else v for e, v in zip(token.chosen, token.weights, strict=True)]
        np.testing.assert_allclose(weight[n], expected, rtol=2e-5)
        left = sum(v for e, v in zip(token.chosen, token.weights, strict=True) if e >= real)
        np.testing.assert_allclose(identity[n], left, rtol=2e-5, atol=1e-12)
    return routed


# --- The router -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_router_on_hot_tokens(tmp_path: Path, kind: str) -> None:
    moe = KINDS[kind]
    routed = check_router(tmp_path, moe, Weights.hot(moe), tokens(400))
    assert len(routed) > 380  # few tokens sit on an edge
    used = {e for token in routed for e in token.chosen}
    assert len(used) == moe.n_routed_experts + moe.zero_experts


@pytest.mark.parametrize("kind", [kind for kind, moe in KINDS.items() if moe.choice_bias])
def test_the_bias_chooses_and_does_not_weigh(tmp_path: Path, kind: str) -> None:
    """A bias that turns most choices; the weights are those of the bare scores."""
    moe = KINDS[kind]
    w = Weights.hot(moe)
    bare = replace(w, bias=np.zeros_like(w.bias))
    last = np.arange(len(w.bias)) >= len(w.bias) - moe.num_experts_per_tok - 1
    pushed = replace(w, bias=np.where(last, 3.0, 0.0).astype(np.float32) + np.float32(0.01) * w.bias)
    x, _ = clear(moe, pushed, tokens(200))
    routed = check_router(tmp_path, moe, pushed, x)
    assert routed
    turned = [set(a.chosen) != set(route_one(moe, bare, row).chosen) for a, row in zip(routed, x, strict=True)]
    assert np.mean(turned) > 0.7
    if moe.normalise:
        for token in routed:
            assert token.weights.sum() == pytest.approx(moe.routed_scaling_factor)


@pytest.mark.parametrize(("kind", "shut_out"), [("sigmoid, bias, groups by top 2, normalised", True),
                                                ("softmax, groups by max", False)])
def test_a_group_limit_can_exclude_the_best_expert(tmp_path: Path, kind: str, shut_out: bool) -> None:
    """By the sum of two, a group with one excellent expert loses to groups with two good ones; by the best it wins."""
    moe, w = KINDS[kind], Weights.hot(KINDS[kind])
    logits = np.full(moe.n_routed_experts, -3.0)
    logits[0], logits[[4, 5, 8, 9]] = 3.0, 2.0  # expert 0 alone in its group, two good ones in each of two others
    logits += 0.01 * np.arange(moe.n_routed_experts)
    x = tokens(1)
    router = (logits[:, None] * x / (x @ x.T)).astype(np.float32)
    w = replace(w, router=router, bias=np.zeros_like(w.bias))
    (token,) = check_router(tmp_path, moe, w, x)
    assert (0 not in token.chosen) == shut_out
    assert {e // 4 for e in token.chosen} <= ({1, 2} if shut_out else {0, 2})


def test_all_chosen_are_identity_experts(tmp_path: Path) -> None:
    moe = IDENTITY
    w = Weights.hot(moe)
    w.bias[moe.n_routed_experts:] = 5
    x = tokens(30)
    for token in check_router(tmp_path, moe, w, x):
        assert min(token.chosen) >= moe.n_routed_experts
    x, routed = clear(moe, w, x)
    for form in moe_graph.FORMS:
        (found,) = run(moe_file(tmp_path, moe, w, form), x)
        expected = np.stack([token.weights.sum() * row for token, row in zip(routed, x, strict=True)])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_no_chosen_is_an_identity_expert(tmp_path: Path) -> None:
    moe, w = IDENTITY, Weights.hot(IDENTITY)
    w.bias[moe.n_routed_experts:] = -5
    for token in check_router(tmp_path, moe, w, tokens(30)):
        assert max(token.chosen) < moe.n_routed_experts


# --- The experts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", moe_graph.FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_the_chosen_experts_sum(tmp_path: Path, kind: str, form: str) -> None:
    """In ONNX Runtime and in the interpreter, for one token and for many."""
    moe, w = KINDS[kind], Weights.hot(KINDS[kind])
    x, routed = clear(moe, w, tokens(60))
    expected = np.stack([mixed_one(moe, w, row, token) for row, token in zip(x, routed, strict=True)])
    path = moe_file(tmp_path, moe, w, form)
    assert compare(run(path, x)[0], expected).within(TOLERANCES["fp32"])
    assert compare(Interpreter(path).run({"x": x})["y"], expected).within(TOLERANCES["fp32"])
    for n in range(3):
        assert compare(run(path, x[n:n + 1])[0], expected[n:n + 1]).rel < 1e-4


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gather_from_several_stacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, count: int) -> None:
    """Experts that one tensor cannot hold (DeepSeek-V3's 256) lie in several: the same sum, gathered from each."""
    moe = KINDS[kind]
    w = Weights.hot(moe)
    each = moe.moe_intermediate_size * D
    fitting = [n for n in range(count, moe.n_routed_experts + 1) if moe.n_routed_experts % n == 0]
    monkeypatch.setattr(moe_graph, "MAX_ELEMENTS", moe.n_routed_experts // fitting[0] * each)
    assert len(moe_graph.stacks(moe, D)) == fitting[0]
    x, routed = clear(moe, w, tokens(60))
    expected = np.stack([mixed_one(moe, w, row, token) for row, token in zip(x, routed, strict=True)])
    path = moe_file(tmp_path, moe, w, "gather")
    assert compare(run(path, x)[0], expected).within(TOLERANCES["fp32"])
    assert compare(Interpreter(path).run({"x": x})["y"], expected).within(TOLERANCES["fp32"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("form", moe_graph.FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_form_at_16_bit(tmp_path: Path, kind: str, form: str, dtype: str) -> None:
    """The router stays float32: on the same rounded tokens it chooses exactly what float64 chooses."""
    moe, w = KINDS[kind], Weights.hot(KINDS[kind])
    given = tokens(60).astype(DTYPES[dtype].numpy)
    x, routed = clear(moe, w, given.astype(np.float32))
    rounded = w.rounded(dtype)
    expected = np.stack([mixed_one(moe, rounded, row, token) for row, token in zip(x, routed, strict=True)])
    found = Interpreter(moe_file(tmp_path, moe, w, form, dtype)).run({"x": x.astype(DTYPES[dtype].numpy)})["y"]
    assert compare(found.astype(np.float32), expected).within(TOLERANCES[dtype])


@pytest.mark.parametrize("form", ["gather", "dense"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_without_a_number_leaves_the_others_alone(tmp_path: Path, form: str, bad: float) -> None:
    moe, w = GROUPED, Weights.hot(GROUPED)
    path, x = moe_file(tmp_path, moe, w, form), tokens(6)
    spoilt = x.copy()
    spoilt[2] = bad
    kept = [0, 1, 3, 4, 5]
    with np.errstate(invalid="ignore"):
        assert np.array_equal(run(path, x)[0][kept], run(path, spoilt)[0][kept])
        assert np.array_equal(Interpreter(path).run({"x": x})["y"][kept],
                              Interpreter(path).run({"x": spoilt})["y"][kept])


# --- What a graph reads, and what it holds ----------------------------------------------------------------------------


def readers(path: Path) -> dict[str, list[onnx.NodeProto]]:
    """Expert weights (views of the stacks too) and the nodes that read them."""
    model = onnx.load(path, load_external_data=False)
    names = {i.name for i in model.graph.initializer if "experts" in i.name}
    return {n: [node for node in model.graph.node if n in node.input] for n in names}


def test_gather_reads_chosen_rows_only(tmp_path: Path) -> None:
    moe = GROUPED
    found = readers(moe_file(tmp_path, moe, Weights.hot(moe), "gather"))
    assert set(found) == {f"mlp.experts.{m}" for m in ("gate", "up", "down")}
    for name, nodes in found.items():
        assert [n.op_type for n in nodes] == ["Gather"] * moe.num_experts_per_tok
        assert all(n.input[0] == name and helper.get_attribute_value(n.attribute[0]) == 0 for n in nodes)
    shapes = {t.name: t for t in Interpreter(tmp_path / "gather.onnx").shapes({"N": 7})}
    gathered = [shapes[node.output[0]].shape for nodes in found.values() for node in nodes]
    assert all(shape[0] == 7 for shape in gathered)  # one expert's matrix per token, never the stack


def test_fused_reads_through_the_operator_only(tmp_path: Path) -> None:
    found = readers(moe_file(tmp_path, GROUPED, Weights.hot(GROUPED), "fused"))
    assert {name: [n.op_type for n in nodes] for name, nodes in found.items()} == {
        "mlp.experts.gate_up": ["MoE"], "mlp.experts.down": ["MoE"]}


@pytest.mark.parametrize("experts", [3, 8, 13, 16])
def test_dense_reads_every_expert_once(tmp_path: Path, experts: int) -> None:
    moe = replace(KINDS["softmax"], n_routed_experts=experts)
    path = moe_file(tmp_path, moe, Weights.hot(moe), "dense")
    found = readers(path)
    assert all([n.op_type for n in nodes] == ["MatMul"] for nodes in found.values())
    initializers = {i.name: i for i in onnx.load(path, load_external_data=False).graph.initializer}
    for matrix in ("gate", "up", "down"):
        pieces = [initializers[n] for n in found if n.split(".")[2] == matrix]
        assert all(p.dims[0] <= moe_graph.DENSE_GROUP for p in pieces)
        spans = sorted((int(e["offset"]), int(e["length"])) for p in pieces
                       for e in [{e.key: e.value for e in p.external_data}])
        assert sum(p.dims[0] for p in pieces) == experts
        assert all(a + n == b for (a, n), (b, _) in pairwise(spans))


@pytest.mark.parametrize(("form", "tokens_at_most", "experts", "chosen"), [("gather", 8, 16, 4), ("dense", 512, 32, 4)])
def test_a_builder_holds_one_step_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str,
                                            tokens_at_most: int, experts: int, chosen: int,
                                            record_property: Callable[[str, object], None]) -> None:
    """TensorRT-RTX's scratch, with each step waiting for the one before it and without that."""
    pytest.importorskip("tensorrt_rtx")
    hidden, inner = 512, 1024
    moe = MoEConfig(experts, chosen, inner, 0, "softmax", False, normalise=False)
    w = Weights.hot(moe, hidden)
    shapes: Profile = {"x": ((1, hidden), (tokens_at_most, hidden), (tokens_at_most, hidden))}

    def activation(name: str) -> int:
        path = moe_file(tmp_path / name, moe, w, form, "fp16", hidden)
        assert lint.lint(path, {"N": tokens_at_most}) == []
        return trt.build("trt-rtx", path, [shapes]).activation_bytes

    chained = activation("chained")
    monkeypatch.setattr(moe_graph, "index_after", lambda g, index, *rest: index)
    monkeypatch.setattr(moe_graph, "values_after", lambda g, values, *rest: values)
    free = activation("free")
    record_property("activation bytes, chained and not", (chained, free))
    assert chained <= 0.5 * free
    if form == "gather":
        scratch = moe_graph.gather_scratch(moe, hidden, tokens_at_most, 2)
        assert scratch == tokens_at_most * hidden * inner * 2
        assert chained <= 1.5 * scratch + 10e6  # the builder's own floor is 8 MB
    else:
        assert chained <= 1.5 * lint.live_peak(tmp_path / "chained" / "dense.onnx", {"N": tokens_at_most}) + 10e6
