"""A builder in place of TensorRT's: chosen figures, chosen failures, and a record of what it was asked to build."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines import bounded, trt
from engines.build_options import BuildOptions
from engines.store import Figures
from exporter.errors import CheckError
from exporter.signature import Profile

VERSION = "0.0"


@dataclass(frozen=True)
class Call:
    """One build that was asked for: the graph, its optimisation profiles and the options."""

    backend: str
    graph: str
    profiles: Sequence[Profile]
    options: BuildOptions

    @property
    def opt_rows(self) -> int | None:
        """S at the opt point of the last profile."""
        past = self.profiles[-1].get("past_latent.0")
        return past[1][1] if past else None


@dataclass
class FakeBuilder:
    """Plans with chosen activation bytes (`activation`, by graph, or a function of the call), failing where told to."""

    activation: Mapping[str, int] | Callable[[Call], int] = field(default_factory=dict)
    weights: int = 2000
    seconds: float = 0.5
    fail_at: int | None = None
    error: BaseException = field(default_factory=lambda: CheckError("the builder gave up"))
    calls: list[Call] = field(default_factory=list)

    def build(self, backend: str, path: Path, profiles: Sequence[Profile], options: BuildOptions, handed: Any,
              out: Path) -> Figures:
        call = Call(backend, path.stem, profiles, options)
        self.calls.append(call)
        if len(self.calls) == self.fail_at:
            raise self.error
        out.write_bytes(f"plan {len(self.calls)} of {path.stem}".encode().ljust(self.weights))
        wanted = self.activation
        activation = wanted(call) if callable(wanted) else wanted.get(path.stem, 1_000_000_000)
        return Figures(activation, [activation] * len(profiles), self.weights, out.stat().st_size, self.seconds,
                       VERSION)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeBuilder:
    """Put a fake in the place of the child process, and of the library."""
    fake = FakeBuilder()
    monkeypatch.setattr(bounded.Builder, "build", lambda self, *asked: fake.build(*asked))
    monkeypatch.setattr(trt, "load", lambda backend: SimpleNamespace(__version__=VERSION))
    return fake
