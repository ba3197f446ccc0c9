"""Traces: what a session is asked to do and what the float64 reference answered, computed once and replayed everywhere.

Hot seeded inputs; positions far from 0 and past the original context; ragged batches with a zero length; right padding;
prefill whole, in chunks and token by token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from validate.references import AbsorbedMLA, NaiveMLA, Reference

DECODE_STEPS = 32
LEAST = 9  # positions that the shortest traces reach


@dataclass(frozen=True)
class Step:
    """One call: which graph kind, its input [B, T, D], how many of the T tokens are real, the reference's output."""

    kind: str
    hidden: np.ndarray
    counts: np.ndarray
    expected: np.ndarray


@dataclass
class Trace:
    """A named sequence of steps over one cache. `kind` is the graph kind under test; `rows` the final cache, per
    sequence [length, R], from the absorbed reference."""

    name: str
    kind: str
    batch: int
    start_rows: np.ndarray | None = None
    start_lengths: np.ndarray | None = None
    steps: list[Step] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Rows that the longest sequence reaches, padding included."""
        start = 0 if self.start_lengths is None else int(self.start_lengths.max())
        return start + sum(int(s.hidden.shape[1]) for s in self.steps)

    @property
    def ragged(self) -> bool:
        """Whether lengths or counts differ within the batch (the concat form refuses such)."""
        lengths = self.start_lengths if self.start_lengths is not None else np.zeros(1)
        return bool((lengths != lengths[0]).any() or any((s.counts != s.counts[0]).any() for s in self.steps))


class TraceMaker:
    """Draws inputs in a compute dtype and lets the references answer them."""

    def __init__(
        self,
        config: MLAConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        max_context: int,
        dtype: str,
        seed: int,
        causal: bool,
    ) -> None:
        self.config, self.dtype, self.max_context = config, DTYPES[dtype].numpy, max_context
        self.rng = np.random.default_rng([seed, 7])
        options: dict[str, Any] = {"max_context": max_context, "causal": causal}
        self.naive: Reference = NaiveMLA(config, tensors, **options)
        self.absorbed = AbsorbedMLA(config, tensors, **options)
        self.causal = causal

    def hidden(self, batch: int, tokens: int) -> np.ndarray:
        """Hot layer input: about normed, as after input_layernorm."""
        return self.rng.standard_normal((batch, tokens, self.config.hidden_size)).astype(self.dtype)

    def random_rows(self, batch: int, rows: int) -> np.ndarray:
        """Cache rows that a long past might have left: unit latents with a gain, hot rotary keys."""
        c = self.config
        gain = np.concatenate([self.rng.uniform(0.5, 1.5, c.kv_lora_rank), np.full(c.qk_rope_head_dim, 2.0)])
        values = self.rng.standard_normal((batch, rows, c.row_dim), dtype=np.float32) * gain.astype(np.float32)
        return values.astype(self.dtype)

    def trace(self, name: str, kind: str, plan: Sequence[tuple[str, int, Sequence[int] | None]], *, batch: int = 1,
              lengths: Sequence[int] | None = None, hidden: np.ndarray | None = None) -> Trace:
        """Answer `plan`, rows of (graph kind, T, counts), starting from `lengths` random rows per sequence."""
        made = Trace(name, kind, batch)
        for reference in (self.naive, self.absorbed):
            reference.reset(batch)
        if lengths is not None:
            made.start_lengths = np.array(lengths, np.int64)
            made.start_rows = self.random_rows(batch, max(1, max(lengths)))
            seeded = torch.from_numpy(made.start_rows.astype(np.float64))
            for reference in (self.naive, self.absorbed):
                reference.seed_rows(seeded, list(lengths))
        offset = 0
        for step_kind, tokens, counts in plan:
            x = self.hidden(batch, tokens) if hidden is None else hidden[:, offset:offset + tokens]
            offset += tokens
            made.steps.append(self._answer(step_kind, x, counts))
        if self.causal:
            made.rows = [self.absorbed.rows(b).numpy() for b in range(batch)]
        return made

    def _answer(self, kind: str, x: np.ndarray, counts: Sequence[int] | None) -> Step:
        wide = torch.from_numpy(x.astype(np.float64))
        if not self.causal:
            return Step(kind, x, np.full(len(x), x.shape[1]), self.naive.forward(wide).numpy())
        kept = list(counts) if counts is not None else [x.shape[1]] * len(x)
        expected = self.naive.forward(wide, kept).numpy()
        self.absorbed.forward(wide, kept)
        return Step(kind, x, np.array(kept, np.int64), expected)


def far_position(config: MLAConfig, max_context: int) -> int:
    """A past length beyond the original context where max_context allows it, else as far as it does."""
    original = config.rope.original_max_position_embeddings or 4096
    wanted = original + 777 if original <= 8192 else 9001
    return max(1, min(wanted, max_context - 8))


def make_traces(maker: TraceMaker) -> list[Trace]:
    """Everything that the parity ladder asks, the same for every cache form (a bidirectional layer has one trace)."""
    if not maker.causal:
        return [maker.trace("bidirectional", "prefill", [("prefill", 48, None)], batch=3)]
    room = maker.max_context
    if room < LEAST:
        raise InputError(f"max_context is {room}: parity asks for sequences of {LEAST} tokens and more; give "
                         f"--max-context {LEAST} at least")
    whole = min(37, room // 2)
    chunks = [whole // 2, 1, whole - whole // 2 - 1]
    hidden = maker.hidden(2, whole)
    far = far_position(maker.config, room)
    steps = min(DECODE_STEPS, room - whole)
    traces = [
        maker.trace("prefill", "prefill", [("prefill", whole, None)], batch=2, hidden=hidden),
        maker.trace("chunked", "prefill", [("prefill", t, None) for t in chunks if t], batch=2, hidden=hidden),
        maker.trace("decode", "decode", [("prefill", whole, None)] + [("decode", 1, None)] * steps, batch=2),
    ]
    for kind in ("prefill", "decode"):
        traces.append(maker.trace("far", kind, [(kind, 3, None), (kind, 1, None)], batch=1, lengths=[far]))
        lengths = [0, 1, min(19, room // 3), min(203, room // 2)]
        plan = [(kind, 5, [5, 3, 1, 4]), (kind, 1, None)]
        traces.append(maker.trace("ragged", kind, plan, batch=4, lengths=lengths))
    return traces
