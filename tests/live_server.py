"""A tiny real model behind the HTTP server, in this process or by the command, on a port of its own."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from engines.model_sessions import ModelSessions
from engines.serving.app import make_app
from engines.serving.door import Door
from engines.serving.exchange import Service
from engines.serving.pool import Limits
from engines.serving.scheduler import Scheduler
from engines.serving.server import http_config
from engines.serving.worker import Worker
from engines.tokenizer import Tokenizer
from exporter.export import ExportRequest
from exporter.export import export as run_export
from exporter.manifest import Export, open_export
from tests.checkpoints import tiny_checkpoint
from tests.test_generate import small
from tests.test_tokenizer import PLAIN, write

REPOSITORY = Path(__file__).resolve().parent.parent
NAME, EOS = "tiny", 1
LIMITS = Limits(sequences=8, queue=64, chunk=64, budget=20_000_000, bucket=32, like=128, block=16)


def make_model(folder: Path) -> Path:
    """A checkpoint of two layers with a tokenizer and a chat template, and its export; the export's folder."""
    checkpoint = write(tiny_checkpoint(folder / "checkpoint", "deepseek_v3"), small(), chat_template=PLAIN)
    run_export(ExportRequest(str(checkpoint), folder / NAME, "model", max_context=600))
    return folder / NAME


@contextmanager
def serving(model: Path, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """The command in a process of its own, and the object it prints when it listens."""
    process = subprocess.Popen(
        [sys.executable, "-m", "engines", "serve", str(model), "--port", "0", "--threads", "1", "--cache-budget", "20",
         "--json", *words], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **environment})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.stderr.read() if process.stderr else ""
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()


class LiveServer:
    """A context manager; `service.worker` is within reach."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, key: str | None = None, *, max_body: int = 2_000_000,
                 body_timeout: float = 5.0, request_timeout: float | None = None, slowed: float = 0.0) -> None:
        self.export: Export = open_export(folder)
        self.limits, self.key, self.slowed = limits, key, slowed
        self._door = {"max_body": max_body, "body_timeout": body_timeout}
        self._request_timeout = request_timeout
        self._stack = ExitStack()

    def __enter__(self) -> LiveServer:
        sessions = self._stack.enter_context(ModelSessions(self.export, threads=1))
        sessions.open()
        if self.slowed:
            _slow_down(sessions, self.slowed)
        worker = self._stack.enter_context(Worker(Scheduler(sessions, self.limits)))
        tokenizer = Tokenizer(self.export.folder.parent / "checkpoint")
        self.service = Service(worker, tokenizer, NAME, frozenset({EOS}), self.export.folder, self._request_timeout)
        door = Door(make_app(self.service), key=self.key, stopping=lambda: worker.draining,
                    erred=worker.meter.erred, **self._door)
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self._server = uvicorn.Server(http_config(door, grace=1))
        self._thread = threading.Thread(target=lambda: asyncio.run(self._server.serve(sockets=[listener])), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._stack.close()

    @property
    def url(self) -> str:
        """Without a path."""
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        """One JSON request."""
        return httpx2.post(f"{self.url}{path}", json=body, timeout=60, **more)

    def complete(self, **body: Any) -> httpx2.Response:
        """POST /v1/completions, greedy unless told otherwise."""
        return self.post("/v1/completions", {"model": NAME, "prompt": [5, 6, 7], "temperature": 0, **body})

    def settled(self, seconds: float = 10.0) -> dict[str, Any]:
        """The status once nothing runs any more."""
        return settled(self.url, seconds)


def settled(url: str, seconds: float = 10.0) -> dict[str, Any]:
    """A server's status once nothing runs any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        status: dict[str, Any] = httpx2.get(f"{url}/status.json").json()
        if not status["running"] and sum(status["ended"].values()) >= status["requests"]:
            return status
        time.sleep(0.01)
    raise AssertionError(f"still running: {status}")


def _slow_down(sessions: ModelSessions, seconds: float) -> None:
    """A pause in every step, so that a test can do something while an answer is under way."""
    for kind in ("prefill", "decode"):
        session: Any = sessions[kind]
        if hasattr(session, "quick"):
            continue
        session.quick = session.infer

        def slowly(*args: Any, session: Any = session) -> Any:
            time.sleep(seconds)
            return session.quick(*args)

        session.infer = slowly
