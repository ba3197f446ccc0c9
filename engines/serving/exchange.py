"""One HTTP request over the worker: its prompts handed in, the pieces of its answers coming back, its end told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import Request

from engines.serving.answers import GOOD_ENDS, Piece, TextWriter
from engines.serving.protocol import ApiError, ChatRequest, CompletionRequest
from engines.serving.scheduler import BusyError
from engines.serving.sequence import CANCELLED, EXPIRED, FAILED, REFUSED, Event
from engines.serving.sequence import Request as Asked
from engines.serving.worker import StoppingError, Ticket, Worker
from engines.tokenizer import Tokenizer
from exporter.errors import InputError

# how a sequence that was not answered ends a request: status, kind of error, what to say
_ENDS = {EXPIRED: (408, "timeout_error", "the request took longer than this server allows; ask for fewer tokens"),
         FAILED: (500, "server_error", "the model failed"),
         CANCELLED: (503, "server_error", "the request was given up"),
         REFUSED: (503, "server_error", "the server is stopping; ask another one, or try again later")}


@dataclass(frozen=True)
class Service:
    """What is served: a model under `name`. `request_timeout`: seconds that a request may take, None for no end."""

    worker: Worker
    tokenizer: Tokenizer
    name: str
    stop_ids: frozenset[int]
    folder: Path
    request_timeout: float | None = None

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.worker.scheduler.export.max_context


class Exchange:
    """One request on its way: its prompts handed to the worker, the pieces of its answers coming back in a queue."""

    def __init__(self, service: Service, asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]],
                 top: int | None) -> None:
        self._service, self._asked, self._prompts, self._top = service, asked, prompts, top
        self._new, self._unsaid = asked.new_tokens, asked.unsaid_tokens
        self._loop, self._channel = asyncio.get_running_loop(), asyncio.Queue[Piece]()
        self.writers = [TextWriter(service.tokenizer, i, asked.stops) for i in range(len(prompts) * asked.choices)]
        self._tickets: list[Ticket] = []
        self._open = len(self.writers)

    def submit(self) -> None:
        """Hand every prompt in, or none: ApiError."""
        requests = [self._request(prompt) for prompt in self._prompts]
        try:
            for number, request in enumerate(requests):
                first = number * self._asked.choices

                def sink(event: Event, first: int = first) -> bool:
                    piece = self.writers[first + event.sequence.choice].take(event)
                    self._loop.call_soon_threadsafe(self._channel.put_nowait, piece)
                    return piece.finished in GOOD_ENDS

                self._tickets.append(self._service.worker.submit(request, sink))
        except InputError as error:
            self.cancel()
            if isinstance(error, StoppingError):
                raise ApiError(503, str(error), "server_error", code="stopping") from None
            if isinstance(error, BusyError):
                raise ApiError(429, str(error), "rate_limit_error", code="queue_full") from None
            raise ApiError(400, str(error), code="invalid_prompt") from None

    def _request(self, prompt: Sequence[int]) -> Asked:
        limit, left = self._service.max_context, self._service.max_context - len(prompt)
        if left < (self._new or 1):
            raise ApiError(400, f"the prompt has {len(prompt)} tokens" + (
                f", and max_tokens is {self._new}, {len(prompt) + self._new} in all" if self._new else "") +
                f"; this model takes up to {limit}; shorten the prompt" + (" or lower max_tokens" if self._new else ""),
                param="messages" if isinstance(self._asked, ChatRequest) else "prompt", code="context_length_exceeded")
        new = self._new or min(left, self._service.worker.scheduler.room(len(prompt)), self._unsaid or left)
        stops = frozenset(self._asked.stop_token_ids or ())
        stops |= frozenset() if self._asked.ignore_eos else self._service.stop_ids
        timeout = self._service.request_timeout
        deadline = None if timeout is None else self._service.worker.scheduler.clock() + timeout
        return Asked(tuple(prompt), max(new, 1), self._asked.sampling, stops, self._asked.choices, self._top, deadline)

    async def pieces(self, request: Request) -> AsyncGenerator[Piece]:
        """Pieces as they come until every choice is done; given up, rows and all, as soon as the client is gone."""
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            while self._open:
                piece = asyncio.ensure_future(self._channel.get())
                await asyncio.wait({piece, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not piece.done():
                    piece.cancel()
                    return
                self._open -= piece.result().finished is not None
                yield piece.result()
        finally:
            gone.cancel()
            self.cancel()

    def cancel(self) -> None:
        """Give up what is not done."""
        for ticket in self._tickets:
            self._service.worker.cancel(ticket)

    def usage(self) -> dict[str, Any]:
        """Tokens of prompts and answers."""
        prompt, new = sum(map(len, self._prompts)), sum(writer.tokens for writer in self.writers)
        reused = sum(max((s.reused for s in t.sequences[:1]), default=0) for t in self._tickets)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new,
                "prompt_tokens_details": {"cached_tokens": reused}}


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def failed(piece: Piece) -> ApiError | None:
    """The error that a piece ends its request with, or None."""
    if piece.finished is None or piece.finished in GOOD_ENDS:
        return None
    status, kind, said = _ENDS[piece.finished]
    return ApiError(status, f"{said}: {piece.message}" if piece.message else said, kind, code=piece.finished)
