"""What a whole model is asked under teacher forcing, and what the float64 reference answered; replayed everywhere.

Two sequences serve most traces: prefill in one piece, in chunks, token by token, and a ragged batch that joins them at
lengths 0, 1 and more. A third has rows of past beyond the original context in every attention.

A router may send a token to other experts when its scores move by the dtype's error; that is no fault, and looks like
one. How far scores move is measured: the reference is run once more in the export's own dtype. Inputs are drawn until
every choice is clearer than that; where it cannot be, the tokens that could turn are marked, and left out of rungs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from exporter.decoder_config import DecoderConfig, MoEConfig
from exporter.dtypes import DTYPES
from exporter.manifest import Export
from validate.quantised_weights import DecodedTensors, rounds_activations, scheme_of
from validate.references import Answer, DecoderReference, Prompt
from validate.references.decoder import Routing
from validate.references.decoder_tensors import DecoderTensors, open_decoder_tensors
from validate.traces import far_position

WHOLE, STEPS, FAR_TOKENS = 40, 16, 4
CANDIDATES, ROUNDS, WORK = 24, 8, 4e10  # sequences tried at once, how often, and multiply-adds to spend on a try
# an int8 activation is off by up to 1/254 of its block's largest, as a rule by 0.55 % of the deviation, a bfloat16
# number by 0.11 %: both enter every product
INT8_OF_BF16 = 5.0
UNSURE = 8.0  # medians of a score's error: a gap of a router below that may close (5.4 standard deviations)
TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Plan = tuple[tuple[str, int, tuple[int, ...] | None], ...]


@dataclass(frozen=True)
class Told:
    """One sequence and all that is known of it. `inputs`: ids [T] or hidden states [T, D]; `past` [A, P, R] or None.

    `outputs` [T, V or D], `rows` [A, T, R] are the reference's; `unsure` [T] and `unsure_rows` [A, T] mark what may
    differ without a fault.
    """

    inputs: np.ndarray
    past: np.ndarray | None
    outputs: np.ndarray
    rows: np.ndarray
    unsure: np.ndarray
    unsure_rows: np.ndarray

    @property
    def start(self) -> int:
        """Rows of past before the first token."""
        return 0 if self.past is None else int(self.past.shape[1])


@dataclass(frozen=True)
class ModelTrace:
    """A batch of `members` (sequence numbers), each from its token `starts` on, through `plan`: rows of (graph kind, T,
    how many of the T tokens are real in each sequence; None: all). `kind` is the graph kind under test."""

    name: str
    kind: str
    members: tuple[int, ...]
    starts: tuple[int, ...]
    plan: Plan

    @property
    def ragged(self) -> bool:
        """Whether lengths or counts differ within the batch (the concat form refuses such)."""
        return len(set(self.starts)) > 1 or any(c is not None and len(set(c)) > 1 for _, _, c in self.plan)

    @property
    def width(self) -> int:
        """New tokens of all steps, padding included."""
        return sum(tokens for _, tokens, _ in self.plan)


def make_traces(room: int, far: bool) -> list[ModelTrace]:
    """What is asked of an export with `room` rows: sequences 0 and 1 are near, 2 is far."""
    whole = min(WHOLE, max(1, room // 2))
    steps = min(STEPS, room - whole)
    chunks = [t for t in (whole // 2, 1, whole - whole // 2 - 1) if t]
    traces = [ModelTrace("prefill", "prefill", (0, 1), (0, 0), (("prefill", whole, None),)),
              ModelTrace("chunked", "prefill", (0, 1), (0, 0), tuple(("prefill", t, None) for t in chunks)),
              ModelTrace("decode", "decode", (0, 1), (0, 0),
                         (("prefill", whole, None), *[("decode", 1, None)] * steps))]
    for kind in ("prefill", "decode"):
        if whole >= 16:
            starts = (0, 1, min(19, whole - 10), min(27, whole - 8))
            traces.append(ModelTrace("ragged", kind, (0, 1, 0, 1), starts, ((kind, 5, (5, 3, 1, 4)), (kind, 1, None))))
        if far:
            traces.append(ModelTrace("far", kind, (2,), (0,), ((kind, FAR_TOKENS - 1, None), (kind, 1, None))))
    return traces


def turning_gap(moe: MoEConfig, exact: Routing, found: Routing) -> float:
    """The gap of a router below which its choice may turn, from the error of `found` scores near the choice's edge."""
    edge = exact.scores.topk(min(moe.num_experts_per_tok + 1, exact.scores.shape[1]), dim=-1).indices
    error = (exact.scores - found.scores).gather(1, edge).abs()
    return UNSURE * float(error.nan_to_num(float("inf")).median())


class Examiner:
    """Draws sequences for one export and has the reference answer them."""

    def __init__(self, made: Export, decoder: DecoderConfig, seed: int) -> None:
        self.made, self.decoder, self.dtype = made, decoder, DTYPES[made.dtype].numpy
        self.layers = range(*made.data["layers"])
        self.from_hidden = self.layers.start > 0
        self.rng = np.random.default_rng([seed, 11])

        source = open_decoder_tensors(made.data["source"], decoder)
        meant = DecodedTensors(made, source) if scheme_of(made) else source

        def reference(dtype: torch.dtype, tensors: DecoderTensors = meant) -> DecoderReference:
            return DecoderReference(decoder, tensors, max_context=made.max_context, layers=self.layers, dtype=dtype)

        self.reference, self.unquantised = reference(torch.float64), reference(torch.float64, source)
        self.rounding = rounds_activations(made)
        self.narrow = reference(torch.bfloat16 if self.rounding else TORCH_DTYPES[made.dtype])
        self.parameters = int(made.data.get("source_parameters", 1))
        self._bounds: np.ndarray | None = None

    def quantisation(self, told: Told) -> tuple[np.ndarray, np.ndarray]:
        """Outputs of one sequence with the weights that the codes mean, and with the source's."""
        past = None if told.past is None else _torch(told.past)
        return told.outputs, self.unquantised.run([Prompt(_torch(told.inputs), past)]).answers[0].outputs.numpy()

    def draw(self, tokens: int) -> np.ndarray:
        """Random ids [T], or hidden states [T, D] in the compute dtype."""
        if self.from_hidden:
            return self.rng.standard_normal((tokens, self.decoder.attention.hidden_size)).astype(self.dtype)
        return self.rng.integers(0, self.decoder.vocab_size, tokens)

    def far(self, near: Sequence[Told]) -> np.ndarray | None:
        """A past beyond the original context where there is room for one, [A, P, R]; None where there is none."""
        length = far_position(self.decoder.attention, self.made.max_context)
        return self.past(near, length) if length > len(near[0].inputs) else None

    def past(self, near: Sequence[Told], length: int) -> np.ndarray:
        """`length` rows as a long past might have left them in every attention, [A, P, R]: those of the near sequences,
        drawn again and again with noise."""
        rows = np.concatenate([t.rows for t in near], axis=1)  # [A, tokens, R]
        chosen = rows[:, self.rng.integers(0, rows.shape[1], length)]
        noise = self.rng.standard_normal(chosen.shape, dtype=np.float32) * rows.std(axis=1, keepdims=True)
        past: np.ndarray = (chosen + 0.2 * noise).astype(self.dtype)
        return past

    def sequences(self, progress: Callable[[str], None]) -> list[Told]:
        """Two near sequences, and a far one where there is room."""
        room = self.made.max_context
        whole = min(WHOLE, max(1, room // 2))
        near = [self.told(whole + min(STEPS, room - whole), None, progress, f"near {i}") for i in range(2)]
        past = self.far(near)
        return near if past is None else [*near, self.told(FAR_TOKENS, past, progress, "far")]

    def told(self, tokens: int, past: np.ndarray | None, progress: Callable[[str], None], name: str) -> Told:
        """A sequence whose experts are chosen as clearly as can be found, with the reference's answers."""
        behind = 0 if past is None else past.shape[1]
        tries = int(np.clip(WORK / (self.parameters * (tokens + behind)), 1, CANDIDATES))
        kept, best, wide = self.draw(0), (-1, self.draw(0)), None if past is None else _torch(past)
        answer: Answer | None = None
        for round_ in range(ROUNDS):
            progress(f"{name}, round {round_ + 1}")
            drawn = [np.concatenate([kept, self.draw(tokens - len(kept))]) for _ in range(tries)]
            answers = self.reference.run([Prompt(_torch(d), wide) for d in drawn]).answers
            if self._bounds is None:
                self._bounds = self._measure([Prompt(_torch(d), wide) for d in drawn[:4]])
            sure = [self._sure(a) for a in answers]
            top = int(np.argmax(sure))
            if sure[top] > best[0]:
                best, answer = (sure[top], drawn[top]), answers[top]
            if best[0] == tokens or tries == 1:
                break
            # no better than before: the kept tokens may have led into a corner, so some are given up
            kept = drawn[top][:sure[top]] if sure[top] > len(kept) else kept[:max(0, len(kept) - 4)]
        assert answer is not None
        return self._mark(best[1], past, answer)

    def under(self, reference: DecoderReference, told: Sequence[Told]) -> list[Told]:
        """What another reference answers to the same inputs, with what may turn at its own routers."""
        prompts = [Prompt(_torch(t.inputs), None if t.past is None else _torch(t.past)) for t in told]
        return [self._mark(t.inputs, t.past, answer)
                for t, answer in zip(told, reference.run(prompts).answers, strict=True)]

    def _measure(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Per MoE layer, the gap below which a choice may turn: from the error of scores near the choice's edge."""
        moe, bounds = self.decoder.moe, []
        exact, found = self.reference.run(prompts).routings, self.narrow.run(prompts).routings
        for a, b in zip(exact, found, strict=True):
            assert moe is not None
            bounds.append(turning_gap(moe, a, b) * (INT8_OF_BF16 if self.rounding else 1))
        return np.array(bounds)

    def _turning(self, answer: Answer) -> np.ndarray:
        """[MoE layers, T]: choices that the dtype's error may turn."""
        assert self._bounds is not None
        turning: np.ndarray = answer.margins.numpy() < self._bounds[:, None]
        return turning

    def _sure(self, answer: Answer) -> int:
        """How many tokens at the front have no choice that may turn."""
        first = np.flatnonzero(self._turning(answer).any(axis=0))
        return int(first[0]) if len(first) else int(answer.margins.shape[1])

    def _mark(self, inputs: np.ndarray, past: np.ndarray | None, answer: Answer) -> Told:
        """Which outputs and rows a turned choice reaches: its own token from the next layer on, and every later token
        whose attention sees that one."""
        turning, sparse = self._turning(answer), iter(range(answer.margins.shape[0]))
        reached, rows = np.zeros(len(inputs), bool), []
        for layer in self.layers:
            for _ in range(self.decoder.attentions_per_layer):
                rows.append(reached)
                reached = np.logical_or.accumulate(reached)
            if layer in self.decoder.sparse_layers:
                reached = reached | turning[next(sparse)]
        return Told(inputs, past, answer.outputs.numpy(), answer.rows.numpy(), reached, np.array(rows))


    def taught(self, told: Sequence[Told], starts: Sequence[int], past: Sequence[np.ndarray],
               rows: Sequence[np.ndarray]) -> list[Told]:
        """The reference's answers to the tokens of each of `told` from its start on, as many as `rows` [A, n, R] has,
        when it attends those rows behind `past` [A, P, R] in place of its own: outputs, its rows, what may turn."""
        prompts = [Prompt(_torch(t.inputs[start:start + r.shape[1]]), _torch(p) if p.shape[1] else None, _torch(r))
                   for t, start, p, r in zip(told, starts, past, rows, strict=True)]
        if self._bounds is None:
            self._bounds = self._measure(prompts[:4])
        found = []
        for t, start, prompt, answer in zip(told, starts, prompts, self.reference.run(prompts).answers, strict=True):
            piece = self._mark(t.inputs[start:start + len(prompt.inputs)], None, answer)
            found.append(Told(t.inputs, t.past, *(_behind(start, part, axis) for part, axis in (
                (piece.outputs, 0), (piece.rows, 1), (piece.unsure, 0), (piece.unsure_rows, 1)))))
        return found


def _behind(start: int, part: np.ndarray, axis: int) -> np.ndarray:
    """`part` where its tokens lie, from `start` on; nothing is known of those before."""
    width = [(start if d == axis else 0, 0) for d in range(part.ndim)]
    return np.pad(part, width)


def _torch(array: np.ndarray) -> torch.Tensor:
    """float64, or ids."""
    return torch.from_numpy(array if array.dtype == np.int64 else array.astype(np.float64))
