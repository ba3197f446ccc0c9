"""An OpenAI-compatible server asked over HTTP: one request, its retries and time limits, and errors in words.

httpx2 does HTTP and server-sent events. The key is a header of this client alone: redirects are not followed, and
wherever a server sends its text back, *** stands for it.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any
from urllib.parse import quote

import httpx2

from exporter.errors import InputError
from validate.endpoint_stream import Answer, Collector, EndpointError, quoted, said

HIDDEN = "***"
ERROR_BYTES = 1 << 16  # of an error's body that are read
GRACE = 1.0  # seconds for a connection to end after [DONE], so that it can be used again


@dataclass(frozen=True)
class Limits:
    """Seconds to connect, to the first token (connecting included) and between tokens; how often to ask again, after
    `backoff` · 2^n seconds or what Retry-After says, at most `longest`."""

    connect: float = 10.0
    first_token: float = 120.0
    token: float = 30.0
    retries: int = 4
    backoff: float = 0.5
    longest: float = 60.0

    def __post_init__(self) -> None:
        for name in ("connect", "first_token", "token"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise InputError(f"--{name.replace('_', '-')}-timeout {value}: expected seconds above 0")
        if self.retries < 0:
            raise InputError(f"--retries {self.retries}: expected 0 or more")

    def wait(self, tries: int, after: float | None) -> float:
        """Seconds before the next try, spread so that clients turned away together do not come back together."""
        spread = random.uniform(0.5, 1.0)
        return min(self.longest, self.backoff * 2.0 ** tries) * spread if after is None else after + (
            self.backoff * (spread - 0.5))


LIMITS = Limits()


class Endpoint:
    """A server's completions: `ask` a prompt, an answer comes. An asynchronous context manager; InputError for a URL or
    a key that cannot be used. `key` None sends none."""

    def __init__(self, base_url: str, model: str, *, completions: bool = False, key: str | None = None,
                 limits: Limits = LIMITS) -> None:
        self.model, self.completions, self.limits = model, completions, limits
        # as it is, with a string's escapes however deep, and as a URL has it
        self._secret = None if key is None else re.compile(
            r"\\*".join(map(re.escape, key)) + "|" + re.escape(quote(key, safe="")))
        self.url = _checked_url(base_url) + ("/completions" if completions else "/chat/completions")
        self._where = f"POST {self.url}"
        self._options: dict[str, Any] = {"stream_options": {"include_usage": True}}
        self._limit = "max_tokens"
        headers = {"Accept-Encoding": "identity"}  # compression holds events back
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        # reading is bounded by deadlines that keep-alives do not move
        self._client = httpx2.AsyncClient(
            headers=headers, follow_redirects=False,
            timeout=httpx2.Timeout(None, connect=limits.connect), limits=httpx2.Limits(max_connections=None))

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self._client.aclose()

    def hide(self, text: str) -> str:
        """The text with *** in place of the key."""
        return self._secret.sub(HIDDEN, text) if self._secret else text

    async def ask(self, messages: list[dict[str, Any]] | None, prompt: str | None, max_tokens: int) -> Answer:
        """The answer, greedy, to messages or, of completions, to a prompt. EndpointError when it did not come."""
        asked = {"prompt": prompt} if self.completions else {"messages": messages}
        tries = 0
        while True:
            body = {"model": self.model, **asked, "temperature": 0, "stream": True, self._limit: max_tokens,
                    **self._options}
            try:
                answer = await self._once(body)
            except _UnsupportedError:
                continue  # without what this server does not take
            except EndpointError as error:
                if not error.again:
                    raise
                if tries == self.limits.retries:
                    raise EndpointError(f"{error} (asked {tries + 1} times)" if tries else str(error),
                                        wrong=error.wrong) from None
                if error.after is not None and error.after > self.limits.longest:
                    raise EndpointError(f"{error}; it asks to wait {error.after:.0f} s, and {self.limits.longest:.0f} "
                                        "s at most are waited here", wrong=error.wrong) from None
                await asyncio.sleep(self.limits.wait(tries, error.after))
                tries += 1
            else:
                answer.attempts = tries + 1
                return answer

    async def _once(self, body: Mapping[str, Any]) -> Answer:
        collector = Collector(self._where, self.completions, self.hide)
        limits, loop = self.limits, asyncio.get_running_loop()
        answering = False
        try:
            async with asyncio.timeout(limits.first_token) as deadline, self._client.sse(
                    self.url, method="POST", json=body) as source:
                await self._require_stream(source.response, body)
                answering = True
                async for event in source:
                    if collector.take(event.data):
                        deadline.reschedule(loop.time() + limits.token)
                    elif collector.done:
                        deadline.reschedule(loop.time() + min(limits.token, GRACE))
        except TimeoutError:
            if not collector.done:
                raise self._too_late(collector.characters) from None
        except httpx2.SSEError as error:
            raise EndpointError(f"{self._where}: a malformed stream: {self.hide(str(error))}") from None
        except httpx2.RequestError as error:
            if not collector.done:
                raise self._lost(error, answering, collector.characters) from None
        return collector.answer()

    def _too_late(self, characters: int) -> EndpointError:
        if characters:
            return EndpointError(f"{self._where}: after {characters} characters nothing more came for "
                                 f"{self.limits.token:g} s; raise --token-timeout, or see the server's log")
        return EndpointError(f"{self._where}: no token within {self.limits.first_token:g} s; raise "
                             "--first-token-timeout, or see the server's load")

    def _lost(self, error: httpx2.RequestError, answering: bool, characters: int) -> EndpointError:
        why = self.hide(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        if answering:
            return EndpointError(f"{self._where}: the answer was cut off after {characters} characters: the connection "
                                 f"broke ({why}); see the server's log, and time limits of proxies between")
        if isinstance(error, httpx2.ConnectTimeout):
            why = f"nothing answered within {self.limits.connect:g} s"
        return EndpointError(f"{self._where}: no answer ({why}); expected a server there; check --base-url and that it "
                             "runs", wrong=True, again=isinstance(error, httpx2.TransportError))

    async def _require_stream(self, response: httpx2.Response, body: Mapping[str, Any]) -> None:
        """EndpointError unless this is the beginning of a stream; each way to be something else has its sentence."""
        kind = self.hide(response.headers.get("content-type", "")).partition(";")[0].strip().lower()
        status = response.status_code
        if status == 200 and kind == "text/event-stream":
            return
        if 300 <= status < 400:
            place = quoted(self.hide(response.headers.get("location", "")))
            raise EndpointError(f"{self._where}: the server answered {status}, a redirect to {place}; redirects are "
                                "not followed, for they could carry the key elsewhere; give the right place as "
                                "--base-url", wrong=True)
        text = self.hide(await _beginning(response))
        html = kind == "text/html" or text.lstrip()[:1] == "<"
        found = _parsed(text)
        words = "an HTML page" if html else "nothing" if not text.strip() else (
            said(found, self.hide) if isinstance(found, dict) else quoted(text))
        if status == 200:
            raise self._no_stream(kind, html, found, words)
        if status in (400, 422) and self._adapt(words, body):
            raise _UnsupportedError
        raise self._refusal(status, words, response.headers.get("retry-after"))

    def _no_stream(self, kind: str, html: bool, found: Any, words: str) -> EndpointError:
        if html:
            return EndpointError(f"{self._where}: an HTML page, expected a stream of JSON; --base-url is a web site's "
                                 "or a login page's, give the API's, most of which end in /v1", wrong=True)
        if isinstance(found, dict) and not found.get("error") and isinstance(found.get("choices"), list):
            what = "one JSON object in place of a stream" if found["choices"] else (
                "one JSON object with an empty choices list")
            return EndpointError(f"{self._where}: {what}; expected text/event-stream, for times are measured on it; "
                                 "use a server that streams")
        return EndpointError(f"{self._where}: content type {kind or 'none'!r} with {words}; expected "
                             "text/event-stream; check --base-url")

    def _adapt(self, words: str, body: Mapping[str, Any]) -> bool:
        """Leave out or rename what the server says it does not take; whether there was anything left to change."""
        if "stream_options" in words and "stream_options" in body:
            self._options = {}
            return True
        if "max_completion_tokens" in words and "max_tokens" in body:
            self._limit = "max_completion_tokens"
            return True
        return False

    def _refusal(self, status: int, words: str, retry_after: str | None) -> EndpointError:
        head = f"{self._where}: the server answered {status} with {words}"
        if status in (401, 403):
            todo = "name the variable that holds a key with --key-env" if self._secret is None else (
                "check the key in the variable that --key-env names")
            return EndpointError(f"{head}; {todo}", wrong=True)
        if status in (404, 405):
            return EndpointError(f"{head}; check --base-url (most end in /v1) and --model {self.model}", wrong=True)
        if status == 429:
            return EndpointError(f"{head}; lower --concurrency, or ask later", again=True, after=_seconds(retry_after))
        if status >= 500:
            return EndpointError(f"{head}; see the server's log", again=True, after=_seconds(retry_after))
        return EndpointError(f"{head}; expected a stream; shorten the prompt or change what it says")


class _UnsupportedError(Exception):
    """The server refuses an optional field, which the next request leaves out."""


def read_key(variable: str | None, environment: Mapping[str, str]) -> str | None:
    """The key in an environment variable; None where none is named. InputError, without it, if no header can hold
    it."""
    if variable is None:
        return None
    key = environment.get(variable, "").strip()
    if not key:
        raise InputError(f"--key-env {variable}: no such environment variable, or it is empty; expected the key in it")
    if not all("!" <= character <= "~" for character in key):
        raise InputError(f"--key-env {variable}: holds a space, a line break or a character outside ASCII; expected a "
                         "key as one word")
    return key


def _checked_url(base_url: str) -> str:
    try:
        url = httpx2.URL(base_url.rstrip("/"))
    except httpx2.InvalidURL:
        raise InputError("--base-url: not a URL; expected one such as http://localhost:8000/v1") from None
    # what was given is not repeated: people put keys into URLs
    if url.userinfo or url.query or url.fragment:
        raise InputError("--base-url: holds a user name, a query or a fragment; give the key by --key-env, and the URL "
                         "bare, such as http://localhost:8000/v1")
    if url.scheme not in ("http", "https") or not url.host or not 0 < (url.port or 80) < 65536:
        raise InputError("--base-url: expected http:// or https://, a host and a path, such as "
                         "http://localhost:8000/v1")
    if url.path.endswith("/completions"):
        raise InputError("--base-url: ends in /completions; expected what stands before /chat/completions or "
                         "/completions")
    return str(url)


async def _beginning(response: httpx2.Response) -> str:
    """The first 64 KB of a body, as text."""
    found = b""
    async for chunk in response.aiter_bytes():
        found += chunk
        if len(found) > ERROR_BYTES:
            break
    return found[:ERROR_BYTES].decode("utf-8", "replace")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After: seconds, or a date. None where it says nothing that can be followed."""
    if retry_after is None:
        return None
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        when = parsedate_to_datetime(retry_after)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - datetime.now(UTC)).total_seconds())
