"""Tokens to an answer's text: stop texts across token boundaries, log-probabilities, the two forms it is sent in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engines.serving.sequence import LENGTH, STOP, Event
from engines.tokenizer import TextStream, Tokenizer


@dataclass(frozen=True)
class Piece:
    """What one event brings to choice `index`: text that will not be taken back, and perhaps its end.

    `finished` is `stop`, `length` or one of the ways to fail; `offset` is where the token's text begins.
    """

    index: int
    text: str = ""
    finished: str | None = None
    message: str | None = None
    token: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    offset: int = 0


class TextWriter:
    """One choice's tokens to text. What could be the beginning of a stop text is held back until it is none."""

    def __init__(self, tokenizer: Tokenizer, index: int, stops: Sequence[str] = ()) -> None:
        self._stream, self._index, self._stops = TextStream(tokenizer), index, tuple(stops)
        self._held, self._written = "", 0
        self.tokens = 0

    def take(self, event: Event) -> Piece:
        """The piece of one event; `finished` `stop` where a stop text came, which ends the answer before it."""
        offset, finished, text = self._written + len(self._held), event.finished, ""
        if event.token is not None:
            self.tokens += 1
            if finished != STOP:  # the stop token is not part of the text
                text = self._stream.push(event.token)
        if finished:
            text += self._stream.flush()
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            out, self._held, finished = self._held[:min(found)], "", STOP
        else:
            keep = 0 if finished else max((_overlap(self._held, stop) for stop in self._stops), default=0)
            out, self._held = self._held[:len(self._held) - keep], self._held[len(self._held) - keep:]
        self._written += len(out)
        return Piece(self._index, out, finished, event.sequence.message, event.token, event.logprob, event.top, offset)


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)


def token_text(piece: bytes | None, token: int, prefix: str = "") -> str:
    """One token's piece as text; where that ends inside a character its bytes as \\x.. behind `prefix`, as OpenAI
    writes them. An id that has no piece is its number."""
    if piece is None:
        return f"token_id:{token}"
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return prefix + piece.decode(errors="backslashreplace")


class CompletionForm:
    """As /v1/completions answers."""

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer, self._top = tokenizer, top

    def opening(self, index: int) -> dict[str, Any] | None:
        """What a stream's choice begins with."""
        return None

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        return self.choice(piece.index, [piece])

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A whole choice."""
        return {"index": index, "text": "".join(piece.text for piece in pieces), "logprobs": self._logprobs(pieces),
                "finish_reason": pieces[-1].finished}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        said = [(p, p.token, p.logprob) for p in pieces if p.token is not None and p.logprob is not None]
        return {"tokens": [self._text(token) for _, token, _ in said], "token_logprobs": [own for *_, own in said],
                "text_offset": [p.offset for p, *_ in said],
                "top_logprobs": [self._likeliest(p, token, own) for p, token, own in said]}

    def _text(self, token: int) -> str:
        return token_text(self._tokenizer.piece(token), token, "bytes:")

    def _likeliest(self, piece: Piece, token: int, own: float) -> dict[str, float]:
        """The likeliest tokens and the one that was chosen, whose text it has; another of the same text is told by its
        number."""
        text = self._text(token)
        found: dict[str, float] = {}
        for other, value in piece.top:
            name = self._text(other)
            taken = name in found or (name == text and other != token)
            found[f"token_id:{other}" if taken else name] = value
        return found if text in found else {**found, text: own}


class ChatForm:
    """As /v1/chat/completions answers."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, top: int | None) -> None:
        self._tokenizer, self._top = tokenizer, top

    def opening(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def delta(self, piece: Piece) -> dict[str, Any]:
        """A chunk's choice."""
        return {"index": piece.index, "delta": {"content": piece.text} if piece.text else {},
                "logprobs": self._logprobs([piece]), "finish_reason": piece.finished}

    def choice(self, index: int, pieces: list[Piece]) -> dict[str, Any]:
        """A whole choice."""
        text = "".join(piece.text for piece in pieces)
        return {"index": index, "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": self._logprobs(pieces), "finish_reason": pieces[-1].finished}

    def _logprobs(self, pieces: list[Piece]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        said = [p for p in pieces if p.token is not None and p.logprob is not None]
        return {"content": [{**self._one(p.token or 0, p.logprob or 0.0),
                             "top_logprobs": [self._one(i, value) for i, value in p.top]} for p in said],
                "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        return {"token": token_text(piece, token), "logprob": logprob, "bytes": None if piece is None else list(piece)}


Form = CompletionForm | ChatForm
GOOD_ENDS = (STOP, LENGTH)
