"""`python -m validate parallel`: its options and table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console

    from validate.ladder import Ladder


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--against", type=click.Path(path_type=Path), metavar="SINGLE", help="An export of the same model as one "
              "graph: the same tokens?")
@click.option("--backend", default="ort", show_default=True, help="ort, ort-cuda or interpreter.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what is asked.")
@console.json_option
def parallel(as_json: bool, folder: Path, against: Path | None, backend: str, seed: int) -> None:
    """Hold the ranks of a tensor-parallel export, together, against the float64 reference and the single graph."""
    from validate.parallel import check_ranks

    ladder = check_ranks(folder, against, backend, seed, console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, {"folder": str(folder), "rungs": [r.to_dict() for r in ladder.rungs],
                             "not_run": ladder.not_run, "pass": ladder.passed}, lambda out: show(out, folder, ladder))
    if not ladder.passed:
        console.stop_failed(as_json, ladder.failure)


def show(out: Console, folder: Path, ladder: Ladder) -> None:
    """One row a rung."""
    console.table(out, f"Ranks of {folder} against the float64 reference",
                  ["rung", "graph", "rel", "tolerance", "1 - cosine", "verdict", ""],
                  [[r.name, r.graph, f"{r.rel:.1e}", f"{r.tolerance:.0e}", f"{1 - r.cosine:.0e}",
                    ("pass" if r.passed else "FAIL") if r.counted else "not counted",
                    r.note or ("" if r.passed else r.where)]
                   for r in ladder.rungs])
    console.note_list(out, ladder.not_run)
