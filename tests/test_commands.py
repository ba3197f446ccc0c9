"""The command lines of NVIDIA's tools, read back as their own parser reads them and held against the profiles."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from engines.build_options import PLAIN, BuildOptions
from engines.commands import command_line
from exporter.presets import preset_config
from exporter.signature import Profile, Range, profile, signature

GRAPH, ENGINE = Path("an export/decode.kqt.onnx"), Path("an export/decode's.engine")


def parsed(line: str) -> tuple[str, dict[str, str], list[Profile]]:
    """Tool, plain options, profiles: as trtexec's option parser takes them, shapes behind their --profile=N."""
    tool, *words = shlex.split(line)
    options: dict[str, str] = {}
    shapes: list[dict[str, dict[str, tuple[int, ...]]]] = []
    for word in words:
        name, _, value = word.partition("=")
        assert name.startswith("--")
        if name == "--profile":
            assert int(value) == len(shapes)
            shapes.append({})
        elif name.endswith("Shapes"):
            if not shapes:
                shapes.append({})
            assert name not in shapes[-1], "a second profile wants its own --profile"
            shapes[-1][name] = {n: () if d in ("", "scalar") else tuple(int(size) for size in d.split("x"))
                                for n, _, d in (spec.partition(":") for spec in value.split(","))}
        else:
            assert name not in options
            options[name] = value
    back: list[Profile] = [{n: tuple(found[f"--{which}Shapes"][n] for which in ("min", "opt", "max"))  # type: ignore[misc]
                            for n in found["--minShapes"]} for found in shapes]
    return tool, options, back


def shapes(cache: str, tokens: int) -> Profile:
    inputs = signature(preset_config("article"), cache=cache, dtype="fp16", max_context=64).inputs
    return profile(inputs, {"B": Range(1, 2, 8), "T": Range(1, tokens, tokens), "S": Range(1, 40, 64)})


@pytest.mark.parametrize("backend", ["trt", "trt-rtx"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
@pytest.mark.parametrize("tokens", [(1,), (1, 512), (1, 4, 512)])
def test_profiles_come_back(backend: str, cache: str, tokens: tuple[int, ...]) -> None:
    profiles = [shapes(cache, t) for t in tokens]
    line = command_line(backend, GRAPH, profiles, ENGINE)
    tool, options, back = parsed(line)
    assert back == profiles
    assert ("--profile=" in line) == (len(profiles) > 1)
    assert tool == {"trt": "trtexec", "trt-rtx": "tensorrt_rtx"}[backend]
    plain = {"--onnx": str(GRAPH), "--saveEngine": str(ENGINE), "--skipInference": ""}
    assert options == plain | ({"--stronglyTyped": "", "--noTF32": ""} if backend == "trt" else {})


def test_scalars() -> None:
    found: Profile = {"x": ((), (), ()), "y": ((1,), (1,), (2,))}
    line = command_line("trt", GRAPH, [found], ENGINE)
    assert "--minShapes=x:scalar,y:1" in line
    assert parsed(line)[2] == [found]


OPTIONS: dict[str, tuple[str, BuildOptions, dict[str, str]]] = {
    "streaming": ("trt", BuildOptions(weight_streaming=True), {"--allowWeightStreaming": ""}),
    "strip": ("trt", BuildOptions(strip=True), {"--stripWeights": ""}),
    "strip and refit": ("trt", BuildOptions(strip=True, refit=True), {"--stripWeights": "", "--refit": ""}),
    "versions": ("trt", BuildOptions(version_compatible=True), {"--versionCompatible": ""}),
    "hardware": ("trt", BuildOptions(hardware_compatible=True), {"--hardwareCompatibilityLevel": "ampere+"}),
    "timing": ("trt", BuildOptions(timing_cache=Path("a b.cache")), {"--timingCacheFile": "a b.cache"}),
    "targets": ("trt-rtx", BuildOptions(sm=("8.6", "120")), {"--computeCapabilities": "86,120"}),
    "refit here": ("trt-rtx", BuildOptions(refit=True), {"--refit": "", "--useGpu": ""}),
    "refit there": ("trt-rtx", BuildOptions(refit=True, sm=("86",)), {"--refit": "", "--computeCapabilities": "86"}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_every_option_has_its_flag(case: str) -> None:
    backend, options, expected = OPTIONS[case]
    _, plain, _ = parsed(command_line(backend, GRAPH, [shapes("append", 1)], ENGINE))
    _, found, _ = parsed(command_line(backend, GRAPH, [shapes("append", 1)], ENGINE, options))
    assert {name: value for name, value in found.items() if name not in plain} == expected
    assert plain.items() <= found.items()


def test_a_runtime_cache_is_filled_by_running() -> None:
    _, found, _ = parsed(command_line("trt-rtx", GRAPH, [shapes("append", 1)], ENGINE, PLAIN, Path("r.cache")))
    assert found["--runtimeCacheFile"] == "r.cache"
    assert "--skipInference" not in found


def test_weights_on_another_disk_have_no_command() -> None:
    places = {"linked/0": Path("/data/model/x.safetensors")}
    line = command_line("trt", GRAPH, [shapes("append", 1)], ENGINE, handed=places)
    assert line.startswith("# trtexec reads weights beside the graph alone, and these lie in /data/model; export with ")
    assert shlex.split(line, comments=True) == []
