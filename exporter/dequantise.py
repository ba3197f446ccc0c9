"""The arithmetic of quantised weights: codes and scales in, float32 values out.

Pure functions of arrays. Both go through the matrix a band of rows at a time, so that memory holds the result and
little else, and look codes up in a table, which is far faster than converting them one by one. Products are rounded
once, to float32. Arrays of the wrong shape are the caller's mistake.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

# every FP8 code's value, by its byte
_FP8_VALUES: np.ndarray = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
# every byte's two int4 values, the low half first, as one 8-byte item
_INT4_PAIRS: np.ndarray = np.stack([np.arange(256) % 16 - 8, np.arange(256) // 16 - 8], axis=1).astype("<f4").view(
    np.uint64)[:, 0]
_INT4_BAND = 1 << 18  # values dequantised at once


def blocks(size: int, block: int) -> int:
    """How many blocks cover `size`, the last one perhaps in part."""
    return -(-size // block)


def fp8_block(weight: np.ndarray, scale: np.ndarray, block: tuple[int, int]) -> np.ndarray:
    """`weight[i, j] * scale[i // block[0], j // block[1]]`, weight float8_e4m3fn [rows, columns].

    `scale` is float or float8_e8m0fnu (a power of two), one entry a block; blocks at the edges may be ragged.
    """
    (rows, columns), (height, width) = weight.shape, block
    factors = scale.astype(np.float32)
    assert factors.shape == (blocks(rows, height), blocks(columns, width))
    codes, result = weight.view(np.uint8), np.empty((rows, columns), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is found where weights are checked
        for i, factor in enumerate(factors):
            band = result[i * height:(i + 1) * height]
            np.take(_FP8_VALUES, codes[i * height:(i + 1) * height], out=band, mode="clip")
            band *= np.repeat(factor, width)[:columns]
    return result


def int4_groups(packed: np.ndarray, scale: np.ndarray, group: int) -> np.ndarray:
    """Symmetric int4 with one scale for every `group` values of a row.

    `packed` int32 [rows, columns / 8] holds eight values each, the first in the lowest four bits, stored as value + 8;
    `scale` is float [rows, columns / group].
    """
    rows, columns = packed.shape[0], packed.shape[1] * 8
    assert scale.shape == (rows, columns // group)
    assert columns % group == 0
    codes, result = packed.astype("<i4", copy=False).view(np.uint8), np.empty((rows, columns), np.float32)
    step = max(1, _INT4_BAND // max(columns, 1))
    with np.errstate(over="ignore", invalid="ignore"):
        for begin in range(0, rows, step):
            band = result[begin:begin + step]
            np.take(_INT4_PAIRS, codes[begin:begin + step], out=band.view(np.uint64), mode="clip")
            grouped = band.reshape(len(band), -1, group)
            grouped *= scale[begin:begin + step].astype(np.float32)[:, :, None]
    return result
