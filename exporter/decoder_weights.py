"""What a model export writes of a whole decoder, planned from names and shapes alone and made tensor by tensor.

Names follow the graph's blocks: `layers.3.attn.q_a_proj.weight`, `layers.3.mlp.experts.down`. No values are read while
planning (but a tied head's, held against the embedding); while writing, at most one attention is open at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np

from exporter.decoder_config import DecoderConfig, tensor_shapes
from exporter.errors import InputError
from exporter.moe_graph import MATRICES
from exporter.safetensors_file import StoredSource
from exporter.source import ModelSource
from exporter.weight_file import PlannedTensor
from exporter.weights import AttentionWeights, load_attention, plan_rope, plan_weights

_BELONG = "does config.json belong to these weights?"
# what a planned tensor of an attention is called in its source, where the names differ
_ORIGINS = {"q_a_norm.weight": "q_a_layernorm.weight", "kv_a_norm.weight": "kv_a_layernorm.weight",
            **{f"kv_a_proj.{part}": f"kv_a_proj_with_mqa.{part}" for part in ("weight", "bias")},
            **dict.fromkeys(("w_uk", "w_uv", "kv_b"), "kv_b_proj.weight"), "b_uk": "kv_b_proj.bias"}
Linkable = Callable[[StoredSource | None, str], bool]


class DecoderPlan:
    """Plans the tensors of the slice `layers` of a decoder in one dtype; `sample` is its first attention, unread.

    `interleaved`: experts as ONNX Runtime's MoE takes them, gate and up row by row; else one stack per matrix, or the
    experts' own tensors where `linkable(stored, dtype)` says that they can stay where they are. `coded`: which of head
    and experts may be codes where weights are quantised.
    """

    def __init__(self, source: ModelSource, *, dtype: str, folded: bool, expanded: bool, max_context: int,
                 layers: range, interleaved: bool, linkable: Linkable, coded: frozenset[str] = frozenset()) -> None:
        self.source, self.decoder, self.dtype, self.layers = source, source.decoder, dtype, layers
        self.max_context, self.interleaved, self.linkable, self._coded = max_context, interleaved, linkable, coded
        self._folded, self._expanded = folded, expanded
        self._open: tuple[str, dict[str, PlannedTensor]] = ("", {})
        _check(source, layers)
        self.sample = self._attention(self.decoder.attention_scopes(layers.start)[0], dry=True)

    def tensors(self, positions: int) -> list[PlannedTensor]:
        """Embedding, layer by layer, norm, head, and the rotary tables for `positions`."""
        d, plan = self.decoder, list[PlannedTensor]()
        last = self.layers.stop == d.layers
        if self.layers.start == 0 or (last and d.tie_word_embeddings):
            plan.append(self._plain("embed_tokens.weight", "model.embed_tokens.weight"))
        for layer in self.layers:
            plan += self._layer(layer)
        if last:
            plan.append(self._plain("norm.weight", "model.norm.weight", factor=d.logits_scale))
            if not d.tie_word_embeddings:
                plan.append(self._plain("lm_head.weight", "lm_head.weight", projection="head" in self._coded))
        return plan + plan_rope(self.sample.inv_freq, self.sample.rope_factor, positions)

    def _plain(self, name: str, tensor: str, factor: float = 1.0, dtype: str | None = None,
               projection: bool = False) -> PlannedTensor:
        """A tensor of the source as it is, or times a factor."""
        found = self.source.others[tensor]
        origins = ((tensor, found.load),)
        if factor == 1:
            return PlannedTensor(name, found.shape, dtype or self.dtype, found.load, found.stored, origins, projection)
        return PlannedTensor(name, found.shape, dtype or self.dtype, lambda: found.load().astype(np.float64) * factor,
                             origins=origins)

    def _layer(self, layer: int) -> Iterator[PlannedTensor]:
        d, ours, theirs = self.decoder, f"layers.{layer}.", f"model.layers.{layer}."
        places = [".0", ".1"] if d.shortcut else [""]
        for scope, place in zip(d.attention_scopes(layer), places, strict=True):
            yield self._plain(f"{ours}input_norm{place}.weight", f"{theirs}input_layernorm{place}.weight")
            yield from self._planned_attention(scope, f"{ours}attn{place}.")
            yield self._plain(f"{ours}post_norm{place}.weight", f"{theirs}post_attention_layernorm{place}.weight")
            if d.shortcut:
                yield from self._ffn(f"{ours}mlps{place}.", f"{theirs}mlps{place}.")
        if layer in d.sparse_layers:
            yield from self._experts(ours, theirs)
        elif not d.shortcut:
            yield from self._ffn(f"{ours}mlp.", f"{theirs}mlp.")

    def _ffn(self, ours: str, theirs: str) -> Iterator[PlannedTensor]:
        for matrix in MATRICES:
            yield self._plain(f"{ours}{matrix}_proj.weight", f"{theirs}{matrix}_proj.weight", projection=True)

    # --- attentions: planned dry, opened one at a time when written ---------------------------------------------------

    def _attention(self, scope: str, dry: bool = False) -> AttentionWeights:
        return load_attention(self.source.attention(scope), self.max_context, dry)

    def _plan(self, scope: str, dry: bool) -> list[PlannedTensor]:
        return plan_weights(self._attention(scope, dry), dtype=self.dtype, folded=self._folded, expanded=self._expanded)

    def _planned_attention(self, scope: str, prefix: str) -> Iterator[PlannedTensor]:
        for t in self._plan(scope, dry=True):
            tensor = _ORIGINS.get(t.name, t.name)
            found = self.source.attentions[scope].get(tensor)  # None for a product of several
            yield PlannedTensor(prefix + t.name, t.shape, t.dtype, partial(self._made, scope, t.name), t.stored,
                                () if found is None else ((scope + tensor, found.load),), t.projection)

    def _made(self, scope: str, name: str) -> np.ndarray | Iterator[np.ndarray]:
        if self._open[0] != scope:
            self._open = (scope, {t.name: t for t in self._plan(scope, dry=False)})
        return self._open[1][name].make()

    # --- experts ------------------------------------------------------------------------------------------------------

    def _experts(self, ours: str, theirs: str) -> Iterator[PlannedTensor]:
        moe = self.decoder.moe
        assert moe is not None
        router = f"{theirs}mlp.router.classifier.weight" if self.decoder.shortcut else f"{theirs}mlp.gate.weight"
        yield self._plain(f"{ours}mlp.router.weight", router, dtype="fp32")
        if moe.choice_bias:
            bias = f"{theirs}mlp.{'router' if self.decoder.shortcut else 'gate'}.e_score_correction_bias"
            yield self._plain(f"{ours}mlp.router.bias", bias, dtype="fp32")
        if moe.shared_intermediate_size:
            yield from self._ffn(f"{ours}mlp.shared.", f"{theirs}mlp.shared_experts.")
        if moe.output_norm:
            yield self._plain(f"{ours}post_mlp_norm.weight", f"{theirs}post_mlp_layernorm.weight")
        numbers = range(moe.n_routed_experts)
        names = {m: [f"{theirs}mlp.experts.{e}.{m}_proj.weight" for e in numbers] for m in MATRICES}
        if self.interleaved:
            yield self._stack(f"{ours}mlp.experts.gate_up", list(zip(names["gate"], names["up"], strict=True)))
            yield self._stack(f"{ours}mlp.experts.down", [(n,) for n in names["down"]])
            return
        for matrix, experts in names.items():
            if all(self.linkable(self.source.others[n].stored, self.dtype) for n in experts):
                for e, n in enumerate(experts):
                    yield self._plain(f"{ours}mlp.experts.{e}.{matrix}", n)
            else:
                yield self._stack(f"{ours}mlp.experts.{matrix}", [(n,) for n in experts])

    def _stack(self, name: str, tensors: list[tuple[str, ...]]) -> PlannedTensor:
        """[E, rows, columns], one expert at a time; two tensors of an expert are interleaved row by row."""
        experts = [tuple(self.source.others[n] for n in names) for names in tensors]

        def pieces() -> Iterator[np.ndarray]:
            for parts in experts:
                yield np.stack([t.load() for t in parts], axis=1).reshape(1, -1, parts[0].shape[1])

        rows, columns = experts[0][0].shape
        origins = tuple((n, self.source.others[n].load) for names in tensors for n in names)
        return PlannedTensor(name, (len(experts), rows * len(experts[0]), columns), self.dtype, pieces, origins=origins,
                             projection="experts" in self._coded)


def _check(source: ModelSource, layers: range) -> None:
    """Every tensor that the slice is made of is there in its shape, and nothing is left over. (An attention's own
    tensors are checked where they are read.)"""
    d = source.decoder
    shapes = tensor_shapes(d, layers)
    unknown = sorted(t for t in source.others if t not in shapes and _would_be_missed(d, layers, t))
    if unknown:
        more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
        raise InputError(f"{source.name}: unknown tensor {', '.join(unknown[:3])}{more}; the graph would leave it "
                         f"out, so the export is refused ({_disagreement(d, unknown[0])}{_BELONG})")
    for tensor, shape in shapes.items():
        if ".self_attn." in tensor:
            continue
        found = source.others.get(tensor)
        if found is None:
            raise InputError(f"{source.name}: tensor {tensor} {list(shape)} is missing; config.json asks for it "
                             f"({_BELONG})")
        if found.shape != shape:
            raise InputError(f"{source.name}: tensor {tensor} has shape {list(found.shape)}; config.json asks for "
                             f"{list(shape)} ({_BELONG})")
    if d.tie_word_embeddings and layers.stop == d.layers:
        _check_tied(source)


def _disagreement(d: DecoderConfig, tensor: str) -> str:
    """What config.json says against an unknown tensor, where that is known."""
    parts = tensor.split(".")
    if len(parts) < 6 or parts[3] != "mlp" or not parts[2].isdigit() or d.shortcut:
        return ""
    sparse = parts[4] in ("gate", "experts", "shared_experts")
    if sparse != (int(parts[2]) in d.sparse_layers):
        ours, theirs = ("dense", "sparse") if sparse else ("sparse", "dense")
        return f"the configuration makes layer {parts[2]} {ours}, these weights make it {theirs}; "
    if parts[4] == "experts" and d.moe is not None:
        return f"n_routed_experts is {d.moe.n_routed_experts}, and the weights hold expert {parts[5]}; "
    return ""


def _check_tied(source: ModelSource) -> None:
    """A tied head that the checkpoint stores as well is the embedding, or the graph would answer with another one."""
    head, embedding = source.others.get("lm_head.weight"), source.others["model.embed_tokens.weight"]
    if head is None:
        return
    same = head.shape == embedding.shape
    if same:
        a, b = head.load(), embedding.load()
        same = all(np.array_equal(a[i:i + 4096], b[i:i + 4096]) for i in range(0, len(a), 4096))
    if not same:
        raise InputError(f"{source.name}: tensor lm_head.weight {list(head.shape)} differs from "
                         "model.embed_tokens.weight; expected a copy of it, since tie_word_embeddings is true "
                         f"({_BELONG})")


def _would_be_missed(d: DecoderConfig, layers: range, tensor: str) -> bool:
    """Whether a tensor that the slice does not list belongs to it: not another layer's, the other end's, a tied head's
    copy, or an identity expert's placeholder."""
    parts = tensor.split(".")
    if tensor.startswith("model.layers.") and parts[2].isdigit():
        if int(parts[2]) not in layers:
            return False
        if parts[3:5] == ["mlp", "experts"] and d.moe is not None and d.moe.zero_experts and parts[5].isdigit():
            return int(parts[5]) < d.moe.n_routed_experts
        return parts[3] != "post_mlp_layernorm"  # A.X-K1 stores one for dense layers too, which never use it
    return tensor not in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
