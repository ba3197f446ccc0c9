"""RoPE as a graph applies it, measured: which columns turn together, by what angle per position, by what factor.

A rotary key (or query) is looked at twice in one run: as its projection gives it, and after the rotation. Columns that
turn together are a complex number, and its ratio after to before is factor x exp(i x position x frequency): a layout
is the pairing under which the ratio's size is the same for every token; a frequency is the ratio's angle at position 1;
and far out the angle's error is that of the graph's own arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from exporter.config import MLAConfig
from validate.doctor_patient import Call, CannotRunError, Patient
from validate.references.rope import inverse_frequencies

TOKENS = 8
NOISE = 2e-3  # radians, of an angle whose cos and sin are float16
SAME = 2e-3  # how far a ratio's size may vary over tokens under the right pairing (float16 rows: 5e-4 each)


@dataclass(frozen=True)
class Turned:
    """One rotation in a graph: the product whose columns it turns, the tensor that goes in, and the one that comes out,
    each with the rotary columns of every head side by side."""

    side: str
    node: str
    leaf: str
    before: str
    after: str


@dataclass(frozen=True)
class Angles:
    """What was measured of one rotation: `layout` in and out (pairs, half), the factor on cos and sin, and radians per
    position of each frequency, [d_r / 2], at position 1; `noise`: what the graph's dtype may add to an angle."""

    turned: Turned
    layout: str
    out: str
    factor: float
    inv_freq: np.ndarray
    noise: float


def _complex(x: np.ndarray, layout: str) -> np.ndarray:
    """[..., d_r] as [..., d_r / 2] complex numbers."""
    half = x.shape[-1] // 2
    real, imaginary = (x[..., 0::2], x[..., 1::2]) if layout == "pairs" else (x[..., :half], x[..., half:])
    found: np.ndarray = real + 1j * imaginary
    return found


def _look(patient: Patient, turned: Turned, rng: np.random.Generator, position: int, rotary: int
          ) -> tuple[np.ndarray, np.ndarray]:
    """One new token in each of several runs of one sequence at a position: before its rotation, in the order of the
    projection's columns, and after, [tokens, heads, d_r]."""
    before, after = [], list[np.ndarray]()
    rows = patient.rows_for(0 if patient.sets_positions else position)
    for _ in range(TOKENS):
        call = Call(patient.draw(rng, 1, 1), patient.empty(1, rows), np.array([position]))
        found = patient.run(call, (turned.leaf, turned.before, turned.after))
        x, y = (found[n].astype(np.float64) for n in (turned.before, turned.after))
        if x.size != y.size or x.shape[-1] % rotary:
            raise CannotRunError(f"{turned.node}: {x.shape} before its rotation, {y.shape} after, rotary width "
                                 f"{rotary}")
        x = x.reshape(-1, rotary)
        before.append(x[:, _order(found[turned.leaf].astype(np.float64).reshape(-1), x[0])])
        after.append(y.reshape(-1, rotary))
    return np.stack(before), np.stack(after)


def _order(leaf: np.ndarray, head: np.ndarray) -> np.ndarray:
    """The order in which a head's rotary columns lie in the projection: a graph may have sorted pairs into halves
    before it turns them. Told by the numbers themselves; as they are where they were changed on the way."""
    places = [np.flatnonzero(leaf == number) for number in head]
    if any(len(p) != 1 for p in places):
        return np.arange(len(head))
    order: np.ndarray = np.argsort([int(p[0]) for p in places])
    return order


def measure(patient: Patient, turned: Turned, rng: np.random.Generator, rotary: int) -> Angles | None:
    """Layout, factor and frequencies of a rotation; None where no pairing explains what was seen, or nothing turns."""
    near = _look(patient, turned, rng, 1, rotary)
    far = _look(patient, turned, rng, 57 if patient.fixed_rows is None else min(57, patient.fixed_rows - 2), rotary)
    best: tuple[float, str, str] = (float("inf"), "", "")
    for layout, out in (("pairs", "pairs"), ("half", "half"), ("pairs", "half"), ("half", "pairs")):
        spread = max(_spread(*look, layout, out) for look in (near, far))
        best = min(best, (spread, layout, out))
    if best[0] > SAME:
        return None
    ratio = _ratio(*near, best[1], best[2])
    if np.abs(np.angle(ratio)).max() < NOISE:
        return None
    factor = float(np.abs(ratio).mean())
    return Angles(turned, best[1], best[2], factor, np.angle(ratio), NOISE if patient.half else 0.0)


def _spread(before: np.ndarray, after: np.ndarray, layout: str, out: str) -> float:
    """How far from one complex factor per frequency the ratio is, over tokens and heads: what is left of the result
    when the best factor is taken out, relative to it; and how far the factors' sizes are from one another."""
    x, y = _complex(before, layout), _complex(after, out)
    ratio = _ratio(before, after, layout, out)
    left = np.sqrt((np.abs(y - ratio * x) ** 2).mean() / max((np.abs(y) ** 2).mean(), 1e-300))
    sizes = np.abs(ratio)
    return float(max(left, sizes.std() / max(sizes.mean(), 1e-300)))


def _ratio(before: np.ndarray, after: np.ndarray, layout: str, out: str) -> np.ndarray:
    """The least-squares factor of each frequency, [d_r / 2]."""
    x, y = _complex(before, layout), _complex(after, out)
    axes = tuple(range(x.ndim - 1))
    found: np.ndarray = (y * x.conj()).sum(axes) / np.maximum((np.abs(x) ** 2).sum(axes), 1e-300)
    return found


def angle_error(patient: Patient, angles: Angles, rng: np.random.Generator, rotary: int, position: int,
                inv_freq: np.ndarray) -> float:
    """Largest error in radians, over frequencies, of the angle at a position."""
    ratio = _ratio(*_look(patient, angles.turned, rng, position, rotary), angles.layout, angles.out)
    wanted = np.exp(1j * (position * inv_freq))
    return float(np.abs(np.angle(ratio / wanted)).max())


def frequency_mistakes(c: MLAConfig, max_context: int) -> dict[str, tuple[str, np.ndarray]]:
    """Wrong frequencies of the field: ailment -> (in words, [d_r / 2])."""
    dim, r = c.qk_rope_head_dim, c.rope
    plain = r.rope_theta ** -(torch.arange(0, dim, 2).double() / dim)
    right = inverse_frequencies(c, max_context)[0]
    found = {}
    if r.rope_type in ("yarn", "longrope"):
        found["rope-unstretched"] = (f"plain ones of base {r.rope_theta:g}", plain)
    if r.rope_theta != 10000:
        found["rope-theta"] = ("plain ones of base 10000", 10000.0 ** -(torch.arange(0, dim, 2).double() / dim))
    if r.rope_type == "longrope" and r.short_factor and r.long_factor:
        original = r.original_max_position_embeddings or c.max_position_embeddings
        other = r.short_factor if max_context > original else r.long_factor
        found["long-factors-unused"] = ("longrope's other set", plain / torch.tensor(other, dtype=torch.float64))
    return {n: (w, f.numpy()) for n, (w, f) in found.items() if not torch.allclose(f, right, rtol=1e-3)}
