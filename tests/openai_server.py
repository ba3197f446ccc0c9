"""A local OpenAI-compatible server on real sockets that behaves, or misbehaves, as a test says, packet by packet."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event, text as it is."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def piece(text: str | None = None, finish: str | None = None, **more: Any) -> bytes:
    """A chat chunk with one choice."""
    delta = {"role": "assistant"} if text is None else {"content": text}
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


def usage(tokens: int, prompt: int = 5) -> bytes:
    """The chunk that stream_options ask for: no choices, the counts."""
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": tokens,
                                           "total_tokens": tokens + prompt}})


def answer(*texts: str, tokens: int | None = None) -> list[bytes]:
    """A whole answer as a good server streams it, a packet an event."""
    return [piece(), *map(piece, texts), piece("", "stop"), *([] if tokens is None else [usage(tokens)]), DONE]


@dataclass
class Exchange:
    """One request, and the ways to answer it."""

    handler: BaseHTTPRequestHandler
    closing: threading.Event
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(default_factory=dict)

    def stream(self, packets: Iterable[bytes | float], *, chunked: bool = True, cut: bool = False,
               kind: str = "text/event-stream; charset=utf-8") -> None:
        """Packets, each in a write of its own; a number is a pause in seconds. `chunked` false ends the body with the
        connection, as HTTP/1.0 does; `cut` ends the connection inside the body."""
        handler = self.handler
        handler.send_response(200)
        handler.send_header("Content-Type", kind)
        handler.send_header(*(("Transfer-Encoding", "chunked") if chunked else ("Connection", "close")))
        handler.end_headers()
        handler.wfile.flush()
        for packet in packets:
            if isinstance(packet, int | float):
                self.closing.wait(packet)
            else:
                handler.wfile.write(b"%x\r\n%b\r\n" % (len(packet), packet) if chunked else packet)
                handler.wfile.flush()
        if cut or not chunked:
            handler.close_connection = True
        else:
            handler.wfile.write(b"0\r\n\r\n")

    def reply(self, status: int, body: Any, kind: str = "application/json", **headers: str) -> None:
        """A whole body: JSON of what is no text."""
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.handler.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **headers}.items():
            self.handler.send_header(name.replace("_", "-"), value)
        self.handler.end_headers()
        self.handler.wfile.write(data)

    def hang_up(self) -> None:
        """No answer at all."""
        self.handler.close_connection = True
        self.handler.connection.shutdown(socket.SHUT_RDWR)


Behaviour = Callable[[Exchange], None]


class Server:
    """Answers the first request by the first behaviour, and so on; the last one answers all that follow."""

    def __init__(self, *behaviours: Behaviour) -> None:
        self.exchanges, self.connections = list[Exchange](), 0
        closing, server, turn = threading.Event(), self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def setup(self) -> None:
                super().setup()
                server.connections += 1

            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                exchange = Exchange(self, closing, self.path, dict(self.headers), json.loads(data))
                with turn:
                    number = len(server.exchanges)
                    server.exchanges.append(exchange)
                try:
                    behaviours[min(number, len(behaviours) - 1)](exchange)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True  # the client had enough

            def log_message(self, *_: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            daemon_threads, block_on_close = True, False

            def handle_error(self, *_: Any) -> None:
                pass  # a client that hangs up while its next request is waited for

        self._listener, self._closing = Listener(("127.0.0.1", 0), Handler), closing
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """What to give as --base-url."""
        return f"http://127.0.0.1:{self._listener.server_address[1]}/v1"

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._closing.set()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()


def good(*texts: str, tokens: int | None = None) -> Behaviour:
    """A server that answers well."""
    return lambda exchange: exchange.stream(answer(*texts, tokens=tokens))


def sends(*packets: bytes | float, **how: Any) -> Behaviour:
    """A server that streams these packets."""
    return lambda exchange: exchange.stream(packets, **how)


def replies(status: int, body: Any, kind: str = "application/json", **headers: str) -> Behaviour:
    """A server that sends one body."""
    return lambda exchange: exchange.reply(status, body, kind, **headers)
