"""The activation memory that TensorRT-RTX's builder will report for a graph, predicted without building it.

The builder fuses masks, casts and the softmax into a few score-sized buffers, copies the cache where a product wants it
transposed, and gives its products workspace. What a step needs is the largest of its phases, and each phase is a sum
over a few tensors: two copies of the cache beside the scores while `q @ k^T` runs, then one cache beside the scores
and their float32 exponentials. `tensors` names these tensors and their bytes; `coefficients.json` says how many of each
a phase holds, fitted on builds (`make predictor`, engines/calibrate.py) of the one version that it names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.dtypes import DTYPES
from exporter.formulations import BY_NAME
from exporter.formulations.expanded_attention import head_size
from exporter.formulations.kqt_blocks import BLOCKS
from exporter.manifest import Export, GraphEntry
from exporter.moe_graph import DENSE_GROUP
from exporter.signature import NO_CACHE

WORKSPACE = 8 << 20  # what a matrix product may take beside its operands
FEW_LAYERS = 5
FEW = 8  # new tokens of a decode step
AROUND = "model"  # the group of what stands around the attentions
Phase = Mapping[str, float]


@dataclass(frozen=True)
class Subject:
    """A graph at its profile's maximum: `batch` sequences, `tokens` new tokens each, `rows` of past offered.

    `decoder` None: one attention alone. `layers` is the slice of the decoder, `experts` the form of its MoE ("" where
    every FFN is dense), `last_only`: whether the last layer's FFN and the head see each sequence's last token only.
    `quantised`: over a cache in 8 bits. `codes`: projections are products over quantised weights.
    """

    config: MLAConfig
    dtype: str
    cache: str
    formulation: str
    batch: int
    tokens: int
    rows: int
    decoder: DecoderConfig | None = None
    layers: range = range(1)
    experts: str = ""
    last_only: bool = True
    quantised: bool = False
    codes: bool = False

    @property
    def itemsize(self) -> int:
        """Bytes of one number in the compute dtype."""
        return DTYPES[self.dtype].itemsize

    @property
    def attended(self) -> int:
        """Rows that each query meets: the past offered and the new ones, or all of a preallocated cache."""
        return self.rows if self.cache == "scatter" else self.rows + self.tokens

    @property
    def group(self) -> str:
        """Which coefficients its attention takes."""
        c, form = self.config, self.formulation
        if form == "expanded" and c.qk_head_dim == c.v_head_dim and self.itemsize == 2 and head_size(c) <= 256:
            form = "expanded-fused"  # equal head sizes: the builder finds an attention in the plain products
        return f"{form}/{'quantised' if self.quantised else self.cache}/{8 * self.itemsize}"


@dataclass(frozen=True)
class Prediction:
    """`bytes` of activation; `parts`, the tensors of the largest phase that make it up; `known` says of which builder
    the coefficients are, `builds` on how many they were fitted."""

    bytes: int
    parts: dict[str, int]
    known: str
    builds: int


def tensors(s: Subject) -> dict[str, float]:
    """Bytes of the attention tensors that phases are made of."""
    c, w, n, N = s.config, s.itemsize, s.attended, s.batch * s.tokens
    H, qk, v = c.num_attention_heads, c.qk_head_dim, c.v_head_dim
    together = BY_NAME[s.formulation].heads(c)
    # one new token is another program than several: its products are of vectors, and a softmax may run in place
    scores = "scores of a step" if s.tokens == 1 else "scores"
    named: dict[str, float] = {
        "workspace": WORKSPACE, scores: N * together * s.rows * w, "new scores": N * together * (n - s.rows) * w,
        "cache": s.batch * n * c.row_dim * w, "query heads": N * H * (qk + v) * w,
        "tokens": N * (c.hidden_size + (c.q_lora_rank or 0) + c.row_dim) * w}
    if N == 1:  # products of a vector take workspace of their own
        named["second workspace"] = WORKSPACE
    if s.formulation == "expanded-attention":  # a few heads at a time
        rows = s.batch * together * n * w
        return named | {"keys": rows * qk, "values": rows * v, "padded": rows * head_size(c), "mask": N * n * w}
    if s.formulation == "expanded":
        rows = s.batch * H * n * w
        return named | {"keys": rows * qk, "values": rows * v, "mask": N * n}
    named["query rows"] = N * H * c.row_dim * w
    if s.formulation == "kqt-blocks":  # a block of rows at a time, what they give and their scores in float32
        m = -(-s.rows // BLOCKS)
        del named[scores]
        return named | {"block": s.batch * m * c.row_dim * w, "scores of a block": N * H * m * 4,
                        "mixed": N * H * c.kv_lora_rank * 4}
    return named if together == H else named | {"rows of a group": N * together * c.row_dim * w}


def model_tensors(s: Subject, attention: float) -> dict[str, float]:
    """Bytes of what stands around the attentions of a model; `attention` is the predicted activation of one."""
    d, w, N = s.decoder, s.itemsize, s.batch * s.tokens
    assert d is not None
    D = d.attention.hidden_size
    named = {"attention": attention, "workspace": WORKSPACE, "residual": N * D * w,
             "inner": N * d.intermediate_size * w}
    if w == 4:
        named["float32 workspace"] = WORKSPACE
    others = len(s.layers) * d.attentions_per_layer - 1
    past = others * s.batch * s.rows * s.config.row_dim * w
    if s.cache == "append" and s.formulation == "qkt":
        # the past is there from the start, so the builder transposes all layers' at once and holds the copies; in a
        # prefill only where layers are few
        name = "copies of the other caches" if s.tokens == 1 else "other caches"
        named[name] = past if s.tokens == 1 or others < FEW_LAYERS else 0
    elif s.cache == "append" and s.formulation == "expanded":
        named["other caches"] = past
    elif s.formulation == "expanded-attention":
        named["masks of the other layers"] = others * N * s.attended * w
    form = BY_NAME[s.formulation]
    if others and s.cache != "append" and form.prefill_form == "absorbed":
        named["shared mask"] = N * form.heads(s.config) * s.attended
    if s.layers.stop == d.layers:
        named["logits"] = (s.batch if s.last_only else N) * d.vocab_size * w
    if not s.experts or d.moe is None:
        return named
    sparse = [layer for layer in s.layers if layer in d.sparse_layers]
    # in a decoder's last layer only the last tokens go on
    M = s.batch if s.last_only and sparse == [d.layers - 1] else N
    inner = d.moe.moe_intermediate_size
    named["expert workspace"] = WORKSPACE
    if s.experts == "gather":
        return named | {"gathered": M * inner * D * w}
    group = min(DENSE_GROUP, d.moe.n_routed_experts) * M * w
    return named | {"expert inner": group * inner, "expert out": group * D}


def largest_tensor(s: Subject) -> tuple[str, int]:
    """The tensor that the lint would refuse first, with its elements."""
    c, n, N = s.config, s.attended, s.batch * s.tokens
    heads = BY_NAME[s.formulation].heads(c)
    found = {"past_latent": s.batch * s.rows * (c.kv_lora_rank if s.quantised else c.row_dim)}
    if s.formulation != "expanded-attention":
        found["scores"] = N * heads * (-(-s.rows // BLOCKS) if s.formulation == "kqt-blocks" else n)
    if s.formulation.startswith("expanded"):
        found["keys and values"] = s.batch * heads * n * max(c.qk_nope_head_dim + c.v_head_dim, head_size(c))
        found["mask"] = N * n
    return max(found.items(), key=lambda item: item[1])


@lru_cache
def coefficients() -> dict[str, Any]:
    """The fitted coefficients that lie beside this file."""
    data: dict[str, Any] = json.loads((files("engines") / "coefficients.json").read_text(encoding="utf-8"))
    return data


def release(version: str) -> str:
    """A version without its build number: 1.7.1.116 is 1.7.1."""
    return ".".join(version.split(".")[:3])


def known(backend: str, version: str | None, data: Mapping[str, Any] | None = None) -> str:
    """What to say beside a prediction for `backend` at `version`: "" where the coefficients are of exactly that."""
    data = data or coefficients()
    if backend == data["backend"] and (version is None or release(version) == data["version"]):
        return ""
    return f"predicted with coefficients of tensorrt-rtx {data['version']}"


def _largest(phases: Sequence[Phase], named: Mapping[str, float]) -> dict[str, int]:
    """The parts of the phase that needs most."""
    made = [{name: round(count * named.get(name, 0)) for name, count in phase.items()} for phase in phases]
    return max(made, key=lambda parts: sum(parts.values()))


def predict(s: Subject, backend: str = "trt-rtx", version: str | None = None,
            data: Mapping[str, Any] | None = None) -> Prediction | None:
    """The builder's `Total Activation Memory` for a subject; None where no builds of its kind were fitted."""
    data = data or coefficients()
    groups, said = data["groups"], known(backend, version, data)
    group = groups.get(s.group)
    if group is None:
        return None
    parts, builds = _largest(group["phases"], tensors(s)), group["builds"]
    if s.codes and s.batch > 1 and s.tokens <= FEW:  # seen in builds of one attention; many tokens hide it
        parts["workspace of products over codes"] = WORKSPACE
    if s.decoder is not None:
        around = groups.get(AROUND)
        if around is None:
            return None
        outer = _largest(around["phases"], model_tensors(s, sum(parts.values())))
        share = outer.pop("attention", 0) / max(1, sum(parts.values()))
        parts = {name: round(share * size) for name, size in parts.items()} if share else {}
        for name, size in outer.items():
            parts[name] = parts.get(name, 0) + size
        builds += around["builds"]
    return Prediction(sum(parts.values()), {name: size for name, size in parts.items() if size}, said, builds)


def subject_of(export: Export, graph: GraphEntry, sizes: Mapping[str, int]) -> Subject:
    """The subject that a graph of an export is at `sizes` (B, T, S)."""
    cache = "concat" if export.cache == NO_CACHE else export.cache  # no past: its rows are the new ones
    rows = export.max_context if export.cache == "scatter" else sizes.get("S", 0)
    one = Subject(export.config, export.dtype, cache, graph.formulation, sizes["B"], sizes["T"], rows,
                  quantised=export.quantised_cache, codes=bool(export.data["weights"].get("quantised")))
    if export.contract != "model":
        return one
    experts = (export.data.get("experts") or {}).get("forms", {}).get(graph.name) or ""
    return Subject(**{**vars(one), "decoder": export.decoder, "layers": range(*export.data["layers"]),
                      "experts": experts, "last_only": export.data.get("logits") != "all"})


def predicted(export: Export, graph: GraphEntry, sizes: Mapping[str, int], backend: str = "trt-rtx",
              version: str | None = None) -> Prediction | None:
    """`predict` for a graph of an export."""
    return predict(subject_of(export, graph, sizes), backend, version)


def explained(prediction: Prediction, measured: int) -> str:
    """One line: what the prediction is made of, and how far the measurement is off it."""
    from exporter import console

    parts = sorted(prediction.parts.items(), key=lambda item: -item[1])
    told = ", ".join(f"{console.size(size)} {name}" for name, size in parts[:4])
    off = f"measured {100 * (measured / prediction.bytes - 1):+.0f} %" if prediction.bytes else "nothing predicted"
    if measured < 5 * WORKSPACE and abs(measured - prediction.bytes) > 0.15 * measured:
        off += f": at this size workspaces of {console.size(WORKSPACE)}, which come and go, decide"
    return f"predicted {console.size(prediction.bytes)} = {told}; {off}" + (
        f" ({prediction.known})" if prediction.known else "")
