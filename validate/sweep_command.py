"""`python -m validate sweep`: its options, its table and its chart."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console
from exporter.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("model", metavar="MODEL|CHECKPOINT")
@click.option("--ranks", help="Latent widths by commas (default: 128,192,256,384,512 up to full rank, or quarters "
              "of it).")
@click.option("--layer", type=int, help="Attention of a checkpoint (default 0).")
@click.option("--rope-columns", type=int, help="Llama-style: rotary columns to keep (default: every key head's).")
@click.option("--tokens", type=click.Path(path_type=Path), help="Llama-style: file of token ids that calibrate; the "
              "last quarter is held out, and measured.")
@click.option("--text", type=click.Path(path_type=Path), help="Llama-style: the same of a text, by the checkpoint's "
              "tokenizer.")
@click.option("--context", type=int, help="Rows of past of the timed step (default: 1024, or what the model has).")
@click.option("--threads", type=int, default=2, show_default=True, help="Threads of ONNX Runtime.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Rounds of timed steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of inputs and of a preset's weights.")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Also draw the figures into this new "
              "file.")
@console.json_option
def sweep(as_json: bool, plot: Path | None, **options: Any) -> None:
    """Sweep d_c: similarity with the original's outputs, cache and decode time; an MLA's latent cut, a Llama's made."""
    from validate.plot import check_file
    from validate.sweep import SweepRequest, run

    check_file(plot)
    if options["threads"] < 1 or options["rounds"] < 1:
        raise InputError(f"--threads {options['threads']}, --rounds {options['rounds']}: expected at least 1")
    data = run(SweepRequest(**options), console.progress(as_json))
    console.end_progress(as_json)
    if plot is not None:
        from exporter.output import write_file

        write_file(plot, chart(data).encode())
    console.report(as_json, data, lambda out: show(out, data))


def show(out: Console, d: dict[str, Any]) -> None:
    """One row a rank."""
    tested = any(p["perplexity"] is not None for p in d["points"])
    rows = [[p["rank"], f"{p['cosine']:.6f}", f"{p['rel']:.1e}", f"{p['share']:.4f}", f"{p['cache_bytes_per_token']} B",
             f"{p['cache_bytes_per_token'] / d['original_cache_bytes_per_token']:.2f}x", f"{p['ms']:.2f}",
             f"{100 * p['spread']:.0f} %", *([f"{p['perplexity']:.4f}"] if tested else []), p["verdict"]]
            for p in d["points"]]
    console.table(out, f"{d['attention']}: outputs against the original's, float64; decode step at {d['context']} "
                  "rows, fp32, ONNX Runtime",
                  ["d_c", "cosine", "rel", "energy kept", "cache per token", "of the original", "ms", "± spread",
                   *(["perplexity"] if tested else []), "article's verdict"], rows)
    notes = [f"full rank is {d['full_rank']}; the original caches {d['original_cache_bytes_per_token']} B per token in "
             "this attention (16 bits a number)", *d["notes"]]
    if tested:
        notes.insert(1, f"perplexity of the original: {d['original_perplexity']:.4f}")
    console.note_list(out, notes)


def chart(d: dict[str, Any]) -> str:
    """The figures over bytes per token, as SVG."""
    from validate.plot import Line, Panel, svg

    points = d["points"]

    def panel(title: str, key: str, **options: Any) -> Panel:
        along = [(float(p["cache_bytes_per_token"]), float(p[key])) for p in points]
        labels = [f"d_c {p['rank']}" if i == 0 else str(p["rank"]) for i, p in enumerate(points)]
        return Panel(title, [Line(title, along, labels)], "cache bytes per token", **options)

    panels = [panel("cosine to the original", "cosine", mark=0.95), panel("rel error", "rel", log=True),
              panel("decode step", "ms", y_title="ms", zero=True)]
    if d["original_perplexity"] is not None:
        panels.append(panel("perplexity", "perplexity", mark=d["original_perplexity"]))
    return svg(f"{d['attention']}: d_c over its cache", panels)
