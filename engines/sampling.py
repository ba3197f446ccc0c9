"""From one row of logits to the next token: greedy, or temperature, top-k, top-p and min-p in transformers' order.

NumPy in float64, one sequence at a time, with a random generator of its own: the same seed gives the same tokens on
every backend whose logits agree, and a sequence draws the same numbers whatever its neighbours do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from exporter.errors import CheckError, InputError


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy: the likeliest token, the lowest id among equals.

    `top_k` 0, `top_p` 1 and `min_p` 0 each leave every token in.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, good, expected in (
                ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or a positive, finite number"),
                ("top-k", self.top_k >= 0, "0 (every token) or a number of tokens"),
                ("top-p", 0 < self.top_p <= 1, "more than 0 and at most 1"),
                ("min-p", 0 <= self.min_p <= 1, "0 to 1"),
                ("seed", self.seed >= 0, "a number from 0 up")):
            if not good:
                raise InputError(f"--{name} {getattr(self, name.replace('-', '_'))}: expected {expected}")


class Sampler:
    """Draws one sequence's tokens; `sequence` is its place in the batch, so that equal prompts part ways."""

    def __init__(self, sampling: Sampling, sequence: int = 0) -> None:
        self.sampling, self.sequence = sampling, sequence
        self._random = np.random.default_rng([sampling.seed, sequence])

    def next(self, logits: np.ndarray, step: int) -> int:
        """The next token from logits [V]. CheckError, naming `step`, where they are no distribution."""
        check_logits(logits, step, self.sequence)
        if self.sampling.temperature == 0:
            return int(np.argmax(logits))
        total = np.cumsum(probabilities(logits, self.sampling))
        # `right` steps over tokens of probability 0; the last sum, not 1, is the whole
        return int(np.searchsorted(total, self._random.random() * total[-1], side="right"))


def check_logits(logits: np.ndarray, step: int, sequence: int = 0) -> None:
    """CheckError where logits [V] hold NaN or +infinity, or nothing but -infinity (which is a token left out)."""
    wrong = int(np.isnan(logits).sum()) + int(np.isposinf(logits).sum())
    if wrong or not np.isfinite(logits).any():
        found = f"{wrong} of {logits.size} are NaN or +infinity" if wrong else f"all {logits.size} are -infinity"
        raise CheckError(f"step {step}, sequence {sequence}: no token can be chosen from the logits, {found}; expected "
                         "finite numbers; a 16-bit export may have overflowed, export with --dtype fp32 to compare")


def probabilities(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution [V] that is drawn from, float64, 0 for what temperature, top-k, top-p and min-p leave out."""
    # the largest becomes 0 before the division, so that no temperature, however small, overflows
    scores = (logits.astype(np.float64) - float(np.max(logits))) / sampling.temperature  # [V]
    if 0 < sampling.top_k < scores.size:
        scores[scores < np.partition(scores, -sampling.top_k)[-sampling.top_k]] = -np.inf  # ties with the k-th stay
    if sampling.top_p < 1:
        kept = np.flatnonzero(scores > -np.inf)
        rising = kept[np.argsort(scores[kept], kind="stable")]
        # what the tail adds up to, least likely first, may go; the likeliest never does
        tail = rising[np.cumsum(_softmax(scores[rising])) <= 1 - sampling.top_p]
        scores[tail[:rising.size - 1]] = -np.inf
    if sampling.min_p > 0:
        share = _softmax(scores)
        scores[share < sampling.min_p * share.max()] = -np.inf
    return _softmax(scores)


def _softmax(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max())
    share: np.ndarray = weights / weights.sum()
    return share
