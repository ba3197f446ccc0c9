"""The benchmark of whole models, with subjects that cost nothing: nothing here asserts a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from tests.test_synthetic import tiny
from validate import mobius_peer, model_bench, peers
from validate.model_bench import Load, Result, compare_and_time
from validate.peers import AbsentError, ModelShape, Past, Step, Subject, Transformers
from validate.synthetic import write_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
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


def run(*subjects: Subject, ours: int = 1, contexts: tuple[int, ...] = (8, 16)) -> Result:
    return compare_and_time(subjects, [s.name for s in subjects[:ours]], SHAPE, contexts, rounds=2, budget_s=0.05)


def test_rows_of_subjects_that_agree() -> None:
    result = run(Fake("ours"), Fake("ours too"), Fake("peer", error=1e-5), ours=2)
    data = json.loads(json.dumps(result.to_dict()))
    assert [(r["context"], r["subject"]) for r in data["rows"]] == [
        (c, s) for c in (8, 16) for s in ("ours", "ours too", "peer")]
    for row in data["rows"]:
        assert {"suite", "subject", "context", "batch", "ms", "spread", "ratio", "outputs_equal",
                "cache_bytes_per_token"} <= set(row)
        assert row["outputs_equal"] is True
        assert row["suite"] == "model"
        assert row["cache_bytes_per_token"] == 4 * 2 * 6
        assert row["steps"] >= 3
    ours = {r["context"]: r["ms"] for r in data["rows"] if r["subject"] == "ours"}
    assert all(r["ratio"] == pytest.approx(r["ms"] / ours[r["context"]]) for r in data["rows"])
    assert [load["what"] for load in data["load"]] == ["context 8", "context 16"]
    assert {"export", "versions", "not_run", "warnings", "threads", "checkpoint"} <= set(data)


def test_nothing_is_timed_that_differs() -> None:
    wrong, broken = Fake("wrong", error=0.5), Fake("broken", fails="no such operator\nat all")
    result = run(Fake("ours"), wrong, broken)
    assert {r.subject for r in result.rows} == {"ours"}
    assert wrong.asked == 0
    assert any(line.startswith("wrong: logits differ from ours's") for line in result.not_run)
    assert "broken: failed: no such operator at all" in result.not_run
    with pytest.raises(CheckError, match="ours too: logits differ"):
        run(Fake("ours"), Fake("ours too", error=0.5), ours=2)
    with pytest.raises(CheckError, match="transformers"):  # the reference wherever it runs
        run(Fake("ours", error=0.5), Fake(Transformers.name))


def test_what_does_not_fit_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_bench, "available_memory", lambda: (1 << 30) + 48 * 8 + 1)
    result = run(Fake("ours"), Fake("peer", caches=2), contexts=(8,))
    assert {r.subject for r in result.rows} == {"ours"}
    assert result.not_run[0].startswith("peer at 8: its cache needs")
    with pytest.raises(InputError, match="--context 16"):
        run(Fake("ours"), contexts=(16,))
    monkeypatch.setattr(model_bench, "SLOW_PEER_CONTEXT", 4)
    assert "transformers at 8" in run(Fake("ours"), Fake(Transformers.name), contexts=(8,)).not_run[0]


def test_slow_subjects_stop_early() -> None:
    slow = Fake("slow")
    times, cpu = model_bench._interleaved({"slow": slow.hold(Past.draw(SHAPE, 1, 4), np.zeros((1, 1)))}, 50, 0.0, "",
                                          lambda message, share=None: None)["slow"]
    assert len(times) == 3
    assert cpu >= 0


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
    assert len(Result("x", 2, load=[quiet, Load("export", 4, 2, 1.0, 2.0, 2.0, 0.0, 0.0)]).warnings()) == 1


def test_the_watch_sees_a_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = iter([10.0, 13.0])
    monkeypatch.setattr(model_bench, "_machine_cpu_seconds", lambda: next(machine))
    found: list[Load] = []
    with model_bench.watch("context 8", 2, found):
        time.sleep(0.05)
    assert found[0].cores == len(os.sched_getaffinity(0))
    assert found[0].foreign is not None
    assert found[0].foreign > 10  # three CPU seconds that were not ours, in a twentieth of a second
    warning = found[0].warning()
    assert warning is not None
    assert "contention, context 8" in warning


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
    with pytest.raises(AbsentError, match=r"^mobius build left no model\.onnx$"):
        mobius_peer.build(Path("python"), tmp_path, tmp_path / "out")


def test_bytes_that_an_export_writes(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").write_bytes(bytes(1000))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "graph").write_bytes(bytes(10))
    os.link(tmp_path / "checkpoint", tmp_path / "out" / "linked")
    assert model_bench._written(tmp_path / "out") == 10


def test_shape_of_what_is_no_model(tmp_path: Path, checkpoint: Path) -> None:
    assert peers.ModelShape.of(checkpoint).expanded_floats == 3 * 4 * (20 + 10 + 12)
    with pytest.raises(InputError, match=r"no config\.json"):
        ModelShape.of(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InputError, match="not an MLA model's"):
        ModelShape.of(tmp_path)


@pytest.mark.parametrize(("words", "message"), [
    (["--suite", "whole"], "expected layer or model"),
    (["--suite", "model", "--skip", "llama"], "expected one of mobius-onnx, transformers"),
    (["--suite", "model", "deepseek-v3"], "--checkpoint FOLDER"),
    (["--skip", "transformers"], "is for --suite model"),
    (["--suite", "model", "--context", "x"], "--context takes numbers"),
    (["--suite", "model", "--checkpoint", "{checkpoint}", "--context", "512"], "max_position_embeddings is 512"),
    (["--suite", "model", "--checkpoint", "{empty}"], "no config.json"),
])
def test_bad_input_is_one_line(words: list[str], message: str, checkpoint: Path, tmp_path: Path) -> None:
    words = [w.format(checkpoint=checkpoint, empty=tmp_path) for w in words]
    done = subprocess.run([sys.executable, "-m", "validate", "bench", *words], cwd=REPOSITORY, capture_output=True,
                          text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_our_decode_graphs_answer_as_transformers_does(checkpoint: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"scope": "model", "max_context": 64}
    made, shape = export(ExportRequest(str(checkpoint), tmp_path / "out", **options)), ModelShape.of(checkpoint)
    graphs = sorted((g for g in made.graphs if g.kind == "decode"), key=lambda g: not g.default)
    ours = [peers.Ours(made, g.formulation, 1, shape) for g in graphs]
    result = compare_and_time([*ours, Transformers(checkpoint, 1)], [s.name for s in ours], shape, [40], batch=2,
                              threads=1, rounds=1, budget_s=0.01)
    assert [r.subject for r in result.rows] == [*(s.name for s in ours), "transformers"]
    assert not result.not_run
    assert result.rows[0].subject.endswith("(default)")
    assert {r.cache_bytes_per_token for r in result.rows} == {4 * 3 * 26}
    assert max(r.rel for r in result.rows) < 1e-4


def test_the_whole_benchmark_without_mobius(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(*_: Any) -> Path:
        raise AbsentError("pip install torch==2.13.0 failed: no network")

    monkeypatch.setattr(mobius_peer, "install", none_here)
    result = model_bench.bench_models(checkpoint, [32], threads=1, rounds=1, export_rounds=1, budget_s=0.01)
    assert "mobius-onnx: pip install torch==2.13.0 failed: no network" in result.not_run
    assert [e.subject for e in result.export] == ["mla-export, weights link", "mla-export, weights copy"]
    assert all(e.seconds > 0 for e in result.export)
    linked, copied = (e.bytes_written for e in result.export)
    assert linked < copied
    assert {r.subject.split(",")[0] for r in result.rows} == {"mla-export", "transformers"}
    assert [load.what for load in result.load] == ["export", "context 32"]
    assert {"mla-export", "onnxruntime", "transformers"} <= set(result.versions)
    assert "mobius-onnx" not in result.versions
    assert not list(checkpoint.parent.glob(".mla-bench-*"))
    json.dumps(result.to_dict())
