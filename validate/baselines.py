"""What a latent cache is compared with: graphs that expand K and V at every step, and multi-head attention with a full
K/V cache at the same width. Made for measuring memory and time only, never exported.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from exporter import __version__
from exporter.attention_graph import Angles
from exporter.cache_forms import Dims
from exporter.dtypes import DTYPES
from exporter.export import ExportRequest, build_graph, rope_positions
from exporter.formulations import BY_NAME
from exporter.graph import GraphBuilder, infer_and_check
from exporter.manifest import GraphEntry
from exporter.rope import frequencies, softmax_scale, tables
from exporter.signature import TensorSpec
from exporter.source import Source
from exporter.weight_file import PlannedTensor, StoredTensor, write_weights
from exporter.weight_store import WEIGHT_FILE
from exporter.weights import AttentionWeights, load_attention, plain_tensor, plan_rope, plan_weights


@dataclass
class Workbench:
    """A folder with one weight file, in which any registered formulation of a source can be built at any cache form."""

    folder: Path
    source: Source
    dtype: str
    max_context: int
    _weights: AttentionWeights
    _stored: dict[str, StoredTensor]

    @classmethod
    def make(cls, folder: Path, source: Source, dtype: str, max_context: int) -> Workbench:
        """Write the weight file: everything that absorbed and expanded forms need."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = load_attention(source, max_context)
        plan = plan_weights(weights, dtype=dtype, folded=False, expanded=True)
        plan += plan_rope(weights.inv_freq, weights.rope_factor, rope_positions(max_context))
        return cls(
            folder, source, dtype, max_context, weights, write_weights(folder / WEIGHT_FILE, plan, _silent)
        )

    def graph(self, kind: str, formulation: str, cache: str) -> tuple[Path, GraphEntry]:
        """Write one graph; a decode graph of an expanded formulation is the expanding baseline."""
        request = ExportRequest("", self.folder, dtype=self.dtype, cache=cache, max_context=self.max_context)
        entry, model = build_graph(
            request, self._weights, self.max_context, self._stored, kind, BY_NAME[formulation], False
        )
        path = self.folder / f"{cache}.{entry.file}"
        path.write_bytes(infer_and_check(model, self.folder).SerializeToString())
        return path, replace(entry, file=path.name)

    def mha(self, kind: str = "decode") -> tuple[Path, GraphEntry]:
        """The multi-head baseline at the same width, over a weight file of its own."""
        folder = self.folder / "mha"
        folder.mkdir(exist_ok=True)
        return mha_graph(folder, self.source, self.dtype, self.max_context, kind)


def _silent(message: str, share: float | None = None) -> None:
    """No progress to show."""


def _mha_weights(source: Source, dtype: str, max_context: int) -> list[PlannedTensor]:
    c, H, D = source.config, source.config.num_attention_heads, source.config.hidden_size
    rng = np.random.default_rng(0)

    def random(name: str, out: int, columns: int) -> PlannedTensor:
        return PlannedTensor(name, (out, columns), dtype,
                             lambda: rng.standard_normal((out, columns), np.float32) / np.float32(columns**0.5))

    plan = [random("q_proj.weight", H * c.qk_head_dim, D), random("k_proj.weight", H * c.qk_head_dim, D),
            random("v_proj.weight", H * c.v_head_dim, D), random("o_proj.weight", D, H * c.v_head_dim)]
    rope = tables(*frequencies(c, max_context), rope_positions(max_context))
    return plan + [plain_tensor(f"rope.{name}", values, "fp32") for name, values in vars(rope).items()]


def mha_signature(source: Source, dtype: str) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """K is nope + rope wide and V v wide per head, both cached: H (nope + rope + v) numbers per token."""
    c, H = source.config, source.config.num_attention_heads
    hidden = TensorSpec("hidden_states", ("B", "T", c.hidden_size), dtype)
    inputs = (hidden, TensorSpec("past_lengths", ("B",), "int64"),
              TensorSpec("past_key", ("B", H, "S", c.qk_head_dim), dtype),
              TensorSpec("past_value", ("B", H, "S", c.v_head_dim), dtype))
    outputs = (replace(hidden, name="attn_output"), TensorSpec("new_key", ("B", H, "T", c.qk_head_dim), dtype),
               TensorSpec("new_value", ("B", H, "T", c.v_head_dim), dtype))
    return inputs, outputs


def mha_graph(folder: Path, source: Source, dtype: str, max_context: int, kind: str) -> tuple[Path, GraphEntry]:
    """Multi-head attention, append form: past read only, new K and V returned. Weights are random: for measuring."""
    stored = write_weights(folder / WEIGHT_FILE, _mha_weights(source, dtype, max_context), _silent)
    inputs, outputs = mha_signature(source, dtype)
    g = GraphBuilder(DTYPES[dtype], stored)
    _mha_nodes(g, source)
    model = g.model(f"{kind}.mha", inputs, outputs, __version__, {"mla.kind": kind, "mla.formulation": "mha"})
    path = folder / f"{kind}.mha.onnx"
    path.write_bytes(infer_and_check(model, folder).SerializeToString())
    return path, GraphEntry(f"{kind}.mha", kind, "mha", "expanded", False, path.name, inputs, outputs)


def _mha_nodes(g: GraphBuilder, source: Source) -> None:
    c, H = source.config, source.config.num_attention_heads
    batch = g.op("Shape", "hidden_states", name="B", start=0, end=1)
    new = g.op("Shape", "hidden_states", name="T", start=1, end=2)
    past = g.op("Shape", "past_key", name="S", start=2, end=3)
    t = g.op("Range", g.int_scalar(0), g.op("Squeeze", new, name="T0"), g.int_scalar(1), name="t")
    d = Dims(batch, new, past, t, t, "past_lengths")
    tokens = g.op("Reshape", "hidden_states", g.ints(-1, c.hidden_size), name="tokens")
    with g.scope("rope"):
        angles = Angles(g, c, c.rope_layout, softmax_scale(c), d)

    def heads(name: str, width: int) -> str:
        flat = g.op("Gemm", tokens, g.weight(f"{name}.weight"), name=name, transB=1)
        return g.op("Reshape", flat, g.ints(-1, H, width), name=f"{name}_heads")  # [N, H, width]

    def by_head(value: str, name: str, width: int, output: str | None = None) -> str:
        shape = g.op("Concat", batch, new, g.ints(H, width), name=f"{name}_shape", axis=0)
        value = g.op("Reshape", value, shape, name=f"{name}_4d")
        return g.op("Transpose", value, name=f"{name}_by_head", perm=[0, 2, 1, 3], output=output)  # [B, H, T, width]

    def rotated(name: str, scaled: bool) -> str:
        nope, rope = g.ops("Split", heads(name, c.qk_head_dim), g.ints(c.qk_nope_head_dim, c.qk_rope_head_dim),
                           name=f"{name}_split", axis=2, count=2)
        rope = g.op("Reshape", rope, g.ints(-1, H * c.qk_rope_head_dim), name=f"{name}_rope")
        return g.op("Concat", nope, angles.rotate(rope, H, f"{name}_angle", scaled), name=f"{name}_joined", axis=2)

    query = by_head(rotated("q_proj", True), "query", c.qk_head_dim)
    key = by_head(rotated("k_proj", False), "key", c.qk_head_dim, "new_key")
    value = by_head(heads("v_proj", c.v_head_dim), "value", c.v_head_dim, "new_value")
    _mha_attend(g, d, query, (("past", "past_key", "past_value", past), ("new", key, value, new)), source)


def _mha_attend(
    g: GraphBuilder, d: Dims, query: str, parts: tuple[tuple[str, str, str, str], ...], source: Source
) -> None:
    from exporter.cache_forms import append
    from exporter.formulations.common import masked_softmax, total

    c = source.config
    segments = append(g, d, "unused", 0)  # the same rows and masks as the latent cache's append form
    scores = [
        g.op("MatMul", query, g.op("Transpose", k, name=f"{n}_key_columns", perm=[0, 1, 3, 2]), name=f"{n}_scores")
        for n, k, _, _ in parts
    ]
    probs = masked_softmax(g, scores, segments, rows_axis=2, softmax_axis=3, mask_axes=(1,))
    mixed = total(
        g, [g.op("MatMul", p, v, name=f"{n}_mix") for p, (n, _, v, _) in zip(probs, parts, strict=True)], "mix"
    )
    by_token = g.op("Transpose", mixed, name="tokens_first", perm=[0, 2, 1, 3])
    flat = g.op("Reshape", by_token, g.ints(-1, c.num_attention_heads * c.v_head_dim), name="values")
    out = g.op("Gemm", flat, g.weight("o_proj.weight"), name="o_proj", transB=1)
    shape = g.op("Concat", d.B, d.T, g.ints(c.hidden_size), name="output_shape", axis=0)
    g.op("Reshape", out, shape, name="attn_output", output="attn_output")
