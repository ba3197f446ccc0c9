"""What every command shares: one error line, exit codes, `--json` with exactly one object, tables for people.

A command parses, calls one typed function and reports. Exit codes: 0 good, 1 a check failed, 2 bad input.
"""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from exporter.errors import CheckError, InputError

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object on stdout.")


class Group(click.Group):
    """A command group whose commands are listed as they were defined, first things first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # no command at all is an error like any other, one line, not a page of help
        super().__init__(*args, **{"no_args_is_help": False, **kwargs})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Definition order."""
        return list(self.commands)


def main(cli: click.Command, name: str) -> None:
    """Run a command line; every failure is one line on stderr (and `{"error": …}` on stdout under --json)."""
    # a service manager's stop unwinds like Ctrl-C, so partial folders are removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = cli.main(prog_name=name, standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except InputError as error:
        _fail(str(error), 2)
    except CheckError as error:
        _fail(str(error), 1)
    except click.ClickException as error:
        known = [word for word in sys.argv[1:2] if isinstance(cli, click.Group) and word in cli.commands]
        hint = f" (see {' '.join([name, *known])} --help)" if isinstance(error, click.UsageError) else ""
        _fail(error.format_message() + hint, 2)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; nothing was left behind", 130)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)
    except OSError as error:  # a file that cannot be read, a name too long
        _fail(f"{error.filename or 'a file'}: {error.strerror or error}", 2)


def _fail(message: str, code: int) -> None:
    line, as_json = " ".join(message.split()), "--json" in sys.argv[1:]
    end_progress(as_json)
    if as_json:
        print(json.dumps({"error": line}))
    print(f"error: {line}", file=sys.stderr)
    sys.exit(code)


def report(as_json: bool, data: Any, show: Callable[[Console], None]) -> None:
    """Print `data` as the one JSON object, or let `show` print tables."""
    if as_json:
        print(json.dumps(finite(data), allow_nan=False))
        return
    from rich.console import Console

    # a pipe has no width: give tables room instead of folding their figures
    show(Console(width=None if sys.stdout.isatty() else 240, highlight=False))


def stop_failed(as_json: bool, message: str) -> None:
    """Exit 1; under --json the one object is printed already."""
    if as_json:
        raise click.exceptions.Exit(1)
    raise CheckError(message)


def finite(data: Any) -> Any:
    """Infinite and NaN figures become null: JSON has no other word for them."""
    if isinstance(data, float) and not math.isfinite(data):
        return None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def table(console: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A table; columns whose cells are all numbers are right-aligned."""
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for i, column in enumerate(columns):
        cells = [str(r[i]) for r in rows]
        numeric = bool(cells) and all(c[:1].isdigit() or c[:1] in "-–" for c in cells)
        # what one would copy, a name in the first column, is never broken
        made.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=i == 0)
    for row in rows:
        made.add_row(*(str(c) for c in row))
    console.print(made)
    console.print()


class _Live:
    """The progress display of the running command: a bar where the share done is known, else a line that says what."""

    bar: Any = None
    task: Any = None


def progress(as_json: bool) -> Callable[..., None]:
    """A reporter on stderr, `report(message, share_done=None)`; silent under --json and where stderr is no terminal."""
    if as_json or not sys.stderr.isatty():
        return lambda message, share=None: None

    def show(message: str, share: float | None = None) -> None:
        if _Live.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            _Live.bar = Progress(SpinnerColumn(), BarColumn(bar_width=24), TimeElapsedColumn(),
                                 TextColumn("{task.description}", markup=False), console=Console(stderr=True),
                                 transient=True)
            _Live.bar.start()
            _Live.task = _Live.bar.add_task("", total=None)
        _Live.bar.update(_Live.task, description=message, total=None if share is None else 1.0, completed=share or 0.0)

    return show


def end_progress(as_json: bool) -> None:
    """Take the progress display away."""
    if _Live.bar is not None:
        _Live.bar.stop()
        _Live.bar = None


def size(count: float) -> str:
    """Bytes for people, decimal units."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def note_list(console: Console, notes: Sequence[str]) -> None:
    """Remarks under a table."""
    from rich.markup import escape

    for note in notes:
        console.print(f"[dim]- {escape(note)}[/dim]")


def command_list(console: Console, commands: Sequence[str]) -> None:
    """Commands to copy, each one line however long."""
    from rich.markup import escape

    for command in commands:
        console.print(f"  {escape(command)}", soft_wrap=True, highlight=False)
