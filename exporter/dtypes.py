"""The three compute dtypes under each name that a library gives them."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
from onnx import TensorProto


@dataclass(frozen=True)
class DType:
    """One compute dtype: the CLI's name, ONNX's element type, NumPy's dtype, safetensors' tag, bytes, lowest value."""

    name: str
    onnx: int
    numpy: np.dtype
    safetensors: str
    itemsize: int
    lowest: float


DTYPES = {
    "fp32": DType("fp32", TensorProto.FLOAT, np.dtype(np.float32), "F32", 4, float(np.finfo(np.float32).min)),
    "fp16": DType("fp16", TensorProto.FLOAT16, np.dtype(np.float16), "F16", 2, float(np.finfo(np.float16).min)),
    "bf16": DType("bf16", TensorProto.BFLOAT16, np.dtype(ml_dtypes.bfloat16), "BF16", 2,
                  float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)),
}
NUMPY_OF_NAME = {d.name: d.numpy for d in DTYPES.values()} | {"int64": np.dtype(np.int64)}
ONNX_OF_NAME = {d.name: d.onnx for d in DTYPES.values()} | {"int64": int(TensorProto.INT64)}
