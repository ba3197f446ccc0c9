"""The rung of transformers: the same checkpoint and tokens through its own classes in float32, eager, where it can.

It shows that the float64 reference means what the family's own code means. Sequences are short (no angle is beyond
position 64), so transformers' float32 angles do not matter.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from engines.measure import available_memory
from exporter.decoder_config import DecoderConfig
from exporter.manifest import Export
from validate.ladder import Ladder, ModelRung, Progress
from validate.metrics import Tolerance, compare
from validate.model_traces import Told
from validate.peers import AbsentError, installed
from validate.references.decoder_tensors import canonical_name, wrapper_prefix
from validate.references.rope import inverse_frequencies

SAME_AS = {"kimi_k2": "deepseek_v3"}  # model types that transformers knows under another name
CLASSES = {"mistral4": "Mistral4ForCausalLM"}  # those in no automatic mapping


def climb(made: Export, decoder: DecoderConfig, told: Sequence[Told], ladder: Ladder, tolerance: Tolerance,
          progress: Progress) -> None:
    """Add the rung `transformers`, or the reason why there is none."""
    from validate.model_parity import top1_and_kl

    try:
        progress("transformers, float32")
        near = [t for t in told if t.past is None]
        found = logits(made, decoder, np.stack([t.inputs for t in near]))
    except AbsentError as error:
        ladder.skip(f"transformers: not run: {error}")
        return
    except Exception as error:
        ladder.rungs.append(ModelRung.broken("transformers", None, made, error))
        return
    sure = np.stack([~t.unsure for t in near])
    ours, expected = found[sure], np.stack([t.outputs for t in near])[sure]
    if not len(ours):
        ladder.skip("transformers: not run: a router could turn at every token")
        return
    top1, kl = top1_and_kl(ours, expected)
    excluded = int((~sure).sum())
    places = [(int(b), int(t)) for b, t in np.argwhere(sure)]
    ladder.rungs.append(ModelRung.of(
        "transformers", None, made, compare(ours, expected).placed(("sequence", "token", "column"), places), tolerance,
        tokens=len(ours), excluded=excluded, top1=top1,
        kl=kl, note=f"transformers {installed('transformers')}, float32, against the float64 reference"))


def logits(made: Export, decoder: DecoderConfig, ids: np.ndarray) -> np.ndarray:
    """transformers' logits [B, T, V] of ids [B, T]; AbsentError with the reason where it cannot answer."""
    source = made.data["source"]
    if list(made.data["layers"]) != [0, decoder.layers]:
        raise AbsentError("it runs whole models, and this export is a slice")
    if source["kind"] != "checkpoint":
        raise AbsentError("a preset has no checkpoint for it to load")
    if not decoder.attention.latent_norm:
        raise AbsentError("it has no class for MLA without latent norms (TransMLA)")
    model = _load(Path(source["path"]), int(made.data["source_parameters"]))
    if decoder.attention.rope.rope_type == "longrope":
        _fix_angles(model, *inverse_frequencies(decoder.attention, made.max_context))
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(ids), use_cache=False).logits.float().numpy()
    return found


def _load(folder: Path, parameters: int) -> Any:
    """The text model of a checkpoint folder, wrappers and renamed model types included."""
    try:
        import transformers
    except ImportError as error:
        raise AbsentError(f"{error.name} is not installed (pip install -e '.[test]')") from None
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = dict(raw.get("text_config") or raw.get("language_config") or raw)
    kind = str(text.get("model_type")).lower()
    kind = text["model_type"] = SAME_AS.get(kind, kind)
    known: Any = transformers
    config_class = known.CONFIG_MAPPING[kind] if kind in known.CONFIG_MAPPING else None  # noqa: SIM401  (raises)
    model_class: Any = getattr(known, CLASSES[kind], None) if kind in CLASSES else (
        known.MODEL_FOR_CAUSAL_LM_MAPPING.get(config_class, None) if config_class else None)
    if config_class is None or model_class is None:
        raise AbsentError(f"transformers {installed('transformers')} has no causal language model {kind!r}")
    files = sorted(folder.glob("*.safetensors"))
    # the checkpoint's tensors and the float32 model are in memory together
    needed, free = 4 * parameters + sum(f.stat().st_size for f in files), available_memory()
    if needed > 0.8 * free:
        raise AbsentError(f"it needs about {needed >> 20} MiB in float32, {free >> 20} MiB are free")
    stored = {name: tensor for path in files for name, tensor in load_file(path).items()}
    prefix = wrapper_prefix(stored, folder)
    tensors = {canonical_name(n, prefix): t for n, t in stored.items() if n.startswith((prefix, "lm_head."))}
    quiet: Any = transformers.utils.logging
    before = quiet.get_verbosity()
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    try:
        config = config_class.from_dict(text)
        config._attn_implementation = "eager"
        model = model_class.from_pretrained(None, config=config, state_dict=tensors, dtype=torch.float32).float().eval()
    finally:
        quiet.set_verbosity(before)
        quiet.enable_progress_bar()
    for part in model.modules():  # every module that looks a config up finds eager there
        own: Any = getattr(part, "config", None)
        if hasattr(own, "_experts_implementation_internal"):
            own._attn_implementation_internal = own._experts_implementation_internal = "eager"
    return model


def _fix_angles(model: Any, inv_freq: torch.Tensor, factor: float) -> None:
    """longrope's factor set as the export fixed it; transformers takes the set of the longest position of a call."""
    def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[..., None].double() * inv_freq
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)

    model.model.rotary_emb.forward = forward
