"""TensorRT sessions, over a stand-in whose engines are ONNX graphs that ONNX Runtime computes: addresses, dtypes,
profiles, the input that a unified engine adds, streaming budgets, runtime caches. That a real engine does the same on a
GPU is for `make test-gpu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engines import trt, trt_runtime, trt_session
from engines.backends import open_session
from engines.build import BuildRequest, build
from engines.build_options import BuildOptions
from engines.cache import LatentCache
from engines.generate import Generator
from engines.handed import graph_weights
from engines.session import Session
from engines.trt_runtime import LoadOptions
from engines.trt_session import TensorRTSession
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests import fake_builder, fake_tensorrt
from tests.model_checkpoints import VOCAB, tiny_checkpoint

Plan = Callable[..., Path]


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Export]:
    return {cache: export(ExportRequest("article", tmp_path_factory.mktemp(cache) / "e", cache=cache, max_context=24))
            for cache in ("append", "scatter", "concat")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder / "source", "v2-lite")
    return export(ExportRequest(str(folder / "source"), folder / "e", scope="model", max_context=64))


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A TensorRT whose engines are made by `module.make`; plans hold the graph's path."""
    module = fake_tensorrt.runtime(lambda plan: module.make(Path(plan.decode())))
    module.make = fake_tensorrt.Engine
    for place in (trt, trt_runtime, trt_session):
        monkeypatch.setattr(place, "load", lambda backend: module)
    monkeypatch.setattr(trt_session, "require_cuda", lambda backend: fake_tensorrt.CpuTorch())
    yield module
    assert not trt_runtime._LOADED, "an engine stayed on the device"


def plan_of(export: Export, graph: str, folder: Path) -> Path:
    path = folder / f"{graph}.engine"
    path.write_bytes(str(export.folder / f"{graph}.onnx").encode())
    return path


def steps(export: Export, session: Session, tokens: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    """Outputs of a few steps over one cache, two sequences."""
    rng = np.random.default_rng(seed)
    cache, found = LatentCache(export, batch=2), []
    for T in tokens:
        feed: dict[str, np.ndarray] = cache.feed()
        for spec in session.graph.inputs:
            if spec.name == "input_ids":
                feed["input_ids"] = rng.integers(0, VOCAB, (2, T))
            elif spec.name == "hidden_states":
                feed["hidden_states"] = rng.standard_normal((2, T, int(spec.shape[2]))).astype(np.float32)
            elif spec.name == "last_token":
                feed["last_token"] = np.full(2, T - 1)
        outputs = session.infer(feed)
        cache.commit(outputs, T)
        found.append(outputs[session.graph.outputs[0].name])
    return found


@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
def test_a_layer_computes_through_its_addresses(cache: str, layers: dict[str, Export], runtime: SimpleNamespace,
                                                tmp_path: Path) -> None:
    made = layers[cache]
    graph = made.graph("decode")
    with open_session(made, "decode", "ort") as reference:
        expected = steps(made, reference, (3, 1, 2))
    with TensorRTSession(made, graph, "trt", plan_of(made, graph.name, tmp_path)) as session:
        found = steps(made, session, (3, 1, 2))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    (context,) = runtime.opened[0].contexts
    assert context.streams == {7}
    if cache == "scatter":
        assert context.addresses["latent_cache.0"] == context.addresses["latent_cache_out.0"]


def test_a_model_has_ids_in_and_float32_logits_out(model: Export, runtime: SimpleNamespace, tmp_path: Path) -> None:
    for kind in ("prefill", "decode"):
        graph = model.graph(kind)
        with open_session(model, kind, "ort") as reference:
            expected = steps(model, reference, (5, 1))
        with TensorRTSession(model, graph, "trt", plan_of(model, graph.name, tmp_path)) as session:
            found = steps(model, session, (5, 1))
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == np.float32
            assert a.shape == (2, VOCAB)
            np.testing.assert_array_equal(a, b)


def test_one_engine_serves_decode_and_prefill(model: Export, runtime: SimpleNamespace, tmp_path: Path) -> None:
    """Built from the prefill graph, which wants `last_token`: for a decode step the last of its T tokens. Both sessions
    share the engine and its weights, each in its own profile; the last to close frees it."""
    prefill, decode = model.graph("prefill"), model.graph("decode")
    runtime.make = lambda graph: fake_tensorrt.Engine(graph, profiles=(2, 64))
    plan = plan_of(model, prefill.name, tmp_path)
    with open_session(model, "decode", "ort") as reference:
        expected = steps(model, reference, (1, 2, 1))
    first = TensorRTSession(model, prefill, "trt", plan, profile=1)
    with TensorRTSession(model, decode, "trt", plan, profile=0, built_from=prefill) as session:
        assert session.graph is decode
        found = steps(model, session, (1, 2, 1))
        with pytest.raises(InputError, match=r"input_ids \[2, 3\] is outside the engine's profile; rebuild"):
            steps(model, session, (3,))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    (engine,) = runtime.opened
    assert [context.profile for context in engine.contexts] == [1, 0]
    assert steps(model, first, (3,))[0].shape == (2, VOCAB)
    first.close()
    first.close()  # closing twice is harmless
    del first, session


def test_what_one_engine_cannot_serve(model: Export, layers: dict[str, Export], runtime: SimpleNamespace,
                                      tmp_path: Path) -> None:
    prefill = model.graph("prefill")
    plan = plan_of(model, prefill.name, tmp_path)
    with pytest.raises(InputError, match=r"an engine of prefill\.\w+ cannot serve decode\.\w+: their inputs"):
        TensorRTSession(layers["append"], layers["append"].graph("decode"), "trt", plan, built_from=prefill)
    with pytest.raises(InputError, match="no optimisation profile 1; the engine has 1, from 0"):
        TensorRTSession(model, prefill, "trt", plan, profile=1)
    runtime.make = lambda graph: None
    with pytest.raises(InputError, match=r"trt 10\.16\.0 could not load this engine on this GPU \(of another version\)"
                                         r"; build it here with: python -m engines build .* --backend trt --overwrite"):
        TensorRTSession(model, prefill, "trt", plan)


def test_a_tensor_that_shapes_depend_on_stays_on_the_host(layers: dict[str, Export], runtime: SimpleNamespace,
                                                          tmp_path: Path) -> None:
    made = layers["append"]

    def engine(graph: Path) -> fake_tensorrt.Engine:
        found = fake_tensorrt.Engine(graph)
        found.host_tensors = {"past_lengths"}
        return found

    runtime.make = engine
    graph = made.graph("decode")
    with TensorRTSession(made, graph, "trt", plan_of(made, graph.name, tmp_path)) as session:
        steps(made, session, (3, 1))
        assert session.graphs.refused == "the engine reads past_lengths on the host"  # a graph would keep its values
        (context,) = runtime.opened[0].contexts
        on_host = session._steps._up.host
        assert 0 <= context.addresses["past_lengths"] - on_host.data_ptr() < on_host.numel()
        assert not 0 <= context.addresses["hidden_states"] - on_host.data_ptr() < on_host.numel()


# --- Weight streaming, stripped plans, the runtime cache --------------------------------------------------------------


def test_a_weight_budget(layers: dict[str, Export], runtime: SimpleNamespace, tmp_path: Path) -> None:
    made = layers["append"]
    graph, options = made.graph("decode"), LoadOptions(weight_budget=1000)
    plan = plan_of(made, graph.name, tmp_path)
    with pytest.raises(InputError, match="--weight-budget 1000: this engine has no streamable weights; build it with "
                                         "--weight-streaming"):
        TensorRTSession(made, graph, "trt", plan, options=options)
    runtime.make = lambda graph: fake_tensorrt.Engine(graph, streamable=5000)
    with TensorRTSession(made, graph, "trt", plan, options=options):
        assert runtime.opened[-1].weight_streaming_budget_v2 == 1000
    with TensorRTSession(made, graph, "trt", plan):
        assert runtime.opened[-1].weight_streaming_budget_v2 == 5000
    with pytest.raises(InputError, match="--weight-budget -1: expected bytes"):
        LoadOptions(weight_budget=-1)


@pytest.mark.parametrize("layout", ["split", "unified"])
def test_generating_with_engines(layout: str, tmp_path: Path, runtime: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
                                 ) -> None:
    """From `engines build` to text: whichever engines were kept, the tokens are ONNX Runtime's."""
    tiny_checkpoint(tmp_path / "source", "v2-lite")
    made = export(ExportRequest(str(tmp_path / "source"), tmp_path / "e", scope="model", max_context=64, target="trt"))
    with monkeypatch.context() as patched:
        fake_builder.install(patched)
        patched.setattr(trt, "check_options", lambda backend, options: None)
        build(BuildRequest(made.folder, "trt", max_batch=2, layout=layout, options=BuildOptions(weight_streaming=True)))
    runtime.__version__ = fake_builder.VERSION
    profiles = (1, 64) if layout == "unified" else (64,)
    monkeypatch.setattr(runtime, "make", lambda named: fake_tensorrt.Engine(
        made.folder / f"{str(named).split()[-1]}.onnx", profiles, streamable=9_000_000))
    prompts = [[5, 17, 101, 9], [3, 44]]

    def tokens(backend: str, load: LoadOptions | None = None) -> list[tuple[int | None, ...]]:
        with Generator(made, backend, load=load) as generator:
            return [step.tokens for step in generator.generate(prompts, 6, chunk=3)]

    assert tokens("trt", LoadOptions(weight_budget=4_000_000)) == tokens("ort")
    assert [engine.weight_streaming_budget_v2 for engine in runtime.opened] == [4_000_000] * (
        1 if layout == "unified" else 2)


def test_load_options_of_others() -> None:
    with pytest.raises(InputError, match=r"--backend ort: --weight-budget and --runtime-cache are TensorRT's; leave "):
        LoadOptions(weight_budget=5).check("ort")
    with pytest.raises(InputError, match=r"--runtime-cache r\.cache: TensorRT-RTX compiles kernels when it loads an "
                                         "engine; trt has done so in the build; leave --runtime-cache out"):
        LoadOptions(runtime_cache=Path("r.cache")).check("trt")
    with pytest.raises(InputError, match="--no-cuda-graphs with --backend interpreter: only trt, trt-rtx, ort-cuda "):
        LoadOptions(cuda_graphs=False).check("interpreter")
    for backend in ("trt", "trt-rtx", "ort-cuda"):
        LoadOptions(cuda_graphs=False).check(backend)
    LoadOptions(weight_budget=5).check("trt")
    LoadOptions(5, Path("r.cache")).check("trt-rtx")


def test_a_stripped_plan_is_refitted_when_it_is_loaded(layers: dict[str, Export], runtime: SimpleNamespace,
                                                       tmp_path: Path) -> None:
    made = layers["append"]
    graph = made.graph("decode")
    weights = graph_weights(made.folder / graph.file, {})
    stored = {name: w for name, w in weights.items() if w.stored}

    def stripped(path: Path) -> fake_tensorrt.Engine:
        engine = fake_tensorrt.Engine(path)
        engine.prototypes = {name: ("FLOAT", w.count) for name, w in stored.items()}
        engine.lacking = set(stored)
        return engine

    runtime.make = stripped
    with TensorRTSession(made, graph, "trt", plan_of(made, graph.name, tmp_path)):
        (engine,) = runtime.opened
        assert engine.refits == 1
        assert engine.handed == {name: w.data.tobytes() for name, w in stored.items()}
    runtime.make = lambda path: _with(stripped(path), lacking={"elsewhere"})
    with pytest.raises(CheckError, match="the engine still lacks elsewhere; the export has no such weights"):
        TensorRTSession(made, graph, "trt", plan_of(made, graph.name, tmp_path))


def _with(engine: fake_tensorrt.Engine, **changes: Any) -> fake_tensorrt.Engine:
    for name, value in changes.items():
        setattr(engine, name, value)
    return engine


def test_a_runtime_cache_is_read_and_written_back(layers: dict[str, Export], runtime: SimpleNamespace, tmp_path: Path
                                                  ) -> None:
    made = layers["append"]
    graph = made.graph("decode")
    plan = plan_of(made, graph.name, tmp_path)
    beside = tmp_path / f"{graph.name}.runtime.cache"
    for expected in (b"kernel0", b"kernel0 kernel0"):
        with TensorRTSession(made, graph, "trt-rtx", plan) as session:
            steps(made, session, (1,))
        assert beside.read_bytes() == expected
    chosen = tmp_path / "chosen.cache"
    chosen.write_bytes(b"other GPU's")  # TensorRT-RTX leaves it aside, and it is written anew
    with TensorRTSession(made, graph, "trt-rtx", plan, options=LoadOptions(runtime_cache=chosen)) as session:
        steps(made, session, (1,))
    assert chosen.read_bytes() == b"kernel0"
    assert beside.read_bytes() == b"kernel0 kernel0"
    with TensorRTSession(made, graph, "trt", plan) as session:
        steps(made, session, (1,))
    assert beside.read_bytes() == b"kernel0 kernel0"  # TensorRT has none
    assert {p.name for p in tmp_path.iterdir()} == {plan.name, beside.name, chosen.name}
    del session


def test_a_runtime_cache_that_cannot_be_written_is_no_failure(layers: dict[str, Export], runtime: SimpleNamespace,
                                                              tmp_path: Path) -> None:
    made = layers["append"]
    graph = made.graph("decode")
    options = LoadOptions(runtime_cache=tmp_path / "gone" / "r.cache")
    with TensorRTSession(made, graph, "trt-rtx", plan_of(made, graph.name, tmp_path), options=options) as session:
        steps(made, session, (1,))
    assert not (tmp_path / "gone").exists()
    del session
