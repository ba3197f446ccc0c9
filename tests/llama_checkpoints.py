"""Llama-style checkpoints for tests: tiny ones with hot weights, and one trained for some seconds on a language.

The language: eight-token motifs from a sparse Markov chain, repeated with some noise. To do well, a model must look
back by position and by content, so its keys and values have a spectrum that means something.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                         "vocab_size": 97, "max_position_embeddings": 256}
VOCABULARY, MOTIF, LENGTH = 48, 8, 64


def hot_model(kind: str = "llama", groups: int = 2, seed: int = 0, **options: Any) -> Any:
    """A transformers model whose every weight matters: std 1.5 / sqrt(fan_in), gains around 1, biases of std 0.5."""
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}[kind]
    made = model(config(num_key_value_heads=groups, **{**SIZES, **options})).eval()
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in made.named_parameters():
            draw = torch.randn(p.shape, generator=rng)
            p.copy_(0.5 * draw if name.endswith("bias") else draw * 1.5 / p.shape[1] ** 0.5 if p.dim() > 1 else
                    1 + 0.5 * draw.clamp(-1, 1))
    return made


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """`save_pretrained`, quietly."""
    model.save_pretrained(folder, **options)
    return folder


def language(sequences: int, seed: int) -> np.ndarray:
    """[sequences, LENGTH] token ids."""
    chain = np.random.default_rng(7).integers(0, VOCABULARY, (VOCABULARY, 4))  # four successors of each token
    rng = np.random.default_rng(seed)
    found = np.empty((sequences, LENGTH), np.int64)
    for row in found:
        token, motif = int(rng.integers(VOCABULARY)), list[int]()
        for _ in range(MOTIF):
            motif.append(token)
            token = int(chain[token, rng.integers(4)])
        row[:] = np.tile(motif, LENGTH // MOTIF)
        noisy = rng.random(LENGTH) < 0.05
        row[noisy] = rng.integers(0, VOCABULARY, int(noisy.sum()))
    return found


@lru_cache(maxsize=2)
def trained_model(groups: int = 2, steps: int = 250) -> Any:
    """A Llama of two layers that has learnt the language (perplexity about 2; chance is 48)."""
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=groups, **sizes))
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    data = torch.from_numpy(language(16 * steps, seed=1))
    for step in range(steps):
        batch = data[16 * step:16 * step + 16]
        loss = model(batch, labels=batch).loss
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval()
