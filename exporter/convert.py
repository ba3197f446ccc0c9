"""A trained Llama-style checkpoint as an MLA checkpoint: `python -m exporter convert`.

The mathematics is in exporter/low_rank.py. Here: which shape all layers share, the tokens that calibrate, one layer at
a time read, converted and written, and the loss said in figures: shares of energy, and perplexity on tokens that took
no part. What is made is float32 (factors rounded to 16 bits would lose more), everything else is copied as it is.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.llama import HeadWeights, Llama, other_shapes
from exporter.low_rank import MLAWeights, Moments, Shape, attend, choose, convert, prepare, principal_axes
from exporter.model_export import TEXT_FILES
from exporter.output import new_folder
from exporter.weight_file import PlannedTensor, write_weights

MODEL_TYPE = "llama_mla"
RECORD = "conversion.json"
HELD_OUT = 4  # one token sequence of so many, the last ones, measures and does not calibrate
MIN_TOKENS = 32
_DTYPE_OF = {d.safetensors: d.name for d in DTYPES.values()}
_MADE = {"q_proj": "q", "kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b"}  # a tensor, and the field that makes it


@dataclass(frozen=True)
class ConvertRequest:
    """What `python -m exporter convert` was asked for; see its --help for each option."""

    checkpoint: Path
    out: Path
    rank: int
    rope_columns: int | None = None
    tokens: Path | None = None
    overwrite: bool = False


@dataclass
class Conversion:
    """What a conversion made, what it costs and what it lost. Numbers per token count one layer's cache; parameters all
    attentions. `exact`: nothing was lost but rounding."""

    folder: str
    rank: int
    full_rank: int
    rope_columns: int
    exact: bool
    cache_numbers_before: int
    cache_numbers_after: int
    parameters_before: int
    parameters_after: int
    layers: list[dict[str, float]] = field(default_factory=list)
    calibration_tokens: int = 0
    held_out_tokens: int = 0
    perplexity_before: float | None = None
    perplexity_after: float | None = None


def read_tokens(path: Path, vocabulary: int, positions: int) -> list[np.ndarray]:
    """Token sequences of a file: a JSON list of ids, or of lists, or {"tokens": either}; else ids between blanks, one
    line each. InputError for anything that is no id of the vocabulary, or longer than the model's positions."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not text in UTF-8"
        raise InputError(f"--tokens {path}: {why}; expected a text file of token ids") from None
    try:
        data = json.loads(text)
        data = data.get("tokens") if isinstance(data, dict) else data
        lists: list[Any] = data if isinstance(data, list) and data and isinstance(data[0], list) else [data]
    except ValueError:
        lists = [line.split() for line in text.splitlines() if line.strip()]
    sequences = []
    for ids in lists:
        try:
            sequences.append(np.array([int(i) if isinstance(i, str) else _id(i) for i in ids], np.int64))
        except (TypeError, ValueError):
            raise InputError(f"--tokens {path}: holds something that is no token id; expected JSON ids, a list of "
                             "lists of them, or ids between blanks (python -m engines tokenise makes them of text)"
                             ) from None
    return check_tokens(sequences, vocabulary, positions, f"--tokens {path}")


def _id(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError
    return value


def check_tokens(sequences: list[np.ndarray], vocabulary: int, positions: int, what: str) -> list[np.ndarray]:
    """Sequences of two tokens or more, a single one cut in four, so that some can be held out."""
    flat = np.concatenate([np.empty(0, np.int64), *sequences])
    if len(flat) < MIN_TOKENS:
        raise InputError(f"{what}: {len(flat)} tokens; expected {MIN_TOKENS} at least (some thousands calibrate well)")
    if flat.min() < 0 or flat.max() >= vocabulary:
        raise InputError(f"{what}: ids from {flat.min()} to {flat.max()}; expected 0 to {vocabulary - 1}, the model's "
                         "vocabulary")
    if len(sequences) == 1:
        sequences = np.array_split(sequences[0], max(HELD_OUT, -(-len(flat) // positions)))
    kept = [s for s in sequences if len(s) > 1]
    longest = max(len(s) for s in kept)
    if longest > positions:
        raise InputError(f"{what}: a sequence of {longest} tokens; expected at most max_position_embeddings = "
                         f"{positions}, cut it")
    if len(kept) < 2:
        raise InputError(f"{what}: one sequence of two tokens or more; expected another, to measure perplexity on")
    return kept


def shape_of(llama: Llama, rank: int, rope_columns: int | None, sequences: list[np.ndarray] | None = None,
             progress: Callable[..., None] = lambda message, share=None: None) -> Shape:
    """The shape that all layers will have. Fewer rotary columns than all: a pass over all layers chooses them."""
    c = llama.config
    columns = c.kv_columns if rope_columns is None else rope_columns
    if not 2 <= columns <= c.kv_columns or columns % 2:
        raise InputError(f"--rope-columns {columns}: expected an even number from 2 to {c.kv_columns}, all columns of "
                         f"the {c.num_key_value_heads} key heads")
    kept = np.full(c.head_dim // 2, c.num_key_value_heads, np.int64)
    if columns < c.kv_columns:
        need = np.zeros((c.head_dim // 2, c.num_key_value_heads))
        hidden = [llama.embed(ids) for ids in sequences or []]
        for layer, weights, moments in walk(llama, hidden, len(hidden)):
            progress(f"layer {layer}: rotary columns", layer / c.num_hidden_layers)
            need += principal_axes(weights, moments, c).need
        kept = choose(need, columns // 2)
    shape = Shape(c, kept, rank)
    if not 1 <= rank <= shape.full_rank:
        raise InputError(f"--rank {rank}: expected 1 to {shape.full_rank}, full rank with {columns} rotary columns "
                         "(more would be zeros)")
    return shape


def walk(llama: Llama, hidden: list[np.ndarray], calibrating: int) -> Iterator[tuple[int, HeadWeights, Moments]]:
    """Layer by layer: its attention, and the moments of that attention's input over the first `calibrating` sequences.

    `hidden`, the embedded sequences [T, D], are what enters the layer, and at the end what leaves the last one.
    """
    for layer in range(llama.config.num_hidden_layers):
        weights, moments = llama.attention(layer), Moments.unknown(llama.config.hidden_size)
        normed = [llama.normed(layer, h) for h in hidden]
        if calibrating:
            moments = Moments.of(np.concatenate(normed[:calibrating]))
        yield layer, weights, moments
        for i, x in enumerate(normed):
            hidden[i] = llama.feed_forward(layer, hidden[i] + llama.attend(weights, x))


def held_out(sequences: list[np.ndarray]) -> int:
    """How many sequences, the last ones, measure and do not calibrate."""
    return -(-len(sequences) // HELD_OUT)


class _Converter:
    """Every layer converted in its turn; with tokens, both decoders run beside, over the tokens held out."""

    def __init__(self, llama: Llama, shape: Shape, sequences: list[np.ndarray], made: Conversion) -> None:
        self.llama, self.shape, self.made = llama, shape, made
        self.first = len(sequences) - held_out(sequences)  # of those held out
        self.tested = sequences[self.first:]
        self.hidden = [llama.embed(ids) for ids in sequences]
        self.converted = self.hidden[self.first:]
        self.walk = walk(llama, self.hidden, self.first)
        self.current: tuple[int, MLAWeights | None] = (-1, None)

    def layer(self, layer: int) -> MLAWeights:
        """A layer's weights; layers are asked for in their order."""
        if self.current[0] != layer:
            number, source, moments = next(self.walk)
            assert number == layer
            w = convert(source, moments, self.shape)
            rounded = {f.removesuffix("_share"): getattr(w, f) for f in ("rotary_share", "latent_share")}
            self.made.layers.append({"layer": layer, **rounded})
            self.current = (layer, w)
            self.converted = _onward(self.llama, layer, source, w, self.shape, self.converted)
        assert self.current[1] is not None
        return self.current[1]

    def finish(self) -> None:
        """Perplexity of both decoders on the tokens held out."""
        if not self.tested:
            return
        assert next(self.walk, None) is None
        self.made.held_out_tokens = sum(len(ids) - 1 for ids in self.tested)
        self.made.perplexity_before = _perplexity(self.llama, self.hidden[self.first:], self.tested)
        self.made.perplexity_after = _perplexity(self.llama, self.converted, self.tested)


def _onward(llama: Llama, layer: int, source: HeadWeights, w: MLAWeights, shape: Shape, hidden: list[np.ndarray]
            ) -> list[np.ndarray]:
    """What leaves a layer whose attention is the converted one, rounded as the file holds it."""
    written, left = _as_written(w), list[np.ndarray]()
    for h in hidden:
        mixed = attend(written, source.o, source.o_bias, shape, llama.normed(layer, h))
        left.append(llama.feed_forward(layer, h + mixed))
    return left


def _perplexity(llama: Llama, hidden: list[np.ndarray], sequences: list[np.ndarray]) -> float:
    """Of the sequences, from what leaves the last layer."""
    total = sum(llama.surprise(h, ids) for h, ids in zip(hidden, sequences, strict=True))
    return math.exp(min(total / sum(len(ids) - 1 for ids in sequences), 700.0))


def _as_written(w: MLAWeights) -> MLAWeights:
    """Rounded as the file holds it."""
    arrays: dict[str, Any] = {name: value.astype(np.float32).astype(np.float64)
                              for name, value in vars(w).items() if isinstance(value, np.ndarray)}
    return replace(w, **arrays)


def _plan(llama: Llama, converter: _Converter, shape: Shape, calibrated: bool) -> list[PlannedTensor]:
    """Every tensor of the result, layer by layer."""
    c, plan = llama.config, list[PlannedTensor]()
    biased = {"q": llama.biased("q_proj"), "kv_a": llama.biased("k_proj"),
              "kv_b": llama.biased("v_proj") or (calibrated and shape.rank < shape.full_rank)}  # the mean's error
    H, D, v = c.num_attention_heads, c.hidden_size, c.head_dim
    sizes = {"q": (H * (shape.nope + shape.rotary), D), "kv_a": (shape.rank + shape.rotary, D),
             "kv_b": (H * (shape.nope + v), shape.rank)}

    def copied(name: str) -> PlannedTensor:
        t = llama.tensors[name]
        return PlannedTensor(name, t.shape, _DTYPE_OF.get(t.stored.dtype if t.stored else "F32", "fp32"), t.load)

    def made(layer: int, part: str) -> np.ndarray:
        value: np.ndarray = getattr(converter.layer(layer), part)
        return value

    others = [name for name, _ in other_shapes(c)]
    for layer in range(c.num_hidden_layers):
        scope = f"model.layers.{layer}.self_attn."
        for name, part in _MADE.items():
            plan.append(PlannedTensor(f"{scope}{name}.weight", sizes[part], "fp32", partial(made, layer, part)))
            if biased[part]:
                plan.append(PlannedTensor(f"{scope}{name}.bias", sizes[part][:1], "fp32",
                                          partial(made, layer, f"{part}_bias")))
        plan += [copied(n) for n in (f"{scope}o_proj.weight", f"{scope}o_proj.bias") if n in llama.tensors]
        plan += [copied(n) for n in others if n.startswith(f"model.layers.{layer}.")]
    return plan + [copied(n) for n in others if not n.startswith("model.layers.")]


def config_json(llama: Llama, shape: Shape) -> dict[str, Any]:
    """The result's config.json: the sizes of MLA, frequencies spelled out, and what it was made from."""
    c, raw = llama.config, llama.checkpoint.raw
    kept = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype", "num_attention_heads",
            "hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    stated = {**dict(raw.get("rope_scaling") or {}), **dict(raw.get("rope_parameters") or {})}
    theta = stated.get("rope_theta") or raw.get("rope_theta") or 10000.0
    return {
        "architectures": ["LlamaMLAForCausalLM"], "model_type": MODEL_TYPE, "hidden_act": "silu",
        **{name: raw[name] for name in kept if raw.get(name) is not None}, "q_lora_rank": None,
        "kv_lora_rank": shape.rank, "qk_nope_head_dim": shape.nope, "qk_rope_head_dim": shape.rotary,
        "v_head_dim": c.head_dim, "qk_latent_layernorm": False, "rms_norm_eps": c.rms_norm_eps,
        "max_position_embeddings": c.max_position_embeddings, "tie_word_embeddings": c.tie_word_embeddings,
        "rope_parameters": {"rope_type": "explicit", "rope_theta": theta, "attention_factor": c.rope_factor,
                            "inv_freq": shape.inv_freq.tolist()},
        "converted_from": {"model_type": c.model_type, "num_key_value_heads": c.num_key_value_heads,
                           "head_dim": c.head_dim, "rope_parameters": {"rope_theta": theta, **stated}}}


def describe(llama: Llama, shape: Shape, folder: str = "") -> Conversion:
    """A conversion's sizes, before anything is converted."""
    c = llama.config
    H, G, D, d = c.num_attention_heads, c.num_key_value_heads, c.hidden_size, c.head_dim
    after = (H * (shape.nope + shape.rotary) + shape.rank + shape.rotary) * D + H * (shape.nope + d) * shape.rank
    return Conversion(
        folder, shape.rank, shape.full_rank, shape.rotary, shape.whole and shape.rank == shape.full_rank,
        cache_numbers_before=2 * c.kv_columns, cache_numbers_after=shape.rank + shape.rotary,
        parameters_before=c.num_hidden_layers * (2 * H + 2 * G) * d * D,
        parameters_after=c.num_hidden_layers * (after + H * d * D))


def attention_tensors(w: MLAWeights, source: HeadWeights) -> dict[str, np.ndarray]:
    """One converted attention in float32 under the names of its checkpoint, without their prefix."""
    found = {f"{name}.{kind}": getattr(w, part + suffix).astype(np.float32) for name, part in _MADE.items()
             for kind, suffix in (("weight", ""), ("bias", "_bias"))}
    return found | {"o_proj.weight": source.o.astype(np.float32), "o_proj.bias": source.o_bias.astype(np.float32)}


def perplexities(llama: Llama, shape: Shape, ranks: Sequence[int], sequences: list[np.ndarray],
                 progress: Callable[..., None] = lambda message, share=None: None) -> tuple[float, list[float]]:
    """Before, and after a conversion at each rank that is not written, on the sequences held out. One walk for all:
    every layer is factored once, and each rank's decoder goes on beside the others."""
    first = len(sequences) - held_out(sequences)
    hidden, tested = [llama.embed(ids) for ids in sequences], sequences[first:]
    streams = [hidden[first:] for _ in ranks]
    for layer, source, moments in walk(llama, hidden, first):
        progress(f"perplexity: layer {layer}", layer / llama.config.num_hidden_layers)
        prepared = prepare(source, moments, shape)
        streams = [_onward(llama, layer, source, prepared.at(rank), replace(shape, rank=rank), stream)
                   for rank, stream in zip(ranks, streams, strict=True)]
    return (_perplexity(llama, hidden[first:], tested),
            [_perplexity(llama, stream, tested) for stream in streams])


def convert_checkpoint(request: ConvertRequest,
                       progress: Callable[..., None] = lambda message, share=None: None) -> Conversion:
    """Convert a checkpoint folder. InputError on bad input, nothing left behind."""
    llama = Llama(request.checkpoint)
    c = llama.config
    sequences = [] if request.tokens is None else read_tokens(request.tokens, c.vocab_size, c.max_position_embeddings)
    first = len(sequences) - held_out(sequences)
    shape = shape_of(llama, request.rank, request.rope_columns, sequences[:first], progress)
    made = describe(llama, shape, str(request.out))
    made.calibration_tokens = sum(len(s) for s in sequences[:first])
    with new_folder(request.out, overwrite=request.overwrite, marker=RECORD) as folder:
        converter = _Converter(llama, shape, sequences, made)
        write_weights(folder / "model.safetensors", _plan(llama, converter, shape, bool(sequences)), progress)
        progress("perplexity" if sequences else "config.json")
        converter.finish()
        for name in TEXT_FILES:
            if name != "config.json" and (request.checkpoint / name).is_file():
                shutil.copyfile(request.checkpoint / name, folder / name)
        (folder / "config.json").write_text(json.dumps(config_json(llama, shape), indent=1) + "\n")
        (folder / RECORD).write_text(json.dumps(asdict(made), indent=1) + "\n")
    return made
