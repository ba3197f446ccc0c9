"""TensorRT and TensorRT-RTX through one door: every call that builds with either module is in this file.

`tensorrt_rtx` builds real engines on a machine without a GPU; `tensorrt` needs the GPU that it builds for. Their Python
APIs are the same but for what `check_options` tells apart, so one builder serves both. Imported only when used. What
loads and runs an engine is in `trt_runtime.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.build_options import PLAIN, BuildOptions
from engines.handed import Places, handed_weights
from exporter.errors import CheckError, InputError
from exporter.output import write_file
from exporter.signature import Profile

if TYPE_CHECKING:  # the types of both modules: mypy checks against tensorrt-stubs where `make stubs` put them
    import tensorrt as tensorrt

MODULES = {"trt": ("tensorrt", "tensorrt"), "trt-rtx": ("tensorrt_rtx", "rtx")}
LEAN_RUNTIME = "libnvinfer_lean.so.1"
_FIGURES = {"activation_bytes": "Total Activation Memory", "weight_bytes": "Total Weights Memory"}
_FLAGS = {"weight_streaming": "WEIGHT_STREAMING", "strip": "STRIP_PLAN", "refit": "REFIT",
          "version_compatible": "VERSION_COMPATIBLE"}


@dataclass(frozen=True)
class Plan:
    """A built engine and the builder's own figures, in bytes. `seconds` is the build's wall time.

    `activation_bytes` is the largest of `profile_activation_bytes`, one figure per optimisation profile.
    """

    data: memoryview
    activation_bytes: int
    weight_bytes: int
    seconds: float
    version: str
    profile_activation_bytes: tuple[int, ...] = ()

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
        found = importlib.import_module(module)
        if not hasattr(found, "Builder"):  # a folder of that name, as of stubs, imports as an empty namespace
            raise ImportError(f"{list(getattr(found, '__path__', []))} holds no module")
    except ImportError as error:
        raise InputError(f"backend {backend}: Python module {module} is not here ({error}); install it with: "
                         f"pip install -e '.[{extra}]' in the toolkit's checkout") from None
    return found


def available(backend: str) -> bool:
    """Whether the module imports."""
    try:
        load(backend)
    except InputError:
        return False
    return True


def cuda_device() -> bool:
    """Whether the driver finds a CUDA device. No context is made, but a process that forks afterwards hands its child
    a driver that cannot be used."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int()
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


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


def check_options(backend: str, options: BuildOptions) -> None:
    """InputError for what a backend, or this machine, cannot build: in front of the build, which would fail late and
    with less of a reason, or take the option and do nothing."""
    trt = load(backend)
    compute_capabilities(trt, options.sm, backend)
    cache = options.timing_cache
    if cache and (cache.is_dir() or not cache.absolute().parent.is_dir()):
        raise InputError(f"--timing-cache {cache}: {'a folder' if cache.is_dir() else 'its folder does not exist'}; "
                         "expected a file, or a name for a new one")
    if backend != "trt-rtx":
        return
    name = f"TensorRT-RTX {trt.__version__}"
    if options.hardware_compatible:
        raise InputError("--hardware-compatible: a level of TensorRT, for Ampere and newer; an engine of TensorRT-RTX "
                         "runs on the targets that --sm names, such as --sm 80,86,89,120, or by default from Ampere on")
    if options.timing_cache:
        raise InputError("--timing-cache: TensorRT times kernels while it builds; TensorRT-RTX compiles them when an "
                         "engine is loaded and keeps them in a runtime cache beside it; leave --timing-cache out")
    if options.strip or options.refit:
        option = "--strip" if options.strip else "--refit"
        if len(options.sm) > 1:
            raise InputError(f"{option} --sm {','.join(options.sm)}: {name} builds a refittable engine for one compute "
                             "capability at most; build one engine for each")
        if not cuda_device():
            raise InputError(f"{option}: {name} compiles a refittable engine on a GPU (its Myelin asks CUDA during the "
                             f"build), and no CUDA device was found; build where there is one, or leave {option} out")
    if options.version_compatible and not _loads(LEAN_RUNTIME):
        raise InputError(f"--version-compatible: {name} puts its lean runtime into such an engine, and {LEAN_RUNTIME} "
                         "is not found (its Python package brings none); put it on the library path, or leave "
                         "--version-compatible out")


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def make_logger(backend: str) -> Any:
    """A logger of the backend's module that keeps its lines: the builder's figures are only there. `errors()` gives
    TensorRT's own reasons."""
    trt = load(backend)

    class Logger(trt.ILogger):  # type: ignore[misc, name-defined]
        """(severity, message) of all that TensorRT says, up to INFO."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[Any, str]] = []

        def log(self, severity: Any, message: str) -> None:
            if severity <= trt.ILogger.Severity.INFO:
                self.lines.append((severity, message))

        def errors(self) -> list[str]:
            return [m for s, m in self.lines if s <= trt.ILogger.Severity.ERROR]

    return Logger()


def reasons(logger: Any) -> str:
    """TensorRT's errors on one line."""
    return "; ".join(" ".join(line.split()) for line in logger.errors()) or "no reason given"


def _parse(backend: str, network: tensorrt.INetworkDefinition, logger: Any, path: Path, handed: Places) -> list[Any]:
    """Fill the network; returns what must live until it is built."""
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
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
        why = "; ".join(" ".join(parser.get_error(i).desc().split()) for i in range(parser.num_errors))
        raise CheckError(f"{path.name}: the TensorRT parser refused it: {why or 'no reason given'}")
    return values


def _refuse_unused(logger: Any, path: Path) -> None:
    """The parser drops inputs that it does not implement and only warns (TensorRT-RTX 1.7: during the build):
    the engine would compute something else."""
    unused = [m for _, m in logger.lines if "unused input" in m.lower()]
    if unused:
        raise CheckError(f"{path.name}: the TensorRT parser ignored an input: {unused[0]}")


@contextmanager
def _network(backend: str, path: Path, handed: Places | None, logger: Any
             ) -> Iterator[tuple[tensorrt.Builder, tensorrt.INetworkDefinition]]:
    """A builder, and the network that the parser makes of an ONNX file."""
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
    try:
        builder = trt.Builder(logger)
    except TypeError:  # what pybind11 makes of a factory that gave nothing
        raise InputError(f"backend {backend}: its builder needs a CUDA device, none was found ({reasons(logger)})"
                         ) from None
    # tensors keep the dtypes that the graph declares: TensorRT 10 wants to be told, later ones always do so
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    values = _parse(backend, network, logger, path, handed or {})
    yield builder, network
    del values  # the network named them until here


def build(backend: str, path: Path, profiles: Sequence[Profile], options: BuildOptions = PLAIN,
          handed: Places | None = None) -> Plan:
    """Build one engine from an ONNX file with one optimisation profile or several, numbered in order.

    `handed`: weight files that lie elsewhere. CheckError if the parser refuses or ignores part of the graph, or the
    build fails; InputError for options that the backend does not have.
    """
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
    check_options(backend, options)
    started = time.perf_counter()
    logger = make_logger(backend)
    with _network(backend, path, handed, logger) as (builder, network):
        config = builder.create_builder_config()
        _configure(backend, config, options)
        for profile in profiles:
            shapes = builder.create_optimization_profile()
            for name, sizes in profile.items():
                shapes.set_shape(name, *(trt.Dims(list(size)) for size in sizes))
            config.add_optimization_profile(shapes)
        cache = _read_timing_cache(config, options.timing_cache)
        data = builder.build_serialized_network(network, config)
    _refuse_unused(logger, path)
    if data is None:
        raise BuildError(f"{path.name}: {backend} could not build it: {reasons(logger)}")
    figures = _figures(logger.lines, path, backend)
    if cache is not None and options.timing_cache:
        _write_timing_cache(config, cache, options.timing_cache)
    activation = figures["activation_bytes"][-len(profiles):]
    return Plan(memoryview(data), max(activation), figures["weight_bytes"][-1], time.perf_counter() - started,
                trt.__version__, tuple(activation))


def _configure(backend: str, config: tensorrt.IBuilderConfig, options: BuildOptions) -> None:
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
    config.clear_flag(trt.BuilderFlag.TF32)  # on by default; fp32 means fp32, or no fp32 tolerance would hold
    for name, flag in _FLAGS.items():
        if getattr(options, name):
            config.set_flag(getattr(trt.BuilderFlag, flag))
    if options.hardware_compatible:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS
    capabilities = compute_capabilities(trt, options.sm, backend)
    if capabilities:
        rtx: Any = config  # targets are TensorRT-RTX's alone
        rtx.num_compute_capabilities = len(capabilities)
        for index, capability in enumerate(capabilities):
            rtx.set_compute_capability(capability, index)


def _read_timing_cache(config: tensorrt.IBuilderConfig, path: Path | None) -> tensorrt.ITimingCache | None:
    """The cache that the build reads and fills, from a file or new."""
    if path is None:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if cache is None or not config.set_timing_cache(cache, False):
        raise InputError(f"--timing-cache {path}: not a timing cache of this TensorRT and this GPU; name another file, "
                         "or delete it to start anew")
    return cache


def _write_timing_cache(config: tensorrt.IBuilderConfig, cache: tensorrt.ITimingCache, path: Path) -> None:
    """Written beside and renamed, together with what another build may have added meanwhile."""
    if path.is_file():
        other = config.create_timing_cache(path.read_bytes())
        if other is not None:
            cache.combine(other, False)
    try:
        write_file(path, memoryview(cache.serialize()))
    except OSError as error:
        raise InputError(f"--timing-cache {path}: cannot write it: {error.strerror or error}; choose another place"
                         ) from None


@contextmanager
def parsed(backend: str, path: Path, handed: Places | None = None) -> Iterator[tuple[Any, Any]]:
    """The module, and the network that its parser makes of an ONNX file; both the network's within the block only."""
    with _network(backend, path, handed, make_logger(backend)) as (_, network):
        yield load(backend), network


def _figures(lines: Sequence[tuple[Any, str]], path: Path, backend: str) -> dict[str, list[int]]:
    """What the builder logged, in order: activation once for each profile, weights once."""
    found = {}
    for key, label in _FIGURES.items():
        values = [int(m[1]) for _, line in lines if (m := re.search(rf"{label}: (\d+) bytes", line))]
        if not values:
            raise CheckError(f"{path.name}: {backend}'s builder did not log '{label}'; this version is not understood")
        found[key] = values
    return found
