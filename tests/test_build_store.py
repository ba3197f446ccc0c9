"""Results of builds are kept by all that went into them: taken again, checked, renewed, and removed in time."""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import store as module
from engines.build import build, build_elsewhere
from engines.build_options import BuildOptions
from engines.build_request import BuildRequest
from engines.store import Figures, Store, cache_folder, cache_limit, key_of
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from tests.fake_builder import FakeBuilder, install
from tests.model_checkpoints import tiny_checkpoint

FIGURES = Figures(10, [10], 20, 30, 0.5, "1.0")
KEY, OTHER = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("made") / "export"
    return export(ExportRequest("article", folder, target="trt-rtx", max_context=64, max_batch=2))


@pytest.fixture
def fresh(made: Export, tmp_path: Path) -> Export:
    return open_export(Path(shutil.copytree(made.folder, tmp_path / "an export")))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    return install(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def plan_of(tmp_path: Path, size: int = 100, name: str = "plan") -> Path:
    path = tmp_path / name
    path.write_bytes(os.urandom(size))
    return path


def entries(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


# --- One entry --------------------------------------------------------------------------------------------------------


def test_figures_and_plan_come_back(store: Store, tmp_path: Path) -> None:
    assert store.figures(KEY) is None
    assert not store.plan(KEY, tmp_path / "out")
    plan = plan_of(tmp_path)
    store.keep(KEY, FIGURES, plan)
    assert store.figures(KEY) == FIGURES
    assert store.plan(KEY, tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == plan.read_bytes()
    assert entries(tmp_path / "store") == {f"{KEY}.json", f"{KEY}.engine"}
    assert store.notes == []


def test_figures_alone_have_no_plan(store: Store, tmp_path: Path) -> None:
    store.keep(KEY, FIGURES)
    assert store.figures(KEY) == FIGURES
    assert not store.plan(KEY, tmp_path / "out")
    store.keep(KEY, FIGURES, plan_of(tmp_path))
    assert store.plan(KEY, tmp_path / "out")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("hurt", [
    lambda p: p.write_text("{"), lambda p: p.write_text("[]"), lambda p: p.write_text("{}"),
    lambda p: p.write_bytes(b"\xff"),
    lambda p: p.write_text(p.read_text().replace('"activation_bytes": 10', '"activation_bytes": 11')),
    lambda p: p.write_text(p.read_text().replace('"seconds"', '"second"'))],
    ids=["cut", "a list", "empty", "no text", "a figure", "a name"])
def test_damaged_figures_are_dropped_with_a_note(hurt: Callable[[Path], Any], store: Store, tmp_path: Path) -> None:
    store.keep(KEY, FIGURES, plan_of(tmp_path))
    hurt(tmp_path / "store" / f"{KEY}.json")
    assert store.figures(KEY) is None
    assert store.notes == [f"cache: {KEY}.json was damaged; built again"]
    assert entries(tmp_path / "store") == set()


@pytest.mark.parametrize("hurt", [flip, lambda p: os.truncate(p, 50), lambda p: p.write_bytes(p.read_bytes() + b"x")],
                         ids=["flipped", "cut", "longer"])
def test_a_damaged_plan_is_dropped_with_a_note(hurt: Callable[[Path], Any], store: Store, tmp_path: Path) -> None:
    store.keep(KEY, FIGURES, plan_of(tmp_path))
    hurt(tmp_path / "store" / f"{KEY}.engine")
    assert not store.plan(KEY, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert "damaged; built again" in store.notes[0]
    assert entries(tmp_path / "store") == set()


def test_a_plan_that_is_gone_is_no_plan(store: Store, tmp_path: Path) -> None:
    store.keep(KEY, FIGURES, plan_of(tmp_path))
    (tmp_path / "store" / f"{KEY}.engine").unlink()
    assert not store.plan(KEY, tmp_path / "out")
    assert store.figures(KEY) == FIGURES


def test_a_write_that_fails_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    store.keep(OTHER, FIGURES)
    monkeypatch.setattr(module.os, "replace", full)
    store.keep(KEY, FIGURES, plan_of(tmp_path))
    assert store.notes == [f"cache {tmp_path / 'store'}: No space left on device; nothing is kept for later builds"]
    assert entries(tmp_path / "store") == {f"{OTHER}.json"}


def test_readers_see_whole_entries_only(store: Store, tmp_path: Path) -> None:
    """One thread replaces an entry all the time; another never meets a damaged one."""
    plans, stop = [plan_of(tmp_path, 200_000, f"plan {i}") for i in range(2)], threading.Event()
    store.keep(KEY, FIGURES, plans[0])

    def write() -> None:
        writer, turn = Store(tmp_path / "store"), 0
        while not stop.is_set():
            writer.keep(KEY, replace(FIGURES, activation_bytes=turn), None)
            turn += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        found = [store.figures(KEY) for _ in range(300)]
    finally:
        stop.set()
        thread.join()
    assert None not in found
    assert store.notes == []


# --- How much -------------------------------------------------------------------------------------------------------


def aged(folder: Path, key: str, seconds: float) -> None:
    for path in folder.glob(f"{key}.*"):
        os.utime(path, (time.time() - seconds,) * 2)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store, plan = Store(folder, limit=35_000), plan_of(tmp_path, 10_000)
    keys = [c * 64 for c in "123"]
    for age, key in zip((300, 200, 100), keys, strict=True):
        store.keep(key, FIGURES, plan)
        aged(folder, key, age)
    assert store.figures(keys[0]) == FIGURES  # used now, so the second is the oldest
    store.keep(KEY, FIGURES, plan)
    assert {p.stem for p in folder.iterdir()} == {keys[0], keys[2], KEY}
    assert sum(p.stat().st_size for p in folder.iterdir()) <= store.limit


def test_a_plan_beyond_the_limit_is_not_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", limit=5_000)
    store.keep(KEY, FIGURES, plan_of(tmp_path, 10_000))
    assert store.figures(KEY) == FIGURES
    assert entries(tmp_path / "store") == {f"{KEY}.json"}


def test_what_a_killed_writer_left_goes_after_a_day(store: Store, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    store.keep(OTHER, FIGURES)
    for name, age in (("old", 2 * 86400), ("young", 60)):
        partial = folder / f".{KEY}.engine.partial-{name}"
        partial.write_bytes(b"x")
        os.utime(partial, (time.time() - age,) * 2)
    store.keep(KEY, FIGURES)
    assert [p for p in entries(folder) if p.startswith(".")] == [f".{KEY}.engine.partial-young"]


def test_where_and_how_much(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLA_EXPORT_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("MLA_EXPORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "mla-export" / "engines"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "mla-export" / "engines"
    assert cache_limit() == 10e9
    monkeypatch.setenv("MLA_EXPORT_CACHE_GB", "0.5")
    assert cache_limit() == 0.5e9
    monkeypatch.setenv("MLA_EXPORT_CACHE_GB", "much")
    with pytest.raises(InputError, match="MLA_EXPORT_CACHE_GB='much': expected a number of GB"):
        cache_limit()


# --- What makes a key -------------------------------------------------------------------------------------------------


def test_every_ingredient_is_in_the_key(made: Export, tmp_path: Path) -> None:
    facts: dict[str, Any] = {"backend": "trt-rtx", "version": "1.7.1", "device": None, "options": {"sm": ["86"]},
                             "profiles": [{"B": [1, 1, 2]}]}
    graph = made.graph("decode")
    keys = [key_of(made, graph, **facts), key_of(made, made.graph("prefill"), **facts)]
    for name, other in (("backend", "trt"), ("version", "1.7.2"), ("device", "a GPU"), ("options", {"sm": ["120"]}),
                        ("profiles", [{"B": [1, 1, 4]}])):
        keys.append(key_of(made, graph, **{**facts, name: other}))
    # the same graph, byte by byte, over other weights
    seeded = export(ExportRequest("article", tmp_path / "seeded", target="trt-rtx", max_context=64, max_batch=2,
                                  seed=1))
    assert (seeded.folder / graph.file).read_bytes() == (made.folder / graph.file).read_bytes()
    keys.append(key_of(seeded, graph, **facts))
    assert len(set(keys)) == len(keys)
    copied = open_export(Path(shutil.copytree(made.folder, tmp_path / "copied")))
    assert key_of(copied, graph, **facts) == keys[0]  # where an export lies is no ingredient


def test_linked_weights_are_in_the_key(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "v3", layers=1, dtype=torch.float32)
    keys = []
    for name in ("one", "two"):
        linked = export(ExportRequest(str(checkpoint), tmp_path / name, max_context=64, weights="link",
                                      target="trt-rtx"))
        keys.append(key_of(linked, linked.graph("decode")))
    assert keys[0] == keys[1]
    (record,) = linked.data["weights"]["linked"].values()
    for change in ({"probe": "0"}, {"size": 1}, {"mtime_ns": 1}):
        data = {**linked.data, "weights": {**linked.data["weights"], "linked": {
            name: {**record, **change} for name in linked.data["weights"]["linked"]}}}
        keys.append(key_of(replace(linked, data=data), linked.graph("decode")))
    assert len(set(keys)) == 4


# --- Builds -----------------------------------------------------------------------------------------------------------


def test_nothing_is_built_twice(fake: FakeBuilder, fresh: Export, own_cache: Path) -> None:
    first = build(BuildRequest(fresh.folder))
    built = len(fake.calls)
    assert built == len(fresh.graphs)
    assert not any(a.cached for a in first.attempts)
    plans = {e.file: (first.folder / e.file).read_bytes() for e in first.engines if e.file}
    again = build(BuildRequest(fresh.folder, overwrite=True))
    assert len(fake.calls) == built
    assert all(a.cached for a in again.attempts)
    assert all(e.cached for e in again.engines)
    assert {e.file: (again.folder / e.file).read_bytes() for e in again.engines if e.file} == plans
    assert [replace(e, cached=False) for e in again.engines] == list(first.engines)
    assert len(list(own_cache.glob("*.engine"))) == 2  # plans of what was kept, figures of all
    assert len(list(own_cache.glob("*.json"))) == built


@pytest.mark.parametrize("changed", [
    {"max_batch": 1}, {"chunk": 32}, {"decode_tokens": 2}, {"options": BuildOptions(sm=("86",))},
    {"options": BuildOptions(weight_streaming=True)}], ids=str)
def test_another_request_is_built(changed: dict[str, Any], fake: FakeBuilder, fresh: Export,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.trt.check_options", lambda backend, options: None)
    build(BuildRequest(fresh.folder))
    built = len(fake.calls)
    assert any(not a.cached for a in build(BuildRequest(fresh.folder, overwrite=True, **changed)).attempts)
    assert len(fake.calls) > built


def test_a_plan_that_was_not_kept_is_built_for_it_alone(fake: FakeBuilder, fresh: Export) -> None:
    """Figures of the forms that lost are known, their plans are not."""
    build(BuildRequest(fresh.folder))
    built = len(fake.calls)
    engines = build(BuildRequest(fresh.folder, formulation="qkt", overwrite=True))
    assert [c.graph for c in fake.calls[built:]] == ["prefill.qkt", "decode.qkt"]
    assert [(e.engine, e.cached) for e in engines.engines] == [("prefill.qkt", False), ("decode.qkt", False)]
    for e in engines.engines:
        assert (engines.folder / str(e.file)).stat().st_size == e.plan_bytes
    again = build(BuildRequest(fresh.folder, formulation="qkt", overwrite=True))
    assert len(fake.calls) == built + 2
    assert all(e.cached for e in again.engines)


@pytest.mark.parametrize("suffix", ["json", "engine"])
def test_a_damaged_entry_is_built_again(suffix: str, fake: FakeBuilder, fresh: Export, own_cache: Path) -> None:
    build(BuildRequest(fresh.folder))
    built = len(fake.calls)
    for path in own_cache.glob(f"*.{suffix}"):
        flip(path)
    engines = build(BuildRequest(fresh.folder, overwrite=True))
    again = built if suffix == "json" else 2
    assert len(fake.calls) == built + again
    assert engines.data["notes"]
    assert all("damaged; built again" in note for note in engines.data["notes"])
    assert build(BuildRequest(fresh.folder, overwrite=True)).data["notes"] == []
    assert len(fake.calls) == built + again


def test_without_the_cache_nothing_is_taken_or_kept(fake: FakeBuilder, fresh: Export, own_cache: Path) -> None:
    build(BuildRequest(fresh.folder))
    kept, built = {p: p.read_bytes() for p in own_cache.iterdir()}, len(fake.calls)
    engines = build(BuildRequest(fresh.folder, cache=False, overwrite=True))
    assert len(fake.calls) == 2 * built
    assert not any(a.cached for a in engines.attempts)
    assert {p: p.read_bytes() for p in own_cache.iterdir()} == kept


def test_a_cache_that_cannot_be_used_ends_no_build(fake: FakeBuilder, fresh: Export, own_cache: Path) -> None:
    own_cache.write_text("a file, not a folder")
    engines = build(BuildRequest(fresh.folder))
    assert {e.engine for e in engines.engines if e.file} == {"prefill.kqt-blocks", "decode.kqt"}
    assert any("nothing is kept for later builds" in note for note in engines.data["notes"])
    assert own_cache.read_text() == "a file, not a folder"


def test_figures_for_a_report_are_taken_too(fake: FakeBuilder, fresh: Export) -> None:
    first = build_elsewhere(fresh, BuildRequest(fresh.folder))
    built = len(fake.calls)
    again = build_elsewhere(fresh, BuildRequest(fresh.folder))
    assert len(fake.calls) == built
    assert [replace(r, cached=False) for r in again] == list(first)
    build(BuildRequest(fresh.folder))
    assert len(fake.calls) == built + 2  # the plans of what is kept


def test_the_output_says_what_was_cached(fake: FakeBuilder, fresh: Export, monkeypatch: pytest.MonkeyPatch,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    from engines.__main__ import cli
    from exporter import console

    def run(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["engines", *words])
        with pytest.raises(SystemExit) as end:
            console.main(cli, "python -m engines")
        assert not end.value.code
        return capsys.readouterr().out

    assert "cached" not in run("build", str(fresh.folder))
    assert run("build", str(fresh.folder), "--overwrite").count("cached") == len(fresh.graphs)
    data = json.loads(run("build", str(fresh.folder), "--overwrite", "--no-cache", "--json"))
    assert [a["cached"] for a in data["attempts"]] == [False] * len(fresh.graphs)


def test_a_real_build_is_taken_again(fresh: Export) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    first = build(BuildRequest(fresh.folder, formulation="kqt"))
    plans = {e.engine: first.plan(e.graph).read_bytes() for e in first.engines}
    started = time.perf_counter()
    again = build(BuildRequest(fresh.folder, formulation="kqt", overwrite=True))
    assert time.perf_counter() - started < 5
    assert [replace(e, cached=False) for e in again.engines] == list(first.engines)
    assert all(e.cached for e in again.engines)
    assert {e.engine: again.plan(e.graph).read_bytes() for e in again.engines} == plans
