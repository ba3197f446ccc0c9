"""Fitting the predictor: the coefficients of every group from measured builds, by least squares on the relative error.

A build's activation is the largest of its phases, so builds are assigned to the phase that explains them and each phase
is fitted to its own (non-negative coefficients: memory is only ever added), until no assignment changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engines.predict import AROUND, Phase, Subject, model_tensors, predict, tensors
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig

PHASES, STARTS, ROUNDS = 2, 60, 20
LEAST = 6  # builds that a group needs
CLOSE = 0.03  # errors below this weigh alike
PULL = 0.03  # weight of what is expected against what the builds say
EXPECTED = {"attention": 1.0, "workspace": 1.0, "copies of the other caches": 2.0, "shared mask": 1.0,
            "masks of the other layers": 1.0}
# around an attention: while one runs, what other layers hold; between them, the FFN or the experts
SHAPES = (("attention", "copies of the other caches", "other caches", "masks of the other layers", "shared mask",
           "residual"),
          ("workspace", "float32 workspace", "residual", "inner", "logits", "gathered", "expert workspace",
           "expert inner", "expert out", "shared mask"))
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Build:
    """A subject, and what the builder said that it needs."""

    subject: Subject
    measured: int

    def to_dict(self) -> dict[str, Any]:
        """One JSON line."""
        s = self.subject
        return {**vars(s), "config": s.config.to_dict(), "decoder": s.decoder and s.decoder.to_dict(),
                "layers": [s.layers.start, s.layers.stop], "measured": self.measured}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Build:
        """Inverse of `to_dict`."""
        fields = {name: value for name, value in data.items() if name != "measured"}
        decoder = fields["decoder"] and DecoderConfig.from_dict(fields["decoder"])
        return cls(Subject(**{**fields, "config": MLAConfig.from_dict(fields["config"]), "decoder": decoder,
                              "layers": range(*fields["layers"])}), int(data["measured"]))


def nonnegative(matrix: Array, target: Array) -> Array:
    """argmin |matrix x - target| over x >= 0 (Lawson and Hanson's active set)."""
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    a = matrix / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(3 * a.shape[1]):
        gradient = a.T @ (target - a @ x)
        gradient[free] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-9:
            break
        free[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[free] = np.linalg.lstsq(a[:, free], target, rcond=None)[0]
            low = free & (trial <= 0)
            if not low.any():
                break
            step = float(np.min(x[low] / np.maximum(x[low] - trial[low], 1e-30)))
            x = x + step * (trial - x)
            free &= ~(low & (x <= 1e-12))
            x[~free] = 0.0
            if not free.any():
                break
        x = trial if free.any() else x
    found: Array = x / scale
    return found


def phases(named: Sequence[Mapping[str, float]], measured: Sequence[int], shapes: Sequence[Sequence[str]] = (),
           ) -> list[dict[str, float]]:
    """Coefficients of the phases of one group, from the tensors and the activation of each of its builds. `shapes`
    names the tensors that each phase may hold; any, where it is empty."""
    names = list(dict.fromkeys(name for row in named for name in row))
    rows = np.array([[row.get(name, 0.0) for name in names] for row in named])
    rows = rows / np.asarray(measured, float)[:, None]
    may = np.array([[not shape or name in shape for name in names] for shape in shapes or ((),) * PHASES])
    expected = np.array([EXPECTED.get(name, 0.0) for name in names]) * may
    rng, found, least = np.random.default_rng(0), np.zeros(may.shape), np.inf
    alike = np.ones(len(rows))
    first = np.stack([_solved(rows, alike, allowed, prior) for allowed, prior in zip(may, expected, strict=True)])
    for start in range(STARTS):
        weights = first * (rng.uniform(0.5, 1.5, first.shape) if start else 1.0)
        before = np.inf
        for _ in range(ROUNDS):
            off = np.abs((rows @ weights.T).max(axis=1) - 1)
            score = float(np.mean(np.minimum(off, 1.0)))
            if score < least:
                found, least = weights.copy(), score
            if score >= before - 1e-6:
                break
            before, chosen = score, (rows @ weights.T).argmax(axis=1)
            # few builds take another course: they must not bend the rest
            trust = 1 / np.sqrt(np.maximum(off, CLOSE))
            for phase in range(len(may)):
                mine = chosen == phase
                if mine.sum() >= 3:
                    weights[phase] = _solved(rows[mine], trust[mine], may[phase], expected[phase])
    return [{name: float(f"{value:.4g}") for name, value in zip(names, phase, strict=True) if value > 1e-4}
            for phase in found]


def _solved(rows: Array, trust: Array, may: Array, expected: Array) -> Array:
    """Coefficients that explain `rows`, drawn a little to what is expected where few builds say otherwise."""
    weights, used = np.zeros(rows.shape[1]), rows[:, may] * trust[:, None]
    pull = PULL * np.linalg.norm(used, axis=0)
    weights[may] = nonnegative(np.vstack([used, np.diag(pull)]), np.concatenate([trust, pull * expected[may]]))
    return weights


def fit(builds: Sequence[Build], backend: str, version: str) -> dict[str, Any]:
    """The coefficients' file: every group with enough builds, attentions first, then what stands around them."""
    data: dict[str, Any] = {"backend": backend, "version": version, "builds": len(builds), "groups": {}}
    _fit_groups(data, [b for b in builds if b.subject.decoder is None], lambda s: s.group, tensors, ())

    def around(s: Subject) -> Mapping[str, float]:
        attention = predict(Subject(**{**vars(s), "decoder": None}), data=data)
        return model_tensors(s, attention.bytes) if attention else {}

    _fit_groups(data, [b for b in builds if b.subject.decoder is not None], lambda s: AROUND, around,
                SHAPES)
    return data


def _fit_groups(data: dict[str, Any], builds: Sequence[Build], group_of: Any, named: Any,
                shapes: Sequence[Sequence[str]]) -> None:
    by_group: dict[str, list[tuple[Mapping[str, float], int]]] = {}
    for b in builds:
        row = named(b.subject)
        if row:
            by_group.setdefault(group_of(b.subject), []).append((row, b.measured))
    for group, members in sorted(by_group.items()):
        if len(members) >= LEAST:
            made: list[Phase] = list(phases([m[0] for m in members], [m[1] for m in members], shapes))
            data["groups"][group] = {"builds": len(members), "phases": made}


def errors(builds: Sequence[Build], data: Mapping[str, Any]) -> list[tuple[Build, int, float]]:
    """Each build with its prediction and the relative error; builds of groups that were not fitted are left out."""
    rows = []
    for b in builds:
        made = predict(b.subject, data=data)
        if made is not None:
            rows.append((b, made.bytes, made.bytes / b.measured - 1))
    return rows
