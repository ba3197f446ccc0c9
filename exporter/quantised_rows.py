"""A cache row in 8 bits: how a graph quantises new latents, and how it reads cached ones.

A row has one scale, max|latent| / 448 (FP8 E4M3) or / 127 (int8), rounded to the compute dtype before anything is
divided by it, so that rounding it leaves no error behind. The rotary key stays as it is: it is a ninth of the row, and
a score's error grows with the position it encodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
from onnx import TensorProto

from exporter.dtypes import DTYPES, STORED
from exporter.graph import GraphBuilder

LARGEST = {"fp8": 448.0, "int8": 127.0}  # the largest number of each code
# Codes are read as number * UNIT and scales as scale / UNIT, both exact: about 1 and max|latent|, so that neither a
# product of codes nor a probability times a scale leaves float16's range.
UNIT = 2.0**-7
_FP32 = DTYPES["fp32"]


@dataclass(frozen=True)
class QuantisedRows:
    """`codes` [B, n, d_c] in 8 bits, `scale` [B, n, 1] per UNIT (0 where nothing was written), `rope` [B, n, d_r]."""

    codes: str
    scale: str
    rope: str

    def latent(self, g: GraphBuilder, name: str) -> str:
        """The codes as numbers of the compute dtype, [B, n, d_c]; they want `scale` yet."""
        return g.op("DequantizeLinear", self.codes, g.scalar("const/unit", UNIT), name=name)

    def rows(self, g: GraphBuilder, name: str) -> str:
        """Whole rows [B, n, R] in the compute dtype: a copy, for cores that know no other."""
        latent = g.op("Mul", self.latent(g, f"{name}_codes"), self.scale, name=f"{name}_latent")
        return g.op("Concat", latent, self.rope, name=f"{name}_rows", axis=2)


def read(g: GraphBuilder, codes: str, scale: str, rope: str, written: str | None, name: str) -> QuantisedRows:
    """Rows as they lie in a cache. `written` [B, n, 1] selects those that hold anything: a stale scale times a code may
    overflow, and 0 x inf is NaN."""
    if written is not None:
        scale = g.op("Where", written, scale, g.scalar("const/zero", 0.0), name=f"{name}_scale_clean")
    return QuantisedRows(codes, g.op("Mul", scale, g.scalar("const/per_unit", 1 / UNIT), name=f"{name}_factor"), rope)


def quantise(g: GraphBuilder, latent: str, dtype: str, outputs: tuple[str, str]) -> tuple[str, str]:
    """New latents [B, T, d_c] -> codes and scales under the names of `outputs`, computed in float32."""
    half = g.dtype.name != "fp32"
    wide = g.to(latent, TensorProto.FLOAT, "latent_fp32") if half else latent
    peak = g.op("ReduceMax", g.op("Abs", wide, name="latent_abs"), g.ints(2), name="latent_peak", keepdims=1)
    share = g.op("Mul", peak, g.scalar(f"const/one_of_{dtype}", 1 / LARGEST[dtype], _FP32), name="scale_exact")
    # at least the smallest normal number: below it a scale has no precision, and 0 divides nothing
    least = g.scalar("const/smallest", float(ml_dtypes.finfo(g.dtype.numpy).smallest_normal))
    rounded = g.to(share, g.dtype.onnx, "scale_rounded") if half else share
    scale = g.op("Max", rounded, least, name="new_scale", output=outputs[1])
    divisor = g.to(scale, TensorProto.FLOAT, "scale_fp32") if half else scale
    codes = g.op("QuantizeLinear", g.op("Div", wide, divisor, name="latent_scaled"), g.scalar("const/step", 1.0, _FP32),
                 name="new_codes", output=outputs[0], output_dtype=STORED[dtype].onnx)
    return codes, scale
