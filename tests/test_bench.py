"""The benchmark's frame: turns, contention, rows, tables, charts, kept runs, bad input. Nothing here asserts a time."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from exporter.errors import InputError
from exporter.export import ExportRequest, export
from tests.test_cli import run, run_json
from tests.test_synthetic import tiny
from validate import bench_charts, bench_tables, bench_timing, marked_page
from validate.bench_command import bench
from validate.bench_rows import Fit, Result, Row, Run, read_run
from validate.bench_timing import Load, Timed, pinned, take_turns, watch
from validate.engine_bench import build_twice
from validate.floor import Need, Probe, Rates
from validate.step_profile import Part, Profile, Summed
from validate.synthetic import write_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
RATES = Rates(read=10e9, read_median=9e9, read_bytes=1 << 30, flops=100e9, flops_median=90e9, product="p", samples=3)


def test_slow_subjects_stop_early() -> None:
    rounds: list[int] = []
    found = take_turns({"slow": lambda: np.zeros(1)}, 3, 0.0, between=rounds.append)["slow"]
    assert len(found.ms) == 3
    assert found.cpu_s >= 0
    assert rounds == [0, 1, 2]


def test_turns_are_taken() -> None:
    order: list[str] = []

    def step(name: str) -> Any:
        return lambda: order.append(name)

    take_turns({"a": step("a"), "b": step("b")}, 2, 1.0, burst=2, settle_s=0)
    assert order == list("aabbaabb")


def test_contention_is_named() -> None:
    quiet = Load("context 8", 2, 2, 1.0, 1.9, 1.2, 0.02, 0.001)
    assert quiet.warning() is None
    assert Load("context 8", 2, 16, 1.0, 1.9, 9.0, 8.0, 0.0).warning() is None  # others on other cores
    for load, words in ((Load("context 8", 2, 2, 1.0, 1.1, 2.7, 0.9, 0.4), "others used 0.9 of 2 cores"),
                        (Load("export", 1, 4, 1.0, 0.5, 2.7, None, 0.4), "waited for a core 40 %"),
                        (Load("export", 4, 2, 1.0, 2.0, 2.0, 0.0, 0.0), "4 threads on 2 cores"),
                        (Load("export", 2, 2, 1.0, 1.0, 3.1, None, None), "3.1 tasks were ready on 2 cores")):
        warning = load.warning()
        assert warning is not None
        assert words in warning
        assert load.what in warning
    assert len(Result(2, load=[quiet, Load("export", 4, 2, 1.0, 2.0, 2.0, 0.0, 0.0)]).warnings()) == 1


def test_the_watch_sees_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = iter([10.0, 13.0])
    monkeypatch.setattr(bench_timing, "_machine_cpu_seconds", lambda: next(machine))
    found: list[Load] = []
    with watch("context 8", 2, found):
        time.sleep(0.05)
    assert found[0].cores == os.cpu_count()
    assert found[0].foreign is not None
    assert found[0].foreign > 10  # three CPU seconds that were not ours, in a twentieth of a second
    warning = found[0].warning()
    assert warning is not None
    assert "contention, context 8" in warning


def test_the_time_of_a_child_that_lives_is_ours() -> None:
    """A peer in a process of its own is no neighbour."""
    words = "import sys\nfor i in range(10**7): pass\nprint('.', flush=True)\nsys.stdin.read()"
    before = bench_timing.cpu_seconds()
    with subprocess.Popen([sys.executable, "-c", words], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline()
        living = bench_timing.cpu_seconds() - before
        assert living > 0.05
        child.communicate()
    assert bench_timing.cpu_seconds() - before >= living - 0.05


def test_a_run_is_pinned_to_as_many_cores_as_threads() -> None:
    before = os.sched_getaffinity(0)
    with pinned(1) as cores:
        assert os.sched_getaffinity(0) == set(cores) == {min(before)}
        assert all(os.sched_getaffinity(int(t)) == set(cores) for t in os.listdir("/proc/self/task"))
        inside = subprocess.run([sys.executable, "-c", "import os; print(len(os.sched_getaffinity(0)))"],
                                capture_output=True, text=True, check=True)
        assert inside.stdout == "1\n"
    assert os.sched_getaffinity(0) == before
    with pinned(len(before) + 1) as cores:
        assert set(cores) == before


def test_medians_and_spreads() -> None:
    assert (Timed([4.0, 2.0, 3.0]).median, Timed([4.0, 2.0, 3.0]).spread) == (3.0, pytest.approx(1 / 3))
    assert Timed([5.0]).spread == 0
    assert Timed([1.0, 2.0, 3.0, 4.0]).spread == pytest.approx(2.5 / 2 / 2.5)
    assert Timed([500.0, 500.0], cpu_s=1.5).cpu_per_wall == 1.5


def row(context: int, ms: float, suite: str = "model", subject: str = "mla-export, qkt (default)", batch: int = 1,
        **others: Any) -> Row:
    return Row.of(suite, subject, Timed([ms, ms, ms]), context=context, batch=batch, tokens=others.pop("tokens", 1),
                  need=Need(1e7 + 1e4 * context, 1e6 * context), ours_ms=2.0, rel=1e-6, cache_bytes_per_token=9216,
                  **others)


def kept() -> dict[str, Any]:
    result = Result(2, (0, 1), {"layer": "article", "model": "v3-class", "profile": "v3-class", "prefill": "v3-class",
                                "export": "v3-class", "engine": "article"})
    for context in (1024, 8192, 32768):
        result.rows += [row(context, 2 + context / 1000), row(context, 9.0, subject="transformers"),
                        row(context, 3.0, "layer", "eager, expanding"), row(context, 4.0, batch=8)]
    result.rows += [row(1024, 5.0, batch=8, lengths=(512, 1536), tokens_per_s_of_batch_1=100.0),
                    row(0, 100.0, "prefill", tokens=1024, at_once=512),
                    row(0, 200.0, "prefill", "transformers", tokens=1024),
                    Row.of("export", "mla-export, weights link", Timed([500.0, 520.0]), peak_bytes=10**8,
                           bytes_written=10**6),
                    Row.of("export", "exporter --help", Timed([100.0, 110.0]), peak_bytes=10**7),
                    row(1024, 2.5, "profile"),
                    Row.of("engine", "one attention", Timed([9000.0]), outputs_equal=None, peak_bytes=10**9,
                           bytes_written=10**7, builder_ms=8000.0, engines=5, from_store=0)]
    result.profiles.append(Profile("mla-export, qkt (default)", 1024, 1, 6, 3.0, 2.5, 2.5, Need(2e7, 1e9), [
        Part("scores", 1.5, 0.6, 4, 1.25, 1e7, 1e8), Part("positions", 1.0, 0.4, 9)], [Summed("MatMul", 2.5, 1.0, 13)]))
    result.not_run.append("mobius-onnx: no network | none")
    result.load.append(Load("export", 2, 2, 1.0, 1.0, 3.1, 0.9, None))
    result.finish(RATES)
    data: dict[str, Any] = json.loads(json.dumps(result.to_dict()))
    return data


def test_a_straight_line_through_decode_times() -> None:
    fit = Fit(**{k: v for k, v in kept()["fits"][0].items() if not k.startswith("slope_to_")})
    assert (fit.us_per_row, fit.intercept_ms, fit.r2) == pytest.approx((1.0, 2.0, 1.0))
    assert fit.floor_us_per_row == pytest.approx(1e6 * (1e4 / 10e9 + 1e6 / 100e9))
    assert fit.slope_to_floor == pytest.approx(1 / 11)
    assert fit.median_floor_us_per_row == pytest.approx(1e6 * (1e4 / 9e9 + 1e6 / 90e9))
    assert fit.slope_to_median_floor == pytest.approx(0.9 / 11)
    assert Fit.of([row(1, 2.0).with_floor(RATES), row(2, 2.0).with_floor(RATES)]) is None
    mixed = Result(2, rows=[row(c, ms * c, subject=f"mla-export{label}, qkt (default)")
                            for c in (1000, 2000, 4000) for label, ms in (("", 1e-3), (" int8", 5e-4))])
    mixed.finish(RATES)  # each by itself
    assert [(f.subject, pytest.approx(f.us_per_row), f.r2 > 0.999) for f in mixed.fits] == [
        ("mla-export, qkt (default)", 1.0, True), ("mla-export int8, qkt (default)", 0.5, True)]
    noisy = Fit.of([row(c, ms).with_floor(RATES) for c, ms in ((1, 1.0), (2, 3.0), (3, 2.0))])
    assert noisy is not None
    assert noisy.r2 == pytest.approx(0.25)


def test_every_row_has_the_same_first_fields() -> None:
    always = ["suite", "subject", "context", "batch", "ms", "spread", "ratio_to_floor", "outputs_equal"]
    for r in kept()["rows"]:
        assert list(r)[:8] == always
        assert None not in [v for k, v in r.items() if k not in always]


def test_the_time_over_the_floor_at_the_best_and_at_the_median_rates() -> None:
    rates = dataclasses.replace(RATES, near={10**7: 20e9}, near_median={10**7: 16e9})
    for made, best, median in ((row(0, 10.0), 0.5, 0.625), (row(1000, 10.0), 12.0, 12 / 0.9)):
        found = made.with_floor(rates)
        assert (found.floor_ms, found.ratio_to_floor) == pytest.approx((best, 10 / best))
        assert (found.median_floor_ms, found.ratio_to_median_floor) == pytest.approx((median, 10 / median))
    bare = Row.of("export", "no need", Timed([1.0])).with_floor(rates)
    assert (bare.median_floor_ms, bare.ratio_to_median_floor) == (None, None)


def test_a_run_from_before_there_were_medians_is_shown(tmp_path: Path) -> None:
    data, late = kept(), ("median_floor", "near_median", "to_median_floor")

    def older(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: older(v) for k, v in value.items() if not any(word in k for word in late)}
        return [older(v) for v in value] if isinstance(value, list) else value

    file = tmp_path / "bench.json"
    file.write_text(json.dumps(older(data)))
    assert not any(word in file.read_text() for word in late)
    now, then = bench_tables.page_tables(data), bench_tables.page_tables(read_run(file))
    assert "x at median rates)" in now["bench-model"]
    assert "x at median rates)" not in then["bench-model"]
    for suite in ("layer", "model", "profile", "prefill"):
        head, first = (next(line for line in then[f"bench-{suite}"].splitlines() if line.startswith(words)).split(" | ")
                       for words in ("| subject", "| mla-export" if suite != "layer" else "| eager"))
        place = head.index("at median rates")
        assert head[place - 1] == "over the floor"
        assert (first[place - 1][-1], first[place]) == ("x", "–")


def test_tables_hold_every_row() -> None:
    data = kept()
    tables = bench_tables.page_tables(data)
    assert list(tables) == [f"bench-{s}" for s in ("layer", "model", "profile", "prefill", "export", "engine")]
    for suite in data["suites"]:
        lines = [line for line in tables[f"bench-{suite}"].splitlines() if line.startswith("|")]
        if suite != "profile":
            assert len(lines) == 2 + sum(r["suite"] == suite for r in data["rows"])
            assert len({line.count("|") for line in lines}) == 1
        assert "warning: contention, export" in tables[f"bench-{suite}"]
        assert "not run: mobius-onnx: no network | none" in tables[f"bench-{suite}"]
    assert "8, of 512 to 1536 rows" in tables["bench-model"]
    assert "| 1600.0 | 16.00x |" in tables["bench-model"]  # of the ragged batch: 8 in 5 ms, beside 100 a second
    assert "R2 1.0000" in tables["bench-model"]
    assert "| 10240.0 |" in tables["bench-prefill"]
    assert "| 5 | 0 |" in tables["bench-engine"]
    assert "| exporter --help | 0.10 | 5 % | – | – | 10.0 MB | – | yes |" in tables["bench-export"]
    # 1e7 bytes at 10 GB/s and 1e8 operations at 100 GFLOP/s are 2 ms, at 9 and 90 they are 2.22
    assert "| mla-export, qkt (default) | scores | 1 | 1024 | 1.5 | 60.0 % | 1.25 | 8.0 | 80 | 2 | 0.62x | 0.56x |" in (
        tables["bench-profile"])
    assert "| mla-export, qkt (default) | positions | 1 | 1024 | 1 | 40.0 % | – | – | – | – | – | – |" in (
        tables["bench-profile"])
    assert "| mla-export, qkt (default) | MatMul | 1 | 1024 | 13 | 2.5 | 100.0 % |" in tables["bench-profile"]


def test_charts_show_time_over_context_and_over_the_floor(tmp_path: Path) -> None:
    data = kept()
    panels = bench_charts.panels(data, "model")
    assert [p.title for p in panels] == ["A decode step, batch 1", "Over the floor, batch 1", "A decode step, batch 8",
                                         "Over the floor, batch 8"]
    steps, over = panels[:2]
    assert [line.name for line in steps.lines] == ["mla-export", "transformers", "the floor"]
    assert [x for x, _ in steps.lines[0].points] == [1024, 8192, 32768]
    assert steps.lines[-1].dashed
    assert [y for _, y in over.lines[1].points] == [r["ratio_to_floor"] for r in data["rows"]
                                                    if r["subject"] == "transformers" and r["suite"] == "model"]
    assert over.mark == 1.0
    assert [p.name for p in bench_charts.write(data, tmp_path)] == ["layer.svg", "model.svg", "profile.svg",
                                                                    "prefill.svg"]
    for file in tmp_path.iterdir():
        ElementTree.parse(file)


def test_a_chart_shows_the_best_form_of_each_and_codes_apart() -> None:
    rows = [{"suite": "model", "subject": subject, "context": context, "batch": 1, "ms": ms, "ratio_to_floor": ms,
             "floor_ms": floor} for subject, context, ms, floor in (
        ("mla-export, qkt (default)", 1024, 3.0, 2.0), ("mla-export, kqt", 1024, 2.5, 2.0),
        ("mla-export, qkt (default)", 8192, 5.0, 4.0), ("mla-export, kqt", 8192, 6.0, 4.0),
        ("mla-export int8, qkt (default)", 1024, 1.5, 1.0), ("peer q8_0, flash", 1024, 1.75, 0.5))]
    steps, _, coded, _ = bench_charts.panels({"rows": rows}, "model")
    assert {line.name: line.points for line in steps.lines} == {
        "mla-export": [(1024, 2.5), (8192, 5.0)], "the floor": [(1024, 2.0), (8192, 4.0)]}
    assert coded.title == "A decode step, batch 1, 8 and 4 bits"
    assert {line.name: line.points for line in coded.lines} == {
        "mla-export int8": [(1024, 1.5)], "peer q8_0": [(1024, 1.75)], "the floor": [(1024, 1.0)]}


def test_a_page_changes_between_its_markers_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "a\n<!-- x:begin -->\nold\n<!-- x:end -->\nb\n<!-- y:begin -->\nkept\n<!-- y:end -->\n"
    page.write_text(text)
    marked_page.update(page, {"x": marked_page.markdown(["n", "m"], [["one", 2]])})
    assert page.read_text() == text.replace("old\n", "| n | m |\n| --- | ---: |\n| one | 2 |\n")
    before = page.read_text()
    with pytest.raises(InputError, match="markers <!-- z:begin -->"):
        marked_page.update(page, {"x": "new", "z": ""})
    assert page.read_text() == before
    page.write_text("<!-- x:end --><!-- x:begin -->")
    with pytest.raises(InputError, match="in this order"):
        marked_page.check_page(page, ["x"])
    with pytest.raises(InputError, match="no such file"):
        marked_page.check_page(tmp_path / "none.md", [])


def test_a_run_from_before_there_were_profiles_is_shown() -> None:
    data = kept()
    del data["profile"]
    data["suites"].remove("profile")
    assert "bench-profile" not in bench_tables.page_tables(data)
    assert bench_charts.panels(data, "profile") == []


def test_documentation_has_a_place_for_every_table() -> None:
    marked_page.check_page(REPOSITORY / "docs" / "benchmarks.md", list(bench_tables.page_tables(kept())))


def here(words: Sequence[str]) -> None:
    """The command in this process; what it would print as an error comes as one."""
    bench.main(list(words), standalone_mode=False)


def test_a_run_is_kept_and_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "runs" / "one", tmp_path / "page.md"
    page.write_text("<!-- bench-layer:begin -->\n<!-- bench-layer:end -->\n")
    words = ["bench", "article", "--context", "96,128,160", "--rounds", "1", "--threads", "1"]
    data = run_json("validate", *words, "--out", str(out), "--update", str(page))
    assert sorted(p.name for p in out.iterdir()) == ["bench.json", "layer.svg"]
    assert json.loads((out / "bench.json").read_text()) == data
    rows = {(r["subject"], r["context"]): r for r in data["rows"]}
    assert {"eager, expanding", "ort, qkt (default)", "ort, kqt", "ort, attention"} <= {s for s, _ in rows}
    assert all(r["outputs_equal"] is True and r["ratio_to_floor"] > 0 for r in data["rows"])
    assert data["cores"] == [min(os.sched_getaffinity(0))]
    written = page.read_text()
    assert written.count("\n| eager, expanding |") == 3
    page.write_text("<!-- bench-layer:begin -->\n<!-- bench-layer:end -->\n")
    here(["--from", str(out / "bench.json"), "--update", str(page), "--out", str(tmp_path / "two"), "--json"])
    assert json.loads(capsys.readouterr().out) == data
    assert page.read_text() == written
    assert (tmp_path / "two" / "layer.svg").is_file()
    with pytest.raises(InputError, match="exists; nothing is overwritten"):
        here(["--from", str(out / "bench.json"), "--out", str(out)])
    here(["--from", str(out / "bench.json")])
    assert "the floor's rates, best of" in capsys.readouterr().out


def test_all_of_a_checkpoint_in_one_run(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "tiny", tiny(max_position_embeddings=2048), "fp32")
    data = run_json("validate", "bench", "--suite", "export,model,prefill", "--checkpoint", str(checkpoint), "--skip",
                    "mobius-onnx", "--skip", "llama.cpp", "--context", "16,64", "--batch", "1,8", "--pieces",
                    "0:24,24:48", "--rounds", "1", "--budget", "0.05", "--threads", "1")
    assert data["suites"] == ["model", "prefill", "export"]
    assert data["not_run"][:2] == ["mobius-onnx: skipped", "llama.cpp: skipped"]
    (fused,) = data["not_run"][2:]
    assert fused.startswith("mla-export --fused-decode: no library of the operator")
    assert all(r["outputs_equal"] is True for r in data["rows"])
    assert {r["suite"]: r for r in data["rows"]}.keys() == {"model", "prefill", "export"}
    assert [r["lengths"] for r in data["rows"] if r.get("lengths")] == [[512, 640, 768, 896, 1152, 1280, 1408, 1536]]
    assert [(f["batch"], f["contexts"]) for f in data["fits"]] == [(1, [16, 32, 64])]
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]
    assert data["rates"]["near"]


def test_a_build_finds_its_results_again(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    request = ExportRequest("article", tmp_path / "out", dtype="fp16", target="trt-rtx", max_context=64, max_batch=2)
    made = export(request)
    with Probe(1, read_bytes=1 << 20) as probe:
        run = Run(Result(1), probe)
        build_twice(run, made, "one", tmp_path / "store", ["--formulation", "kqt", "--no-opt-search"])
    first, again = run.result.rows
    assert [first.subject, again.subject] == ["one, first build", "one, again"]
    assert first.engines == again.engines == again.from_store
    assert (first.from_store, again.builder_ms) == (0, 0)
    assert first.builder_ms
    assert first.builder_ms < first.ms
    assert (first.peak_bytes or 0) > 10e6
    assert first.bytes_written == again.bytes_written
    assert (first.context, first.batch, first.outputs_equal, first.ratio_to_floor) == (64, 2, None, None)
    assert run.result.not_run == ["engine, steps on a device: no CUDA device"]
    with pytest.raises(InputError, match="--formulation"):
        build_twice(run, made, "one", tmp_path / "store", ["--formulation", "none"])


@pytest.mark.parametrize(("words", "message"), [
    (["--suite", "whole"], "--suite 'whole': expected all or some of layer, model, profile, prefill, export, engine"),
    (["--suite", "model", "--skip", "llama"], "expected one of mobius-onnx, llama.cpp, transformers"),
    (["--suite", "model", "deepseek-v3"], "--checkpoint FOLDER"),
    (["--skip", "transformers"], "--skip is for --suite model, prefill, export"),
    (["--suite", "profile", "--skip", "transformers"], "--skip is for --suite model, prefill, export"),
    (["--suite", "engine", "--context", "96"], "--context is for --suite layer, model, profile"),
    (["--suite", "model", "--context", "x"], "--context 'x': expected numbers from 1 up"),
    (["--suite", "model", "--batch", "0"], "--batch '0': expected numbers"),
    (["--suite", "prefill", "--pieces", "5:5"], "--pieces '5:5': expected START:STOP"),
    (["--suite", "model", "--checkpoint", "{empty}"], "no config.json"),
    (["--suite", "model", "--quantise", "int3"], "--quantise int3: expected one of"),
    (["--from", "{empty}/none.json"], "no such file"),
    (["--from", "{other}"], "its rows are not this benchmark's"),
    (["--from", "{other}", "--suite", "model"], "leave --suite out"),
    (["--out", "{empty}/.."], "nothing is overwritten"),
    (["--update", "{other}"], "markers <!-- bench-layer:begin -->"),
])
def test_bad_input_is_named(words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other.json").write_text('{"rows": [{"subject": "x"}]}')
    words = [w.format(empty=tmp_path / "empty", other=tmp_path / "other.json") for w in words]
    with pytest.raises(InputError, match=re.escape(message)):
        here(words)


def test_bad_input_is_one_line() -> None:
    status, out, err = run("validate", "bench", "--suite", "whole")
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("error: --suite 'whole': expected all or some of layer")


def test_only_whole_runs_are_read(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(kept()))
    assert read_run(file) == kept() | {"when": read_run(file)["when"]}
    for change, message in ((("rates",), "not a whole run"), (("rows",), "not this benchmark's")):
        file.write_text(json.dumps({k: v for k, v in kept().items() if k not in change}))
        with pytest.raises(InputError, match=message):
            read_run(file)
    for profile in ({}, [1], [{"subject": "x"}]):
        file.write_text(json.dumps(kept() | {"profile": profile}))
        with pytest.raises(InputError, match="its profile is not this benchmark's"):
            read_run(file)
    file.write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_run(file)


def test_the_readmes_figures_are_those_of_the_kept_run() -> None:
    """At 8192 rows: ours, the best of llama.cpp's in float32, mobius-onnx, transformers; and their bytes a token."""
    root = Path(__file__).resolve().parent.parent
    page = (root / "docs/benchmarks.md").read_text()
    table = page[page.index("<!-- bench-model:begin -->"):page.index("<!-- bench-model:end -->")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "| 8192 |" in line]
    found = {row[0]: (row[3], next(cell for cell in row if cell.endswith(" B"))) for row in rows if row[1] == "1"}
    peers = {name: pair for name, pair in found.items() if name.startswith("llama.cpp f32")}
    fused, ours = found["mla-export --fused-decode, fused (default)"], found["mla-export, qkt (default)"]
    llama = min(peers.values(), key=lambda pair: float(pair[0]))
    mobius, eager = found["mobius-onnx"], found["transformers"]
    readme = (root / "README.md").read_text()
    assert (f"| **{fused[0]} ms** by the project's operator, {ours[0]} in plain ONNX | {llama[0]} ms llama.cpp's best "
            f"form, {mobius[0]} mobius-onnx, {eager[0]} transformers |") in readme
    assert (f"| **{ours[1]}** | {mobius[1][:-2]} mobius-onnx; llama.cpp's best form {llama[1][:-2]}, of 16 bits |"
            ) in readme


def test_what_one_pass_saves_is_told_as_it_was_measured() -> None:
    """The summary in docs/benchmarks.md has the rows of the tables below it."""
    page = (Path(__file__).resolve().parent.parent / "docs/benchmarks.md").read_text()
    summary, tables = page[page.index("**One pass.**"):page.index("## Figures")], page[page.index("## Figures"):]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables.splitlines() if line[:1] == "|"]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in summary.splitlines()
            if re.match(r"\| \d", line)]
    assert len(told) == 5
    for batch, context, *cells in told:
        for subject, cell in zip(("mla-export, qkt (default)", "mla-export --fused-decode, fused (default)"), cells,
                                 strict=True):
            found = [row for row in rows if row[0] == subject and row[1].removesuffix(" rows") == batch
                     and row[2] == context.removesuffix(" each")]
            ms, best, median = re.split("; |, ", cell)
            assert any((float(row[3]), *row[6:8]) == (float(ms), best, median) for row in found), (subject, cell)
