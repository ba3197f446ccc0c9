"""Whole models side by side: what a subject of the benchmark can do; our export and transformers as two of them.

A subject answers twice. `generate` takes real tokens through the whole model, so that subjects can be compared. `hold`
gives a decode step behind a past of any length, the same past for every subject, each in its own form: that is timed.
Peers are what users would pick instead; one that cannot be had here raises `AbsentError` with the reason.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from exporter.errors import InputError
from exporter.manifest import Export

US = "mla-export"
Step = Callable[[], np.ndarray]  # one decode step, its logits [B, V]; the past stays as it is


class AbsentError(Exception):
    """A peer is not to be had here; the message is the reason, one line."""


@dataclass(frozen=True)
class ModelShape:
    """What a benchmark must know of a checkpoint, read from its config.json."""

    layers: int
    heads: int
    latent: int
    nope: int
    rope: int
    v: int
    vocabulary: int
    positions: int
    pairs: bool  # rotary columns rotate as (0,1), (2,3), …; else as (i, i + rope/2)

    @classmethod
    def of(cls, folder: Path) -> ModelShape:
        """Read a checkpoint folder's config.json; InputError if it is no MLA model's."""
        try:
            raw = json.loads((folder / "config.json").read_text())
            fields = ("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim",
                      "qk_rope_head_dim", "v_head_dim", "vocab_size", "max_position_embeddings")
            layers, heads, latent, nope, rope, v, vocabulary, positions = (int(raw[name]) for name in fields)
            return cls(layers, heads, latent, nope, rope, v, vocabulary, positions,
                       raw.get("rope_interleave") is not False)
        except FileNotFoundError:
            raise InputError(f"{folder}: no config.json; expected a Hugging Face checkpoint folder") from None
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"{folder / 'config.json'}: not an MLA model's ({error})") from None

    @property
    def latent_floats(self) -> int:
        """Numbers that one token costs in a latent cache, all layers."""
        return self.layers * (self.latent + self.rope)

    @property
    def expanded_floats(self) -> int:
        """Numbers that one token costs in a cache of keys and values per head, all layers."""
        return self.layers * self.heads * (self.nope + self.rope + self.v)


@dataclass(frozen=True)
class Past:
    """A past of S tokens, the same for all subjects: per layer rows [B, S, latent + rope], the rotary columns already
    rotated and laid out as the checkpoint rotates them."""

    shape: ModelShape
    rows: list[np.ndarray]

    @classmethod
    def draw(cls, shape: ModelShape, batch: int, length: int, seed: int = 0) -> Past:
        """Random rows of std 1, which is what a normed latent and a rotary key have."""
        rng = np.random.Generator(np.random.SFC64([seed, length]))
        size = (batch, length, shape.latent + shape.rope)
        return cls(shape, [rng.standard_normal(size, np.float32) for _ in range(shape.layers)])

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.rows[0])

    @property
    def length(self) -> int:
        """Tokens, S."""
        return int(self.rows[0].shape[1])


class Subject(ABC):
    """One way to run the model. `cache_bytes_per_token` counts all layers; `working_caches` how many whole caches lie
    in memory during a step."""

    name: str
    cache_bytes_per_token: int
    working_caches: int = 1

    @abstractmethod
    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """Prefill `prompt` [B, P] from an empty cache, then decode `follow` [B, N] token by token: the logits
        [1 + N, B, V] behind the prompt and behind every token."""

    @abstractmethod
    def hold(self, past: Past, token: np.ndarray) -> Step:
        """A decode step of `token` [B, 1] behind `past`, buffers bound ahead."""

    def close(self) -> None:  # noqa: B027  (most subjects hold nothing)
        """Free what the subject holds."""


class Ours(Subject):
    """An exported decode graph in ONNX Runtime, through the session that users open."""

    def __init__(self, made: Export, formulation: str, threads: int, shape: ModelShape) -> None:
        graph = made.graph("decode", formulation)
        self.name = f"{US}, {formulation}" + (" (default)" if graph.default else "")
        self._export = made
        self.cache_bytes_per_token = 4 * shape.latent_floats
        self._session = OrtSession(made, graph, OrtOptions(threads=threads, spin=True))

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """See Subject."""
        cache, found = LatentCache(self._export, len(prompt), prompt.shape[1] + follow.shape[1]), []
        for piece in (prompt, *(follow[:, i : i + 1] for i in range(follow.shape[1]))):
            outputs = self._session.infer({"input_ids": piece, **cache.feed()})
            cache.commit(outputs, piece.shape[1])
            found.append(outputs["logits"])
        return np.stack(found)

    def hold(self, past: Past, token: np.ndarray) -> Step:
        """See Subject. The rows are bound as they lie."""
        lengths = np.full(past.batch, past.length, np.int64)
        feed = {"input_ids": token, "past_lengths": lengths} | {f"past_latent.{i}": r for i, r in enumerate(past.rows)}
        return lambda: self._session.infer(feed)["logits"]

    def close(self) -> None:
        """See Subject."""
        self._session.close()


class Transformers(Subject):
    """`AutoModelForCausalLM` in eager PyTorch, float32; its DynamicCache holds latent rows, expanded each step."""

    name = "transformers"

    def __init__(self, folder: Path, threads: int) -> None:
        try:
            import torch
            import transformers
        except ImportError as error:
            raise AbsentError(f"{error.name} is not installed (pip install -e '.[test]')") from None
        torch.set_num_threads(threads)
        quiet: Any = transformers.utils.logging
        quiet.disable_progress_bar()
        self._torch, self._cache_class, self.shape = torch, transformers.DynamicCache, ModelShape.of(folder)
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        self._model = load(folder, dtype=torch.float32).eval()
        self.cache_bytes_per_token = 4 * self.shape.latent_floats

    def _forward(self, tokens: np.ndarray, cache: Any) -> np.ndarray:
        with self._torch.inference_mode():
            out = self._model(input_ids=self._torch.from_numpy(tokens), cache=cache, use_cache=True, logits_to_keep=1)
        logits: np.ndarray = out.logits[:, -1].numpy()
        return logits

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """See Subject."""
        cache = self._cache_class(config=self._model.config)
        pieces = [prompt, *(follow[:, i : i + 1] for i in range(follow.shape[1]))]
        return np.stack([self._forward(piece, cache) for piece in pieces])

    def hold(self, past: Past, token: np.ndarray) -> Step:
        """See Subject. The row that a step adds is cropped away again, which copies nothing."""
        cache, torch, latent = self._cache_class(config=self._model.config), self._torch, self.shape.latent
        for i, rows in enumerate(past.rows):
            rope = rows[..., latent:]
            if self.shape.pairs:  # it rotates halves, after sorting the columns
                rope = np.concatenate([rope[..., 0::2], rope[..., 1::2]], axis=-1)
            parts = (np.ascontiguousarray(part)[:, None] for part in (rows[..., :latent], rope))
            cache.update(*(torch.from_numpy(part) for part in parts), i)

        def step() -> np.ndarray:
            logits = self._forward(token, cache)
            with torch.inference_mode():
                cache.crop(-token.shape[1])
            return logits

        return step


def installed(package: str) -> str | None:
    """Version of a package of this environment."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
