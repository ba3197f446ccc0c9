"""`python -m engines parallel`: its options, and what it prints; also what a rank started by torchrun runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--tokens", required=True, help="Token ids to continue, such as 1,2,3.")
@click.option("--max-new-tokens", type=int, default=64, show_default=True, help="New tokens at most.")
@click.option("--stop", type=click.IntRange(min=0), multiple=True, metavar="TOKEN_ID", help="Stop at this token; "
              "repeatable.")
@click.option("--backend", default="ort", show_default=True, help="ort, ort-cuda (a GPU a rank) or interpreter.")
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of ONNX Runtime in each rank; 0: its "
              "own choice.")
@click.option("--chunk", type=int, default=512, show_default=True, help="Tokens of a prefill step at most.")
@click.option("--timeout", type=float, default=120, show_default=True, metavar="SECONDS", help="A rank waits so long "
              "for the others.")
@console.json_option
def parallel(as_json: bool, tokens: str, **options: Any) -> None:
    """Generate with the ranks exported in DIR (--tensor-parallel), a process each; greedy, token ids in and out.

    Starts the ranks itself, or is one of them under `torchrun --nproc-per-node N -m engines parallel DIR ...`.
    """
    from engines import parallel_run
    from engines.generate import parse_tokens

    request = parallel_run.ParallelRequest(tokens=tuple(parse_tokens(tokens)), **options)
    if parallel_run.under_torchrun():
        rank, found = parallel_run.run_from_environment(request)
        if rank == 0:
            console.report(as_json, found, lambda out: show(out, found))
        return
    found = parallel_run.run(request, console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, found, lambda out: show(out, found))


def show(out: Console, d: dict[str, Any]) -> None:
    """Tokens first, then figures."""
    out.print(",".join(map(str, d["tokens"])), soft_wrap=True)
    rate = "" if d["tokens_per_second"] is None else f", then {d['tokens_per_second']:.1f} tokens/s (median)"
    notes = [f"{d['steps']} steps, {d['all_reduces']} all-reduces of {console.size(d['all_reduce_bytes'])} together "
             f"over {d['collective']}; first token after {d['seconds_to_first_token']:.3f} s{rate}"]
    if "bytes" in d:
        notes.insert(0, f"{d['ranks']} ranks of {console.size(d['bytes'][0])} of weights each "
                        f"({d['bytes'][0] / d['whole_bytes']:.4f} of the whole model's)")
    console.note_list(out, notes)
