"""A comparator that Polygraphy loads: NaN and Inf masks first, then rel and cosine, each output at its own tolerance.

    polygraphy run FILE.onnx --onnxrt --trt --compare-func-script polygraphy_compare.py:fp16

It stands alone, with NumPy and Polygraphy, so that a copy beside a comparison's inputs is enough. Without a name after
the colon it reads `tolerances.json` beside itself, {"outputs": {name: {"rel": number, "cosine": number}}}; the names
fp32, fp16 and bf16 hold every output to that dtype's tolerance. Polygraphy's own check takes matching NaN for a
difference of NaN, one absolute tolerance for small and large outputs alike, and passes over an output that one side
lacks; here each of these is judged and said.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

REFERENCE = "float64-reference"  # the runner name of golden outputs: the side that is right
TOLERANCES = "tolerances.json"
# the largest rel = max|a - b| / std(reference), and the largest 1 - cosine
BY_DTYPE = {"fp32": (3e-5, 1e-7), "fp16": (2e-2, 1e-4), "bf16": (0.15, 1e-3)}


def judge(found: Any, reference: Any, rel: float, cosine: float) -> tuple[bool, str]:
    """Whether two arrays (NumPy or torch) agree, and one line on how far apart they are and where."""
    a, b = _wide(found), _wide(reference)
    if a.shape != b.shape:
        return False, f"shape {list(a.shape)} where the reference has {list(b.shape)}"
    for what, mask in (("NaN", np.isnan), ("Inf", np.isinf)):
        ours, theirs = mask(a), mask(b)
        if what == "Inf":  # an infinity of the other sign is another value
            ours, theirs = np.where(ours, np.sign(a), 0), np.where(theirs, np.sign(b), 0)
        differing = np.argwhere(ours != theirs)
        if len(differing):
            return False, (f"{what} differs at {len(differing)} of {a.size} elements, first at "
                           f"{differing[0].tolist()}: {a[tuple(differing[0])]:g} against {b[tuple(differing[0])]:g}")
    finite = np.isfinite(b)
    if not finite.any():
        return True, f"{a.size} elements, none of them finite, on both sides alike"
    a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
    error = np.abs(a - b)
    at = np.unravel_index(int(error.argmax()), error.shape)
    spread = float(b[finite].std()) or float(np.abs(b).max()) or 1.0
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    apart = 1 - min(float(a.ravel() @ b.ravel()) / norms, 1.0) if norms else float(bool(a.any() or b.any()))
    measured = float(error[at]) / spread
    line = (f"rel {measured:.3g} (at most {rel:g}), 1 - cosine {apart:.3g} (at most {cosine:g}), worst at "
            f"{[int(i) for i in at]}: {a[at]:.6g} against {b[at]:.6g}")
    return measured <= rel and apart <= cosine, line


def _wide(array: Any) -> np.ndarray:
    """In float64. A torch tensor goes through it because NumPy has no bfloat16."""
    if hasattr(array, "detach"):
        array = array.detach().cpu().double().numpy()
    return np.asarray(array, dtype=np.float64)


def _compare(first: Any, second: Any, tolerances: Mapping[str, tuple[float, float]] | tuple[float, float]
             ) -> OrderedDict[str, bool]:
    """Compare two IterationResults output by output; one that a side lacks, or without a tolerance, does not pass."""
    from polygraphy.logger import G_LOGGER

    found, reference = (second, first) if first.runner_name == REFERENCE else (first, second)
    verdicts: OrderedDict[str, bool] = OrderedDict()
    for name in dict.fromkeys([*found.keys(), *reference.keys()]):
        tolerance = tolerances.get(name) if isinstance(tolerances, Mapping) else tolerances
        if name not in found or name not in reference:
            side = found if name not in found else reference
            passed, line = False, f"{side.runner_name} has no such output"
        elif tolerance is None:
            passed, line = False, f"{TOLERANCES} names no tolerance for it"
        else:
            passed, line = judge(found[name], reference[name], *tolerance)
        verdicts[name] = passed
        say, verdict = (G_LOGGER.finish, "PASSED") if passed else (G_LOGGER.error, "FAILED")
        say(f"{verdict} | Output: '{name}' | {line}")
    return verdicts


def compare_outputs(first: Any, second: Any) -> OrderedDict[str, bool]:
    """Each output at the tolerance that `tolerances.json`, beside this file, gives it."""
    path = Path(__file__).with_name(TOLERANCES)
    if not path.is_file():
        from polygraphy.logger import G_LOGGER

        G_LOGGER.critical(f"{path} is not there; give a dtype: --compare-func-script {Path(__file__).name}:fp16, or "
                          f"one of {', '.join(BY_DTYPE)}")
    given = json.loads(path.read_text(encoding="utf-8"))["outputs"]
    return _compare(first, second, {name: (float(t["rel"]), float(t["cosine"])) for name, t in given.items()})


def fp32(first: Any, second: Any) -> OrderedDict[str, bool]:
    """Every output at float32's tolerance."""
    return _compare(first, second, BY_DTYPE["fp32"])


def fp16(first: Any, second: Any) -> OrderedDict[str, bool]:
    """Every output at float16's tolerance."""
    return _compare(first, second, BY_DTYPE["fp16"])


def bf16(first: Any, second: Any) -> OrderedDict[str, bool]:
    """Every output at bfloat16's tolerance."""
    return _compare(first, second, BY_DTYPE["bf16"])
