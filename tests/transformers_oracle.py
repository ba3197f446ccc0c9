"""transformers' own answer to a whole model: eager attention and experts, float32, its cache, our angles if wanted.

transformers computes angles in float32, which is off by 7e-5 at position 1000; beyond position 256 a comparison feeds
its rotary embedding cosines and sines of float64 angles, rounded once. Everything else stays transformers' own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch.overrides import TorchFunctionMode

from tests.model_checkpoints import model_class, without_latent_norms

FactorSet = Literal["short", "long"]


def load_model(folder: Path) -> Any:
    """The text model of a checkpoint folder, float32, in eval mode, wrappers and renamed model types included."""
    import transformers

    raw = json.loads((folder / "config.json").read_text())
    text = dict(raw.get("text_config") or raw)
    if text["model_type"] == "kimi_k2":
        text["model_type"] = "deepseek_v3"
    if text["architectures"] == ["LlamaMLAForCausalLM"]:
        text["first_k_dense_replace"] = text["num_hidden_layers"]
    prefix = "language_model." if "text_config" in raw else ""
    tensors = {name.removeprefix(prefix): tensor for path in sorted(folder.glob("*.safetensors"))
               for name, tensor in load_file(path).items() if name.startswith(prefix)}
    config = transformers.CONFIG_MAPPING[text["model_type"]].from_dict(text)
    config._attn_implementation = "eager"
    model = model_class(text["model_type"]).from_pretrained(None, config=config, state_dict=tensors,
                                                            dtype=torch.float32)
    if text.get("qk_latent_layernorm") is False:
        without_latent_norms(model)
    return model


class Oracle:
    """One causal language model of transformers: logits, greedy decoding, cache size, router margin."""

    def __init__(self, source: Path | torch.nn.Module) -> None:
        model: Any = load_model(source) if isinstance(source, Path) else source
        self.model = model.float().eval()
        for part in model.modules():  # every module that looks a config up finds eager there
            config: Any = getattr(part, "config", None)
            if hasattr(config, "_experts_implementation_internal"):
                config._attn_implementation_internal = config._experts_implementation_internal = "eager"
        self.config, self.rotary = model.config, model.model.rotary_emb

    def logits(self, ids: np.ndarray, factor_set: FactorSet | None = None) -> np.ndarray:
        """[B, T, V] float32 of ids [B, T], as transformers computes them.

        longrope takes the set of the longest position of a call; `factor_set` fixes it.
        """
        with self._factors(factor_set):
            return self._forward(torch.from_numpy(ids))

    def logits_with_angles(self, ids: np.ndarray, inv_freq: np.ndarray, factor: float) -> np.ndarray:
        """The same with cos and sin made of `inv_freq` [d_r / 2] in float64, times `factor`."""
        with self._angles(inv_freq, factor):
            return self._forward(torch.from_numpy(ids))

    def greedy(self, ids: Sequence[int] | np.ndarray, n: int, inv_freq: np.ndarray | None = None,
               factor: float | None = None, factor_set: FactorSet | None = None) -> list[int]:
        """`n` tokens after the prompt `ids` [T], token by token through transformers' own cache."""
        steps, cache = torch.tensor(list(map(int, ids)))[None], self._cache()
        chosen: list[int] = []
        with self._rotation(inv_freq, factor, factor_set), torch.no_grad():
            for _ in range(n):
                output = self.model(steps, cache=cache, use_cache=True)
                chosen.append(int(output.logits[0, -1].argmax()))
                steps = torch.tensor([[chosen[-1]]])
        return chosen

    def cached_logits(self, ids: np.ndarray, pieces: Sequence[int], inv_freq: np.ndarray | None = None,
                      factor: float | None = None, factor_set: FactorSet | None = None) -> np.ndarray:
        """[B, T, V] of ids [B, T] fed in `pieces` tokens at a time through transformers' own cache."""
        cache, parts = self._cache(), []
        with self._rotation(inv_freq, factor, factor_set), torch.no_grad():
            for part in torch.split(torch.from_numpy(ids), list(pieces), dim=1):
                parts.append(self.model(part, cache=cache, use_cache=True).logits)
        found: np.ndarray = torch.cat(parts, dim=1).numpy()
        return found

    def cache_bytes_per_token(self) -> int:
        """What one more token costs in transformers' own cache, all layers together."""
        sizes = []
        for tokens in (3, 7):
            cache = self._cache()
            with torch.no_grad():
                self.model(torch.zeros(1, tokens, dtype=torch.int64), cache=cache, use_cache=True)
            sizes.append(sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers))
        each, rest = divmod(sizes[1] - sizes[0], 4)
        assert rest == 0
        return int(each)

    def router_margin(self, ids: np.ndarray, inv_freq: np.ndarray | None = None, factor: float | None = None) -> float:
        """The smallest gap between the last chosen and the first refused score, of experts and of groups, over all
        tokens and MoE layers; inf where nothing is routed. An error beyond it may be a flip rather than a fault."""
        margins = _Margins()
        with self._rotation(inv_freq, factor, None), margins:
            self._forward(torch.from_numpy(ids))
        return min(margins.gaps, default=float("inf"))

    def _cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def _forward(self, ids: torch.Tensor) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self.model(ids, use_cache=False).logits.float().numpy()
        return found

    def _rotation(self, inv_freq: np.ndarray | None, factor: float | None,
                  factor_set: FactorSet | None) -> AbstractContextManager[None]:
        if inv_freq is None:
            return self._factors(factor_set)
        assert factor_set is None
        return self._angles(inv_freq, 1.0 if factor is None else factor)

    @contextmanager
    def _angles(self, inv_freq: np.ndarray, factor: float) -> Iterator[None]:
        """Its rotary embedding replaced by float64 angles, in the form that it has (complex or cos and sin)."""
        is_complex = torch.is_tensor(self.rotary(torch.zeros(1), torch.zeros(1, 1)))

        def forward(x: torch.Tensor, position_ids: torch.Tensor) -> Any:
            angles = position_ids[..., None].double() * torch.from_numpy(inv_freq)
            if is_complex:
                return torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64)
            angles = torch.cat([angles, angles], dim=-1)
            return (angles.cos() * factor).float(), (angles.sin() * factor).float()

        self.rotary.forward = forward
        try:
            yield
        finally:
            del self.rotary.forward

    def _factors(self, factor_set: FactorSet | None) -> AbstractContextManager[None]:
        return nullcontext() if factor_set is None else self._fixed(factor_set)

    @contextmanager
    def _fixed(self, factor_set: FactorSet) -> Iterator[None]:
        """longrope's set fixed: one call past the original context makes the long one, then nothing switches."""
        rotary, kind = self.rotary, self.rotary.rope_type
        assert kind == "longrope"
        original = self.config.rope_parameters["original_max_position_embeddings"]
        rotary(torch.zeros(1), torch.tensor([[original]]))
        with torch.no_grad():
            rotary.inv_freq.copy_(rotary.long_inv_freq if factor_set == "long" else rotary.original_inv_freq)
        rotary.rope_type = "default"
        try:
            yield
        finally:
            rotary.rope_type = kind


class _Margins(TorchFunctionMode):
    """Records, at every `torch.topk` (routers choose by nothing else), the smallest gap at the edge of the choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.topk:
            scores, k = args[0], kwargs["k"]
            if k < scores.shape[-1]:
                ranked = scores.sort(dim=-1, descending=True).values
                self.gaps.append(float((ranked[..., k - 1] - ranked[..., k]).min()))
        return func(*args, **kwargs)
