"""A Llama-style checkpoint (MHA or GQA), read and run: what `convert` starts from, float64 in NumPy, layer by layer.

Llama, Qwen2 and Mistral differ in their biases alone; whose attention is more than softmax(q k^T) v over rotated heads
is refused by name. The decoder exists for what a conversion needs of it: the activations of every layer, and logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint import Checkpoint, open_checkpoint
from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.families import rope_parameters
from exporter.rope import frequencies
from exporter.safetensors_file import SourceTensor
from exporter.weight_file import count_nonfinite

MODEL_TYPES = ("llama", "mistral", "qwen2")
REFUSED = {  # a prefix of the model_type -> why
    "qwen3_next": "most of its layers are linear attention",
    "qwen3": "it norms every head's query and key (qk-norm), which does not pass through a shared latent",
    "olmo2": "it norms query and key (qk-norm), which does not pass through a shared latent",
    "gemma": "its norms add 1 to their gains, it scales the embedding, and later ones have soft caps and windows",
    "phi": "it fuses q, k and v, or rotates a part of each head alone",
    "cohere": "its attention and FFN run in parallel, and its norms are layer norms",
    "gpt_oss": "its attention has sinks and sliding windows",
    "mixtral": "its FFN is a mixture of experts",
    "qwen2_moe": "its FFN is a mixture of experts",
    "llama4": "it mixes chunked and position-free layers, and norms queries and keys",
}
_SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size")
_HEAD_ROWS = 256  # tokens whose logits are held at a time
_BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes under Hugging Face's names; `inv_freq` [head_dim / 2] in radians per position (theta and scaling in it),
    `rope_factor` on cos and sin."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_hidden_layers: int
    vocab_size: int
    intermediate_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    inv_freq: np.ndarray
    rope_factor: float

    @property
    def kv_columns(self) -> int:
        """Columns of all key heads together, and of all value heads: G x head_dim."""
        return self.num_key_value_heads * self.head_dim


def is_llama_style(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of the kind that is read here, or refused here by name: MHA or GQA, and no MLA."""
    return raw.get("kv_lora_rank") is None and str(raw.get("model_type")).startswith((*MODEL_TYPES, *REFUSED))


def _positions(raw: Mapping[str, Any]) -> int:
    return int(raw.get("max_position_embeddings") or 2048)


def _refuse(raw: Mapping[str, Any], where: str) -> None:
    """What cannot be converted exactly at full rank, by name, with the reason."""
    kind, known = str(raw.get("model_type")), ", ".join(MODEL_TYPES)
    if raw.get("kv_lora_rank") is not None:
        raise InputError(f"{where}: model_type {kind!r} with kv_lora_rank {raw['kv_lora_rank']}: an MLA checkpoint "
                         "already; export it as it is (python -m exporter export)")
    if kind not in MODEL_TYPES:
        why = next((reason for name, reason in REFUSED.items() if kind.startswith(name)), None)
        if why:
            raise InputError(f"{where}: model_type {kind!r} is not converted: {why}; expected one of {known}")
        raise InputError(f"{where}: model_type {kind!r} is not a Llama-style checkpoint known here; expected one of "
                         f"{known}")
    if raw.get("quantization_config"):
        raise InputError(f"{where}: its weights are quantised; expected fp32, fp16 or bf16; convert the release that "
                         "is not quantised")
    # where none is stated transformers takes 4096 for Mistral
    window = raw.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind == "qwen2" and not raw.get("use_sliding_window"):
        window = None
    if window is not None and window < _positions(raw):
        raise InputError(f"{where}: a sliding window of {window} tokens below max_position_embeddings "
                         f"{_positions(raw)}: MLA attends every row, so answers behind the window would differ; "
                         "expected sliding_window null")
    others = sorted({str(layer) for layer in raw.get("layer_types") or []} - {"full_attention"})
    if others:
        raise InputError(f"{where}: layer_types has {', '.join(others)}; expected full_attention alone")
    for name, expected in (("mlp_bias", (None, False)), ("hidden_act", (None, "silu", "swish")),
                           ("attention_sinks", (None, False)), ("use_qk_norm", (None, False))):
        if raw.get(name) not in expected:
            raise InputError(f"{where}: {name} is {raw[name]!r}; expected {expected[-1]!r}, nothing else is read")


def _inverse_frequencies(raw: Mapping[str, Any], head_dim: int, positions: int, where: str) -> tuple[np.ndarray, float]:
    """[head_dim / 2] in float64 and the factor on cos and sin: plain, linear, llama3 or YaRN."""
    stated = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
    kind = stated.get("rope_type") or stated.get("type") or "default"
    part = stated.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if part not in (None, 1, 1.0):
        raise InputError(f"{where}: partial_rotary_factor is {part}; expected heads that rotate whole")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise InputError(f"{where}: rope_type {kind!r} is not converted; expected default, linear, llama3 or yarn "
                         "(others choose their frequencies by the length of a prompt)")
    scaled = {"rope_type": "default", "rope_theta": stated.get("rope_theta") or raw.get("rope_theta")}
    read = rope_parameters({**raw, "rope_scaling": None, "rope_parameters": stated if kind == "yarn" else scaled})
    shape = MLAConfig(model_type="llama", hidden_size=head_dim, num_attention_heads=1, kv_lora_rank=1,
                      qk_nope_head_dim=1, qk_rope_head_dim=head_dim, v_head_dim=head_dim,
                      max_position_embeddings=positions, rope=read)
    inv_freq, factor = frequencies(shape, positions)
    try:
        if kind == "linear":
            inv_freq = inv_freq / float(stated["factor"])
        if kind == "llama3":
            inv_freq = _llama3(inv_freq, stated)
    except KeyError as missing:
        raise InputError(f"{where}: rope_type {kind} states no {missing.args[0]}; expected it among its parameters"
                         ) from None
    return inv_freq, factor


def _llama3(inv_freq: np.ndarray, stated: Mapping[str, Any]) -> np.ndarray:
    """Waves longer than original / low_freq_factor are stretched by `factor`, short ones not, a ramp between."""
    low, high = float(stated["low_freq_factor"]), float(stated["high_freq_factor"])
    turns = stated["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    scaled: np.ndarray = inv_freq * (kept + (1 - kept) / float(stated["factor"]))
    return scaled


def read_config(raw: Mapping[str, Any], where: str) -> LlamaConfig:
    """A LlamaConfig from a parsed config.json; what cannot be converted is an InputError that says why."""
    try:
        return _read(raw, where)
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise InputError(f"{where}: a value of the wrong kind ({error}); expected a Llama-style config.json") from None


def _read(raw: Mapping[str, Any], where: str) -> LlamaConfig:
    _refuse(raw, where)
    for name in _SIZES:
        if not isinstance(raw.get(name), int) or isinstance(raw[name], bool) or raw[name] < 1:
            raise InputError(f"{where}: {name} is {raw.get(name)!r}; expected a positive integer")
    heads = raw["num_attention_heads"]
    groups, head_dim = raw.get("num_key_value_heads") or heads, raw.get("head_dim") or raw["hidden_size"] // heads
    if heads % groups or head_dim % 2:
        raise InputError(f"{where}: {heads} heads over {groups} key/value heads of {head_dim} columns; expected a "
                         "multiple of them, and an even width")
    positions = _positions(raw)
    inv_freq, factor = _inverse_frequencies(raw, head_dim, positions, where)
    return LlamaConfig(str(raw["model_type"]), num_key_value_heads=groups, head_dim=head_dim, rope_factor=factor,
                       max_position_embeddings=positions, rms_norm_eps=float(raw.get("rms_norm_eps") or 1e-6),
                       tie_word_embeddings=bool(raw.get("tie_word_embeddings")), inv_freq=inv_freq,
                       **{name: raw[name] for name in _SIZES})


def attention_shapes(c: LlamaConfig) -> dict[str, tuple[int, int]]:
    """The four projections, [out, in]."""
    q = c.num_attention_heads * c.head_dim
    return {"q_proj": (q, c.hidden_size), "k_proj": (c.kv_columns, c.hidden_size),
            "v_proj": (c.kv_columns, c.hidden_size), "o_proj": (c.hidden_size, q)}


def other_shapes(c: LlamaConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor outside the attentions, which a conversion copies."""
    yield "model.embed_tokens.weight", (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{norm}.weight", (c.hidden_size,)
        for name in ("gate_proj", "up_proj"):
            yield f"{prefix}mlp.{name}.weight", (c.intermediate_size, c.hidden_size)
        yield f"{prefix}mlp.down_proj.weight", (c.hidden_size, c.intermediate_size)
    yield "model.norm.weight", (c.hidden_size,)
    if not c.tie_word_embeddings:
        yield "lm_head.weight", (c.vocab_size, c.hidden_size)


def _check(c: LlamaConfig, tensors: Mapping[str, SourceTensor], where: str) -> None:
    """Every tensor is there in its shape, and none is left over that a conversion would lose."""
    shapes: dict[str, tuple[int, ...]] = dict(other_shapes(c))
    optional: dict[str, tuple[int, ...]] = {}
    if c.tie_word_embeddings:
        optional["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    for layer in range(c.num_hidden_layers):
        for name, shape in attention_shapes(c).items():
            shapes[f"model.layers.{layer}.self_attn.{name}.weight"] = shape
            optional[f"model.layers.{layer}.self_attn.{name}.bias"] = shape[:1]
    for name, expected in (shapes | optional).items():
        found = tensors.get(name)
        if found is None and name in shapes:
            raise InputError(f"{where}: tensor {name} {list(expected)} is missing; config.json asks for it")
        if found is not None and found.shape != expected:
            raise InputError(f"{where}: tensor {name} has shape {list(found.shape)}; config.json asks for "
                             f"{list(expected)}")
    extra = sorted(set(tensors) - set(shapes) - set(optional))
    if extra:
        why = " (it norms query and key)" if any("_norm." in name and "self_attn" in name for name in extra) else ""
        raise InputError(f"{where}: unknown tensor {', '.join(extra[:3])}; a conversion would leave it out, so it is "
                         f"refused{why}")


@dataclass(frozen=True)
class Projection:
    """`y = x @ weight.T + bias`, float64, split by heads: weight [heads, columns, D], bias [heads, columns]."""

    weight: np.ndarray
    bias: np.ndarray

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[N, D] -> [N, heads, columns]."""
        heads, columns, _ = self.weight.shape
        flat: np.ndarray = x @ self.weight.reshape(heads * columns, -1).T + self.bias.reshape(-1)
        return flat.reshape(len(x), heads, columns)


@dataclass(frozen=True)
class HeadWeights:
    """One attention: q of H heads, k and v of G, the output [D, H v] and its bias [D]."""

    q: Projection
    k: Projection
    v: Projection
    o: np.ndarray
    o_bias: np.ndarray


def rotate(x: np.ndarray, inv_freq: np.ndarray, factor: float) -> np.ndarray:
    """[T, heads, 2n] at positions 0 .. T - 1: columns i and i + n turn together, by `inv_freq[i]` per position."""
    angles = np.outer(np.arange(len(x)), inv_freq)[:, None]  # [T, 1, n]
    cos, sin = np.cos(angles) * factor, np.sin(angles) * factor
    a, b = np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def causal_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float) -> np.ndarray:
    """q [T, H, e] over k [T, G, e] and v [T, G, v], H a multiple of G -> [T, H, v]; one head at a time."""
    tokens, heads, _ = q.shape
    share, hidden = heads // k.shape[1], np.triu(np.ones((tokens, tokens), bool), 1)
    out = np.empty((tokens, heads, v.shape[2]))
    for h in range(heads):
        scores = q[:, h] @ k[:, h // share].T * scale
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, h] = weights / weights.sum(axis=1, keepdims=True) @ v[:, h // share]
    return out


class Llama:
    """A checkpoint opened: config, tensors (read when asked for), and the parts of its decoder over tokens [N, D]."""

    def __init__(self, folder: Path) -> None:
        self.checkpoint: Checkpoint = open_checkpoint(folder, weights=False)
        self.where = self.checkpoint.where
        self.config = read_config(self.checkpoint.raw, self.where)
        self.checkpoint = open_checkpoint(folder)
        self.tensors = self.checkpoint.tensors
        _check(self.config, self.tensors, str(folder))

    def get(self, name: str) -> np.ndarray:
        """One tensor in float64; values that are not finite are an InputError."""
        values = self.tensors[name].load()
        bad = count_nonfinite(values)
        if bad:
            raise InputError(f"{self.where}: {bad} of {values.size} values of tensor {name} are NaN or infinite; "
                             "expected finite weights")
        return values.astype(np.float64)

    def biased(self, name: str) -> bool:
        """Whether any layer's projection has a bias."""
        return any(t.endswith(f".self_attn.{name}.bias") for t in self.tensors)

    def attention(self, layer: int) -> HeadWeights:
        """One layer's attention, split by heads."""
        c, prefix = self.config, f"model.layers.{layer}.self_attn."

        def bias(name: str, size: int) -> np.ndarray:
            return self.get(f"{prefix}{name}.bias") if f"{prefix}{name}.bias" in self.tensors else np.zeros(size)

        split = {}
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = self.get(f"{prefix}{name}.weight")
            split[name[0]] = Projection(weight.reshape(-1, c.head_dim, c.hidden_size),
                                        bias(name, len(weight)).reshape(-1, c.head_dim))
        return HeadWeights(**split, o=self.get(f"{prefix}o_proj.weight"), o_bias=bias("o_proj", c.hidden_size))

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        """RMS norm with the gain `name`."""
        inverse = 1 / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        scaled: np.ndarray = x * inverse * self.get(name)
        return scaled

    def normed(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """What a layer's attention reads."""
        return self.norm(hidden, f"model.layers.{layer}.input_layernorm.weight")

    def embed(self, ids: np.ndarray) -> np.ndarray:
        """[N] -> [N, D]."""
        rows: np.ndarray = self.tensors["model.embed_tokens.weight"].load()[ids].astype(np.float64)
        return rows

    def attend(self, w: HeadWeights, x: np.ndarray) -> np.ndarray:
        """Attention output of one sequence [T, D] -> [T, D]."""
        c = self.config
        q, k = (rotate(p(x), c.inv_freq, c.rope_factor) for p in (w.q, w.k))
        mixed = causal_attention(q, k, w.v(x), c.head_dim**-0.5)
        out: np.ndarray = mixed.reshape(len(x), -1) @ w.o.T + w.o_bias
        return out

    def feed_forward(self, layer: int, hidden: np.ndarray) -> np.ndarray:
        """hidden + down(silu(gate x) up x) of the normed x."""
        prefix = f"model.layers.{layer}."
        x = self.norm(hidden, f"{prefix}post_attention_layernorm.weight")
        gate, up = (x @ self.get(f"{prefix}mlp.{name}_proj.weight").T for name in ("gate", "up"))
        with np.errstate(over="ignore"):
            gate = gate / (1 + np.exp(-gate))
        out: np.ndarray = hidden + gate * up @ self.get(f"{prefix}mlp.down_proj.weight").T
        return out

    def logits(self, hidden: np.ndarray) -> Iterator[np.ndarray]:
        """[N, D] -> some rows of [N, V] at a time."""
        head = self.get("model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight")
        x = self.norm(hidden, "model.norm.weight")
        for start in range(0, len(x), _HEAD_ROWS):
            yield x[start:start + _HEAD_ROWS] @ head.T

    def surprise(self, hidden: np.ndarray, ids: np.ndarray) -> float:
        """Sum over one sequence of -ln p(next token), T - 1 terms."""
        total, start = 0.0, 1
        for rows in self.logits(hidden[:-1]):
            wanted = ids[start:start + len(rows)]
            top = rows.max(axis=1)
            spread = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
            total += float((spread - rows[np.arange(len(rows)), wanted]).sum())
            start += len(rows)
        return total
