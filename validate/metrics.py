"""How outputs are compared: NaN and Inf masks first, then rel, largest and mean error, cosine, and where it is worst.

`rel` is max|a - b| / std(reference): scale-free, and blind to nothing, since one wrong element is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
EXACT, NEVER = Tolerance(0.0, 1e-6), Tolerance(-1.0, 1e-6)  # of a check bit for bit that held, that did not


@dataclass(frozen=True)
class Masks:
    """How many elements are NaN and Inf, in what was found and in the reference."""

    nan: tuple[int, int]
    inf: tuple[int, int]

    def __add__(self, other: Masks) -> Masks:
        a, b = self, other
        return Masks((a.nan[0] + b.nan[0], a.nan[1] + b.nan[1]), (a.inf[0] + b.inf[0], a.inf[1] + b.inf[1]))


@dataclass(frozen=True)
class Difference:
    """The outcome of a comparison of `size` elements. `worst` is the index of the largest error, or of the first
    element that is NaN or Inf on one side alone (`masks` then counts them), None where nothing was compared; `values`
    are what was found there and what the reference has; `axes` says what each index counts."""

    rel: float
    max_abs: float
    cosine: float
    worst: tuple[int, ...] | None
    same_masks: bool
    mean_abs: float = 0.0
    size: int = 0
    values: tuple[float, float] | None = None
    axes: tuple[str, ...] = ()
    masks: Masks | None = None

    def within(self, tolerance: Tolerance) -> bool:
        """Whether it passes; differing NaN or Inf masks never do."""
        return self.same_masks and self.rel <= tolerance.rel and 1 - self.cosine <= tolerance.cosine

    def placed(self, axes: Sequence[str], places: Sequence[tuple[int, ...]] | None = None) -> Difference:
        """The same, its indices named by `axes`; with `places` the first index stands for what lies there."""
        if self.worst is None:
            return self
        worst = self.worst if places is None else (*places[self.worst[0]], *self.worst[1:])
        return replace(self, worst=worst, axes=tuple(axes))

    def behind(self, axis: str, index: int) -> Difference:
        """The same, with one more index in front (which step, which attention)."""
        return self if self.worst is None else replace(self, worst=(index, *self.worst), axes=(axis, *self.axes))

    @property
    def sentence(self) -> str:
        """Where it is worst and what is there, for people; empty where nothing was compared."""
        if self.worst is None or self.values is None:
            return ""
        where = (", ".join(f"{a} {i}" for a, i in zip(self.axes, self.worst, strict=True)) if self.axes
                 else str(list(self.worst)))
        found, expected = self.values
        if self.masks is None:
            return f"worst at {where}: {found:.6g} against {expected:.6g}"
        counts = [f"{ours} {name} where the reference has {theirs or 'none'}" for name, (ours, theirs) in
                  (("NaN", self.masks.nan), ("Inf", self.masks.inf)) if ours or theirs]
        return f"{' and '.join(counts)}, first at {where}: {found:.6g} against {expected:.6g}"

    def figures(self) -> dict[str, Any]:
        """What every report of it holds beside rel and cosine, ready for JSON (which has no word for NaN: a name)."""
        worst = None
        if self.worst is not None and self.values is not None:
            found, expected = (v if np.isfinite(v) else str(v) for v in self.values)
            worst = {"index": list(self.worst), "axes": list(self.axes), "found": found, "reference": expected}
        masks = None if self.masks is None else {
            name: dict(zip(("found", "reference"), getattr(self.masks, name), strict=True)) for name in ("nan", "inf")}
        return {"max_abs": self.max_abs, "mean_abs": self.mean_abs, "worst": worst, "masks": masks}


def compare(found: np.ndarray, reference: np.ndarray) -> Difference:
    """Compare arrays of one shape; computed in float64."""
    if found.shape != reference.shape:
        raise ValueError(f"shapes {found.shape} and {reference.shape} differ")
    a, b = found.astype(np.float64), reference.astype(np.float64)
    if a.size == 0:
        return Difference(0.0, 0.0, 1.0, None, True)
    apart = (np.isnan(a) != np.isnan(b)) | (np.isinf(a) != np.isinf(b))
    if apart.any():
        nan, inf = ((int(test(a).sum()), int(test(b).sum())) for test in (np.isnan, np.isinf))
        worst, values = _at(int(apart.argmax()), a, b)
        infinite = float("inf")
        return Difference(infinite, infinite, 0.0, worst, False, infinite, a.size, values,
                          masks=Masks(nan, inf))
    if not np.isfinite(a).all():
        a, b = np.nan_to_num(a), np.nan_to_num(b)
    with np.errstate(over="ignore", invalid="ignore"):  # infinities of the other sign
        return _differ(a, b)


def _differ(a: np.ndarray, b: np.ndarray) -> Difference:
    error = np.abs(a - b)
    spread = float(b.std()) or float(np.abs(b).max()) or 1.0
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a.ravel() @ b.ravel()) / norms if norms else float(not a.any() and not b.any())
    worst, values = _at(int(error.argmax()), a, b)
    return Difference(float(error.max()) / spread, float(error.max()), min(cosine, 1.0), worst, True,
                      float(error.mean()), a.size, values)


def _at(place: int, a: np.ndarray, b: np.ndarray) -> tuple[tuple[int, ...], tuple[float, float]]:
    worst = tuple(int(i) for i in np.unravel_index(place, a.shape))
    return worst, (float(a[worst]), float(b[worst]))


def worst_of(differences: Sequence[Difference]) -> Difference:
    """The one with the largest rel (the smallest cosine, the mean error and all masks), for a rung of many steps."""
    top = max(differences, key=lambda d: d.rel)
    size = sum(d.size for d in differences)
    apart = [d.masks for d in differences if d.masks is not None]
    return replace(top, cosine=min(d.cosine for d in differences), same_masks=all(d.same_masks for d in differences),
                   mean_abs=sum(d.mean_abs * d.size for d in differences if d.size) / max(size, 1), size=size,
                   masks=sum(apart[1:], apart[0]) if apart else None)
