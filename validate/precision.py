"""What each way to store weights and cache costs in accuracy and saves in bytes, of one attention, side by side.

Every variant is exported aside and decodes a few tokens behind a past of `context` rows; the float64 reference of the
source, nothing rounded and nothing quantised, says what is right. The past is the reference's own rows, rounded to what
a variant's cache holds; inputs are rounded to its compute dtype. The arithmetic is emulated: the rounding interpreter
rounds every tensor to its dtype, and no kernel is modelled; but ONNX Runtime's own variants ran in it. Engines are
built where TensorRT-RTX is installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import trt
from engines.backends import open_session
from engines.cache import LatentCache
from exporter.dtypes import DTYPES
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from exporter.quantise import ACCURACY_LEVELS
from exporter.signature import Range, profile
from exporter.source import open_source
from validate import quantised_cache
from validate.metrics import compare
from validate.references import NaiveMLA, load_tensors

EMULATED = ("emulated: the rounding interpreter rounds every tensor to its declared dtype; no kernel is modelled, "
            "nothing ran on a GPU; variants named ORT ran in ONNX Runtime on the CPU")
ON_CPU = "exported for ONNX Runtime"
POSITIONS = 4  # tokens decoded behind the past, one by one
BACKEND = "trt-rtx"


@dataclass(frozen=True)
class Variant:
    """One row: its name, and the options of its export. Without a `dtype` of its own it takes the one asked for.
    `backend` is what answers: kernels of its own count where they round what the graph does not say."""

    name: str
    options: Mapping[str, Any]
    backend: str = "interpreter"

    def request(self, model: str, out: Path, dtype: str, **common: Any) -> ExportRequest:
        """The export of this variant."""
        return ExportRequest(model, out, **{"dtype": dtype, "target": BACKEND, **common, **self.options})


# a row here is a row of the table
VARIANTS = (
    Variant("fp32", {"dtype": "fp32"}),
    Variant("fp16", {"dtype": "fp16"}),
    Variant("bf16", {"dtype": "bf16"}),
    Variant("fp8 weights", {"quantise": "fp8"}),
    Variant("int4 weights", {"quantise": "int4"}),
    Variant("fp8 cache", {"cache_dtype": "fp8"}),
    Variant("int8 cache", {"cache_dtype": "int8"}),
    Variant("fp8 weights, fp8 cache", {"quantise": "fp8", "cache_dtype": "fp8"}),
    Variant("fp8 weights, int8 cache", {"quantise": "fp8", "cache_dtype": "int8"}),
    *(Variant(f"{scheme} weights, ORT level {level}",
              {"quantise": scheme, "target": "ort", "dtype": "fp32", "accuracy_level": level}, "ort")
      for scheme in ("int8", "int4") for level in ACCURACY_LEVELS),
)


@dataclass
class Outcome:
    """One variant. Errors are of attn_output against the float64 reference, the worst of all seeds (`rel` is max|a - b|
    / std, as everywhere; the mean error is of all elements); `not_built` says why there is no engine."""

    name: str
    dtype: str
    weight_bytes: int
    cache_bytes_per_token: int
    rel: float = 0.0
    max_abs: float = 0.0
    mean_abs: float = 0.0
    cosine: float = 1.0
    seeds: list[dict[str, float]] = field(default_factory=list)
    plan_bytes: int | None = None
    activation_bytes: int | None = None
    not_built: str | None = None

    def add(self, seed: int, found: np.ndarray, expected: np.ndarray) -> None:
        """The errors of one more seed."""
        d = compare(found, expected)
        mean = float(np.abs(found.astype(np.float64) - expected).mean())
        self.seeds.append({"seed": seed, "rel": d.rel, "max_abs": d.max_abs, "mean_abs": mean, "cosine": d.cosine})
        self.rel, self.max_abs = max(self.rel, d.rel), max(self.max_abs, d.max_abs)
        self.mean_abs, self.cosine = max(self.mean_abs, mean), min(self.cosine, d.cosine)


def survey(model: str, *, layer: int | None = None, context: int = 4096, seeds: int = 3, dtype: str = "fp16",
           allow_pickle: bool = False, variants: Sequence[Variant] = VARIANTS,
           progress: Callable[..., None] = lambda message, share=None: None) -> list[Outcome]:
    """Every variant of one attention. InputError for a context that the model does not have, or no seeds."""
    if context < 1 or seeds < 1:
        raise InputError(f"--context {context}, --seeds {seeds}: expected at least 1")
    trained = open_source(model, layer=layer, allow_pickle=allow_pickle).config.max_position_embeddings
    if context + POSITIONS > trained:
        raise InputError(f"--context {context}: {model} has {trained} positions and {POSITIONS} tokens come behind the "
                         f"past; give at most {trained - POSITIONS}")
    common = {"layer": layer if Path(model).is_dir() else None, "scope": "layer", "max_context": context + POSITIONS,
              "allow_pickle": allow_pickle, "cache": "append"}
    outcomes: dict[str, Outcome] = {}
    for seed in range(seeds):
        exam: _Exam | None = None
        for variant in variants:
            progress(f"seed {seed}: {variant.name}")
            with tempfile.TemporaryDirectory(prefix="mla-precision-") as folder:
                made = export(variant.request(model, Path(folder) / "export", dtype, seed=seed, **common))
                exam = exam or _Exam(made, context, seed)
                if variant.name not in outcomes:
                    outcomes[variant.name] = _sized(variant, made, context)
                outcomes[variant.name].add(seed, exam.answered_by(made, variant.backend), exam.expected)
    return list(outcomes.values())


class _Exam:
    """Inputs [1, context + POSITIONS, D], the reference's rows of the past, and what it says of the tokens behind."""

    def __init__(self, made: Export, context: int, seed: int) -> None:
        self.context, rng = context, np.random.default_rng([seed, 23])
        hidden = rng.standard_normal((1, context + POSITIONS, made.config.hidden_size)).astype(np.float32)
        reference = NaiveMLA(made.config, load_tensors(made.data["source"], made.config), max_context=made.max_context)
        wide = torch.from_numpy(hidden.astype(np.float64))
        past = reference.new_rows(wide[:, :context])
        reference.seed_rows(past, [context])
        self.hidden, self.past = hidden[:, context:], past.numpy()
        steps = [reference.forward(wide[:, context + t:context + t + 1]) for t in range(POSITIONS)]
        self.expected = torch.cat(steps, dim=1).numpy()

    def answered_by(self, made: Export, backend: str) -> np.ndarray:
        """The outputs [1, POSITIONS, D] of an export's default decode graph in a backend."""
        cache, outputs = LatentCache(made, 1), list[np.ndarray]()
        quantised_cache.load(made, cache, self.past, np.array([self.context]))
        inputs = self.hidden.astype(DTYPES[made.dtype].numpy)
        with open_session(made, "decode", backend) as session:
            for t in range(POSITIONS):
                found = session.infer({"hidden_states": inputs[:, t:t + 1], **cache.feed()})
                cache.commit(found, 1)
                outputs.append(found["attn_output"])
        return np.concatenate(outputs, axis=1)


def _sized(variant: Variant, made: Export, context: int) -> Outcome:
    """Bytes of a variant, and of its decode engine."""
    outcome = Outcome(variant.name, made.dtype, int(made.data["weights"]["bytes"]), made.cache_bytes_per_token)
    if made.data["target"] == "ort":
        return replace(outcome, not_built=ON_CPU)
    graph = made.graph("decode")
    ranges = {"B": Range(1, 1, 1), "T": Range(1, 1, 1), "S": Range(1, context, made.max_context)}
    try:
        if not trt.available(BACKEND):
            trt.load(BACKEND)  # raises with the install command
        plan = trt.build(BACKEND, made.folder / graph.file, [profile(graph.inputs, ranges)])
        outcome.plan_bytes, outcome.activation_bytes = plan.plan_bytes, plan.activation_bytes
    except (InputError, CheckError) as error:
        outcome.not_built = str(error)
    return outcome
