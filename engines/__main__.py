"""`python -m engines`: build engines from an export, inspect what was built, generate text with a model."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, fields
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engines.load_command import load_options, taken
from engines.parallel_command import parallel
from engines.serve_command import serve
from engines.triton_command import triton
from exporter import __version__, console

if TYPE_CHECKING:
    from rich.console import Console

    from engines.generate import Statistics, Step
    from engines.tokenizer import Tokenizer


@click.group(cls=console.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mla-export")
def cli() -> None:
    """Engines from exported graphs: ONNX Runtime, TensorRT, TensorRT-RTX."""


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--backend", default="trt-rtx", show_default=True, help="ort, trt or trt-rtx.")
@click.option("--max-batch", type=int, help="Sequences in a decode step at most (default: the export's).")
@click.option("--prefill-batch", type=int, default=1, show_default=True, help="Sequences in a prefill at most.")
@click.option("--max-context", type=int, help="Rows of past at most (default: the export's).")
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens in a prefill at most.")
@click.option("--decode-tokens", type=int, default=1, show_default=True, help="New tokens in a decode step at most.")
@click.option("--formulation", default="auto", show_default=True, help="auto (build all, keep the best) or a name.")
@click.option("--layout", default="auto", show_default=True, help="split: an engine per kind; unified: one for both, "
              "its weights once; both: the smaller; auto: both for a model, else split.")
@click.option("--opt-search/--no-opt-search", default=None, help="Try several opt points (default: where a build takes "
              "less than 3 s).")
@click.option("--activation-limit", type=float, metavar="MB", help="Keep engines of this much activation at most.")
@click.option("--sm", default="", help="TensorRT-RTX: compute capabilities to build for, such as 86,89,120.")
@click.option("--weight-streaming", is_flag=True, help="Weights may stay on the host; a budget at load says how many.")
@click.option("--strip", is_flag=True, help="A plan without weights, refitted when it is loaded.")
@click.option("--refit", is_flag=True, help="Weights may be replaced later.")
@click.option("--hardware-compatible", is_flag=True, help="TensorRT: the plan runs on Ampere and newer.")
@click.option("--version-compatible", is_flag=True, help="Other versions of the library may load the plan.")
@click.option("--timing-cache", type=click.Path(path_type=Path), help="TensorRT: file of measured kernels, read and "
              "written.")
@click.option("--timeout", type=float, metavar="SECONDS", help="Stop a build that takes longer (default: none).")
@click.option("--cache/--no-cache", default=True, help="Take and keep results of builds (default: yes), in "
              "MLA_EXPORT_CACHE or ~/.cache/mla-export/engines, 10 GB at most.")
@click.option("--overwrite", is_flag=True, help="Replace this backend's earlier engines.")
@console.json_option
def build(as_json: bool, sm: str, **options: Any) -> None:
    """Build engines in DIR/engines/BACKEND."""
    from engines.build import build as run
    from engines.build_options import BuildOptions
    from engines.build_request import BuildRequest
    from engines.build_tables import show, to_dict
    from exporter.errors import InputError
    from exporter.manifest import open_export

    own = {field.name: options.pop(field.name) for field in fields(BuildOptions) if field.name in options}
    targets = tuple(part.strip() for part in sm.split(",") if part.strip())
    if sm and not targets:
        raise InputError(f"--sm {sm!r}: names no compute capability; expected some such as 86,89,120")
    how = BuildOptions(sm=targets, **own)
    made = run(BuildRequest(options=how, **options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, to_dict(made), lambda out: show(out, made, open_export(options["folder"])))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@console.json_option
def inspect(folder: Path, as_json: bool) -> None:
    """Show the engines that were built in DIR, checked against their manifest; exit code 1 where some are damaged or
    will not load here."""
    from engines.build_tables import show, to_dict
    from engines.records import built_backends, inspected
    from exporter.errors import InputError
    from exporter.manifest import open_export

    export = open_export(folder)
    names = built_backends(export)
    if not names:
        raise InputError(
            f"{folder}: no engines yet; build some with: python -m engines build {folder} --backend trt-rtx"
        )
    found, problems = inspected(export, names)
    engines = [{"backend": made.data["backend"], **asdict(r)} for made in found for r in made.engines]

    def tables(out: Console) -> None:
        for made in found:
            show(out, made, export)

    console.report(as_json, {"folder": str(folder), "engines": engines, "builds": [to_dict(m) for m in found],
                             "problems": problems}, tables)
    if problems:
        console.stop_failed(as_json, "; ".join(problems.values()))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--weights-of", type=click.Path(path_type=Path), required=True, metavar="EXPORT", help="An export of the "
              "same configuration: a fine-tuned checkpoint's, or DIR itself where its plans were stripped.")
@click.option("--backend", default="trt-rtx", show_default=True, help="trt or trt-rtx.")
@click.option("--overwrite", is_flag=True, help="Replace the engines that EXPORT has.")
@console.json_option
def refit(as_json: bool, **options: Any) -> None:
    """Put the weights of EXPORT into the engines of DIR, built with --refit; the new ones lie in EXPORT."""
    from engines.refit import refit_engines

    made = refit_engines(**options, progress=console.progress(as_json))
    console.end_progress(as_json)
    files = sorted(path.name for path in made.glob("*.engine"))
    console.report(as_json, {"folder": str(made), "backend": options["backend"], "engines": files},
                   lambda out: console.note_list(out, [f"{made}: {', '.join(files)}"]))


@cli.command()
@click.argument("model")
@click.option("--gpu", help="The device, such as h200, l4 or rtx-4090; an unknown name lists them.")
@click.option("--memory", type=float, help="In place of --gpu: its memory in GB (10^9 bytes).")
@click.option("--max-batch", type=int, default=8, show_default=True, help="Sequences in a decode step.")
@click.option("--max-context", type=int, help="Rows of past (default: max_position_embeddings, at most 32768).")
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens in a prefill step.")
@click.option("--dtype", help="fp32, fp16 or bf16 (default: the export's, else fp16).")
@click.option("--cache", help="append, scatter or concat (default: the export's, else append).")
@click.option("--cache-dtype", help="fp8 or int8: a quantised cache (default: the export's, else as --dtype).")
@click.option("--quantise", help="fp8 or int4 (TensorRT's), int8 (ONNX Runtime's): projections and experts as codes "
              "(default: the export's, else wide).")
@click.option("--reserve", type=float, help="GB to leave free (default: 5 % of the memory, at least 1).")
@console.json_option
def plan(as_json: bool, **options: Any) -> None:
    """Say what MODEL (a preset, checkpoint, config.json or the DIR of an exported model) will need on a GPU, building
    nothing."""
    from engines.plan import PlanRequest
    from engines.plan import plan as run
    from engines.plan_tables import show

    data = run(PlanRequest(**options))
    console.report(as_json, data, lambda out: show(out, data))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.")
@click.option("--tokens", help="Token ids to continue, such as 1,2,3; needs no tokenizer.")
@click.option("--messages", type=click.Path(path_type=Path), help="JSON file: a conversation, for the chat template.")
@click.option("--system", help="A system message in front (with --messages, or --prompt --chat).")
@click.option("--chat/--no-chat", default=None, help="--prompt as a message in the chat template, or as it is "
              "(default).")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="New tokens at most.")
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token each time.")
@click.option("--top-k", type=int, default=0, show_default=True, help="Draw from the k likeliest tokens; 0: from all.")
@click.option("--top-p", type=float, default=1.0, show_default=True, help="Draw from the likeliest that make up p.")
@click.option("--min-p", type=float, default=0.0, show_default=True, help="Leave out what is p times less likely than "
              "the likeliest.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed draws the same tokens.")
@click.option("--stop", type=click.IntRange(min=0), multiple=True, metavar="TOKEN_ID", help="Stop at this token too; "
              "repeatable.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the checkpoint's own stop tokens.")
@click.option("--backend", default="ort", show_default=True, help="ort, ort-cuda, trt, trt-rtx or interpreter.")
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of ONNX Runtime; 0: its own choice.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Tokens of a prefill step at most.")
@click.option("--formulation", help="Formulation of the graphs (default: the export's).")
@load_options
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Folder with tokenizer.json, in place of the "
              "checkpoint's.")
@console.json_option
def generate(folder: Path, as_json: bool, **options: Any) -> None:
    """Generate text with the model exported in DIR; the text goes to stdout as it comes, figures to stderr."""
    from engines.generate import Generator, TextRequest, prepare
    from engines.sampling import Sampling
    from exporter.manifest import open_export

    load = taken(options)
    sampling = Sampling(**{field.name: options.pop(field.name) for field in fields(Sampling)})
    request = TextRequest(**{field.name: options.pop(field.name) for field in fields(TextRequest)})
    export = open_export(folder)
    ids, tokenizer, stops = prepare(export, request)
    console.progress(as_json)(f"opening {folder}")
    with Generator(export, options["backend"], options["threads"], formulation=options["formulation"],
                   load=load) as generator:
        steps = generator.generate([ids], options["max_new_tokens"], sampling, stops, options["chunk"])
        console.end_progress(as_json)
        tokens, reason = _stream(steps, tokenizer, silent=as_json)
        figures = generator.statistics
    assert figures is not None
    if as_json:
        text = None if tokenizer is None else tokenizer.decode(tokens[:-1] if reason == "stop" else tokens)
        console.report(True, {
            "tokens": tokens, "text": text, "finish_reason": reason, "prompt_tokens": figures.prompt_tokens,
            "seconds_to_first_token": figures.seconds_to_first_token, "tokens_per_second": figures.tokens_per_second,
            "cache_bytes": figures.cache_bytes, "cache_bytes_per_token": figures.cache_bytes_per_token},
            lambda out: None)
    else:
        click.echo(_figures(figures, reason), err=True)


def _stream(steps: Iterator[Step], tokenizer: Tokenizer | None, silent: bool) -> tuple[list[int], str | None]:
    """Print one sequence as it comes, ids where there is no tokenizer; its tokens, and why it ended."""
    from engines.tokenizer import TextStream

    stream = None if tokenizer is None else TextStream(tokenizer)
    tokens, reason = list[int](), None
    if not silent and isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop

    begun = False

    def put(text: str) -> None:
        nonlocal begun
        begun = begun or bool(text)
        if text and not silent:
            click.echo(text, nl=False)

    try:
        for step in steps:
            token, reason = step.tokens[0], step.finished[0]
            assert token is not None
            if stream is None:
                put(f"{',' if tokens else ''}{token}")
            elif reason != "stop":  # the stop token is not part of the text
                put(stream.push(token))
            tokens.append(token)
        put(stream.flush() if stream else "")
        begun = True
    finally:
        put("\n" if begun else "")  # the line of an error or an interrupt begins on its own
    return tokens, reason


def _figures(figures: Statistics, reason: str | None) -> str:
    rate, first = figures.tokens_per_second, figures.seconds_to_first_token
    speed = "" if rate is None else f", then {rate:.1f} tokens/s (median)"
    ended = "a stop token" if reason == "stop" else "--max-new-tokens"
    return (f"prompt {figures.prompt_tokens} tokens; {figures.new_tokens} new, ended by {ended} ({reason})\n"
            f"first token after {first:.3f} s{speed}\n"
            f"cache {console.size(figures.cache_bytes_per_token)} per token, {console.size(figures.cache_bytes)} in all"
            )


@cli.command()
@click.argument("folder", metavar="CHECKPOINT", type=click.Path(path_type=Path))
@click.argument("text", metavar="FILE", type=click.Path(path_type=Path))
@console.json_option
def tokenise(as_json: bool, folder: Path, text: Path) -> None:
    """Token ids of a text FILE by CHECKPOINT's tokenizer, one sequence: what `exporter convert --tokens` takes."""
    from engines.tokenizer import Tokenizer, read_text

    ids = Tokenizer(folder).encode(read_text(text))
    console.report(as_json, {"tokens": ids}, lambda out: click.echo(" ".join(map(str, ids))))


@cli.command("operator")
@click.option("--build", "compile_it", is_flag=True, help="Compile it for this processor first.")
@console.json_option
def latent_attention(as_json: bool, compile_it: bool) -> None:
    """The operator mla::LatentAttention, for exports with --fused-decode: whether ONNX Runtime takes its library here;
    exit code 2 where it does not."""
    import onnxruntime as ort

    from engines import operator_library

    line = operator_library.build_line()
    if compile_it:
        operator_library.build(line)
        operator_library.load(ort.SessionOptions(), operator_library.built())
    path = operator_library.library()
    operator_library.load(ort.SessionOptions(), path)
    console.report(as_json, {"library": str(path), "build": line}, lambda out: click.echo(f"{path}: loads"))


cli.add_command(parallel)
cli.add_command(serve)
cli.add_command(triton)

if __name__ == "__main__":
    console.main(cli, "python -m engines")
