"""`python -m validate cpp`: its options and its table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--generator", type=click.Path(path_type=Path), default=Path("build/cpp/release/mla-generate"),
              show_default=True, help="The C++ program, built over ONNX Runtime.")
@click.option("--context", type=int, default=256, show_default=True, help="Tokens of the prompt.")
@click.option("--new-tokens", type=int, default=32, show_default=True, help="Tokens to generate.")
@click.option("--threads", type=int, default=1, show_default=True, help="Threads of ONNX Runtime, in both.")
@click.option("--rounds", type=int, default=3, show_default=True, help="Generations of each, in turns.")
@click.option("--map-weights", is_flag=True, help="C++ leaves the weights in the file's pages.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the prompt.")
@console.json_option
def cpp(as_json: bool, **options: Any) -> None:
    """The C++ generator beside Python on the model in DIR: the same tokens (or exit code 1), a decode step's time."""
    from validate.cpp import CppRequest, run

    data = run(CppRequest(**options), console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, data, lambda out: show(out, data))


def show(out: Console, d: dict[str, Any]) -> None:
    """One row a subject."""
    rows = [["C++, whole step", f"{d['cpp_step_ms']:.2f}", f"{d['cpp_to_session']:.3f}"],
            ["Python, whole step", f"{d['python_step_ms']:.2f}", f"{d['python_to_session']:.3f}"],
            ["Python, session alone", f"{d['python_session_ms']:.2f}", "1"]]
    console.table(out, f"{d['folder']} ({d['cache']}, {d['dtype']}): the same {d['tokens']} tokens after a prompt of "
                  f"{d['context']}; {d['threads']} thread(s), {d['rounds']} rounds",
                  ["decode step", "least ms", "to Python's session"], rows)
