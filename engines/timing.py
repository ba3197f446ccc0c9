"""The time of one step of an engine, through the session that serves it, at the opt point of its profile."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping

import numpy as np

from engines.session import Session, output_shape
from exporter.dtypes import NUMPY_OF_NAME

WARM_UP, STEPS = 3, 20


def opt_feed(session: Session, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """A feed of zeros at `sizes` (B, T, S), its past full and its prompts unpadded."""
    export, feed = session.export, {}
    for spec in session.graph.inputs:
        feed[spec.name] = np.zeros(output_shape(spec.shape, sizes), NUMPY_OF_NAME[spec.dtype])
    if "past_lengths" in feed:
        feed["past_lengths"] += sizes["S"] if "S" in sizes else export.max_context - sizes["T"]
    if "last_token" in feed:
        feed["last_token"] += sizes["T"] - 1
    return feed


def step_milliseconds(session: Session, sizes: Mapping[str, int], steps: int = STEPS) -> float:
    """Median wall time of a step, host copies of inputs and outputs included, which all candidates share."""
    feed, taken = opt_feed(session, sizes), []
    for step in range(WARM_UP + steps):
        started = time.perf_counter()
        session.infer(feed)
        if step >= WARM_UP:
            taken.append(1e3 * (time.perf_counter() - started))
    return statistics.median(taken)
