"""The three compute dtypes, and the codes of quantised values, under each name that a library gives them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto


@dataclass(frozen=True)
class DType:
    """One dtype: the CLI's name, ONNX's element type, NumPy's dtype, safetensors' tag, bytes of an element in memory,
    lowest value. `packed`: elements in one byte of a file, along the last axis, the first in the lowest bits."""

    name: str
    onnx: int
    numpy: np.dtype
    safetensors: str
    itemsize: int
    lowest: float
    packed: int = 1

    def nbytes(self, elements: int) -> int:
        """Bytes that so many elements take in a file."""
        return -(-elements * self.itemsize // self.packed)


DTYPES = {
    "fp32": DType("fp32", TensorProto.FLOAT, np.dtype(np.float32), "F32", 4, float(np.finfo(np.float32).min)),
    "fp16": DType("fp16", TensorProto.FLOAT16, np.dtype(np.float16), "F16", 2, float(np.finfo(np.float16).min)),
    "bf16": DType("bf16", TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16), "BF16", 2,
                  float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)),
}
# what `DequantizeLinear` turns into a compute dtype, and (uint8, uint4) what `MatMulNBits` and `QMoE` multiply by;
# safetensors has no name for four bits: their bytes are stored as they are
CODES = {
    "fp8": DType("fp8", TensorProto.FLOAT8E4M3FN, np.dtype(ml_dtypes.float8_e4m3fn), "F8_E4M3", 1, -448.0),
    "int8": DType("int8", TensorProto.INT8, np.dtype(np.int8), "I8", 1, -128.0),
    "int4": DType("int4", TensorProto.INT4, np.dtype(ml_dtypes.int4), "U8", 1, -8.0, packed=2),
    "uint8": DType("uint8", TensorProto.UINT8, np.dtype(np.uint8), "U8", 1, 0.0),
    "uint4": DType("uint4", TensorProto.UINT4, np.dtype(ml_dtypes.uint4), "U8", 1, 0.0, packed=2),
}
STORED = DTYPES | CODES
NUMPY_OF_NAME = {d.name: d.numpy for d in STORED.values()} | {"int64": np.dtype(np.int64)}
ONNX_OF_NAME = {d.name: d.onnx for d in STORED.values()} | {"int64": int(TensorProto.INT64)}
