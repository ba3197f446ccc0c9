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
from contextlib import suppress
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
    """Bytes of resident memory: of the process with the runtime alone, after loading and a smallest step, what inputs
    and outputs add, and what the step at `sizes` needed beyond both (activations, and whatever the runtime keeps)."""

    bare_bytes: int
    loaded_bytes: int
    io_bytes: int
    activation_bytes: int
    milliseconds: float


def measure(graph: Path, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], sizes: Mapping[str, int],
            threads: int = 0, handed: Places | None = None, timeout: float | None = None,
            option: str = "--timeout") -> StepMemory:
    """Run one step of `graph` at `sizes` in a child process and read its memory. CheckError if the child fails, or
    takes more than `timeout` seconds, which `option` sets.

    `handed`: weight files that lie elsewhere.
    """
    job = {"graph": str(graph.resolve()), "sizes": dict(sizes), "threads": threads,
           "inputs": [asdict(t) for t in inputs], "outputs": [asdict(t) for t in outputs],
           "handed": {name: str(place.resolve()) for name, place in (handed or {}).items()}}
    told = run_child("engines.measure", job, f"{graph.name}: ONNX Runtime", f"at {dict(sizes)}", timeout, option)
    return StepMemory(**told)


def run_child(module: str, job: Mapping[str, Any], who: str, at: str, timeout: float | None = None,
              option: str = "--timeout") -> dict[str, Any]:
    """`python -m module` in a process of its own, its job on stdin, its answer one JSON object. CheckError that says
    `who` failed and `at` what sizes, or that `timeout` seconds, which `option` sets, did not suffice."""
    try:
        child = subprocess.run([sys.executable, "-m", module], input=json.dumps(job), text=True, capture_output=True,
                               timeout=timeout, cwd=Path(__file__).resolve().parent.parent)
    except subprocess.TimeoutExpired:
        raise CheckError(f"{who} was not done after {timeout:.3g} s and was stopped; allow more with {option}"
                         ) from None
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["killed"])[-1].removeprefix("exporter.errors.InputError: ")
        raise CheckError(f"{who} could not run it {at}: {last}")
    answer: dict[str, Any] = json.loads(child.stdout)
    return answer


def available_memory() -> int:
    """Bytes that new processes can have without swapping."""
    return _field("/proc/meminfo", "MemAvailable")


def give_back() -> None:
    """Give what was freed back to the system, where the C library can (glibc's)."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident() -> int:
    """Bytes of this process that lie in memory, what was freed given back first."""
    give_back()
    return _field("/proc/self/status", "VmRSS")


def reset_high_water() -> None:
    """Forget the most that this process had in memory."""
    Path("/proc/self/clear_refs").write_text("5")


def high_water() -> int:
    """The most bytes that this process had in memory since `reset_high_water`."""
    return _field("/proc/self/status", "VmHWM")


def _field(file: str, name: str) -> int:
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{name} is not in {file}")


def _run(job: dict[str, object]) -> StepMemory:
    import time

    import onnx
    import onnxruntime as ort

    from engines import operator_library
    from engines.ort import hand_over

    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, int(job["threads"])  # type: ignore[call-overload]
    places = {name: Path(place) for name, place in job["handed"].items()}  # type: ignore[attr-defined]
    model = onnx.load(str(job["graph"]), load_external_data=False)
    operator_library.register(options, operator_library.needed_by(model))
    del model
    bare = resident()
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
    loaded = resident()
    feed, result = arrays("inputs", job["sizes"]), arrays("outputs", job["sizes"])  # type: ignore[arg-type]
    before = resident()
    reset_high_water()
    milliseconds = step(feed, result)
    del kept  # the session read them until here
    return StepMemory(bare, loaded, before - loaded, max(0, high_water() - before), milliseconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_run(json.loads(sys.stdin.read())))))
