"""The same build with NVIDIA's own command-line tools: `trtexec` for TensorRT, `tensorrt_rtx` for TensorRT-RTX.

Options as trtexec --help and the TensorRT-RTX guides name them. Both tools take a shape as dimensions joined by `x`, a
scalar as the word `scalar`, and each profile's shapes right behind its --profile=N.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from engines.build_options import PLAIN, BuildOptions
from engines.handed import Places
from exporter.signature import Profile

TOOLS = {"trt": "trtexec", "trt-rtx": "tensorrt_rtx"}
_FLAGS = {"weight_streaming": "--allowWeightStreaming", "strip": "--stripWeights", "refit": "--refit",
          "version_compatible": "--versionCompatible"}


def command_line(backend: str, graph: Path, profiles: Sequence[Profile], engine: Path, options: BuildOptions = PLAIN,
                 runtime_cache: Path | None = None, handed: Places | None = None) -> str:
    """One line for a shell that builds `graph` into `engine` as `engines.trt.build` does.

    `runtime_cache` (TensorRT-RTX): the tool then also runs the engine once, on a GPU, and fills that file. `handed`
    weights lie where neither tool reads them: the line is a comment that says so.
    """
    if handed:
        return (f"# {TOOLS[backend]} reads weights beside the graph alone, and these lie in "
                f"{', '.join(sorted(str(place.parent) for place in handed.values()))}; export with --weights copy")
    words = [TOOLS[backend], f"--onnx={graph}"]
    # strong typing is the tool's choice in TensorRT 10; later ones and TensorRT-RTX always do so
    words += ["--stronglyTyped", "--noTF32"] if backend == "trt" else []
    words += [flag for name, flag in _FLAGS.items() if getattr(options, name)]
    if options.hardware_compatible:
        words.append("--hardwareCompatibilityLevel=ampere+")
    if options.timing_cache:
        words.append(f"--timingCacheFile={options.timing_cache}")
    if options.sm:
        words.append(f"--computeCapabilities={','.join(sm.replace('.', '') for sm in options.sm)}")
    if backend == "trt-rtx" and (options.strip or options.refit) and not options.sm:
        words.append("--useGpu")  # a refittable engine is compiled for one device
    for number, profile in enumerate(profiles):
        words += [f"--profile={number}"] if len(profiles) > 1 else []
        words += [f"--{which}Shapes={_shapes(profile, index)}" for index, which in enumerate(("min", "opt", "max"))]
    words.append(f"--saveEngine={engine}")
    words.append(f"--runtimeCacheFile={runtime_cache}" if runtime_cache else "--skipInference")
    return shlex.join(words)


def _shapes(profile: Profile, index: int) -> str:
    return ",".join(f"{name}:{'x'.join(map(str, sizes[index])) or 'scalar'}" for name, sizes in profile.items())
