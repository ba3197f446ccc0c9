"""Building engines: every formulation builds, the leanest is kept, nothing is left of a build that failed.

Real TensorRT-RTX builds where the builder's word counts (they need no GPU); a stand-in builder where only our own
bookkeeping is at stake.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache as memo
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper

from engines import __main__ as command_line
from engines import lint, measure, trt
from engines.backends import BACKENDS, default_graph, open_session
from engines.build import BuildRequest, build, build_elsewhere, built_backends, open_engines, ranges
from engines.build_options import BuildOptions
from exporter import console, manifest
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.formulations import BY_NAME
from exporter.manifest import Export, open_export
from exporter.presets import preset_config
from exporter.signature import Profile, Range, TensorSpec, profile, signature
from tests.fake_builder import FakeBuilder, install

MB = 1_000_000
CACHES, DTYPES = ("append", "scatter", "concat"), ("fp32", "fp16", "bf16")
Make = Callable[..., Export]
Tree = dict[str, str]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports of the article's layer by their options, each made once and never changed."""

    @memo
    def once(options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("made") / "export"
        return export(ExportRequest("article", folder, **{"max_context": 64, "max_batch": 2, **dict(options)}))

    return lambda **options: once(tuple(sorted(options.items())))


@pytest.fixture
def fresh(make: Make, tmp_path: Path) -> Make:
    """The same, copied: a test may build in it or damage it."""

    def copy(**options: Any) -> Export:
        return open_export(Path(shutil.copytree(make(**options).folder, tmp_path / "an export")))

    return copy


@pytest.fixture(scope="session")
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")


def tree(folder: Path) -> Tree:
    """Every path below a folder, with a digest of what it holds."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in sorted(folder.rglob("*"))}


def refuses(pattern: str, request: Callable[[], Any]) -> str:
    """The call is an InputError of one line that matches."""
    with pytest.raises(InputError, match=pattern) as caught:
        request()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    return install(monkeypatch)


# --- Real builds ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("cache", "dtype"), [(c, d) for c in CACHES for d in DTYPES])
def test_every_formulation_builds_and_the_leanest_is_kept(cache: str, dtype: str, rtx: None, fresh: Make) -> None:
    made = fresh(cache=cache, dtype=dtype, target="trt-rtx", prefill="expanded")
    before = tree(made.folder)
    engines = build(BuildRequest(made.folder))
    assert [e.graph for e in engines.engines] == [g.name for g in made.graphs]
    for kind in ("prefill", "decode"):
        rivals = [e for e in engines.engines if e.kind == kind]
        (kept,) = [e for e in rivals if e.file]
        assert kept.activation_bytes == min(e.activation_bytes for e in rivals)
        assert [e.default for e in rivals] == [e is kept for e in rivals]
        assert kept.file == f"{kept.graph}.engine"
        assert engines.plan(kept.graph) == engines.folder / kept.file
        assert engines.plan(kept.graph).stat().st_size == kept.plan_bytes
        for other in rivals:
            if other is not kept:
                refuses(rf"no engine of {other.graph} was kept; kept: .*{kept.graph}",
                        partial(engines.plan, other.graph))
    assert {p.name for p in engines.folder.iterdir()} == {"manifest.json", *(e.file for e in engines.engines if e.file)}
    new = tree(made.folder)
    assert {k: v for k, v in new.items() if not k.startswith("engines")} == before
    for e in engines.engines:
        path = made.folder / f"{e.graph}.onnx"
        sizes = {name: limits[2] for name, limits in e.limits.items()}
        expected = {"B": 2 if e.kind == "decode" else 1, "T": 1 if e.kind == "decode" else 64, "S": 64}
        assert sizes == {k: v for k, v in expected.items() if k != "S" or cache != "scatter"}
        assert e.predicted_bytes > 0  # held against measured builds in tests/test_predict.py
        assert e.weight_bytes == pytest.approx(weights_of(path), rel=0.02)
        assert weights_of(path) < e.plan_bytes
        assert 0 < e.activation_bytes < 40e6
        assert e.seconds > 0


def weights_of(graph: Path) -> int:
    """Bytes of the stored weights that a graph names."""
    model = onnx.load(graph, load_external_data=False)
    return sum(int(e.value) for i in model.graph.initializer for e in i.external_data if e.key == "length")


def test_headline_activation(rtx: None, tmp_path: Path) -> None:
    """README: 17.1 MB at batch 8 and 32768 rows of past, where `q @ k^T` asks for 629."""
    made = export(ExportRequest("deepseek-v2-lite", tmp_path / "lite", dtype="fp16", target="trt-rtx",
                                max_context=32768))
    engines = build(BuildRequest(made.folder, max_batch=8, max_context=32768, chunk=16))
    decode = {e.formulation: e for e in engines.engines if e.kind == "decode"}
    (kept,) = [e for e in decode.values() if e.file]
    assert kept.formulation == "kqt-half"
    assert kept.limits == {"B": [1, 1, 8], "T": [1, 1, 1], "S": [1, 4096, 32768]}
    assert kept.activation_bytes <= 20e6
    assert decode["kqt"].activation_bytes <= 28e6
    assert decode["qkt"].activation_bytes > 500e6
    c = made.config
    weights = 2 * (c.hidden_size * (16 * c.qk_head_dim + c.row_dim + 16 * c.v_head_dim)
                   + 16 * c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim))
    assert weights <= kept.plan_bytes <= 1.1 * weights
    assert kept.weight_bytes == pytest.approx(weights, rel=0.02)


def test_bidirectional_export_builds(rtx: None, fresh: Make) -> None:
    made = fresh(target="trt-rtx", causal=False, dtype="fp16")
    engines = build(BuildRequest(made.folder, formulation="kqt", chunk=32))
    assert [(e.graph, e.limits) for e in engines.engines] == [("prefill.kqt", {"B": [1, 1, 1], "T": [1, 32, 32]})]


def test_an_export_for_ort_builds_what_tensorrt_takes(rtx: None, fresh: Make) -> None:
    made = fresh(target="ort")
    assert {g.formulation for g in made.graphs} == {"kqt", "qkt", "attention"}
    engines = build(BuildRequest(made.folder, chunk=8))
    assert {e.graph for e in engines.engines} == {f"{k}.{f}" for k in ("prefill", "decode") for f in ("kqt", "qkt")}
    assert made.graph("decode").formulation == "qkt"
    assert next(e for e in engines.engines if e.file and e.kind == "decode").formulation == "kqt"


@pytest.mark.parametrize("sm", [("86", "120"), ("8.9",)])
def test_compute_capabilities_build(sm: tuple[str, ...], rtx: None, fresh: Make) -> None:
    made = fresh(target="trt-rtx", causal=False)
    engines = build(BuildRequest(made.folder, formulation="kqt", options=BuildOptions(sm=sm), chunk=4))
    assert engines.data["sm"] == list(sm)
    assert engines.plan("prefill.kqt").stat().st_size > 1e6


@pytest.mark.parametrize("sm", ["90", "9.0", "garbage", "", "86,120"])
def test_unknown_compute_capability(sm: str, rtx: None, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    message = refuses(rf"--sm {re.escape(sm)}: TensorRT-RTX 1\.\S+ does not list it.*; expected some of "
                      "75, 80, 86, 89, 120",
                      lambda: build(BuildRequest(made.folder, options=BuildOptions(sm=("86", sm)))))
    assert ("Hopper is served by `tensorrt`" in message) == (sm in ("90", "9.0"))
    assert not (made.folder / "engines").exists()


def saved(graph: Any, folder: Path) -> Path:
    path = folder / f"{graph.name}.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), path)
    return path


def deaf_attention(folder: Path, nonpad: bool) -> Path:
    """Attention with or without nonpad_kv_seqlen, which TensorRT's parser drops."""
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, ["B", 2, "T", 64]) for n in ("q", "k", "v", "y")]
    lengths = [helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"])] if nonpad else []
    inputs = ["q", "k", "v", *(["", "", "", "lengths"] if nonpad else [])]
    node = helper.make_node("Attention", inputs, ["y"], name="attend")
    graph = helper.make_graph([node], "deaf", [*tensors[:3], *lengths], tensors[3:])
    return saved(graph, folder)


@pytest.mark.parametrize("nonpad", [True, False])
def test_an_ignored_input_is_refused_by_lint_and_by_the_build(nonpad: bool, rtx: None, tmp_path: Path) -> None:
    path = deaf_attention(tmp_path, nonpad)
    shapes: Profile = dict.fromkeys(("q", "k", "v"), ((1, 2, 1, 64), (1, 2, 4, 64), (2, 2, 4, 64)))
    findings = [f.rule for f in lint.lint(path, {"B": 2, "T": 4})]
    if nonpad:
        assert findings == ["attention-nonpad-ignored"]
        with pytest.raises(CheckError, match=r"deaf\.onnx: the TensorRT parser ignored an input: .*Input: lengths"):
            trt.build("trt-rtx", path, [{**shapes, "lengths": ((1,), (1,), (2,))}])
    else:
        assert findings == []
        assert trt.build("trt-rtx", path, [shapes]).activation_bytes > 0


def test_what_the_parser_refuses_is_one_line(rtx: None, tmp_path: Path) -> None:
    """Head sizes that differ: lint says so in advance, and the parser's own report is folded into one line."""
    tensors = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, [1, 2, 4, d]) for n, d in
               (("q", 64), ("k", 64), ("v", 32), ("y", 32))]
    node = helper.make_node("Attention", ["q", "k", "v"], ["y"], name="attend")
    path = saved(helper.make_graph([node], "uneven", tensors[:3], tensors[3:]), tmp_path)
    assert [f.rule for f in lint.lint(path, {})] == ["attention-head-sizes"]
    with pytest.raises(CheckError, match=r"^uneven\.onnx: the TensorRT parser refused it: .*attend") as caught:
        trt.build("trt-rtx", path, [{}])
    assert "\n" not in str(caught.value)


def test_a_builder_without_the_figures_is_not_understood() -> None:
    lines = [(None, "Total Activation Memory: 12 bytes"), (None, "[I] Total Activation Memory: 34 bytes"),
             (None, "Total Weights Memory: 5 bytes"), (None, "Max Scratch Memory: 6 bytes")]
    assert trt._figures(lines, Path("g.onnx"), "trt") == {"activation_bytes": [12, 34], "weight_bytes": [5]}
    with pytest.raises(CheckError, match=r"g\.onnx: trt's builder did not log 'Total Weights Memory'"):
        trt._figures(lines[:2], Path("g.onnx"), "trt")


# --- Choice and bookkeeping -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("figures", "kept"), [
    ({"decode.kqt": 10, "decode.qkt": 20}, "decode.kqt"), ({"decode.kqt": 20, "decode.qkt": 10}, "decode.qkt"),
    ({"decode.kqt": 10, "decode.qkt": 10}, "decode.kqt")])  # alike: the export's default stays
def test_least_activation_is_kept(figures: dict[str, int], kept: str, fake: FakeBuilder, fresh: Make) -> None:
    fake.activation = {name: MB * count for name, count in figures.items()}
    engines = build(BuildRequest(fresh(target="trt-rtx").folder))
    decode = [e for e in engines.engines if e.kind == "decode"]
    assert [(e.graph, e.activation_bytes, e.default, e.file) for e in decode] == [
        (name, MB * figures[name], name == kept, f"{name}.engine" if name == kept else None) for name in figures]
    assert (engines.folder / f"{kept}.engine").read_bytes().strip().endswith(f"of {kept}".encode())
    assert {p.name for p in engines.folder.glob("decode*")} == {f"{kept}.engine"}


def test_manifest_is_complete(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    engines = build(BuildRequest(made.folder))
    data = json.loads((engines.folder / "manifest.json").read_text())
    assert data == engines.data
    assert set(data) == {"format", "toolkit", "engines_of", "backend", "sm", "options", "libraries", "layout", "timing",
                         "engines", "attempts", "refused", "builder", "notes", "files"}
    assert data["engines_of"] == hashlib.sha256((made.folder / "manifest.json").read_bytes()).hexdigest()
    assert (data["backend"], data["sm"], data["format"]) == ("trt-rtx", [], manifest.FORMAT)
    assert set(data["files"]) == {e.file for e in engines.engines if e.file}
    for name, record in data["files"].items():
        assert record["sha256"] == hashlib.sha256((engines.folder / name).read_bytes()).hexdigest()
    assert data["engines"] == [asdict(e) for e in engines.engines]
    assert engines == open_engines(made, "trt-rtx")
    assert built_backends(made) == ["trt-rtx"]
    assert "python" in data["libraries"]


@pytest.mark.parametrize("formulation", ["qkt", "expanded"])
def test_one_formulation(formulation: str, fake: FakeBuilder, fresh: Make) -> None:
    """A formulation of one kind leaves the other kind to the search."""
    made = fresh(target="trt-rtx", prefill="expanded", dtype="fp16")
    engines = build(BuildRequest(made.folder, formulation=formulation))
    expected = {"qkt": {"prefill.expanded-attention", "decode.qkt"}, "expanded": {"prefill.expanded", "decode.kqt"}}
    assert {e.graph for e in engines.engines if e.file} == expected[formulation]
    kind = "decode" if formulation == "qkt" else "prefill"
    assert [e.formulation for e in engines.engines if e.kind == kind] == [formulation]


@pytest.mark.parametrize("earlier", [False, True], ids=["first build", "with --overwrite"])
@pytest.mark.parametrize("error", [CheckError("the builder gave up"), KeyboardInterrupt(), OSError(28, "No space")],
                         ids=["check", "interrupt", "disk"])
def test_a_failed_build_leaves_nothing(error: BaseException, earlier: bool, fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    if earlier:
        build(BuildRequest(made.folder))
    before = tree(made.folder)
    fake.calls, fake.fail_at, fake.error = [], 2, error
    with pytest.raises(InputError if isinstance(error, OSError) else type(error)):
        build(BuildRequest(made.folder, overwrite=earlier, cache=False))
    assert len(fake.calls) == 2
    assert tree(made.folder) == before
    assert built_backends(made) == (["trt-rtx"] if earlier else [])
    if earlier:
        assert open_engines(made, "trt-rtx").plan("decode.kqt").is_file()


def test_overwrite(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    build(BuildRequest(made.folder))
    before = tree(made.folder)
    refuses(r"engines/trt-rtx is not empty; .*--overwrite", lambda: build(BuildRequest(made.folder, formulation="qkt")))
    assert tree(made.folder) == before
    engines = build(BuildRequest(made.folder, formulation="qkt", overwrite=True))
    assert {p.name for p in engines.folder.iterdir()} == {"manifest.json", "prefill.qkt.engine", "decode.qkt.engine"}


def test_building_elsewhere_leaves_the_export_alone(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    before = tree(made.folder)
    records = build_elsewhere(made, BuildRequest(made.folder))
    assert {r.graph for r in records} == {g.name for g in made.graphs}
    assert tree(made.folder) == before


# --- Opening what was built -------------------------------------------------------------------------------------------


def rebuilds(message: str, folder: Path) -> None:
    """The message ends in the command that builds the engines again, fit for a shell."""
    command = shlex.split(message.partition(" with: ")[2])
    assert command == ["python", "-m", "engines", "build", str(folder), "--backend", "trt-rtx", "--overwrite"]


def flip(path: Path) -> None:
    stat = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "changed": (lambda f: flip(f / "decode.kqt.engine"), r"decode\.kqt\.engine: SHA-256 .*it was changed"),
    "truncated": (lambda f: os.truncate(f / "decode.kqt.engine", 3),
                  r"decode\.kqt\.engine: 3 bytes, the manifest says"),
    "gone": (lambda f: (f / "decode.kqt.engine").unlink(), r"decode\.kqt\.engine is missing"),
    "no manifest": (lambda f: (f / "manifest.json").unlink(), r"no manifest\.json; expected engines of trt-rtx"),
    "foreign": (lambda f: (f / "manifest.json").write_text("[]"), r"not a manifest of this toolkit"),
    "no engines": (lambda f: edit(f, engines=...), r"manifest\.json: malformed \(KeyError"),
    "no timing": (lambda f: edit(f, timing=...), r"manifest\.json: malformed \(KeyError: 'timing'"),
    "no libraries": (lambda f: edit(f, libraries=...), r"manifest\.json: malformed \(KeyError: 'libraries'"),
    "no reason": (lambda f: edit(f, layout={"kept": "split"}), r"manifest\.json: malformed \(KeyError: 'why'"),
    "other backend": (lambda f: edit(f, backend="trt"), r"manifest\.json: malformed \(ValueError: backend 'trt'"),
    "engines malformed": (lambda f: edit(f, engines=[{"graph": "x"}]), r"manifest\.json: malformed \(TypeError"),
    "of another": (lambda f: edit(f, engines_of="0" * 64), r"built from another export"),
}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_engines_are_refused(damage: str, fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    hurt, pattern = DAMAGE[damage]
    hurt(build(BuildRequest(made.folder)).folder)
    rebuilds(refuses(pattern, lambda: open_engines(made, "trt-rtx")), made.folder)


def test_engines_of_a_replaced_export_are_stale(fake: FakeBuilder, fresh: Make, make: Make, tmp_path: Path) -> None:
    made = fresh(target="trt-rtx")
    build(BuildRequest(made.folder))
    moved = open_export(Path(shutil.copytree(made.folder, tmp_path / "moved")))
    assert open_engines(moved, "trt-rtx").plan("decode.kqt").is_file()  # moving is no change
    shutil.copytree(make(target="trt-rtx", seed=1).folder, moved.folder, dirs_exist_ok=True)
    rebuilds(refuses(r"engines/trt-rtx: built from another export than the one beside it",
                     lambda: open_engines(open_export(moved.folder), "trt-rtx")), moved.folder)


def test_export_with_overwrite_takes_the_engines_with_it(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(target="trt-rtx")
    build(BuildRequest(made.folder))
    again = export(ExportRequest("article", made.folder, target="trt-rtx", max_context=64, overwrite=True))
    assert built_backends(again) == []
    refuses(r"no manifest\.json; expected engines of trt-rtx", lambda: open_engines(again, "trt-rtx"))


def test_a_session_opens_the_kept_engine(fake: FakeBuilder, fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the export's default, of which there may be no plan."""
    opened: list[tuple[str, str]] = []
    monkeypatch.setattr("engines.trt_session.require_cuda", lambda backend: None)
    monkeypatch.setattr("engines.trt_session.TensorRTSession",
                        lambda export, graph, backend, plan, *how: opened.append((graph.name, plan.name)))
    fake.activation = {"decode.kqt": 20 * MB, "decode.qkt": 10 * MB, "prefill.kqt": 10 * MB, "prefill.qkt": 20 * MB}
    made = fresh(target="trt-rtx")
    build(BuildRequest(made.folder))
    for kind in ("prefill", "decode"):
        open_session(made, kind, "trt-rtx")
    assert opened == [("prefill.kqt", "prefill.kqt.engine"), ("decode.qkt", "decode.qkt.engine")]
    refuses("no engine of decode.kqt was kept; kept: prefill.kqt, decode.qkt",
            lambda: open_session(made, "decode", "trt-rtx", "kqt"))
    assert default_graph(made, "decode", "ort").name == "decode.kqt"  # the runtimes without plans keep the export's


# --- What is refused --------------------------------------------------------------------------------------------------


def request(folder: Path, **options: Any) -> BuildRequest:
    return BuildRequest(folder, **options)


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["max_batch", "prefill_batch", "max_context", "chunk", "decode_tokens"])
def test_limits_start_at_one(name: str, value: int, tmp_path: Path) -> None:
    option = name.replace("_", "-")
    wrong, right = {name: value}, {name: 1}
    refuses(rf"--{option} {value}: expected at least 1", lambda: request(tmp_path, **wrong))
    assert getattr(request(tmp_path, **right), name) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown backend": ({"backend": "cuda"},
                        r"--backend 'cuda': expected one of ort, trt, trt-rtx .*ort-cuda, interpreter"),
    "ort-cuda": ({"backend": "ort-cuda"}, r"--backend ort-cuda: runs graphs as they are, there is nothing to build"),
    "interpreter": ({"backend": "interpreter"}, r"--backend interpreter: runs graphs as they are"),
    "sm with ort": ({"backend": "ort", "options": BuildOptions(sm=("86",))},
                    r"--sm is for trt-rtx; ort builds for the device that it runs on"),
    "sm with trt": ({"backend": "trt", "options": BuildOptions(sm=("90",))},
                    r"--sm is for trt-rtx; trt builds for the device"),
    "max context": ({"max_context": 65}, r"--max-context 65: the export takes up to 64 rows of past; export again"),
    "formulation": ({"formulation": "kqv"}, r"--formulation kqv: this export has prefill\.kqt-.*, .* for trt-rtx"),
    "not held": ({"formulation": "expanded"}, r"--formulation expanded: this export has prefill\.kqt-.*, .* for "
                                              "trt-rtx"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_requests(case: str, fake: FakeBuilder, fresh: Make) -> None:
    options, pattern = REFUSED[case]
    made = fresh(target="trt-rtx")
    refuses(pattern, lambda: build(BuildRequest(made.folder, **options)))
    assert fake.calls == []
    assert not (made.folder / "engines").exists()


def test_no_export(tmp_path: Path) -> None:
    refuses(r"no manifest\.json; expected an exported folder", lambda: build(BuildRequest(tmp_path)))


@pytest.mark.parametrize(("backend", "extra"), [("trt", "tensorrt"), ("trt-rtx", "rtx")])
def test_missing_module(backend: str, extra: str, fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, trt.MODULES[backend][0], None)
    made = fresh(target="trt-rtx")
    refuses(rf"backend {backend}: Python module {trt.MODULES[backend][0]} is not here .*; install it with: pip install "
            rf"-e '\.\[{extra}\]' in the toolkit's checkout", lambda: build(BuildRequest(made.folder, backend=backend)))
    assert not trt.available(backend)
    assert not (made.folder / "engines").exists()


def test_nothing_for_the_backend(fake: FakeBuilder, fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fresh(target="trt-rtx")
    for name in ("kqt-blocks", "kqt", "kqt-groups", "qkt"):
        monkeypatch.setitem(BY_NAME, name, replace(BY_NAME[name], dtypes={"trt-rtx": ("fp16",)}))
    refuses(r"no graph that trt-rtx takes at fp32; export with --target trt-rtx",
            lambda: build(BuildRequest(made.folder)))


def test_a_finding_stops_the_build(fake: FakeBuilder, fresh: Make) -> None:
    """256 sequences x 32768 / 16 rows, a block, x 512 tokens x 8 heads: exactly 2^31 scores in the leanest form too."""
    made = fresh(target="trt-rtx", dtype="fp16", max_context=32768)
    pattern = r"prefill\.kqt-blocks was not built: \[tensor-too-large\] .*2147483648 elements"
    with pytest.raises(CheckError, match=pattern) as caught:
        build(BuildRequest(made.folder, prefill_batch=256))
    assert "\n" not in str(caught.value)
    assert fake.calls == []
    assert not (made.folder / "engines").exists()
    build(BuildRequest(made.folder, prefill_batch=4))


# --- The command line -------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def call(*argv: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["engines", *map(str, argv)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            console.main(command_line.cli, "python -m engines")
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return call


def test_command_line(fake: FakeBuilder, fresh: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    made = fresh(target="trt-rtx")
    code, out, err = run("inspect", made.folder)
    assert (code, out) == (2, "")
    assert re.match(r"error: .*: no engines yet; build some with: python -m engines build", err)
    code, out, err = run("build", made.folder, "--json", "--max-batch", "3", "--sm", " 86, ,120", "--backend", "trt")
    assert (code, err) == (2, "error: --sm is for trt-rtx; trt builds for the device that it runs on\n")
    code, out, err = run("build", made.folder, "--json", "--max-batch", "3", "--chunk", "16")
    assert (code, err) == (0, "")
    assert [e["graph"] for e in json.loads(out)["engines"]] == [g.name for g in made.graphs]
    assert all(e["limits"]["B"] == [1, 1, 3 if e["kind"] == "decode" else 1] for e in json.loads(out)["engines"])
    code, out, err = run("inspect", made.folder, "--json")
    assert (code, err) == (0, "")
    assert [e["backend"] for e in json.loads(out)["engines"]] == ["trt-rtx"] * len(made.graphs)
    code, out, err = run("inspect", made.folder)
    assert (code, err) == (0, "")
    assert "decode.kqt" in out
    assert "kept" in out
    fake.error, fake.fail_at = CheckError("the builder gave up"), len(fake.calls) + 1
    assert run("build", made.folder, "--overwrite") == (1, "", "error: the builder gave up\n")


def test_inspect_shows_the_sound_backends_and_says_what_is_wrong_with_the_others(
        fake: FakeBuilder, fresh: Make, run: Callable[..., tuple[int, str, str]]) -> None:
    made = fresh(target="trt-rtx")
    assert run("build", made.folder)[0] == 0
    damaged = made.folder / "engines" / "trt"
    shutil.copytree(made.folder / "engines" / "trt-rtx", damaged)
    (damaged / "manifest.json").write_text("{")
    code, out, err = run("inspect", made.folder, "--json")
    data = json.loads(out)
    assert (code, err) == (1, "")
    assert [b["backend"] for b in data["builds"]] == ["trt-rtx"]
    assert list(data["problems"]) == ["trt"]
    code, out, err = run("inspect", made.folder)
    assert code == 1
    assert "decode.kqt" in out
    assert re.match(r"error: .*engines/trt/manifest\.json", err)
    assert "--backend trt --overwrite" in err


# --- Profiles ---------------------------------------------------------------------------------------------------------

R, D = 154, 512  # the article's row and hidden size


@pytest.mark.parametrize(("cache", "names", "past"), [
    ("append", "BTS", {"past_latent.0": ((1, 1, R), (2, 40, R), (3, 60, R))}),
    ("concat", "BTS", {"past_latent.0": ((1, 1, R), (2, 40, R), (3, 60, R))}),
    ("scatter", "BT", {"latent_cache.0": ((1, 1, 64, R), (2, 1, 64, R), (3, 1, 64, R))}),
    ("none", "BT", {})])
def test_profile_shapes(cache: str, names: str, past: dict[str, Any]) -> None:
    found = {"B": Range(1, 2, 3), "T": Range(1, 4, 5), "S": Range(1, 40, 60)}
    inputs = signature(preset_config("article"), cache=cache, dtype="fp16", max_context=64).inputs
    lengths = {} if cache == "none" else {"past_lengths": ((1,), (2,), (3,))}
    assert profile(inputs, {n: found[n] for n in names}) == {
        "hidden_states": ((1, 1, D), (2, 4, D), (3, 5, D)), **lengths, **past}


@pytest.mark.parametrize("numbers", [(0, 1, 1), (2, 1, 3), (1, 3, 2), (1, 2, -1)])
def test_a_range_must_ascend(numbers: tuple[int, int, int]) -> None:
    refuses(rf"profile range min {numbers[0]}, opt {numbers[1]}, max {numbers[2]}; expected 1 <= min <= opt <= max",
            lambda: Range(*numbers))
    assert Range(1, 1, 1).max == 1


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("context", [1, 64, 4095, 4096, 4097, 9000])
def test_ranges_of_a_request(cache: str, context: int, make: Make) -> None:
    made = make(cache=cache, target="trt-rtx", max_context=9000)
    request = BuildRequest(made.folder, max_batch=5, prefill_batch=2, max_context=context, chunk=300, decode_tokens=3)
    for graph in made.graphs:
        found = ranges(made, graph, request)
        assert found["B"] == Range(1, 1, 5 if graph.kind == "decode" else 2)
        assert found["T"] == (Range(1, 3, 3) if graph.kind == "decode" else Range(1, 300, 300))
        if cache == "scatter":
            assert "S" not in found
        else:
            assert found["S"] == Range(1, min(4096, context), context)


def test_ranges_come_from_the_export(make: Make) -> None:
    made = make(target="trt-rtx", max_batch=7, max_context=48)
    found = {g.kind: ranges(made, g, BuildRequest(made.folder)) for g in made.graphs}
    assert found == {"prefill": {"B": Range(1, 1, 1), "T": Range(1, 48, 48), "S": Range(1, 48, 48)},
                     "decode": {"B": Range(1, 1, 7), "T": Range(1, 1, 1), "S": Range(1, 48, 48)}}


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines of the processes that `measure` starts."""
    started: list[list[str]] = []
    real = subprocess.run

    def spy(argv: list[str], **options: Any) -> Any:
        started.append(argv)
        return real(argv, **options)

    monkeypatch.setattr(subprocess, "run", spy)
    return started


def test_ort_keeps_the_exports_default(fresh: Make, children: list[list[str]]) -> None:
    made = fresh(prefill="expanded")
    engines = build(BuildRequest(made.folder, backend="ort", chunk=8))
    assert [e.graph for e in engines.engines] == [g.name for g in made.graphs]
    assert children == [[sys.executable, "-m", "engines.measure"]] * len(made.graphs)
    assert {e.graph for e in engines.engines if e.default} == {"prefill.expanded", "decode.qkt"}
    assert {p.name for p in engines.folder.iterdir()} == {"manifest.json"}
    weights = made.data["weights"]["bytes"]
    for e in engines.engines:
        assert e.file is None
        assert e.weight_bytes == weights
        assert e.plan_bytes == weights + (made.folder / f"{e.graph}.onnx").stat().st_size
        assert 0 <= e.activation_bytes < 50e6
        assert e.seconds > 0
    assert "onnxruntime" in engines.data["libraries"]


def test_ort_build_names_the_graph_that_does_not_run(fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fresh(dtype="bf16")
    with pytest.raises(InputError, match=r"export: ONNX Runtime's CPU has no bfloat16 products; export with --dtype "):
        build(BuildRequest(made.folder, backend="ort"))
    # said ahead of the run, which would fail as well
    monkeypatch.setattr("engines.build.require_products", lambda export, what: None)
    with pytest.raises(CheckError, match=r"prefill\.\w+\.onnx: ONNX Runtime could not run it at .*NOT_IMPLEMENTED"):
        build(BuildRequest(made.folder, backend="ort"))
    assert not (made.folder / "engines").exists()


def test_measured_activation_is_the_tensor_in_the_middle(tmp_path: Path) -> None:
    """[B, 1] @ [1, S] summed to one number: what the step needs is the B x S product."""
    nodes = [helper.make_node("MatMul", ["a", "b"], ["product"]), helper.make_node("ReduceSum", ["product"], ["y"])]
    specs = [TensorSpec("a", ("B", 1), "fp32"), TensorSpec("b", (1, "S"), "fp32"), TensorSpec("y", (1, 1), "fp32")]
    values = [helper.make_tensor_value_info(s.name, TensorProto.FLOAT, s.shape) for s in specs]
    path = saved(helper.make_graph(nodes, "product", values[:2], values[2:]), tmp_path)
    inputs, outputs = tuple(specs[:2]), tuple(specs[2:])
    found = measure.measure(path, inputs, outputs, {"B": 2048, "S": 8192}, threads=1)
    assert 1.0 <= found.activation_bytes / (2048 * 8192 * 4) < 1.1
    assert 0 < found.io_bytes < 1e6
    assert found.loaded_bytes > 10e6
    assert found.milliseconds > 0
    with pytest.raises(CheckError, match=r"gone\.onnx: ONNX Runtime could not run it at"):
        measure.measure(tmp_path / "gone.onnx", inputs, outputs, {"B": 1, "S": 1})


@pytest.mark.parametrize(("cache", "formulation"), [("append", "kqt"), ("scatter", "kqt"), ("concat", "attention")])
def test_measured_memory_of_a_graph(cache: str, formulation: str, make: Make) -> None:
    """Inputs and outputs are counted once, and activations in full, also where the warm-up took as much: the scatter
    form's S_max is static, so at batch 1 its smallest step is the very step that is measured."""
    made = make(cache=cache, max_context=65536)
    graph, sizes = made.graph("decode", formulation), {"B": 1, "T": 1, "S": 65536}
    found = measure.measure(made.folder / graph.file, graph.inputs, graph.outputs, sizes)
    rows = 65536 * 4 * made.config.row_dim * (2 if cache == "concat" else 1)
    assert found.io_bytes == pytest.approx(rows, rel=0.02)
    predicted = lint.live_peak(made.folder / graph.file, sizes)  # ONNX Runtime rounds up and fuses little
    assert predicted <= found.activation_bytes <= 4 * predicted


def test_every_backend_has_a_row() -> None:
    assert {n: (b.target, b.builds, b.tensorrt) for n, b in BACKENDS.items()} == {
        "ort": ("ort", True, False), "ort-cuda": ("ort", False, False), "trt": ("trt", True, True),
        "trt-rtx": ("trt-rtx", True, True), "trt-network": ("trt-rtx", False, False),
        "interpreter": ("ort", False, False)}
    assert all(b.about and b.name == n for n, b in BACKENDS.items())


def test_a_candidate_too_large_is_left_out(fake: FakeBuilder, fresh: Make) -> None:
    """Plain products hold 2^31 scores where the fused Attention holds none; asked for by name, that is an error."""
    made = fresh(target="trt-rtx", dtype="fp16", prefill="expanded", max_context=32768)
    engines = build(BuildRequest(made.folder, prefill_batch=16))
    assert [e.graph for e in engines.engines] == [g.name for g in made.graphs if g.name != "prefill.expanded"]
    assert list(engines.data["refused"]) == ["prefill.expanded"]
    assert "2147483648 elements" in engines.data["refused"]["prefill.expanded"]
    with pytest.raises(CheckError, match=r"prefill\.expanded was not built"):
        build(BuildRequest(made.folder, prefill_batch=16, formulation="expanded", overwrite=True))


def test_ort_measures_what_fits(fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without --max-context at most 8192 rows, and never more than half of the free memory."""
    from engines import ort_build as module

    made = fresh(max_context=32768)
    found = {e.graph: e.limits for e in build(BuildRequest(made.folder, "ort", max_batch=2, chunk=4)).engines}
    assert found["decode.qkt"]["S"] == [1, 4096, 8192]
    monkeypatch.setattr(module, "available_memory", lambda: 4_000_000)
    again = build(BuildRequest(made.folder, "ort", max_batch=2, chunk=4, overwrite=True))
    found = {e.graph: e.limits for e in again.engines}
    assert 1 < found["decode.qkt"]["S"][2] < 2048


def test_an_overwritten_export_says_which_engines_went(fake: FakeBuilder, fresh: Make) -> None:
    from click.testing import CliRunner

    from exporter.__main__ import cli

    made = fresh(target="trt-rtx")
    build(BuildRequest(made.folder))
    asked = ["export", "article", "--out", str(made.folder), "--max-context", "64", "--overwrite"]
    first, second = (CliRunner().invoke(cli, asked) for _ in range(2))
    assert "the earlier export's engines are gone with it (trt-rtx): build them anew" in " ".join(first.stdout.split())
    assert "engines are gone" not in second.stdout
    assert not (made.folder / "engines").exists()
