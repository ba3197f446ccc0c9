"""The weight file beside the graphs: an ordinary .safetensors file, written tensor by tensor, addressed by offset.

ONNX external data points into it (location, offset, length), so every graph of an export shares one copy, and any
safetensors reader can open it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from exporter.dtypes import CODES, DTYPES, STORED
from exporter.errors import InputError
from exporter.safetensors_file import StoredSource

SCALE = "_scale"  # behind the name of a tensor of codes: its scales


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: shape and dtype are known ahead, the values are made when their turn comes.

    `make` gives them at once, or piece by piece along the first axis. `stored`: a source's file that holds these very
    values, in this layout, though perhaps in another dtype. `origins`: the source's tensors that it is made of, by the
    names that the user knows, for messages. `projection`: a matrix that graphs multiply tokens by, and may be codes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    make: Callable[[], np.ndarray | Iterator[np.ndarray]]
    stored: StoredSource | None = None
    origins: tuple[tuple[str, Callable[[], np.ndarray]], ...] = ()
    projection: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes in the planned dtype."""
        return STORED[self.dtype].nbytes(prod(self.shape))


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: a file beside the graphs (or below them), an offset and a length."""

    shape: tuple[int, ...]
    dtype: str
    offset: int
    nbytes: int
    file: str


def lay_out(plan: Sequence[PlannedTensor], file: str) -> tuple[list[PlannedTensor], bytes, dict[str, StoredTensor]]:
    """The order in the file (wider dtypes first: all stay aligned), the header, and where each tensor will lie."""
    ordered = sorted(plan, key=lambda t: -STORED[t.dtype].itemsize)
    entries: dict[str, dict[str, object]] = {}
    end = 0
    for t in ordered:
        kind = STORED[t.dtype]
        shape = [*t.shape[:-1], t.shape[-1] // kind.packed] if t.shape else []
        entries[t.name] = {"dtype": kind.safetensors, "shape": shape, "data_offsets": [end, end + t.nbytes]}
        end += t.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 4096)  # the format allows trailing spaces: data starts on a page
    stored, begin = {}, 8 + len(text)
    for t in ordered:
        stored[t.name] = StoredTensor(t.shape, t.dtype, begin, t.nbytes, file)
        begin += t.nbytes
    return ordered, len(text).to_bytes(8, "little") + text, stored


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


def pieces_of(t: PlannedTensor) -> Iterator[np.ndarray]:
    """What `make` gives, piece by piece."""
    made = t.make()
    yield from [made] if isinstance(made, np.ndarray) else made


def checked(t: PlannedTensor, piece: np.ndarray) -> np.ndarray:
    """`convert`, whose error names the source's tensor where one of them is at fault, not what is made of it; codes are
    taken as they are."""
    if t.dtype in CODES:
        return np.ascontiguousarray(piece)
    try:
        return convert(t.name, piece, t.dtype)
    except InputError:
        for name, load in t.origins:
            convert(name, load(), t.dtype)
        raise


def write_weights(
    path: Path, plan: Sequence[PlannedTensor], progress: Callable[..., None]
) -> dict[str, StoredTensor]:
    """Write the file tensor by tensor in the plan's order, each to its place, and say where each lies.
    `progress(name, share of the bytes written)`."""
    _, header, stored = lay_out(plan, path.name)
    total, done = sum(t.nbytes for t in plan), 0
    with path.open("wb") as out:
        out.write(header)
        for t in plan:
            begin = out.seek(stored[t.name].offset)
            for piece in pieces_of(t):
                progress(t.name, min(1.0, (done + out.tell() - begin) / max(1, total)))
                values = checked(t, piece)
                if values.shape[1:] != t.shape[1:]:
                    raise ValueError(f"{t.name} was planned as {t.shape} and made as {values.shape}")
                out.write(_raw(values, t.dtype).data)
            if out.tell() - begin != t.nbytes:
                raise ValueError(f"{t.name} was planned with {t.nbytes} bytes and made with {out.tell() - begin}")
            done += t.nbytes
    return stored


def _raw(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bytes of contiguous values; int4 two to a byte, the first in the low half."""
    raw = values.reshape(-1).view(np.uint8)
    return raw if STORED[dtype].packed == 1 else raw[::2] & 15 | raw[1::2] << 4
