"""The doctor: what is wrong with an artefact, by measurement. An export, a checkpoint, a state_dict, or any ONNX graph.

It goes by what it was given. An export is held against its source, and where it differs, against the source with every
known mistake made (doctor_layer.py, doctor_model.py); its graphs, and anyone's, are run and measured (doctor_graph.py);
a checkpoint is read by its headers (doctor_checkpoint.py). What could not be examined is said, with the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from engines.session import external_places
from exporter.checkpoint import read_json
from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.families import config_from_hf
from exporter.manifest import NAME, Export, open_export
from exporter.presets import PRESETS, preset_config
from exporter.source import open_source
from validate import doctor_graph
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_graph import Subject
from validate.ladder import check_source
from validate.references import QuantisedError

Progress = Callable[..., None]
STRUCTURAL = ("rope-on-latent", "rope-from-latent", "cache-per-head", "cached-expansion", "norm-on-read")
_NUMBER = re.compile(r"_?\d+(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class DoctorRequest:
    """What `python -m validate doctor` was asked for; see its --help."""

    what: str
    config: Path | None = None
    seed: int = 0
    training: bool = False
    batch: int = 1
    tokens: int = 4096
    dtype: str = "bf16"


def examine(request: DoctorRequest, progress: Progress = lambda message, share=None: None) -> Report:
    """The report on whatever `request.what` is. InputError for what is none of these."""
    path = Path(request.what)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if request.training:
        return _training(request)
    if (path / NAME).is_file():
        _refuse_config(request, "an export says its own")
        return _export(path, request, progress)
    if path.suffix == ".onnx" or (path.is_file() and path.suffix not in (".safetensors", ".pt", ".pth", ".bin")):
        return _file(path, request, progress)
    _refuse_config(request, "it is for a graph")
    return _source(path, request)


def _refuse_config(request: DoctorRequest, why: str) -> None:
    if request.config is not None:
        raise InputError(f"--config {request.config} with {request.what}: {why}; leave it out")


def _source(path: Path, request: DoctorRequest) -> Report:
    from validate import doctor_article, doctor_checkpoint

    if path.is_dir():
        report = Report(request.what, "checkpoint")
        doctor_checkpoint.examine_folder(path, report)
    elif path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(f"{path}: a pickle, which runs code when it is read; expected .safetensors (save the "
                             "state_dict with safetensors.torch.save_file)")
        report = Report(request.what, "state_dict")
        doctor_article.examine_state_dict(path, report)
    elif request.what in PRESETS:
        report = Report(request.what, "preset")
        preset_config(request.what)
        report.see("its published configuration")
        report.skip("weights", "a preset's are drawn from a seed; export it and examine the export")
    else:
        raise InputError(f"{request.what}: no such file, folder or preset; expected an export, a checkpoint, a "
                         ".safetensors state_dict of the article's layer, a .onnx graph, or a preset")
    return _tidied(report)


def _file(path: Path, request: DoctorRequest, progress: Progress) -> Report:
    """Anyone's graph; its own metadata, or --config, tells what it should do."""
    from validate.graph_shapes import Graph

    report = Report(request.what, "graph")
    own = Graph(path).metadata.get("mla.config")
    config = None
    if own is not None:
        config = _own_config(own, path)
    if request.config is not None:
        raw = read_json(request.config) if request.config.is_file() else None
        if raw is None:
            raise InputError(f"--config {request.config}: no such file; expected a Hugging Face config.json")
        config = config_from_hf(raw, str(request.config))
    if config is None:
        report.skip("RoPE's layout and frequencies, the softmax scale",
                    "no configuration to hold them against; give --config config.json")
    report.skip("weights", "a graph alone has no source; examine its export's folder, or see `validate parity`")
    doctor_graph.examine(Subject(path, config, own=own is not None), report, request.seed, progress)
    return _tidied(report)


def _own_config(text: str, path: Path) -> MLAConfig:
    import json

    try:
        return MLAConfig.from_dict(json.loads(text))
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(f"{path}: its metadata mla.config does not read; export it again") from None


def _export(folder: Path, request: DoctorRequest, progress: Progress) -> Report:
    """Graphs by themselves, then against the source."""
    made, report = open_export(folder), Report(request.what, "export")
    defaults = {g.name for g in made.graphs if g.default}
    for graph in made.graphs:
        path = made.folder / graph.file
        if made.cache == "none":
            report.skip(f"{graph.file}: cache, behaviour, RoPE and scale", "it has no cache (--causal off)")
        elif graph.name in defaults and made.data["weights"].get("mode") != "none":
            progress(graph.name)
            doctor_graph.examine(Subject(path, made.config, made.max_context, True, external_places(made)), report,
                                 request.seed, progress)
        else:
            doctor_graph.structure(Subject(path, made.config), report)
    _against_source(made, report, request.seed, progress)
    return _tidied(report)


def _against_source(made: Export, report: Report, seed: int, progress: Progress) -> None:
    if made.data["weights"].get("mode") == "none":
        report.skip("outputs against the source", "exported with --weights none, there are no weights to run with")
        return
    try:
        check_source(made)
        if made.contract == "model":
            from validate.doctor_model import ModelExamination

            ModelExamination(made, report, seed, progress).examine()
        else:
            from validate.doctor_layer import LayerExamination

            LayerExamination(made, report, seed, progress).examine()
    except QuantisedError as error:
        report.skip("outputs against the source", f"the references read floats only: {error}")
    except InputError as error:
        report.skip("outputs against the source", str(error))


def _training(request: DoctorRequest) -> Report:
    """The article's fifth: what training holds, with the query's low rank and without."""
    from validate.doctor_training import training_step

    what = request.what
    if (Path(what) / NAME).is_file():
        raise InputError(f"--training: {what} is an export, which is not trained; give the MODEL that it was made from")
    source = Path(what)
    if source.is_dir() or source.name == "config.json":
        folder = source if source.is_dir() else source.parent
        config = config_from_hf(read_json(folder / "config.json"), str(folder / "config.json"))
    else:
        config = open_source(what).config
    step = training_step(what, config, batch=request.batch, tokens=request.tokens, dtype=request.dtype)
    report = Report(what, "training", training=step.to_dict())
    report.see(f"weights, gradients, AdamW's states and activations of one attention, {request.batch} x "
               f"{request.tokens} tokens, {request.dtype}")
    kept = "up-projections recomputed"
    needed = [held.fixed + held.activations[kept] for held in (step.with_rank, step.without)]
    if step.proposed and needed[0] < needed[1]:
        report.add([AILMENTS["query-not-compressed"].found(
            f"without: {step.without.fixed / 1e6:.1f} MB of weights, gradients and AdamW's states and "
            f"{step.without.activations[kept] / 1e6:.1f} MB of activations ({kept}); with rank {step.rank}: "
            f"{step.with_rank.fixed / 1e6:.1f} and {step.with_rank.activations[kept] / 1e6:.1f} MB, per attention")])
    return report


def _tidied(report: Report) -> Report:
    """One finding for each ailment, with all its evidence; no unexplained difference where structure explains it."""
    explained = {f.where.removesuffix(".onnx") for f in report.findings if f.name in STRUCTURAL}
    merged: dict[tuple[str, ...], list[Finding]] = {}
    for f in report.findings:
        if f.name == "unexplained-difference" and f.where in explained:
            continue
        merged.setdefault((f.name, f.severity, f.cause, f.cure), []).append(f)
    report.findings = [_one(found) for found in merged.values()]
    return report


def _one(found: list[Finding]) -> Finding:
    """All places and all evidence, a line each; lines that differ in numbers alone are one, with their count. Each
    says its place where there are several."""
    named: dict[str, str] = {}
    for f in found:
        named.setdefault(f.where.removesuffix(".onnx"), f.where)  # a graph goes by its file, or by its name
    places = [where for where in named.values() if where]
    alike: dict[str, list[str]] = {}
    for f in found:
        for line in f.evidence.split("\n"):
            told = f"{f.where}: {line}" if f.where not in line and len(places) > 1 else line
            alike.setdefault(_NUMBER.sub("#", line), []).append(told)
    lines = [f"{told[0]}, and {len(told) - 1} more like it" if len(told) > 1 else told[0] for told in alike.values()]
    return replace(found[0], where=", ".join(places), evidence="\n".join(lines))
