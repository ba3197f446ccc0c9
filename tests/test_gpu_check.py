"""The GPU check, on the CPU: every eager rung over a device that counts live tensors, engines over fakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from engines import backends, trt, trt_session
from engines.device_memory import DeviceMemory
from engines.device_steps import _Mirror
from engines.gpus import GPUS
from engines.interpreter_session import InterpreterSession
from engines.roofline import attention_parameters
from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.presets import PRESETS
from tests.fake_tensorrt import Graph
from tests.host_device import HostDevice, LiveTensors
from validate import gpu, gpu_device, gpu_eager, gpu_engines, gpu_tables
from validate.__main__ import cli
from validate.eager import FORMS, AbsorbedStep, cache_bytes, weight_numbers
from validate.faults import FAULTS
from validate.gpu_device import CARDS, CudaDevice, exact_products, sheet
from validate.gpu_rungs import NotRunError, Outcome, Report, Result, Rung, Sizes
from validate.memory import eager_caches
from validate.references import AbsorbedMLA, NaiveMLA, load_tensors

SMALL = Sizes(preset="narrow-deepseek-v2-lite", batch=2, contexts=(64, 300), chunk=48, seeds=(0, 1),
              time_dtypes=("fp32", "bf16"), memory_dtypes=("fp32",), engine_dtypes=("fp16",))
NO_ENGINES = ("trt", "trt-rtx", "ort-cuda")


@pytest.fixture
def device(narrow: list[str]) -> Iterator[HostDevice]:
    meter = LiveTensors()
    with meter:
        yield HostDevice(meter)


@pytest.fixture
def without_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: f"{name}: not run: left out of this test")


def tensors(config: MLAConfig, seed: int = 0) -> dict[str, torch.Tensor]:
    return load_tensors({"kind": "preset", "name": "-", "seed": seed}, config)


# --- Eager steps, all sequences together ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "article"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("rows", "tokens"), [(40, 1), (600, 1), (7, 9)])
def test_step_equals_the_reference(narrow: list[str], name: str, form: str, rows: int, tokens: int) -> None:
    """With biases (the article), with a query low rank (V3); more rows than are filled at once."""
    config = PRESETS[f"narrow-{name}"]
    limit = rows + tokens
    generator = torch.Generator().manual_seed(3)
    past = torch.randn(2, rows, config.row_dim, generator=generator, dtype=torch.float64)
    hidden = torch.randn(2, tokens, config.hidden_size, generator=generator, dtype=torch.float64)
    reference = NaiveMLA(config, tensors(config), max_context=limit)
    reference.seed_rows(past, [rows, rows])
    step = FORMS[form](config, tensors(config), max_context=limit)
    given = iter(past.split(512, dim=1))
    step.load(2, rows, tokens, lambda count: next(given))
    first = step.step(hidden)
    torch.testing.assert_close(first, reference.forward(hidden), rtol=1e-9, atol=1e-9)
    assert torch.equal(step.step(hidden), first)  # nothing moves: every call does the same work


@pytest.mark.parametrize("form", FORMS)
def test_formulas_of_cache_and_weights(narrow: list[str], form: str) -> None:
    config = PRESETS["narrow-deepseek-v2-lite"]
    step = FORMS[form](config, tensors(config), max_context=50, dtype=torch.float16)
    step.load(3, 49, 1, lambda count: torch.zeros(3, count, config.row_dim))
    assert step.held_bytes == cache_bytes(config, form, 3, 50, 2)
    c, H, D = config, config.num_attention_heads, config.hidden_size
    mha = D * H * c.qk_head_dim * 2 + D * H * c.v_head_dim * 2
    numbers = weight_numbers(config, form, attention_parameters(config))
    # an MHA has no latent norm either, whose gain the count keeps
    assert numbers == (mha + c.kv_lora_rank if form == "mha" else attention_parameters(config))


# --- The check as a whole ---------------------------------------------------------------------------------------------


def test_everything_passes_on_a_sound_device(device: HostDevice, without_engines: None, tmp_path: Path) -> None:
    out = tmp_path / "new" / "gpu.json"
    report = gpu.check(out, SMALL, device=device)
    assert not [f"{r.name}: {r.note} {r.figures}" for r in report.results if r.state == "failed"]
    # 1 of facts, 3 traces x 3 dtypes x 3 forms, 2 kinds x 2 contexts x 3 forms, 2 dtypes x 2 contexts x 3 forms, rows
    # of 2 dtypes and a step
    assert (report.count("passed"), report.count("not run")) == (1 + 27 + 12 + 12 + 3, 3)
    data = json.loads(out.read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    assert data["summary"] == "55 passed, 0 failed, 3 not run"
    assert data["pass"] is True
    assert data["settings"]["float32_matmul_precision"] == "highest"
    assert list(out.parent.iterdir()) == [out]
    by_name = {r.name: r for r in report.results}
    assert by_name["device"].figures["sheet_gbs"] == GPUS["h200"].bandwidth_gbs
    far = by_name["parity/absorbed/fp32/far"].figures
    assert 0 < far["rel"] < far["tolerance"] == 3e-5
    assert by_name["parity/mha/bf16/ragged"].figures["rel"] > 1e-3  # rounding is really there
    for rows in SMALL.contexts:
        absorbed, expanding, mha = (by_name[f"memory/{form}/fp32/decode/{rows}"].figures for form in FORMS)
        assert absorbed["cache_bytes"] == expanding["cache_bytes"] == 2 * (rows + 1) * 56 * 4 + 8  # and a position
        assert mha["cache_bytes"] == 2 * (rows + 1) * 12 * (24 + 16 + 20) * 4 + 8
        assert absorbed["step_peak_bytes"] < expanding["step_peak_bytes"]
        assert 1 <= expanding["ratio"] < 1.5
    step = by_name["time/mha/bf16/300"].figures
    assert step["floor_ms"] == pytest.approx(step["floor_bytes"] / 4800e9 * 1e3)
    assert step["ratio"] == pytest.approx(step["ms"] / step["floor_ms"])
    assert (step["steps"], step["bandwidth"]) == (3, "data sheet")


def test_unknown_card_is_measured_against_its_own_copy(device: HostDevice, without_engines: None) -> None:
    device.card = "NVIDIA A10G"
    sizes = Sizes(preset=SMALL.preset, batch=1, contexts=(32,), chunk=8, seeds=(0,), time_dtypes=("fp32",),
                  memory_dtypes=(), engine_dtypes=())
    report = gpu.check(None, sizes, device=device)
    assert report.figure("device", "sheet_gbs") is None
    step = report.figure("time/absorbed/fp32/32", "bandwidth"), report.figure("time/absorbed/fp32/32", "floor_bytes")
    assert step[0] == "measured copy"
    assert report.figure("time/absorbed/fp32/32", "floor_ms") == pytest.approx(step[1] / 4000e9 * 1e3)


class _WrongScale(AbsorbedMLA):
    """The softmax scale of another head width: mscale² left out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.scale = self.config.qk_head_dim**-0.5


class _WrongStep(AbsorbedStep):
    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().step(hidden) * 1.7


def only(device: HostDevice, prefix: str, sizes: Sizes = SMALL) -> list[Result]:
    report = Report(sizes)
    rungs = [r for r in gpu.plan(sizes, device, report) if r.name.startswith(prefix)]
    gpu.climb(rungs, report)
    return report.results


def test_planted_fault_fails(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_eager.LAYERS, "absorbed", _WrongScale)
    found = {r.name: r.state for r in only(device, "parity/")}
    assert all((state == "failed") == ("/absorbed/" in name) for name, state in found.items())


def test_planted_fault_is_not_timed(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMS, "expanding", _WrongStep)
    found = {r.name: r for r in only(device, "time/")}
    for name, r in found.items():
        assert r.state == ("failed" if "/expanding/" in name else "passed")
        assert ("ms" in r.figures) == (r.state == "passed")
    assert found["time/expanding/fp32/64"].note == "its output differs from the other forms'; not timed"


def test_exit_code_of_a_failed_check(narrow: list[str], without_engines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_eager.LAYERS, "mha", _WrongScale)
    sizes = Sizes(preset=SMALL.preset, contexts=(), seeds=(0,), time_dtypes=(), memory_dtypes=(), engine_dtypes=())
    planned = gpu.plan
    some = ("device", "fp32/far")
    monkeypatch.setattr(gpu, "plan", lambda *args: [r for r in planned(*args) if r.name.endswith(some)])
    monkeypatch.setattr(gpu, "Sizes", lambda: sizes)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "CudaDevice", lambda: HostDevice(LiveTensors()))
    result = CliRunner().invoke(cli, ["gpu", "--json"])
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert (data["passed"], data["failed"], data["pass"]) == (3, 1, False)
    text = CliRunner().invoke(cli, ["gpu"])
    assert "FAIL parity/mha/fp32/far" in text.stdout
    assert "3 passed, 1 failed, 0 not run" in text.stdout
    assert str(text.exception) == "GPU check: 3 passed, 1 failed, 0 not run"


class _Blind(HostDevice):
    """Its meter stands still."""

    def peak(self) -> int:
        return self.meter.live


class _Hoarding(HostDevice):
    """Its allocator takes twice what it is asked for."""

    def allocated(self) -> int:
        return 2 * self.meter.live

    def peak(self) -> int:
        return 2 * self.meter.most


@pytest.mark.parametrize(("kind", "note"), [(_Blind, "a peak of 0 B is less than what must be alive together"),
                                            (_Hoarding, "the cache takes 58.3 KB, the formula says 29.1 KB")])
def test_memory_that_contradicts_the_formula_fails(narrow: list[str], kind: type[HostDevice], note: str) -> None:
    with LiveTensors() as meter:
        found = only(kind(meter), "memory/absorbed/fp32/decode/64")
    assert [r.state for r in found] == ["failed"]
    assert found[0].note.startswith(note)


def test_too_large_for_the_device_is_not_run(device: HostDevice) -> None:
    device._free = 50_000
    found = {r.name: r for r in only(device, "memory/")}
    assert found["memory/absorbed/fp32/decode/64"].state == "passed"
    assert found["memory/mha/fp32/decode/300"].state == "not run"
    assert found["memory/mha/fp32/decode/300"].note == "needs 1.8 MB, the device has 50.0 KB free"


# --- Time, exceptions, files ------------------------------------------------------------------------------------------


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_time_budget_stops_new_rungs_by_name() -> None:
    clock, ran = _Clock(), []

    def taking(name: str, seconds: float, budget: float) -> Rung:
        def run(budget_s: float) -> Outcome:
            assert budget_s == budget
            ran.append(name)
            clock.now += seconds
            return Outcome(True)

        return Rung(name, "", budget, run)

    report = Report(Sizes())
    saved: list[int] = []
    gpu.climb([taking("a", 50, 60), taking("b", 60, 60), taking("c", 1, 30), taking("d", 1, 5)], report,
              total_s=115, clock=clock, save=lambda: saved.append(report.count("not run")))
    # a and b leave 5 of the 115 s: c's own budget does not fit, d's does
    assert [(r.name, r.state, r.note, r.seconds) for r in report.results] == [
        ("a", "passed", "", 50), ("b", "passed", "", 60), ("c", "not run", "out of time", 0), ("d", "passed", "", 1)]
    assert ran == ["a", "b", "d"]
    assert saved == [4, 3, 2, 2, 1]  # written before and after every rung, those not reached among them
    assert report.summary == "3 passed, 0 failed, 1 not run"
    assert report.passed


def test_rungs_that_break() -> None:
    def fail(error: Exception) -> Rung:
        def run(budget_s: float) -> Outcome:
            raise error

        return Rung(type(error).__name__, "", 1, run)

    report = Report(Sizes())
    gpu.climb([fail(RuntimeError("CUDA error: an illegal access\nmore")), fail(NotRunError("no such thing here")),
               fail(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has")),
               fail(InputError("cannot"))], report)
    assert [(r.state, r.note) for r in report.results] == [
        ("failed", "RuntimeError: CUDA error: an illegal access"), ("not run", "no such thing here"),
        ("not run", "out of device memory: CUDA out of memory"), ("failed", "InputError: cannot")]
    assert not report.passed


def test_interrupted_check_leaves_what_it_found(device: HostDevice, monkeypatch: pytest.MonkeyPatch,
                                                tmp_path: Path) -> None:
    def stop(self: HostDevice) -> dict[str, Any]:
        raise KeyboardInterrupt

    def rungs(sizes: Sizes, used: Any, report: Report) -> list[Rung]:
        return [Rung("first", "", 1, lambda s: Outcome(True)), Rung("second", "", 1, lambda s: stop(device)),
                Rung("third", "", 1, lambda s: Outcome(True))]

    monkeypatch.setattr(gpu, "plan", rungs)
    with pytest.raises(KeyboardInterrupt):
        gpu.check(tmp_path / "gpu.json", SMALL, device=device)
    data = json.loads((tmp_path / "gpu.json").read_text())
    assert data["summary"] == "1 passed, 0 failed, 2 not run"
    assert {r["note"] for r in data["rungs"][1:]} == {"not reached: the check ended before it"}
    assert list(tmp_path.iterdir()) == [tmp_path / "gpu.json"]


def test_report_of_another_kind_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.json"
    for text in ('{"check": "other"}', "[]", "words"):
        out.write_text(text)
        with pytest.raises(InputError, match=r"gpu\.json exists and is no report of this check, so it is not replaced"):
            gpu.check(out)
        assert out.read_text() == text
    out.unlink()
    gpu.check(out)
    gpu.check(out)  # its own is
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write .*; choose another place"):
        gpu.check(tmp_path / "file" / "gpu.json")


# --- No device --------------------------------------------------------------------------------------------------------


def test_without_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    out = tmp_path / "gpu.json"
    result = CliRunner().invoke(cli, ["gpu", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "0 passed, 0 failed, 73 not run" in result.stdout
    assert "not run: no CUDA device" in result.stdout
    assert "a prefill chunk of 512 tokens, batch 1, 32768 rows of past" in result.stdout
    assert "engine/trt-rtx/bf16" in result.stdout
    data = json.loads(out.read_text())
    assert (data["seconds"], data["pass"]) == (0, False)  # what was not run has not passed
    assert {(r["state"], r["note"]) for r in data["rungs"]} == {("not run", "no CUDA device")}
    as_json = CliRunner().invoke(cli, ["gpu", "--json"])
    assert json.loads(as_json.stdout) == data
    with pytest.raises(InputError, match="not run: no CUDA device"):
        CudaDevice()


def test_tables_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in [n for n in sys.modules if n.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    result = CliRunner().invoke(cli, ["gpu"])
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("0 passed, 0 failed, 73 not run")
    assert "memory/mha/fp16/decode/32768\ta decode step, batch 8, 32768 rows of past" in result.stdout


# --- Engines ----------------------------------------------------------------------------------------------------------


class _Capabilities(Enum):
    NONE = 0
    SM80 = 80
    SM121 = 121


RTX = SimpleNamespace(__version__="1.7.1.116", ComputeCapability=_Capabilities)


@pytest.mark.parametrize(("capability", "reason"), [
    ("9.0", "trt-rtx: not run: TensorRT-RTX 1.7.1.116 does not list compute capability 9.0 (Hopper)"),
    ("99.0", "trt-rtx: not run: TensorRT-RTX 1.7.1.116 does not list compute capability 99.0"),
    ("8.0", None), ("12.1", None)])
def test_capability_that_the_library_does_not_list(capability: str, reason: str | None,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trt, "load", lambda name: RTX)
    assert gpu_engines.why_not("trt-rtx", capability) == reason


def test_installed_tensorrt_rtx_does_not_list_hopper() -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    assert "does not list compute capability 9.0 (Hopper)" in str(gpu_engines.why_not("trt-rtx", "9.0"))
    assert gpu_engines.why_not("trt-rtx", "8.9") is None


def test_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise InputError("its libraries do not load")

    monkeypatch.setattr(trt, "load", missing)
    monkeypatch.setattr(gpu_engines.importlib.util, "find_spec", lambda name: None)
    assert gpu_engines.why_not("trt", "9.0") == "trt: not run: module tensorrt is not installed"
    assert gpu_engines.why_not("ort-cuda", "9.0") == "ort-cuda: not run: module onnxruntime is not installed"
    monkeypatch.setattr(gpu_engines.importlib.util, "find_spec", lambda name: object())
    assert gpu_engines.why_not("trt-rtx", "9.0") == "trt-rtx: not run: its libraries do not load"
    monkeypatch.setattr("engines.ort_cuda.cuda_available", lambda: False)
    assert gpu_engines.why_not("ort-cuda", "9.0") == ("ort-cuda: not run: the installed ONNX Runtime has no "
                                                      "CUDAExecutionProvider")


def test_engine_rungs_are_not_run_by_name(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: f"{name}: not run: {capability} is not known")
    found = {r.name: (r.state, r.note) for r in only(device, "engine/")}
    assert found == {f"engine/{name}/fp16": ("not run", "9.0 is not known") for name in NO_ENGINES}


@pytest.fixture
def ort_engine(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """ort-cuda's rung over ONNX Runtime's CPU, fp32, where it can be judged."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: None)
    row = replace(backends.BACKENDS["ort"], name="ort-cuda")
    monkeypatch.setitem(backends.BACKENDS, "ort-cuda", row)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return device


FP32 = Sizes(preset=SMALL.preset, batch=2, contexts=(64,), seeds=(0,), parity_context=300, engine_dtypes=("fp32",))


def test_engine_rung_runs_parity_and_times(ort_engine: HostDevice) -> None:
    (found,) = only(ort_engine, "engine/ort-cuda", FP32)
    assert (found.state, found.note) == ("passed", "")
    assert found.figures["counted"] > 20
    assert found.figures["rel"] < found.figures["tolerance"]
    assert [step["rows"] for step in found.figures["session"]] == [64]
    assert found.figures["session"][0]["ms"] > 0
    assert "The same through a session" in gpu_tables.plain(Report(FP32, [found]))


def test_a_session_whose_step_changes_fails(ort_engine: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a graph does that reads what another step left: the ladder's steps, which all differ, need not see it."""
    monkeypatch.setattr(gpu_engines, "_rel", lambda found, expected: 0.5)
    (found,) = only(ort_engine, "engine/ort-cuda", FP32)
    assert found.state == "failed"
    assert "the same step again differs by rel 5.0e-01" in found.note


# --- The cache on the device ------------------------------------------------------------------------------------------


def test_a_cache_on_the_device(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of both dtypes and the step pass; then each fault that they are there for is found."""
    found = only(device, "cache/")
    assert [(r.name, r.state, r.note) for r in found] == [
        (name, "passed", "") for name in ("cache/rows/fp32", "cache/rows/bf16", "cache/steps")]
    step = found[-1].figures
    assert (step["graphs"], step["uploaded_bytes"], step["downloaded_bytes"]) == (1, 512, 512)
    assert "512 / 512" in gpu_tables.plain(Report(SMALL, found))

    def shifted(self: DeviceMemory, stack: Any, made: Any, slots: Any, starts: Any, counts: Any) -> None:
        real(self, stack, made, slots, starts + 1, counts)

    real = DeviceMemory.write_rows
    with monkeypatch.context() as patched:
        patched.setattr(DeviceMemory, "write_rows", shifted)
        assert [r.state for r in only(device, "cache/rows")] == ["failed", "failed"]
    with monkeypatch.context() as patched:
        patched.setattr(Graph, "fails", "not permitted")
        (found_step,) = only(device, "cache/steps")
        assert (found_step.state, found_step.note) == ("failed", "no CUDA graph: capture: not permitted")
    with monkeypatch.context() as patched:  # a step that leaves its inputs on the host
        patched.setattr(_Mirror, "upload", lambda self: None)
        (found_step,) = only(device, "cache/steps")
        assert found_step.state == "failed"
        assert "answers differ; bytes up and down [(0, 512)]; expected (512, 512)" in found_step.note


def test_engine_rung_fails_with_a_wrong_export(ort_engine: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "export", lambda request: export(request, tamper=FAULTS["mscale-dropped"].tamper))
    (found,) = only(ort_engine, "engine/ort-cuda", FP32)
    assert found.state == "failed"
    assert "ort-cuda/prefill rel" in found.note
    assert "steps" not in found.figures


def test_engine_rung_that_ran_no_graph_has_not_passed(ort_engine: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "check", lambda *args, **kwargs: None)
    (found,) = only(ort_engine, "engine/ort-cuda", FP32)
    assert (found.state, found.note) == ("not run", "no reason given")


def test_onnx_runtime_that_cannot_open_a_graph_is_not_run(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("engines.ort_cuda.cuda_available", lambda: False)
    (found,) = only(device, "engine/ort-cuda", replace(FP32, engine_dtypes=("bf16",)))
    assert found.state == "not run"
    assert found.note.startswith("ONNX Runtime here (onnxruntime")


@pytest.fixture
def rtx_engine(device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """trt-rtx's rung as it is up to the device: builds are real, the interpreter runs in the engine's place."""
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    device.card = "NVIDIA L4"
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: None)
    monkeypatch.setattr(trt_session, "require_cuda", lambda name: torch)
    monkeypatch.setitem(backends.BACKENDS, "trt-rtx",
                        replace(backends.BACKENDS["trt-rtx"], open=InterpreterSession))
    return device


FP16 = Sizes(preset=SMALL.preset, batch=2, contexts=(64, 256), seeds=(0,), parity_context=300, chunk=16,
             engine_dtypes=("fp16",))


class _Context:
    """An execution context that notes what it was given; its profile ends at `most_rows`, its patience at `steps`."""

    def __init__(self, most_rows: int, steps: int) -> None:
        self.most_rows, self.steps = most_rows, steps
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.streams: list[int] = []

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return name != "past_latent.0" or shape[1] <= self.most_rows

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def execute_async_v3(self, stream: int) -> bool:
        self.streams.append(stream)
        return len(self.streams) <= self.steps


class _Loaded:
    """A loaded engine that says what it takes, reads past_lengths on the host, and computes nothing."""

    backend, logger = "trt-rtx", SimpleNamespace(errors=lambda: ["out of patience"])
    engine = SimpleNamespace(device_memory_size_v2=4096,
                             get_tensor_location=lambda name: "host" if name == "past_lengths" else "device")

    def __init__(self, most_rows: int = 1 << 20, steps: int = 1000) -> None:
        self.limits, self.contexts, self.released = (most_rows, steps), list[_Context](), 0

    def context(self, profile: int, stream: int) -> _Context:
        assert (profile, stream) == (0, 7)
        self.contexts.append(_Context(*self.limits))
        return self.contexts[-1]

    def release(self) -> None:
        self.released += 1


def test_tensorrt_rung_builds_climbs_and_times(rtx_engine: HostDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, plans = _Loaded(), list[int]()

    def open_plan(name: str, plan: Path, *rest: Any) -> _Loaded:
        plans.append(plan.stat().st_size)
        return engine

    monkeypatch.setattr(gpu_engines, "loaded", open_plan)
    (found,) = only(rtx_engine, "engine/trt-rtx", FP16)
    assert (found.state, found.note) == ("passed", "")
    assert found.figures["decode_engine"]["activation_bytes"] > 0
    assert [found.figures["decode_engine"]["plan_bytes"]] == plans
    assert found.figures["prefill_engine"]["plan_bytes"] > 0
    assert found.figures["device_memory_bytes"] == 4096
    assert [step["rows"] for step in found.figures["steps"]] == [64, 256]
    assert [c.shapes["past_latent.0"] for c in engine.contexts] == [(2, 64, 56), (2, 256, 56)]
    assert engine.released == 2
    assert "engine/trt-rtx/fp16\t" in gpu_tables.plain(Report(FP16, [found]))


def test_tensorrt_rung_whose_engine_does_not_open_fails(rtx_engine: HostDevice, monkeypatch: pytest.MonkeyPatch
                                                        ) -> None:
    def refuse(made: Any, graph: Any) -> Any:
        raise InputError("could not load this engine on this GPU")

    monkeypatch.setitem(backends.BACKENDS, "trt-rtx", replace(backends.BACKENDS["trt-rtx"], open=refuse))
    (found,) = only(rtx_engine, "engine/trt-rtx", FP16)
    assert found.state == "failed"
    assert found.note == "no graph ran: trt-rtx, fp16: not run: could not load this engine on this GPU"


@pytest.mark.parametrize(("timeout_s", "state"), [(1e-6, "not run"), (60.0, "failed")])
def test_build_that_was_stopped_or_failed(device: HostDevice, monkeypatch: pytest.MonkeyPatch, timeout_s: float,
                                          state: str) -> None:
    """A build stopped for time has not failed; one that the builder gave up has."""
    def give_up(request: Any) -> Any:
        assert (request.formulation, request.layout, request.cache) == ("kqt", "split", False)
        raise trt.BuildError("decode.kqt.onnx: no kernel, or no time")

    monkeypatch.setattr(gpu_engines, "build", give_up)
    monkeypatch.setattr(gpu_engines, "why_not", lambda name, capability: None)
    monkeypatch.setattr(gpu_engines, "BUILD_SHARE", timeout_s / 100)
    (found,) = only(device, "engine/trt-rtx", FP16)
    assert found.state == state
    assert found.note.endswith("decode.kqt.onnx: no kernel, or no time")


def test_engine_step_binds_every_tensor(narrow: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx", reason="tensorrt_rtx is not installed")
    monkeypatch.setattr(trt.load("trt-rtx").TensorLocation, "HOST", "host")
    made = export(ExportRequest(SMALL.preset, tmp_path / "made", dtype="bf16", max_context=64, target="trt-rtx"))
    graph, engine, sizes = made.graph("decode", "kqt"), _Loaded(most_rows=32, steps=2), {"B": 2, "T": 1, "S": 32}
    with gpu_engines.bound(engine, graph, sizes, 0, 7, "cpu") as step:  # type: ignore[arg-type]
        (context,) = engine.contexts
        assert context.shapes == {"hidden_states": (2, 1, 96), "past_lengths": (2,), "past_latent.0": (2, 32, 56)}
        assert set(context.addresses) == {t.name for t in (*graph.inputs, *graph.outputs)}
        assert len(set(context.addresses.values())) == len(context.addresses)
        step()
        step()
        assert context.streams == [7, 7]
        with pytest.raises(InputError, match=r"decode\.kqt: the engine refused to run: out of patience"):
            step()
    assert engine.released == 1
    with (pytest.raises(InputError, match=r"past_latent\.0 \[2, 33, 56\] is outside the engine's profile"),
          gpu_engines.bound(engine, graph, {**sizes, "S": 33}, 0, 7, "cpu")):  # type: ignore[arg-type]
        pass
    assert engine.released == 2


# --- What else measures on a device -----------------------------------------------------------------------------------


def test_memory_report_at_the_last_row_of_a_context(device: HostDevice, tmp_path: Path) -> None:
    """A cache as long as max_context has no room for another row; the step that is measured keeps none."""
    made = export(ExportRequest(SMALL.preset, tmp_path / "made", max_context=64))
    rows = eager_caches(made, tensors(made.config), 64, device)
    assert [r["bytes_per_token"] for r in rows] == [56 * 4, 12 * 60 * 4, 12 * 60 * 4]
    assert all(0 < r["step_peak_bytes"] < 1 << 20 for r in rows)
    assert not any("step_peak_bytes" in r for r in eager_caches(made, tensors(made.config), 64))


# --- The device -------------------------------------------------------------------------------------------------------


def test_every_card_of_the_list_has_its_drivers_name() -> None:
    assert set(CARDS.values()) == set(GPUS)
    assert sheet("NVIDIA H200") is GPUS["h200"]
    assert sheet("NVIDIA A10G") is None


def test_settings_are_put_back() -> None:
    matmul = torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("high")
    try:
        with exact_products():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not matmul.allow_fp16_reduced_precision_reduction
        assert torch.get_float32_matmul_precision() == "high"
        assert matmul.allow_fp16_reduced_precision_reduction
    finally:
        torch.set_float32_matmul_precision("highest")


def test_torch_without_cuda_beside_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(gpu_device.shutil, "which", lambda name: None)
    assert gpu_device.absent() == "no CUDA device"
    monkeypatch.setattr(gpu_device.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert gpu_device.absent() == (f"no CUDA device that torch sees: torch {torch.__version__} is built without CUDA")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_device.absent() is None


def test_make_target_does_without_a_virtual_environment() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    outside = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # a make around these tests
    for words, variables in (([], {"PY": "python3"}), (["PY=python3"], {})):
        said = subprocess.run(["make", "-n", "test-gpu", *words], cwd=Path(__file__).parent.parent, check=True,
                              text=True, capture_output=True, env=outside | variables).stdout
        assert said.split() == ["python3", "-m", "validate", "gpu", "--out", "build/gpu.json"]


def test_driver_of_a_machine_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_device.shutil, "which", lambda name: None)
    assert gpu_device._driver() is None


class _Event:
    """A CUDA event of a device on which each step takes 2 ms."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        pass

    def elapsed_time(self, end: Any) -> float:
        return 2.0


def test_cuda_device_over_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of torch.cuda answered by hand, tensors on the CPU: what is asked for, the order, and the sums."""
    asked: list[str] = []
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 << 30,
                                 multi_processor_count=132, L2_cache_size=1 << 10)
    answers = {"is_available": True, "current_device": 0, "memory_reserved": 300, "memory_allocated": 100,
               "max_memory_allocated": 250, "mem_get_info": (1 << 20, 1 << 30), "synchronize": None,
               "empty_cache": None, "reset_peak_memory_stats": None}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda name=name, answer=answer: asked.append(name) or answer)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(CudaDevice, "torch", "cpu")
    device = CudaDevice()
    facts = device.facts()
    assert (facts["name"], facts["capability"], facts["l2_bytes"]) == ("NVIDIA H200", "9.0", 1024)
    assert (device.free(), device.allocated(), device.peak()) == ((1 << 20) + 200, 100, 250)
    device.reset_peak()
    assert asked[-2:] == ["synchronize", "reset_peak_memory_stats"]
    steps: list[int] = []
    assert device.time(lambda: steps.append(1), 60.0) == [2.0] * gpu_device.MOST_STEPS
    assert len(steps) == gpu_device.WARM_UP + gpu_device.MOST_STEPS
    assert device.time(lambda: None, 0.0) == [2.0] * gpu_device.BURST  # a burst, however little time there is
    gbs, equal = device.copy_bandwidth()
    assert equal
    assert gbs == pytest.approx(2 * 4 * (((1 << 20) + 200) // 8 // 4) / 2e-3 / 1e9)
    device.release()
    assert asked[-2:] == ["synchronize", "empty_cache"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: no CUDA device")
def test_on_a_gpu(narrow: list[str], without_engines: None, tmp_path: Path) -> None:
    report = gpu.check(tmp_path / "gpu.json", SMALL)
    assert report.passed, gpu_tables.notes(report)
    assert report.count("passed") == 52
    assert report.figure("device", "copy_gbs") > 10
    assert report.figure("time/absorbed/bf16/300", "ms") > 0
