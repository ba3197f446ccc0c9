"""`validate serving`: its figures on a tiny model, what it compares, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from engines.serving.sequence import Event, Request, Sequence, StepReport
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from tests.live_server import make_model
from validate.__main__ import cli
from validate.serving import Round, ServingRequest, compare, run
from validate.synthetic import named_config, write_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def test_figures_of_a_tiny_model(model: Path) -> None:
    words = ["serving", str(model), "--sequences", "4", "--prompt", "12", "--new", "10", "--long", "300", "--chunk",
             "32", "--rounds", "2", "--threads", "1"]
    done = CliRunner().invoke(cli, [*words, "--json"])
    data = json.loads(done.output)
    assert (done.exit_code, data["pass"], data["differ"]) == (0, True, []), done.output
    assert data["prompt_tokens"] == [6, 10, 14, 18]
    assert data["ratio"] == pytest.approx(data["together"]["tokens_per_second"]
                                          / data["one_at_a_time"]["tokens_per_second"])
    assert data["copies"]["new"] == data["copies"]["new_rows_expected"]
    first = data["first_token"]
    assert first["alone_s"] > 0
    assert 0 < first["beside_s"] < first["long_prefill_s"]  # two of its ten chunks
    table = CliRunner().invoke(cli, words)
    assert table.exit_code == 0
    assert "4 together" in table.output
    assert "beside a prompt of 300" in table.output


def answered(tokens: list[int], gap: float) -> Round:
    sequence = Sequence(0, Request((1,), len(tokens)), 0, 0.0)
    sequence.ids += tokens
    events = tuple(Event(sequence, t, None, -1.0, ((t, -1.0), (0, -1.0 - gap))) for t in tokens)
    return Round(1.0, 1.0, [StepReport("decode", events)], [sequence], 0)


def test_answers_that_part_are_told_apart() -> None:
    assert compare(answered([1, 2, 3], 0.5), [answered([1, 2, 3], 0.5)]) == (0, [])
    assert compare(answered([1, 2, 3], 1e-5), [answered([1, 9, 9], 0.5)]) == (1, [])
    flips, wrong = compare(answered([1, 2, 3], 0.5), [answered([1, 2, 3], 0.5), answered([1, 9, 3], 0.5)])
    assert (flips, wrong) == (0, ["round 1, sequence 0, token 1: the two best lie 5.0e-01 apart"])


def test_bad_input(model: Path, tmp_path: Path) -> None:
    concat = export(ExportRequest(str(model.parent / "checkpoint"), tmp_path / "out", cache="concat", max_context=64))
    done = CliRunner().invoke(cli, ["serving", str(concat.folder)])  # and not first that its context is too short
    assert isinstance(done.exception, InputError)
    assert "its cache form is concat" in str(done.exception)
    assert done.output == ""
    with pytest.raises(InputError, match="--rounds 0: expected at least 1"):
        ServingRequest(model, rounds=0)
    with pytest.raises(InputError, match=r"takes up to 600 tokens; 702 are asked for; lower --long"):
        run(ServingRequest(model, long=700), lambda *_: None)


@pytest.mark.slow
def test_eight_together_are_worth_three_of_one(tmp_path: Path) -> None:
    """On four layers of the V3 class, by CPU time, which a busy machine disturbs less than the clock."""
    dtype, config = named_config("v3-class")
    checkpoint = write_checkpoint(tmp_path / "v3-class", config, dtype)
    export(ExportRequest(str(checkpoint), tmp_path / "out", "model", weights="link", max_context=1024))
    data = run(ServingRequest(tmp_path / "out", new=64, long=1000, chunk=128, rounds=1, threads=1), lambda *_: None)
    print({key: data[key] for key in ("ratio", "cpu_ratio", "first_token", "flips")})
    assert data["pass"], data["differ"]
    assert data["cpu_ratio"] >= 3
    assert data["first_token"]["worst_beside_s"] < data["first_token"]["long_prefill_s"] / 2
