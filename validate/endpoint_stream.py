"""One streamed answer of an OpenAI-compatible server: events in, text and times out; what is wrong with it, in words.

Times are those at which an event was read. Text is the first choice's: `delta.content` of chat completions, `text` of
completions; what a reasoning parser took out of it (`reasoning_content`, `reasoning`) counts as tokens, kept apart.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"
USAGE, CHUNKS = "usage", "chunks"  # who counted an answer's tokens: the server, or we its events with text
MEASURABLE = 0.01  # seconds from first token to last: what comes faster came in one go
QUOTED = 200  # characters of what a server sent that an error quotes


class EndpointError(Exception):
    """What became of one request, one line: what was asked, what arrived, what to do.

    `wrong`: the URL, the key or the model's name is, so no other request will fare better. `again`: worth another try,
    `after` so many seconds where the server said so.
    """

    def __init__(self, message: str, *, wrong: bool = False, again: bool = False, after: float | None = None) -> None:
        super().__init__(message)
        self.wrong, self.again, self.after = wrong, again, after


@dataclass
class Answer:
    """One answer. Seconds are from sending the request that was answered to the first and to the last event with text,
    so a retry's waiting is not in them; `tokens_per_second` is None where all text came at once."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    tokens: int = 0
    counted_by: str = CHUNKS
    seconds_to_first_token: float | None = None
    tokens_per_second: float | None = None
    seconds: float = 0.0
    attempts: int = 1
    remarks: list[str] = field(default_factory=list)


class Collector:
    """Puts the events of one stream together. `where` begins its errors: what was asked; `hide` takes the key out of
    what they quote."""

    def __init__(self, where: str, completions: bool, hide: Callable[[str], str],
                 clock: Callable[[], float] = time.perf_counter) -> None:
        self._where, self._completions, self._hide, self._clock = where, completions, hide, clock
        self._begin = clock()
        self._text, self._reasoning = list[str](), list[str]()
        self._times = list[float]()  # of the events with text
        self._events = self._choices = 0
        self._end: float | None = None  # of the event with finish_reason
        self._finish_reason: str | None = None
        self._usage: dict[str, Any] = {}
        self.done = False

    @property
    def characters(self) -> int:
        """What has arrived so far."""
        return sum(map(len, (*self._text, *self._reasoning)))

    def take(self, data: str) -> bool:
        """One event's data; whether it brought the answer forward. EndpointError where it is none that belongs here."""
        if self.done or not data.strip():
            return False  # an event without data: some servers' keep-alive
        if data.strip() == DONE:
            self.done = True
            return False
        self._events += 1
        event = self._parsed(data)
        if event.get("error") or event.get("object") == "error":
            raise EndpointError(f"{self._where}: after {self.characters} characters the server broke off with an "
                                f"error: {said(event, self._hide)}; see the server's log")
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        choices = event.get("choices", [])
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise self._malformed(data, "choices, a list of objects")
        return bool(choices) and self._take_choice(choices[0], data)

    def _parsed(self, data: str) -> dict[str, Any]:
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            raise self._malformed(data, "JSON") from None
        if not isinstance(event, dict):
            raise self._malformed(data, "a JSON object")
        return event

    def _take_choice(self, choice: dict[str, Any], data: str) -> bool:
        self._choices += 1
        delta = choice if self._completions else choice.get("delta") or {}
        if not isinstance(delta, dict):
            raise self._malformed(data, "a delta that is an object")
        text = delta.get("text" if self._completions else "content")
        reasoning = delta.get("reasoning_content") or delta.get("reasoning")
        if not all(isinstance(part, str | None) for part in (text, reasoning)):
            raise self._malformed(data, "text that is a string")
        if text or reasoning:
            self._text.append(text or "")
            self._reasoning.append(reasoning or "")
            self._times.append(self._clock())
        if isinstance(choice.get("finish_reason"), str):
            self._finish_reason, self._end = choice["finish_reason"], self._clock()
        return bool(text or reasoning) or self._end is not None

    def _malformed(self, data: str, expected: str) -> EndpointError:
        return EndpointError(f"{self._where}: a malformed stream: event {self._events} is "
                             f"{quoted(self._hide(data))}, expected {expected}; see whether --base-url is an "
                             "OpenAI-compatible server's, and whether a proxy between rewrites answers")

    def answer(self) -> Answer:
        """All of it, at the end of the stream. EndpointError where it ended too early or held nothing."""
        if not self._events:
            raise EndpointError(f"{self._where}: a stream without any event; expected data: lines and data: {DONE}; "
                                "see the server's log")
        if not self._choices and self.done:
            raise EndpointError(f"{self._where}: {self._events} events, each with an empty choices list; expected one "
                                "choice; see whether the server filters this prompt or knows the model")
        if not self.done and self._finish_reason is None:
            raise EndpointError(f"{self._where}: the answer was cut off after {self.characters} characters: the stream "
                                f"ended without finish_reason and without {DONE}; see the server's log, and time "
                                "limits of proxies between")
        counted = whole(self._usage.get("completion_tokens"))
        rate = self._rate(counted)
        return Answer(
            text=mended(self._text), reasoning=mended(self._reasoning), finish_reason=self._finish_reason,
            prompt_tokens=whole(self._usage.get("prompt_tokens")),
            tokens=len(self._times) if counted is None else counted, counted_by=CHUNKS if counted is None else USAGE,
            seconds_to_first_token=self._times[0] - self._begin if self._times else None, tokens_per_second=rate,
            seconds=max([*self._times, self._end or self._begin]) - self._begin, remarks=self._remarks(counted, rate))

    def _rate(self, counted: int | None) -> float | None:
        """Tokens after the first, by the time since. The server's count has the stop token, which came at the end."""
        if len(self._times) < 2:
            return None  # all at once
        last = self._times[-1] if counted is None else max(self._times[-1], self._end or 0.0)
        more = len(self._times) - 1 if counted is None else counted - 1
        return more / (last - self._times[0]) if more > 0 and last - self._times[0] >= MEASURABLE else None

    def _remarks(self, counted: int | None, rate: float | None) -> list[str]:
        found = []
        if not self.done:
            found.append(f"the stream ended without {DONE}; finish_reason had come, so the answer is taken as whole")
        if self._finish_reason is None:
            found.append("no finish_reason came")
        if counted is None:
            found.append("no usage came: tokens are events with text, and one event may hold several tokens")
        if counted is not None and rate is not None and 4 * len(self._times) < 3 * counted:
            found.append("an event holds several tokens, the first too perhaps: tokens/s is an upper bound")
        if not self._times:
            found.append("the answer is empty")
        if any(self._reasoning):
            found.append("the server took reasoning out of the answer; texts are compared without it")
        return found


def whole(value: Any) -> int | None:
    """A count as a server writes it, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def mended(parts: list[str]) -> str:
    """Pieces joined; a character that came as two surrogates in two events is one again, a lone half is replaced."""
    return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def quoted(text: str) -> str:
    """The beginning of what a server sent, in quotes, on one line and without control characters."""
    return repr(mended([text[:QUOTED]])) + ("…" if len(text) > QUOTED else "")


def said(body: Any, hide: Callable[[str], str]) -> str:
    """The message in a JSON error, in any of the forms that servers use; `hide` before it is cut."""
    found = body
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if found.get(name)), None)
    return quoted(hide(found if isinstance(found, str) else json.dumps(found or body)))
