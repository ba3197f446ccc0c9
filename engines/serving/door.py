"""What every request passes before the application sees it: the key, whether the server stops, its body's size, time.

A body is read whole, up to a limit, before anything is made of it; half a body that does not come on is a 408.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

from engines.serving.protocol import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
DROPPED_BYTES, DROPPED_SECONDS = 64_000_000, 2.0  # of a refused body, read so that its client hears why
GUARDED = "/v1/"  # what asks for the key; health, metrics and the status page show no text of anybody's


class Door:
    """An ASGI application around another. `key` None: open to all. `stopping` says whether to turn requests away;
    `erred` is told the status of every answer of the API that is an error."""

    def __init__(self, inside: Application, *, key: str | None, max_body: int, body_timeout: float,
                 stopping: Callable[[], bool], erred: Callable[[int], None]) -> None:
        self._inside, self._key, self._max_body, self._timeout = inside, key, max_body, body_timeout
        self._stopping, self.erred = stopping, erred

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        guarded = scope["path"].startswith(GUARDED)
        send = self._counted(send) if guarded else send
        if guarded and self._key is not None and not self._known(headers):
            await refuse(send, receive, 401, "no key, or one that is not this server's, in the header Authorization; "
                         "expected Bearer KEY", "authentication_error", "invalid_api_key")
            return
        if scope["method"] == "POST" and self._stopping():
            await refuse(send, receive, 503, "the server is stopping; ask another one, or try again later",
                         "server_error", "stopping")
            return
        stated = headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > self._max_body:
            await self._too_large(send, receive, f"{int(stated)} bytes; this server takes up to {self._max_body}")
            return
        body = await self._body(receive, send)
        if body is not None:
            await self._inside(scope, _replay(body, receive), send)

    def _known(self, headers: MutableMapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), (self._key or "").encode())

    def _counted(self, send: Send) -> Send:
        async def counting(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self.erred(message["status"])
            await send(message)

        return counting

    async def _too_large(self, send: Send, receive: Receive, size: str) -> None:
        await refuse(send, receive, 413, f"the body has {size}; send less, or serve with a larger --max-body",
                     "invalid_request_error", "body_too_large")

    async def _body(self, receive: Receive, send: Send) -> bytes | None:
        """The whole body; None where there is nobody to answer, or it was answered."""
        parts, size = list[bytes](), 0
        try:
            async with asyncio.timeout(self._timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part: bytes = message.get("body", b"")
                    size += len(part)
                    if size > self._max_body:
                        break
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            await refuse(send, None, 408, f"{size} bytes of the body came within {self._timeout:g} s, and not its end; "
                         "send it whole, or serve with a longer --body-timeout", "invalid_request_error",
                         "body_timeout")
            return None
        await self._too_large(send, receive, f"more than the {self._max_body} bytes that this server takes")
        return None


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal given
        if given:
            return await receive()  # that the client went away
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


async def refuse(send: Send, receive: Receive | None, status: int, message: str, kind: str, code: str) -> None:
    """An error as the API has it, and the connection closed. What still comes of the body is read and dropped first, up
    to a limit: where a socket is closed with data unread, its client finds a reset and not the answer. `receive` None:
    nothing more comes."""
    data = json.dumps(error_body(message, kind, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()),
               (b"connection", b"close")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    headers += [(b"retry-after", b"1")] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data, "more_body": True})
    if receive is not None:
        await _drop(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drop(receive: Receive) -> None:
    """Read a body to its end, `DROPPED_BYTES` of it or for `DROPPED_SECONDS` at most."""
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_SECONDS):
            while size <= DROPPED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
