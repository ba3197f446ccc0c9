"""Where a step's time goes: every node has a part, times and needs are what was run, the suite, its tables and chart.

Nothing here asserts a time.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from exporter.errors import CheckError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests.model_checkpoints import tiny_checkpoint
from tests.test_cli import run_json
from tests.test_model_bench import place_of
from tests.test_synthetic import tiny
from validate import bench_charts, bench_tables, llama_peer, mobius_peer, profile_tables
from validate.bench_rows import Result, Run
from validate.bench_subjects import variants
from validate.floor import Need, Probe, Rates
from validate.node_parts import PARTS, REST, exported_name, part_of
from validate.node_products import OPERATORS, Products, Shape, nodes_of
from validate.profile_bench import bench_profile
from validate.step_profile import Node, Profile, Step, read_steps
from validate.synthetic import write_checkpoint

UNCLASSIFIED = 0.05
LAYERS, HEADS, LATENT, ROPE, NOPE, V, HIDDEN, INNER = 3, 4, 16, 10, 20, 12, 64, 96
MOE = {"first_k_dense_replace": 1, "moe_intermediate_size": 32}  # which blocks of 32 divide


# --- Every node has a part --------------------------------------------------------------------------------------------


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("v3", {}), "dense": ("minicpm3", {}), "shortcut": ("longcat", {}), "tempered": ("mistral4", {}),
    "output norm": ("axk1", {}), "no query rank": ("v2-lite", {}), "scatter": ("v3", {"cache": "scatter"}),
    "concat": ("v3", {"cache": "concat"}), "int8": ("v3", {"quantise": "int8", "block_size": 16}),
    "int4": ("longcat", {"quantise": "int4", "block_size": 16}), "8-bit cache": ("v3", {"cache_dtype": "int8"}),
    "all logits": ("v3", {"logits": "all"})}


@pytest.mark.parametrize(("family", "options"), KINDS.values(), ids=KINDS)
def test_the_nodes_of_default_decode_graphs_have_parts(tmp_path: Path, family: str, options: dict[str, Any]) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", family)
    made = export(ExportRequest(str(checkpoint), tmp_path / "out", scope="model", max_context=64, **options))
    graph = onnx.load(made.folder / made.graph("decode").file, load_external_data=False).graph
    nodes = list(nodes_of(graph))
    for some in (nodes, [n for n in nodes if n.op_type in OPERATORS]):
        without = [n.name for n in some if part_of(n.name) == REST]
        assert len(without) <= UNCLASSIFIED * len(some), without
    found = {part_of(n.name) for n in nodes if n.op_type in OPERATORS}
    assert {"attention projections", "scores", "mix", "head"} <= found <= {
        "attention projections", "scores", "mix", "head", "experts", "feed-forward"}


@pytest.mark.parametrize(("name", "part"), [
    ("layers/3/attn/core/past_scores_by_row/MatmulTransposeFusion/", "scores"),
    ("layers/3/attn/core/join_scores", "softmax and masks"),
    ("layers/3/attn/core/past_pieces/mix", "mix"),
    ("layers/3/attn/core/past_mix_by_query", "mix"),
    ("layers/3/attn/core/past_probs_by_query", "softmax and masks"),
    ("layers/3/attn/core/past_queries_as_columns", "scores"),
    ("layers/3/attn/core/query_4d", "scores"),
    ("layers/3/attn/1/core/past_pieces", "cache rows"),
    ("shared/past_visible_2/within_length", "softmax and masks"),
    ("shared/last_rows/row", "positions"),
    ("fused layers/1/router/logits", "experts"),
    ("layers/1/shared/mlp.shared.up_proj", "feed-forward"),
    ("layers/0/hidden_silu/QuickGeluFusion/", "feed-forward"),
    ("layers/0/hidden_of_last", "norms and residuals"),
    ("query/absorb_w_uk", "attention projections"),  # of one attention alone
    ("layers/0/attn/core/wonder", REST), ("InsertedCast_x", REST)])
def test_parts_are_told_by_names(name: str, part: str) -> None:
    assert part_of(name) == part
    assert part in PARTS


def test_a_fused_node_goes_by_the_name_it_was_exported_with() -> None:
    assert exported_name("layers/0/attn/query/absorb_w_uk/MatmulTransposeFusion/") == "layers/0/attn/query/absorb_w_uk"
    assert exported_name("fused layers/1/router/logits") == "layers/1/router/logits"
    assert exported_name("head") == "head"


# --- A profile read ---------------------------------------------------------------------------------------------------


@pytest.fixture
def branching(tmp_path: Path) -> Path:
    """ONNX Runtime's profile of 3 steps of a graph with a branch of two nodes, and one more."""
    def branch(name: str) -> onnx.GraphProto:
        nodes = [helper.make_node("MatMul", ["x", "w"], [f"{name}0"], name=f"core/{name}_mix"),
                 helper.make_node("Relu", [f"{name}0"], [f"{name}1"], name=f"core/{name}_softmax")]
        return helper.make_graph(nodes, name, [], [helper.make_tensor_value_info(f"{name}1", TensorProto.FLOAT, None)])

    nodes = [helper.make_node("If", ["c"], ["y"], name="core/wonder", then_branch=branch("a"),
                              else_branch=branch("b")), helper.make_node("Relu", ["y"], ["z"], name="norm")]
    sides = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 256]),
             helper.make_tensor_value_info("c", TensorProto.BOOL, []),
             helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
    weight = onnx.numpy_helper.from_array(np.ones((256, 512), np.float32), "w")
    model = helper.make_model(helper.make_graph(nodes, "g", sides[:2], sides[2:], [weight]), ir_version=10,
                              opset_imports=[helper.make_opsetid("", 21)])
    onnx.save(model, tmp_path / "branching.onnx")
    settings = ort.SessionOptions()
    settings.enable_profiling, settings.profile_file_prefix = True, str(tmp_path / "profile")
    settings.log_severity_level = 3
    session: Any = ort.InferenceSession(str(tmp_path / "branching.onnx"), settings,
                                        providers=["CPUExecutionProvider"])
    for _ in range(3):
        session.run(None, {"x": np.ones((64, 256), np.float32), "c": np.array(True)})
    return Path(session.end_profiling())


def test_a_branch_counts_without_what_is_in_it(branching: Path) -> None:
    steps = read_steps(branching, 2)
    assert len(steps) == 2
    for step in steps:
        assert [(n.name, n.operator) for n in step.nodes] == [
            ("core/wonder", "If"), ("core/a_mix", "MatMul"), ("core/a_softmax", "Relu"), ("norm", "Relu")]
        assert 0 < sum(n.ms for n in step.nodes) <= step.ms
    events = json.loads(branching.read_text())
    whole = [e["dur"] for e in events if e["name"] == "core/wonder_kernel_time"][-1] / 1e3
    assert sum(n.ms for n in steps[-1].nodes[:3]) == pytest.approx(whole)
    with pytest.raises(CheckError, match="has 3 steps; expected at least 4"):
        read_steps(branching, 4)


def test_a_product_within_a_branch_has_a_need(branching: Path) -> None:
    profile = Profile.of(read_steps(branching, 2), Products(branching.with_name("branching.onnx")), "s", 1, 1, 1.0,
                         Need(1, 1))
    mix = next(p for p in profile.parts if p.part == "mix")
    assert (mix.need_bytes, mix.flops) == (4 * (256 * 512 + 64 * 256), 2 * 64 * 256 * 512)


def test_nodes_without_a_part_are_shown_by_name(branching: Path) -> None:
    """Those of more than 2 % alone; parts and operators are medians of each step's sums."""
    products = Products(branching.with_name("branching.onnx"))
    steps = [Step(20.0, (Node("layers/0/attn/core/wonder", "Foo", ms), Node("layers/1/attn/core/wonder", "Foo", 2.0),
                         Node("layers/1/attn/core/small", "Bar", 0.1), Node("norm", "Relu", 6.0)))
             for ms in (1.0, 2.0, 90.0)]
    profile = Profile.of(steps, products, "s", 8, 1, 5.0, Need(1, 1))
    assert [(p.part, p.ms, p.nodes) for p in profile.parts] == [("norms and residuals", 6.0, 1),
                                                                (REST, pytest.approx(4.1), 3)]
    assert profile.nodes_ms == pytest.approx(10.1)
    assert sum(p.share for p in profile.parts) == pytest.approx(1)
    assert [s.name for s in profile.unnamed] == ["layers/0/attn/core/wonder", "layers/1/attn/core/wonder"]
    assert [(o.name, o.ms, o.nodes) for o in profile.operators] == [("Relu", 6.0, 1), ("Foo", 4.0, 2), ("Bar", 0.1, 1)]
    lines = profile_tables.part_rows({"profile": [profile.to_dict()]})
    assert ["rest: layers/0/attn/core/wonder", 1, 8, "2", "19.8 %"] in [line[1:6] for line in lines]


# --- The suite --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("profile") / "tiny", tiny(**MOE), "fp32")


def profiled(checkpoint: Path, work: Path, contexts: list[int], batches: list[int], **place: Any,
             ) -> tuple[Result, Export]:
    with Probe(1, read_bytes=1 << 20) as probe:
        run, at = Run(Result(1), probe, rounds=1, budget_s=0.01), place_of(checkpoint, work, **place)
        bench_profile(run, at, contexts, batches)
        run.result.finish(probe.rates())
    run.result.models["profile"] = "tiny"
    return run.result, at.ours()


@pytest.fixture(scope="module")
def taken(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Result, Export]]:
    before = set(Path(tempfile.gettempdir()).glob("mla-profile-*"))
    yield profiled(checkpoint, tmp_path_factory.mktemp("work"), [40, 80], [2])
    assert not set(Path(tempfile.gettempdir()).glob("mla-profile-*")) - before


def test_a_step_is_told_by_part_and_by_operator(taken: tuple[Result, Export]) -> None:
    result, _ = taken
    assert [(r.suite, r.subject, r.batch, r.context) for r in result.rows] == [
        ("profile", "mla-export, qkt (default)", 2, c) for c in (40, 80)]
    assert all(r.outputs_equal and r.rel == 0 and r.ratio_to_floor for r in result.rows)
    for row, profile in zip(result.rows, result.profiles, strict=True):
        assert (profile.subject, profile.batch, profile.context) == (row.subject, row.batch, row.context)
        assert profile.timed_ms == row.ms
        assert profile.steps >= 3
        assert 0 < profile.nodes_ms < profile.ms * 2
        for some in (profile.parts, profile.operators):
            assert sum(s.share for s in some) == pytest.approx(1)
        assert sum(p.ms for p in profile.parts) == pytest.approx(profile.nodes_ms)
        nodes = sum(p.nodes for p in profile.parts)
        assert nodes == sum(o.nodes for o in profile.operators) > 100
        assert sum(p.share for p in profile.parts if p.part == REST) <= UNCLASSIFIED
        assert not profile.unnamed
        with_products = {p.part for p in profile.parts if p.achieved}
        assert with_products == {"attention projections", "scores", "mix", "experts", "feed-forward", "head"}
        assert all((p.floor_ms is not None) == (p.part in with_products) for p in profile.parts)
        assert [p.part for p in profile.parts] == sorted((p.part for p in profile.parts), key=PARTS.index)


def test_products_need_what_their_weights_and_rows_are(taken: tuple[Result, Export]) -> None:
    """Against the shapes: 2 sequences, 40 rows of past; float32; the first layer dense, the others of 4 experts."""
    profile, N, rows = taken[0].profiles[0], 2, 40
    parts = {p.part: p for p in profile.parts}
    row, queries = LATENT + ROPE, N * HEADS
    scores = LAYERS * (rows + 1)
    assert parts["scores"].flops == 2 * scores * queries * row
    assert parts["scores"].need_bytes == 4 * (scores * N * row + 2 * LAYERS * queries * row)  # past and new rows
    # a formulation may mix rows in pieces, and sum those up
    assert 1 <= (parts["mix"].flops or 0) / (2 * scores * queries * row) < 1.1
    assert 1 <= (parts["mix"].need_bytes or 0) / (4 * scores * (N * row + queries)) < 1.1
    matrices = (24 * HIDDEN, 24 * HEADS * (NOPE + ROPE), HIDDEN * row, HEADS * NOPE * LATENT, HEADS * LATENT * V,
                HEADS * V * HIDDEN)
    read = (HIDDEN, 24, HIDDEN, HEADS * NOPE, HEADS * LATENT, HEADS * V)
    assert parts["attention projections"].flops == 2 * LAYERS * N * sum(matrices)
    assert parts["attention projections"].need_bytes == 4 * LAYERS * (sum(matrices) + N * sum(read))
    one = taken[1].decoder.moe
    assert one is not None
    inner = (INNER, one.shared_intermediate_size, one.shared_intermediate_size)
    assert parts["feed-forward"].flops == 2 * N * 3 * HIDDEN * sum(inner)
    assert parts["feed-forward"].need_bytes == 4 * sum(3 * HIDDEN * i + N * (2 * HIDDEN + i) for i in inner)
    expert, E, k = 3 * HIDDEN * 32, one.n_routed_experts, one.num_experts_per_tok
    router = E * HIDDEN
    assert parts["experts"].flops == 2 * 2 * N * (k * expert + router)
    touched = E * (1 - (1 - k / E) ** N)
    assert parts["experts"].need_bytes == pytest.approx(2 * 4 * (touched * expert + router + 2 * N * HIDDEN))


@pytest.mark.parametrize(("scheme", "bits"), [("int8", 8), ("int4", 4)])
def test_codes_are_read_as_they_are_stored(checkpoint: Path, tmp_path: Path, scheme: str, bits: int) -> None:
    result, _ = profiled(checkpoint, tmp_path, [40], [1], variants=variants([scheme]))
    plain, coded = result.profiles
    assert coded.subject == f"mla-export {scheme}, qkt (default)"
    assert {"MatMulNBits", "QMoE"} <= {o.name for o in coded.operators}
    assert not {"MatMulNBits", "QMoE"} & {o.name for o in plain.operators}
    needs = [{p.part: p for p in profile.parts} for profile in (plain, coded)]
    for part in ("attention projections", "experts", "feed-forward", "head", "scores", "mix"):
        assert needs[0][part].flops == needs[1][part].flops
    head = needs[1]["head"]
    assert head.need_bytes == 128 * HIDDEN * bits / 8 + 4 * 128 * HIDDEN / 32 + 4 * HIDDEN
    assert (needs[1]["experts"].need_bytes or 0) < 0.5 * (needs[0]["experts"].need_bytes or 0)


def test_a_product_that_does_not_say_its_sizes_has_no_need(taken: tuple[Result, Export]) -> None:
    made = taken[1]
    products = Products(made.folder / made.graph("decode").file)
    out = Shape("float", (1, 16, 8))
    assert products.need("layers/0/attn/core/past_mix", [Shape("float", (1, 16, 30))], out) is None
    assert products.need("norm", [out], out) is None
    assert products.need("layers/0/attn/core/past_mix", [Shape("float", (1, 16, 30)), Shape("float", (1, 30, 8))],
                         out) == Need(4 * (16 * 30 + 30 * 8), 2 * 16 * 30 * 8)
    assert prod(out.sizes) == out.count == out.nbytes // 4


def test_a_part_is_read_as_fast_as_the_whole_step() -> None:
    """A part that fits a cache is read anew in every step, behind all the others."""
    rates = Rates(read=10e9, read_median=9e9, read_bytes=1 << 30, flops=100e9, flops_median=90e9, product="p",
                  near={1_000_000: 50e9, 8_000_000: 20e9})
    assert rates.part_floor(Need(1e6, 0), 8e6).ms == pytest.approx(0.05)
    assert rates.part_floor(Need(1e6, 0), 9e6).ms == pytest.approx(0.1)
    assert rates.floor(Need(1e6, 0)).ms == pytest.approx(0.02)


# --- How it looks -----------------------------------------------------------------------------------------------------


def test_tables_and_chart(taken: tuple[Result, Export], tmp_path: Path) -> None:
    data = json.loads(json.dumps(taken[0].to_dict()))
    page = bench_tables.page_tables(data)["bench-profile"]
    assert "A decode step of tiny, and as ONNX Runtime's profile has it" in page
    assert page.count("| mla-export, qkt (default) | attention projections | 2 |") == 2
    assert re.search(r"\| mla-export, qkt \(default\) \| Gemm \| 2 \| 40 \| \d+ \| ", page)
    for table in bench_tables.TABLES["profile"]:
        assert {len(row) for row in table.rows(data)} == {len(table.columns)}
    (chart,) = profile_tables.bars(data)
    assert [bar.label for bar in chart.bars] == ["2 x 40 rows", "2 x 80 rows"]
    shown = [name for name in profile_tables.SHOWN if name != "scores to mix"]  # of an operator, which this has not
    assert list(chart.names) == [*shown, profile_tables.OTHERS]
    for bar, profile in zip(chart.bars, data["profile"], strict=True):
        assert sum(bar.pieces) == pytest.approx(profile["nodes_ms"])
    assert [p.name for p in bench_charts.write(data, tmp_path)] == ["profile.svg"]
    ElementTree.parse(tmp_path / "profile.svg")


def test_a_part_has_its_colour_in_every_chart(taken: tuple[Result, Export]) -> None:
    """Beside a graph that attends by one operator."""
    data = json.loads(json.dumps(taken[0].to_dict()))
    other = json.loads(json.dumps(data["profile"][0])) | {"subject": "fused"}
    for part in other["parts"]:
        part["part"] = {"mix": "scores to mix", "scores": "scores to mix"}.get(part["part"], part["part"])
    data["profile"].append(other)
    plain, fused = profile_tables.bars(data)
    assert "scores to mix" in fused.names
    assert {"scores to mix"} == set(fused.names) - set(plain.names)
    looks = [dict(zip(chart.names, chart.looks or (), strict=True)) for chart in (plain, fused)]
    assert len(set(looks[0].values())) == len(plain.names)
    assert all(looks[0][name] == looks[1][name] for name in set(plain.names) & set(fused.names))


def test_the_command_needs_no_peer(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from validate.bench_command import bench

    def never(*_: Any) -> Path:
        raise AssertionError

    for peer in (mobius_peer, llama_peer):
        monkeypatch.setattr(peer, "install", never)
    page, out = tmp_path / "page.md", tmp_path / "out"
    page.write_text("<!-- bench-profile:begin -->\n<!-- bench-profile:end -->\n")
    words = ["--suite", "profile", "--checkpoint", str(checkpoint), "--context", "24", "--rounds", "1", "--budget", "0",
             "--threads", "1", "--out", str(out), "--update", str(page), "--json"]
    done = CliRunner().invoke(bench, words, catch_exceptions=False)
    data = json.loads(done.stdout)
    assert (data["suites"], data["not_run"], len(data["profile"])) == (["profile"], [], 1)
    assert sorted(p.name for p in out.iterdir()) == ["bench.json", "profile.svg"]
    written = page.read_text()
    assert "| mla-export, qkt (default) | scores | 1 | 24 |" in written
    page.write_text("<!-- bench-profile:begin -->\n<!-- bench-profile:end -->\n")
    again = run_json("validate", "bench", "--from", str(out / "bench.json"), "--update", str(page), "--out",
                     str(tmp_path / "again"))
    assert again == data
    assert page.read_text() == written
    assert (tmp_path / "again" / "profile.svg").read_bytes() == (out / "profile.svg").read_bytes()
