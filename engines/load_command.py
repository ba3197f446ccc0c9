"""Options of commands that run a model on a GPU: how its engines are loaded. `generate` and `serve` have them alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from engines.trt_runtime import LoadOptions

Command = TypeVar("Command", bound=Callable[..., Any])
_OPTIONS = (
    click.option("--weight-budget", type=click.IntRange(min=0), metavar="MB", help="TensorRT: megabytes of an engine's "
                 "streamable weights that stay on the GPU (built with --weight-streaming)."),
    click.option("--runtime-cache", type=click.Path(path_type=Path), help="TensorRT-RTX: file of the kernels that it "
                 "compiles (default: beside each engine)."),
    click.option("--no-cuda-graphs", is_flag=True, help="On a GPU: do not capture steps that come again."),
)


def load_options(command: Command) -> Command:
    """Give a command these options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def taken(options: dict[str, Any]) -> LoadOptions | None:
    """What was asked for, taken out of a command's options; None where nothing was."""
    budget, cache, plain = (options.pop(name) for name in ("weight_budget", "runtime_cache", "no_cuda_graphs"))
    if budget is None and cache is None and not plain:
        return None
    from engines.trt_runtime import LoadOptions

    return LoadOptions(None if budget is None else 1_000_000 * budget, cache, not plain)
