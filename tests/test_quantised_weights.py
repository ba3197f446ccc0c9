"""Weights as codes: rounding to the nearest, what the file holds, and that audit and parity find what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from engines import trt as door
from engines.backends import open_session
from engines.cache import LatentCache
from exporter import inspection, quantise
from exporter.__main__ import cli
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export
from exporter.quantise import Scheme, quantise_plan, quantised, scheme_for
from exporter.safetensors_file import read_header
from exporter.signature import Range, profile
from exporter.weight_file import PlannedTensor, write_weights
from tests.marks import slow
from tests.model_checkpoints import tiny_checkpoint
from tests.quantised_checkpoints import Checkpoint
from validate import weight_audit
from validate.ladder import Ladder
from validate.metrics import TOLERANCES
from validate.model_parity import check as check_whole
from validate.parity import Answers, check
from validate.quantised_weights import decode
from validate.references import load_tensors

RNG = np.random.default_rng(17)
TENSORRT = {"fp8": scheme_for("fp8", "trt"), "int4": scheme_for("int4", "trt")}
EVERY = [*TENSORRT.values(), *(scheme_for(name, "ort", 64) for name in ("int8", "int4"))]
NAMES = ["narrow-deepseek-v3", "narrow-deepseek-v2-lite", "narrow-longcat-flash", "article"]


def packed(codes: np.ndarray) -> np.ndarray:
    """Bytes of int4 numbers, written out: the first of each pair in the low half."""
    flat = codes.reshape(-1).tolist()
    return np.array([(a & 15) + 16 * (b & 15) for a, b in zip(flat[::2], flat[1::2], strict=True)],
                    np.uint8).reshape(*codes.shape[:-1], -1)


# ---- the arithmetic


def named(value: object) -> str:
    return f"{value.name}-{value.operator}" if isinstance(value, Scheme) else str(value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", EVERY, ids=named)
def test_every_value_is_rounded_to_the_nearest_code(scheme: Scheme, dtype: str) -> None:
    """Against every code there is: none is nearer. Rows span eleven orders of magnitude, one is zero, one block too."""
    w = (RNG.standard_normal((24, 128)) * np.logspace(-9, 2, 24)[:, None]).astype(np.float32)
    w[5], w[6, 64:] = 0, 0
    if dtype != "fp16":
        w[7] *= 1e8
    codes, scale = quantised(w, scheme, dtype)
    assert scale.dtype == DTYPES[dtype].numpy
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    half = {"int8": 128, "int4": 8}.get(scheme.name, 0)
    grid = np.arange(-half, half) if half else every[np.isfinite(every)]
    factors = np.repeat(scale.astype(np.float64), 128 // scale.shape[1], axis=1)
    nearest = np.abs(grid * factors[..., None] - w[..., None]).min(-1)
    numbers = codes.astype(np.float64) - scheme.zero
    # a quotient that float32 rounds to the middle of two codes may take the other one
    np.testing.assert_allclose(np.abs(numbers * factors - w), nearest, rtol=1e-5, atol=0)
    assert not numbers[5].any()
    assert (scale[5] == 0).all()
    if scheme.zero:  # every block's largest magnitude has the lowest code, and nothing is lost of it
        blocks = w.reshape(24, scale.shape[1], -1)
        assert (codes.reshape(blocks.shape).min(-1) == 0)[np.abs(scale) > 2**-14].all()  # float16 has coarser ones


def test_decoding_means_what_ml_dtypes_means() -> None:
    raw = np.arange(256, dtype=np.uint8)
    fp8 = decode(raw.reshape(2, 128), np.array([1.0, 0.5]), "fp8")
    expected = raw.view(ml_dtypes.float8_e4m3fn).astype(np.float64).reshape(2, 128) * [[1.0], [0.5]]
    np.testing.assert_array_equal(fp8.values, expected)
    whole = RNG.integers(-8, 8, (3, 64))
    scale = RNG.random((3, 2))
    int4 = decode(packed(whole), scale, "int4")
    np.testing.assert_array_equal(int4.values, whole * np.repeat(scale, 32, 1))
    assert (int4.half_step == np.repeat(scale, 32, 1) / 2).all()
    for scheme, bits in (("int4", 4), ("int8", 8)):  # as ONNX Runtime counts them
        codes = RNG.integers(0, 2**bits, (3, 64))
        stored = packed(codes) if bits == 4 else codes.astype(np.uint8)
        np.testing.assert_array_equal(decode(stored, scale, scheme, from_zero=True).values,
                                      (codes - 2 ** (bits - 1)) * np.repeat(scale, 32, 1))


def planned(name: str, values: np.ndarray, dtype: str = "fp16") -> PlannedTensor:
    return PlannedTensor(name, values.shape, dtype, lambda: values, projection=True)


@pytest.mark.parametrize("scheme", EVERY, ids=named)
def test_written_in_bands_and_by_experts_it_is_the_same(scheme: Scheme, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    matrix, stack = RNG.standard_normal((40, 64)), RNG.standard_normal((3, 10, 64))
    plan = [planned("m.weight", matrix), PlannedTensor("s", stack.shape, "fp16", lambda: iter(stack[:, None]),
                                                       projection=True)]
    files = []
    for band in (1 << 20, 64 * 7):
        monkeypatch.setattr(quantise, "_BAND", band)
        path = tmp_path / f"{band}.safetensors"
        write_weights(path, quantise_plan(plan, scheme), lambda *progress: None)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    found = load_file(tmp_path / f"{band}.safetensors")
    for name, values in (("m.weight", matrix), ("s", stack)):
        codes, scale = quantised(values, scheme, "fp16")
        raw = packed(codes) if scheme.name == "int4" else codes.view(np.uint8)
        np.testing.assert_array_equal(found[name].view(torch.uint8).numpy(), raw)
        np.testing.assert_array_equal(found[f"{name}_scale"].numpy().reshape(scale.shape), scale)


def test_the_scales_alone_can_be_made() -> None:
    codes, scales = quantise_plan([planned("m.weight", RNG.standard_normal((4, 64)))], TENSORRT["int4"])
    first = scales.make()
    list(codes.make())
    np.testing.assert_array_equal(first, scales.make())


@pytest.mark.parametrize(("value", "words"), [(np.nan, "1 of 256 values are NaN or infinite"),
                                              (np.inf, "1 of 256 values are NaN or infinite"),
                                              (1e6, "1 of 256 values are too large for fp16")])
def test_what_cannot_be_quantised_is_named(value: float, words: str, tmp_path: Path) -> None:
    values = RNG.standard_normal((4, 64)).astype(np.float32)
    values[2, 3] = value
    with pytest.raises(InputError, match=f"tensor q_proj.weight: {words}"):
        write_weights(tmp_path / "w", quantise_plan([planned("q_proj.weight", values)], TENSORRT["fp8"]),
                      lambda *progress: None)


# ---- exports


def made_from(name: str, out: Path, **options: Any) -> Export:
    return export(ExportRequest(name, out, **{"max_context": 100, "target": "trt"} | options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", TENSORRT)
@pytest.mark.parametrize("name", NAMES)
def test_the_audit_passes_and_the_manifest_says_what_was_done(name: str, scheme: str, dtype: str, tmp_path: Path,
                                                              narrow: list[str]) -> None:
    made = made_from(name, tmp_path / "e", quantise=scheme, dtype=dtype, prefill="expanded")
    result = weight_audit.audit(made, load_tensors(made.data["source"], made.config))
    assert result.wide.within(TOLERANCES[dtype])
    assert result.codes is not None
    assert 0.9 < result.codes.rel <= 1
    stored, said = read_header(made.folder / "weights.safetensors"), made.data["weights"]["quantised"]
    assert set(said["tensors"]) == {n for n, t in stored.items() if t.dtype == ("F8_E4M3" if scheme == "fp8" else "U8")}
    assert {"kv_a_proj.weight"} <= set(said["tensors"])
    assert not {"w_uk", "w_uv", "kv_b"} & {*said["tensors"], *said["wide"]}
    assert said["bytes_after"] == sum(t.nbytes for t in stored.values())
    wide = made_from(name, tmp_path / "wide", dtype=dtype, prefill="expanded").data["weights"]["bytes"]
    assert said["bytes_before"] == wide > said["bytes_after"]


Fault = Callable[[dict[str, np.ndarray]], None]


def _nibbles(raw: dict[str, np.ndarray]) -> None:
    codes = raw["q_a_proj.weight"]
    codes[:] = codes << 4 | codes >> 4


def _scales_shifted(raw: dict[str, np.ndarray]) -> None:
    scale = raw["q_a_proj.weight_scale"].view(np.float32)
    scale[:] = np.roll(scale, 1)


def _stale_block(raw: dict[str, np.ndarray]) -> None:
    codes = raw["q_a_proj.weight"]
    codes[:16] = codes[16:32]


def _coarse_block(raw: dict[str, np.ndarray]) -> None:
    """Twice the scale and half the codes: each value is where it was, but the grid is coarser than it need be."""
    raw["q_a_proj.weight_scale"].view(np.float32)[0] *= 2


def _negated(raw: dict[str, np.ndarray]) -> None:
    raw["q_a_proj.weight_scale"].view(np.float32)[3] *= -1


@pytest.mark.parametrize(("scheme", "fault"), [("int4", _nibbles), ("int4", _scales_shifted), ("int4", _stale_block),
                                               ("int4", _coarse_block), ("fp8", _scales_shifted), ("fp8", _stale_block),
                                               ("fp8", _coarse_block), ("fp8", _negated)],
                         ids=lambda x: x if isinstance(x, str) else x.__name__.strip("_"))
def test_the_audit_finds_a_planted_fault(scheme: str, fault: Fault, tmp_path: Path, narrow: list[str]) -> None:
    made = made_from("narrow-deepseek-v3", tmp_path / "e", quantise=scheme)
    tensors = load_tensors(made.data["source"], made.config)
    path = made.folder / "weights.safetensors"
    data = np.memmap(path, np.uint8, "r+")
    fault({n: data[t.offset:t.offset + t.nbytes] for n, t in read_header(path).items()})
    data.flush()
    ladder = Ladder()
    weight_audit.rungs(made, tensors, ladder)
    by_name = {r.name: r for r in ladder.rungs}
    assert by_name["weights"].passed
    assert not by_name["weights/codes"].passed
    assert "q_a_proj.weight" in by_name["weights/codes"].note


def test_the_audit_misses_no_scales(tmp_path: Path, narrow: list[str]) -> None:
    made = made_from("narrow-deepseek-v3", tmp_path / "e", quantise="fp8")
    path = made.folder / "weights.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"q_a_proj.weight_scale"', b'"q_a_proj.weight_scalE"'))
    ladder = Ladder()
    weight_audit.rungs(made, load_tensors(made.data["source"], made.config), ladder)
    assert [r.passed for r in ladder.rungs] == [False]


@pytest.mark.parametrize("scheme", TENSORRT)
@pytest.mark.parametrize("name", ["narrow-deepseek-v3", "article"])
def test_parity_judges_wiring_and_tells_the_quantisation(name: str, scheme: str, tmp_path: Path, narrow: list[str]
                                                         ) -> None:
    made = made_from(name, tmp_path / "e", quantise=scheme)
    ladder = Ladder()
    check(made, ladder, Answers.of(made, 0), backends=["interpreter", "ort"])
    assert ladder.passed, ladder.failure
    assert {r.name.split("/")[0] for r in ladder.rungs} >= {"interpreter", "ort"}
    lost = next(r for r in ladder.rungs if r.name == "quantisation")
    assert 0.1 < lost.rel < lost.tolerance
    assert f"{scheme} weights, " in lost.note


def test_parity_finds_a_graph_that_takes_anothers_scales(tmp_path: Path, narrow: list[str]) -> None:
    """The file is as it should be, so the audit passes; what the graph does with it is not."""
    def plant(model: onnx.ModelProto) -> None:
        scale = next(t for t in model.graph.initializer if t.name == "q_b_proj.weight_scale")
        offset = next(e for e in scale.external_data if e.key == "offset")
        offset.value = str(int(offset.value) + 4)  # the next row's

    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "e", quantise="fp8", target="trt", max_context=100),
                  tamper=Tamper(graph=plant))
    ladder = Ladder()
    check(made, ladder, Answers.of(made, 0), backends=["interpreter"])
    verdicts = {r.name: r.passed for r in ladder.rungs if r.graph in ("-", "decode.kqt")}
    assert verdicts["weights/codes"]
    assert not verdicts["interpreter/decode"]


@pytest.mark.parametrize(("options", "words"), [
    ({"quantise": "int3"}, "--quantise 'int3': expected one of fp8, int8, int4"),
    ({"quantise": "fp8"}, "--quantise fp8 with --target ort: expected int8 or int4; ONNX Runtime's CPU has no fp8"),
    ({"quantise": "int8", "target": "trt"}, "--quantise int8 with --target trt: expected fp8 or int4; int8 is for"),
    ({"quantise": "int8", "target": "trt-rtx"}, "--quantise int8 with --target trt-rtx: expected fp8 or int4"),
    ({"quantise": "int4", "block_size": 48}, "--block-size 48: expected one of 16, 32, 64, 128"),
    ({"quantise": "int4", "accuracy_level": 3}, "--accuracy-level 3: expected one of 1, 4"),
    ({"quantise": "int4", "block_size": 64, "target": "trt"}, "--block-size 64 with --target trt: it is of MatMul"),
    ({"accuracy_level": 4}, "--accuracy-level 4 with no --quantise: it is of MatMulNBits; give --target ort and"),
    ({"quantise": "int4", "scope": "model", "experts": "dense"}, "--quantise int4 with --target ort and --experts"),
    ({"quantise": "fp8", "absorb": "folded"}, "--quantise fp8 with --absorb folded: products of weights stay wide"),
    ({"quantise": "int4", "merge_q": True}, "--quantise int4 with --merge-q: products of weights stay wide")])
def test_what_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ExportRequest("article", Path("x"), **options)


def test_the_command_says_it(tmp_path: Path, narrow: list[str]) -> None:
    made = CliRunner().invoke(cli, ["export", "narrow-deepseek-v3", "--out", str(tmp_path / "e"), "--quantise", "int4",
                                    "--max-context", "64", "--target", "trt"])
    assert made.exit_code == 0, made.output
    text = " ".join(made.output.split())
    assert "2 matrices are int4 (blocks of 32)" in text
    assert "2 matrices stay wide, no block size divides their rows: o_proj.weight, q_b_proj.weight" in text
    shown = CliRunner().invoke(cli, ["inspect", str(tmp_path / "e"), "--json"])
    assert json.loads(shown.stdout)["weights"]["quantised"]["tensors"] == {"kv_a_proj.weight": 32,
                                                                          "q_a_proj.weight": 32}


# ---- whole models


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"), "v3", layers=2, hidden_size=128, moe_intermediate_size=64)


@pytest.mark.parametrize(("scheme", "options", "experts"), [
    ("fp8", {"experts": "gather", "target": "trt"}, True), ("int4", {"experts": "gather", "target": "trt"}, True),
    ("fp8", {"experts": "dense"}, True), ("int4", {"experts": "dense"}, True)],
    ids=lambda x: x if isinstance(x, str) else "-".join(x.values()) if isinstance(x, dict) else "")
def test_a_models_graphs_compute_with_what_the_codes_mean(tiny: Path, scheme: str, options: dict[str, Any],
                                                          experts: bool, tmp_path: Path) -> None:
    made = made_from(str(tiny), tmp_path / "e", quantise=scheme, **options)
    ladder = Ladder()
    check_whole(made, ladder, 0, backends=["interpreter", "ort"])
    assert ladder.passed, ladder.failure
    said = made.data["weights"]["quantised"]
    assert any(".experts." in n for n in said["tensors"]) == experts
    assert any(".experts." in n for n in said["wide"]) != experts
    assert (said["share"] > 0.5) == experts
    lost = next(r for r in ladder.rungs if r.name == "quantisation")
    assert not lost.counted
    assert lost.cosine > 0.5


def test_the_audit_finds_one_experts_block(tiny: Path, tmp_path: Path) -> None:
    made = made_from(str(tiny), tmp_path / "e", quantise="int4", experts="dense")
    path = made.folder / "weights.safetensors"
    at = read_header(path)["layers.1.mlp.experts.up"]
    data = np.memmap(path, np.uint8, "r+")
    data[at.offset + at.nbytes // 2:][:8] ^= 0x44
    data.flush()
    result = weight_audit.audit_model(made, made.decoder)
    assert result.codes is not None
    assert result.codes.rel > 1
    assert result.worst_codes.startswith("layers.1.mlp.experts.up[")


def test_linked_weights_leave_out_what_is_quantised(tiny: Path, tmp_path: Path) -> None:
    made = made_from(str(tiny), tmp_path / "e", quantise="fp8", weights="link", experts="dense")
    own = set(read_header(made.folder / "weights.safetensors"))
    said = made.data["weights"]
    assert {*said["quantised"]["tensors"], *(f"{n}_scale" for n in said["quantised"]["tensors"])} <= own
    assert "embed_tokens.weight" not in own
    assert said["written_bytes"] < said["bytes"]
    ladder = Ladder()
    check_whole(made, ladder, 0, backends=["interpreter"])
    assert ladder.passed, ladder.failure


def test_a_quantised_checkpoint_is_quantised_anew_and_says_so(tiny: Path, tmp_path: Path) -> None:
    stored = Checkpoint.read(tiny).fp8_block((32, 32))
    stored.write(tmp_path / "fp8")
    made = made_from(str(tmp_path / "fp8"), tmp_path / "e", quantise="fp8")
    codes = made.data["source"]["dequantised_tensors"]
    assert codes == sum(n.endswith("_scale_inv") for n in stored.tensors)
    assert any(n.startswith(f"{codes} tensors of the checkpoint were quantised already")
               for n in inspection.weight_notes(made.data))
    plain = made_from(str(tiny), tmp_path / "p", quantise="fp8")
    assert "dequantised_tensors" not in plain.data["source"]
    name = "layers.0.attn.q_a_proj.weight"
    own, scale = (read_header(made.folder / "weights.safetensors")[n].load_raw() for n in (name, f"{name}_scale"))
    exact = stored.exact["model.layers.0.self_attn.q_a_proj.weight"].float().numpy()
    assert np.abs(own.astype(np.float32) * scale[:, None] - exact).max() <= np.abs(exact).max() * 0.04


def test_without_weights_the_plan_is_told(tiny: Path, tmp_path: Path) -> None:
    made = made_from(str(tiny), tmp_path / "e", quantise="int4", weights="none", experts="dense")
    with_them = made_from(str(tiny), tmp_path / "f", quantise="int4", experts="dense")
    assert made.data["weights"]["quantised"] == with_them.data["weights"]["quantised"]


# ---- TensorRT


@pytest.mark.skipif(not door.available("trt-rtx"), reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
@pytest.mark.parametrize(("scheme", "experts"), [("fp8", "gather"), ("int4", "dense"), *slow([
    ("fp8", "dense"), ("int4", "gather")])])
def test_tensorrt_builds_and_reads_them(tiny: Path, scheme: str, experts: str, tmp_path: Path) -> None:
    """The builder takes every graph (its lint too), plans are smaller by what the codes save, and the network that it
    parsed computes what the reference does."""
    from engines.build import BuildRequest, build_elsewhere
    from validate.network import check as check_network

    options: dict[str, Any] = {"dtype": "fp16", "target": "trt-rtx", "experts": experts}
    made = made_from(str(tiny), tmp_path / "e", quantise=scheme, **options)
    wide = made_from(str(tiny), tmp_path / "w", **options)
    sizes = {"max_batch": 2, "max_context": 64, "chunk": 16, "formulation": "kqt"}
    ours, theirs = (build_elsewhere(m, BuildRequest(m.folder, **sizes)) for m in (made, wide))
    for a, b in zip(ours, theirs, strict=True):
        assert a.weight_bytes < 0.7 * b.weight_bytes
    result = check_network(made, backend="trt-rtx", seed=0, only=["decode.kqt"])
    assert result.passed, result.failure


@pytest.mark.slow
@pytest.mark.skipif(not door.available("trt-rtx"), reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
@pytest.mark.parametrize("scheme", TENSORRT)
def test_an_engine_for_one_token_holds_no_wide_copies(scheme: str, tmp_path: Path) -> None:
    """Dequantised per channel, the three projections' 23 MB would stand beside the step."""
    found = []
    for name in (scheme, None):
        made = made_from("deepseek-v2-lite", tmp_path / str(name), quantise=name, dtype="fp16", target="trt-rtx")
        graph = made.graph("decode")
        one = {n: Range(1, 1, 100 if n == "S" else 1) for n in ("B", "T", "S")}
        found.append(door.build("trt-rtx", made.folder / graph.file, [profile(graph.inputs, one)]))
    assert found[0].activation_bytes < found[1].activation_bytes + 12e6
    assert found[0].weight_bytes < 0.62 * found[1].weight_bytes


def test_a_session_runs_them(tmp_path: Path, narrow: list[str]) -> None:
    made = made_from("narrow-deepseek-v3", tmp_path / "e", quantise="int4")
    hidden = RNG.standard_normal((1, 5, made.config.hidden_size)).astype(np.float32)
    found = []
    for backend in ("ort", "interpreter"):
        with open_session(made, "prefill", backend) as session:
            found.append(session.infer({"hidden_states": hidden, **LatentCache(made, 1, 16).feed()})["attn_output"])
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5 * found[0].std())
