"""How engines and the search behind them look: tables for people, one dictionary for programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from engines import predict
from engines.backends import backend
from engines.handed import weight_bytes
from engines.records import UNIFIED, Attempt, EngineRecord, Engines, limits_of, rebuild_command, stale
from exporter import console
from exporter.inspection import expert_notes
from exporter.manifest import Export

if TYPE_CHECKING:
    from rich.console import Console


def to_dict(made: Engines) -> dict[str, Any]:
    """Everything that is known of a backend's engines."""
    facts = ("backend", "libraries", "options", "layout", "timing", "refused", "notes")
    return {"folder": str(made.folder), **{name: made.data[name] for name in facts}, "stale": stale(made),
            "engines": [asdict(e) for e in made.engines], "attempts": [asdict(a) for a in made.attempts]}


def show(out: Console, made: Engines, export: Export) -> None:
    """The engines, every attempt, and what is to be said of them."""
    libraries = ", ".join(f"{k} {v}" for k, v in made.data["libraries"].items() if k != "python")
    old = stale(made)
    rows = [[e.engine, _limits(e), "; ".join(map(console.size, e.profile_activation_bytes)),
             *map(console.size, (e.predicted_bytes, e.weight_bytes, e.plan_bytes)), "kept" if e.default else ""]
            for e in sorted(made.engines, key=lambda e: (e.kind, e.activation_bytes))]
    console.table(out, f"{made.data['backend']} ({libraries}) in {made.folder}{': STALE' if old else ''}",
                  ["engine", "limits", "activation", "predicted", "weights", "plan", ""], rows)
    attempts = sorted(made.attempts, key=lambda a: (a.kind, a.engine))
    console.table(out, "All candidates, at every opt point that was tried; in MB (10^6 bytes)",
                  ["engine", "opt", "activation", "weights", "plan", "build", ""], [_row(a, made) for a in attempts])
    again = rebuild_command(export, made.data["backend"])
    notes = [f"{old}; its plans will not load: rebuild with: {again}" if old else "",
             "activation: scratch that a step needs beyond weights, inputs and outputs",
             f"layout {made.data['layout']['kept']}: {made.data['layout']['why']}", f"step time: {made.data['timing']}",
             *_twice(made, export), *_predictions(made, export), *expert_notes(export.data),
             *made.data["refused"].values(),
             *(f"{a.engine} at opt {_opt(a)}: {a.refused}" for a in attempts if a.refused
               and a.engine not in made.data["refused"]),
             *made.data["notes"], "the same by hand:" if any(e.command for e in made.engines) else ""]
    console.note_list(out, [note for note in notes if note])
    console.command_list(out, [e.command for e in made.engines if e.command])


def _limits(e: EngineRecord) -> str:
    return "; ".join(", ".join(f"{n} ≤ {r[2]}" for n, r in p.items()) for p in e.profiles)


def _opt(a: Attempt) -> str:
    """Where kernels are chosen, profile by profile: rows of past, and a prefill's new tokens."""
    return "; ".join(", ".join(f"{name} {found[name][1]}" for name in ("S", "T") if name in found
                               and not (name == "T" and "S" in found and found["T"][1] == 1)) for found in a.profiles)


def _row(a: Attempt, made: Engines) -> list[str]:
    if a.refused:
        return [a.engine, _opt(a), "refused", "–", "–", "–", ""]
    best = next((e for e in made.engines if e.engine == a.engine and e.profiles == a.profiles), None)
    mark = "" if best is None else "kept" if best.default else "best"
    if best is not None and best.milliseconds is not None:
        mark = f"{mark}, {best.milliseconds:.2f} ms"
    sizes = [f"{(count or 0) / 1e6:.1f}" for count in (a.activation_bytes, a.weight_bytes, a.plan_bytes)]
    return [a.engine, _opt(a), *sizes, "cached" if a.cached else f"{a.seconds:.1f} s", mark]


def _twice(made: Engines, export: Export) -> list[str]:
    """Weights that a unified engine holds in two layouts. Seen where a profile's prefill is of one sequence alone: the
    last layer then works on one row, of which TensorRT-RTX makes another product. Quantised weights are held as codes
    or as what they mean, so their bytes tell nothing."""
    found = list[str]()
    if export.data["weights"].get("quantised"):
        return found
    for e in made.engines:
        stored = weight_bytes(export.folder / f"{e.graph}.onnx")
        if e.kind == UNIFIED and e.weight_bytes > 1.01 * stored:
            found.append(f"{e.engine}: {console.size(e.weight_bytes - stored)} of weights are laid out twice, for one "
                         "row and for several; --prefill-batch 2 and --max-batch 2 or more hold them once")
    return found


def _predictions(made: Engines, export: Export) -> list[str]:
    """Where the predicted figures come from, and what the builder's differ by."""
    liveness = "predicted: the graph's own tensors alive together; a runtime fuses some and copies others"
    if not backend(made.data["backend"]).tensorrt:
        return [liveness]
    notes = []
    for e in made.engines:
        graph = next(g for g in export.graphs if g.name == e.graph)
        found = [p for sizes in map(limits_of, e.profiles) if (p := predict.predicted(
            export, graph, sizes, made.data["backend"], made.data["builder"]))]
        most = max(found, key=lambda p: p.bytes, default=None)
        notes.append(f"{e.engine}: {predict.explained(most, e.activation_bytes) if most else liveness}")
    return notes
