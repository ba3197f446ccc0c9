"""What an engine can be built with beyond its graph and its profiles: one dataclass for TensorRT and TensorRT-RTX."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class BuildOptions:
    """How to build. What a backend or this machine cannot do is refused by the builder before it starts.

    `sm`: compute capabilities to build for (TensorRT-RTX). `weight_streaming`: weights may stay on the host, a budget
    at load says how many. `strip`: a plan without weights, refitted when it is loaded. `refit`: weights may be replaced
    later. `hardware_compatible`: runs on Ampere and newer (TensorRT). `version_compatible`: other versions may load it.
    `timing_cache`: measured kernels, read and written (TensorRT).
    """

    sm: tuple[str, ...] = ()
    weight_streaming: bool = False
    strip: bool = False
    refit: bool = False
    hardware_compatible: bool = False
    version_compatible: bool = False
    timing_cache: Path | None = None


PLAIN = BuildOptions()
