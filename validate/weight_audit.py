"""The rung between source and graph: the exported weight file, read back and held against the source in float64.

It shares no code with the exporter's weight handling: the file is read with the safetensors library and the expectation
comes from the references' own reading of the source. It also sees what no output can show, such as up_proj_k's bias,
which the softmax drops but the file must keep.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from safetensors import safe_open

from exporter.manifest import Export
from validate.metrics import Difference, compare
from validate.references.rope import softmax_scale
from validate.references.weights import Affine, AttentionWeights, attention_weights


def audit(made: Export, tensors: Mapping[str, torch.Tensor]) -> tuple[Difference, str]:
    """The worst difference of all exported weights, and the name of its tensor. Both directions: a tensor that the
    source implies and the file lacks, or the reverse, is an infinite difference."""
    source = attention_weights(made.config, tensors, torch.float64, "cpu")
    expected = _expected(made, source)
    with safe_open(made.folder / made.data["weights"]["file"], framework="pt") as file:
        names = [n for n in file.keys() if not n.startswith("rope.")]  # noqa: SIM118  (not a dict)
        odd = sorted(set(names) ^ set(expected))
        if odd:
            return Difference(float("inf"), float("inf"), 0.0, None, False), f"{odd[0]} (only on one side)"
        results = {n: compare(file.get_tensor(n).double().numpy(), expected[n].double().numpy()) for n in names}
    worst = max(results, key=lambda n: results[n].rel)
    return results[worst], worst


def _by_head(parts: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Head-major parts [H a, ...], [H b, ...] -> one [H (a + b), ...]."""
    split = [p.reshape(heads, -1, *p.shape[1:]) for p in parts]
    joined = torch.cat(split, dim=1)
    return joined.reshape(-1, *joined.shape[2:])


def _bias(linear: Affine, like: torch.Tensor) -> torch.Tensor:
    return linear.bias if linear.bias is not None else like.new_zeros(len(linear.weight))


def _add(found: dict[str, torch.Tensor], name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    found[f"{name}.weight"] = weight
    if bias is not None:
        found[f"{name}.bias"] = bias


def _query(made: Export, w: AttentionWeights, found: dict[str, torch.Tensor]) -> tuple[Affine, Affine]:
    """Add the low rank; return q_nope and q_rope as maps of what the last projection reads."""
    nope, rope = w.q_nope, w.q_rope
    if w.q_low is None:
        return nope, rope
    if made.data["merge_q"]:
        bias = nope.weight @ _bias(w.q_low, nope.weight) + _bias(nope, nope.weight)
        return Affine(nope.weight @ w.q_low.weight, bias), rope
    _add(found, "q_a_proj", w.q_low.weight, w.q_low.bias)
    if w.q_gain is not None:
        found["q_a_norm.weight"] = w.q_gain
    return nope, rope


def _expected(made: Export, w: AttentionWeights) -> dict[str, torch.Tensor]:
    H = made.config.num_attention_heads
    merged, folded = made.data["merge_q"], made.data["absorb"] == "folded"
    expanded = made.data["prefill"] == "expanded"
    scale, found = softmax_scale(made.config), dict[str, torch.Tensor]()
    nope, rope = _query(made, w, found)
    separate = w.rope_from_hidden and not merged
    last = "q_proj" if w.q_low is None or merged else "q_b_proj"
    if not folded or expanded:
        if separate:
            _add(found, last, nope.weight, nope.bias)
        else:
            biases = [_bias(nope, w.w_uk), _bias(rope, w.w_uk)]
            has_bias = nope.bias is not None or rope.bias is not None
            _add(found, last, _by_head([nope.weight, rope.weight], H), _by_head(biases, H) if has_bias else None)
    if folded:
        weight = torch.einsum("hnc,hni->hci", w.w_uk * scale, nope.weight.reshape(H, -1, nope.weight.shape[1]))
        bias = torch.einsum("hnc,hn->hc", w.w_uk * scale, _bias(nope, w.w_uk).reshape(H, -1)).flatten()
        _add(found, "q_folded", weight.flatten(0, 1), None if nope.bias is None else bias)
    if folded or separate:
        _add(found, "q_rope_proj", rope.weight, rope.bias)
    kv_bias = None
    if w.kv_down.bias is not None or w.k_rope.bias is not None:
        kv_bias = torch.cat([_bias(w.kv_down, w.w_uk), _bias(w.k_rope, w.w_uk)])
    _add(found, "kv_a_proj", torch.cat([w.kv_down.weight, w.k_rope.weight]), kv_bias)
    if w.kv_gain is not None:
        found["kv_a_norm.weight"] = w.kv_gain
    return found | _values(w, scale, folded, expanded)


def _values(w: AttentionWeights, scale: float, folded: bool, expanded: bool) -> dict[str, torch.Tensor]:
    """Up-projections, biases and output."""
    found: dict[str, torch.Tensor] = {}
    H = len(w.w_uk)
    out = w.out.weight.reshape(len(w.out.weight), H, -1)  # [D, H, v]
    if not folded or expanded:
        found |= {"w_uk": w.w_uk * scale, "w_uv": w.w_uv.transpose(1, 2), "o_proj.weight": w.out.weight}
    if expanded:
        found["kv_b"] = torch.cat([w.w_uk * scale, w.w_uv], dim=1).flatten(0, 1)
    if folded:
        found["o_folded.weight"] = torch.einsum("dhv,hvc->dhc", out, w.w_uv).flatten(1)
    if w.b_uk is not None:
        found["b_uk"] = w.b_uk * scale
    if w.out.bias is not None or w.b_uv is not None:
        through = 0 if w.b_uv is None else torch.einsum("dhv,hv->d", out, w.b_uv)
        found["o_proj.bias"] = _bias(w.out, w.w_uk) + through
    return found
