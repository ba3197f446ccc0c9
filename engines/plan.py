"""What a model will need before anything is built: weights, cache, activation, what fits a GPU, the floor of a step.

From a configuration alone: sizes are counted, activation is predicted (engines/predict.py), times are the least that a
GPU's bandwidth and throughput allow. Two TensorRT engines, decode and prefill, each hold the weights, a unified one
holds them once. A model that is too large is spread by layers (`--layers A:B` of the export), so a GPU's share is whole
layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from engines import roofline
from engines.gpus import GPU, gpu
from engines.predict import Prediction, Subject, coefficients, known, largest_tensor, predict
from exporter import manifest
from exporter.checkpoint import read_config, read_json
from exporter.decoder_config import DecoderConfig, layer_shapes, tensor_shapes
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.families import decoder_from_hf
from exporter.formulations import choose
from exporter.moe_graph import MAX_ELEMENTS, dense_from, experts_form, stacks
from exporter.presets import preset_decoder
from exporter.quantise import SCHEMES, Scheme, matrix_bytes, scheme_for, stored_scheme
from exporter.signature import CACHE_DTYPES, CACHE_FORMS, row_bytes

CONTEXTS = (2048, 8192, 32768, 131072)
BATCHES = (1, 4, 16, 64)
WAYS = ("decode", "both", "unified")  # a decode engine alone; with a prefill engine; one engine with both profiles
CODED = ("attention projections", "experts", "shared experts", "dense FFN")  # what --quantise makes codes of
MOST = 1 << 16  # sequences: beyond that no one asks
RESERVE_SHARE, RESERVE_LEAST = 0.05, 1e9
BUILD_GBS = 0.25  # weights per second that a build gets through, seen on two CPU cores (0.1 to 0.5)
HOST_COPIES = 2.2  # of an engine's weights that a build holds at its peak, seen for 1.2 GB of them


@dataclass(frozen=True)
class PlanRequest:
    """What `python -m engines plan` was asked for."""

    model: str
    gpu: str | None = None
    memory: float | None = None
    max_batch: int = 8
    max_context: int | None = None
    chunk: int = 512
    dtype: str | None = None
    cache: str | None = None
    cache_dtype: str | None = None
    quantise: str | None = None
    reserve: float | None = None

    def __post_init__(self) -> None:
        if (self.gpu is None) == (self.memory is None):
            raise InputError("plan: expected one of --gpu NAME and --memory GB")
        for name in ("memory", "max_batch", "max_context", "chunk", "reserve"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf") and not (name == "reserve" and value == 0):
                raise InputError(f"--{name.replace('_', '-')} {value}: expected a positive number")
        for name, allowed in (("dtype", tuple(DTYPES)), ("cache", CACHE_FORMS), ("cache_dtype", CACHE_DTYPES),
                              ("quantise", tuple(SCHEMES))):
            if getattr(self, name) not in (None, *allowed):
                raise InputError(f"--{name.replace('_', '-')} {getattr(self, name)!r}: expected one of "
                                 f"{', '.join(allowed)}")


@dataclass(frozen=True)
class Model:
    """A decoder as it would be exported."""

    name: str
    decoder: DecoderConfig
    dtype: str
    cache: str
    cache_dtype: str | None = None
    scheme: Scheme | None = None

    def __post_init__(self) -> None:
        if self.cache_dtype and self.cache != "append":
            raise InputError(f"--cache-dtype {self.cache_dtype} with the {self.cache} form: only the append form has "
                             "quantised rows")

    @property
    def row_bytes(self) -> int:
        """One token's latent row in one attention."""
        return row_bytes(self.decoder.attention, self.dtype, self.cache_dtype)

    @property
    def attentions(self) -> int:
        """Attentions, and so latent caches, of all layers."""
        return self.decoder.layers * self.decoder.attentions_per_layer

    @cached_property
    def layer_bytes(self) -> list[dict[str, int]]:
        """Per layer, the bytes of its parts."""
        return [_by_part(dict(layer_shapes(self.decoder, i)), self.dtype, self.scheme)
                for i in range(self.decoder.layers)]

    @cached_property
    def ends(self) -> dict[str, int]:
        """Embedding, final norm and head. A tied head is the embedding: one GPU holds it once."""
        shapes = tensor_shapes(self.decoder)
        return _by_part({n: s for n, s in shapes.items() if not n.startswith("model.layers.")}, self.dtype, self.scheme)

    @property
    def kv_b(self) -> int:
        """What an expanded prefill adds to the weight file, for one attention: kv_b_proj as it is."""
        c = self.decoder.attention
        return c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank * (
            DTYPES[self.dtype].itemsize)


def _by_part(shapes: dict[str, tuple[int, ...]], dtype: str, scheme: Scheme | None) -> dict[str, int]:
    """Bytes by part, from canonical tensor names. The router stays in float32; `scheme` makes codes of what is left
    when kv_b, embedding, head (TensorRT's), norms and router are taken away."""
    found: dict[str, int] = {}
    coded: tuple[str, ...] = (*CODED, "head") if scheme and scheme.operator == "MatMulNBits" else CODED
    widths = {shape[-1] for name, shape in shapes.items() if ".experts." in name}
    if scheme and not scheme.alike(*widths):
        coded = tuple(part for part in coded if part != "experts")
    for name, shape in shapes.items():
        rows = (("embed_tokens", "embedding"), ("lm_head", "head"), ("kv_b_proj", "W_UK and W_UV, absorbed"),
                ("self_attn", "attention projections"), (".experts.", "experts"), ("shared_experts", "shared experts"),
                ("mlp.gate.", "router"), ("mlp.router.", "router"), ("mlp", "dense FFN"))
        # a norm's weight is one row
        part = "norms" if "norm" in name else next((p for key, p in rows if key in name), "norms")
        codes = scheme if part in coded and len(shape) > 1 else None
        found[part] = found.get(part, 0) + matrix_bytes(shape, "fp32" if part == "router" else dtype, codes)
    return found


def resolve(request: PlanRequest) -> Model:
    """MODEL: a preset, a checkpoint folder, its config.json, or a folder that was exported from one."""
    path = Path(request.model)
    dtype, cache, narrow = request.dtype or "fp16", request.cache or "append", request.cache_dtype
    codes = None if request.quantise is None else scheme_for(request.quantise,
                                                             "ort" if request.quantise == "int8" else "trt")
    if (path / manifest.NAME).is_file():
        made = manifest.open_export(path)
        own = made.cache_dtype if made.quantised_cache else None
        stored = made.data["weights"].get("quantised")
        return Model(made.data["model"], made.decoder, request.dtype or made.dtype, request.cache or made.cache,
                     narrow or own, codes or (stored and stored_scheme(stored, made.data["target"])))
    if path.is_dir():
        return Model(path.name, decoder_from_hf(read_config(path), str(path / "config.json")), dtype, cache, narrow,
                     codes)
    if path.is_file():
        return Model(path.parent.name or path.name, decoder_from_hf(read_json(path), str(path)), dtype, cache, narrow,
                     codes)
    if "/" in request.model or path.suffix == ".json":
        raise InputError(f"MODEL {request.model!r} does not exist; expected a preset, a checkpoint folder, its "
                         "config.json, or an exported folder")
    return Model(request.model, preset_decoder(request.model), dtype, cache, narrow, codes)


class Planner:
    """The answers of one plan: a model on one kind of device."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.model = request, resolve(request)
        self.gpu: GPU | None = gpu(request.gpu) if request.gpu else None
        self.memory = 1e9 * (self.gpu.memory_gb if self.gpu else request.memory or 0)
        asked = request.reserve
        self.reserve = max(RESERVE_LEAST, RESERVE_SHARE * self.memory) if asked is None else 1e9 * asked
        if self.reserve >= self.memory:
            raise InputError(f"--reserve {self.reserve / 1e9:g}: all of the memory, {self.memory / 1e9:g} GB")
        self.backend = self.gpu.backend if self.gpu else "trt-rtx"
        trained = self.model.decoder.attention.max_position_embeddings
        self.context = request.max_context or min(32768, trained)
        self._predicted: dict[Subject, Prediction | None] = {}
        self._leanest: dict[tuple[str, int, int, range], tuple[Subject, Prediction] | None] = {}
        self._last_slice: dict[str, int] = {}  # layers that the last GPU got, by way: the next is likely to get as many

    # --- activation ---------------------------------------------------------------------------------------------------

    def subjects(self, kind: str, batch: int, context: int, layers: range, unified: bool = False) -> list[Subject]:
        """What could run a kind of step over a slice of the layers, absorbed and (prefill) expanded. `unified`: by one
        engine with the other kind, which is an absorbed prefill graph."""
        m, r = self.model, self.request
        tokens = 1 if kind == "decode" else min(r.chunk, context)
        batch = batch if kind == "decode" else 1
        moe = m.decoder.moe
        sparse = moe is not None and any(layer in m.decoder.sparse_layers for layer in layers)
        hidden = m.decoder.attention.hidden_size
        most = max(batch * tokens, r.chunk) if unified else batch * tokens
        experts = experts_form(moe, self.backend, most, hidden) if moe is not None and sparse else ""
        forms = [f for form in ("absorbed", "expanded")[:1 if unified or kind == "decode" else 2]
                 for f in choose(m.decoder.attention, target=self.backend, dtype=m.dtype, prefill_form=form,
                                 kind="prefill" if unified else kind, quantised=m.cache_dtype is not None)
                 if not unified or f.serves_both]
        return [Subject(m.decoder.attention, m.dtype, m.cache, f.name, batch, tokens, context, m.decoder, layers,
                        experts, quantised=m.cache_dtype is not None, codes=m.scheme is not None) for f in forms]

    def predicted(self, s: Subject) -> Prediction | None:
        """The prediction, or None where a tensor is past what the builder can count, or nothing is known."""
        if largest_tensor(s)[1] > MAX_ELEMENTS:
            return None
        if s not in self._predicted:
            self._predicted[s] = predict(s, self.backend)
        return self._predicted[s]

    def leanest(self, kind: str, batch: int, context: int, layers: range) -> tuple[Subject, Prediction] | None:
        """The form of a kind that is predicted to need least."""
        key = (kind, batch if kind == "decode" else 1, context, layers)
        if key not in self._leanest:
            found = [(s, p) for s in self.subjects(*key) if (p := self.predicted(s)) is not None]
            self._leanest[key] = min(found, key=lambda item: item[1].bytes) if found else None
        return self._leanest[key]

    def unified(self, batch: int, context: int, layers: range) -> int | None:
        """Activation of the leanest engine that has both profiles: the greater of the two, of one form."""
        both = [self.subjects(kind, batch, context, layers, True) for kind in ("decode", "prefill")]
        found = [(self.predicted(a), self.predicted(b)) for a, b in zip(*both, strict=True)]
        return min((max(a.bytes, b.bytes) for a, b in found if a and b), default=None)

    def activations(self) -> list[dict[str, Any]]:
        """Every form of both kinds at the asked sizes, the leanest of each marked."""
        rows, layers = [], range(self.model.decoder.layers)
        for kind in ("decode", "prefill"):
            best = self.leanest(kind, self.request.max_batch, self.context, layers)
            for s in self.subjects(kind, self.request.max_batch, self.context, layers):
                made, (tensor, elements) = self.predicted(s), largest_tensor(s)
                why = f"{tensor}: {elements} elements, more than {MAX_ELEMENTS}" if elements > MAX_ELEMENTS else (
                    "no builds of its kind were fitted" if made is None else "")
                rows.append({"kind": kind, "formulation": s.formulation, "batch": s.batch, "tokens": s.tokens,
                             "context": s.rows, "experts": s.experts, "bytes": made and made.bytes,
                             "parts": made.parts if made else {}, "refused": why,
                             "leanest": best is not None and best[0].formulation == s.formulation})
        return rows

    # --- what fits ----------------------------------------------------------------------------------------------------

    def weights(self, layers: range) -> int:
        """Bytes of an engine's weights over a slice of the layers, the same for absorbed and expanded: W_UK and W_UV
        are kv_b_proj's own numbers."""
        m = self.model
        total = sum(sum(m.layer_bytes[i].values()) for i in layers)
        if layers.start == 0:
            total += m.ends["embedding"]
        if layers.stop == m.decoder.layers:
            tied = m.decoder.tie_word_embeddings and layers.start > 0
            total += m.ends.get("head", 0) + m.ends["norms"] + (m.ends["embedding"] if tied else 0)
        return total

    def need(self, layers: range, batch: int, context: int, way: str) -> float:
        """Bytes of one GPU that runs these layers in one of WAYS: engines, cache, activation; inf where none can."""
        m = self.model
        total = float(m.row_bytes * m.decoder.attentions_per_layer * len(layers) * batch * context)
        if total + self.weights(layers) > self.memory:  # whatever its activation
            return float("inf")
        if way == "unified":
            scratch = self.unified(batch, context, layers)
            return float("inf") if scratch is None else total + scratch + self.weights(layers)
        for kind in ("decode", "prefill")[:2 if way == "both" else 1]:
            found = self.leanest(kind, batch, context, layers)
            if found is None:
                return float("inf")
            total += found[1].bytes + self.weights(layers)
        return total

    def spread(self, batch: int, context: int, way: str) -> list[range] | None:
        """Slices of the layers, one a GPU, filled in turn; None where one layer alone is too much."""
        limit, depth = self.memory - self.reserve, self.model.decoder.layers
        slices, start = list[range](), 0
        def holds(start: int, count: int) -> bool:
            return self.need(range(start, start + count), batch, context, way) <= limit

        while start < depth:
            count = _largest(partial(holds, start), depth - start, self._last_slice.get(way, 1))
            if not count:
                return None
            self._last_slice[way] = count
            slices.append(range(start, start + count))
            start += count
        return slices

    def gpus_for_weights(self, way: str) -> int | None:
        """GPUs that hold the weights alone, with one sequence of no length beside them."""
        slices = self.spread(1, 1, way)
        return len(slices) if slices else None

    def fits(self, count: int, way: str) -> dict[str, list[dict[str, int]]]:
        """On `count` GPUs: the largest batch at several contexts, the largest context at several batches."""
        trained = self.model.decoder.attention.max_position_embeddings

        def enough(batch: int, context: int) -> bool:
            slices = self.spread(batch, context, way)
            return slices is not None and len(slices) <= count

        contexts = sorted({n for n in (*CONTEXTS, self.context) if n <= max(trained, self.context)})
        batches = sorted({*BATCHES, self.request.max_batch})
        return {"batch_at": [{"context": n, "batch": _largest(partial(_swapped, enough, n), MOST)} for n in contexts],
                "context_at": [{"batch": b, "context": _largest(partial(enough, b), trained)}
                               for b in batches]}

    # --- the floor ----------------------------------------------------------------------------------------------------

    def floors(self) -> list[dict[str, Any]]:
        """A decode step and a prefill chunk in both forms: bytes, operations, and the least time on this GPU."""
        d, dtype, r = self.model.decoder, self.model.dtype, self.request
        chunk = min(r.chunk, self.context)
        steps = [("decode", "absorbed", r.max_batch, 1), ("prefill", "absorbed", 1, chunk),
                 ("prefill", "expanded", 1, chunk)]
        rows = []
        for kind, form, batch, tokens in steps:
            costs = roofline.step(d, dtype, batch, tokens, self.context, form, self.model.row_bytes,
                                  self.model.scheme)
            total, flops = sum(c.bytes for c in costs), sum(c.flops for c in costs)
            row: dict[str, Any] = {"kind": kind, "form": form, "batch": batch, "tokens": tokens, "past": self.context,
                                   "bytes": total, "flops": flops, "intensity": flops / total,
                                   "parts": [vars(c) for c in costs]}
            if self.gpu:
                least = roofline.floor(costs, self.gpu, dtype)
                row |= {"seconds": least.seconds, "bound": least.bound,
                        "tokens_per_second": batch * tokens / least.seconds}
            rows.append(row)
        return rows


def _swapped(holds: Callable[[int, int], bool], second: int, first: int) -> bool:
    return holds(first, second)


def _largest(holds: Callable[[int], bool], most: int, near: int = 1) -> int:
    """The largest number up to `most` for which `holds`, which turns false once; 0 where not even 1 does. Few questions
    are asked where it is about `near`."""
    low, high, step = 0, most + 1, 1
    at = min(near, most)
    while low < at < high:
        if holds(at):
            low, at = at, at + step
        else:
            high, at = at, at - step
        step *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def plan(request: PlanRequest) -> dict[str, Any]:
    """Everything as one JSON-ready dictionary."""
    p = Planner(request)
    m, c = p.model, p.model.decoder.attention
    depth = range(m.decoder.layers)
    parts: dict[str, int] = {}
    for layer in (m.ends, *m.layer_bytes):
        for part, size in layer.items():
            parts[part] = parts.get(part, 0) + size
    weights = p.weights(depth)
    expanded_row = c.expanded_dim * DTYPES[m.dtype].itemsize * m.attentions
    tokens = request.max_batch * p.context
    fits: dict[str, Any] = {}
    for way in WAYS:
        slices, least = p.spread(request.max_batch, p.context, way), p.gpus_for_weights(way)
        count = len(slices) if slices else least
        fits[way] = {"gpus_for_weights": least, "gpus_at_request": len(slices) if slices else None,
                     "gpus": count, "slices": [f"{s.start}:{s.stop}" for s in slices or ()],
                     **(p.fits(count, way) if count else {"batch_at": [], "context_at": []})}
    rows = sorted({*(n for n in CONTEXTS if n <= c.max_position_embeddings), p.context})
    engine = max(p.weights(s) for s in p.spread(1, 1, "decode") or [depth])
    return {
        "model": m.name, "dtype": m.dtype, "cache": m.cache, "cache_dtype": m.cache_dtype or m.dtype,
        "quantise": m.scheme and m.scheme.name,
        "coded_head": m.scheme is not None and m.scheme.operator == "MatMulNBits",
        "backend": p.backend, "gpu": None if p.gpu is None else vars(p.gpu),
        "memory_bytes": p.memory, "reserve_bytes": p.reserve,
        "batch": request.max_batch, "context": p.context, "chunk": request.chunk, "layers": m.decoder.layers,
        "weights": {"parts": parts, "bytes": weights, "kv_b_bytes": m.attentions * m.kv_b},
        "cache_bytes": {"latent_per_token": m.row_bytes * m.attentions, "expanded_per_token": expanded_row,
                        "latent": m.row_bytes * m.attentions * tokens, "expanded": expanded_row * tokens},
        "activation": p.activations(),
        "predictor": known(p.backend, None) or f"predicted, {p.backend} {coefficients()['version']}",
        "host": {"memory_bytes": HOST_COPIES * engine, "build_seconds": engine / (BUILD_GBS * 1e9)},
        "fits": fits, "crossover": {"limit": roofline.crossover(c, None),
                                    "at": [{"past": n, "tokens": roofline.crossover(c, n)} for n in rows]},
        "floors": p.floors(), "most_rows": MAX_ELEMENTS // (c.kv_lora_rank if m.cache_dtype else c.row_dim),
        "trained_context": c.max_position_embeddings,
        "expert_stacks": m.decoder.moe and len(stacks(m.decoder.moe, c.hidden_size)),
        "dense_from_tokens": m.decoder.moe and dense_from(m.decoder.moe, c.hidden_size),
        "distinct_experts": m.decoder.moe and roofline.distinct_experts(m.decoder.moe, request.max_batch),
    }
