"""Weights as codes that ONNX Runtime multiplies by itself: MatMulNBits and QMoE, on hot models of many families."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from engines.backends import open_session
from engines.cache import LatentCache
from engines.interpreter import Interpreter
from engines.plan import PlanRequest, plan
from exporter import inspection, weight_file
from exporter.__main__ import cli
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export
from exporter.safetensors_file import read_header
from tests.marks import fast, slow
from tests.model_checkpoints import tiny_checkpoint
from validate import absorption
from validate.doctor import DoctorRequest, examine
from validate.ladder import Ladder
from validate.model_parity import check as check_whole
from validate.parity import Answers, check

RNG = np.random.default_rng(31)
SCHEMES = ("int8", "int4")
LAYERS = ("narrow-deepseek-v3", "narrow-deepseek-v2-lite", "narrow-longcat-flash", "article")
# a query of low rank or not, grouped and free routers, identity experts, a tied head, no experts, biases
FAMILIES = (("v3", 0), ("v2-lite", 1), ("v3-bias", 2), ("longcat", 4), ("youtu", 4), ("minicpm3", 5), ("glm4", 6),
            ("mistral4", 7))


# ---- the operators alone


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [..., n] as bytes; of four bits the first of each pair in the low half."""
    if bits == 8:
        return codes.astype(np.uint8)
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), codes.dtype)], -1)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8)


def product_graph(path: Path, bits: int, block: int, columns: int, out: int, zero: str, bias: bool) -> np.ndarray:
    """A graph of one MatMulNBits over random codes; returns the weights [out, columns] that they mean."""
    blocks = -(-columns // block)
    codes = RNG.integers(0, 2**bits, (out, blocks, block))
    scales = RNG.uniform(0.5, 1.5, (out, blocks)).astype(np.float32)
    zeros = {"none": np.full((out, blocks), 2 ** (bits - 1)), "packed": RNG.integers(0, 2**bits, (out, blocks)),
             "float": RNG.uniform(0, 2**bits, (out, blocks)).astype(np.float32)}[zero]
    constants = {"b": packed(codes, bits), "scales": scales, "bias": RNG.standard_normal(out).astype(np.float32)}
    if zero != "none":
        constants["zeros"] = zeros if zero == "float" else packed(zeros, bits)
    inputs = ["a", "b", "scales", "zeros" if zero != "none" else "", "", "bias" if bias else ""]
    node = helper.make_node("MatMulNBits", inputs, ["y"], domain="com.microsoft", K=columns, N=out, bits=bits,
                            block_size=block, accuracy_level=1)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("a", TensorProto.FLOAT, ["M", columns])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["M", out])],
        [numpy_helper.from_array(v, k) for k, v in constants.items() if bias or k != "bias"])
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("com.microsoft", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=11), path)
    return ((codes - zeros[..., None]) * scales[..., None].astype(np.float64)).reshape(out, -1)[:, :columns]


@pytest.mark.parametrize(("bits", "block", "columns", "zero", "bias"), [
    (4, 32, 96, "none", False), (4, 16, 40, "none", True), (4, 64, 160, "packed", False), (4, 32, 70, "packed", True),
    (8, 32, 96, "none", True), (8, 128, 256, "none", False), (8, 32, 96, "packed", False), (4, 32, 64, "float", False)])
def test_the_interpreter_means_what_onnx_runtime_means(bits: int, block: int, columns: int, zero: str, bias: bool,
                                                       tmp_path: Path) -> None:
    weights = product_graph(tmp_path / "g.onnx", bits, block, columns, 24, zero, bias)
    a = RNG.standard_normal((5, columns)).astype(np.float32)
    found = Interpreter(tmp_path / "g.onnx").run({"a": a})["y"]
    session = ort.InferenceSession(str(tmp_path / "g.onnx"), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"a": a})
    shift = np.zeros(24) if not bias else next(
        numpy_helper.to_array(t) for t in onnx.load(tmp_path / "g.onnx").graph.initializer if t.name == "bias")
    exact = a.astype(np.float64) @ weights.T + shift
    for one in (found, theirs):
        assert np.abs(one - exact).max() / exact.std() < 2e-6


# ---- exports


def made_from(name: str | Path, out: Path, **options: Any) -> Export:
    return export(ExportRequest(str(name), out, **{"max_context": 100} | options))


def climbed(made: Export, backends: list[str] | None = None, seed: int = 0) -> Ladder:
    ladder = Ladder()
    runtimes = backends or ["interpreter", "ort"]
    if made.contract == "model":
        check_whole(made, ladder, seed, backends=runtimes)
    else:
        check(made, ladder, Answers.of(made, seed), backends=runtimes)
    return ladder


def tiny(folder: Path, name: str, seed: int = 0) -> Path:
    """Two layers whose rows blocks of 32 divide, experts too."""
    wide = {"hidden_size": 128, "intermediate_size": 96}
    if name == "longcat":
        wide |= {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 64}
    elif name not in ("youtu", "minicpm3"):
        wide |= {"moe_intermediate_size": 64}
    return tiny_checkpoint(folder, name, layers=2, seed=seed, **wide)


def operators(made: Export) -> list[str]:
    model = onnx.load(made.folder / made.graph("decode").file, load_external_data=False)
    return [n.op_type for n in model.graph.node]


ONE = [(name, scheme, level) for name in LAYERS for scheme in SCHEMES for level in (1, 4)]


@pytest.mark.parametrize(("name", "scheme", "level"), fast(ONE, ONE[::3]))  # each name, scheme and level
def test_one_attention(name: str, scheme: str, level: int, tmp_path: Path, narrow: list[str]) -> None:
    """At level 1 both runtimes agree with the decoded weights to float32; at 4 ONNX Runtime rounds activations, the
    interpreter does not."""
    made = made_from(name, tmp_path / "e", quantise=scheme, accuracy_level=level)
    ladder = climbed(made)
    assert ladder.passed, ladder.failure
    runs = {b: max(r.rel for r in ladder.rungs if r.name.startswith(f"{b}/")) for b in ("interpreter", "ort")}
    assert runs["interpreter"] < 3e-5
    assert (runs["ort"] < 3e-5) == (level == 1)
    wide = made_from(name, tmp_path / "w")
    for ours, theirs in zip(made.graphs, wide.graphs, strict=True):
        assert (ours.inputs, ours.outputs) == (theirs.inputs, theirs.outputs)
    coded = len(made.data["weights"]["quantised"]["tensors"])
    assert operators(made).count("MatMulNBits") == coded == operators(wide).count("Gemm")


@pytest.mark.parametrize(("scheme", "name", "seed"), fast(
    [(scheme, *family) for scheme in SCHEMES for family in FAMILIES],
    [("int8", "v3", 0), ("int8", "minicpm3", 5), ("int4", "v3-bias", 2), ("int4", "v2-lite", 1)]))
def test_whole_models(scheme: str, name: str, seed: int, tmp_path: Path) -> None:
    made = made_from(tiny(tmp_path / "c", name, seed), tmp_path / "e", quantise=scheme, accuracy_level=1)
    ladder = climbed(made, seed=seed)
    assert ladder.passed, ladder.failure
    said, decoder = made.data["weights"]["quantised"], made.decoder
    assert ("lm_head.weight" in said["tensors"]) != decoder.tie_word_embeddings
    assert ("QMoE" in operators(made)) == bool(decoder.sparse_layers)
    assert "MoE" not in operators(made)
    assert not {n for n in said["tensors"] if any(part in n for part in ("w_uk", "w_uv", "router", "embed", "norm"))}
    lost = next(r for r in ladder.rungs if r.name == "quantisation")
    assert not lost.counted
    assert lost.cosine > (0.99 if scheme == "int8" else 0.3)


@pytest.mark.parametrize(("seed", "name", "scheme"), fast(
    [(seed, name, scheme) for seed, name in ((1, "v3"), (2, "minicpm3"), (3, "v2-lite"), (4, "longcat"))
     for scheme in SCHEMES], [(1, "v3", "int8"), (2, "minicpm3", "int4"), (3, "v2-lite", "int4")]))
def test_whole_models_with_int8_activations(name: str, seed: int, scheme: str, tmp_path: Path) -> None:
    """The interpreter judges wiring and codes as ever; ONNX Runtime's own rounding has a tolerance, and what it costs
    against the source is told."""
    made = made_from(tiny(tmp_path / "c", name, seed), tmp_path / "e", quantise=scheme)
    assert made.data["weights"]["quantised"]["accuracy_level"] == 4
    ladder = climbed(made, seed=seed)
    assert ladder.passed, ladder.failure
    told = [r for r in ladder.rungs if r.name == "ort/decode/quantisation"]
    assert told
    assert all(not r.counted and r.top1 is not None and r.kl is not None for r in told)
    assert max(r.rel for r in ladder.rungs if r.name.startswith("interpreter/decode")) < 1e-4


@pytest.mark.parametrize("options", [{"dtype": "fp16"}, {"cache": "scatter"}, {"cache_dtype": "int8"},
                                     *slow([{"prefill": "expanded"}, {"block_size": 128}, {"layers": "0:1"},
                                            {"logits": "all"}])], ids=lambda o: "-".join(map(str, o.values())))
def test_options_go_together(options: dict[str, Any], tmp_path: Path) -> None:
    made = made_from(tiny(tmp_path / "c", "v3"), tmp_path / "e", quantise="int4", accuracy_level=1, **options)
    ladder = climbed(made)
    assert ladder.passed, ladder.failure


def test_bytes_are_those_of_codes_and_scales(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "c", "v3")
    for scheme, bits in (("int8", 8), ("int4", 4)):
        made = made_from(checkpoint, tmp_path / scheme, quantise=scheme)
        stored, said = read_header(made.folder / "weights.safetensors"), made.data["weights"]
        for name, block in said["quantised"]["tensors"].items():
            numbers = said["parameters"][name]
            assert stored[name].nbytes == numbers * bits // 8
            assert stored[f"{name}_scale"].nbytes == 4 * numbers // block
            assert prod(stored[f"{name}_scale"].shape) == numbers // block
        assert said["quantised"]["bytes_after"] == sum(t.nbytes for t in stored.values())
        planned = plan(PlanRequest(str(made.folder), memory=8, max_context=64, reserve=0.5))
        rope = sum(t.nbytes for n, t in stored.items() if n.startswith("rope."))
        assert planned["weights"]["bytes"] == said["quantised"]["bytes_after"] - rope
        assert planned["coded_head"]


def test_experts_of_unlike_rows_stay_wide(tmp_path: Path) -> None:
    """QMoE takes one block size: rows of 128 and of 48 values have none in common but 16."""
    source = tiny_checkpoint(tmp_path / "c", "v3", layers=2, hidden_size=128, moe_intermediate_size=48)
    made = made_from(source, tmp_path / "e", quantise="int4", accuracy_level=1)
    assert "MoE" in operators(made)
    said = made.data["weights"]["quantised"]
    assert not [n for n in said["tensors"] if ".experts." in n]
    assert "experts stay wide: QMoE takes one, and no block size divides their rows alike" in " ".join(
        inspection.weight_notes(made.data))
    alike = made_from(source, tmp_path / "f", quantise="int4", accuracy_level=1, block_size=16)
    assert "QMoE" in operators(alike)
    ladder = climbed(made)
    assert ladder.passed, ladder.failure


# ---- planted faults


def of_neighbour(model: onnx.ModelProto) -> None:
    """A graph that takes the scales of the next block."""
    scale = next(t for t in model.graph.initializer if t.name == "kv_a_proj.weight_scale")
    offset = next(e for e in scale.external_data if e.key == "offset")
    offset.value = str(int(offset.value) + 4)


def another_zero(model: onnx.ModelProto) -> None:
    """A graph whose codes have one more for zero."""
    node = next(n for n in model.graph.node if n.op_type == "MatMulNBits")
    columns = next(a.i for a in node.attribute if a.name == "K")
    out, block = (next(a.i for a in node.attribute if a.name == n) for n in ("N", "block_size"))
    zeros = numpy_helper.from_array(np.full((out, columns // block), 9, np.float32), "zeros")
    model.graph.initializer.append(zeros)
    node.input.append("zeros")


@pytest.mark.parametrize("level", [1, 4])
@pytest.mark.parametrize("fault", [of_neighbour, another_zero], ids=lambda f: f.__name__)
def test_parity_finds_a_graph_that_reads_codes_otherwise(fault: Callable[[onnx.ModelProto], None], level: int,
                                                         tmp_path: Path, narrow: list[str]) -> None:
    """The file is as it should be, so the audit passes; what the graphs do with it is not."""
    request = ExportRequest("narrow-deepseek-v3", tmp_path / "e", quantise="int4", accuracy_level=level,
                            max_context=100)
    ladder = climbed(export(request, tamper=Tamper(graph=fault)))
    verdicts = {r.name: r.passed for r in ladder.rungs if r.graph in ("-", "decode.qkt")}
    assert verdicts["weights/codes"]
    assert not verdicts["interpreter/decode"]
    if level == 1:
        assert not verdicts["ort/decode"]


@pytest.mark.parametrize("name", ["narrow-deepseek-v3", "v3"])
def test_parity_finds_swapped_halves(name: str, tmp_path: Path, narrow: list[str], monkeypatch: pytest.MonkeyPatch
                                     ) -> None:
    raw = weight_file._raw

    def swapped(values: np.ndarray, dtype: str) -> np.ndarray:
        found = raw(values, dtype)
        return found << 4 | found >> 4 if dtype == "uint4" else found

    source = name if name.startswith("narrow") else tiny(tmp_path / "c", name)
    monkeypatch.setattr(weight_file, "_raw", swapped)
    ladder = climbed(made_from(source, tmp_path / "e", quantise="int4"), ["interpreter"])
    assert not next(r for r in ladder.rungs if r.name == "weights/codes").passed


def test_the_audit_finds_one_experts_block(tmp_path: Path) -> None:
    made = made_from(tiny(tmp_path / "c", "v3"), tmp_path / "e", quantise="int8")
    path = made.folder / "weights.safetensors"
    at = read_header(path)["layers.1.mlp.experts.gate_up_scale"]
    scales = np.memmap(path, np.float32, "r+", at.offset, (at.nbytes // 4,))
    scales[40], scales[41] = scales[41], scales[40]
    scales.flush()
    audited = next(r for r in climbed(made, ["interpreter"]).rungs if r.name == "weights/codes")
    assert not audited.passed
    assert "layers.1.mlp.experts.gate_up[" in audited.note


# ---- what else looks at such an export


def test_audits_are_not_confused(tmp_path: Path) -> None:
    """W_UK and W_UV are products over wide weights, and the audit sees where they are; the doctor finds nothing."""
    made = made_from(tiny(tmp_path / "c", "v3"), tmp_path / "e", quantise="int4")
    for verdict in absorption.audit(made.folder):
        assert verdict.passed, verdict.findings
        assert verdict.attentions == 2
        assert {name: node.rpartition("/")[2] for name, node in verdict.absorbed_at.items()} == {
            "W_UK": "absorb_w_uk", "W_UV": "absorb_w_uv"}
    report = examine(DoctorRequest(str(made.folder)))
    assert not report.findings


def test_a_session_generates_with_them(tmp_path: Path) -> None:
    made = made_from(tiny(tmp_path / "c", "v3"), tmp_path / "e", quantise="int8", accuracy_level=1)
    tokens, found = RNG.integers(0, made.decoder.vocab_size, (2, 9)), []
    for backend in ("ort", "interpreter"):
        with open_session(made, "prefill", backend) as session:
            feed = {"input_ids": tokens, "last_token": np.array([8, 8]), **LatentCache(made, 2, 16).feed()}
            found.append(session.infer(feed)["logits"])
    assert (found[0].argmax(-1) == found[1].argmax(-1)).all()


def test_the_command_says_it(tmp_path: Path) -> None:
    source, out = tiny(tmp_path / "c", "v3"), str(tmp_path / "e")
    ran = CliRunner().invoke(cli, ["export", str(source), "--out", out, "--quantise", "int4", "--max-context", "64"])
    assert ran.exit_code == 0, ran.output
    text = " ".join(ran.output.split())
    assert "absorption products, embedding, norms and router stay wide" in text
    assert "computed by MatMulNBits, experts by QMoE of ONNX Runtime, accuracy level 4: activations are rounded" in text
    shown = json.loads(CliRunner().invoke(cli, ["inspect", out, "--json"]).stdout)["weights"]["quantised"]
    assert (shown["scheme"], shown["operator"], shown["block_size"]) == ("int4", "MatMulNBits", 32)
    refused = CliRunner().invoke(cli, ["export", str(source), "--out", f"{out}2", "--quantise", "fp8"])
    assert "--quantise fp8 with --target ort: expected int8 or int4" in str(refused.exception)


def test_a_request_says_its_options_again(tmp_path: Path) -> None:
    from exporter.export import arguments

    request = ExportRequest("deepseek-v3", tmp_path, quantise="int4", block_size=64, accuracy_level=1)
    assert arguments(request)[1:] == ["--quantise", "int4", "--block-size", "64", "--accuracy-level", "1"]
    assert replace(request, block_size=None).scheme != request.scheme


@pytest.mark.parametrize("level", fast([1, 4], [4]))
def test_polygraphy_runs_them_at_their_own_tolerance(level: int, tmp_path: Path, narrow: list[str],
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polygraphy", reason="Polygraphy is an extra: pip install 'mla-export[polygraphy]'")
    from validate import polygraphy_run

    monkeypatch.setattr(polygraphy_run.trt, "available", lambda backend: False)
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "e", quantise="int8", accuracy_level=level,
                                max_context=80))
    result = polygraphy_run.run(made.folder)
    assert [g.graph for g in result.graphs if g.passed and g.counted] == [g.name for g in made.graphs]
