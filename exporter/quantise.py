"""Weights as codes and scales: FP8 per output channel, integers in blocks along the input axis, all to the nearest.

A quantised weight [out, in] (or a stack of them) becomes two tensors of the weight file: its codes under its own name,
and `<name>_scale` in the compute dtype. TensorRT's graphs put `DequantizeLinear` between them and the product; ONNX
Runtime's operators (`MatMulNBits`, `QMoE`) multiply by them as they lie, and count codes from 0. A scale is rounded to
the compute dtype before anything is divided by it: what is left is the codes' own rounding, no systematic error.
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
    taken; none: one scale per output channel. Codes are stored as `code` (exporter.dtypes). With `zero`, the code that
    stands for 0, a scale has the sign that turns its block's largest magnitude into the lowest code, which has no
    counterpart: none is idle. `operator` reads the codes; `accuracy_level` is what it rounds activations to
    (1: float32, 4: int8).
    """

    name: str
    largest: float
    reach: float
    blocks: tuple[int, ...] = ()
    code: str = ""
    zero: int = 0
    operator: str = "DequantizeLinear"
    accuracy_level: int | None = None

    def block(self, columns: int) -> int | None:
        """Values of a row that share a scale; None where no block size divides the row."""
        return next((b for b in self.blocks if columns % b == 0), None) if self.blocks else columns

    def alike(self, *columns: int) -> bool:
        """Whether all matrices of an expert, of rows so wide, may be codes: QMoE takes one block size for them."""
        return self.operator != "MatMulNBits" or len({self.block(c) for c in columns}) == 1


BLOCK_SIZES = (128, 64, 32, 16)  # of ONNX Runtime's operators
ACCURACY_LEVELS = (1, 4)
BLOCK_SIZE, ACCURACY_LEVEL = 32, 4
_TENSORRT = {"fp8": Scheme("fp8", 448.0, 464.0, code="fp8"), "int4": Scheme("int4", 7.0, 7.5, (128, 64, 32), "int4")}
_ORT = {"int8": Scheme("int8", 128.0, 128.5, (), "uint8", 128, "MatMulNBits"),
        "int4": Scheme("int4", 8.0, 8.5, (), "uint4", 8, "MatMulNBits")}
SCHEMES = ("fp8", "int8", "int4")


def schemes_of(target: str) -> tuple[str, ...]:
    """The schemes that a target's graphs can hold."""
    return tuple(_ORT if target == "ort" else _TENSORRT)


def scheme_for(name: str, target: str, block_size: int | None = None, accuracy_level: int | None = None) -> Scheme:
    """The scheme `name` as the graphs of a target read it; `block_size` (ONNX Runtime's, default 32) is halved for
    rows that it does not divide. InputError where the target has none of that name."""
    if target != "ort":
        if name not in _TENSORRT:
            raise InputError(f"--quantise {name} with --target {target}: expected fp8 or int4; {name} is for ONNX "
                             "Runtime's MatMulNBits, with --target ort")
        return _TENSORRT[name]
    if name not in _ORT:
        raise InputError(f"--quantise {name} with --target ort: expected int8 or int4; ONNX Runtime's CPU has no "
                         f"{name} products, they are for --target trt or trt-rtx")
    return replace(_ORT[name], blocks=tuple(b for b in BLOCK_SIZES if b <= (block_size or BLOCK_SIZE)),
                   accuracy_level=accuracy_level or ACCURACY_LEVEL)


def quantised(values: np.ndarray, scheme: Scheme, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes of `values` [..., in] and their scales [..., in / block] in `dtype`; four bits are in numbers of eight.

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
        if scheme.zero:
            scale = np.where(grouped.min(-1) == -most, scale, -scale)
        factor = scale.astype(np.float32)
        quotient = grouped / np.where(factor == 0, 1, factor)[..., None]
    if scheme.zero:
        codes = (np.rint(quotient).clip(-scheme.zero, scheme.zero - 1) + scheme.zero).astype(np.uint8)
    elif scheme.name == "int4":
        codes = np.rint(quotient).clip(-8, 7).astype(np.int8)
    else:
        codes = quotient.clip(-scheme.largest, scheme.largest).astype(CODES[scheme.code].numpy)
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


def stored_scheme(record: Mapping[str, Any], target: str) -> Scheme:
    """The scheme of an export, from its manifest's record (`quantised_record`)."""
    if target != "ort" or record.get("operator") != "MatMulNBits":
        return _TENSORRT[record["scheme"]]
    return scheme_for(record["scheme"], target, record["block_size"], record["accuracy_level"])


def matrix_bytes(shape: tuple[int, ...], dtype: str, scheme: Scheme | None) -> int:
    """Bytes of a projection [..., out, in] as it is stored: in `dtype`, or as codes and scales in `dtype`; wide where
    no block size divides its rows."""
    block = scheme.block(shape[-1]) if scheme else None
    if scheme is None or block is None:
        return prod(shape) * DTYPES[dtype].itemsize
    return CODES[scheme.code].nbytes(prod(shape)) + prod(shape) // block * DTYPES[dtype].itemsize


def quantise_plan(plan: Sequence[PlannedTensor], scheme: Scheme | None) -> list[PlannedTensor]:
    """A plan with its projections as codes, each with its scales right behind it; the rest is as it was.

    A projection whose rows no block size divides stays wide.
    """
    result: list[PlannedTensor] = []
    for t in plan:
        if scheme is None or not t.projection or scheme.block(t.shape[-1]) is None:
            result.append(t)
            continue
        pair = _Pair(t, scheme)
        result += [replace(t, dtype=scheme.code, make=pair.codes, stored=None),
                   PlannedTensor(f"{t.name}{SCALE}", _scales(t, scheme), t.dtype, pair.scales)]
    return result


def quantised_record(plan: Sequence[PlannedTensor], stored: Mapping[str, StoredTensor], scheme: Scheme
                     ) -> dict[str, Any]:
    """What the manifest says: scheme, bytes before and after, the share of parameters that are codes, the block size of
    each tensor of codes (None: one scale per channel), and the matrices that stayed wide. `plan` is the one before."""
    itemsize = {t.name: DTYPES[t.dtype].itemsize for t in plan}
    blocks = {t.name: scheme.block(t.shape[-1]) for t in plan if stored[t.name].dtype == scheme.code}
    numbers = {t.name: prod(t.shape) for t in plan if not t.name.startswith("rope.")}
    return {
        "scheme": scheme.name,
        "operator": scheme.operator,
        **({"accuracy_level": scheme.accuracy_level, "block_size": scheme.blocks[0]} if scheme.accuracy_level else {}),
        "scales": f"one per {'block' if scheme.blocks else 'output channel'}, {'±' if scheme.zero else ''}max |w| / "
                  f"{scheme.largest:g} rounded to the compute dtype",
        "bytes_before": sum(prod(t.shape) * itemsize[t.name] for t in plan),
        "bytes_after": sum(t.nbytes for t in stored.values()),
        "share": sum(numbers[n] for n in blocks) / max(1, sum(numbers.values())),
        "tensors": {n: b if scheme.blocks else None for n, b in blocks.items()},
        "wide": sorted(t.name for t in plan if (t.projection or ".experts." in t.name) and t.name not in blocks),
    }
