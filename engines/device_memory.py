"""Memory of a CUDA device for caches and steps, through torch: arrays that stay there, a count of what crosses.

Numbers are moved here and never computed with, so that a tensor of integers as wide as the numbers holds any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from engines.memory import new_rows
from exporter.errors import InputError

GRANULE = 256  # rows: a decode step's shapes hold for so many tokens, and its CUDA graph with them


class DeviceArray:
    """A tensor on the device that stands where a NumPy array does: in a cache, a feed, an `out`, the outputs.

    Annotations call both np.ndarray. It has what these do with one: shape, dtype, slices, assignment, `copy`; `numpy`
    brings it to the host, which nothing does by itself.
    """

    __slots__ = ("dtype", "memory", "tensor")

    def __init__(self, memory: DeviceMemory, tensor: Any, dtype: np.dtype) -> None:
        self.memory, self.tensor, self.dtype = memory, tensor, np.dtype(dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """As NumPy gives it."""
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        """How many axes."""
        return int(self.tensor.ndim)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return int(self.tensor.numel()) * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Its first byte on the device."""
        return int(self.tensor.data_ptr())

    @property
    def contiguous(self) -> bool:
        """Whether it lies in one piece, in the order of its axes."""
        return bool(self.tensor.is_contiguous())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[DeviceArray]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, where: Any) -> DeviceArray:
        return DeviceArray(self.memory, self.tensor[where], self.dtype)

    def __setitem__(self, where: Any, value: DeviceArray | np.ndarray) -> None:
        if value.dtype != self.dtype:
            raise InputError(f"numbers of {value.dtype} for an array of {self.dtype} on the device; expected the same")
        self.tensor[where] = self.memory.tensor(value)

    def reshape(self, shape: tuple[int, ...]) -> DeviceArray:
        """The same bytes in another shape."""
        return DeviceArray(self.memory, self.tensor.view(shape), self.dtype)

    def copy(self) -> DeviceArray:
        """Another with the same numbers, on the device."""
        return DeviceArray(self.memory, self.tensor.clone(), self.dtype)

    def numpy(self) -> np.ndarray:
        """Its numbers on the host."""
        self.memory.downloaded += self.nbytes
        return cast("np.ndarray", self.tensor.cpu().contiguous().numpy().view(self.dtype))


class DeviceMemory:
    """The current CUDA device's, given torch. `uploaded` and `downloaded` are bytes that have crossed the bus."""

    granule = GRANULE

    def __init__(self, torch: Any) -> None:
        self.torch, self.device = torch, torch.device("cuda")
        self.uploaded = self.downloaded = 0

    def available(self) -> int:
        """As the driver counts, with what torch keeps for reuse."""
        cuda = self.torch.cuda
        return int(cuda.mem_get_info()[0]) + int(cuda.memory_reserved()) - int(cuda.memory_allocated())

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A DeviceArray of zeros."""
        made = self.torch.zeros(shape, dtype=self._container(dtype), device=self.device)
        return cast("np.ndarray", DeviceArray(self, made, dtype))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> DeviceArray:
        """A DeviceArray of whatever lies there."""
        return DeviceArray(self, self.torch.empty(shape, dtype=self._container(dtype), device=self.device), dtype)

    def _container(self, dtype: np.dtype) -> Any:
        return getattr(self.torch, {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}[np.dtype(dtype).itemsize])

    def tensor(self, array: DeviceArray | np.ndarray) -> Any:
        """An array's tensor on the device; uploaded from pinned memory where it lies on the host."""
        if isinstance(array, DeviceArray):
            return array.tensor
        raw = np.ascontiguousarray(array)
        self.uploaded += raw.nbytes
        kind = self._container(raw.dtype)
        pinned = self.torch.empty(raw.shape, dtype=kind, pin_memory=True)  # torch keeps it until the copy is done
        pinned.view(self.torch.uint8).numpy()[...] = raw.view(np.uint8).reshape(pinned.view(self.torch.uint8).shape)
        return pinned.to(self.device, non_blocking=True)

    def write_rows(self, stack: np.ndarray, made: np.ndarray, slots: np.ndarray, starts: np.ndarray,
                   counts: np.ndarray) -> None:
        """One kernel where one sequence has new rows or all keep theirs (a decode step); else one before it that
        gathers those to keep out of a padded chunk."""
        whole, new = self.tensor(stack), self.tensor(made)
        busy = np.flatnonzero(counts)
        if len(busy) == 1:
            b = int(busy[0])
            begin, count = int(starts[b]), int(counts[b])
            whole[:, int(slots[b]), begin:begin + count].copy_(new[:, b, :count])
            return
        (L, B, T, R), S = new.shape, whole.shape[2]
        of, t = new_rows(counts)
        source = new.view(L, B * T, R)
        if len(of) < B * T:
            source = source.index_select(1, self.tensor(of * T + t))
        whole.view(L, -1, R).index_copy_(1, self.tensor(slots[of] * S + starts[of] + t), source)
