"""The TensorRT door against TensorRT's own types: a name that the API does not have is an error of mypy, not of the
first machine with a GPU. The stubs come with `make stubs`."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tensorrt_stubs

REPOSITORY = Path(__file__).resolve().parent.parent
STUBS = REPOSITORY / "build" / "stubs"
DOOR = ("engines/trt.py", "engines/trt_runtime.py")

FAULTS = {
    "a flag that is not": ("trt.py", "trt.BuilderFlag.TF32", "trt.BuilderFlag.TF33",
                           '"type[BuilderFlag]" has no attribute "TF33"'),
    "a method that is not": ("trt.py", "builder.create_builder_config()", "builder.create_config()",
                             '"Builder" has no attribute "create_config"'),
    "a wrong argument": ("trt.py", "trt.Dims(list(size))", "size", 'Argument 2 to "set_shape"'),
    "a property that is not": ("trt_runtime.py", "self.engine.weight_streaming_budget_v2 = budget",
                                  "self.engine.weight_streaming_budget_v3 = budget",
                                  '"ICudaEngine" has no attribute "weight_streaming_budget_v3"'),
}


def mypy(folder: Path) -> subprocess.CompletedProcess[str]:
    """mypy over the door's files, configured as the repository is, with the repository's stubs."""
    return subprocess.run([sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", *DOOR], cwd=folder,
                          capture_output=True, text=True, env={**os.environ, "MYPYPATH": str(STUBS)})


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mypy", reason="mypy is an extra: pip install -e '.[dev]'")
    if not (STUBS / "tensorrt").is_dir():
        pytest.skip("TensorRT's stubs are not here: make stubs")
    folder = tmp_path_factory.mktemp("typed")
    for package in ("exporter", "engines"):
        shutil.copytree(REPOSITORY / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def test_the_door_fits_the_api(copy: Path) -> None:
    found = mypy(copy)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str, copy: Path) -> None:
    name, right, wrong, message = FAULTS[fault]
    path = copy / "engines" / name
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))
    found = mypy(copy)
    path.write_text(text)
    assert found.returncode == 1
    assert message in found.stdout


def test_repairs_make_stubs_parse(tmp_path: Path) -> None:
    stub = tmp_path / "tensorrt.pyi"
    stub.write_text("def f(self: IPluginV3, in: list[X], out: list[X]) -> None: ...\n"
                    "def g(shift: Weights = None, power: Weights = None, channel_axis: int) -> L: ...\n")
    with pytest.raises(SyntaxError):
        ast.parse(stub.read_text())
    tensorrt_stubs.repair(tmp_path)
    assert "in_: list[X]" in stub.read_text()
    stub.write_text("def h(:\n")
    with pytest.raises(SyntaxError, match=r"tensorrt\.pyi"):
        tensorrt_stubs.repair(tmp_path)
