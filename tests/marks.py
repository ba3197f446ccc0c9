"""Which parameters of a test run every time, and which by `make test-all` alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(values: Iterable[Any]) -> list[Any]:
    """The parameters marked slow; a tuple is one set of several."""
    return [pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.slow) for v in values]


def fast(values: Iterable[Any], chosen: Iterable[Any]) -> list[Any]:
    """All of `values`, those that are not `chosen` marked slow."""
    values, chosen = list(values), list(chosen)
    assert all(c in values for c in chosen), f"{chosen} are not all among {values}"
    return [v if v in chosen else slow([v])[0] for v in values]
