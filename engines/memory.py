"""Where the rows of a cache lie: in the host's memory, or (engines.device_memory) in that of a CUDA device.

A cache asks its memory for buffers and for one thing that wants a kernel of its own, the writing of a step's new rows;
all else it does by slices, which both kinds of array know.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class Memory(Protocol):
    """`granule`: the past of one sequence is bound in multiples of so many rows, where its buffer has them. A captured
    CUDA graph is of one shape, and a host pays for every row."""

    granule: int

    def available(self) -> int:
        """Bytes that new buffers could have."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A new buffer of zeros."""

    def write_rows(self, stack: np.ndarray, made: np.ndarray, slots: np.ndarray, starts: np.ndarray,
                   counts: np.ndarray) -> None:
        """made [L, B, T, R] -> stack [L, B', S, R]: counts[b] rows of b behind starts[b] of slots[b], in one copy."""


class HostMemory:
    """NumPy's."""

    granule = 1

    def available(self) -> int:
        """Without swapping."""
        from engines.measure import available_memory  # which knows sessions, and they know memories

        return available_memory()

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Pages that are touched when they are first written."""
        return np.zeros(shape, dtype)

    def write_rows(self, stack: np.ndarray, made: np.ndarray, slots: np.ndarray, starts: np.ndarray,
                   counts: np.ndarray) -> None:
        """One assignment, of a plain slice where one sequence has new rows."""
        busy = np.flatnonzero(counts)
        if len(busy) == 1:  # no list of indices, and nothing gathered in between
            b = int(busy[0])
            begin, count = int(starts[b]), int(counts[b])
            stack[:, slots[b], begin:begin + count] = made[:, b, :count]
            return
        of, t = new_rows(counts)
        stack[:, slots[of], starts[of] + t] = made[:, of, t]


HOST = HostMemory()


def new_rows(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whose each new row is, and which of its sequence's: [sum of counts] each."""
    of = np.repeat(np.arange(len(counts)), counts)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)


def address(array: np.ndarray) -> int:
    """Where an array of either kind begins."""
    return int(getattr(array, "address", 0) or array.ctypes.data)
