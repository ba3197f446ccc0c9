"""The interpreter's operators for routers and experts: selection by index, and ONNX Runtime's `com.microsoft.MoE`."""

from __future__ import annotations

import torch

from engines.onnx_ops import UnsupportedOperator, Value, host, one_type, operator, rounded


@operator("Log")
def _log(x: Value) -> Value:
    return rounded(torch.log(x.data), x.dtype)


@operator("IsNaN")
def _is_nan(x: Value) -> Value:
    return Value(torch.isnan(x.data), torch.bool)


@operator("TopK", host=(1,))
def _top_k(x: Value, k: Value, *, axis: int = -1, largest: int = 1, sorted: int = 1) -> tuple[Value, Value]:  # noqa: A002
    """Equal values: the lower index first, as ONNX says (a stable sort, which torch.topk is not)."""
    (count,) = host(k)
    if x.data.is_meta:
        values, indices = torch.topk(x.data, count, axis)
    else:
        values, indices = torch.sort(x.data, dim=axis, descending=bool(largest), stable=True)
        values, indices = values.narrow(axis, 0, count), indices.narrow(axis, 0, count)
    return x.moved(values), Value(indices, torch.int64)


def _from_the_front(x: Value, indices: Value, axis: int) -> torch.Tensor:
    """Indices as torch takes them: int64, and none from the end."""
    found = indices.data.long()
    return torch.where(found < 0, found + x.data.shape[axis], found)


@operator("GatherElements")
def _gather_elements(x: Value, indices: Value, *, axis: int = 0) -> Value:
    return x.moved(torch.gather(x.data, axis, _from_the_front(x, indices, axis)))


@operator("ScatterElements")
def _scatter_elements(x: Value, indices: Value, updates: Value, *, axis: int = 0, reduction: str = "none") -> Value:
    if reduction != "none":
        raise UnsupportedOperator(f"ScatterElements has reduction {reduction!r}; expected 'none'")
    one_type(x, updates)
    return x.moved(torch.scatter(x.data, axis, _from_the_front(x, indices, axis), updates.data))


@operator("com.microsoft:MoE")
def _moe(x: Value, router: Value, fc1: Value, fc1_bias: Value | None, fc2: Value, fc2_bias: Value | None = None, *,
         k: int, activation_type: str = "relu", swiglu_fusion: int = 0, activation_alpha: float = 1.0,
         activation_beta: float = 0.0, normalize_routing_weights: int = 0) -> Value:  # fmt: skip
    """Softmax over the k best router logits weighs down(silu(gate x) * up x); gate and up rows alternate."""
    one_type(x, router, fc1, fc2)
    if fc1_bias is not None or fc2_bias is not None:
        raise UnsupportedOperator("MoE has biases; expected none")
    return mixture(x, router, fc1.data, fc2.data, k, "MoE", activation_type, swiglu_fusion, activation_alpha,
                   activation_beta, normalize_routing_weights)


def mixture(x: Value, router: Value, fc1: torch.Tensor | None, fc2: torch.Tensor | None, k: int, name: str,
            *options: object) -> Value:
    """What `MoE` and `QMoE` compute with weights as numbers; None of shapes alone. `options`: activation, fusion,
    alpha, beta, normalisation."""
    if options != ("swiglu", 1, 1.0, 0.0, 1):
        raise UnsupportedOperator(f"{name} is known as fused swiglu with alpha 1, beta 0 and normalised weights only")
    if x.data.is_meta or fc1 is None or fc2 is None:
        return x
    logits, index = torch.topk(router.data, k, dim=1)
    weights, mixed = torch.softmax(logits, dim=1), torch.zeros_like(x.data)
    for expert in range(fc1.shape[0]):
        token, place = torch.where(index == expert)
        if len(token):
            both = x.data[token] @ fc1[expert].T
            gate, up = both[:, 0::2], both[:, 1::2]
            out = (torch.nn.functional.silu(gate) * up) @ fc2[expert].T
            mixed.index_add_(0, token, out * weights[token, place, None])
    return rounded(mixed, x.dtype)
