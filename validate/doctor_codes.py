"""FP8 checkpoints: whether codes and scales belong together, told by the codes themselves.

A scale is its block's largest magnitude / 448, so the largest code of every block is 448 (with scales that are powers
of two above 224). Blocks of another size than they are read with do not have that: rows on the wrong side of a border
were divided by a neighbour's scale. And a scale that should have been a reciprocal makes weights of absurd size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from exporter.dequantise import blocks
from exporter.safetensors_file import StoredSource, read_header
from validate.doctor_ailments import AILMENTS, Finding, Report

LARGEST, POWERS = 448.0, 224.0
FULL = 0.999  # share of blocks whose largest code must be full under the right size
ABSURD = 100.0  # std x sqrt(fan_in) of a projection: trained ones have 0.1 to 10
_CODES = 32 << 20  # codes looked at


@dataclass(frozen=True)
class _Pair:
    name: str
    codes: np.ndarray  # float32 values of the codes, [rows, columns]
    scale: np.ndarray  # float32


def examine_codes(folder: Path, raw: Mapping[str, Any], report: Report) -> None:
    """Every FP8 matrix within the budget, attention's first."""
    quantisation = raw.get("quantization_config") or (raw.get("text_config") or {}).get("quantization_config")
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") != "fp8":
        return
    block = tuple(int(b) for b in quantisation["weight_block_size"])
    powers = quantisation.get("scale_fmt") == "ue8m0"
    pairs = list(_pairs(folder))
    report.see(f"FP8: codes of {len(pairs)} matrices against their scales, blocks of {block[0]} x {block[1]}")
    for pair in pairs:
        report.add(_examine(pair, block, powers))


def _pairs(folder: Path) -> Iterator[_Pair]:
    stored: dict[str, StoredSource] = {}
    for file in sorted(folder.glob("*.safetensors")):
        stored |= read_header(file)
    left = _CODES
    for name in sorted(stored, key=lambda n: (".self_attn." not in n and ".attn." not in n, n)):
        weight = stored[name]
        scale = stored.get(f"{name}_scale_inv") or stored.get(name.removesuffix("weight") + "scale")
        size = int(np.prod(weight.shape))
        if weight.dtype != "F8_E4M3" or scale is None or size > left:
            continue
        left -= size
        values = weight.load_raw().view(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        yield _Pair(name, values, scale.load_raw().astype(np.float32))


def _share(codes: np.ndarray, height: int, width: int, powers: bool) -> float:
    """Share of blocks whose largest code is full."""
    full, limit, count = 0, POWERS if powers else LARGEST * 0.97, 0
    for i in range(0, codes.shape[0], height):
        band = np.abs(codes[i:i + height]).max(axis=0)
        for j in range(0, codes.shape[1], width):
            full, count = full + bool(band[j:j + width].max() > limit), count + 1
    return full / count


def _examine(pair: _Pair, block: tuple[int, ...], powers: bool) -> Iterator[Finding]:
    height, width = block
    expected = (blocks(pair.codes.shape[0], height), blocks(pair.codes.shape[1], width))
    if pair.scale.shape != expected:
        yield AILMENTS["fp8-block"].found(f"{pair.name} {list(pair.codes.shape)} has {list(pair.scale.shape)} scales; "
                                          f"blocks of {height} x {width} have {list(expected)}", where=pair.name)
        return
    share = _share(pair.codes, height, width, powers)
    if share < FULL:
        other = _other_height(pair, height, width, powers)
        if other is not None:
            yield AILMENTS["fp8-block"].found(
                f"{pair.name}: {100 * share:.0f} % of its blocks of {height} x {width} reach the largest code; in "
                f"blocks of {other} rows all do", where=pair.name)
            return
    rows = np.repeat(np.repeat(pair.scale, height, 0)[:len(pair.codes)], width, 1)[:, :pair.codes.shape[1]]
    spread = float((pair.codes * rows).std()) * pair.codes.shape[1] ** 0.5
    inverse = float((pair.codes / np.where(rows == 0, 1, rows)).std()) * pair.codes.shape[1] ** 0.5
    if spread > ABSURD and inverse < ABSURD:
        yield AILMENTS["fp8-scale-inverted"].found(
            f"{pair.name}: std x sqrt(fan_in) is {spread:.3g} as read, {inverse:.3g} divided by the scale; scales are "
            f"around {float(np.median(pair.scale)):.3g}", where=pair.name)


def _other_height(pair: _Pair, height: int, width: int, powers: bool) -> int | None:
    """Rows per block, other than stated and with as many scales, under which every block reaches the largest code."""
    rows, count = pair.codes.shape[0], pair.scale.shape[0]
    for other in range(-(-rows // count), height * 2):
        if other != height and blocks(rows, other) == count and _share(pair.codes, other, width, powers) >= FULL:
            return other
    return None
