"""Weights as codes and scales: FP8 per output channel, int4 in blocks along the input axis, both to the nearest.

A quantised weight [out, in] (or a stack of them) becomes two tensors of the weight file: its codes under its own name,
and `<name>_scale` in the compute dtype. Graphs put `DequantizeLinear` between them and the product. A scale is rounded
to the compute dtype before anything is divided by it: what is left is the codes' own rounding, no systematic error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from exporter.dtypes import CODES, DTYPES
from exporter.errors import InputError
from exporter.weight_file import SCALE, PlannedTensor, StoredTensor, checked, pieces_of

_BAND = 1 << 22  # values quantised at once


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised. A scale is the largest magnitude of its values divided by `largest`; `reach` is the
    largest quotient that still rounds to that code. `blocks`: sizes along the input axis, the first that divides it is
    taken; none: one scale per output channel."""

    name: str
    largest: float
    reach: float
    blocks: tuple[int, ...] = ()

    def block(self, columns: int) -> int | None:
        """Values of a row that share a scale; None where no block size divides the row."""
        return next((b for b in self.blocks if columns % b == 0), None) if self.blocks else columns


SCHEMES = {"fp8": Scheme("fp8", 448.0, 464.0), "int4": Scheme("int4", 7.0, 7.5, (128, 64, 32))}


def quantised(values: np.ndarray, scheme: Scheme, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of `values` [..., in] and their scales [..., in / block] in `dtype`; int4 codes are int8 numbers.

    A block of zeros has the scale 0 and codes 0. ValueError where the values are not finite, or their scale is not.
    """
    block = scheme.block(values.shape[-1])
    assert block is not None
    grouped = values.astype(np.float32).reshape(*values.shape[:-1], -1, block)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        most = np.abs(grouped).max(-1)
        scale = (most / np.float32(scheme.largest)).astype(DTYPES[dtype].numpy)
        # where rounding took it too far down (a subnormal of float16), the next one up
        low = most > scheme.reach * scale.astype(np.float32)
        scale = np.where(low, np.nextafter(scale, np.array(np.inf, scale.dtype)), scale)
        if not np.isfinite((scale.astype(np.float32) * np.float32(scheme.largest)).astype(scale.dtype)).all():
            raise ValueError(f"not finite in {dtype}")
        factor = scale.astype(np.float32)
        quotient = grouped / np.where(factor == 0, 1, factor)[..., None]
    if scheme.name == "int4":
        codes = np.rint(quotient).clip(-8, 7).astype(np.int8)
    else:
        codes = quotient.clip(-scheme.largest, scheme.largest).astype(CODES[scheme.name].numpy)
    return codes.reshape(values.shape), scale


class _Pair:
    """A weight's codes and scales, made in one pass: the scales are kept from it, they are few."""

    def __init__(self, wide: PlannedTensor, scheme: Scheme) -> None:
        self.wide, self.scheme = wide, scheme
        self._scales: list[np.ndarray] = []

    def codes(self) -> Iterator[np.ndarray]:
        self._scales = []
        for piece in pieces_of(self.wide):
            rows = max(1, _BAND // prod(piece.shape[1:]))
            for begin in range(0, len(piece), rows):
                band = piece[begin:begin + rows]
                try:
                    codes, scale = quantised(band, self.scheme, self.wide.dtype)
                except ValueError:
                    checked(self.wide, band)  # says which tensor it is, and what is wrong with it
                    raise InputError(f"tensor {self.wide.name}: values too large for {self.wide.dtype}; expected "
                                     f"finite {self.wide.dtype} weights") from None
                self._scales.append(scale)
                yield codes

    def scales(self) -> np.ndarray:
        """Made anew unless the codes were just made."""
        if not self._scales:
            for _ in self.codes():
                pass
        joined = np.concatenate(self._scales)
        self._scales = []
        return joined.reshape(_scales(self.wide, self.scheme))


def _scales(t: PlannedTensor, scheme: Scheme) -> tuple[int, ...]:
    """Shape of a tensor's scales: [out] of a matrix per channel, else [..., out, in / block] (a stack's channel is one
    block: `DequantizeLinear` has one axis for scales of one rank)."""
    block = scheme.block(t.shape[-1])
    assert block is not None
    return t.shape[:1] if len(t.shape) == 2 and not scheme.blocks else (*t.shape[:-1], t.shape[-1] // block)


def matrix_bytes(shape: tuple[int, ...], dtype: str, name: str | None) -> int:
    """Bytes of a projection [..., out, in] as it is stored: in `dtype`, or as codes of the scheme `name` and scales in
    `dtype`; wide where no block size divides its rows."""
    block = SCHEMES[name].block(shape[-1]) if name else None
    if name is None or block is None:
        return prod(shape) * DTYPES[dtype].itemsize
    codes = prod(shape) // 2 if name == "int4" else prod(shape)
    return codes + prod(shape) // block * DTYPES[dtype].itemsize


def quantise_plan(plan: Sequence[PlannedTensor], name: str | None) -> list[PlannedTensor]:
    """A plan with its projections as codes, each with its scales right behind it; the rest is as it was.

    A projection whose rows no block size divides stays wide.
    """
    scheme = SCHEMES[name] if name else None
    result: list[PlannedTensor] = []
    for t in plan:
        if scheme is None or not t.projection or scheme.block(t.shape[-1]) is None:
            result.append(t)
            continue
        pair = _Pair(t, scheme)
        result += [replace(t, dtype=scheme.name, make=pair.codes, stored=None),
                   PlannedTensor(f"{t.name}{SCALE}", _scales(t, scheme), t.dtype, pair.scales)]
    return result


def quantised_record(plan: Sequence[PlannedTensor], stored: Mapping[str, StoredTensor], name: str) -> dict[str, Any]:
    """What the manifest says: scheme, bytes before and after, the share of parameters that are codes, the block size of
    each tensor of codes (None: one scale per channel), and the matrices that stayed wide. `plan` is the one before."""
    scheme, itemsize = SCHEMES[name], {t.name: DTYPES[t.dtype].itemsize for t in plan}
    blocks = {t.name: scheme.block(t.shape[-1]) for t in plan if stored[t.name].dtype == name}
    numbers = {t.name: prod(t.shape) for t in plan if not t.name.startswith("rope.")}
    return {
        "scheme": name,
        "scales": f"one per {'block' if scheme.blocks else 'output channel'}, max |w| / {scheme.largest:g} rounded to "
                  "the compute dtype",
        "bytes_before": sum(prod(t.shape) * itemsize[t.name] for t in plan),
        "bytes_after": sum(t.nbytes for t in stored.values()),
        "share": sum(numbers[n] for n in blocks) / max(1, sum(numbers.values())),
        "tensors": {n: b if scheme.blocks else None for n, b in blocks.items()},
        "wide": sorted(t.name for t in plan if (t.projection or ".experts." in t.name) and t.name not in blocks),
    }
