"""Peak memory of one ONNX Runtime step, measured in a process of its own (`python -m engines.measure`).

In-process figures mix in everything that ran before. Here the process loads one graph, touches its weights with a
smallest step, allocates inputs and outputs, resets the kernel's high-water mark and runs the step once.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.handed import Places
from engines.session import output_shape
from exporter.dtypes import NUMPY_OF_NAME, ONNX_OF_NAME
from exporter.errors import CheckError
from exporter.signature import TensorSpec


@dataclass(frozen=True)
class StepMemory:
    """Bytes of resident memory: after loading and a smallest step, what inputs and outputs add, and what the step at
    `sizes` needed beyond both (activations, and whatever the runtime keeps)."""

    loaded_bytes: int
    io_bytes: int
    activation_bytes: int
    milliseconds: float


def measure(graph: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], sizes: Mapping[str, int],
            threads: int = 0, handed: Places | None = None, timeout: float | None = None) -> StepMemory:
    """Run one step of `graph` at `sizes` in a child process and read its memory. CheckError if the child fails, or
    takes more than `timeout` seconds.

    `handed`: weight files that lie elsewhere.
    """
    job = {"graph": str(graph.resolve()), "sizes": dict(sizes), "threads": threads,
           "inputs": [asdict(t) for t in inputs], "outputs": [asdict(t) for t in outputs],
           "handed": {name: str(place.resolve()) for name, place in (handed or {}).items()}}
    try:
        child = subprocess.run([sys.executable, "-m", "engines.measure"], input=json.dumps(job), text=True,
                               capture_output=True, timeout=timeout, cwd=Path(__file__).resolve().parent.parent)
    except subprocess.TimeoutExpired:
        raise CheckError(f"{graph.name}: ONNX Runtime was not done after {timeout:g} s and was stopped; allow more "
                         "with --timeout") from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["killed"])[-1]
        raise CheckError(f"{graph.name}: ONNX Runtime could not run it at {dict(sizes)}: {last}")
    return StepMemory(**json.loads(child.stdout))


def available_memory() -> int:
    """Bytes that new processes can have without swapping."""
    return _field("/proc/meminfo", "MemAvailable")


def _resident(field: str) -> int:
    return _field("/proc/self/status", field)


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not in {file}")


def _run(job: dict[str, object]) -> StepMemory:
    import time

    import onnxruntime as ort

    from engines.ort import hand_over

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, int(job["threads"])  # type: ignore[call-overload]
    places = {name: Path(place) for name, place in job["handed"].items()}  # type: ignore[attr-defined]
    kept = hand_over(Path(str(job["graph"])), places, options)
    session = ort.InferenceSession(str(job["graph"]), options, providers=["CPUExecutionProvider"])

    def arrays(side: str, sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
        made = {}
        for t in job[side]:  # type: ignore[attr-defined]
            if t["name"].startswith("latent_cache_out."):
                continue  # at its input's address
            shape, dtype = output_shape(tuple(t["shape"]), sizes), NUMPY_OF_NAME[t["dtype"]]
            made[t["name"]] = np.full(shape, 0 if t["dtype"] == "int64" else 0.01, dtype)
        if "past_lengths" in made:
            past = sizes.get("S", 0)
            made["past_lengths"] += past if "past_latent.0" in made else 0
        return made

    types = {t["name"]: ONNX_OF_NAME[t["dtype"]] for side in ("inputs", "outputs")
             for t in job[side]}  # type: ignore[attr-defined]

    def value(name: str, array: np.ndarray) -> Any:  # NumPy alone has no name for some of the types
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, types[name])

    def step(feed: dict[str, np.ndarray], result: dict[str, np.ndarray], shrink: bool = False) -> float:
        binding, options = session.io_binding(), ort.RunOptions()
        if shrink:  # give back what the step took: a later one would find it there, and seem to need less
            options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, value(name, array))
            if name.startswith("latent_cache."):
                binding.bind_ortvalue_output(name.replace(".", "_out."), value(name, array))
        for name, array in result.items():
            binding.bind_ortvalue_output(name, value(name, array))
        start = time.perf_counter()
        session.run_with_iobinding(binding, options)
        return 1e3 * (time.perf_counter() - start)

    smallest = dict.fromkeys(job["sizes"], 1)  # type: ignore[call-overload]
    step(arrays("inputs", smallest), arrays("outputs", smallest), shrink=True)
    ctypes.CDLL(None).malloc_trim(0)
    loaded = _resident("VmRSS")
    feed, result = arrays("inputs", job["sizes"]), arrays("outputs", job["sizes"])  # type: ignore[arg-type]
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present
    milliseconds = step(feed, result)
    del kept  # the session read them until here
    return StepMemory(loaded, before - loaded, max(0, _resident("VmHWM") - before), milliseconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_run(json.loads(sys.stdin.read())))))
