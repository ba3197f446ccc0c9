"""What the commands of `python -m validate` share: options of a MODEL, and an export that is given or made aside."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter.errors import InputError

if TYPE_CHECKING:
    from exporter.manifest import Export


def source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that only matter where a MODEL is exported aside; a DIR has them in its manifest."""
    for option in (
        click.option(
            "--max-context", type=int, help="Rows of past at most (default: the export's; MODEL: up to 8192)."
        ),
        click.option("--layer", type=int, help="MODEL: layer of a checkpoint."),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Seed of inputs and of a preset's weights."
        ),
        click.option("--allow-pickle", is_flag=True, help="MODEL: accept a .pt state_dict."),
    ):
        command = option(command)
    return command


def is_export(what: str) -> bool:
    """Whether a DIR was given, and not a MODEL."""
    from exporter import manifest

    return (Path(what) / manifest.NAME).is_file()


def refuse_given(what: str, *names: str) -> None:
    """Options of a MODEL that were given with a DIR, which has them in its manifest."""
    for name in names:
        if given(name):
            raise InputError(f"--{name.replace('_', '-')}: for a MODEL, which is exported aside; {what} is an export "
                             "and has it in its manifest")


def given(name: str) -> bool:
    """Whether an option of the running command was named on its line."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


@contextmanager
def exported(what: str, **options: Any) -> Iterator[Export]:
    """An export folder as it is, or a MODEL exported into a temporary one."""
    from exporter.export import ExportRequest, export
    from exporter.manifest import open_export

    if is_export(what):
        yield open_export(Path(what))
        return
    with tempfile.TemporaryDirectory(prefix="mla-validate-") as temporary:
        yield export(ExportRequest(what, Path(temporary) / "export", **options))


def model_context(what: str, layer: int | None, allow_pickle: bool, asked: int | None) -> int:
    """Rows of past for a MODEL: what was asked for, or what it has, up to 8192."""
    from exporter.source import open_source

    return asked or min(8192, open_source(what, layer=layer, allow_pickle=allow_pickle).config.max_position_embeddings)
