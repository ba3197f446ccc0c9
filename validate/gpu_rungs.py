"""What a GPU check is made of: its sizes, its rungs and how they may end, and the report that they fill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from exporter import __version__


@dataclass(frozen=True)
class Sizes:
    """What is checked: one attention of `preset`. Decode steps at `batch` and each of `contexts` rows of past; prefill
    chunks of `chunk` tokens at batch 1; parity with each of `seeds` over up to `parity_context` rows."""

    preset: str = "deepseek-v2-lite"
    batch: int = 8
    contexts: tuple[int, ...] = (4096, 16384, 32768)
    chunk: int = 512
    seeds: tuple[int, ...] = (0, 1, 2)
    parity_context: int = 6000
    memory_dtypes: tuple[str, ...] = ("fp16",)
    time_dtypes: tuple[str, ...] = ("fp16", "bf16")
    engine_dtypes: tuple[str, ...] = ("fp16", "bf16")


class NotRunError(Exception):
    """Why a rung could not run on this device; it is reported by name and never counts as passed."""


@dataclass(frozen=True)
class Outcome:
    """What a rung found: its verdict, its figures (bytes, milliseconds, rel) and a remark."""

    passed: bool
    figures: dict[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Rung:
    """One check: `group/…` by name, what it does in words, the seconds that it may take, and how it is done.

    `run` gets the seconds; it raises NotRunError where the device or a library cannot do it.
    """

    name: str
    what: str
    seconds: float
    run: Callable[[float], Outcome]


@dataclass(frozen=True)
class Result:
    """A rung's end: `state` is passed, failed or not run; `note` holds the reason."""

    name: str
    what: str
    state: str
    seconds: float
    note: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """All results, in the order of the plan, and the conditions they were found under."""

    sizes: Sizes
    results: list[Result] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)

    def count(self, state: str) -> int:
        """How many rungs ended so."""
        return sum(r.state == state for r in self.results)

    @property
    def passed(self) -> bool:
        """Something ran, and nothing that ran has failed."""
        return bool(self.count("passed")) and not self.count("failed")

    @property
    def summary(self) -> str:
        """One line."""
        return f"{self.count('passed')} passed, {self.count('failed')} failed, {self.count('not run')} not run"

    def figure(self, name: str, key: str) -> Any:
        """A figure of an earlier rung, None where it has none."""
        return next((r.figures.get(key) for r in self.results if r.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"check": "gpu", "toolkit": __version__, "pass": self.passed, "summary": self.summary,
                "passed": self.count("passed"), "failed": self.count("failed"), "not_run": self.count("not run"),
                "seconds": round(sum(r.seconds for r in self.results), 3),
                "sizes": asdict(self.sizes), "settings": self.settings, "rungs": [asdict(r) for r in self.results]}
