"""A device for the GPU check's rungs on the CPU: live tensors counted at torch's dispatcher, time by the clock."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines.device_memory import DeviceMemory
from tests.fake_tensorrt import CpuTorch


class LiveTensors(TorchDispatchMode):
    """Bytes of the storages that live tensors made under this mode lie in, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self._holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
                self._hold(leaf)
        return found

    def _hold(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, count = storage.data_ptr(), storage.nbytes()
        if key not in self._holders:
            self.live += count
            self.most = max(self.most, self.live)
        self._holders[key] = self._holders.get(key, 0) + 1
        weakref.finalize(tensor, self._release, key, count)

    def _release(self, key: int, count: int) -> None:
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.live -= count


class HostDevice:
    """What `CudaDevice` does, on the CPU; `card` is the name that it reports."""

    torch = "cpu"

    def __init__(self, meter: LiveTensors, card: str = "NVIDIA H200", free: int = 1 << 34) -> None:
        self.meter, self.card, self._free = meter, card, free

    def facts(self) -> dict[str, Any]:
        return {"name": self.card, "capability": "9.0", "memory_bytes": self._free, "driver": None,
                "torch": torch.__version__, "cuda": None}

    def free(self) -> int:
        return self._free

    def release(self) -> None:
        pass

    def allocated(self) -> int:
        return self.meter.live

    def reset_peak(self) -> None:
        self.meter.most = self.meter.live

    def peak(self) -> int:
        return self.meter.most

    def time(self, step: Callable[[], Any], budget_s: float) -> list[float]:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times

    def memory(self) -> DeviceMemory:
        return DeviceMemory(CpuTorch())

    @contextmanager
    def queue(self) -> Iterator[int]:
        yield 7

    def copy_bandwidth(self) -> tuple[float, bool]:
        return 4000.0, True
