"""`python -m engines`: build engines from an export, inspect what was built."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import __version__, console

if TYPE_CHECKING:
    from rich.console import Console

    from engines.build import Engines


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
@click.option("--sm", default="", help="TensorRT-RTX: compute capabilities to build for, such as 86,89,120.")
@click.option("--formulation", default="auto", show_default=True, help="auto (build all, keep the leanest) or a name.")
@click.option("--overwrite", is_flag=True, help="Replace this backend's earlier engines.")
@console.json_option
def build(as_json: bool, sm: str, **options: Any) -> None:
    """Build engines in DIR/engines/BACKEND."""
    from engines.build import BuildRequest
    from engines.build import build as run

    capabilities = tuple(part.strip() for part in sm.split(",") if part.strip())
    made = run(BuildRequest(sm=capabilities, **options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, _json(made), lambda out: _show(out, made))


@cli.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@console.json_option
def inspect(folder: Path, as_json: bool) -> None:
    """Show the engines that were built in DIR, checked against their manifest."""
    from engines.build import built_backends, open_engines
    from exporter.errors import InputError
    from exporter.manifest import open_export

    export = open_export(folder)
    names = built_backends(export)
    if not names:
        raise InputError(
            f"{folder}: no engines yet; build some with: python -m engines build {folder} --backend trt-rtx"
        )
    found = [open_engines(export, name) for name in names]
    engines = [{"backend": e.data["backend"], **asdict(r)} for e in found for r in e.engines]
    console.report(as_json, {"folder": str(folder), "engines": engines}, lambda out: _show_all(out, found))


def _show_all(out: Console, found: list[Engines]) -> None:
    for engines in found:
        _show(out, engines)


def _json(made: Engines) -> dict[str, Any]:
    return {"folder": str(made.folder), "backend": made.data["backend"], "libraries": made.data["libraries"],
            "engines": [asdict(e) for e in made.engines], "refused": made.data["refused"]}


def _show(out: Console, made: Engines) -> None:
    libraries = ", ".join(f"{k} {v}" for k, v in made.data["libraries"].items() if k != "python")
    rows = []
    for e in sorted(made.engines, key=lambda e: (e.kind, e.activation_bytes)):
        limits = ", ".join(f"{n} ≤ {r[2]}" for n, r in e.limits.items())
        rows.append([e.graph, limits, console.size(e.activation_bytes), console.size(e.predicted_bytes),
                     console.size(e.weight_bytes), console.size(e.plan_bytes), "kept" if e.default else ""])
    console.table(out, f"{made.data['backend']} ({libraries}) in {made.folder}",
                  ["graph", "limits", "activation", "predicted", "weights", "plan", ""], rows)
    console.note_list(out, [
        "activation: scratch that a step needs beyond weights, inputs and outputs",
        "predicted: the graph's own tensors alive together; the builder fuses some and copies others",
        *made.data["refused"].values()])


if __name__ == "__main__":
    console.main(cli, "python -m engines")
