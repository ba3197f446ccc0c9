"""What continuous batching is worth: tokens per second of several sequences against one at a time, and how long a short
prompt waits for its first token while a long one prefills.

The scheduler runs alone, without HTTP, on one model's sessions; rounds of either kind take turns, since machines drift,
and every figure is a median. Greedy answers of the two are compared: they may part only at a near tie.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.model_sessions import ModelSessions
from engines.serving.pool import Limits
from engines.serving.scheduler import Scheduler
from engines.serving.sequence import LENGTH, Request, Sequence, StepReport
from engines.serving.slots import require_ragged
from exporter.errors import InputError
from exporter.manifest import Export, open_export
from validate.bench_timing import Load, watch

TIE = 1e-3  # of log-probability: where the two best lie nearer than that, float32 sums in another order may choose


@dataclass(frozen=True)
class ServingRequest:
    """`sequences` prompts of half to one and a half times `prompt` tokens, `new` tokens each; a prompt of `long` tokens
    in chunks of `chunk` beside one of 16."""

    folder: Path
    sequences: int = 8
    prompt: int = 64
    new: int = 64
    long: int = 2048
    chunk: int = 256
    rounds: int = 3
    backend: str = "ort"
    threads: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("sequences", 2), ("prompt", 2), ("new", 2), ("long", 2), ("chunk", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise InputError(f"--{name} {getattr(self, name)}: expected at least {least}")


@dataclass
class Round:
    """One run of all prompts: wall and CPU seconds, what the steps did, the sequences."""

    seconds: float
    cpu_seconds: float
    reports: list[StepReport]
    sequences: list[Sequence]
    peak: int

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all sequences over the wall time, prefills included."""
        return sum(s.made for s in self.sequences) / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """The same over this process's CPU time, which others on the machine disturb less."""
        return sum(s.made for s in self.sequences) / self.cpu_seconds

    def step_ms(self) -> float:
        """Median decode step."""
        return 1000 * statistics.median(r.seconds for r in self.reports if r.kind == "decode")


@dataclass
class _Bench:
    request: ServingRequest
    export: Export
    sessions: ModelSessions
    load: list[Load] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw, middle = random.Random(self.request.seed), self.request.prompt
        self._vocabulary, self._draw = self.export.decoder.vocab_size, draw
        lengths = [middle // 2 + middle * i // max(self.request.sequences - 1, 1)
                   for i in range(self.request.sequences)]
        self.prompts = [self.tokens(max(length, 1)) for length in lengths]

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._draw.randrange(self._vocabulary) for _ in range(count))

    def scheduler(self, sequences: int) -> Scheduler:
        longest = max(len(self.prompts[-1]) + self.request.new, self.request.long + 64)
        budget = 4 * (sequences + 1) * longest * self.export.cache_bytes_per_token + (1 << 28)
        return Scheduler(self.sessions, Limits(sequences, len(self.prompts), self.request.chunk, budget, prefixes=0))

    def round(self, sequences: int, logprobs: int | None = None) -> Round:
        """All prompts, `sequences` of them at a time."""
        scheduler, reports = self.scheduler(sequences), list[StepReport]()
        begin, cpu = time.perf_counter(), time.process_time()
        made = [s for p in self.prompts
                for s in scheduler.submit(Request(p, self.request.new, top_logprobs=logprobs))]
        while not scheduler.idle:
            reports.append(scheduler.step())
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        wrong = [s.message for s in made if s.reason != LENGTH]
        if wrong:
            raise InputError(f"{self.request.folder}: a sequence failed: {wrong[0]}")
        return Round(seconds, cpu, reports, made, scheduler.pool.peak)

    def first_token(self, beside: bool) -> tuple[float, float]:
        """Seconds to a short prompt's first token, alone or while a long one prefills; and those that the long one's
        whole prefill takes. It comes at the worst moment, as a chunk of the long one begins."""
        scheduler, short, long = self.scheduler(2), self.tokens(16), self.tokens(self.request.long)
        begin, busy = time.perf_counter(), None
        if beside:
            busy, = scheduler.submit(Request(long, 2))
            scheduler.step()
        asked = time.perf_counter()
        if beside:
            scheduler.step()
        sequence, = scheduler.submit(Request(short, 2))
        while sequence.made == 0:
            scheduler.step()
        waited = time.perf_counter() - asked
        while busy is not None and busy.made == 0:
            scheduler.step()
        return waited, time.perf_counter() - begin


def run(request: ServingRequest, progress: Callable[..., None]) -> dict[str, Any]:
    """All figures. InputError for a model that cannot be served or is too short for what is asked."""
    export = open_export(request.folder)
    require_ragged(export)
    most = max(request.prompt + request.prompt // 2 + request.new, request.long + 2)
    if most > export.max_context:
        raise InputError(f"{request.folder} takes up to {export.max_context} tokens; {most} are asked for; lower "
                         "--long, --prompt or --new, or export with a larger --max-context")
    with ModelSessions(export, request.backend, request.threads) as sessions:
        bench = _Bench(request, export, sessions)
        progress(f"opening {request.folder}")
        sessions.open()
        progress("one at a time, with log-probabilities")
        judge = bench.round(1, logprobs=2)
        one, many = list[Round](), list[Round]()
        with watch("throughput", request.threads or 2, bench.load):
            for number in range(request.rounds):
                for into, sequences in ((many, request.sequences), (one, 1)):
                    progress(f"round {number + 1} of {request.rounds}: {sequences} at a time",
                             number / request.rounds)
                    into.append(bench.round(sequences))
        alone, beside = list[float](), list[tuple[float, float]]()
        with watch("first tokens", request.threads or 2, bench.load):
            for number in range(request.rounds):
                progress(f"first tokens, round {number + 1} of {request.rounds}")
                alone.append(bench.first_token(False)[0])
                beside.append(bench.first_token(True))
    return _report(request, export, judge, one, many, alone, beside, bench.load)


def _report(request: ServingRequest, export: Export, judge: Round, one: list[Round], many: list[Round],
            alone: list[float], beside: list[tuple[float, float]], load: list[Load]) -> dict[str, Any]:
    def figures(rounds: list[Round]) -> dict[str, float]:
        return {"tokens_per_second": statistics.median(r.tokens_per_second for r in rounds),
                "tokens_per_cpu_second": statistics.median(r.tokens_per_cpu_second for r in rounds),
                "step_ms": statistics.median(r.step_ms() for r in rounds)}

    single, together = figures(one), figures(many)
    flips, wrong = compare(judge, [*one, *many])
    copied = Counter[str]()
    for report in (r for r in many[-1].reports if r.kind == "decode"):
        copied.update(report.copied)
    steps = sum(r.kind == "decode" for r in many[-1].reports)
    rows = sum(r.batch for r in many[-1].reports if r.kind == "decode")
    return {
        "folder": str(request.folder), "backend": request.backend, "sequences": request.sequences,
        "prompt_tokens": [len(s.request.prompt) for s in judge.sequences], "new_tokens": request.new,
        "rounds": request.rounds, "chunk": request.chunk, "long": request.long,
        "threads": request.threads, "one_at_a_time": single, "together": together,
        "ratio": together["tokens_per_second"] / single["tokens_per_second"],
        "cpu_ratio": together["tokens_per_cpu_second"] / single["tokens_per_cpu_second"],
        "first_token": {"alone_s": statistics.median(alone), "beside_s": statistics.median(w for w, _ in beside),
                        "worst_beside_s": max(w for w, _ in beside),
                        "long_prefill_s": statistics.median(whole for _, whole in beside)},
        "copies": {"steps": steps, "new_rows_expected": rows * export.cache_bytes_per_token, **copied},
        "cache_peak_bytes": many[-1].peak, "flips": flips, "differ": wrong,
        "pass": not wrong and copied["new"] == rows * export.cache_bytes_per_token,
        "warnings": [line for entry in load if (line := entry.warning())]}


def compare(judge: Round, others: list[Round]) -> tuple[int, list[str]]:
    """How many answers part from the judge's at a near tie, and those that part elsewhere, in words."""
    events = [event for report in judge.reports for event in report.events if event.token is not None]
    gaps: dict[int, list[float]] = {}
    for event in events:
        gaps.setdefault(event.sequence.number, []).append(event.top[0][1] - event.top[1][1])
    flips, wrong = 0, list[str]()
    for number, other in enumerate(others):
        for mine, theirs in zip(judge.sequences, other.sequences, strict=True):
            pairs = zip(mine.new_tokens, theirs.new_tokens, strict=True)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            if at is None:
                continue
            gap = gaps[mine.number][at]
            if gap <= TIE:
                flips += 1
            else:
                wrong.append(f"round {number}, sequence {mine.number}, token {at}: the two best lie {gap:.1e} apart")
    return flips, wrong
