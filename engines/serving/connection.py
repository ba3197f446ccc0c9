"""One connection: uvicorn's HTTP/1.1 with a bound on the time that the head of a request takes to come.

uvicorn bounds the silence between two requests and nothing else: who connects and says nothing, or sends a head byte by
byte, would hold the connection for as long as it likes. Bodies are bounded in door.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engines.serving.protocol import error_body


class BoundedHead(H11Protocol):
    """A connection that ends where a head has not come `head_seconds` after the connection, or after its first byte."""

    head_seconds = 10.0
    _due: asyncio.TimerHandle | None = None

    @staticmethod
    def erred(status: int) -> None:
        """Hears the status of an answer of the connection's own; see `telling`."""

    @classmethod
    def telling(cls, erred: Callable[[int], None]) -> type[BoundedHead]:
        """The same for uvicorn, which makes connections itself and passes nothing on: what it answers `erred` hears."""
        return type(cls.__name__, (cls,), {"erred": staticmethod(erred)})

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The first head may come."""
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        """More of a head, or of what follows it."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """The next head may have begun to come meanwhile."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more comes."""
        self._settle()
        super().connection_lost(exc)

    def _look(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # a head is there
            self._settle()
        elif self._due is None and self.conn.trailing_data[0]:  # the next one has begun
            self._wait()

    def _wait(self) -> None:
        self._due = self.loop.call_later(self.head_seconds, self._end)

    def _settle(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _end(self) -> None:
        self._due = None
        if self.transport.is_closing():
            return
        come = len(self.conn.trailing_data[0])
        if come:  # who said nothing is told nothing: it would read it as the answer to a request that it sends just now
            self._say(f"{come} bytes of a request's head came within {self.head_seconds:g} s, and not its end; send it "
                      "whole")
        self.transport.close()

    def _say(self, message: str) -> None:
        self.erred(408)
        body = json.dumps(error_body(message, "invalid_request_error", code="head_timeout")).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()),
                   (b"connection", b"close")]
        for event in (h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"), h11.Data(data=body),
                      h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
