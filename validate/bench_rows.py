"""What the benchmark gives: a row a subject and case, in every suite the same fields, and all of one run together."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from exporter import __version__
from exporter.errors import InputError
from validate.bench_timing import Load, Progress, Timed, quiet
from validate.floor import Need, Probe, Rates
from validate.step_profile import Profile

SUITES = ("layer", "model", "profile", "prefill", "export", "engine")
NAME = "bench.json"
DEFAULT = " (default)"  # ends the name of the graph of ours that a session opens
_ALWAYS = ("suite", "subject", "context", "batch", "ms", "spread", "ratio_to_floor", "outputs_equal")


@dataclass(frozen=True)
class Row:
    """One subject in one case. `ms` is the median of all timed steps (export, engine: of processes), `spread` half the
    interquartile range over it; `outputs_equal`: whether they were compared and found equal before, None where a suite
    has nothing to compare.

    `ratio_to_floor` is the time over `floor_ms`, which is `floor_bytes_ms` and `floor_flops_ms` together: what reading
    `read_bytes` and making `flops` operations takes at the best rates of this run; `ratio_to_median_floor` is the time
    over `median_floor_ms`, the same at the median rates. `ratio` is the time over that of our default in the same
    turns. `context`: rows of past, `tokens`: new ones of each sequence, `at_once`: those of them that go through the
    model together, `lengths`: of a ragged batch. `rel`: how far the logits were, `cpu`: CPU seconds per second.
    `peak_bytes`: most memory of a process. Of builds: `builder_ms` in the builder alone, the number of `engines` that
    were tried, and of those that came `from_store`.
    """

    suite: str
    subject: str
    context: int | None
    batch: int | None
    ms: float
    spread: float
    ratio_to_floor: float | None
    outputs_equal: bool | None
    min_ms: float | None = None
    steps: int | None = None
    ratio: float | None = None
    floor_ms: float | None = None
    floor_bytes_ms: float | None = None
    floor_flops_ms: float | None = None
    median_floor_ms: float | None = None
    ratio_to_median_floor: float | None = None
    read_bytes: float | None = None
    flops: float | None = None
    rel: float | None = None
    cpu: float | None = None
    tokens: int | None = None
    at_once: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_of_batch_1: float | None = None
    lengths: tuple[int, ...] | None = None
    cache_bytes_per_token: int | None = None
    peak_bytes: int | None = None
    bytes_written: int | None = None
    builder_ms: float | None = None
    engines: int | None = None
    from_store: int | None = None

    @classmethod
    def of(cls, suite: str, subject: str, timed: Timed, *, context: int | None = None, batch: int | None = None,
           need: Need | None = None, ours_ms: float | None = None, **others: Any) -> Row:
        """A row of what was timed; its floor is known when the run ends."""
        made = cls(suite, subject, context, batch, timed.median, timed.spread, None, others.pop("outputs_equal", True),
                   min_ms=min(timed.ms), steps=len(timed.ms), **others)
        if ours_ms is not None:
            made = replace(made, ratio=timed.median / ours_ms)
        if need is not None:
            made = replace(made, read_bytes=need.bytes, flops=need.flops)
        if made.tokens is not None and batch is not None:
            made = replace(made, tokens_per_s=1e3 * batch * made.tokens / timed.median)
        return made

    def with_floor(self, rates: Rates) -> Row:
        """The same beside its floor, where it has one."""
        if self.read_bytes is None or self.flops is None:
            return self
        need = Need(self.read_bytes, self.flops)
        floor, median = rates.floor(need), rates.at_medians().floor(need)
        return replace(self, ratio_to_floor=self.ms / floor.ms, floor_ms=floor.ms, floor_bytes_ms=floor.bytes_ms,
                       floor_flops_ms=floor.flops_ms, median_floor_ms=median.ms,
                       ratio_to_median_floor=self.ms / median.ms)

    def to_dict(self) -> dict[str, Any]:
        """JSON form: what every row has, and what this one has beyond."""
        return {name: value for name, value in asdict(self).items() if name in _ALWAYS or value is not None}


@dataclass(frozen=True)
class Fit:
    """A straight line through the decode times of one subject over contexts: ms = intercept + slope · rows. `r2` says
    how straight it is; `floor_us_per_row` is the floor's own slope, `median_floor_us_per_row` that at median rates."""

    subject: str
    batch: int
    contexts: tuple[int, ...]
    us_per_row: float
    intercept_ms: float
    r2: float
    floor_us_per_row: float
    median_floor_us_per_row: float

    @property
    def slope_to_floor(self) -> float:
        """What one more row costs, over what it must cost."""
        return self.us_per_row / self.floor_us_per_row

    @property
    def slope_to_median_floor(self) -> float:
        """The same at the median rates."""
        return self.us_per_row / self.median_floor_us_per_row

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Fit | None:
        """Least squares over rows that have a floor; None for fewer than 3 contexts."""
        points = sorted((r.context, r.ms, r.floor_ms, r.median_floor_ms) for r in rows
                        if r.context is not None and r.floor_ms is not None and r.median_floor_ms is not None)
        if len(points) < 3:
            return None
        x, y, *floors = np.array(points, np.float64).T
        slope, intercept = np.polyfit(x, y, 1)
        rest, all_of_it = ((y - slope * x - intercept) ** 2).sum(), ((y - y.mean()) ** 2).sum()
        return cls(rows[0].subject, rows[0].batch or 1, tuple(int(c) for c in x), 1e3 * float(slope), float(intercept),
                   float(1 - rest / all_of_it) if all_of_it else 1.0,
                   *(1e3 * float(np.polyfit(x, floor, 1)[0]) for floor in floors))

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {**asdict(self), "slope_to_floor": self.slope_to_floor,
                "slope_to_median_floor": self.slope_to_median_floor}


@dataclass
class Result:
    """All of one run. `models`: what each suite ran, by suite; `profiles`: where steps' time goes."""

    threads: int
    cores: tuple[int, ...] = ()
    models: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    fits: list[Fit] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    rates: Rates | None = None
    load: list[Load] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=lambda: installed_versions())

    def finish(self, rates: Rates | None) -> None:
        """Set every row beside its floor, and fit the decode times of our default graphs."""
        self.rates = rates
        if rates is not None:
            self.rows = [row.with_floor(rates) for row in self.rows]
            self.profiles = [profile.with_floor(rates) for profile in self.profiles]
        one = {(r.suite, r.subject, r.context): r.tokens_per_s for r in self.rows if r.batch == 1}
        self.rows = [replace(r, tokens_per_s_of_batch_1=one.get((r.suite, r.subject, r.context)))
                     if r.batch and r.batch > 1 and r.tokens_per_s_of_batch_1 is None else r for r in self.rows]
        lines: dict[tuple[int, str], list[Row]] = {}
        for row in self.rows:
            if row.suite == "model" and row.batch and row.lengths is None and row.subject.endswith(DEFAULT):
                lines.setdefault((row.batch, row.subject), []).append(row)
        self.fits += [fit for rows in lines.values() if (fit := Fit.of(rows))]

    def warnings(self) -> list[str]:
        """Contention, part by part."""
        return [w for w in (load.warning() for load in self.load) if w]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"suites": [s for s in SUITES if s in self.models], "models": self.models,
                "when": datetime.now(UTC).isoformat(timespec="seconds"), "threads": self.threads,
                "cores": list(self.cores), "machine": machine(),
                "rows": [row.to_dict() for row in self.rows], "fits": [fit.to_dict() for fit in self.fits],
                "profile": [profile.to_dict() for profile in self.profiles],
                "rates": None if self.rates is None else self.rates.to_dict(),
                "load": [asdict(load) for load in self.load], "not_run": self.not_run, "notes": self.notes,
                "warnings": self.warnings(), "versions": self.versions}


def installed_versions() -> dict[str, str]:
    """What runs in every suite, and the engines' builder, by version."""
    found = {"mla-export": __version__}
    for name in ("onnxruntime", "torch", "numpy", "tensorrt-rtx-cu13"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def machine() -> dict[str, Any]:
    """The processor, in words that tables can show."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {"processor": name, "cores": os.cpu_count(), "system": platform.system()}


def read_run(file: Path) -> dict[str, Any]:
    """A run that was kept as JSON; InputError for what is none."""
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"--from {file}: no such file; expected the {NAME} of an earlier run's --out") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(f"--from {file}: not JSON ({error}); expected the {NAME} of an earlier run") from None
    rows = data.get("rows") if isinstance(data, dict) else None
    known = {f.name for f in fields(Row)}
    if not isinstance(rows, list) or not all(isinstance(r, dict) and set(_ALWAYS) <= set(r) <= known for r in rows):
        raise InputError(f"--from {file}: its rows are not this benchmark's; expected the {NAME} of an earlier run")
    profiles, told = data.get("profile", []), {f.name for f in fields(Profile)}
    if not isinstance(profiles, list) or not all(isinstance(p, dict) and told <= set(p) for p in profiles):
        raise InputError(f"--from {file}: its profile is not this benchmark's; expected the {NAME} of an earlier run")
    if not {"models", "threads", "rates", "fits", "warnings", "not_run", "versions", "machine", "when"} <= set(data):
        raise InputError(f"--from {file}: not a whole run; expected the {NAME} of an earlier run's --out")
    return data


@dataclass
class Run:
    """What all suites of one run share: how to time, what measures the machine meanwhile, and where rows go."""

    result: Result
    probe: Probe
    rounds: int = 5
    budget_s: float = 10.0
    progress: Progress = quiet

    @property
    def threads(self) -> int:
        """Of every subject and of the floor."""
        return self.result.threads

    def left_out(self, ours: Sequence[str], where: str, name: str, error: Exception) -> bool:
        """Whether a subject that failed while it was timed is a peer: it is then told by name, and the run goes on."""
        if name in ours:
            return False
        self.result.not_run.append(f"{name}, {where}: failed: {' '.join(str(error).split())[:200]}")
        return True

    def sample(self, number: int = 0) -> None:
        """One more sample of the machine's rates, between rounds."""
        self.probe.sample()
