"""The HTTP application: OpenAI's completions and chat completions over a worker, health, metrics, the status page."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from engines.serving.answers import ChatForm, CompletionForm, Form, Piece
from engines.serving.exchange import Exchange, Service, failed
from engines.serving.protocol import ApiError, ChatRequest, CompletionRequest, Generation, error_body
from engines.tokenizer import checked_messages
from exporter.errors import InputError

# the page loads nothing from anywhere and asks this server alone
_PAGE_POLICY = ("default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:")
EXPECTED = "expected a JSON object, sent with Content-Type: application/json"
LOOKS = ["GET", "HEAD"]  # what probes and balancers ask with


class EventStream(Response):
    """Server-sent events, each in a write of its own; the first piece is known to be good when it begins."""

    def __init__(self, events: AsyncGenerator[str]) -> None:
        self.status_code, self.background, self._events = 200, None, events

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send them; the iterator ends by itself when the client is gone."""
        await send({"type": "http.response.start", "status": 200, "headers": [
            (b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]})
        async with aclosing(self._events) as events:
            async for data in events:
                await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def _answer(service: Service, asked: ChatRequest | CompletionRequest, prompts: Sequence[Sequence[int]],
                  form: Form, request: Request) -> Response:
    exchange = Exchange(service, asked, prompts, asked.top)
    exchange.submit()
    head = {"id": f"{form.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": service.name}
    pieces = exchange.pieces(request)
    first = await anext(pieces, None)
    if first is None:
        return Response(status_code=499)  # nobody is there to read it
    if error := failed(first):
        await pieces.aclose()
        raise error
    if asked.stream:
        return EventStream(_events(exchange, asked, form, head, first, pieces))
    found: list[list[Piece]] = [[] for _ in exchange.writers]
    found[first.index].append(first)
    async with aclosing(pieces):
        async for piece in pieces:
            if error := failed(piece):
                raise error
            found[piece.index].append(piece)
    if not all(pieces and pieces[-1].finished for pieces in found):
        return Response(status_code=499)
    return JSONResponse({**head, "object": form.kind, "choices": [form.choice(i, p) for i, p in enumerate(found)],
                         "usage": exchange.usage(), "system_fingerprint": None})


async def _events(exchange: Exchange, asked: Generation, form: Form, head: dict[str, Any], first: Piece,
                  pieces: AsyncGenerator[Piece]) -> AsyncGenerator[str]:
    usage = bool(asked.stream_options and asked.stream_options.include_usage)
    head = {**head, "object": form.chunk_kind, "system_fingerprint": None}

    def chunk(choices: list[dict[str, Any]], **more: Any) -> str:
        return json.dumps({**head, "choices": choices, **({"usage": None} if usage else {}), **more},
                          ensure_ascii=False)

    def said(piece: Piece) -> bool:
        return bool(piece.text) or piece.finished is not None or piece.logprob is not None

    for i in range(len(exchange.writers)):
        if (opening := form.opening(i)) is not None:
            yield chunk([opening])
    if said(first):
        yield chunk([form.delta(first)])
    left = len(exchange.writers) - (first.finished is not None)
    async with aclosing(pieces):
        async for piece in pieces:
            if error := failed(piece):
                yield json.dumps(error.body)  # too late for a status
                return
            left -= piece.finished is not None
            if said(piece):
                yield chunk([form.delta(piece)])
    if left:
        return  # the client is gone
    if usage:
        yield chunk([], usage=exchange.usage())
    yield "[DONE]"


def make_app(service: Service) -> FastAPI:
    """The application of a service."""
    app = FastAPI(title="mla-export", docs_url=None, redoc_url=None)
    began = int(time.time())
    model = {"id": service.name, "object": "model", "created": began, "owned_by": "mla-export",
             "max_model_len": service.max_context}
    registry = service.worker.meter.registry()
    page = (files("engines.serving") / "status.html").read_text(encoding="utf-8")

    def require(name: str) -> None:
        if name != service.name:
            raise ApiError(404, f"the model {name[:100]!r} is not here; this server has {service.name!r}",
                           param="model", code="model_not_found")

    @app.post("/v1/completions", response_model=None)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        require(asked.model)
        prompts = [await _encoded(service, p) if isinstance(p, str) else p for p in asked.prompts]
        return await _answer(service, asked, prompts, CompletionForm(service.tokenizer, asked.top), request)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        require(asked.model)
        if not service.tokenizer.has_template:
            raise ApiError(400, "this model has no chat template; ask /v1/completions", param="messages")
        try:
            messages = checked_messages(asked.conversation, "messages")
            ids = await run_in_threadpool(service.tokenizer.encode_chat, messages)
        except InputError as error:
            raise ApiError(400, str(error).replace(f"{service.tokenizer.folder}: ", ""), param="messages") from None
        return await _answer(service, asked, [ids], ChatForm(service.tokenizer, asked.top), request)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> dict[str, Any]:
        require(name)
        return model

    @app.api_route("/health", methods=LOOKS)
    async def health() -> JSONResponse:
        stopping = service.worker.draining
        return JSONResponse({"status": "stopping" if stopping else "ok", "model": service.name},
                            503 if stopping else 200)

    @app.api_route("/metrics", methods=LOOKS)
    async def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @app.api_route("/status.json", methods=LOOKS)
    async def status() -> dict[str, Any]:
        return {"model": service.name, "stopping": service.worker.draining, "max_context": service.max_context,
                **service.worker.meter.status()}

    @app.api_route("/", methods=LOOKS, response_class=HTMLResponse)
    async def home() -> HTMLResponse:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    _errors(app)
    return app


async def _encoded(service: Service, text: str) -> list[int]:
    try:
        return await run_in_threadpool(service.tokenizer.encode, text)
    except InputError as error:
        raise ApiError(400, str(error), param="prompt") from None


def _errors(app: FastAPI) -> None:
    """Every error in the API's form, one clear message each."""
    @app.exception_handler(ApiError)
    async def ours(_: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, {"retry-after": "1"} if error.status in (429, 503) else None)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        return JSONResponse(error_body(*_said(error)), 400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        said = {404: f"there is no {request.url.path} here; the API is /v1/completions, /v1/chat/completions and "
                     "/v1/models", 405: f"{request.method} is not what {request.url.path} takes; ask with "
                + " or ".join(sorted((error.headers or {}).get("Allow", "another method").split(", ")))}
        about = _unread(error) or said.get(error.status_code, str(error.detail))
        return JSONResponse(error_body(about, "invalid_request_error"),
                            error.status_code, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def fault(_: Request, error: Exception) -> JSONResponse:
        return JSONResponse(error_body("the server made an error; see its log", "server_error"), 500)


def _unread(error: HTTPException) -> str | None:
    """Why a body could not be read as text, or nested too deep; None for other errors."""
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return (f"the body is not {cause.encoding.upper()}: byte 0x{cause.object[cause.start]:02x} at {cause.start} "
                f"({cause.reason}); {EXPECTED} in UTF-8")
    return f"the body is nested too deep; {EXPECTED}" if isinstance(cause, RecursionError) else None


def _said(error: RequestValidationError) -> tuple[str, str, str | None]:
    """(message, kind, field) of the first thing that is wrong."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        at = json.JSONDecodeError(first.get("ctx", {}).get("error", "it cannot be read"), str(error.body),
                                  first["loc"][-1])
        return (f"the body is not JSON: {at.msg} (line {at.lineno}, column {at.colno}); {EXPECTED}",
                "invalid_request_error", None)
    said = first["msg"].removeprefix("Value error, ")
    if not where:
        return (said if first["type"] == "value_error" else f"the body: {EXPECTED}"), "invalid_request_error", None
    given = "" if first["type"] == "missing" else f" (it is {json.dumps(first.get('input'), default=str)[:60]})"
    return f"{'.'.join(where)}: {said}{given}", "invalid_request_error", ".".join(where)
