"""Engines of whole models: every family builds with TensorRT-RTX, and the graphs it builds from compute the model.

Builds need no GPU; running does, so what the graphs for TensorRT compute is judged by ONNX Runtime and the interpreter.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache as memo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines import __main__ as command_line
from engines import lint
from engines.backends import open_session
from engines.build import BuildRequest, Engines, build, ranges
from engines.cache import LatentCache
from exporter import console, moe_graph
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.moe_graph import DENSE_GROUP
from tests.marks import fast, slow
from tests.model_checkpoints import EXPERT_FFN, EXPERTS, HIDDEN, MODELS, MOE, TOP_K, attentions, tiny_checkpoint
from tests.transformers_oracle import Oracle
from validate.metrics import TOLERANCES, compare, worst_of
from validate.synthetic import named_config, write_checkpoint

transformers = pytest.importorskip("transformers")

VOCAB = 160
REL = 1e-4
CONTEXT = 64
HALF = ("v2-grouped", "v3", "longcat", "minicpm3", "mistral4", "axk1")  # one of each graph, for the fast tests
Make = Callable[..., Export]


def depth(name: str) -> int:
    """A dense and a sparse layer; LongCat's layers are both at once."""
    return 1 if name == "longcat" else 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Tiny checkpoints by name and dtype, each made once."""

    @memo
    def once(name: str, dtype: torch.dtype) -> Path:
        folder = tmp_path_factory.mktemp("checkpoints") / name
        return tiny_checkpoint(folder, name, layers=depth(name), dtype=dtype)

    return lambda name, dtype=torch.float32: once(name, dtype)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[..., Path]) -> Make:
    """Exports of tiny checkpoints by name and options, each made once and never changed."""

    @memo
    def once(name: str, stored: torch.dtype, options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("exports") / "export"
        request = {"scope": "model", "max_context": CONTEXT, "max_batch": 2, **dict(options)}
        return export(ExportRequest(str(checkpoint(name, stored)), folder, **request))

    return lambda name, stored=torch.float32, **options: once(name, stored, tuple(sorted(options.items())))


@pytest.fixture(scope="module")
def rtx() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")


@pytest.fixture
def other_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hard link can be made, as between two file systems."""

    def refuse(*paths: Any, **options: Any) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """`python -m engines` with some words: exit status, stdout, stderr."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["engines", *map(str, words)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            console.main(command_line.cli, "python -m engines")
        captured = capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    return call


def weights_read(made: Export, graph: str) -> int:
    """Bytes of the stored weights that a graph names."""
    import onnx

    model = onnx.load(made.folder / f"{graph}.onnx", load_external_data=False)
    return sum(int(e.value) for i in model.graph.initializer for e in i.external_data if e.key == "length")


def check_engines(made: Export, engines: Engines) -> None:
    """One engine of each kind is kept, and its figures hang together."""
    kept = [e for e in engines.engines if e.file]
    assert {e.kind for e in kept} == {"prefill", "decode"}
    for e in engines.engines:
        stored = weights_read(made, e.graph)
        # gathered stacks stay as they are; the rest is the builder's own rounding up and constants
        assert stored <= e.weight_bytes * 1.02
        assert e.weight_bytes <= 1.05 * stored + 200_000
        assert e.plan_bytes > stored
        assert 0 < e.activation_bytes < 20e6
        assert e.predicted_bytes > 0


# --- Every family builds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "dtype"), fast(
    [(n, dtype) for dtype in ("fp32", "fp16") for n in MODELS], [*((n, "fp16") for n in HALF), *(
        (n, "fp32") for n in MODELS if n not in HALF)]))
def test_every_family_builds(name: str, dtype: str, rtx: None, make: Make, tmp_path: Path) -> None:
    """Prefill in every expanded form, decode in the leanest; the builder refuses an input that the parser ignores."""
    made = make(name, target="trt-rtx", prefill="expanded", dtype=dtype)
    forms = {g.kind: made.data["experts"]["forms"][g.name] for g in made.graphs} if name in MOE else {}
    assert forms == ({"prefill": "dense", "decode": "gather"} if name in MOE else {})
    caches = [t.name for t in made.graph("decode").inputs if t.name.startswith("past_latent.")]
    assert len(caches) == attentions(name, depth(name))
    made = open_export(Path(shutil.copytree(made.folder, tmp_path / "export")))
    engines = build(BuildRequest(made.folder, formulation="kqt", chunk=16))
    fused = ["prefill.expanded-attention"] if dtype == "fp16" else []
    assert [e.graph for e in engines.engines] == [*fused, "prefill.expanded", "decode.kqt"]
    check_engines(made, engines)


@pytest.mark.parametrize("options", [{"cache": "scatter"}, {"absorb": "folded"}, {"layers": "1:2"}, *slow([
    {"cache": "concat"}, {"prefill": "absorbed", "logits": "all"}, {"experts": "dense"}, {"layers": "0:1"}])],
    ids=lambda o: " ".join(f"{n} {v}" for n, v in o.items()))
@pytest.mark.parametrize("name", ["v3", pytest.param("longcat", marks=pytest.mark.slow)])
def test_every_option_builds(name: str, options: dict[str, Any], rtx: None, make: Make, tmp_path: Path) -> None:
    if name == "longcat" and "layers" in options:
        pytest.skip("has one layer here")
    made = make(name, target="trt-rtx", dtype="fp16", **{"prefill": "expanded", **options})
    made = open_export(Path(shutil.copytree(made.folder, tmp_path / "export")))
    check_engines(made, build(BuildRequest(made.folder, formulation="kqt", chunk=16)))


def test_linked_experts_build_as_copied_ones(rtx: None, make: Make, checkpoint: Callable[..., Path],
                                             tmp_path: Path) -> None:
    """Each expert is a tensor of its own in the checkpoint's file; the builder joins them once, and keeps one copy."""
    found = {}
    for weights in ("copy", "link"):
        made = export(ExportRequest(str(checkpoint("v3", torch.bfloat16)), tmp_path / weights, max_context=CONTEXT,
                                    dtype="bf16", target="trt-rtx", prefill="expanded", weights=weights))
        assert ("linked" in {f.parent.name for f in made.folder.rglob("*")}) == (weights == "link")
        found[weights] = build(BuildRequest(made.folder, formulation="kqt", chunk=16, max_batch=2))
        check_engines(made, found[weights])
    for copied, linked in zip(found["copy"].engines, found["link"].engines, strict=True):
        assert linked.weight_bytes == pytest.approx(copied.weight_bytes, rel=0.01)
        assert linked.activation_bytes == pytest.approx(copied.activation_bytes, rel=0.05)
        assert linked.predicted_bytes == copied.predicted_bytes


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_weights_on_another_disk_are_handed_to_the_builder(dtype: str, rtx: None, checkpoint: Callable[..., Path],
                                                           other_disk: None, tmp_path: Path) -> None:
    stored = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    made = export(ExportRequest(str(checkpoint("longcat", stored)), tmp_path / "export", max_context=CONTEXT,
                                dtype=dtype, target="trt-rtx", prefill="expanded", weights="link"))
    assert {r["how"] for r in made.data["weights"]["linked"].values()} == {"handed"}
    assert not list(made.folder.rglob("model*.safetensors"))
    check_engines(made, build(BuildRequest(made.folder, formulation="kqt", chunk=16, max_batch=2)))


# --- What the graphs for TensorRT compute -----------------------------------------------------------------------------


def play(made: Export, ids: np.ndarray, prompt: int, backend: str) -> np.ndarray:
    """Logits [B, T, V] of ids [B, T]: a prompt of `prompt` tokens, then one by one."""
    cache, found = LatentCache(made, len(ids)), []
    with open_session(made, "prefill", backend) as first, open_session(made, "decode", backend) as second:
        for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, ids.shape[1]))]:
            step = np.ascontiguousarray(ids[:, start:stop])
            outputs = (first if start == 0 else second).infer({"input_ids": step, **cache.feed()})
            cache.commit(outputs, stop - start)
            found.append(outputs["logits"])
    return np.concatenate(found, axis=1)


def clear_ids(oracle: Oracle, tokens: int, margin: float, batch: int = 2) -> np.ndarray:
    """Token ids [batch, tokens] that keep every router further than `margin` from another choice."""
    rows: list[np.ndarray] = []
    for seed in range(3000):
        row = np.random.default_rng([seed, 11]).integers(0, VOCAB, (1, tokens))
        if oracle.router_margin(row) > margin:
            rows.append(row)
        if len(rows) == batch:
            return np.concatenate(rows)
    raise AssertionError(f"no {tokens} token ids keep every router {margin} off its edges")


@memo
def half_ids(checkpoint: Path, margin: float) -> np.ndarray:
    """Few tokens: the more there are, the rarer it is that all of them keep such a margin."""
    return clear_ids(Oracle(checkpoint), 6, margin)


@pytest.mark.parametrize("experts", ["auto", "gather", "dense"])
@pytest.mark.parametrize("name", ["v2-grouped", "v3", "longcat", "mistral4", "axk1", "minicpm3"])
def test_graphs_for_tensorrt_compute_the_model(name: str, experts: str, make: Make,
                                               checkpoint: Callable[..., Path]) -> None:
    """In fp32, by ONNX Runtime and by the interpreter, beside the graphs for ONNX Runtime and beside transformers."""
    oracle = Oracle(checkpoint(name))
    ids = clear_ids(oracle, 40, 2e-5)
    theirs = make(name, target="ort", logits="all")
    ours = make(name, target="trt-rtx", prefill="expanded", logits="all", experts=experts)
    if name in MOE:
        assert set(theirs.data["experts"]["forms"].values()) == {"fused"}
        assert set(ours.data["experts"]["forms"].values()) == ({"dense", "gather"} if experts == "auto" else {experts})
    want = play(theirs, ids, 33, "ort")
    assert compare(want, oracle.logits(ids, "short" if name == "minicpm3" else None)).rel <= REL
    for backend in ("ort", "interpreter"):
        assert compare(play(ours, ids, 33, backend), want).rel <= REL


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("experts", ["gather", "dense"])
@pytest.mark.parametrize("name", ["v2-grouped", "v3", "longcat", "mistral4"])
def test_graphs_for_tensorrt_at_16_bit(name: str, experts: str, dtype: str, make: Make,
                                       checkpoint: Callable[..., Path],
                                       record_property: Callable[[str, object], None]) -> None:
    """In the interpreter, against float32 over the same rounded weights, where no router is near another choice.

    Two layers are allowed twice the noise of one attention.
    """
    stored = {"fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    ids = half_ids(checkpoint(name, stored), {"fp16": 2e-3, "bf16": 1.5e-2}[dtype])
    want = play(make(name, stored, target="ort", logits="all"), ids, 4, "ort")
    ours = make(name, stored, target="trt-rtx", prefill="expanded", logits="all", dtype=dtype, experts=experts)
    found = play(ours, ids, 4, "interpreter")
    difference = worst_of([compare(a, b) for a, b in zip(found, want, strict=True)])
    record_property("rel and 1 - cosine", (difference.rel, 1 - difference.cosine))
    assert difference.within(replace(TOLERANCES[dtype], rel=2 * TOLERANCES[dtype].rel))


# --- ONNX Runtime, lint, and what cannot be built ---------------------------------------------------------------------


@pytest.mark.parametrize("handed", [False, True], ids=["beside", "handed"])
def test_a_model_builds_for_ort(handed: bool, request: pytest.FixtureRequest, checkpoint: Callable[..., Path],
                                tmp_path: Path) -> None:
    """Opened and run at its limits in a process of its own."""
    if handed:
        request.getfixturevalue("other_disk")
    made = export(ExportRequest(str(checkpoint("v3")), tmp_path / "export", max_context=CONTEXT, max_batch=2,
                                weights="link" if handed else "copy"))
    engines = build(BuildRequest(made.folder, backend="ort"))
    assert {e.kind for e in engines.engines if e.default} == {"prefill", "decode"}
    for e in engines.engines:
        assert e.weight_bytes == made.data["weights"]["bytes"]
        assert e.limits["B"][2] == (2 if e.kind == "decode" else 1)
        assert 0 <= e.activation_bytes < 50e6
    with open_session(made, "decode", "ort") as session:
        outputs = session.infer({"input_ids": np.array([[3]]), **LatentCache(made, 1).feed()})
    assert np.isfinite(outputs["logits"]).all()


@pytest.mark.parametrize("backend", ["ort", "trt-rtx"])
def test_without_weights_nothing_is_built(backend: str, checkpoint: Callable[..., Path], tmp_path: Path,
                                          command: Callable[..., tuple[int, str, str]]) -> None:
    if backend == "trt-rtx":
        pytest.importorskip("tensorrt_rtx")
    made = export(ExportRequest(str(checkpoint("v3")), tmp_path / "export", max_context=CONTEXT, weights="none",
                                target=backend))
    with pytest.raises(InputError, match=r"exported with --weights none.*; export with --weights copy or link") as one:
        build(BuildRequest(made.folder, backend=backend))
    assert "\n" not in str(one.value)
    assert not (made.folder / "engines").exists()
    assert command("build", made.folder, "--backend", backend) == (2, "", f"error: {one.value}\n")


def test_a_missing_checkpoint_is_named_before_a_build(checkpoint: Callable[..., Path], other_disk: None,
                                                      tmp_path: Path) -> None:
    moved = Path(shutil.copytree(checkpoint("v3"), tmp_path / "checkpoint"))
    made = export(ExportRequest(str(moved), tmp_path / "export", max_context=CONTEXT, weights="link"))
    moved.rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"its weights lie in .*model\.safetensors, which is not there.*--relink"):
        build(BuildRequest(made.folder, backend="ort"))


def test_experts_that_tensorrt_cannot_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """V3's 256 experts of one matrix are 3.8e9 numbers: in one stack too many, gathered from two of them, or in the
    dense form eight each."""
    found = {}
    for case in ("one stack", "gather", "dense"):
        experts = "dense" if case == "dense" else "gather"
        monkeypatch.setattr(moe_graph, "MAX_ELEMENTS", 1 << 40 if case == "one stack" else 2**31 - 1)
        made = export(ExportRequest("deepseek-v3", tmp_path / case, scope="model", weights="none", target="trt-rtx",
                                    layers="3:4", dtype="fp16", max_context=4096, experts=experts))
        graph = made.graph("decode")
        sizes = {n: r.max for n, r in ranges(made, graph, BuildRequest(made.folder)).items()}
        found[case] = lint.lint(made.folder / graph.file, sizes)
    assert found["dense"] == found["gather"] == []
    assert [f.rule for f in found["one stack"]] == ["weight-too-large"] * 3
    assert {f.node for f in found["one stack"]} == {f"layers.3.mlp.experts.{m}" for m in ("gate", "up", "down")}
    for finding in found["one stack"]:
        assert "3758096384 elements, whatever the limits" in finding.message
        assert "--experts dense" in finding.message
        assert "fewer experts" in finding.message


def test_joined_experts_count_as_weights(checkpoint: Callable[..., Path], tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    """Linked experts are joined in the graph: neither activation, nor cured by smaller limits."""
    made = export(ExportRequest(str(checkpoint("v3")), tmp_path / "export", max_context=CONTEXT, weights="link",
                                target="trt-rtx", max_batch=2))
    graph, sizes = made.graph("decode"), {"B": 1, "T": 1, "S": 8}
    monkeypatch.setattr(lint, "MAX_ELEMENTS", EXPERTS * EXPERT_FFN * HIDDEN - 1)
    findings = lint.lint(made.folder / graph.file, sizes)
    assert [f.rule for f in findings] == ["weight-too-large"] * 3
    assert lint.live_peak(made.folder / graph.file, sizes) < EXPERTS * EXPERT_FFN * HIDDEN * 4
    with pytest.raises(CheckError, match=r"decode\.\w+ was not built: \[weight-too-large\] .*--experts dense"):
        build(BuildRequest(made.folder, formulation="kqt"))


def test_the_build_shows_what_experts_cost(rtx: None, checkpoint: Callable[..., Path], tmp_path: Path,
                                           command: Callable[..., tuple[int, str, str]]) -> None:
    made = export(ExportRequest(str(checkpoint("v3")), tmp_path / "export", max_context=CONTEXT, target="trt-rtx",
                                max_batch=2))
    experts = made.data["experts"]
    assert experts["gather_bytes_per_token"] == EXPERT_FFN * HIDDEN * 4  # one matrix of one expert
    assert experts["dense_from_tokens"] == EXPERTS // TOP_K + 1
    built = command("build", made.folder, "--formulation", "kqt", "--chunk", "16", "--max-batch", "2")
    for code, out, _ in (built, command("inspect", made.folder)):
        text = " ".join(out.split())
        assert code == 0
        assert "experts: decode gather, prefill dense" in text
        assert f"dense form is taken from B x T = {EXPERTS // TOP_K + 1} new tokens on" in text


# --- At the real width ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real_width(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense and a sparse layer of V3's width, of 256 experts eight: 2.4 GB in bfloat16."""
    _, config = named_config("v3-class")
    config |= {"hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 2, "first_k_dense_replace": 1,
               "num_attention_heads": 128, "num_key_value_heads": 128, "vocab_size": 1024, "q_lora_rank": 1536,
               "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2048, "n_group": 1,
               "topk_group": 1}
    return write_checkpoint(tmp_path_factory.mktemp("real") / "checkpoint", config, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "experts"), [("0:1", "auto"), ("1:2", "gather"), ("1:2", "dense")])
def test_a_slice_of_real_width_builds(layers: str, experts: str, rtx: None, real_width: Path, tmp_path: Path,
                                      record_property: Callable[[str, object], None],
                                      capsys: pytest.CaptureFixture[str]) -> None:
    """128 heads, hidden 7168, linked bfloat16; decode of 8 sequences, prefill of 512 tokens over 8192 rows."""
    made = export(ExportRequest(str(real_width), tmp_path / "export", layers=layers, dtype="bf16", target="trt-rtx",
                                prefill="expanded", weights="link", max_context=8192, experts=experts))
    assert made.data["weights"]["written_bytes"] < 0.1 * made.data["weights"]["bytes"]
    engines = build(BuildRequest(made.folder, max_batch=8, chunk=512))
    rows = [(e.graph, e.activation_bytes, e.predicted_bytes, e.weight_bytes, e.plan_bytes, e.seconds, bool(e.file))
            for e in engines.engines]
    record_property("graph, activation, predicted, weights, plan, seconds, kept", rows)
    with capsys.disabled():
        for row in rows:
            print(f"\nlayers {layers} {experts:6}", *row, end="")
    for e in engines.engines:
        stored = weights_read(made, e.graph)
        assert e.weight_bytes == pytest.approx(stored, rel=0.02)
        assert stored < e.plan_bytes < 1.05 * stored
    kept = {e.kind: e for e in engines.engines if e.file}
    matrix = 7168 * 2048 * 2
    scratch = 8 * matrix if experts == "gather" else DENSE_GROUP * matrix / 2
    assert kept["decode"].activation_bytes < 300e6 + (scratch if layers == "1:2" else 0)
    assert kept["prefill"].activation_bytes < 1.5e9
