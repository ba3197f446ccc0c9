"""Rows that a step does not write stay bit for bit, in every cache form; what only this check sees is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.backends import BACKENDS
from engines.cache import LatentCache
from engines.session import Feed, Outputs, Session
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests.model_checkpoints import tiny_checkpoint
from validate.faults import FAULTS
from validate.model_faults import fault
from validate.parity import Ladder, check_folder, check_model
from validate.untouched import Watch

FORMS: list[dict[str, Any]] = [{"cache": "append"}, {"cache": "scatter"}, {"cache": "concat"},
                               {"cache": "append", "cache_dtype": "int8", "target": "trt-rtx"}]


def red(ladder: Ladder) -> set[str]:
    return {r.name for r in ladder.rungs if not r.passed}


def untouched(ladder: Ladder) -> set[tuple[str, str]]:
    return {(r.name, r.graph.split(".")[0]) for r in ladder.rungs if r.name.endswith("/untouched")}


BOTH = {(f"{backend}/untouched", kind) for backend in ("interpreter", "ort") for kind in ("prefill", "decode")}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_layer_is_checked(narrow: list[str], form: dict[str, Any]) -> None:
    ladder = check_model([ExportRequest("narrow-deepseek-v3", Path("unused"), max_context=120, **form)],
                         backends=["interpreter", "ort"])
    assert not red(ladder)
    assert untouched(ladder) == BOTH
    assert all(int(r.note.split()[0]) > 100 for r in ladder.rungs if r.name.endswith("/untouched"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_model_is_checked(tmp_path: Path, form: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    folder = tiny_checkpoint(tmp_path / "c", "youtu")
    ladder = check_model([ExportRequest(str(folder), Path("unused"), max_context=120, **form)],
                         backends=["interpreter", "ort"])
    assert not red(ladder)
    assert untouched(ladder) == BOTH


def test_one_row_too_many_is_seen_by_this_alone(narrow: list[str], tmp_path: Path) -> None:
    request = ExportRequest("narrow-deepseek-v3", Path("unused"), cache="scatter", max_context=120)
    ladder = check_model([request], tamper=FAULTS["scatter-one-too-many"].tamper, backends=["interpreter", "ort"])
    assert red(ladder) == {"interpreter/untouched", "ort/untouched"}
    first = next(r for r in ladder.rungs if not r.passed)
    assert first.worst is not None
    # the first sequence of the ragged batch has no past: after five tokens row 5 must still hold what it held
    assert first.worst["axes"] == ["step", "cache", "sequence", "row", "column"]
    assert first.worst["index"][:4] == [0, 0, 0, 5]
    assert first.worst["reference"] == 1e4


def test_one_row_too_many_in_a_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tiny_checkpoint(tmp_path / "c", "youtu")
    made = export(ExportRequest(str(folder), tmp_path / "x", cache="scatter", max_context=120))
    ladder = check_model([ExportRequest(str(folder), Path("unused"), cache="scatter", max_context=120)],
                         fault=fault("scatter-one-too-many", made.decoder), backends=["interpreter", "ort"])
    assert red(ladder) == {"interpreter/untouched", "ort/untouched"}


def test_it_counts_in_16_bit_whatever_the_runtime(narrow: list[str]) -> None:
    """Which rows are written is no matter of arithmetic, so ONNX Runtime's word is good for fp16 too."""
    request = ExportRequest("narrow-deepseek-v2-lite", Path("unused"), cache="scatter", dtype="fp16", max_context=120)
    ladder = check_model([request], tamper=FAULTS["scatter-one-too-many"].tamper, backends=["ort"])
    assert [r.name for r in ladder.rungs if r.counted and not r.passed] == ["ort/untouched"] * len(
        {r.graph for r in ladder.rungs} - {"-"})


class Careless(Session):
    """Answers rightly, and writes into a row of the past that it was only lent."""

    def __init__(self, inner: Session, row: int) -> None:
        super().__init__(inner.export, inner.graph)
        self.inner, self.row = inner, row

    def infer(self, feed: Feed) -> Outputs:
        outputs = self.inner.infer(feed)
        cache = next(array for name, array in feed.items() if name.startswith(("past_latent", "latent_cache")))
        cache.reshape(len(cache), -1, cache.shape[-1])[-1, self.row, 3] *= -1.0
        return outputs

    def _run(self, feed: Any, sizes: Any) -> Outputs:
        raise NotImplementedError


@pytest.mark.parametrize(("form", "row"), [("append", 2), ("append", 11), ("scatter", 2), ("scatter", 30)])
def test_a_runtime_that_writes_elsewhere_is_caught(narrow: list[str], tmp_path: Path, form: str, row: int) -> None:
    made: Export = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", cache=form, max_context=40))
    cache, rng = LatentCache(made, 2), np.random.default_rng(0)
    cache.load(rng.standard_normal((2, 40, made.config.row_dim)).astype(np.float32), np.array([7, 9]))
    hidden = rng.standard_normal((2, 3, made.config.hidden_size)).astype(np.float32)
    with BACKENDS["ort"].open(made, made.graph("decode")) as session:
        sound, watch = Watch(), Watch()
        sound.infer(session, {"hidden_states": hidden, **cache.feed()})
        watch.infer(Careless(session, row), {"hidden_states": hidden, **cache.feed()})
    assert sound.difference.within(sound.tolerance)
    assert not watch.difference.within(watch.tolerance)
    assert watch.difference.worst == (0, 0, 1, row, 3)


def test_the_folder_says_what_was_not_run(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v2-lite", tmp_path / "x", max_context=120))
    ladder = check_folder(made.folder)
    assert ladder.passed
    assert "trt-network: not run: exported for ONNX Runtime; --network climbs with it as well" in ladder.not_run
    assert any(line.startswith("trt, trt-rtx: not run:") and "no engines" in line for line in ladder.not_run)
