"""A server from start to end: the model opened, its memory set aside, a socket, a signal, the last answers finished."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn

from engines.memory import HOST
from engines.model_sessions import ModelSessions
from engines.serving.app import make_app
from engines.serving.connection import BoundedHead
from engines.serving.door import Door
from engines.serving.exchange import Service
from engines.serving.pool import Limits, Pool
from engines.serving.scheduler import Scheduler
from engines.serving.slots import require_ragged
from engines.serving.worker import Worker
from engines.tokenizer import open_tokenizer, stop_tokens
from exporter.errors import InputError
from exporter.manifest import open_export

if TYPE_CHECKING:
    from engines.trt_runtime import LoadOptions

MEGABYTE = 1_000_000
POLL = 0.05  # seconds
KEY_ENV = "MLA_API_KEY"  # looked at where no other variable is named


@dataclass(frozen=True)
class ServeOptions:
    """How to serve the model in `folder`; see `python -m engines serve --help`. Sizes in MB, times in seconds.
    `load`: how a GPU's backend loads the model."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    backend: str = "ort"
    threads: int = 0
    formulation: str | None = None
    tokenizer: Path | None = None
    max_concurrent: int = 8
    max_queue: int = 64
    chunk: int = 512
    cache_budget: float | None = None
    prefix_budget: float | None = None
    max_body: float = 2.0
    body_timeout: float = 30.0
    request_timeout: float | None = 600.0
    drain_timeout: float = 30.0
    api_key_env: str | None = None
    load: LoadOptions | None = None

    def __post_init__(self) -> None:
        for name in ("max_body", "body_timeout", "cache_budget", "request_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"--{name.replace('_', '-')} {value:g}: expected more than 0")
        for name in ("prefix_budget", "drain_timeout", "max_queue"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise InputError(f"--{name.replace('_', '-')} {value:g}: expected 0 or more")
        for name in ("max_concurrent", "chunk"):
            if getattr(self, name) < 1:
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.load is not None:
            self.load.check(self.backend)
        if not 0 <= self.port < 65536:
            raise InputError(f"--port {self.port}: expected 0 (any that is free) to 65535")

    @property
    def key(self) -> str | None:
        """What clients have to show; None where no variable was named and `KEY_ENV` is not set. One that was named and
        is not set is a mistake, and so is an empty one: who asks for a key is not served without."""
        name = KEY_ENV if self.api_key_env is None else self.api_key_env
        key = os.environ.get(name)
        if key is None and self.api_key_env is not None:
            raise InputError(f"--api-key-env {name}: this environment variable is not set; expected one with the key; "
                             "export it, or leave the option out to serve without a key")
        if key is not None and not key.strip():
            raise InputError(f"the environment variable {name} is empty; set it to a key, or unset it to serve without "
                             "one")
        return None if key is None else key.strip()

    def limits(self, available: int) -> Limits:
        """What the server may use; without a budget, a quarter of the `available` bytes. InputError where prefixes are
        to have more than there is."""
        budget = available // 4 if self.cache_budget is None else int(self.cache_budget * MEGABYTE)
        prefixes = None if self.prefix_budget is None else int(self.prefix_budget * MEGABYTE)
        if prefixes is not None and prefixes > budget:
            given = "by default a quarter of the memory that is free" if self.cache_budget is None else "--cache-budget"
            raise InputError(f"--prefix-budget {self.prefix_budget:g}: prefixes are part of the latent cache, which "
                             f"has {budget / MEGABYTE:g} MB in all ({given}); expected at most that; lower it, or "
                             "raise --cache-budget")
        return Limits(self.max_concurrent, self.max_queue, self.chunk, budget, prefixes)


@dataclass(frozen=True)
class Running:
    """A server that listens; what is said of it when it begins."""

    url: str
    model: str
    key: bool
    max_context: int
    cache_budget: int
    bytes_per_token: int


def serve(options: ServeOptions, ready: Callable[[Running], None],
          progress: Callable[..., None] = lambda message, share=None: None) -> None:
    """Serve until SIGTERM or SIGINT; then what runs is finished for `drain_timeout` seconds, what waits is refused.

    `ready` is called once it listens. InputError for a model that cannot be served, a port that is taken.
    """
    export, key = open_export(options.folder), options.key
    require_ragged(export)
    limits = options.limits(HOST.available())
    require_room(Pool(export, limits))
    tokenizer = open_tokenizer(export, options.tokenizer, required=False)
    if tokenizer is None:
        raise InputError(f"{options.folder}: neither it nor its checkpoint has a tokenizer.json; name a folder that "
                         "has one with --tokenizer FOLDER")
    listener = _bind(options.host, options.port)
    progress(f"opening {options.folder}")
    with listener, ModelSessions(export, options.backend, options.threads, options.formulation, options.load
                                 ) as sessions:
        sessions.open()
        if sessions.memory is not HOST:
            limits = options.limits(sessions.memory.available())
        scheduler = Scheduler(sessions, limits)
        require_room(scheduler.pool)
        with Worker(scheduler) as worker:
            name = options.name or options.folder.resolve().name
            stops = frozenset(stop_tokens(export, options.tokenizer, tokenizer))
            service = Service(worker, tokenizer, name, stops, options.folder, options.request_timeout)
            url = f"http://{_shown(options.host)}:{listener.getsockname()[1]}"
            running = Running(url, name, key is not None, export.max_context, limits.budget,
                              export.cache_bytes_per_token)
            asyncio.run(_run(service, options, key, listener, lambda: ready(running)))


def require_room(pool: Pool) -> None:
    """InputError for a budget that not even one bucket of rows fits into."""
    needed, budget = pool.needed(1), pool.limits.budget
    if needed > budget:
        raise InputError(f"--cache-budget: {budget / MEGABYTE:g} MB; the shortest sequence takes "
                         f"{needed / MEGABYTE:.1f} MB ({pool.row_bytes} bytes per token); give more, or a smaller "
                         "--chunk")


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}; choose another address, or --port 0 "
                         "for any that is free") from None
    return listener


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Uvicorn(uvicorn.Server):
    """Without its own answer to signals, which knows nothing of what still runs."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_config(door: Door, grace: int = 5) -> uvicorn.Config:
    """How HTTP is served. `grace`: seconds that connections get when the server ends."""
    return uvicorn.Config(door, http=BoundedHead.telling(door.erred), log_config=None, access_log=False,
                          lifespan="off", timeout_keep_alive=30, timeout_graceful_shutdown=grace)


async def _run(service: Service, options: ServeOptions, key: str | None, listener: socket.socket,
               ready: Callable[[], None]) -> None:
    door = Door(make_app(service), key=key, max_body=int(options.max_body * MEGABYTE),
                body_timeout=options.body_timeout, stopping=lambda: service.worker.draining,
                erred=service.worker.meter.erred)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    server = _Uvicorn(http_config(door))
    asked = asyncio.Event()
    _on_signals(asked, asyncio.get_running_loop())
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(POLL / 5)
        ready()
        await asyncio.wait({serving, asyncio.ensure_future(asked.wait())}, return_when=asyncio.FIRST_COMPLETED)
        await _drain(service.worker, options.drain_timeout, asked)
    finally:
        server.should_exit = True
        await serving


def _on_signals(asked: asyncio.Event, loop: asyncio.AbstractEventLoop) -> None:
    """SIGTERM and SIGINT set `asked`. Not by the loop's own handlers: when it closes it puts back those that end the
    process with an error, while all that is left to do is to leave."""
    def stop(number: int, frame: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: it has been done
            loop.call_soon_threadsafe(asked.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


async def _drain(worker: Worker, patience: float, asked: asyncio.Event) -> None:
    """Let what runs finish; a second signal, or the end of patience, ends it."""
    asked.clear()
    worker.drain()
    loop = asyncio.get_running_loop()
    end = loop.time() + patience
    while worker.outstanding and loop.time() < end and not asked.is_set():
        await asyncio.sleep(POLL)
    await loop.run_in_executor(None, worker.stop)
    await asyncio.sleep(POLL)  # the last events are on their way to their connections
