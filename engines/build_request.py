"""What `python -m engines build` was asked for, checked as far as no export is needed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from engines.build_options import PLAIN, BuildOptions
from exporter.errors import InputError

DEFAULT_CHUNK = 512
LAYOUTS = ("auto", "split", "unified", "both")


@dataclass(frozen=True)
class BuildRequest:
    """Limits of the profiles, what to choose among, and how. `None` limits come from the export.

    `layout`: one engine per kind (split), one for both kinds (unified), the smaller of the two (both), or what suits
    the export (auto). `opt_search` None: where a build is quick. `activation_limit` in MB (10^6 bytes). `timeout` in
    seconds, of one build. `cache`: whether results of earlier builds are taken, and kept for later ones.
    """

    folder: Path
    backend: str = "trt-rtx"
    max_batch: int | None = None
    prefill_batch: int = 1
    max_context: int | None = None
    chunk: int = DEFAULT_CHUNK
    decode_tokens: int = 1
    formulation: str = "auto"
    layout: str = "auto"
    opt_search: bool | None = None
    activation_limit: float | None = None
    timeout: float | None = None
    cache: bool = True
    options: BuildOptions = PLAIN
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name in ("max_batch", "prefill_batch", "max_context", "chunk", "decode_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"--{name.replace('_', '-')} {value}: expected at least 1")
        for name, unit in (("activation_limit", "MB"), ("timeout", "seconds")):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InputError(f"--{name.replace('_', '-')} {value:g}: expected more than 0 {unit}")
        if self.layout not in LAYOUTS:
            raise InputError(f"--layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")

    def refuse_tensorrt_options(self) -> None:
        """InputError where an option means something to TensorRT's builders alone."""
        given = [f.name for f in fields(BuildOptions) if getattr(self.options, f.name) != f.default]
        given += [] if self.layout in ("auto", "split") else ["layout"]
        given += [] if self.opt_search is None else ["opt_search" if self.opt_search else "no_opt_search"]
        given += [] if self.activation_limit is None else ["activation_limit"]
        if given:
            raise InputError(f"--{given[0].replace('_', '-')}: an option of TensorRT's builders; --backend "
                             f"{self.backend} runs graphs as they are: leave it out, or choose trt or trt-rtx")
