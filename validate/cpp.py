"""The C++ generator beside Python's, on one export: the same tokens or a failed check, and a decode step's time.

Both run ONNX Runtime with as many threads, in turns, a process of C++ and a generation of Python each round. A step of
either is measured whole (inputs bound, the graph run, rows kept, the token chosen); Python's session alone besides,
which is the graph and the copies around it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines.generate import Generator
from engines.ort import OrtOptions, OrtSession
from engines.session import Feed, Outputs
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, open_export


@dataclass(frozen=True)
class CppRequest:
    """What `python -m validate cpp` was asked for. `context`: tokens of the prompt, drawn from `seed`."""

    folder: Path
    generator: Path
    context: int = 256
    new_tokens: int = 32
    threads: int = 1
    rounds: int = 3
    map_weights: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("context", "new_tokens", "threads", "rounds"):
            least = 2 if name == "new_tokens" else 1  # the first token is the prefill's
            if getattr(self, name) < least:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least {least}")
        if not self.generator.is_file():
            raise InputError(f"--generator {self.generator}: no such file; build it with: cmake -S engines/cpp -B "
                             "build/cpp/release -DCMAKE_BUILD_TYPE=Release; cmake --build build/cpp/release")


class _Timed(OrtSession):
    """A session that keeps how long each step of one token took, in milliseconds."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.steps: list[float] = []

    def infer(self, feed: Feed) -> Outputs:
        begin = time.perf_counter()
        outputs = super().infer(feed)
        if feed["input_ids"].shape[1] == 1:
            self.steps.append(1e3 * (time.perf_counter() - begin))
        return outputs


class _TimedGenerator(Generator):
    """A generator over timed sessions; `timed` is the one that decodes, which is opened last."""

    timed: _Timed

    def __enter__(self) -> _TimedGenerator:
        return self

    def _open(self, kind: str) -> _Timed:
        self.timed = _Timed(self.export, self._graph(kind), OrtOptions(threads=self._threads))
        return self.timed


def run(request: CppRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    """Tokens and times of both; CheckError where the tokens differ, with the first step that does."""
    export = open_export(request.folder)
    draw = np.random.default_rng(request.seed)
    prompt = draw.integers(0, export.decoder.vocab_size, request.context).tolist()
    figures: dict[str, list[float]] = {"cpp": [], "python": [], "session": []}
    with _TimedGenerator(export, threads=request.threads) as generator:
        for i in range(request.rounds):
            progress(f"round {i + 1} of {request.rounds}")
            theirs = _in_cpp(request, prompt)
            ours = [step.tokens[0] for step in generator.generate([prompt], request.new_tokens)]
            _same(theirs["answers"][0]["tokens"], ours)
            assert generator.statistics is not None
            figures["cpp"].append(theirs["decode_ms"])
            figures["python"].append(statistics.median(1e3 / rate for rate in generator.statistics.rates))
            figures["session"].append(statistics.median(generator.timed.steps[-len(ours) + 1:]))
    return _report(request, export, figures)


def _in_cpp(request: CppRequest, prompt: list[int]) -> dict[str, Any]:
    words = [str(request.generator.absolute()), str(request.folder), "--tokens", ",".join(map(str, prompt)),
             "--max-new-tokens", str(request.new_tokens), "--ignore-eos", "--threads", str(request.threads), "--json"]
    done = subprocess.run([*words, *(["--map-weights"] if request.map_weights else [])], capture_output=True, text=True,
                          check=False)
    if done.returncode:
        raise InputError(f"{request.generator} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    try:
        made: dict[str, Any] = json.loads(done.stdout)
        _ = made["answers"][0]["tokens"], made["decode_ms"]
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{request.generator}: printed {done.stdout[:80]!r}; expected what mla-generate --json prints"
                         ) from None
    return made


def _same(theirs: list[int], ours: list[int | None]) -> None:
    if theirs == ours:
        return
    step = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]),
                min(len(theirs), len(ours)))
    raise CheckError(f"token {step} differs: C++ gave {theirs[step:step + 4]}, Python {ours[step:step + 4]}; both run "
                     "one graph, so one of the caches is wrong; in 16 bits near ties may also fall either way")


def _report(request: CppRequest, export: Export, figures: Mapping[str, list[float]]) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in figures.items()}
    return {"folder": str(request.folder), "cache": export.cache, "dtype": export.dtype, "context": request.context,
            "tokens": request.new_tokens, "threads": request.threads, "rounds": request.rounds,
            "map_weights": request.map_weights, "same_tokens": True, "cpp_step_ms": medians["cpp"],
            "python_step_ms": medians["python"], "python_session_ms": medians["session"],
            "to_session": medians["cpp"] / medians["session"], "rounds_ms": dict(figures)}
