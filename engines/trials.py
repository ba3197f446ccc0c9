"""The candidates of one backend built one after another, each at its opt points, and what came of every one.

Figures of earlier builds are taken from the cache (engines.store); what is built is built in a child (engines.bounded).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from engines import bounded, lint, predict, trt
from engines.backends import open_plan
from engines.build_request import BuildRequest
from engines.commands import command_line
from engines.records import Attempt, EngineRecord, limits_of
from engines.search import USUAL, Candidate, OptPoint, leanest_of, opt_points, profiles
from engines.session import external_places
from engines.store import Figures, Store, key_of
from engines.timing import step_milliseconds
from exporter.errors import CheckError, InputError
from exporter.manifest import Export
from exporter.signature import Profile, profile

SEARCH_SECONDS = 3.0  # a candidate that builds slower than this is built at its usual opt point only, unless asked for
Progress = Callable[..., None]


@dataclass(frozen=True)
class _Try:
    """An attempt, of what, and its place in the cache."""

    attempt: Attempt
    candidate: Candidate
    point: OptPoint
    key: str


class Trials:
    """Builds of one backend from one export, in `folder`: the best plan so far of each candidate lies there as
    `ENGINE.engine`. `refused`: candidates that were not built, with the reason. `version`: the library's."""

    def __init__(self, export: Export, request: BuildRequest, folder: Path, builder: bounded.Builder, store: Store,
                 progress: Progress = lambda message, share=None: None) -> None:
        self.export, self.request, self.folder, self.store = export, request, folder, store
        self.refused: dict[str, str] = {}
        self.version, self.device = str(trt.load(request.backend).__version__), _device_name()
        self._builder, self._progress, self._places = builder, progress, external_places(export)
        self._tries: list[_Try] = []

    @property
    def attempts(self) -> list[Attempt]:
        """All that was tried, in order."""
        return [t.attempt for t in self._tries]

    def run(self, found: list[Candidate]) -> None:
        """Lint all, then build all. A candidate that is only too large at these limits, or that the builder itself
        fails on, is left out with its reason, as long as its kinds have another and it was not asked for by name; any
        other finding ends the build."""
        fitting = self._lint(found)
        for number, candidate in enumerate(fitting):
            try:
                self._search(candidate, number / len(fitting))
            except trt.BuildError as failure:
                rivals = [c for c in fitting if c is not candidate and c.name not in self.refused]
                if candidate.graph.formulation == self.request.formulation:
                    raise
                if not _serve_all(candidate, rivals):  # say what became of those that failed before as well
                    lost = [self.refused[c.name] for c in found if c.name in self.refused
                            and set(c.serves) & set(candidate.serves)]
                    raise CheckError("; ".join([*lost, f"{candidate.name} was not built: {failure}"])) from None
                self._refuse(candidate, f"{candidate.name} was not built: {failure}")

    def records(self) -> list[EngineRecord]:
        """Each candidate at its best opt point."""
        return [self._record(a) for a in leanest_of(self.attempts)]

    def timed(self, records: list[EngineRecord]) -> tuple[list[EngineRecord], str]:
        """Records with the time of a step, where a device can run one; and what was run."""
        if self.device is None:
            return records, "not run: no CUDA device; the least activation is kept"
        found, slips = [], []
        for record in records:
            made = self.with_plan(record)
            self._progress(f"{self.request.backend}: timing {made.engine}")
            try:
                found.append(replace(made, file=None, milliseconds=self._milliseconds(made)))
            except InputError as error:  # it does not load or run beside what the device holds
                found.append(replace(made, file=None))
                slips.append(f"{made.engine} was not timed: {error}")
        return found, "; ".join([f"median step on {self.device}, at the opt point; the fastest is kept", *slips])

    def with_plan(self, record: EngineRecord) -> EngineRecord:
        """The record with its plan in the folder: at hand, from the cache, or built now."""
        plan, tried = self.folder / f"{record.engine}.engine", self._try_of(record)
        if not plan.exists() and not self.store.plan(tried.key, plan):
            self._progress(f"{self.request.backend}: {record.engine}, its plan")
            figures = self._built(tried.candidate, tried.point, plan)
            record = replace(record, cached=False, **_sizes_of(figures))
            self._tries[self._tries.index(tried)] = replace(tried, attempt=replace(
                tried.attempt, cached=False, **_sizes_of(figures)))
        return replace(record, file=plan.name)

    def remember(self, record: EngineRecord) -> None:
        """Keep a record's plan for later builds."""
        figures = Figures(record.activation_bytes, record.profile_activation_bytes, record.weight_bytes,
                          record.plan_bytes, record.seconds, self.version)
        self.store.keep(self._try_of(record).key, figures, self.folder / str(record.file))

    def command(self, record: EngineRecord, folder: Path) -> str:
        """The build of a record as a command line of the vendor's own tool, into `folder`."""
        tried = self._try_of(record)
        return command_line(self.request.backend, self.export.folder / tried.candidate.graph.file,
                            self._shapes(tried.candidate, tried.point), folder / str(record.file),
                            self.request.options, handed=self._places)

    def _lint(self, found: list[Candidate]) -> list[Candidate]:
        """Candidates that fit; those too large at the limits are refused. Other findings are errors."""
        for c in found:
            findings = [f for sizes in self._sizes(c) for f in lint.lint(self.export.folder / c.graph.file, sizes)]
            if findings:
                first, more = findings[0], len(findings) - 1
                reason = (f"{c.name} was not built: [{first.rule}] {first.node}: {first.message}"
                          + (f" (and {more} more)" if more else ""))
                if any(f.rule != lint.TOO_LARGE for f in findings):
                    raise CheckError(reason)
                self._refuse(c, reason)
        fitting = [c for c in found if c.name not in self.refused]
        named = [c.name for c in found if c.name in self.refused and c.graph.formulation == self.request.formulation]
        lost = [c.name for c in found if not _serve_all(c, fitting)]
        if named or lost:
            raise CheckError("; ".join(self.refused[name] for name in named or lost))
        return fitting

    def _search(self, candidate: Candidate, share: float) -> None:
        """The usual opt point, then the others where that is quick or asked for."""
        path, wanted = self.export.folder / candidate.graph.file, self.request.opt_search
        scores = [found for sizes in self._sizes(candidate) if (found := lint.score_product(path, sizes))]
        least = max(scores, key=lambda found: found[1], default=("", 0))
        for point in opt_points(self.export, candidate, self.request):
            self._progress(f"{self.request.backend}: {candidate.name}, opt S {point.rows}", share)
            try:
                attempt = self._attempt(candidate, point, least)
            except trt.BuildError as failure:
                if point == USUAL:
                    raise
                self._note(candidate, point, Attempt(**self._what(candidate, point), refused=str(failure)))
                continue
            if wanted is False or (wanted is None and (attempt.seconds or 0) > SEARCH_SECONDS):
                return

    def _attempt(self, candidate: Candidate, point: OptPoint, least: tuple[str, int]) -> Attempt:
        """One build, or the figures of an earlier one; of a candidate's plans the best stays in the folder."""
        key, fresh = self._key(candidate, point), self.folder / f"{candidate.name}.new"
        figures = self.store.figures(key)
        cached = figures is not None
        figures = figures or self._built(candidate, point, fresh)
        if figures.activation_bytes < least[1]:
            raise trt.BuildError(f"{candidate.graph.file}: the builder reports {figures.activation_bytes} bytes of "
                                 f"activation, and {least[0]} alone has {least[1]}: it under-reports; lower batch, "
                                 "context or chunk")
        if not cached:
            self.store.keep(key, figures)
        attempt = Attempt(**self._what(candidate, point), **_sizes_of(figures), cached=cached)
        self._note(candidate, point, attempt)
        if leanest_of([a for a in self.attempts if a.engine == candidate.name]) == [attempt]:
            plan = self.folder / f"{candidate.name}.engine"
            plan.unlink(missing_ok=True)  # of a point that was beaten
            if not cached:
                fresh.rename(plan)
        fresh.unlink(missing_ok=True)
        return attempt

    def _built(self, candidate: Candidate, point: OptPoint, to: Path) -> Figures:
        path = self.export.folder / candidate.graph.file
        bounded.require_memory(path)
        return self._builder.build(self.request.backend, path, self._shapes(candidate, point), self.request.options,
                                   self._places, to)

    def _shapes(self, candidate: Candidate, point: OptPoint) -> list[Profile]:
        return [profile(candidate.graph.inputs, limits)
                for limits in profiles(self.export, candidate, self.request, point)]

    def _key(self, candidate: Candidate, point: OptPoint) -> str:
        options = asdict(replace(self.request.options, timing_cache=None))
        return key_of(self.export, candidate.graph, backend=self.request.backend, version=self.version,
                      device=self.device, options=options, profiles=self._what(candidate, point)["profiles"])

    def _what(self, candidate: Candidate, point: OptPoint) -> dict[str, Any]:
        """What is tried, as an Attempt's fields."""
        stated = [{name: [r.min, r.opt, r.max] for name, r in limits.items()}
                  for limits in profiles(self.export, candidate, self.request, point)]
        return {"engine": candidate.name, "graph": candidate.graph.name, "kind": candidate.kind,
                "formulation": candidate.graph.formulation, "profiles": stated, "at_default": point == USUAL}

    def _sizes(self, candidate: Candidate) -> list[dict[str, int]]:
        return [limits_of(p) for p in self._what(candidate, USUAL)["profiles"]]

    def _refuse(self, candidate: Candidate, reason: str) -> None:
        self.refused[candidate.name] = reason
        self._note(candidate, USUAL, Attempt(**self._what(candidate, USUAL), refused=reason))

    def _note(self, candidate: Candidate, point: OptPoint, attempt: Attempt) -> None:
        self._tries.append(_Try(attempt, candidate, point, self._key(candidate, point)))

    def _try_of(self, record: EngineRecord) -> _Try:
        return next(t for t in self._tries if t.attempt.engine == record.engine
                    and t.attempt.profiles == record.profiles and t.attempt.refused is None)

    def _record(self, a: Attempt) -> EngineRecord:
        assert a.activation_bytes is not None
        assert a.profile_activation_bytes is not None
        assert a.weight_bytes is not None
        assert a.plan_bytes is not None
        candidate = next(t.candidate for t in self._tries if t.attempt is a)
        graph, predicted = candidate.graph, []
        for sizes in map(limits_of, a.profiles):
            p = predict.predicted(self.export, graph, sizes, self.request.backend, self.version)
            predicted.append(p.bytes if p else lint.live_peak(self.export.folder / graph.file, sizes))
        return EngineRecord(a.engine, a.graph, a.kind, a.formulation, graph.default, None, a.activation_bytes,
                            a.profile_activation_bytes, a.weight_bytes, a.plan_bytes, max(predicted), a.profiles[-1],
                            a.profiles, self._served(candidate), a.seconds or 0.0, a.cached)

    def _served(self, candidate: Candidate) -> dict[str, str]:
        """Kind -> the graph whose sessions an engine answers: its formulation's or, where that has none of the kind,
        the default one, which asks and answers the same."""
        graphs = [g for g in self.export.graphs if g.default or g.formulation == candidate.graph.formulation]
        return {kind: min((g for g in graphs if g.kind == kind), key=lambda g: g.formulation !=
                          candidate.graph.formulation).name for kind in candidate.serves}

    def _milliseconds(self, record: EngineRecord) -> float:
        """A step of each kind that the engine serves, all together."""
        total = 0.0
        for name, limits in zip(record.serves.values(), record.profiles, strict=True):
            graph = next(g for g in self.export.graphs if g.name == name)
            sizes = {dim: limit[1] for dim, limit in limits.items()}
            with open_plan(self.export, graph, self.request.backend, self.folder, record) as session:
                total += step_milliseconds(session, sizes)
        return total


def _sizes_of(figures: Figures) -> dict[str, Any]:
    """The builder's figures as fields of an Attempt or an EngineRecord."""
    return {name: value for name, value in asdict(figures).items() if name != "version"}


def _serve_all(candidate: Candidate, others: list[Candidate]) -> bool:
    """Whether others serve every kind that a candidate serves."""
    return set(candidate.serves) <= {kind for c in others for kind in c.serves}


def _device_name() -> str | None:
    """The CUDA device that engines would run on; None without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
