"""Mixture of experts in ONNX: an exact router, and three forms of the experts, by what they must compute.

    fused    ONNX Runtime's `com.microsoft.MoE`, over codes `QMoE`: only the chosen experts. It wants gate and up
             interleaved, and routes by softmax over top-k logits, so it is fed log(w) for the chosen experts and -1e4
             for the rest.
    gather   TensorRT, few tokens: the chosen experts' weights are gathered, one matrix after the other.
    dense    TensorRT, many tokens: every expert computes every token, a few experts at a time, weighted by 0 or w.

Steps that nothing orders are run by a builder as it likes, and what they hold adds up: `sequencing` puts them in line.

Gathering reads, writes and reads again the chosen experts' weights; the dense form reads all experts' once. A graph
takes the first while its tokens choose no more experts than there are (B T k <= E), so few tokens cost few experts.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnx import TensorProto

from exporter import nbits
from exporter.attention_graph import linear
from exporter.decoder_config import MoEConfig
from exporter.dtypes import DTYPES
from exporter.graph import GraphBuilder
from exporter.sequencing import index_after, values_after

FORMS = ("fused", "gather", "dense")
MATRICES = ("gate", "up", "down")
MAX_ELEMENTS = 2**31 - 1  # of one TensorRT tensor
DENSE_GROUP = 8  # experts that the dense form computes together
_FP32 = DTYPES["fp32"]
_NEVER = -1e4  # a router logit that softmax turns into 0 in every dtype


@dataclass(frozen=True)
class Chosen:
    """What the router chose. `index` [N, k] int64, the number of experts standing for an identity expert; `weight` [N,
    k] float32, 0 there; `identity` [N, 1] float32 or None: the weight of the identity experts together."""

    index: str
    weight: str
    identity: str | None


def experts_form(moe: MoEConfig, target: str, tokens: int, hidden: int) -> str:
    """Which form a graph takes for `tokens` = B*T new tokens at most: fused, gather or dense."""
    if target == "ort":
        return "fused"
    return "gather" if tokens < dense_from(moe, hidden) else "dense"


def dense_from(moe: MoEConfig, hidden: int) -> int:
    """The number of tokens (B*T) from which the dense form is chosen. Where experts take several stacks, each choice is
    gathered from every one of them."""
    return moe.n_routed_experts // (moe.num_experts_per_tok * len(stacks(moe, hidden))) + 1


def stacks(moe: MoEConfig, hidden: int) -> list[range]:
    """The experts in as few equal stacks as TensorRT can address (one tensor has at most MAX_ELEMENTS elements)."""
    E, each = moe.n_routed_experts, moe.moe_intermediate_size * hidden
    count = next(n for n in range(1, E + 1) if E % n == 0 and E // n * each <= MAX_ELEMENTS)
    return [range(i * E // count, (i + 1) * E // count) for i in range(count)]


def gather_scratch(moe: MoEConfig, hidden: int, tokens: int, itemsize: int) -> int:
    """Bytes of gathered weights alive together in the gather form: one matrix of one expert per token."""
    return tokens * moe.moe_intermediate_size * hidden * itemsize


def build_moe(g: GraphBuilder, moe: MoEConfig, form: str, tokens: str, hidden: int, epsilon: float,
              rank: int | None = None) -> str:
    """Routed and shared experts over normed tokens [N, D] -> [N, D]. `rank`: of experts split over ranks, its term of
    the sum: identity experts are rank 0's, and the output norm comes after the sum."""
    with g.scope("router"):
        chosen = _route(g, moe, tokens)
    with g.scope("experts"):
        build = {"fused": _fused, "gather": _gather, "dense": _dense}[form]
        result = build(g, moe, chosen, tokens, hidden)
        if chosen.identity is not None and not rank:
            kept = g.op("Mul", tokens, _rounded(g, chosen.identity, "identity_weight"), name="identity")
            result = g.op("Add", result, kept, name="with_identity")
    if moe.shared_intermediate_size:
        with g.scope("shared"):
            result = g.op("Add", result, gated_ffn(g, tokens, "mlp.shared."), name="with_shared")
    if moe.output_norm and rank is None:
        result = g.op("RMSNormalization", result, g.weight("post_mlp_norm.weight"), name="post_mlp_norm", axis=-1,
                      epsilon=epsilon)
    return result


def gated_ffn(g: GraphBuilder, tokens: str, prefix: str) -> str:
    """down(silu(gate x) * up x), [N, D] -> [N, D]; `prefix` names its three weights."""
    gate, up = linear(g, tokens, f"{prefix}gate_proj"), linear(g, tokens, f"{prefix}up_proj")
    return linear(g, _silu_times(g, gate, up, "hidden"), f"{prefix}down_proj")


def _silu_times(g: GraphBuilder, gate: str, up: str, name: str) -> str:
    activated = g.op("Mul", gate, g.op("Sigmoid", gate, name=f"{name}_sigmoid"), name=f"{name}_silu")
    return g.op("Mul", activated, up, name=name)


def _rounded(g: GraphBuilder, value: str, name: str) -> str:
    """A float32 value in the compute dtype."""
    return value if g.dtype.name == "fp32" else g.to(value, g.dtype.onnx, name)


def _route(g: GraphBuilder, moe: MoEConfig, tokens: str) -> Chosen:
    """Scores, choice and weights in float32, whatever the compute dtype."""
    x = tokens if g.dtype.name == "fp32" else g.to(tokens, TensorProto.FLOAT, "tokens_fp32")
    logits = g.op("Gemm", x, g.weight("mlp.router.weight"), name="logits", transB=1)  # [N, E]
    scores = g.op("Sigmoid", logits, name="scores") if moe.scoring == "sigmoid" else (
        g.op("Softmax", logits, name="scores", axis=1))
    choice = g.op("Add", scores, g.weight("mlp.router.bias"), name="choice") if moe.choice_bias else scores
    if moe.limited:
        choice = _limited(g, moe, choice)
    _, index = g.ops("TopK", choice, g.ints(moe.num_experts_per_tok), name="top_k", axis=1, count=2)
    weight = g.op("GatherElements", scores, index, name="chosen_scores", axis=1)  # [N, k], without the bias
    if moe.normalise:
        total = g.op("ReduceSum", weight, g.ints(1), name="total", keepdims=1)
        weight = g.op("Div", weight, g.op("Add", total, g.scalar("const/1e-20", 1e-20, _FP32), name="total_eps"),
                      name="normalised")
    if moe.routed_scaling_factor != 1:
        weight = g.op("Mul", weight, g.scalar("routed_scaling_factor", moe.routed_scaling_factor, _FP32), name="scaled")
    if not moe.zero_experts:
        return Chosen(index, weight, None)
    zero = g.scalar("const/zero_fp32", 0.0, _FP32)
    real = g.op("Less", index, g.int_scalar(moe.n_routed_experts), name="is_real")
    identity = g.op("ReduceSum", g.op("Where", real, zero, weight, name="identity_weights"), g.ints(1),
                    name="identity_weight", keepdims=1)
    kept = g.op("Where", real, index, g.int_scalar(moe.n_routed_experts), name="real_index")
    return Chosen(kept, g.op("Where", real, weight, zero, name="real_weight"), identity)


def _limited(g: GraphBuilder, moe: MoEConfig, choice: str) -> str:
    """Scores outside the best `topk_group` groups become the lowest number there is."""
    groups, each = moe.n_group, (moe.n_routed_experts + moe.zero_experts) // moe.n_group
    by_group = g.op("Reshape", choice, g.ints(-1, groups, each), name="by_group")
    if moe.group_score == "top2":
        best, _ = g.ops("TopK", by_group, g.ints(2), name="best_two", axis=2, count=2)
        score = g.op("ReduceSum", best, g.ints(2), name="group_score", keepdims=0)
    else:
        score = g.op("ReduceMax", by_group, g.ints(2), name="group_score", keepdims=0)
    _, kept = g.ops("TopK", score, g.ints(moe.topk_group), name="kept_groups", axis=1, count=2)  # [N, topk_group]
    numbers = g.ints(*range(groups))
    same = g.op("Equal", g.op("Unsqueeze", kept, g.ints(2), name="kept_column"), numbers, name="same_group")
    hit = g.op("ReduceMax", g.to(same, TensorProto.FLOAT, "same_group_fp32"), g.ints(1), name="hits", keepdims=0)
    mask = g.op("Greater", hit, g.scalar("const/zero_fp32", 0.0, _FP32), name="kept")  # [N, groups]
    lowest = g.scalar("const/lowest_fp32", _FP32.lowest, _FP32)
    masked = g.op("Where", g.op("Unsqueeze", mask, g.ints(2), name="kept_3d"), by_group, lowest, name="masked")
    return g.op("Reshape", masked, g.ints(-1, groups * each), name="limited")


def _spread(g: GraphBuilder, moe: MoEConfig, chosen: Chosen, values: str, tokens: str, rest: float) -> str:
    """`values` [N, k] at the chosen experts' columns of [N, E], `rest` elsewhere (float32)."""
    # identity choices fall into a column of their own, which is cut off
    columns = g.ints(moe.n_routed_experts + (1 if moe.zero_experts else 0))
    count = g.op("Shape", tokens, name="N", start=0, end=1)
    shape = g.op("Concat", count, columns, name="spread_shape", axis=0)
    empty = g.op("Expand", g.scalar(f"const/rest_{rest:g}", rest, _FP32), shape, name="empty")
    spread = g.op("ScatterElements", empty, chosen.index, values, name="spread", axis=1)
    if not moe.zero_experts:
        return spread
    return g.op("Slice", spread, g.ints(0), g.ints(moe.n_routed_experts), g.ints(1), name="spread_real")


def _fused(g: GraphBuilder, moe: MoEConfig, chosen: Chosen, tokens: str, hidden: int) -> str:
    positive = g.op("Max", chosen.weight, g.scalar("const/smallest", 1e-30, _FP32), name="positive")
    logits = _spread(g, moe, chosen, g.op("Log", positive, name="log_weight"), tokens, _NEVER)
    total = g.op("ReduceSum", chosen.weight, g.ints(1), name="weight_sum", keepdims=1)
    router = _rounded(g, logits, "router_logits_rounded")
    if nbits.is_packed(g, "mlp.experts.down"):
        mixed = nbits.experts(g, tokens, router, "mlp.experts.gate_up", "mlp.experts.down", moe.num_experts_per_tok)
    else:
        mixed = g.op("MoE", tokens, router, g.weight("mlp.experts.gate_up"), "", g.weight("mlp.experts.down"),
                     name="moe", domain=nbits.DOMAIN, k=moe.num_experts_per_tok, activation_type="swiglu",
                     swiglu_fusion=1, activation_alpha=1.0, activation_beta=0.0, normalize_routing_weights=1)
    g.declare(mixed, g.dtype.onnx, [None, hidden])
    return g.op("Mul", mixed, _rounded(g, total, "weight_sum_rounded"), name="routed")


def _stack(g: GraphBuilder, moe: MoEConfig, matrix: str, first: int, count: int) -> str:
    """Matrices of `count` experts from `first` on, [count, out, in]: a view of the stack where the weight file has one,
    else the experts' own tensors joined (a constant, which the builder folds)."""
    alias = f"mlp.experts.{matrix}.{first}_{first + count}"
    if g.has_weight(f"mlp.experts.{matrix}"):
        name = f"mlp.experts.{matrix}"
        return g.matrix(name) if count == moe.n_routed_experts else g.matrix(name, alias, range(first, first + count))
    parts = []
    for expert in range(first, first + count):
        name = f"mlp.experts.{expert}.{matrix}"
        parts.append(g.weight(name, (1, *g.weight_shape(name)), f"{name}.3d"))
    return g.op("Concat", *parts, name=alias, axis=0)


def _gather(g: GraphBuilder, moe: MoEConfig, chosen: Chosen, tokens: str, hidden: int) -> str:
    """One choice at a time: [N] expert numbers, [N, out, in] weights, one product per token.

    Each gather waits for the product before it, or a builder would gather all matrices of all choices up front.
    """
    k, index = moe.num_experts_per_tok, chosen.index
    if moe.zero_experts:  # any expert will do where the weight is 0
        index = g.op("Min", index, g.int_scalar(moe.n_routed_experts - 1), name="index_in_range")
    parts = stacks(moe, hidden)
    weights_of = {m: [_stack(g, moe, m, part.start, len(part)) for part in parts] for m in MATRICES}
    column = g.op("Unsqueeze", tokens, g.ints(2), name="columns")  # [N, D, 1]
    weight = _rounded(g, chosen.weight, "weight_rounded")
    indices, weights = [index], [weight]
    if k > 1:
        indices, weights = (g.ops("Split", value, g.ints(*[1] * k), name=f"split_{name}", axis=1, count=k)
                            for name, value in (("index", index), ("weight", weight)))
    total = ""
    for j in range(k):
        with g.scope(f"choice_{j}"):
            expert = g.op("Squeeze", indices[j], g.ints(1), name="index")  # [N]

            def product(matrix: str, vector: str, finished: str, expert: str = expert) -> str:
                result = ""
                for stack, part in zip(weights_of[matrix], parts, strict=True):
                    name = matrix if len(parts) == 1 else f"{matrix}_{part.start}"
                    index = expert if len(parts) == 1 else _within(g, expert, part, name)
                    if finished:
                        index = index_after(g, index, finished, f"{name}_index", 1)
                    matrices = g.op("Gather", stack, index, name=f"{name}_weights", axis=0)
                    found = g.op("MatMul", matrices, vector, name=name)  # [N, out, 1]
                    if result:  # an expert of an earlier stack: what was found there
                        here = g.op("Less", expert, g.int_scalar(part.start), name=f"{name}_earlier")
                        column = g.op("Unsqueeze", here, g.ints(1, 2), name=f"{name}_earlier_3d")
                        found = g.op("Where", column, result, found, name=f"{name}_chosen")
                    result = finished = found
                return result

            gate = product("gate", column, total)
            inner = _silu_times(g, gate, product("up", column, gate), "inner")
            out = g.op("Squeeze", product("down", inner, inner), g.ints(2), name="out")
            part = g.op("Mul", out, weights[j], name="part")
            total = part if not total else g.op("Add", total, part, name="sum")
    return total


def _within(g: GraphBuilder, expert: str, part: range, name: str) -> str:
    """Expert numbers as indices into the stack of `part`; any index of it for an expert of another stack."""
    shifted = g.op("Sub", expert, g.int_scalar(part.start), name=f"{name}_shifted") if part.start else expert
    lowest = g.op("Max", shifted, g.int_scalar(0), name=f"{name}_lowest")
    return g.op("Min", lowest, g.int_scalar(len(part) - 1), name=f"{name}_within")


def _dense(g: GraphBuilder, moe: MoEConfig, chosen: Chosen, tokens: str, hidden: int) -> str:
    """All experts over all tokens, DENSE_GROUP at a time; the products take the weights as stored.

    Each group waits for the sum before it (its tokens are picked by an index that does), or a builder would run groups
    side by side and hold what all of them make. Weights stand on the left, tokens in columns; int4 weights on the right
    and tokens in rows, since TensorRT-RTX 1.7 dies on a batched product of int4 weights and columns.
    """
    experts, rows = moe.n_routed_experts, g.stored_dtype("mlp.experts.gate") == "int4"
    spread = _rounded(g, _spread(g, moe, chosen, chosen.weight, tokens, 0.0), "spread_rounded")
    by_expert = g.op("Transpose", spread, name="by_expert", perm=[1, 0])  # [E, N]
    weights = g.op("Unsqueeze", by_expert, g.ints(2 if rows else 1), name="weights")  # [E, 1, N], or [E, N, 1]
    laid = tokens if rows else g.op("Transpose", tokens, name="columns", perm=[1, 0])
    given = g.op("Unsqueeze", laid, g.ints(0), name="tokens_3d" if rows else "columns_3d")  # [1, D, N], or [1, N, D]
    total = ""
    for first in range(0, experts, DENSE_GROUP):
        size = min(DENSE_GROUP, experts - first)

        def product(matrix: str, values: str, first: int = first, size: int = size) -> str:
            stack = _stack(g, moe, matrix, first, size)
            if not rows:
                return g.op("MatMul", stack, values, name=matrix)
            return g.op("MatMul", values, g.op("Transpose", stack, name=f"{matrix}_right", perm=[0, 2, 1]), name=matrix)

        with g.scope(f"from_{first}"):
            picked = given
            if total:
                picked = values_after(g, given, total, "tokens" if rows else "columns", 0, 1)
            gate, up = product("gate", picked), product("up", picked)
            inner = _silu_times(g, gate, up, "inner")  # [size, I, N], or [size, N, I]
            part = g.op("Slice", weights, g.ints(first), g.ints(first + size), g.ints(0), name="group_weights")
            weighted = g.op("Mul", inner, part, name="weighted")
            out = product("down", weighted)  # [size, D, N], or [size, N, D]
            summed = g.op("ReduceSum", out, g.ints(0), name="sum_experts", keepdims=0)
            total = summed if not total else g.op("Add", total, summed, name="sum")
    return total if rows else g.op("Transpose", total, name="routed", perm=[1, 0])
