"""The doctor on exports: every planted fault by its name, and nothing on sound exports of all families and forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from exporter import manifest
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export
from exporter.presets import PRESETS
from exporter.rope import frequencies, mscale
from exporter.source import open_model
from tests.conftest import DISTINCT
from tests.model_checkpoints import MODELS, tiny_checkpoint
from tests.test_faults import CASES
from validate import model_faults
from validate.doctor import DoctorRequest, examine
from validate.doctor_ailments import AILMENTS, Report
from validate.doctor_hypotheses import HYPOTHESES
from validate.doctor_layer import LayerExamination
from validate.doctor_model import ModelExamination
from validate.faults import FAULTS

pytest.importorskip("transformers")
FAST = ("v3", "transmla", "minicpm3", "longcat")
# what graphs show by themselves, with the context that it takes; the rest is told by hypothesis
IN_FULL = {"rope-on-latent": 300, "float32-angles": 32768, "scatter-one-too-many": 300}
FIRST = {name: model for model, name in reversed(CASES)}


def silent(message: str, share: float | None = None) -> None:
    """No progress."""


def report_on(made: Export) -> Report:
    return examine(DoctorRequest(str(made.folder)))


def against_source(made: Export) -> Report:
    report = Report(str(made.folder), "export")
    (ModelExamination if made.contract == "model" else LayerExamination)(made, report, 0, silent).examine()
    return report


# ---- one attention


@pytest.mark.parametrize(("model", "name"), [
    (m, n) if FIRST[n] == m else pytest.param(m, n, marks=pytest.mark.slow) for m, n in CASES])
def test_planted_in_a_layer(narrow: list[str], model: str, name: str, tmp_path: Path) -> None:
    """The export equals its source with that very mistake made."""
    context = IN_FULL.get(name, 300)
    fault = FAULTS[name]
    request = ExportRequest(model, tmp_path / "e", cache=fault.cache or "append", max_context=context)
    made = export(request, tamper=fault.tamper)
    report = report_on(made) if name in IN_FULL else against_source(made)
    assert not report.passed
    assert {f.name for f in report.findings} == {name}, [f.evidence for f in report.findings]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("name", ["mscale-dropped", "rope-layout", "raw-latent-cached", "kv-b-order"])
def test_planted_at_16_bit(narrow: list[str], name: str, dtype: str, tmp_path: Path) -> None:
    request = ExportRequest("narrow-deepseek-v3", tmp_path / "e", max_context=300, dtype=dtype)
    found = against_source(export(request, tamper=FAULTS[name].tamper)).findings
    assert {f.name for f in found} == {name}


def test_evidence_is_measured(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "e", max_context=300),
                  tamper=FAULTS["mscale-dropped"].tamper)
    finding = next(f for f in report_on(made).findings if f.name == "mscale-dropped")
    assert "equals the source with the softmax scale without mscale^2 (rel " in finding.evidence
    assert "decode.qkt" in finding.where


def test_two_mistakes_are_not_one(narrow: list[str], tmp_path: Path) -> None:
    """What no single mistake reproduces is not given a name."""
    def both(w: Any) -> None:
        for name in ("kv-b-order", "norm-gain-dropped"):
            plant = FAULTS[name].tamper.weights
            assert plant is not None
            plant(w)

    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "e", max_context=300), tamper=Tamper(both))
    (finding, *_) = against_source(made).findings
    assert finding.name == "unexplained-difference"
    assert "known mistakes tried; nearest: " in finding.evidence


@pytest.mark.parametrize("model", DISTINCT)
def test_sound_layers(narrow: list[str], model: str, tmp_path: Path) -> None:
    report = report_on(export(ExportRequest(f"narrow-{model}", tmp_path / "e", max_context=300)))
    assert report.findings == []
    assert not report.not_examined, report.not_examined
    assert sum("softmax scale" in line for line in report.examined) == 2


FORMS: list[dict[str, Any]] = [
    {"dtype": "fp16"}, {"dtype": "bf16"}, {"cache": "scatter"}, {"cache": "concat", "dtype": "fp16"},
    {"absorb": "folded"}, {"quantise": "int4", "dtype": "fp16"}, {"cache_dtype": "fp8"},
    {"cache_dtype": "int8", "dtype": "fp16"}, {"target": "trt-rtx", "dtype": "bf16", "prefill": "expanded"},
    {"target": "trt", "dtype": "fp16", "cache": "scatter", "prefill": "expanded"}]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sound_forms(narrow: list[str], form: dict[str, Any], tmp_path: Path) -> None:
    report = report_on(export(ExportRequest("narrow-deepseek-v3", tmp_path / "e", max_context=300, **form)))
    assert report.findings == []
    assert any("against the float64 reference" in line for line in report.examined)


@pytest.mark.parametrize("form", [{"causal": False}, {"merge_q": True, "prefill": "expanded"}], ids=str)
def test_sound_forms_of_the_articles_layer(form: dict[str, Any], tmp_path: Path) -> None:
    assert report_on(export(ExportRequest("article", tmp_path / "e", **form))).findings == []


# ---- whole models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def checkpoint(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).is_dir() else tiny_checkpoint(folder / name, name)


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in MODELS])
def test_sound_models(folder: Path, name: str, tmp_path: Path) -> None:
    source = checkpoint(folder, name)
    assert examine(DoctorRequest(str(source))).findings == []
    report = report_on(export(ExportRequest(str(source), tmp_path / "e", max_context=300)))
    assert report.findings == []
    assert not report.not_examined, report.not_examined


HOME = {"routed-scale-dropped": "v3", "choice-bias-as-weight": "v3", "groups-ignored": "v3",
        "residual-scale-dropped": "minicpm3", "embedding-scale-dropped": "minicpm3", "latent-scale-dropped": "longcat",
        "query-temperature-dropped": "mistral4", "last-token-off-by-one": "v2-lite", "scatter-one-too-many": "youtu"}


@pytest.mark.parametrize("cache", ["scatter", "concat"])
def test_sound_models_over_other_caches(folder: Path, cache: str, tmp_path: Path) -> None:
    """Several caches of one shape: each is held against its own."""
    source = checkpoint(folder, "youtu")
    assert report_on(export(ExportRequest(str(source), tmp_path / "e", cache=cache, max_context=100))).findings == []


@pytest.mark.parametrize("name", model_faults.FAULTS)
def test_planted_in_a_model(folder: Path, name: str, tmp_path: Path) -> None:
    source = checkpoint(folder, HOME[name])
    fault = model_faults.fault(name, open_model(str(source)).decoder)
    request = ExportRequest(str(source), tmp_path / "e", cache=fault.cache or "append", max_context=300)
    made = model_faults.plant(export(request), fault)
    report = report_on(made) if name in IN_FULL else against_source(made)
    assert not report.passed
    assert {f.name for f in report.findings} == {name}, [f.evidence for f in report.findings]


def planted_in_one_graph(made: Export, name: str, constant: str, factor: float) -> Export:
    """One graph of an export with one of its constants multiplied, the manifest with it."""
    path = made.folder / next(g.file for g in made.graphs if g.name == name)
    model = onnx.load(path, load_external_data=False)
    (tensor,) = [t for t in model.graph.initializer if t.name == constant]
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((values * factor).astype(values.dtype), constant))
    path.write_bytes(model.SerializeToString())
    manifest.rewrite(made.folder, made.data | {"files": {n: manifest.file_record(made.folder / n)
                                                         for n in made.data["files"]}})
    return manifest.open_export(made.folder)


def test_a_model_is_judged_by_every_graph(folder: Path, tmp_path: Path) -> None:
    """A fault in a formulation that is no default, and in it alone."""
    made = export(ExportRequest(str(checkpoint(folder, "youtu")), tmp_path / "e", max_context=100))
    assert not next(g for g in made.graphs if g.name == "decode.attention").default
    sound = against_source(made)
    for graph in made.graphs:
        assert any(line.startswith(f"{graph.name}: outputs and the cache rows") for line in sound.examined)
    assert sound.findings == []
    found = against_source(planted_in_one_graph(made, "decode.attention", "softmax_scale", 1.1)).findings
    assert [(f.name, f.where) for f in found] == [("unexplained-difference", "decode.attention")]


def test_a_graph_that_cannot_be_judged_is_named(folder: Path, tmp_path: Path) -> None:
    made = export(ExportRequest(str(checkpoint(folder, "youtu")), tmp_path / "e", max_context=100))
    (made.folder / "decode.attention.onnx").write_bytes(b"no graph")
    report = against_source(made)
    assert [name for name, _ in report.not_examined] == ["decode.attention against its source"]
    assert not any(line.startswith("decode.attention:") for line in report.examined)


# ---- the tables


def test_hypotheses_have_an_ailment() -> None:
    assert {h.ailment for h in HYPOTHESES} <= set(AILMENTS)
    assert {n for n, f in FAULTS.items() if n not in IN_FULL} <= {h.ailment for h in HYPOTHESES}
    assert {n for n in model_faults.FAULTS if n not in IN_FULL} <= {h.ailment for h in HYPOTHESES}
    assert set(IN_FULL) <= set(AILMENTS)


def test_the_articles_five() -> None:
    assert {a.article for a in AILMENTS.values()} - {None} == {1, 2, 3, 4, 5}


def test_a_changed_source_is_not_examined(folder: Path, tmp_path: Path) -> None:
    source = tiny_checkpoint(tmp_path / "c", "v2-lite")
    made = export(ExportRequest(str(source), tmp_path / "e", layer=0, max_context=300))
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes() + b" ")
    report = report_on(made)
    assert report.passed
    assert any("changed since the export" in why for _, why in report.not_examined)


def test_presets_are_not_an_export() -> None:
    report = examine(DoctorRequest("deepseek-v3"))
    assert report.kind == "preset"
    assert "deepseek-v3" in PRESETS
    assert report.not_examined


# ---- mistakes that no ladder plants


def _theta(w: Any) -> None:
    w.inv_freq = frequencies(replace(w.config, rope=replace(w.config.rope, rope_theta=10000.0)), 300)[0]


def _plain(w: Any) -> None:
    d_r = w.config.qk_rope_head_dim
    w.inv_freq = w.config.rope.rope_theta ** (-np.arange(0, d_r, 2) / d_r)


def _scale(value: Callable[[Any], float]) -> Callable[[Any], None]:
    def plant(w: Any) -> None:
        w.softmax_scale = value(w)

    return plant


def _set(**fields: Callable[[Any], Any]) -> Callable[[Any], None]:
    def plant(w: Any) -> None:
        for name, make in fields.items():
            setattr(w, name, make(w))

    return plant


def _no_output_bias(w: Any) -> None:
    w.o.bias = None


V3, NO_KEYS, FIELDS = "narrow-deepseek-v3", "yarn-without-keys", "yarn-with-two-keys"
MORE: dict[str, tuple[str, Callable[[Any], None]]] = {
    "scale-missing": (V3, _scale(lambda w: 1.0)), "scale-twice": (V3, _scale(lambda w: w.softmax_scale**2)),
    "scale-from-nope": (V3, _scale(lambda w: w.softmax_scale * (40 / 24) ** 0.5)),
    "scale-from-keys": ("article", _scale(lambda w: w.config.qk_head_dim**-0.5)),
    "mscale-field": (FIELDS, _scale(lambda w: w.config.qk_head_dim**-0.5 * mscale(40.0, 0.4) ** 2)),
    "mscale-uncalled-for": (NO_KEYS, _scale(lambda w: w.softmax_scale * mscale(40.0, 1.0) ** 2)),
    "rope-factor-dropped": (NO_KEYS, _set(rope_factor=lambda w: 1.0)), "rope-theta": ("narrow-kimi-k2", _theta),
    "rope-unstretched": (V3, _plain), "query-norm-skipped": (V3, _set(q_a_norm=lambda w: None)),
    "up-v-bias-twice": ("article", _set(b_uv=lambda w: 2 * w.b_uv)),
    "projection-bias-lost": ("article", _no_output_bias),
    "weights-differ": ("article", _set(b_uk=lambda w: 3 * w.b_uk))}


@pytest.mark.parametrize("name", MORE)
def test_planted_besides(narrow: list[str], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    base = PRESETS[V3]
    bare = replace(base.rope, mscale=None, mscale_all_dim=None)
    monkeypatch.setitem(PRESETS, NO_KEYS, replace(base, rope=bare))
    monkeypatch.setitem(PRESETS, FIELDS, replace(base, rope=replace(base.rope, mscale=0.4, mscale_all_dim=1.0)))
    model, plant = MORE[name]
    request = ExportRequest(model, tmp_path / "e", max_context=300)
    assert against_source(export(replace(request, out=tmp_path / "sound"))).findings == []
    found = against_source(export(request, tamper=Tamper(plant))).findings
    assert {f.name for f in found} == {name}, [f.evidence for f in found]


@pytest.mark.parametrize(("name", "model", "options", "fields"), [
    ("choice-bias-dropped", "v3", {"choice_bias": False}, {}),
    ("logits-scale-dropped", "minicpm3", {}, {"dim_model_base": 64})])
def test_models_made_of_a_mistaken_source(folder: Path, name: str, model: str, options: dict[str, Any],
                                          fields: dict[str, Any], tmp_path: Path) -> None:
    """What a mistaken checkpoint's export says, held against the sound checkpoint."""
    sound = export(ExportRequest(str(checkpoint(folder, model)), tmp_path / "sound", max_context=300))
    other = tiny_checkpoint(tmp_path / "other", model, **options, **fields)
    made = export(ExportRequest(str(other), tmp_path / "e", max_context=300))
    manifest.rewrite(made.folder, made.data | {n: sound.data[n] for n in ("source", "config", "decoder")})
    found = against_source(manifest.open_export(made.folder)).findings
    assert {f.name for f in found} == {name}, [f.evidence for f in found]
