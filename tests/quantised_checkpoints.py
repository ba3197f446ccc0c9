"""The same weights stored as released checkpoints store them: FP8 blocks, packed int4, DeepSeek's names, a VL wrapper.

A `Checkpoint` holds what would be stored, the config.json beside it, and `exact`: every weight's float value as a
reader must give it, under canonical Hugging Face names. Methods give a changed copy and can be chained; `write` makes a
folder:

    plain = Checkpoint.read(folder_saved_by_transformers)        # or Checkpoint.of(tensors, config)
    plain.fp8_block().write(out)                                 # DeepSeek-V3 and R1
    plain.fp8_block(ue8m0="F8_E8M0").deepseek_names().write(out) # DeepSeek's own layout, power-of-two scales
    plain.int4_packed().wrapped().write(out)                     # Kimi K2.5
    expected = plain.int4_packed().exact                         # float32 tensors, to compare or to load into a model

Values are dequantised block by block in torch loops. `write` makes three shards with an index; a scale always lies in
another shard than its weight.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FP8_MAX = 448.0  # of float8_e4m3fn
LINEAR = r"\.(?:self_attn|mlp)\.(?:.+\.)?\w+_proj(?:_with_mqa)?\.weight"  # attention, dense and shared FFN, experts
ROUTED = r"\.mlp\.experts\.\d+\.\w+_proj\.weight"
SIDE = re.compile(r".+\.(?:weight_scale_inv|scale|weight_scale|weight_shape)")  # what stands beside a quantised weight

OWN_NAMES = {"embed_tokens": "embed", "lm_head": "head", "input_layernorm": "attn_norm", "q_proj": "wq",
             "post_attention_layernorm": "ffn_norm", "self_attn": "attn", "mlp": "ffn", "q_a_proj": "wq_a",
             "q_a_layernorm": "q_norm", "q_b_proj": "wq_b", "kv_a_proj_with_mqa": "wkv_a", "kv_a_layernorm": "kv_norm",
             "kv_b_proj": "wkv_b", "o_proj": "wo", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3",
             "weight_scale_inv": "scale", "e_score_correction_bias": "bias"}
KIMI_LINEAR_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@dataclass(frozen=True)
class Checkpoint:
    """What a folder would hold (`tensors`, `config`), and the float values it stands for (`exact`)."""

    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    exact: dict[str, torch.Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Checkpoint:
        """Float tensors under canonical names."""
        return cls(dict(tensors), dict(config), dict(tensors))

    @classmethod
    def read(cls, folder: Path) -> Checkpoint:
        """A folder that transformers has saved, one file or several."""
        tensors: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(file)
        return cls.of(tensors, json.loads((folder / "config.json").read_text()))

    def fp8_block(self, block: tuple[int, int] = (128, 128), *, ue8m0: str | None = None,
                  which: str = LINEAR) -> Checkpoint:
        """Weights whose name ends as `which` says in float8_e4m3fn with one `weight_scale_inv` a block, scales float32.

        `ue8m0` makes the scales powers of two, stored as the dtype it names: "F32" or "F8_E8M0". Small models need a
        small `block` to have more than one. `exact` becomes float32 for these weights.
        """
        def quantise(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            codes, scale, values = fp8_block(weight, block, powers=ue8m0 is not None)
            stored = scale.to(torch.float8_e8m0fnu) if ue8m0 == "F8_E8M0" else scale
            return {"weight": codes, "weight_scale_inv": stored}, values

        quantisation: dict[str, Any] = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                        "weight_block_size": list(block)}
        if ue8m0:
            quantisation["scale_fmt"] = "ue8m0"
        return self._quantised(which, quantise, quantisation)

    def int4_packed(self, group: int = 32, *, scale: torch.dtype = torch.bfloat16, which: str = ROUTED) -> Checkpoint:
        """Routed experts (or `which`) in symmetric int4, packed as compressed-tensors does, a scale a `group`.

        Row lengths must be multiples of `group` and of 8. `exact` becomes float32 for these weights.
        """
        def quantise(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            packed, scales, values = int4_packed(weight, group, scale)
            return {"weight_packed": packed, "weight_scale": scales, "weight_shape": torch.tensor(weight.shape)}, values

        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group,
                   "dynamic": False, "actorder": None, "block_structure": None, "observer": "minmax"}
        quantisation = {"quant_method": "compressed-tensors", "format": "pack-quantized", "kv_cache_scheme": None,
                        "quantization_status": "compressed", "ignore": ["lm_head", "re:.*self_attn.*"],
                        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights,
                                                      "input_activations": None, "output_activations": None}}}
        return self._quantised(which, quantise, quantisation)

    def _quantised(self, which: str, quantise: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
                   quantisation: dict[str, Any]) -> Checkpoint:
        tensors, exact = {}, dict(self.exact)
        for name, tensor in self.tensors.items():
            if re.search(which + r"$", name):
                parts, exact[name] = quantise(tensor)
                tensors |= {name.removesuffix("weight") + part: value for part, value in parts.items()}
            else:
                tensors[name] = tensor
        assert len(tensors) > len(self.tensors), "nothing to quantise"
        return Checkpoint(tensors, self.config | {"quantization_config": quantisation}, exact)

    def deepseek_names(self) -> Checkpoint:
        """DeepSeek's own names, as its conversion script writes them."""
        return replace(self, tensors={_components(n.removeprefix("model."), OWN_NAMES): t
                                      for n, t in self.tensors.items()})

    def kimi_linear_names(self) -> Checkpoint:
        """`block_sparse_moe.experts.N.w1` and `block_sparse_moe.gate` in layers that have experts."""
        sparse = {n.split(".mlp.")[0] for n in self.tensors if ".mlp.experts." in n}
        return replace(self, tensors={
            _components(n.replace(".mlp.", ".block_sparse_moe."), KIMI_LINEAR_NAMES if ".experts." in n else {})
            if n.split(".mlp.")[0] in sparse else n: t for n, t in self.tensors.items()})

    def fused_experts(self) -> Checkpoint:
        """Routed experts as `experts.gate_up_proj` [E, 2I, D] and `experts.down_proj` [E, D, I]."""
        tensors = {n: t for n, t in self.tensors.items() if not re.search(ROUTED, n)}
        for prefix in sorted({n.split(".experts.")[0] for n in self.tensors if re.search(ROUTED, n)}):
            count = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in self.tensors
                            if n.startswith(f"{prefix}.experts."))
            gate, up, down = ([self.tensors[f"{prefix}.experts.{e}.{part}_proj.weight"] for e in range(count)]
                              for part in ("gate", "up", "down"))
            tensors[f"{prefix}.experts.gate_up_proj"] = torch.stack(
                [torch.cat(pair) for pair in zip(gate, up, strict=True)])
            tensors[f"{prefix}.experts.down_proj"] = torch.stack(down)
        return replace(self, tensors=tensors)

    def wrapped(self, root: str = "language_model.", *, inner: str = "model.", head: str | None = None,
                model_type: str = "kimi_k25") -> Checkpoint:
        """The text decoder within a vision-language model: `root` + `inner` before its names, config in `text_config`.

        `head` is the prefix of lm_head, by default `root`. A vision tower and a projector stand beside it.
        `root="model.language_model.", inner="", head=""` is the other usual form.
        """
        head = root if head is None else head
        tensors = {head + n if n.startswith("lm_head.") else root + inner + n.removeprefix("model."): t
                   for n, t in self.tensors.items()}
        for name in ("wqkv", "wo"):
            tensors[f"vision_tower.encoder.blocks.0.{name}.weight"] = torch.ones(6, 6)
        tensors["vision_tower.encoder.layers.0.self_attn.q_proj.weight"] = torch.ones(6, 6)
        tensors["mm_projector.linear_1.weight"] = torch.ones(6, 6, dtype=torch.bfloat16)
        config = {"model_type": model_type, "text_config": self.config,
                  "vision_config": {"num_hidden_layers": 1, "hidden_size": 6}}
        return Checkpoint(tensors, config, self.exact)

    def write(self, folder: Path) -> Path:
        """The folder: config.json and three shards with an index, scales in another shard than their weights."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2))
        shards: list[dict[str, torch.Tensor]] = [{}, {}, {}]
        for i, (name, tensor) in enumerate(sorted(self.tensors.items())):
            shards[2 if SIDE.fullmatch(name) else i % 2][name] = tensor.contiguous().clone()
        weight_map = {}
        for i, shard in enumerate(s for s in shards if s):
            file = f"model-{i + 1:05d}-of-{sum(map(bool, shards)):05d}.safetensors"
            save_file(shard, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(shard, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder


def _components(name: str, table: Mapping[str, str]) -> str:
    return ".".join(table.get(part, part) for part in name.split("."))


def fp8_block(weight: torch.Tensor, block: tuple[int, int], powers: bool = False
              ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [rows, columns] in float8_e4m3fn, float32 scales (one a block), and the float32 values they stand for."""
    rows, columns = weight.shape
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    values = torch.empty(rows, columns)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            s = weight[part].float().abs().max().clamp(min=1e-12) / FP8_MAX
            scale[i, j] = torch.exp2(torch.ceil(torch.log2(s))) if powers else s
            codes[part] = (weight[part].float() / scale[i, j]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
            values[part] = codes[part].float() * scale[i, j]
    return codes, scale, values


def int4_packed(weight: torch.Tensor, group: int, dtype: torch.dtype
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes packed in int32 [rows, columns / 8], scales of `dtype` [rows, columns / group], and float32 values."""
    rows, columns = weight.shape
    assert columns % group == 0
    assert columns % 8 == 0
    codes, values = torch.empty(rows, columns, dtype=torch.int64), torch.empty(rows, columns)
    scale = torch.empty(rows, columns // group, dtype=dtype)
    for g in range(columns // group):
        part = slice(g * group, (g + 1) * group)
        scale[:, g] = (weight[:, part].float().abs().amax(1) / 7.5).to(dtype)
        codes[:, part] = torch.round(weight[:, part].float() / scale[:, g, None].float()).clamp(-8, 7).to(torch.int64)
        values[:, part] = codes[:, part].float() * scale[:, g, None].float()
    packed = torch.zeros(rows, columns // 8, dtype=torch.int64)
    for k in range(8):
        packed |= (codes[:, k::8] + 8) << (4 * k)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32), scale, values
