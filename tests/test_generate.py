"""Generation: ragged batches and chunks change nothing, the command line streams, counts and refuses.

The fake model's next token depends on every token and position before it, read back from the cache rows as the session
left them; so a row lost, doubled or misplaced changes the answer.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from engines import backends
from engines.__main__ import cli
from engines.generate import Generator, Step, TextRequest
from engines.sampling import Sampling
from engines.session import Feed, Outputs, Session
from exporter import console, manifest
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest
from exporter.manifest import Export, GraphEntry
from exporter.signature import TensorSpec
from tests.checkpoints import tiny_checkpoint
from tests.test_tokenizer import CORPUS, PLAIN, SPECIAL, byte_level, metaspace, transformers_tokenizer, write

REPOSITORY = Path(__file__).resolve().parent.parent
VOCABULARY, MAX_CONTEXT, ATTENTIONS, R = 420, 600, 2, 6
CONFIG = MLAConfig(model_type="deepseek_v3", hidden_size=8, num_attention_heads=2, kv_lora_rank=4, qk_nope_head_dim=4,
                   qk_rope_head_dim=2, v_head_dim=4, max_position_embeddings=MAX_CONTEXT)
EOS = 1
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], [27], [1, 6, 1, 8, 0, 3, 3], [2] * 12]


def next_logits(tokens: list[int]) -> np.ndarray:
    """The fake model: logits [V] after a sequence of tokens."""
    state = 7
    for position, token in enumerate(tokens):
        state = (state * 31 + token * 17 + position) % 1000003
    row: np.ndarray = np.random.default_rng(state).standard_normal(VOCABULARY).astype(np.float32)
    return row


def answer(prompt: list[int], count: int, stops: tuple[int, ...] = ()) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(next_logits(tokens))))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt):]


class FakeSession(Session):
    """A model whose cache rows hold its tokens, under the session contract and its checks."""

    opened: list[FakeSession] = []  # noqa: RUF012
    damage: Callable[[np.ndarray], None] | None = None

    def __init__(self, export: Export, graph: GraphEntry) -> None:
        super().__init__(export, graph)
        self.closed, self.shapes = False, list[tuple[int, ...]]()
        FakeSession.opened.append(self)

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        ids, lengths = feed["input_ids"], feed["past_lengths"]
        self.shapes.append(ids.shape)
        B, T = ids.shape
        last = feed.get("last_token", np.full(B, T - 1))
        form, outputs = self.export.cache, Outputs()
        new = np.zeros((B, T, R), np.float32)
        new[..., 0], new[..., 1] = ids, lengths[:, None] + np.arange(T)
        past = feed["latent_cache.0"][:, 0] if form == "scatter" else feed["past_latent.0"]
        logits = []
        for b, length in enumerate(lengths):
            assert past[b, :length, 1].tolist() == list(range(length))
            logits.append(next_logits([*past[b, :length, 0].astype(int), *ids[b, :last[b] + 1]]))
        for i in range(ATTENTIONS):
            if form == "append":
                outputs[f"new_latent.{i}"] = new
            elif form == "concat":
                outputs[f"present_latent.{i}"] = np.concatenate([feed[f"past_latent.{i}"], new], 1)
            else:
                for b, length in enumerate(lengths):
                    feed[f"latent_cache.{i}"][b, 0, length:length + T] = new[b]
                outputs[f"latent_cache_out.{i}"] = feed[f"latent_cache.{i}"]
        outputs["logits"] = np.stack(logits)
        if FakeSession.damage:
            FakeSession.damage(outputs["logits"])
        return outputs

    def close(self) -> None:
        self.closed = True


def graph(kind: str, form: str, formulation: str | None = None) -> GraphEntry:
    """By default the two kinds have formulations of their own, and so a session each."""
    formulation = formulation or ("qkt" if kind == "decode" else "expanded")
    past = {"append": ("past_latent", ("B", "S", R)), "concat": ("past_latent", ("B", "S", R)),
            "scatter": ("latent_cache", ("B", 1, MAX_CONTEXT, R))}[form]
    rows = {"append": ("new_latent", ("B", "T", R)), "concat": ("present_latent", ("B", "S+T", R)),
            "scatter": ("latent_cache_out", ("B", 1, MAX_CONTEXT, R))}[form]
    last = [TensorSpec("last_token", ("B",), "int64")] if kind == "prefill" else []
    inputs = [TensorSpec("input_ids", ("B", "T"), "int64"), TensorSpec("past_lengths", ("B",), "int64"),
              *(TensorSpec(f"{past[0]}.{i}", past[1], "fp32") for i in range(ATTENTIONS)), *last]
    outputs = [TensorSpec("logits", ("B", VOCABULARY), "fp32"),
               *(TensorSpec(f"{rows[0]}.{i}", rows[1], "fp32") for i in range(ATTENTIONS))]
    name = f"{kind}.{formulation}"
    return GraphEntry(name, kind, formulation, "absorbed", True, f"{name}.onnx", tuple(inputs), tuple(outputs))


def make_export(folder: Path, checkpoint: Path | None = None, form: str = "append", **changes: Any) -> Path:
    """A folder whose manifest says that it holds a model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / manifest.NAME).unlink(missing_ok=True)
    source = {"kind": "checkpoint", "path": str(checkpoint)} if checkpoint else {"kind": "preset", "name": "tiny"}
    data = {"contract": "model", "source": source, "model": "tiny", "config": CONFIG.to_dict(), "cache": form,
            "dtype": "fp32", "max_context": MAX_CONTEXT, "attentions": ATTENTIONS, "weights": {},
            "decoder": DecoderConfig(CONFIG, VOCABULARY, 8).to_dict(),
            "graphs": [graph(kind, form).to_dict() for kind in ("prefill", "decode")]}
    manifest.write(folder, {**data, **changes})
    return folder


@pytest.fixture(autouse=True)
def fake_backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(backends.BACKENDS, "fake", replace(backends.BACKENDS["ort"], name="fake", open=FakeSession))
    FakeSession.opened, FakeSession.damage = [], None
    yield
    FakeSession.damage = None


def opened(folder: Path, form: str = "append", **options: Any) -> Generator:
    return Generator(manifest.open_export(make_export(folder, form=form)), "fake", **options)


def tokens_of(steps: Iterator[Step], batch: int) -> tuple[list[list[int]], list[str | None]]:
    """Each sequence's tokens, and why it ended; the steps' own promises are checked on the way."""
    tokens: list[list[int]] = [[] for _ in range(batch)]
    reasons: list[str | None] = [None] * batch
    for number, step in enumerate(steps):
        assert step.index == number
        for i, token in enumerate(step.tokens):
            assert (token is None) == (reasons[i] is not None)
            if token is not None:
                tokens[i].append(token)
        reasons = list(step.finished)
    return tokens, reasons


# --- The generator ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["append", "scatter"])
@pytest.mark.parametrize("chunk", [1, 2, 5, 7, 19, 512])
def test_a_ragged_batch_is_each_alone(tmp_path: Path, form: str, chunk: int) -> None:
    stops = tuple(answer(PROMPTS[0], 4)[-1:] + answer(PROMPTS[2], 1))  # two sequences stop early, one at its first
    with opened(tmp_path, form) as generator:
        tokens, reasons = tokens_of(generator.generate(PROMPTS, 20, stop_ids=stops, chunk=chunk), len(PROMPTS))
        alone = [tokens_of(generator.generate([p], 20, stop_ids=stops, chunk=chunk), 1) for p in PROMPTS]
    assert tokens == [answer(p, 20, stops) for p in PROMPTS] == [t[0] for t, _ in alone]
    assert reasons == ["stop" if t[-1] in stops else "length" for t in tokens] == [r[0] for _, r in alone]
    assert (len(tokens[0]), len(tokens[2])) == (4, 1)
    assert "length" in reasons
    pieces = [min(chunk, size - start) for size in (19, 19, 1, 7, 12) for start in range(0, size, chunk)]
    assert [shape[1] for shape in FakeSession.opened[0].shapes] == pieces
    assert all(session.closed for session in FakeSession.opened)
    assert len(FakeSession.opened) == 2


def test_one_formulation_needs_one_session(tmp_path: Path) -> None:
    graphs = [graph(kind, "append", "qkt").to_dict() for kind in ("prefill", "decode")]
    with Generator(manifest.open_export(make_export(tmp_path, graphs=graphs)), "fake") as generator:
        tokens, _ = tokens_of(generator.generate(PROMPTS, 6, chunk=7), len(PROMPTS))
    assert tokens == [answer(p, 6) for p in PROMPTS]
    assert len(FakeSession.opened) == 1


def test_concat_keeps_one_length(tmp_path: Path) -> None:
    prompts = [PROMPTS[2], list(reversed(PROMPTS[2]))]
    stops = tuple(answer(prompts[0], 3)[-1:])
    with opened(tmp_path, "concat") as generator:
        tokens, _ = tokens_of(generator.generate(prompts, 9, stop_ids=stops, chunk=3), 2)
        assert tokens == [answer(p, 9, stops) for p in prompts]
        with pytest.raises(InputError, match="prompts of 1, 7 tokens; the concat form keeps one length"):
            generator.generate([PROMPTS[1], PROMPTS[2]], 2)


def test_figures(tmp_path: Path) -> None:
    with opened(tmp_path) as generator:
        assert generator.statistics is None
        steps = generator.generate(PROMPTS, 10)
        figures = generator.statistics
        assert figures is not None
        assert (figures.new_tokens, figures.seconds_to_first_token, figures.tokens_per_second) == (0, None, None)
        next(steps)
        assert figures.new_tokens == 4
        assert figures.tokens_per_second is None
        list(steps)
    assert (figures.prompt_tokens, figures.new_tokens) == (39, 40)
    assert figures.cache_bytes_per_token == ATTENTIONS * R * 4
    assert figures.cache_bytes == 4 * 256 * figures.cache_bytes_per_token
    assert (figures.seconds_to_first_token or 0) > 0
    assert len(figures.rates) == 9
    assert (figures.tokens_per_second or 0) > 0


@pytest.mark.parametrize(("prompt", "new", "rows"), [(1, 1, 256), (200, 56, 256), (200, 57, 512), (300, 300, 600)])
def test_the_cache_is_a_bucket_at_most_the_context(tmp_path: Path, prompt: int, new: int, rows: int) -> None:
    with opened(tmp_path) as generator:
        assert len(list(generator.generate([[5] * prompt], new))) == new
        assert generator.statistics is not None
        assert generator.statistics.cache_bytes == rows * generator.export.cache_bytes_per_token


def test_a_seed_repeats(tmp_path: Path) -> None:
    def draw(seed: int, prompts: list[list[int]]) -> list[list[int]]:
        return tokens_of(generator.generate(prompts, 12, Sampling(1.5, 20, 0.95, seed=seed)), len(prompts))[0]

    with opened(tmp_path) as generator:
        first = draw(0, PROMPTS)
        assert draw(0, PROMPTS) == first
        assert draw(0, PROMPTS[:1]) == first[:1]
        assert draw(1, PROMPTS) != first
        twins = draw(0, [PROMPTS[0]] * 2)
        assert twins[0] != twins[1]


@pytest.mark.parametrize(("prompts", "new", "said"), [
    ([[5] * 590], 11, r"the prompt has 590 tokens, and 11 new ones are asked for, 601 in all; .* takes up to 600 \("),
    ([[1], [5] * 601], 1, "prompt 1 has 601 tokens"), ([[]], 1, "the prompt has no tokens"), ([], 1, "no prompts"),
    ([[1]], 0, "--max-new-tokens 0: expected at least 1"), ([[VOCABULARY]], 1, "holds token 420; expected 0 to 419"),
    ([[-1]], 1, "holds token -1")])
def test_refused_before_anything_runs(tmp_path: Path, prompts: list[list[int]], new: int, said: str) -> None:
    with opened(tmp_path) as generator, pytest.raises(InputError, match=said):
        generator.generate(prompts, new)
    assert FakeSession.opened == []


def test_settings_of_a_generator(tmp_path: Path) -> None:
    with opened(tmp_path, capacity=20) as generator:
        assert len(list(generator.generate([PROMPTS[2]], 13))) == 13
        with pytest.raises(InputError, match="capacity is 20 rows; 21 are needed, 7 tokens of prompt and 14 new"):
            generator.generate([PROMPTS[2]], 14)
        with pytest.raises(InputError, match="--chunk 0: expected at least 1"):
            generator.generate([PROMPTS[2]], 1, chunk=0)
    export = manifest.open_export(tmp_path)
    for options, said in (({"backend": "cpu"}, "--backend 'cpu'"), ({"formulation": "kqt"}, "no decode graph of form"),
                          ({"backend": "fake", "threads": 2}, "only ort and ort-cuda have threads"),
                          ({"threads": -1}, "--threads -1")):
        with pytest.raises(InputError, match=said):
            Generator(export, **options)
    with Generator(export, "fake", formulation="qkt") as generator:
        assert tokens_of(generator.generate([PROMPTS[1]], 3), 1)[0] == [answer(PROMPTS[1], 3)]
    cut = replace(graph("decode", "append"), outputs=(TensorSpec("hidden_states_out", ("B", "T", 8), "fp32"),))
    make_export(tmp_path, graphs=[graph("prefill", "append").to_dict(), cut.to_dict()])
    with pytest.raises(InputError, match="goes from input_ids to hidden_states_out; expected input_ids to logits"):
        Generator(manifest.open_export(tmp_path), "fake")


def test_nan_stops_the_run(tmp_path: Path) -> None:
    def break_second(logits: np.ndarray) -> None:
        if len(logits) == 2 and FakeSession.opened[1].shapes == [(2, 1)] * 3:
            logits[1, 5] = np.nan

    FakeSession.damage = break_second
    with opened(tmp_path) as generator:
        steps = generator.generate(PROMPTS[:2], 20)
        assert [next(steps).index for _ in range(3)] == [0, 1, 2]
        with pytest.raises(CheckError, match=r"step 3, sequence 1: .*1 of 420 are NaN"):
            next(steps)


# --- The command line -------------------------------------------------------------------------------------------------


class Cli:
    """`python -m engines generate` in this process, on the fake backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.monkeypatch, self.capsys = monkeypatch, capsys

    def run(self, *words: str | Path, backend: str = "fake") -> tuple[int, str, str]:
        argv = ["generate", *map(str, words), "--backend", backend]
        self.monkeypatch.setattr(sys, "argv", ["engines", *argv])
        with pytest.raises(SystemExit) as stopped:
            console.main(cli, "python -m engines")
        captured = self.capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    def json(self, *words: str | Path) -> dict[str, Any]:
        code, out, err = self.run(*words, "--json")
        assert (code, err) == (0, ""), err
        assert out.count("\n") == 1
        data = json.loads(out)
        assert isinstance(data, dict)
        return data

    def refused(self, said: str, *words: str | Path, code: int = 2) -> None:
        status, out, err = self.run(*words)
        assert (status, out) == (code, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert said in err
        status, out, again = self.run(*words, "--json")
        assert (status, again) == (code, err)
        assert json.loads(out) == {"error": err.removeprefix("error: ").rstrip("\n")}


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(monkeypatch, capsys)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = write(tmp_path / "checkpoint", byte_level(), chat_template=PLAIN, add_bos_token=True)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 4]}))
    return folder


@pytest.fixture
def export(tmp_path: Path, checkpoint: Path) -> Path:
    return make_export(tmp_path / "export", checkpoint)


def test_text_streams_and_figures_follow(command: Cli, export: Path, checkpoint: Path) -> None:
    from engines.tokenizer import Tokenizer

    tokenizer = Tokenizer(checkpoint)
    expected = answer(tokenizer.encode("the cat 🙂"), 40, (EOS, 4))
    text = tokenizer.decode(expected[:-1] if expected[-1] in (EOS, 4) else expected)
    code, out, err = command.run(export, "--prompt", "the cat 🙂", "--max-new-tokens", "40")
    assert (code, out) == (0, text + "\n"), err
    prompt, first, cache = err.splitlines()
    assert prompt.startswith(f"prompt {len(tokenizer.encode('the cat 🙂'))} tokens; {len(expected)} new, ended by ")
    assert "tokens/s" in first
    assert cache == "cache 48 B per token, 12.3 KB in all"
    data = command.json(export, "--prompt", "the cat 🙂", "--max-new-tokens", "40")
    assert list(data) == ["tokens", "text", "finish_reason", "prompt_tokens", "seconds_to_first_token",
                          "tokens_per_second", "cache_bytes", "cache_bytes_per_token"]
    assert (data["tokens"], data["text"]) == (expected, text)
    assert (data["cache_bytes"], data["cache_bytes_per_token"]) == (48 * 256, 48)


def test_stops(command: Cli, export: Path) -> None:
    free = command.json(export, "--tokens", "3,1,4", "--max-new-tokens", "12", "--ignore-eos")
    assert (free["tokens"], free["finish_reason"]) == (answer([3, 1, 4], 12), "length")
    third = free["tokens"][2]
    assert third not in free["tokens"][:2]
    data = command.json(export, "--tokens", "3, 1,4", "--stop", "9999", "--stop", str(third), "--ignore-eos")
    assert (data["tokens"], data["finish_reason"]) == (free["tokens"][:3], "stop")
    one = command.json(export, "--tokens", "3,1,4", "--max-new-tokens", "1")
    assert (one["tokens_per_second"], one["finish_reason"]) == (None, "length")


@pytest.mark.parametrize(("files", "expected"), [
    ({"generation_config.json": {"eos_token_id": 7}, "config.json": {"eos_token_id": 8}}, (7, EOS)),
    ({"generation_config.json": {"eos_token_id": [7, 9]}}, (7, 9, EOS)),
    ({"generation_config.json": {"eos_token_id": None}, "config.json": {"eos_token_id": 8}}, (8, EOS)),
    ({"generation_config.json": {}, "config.json": {"text_config": {"eos_token_id": [EOS, 8]}}}, (EOS, 8)),
    ({"generation_config.json": {}}, (EOS,))])
def test_stop_tokens_of_a_checkpoint(export: Path, checkpoint: Path, files: dict[str, Any], expected: Any) -> None:
    from engines.generate import prepare

    for name, data in files.items():
        (checkpoint / name).write_text(json.dumps(data))
    made = manifest.open_export(export)
    assert prepare(made, TextRequest(prompt="a", stop=(3,)))[2] == (3, *expected)
    assert prepare(made, TextRequest(prompt="a", stop=(3,), ignore_eos=True))[2] == (3,)


def test_chat(command: Cli, export: Path, checkpoint: Path, tmp_path: Path) -> None:
    from engines.tokenizer import Tokenizer

    tokenizer, path = Tokenizer(checkpoint), tmp_path / "chat.json"
    path.write_text(json.dumps([{"role": "user", "content": "hello"}]))
    plain, chat = tokenizer.encode("hello"), tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    brief = tokenizer.encode_chat([{"role": "system", "content": "brief"}, {"role": "user", "content": "hello"}])
    assert len({len(plain), len(chat), len(brief)}) == 3
    for words, ids in ((["--prompt", "hello"], plain), (["--prompt", "hello", "--no-chat"], plain),
                       (["--prompt", "hello", "--chat"], chat), (["--messages", path], chat),
                       (["--messages", path, "--system", "brief"], brief),
                       (["--prompt", "hello", "--chat", "--system", "brief"], brief)):
        data = command.json(export, *words, "--max-new-tokens", "3", "--ignore-eos")
        assert (data["prompt_tokens"], data["tokens"]) == (len(ids), answer(ids, 3))


def test_sampling_by_the_command_line(command: Cli, export: Path) -> None:
    def draw(*words: str) -> list[int]:
        tokens = command.json(export, "--tokens", "3,1,4", "--ignore-eos", "--max-new-tokens", "15", *words)["tokens"]
        return [int(token) for token in tokens]

    warm = ["--temperature", "2", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01"]
    assert draw(*warm, "--seed", "5") == draw(*warm, "--seed", "5") != draw(*warm, "--seed", "6")
    assert draw(*warm) == draw(*warm, "--seed", "0")
    assert draw("--temperature", "2", "--top-k", "1") == draw() == answer([3, 1, 4], 15)
    assert draw("--chunk", "2") == draw()


def test_ids_without_a_tokenizer(command: Cli, tmp_path: Path) -> None:
    export = make_export(tmp_path / "export")
    code, out, _ = command.run(export, "--tokens", "3,1,4", "--max-new-tokens", "5")
    assert (code, out) == (0, ",".join(map(str, answer([3, 1, 4], 5))) + "\n")
    data = command.json(export, "--tokens", "3,1,4", "--max-new-tokens", "5")
    assert (data["text"], data["tokens"]) == (None, answer([3, 1, 4], 5))
    command.refused("which has no tokenizer; name one with --tokenizer FOLDER, or give", export, "--prompt", "a")


def test_where_the_tokenizer_is_found(command: Cli, export: Path, checkpoint: Path, tmp_path: Path) -> None:
    def prompt_tokens(*words: str | Path) -> int:
        return int(command.json(export, "--prompt", "hello", "--max-new-tokens", "1", *words)["prompt_tokens"])

    at_checkpoint = prompt_tokens()
    other = write(tmp_path / "other", metaspace())
    chosen = prompt_tokens("--tokenizer", other)
    assert chosen != at_checkpoint
    checkpoint.rename(tmp_path / "moved")
    command.refused(f"its tokenizer was in {checkpoint}, which is not there any more; name the checkpoint's folder "
                    "with --tokenizer FOLDER", export, "--prompt", "hello")
    assert prompt_tokens("--tokenizer", tmp_path / "moved") == at_checkpoint
    assert command.json(export, "--tokens", "1,2", "--max-new-tokens", "1")["text"] is None
    for name in ("tokenizer.json", "tokenizer_config.json"):  # copied into the export itself
        shutil.copy(other / name, export / name)
    make_export(export, checkpoint)
    assert prompt_tokens() == chosen
    assert prompt_tokens("--tokenizer", tmp_path / "moved") == at_checkpoint


@pytest.mark.parametrize(("words", "said"), [
    ([], "none of them given; expected exactly one of --prompt TEXT, --tokens 1,2,3 and --messages"),
    (["--prompt", "a", "--tokens", "1"], "--prompt and --tokens given; expected exactly one"),
    (["--tokens", "1,,2"], "--tokens: '' is no token id"), (["--tokens", "1;2"], "'1;2' is no token id"),
    (["--tokens", "-1"], "'-1' is no token id"), (["--tokens", "9" * 30], "is no token id"),
    (["--tokens", "420"], "holds token 420; expected 0 to 419"),
    (["--tokens", "1", "--system", "x"], "--chat and --system need --prompt or --messages"),
    (["--prompt", "a", "--system", "x"], "add --chat"), (["--messages", "no.json"], "no.json: no such file"),
    (["--messages", "no.json", "--no-chat"], "--messages needs the chat template"),
    (["--prompt", "a\udc80"], "not valid Unicode"),
    (["--prompt", "a", "--tokenizer", "nowhere"], "nowhere: not a folder"),
    (["--tokens", "1", "--temperature", "-1"], "--temperature -1.0: expected 0 (greedy)"),
    (["--tokens", "1", "--top-p", "nan"], "--top-p nan"),
    (["--tokens", "1", "--stop", "x"], "'x' is not a valid integer"),
    (["--tokens", "1", "--chunk", "0"], "--chunk 0"), (["--tokens", "1", "--threads", "3"], "only ort and ort-cuda"),
    (["--tokens", "1", "--weight-budget", "100"],
     "--backend fake: --weight-budget and --runtime-cache are TensorRT's; leave them out"),
    (["--tokens", "1", "--weight-budget", "-1"], "-1 is not in the range x>=0"),
    (["--tokens", "1", "--formulation", "kqt"],
     "no decode graph of formulation kqt; present: prefill.expanded, decode.qkt"),
    (["--tokens", "1", "--max-new-tokens", "600"], "the prompt has 1 tokens, and 600 new ones are asked for, 601")])
def test_bad_input(command: Cli, export: Path, words: list[str], said: str) -> None:
    command.refused(said, export, *words)


def test_exports_that_are_no_model(command: Cli, tmp_path: Path) -> None:
    layer = make_export(tmp_path / "layer", contract="layer")
    command.refused(f"{layer}: holds one attention, not a model; export with --scope model", layer, "--tokens", "1")
    command.refused("no manifest.json", tmp_path / "nothing", "--tokens", "1")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "tokenizer.model").write_bytes(b"x")
    command.refused("tokenizer.model (sentencepiece); expected tokenizer.json", make_export(tmp_path / "e", bare),
                    "--prompt", "a")
    (bare / "config.json").write_text('{"eos_token_id": "x"}')
    command.refused("config.json: eos_token_id is 'x'; expected a token id or a list", tmp_path / "e", "--tokens", "1")


def test_a_failed_check_ends_the_line_first(command: Cli, export: Path) -> None:
    def spoil(logits: np.ndarray) -> None:
        if len(FakeSession.opened[1].shapes) == 2:
            logits[:] = np.nan

    FakeSession.damage = spoil
    code, out, err = command.run(export, "--prompt", "the cat", "--ignore-eos")
    assert code == 1
    assert out.endswith("\n")
    assert err.startswith("error: step 2, sequence 0: no token can be chosen from the logits, 420 of 420 are NaN")
    FakeSession.opened = []
    code, out, _ = command.run(export, "--prompt", "the cat", "--ignore-eos", "--json")
    assert code == 1
    assert "step 2" in json.loads(out)["error"]


_SLOW = """
import sys, time
from dataclasses import replace
from pathlib import Path
from engines import backends
from tests.test_generate import FakeSession, cli, console

begun = Path(sys.argv.pop())

def slowly(logits):
    begun.touch()
    time.sleep(0.05)

FakeSession.damage = slowly
backends.BACKENDS["fake"] = replace(backends.BACKENDS["ort"], name="fake", open=FakeSession)
console.main(cli, "python -m engines")
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c(export: Path, as_json: bool, tmp_path: Path) -> None:
    words = ["generate", str(export), "--tokens", "3,1", "--ignore-eos", "--backend", "fake", "--max-new-tokens", "500"]
    begun = tmp_path / "begun"
    process = subprocess.Popen(
        [sys.executable, "-c", _SLOW, *words, *(["--json"] if as_json else []), str(begun)], cwd=REPOSITORY,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None)
    while process.poll() is None and not begun.exists():
        time.sleep(0.02)
    assert process.stdout is not None
    head = b"" if as_json else os.read(process.stdout.fileno(), 1)  # the first text is out
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err.decode().strip()) == (130, "error: interrupted; nothing was left behind")
    assert (head + out).count(b"\n") == 1
    assert out.endswith(b"\n")
    if as_json:
        assert json.loads(out) == {"error": "interrupted; nothing was left behind"}


# --- A real export of a tiny checkpoint -------------------------------------------------------------------------------

def small() -> Library:
    """A metaspace tokenizer that fits the tiny checkpoint's vocabulary."""
    made = Library(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(CORPUS[:3], trainers.BpeTrainer(vocab_size=128, special_tokens=SPECIAL,
                                                             show_progress=False))
    return made


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of transformers' making with a tokenizer, and exports of it."""
    from exporter.export import export

    made = tmp_path_factory.mktemp("tiny")
    checkpoint = write(tiny_checkpoint(made / "checkpoint", "deepseek_v3"), small(), chat_template=PLAIN)
    folders = {"checkpoint": checkpoint}
    for name in ("append", "scatter", "concat", "all-logits"):
        form, logits = ("append", "all") if name == "all-logits" else (name, "last")
        folders[name] = made / name
        export(ExportRequest(str(checkpoint), folders[name], "model", cache=form, logits=logits, max_context=200))
    return folders


def transformers_answer(checkpoint: Path, prompt: list[int], count: int) -> list[int]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    made = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
    tokens: list[int] = made[0, len(prompt):].tolist()
    return tokens


@pytest.mark.parametrize("form", ["append", "scatter", "concat", "all-logits"])
def test_greedy_is_that_of_transformers(tiny: dict[str, Path], form: str) -> None:
    draw = np.random.default_rng(0)
    prompts = [draw.integers(2, 128, size).tolist() for size in (1, 9, 40)]
    expected = [transformers_answer(tiny["checkpoint"], prompt, 24) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 10  # no model that repeats itself
    with Generator(manifest.open_export(tiny[form]), threads=1) as generator:
        for prompt, tokens in zip(prompts, expected, strict=True):
            for chunk in (512, 7, 1):
                assert tokens_of(generator.generate([prompt], 24, stop_ids=(EOS,), chunk=chunk), 1)[0] == [tokens]
        if form != "concat":
            for chunk in (512, 16):
                assert tokens_of(generator.generate(prompts, 24, stop_ids=(EOS,), chunk=chunk), 3)[0] == expected


def test_the_program_itself(tiny: dict[str, Path]) -> None:
    def run(*words: str) -> tuple[str, str]:
        done = subprocess.run([sys.executable, "-m", "engines", "generate", str(tiny["append"]), "--max-new-tokens",
                               "16", *words], cwd=REPOSITORY, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr

    tokenizer = transformers_tokenizer(tiny["checkpoint"])
    for words, prompt in ((["--prompt", "the dog"], tokenizer.encode("the dog")),
                          (["--prompt", "the dog", "--chat"], tokenizer.apply_chat_template(
                              [{"role": "user", "content": "the dog"}], add_generation_prompt=True)["input_ids"])):
        expected = transformers_answer(tiny["checkpoint"], prompt, 16)
        text = tokenizer.decode(expected, skip_special_tokens=True)
        out, err = run(*words)
        assert out == text + "\n"
        assert err.startswith(f"prompt {len(prompt)} tokens; {len(expected)} new, ended by ")
        assert err.count("\n") == 3
        out, err = run(*words, "--json", "--threads", "1", "--formulation", "kqt")
        assert (json.loads(out)["tokens"], json.loads(out)["text"], err) == (expected, text, "")
