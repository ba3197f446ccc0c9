"""ONNX Runtime decodes over a long past in pieces: against float64, whether or not the pieces divide the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest

from engines.cache import LatentCache
from engines.interpreter_session import InterpreterSession
from engines.ort import OrtOptions, OrtSession
from exporter.export import ExportRequest, Tamper, export
from exporter.formulations.qkt import LEAST_ROWS, MOST_HEADS, PIECES
from exporter.manifest import Export
from exporter.presets import PRESETS
from validate.metrics import TOLERANCES, compare
from validate.parity import TAIL
from validate.references import load_tensors
from validate.traces import Trace, TraceMaker

MODEL, CONTEXT = "narrow-pieces", 5000
BROKEN = 1e-2
SESSIONS = {"ort": lambda made, graph: OrtSession(made, graph, OrtOptions(threads=2)),
            "interpreter": InterpreterSession}
Make = Callable[..., Export]


@pytest.fixture(scope="module", autouse=True)
def preset() -> Iterator[None]:
    """A narrow layer of DeepSeek-V3 with its RoPE."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, MODEL, replace(
            PRESETS["deepseek-v3"], hidden_size=96, num_attention_heads=4, q_lora_rank=40, kv_lora_rank=32,
            qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20))
        yield


@pytest.fixture(scope="module")
def make(preset: None, tmp_path_factory: pytest.TempPathFactory) -> Make:
    def made(tamper: Tamper | None = None, **options: Any) -> Export:
        request = ExportRequest(MODEL, tmp_path_factory.mktemp("export") / "x", **{"max_context": CONTEXT} | options)
        return export(request, tamper=tamper)

    return made


@pytest.fixture(scope="module")
def made(make: Make) -> Export:
    return make()


@pytest.fixture(scope="module")
def maker(preset: None) -> TraceMaker:
    tensors = load_tensors({"kind": "preset", "name": MODEL, "seed": 0}, PRESETS[MODEL])
    return TraceMaker(PRESETS[MODEL], tensors, max_context=CONTEXT, dtype="fp32", seed=0, causal=True)


def answer(made: Export, trace: Trace, rows: int, backend: str) -> np.ndarray:
    """The decode graph's output of the trace's one step behind `rows` rows, those beyond each length spoilt."""
    assert trace.start_rows is not None
    assert trace.start_lengths is not None
    past = np.full((trace.batch, rows, made.config.row_dim), TAIL, np.float32)
    for b, n in enumerate(trace.start_lengths):
        past[b, :n] = trace.start_rows[b, :n]
    with SESSIONS[backend](made, made.graph("decode", "qkt")) as session:
        feed = {"hidden_states": trace.steps[0].hidden, "past_latent.0": past, "past_lengths": trace.start_lengths}
        return session.infer(feed)["attn_output"]


def error(made: Export, maker: TraceMaker, lengths: Sequence[int], rows: int, backend: str, tokens: int = 1) -> float:
    """rel of the graph's answer from float64's."""
    trace = maker.trace("pieces", "decode", [("decode", tokens, None)], batch=len(lengths), lengths=lengths)
    return compare(answer(made, trace, rows, backend), trace.steps[0].expected).rel


@pytest.mark.parametrize("backend", SESSIONS)
@pytest.mark.parametrize(("lengths", "rows", "tokens"), [
    ((LEAST_ROWS,), LEAST_ROWS, 1), ((2500,), 2528, 1), ((2500,), 2528, 3),  # in pieces
    ((2500,), 2500, 1), ((2500,), 2501, 3), ((2047,), 2047, 1), ((1000,), 1024, 1),  # in one
    ((2200, 0, 1, 917), 2208, 1), ((2200, 0, 1, 917), 2208, 2), ((2200, 0, 1, 917), 2209, 1), ((0,), 2048, 1),
])
def test_against_float64(made: Export, maker: TraceMaker, lengths: tuple[int, ...], rows: int, tokens: int,
                         backend: str) -> None:
    assert error(made, maker, lengths, rows, backend, tokens) <= TOLERANCES["fp32"].rel


def _halve(model: onnx.ModelProto) -> None:
    """The pieces are summed by halves: wrong only where there are several."""
    for node in model.graph.node:
        if node.op_type == "ConstantOfShape":  # decode.qkt alone has one
            node.attribute[0].t.float_data[0] = 0.5


def test_a_wrong_sum_shows(make: Make, maker: TraceMaker) -> None:
    assert error(make(tamper=Tamper(graph=_halve)), maker, (2500,), 2528, "ort") > BROKEN


@pytest.mark.parametrize(("rows", "pieces"), [
    (LEAST_ROWS, PIECES), (4096, PIECES), (2528, PIECES), (2529, 1), (LEAST_ROWS - PIECES, 1), (32, 1), (1, 1)])
def test_how_many_pieces(made: Export, rows: int, pieces: int) -> None:
    """As ONNX Runtime computes it from the shape."""
    import onnxruntime as ort

    path = made.folder / made.graph("decode", "qkt").file
    model = onnx.load(path, load_external_data=False)
    keep = {n.output[0]: n for n in model.graph.node}
    wanted, nodes = ["shared/past_pieces/count"], []
    while wanted:  # the nodes that it is made of
        node = keep.get(wanted.pop())
        if node is not None and node not in nodes:
            nodes.insert(0, node)
            wanted += node.input
    small = [t for t in model.graph.initializer if t.data_location != onnx.TensorProto.EXTERNAL]
    graph = onnx.helper.make_graph(sorted(nodes, key=list(model.graph.node).index), "count",
                                   [i for i in model.graph.input if i.name == "past_latent.0"],
                                   [onnx.helper.make_tensor_value_info("shared/past_pieces/count", 7, [1])], small)
    cut = onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    session = ort.InferenceSession(cut.SerializeToString(), providers=["CPUExecutionProvider"])
    past = np.zeros((1, rows, made.config.row_dim), np.float32)
    assert session.run(None, {"past_latent.0": past})[0].tolist() == [pieces]


def test_a_cache_offers_rows_that_the_pieces_divide(made: Export) -> None:
    cache = LatentCache(made, 1, 2300)
    assert made.row_multiple == PIECES
    for length, rows in ((0, 32), (1, 32), (32, 32), (33, 64), (2048, 2048), (2049, 2080), (2290, 2300), (2300, 2300)):
        cache.lengths[:] = length
        past = cache.feed()["past_latent.0"]
        assert (past.shape[1], past.ctypes.data) == (rows, cache.rows.ctypes.data)
    assert LatentCache(made, 2, 2300).feed()["past_latent.0"].shape[1] == 2300


def test_only_where_it_is_worth_it(make: Make, made: Export) -> None:
    """A multiple of rows is asked for where the default decode graph goes in pieces, and nowhere else."""
    assert make(target="trt", dtype="fp16").row_multiple == 1
    assert make(cache="scatter").row_multiple == make(cache="concat").row_multiple == 1
    many = dict(made.data)
    del many["row_multiple"]  # an export of before
    assert Export(made.folder, many, made.config, made.graphs).row_multiple == 1


def test_many_heads_go_in_one_piece(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, MODEL, replace(PRESETS[MODEL], num_attention_heads=MOST_HEADS + 4))
    wide = make()
    assert wide.row_multiple == 1
    names = [n.name for n in onnx.load(wide.folder / "decode.qkt.onnx", load_external_data=False).graph.node]
    assert "core/past_mix_sum" not in names
    tensors = load_tensors({"kind": "preset", "name": MODEL, "seed": 0}, PRESETS[MODEL])
    maker = TraceMaker(PRESETS[MODEL], tensors, max_context=CONTEXT, dtype="fp32", seed=0, causal=True)
    assert error(wide, maker, (2500, 7), 2528, "ort") <= TOLERANCES["fp32"].rel


def test_tensorrt_graphs_know_no_pieces(make: Make) -> None:
    folder = make(target="trt", dtype="fp16").folder
    for path in folder.glob("*.onnx"):
        names = [n.name for n in onnx.load(path, load_external_data=False).graph.node]
        assert not [n for n in names if "_piece" in n], path.name
