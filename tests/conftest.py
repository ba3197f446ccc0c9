"""Shared by all tests: narrow presets, which keep every trait of their family at a width that runs in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from exporter.config import MLAConfig
from exporter.presets import PRESETS

torch.set_num_threads(1)  # two test processes share two cores


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
    heads = 12  # enough for errors to average over heads as they do at the published widths
    return replace(full, hidden_size=96, num_attention_heads=heads, kv_lora_rank=40, qk_nope_head_dim=24,
                   qk_rope_head_dim=16, v_head_dim=20, q_lora_rank=None if full.q_lora_rank is None else 48, rope=rope)


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
