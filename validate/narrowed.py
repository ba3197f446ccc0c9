"""What a sweep narrows: one attention at any rank, beside the original whose answers it should give.

`Converted`: a Llama-style attention as MLA of rank d_c (exporter/low_rank.py). `Cut`: an MLA attention whose latent is
cut. With M = [a W_UK; W_UV] diag(gain), balanced by a, C the covariance of the latent c for white inputs, and U the
first left singular vectors of M C^(1/2), U U^T M is what is kept of the up projections. It reads c through the span of
(U^T M)^T alone: with Q an orthonormal basis of that, the new latent is Q^T c, the new up projections U U^T M Q. Q keeps
lengths, so a norm over the latent sees what it saw but for what was cut, and one gain, the expected ratio, makes up for
that. At full rank both are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engines.tokenizer import Tokenizer, read_text
from exporter.checkpoint import read_config
from exporter.config import MLAConfig
from exporter.convert import (
    attention_tensors,
    check_tokens,
    config_json,
    held_out,
    perplexities,
    read_tokens,
    shape_of,
    walk,
)
from exporter.errors import InputError
from exporter.families import config_from_hf
from exporter.llama import Llama, is_llama_style
from exporter.low_rank import Shape, prepare
from exporter.safetensors_file import SourceTensor
from exporter.source import Source, open_source
from exporter.weights import load_attention
from validate.references import NaiveMLA

TOKENS = 64  # of seeded inputs


@dataclass(frozen=True)
class Candidate:
    """One attention at one rank; `share` of the energy of k_nope and v that its latent holds; perplexity of the whole
    model at this rank, where it was measured."""

    source: Source
    share: float
    perplexity: float | None = None


class Subject(Protocol):
    """What is narrowed. `inputs` are sequences [T, D] after the input norm, `expected` the original's outputs; numbers
    count one token's cache of the original."""

    name: str
    full_rank: int
    inputs: list[np.ndarray]
    expected: list[np.ndarray]
    numbers: int
    perplexity: float | None
    notes: list[str]

    def narrow(self, ranks: Sequence[int], progress: Callable[..., None]) -> Iterator[Candidate]:
        """The attention at each rank, from 1 to `full_rank`."""
        ...


def source_of(name: str, config: MLAConfig, tensors: Mapping[str, np.ndarray]) -> Source:
    """Arrays as a source."""
    return Source(name, config, {n: SourceTensor(t.shape, partial(np.asarray, t)) for n, t in tensors.items()},
                  {"kind": "derived", "name": name})


def answers(source: Source, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The float64 reference's outputs for sequences [T, D]."""
    tensors = {name: torch.from_numpy(np.array(t.load(), np.float64)) for name, t in source.tensors.items()}
    reference = NaiveMLA(source.config, tensors, max_context=max(len(x) for x in inputs))
    outputs = []
    for x in inputs:
        reference.reset(1)
        outputs.append(reference.forward(torch.from_numpy(x)[None])[0].numpy())
    return outputs


def is_llama(model: str) -> bool:
    """Whether MODEL is a folder of a Llama-style checkpoint, whose attention is converted first."""
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return False
    return is_llama_style(read_config(folder))


class Cut:
    """An MLA attention with its latent cut."""

    def __init__(self, model: str, layer: int | None, seed: int, allow_pickle: bool) -> None:
        self.source = open_source(model, layer=layer, seed=seed, allow_pickle=allow_pickle)
        c = self.source.config
        self.name, self.full_rank, self.numbers = self.source.name, c.kv_lora_rank, c.row_dim
        self.perplexity: float | None = None
        self.notes = list[str]()
        if self.source.record["kind"] == "preset":
            self.notes.append("seeded weights have no spectrum to speak of: the worst case for a narrow latent, which "
                              "a trained model is not")
        rng = np.random.default_rng([seed, 29])
        self.inputs = [rng.standard_normal((TOKENS, c.hidden_size))]
        self.expected = answers(self.source, self.inputs)
        self._factor()

    def _factor(self) -> None:
        w, c = load_attention(self.source, self.source.config.max_position_embeddings), self.source.config
        self.down = w.kv_a.weight.astype(np.float64)
        self.down_bias = None if w.kv_a.bias is None else w.kv_a.bias.astype(np.float64)
        gain = np.ones(c.kv_lora_rank) if w.kv_a_norm is None else w.kv_a_norm.astype(np.float64) / c.latent_scale
        up = np.concatenate([w.w_uk, w.w_uv], axis=1).astype(np.float64) * gain  # [H, nope + v, d_c]
        self.covariance = self.down[:c.kv_lora_rank] @ self.down[:c.kv_lora_rank].T
        energy = [float(np.einsum("hrc,cd,hrd->", part, self.covariance, part, optimize=True))
                  for part in np.split(up, [c.qk_nope_head_dim], axis=1)]
        self.balance = np.ones((1, up.shape[1], 1))
        self.balance[:, :c.qk_nope_head_dim] = (energy[1] / energy[0]) ** 0.5 if min(energy) > 0 else 1.0
        self.up, self.stacked = up, (up * self.balance).reshape(-1, c.kv_lora_rank)
        spectrum, turned = np.linalg.eigh(self.covariance)
        root = self.stacked @ turned * np.sqrt(spectrum.clip(0))
        self.left, self.sizes, _ = np.linalg.svd(root, full_matrices=False)

    def narrow(self, ranks: Sequence[int], progress: Callable[..., None]) -> Iterator[Candidate]:
        """Cut to each rank."""
        return (self.at(rank) for rank in ranks)

    def at(self, rank: int) -> Candidate:
        """Cut to `rank`."""
        c, full = self.source.config, self.full_rank
        left = self.left[:, :rank]
        kept = left.T @ self.stacked  # [rank, d_c]
        basis = np.linalg.qr(kept.T)[0]  # [d_c, rank]
        up = ((left @ (kept @ basis)).reshape(*self.up.shape[:2], rank) / self.balance).reshape(-1, rank)
        down = np.concatenate([basis.T @ self.down[:full], self.down[full:]])
        made = {"down": down, "up": up}
        if self.down_bias is not None:
            made["down bias"] = np.concatenate([basis.T @ self.down_bias[:full], self.down_bias[full:]])
        if c.latent_norm:
            here, before = np.trace(basis.T @ self.covariance @ basis) / rank, np.trace(self.covariance) / full
            made["gain"] = np.full(rank, (here / before) ** 0.5)
        total = float((self.sizes**2).sum())
        share = float((self.sizes[:rank] ** 2).sum()) / total if total else 1.0
        tensors = {n: np.asarray(t.load()) for n, t in self.source.tensors.items()} | self._named(made, rank)
        return Candidate(source_of(f"{self.name}, d_c {rank}", replace(c, kv_lora_rank=rank), tensors), share)

    def _named(self, made: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """The changed tensors under the source's names."""
        c, H = self.source.config, self.source.config.num_attention_heads
        if not c.query_rope_from_hidden:
            names = {"down": "kv_a_proj_with_mqa.weight", "down bias": "kv_a_proj_with_mqa.bias",
                     "up": "kv_b_proj.weight", "gain": "kv_a_layernorm.weight"}
            return {names[part]: values.astype(np.float32) for part, values in made.items()}
        k, v = np.split(made["up"].reshape(H, -1, rank), [c.qk_nope_head_dim], axis=1)
        found = {"down_proj_kv.weight": made["down"][:rank], "down_proj_kv.bias": made["down bias"][:rank],
                 "up_proj_k.weight": k.reshape(-1, rank), "up_proj_v.weight": v.reshape(-1, rank)}
        return {name: values.astype(np.float32) for name, values in found.items()}


class Converted:
    """A Llama-style attention converted at each rank; with tokens the whole model's perplexity is measured."""

    def __init__(self, model: str, layer: int | None, seed: int, *, rope_columns: int | None, tokens: Path | None,
                 text: Path | None) -> None:
        llama = self.llama = Llama(Path(model))
        c, self.layer = llama.config, layer or 0
        if not 0 <= self.layer < c.num_hidden_layers:
            raise InputError(f"--layer {self.layer} is out of range; {model} has layers 0 to {c.num_hidden_layers - 1}")
        self.name, self.notes = f"{Path(model).name} layer {self.layer}", list[str]()
        self.sequences = _sequences(llama, Path(model), tokens, text)
        first = len(self.sequences) - held_out(self.sequences)
        self.shape: Shape = shape_of(llama, 1, rope_columns, self.sequences[:first])
        self.full_rank, self.numbers = self.shape.full_rank, 2 * c.kv_columns
        self.perplexity: float | None = None
        if not self.shape.whole:
            self.notes.append(f"{self.shape.rotary} of {c.kv_columns} rotary columns: what lost its position does not "
                              "come back with rank")
        hidden = [llama.embed(ids) for ids in self.sequences]
        for number, weights, moments in walk(llama, hidden, first):
            if number == self.layer:
                self.weights, self.moments = weights, moments
                break
        if not self.sequences:
            self.notes.append("inputs are seeded normal numbers: no tokens were given, so nothing calibrates and no "
                              "perplexity is measured")
            rng = np.random.default_rng([seed, 29])
            hidden, first = [rng.standard_normal((TOKENS, c.hidden_size))], 0
        self.inputs = [llama.normed(self.layer, h) for h in hidden[first:]]
        self.expected = [llama.attend(self.weights, x) for x in self.inputs]

    def narrow(self, ranks: Sequence[int], progress: Callable[..., None]) -> Iterator[Candidate]:
        """Converted at each rank, factored once."""
        after: list[float | None] = [None] * len(ranks)
        if self.sequences:
            self.perplexity, after[:] = perplexities(self.llama, self.shape, ranks, self.sequences, progress)
        progress("factoring")
        prepared = prepare(self.weights, self.moments, self.shape)
        for rank, perplexity in zip(ranks, after, strict=True):
            w, raw = prepared.at(rank), config_json(self.llama, replace(self.shape, rank=rank))
            config = config_from_hf({**raw, "num_hidden_layers": 1}, self.llama.where)
            source = source_of(f"{self.name}, d_c {rank}", config, attention_tensors(w, self.weights))
            yield Candidate(source, w.latent_share, perplexity)


def _sequences(llama: Llama, folder: Path, tokens: Path | None, text: Path | None) -> list[np.ndarray]:
    c = llama.config
    if tokens is not None and text is not None:
        raise InputError("--tokens and --text: both are what calibrates; give one of them")
    if tokens is not None:
        return read_tokens(tokens, c.vocab_size, c.max_position_embeddings)
    if text is not None:
        ids = np.array(Tokenizer(folder).encode(read_text(text)), np.int64)
        return check_tokens([ids], c.vocab_size, c.max_position_embeddings, f"--text {text}")
    return []


def open_subject(model: str, *, layer: int | None, seed: int, allow_pickle: bool, rope_columns: int | None,
                 tokens: Path | None, text: Path | None) -> Subject:
    """MODEL as what it is: converted where it is Llama-style, else an MLA to cut."""
    if is_llama(model):
        return Converted(model, layer, seed, rope_columns=rope_columns, tokens=tokens, text=text)
    for name, value in (("rope-columns", rope_columns), ("tokens", tokens), ("text", text)):
        if value is not None:
            raise InputError(f"--{name} {value}: for a Llama-style checkpoint, which is converted; {model} is MLA "
                             "already, and its latent alone is cut")
    return Cut(model, layer, seed, allow_pickle)


