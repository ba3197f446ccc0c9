"""A cache that lies on the device, and the sessions that leave it there: what crosses the bus, which steps become CUDA
graphs, the same tokens as on the host.

The device is the CPU here, through torch; engines and ONNX Runtime's CUDA provider are stand-ins that compute on the
memory they are pointed to. That the real ones do the same on a GPU is for `make test-gpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from click.testing import CliRunner

from engines import backends, ort_cuda, records, trt, trt_runtime, trt_session
from engines.__main__ import cli
from engines.backends import open_session
from engines.cache import LatentCache, Staging
from engines.cuda_graphs import MOST, SEEN, Repeats
from engines.device_memory import GRANULE, DeviceArray, DeviceMemory
from engines.generate import Generator
from engines.memory import HOST
from engines.model_sessions import ModelSessions
from engines.serving.pool import Limits
from engines.serving.scheduler import Scheduler
from engines.serving.sequence import Request
from engines.serving.server import ServeOptions
from engines.session import Session
from engines.trt_runtime import LoadOptions
from engines.trt_session import TensorRTSession
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests import fake_tensorrt
from tests.fake_tensorrt import CpuTorch, Graph
from tests.model_checkpoints import VOCAB, tiny_checkpoint

PROMPTS = [[5, 17, 101, 9, 3, 3, 8], [3, 44], [150, 1, 2, 3, 77]]
ALIGNED = 256


@pytest.fixture
def memory() -> DeviceMemory:
    return DeviceMemory(CpuTorch())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_checkpoint(tmp_path_factory.mktemp("source") / "v2", "v2-lite"))


@pytest.fixture(scope="module")
def models(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Export]:
    made: dict[tuple[tuple[str, Any], ...], Export] = {}

    def get(**options: Any) -> Export:
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = export(ExportRequest(str(checkpoint), tmp_path_factory.mktemp("model") / "e", scope="model",
                                             **{"max_context": 64, **options}))
        return made[key]

    return get


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SimpleNamespace]:
    """Backends trt and trt-rtx whose engines are stand-ins, one of each graph; `opened` sessions are kept."""
    module = fake_tensorrt.runtime(lambda plan: fake_tensorrt.Engine(Path(plan.decode())))
    for place in (trt, trt_runtime, trt_session):
        monkeypatch.setattr(place, "load", lambda backend: module)
    device = CpuTorch()
    monkeypatch.setattr(trt_session, "require_cuda", lambda backend: device)
    monkeypatch.setattr(records, "open_engines", lambda export, backend: SimpleNamespace(kept=lambda kind: None))
    sessions: list[TensorRTSession] = []

    def open_engine(made: Export, graph: Any, backend: str, load: LoadOptions | None = None) -> Session:
        plan = tmp_path / f"{made.folder.parent.name}.{graph.name}.engine"
        plan.write_bytes(str(made.folder / graph.file).encode())
        sessions.append(TensorRTSession(made, graph, backend, plan, options=load))
        return sessions[-1]

    monkeypatch.setattr(backends, "open_engine", open_engine)
    Graph.made.clear()
    monkeypatch.setattr(Graph, "fails", None)
    monkeypatch.setattr(Graph, "spoils", None)
    yield SimpleNamespace(module=module, sessions=sessions, device=device)
    assert not trt_runtime._LOADED, "an engine stayed on the device"


def tokens(made: Export, backend: str, new: int = 9, load: LoadOptions | None = None,
           prompts: list[list[int]] = PROMPTS, chunk: int = 3) -> list[tuple[int | None, ...]]:
    with Generator(made, backend, load=load) as generator:
        return [step.tokens for step in generator.generate(prompts, new, chunk=chunk)]


# --- Arrays and the writing of rows ---------------------------------------------------------------------------------


def test_an_array_of_the_device(memory: DeviceMemory) -> None:
    array = memory.zeros((2, 3, 4), np.dtype(np.float16))
    assert (array.shape, array.ndim, array.dtype, array.nbytes, len(array)) == ((2, 3, 4), 3, np.float16, 48, 2)
    values = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float16)
    array[1] = values
    assert isinstance(array, DeviceArray)
    np.testing.assert_array_equal(array[1].numpy(), values)
    np.testing.assert_array_equal(array[:, 1:3, :2].numpy()[1], values[1:3, :2])  # a view that is not in one piece
    assert (memory.uploaded, memory.downloaded) == (24, 24 + 16)
    array[0] = array[1]
    copied, sliced = array.copy(), array[0]
    array[0] = np.zeros((3, 4), np.float16)
    np.testing.assert_array_equal(copied[0].numpy(), values)
    np.testing.assert_array_equal(sliced.numpy(), 0)  # a view
    with pytest.raises(InputError, match=r"numbers of float32 for an array of float16 on the device"):
        array[0] = np.zeros((3, 4), np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_rows_are_written_as_on_the_host(dtype: type, memory: DeviceMemory) -> None:
    """Whatever joins: one sequence, all of them, some padded, none; behind any lengths, in any slots."""
    rng = np.random.default_rng(1)
    kind = np.dtype(dtype)
    for T, B in ((1, 1), (1, 5), (4, 1), (4, 3), (7, 5)):
        for _ in range(4):
            host, device = HOST.zeros((2, 6, 20, 3), kind), memory.zeros((2, 6, 20, 3), kind)
            made = rng.integers(-100, 100, (2, B, T, 3)).astype(kind)
            slots, starts = rng.permutation(6)[:B], rng.integers(0, 13, B)
            counts = rng.integers(0, T + 1, B) if rng.random() < 0.7 else np.full(B, T)
            HOST.write_rows(host, made, slots, starts, counts)
            memory.write_rows(device, made, slots, starts, counts)
            np.testing.assert_array_equal(device[:].numpy(), host)  # type: ignore[attr-defined]


# --- Sessions over TensorRT ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"cache": "scatter"}, {"cache": "concat"}, {"cache_dtype": "int8"},
                                     {"dtype": "fp16"}], ids=lambda o: "-".join(o.values()) or "append")
def test_the_same_tokens_and_only_ids_and_logits_cross(options: dict[str, str], models: Callable[..., Export],
                                                       engines: SimpleNamespace) -> None:
    """Ragged prompts, prefilled in pieces, over every form of cache: what a decode step moves does not depend on how
    long the past is. concat's past is the host's, and crosses each time."""
    made = models(**options)
    prompts = [p[:2] for p in PROMPTS] if made.cache == "concat" else PROMPTS
    expected = tokens(made, "ort", prompts=prompts)
    moved = list[tuple[int, int]]()
    with Generator(made, "trt") as generator:
        found = []
        for step in generator.generate(prompts, 9, chunk=3):
            found.append(step.tokens)
            memories = [session.memory for session in engines.sessions]
            moved.append((sum(m.uploaded for m in memories), sum(m.downloaded for m in memories)))
    assert found == expected
    steps = {(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(moved)}
    if made.cache == "concat":
        assert len(steps) > 1
        return
    positions = 8 * len(prompts) * (0 if made.cache == "scatter" else 3 if made.quantised_cache else 1)
    logits = -(-4 * VOCAB * len(prompts) // ALIGNED) * ALIGNED
    assert steps == {(2 * ALIGNED + positions, logits)}  # ids and lengths; where rows go; logits


def test_what_a_caller_keeps_on_the_host_is_moved(models: Callable[..., Export], engines: SimpleNamespace) -> None:
    """The same session with a cache of the host's, as a check or a program of one's own has it, a contiguous past or
    not; and with the outputs of its own choice."""
    made = models()
    rng = np.random.default_rng(3)
    with open_session(made, "decode", "ort") as reference, open_session(made, "decode", "trt") as session:
        host, device = LatentCache(made, 2), LatentCache(made, 2, memory=session.memory)
        for T in (3, 1, 1):
            ids = rng.integers(0, VOCAB, (2, T))
            extra = {"last_token": np.full(2, T - 1)} if any(
                s.name == "last_token" for s in session.graph.inputs) else {}
            expected = reference.infer({"input_ids": ids, **extra, **host.feed()})
            mixed = {n: np.asfortranarray(a) if a.ndim == 3 else a for n, a in host.feed().items()}
            place = np.empty_like(expected["logits"])
            found = session.infer({"input_ids": ids, **extra, **mixed}, {"logits": place})
            assert found["logits"] is place
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value)
            there = session.infer({"input_ids": ids, **extra, **device.feed()})
            np.testing.assert_array_equal(there["logits"], place)
            host.commit(expected, T)
            device.commit(there, T)
        with pytest.raises(InputError, match=r"past_latent\.0 lies on the GPU, and this session runs on the host"):
            reference.infer({"input_ids": ids, **extra, **device.feed()})
        wrong = {**device.feed(), "past_lengths": session.memory.zeros((2,), np.dtype(np.int64))}
        with pytest.raises(InputError, match=r"past_lengths is a DeviceArray; expected a NumPy array \[B\] of int64"):
            session.infer({"input_ids": ids, **extra, **wrong})
        staging = Staging(made, 2, session.memory)
        with pytest.raises(InputError, match=r"out has new_latent.0 \[2, 1, .*; expected \[2, 2, "):
            session.infer({"input_ids": ids.repeat(2, 1), **extra, **device.feed()}, staging.out(2, 1))


def test_a_past_is_bound_by_whole_granules(models: Callable[..., Export], memory: DeviceMemory) -> None:
    """Shapes that hold for many steps: of one sequence the first rows of its buffer, in steps of GRANULE; never more
    than there are."""
    made = models(max_context=600)
    cache = LatentCache(made, 1, memory=memory)
    for rows, bound in ((0, GRANULE), (1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE), (599, 600)):
        cache.lengths[:] = rows
        assert cache.feed()["past_latent.0"].shape[1] == bound
    assert LatentCache(made, 1).feed()["past_latent.0"].shape[1] <= GRANULE  # the host pays for rows


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_a_decode_step_becomes_a_graph(models: Callable[..., Export], engines: SimpleNamespace) -> None:
    """Run as it is at first, captured at the second time, replayed from then on, in a context of its own over scratch
    memory that all graphs share."""
    made = models()
    expected = tokens(made, "ort", 9)
    with Generator(made, "trt") as generator:
        found = [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)]
        assert found == expected
        (session,) = (s for s in engines.sessions if s.graph.kind == "decode")
        assert (len(session.graphs), session.graphs.refused) == (1, None)
        plain, captured = session._loaded.engine.contexts
        assert plain.enqueued == 1
        assert captured.enqueued == 2  # once as it is, once in the capture
        assert captured.scratch == (session._scratch.address, 1000)
        ((graph, _),) = session.graphs._graphs.values()
        assert graph.replays == 7  # 8 decode steps, one plain; of the captured one the replay is its check
        again = [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)]
        assert again == expected
    with Generator(made, "trt", load=LoadOptions(cuda_graphs=False)) as generator:
        assert [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)] == expected
        assert {s.graphs.refused for s in engines.sessions[2:]} == {"not asked for"}


def test_a_graph_that_goes_wrong_costs_itself_alone(models: Callable[..., Export], engines: SimpleNamespace,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    made = models()
    expected = tokens(made, "ort")

    def spoil(context: fake_tensorrt.Context) -> None:
        context._at("logits", "tensor(float)", (3, VOCAB))[...] = 7

    for fault, value, reason in (("fails", "operation not permitted\nwhen", "capture: operation not permitted"),
                                 ("spoils", spoil, "capture: a replay gives other numbers than the step did")):
        with monkeypatch.context() as patched:
            patched.setattr(Graph, fault, value)
            assert tokens(made, "trt") == expected
        assert engines.sessions[-1].graphs.refused == reason


def test_graphs_are_bounded(models: Callable[..., Export], engines: SimpleNamespace) -> None:
    """As many contexts as there are graphs, the latest MOST; what came once is forgotten in time."""
    made = models(max_context=40)
    with open_session(made, "decode", "trt") as session:
        assert isinstance(session, TensorRTSession)
        caches = [LatentCache(made, 1, rows, Staging(made, 1, session.memory), session.memory)
                  for rows in range(1, MOST + 4)]
        for _ in range(3):
            for cache in caches:
                session.infer({"input_ids": np.array([[3]]), **cache.feed()}, cache.out(1, 1))
        assert len(session.graphs) == MOST
    repeats = Repeats()
    assert not any(repeats.again(n) for n in range(SEEN + 1))
    assert not repeats.again(0)
    assert repeats.again(SEEN)


def test_tensorrt_rtx_captures_by_itself(models: Callable[..., Export], engines: SimpleNamespace) -> None:
    made = models()
    assert tokens(made, "trt-rtx") == tokens(made, "ort")
    assert not Graph.made
    settings = [c.settings for s in engines.module.opened for c in s.contexts]
    assert {s.cuda_graph_strategy for s in settings} == {"whole graph"}
    assert tokens(made, "trt-rtx", load=LoadOptions(cuda_graphs=False)) == tokens(made, "ort")
    assert not hasattr(engines.module.opened[-1].contexts[-1].settings, "cuda_graph_strategy")


# --- Servers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["append", "scatter"])
def test_a_server_keeps_its_rows_on_the_device(form: str, models: Callable[..., Export], engines: SimpleNamespace
                                               ) -> None:
    """8 ragged sequences that join and leave, prefixes shared, buffers that grow; every answer is the one that its
    prompt gets alone on the host, and no step moves more than ids, lengths, places of rows and logits."""
    made = models(cache=form)
    rng = np.random.default_rng(5)
    head = rng.integers(0, VOCAB, 16).tolist()
    prompts = [head + rng.integers(0, VOCAB, n).tolist() for n in (1, 9, 3, 14, 5, 2, 11, 7)]
    limits = Limits(sequences=4, chunk=8, bucket=16, like=32, block=8)
    with ModelSessions(made, "trt") as sessions:
        sessions.open()
        scheduler = Scheduler(sessions, limits)
        assert scheduler.pool.memory is sessions.memory
        answers = [scheduler.submit(Request(tuple(p), 6 + i))[0] for i, p in enumerate(prompts)]
        most = 4 * ALIGNED + 16 * limits.chunk  # ids, lengths, last_token; places of rows, and whose
        reasons: set[str] = set()
        while not scheduler.idle:
            before = [(s.memory.uploaded, s.memory.downloaded) for s in engines.sessions]
            report = scheduler.step()
            reasons |= {reason for reason, size in report.copied.items() if size}
            after = [(s.memory.uploaded, s.memory.downloaded) for s in engines.sessions]
            moved = np.subtract(after, before).sum(axis=0)
            assert moved[0] <= most * 2
            assert moved[1] <= -(-4 * VOCAB * limits.sequences // ALIGNED) * ALIGNED * 2
        assert scheduler.pool.sequence_bytes == 0
    assert {"new", "prefix", "store", "swap"} <= reasons
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        alone = [step[0] for step in tokens(made, "ort", 6 + i, prompts=[prompt], chunk=8)]
        assert answer.new_tokens == alone


def test_a_budget_is_of_the_memory_that_the_cache_lies_in(memory: DeviceMemory) -> None:
    assert memory.available() == (1 << 33) + 200
    assert ServeOptions(Path("x")).limits(memory.available()).budget == memory.available() // 4
    assert ServeOptions(Path("x"), cache_budget=5).limits(memory.available()).budget == 5_000_000
    assert HOST.available() > 1 << 20


def test_options_of_a_gpu_are_refused_elsewhere(models: Callable[..., Export]) -> None:
    """By both commands that take them, before anything opens."""
    folder = str(models().folder)
    for command in (["generate", folder, "--tokens", "1,2"], ["serve", folder, "--port", "0"]):
        for words, said in ((["--no-cuda-graphs"], "--no-cuda-graphs with --backend ort: only trt, trt-rtx, ort-cuda"),
                            (["--weight-budget", "5"], "--weight-budget and --runtime-cache are TensorRT's")):
            result = CliRunner().invoke(cli, [*command, *words])
            assert isinstance(result.exception, InputError), result.output
            assert said in str(result.exception)


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


class FakeBinding:
    """Arrays of the device are the CPU's here."""

    def __init__(self, real: Any) -> None:
        self.real = real

    def bind_input(self, name: str, device: str, *rest: Any) -> None:
        self.bound(device)
        self.real.bind_input(name, "cpu", *rest)

    def bind_output(self, name: str, device: str, *rest: Any) -> None:
        self.bound(device)
        self.real.bind_output(name, "cpu", *rest)

    def bound(self, device: str) -> None:
        assert device == "cuda"


class FakeCuda:
    """ONNX Runtime whose CUDA provider is the CPU's; `runs` are the numbers of the graphs that it was told."""

    refuses: str | None = None

    def __init__(self, path: str, settings: Any, providers: list[Any]) -> None:
        ((name, options),) = providers
        assert name == "CUDAExecutionProvider"
        if self.refuses and "enable_cuda_graph" in options:
            raise RuntimeError(self.refuses)
        self.options = options
        settings.add_session_config_entry("session.disable_cpu_ep_fallback", "0")
        self.real = REAL(path, settings, providers=["CPUExecutionProvider"])
        self.runs: list[int | None] = []

    def io_binding(self) -> FakeBinding:
        return FakeBinding(self.real.io_binding())

    def run_with_iobinding(self, binding: FakeBinding, run: Any) -> None:
        try:
            self.runs.append(int(run.get_run_config_entry("gpu_graph_id")))
        except RuntimeError:
            self.runs.append(None)
        self.real.run_with_iobinding(binding.real)


REAL = onnxruntime.InferenceSession


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuTorch()
    monkeypatch.setattr(ort_cuda, "cuda_torch", lambda: device)
    monkeypatch.setattr(ort_cuda, "_require_cuda", lambda: None)
    monkeypatch.setattr(onnxruntime, "InferenceSession", FakeCuda)
    monkeypatch.setattr(FakeCuda, "refuses", None)


@pytest.mark.parametrize("form", ["append", "scatter"])
def test_onnx_runtime_on_the_device(form: str, models: Callable[..., Export], cuda: None,
                                    monkeypatch: pytest.MonkeyPatch) -> None:
    made = models(cache=form)
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime, "InferenceSession", REAL)
        expected = tokens(made, "ort")
    with Generator(made, "ort-cuda") as generator:
        found = [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)]
        session: Any = generator._sessions["decode"]
        assert found == expected
        assert session.no_graphs is None
        assert session._session.options == {"device_id": "0", "user_compute_stream": "7", "enable_cuda_graph": "1"}
        runs = session._session.runs
        assert len(runs) == 11
        # pieces of 3, 3 and 1 tokens, then 8 decode steps, which look like the last piece: one session serves both
        assert runs == [-1, 1, -1, *[2] * 8]
    monkeypatch.setattr(FakeCuda, "refuses", "This session cannot use the graph capture feature\nas requested")
    with Generator(made, "ort-cuda") as generator:
        assert [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)] == expected
        session = generator._sessions["decode"]
        assert session.no_graphs == "This session cannot use the graph capture feature"
        assert set(session._session.runs) == {None}
    monkeypatch.setattr(ort_cuda, "cuda_torch", lambda: None)
    # a torch without CUDA: arrays stay on the host
    monkeypatch.setattr(FakeBinding, "bound", lambda self, device: None)
    monkeypatch.setattr(FakeCuda, "run_with_iobinding", lambda self, b: self.real.run_with_iobinding(b.real))
    with Generator(made, "ort-cuda") as generator:
        assert [step.tokens for step in generator.generate(PROMPTS, 9, chunk=3)] == expected
        session = generator._sessions["decode"]
        assert (session.memory, session.no_graphs) == (HOST, "torch has no CUDA device")
    with open_session(made, "decode", "ort-cuda", load=LoadOptions(cuda_graphs=False)) as session:
        assert session.no_graphs == "not asked for"


def test_numbers_of_graphs_end(models: Callable[..., Export], cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime never forgets a graph, so there are only so many; later bindings run as they are."""
    monkeypatch.setattr(ort_cuda, "MOST_GRAPHS", 2)
    made = models()
    with open_session(made, "decode", "ort-cuda") as session:
        caches = [LatentCache(made, 1, rows, Staging(made, 1, session.memory), session.memory) for rows in (8, 16, 24)]
        for _ in range(3):
            for cache in caches:
                session.infer({"input_ids": np.array([[3]]), **cache.feed()}, cache.out(1, 1))
        assert session._session.runs == [-1, -1, -1, 1, 2, -1, 1, 2, -1]  # type: ignore[attr-defined]


def test_torch_on_the_cpu_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ort_cuda.cuda_torch() is None
