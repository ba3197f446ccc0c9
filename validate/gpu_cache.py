"""Rungs of the cache that lies on the device: rows written as the host would, what crosses the bus, CUDA graphs.

They need torch alone: in place of an engine a few of torch's kernels run over the buffers that a session's steps have.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import numpy as np
import torch

from engines.cuda_graphs import Binding, CapturedSteps
from engines.device_memory import DeviceArray, DeviceMemory
from engines.device_steps import ALIGNMENT, DeviceSteps
from engines.memory import HOST
from exporter.dtypes import DTYPES
from exporter.presets import preset_config
from exporter.signature import TensorSpec
from validate.gpu_device import Device
from validate.gpu_eager import beside_floor
from validate.gpu_rungs import Outcome, Report, Rung, Sizes

LAYERS, ROOM = 61, 64  # attentions of a large model; rows of room in the buffers that are compared
STEPS = 6


def rungs(sizes: Sizes, device: Device | None, report: Report) -> list[Rung]:
    """Rows by dtype, then a step and its graph."""
    bench = _Bench(sizes, device, report)
    found = [Rung(f"cache/rows/{dtype}", f"new rows of {LAYERS} attentions and {sizes.batch} ragged sequences, as the "
                  "host writes them; a decode step's rows timed", 10, partial(bench.rows, dtype))
             for dtype in sizes.time_dtypes]
    return [*found, Rung("cache/steps", "a step's inputs and outputs through pinned memory, past on the device; then "
                         "as a CUDA graph, with new inputs each time", 10, bench.steps)]


class _Bench:
    """Does the rungs on one device."""

    def __init__(self, sizes: Sizes, device: Device | None, report: Report) -> None:
        self.sizes, self.report, self._device = sizes, report, device
        self.width = preset_config(sizes.preset).row_dim

    @property
    def device(self) -> Device:
        """The device; a rung never runs without one."""
        assert self._device is not None
        return self._device

    def rows(self, dtype: str, budget_s: float) -> Outcome:
        """Passes if every byte of the buffer is the host's after steps of all kinds: a prefill's padded pieces, one
        sequence alone, a decode step of all, one in which some keep nothing."""
        memory, kind, batch = self.device.memory(), DTYPES[dtype].numpy, self.sizes.batch
        rng = np.random.default_rng(self.sizes.seeds[0])
        shape = (LAYERS, batch + 2, ROOM, self.width)
        host, there = HOST.zeros(shape, kind), memory.zeros(shape, kind)
        slots, lengths = rng.permutation(batch + 2)[:batch], rng.integers(0, ROOM // 2, batch)
        some = rng.integers(0, 6, batch)
        for counts, T in ((some, 5), (np.eye(batch, dtype=np.int64)[0] * 3, 3), (np.ones(batch, np.int64), 1),
                          ((some > 2).astype(np.int64), 1)):
            made = rng.standard_normal((LAYERS, batch, T, self.width)).astype(kind)
            HOST.write_rows(host, made, slots, lengths, counts)
            memory.write_rows(there, made, slots, lengths, counts)
            lengths = lengths + counts
        found = cast("DeviceArray", there).numpy()
        wrong = int((found.view(np.uint8) != host.view(np.uint8)).sum())
        new = memory.zeros((LAYERS, batch, 1, self.width), kind)
        times = self.device.time(lambda: memory.write_rows(there, new, slots, lengths, np.ones(batch, np.int64)),
                                 budget_s / 4)
        figures = {"bytes": new.nbytes, **beside_floor(times, 2 * new.nbytes, self.report)}
        return Outcome(not wrong, figures, f"{wrong} bytes differ" if wrong else "")

    def steps(self, budget_s: float) -> Outcome:
        """Passes if every step's answer is the one computed on the host, each from its own inputs, also by the graph;
        if one graph was made, and no step moved more than its inputs and its answer."""
        memory = self.device.memory()
        step = _Step(memory, self.sizes.batch, self.width)
        rng = np.random.default_rng(self.sizes.seeds[0])
        past = rng.integers(-8, 8, (self.sizes.batch, ROOM, self.width)).astype(np.float32)
        there = memory.zeros(past.shape, past.dtype)
        there[:] = past
        wrong, moved = 0, set[tuple[int, int]]()
        for _ in range(STEPS):
            query = rng.integers(-8, 8, (self.sizes.batch, self.width)).astype(np.float32)  # exact in any order
            before = memory.uploaded, memory.downloaded
            found = step.run(query, there)
            moved.add((memory.uploaded - before[0], memory.downloaded - before[1]))
            wrong += not np.array_equal(found, np.einsum("br,bsr->bs", query, past))
        times = self.device.time(lambda: step.run(query, there), budget_s / 4)
        faults = [f"{wrong} of {STEPS} answers differ"] if wrong else []
        if len(step.captured) != 1:
            faults.append(f"no CUDA graph: {step.captured.refused}")
        if moved != {step.bytes_moved}:
            faults.append(f"bytes up and down {sorted(moved)}; expected {step.bytes_moved} in every step")
        figures = {"graphs": len(step.captured), "uploaded_bytes": step.bytes_moved[0],
                   "downloaded_bytes": step.bytes_moved[1], **beside_floor(times, past.nbytes, self.report)}
        return Outcome(not faults, figures, "; ".join(faults))


class _Step:
    """Scores of a query per sequence, [B, R] from the host, with its past [B, S, R] on the device: [B, S] to the host.
    The very parts that a TensorRT session's step is made of, but for the engine."""

    def __init__(self, memory: DeviceMemory, batch: int, width: int) -> None:
        self._sizes = {"B": batch, "S": ROOM}
        self._output = TensorSpec("scores", ("B", "S"), "fp32")
        stream: Any = memory.torch.cuda.Stream()
        self._stream, self._past = stream, torch.empty(0)
        self._torch, self._steps = memory.torch, DeviceSteps(memory, stream)
        self.captured = CapturedSteps(memory.torch, stream, object, self._enqueue, lambda: self._steps.staged_outputs)
        self._width = width
        self.bytes_moved = tuple(-(-4 * batch * n // ALIGNMENT) * ALIGNMENT for n in (width, ROOM))

    def run(self, query: np.ndarray, past: np.ndarray) -> np.ndarray:
        """One step."""
        self._past = cast("DeviceArray", past).tensor.view(torch.float32)
        binding = Binding({"query": query.shape, "past": past.shape}, self._steps.bind(
            {"query": query, "past": past}, (self._output,), self._sizes, {}))
        if not self.captured.run(binding):
            self._enqueue(None, binding)
        return self._steps.collect()["scores"]

    def _enqueue(self, context: object, binding: Binding) -> None:
        B, S = self._sizes["B"], self._sizes["S"]
        query = self._steps.staged_inputs[:4 * B * self._width].view(torch.float32).view(B, self._width, 1)
        scores = self._steps.staged_outputs[:4 * B * S].view(torch.float32).view(B, S, 1)
        with self._torch.cuda.stream(self._stream):
            torch.bmm(self._past, query, out=scores)
