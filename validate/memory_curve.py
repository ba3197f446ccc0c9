"""Memory over context: weights, cache, a step's scratch and the peak of all three, of every way to run an attention.

Eager MLA (absorbed, expanding) and eager MHA take a decode step, ONNX Runtime a decode step and a prefill chunk, each
point in a process of its own; engines give the figures that their builder recorded, and the prediction over context.
`how` says what a row is: measured, builder (recorded at a profile's maximum), predicted, or formula (what must be alive
together, where a point could not be measured). What did not run is named.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from engines import lint, predict
from engines.measure import available_memory, measure
from engines.records import EngineRecord, built_backends, limits_of, open_engines
from exporter import console
from exporter.dtypes import DTYPES
from exporter.errors import CheckError, InputError
from exporter.formulations import BY_NAME
from exporter.manifest import Export, GraphEntry
from exporter.presets import source_shapes
from exporter.signature import NO_CACHE
from validate.eager import FORMS, cache_bytes, weight_numbers
from validate.eager_memory import eager_memory, measured
from validate.gpu_device import CudaDevice, Device, absent
from validate.memory import unmeasurable

EAGER = {"absorbed": "eager MLA, absorbed", "expanding": "eager MLA, expanding", "mha": "eager MHA"}
MOST, POINTS, STEP = 32768, 4, 4  # the default grid: its last context at most, its points, how far apart
SHARE = 0.8  # of the free memory that a point may need
RESOLVED = 2_000_000  # bytes that a cache must grow by before a process's resident memory tells its slope


@dataclass(frozen=True)
class CurveRequest:
    """`contexts` by ascending size: rows attended, new ones included; `chunk` new tokens of a prefill; after `budget`
    seconds no further point is begun."""

    contexts: tuple[int, ...]
    batch: int = 1
    chunk: int = 512
    budget: float = 120.0

    @classmethod
    def of(cls, made: Export, contexts: str | None = None, batch: int | None = None, chunk: int = 512,
           budget: float = 120.0) -> CurveRequest:
        """Contexts by commas, or four of them, each four times the one before, up to the export's or 32768.
        InputError for what is no context of the export."""
        if budget <= 0 or chunk < 1 or (batch is not None and batch < 1):
            raise InputError(f"--budget {budget:g}, --chunk {chunk}, --max-batch {batch}: expected more than 0")
        if contexts is None:
            last = min(made.max_context, MOST)
            grid = {last // STEP**i for i in range(POINTS)}
            return cls(tuple(sorted(c for c in grid if c >= 2)) or (last,), batch or 1, chunk, budget)
        words = contexts.split(",")
        if not all(w.strip().isdigit() for w in words):
            raise InputError(f"--contexts {contexts!r}: expected numbers such as 1024,4096")
        asked = tuple(sorted({int(w) for w in words}))
        if asked[0] < 2 or asked[-1] > made.max_context:
            raise InputError(f"--contexts {contexts}: expected numbers from 2 to {made.max_context}, the context of "
                             f"{made.folder}")
        return cls(asked, batch or 1, chunk, budget)


@dataclass(frozen=True)
class Row:
    """One point. Bytes; `peak_bytes` is of weights, cache and step together. `scope`: attention (one) or model (what
    the export's graphs hold). `…_formula_bytes`: what the tensors of the cache must take, what of a step must be alive
    together; None where no formula is known."""

    subject: str
    scope: str
    step: str
    tokens: int
    context: int
    batch: int
    device: str
    how: str
    weights_bytes: int
    cache_bytes: int
    step_bytes: int
    peak_bytes: int
    cache_formula_bytes: int | None = None
    step_formula_bytes: int | None = None


@dataclass
class Curves:
    """All rows of a request, and what was not run and why."""

    request: CurveRequest
    cache: str
    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON form, with the cache bytes that one more token takes, between the first and last context measured."""
        return {**asdict(self.request), "contexts": list(self.request.contexts), "cache": self.cache,
                "rows": [asdict(r) for r in self.rows], "per_token": self.per_token(), "not_run": self.not_run}

    def per_token(self) -> list[dict[str, Any]]:
        """The slope of every measured cache: bytes per token of one sequence."""
        lines: dict[tuple[str, str], list[Row]] = {}
        for r in self.rows:
            if r.how == "measured" and r.step == "decode":
                lines.setdefault((r.subject, r.scope), []).append(r)
        return [{"subject": subject, "scope": scope, "cache_bytes_per_token":
                 (rows[-1].cache_bytes - rows[0].cache_bytes) / (rows[-1].context - rows[0].context) / rows[0].batch}
                for (subject, scope), rows in lines.items() if _growth(rows) >= RESOLVED]


def _growth(rows: Sequence[Row]) -> int:
    """By how much a cache must grow between the first and the last of these rows."""
    return (rows[-1].cache_formula_bytes or 0) - (rows[0].cache_formula_bytes or 0)


class _Climb:
    """Takes one point after another, within time and memory."""

    def __init__(self, made: Export, curves: Curves, progress: Callable[..., None]) -> None:
        self.made, self.curves, self.request, self.progress = made, curves, curves.request, progress
        self.ends = time.monotonic() + curves.request.budget
        self.scope = "model" if made.contract == "model" else "attention"
        self.late: list[str] = []

    def skip(self, reason: str) -> None:
        """Name what was not run, once."""
        if reason not in self.curves.not_run:
            self.curves.not_run.append(reason)

    def allowed(self, what: str, need: int, free: int) -> bool:
        """Whether time and memory are left for a point; if not, it is named."""
        if time.monotonic() > self.ends:
            self.late.append(what)
            return False
        if need > SHARE * free:
            self.skip(f"{what}: not run: needs about {console.size(need)}, {console.size(free)} are free; give smaller "
                      "--contexts or --max-batch")
            return False
        return True

    @property
    def left(self) -> float:
        """Seconds that a point may still take."""
        return max(5.0, self.ends - time.monotonic())

    # --- eager ------------------------------------------------------------------------------------------------------

    def eager(self, form: str, context: int, meter: Device | None) -> None:
        """One decode step of one eager attention: on the CPU in a process of its own, or on the device of a meter."""
        made, batch, width = self.made, self.request.batch, DTYPES[self.made.dtype].itemsize
        c, device = made.config, "cpu" if meter is None else meter.torch
        weights = width * weight_numbers(c, form, sum(map(prod, source_shapes(c).values())))
        cache = cache_bytes(c, form, batch, context, width)
        step = FORMS[form].peak_bytes(c, batch, context - 1, 1, width)
        what = f"{EAGER[form]} on {device} at batch {batch} x {context}"
        self.progress(what)
        # weights once more while they are made, a 16-bit step perhaps in float32
        need, free = 3 * weights + cache + 3 * step, available_memory() if meter is None else meter.free()
        row = self._row(EAGER[form], "decode", 1, context, device, batch) | {
            "scope": "attention", "cache_formula_bytes": cache, "step_formula_bytes": step}
        found = None
        if self.allowed(what, need, free):
            try:
                found = (measured(c, form, made.dtype, batch, context - 1, self.left) if meter is None else
                         eager_memory(meter, c, form, made.dtype, batch, context - 1))
            except CheckError as error:
                self.skip(f"{what}: not run: {error}")
        if meter is not None:
            meter.release()
        figures = (weights, cache, step, weights + cache + step) if found is None else (
            found.weights_bytes, found.cache_bytes, found.step_bytes, found.peak_bytes)
        self._add(row, "formula" if found is None else "measured", figures)

    def _row(self, subject: str, step: str, tokens: int, context: int, device: str, batch: int) -> dict[str, Any]:
        """What a row says of itself; the cache must hold `context` latent rows of every sequence."""
        return {"subject": subject, "scope": self.scope, "step": step, "tokens": tokens, "context": context,
                "batch": batch, "device": device,
                "cache_formula_bytes": batch * context * self.made.cache_bytes_per_token}

    def _add(self, row: dict[str, Any], how: str, figures: tuple[int, int, int, int]) -> None:
        weights, cache, step, peak = figures
        self.curves.rows.append(Row(**row, how=how, weights_bytes=weights, cache_bytes=cache, step_bytes=step,
                                    peak_bytes=peak))

    # --- ONNX Runtime -----------------------------------------------------------------------------------------------

    def ort(self, graph: GraphEntry, context: int) -> None:
        """One step of a default graph in ONNX Runtime on the CPU, in a process of its own."""
        made, batch = self.made, self.request.batch
        tokens = self.tokens(graph.kind, context)
        sizes = {"B": batch, "T": tokens, "S": context - tokens}
        if not any("S" in t.shape for t in graph.inputs):  # scatter: S_max rows; without a cache: none
            sizes.pop("S")
        what = f"ONNX Runtime, {graph.name} at batch {batch} x {context}"
        self.progress(what)
        path, weights = made.folder / graph.file, int(made.data["weights"]["bytes"])
        cache, step = batch * context * made.cache_bytes_per_token, lint.live_peak(path, sizes)
        if not self.allowed(what, 2 * weights + 2 * cache + step, available_memory()):
            return
        try:
            found = measure(path, graph.inputs, graph.outputs, sizes, timeout=self.left, option="--budget")
        except CheckError as error:
            self.skip(f"{what}: not run: {error}")
            return
        row = self._row(f"ONNX Runtime, {graph.kind}", graph.kind, tokens, context, "cpu", batch) | {
            "step_formula_bytes": step, "cache_formula_bytes": cache if made.cache != NO_CACHE else None}
        loaded = found.loaded_bytes - found.bare_bytes
        self._add(row, "measured", (loaded, found.io_bytes, found.activation_bytes,
                                    loaded + found.io_bytes + found.activation_bytes))

    def tokens(self, kind: str, context: int) -> int:
        """New tokens of a step over a context: at most half of it is new, or all where nothing is cached."""
        if self.made.cache == NO_CACHE:
            return context
        return 1 if kind == "decode" else max(1, min(self.request.chunk, context // 2))

    # --- engines ----------------------------------------------------------------------------------------------------

    def engines(self, backend: str) -> list[EngineRecord]:
        """What a backend's builder recorded of the engines that it kept."""
        kept = [e for e in open_engines(self.made, backend).engines if e.file]
        for e in kept:
            for kind, sizes, activation in zip(e.serves, map(limits_of, e.profiles), e.profile_activation_bytes,
                                               strict=False):
                rows = self.made.max_context if self.made.cache == "scatter" else sizes.get("S", 0) + sizes["T"]
                cache = sizes["B"] * rows * self.made.cache_bytes_per_token
                row = self._row(f"{backend}, {kind}", kind, sizes["T"], rows, "-", sizes["B"])
                self._add(row, "builder", (e.weight_bytes, cache, activation, e.weight_bytes + cache + activation))
        return kept

    def predicted(self, graph: GraphEntry, weights: int, backend: str) -> None:
        """The prediction of a builder's activation, over context."""
        batch = self.request.batch
        for context in self.contexts(graph.kind):
            tokens = self.tokens(graph.kind, context)
            found = predict.predicted(self.made, graph, {"B": batch, "T": tokens, "S": context - tokens}, backend)
            if found is None:
                self.skip(f"{backend}, {graph.name}: not predicted: no builds of its kind were fitted")
                return
            cache = batch * context * self.made.cache_bytes_per_token
            row = self._row(f"{backend}, {graph.kind}", graph.kind, tokens, context, "-", batch)
            self._add(row, "predicted", (weights, cache, found.bytes, weights + cache + found.bytes))

    def contexts(self, kind: str) -> Sequence[int]:
        """Contexts at which a graph's memory differs: a preallocated cache has one size."""
        return (self.made.max_context,) if self.made.cache == "scatter" else self.request.contexts


def curves(made: Export, request: CurveRequest, progress: Callable[..., None] = lambda message, share=None: None
           ) -> Curves:
    """Every row that time and memory allow; eager attention on the CUDA device as well, where there is one."""
    no_device = absent()
    device: Device | None = None if no_device else CudaDevice()
    found = Curves(request, made.cache)
    climb = _Climb(made, found, progress)
    reason = unmeasurable(made)
    if reason:
        climb.skip(reason)
    if made.cache == NO_CACHE:
        climb.skip("eager attention: not run: a graph without a cache has no decode step")
    offered = {*request.contexts, *climb.contexts("decode")}
    for context in sorted(offered):  # the smallest first: what does not fit the time are the largest
        for graph in [] if reason else [g for g in made.graphs if g.default and context in climb.contexts(g.kind)]:
            climb.ort(graph, context)
        for form in FORMS if made.cache != NO_CACHE and context in request.contexts else ():
            for meter in [None, device] if device else [None]:
                climb.eager(form, context, meter)
    if device is None:
        climb.skip(f"eager MLA and MHA on CUDA: not run: {no_device}")
    _engine_rows(climb)
    if climb.late:
        climb.skip(f"{len(climb.late)} points, from {climb.late[0]} on: not run: {request.budget:g} s were spent; "
                   "allow more with --budget")
    if not found.per_token() and any(r.how == "measured" for r in found.rows):
        climb.skip(f"cache of one more token: not measured: no cache grows by {console.size(RESOLVED)} over these "
                   "contexts, and resident memory resolves no less; give larger --contexts or --max-batch")
    found.rows.sort(key=lambda r: (r.scope != "attention", r.step, r.device, r.subject, r.how, r.context))
    return found


def _engine_rows(climb: _Climb) -> None:
    """Recorded figures of every backend that has engines, and predictions for TensorRT's, or for what it would build
    from."""
    made, predicted = climb.made, False
    for backend in built_backends(made):
        try:
            kept = climb.engines(backend)
        except InputError as error:
            climb.skip(f"{backend}: not read: {error}")
            continue
        for e in kept if backend.startswith("trt") else []:
            for graph in (g for g in made.graphs if g.name in e.serves.values()):
                climb.predicted(graph, e.weight_bytes, backend)
                predicted = True
    if not built_backends(made):
        climb.skip("engines: none built; `python -m engines build` records what theirs take")
    for graph in [] if predicted else [g for g in made.graphs if g.default]:
        if made.dtype in BY_NAME[graph.formulation].dtypes.get("trt-rtx", ()):
            climb.predicted(graph, int(made.data["weights"]["bytes"]), "trt-rtx")
