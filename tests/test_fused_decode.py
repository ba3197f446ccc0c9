"""`--fused-decode`: what is exported, what it computes (by the interpreter: no library needed), what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from engines import operator_library
from engines.__main__ import cli
from engines.backends import BACKENDS
from engines.build import build
from engines.build_request import BuildRequest
from engines.interpreter_session import InterpreterSession
from engines.onnx_ops import OPERATORS, Value
from engines.ort import OrtSession
from engines.ort_cuda import CudaOrtSession
from engines.triton import TritonRequest, write_model
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, Tamper, export
from exporter.formulations import BY_NAME, fused
from exporter.inspection import weight_notes
from exporter.manifest import Export
from exporter.presets import PRESETS
from tests.model_checkpoints import tiny_checkpoint
from validate.metrics import TOLERANCES, compare
from validate.node_products import Products, Shape
from validate.parity import TAIL
from validate.references import load_tensors
from validate.traces import TraceMaker

MODEL, CONTEXT = "narrow-fused", 600
BROKEN = 1e-2
Make = Callable[..., Export]


@pytest.fixture(scope="module", autouse=True)
def preset() -> Iterator[None]:
    """A narrow layer of DeepSeek-V3 with its RoPE; a latent that no vector divides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, MODEL, replace(
            PRESETS["deepseek-v3"], hidden_size=96, num_attention_heads=5, q_lora_rank=40, kv_lora_rank=36,
            qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20))
        yield


@pytest.fixture(scope="module")
def make(preset: None, tmp_path_factory: pytest.TempPathFactory) -> Make:
    def made(tamper: Tamper | None = None, **options: Any) -> Export:
        folder = tmp_path_factory.mktemp("export") / "x"
        return export(ExportRequest(MODEL, folder, **{"max_context": CONTEXT} | options), tamper=tamper)

    return made


@pytest.fixture(scope="module")
def made(make: Make) -> Export:
    return make(fused_decode=True)


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No library is to be found."""
    monkeypatch.delenv(operator_library.VARIABLE, raising=False)
    monkeypatch.setattr(operator_library, "FOLDER", tmp_path / "operator")
    return tmp_path / "operator" / operator_library.NAME


def operators(made: Export, name: str) -> list[onnx.NodeProto]:
    graph = onnx.load(made.folder / made.graph("decode", name).file, load_external_data=False).graph
    return [node for node in graph.node if node.domain == fused.DOMAIN]


def test_one_graph_more_and_the_others_as_they_were(made: Export, make: Make) -> None:
    plain = make()
    names = {graph.name for graph in made.graphs} - {graph.name for graph in plain.graphs}
    assert names == {"decode.fused"}
    assert made.graph("decode").name == "decode.fused"
    assert plain.graph("decode").name == "decode.qkt"
    for graph in plain.graphs:
        assert (made.folder / graph.file).read_bytes() == (plain.folder / graph.file).read_bytes()
    (node,) = operators(made, "fused")
    assert (node.op_type, onnx.helper.get_attribute_value(node.attribute[0])) == ("LatentAttention", 36)
    assert made.row_multiple == 1


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("lengths", [(500,), (0,), (317, 0, 1, 500, 64)])
@pytest.mark.parametrize("seed", [0, 1])
def test_against_float64(made: Export, tokens: int, lengths: Sequence[int], seed: int) -> None:
    assert error(made, lengths, tokens, seed) <= TOLERANCES["fp32"].rel


def error(made: Export, lengths: Sequence[int], tokens: int, seed: int) -> float:
    """rel of the fused graph from float64's, rows beyond the lengths spoilt."""
    tensors = load_tensors({"kind": "preset", "name": MODEL, "seed": 0}, PRESETS[MODEL])
    maker = TraceMaker(PRESETS[MODEL], tensors, max_context=CONTEXT, dtype="fp32", seed=seed, causal=True)
    trace = maker.trace("fused", "decode", [("decode", tokens, None)], batch=len(lengths), lengths=lengths)
    assert trace.start_rows is not None
    assert trace.start_lengths is not None
    past = np.full((trace.batch, CONTEXT, made.config.row_dim), TAIL, np.float32)
    for b, n in enumerate(trace.start_lengths):
        past[b, :n] = trace.start_rows[b, :n]
    with InterpreterSession(made, made.graph("decode", "fused")) as session:
        feed = {"hidden_states": trace.steps[0].hidden, "past_latent.0": past, "past_lengths": trace.start_lengths}
        return compare(session.infer(feed)["attn_output"], trace.steps[0].expected).rel


def _shorter(model: onnx.ModelProto) -> None:
    """One number of the latent fewer is mixed, and the last is 0."""
    for node in model.graph.node:
        if node.domain == fused.DOMAIN:
            node.attribute[0].i -= 1
            mixed, node.output[0] = node.output[0], "short"
            at = list(model.graph.node).index(node)
            pads = onnx.numpy_helper.from_array(np.array([0, 0, 0, 0, 0, 1]), "one_more")
            model.graph.initializer.append(pads)
            model.graph.node.insert(at + 1, onnx.helper.make_node("Pad", ["short", "one_more"], [mixed], name="pad"))
            return


def test_a_planted_fault_shows(make: Make) -> None:
    assert error(make(fused_decode=True, tamper=Tamper(graph=_shorter)), (317, 40), 1, 0) > BROKEN


def test_the_operator_alone_by_hand(made: Export) -> None:
    """Two sequences, two tokens of two heads, rows of two numbers of which one is mixed."""
    q = torch.tensor([[[1.0, 0], [0, 1], [0, 0], [1, 1]], [[0, 0], [0, 0], [0, 0], [0, 0]]])
    past = torch.tensor([[[2.0, 1], [4, 3]], [[8, 8], [9, 9]]])
    new = torch.tensor([[[1.0, 0], [3, 5]], [[5, 1], [7, 1]]])
    values = [Value(q, q.dtype), Value(past, q.dtype), Value(torch.tensor([1, 0]), torch.int64), Value(new, q.dtype)]
    mixed = OPERATORS["mla:LatentAttention"].call(*values, latent=1).data
    e = np.exp
    first = [(2 * e(2) + e(1)) / (e(2) + e(1)), (2 * e(1) + 1) / (e(1) + 1)]
    second = [(2 + 1 + 3) / 3, (2 * e(3) + e(1) + 3 * e(8)) / (e(3) + e(1) + e(8))]
    np.testing.assert_allclose(mixed[..., 0], [first + second, [5, 5, 6, 6]], rtol=1e-6)


@pytest.mark.parametrize(("options", "words"), [
    ({"target": "trt"}, "--target trt"), ({"dtype": "fp16"}, "--dtype fp16"),
    ({"cache": "concat"}, "--cache concat"), ({"cache": "scatter"}, "--cache scatter"),
    ({"cache_dtype": "int8"}, "--cache-dtype int8"), ({"causal": False}, "--causal off")])
def test_what_the_operator_does_not_take_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--fused-decode with " + words):
        ExportRequest(MODEL, tmp_path / "x", max_context=64, fused_decode=True, **options)


def test_without_the_library(made: Export, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = made.graph("decode")
    for given, why in ((None, f"{nowhere} does not exist"), ("/no/such.so", "MLA_OPERATOR is /no/such.so, which is")):
        if given:
            monkeypatch.setenv(operator_library.VARIABLE, given)
        with pytest.raises(InputError, match="python -m engines operator --build") as refused:
            OrtSession(made, graph)
        assert why in str(refused.value)
        assert operator_library.missing() == str(refused.value)
    OrtSession(made, made.graph("decode", "qkt"))  # the others need none
    shown = CliRunner().invoke(cli, ["operator"])
    assert isinstance(shown.exception, InputError)


def test_what_is_wrong_with_the_variable_is_said(made: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(operator_library.VARIABLE, str(tmp_path / "none.so"))
    with pytest.raises(InputError, match="unset MLA_OPERATOR, or let it name the library; build it"):
        operator_library.library()
    with pytest.raises(InputError, match="no library of the operator"):  # bad input, before a process is started
        build(BuildRequest(made.folder, "ort"))


def test_triton_has_no_such_operator(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "v3", "v3")
    model = export(ExportRequest(str(checkpoint), tmp_path / "model", max_context=64, fused_decode=True))
    with pytest.raises(InputError, match=r"decode.fused.onnx: has the operator .* --formulation qkt"):
        write_model(TritonRequest(model.folder, tmp_path / "repository"))
    assert not (tmp_path / "repository").exists()


def test_the_export_says_that_it_needs_a_library(made: Export, make: Make) -> None:
    assert any("python -m engines operator --build" in note for note in weight_notes(made.data))
    assert not any("operator" in note for note in weight_notes(make().data))


def test_a_library_that_is_none(made: Export, nowhere: Path) -> None:
    nowhere.parent.mkdir()
    nowhere.write_bytes(b"no library")
    with pytest.raises(InputError, match="ONNX Runtime does not take it"):
        OrtSession(made, made.graph("decode"))


def test_it_is_for_the_cpu(made: Export) -> None:
    with pytest.raises(InputError, match=r"for the CPU; use --backend ort"):
        CudaOrtSession(made, made.graph("decode"))
    takers = {b.name for b in BACKENDS.values() if BY_NAME["fused"].dtypes.get(b.target)}
    assert takers >= {"ort", "interpreter"}
    assert not takers & {"trt", "trt-rtx"}


def test_a_build_that_fails_says_what_ran(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_library, "build_line", lambda: "echo compiling && exit 3")
    failed = CliRunner().invoke(cli, ["operator", "--build"])
    assert isinstance(failed.exception, CheckError)
    assert "ended with 3: echo compiling && exit 3" in str(failed.exception)


def test_what_it_must_read_and_multiply(made: Export) -> None:
    (node,) = operators(made, "fused")
    shapes = [Shape("float", (2, 5, 52)), Shape("float", (2, 100, 52)), Shape("int64", (2,)),
              Shape("float", (2, 1, 52))]
    need = Products(made.folder / made.graph("decode").file).need(node.name, shapes, Shape("float", (2, 5, 36)))
    assert need is not None
    assert need.bytes == 4 * 2 * 52 * (5 + 100 + 1)
    assert need.flops == 2 * 2 * 5 * 101 * (52 + 36)


def test_the_sources_of_the_operator_are_part_of_the_package() -> None:
    folder = Path(operator_library.__file__).parent / "cpp"
    assert (folder / "operator" / "latent_attention.cpp").is_file()
    assert os.path.relpath(folder / "operator") in operator_library.build_line()
