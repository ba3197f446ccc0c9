"""Every runtime behind one contract: feeds are checked alike, caches are bound or updated in place, never copied."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache as memo
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from engines import ort as ort_door
from engines import ort_cuda
from engines.__main__ import cli as engines_cli
from engines.backends import open_session
from engines.cache import LatentCache
from engines.session import Session, check_feed, output_shape
from exporter import console
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from tests.model_checkpoints import VOCAB, attentions, tiny_checkpoint

Array = np.ndarray[Any, Any]
Feed = dict[str, Array]
Make = Callable[..., Export]
Edit = Callable[[Feed], Any]

S_MAX, R, D = 24, 154, 512  # the article's row and hidden size
CACHES = ("append", "scatter", "concat")
LOCAL = ("ort", "interpreter")  # the sessions that run here


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports of the article's layer by their options, each made once and never changed."""

    @memo
    def once(options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("made") / "export"
        return export(ExportRequest("article", folder, **{"max_context": S_MAX, **dict(options)}))

    return lambda **options: once(tuple(sorted(options.items())))


@pytest.fixture(scope="session")
def opened(make: Make) -> Callable[..., Session]:
    """Sessions by cache form, kind, backend and formulation, each opened once."""

    @memo
    def once(cache: str, kind: str = "decode", backend: str = "ort", formulation: str | None = None) -> Session:
        return open_session(make(cache=cache), kind, backend, formulation)

    return once


def feed_of(cache: str, *, B: int = 2, T: int = 3, S: int = 6, lengths: list[int] | None = None, seed: int = 0) -> Feed:
    """A valid feed with random numbers in every row, also in those that the lengths hide."""
    rng = np.random.default_rng(seed)
    feed: Feed = {"hidden_states": rng.standard_normal((B, T, D), np.float32)}
    if cache != "none":
        default = [S] * B if cache == "concat" else [(5 * b + 4) % (S + 1) for b in range(B)]
        feed["past_lengths"] = np.array(default if lengths is None else lengths, np.int64)
    if cache in ("append", "concat"):
        feed["past_latent.0"] = rng.standard_normal((B, S, R), np.float32)
    if cache == "scatter":
        feed["latent_cache.0"] = rng.standard_normal((B, 1, S_MAX, R), np.float32)
    return feed


def copied(feed: Mapping[str, Array]) -> Feed:
    return {name: array.copy() for name, array in feed.items()}


def rel(found: Array, expected: Array) -> float:
    return float(np.abs(found.astype(np.float64) - expected).max() / expected.astype(np.float64).std())


# --- check_feed -------------------------------------------------------------------------------------------------------


def put(name: str, change: Callable[[Array], Array]) -> Edit:
    return lambda feed: feed.__setitem__(name, change(feed[name]))


def lengths(*values: int) -> Edit:
    return put("past_lengths", lambda a: np.array(values, np.int64))


def tokens(count: int) -> Edit:
    return put("hidden_states", lambda a: np.zeros((len(a), count, D), np.float32))


PAST, CACHE, HIDDEN, LENGTHS = "past_latent.0", "latent_cache.0", "hidden_states", "past_lengths"
WRONG: dict[str, tuple[str, Edit, str]] = {  # cache form, what is wrong, what is said
    "missing": ("append", lambda f: f.pop(PAST),
                r"feed has hidden_states, past_lengths; expected hidden_states, past_lengths, past_latent\.0$"),
    "extra": ("append", lambda f: f.update(mask=f[PAST]),
              r"feed has hidden_states, mask, past_latent\.0, past_lengths; expected hidden_states, past_lengths"),
    "another name": ("scatter", lambda f: f.update({PAST: f.pop(CACHE)}),
                     r"feed has .*past_latent\.0.*; expected hidden_states, past_lengths, latent_cache\.0$"),
    "no cache form": ("none", lambda f: f.update(past_lengths=np.zeros(2, np.int64)),
                      r"feed has hidden_states, past_lengths; expected hidden_states$"),
    "half": ("append", put(HIDDEN, lambda a: a.astype(np.float16)),
             r"hidden_states has dtype float16; expected float32$"),
    "double": ("append", put(PAST, lambda a: a.astype(np.float64)),
               r"past_latent\.0 has dtype float64; expected float32$"),
    "bfloat16": ("append", put(PAST, lambda a: a.astype(ml_dtypes.bfloat16)),
                 r"past_latent\.0 has dtype bfloat16; expected float32$"),
    "byte order": ("append", put(HIDDEN, lambda a: a.astype(">f4")),
                   r"hidden_states has dtype >f4; expected float32$"),
    "int32 lengths": ("scatter", put(LENGTHS, lambda a: a.astype(np.int32)),
                      r"past_lengths has dtype int32; expected int64$"),
    "rank 2": ("append", put(HIDDEN, lambda a: a[0]),
               r"hidden_states has shape \[3, 512\]; expected \[B, T, 512\]$"),
    "rank 3": ("scatter", put(CACHE, lambda a: a[:, 0]),
               r"latent_cache\.0 has shape \[2, 24, 154\]; expected \[B, 1, 24, 154\]$"),
    "lengths of rank 0": ("append", put(LENGTHS, lambda a: np.array(a[0])),
                          r"past_lengths has shape \[\]; expected \[B\]$"),
    "hidden size": ("append", put(HIDDEN, lambda a: a[..., :-1].copy()),
                    r"hidden_states has shape \[2, 3, 511\]; expected \[B, T, 512\]$"),
    "row": ("concat", put(PAST, lambda a: a[..., :128].copy()),
            r"past_latent\.0 has shape \[2, 6, 128\]; expected \[B, S, 154\]$"),
    "S_max": ("scatter", put(CACHE, lambda a: a[:, :, 1:].copy()),
              r"latent_cache\.0 has shape \[2, 1, 23, 154\]; expected \[B, 1, 24, 154\]$"),
    "heads in the cache": ("scatter", put(CACHE, lambda a: a.repeat(2, 1)),
                           r"latent_cache\.0 has shape \[2, 2, 24, 154\]; expected \[B, 1, 24, 154\]$"),
    "lengths of another batch": ("append", lengths(1, 2, 3),
                                 r"past_lengths has shape \[3\]; expected \[B\] with B = 2$"),
    "past of another batch": ("append", put(PAST, lambda a: a[:1]),
                              r"past_latent\.0 has shape \[1, 6, 154\]; expected \[B, S, 154\] with B = 2$"),
    "no tokens": ("append", tokens(0), r"hidden_states has shape \[2, 0, 512\]; every size must be at least 1"),
    "no rows": ("append", put(PAST, lambda a: a[:, :0]),
                r"past_latent\.0 has shape \[2, 0, 154\]; every size .*\(an empty past is S = 1 with length 0\)$"),
    "no sequences": ("append", lambda f: f.update({n: a[:0] for n, a in f.items()}),
                     r"hidden_states has shape \[0, 3, 512\]; every size must be at least 1"),
    "negative": ("append", lengths(0, -1), r"past_lengths \[0, -1\]; expected 0 to 6, the rows of past offered$"),
    "beyond S": ("append", lengths(7, 0), r"past_lengths \[7, 0\]; expected 0 to 6, the rows of past offered$"),
    "beyond S_max": ("scatter", lengths(25, 0),
                     r"past_lengths \[25, 0\]; expected 0 to 24, the rows of past offered$"),
    "negative in scatter": ("scatter", lengths(-1, 0), r"past_lengths \[-1, 0\]; expected 0 to 24"),
    "overflow": ("scatter", lengths(22, 0),
                 r"22 rows and 3 new tokens exceed S_max 24; prefill in smaller chunks or export with a larger"),
    "ragged concat": ("concat", lengths(6, 5),
                      r"past_lengths \[6, 5\] with S = 6; the concat form joins new rows at S, so every length"),
    "short concat": ("concat", lengths(5, 5),
                     r"past_lengths \[5, 5\] with S = 6; .*use the append form for ragged batches$"),
    "empty concat": ("concat", lengths(0, 0), r"past_lengths \[0, 0\] with S = 6; .*must be S \(or 0 with S = 1\)"),
    "long past": ("append", lambda f: f.update({PAST: np.zeros((2, 30, R), np.float32), LENGTHS: np.array([25, 0])}),
                  r"25 past rows; this export takes up to 24; export again with a larger --max-context$"),
    "read-only cache": ("scatter", lambda f: f[CACHE].setflags(write=False),
                        r"latent_cache\.0 is read-only; it is updated in place$"),
} | {f"too many tokens, {form}": (form, tokens(25), r"25 new tokens; this export takes up to 24; use smaller chunks or")
     for form in (*CACHES, "none")}


def exported(make: Make, form: str) -> Export:
    return make(causal=False) if form == "none" else make(cache=form)


@pytest.mark.parametrize("case", WRONG)
def test_wrong_feeds(case: str, make: Make) -> None:
    form, edit, pattern = WRONG[case]
    made = exported(make, form)
    feed = feed_of(form)
    graph = made.graph("prefill")
    assert check_feed(made, graph, feed)["T"] == 3  # as it is, it is good
    edit(feed)
    with pytest.raises(InputError, match=rf"^prefill\.qkt: .*{pattern}") as caught:
        check_feed(made, graph, feed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("backend", LOCAL)
def test_sessions_check_their_feed(backend: str, opened: Callable[..., Session]) -> None:
    session = opened("append", "decode", backend)
    feed = feed_of("append")
    with pytest.raises(InputError, match=r"decode\.qkt: past_lengths \[7, 0\]; expected 0 to 6"):
        session.infer(feed | {LENGTHS: np.array([7, 0])})
    assert set(session.infer(feed)) == {"attn_output", "new_latent.0"}


@pytest.mark.parametrize(("form", "options"), [
    ("append", {"S": 1, "lengths": [0, 0]}), ("append", {"S": 1, "lengths": [1, 0]}), ("append", {"S": 24, "T": 24}),
    ("append", {"S": 40, "lengths": [24, 0]}), ("scatter", {"lengths": [21, 0]}),
    ("scatter", {"T": 24, "lengths": [0, 0]}), ("concat", {"S": 1, "lengths": [0, 0]}),
    ("concat", {"S": 1, "lengths": [1, 1]}), ("concat", {"S": 24}), ("none", {"T": 24})])
def test_the_edges_are_good(form: str, options: dict[str, Any], make: Make) -> None:
    made, feed = exported(make, form), feed_of(form, **options)
    sizes = check_feed(made, made.graph("prefill"), feed)
    expected = {"B": 2, "T": options.get("T", 3)} | ({"S": options["S"]} if form in ("append", "concat") else {})
    assert sizes == expected


def test_output_shapes() -> None:
    assert output_shape(("B", "S+T", 7), {"B": 2, "T": 3, "S": 4}) == (2, 7, 7)
    assert output_shape((1, "T"), {"B": 2, "T": 3}) == (1, 3)


# --- ONNX Runtime -----------------------------------------------------------------------------------------------------


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The addresses that a session hands to ONNX Runtime."""
    addresses: dict[str, int] = {}
    real = ort_door.OrtSession._bind

    def spy(bind: Any, name: str, dtype: str, array: Array) -> None:
        addresses[name] = array.ctypes.data
        real(bind, name, dtype, array)

    monkeypatch.setattr(ort_door.OrtSession, "_bind", staticmethod(spy))
    return addresses


def test_a_prefix_of_a_buffer_is_bound_without_a_copy(bound: dict[str, int], opened: Callable[..., Session]) -> None:
    session, feed = opened("append"), feed_of("append", B=1, S=24, lengths=[7])
    buffer, whole = feed[PAST], copied(feed)
    found = session.infer(feed | {PAST: buffer[:, :7]})
    assert bound[PAST] == buffer.ctypes.data
    assert buffer[:, :7].base is not None
    assert buffer.tobytes() == whole[PAST].tobytes()
    owned = session.infer(feed | {PAST: buffer[:, :7].copy()})
    assert bound[PAST] != buffer.ctypes.data
    all_rows = session.infer(whole)
    for name in found:
        assert found[name].tobytes() == owned[name].tobytes()
        assert rel(found[name], all_rows[name]) < 1e-5


def test_a_strided_past_is_read_right(opened: Callable[..., Session]) -> None:
    """A prefix for two sequences is not contiguous: copied, or the second would read the first's hidden rows."""
    session, feed = opened("append"), feed_of("append", S=24, lengths=[7, 4])
    found, expected = session.infer(feed | {PAST: feed[PAST][:, :7]}), session.infer(feed)
    assert rel(found["attn_output"], expected["attn_output"]) < 1e-5


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_inputs_stay_and_outputs_are_fresh(kind: str, backend: str, opened: Callable[..., Session]) -> None:
    for cache in ("append", "concat"):
        session, feed = opened(cache, kind, backend), feed_of(cache)
        before = copied(feed)
        first = session.infer(feed)
        kept = copied(first)
        second = session.infer(feed | {HIDDEN: feed[HIDDEN] + 1})
        assert all(feed[n].tobytes() == before[n].tobytes() for n in feed)
        for name, array in first.items():
            assert array.tobytes() == kept[name].tobytes() != second[name].tobytes()
            assert not any(np.shares_memory(array, other) for other in (*second.values(), *feed.values()))


@pytest.mark.parametrize("backend", LOCAL)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_scatter_updates_in_place(kind: str, backend: str, opened: Callable[..., Session]) -> None:
    """The same array, new rows at each sequence's length, every other row as it was, bit for bit."""
    session, feed = opened("scatter", kind, backend), feed_of("scatter", lengths=[9, 0])
    cache, before = feed[CACHE], copied(feed)
    found = session.infer(feed)
    out = found["latent_cache_out.0"]
    assert set(found) == {"attn_output", "latent_cache_out.0"}
    assert (out.ctypes.data, out.shape, out.strides) == (cache.ctypes.data, cache.shape, cache.strides)
    written = np.zeros((2, S_MAX), bool)
    written[0, 9:12] = written[1, 0:3] = True
    assert cache[:, 0][~written].tobytes() == before[CACHE][:, 0][~written].tobytes()
    rows = {PAST: before[CACHE][:, 0, :9].copy(), HIDDEN: feed[HIDDEN], LENGTHS: feed[LENGTHS]}
    appended = opened("append", kind, backend).infer(rows)
    assert rel(cache[:, 0][written], appended["new_latent.0"].reshape(-1, R)) < 1e-5
    assert rel(found["attn_output"], appended["attn_output"]) < 3e-5
    assert all(feed[n].tobytes() == before[n].tobytes() for n in (HIDDEN, LENGTHS))


def test_scatter_in_onnx_runtime_needs_a_contiguous_cache(bound: dict[str, int],
                                                          opened: Callable[..., Session]) -> None:
    session, feed = opened("scatter"), feed_of("scatter", B=4, lengths=[1, 2, 3, 4])
    half = {n: a[::2] for n, a in feed.items()}
    before = feed[CACHE].copy()
    with pytest.raises(InputError, match=r"decode\.qkt: latent_cache\.0 must be contiguous, it is updated in place"):
        session.infer(half)
    assert feed[CACHE].tobytes() == before.tobytes()
    session.infer({n: a[:2] for n, a in feed.items()})  # a view that is contiguous is as good as an array
    assert bound[CACHE] == bound["latent_cache_out.0"] == feed[CACHE].ctypes.data
    assert feed[CACHE][:2].tobytes() != before[:2].tobytes()
    assert feed[CACHE][2:].tobytes() == before[2:].tobytes()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("formulation", ["kqt", "qkt", "attention"])
def test_the_same_feed_gives_the_same_bits(formulation: str, cache: str, opened: Callable[..., Session],
                                           make: Make) -> None:
    feed = feed_of(cache, T=5, S=17)
    session = opened(cache, "decode", "ort", formulation)
    first = copied(session.infer(copied(feed)))
    with open_session(make(cache=cache), "decode", "ort", formulation) as another:
        for found in (session.infer(copied(feed)), another.infer(copied(feed))):
            assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in first.items()}


@pytest.mark.parametrize("cache", CACHES)
def test_the_interpreter_agrees(cache: str, opened: Callable[..., Session]) -> None:
    feed = feed_of(cache)
    found, judged = (opened(cache, "decode", b).infer(copied(feed)) for b in LOCAL)
    assert {n: (a.dtype, a.shape) for n, a in found.items()} == {n: (a.dtype, a.shape) for n, a in judged.items()}
    assert all(rel(found[n], judged[n]) < 3e-5 for n in found)


@pytest.mark.parametrize(("dtype", "numpy"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_16_bit_sessions(dtype: str, numpy: Any, make: Make) -> None:
    made = make(dtype=dtype)
    feed = feed_of("append")
    half = {n: a if n == LENGTHS else a.astype(numpy) for n, a in feed.items()}
    expected = open_session(make(), "decode", "ort").infer(feed)
    for backend in LOCAL:
        if (dtype, backend) == ("bf16", "ort"):
            pattern = (r"^decode\.qkt\.onnx: ONNX Runtime's CPU has no bfloat16 products; export with --dtype fp32 or "
                       r"fp16 for it, or use --backend interpreter or a GPU$")
            with pytest.raises(InputError, match=pattern) as caught:
                open_session(made, "decode", backend)
            assert "\n" not in str(caught.value)
            continue
        found = open_session(made, "decode", backend).infer(half)
        for name, array in found.items():
            assert array.dtype == np.dtype(numpy)
            assert rel(array, expected[name]) < (2e-2 if dtype == "fp16" else 0.15)


# --- What cannot run here ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["trt-rtx", "trt"])
def test_tensorrt_without_a_gpu(backend: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said first, whether or not engines were built."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    pattern = rf"^not run: no CUDA device; {backend} engines build here but run only on a GPU$"
    for formulation in (None, "kqt"):
        with pytest.raises(InputError, match=pattern):
            open_session(make(target="trt-rtx"), "decode", backend, formulation)


def test_onnx_runtime_without_cuda(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort_cuda, "cuda_available", lambda: False)
    pattern = (r"^ort-cuda: ONNX Runtime here \(onnxruntime(-gpu)? 1\.\S+.*\) has no CUDAExecutionProvider; on a "
               r"machine with a GPU: pip uninstall onnxruntime; pip install --force-reinstall onnxruntime-gpu$")
    with pytest.raises(InputError, match=pattern):
        open_session(make(), "decode", "ort-cuda")


def test_unknown_doors(make: Make) -> None:
    made = make()
    with pytest.raises(InputError, match=r"--backend 'cpu': expected one of ort, trt, trt-rtx .*ort-cuda, interpreter"):
        open_session(made, "decode", "cpu")
    with pytest.raises(InputError, match=r"no decode graph of formulation expanded; present: prefill\.qkt, .*decode"):
        open_session(made, "decode", "ort", "expanded")
    with pytest.raises(InputError, match=r"no decode graph; present: prefill\.qkt"):
        open_session(make(causal=False), "decode", "ort")


# --- LatentCache ------------------------------------------------------------------------------------------------------


def steps(batch: int) -> list[tuple[str, Array]]:
    """A prefill of 5 tokens, a second chunk of 4, three decode steps."""
    rng = np.random.default_rng(1)
    return [("prefill" if T > 1 else "decode", rng.standard_normal((batch, T, D), np.float32)) for T in (5, 4, 1, 1, 1)]


def play(made: Export, opened: Callable[..., Session], capacity: int | None,
         counts: list[list[int]] | None = None, batch: int = 2) -> tuple[LatentCache, list[Array]]:
    """Feed, step, commit; `counts` says how many new tokens of each step are real."""
    cache, outputs = LatentCache(made, batch, capacity), []
    for i, (kind, hidden) in enumerate(steps(batch)):
        found = opened(made.cache, kind).infer({HIDDEN: hidden, **cache.feed()})
        cache.commit(found, hidden.shape[1] if counts is None else np.array(counts[i]))
        outputs.append(found["attn_output"])
    return cache, outputs


@pytest.mark.parametrize("capacity", [None, 12, 24])
def test_the_three_forms_reach_the_same_rows(capacity: int | None, make: Make, opened: Callable[..., Session]) -> None:
    made = {form: play(make(cache=form), opened, capacity) for form in CACHES}
    expected, outputs = made["append"]
    for form, (cache, found) in made.items():
        assert cache.lengths.tolist() == [12, 12]
        assert rel(cache.rows[:, :12], expected.rows[:, :12]) < 1e-5
        assert all(rel(a, b) < 3e-5 for a, b in zip(found, outputs, strict=True))
        rows = {"append": capacity or S_MAX, "scatter": S_MAX, "concat": 12}[form]
        assert cache.rows.shape == (2, rows, R)
        assert cache.nbytes == 2 * rows * R * 4
        if form != "concat":
            assert not cache.rows[:, 12:].any()  # zero until written


@pytest.mark.parametrize(("dtype", "itemsize"), [("fp16", 2), ("bf16", 2)])
def test_a_16_bit_cache_takes_half_the_bytes(dtype: str, itemsize: int, make: Make) -> None:
    assert LatentCache(make(dtype=dtype), 3, 10).nbytes == 3 * 10 * R * itemsize


def test_ragged_counts(make: Make, opened: Callable[..., Session]) -> None:
    """Right padding is not kept: each sequence goes on as if alone."""
    counts = [[5, 3], [0, 4], [1, 1], [1, 0], [1, 1]]
    made = {form: play(make(cache=form), opened, None, counts)[0] for form in ("append", "scatter")}
    assert [c.lengths.tolist() for c in made.values()] == [[8, 9], [8, 9]]
    for b, length in enumerate((8, 9)):
        assert rel(made["append"].rows[b, :length], made["scatter"].rows[b, :length]) < 1e-5
        alone = LatentCache(make(cache="concat"), 1)
        for (kind, hidden), count in zip(steps(2), counts, strict=True):
            if count[b]:
                own = hidden[b:b + 1, :count[b]]
                alone.commit(opened("concat", kind).infer({HIDDEN: own, **alone.feed()}), count[b])
        assert alone.rows.shape[1] == length
        assert rel(alone.rows[0], made["append"].rows[b, :length]) < 1e-5


@pytest.mark.parametrize(("multiple", "rows"), [(1, (1, 7, 19)), (4, (4, 8, 20)), (16, (16, 16, 20))])
def test_append_binds_a_prefix_of_the_buffer_for_one_sequence(make: Make, multiple: int, rows: Sequence[int]) -> None:
    made = make()
    cache = LatentCache(Export(made.folder, made.data | {"row_multiple": multiple}, made.config, made.graphs), 1, 20)
    for length, offered in zip((0, 7, 19), rows, strict=True):  # an empty past is one row, or as few as can be
        cache.lengths[:] = length
        prefix = cache.feed()[PAST]
        assert (prefix.shape, prefix.ctypes.data) == ((1, offered, R), cache.rows.ctypes.data)
        assert prefix.flags.c_contiguous
    two = LatentCache(make(), 2, 20)
    assert two.feed()[PAST].shape == (2, 20, R)  # a prefix of two would have to be copied
    lengths = two.feed()[LENGTHS]
    lengths += 1
    assert not two.lengths.any()  # a feed does not change as the cache grows


def test_scatter_feeds_its_own_buffer(make: Make) -> None:
    cache = LatentCache(make(cache="scatter"), 2)
    assert np.shares_memory(cache.feed()[CACHE], cache.rows)
    assert cache.feed()[CACHE].shape == (2, 1, S_MAX, R)


def test_a_bidirectional_export_has_no_cache_to_feed(make: Make) -> None:
    assert LatentCache(make(causal=False), 2).feed() == {}


def outputs_of(form: str, T: int, S: int) -> Feed:
    """What a step of T tokens over S rows returns, every row marked by its place."""
    found = {"attn_output": np.zeros((2, T, D), np.float32)}
    if form == "append":
        found["new_latent.0"] = np.ones((2, T, R), np.float32) * np.arange(1, T + 1)[:, None]
    if form == "concat":
        found["present_latent.0"] = np.ones((2, S + T, R), np.float32) * np.arange(S + T)[:, None]
    return found


def test_concat_drops_its_dummy_row(make: Make) -> None:
    cache = LatentCache(make(cache="concat"), 2)
    assert cache.feed()[PAST].shape == (2, 1, R)
    cache.commit(outputs_of("concat", 3, 1), 0)
    assert cache.feed()[PAST].shape == (2, 1, R)  # nothing kept: it stays
    cache.commit(outputs_of("concat", 3, 1), 2)
    assert cache.rows[:, :, 0].tolist() == [[1, 2]] * 2  # row 0 was the dummy, row 3 padding
    cache.commit(outputs_of("concat", 3, 2), 3)
    assert cache.rows[:, :, 0].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert cache.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("form", CACHES)
@pytest.mark.parametrize(("counts", "pattern"), [
    (4, r"\[4, 4\] new rows to keep; expected 0 to 3, the new tokens of the step"),
    (-1, r"\[-1, -1\] new rows to keep; expected 0 to 3"), ([3, 4], r"\[3, 4\] new rows to keep; expected 0 to 3")])
def test_no_more_rows_than_the_step_made(counts: Any, pattern: str, form: str, make: Make) -> None:
    cache = LatentCache(make(cache=form), 2)
    with pytest.raises(InputError, match=pattern):
        cache.commit(outputs_of(form, 3, 1), np.array(counts))
    assert not cache.lengths.any()
    assert not cache.rows.any()


def test_one_token_is_not_spread_over_several_rows(make: Make) -> None:
    cache = LatentCache(make(), 2)
    with pytest.raises(InputError, match=r"expected 0 to 1, the new tokens of the step"):
        cache.commit(outputs_of("append", 1, 1), 3)
    assert not cache.rows.any()


@pytest.mark.parametrize(("form", "capacity", "limit"), [("append", 5, 5), ("concat", 5, 5), ("append", None, S_MAX),
                                                         ("scatter", None, S_MAX), ("scatter", 5, S_MAX)])
def test_capacity(form: str, capacity: int | None, limit: int, make: Make) -> None:
    cache = LatentCache(make(cache=form), 2, capacity)
    cache.commit(outputs_of(form, limit, 1), limit - 1)
    before = cache.rows.copy()
    pattern = rf"\[{limit - 1}, {limit - 1}\] rows and \[2, 2\] new ones exceed the capacity of {limit};"
    with pytest.raises(InputError, match=pattern):
        cache.commit(outputs_of(form, 2, limit - 1), 2)
    assert cache.lengths.tolist() == [limit - 1] * 2
    assert cache.rows.tobytes() == before.tobytes()
    cache.commit(outputs_of(form, 2, limit - 1), 1)
    assert cache.lengths.tolist() == [limit] * 2


def test_concat_keeps_one_length(make: Make) -> None:
    cache = LatentCache(make(cache="concat"), 2)
    with pytest.raises(InputError, match=r"concat keeps one length for all; new tokens \[3, 2\] differ"):
        cache.commit(outputs_of("concat", 3, 1), np.array([3, 2]))
    assert not cache.lengths.any()


@pytest.mark.parametrize(("options", "pattern"), [
    ({"batch": 0}, r"batch is 0; expected at least 1"),
    ({"batch": 1, "capacity": 0}, r"capacity is 0 rows; expected 1 to 24"),
    ({"batch": 1, "capacity": 25}, r"capacity is 25 rows; expected 1 to 24, the export's max-context")])
@pytest.mark.parametrize("form", CACHES)
def test_bad_sizes(options: dict[str, int], pattern: str, form: str, make: Make) -> None:
    with pytest.raises(InputError, match=pattern):
        LatentCache(make(cache=form), **options)


@pytest.mark.parametrize("form", CACHES)
def test_load(form: str, make: Make, opened: Callable[..., Session]) -> None:
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((2, 6, R), np.float32)
    cache = LatentCache(make(cache=form), 2, 10)
    cache.load(rows, np.array([6, 6]))
    assert cache.rows[:, :6].tobytes() == rows.tobytes()
    assert not np.shares_memory(cache.rows, rows)
    hidden = rng.standard_normal((2, 1, D), np.float32)
    found = opened(form).infer({HIDDEN: hidden, **cache.feed()})
    expected = opened("append").infer({HIDDEN: hidden, PAST: rows, LENGTHS: np.array([6, 6])})
    assert rel(found["attn_output"], expected["attn_output"]) < 3e-5
    room = S_MAX if form == "scatter" else 10
    for shape in ((1, 6, R), (2, 6, R - 1), (2, room + 1, R), (6, R)):
        message = re.escape(f"rows have shape {list(shape)}; expected [2, S, 154], S at most the capacity, {room}")
        with pytest.raises(InputError, match=message):
            cache.load(np.zeros(shape, np.float32), np.array([1, 1]))


def test_only_shape_arithmetic_may_lie_on_the_cpu(tmp_path: Path) -> None:
    """What ort-cuda checks after opening: an index range may stay on the host, a product may not."""
    import onnx

    from engines.ort_cuda import misplaced
    from exporter.export import ExportRequest, export

    made = export(ExportRequest("article", tmp_path / "x", max_context=64))
    path = made.folder / made.graph("decode").file
    nodes = [(n.name, n.op_type) for n in onnx.load(path, load_external_data=False).graph.node]
    shapes = [(name, op) for name, op in nodes if name.startswith("shapes/") and op in ("Shape", "Squeeze", "Range")]
    assert len(shapes) >= 4
    assert misplaced(path, shapes) == []
    assert misplaced(path, [*shapes, ("core/softmax", "Softmax")]) == ["core/softmax (Softmax)"]
    assert misplaced(path, [("fused_by_the_optimizer", "FusedMatMul")]) == ["fused_by_the_optimizer (FusedMatMul)"]
    floats = {name for name, op in nodes if op in ("Gemm", "MatMul", "Softmax", "Where", "RotaryEmbedding", "Less")}
    assert {m.split(" ")[0] for m in misplaced(path, nodes)} >= floats


# --- Whole models -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports of a tiny DeepSeek-V3 by their options, each made once and never changed."""
    folder = tmp_path_factory.mktemp("model")
    checkpoint = tiny_checkpoint(folder / "checkpoint", "v3")

    @memo
    def once(options: tuple[tuple[str, Any], ...]) -> Export:
        out = folder / "-".join(["export", *(str(value) for _, value in options)])
        return export(ExportRequest(str(checkpoint), out, **{"max_context": S_MAX, **dict(options)}))

    return lambda **options: once(tuple(sorted(options.items())))


def model_feed(made: Export, kind: str = "prefill", B: int = 2, T: int = 5) -> Feed:
    """A first step of B sequences of T ids."""
    feed: Feed = {"input_ids": np.arange(B * T).reshape(B, T) % VOCAB, **LatentCache(made, B).feed()}
    return feed | ({"last_token": np.full(B, T - 1, np.int64)} if kind == "prefill" else {})


WRONG_MODEL_FEEDS: dict[str, tuple[Edit, str]] = {
    "beyond the vocabulary": (put("input_ids", lambda a: a + VOCAB - 5),
                              rf"input_ids reaches from {VOCAB - 5} to {VOCAB + 4}; expected 0 to {VOCAB - 1}, the "
                              r"vocabulary's ids$"),
    "a negative id": (put("input_ids", lambda a: a - 1), rf"input_ids reaches from -1 to 8; expected 0 to {VOCAB - 1}"),
    "int32 ids": (put("input_ids", lambda a: a.astype(np.int32)), r"input_ids has dtype int32; expected int64$"),
    "no ids": (put("input_ids", lambda a: a[:, :0]), r"input_ids has shape \[2, 0\]; every size must be at least 1"),
    "ids of rank 1": (put("input_ids", lambda a: a[0]), r"input_ids has shape \[5\]; expected \[B, T\]$"),
    "a list of ids": (lambda f: f.update(input_ids=[[1, 2], [3, 4]]),
                      r"input_ids is a list; expected a NumPy array \[B, T\] of int64$"),
    "no array of lengths": (lambda f: f.update(past_lengths=0),
                            r"past_lengths is a int; expected a NumPy array \[B\] of int64$"),
    "embeddings for ids": (lambda f: f.update(hidden_states=f.pop("input_ids")),
                           r"feed has hidden_states, .*; expected input_ids, past_lengths, past_latent.0, "),
    "last token beyond": (put("last_token", lambda a: a + 1),
                          r"last_token reaches from 5 to 5; expected 0 to 4, an index into the T new tokens$"),
    "last token negative": (put("last_token", lambda a: a - [5, 0]),
                            r"last_token reaches from -1 to 4; expected 0 to 4, an index into"),
    "last token of one": (put("last_token", lambda a: a[:1]),
                          r"last_token has shape \[1\]; expected \[B\] with B = 2$"),
    "one cache short": (lambda f: f.pop("past_latent.2"), r"feed has .*; expected input_ids, .*past_latent.2"),
}


@pytest.mark.parametrize("case", WRONG_MODEL_FEEDS)
@pytest.mark.parametrize("backend", LOCAL)
def test_wrong_feeds_of_a_model(case: str, backend: str, model: Make) -> None:
    edit, pattern = WRONG_MODEL_FEEDS[case]
    feed = model_feed(model())
    with open_session(model(), "prefill", backend) as session:
        assert session.infer(feed)["logits"].shape == (2, VOCAB)  # as it is, it is good
        edit(feed)
        with pytest.raises(InputError, match=rf"^prefill\.qkt: {pattern}") as caught:
            session.infer(feed)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("cache", CACHES)
def test_counts_of_another_batch(cache: str, model: Make) -> None:
    made = model(cache=cache)
    kept = LatentCache(made, 2)
    assert len(kept.layers) == attentions("v3")
    with open_session(made, "prefill", "ort") as session:
        found = session.infer(model_feed(made) | kept.feed())
    for counts in ([1, 2, 3], [5], [[5, 5]]):
        message = rf"^counts have shape {re.escape(str(list(np.shape(counts))))}; expected \[2\], one per sequence$"
        with pytest.raises(InputError, match=message):
            kept.commit(found, np.array(counts))
        assert not kept.lengths.any()
    kept.commit(found, np.array([5, 5]))
    assert kept.lengths.tolist() == [5, 5]


@pytest.mark.parametrize("backend", LOCAL)
def test_an_export_without_weights_opens_no_session(backend: str, model: Make, make: Make) -> None:
    for made in (model(weights="none"), make(weights="none")):
        with pytest.raises(InputError, match=r": exported with --weights none, its graphs have no weights to run with; "
                                             r"export with --weights copy or link$"):
            open_session(made, "decode", backend)


def test_weights_that_lie_elsewhere(model: Make, tmp_path: Path) -> None:
    """ONNX Runtime gets them handed over; the interpreter reads only what lies with the graphs, and says so."""
    made = model(weights="link")
    expected = open_session(made, "prefill", "ort").infer(model_feed(made))["logits"]
    linked = {name: record | {"how": "handed"} for name, record in made.data["weights"]["linked"].items()}
    assert linked
    handed = Export(made.folder, made.data | {"weights": made.data["weights"] | {"linked": linked}}, made.config,
                    made.graphs)
    assert open_session(handed, "prefill", "ort").infer(model_feed(made))["logits"].tobytes() == expected.tobytes()
    pattern = r": its weights lie in /.*/model.safetensors, where the interpreter does not read them; export with"
    with pytest.raises(InputError, match=pattern):
        open_session(handed, "prefill", "interpreter")


BF16 = (r"ONNX Runtime's CPU has no bfloat16 products; export with --dtype fp32 or fp16 for it, or use --backend "
        r"interpreter or a GPU$")


def test_a_bf16_model_in_onnx_runtime(model: Make) -> None:
    with pytest.raises(InputError, match=r"^prefill\.qkt\.onnx: " + BF16):
        open_session(model(dtype="bf16"), "prefill", "ort")


@pytest.mark.parametrize(("options", "pattern"), [
    ({"dtype": "bf16"}, BF16),
    ({"weights": "none"}, r"exported with --weights none, its graphs have no weights to run with; export with ")])
def test_engines_that_cannot_be_built(options: dict[str, str], pattern: str, model: Make, make: Make,
                                      monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for made in (model(**options), make(**options)):
        argv = ["engines", "build", str(made.folder), "--backend", "ort", "--json"]
        monkeypatch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            console.main(engines_cli, "python -m engines")
        out, err = capsys.readouterr()
        assert end.value.code == 2
        assert re.search(rf"^error: {re.escape(str(made.folder))}: {pattern}", err.rstrip("\n")), err
        assert err.count("\n") == 1
        assert json.loads(out) == {"error": err.removeprefix("error: ").rstrip("\n")}
        assert not (made.folder / "engines").exists()
        assert open_export(made.folder).graphs == made.graphs
