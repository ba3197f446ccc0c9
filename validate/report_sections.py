"""What each section of a report runs, and the data that it gives: the commands' own, with what a table sums up."""

from __future__ import annotations

import os
import platform
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import build_tables, operator_library, predict
from engines.backends import backend
from engines.records import Engines, built_backends, inspected, limits_of
from exporter import console
from exporter.errors import InputError
from exporter.inspection import weight_notes
from exporter.manifest import Export, GraphEntry, library_versions
from exporter.rope import softmax_scale
from validate.memory import MemoryLimits
from validate.memory_curve import CurveRequest

LIBRARIES = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-cu13", "tensorrt-rtx-cu13",
             "polygraphy", "transformers", "numpy", "ml_dtypes", "safetensors", "matplotlib")


@dataclass
class Asked:
    """The export, and the options that sections take."""

    made: Export
    seed: int
    batch: int | None
    chunk: int
    contexts: str | None
    budget: float
    progress: Callable[..., None] = lambda message, share=None: None

    def check(self) -> None:
        """Options that no export could take are refused before anything runs."""
        self.curve()

    def curve(self) -> CurveRequest:
        """What the memory curve is asked."""
        return CurveRequest.of(self.made, self.contexts, self.batch, self.chunk, self.budget)

    @property
    def folder(self) -> Path:
        """The export's, as it was given."""
        return self.made.folder


@dataclass
class Found:
    """A section's end: pass, fail, done (nothing is judged) or not run; `says`, its words in the verdict."""

    state: str
    says: str
    data: dict[str, Any] | None
    not_run: list[str] = field(default_factory=list)


def _judged(passed: bool, says: str, data: dict[str, Any], not_run: list[str]) -> Found:
    return Found("pass" if passed else "fail", says, data, not_run)


def configuration(asked: Asked) -> Found:
    """The manifest's facts, and the sizes of the attention."""
    made, c = asked.made, asked.made.config
    kept = ("model", "contract", "dtype", "cache", "target", "prefill", "absorb", "merge_q", "causal", "max_batch",
            "max_context", "opset", "logits")
    w = made.data["weights"]
    plain = f"weights {console.size(w['bytes'])}"  # a figure of its own
    data: dict[str, Any] = {
        **{key: made.data[key] for key in kept if key in made.data}, "cache_dtype": made.cache_dtype,
        "config": c.to_dict(), "row_dim": c.row_dim, "softmax_scale": softmax_scale(c), "attentions": made.attentions,
        "weights": {"mode": w["mode"], "bytes": w["bytes"], "written_bytes": w["written_bytes"],
                    "scheme": (w.get("quantised") or {}).get("scheme")},
        "notes": [note for note in weight_notes(made.data) if note != plain]}
    if made.contract == "model":
        d = made.decoder
        data["decoder"] = {"layers": list(made.data["layers"]), "of_layers": d.layers, "vocab_size": d.vocab_size,
                           "intermediate_size": d.intermediate_size, "experts": d.moe.n_routed_experts if d.moe else 0,
                           "experts_per_token": d.moe.num_experts_per_tok if d.moe else 0,
                           "parameters": int(made.data["source_parameters"])}
    return Found("done", "", data)


def graphs(asked: Asked) -> Found:
    """Inputs, outputs, operators and size of every graph."""
    return Found("done", "", {"graphs": [_graph(asked.made, g) for g in asked.made.graphs]})


def _graph(made: Export, graph: GraphEntry) -> dict[str, Any]:
    import onnx

    path = made.folder / graph.file
    model = onnx.load(path, load_external_data=False)
    operators = Counter(f"{n.domain}.{n.op_type}" if n.domain not in ("", "ai.onnx") else n.op_type
                        for n in model.graph.node)
    entry = graph.to_dict()
    return {**{key: entry[key] for key in ("name", "kind", "formulation", "prefill_form", "default", "file")},
            "inputs": entry["inputs"], "outputs": entry["outputs"], "nodes": len(model.graph.node),
            "bytes": path.stat().st_size, "operators": [{"operator": name, "count": count}
                                                        for name, count in operators.most_common()]}


def parity(asked: Asked) -> Found:
    """The ladder of the folder, each runtime and graph by the rung that came closest to failing."""
    from validate import parity as ladder_module

    ladder = ladder_module.check_folder(asked.folder, asked.seed, asked.progress, find_layer=True)
    climbed = ladder.to_dict()
    rungs = climbed["rungs"]
    counted = [r for r in rungs if r["counted"]]
    failed = sum(not r["pass"] for r in counted)
    data = {**climbed, "groups": rung_groups(rungs), "counted": len(counted), "failed": failed,
            "not_counted": len(rungs) - len(counted)}
    says = f"{failed} of {len(counted)} rungs FAIL" if failed else f"{len(counted)} rungs pass"
    if ladder.layers is not None:
        says = f"{says}; {ladder.layers.verdict}"
    if not any(r["graph"] not in ("", "-") for r in rungs):
        return Found("not run", "", data, [*ladder.not_run, "Parity: no graph was checked"])
    return _judged(ladder.passed, says if counted else ladder.failure, data, ladder.not_run)


def rung_groups(rungs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a runtime and graph: the rung that came closest to failing, of how many, and its share of the
    tolerance."""
    found: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for r in rungs:
        name = r["name"] if r["graph"] == "-" else r["name"].split("/")[0]
        found.setdefault((name, r["graph"], r["counted"]), []).append(r)

    def share(r: dict[str, Any]) -> float:
        return float(r["rel"] / r["tolerance"]) if r["tolerance"] > 0 else 0.0

    groups = []
    for (_, graph, counted), members in found.items():
        worst = max(members, key=lambda r: (not r["pass"], share(r)))
        groups.append({"rung": worst["name"], "graph": graph, "counted": counted, "of": len(members),
                       "failed": sum(not r["pass"] for r in members), "rel": worst["rel"], "cosine": worst["cosine"],
                       "tolerance": worst["tolerance"], "share": share(worst), "pass": worst["pass"],
                       "note": worst["note"]})
    return groups


def absorption(asked: Asked) -> Found:
    """The audit of every graph."""
    from validate import absorption as audit_module

    if asked.made.cache == "none":
        raise InputError(f"{asked.folder} has no cache, so there is nothing to absorb into")
    verdicts = audit_module.audit(asked.folder, progress=asked.progress)
    failed = [v.graph for v in verdicts if not v.passed]
    says = f"absorption NOT in effect in {', '.join(failed)}" if failed else "absorption in effect"
    return _judged(not failed, says, audit_module.to_dict(verdicts), [])


def doctor(asked: Asked) -> Found:
    """What the doctor finds; what it could not examine is named in its section."""
    from validate.doctor import DoctorRequest, examine

    found = examine(DoctorRequest(str(asked.folder), seed=asked.seed), asked.progress)
    data = found.to_dict()
    faults = list(dict.fromkeys(f["name"] for f in data["findings"] if f["severity"] == "fault"))
    says = f"the doctor finds {', '.join(faults)}" if faults else "the doctor finds no fault"
    return _judged(found.passed, says, data, [])


def memory(asked: Asked) -> Found:
    """Caches by formula, processes and engines by measurement."""
    from validate import memory as memory_module

    limits = MemoryLimits.of(asked.made, asked.batch, None, asked.chunk)
    data = memory_module.report(asked.made, limits, asked.progress)
    return Found("done", "", data, data["not_run"])


def curve(asked: Asked) -> Found:
    """Memory over context."""
    from validate import memory_curve

    data = memory_curve.curves(asked.made, asked.curve(), asked.progress).to_dict()
    return Found("done", "", data, data["not_run"])


def engines(asked: Asked) -> Found:
    """What the builders of every backend recorded, beside the prediction; damaged and stale ones are faults."""
    made = asked.made
    names = built_backends(made)
    if not names:
        return Found("not run", "", {"backends": []}, ["engines: none built; `python -m engines build` records what "
                                                       "theirs take"])
    opened, problems = inspected(made, names)
    data = {"backends": [_backend(made, engines) for engines in opened], "problems": problems}
    says = f"engines of {', '.join(problems)} damaged or stale" if problems else ""
    return Found("fail" if problems else "done", says, data)


def _backend(made: Export, opened: Engines) -> dict[str, Any]:
    told = build_tables.to_dict(opened)
    name, version = told["backend"], opened.data.get("builder")
    for e, record in zip(told["engines"], opened.engines, strict=True):
        e["of_predicted"] = record.activation_bytes / record.predicted_bytes if record.predicted_bytes else None
        graph = next(g for g in made.graphs if g.name == record.graph)
        found = [p for sizes in map(limits_of, record.profiles) if backend(name).tensorrt
                 and (p := predict.predicted(made, graph, sizes, name, version))]
        most = max(found, key=lambda p: p.bytes, default=None)
        e["explained"] = predict.explained(most, record.activation_bytes) if most else None
    return told


def versions(asked: Asked) -> Found:
    """What ran here, and the commands that show the same."""
    given, made = shlex.quote(str(asked.folder)), asked.made
    source = made.data["source"]
    arguments = [Path(a).name if a == source.get("path") or i == 0 else a
                 for i, a in enumerate(made.data.get("arguments", []))]
    commands = [f"python -m exporter export {shlex.join(arguments)} --out {given}"] if arguments else []
    if any(operator_library.needed(graph.formulation) for graph in made.graphs):
        commands.append("python -m engines operator --build")
    for name in built_backends(made):
        sizes = _largest(made, name)
        commands.append(f"python -m engines build {given} --backend {name}{sizes}")
    q = asked.curve()
    grid = ",".join(map(str, q.contexts))
    batch = "" if asked.batch is None else f" --max-batch {asked.batch}"
    commands += [f"python -m validate parity {given} --seed {asked.seed}", f"python -m validate absorption {given}",
                 f"python -m validate doctor {given} --seed {asked.seed}",
                 f"python -m validate memory {given}{batch} --chunk {q.chunk} --contexts {grid} --budget {q.budget:g}",
                 f"python -m engines inspect {given}", f"python -m validate report {given}"]
    return Found("done", "", {"libraries": library_versions(*LIBRARIES), "platform": _platform(), "commands": commands})


def _largest(made: Export, name: str) -> str:
    """The sizes that a backend's engines were built for, as options."""
    limits: dict[str, int] = {}
    for e in (e for found in inspected(made, [name])[0] for e in found.engines):
        for kind, profile in zip(e.serves, e.profiles, strict=False):
            for symbol, option in (("B", "--max-batch"), ("T", "--chunk"), ("S", "--max-context")):
                if symbol in profile and (symbol, kind) not in (("B", "prefill"), ("T", "decode")):
                    limits[option] = max(limits.get(option, 0), profile[symbol][2])
    return "".join(f" {option} {limits[option]}" for option in ("--max-batch", "--max-context", "--chunk")
                   if option in limits)


def _platform() -> dict[str, str]:
    """The processor's name, its threads, the system, and the GPU if there is one."""
    import torch

    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines()
                 if line.startswith("model name")]
        processor = names[0] if names else processor
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"processor": processor, "threads": str(os.cpu_count()), "system": platform.platform(aliased=True),
            "gpu": gpu}


