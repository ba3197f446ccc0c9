"""The doctor on ONNX files: what is planted in a graph is found by its name, sound graphs of others raise no alarm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests import absorption_graphs, doctor_graphs
from tests.absorption_graphs import RIGHT, WRONG
from tests.doctor_graphs import SCALE, STRETCH, YARN, config_file, factored, filled, halved, rewired, scaled, tables
from validate.__main__ import cli
from validate.doctor import DoctorRequest, examine
from validate.doctor_ailments import Report
from validate.doctor_graph import Subject, structure


def report_on(path: Path, config: Path | None = None) -> Report:
    return examine(DoctorRequest(str(path), config=config))


def names(report: Report, severity: str = "fault") -> set[str]:
    return {f.name for f in report.findings if f.severity == severity}


# ---- other exporters' graphs


# codes are cached in one of them, which is not run; lengths, positions and masks differ in the others
@pytest.mark.parametrize("make", RIGHT, ids=lambda m: m.__name__)
def test_sound_graphs_of_others(make: Any, tmp_path: Path) -> None:
    path = filled(tmp_path / "g.onnx", make)
    report = report_on(path, config_file(tmp_path))
    unscaled = make in (absorption_graphs.absorbed_in_two, absorption_graphs.absorbed_scattered)  # they have no scale
    assert names(report) == ({"scale-missing"} if unscaled else set())
    assert not names(report, "remark")
    assert report.examined


def test_what_a_sound_graph_was_asked(tmp_path: Path) -> None:
    report = report_on(filled(tmp_path / "g.onnx"), config_file(tmp_path))
    text = " ".join(report.examined)
    for words in ("RoPE's layout", "RoPE's frequencies", "softmax scale of the rotary half", "prefill in chunks"):
        assert words in text
    assert ("g.onnx: stale rows", "no input says how many rows are valid, so all are") in report.not_examined
    bare = report_on(filled(tmp_path / "g.onnx"))
    assert any("give --config" in why for _, why in bare.not_examined)


@pytest.mark.parametrize("make", WRONG, ids=lambda m: m.__name__)
def test_wrong_structures(make: Any, tmp_path: Path) -> None:
    layer = absorption_graphs.Layer()
    make(layer)
    report = Report("g", "graph")
    structure(Subject(layer.save(tmp_path / "g.onnx")), report)
    assert {f.name for f in report.findings} >= WRONG[make][0]


def test_all_evidence_of_one_ailment(tmp_path: Path) -> None:
    """Keys and values that are both rebuilt are one finding that says both."""
    report = report_on(filled(tmp_path / "g.onnx", absorption_graphs.expanded_each_step))
    (finding,) = [f for f in report.findings if f.name == "expanded-each-step"]
    keys, values = finding.evidence.split("\n")
    assert "keys are rebuilt" in keys
    assert "values are rebuilt" in values
    shown = CliRunner().invoke(cli, ["doctor", str(tmp_path / "g.onnx")])
    assert "keys are rebuilt" in shown.stdout
    assert "values are rebuilt" in shown.stdout


IN_NUMBERS: dict[str, tuple[Callable[[Any], None], dict[str, Any], str]] = {
    "scale-from-rank": (scaled((16 + 6) ** -0.5), {}, "expected 0.19612; it is (16 + 6)^-1/2"),
    "scale-from-rank:latent": (scaled(16**-0.5), {}, "it is 16^-1/2, of the latent alone"),
    "scale-from-nope": (scaled(20**-0.5), {}, "it is 20^-1/2"),
    "scale-missing": (scaled(1.0), {}, "it is 1"),
    "scale-twice": (scaled(SCALE**2), {}, "applied twice"),
    "scale-wrong": (scaled(0.123), {}, "is 0.12300"),
    "mscale-dropped": (tables(lambda p, f: np.outer(p, f * STRETCH)), {"rope_scaling": YARN}, "without mscale^2"),
    "rope-theta": (lambda model: None, {"rope_theta": 5e4}, "base 10000"),
    "rope-unstretched": (lambda model: None, {"rope_scaling": YARN}, "plain ones"),
    "rope-frequencies": (tables(lambda p, f: np.outer(p, 1.3 * f)), {}, "off by"),
    "rope-factor-twice": (factored(1.3689), {}, "carry 1.3689; expected 1.0000"),
    "attention-in-if": (doctor_graphs.in_a_branch, {}, "choice (If) has"),
}


@pytest.mark.parametrize("name", IN_NUMBERS)
def test_numbers_of_others(name: str, tmp_path: Path) -> None:
    plant, changed, words = IN_NUMBERS[name]
    name = name.partition(":")[0]
    report = report_on(filled(tmp_path / "g.onnx", plant=plant), config_file(tmp_path, **changed))
    assert name in names(report)
    assert any(words in f.evidence for f in report.findings if f.name == name), report.findings


REMARKS: dict[str, tuple[Callable[[Any], None], dict[str, Any], str]] = {
    "rope-layout": (lambda model: None, {"rope_interleave": True}, "turns half"),
    "rope-table-short": (doctor_graphs.shorter, {}, "position 4095 of a context of 4096"),
    "float32-angles": (tables(lambda p, f: np.outer(p.astype(np.float32), (f * (1 + 1e-7)).astype(np.float32) * (
        1 + 2e-7)).astype(np.float32)), {}, "angles are off by up to"),
}


@pytest.mark.parametrize("name", REMARKS)
def test_what_may_be_meant_so(name: str, tmp_path: Path) -> None:
    """Of another exporter's graph these are remarks: it may have sorted its weights, or serve fewer positions."""
    plant, changed, words = REMARKS[name]
    report = report_on(filled(tmp_path / "g.onnx", plant=plant), config_file(tmp_path, **changed))
    assert report.passed
    assert name in names(report, "remark")
    assert any(words in f.evidence for f in report.findings)


def test_only_the_query_in_another_layout(tmp_path: Path) -> None:
    """The key's pairs sorted into halves before they turn, the query's not."""
    def deinterleave(g: absorption_graphs.Layer) -> None:
        turn = g.turn

        def sorting(x: str, *args: Any, **named: Any) -> str:
            if named.get("name") == "turn_key":
                x = g.op("Gather", x, g.ints(0, 2, 4, 1, 3, 5), axis=2)
            return turn(x, *args, **named)

        g.turn = sorting  # type: ignore[method-assign]
        absorption_graphs.absorbed(g)

    report = report_on(filled(tmp_path / "g.onnx", deinterleave), config_file(tmp_path, rope_interleave=True))
    assert "key-only-deinterleaved" in names(report)
    assert any("turns pairs of the key" in f.evidence for f in report.findings)


def test_scores_scaled_too_late(tmp_path: Path) -> None:
    report = report_on(filled(tmp_path / "g.onnx", plant=halved), config_file(tmp_path))
    assert names(report) == {"unscaled-scores"}
    assert "65504" in report.findings[0].evidence


def test_weights_out_of_the_folder(tmp_path: Path) -> None:
    """They are named, and not read."""
    path = filled(tmp_path / "g.onnx")
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.bin", size_threshold=64)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = "../w.bin"
    path.write_bytes(model.SerializeToString())
    report = report_on(path)
    assert "path-outside" in names(report)
    assert any(name == "g.onnx: runs" for name, _ in report.not_examined)


# ---- our own graphs, rewired


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Export:
    return export(ExportRequest("article", tmp_path_factory.mktemp("layer") / "e", max_context=64))


REWIRED: dict[str, Callable[[Any], None]] = {
    "stale-rows": doctor_graphs.attend_all_rows, "empty-row-nan": doctor_graphs.hide_itself,
    "chunk-differs": doctor_graphs.positions_restart, "ragged-differs": doctor_graphs.first_length_for_all}


@pytest.mark.parametrize("name", REWIRED)
def test_behaviour(name: str, layer: Export, tmp_path: Path) -> None:
    path = tmp_path / "decode.onnx"
    path.write_bytes((layer.folder / "decode.qkt.onnx").read_bytes())
    (tmp_path / "weights.safetensors").write_bytes((layer.folder / "weights.safetensors").read_bytes())
    assert report_on(path).findings == []
    rewired(path, REWIRED[name])
    assert name in names(report_on(path))


# ---- the command


def run(*words: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, ["doctor", *words, "--json"], standalone_mode=False)
    code = getattr(result.exception, "exit_code", result.return_value or 0)
    return code, json.loads(result.stdout)


def test_command(tmp_path: Path) -> None:
    path, config = filled(tmp_path / "g.onnx"), config_file(tmp_path)
    code, data = run(str(path), "--config", str(config))
    assert (code, data["pass"], data["findings"]) == (0, True, [])
    assert data["examined"]
    assert all(set(entry) == {"name", "why"} for entry in data["not_examined"])
    filled(path, plant=scaled(22**-0.5))
    code, data = run(str(path), "--config", str(config))
    assert (code, data["pass"]) == (1, False)
    assert set(data["findings"][0]) == {"name", "symptom", "evidence", "cause", "cure", "severity", "where"}
    shown = CliRunner().invoke(cli, ["doctor", str(path), "--config", str(config)])
    for words in ("scale-from-rank", "symptom", "evidence", "cause", "cure", "not examined:"):
        assert words in shown.stdout


@pytest.mark.parametrize(("words", "message"), [
    (["nothing-there"], "no such file, folder or preset"), (["article", "--batch", "2"], "for --training"),
    (["article", "--training", "--tokens", "0"], "expected at least 1"),
    (["article", "--training", "--dtype", "int8"], "expected one of bf16"),
    (["article", "--config", "config.json"], "it is for a graph")])
def test_bad_input(words: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["doctor", *words], standalone_mode=False)
    assert message in str(result.exception)
