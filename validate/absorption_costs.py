"""What a graph pays for its cache: bytes of a token, and operations of a decode step per cached row.

Operations are counted where they grow with the cache: expansions, scores, mixes; a multiply-add is two. The rest of a
step is the same in every form but for W_UK and W_UV, which the absorbed form applies to the new tokens alone.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
from typing import Any

from onnx import TensorProto, helper

from validate.dataflow import WHOLE, Flow, Product

CONTEXT = 4096  # rows of past of the step that is spelled out


@dataclass(frozen=True)
class Sizes:
    """H, d_c, d_r, nope and v; None where neither the graph nor a configuration tells."""

    heads: int | None = None
    latent: int | None = None
    rope: int | None = None
    nope: int | None = None
    value: int | None = None

    def completed_by(self, other: Sizes) -> Sizes:
        """These, and where one is unknown the other's."""
        return replace(self, **{f.name: getattr(other, f.name) for f in fields(self) if getattr(self, f.name) is None})

    @property
    def row(self) -> int | None:
        """R = d_c + d_r."""
        return None if self.latent is None or self.rope is None else self.latent + self.rope


@dataclass(frozen=True)
class Costs:
    """Bytes of cache per token over all attentions, and flops per cached row and new token; the same of the absorbed
    form over the same sizes and cache dtype, None where the sizes are not known."""

    sizes: Sizes
    cache_bytes_per_token: float
    absorbed_cache_bytes_per_token: float | None
    flops_per_row: float
    absorbed_flops_per_row: float | None

    def to_dict(self) -> dict[str, Any]:
        """JSON form; with the flops of a step of one token over CONTEXT rows."""
        return {**asdict(self), "context": CONTEXT, "flops_per_step": CONTEXT * self.flops_per_row,
                "absorbed_flops_per_step": (None if self.absorbed_flops_per_row is None
                                            else CONTEXT * self.absorbed_flops_per_row)}


def costs(flow: Flow, sizes: Sizes) -> Costs:
    """Counted from shapes: of unknown ones nothing is counted."""
    stored = {c.name: (flow.width(c.name) or Fraction(0)) * item_bytes(flow.graph.dtype(c.name))
              for c in flow.roles.caches}
    attentions = len({c.attention for c in flow.roles.caches})
    absorbed_bytes = absorbed_flops = None
    if sizes.row is not None:
        narrow = min(item_bytes(flow.graph.dtype(c.name)) for c in flow.roles.caches)
        wide = max(item_bytes(flow.graph.dtype(c.name)) for c in flow.roles.caches)
        absorbed_bytes = float(attentions * sizes.row * wide)
        if narrow != wide and sizes.latent is not None and sizes.rope is not None:  # a quantised row, with its scale
            absorbed_bytes = float(attentions * (sizes.latent * narrow + (1 + sizes.rope) * wide))
        if sizes.heads is not None and sizes.latent is not None:
            absorbed_flops = float(2 * attentions * sizes.heads * (sizes.row + sizes.latent))
    per_row = sum((_per_row(flow, p) for p in flow.expansions), Fraction(0))
    per_row += sum((_score_flops(flow, p) for p in flow.scores), Fraction(0)) / flow.roles.new
    per_row += sum((_mix_flops(flow, p) for p in flow.mixes), Fraction(0)) / flow.roles.new
    return Costs(sizes, float(sum(stored.values())), absorbed_bytes, float(per_row), absorbed_flops)


def item_bytes(dtype: int) -> Fraction:
    """Bytes of one number of an ONNX element type."""
    if dtype in (TensorProto.INT4, TensorProto.UINT4):
        return Fraction(1, 2)
    return Fraction(int(helper.tensor_dtype_to_np_dtype(dtype).itemsize))


def _summed(flow: Flow, p: Product) -> int:
    shape = flow.few.shape.get(p.rows, ())
    return shape[p.rows_axis] if p.rows_axis < len(shape) else 0


def _per_row(flow: Flow, p: Product) -> Fraction:
    return 2 * (flow.width(p.node.outputs[0]) or Fraction(0)) * _summed(flow, p)


def _score_flops(flow: Flow, p: Product) -> Fraction:
    if p.node.op in WHOLE:
        return Fraction(2 * (flow.few.elements(p.other) or 0), flow.roles.batch)
    return _per_row(flow, p)


def _mix_flops(flow: Flow, p: Product) -> Fraction:
    """Every number of the result takes one multiply-add per row that goes in; a block is some of the rows."""
    made = Fraction(2 * (flow.few.elements(p.node.outputs[0]) or 0), flow.roles.batch)
    columns = (flow.few.elements(p.rows) or 0) // max(_summed(flow, p), 1) // flow.roles.batch
    if p.node.op in WHOLE or not columns:
        return made
    return made * (flow.width(p.rows) or Fraction(0)) / columns
