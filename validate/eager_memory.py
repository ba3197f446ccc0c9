"""Memory of one eager attention's decode step: of a CUDA device by its allocator, of the CPU as resident memory of a
process of its own (`python -m validate.eager_memory`).

What weights and cache add is read when they have been made, what a step needs beyond both at its worst moment. Weights
are seeded ones of the export's sizes: memory does not ask what a number is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any, Protocol

import torch

from engines import measure
from exporter.config import MLAConfig
from exporter.presets import hot_tensor, hot_weights
from validate.eager import FORMS, EagerStep

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Meter(Protocol):
    """Where memory is read: `validate.gpu_device.CudaDevice`, or this process."""

    torch: str

    def allocated(self) -> int:
        """Bytes in use."""

    def reset_peak(self) -> None:
        """Forget the peak."""

    def peak(self) -> int:
        """The most bytes in use since `reset_peak`."""


class ThisProcess:
    """Resident memory of this process, by the kernel's own account."""

    torch = "cpu"

    def allocated(self) -> int:
        """VmRSS."""
        return measure.resident()

    def reset_peak(self) -> None:
        """Of the kernel's high-water mark."""
        measure.reset_high_water()

    def peak(self) -> int:
        """VmHWM."""
        return measure.high_water()


@dataclass(frozen=True)
class EagerMemory:
    """Bytes that weights and cache added, what the step took beside them, and the most of all three together; `held`:
    the bytes of the tensors themselves, weights and cache."""

    weights_bytes: int
    cache_bytes: int
    step_bytes: int
    peak_bytes: int
    held_weights_bytes: int
    held_cache_bytes: int


def eager_memory(meter: Meter, config: MLAConfig, form: str, dtype: str, batch: int, rows: int) -> EagerMemory:
    """One new token of each of `batch` sequences over `rows` rows of past, in a form of `validate.eager.FORMS`."""
    kind, device = TORCH_DTYPES[dtype], meter.torch
    _warm(kind, device)
    bare = meter.allocated()
    layer = _layer(config, form, rows + 1, kind, device)
    loaded = meter.allocated()
    draws = torch.Generator(device=device).manual_seed(0)
    hidden = torch.randn((batch, 1, config.hidden_size), generator=draws, device=device).to(kind)
    layer.load(batch, rows, 1, lambda n: torch.randn((batch, n, config.row_dim), generator=draws, device=device))
    if form == "mha":  # its K and V have composed matrices of their own: what those were composed of may go
        empty, up = torch.empty(0, dtype=kind, device=device), (layer.weights.w_uk, layer.weights.w_uv)
        loaded -= sum(t.nbytes for t in up)
        layer.weights = replace(layer.weights, w_uk=empty, w_uv=empty)
        del up
    before = meter.allocated()
    meter.reset_peak()
    layer.step(hidden)
    peak = meter.peak()
    return EagerMemory(loaded - bare, before - loaded, max(0, peak - before), peak - bare, _held(layer),
                       layer.held_bytes)


def _warm(kind: torch.dtype, device: str) -> None:
    """Libraries take their workspaces with the first products."""
    some = torch.from_numpy(hot_tensor("some", (64, 64), 0)).to(device=device, dtype=kind)
    torch.softmax(torch.nn.functional.linear(some, some) @ some, dim=-1)


def _layer(config: MLAConfig, form: str, max_context: int, kind: torch.dtype, device: str) -> EagerStep:
    tensors = {name: torch.from_numpy(array) for name, array in hot_weights(config, 0)}
    return FORMS[form](config, tensors, max_context=max_context, dtype=kind, device=device)


def _held(layer: EagerStep) -> int:
    """Bytes of the storages that a layer's weights lie in, each counted once."""
    found = dict[int, int]()

    def look(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found[value.data_ptr()] = max(value.nbytes, found.get(value.data_ptr(), 0))
        elif is_dataclass(value) and not isinstance(value, (type, MLAConfig)):
            for f in fields(value):
                look(getattr(value, f.name))

    for value in vars(layer).values():
        look(value)
    return sum(found.values())


def measured(config: MLAConfig, form: str, dtype: str, batch: int, rows: int, timeout: float | None = None,
             option: str = "--budget") -> EagerMemory:
    """`eager_memory` on the CPU, in a process of its own. CheckError where that fails or takes longer."""
    job = {"config": config.to_dict(), "form": form, "dtype": dtype, "batch": batch, "rows": rows}
    return EagerMemory(**measure.run_child("validate.eager_memory", job, f"eager {form}", f"at batch {batch}, {rows} "
                                           "rows", timeout, option))


def _run(job: Mapping[str, Any]) -> EagerMemory:
    torch.set_num_threads(min(2, torch.get_num_threads()))  # threads bring buffers of their own
    return eager_memory(ThisProcess(), MLAConfig.from_dict(job["config"]), job["form"], job["dtype"], job["batch"],
                        job["rows"])


if __name__ == "__main__":
    with torch.inference_mode():
        print(json.dumps(asdict(_run(json.loads(sys.stdin.read())))))
