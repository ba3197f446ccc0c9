"""The latent-cache contract as one table: which tensors a graph takes and gives, with their symbolic shapes.

Export, optimisation profiles, sessions, manifests and tests read this table and no other. Symbols: B batch, T new
tokens, S rows of past offered, S_max rows of a preallocated cache, R = d_c + d_r, D hidden size, V vocabulary. A cache
row is `[latent after its norm | rotated shared rope key]`; `{i}` counts the attentions of a graph from 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from exporter.config import MLAConfig
from exporter.errors import InputError

CACHE_FORMS = ("append", "scatter", "concat")
NO_CACHE = "none"  # a bidirectional export: one prefill graph without past


@dataclass(frozen=True)
class Row:
    """One line of the contract. `dtype` is a role: `compute`, `cache` (the compute dtype so far), `int64` or `fp32`.

    `when`: the parts of a graph that it belongs to (`LAYER`, `decoder_parts`), all where empty.
    """

    name: str
    dims: tuple[str, ...]
    dtype: str
    output: bool
    forms: tuple[str, ...]
    when: tuple[str, ...] = ()


_EVERY = (*CACHE_FORMS, NO_CACHE)

TABLE = (
    Row("input_ids", ("B", "T"), "int64", False, _EVERY, ("tokens-in",)),
    Row("hidden_states", ("B", "T", "D"), "compute", False, _EVERY, ("hidden-in",)),
    Row("past_lengths", ("B",), "int64", False, CACHE_FORMS),
    Row("past_latent.{i}", ("B", "S", "R"), "cache", False, ("append", "concat")),
    Row("latent_cache.{i}", ("B", "1", "S_max", "R"), "cache", False, ("scatter",)),
    Row("last_token", ("B",), "int64", False, CACHE_FORMS, ("last-token",)),
    Row("attn_output", ("B", "T", "D"), "compute", True, _EVERY, ("attention-out",)),
    Row("hidden_states_out", ("B", "T", "D"), "compute", True, CACHE_FORMS, ("hidden-out",)),
    Row("logits", ("B", "V"), "fp32", True, CACHE_FORMS, ("last-logits",)),
    Row("logits", ("B", "T", "V"), "fp32", True, CACHE_FORMS, ("all-logits",)),
    Row("new_latent.{i}", ("B", "T", "R"), "cache", True, ("append",)),
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
    """A graph input or output. Symbolic dims stay strings (`B`, `T`, `S`, `S+T`); `dtype` is fp32|fp16|bf16|int64."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of one graph, in order."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def signature(config: MLAConfig, *, cache: str, dtype: str, max_context: int, attentions: int = 1, vocab_size: int = 0,
              parts: tuple[str, ...] = LAYER) -> Signature:
    """The contract for one graph. `max_context` becomes the static S_max of the scatter form."""
    if cache not in (*CACHE_FORMS, NO_CACHE):
        raise InputError(f"cache form {cache!r} is unknown; expected one of {', '.join(CACHE_FORMS)}")
    sizes: dict[str, int] = {"D": config.hidden_size, "R": config.row_dim, "S_max": max_context, "V": vocab_size,
                             "1": 1}
    role = {"compute": dtype, "cache": dtype, "int64": "int64", "fp32": "fp32"}

    def expand(output: bool) -> tuple[TensorSpec, ...]:
        specs: list[TensorSpec] = []
        for row in TABLE:
            if row.output == output and cache in row.forms and (not row.when or set(row.when) & set(parts)):
                shape = tuple(sizes.get(d, d) for d in row.dims)
                count = attentions if "{i}" in row.name else 1
                specs += [TensorSpec(row.name.format(i=i), shape, role[row.dtype]) for i in range(count)]
        return tuple(specs)

    return Signature(expand(False), expand(True))


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
