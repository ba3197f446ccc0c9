"""The GPU check: device facts, eager layers, memory, time and engines on one CUDA device, in a few minutes.

Rungs are planned first, so that a machine without a GPU says what it would do. A rung starts only while its own time
budget fits into what is left of the total; what could not run is named with its reason and never counts as passed.
The results lie in one JSON file, written anew after every rung, so that a crash loses nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from exporter.console import finite
from exporter.errors import InputError
from exporter.output import write_file
from validate import gpu_cache, gpu_eager, gpu_engines
from validate.gpu_device import CudaDevice, Device, absent, exact_products
from validate.gpu_rungs import NotRunError, Report, Result, Rung, Sizes

TOTAL_S = 450.0
OUT_OF_TIME = "out of time"
Progress = Callable[..., None]


def plan(sizes: Sizes, device: Device | None, report: Report) -> list[Rung]:
    """All rungs, the cheap ones first. `device` None: only to be named."""
    return [*gpu_eager.rungs(sizes, device, report), *gpu_cache.rungs(sizes, device, report),
            *gpu_engines.rungs(sizes, device, report)]


def climb(rungs: Sequence[Rung], report: Report, *, total_s: float = TOTAL_S,
          clock: Callable[[], float] = time.monotonic, save: Callable[[], None] = lambda: None,
          progress: Progress = lambda message, share=None: None) -> None:
    """Run what the time allows, one rung after another; every rung ends up in the report."""
    started = clock()
    report.results += [Result(r.name, r.what, "not run", 0.0, "not reached: the check ended before it") for r in rungs]
    save()
    for index, rung in enumerate(rungs):
        progress(rung.name, index / len(rungs))
        begun = clock()
        if begun - started + rung.seconds > total_s:
            result = Result(rung.name, rung.what, "not run", 0.0, OUT_OF_TIME)
        else:
            result = replace(_one(rung), seconds=round(clock() - begun, 3))
        report.results[index] = result
        save()


def _one(rung: Rung) -> Result:
    """A rung that breaks is a failed rung that says why, and the next one runs."""
    try:
        found = rung.run(rung.seconds)
    except NotRunError as reason:
        return Result(rung.name, rung.what, "not run", 0.0, str(reason))
    except torch.OutOfMemoryError as error:
        return Result(rung.name, rung.what, "not run", 0.0, f"out of device memory: {str(error).split('. ')[0]}")
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        return Result(rung.name, rung.what, "failed", 0.0, f"{type(error).__name__}: {first}".removesuffix(": "))
    return Result(rung.name, rung.what, "passed" if found.passed else "failed", 0.0, found.note, found.figures)


def check(out: Path | None, sizes: Sizes | None = None, *, device: Device | None = None, total_s: float = TOTAL_S,
          progress: Progress = lambda message, share=None: None) -> Report:
    """The whole check on `device` (default: the current CUDA device; without one every rung is not run).

    `out` is written before and after every rung; InputError, before anything runs, where it exists and is no such
    report or cannot be written.
    """
    report = Report(sizes or Sizes())
    if out is not None:
        _refuse_foreign(out)
    reason = absent() if device is None else None
    used = CudaDevice() if device is None and reason is None else device
    rungs = plan(report.sizes, used, report)

    def save() -> None:
        if out is not None:
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_file(out, (json.dumps(finite(report.to_dict()), indent=1, allow_nan=False) + "\n").encode())
            except OSError as error:
                raise InputError(f"cannot write {out}: {error.strerror or error}; choose another place") from None

    if reason is not None:
        report.results += [Result(r.name, r.what, "not run", 0.0, reason) for r in rungs]
    else:
        with exact_products() as report.settings, torch.inference_mode():
            climb(rungs, report, total_s=total_s, save=save, progress=progress)
    save()
    return report


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    try:
        ours = json.loads(path.read_text(encoding="utf-8")).get("check") == "gpu"
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        raise InputError(f"--out {path} exists and is no report of this check, so it is not replaced; choose another "
                         "place")
