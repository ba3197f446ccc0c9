"""One tensor-parallel rank of a decoder, as a source of its own: its share of the heads, of every FFN's and expert's
inner width, and of the head's vocabulary; all else is replicated.

    rows of      q_proj, q_b_proj, kv_b_proj (whole heads), gate_proj, up_proj, lm_head
    columns of   o_proj (whole heads), down_proj: their products are partial sums, which the ranks add up
    rank 0       o_proj's bias, which is added once
    every rank   embedding, norms, router, and what makes the cache row (kv_a_proj) and the query latent (q_a_proj)

Experts are split by their inner width and not by number: every rank computes its share of whichever experts a token
chose, so no routing leaves a rank idle, and the router and the graphs' forms of experts are those of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.safetensors_file import SourceTensor
from exporter.source import ModelSource

ROWS = ("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
COLUMNS = ("o_proj", "down_proj")
_HEAD = "lm_head.weight"


def check_ranks(decoder: DecoderConfig, ranks: int, name: str) -> None:
    """InputError unless `ranks` divides everything that is split, naming what it does not divide."""
    if not 2 <= ranks <= 1024:
        raise InputError(f"--tensor-parallel {ranks}: expected a number of ranks from 2 to 1024")
    moe = decoder.moe if decoder.sparse_layers else None
    split = {"num_attention_heads": decoder.attention.num_attention_heads, "vocab_size": decoder.vocab_size}
    if decoder.shortcut or len(decoder.sparse_layers) < decoder.layers:
        split["intermediate_size"] = decoder.intermediate_size
    if moe is not None:
        split |= {"moe_intermediate_size": moe.moe_intermediate_size,
                  "shared experts' intermediate size": moe.shared_intermediate_size}
    uneven = [f"{field} {size}" for field, size in split.items() if size % ranks]
    if uneven:
        common = [n for n in range(2, 257) if not any(size % n for size in split.values())]
        choice = f"expected one of {', '.join(map(str, common))}" if common else "no number of ranks divides them all"
        raise InputError(f"--tensor-parallel {ranks}: does not divide {', '.join(uneven)} of {name}; {choice}")


def rank_config(decoder: DecoderConfig, ranks: int, rank: int) -> DecoderConfig:
    """The configuration of one rank: a decoder of fewer heads and narrower FFNs, with its part of the vocabulary."""
    moe, c = decoder.moe, decoder.attention
    rows = decoder.vocab_size // ranks
    return replace(
        decoder, attention=replace(c, num_attention_heads=c.num_attention_heads // ranks),
        intermediate_size=max(1, decoder.intermediate_size // ranks), vocabulary_part=(rank * rows, (rank + 1) * rows),
        moe=moe and replace(moe, moe_intermediate_size=max(1, moe.moe_intermediate_size // ranks),
                            shared_intermediate_size=moe.shared_intermediate_size // ranks))


def rank_source(source: ModelSource, ranks: int, rank: int) -> ModelSource:
    """A source of the rank's own tensors; nothing is read before it is asked for."""
    tied = source.decoder.tie_word_embeddings  # then the head is rows of the embedding, which is replicated

    def shard(tensors: Mapping[str, SourceTensor]) -> dict[str, SourceTensor]:
        found = {}
        for name, tensor in tensors.items():
            module, kind = name.split(".")[-2:]
            if module in ROWS or (name == _HEAD and not tied):
                found[name] = _part(tensor, 0, ranks, rank)
            elif module in COLUMNS and kind != "bias":
                found[name] = _part(tensor, 1, ranks, rank)
            elif module not in COLUMNS or rank == 0:
                found[name] = tensor
        return found

    return ModelSource(f"{source.name} (rank {rank} of {ranks})", rank_config(source.decoder, ranks, rank),
                       {scope: shard(tensors) for scope, tensors in source.attentions.items()}, shard(source.others),
                       source.record)


def _part(tensor: SourceTensor, axis: int, ranks: int, rank: int) -> SourceTensor:
    """The rank's equal part of a tensor along one axis."""
    size = tensor.shape[axis] // ranks
    if tensor.shape[axis] % ranks:  # sizes that disagree with the configuration are refused by name where it is checked
        return tensor
    shape = tuple(size if i == axis else d for i, d in enumerate(tensor.shape))
    span = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)

    def load() -> np.ndarray:
        values: np.ndarray = tensor.load()[span]
        return values

    return SourceTensor(shape, load)
