"""`python -m validate serving`: its options and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--sequences", type=int, default=8, show_default=True, help="Sequences at a time.")
@click.option("--prompt", type=int, default=64, show_default=True, help="Tokens of a prompt; they are half to one and "
              "a half times as long.")
@click.option("--new", type=int, default=64, show_default=True, help="New tokens of each.")
@click.option("--long", type=int, default=2048, show_default=True, help="Tokens of the prompt that a short one comes "
              "beside.")
@click.option("--chunk", type=int, default=256, show_default=True, help="Tokens of a prefill step.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds of each kind; medians are reported.")
@click.option("--backend", default="ort", show_default=True, help="ort, ort-cuda, trt or trt-rtx.")
@click.option("--threads", type=int, default=0, show_default=True, help="Threads of ONNX Runtime; 0: its own choice.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts.")
@console.json_option
def serving(as_json: bool, **options: Any) -> None:
    """Continuous batching of the model in DIR: throughput against one at a time, first tokens, bytes copied."""
    from validate.serving import ServingRequest, run

    data = run(ServingRequest(**options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, data, lambda out: show(out, data))
    if not data["pass"]:
        what = f"{len(data['differ'])} answers differ" if data["differ"] else "more was copied than the new rows"
        console.stop_failed(as_json, f"{what}: {(data['differ'] or [str(data['copies'])])[0]}")


def show(out: Console, d: dict[str, Any]) -> None:
    """Two tables."""
    lengths = f"{min(d['prompt_tokens'])} to {max(d['prompt_tokens'])}"
    console.table(out, f"{d['sequences']} prompts of {lengths} tokens, {d['new_tokens']} new tokens each, greedy "
                  f"({d['backend']}, medians of {d['rounds']} rounds)",
                  ["", "tokens/s", "ratio", "per CPU second", "ratio", "decode step"],
                  [[name, f"{d[key]['tokens_per_second']:.1f}", f"{wall:.2f}x",
                    f"{d[key]['tokens_per_cpu_second']:.1f}", f"{cpu:.2f}x", f"{d[key]['step_ms']:.1f} ms"]
                   for name, key, wall, cpu in (
                       ("one at a time", "one_at_a_time", 1.0, 1.0),
                       (f"{d['sequences']} together", "together", d["ratio"], d["cpu_ratio"]))])
    first = d["first_token"]
    console.table(out, f"First token of 16 tokens, chunks of {d['chunk']}", ["", "median", "worst"], [
        ["alone", f"{1000 * first['alone_s']:.0f} ms", ""],
        [f"beside a prompt of {d['long']}", f"{1000 * first['beside_s']:.0f} ms",
         f"{1000 * first['worst_beside_s']:.0f} ms"],
        ["that prompt's whole prefill", f"{1000 * first['long_prefill_s']:.0f} ms", ""]])
    copies = d["copies"]
    others = ", ".join(f"{name} {console.size(copies[name])}" for name in copies
                       if name not in ("steps", "new_rows_expected", "new"))
    console.note_list(out, [
        f"rows written in {copies['steps']} decode steps: {console.size(copies['new'])}, the new ones "
        f"({console.size(copies['new_rows_expected'])}); besides: {others or 'nothing'}",
        f"cache at most {console.size(d['cache_peak_bytes'])}; answers that part at a near tie: {d['flips']}"])
    for line in d["warnings"]:
        out.print(f"[yellow]warning:[/yellow] {line}", soft_wrap=True)
