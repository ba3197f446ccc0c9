"""Shared by all tests: narrow presets, which keep every trait of their family at a width that runs in milliseconds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from exporter.config import MLAConfig
from exporter.presets import PRESETS

torch.set_num_threads(1)  # two test processes share two cores


@pytest.fixture(scope="session", autouse=True)
def no_user_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What fixtures of more than one test build does not reach the user's cache either; nor does it matter whether the
    operator's library was compiled here."""
    os.environ["MLA_EXPORT_CACHE"] = str(tmp_path_factory.mktemp("engine-cache"))
    os.environ["MLA_OPERATOR"] = "/no/library.so"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of builds are kept for one test only, never in the user's own cache."""
    folder = tmp_path / "engine cache"
    monkeypatch.setenv("MLA_EXPORT_CACHE", str(folder))
    return folder


def narrowed(name: str) -> MLAConfig:
    """A preset's attention with small sizes, nope != v, and longrope's two factor sets made to differ."""
    full = PRESETS[name]
    if name == "article":
        return full  # small as it is
    rope = full.rope
    if rope.rope_type == "longrope":
        short = tuple(1.0 + 0.05 * i for i in range(8))
        rope = replace(rope, short_factor=short, long_factor=tuple(3 * f for f in short),
                       original_max_position_embeddings=64)
    if rope.llama_4_scaling_beta:
        rope = replace(rope, original_max_position_embeddings=100)  # so that the query's growth is met early
    heads = 12  # enough for errors to average over heads as they do at the published widths
    scales = {} if full.latent_scale == 1 else {"query_scale": (96 / 48) ** 0.5, "latent_scale": (96 / 40) ** 0.5}
    return replace(full, hidden_size=96, num_attention_heads=heads, kv_lora_rank=40, qk_nope_head_dim=24, **scales,
                   qk_rope_head_dim=16, v_head_dim=20, q_lora_rank=None if full.q_lora_rank is None else 48, rope=rope)


def _distinct() -> tuple[str, ...]:
    """Presets whose attention differs from those before them in more than its name and depth."""
    seen, names = set[MLAConfig](), []
    for name, config in sorted(PRESETS.items(), key=lambda item: (len(item[0]), item[0])):
        bare = replace(config, model_type="", num_hidden_layers=1)
        if bare not in seen:
            seen.add(bare)
            names.append(name)
    return tuple(names)


DISTINCT = _distinct()


@pytest.fixture(scope="session")
def narrow() -> Iterator[list[str]]:
    """The names of the narrow presets, `narrow-deepseek-v3` and so on, usable as MODEL while the tests run."""
    names = []
    for name in list(PRESETS):
        PRESETS[f"narrow-{name}"] = narrowed(name)
        names.append(f"narrow-{name}")
    yield names
    for name in names:
        del PRESETS[name]
