"""Every planted fault turns the rungs it names red, and nothing is red without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporter.export import ExportRequest
from exporter.presets import PRESETS
from tests.conftest import narrowed
from validate.faults import FAULTS
from validate.parity import Ladder, check_model

MODELS = ("narrow-deepseek-v2-lite", "narrow-deepseek-v3", "article")
OTHERS = ("narrow-kimi-k2", "narrow-longcat-flash", "narrow-mistral-small-4", "narrow-minicpm3-4b")  # for their own


def applies(model: str, name: str) -> bool:
    return FAULTS[name].applies(narrowed(model.removeprefix("narrow-")))


CASES = [(model, name) for model in MODELS for name in FAULTS if applies(model, name)]
CASES += [(next(m for m in OTHERS if applies(m, name)), name) for name in FAULTS if name not in {n for _, n in CASES}]
WIDE = [("deepseek-v2-lite", name) for name, f in FAULTS.items() if f.applies(PRESETS["deepseek-v2-lite"])]


def climb(model: str, fault: str | None) -> Ladder:
    request = ExportRequest(model, Path("unused"), cache=(fault and FAULTS[fault].cache) or "append", max_context=300)
    return check_model([request], tamper=FAULTS[fault].tamper if fault else None, backends=["interpreter", "ort"])


@pytest.mark.parametrize("model", MODELS)
def test_sound_layer_is_green(narrow: list[str], model: str) -> None:
    ladder = climb(model, None)
    assert ladder.passed
    assert all(r.passed for r in ladder.rungs)


@pytest.mark.parametrize(("model", "name"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in WIDE)])
def test_fault_turns_its_rungs_red(narrow: list[str], model: str, name: str) -> None:
    ladder = climb(model, name)
    assert ladder.passed != bool(FAULTS[name].red)  # without red rungs the ladder is blind to it, as the table says
    for red in FAULTS[name].red:
        rungs = [r for r in ladder.rungs if r.name == red]
        assert rungs, f"no rung is called {red}"
        assert not any(r.passed for r in rungs), f"{red} stayed green under {name}"
    # the references do not depend on the exporter: they must not move
    assert all(r.passed for r in ladder.rungs if r.name.startswith(("eager", "mha")))


def test_every_listed_fault_is_planted_somewhere() -> None:
    assert {name for _, name in CASES} == set(FAULTS)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_graph_fault_plants_at_16_bit(dtype: str) -> None:
    """It rewires nodes, so it must respect the graph's dtype: red rungs, not a refusal by the checker."""
    request = ExportRequest("article", Path("unused"), max_context=64, dtype=dtype)
    ladder = check_model([request], tamper=FAULTS["rope-on-latent"].tamper, backends=["interpreter"])
    red = {r.name for r in ladder.rungs if not r.passed}
    assert {"interpreter/prefill/cache", "interpreter/decode"} <= red
