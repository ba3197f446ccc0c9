"""`python -m exporter`: export an attention, inspect a source or an export, list the presets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import __version__, console

if TYPE_CHECKING:
    from rich.console import Console


@click.group(cls=console.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mla-export")
def cli() -> None:
    """Absorbed-weight MLA attention to ONNX with a latent cache."""


@cli.command()
@click.argument("model")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder to make; it appears whole or not at all."
)
@click.option("--scope", help="model (a checkpoint's default), or layer: one attention (a preset's default).")
@click.option("--layer", type=int, help="Scope layer: which attention of a checkpoint (default 0).")
@click.option("--layers", help="Scope model: A:B, the decoder layers A to B - 1 alone.")
@click.option("--weights", default="copy", show_default=True, help="copy: a self-contained folder; link: leave tensors in "
              "the checkpoint's files where the graph can read them there; none: the graphs alone.")
@click.option("--dtype", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@click.option("--cache", default="append", show_default=True, help="append, scatter or concat.")
@click.option("--target", default="ort", show_default=True, help="ort, trt or trt-rtx: whose formulations to write.")
@click.option("--prefill", default="absorbed", show_default=True, help="absorbed, or expanded (for long prompts).")
@click.option("--absorb", default="factored", show_default=True, help="factored (W_UK, W_UV as products) or folded.")
@click.option(
    "--causal", default="on", show_default=True, help="on, or off: one bidirectional prefill graph, no cache."
)
@click.option("--merge-q", is_flag=True, help="Merge a query low rank without a norm into one W_Q.")
@click.option("--logits", default="last", show_default=True, help="Scope model: last token's, or all.")
@click.option("--experts", default="auto", show_default=True, help="Scope model: fused (ort), gather or dense (trt).")
@click.option("--max-context", type=int, help="Rows of past at most (default: max_position_embeddings).")
@click.option("--max-batch", type=int, default=8, show_default=True, help="Sequences at most, the engines' default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a preset's hot weights.")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict (torch.load with weights_only).")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in --out.")
@click.option("--relink", is_flag=True, help="MODEL is where the checkpoint of the linked export in --out has moved to.")
@console.json_option
def export(as_json: bool, causal: str, relink: bool, **options: Any) -> None:
    """Export MODEL: a preset, a Hugging Face checkpoint folder, or the article's state_dict."""
    from exporter.errors import InputError
    from exporter.export import ExportRequest
    from exporter.export import export as run
    from exporter.export import relink as point_anew

    if relink:
        made = point_anew(options["out"], Path(options["model"]))
        console.report(as_json, _export_json(made), lambda out: _show_export(out, made))
        return
    if causal not in ("on", "off"):
        raise InputError(f"--causal {causal!r}: expected on or off")
    made = run(ExportRequest(causal=causal == "on", **options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, _export_json(made), lambda out: _show_export(out, made))


@cli.command()
@click.argument("what")
@click.option("--layer", type=int, help="Layer of a checkpoint (default 0).")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict (torch.load with weights_only).")
@click.option("--verify", is_flag=True, help="DIR: hash the weights as well, not only their size and time.")
@console.json_option
def inspect(what: str, layer: int | None, allow_pickle: bool, verify: bool, as_json: bool) -> None:
    """Show an export (DIR with a manifest) or a source (MODEL)."""
    from exporter import manifest
    from exporter.source import open_source

    if (Path(what) / manifest.NAME).is_file():
        made = manifest.open_export(Path(what), verify)
        console.report(as_json, _export_json(made), lambda out: _show_export(out, made))
        return
    source = open_source(what, layer=layer, allow_pickle=allow_pickle)
    facts = _facts(source.config)
    data = {"model": source.name, "config": source.config.to_dict(), **facts,
            "tensors": {name: list(t.shape) for name, t in source.tensors.items()}}
    console.report(as_json, data, lambda out: _show_source(out, source.name, facts, data["tensors"]))


@cli.command()
@console.json_option
def presets(as_json: bool) -> None:
    """List the presets."""
    from exporter.presets import PRESETS

    def show(out: Console) -> None:
        console.table(out, "Presets (seeded hot weights; one attention each)",
                      ["preset", "model_type", "D", "H", "q rank", "d_c", "nope/rope/v", "R", "context", "rope"],
                      [[n, c.model_type, c.hidden_size, c.num_attention_heads, c.q_lora_rank or "–", c.kv_lora_rank,
                        f"{c.qk_nope_head_dim}/{c.qk_rope_head_dim}/{c.v_head_dim}", c.row_dim,
                        c.max_position_embeddings, f"{c.rope.rope_type}, {c.rope_layout}"] for n, c in PRESETS.items()])

    console.report(as_json, {"presets": {name: c.to_dict() for name, c in PRESETS.items()}}, show)


def _facts(config: Any) -> dict[str, Any]:
    from exporter.rope import softmax_scale
    from exporter.weights import folding_price

    return {"softmax_scale": softmax_scale(config), "row_dim": config.row_dim,
            "latent_bytes_per_token": 2 * config.row_dim, "expanded_bytes_per_token": 2 * config.expanded_dim,
            "folding_price": folding_price(config)}


def _export_json(made: Any) -> dict[str, Any]:
    keys = ("model", "source", "target", "dtype", "prefill", "absorb", "causal", "merge_q", "max_context", "max_batch",
            "opset", "softmax_scale", "weights", "folding_price")
    return {"folder": str(made.folder), "config": made.config.to_dict(), "cache": made.cache,
            "graphs": [g.to_dict() for g in made.graphs], **{k: made.data[k] for k in keys}}


def _price_notes(price: dict[str, int], absorb: str | None) -> list[str]:
    def side(name: str) -> str:
        factored, folded = price[f"{name}_factored"], price[f"{name}_folded"]
        return f"{name} {folded / 1e6:.1f} M against {factored / 1e6:.1f} M parameters ({folded / factored:.1f}x)"

    chosen = f" (this export: {absorb})" if absorb else ""
    return [f"folded against factored absorption{chosen}: {side('query')}; {side('output')}"]


def _show_export(out: Console, made: Any) -> None:
    d = made.data
    out.print(f"[bold]{d['model']}[/bold]  {d['dtype']}, {made.cache} cache, target {d['target']}, opset {d['opset']}, "
              f"past up to {made.max_context} rows, weights {console.size(d['weights']['bytes'])}")
    out.print(f"softmax scale {d['softmax_scale']:.6f}; a cache row is {made.config.row_dim} numbers per token\n")
    console.table(out, f"Graphs in {made.folder}", ["graph", "kind", "formulation", "prefill form", "default", "file"],
                  [[g.name, g.kind, g.formulation, g.prefill_form, "yes" if g.default else "", g.file]
                   for g in made.graphs])
    g = made.graphs[-1]
    console.table(out, f"Inputs and outputs of {g.name}", ["tensor", "", "shape", "dtype"],
                  [[t.name, side, str(list(t.shape)).replace("'", ""), t.dtype]
                   for side, group in (("in", g.inputs), ("out", g.outputs)) for t in group])
    console.note_list(out, _price_notes(d["folding_price"], d["absorb"]))


def _show_source(out: Console, name: str, facts: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    out.print(f"[bold]{name}[/bold]  softmax scale {facts['softmax_scale']:.6f}; per token and attention at 16 bit: "
              f"latent {facts['latent_bytes_per_token']} B, expanded {facts['expanded_bytes_per_token']} B\n")
    console.table(out, "Attention tensors", ["tensor", "shape"], [[n, str(s)] for n, s in tensors.items()])
    console.note_list(out, _price_notes(facts["folding_price"], None))


if __name__ == "__main__":
    console.main(cli, "python -m exporter")
