"""`python -m engines triton`: its options and table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", required=True, metavar="REPO", type=click.Path(path_type=Path), help="The model repository; the "
              "model becomes a folder in it.")
@click.option("--backend", default="ort", show_default=True, help="ort: the ONNX graph; trt: the plan that was built.")
@click.option("--name", help="The model's name (default: DIR's).")
@click.option("--kind", help="decode or prefill: which graph (default: decode, which takes any number of tokens; a "
              "plan of both kinds where there is one).")
@click.option("--formulation", help="Formulation of that graph (default: the export's).")
@click.option("--sequences", type=int, help="Sequences whose caches Triton keeps, or that a stateless request may hold "
              "(default: the export's --max-batch).")
@click.option("--idle-seconds", type=float, default=60, show_default=True, help="A silent sequence loses its caches.")
@click.option("--device", default="auto", show_default=True, help="auto (Triton's choice), cpu or gpu.")
@click.option("--overwrite", is_flag=True, help="Replace a model that this command made.")
@console.json_option
def triton(as_json: bool, **options: Any) -> None:
    """Write the export in DIR into a model repository for Triton Inference Server."""
    from engines.triton import TritonRequest, write_model

    facts = write_model(TritonRequest(**options))
    console.report(as_json, facts, lambda out: show(out, facts))


def show(out: Console, d: dict[str, Any]) -> None:
    """Tensors, files, what was checked and what was not."""
    what = (f"stateful, {console.size(d['state_bytes'])} of caches a sequence, {d['sequences']} sequences"
            if d["stateful"] else
            f"stateless, the client holds the past, up to {d['max_batch_size']} sequences a request")
    out.print(f"[bold]{d['name']}[/bold]  {d['graph']} for Triton's {d['backend']} backend: {what}\n")
    console.table(out, f"Tensors of {d['folder']}", ["tensor", "who has it", "dims", "type"], d["tensors"])
    console.table(out, "Files", ["file", "bytes", ""], [[n, f["bytes"], f["how"]] for n, f in d["files"].items()])
    console.note_list(out, [*(f"checked: {line}" for line in d["checked"]), d["not_run"], *d["notes"]])
