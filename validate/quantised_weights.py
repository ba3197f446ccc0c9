"""Quantised tensors of an export, decoded again: what its codes mean, and what the references compute with them.

Nothing is shared with the exporter's arithmetic or with any runtime's: the file is read with the safetensors library,
codes become numbers bit by bit, and which scale belongs to which value follows from the two shapes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from exporter.manifest import Export
from validate.metrics import TOLERANCES, Tolerance
from validate.references.decoder_tensors import DecoderTensors

SUFFIX = "_scale"
_LARGEST = {"fp8": 448.0, "int4": 7.0}
# what quantising the projections may do to one attention with hot random weights, the worst weights there are for it:
# twice the largest seen over all presets, three seeds each (int8: rel 0.25, 1 - cosine 3.3e-4; fp8: 0.89,
# 6.2e-3; int4: 2.6, 7.8e-2)
BOUNDS = {"int8": Tolerance(0.5, 7e-4), "fp8": Tolerance(1.8, 1.25e-2), "int4": Tolerance(5.2, 0.16)}
# of one attention whose activations ONNX Runtime rounds to int8 (half a step is 1/254 of a block's largest, in front
# of each of its products, and scores are hot): twice the largest seen over all narrow presets, two seeds each (0.29,
# 2.3e-3)
ROUNDED_ACTIVATIONS = Tolerance(0.6, 5e-3)
# between two runs of it: float32's last bit may round an activation to another code (3.4e-3, 5e-7 seen)
TURNED_ACTIVATIONS = Tolerance(1e-2, 2e-6)
# a matrix of the file -> the source's tensors it is made of, stacked, in Hugging Face's names and in the article's
_HUGGING_FACE = {**{f"{n}.weight": (f"{n}.weight",) for n in ("q_proj", "q_a_proj", "q_b_proj", "o_proj")},
                 "kv_a_proj.weight": ("kv_a_proj_with_mqa.weight",)}
_ARTICLE = {"q_a_proj.weight": ("down_proj_q.weight",), "q_b_proj.weight": ("up_proj_q.weight",),
            "q_rope_proj.weight": ("proj_qr.weight",), "kv_a_proj.weight": ("down_proj_kv.weight", "proj_kr.weight"),
            "o_proj.weight": ("fc.weight",)}


@dataclass(frozen=True)
class Codes:
    """Decoded values in float64, half the step of the grid at each (how far rounding to the nearest may move one; at
    the end of a grid that reaches less far on one side a whole one more), and what the largest code of each block
    stands for, [..., blocks]."""

    values: np.ndarray
    half_step: np.ndarray
    reach: np.ndarray


def scheme_of(made: Export) -> str | None:
    """fp8, int8, int4, or None for an export whose weights are not quantised, or not there."""
    weights: Mapping[str, Any] = made.data["weights"]
    found = None if weights["mode"] == "none" else weights.get("quantised")
    return None if found is None else str(found["scheme"])


def operator_of(made: Export) -> str | None:
    """What reads the codes: DequantizeLinear, or ONNX Runtime's MatMulNBits (and QMoE)."""
    return made.data["weights"]["quantised"].get("operator", "DequantizeLinear") if scheme_of(made) else None


def rounds_activations(made: Export) -> bool:
    """Whether ONNX Runtime's CPU rounds what it multiplies by codes to int8, a scale per row and block: as accuracy
    level 4 allows, and QMoE of eight bits at every level."""
    q = made.data["weights"].get("quantised")
    if operator_of(made) != "MatMulNBits":
        return False
    return q["accuracy_level"] == 4 or (q["scheme"] == "int8" and any(".experts." in n for n in q["tensors"]))


def judges_of(made: Export) -> tuple[str, ...]:
    """The backends of the CPU whose arithmetic is an export's own, the fastest first."""
    return ("interpreter",) if made.dtype == "bf16" or rounds_activations(made) else ("ort", "interpreter")


def tolerance_of(made: Export, backend: str | None = None) -> Tolerance:
    """Of one attention's graphs: the compute dtype's, and a fifth more where products over codes round once more in 16
    bits (over all narrow presets, 1.07 of the dtype's own was the largest seen). `backend` may round more."""
    tolerance = TOLERANCES[made.dtype]
    if backend == "ort" and rounds_activations(made):
        return ROUNDED_ACTIVATIONS
    if scheme_of(made) is None or made.dtype == "fp32":
        return tolerance
    return Tolerance(1.2 * tolerance.rel, 1.2 * tolerance.cosine)


def saved(made: Export) -> str:
    """Bytes before and after, in words."""
    q = made.data["weights"]["quantised"]
    return f"{q['scheme']} weights, {q['bytes_before'] / 1e6:.1f} MB to {q['bytes_after'] / 1e6:.1f} MB"


def decode(raw: np.ndarray, scale: np.ndarray, scheme: str, from_zero: bool = False) -> Codes:
    """Bytes uint8 of codes [..., in] (int4: [..., in / 2]) with scales [...] or [..., in / block], float64.
    `from_zero`: integers as ONNX Runtime's operators count them, half the range standing for 0."""
    if scheme == "fp8":
        numbers, steps = _fp8(raw)
    else:
        numbers = _halves(raw) if scheme == "int4" else raw.astype(np.float64)
        middle = 8 if scheme == "int4" else 128
        numbers = numbers - middle if from_zero else np.where(numbers < middle, numbers, numbers - 2 * middle)
        steps = np.where(from_zero & (numbers == middle - 1), 3.0, 1.0)
    per_row = scale.ndim == numbers.ndim - 1
    blocks = scale[..., None] if per_row else scale
    width = numbers.shape[-1] // blocks.shape[-1]
    factors = np.repeat(blocks, width, axis=-1)
    if from_zero:  # the largest magnitude of a block is its lowest code, by a scale of either sign
        return Codes(numbers * factors, steps / 2 * np.abs(factors), np.abs(blocks) * middle)
    return Codes(numbers * factors, steps / 2 * factors, blocks * _LARGEST[scheme])


def _fp8(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """E4M3: a sign, four bits of exponent with bias 7 (0: subnormal), three of mantissa, all ones a NaN."""
    bits = raw.astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    step = 2.0 ** (np.maximum(exponent, 1) - 10.0)
    magnitude = np.where(exponent == 0, mantissa, mantissa + 8) * step
    return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -magnitude, magnitude)), step


def _halves(raw: np.ndarray) -> np.ndarray:
    """Numbers 0 to 15, two to a byte: of each pair the first lies in the low half."""
    numbers = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]))
    numbers[..., 0::2], numbers[..., 1::2] = raw & 15, raw >> 4
    return numbers


class QuantisedFile:
    """The codes in an export's own weight file, by the name of their tensor."""

    def __init__(self, made: Export) -> None:
        self._file, self.scheme = made.folder / made.data["weights"]["file"], scheme_of(made)
        self._from_zero = operator_of(made) == "MatMulNBits"
        self.names: frozenset[str] = frozenset()
        if self.scheme is not None:
            with safe_open(self._file, framework="pt") as file:
                tag = "F8_E4M3" if self.scheme == "fp8" else "U8"
                self.names = frozenset(n for n in file.keys() if file.get_slice(n).get_dtype() == tag)  # noqa: SIM118

    def get(self, name: str, index: int | None = None) -> Codes:
        """Decoded; `index` picks one of a stack."""
        codes, scale = (_read(self._file, n, index) for n in (name, f"{name}{SUFFIX}"))
        assert self.scheme is not None
        return decode(codes.view(torch.uint8).numpy(), scale.double().numpy(), self.scheme, self._from_zero)

    def values(self, name: str, index: int | None = None) -> torch.Tensor:
        """The values alone, for a reference."""
        return torch.from_numpy(self.get(name, index).values)


def _read(path: Path, name: str, index: int | None) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
    return tensor


def meant_attention(made: Export, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Raw tensors of a layer export as its graphs compute with them: the source's own, unless some are codes."""
    return decoded_attention(made, tensors) if scheme_of(made) else dict(tensors)


def decoded_attention(made: Export, tensors: Mapping[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """Raw tensors of one attention with what the file holds as codes (below `prefix`) in place of the source's."""
    file, result = QuantisedFile(made), dict(tensors)
    for ours, theirs in (_ARTICLE if "down_proj_kv.weight" in tensors else _HUGGING_FACE).items():
        if f"{prefix}{ours}" not in file.names:
            continue
        values, at = file.values(f"{prefix}{ours}"), 0
        for name in theirs:
            rows = len(tensors[name])
            result[name], at = values[at:at + rows], at + rows
    _keep_value_bias(made, tensors, result)
    return result


def _keep_value_bias(made: Export, tensors: Mapping[str, torch.Tensor], result: dict[str, torch.Tensor]) -> None:
    """A bias of the values passes through W_O into the output's bias, which stays wide and was made of the source's own
    W_O: the difference goes into that bias, or the decoded W_O would change it."""
    c, article = made.config, "up_proj_v.bias" in tensors
    out, bias = ("fc", tensors.get("up_proj_v.bias")) if article else ("o_proj", tensors.get("kv_b_proj.bias"))
    if bias is None:
        return
    values = bias if article else bias.reshape(c.num_attention_heads, -1)[:, c.qk_nope_head_dim:].reshape(-1)
    weight = f"{out}.weight"
    lost = (tensors[weight].double() - result[weight].double()) @ values.double()
    result[f"{out}.bias"] = lost + tensors.get(f"{out}.bias", torch.zeros(len(lost))).double()


class DecodedTensors(DecoderTensors):
    """A decoder's source in which every matrix that the export holds as codes is replaced by what they mean."""

    def __init__(self, made: Export, source: DecoderTensors) -> None:
        self._made, self._source, self._file = made, source, QuantisedFile(made)

    def get(self, name: str) -> torch.Tensor:
        """A tensor by its canonical name."""
        ours = name.removeprefix("model.").replace(".mlp.shared_experts.", ".mlp.shared.")
        if ours in self._file.names:
            return self._file.values(ours)
        head, _, tail = ours.rpartition(".mlp.experts.")
        parts = tail.split(".")  # number, matrix_proj, weight
        if head and len(parts) == 3:
            stack = f"{head}.mlp.experts.{parts[1].removesuffix('_proj')}"
            if stack in self._file.names:
                return self._file.values(stack, int(parts[0]))
            both = f"{head}.mlp.experts.gate_up"  # gate and up, row by row
            if both in self._file.names:
                return self._file.values(both, int(parts[0]))[int(parts[1] == "up_proj")::2]
        return self._source.get(name)

    def within(self, prefix: str) -> dict[str, torch.Tensor]:
        """An attention's tensors."""
        ours = prefix.removeprefix("model.").replace(".self_attn.", ".attn.")
        return decoded_attention(self._made, self._source.within(prefix), ours)
