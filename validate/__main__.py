"""`python -m validate`: parity, TensorRT's networks, absorption, memory, Polygraphy runs, activation, benchmarks."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import __version__, console
from exporter.errors import InputError
from validate import tables
from validate.bench_command import bench
from validate.cpp_command import cpp
from validate.doctor_command import doctor
from validate.endpoint_command import endpoint
from validate.options import exported, is_export, model_context, source_options
from validate.parallel_command import parallel
from validate.parity_command import parity
from validate.report_command import report
from validate.serving_command import serving
from validate.sweep_command import sweep

if TYPE_CHECKING:
    from rich.console import Console


@click.group(cls=console.Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mla-export")
def cli() -> None:
    """Proofs of an export: output parity, memory, and comparison runs."""


cli.add_command(parity)


@cli.command()
@click.argument("what", metavar="DIR|MODEL")
@source_options
@click.option("--dtype", default="fp16", show_default=True, help="MODEL: dtype to export.")
@click.option("--cache", default="scatter", show_default=True, help="MODEL: cache form to export.")
@click.option("--backend", default="trt-rtx", show_default=True, help="Whose parser: trt-rtx or trt.")
@click.option("--plant", help="Plant a fault that ONNX Runtime does not show: nonpad or top-left-causal.")
@console.json_option
def network(as_json: bool, what: str, dtype: str, cache: str, backend: str, plant: str | None, max_context: int | None,
            seed: int, layer: int | None, allow_pickle: bool) -> None:
    """Run the network that TensorRT's parser made of each graph, without a GPU, against reference and ONNX Runtime."""
    from validate import network as network_module

    progress = console.progress(as_json)
    options: dict[str, Any] = {}
    if not is_export(what):
        options = {"dtype": dtype, "cache": cache, "target": backend, "prefill": "expanded", "layer": layer,
                   "seed": seed, "allow_pickle": allow_pickle, "max_context":
                   min(400, model_context(what, layer, allow_pickle, None)) if max_context is None else max_context}
    with exported(what, **options) as made, tempfile.TemporaryDirectory(prefix="mla-planted-") as temporary:
        only: list[str] = []
        if plant:
            made, only = network_module.planted(made, plant, Path(temporary) / "export")
        result = network_module.check(made, backend=backend, seed=seed, only=only, progress=progress)
    console.end_progress(as_json)
    data = result.to_dict()
    console.report(as_json, data, lambda out: tables.network(out, data))
    if not result.passed:
        console.stop_failed(as_json, result.failure)


@cli.command()
@click.argument("what", metavar="FILE.onnx|DIR", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(["decode", "prefill"]), help="Of a graph that does not say its own (default "
              "decode: always held against the absorbed form).")
@click.option("--config", type=click.Path(path_type=Path), help="A Hugging Face config.json, for sizes that the graph "
              "does not say.")
@console.json_option
def absorption(as_json: bool, what: Path, kind: str | None, config: Path | None) -> None:
    """Whether a graph attends its latent cache as it lies; any ONNX graph with a cache, or every graph of an export."""
    from validate import absorption as audit_module

    verdicts = audit_module.audit(what, kind=kind, config=config, progress=console.progress(as_json))
    console.end_progress(as_json)
    data = audit_module.to_dict(verdicts)
    console.report(as_json, data, lambda out: tables.absorption(out, verdicts))
    if not data["pass"]:
        failed = [v.graph for v in verdicts if not v.passed]
        console.stop_failed(as_json, f"absorption is not in effect in {', '.join(failed)}")


@cli.command()
@click.argument("model")
@click.option("--layer", type=int, help="Layer of a checkpoint (default 0).")
@click.option("--context", type=int, default=4096, show_default=True, help="Rows of past.")
@click.option("--seeds", type=int, default=3, show_default=True, help="Draws of inputs and of a preset's weights.")
@click.option("--dtype", default="fp16", show_default=True, help="Compute dtype of the quantised variants.")
@click.option("--allow-pickle", is_flag=True, help="Accept a .pt state_dict.")
@console.json_option
def precision(as_json: bool, model: str, layer: int | None, context: int, seeds: int, dtype: str, allow_pickle: bool
              ) -> None:
    """Bytes and errors of every precision of one attention's weights and cache, against the float64 reference."""
    from dataclasses import asdict

    from validate import precision as precision_module

    outcomes = precision_module.survey(model, layer=layer, context=context, seeds=seeds, dtype=dtype,
                                       allow_pickle=allow_pickle, progress=console.progress(as_json))
    console.end_progress(as_json)
    data = {"model": model, "context": context, "seeds": seeds, "emulated": precision_module.EMULATED,
            "variants": [asdict(outcome) for outcome in outcomes]}
    console.report(as_json, data, lambda out: tables.precision(out, data))


@cli.command()
@click.argument("what", metavar="DIR|MODEL")
@source_options
@click.option("--dtype", default="fp16", show_default=True, help="MODEL: dtype to export.")
@click.option("--max-batch", type=int, help="Sequences (default: the export's).")
@click.option("--chunk", type=int, default=512, show_default=True, help="New tokens of a prefill.")
@click.option("--curve", is_flag=True, help="Also memory over context, each point measured in a process of its own "
              "(batch 1 unless --max-batch says otherwise).")
@click.option("--contexts", help="The curve's contexts by commas (default: four of them, up to 32768).")
@click.option("--budget", type=float, default=120, show_default=True, help="Seconds for the curve; what does not fit "
              "is not run, by name.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the curve into this new file.")
@console.json_option
def memory(as_json: bool, what: str, dtype: str, max_batch: int | None, max_context: int | None, chunk: int, seed: int,
           layer: int | None, allow_pickle: bool, curve: bool, contexts: str | None, budget: float, plot: Path | None
           ) -> None:
    """Cache, engine and process memory, predicted and measured, for MLA and for MHA."""
    from validate import memory as memory_module
    from validate import memory_charts, memory_curve
    from validate.plot import check_file

    check_file(plot)
    progress = console.progress(as_json)
    options = {"dtype": dtype, "target": "trt-rtx", "layer": layer, "seed": seed, "allow_pickle": allow_pickle,
               "max_context": max_context, "prefill": "expanded"}
    with exported(what, **options) as made:
        asked = memory_curve.CurveRequest.of(made, contexts, max_batch, chunk, budget)
        data = memory_module.report(made, memory_module.MemoryLimits.of(made, max_batch, max_context, chunk), progress)
        if curve or contexts or plot:
            data["curve"] = memory_curve.curves(made, asked, progress).to_dict()
    console.end_progress(as_json)
    if plot is not None:
        memory_charts.draw(data["curve"], f"{data['model']}, {data['dtype']}: memory over context", plot)
    console.report(as_json, data, lambda out: tables.memory(out, data))


@cli.command()
@click.argument("what", metavar="DIR|MODEL")
@source_options
@click.option("--dtype", default="fp32", show_default=True, help="MODEL: dtype to export.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for inputs, golden outputs and commands "
              "(default: DIR/polygraphy, or mla-polygraphy for a MODEL).")
@console.json_option
def polygraphy(as_json: bool, what: str, dtype: str, out: Path | None, seed: int, max_context: int | None,
               layer: int | None, allow_pickle: bool) -> None:
    """Compare every graph with golden outputs through Polygraphy, and build through `polygraphy convert`."""
    from exporter.export import ExportRequest, export
    from validate import polygraphy_run

    progress = console.progress(as_json)
    folder = Path(what)
    if not is_export(what):
        folder = out or Path("mla-polygraphy")
        context = model_context(what, layer, allow_pickle, max_context)
        export(
            ExportRequest(
                what, folder, dtype=dtype, max_context=context, seed=seed, layer=layer, allow_pickle=allow_pickle
            )
        )
        out = None
    result = polygraphy_run.run(folder, out, seed, progress)
    console.end_progress(as_json)
    data = result.to_dict()
    console.report(as_json, data, lambda view: tables.polygraphy(view, data))
    if not data["pass"]:
        console.stop_failed(as_json, "a Polygraphy comparison failed")


@cli.command()
@click.option(
    "--preset", default="deepseek-v2-lite", show_default=True, help="Whose attention; its heads are replaced."
)
@click.option("--dtype", default="fp16,bf16,fp32", show_default=True)
@click.option("--heads", default="16,128", show_default=True)
@click.option(
    "--update", type=click.Path(path_type=Path), help="Also write the table between the markers of this file."
)
@console.json_option
def activation(as_json: bool, preset: str, dtype: str, heads: str, update: Path | None) -> None:
    """Survey TensorRT-RTX activation memory: form x orientation x dtype x heads x T, every figure built now."""
    from validate import activation as survey_module
    from validate.marked_page import check_page
    from validate.marked_page import update as update_page

    if not all(h.isdigit() and int(h) for h in heads.split(",")):
        raise InputError(f"--heads {heads!r}: expected numbers such as 16,128")
    if update:
        check_page(update, ["activation"])
    figures = survey_module.survey(preset=preset, dtypes=dtype.split(","), heads=[int(h) for h in heads.split(",")],
                                   progress=console.progress(as_json))
    console.end_progress(as_json)
    if update:
        update_page(update, {"activation": survey_module.markdown(figures)})

    def show(out: Console) -> None:
        columns, rows = survey_module.table(figures)
        console.table(out, f"TensorRT-RTX activation in MB, {preset} attention", columns, rows)
        console.note_list(out, sorted({f.note for f in figures if f.note}))

    console.report(as_json, {"preset": preset, "figures": survey_module.to_dict(figures)}, show)


cli.add_command(bench)


@cli.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Also write the results to this JSON "
              "file, anew after every rung; an earlier report there is replaced.")
@click.option("--budget", type=click.FloatRange(min=1), default=450, show_default=True,
              help="Seconds; what does not fit is not run, by name.")
@console.json_option
def gpu(as_json: bool, out: Path | None, budget: float) -> None:
    """On one GPU: eager parity, peak memory, decode time, engines; without one, what it would do."""
    from validate import gpu as gpu_module
    from validate import gpu_tables

    report = gpu_module.check(out, total_s=budget, progress=console.progress(as_json))
    console.end_progress(as_json)
    try:
        console.report(as_json, report.to_dict(), lambda view: gpu_tables.show(view, report))
    except ModuleNotFoundError:  # a GPU machine's torch may come without rich
        click.echo(gpu_tables.plain(report))
    if report.count("failed"):  # where nothing could run, nothing failed
        console.stop_failed(as_json, f"GPU check: {report.summary}")


cli.add_command(cpp)
cli.add_command(doctor)
cli.add_command(endpoint)
cli.add_command(parallel)
cli.add_command(serving)
cli.add_command(sweep)
cli.add_command(report)

if __name__ == "__main__":
    console.main(cli, "python -m validate")
