"""A quantised cache held against the float64 reference: what it says of rows and scales, in arithmetic of its own.

Rounding to 8 bits turns at ties: two sound runs may round one number in ten thousand to neighbouring codes. So every
step is judged on the rows that the graph itself wrote: each must lie within half a step of the exact row, under the
scale that the exact row has; and the outputs must be those of a reference that attends the written rows. Both hold at
the compute dtype's tolerance, however coarse the codes are. How far the outputs are from a cache that was not quantised
at all is the quantisation error, and is reported beside.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import torch

from engines.cache import LatentCache
from exporter.dtypes import DTYPES
from exporter.manifest import Export
from validate.metrics import Tolerance
from validate.references import Reference
from validate.traces import Trace

LARGEST = {"fp8": 448.0, "int8": 127.0}
# How far one attention's output may be from an unquantised cache's. Measured in float64 on hot weights of two families,
# three seeds, 16 to 4096 rows of past: int8 0.06 to 0.12 (1 - cosine 1e-4 to 3e-4), FP8, whose codes have three bits
# behind the leading one, 0.18 to 0.36 (9e-4 to 2.7e-3). The compute dtype's own error comes on top.
ERROR = {"fp8": Tolerance(1.0, 1e-2), "int8": Tolerance(0.4, 2e-3)}

Parts = Mapping[str, np.ndarray]


def encode(made: Export, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Rows [..., R] as an export's quantised cache would hold them: latent, scale, rope."""
    latent, rope = np.split(rows.astype(np.float64), [made.config.kv_lora_rank], axis=-1)
    dtype, largest = DTYPES[made.dtype].numpy, LARGEST[made.cache_dtype]
    scale = np.maximum(np.abs(latent).max(axis=-1, keepdims=True) / largest, ml_dtypes.finfo(dtype).smallest_normal)
    scale = scale.astype(dtype)
    steps = np.clip(latent / scale.astype(np.float64), -largest, largest)
    codes = np.rint(steps).astype(np.int8) if made.cache_dtype == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
    return {"latent": codes, "scale": scale, "rope": rope.astype(dtype)}


def decode(parts: Parts) -> np.ndarray:
    """The rows [..., R] that a cache's parts stand for, in float64."""
    latent = parts["latent"].astype(np.float64) * parts["scale"].astype(np.float64)
    return np.concatenate([latent, parts["rope"].astype(np.float64)], axis=-1)


def load(made: Export, cache: LatentCache, rows: np.ndarray, lengths: np.ndarray, attention: int = 0) -> None:
    """Fill a cache of any kind with rows [B, S, R] of which the first `lengths` [B] are valid."""
    if not cache.quantised:
        cache.load(rows, lengths, attention)
        return
    for name, part in encode(made, rows).items():
        cache.parts[name][attention][:, :rows.shape[1]] = part
    cache.lengths[:] = lengths


def spoil(cache: LatentCache, tail: float) -> None:
    """Fill every row beyond the lengths with `tail`, the codes with their largest number."""
    for name, layers in cache.parts.items():
        for rows in layers:
            largest = {"int8": 127.0, "float8_e4m3fn": 448.0}.get(rows.dtype.name, tail)
            for b, length in enumerate(cache.lengths):
                rows[b, length:] = largest if name == "latent" else tail


def held(cache: LatentCache, attention: int = 0) -> np.ndarray:
    """The rows [B, S, R] that a cache of any kind holds of one attention, as numbers."""
    parts = {name: layers[attention] for name, layers in cache.parts.items()}
    return decode(parts) if cache.quantised else parts["latent"]


def _half_step(latent: np.ndarray, scale: np.ndarray, dtype: str) -> np.ndarray:
    """Half the distance between codes around each number: of FP8's the three bits behind its leading one."""
    if dtype == "int8":
        return np.broadcast_to(scale / 2, latent.shape)
    exponent = np.floor(np.log2(np.maximum(np.abs(latent / scale), 2.0**-6)))
    half: np.ndarray = scale * 2.0 ** (exponent - 4)
    return half


def admissible(made: Export, found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """What sound rounding of `exact` rows [..., R] may have made of them: of the latents the number nearest to `found`
    within half a step of the exact one, under the scale of the exact row; the rotary keys as they are."""
    latent, rope = np.split(exact, [made.config.kv_lora_rank], axis=-1)
    smallest = float(ml_dtypes.finfo(DTYPES[made.dtype].numpy).smallest_normal)
    scale = np.maximum(np.abs(latent).max(axis=-1, keepdims=True) / LARGEST[made.cache_dtype], smallest)
    half = _half_step(latent, scale, made.cache_dtype)
    return np.concatenate([np.clip(found[..., :made.config.kv_lora_rank], latent - half, latent + half), rope], axis=-1)


def taught(made: Export, trace: Trace, cache: LatentCache, reference: Reference
           ) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """What the float64 reference answers to each step of `trace` when it attends the rows that a replay left in
    `cache`; the new ones of those rows, [n, R]; and what they may be at best."""
    rows_held = torch.from_numpy(held(cache))
    lengths = np.zeros(trace.batch, np.int64) if trace.start_lengths is None else trace.start_lengths.copy()
    reference.seed_rows(rows_held, [int(n) for n in lengths])
    expected, rows = [], []
    for step in trace.steps:
        hidden = torch.from_numpy(step.hidden.astype(np.float64))
        exact = reference.new_rows(hidden)
        given = exact.clone()  # of padding nothing was kept, and nothing is judged
        for b, (start, count) in enumerate(zip(lengths, step.counts, strict=True)):
            given[b, :count] = rows_held[b, start:start + count]
            rows.append((rows_held[b, start:start + count].numpy(), exact[b, :count].numpy()))
        expected.append(reference.forward(hidden, [int(n) for n in step.counts], given).numpy())
        lengths += step.counts
    found, exact_rows = (np.concatenate(side) for side in zip(*rows, strict=True))
    return expected, found, admissible(made, found, exact_rows)
