"""Reading .safetensors strictly and lazily: the header is checked against the file, tensors are memory-mapped views.

Written out (the format is an 8-byte length, a JSON header and raw bytes) because external data needs each tensor's
offset, which the library does not give, and because a truncated or hostile header must become one clear line.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from exporter.errors import InputError

_DTYPES = {"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16),
           "BF16": np.dtype(ml_dtypes.bfloat16)}
_CODES = {"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
          "I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}  # what quantised weights are made of
_OTHER_SIZES = {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1, "I16": 2, "U16": 2, "I32": 4,
                "U32": 4, "I64": 8, "U64": 8, "C64": 8}
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class StoredSource:
    """One tensor of a checkpoint: where it lies. `load` gives a read-only view into the mapped file."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def load(self) -> np.ndarray:
        """The values, in the stored dtype; an integer or 8-bit float tensor is refused with the way out."""
        if self.dtype not in _DTYPES:
            raise InputError(f"{self.file.name}: tensor {self.name} has dtype {self.dtype}; expected one of "
                             f"{', '.join(_DTYPES)}; dequantise the checkpoint first")
        return self.load_raw()

    def load_raw(self) -> np.ndarray:
        """The stored numbers, codes of a quantised weight too; what they mean is the caller's business."""
        dtype = (_DTYPES | _CODES).get(self.dtype)
        if dtype is None:
            raise InputError(f"{self.file.name}: tensor {self.name} has dtype {self.dtype}; expected one of "
                             f"{', '.join(_DTYPES | _CODES)}; dequantise the checkpoint first")
        if not self.nbytes:  # nothing to map
            return np.empty(self.shape, dtype)
        raw = np.memmap(self.file, np.uint8, "r", self.offset, (self.nbytes,))
        values: np.ndarray = raw.view(dtype).reshape(self.shape)
        return values

    @property
    def is_float(self) -> bool:
        """Whether `load` gives values."""
        return self.dtype in _DTYPES

    def rows(self, index: int, begin: int, end: int) -> StoredSource:
        """Rows `begin` to `end` of matrix `index` of a three-dimensional tensor: one piece of the file as well."""
        matrices, rows, columns = self.shape
        assert 0 <= index < matrices
        assert 0 <= begin < end <= rows
        row = self.nbytes // (matrices * rows)
        return StoredSource(self.file, f"{self.name}[{index}, {begin}:{end}]", self.dtype, (end - begin, columns),
                            self.offset + (index * rows + begin) * row, (end - begin) * row)


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of a source, its values not read yet.

    `load` gives them, dequantised where they were quantised. `stored` says where they lie, for a tensor that a file
    holds exactly as `load` gives it; None where the values are made (drawn, dequantised, converted).
    """

    shape: tuple[int, ...]
    load: Callable[[], np.ndarray]
    stored: StoredSource | None = None


def read_header(path: Path) -> dict[str, StoredSource]:
    """All tensors of a file. InputError if the header does not parse or does not match the file's length."""
    def broken(why: str) -> InputError:
        return InputError(f"{path}: {why}; the file is damaged or not safetensors, fetch it again")

    size = path.stat().st_size
    with path.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(_MAX_HEADER, size - 8):
            raise broken(f"the header claims {length} bytes, the file has {size}")
        try:
            header: dict[str, Any] = json.loads(f.read(length))
            if not isinstance(header, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise broken(f"the header is not JSON ({error})") from None
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            tensors[name] = _entry(path, name, entry, 8 + length, size, broken)
    return tensors


def _entry(path: Path, name: str, entry: Any, base: int, size: int, broken: Any) -> StoredSource:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(d) for d in entry["shape"])
        begin, end = (int(x) for x in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise broken(f"tensor {name} lacks dtype, shape or data_offsets") from None
    width = _DTYPES[dtype].itemsize if dtype in _DTYPES else _OTHER_SIZES.get(dtype)
    if width is None:
        raise broken(f"tensor {name} has the unknown dtype {dtype}")
    expected = width
    for d in shape:
        expected *= d
    if not 0 <= begin <= end or end - begin != expected or min(shape, default=1) < 0:
        raise broken(f"tensor {name} {list(shape)} {dtype} needs {expected} bytes, its offsets are [{begin}, {end}]")
    if base + end > size:
        raise broken(f"tensor {name} ends at byte {base + end}, the file has {size} (truncated)")
    return StoredSource(path, name, dtype, shape, base + begin, end - begin)
