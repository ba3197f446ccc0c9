"""A whole decoder, eager, in float64: what every exported model is judged by.

Written from the papers and not from the exporter: DeepSeek-V2 (arXiv 2405.04434: MoE, group-limited choice),
DeepSeek-V3 (2412.19437: sigmoid scores, a bias that only chooses), LongCat-Flash (2509.01322: shortcut layers, identity
experts) and MiniCPM (2404.06395: scaled embedding, branches and head). It goes layer by layer over all tokens of all
sequences, so that no more than one attention, one dense FFN or one expert is in memory at a time. Attention is
`NaiveMLA`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from exporter.decoder_config import DecoderConfig, MoEConfig
from validate.references.decoder_tensors import DecoderTensors, open_decoder_tensors
from validate.references.naive import NaiveMLA

_HEAD_ROWS = 1 << 26  # elements of the head multiplied at once


@dataclass(frozen=True)
class Prompt:
    """One sequence: token ids [T], or hidden states [T, D] where a slice begins inside the model. `past` [A, P, R] are
    cache rows of every attention that lie before it (or one [P, R] for each attention, made when asked for); `rows`
    [A, T, R] are attended in place of those it makes."""

    inputs: torch.Tensor
    past: torch.Tensor | Sequence[torch.Tensor] | None = None
    rows: torch.Tensor | None = None


@dataclass
class Routing:
    """What one MoE layer's router saw, over the N tokens of a run: the scores that choose, [N, E]; the gap between the
    last chosen and the first refused, [N] (of groups too; inf where there is nothing to refuse)."""

    layer: int
    scores: torch.Tensor
    margin: torch.Tensor


@dataclass
class Answer:
    """One sequence's outputs, float64: logits [T, V], or hidden states [T, D] where a slice ends inside the model; the
    new cache rows of every attention, [A, T, R]; the routers' margins, [MoE layers, T]."""

    outputs: torch.Tensor
    rows: torch.Tensor
    margins: torch.Tensor


@dataclass
class Run:
    """All answers of a call, and the routers' scores in the order of its tokens."""

    answers: list[Answer]
    routings: list[Routing] = field(default_factory=list)


Stream = Callable[[str, torch.Tensor], torch.Tensor]  # a place, and what passes it -> what goes on from there


def _unchanged(place: str, value: torch.Tensor) -> torch.Tensor:
    return value


class DecoderReference:
    """A decoder, or its slice `layers`. `max_context` bounds positions and picks LongRoPE's set.

    A narrower `dtype` rounds weights and activations (norms, routers and softmax stay in float32 at least), which tells
    how far its own error carries.
    """

    def __init__(self, config: DecoderConfig, source: Mapping[str, Any] | DecoderTensors, *, max_context: int,
                 layers: range | None = None, dtype: torch.dtype = torch.float64) -> None:
        self.config, self.max_context, self.dtype = config, max_context, dtype
        self.layers = layers if layers is not None else range(config.layers)
        self.tensors = source if isinstance(source, DecoderTensors) else open_decoder_tensors(source, config)

    def run(self, sequences: Sequence[Prompt], progress: Callable[[int], None] = lambda layer: None,
            stream: Stream = _unchanged) -> Run:
        """Answer sequences of any lengths, side by side; each layer's weights are read once.

        `stream` sees the hidden states of all tokens [N, D] where they pass, and may round them: at `embedding`, behind
        every branch that was added (`3.attention.0`, `3.mlp.0`; a shortcut layer has two of each, its `3.experts`
        before they are added, and `3.end`), at `head` the outputs; and each attention's new rows (`3.rows.0`, [N, R]).
        """
        c, spans = self.config, _spans(sequences)
        hidden = torch.cat([s.inputs for s in sequences])
        hidden = stream("embedding", self._enter(hidden))  # [N, D], N tokens of all sequences
        run, rows = Run([]), list[torch.Tensor]()
        each = c.attentions_per_layer
        for index, layer in enumerate(self.layers):
            progress(layer)

            def attend(half: int, normed: torch.Tensor, layer: int = layer, first: int = index * each) -> torch.Tensor:
                mixed, new = self._attend(c.attention_scopes(layer)[half], first + half, normed, sequences, spans)
                rows.append(stream(f"{layer}.rows.{half}", new))
                return mixed

            hidden = (self._shortcut if c.shortcut else self._plain)(layer, hidden, attend, run.routings, stream)
        outputs = stream("head", self._leave(hidden)) if self.layers.stop == c.layers else hidden
        stacked = torch.stack(rows).double()  # [A, N, R]
        margins = torch.stack([r.margin for r in run.routings]) if run.routings else torch.empty(0, len(hidden))
        run.answers = [Answer(outputs[a:b].double(), stacked[:, a:b], margins[:, a:b]) for a, b in spans]
        return run

    # --- the ends -----------------------------------------------------------------------------------------------------

    def _weight(self, name: str) -> torch.Tensor:
        return self.tensors.get(name).to(self.dtype)

    def _enter(self, inputs: torch.Tensor) -> torch.Tensor:
        if inputs.is_floating_point():
            return inputs.to(self.dtype)
        table = self.tensors.get("model.embed_tokens.weight")
        return table[inputs].to(self.dtype) * self.config.embedding_scale

    def _leave(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm, its factor, and the head, which a tied model shares with its embedding."""
        c = self.config
        hidden = self._norm(hidden, "model.norm.weight") * c.logits_scale
        head = self.tensors.get("model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight")
        step = max(1, _HEAD_ROWS // head.shape[1])
        return torch.cat([hidden @ part.to(self.dtype).T for part in torch.split(head, step)], dim=1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.attention.rms_norm_eps)
        return (wide * inverse).to(x.dtype) * self._weight(name)

    # --- layers -------------------------------------------------------------------------------------------------------

    def _plain(self, layer: int, hidden: torch.Tensor, attend: Callable[[int, torch.Tensor], torch.Tensor],
               routings: list[Routing], stream: Stream) -> torch.Tensor:
        """x + s attention(norm x), then x + s ffn(norm x); s is 1 but in MiniCPM's line."""
        prefix, s = f"model.layers.{layer}.", self.config.residual_scale
        attended = attend(0, self._norm(hidden, f"{prefix}input_layernorm.weight"))
        hidden = stream(f"{layer}.attention.0", hidden + s * attended)
        normed = self._norm(hidden, f"{prefix}post_attention_layernorm.weight")
        fed = (self._moe(layer, normed, f"{prefix}mlp.gate", routings) if layer in self.config.sparse_layers else
               self._ffn(f"{prefix}mlp.", normed))
        return stream(f"{layer}.mlp.0", hidden + s * fed)

    def _shortcut(self, layer: int, hidden: torch.Tensor, attend: Callable[[int, torch.Tensor], torch.Tensor],
                  routings: list[Routing], stream: Stream) -> torch.Tensor:
        """Attention, dense FFN, attention, dense FFN; the experts read what the first FFN reads and are added last."""
        prefix, shortcut = f"model.layers.{layer}.", hidden
        for half in (0, 1):
            attended = attend(half, self._norm(hidden, f"{prefix}input_layernorm.{half}.weight"))
            hidden = stream(f"{layer}.attention.{half}", hidden + attended)
            normed = self._norm(hidden, f"{prefix}post_attention_layernorm.{half}.weight")
            if half == 0:
                shortcut = stream(f"{layer}.experts",
                                  self._moe(layer, normed, f"{prefix}mlp.router.classifier", routings))
            hidden = stream(f"{layer}.mlp.{half}", hidden + self._ffn(f"{prefix}mlps.{half}.", normed))
        return stream(f"{layer}.end", hidden + shortcut)

    def _attend(self, scope: str, index: int, normed: torch.Tensor, sequences: Sequence[Prompt],
                spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """One attention over every sequence behind its own past: [N, D] -> [N, D], and the new rows [N, R]."""
        attention = NaiveMLA(self.config.attention, _without_rotary_tables(self.tensors.within(scope)),
                             max_context=self.max_context, dtype=self.dtype)
        mixed, rows = [], []
        for sequence, (a, b) in zip(sequences, spans, strict=True):
            attention.reset(1)
            if sequence.past is not None:
                past = sequence.past[index]
                attention.seed_rows(past[None], [len(past)])
            x = normed[None, a:b]
            rows.append(attention.new_rows(x)[0])
            given = None if sequence.rows is None else sequence.rows[index][None]
            mixed.append(attention.forward(x, rows=given)[0])
        return torch.cat(mixed), torch.cat(rows)

    def _ffn(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """down(silu(gate x) · up x), [N, D] -> [N, D]."""
        gate = functional.linear(x, self._weight(f"{prefix}gate_proj.weight"))
        up = functional.linear(x, self._weight(f"{prefix}up_proj.weight"))
        return functional.linear(functional.silu(gate) * up, self._weight(f"{prefix}down_proj.weight"))

    def _moe(self, layer: int, x: torch.Tensor, router: str, routings: list[Routing]) -> torch.Tensor:
        moe, mlp = self.config.moe, f"model.layers.{layer}.mlp."
        assert moe is not None
        chosen, weight = self._route(layer, moe, x, router, routings)  # [N, k] each
        mixed = torch.zeros_like(x)
        for expert in torch.unique(chosen).tolist():
            token, place = torch.where(chosen == expert)
            # an expert beyond the real ones gives its input back
            out = self._ffn(f"{mlp}experts.{expert}.", x[token]) if expert < moe.n_routed_experts else x[token]
            mixed.index_add_(0, token, out * weight[token, place, None].to(x.dtype))
        if moe.shared_intermediate_size:
            mixed = mixed + self._ffn(f"{mlp}shared_experts.", x)
        return self._norm(mixed, f"model.layers.{layer}.post_mlp_layernorm.weight") if moe.output_norm else mixed

    def _route(self, layer: int, moe: MoEConfig, x: torch.Tensor, router: str,
               routings: list[Routing]) -> tuple[torch.Tensor, torch.Tensor]:
        """Which experts each token goes to, [N, k], and with what weight: the bias chooses, and never weighs."""
        wide = torch.promote_types(self.dtype, torch.float32)
        logits = functional.linear(x.to(wide), self.tensors.get(f"{router}.weight").to(wide))
        affinity = torch.sigmoid(logits) if moe.scoring == "sigmoid" else torch.softmax(logits, dim=-1)
        scores = affinity
        if moe.choice_bias:
            bias = self.tensors.get(f"{router.removesuffix('.classifier')}.e_score_correction_bias")
            scores = affinity + bias.to(wide)
        allowed, group_margin = _limit(moe, scores)
        chosen, margin = _best(allowed, moe.num_experts_per_tok)
        weight = affinity.gather(1, chosen)
        if moe.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        routings.append(Routing(layer, scores.double(), torch.minimum(margin, group_margin).double()))
        return chosen, weight * moe.routed_scaling_factor


def _limit(moe: MoEConfig, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores with every group but the best refused (-inf), and how clearly the last group was chosen."""
    if not moe.limited:
        return scores, scores.new_full((len(scores),), float("inf"))
    groups = scores.reshape(len(scores), moe.n_group, -1)  # [N, groups, E / groups]
    # a group's own score is a sum of two where it is not a maximum: half the gap then bears one score's error
    top = groups.topk(2, dim=-1).values.sum(-1) if moe.group_score == "top2" else groups.amax(-1)
    kept, margin = _best(top, moe.topk_group)
    refused = torch.ones_like(top, dtype=torch.bool).scatter(1, kept, False)
    limited = groups.masked_fill(refused.unsqueeze(-1), float("-inf")).flatten(1)
    return limited, margin / 2 if moe.group_score == "top2" else margin


def _best(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the `count` best, and the gap to the first that was refused (inf where none is)."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    chosen = ranked.indices[:, :count]
    if count == scores.shape[1]:
        return chosen, scores.new_full((len(scores),), float("inf"))
    return chosen, ranked.values[:, count - 1] - ranked.values[:, count]


def _spans(sequences: Sequence[Prompt]) -> list[tuple[int, int]]:
    """Where each sequence's tokens lie among all."""
    def each() -> Iterator[tuple[int, int]]:
        start = 0
        for s in sequences:
            yield start, start + len(s.inputs)
            start += len(s.inputs)

    return list(each())


def _without_rotary_tables(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: t for name, t in tensors.items() if not name.startswith("rotary_emb.")}
