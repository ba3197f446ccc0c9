"""Refitting: which weights an engine is handed, byte for byte, and which exports and engines are refused. The refitter
is a stand-in: TensorRT's own needs a GPU."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch

from engines import __main__ as command_line
from engines import refit, trt, trt_runtime, trt_session
from engines.build import BuildRequest, build, open_engines
from engines.build_options import BuildOptions
from engines.handed import Weight, graph_weights
from engines.refit import check_same_network, fixed, refit_engines
from engines.trt_runtime import Refitter
from exporter import console, manifest
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.weight_store import WEIGHT_FILE
from tests import fake_builder, fake_tensorrt

Make = Callable[..., Export]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    def once(**options: Any) -> Export:
        folder = tmp_path_factory.mktemp("refit") / "an export"
        return export(ExportRequest("article", folder, **{"target": "trt-rtx", "max_context": 64, **options}))

    return once


@pytest.fixture(scope="module")
def own(make: Make) -> Export:
    return make()


@pytest.fixture(scope="module")
def tuned(make: Make) -> Export:
    """The same configuration, other weights: seed 1."""
    return make(seed=1)


def weights_of(made: Export, name: str = "decode.kqt") -> dict[str, Weight]:
    return graph_weights(made.folder / f"{name}.onnx", {})


# --- What is handed over ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_weights_are_the_bytes_that_the_graph_names(dtype: str, make: Make) -> None:
    """Held against the file as onnx itself resolves it: offset and length, every initializer."""
    made = make(dtype=dtype)
    path = made.folder / "decode.kqt.onnx"
    content = (made.folder / WEIGHT_FILE).read_bytes()
    found = weights_of(made)
    initializers = onnx.load(path, load_external_data=False).graph.initializer
    assert set(found) == {t.name for t in initializers}
    assert {"w_uk", "w_uv"} <= {name for name, weight in found.items() if weight.stored}
    resolved = {t.name: onnx.numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    for tensor in initializers:
        weight, entry = found[tensor.name], {e.key: e.value for e in tensor.external_data}
        assert weight.shape == tuple(tensor.dims)
        assert weight.data.tobytes() == resolved[tensor.name].tobytes()
        assert weight.stored == bool(entry)
        if entry:
            start = int(entry["offset"])
            assert weight.data.tobytes() == content[start:start + int(entry["length"])]


def test_weights_that_lie_elsewhere(own: Export, tmp_path: Path) -> None:
    shutil.copy(own.folder / "decode.kqt.onnx", tmp_path)
    places = {WEIGHT_FILE: own.folder / WEIGHT_FILE}
    found, expected = graph_weights(tmp_path / "decode.kqt.onnx", places), weights_of(own)
    assert {n: w.data.tobytes() for n, w in found.items()} == {n: w.data.tobytes() for n, w in expected.items()}


@pytest.fixture
def module(own: Export, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """TensorRT whose plans are refittable engines of the weights that `names` picks."""
    def opened(plan: bytes) -> fake_tensorrt.Engine:
        engine = fake_tensorrt.Engine(own.folder / f"{plan.decode().split()[-1]}.onnx")
        engine.prototypes = {n: (KINDS[w.dtype], w.count) for n, w in graph_weights(engine.graph, {}).items()
                             if w.stored and n not in made.left_out}
        return engine

    made = fake_tensorrt.runtime(opened)
    made.left_out, made.__version__ = set(), fake_builder.VERSION
    for place in (trt, trt_runtime, trt_session):
        monkeypatch.setattr(place, "load", lambda backend: made)
    monkeypatch.setattr(refit, "require_cuda", lambda backend: None)
    return made


KINDS: dict[int, str] = {onnx.TensorProto.FLOAT: "FLOAT", onnx.TensorProto.FLOAT16: "HALF",
                         onnx.TensorProto.BFLOAT16: "BF16"}


def engine_of(weights: dict[str, Weight]) -> fake_tensorrt.Engine:
    engine = fake_tensorrt.Engine(Path("no graph"))
    engine.prototypes = {n: (KINDS[w.dtype], w.count) for n, w in weights.items() if w.stored}
    return engine


def refitter(engine: fake_tensorrt.Engine) -> Refitter:
    return Refitter("trt", engine, trt.make_logger("trt"))  # type: ignore[arg-type, unused-ignore]


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_every_weight_is_handed_by_name(dtype: str, make: Make, module: SimpleNamespace) -> None:
    weights = weights_of(make(dtype=dtype))
    engine = engine_of(weights)
    engine.lacking = set(engine.prototypes)
    refitter(engine).refit(weights)
    assert engine.handed == {n: w.data.tobytes() for n, w in weights.items() if w.stored}
    assert engine.refits == 1


def test_weights_that_do_not_fit_are_named(own: Export, module: SimpleNamespace) -> None:
    weights = weights_of(own)
    engine = engine_of(weights)
    engine.prototypes["w_uk"] = ("HALF", weights["w_uk"].count)
    with pytest.raises(CheckError, match=r"w_uk: the engine takes \d+ numbers of HALF; the export has \d+ of FLOAT, "
                                         r"shape \[\d+, \d+, \d+\]"):
        refitter(engine).refit(weights)
    engine.prototypes["w_uk"] = ("FLOAT", 5)
    with pytest.raises(CheckError, match="w_uk: the engine takes 5 numbers of FLOAT"):
        refitter(engine).refit(weights)
    engine = engine_of(weights)
    engine.lacking = {"w_uv", "unknown"}
    with pytest.raises(CheckError, match=r"^the engine still lacks unknown; the export has no such weights"):
        refitter(engine).refit(weights)
    engine = engine_of(weights)
    engine.refuses = {"w_uv"}
    with pytest.raises(CheckError, match=r"^w_uv: TensorRT refused the new values: will not take w_uv"):
        refitter(engine).refit(weights)
    assert engine.refits == 0


def test_a_weight_that_an_engine_cannot_take_must_not_have_changed(own: Export, tuned: Export) -> None:
    old, new = weights_of(own), weights_of(tuned)
    changed = {n for n, w in new.items() if w.stored and w.data.tobytes() != old[n].data.tobytes()}
    assert {"w_uk", "w_uv"} <= changed
    assert changed < {n for n, w in new.items() if w.stored}  # the cos and sin tables are the same
    assert set(fixed(set(), old, new)) == changed
    assert fixed(changed, old, new) == []
    assert fixed(changed - {"w_uk"}, old, new) == ["w_uk"]
    assert fixed(set(), old, old) == []


# --- Which exports go together ----------------------------------------------------------------------------------------


def test_a_fine_tuned_checkpoint_is_the_same_network(own: Export, tuned: Export) -> None:
    for graph in own.graphs:
        check_same_network(own, tuned, graph)


@pytest.mark.parametrize(("options", "pattern"), [
    ({"max_context": 5000}, r"decode\.kqt: weight \S+ has shape .*; expected "),
    ({"dtype": "fp16"}, r"decode\.kqt: weight \S+ has shape .* of FLOAT16 in .*; expected .* of FLOAT, as in "),
    ({"cache": "concat"}, r"decode\.kqt: .*two exports of one configuration"),
    ({"merge_q": True}, r"decode\.kqt: weight \S+ (is in .* alone|has shape)"),
    ({"absorb": "folded"}, r"decode\.kqt: weight \S+ (is in .* alone|has shape)"),
    ({"causal": False}, r"has no decode\.kqt, which the engine was built from; export it with the options of ")])
def test_other_exports_are_refused(options: dict[str, Any], pattern: str, own: Export, make: Make) -> None:
    other = make(**options)
    with pytest.raises(InputError, match=pattern) as caught:
        check_same_network(own, other, own.graph("decode", "kqt"))
    assert "\n" not in str(caught.value)


def test_a_changed_constant_is_refused(own: Export, tmp_path: Path) -> None:
    """What lies in the graph itself, and not in the weight file, is compiled in."""
    other = Export(Path(shutil.copytree(own.folder, tmp_path / "other")), own.data, own.config, own.graphs)
    path = other.folder / "decode.kqt.onnx"
    model = onnx.load(path, load_external_data=False)
    constant = next(t for t in model.graph.initializer if not t.external_data)
    constant.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(constant) + 1, constant.name))
    path.write_bytes(model.SerializeToString())
    with pytest.raises(InputError, match=rf"constant {re.escape(constant.name)} of .* is not that of"):
        check_same_network(own, other, own.graph("decode", "kqt"))


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def built(own: Export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Export]:
    """An export with engines whose plans name their graph, built with `options`."""
    def made(name: str = "first", **options: Any) -> Export:
        copy = open_export(Path(shutil.copytree(own.folder, tmp_path / name)))
        with monkeypatch.context() as patched:
            fake_builder.install(patched)
            patched.setattr(trt, "check_options", lambda backend, options: None)
            build(BuildRequest(copy.folder, "trt", max_batch=2, options=BuildOptions(**options)))
        return copy

    return made


@pytest.fixture
def second(tuned: Export, tmp_path: Path) -> Export:
    return open_export(Path(shutil.copytree(tuned.folder, tmp_path / "second")))


def test_engines_of_the_new_export(built: Callable[..., Export], second: Export, module: SimpleNamespace) -> None:
    """They lie in its own folder, whole, and open as its own; the old ones stay."""
    first = built(refit=True)
    before = open_engines(first, "trt")
    made = refit_engines(first.folder, second.folder, "trt")
    assert made == second.folder / "engines" / "trt"
    engines = open_engines(second, "trt")
    assert [e.graph for e in engines.engines] == [e.graph for e in before.engines]
    kept = [e for e in engines.engines if e.file]
    for record, engine in zip(kept, module.opened, strict=True):
        content = (made / str(record.file)).read_bytes()
        assert content.startswith(b"refitted ")
        assert record.plan_bytes == len(content)
        assert engine.handed == {n: w.data.tobytes() for n, w in weights_of(second, record.graph).items() if w.stored}
    assert open_engines(first, "trt") == before
    with pytest.raises(InputError, match=r"not empty; .*--overwrite"):
        refit_engines(first.folder, second.folder, "trt")
    refit_engines(first.folder, second.folder, "trt", overwrite=True)


def test_a_stripped_plan_is_made_whole(built: Callable[..., Export], module: SimpleNamespace) -> None:
    first = built(strip=True)
    refit_engines(first.folder, first.folder, "trt", overwrite=True)
    plain = built(name="plain")
    with pytest.raises(InputError, match="built without --refit, its weights are fixed; build it again with --refit"):
        refit_engines(plain.folder, plain.folder, "trt", overwrite=True)
    assert all((open_engines(first, "trt").folder / str(e.file)).read_bytes().startswith(b"refitted ")
               for e in open_engines(first, "trt").engines if e.file)


def test_engines_that_cannot_take_new_weights(built: Callable[..., Export], second: Export, module: SimpleNamespace
                                              ) -> None:
    first = built(strip=True)
    with pytest.raises(InputError, match="built without --refit, its weights are fixed; build it again with --refit"):
        refit_engines(first.folder, second.folder, "trt")
    with pytest.raises(InputError, match="--backend ort: has no engines to refit; expected trt or trt-rtx"):
        refit_engines(first.folder, second.folder, "ort")
    folder = first.folder / "engines" / "trt"
    data = json.loads((folder / manifest.NAME).read_text())
    manifest.rewrite(folder, data | {"options": data["options"] | {"refit": True}})
    module.__version__ = "0.1"
    with pytest.raises(InputError, match=r"built with tensorrt 0\.0, installed is 0\.1; a plan loads in the version"):
        refit_engines(first.folder, second.folder, "trt")
    module.__version__, module.left_out = fake_builder.VERSION, {"w_uk"}
    with pytest.raises(InputError, match=r"\.engine: w_uk changed, and this engine cannot take new values for them; "
                                         "build engines of .*second instead"):
        refit_engines(first.folder, second.folder, "trt")
    assert not (second.folder / "engines").exists()


def test_command_line_without_a_device(built: Callable[..., Export], second: Export, monkeypatch: pytest.MonkeyPatch,
                                       capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    first = built(refit=True)
    words = ["engines", "refit", str(first.folder), "--weights-of", str(second.folder), "--backend", "trt"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as end:
        console.main(command_line.cli, "python -m engines")
    assert end.value.code == 2
    assert capsys.readouterr() == ("", "error: not run: no CUDA device; trt engines build here but run only on a GPU\n")
    assert not (second.folder / "engines").exists()


def test_command_line(built: Callable[..., Export], second: Export, module: SimpleNamespace,
                      monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = built(refit=True)
    monkeypatch.setattr(sys, "argv", ["engines", "refit", str(first.folder), "--weights-of", str(second.folder),
                                      "--backend", "trt", "--json"])
    with pytest.raises(SystemExit) as end:
        console.main(command_line.cli, "python -m engines")
    assert not end.value.code
    out = json.loads(capsys.readouterr().out)
    assert out["folder"] == str(second.folder / "engines" / "trt")
    assert sorted(out["engines"]) == sorted(str(e.file) for e in open_engines(second, "trt").engines if e.file)
