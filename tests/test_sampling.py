"""Sampling keeps the tokens that transformers' warpers keep, with their probabilities, and repeats by its seed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engines.sampling import Sampler, Sampling, probabilities
from exporter.errors import CheckError, InputError

VOCABULARY = 97


def logits(seed: int) -> np.ndarray:
    return (4 * np.random.default_rng(seed).standard_normal(VOCABULARY)).astype(np.float32)


def warped(row: np.ndarray, sampling: Sampling) -> np.ndarray:
    """What transformers' `generate` would draw from: its warpers in its order, in float64."""
    from transformers.generation.logits_process import (
        LogitsProcessorList,
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores = warpers(torch.zeros((1, 1), dtype=torch.long), torch.tensor(row, dtype=torch.float64)[None])
    return torch.softmax(scores, -1)[0].numpy()


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [0, 1, 7, VOCABULARY, 1000])
@pytest.mark.parametrize("top_p", [1e-17, 1e-9, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("min_p", [0.0, 0.1, 1.0])
def test_probabilities_are_those_of_transformers(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    sampling = Sampling(temperature, top_k, top_p, min_p)
    for seed in range(5):
        ours, theirs = probabilities(logits(seed), sampling), warped(logits(seed), sampling)
        np.testing.assert_array_equal(ours > 0, theirs > 0)
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=0)


def test_ties_with_the_kth_stay() -> None:
    row = np.array([1, 2, 2, 2, 3, -np.inf], np.float32)
    for top_k in range(1, 6):
        sampling = Sampling(1.0, top_k)
        np.testing.assert_allclose(probabilities(row, sampling), warped(row, sampling), rtol=1e-12)
    assert np.count_nonzero(probabilities(row, Sampling(1.0, 2))) == 4


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert Sampler(Sampling()).next(np.array([0, 5, 5, -np.inf], np.float32), 0) == 1


def test_tiny_temperatures_and_large_logits_stay_finite() -> None:
    row = np.array([3e38, -3e38, 2.9e38], np.float32)
    np.testing.assert_array_equal(probabilities(row, Sampling(1e-30)), [1, 0, 0])
    assert Sampler(Sampling(1e-30)).next(row, 0) == 0


def test_drawn_as_often_as_likely() -> None:
    sampler, sampling = Sampler(Sampling(1.0, 5, seed=3)), Sampling(1.0, 5)
    expected, draws = probabilities(logits(0), sampling), 20000
    counts = np.bincount([sampler.next(logits(0), i) for i in range(draws)], minlength=VOCABULARY)
    assert not counts[expected == 0].any()
    spread = np.sqrt(draws * expected * (1 - expected))
    assert (np.abs(counts - draws * expected) <= 4.5 * spread + 1e-9).all()


def test_a_seed_repeats_and_sequences_differ() -> None:
    def draw(seed: int, sequence: int) -> list[int]:
        sampler = Sampler(Sampling(2.0, seed=seed), sequence)
        return [sampler.next(logits(i), i) for i in range(30)]

    assert draw(1, 0) == draw(1, 0)
    assert draw(1, 0) != draw(2, 0)
    assert draw(1, 0) != draw(1, 1)


@pytest.mark.parametrize(("values", "found"), [
    ([1, np.nan, np.nan], "2 of 3 are NaN or +infinity"), ([1, np.inf, 0], "1 of 3 are NaN"),
    ([-np.inf] * 3, "all 3 are -infinity")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_token_from_broken_logits(values: list[float], found: str, temperature: float) -> None:
    with pytest.raises(CheckError, match=f"step 7, sequence 2: .*{found.replace('+', '.')}"):
        Sampler(Sampling(temperature), 2).next(np.array(values, np.float32), 7)


@pytest.mark.parametrize(("option", "value"), [
    ("temperature", -1.0), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.5), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 2.0), ("seed", -1)])
def test_bad_settings(option: str, value: float) -> None:
    with pytest.raises(InputError, match=f"--{option.replace('_', '-')} .*: expected"):
        Sampling(**{option: value})
