"""The absorption audit: no false alarm on our exports, every wrong graph told by its name, other exporters' files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from onnx import helper

from exporter.errors import InputError
from exporter.export import ExportRequest, export
from tests import absorption_graphs as graphs
from tests.absorption_graphs import RIGHT, WRONG, Layer
from tests.conftest import DISTINCT
from tests.model_checkpoints import HEADS, KV_RANK, MODELS, NOPE, ROPE, V, tiny_checkpoint, tiny_model
from validate.__main__ import cli
from validate.absorption import Verdict, audit, judge
from validate.absorption_costs import CONTEXT, Sizes
from validate.faults import FAULTS


def made(make: Any, folder: Path) -> Path:
    layer = Layer()
    make(layer)
    path = layer.save(folder / f"{make.__name__}.onnx")
    onnx.checker.check_model(str(path), full_check=make is not graphs.unknown_operator)
    return path


def codes(verdict: Verdict) -> set[str]:
    return {f.code for f in verdict.findings}


def stripped(path: Path, out: Path) -> Path:
    """A graph that says nothing of itself."""
    model = onnx.load(path, load_external_data=False)
    del model.metadata_props[:]
    onnx.save(model, out)
    return out


def passes(folder: Path) -> list[Verdict]:
    verdicts = audit(folder)
    assert verdicts
    for v in verdicts:
        assert v.passed, (v.graph, v.findings)
        assert not v.notes, v.notes
        absorbed = v.judged == "absorbed"
        assert bool(v.absorbed_at) == absorbed, v
        assert v.costs.absorbed_cache_bytes_per_token == v.costs.cache_bytes_per_token
        if absorbed:  # the mix has all R columns in most forms, d_c in some
            assert v.costs.absorbed_flops_per_row is not None
            assert 1 <= v.costs.flops_per_row / v.costs.absorbed_flops_per_row < 1.6
    return verdicts


# ---- hand-made graphs


@pytest.mark.parametrize("make", RIGHT, ids=lambda m: m.__name__)
def test_right_graphs_of_others(make: Any, tmp_path: Path) -> None:
    verdict = judge(made(make, tmp_path))
    assert verdict.passed, verdict.findings
    assert verdict.absorbed_at == {"W_UK": "uk", "W_UV": "uv"}
    assert (verdict.costs.sizes.heads, verdict.costs.sizes.latent, verdict.costs.sizes.rope) == (4, 16, 6)
    assert verdict.costs.flops_per_row == verdict.costs.absorbed_flops_per_row == 2 * 4 * (16 + 6 + 16)
    size = 1 if make is graphs.absorbed_with_copies else 4
    assert verdict.costs.cache_bytes_per_token == graphs.R * size


@pytest.mark.parametrize("make", WRONG, ids=lambda m: m.__name__)
def test_wrong_graphs(make: Any, tmp_path: Path) -> None:
    expected, words, node = WRONG[make]
    verdict = judge(made(make, tmp_path))
    assert codes(verdict) == expected
    assert any(words in f.text for f in verdict.findings)
    assert not node or any(node in f.nodes for f in verdict.findings), verdict.findings


FIXED = {"batch": 1, "seq": 1, "past": 64}


@pytest.mark.parametrize("make", [m for m in (*RIGHT, *WRONG) if m is not graphs.absorbed_with_copies],
                         ids=lambda m: m.__name__)
def test_all_sizes_fixed(make: Any, tmp_path: Path) -> None:
    """The same verdicts for one sequence, one token, 64 rows: rows are the last axis but one."""
    path = made(make, tmp_path)
    model = onnx.load(path)
    for dim in (d for i in model.graph.input for d in i.type.tensor_type.shape.dim if d.dim_param):
        dim.dim_value = FIXED[dim.dim_param]
    onnx.save(model, path)
    assert codes(judge(path)) == WRONG.get(make, (set(),))[0]


def test_costs_of_expanding(tmp_path: Path) -> None:
    """By hand: two products that expand, scores over nope + rope columns, a mix over v."""
    per_row = 2 * 4 * (16 * 20 + 16 * 12 + 26 + 12)
    found = judge(made(graphs.expanded_each_step, tmp_path)).costs
    assert found.flops_per_row == per_row
    assert found.to_dict()["flops_per_step"] == CONTEXT * per_row
    cached = judge(made(graphs.expanded_cache, tmp_path)).costs
    assert cached.flops_per_row == 2 * 4 * (26 + 12)
    assert cached.sizes == Sizes(4, 16, 6)
    assert (cached.cache_bytes_per_token, cached.absorbed_cache_bytes_per_token) == (4 * 4 * 38, 4 * 22)


def test_dead_nodes_are_no_fault(tmp_path: Path) -> None:
    layer = Layer()
    graphs.absorbed(layer)
    rows = next(n.output[0] for n in layer.nodes if n.op_type == "Concat" and "past_row" in n.input)
    layer.linear(layer.latent_of(rows), "uv_on_rows", graphs.LATENT, graphs.H * graphs.V)
    assert judge(layer.save(tmp_path / "dead.onnx")).passed


def test_an_unknown_operator_beside_the_cache_is_noted(tmp_path: Path) -> None:
    """One that cached rows never pass, at the end: the audit still says that it did not look inside."""
    layer = Layer()
    graphs.absorbed(layer)
    layer.give(layer.op("Sampler", "attn_output", domain="my.kernels", name="sampler"), "sampled")
    verdict = judge(layer.save(tmp_path / "beside.onnx"))
    assert verdict.passed
    (note,) = verdict.notes
    assert note.startswith("cannot see through sampler (my.kernels:Sampler)")


def test_an_unknown_operator_before_the_query_is_a_fault(tmp_path: Path) -> None:
    """Rows never enter it, but what it makes meets them: shapes behind it are unknown."""
    layer = Layer()
    rows = layer.join(layer.cache("past_row", graphs.R), layer.op("Concat", *layer.rows(), axis=-1))
    query = layer.op("FusedQuery", "hidden_states", domain="my.kernels", name="fused_query")
    scores = layer.op("MatMul", query, layer.op("Transpose", layer.one_head(rows), perm=[0, 1, 3, 2]))
    probs = layer.op("Softmax", scores, axis=-1)
    layer.out(layer.up(layer.op("MatMul", probs, layer.one_head(layer.latent_of(rows)))))
    assert "cannot-see-through" in codes(judge(layer.save(tmp_path / "before.onnx")))


def test_local_functions_are_opened(tmp_path: Path) -> None:
    """An expansion inside a function of the file."""
    path = made(graphs.values_expanded, tmp_path)
    model = onnx.load(path)
    body = [helper.make_node("MatMul", ["x", "w"], ["y"], name="inside")]
    function = helper.make_function("local", "Up", ["x", "w"], ["y"], body, [helper.make_opsetid("", 18)])
    node = next(n for n in model.graph.node if n.name == "uv_on_rows")
    node.domain, node.op_type = "local", "Up"
    model.functions.append(function)
    model.opset_import.append(helper.make_opsetid("local", 1))
    onnx.save(model, path)
    assert codes(judge(path)) == {"expanded-each-step"}


# ---- our own exports


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("target", ["ort", "trt-rtx"])
def test_every_family(name: str, target: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", name, layers=2)
    options: dict[str, Any] = {"ort": {}, "trt-rtx": {"dtype": "fp16", "prefill": "expanded"}}[target]
    export(ExportRequest(str(checkpoint), tmp_path / "x", target=target, max_context=64, **options))
    for v in passes(tmp_path / "x"):
        assert v.costs.sizes == Sizes(HEADS, KV_RANK, ROPE, NOPE, V)
        assert v.kind == "prefill" or v.judged == "absorbed"


FORMS: dict[str, dict[str, Any]] = {
    "scatter": {"cache": "scatter", "target": "trt-rtx", "prefill": "expanded"}, "concat": {"cache": "concat"},
    "concat, rtx": {"cache": "concat", "target": "trt-rtx", "dtype": "bf16", "prefill": "expanded"},
    "folded": {"absorb": "folded"}, "folded, scatter": {"absorb": "folded", "cache": "scatter", "target": "trt"},
    "fp8 cache": {"cache_dtype": "fp8", "target": "trt-rtx", "dtype": "fp16"}, "int8 cache": {"cache_dtype": "int8"},
    "fp8 cache, expanded": {"cache_dtype": "fp8", "prefill": "expanded"},
    "fp8 weights": {"quantise": "fp8", "target": "trt-rtx", "dtype": "fp16"}, "int4 weights": {"quantise": "int4"},
    "int4, fp8 cache": {"quantise": "int4", "cache_dtype": "fp8", "target": "trt", "dtype": "bf16"},
    "gather": {"experts": "gather", "target": "trt"}, "dense": {"experts": "dense", "target": "trt"},
    "fused": {"experts": "fused"}, "all logits": {"logits": "all"}, "slice": {"layers": "1:2"},
}


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("v3"), "v3", layers=2)


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, v3: Path, tmp_path: Path) -> None:
    export(ExportRequest(str(v3), tmp_path / "x", max_context=64, **FORMS[form]))
    passes(tmp_path / "x")


@pytest.mark.parametrize("model", DISTINCT)
def test_one_attention_of_every_preset(model: str, narrow: list[str], tmp_path: Path) -> None:
    merged = {"merge_q": True} if model == "article" else {}
    export(ExportRequest(f"narrow-{model}", tmp_path / "x", max_context=128, dtype="fp16", **merged))
    passes(tmp_path / "x")


@pytest.mark.parametrize(("rank", "columns"), [(32, None), (20, 12)])
def test_a_converted_model(rank: int, columns: int | None, tmp_path: Path) -> None:
    """Where no latent norm is, and a rotary key is wide."""
    from exporter.convert import ConvertRequest, convert_checkpoint
    from tests.llama_checkpoints import hot_model, saved

    convert_checkpoint(ConvertRequest(saved(hot_model("qwen2"), tmp_path / "a"), tmp_path / "b", rank, columns, None))
    export(ExportRequest(str(tmp_path / "b"), tmp_path / "x", max_context=64, prefill="expanded"))
    passes(tmp_path / "x")


@pytest.mark.parametrize("target", ["ort", "trt"])
def test_ours_as_if_they_were_not(target: str, v3: Path, tmp_path: Path) -> None:
    """Without metadata: absorbed graphs pass as they are, expanded ones are decode graphs that expand each step."""
    for prefill in ("absorbed", "expanded"):
        made = export(ExportRequest(str(v3), tmp_path / prefill, target=target, dtype="fp16", max_context=64,
                                    prefill=prefill))
        for entry in made.graphs:
            path = stripped(made.folder / entry.file, tmp_path / f"{prefill}.{entry.file}")
            verdict = judge(path)
            if entry.prefill_form == "absorbed":
                assert verdict.passed, (entry.name, verdict.findings)
                assert verdict.costs.sizes.latent == KV_RANK
                continue
            assert codes(verdict) == {"expanded-each-step", "rows-per-head"}
            assert any("keys and values are rebuilt" in f.text and f.attentions == (0, 1) for f in verdict.findings)
            assert judge(path, kind="prefill").passed


def test_a_decode_graph_is_held_against_the_absorbed_form(v3: Path, tmp_path: Path) -> None:
    made = export(ExportRequest(str(v3), tmp_path / "x", max_context=64, prefill="expanded"))
    path = tmp_path / "claimed.onnx"
    model = onnx.load(made.folder / made.graph("prefill").file, load_external_data=False)
    for entry in model.metadata_props:
        entry.value = "decode" if entry.key == "mla.kind" else entry.value
    onnx.save(model, path)
    assert "expanded-each-step" in codes(judge(path))


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
def test_the_ladders_fault(prefill: str, narrow: list[str], tmp_path: Path) -> None:
    """The fault that parity plants in a graph is seen without running it."""
    planted = FAULTS["rope-on-latent"]
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", max_context=64, prefill=prefill),
                  tamper=planted.tamper)
    for v in audit(made.folder):
        assert "rope-on-latent" in codes(v), v.graph


def test_61_layers_in_five_seconds(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "v3-dense", layers=61)
    made = export(ExportRequest(str(checkpoint), tmp_path / "x", target="trt-rtx", dtype="fp16", max_context=64,
                                prefill="expanded"))
    for entry in made.graphs:
        started = time.process_time()
        path = made.folder / entry.file
        verdict = judge(stripped(path, tmp_path / "foreign.onnx") if entry.kind == "prefill" else path)
        assert time.process_time() - started < 5, entry.name
        assert verdict.attentions == 61
        if entry.kind == "decode":
            assert verdict.passed
        else:
            assert len(verdict.findings) == 2
            assert all(f.attentions == tuple(range(61)) and f.where == "0 to 60" for f in verdict.findings)


# ---- other exporters


class _Past:
    """transformers' cache as explicit tensors: past in, past and new together out."""

    def __init__(self, past: Sequence[torch.Tensor]) -> None:
        self.past, self.present = past, list[torch.Tensor]()

    def update(self, latent: torch.Tensor, key: torch.Tensor, layer: int, **_: Any) -> tuple[torch.Tensor, ...]:
        joined = tuple(torch.cat([p, new], 2) for p, new in zip(self.past[2 * layer:], (latent, key), strict=False))
        self.present += joined
        return joined


class _Decoder(torch.nn.Module):
    """transformers' DeepseekV3 of two layers, with its past latents and rotary keys as inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.whole = tiny_model("v3-dense", layers=2)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, latent_0: torch.Tensor,
                rope_0: torch.Tensor, latent_1: torch.Tensor, rope_1: torch.Tensor) -> tuple[torch.Tensor, ...]:
        model, past = self.whole.model, _Past((latent_0, rope_0, latent_1, rope_1))
        hidden = model.embed_tokens(input_ids)
        angles = model.rotary_emb(hidden, position_ids=position_ids)
        for layer in model.layers:
            hidden = hidden + layer.self_attn(layer.input_layernorm(hidden), angles, mask, past)[0]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return (self.whole.lm_head(model.norm(hidden)), *past.present)


@pytest.mark.filterwarnings("ignore")  # of the exporters about themselves
@pytest.mark.parametrize("dynamo", [False, True], ids=["torchscript", "dynamo"])
def test_torch_export_of_transformers(dynamo: bool, tmp_path: Path) -> None:
    """It caches the latent, and expands it at every step."""
    path, caches = tmp_path / "hf.onnx", [f"past_{what}.{i}" for i in range(2) for what in ("latent", "rope")]
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    past = [torch.zeros(2, 1, 7, n) for n in (KV_RANK, ROPE, KV_RANK, ROPE)]
    dims = [{0: "batch", 1: "new"}] * 2 + [{0: "batch", 2: "new", 3: "all"}] + [{0: "batch", 2: "past"}] * 4
    names = ["input_ids", "position_ids", "mask", *caches]
    how: dict[str, Any] = {"dynamic_axes": dict(zip(names, dims, strict=True))}
    if dynamo:
        how = {"dynamic_shapes": [dict.fromkeys(d, torch.export.Dim.AUTO) for d in dims]}
    inputs = (tokens, tokens.clone(), torch.zeros(2, 1, 3, 10), *past)  # one tensor given twice is one input to dynamo
    torch.onnx.export(_Decoder().eval(), inputs, str(path), input_names=names, dynamo=dynamo, opset_version=18,
                      output_names=["logits", *(n.replace("past", "present") for n in caches)], **how)
    verdict = judge(path)
    assert codes(verdict) == {"expanded-each-step", "rows-per-head"}
    assert all(f.attentions == (0, 1) for f in verdict.findings)
    assert verdict.costs.sizes == Sizes(HEADS, KV_RANK, ROPE)
    assert verdict.costs.cache_bytes_per_token == 2 * 4 * (KV_RANK + ROPE)
    assert verdict.costs.flops_per_row == 2 * 2 * HEADS * ((KV_RANK + 1) * (NOPE + V) + ROPE)
    assert judge(path, kind="prefill").passed


def test_mobius(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", "v3-dense", layers=2)
    subprocess.run([sys.executable, "-m", "mobius", "build", "--config", str(checkpoint), "--dtype", "f32",
                    str(tmp_path / "out")], check=True, capture_output=True)
    verdict = judge(tmp_path / "out" / "model.onnx")
    assert codes(verdict) == {"cache-per-head"}
    assert {n for f in verdict.findings for n in f.nodes} == {
        f"past_key_values.{i}.{side}" for i in range(2) for side in ("key", "value")}
    assert verdict.costs.cache_bytes_per_token == 2 * 4 * HEADS * (NOPE + ROPE + V)
    (with_config,) = audit(tmp_path / "out" / "model.onnx", config=checkpoint / "config.json")
    assert with_config.costs.absorbed_cache_bytes_per_token == 2 * 4 * (KV_RANK + ROPE)


# ---- the command


def run(*words: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run([sys.executable, "-m", "validate", "absorption", *words, "--json"], capture_output=True,
                          text=True, cwd=Path(__file__).parent.parent)
    return done.returncode, json.loads(done.stdout)


def test_exit_codes(tmp_path: Path) -> None:
    code, data = run(str(made(graphs.absorbed, tmp_path)))
    assert (code, data["pass"], data["findings"]) == (0, True, [])
    code, data = run(str(made(graphs.values_expanded, tmp_path)))
    assert (code, data["pass"]) == (1, False)
    (finding,) = data["findings"]
    assert finding["graph"] == "values_expanded.onnx"
    assert (finding["code"], finding["nodes"], finding["attentions"]) == ("expanded-each-step", ["uv_on_rows"], [0])
    assert data["graphs"][0]["costs"]["flops_per_step"] > data["graphs"][0]["costs"]["absorbed_flops_per_step"]
    text = tmp_path / "text.onnx"
    text.write_text("no graph")
    code, data = run(str(text))
    assert code == 2
    assert "not an ONNX file" in data["error"]


def test_tables(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["absorption", str(made(graphs.expanded_each_step, tmp_path))])
    assert done.exit_code == 1
    for words in ("expanded_each_step.onnx", "FAIL", "expanded-each-step", "uk_on_rows", "88 B (1.00x)"):
        assert words in done.output


def no_cache(folder: Path) -> Path:
    layer = Layer()
    layer.out(layer.op("Reshape", layer.linear("hidden_states", "v", graphs.D, 48), layer.ints(0, 4, -1, 12)))
    return layer.save(folder / "none.onnx")


def dangling(folder: Path) -> Path:
    path = made(graphs.absorbed, folder)
    model = onnx.load(path)
    model.graph.node.remove(next(n for n in model.graph.node if n.name == "uk"))
    onnx.save(model, path)
    return path


def nothing_in_it(folder: Path) -> Path:
    onnx.save(helper.make_model(helper.make_graph([], "empty", [], [])), folder / "empty.onnx")
    return folder / "empty.onnx"


@pytest.mark.parametrize(("what", "words"), [
    (lambda f: f / "absent.onnx", "no such file"), (lambda f: f, "a folder without manifest.json"),
    (no_cache, "no cache among the inputs hidden_states, position_ids"),
    (dangling, "which nothing before it makes; expected a whole, sorted graph"),
    (nothing_in_it, "no ONNX graph, or one without a node"),
], ids=["absent", "folder", "no cache", "dangling", "empty"])
def test_bad_input(what: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        audit(what(tmp_path))


def test_nodes_that_do_not_fit_are_seen_not_followed(tmp_path: Path) -> None:
    """Broken equations, missing attributes, operands of no use: a finding by node, never a traceback."""
    path = made(graphs.absorbed_scattered, tmp_path)
    blind = set()
    for number, node in enumerate(onnx.load(path).graph.node):
        model = onnx.load(path)
        del model.graph.node[number].attribute[:]
        del model.graph.node[number].input[1:]
        onnx.save(model, tmp_path / "broken.onnx")
        found = judge(tmp_path / "broken.onnx").findings
        if any(f.code == "cannot-see-through" and f.nodes == (node.name,) for f in found):
            blind.add(node.op_type)
    assert blind >= {"MatMul", "Einsum", "ScatterElements", "Concat", "Reshape", "Slice", "Gather", "Add"}


def test_a_bidirectional_export_has_no_cache(narrow: list[str], tmp_path: Path) -> None:
    export(ExportRequest("narrow-article", tmp_path / "x", causal=False, max_context=64))
    with pytest.raises(InputError, match="no cache among the inputs hidden_states"):
        audit(tmp_path / "x")


@pytest.mark.parametrize(("text", "words"), [
    (None, "expected a Hugging Face config.json"), ("[", "not a JSON object"), ("[1]", "not a JSON object"),
    ('{"num_attention_heads": 4}', "no kv_lora_rank"),
    (json.dumps(dict.fromkeys(("num_attention_heads", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim",
                               "v_head_dim"), 0)), "positive whole numbers"),
], ids=["absent", "broken", "list", "other", "zero"])
def test_bad_config(text: str | None, words: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    with pytest.raises(InputError, match=words):
        audit(made(graphs.absorbed, tmp_path), config=config)


def test_config_that_is_another_models(tmp_path: Path) -> None:
    fields = {"num_attention_heads": 4, "kv_lora_rank": 32, "qk_rope_head_dim": 6, "qk_nope_head_dim": 20,
              "v_head_dim": 12}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields}))
    (verdict,) = audit(made(graphs.absorbed, tmp_path), config=tmp_path / "config.json")
    (finding,) = verdict.findings
    assert finding.code == "cache-width"
    assert "22 numbers a row; a latent one holds d_c + d_r = 32 + 6 = 38" in finding.text


def test_kind_that_a_graph_denies(narrow: list[str], tmp_path: Path) -> None:
    made = export(ExportRequest("narrow-deepseek-v3", tmp_path / "x", max_context=64))
    with pytest.raises(InputError, match="says of itself that it is a prefill graph"):
        judge(made.folder / made.graph("prefill").file, kind="decode")


def test_every_finding_is_on_the_page() -> None:
    root = Path(__file__).parent.parent
    known = set(re.findall(r'Finding\("([\w-]+)"', (root / "validate" / "absorption_checks.py").read_text()))
    page = set(re.findall(r"^\| `([\w-]+)` \|", (root / "docs" / "absorption.md").read_text(), re.MULTILINE))
    assert known == page
    assert known - {"cache-width"} == set().union(*(found for found, *_ in WRONG.values()))  # that one wants a config
