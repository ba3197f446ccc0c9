"""Which layer of an exported model departs first, and which part of it: one part of one layer at a time.

Every part of the graph (the embedding, each attention, each MLP or its experts, the head) is cut out and fed what the
float64 reference has there: its residual stream, rounded to the compute dtype on both sides, and its past rows. So a
part is judged alone, and one that departs says nothing of the next. The branch is compared by itself, since beside a
large residual stream a small error of it would not show, then what it was added to, then an attention's new cache rows.

The reference goes through the model once, and at each of its places the same part of every graph is run before it goes
on (validate/layer_walk.py). Neither holds more than one part's weights: a search takes the memory of one layer,
whatever the depth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engines.backends import default_graph
from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate.ladder import Ladder, Progress, Rung, check_source
from validate.metrics import Difference
from validate.part_session import runtime_of
from validate.quantised_weights import tolerance_of

NO_LAYER = ("open", "tail", "untouched")  # rungs whose failure no layer's arithmetic explains


@dataclass(frozen=True)
class Part:
    """One part of one graph, judged. `departs` names what does: `cache rows`, `output` (the branch), `sum` (the stream
    behind it), or `wiring`; empty where nothing does. `excluded` tokens could go to other experts by rounding alone."""

    graph: str
    layer: int | None
    part: str
    differences: Mapping[str, Difference]
    departs: str
    tokens: int
    excluded: int = 0
    note: str = ""

    @property
    def rel(self) -> float:
        """The largest of its comparisons."""
        return max((d.rel for d in self.differences.values()), default=float("inf") if self.departs else 0.0)

    @property
    def name(self) -> str:
        """`layer 37, mlp`, `head`."""
        return self.part if self.layer is None else f"layer {self.layer}, {self.part}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        figures = {name: {"rel": d.rel, "cosine": d.cosine, **d.figures()} for name, d in self.differences.items()}
        return {"graph": self.graph, "layer": self.layer, "part": self.part, "rel": self.rel, "pass": not self.departs,
                "departs": self.departs or None, "tokens": self.tokens, "excluded": self.excluded, "note": self.note,
                "compared": figures}


@dataclass
class Search:
    """Every part that was judged, in the order of the model; `runtime` ran the graphs, `tolerance` is the largest rel
    of each part."""

    runtime: str
    tolerance: float
    parts: list[Part] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def departing(self) -> list[Part]:
        """Those that depart, first things first."""
        return [p for p in self.parts if p.departs]

    @property
    def passed(self) -> bool:
        """Something was judged, and nothing departs."""
        return bool(self.parts) and not self.departing

    @property
    def verdict(self) -> str:
        """One line."""
        if not self.departing:
            return f"no part departs on its own, of {len(self.parts)} judged"
        first = self.departing[0]
        words = {"cache rows": "its cache rows depart", "output": "its output departs, its cache rows do not"
                 if "rows" in first.differences else "its output departs",
                 "sum": "its output is right and the stream behind it is not", "wiring": first.note}
        return f"first to depart: {first.name} ({first.graph}): {words[first.departs]}"

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        first = self.departing[0] if self.departing else None
        return {"pass": self.passed, "runtime": self.runtime, "tolerance": self.tolerance, "verdict": self.verdict,
                "first": None if first is None else {"layer": first.layer, "part": first.part, "graph": first.graph,
                                                     "departs": first.departs},
                "departing": [p.name for p in self.departing], "parts": [p.to_dict() for p in self.parts],
                "notes": self.notes}


def search(made: Export, *, seed: int = 0, graphs: Sequence[GraphEntry] = (), decoder: DecoderConfig | None = None,
           layers: range | None = None, progress: Progress = lambda message, share=None: None) -> Search:
    """Judge every part of `graphs` (default: of each kind the one that sessions open). `layers` stops after those;
    `decoder` is the true configuration where the export's was altered. InputError where there is no reference, or no
    runtime for the parts."""
    if made.contract != "model":
        raise InputError(f"{made.folder}: holds one attention, so there are no layers to search; export a model")
    if made.quantised_cache:
        raise InputError(f"{made.folder}: with a cache in {made.cache_dtype} every layer follows from the rows that a "
                         "graph wrote; export without --cache-dtype to search the layers")
    check_source(made)
    runtime = runtime_of(made)
    chosen = list(graphs) or [default_graph(made, kind, runtime) for kind in ("prefill", "decode")]
    from validate.layer_walk import walk  # it makes this module's records

    found = Search(runtime, tolerance_of(made).rel)
    walk(made, decoder or made.decoder, chosen, found, seed=seed, layers=layers, progress=progress)
    return found


def after(made: Export, ladder: Ladder, rungs: Sequence[Rung], *, seed: int, decoder: DecoderConfig | None = None,
          progress: Progress = lambda message, share=None: None) -> None:
    """Search an export whose `rungs` are red, once a ladder: of each kind the first graph that is."""
    red = {r.graph for r in rungs if r.counted and not r.passed and r.name.rpartition("/")[2] not in NO_LAYER}
    first = {kind: next((g for g in made.graphs if g.kind == kind and g.name in red), None)
             for kind in ("prefill", "decode")}
    graphs = [g for g in first.values() if g is not None]
    if not graphs or ladder.layers is not None:
        return
    try:
        ladder.layers = search(made, seed=seed, graphs=graphs, decoder=decoder, progress=progress)
    except InputError as error:
        ladder.skip(f"layer search: not run: {error}")
