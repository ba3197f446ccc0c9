"""What is tried and what is kept: the candidates of an export, the opt points of their profiles, and the choice.

Nothing here builds: the choice is a function of records. A candidate is a formulation for a kind; a unified one serves
decode and prefill from one engine over the prefill graph, whose weights then lie on the device once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engines.backends import backend
from engines.build_request import BuildRequest
from engines.records import UNIFIED, Attempt, EngineRecord, kept_bytes
from exporter.console import size
from exporter.errors import CheckError, InputError
from exporter.formulations import BY_NAME
from exporter.manifest import Export, GraphEntry
from exporter.signature import Range

OPT_CONTEXT = 4096  # the profile's opt point for S: where most decoding happens, and kernels are chosen for it
OTHER_CONTEXTS = (1024, 1 << 24)  # tried besides; the last is the profile's maximum
SHORT_CHUNK = 128  # tried besides a prefill's maximum
TIE = 0.01  # activations this close are alike: the usual opt point is worth more than the difference


@dataclass(frozen=True)
class Candidate:
    """An engine that may be built: its graph, and the kinds that it serves, one optimisation profile each."""

    kind: str
    graph: GraphEntry

    @property
    def name(self) -> str:
        """The engine's name: kind and formulation."""
        return f"{self.kind}.{self.graph.formulation}"

    @property
    def serves(self) -> tuple[str, ...]:
        """Kinds in the order of the optimisation profiles."""
        return ("decode", "prefill") if self.kind == UNIFIED else (self.kind,)


@dataclass(frozen=True)
class OptPoint:
    """Where a profile's kernels are chosen: rows of past, and new tokens of a prefill; both cut to the limits."""

    rows: int = OPT_CONTEXT
    tokens: int | None = None


USUAL = OptPoint()


def ranges(export: Export, graph: GraphEntry, request: BuildRequest, point: OptPoint = USUAL, kind: str | None = None,
           ) -> dict[str, Range]:
    """min, opt and max of B, T and S for one graph, at the limits of `kind` (the graph's own)."""
    decode = (kind or graph.kind) == "decode"
    batch = (request.max_batch or int(export.data["max_batch"])) if decode else request.prefill_batch
    context = request.max_context or export.max_context
    tokens = request.decode_tokens if decode else min(request.chunk, export.max_context)
    opt_tokens = tokens if decode or point.tokens is None else min(point.tokens, tokens)
    found = {"B": Range(1, 1, batch), "T": Range(1, opt_tokens, tokens),
             "S": Range(1, min(point.rows, context), context)}
    used = {d for t in graph.inputs for d in t.shape if isinstance(d, str)}
    return {name: r for name, r in found.items() if name in used}


def profiles(export: Export, candidate: Candidate, request: BuildRequest, point: OptPoint = USUAL,
             ) -> list[dict[str, Range]]:
    """The ranges of a candidate's optimisation profiles, in order."""
    return [ranges(export, candidate.graph, request, point, kind) for kind in candidate.serves]


def opt_points(export: Export, candidate: Candidate, request: BuildRequest) -> list[OptPoint]:
    """The opt points to try, the usual one first; those that the limits make alike are tried once."""
    wanted = [USUAL, *(OptPoint(rows) for rows in OTHER_CONTEXTS), OptPoint(tokens=SHORT_CHUNK)]
    found: list[tuple[OptPoint, list[dict[str, Range]]]] = []
    for point in wanted:
        made = profiles(export, candidate, request, point)
        if made not in [known for _, known in found]:
            found.append((point, made))
    return [point for point, _ in found]


def candidates(export: Export, request: BuildRequest) -> list[Candidate]:
    """Every engine to try, in the export's order; a formulation that was asked for of one kind leaves the other kind
    to the search."""
    target = backend(request.backend).target
    takes = [g for g in export.graphs if export.dtype in BY_NAME[g.formulation].dtypes.get(target, ())]
    if not takes:
        raise InputError(f"{export.folder}: no graph that {request.backend} takes at {export.dtype}; export with "
                         f"--target {target}")
    if request.formulation != "auto":
        chosen = [g for g in takes if g.formulation == request.formulation]
        if not chosen:
            raise InputError(f"--formulation {request.formulation}: this export has "
                             f"{', '.join(g.name for g in takes)} for {request.backend}")
        kinds = {g.kind for g in chosen}
        takes = [*[g for g in takes if g.kind not in kinds], *chosen]
    layouts, _ = layouts_to_build(export, request)
    found = [Candidate(g.kind, g) for g in takes] if "split" in layouts else []
    if UNIFIED in layouts:
        found += [Candidate(UNIFIED, g) for g in takes if _serves_both(g, request)
                  and request.formulation in ("auto", g.formulation)]
    if not found:
        raise InputError(f"--layout {request.layout} --formulation {request.formulation}: no graph of it prefills; "
                         "leave one of the two out")
    return found


def _serves_both(graph: GraphEntry, request: BuildRequest) -> bool:
    """Whether a graph may be a unified engine's: an absorbed prefill, of a form that decodes well unless just that was
    asked for (head groups would read the cache once a group at each step)."""
    named = request.layout == UNIFIED and graph.formulation == request.formulation
    return graph.kind == "prefill" and graph.prefill_form == "absorbed" and (
        named or BY_NAME[graph.formulation].serves_both)


def layouts_to_build(export: Export, request: BuildRequest) -> tuple[tuple[str, ...], str]:
    """Which layouts to build, and why. InputError where a unified one was asked for and cannot be.

    One attention is built split: its scratch is as large as its weights, and decode alone then needs the least. Of a
    model, whose weights decide, both layouts are built, unless one graph would cost its decode steps time.
    """
    if not backend(request.backend).tensorrt:
        return ("split",), "one graph per kind over one weight file"
    possible = any(_serves_both(g, request) for g in export.graphs) and any(g.kind == "decode" for g in export.graphs)
    if not possible:
        kinds = {g.kind for g in export.graphs}
        reason = ("the export's prefill is expanded, and expanding a whole cache is no way to decode" if len(kinds) > 1
                  else "the export has one kind of graph")
        if request.layout in ("unified", "both"):
            raise InputError(f"--layout {request.layout}: {reason}; for one engine export with --prefill absorbed")
        return ("split",), reason
    if request.layout != "auto":
        return {"both": ("split", UNIFIED)}.get(request.layout, (request.layout,)), f"--layout {request.layout}"
    if export.contract != "model":
        return ("split",), "one attention: its scratch weighs as much as its weights, so each kind has its own engine"
    forms = (export.data.get("experts") or {}).get("forms", {})
    if len(set(forms.values())) > 1:
        told = ", ".join(f"{name} {form}" for name, form in sorted({n.partition(".")[0]: f for n, f in forms.items()
                                                                     }.items()))
        return ("split",), (f"experts: {told}; one engine would decode as it prefills, with every expert (--layout "
                            "unified does it all the same)")
    return ("split", UNIFIED), "a model: the smaller of both"


def best_attempt(attempts: Sequence[Attempt]) -> Attempt:
    """The least activation of attempts that have one; within TIE of it the usual opt point wins, else the earlier."""
    least = min(a.activation_bytes for a in attempts if a.activation_bytes is not None)
    near = [a for a in attempts if a.activation_bytes is not None and a.activation_bytes <= least * (1 + TIE)]
    return min(near, key=lambda a: (not a.at_default, a.activation_bytes))


def leanest_of(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Per candidate its best attempt, in the order that they were tried."""
    names = dict.fromkeys(a.engine for a in attempts if a.activation_bytes is not None)
    return [best_attempt([a for a in attempts if a.engine == name]) for name in names]


@dataclass(frozen=True)
class Choice:
    """What is kept: a layout, its engines, and why; `bytes`: plans and largest activation of every layout built."""

    layout: str
    engines: tuple[str, ...]
    why: str
    bytes: Mapping[str, int]


def choose(records: Sequence[EngineRecord], why: str, limit: float | None = None, defaults: bool = False) -> Choice:
    """Per kind the fastest engine where steps were timed, else the one with the least activation (alike: the earlier);
    then the layout that takes fewer bytes with decode and prefill loaded together.

    `limit`: activation at most, in bytes; CheckError where nothing keeps to it. `defaults`: keep the export's default
    graphs (ONNX Runtime: there speed decides, and memory is reported).
    """
    best: dict[str, EngineRecord | None] = {}
    for kind in dict.fromkeys(r.kind for r in records):
        within = [r for r in records if r.kind == kind and (limit is None or r.activation_bytes <= limit)]
        best[kind] = min(within, key=_by_default if defaults else _by_merit, default=None)
    layouts = {"split": {k: r for k, r in best.items() if k != UNIFIED}, UNIFIED: {k: r for k, r in best.items()
                                                                                   if k == UNIFIED}}
    able = {name: [r for r in chosen.values() if r] for name, chosen in layouts.items() if chosen and all(
        chosen.values())}
    if not able:
        short = next(kind for kind, r in best.items() if r is None)
        least = min((r for r in records if r.kind == short), key=lambda r: r.activation_bytes)
        raise CheckError(f"--activation-limit: the leanest {short} engine, {least.engine}, needs "
                         f"{size(least.activation_bytes)} of activation, {size(limit or 0)} are allowed; allow more, "
                         "or lower batch, context or chunk")
    taken = {name: kept_bytes(chosen) for name, chosen in able.items()}
    kept = min(taken, key=lambda name: taken[name])
    if len(taken) > 1:
        told = ", ".join(f"{name} {count / 1e6:.1f} MB" for name, count in taken.items())
        why += f" ({told} of plans and largest activation)"
    return Choice(kept, tuple(r.engine for r in able[kept]), why, taken)


def _by_default(r: EngineRecord) -> tuple[bool, int]:
    return not r.default, r.activation_bytes


def _by_merit(r: EngineRecord) -> tuple[float, int]:
    """A candidate that no step was timed of comes after those that were timed."""
    return float("inf") if r.milliseconds is None else r.milliseconds, r.activation_bytes
