"""A ladder's rungs: comparisons that have a name, a verdict and, where they could not run, a reason.

A result that proves nothing (ONNX Runtime's CPU computes fp16 products in fp32) is reported and not counted. A rung
that breaks with an exception is a red rung that says so, and the ladder goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate.metrics import Difference, Tolerance

if TYPE_CHECKING:
    from validate.layer_search import Search

Progress = Callable[..., None]


@dataclass(frozen=True)
class Rung:
    """One comparison of the ladder. `counted` is False where the runtime cannot judge this dtype. `worst` says where
    the largest error is, what each index counts and both values there; `masks`, where they differ, how many elements
    are NaN and Inf on either side; `where` all that in words."""

    name: str
    graph: str
    cache: str
    formulation: str
    dtype: str
    rel: float
    cosine: float
    tolerance: float
    passed: bool
    counted: bool = True
    note: str = ""
    max_abs: float = 0.0
    mean_abs: float = 0.0
    worst: dict[str, Any] | None = None
    masks: dict[str, Any] | None = None
    where: str = ""

    @classmethod
    def of(cls, name: str, graph: GraphEntry | None, made: Export, difference: Difference, tolerance: Tolerance, *,
           counted: bool = True, note: str = "", **more: Any) -> Rung:
        """A rung from a comparison; `graph` None where none is judged."""
        passed = difference.within(tolerance) and bool(more.pop("also", True))
        return cls(name, graph.name if graph else "-", made.cache, graph.formulation if graph else "-", made.dtype,
                   difference.rel, difference.cosine, tolerance.rel, passed, counted, note, **difference.figures(),
                   where=difference.sentence, **more)

    @classmethod
    def broken(cls, name: str, graph: GraphEntry | None, made: Export, error: Exception, counted: bool = True) -> Rung:
        """A red rung for an exception."""
        first = (str(error).strip().splitlines() or [""])[0]
        nothing = Difference(float("inf"), float("inf"), 0.0, None, False)
        return cls.of(name, graph, made, nothing, Tolerance(0.0, 0.0), counted=counted,
                      note=f"{type(error).__name__}: {first}".removesuffix(": "))

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `pass` for `passed`."""
        data = asdict(self)
        data["pass"] = data.pop("passed")
        return data


@dataclass(frozen=True)
class ModelRung(Rung):
    """One comparison of a whole model. `tokens` were compared, `excluded` left out because the dtype's own error could
    have sent them to other experts. `top1` is the share of tokens whose best logit is the reference's, `kl` the mean
    KL divergence of the softmax from the reference's, in nats; None for what has no logits."""

    tokens: int = 0
    excluded: int = 0
    top1: float | None = None
    kl: float | None = None


@dataclass
class Ladder:
    """All rungs of a run, and what was not run and why; of a model that failed, the search of its layers. `planted`:
    the fault that was put there, in words."""

    rungs: list[Rung] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    layers: Search | None = None
    planted: str = ""

    @property
    def passed(self) -> bool:
        """Every counted rung passed, and there was at least one."""
        counted = [r for r in self.rungs if r.counted]
        return bool(counted) and all(r.passed for r in counted)

    @property
    def failure(self) -> str:
        """One line for a ladder that did not pass."""
        if not any(r.counted for r in self.rungs):
            return f"no rung could be judged: {self.not_run[0] if self.not_run else 'nothing ran'}"
        words = f"{sum(not r.passed and r.counted for r in self.rungs)} of {len(self.rungs)} rungs failed"
        found = words if self.layers is None else f"{words}; {self.layers.verdict}"
        return f"{found}; planted: {self.planted}" if self.planted else found

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"pass": self.passed, "rungs": [r.to_dict() for r in self.rungs], "not_run": self.not_run,
                "layers": None if self.layers is None else self.layers.to_dict()}

    def skip(self, reason: str) -> None:
        """Record a rung that could not run, once."""
        if reason not in self.not_run:
            self.not_run.append(reason)


def check_source(made: Export) -> None:
    """The checkpoint that parity goes back to must still be the one that was exported."""
    for record in made.data["source"].get("files", []):
        base = Path(made.data["source"]["path"])
        path = base if base.is_file() else base / record["name"]
        if not path.is_file():
            raise InputError(
                f"{made.folder}: its source {path} is gone; parity compares with the source, bring it back or "
                "export again"
            )
        stat = path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (record["size"], record["mtime_ns"]):
            raise InputError(f"{made.folder}: its source {path} changed since the export; export again")
