"""MODEL, whatever it is, as a source: a configuration, lazily loaded tensors, and a record that finds it again.

A `Source` is one attention, a `ModelSource` a whole decoder. A preset draws its tensors from a seed, a Hugging Face
folder maps them from safetensors, the article's layer comes from its state_dict. No pickle is read unless asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from exporter.checkpoint import (
    PICKLES,
    attention_of,
    has_weights,
    open_checkpoint,
    read_config,
    sha256,
    slice_of,
    stamp,
)
from exporter.config import MLAConfig, RopeParameters
from exporter.decoder_config import DecoderConfig, tensor_shapes
from exporter.errors import InputError
from exporter.families import IGNORED_TENSORS, config_from_hf, decoder_from_hf, family_of
from exporter.presets import PRESETS, hot_tensor, preset_config, preset_decoder, source_shapes
from exporter.safetensors_file import SourceTensor, read_header


@dataclass(frozen=True)
class Source:
    """One attention's source. `record` goes into the manifest: parity goes back to it, never to exported weights."""

    name: str
    config: MLAConfig
    tensors: Mapping[str, SourceTensor]
    record: dict[str, Any]


@dataclass(frozen=True)
class ModelSource:
    """A whole decoder's source in canonical names (exporter/layouts.py): `attentions` by their prefix, with the tensors
    of each under its own names, and all `others` under full names."""

    name: str
    decoder: DecoderConfig
    attentions: Mapping[str, Mapping[str, SourceTensor]]
    others: Mapping[str, SourceTensor]
    record: dict[str, Any]

    def attention(self, scope: str) -> Source:
        """One attention as a source of its own; `scope` is its canonical prefix."""
        tensors = self.attentions.get(scope, {})
        _require_attention(tensors, self.name, scope)
        return Source(f"{self.name} {scope.rstrip('.')}", self.decoder.attention, tensors, {})


def _model_source(name: str, decoder: DecoderConfig, tensors: Mapping[str, SourceTensor], record: dict[str, Any],
                  ) -> ModelSource:
    attentions = {scope: dict[str, SourceTensor]() for layer in range(decoder.layers)
                  for scope in decoder.attention_scopes(layer)}
    others = {}
    for tensor, found in tensors.items():
        depth = 5 if decoder.shortcut else 4  # model.layers.N.self_attn. or model.layers.N.self_attn.0.
        parts = tensor.split(".", depth)
        scope = ".".join(parts[:depth]) + "."
        if tensor.endswith(IGNORED_TENSORS):
            continue
        if scope in attentions:
            attentions[scope][parts[-1]] = found
        else:
            others[tensor] = found
    return ModelSource(name, decoder, attentions, others, record)


def model_path(model: str) -> Path:
    """MODEL as a path: a config.json stands for its folder; an export is no source."""
    path = Path(model)
    if path.name == "config.json" and path.is_file():
        path = path.parent
    if (path / "manifest.json").is_file():
        raise InputError(f"{model}: an export, made from a MODEL before; expected the checkpoint, preset or "
                         "state_dict that it was made from")
    return path


def open_source(model: str, *, layer: int | None = None, seed: int = 0, allow_pickle: bool = False) -> Source:
    """Resolve MODEL: a preset name, a checkpoint folder, or a state_dict file of the article's layer."""
    path = model_path(model)
    if path.is_dir():
        return _checkpoint(path, layer or 0)
    if path.is_file():
        if layer not in (None, 0):
            raise InputError(f"--layer {layer} given for {path.name}; a state_dict holds one layer, leave --layer out")
        return _article(path, allow_pickle)
    if model not in PRESETS and ("/" in model or path.suffix):  # `glm-4.7-flash` has no suffix
        raise InputError(f"MODEL {model!r} does not exist; expected a checkpoint folder, a state_dict file or a preset")
    config = preset_config(model)
    if layer is not None and not 0 <= layer < config.num_hidden_layers:
        raise InputError(f"--layer {layer} is out of range; {model} has layers 0 to {config.num_hidden_layers - 1}")
    return seeded_source(model, config, seed)


def seeded_source(name: str, config: MLAConfig, seed: int) -> Source:
    """Hot seeded weights of any configuration, under a preset's name."""
    tensors = {tensor: SourceTensor(shape, partial(hot_tensor, tensor, shape, seed))
               for tensor, shape in source_shapes(config).items()}
    return Source(name, config, tensors, {"kind": "preset", "name": name, "seed": seed})


def reopen(record: Mapping[str, Any]) -> Source:
    """The source that a manifest's `source` record names."""
    if record["kind"] == "preset":
        return open_source(record["name"], seed=record["seed"])
    return open_source(record["path"], layer=record.get("layer"), allow_pickle=bool(record.get("pickle")))


def _checkpoint(folder: Path, layer: int) -> Source:
    """One attention of a checkpoint. `layer` counts attentions: LongCat has two per decoder layer."""
    raw = read_config(folder)
    where = str(folder / "config.json")
    config, family = config_from_hf(raw, where), family_of(raw, where)
    each = 2 if family.shortcut else 1
    if not 0 <= layer < each * config.num_hidden_layers:
        raise InputError(f"--layer {layer} is out of range; {folder.name} has layers 0 to "
                         f"{each * config.num_hidden_layers - 1}")
    checkpoint = open_checkpoint(folder, attention_of(layer // each))
    scope = f"model.layers.{layer // each}.self_attn." + (f"{layer % each}." if family.shortcut else "")
    tensors = _scoped(checkpoint.tensors, scope)
    _require_attention(tensors, str(folder), scope)
    if family.layer_only:
        tensors = {n: t for n, t in tensors.items() if not n.startswith("indexer.")}
    return Source(f"{folder.name} layer {layer}", config, tensors, checkpoint.record(layer=layer))


def _scoped(tensors: Mapping[str, SourceTensor], scope: str) -> dict[str, SourceTensor]:
    return {name.removeprefix(scope): t for name, t in tensors.items()
            if name.startswith(scope) and name.removeprefix(scope) not in IGNORED_TENSORS}


def _require_attention(tensors: Mapping[str, SourceTensor], where: str, scope: str) -> None:
    """The projection that makes an attention MLA is there; else what is, by its look."""
    if "kv_a_proj_with_mqa.weight" in tensors:
        return
    found = f" (present: {', '.join(sorted(tensors))})" if tensors else ""
    if any(name.startswith(("W_k_r", "W_down_k", "W_down_v")) for name in tensors):
        found = " (this is MHA2MLA: one rotary key per KV head, not MLA's shared one)"
    raise InputError(f"{where}: no tensor {scope}kv_a_proj_with_mqa.weight; expected an MLA attention there{found}")


def open_model(model: str, *, seed: int = 0, weights: bool = True,
               layers: Callable[[int], range] = range) -> ModelSource:
    """Resolve MODEL as a whole decoder: a checkpoint folder, or a preset (hot seeded weights in its published shape).

    Without `weights`, and for a folder that holds only a config.json, the tensors are known by shape alone. `layers`
    chooses a slice of the depth: the shards of the rest need not be there.
    """
    path = model_path(model)
    if path.is_dir():
        raw, where = read_config(path), str(path / "config.json")
        decoder = decoder_from_hf(raw, where)
        chosen = layers(decoder.layers)
        wanted = "" if len(chosen) == decoder.layers else slice_of(chosen, decoder.layers)
        checkpoint = open_checkpoint(path, wanted, weights and has_weights(path))
        tensors: Mapping[str, SourceTensor] = checkpoint.tensors
        router = family_of(raw, where).router
        if decoder.moe and router and router.bias_optional and checkpoint.files and not any(
                name.endswith("e_score_correction_bias") for name in tensors):
            decoder = replace(decoder, moe=replace(decoder.moe, choice_bias=False))
        if not checkpoint.files:
            if weights:
                raise InputError(f"{path}: config.json alone, no weights; expected model.safetensors or its shards (or "
                                 "--weights none, for the graphs alone)")
            tensors = {name: SourceTensor(shape, partial(_absent, path.name, name))
                       for name, shape in tensor_shapes(decoder).items()}
        return _model_source(path.name, decoder, tensors, checkpoint.record(scope="model"))
    if path.is_file() or model == "article":
        raise InputError(f"{model}: one attention, not a whole model; export it with --scope layer")
    if model not in PRESETS and ("/" in model or path.suffix):
        raise InputError(f"MODEL {model!r} does not exist; expected a checkpoint folder or a preset")
    decoder = preset_decoder(model)
    tensors = {name: SourceTensor(shape, partial(hot_tensor, name, shape, seed))
               for name, shape in tensor_shapes(decoder).items()}
    return _model_source(model, decoder, tensors, {"kind": "preset", "scope": "model", "name": model, "seed": seed})


def _absent(folder: str, name: str) -> np.ndarray:
    raise InputError(f"{folder}: holds no weights, so there is no {name}; expected model.safetensors or its shards")


def _article_config(shapes: Mapping[str, tuple[int, ...]], where: Path) -> MLAConfig:
    """The article's MLAConfig from the tensor shapes; its scale divides by sqrt(d_model / heads + rope_head_dim)."""
    try:
        (d_c, hidden), rope = shapes["down_proj_kv.weight"], shapes["proj_kr.weight"][0]
        heads = shapes["proj_qr.weight"][0] // rope
        if shapes["proj_qr.weight"][0] % rope or shapes["up_proj_k.weight"][0] % heads or (
                shapes["up_proj_v.weight"][0] % heads):
            raise InputError(f"{where.name}: proj_qr {list(shapes['proj_qr.weight'])} must be rope_head_dim x heads, "
                             f"with rope_head_dim {rope} from proj_kr, and the heads must divide the other projections")
        positions = shapes.get("rope_q.cos_cached", shapes.get("rope_k.cos_cached", (512,)))
        return MLAConfig(
            model_type="article", hidden_size=hidden, num_attention_heads=heads, kv_lora_rank=d_c,
            q_lora_rank=shapes["down_proj_q.weight"][0], qk_nope_head_dim=shapes["up_proj_k.weight"][0] // heads,
            qk_rope_head_dim=rope, v_head_dim=shapes["up_proj_v.weight"][0] // heads, rope=RopeParameters(),
            max_position_embeddings=max(positions), rope_layout="half", latent_norm=False,
            query_rope_from_hidden=True, softmax_scale=(hidden // heads + rope) ** -0.5)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise InputError(f"{where.name}: not a state_dict of the article's MLALayer ({error} is missing or misshapen); "
                         "expected down_proj_kv, up_proj_k, up_proj_v, down_proj_q, up_proj_q, proj_qr, proj_kr, fc"
                         ) from None


def _check_article_rope(tensors: Mapping[str, SourceTensor], config: MLAConfig, where: Path) -> None:
    """Rotary buffers are not exported, the graph has its own tables: those of another base would silently be lost."""
    d_r, theta = config.qk_rope_head_dim, config.rope.rope_theta
    expected = theta ** (-np.arange(0, d_r, 2) / d_r)
    for name in ("rope_q.inv_freq", "rope_k.inv_freq"):
        if name in tensors:
            found = tensors[name].load().astype(np.float64)
            if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-2, atol=1e-6):
                raise InputError(f"{where.name}: {name} {list(found.shape)} is not the article's RoPE; expected "
                                 f"{theta:.0f}^(-2i / {d_r}) for {d_r} rotary columns (is this another layer?)")


def _article(path: Path, allow_pickle: bool) -> Source:
    if (path.parent / "config.json").is_file():
        raise InputError(f"{path}: a file of a checkpoint; expected its folder, {path.parent}")
    if path.suffix in PICKLES:
        if not allow_pickle:
            raise InputError(
                f"{path.name} is a pickle; expected .safetensors (or pass --allow-pickle for weights you trust)"
            )
        tensors = _pickled(path)
    else:
        tensors = {name: SourceTensor(t.shape, t.load) for name, t in read_header(path).items()}
    config = _article_config({name: t.shape for name, t in tensors.items()}, path)
    _check_article_rope(tensors, config, path)
    kept = {name: t for name, t in tensors.items() if not name.startswith(("rope_q.", "rope_k."))}
    record = {"kind": "article", "path": str(path.resolve()), "pickle": path.suffix in PICKLES,
              "files": [stamp(path) | {"sha256": sha256(path)}]}
    return Source(path.name, config, kept, record)


def _pickled(path: Path) -> dict[str, SourceTensor]:
    import torch  # heavy, and only here

    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{path.name}: torch.load(weights_only=True) refused it "
                         f"({type(error).__name__}: {str(error).partition(chr(10))[0]})") from None
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, torch.Tensor)
                                              for n, t in state.items()):
        raise InputError(f"{path.name}: expected a plain state_dict (name -> tensor)")
    for name, t in state.items():
        if not t.is_floating_point() or t.layout != torch.strided:
            raise InputError(f"{path.name}: tensor {name} is {t.dtype}, {t.layout}; expected dense floating-point "
                             "tensors")
    return {name: SourceTensor(tuple(t.shape), partial(_as_float32, t)) for name, t in state.items()}


def _as_float32(tensor: Any) -> np.ndarray:
    array: np.ndarray = tensor.detach().float().numpy()
    return array
