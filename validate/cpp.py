"""The C++ generator beside Python's, on one export: the same tokens or a failed check, and a decode step's time.

Both run ONNX Runtime with as many threads, in turns, a process of C++ and a generation of Python each round. A step of
either is measured whole (inputs bound, the graph run, rows kept, the token chosen); Python's session alone besides,
which is the graph and the copies around it. A round's figure is its median step. On a machine that does other things
as well, times are those of the least round, ratios the median of the rounds', whose two halves met the same weather.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engines import operator_library
from engines.cpp_build import build_command
from engines.generate import Generator
from engines.model_sessions import ModelSessions
from engines.ort import OrtOptions, OrtSession
from engines.session import Feed, Outputs, Session
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
            raise InputError(f"--generator {self.generator}: no such file; build it with: "
                             f"{build_command(self.generator.parent)}")


class _Timed(OrtSession):
    """A session that keeps how long each step of one token took, in milliseconds."""

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.steps: list[float] = []

    def infer(self, feed: Feed, out: Feed | None = None) -> Outputs:
        begin = time.perf_counter()
        outputs = super().infer(feed, out)
        if feed["input_ids"].shape[1] == 1:
            self.steps.append(1e3 * (time.perf_counter() - begin))
        return outputs


class _TimedSessions(ModelSessions):
    """Timed sessions of a model."""

    def _open(self, kind: str) -> Session:
        return _Timed(self.export, self._graph(kind), OrtOptions(threads=self._threads))


class _TimedGenerator(Generator):
    """A generator over timed sessions."""

    def __init__(self, export: Export, threads: int) -> None:
        super().__init__(export, threads=threads)
        self._sessions = _TimedSessions(export, threads=threads)

    def __enter__(self) -> _TimedGenerator:
        return self

    def session_ms(self, count: int) -> float:
        """Median milliseconds of the last `count` decode steps."""
        session = self._sessions["decode"]
        assert isinstance(session, _Timed)
        return statistics.median(session.steps[-count:])


def run(request: CppRequest, progress: Callable[[str], None]) -> dict[str, Any]:
    """Tokens and times of both; CheckError where the tokens differ, with the first step that does."""
    export = open_export(request.folder)
    draw = np.random.default_rng(request.seed)
    prompt = draw.integers(0, export.decoder.vocab_size, request.context).tolist()
    figures: dict[str, list[float]] = {"cpp": [], "python": [], "session": []}
    with _TimedGenerator(export, request.threads) as generator:
        for i in range(request.rounds):
            progress(f"round {i + 1} of {request.rounds}")
            theirs = _in_cpp(request, prompt)
            ours = [step.tokens[0] for step in generator.generate([prompt], request.new_tokens)]
            _same(theirs["answers"][0]["tokens"], ours)
            assert generator.statistics is not None
            figures["cpp"].append(theirs["decode_ms"])
            figures["python"].append(statistics.median(1e3 / rate for rate in generator.statistics.rates))
            figures["session"].append(generator.session_ms(len(ours) - 1))
    return _report(request, export, figures)


def _in_cpp(request: CppRequest, prompt: list[int]) -> dict[str, Any]:
    words = [str(request.generator.absolute()), str(request.folder), "--tokens", ",".join(map(str, prompt)),
             "--max-new-tokens", str(request.new_tokens), "--ignore-eos", "--threads", str(request.threads), "--json"]
    done = subprocess.run([*words, *(["--map-weights"] if request.map_weights else [])], capture_output=True, text=True,
                          check=False, env=os.environ | _operator(request.folder))
    if done.returncode:
        raise InputError(f"{request.generator} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    try:
        made: dict[str, Any] = json.loads(done.stdout)
        _ = made["answers"][0]["tokens"], made["decode_ms"]
    except (ValueError, LookupError, TypeError):
        raise InputError(f"{request.generator}: printed {done.stdout[:80]!r}; expected what mla-generate --json prints"
                         ) from None
    return made


def _operator(folder: Path) -> dict[str, str]:
    """Where the library is that the export's decode graph needs, if any, as the generator is told."""
    needed = operator_library.needed(open_export(folder).graph("decode").formulation)
    return {operator_library.VARIABLE: str(operator_library.library())} if needed else {}


def _same(theirs: list[int], ours: list[int | None]) -> None:
    if theirs == ours:
        return
    step = next((i for i, pair in enumerate(zip(theirs, ours, strict=False)) if pair[0] != pair[1]),
                min(len(theirs), len(ours)))
    raise CheckError(f"token {step} differs: C++ gave {theirs[step:step + 4]}, Python {ours[step:step + 4]}; both run "
                     "one graph, so one of the caches is wrong; in 16 bits near ties may also fall either way")


def _report(request: CppRequest, export: Export, figures: Mapping[str, list[float]]) -> dict[str, Any]:
    least = {name: min(values) for name, values in figures.items()}
    to_session = {name: statistics.median(a / b for a, b in zip(figures[name], figures["session"], strict=True))
                  for name in ("cpp", "python")}
    return {"folder": str(request.folder), "cache": export.cache, "dtype": export.dtype, "context": request.context,
            "tokens": request.new_tokens, "threads": request.threads, "rounds": request.rounds,
            "map_weights": request.map_weights, "same_tokens": True, "cpp_step_ms": least["cpp"],
            "python_step_ms": least["python"], "python_session_ms": least["session"],
            "cpp_to_session": to_session["cpp"], "python_to_session": to_session["python"], "rounds_ms": dict(figures)}
