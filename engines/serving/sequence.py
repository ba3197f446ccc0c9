"""What is asked of the scheduler and what it answers: a request, its sequences, and the events of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engines.sampling import Sampler, Sampling

QUEUED, PREFILLING, DECODING, DONE = "queued", "prefilling", "decoding", "done"  # where a sequence is
# why it is done; the first two are how `generate` ends as well
STOP, LENGTH, CANCELLED, EXPIRED, FAILED, REFUSED = "stop", "length", "cancelled", "expired", "failed", "refused"
GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """A prompt to continue, `choices` times. `deadline`: the scheduler's clock, seconds, after which it is given up.

    `top_logprobs`: None for no log-probabilities, else how many of the likeliest tokens come with each one.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: Sampling = GREEDY
    stop_ids: frozenset[int] = frozenset()
    choices: int = 1
    top_logprobs: int | None = None
    deadline: float | None = None


@dataclass
class Sequence:
    """One choice of one request. `ids` are the prompt and what was chosen since; all but the last are cached when it
    decodes. Times are the scheduler's clock in seconds."""

    number: int
    request: Request
    choice: int
    submitted: float
    state: str = QUEUED
    reason: str | None = None  # why it is done
    message: str | None = None  # and what went wrong
    ids: list[int] = field(default_factory=list)
    rows: int = 0  # rows to make room for when it is admitted
    capacity: int | None = None  # key of its group in the pool
    slot: int = -1
    waited: int = 0  # prefill turns that others had before it
    reused: int = 0  # tokens of the prompt that were not computed
    preempted: int = 0
    admitted: int = -1  # a running number: who came first
    first_token: float | None = None
    finished: float | None = None

    def __post_init__(self) -> None:
        self.ids = list(self.request.prompt)
        self.rows = len(self.ids) + 1
        self.sampler = Sampler(self.request.sampling, self.choice)

    @property
    def new_tokens(self) -> list[int]:
        """What was chosen so far, a stop token included."""
        return self.ids[len(self.request.prompt):]

    @property
    def made(self) -> int:
        """How many tokens were chosen."""
        return len(self.ids) - len(self.request.prompt)


@dataclass(frozen=True)
class Event:
    """A new token of a sequence, or its end, or both; `token` None where it ended without one.

    `logprob` and `top` (id, log-probability; the likeliest first) are of the model's own distribution, before
    temperature and truncation.
    """

    sequence: Sequence
    token: int | None = None
    finished: str | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class StepReport:
    """What one step did: `kind` is prefill, decode or idle; `tokens` the new tokens computed, in `batch` sequences.

    `copied`: bytes of cache rows written, by reason: `new` rows, and `growth`, `swap`, `fork`, `move`, `prefix` (taken
    out of the store), `store` (put into it).
    """

    kind: str
    events: tuple[Event, ...]
    batch: int = 0
    tokens: int = 0
    copied: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def log_probabilities(logits: np.ndarray, token: int, top: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """The log-probability of `token` and those of the `top` likeliest, from logits [V], in float64."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= np.log(np.exp(scores).sum())
    if top == 0:
        return float(scores[token]), ()
    first = np.argpartition(-scores, min(top, len(scores)) - 1)[:top]
    first = first[np.lexsort((first, -scores[first]))]
    return float(scores[token]), tuple((int(i), float(scores[i])) for i in first)
