"""The suite engine: `python -m engines build` for TensorRT-RTX, first with an empty store and then again.

It builds on a CPU; a step's time on a device is measured where there is one, by the same command. There is no floor for
a build, and nothing to compare its outputs with here: `validate network` and `validate gpu` do that.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from engines import trt
from engines.records import Engines, open_engines
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from validate import child
from validate.bench_rows import Row, Run
from validate.bench_timing import Timed, watch
from validate.synthetic import named_config, write_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
BACKEND, NO_DEVICE = "trt-rtx", "no CUDA device"
SMALL = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "first_k_dense_replace": 2,
         "vocab_size": 8192, "q_lora_rank": 384}  # of v3-class; else as it is


def bench_engine(run: Run, model: str, *, batch: int = 1, context: int = 4096, small: Mapping[str, int] = SMALL,
                 ) -> None:
    """Build one attention of `model`, and a model of v3-class with the sizes of `small`: each twice, for `batch`
    sequences and `context` rows at most."""
    run.result.models["engine"] = f"{model}; v3-class of {small['num_hidden_layers']} layers"
    if not trt.available(BACKEND):
        run.result.not_run.append(f"engine: {BACKEND} is not installed (pip install -e '.[rtx]')")
        return
    with tempfile.TemporaryDirectory(prefix="mla-bench-") as temporary:
        work = Path(temporary)
        dtype, config = named_config("v3-class")
        checkpoint = write_checkpoint(work / "small", {**config, **small}, dtype)
        for name, scope, of in ((f"one attention of {model}", "layer", model),
                                (f"a model of {small['num_hidden_layers']} layers", "model", str(checkpoint))):
            run.progress(f"engine: exporting {name}")
            made = export(ExportRequest(of, work / f"export-{scope}", scope=scope, dtype="fp16", target=BACKEND,
                                        max_context=context, max_batch=batch))
            build_twice(run, made, name, work / f"store-{scope}")


def build_twice(run: Run, made: Export, name: str, store: Path, options: Sequence[str] = ()) -> None:
    """The build's command with an empty `store`, and again with what it left there."""
    words = [sys.executable, "-m", "engines", "build", str(made.folder), "--backend", BACKEND, "--overwrite", "--json"]
    for again in (False, True):
        what = f"{name}, " + ("again" if again else "first build")
        run.progress(f"engine: {what}")
        with watch(f"engine, {what}", run.threads, run.result.load):
            done = child.run([*words, *options], env={**os.environ, "MLA_EXPORT_CACHE": str(store)}, cwd=REPOSITORY)
        if done.code:
            raise (InputError if done.code == 2 else CheckError)(done.last_line.removeprefix("error: "))
        _rows(run, what, done, open_engines(made, BACKEND), made.data["max_batch"], made.max_context)


def _rows(run: Run, what: str, done: child.Done, built: Engines, batch: int, context: int) -> None:
    """The build's row, and where a device timed them one of each engine."""
    tries = [a for a in built.attempts if a.seconds is not None]
    kept = [e for e in built.engines if e.file]
    run.result.rows.append(Row.of(
        "engine", what, Timed([1e3 * done.seconds]), context=context, batch=batch, outputs_equal=None,
        peak_bytes=done.peak_bytes, bytes_written=sum(e.plan_bytes for e in kept), engines=len(tries),
        from_store=sum(a.cached for a in tries),
        builder_ms=1e3 * sum(a.seconds for a in tries if a.seconds and not a.cached)))
    timed = [e for e in kept if e.milliseconds is not None]
    run.result.rows += [Row.of("engine", f"{what}: a step of {e.engine}", Timed([e.milliseconds or 0.0]),
                               context=context, batch=batch, outputs_equal=None) for e in timed]
    if not timed:
        line = f"engine, steps on a device: {NO_DEVICE}"
        run.result.not_run += [] if line in run.result.not_run else [line]
