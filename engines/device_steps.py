"""What a step on a CUDA device reads and writes: where each input and output lies, and how the host's part gets there.

Arrays of the device stay where they are. What is on the host (ids, lengths, logits) crosses in one copy each way, out
of and into pinned memory that is made once; so a step's addresses stay the same from one to the next, as a CUDA graph
needs them. A large array (a past that someone keeps on the host) has a copy of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from engines.device_memory import DeviceArray, DeviceMemory
from engines.session import Outputs, output_shape
from exporter.dtypes import NUMPY_OF_NAME
from exporter.errors import InputError
from exporter.signature import TensorSpec

ALIGNMENT = 256  # bytes, as CUDA's own allocations have
LARGE = 1 << 26  # bytes, from which on an array is not staged: a past, say, but no logits
IN_PLACE, UPDATED = "latent_cache.", "latent_cache_out."  # of the scatter form: one buffer


@dataclass(frozen=True)
class _Result:
    """An output of the step under way: `device` where it has memory of its own there, else it is staged; `host` where
    its numbers go, None for a new array; both None where the caller has it on the device already (`kept`)."""

    shape: tuple[int, ...]
    dtype: np.dtype
    host: np.ndarray | None = None
    device: DeviceArray | None = None
    kept: DeviceArray | None = None


class DeviceSteps:
    """The buffers of one session's steps. `on_host`: inputs that the runtime reads on the host (shape tensors)."""

    def __init__(self, memory: DeviceMemory, stream: Any, on_host: Collection[str] = ()) -> None:
        self.memory, self._stream, self._on_host = memory, stream, frozenset(on_host)
        self._up, self._down = _Mirror(memory), _Mirror(memory)
        self._own: dict[str, DeviceArray] = {}  # inputs of this step that were uploaded by themselves
        self._results: dict[str, _Result] = {}

    def bind(self, arrays: Mapping[str, np.ndarray], outputs: tuple[TensorSpec, ...], sizes: Mapping[str, int],
             out: Mapping[str, np.ndarray]) -> dict[str, int]:
        """The address of every input and output; the copies to the device are enqueued. Outputs in `out` that lie on
        the device are written there, and a cache that is updated in place has its input's address."""
        torch = self.memory.torch
        self._stream.wait_stream(torch.cuda.current_stream())  # the rows that the last commit wrote, say
        with torch.cuda.stream(self._stream):
            found = self._inputs(arrays)
        return found | self._outputs(arrays, outputs, sizes, out, found)

    def _inputs(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        self._own, staged = {}, {}
        for name, array in arrays.items():
            if isinstance(array, DeviceArray) and array.contiguous:
                self._own[name] = array
            elif name.startswith(IN_PLACE) and not (isinstance(array, np.ndarray) and array.flags.c_contiguous):
                raise InputError(f"{name} must be contiguous, it is updated in place")
            elif name in self._on_host or (array.nbytes <= LARGE and isinstance(array, np.ndarray)
                                           and not name.startswith(IN_PLACE)):
                staged[name] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            else:
                self._own[name] = DeviceArray(self.memory, self.memory.tensor(array).contiguous(), array.dtype)
        found = {name: array.address for name, array in self._own.items()}
        places = self._up.place({name: raw.nbytes for name, raw in staged.items()})
        for name, raw in staged.items():
            self._up.host_bytes(name, raw.nbytes)[...] = raw
            found[name] = (self._up.host if name in self._on_host else self._up.device).data_ptr() + places[name]
        self._up.upload()
        return found

    def _outputs(self, arrays: Mapping[str, np.ndarray], specs: tuple[TensorSpec, ...], sizes: Mapping[str, int],
                 out: Mapping[str, np.ndarray], inputs: Mapping[str, int]) -> dict[str, int]:
        found, staged, self._results = {}, {}, {}
        for spec in specs:
            name, shape, dtype = spec.name, output_shape(spec.shape, sizes), NUMPY_OF_NAME[spec.dtype]
            given, size = out.get(name), math.prod(shape) * dtype.itemsize
            if name.startswith(UPDATED):
                source = name.replace(UPDATED, IN_PLACE)
                found[name], cache = inputs[source], arrays[source]
                self._results[name] = (_Result(shape, dtype, kept=cache) if isinstance(cache, DeviceArray) else
                                       _Result(shape, dtype, cache, self._own[source]))
            elif isinstance(given, DeviceArray):
                found[name], self._results[name] = given.address, _Result(shape, dtype, kept=given)
            elif size > LARGE:
                made = self.memory.empty(shape, dtype)
                found[name], self._results[name] = made.address, _Result(shape, dtype, given, made)
            else:
                staged[name], self._results[name] = size, _Result(shape, dtype, given)
        places = self._down.place(staged)
        return found | {name: self._down.device.data_ptr() + place for name, place in places.items()}

    def shape(self, output: str) -> tuple[int, ...]:
        """Of an output of the step under way."""
        return self._results[output].shape

    @property
    def staged_inputs(self) -> Any:
        """The bytes that came from the host in one copy, on the device."""
        return self._up.device[:self._up.used]

    @property
    def staged_outputs(self) -> Any:
        """The bytes that `collect` brings to the host in one copy, on the device."""
        return self._down.device[:self._down.used]

    def collect(self) -> Outputs:
        """Every output by name, once the step is done: this waits for it."""
        with self.memory.torch.cuda.stream(self._stream):
            self._down.download()
        self._stream.synchronize()
        outputs: Outputs = {}
        for name, result in self._results.items():
            if result.kept is not None:
                outputs[name] = cast("np.ndarray", result.kept)
                continue
            if result.device is not None:
                value, fresh = result.device.numpy(), True
            else:
                raw = self._down.host_bytes(name, math.prod(result.shape) * result.dtype.itemsize)
                value, fresh = raw.view(result.dtype).reshape(result.shape), False
            if result.host is None:
                outputs[name] = value if fresh else value.copy()
            else:
                result.host[...] = value
                outputs[name] = result.host
        self._own, self._results = {}, {}
        return outputs


class _Mirror:
    """A block of pinned memory and one of the device as large; they grow, and are else the same at every step."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self.host = self.device = memory.torch.empty(0, dtype=memory.torch.uint8)
        self.places: dict[str, int] = {}
        self.used = 0

    def place(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Where so many bytes of each name lie, from the blocks' begin."""
        self.places, self.used = {}, 0
        for name, size in sizes.items():
            self.places[name] = self.used
            self.used += -(-size // ALIGNMENT) * ALIGNMENT
        if self.used > self.host.numel():
            count, torch = 1 << (self.used - 1).bit_length(), self._memory.torch
            self.host = torch.empty(count, dtype=torch.uint8, pin_memory=True)
            self.device = torch.empty(count, dtype=torch.uint8, device=self._memory.device)
        return self.places

    def host_bytes(self, name: str, count: int) -> np.ndarray:
        """A view of what lies there on the host."""
        place = self.places[name]
        return cast("np.ndarray", self.host.numpy()[place:place + count])

    def upload(self) -> None:
        """Enqueue the copy to the device on the current stream."""
        if self.used:
            self._memory.uploaded += self.used
            self.device[:self.used].copy_(self.host[:self.used], non_blocking=True)

    def download(self) -> None:
        """Enqueue the copy to the host on the current stream."""
        if self.used:
            self._memory.downloaded += self.used
            self.host[:self.used].copy_(self.device[:self.used], non_blocking=True)
