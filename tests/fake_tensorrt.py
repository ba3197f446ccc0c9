"""A stand-in for the module `tensorrt`, which needs a GPU: it records what it is told, and runs engines on the CPU.

Only the calls that the toolkit makes are here, with the semantics that NVIDIA's API reference gives them. An engine is
an ONNX graph that ONNX Runtime computes on the very memory that its context was pointed to.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import onnxruntime
import torch
from torch.utils._python_dispatch import TorchDispatchMode

FIGURES = ("Total Activation Memory: {} bytes", "Total Weights Memory: 77 bytes")


class Severity(IntEnum):
    INTERNAL_ERROR = 0
    ERROR = 1
    WARNING = 2
    INFO = 3
    VERBOSE = 4


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


class BuilderFlag(IntEnum):
    TF32 = 0
    WEIGHT_STREAMING = 1
    STRIP_PLAN = 2
    REFIT = 3
    VERSION_COMPATIBLE = 4


class TimingCache:
    """Entries as the words of its bytes; a cache of another device begins with `other`."""

    def __init__(self, data: bytes) -> None:
        self.words = data.split()

    def combine(self, other: TimingCache, ignore_mismatch: bool) -> bool:
        self.words += [word for word in other.words if word not in self.words]
        return True

    def serialize(self) -> bytes:
        return b" ".join(self.words)


class Config:
    def __init__(self) -> None:
        self.flags = {BuilderFlag.TF32}
        self.profiles: list[dict[str, Any]] = []
        self.hardware_compatibility_level: str | None = None
        self.cache: TimingCache | None = None

    def set_flag(self, flag: BuilderFlag) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: BuilderFlag) -> None:
        self.flags.discard(flag)

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles.append(profile.shapes)

    def create_timing_cache(self, data: bytes) -> TimingCache | None:
        return None if data.startswith(b"garbage") else TimingCache(bytes(data))

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return cache.words[:1] != [b"other"] or ignore_mismatch


class Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, *sizes: Any) -> None:
        self.shapes[name] = sizes


def module(during_build: Callable[[Config], Any] = lambda config: b"plan", device: bool = True) -> SimpleNamespace:
    """The module. `during_build` gives the plan (None: the build failed); `built` collects what each build was told."""
    built: list[Config] = []

    class Builder:
        def __init__(self, logger: Any) -> None:
            if not device:
                raise TypeError("pybind11::init(): factory function returned nullptr")
            self.logger = logger

        def create_network(self, flags: int) -> SimpleNamespace:
            made.network_flags.append(flags)
            return SimpleNamespace()

        create_builder_config = staticmethod(Config)
        create_optimization_profile = staticmethod(Profile)

        def build_serialized_network(self, network: Any, config: Config) -> bytes | None:
            built.append(config)
            plan: bytes | None = during_build(config)
            if plan is None:
                self.logger.log(Severity.ERROR, "out of\n  kernels")
            for number in range(len(config.profiles)):
                self.logger.log(Severity.INFO, FIGURES[0].format(1000 - number))
            self.logger.log(Severity.INFO, FIGURES[1])
            return plan

    class OnnxParser:
        num_errors = 0

        def __init__(self, network: Any, logger: Any) -> None:
            pass

        def parse_from_file(self, path: str) -> bool:
            return True

    made = SimpleNamespace(
        __version__="10.16.0", ILogger=ILogger, BuilderFlag=BuilderFlag, Builder=Builder, OnnxParser=OnnxParser,
        Dims=tuple, NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1), network_flags=[], built=built,
        HardwareCompatibilityLevel=SimpleNamespace(AMPERE_PLUS="ampere+"))
    return made


# --- Running ----------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """What `Refitter` is handed: a dtype, an address, a count."""

    dtype: str
    pointer: int
    size: int


class Refitter:
    """The real one checks size and dtype as this does, and keeps what it was handed until it refits."""

    def __init__(self, engine: Engine, logger: Any) -> None:
        self.engine, self.logger = engine, logger

    def get_all_weights(self) -> list[str]:
        return list(self.engine.prototypes)

    def get_missing_weights(self) -> list[str]:
        return [name for name in self.engine.lacking if name not in self.engine.handed]

    def get_weights_prototype(self, name: str) -> Weights:
        dtype, count = self.engine.prototypes[name]
        return Weights(dtype, 0, count)

    def set_named_weights(self, name: str, weights: Weights) -> bool:
        if name in self.engine.refuses:
            self.logger.log(Severity.ERROR, f"will not take {name}")
            return False
        width = {"FLOAT": 4, "HALF": 2, "BF16": 2, "INT64": 8}[weights.dtype]
        self.engine.handed[name] = ctypes.string_at(weights.pointer, weights.size * width)
        return True

    def refit_cuda_engine(self) -> bool:
        self.engine.refits += 1
        return not self.get_missing_weights()


class Engine:
    """An engine whose plan names an ONNX graph; its contexts run it in ONNX Runtime, on the memory they are pointed to.

    `profiles`: the most new tokens of each optimisation profile.
    """

    def __init__(self, graph: Path, profiles: tuple[int, ...] = (1 << 30,), streamable: int = 0) -> None:
        self.graph, self.profiles, self.streamable_weights_size = graph, profiles, streamable
        self.prototypes: dict[str, tuple[str, int]] = {}
        self.lacking: set[str] = set()
        self.refuses: set[str] = set()
        self.handed: dict[str, bytes] = {}
        self.refits = 0
        self.weight_streaming_budget_v2 = streamable
        self.contexts: list[Context] = []
        self.host_tensors: set[str] = set()

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    @property
    def refittable(self) -> bool:
        return bool(self.prototypes)

    def get_tensor_location(self, name: str) -> str:
        return "host" if name in self.host_tensors else "device"

    def create_execution_context(self, how: Any = None) -> Context:
        """`how`: TensorRT-RTX's settings, or a strategy of allocation."""
        self.contexts.append(Context(self, None if isinstance(how, str) else how))
        self.contexts[-1].scratch = None if how == "user managed" else (0, 0)
        return self.contexts[-1]

    def get_device_memory_size_for_profile_v2(self, profile: int) -> int:
        return 1000 + profile

    def create_runtime_config(self) -> SimpleNamespace:
        made = SimpleNamespace(cache=None)
        made.create_runtime_cache = RuntimeCache
        made.set_runtime_cache = lambda cache: setattr(made, "cache", cache)
        return made

    def create_serialization_config(self) -> Config:
        return Config()

    def serialize_with_config(self, config: Config) -> bytes:
        assert {"exclude", "include refit"} & set(map(str, config.flags)) == {"include refit"}
        return b"refitted " + b"".join(hashlib.sha256(self.handed[n]).digest() for n in sorted(self.handed))


class RuntimeCache:
    """Kernels as words; a file that another GPU wrote is refused, and the cache stays as it was."""

    def __init__(self) -> None:
        self.words: list[bytes] = []

    def deserialize(self, data: bytes) -> bool:
        if data.startswith(b"other"):
            return False
        self.words += data.split()
        return True

    def serialize(self) -> bytes:
        return b" ".join(self.words)


class Context:
    def __init__(self, engine: Engine, settings: Any) -> None:
        self.engine, self.settings, self.profile = engine, settings, 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.streams: set[int] = set()
        self.scratch: tuple[int, int] | None = None  # address and size; None: it has to be given some
        self.enqueued = 0
        self.session = onnxruntime.InferenceSession(str(engine.graph), providers=["CPUExecutionProvider"])

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self.profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = tuple(shape)
        return name not in ("hidden_states", "input_ids") or shape[1] <= self.engine.profiles[self.profile]

    def set_tensor_address(self, name: str, address: int) -> None:
        self.addresses[name] = address

    def set_device_memory(self, address: int, size: int) -> None:
        self.scratch = address, size

    def execute_async_v3(self, stream: int) -> bool:
        assert self.scratch is not None, "a context without scratch memory"
        self.streams.add(stream)
        self.enqueued += 1
        if Graph.under_way is not None:
            Graph.under_way.steps.append((self, dict(self.shapes), dict(self.addresses)))
            return True
        return self.compute()

    def compute(self) -> bool:
        feed = {i.name: self._at(i.name, i.type, self.shapes[i.name]).copy() for i in self.session.get_inputs()}
        for spec, value in zip(self.session.get_outputs(), self.session.run(None, feed), strict=True):
            self._at(spec.name, spec.type, value.shape)[...] = value
        if self.settings is not None:
            self.settings.cache.words.append(b"kernel%d" % self.profile)
        return True

    def _at(self, name: str, kind: str, shape: tuple[int, ...]) -> Any:
        dtype = np.dtype({"float": "f4", "float16": "f2", "int64": "i8", "int8": "i1"}[kind[7:-1]])
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer((ctypes.c_char * size).from_address(self.addresses[name]), dtype).reshape(shape)


class Operators(TorchDispatchMode):
    """What torch does while this is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.done.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


class Graph:
    """`torch.cuda.CUDAGraph`: what contexts enqueue during the capture is not computed, but at each replay; on the very
    memory and with the shapes of that moment, so that a context which was bound otherwise since would be found out.
    torch's own operators are done again, on the tensors that they had.

    `fails`: what a capture says; `spoils`: what a replay does to the outputs, for tests of what happens then.
    """

    under_way: Graph | None = None
    made: ClassVar[list[Graph]] = []
    fails: str | None = None
    spoils: Callable[[Context], None] | None = None

    def __init__(self) -> None:
        self.steps: list[tuple[Context, dict[str, tuple[int, ...]], dict[str, int]]] = []
        self.replays = 0
        self.operators = Operators()
        Graph.made.append(self)

    def capture_begin(self, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        if Graph.fails:
            raise RuntimeError(Graph.fails)
        Graph.under_way = self
        self.operators.__enter__()

    def capture_end(self) -> None:
        if Graph.under_way is not None:
            self.operators.__exit__(None, None, None)
        Graph.under_way = None

    def replay(self) -> None:
        self.replays += 1
        for function, args, kwargs in self.operators.done:
            function(*args, **kwargs)
        for context, shapes, addresses in self.steps:
            assert (context.shapes, context.addresses) == (shapes, addresses), "a context was bound anew"
            context.compute()
            if Graph.spoils is not None:
                Graph.spoils(context)


def runtime(open_engine: Callable[[bytes], Engine | None]) -> SimpleNamespace:
    """The module as far as a session needs it. `open_engine` makes the engine of a plan, None where it cannot."""
    opened: list[Engine] = []

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger

        def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
            engine = open_engine(bytes(plan))
            if engine is None:
                self.logger.log(Severity.ERROR, "of another version")
            else:
                opened.append(engine)
            return engine

    return SimpleNamespace(
        __version__="10.16.0", ILogger=ILogger, Runtime=Runtime, Refitter=Refitter, Weights=Weights, opened=opened,
        TensorLocation=SimpleNamespace(HOST="host", DEVICE="device"),
        ExecutionContextAllocationStrategy=SimpleNamespace(STATIC="static", USER_MANAGED="user managed"),
        CudaGraphStrategy=SimpleNamespace(DISABLED="disabled", WHOLE_GRAPH_CAPTURE="whole graph"),
        SerializationFlag=SimpleNamespace(EXCLUDE_WEIGHTS="exclude", INCLUDE_REFIT="include refit"),
        DataType=SimpleNamespace(FLOAT="FLOAT", HALF="HALF", BF16="BF16", INT64="INT64"))


class CpuTorch:
    """torch whose CUDA device is the CPU. `pinned` counts the blocks of pinned memory that were asked for."""

    class Stream:
        cuda_stream = 7

        def synchronize(self) -> None:
            pass

        def wait_stream(self, other: CpuTorch.Stream) -> None:
            pass

    def __init__(self) -> None:
        self.pinned = 0
        self.cuda = SimpleNamespace(
            Stream=self.Stream, current_stream=self.Stream, CUDAGraph=Graph, stream=lambda stream: nullcontext(),
            current_device=lambda: 0, is_available=lambda: True, mem_get_info=lambda: (1 << 33, 1 << 34),
            memory_reserved=lambda: 300, memory_allocated=lambda: 100)

    def device(self, name: str) -> torch.device:
        assert name == "cuda"
        return torch.device("cpu")

    def empty(self, *size: Any, pin_memory: bool = False, **how: Any) -> torch.Tensor:
        self.pinned += pin_memory
        return torch.empty(*size, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
