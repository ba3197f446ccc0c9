"""`python -m exporter`: export a model or an attention, inspect a source or an export, list the presets."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import __version__, console

if TYPE_CHECKING:
    from rich.console import Console


@click.group(cls=console.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mla-export")
def cli() -> None:
    """Absorbed-weight MLA models to ONNX with latent caches."""


@cli.command()
@click.argument("model")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Folder to make; it appears whole or not at all."
)
@click.option("--scope", help="model (a checkpoint's default), or layer: one attention (a preset's default).")
@click.option("--layer", type=int, help="Scope layer: which attention of a checkpoint (default 0).")
@click.option("--layers", help="Scope model: A:B, the decoder layers A to B - 1 alone.")
@click.option("--weights", default="copy", show_default=True, help="copy: a self-contained folder; link: leave "
              "tensors in the checkpoint's files where the graph can read them there; none: the graphs alone.")
@click.option("--dtype", default="fp32", show_default=True, help="fp32, fp16 or bf16.")
@click.option("--cache", default="append", show_default=True, help="append, scatter or concat.")
@click.option("--target", default="ort", show_default=True, help="ort, trt or trt-rtx: whose formulations to write.")
@click.option("--cache-dtype", help="fp8 or int8: latents in 8 bits with a scale per row (append). Default: --dtype.")
@click.option("--prefill", default="absorbed", show_default=True, help="absorbed, or expanded (for long prompts).")
@click.option("--absorb", default="factored", show_default=True, help="factored (W_UK, W_UV as products) or folded.")
@click.option(
    "--causal", default="on", show_default=True, help="on, or off: one bidirectional prefill graph, no cache."
)
@click.option("--merge-q", is_flag=True, help="Merge a query low rank without a norm into one W_Q.")
@click.option("--logits", default="last", show_default=True, help="Scope model: last token's, or all.")
@click.option("--experts", default="auto", show_default=True, help="Scope model: fused (ort), gather or dense (trt).")
@click.option("--quantise", help="The projections' weights as codes. TensorRT: fp8 (a scale per output channel) or "
              "int4 (blocks of 128, 64 or 32), dequantised in the graph; ort: int8 or int4, by MatMulNBits (default: "
              "none).")
@click.option("--block-size", type=int, help="Target ort, quantised: values of a row that share a scale: 16, 32, 64 "
              "or 128 (default 32).")
@click.option("--accuracy-level", type=int, help="Target ort, quantised: 1 computes in float32, 4 rounds activations "
              "to int8 inside the products (default 4).")
@click.option("--fused-decode", is_flag=True, help="Target ort, fp32, append: decode through the operator "
              "mla::LatentAttention, which reads the cache once; a library, see `engines operator`.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, metavar="N", help="Scope model: N ranks "
              "that split heads, FFNs and experts, each in graphs between all-reduces; see `engines parallel`.")
@click.option("--max-context", type=int, help="Rows of past at most (default: max_position_embeddings).")
@click.option("--max-batch", type=int, default=8, show_default=True, help="Sequences at most, the engines' default.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of a preset's hot weights.")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict (torch.load with weights_only).")
@click.option("--overwrite", is_flag=True, help="Replace an earlier export in --out.")
@click.option("--relink", is_flag=True, help="MODEL is where the checkpoint of the linked export in --out now lies.")
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
    request = ExportRequest(causal=causal == "on", **options)
    if request.tensor_parallel != 1:
        from exporter import inspection
        from exporter.tensor_parallel import export_ranks

        ranks = export_ranks(request, console.progress(as_json))
        console.end_progress(as_json)
        console.report(as_json, inspection.ranks(ranks), lambda out: inspection.show_ranks(out, ranks))
        return
    engines = list[str]()
    with suppress(OSError):  # a place that cannot be read is refused by the export, in words
        engines = sorted(path.parent.name for path in options["out"].glob("engines/*/manifest.json"))
    made = run(request, console.progress(as_json))
    console.end_progress(as_json)

    def show(out: Console) -> None:
        _show_export(out, made)
        if engines:
            console.note_list(out, [f"the earlier export's engines are gone with it ({', '.join(engines)}): build them "
                                    "anew"])

    console.report(as_json, _export_json(made) | {"engines_removed": engines}, show)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--rank", type=int, required=True, help="Columns of the latent, d_c.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Checkpoint folder to make; it appears "
              "whole or not at all.")
@click.option("--rope-columns", type=int, help="Rotary columns to keep, d_r (default: those of every key head, "
              "exact in position; what is not kept loses its position).")
@click.option("--tokens", type=click.Path(path_type=Path), help="File of token ids (JSON, or between blanks) that "
              "calibrate; the last quarter is held out and gives perplexity before and after.")
@click.option("--overwrite", is_flag=True, help="Replace an earlier conversion in --out.")
@console.json_option
def convert(as_json: bool, **options: Any) -> None:
    """Turn CHECKPOINT, a trained MHA or GQA model (Llama, Qwen2, Mistral), into MLA: a checkpoint for `export`."""
    from dataclasses import asdict

    from exporter.convert import ConvertRequest, convert_checkpoint

    made = convert_checkpoint(ConvertRequest(**options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, asdict(made), lambda out: _show_conversion(out, made))


@cli.command()
@click.argument("what")
@click.option("--scope", help="model, or layer: one attention. Default: as `export` takes it.")
@click.option("--layer", type=int, help="Scope layer: which attention of a checkpoint (default 0).")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict (torch.load with weights_only).")
@click.option("--verify", is_flag=True, help="DIR: hash the weights as well, not only their size and time.")
@console.json_option
def inspect(what: str, scope: str | None, layer: int | None, allow_pickle: bool, verify: bool, as_json: bool) -> None:
    """Show an export (DIR with a manifest) or a source (MODEL: a checkpoint, its config.json alone, or a preset)."""
    from exporter import inspection, manifest
    from exporter.errors import InputError

    if scope not in (None, "model", "layer"):
        raise InputError(f"--scope {scope!r}: expected model or layer")
    if Path(what).name == manifest.NAME:
        what = str(Path(what).parent)
    if (Path(what) / "rank0" / manifest.NAME).is_file():
        from exporter.tensor_parallel import open_ranks

        ranks = open_ranks(Path(what), verify)
        console.report(as_json, inspection.ranks(ranks), lambda out: inspection.show_ranks(out, ranks))
        return
    if (Path(what) / manifest.NAME).is_file():
        made = manifest.open_export(Path(what), verify)
        console.report(as_json, _export_json(made), lambda out: _show_export(out, made))
        return
    data = inspection.inspect(what, scope=scope, layer=layer, allow_pickle=allow_pickle)
    console.report(as_json, data, lambda out: inspection.show(out, data))


@cli.command()
@console.json_option
def presets(as_json: bool) -> None:
    """List the presets."""
    from exporter.presets import PRESETS

    def show(out: Console) -> None:
        console.table(out, "Presets: published shapes with seeded hot weights",
                      ["preset", "D", "H", "q rank", "d_c", "nope/rope/v", "R", "context", "rope"],
                      [[n, c.hidden_size, c.num_attention_heads, c.q_lora_rank or "–", c.kv_lora_rank,
                        f"{c.qk_nope_head_dim}/{c.qk_rope_head_dim}/{c.v_head_dim}", c.row_dim,
                        c.max_position_embeddings, f"{c.rope.rope_type}, {c.rope_layout}"] for n, c in PRESETS.items()])

    console.report(as_json, {"presets": {name: c.to_dict() for name, c in PRESETS.items()}}, show)


def _export_json(made: Any) -> dict[str, Any]:
    keys = ("model", "contract", "source", "target", "dtype", "prefill", "absorb", "causal", "merge_q", "max_context",
            "max_batch", "opset", "softmax_scale", "longrope", "weights", "folding_price", "decoder", "layers",
            "logits", "experts", "source_parameters")
    return {"folder": str(made.folder), "config": made.config.to_dict(), "cache": made.cache,
            "cache_dtype": made.cache_dtype,
            "attentions": made.attentions, "cache_bytes_per_token": made.cache_bytes_per_token,
            "graphs": [g.to_dict() for g in made.graphs], **{k: made.data[k] for k in keys if k in made.data}}


def _show_export(out: Console, made: Any) -> None:
    from exporter.inspection import head_notes, price_notes, weight_notes

    d, g = made.data, made.graph(made.graphs[0].kind)  # a prefill takes what a decode step takes, and more
    what = f"layers {d['layers'][0]} to {d['layers'][1] - 1}, " if made.contract == "model" else ""
    out.print(f"[bold]{d['model']}[/bold]  {what}{d['dtype']}, {made.cache} cache, target {d['target']}, opset "
              f"{d['opset']}, past up to {made.max_context} rows")
    out.print(f"softmax scale {d['softmax_scale']:.6f}; a cache row is {made.config.row_dim} numbers{_narrow(made)}; "
              f"{made.cache_bytes_per_token} bytes per token in {made.attentions} cache"
              f"{'s' if made.attentions > 1 else ''}\n")
    console.table(out, f"Graphs in {made.folder}", ["graph", "formulation", "prefill form", "default", "file"],
                  [[g.name, g.formulation, g.prefill_form, "yes" if g.default else "", g.file] for g in made.graphs])
    rows = [[t.name, side, str(list(t.shape)).replace("'", ""), t.dtype]
            for side, group in (("in", g.inputs), ("out", g.outputs)) for t in group]
    console.table(out, f"Inputs and outputs of {g.name}", ["tensor", "", "shape", "dtype"],
                  _folded(rows, made.attentions))
    console.note_list(out, [*head_notes(made.config), *weight_notes(d),
                            *price_notes(d["folding_price"], d["absorb"], made.attentions)])


def _show_conversion(out: Console, made: Any) -> None:
    before, after = made.cache_numbers_before, made.cache_numbers_after
    out.print(f"[bold]{made.folder}[/bold]  rank {made.rank} of {made.full_rank}, {made.rope_columns} rotary columns: "
              f"{'exact, but for float32 rounding' if made.exact else 'lossy'}")
    out.print(f"cache per token and layer: {after} numbers, {before} before ({before / after:.2f}x less); parameters "
              f"of the attentions: {made.parameters_after:,}, {made.parameters_before:,} before\n")
    console.table(out, "Energy kept", ["layer", "keys, in rotary columns", "k_nope and v, in the latent"],
                  [[r["layer"], f"{r['rotary']:.6f}", f"{r['latent']:.6f}"] for r in made.layers])
    if made.perplexity_after is not None:
        out.print(f"perplexity on {made.held_out_tokens} tokens held out: {made.perplexity_before:.4f} before, "
                  f"{made.perplexity_after:.4f} after ({made.calibration_tokens} tokens calibrated)")
    else:
        console.note_list(out, ["perplexity: not measured without --tokens; all directions of the input counted alike"])


def _narrow(made: Any) -> str:
    """What is kept in 8 bits of a cache row."""
    return f" ({made.config.kv_lora_rank} of them in {made.cache_dtype}) and a scale" if made.quantised_cache else ""


def _folded(rows: list[list[str]], attentions: int) -> list[list[str]]:
    """One line for the caches of all attentions, which differ in their number only."""
    shown = []
    for name, *rest in rows:
        stem, _, number = name.partition(".")
        if number in ("", "0"):
            shown.append([f"{stem}.0 … {attentions - 1}" if number and attentions > 1 else name, *rest])
    return shown


if __name__ == "__main__":
    console.main(cli, "python -m exporter")
