"""A checkpoint folder examined before anything is loaded: shapes against the configuration, traps of config.json, FP8
codes against their scales."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint import has_weights, open_checkpoint, read_config
from exporter.config import MLAConfig
from exporter.decoder_config import attention_shapes, tensor_shapes
from exporter.errors import InputError
from exporter.families import IGNORED_TENSORS, config_from_hf, decoder_from_hf, family_of, text_config
from exporter.safetensors_file import SourceTensor
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_codes import examine_codes
from validate.doctor_config import Shape, Wrong, correct

VALUES = 64 << 20  # numbers whose values are looked at
_NORM = re.compile(r".*\.(?:q_a|kv_a)_layernorm\.weight")
_BIAS = re.compile(r".*\.(?:q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj)\.bias")


def examine_folder(folder: Path, report: Report) -> None:
    """config.json, then every tensor by its header, then values."""
    raw = read_config(folder)
    where = str(folder / "config.json")
    family = family_of(raw, where)  # another architecture is bad input, no ailment
    text = text_config(raw)
    report.see("config.json: its family, widths, RoPE, latent norms")
    report.add(_config_traps(text))
    rope = text.get("qk_rope_head_dim")
    if isinstance(rope, int) and rope % 2:
        report.add([AILMENTS["odd-rope-dim"].found(f"qk_rope_head_dim is {rope}", where="config.json")])
        report.skip("tensors", "the configuration is refused")
        return
    config = config_from_hf(raw, where)
    if not has_weights(folder):
        report.skip("tensors", "the folder holds a config.json and no weights")
        return
    try:
        tensors = open_checkpoint(folder).tensors
    except InputError as error:
        ailment = _of_refusal(str(error))
        if ailment is None:
            raise
        report.add([AILMENTS[ailment].found(str(error), where=folder.name)])
        report.skip("tensors", "the checkpoint is refused")
        return
    kept = {n: t for n, t in tensors.items() if not n.endswith(IGNORED_TENSORS)}
    layer_only = bool(family.layer_only)
    if family.shortcut:  # LongCat's identity experts are saved with weights that nothing reads
        expected = _expected(raw, where, config, layer_only)
        kept = {n: t for n, t in kept.items() if ".mlp.experts." not in n or n in expected}
    report.see(f"{len(kept)} tensors: names and shapes against the configuration")
    report.add(_shapes(raw, where, kept, layer_only))
    examine_codes(folder, raw, report)
    if report.passed:
        examine_values(kept, report)


def _expected(raw: Mapping[str, Any], where: str, config: MLAConfig, layer_only: bool) -> dict[str, Shape]:
    if not layer_only:
        return tensor_shapes(decoder_from_hf(raw, where))
    return {f"model.layers.{i}.self_attn.{name}": shape for i in range(config.num_hidden_layers)
            for name, shape in attention_shapes(config)}


def _config_traps(text: Mapping[str, Any]) -> Iterator[Finding]:
    nope, rope = text.get("qk_nope_head_dim"), text.get("qk_rope_head_dim")
    for name in ("qk_head_dim", "q_head_dim"):
        stated = text.get(name)
        if stated is not None and isinstance(nope, int) and isinstance(rope, int) and stated != nope + rope:
            yield AILMENTS["head-dim-mismatch"].found(f"{name} is {stated}; nope + rope = {nope} + {rope} = "
                                                      f"{nope + rope}", where="config.json")
    for name in ("rope_scaling", "rope_parameters"):
        stated = text.get(name)
        if isinstance(stated, Mapping) and (stated.get("rope_type") or stated.get("type") or "default") == "default":
            yarn = [k for k in ("factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow") if stated.get(k)]
            if yarn:
                yield AILMENTS["rope-type-missing"].found(f"{name} states {', '.join(yarn)} and no rope_type",
                                                          where="config.json")


def _of_refusal(message: str) -> str | None:
    """The ailment that a reader's refusal names; None for what is no MLA checkpoint at all."""
    for words, ailment in (("missing scale", "fp8-scale-missing"), ("config.json and weights disagree",
                           "depth-mismatch"), ("one a block of", "fp8-block")):
        if words in message:
            return ailment
    return None


def _shapes(raw: Mapping[str, Any], where: str, found: Mapping[str, SourceTensor], layer_only: bool
            ) -> Iterator[Finding]:
    """Tensors against the configuration; those of many layers that are wrong alike are one line. Where other fields of
    config.json would make them right, it is the configuration that is wrong."""
    def under(other: Mapping[str, Any]) -> Wrong:
        config = config_from_hf(other, where)
        return _against(_expected(other, where, config, layer_only), found, config, whole=not layer_only)

    wrong = under(raw)
    if not wrong:
        return
    correction = correct(raw, text_config(raw), {n: t.shape for n, t in found.items()}, under)
    if correction is None:
        yield from _found(wrong)
        return
    for kind in dict.fromkeys(wrong[n][0] for n in correction.explains):
        explained = {n: wrong[n] for n in correction.explains if wrong[n][0] == kind}
        needed = {field for n in explained for field in correction.explains[n]}
        fields = {n: c for n, c in correction.changes.items() if n in needed} or correction.changes
        stated = [f"{n} is {json.dumps(text_config(raw)[n])}; the tensors imply {json.dumps(c.value)} ({c.why})"
                  for n, c in fields.items()]
        right = ", ".join(f"{n}: {json.dumps(c.value)}" for n, c in fields.items())
        yield from _found(explained, where="config.json",
                          cause="\n".join(["config.json is not of these weights", *stated]),
                          cure=f"state {right} in config.json, or take the one that came with these weights")
    yield from _found(correction.left)


def _found(wrong: Wrong, **more: str) -> Iterator[Finding]:
    """One finding for each kind of tensor."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, (kind, line) in wrong.items():
        groups.setdefault((kind, _role(name)), []).append(line)
    for (kind, _), lines in groups.items():
        yield AILMENTS[kind].found(
            lines[0] + (f", and {len(lines) - 1} more like it" if len(lines) > 1 else ""), **more)


def _against(expected: Mapping[str, Shape], found: Mapping[str, SourceTensor], c: MLAConfig, whole: bool) -> Wrong:
    """Names and shapes, both directions."""
    wrong: Wrong = {}
    for name, shape in expected.items():
        if name not in found:
            bias_optional = name.endswith("e_score_correction_bias")  # A.X-K1 may have none
            if not bias_optional:
                kind = "latent-norm-missing" if _NORM.fullmatch(name) and not _any_norm(found) else "tensor-missing"
                wrong[name] = kind, f"{name} {list(shape)} is not there"
        elif found[name].shape != shape:
            wrong[name] = ("shape-mismatch", f"{name} is {list(found[name].shape)}; expected {list(shape)}"
                           f"{_width_of(name, c)}")
    for name in found:
        if name in expected or _BIAS.fullmatch(name) or not (whole or ".self_attn." in name) or ".indexer." in name:
            continue
        if not whole and name not in expected:
            continue
        kind = "latent-norm-unused" if _NORM.fullmatch(name) else "tensor-unknown"
        wrong[name] = kind, f"{name} {list(found[name].shape)} is not used"
    return wrong


def _any_norm(found: Mapping[str, SourceTensor]) -> bool:
    return any(_NORM.fullmatch(n) for n in found)


def _role(name: str) -> str:
    """A tensor's name without numbers of layers and experts."""
    return re.sub(r"\.\d+\.", ".N.", name)


def _width_of(name: str, c: MLAConfig) -> str:
    """What the rows of an attention's projection are made of, in words."""
    H, words = c.num_attention_heads, {
        "q_proj": "heads x (nope + rope) = {H} x ({nope} + {rope})", "q_b_proj": "heads x (nope + rope) = {H} x ({nope}"
        " + {rope})", "kv_a_proj_with_mqa": "d_c + rope = {d_c} + {rope}", "kv_b_proj": "heads x (nope + v) = {H} x "
        "({nope} + {v})", "o_proj": "columns: heads x v = {H} x {v}", "kv_a_layernorm": "d_c = {d_c}"}
    part = name.rsplit(".", 2)[-2]
    text = words.get(part)
    return "" if text is None else ", " + text.format(H=H, nope=c.qk_nope_head_dim, rope=c.qk_rope_head_dim,
                                                      d_c=c.kv_lora_rank, v=c.v_head_dim)


def examine_values(tensors: Mapping[str, SourceTensor], report: Report) -> None:
    """Whether the attentions' numbers are finite, as many as the budget allows."""
    left, seen, skipped = VALUES, 0, 0
    for name, tensor in tensors.items():
        size = int(np.prod(tensor.shape, dtype=np.int64))
        if ".self_attn." not in name and "." in name and ".layers." in name:
            continue
        if size > left:
            skipped += 1
            continue
        left, seen = left - size, seen + 1
        bad = int((~np.isfinite(np.asarray(tensor.load(), np.float32))).sum())
        if bad:
            report.add([AILMENTS["not-finite"].found(f"{name}: {bad} of {size} values are NaN or infinite")])
    report.see(f"values of {seen} tensors: finite")
    if skipped:
        report.skip(f"values of {skipped} tensors", f"more than {VALUES >> 20} Mi numbers in all")
