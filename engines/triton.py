"""A Triton model repository from an export: `engines triton`. The graph (or plan) and its weights, its `config.pbtxt`,
and a README with a client; each model appears whole or not at all.

A scatter export is a stateful model: Triton keeps every sequence's caches as implicit state, the client counts rows
and says them in `past_lengths`, since no graph returns a length. An append export is a stateless model: the client
holds the past. A concat export cannot be either: a state of variable size begins with one row, which the graph joins
in front of the present, where nobody drops it (docs/triton.md).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import onnx

from engines import operator_library
from engines.backends import plan_path
from engines.session import external_places
from engines.triton_config import check, described, model_config, text
from engines.triton_readme import readme
from exporter import manifest
from exporter.dtypes import NUMPY_OF_NAME, ONNX_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry, open_export
from exporter.output import new_folder
from exporter.signature import TensorSpec

BACKENDS = {"ort": "onnxruntime", "trt": "tensorrt"}
MARKER = "mla-export.json"
NOT_RUN = "not run: no Triton Inference Server here"
_KINDS = ("decode", "prefill")
_REPOSITORY = "expected a model repository, a folder of its own that is not there yet or holds models alone"


@dataclass(frozen=True)
class TritonRequest:
    """What `python -m engines triton` was asked for; see its --help. None: as the export has it."""

    folder: Path
    out: Path
    backend: str = "ort"
    name: str | None = None
    kind: str | None = None
    formulation: str | None = None
    sequences: int | None = None
    idle_seconds: float = 60.0
    device: str = "auto"
    overwrite: bool = False

    def __post_init__(self) -> None:
        for option, allowed in (("backend", tuple(BACKENDS)), ("kind", (None, *_KINDS)),
                                ("device", ("auto", "cpu", "gpu"))):
            if getattr(self, option) not in allowed:
                hint = ("; Triton's TensorRT backend loads plans of TensorRT, not of TensorRT-RTX"
                        if self.backend == "trt-rtx" else "")
                raise InputError(f"--{option} {getattr(self, option)!r}: expected one of "
                                 f"{', '.join(a for a in allowed if a)}{hint}")
        if self.name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            raise InputError(f"--name {self.name!r}: expected letters, digits, '.', '_' and '-', a folder's name in "
                             "the repository")
        if self.sequences is not None and self.sequences < 1:
            raise InputError(f"--sequences {self.sequences}: expected at least 1")
        if not 0 < self.idle_seconds < 1e9:
            raise InputError(f"--idle-seconds {self.idle_seconds:g}: expected more than 0")


@dataclass(frozen=True)
class _Subject:
    """What is served: the graph whose tensors it has, its file, and for a plan its profiles and limits."""

    entry: GraphEntry
    file: Path
    profiles: tuple[int, ...] = ()
    limits: dict[str, int] | None = None
    max_batch: int | None = None


def write_model(request: TritonRequest) -> dict[str, Any]:
    """Write one model of a repository; returns what the command reports. InputError for an export that Triton cannot
    serve, CheckError where the configuration would not suit the graph."""
    export = open_export(request.folder)
    name = request.name or _name_of(export)
    _check_place(export, request.out, request.out / name)
    _check_cache(export)
    subject = _plan(export, request) if request.backend == "trt" else _graph(export, request)
    sequences = request.sequences or int(export.data["max_batch"])
    max_batch = _max_batch(subject, request, sequences)
    config = model_config(name, BACKENDS[request.backend], subject.entry, max_batch=max_batch, sequences=sequences,
                          idle_seconds=request.idle_seconds, profiles=subject.profiles, device=request.device)
    source = text(config)
    judged = check(source, subject.entry if request.backend == "trt" else _entry_of(subject))
    facts = {"name": name, "folder": str(request.out / name), "export": str(request.folder.resolve()),
             "backend": config["backend"], "graph": subject.entry.name, "stateful": "sequence_batching" in config,
             "max_batch_size": config["max_batch_size"], "sequences": sequences,
             "idle_seconds": request.idle_seconds, "state_bytes": _state_bytes(subject),
             "limits": subject.limits, "checked": judged, "not_run": NOT_RUN, "notes": _notes(export, subject, request)}
    with new_folder(request.out / name, overwrite=request.overwrite, marker=MARKER) as folder:
        version = folder / "1"
        version.mkdir()
        facts["files"] = _files(export, subject, version, config["default_model_filename"])
        (folder / "config.pbtxt").write_text(source, encoding="utf-8")
        (folder / "README.md").write_text(readme(facts, subject.entry, export), encoding="utf-8")
        (folder / MARKER).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return facts | {"tensors": described(config)}


def _name_of(export: Export) -> str:
    """The export folder's own name, as far as a model's may have its letters."""
    own = export.folder.resolve().name
    name = re.sub(r"[^A-Za-z0-9._-]", "-", own).lstrip(".-_")
    if not name:
        raise InputError(f"{export.folder}: the folder's name {own!r} has no letter that a model's name may have; give "
                         "one with --name")
    return name


def _check_place(export: Export, out: Path, model: Path) -> None:
    """InputError where the repository would be, or would hold or replace, what is no model's folder."""
    real, own = out.resolve(), export.folder.resolve()
    if (real / MARKER).is_file() or (real / "config.pbtxt").is_file():
        raise InputError(f"--out {out}: a model's folder; expected the repository that holds it, and the models beside "
                         f"it: {real.parent}")
    if real == own or own in real.parents:
        raise InputError(f"--out {out}: {'is' if real == own else 'lies in'} the export {export.folder}; {_REPOSITORY}")
    if (real / manifest.NAME).is_file():
        raise InputError(f"--out {out}: holds an export ({manifest.NAME}); {_REPOSITORY}")
    place = model.resolve()
    if place == own or place in own.parents:
        raise InputError(f"{model}: {'is' if place == own else 'holds'} the export that is to be written there; choose "
                         "another repository with --out, or another --name")


def _check_cache(export: Export) -> None:
    if export.cache == "concat":
        raise InputError(f"{export.folder}: the concat form cannot be Triton's state: a state of variable size "
                         "begins with one row, which would stay in front of every present; export with --cache scatter "
                         "(Triton keeps the caches) or --cache append (the client does)")
    if export.cache_dtype == "fp8":
        raise InputError(f"{export.folder}: its cache is fp8, for which Triton has no type; export without "
                         "--cache-dtype, or with --cache-dtype int8")


def _graph(export: Export, request: TritonRequest) -> _Subject:
    """The ONNX graph: by default the decode one, which takes any number of new tokens and so prefills as well."""
    kinds = {g.kind for g in export.graphs}
    entry = export.graph(request.kind or ("decode" if "decode" in kinds else "prefill"), request.formulation)
    if operator_library.needed(entry.formulation):
        raise InputError(f"{entry.file}: has the operator mla::LatentAttention, which Triton's ONNX Runtime does not "
                         "know; expected a graph of ONNX's own operators: name one with --formulation qkt, or export "
                         "without --fused-decode")
    return _Subject(entry, export.folder / entry.file)


def _plan(export: Export, request: TritonRequest) -> _Subject:
    """The plan that was kept, by default one of both kinds. Its tensors are those of the graph it was built from."""
    from engines.records import UNIFIED, limits_of, open_engines

    engines = open_engines(export, "trt")
    wanted = request.kind or "decode"
    record = next((e for e in engines.engines if e.file and e.kind == UNIFIED), None) or engines.kept(wanted)
    if request.formulation:
        record = next((e for e in engines.engines if e.file and e.formulation == request.formulation
                       and wanted in e.serves), None)
    if record is None:
        raise InputError(f"{engines.folder}: no engine of {request.formulation or wanted} was kept; build it with: "
                         f"python -m engines build {export.folder} --backend trt --overwrite")
    entry = next(g for g in export.graphs if g.name == record.graph)
    most: dict[str, int] = {}
    for profile in record.profiles:
        most |= {n: max(v, most.get(n, 0)) for n, v in limits_of(profile).items()}
    return _Subject(entry, plan_path(export, "trt") / str(record.file), tuple(range(len(record.profiles))), most,
                    min(limits_of(profile)["B"] for profile in record.profiles))


def _max_batch(subject: _Subject, request: TritonRequest, sequences: int) -> int:
    """Sequences that a stateless request may hold: every profile of a plan must take them."""
    if subject.max_batch is None or _stateful(subject):
        return sequences
    if request.sequences is not None and sequences > subject.max_batch:
        raise InputError(f"--sequences {sequences}: the plan's profiles take up to {subject.max_batch} at once; build "
                         f"it with --max-batch {sequences} --prefill-batch {sequences}")
    return min(sequences, subject.max_batch)


def _stateful(subject: _Subject) -> bool:
    return any(s.name.startswith("latent_cache.") for s in subject.entry.inputs)


def _entry_of(subject: _Subject) -> GraphEntry:
    """What the graph's file itself says of its inputs and outputs."""
    names = {kind: name for name, kind in ONNX_OF_NAME.items()}
    graph = onnx.load(subject.file, load_external_data=False).graph

    def specs(values: Any) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(v.name, tuple(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim),
                                names[v.type.tensor_type.elem_type]) for v in values)

    e = subject.entry
    return GraphEntry(e.name, e.kind, e.formulation, e.prefill_form, e.default, e.file, specs(graph.input),
                      specs(graph.output))


def _state_bytes(subject: _Subject) -> int:
    """Bytes of one sequence's caches in Triton; 0 of a stateless model."""
    return sum(prod(d for d in s.shape if isinstance(d, int)) * NUMPY_OF_NAME[s.dtype].itemsize
               for s in subject.entry.inputs if s.name.startswith("latent_cache."))


def _files(export: Export, subject: _Subject, version: Path, name: str) -> dict[str, dict[str, Any]]:
    """Put the model and the weights that it names into the version's folder: the model copied, weights hard-linked
    where the file system can, since a runtime reads them beside the model alone."""
    shutil.copyfile(subject.file, version / name)
    files = {f"1/{name}": {"bytes": subject.file.stat().st_size, "how": "copied"}}
    if name.endswith(".plan"):
        return files
    places = external_places(export)
    model = onnx.load(subject.file, load_external_data=False)
    locations = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    for location in sorted(locations):
        real, target = places.get(location, export.folder / location).resolve(), version / location
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(real, target)
            how = "hard-linked"
        except OSError:
            shutil.copyfile(real, target)
            how = "copied"
        files[f"1/{location}"] = {"bytes": real.stat().st_size, "how": how}
    return files


def _notes(export: Export, subject: _Subject, request: TritonRequest) -> list[str]:
    """What one should know before relying on it."""
    stateful, found = _stateful(subject), list[str]()
    if stateful and request.backend == "trt":
        found.append("TensorRT updates a cache only in place, and Triton's TensorRT backend, as its source reads, "
                     "binds latent_cache and latent_cache_out to a buffer each: expect TensorRT to refuse the step; an "
                     "append export (the client holds the past, in CUDA shared memory) does not depend on it")
    if stateful and request.backend == "ort":
        found.append("Triton's ONNX Runtime backend copies an output state into its buffer, so a step writes all "
                     f"{_state_bytes(subject)} bytes of a sequence's caches, not its new rows alone")
    if export.dtype == "bf16" and request.backend == "ort":
        found.append("ONNX Runtime's CPU has no bfloat16 products: this model needs a GPU")
    if request.backend == "ort":
        found.append("the graph is of opset 24: Triton's ONNX Runtime must be 1.24 or newer")
    tokens = (subject.limits or {}).get("T")
    if tokens is not None:
        found.append(f"the plan takes up to {tokens} new tokens a request; for longer chunks build --layout unified, "
                     "or serve --kind prefill")
    return found
