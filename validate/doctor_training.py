"""What a training step of one attention holds, with and without the query's low rank: computed, and measured.

Weights, gradients and AdamW's states follow from the parameters. Activations are what autograd keeps for the backward
pass of the layer as it is trained (K and V expanded, no cache): counted from the graph that torch records, every
storage once, parameters left out. The formula beside says which tensors those are.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from exporter.config import MLAConfig
from exporter.decoder_config import attention_shapes
from exporter.errors import InputError
from validate.references.rope import Rope, softmax_scale

REAL = 1 << 33  # multiply-adds up to which a float32 layer is run, forward and backward; torch's CPU takes minutes in
# 16 bits. Otherwise the graph is recorded over tensors without memory, which keeps the same
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KEPT = ("everything", "up-projections recomputed", "layer recomputed")


@dataclass(frozen=True)
class Held:
    """Bytes of one attention in a training step. `activations` by what is kept: autograd's choice, everything behind
    the two low ranks recomputed (as DeepSeek trains), or the layer's input alone; `measured` the same, counted."""

    query: str
    parameters: int
    weights: int
    gradients: int
    optimiser: int
    activations: dict[str, int]
    measured: dict[str, int]
    really_run: bool

    @property
    def fixed(self) -> int:
        """What does not grow with tokens."""
        return self.weights + self.gradients + self.optimiser


@dataclass(frozen=True)
class TrainingStep:
    """One attention with the query's low rank and without it. `rank` is the configuration's, or one proposed."""

    model: str
    layers: int
    batch: int
    tokens: int
    dtype: str
    rank: int
    proposed: bool
    with_rank: Held
    without: Held
    inference: str

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def training_step(model: str, config: MLAConfig, *, batch: int, tokens: int, dtype: str) -> TrainingStep:
    """Both, at `batch` sequences of `tokens` tokens. InputError for sizes that are none."""
    if batch < 1 or tokens < 1:
        raise InputError(f"--batch {batch}, --tokens {tokens}: expected at least 1")
    if dtype not in DTYPES:
        raise InputError(f"--dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    rank = config.q_lora_rank or min(3 * config.kv_lora_rank, config.hidden_size)  # 1536 : 512, as in DeepSeek-V2
    compressed, plain = replace(config, q_lora_rank=rank), replace(config, q_lora_rank=None)
    return TrainingStep(model, config.num_hidden_layers, batch, tokens, dtype, rank, config.q_lora_rank is None,
                        _held(compressed, batch, tokens, dtype), _held(plain, batch, tokens, dtype),
                        _at_inference(config))


def _at_inference(config: MLAConfig) -> str:
    if config.q_lora_rank is None:
        return "the query has no low rank, so nothing is to be switched off"
    if config.latent_norm:
        return ("the low rank stays at inference: a norm stands between its halves, so that no single matrix equals "
                "them; it also reads fewer bytes a step")
    return "the low rank may be switched off at inference: no norm stands between its halves (export --merge-q)"


def _held(c: MLAConfig, batch: int, tokens: int, dtype: str) -> Held:
    shapes = _shapes(c)
    parameters = sum(torch.Size(s).numel() for s in shapes.values())
    width = DTYPES[dtype].itemsize
    real = dtype == "fp32" and parameters * batch * tokens <= REAL
    counted = {kept: _measure(c, shapes, batch, tokens, dtype, kept, real) for kept in KEPT}
    # moments in float32, and float32 weights beside those in 16 bits
    return Held("low rank" if c.q_lora_rank else "one matrix", parameters, parameters * width, parameters * width,
                parameters * (8 + (4 if width == 2 else 0)),
                {kept: activation_bytes(c, batch, tokens, dtype, kept) for kept in KEPT}, counted, real)


def _shapes(c: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of the layer under Hugging Face's names; the article's rotary query has a projection of its own, and
    every projection a bias."""
    shapes = dict(attention_shapes(c))
    if c.query_rope_from_hidden:
        H, last = c.num_attention_heads, "q_proj.weight" if c.q_lora_rank is None else "q_b_proj.weight"
        shapes[last] = (H * c.qk_nope_head_dim, shapes[last][1])
        shapes["q_rope_proj.weight"] = (H * c.qk_rope_head_dim, c.hidden_size)
        shapes |= {n.replace("weight", "bias"): s[:1] for n, s in shapes.items() if len(s) == 2}
    return shapes


def activation_bytes(c: MLAConfig, batch: int, tokens: int, dtype: str, kept: str) -> int:
    """Bytes that autograd keeps of the layer's own tensors, per formula.

    Everything: the input D; of the query its low rank (raw, normed, with its gain, and one number of the norm); of
    the latent the row R, normed, with its gain, one number; Q and K of H (nope + rope), V twice (as it is attended, and
    what was mixed), H T probabilities; the causal mask and two rotary tables once.
    """
    H, e, v = c.num_attention_heads, c.qk_head_dim, c.v_head_dim
    norm = 2 if c.latent_norm else 0
    low = 0 if c.q_lora_rank is None else (1 + norm) * c.q_lora_rank + norm // 2
    row = c.row_dim + norm * c.kv_lora_rank + norm // 2
    width, n = DTYPES[dtype].itemsize, batch * tokens
    if kept == "everything":
        numbers = c.hidden_size + low + row + 2 * H * e + 2 * H * v + H * tokens
        return n * numbers * width + tokens * tokens + 2 * tokens * c.qk_rope_head_dim * width
    if kept == "up-projections recomputed":
        query = c.q_lora_rank or H * (c.qk_nope_head_dim if c.query_rope_from_hidden else e)
        return n * (c.hidden_size + query + c.row_dim + H * v) * width
    return n * c.hidden_size * width


class _Layer:
    """The layer as it is trained; weights are parameters of zeros (bytes do not depend on values)."""

    def __init__(self, c: MLAConfig, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, device: str) -> None:
        self.c = c
        self.w = {n: torch.zeros(s, dtype=dtype, device=device, requires_grad=True) for n, s in shapes.items()}

    def forward(self, x: torch.Tensor, kept: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """[B, T, D] -> [B, T, D], and what a recomputed part keeps as its inputs."""
        if kept == "layer recomputed":
            return checkpoint(self._all, x, use_reentrant=False), [x]
        if kept == "up-projections recomputed":
            low, row = self._down(x)
            mixed = checkpoint(self._attend, low, row, x, use_reentrant=False)
            return self._linear(mixed, "o_proj"), [low, row, x]
        return self._all(x), []

    def _all(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(self._attend(*self._down(x), x), "o_proj")

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, self.w[f"{name}.weight"], self.w.get(f"{name}.bias"))

    def _down(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        query = "q_proj" if self.c.q_lora_rank is None else "q_a_proj"
        return self._linear(x, query), self._linear(x, "kv_a_proj_with_mqa")

    def _attend(self, low: torch.Tensor, row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The two low ranks [B, T, r_q] (or the query itself) and [B, T, R], and the layer's input where the rotary
        query is projected from it -> what was mixed, [B, T, H v]."""
        c, H = self.c, self.c.num_attention_heads
        B, T = row.shape[:2]
        if c.q_lora_rank is not None:
            low = self._linear(self._norm(low, "q_a_layernorm.weight"), "q_b_proj")
        if c.query_rope_from_hidden:
            q_nope, q_rope = (q.view(B, T, H, -1) for q in (low, self._linear(x, "q_rope_proj")))
        else:
            q_nope, q_rope = torch.split(low.view(B, T, H, -1), [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=-1)
        latent, k_rope = torch.split(row, [c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        up = self._linear(self._norm(latent, "kv_a_layernorm.weight"), "kv_b_proj").view(B, T, H, -1)
        k_nope, v = torch.split(up, [c.qk_nope_head_dim, c.v_head_dim], dim=-1)
        cos, sin = self._tables(T, row)
        k_rope = _rotate(k_rope.unsqueeze(2), cos, sin).expand(B, T, H, -1)
        q = torch.cat((q_nope, _rotate(q_rope, cos, sin)), dim=-1).transpose(1, 2).contiguous()  # [B, H, T, e]
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(1, 2).contiguous()
        scores = q @ k.transpose(2, 3) * softmax_scale(c)
        hidden = torch.ones(T, T, dtype=torch.bool, device=row.device).triu(1)
        weights = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
        mixed: torch.Tensor = weights @ v.transpose(1, 2).contiguous()
        return mixed.transpose(1, 2).reshape(B, T, -1)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        if name not in self.w:
            return x
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.c.latent_norm_eps) * self.w[name]

    def _tables(self, tokens: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, d_r]; which columns turn together does not matter here."""
        rope = Rope(self.c, tokens)
        angles = torch.outer(torch.arange(tokens, dtype=torch.float64), rope.inv_freq).repeat(1, 2).unsqueeze(1)
        return tuple(t.to(device=like.device, dtype=like.dtype) for t in (angles.cos(), angles.sin()))  # type: ignore[return-value]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def _measure(c: MLAConfig, shapes: dict[str, tuple[int, ...]], batch: int, tokens: int, dtype: str, kept: str,
             real: bool) -> int:
    """Bytes of the storages that the recorded graph holds, parameters left out; the backward pass is run too."""
    device = "cpu" if real else "meta"
    layer = _Layer(c, shapes, DTYPES[dtype], device)
    x = torch.zeros(batch, tokens, c.hidden_size, dtype=DTYPES[dtype], device=device, requires_grad=True)
    parameters = {_storage(w) for w in layer.w.values()}
    found: dict[int, tuple[int, torch.Tensor]] = {}  # the tensors too: a freed storage's place is used again

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(_storage(tensor), (tensor.untyped_storage().nbytes(), tensor))
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        out, inputs = layer.forward(x, kept)
    for tensor in inputs:  # what a recomputed part starts from is held beside the graph
        note(tensor)
    total = sum(size for place, (size, _) in found.items() if place not in parameters)
    if real:
        torch.autograd.backward(out.sum())
        missing = [n for n, w in layer.w.items() if w.grad is None]
        assert not missing, f"no gradient for {missing}"
    return total


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
