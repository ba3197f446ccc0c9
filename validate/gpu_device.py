"""The device that a GPU check measures on: what it is, memory in use and at its peak, time by events, copy bandwidth.

`Device` is all that the rungs know of it, so that they run on a CPU too, over another implementation of the same.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from engines.device_memory import DeviceMemory
from engines.gpus import GPU, GPUS
from exporter.errors import InputError

NO_CUDA = "no CUDA device"
WARM_UP, BURST, MOST_STEPS = 5, 10, 200

# what the driver calls the cards of engines.gpus; a card that is sold under a like name (A100 PCIe, A10G) is another
CARDS = {
    "NVIDIA A100-SXM4-40GB": "a100-40gb", "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H200": "h200", "NVIDIA B200": "b200", "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s", "NVIDIA A10": "a10", "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090", "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000", "NVIDIA GB10": "gb10"}


def sheet(name: str) -> GPU | None:
    """The data sheet of a card by the name that its driver gives, None for one that engines.gpus does not know."""
    return GPUS[CARDS[name]] if name in CARDS else None


def absent() -> str | None:
    """Why torch has no CUDA device; None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return f"{NO_CUDA} that torch sees: torch {torch.__version__} is built without CUDA"
    return NO_CUDA


class Device(Protocol):
    """`torch` names the device in torch; bytes and milliseconds throughout."""

    torch: str

    def facts(self) -> dict[str, Any]:
        """What it is: name, capability, memory, driver, versions."""

    def free(self) -> int:
        """Bytes that an allocation could still get."""

    def release(self) -> None:
        """Give back what the allocator keeps of freed tensors."""

    def allocated(self) -> int:
        """Bytes of live tensors."""

    def reset_peak(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """The most bytes of live tensors since `reset_peak`."""

    def time(self, step: Callable[[], Any], budget_s: float) -> list[float]:
        """Milliseconds of one step each, after a warm-up; fewer of them where `budget_s` is spent."""

    def memory(self) -> DeviceMemory:
        """A cache's memory there."""

    def queue(self) -> AbstractContextManager[int]:
        """A stream of its own for the work of a block; its handle."""

    def copy_bandwidth(self) -> tuple[float, bool]:
        """GB/s of a copy inside its memory, bytes read and bytes written counted, and whether the copy is equal."""


class CudaDevice:
    """The current CUDA device; InputError without one."""

    torch = "cuda"

    def __init__(self) -> None:
        reason = absent()
        if reason:
            raise InputError(f"not run: {reason}")
        self._properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        self._flush: torch.Tensor | None = None

    def facts(self) -> dict[str, Any]:
        """Name, compute capability, memory, driver, torch and its CUDA."""
        p = self._properties
        return {"name": p.name, "capability": f"{p.major}.{p.minor}", "memory_bytes": p.total_memory,
                "multiprocessors": p.multi_processor_count, "l2_bytes": self._l2(), "driver": _driver(),
                "torch": torch.__version__, "cuda": torch.version.cuda}

    def _l2(self) -> int:
        return int(getattr(self._properties, "L2_cache_size", 0)) or (64 << 20)

    def free(self) -> int:
        """As the driver counts, with what torch's allocator keeps for reuse."""
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info()[0]) + kept

    def release(self) -> None:
        """Empty torch's cache of freed blocks, so that other libraries can have them."""
        self._flush = None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def allocated(self) -> int:
        """Of torch's allocator."""
        torch.cuda.synchronize()
        return int(torch.cuda.memory_allocated())

    def reset_peak(self) -> None:
        """Of torch's allocator."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Of torch's allocator."""
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated())

    def time(self, step: Callable[[], Any], budget_s: float) -> list[float]:
        """CUDA events around each step on the current stream, launches by the host included. Before each the L2 cache
        is overwritten: a step of a whole model finds other layers' weights there."""
        ends = time.monotonic() + budget_s
        for _ in range(WARM_UP):
            step()
        if self._flush is None:
            self._flush = torch.empty(4 * self._l2(), dtype=torch.uint8, device=self.torch)
        times: list[float] = []
        while len(times) < MOST_STEPS and (not times or time.monotonic() < ends):
            events = [(_event(), _event()) for _ in range(BURST)]
            for start, end in events:
                self._flush.zero_()
                start.record()
                step()
                end.record()
            torch.cuda.synchronize()
            times += [start.elapsed_time(end) for start, end in events]
        return times

    @contextmanager
    def queue(self) -> Iterator[int]:
        """torch's current stream within the block: TensorRT synchronises once more on the default stream."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            yield int(stream.cuda_stream)
        torch.cuda.synchronize()

    def memory(self) -> DeviceMemory:
        """Torch's."""
        return DeviceMemory(torch)

    def copy_bandwidth(self) -> tuple[float, bool]:
        """A copy of 2 GiB, or of an eighth of the free memory."""
        count = min(2 << 30, self.free() // 8) // 4  # of int32
        source = torch.randint(-(1 << 31), (1 << 31) - 1, (count,), dtype=torch.int32, device=self.torch)
        target = torch.zeros_like(source)
        milliseconds = statistics.median(self.time(lambda: target.copy_(source), 3.0))
        return 2 * source.nbytes / milliseconds / 1e6, bool(torch.equal(source, target))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        found = subprocess.run([tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True,
                               text=True, timeout=20, check=False).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found[0] if found else None


@contextmanager
def exact_products() -> Iterator[dict[str, Any]]:
    """TF32 off, whatever the environment asks, and 16-bit products summed in float32 throughout; gives what is set."""
    matmul = torch.backends.cuda.matmul
    names = ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    before, precision = {name: getattr(matmul, name) for name in names}, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    for name in names:
        setattr(matmul, name, False)
    try:
        yield {"float32_matmul_precision": "highest", **dict.fromkeys(names, False)}
    finally:
        torch.set_float32_matmul_precision(precision)
        for name, value in before.items():
            setattr(matmul, name, value)
