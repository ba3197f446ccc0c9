"""Cache rows that a step has no business with are bit for bit as they went in, in every cache form.

A graph may write the rows of its new tokens, padding included, and no others: in the scatter form nothing before a
sequence's length and nothing from `past_lengths[b] + T` on, in the append form nothing of the past at all, and in the
concat form the present begins with the past. Outputs cannot show it: a row beyond the length is hidden, and overwritten
by the next step, but it may be another sequence's by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from engines.session import Feed, Outputs, Session
from validate.metrics import EXACT, NEVER, Difference, Tolerance, compare

_CACHES = ("latent_cache.", "past_latent.", "past_scale.", "past_rope.")
_AXES = ("sequence", "row", "column")


class _Named(Protocol):
    """A trace, of an attention or of a model."""

    @property
    def name(self) -> str: ...

    @property
    def kind(self) -> str: ...


def watched(trace: _Named, traces: Sequence[_Named], cache: str) -> bool:
    """Whether this is the trace that the check is made in: the ragged one, or one of several steps where the form or
    the export's room allows no ragged batch."""
    ragged = cache != "concat" and any(t.name == "ragged" and t.kind == trace.kind for t in traces)
    several = "decode" if trace.kind == "decode" else "chunked"
    return cache != "none" and trace.name == ("ragged" if ragged else several)


class Watch:
    """Runs the steps of one replay and compares what lies in the caches before and after each."""

    def __init__(self) -> None:
        self.rows = 0
        self._steps = 0
        self._first: Difference | None = None

    def infer(self, session: Session, feed: Feed) -> Outputs:
        """`session.infer(feed)`."""
        before = {name: array.copy() for name, array in feed.items() if name.startswith(_CACHES)}
        new = feed[session.graph.inputs[0].name].shape[1]
        outputs = session.infer(feed)
        for name, old in before.items():
            self._compare(name, old, feed[name], _others(name, feed, new))
            joined = name.replace("past", "present")
            if joined in outputs and joined != name:  # concat: the past once more, then the new rows
                self._compare(joined, old, outputs[joined][:, :old.shape[1]], np.ones(old.shape[:2], bool))
        self._steps += 1
        return outputs

    def _compare(self, name: str, old: np.ndarray, now: np.ndarray, kept: np.ndarray) -> None:
        """Rows [B, S] that are to be `kept`."""
        a, b = (np.ascontiguousarray(x).reshape(*kept.shape, -1) for x in (now, old))
        changed = (a.view(np.uint8) != b.view(np.uint8)).any(axis=-1) & kept
        self.rows += int(kept.sum())
        if self._first is None and changed.any():
            places = [(int(s), int(r)) for s, r in np.argwhere(changed)]
            found = compare(a[changed], b[changed]).placed(_AXES, places)
            self._first = found.behind("cache", int(name.rpartition(".")[2])).behind("step", self._steps)

    @property
    def difference(self) -> Difference:
        """Of the first step that changed a row; nothing where none did."""
        return self._first or Difference(0.0, 0.0, 1.0, None, True)

    @property
    def tolerance(self) -> Tolerance:
        """Met where no row changed."""
        return EXACT if self._first is None else NEVER

    @property
    def note(self) -> str:
        """How much was compared."""
        return f"{self.rows} rows, bit for bit"


def _others(name: str, feed: Mapping[str, np.ndarray], new: int) -> np.ndarray:
    """[B, S]: the rows of a cache that a step of `new` tokens does not write."""
    cache = feed[name]
    if not name.startswith("latent_cache."):
        return np.ones(cache.shape[:2], bool)
    row, start = np.arange(cache.shape[2]), feed["past_lengths"][:, None]
    return (row < start) | (row >= start + new)
