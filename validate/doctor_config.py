"""Fields of config.json that a checkpoint's own tensors contradict, and what they imply in their place.

A width is taken from what more than half of the layers say, so that one broken tensor speaks for nobody. A field is
named only where tensors agree with its other value and would not without it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from exporter.errors import InputError

Shape = tuple[int, ...]
Wrong = dict[str, tuple[str, str]]  # tensors that disagree with a configuration: ailment and evidence of each
_OTHER_NAMES = {"n_routed_experts": ("num_experts", "num_local_experts"), "n_shared_experts": ("num_shared_experts",),
                "moe_intermediate_size": ("expert_ffn_hidden_size",), "intermediate_size": ("ffn_hidden_size",)}


@dataclass(frozen=True)
class Implied:
    """A field's value by the tensors, and which of them say so."""

    value: Any
    why: str


@dataclass(frozen=True)
class Correction:
    """`changes`: fields with other values, by name. `explains`: tensors that disagree with the stated configuration and
    would not with these, each with the fields that it takes. `left`: what disagrees all the same."""

    changes: dict[str, Implied]
    explains: dict[str, list[str]]
    left: Wrong


def correct(raw: Mapping[str, Any], text: Mapping[str, Any], shapes: Mapping[str, Shape],
            wrong_under: Callable[[Mapping[str, Any]], Wrong]) -> Correction | None:
    """Fields of `text`, the language model's part of a config.json `raw`, that tensors of these canonical names and
    `shapes` contradict; None where none would help. `wrong_under` says what disagrees with a whole config.json."""
    def under(names: set[str]) -> Wrong | None:
        fields = dict(text) | {n: changes[n].value for n in names}
        try:
            return wrong_under(fields if text is raw else {k: fields if v is text else v for k, v in raw.items()})
        except InputError:  # no configuration of this family
            return None

    changes = dict(_contradicted(text, shapes))
    stated, best = under(set()), under(set(changes))
    if not changes or stated is None or best is None or not len(best) < len(stated):
        return None
    needed, worse = set(changes), dict[str, Wrong | None]()
    for field in changes:
        without = under(needed - {field})
        if without is not None and len(without) <= len(best):
            needed.discard(field)
            best = without
        else:
            worse[field] = without
    explains = {name: [field for field, without in worse.items() if without is None or name in without]
                for name in stated if name not in best}
    roles = {re.sub(r"\.\d+\.", ".N.", name) for name in explains}
    if len(needed) > len(roles):  # more numbers than observations explain anything
        return None
    return Correction({n: changes[n] for n in changes if n in needed}, explains, best)


def _contradicted(text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Implied]]:
    for field, implied in _implied(text, shapes):
        name = next((n for n in (*_OTHER_NAMES.get(field, ()), field) if n in text), None)
        if name is not None and text[name] != implied.value:
            yield name, implied


def _implied(text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Implied]]:
    """What the tensors say of each field, where they say it."""
    yield from _attention(shapes)
    hidden, vocabulary = _most(shapes, "kv_a_proj_with_mqa", 1), _vocabulary(shapes)
    for field, found in (("hidden_size", hidden), ("vocab_size", vocabulary),
                         ("intermediate_size", _most(shapes, r"mlps?(\.\d)?\.gate_proj", 0)),
                         ("n_routed_experts", _most(shapes, r"mlp\.gate", 0)),
                         ("moe_intermediate_size", _most(shapes, r"mlp\.experts\.\d+\.gate_proj", 0))):
        if found is not None:
            yield field, found
    inner, shared = (_most(shapes, rf"mlp\.{n}\.gate_proj", 0) for n in (r"experts\.\d+", "shared_experts"))
    if inner and shared and shared.value % inner.value == 0:
        yield "n_shared_experts", Implied(shared.value // inner.value, f"{shared.why}, of {inner.value} each")
    yield from _depths(text, shapes)


def _attention(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Implied]]:
    latent = _most(shapes, "kv_a_layernorm", 0) or _most(shapes, "kv_b_proj", 1)
    row, kv, out = (_most(shapes, *side) for side in (("kv_a_proj_with_mqa", 0), ("kv_b_proj", 0), ("o_proj", 1)))
    rank, query = _most(shapes, "q_a_proj", 0), _most(shapes, "q_b_proj", 0) or _most(shapes, "q_proj", 0)
    if rank is not None:
        yield "q_lora_rank", rank
    elif query is not None:
        yield "q_lora_rank", Implied(None, f"{query.why}, and there is no q_a_proj")
    if latent is None:
        return
    yield "kv_lora_rank", latent
    if row is None or row.value <= latent.value:
        return
    rope = row.value - latent.value
    yield "qk_rope_head_dim", Implied(rope, f"{row.why}, less the latent's {latent.value}")
    if kv is None or out is None or query is None:
        return
    # rows of q: H (nope + rope), of kv_b: H (nope + v), columns of o: H v
    heads, rest = divmod(query.value - kv.value + out.value, rope)
    if rest or heads < 1 or out.value % heads or (kv.value - out.value) % heads or kv.value <= out.value:
        return
    yield "num_attention_heads", Implied(heads, f"{query.why}, {kv.why}, {out.why}, {rope} rotary columns")
    yield "qk_nope_head_dim", Implied((kv.value - out.value) // heads, f"{kv.why}, less o_proj's {out.value} columns, "
                                      f"over {heads} heads")
    yield "v_head_dim", Implied(out.value // heads, f"{out.why}, over {heads} heads")


def _vocabulary(shapes: Mapping[str, Shape]) -> Implied | None:
    """Rows of the embedding, where the head, if there is one, has as many."""
    found = {shapes[n][0] for n in ("model.embed_tokens.weight", "lm_head.weight") if n in shapes}
    embedding = shapes.get("model.embed_tokens.weight")
    return Implied(embedding[0], f"embed_tokens {list(embedding)}") if embedding and len(found) == 1 else None


def _depths(text: Mapping[str, Any], shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Implied]]:
    """Which layers are dense and which have experts, where each is one or the other."""
    kinds: dict[int, set[str]] = {}
    for name in shapes:
        found = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.(gate|gate_proj)\.weight", name)
        if found:
            kinds.setdefault(int(found[1]), set()).add("sparse" if found[2] == "gate" else "dense")
    if not kinds or set(kinds) != set(range(len(kinds))) or any(len(k) > 1 for k in kinds.values()):
        return
    layers = [next(iter(kinds[i])) for i in range(len(kinds))]
    dense = layers.index("sparse") if "sparse" in layers else len(layers)
    why = f"mlp.gate in {len(layers) - layers.count('dense')} of {len(layers)} layers" + (
        f", layer {dense} the first" if dense < len(layers) else "")
    if text.get("mlp_layer_types") is not None:
        yield "mlp_layer_types", Implied(layers, why)
    elif "dense" not in layers[dense:] and (text.get("moe_layer_freq") or 1) == 1:
        yield "first_k_dense_replace", Implied(dense, why)


def _most(shapes: Mapping[str, Shape], part: str, axis: int) -> Implied | None:
    """The size of `axis` of a layer's tensors of one kind that more than half of them have."""
    pattern = re.compile(rf"model\.layers\.\d+\.(?:.*\.)?{part}\.weight")
    found = {n: s for n, s in shapes.items() if len(s) > axis and pattern.fullmatch(n)}
    counts = Counter(s[axis] for s in found.values()).most_common(1)
    if not counts or 2 * counts[0][1] <= len(found):
        return None
    name, shape = next((n, s) for n, s in found.items() if s[axis] == counts[0][0])
    return Implied(counts[0][0], f"{name.split('.', 3)[-1].removesuffix('.weight')} {list(shape)} in {counts[0][1]} of "
                   f"{len(found)}")
