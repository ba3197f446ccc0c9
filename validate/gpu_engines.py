"""Rungs of engines on the device: one layer exported aside, built, climbed by the parity ladder, timed.

A backend whose library is missing, or whose list leaves this GPU out, is not run, with that reason.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import trt
from engines.backends import backend, open_session
from engines.build import BuildRequest, Engines, build
from engines.device_memory import DeviceMemory
from engines.memory import HOST
from engines.records import rebuild_command
from engines.roofline import attention_parameters
from engines.session import Feed, Session, output_shape
from engines.trt_runtime import AS_BUILT, LoadedEngine, loaded
from exporter.dtypes import DTYPES, NUMPY_OF_NAME
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, GraphEntry
from exporter.presets import preset_config
from validate.eager import cache_bytes, weight_numbers
from validate.gpu_device import Device
from validate.gpu_eager import DEVICE, TORCH_DTYPES, beside_floor
from validate.gpu_rungs import NotRunError, Outcome, Report, Rung, Sizes
from validate.ladder import Ladder
from validate.parity import Answers, check

BACKENDS = ("trt", "trt-rtx", "ort-cuda")
BUILD_SHARE, TIME_SHARE = 0.35, 0.2  # of a rung's seconds: one of its two builds, its timing
REPEATED = 1e-3  # rel between two runs of one step: sums may come in another order
FORMULATION = "kqt"  # both kinds in one form: the lean one, and two builds instead of all candidates'
ARCHITECTURES = {"7.0": "Volta", "7.5": "Turing", "8.0": "Ampere", "8.6": "Ampere", "8.9": "Ada", "9.0": "Hopper",
                 "10.0": "Blackwell", "10.3": "Blackwell", "12.0": "Blackwell", "12.1": "Blackwell"}


def rungs(sizes: Sizes, device: Device | None, report: Report) -> list[Rung]:
    """One per backend and dtype."""
    bench = _Bench(sizes, device, report)
    what = (f"{sizes.preset} exported (append), {{}}parity, a decode step at batch {sizes.batch} over "
            f"{', '.join(map(str, sizes.contexts))} rows")
    return [Rung(f"engine/{name}/{dtype}", what.format("built, " if backend(name).tensorrt else "opened, "), 100,
                 partial(bench.engine, name, dtype))
            for name in BACKENDS for dtype in sizes.engine_dtypes]


def why_not(name: str, capability: str) -> str | None:
    """Why a backend cannot run on a device of this compute capability; None if it may."""
    if name == "ort-cuda":
        return _why_not_ort()
    module_name = trt.MODULES[name][0]
    try:
        module = trt.load(name)
    except InputError as error:
        missing = importlib.util.find_spec(module_name) is None
        return f"{name}: not run: " + (f"module {module_name} is not installed" if missing else str(error))
    if hasattr(module, "ComputeCapability"):
        try:
            trt.compute_capabilities(module, [capability], name)
        except InputError:
            known = ARCHITECTURES.get(capability)
            return (f"{name}: not run: TensorRT-RTX {module.__version__} does not list compute capability {capability}"
                    + (f" ({known})" if known else ""))
    return None


def _why_not_ort() -> str | None:
    if importlib.util.find_spec("onnxruntime") is None:
        return "ort-cuda: not run: module onnxruntime is not installed"
    from engines.ort_cuda import CUDA, cuda_available

    return None if cuda_available() else f"ort-cuda: not run: the installed ONNX Runtime has no {CUDA}"


class _Bench:
    """Exports, builds, climbs and times."""

    def __init__(self, sizes: Sizes, device: Device | None, report: Report) -> None:
        self.sizes, self.report, self.config = sizes, report, preset_config(sizes.preset)
        self._device = device

    def engine(self, name: str, dtype: str, budget_s: float) -> Outcome:
        """Passes if the parity ladder does, and the backend's graphs were among its rungs."""
        assert self._device is not None
        capability = self.report.figure(DEVICE, "capability") or self._device.facts()["capability"]
        reason = why_not(name, capability)
        if reason:
            raise NotRunError(reason.removeprefix(f"{name}: not run: "))
        self._device.release()
        with tempfile.TemporaryDirectory(prefix="mla-gpu-") as temporary:
            made = export(ExportRequest(self.sizes.preset, Path(temporary) / "layer", dtype=dtype, cache="append",
                                        target=backend(name).target, prefill="absorbed", seed=self.sizes.seeds[0],
                                        max_context=max(*self.sizes.contexts, self.sizes.parity_context)))
            built = self._build(made, name, budget_s * BUILD_SHARE) if backend(name).tensorrt else None
            figures = {} if built is None else _figures(built)
            ladder = Ladder()
            check(made, ladder, Answers.of(made, self.sizes.seeds[0]), backends=[name])
            figures |= _parity(ladder, name)
            if not figures["counted"]:
                reason = "; ".join(ladder.not_run) or "no reason given"
                if built is None:  # ONNX Runtime lacks a kernel: nothing that we built
                    raise NotRunError(reason.replace(f"{name}, {dtype}: not run: ", ""))
                return Outcome(False, figures, f"no graph ran: {reason}")
            if figures["red"]:
                return Outcome(False, figures, f"parity: {', '.join(figures['red'])}")
            if built is not None:
                figures["steps"] = self._time_plan(made, name, built, figures, budget_s * TIME_SHARE / 2)
            figures["session"] = self._time_session(made, name, budget_s * TIME_SHARE / 2)
        return Outcome(True, figures)

    def _build(self, made: Export, name: str, timeout: float) -> Engines:
        """Decode and prefill, a plan each, built now."""
        started = time.monotonic()
        try:
            return build(BuildRequest(made.folder, name, max_batch=self.sizes.batch, max_context=made.max_context,
                                      chunk=self.sizes.chunk, formulation=FORMULATION, layout="split",
                                      opt_search=False, cache=False, timeout=timeout))
        except trt.BuildError as error:
            if time.monotonic() - started >= timeout:  # stopped: that says nothing of the engine
                raise NotRunError(str(error)) from None
            raise

    def _floor_bytes(self, dtype: str, rows: int) -> int:
        width = DTYPES[dtype].itemsize
        return (width * weight_numbers(self.config, "absorbed", attention_parameters(self.config))
                + cache_bytes(self.config, "absorbed", self.sizes.batch, rows, width))

    def _time_plan(self, made: Export, name: str, built: Engines, figures: dict[str, Any],
                   budget_s: float) -> list[dict[str, Any]]:
        """Decode steps of the built engine, buffers on the device; also what the engine itself says it takes."""
        assert self._device is not None
        graph, found = made.graph("decode", FORMULATION), []
        record = built.record(graph.name)
        # no weights to refit: the plan was built with them
        engine = loaded(name, built.plan(graph.name), rebuild_command(made, name), AS_BUILT, dict)
        figures["device_memory_bytes"] = int(engine.engine.device_memory_size_v2)
        for rows in self.sizes.contexts:
            sizes = {"B": self.sizes.batch, "T": 1, "S": rows}
            with (self._device.queue() as queue,
                  bound(engine, graph, sizes, record.profile_of("decode") or 0, queue, self._device.torch) as step):
                times = self._device.time(step, budget_s / len(self.sizes.contexts))
            found.append({"rows": rows, **beside_floor(times, self._floor_bytes(made.dtype, rows), self.report)})
        return found

    def _time_session(self, made: Export, name: str, budget_s: float) -> list[dict[str, Any]]:
        """Decode steps through the session as a server makes them: the past on the device where the session has memory
        there, new rows staged there, and CUDA graphs. CheckError where a step by its graph answers otherwise."""
        assert self._device is not None
        found = []
        with open_session(made, "decode", name) as session:
            for rows in self.sizes.contexts:
                drawn = draw(session.graph, {"B": self.sizes.batch, "T": 1, "S": rows}, "cpu")
                feed, out = self._placed(session, {
                    spec.name: drawn[spec.name].float().numpy().astype(NUMPY_OF_NAME[spec.dtype])
                    for spec in session.graph.inputs})
                first = session.infer(feed, out)["attn_output"]
                for _ in range(3):  # by then there is a graph
                    rel = _rel(session.infer(feed, out)["attn_output"], first)
                    if not rel <= REPEATED:
                        raise CheckError(f"{rows} rows: the same step again differs by rel {rel:.1e}, as a CUDA graph "
                                         f"or as it is; expected at most {REPEATED:g}")
                times = self._device.time(partial(session.infer, feed, out), budget_s / len(self.sizes.contexts))
                found.append({"rows": rows, **beside_floor(times, self._floor_bytes(made.dtype, rows), self.report),
                              **_crossed(session, feed, out)})
        return found

    def _placed(self, session: Session, feed: dict[str, np.ndarray]) -> tuple[dict[str, np.ndarray], Feed]:
        """The past where the session has its memory, and places for new rows there."""
        memory, out = session.memory, {}
        if memory is not HOST:
            for name in [name for name in feed if name.startswith("past_latent.")]:
                there = memory.zeros(feed[name].shape, feed[name].dtype)
                there[:] = feed[name]
                shape = (self.sizes.batch, 1, feed[name].shape[2])
                feed[name], out[name.replace("past", "new")] = there, memory.zeros(shape, feed[name].dtype)
        return feed, out


def _crossed(session: Session, feed: Feed, out: Feed) -> dict[str, Any]:
    """Bytes of one more step that went to the device and came from it; nothing of a session that keeps no count."""
    memory = session.memory
    if not isinstance(memory, DeviceMemory):
        return {}
    before = memory.uploaded, memory.downloaded
    session.infer(feed, out)
    return {"uploaded_bytes": memory.uploaded - before[0], "downloaded_bytes": memory.downloaded - before[1]}


def _rel(found: np.ndarray, expected: np.ndarray) -> float:
    a, b = found.astype(np.float64), expected.astype(np.float64)
    return float(np.abs(a - b).max() / b.std())


def _parity(ladder: Ladder, name: str) -> dict[str, Any]:
    """How many rungs of a backend were counted, its worst, and all that are red."""
    counted = [r for r in ladder.rungs if r.counted and r.name.startswith(f"{name}/")]
    figures: dict[str, Any] = {"counted": len(counted), "red": [
        f"{r.name} rel {r.rel:.1e}" + (f" ({r.note})" if r.note else "")
        for r in ladder.rungs if r.counted and not r.passed]}
    if counted:
        worst = max(counted, key=lambda r: r.rel / max(r.tolerance, 1e-30))
        figures |= {"rel": worst.rel, "tolerance": worst.tolerance, "worst": worst.name}
    return figures


def _figures(built: Engines) -> dict[str, Any]:
    """The builder's figures of the kept engines, by kind."""
    return {f"{kind}_engine": {"activation_bytes": e.activation_bytes, "plan_bytes": e.plan_bytes, "seconds": e.seconds}
            for kind in ("decode", "prefill") for e in built.engines if e.kind == kind and e.file}


def draw(graph: GraphEntry, sizes: Mapping[str, int], device: str) -> dict[str, torch.Tensor]:
    """A graph's inputs on a device: standard normal numbers, and lengths that make every row of past count."""
    drawn = {}
    for spec in graph.inputs:
        shape = output_shape(spec.shape, sizes)
        if spec.dtype == "int64":
            drawn[spec.name] = torch.full(shape, sizes["S"], dtype=torch.int64, device=device)
        else:
            drawn[spec.name] = torch.randn(shape, device=device).to(TORCH_DTYPES[spec.dtype])
    return drawn


@contextmanager
def bound(engine: LoadedEngine, graph: GraphEntry, sizes: Mapping[str, int], profile: int, queue: int, device: str
          ) -> Iterator[Callable[[], None]]:
    """One step of a loaded engine over buffers that stay on the device, enqueued on the stream `queue`.

    InputError where the engine's profile leaves the sizes out.
    """
    context, host = engine.context(profile, queue), trt.load(engine.backend).TensorLocation.HOST
    try:
        buffers = draw(graph, sizes, device)
        for name, tensor in buffers.items():
            if not context.set_input_shape(name, tuple(tensor.shape)):
                raise InputError(f"{graph.name}: {name} {list(tensor.shape)} is outside the engine's profile")
            if engine.engine.get_tensor_location(name) == host:  # a tensor that shapes depend on is read on the host
                buffers[name] = tensor.cpu()
        for spec in graph.outputs:
            buffers[spec.name] = torch.empty(output_shape(spec.shape, sizes), dtype=TORCH_DTYPES[spec.dtype],
                                             device=device)
        for name, tensor in buffers.items():
            context.set_tensor_address(name, tensor.data_ptr())

        def step() -> None:
            if not context.execute_async_v3(queue):
                raise InputError(f"{graph.name}: the engine refused to run: {trt.reasons(engine.logger)}")

        yield step
    finally:
        engine.release()
