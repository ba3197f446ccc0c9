"""What TensorRT would refuse, misread or under-report is found before a build, and nothing else is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import NodeProto, TensorProto, helper

from engines import lint
from engines.build import BuildRequest, ranges
from engines.lint import MAX_ELEMENTS, RULES, Finding
from exporter.export import ExportRequest, export
from exporter.formulations import choose
from exporter.manifest import Export

HALF, FULL, BOOL, INT = TensorProto.FLOAT16, TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
SIZES = {"B": 2, "T": 4, "S": 6}
Values = Sequence[tuple[str, int, Sequence[Any]]]


def save(path: Path, nodes: Sequence[NodeProto], inputs: Values, outputs: Values,
         constants: dict[str, Sequence[int]] | None = None) -> Path:
    """A graph of opset 24; `constants` become int64 initializers."""
    sides = [[helper.make_tensor_value_info(n, t, s) for n, t, s in side] for side in (inputs, outputs)]
    weights = [helper.make_tensor(n, INT, [len(v)], v) for n, v in (constants or {}).items()]
    domains = dict.fromkeys(["", *(n.domain for n in nodes)])
    opsets = [helper.make_opsetid(d, 1 if d else 24) for d in domains]
    model = helper.make_model(helper.make_graph(nodes, "graph", *sides, weights), opset_imports=opsets, ir_version=11)
    onnx.save(model, path)
    return path


def attention(path: Path, *extra: str, heads: tuple[int, int, int] = (64, 64, 64), dtype: int = HALF,
              outputs: Sequence[str] = ("y",), domain: str = "", **attributes: Any) -> Path:
    """Attention over q, k, v and `extra` inputs by their names in the operator."""
    order = ("mask", "past_key", "past_value", "lengths")
    optional: list[tuple[str, int, Sequence[Any]]] = [
        ("mask", BOOL, ["T", "T"]), ("past_key", dtype, ["B", 2, "S", heads[1]]),
        ("past_value", dtype, ["B", 2, "S", heads[2]]), ("lengths", INT, ["B"])]
    names = [n if n in extra else "" for n in order]
    while names and not names[-1]:
        names.pop()
    node = helper.make_node("Attention", ["q", "k", "v", *names], list(outputs), name="attend", domain=domain,
                            **attributes)
    inputs = [(n, dtype, ["B", 2, "T", d]) for n, d in zip(("q", "k", "v"), heads, strict=True)]
    shapes: dict[str, Sequence[Any]] = {
        "y": ["B", 2, "T", heads[2]], "key": ["B", 2, "N", heads[1]], "value": ["B", 2, "N", heads[2]]}
    return save(path, [node], [*inputs, *(o for o in optional if o[0] in extra)],
                [(n, dtype, shapes[n]) for n in outputs])


def flat_attention(path: Path, heads: int, width: int) -> Path:
    """Attention of 3-D tensors [B, T, heads * size]."""
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attend", q_num_heads=heads, kv_num_heads=heads)
    return save(path, [node], [(n, HALF, ["B", "T", width]) for n in ("q", "k", "v")], [("y", HALF, ["B", "T", width])])


def scatter(path: Path, *, rank: int = 4, axis: int = -2, mode: str = "linear", copied: str = "") -> Path:
    """TensorScatter over a cache; `copied` puts an Identity before the cache or behind the result."""
    shape = (["B", 1, 32, 8] if rank == 4 else ["B", 32, 8])
    update = (["B", 1, "T", 8] if rank == 4 else ["B", "T", 8])
    node = helper.make_node("TensorScatter", ["inner" if copied == "cache" else "cache", "update", "at"],
                            ["outer" if copied == "result" else "result"], name="write", axis=axis, mode=mode)
    before = [helper.make_node("Identity", ["cache"], ["inner"])] if copied == "cache" else []
    behind = [helper.make_node("Identity", ["outer"], ["result"])] if copied == "result" else []
    return save(path, [*before, node, *behind], [("cache", HALF, shape), ("update", HALF, update), ("at", INT, ["B"])],
                [("result", HALF, shape)])


def control_flow(path: Path, op: str) -> Path:
    """A graph with one operator that holds a graph."""
    def body(inputs: Values, outputs: Values) -> Any:
        sides = [[helper.make_tensor_value_info(n, t, s) for n, t, s in side] for side in (inputs, outputs)]
        node = [helper.make_node("Identity", [inputs[-1][0] if inputs else "x"], [outputs[-1][0]])]
        if op == "Loop":
            node.append(helper.make_node("Identity", ["go"], ["go_on"]))
        return helper.make_graph(node, "body", *sides)

    if op == "If":
        branch = body([], [("z", FULL, [2])])
        node = helper.make_node("If", ["flag"], ["y"], name="flow", then_branch=branch, else_branch=branch)
    elif op == "Loop":
        inside = body([("i", INT, []), ("go", BOOL, []), ("a", FULL, [2])], [("go_on", BOOL, []), ("b", FULL, [2])])
        node = helper.make_node("Loop", ["", "flag", "x"], ["y"], name="flow", body=inside)
    else:
        node = helper.make_node("Scan", ["x"], ["y"], name="flow", num_scan_inputs=1,
                                body=body([("a", FULL, [])], [("b", FULL, [])]))
    return save(path, [node], [("x", FULL, [2]), ("flag", BOOL, [])], [("y", FULL, [2])])


def tame(path: Path) -> Path:
    """No control flow."""
    return save(path, [helper.make_node("Identity", ["x"], ["y"])], [("x", FULL, [2])], [("y", FULL, [2])])


# (rule, what builds the graph and its options, the node, a piece of the message)
TRIGGERS: list[tuple[str, Any, dict[str, Any], str, str]] = [
    ("standard-domain", attention, {"domain": "com.microsoft"}, "attend", "domain com.microsoft"),
    ("attention-head-sizes", attention, {"heads": (64, 64, 32)}, "attend", "head sizes [32, 64]"),
    ("attention-head-sizes", attention, {"heads": (192, 192, 128)}, "attend", "head sizes [128, 192]"),
    ("attention-head-sizes", attention, {"heads": (20, 20, 20)}, "attend", "head size 20"),
    ("attention-head-sizes", attention, {"heads": (8, 8, 8)}, "attend", "head size 8"),
    ("attention-head-sizes", attention, {"heads": (264, 264, 264)}, "attend", "head size 264"),
    ("attention-head-sizes", flat_attention, {"heads": 2, "width": 40}, "attend", "head size 20"),
    ("attention-past-present", attention, {"extra": ("past_key", "past_value")}, "attend", "past and present"),
    ("attention-past-present", attention, {"outputs": ("y", "key", "value")}, "attend", "one output only"),
    ("attention-nonpad-ignored", attention, {"extra": ("lengths",)}, "attend", "nonpad_kv_seqlen is silently ignored"),
    ("attention-dtype", attention, {"dtype": FULL}, "attend", "Attention in float32"),
    ("attention-mask-and-causal", attention, {"extra": ("mask",), "is_causal": 1}, "attend", "exclude each other"),
    ("control-flow", control_flow, {"op": "Loop"}, "flow", "Loop around attention"),
    ("control-flow", control_flow, {"op": "If"}, "flow", "If around attention"),
    ("control-flow", control_flow, {"op": "Scan"}, "flow", "Scan around attention"),
    ("scatter-form", scatter, {"rank": 3}, "write", "TensorScatter over [2, 32, 8]"),
    ("scatter-form", scatter, {"mode": "circular"}, "write", "linear"),
    ("scatter-form", scatter, {"copied": "cache"}, "write", "must be a network input"),
    ("scatter-form", scatter, {"copied": "result"}, "write", "its result a network output"),
]
CLEAN: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "standard-domain": [(attention, {"domain": "ai.onnx"}), (attention, {})],
    "attention-head-sizes": [(attention, {"heads": (d, d, d)}) for d in (16, 192, 256)] + [
        (flat_attention, {"heads": 16, "width": 1024})],
    "attention-past-present": [(attention, {})],
    "attention-nonpad-ignored": [(attention, {"extra": ("mask",)})],
    "attention-dtype": [(attention, {"dtype": HALF}), (attention, {"dtype": TensorProto.BFLOAT16})],
    "attention-mask-and-causal": [(attention, {"extra": ("mask",)}), (attention, {"is_causal": 1})],
    "control-flow": [(tame, {})],
    "scatter-form": [(scatter, {}), (scatter, {"axis": 2})],
}


def built(graph: Any, options: dict[str, Any], folder: Path) -> Path:
    extra = options.get("extra", ())
    path: Path = graph(folder / "graph.onnx", *extra, **{k: v for k, v in options.items() if k != "extra"})
    return path


def test_every_rule_has_a_trigger_and_a_clean_graph() -> None:
    assert {rule for rule, *_ in TRIGGERS} == set(CLEAN) == {name for name, _, _ in RULES}
    operators = {op for name, op, _ in RULES if name == "control-flow"}
    assert operators == {options["op"] for rule, _, options, _, _ in TRIGGERS if rule == "control-flow"}


@pytest.mark.parametrize(("rule", "graph", "options", "node", "words"), TRIGGERS,
                         ids=[f"{t[0]}-{i}" for i, t in enumerate(TRIGGERS)])
def test_rule_triggers(rule: str, graph: Any, options: dict[str, Any], node: str, words: str, tmp_path: Path) -> None:
    """It is found where it is, and no other rule takes offence."""
    findings = lint.lint(built(graph, options, tmp_path), SIZES)
    assert [(f.rule, f.node) for f in findings] == [(rule, node)]
    assert words in findings[0].message


@pytest.mark.parametrize(("graph", "options"), [case for cases in CLEAN.values() for case in cases],
                         ids=[f"{rule}-{i}" for rule, cases in CLEAN.items() for i in range(len(cases))])
def test_clean_graph(graph: Any, options: dict[str, Any], tmp_path: Path) -> None:
    assert lint.lint(built(graph, options, tmp_path), SIZES) == []


def test_all_findings_are_given(tmp_path: Path) -> None:
    path = attention(tmp_path / "graph.onnx", "mask", "lengths", heads=(20, 20, 20), dtype=FULL, is_causal=1)
    assert [f.rule for f in lint.lint(path, SIZES)] == [
        "attention-head-sizes", "attention-nonpad-ignored", "attention-dtype", "attention-mask-and-causal"]


def test_graphs_that_cannot_be_evaluated_are_findings(tmp_path: Path) -> None:
    """cos and sin of another dtype than x, which ONNX and TensorRT refuse; an operator nobody here knows."""
    rope = helper.make_node("RotaryEmbedding", ["x", "cos", "sin"], ["y"], name="rope")
    inputs: Values = [("x", HALF, ["B", 2, "T", 64]), ("cos", FULL, ["B", "T", 32]), ("sin", FULL, ["B", "T", 32])]
    (found,) = lint.lint(save(tmp_path / "mixed.onnx", [rope], inputs, [("y", HALF, ["B", 2, "T", 64])]), SIZES)
    assert (found.rule, found.node) == ("not-understood", "mixed")
    assert "operands are float16, float32, float32; expected one data type (at node 'rope'" in found.message
    same = [(n, HALF, s) for n, _, s in inputs]
    assert lint.lint(save(tmp_path / "same.onnx", [rope], same, [("y", HALF, ["B", 2, "T", 64])]), SIZES) == []
    sine = helper.make_node("Sin", ["x"], ["y"], name="sine")
    (found,) = lint.lint(save(tmp_path / "sine.onnx", [sine], [("x", HALF, ["B"])], [("y", HALF, ["B"])]), SIZES)
    assert found.rule == "not-understood"
    assert "node 'sine': operator Sin" in found.message


# --- Tensors past 2^31 - 1 elements -----------------------------------------------------------------------------------


def scores(path: Path, dtype: int = HALF) -> Path:
    """past [B, S, 4] @ queries [B, 4, Q]: the scores are the only large tensor."""
    node = helper.make_node("MatMul", ["past", "queries"], ["scores"], name="product")
    return save(path, [node], [("past", dtype, ["B", "S", 4]), ("queries", dtype, ["B", 4, "Q"])],
                [("scores", dtype, ["B", "S", "Q"])])


@pytest.mark.parametrize(("B", "S", "T", "H", "elements"), [
    (8, 32768, 512, 16, 2**31), (1, 65536, 512, 128, 2**32), (8, 163840, 512, 128, 5 * 2**34),
    (8, 32767, 512, 16, 0), (8, 32768, 1, 16, 0), (1, 32768, 512, 16, 0), (1, MAX_ELEMENTS, 1, 1, 0)])
def test_too_large_at_the_profile(B: int, S: int, T: int, H: int, elements: int, tmp_path: Path) -> None:
    if B * S * 4 > MAX_ELEMENTS:  # the past itself would be too large
        node = helper.make_node("Identity", ["x"], ["y"])
        path = save(tmp_path / "graph.onnx", [node], [("x", HALF, ["B", "S"])], [("y", HALF, ["B", "S"])])
    else:
        path = scores(tmp_path / "graph.onnx")
    findings = lint.lint(path, {"B": B, "S": S, "Q": T * H})
    if not elements:
        assert findings == []
    else:
        assert findings == [Finding("tensor-too-large", "product", findings[0].message)]
        assert f"scores [{B}, {S}, {T * H}] has {elements} elements" in findings[0].message
        assert f"beyond {MAX_ELEMENTS} TensorRT under-reports" in findings[0].message


def test_too_large_weights_and_inputs_count(tmp_path: Path) -> None:
    path = save(tmp_path / "graph.onnx", [helper.make_node("Shape", ["x"], ["y"])], [("x", HALF, ["B", 2**20])],
                [("y", INT, [2])])
    assert [f.rule for f in lint.lint(path, {"B": 2**11})] == ["tensor-too-large"]
    assert lint.lint(path, {"B": 2**11 - 1}) == []


# --- What the exporter writes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat", "none"])
def test_exported_graphs_are_clean(cache: str, dtype: str, prefill: str, tmp_path: Path) -> None:
    options = {"causal": False} if cache == "none" else {"cache": cache}
    made = export(ExportRequest("article", tmp_path / "made", dtype=dtype, target="trt-rtx", prefill=prefill,
                                max_context=32768, **options))
    found = {g.name: lint.lint(made.folder / g.file, largest(made, g.name)) for g in made.graphs}
    assert found == {g.name: [] for g in made.graphs}
    kinds = {"prefill": prefill} | ({} if cache == "none" else {"decode": "absorbed"})
    assert list(found) == [f"{kind}.{f.name}" for kind, form in kinds.items() for f in
                           choose(made.config, target="trt-rtx", dtype=dtype, prefill_form=form, kind=kind)]


def largest(made: Export, graph: str) -> dict[str, int]:
    (entry,) = [g for g in made.graphs if g.name == graph]
    return {n: r.max for n, r in ranges(made, entry, BuildRequest(made.folder)).items()}


def test_onnx_runtimes_attention_is_not_for_tensorrt(tmp_path: Path) -> None:
    """The `attention` formulation has 154 columns in Q and K, 128 in V: the reason that TensorRT does not get it."""
    made = export(ExportRequest("article", tmp_path / "made", target="ort", max_context=64))
    found = lint.lint(made.folder / made.graph("decode", "attention").file, SIZES)
    assert [f.rule for f in found] == ["attention-head-sizes", "attention-dtype"]


# --- live_peak --------------------------------------------------------------------------------------------------------


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), name=outputs.split()[0], **attributes)


# x is [B, 8]; at B = 2 a float32 tensor of its size has 64 bytes. The sums name what is alive at the peak.
PEAKS: dict[str, tuple[list[NodeProto], int]] = {
    "inputs and outputs are free": ([node("Exp", "x", "y")], 0),
    "a chain holds two": ([node("Exp", "x", "a"), node("Exp", "a", "b"), node("Exp", "b", "c"), node("Exp", "c", "y")],
                          64 + 64),
    "a branch waits": ([node("Exp", "x", "a"), node("Neg", "a", "b"), node("Neg", "b", "c"), node("Add", "a c", "d"),
                        node("Exp", "d", "y")], 3 * 64),
    "the last result is an output": ([node("Exp", "x", "a"), node("Exp", "a", "y")], 64),
    "a view costs nothing": ([node("Exp", "x", "a"), node("Reshape", "a to", "v"), node("Exp", "v", "b"),
                              node("Reshape", "b back", "w"), node("Exp", "w", "y")], 64 + 64),
    "a view keeps its source": ([node("Exp", "x", "a"), node("Reshape", "a to", "v"), node("Exp", "x", "b"),
                                 node("Exp", "b", "c"), node("Reshape", "v back", "w"), node("Add", "w c", "y")],
                                3 * 64),
    "a view of an input": ([node("Reshape", "x to", "v"), node("Reshape", "v back", "w"), node("Exp", "w", "a"),
                            node("Exp", "a", "y")], 64),
    "a transpose is a copy": ([node("Exp", "x", "a"), node("Transpose", "a", "b", perm=[0, 1]), node("Exp", "b", "y")],
                              64 + 64),
    "unread results count while made": ([node("Split", "x", "a b", axis=1, num_outputs=2),
                                         node("Concat", "a a", "y", axis=1)], 32 + 32),
    "unread results die at once": ([node("Split", "x", "a b", axis=1, num_outputs=2),
                                    node("Concat", "a a", "c", axis=1), node("Exp", "c", "y")], 32 + 64),
    "dtypes have their sizes": ([node("Cast", "x", "a", to=HALF), node("Less", "x x", "m"), node("Where", "m a a", "b"),
                                 node("Cast", "b", "y", to=FULL)], 32 + 16 + 32),
    "a tensor read twice dies once": ([node("Exp", "x", "a"), node("Add", "a a", "b"), node("Mul", "b b", "c"),
                                       node("Add", "c c", "y")], 64 + 64),
}


@pytest.mark.parametrize("case", PEAKS)
def test_live_peak(case: str, tmp_path: Path) -> None:
    nodes, expected = PEAKS[case]
    path = save(tmp_path / "graph.onnx", nodes, [("x", FULL, ["B", 8])], [("y", FULL, ["B", 8])],
                {"to": [-1], "back": [-1, 8]})
    assert lint.live_peak(path, {"B": 2}) == expected
    assert lint.live_peak(path, {"B": 6}) == 3 * expected


# --- What a builder's figure cannot be below --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
def test_scores_that_must_exist(cache: str, dtype: str, tmp_path: Path) -> None:
    """Absorbed forms multiply 576 columns, which no attention kernel fuses; a group of heads holds its own share."""
    made = export(ExportRequest("deepseek-v2-lite", tmp_path / "export", dtype=dtype, target="trt-rtx", cache=cache,
                                max_context=64))
    itemsize = 4 if dtype == "fp32" else 2
    rows = {"append": 64, "scatter": 64, "concat": 64 + 3}[cache]
    for graph in made.graphs:
        if graph.formulation == "kqt-blocks":  # its softmax runs along: no product is held whole
            assert lint.score_product(made.folder / graph.file, {"B": 2, "T": 3, "S": 64}) is None
            continue
        heads = 4 if graph.formulation == "kqt-groups" else 16
        found = lint.score_product(made.folder / graph.file, {"B": 2, "T": 3, "S": 64})
        assert found is not None
        assert "scores" in found[0]
        assert found[1] == 2 * rows * 3 * heads * itemsize


def test_scores_that_may_be_fused_do_not_count(tmp_path: Path) -> None:
    narrow = export(ExportRequest("article", tmp_path / "narrow", target="trt-rtx", max_context=64))  # 154 columns
    expanded = export(ExportRequest("deepseek-v2-lite", tmp_path / "expanded", dtype="fp16", target="trt-rtx",
                                    prefill="expanded", max_context=64))
    graphs = [narrow.folder / g.file for g in narrow.graphs]
    graphs += [expanded.folder / g.file for g in expanded.graphs if g.kind == "prefill"]
    assert [lint.score_product(path, {"B": 2, "T": 3, "S": 64}) for path in graphs] == [None] * len(graphs)


def test_scores_count_in_the_narrower_dtype_on_their_way(tmp_path: Path) -> None:
    """A product's kernel may cast as it writes, so only the cast's bytes are certain."""
    nodes = [helper.make_node("MatMul", ["a", "b"], ["scores"]),
             helper.make_node("Cast", ["scores"], ["half"], to=TensorProto.FLOAT16),
             helper.make_node("Softmax", ["half"], ["y"])]
    values = [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["B", 300]),
              helper.make_tensor_value_info("b", TensorProto.FLOAT, [300, "S"]),
              helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["B", "S"])]
    graph = helper.make_graph(nodes, "cast", values[:2], values[2:])
    path = tmp_path / "cast.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    assert lint.score_product(path, {"B": 5, "S": 7}) == ("scores", 5 * 7 * 2)
