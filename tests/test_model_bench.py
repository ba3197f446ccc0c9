"""The benchmark of whole models, with subjects that cost nothing: nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.decoder_config import DecoderConfig
from exporter.errors import CheckError, InputError
from tests.test_floor import MODEL
from tests.test_synthetic import tiny
from validate import (
    bench_subjects,
    child,
    export_bench,
    llama_peer,
    mobius_peer,
    model_bench,
    peers,
    prefill_bench,
    startup_bench,
)
from validate.bench_rows import Result, Run
from validate.bench_subjects import PLAIN, Variant, Workplace, workplace
from validate.bench_timing import Step, Timed
from validate.floor import Probe
from validate.model_bench import compare_and_time
from validate.peers import AbsentError, ModelShape, Past, Subject, Transformers
from validate.synthetic import write_checkpoint

SHAPE = ModelShape(layers=2, heads=3, latent=4, nope=3, rope=2, v=5, vocabulary=50, positions=512, pairs=True)


class Fake(Subject):
    """Logits that follow from tokens and past alone, off by `error` or refused."""

    def __init__(self, name: str, error: float = 0.0, fails: str = "", caches: int = 1) -> None:
        self.name, self.error, self.fails, self.working_caches = name, error, fails, caches
        self.cache_bytes_per_token = 4 * SHAPE.latent_floats
        self.asked = 0

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        if self.fails:
            raise RuntimeError(self.fails)
        rng = np.random.default_rng(int(prompt.sum()))
        return self._off(rng.standard_normal((1 + follow.shape[1], len(prompt), SHAPE.vocabulary)))

    def hold(self, past: Past, token: np.ndarray) -> Step:
        logits = self._off(np.random.default_rng(past.length).standard_normal((past.batch, SHAPE.vocabulary)))

        def step() -> np.ndarray:
            self.asked += 1
            time.sleep(1e-3)
            return logits

        return step

    def _off(self, logits: np.ndarray) -> np.ndarray:
        logits[..., 0] += self.error
        return logits


@pytest.fixture
def probe() -> Iterator[Probe]:
    with Probe(1, read_bytes=1 << 20) as made:
        yield made


def run_of(probe: Probe, rounds: int = 2, budget: float = 0.05) -> Run:
    return Run(Result(1), probe, rounds, budget)


def timed(probe: Probe, *subjects: Subject, ours: int = 1, contexts: tuple[int, ...] = (8, 16),
          batches: tuple[int, ...] = (1,)) -> Result:
    run = run_of(probe)
    compare_and_time(run, subjects, [s.name for s in subjects[:ours]], SHAPE, MODEL, contexts, batches)
    run.result.models["model"] = "fake"
    run.result.finish(probe.rates())
    return run.result


def test_rows_of_subjects_that_agree(probe: Probe) -> None:
    result = timed(probe, Fake("ours"), Fake("ours too"), Fake("peer", error=1e-5), ours=2)
    data = json.loads(json.dumps(result.to_dict()))
    assert [(r["context"], r["subject"]) for r in data["rows"]] == [
        (c, s) for c in (8, 16) for s in ("ours", "ours too", "peer")]
    for row in data["rows"]:
        assert {"suite", "subject", "context", "batch", "ms", "spread", "ratio_to_floor", "outputs_equal", "ratio",
                "min_ms", "floor_ms", "cache_bytes_per_token"} <= set(row)
        assert row["outputs_equal"] is True
        assert row["suite"] == "model"
        assert row["cache_bytes_per_token"] == 4 * 2 * 6
        assert row["steps"] >= 3
        assert row["ratio_to_floor"] == pytest.approx(row["ms"] / (row["floor_bytes_ms"] + row["floor_flops_ms"]))
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms"])
    ours = {r["context"]: r["ms"] for r in data["rows"] if r["subject"] == "ours"}
    assert all(r["ratio"] == pytest.approx(r["ms"] / ours[r["context"]]) for r in data["rows"])
    assert [load["what"] for load in data["load"]] == ["batch 1, context 8", "batch 1, context 16"]
    assert {"fits", "rates", "versions", "not_run", "warnings", "threads", "models"} <= set(data)


def test_a_batch_is_set_beside_one_sequence(probe: Probe) -> None:
    result = timed(probe, Fake("ours"), contexts=(8,), batches=(1, 4))
    one, four = result.rows
    assert (one.batch, four.batch) == (1, 4)
    assert one.tokens_per_s_of_batch_1 is None
    assert four.tokens_per_s_of_batch_1 == one.tokens_per_s
    assert four.tokens_per_s == pytest.approx(4e3 / four.ms)
    assert four.read_bytes is not None
    assert one.read_bytes is not None
    assert four.read_bytes - one.read_bytes == 4 * 3 * (8 * 3 * 26 + 64)


def test_more_contexts_of_ours_for_a_straight_line(probe: Probe) -> None:
    result = timed(probe, Fake("ours (default)"), Fake("ours too"), Fake("peer"), ours=2, contexts=(8, 32))
    assert [(r.context, r.subject) for r in result.rows[3:5]] == [(16, "ours (default)"), (16, "ours too")]
    fit = result.fits[0]
    assert (fit.subject, fit.contexts, fit.batch) == ("ours (default)", (8, 16, 32), 1)
    assert fit.floor_us_per_row > 0


def test_nothing_is_timed_that_differs(probe: Probe) -> None:
    wrong, broken = Fake("wrong", error=0.5), Fake("broken", fails="no such operator\nat all")
    result = timed(probe, Fake("ours"), wrong, broken)
    assert {r.subject for r in result.rows} == {"ours"}
    assert wrong.asked == 0
    assert any(line.startswith("wrong: logits differ from ours's") for line in result.not_run)
    assert "broken: failed: no such operator at all" in result.not_run
    with pytest.raises(CheckError, match="ours too: logits differ"):
        timed(probe, Fake("ours"), Fake("ours too", error=0.5), ours=2)
    with pytest.raises(CheckError, match="transformers"):  # the reference wherever it runs
        timed(probe, Fake("ours", error=0.5), Fake(Transformers.name))


def test_rounded_weights_may_differ_and_say_so(probe: Probe) -> None:
    rounded = Fake("ours in codes", error=0.5)
    rounded.tolerance, rounded.quantise = 2.0, "int4"
    result = timed(probe, Fake("ours"), rounded, ours=2, contexts=(8,))
    plain, coded = result.rows
    assert (plain.outputs_equal, coded.outputs_equal) == (True, False)
    assert coded.rel is not None
    assert coded.rel > 0.1
    assert (coded.read_bytes or 0) < 0.5 * (plain.read_bytes or 0)
    rounded.tolerance = 0.01
    with pytest.raises(CheckError, match="ours in codes: logits differ"):
        timed(probe, Fake("ours"), rounded, ours=2, contexts=(8,))


def test_halves_have_a_floor_of_their_own(probe: Probe) -> None:
    halves, cache = Fake("weights of 16 bits"), Fake("a cache of 16 bits")
    halves.dtype, cache.cache_dtype = "fp16", "fp16"
    plain, *rows = (row.read_bytes or 0 for row in timed(probe, Fake("ours"), halves, cache, contexts=(8,)).rows)
    assert rows[0] == plain / 2  # its cache as well
    assert rows[1] == plain - 2 * 3 * 8 * 26


def test_what_does_not_fit_is_left_out_by_name(probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = 8 * 3 * 9  # and 48 bytes of cache a token, a quarter more while it is made
    monkeypatch.setattr(bench_subjects, "available_memory", lambda: (1 << 30) + 60 * 9 + scores + 1)
    result = timed(probe, Fake("ours"), Fake("peer", caches=2), contexts=(8,))
    assert {r.subject for r in result.rows} == {"ours"}
    assert result.not_run[0].startswith("peer at batch 1, 8 rows: needs")
    with pytest.raises(InputError, match="--context 16"):
        timed(probe, Fake("ours"), contexts=(16,))
    monkeypatch.setattr(bench_subjects, "available_memory", lambda: 1 << 40)
    monkeypatch.setattr(model_bench, "SLOW_PEER_ROWS", 8)
    result = timed(probe, Fake("ours"), Fake(Transformers.name), contexts=(8,), batches=(1, 2))
    assert [(r.subject, r.batch) for r in result.rows] == [("ours", 1), (Transformers.name, 1), ("ours", 2)]
    assert "transformers at batch 2, 8 rows: seconds a step" in result.not_run[0]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", tiny(), "fp32")


def test_transformers_holds_a_past_still(checkpoint: Path) -> None:
    subject, shape = Transformers(checkpoint, threads=1), ModelShape.of(checkpoint)
    assert subject.cache_bytes_per_token == 4 * 3 * (16 + 10)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (2, 9))
    whole = subject.generate(tokens[:, :5], tokens[:, 5:])
    assert whole.shape == (5, 2, shape.vocabulary)
    assert np.allclose(whole[-1], subject.generate(tokens, tokens[:, :0])[0], atol=1e-4)  # chunks do not matter
    step = subject.hold(Past.draw(shape, 2, 7), tokens[:, :1])
    assert np.array_equal(step(), step())


def test_the_expanded_past_is_the_latent_one(checkpoint: Path) -> None:
    """Keys and values that mobius is given against those that transformers makes of the same rows."""
    import torch
    from transformers import AutoModelForCausalLM

    shape = ModelShape.of(checkpoint)
    peer = object.__new__(mobius_peer.Mobius)
    peer.shape, peer._checkpoint = shape, checkpoint
    past = Past.draw(shape, 2, 7)
    found = dict(peer._expand(past))
    assert set(found) == {name for name, _, _ in peer._past_names()}
    attention: Any = AutoModelForCausalLM.from_pretrained(checkpoint).model.layers[1].self_attn
    rows = torch.from_numpy(past.rows[1])[:, None]
    with torch.no_grad():
        key, value = attention.expand_kv(rows[..., : shape.latent], rows[..., shape.latent :])
    assert np.allclose(found["past_key_values.1.key"], key.numpy(), atol=1e-4)
    assert np.allclose(found["past_key_values.1.value"], value.numpy(), atol=1e-4)
    feed = peer._inputs(np.zeros((2, 1), np.int64), found)
    assert feed["position_ids"].tolist() == [[7], [7]]
    assert feed["attention_mask"].shape == (2, 8)


def test_a_peer_that_cannot_be_installed_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(words)
        failed = "pip" in words
        return subprocess.CompletedProcess(words, int(failed), "", "WARNING: slow\nERROR: no such package\nbye\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(AbsentError, match=r"^pip install torch==2\.13\.0 failed: ERROR: no such package$"):
        mobius_peer.install(tmp_path / "peers")
    assert [w[-1] for w in asked] == [str(tmp_path / "peers" / "mobius"), "torch==2.13.0"]  # torch first and alone
    stamp = tmp_path / "peers" / "mobius" / ".installed"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("\n".join(mobius_peer.PINS))
    assert mobius_peer.install(tmp_path / "peers") == stamp.parent / "bin" / "python"
    assert len(asked) == 2


def test_a_peer_that_builds_nothing_is_absent(tmp_path: Path) -> None:
    with pytest.raises(AbsentError, match=r"^mobius build left no model\.onnx$"):
        mobius_peer.build(Path("true"), tmp_path, tmp_path / "out")
    with pytest.raises(AbsentError, match=r"^mobius build: "):
        mobius_peer.build(Path("no-such-python"), tmp_path, tmp_path / "out")


def test_bytes_that_an_export_writes(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(bytes(1000))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "graph").write_bytes(bytes(10))
    os.link(tmp_path / "checkpoint", tmp_path / "out" / "linked")
    assert export_bench.written(tmp_path / "out") == 10


def test_shape_of_what_is_no_model(tmp_path: Path, checkpoint: Path) -> None:
    assert peers.ModelShape.of(checkpoint).expanded_floats == 3 * 4 * (20 + 10 + 12)
    with pytest.raises(InputError, match=r"no config\.json"):
        ModelShape.of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="not an MLA model's"):
        ModelShape.of(tmp_path)


def place_of(checkpoint: Path, work: Path, **others: Any) -> Workplace:
    from exporter.source import open_model

    decoder: DecoderConfig = open_model(str(checkpoint), weights=False).decoder
    return Workplace(checkpoint, work, ModelShape.of(checkpoint), decoder, 1, 128,
                     absent={mobius_peer.NAME: "skipped", llama_peer.NAME: "skipped"}, **others)


def test_our_decode_graphs_answer_as_transformers_does(checkpoint: Path, tmp_path: Path, probe: Probe) -> None:
    run, place = run_of(probe, 1, 0.01), place_of(checkpoint, tmp_path)
    model_bench.bench_models(run, place, [40], [2], ragged=False)
    rows = run.result.rows
    assert [r.subject for r in rows] == ["mla-export, qkt (default)", "mla-export, kqt", "mla-export, attention",
                                         "transformers"]
    assert not run.result.not_run
    assert {r.cache_bytes_per_token for r in rows} == {4 * 3 * 26}
    assert max(r.rel or 0 for r in rows) < 1e-4


def test_a_ragged_batch_answers_as_its_sequences_do(checkpoint: Path, tmp_path: Path, probe: Probe,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    place, run = place_of(checkpoint, tmp_path), run_of(probe, 1, 0.01)
    made = place.ours()
    with closing(peers.Ours(made, made.graph("decode"), 1, place.shape)) as ours:
        model_bench.time_ragged(run, ours, place.decoder, [8, 40, 24])
        row = run.result.rows[0]
        assert (row.context, row.batch, row.lengths) == (24, 3, (8, 40, 24))
        assert row.rel is not None
        assert row.rel < 1e-4
        assert row.tokens_per_s == pytest.approx(3e3 / row.ms)
        assert row.tokens_per_s_of_batch_1
        hold = peers.Ours.hold
        monkeypatch.setattr(peers.Ours, "hold", lambda self, past, token, lengths=None: hold(self, past, token))
        with pytest.raises(CheckError, match="a ragged batch answers otherwise"):  # all 40 rows counted
            model_bench.time_ragged(run, ours, place.decoder, [8, 40, 24])


def test_the_quickest_of_a_peers_ways_goes_on() -> None:
    """Of those that differ in flash attention or cache alone; both forms stay, every precision, and all of ours."""
    timed = {name: Timed([ms]) for name, ms in (
        ("mla-export, absorbed qkt (default)", 9), ("mla-export, expanded (default)", 8), ("mobius-onnx", 20),
        ("llama.cpp f32, absorbed, flash, f16 cache", 5), ("llama.cpp f32, absorbed, f16 cache", 4),
        ("llama.cpp f32, expanded, f16 cache", 6), ("llama.cpp f32, absorbed, flash", 7),
        ("llama.cpp f16, absorbed, f16 cache", 3))}
    best = "llama.cpp f32, absorbed, f16 cache"
    assert prefill_bench.behind(timed, list(timed)[:2]) == {
        "llama.cpp f32, absorbed, flash, f16 cache": best, "llama.cpp f32, absorbed, flash": best}


def test_pieces_of_a_prompt(checkpoint: Path, tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "CHUNK", 16)  # several of them
    monkeypatch.setattr(peers.Ours, "at_once", 16)
    run = run_of(probe, 2, 0.01)
    prefill_bench.bench_prefill(run, place_of(checkpoint, tmp_path), [(0, 40), (50, 100)])
    rows = run.result.rows
    assert not run.result.not_run
    subjects = ["mla-export, absorbed qkt (default)", "mla-export, expanded (default)", "transformers"]
    assert [(r.subject, r.context, r.tokens) for r in rows] == [
        (s, *at) for at in ((0, 40), (50, 50)) for s in subjects]
    assert max(r.rel or 0 for r in rows) < 1e-3
    assert [r.at_once for r in rows[:3]] == [16, 16, None]
    assert all(r.tokens_per_s == pytest.approx(1e3 * r.tokens / r.ms) for r in rows)
    assert all(r.flops == rows[0].flops for r in rows[:3])


def test_exports_beside_each_other(checkpoint: Path, tmp_path: Path, probe: Probe) -> None:
    run, place = run_of(probe, 1), place_of(checkpoint, tmp_path)
    export_bench.bench_export(run, place)
    linked, copied, told, ready = run.result.rows
    assert [linked.subject, copied.subject] == ["mla-export, weights link", "mla-export, weights copy"]
    assert (linked.bytes_written or 0) < (copied.bytes_written or 0)
    assert linked.ratio_to_floor is None
    assert copied.ratio_to_floor == pytest.approx(copied.ms / (copied.floor_ms or 0))
    assert all(r.outputs_equal and (r.peak_bytes or 0) > 10e6 for r in (linked, copied))
    assert [told.subject, ready.subject] == ["exporter --help", "linked model ready"]
    assert all(r.outputs_equal and r.steps == 1 and r.bytes_written is None for r in (told, ready))
    assert ready.ms > told.ms  # it opens a model besides
    assert (ready.peak_bytes or 0) > (told.peak_bytes or 0) > 5e6
    assert [load.what for load in run.result.load] == ["export", "starts"]
    assert not (tmp_path / "copied").exists()


def test_a_start_that_answers_otherwise_is_not_timed(checkpoint: Path, tmp_path: Path) -> None:
    made = place_of(checkpoint, tmp_path).ours()
    right = startup_bench._ready(made, 1)
    wrong = startup_bench.Start(right.subject, right.words, lambda out: json.loads(out)["tokens"] == [1])
    with pytest.raises(CheckError, match=r"^linked model ready: engines generate .*; not timed$"):
        wrong.once()
    assert wrong.timed.ms == []
    failing = startup_bench.Start("no such thing", ("exporter", "inspect", str(tmp_path / "none")), lambda out: True)
    with pytest.raises(CheckError, match="ended with 2: error: "):
        failing.once()


def test_a_workplace_without_mobius(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: Any) -> Path:
        raise AbsentError("pip install torch==2.13.0 failed: no network")

    monkeypatch.setattr(mobius_peer, "install", none_here)
    with workplace(checkpoint, 1, 32, skip=["transformers", "llama.cpp"]) as place:
        assert place.absent == {"mobius-onnx": "pip install torch==2.13.0 failed: no network",
                                "llama.cpp": "skipped", "transformers": "skipped"}
        assert place.work.parent == checkpoint.parent  # one file system, for links
        with bench_subjects.opened(place, []) as nobody:
            assert nobody == []
    assert not list(checkpoint.parent.glob(".mla-bench-*"))
    assert bench_subjects.versions(place.absent) == {}
    assert set(bench_subjects.versions({})) == {"mobius-onnx", "llama.cpp", "transformers"}
    with pytest.raises(InputError, match=r"expected one of mobius-onnx, llama\.cpp, transformers"), workplace(
            checkpoint, 1, 32, skip=["llama"]):
        pass
    with pytest.raises(InputError, match="max_position_embeddings is 512"), workplace(checkpoint, 1, 512):
        pass
    with pytest.raises(InputError, match="--quantise int3: expected one of"), workplace(
            checkpoint, 1, 32, quantise=["int3"]):
        pass


def test_variants_are_data() -> None:
    plain, coded = bench_subjects.variants(["int4"])
    assert plain is PLAIN
    assert coded == Variant("int4", {"quantise": "int4"}, "int4", bench_subjects.QUANTISED_TOLERANCE["int4"])


def test_peak_memory_is_the_commands_own(tmp_path: Path) -> None:
    ballast = np.ones(300_000_000, np.uint8)  # this process is large, its children are not
    small = child.run([sys.executable, "-c", "print('a word')"])
    program = "import sys; b = bytearray(b'1') * 200_000_000; print('x', file=sys.stderr); sys.exit(3)"
    large = child.run([sys.executable, "-c", program])
    assert (small.code, small.out, small.err) == (0, "a word\n", "")
    assert 1e6 < small.peak_bytes < 100e6 < 200e6 < large.peak_bytes < 300e6 == ballast.nbytes
    assert (large.code, large.last_line) == (3, "x")
    assert small.seconds > 0
    with pytest.raises(OSError, match="cannot start"):
        child.run([str(tmp_path / "none")])


class Dies(Fake):
    """Answers some times, and then no more."""

    def hold(self, past: Past, token: np.ndarray) -> Step:
        step = super().hold(past, token)

        def dying() -> np.ndarray:
            if self.asked >= 10:
                raise RuntimeError("the process\nended")
            return step()

        return dying


def test_a_peer_that_dies_while_it_is_timed_is_left_out_and_ours_is_a_failure(probe: Probe) -> None:
    result = timed(probe, Fake("ours"), Dies("peer"), Fake("other"), contexts=(8,))
    assert {r.subject for r in result.rows} == {"ours", "other"}
    assert "peer, batch 1, context 8: failed: the process ended" in result.not_run
    with pytest.raises(RuntimeError, match="ended"):
        timed(probe, Dies("ours"), Fake("peer"), contexts=(8,))
