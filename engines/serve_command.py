"""`python -m engines serve`: its options, and what it says when it listens."""

from __future__ import annotations

import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engines.load_command import load_options, taken
from exporter import console
from exporter.errors import InputError

if TYPE_CHECKING:
    from engines.serving.server import Running


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at; 0.0.0.0: reachable from "
              "other machines.")
@click.option("--port", type=int, default=8000, show_default=True, help="0: any that is free.")
@click.option("--name", help="What the model is called in requests (default: DIR's name).")
@click.option("--backend", default="ort", show_default=True, help="ort, ort-cuda, trt, trt-rtx or interpreter.")
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of ONNX Runtime; 0: its own choice.")
@click.option("--formulation", help="Formulation of the graphs (default: the export's).")
@load_options
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder with tokenizer.json, in place of the "
              "checkpoint's.")
@click.option("--max-concurrent", type=int, default=8, show_default=True, help="Sequences in a decode step at most.")
@click.option("--max-queue", type=int, default=64, show_default=True, help="Sequences that may wait; more are told to "
              "come back (429).")
@click.option("--chunk", type=int, default=512, show_default=True, help="Tokens of a prefill step at most.")
@click.option("--cache-budget", type=float, metavar="MB", help="Latent cache in all (default: a quarter of the memory "
              "that is free).")
@click.option("--prefix-budget", type=float, metavar="MB", help="Of it for prompts and answers kept to be reused; 0: "
              "none (default: half).")
@click.option("--max-body", type=float, default=2, show_default=True, metavar="MB", help="A request's size at most "
              "(413).")
@click.option("--body-timeout", type=float, default=30, show_default=True, help="Seconds for a request's body to come "
              "(408).")
@click.option("--request-timeout", type=float, default=600, show_default=True, help="Seconds from a request to the end "
              "of its answer (408).")
@click.option("--drain-timeout", type=float, default=30, show_default=True, help="Seconds that answers under way get "
              "when the server is asked to stop.")
@click.option("--api-key-env", metavar="NAME", help="Environment variable with the key that clients have to send "
              "(default: MLA_API_KEY, and no key where it is not set).")
@console.json_option
def serve(as_json: bool, **options: Any) -> None:
    """Serve the model exported in DIR by an OpenAI-compatible HTTP API; a status page is at /."""
    _stop_while_starting(as_json)
    try:
        from engines.serving.server import ServeOptions
        from engines.serving.server import serve as run
    except ModuleNotFoundError as missing:
        raise InputError(f"serve needs the package {missing.name}; install it with: pip install -e '.[serve]'"
                         ) from None

    def ready(running: Running) -> None:
        console.end_progress(as_json)
        if as_json:
            console.report(True, asdict(running), lambda out: None)
        else:
            click.echo("\n".join(said(running)), err=True)

    run(ServeOptions(load=taken(options), **options), ready, console.progress(as_json))
    for number in (signal.SIGTERM, signal.SIGINT):  # nothing is left to stop
        signal.signal(number, signal.SIG_IGN)
    if not as_json:
        click.echo("stopped", err=True)


def _stop_while_starting(as_json: bool) -> None:
    """Until it listens, SIGTERM ends the process at once and well: nothing is served, nothing is being written. Not by
    an exception, which could come up within an import or a destructor and be lost there."""
    def stop(number: int, frame: object) -> None:
        console.end_progress(as_json)
        # written as they are: the streams' buffers may be in use at this moment
        os.write(1 if as_json else 2, b'{"stopped": "before it listened"}\n' if as_json else
                 b"stopped before it listened\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, stop)


def said(running: Running) -> list[str]:
    """What a person is told when the server listens."""
    return [f"{running.model} at {running.url}/v1 ({'with a key' if running.key else 'no key asked for'}); status page "
            f"{running.url}/",
            f"up to {running.max_context} tokens; cache {console.size(running.bytes_per_token)} per token, "
            f"{console.size(running.cache_budget)} in all"]
