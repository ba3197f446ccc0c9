"""A build that hangs, dies or wants too much memory takes nothing down with it; two builds never share a folder."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines import bounded, lint, trt
from engines.bounded import Builder, locked, require_memory
from engines.build import build, built_backends
from engines.build_options import PLAIN, BuildOptions
from engines.build_request import BuildRequest
from engines.handed import weight_bytes
from engines.search import ranges
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.signature import Profile, profile
from tests.fake_builder import Call, FakeBuilder, install

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("made") / "export"
    return export(ExportRequest("article", folder, target="trt-rtx", max_context=64, max_batch=2))


@pytest.fixture
def fresh(made: Export, tmp_path: Path) -> Export:
    return open_export(Path(shutil.copytree(made.folder, tmp_path / "an export")))


@pytest.fixture(scope="module")
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    return install(monkeypatch)


Child = Callable[[str], None]


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Child:
    """Make the builder's process one that runs a line of shell instead; "" makes it the real one again."""
    real = sys.executable

    def put(line: str) -> None:
        script = tmp_path / "child"
        script.write_text(f"#!/bin/sh\n{line}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script) if line else real)

    return put


def shapes(made: Export, graph: str) -> list[Profile]:
    entry = made.graph(*graph.split("."))
    return [profile(entry.inputs, ranges(made, entry, BuildRequest(made.folder)))]


def run(builder: Builder, made: Export, out: Path, graph: str = "decode.kqt", options: BuildOptions = PLAIN) -> Any:
    return builder.build("trt-rtx", made.folder / f"{graph}.onnx", shapes(made, graph), options, {}, out)


# --- The child --------------------------------------------------------------------------------------------------------


def test_a_child_builds_what_the_builder_builds(rtx: None, made: Export, tmp_path: Path) -> None:
    """One child for several builds; figures as the library's own, and the plan in the file."""
    with Builder(timeout=120) as builder:
        for graph in ("decode.kqt", "prefill.qkt"):
            found = run(builder, made, tmp_path / graph, graph)
            pid = builder._child.pid if builder._child else 0
            want = trt.build("trt-rtx", made.folder / f"{graph}.onnx", shapes(made, graph))
            assert (found.activation_bytes, found.weight_bytes, found.version) == (
                want.activation_bytes, want.weight_bytes, want.version)
            assert found.profile_activation_bytes == [want.activation_bytes]
            assert (tmp_path / graph).stat().st_size == found.plan_bytes > weight_bytes(made.folder / f"{graph}.onnx")
        assert builder._child is not None
        assert builder._child.pid == pid
    assert not Path(f"/proc/{pid}").exists()


def test_errors_come_through_the_child(rtx: None, made: Export, tmp_path: Path) -> None:
    with Builder() as builder:
        with pytest.raises(InputError, match=r"--sm 90: TensorRT-RTX .* does not list it"):
            run(builder, made, tmp_path / "plan", options=BuildOptions(sm=("90",)))
        broken = tmp_path / "broken.onnx"
        broken.write_bytes(b"no graph")
        with pytest.raises(CheckError, match=r"broken\.onnx: the TensorRT parser refused it"):
            builder.build("trt-rtx", broken, [{}], PLAIN, {}, tmp_path / "plan")
        with pytest.raises(InputError, match="free space or choose another place"):
            run(builder, made, tmp_path / "no folder" / "plan")
        assert run(builder, made, tmp_path / "plan").plan_bytes > 0  # it goes on


@pytest.mark.parametrize(("line", "pattern"), [
    ("kill -ABRT $$", r"^decode\.kqt\.onnx: the builder's process was killed by SIGABRT$"),
    ("echo 'Internal Error: Myelin' >&2; kill -SEGV $$", r"was killed by SIGSEGV: Internal Error: Myelin$"),
    ("kill -KILL $$", r"was killed by SIGKILL; that is what a machine out of memory does$"),
    ("exit 3", r"ended with exit code 3$"), ("read job; exit 0", r"ended with exit code 0$")])
def test_a_child_that_dies_is_a_failed_build(line: str, pattern: str, child: Child, rtx: None, made: Export,
                                             tmp_path: Path) -> None:
    with Builder(timeout=60) as builder:
        child(line)
        with pytest.raises(trt.BuildError, match=pattern) as caught:
            run(builder, made, tmp_path / "plan")
        assert "\n" not in str(caught.value)
        child("")
        assert run(builder, made, tmp_path / "plan").plan_bytes > 0  # the next build gets a new child


def test_a_build_that_takes_too_long_is_stopped(child: Child, made: Export, tmp_path: Path) -> None:
    child(f"echo $$ > '{tmp_path}/pid'; exec sleep 60")
    started = time.monotonic()
    with Builder(timeout=1) as builder, pytest.raises(trt.BuildError) as caught:
        run(builder, made, tmp_path / "plan")
    assert str(caught.value) == ("decode.kqt.onnx: the builder was not done after 1 s and was stopped; allow more with "
                                 "--timeout")
    assert time.monotonic() - started < 10
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


def test_the_child_dies_with_its_parent(rtx: None, made: Export, tmp_path: Path) -> None:
    code = ("import sys, time; from pathlib import Path; from engines.bounded import Builder; from tests.test_bounded "
            "import run; from exporter.manifest import open_export\n"
            f"b = Builder(); run(b, open_export({str(made.folder)!r}), Path({str(tmp_path / 'plan')!r}))\n"
            "print(b._child.pid, flush=True); time.sleep(60)")
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.wait()
    parent.stdout.close()
    gone = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < gone:
        if "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break  # dead; whoever inherited it has not looked yet
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{pid}").exists()


ABORTS_ON = """
import os, sys
sys.path.insert(0, {root!r})
from engines import bounded, trt
real = trt.build
def build(backend, path, *rest):
    if path.stem == "decode.qkt":
        os.abort()
    return real(backend, path, *rest)
trt.build = build
bounded._serve()
"""


def test_a_builder_that_aborts_leaves_the_other_candidates(child: Child, rtx: None, fresh: Export, tmp_path: Path,
                                                           ) -> None:
    """TensorRT may abort its process: that candidate is refused by name, the others are built, one of them is kept."""
    script, python = tmp_path / "aborts.py", sys.executable
    script.write_text(ABORTS_ON.format(root=str(ROOT)))
    child(f"exec '{python}' '{script}'")
    engines = build(BuildRequest(fresh.folder))
    assert {e.engine for e in engines.engines} == {g.name for g in fresh.graphs} - {"decode.qkt"}
    assert list(engines.data["refused"]) == ["decode.qkt"]
    assert re.match(r"decode\.qkt was not built: decode\.qkt\.onnx: the builder's process was killed by SIGABRT",
                    engines.data["refused"]["decode.qkt"])
    assert [a.refused is not None for a in engines.attempts if a.engine == "decode.qkt"] == [True]
    with pytest.raises(CheckError, match=r"decode\.qkt\.onnx: the builder's process was killed by SIGABRT"):
        build(BuildRequest(fresh.folder, formulation="qkt", overwrite=True))
    assert engines.plan("decode.kqt").is_file()


def test_where_no_candidate_is_left_all_reasons_are_given(fake: FakeBuilder, fresh: Export) -> None:
    def fail(call: Call) -> int:
        if call.graph.startswith("decode"):
            raise trt.BuildError(f"{call.graph}.onnx: no kernel")
        return 1_000_000_000

    fake.activation = fail
    with pytest.raises(CheckError) as caught:
        build(BuildRequest(fresh.folder))
    names = [g.name for g in fresh.graphs if g.kind == "decode"]
    assert len(names) > 1
    assert str(caught.value) == "; ".join(f"{name} was not built: {name}.onnx: no kernel" for name in names)
    assert not (fresh.folder / "engines").exists()


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_a_build_asks_for_memory_first(fake: FakeBuilder, fresh: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "available_memory", lambda: 200_000_000)
    with pytest.raises(InputError) as caught:
        build(BuildRequest(fresh.folder))
    assert re.fullmatch(r"prefill\.kqt-blocks\.onnx: TensorRT's builder needs about 3\d\d\.\d MB of memory \(2\.5 x "
                        r"its \d+\.\d MB of weights, and 300\.0 MB\), 200\.0 MB are free; free memory, .*",
                        str(caught.value))
    assert fake.calls == []
    assert not (fresh.folder / "engines").exists()


def test_what_is_asked_for_is_what_the_graph_reads(made: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made.folder / "decode.kqt.onnx"
    needed = int(2.5 * weight_bytes(path)) + bounded.BUILDER_BYTES
    assert 0 < weight_bytes(path) <= made.data["weights"]["bytes"]
    monkeypatch.setattr(bounded, "available_memory", lambda: needed)
    require_memory(path)
    monkeypatch.setattr(bounded, "available_memory", lambda: needed - 1)
    with pytest.raises(InputError, match="needs about"):
        require_memory(path)


# --- A figure that cannot be ------------------------------------------------------------------------------------------


def least(made: Export, kind: str, form: str) -> int:
    graph = made.graph(kind, form)
    sizes = {n: r.max for n, r in ranges(made, graph, BuildRequest(made.folder)).items()}
    found = lint.score_product(made.folder / graph.file, sizes)
    assert (found is None) == (form == "kqt-blocks")  # its softmax runs along: no product is held whole
    return found[1] if found else 1


def wide(folder: Path) -> Export:
    """576 columns: no attention kernel fuses its scores away."""
    return export(ExportRequest("deepseek-v2-lite", folder, target="trt-rtx", dtype="fp16", max_context=256,
                                weights="copy", max_batch=2))


def test_a_figure_below_the_scores_is_no_figure(fake: FakeBuilder, tmp_path: Path) -> None:
    made = wide(tmp_path / "export")
    assert least(made, "decode", "kqt") == 2 * 256 * 16 * 2  # B x S x H in fp16
    honest = {g.name: least(made, g.kind, g.formulation) for g in made.graphs}
    honest["decode.qkt"] += 1  # the leanest that is left
    honest["decode.kqt-half"] += 2
    fake.activation = honest  # the bound itself is allowed
    assert build(BuildRequest(made.folder, cache=False)).data["refused"] == {}
    fake.activation = honest | {"decode.kqt": honest["decode.kqt"] - 1}
    engines = build(BuildRequest(made.folder, overwrite=True))
    assert "decode.qkt" in {e.engine for e in engines.engines if e.file}
    assert re.search(r"decode\.kqt\.onnx: the builder reports 16383 bytes of activation, and \S+_scores alone has "
                     "16384: it under-reports", engines.data["refused"]["decode.kqt"])
    with pytest.raises(CheckError, match="it under-reports; lower batch, context or chunk"):
        build(BuildRequest(made.folder, formulation="kqt", overwrite=True))
    fake.activation = dict.fromkeys(honest, 8)  # nothing is left to keep
    with pytest.raises(CheckError, match="it under-reports"):
        build(BuildRequest(made.folder, cache=False, overwrite=True))
    assert "decode.qkt" in {e.engine for e in engines.engines}


def test_real_figures_are_believed(rtx: None, tmp_path: Path) -> None:
    """Every absorbed form at several limits: no false alarm, and the scores are a good part of the figure."""
    made = wide(tmp_path / "export")
    engines = build(BuildRequest(made.folder, max_batch=8))
    assert engines.data["refused"] == {}
    for e in engines.engines:
        assert e.activation_bytes >= least(made, e.kind, e.formulation)


# --- The folder -------------------------------------------------------------------------------------------------------


def test_a_folder_is_built_by_one(fake: FakeBuilder, fresh: Export) -> None:
    target = fresh.folder / "engines" / "trt-rtx"
    with locked(target):
        pattern = (rf"engines/\.trt-rtx\.lock: a build into this folder is at work \(process {os.getpid()} on .* since "
                   r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\); wait for it, or stop it")
        with pytest.raises(InputError, match=pattern):
            build(BuildRequest(fresh.folder))
        with locked(target.with_name("trt")):
            pass  # another backend's folder is another
    assert fake.calls == []
    assert not (fresh.folder / "engines").exists()
    build(BuildRequest(fresh.folder))
    assert built_backends(fresh) == ["trt-rtx"]
    assert {p.name for p in target.parent.iterdir()} == {"trt-rtx"}


def test_the_lock_of_a_dead_process_is_none(fake: FakeBuilder, fresh: Export) -> None:
    target = fresh.folder / "engines" / "trt-rtx"
    code = ("import os, signal, sys; from pathlib import Path; from engines.bounded import locked\n"
            "with locked(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)")
    died = subprocess.run([sys.executable, "-c", code, str(target)], cwd=ROOT)
    assert died.returncode == -signal.SIGKILL
    assert (target.parent / ".trt-rtx.lock").is_file()
    build(BuildRequest(fresh.folder))
    assert {p.name for p in target.parent.iterdir()} == {"trt-rtx"}


def test_a_lock_that_was_removed_meanwhile_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between open and lock its holder may end and remove it: a lock on that file would hold nothing."""
    path, real, opened = tmp_path / ".x.lock", os.open, []

    def open_late(file: Any, *rest: Any) -> int:
        handle = real(file, *rest)
        opened.append(handle)
        if len(opened) == 1:
            Path(file).unlink()
        return handle

    monkeypatch.setattr(bounded.os, "open", open_late)
    with locked(tmp_path / "x"):
        assert len(opened) == 2
        assert path.is_file()
        with pytest.raises(InputError, match="at work"), locked(tmp_path / "x"):
            pass
    assert not path.exists()


@pytest.mark.parametrize(("options", "pattern"), [
    ({"timeout": 0}, "--timeout 0: expected more than 0 seconds"),
    ({"timeout": -1.5}, "--timeout -1.5: expected more than 0 seconds"),
    ({"activation_limit": 0.0}, "--activation-limit 0: expected more than 0 MB"),
    ({"layout": "one"}, "--layout 'one': expected one of auto, split, unified, both")])
def test_limits_of_a_build_are_checked(options: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(pattern)}$"):
        BuildRequest(tmp_path, **options)


def test_onnx_runtime_is_stopped_too(tmp_path: Path) -> None:
    made = export(ExportRequest("article", tmp_path / "export", max_context=64, max_batch=2))
    with pytest.raises(CheckError, match=r"\.onnx: ONNX Runtime was not done after 0\.05 s and was stopped; allow"):
        build(BuildRequest(made.folder, backend="ort", timeout=0.05))
    assert not (made.folder / "engines").exists()


@pytest.mark.parametrize("given", [
    {"options": BuildOptions(weight_streaming=True)}, {"options": BuildOptions(strip=True)},
    {"options": BuildOptions(refit=True)}, {"options": BuildOptions(hardware_compatible=True)},
    {"options": BuildOptions(version_compatible=True)}, {"options": BuildOptions(timing_cache=Path("x"))},
    {"layout": "unified"}, {"layout": "both"}, {"opt_search": True}, {"opt_search": False}, {"activation_limit": 3.0}],
    ids=str)
def test_options_of_tensorrt_are_not_onnx_runtimes(given: dict[str, Any], tmp_path: Path) -> None:
    made = export(ExportRequest("article", tmp_path / "export", max_context=64, max_batch=2))
    (name, value), = given.items()
    option = next((k for k, v in vars(value).items() if v), "") if name == "options" else (
        "no_opt_search" if value is False else name)
    with pytest.raises(InputError, match=f"^--{option.replace('_', '-')}: an option of TensorRT's builders; --backend "
                                         "ort runs graphs as they are"):
        build(BuildRequest(made.folder, backend="ort", **given))
