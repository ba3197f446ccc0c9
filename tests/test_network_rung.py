"""TensorRT's parsed network as a rung of the parity ladder: beside the other runtimes, and seeing what they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.export import ExportRequest, export
from tests.model_checkpoints import tiny_checkpoint
from validate import model_parity, network_rung
from validate.network import planted
from validate.parity import Ladder, check_folder, default_backends

pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")


def names(ladder: Ladder, passed: bool) -> set[str]:
    return {r.name for r in ladder.rungs if r.passed == passed}


def test_an_export_for_tensorrt_climbs_with_it(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", dtype="fp16", target="trt-rtx", cache="scatter",
                                prefill="expanded", max_context=120))
    ladder = check_folder(made.folder)
    assert ladder.passed
    assert names(ladder, True) >= {f"trt-network/{step}" for step in (
        "prefill", "chunked", "decode", "far", "ragged", "tail", "untouched", "decode/cache")}
    assert all(r.counted for r in ladder.rungs if r.name.startswith("trt-network/"))
    assert not any(r.name.startswith("trt-network/") for r in check_folder(made.folder, network=False).rungs)


def test_a_misunderstanding_is_red_there_and_nowhere_else(narrow: list[str], tmp_path: Path) -> None:
    sound = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", dtype="fp16", target="trt-rtx", cache="scatter",
                                 prefill="expanded", max_context=120))
    made, _ = planted(sound, "nonpad", tmp_path / "y")
    red = names(check_folder(made.folder), False)
    assert "trt-network/prefill" in red
    assert all(name.startswith("trt-network/") for name in red)


def test_a_model_climbs_with_it(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    checkpoint = tiny_checkpoint(tmp_path / "c", "v3")
    made = export(ExportRequest(str(checkpoint), tmp_path / "x", target="trt-rtx", max_context=60))
    ladder = check_folder(made.folder)
    assert ladder.passed
    assert names(ladder, True) >= {"trt-network/prefill", "trt-network/decode", "trt-network/decode/cache"}


def test_it_says_what_it_does_not_take(narrow: list[str], tmp_path: Path) -> None:
    """An export for ONNX Runtime has formulations that TensorRT is not given, and is climbed when asked for."""
    made = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "x", max_context=60))
    assert network_rung.NETWORK not in default_backends(made)
    ladder = check_folder(made.folder, network=True)
    assert ladder.passed
    taken = {r.graph for r in ladder.rungs if r.name.startswith("trt-network/")}
    told = {line.split(", ")[1].split(":")[0] for line in ladder.not_run if line.startswith("trt-network, ")}
    assert taken
    assert taken | told == {g.name for g in made.graphs}


def test_experts_of_onnx_runtime_are_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    made = export(ExportRequest(str(tiny_checkpoint(tmp_path / "c", "v3")), tmp_path / "x", max_context=60))
    ladder = Ladder()
    model_parity.check(made, ladder, 0, backends=["trt-network"])
    assert ladder.passed
    assert any("its experts are ONNX Runtime's own operator" in line for line in ladder.not_run)


def test_without_the_library_it_says_so(narrow: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "x", target="trt-rtx", max_context=60))
    monkeypatch.setattr("engines.trt.available", lambda backend: False)
    ladder = check_folder(made.folder)
    assert ladder.passed
    assert any(line.startswith("trt-network: not run: no TensorRT is installed") for line in ladder.not_run)
