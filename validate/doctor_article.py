"""A state_dict of the article's layer examined: each projection's shape against the others, as none states a
configuration. What is there is examined, also where something is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from exporter.errors import InputError
from exporter.safetensors_file import SourceTensor, StoredSource, read_header
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_checkpoint import examine_values
from validate.doctor_config import Shape

_LINEARS = ("down_proj_kv", "up_proj_k", "up_proj_v", "down_proj_q", "up_proj_q", "proj_qr", "proj_kr", "fc")
_MODEL_WIDE = (("down_proj_kv", 1), ("down_proj_q", 1), ("proj_qr", 1), ("proj_kr", 1), ("fc", 0))  # d_model numbers
# a side of a projection (0: rows, 1: columns), the side of another one that it meets, and what both are
_MEETS = (("up_proj_k", 1, "down_proj_kv", 0, "the latent's width"),
          ("up_proj_v", 1, "down_proj_kv", 0, "the latent's width"),
          ("up_proj_q", 1, "down_proj_q", 0, "down_proj_q's rows"),
          ("up_proj_q", 0, "up_proj_k", 0, "as up_proj_k: q and k meet column by column"),
          ("fc", 1, "up_proj_v", 0, "heads x v, up_proj_v's rows"))
_HEADS = range(2, 257)


def examine_state_dict(path: Path, report: Report) -> None:
    """Names, shapes and values of a .safetensors file; InputError where it is no layer of the article's."""
    tensors = read_header(path)
    if not {"down_proj_kv.weight", "proj_kr.weight"} & set(tensors):
        raise InputError(f"{path}: no state_dict of the article's MLALayer; expected {', '.join(_LINEARS)} (or a "
                         "checkpoint's folder)")
    missing = [n for n in _LINEARS if f"{n}.weight" not in tensors]
    report.see("projections of the article's layer: each shape against the others")
    if missing:
        report.add([_missing("\n".join(f"{name} not there" for name in missing))])
        report.skip(f"shapes of {', '.join(missing)}", "not there; those that are were held against one another")
    shapes = {n: tensors[f"{n}.weight"].shape for n in _LINEARS if n not in missing}
    flat = [n for n, s in shapes.items() if len(s) != 2]
    report.add([AILMENTS["shape-mismatch"].found(f"{n}.weight is {list(shapes[n])}; expected a matrix", where=n)
                for n in flat])
    matrices = {n: s for n, s in shapes.items() if n not in flat}
    report.add(_sides(matrices))
    report.add(_rotary(matrices, tensors))
    report.add(_biases(tensors, matrices))
    if report.passed:
        examine_values({n: SourceTensor(t.shape, t.load) for n, t in tensors.items()}, report)


def _missing(evidence: str) -> Finding:
    return AILMENTS["tensor-missing"].found(
        evidence, cause="the file does not hold every projection of the article's layer, each with its bias",
        cure="save the whole layer, safetensors.torch.save_file(layer.state_dict(), path); zeros are a bias where it "
        "has none")


def _sides(s: Mapping[str, Shape]) -> Iterator[Finding]:
    """Projections that do not fit together; d_model is what most of them say."""
    wide = Counter(s[n][axis] for n, axis in _MODEL_WIDE if n in s)
    wanted = [(n, axis, width, "d_model") for width, _ in wide.most_common(1) for n, axis in _MODEL_WIDE if n in s]
    wanted += [(n, axis, s[other][side], why) for n, axis, other, side, why in _MEETS if n in s and other in s]
    for name, axis, width, why in wanted:
        if s[name][axis] != width:
            yield AILMENTS["shape-mismatch"].found(
                f"{name} is {list(s[name])}; expected {width} {('rows', 'columns')[axis]}, {why}", where=name)


def _rotary(s: Mapping[str, Shape], tensors: Mapping[str, StoredSource]) -> Iterator[Finding]:
    """proj_kr gives rope columns, one key for all heads; proj_qr rope x heads."""
    if "proj_kr" not in s:
        return
    rope = s["proj_kr"][0]
    if rope % 2:
        yield AILMENTS["odd-rope-dim"].found(f"proj_kr gives {rope} columns", where="proj_kr")
    if "proj_qr" not in s or not rope:
        return
    rows = s["proj_qr"][0]
    heads = rows // rope
    if rows % rope or heads < 2:
        yield _heads_unclear(s, tensors)
        return
    for name in ("up_proj_k", "up_proj_v"):
        if name in s and s[name][0] % heads:
            yield AILMENTS["shape-mismatch"].found(
                f"{name} is {list(s[name])}, which {heads} heads (proj_qr {rows} / proj_kr {rope}) do not divide; "
                "either is wrong", where=name)


def _heads_unclear(s: Mapping[str, Shape], tensors: Mapping[str, StoredSource]) -> Finding:
    """Which of proj_qr and proj_kr is wrong, and what it would have to be. Shapes alone do not say it; the layer's own
    rotary buffers do."""
    rows, rope = s["proj_qr"][0], s["proj_kr"][0]
    heads = [h for h in _HEADS if all(s[n][0] % h == 0 for n in ("up_proj_k", "up_proj_v") if n in s)]
    keys = [h for h in heads if rows % (2 * h) == 0]
    buffers = {2 * t.shape[0] for n, t in tensors.items() if n.endswith(".inv_freq") and len(t.shape) == 1}
    stated = buffers.pop() if len(buffers) == 1 else None
    what = "one head's" if rows == rope else f"{rows / rope:.2f} heads'"
    query = (f"proj_qr is {list(s['proj_qr'])}, {what} rotary columns; expected rope_head_dim x heads, a multiple of "
             f"proj_kr's {rope} ({_for_heads(heads, lambda h: rope * h)})")
    if stated == rope or (stated is None and not keys):
        why = f"the file's inv_freq says {rope} rotary columns" if stated else (
            f"proj_kr is not what is wrong: no number of heads divides {rows} into even widths")
        return AILMENTS["shape-mismatch"].found(f"{query}; {why}", where="proj_qr")
    if stated is not None and rows % stated == 0 and rows // stated > 1:
        return AILMENTS["shape-mismatch"].found(
            f"proj_kr is {list(s['proj_kr'])}; expected {stated} rows, the rotary columns that the file's inv_freq "
            f"says: one key for all {rows // stated} heads", where="proj_kr")
    return AILMENTS["shape-mismatch"].found(
        f"either {query}; or proj_kr is {list(s['proj_kr'])}, made for every head where one key serves all; "
        f"expected proj_qr's {rows} / heads rows ({_for_heads(keys, lambda h: rows // h)}). The shapes do not say how "
        "many heads there are", where="proj_qr, proj_kr", cure="proj_qr: rope_head_dim x heads rows; proj_kr: "
        "rope_head_dim rows, one rotary key that all heads share")


def _for_heads(heads: list[int], rows: Callable[[int], int]) -> str:
    """What a side would be for the likely numbers of heads."""
    shown = [h for h in heads if h & (h - 1) == 0][:3] or heads[:3]
    return ", ".join(f"{rows(h)} for {h} heads" for h in shown) or "no number of heads divides up_proj_k and up_proj_v"


def _biases(tensors: Mapping[str, StoredSource], shapes: Mapping[str, Shape]) -> Iterator[Finding]:
    for name, shape in shapes.items():
        bias = tensors.get(f"{name}.bias")
        if bias is None:
            yield _missing(f"{name}.bias [{shape[0]}] is not there")
        elif bias.shape != shape[:1]:
            yield AILMENTS["shape-mismatch"].found(f"{name}.bias is {list(bias.shape)}; expected [{shape[0]}]",
                                                   where=name)
