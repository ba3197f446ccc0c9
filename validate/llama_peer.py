"""llama.cpp as a subject: a GGUF of the same weights, run by a process in a virtual environment of its own.

It is built from source on the machine that it is to run on, for the instructions of its processor: wheels of it leave
out AVX-512, on which our runtime relies. A past of given rows goes into its cache through its own state of a sequence,
so that it is compared and timed behind the same rows as all others. It works only while it is asked: its threads sleep
some milliseconds after a step, as the benchmark's pauses allow for.
"""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from validate import peer_environment
from validate.bench_timing import Step
from validate.gguf_plan import plan
from validate.peers import ModelShape, Past, Subject

NAME, PACKAGE = "llama.cpp", "llama-cpp-python==0.3.36"
PINS = ("gguf==0.19.0", PACKAGE)
BUILD = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}  # without pictures
# rel of logits against float32's, by the coarsest of weights, cache and attention: flash attention rounds to f16
TOLERANCES = {"f32": 1e-3, "f16": 1e-2, "q8_0": 0.2, "q4_0": 2.0}  # codes on v3-class: 0.1 and 1.1
DTYPES = {"f32": "fp32", "f16": "fp16"}
QUANTISE = {"q8_0": "int8", "q4_0": "int4"}  # what our exports call weights of as many bits
_CHILD = Path(__file__).with_name("llama_child.py")


def install(cache: Path = peer_environment.DEFAULT_CACHE,
            progress: Callable[..., None] = lambda message, share=None: None) -> Path:
    """The Python that has llama.cpp; made on first use under `cache`, a quarter of an hour of compiling. AbsentError if
    that cannot be done here."""
    return peer_environment.install(NAME, cache / "llama", PINS, progress, **BUILD)


@dataclass(frozen=True)
class Variant:
    """One way to run it: the attention's form, flash attention or not, dtypes of the matrices and of the cache."""

    form: str = "absorbed"
    flash: bool = True
    dtype: str = "f32"
    cache: str = "f32"

    @property
    def repack(self) -> bool:
        """Whether weights may be laid out anew for the processor's matrix instructions. On a processor with AMX this
        version then aborts on an absorbed weight of f16, whose product with permuted queries its kernels refuse, and
        ends by SIGILL on codes, of which it also gives three dimensions the room of two. Float32 is left alone."""
        return self.dtype == "f32" or (self.form, self.dtype) == ("expanded", "f16")

    @property
    def name(self) -> str:
        """As the benchmark's rows call it."""
        words = (f"{NAME} {self.dtype}", self.form, *(["flash"] if self.flash else []),
                 *([f"{self.cache} cache"] if self.cache != "f32" else []))
        return ", ".join(words)


def variants(quantise: Sequence[str] = ()) -> Iterator[Variant]:
    """Both forms with weights of float32 and its usual cache of f16, with flash attention and without; absorbed with
    all in float32, as ours; and absorbed in f16, and in codes where ours are codes (`quantise`, as our exports name
    them)."""
    for form in ("absorbed", "expanded"):
        for flash in (True, False):
            yield Variant(form, flash, cache="f16")
    yield Variant()
    for dtype in ("f16", *(d for d, ours in QUANTISE.items() if ours in quantise)):
        for flash in (True, False):
            yield Variant("absorbed", flash, dtype, "f16")


class Child:
    """The process, and the pipe to it. What goes wrong there is a RuntimeError here."""

    def __init__(self, python: Path) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed with the process)
        environment = peer_environment.variables(GGML_NO_BACKTRACE="1")
        self._process = subprocess.Popen([str(python), "-P", str(_CHILD)], stdin=subprocess.PIPE, env=environment,
                                         stdout=subprocess.PIPE, stderr=self._errors)

    def ask(self, op: str, data: np.ndarray | bytes = b"", **words: Any) -> tuple[dict[str, Any], bytes]:
        """The answer to a request, and the bytes with it."""
        if isinstance(data, np.ndarray):
            words |= {"dtype": data.dtype.str, "shape": data.shape}
        raw = np.ascontiguousarray(data).data if isinstance(data, np.ndarray) else data
        size = data.nbytes if isinstance(data, np.ndarray) else len(data)
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in
        assert pipe_out
        try:
            pipe_in.write(json.dumps({"op": op, **words, "bytes": size}).encode() + b"\n")
            pipe_in.write(raw)
            pipe_in.flush()
        except BrokenPipeError:
            raise RuntimeError(self._last_words(op)) from None
        line = pipe_out.readline()
        if not line:
            raise RuntimeError(self._last_words(op))
        found = json.loads(line)
        payload = pipe_out.read(found["bytes"])
        if "error" in found:
            raise RuntimeError(f"{op}: {found['error']}")
        return found, payload

    def logits(self, op: str, data: np.ndarray, **words: Any) -> np.ndarray:
        """The logits that a request is answered with."""
        found, payload = self.ask(op, data, **words)
        return np.frombuffer(payload, np.float32).reshape(found["shape"])

    def _last_words(self, op: str) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        how = signal.Signals(-code).name if code < 0 else f"exit {code}"
        return f"{NAME} ended in {op!r} ({how})" + (f": {lines[-1][:200]}" if lines else "")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin:
            with suppress(BrokenPipeError):  # it ended before it read all
                self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()
        self._errors.close()


def write_gguf(python: Path, checkpoint: Path, form: str, dtype: str, out: Path) -> int:
    """Write the GGUF file of a checkpoint to `out`; its bytes. AbsentError if llama.cpp cannot hold the model."""
    made, child = json.dumps(plan(checkpoint, form, dtype)).encode(), Child(python)
    try:
        return int(child.ask("write", made, path=str(out.absolute()))[0]["bytes_written"])
    except BaseException:
        out.unlink(missing_ok=True)
        raise
    finally:
        child.close()


class Llama(Subject):
    """A GGUF file that llama.cpp has open. `hold` serves both a decode step and a piece of prompt: its step takes the
    new tokens [B, T] behind the past, and removes them again."""

    working_caches = 2  # while a past is handed over
    at_once = 512  # tokens of a prompt that it works on together

    def __init__(self, python: Path, gguf: Path, variant: Variant, threads: int, shape: ModelShape) -> None:
        self.name, self.variant, self._shape = variant.name, variant, shape
        floats = shape.latent_floats if variant.form == "absorbed" else shape.expanded_floats
        self.cache_bytes_per_token = {"f32": 4, "f16": 2}[variant.cache] * floats
        self.tolerance = max(TOLERANCES[d] for d in (variant.dtype, variant.cache, "f16" if variant.flash else "f32"))
        self.quantise = QUANTISE.get(variant.dtype)
        self.dtype, self.cache_dtype = DTYPES.get(variant.dtype, "fp32"), DTYPES[variant.cache]
        self._child = Child(python)
        try:
            opened, _ = self._child.ask("open", path=str(gguf.absolute()), threads=threads, flash=variant.flash,
                                        cache=variant.cache, repack=variant.repack)
        except BaseException:
            self._child.close()
            raise
        self.system = str(opened["system"])  # what it was built for

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """See Subject."""
        tokens = np.concatenate([prompt, follow], axis=1).astype(np.int64)
        return self._child.logits("generate", tokens, prompt=prompt.shape[1])

    def hold(self, past: Past, token: np.ndarray) -> Step:
        """See Subject. It holds one past at a time: steps of one before are at an end."""
        rows = np.stack(past.rows)
        if not self._shape.pairs:  # it rotates neighbours: such columns lie side by side
            rope = rows[..., self._shape.latent :].reshape(*rows.shape[:-1], 2, -1)
            rows[..., self._shape.latent :] = rope.swapaxes(-1, -2).reshape(*rows.shape[:-1], -1)
        self._child.ask("hold", rows, room=token.shape[1])
        tokens = np.ascontiguousarray(token, np.int64)
        return lambda: self._child.logits("run", tokens)

    def close(self) -> None:
        """See Subject."""
        self._child.close()


def subjects(python: Path, checkpoint: Path, work: Path, threads: int, chosen: Iterable[Variant],
             progress: Callable[..., None] = lambda message, share=None: None) -> list[Llama]:
    """Open each variant over `checkpoint`; GGUF files are written under `work` once. AbsentError if llama.cpp cannot
    hold the model, RuntimeError if it fails."""
    shape, found = ModelShape.of(checkpoint), list[Llama]()
    try:
        for variant in chosen:
            gguf = work / f"{variant.form}-{variant.dtype}.gguf"
            if not gguf.is_file():
                progress(f"writing {gguf.name}")
                write_gguf(python, checkpoint, variant.form, variant.dtype, gguf)
            found.append(Llama(python, gguf, variant, threads, shape))
    except BaseException:
        for subject in found:
            subject.close()
        raise
    return found
