"""The commands that build C++ on this machine, the generator and the operator: lines that do when they are pasted into
a shell.

Python's package of ONNX Runtime has no headers. They are looked for where a system keeps them, and where `make
test-cpp` leaves them; failing those the command fetches a release of the version that Python runs.
"""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from pathlib import Path

import engines

SOURCE = Path(engines.__file__).parent / "cpp"
FETCHED = SOURCE.parent.parent / "build" / "cpp" / "deps"
SYSTEM = (Path("/usr/local"), Path("/usr"))
RELEASE = "https://github.com/microsoft/onnxruntime/releases/download"
HEADER = "onnxruntime_cxx_api.h"
MACHINES = {"x86_64": "x64", "aarch64": "aarch64"}  # as the releases name them


def build_command(folder: Path, system: Sequence[Path] = SYSTEM, fetched: Path = FETCHED) -> str:
    """The shell line that leaves `mla-generate` in `folder`."""
    return _line(folder, SOURCE, "mla-generate", system, fetched)


def operator_command(folder: Path, system: Sequence[Path] = SYSTEM, fetched: Path = FETCHED) -> str:
    """The shell line that leaves the library of `mla::LatentAttention` in `folder`, compiled for this processor."""
    return _line(folder, SOURCE / "operator", "mla-operator", system, fetched, "-DMLA_ARCH=native")


def _line(folder: Path, source: Path, target: str, system: Sequence[Path], fetched: Path, *more: str) -> str:
    before, options = _onnx_runtime(folder, system, fetched)
    configure = ["cmake", "-S", shown(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *more, *options]
    build = ["cmake", "--build", str(folder), "--target", target]
    return " && ".join((*before, shlex.join(configure), shlex.join(build)))


def _onnx_runtime(folder: Path, system: Sequence[Path], fetched: Path) -> tuple[list[str], list[str]]:
    """What is to be done first, and CMake's options for an ONNX Runtime of headers and library."""
    if any(_holds(root, "include", "include/onnxruntime", name=HEADER)
           and _holds(root, "lib", "lib64", "lib/*", name="libonnxruntime.so") for root in system):
        return [], []
    prefix = fetched / "debian" / "usr"
    include, root = prefix / "include" / "onnxruntime", fetched / "ort"
    if (include / HEADER).is_file() and (root / "lib" / "libonnxruntime.so").is_file():
        return [], [f"-DORT_ROOT={root}", f"-DORT_INCLUDE={include}", f"-DCMAKE_PREFIX_PATH={prefix}"]
    from onnxruntime import __version__ as version

    name = f"onnxruntime-linux-{MACHINES.get(platform.machine(), 'x64')}-{version}"
    fetch = f"curl -fL {RELEASE}/v{version}/{name}.tgz | tar xz -C {shlex.quote(str(folder))}"
    return [shlex.join(["mkdir", "-p", str(folder)]), fetch], [f"-DORT_ROOT={folder / name}"]


def _holds(root: Path, *folders: str, name: str) -> bool:
    return any(any(root.glob(f"{folder}/{name}")) for folder in folders)


def shown(path: Path) -> str:
    """A path from the working directory on, where it lies below."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
