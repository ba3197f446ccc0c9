"""The layouts checkpoints come in, read as one: the text decoder's tensors under Hugging Face names, floats on load.

Two steps, both over headers only. First names: the wrapper of a vision-language model is taken off, prediction blocks
are dropped, DeepSeek's own names and kimi_linear's become Hugging Face's. Then values: a weight with a scale becomes
one tensor that dequantises itself when loaded, fused experts become slices of their file, everything else stays where
it lies. What would be read wrongly is refused by name, with the way out. Names not known here pass through: a later
stage knows what its family has and refuses the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from exporter.dequantise import blocks, fp8_block, int4_groups
from exporter.errors import InputError
from exporter.safetensors_file import SourceTensor, StoredSource

_WRAPPERS = ("language_model.", "model.language_model.", "language.", "text_model.", "model.text_model.")
_TEXT_CONFIGS = ("text_config", "language_config")
_DECODER = re.compile(r"(?:model\.)?(?:layers|embed_tokens|norm)\.|lm_head\.")
_ATTENTION = re.compile(r"((?:.+\.)?)(layers\.\d+\.(?:self_attn\.(?:\d+\.)?kv_a_proj_with_mqa|attn\.wkv_a)\.weight)\w*")
_LAYER = re.compile(r"(model\.layers\.(\d+)\.)(.+)")

# DeepSeek's own names, component by component, and the block size that its code fixes
_OWN = re.compile(r"layers\.\d+\.attn\.wkv_a\.")
_OWN_TOP = {"embed": "embed_tokens", "head": "lm_head"}
_OWN_PARTS = {"attn": "self_attn", "ffn": "mlp", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_OWN_ATTENTION = {"wq": "q_proj", "wq_a": "q_a_proj", "q_norm": "q_a_layernorm", "wq_b": "q_b_proj",
                  "wkv_a": "kv_a_proj_with_mqa", "kv_norm": "kv_a_layernorm", "wkv_b": "kv_b_proj", "wo": "o_proj"}
_OWN_BLOCK = (128, 128)
_FFN = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}

_FUSED = re.compile(r"(.+\.experts\.)(gate_up_proj|down_proj)(?:\.weight)?")
_WEIGHT = re.compile(r".*(?:[._]weight|\.experts\.(?:gate_up_proj|down_proj))")
_BITSANDBYTES = re.compile(r".+\.(?:weight\.(?:absmax|quant_map|nested_\w+|quant_state\..+)|SCB)")
_PREDICTION = ("eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens")
_WAY_OUT = "dequantise the checkpoint first, or use its bf16 release"


@dataclass(frozen=True)
class _Scheme:
    """How weights are quantised, by the configuration: FP8 in blocks of `block`, int4 in groups of `group`, or not."""

    block: tuple[int, int] | None = None
    group: int | None = None


def canonical(stored: Mapping[str, StoredSource], raw: Mapping[str, Any], where: str) -> dict[str, SourceTensor]:
    """The text decoder's tensors of a checkpoint, by canonical name; no value is read before a tensor's `load`.

    `stored` is every tensor of the folder, `raw` its parsed config.json, `where` what messages call the checkpoint.
    """
    inner = _unwrapped(stored, where)
    own = any(_OWN.match(name) for name, _ in inner)
    layers, named = _layers(raw, where), dict[str, StoredSource]()
    names = [_hf_name(name, own) for name, _ in inner]
    _check_depth(names, layers, where)
    for full, (_, tensor) in zip(names, inner, strict=True):
        if not _skipped(full, layers):
            if full in named:
                raise InputError(f"{where}: tensors {named[full].name} and {tensor.name} both read as {full}; expected "
                                 "one of them (are two checkpoints mixed in the folder?)")
            named[full] = tensor
    reader = _Reader(named, _scheme(raw, named, own, where), raw, where)
    return dict(pair for name in named for pair in reader.read(name))


# --- Names ------------------------------------------------------------------------------------------------------------


def _unwrapped(stored: Mapping[str, StoredSource], where: str) -> list[tuple[str, StoredSource]]:
    """The tensors of the text decoder without the wrapper's prefix; all of them where there is no wrapper."""
    # a vision tower may have layers.N.self_attn too, but no latent projection
    found = [m for n in stored if (m := _ATTENTION.fullmatch(n)) and "mtp" not in n.split(".")]
    roots = {m[1].removesuffix("model."): m[2] for m in found}
    if len(roots) > 1:
        raise InputError(f"{where}: {len(roots)} tensors named *{min(roots.values())}; expected one text decoder, not "
                         f"{' and '.join(repr(root) for root in sorted(roots))}")
    parts = (r for r in _WRAPPERS if any(n.startswith(r) and _DECODER.match(n.removeprefix(r)) for n in stored))
    root = next(iter(roots), None) if roots else next(parts, None)
    if not root:
        return list(stored.items())
    # the head stands beside the decoder or within it
    return [(n.removeprefix(root), t) for n, t in stored.items() if n.startswith((root, "lm_head."))]


def _hf_name(name: str, own: bool) -> str:
    """The Hugging Face name of a tensor whose wrapper is off; a name not known here as it is."""
    if own:
        first, _, rest = name.partition(".")
        name = f"{_OWN_TOP.get(first, first)}.{rest}"
        if name.endswith(".scale"):
            name = name.removesuffix("scale") + "weight_scale_inv"
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        name = f"model.{name}"
    layer = _LAYER.fullmatch(name)
    if not layer:
        return name
    parts = layer[3].split(".")
    if own:
        parts[0] = _OWN_PARTS.get(parts[0], parts[0])
        if parts[0] == "self_attn":
            parts[1:2] = [_OWN_ATTENTION.get(p, p) for p in parts[1:2]]
        if parts == ["mlp", "gate", "bias"]:
            parts[2] = "e_score_correction_bias"
    if parts[0] == "block_sparse_moe" or (own and parts[0] == "mlp"):
        parts = ["mlp", *(_FFN.get(p, p) for p in parts[1:])]
    return layer[1] + ".".join(parts)


def _skipped(name: str, layers: int | None) -> bool:
    """Blocks that predict further tokens, and rotary tables, which follow from the configuration."""
    layer = _LAYER.fullmatch(name)
    return ("mtp" in name.split(".") or name.endswith("rotary_emb.inv_freq")
            or (layer is not None and layers is not None and int(layer[2]) >= layers))


def _check_depth(names: list[str], layers: int | None, where: str) -> None:
    """A layer beyond the configuration's last must be one that predicts further tokens, or the two disagree."""
    beyond: dict[int, bool] = {}
    for name in names:
        layer = _LAYER.fullmatch(name)
        if layer is not None and layers is not None and int(layer[2]) >= layers:
            predicts = layer[3].startswith(_PREDICTION)
            beyond[int(layer[2])] = beyond.get(int(layer[2]), False) or predicts
    for number, predicts in sorted(beyond.items()):
        if not predicts:
            raise InputError(f"{where}: num_hidden_layers is {layers}, and the weights hold a layer {number}, which "
                             "is no prediction block (no eh_proj, enorm or hnorm); config.json and weights disagree")


def _stated(raw: Mapping[str, Any], *names: str) -> Any:
    """The first of `names` that the text decoder's configuration states, else the wrapper's."""
    for section in (*(raw.get(key) for key in _TEXT_CONFIGS), raw):
        if isinstance(section, Mapping):
            for name in names:
                if section.get(name) is not None:
                    return section[name]
    return None


def _layers(raw: Mapping[str, Any], where: str) -> int | None:
    layers = _stated(raw, "num_hidden_layers", "num_layers", "n_layers")
    if layers is not None and not _is_size(layers):
        raise InputError(f"{where}: num_hidden_layers is {layers!r}; expected a number from 1 up")
    return None if layers is None else int(layers)


# --- What the configuration says of quantisation ----------------------------------------------------------------------


def _scheme(raw: Mapping[str, Any], named: Mapping[str, StoredSource], own: bool, where: str) -> _Scheme:
    config = _stated(raw, "quantization_config")
    if not config:
        return _Scheme(block=_OWN_BLOCK if own else None)
    method = config.get("quant_method", "method not stated") if isinstance(config, Mapping) else config

    def refused(what: str) -> InputError:
        codes = (f"; so {t.name} {list(t.shape)} {t.dtype} is not read" for t in named.values() if not t.is_float)
        return InputError(f"{where}: weights are quantised ({method}); expected fp32, fp16 or bf16 weights; {_WAY_OUT} "
                          f"({what}{next(codes, '')})")

    if method == "fp8":
        block = config.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(_is_size(b) for b in block):
            raise refused(f"weight_block_size is {block!r}, not two sizes")
        return _Scheme(block=(block[0], block[1]))
    if method == "compressed-tensors":
        return _Scheme(group=_group_size(config, refused))
    raise refused("only fp8 in blocks and packed int4 are read quantised")


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _group_size(config: Mapping[str, Any], refused: Callable[[str], InputError]) -> int:
    """The group size of symmetric int4 weights, the only kind of compressed-tensors that is read."""
    if config.get("format") != "pack-quantized":
        raise refused(f"format is {config.get('format')!r}, not 'pack-quantized'")
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise refused(f"{key} is {config[key]!r}, not null")
    groups, sizes = config.get("config_groups"), set[int]()
    for name, entry in groups.items() if isinstance(groups, Mapping) else ():
        weights = entry.get("weights") if isinstance(entry, Mapping) else None
        if not isinstance(weights, Mapping):
            raise refused(f"{name} does not describe weights")
        for key, expected in (("num_bits", 4), ("type", "int"), ("symmetric", True), ("strategy", "group")):
            if weights.get(key, expected if key == "type" else None) != expected:
                raise refused(f"{name}.weights.{key} is {weights.get(key)!r}, not {expected!r}")
        if weights.get("actorder"):
            raise refused(f"{name}.weights.actorder is {weights['actorder']!r}, not null")
        if not _is_size(weights.get("group_size")):
            raise refused(f"{name}.weights.group_size is {weights.get('group_size')!r}, not a size")
        sizes.add(weights["group_size"])
    if len(sizes) != 1:
        raise refused(f"config_groups state {len(sizes)} group sizes, not one")
    return int(sizes.pop())


# --- Values -----------------------------------------------------------------------------------------------------------


def _load_fp8(weight: StoredSource, scale: StoredSource, block: tuple[int, int]) -> np.ndarray:
    return fp8_block(weight.load_raw(), scale.load_raw(), block)


def _load_int4(packed: StoredSource, scale: StoredSource, shape: StoredSource, group: int) -> np.ndarray:
    stated, expected = shape.load_raw().tolist(), [packed.shape[0], packed.shape[1] * 8]
    if stated != expected:
        raise InputError(f"{shape.file.name}: tensor {shape.name} says {stated}; expected {expected}, which "
                         f"{packed.name} holds; fetch the file again")
    return int4_groups(packed.load_raw(), scale.load_raw(), group)


@dataclass(frozen=True)
class _Reader:
    """Stored tensors under canonical names to tensors that load as floats."""

    named: Mapping[str, StoredSource]
    scheme: _Scheme
    raw: Mapping[str, Any]
    where: str

    def read(self, name: str) -> Iterator[tuple[str, SourceTensor]]:
        """What the stored tensor `name` becomes: nothing for a scale, a tensor, or many for fused experts."""
        tensor, base = self.named[name], name.rpartition(".")[0]
        self._refuse_other_methods(name)
        if name.endswith(".weight_packed"):
            yield f"{base}.weight", self._int4(base)
        elif name.endswith((".weight_scale", ".weight_shape")):
            if f"{base}.weight_packed" not in self.named:
                raise self._error(tensor, f"{list(tensor.shape)} {tensor.dtype} stands without weight_packed (one "
                                          f"scale per tensor or row is not read here); {_WAY_OUT}")
        elif name.endswith("_scale_inv"):
            weight = self.named.get(name.removesuffix("_scale_inv"))
            if weight is None or weight.is_float:
                beside = f"its weight is {weight.dtype}" if weight else "its weight is missing"
                raise self._error(tensor, f"is a scale, but {beside}; expected an F8_E4M3 weight beside it; fetch the "
                                          "checkpoint again")
        elif tensor.is_float and (fused := _FUSED.fullmatch(name)) and len(tensor.shape) == 3:
            yield from self._experts(fused[1], fused[2], tensor)
        elif tensor.is_float or not _WEIGHT.fullmatch(name):
            yield name, SourceTensor(tensor.shape, tensor.load, tensor)
        else:
            yield name, self._fp8(name, tensor)

    def _error(self, tensor: StoredSource, what: str) -> InputError:
        return InputError(f"{self.where}: tensor {tensor.name} {what}")

    def _expect(self, tensor: StoredSource, shape: tuple[int, ...], why: str) -> None:
        if tensor.shape != shape:
            raise self._error(tensor, f"has shape {list(tensor.shape)}; expected {list(shape)}, {why}")

    def _refuse_other_methods(self, name: str) -> None:
        for found, method in ((name.endswith((".qweight", ".qzeros")), "AWQ or GPTQ"),
                              (_BITSANDBYTES.fullmatch(name), "bitsandbytes"),
                              (name.endswith(".weight_zero_point"), "asymmetric compressed-tensors"),
                              (name.endswith(".weight_g_idx"), "reordered compressed-tensors")):
            if found:
                tensor = self.named[name]
                raise self._error(tensor, f"{list(tensor.shape)} {tensor.dtype} belongs to {method} weights, which are "
                                          f"not read here; {_WAY_OUT}")

    def _fp8(self, name: str, weight: StoredSource) -> SourceTensor:
        """A matrix with a scale a block. The scale may lie in another file."""
        scale, block = self.named.get(f"{name}_scale_inv"), self.scheme.block
        if weight.dtype != "F8_E4M3" or scale is None or len(weight.shape) != 2:
            hint = ""
            if f"{name}_scale" in self.named:
                hint = " (one scale per tensor or row is not read here)"
            elif len(weight.shape) != 2:
                hint = f" (and shape {list(weight.shape)}, where FP8 is read as matrices)"
            elif weight.dtype == "F8_E4M3":
                hint = " (or fetch its missing scale, weight_scale_inv)"
            raise self._error(weight, f"has dtype {weight.dtype}; expected one of F64, F32, F16, BF16; "
                                      f"{_WAY_OUT}{hint}")
        if block is None:
            raise self._error(weight, f"is {weight.dtype} with a scale, but the configuration states no "
                                      "weight_block_size; fetch the checkpoint's own config.json")
        if not (scale.is_float or scale.dtype == "F8_E8M0"):
            raise self._error(scale, f"has dtype {scale.dtype}; expected F32 or F8_E8M0 for a scale; fetch it again")
        rows, columns = weight.shape
        self._expect(scale, (blocks(rows, block[0]), blocks(columns, block[1])),
                     f"one a block of {block[0]} x {block[1]} of {weight.name} {list(weight.shape)}")
        return SourceTensor(weight.shape, partial(_load_fp8, weight, scale, block))

    def _int4(self, base: str) -> SourceTensor:
        packed, group = self.named[f"{base}.weight_packed"], self.scheme.group
        scale, shape = (self.named.get(f"{base}.{part}") for part in ("weight_scale", "weight_shape"))
        if scale is None or shape is None:
            raise self._error(packed, f"stands without its {'weight_shape' if scale else 'weight_scale'}; fetch the "
                                      "checkpoint again")
        if group is None:
            raise self._error(packed, "is packed, but the configuration states no compressed-tensors "
                                      "quantization_config; fetch the checkpoint's own config.json")
        for tensor, dtypes in ((packed, ("I32",)), (shape, ("I32", "I64")), (scale, ("BF16", "F16", "F32", "F64"))):
            if tensor.dtype not in dtypes:
                raise self._error(tensor, f"has dtype {tensor.dtype}; expected {' or '.join(dtypes)}; {_WAY_OUT}")
        if len(packed.shape) != 2:
            raise self._error(packed, f"has shape {list(packed.shape)}; expected a matrix; {_WAY_OUT}")
        rows, columns = packed.shape[0], packed.shape[1] * 8
        if columns % group:
            raise self._error(packed, f"has rows of {columns} values; expected a multiple of the group size {group}; "
                                      f"{_WAY_OUT}")
        self._expect(scale, (rows, columns // group), f"one a group of {group} of {packed.name}")
        self._expect(shape, (2,), "rows and columns")
        return SourceTensor((rows, columns), partial(_load_int4, packed, scale, shape, group))

    def _experts(self, prefix: str, part: str, fused: StoredSource) -> Iterator[tuple[str, SourceTensor]]:
        """Per expert slices of [E, 2I, D] (gate, then up) or of [E, D, I], still where they lie in the file."""
        experts, rows, columns = fused.shape
        hidden = _stated(self.raw, "hidden_size")
        out, pieces = (columns, ("gate_proj", "up_proj")) if part == "gate_up_proj" else (rows, ("down_proj",))
        if not fused.nbytes or rows % len(pieces) or (hidden is not None and out != hidden):
            order = "[experts, 2 x intermediate, hidden]" if len(pieces) == 2 else "[experts, hidden, intermediate]"
            raise self._error(fused, f"has shape {list(fused.shape)}; expected {order} with hidden_size {hidden} (are "
                                     "the matrices transposed?)")
        height = rows // len(pieces)
        for expert in range(experts):
            for i, piece in enumerate(pieces):
                matrix = fused.rows(expert, i * height, (i + 1) * height)
                yield f"{prefix}{expert}.{piece}.weight", SourceTensor(matrix.shape, matrix.load, matrix)
