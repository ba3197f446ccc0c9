"""`python -m validate bench`: its options, which suites run, and where a run goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console
from exporter.errors import InputError
from validate.options import given

if TYPE_CHECKING:
    from validate.bench_rows import Run

SUITES = ("layer", "model", "profile", "prefill", "export", "engine")
PEERED = ("model", "prefill", "export")  # suites of a whole checkpoint beside peers
WHOLE = (*PEERED, "profile")  # suites of a whole checkpoint
CONTEXTS = {"layer": "1024,8192", "model": "1024,8192,32768", "profile": "1024,8192,32768"}
PRESET, PIECES = "deepseek-v2-lite", "0:1024,4096:8192"
# option -> the suites that it says something to
OPTIONS = {"model": ("layer", "engine"), "context": tuple(CONTEXTS), "batch": tuple(CONTEXTS),
           "pieces": ("prefill",), "checkpoint": WHOLE, "quantise": WHOLE, "skip": PEERED, "peers": PEERED}


@dataclass(frozen=True)
class BenchRequest:
    """What was asked for; see --help."""

    suites: tuple[str, ...] = ("layer",)
    model: str | None = None
    context: str | None = None
    batch: str = "1"
    threads: int = 2
    rounds: int = 5
    budget: float = 10.0
    pieces: str = PIECES
    checkpoint: Path | None = None
    quantise: str = ""
    skip: tuple[str, ...] = ()
    peers: Path = Path("build") / "peers"

    def contexts(self, suite: str) -> list[int]:
        """Rows of past."""
        return numbers("context", self.context or CONTEXTS[suite])

    @property
    def batches(self) -> list[int]:
        """Sequences of a step."""
        return numbers("batch", self.batch)


def numbers(option: str, text: str) -> list[int]:
    """Positive numbers by commas; InputError for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(w.isascii() and w.isdecimal() and int(w) for w in words):
        raise InputError(f"--{option} {text!r}: expected numbers from 1 up, such as 1024,8192")
    return list(dict.fromkeys(int(w) for w in words))


def parse_suites(text: str) -> tuple[str, ...]:
    """`all`, or suites by commas, in the order in which they run."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in (*SUITES, "all"):
            raise InputError(f"--suite {word!r}: expected all or some of {', '.join(SUITES)}")
    return tuple(s for s in SUITES if s in words or "all" in words)


def parse_pieces(text: str) -> list[tuple[int, int]]:
    """`0:1024,4096:8192` as pairs; InputError for what is none."""
    found = []
    for word in text.split(","):
        start, _, stop = word.partition(":")
        if not (start.isdigit() and stop.isdigit() and int(start) < int(stop)):
            raise InputError(f"--pieces {word!r}: expected START:STOP, tokens of a prompt, such as 0:1024,4096:8192")
        found.append((int(start), int(stop)))
    return found


@click.command()
@click.argument("model", required=False)
@click.option("--suite", default="layer", show_default=True, metavar="SUITE[,…]|all", help="layer: one attention of "
              "MODEL beside eager references; model, prefill, export: a whole checkpoint beside mobius-onnx, "
              "llama.cpp and transformers; profile: where the time of our decode step goes, by part of the model and "
              "by operator; engine: TensorRT-RTX builds.")
@click.option("--context", help="layer, model, profile: rows of past, several by commas (default: 1024,8192; model, "
              "profile: 32768 too).")
@click.option("--batch", default="1", show_default=True, help="layer, model, profile: sequences of a step, several by "
              "commas.")
@click.option("--pieces", default=PIECES, show_default=True, help="prefill: START:STOP of a prompt's "
              "tokens, several by commas.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True, help="Of every subject, pinned to "
              "as many cores.")
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="Turns of each subject.")
@click.option("--budget", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Seconds of a subject in "
              "one case; it stops after 3 steps at least.")
@click.option("--checkpoint", type=click.Path(path_type=Path), help=f"{', '.join(WHOLE)}: a checkpoint folder "
              "(default: a synthetic one of 778 MB, made under build/bench).")
@click.option("--quantise", default="", metavar="SCHEME[,…]", help=f"{', '.join(WHOLE)}: our export with weights as "
              "codes as well.")
@click.option("--skip", multiple=True, metavar="PEER", help="Leave out mobius-onnx, llama.cpp or "
              "transformers; repeatable.")
@click.option("--peers", type=click.Path(path_type=Path), default=Path("build") / "peers", show_default=True,
              help="Where peers' virtual environments are kept.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the run in this new folder: "
              "bench.json, and as SVG charts of time over context, over the floor, and of where it goes.")
@click.option("--update", type=click.Path(path_type=Path), metavar="PAGE", help="Also write each suite's table between "
              "its markers of this page.")
@click.option("--from", "kept", type=click.Path(path_type=Path), metavar="FILE", help="Measure nothing: show (--out, "
              "--update) an earlier run's bench.json.")
@console.json_option
def bench(as_json: bool, suite: str, out: Path | None, update: Path | None, kept: Path | None, skip: tuple[str, ...],
          **options: Any) -> None:
    """Time what users would run, side by side in one run: outputs compared first, each beside the floor of a step.

    MODEL, a preset, is for the suites layer and engine (default: deepseek-v2-lite). See docs/benchmarks.md.
    """
    from validate import bench_tables
    from validate.bench_rows import read_run
    from validate.marked_page import check_page
    from validate.marked_page import update as update_page

    suites = parse_suites(suite)
    if kept is not None:
        _refuse_measuring(kept)
        data = read_run(kept)
    else:
        request = BenchRequest(suites, skip=skip, **options)
        _check(request)
    _check_out(out)
    if update is not None:
        check_page(update, [f"bench-{s}" for s in (data["suites"] if kept is not None else suites)])
    if kept is None:
        data = measure(request, as_json)
    if out is not None:
        write(data, out)
    if update is not None:
        update_page(update, bench_tables.page_tables(console.finite(data)))
    console.report(as_json, data, lambda view: bench_tables.show(view, data))


def _refuse_measuring(kept: Path) -> None:
    for name in ("suite", "threads", "rounds", "budget", *OPTIONS):
        if given(name):
            raise InputError(f"--from {kept} shows a run as it was; leave {_spelt(name)} out")


def _spelt(name: str) -> str:
    return "MODEL" if name == "model" else f"--{name}"


def _check(request: BenchRequest) -> None:
    """What can be known before anything is exported."""
    for name, suites in OPTIONS.items():
        if given(name) and not set(suites) & set(request.suites):
            of = "the suite model takes its checkpoint by --checkpoint FOLDER" if name == "model" and set(
                request.suites) & set(WHOLE) else f"the suite {', '.join(request.suites)} has none"
            raise InputError(f"{_spelt(name)} is for --suite {', '.join(suites)}; {of}")
    for suite in CONTEXTS:
        request.contexts(suite)
    _ = request.batches, parse_pieces(request.pieces)


def _check_out(out: Path | None) -> None:
    if out is None:
        return
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"--out {out} exists; nothing is overwritten, choose another place")


def measure(request: BenchRequest, as_json: bool) -> dict[str, Any]:
    """All suites that were asked for, in one run; its JSON."""
    from validate.bench_rows import Result, Run
    from validate.bench_timing import pinned
    from validate.floor import Probe

    with pinned(request.threads) as cores, Probe(request.threads) as probe:
        run = Run(Result(request.threads, cores), probe, request.rounds, request.budget, console.progress(as_json))
        try:
            if "layer" in request.suites:
                from validate.bench import bench_layer

                bench_layer(run, request.model or PRESET, request.contexts("layer"), request.batches)
            if set(request.suites) & set(WHOLE):
                _whole(run, request)
            if "engine" in request.suites:
                from validate.engine_bench import bench_engine

                bench_engine(run, request.model or PRESET)
            run.progress("the machine's rates")
            run.result.finish(probe.rates())
        finally:
            console.end_progress(as_json)
    return run.result.to_dict()


def _whole(run: Run, request: BenchRequest) -> None:
    """The suites of a whole checkpoint over one workplace."""
    from validate.bench_subjects import NAMED, PEERS, versions, workplace
    from validate.export_bench import bench_export
    from validate.model_bench import bench_models
    from validate.prefill_bench import bench_prefill
    from validate.profile_bench import bench_profile

    pieces = parse_pieces(request.pieces)
    rows = [c for suite in ("model", "profile") if suite in request.suites for c in request.contexts(suite)]
    if "prefill" in request.suites:
        rows += [stop for _, stop in pieces]
    peered = bool(set(request.suites) & set(PEERED))
    quantise: Sequence[str] = [word.strip() for word in request.quantise.split(",") if word.strip()]
    skip = request.skip if peered else [peer.name for peer in PEERS]
    with workplace(request.checkpoint, request.threads, max(rows, default=1024), quantise=quantise, skip=skip,
                   peers=request.peers, progress=run.progress) as place:
        if "export" in request.suites:  # first: its last graphs serve the others
            bench_export(run, place)
        if "model" in request.suites:
            bench_models(run, place, request.contexts("model"), request.batches)
        if "profile" in request.suites:
            bench_profile(run, place, request.contexts("profile"), request.batches)
        if "prefill" in request.suites:
            bench_prefill(run, place, pieces)
        for suite in set(request.suites) & set(WHOLE):
            run.result.models[suite] = request.checkpoint.absolute().name if request.checkpoint else NAMED
        if peered:
            run.result.not_run[:0] = [f"{name}: {why}" for name, why in place.absent.items()]
        run.result.versions |= versions(place.absent)


def write(data: dict[str, Any], out: Path) -> None:
    """A run's JSON and charts in a new folder, which appears whole or not at all."""
    from exporter.output import new_folder
    from validate import bench_charts
    from validate.bench_rows import NAME

    with new_folder(out, marker=NAME) as folder:
        finite = console.finite(data)
        bench_charts.write(finite, folder)
        (folder / NAME).write_text(json.dumps(finite, indent=1, allow_nan=False) + "\n", encoding="utf-8")
