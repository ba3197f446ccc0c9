"""`python -m validate parity`: the ladder of an export or of a MODEL; its options, and what it prints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from exporter import console
from exporter.errors import InputError
from validate.options import is_export, model_context, refuse_given, source_options

if TYPE_CHECKING:
    from validate.ladder import Ladder


MODEL_OPTIONS = ("dtype", "cache", "absorb", "causal", "merge_q", "max_context", "layer", "allow_pickle")


@click.command()
@click.argument("what", metavar="DIR|MODEL")
@source_options
@click.option("--dtype", default="fp32,fp16,bf16", show_default=True, help="MODEL: dtypes to climb.")
@click.option("--cache", default="append,scatter,concat", show_default=True, help="MODEL: cache forms to climb.")
@click.option("--absorb", default="factored", show_default=True, help="MODEL: factored or folded.")
@click.option("--causal", default="on", show_default=True, help="MODEL: on or off.")
@click.option("--merge-q", is_flag=True, help="MODEL: merge the query low rank.")
@click.option("--plant", help="MODEL: plant a known fault; the ladder must turn red (exit code 1). An unknown name "
              "lists all.")
@click.option("--network/--no-network", default=None, help="Climb with what TensorRT's parser made of the graphs as "
              "well (default: where DIR was exported for TensorRT).")
@click.option("--find-layer", is_flag=True, help="DIR of a model: do not climb, but find the first layer that departs "
              "(a ladder that fails does so by itself).")
@click.option("--against", type=click.Choice(["mha"]), help="Do not climb, but hold every attention against the "
              "multi-head attention of the same width.")
@click.option("--all", "show_all", is_flag=True, help="Print every rung, not a summary per graph.")
@console.json_option
def parity(as_json: bool, what: str, show_all: bool, plant: str | None, seed: int, network: bool | None,
           find_layer: bool, against: str | None, **options: Any) -> None:
    """Climb the parity ladder: float64 reference, eager absorbed, weights, graph, ONNX Runtime, engines."""
    from validate import ladder_tables
    from validate import parity as ladder_module

    progress = console.progress(as_json)
    if against:
        if plant or find_layer:
            raise InputError(f"--against {against} with {'--plant' if plant else '--find-layer'}: one thing at a time")
        if is_export(what):
            refuse_given(what, *MODEL_OPTIONS)
        _against_mha(as_json, what, seed, show_all, options)
        return
    if is_export(what):
        if plant:
            raise InputError(f"--plant {plant}: a fault is planted in an export made aside; give a MODEL, not {what}")
        refuse_given(what, *MODEL_OPTIONS)
        if find_layer:
            _find_layer(as_json, Path(what), seed, show_all)
            return
        ladder = ladder_module.check_folder(Path(what), seed, progress, network=network, find_layer=True)
    else:
        if find_layer:
            raise InputError(f"--find-layer: for an exported model; export {what} first, and give its folder")
        ladder = _climb_model(what, plant, seed, progress, bool(network), **options)
    console.end_progress(as_json)
    console.report(as_json, ladder.to_dict(), lambda out: ladder_tables.ladder(out, ladder, show_all))
    if not ladder.passed:
        console.stop_failed(as_json, ladder.failure)
    if plant:
        raise InputError(f"--plant {plant}: no rung turned red, so the fault changes nothing in this model (a bias of "
                         "zeros, a factor of 1); plant another")
    if is_export(what) and not any(r.graph not in ("", "-") for r in ladder.rungs):
        raise InputError(f"{what}: nothing of this export was checked: {'; '.join(ladder.not_run) or 'no graph ran'}")


def _against_mha(as_json: bool, what: str, seed: int, show_all: bool, options: dict[str, Any]) -> None:
    from validate import ladder_tables
    from validate.against_mha import against_mha

    found = against_mha(what, layer=options["layer"], seed=seed, allow_pickle=options["allow_pickle"],
                        max_context=options["max_context"], progress=console.progress(as_json))
    console.end_progress(as_json)
    console.report(as_json, found.to_dict(), lambda out: ladder_tables.against(out, found, show_all))
    if not found.passed:
        console.stop_failed(as_json, found.failure)


def _find_layer(as_json: bool, folder: Path, seed: int, show_all: bool) -> None:
    from exporter.manifest import open_export
    from validate import ladder_tables
    from validate.ladder import Ladder
    from validate.layer_search import search

    found = search(open_export(folder), seed=seed, progress=console.progress(as_json))
    console.end_progress(as_json)
    data = Ladder(layers=found).to_dict() | {"pass": found.passed}
    console.report(as_json, data, lambda out: ladder_tables.layers(out, found, show_all))
    if not found.passed:
        console.stop_failed(as_json, found.verdict)


def _climb_model(what: str, plant: str | None, seed: int, progress: Callable[..., None], network: bool, *, dtype: str,
                 cache: str, absorb: str, causal: str, merge_q: bool, max_context: int | None, layer: int | None,
                 allow_pickle: bool) -> Ladder:
    from exporter.export import ExportRequest
    from exporter.source import open_model, open_source
    from validate.faults import fault
    from validate.model_faults import ModelFault
    from validate.model_faults import fault as model_fault
    from validate.parity import check_model

    context = model_context(what, layer, allow_pickle, max_context)
    forms = cache.split(",") if causal == "on" else ["append"]
    requests = [
        ExportRequest(
            what,
            Path("."),
            layer=layer,
            dtype=d,
            cache=c,
            prefill=p,
            absorb=absorb,
            causal=causal == "on",
            merge_q=merge_q,
            max_context=context,
            seed=seed,
            allow_pickle=allow_pickle,
        )
        for d in dtype.split(",")
        for c in forms
        for p in ("absorbed", "expanded")
    ]
    if not plant:
        return check_model(requests, seed, progress, network=network, find_layer=True)
    whole = requests[0].whole
    chosen = model_fault(plant, open_model(what).decoder) if whole else (
        fault(plant, open_source(what, layer=layer, allow_pickle=allow_pickle).config))
    if chosen.cache and chosen.cache not in forms:
        raise InputError(f"--plant {plant}: a fault of the {chosen.cache} cache form; expected --cache {chosen.cache}")
    requests = [r for r in requests if chosen.cache in (None, r.cache)]
    how: dict[str, Any] = {"fault": chosen} if isinstance(chosen, ModelFault) else {"tamper": chosen.tamper}
    ladder = check_model(requests, seed, progress, network=network, find_layer=True, **how)
    ladder.planted = chosen.what
    return ladder
