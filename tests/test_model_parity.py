"""The ladder of whole models: green for every family, and each planted fault, broken rung and missing source shows."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engines.backends import BACKENDS
from engines.session import Session
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.source import open_model
from tests.marks import fast, slow
from tests.model_checkpoints import MODELS, attentions, tiny_checkpoint
from validate import model_parity, polygraphy_run
from validate.__main__ import cli
from validate.ladder import Ladder, ModelRung
from validate.memory import MemoryLimits, report
from validate.model_faults import FAULTS, fault
from validate.model_parity import top1_and_kl
from validate.model_traces import Examiner
from validate.parity import check_folder, check_model

pytest.importorskip("transformers")
CONTEXT = 1000  # beyond every tiny model's original 64 positions
JUDGES = ["interpreter", "ort"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def checkpoint(folder: Path, name: str, **options: Any) -> Path:
    made = folder / f"{name}{''.join(map(str, options.values()))}"
    return made if made.is_dir() else tiny_checkpoint(made, name, **options)


def exported(folder: Path, out: Path, name: str, **request: Any) -> Export:
    return export(ExportRequest(str(checkpoint(folder, name)), out, **{"max_context": CONTEXT} | request))


def climb(folder: Path, name: str, backends: list[str] | None = None, planted: str | None = None, **request: Any,
          ) -> Ladder:
    model = checkpoint(folder, name)
    chosen = fault(planted, open_model(str(model)).decoder) if planted else None
    return check_model([ExportRequest(str(model), Path("unused"), **{"max_context": CONTEXT} | request)],
                       backends=backends or JUDGES, fault=chosen)


def failures(ladder: Ladder) -> list[str]:
    return [f"{r.name} {r.graph}: rel {r.rel:.1e}, 1 - cos {1 - r.cosine:.0e} {r.note}" for r in ladder.rungs
            if r.counted and not r.passed]


def names(ladder: Ladder) -> set[str]:
    return {r.name for r in ladder.rungs}


@pytest.mark.parametrize("name", MODELS)
def test_every_family_is_green(folder: Path, name: str) -> None:
    ladder = climb(folder, name, ["ort"])
    assert ladder.passed, failures(ladder)
    steps = {f"ort/{step}" for step in ("prefill", "chunked", "chunked/invisible", "decode", "ragged", "far", "tail")}
    assert names(ladder) >= {*steps, "weights", "ort/decode/cache", "ort/far/cache"}
    if name == "transmla":
        assert ladder.not_run == ["transformers: not run: it has no class for MLA without latent norms (TransMLA)"]
    else:
        assert "transformers" in names(ladder)
    rungs = [r for r in ladder.rungs if isinstance(r, ModelRung)]
    assert all(r.excluded == 0 for r in rungs)
    assert all(r.top1 == 1 and r.kl is not None and r.kl < 1e-8 for r in rungs if r.top1 is not None)
    assert {r.note for r in rungs if r.name == "ort/decode/cache"} <= {
        f"worst: attention {i} (layer {i * MODELS[name].layers // attentions(name)})" for i in range(attentions(name))}


SIXTEEN = ("v3", "mistral4", "minicpm3", "transmla")
FORMS = list(itertools.product(["v3", "longcat"], ["absorbed", "expanded"], ["append", "scatter", "concat"]))


@pytest.mark.parametrize(("name", "prefill", "cache"), fast(
    FORMS, [*FORMS[:6], ("longcat", "absorbed", "scatter"), ("longcat", "expanded", "append")]))
def test_every_form(folder: Path, name: str, prefill: str, cache: str) -> None:
    ladder = climb(folder, name, cache=cache, prefill=prefill)
    assert ladder.passed, failures(ladder)
    assert ("interpreter/ragged" in names(ladder)) == (cache != "concat")


@pytest.mark.parametrize(("dtype", "name"), [("fp16", "v3"), *(("bf16", n) for n in SIXTEEN), *slow(
    ("fp16", n) for n in SIXTEEN[1:])])
def test_16_bit(folder: Path, dtype: str, name: str) -> None:
    ladder = climb(folder, name, dtype=dtype)
    assert ladder.passed, failures(ladder)
    judged = [r for r in ladder.rungs if r.name.startswith("interpreter/") and isinstance(r, ModelRung)]
    assert all(r.counted for r in judged)
    by_arithmetic = [r for r in ladder.rungs if r.name.startswith("ort/") and not r.name.endswith("/untouched")]
    assert not any(r.counted for r in by_arithmetic)
    assert all(f"{r.excluded} of {r.excluded + r.tokens} left out" in r.note for r in judged if r.excluded)
    if dtype == "bf16":
        assert "ort, bf16: not run: ONNX Runtime's CPU has no bfloat16 MatMul" in ladder.not_run
    if name in ("minicpm3", "transmla"):  # nothing is routed
        assert not any(r.excluded for r in judged)


@pytest.mark.parametrize("options", [{"logits": "all"}, {"absorb": "folded"}, {"max_context": 9}, {"max_context": 1},
                                     {"target": "trt-rtx", "experts": "gather"},
                                     {"target": "trt-rtx", "experts": "dense"}])
def test_other_exports(folder: Path, options: dict[str, Any]) -> None:
    ladder = climb(folder, "v3", ["ort"], **options)
    assert ladder.passed, failures(ladder)


@pytest.mark.parametrize("layers", ["0:1", "1:2", "1:3"])
def test_slices(folder: Path, layers: str) -> None:
    ladder = climb(folder, "v3", layers=layers)
    assert ladder.passed, failures(ladder)
    assert "transformers: not run: it runs whole models, and this export is a slice" in ladder.not_run
    softmax = [r.top1 for r in ladder.rungs if r.name == "ort/decode" and isinstance(r, ModelRung)]
    assert all((t is None) == (layers != "1:3") for t in softmax)


@pytest.mark.parametrize("target", ["ort", "trt-rtx"])
@pytest.mark.parametrize("name", ["v3", "longcat", "mistral4", "youtu"])
def test_linked_weights_are_read_back(folder: Path, tmp_path: Path, name: str, target: str) -> None:
    made = exported(folder, tmp_path / "x", name, weights="link", target=target)
    assert made.data["weights"]["written_bytes"] < made.data["weights"]["bytes"]
    ladder = Ladder()
    model_parity.check(made, ladder, 0, backends=["ort"])
    assert ladder.passed, failures(ladder)


def test_a_changed_linked_weight_is_red(folder: Path, tmp_path: Path) -> None:
    """The graphs' offsets are what is read: one that points elsewhere in the checkpoint shows."""
    import onnx

    from exporter import manifest

    made = exported(folder, tmp_path / "x", "youtu", weights="link")
    for graph in made.graphs:
        path = made.folder / graph.file
        model = onnx.load(path, load_external_data=False)
        by_name = {t.name: t for t in model.graph.initializer}
        gate, up = (by_name[f"layers.1.mlp.{m}_proj.weight"] for m in ("gate", "up"))
        old, new = ({e.key: e for e in t.external_data} for t in (gate, up))
        old["offset"].value = new["offset"].value
        path.write_bytes(model.SerializeToString())
    data = {**made.data, "files": {n: manifest.file_record(made.folder / n) for n in made.data["files"]}}
    manifest.rewrite(made.folder, data)
    ladder = check_folder(made.folder)
    assert {"weights", "ort/prefill"} <= {r.name for r in ladder.rungs if not r.passed}
    assert "layers.1.mlp.gate_proj.weight" in next(r.note for r in ladder.rungs if r.name == "weights")


@pytest.mark.parametrize("layer", [None, 1])
def test_without_weights_it_says_so(folder: Path, tmp_path: Path, layer: int | None) -> None:
    made = exported(folder, tmp_path / "x", "v3", weights="none", layer=layer)
    ladder = check_folder(made.folder)
    assert "weights: not run: exported with --weights none, there are none to read back" in ladder.not_run
    assert any(line.startswith("ort: not run: exported with --weights none") for line in ladder.not_run)
    assert ladder.passed  # what the references say of each other
    assert not any(r.name.startswith(("ort", "interpreter")) for r in ladder.rungs)


def test_one_attention_of_a_linked_checkpoint(folder: Path, tmp_path: Path) -> None:
    made = exported(folder, tmp_path / "x", "v3", weights="link", layer=1)
    assert made.data["weights"]["linked"]
    ladder = check_folder(made.folder)
    assert ladder.passed, failures(ladder)
    assert "weights" in names(ladder)


def test_weights_on_another_disk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hard links refused: the manifest says where the values lie, and the audit reads them there."""
    import os

    def refuse(*paths: Any) -> None:
        raise OSError("another disk")

    monkeypatch.setattr(os, "link", refuse)
    made = exported(folder, tmp_path / "x", "v3", weights="link")
    ladder = check_folder(made.folder)
    assert ladder.passed, failures(ladder)
    assert any(line.startswith("interpreter: not run: weights lie outside the folder") for line in ladder.not_run)
    assert {"weights", "ort/prefill"} <= names(ladder)
    measured = report(made, MemoryLimits.of(made, None, None, 16))
    assert measured["ort"] == []
    assert any("weights lie outside the folder" in line for line in measured["not_run"])
    with pytest.raises(InputError, match="Polygraphy will not look"):
        polygraphy_run.run(made.folder, tmp_path / "out")


# --- Sources that the reference cannot read ---------------------------------------------------------------------------


def test_a_source_that_is_gone(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(checkpoint(folder, "v3"), tmp_path / "c")
    made = export(ExportRequest(str(source), tmp_path / "x", max_context=60))
    shutil.rmtree(source)
    ladder = check_folder(made.folder)
    assert ladder.passed, failures(ladder)
    assert any(line.startswith("float64 reference, transformers: not run:") and "is gone" in line
               for line in ladder.not_run)
    assert "weights: not run: the source cannot be read as floats" in ladder.not_run
    assert any("held against the default decode graph" in line for line in ladder.not_run)
    assert "ort/prefill" in names(ladder)
    half = export(ExportRequest(str(checkpoint(folder, "v3")), tmp_path / "y", max_context=60, dtype="fp16"))
    data = {**half.data, "source": {**half.data["source"], "path": str(source)}}
    (half.folder / "manifest.json").write_text(json.dumps(data))
    silent = check_folder(half.folder)
    assert not silent.passed
    assert silent.failure.startswith("no rung could be judged: float64 reference, transformers: not run:")
    assert any("nobody knows which tokens a router could turn at fp16" in line for line in silent.not_run)


def test_a_quantised_source(folder: Path, tmp_path: Path) -> None:
    from tests.quantised_checkpoints import Checkpoint

    source = Checkpoint.read(checkpoint(folder, "v3")).fp8_block((16, 16)).write(tmp_path / "c")
    made = export(ExportRequest(str(source), tmp_path / "x", max_context=60))
    ladder = check_folder(made.folder)
    assert ladder.passed, failures(ladder)
    assert any(line.startswith("float64 reference, transformers: not run:") and "is quantised (fp8)" in line
               for line in ladder.not_run)


# --- It can fail ------------------------------------------------------------------------------------------------------

PLANTED = {"routed-scale-dropped": ("v3", "v2", "longcat"), "choice-bias-as-weight": ("v3", "longcat", "kimi-k2"),
           "groups-ignored": ("v3", "v2-grouped"), "residual-scale-dropped": ("minicpm3",),
           "embedding-scale-dropped": ("minicpm3",), "latent-scale-dropped": ("longcat",),
           "query-temperature-dropped": ("mistral4",), "last-token-off-by-one": ("youtu", "v3"),
           "scatter-one-too-many": ("youtu", "longcat")}


@pytest.mark.parametrize(("name", "planted"), fast([(m, f) for f, models in PLANTED.items() for m in models],
                                                   [(models[0], f) for f, models in PLANTED.items()]))
def test_a_planted_fault_turns_its_rungs_red(folder: Path, name: str, planted: str) -> None:
    ladder = climb(folder, name, planted=planted, cache=FAULTS[planted].cache or "append")
    assert not ladder.passed
    for red in FAULTS[planted].red:
        rungs = [r for r in ladder.rungs if r.name == red]
        assert rungs, f"no rung is called {red}"
        assert not any(r.passed for r in rungs), f"{red} stayed green under {planted}"
    assert all(r.passed for r in ladder.rungs if r.name in ("transformers", "weights"))


@pytest.mark.parametrize("dtype", fast(["fp16", "bf16"], ["bf16"]))
@pytest.mark.parametrize(("name", "planted"), [("v3", "routed-scale-dropped"), ("minicpm3", "embedding-scale-dropped"),
                                               ("v3", "last-token-off-by-one"), ("longcat", "latent-scale-dropped")])
def test_16_bit_tolerances_still_catch_it(folder: Path, name: str, planted: str, dtype: str) -> None:
    ladder = climb(folder, name, ["interpreter"], planted, dtype=dtype)
    for red in FAULTS[planted].red:
        if red.startswith("interpreter"):
            assert not any(r.passed for r in ladder.rungs if r.name == red), red


def test_every_listed_fault_is_planted() -> None:
    assert set(PLANTED) == set(FAULTS)


def test_an_unknown_fault_lists_those_that_exist(folder: Path) -> None:
    decoder = open_model(str(checkpoint(folder, "youtu"))).decoder
    with pytest.raises(InputError, match="expected one of last-token-off-by-one, scatter-one-too-many for youtu"):
        fault("groups-ignored", decoder)


@pytest.mark.parametrize("layer", [None, 1])
def test_a_rung_that_breaks_is_red_and_the_ladder_goes_on(folder: Path, tmp_path: Path, layer: int | None,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    made = exported(folder, tmp_path / "x", "youtu", layer=layer, max_context=60)
    real = type(BACKENDS["ort"].open(made, made.graph("decode")))
    infer = Session.infer

    def broken(self: Session, feed: Any) -> Any:
        if isinstance(self, real) and self.graph.kind == "decode" and len(feed["past_lengths"]) == 4:
            raise RuntimeError("the kernel\nfell over")
        return infer(self, feed)

    monkeypatch.setattr(Session, "infer", broken)
    ladder = check_folder(made.folder)
    assert {r.name for r in ladder.rungs if not r.passed} == {"ort/ragged"}
    assert {r.note for r in ladder.rungs if not r.passed} == {"RuntimeError: the kernel"}
    assert "ort/decode" in names(ladder)
    assert json.dumps([r.to_dict() for r in ladder.rungs])


def test_tokens_that_a_router_could_turn_are_counted(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                     ) -> None:
    """With a bound that no margin reaches, nothing is compared, and nothing passes silently."""
    made = exported(folder, tmp_path / "x", "v3", max_context=60)
    monkeypatch.setattr("validate.model_traces.ROUNDS", 1)
    monkeypatch.setattr(Examiner, "_measure", lambda self, prompts: np.array([1e9, 1e9]))
    ladder = Ladder()
    model_parity.check(made, ladder, 0, backends=["ort"])
    assert "ort/prefill, prefill.qkt: not run: a router could turn at every token" in ladder.not_run
    assert "transformers: not run: a router could turn at every token" in ladder.not_run
    rows = next(r for r in ladder.rungs if r.name == "ort/prefill/cache")
    assert isinstance(rows, ModelRung)
    assert rows.excluded == 60  # of the third attention, whose layer comes after a router; the two before it stand
    assert rows.tokens == 120
    assert "60 of 180 left out: a router could turn" in rows.note


def test_top1_and_kl() -> None:
    reference = np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    assert top1_and_kl(reference.astype(np.float32), reference) == (1.0, pytest.approx(0, abs=1e-12))
    top1, kl = top1_and_kl(reference[::-1], reference)
    assert top1 == 0
    assert kl == pytest.approx(1.948, abs=2e-3)
    assert top1_and_kl(np.full((2, 3), np.nan), reference) == (None, None)


# --- The commands -----------------------------------------------------------------------------------------------------


def invoke(*args: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(cli, [*args, "--json"])
    return result.exit_code, json.loads(result.stdout) if result.stdout.startswith("{") else {"error": result.exception}


def test_the_command_on_a_folder_and_on_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    made = exported(folder, tmp_path / "x", "v3", max_context=60)
    code, data = invoke("parity", str(made.folder))
    assert code == 0
    rung = next(r for r in data["rungs"] if r["name"] == "ort/decode")
    assert {"graph", "cache", "dtype", "rel", "cosine", "pass", "top1", "kl", "tokens", "excluded"} <= set(rung)
    shown = CliRunner().invoke(cli, ["parity", str(made.folder)])
    assert shown.exit_code == 0
    assert "top-1" in shown.stdout
    model = str(checkpoint(folder, "v3"))
    code, data = invoke("parity", model, "--dtype", "fp32", "--cache", "append", "--max-context", "60")
    assert code == 0
    assert {r["graph"] for r in data["rungs"]} >= {"decode.kqt", "prefill.expanded", "prefill.kqt"}
    code, data = invoke("parity", model, "--dtype", "fp32", "--cache", "append", "--max-context", "60", "--plant",
                        "groups-ignored")
    assert (code, data["pass"]) == (1, False)


@pytest.mark.parametrize("given", [["--dtype", "fp16"], ["--cache", "append"], ["--absorb", "folded"],
                                   ["--causal", "on"], ["--merge-q"], ["--max-context", "9"], ["--layer", "0"]])
def test_options_of_a_model_are_refused_with_a_folder(folder: Path, tmp_path: Path, given: list[str]) -> None:
    made = exported(folder, tmp_path / "x", "v3", max_context=60)
    result = CliRunner().invoke(cli, ["parity", str(made.folder), *given])
    assert isinstance(result.exception, InputError)
    assert str(result.exception).startswith(f"{given[0]}: for a MODEL")


def test_memory_of_a_model(folder: Path, tmp_path: Path) -> None:
    made = exported(folder, tmp_path / "x", "longcat")
    data = report(made, MemoryLimits.of(made, 4, 500, 32))
    assert data["attentions"] == attentions("longcat") == 4
    assert data["model_bytes_per_token"]["latent"] == made.cache_bytes_per_token
    assert data["cache_bytes"]["latent"] == made.cache_bytes_per_token * 4 * 500
    assert data["cache_bytes"]["expanded"] == 4 * 4 * 500 * 4 * made.config.expanded_dim
    assert [(r["graph"].split(".")[0], r["sizes"]) for r in data["ort"]] == [
        ("decode", {"B": 1, "T": 1, "S": 500}), ("prefill", {"B": 1, "T": 32, "S": 500})]
    assert all(r["loaded_bytes"] > 0 for r in data["ort"])
    code, shown = invoke("memory", str(made.folder), "--chunk", "8")
    assert code == 0
    assert shown["weights"]["parameters"] == made.data["source_parameters"]
    assert "attentions" in CliRunner().invoke(cli, ["memory", str(made.folder), "--chunk", "8"]).stdout


@pytest.mark.parametrize("cache", ["scatter", "concat"])
def test_memory_of_other_cache_forms(folder: Path, tmp_path: Path, cache: str) -> None:
    made = exported(folder, tmp_path / "x", "v3", cache=cache, max_context=100)
    assert len(report(made, MemoryLimits.of(made, None, None, 16))["ort"]) == 2


def test_memory_without_weights_is_one_line(folder: Path, tmp_path: Path) -> None:
    made = exported(folder, tmp_path / "x", "v3", weights="none")
    data = report(made, MemoryLimits.of(made, None, None, 16))
    assert data["ort"] == []
    assert any(line.startswith("ort: not run: ") and "--weights none" in line for line in data["not_run"])
    assert open_export(made.folder).attentions == data["attentions"]


@pytest.mark.parametrize("options", [{}, *slow([
    {"cache": "scatter", "max_context": 80}, {"cache": "concat"}, {"layers": "1:2"},
    {"logits": "all", "prefill": "expanded"}])])
def test_polygraphy_agrees_with_the_reference(folder: Path, tmp_path: Path, options: dict[str, Any],
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("polygraphy", reason="Polygraphy is an extra: pip install 'mla-export[polygraphy]'")
    monkeypatch.setattr(polygraphy_run.trt, "available", lambda backend: False)
    made = exported(folder, tmp_path / "x", "v3", **options)
    result = polygraphy_run.run(made.folder)
    assert [g.graph for g in result.graphs if g.passed and g.counted and g.cases == 3] == [g.name for g in made.graphs]
    assert any("its experts are ONNX Runtime's own operator" in line for line in result.not_run)
