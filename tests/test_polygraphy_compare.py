"""The comparator for Polygraphy: masks before numbers, the worst element named, every output at its own tolerance."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from validate import metrics, polygraphy_compare
from validate.polygraphy_compare import BY_DTYPE, REFERENCE, compare_outputs, judge
from validate.polygraphy_run import TOOL

pytest.importorskip("polygraphy", reason="Polygraphy is an extra: pip install -e '.[polygraphy]'")
RNG = np.random.default_rng(3)
SOUND = RNG.standard_normal((2, 5, 40)).astype(np.float32)


def with_value(at: tuple[int, ...], value: float) -> np.ndarray:
    changed = SOUND.copy()
    changed[at] = value
    return changed


def result(runner: str, **outputs: Any) -> Any:
    from polygraphy.comparator import IterationResult

    return IterationResult(outputs, runner_name=runner)


def test_tolerances_are_those_of_the_ladder() -> None:
    assert {d: metrics.Tolerance(*t) for d, t in BY_DTYPE.items()} == metrics.TOLERANCES


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("share", [0.9, 1.2])
def test_rel_is_of_the_references_spread_as_the_ladder_measures_it(dtype: str, share: float) -> None:
    rel, cosine = BY_DTYPE[dtype]
    found = with_value((1, 2, 3), float(SOUND[1, 2, 3]) + share * rel * float(SOUND.astype(np.float64).std()))
    passed, line = judge(found, SOUND, rel, cosine)
    assert passed is (share < 1) is metrics.compare(found, SOUND).within(metrics.TOLERANCES[dtype])
    assert "worst at [1, 2, 3]" in line


@pytest.mark.parametrize(("found", "reference", "said"), [
    (with_value((0, 1, 2), np.nan), SOUND, "NaN differs at 1 of 400 elements, first at [0, 1, 2]: nan against "),
    (SOUND, with_value((0, 1, 2), np.nan), "NaN differs at 1 of 400 elements"),
    (with_value((1, 0, 0), np.inf), SOUND, "Inf differs at 1 of 400 elements, first at [1, 0, 0]: inf against "),
    (with_value((1, 0, 0), np.inf), with_value((1, 0, 0), -np.inf), "Inf differs at 1 of 400 elements"),
    (SOUND[:1], SOUND, "shape [1, 5, 40] where the reference has [2, 5, 40]"),
    (-SOUND, SOUND, "1 - cosine 2 "),
    (np.zeros_like(SOUND), SOUND, "1 - cosine 1 ")])
def test_what_differs_is_said(found: np.ndarray, reference: np.ndarray, said: str) -> None:
    passed, line = judge(found, reference, 0.15, 1e-3)
    assert not passed
    assert said in line


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_equal_masks_pass_and_do_not_hide_the_rest(value: float) -> None:
    both = with_value((0, 0, 0), value)
    assert judge(both, both, 3e-5, 1e-7)[0]
    wrong = both.copy()
    wrong[1, 4, 39] += 1
    assert "worst at [1, 4, 39]" in judge(wrong, both, 3e-5, 1e-7)[1]
    alone = np.full(3, value)
    assert judge(alone, alone, 0.0, 0.0) == (True, "3 elements, none of them finite, on both sides alike")


def test_bfloat16_comes_as_torch() -> None:
    passed, line = judge(torch.from_numpy(SOUND).to(torch.bfloat16), torch.from_numpy(SOUND), *BY_DTYPE["bf16"])
    assert passed
    assert not line.startswith("rel 0 ")


def test_outputs_are_judged_one_by_one_whichever_side_is_golden(tmp_path: Path) -> None:
    from polygraphy.exception import PolygraphyException

    near = SOUND * np.float32(1.001)
    for first, second in ((result("onnxrt", a=near, b=SOUND), result(REFERENCE, a=SOUND, b=SOUND)),
                          (result(REFERENCE, a=SOUND, b=SOUND), result("onnxrt", a=near, b=SOUND))):
        assert polygraphy_compare.fp32(first, second) == {"a": False, "b": True}
        assert polygraphy_compare.fp16(first, second) == {"a": True, "b": True}
        assert polygraphy_compare.bf16(first, second) == {"a": True, "b": True}
    assert polygraphy_compare.bf16(result("x", a=SOUND), result("y", b=SOUND)) == {"a": False, "b": False}
    with pytest.raises(PolygraphyException, match=r"give a dtype: --compare-func-script polygraphy_compare\.py:fp16"):
        compare_outputs(result("x", a=SOUND), result("y", a=SOUND))


def polygraphy(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOL, "run", *args], cwd=folder, capture_output=True, text=True, check=False)


def test_polygraphy_loads_a_copy_with_tolerances_of_its_own(tmp_path: Path) -> None:
    """In a folder without this package on the path; `b` alone may be far off."""
    import onnx
    from onnx import TensorProto, helper
    from polygraphy.comparator import RunResults
    from polygraphy.json import save_json

    shutil.copyfile(polygraphy_compare.__file__, tmp_path / "mine.py")
    (tmp_path / "tolerances.json").write_text(json.dumps(
        {"outputs": {"a": {"rel": 1e-4, "cosine": 1e-6}, "b": {"rel": 5.0, "cosine": 1.0}}}))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [2, 5, 40]) for n in "xab"]
    nodes = [helper.make_node("Identity", ["x"], [name]) for name in "ab"]
    graph = helper.make_graph(nodes, "two", infos[:1], infos[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "2.onnx")
    save_json([{"x": SOUND}], str(tmp_path / "inputs.json"))
    args = ("2.onnx", "--onnxrt", "--load-inputs", "inputs.json", "--load-outputs", "golden.json",
            "--compare-func-script", "mine.py")
    for wrong, code in (("b", 0), ("a", 1)):
        golden = {"a": SOUND, "b": SOUND} | {wrong: with_value((0, 0, 0), 3.0)}
        RunResults([(REFERENCE, [result(REFERENCE, **golden)])]).save(str(tmp_path / "golden.json"))
        done = polygraphy(tmp_path, *args)
        assert done.returncode == code, done.stdout + done.stderr
        assert ("FAILED | Output: 'a' | rel " in done.stdout + done.stderr) is bool(code)
