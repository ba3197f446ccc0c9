"""The library of `mla::LatentAttention`, which ONNX Runtime loads for graphs with that operator (`exporter export
--fused-decode`): where it is, how it is built, how a session gets it.

It is code of this project, compiled by its user (engines/cpp/operator): looked for where MLA_OPERATOR says, else where
`engines operator --build` leaves it. Nothing that an export holds names it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from onnx import ModelProto

from engines.cpp_build import FETCHED, operator_command
from exporter.errors import CheckError, InputError
from exporter.formulations import BY_NAME
from exporter.formulations.fused import DOMAIN

VARIABLE = "MLA_OPERATOR"
FOLDER = FETCHED.parent / "operator"
NAME = "libmla-operator.so"
STDERR = 2  # the process's own: what a compiler says is no answer of ours


def needed(formulation: str) -> bool:
    """Whether graphs of this formulation have the operator."""
    return formulation in BY_NAME and BY_NAME[formulation].operator


def needed_by(model: ModelProto) -> bool:
    """Whether a graph says that it has operators of this project."""
    return any(entry.domain == DOMAIN for entry in model.opset_import)


def library() -> Path:
    """The library's file. InputError where there is none, with what builds it."""
    given = os.environ.get(VARIABLE)
    path = Path(given) if given else built()
    if path.is_file():
        return path.absolute()
    where = f"{VARIABLE} is {given}, which is no file" if given else f"{path} does not exist"
    raise InputError(f"no library of the operator mla::LatentAttention ({where}); expected {NAME}; {_remedy()}; or "
                     "take another graph (--formulation qkt), or export without --fused-decode")


def built() -> Path:
    """Where `engines operator --build` leaves the library."""
    return FOLDER / NAME


def _remedy() -> str:
    build = "build it here with python -m engines operator --build"
    return f"unset {VARIABLE}, or let it name the library; {build}" if os.environ.get(VARIABLE) else build


def missing() -> str | None:
    """Why graphs with the operator cannot be run here, or None."""
    import onnxruntime as ort

    try:
        load(ort.SessionOptions(), library())
    except InputError as error:
        return str(error)
    return None


def register(settings: Any, need: bool) -> None:
    """Let a session with `settings` know the operator, if its graph needs it. InputError where the library is missing,
    or ONNX Runtime does not take it."""
    if need:
        load(settings, library())


def load(settings: Any, path: Path) -> None:
    """Register the library at `path`. InputError where ONNX Runtime does not take it."""
    try:
        settings.register_custom_ops_library(str(path))
    except Exception as error:
        raise InputError(f"{path}: ONNX Runtime does not take it: {str(error).splitlines()[0]}; {_remedy()}") from None


def build(line: str) -> None:
    """Run `build_line()`, showing what the compiler says. CheckError where it fails."""
    done = subprocess.run(["sh", "-c", line], stdout=STDERR, check=False)
    if done.returncode:
        raise CheckError(f"the operator was not built, its command ended with {done.returncode}: {line}; expected "
                         "cmake, a C++17 compiler (GCC or Clang) and ONNX Runtime's headers")


def build_line() -> str:
    """The shell line that leaves the library where it is looked for, compiled for this processor."""
    return operator_command(FOLDER)
