"""The weight file beside the graphs: an ordinary .safetensors file, written tensor by tensor, addressed by offset.

ONNX external data points into it (location, offset, length), so every graph of an export shares one copy, and any
safetensors reader can open it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from exporter.dtypes import DTYPES
from exporter.errors import InputError


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: shape and dtype are known ahead, the values are made when their turn comes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray]


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies in the weight file."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int


def _header(plan: Sequence[PlannedTensor]) -> tuple[bytes, dict[str, StoredTensor]]:
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for t in plan:
        size = int(np.prod(t.shape)) * DTYPES[t.dtype].itemsize
        entries[t.name] = {
            "dtype": DTYPES[t.dtype].safetensors,
            "shape": list(t.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # the format allows trailing spaces: data starts on a page
    base = 8 + len(text)
    stored = {}
    begin = 0
    for t in plan:
        size = int(np.prod(t.shape)) * DTYPES[t.dtype].itemsize
        stored[t.name] = StoredTensor(t.shape, t.dtype, base + begin, size)
        begin += size
    return len(text).to_bytes(8, "little") + text, stored


def count_nonfinite(values: np.ndarray) -> int:
    """How many values are NaN or infinite."""
    with np.errstate(over="ignore", invalid="ignore"):
        # a sum is finite iff every term is, unless it overflows itself: look closer only then
        if np.isfinite(values.sum(dtype=np.float64)):
            return 0
    return int(np.count_nonzero(~np.isfinite(values)))


def convert(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Round to a compute dtype; a finite value that the dtype cannot hold, or a NaN, is an InputError naming it."""
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(values).astype(DTYPES[dtype].numpy, copy=False)
    bad = count_nonfinite(result)
    if bad:
        what = "NaN or infinite" if count_nonfinite(values) else f"too large for {dtype}"
        raise InputError(f"tensor {name}: {bad} of {result.size} values are {what}; expected finite {dtype} weights"
                         + (" (bf16 and fp32 have the range)" if what == "too large for fp16" else ""))
    return result


def write_weights(
    path: Path, plan: Sequence[PlannedTensor], progress: Callable[[str], None]
) -> dict[str, StoredTensor]:
    """Write the file (tensors ordered so that wider dtypes come first and stay aligned) and say where each lies."""
    ordered = sorted(plan, key=lambda t: -DTYPES[t.dtype].itemsize)
    header, stored = _header(ordered)
    with path.open("wb") as out:
        out.write(header)
        for t in ordered:
            progress(t.name)
            values = convert(t.name, t.make(), t.dtype)
            if values.shape != t.shape:
                raise ValueError(f"{t.name} was planned as {t.shape} and made as {values.shape}")
            out.write(values.reshape(-1).view(np.uint8).data)
    return stored
