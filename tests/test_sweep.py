"""`validate sweep`: similarity against memory over d_c, of converted attentions and of MLA latents cut."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner

from exporter.convert import ConvertRequest, convert_checkpoint
from exporter.errors import CheckError, InputError
from tests.llama_checkpoints import VOCABULARY, hot_model, language, saved, trained_model
from validate import narrowed, sweep
from validate.__main__ import cli
from validate.metrics import compare
from validate.narrowed import Cut, answers
from validate.sweep import SweepRequest, ranks_of, run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = saved(trained_model(), tmp_path_factory.mktemp("trained") / "llama")
    (folder.parent / "tokens.json").write_text(json.dumps(language(64, seed=5).tolist()))
    return folder


def quick(model: str | Path, **options: Any) -> dict[str, Any]:
    return run(SweepRequest(str(model), rounds=1, context=options.pop("context", 16), threads=1, **options))


# --- converted ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, 16])
def test_more_rank_is_more_alike_on_a_trained_model(columns: int | None, trained: Path) -> None:
    data = quick(trained, tokens=trained.parent / "tokens.json", rope_columns=columns, ranks="2,4,8,16,24,32", layer=1)
    points = data["points"]
    for narrow, wide in pairwise(points):
        assert wide["cosine"] > narrow["cosine"]
        assert wide["rel"] < 1.1 * narrow["rel"]
        assert wide["perplexity"] < 1.01 * narrow["perplexity"]
        assert wide["share"] > narrow["share"]
        assert wide["cache_bytes_per_token"] - narrow["cache_bytes_per_token"] == 2 * (wide["rank"] - narrow["rank"])
    assert all(p["ms"] > 0 for p in points)
    assert points[0]["cosine"] < 0.95 < points[-1]["cosine"]
    assert points[0]["verdict"].startswith(("unsound", "weak"))
    assert points[-1]["verdict"].startswith("sound")
    assert data["original_cache_bytes_per_token"] == 128
    if columns is None:
        assert points[-1]["rel"] < 1e-5
        assert points[-1]["perplexity"] == pytest.approx(data["original_perplexity"], rel=1e-6)
    else:
        assert points[-1]["rel"] > 1e-3
        assert "16 of 32 rotary columns" in " ".join(data["notes"])


@pytest.mark.parametrize(("kind", "groups"), [("llama", 4), ("qwen2", 2)])
def test_full_rank_of_a_hot_checkpoint_is_exact(kind: str, groups: int, tmp_path: Path) -> None:
    data = quick(saved(hot_model(kind, groups), tmp_path / "a"))
    assert [p["rank"] for p in data["points"]] == [4 * groups * i for i in (1, 2, 3, 4)]
    assert data["points"][-1]["rel"] < 1e-5
    assert data["points"][0]["rel"] > 0.1
    assert data["original_perplexity"] is None
    assert "no tokens were given" in " ".join(data["notes"])


def test_perplexity_is_that_of_a_conversion(trained: Path, tmp_path: Path) -> None:
    tokens = trained.parent / "tokens.json"
    data = quick(trained, tokens=tokens, rope_columns=16, ranks="12")
    made = convert_checkpoint(ConvertRequest(trained, tmp_path / "b", 12, 16, tokens))
    assert data["points"][0]["perplexity"] == pytest.approx(made.perplexity_after)
    assert data["points"][0]["share"] == pytest.approx(made.layers[0]["latent"])


def test_text_calibrates_as_its_tokens_do(trained: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = saved(trained_model(), tmp_path / "a")
    library.save(str(folder / "tokenizer.json"))
    ids = language(4, seed=2).reshape(-1)
    (tmp_path / "text").write_text(" ".join(f"w{i}" for i in ids))
    (tmp_path / "ids").write_text(" ".join(map(str, ids)))
    found = [quick(folder, ranks="8", **{option: tmp_path / name})["points"][0]["perplexity"]
             for option, name in (("text", "text"), ("tokens", "ids"))]
    assert found[0] == found[1] is not None


# --- cut ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["article", "narrow-deepseek-v2-lite", "narrow-minicpm3-4b", "narrow-longcat-flash"])
def test_a_cut_latent_is_exact_at_full_rank_and_worse_below(name: str, narrow: list[str]) -> None:
    assert name in narrow or name == "article"
    points = quick(name)["points"]
    assert points[-1]["rel"] < 1e-5
    cosines = [p["cosine"] for p in points]
    assert cosines == sorted(cosines)
    assert cosines[0] < 0.9
    assert points[0]["cache_bytes_per_token"] < points[-1]["cache_bytes_per_token"]


@pytest.mark.parametrize("norm", [True, False])
def test_a_cut_keeps_what_a_low_rank_layer_has(norm: bool, narrow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up projections of true rank 10 lose nothing at d_c 10 but a norm's view of what they never read."""
    full = narrowed.open_source

    def low(model: str, **options: Any) -> Any:
        source = full(model, **options)
        kv_b = source.tensors["kv_b_proj.weight"].load()
        a = np.random.default_rng(0).standard_normal((kv_b.shape[1], 10)).astype(np.float32)
        arrays = {n: t.load() for n, t in source.tensors.items()} | {"kv_b_proj.weight": kv_b @ a @ a.T / 40}
        if not norm:
            del arrays["kv_a_layernorm.weight"]
        made = narrowed.source_of("low", replace(source.config, latent_norm=norm), arrays)
        return replace(made, record={"kind": "checkpoint"})

    monkeypatch.setattr(narrowed, "open_source", low)
    subject = Cut("narrow-deepseek-v2-lite", None, 0, False)
    candidate = subject.at(10)
    assert candidate.share == pytest.approx(1)
    assert subject.at(5).share < 0.95
    found, wanted = answers(candidate.source, subject.inputs)[0], subject.expected[0]
    d = compare(found, wanted)
    assert d.cosine > 0.95 if norm else d.rel < 1e-5


def test_a_converted_checkpoint_is_cut_in_turn(trained: Path, tmp_path: Path) -> None:
    convert_checkpoint(ConvertRequest(trained, tmp_path / "b", 32, 24))
    points = quick(tmp_path / "b", ranks="8,32", layer=1)["points"]
    assert points[-1]["rel"] < 1e-5
    assert points[0]["cosine"] < points[-1]["cosine"]


# --- the grid, the refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "full", "ranks"), [
    (None, 512, [128, 192, 256, 384, 512]), (None, 1024, [128, 192, 256, 384, 512, 1024]), (None, 200, [128, 192, 200]),
    (None, 128, [32, 64, 96, 128]), (None, 2, [1, 2]), ("64,8,8", 64, [8, 64])])
def test_the_grid(asked: str | None, full: int, ranks: list[int]) -> None:
    assert ranks_of(asked, full) == ranks


@pytest.mark.parametrize(("options", "words"), [
    ({"ranks": "8,x"}, "--ranks '8,x': expected numbers such as"), ({"ranks": "0,8"}, "numbers from 1 to 32"),
    ({"ranks": "8,33"}, "numbers from 1 to 32, the full rank of this attention"), ({"layer": 2}, "layers 0 to 1"),
    ({"context": 128}, "--context 128: expected 1 to 127"), ({"context": 0}, "--context 0: expected 1 to"),
    ({"rope_columns": 5}, "--rope-columns 5"), ({"tokens": Path("a"), "text": Path("b")}, "give one of them"),
    ({"tokens": Path("/none")}, "expected a text file of token ids"), ({"text": Path("/none")}, "no tokenizer file")])
def test_what_is_refused(options: dict[str, Any], words: str, trained: Path) -> None:
    with pytest.raises(InputError, match=words):
        quick(trained, **options)


def test_a_refused_family_says_the_reason_of_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 64}))
    with pytest.raises(InputError, match="it norms every head's query and key"):
        quick(tmp_path)


@pytest.mark.parametrize("option", ["tokens", "text", "rope_columns"])
def test_options_of_a_conversion_are_refused_for_an_mla(option: str, narrow: list[str]) -> None:
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} .*is MLA already, and its latent alone is cut"):
        quick("narrow-deepseek-v2-lite", **{option: 2})


def test_a_step_that_is_wrong_is_not_timed(narrow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    step = sweep.session_step
    monkeypatch.setattr(sweep, "session_step", lambda *a: lambda: 1.01 * step(*a)())
    with pytest.raises(CheckError, match=r"differs from the float64 reference, rel .*; not timed"):
        quick("narrow-deepseek-v2-lite", ranks="8")


# --- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_one_object_or_a_table_and_draws(trained: Path, tmp_path: Path) -> None:
    arguments = ["sweep", str(trained), "--ranks", "4,32", "--rounds", "1", "--threads", "1", "--tokens",
                 str(trained.parent / "tokens.json")]
    chart = tmp_path / "chart.svg"
    data = json.loads(CliRunner().invoke(cli, [*arguments, "--json", "--plot", str(chart)]).stdout)
    assert [p["rank"] for p in data["points"]] == [4, 32]
    text = " ".join(CliRunner().invoke(cli, arguments).output.split())
    assert "d_c cosine rel energy kept cache per token of the original ms ± spread perplexity" in text
    assert "perplexity of the original" in text
    drawn = ElementTree.fromstring(chart.read_text())
    words = [t.text for t in drawn.iter("{http://www.w3.org/2000/svg}text")]
    assert {"cosine to the original", "rel error", "decode step", "perplexity", "d_c 4", "32"} <= set(words)
    assert "prefers-color-scheme: dark" in chart.read_text()


@pytest.mark.parametrize(("name", "words"), [
    ("chart.png", "ends in .svg"), ("there.svg", "exists; choose another name"), ("no/chart.svg", "make it first")])
def test_charts_that_are_refused_before_anything_is_measured(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "there.svg").write_text("mine")
    call = CliRunner().invoke(cli, ["sweep", "no such model", "--plot", str(tmp_path / name)])
    assert isinstance(call.exception, InputError)
    assert words in str(call.exception)
    assert (tmp_path / "there.svg").read_text() == "mine"


def test_rounds_of_none(trained: Path) -> None:
    call = CliRunner().invoke(cli, ["sweep", str(trained), "--rounds", "0"])
    assert "--rounds 0: expected at least 1" in str(call.exception)
