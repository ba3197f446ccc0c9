"""The rung between source and graph: the exported weights, read back and held against the source in float64.

Codes of quantised weights are decoded (validate/quantised_weights.py) and may differ from the source by half a step of
their own grid, no more. It shares no code with the exporter's weight handling: the file is read with the safetensors
library, what lies in a checkpoint's own files through the graphs' external data, and the expectation comes from the
references' own reading of the source. It also sees what no output can show, such as up_proj_k's bias, which the softmax
drops and the file keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from safetensors import safe_open

from exporter.decoder_config import DecoderConfig
from exporter.dtypes import DTYPES
from exporter.manifest import Export
from validate.ladder import Ladder, ModelRung, Rung
from validate.metrics import TOLERANCES, Difference, Tolerance, compare
from validate.quantised_weights import SUFFIX, Codes, QuantisedFile, scheme_of
from validate.references.decoder_tensors import DecoderTensors, open_decoder_tensors
from validate.references.rope import softmax_scale
from validate.references.weights import Affine, AttentionWeights, attention_weights

NONE = "weights: not run: exported with --weights none, there are none to read back"
Expected = Iterator[tuple[str, int | None, torch.Tensor]]  # name, index into a stack of experts, values
MATRICES = ("gate", "up", "down")
MISSING, NOTHING = Difference(float("inf"), float("inf"), 0.0, None, False), Difference(0.0, 0.0, 1.0, None, True)
HALF_STEP = Tolerance(1.0, 2.0)  # rounding to the nearest, and no more; the cosine is the scheme's own affair
# how far rounding to a compute dtype may move a scale: bfloat16's 8 bits, float16's subnormals times the largest code
ROUNDED, SUBNORMAL, LARGEST = 2.0**-7, 2.0**-24, 448.0


def rungs(made: Export, source: Mapping[str, torch.Tensor] | DecoderConfig, ladder: Ladder) -> None:
    """Add the rung `weights`, or the reason why there is none. `source`: one attention's tensors, or at model scope the
    configuration."""
    if made.data["weights"].get("mode") == "none":
        ladder.skip(NONE)
        return
    kind = ModelRung if made.contract == "model" else Rung
    try:
        result = audit_model(made, source) if isinstance(source, DecoderConfig) else audit(made, source)
    except Exception as error:
        ladder.rungs.append(kind.broken("weights", None, made, error))
        return
    ladder.rungs.append(kind.of("weights", None, made, result.wide, TOLERANCES[made.dtype],
                                note=f"worst: {result.worst_wide}"))
    if result.codes is not None:
        note = f"{scheme_of(made)}, rel in half steps of the code's own grid; worst: {result.worst_codes}"
        ladder.rungs.append(kind.of("weights/codes", None, made, result.codes, HALF_STEP, note=note))


@dataclass
class Audit:
    """The worst difference of wide weights and the name of its tensor; of codes, in half steps of their grids. Both
    directions: a tensor that the source implies and the export lacks, or the reverse, is an infinite difference."""

    wide: Difference = NOTHING
    worst_wide: str = "none"
    codes: Difference | None = None
    worst_codes: str = "none"

    def add(self, name: str, difference: Difference, codes: bool) -> None:
        """Keep the worse one."""
        if codes and (self.codes is None or difference.rel >= self.codes.rel):
            self.codes, self.worst_codes = difference, name
        elif not codes and difference.rel >= self.wide.rel:
            self.wide, self.worst_wide = difference, name


def audit(made: Export, tensors: Mapping[str, torch.Tensor]) -> Audit:
    """The audit of one attention."""
    expected = _expected(made, attention_weights(made.config, tensors, torch.float64, "cpu"))
    return _worst(_Stored(made), ((name, None, values) for name, values in expected.items()))


def audit_model(made: Export, decoder: DecoderConfig) -> Audit:
    """The same of a decoder, or of the slice that was exported; a matrix or an attention at a time."""
    return _worst(_Stored(made), _expected_model(made, decoder, open_decoder_tensors(made.data["source"], decoder)))


def _worst(stored: _Stored, expected: Expected) -> Audit:
    result, left = Audit(), set(stored.names)
    for name, index, values in expected:
        if name not in stored.names:
            return Audit(MISSING, f"{name} (only on one side)")
        left.discard(name)
        label, wanted = name if index is None else f"{name}[{index}]", values.double().numpy()
        codes = name in stored.codes
        if codes:
            left.discard(f"{name}{SUFFIX}")
            difference = _half_steps(stored.quantised.get(name, index), wanted)
        else:
            found = stored.get(name, index)
            difference = compare(found, wanted) if found.shape == wanted.shape else MISSING
        result.add(label, difference, codes)
    return Audit(MISSING, f"{min(left)} (only on one side)") if left else result


def _half_steps(found: Codes, wanted: np.ndarray) -> Difference:
    """How many half steps of its own grid the worst value is off; infinite where a block's scale is not that of its own
    largest magnitude."""
    if found.values.shape != wanted.shape or not np.isfinite(found.values).all():
        return MISSING
    plain, error = compare(found.values, wanted), np.abs(found.values - wanted)
    # a division in float32 may round the other way at the middle between two codes; a block of zeros has no steps
    allowed = found.half_step + 1e-6 * np.abs(wanted)
    off = np.divide(error, allowed, out=np.where(error > 0, np.inf, 0.0), where=allowed > 0)
    worst = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape)) if off.size else None
    most = np.abs(wanted).reshape(*found.reach.shape, -1).max(-1)
    if (np.abs(found.reach - most) > ROUNDED * most + SUBNORMAL * LARGEST).any():
        return Difference(float("inf"), plain.max_abs, plain.cosine, worst, True)
    return Difference(float(off.max(initial=0.0)), plain.max_abs, plain.cosine, worst, True)


class _Stored:
    """An export's weights by name, wherever they lie; `codes` are those that `quantised` reads."""

    def __init__(self, made: Export) -> None:
        self._file = made.folder / made.data["weights"]["file"]
        with safe_open(self._file, framework="pt") as file:
            self._own = {n for n in file.keys() if not n.startswith("rope.")}  # noqa: SIM118  (not a dict)
        self.quantised = QuantisedFile(made)
        self.codes = self.quantised.names
        self._linked = dict(_linked(made)) if made.data["weights"].get("linked") else {}
        stated = {n for n in made.data["weights"]["parameters"] if not n.startswith("rope.")}
        self.names = (stated & (self._own | set(self._linked))) | self._own

    def get(self, name: str, index: int | None = None) -> np.ndarray:
        """Values in float64; `index` picks one of a stack."""
        if name in self._own:
            with safe_open(self._file, framework="pt") as file:
                tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
            own: np.ndarray = tensor.double().numpy()
            return own
        path, offset, shape, dtype = self._linked[name]
        found = np.memmap(path, dtype, "r", offset, shape)
        values: np.ndarray = np.asarray(found if index is None else found[index]).astype(np.float64)
        return values


def _linked(made: Export) -> Iterator[tuple[str, tuple[Path, int, tuple[int, ...], Any]]]:
    """Tensors that the graphs read from a checkpoint's own files: where, and in what shape. A graph may see one as a
    stack of one expert; the manifest says how many numbers it has."""
    records = made.data["weights"]["linked"]
    for graph in made.graphs:
        for tensor in onnx.load(made.folder / graph.file, load_external_data=False).graph.initializer:
            entry = {e.key: e.value for e in tensor.external_data}
            record = records.get(entry.get("location", ""))
            if record is None:
                continue
            path = made.folder / entry["location"] if record["how"] == "hardlink" else Path(record["path"])
            name = tensor.name.removesuffix(".3d")
            shape = tuple(tensor.dims[1:] if name != tensor.name else tensor.dims)
            if prod(shape) == made.data["weights"]["parameters"].get(name):
                kind = next(d for d in DTYPES.values() if d.onnx == tensor.data_type)
                yield name, (path, int(entry["offset"]), shape, kind.numpy)


def _expected_model(made: Export, d: DecoderConfig, tensors: DecoderTensors) -> Expected:
    layers = range(*made.data["layers"])
    last = layers.stop == d.layers
    if layers.start == 0 or (last and d.tie_word_embeddings):
        yield "embed_tokens.weight", None, tensors.get("model.embed_tokens.weight")
    for layer in layers:
        yield from _expected_layer(made, d, tensors, layer)
    if last:
        yield "norm.weight", None, tensors.get("model.norm.weight").double() * d.logits_scale
        if not d.tie_word_embeddings:
            yield "lm_head.weight", None, tensors.get("lm_head.weight")


def _expected_layer(made: Export, d: DecoderConfig, tensors: DecoderTensors, layer: int) -> Expected:
    ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
    for scope, place in zip(d.attention_scopes(layer), (".0", ".1") if d.shortcut else ("",), strict=True):
        yield f"{ours}input_norm{place}.weight", None, tensors.get(f"{theirs}input_layernorm{place}.weight")
        raw = {n: t for n, t in tensors.within(scope).items() if not n.startswith("rotary_emb.")}
        attention = _expected(made, attention_weights(d.attention, raw, torch.float64, "cpu"))
        yield from ((f"{ours}attn{place}.{name}", None, values) for name, values in attention.items())
        yield f"{ours}post_norm{place}.weight", None, tensors.get(f"{theirs}post_attention_layernorm{place}.weight")
        if d.shortcut:
            yield from _expected_ffn(tensors, f"{ours}mlps{place}.", f"{theirs}mlps{place}.")
    if layer in d.sparse_layers:
        yield from _expected_moe(made, d, tensors, ours, theirs)
    elif not d.shortcut:
        yield from _expected_ffn(tensors, f"{ours}mlp.", f"{theirs}mlp.")


def _expected_ffn(tensors: DecoderTensors, ours: str, theirs: str) -> Expected:
    for m in MATRICES:
        yield f"{ours}{m}_proj.weight", None, tensors.get(f"{theirs}{m}_proj.weight")


def _expected_moe(made: Export, d: DecoderConfig, tensors: DecoderTensors, ours: str, theirs: str) -> Expected:
    """Router, shared experts, and the experts in whichever of the three layouts was written: gate and up row by row, a
    stack of each matrix, or each expert's own."""
    moe, router = d.moe, f"{theirs}mlp.router" if d.shortcut else f"{theirs}mlp.gate"
    assert moe is not None
    weight = f"{router}.classifier.weight" if d.shortcut else f"{router}.weight"
    yield f"{ours}mlp.router.weight", None, tensors.get(weight)
    if moe.choice_bias:
        yield f"{ours}mlp.router.bias", None, tensors.get(f"{router}.e_score_correction_bias")
    if moe.shared_intermediate_size:
        yield from _expected_ffn(tensors, f"{ours}mlp.shared.", f"{theirs}mlp.shared_experts.")
    if moe.output_norm:
        yield f"{ours}post_mlp_norm.weight", None, tensors.get(f"{theirs}post_mlp_layernorm.weight")
    written = made.data["weights"]["parameters"]
    for e in range(moe.n_routed_experts):
        gate, up, down = (tensors.get(f"{theirs}mlp.experts.{e}.{m}_proj.weight") for m in MATRICES)
        if f"{ours}mlp.experts.gate_up" in written:
            yield f"{ours}mlp.experts.gate_up", e, torch.stack([gate, up], dim=1).flatten(0, 1)
            yield f"{ours}mlp.experts.down", e, down
            continue
        for m, values in zip(MATRICES, (gate, up, down), strict=True):
            own = f"{ours}mlp.experts.{e}.{m}"
            yield (own, None, values) if own in written else (f"{ours}mlp.experts.{m}", e, values)


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
