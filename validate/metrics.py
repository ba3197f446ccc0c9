"""How two results are compared: NaN and Inf masks first, then rel, cosine, and the worst element.

`rel` is max|a - b| / std(reference): scale-free, and blind to nothing, since one wrong element is enough.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """Largest rel and 1 - cosine that count as equal."""

    rel: float
    cosine: float


# float32 against float64; 16-bit results after rounding weights, inputs and every tensor (precedents: FlashMLA's and
# TensorRT-LLM's own tests)
TOLERANCES = {"fp32": Tolerance(3e-5, 1e-7), "fp16": Tolerance(2e-2, 1e-4), "bf16": Tolerance(0.15, 1e-3)}
BETWEEN_RUNS = Tolerance(5e-5, 1e-7)  # two fp32 runs of ours: chunked against whole, ragged against alone


@dataclass(frozen=True)
class Difference:
    """The outcome of a comparison. `worst` is the index of the largest error, None where masks already differ."""

    rel: float
    max_abs: float
    cosine: float
    worst: tuple[int, ...] | None
    same_masks: bool

    def within(self, tolerance: Tolerance) -> bool:
        """Whether it passes; differing NaN or Inf masks never do."""
        return self.same_masks and self.rel <= tolerance.rel and 1 - self.cosine <= tolerance.cosine


def compare(found: np.ndarray, reference: np.ndarray) -> Difference:
    """Compare arrays of one shape; computed in float64."""
    if found.shape != reference.shape:
        raise ValueError(f"shapes {found.shape} and {reference.shape} differ")
    a, b = found.astype(np.float64), reference.astype(np.float64)
    if a.size == 0:
        return Difference(0.0, 0.0, 1.0, None, True)
    same = bool(np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(np.isinf(a), np.isinf(b)))
    if not same:
        return Difference(float("inf"), float("inf"), 0.0, None, False)
    if not np.isfinite(a).all():
        a, b = np.nan_to_num(a), np.nan_to_num(b)
    error = np.abs(a - b)
    spread = float(b.std()) or float(np.abs(b).max()) or 1.0
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a.ravel() @ b.ravel()) / norms if norms else float(not a.any() and not b.any())
    worst = tuple(int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    return Difference(float(error.max()) / spread, float(error.max()), min(cosine, 1.0), worst, True)


def worst_of(differences: list[Difference]) -> Difference:
    """The one with the largest rel (and the smallest cosine of all), for a rung of many steps."""
    top = max(differences, key=lambda d: d.rel)
    return Difference(top.rel, top.max_abs, min(d.cosine for d in differences), top.worst,
                      all(d.same_masks for d in differences))
