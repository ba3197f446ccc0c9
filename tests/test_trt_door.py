"""The TensorRT door: what a build is told, which options are refused in front of it, and what its errors say."""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import bounded, trt
from engines.build_options import PLAIN, BuildOptions
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, GraphEntry
from exporter.signature import Profile, Range, profile
from tests import fake_tensorrt
from tests.fake_tensorrt import BuilderFlag

ONE: list[Profile] = [{"x": ((1,), (2,), (3,))}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    folder = tmp_path_factory.mktemp("door") / "export"
    return export(ExportRequest("article", folder, dtype="fp16", target="trt-rtx", max_context=2048))


def shapes(graph: GraphEntry, batch: int, tokens: int) -> Profile:
    return profile(graph.inputs, {"B": Range(1, 1, batch), "T": Range(1, tokens, tokens), "S": Range(1, 1024, 2048)})


def tensorrt(monkeypatch: pytest.MonkeyPatch, **options: Any) -> SimpleNamespace:
    """`tensorrt`, which needs a GPU, replaced by a stand-in that records."""
    module = fake_tensorrt.module(**options)
    monkeypatch.setattr(trt, "load", lambda backend: module)
    return module


# --- Profiles ---------------------------------------------------------------------------------------------------------


def test_an_engine_of_two_profiles_has_the_larger_activation(made: Export) -> None:
    """The builder logs one figure for each profile, in order; the engine needs the largest."""
    graph = made.graph("prefill", "kqt")
    path, decode, prefill = made.folder / graph.file, shapes(graph, 8, 1), shapes(graph, 1, 256)
    alone = [trt.build("trt-rtx", path, [p]).activation_bytes for p in (decode, prefill)]
    assert alone[0] < alone[1]
    for order in ([decode, prefill], [prefill, decode]):
        both = trt.build("trt-rtx", path, order)
        assert both.activation_bytes == max(alone)
        assert both.profile_activation_bytes == tuple(alone if order[0] is decode else reversed(alone))
    weights = trt.build("trt-rtx", path, [decode]).weight_bytes
    assert both.weight_bytes == weights
    assert both.plan_bytes > weights


# --- Options ----------------------------------------------------------------------------------------------------------


def test_weight_streaming_builds(made: Export) -> None:
    graph = made.graph("decode", "kqt")
    built = trt.build("trt-rtx", made.folder / graph.file, [shapes(graph, 2, 1)], BuildOptions(weight_streaming=True))
    assert built.plan_bytes > built.weight_bytes > 0


REFUSED: dict[str, tuple[str, BuildOptions, str]] = {
    "strip": ("trt-rtx", BuildOptions(strip=True), r"--strip: TensorRT-RTX \S+ compiles a refittable engine on a GPU .*"
              "no CUDA device was found; build where there is one, or leave --strip out"),
    "refit": ("trt-rtx", BuildOptions(refit=True), r"--refit: .*no CUDA device was found.*leave --refit out"),
    "refit, two targets": ("trt-rtx", BuildOptions(refit=True, sm=("86", "120")),
                           "--refit --sm 86,120: .*for one compute capability at most; build one engine for each"),
    "version": ("trt-rtx", BuildOptions(version_compatible=True),
                r"--version-compatible: .*libnvinfer_lean\.so\.1 is not found"),
    "hardware": ("trt-rtx", BuildOptions(hardware_compatible=True),
                 r"--hardware-compatible: a level of TensorRT.* --sm 80,86,89,120"),
    "timing cache": ("trt-rtx", BuildOptions(timing_cache=Path("t.cache")), "--timing-cache: .*a runtime cache beside"),
    "unknown target": ("trt-rtx", BuildOptions(sm=("90",)), "--sm 90: .*does not list it"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_built_is_refused_first(case: str, monkeypatch: pytest.MonkeyPatch,
                                               capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx")
    backend, options, pattern = REFUSED[case]
    monkeypatch.setattr(trt, "cuda_device", lambda: False)
    monkeypatch.setattr(trt, "_loads", lambda library: False)
    monkeypatch.setattr(trt, "_network", lambda *args: pytest.fail("the build began"))
    with pytest.raises(InputError, match=pattern) as caught:
        trt.build(backend, Path("g.onnx"), ONE, options)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_device_and_a_library_lift_the_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setattr(trt, "cuda_device", lambda: True)
    monkeypatch.setattr(trt, "_loads", lambda library: library == "libnvinfer_lean.so.1")
    trt.check_options("trt-rtx", BuildOptions(strip=True, refit=True, sm=("86",), version_compatible=True))


@pytest.mark.parametrize(("options", "reason"), [
    (BuildOptions(strip=True), r"graph_jit\.cpp:278: CHECK\(status == CUDA_SUCCESS\)"),
    (BuildOptions(refit=True), r"Myelin"), (BuildOptions(version_compatible=True), r"libnvinfer_lean\.so\.1")])
@pytest.mark.skipif(trt.cuda_device(), reason="there is a CUDA device: these build")
def test_a_failed_build_gives_tensorrts_reason_and_keeps_stdout_clean(
        options: BuildOptions, reason: str, made: Export, monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str]) -> None:
    """Why the refusals are there: this is what 1.7 does without a device. What it prints itself goes to stderr."""
    monkeypatch.setattr(trt, "check_options", lambda backend, options: None)
    graph = made.graph("decode", "kqt")
    with pytest.raises(trt.BuildError, match=rf"^decode\.kqt\.onnx: trt-rtx could not build it: .*{reason}") as caught:
        trt.build("trt-rtx", made.folder / graph.file, [shapes(graph, 2, 1)], options)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("options", "flags"), [
    (PLAIN, set()), (BuildOptions(weight_streaming=True), {BuilderFlag.WEIGHT_STREAMING}),
    (BuildOptions(strip=True), {BuilderFlag.STRIP_PLAN}),
    (BuildOptions(strip=True, refit=True), {BuilderFlag.STRIP_PLAN, BuilderFlag.REFIT}),
    (BuildOptions(version_compatible=True), {BuilderFlag.VERSION_COMPATIBLE})])
def test_flags_of_tensorrt(options: BuildOptions, flags: set[BuilderFlag], monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT needs no device of its own accord for a refusal: it builds on one. TensorRT 10 types a network strongly
    only when told to; TF32 is on by default."""
    module = tensorrt(monkeypatch)
    plan = trt.build("trt", Path("g.onnx"), [*ONE, *ONE], options)
    (config,) = module.built
    assert config.flags == flags
    assert config.profiles == [{"x": ((1,), (2,), (3,))}] * 2
    assert config.hardware_compatibility_level is None
    assert module.network_flags == [1 << 1]
    assert (plan.activation_bytes, plan.profile_activation_bytes, plan.weight_bytes) == (1000, (1000, 999), 77)


def test_hardware_compatibility_of_tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tensorrt(monkeypatch)
    trt.build("trt", Path("g.onnx"), ONE, BuildOptions(hardware_compatible=True))
    assert module.built[0].hardware_compatibility_level == "ampere+"
    with pytest.raises(InputError, match="--sm 90: trt builds for the GPU it runs on; leave --sm out"):
        trt.build("trt", Path("g.onnx"), ONE, BuildOptions(sm=("90",)))


def test_a_builder_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    tensorrt(monkeypatch, device=False)
    with pytest.raises(InputError, match="backend trt: its builder needs a CUDA device, none was found"):
        trt.build("trt", Path("g.onnx"), ONE)


def test_a_folder_of_that_name_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stubs installed among Python's packages leave: `import tensorrt` succeeds and gives nothing."""
    (tmp_path / "tensorrt").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    try:
        with pytest.raises(InputError, match=r"Python module tensorrt is not here \(.*holds no module\); install it"):
            trt.load("trt")
        assert not trt.available("trt")
    finally:
        sys.modules.pop("tensorrt", None)


@pytest.mark.parametrize(("answers", "found"), [({"cuInit": 100}, False), ({"count": 0}, False), ({"count": 2}, True),
                                                ({"cuDeviceGetCount": 3}, False)])
def test_looking_for_a_device(answers: dict[str, int], found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def count(pointer: Any) -> int:
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = answers.get("count", 1)
        return answers.get("cuDeviceGetCount", 0)

    driver = SimpleNamespace(cuInit=lambda flags: answers.get("cuInit", 0), cuDeviceGetCount=count)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    assert trt.cuda_device() == found


def test_no_driver_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert not trt.cuda_device()


# --- The timing cache -------------------------------------------------------------------------------------------------


def test_a_timing_cache_is_read_filled_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour that wrote meanwhile loses nothing, and the file appears whole."""
    path = tmp_path / "kernels.cache"
    given: list[list[bytes]] = []

    def during(config: fake_tensorrt.Config) -> bytes:
        assert config.cache is not None
        given.append(list(config.cache.words))
        config.cache.words.append(b"gemm%d" % len(given))
        if len(given) == 2:
            path.write_bytes(b"gemm1 neighbour")
        return b"plan"

    tensorrt(monkeypatch, during_build=during)
    for _ in range(2):
        trt.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=path))
    assert given == [[], [b"gemm1"]]
    assert path.read_bytes() == b"gemm1 gemm2 neighbour"
    assert [p.name for p in tmp_path.iterdir()] == ["kernels.cache"]


def test_a_failed_build_leaves_the_timing_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.cache"
    tensorrt(monkeypatch, during_build=lambda config: None)
    with pytest.raises(CheckError, match=r"g\.onnx: trt could not build it: out of kernels$"):
        trt.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=path))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"garbage", b"other gpu"])
def test_a_foreign_timing_cache_is_refused(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernels.cache"
    path.write_bytes(content)
    module = tensorrt(monkeypatch)
    with pytest.raises(InputError, match=rf"--timing-cache {re.escape(str(path))}: not a timing cache of this TensorRT "
                                         "and this GPU"):
        trt.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=path))
    assert module.built == []
    assert path.read_bytes() == content
    for wrong, why in ((tmp_path, "a folder"), (tmp_path / "gone" / "t.cache", "its folder does not exist")):
        with pytest.raises(InputError, match=f"{why}; expected a file, or a name for a new one"):
            trt.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=wrong))


def test_a_timing_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    tensorrt(monkeypatch)
    monkeypatch.setattr(trt, "write_file", full)
    with pytest.raises(InputError, match="cannot write it: No space left on device; choose another place"):
        trt.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=tmp_path / "t.cache"))


def test_the_childs_timing_cache_is_the_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder's process runs in another folder than the command."""
    sent: list[bytes] = []
    pipe = SimpleNamespace(write=sent.append, flush=lambda: None, close=lambda: None)
    child = SimpleNamespace(stdin=pipe, stdout=pipe, kill=lambda: None, wait=lambda: 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bounded.Builder, "_start", lambda self: child)
    monkeypatch.setattr(bounded.Builder, "_reply", lambda *args: {"error": "InputError", "message": "enough"})
    for given in (Path("t.cache"), None):
        with bounded.Builder() as builder, pytest.raises(InputError, match="enough"):
            builder.build("trt", Path("g.onnx"), ONE, BuildOptions(timing_cache=given), {}, Path("out"))
    assert [json.loads(line)["options"]["timing_cache"] for line in sent] == [str(tmp_path.resolve() / "t.cache"), None]
