"""An MLA held against the multi-head attention of the same width that it is: same function, another cache.

The MHA's K and V projections are the composed ones, W_UK·W_DKV and W_UV·W_DKV for every head, and the shared rotary
key is repeated for each. Where the latent has a norm the layer is not linear: its gain is composed in, and the one
scalar of each token, 1/rms of the latent, multiplies what the composed matrices give (validate/references/mha.py). In
float64 the two agree to rounding, over a prefill and decode steps, each over its own cache; an export's graphs are held
against the MHA as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.backends import BACKENDS
from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.export import ExportRequest
from exporter.manifest import Export, open_export
from exporter.signature import row_bytes
from exporter.source import open_model, open_source
from validate.ladder import Progress, check_source
from validate.metrics import Difference, Tolerance, compare, worst_of
from validate.parity import replay, verdict
from validate.part_session import runtime_of
from validate.quantised_weights import tolerance_of
from validate.references import ComposedMHA, NaiveMLA, load_tensors
from validate.references.decoder_tensors import open_decoder_tensors
from validate.traces import Trace, TraceMaker

TOLERANCE = Tolerance(1e-5, 1e-7)
PREFILL, STEPS = 24, 4

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One comparison with the MHA: of an attention's float64 MLA, or of a graph. `verdict` is the article's."""

    attention: str
    what: str
    rel: float
    max_abs: float
    mean_abs: float
    cosine: float
    worst: dict[str, Any] | None
    masks: dict[str, Any] | None
    where: str
    tolerance: float
    passed: bool
    verdict: str

    @classmethod
    def of(cls, attention: str, what: str, d: Difference, tolerance: Tolerance) -> Row:
        """A row from a comparison."""
        return cls(attention, what, d.rel, cosine=d.cosine, where=d.sentence, tolerance=tolerance.rel,
                   passed=d.within(tolerance), verdict=verdict(d.cosine), **d.figures())

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `pass` for `passed`."""
        data = asdict(self)
        data["pass"] = data.pop("passed")
        return data


@dataclass
class Comparison:
    """All rows, and what one token takes in the cache of one attention, in bytes of `dtype`."""

    model: str
    dtype: str
    mla_bytes: int
    mha_bytes: int
    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was compared, and all of it agrees."""
        return bool(self.rows) and all(r.passed for r in self.rows)

    @property
    def failure(self) -> str:
        """One line for a comparison that did not pass."""
        red = [r for r in self.rows if not r.passed]
        if not red:
            return "nothing was compared"
        first = red[0]
        return (f"{len(red)} of {len(self.rows)} differ from the MHA: {first.attention}, {first.what}: {first.where}; "
                f"the article's verdict: {first.verdict}")

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"pass": self.passed, "against": "mha", "model": self.model, "dtype": self.dtype,
                "cache_bytes_per_token": {"mla": self.mla_bytes, "mha": self.mha_bytes},
                "cache_ratio": self.mha_bytes / self.mla_bytes, "rows": [r.to_dict() for r in self.rows],
                "not_run": self.not_run}


def against_mha(what: str, *, layer: int | None = None, seed: int = 0, allow_pickle: bool = False,
                max_context: int | None = None, progress: Progress = lambda message, share=None: None) -> Comparison:
    """Hold every attention of an export, or of a MODEL, against its MHA. InputError where its source cannot be read."""
    made = open_export(Path(what)) if (Path(what) / "manifest.json").is_file() else None
    if made is not None:
        check_source(made)
        config, context, dtype, name = made.config, made.max_context, made.dtype, str(made.data["model"])
        attentions = _of_export(made)
    else:
        config, attentions = _of_model(what, layer, seed, allow_pickle)
        context, dtype, name = min(max_context or 4096, config.max_position_embeddings), "fp16", what
    found = Comparison(name, dtype, row_bytes(config, dtype), config.expanded_dim * DTYPES[dtype].itemsize)
    causal = made is None or made.cache != "none"
    for label, tensors in attentions:
        progress(label)
        difference = compared(config, tensors, tensors, max_context=context, seed=seed, causal=causal)
        found.rows.append(Row.of(label, "MLA, float64", difference, TOLERANCE))
    if made is not None:
        _graphs(made, found, seed, progress)
    return found


def compared(config: MLAConfig, tensors: Tensors, mha_tensors: Tensors, *, max_context: int, seed: int = 0,
             causal: bool = True) -> Difference:
    """float64 MLA of `tensors` against the MHA composed of `mha_tensors`: a prefill, then decode steps, each over its
    own cache (without a past where the attention is bidirectional)."""
    rng = np.random.default_rng([seed, 19])
    options: dict[str, Any] = {"max_context": max_context, "causal": causal}
    mla, mha = NaiveMLA(config, tensors, **options), ComposedMHA(config, mha_tensors, **options)
    first = min(PREFILL, max(1, max_context // 2))
    steps, differences = [first, *[1] * min(STEPS, max_context - first)], []
    for i, tokens in enumerate(steps if causal else steps[:1]):
        x = torch.from_numpy(rng.standard_normal((2, tokens, config.hidden_size)))
        found, expected = mla.forward(x).numpy(), mha.forward(x).numpy()
        differences.append(compare(found, expected).placed(("sequence", "token", "column")).behind("step", i))
    return worst_of(differences)


def _of_export(made: Export) -> Iterator[tuple[str, Tensors]]:
    if made.contract == "layer":
        yield "attention", load_tensors(made.data["source"], made.config)
        return
    source, decoder = open_decoder_tensors(made.data["source"], made.decoder), made.decoder
    for layer in range(*made.data["layers"]):
        yield from _scopes(source, decoder.attention_scopes(layer), layer)


def _scopes(source: Any, scopes: Sequence[str], layer: int) -> Iterator[tuple[str, Tensors]]:
    for half, scope in enumerate(scopes):
        tensors = {n: t for n, t in source.within(scope).items() if not n.startswith("rotary_emb.")}
        yield f"layer {layer}{f', attention {half}' if len(scopes) > 1 else ''}", tensors


def _of_model(what: str, layer: int | None, seed: int, allow_pickle: bool
              ) -> tuple[MLAConfig, Iterator[tuple[str, Tensors]]]:
    request = ExportRequest(what, Path("."), layer=layer, seed=seed, allow_pickle=allow_pickle)
    if request.whole:
        model = open_model(what, seed=seed)
        source, decoder = open_decoder_tensors(model.record, model.decoder), model.decoder
        return decoder.attention, (each for n in range(decoder.layers)
                                   for each in _scopes(source, decoder.attention_scopes(n), n))
    one = open_source(what, layer=layer, seed=seed, allow_pickle=allow_pickle)
    return one.config, iter([("attention" if layer is None else f"layer {layer}",
                              load_tensors(one.record, one.config))])


def _graphs(made: Export, found: Comparison, seed: int, progress: Progress) -> None:
    """The default graphs of one attention against the MHA, at the compute dtype's tolerance."""
    if made.contract != "layer":
        found.not_run.append("graphs: not run: a model's are held against whole decoders; climb without --against")
        return
    if made.quantised_cache or made.data["weights"].get("quantised"):
        found.not_run.append("graphs: not run: codes of weights or rows have an error of their own; climb without "
                             "--against")
        return
    try:
        runtime = runtime_of(made)
        kinds = sorted({g.kind for g in made.graphs}, reverse=True)
        sessions = {kind: BACKENDS[runtime].open(made, made.graph(kind)) for kind in kinds}
    except InputError as error:
        found.not_run.append(f"graphs: not run: {error}")
        return
    progress(f"graphs in {runtime}")
    trace, tensors = _trace(made, seed), load_tensors(made.data["source"], made.config)
    mha = ComposedMHA(made.config, tensors, max_context=made.max_context, causal=made.cache != "none")
    outputs, _ = replay(trace, sessions, made)
    for kind in kinds:
        differences = []
        mha.reset(trace.batch)
        for i, (step, output) in enumerate(zip(trace.steps, outputs, strict=True)):
            expected = mha.forward(torch.from_numpy(step.hidden.astype(np.float64))).numpy()
            if step.kind == kind:
                differences.append(compare(output, expected).placed(("sequence", "token", "column")).behind("step", i))
        if differences:
            found.rows.append(Row.of("attention", f"{made.graph(kind).name}, {runtime}", worst_of(differences),
                                     tolerance_of(made)))
    for session in sessions.values():
        session.close()


def _trace(made: Export, seed: int) -> Trace:
    causal = made.cache != "none"
    maker = TraceMaker(made.config, load_tensors(made.data["source"], made.config), max_context=made.max_context,
                       dtype=made.dtype, seed=seed, causal=causal)
    first = min(PREFILL, max(1, made.max_context // 2))
    steps = min(STEPS, made.max_context - first) if causal else 0
    return maker.trace("mha", "decode", [("prefill", first, None), *[("decode", 1, None)] * steps], batch=2)
