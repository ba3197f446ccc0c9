"""`python -m validate report`: its options, its progress and its few lines on the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console


def _names(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name.strip() for given in value for name in given.split(",") if name.strip())


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), default=Path("report.html"), show_default=True, metavar="FILE",
              help="The page to write.")
@click.option("--overwrite", is_flag=True, help="Replace a page that is there.")
@click.option("--only", multiple=True, callback=_names, metavar="SECTION,…", help="These sections alone: "
              "configuration, graphs, parity, absorption, doctor, memory, curve, engines, versions.")
@click.option("--skip", multiple=True, callback=_names, metavar="SECTION,…", help="Leave these sections out.")
@click.option("--max-batch", "batch", type=int, help="Sequences of the memory figures (default: the export's; of the "
              "curve: 1).")
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens of a prefill.")
@click.option("--contexts", help="The memory curve's contexts by commas (default: four of them, up to 32768).")
@click.option("--budget", type=float, default=120, show_default=True, help="Seconds for the memory curve.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of what parity and the doctor ask.")
@console.json_option
def report(as_json: bool, out: Path, overwrite: bool, **options: Any) -> None:
    """One page about an export: parity, absorption, doctor, memory, engines, and how to do it again.

    Exit code 1 if a check failed; the page is written all the same.
    """
    from validate import report as report_module
    from validate import report_page

    report_page.check_target(out, overwrite)
    data = report_module.collect(report_module.ReportRequest(**options), console.progress(as_json))
    console.end_progress(as_json)
    report_page.write(data, out)
    console.report(as_json, data, lambda view: show(view, data, out))
    if data["pass"] is False:
        console.stop_failed(as_json, f"{', '.join(data['verdict'])}; the page is {out}")


def show(view: Console, data: dict[str, Any], out: Path) -> None:
    """One row a section, what was not run, and where the page is."""
    console.table(view, f"Report of {data['export']}", ["section", "", "seconds", ""],
                  [[s["title"], s["state"], f"{s['seconds']:.1f}", s["says"]] for s in data["sections"].values()])
    console.note_list(view, data["not_run"])
    view.print(f"{' · '.join(data['verdict'])}\nwritten: {out}", soft_wrap=True, markup=False)
