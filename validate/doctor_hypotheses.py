"""Diagnosis by hypothesis: the float64 reference with one known mistake made, to be compared with what an export says.

A hypothesis changes what the reference reads, never the export: where the export equals the changed reference, and not
the sound one, the mistake has a name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from exporter.config import MLAConfig
from validate import doctor_changes as changes
from validate.doctor_changes import Change, DecoderChange, Tensors
from validate.references import DecoderReference
from validate.references.decoder import Routing
from validate.references.decoder_tensors import DecoderTensors


@dataclass(frozen=True)
class Hypothesis:
    """One mistake under its ailment's name. `what` completes "the source with ...". `attention` gives an attention's
    configuration and tensors with the mistake made, None where it does not exist there; `decoder` does so with a whole
    decoder; `reference` computes otherwise; `shift` takes the outputs of that many tokens before."""

    ailment: str
    what: str
    attention: Change | None = None
    decoder: DecoderChange | None = None
    reference: type[DecoderReference] = DecoderReference
    shift: int = 0


class _BiasWeighs(DecoderReference):
    """The bias that only chooses experts also weighs them."""

    def _route(self, layer, moe, x, router, routings: list[Routing]):  # type: ignore[no-untyped-def]
        chosen, _ = super()._route(layer, moe, x, router, routings)
        weight = routings[-1].scores.to(x.dtype).gather(1, chosen)
        if moe.normalise:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        return chosen, weight * moe.routed_scaling_factor


HYPOTHESES: tuple[Hypothesis, ...] = (
    Hypothesis("mscale-dropped", "the softmax scale without mscale^2", changes.other_scale("mscale-dropped")),
    Hypothesis("mscale-once", "mscale in the softmax scale once, not squared", changes.other_scale("mscale-once")),
    Hypothesis("mscale-field", "mscale in place of mscale_all_dim in the softmax scale",
               changes.other_scale("mscale-field")),
    Hypothesis("mscale-uncalled-for", "an mscale^2 in the softmax scale that its configuration does not ask for",
               changes.other_scale("mscale-uncalled-for")),
    Hypothesis("scale-from-rank", "the softmax scale of the latent row's width",
               changes.other_scale("scale-from-rank")),
    Hypothesis("scale-from-rank", "the softmax scale (rank + rope)^-1/2 alone",
               changes.other_scale("scale-from-rank:plain")),
    Hypothesis("scale-from-rank", "the softmax scale rank^-1/2, of the latent alone",
               changes.other_scale("scale-from-rank:latent")),
    Hypothesis("scale-from-nope", "the softmax scale of the content columns alone",
               changes.other_scale("scale-from-nope")),
    Hypothesis("scale-from-keys", "the softmax scale of the keys' own width", changes.other_scale("scale-from-keys")),
    Hypothesis("scale-missing", "no softmax scale", changes.other_scale("scale-missing")),
    Hypothesis("scale-twice", "the softmax scale applied twice", changes.other_scale("scale-twice")),
    Hypothesis("rope-layout", "RoPE's pairs and halves mixed up", changes.other_layout),
    Hypothesis("key-only-deinterleaved", "its rotary query in the other layout than its key", changes.one_side(True)),
    Hypothesis("key-only-deinterleaved", "its rotary key in the other layout than its query", changes.one_side(False)),
    Hypothesis("rope-unstretched", "plain RoPE frequencies, YaRN or longrope not applied",
               changes.rotary(changes.unstretched)),
    Hypothesis("rope-unstretched", "all RoPE frequencies divided by the factor, as linear scaling does",
               changes.rotary(changes.interpolated)),
    Hypothesis("rope-theta", "RoPE's base 10000 in place of rope_theta", changes.rotary(changes.other_base)),
    Hypothesis("rope-factor-twice", "YaRN's factor on cos and sin although its scale has it",
               changes.rotary(changes.other_factor(True))),
    Hypothesis("rope-factor-dropped", "no factor on cos and sin", changes.rotary(changes.other_factor(False))),
    Hypothesis("long-factors-unused", "longrope's other set of factors", changes.rotary(changes.other_set)),
    Hypothesis("float32-angles", "RoPE frequencies rounded to float32", changes.rotary(changes.narrow_frequencies)),
    Hypothesis("kv-b-order", "kv_b read as all K then all V, not head by head", changes.all_k_first),
    Hypothesis("norm-gain-dropped", "the latent norm's gain left out",
               changes.no_gain("kv_a_layernorm.weight", "latent_scale")),
    Hypothesis("norm-gain-dropped", "the query latent norm's gain left out",
               changes.no_gain("q_a_layernorm.weight", "query_scale")),
    Hypothesis("raw-latent-cached", "the latent cached without its norm", changes.no_norm("kv_a_layernorm.weight")),
    Hypothesis("query-norm-skipped", "the query latent without its norm", changes.no_norm("q_a_layernorm.weight")),
    Hypothesis("latent-eps", "rms_norm_eps in place of the latent norm's own epsilon", changes.main_epsilon),
    Hypothesis("latent-scale-dropped", "the latent without its factor", changes.fields(latent_scale=1.0)),
    Hypothesis("query-scale-dropped", "the query latent without its factor", changes.fields(query_scale=1.0)),
    Hypothesis("query-temperature-dropped", "a query that does not grow with its position",
               lambda c, t: (replace(c, rope=replace(c.rope, llama_4_scaling_beta=None)), t)
               if c.rope.llama_4_scaling_beta else None),
    Hypothesis("up-v-bias-lost", "the values' bias not carried into the output", changes.value_bias(0.0)),
    Hypothesis("up-v-bias-twice", "the values' bias added twice", changes.value_bias(2.0)),
    Hypothesis("projection-bias-lost", "no bias on the query's projections",
               changes.without("q_a_proj.bias", "q_proj.bias", "q_b_proj.bias")),
    Hypothesis("projection-bias-lost", "no bias on kv_a",
               changes.without("kv_a_proj_with_mqa.bias", "down_proj_kv.bias")),
    Hypothesis("projection-bias-lost", "no bias on the output", changes.without("o_proj.bias", "fc.bias")),
    Hypothesis("up-k-bias-lost", "the keys' bias dropped (the softmax hides it)", changes.without("up_proj_k.bias")),
    Hypothesis("routed-scale-dropped", "its experts not multiplied by routed_scaling_factor",
               decoder=changes.experts(changes.scales_experts, routed_scaling_factor=1.0)),
    Hypothesis("choice-bias-as-weight", "the bias that only chooses experts also weighing them",
               decoder=lambda d: d if d.moe is not None and d.moe.choice_bias and d.sparse_layers else None,
               reference=_BiasWeighs),
    Hypothesis("choice-bias-dropped", "experts chosen without their bias",
               decoder=changes.experts(lambda d: bool(d.moe and d.moe.choice_bias), choice_bias=False)),
    Hypothesis("groups-ignored", "experts chosen among all, not among the best groups",
               decoder=changes.experts(lambda d: bool(d.moe and d.moe.limited), n_group=1, topk_group=1)),
    Hypothesis("residual-scale-dropped", "branches added without their factor",
               decoder=changes.around(residual_scale=1.0)),
    Hypothesis("embedding-scale-dropped", "the embedding without its factor",
               decoder=changes.around(embedding_scale=1.0)),
    Hypothesis("logits-scale-dropped", "the hidden state before the head without its factor",
               decoder=changes.around(logits_scale=1.0)),
    Hypothesis("last-token-off-by-one", "the logits of the token before the last", decoder=lambda d: d, shift=1),
)


class ChangedTensors(DecoderTensors):
    """A decoder's source with a mistake made in every attention."""

    def __init__(self, source: DecoderTensors, config: MLAConfig, change: Change) -> None:
        self._source, self._config, self._change = source, config, change

    def get(self, name: str) -> torch.Tensor:
        """A tensor outside the attentions, as it is."""
        return self._source.get(name)

    def within(self, prefix: str) -> Tensors:
        """An attention's tensors with the mistake made; rotary buffers are left out."""
        changed = self._change(self._config, plain(self._source.within(prefix)))
        assert changed is not None
        return changed[1]


def plain(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """An attention's tensors without rotary buffers, which follow from its configuration."""
    return {n: t for n, t in tensors.items() if not n.startswith(("rotary_emb.", "rope_q.", "rope_k."))}
