"""What is tried and what is kept: layouts, opt points, and the choice, which is a function of records alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache as memo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import bounded, search, trials
from engines.backends import default_graph, open_session
from engines.build import build
from engines.build_request import BuildRequest
from engines.build_tables import show
from engines.records import Attempt, EngineRecord, inspected, open_engines, require_loadable, stale
from engines.search import Candidate, OptPoint, best_attempt, candidates, choose, layouts_to_build, opt_points
from engines.session import Session, output_shape
from engines.timing import opt_feed, step_milliseconds
from exporter.dtypes import NUMPY_OF_NAME
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, GraphEntry, open_export
from tests.fake_builder import Call, FakeBuilder, install
from tests.model_checkpoints import tiny_checkpoint
from validate.synthetic import named_config, write_checkpoint

MB = 1_000_000
Make = Callable[..., Export]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports by model (the article's layer, or a tiny checkpoint) and options, each made once and never changed."""

    @memo
    def once(model: str, options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("made")
        source = model if model == "article" else str(tiny_checkpoint(folder / "source", model, layers=2,
                                                                      dtype=torch.float32))
        return export(ExportRequest(source, folder / "export", **{"target": "trt-rtx", "max_context": 64,
                                                                  "max_batch": 2, **dict(options)}))

    return lambda model="article", **options: once(model, tuple(sorted(options.items())))


@pytest.fixture
def fresh(make: Make, tmp_path: Path) -> Make:
    def copy(model: str = "article", **options: Any) -> Export:
        return open_export(Path(shutil.copytree(make(model, **options).folder, tmp_path / "an export")))

    return copy


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    return install(monkeypatch)


@pytest.fixture
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")


# --- Which layouts ----------------------------------------------------------------------------------------------------


def names(made: Export, **options: Any) -> list[str]:
    return [c.name for c in candidates(made, BuildRequest(made.folder, **options))]


def split(made: Export) -> list[str]:
    return [g.name for g in made.graphs]


SPLIT = ["prefill.kqt-blocks", "prefill.kqt", "prefill.kqt-groups", "prefill.qkt", "decode.kqt", "decode.qkt"]
UNIFIED = ["unified.kqt-blocks", "unified.kqt", "unified.qkt"]  # of the formulations that are for both kinds


@pytest.mark.parametrize(("layout", "found"), [("auto", SPLIT), ("split", SPLIT), ("unified", UNIFIED),
                                               ("both", SPLIT + UNIFIED)])
def test_layouts_of_one_attention(layout: str, found: list[str], make: Make) -> None:
    assert names(make(), layout=layout) == found


def test_layouts_of_a_model(make: Make) -> None:
    """Weights decide, so both are built; not where one graph would decode with every expert."""
    dense = make("v3-dense")
    assert names(dense) == split(dense) + UNIFIED
    assert names(dense, formulation="qkt") == ["prefill.qkt", "decode.qkt", "unified.qkt"]
    sparse = make("v3")
    assert names(sparse) == split(sparse)
    _, why = layouts_to_build(sparse, BuildRequest(sparse.folder))
    assert re.match(r"experts: decode gather, prefill dense; one engine would decode as it prefills", why)
    assert names(sparse, layout="unified") == UNIFIED  # asked for by name
    assert names(make("v3", experts="dense")) == split(sparse) + UNIFIED


def test_a_formulation_of_one_kind_serves_no_unified_engine(make: Make) -> None:
    """kqt-groups reads the cache once for each group, so only who asks for just that decodes with it; kqt-half has no
    prefill."""
    made = make(dtype="fp16")
    decode = [n for n in split(made) if n.startswith("decode")]
    assert names(made, formulation="kqt-groups", layout="both") == [*decode, "prefill.kqt-groups"]
    assert names(made, formulation="kqt-groups", layout="unified") == ["unified.kqt-groups"]
    with pytest.raises(InputError, match=r"^--layout unified --formulation kqt-half: no graph of it prefills; leave "
                                         r"one of the two out$"):
        build(BuildRequest(made.folder, formulation="kqt-half", layout="unified"))


def test_an_engine_of_a_prefill_form_answers_the_default_decode_graph(fake: FakeBuilder, sessions: None, fresh: Make,
                                                                      ) -> None:
    made = fresh()
    engines = build(BuildRequest(made.folder, formulation="kqt-groups", layout="unified"))
    (kept,) = engines.engines
    assert kept.serves == {"decode": "decode.kqt", "prefill": "prefill.kqt-groups"}
    session = open_session(made, "decode", "trt-rtx")
    assert isinstance(session, Opened)
    assert (session.graph.name, session.profile) == ("decode.kqt", 0)
    assert session.built_from == made.graph("prefill", "kqt-groups")


@pytest.mark.parametrize(("options", "reason"), [
    ({"prefill": "expanded"}, "the export's prefill is expanded"), ({"causal": False}, "one kind of graph")])
def test_no_unified_engine_of_other_prefills(options: dict[str, Any], reason: str, make: Make) -> None:
    made = make(**options)
    assert layouts_to_build(made, BuildRequest(made.folder))[0] == ("split",)
    for layout in ("unified", "both"):
        with pytest.raises(InputError, match=rf"^--layout {layout}: .*{reason}.*export with --prefill absorbed$"):
            build(BuildRequest(made.folder, layout=layout))
    assert not (made.folder / "engines").exists()


# --- Opt points -------------------------------------------------------------------------------------------------------


def points(made: Export, kind: str, **options: Any) -> list[OptPoint]:
    graph = made.graph("prefill" if kind == "unified" else kind)
    return opt_points(made, Candidate(kind, graph), BuildRequest(made.folder, **options))


def test_opt_points(make: Make) -> None:
    """The usual one first; those that the limits make alike once."""
    made, small = make(max_context=9000), make()
    assert points(made, "decode") == [OptPoint(), OptPoint(1024), OptPoint(1 << 24)]
    assert points(made, "prefill") == [OptPoint(), OptPoint(1024), OptPoint(1 << 24), OptPoint(tokens=128)]
    assert points(made, "unified") == points(made, "prefill")
    assert points(made, "prefill", chunk=128) == points(made, "decode")
    assert points(made, "decode", max_context=4096) == [OptPoint(), OptPoint(1024)]
    assert points(small, "decode") == points(small, "prefill") == [OptPoint()]
    scatter = make(cache="scatter", max_context=9000)  # its rows are static
    assert points(scatter, "decode") == [OptPoint()]
    assert points(scatter, "prefill") == [OptPoint(), OptPoint(tokens=128)]


def attempt(activation: int | None, at_default: bool = False, engine: str = "decode.kqt") -> Attempt:
    kind, _, form = engine.partition(".")
    return Attempt(engine, engine, kind, form, [{"S": [1, 2, 3]}], at_default, activation, [activation or 0], 1, 1, 1.0,
                   refused=None if activation else "no")


@pytest.mark.parametrize(("figures", "best"), [
    ([(100, True), (90, False)], 1), ([(100, True), (99, False)], 1), ([(1000, True), (991, False)], 0),
    ([(1000, True), (989, False)], 1), ([(100, True), (100, False)], 0), ([(None, True), (200, False)], 1),
    ([(300, True), (100, False), (100, False)], 1), ([(300, True), (101, False), (100, False)], 2),
    ([(100, True), (None, False)], 0)])
def test_within_one_percent_the_usual_opt_point_wins(figures: list[tuple[int | None, bool]], best: int) -> None:
    tried = [attempt(count, usual) for count, usual in figures]
    assert best_attempt(tried) is tried[best]


def test_every_opt_point_is_tried_and_recorded(fake: FakeBuilder, fresh: Make) -> None:
    """The leanest one's plan is kept, with its own opt point in the record."""
    made = fresh(max_context=9000, dtype="fp16")

    def activation(call: Call) -> int:
        more = {4096: 30, 1024: 10, 9000: 20}[call.opt_rows or 0] if call.graph == "decode.kqt" else 0
        return (100 + more) * MB

    fake.activation = activation
    engines = build(BuildRequest(made.folder, formulation="kqt", chunk=64))
    decode = [a for a in engines.attempts if a.kind == "decode"]
    assert [(a.profiles[0]["S"], a.at_default, a.activation_bytes) for a in decode] == [
        ([1, 4096, 9000], True, 130 * MB), ([1, 1024, 9000], False, 110 * MB), ([1, 9000, 9000], False, 120 * MB)]
    kept = engines.record("decode.kqt")
    assert (kept.limits["S"], kept.activation_bytes) == ([1, 1024, 9000], 110 * MB)
    number = next(i for i, c in enumerate(fake.calls, 1) if c.graph == "decode.kqt" and c.opt_rows == 1024)
    assert engines.plan("decode.kqt").read_bytes().startswith(f"plan {number} of decode.kqt".encode())
    assert engines.record("prefill.kqt").limits["S"] == [1, 4096, 9000]  # all alike
    assert {p.name for p in engines.folder.iterdir()} == {"manifest.json", "prefill.kqt.engine", "decode.kqt.engine"}


@pytest.mark.parametrize(("seconds", "asked", "tried"), [(1.0, None, 3), (3.1, None, 1), (1.0, False, 1),
                                                         (100.0, True, 3)])
def test_slow_builds_are_not_searched(seconds: float, asked: bool | None, tried: int, fake: FakeBuilder, fresh: Make,
                                      ) -> None:
    made = fresh(max_context=9000, dtype="fp16")
    fake.seconds = seconds
    build(BuildRequest(made.folder, formulation="kqt", opt_search=asked, chunk=64))
    assert [c.graph for c in fake.calls].count("decode.kqt") == tried


def test_an_opt_point_that_fails_is_recorded_and_passed_over(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(max_context=9000, dtype="fp16")
    fake.fail_at, fake.error = 2, trials.trt.BuildError("no kernel there")
    engines = build(BuildRequest(made.folder, formulation="kqt", chunk=64))
    assert [a.refused for a in engines.attempts if a.kind == "prefill"] == [None, "no kernel there", None]
    assert engines.data["refused"] == {}
    assert engines.record("prefill.kqt").limits["S"] == [1, 4096, 9000]


# --- The choice -------------------------------------------------------------------------------------------------------


def record(engine: str, activation: int, plan: int = 1000 * MB, milliseconds: float | None = None,
           default: bool = False) -> EngineRecord:
    kind, _, form = engine.partition(".")
    graph = f"prefill.{form}" if kind == "unified" else engine
    return EngineRecord(engine, graph, kind, form, default, None, activation, [activation], plan, plan, 1,
                        {"S": [1, 2, 3]}, [{"S": [1, 2, 3]}], {kind: engine}, 1.0, milliseconds=milliseconds)


def test_the_least_activation_without_a_device() -> None:
    found = [record("decode.kqt", 20), record("decode.qkt", 10), record("prefill.kqt", 5), record("prefill.qkt", 5)]
    choice = choose(found, "because")
    assert (choice.layout, choice.engines, choice.why) == ("split", ("decode.qkt", "prefill.kqt"), "because")
    assert choose(found, "", defaults=True).engines == ("decode.qkt", "prefill.kqt")
    found[0] = replace(found[0], default=True)
    assert choose(found, "", defaults=True).engines == ("decode.kqt", "prefill.kqt")


@pytest.mark.parametrize(("limit", "kept"), [(None, "decode.c"), (300, "decode.c"), (299, "decode.b"),
                                             (150, "decode.a")])
def test_the_fastest_within_the_limit_with_a_device(limit: float | None, kept: str) -> None:
    """Invented timings: more scratch buys speed, up to what is allowed; what was not timed comes last."""
    found = [record("decode.a", 100, milliseconds=3.0), record("decode.b", 200, milliseconds=2.0),
             record("decode.c", 300, milliseconds=1.0), record("decode.d", 1)]
    assert choose(found, "", limit).engines == (kept,)


def test_timings_that_are_alike_go_to_the_leaner_engine() -> None:
    found = [record("decode.a", 200, milliseconds=1.0), record("decode.b", 100, milliseconds=1.0)]
    assert choose(found, "").engines == ("decode.b",)


def test_nothing_within_the_limit_is_an_error() -> None:
    found = [record("decode.kqt", 20 * MB), record("decode.qkt", 15 * MB), record("prefill.kqt", 5 * MB)]
    with pytest.raises(CheckError, match=r"^--activation-limit: the leanest decode engine, decode\.qkt, needs 15\.0 MB "
                                         r"of activation, 10\.0 MB are allowed; allow more, or lower batch"):
        choose(found, "", 10 * MB)


def test_the_layout_that_takes_less() -> None:
    """Plans, and the largest scratch."""
    split = [record("decode.kqt", 30 * MB, 1000 * MB), record("prefill.kqt", 400 * MB, 1000 * MB)]
    choice = choose([*split, record("unified.kqt", 400 * MB, 1100 * MB)], "a model")
    assert (choice.layout, choice.engines) == ("unified", ("unified.kqt",))
    assert choice.bytes == {"split": 2400 * MB, "unified": 1500 * MB}
    assert choice.why == "a model (split 2400.0 MB, unified 1500.0 MB of plans and largest activation)"
    assert choose([*split, record("unified.kqt", 400 * MB, 2100 * MB)], "").layout == "split"
    # a layout that breaks the limit is none
    assert choose([*split, record("unified.kqt", 600 * MB, 100 * MB)], "", 500 * MB).layout == "split"
    assert choose([*split, record("unified.kqt", 100 * MB, 5000 * MB)], "", 200 * MB).layout == "unified"


# --- A unified engine -------------------------------------------------------------------------------------------------


class Opened(Session):
    """In place of a TensorRT session: what it was opened with."""

    def __init__(self, export: Export, graph: GraphEntry, backend: str, plan: Path, profile: int = 0,
                 built_from: GraphEntry | None = None, load: Any = None) -> None:
        super().__init__(export, graph)
        self.plan, self.profile, self.built_from = plan, profile, built_from

    def _run(self, feed: Any, sizes: Any) -> dict[str, np.ndarray]:
        return {t.name: np.zeros(output_shape(t.shape, sizes), NUMPY_OF_NAME[t.dtype]) for t in self.graph.outputs}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.trt_session.require_cuda", lambda backend: None)
    monkeypatch.setattr("engines.trt_session.TensorRTSession", Opened)


@pytest.mark.parametrize("model", ["article", "v3-dense"])
def test_one_engine_for_both_kinds(model: str, fake: FakeBuilder, sessions: None, fresh: Make) -> None:
    """Built from the prefill graph with the decode limits first; both kinds open it, each in its own profile."""
    made = fresh(model)
    engines = build(BuildRequest(made.folder, layout="unified", prefill_batch=1, chunk=16))
    assert [c.graph for c in fake.calls] == ["prefill.kqt-blocks", "prefill.kqt", "prefill.qkt"]
    tokens = "hidden_states" if model == "article" else "input_ids"
    for call in fake.calls:
        decode, prefill = (tuple(limit[:2] for limit in p[tokens]) for p in call.profiles)
        assert decode == ((1, 1), (1, 1), (2, 1))
        assert prefill == ((1, 1), (1, 16), (1, 16))
        assert ("last_token" in call.profiles[0]) == (model != "article")
    (kept,) = [e for e in engines.engines if e.file]
    assert (kept.engine, kept.graph, kept.kind) == ("unified.kqt-blocks", "prefill.kqt-blocks", "unified")
    assert kept.serves == {"decode": "decode.kqt", "prefill": "prefill.kqt-blocks"}
    assert kept.profiles[0]["B"] == [1, 1, 2]
    assert kept.limits == kept.profiles[1]
    assert len(kept.profile_activation_bytes) == 2
    assert engines.data["layout"]["kept"] == "unified"
    for profile, kind in enumerate(("decode", "prefill")):
        assert default_graph(made, kind, "trt-rtx").name == kept.serves[kind]
        session = open_session(made, kind, "trt-rtx")
        assert isinstance(session, Opened)
        assert (session.graph.name, session.profile) == (kept.serves[kind], profile)
        assert session.plan == engines.folder / "unified.kqt-blocks.engine"
        assert session.built_from == made.graph("prefill", "kqt-blocks")
        with pytest.raises(InputError, match=rf"no engine of {kind}\.qkt was kept; kept: unified\.kqt-blocks"):
            open_session(made, kind, "trt-rtx", "qkt")


def test_both_layouts_are_recorded_and_one_is_kept(fake: FakeBuilder, fresh: Make) -> None:
    fake.weights = 3000
    engines = build(BuildRequest(fresh().folder, layout="both"))
    assert [e.engine for e in engines.engines] == SPLIT + UNIFIED
    assert {p.name for p in engines.folder.glob("*.engine")} == {"unified.kqt-blocks.engine"}
    least = 1_000_000_000
    assert engines.data["layout"]["bytes"] == {"split": least + 6000, "unified": least + 3000}
    assert {a.engine for a in engines.attempts} == {*SPLIT, *UNIFIED}


def test_a_unified_engine_that_fails_leaves_the_split_ones(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh()

    def build_or_fail(call: Call) -> int:
        if len(call.profiles) > 1:
            raise trials.trt.BuildError("no kernel for both")
        return 1_000_000_000

    fake.activation = build_or_fail
    engines = build(BuildRequest(made.folder, layout="both"))
    assert engines.data["layout"]["kept"] == "split"
    assert set(engines.data["refused"]) == set(UNIFIED)
    with pytest.raises(CheckError, match="no kernel for both"):
        build(BuildRequest(made.folder, layout="unified", overwrite=True))


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Export]:
    """Four layers of seeded random weights by their sizes: no two constants are alike, so none can be shared by chance.
    """
    folder = tmp_path_factory.mktemp("random")

    @memo
    def once(hidden: int, ffn: int, vocabulary: int) -> Export:
        _, config = named_config("v3-class")
        config |= {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 8, "num_key_value_heads": 8,
                   "q_lora_rank": 256, "kv_lora_rank": 256, "vocab_size": vocabulary}
        source = write_checkpoint(folder / f"source {hidden}", config, "bf16")
        return export(ExportRequest(str(source), folder / f"export {hidden}", dtype="bf16", target="trt-rtx",
                                    max_context=1024, max_batch=4))

    return once


@pytest.mark.parametrize(("sizes", "most"), [
    pytest.param((1024, 5504, 32768), 1.1, marks=pytest.mark.slow),  # V2-Lite's proportions, 290 MB
    ((512, 2048, 8192), 1.4)])  # 52 MB, beside which kernels, 6 MB a profile, are no small thing
def test_a_unified_engine_holds_the_weights_once(sizes: tuple[int, int, int], most: float, rtx: None,
                                                 random_model: Callable[..., Export], tmp_path: Path,
                                                 record_property: Callable[[str, object], None]) -> None:
    made = open_export(Path(shutil.copytree(random_model(*sizes).folder, tmp_path / "export")))
    weights = int(made.data["weights"]["bytes"])
    request = BuildRequest(made.folder, formulation="kqt", chunk=128, prefill_batch=2, opt_search=False)
    engines = build(request)
    plans = {e.engine: e.plan_bytes for e in engines.engines}
    held = {e.engine: e.weight_bytes for e in engines.engines}
    record_property("weights, plans, weights held", (weights, plans, held))
    assert held == {name: pytest.approx(weights, rel=0.01) for name in ("prefill.kqt", "decode.kqt", "unified.kqt")}
    assert plans["unified.kqt"] <= most * weights
    assert 2 * weights <= plans["decode.kqt"] + plans["prefill.kqt"] <= 2 * most * weights
    assert engines.data["layout"]["kept"] == "unified"
    assert {p.name for p in engines.folder.glob("*.engine")} == {"unified.kqt.engine"}
    assert engines.plan("decode.kqt") == engines.plan("prefill.kqt")
    by_name = {e.engine: e for e in engines.engines}
    decode, prefill = by_name["unified.kqt"].profile_activation_bytes
    assert decode == pytest.approx(by_name["decode.kqt"].activation_bytes, rel=0.1)
    assert prefill == pytest.approx(by_name["prefill.kqt"].activation_bytes, rel=0.1)
    assert "weights are laid out twice" not in shown(made, 400)
    # one row alone (the last token of one sequence) has its own layout of the last layer's gate and up projections
    alone = build(replace(request, layout="unified", prefill_batch=1, overwrite=True))
    hidden, ffn, _ = sizes
    assert alone.engines[0].weight_bytes - weights == pytest.approx(2 * 2 * hidden * ffn, rel=0.02)
    assert "of weights are laid out twice" in " ".join(shown(made, 400).split())


# --- Timing -----------------------------------------------------------------------------------------------------------


def test_a_device_decides_by_time(fake: FakeBuilder, fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate's best plan is timed at its opt point; what does not run is said by name, and never kept."""
    made = fresh(dtype="fp16")
    times, seen = {g.name: 6.0 for g in made.graphs}, list[tuple[str, dict[str, int]]]()
    times |= {"decode.kqt": 2.0, "decode.qkt": 1.0, "prefill.kqt": 5.0}
    del times["prefill.qkt"]

    def timed(session: Session, sizes: dict[str, int]) -> float:
        seen.append((session.graph.name, sizes))
        if session.graph.name not in times:
            raise InputError("not enough memory on the device")
        return times[session.graph.name]

    monkeypatch.setattr(trials, "_device_name", lambda: "a GPU")
    monkeypatch.setattr(trials, "step_milliseconds", timed)
    monkeypatch.setattr("engines.trt_session.TensorRTSession", Opened)
    fake.activation = {g.name: 70 * MB for g in made.graphs} | {
        "decode.kqt": 10 * MB, "decode.qkt": 90 * MB, "prefill.kqt": 50 * MB, "prefill.qkt": 20 * MB}
    engines = build(BuildRequest(made.folder, chunk=16))
    assert {e.engine: e.milliseconds for e in engines.engines} == {**times, "prefill.qkt": None}
    assert {e.engine for e in engines.engines if e.file} == {"decode.qkt", "prefill.kqt"}
    assert engines.data["timing"] == ("median step on a GPU, at the opt point; the fastest is kept; prefill.qkt was "
                                      "not timed: not enough memory on the device")
    assert ("decode.qkt", {"B": 1, "T": 1, "S": 64}) in seen
    limited = build(BuildRequest(made.folder, chunk=16, activation_limit=60, overwrite=True))
    assert {e.engine for e in limited.engines if e.file} == {"decode.kqt", "prefill.kqt"}


def test_without_a_device_nothing_is_timed(fake: FakeBuilder, fresh: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_device_name", lambda: None)
    engines = build(BuildRequest(fresh().folder))
    assert engines.data["timing"] == "not run: no CUDA device; the least activation is kept"
    assert {e.milliseconds for e in engines.engines} == {None}


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize(("model", "cache"), [("article", "append"), ("article", "scatter"), ("article", "concat"),
                                              ("v3-dense", "append"), ("v3-dense", "scatter")])
def test_the_feed_at_an_opt_point_is_one_a_session_takes(model: str, cache: str, kind: str, make: Make) -> None:
    made = make(model, cache=cache)
    session = Opened(made, made.graph(kind), "trt-rtx", Path())
    sizes = {"B": 1, "T": 3, "S": 8} if cache != "scatter" else {"B": 1, "T": 3}
    session.infer(opt_feed(session, sizes))  # the contract's own check
    assert step_milliseconds(session, sizes, steps=2) > 0


# --- Versions, and how it looks ---------------------------------------------------------------------------------------


def test_plans_of_another_version_are_stale(fake: FakeBuilder, sessions: None, fresh: Make,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    made = fresh()
    engines = build(BuildRequest(made.folder))
    assert stale(engines) is None
    require_loadable(made, engines)
    path = engines.folder / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"builder": "9.9"}))
    old = open_engines(made, "trt-rtx")
    assert stale(old) == "built with tensorrt_rtx 9.9, installed is 0.0"
    with pytest.raises(InputError, match=r"engines/trt-rtx: built with tensorrt_rtx 9\.9, installed is 0\.0; a plan "
                                         r"loads in the version that built it .*; rebuild with: python -m engines "
                                         r"build .*--backend trt-rtx --overwrite$"):
        open_session(made, "decode", "trt-rtx")
    opened, problems = inspected(made, ["trt-rtx"])
    assert opened == [old]
    assert "installed is 0.0; a plan loads" in problems["trt-rtx"]
    text = " ".join(shown(made, 200).split())
    assert "STALE" in text
    assert "installed is 0.0; its plans will not load: rebuild with: python -m engines build" in text
    data["options"]["version_compatible"] = True
    path.write_text(json.dumps(data | {"builder": "9.9"}))
    open_session(made, "decode", "trt-rtx")
    monkeypatch.setattr("engines.trt.available", lambda backend: False)  # nothing to compare with
    path.write_text(json.dumps(data | {"builder": "9.9", "options": {"version_compatible": False}}))
    assert stale(open_engines(made, "trt-rtx")) is None


def shown(made: Export, width: int) -> str:
    from rich.console import Console

    out = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(out, open_engines(made, "trt-rtx"), made)
    return out.export_text()


def test_all_attempts_are_one_table_of_80_columns(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh(max_context=9000, dtype="fp16")
    fake.activation = lambda call: (30 if call.graph == "decode.qkt" else 20) * 10 * MB
    fake.fail_at, fake.error = 2, trials.trt.BuildError("no kernel there")
    build(BuildRequest(made.folder, layout="both", chunk=300))
    text = shown(made, 80)
    begin = text.index("All candidates")
    lines = [line.rstrip() for line in text[begin:text.index("\n- ")].splitlines()]
    rows = [line for line in lines if re.match(r"(prefill|decode|unified)\.", line)]
    kinds = [g.kind for g in made.graphs]
    assert len(rows) == 4 * kinds.count("prefill") + 3 * kinds.count("decode") + 4 * len(UNIFIED)
    assert all(len(line) <= 80 for line in lines)
    assert sum("kept" in row for row in rows) == 1
    assert any(re.fullmatch(r"decode\.kqt +S 4096 +200\.0 +0\.0 +0\.0 +0\.5 s +best", row) for row in rows)
    assert [row for row in rows if "refused" in row] == [row for row in rows if re.match(
        r"prefill\.kqt-blocks +S 1024, T 300 +refused", row)]
    assert re.search(r"prefill\.kqt-blocks at opt S 1024, T 300: no kernel there", " ".join(text.split()))
    assert "step time: not run: no CUDA device" in " ".join(text.split())


def test_the_vendors_command_is_recorded(fake: FakeBuilder, fresh: Make) -> None:
    made = fresh()
    engines = build(BuildRequest(made.folder))
    for e in engines.engines:
        if e.file is None:
            assert e.command is None
            continue
        assert e.command is not None
        assert e.command.startswith("tensorrt_rtx ")
        assert f"{e.graph}.onnx" in e.command
        assert e.file in e.command
        assert "partial" not in e.command
        assert e.command in shown(made, 80)  # on one line, however long


def test_the_search_is_of_records_alone() -> None:
    """No builder, no clock and no device in the file that chooses."""
    text = Path(search.__file__).read_text()
    assert not re.search(r"^(from|import) .*(trt\b|bounded|torch|time\b)", text, re.MULTILINE)
    assert "Builder" not in text
    assert bounded.Builder  # where it is
