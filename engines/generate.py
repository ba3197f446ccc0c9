"""Text generation over a whole-model export: chunked prefill and decode of a ragged batch, over one latent cache.

Prompts of any lengths run side by side. A prefill chunk is padded at the right and `last_token` says where each
sequence's last real token is. A sequence that ended in an earlier chunk or finished its answer keeps its slot; what is
computed there is not looked at.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from engines.cache import LatentCache, Staging
from engines.memory import HOST
from engines.model_sessions import ModelSessions, check_prompt, require_model
from engines.sampling import Sampler, Sampling
from engines.tokenizer import Tokenizer, conversation, open_tokenizer, read_messages, stop_tokens
from exporter.errors import InputError
from exporter.manifest import Export

if TYPE_CHECKING:
    from engines.trt_runtime import LoadOptions

BUCKET = 256  # rows: a cache is a multiple of it long, so that runs of like length share shapes
CHUNK = 512  # tokens of a prefill step, what `engines build` plans for
STOP, LENGTH = "stop", "length"  # why a sequence ended
GREEDY = Sampling()


@dataclass(frozen=True)
class Step:
    """One new token of each sequence; `tokens` has None for those that finished earlier, `finished` says why or None.

    A stop token is in `tokens` of the step that ends its sequence.
    """

    index: int
    tokens: tuple[int | None, ...]
    finished: tuple[str | None, ...]


@dataclass
class Statistics:
    """Figures of one `generate`, filled as it runs. Seconds are of the runtime and the choice of tokens alone."""

    prompt_tokens: int
    cache_bytes: int
    cache_bytes_per_token: int
    new_tokens: int = 0
    seconds_to_first_token: float | None = None
    rates: list[float] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the decode steps, all sequences together; None before there was one."""
        return statistics.median(self.rates) if self.rates else None


class Generator:
    """A model export's prefill and decode sessions, opened once, when the first batch was found to fit.

    Each `generate` makes a cache of its own: of `capacity` rows, or as long as its longest sequence may become, rounded
    up to 256 rows. `threads` 0 leaves the choice to ONNX Runtime. `formulation` is the decode graph's, and the
    prefill's where it has one of that name. `load`: how a GPU's backend loads them. A context manager.
    """

    def __init__(self, export: Export, backend: str = "ort", threads: int = 0, capacity: int | None = None,
                 formulation: str | None = None, load: LoadOptions | None = None) -> None:
        self._sessions = ModelSessions(export, backend, threads, formulation, load)
        self.export, self.capacity = export, capacity
        self.statistics: Statistics | None = None
        self.vocabulary = export.decoder.vocab_size

    def __enter__(self) -> Generator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sessions.__exit__(kind, error, trace)

    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling = GREEDY,
                 stop_ids: Sequence[int] = (), chunk: int = CHUNK) -> Iterator[Step]:
        """Generate for each prompt until a stop token or `max_new_tokens`; the steps come as they are made.

        What cannot be done is an InputError here, before the first step. `self.statistics` belongs to the latest call.
        """
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        rows = self._rows(prompts, max_new_tokens, chunk)
        self._sessions.open()
        cache = self._cache(len(prompts), rows, min(chunk, int(lengths.max())))
        self.statistics = Statistics(int(lengths.sum()), cache.nbytes, self.export.cache_bytes_per_token)
        samplers = [Sampler(sampling, i) for i in range(len(prompts))]
        return self._run(_Batch(prompts, lengths, cache, samplers, frozenset(stop_ids), max_new_tokens), chunk,
                         self.statistics)

    def _cache(self, batch: int, rows: int, tokens: int) -> LatentCache:
        """A cache where the sessions have theirs. On a GPU its new rows are staged there too, and never come to the
        host."""
        memory = self._sessions.memory
        staging = None if memory is HOST else Staging(self.export, batch * tokens, memory)
        return LatentCache(self.export, batch, rows, staging, memory)

    def _rows(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, chunk: int) -> int:
        """Rows of cache to make; InputError where the batch does not fit the export."""
        folder, limit = self.export.folder, self.export.max_context
        for name, value in (("max-new-tokens", max_new_tokens), ("chunk", chunk)):
            if value < 1:
                raise InputError(f"--{name} {value}: expected at least 1")
        if not prompts:
            raise InputError("no prompts; expected at least one")
        for i, prompt in enumerate(prompts):
            which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
            check_prompt(list(prompt), which, self.vocabulary)
            if len(prompt) + max_new_tokens > limit:
                raise InputError(f"{which} has {len(prompt)} tokens, and {max_new_tokens} new ones are asked for, "
                                 f"{len(prompt) + max_new_tokens} in all; {folder} takes up to {limit} (max_context); "
                                 "shorten the prompt, lower --max-new-tokens, or export with a larger --max-context")
        lengths = sorted({len(prompt) for prompt in prompts})
        if self.export.cache == "concat" and len(lengths) > 1:
            raise InputError(f"prompts of {', '.join(map(str, lengths))} tokens; the concat form keeps one length for "
                             "all; export with --cache append, or generate one by one")
        needed = lengths[-1] + max_new_tokens
        if self.capacity is not None and self.capacity < needed:
            raise InputError(f"capacity is {self.capacity} rows; {needed} are needed, {lengths[-1]} tokens of prompt "
                             f"and {max_new_tokens} new ones")
        return self.capacity or min(-(-needed // BUCKET) * BUCKET, limit)

    def _run(self, batch: _Batch, chunk: int, figures: Statistics) -> Iterator[Step]:
        begin = time.perf_counter()
        step = batch.choose(0, self._prefill_all(batch, chunk))
        figures.seconds_to_first_token = time.perf_counter() - begin
        figures.new_tokens = len(batch.prompts)
        yield step
        while not batch.done:
            begin = time.perf_counter()
            step = batch.choose(step.index + 1, self._decode_one(batch, step))
            made = sum(token is not None for token in step.tokens)
            figures.rates.append(made / (time.perf_counter() - begin))
            figures.new_tokens += made
            yield step

    def _prefill_all(self, batch: _Batch, chunk: int) -> np.ndarray:
        """Logits [B, V] at each prompt's last token."""
        rows: list[np.ndarray] = [np.empty(0)] * len(batch.prompts)
        longest = int(batch.lengths.max())
        for start in range(0, longest, chunk):
            ids = np.zeros((len(rows), min(chunk, longest - start)), np.int64)  # [B, T]
            counts = np.clip(batch.lengths - start, 0, ids.shape[1])
            for i, count in enumerate(counts.tolist()):
                ids[i, :count] = batch.prompts[i][start:start + count]
            logits = self._infer("prefill", batch, ids, counts)
            for i, count in enumerate(counts.tolist()):
                if count:  # the last chunk that it has tokens in is the one that counts
                    rows[i] = logits[i]
        return np.stack(rows)

    def _decode_one(self, batch: _Batch, step: Step) -> np.ndarray:
        """Logits [B, V] after the step's tokens."""
        ids = np.array([[token or 0] for token in step.tokens], np.int64)
        return self._infer("decode", batch, ids, np.ones_like(batch.lengths))

    def _infer(self, kind: str, batch: _Batch, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        session, last = self._sessions[kind], np.maximum(counts - 1, 0)
        feed = {"input_ids": ids, **batch.cache.feed()}
        if any(spec.name == "last_token" for spec in session.graph.inputs):
            feed["last_token"] = last
        outputs = session.infer(feed, batch.cache.out(*ids.shape))
        batch.cache.commit(outputs, counts)
        logits = outputs["logits"]
        return logits if logits.ndim == 2 else logits[np.arange(len(last)), last]  # [B, T, V]: logits everywhere


@dataclass
class _Batch:
    """The sequences of one `generate`: what they were given, and why those that ended did."""

    prompts: Sequence[Sequence[int]]
    lengths: np.ndarray
    cache: LatentCache
    samplers: list[Sampler]
    stops: frozenset[int]
    max_new_tokens: int

    def __post_init__(self) -> None:
        self.reasons: list[str | None] = [None] * len(self.prompts)

    @property
    def done(self) -> bool:
        """Whether every sequence ended."""
        return None not in self.reasons

    def choose(self, index: int, logits: np.ndarray) -> Step:
        """The next token of every sequence that still runs, from logits [B, V]."""
        tokens: list[int | None] = []
        for i, reason in enumerate(self.reasons):
            token = None if reason else self.samplers[i].next(logits[i], index)
            tokens.append(token)
            if token is not None:
                last = index + 1 == self.max_new_tokens
                self.reasons[i] = STOP if token in self.stops else LENGTH if last else None
        return Step(index, tuple(tokens), tuple(self.reasons))


@dataclass(frozen=True)
class TextRequest:
    """What `python -m engines generate` was asked to continue; see its --help. `chat` None: as the input suggests."""

    prompt: str | None = None
    tokens: str | None = None
    messages: Path | None = None
    system: str | None = None
    chat: bool | None = None
    tokenizer: Path | None = None
    stop: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("prompt", "tokens", "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(f"--{name}" for name in given) if given else "none of them"
            raise InputError(f"{found} given; expected exactly one of --prompt TEXT, --tokens 1,2,3 and --messages "
                             "FILE.json")
        if self.tokens is not None and (self.chat or self.system is not None):
            raise InputError("--tokens takes ids as they are; --chat and --system need --prompt or --messages")
        if self.prompt is not None and self.system is not None and not self.chat:
            raise InputError("--system is a message of the chat template; add --chat, or put it into --prompt")
        if self.messages is not None and self.chat is False:
            raise InputError("--messages needs the chat template; leave --no-chat out, or give the text with --prompt")


def prepare(export: Export, request: TextRequest) -> tuple[list[int], Tokenizer | None, tuple[int, ...]]:
    """The prompt's ids, the tokenizer (None only with --tokens, where there is none) and the tokens to stop at."""
    require_model(export)
    tokenizer = open_tokenizer(export, request.tokenizer, required=request.tokens is None)
    if request.tokens is not None:
        ids = parse_tokens(request.tokens)
    elif tokenizer is None:
        raise AssertionError
    elif request.messages is not None:
        ids = tokenizer.encode_chat(read_messages(request.messages, request.system))
    elif request.chat:
        ids = tokenizer.encode_chat(conversation([request.prompt or ""], request.system))
    else:
        ids = tokenizer.encode(request.prompt or "")
    known = () if request.ignore_eos else stop_tokens(export, request.tokenizer, tokenizer)
    return ids, tokenizer, tuple(dict.fromkeys((*request.stop, *known)))


def parse_tokens(text: str) -> list[int]:
    """Token ids between commas; InputError for what is none."""
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and len(word) < 19)]
    if wrong:
        raise InputError(f"--tokens: {wrong[0][:40]!r} is no token id; expected numbers such as 1,2,3")
    return [int(word) for word in words]
