"""One rank of a tensor-parallel model behind the session contract: its segments in order, sums over ranks between them.

A rank takes the feed of a whole model and gives its outputs: every rank has all rows of every cache, and all logits.
Whoever adds up the partial sums is handed in: a process group (engines/parallel_run.py), or `Lockstep`, which runs all
ranks in one process and so needs none.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from engines.session import Feed, Outputs, Session
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from exporter.tensor_parallel import segment_entries

BACKENDS = ("ort", "ort-cuda", "interpreter")


@dataclass(frozen=True)
class Ask:
    """What a rank asks of the others: the sum of `values` over ranks, or all of them side by side (the last axis)."""

    values: np.ndarray
    summed: bool


Steps = Generator[Ask, np.ndarray, Outputs]


class Collective(ABC):
    """What ranks do together; it counts what it did."""

    sums = summed_bytes = 0

    def answer(self, ask: Ask) -> np.ndarray:
        """The sum over ranks, in float32, or the concatenation."""
        if not ask.summed:
            return self.gather(ask.values)
        self.sums += 1
        self.summed_bytes += ask.values.nbytes
        return self.sum(ask.values)

    @abstractmethod
    def sum(self, values: np.ndarray) -> np.ndarray:
        """Over ranks."""

    @abstractmethod
    def gather(self, values: np.ndarray) -> np.ndarray:
        """Of all ranks in order, along the last axis."""


Open = Callable[[Export, GraphEntry], Session]


def opener(backend: str, threads: int = 0) -> Open:
    """How a rank opens a segment. InputError for a backend that has no such graphs."""
    from engines.backends import BACKENDS as KNOWN
    from engines.ort import OrtOptions, OrtSession
    from engines.ort_cuda import CudaOrtSession

    if backend not in BACKENDS:
        raise InputError(f"--backend {backend!r}: segments run on {', '.join(BACKENDS)} (no engines are built of them)")
    if threads < 0:
        raise InputError(f"--threads {threads}: expected 0 (ONNX Runtime chooses) or a number of threads")
    if backend == "interpreter":
        return KNOWN[backend].open
    kind = CudaOrtSession if backend == "ort-cuda" else OrtSession
    return lambda export, graph: kind(export, graph, OrtOptions(threads=threads))


class RankSession(Session):
    """A rank's segments of a kind of graph. `steps` runs them up to each sum; `infer` has `collective` answer."""

    def __init__(self, export: Export, kind: str, open_segment: Open, collective: Collective | None = None) -> None:
        super().__init__(export, _whole(export, kind))
        self.collective, self._stack = collective, ExitStack()
        try:
            self.segments = [self._stack.enter_context(open_segment(export, e)) for e in segment_entries(export, kind)]
        except BaseException:
            self._stack.close()
            raise

    def steps(self, feed: Feed) -> Steps:
        """Run a checked feed; asks for a sum after every segment but the last, and then for all logits. The segment's
        only attention is number 0 there and its own number here."""
        carried: dict[str, np.ndarray] = {}
        outputs, attention = Outputs(), 0
        for session in self.segments:
            names = [spec.name for spec in session.graph.inputs]
            found = session.infer({n: carried[n] if n in carried else feed[_numbered(n, attention)] for n in names})
            rows = {_numbered(n, attention): value for n, value in found.items() if n.endswith(".0")}
            outputs |= rows
            attention += bool(rows)
            if "partial" in found:
                carried["hidden_states"] = found["hidden_states_out"]
                carried["reduced"] = yield Ask(found["partial"], True)
                carried |= {"shortcut": found["shortcut_out"]} if "shortcut_out" in found else {}
        outputs["logits"] = yield Ask(found["logits"], False)
        return outputs

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        assert self.collective is not None
        steps = self.steps(feed)
        try:
            ask = next(steps)
            while True:
                ask = steps.send(self.collective.answer(ask))
        except StopIteration as end:
            return dict(end.value)

    def close(self) -> None:
        self._stack.close()


def _numbered(name: str, attention: int) -> str:
    return f"{name[:-1]}{attention}" if name.endswith(".0") else name


def _whole(export: Export, kind: str) -> GraphEntry:
    """What a rank's segments make together: a model's graph, with all logits."""
    graph = export.graph(kind)
    outputs = tuple(replace(t, shape=(*t.shape[:-1], export.decoder.vocab_size)) if t.name == "logits" else t
                    for t in graph.outputs)
    return replace(graph, outputs=outputs)


class Lockstep(Session):
    """All ranks in one process, one after the other up to each sum: the same graphs and weights as in as many
    processes. The rows of all ranks must be equal; those of rank 0 are given."""

    def __init__(self, ranks: Sequence[Export], kind: str, open_segment: Open) -> None:
        super().__init__(ranks[0], _whole(ranks[0], kind))
        self._stack = ExitStack()
        self.ranks = [self._stack.enter_context(RankSession(r, kind, open_segment)) for r in ranks]
        self.sums = self.summed_bytes = 0
        self.rows_differ = 0.0

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        # a cache that is updated in place is each rank's own
        feeds = [feed, *({n: v.copy() if n.startswith("latent_cache.") else v for n, v in feed.items()}
                         for _ in self.ranks[1:])]
        running = [rank.steps(own) for rank, own in zip(self.ranks, feeds, strict=True)]  # type: ignore[attr-defined]
        answers: list[np.ndarray | None] = [None] * len(running)
        while True:
            asks, ends = list[Ask](), list[Outputs]()
            for steps, answer in zip(running, answers, strict=True):
                try:
                    asks.append(next(steps) if answer is None else steps.send(answer))
                except StopIteration as end:
                    ends.append(end.value)
            if ends:
                return self._agreed(ends)
            values = [ask.values for ask in asks]
            if asks[0].summed:
                self.sums, self.summed_bytes = self.sums + 1, self.summed_bytes + values[0].nbytes
                answers = [np.add.reduce(np.stack(values))] * len(running)
            else:
                answers = [np.concatenate(values, axis=-1)] * len(running)

    def _agreed(self, ends: list[Outputs]) -> Outputs:
        for other in ends[1:]:
            for name, value in other.items():
                if name != "logits":
                    apart = np.abs(value.astype(np.float64) - ends[0][name].astype(np.float64))
                    self.rows_differ = max(self.rows_differ, float(apart.max(initial=0.0)))
        return ends[0]

    def close(self) -> None:
        self._stack.close()


def greedy(prefill: Session, decode: Session, prompt: Sequence[int], max_new_tokens: int, stops: Sequence[int] = (),
           chunk: int = 512, stepped: Callable[[], None] = lambda: None) -> list[int]:
    """Continue one prompt by the likeliest token each time, over a cache of its own. The sessions are a model's;
    `stepped` is called after each step."""
    from engines.cache import LatentCache

    export, vocabulary = prefill.export, prefill.export.decoder.vocab_size
    wrong = [t for t in prompt if not 0 <= t < vocabulary]
    if not prompt or wrong:
        raise InputError(f"the prompt holds {f'token {wrong[0]}' if wrong else 'no tokens'}; expected tokens of 0 to "
                         f"{vocabulary - 1}")
    needed = len(prompt) + max_new_tokens
    if not 0 < max_new_tokens <= needed <= export.max_context or chunk < 1:
        raise InputError(f"{len(prompt)} tokens and {max_new_tokens} new ones in chunks of {chunk}; expected at least "
                         f"1 of each, and up to {export.max_context} in all (max_context)")
    cache, tokens, at = LatentCache(export, 1, needed), list(prompt), 0
    while True:
        ids = np.array([tokens[at:at + chunk]], np.int64)
        session = prefill if ids.shape[1] > 1 or not at else decode
        feed = {"input_ids": ids, **cache.feed()}
        if any(spec.name == "last_token" for spec in session.graph.inputs):
            feed["last_token"] = np.array([ids.shape[1] - 1])
        outputs = session.infer(feed)
        cache.commit(outputs, ids.shape[1])
        at += ids.shape[1]
        stepped()
        if at < len(tokens):
            continue
        logits = outputs["logits"]
        tokens.append(int(np.argmax(logits[0] if logits.ndim == 2 else logits[0, -1])))
        if len(tokens) == needed or tokens[-1] in stops:
            return tokens[len(prompt):]
