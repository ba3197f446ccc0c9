"""Where a decode step's time goes: ONNX Runtime's profile of some steps, summed by part of the model and by operator.

A profile has one event a node and step, in microseconds, and one a step. Times are medians over the steps, of what was
summed within each; a node that holds others (a branch) counts without them. Shares are of all those medians together:
what a step takes beyond them is mostly the writing of the profile, some microseconds a node.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from exporter.errors import CheckError
from validate.floor import Need, Rates
from validate.node_parts import PARTS, REST, part_of
from validate.node_products import Products, Shape

NAMED = 0.02  # of all parts: a node without a part that takes more is shown by its name
ROUNDING = 1  # microseconds
_KERNEL, _STEP = "_kernel_time", "model_run"


@dataclass(frozen=True)
class Node:
    """One node of one step: ms without those inside it, and the shapes it ran with."""

    name: str
    operator: str
    ms: float
    inputs: tuple[Shape, ...] = ()
    outputs: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Step:
    """One step, ms, and its nodes in the order in which they began."""

    ms: float
    nodes: tuple[Node, ...]


def read_steps(file: Path, last: int) -> list[Step]:
    """The `last` steps of a profile. CheckError where it has fewer."""
    events = json.loads(file.read_text(encoding="utf-8"))
    runs = [e for e in events if e.get("name") == _STEP][-last:]
    if len(runs) < last:
        raise CheckError(f"ONNX Runtime's profile has {len(runs)} steps; expected at least {last}")
    kernels = sorted((e for e in events if e.get("cat") == "Node" and e["name"].endswith(_KERNEL)),
                     key=lambda e: (e["ts"], -e["dur"]))
    found, at = [], 0
    for run in runs:
        begin, end = run["ts"], run["ts"] + run["dur"]
        while at < len(kernels) and kernels[at]["ts"] < begin:
            at += 1
        first = at
        while at < len(kernels) and kernels[at]["ts"] <= end:
            at += 1
        found.append(Step(run["dur"] / 1e3, tuple(_nodes(kernels[first:at]))))
    return found


def _nodes(events: Sequence[Mapping[str, Any]]) -> Iterable[Node]:
    """Events by their begin, the outer of two first."""
    own = [e["dur"] for e in events]
    around: list[tuple[int, int]] = []  # (which, its end) of those that are not over
    for i, event in enumerate(events):
        end = event["ts"] + event["dur"]
        while around and (around[-1][1] <= event["ts"] or around[-1][1] + ROUNDING < end):
            around.pop()
        if around:
            own[around[-1][0]] -= event["dur"]
        around.append((i, end))
    for event, us in zip(events, own, strict=True):
        args = event["args"]
        yield Node(event["name"].removesuffix(_KERNEL), args["op_name"], us / 1e3, _shapes(args["input_type_shape"]),
                   _shapes(args["output_type_shape"]))


def _shapes(given: Sequence[Mapping[str, Sequence[int]]]) -> tuple[Shape, ...]:
    return tuple(Shape(dtype, tuple(sizes)) for one in given for dtype, sizes in one.items())


@dataclass(frozen=True)
class Part:
    """A part of the model: ms, its share, the number of its nodes. `products_ms` of it are in the matrix products whose
    `need_bytes` and `flops` are known; `floor_ms` is what these take at the best rates of the run, `median_floor_ms` at
    the median ones."""

    part: str
    ms: float
    share: float
    nodes: int
    products_ms: float | None = None
    need_bytes: float | None = None
    flops: float | None = None
    floor_ms: float | None = None
    median_floor_ms: float | None = None

    @property
    def achieved(self) -> tuple[float, float] | None:
        """Bytes and operations per second of its products; None where it has none."""
        if not self.products_ms or self.need_bytes is None or self.flops is None:
            return None
        return 1e3 * self.need_bytes / self.products_ms, 1e3 * self.flops / self.products_ms


@dataclass(frozen=True)
class Summed:
    """All nodes of one operator, or one node: ms, share, how many they are."""

    name: str
    ms: float
    share: float
    nodes: int = 1


@dataclass(frozen=True)
class Profile:
    """A decode graph behind one past. `ms` is a step while the profile was taken and `nodes_ms` all parts of it,
    `timed_ms` a step without it; `need`: what a step must read and compute at least. `unnamed`: nodes without a part
    that take more than NAMED of all."""

    subject: str
    context: int
    batch: int
    steps: int
    ms: float
    nodes_ms: float
    timed_ms: float
    need: Need
    parts: list[Part] = field(default_factory=list)
    operators: list[Summed] = field(default_factory=list)
    unnamed: list[Summed] = field(default_factory=list)

    @classmethod
    def of(cls, steps: Sequence[Step], products: Products, subject: str, context: int, batch: int, timed_ms: float,
           need: Need) -> Profile:
        """Sum steps up; parts in the order of a step, operators by what they take."""
        parts = {s.name: s for s in _summed(steps, lambda n: part_of(n.name))}
        whole, known = sum(s.ms for s in parts.values()), _products(steps, products)
        made = [Part(name, parts[name].ms, parts[name].share, parts[name].nodes, *known.get(name, ()))
                for name in PARTS if name in parts]
        operators = sorted(_summed(steps, lambda n: n.operator), key=lambda s: -s.ms)
        unnamed = [s for s in _summed(steps, lambda n: n.name) if part_of(s.name) == REST and s.share > NAMED]
        return cls(subject, context, batch, len(steps), statistics.median(step.ms for step in steps), whole, timed_ms,
                   need, made, operators, sorted(unnamed, key=lambda s: -s.ms))

    def with_floor(self, rates: Rates) -> Profile:
        """Every part with products beside what these take at least: read as fast as the step's whole set is."""
        medians = rates.at_medians()

        def beside(part: Part) -> Part:
            if part.need_bytes is None or part.flops is None:
                return part
            best, median = (r.part_floor(Need(part.need_bytes, part.flops), self.need.bytes) for r in (rates, medians))
            return replace(part, floor_ms=best.ms, median_floor_ms=median.ms)

        return replace(self, parts=[beside(part) for part in self.parts])

    def to_dict(self) -> dict[str, Any]:
        """JSON form; a part without products says nothing of them."""
        made = asdict(self)
        made["parts"] = [{**{k: v for k, v in asdict(p).items() if v is not None}, **_rates_of(p)} for p in self.parts]
        return made


def _summed(steps: Sequence[Step], key: Callable[[Node], str]) -> list[Summed]:
    """Nodes of the same key together, as shares of them all."""
    found = _medians(steps, key)
    whole = sum(ms for ms, _ in found.values())
    return [Summed(name, ms, ms / whole if whole else 0.0, round(nodes)) for name, (ms, nodes) in found.items()]


def _rates_of(part: Part) -> dict[str, float]:
    achieved = part.achieved
    return {} if achieved is None else {"bytes_per_s": achieved[0], "flops_per_s": achieved[1]}


def _medians(steps: Sequence[Step], key: Callable[[Node], str]) -> dict[str, tuple[float, float]]:
    """By key: ms of its nodes together, and their number, medians over the steps."""
    ms: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(steps))
    count: dict[str, list[int]] = defaultdict(lambda: [0] * len(steps))
    for i, step in enumerate(steps):
        for node in step.nodes:
            ms[key(node)][i] += node.ms
            count[key(node)][i] += 1
    return {name: (statistics.median(ms[name]), statistics.median(count[name])) for name in ms}


def _products(steps: Sequence[Step], products: Products) -> dict[str, tuple[float, float, float]]:
    """By part: ms of its products whose need is known, and those needs together, bytes and operations. Shapes are those
    of the last step, since all are alike."""
    needs = {n.name: need for n in steps[-1].nodes
             if n.outputs and (need := products.need(n.name, n.inputs, n.outputs[0]))}
    found = {}
    only = [Step(s.ms, tuple(n for n in s.nodes if n.name in needs)) for s in steps]
    for part, (ms, _) in _medians(only, lambda n: part_of(n.name)).items():
        own = [need for name, need in needs.items() if part_of(name) == part]
        found[part] = ms, sum(n.bytes for n in own), sum(n.flops for n in own)
    return found
