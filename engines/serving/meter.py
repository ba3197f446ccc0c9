"""What a server says of itself: counters and times for Prometheus, and one status for a person's page.

The scheduler's thread writes; what others read is published whole after every step.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from engines.serving.pool import Limits
from engines.serving.sequence import DECODING, DONE, PREFILLING, QUEUED, Request, Sequence, StepReport

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

    from engines.serving.scheduler import Scheduler

WINDOW = 10  # seconds that a rate is taken over
HISTORY = 120  # seconds that the page's chart shows
KEPT = 200  # first tokens that the median is taken of
FIRST_TOKEN = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds: a histogram's buckets
STEP = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Meter:
    """Counts of one server since it began."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.began = limits, time.time()
        self.prompt_tokens = self.new_tokens = self.requests = 0
        self.ends, self.copied, self.steps = Counter[str](), Counter[str](), Counter[str]()
        self.errors = Counter[str]()  # answers of the API by status
        self._lock = threading.Lock()
        self._clock = time.monotonic()
        self._recent = deque[tuple[int, int]](maxlen=HISTORY + WINDOW)  # (second since it began, new tokens in it)
        self._first = deque[float](maxlen=KEPT)
        self._first_histogram, self._step_histogram = Buckets(FIRST_TOKEN), Buckets(STEP)
        self._state: dict[str, Any] = {}

    def accepted(self, request: Request) -> None:
        """A request was taken into the queue."""
        with self._lock:
            self.requests += 1
            self.prompt_tokens += len(request.prompt)

    def stepped(self, report: StepReport) -> None:
        """A step was done."""
        made = sum(event.token is not None for event in report.events)
        with self._lock:
            self.new_tokens += made
            for event in report.events:
                if event.token is not None and event.sequence.made == 1 and event.sequence.first_token is not None:
                    seconds = event.sequence.first_token - event.sequence.submitted
                    self._first.append(seconds)
                    self._first_histogram.add(seconds)
            self.copied.update(report.copied)
            if report.kind != "idle":
                self.steps[report.kind] += 1
                self._step_histogram.add(report.seconds)
            if made:
                self._count(int(time.monotonic() - self._clock), made)

    def _count(self, second: int, made: int) -> None:
        if self._recent and self._recent[-1][0] == second:
            made += self._recent.pop()[1]
        self._recent.append((second, made))

    def _rates(self, now: float) -> list[float]:
        """New tokens per second over the last `WINDOW` seconds, as it was at the end of each of the last `HISTORY`
        seconds, or of those since the server began; the last one is of this moment."""
        made, last, found = dict(self._recent), int(now), list[float]()
        for second in range(max(0, last - HISTORY), last + 1):
            first = max(0, second - WINDOW + 1)
            seconds = max((now if second == last else second + 1) - first, 1e-3)
            found.append(round(sum(made.get(s, 0) for s in range(first, second + 1)) / seconds, 2))
        return found

    def ended(self, sequence: Sequence) -> None:
        """A sequence was answered, or given up."""
        with self._lock:
            self.ends[sequence.reason or "unknown"] += 1

    def erred(self, status: int) -> None:
        """The API answered with an error."""
        with self._lock:
            self.errors[str(status)] += 1

    def publish(self, scheduler: Scheduler) -> None:
        """Called by the thread that owns the scheduler: what there is at this moment."""
        pool, now = scheduler.pool, scheduler.clock()
        shown = [*scheduler.running, *scheduler.queue]
        states = Counter(sequence.state for sequence in shown)
        state = {
            "sequences": {name: states[name] for name in (QUEUED, PREFILLING, DECODING)},
            "cache": {"sequences": pool.sequence_bytes, "used": pool.used_bytes, "prefixes": pool.prefixes.nbytes,
                      "staging": pool.staging_bytes, "total": pool.nbytes, "peak": pool.peak,
                      "budget": self.limits.budget, "bytes_per_token": pool.row_bytes},
            "groups": [{"rows": group.capacity, "slots": group.slots, "used": group.used}
                       for _, group in sorted(pool.groups.items())],
            "running": [{"number": s.number, "state": s.state, "prompt_tokens": len(s.request.prompt),
                         "reused_tokens": s.reused, "new_tokens": s.made, "max_new_tokens": s.request.max_new_tokens,
                         "seconds": round(now - s.submitted, 3)} for s in shown[:50] if s.state != DONE],
            "preempted": scheduler.preempted, "prefix_hit_tokens": pool.prefixes.hit_tokens,
            "prefix_evictions": pool.prefixes.evicted}
        with self._lock:
            self._state = state

    def status(self) -> dict[str, Any]:
        """Everything, as JSON; seconds, bytes and counts. Prompts and answers are not in it."""
        with self._lock:
            rates = self._rates(time.monotonic() - self._clock)
            return {**self._state, "uptime_seconds": round(time.time() - self.began, 1),
                    "tokens_per_second": rates[-1], "tokens_per_second_history": rates,
                    "seconds_to_first_token": {"median": statistics.median(self._first) if self._first else None,
                                               "worst": max(self._first, default=None), "of": len(self._first)},
                    "requests": self.requests, "prompt_tokens": self.prompt_tokens, "new_tokens": self.new_tokens,
                    "ended": dict(self.ends), "copied_bytes": dict(self.copied), "steps": dict(self.steps),
                    "errors": dict(self.errors),
                    "limits": {"sequences": self.limits.sequences, "queue": self.limits.queue}}

    def registry(self) -> CollectorRegistry:
        """The same for Prometheus."""
        from prometheus_client import CollectorRegistry

        made = CollectorRegistry()
        made.register(self)
        return made

    def collect(self) -> Iterator[Metric]:
        """prometheus_client's collector."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        now = self.status()
        for name, about, label, values in (
                ("sequences", "Sequences by what they are doing.", "state", now["sequences"]),
                ("cache_bytes", "Latent cache: buffers of sequences, valid rows in them, stored prefixes, staging, all "
                 "of it, the most there was, the budget.", "purpose",
                 {k: v for k, v in now["cache"].items() if k != "bytes_per_token"})):
            gauge = GaugeMetricFamily(f"mla_{name}", about, labels=[label])
            for key, value in values.items():
                gauge.add_metric([key], value)
            yield gauge
        yield GaugeMetricFamily("mla_batch", "Sequences that a decode step computes.", now["sequences"][DECODING])
        yield GaugeMetricFamily("mla_tokens_per_second", f"New tokens over the last {WINDOW} seconds.",
                                now["tokens_per_second"])
        for name, about in (("requests", "Requests accepted."), ("prompt_tokens", "Tokens of their prompts."),
                            ("new_tokens", "Tokens generated."), ("preempted", "Sequences that gave their rows up."),
                            ("prefix_hit_tokens", "Tokens of prompts that were not computed again."),
                            ("prefix_evictions", "Blocks of prefixes evicted.")):
            yield CounterMetricFamily(f"mla_{name}", about, now[name])
        for name, about, label, values in (
                ("ended", "Sequences by how they ended.", "reason", now["ended"]),
                ("errors", "Answers of the API that are errors, by HTTP status.", "status", now["errors"]),
                ("steps", "Steps of the scheduler.", "kind", now["steps"]),
                ("copied_bytes", "Bytes of cache rows written, by reason.", "reason", now["copied_bytes"])):
            counter = CounterMetricFamily(f"mla_{name}", about, labels=[label])
            for key, value in values.items():
                counter.add_metric([key], value)
            yield counter
        with self._lock:
            first, step = self._first_histogram.cumulative(), self._step_histogram.cumulative()
        yield HistogramMetricFamily("mla_seconds_to_first_token", "From a request's arrival.", *first)
        yield HistogramMetricFamily("mla_step_seconds", "One step of the scheduler.", *step)


class Buckets:
    """A histogram: how many values were at most each bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds, self._counts, self._sum = (*bounds, float("inf")), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float) -> None:
        """Count one."""
        self._counts[next(i for i, bound in enumerate(self._bounds) if value <= bound)] += 1
        self._sum += value

    def cumulative(self) -> tuple[list[tuple[str, float]], float]:
        """As Prometheus has it: counts up to each bound, and the sum of the values."""
        total, rows = 0, []
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows, self._sum
