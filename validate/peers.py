"""Whole models side by side: what a subject of the benchmark can do; our export and transformers as two of them.

Of a `Subject`, `generate` takes real tokens through the whole model, so that subjects can be compared; `hold` gives a
decode step behind a past of any length, `prefill` a piece of prompt behind one, the same past for every subject, each
in its own form: those are timed, in turns. Peers are what users would pick instead; one that cannot be had here raises
`AbsentError` with the reason.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate.bench_rows import DEFAULT
from validate.bench_timing import Step  # one step, its logits [B, V]; the past stays as it is

US = "mla-export"
EQUAL = 1e-3  # rel between float32 logits
CHUNK = 512  # tokens of one of our prefill steps, as `engines generate` takes them


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
    """One way to run the model. `cache_bytes_per_token` counts all layers; `dtype` and `quantise`, as an export would
    name them, say what its weights are, and `cache_dtype` its cached rows where they are another's: that sets its
    floor. Its logits may be `tolerance` (rel) away from the reference's; beyond EQUAL other tokens may be chosen, and
    its rows say that outputs were not equal. `working_caches`: how many whole caches lie in memory during a step;
    `at_once`: tokens of a prefill that go through the model together (None: all of them)."""

    name: str
    cache_bytes_per_token: int
    dtype: str = "fp32"
    quantise: str | None = None
    cache_dtype: str | None = None
    tolerance: float = EQUAL
    working_caches: int = 1
    at_once: int | None = None

    @abstractmethod
    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """Prefill `prompt` [B, P] from an empty cache, then decode `follow` [B, N] token by token: the logits
        [1 + N, B, V] behind the prompt and behind every token."""

    @abstractmethod
    def hold(self, past: Past, token: np.ndarray) -> Step:
        """A step of the new tokens [B, T] behind `past`, the logits of the last one; buffers bound ahead."""

    def prefill(self, past: Past, tokens: np.ndarray) -> Step:
        """One run of a piece of prompt `tokens` [B, T] behind `past`, which may be empty: the last token's logits.
        Every run starts from the same past."""
        return self.hold(past, tokens)

    def close(self) -> None:  # noqa: B027  (most subjects hold nothing)
        """Free what the subject holds."""


class Ours(Subject):
    """A graph of an export in ONNX Runtime, through the session that users open; a prompt goes in chunks, each with
    the logits of its last token alone. `label` tells exports apart; `profile`: a folder, see `OrtOptions`."""

    at_once = CHUNK

    def __init__(self, made: Export, graph: GraphEntry, threads: int, shape: ModelShape, label: str = "",
                 profile: Path | None = None) -> None:
        form = graph.formulation
        if graph.kind == "prefill" and not form.startswith(graph.prefill_form):
            form = f"{graph.prefill_form} {form}"
        self.name = f"{US}{label and f' {label}'}, {form}" + DEFAULT * graph.default
        self._export, self._graph, self.shape, self.default = made, graph, shape, graph.default
        self.cache_bytes_per_token = made.cache_bytes_per_token
        self._session = OrtSession(made, graph, OrtOptions(threads=threads, spin=True, profile=profile))

    def _logits(self, tokens: np.ndarray, cache: LatentCache) -> np.ndarray:
        feed = {"input_ids": tokens, **cache.feed(), **self._last(tokens)}
        outputs = self._session.infer(feed)
        cache.commit(outputs, tokens.shape[1])
        return outputs["logits"]

    def _last(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        wanted = any(spec.name == "last_token" for spec in self._graph.inputs)
        return {"last_token": np.full(len(tokens), tokens.shape[1] - 1, np.int64)} if wanted else {}

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """See Subject."""
        cache = LatentCache(self._export, len(prompt), prompt.shape[1] + follow.shape[1])
        return np.stack([self._logits(piece, cache) for piece in pieces(prompt, follow)])

    def hold(self, past: Past, token: np.ndarray, lengths: np.ndarray | None = None) -> Step:
        """See Subject. The rows are bound as they lie; `lengths` [B]: how many of them count, of a ragged batch."""
        counts = np.full(past.batch, past.length, np.int64) if lengths is None else lengths
        feed = {"input_ids": token, "past_lengths": counts, **self._last(token)}
        feed |= {f"past_latent.{i}": rows for i, rows in enumerate(past.rows)}
        return lambda: self._session.infer(feed)["logits"]

    def prefill(self, past: Past, tokens: np.ndarray) -> Step:
        """See Subject."""
        cache, length = LatentCache(self._export, past.batch, past.length + tokens.shape[1]), past.length
        for i, rows in enumerate(past.rows):
            cache.load(rows, np.full(past.batch, length), i)

        def run() -> np.ndarray:
            cache.lengths[:] = length
            for start in range(0, tokens.shape[1], CHUNK):
                logits = self._logits(np.ascontiguousarray(tokens[:, start:start + CHUNK]), cache)
            return logits

        return run

    def end_profile(self) -> Path:
        """The file of its profile, whole."""
        return self._session.end_profile()

    def close(self) -> None:
        """See Subject."""
        self._session.close()


def pieces(prompt: np.ndarray, follow: np.ndarray) -> list[np.ndarray]:
    """What goes through the model one after another: the prompt, then token by token."""
    return [prompt, *(np.ascontiguousarray(follow[:, i:i + 1]) for i in range(follow.shape[1]))]


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
        return np.stack([self._forward(piece, cache) for piece in pieces(prompt, follow)])

    def hold(self, past: Past, token: np.ndarray) -> Step:
        """See Subject. The rows that a step adds are cropped away again, which copies nothing."""
        if not past.length:  # nothing to crop to
            return lambda: self._forward(token, self._cache_class(config=self._model.config))
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
