"""A stand-in for the module `tensorrt`, which needs a GPU: it records what it is told, and its engines compute nothing.

Only the calls that the toolkit makes are here, with the semantics that NVIDIA's API reference gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

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
