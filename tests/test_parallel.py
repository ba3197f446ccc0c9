"""Tensor parallel: the ranks of every family are the single graph, their weights are its weights cut in pieces, and
processes that fail end the run with one message."""

from __future__ import annotations

import json
import multiprocessing
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from engines import parallel_run, trt
from engines.__main__ import cli
from engines.backends import open_session
from engines.build_request import BuildRequest
from engines.cache import LatentCache
from engines.generate import Generator
from engines.lint import lint
from engines.parallel import Lockstep, RankSession, greedy, opener
from engines.parallel_run import ParallelRequest
from engines.search import ranges
from engines.session import Session
from exporter import console, manifest
from exporter.__main__ import cli as exporter_commands
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.segments import segments_of
from exporter.signature import profile
from exporter.tensor_parallel import Ranks, export_ranks, open_ranks, segment_entries
from tests.model_checkpoints import MODELS, tiny_checkpoint
from tests.test_manifest import flip_byte
from validate.__main__ import cli as validate_commands
from validate.metrics import compare
from validate.parallel import check_ranks

pytest.importorskip("transformers")
CONTEXT, REL, PROMPT, NEW = 96, 5e-5, [1, 2, 3, 4, 5], 12
# a query rank, none, biases, two attentions a layer with identity experts, tied and scaled and dense, a norm behind the
# experts, no dense layer; the others differ in what ranks share
FAST = ("v2", "v2-lite", "v3-bias", "longcat", "minicpm3", "axk1", "mistral4")
Make = Callable[..., tuple[Export, Ranks]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def once(name: str) -> Path:
        if name not in made:
            made[name] = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / name, name, layers=2)
        return made[name]

    return once


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Make:
    """A model as one graph and as ranks, each made once and never changed."""
    made: dict[tuple[Any, ...], tuple[Export, Ranks]] = {}

    def once(name: str, ranks: int, **options: Any) -> tuple[Export, Ranks]:
        key = (name, ranks, *sorted(options.items()))
        if key not in made:
            place = tmp_path_factory.mktemp("exports")
            request = {"max_context": CONTEXT, **options}
            made[key] = (
                export(ExportRequest(str(checkpoint(name)), place / "one", **request)),
                export_ranks(ExportRequest(str(checkpoint(name)), place / "ranks", tensor_parallel=ranks, **request),
                             lambda message, share=None: None))
        return made[key]

    return once


def answers(sessions: dict[str, Session], made: Export) -> dict[str, np.ndarray]:
    """Logits and cache rows of two sequences (of one length where the cache has one): a padded prefill, two steps."""
    counts = np.array([7, 7] if made.cache == "concat" else [7, 4])
    ids = np.random.default_rng(3).integers(0, made.decoder.vocab_size, (2, 9))
    cache, found = LatentCache(made, 2, None if made.cache == "scatter" else 16), {}
    for i, (kind, tokens) in enumerate((("prefill", ids[:, :7]), ("decode", ids[:, 7:8]), ("decode", ids[:, 8:9]))):
        kept = counts if kind == "prefill" else np.ones(2, np.int64)
        session = sessions[kind]
        feed = {"input_ids": np.ascontiguousarray(tokens), **cache.feed()}
        if any(spec.name == "last_token" for spec in session.graph.inputs):
            feed["last_token"] = kept - 1
        outputs = session.infer(feed)
        cache.commit(outputs, kept)
        logits = outputs["logits"]
        found[f"logits {i}"] = logits if logits.ndim == 2 else logits[np.arange(2), kept - 1]
    for part, layers in cache.parts.items():
        for i, rows in enumerate(layers):
            found[f"{part} {i}"] = np.concatenate([rows[b, :n] for b, n in enumerate(cache.lengths)]).astype(np.float32)
    return found


def both(one: Export, ranks: Ranks, backend: str = "ort") -> dict[str, tuple[np.ndarray, np.ndarray]]:
    kinds = ("prefill", "decode")
    alone = {kind: open_session(one, kind, backend) for kind in kinds}
    together = {kind: Lockstep(ranks.ranks, kind, opener(backend, 1 if backend == "ort" else 0)) for kind in kinds}
    a, b = answers(dict(alone), one), answers(dict(together), ranks.ranks[0])
    for session in together.values():
        assert session.rows_differ == 0
        session.close()
    return {name: (b[name], a[name]) for name in a}


def same(name: str, one: Export, ranks: Ranks) -> None:
    worst = {n: compare(found, expected).rel for n, (found, expected) in both(one, ranks).items()}
    assert max(worst.values()) <= REL, (name, worst)


@pytest.mark.parametrize(("name", "ranks"), [*((n, 2) for n in FAST), ("v2-lite", 4), ("longcat", 4), ("minicpm3", 4)])
def test_ranks_are_the_single_graph(name: str, ranks: int, make: Make) -> None:
    one, split = make(name, ranks)
    same(name, one, split)
    attentions = one.attentions
    assert len(segments_of(split.decoder)) == 2 * attentions + 1
    with Lockstep(split.ranks, "prefill", opener("ort", 1)) as session:
        tokens = greedy(session, session, PROMPT, NEW)
        assert session.sums == 2 * attentions * NEW  # one set of segments prefills and decodes
        width = 4 * split.decoder.attention.hidden_size
        assert session.summed_bytes == 2 * attentions * (len(PROMPT) + NEW - 1) * width
    with Generator(one, threads=1) as generator:
        assert tokens == [step.tokens[0] for step in generator.generate([PROMPT], NEW)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", [n for n in MODELS if n not in FAST])
def test_ranks_of_other_families(name: str, ranks: int, make: Make) -> None:
    same(name, *make(name, ranks))


OPTIONS: dict[str, dict[str, Any]] = {
    "scatter": {"cache": "scatter"}, "concat": {"cache": "concat"}, "folded": {"absorb": "folded"},
    "expanded": {"prefill": "expanded"}, "all logits": {"logits": "all"}, "gathered": {"target": "trt"},
    "dense": {"target": "trt", "experts": "dense"}, "linked": {"weights": "link"}}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_form_splits(option: str, make: Make) -> None:
    one, split = make("v3", 2, **OPTIONS[option])
    same(option, one, split)
    if option == "linked":
        record = split.ranks[1].data["weights"]
        assert record["linked"]
        assert record["written_bytes"] < record["bytes"]


def test_a_quantised_cache_splits(make: Make) -> None:
    one, split = make("v2-lite", 2, cache_dtype="int8")
    for name, (found, expected) in both(one, split).items():
        if name.startswith("latent"):  # a code may fall to the other side of a tie
            assert np.abs(found - expected).max() <= 1, name
            assert (found == expected).mean() > 0.99, name
        else:
            assert compare(found, expected).rel <= 0.05, name


def test_half_precision_sums_in_float32(make: Make) -> None:
    one, split = make("minicpm3", 2, dtype="fp16")
    spec = {t.name: t.dtype for t in segment_entries(split.ranks[0], "decode")[1].outputs}
    assert spec == {"hidden_states_out": "fp16", "partial": "fp32"}
    differences = [compare(*pair) for name, pair in both(one, split, "interpreter").items() if "logits" in name]
    assert max(d.rel for d in differences) <= 0.05
    assert min(d.cosine for d in differences) >= 1 - 1e-4


def built(split: Ranks, kind: str) -> None:
    """Every segment of a rank passes the lint and builds with TensorRT-RTX, each input used."""
    made = split.ranks[1]
    for entry in segment_entries(made, kind):
        limits = ranges(made, entry, BuildRequest(made.folder, prefill_batch=2, chunk=16))
        assert not lint(made.folder / entry.file, {name: limit.max for name, limit in limits.items()})
        assert trt.build("trt-rtx", made.folder / entry.file, [profile(entry.inputs, limits)]).plan_bytes


def test_segments_build_with_tensorrt(make: Make) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    built(make("v2-lite", 2, dtype="fp16", target="trt-rtx", max_batch=2)[1], "decode")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["longcat", "minicpm3", "axk1"])
def test_segments_of_other_families_build_with_tensorrt(name: str, make: Make) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    for kind in ("prefill", "decode"):
        built(make(name, 2, dtype="fp16", target="trt-rtx", max_batch=2)[1], kind)


# --- Weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks"), [("v2", 2), ("v3-bias", 2), ("longcat", 4), ("minicpm3", 4)])
def test_weights_are_cut_and_nothing_else(name: str, ranks: int, make: Make) -> None:
    one, split = make(name, ranks)
    whole = load_file(one.folder / "weights.safetensors")
    parts = [load_file(rank.folder / "weights.safetensors") for rank in split.ranks]
    figures = split.data["tensor_parallel"]
    shared = 0
    for tensor, value in whole.items():
        found = [p[tensor] for p in parts if tensor in p]
        if found[0].shape == value.shape:
            assert all(np.array_equal(f, value) for f in found), tensor
            shared += found[0].nbytes
            assert len(found) == (1 if tensor.endswith("o_proj.bias") else ranks), tensor
            continue
        if tensor.endswith("experts.gate_up"):  # gate and up rows alternate: the ranks' pairs follow one another
            assert np.array_equal(np.concatenate(found, axis=1), value), tensor
            continue
        (axis,) = (i for i, (a, b) in enumerate(zip(found[0].shape, value.shape, strict=True)) if a != b)
        assert np.array_equal(np.concatenate(found, axis=axis), value), tensor
    assert {t for p in parts for t in p} == set(whole)
    assert figures["whole_bytes"] == sum(v.nbytes for v in whole.values())
    assert figures["bytes"] == [sum(v.nbytes for v in p.values()) for p in parts]
    assert sum(figures["replicated_bytes"].values()) == shared
    assert figures["bytes"][-1] <= (figures["whole_bytes"] - shared) / ranks + shared


def test_refusals(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    def refuse(message: str, ranks: int, name: str = "v2-lite", **options: Any) -> None:
        with pytest.raises(InputError, match=message):
            export_ranks(ExportRequest(str(checkpoint(name)), tmp_path / "out", tensor_parallel=ranks, **options),
                         lambda message, share=None: None)

    refuse(r"--tensor-parallel 3: does not divide num_attention_heads 4, vocab_size 160, moe_intermediate_size 40, "
           r"shared experts' intermediate size 80 of .*; expected one of 2, 4$", 3)
    refuse(r"does not divide num_attention_heads 4 of .*; expected one of 2, 4$", 8, "minicpm3")
    refuse("expected a number of ranks from 2 to 1024", 0)
    refuse("--layers 0:1 with --tensor-parallel", 2, layers="0:1")
    refuse("--quantise fp8 with --tensor-parallel", 2, quantise="fp8")
    with pytest.raises(InputError, match="splits a model; give --scope model"):
        ExportRequest("deepseek-v2-lite", tmp_path / "out", tensor_parallel=2)
    with pytest.raises(InputError, match="an export of ranks, not of one graph"):
        export(ExportRequest(str(checkpoint("v2-lite")), tmp_path / "out", tensor_parallel=2))
    assert not (tmp_path / "out").exists()


def test_others_say_what_it_is(make: Make, tmp_path: Path) -> None:
    one, split = make("v2-lite", 2)
    with pytest.raises(InputError, match=r"a tensor-parallel export, which runs with: python -m engines parallel"):
        open_export(split.folder)
    with pytest.raises(InputError, match=r"one rank of a tensor-parallel export, which runs with"):
        open_export(split.folder / "rank1")
    with pytest.raises(InputError, match="an export of one graph; expected one of ranks"):
        open_ranks(one.folder)
    copy = tmp_path / "copy"
    shutil.copytree(split.folder, copy)
    shutil.rmtree(copy / "rank1")
    shutil.copytree(copy / "rank0", copy / "rank1")
    with pytest.raises(InputError, match="not rank 1 of a tensor-parallel export"):
        open_ranks(copy)
    shutil.rmtree(copy / "rank1")
    with pytest.raises(InputError, match=r"rank1: no manifest\.json"):
        open_ranks(copy)


def damaged(folder: Path, how: str) -> None:
    """Break rank 1: a byte of its weights, a rank that is gone, a manifest that is none, a segment without a record."""
    rank = folder / "rank1"
    if how == "missing":
        shutil.rmtree(rank)
    elif how == "byte":
        flip_byte(rank / "weights.safetensors", keep_time=False)
    elif how == "unreadable":
        (rank / manifest.NAME).write_text("{")
    elif how == "another":
        shutil.copy(folder / "rank0" / manifest.NAME, rank)
    else:
        data = json.loads((rank / manifest.NAME).read_text())
        del data["files"][next(n for n in data["files"] if n.endswith(".onnx"))]
        (rank / manifest.NAME).write_text(json.dumps(data))


@pytest.mark.parametrize("how", ["byte", "missing", "unreadable", "another", "record"])
def test_the_way_out_of_a_damaged_rank_is_the_whole_export(how: str, make: Make, tmp_path: Path) -> None:
    """What is advised is done, and repairs the export; beside it, what asks for the rank by itself says the same."""
    split = tmp_path / "two ranks"
    shutil.copytree(make("v2-lite", 2)[1].folder, split)
    damaged(split, how)
    with pytest.raises(InputError) as told:
        open_ranks(split)
    advice = str(told.value).partition("with: python -m ")[2]
    module, *words = shlex.split(advice)
    assert words[-3:] == ["--out", str(split), "--overwrite"], told.value
    if how != "another":  # a rank that is itself intact says only whose part it is
        for opened in (open_export, open_ranks):
            with pytest.raises(InputError, match="rank") as told:
                opened(split / "rank1")
            assert advice in str(told.value) or how == "record"
            assert f"{split / 'rank1'} --" not in str(told.value)
    assert module == "exporter"
    done = CliRunner().invoke(exporter_commands, words)
    assert done.exit_code == 0, done.output
    assert len(open_ranks(split).ranks) == 2
    assert not (split / "rank1" / "rank1").exists()


def test_a_rank_in_place_of_all_is_named(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make("v2-lite", 2)[1].folder
    with pytest.raises(InputError) as told:
        open_ranks(split / "rank0")
    assert str(told.value) == (f"{split / 'rank0'}: one rank of a tensor-parallel export; expected the folder of all "
                               f"its ranks: {split}")
    monkeypatch.chdir(split / "rank0")
    with pytest.raises(InputError, match=f"expected the folder of all its ranks: {split}"):
        open_ranks(Path())
    alone = tmp_path / "rank0"  # carried away from the others: nothing beside it is to be replaced
    shutil.copytree(split / "rank0", alone)
    with pytest.raises(InputError, match="runs with: python -m engines parallel DIR, the folder of all its ranks; for"):
        open_export(alone)
    flip_byte(alone / "weights.safetensors", keep_time=False)
    with pytest.raises(InputError, match=r"--tensor-parallel 2 --out DIR$"):
        open_export(alone)
    broken = tmp_path / "broken"
    shutil.copytree(split, broken)
    text = next(path for path in sorted(broken.iterdir()) if path.is_file() and path.name != manifest.NAME)
    text.write_text("changed")
    with pytest.raises(InputError, match=rf"--tensor-parallel 2 --out {broken} --overwrite$"):
        open_ranks(broken)


def test_bad_prompts(make: Make) -> None:
    split = make("v2-lite", 2)[1]
    with Lockstep(split.ranks, "prefill", opener("ort", 1)) as session:
        for prompt, new, message in (([], 4, "holds no tokens"), ([160], 4, "holds token 160; expected tokens of 0 to"),
                                     ([1], 0, "expected at least 1"), ([1], CONTEXT, "up to 96 in all")):
            with pytest.raises(InputError, match=message):
                greedy(session, session, prompt, new)
    for options, message in (({"backend": "trt"}, "segments run on ort, ort-cuda, interpreter"),
                             ({"threads": -1}, "--threads -1"), ({"timeout": 0}, "--timeout 0")):
        with pytest.raises(InputError, match=message):
            ParallelRequest(split.folder, (1,), **options)  # type: ignore[arg-type]


# --- The ladder -------------------------------------------------------------------------------------------------------


def spoiled(split: Ranks, place: Path, spoil: Callable[[dict[str, np.ndarray]], None]) -> Path:
    """A copy of an export with rank 1's weights changed, and a manifest that says nothing of it."""
    shutil.copytree(split.folder, place)
    path = place / "rank1" / "weights.safetensors"
    raw, (offset, header) = path.read_bytes(), _header(path)
    values = {n: np.frombuffer(raw, np.float32, offset=offset + h["data_offsets"][0],
                               count=(h["data_offsets"][1] - h["data_offsets"][0]) // 4).reshape(h["shape"]).copy()
              for n, h in header.items() if h["dtype"] == "F32"}
    spoil(values)
    changed = bytearray(raw)
    for name, value in values.items():
        begin, end = header[name]["data_offsets"]
        changed[offset + begin:offset + end] = value.tobytes()
    path.write_bytes(changed)
    data = json.loads((place / "rank1" / manifest.NAME).read_text())
    data["files"][path.name] = manifest.file_record(path)
    (place / "rank1" / manifest.NAME).write_text(json.dumps(data))
    return place


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        return 8 + length, {n: h for n, h in json.loads(f.read(length)).items() if n != "__metadata__"}


def test_the_ladder_passes_and_catches_faults(make: Make, tmp_path: Path) -> None:
    one, split = make("v2-lite", 2)
    sound = check_ranks(split.folder, one.folder, "ort", 0)
    assert sound.passed, sound.failure
    assert {"ranks/prefill", "ranks/decode/cache", "ranks/ragged", "ranks = single graph, tokens"} <= {
        r.name for r in sound.rungs}

    def half(values: dict[str, np.ndarray]) -> None:
        values["layers.1.attn.o_proj.weight"][:] = 0

    broken = check_ranks(spoiled(split, tmp_path / "zero", half), one.folder, "ort", 0)
    assert not broken.passed
    red = {r.name for r in broken.rungs if not r.passed}
    assert {"ranks/prefill", "ranks/decode", "ranks = single graph, tokens"} <= red

    def apart(values: dict[str, np.ndarray]) -> None:
        values["layers.1.attn.kv_a_norm.weight"][:] *= 1.001

    drifted = check_ranks(spoiled(split, tmp_path / "apart", apart), None, "ort", 0)
    assert "ranks hold one cache" in {r.name for r in drifted.rungs if not r.passed}


def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], commands: Any, *words: str,
            ) -> tuple[int, dict[str, Any]]:
    """Exit code and the one JSON object of a command."""
    monkeypatch.setattr(sys, "argv", ["command", *words, "--json"])
    with pytest.raises(SystemExit) as stop:
        console.main(commands, "command")
    return int(stop.value.code or 0), json.loads(capsys.readouterr().out)


def test_commands_report_ranks(make: Make, checkpoint: Callable[[str], Path], tmp_path: Path,
                               monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, made = command(monkeypatch, capsys, exporter_commands, "export", str(checkpoint("youtu")), "--out",
                         str(tmp_path / "out"), "--tensor-parallel", "2", "--max-context", "48")
    assert (code, made["ranks"], made["segments"]) == (0, 2, {"prefill": 5, "decode": 5})
    assert made["all_reduce_bytes_per_token"] == 4 * 64 * 4
    assert command(monkeypatch, capsys, exporter_commands, "inspect", str(tmp_path / "out")) == (0, made)
    code, ladder = command(monkeypatch, capsys, validate_commands, "parallel", str(tmp_path / "out"))
    assert (code, ladder["pass"]) == (0, True)

    def wrong(values: dict[str, np.ndarray]) -> None:
        values["layers.0.mlp.down_proj.weight"] *= 1.01

    code, ladder = command(monkeypatch, capsys, validate_commands, "parallel", str(spoiled(
        open_ranks(tmp_path / "out"), tmp_path / "spoiled", wrong)))
    assert (code, ladder["pass"]) == (1, False)
    segment = tmp_path / "out" / "rank1" / manifest.NAME
    data = json.loads(segment.read_text())
    data["tensor_parallel"]["segments"]["decode"][3]["file"] = "../rank0/decode.003.qkt.onnx"
    segment.write_text(json.dumps(data))
    code, error = command(monkeypatch, capsys, validate_commands, "parallel", str(tmp_path / "out"))
    assert code == 2
    assert "no record of '../rank0/decode.003.qkt.onnx', a segment" in error["error"]


def test_the_ladder_follows_a_quantised_cache(make: Make) -> None:
    found = check_ranks(make("v2-lite", 2, cache_dtype="int8")[1].folder, None, "ort", 0)
    assert found.passed, found.failure
    assert {"ranks/decode", "ranks/decode/cache"} <= {r.name for r in found.rungs}


def test_a_ladder_against_another_model_is_refused(make: Make, tmp_path: Path) -> None:
    split = make("v2-lite", 2)[1]
    for other in (make("v3", 2, cache="scatter")[0], make("minicpm3", 2)[0]):
        with pytest.raises(InputError, match="its source differs"):
            check_ranks(split.folder, other.folder, "ort", 0)
    longer = export(ExportRequest(split.data["source"]["path"], tmp_path / "longer", max_context=2 * CONTEXT))
    with pytest.raises(InputError, match=rf"its max_context is 192, that of {split.folder} is 96; both have to be "
                       r"exports of one model with the same options, --max-context among them; export it again as "):
        check_ranks(split.folder, longer.folder, "ort", 0)


def test_ranks_without_weights_are_not_advised_to_run(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    said = []
    for words in (["--weights", "none"], ["--overwrite"]):
        done = CliRunner().invoke(exporter_commands, [
            "export", str(checkpoint("v2-lite")), "--out", str(tmp_path / "out"), "--tensor-parallel", "2",
            "--max-context", "48", *words])
        assert done.exit_code == 0, done.output
        said.append(" ".join(done.output.split()))
    assert "engines parallel" not in said[0]
    assert "nothing here runs; to run it export again without --weights none" in said[0]
    assert f"run it: python -m engines parallel {tmp_path / 'out'}".replace(" ", "") in said[1].replace(" ", "")
    assert "no weights" not in said[1]


# --- Processes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_generate_the_same_tokens(ranks: int, make: Make, monkeypatch: pytest.MonkeyPatch,
                                            capsys: pytest.CaptureFixture[str]) -> None:
    one, split = make("v2-lite", ranks)
    code, found = command(monkeypatch, capsys, cli, "parallel", str(split.folder), "--tokens",
                          ",".join(map(str, PROMPT)), "--max-new-tokens", str(NEW), "--chunk", "3")
    assert code == 0, found
    with Generator(one, threads=1) as generator:
        assert found["tokens"] == [step.tokens[0] for step in generator.generate([PROMPT], NEW)]
    assert (found["ranks"], found["collective"]) == (ranks, "gloo")
    assert found["steps"] == 2 + NEW - 1
    assert found["all_reduces"] == 2 * one.attentions * found["steps"]
    assert not multiprocessing.active_children()


def test_a_killed_rank_ends_the_run(make: Make) -> None:
    split = make("v2-lite", 2)[1]
    killed = list[int]()

    def kill() -> None:
        while len(children := multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        time.sleep(1)
        victim = max(children, key=lambda p: p.pid or 0)
        killed.append(victim.pid or 0)
        os.kill(victim.pid or 0, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(CheckError, match=r"rank 1 was ended by SIGKILL; the other ranks were stopped"):
        parallel_run.run(ParallelRequest(split.folder, tuple(PROMPT), 64))
    thread.join()
    assert killed
    assert not multiprocessing.active_children()


def alive(pid: str) -> bool:
    """Whether a process runs: one that ended and that nobody has asked after is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_interrupt_leaves_one_line_and_no_process(make: Make) -> None:
    split = make("v2-lite", 2)[1]
    running = subprocess.Popen([sys.executable, "-m", "engines", "parallel", str(split.folder), "--tokens", "1,2",
                                "--max-new-tokens", "80"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               start_new_session=True,  # and Ctrl-C heard, whatever started the tests
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None)
    folder = f"/proc/{running.pid}/task/{running.pid}/children"
    while len(Path(folder).read_text().split()) < 3:  # the ranks, and Python's resource tracker
        time.sleep(0.02)
    children = Path(folder).read_text().split()
    os.killpg(running.pid, signal.SIGINT)
    out, errors = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert errors.strip() == "error: interrupted; nothing was left behind"
    end = time.monotonic() + 20  # the resource tracker sees that it is alone a moment later
    while (left := [pid for pid in children if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left


@pytest.mark.slow
def test_a_silent_rank_ends_the_run(make: Make) -> None:
    split = make("v2-lite", 2)[1]

    def pause() -> None:
        while len(children := multiprocessing.active_children()) < 2:
            time.sleep(0.05)
        os.kill(max(p.pid or 0 for p in children), signal.SIGSTOP)

    thread = threading.Thread(target=pause)
    thread.start()
    begin = time.monotonic()
    with pytest.raises(CheckError, match=r"rank 0: the other ranks ended, or did not answer within 5 s"):
        parallel_run.run(ParallelRequest(split.folder, tuple(PROMPT), 16, timeout=5))
    thread.join()
    assert time.monotonic() - begin < 120
    assert not multiprocessing.active_children()


def test_why_a_run_failed(tmp_path: Path) -> None:
    def say(rank: int, text: str, lost: bool, given: bool) -> None:
        (tmp_path / f"error-{rank}").write_text(json.dumps({"text": text, "lost": lost, "input": given}))

    assert str(parallel_run._failure(tmp_path, [1, 1])) == "the ranks ended with [1, 1]"
    say(0, "rank 0: waited", True, False)
    assert "waited" in str(parallel_run._failure(tmp_path, [1, None]))
    assert "rank 1 was ended by SIGKILL" in str(parallel_run._failure(tmp_path, [1, -signal.SIGKILL]))
    say(1, "rank 1: no such thing", False, True)
    found = parallel_run._failure(tmp_path, [1, 2])
    assert isinstance(found, InputError)
    assert str(found) == "rank 1: no such thing"


def test_a_rank_that_waits_in_vain_says_so() -> None:
    group = parallel_run.ProcessGroup(1, 2, "cpu", 3)

    def broken(*_: object) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    with pytest.raises(CheckError, match=r"rank 1: the other ranks ended, or did not answer within 3 s \(Connection"):
        group._together(broken)


def test_a_rank_session_closes_what_it_opened(make: Make) -> None:
    split, opened = make("v2-lite", 2)[1], list[Session]()

    class Closing(Session):
        closed = False

        def _run(self, feed: Any, sizes: Any) -> Any:
            raise NotImplementedError

        def close(self) -> None:
            self.closed = True

    def open_segment(made: Export, entry: Any) -> Session:
        if len(opened) == 3:
            raise InputError("no more")
        opened.append(Closing(made, entry))
        return opened[-1]

    with pytest.raises(InputError, match="no more"):
        RankSession(split.ranks[0], "decode", open_segment)
    assert [s.closed for s in opened] == [True] * 3  # type: ignore[attr-defined]


def environment(rank: int, world: int, port: int = 29571) -> dict[str, str]:
    return os.environ | {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank),
                         "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}


def test_started_with_another_number_of_ranks(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    split = make("v2-lite", 2)[1]
    for name, value in environment(0, 3).items():
        monkeypatch.setenv(name, value)
    assert parallel_run.under_torchrun()
    with pytest.raises(InputError, match=r"an export of 2 ranks, started as 3; start it with: torchrun"):
        parallel_run.run_from_environment(ParallelRequest(split.folder, tuple(PROMPT)))


@pytest.mark.slow
def test_torchrun_starts_the_ranks(make: Make) -> None:
    one, split = make("v2-lite", 2)
    ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port",
                          "29572", "-m", "engines", "parallel", str(split.folder), "--tokens", "1,2,3,4,5",
                          "--max-new-tokens", str(NEW), "--json"], capture_output=True, text=True, timeout=300,
                         env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    with Generator(one, threads=1) as generator:
        assert json.loads(ran.stdout)["tokens"] == [s.tokens[0] for s in generator.generate([PROMPT], NEW)]
