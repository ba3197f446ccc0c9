"""TensorRT and TensorRT-RTX through one door: every call that knows either module is in this file.

`tensorrt_rtx` builds real engines on a machine without a GPU; `tensorrt` needs the GPU that it builds for. Their Python
APIs are the same up to compute-capability targets, so one builder serves both. Imported only when used.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.build_options import PLAIN, BuildOptions
from engines.handed import Places, handed_weights
from exporter.errors import CheckError, InputError
from exporter.signature import Profile

MODULES = {"trt": ("tensorrt", "tensorrt"), "trt-rtx": ("tensorrt_rtx", "rtx")}
_FIGURES = {"activation_bytes": "Total Activation Memory", "weight_bytes": "Total Weights Memory"}


@dataclass(frozen=True)
class Plan:
    """A built engine and the builder's own figures, in bytes. `seconds` is the build's wall time."""

    data: memoryview
    activation_bytes: int
    weight_bytes: int
    seconds: float
    version: str

    @property
    def plan_bytes(self) -> int:
        """Size of the serialised engine."""
        return self.data.nbytes


class BuildError(CheckError):
    """The builder took the graph and could not compile it: its own limit or defect, not the graph's meaning."""


def load(backend: str) -> Any:
    """The TensorRT module of a backend; InputError with the install command if it is missing."""
    module, extra = MODULES[backend]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InputError(f"backend {backend}: Python module {module} is not here ({error}); install it with: "
                         f"pip install -e '.[{extra}]' in the toolkit's checkout") from None


def available(backend: str) -> bool:
    """Whether the module imports."""
    try:
        load(backend)
    except InputError:
        return False
    return True


def compute_capabilities(trt: Any, wanted: Sequence[str], backend: str) -> list[Any]:
    """`--sm 86,120` as the module's enum values; an InputError names what the module knows."""
    if not wanted:
        return []
    if not hasattr(trt, "ComputeCapability"):
        raise InputError(f"--sm {','.join(wanted)}: {backend} builds for the GPU it runs on; leave --sm out")
    known = {name.removeprefix("SM"): getattr(trt.ComputeCapability, name)
             for name in dir(trt.ComputeCapability) if name.startswith("SM")}
    for sm in wanted:
        if sm.replace(".", "") not in known:
            hopper = " (Hopper is served by `tensorrt`)" if sm.replace(".", "") == "90" else ""
            raise InputError(f"--sm {sm}: TensorRT-RTX {trt.__version__} does not list it{hopper}; expected some of "
                             f"{', '.join(sorted(known, key=int))}")
    return [known[sm.replace(".", "")] for sm in wanted]


def _logger(trt: Any) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]
        """Keeps the builder's lines: its figures are only there."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[Any, str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                self.lines.append((severity, message))

        def errors(self) -> list[str]:
            return [m for s, m in self.lines if s <= trt.ILogger.Severity.ERROR]

    return Logger()


def _parse(trt: Any, network: Any, logger: Any, path: Path, handed: Places) -> list[Any]:
    """Fill the network; returns what must live until it is built."""
    parser = trt.OnnxParser(network, logger)
    values = []
    if not handed:
        parsed = parser.parse_from_file(str(path))
    else:
        parsed = parser.load_model_proto(path.read_bytes(), str(path))
        for tensor, raw in handed_weights(path, handed) if parsed else ():
            values.append(raw)
            parsed = parsed and parser.load_initializer(tensor.name, raw.ctypes.data, raw.nbytes)
        parsed = parsed and parser.parse_model_proto()
    if not parsed:
        reasons = "; ".join(" ".join(parser.get_error(i).desc().split()) for i in range(parser.num_errors))
        raise CheckError(f"{path.name}: the TensorRT parser refused it: {reasons or 'no reason given'}")
    return values


def _refuse_unused(logger: Any, path: Path) -> None:
    """The parser drops inputs that it does not implement and only warns (TensorRT-RTX 1.7: during the build):
    the engine would compute something else."""
    unused = [m for _, m in logger.lines if "unused input" in m.lower()]
    if unused:
        raise CheckError(f"{path.name}: the TensorRT parser ignored an input: {unused[0]}")


_FLAGS = {"weight_streaming": "WEIGHT_STREAMING", "strip": "STRIP_PLAN", "refit": "REFIT",
          "version_compatible": "VERSION_COMPATIBLE"}


def build(backend: str, path: Path, profiles: Sequence[Profile], options: BuildOptions = PLAIN,
          handed: Places | None = None) -> Plan:
    """Build one engine from an ONNX file with one optimisation profile or several, numbered in order.

    `handed`: weight files that lie elsewhere. CheckError if the parser refuses or ignores part of the graph, or the
    build fails; InputError for options that the backend does not have.
    """
    trt = load(backend)
    started = time.perf_counter()
    logger = _logger(trt)
    builder = trt.Builder(logger)
    if builder is None:
        raise InputError(f"backend {backend}: its builder needs a CUDA device, none was found")
    network = builder.create_network(0)  # strongly typed: tensors keep the dtypes that the graph declares
    values = _parse(trt, network, logger, path, handed or {})
    config = builder.create_builder_config()
    _configure(trt, config, options, backend)
    for profile in profiles:
        shapes = builder.create_optimization_profile()
        for name, (low, opt, high) in profile.items():
            shapes.set_shape(name, low, opt, high)
        config.add_optimization_profile(shapes)
    data = builder.build_serialized_network(network, config)
    del values  # the network named them until here
    _refuse_unused(logger, path)
    if data is None:
        reasons = "; ".join(" ".join(m.split()) for m in logger.errors())
        raise BuildError(f"{path.name}: {backend} could not build it: {reasons or 'no reason given'}")
    figures = _figures(logger.lines, path, backend)
    return Plan(memoryview(data), **figures, seconds=time.perf_counter() - started, version=trt.__version__)


def _configure(trt: Any, config: Any, options: BuildOptions, backend: str) -> None:
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; fp32 means fp32, or no fp32 tolerance would hold
    capabilities = compute_capabilities(trt, options.sm, backend)
    if capabilities:
        config.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            config.set_compute_capability(capability, index)
    for name, flag in _FLAGS.items():
        if getattr(options, name):
            config.set_flag(getattr(trt.BuilderFlag, flag))
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS


@contextmanager
def parsed(backend: str, path: Path, handed: Places | None = None) -> Iterator[tuple[Any, Any]]:
    """The module, and the network that its parser makes of an ONNX file; both the network's within the block only."""
    trt = load(backend)
    logger = _logger(trt)
    builder = trt.Builder(logger)
    if builder is None:
        raise InputError(f"backend {backend}: its builder needs a CUDA device, none was found")
    network = builder.create_network(0)
    values = _parse(trt, network, logger, path, handed or {})
    yield trt, network
    del values  # the network named them until here


def _figures(lines: Sequence[tuple[Any, str]], path: Path, backend: str) -> dict[str, int]:
    found = {}
    for key, label in _FIGURES.items():
        values = [int(m[1]) for _, line in lines if (m := re.search(rf"{label}: (\d+) bytes", line))]
        if not values:
            raise CheckError(f"{path.name}: {backend}'s builder did not log '{label}'; this version is not understood")
        found[key] = values[-1]
    return found
