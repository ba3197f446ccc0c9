"""Continuous batching: sequences join and leave at any step. A synchronous core, no threads and no clock of its own.

`step` does one prefill chunk or one decode step of everything that decodes. A sequence is queued, then its prompt is
prefilled in chunks between the others' decode steps, then it decodes until it is done. Greedy tokens do not depend on
who shares the batch, but for the rounding of the runtime's products.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from engines.model_sessions import ModelSessions, check_prompt
from engines.serving import policies
from engines.serving.pool import Limits, Pool
from engines.serving.sequence import (
    CANCELLED,
    DECODING,
    DONE,
    EXPIRED,
    FAILED,
    LENGTH,
    PREFILLING,
    QUEUED,
    REFUSED,
    STOP,
    Event,
    Request,
    Sequence,
    StepReport,
    log_probabilities,
)
from exporter.errors import CheckError, InputError


class BusyError(InputError):
    """The queue is full: come back later."""


class Scheduler:
    """Runs sequences over a model's opened `sessions` within `limits`. `clock` gives seconds. Not thread-safe."""

    def __init__(self, sessions: ModelSessions, limits: Limits | None = None,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self.sessions, self.export, self.limits, self.clock = sessions, sessions.export, limits or Limits(), clock
        self.pool = Pool(self.export, self.limits, sessions.memory)
        self.vocabulary = self.export.decoder.vocab_size
        self.queue: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # prefilling or decoding, in the order they were admitted
        self.preempted = self._submitted = self._admitted = 0
        self._last_was_prefill = False
        self._events: list[Event] = []
        self._logits = np.empty((self.limits.sequences, self.vocabulary), np.float32)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.queue or self.running or self._events)

    def check(self, request: Request) -> None:
        """InputError for a request that can never be served; safe to call from any thread."""
        check_prompt(request.prompt, "the prompt", self.vocabulary)
        tokens, new, limit = len(request.prompt), request.max_new_tokens, self.export.max_context
        if new < 1 or request.choices < 1:
            raise InputError(f"{new} new tokens, {request.choices} choices; expected at least 1 of each")
        if request.choices > self.limits.sequences:
            raise InputError(f"{request.choices} choices; at most {self.limits.sequences} sequences run at a time")
        if tokens + new > limit:
            raise InputError(f"the prompt has {tokens} tokens, and {new} new ones are asked for, {tokens + new} in "
                             f"all; the model takes up to {limit}; shorten the prompt or ask for fewer")
        if self.pool.needed(tokens + new) > self.limits.budget:
            raise InputError(f"{tokens + new} tokens need {self.pool.needed(tokens + new)} bytes of cache; the server "
                             f"has {self.limits.budget} in all; shorten the prompt, ask for fewer, or serve with a "
                             "larger cache budget")

    def room(self, prompt: int) -> int:
        """New tokens that a prompt of so many can have at most: the context's and the budget's end."""
        rows = (self.limits.budget - self.pool.staging_bytes) // self.pool.row_bytes
        bucket = self.limits.bucket
        whole = rows // bucket * bucket if self.export.cache == "append" else rows
        return min(self.export.max_context, whole) - prompt

    def submit(self, request: Request) -> list[Sequence]:
        """Queue a request: a sequence for each of its choices. InputError where it can never be served, BusyError where
        the queue has no room."""
        self.check(request)
        if len(self.queue) + request.choices > self.limits.queue + self.limits.sequences - len(self.running):
            raise BusyError(f"{len(self.queue)} sequences wait, the queue takes {self.limits.queue}; try again later")
        made = [Sequence(self._submitted + i, request, i, self.clock()) for i in range(request.choices)]
        self._submitted += len(made)
        self.queue.extend(made)
        return made

    def finish(self, sequence: Sequence, reason: str = CANCELLED, message: str | None = None) -> None:
        """End a sequence now and free its rows; its event comes with the next step. Nothing where it is done."""
        if sequence.state == DONE:
            return
        waited = sequence.state == QUEUED
        if waited:
            self.queue.remove(sequence)
        else:
            self.running.remove(sequence)
        sequence.state, sequence.reason, sequence.message, sequence.finished = DONE, reason, message, self.clock()
        if reason not in (STOP, LENGTH):
            self._events.append(Event(sequence, finished=reason))  # told even where its rows could not be freed
        if not waited:
            if reason in (STOP, LENGTH):
                self.pool.store(sequence)
            self.pool.release(sequence)

    def refuse_queued(self) -> None:
        """End what waits and has not begun: the server stops."""
        for sequence in [s for s in self.queue if not s.made]:
            self.finish(sequence, REFUSED)

    def step(self) -> StepReport:
        """One prefill chunk, or one decode step of all that decode; what became of whom."""
        begin = self.clock()
        self.pool.copied.clear()
        self._expire(begin)
        self._admit()
        prefilling = [s for s in self.running if s.state == PREFILLING]
        decoding = [s for s in self.running if s.state == DECODING]
        kind, batch, tokens = "idle", 0, 0
        if policies.prefill_turn(bool(prefilling), bool(decoding), self._last_was_prefill):
            kind, batch, tokens = "prefill", 1, self._prefill(prefilling)
        elif decoding:
            kind, batch = "decode", self._decode()
            tokens = batch
        self._last_was_prefill = kind == "prefill"
        events, self._events = tuple(self._events), []
        return StepReport(kind, events, batch, tokens, {k: n for k, n in self.pool.copied.items() if n},
                          self.clock() - begin)

    # --- Who runs ---------------------------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for sequence in [*self.queue, *self.running]:
            if sequence.request.deadline is not None and now >= sequence.request.deadline:
                self.finish(sequence, EXPIRED)

    def _admit(self) -> None:
        """From the head of the queue, none before those in front of it: what is long comes too."""
        for sequence in list(self.queue):
            if self._waits_for_first(sequence):
                continue
            if len(self.running) >= self.limits.sequences or not self.pool.admit(sequence):
                return
            self.queue.remove(sequence)
            self._enter(sequence, PREFILLING)

    def _waits_for_first(self, sequence: Sequence) -> bool:
        """Whether a choice's prompt is under way in another choice of its request, to be forked."""
        return not sequence.made and any(s.request is sequence.request and s.state == PREFILLING for s in self.running)

    def _enter(self, sequence: Sequence, state: str) -> None:
        sequence.state, sequence.admitted = state, self._admitted
        self._admitted += 1
        self.running.append(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Give its rows up; it is computed again when there is room for all it may need. Nothing said is unsaid."""
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.state, sequence.rows = QUEUED, len(sequence.request.prompt) + sequence.request.max_new_tokens
        sequence.preempted += 1
        self.preempted += 1
        self.queue.appendleft(sequence)

    def _make_room(self) -> None:
        """Every sequence that decodes gets room for one more row; those that came last make way."""
        for sequence in [s for s in self.running if s.state == DECODING]:
            while sequence.state == DECODING and not self.pool.extend(sequence, self.pool.length(sequence) + 1):
                self._preempt(policies.victim(self.running))

    # --- What runs --------------------------------------------------------------------------------------------------

    def _prefill(self, waiting: list[Sequence]) -> int:
        left = [len(s.ids) - self.pool.length(s) for s in waiting]
        sequence = policies.next_prefill(waiting, left, self.limits.chunk)
        for other in waiting:
            other.waited = 0 if other is sequence else other.waited + 1
        start = self.pool.length(sequence)
        ids = sequence.ids[start:start + self.limits.chunk]
        logits = self._infer("prefill", [sequence], np.array([ids], np.int64), np.array([len(ids)]))
        if logits is not None and start + len(ids) == len(sequence.ids):
            sequence.state = DECODING
            self.pool.store(sequence)
            self._fork(sequence, logits[0])
            self._choose(sequence, logits[0])
        return len(ids)

    def _fork(self, first: Sequence, logits: np.ndarray) -> None:
        """The other choices of a request begin where its first one's prompt ends; without room they stay queued."""
        if first.made:
            return
        for other in [s for s in self.queue if s.request is first.request and not s.made]:
            if len(self.running) >= self.limits.sequences or not self.pool.fork(first, other):
                return
            self.queue.remove(other)
            self._enter(other, DECODING)
            self._choose(other, logits)

    def _decode(self) -> int:
        self._make_room()
        decoded = 0
        for key in sorted(self.pool.members):
            members = list(self.pool.members.get(key, ()))
            counts = np.array([int(s.state == DECODING) for s in members])
            if not counts.any():
                continue
            # a slot whose prompt is still prefilled computes one row too, which is not kept
            ids = np.array([[s.ids[-1] if s.state == DECODING else 0] for s in members], np.int64)
            logits = self._infer("decode", members, ids, counts)
            for sequence, row in zip(members, logits if logits is not None else (), strict=False):
                if sequence.state == DECODING:
                    self._choose(sequence, row)
                    decoded += 1
        return decoded

    def _infer(self, kind: str, members: list[Sequence], ids: np.ndarray, counts: np.ndarray) -> np.ndarray | None:
        """Logits [B, V] at each one's last token, the new rows kept; None where the runtime failed, which ends them."""
        session, key = self.sessions[kind], members[0].capacity
        assert key is not None
        group = self.pool.groups[key]
        slots = slice(members[0].slot, members[0].slot + len(members))
        last = np.maximum(counts - 1, 0)
        feed = {"input_ids": ids, **group.feed(slots)}
        if any(spec.name == "last_token" for spec in session.graph.inputs):
            feed["last_token"] = last
        everywhere = any(spec.name == "logits" and len(spec.shape) == 3 for spec in session.graph.outputs)
        out = group.out(*ids.shape) | ({} if everywhere else {"logits": self._logits[:len(ids)]})
        try:
            outputs = session.infer(feed, out)
            group.commit(outputs, counts, slots)
        except Exception as error:  # whatever a runtime throws: these sequences end, the server goes on
            for sequence in members:
                self.finish(sequence, FAILED, f"{type(error).__name__}: {error}")
            return None
        self.pool.copied["new"] += int(counts.sum()) * self.pool.row_bytes
        logits = outputs["logits"]
        return logits[np.arange(len(last)), last] if everywhere else logits

    def _choose(self, sequence: Sequence, logits: np.ndarray) -> None:
        """The next token from logits [V], and whether it is the last."""
        request = sequence.request
        try:
            token = sequence.sampler.next(logits, sequence.made)
        except CheckError as error:
            self.finish(sequence, FAILED, str(error))
            return
        sequence.ids.append(token)
        sequence.first_token = self.clock() if sequence.first_token is None else sequence.first_token
        logprob, top = None, tuple[tuple[int, float], ...]()
        if request.top_logprobs is not None:
            logprob, top = log_probabilities(logits, token, request.top_logprobs)
        reason = STOP if token in request.stop_ids else LENGTH if sequence.made == request.max_new_tokens else None
        self._events.append(Event(sequence, token, reason, logprob, top))
        if reason:
            self.finish(sequence, reason)
