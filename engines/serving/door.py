"""What every request passes before the application sees it: the key, whether the server stops, its body's size, time.

A body is read whole, up to a limit, before anything is made of it; half a body that does not come on is a 408.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from engines.serving.protocol import error_body

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
GUARDED = "/v1/"  # what asks for the key; health, metrics and the status page show no text of anybody's


class Door:
    """An ASGI application around another. `key` None: open to all. `stopping` says whether to turn requests away."""

    def __init__(self, inside: Application, *, key: str | None, max_body: int, body_timeout: float,
                 stopping: Callable[[], bool]) -> None:
        self._inside, self._key, self._max_body, self._timeout = inside, key, max_body, body_timeout
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._inside(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        if scope["path"].startswith(GUARDED) and self._key is not None and not self._known(headers):
            await refuse(send, 401, "no key, or one that is not this server's, in the header Authorization; expected "
                         "Bearer KEY", "authentication_error", "invalid_api_key")
            return
        if scope["method"] == "POST" and self._stopping():
            await refuse(send, 503, "the server is stopping; ask another one, or try again later", "server_error",
                         "stopping")
            return
        stated = headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > self._max_body:
            await self._too_large(send, f"{int(stated)} bytes")
            return
        body = await self._body(receive, send)
        if body is not None:
            await self._inside(scope, _replay(body, receive), send)

    def _known(self, headers: MutableMapping[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), (self._key or "").encode())

    async def _too_large(self, send: Send, size: str) -> None:
        await refuse(send, 413, f"the body has {size}; this server takes up to {self._max_body}; send less, or serve "
                     "with a larger --max-body", "invalid_request_error", "body_too_large")

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
            await refuse(send, 408, f"{size} bytes of the body came within {self._timeout:g} s, and then no more; send "
                         "it whole", "invalid_request_error", "body_timeout")
            return None
        await self._too_large(send, f"more than {self._max_body} bytes")
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


async def refuse(send: Send, status: int, message: str, kind: str, code: str) -> None:
    """An error as the API has it, and the connection closed: the rest of a body is not waited for."""
    data = json.dumps(error_body(message, kind, code=code)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode()),
               (b"connection", b"close")]
    headers += [(b"www-authenticate", b"Bearer")] if status == 401 else []
    headers += [(b"retry-after", b"1")] if status == 503 else []
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
