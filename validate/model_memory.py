"""Memory of a whole model, predicted and measured: caches of all attentions, weights, ONNX Runtime's peak of a step.

Formulas say what a cache holds per token and at batch x context, as latent rows, as expanded K and V and as an MHA of
the same width. A decode step and a prefill chunk really run, each in a process of its own. What cannot is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engines import lint
from engines.measure import available_memory, measure
from engines.records import built_backends, open_engines
from exporter.errors import CheckError
from exporter.manifest import Export, GraphEntry
from validate.memory import MemoryLimits, article_case, per_token, unmeasurable

KINDS = ("latent", "expanded", "mha")


def report(made: Export, limits: MemoryLimits, progress: Callable[..., None] = lambda message, share=None: None
           ) -> dict[str, Any]:
    """Everything, as one JSON-ready dictionary with the keys of the one-attention report."""
    figures, tokens = per_token(made.config, made.dtype, made.cache_dtype), limits.batch * limits.context
    not_run: list[str] = []
    weights = made.data["weights"]
    return {
        "model": made.data["model"], "dtype": made.dtype, "cache": made.cache, **figures,
        "layers": made.attentions, "attentions": made.attentions, "decoder_layers": len(range(*made.data["layers"])),
        "batch": limits.batch, "context": limits.context,
        "model_bytes_per_token": {k: figures[f"{k}_bytes_per_token"] * made.attentions for k in KINDS},
        "cache_bytes": {k: figures[f"{k}_bytes_per_token"] * made.attentions * tokens for k in KINDS},
        "cache_bytes_per_layer": {k: figures[f"{k}_bytes_per_token"] * tokens for k in KINDS},
        "weights": {"mode": weights["mode"], "bytes": weights["bytes"], "written_bytes": weights["written_bytes"],
                    "parameters": int(made.data["source_parameters"])},
        "article": article_case(), "eager": [], "engines": _engines(made, not_run),
        "ort": _processes(made, limits, not_run, progress), "not_run": not_run}


def _engines(made: Export, not_run: list[str]) -> list[dict[str, Any]]:
    """The figures of engines that lie in the export's folder; none are built here."""
    names = built_backends(made)
    if not names:
        not_run.append("engines: none built; `python -m engines build` records what theirs take")
    return [{"backend": name, **asdict(e)} for name in names for e in open_engines(made, name).engines]


def _processes(made: Export, limits: MemoryLimits, not_run: list[str], progress: Callable[..., None]
               ) -> list[dict[str, Any]]:
    """Peak of one decode step and of one prefill chunk of the default graphs, at batch 1."""
    reason = unmeasurable(made)
    if reason:
        not_run.append(reason)
        return []
    rows = []
    for kind, tokens in (("decode", 1), ("prefill", limits.chunk)):
        graph, sizes = made.graph(kind), {"B": 1, "T": tokens, "S": limits.ort_context}
        if made.cache == "scatter":  # past and new rows share S_max
            sizes.pop("S")
        progress(f"ort: {graph.name}")
        row = _process(made, graph, sizes, not_run)
        if row is not None:
            rows.append(row)
    return rows


def _process(made: Export, graph: GraphEntry, sizes: dict[str, int], not_run: list[str]) -> dict[str, Any] | None:
    path = made.folder / graph.file
    predicted, weights, free = lint.live_peak(path, sizes), int(made.data["weights"]["bytes"]), available_memory()
    if predicted + 2 * weights > free:
        at = ", ".join(f"{name} {size}" for name, size in sizes.items())
        not_run.append(f"ort, {graph.name} at {at}: not run: needs about {(predicted + 2 * weights) >> 20} MiB, "
                       f"{free >> 20} MiB are free; give a smaller --max-context or --chunk")
        return None
    try:
        found = measure(path, graph.inputs, graph.outputs, sizes)
    except CheckError as error:
        not_run.append(f"ort, {graph.name}: not run: {error}")
        return None
    return {"subject": f"model, {graph.kind}", "graph": graph.name, "sizes": sizes, "loaded_bytes": found.loaded_bytes,
            "io_bytes": found.io_bytes, "activation_bytes": found.activation_bytes, "predicted_bytes": predicted}
