"""A TensorRT or TensorRT-RTX engine on the device: loaded once for all sessions of its plan, contexts made, weights
streamed or refitted, compiled kernels kept. The one place where the two modules differ at run time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
from onnx import TensorProto

from engines.handed import Weight
from engines.trt import MODULES, load, make_logger, reasons
from exporter.errors import CheckError, InputError
from exporter.output import write_file

if TYPE_CHECKING:
    from engines.trt import tensorrt

Weights = Callable[[], Mapping[str, Weight]]
_DTYPES = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "HALF", TensorProto.BFLOAT16: "BF16",
           TensorProto.INT64: "INT64", TensorProto.INT32: "INT32", TensorProto.INT8: "INT8", TensorProto.UINT8: "UINT8",
           TensorProto.BOOL: "BOOL", TensorProto.FLOAT8E4M3FN: "FP8", TensorProto.INT4: "INT4"}


@dataclass(frozen=True)
class LoadOptions:
    """How an engine is loaded. `weight_budget`: bytes of its streamable weights that stay on the device (None: all;
    the engine must have been built with weight streaming). `runtime_cache`: where TensorRT-RTX keeps the kernels that
    it compiles when it loads (None: beside the plan). `cuda_graphs`: steps that come again are captured."""

    weight_budget: int | None = None
    runtime_cache: Path | None = None
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        if self.weight_budget is not None and self.weight_budget < 0:
            raise InputError(f"--weight-budget {self.weight_budget}: expected bytes, 0 (stream all) or more")

    def check(self, backend: str) -> None:
        """InputError for a backend that has no such options."""
        if not self.cuda_graphs and backend not in GRAPHS:
            raise InputError(f"--no-cuda-graphs with --backend {backend}: only {', '.join(GRAPHS)} have CUDA graphs; "
                             "leave it out")
        if backend not in MODULES and (self.weight_budget is not None or self.runtime_cache is not None):
            raise InputError(f"--backend {backend}: --weight-budget and --runtime-cache are TensorRT's; leave them out")
        if self.runtime_cache is not None and backend != "trt-rtx":
            raise InputError(f"--runtime-cache {self.runtime_cache}: TensorRT-RTX compiles kernels when it loads an "
                             f"engine; {backend} has done so in the build; leave --runtime-cache out")


AS_BUILT = LoadOptions()
GRAPHS = (*MODULES, "ort-cuda")  # backends whose steps run as CUDA graphs


def deserialise(backend: str, plan: Path, rebuild: str, logger: Any) -> tensorrt.ICudaEngine:
    """The engine of a plan file; InputError with the command `rebuild` where this TensorRT or GPU cannot load it."""
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
    try:
        engine = trt.Runtime(logger).deserialize_cuda_engine(np.memmap(plan, np.uint8, "r"))
    except TypeError:  # what pybind11 makes of a runtime that could not be made
        engine = None
    if engine is None:
        raise InputError(f"{plan}: {backend} {trt.__version__} could not load this engine on this GPU "
                         f"({reasons(logger)}); build it here with: {rebuild}")
    return engine


class LoadedEngine:
    """One engine on the current CUDA device, shared by the sessions of its plan; the last to close frees it.

    An engine without its weights (a stripped plan) gets them from `weights` before anything runs.
    """

    def __init__(self, backend: str, plan: Path, rebuild: str, options: LoadOptions, weights: Weights) -> None:
        self.backend, self.plan, self.users = backend, plan, 0
        self.logger = make_logger(backend)
        self.engine = deserialise(backend, plan, rebuild, self.logger)
        self._fill(weights)
        self._set_budget(options.weight_budget)
        self._cache_path = options.runtime_cache or plan.with_suffix(".runtime.cache")
        self._cache, self._settings = self._runtime_settings(options)

    def _fill(self, weights: Weights) -> None:
        if self.engine.refittable:
            refitter = Refitter(self.backend, self.engine, self.logger)
            if refitter.missing():
                refitter.refit(weights())

    def _set_budget(self, budget: int | None) -> None:
        if budget is None:
            return
        if not self.engine.streamable_weights_size:
            raise InputError(f"{self.plan}: --weight-budget {budget}: this engine has no streamable weights; build it "
                             "with --weight-streaming, or leave --weight-budget out")
        self.engine.weight_streaming_budget_v2 = budget

    def _runtime_settings(self, options: LoadOptions) -> tuple[Any, Any]:
        """TensorRT-RTX's cache of compiled kernels, filled from its file, and the settings that contexts take it from,
        with its own CUDA graphs: only it knows when its kernels for a shape are done. TensorRT compiled its kernels
        when it built. A cache of another GPU, driver or version is left aside by TensorRT-RTX itself, and written
        anew."""
        if self.backend != "trt-rtx":
            return None, None
        rtx: Any = self.engine
        settings = rtx.create_runtime_config()
        cache = settings.create_runtime_cache()
        with suppress(OSError):
            cache.deserialize(self._cache_path.read_bytes())
        settings.set_runtime_cache(cache)
        if options.cuda_graphs:
            settings.cuda_graph_strategy = load(self.backend).CudaGraphStrategy.WHOLE_GRAPH_CAPTURE
        return cache, settings

    def context(self, profile: int, stream: int) -> tensorrt.IExecutionContext:
        """A new execution context in one of the engine's optimisation profiles."""
        count = self.engine.num_optimization_profiles
        if not 0 <= profile < count:
            raise InputError(f"{self.plan}: no optimisation profile {profile}; the engine has {count}, from 0")
        context = self.engine.create_execution_context(*(() if self._settings is None else (self._settings,)))
        if context is None or not context.set_optimization_profile_async(profile, stream):
            raise InputError(f"{self.plan}: no context in optimisation profile {profile}: {reasons(self.logger)}")
        self.users += 1
        return context

    def scratch_bytes(self, profile: int) -> int:
        """Device memory that a context takes in one of the engine's profiles."""
        return int(self.engine.get_device_memory_size_for_profile_v2(profile))

    def lean_context(self, profile: int, stream: int, scratch: int, size: int) -> tensorrt.IExecutionContext:
        """A further context of a session (TensorRT's), in `size` bytes at `scratch` that its others use as well."""
        strategy: Any = load(self.backend).ExecutionContextAllocationStrategy
        context = self.engine.create_execution_context(strategy.USER_MANAGED)
        if context is None:
            raise CheckError(f"{self.plan}: no further context: {reasons(self.logger)}")
        newer: Any = context  # what the last stubs do not have
        newer.set_device_memory(scratch, size)
        if not context.set_optimization_profile_async(profile, stream):
            raise CheckError(f"{self.plan}: no context in optimisation profile {profile}: {reasons(self.logger)}")
        return context

    def release(self) -> None:
        """One session is done; the last one keeps what was compiled, where its place can be written."""
        self.users -= 1
        if self.users == 0 and self._cache is not None:
            with suppress(OSError):  # the next run compiles again, that is all
                write_file(self._cache_path, memoryview(self._cache.serialize()))


class Refitter:
    """New values for the weights of an engine, by the names that the graph's initializers have."""

    def __init__(self, backend: str, engine: tensorrt.ICudaEngine, logger: Any) -> None:
        self._backend, self._engine, self._logger = backend, engine, logger
        if TYPE_CHECKING:
            trt = tensorrt
        else:
            trt = load(backend)
        self._refitter = trt.Refitter(engine, logger)

    def names(self) -> set[str]:
        """The weights that the engine can take."""
        return set(self._refitter.get_all_weights())

    def missing(self) -> list[str]:
        """The weights that it has no values for, which it cannot run without."""
        return list(self._refitter.get_missing_weights())

    def refit(self, weights: Mapping[str, Weight]) -> None:
        """Give the engine every weight that it can take. CheckError, by name, for one of another size or dtype, one
        that TensorRT refuses, and those that stay without a value."""
        if TYPE_CHECKING:
            trt = tensorrt
        else:
            trt = load(self._backend)
        for name in sorted(self.names() & set(weights)):
            weight = weights[name]
            kind, wanted = getattr(trt.DataType, _DTYPES[weight.dtype]), self._refitter.get_weights_prototype(name)
            if wanted.size != weight.count or wanted.dtype != kind:
                raise CheckError(f"{name}: the engine takes {wanted.size} numbers of {_called(wanted.dtype)}; the "
                                 f"export has {weight.count} of {_called(kind)}, shape {list(weight.shape)}")
            values = trt.Weights(kind, weight.data.ctypes.data, weight.count)
            if not self._refitter.set_named_weights(name, values):
                raise CheckError(f"{name}: TensorRT refused the new values: {reasons(self._logger)}")
        missing = self.missing()
        if missing:
            raise CheckError(f"the engine still lacks {', '.join(sorted(missing))}; the export has no such weights")
        if not self._refitter.refit_cuda_engine():
            raise CheckError(f"TensorRT did not refit the engine: {reasons(self._logger)}")


def serialise(backend: str, engine: tensorrt.ICudaEngine) -> memoryview:
    """A whole plan of a refitted engine: weights included, refittable as before."""
    if TYPE_CHECKING:
        trt = tensorrt
    else:
        trt = load(backend)
    newer: Any = trt.SerializationFlag  # INCLUDE_REFIT came with 10.14, after the last stubs
    settings = engine.create_serialization_config()
    settings.clear_flag(trt.SerializationFlag.EXCLUDE_WEIGHTS)
    settings.set_flag(newer.INCLUDE_REFIT)
    return memoryview(engine.serialize_with_config(settings))


def _called(kind: Any) -> str:
    return str(getattr(kind, "name", kind))


_LOADED: WeakValueDictionary[tuple[Any, ...], LoadedEngine] = WeakValueDictionary()


def loaded(backend: str, plan: Path, rebuild: str, options: LoadOptions, weights: Weights) -> LoadedEngine:
    """The engine of a plan, the one that another session has open where there is one: prefill and decode of a unified
    engine share its weights."""
    stat = plan.stat()
    key = (backend, plan.resolve(), stat.st_mtime_ns, stat.st_size, options)
    engine = _LOADED.get(key)
    if engine is None:
        engine = _LOADED[key] = LoadedEngine(backend, plan, rebuild, options, weights)
    return engine
