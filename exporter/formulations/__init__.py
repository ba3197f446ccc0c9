"""The attention core in several formulations: identical mathematics, very different memory and speed.

Each formulation is one file with one function and one row of TABLE (docs/architecture.md). Absorbed cores take queries
already multiplied by W_UK, [B, T*H, R], and return the mixed latent, [B, T*H, d_c]. Expanded ones rebuild K and V from
the rows and return [B, H, T, v].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from exporter.config import MLAConfig
from exporter.formulations import (
    attention,
    expanded,
    expanded_attention,
    fused,
    kqt,
    kqt_blocks,
    kqt_groups,
    kqt_half,
    qkt,
)
from exporter.formulations.common import CoreInputs, heads_at_once
from exporter.graph import GraphBuilder

TARGETS = ("ort", "trt", "trt-rtx")
_TRT = ("trt", "trt-rtx")
_HALF = ("fp16", "bf16")
_ALL = ("fp32", "fp16", "bf16")
WIDE, QUANTISED = "wide", "quantised"  # caches: in the compute dtype, in 8 bits
_BOTH = ("prefill", "decode")


@dataclass(frozen=True)
class Formulation:
    """One row: how a core is called, where it goes, and why one would want it.

    `graphs`: cache -> kinds of graph that may have it. `serves_both`: whether its prefill graph decodes well enough for
    one engine to do both. `row_multiple`: what a host should let divide S in its decode graph, which is then fastest.
    `operator`: needs an operator that its runtime does not have, and is written where that was asked for.
    """

    name: str
    prefill_form: str
    build: Callable[[GraphBuilder, CoreInputs], str]
    dtypes: dict[str, tuple[str, ...]]  # target -> compute dtypes that it can take
    about: str
    default_on: tuple[str, ...] = ()  # targets whose sessions take it unless told otherwise
    fits: Callable[[MLAConfig, str], bool] = lambda config, target: True
    graphs: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {WIDE: _BOTH, QUANTISED: _BOTH})
    serves_both: bool = False
    heads: Callable[[MLAConfig], int] = lambda config: config.num_attention_heads  # that go together in a product
    row_multiple: Callable[[MLAConfig, str], int] = lambda config, target: 1
    operator: bool = False

    def kinds(self, quantised: bool) -> tuple[str, ...]:
        """Kinds of graph, over a cache in 8 bits or a wide one, that it is for."""
        return self.graphs.get(QUANTISED if quantised else WIDE, ())


TABLE = (
    Formulation("kqt-blocks", "absorbed", kqt_blocks.build, dict.fromkeys(_TRT, _ALL),
                "past @ q^T block by block of rows, one softmax over all: the lean prefill, and the lean decode over a "
                "quantised cache, which it never holds in 16 bits", default_on=_TRT, serves_both=True,
                graphs={WIDE: ("prefill",), QUANTISED: _BOTH}),
    Formulation("kqt", "absorbed", kqt.build, dict.fromkeys(TARGETS, _ALL),
                "past @ q^T, softmax over the rows axis: the lean form for TensorRT", default_on=_TRT,
                serves_both=True),
    Formulation("kqt-half", "absorbed", kqt_half.build, dict.fromkeys(_TRT, _HALF),
                "the same with its softmax in 16 bits: a leaner decode step", graphs={WIDE: ("decode",)}),
    Formulation("kqt-groups", "absorbed", kqt_groups.build, dict.fromkeys(_TRT, _ALL),
                "the same, a few heads at a time: lean where heads are many and rows few", graphs={WIDE: ("prefill",)},
                fits=kqt_groups.fits, heads=heads_at_once),
    Formulation("qkt", "absorbed", qkt.build, dict.fromkeys(TARGETS, _ALL),
                "q @ k^T, softmax over the last axis: the fast form for ONNX Runtime", default_on=("ort",),
                serves_both=True, row_multiple=qkt.row_multiple),
    Formulation("fused", "absorbed", fused.build, {"ort": ("fp32",)},
                "the project's own operator: one pass over the cache, in a library to be compiled",
                graphs={WIDE: ("decode",)}, operator=True),
    Formulation("attention", "absorbed", attention.build, {"ort": _ALL},
                "the standard Attention operator, heads as rows over one latent head"),
    Formulation("expanded-attention", "expanded", expanded_attention.build,
                {"ort": _ALL, "trt": _HALF, "trt-rtx": _HALF},
                "K and V rebuilt from the latent, the fused Attention operator", default_on=_TRT,
                fits=expanded_attention.fits, heads=heads_at_once),
    Formulation("expanded", "expanded", expanded.build, dict.fromkeys(TARGETS, _ALL),
                "K and V rebuilt from the latent, plain products", default_on=("ort",)),
)
BY_NAME = {f.name: f for f in TABLE}


def refused(name: str, target: str, dtype: str) -> str | None:
    """Why a target's graphs cannot be of a formulation at a dtype; None if they can."""
    takes = BY_NAME[name].dtypes.get(target, ())
    return None if dtype in takes else f"{target} does not take {name}" + (f" in {dtype}" if takes else "")


def choose(config: MLAConfig, *, target: str, dtype: str, prefill_form: str, kind: str, quantised: bool = False,
           operator: bool = False) -> list[Formulation]:
    """Every formulation of `prefill_form` that `target` takes at `dtype` for this shape, kind and cache, its default
    first: with `operator` one that needs an operator, where there is one."""
    taken = [f for f in TABLE if f.prefill_form == prefill_form and kind in f.kinds(quantised)
             and dtype in f.dtypes.get(target, ()) and f.fits(config, target) and (operator or not f.operator)]
    return sorted(taken, key=lambda f: (not f.operator, target not in f.default_on))
