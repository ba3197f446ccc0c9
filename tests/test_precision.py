"""`validate precision`: what each precision costs and saves, measured for every row; what was not built says why."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from engines import trt as door
from exporter.errors import InputError
from validate.__main__ import cli
from validate.precision import VARIANTS, Outcome, Variant, survey

NAME = "narrow-deepseek-v2-lite"


@pytest.fixture(scope="module")
def found(narrow: list[str]) -> dict[str, Outcome]:
    return {o.name: o for o in survey(NAME, context=90, seeds=2)}


def test_every_variant_is_a_row_and_errors_come_in_the_order_of_precision(found: dict[str, Outcome]) -> None:
    assert list(found) == [v.name for v in VARIANTS]
    rel = [found[n].rel for n in ("fp32", "fp16", "bf16", "fp8 weights", "int4 weights")]
    assert rel == sorted(rel)
    assert 0 < rel[0] < 3e-5
    assert rel[1] < 2e-2
    assert 0.05 < rel[3] < 2
    assert 1 - found["int4 weights"].cosine > 3 * (1 - found["fp8 weights"].cosine)
    for outcome in found.values():
        assert [s["seed"] for s in outcome.seeds] == [0, 1]
        assert outcome.rel == max(s["rel"] for s in outcome.seeds)
        assert outcome.cosine == min(s["cosine"] for s in outcome.seeds)
        assert outcome.mean_abs < outcome.max_abs


def test_bytes_are_those_of_the_export(found: dict[str, Outcome]) -> None:
    sizes = [found[n].weight_bytes for n in ("fp32", "fp16", "fp8 weights")]
    assert sizes == sorted(sizes, reverse=True)
    assert found["fp32"].cache_bytes_per_token == 2 * found["fp16"].cache_bytes_per_token == 56 * 4
    if door.available("trt-rtx"):
        assert all(o.plan_bytes and o.activation_bytes and o.not_built is None for n, o in found.items()
                   if "ORT" not in n)
    assert {o.not_built for n, o in found.items() if "ORT" in n} == {"exported for ONNX Runtime"}


def test_int8_activations_cost_less_than_int4_weights_and_more_than_int8_ones(found: dict[str, Outcome]) -> None:
    off = {n: 1 - found[n].cosine for n in found}
    for scheme in ("int8", "int4"):
        assert off[f"{scheme} weights, ORT level 1"] < off[f"{scheme} weights, ORT level 4"]
    assert off["int8 weights, ORT level 4"] < off["int4 weights, ORT level 1"]
    assert found["int8 weights, ORT level 1"].rel < found["int4 weights, ORT level 1"].rel


def test_the_past_matters_and_a_wrong_one_would_show(narrow: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows a little off in every variant: fp32 is not exact any more."""
    from engines.cache import LatentCache

    load = LatentCache.load

    def off(self: LatentCache, rows: np.ndarray, *rest: Any) -> None:
        load(self, 1.05 * rows, *rest)

    monkeypatch.setattr(LatentCache, "load", off)
    monkeypatch.setattr(door, "available", lambda backend: False)
    monkeypatch.setattr(door, "load", lambda backend: (_ for _ in ()).throw(InputError("it is not here")))
    (outcome,) = survey(NAME, context=16, seeds=1, variants=VARIANTS[:1])
    assert outcome.rel > 1e-2
    assert outcome.not_built == "it is not here"
    assert outcome.plan_bytes is outcome.activation_bytes is None


def test_a_variant_is_added_by_a_row(narrow: list[str]) -> None:
    more = (*VARIANTS[:1], Variant("bf16, int4 weights", {"dtype": "bf16", "quantise": "int4"}))
    assert [(o.name, o.dtype) for o in survey(NAME, context=8, seeds=1, variants=more)] == [
        ("fp32", "fp32"), ("bf16, int4 weights", "bf16")]


@pytest.mark.parametrize(("options", "words"), [
    ({"context": 0}, "--context 0, --seeds 3: expected at least 1"), ({"seeds": 0}, "--seeds 0: expected at least 1"),
    ({"context": 1 << 22}, "tokens come behind the past; give at most"), ({"dtype": "fp8"}, "--dtype 'fp8': expected")])
def test_what_is_refused(options: dict[str, Any], words: str, narrow: list[str]) -> None:
    with pytest.raises(InputError, match=words):
        survey(NAME, **options)


def test_the_command_prints_one_object_or_a_table(narrow: list[str]) -> None:
    arguments = ["precision", NAME, "--context", "8", "--seeds", "1"]
    data = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)
    assert [v["name"] for v in data["variants"]] == [v.name for v in VARIANTS]
    assert "emulated" in data["emulated"]
    text = " ".join(CliRunner().invoke(cli, arguments).output.split())
    assert "emulated: the rounding interpreter" in text
    assert "int4 weights" in text
