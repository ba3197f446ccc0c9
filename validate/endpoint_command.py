"""`python -m validate endpoint`: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from exporter import console


@click.command()
@click.option("--base-url", required=True, metavar="URL", help="Of the API, such as http://localhost:8000/v1.")
@click.option("--model", required=True, metavar="NAME", help="As the server calls it.")
@click.option("--prompts", type=click.Path(path_type=Path), metavar="FILE", help="JSONL, each line with prompt or "
              "messages (id, max_tokens), or plain text, one prompt a line.")
@click.option("--completions", is_flag=True, help="Ask /completions, not /chat/completions.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="Where a prompt has no max_tokens.")
@click.option("--key-env", metavar="VARIABLE", help="Environment variable with the key, such as OPENAI_API_KEY "
              "(default: no key is sent).")
@click.option("--needle", is_flag=True, help="Also ask for a number hidden in generated text.")
@click.option("--needle-context", default="1000,4000,16000", show_default=True, help="Words of that text.")
@click.option("--needle-depths", default="0,25,50,75,100", show_default=True, help="Percent of the text before it.")
@click.option("--against", type=click.Path(path_type=Path), metavar="DIR", help="Our engine on the same prompts: a "
              "model's export.")
@click.option("--backend", default="ort", show_default=True, help="Our engine's: ort, ort-cuda, trt, trt-rtx.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Our engine's: folder with tokenizer.json.")
@click.option("--repeat", type=int, default=1, show_default=True, help="Ask so often; medians are reported.")
@click.option("--concurrency", type=int, default=1, show_default=True, help="Requests under way at a time.")
@click.option("--connect-timeout", "connect", type=float, default=10, show_default=True, help="Seconds.")
@click.option("--first-token-timeout", "first_token", type=float, default=120, show_default=True, help="Seconds.")
@click.option("--token-timeout", "token", type=float, default=30, show_default=True, help="Seconds between tokens.")
@click.option("--retries", type=int, default=4, show_default=True, help="On 429, 5xx and lost connections.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Also write the results to this new file.")
@console.json_option
def endpoint(as_json: bool, connect: float, first_token: float, token: float, retries: int, **options: Any) -> None:
    """Ask a served model (any OpenAI-compatible URL): answers, times, needles, our engine beside it."""
    from validate import tables
    from validate.endpoint import EndpointRequest, compare_endpoint
    from validate.endpoint_http import Limits

    data = compare_endpoint(EndpointRequest(limits=Limits(connect, first_token, token, retries), **options),
                            console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, data, lambda out: tables.endpoint(out, data))
    if not data["pass"]:
        console.stop_failed(as_json, f"{data['failed']} of {len(data['prompts'])} prompts failed")
