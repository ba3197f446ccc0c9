"""Memory over context: what is measured agrees with what must be, what does not fit is named, charts show the rows."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from rich.console import Console

from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from exporter.presets import PRESETS
from tests.host_device import HostDevice, LiveTensors
from tests.model_checkpoints import tiny_checkpoint
from validate import eager_memory, memory_charts, memory_curve, tables
from validate.__main__ import cli
from validate.eager import FORMS
from validate.memory_charts import panels
from validate.memory_curve import EAGER, CurveRequest, Curves, curves
from validate.plot import described

KEYS = ("weights_bytes", "cache_bytes", "step_bytes")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    """Wide enough that a row of cache is more than noise."""
    return export(ExportRequest("deepseek-v2-lite", tmp_path_factory.mktemp("curve") / "e", dtype="fp32",
                                max_context=8192, target="trt-rtx"))


@pytest.fixture(scope="module")
def measured(made: Export) -> Curves:
    """ONNX Runtime and one of the eager forms: each loads torch in a process of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_curve, "FORMS", {"mha": FORMS["mha"]})
        return curves(made, CurveRequest.of(made, "8192", budget=400))


def by_subject(found: Curves, context: int) -> dict[str, memory_curve.Row]:
    return {r.subject: r for r in found.rows if r.context == context}


def hold(found: Curves, context: int) -> dict[str, memory_curve.Row]:
    """What was measured is what must be, and no less."""
    far = by_subject(found, context)
    for r in far.values():
        assert r.peak_bytes == pytest.approx(sum(getattr(r, key) for key in KEYS), rel=1e-3), r
        if r.how == "measured" and r.step == "decode":
            assert r.cache_bytes == pytest.approx(r.cache_formula_bytes, rel=0.1), r
        if r.subject in EAGER.values():
            assert r.how == "measured"
            assert r.step_bytes > 0.9 * r.step_formula_bytes, r
    return far


def test_measured_caches_and_steps_are_what_must_be(measured: Curves, made: Export) -> None:
    far = hold(measured, 8192)
    assert {"eager MHA", "ONNX Runtime, decode", "ONNX Runtime, prefill", "trt-rtx, decode"} <= set(far)
    assert far["eager MHA"].cache_bytes > 6 * far["ONNX Runtime, decode"].cache_bytes
    assert far["trt-rtx, decode"].how == "predicted"
    assert measured.not_run[:2] == ["eager MLA and MHA on CUDA: not run: no CUDA device",
                                    "engines: none built; `python -m engines build` records what theirs take"]
    assert measured.not_run[2].startswith("cache of one more token: not measured: no cache grows by 2.0 MB")


@pytest.mark.slow
def test_what_one_more_token_takes(made: Export) -> None:
    found = curves(made, CurveRequest.of(made, "512,8192", budget=400))
    far = hold(found, 8192)
    assert far["eager MLA, expanding"].step_bytes > 10 * far["eager MLA, absorbed"].step_bytes
    slopes = {s["subject"]: s["cache_bytes_per_token"] for s in found.to_dict()["per_token"]}
    latent, full = made.cache_bytes_per_token, 4 * made.config.expanded_dim
    assert slopes["eager MLA, absorbed"] == pytest.approx(latent, rel=0.02)
    assert slopes["ONNX Runtime, decode"] == pytest.approx(latent, rel=0.02)
    assert slopes["eager MHA"] == pytest.approx(full, rel=0.02)


def test_charts_show_the_rows(measured: Curves, tmp_path: Path) -> None:
    data = measured.to_dict()
    told = described(panels(data))
    assert [p.title for p in panels(data)] == ["Cache", "Scratch of a decode step", "Weights, cache and scratch",
                                               "Scratch of a prefill chunk"]
    for r in data["rows"]:
        assert r["subject"] in told
    styles = {(line.name, line.style) for p in panels(data) for line in p.lines}
    assert len(styles) == len({name for name, _ in styles})  # one look for each subject, wherever it comes
    memory_charts.draw(data, "head", tmp_path / "c.svg")
    assert ElementTree.parse(tmp_path / "c.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("form", FORMS)
def test_a_device_is_read_by_its_allocator(form: str, narrow: list[str]) -> None:
    c = replace(PRESETS["narrow-deepseek-v3"], hidden_size=256)
    with LiveTensors() as meter:
        found = eager_memory.eager_memory(HostDevice(meter), c, form, "fp32", 2, 300)
    assert found.cache_bytes >= found.held_cache_bytes > 0
    assert found.weights_bytes == pytest.approx(found.held_weights_bytes, rel=0.3)
    assert found.step_bytes >= FORMS[form].peak_bytes(c, 2, 300, 1, 4)
    assert found.peak_bytes >= found.weights_bytes + found.cache_bytes


def test_points_on_a_device_stand_beside_those_of_the_cpu(made: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    figures = eager_memory.EagerMemory(1, 2, 3, 6, 1, 2)
    monkeypatch.setattr(memory_curve, "measured", lambda c, *a: asked.append(("cpu", *a[:4])) or figures)
    monkeypatch.setattr(memory_curve, "eager_memory", lambda m, c, *a: asked.append((m.torch, *a[:4])) or figures)
    monkeypatch.setattr(memory_curve, "unmeasurable", lambda made: "ort: not run: here")
    with LiveTensors() as meter:
        device = HostDevice(meter)
        device.torch = "cuda"
        monkeypatch.setattr(memory_curve, "absent", lambda: None)
        monkeypatch.setattr(memory_curve, "CudaDevice", lambda: device)
        found = curves(made, CurveRequest.of(made, "16", batch=3))
    assert asked == [(d, form, "fp32", 3, 15) for form in FORMS for d in ("cpu", "cuda")]
    assert sum(r.device == "cuda" for r in found.rows) == len(FORMS)
    assert not any("CUDA" in line for line in found.not_run)


def test_what_does_not_fit_is_named_and_its_formula_given(made: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_curve, "available_memory", lambda: 1_000_000)
    found = curves(made, CurveRequest.of(made, "64"))
    assert not [r for r in found.rows if r.how == "measured"]
    assert [r.how for r in found.rows if r.subject in EAGER.values()] == ["formula"] * 3
    assert sum("not run: needs about" in line and "1.0 MB are free" in line for line in found.not_run) == 5
    assert "formula" in described(panels(found.to_dict()))


def test_a_spent_budget_is_said_once(made: Export) -> None:
    found = curves(made, CurveRequest.of(made, "64,128", budget=1e-9))
    assert "10 points, from ONNX Runtime, prefill." in " ".join(found.not_run)
    assert "1e-09 s were spent; allow more with --budget" in " ".join(found.not_run)


def test_a_child_that_fails_or_takes_long_is_named(made: Export) -> None:
    with pytest.raises(CheckError, match=r"eager mha was not done after 0\.01 s and was stopped; allow more with --b"):
        eager_memory.measured(made.config, "mha", "fp32", 1, 8, 0.01)
    with pytest.raises(CheckError, match=r"eager nothing could not run it at batch 0, 8 rows: KeyE"):
        eager_memory.measured(made.config, "nothing", "fp32", 0, 8)


@pytest.mark.parametrize(("contexts", "words"), [
    ("1,x", "--contexts '1,x': expected numbers such as 1024,4096"), ("1,8", "numbers from 2 to 8192"),
    ("9000", "numbers from 2 to 8192, the context of"), ("", "expected numbers such as")])
def test_contexts_that_are_refused(contexts: str, words: str, made: Export) -> None:
    with pytest.raises(InputError, match=words):
        CurveRequest.of(made, contexts)


@pytest.mark.parametrize(("most", "grid"), [(32768, (512, 2048, 8192, 32768)), (163840, (512, 2048, 8192, 32768)),
                                            (100, (6, 25, 100)), (2, (2,)), (1, (1,))])
def test_the_default_grid(most: int, grid: tuple[int, ...], made: Export) -> None:
    other = Export(made.folder, {**made.data, "max_context": most}, made.config, made.graphs)
    assert CurveRequest.of(other).contexts == grid


@pytest.mark.parametrize("cache", ["scatter", "concat"])
def test_other_cache_forms(cache: str, narrow: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "e", cache=cache, max_context=96))
    monkeypatch.setattr(memory_curve, "measured", lambda *a: eager_memory.EagerMemory(1, 1, 1, 3, 1, 1))
    found = curves(small, CurveRequest.of(small, "32"))
    rows = {r.context for r in found.rows if r.subject == "ONNX Runtime, decode"}
    assert rows == ({96} if cache == "scatter" else {32}), found.not_run


def test_the_command_on_a_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_checkpoint(tmp_path / "m", "v2-lite", layers=2)
    export(ExportRequest(str(tmp_path / "m"), tmp_path / "e", max_context=64))
    monkeypatch.setattr(memory_curve, "measured", lambda *a: eager_memory.EagerMemory(10, 20, 30, 60, 10, 20))
    plot = tmp_path / "c.svg"
    call = CliRunner().invoke(cli, ["memory", str(tmp_path / "e"), "--chunk", "8", "--contexts", "16,64", "--plot",
                                    str(plot), "--json"])
    printed = json.loads(call.stdout)
    data = printed["curve"]
    scopes = {(r["subject"], r["scope"]) for r in data["rows"]}
    assert ("ONNX Runtime, decode", "model") in scopes
    assert ("eager MHA", "attention") in scopes
    assert plot.read_text().startswith("<svg")
    terminal = Console(width=200, record=True, file=io.StringIO())
    tables.memory(terminal, printed)
    shown = terminal.export_text()
    assert "Memory over context, MB" in shown
    assert all(line in shown for line in ("ONNX Runtime, prefill  model", *data["not_run"]))
    again = CliRunner().invoke(cli, ["memory", str(tmp_path / "e"), "--plot", str(plot)])
    assert "exists; choose another name" in str(again.exception)
