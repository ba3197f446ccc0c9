"""What an export holds: graphs per target, contract signatures, names, metadata, one weight file, its price."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from safetensors import safe_open

from exporter.config import MLAConfig
from exporter.errors import InputError
from exporter.export import ExportRequest, arguments, export
from exporter.formulations import TABLE, choose
from exporter.manifest import Export, open_export
from exporter.presets import PRESETS
from exporter.signature import signature
from exporter.weights import folding_price

_ORT = (["qkt", "kqt", "attention"], ["expanded", "expanded-attention"], ["qkt", "kqt", "attention"])
_HALF = (["kqt-blocks", "kqt", "kqt-groups", "qkt"], ["expanded-attention", "expanded"], ["kqt", "kqt-half", "qkt"])
EXPECTED = {  # (target, dtype) -> formulations of an absorbed prefill, an expanded prefill, decode; the default first
    ("ort", "fp32"): _ORT, ("ort", "fp16"): _ORT,
    ("trt", "fp32"): (["kqt-blocks", "kqt", "kqt-groups", "qkt"], ["expanded"], ["kqt", "qkt"]),
    ("trt-rtx", "bf16"): _HALF, ("trt-rtx", "fp16"): _HALF,
}


def make(tmp_path: Path, model: str = "article", **options: object) -> Export:
    return export(ExportRequest(model, tmp_path / "out", max_context=64, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "dtype"), EXPECTED)
@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
def test_every_formulation_of_the_target_is_written(tmp_path: Path, target: str, dtype: str, prefill: str) -> None:
    made = make(tmp_path, target=target, dtype=dtype, prefill=prefill)
    absorbed, expanded, decode = EXPECTED[target, dtype]
    by_kind = {kind: [g.formulation for g in made.graphs if g.kind == kind] for kind in ("prefill", "decode")}
    assert by_kind == {"prefill": expanded if prefill == "expanded" else absorbed, "decode": decode}
    defaults = [(g.kind, g.formulation) for g in made.graphs if g.default]
    assert defaults == [("prefill", by_kind["prefill"][0]), ("decode", decode[0])]
    assert all(g.file == f"{g.kind}.{g.formulation}.onnx" and (made.folder / g.file).stat().st_size < 150_000
               for g in made.graphs)


@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
def test_graphs_keep_the_contract(tmp_path: Path, cache: str) -> None:
    made = make(tmp_path, cache=cache, dtype="fp16")
    R, D = made.config.row_dim, made.config.hidden_size
    past = {"append": ("past_latent.0", ["B", "S", R]), "concat": ("past_latent.0", ["B", "S", R]),
            "scatter": ("latent_cache.0", ["B", 1, 64, R])}[cache]
    new = {"append": ("new_latent.0", ["B", "T", R]), "concat": ("present_latent.0", ["B", "S+T", R]),
           "scatter": ("latent_cache_out.0", ["B", 1, 64, R])}[cache]
    for graph in made.graphs:
        model = onnx.load(made.folder / graph.file, load_external_data=False)
        found = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
                 for v in (*model.graph.input, *model.graph.output)}
        assert found == {"hidden_states": ["B", "T", D], "past_lengths": ["B"], past[0]: past[1],
                         "attn_output": ["B", "T", D], new[0]: new[1]}
        assert [(t.name, list(t.shape)) for t in (*graph.inputs, *graph.outputs)] == list(found.items())
        types = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
        assert types.pop("past_lengths") == onnx.TensorProto.INT64
        assert set(types.values()) == {onnx.TensorProto.FLOAT16}


def test_graph_file_tells_what_it_is(tmp_path: Path) -> None:
    made = make(tmp_path)
    for graph in made.graphs:
        path = made.folder / graph.file
        onnx.checker.check_model(str(path), full_check=True)
        model = onnx.load(path, load_external_data=False)
        assert [(o.domain, o.version) for o in model.opset_import] == [("", 24)]
        meta = {p.key: p.value for p in model.metadata_props}
        assert (meta["mla.kind"], meta["mla.formulation"], meta["mla.cache"]) == (
            graph.kind,
            graph.formulation,
            "append",
        )
        assert MLAConfig.from_dict(json.loads(meta["mla.config"])) == made.config
        names = [n.name for n in model.graph.node]
        assert len(set(names)) == len(names)
        assert {"row/kv_a_proj", "query/absorb_w_uk", "output/absorb_w_uv", "output/o_proj"} <= set(names)
        read = {i for n in model.graph.node for i in n.input} | {o.name for o in model.graph.output}
        assert {i.name for i in model.graph.initializer} | {i.name for i in model.graph.input} <= read, "unused"
        shaped = {v.name for v in model.graph.value_info}
        assert all(o in shaped or o in read for n in model.graph.node for o in n.output)


def test_one_weight_file_that_any_reader_opens(tmp_path: Path) -> None:
    made = make(tmp_path, dtype="bf16", prefill="expanded")
    with safe_open(made.folder / "weights.safetensors", framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    used: set[str] = set()
    for graph in made.graphs:
        model = onnx.load(made.folder / graph.file, load_external_data=False)
        for i in model.graph.initializer:
            if i.external_data:
                entries = {e.key: e.value for e in i.external_data}
                assert entries["location"] == "weights.safetensors"
                used.add(re.sub(r"(\.heads)?(\.\d+_\d+)?$", "", i.name))  # views: all heads, or some of them
    assert used == set(shapes)
    H, c = made.config.num_attention_heads, made.config
    assert shapes["w_uk"] == (H, c.qk_nope_head_dim, c.kv_lora_rank)
    assert shapes["w_uv"] == (H, c.kv_lora_rank, c.v_head_dim)


def test_no_tensor_of_expanded_width_in_absorbed_graphs(tmp_path: Path) -> None:
    """Nothing of size S x H x (nope or v) may exist: K and V are never rebuilt."""
    from engines.interpreter import Interpreter

    made = make(tmp_path)
    c, S = made.config, 50021  # a prime: no other dimension produces it
    limit = S * c.num_attention_heads * min(c.qk_nope_head_dim, c.v_head_dim)
    for graph in made.graphs:
        sizes = {t.name: t.elements for t in Interpreter(made.folder / graph.file).shapes({"B": 1, "T": 1, "S": S})}
        assert max(sizes.values()) < limit, max(sizes, key=lambda n: sizes[n])


@pytest.mark.parametrize(("name", "factored", "folded"), [("deepseek-v3", (33.6, 125.8), (100.7, 469.8)),
                                                         ("deepseek-v2-lite", (5.2, 5.2), (16.8, 16.8))])
def test_price_of_folding(name: str, factored: tuple[float, float], folded: tuple[float, float]) -> None:
    price = folding_price(PRESETS[name])
    assert [round(price[f"{side}_factored"] / 1e6, 1) for side in ("query", "output")] == list(factored)
    assert [round(price[f"{side}_folded"] / 1e6, 1) for side in ("query", "output")] == list(folded)


@pytest.mark.parametrize("name", PRESETS)
def test_folded_price_is_what_a_folded_export_holds(narrow: list[str], tmp_path: Path, name: str) -> None:
    made = make(tmp_path, model=f"narrow-{name}", absorb="folded")
    held, price = made.data["weights"]["parameters"], made.data["folding_price"]
    assert held["q_folded.weight"] == price["query_folded"]
    assert held["o_folded.weight"] == price["output_folded"]
    assert "w_uk" not in held


def test_the_softmax_scale_is_never_an_operator_on_scores(tmp_path: Path) -> None:
    made = make(tmp_path, model="article")
    for graph in made.graphs:
        model = onnx.load(made.folder / graph.file, load_external_data=False)
        assert not [n.name for n in model.graph.node if n.op_type in ("Mul", "Div") and n.name.startswith("core/")]


def test_bidirectional_has_no_cache(tmp_path: Path) -> None:
    made = make(tmp_path, causal=False)
    assert made.cache == "none"
    assert {g.kind for g in made.graphs} == {"prefill"}
    assert [[t.name for t in side] for side in (made.graphs[0].inputs, made.graphs[0].outputs)] == [
        ["hidden_states"], ["attn_output"]]


def test_manifest_remembers_how_it_was_made(tmp_path: Path) -> None:
    made = make(tmp_path, dtype="fp16", merge_q=True, causal=False, seed=7)
    assert made.data["source"] == {"kind": "preset", "name": "article", "seed": 7}
    assert made.data["arguments"] == [
        "article",
        "--dtype",
        "fp16",
        "--causal",
        "off",
        "--merge-q",
        "--max-context",
        "64",
        "--seed",
        "7",
    ]
    assert arguments(ExportRequest("deepseek-v3", tmp_path)) == ["deepseek-v3"]


def test_same_request_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        export(ExportRequest("article", tmp_path / name, max_context=64))
    files = sorted(p.name for p in (tmp_path / "a").iterdir() if p.name != "manifest.json")
    assert files
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_seed_changes_weights(tmp_path: Path) -> None:
    a, b = (export(ExportRequest("article", tmp_path / str(s), max_context=64, seed=s)) for s in (0, 1))
    assert (a.folder / "weights.safetensors").read_bytes() != (b.folder / "weights.safetensors").read_bytes()


def test_unknown_cache_form() -> None:
    with pytest.raises(InputError, match="cache form 'paged' is unknown; expected one of append, scatter, concat"):
        signature(PRESETS["article"], cache="paged", dtype="fp32", max_context=8)


def test_table_is_complete() -> None:
    assert len({f.name for f in TABLE}) == len(TABLE)
    for target, dtype, quantised in product(("ort", "trt", "trt-rtx"), ("fp32", "fp16", "bf16"), (False, True)):
        for kind, form in (("prefill", "absorbed"), ("prefill", "expanded"), ("decode", "absorbed")):
            first = choose(PRESETS["deepseek-v3"], target=target, dtype=dtype, prefill_form=form, kind=kind,
                           quantised=quantised)[0]
            assert target in first.default_on or (dtype, form) == ("fp32", "expanded"), (first.name, target, kind)


def test_weights_scale_is_exact_in_float64(tmp_path: Path) -> None:
    """W_UK in the file is the source's times the scale, rounded once."""
    from exporter.rope import softmax_scale
    from exporter.source import open_source

    made = make(tmp_path, model="article")
    source = open_source("article")
    uk = source.tensors["up_proj_k.weight"].load().astype(np.float64)
    with safe_open(made.folder / "weights.safetensors", framework="np") as file:
        stored = file.get_tensor("w_uk")
    assert np.array_equal(stored.reshape(uk.shape), (uk * softmax_scale(made.config)).astype(np.float32))
    assert open_export(made.folder).data["softmax_scale"] == softmax_scale(made.config)
