"""The latent-cache contract as one table: which tensors a graph takes and gives, with their symbolic shapes.

Export, optimisation profiles, sessions, manifests and tests read this table and no other. Symbols: B batch, T new
tokens, S rows of past offered, S_max rows of a preallocated cache, R = d_c + d_r, D hidden size, V vocabulary. A cache
row is `[latent after its norm | rotated shared rope key]`; `{i}` counts the attentions of a graph from 0. In a
quantised cache a row is three: the latent in 8 bits, the scale that its numbers are multiplied by, the rotary key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.config import MLAConfig
from exporter.dtypes import DTYPES, STORED
from exporter.errors import InputError

CACHE_FORMS = ("append", "scatter", "concat")
NO_CACHE = "none"  # a bidirectional export: one prefill graph without past
CACHE_DTYPES = ("fp8", "int8")  # of a quantised cache; any other is of the compute dtype
QUANTISED = "append, quantised"  # the append form of such a cache: it has rows of its own in TABLE


@dataclass(frozen=True)
class Row:
    """One line of the contract. `dtype` is a role: `compute`, `cache` (the compute dtype or 8 bits), `int64` or `fp32`.

    `when`: the parts of a graph that it belongs to (`LAYER`, `decoder_parts`, `segments.segment_parts`), all where
    empty.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    output: bool
    forms: tuple[str, ...]
    when: tuple[str, ...] = ()


_CACHED = (*CACHE_FORMS, QUANTISED)
_EVERY = (*_CACHED, NO_CACHE)

TABLE = (
    Row("input_ids", ("B", "T"), "int64", False, _EVERY, ("tokens-in",)),
    Row("hidden_states", ("B", "T", "D"), "compute", False, _EVERY, ("hidden-in", "reduced-in")),
    Row("reduced", ("B", "T", "D"), "fp32", False, _EVERY, ("reduced-in",)),
    Row("shortcut", ("B", "T", "D"), "fp32", False, _EVERY, ("shortcut-in",)),
    Row("past_lengths", ("B",), "int64", False, _CACHED),
    Row("past_latent.{i}", ("B", "S", "R"), "cache", False, ("append", "concat")),
    Row("past_latent.{i}", ("B", "S", "d_c"), "cache", False, (QUANTISED,)),
    Row("past_scale.{i}", ("B", "S", "1"), "compute", False, (QUANTISED,)),
    Row("past_rope.{i}", ("B", "S", "d_r"), "compute", False, (QUANTISED,)),
    Row("latent_cache.{i}", ("B", "1", "S_max", "R"), "cache", False, ("scatter",)),
    Row("last_token", ("B",), "int64", False, _EVERY, ("last-token",)),
    Row("attn_output", ("B", "T", "D"), "compute", True, _EVERY, ("attention-out",)),
    Row("hidden_states_out", ("B", "T", "D"), "compute", True, _EVERY, ("hidden-out", "partial-out")),
    Row("partial", ("B", "T", "D"), "fp32", True, _EVERY, ("partial-out",)),
    Row("shortcut_out", ("B", "T", "D"), "fp32", True, _EVERY, ("shortcut-out",)),
    Row("logits", ("B", "V"), "fp32", True, _EVERY, ("last-logits",)),
    Row("logits", ("B", "T", "V"), "fp32", True, _EVERY, ("all-logits",)),
    Row("new_latent.{i}", ("B", "T", "R"), "cache", True, ("append",)),
    Row("new_latent.{i}", ("B", "T", "d_c"), "cache", True, (QUANTISED,)),
    Row("new_scale.{i}", ("B", "T", "1"), "compute", True, (QUANTISED,)),
    Row("new_rope.{i}", ("B", "T", "d_r"), "compute", True, (QUANTISED,)),
    Row("present_latent.{i}", ("B", "S+T", "R"), "cache", True, ("concat",)),
    Row("latent_cache_out.{i}", ("B", "1", "S_max", "R"), "cache", True, ("scatter",)),
)
LAYER = ("hidden-in", "attention-out")  # the parts of an attention alone


def decoder_parts(first: bool, last: bool, logits: str, prefill: bool) -> tuple[str, ...]:
    """The parts of a decoder's graph: what enters and leaves a slice, and which logits its last layer gives."""
    enters = "tokens-in" if first else "hidden-in"
    if not last:
        return enters, "hidden-out"
    if logits == "all":
        return enters, "all-logits"
    return (enters, "last-logits", "last-token") if prefill else (enters, "last-logits")


@dataclass(frozen=True)
class TensorSpec:
    """A graph input or output. Symbolic dims stay strings (`B`, `T`, `S`, `S+T`); `dtype` is one of
    fp32, fp16, bf16, fp8, int8, int64."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of one graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signature(config: MLAConfig, *, cache: str, dtype: str, max_context: int, attentions: int = 1, vocab_size: int = 0,
              parts: tuple[str, ...] = LAYER, cache_dtype: str | None = None) -> Signature:
    """The contract for one graph. `max_context` becomes the static S_max of the scatter form; `cache_dtype` fp8 or int8
    quantises the latents of the append form."""
    if cache not in (*CACHE_FORMS, NO_CACHE):
        raise InputError(f"cache form {cache!r} is unknown; expected one of {', '.join(CACHE_FORMS)}")
    if cache_dtype in CACHE_DTYPES and cache != "append":
        raise InputError(f"a cache in {cache_dtype} has the append form; {cache} keeps the compute dtype")
    form = QUANTISED if cache_dtype in CACHE_DTYPES else cache
    sizes: dict[str, int] = {"D": config.hidden_size, "R": config.row_dim, "d_c": config.kv_lora_rank,
                             "d_r": config.qk_rope_head_dim, "S_max": max_context, "V": vocab_size, "1": 1}
    role = {"compute": dtype, "cache": cache_dtype or dtype, "int64": "int64", "fp32": "fp32"}

    def expand(output: bool) -> tuple[TensorSpec, ...]:
        specs: list[TensorSpec] = []
        for row in TABLE:
            if row.output == output and form in row.forms and (not row.when or set(row.when) & set(parts)):
                shape = tuple(sizes.get(d, d) for d in row.dims)
                count = attentions if "{i}" in row.name else 1
                specs += [TensorSpec(row.name.format(i=i), shape, role[row.dtype]) for i in range(count)]
        return tuple(specs)

    return Signature(expand(False), expand(True))


def row_bytes(config: MLAConfig, dtype: str, cache_dtype: str | None = None) -> int:
    """Bytes of one token's row in one latent cache; of a quantised one with its scale."""
    wide = DTYPES[dtype].itemsize
    if cache_dtype not in CACHE_DTYPES:
        return config.row_dim * wide
    return config.kv_lora_rank * STORED[cache_dtype].itemsize + (1 + config.qk_rope_head_dim) * wide


@dataclass(frozen=True)
class Range:
    """min, opt and max of one symbolic dimension in an optimisation profile."""

    min: int
    opt: int
    max: int

    def __post_init__(self) -> None:
        if not 1 <= self.min <= self.opt <= self.max:
            raise InputError(f"profile range min {self.min}, opt {self.opt}, max {self.max}; expected 1 <= min <= opt "
                             "<= max")


Profile = dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


def profile(inputs: Sequence[TensorSpec], ranges: dict[str, Range]) -> Profile:
    """Optimisation profile of a graph: input name -> (min, opt, max) shapes, from the ranges of B, T and S."""
    def shape(spec: TensorSpec, which: str) -> tuple[int, ...]:
        return tuple(d if isinstance(d, int) else getattr(ranges[d], which) for d in spec.shape)

    return {spec.name: (shape(spec, "min"), shape(spec, "opt"), shape(spec, "max")) for spec in inputs}
