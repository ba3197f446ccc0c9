"""How a comparison is told: masks first, the worst element by what its indices count, and nothing that JSON lacks."""

from __future__ import annotations

import json

import numpy as np
import pytest

from exporter import console
from validate.metrics import TOLERANCES, Masks, compare, worst_of


def test_figures_of_a_comparison() -> None:
    reference = np.array([[1.0, -1.0], [1.0, -1.0]])
    found = reference + np.array([[0.0, 0.25], [0.0, -1.0]])
    d = compare(found, reference)
    assert (d.rel, d.max_abs, d.mean_abs, d.size) == (1.0, 1.0, 0.3125, 4)
    assert (d.worst, d.values) == ((1, 1), (-2.0, -1.0))
    assert d.sentence == "worst at [1, 1]: -2 against -1"
    placed = d.placed(("sequence", "token", "column"), [(3, 7), (3, 9)]).behind("step", 2)
    assert placed.sentence == "worst at step 2, sequence 3, token 9, column 1: -2 against -1"
    assert placed.figures()["worst"] == {"index": [2, 3, 9, 1], "axes": ["step", "sequence", "token", "column"],
                                         "found": -2.0, "reference": -1.0}


@pytest.mark.parametrize(("bad", "name"), [(np.nan, "NaN"), (np.inf, "Inf"), (-np.inf, "Inf")])
def test_masks_that_differ_are_counted_and_placed(bad: float, name: str) -> None:
    reference = np.ones((2, 3))
    found = reference.copy()
    found[0, 2] = found[1, 1] = bad
    d = compare(found, reference)
    assert not d.within(TOLERANCES["bf16"])
    assert d.worst == (0, 2)
    assert d.sentence == f"2 {name} where the reference has none, first at [0, 2]: {bad} against 1"
    counts = d.figures()["masks"]
    assert counts[name.lower()] == {"found": 2, "reference": 0}
    line = json.dumps(console.finite(d.figures()), allow_nan=False)  # as every command reports it
    assert json.loads(line)["worst"]["found"] == str(bad)
    assert json.loads(line)["max_abs"] is None


def test_infinities_of_the_other_sign_are_no_agreement() -> None:
    d = compare(np.array([np.inf, 1.0]), np.array([-np.inf, 1.0]))
    assert not d.within(TOLERANCES["bf16"])


def test_the_worst_of_many_has_the_mean_of_all() -> None:
    reference = np.linspace(-1, 1, 6)
    small, large = compare(reference[:2] + 0.25, reference[:2]), compare(reference + 2.0, reference)
    top = worst_of([small.placed(("token",)).behind("step", 0), large.placed(("token",)).behind("step", 1)])
    assert top.rel == large.rel
    assert top.worst is not None
    assert top.worst[0] == 1
    assert top.mean_abs == pytest.approx((2 * 0.25 + 6 * 2.0) / 8)
    nan = compare(np.full(3, np.nan), np.ones(3))
    both = worst_of([nan, large, nan])
    assert not both.same_masks
    assert both.masks == Masks((6, 0), (0, 0))


def test_nothing_compared_has_no_worst() -> None:
    d = compare(np.empty((0, 4)), np.empty((0, 4)))
    assert d.sentence == ""
    assert d.placed(("token", "column")).behind("step", 1).figures() == {
        "max_abs": 0.0, "mean_abs": 0.0, "worst": None, "masks": None}
