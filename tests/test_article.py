"""The article's layer, exported from its own state_dict and run in ONNX Runtime, is what the article describes.

`MLALayer` below is written from the article's text alone. Its biases are hot, so that each of them is seen to arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from engines.session import Session
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, GraphEntry
from exporter.rope import softmax_scale
from tests.checkpoints import article_state_dict
from validate.memory import article_case
from validate.metrics import TOLERANCES, compare
from validate.parity import verdict

REL = TOLERANCES["fp32"].rel
BROKEN = 1e-2  # what a fault must exceed: far from any rounding
LINEARS = ("down_proj_kv", "up_proj_k", "up_proj_v", "down_proj_q", "up_proj_q", "proj_qr", "proj_kr", "fc")
SMALL = {"d_model": 96, "down_dim": 24, "up_dim": 40, "rope_head_dim": 10, "max_len": 64}
FORMULATIONS = {"absorbed": {"qkt", "kqt", "attention"}, "expanded": {"expanded", "expanded-attention"}}
Made = Callable[..., Export]


class RotaryEmbedding(nn.Module):
    """Rotate-half RoPE, base 10000, its tables as buffers."""

    def __init__(self, dim: int, max_len: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, dim, 2) / dim))
        for name in ("cos_cached", "sin_cached"):
            self.register_buffer(name, torch.zeros(max_len, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, heads, S, dim]; angles in float64, because the state_dict's tables hold float32's."""
        dim = x.shape[-1]
        inv_freq = 1.0 / 10000 ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), inv_freq).repeat(1, 2)  # [S, dim]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-second, first], dim=-1) * angles.sin()


class MLALayer(nn.Module):
    """The article's layer, its parameter names and its mathematics; float64."""

    def __init__(self, d_model: int = 512, down_dim: int = 128, up_dim: int = 256, num_heads: int = 8,
                 rope_head_dim: int = 26, max_len: int = 512) -> None:
        super().__init__()
        self.num_heads, self.rope_head_dim = num_heads, rope_head_dim
        self.head_dim = d_model // num_heads  # in the scale only: a head's content is up_dim // num_heads wide
        self.down_proj_kv = nn.Linear(d_model, down_dim)
        self.up_proj_k, self.up_proj_v = nn.Linear(down_dim, up_dim), nn.Linear(down_dim, up_dim)
        self.down_proj_q, self.up_proj_q = nn.Linear(d_model, down_dim), nn.Linear(down_dim, up_dim)
        self.proj_qr = nn.Linear(d_model, rope_head_dim * num_heads)
        self.proj_kr = nn.Linear(d_model, rope_head_dim)
        self.rope_q, self.rope_k = (RotaryEmbedding(rope_head_dim, max_len) for _ in range(2))
        self.fc = nn.Linear(up_dim, d_model)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)  # [B, H, S, width]

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """[B, S, d_model] under a mask [B, S, S] of ones and zeros."""
        c_kv = self.down_proj_kv(x)
        k_c, v = self._heads(self.up_proj_k(c_kv)), self._heads(self.up_proj_v(c_kv))
        q_c = self._heads(self.up_proj_q(self.down_proj_q(x)))
        q_r = self.rope_q(self._heads(self.proj_qr(x)))
        k_r = self.rope_k(self.proj_kr(x).unsqueeze(1)).expand(-1, self.num_heads, -1, -1)
        q, k = torch.cat([q_c, q_r], dim=-1), torch.cat([k_c, k_r], dim=-1)
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim + self.rope_head_dim)
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, -1e9)
        mixed = torch.softmax(scores, dim=-1) @ v
        output: torch.Tensor = self.fc(mixed.transpose(1, 2).flatten(2))
        return output


def layer_of(state: dict[str, torch.Tensor], **dims: int) -> MLALayer:
    """The transcription holding a state_dict: strict, so that every name and shape is the article's."""
    layer = MLALayer(**dims)
    layer.load_state_dict(state, strict=True)
    return layer.double().eval()


def answer(layer: MLALayer, hidden: np.ndarray, causal: bool) -> np.ndarray:
    ones = torch.ones(len(hidden), hidden.shape[1], hidden.shape[1])  # the demo's mask
    with torch.no_grad():
        output: np.ndarray = layer(torch.from_numpy(hidden).double(), ones.tril() if causal else ones).numpy()
    return output


def draw(*shape: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def open_ort(made: Export, graph: GraphEntry) -> Session:
    return OrtSession(made, graph, OrtOptions(threads=1))


def run(made: Export, graph: GraphEntry, hidden: np.ndarray) -> np.ndarray:
    """One call from an empty past."""
    cache = LatentCache(made, len(hidden), hidden.shape[1] if made.cache == "append" else None)
    with open_ort(made, graph) as session:
        return session.infer({"hidden_states": hidden, **cache.feed()})["attn_output"]


@pytest.fixture(scope="module")
def layer() -> MLALayer:
    return layer_of(article_state_dict())


@pytest.fixture(scope="module")
def layer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("article") / "layer.safetensors"
    save_file(article_state_dict(), file)
    return file


@pytest.fixture(scope="module")
def make(layer_file: Path) -> Made:
    """Exports of the layer by their options, each made once."""
    exports: dict[tuple[tuple[str, Any], ...], Export] = {}

    def made(**options: Any) -> Export:
        key = tuple(sorted(options.items()))
        if key not in exports:
            out = layer_file.parent / f"export-{len(exports)}"
            exports[key] = export(ExportRequest(str(layer_file), out, max_context=512, **options))
        return exports[key]

    return made


@pytest.fixture(scope="module")
def demo(layer: MLALayer) -> dict[bool, tuple[np.ndarray, np.ndarray]]:
    """Input and the article's answer, by causality: the demo's [4, 256, 512] as it is, a shorter one under a mask."""
    hidden = {False: draw(4, 256, 512), True: draw(2, 65, 512)}
    return {causal: (x, answer(layer, x, causal)) for causal, x in hidden.items()}


# --- Parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize(("merge", "absorb", "prefill"),
                         list(product([False, True], ["factored", "folded"], ["absorbed", "expanded"])))
def test_every_graph_agrees(make: Made, demo: dict[bool, tuple[np.ndarray, np.ndarray]], merge: bool, absorb: str,
                            prefill: str, causal: bool) -> None:
    made = make(merge_q=merge, absorb=absorb, prefill=prefill, causal=causal)
    graphs = {kind: {g.formulation for g in made.graphs if g.kind == kind} for kind in ("prefill", "decode")}
    assert graphs == {"prefill": FORMULATIONS[prefill], "decode": FORMULATIONS["absorbed"] if causal else set()}
    hidden, expected = demo[causal]
    for graph in made.graphs:
        found = run(made, graph, hidden)
        assert found.shape == hidden.shape
        assert compare(found, expected).rel <= REL, graph.name


@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
@pytest.mark.parametrize(("merge", "absorb"), [(False, "factored"), (True, "folded")])
def test_decode_token_by_token(make: Made, layer: MLALayer, merge: bool, absorb: str, cache: str) -> None:
    made = make(merge_q=merge, absorb=absorb, cache=cache)
    hidden = draw(2, 24, 512, seed=2)
    expected = answer(layer, hidden, causal=True)
    for graph in (g for g in made.graphs if g.kind == "decode"):
        rows, steps = LatentCache(made, 2, 24 if cache == "append" else None), []
        with open_ort(made, graph) as session:
            for token in np.split(hidden, hidden.shape[1], axis=1):
                outputs = session.infer({"hidden_states": np.ascontiguousarray(token), **rows.feed()})
                rows.commit(outputs, 1)
                steps.append(outputs["attn_output"])
        assert rows.lengths.tolist() == [24, 24]
        assert compare(np.concatenate(steps, axis=1), expected).rel <= REL, graph.name
        latent = layer.down_proj_kv(torch.from_numpy(hidden).double())  # bias included, no norm, no RoPE
        assert compare(rows.rows.reshape(2, -1, 154)[:, :24, :128], latent.detach().numpy()).rel <= REL, graph.name


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_pickled_state_dict(make: Made, demo: dict[bool, tuple[np.ndarray, np.ndarray]], tmp_path: Path,
                            causal: bool) -> None:
    torch.save(article_state_dict(), tmp_path / "layer.pt")
    made = export(ExportRequest(str(tmp_path / "layer.pt"), tmp_path / "x", causal=causal, allow_pickle=True))
    hidden, expected = demo[causal]
    assert compare(run(made, made.graph("prefill"), hidden), expected).rel <= REL
    weights = [e.folder / "weights.safetensors" for e in (made, make(causal=causal))]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.parametrize("heads", [1, 2, 4, 5, 8])  # 96 // 5 = 19: the article's floor division, in the scale only
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_sizes_follow_from_the_shapes(tmp_path: Path, heads: int, causal: bool) -> None:
    state = article_state_dict(3, num_heads=heads, **SMALL)
    save_file(state, tmp_path / "layer.safetensors")
    made = export(ExportRequest(str(tmp_path / "layer.safetensors"), tmp_path / "x", causal=causal))
    c = made.config
    assert (c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim) == (heads, 40 // heads, 40 // heads)
    assert (c.hidden_size, c.kv_lora_rank, c.q_lora_rank, c.qk_rope_head_dim) == (96, 24, 24, 10)
    assert softmax_scale(c) == pytest.approx((96 // heads + 10) ** -0.5, rel=1e-12)
    hidden = draw(2, 40, 96)
    expected = answer(layer_of(state, num_heads=heads, **SMALL), hidden, causal)
    for graph in made.graphs:
        assert compare(run(made, graph, hidden), expected).rel <= REL, graph.name


@pytest.mark.parametrize("module", ["rope_q", "rope_k"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_rotary_buffers_of_another_base_are_refused(tmp_path: Path, suffix: str, module: str) -> None:
    """The graph computes its own angles, so what the buffers say must be the same; stored in bfloat16 it still is."""
    def export_with(inv_freq: torch.Tensor, name: str) -> Export:
        state, file = article_state_dict() | {f"{module}.inv_freq": inv_freq}, tmp_path / f"{name}.{suffix}"
        save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
        return export(ExportRequest(str(file), tmp_path / name, allow_pickle=True))

    exponents = torch.arange(0, 26, 2) / 26
    export_with((10000.0 ** -exponents).bfloat16(), "rounded")
    for name, inv_freq in (("base", 500000.0 ** -exponents), ("nan", torch.full((13,), math.nan)),
                           ("width", 10000.0 ** -exponents[:12])):
        with pytest.raises(InputError, match=rf"{module}.inv_freq \[\d+\] is not the article's RoPE; expected 10000\^"):
            export_with(inv_freq, name)


# --- The tests above can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("name", LINEARS)
def test_every_bias_counts(make: Made, name: str, causal: bool) -> None:
    """Without one bias the transcription leaves the export behind; without up_proj_k's it is the same function."""
    state, hidden = article_state_dict(), draw(2, 48, 512, seed=4)
    assert state[f"{name}.bias"].std() > 0.4
    whole = answer(layer_of(state), hidden, causal)
    without = answer(layer_of(state | {f"{name}.bias": torch.zeros_like(state[f"{name}.bias"])}), hidden, causal)
    made = make(causal=causal)
    found = run(made, made.graph("prefill"), hidden)
    if name == "up_proj_k":  # adds q . b to all scores of a query alike, and softmax drops it
        assert compare(without, whole).rel <= 1e-10
        assert compare(found, without).rel <= REL
    else:
        assert compare(found, without).rel > BROKEN


def _scale_of_the_real_width(layer: MLALayer) -> None:
    layer.head_dim = 32


def _rope_swapped(layer: MLALayer) -> None:
    layer.rope_k.forward = lambda x: x  # type: ignore[method-assign]


def _halves_swapped(layer: MLALayer) -> None:
    order = torch.arange(26).reshape(2, 13).T.flatten()
    for name, rows in (("proj_qr", torch.cat([order + 26 * h for h in range(8)])), ("proj_kr", order)):
        linear = getattr(layer, name)
        linear.weight.data, linear.bias.data = linear.weight.data[rows], linear.bias.data[rows]


def _heads_swapped(layer: MLALayer) -> None:
    layer.fc.weight.data = layer.fc.weight.data.roll(32, dims=1)


@pytest.mark.parametrize("fault", [_scale_of_the_real_width, _rope_swapped, _halves_swapped, _heads_swapped])
def test_a_wrong_transcription_disagrees(make: Made, demo: dict[bool, tuple[np.ndarray, np.ndarray]],
                                         fault: Callable[[MLALayer], None]) -> None:
    layer, hidden = layer_of(article_state_dict()), demo[True][0]
    made = make()
    found = run(made, made.graph("prefill"), hidden)
    assert compare(found, answer(layer, hidden, causal=True)).rel <= REL
    assert compare(found, answer(layer, hidden, causal=False)).rel > BROKEN
    fault(layer)
    assert compare(found, answer(layer, hidden, causal=True)).rel > BROKEN


# --- The article's own figures ----------------------------------------------------------------------------------------


def test_memory_figures() -> None:
    case = article_case()
    assert (f"{case['mha_gib']:.2f}", f"{case['latent_gib']:.2f}") == ("16.00", "1.00")
    assert case["latent_and_rope_gib"] == 1.125
    assert (f"{case['ratio']:.1f}", f"{case['ratio_with_rope']:.1f}") == ("16.0", "14.2")


@pytest.mark.parametrize(("cosine", "word"), [
    (1.0, "sound"), (0.95, "sound"), (math.nextafter(0.95, 0), "weak"), (0.9, "weak"),
    (math.nextafter(0.9, 0), "unsound"), (0.0, "unsound"), (-1.0, "unsound"), (math.nan, "unsound")])
def test_verdict(cosine: float, word: str) -> None:
    assert verdict(cosine).split()[0] == word
    assert ("raise d_c" in verdict(cosine)) == (word == "unsound")
