"""The rules of the latent-cache contract, on narrow seeded layers, over every graph that an export holds.

Each rule is a function that says whether it holds; a planted fault shows that it can say no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from engines.backends import BACKENDS
from engines.cache import LatentCache
from engines.interpreter_session import InterpreterSession
from engines.ort import OrtOptions, OrtSession
from engines.session import Outputs, Session
from exporter.config import MLAConfig
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export, GraphEntry
from exporter.presets import PRESETS
from exporter.rope import BLOCK, frequencies, tables
from validate.faults import FAULTS
from validate.metrics import BETWEEN_RUNS, TOLERANCES, compare
from validate.parity import replay
from validate.references import load_tensors
from validate.traces import Trace, TraceMaker

REL = BETWEEN_RUNS.rel
BROKEN = 1e-2  # what a fault must exceed
MODEL = "narrow-v3"
D_C, D_R = 32, 16
LENGTHS = (0, 1, 7, 12)  # of a ragged batch
COUNTS = (5, 3, 1, 4)  # real tokens of its right-padded prompts
CONTEXT = 40
PREFILL = {"absorbed": ("qkt", "kqt", "attention"), "expanded": ("expanded", "expanded-attention")}
GRAPHS = [f"{kind}.{name}" for kind, form in (("prefill", "absorbed"), ("prefill", "expanded"), ("decode", "absorbed"))
          for name in PREFILL[form]]
FORMS = ("append", "scatter", "concat")
Make = Callable[..., Export]


def narrow(name: str, **changes: Any) -> MLAConfig:
    """A preset's attention with its RoPE at small sizes, every one of them different."""
    return replace(PRESETS[name], **({"hidden_size": 96, "num_attention_heads": 4, "q_lora_rank": 40,
                                      "kv_lora_rank": D_C, "qk_nope_head_dim": 24, "qk_rope_head_dim": D_R,
                                      "v_head_dim": 20} | changes))


@pytest.fixture(scope="module", autouse=True)
def presets() -> Iterator[None]:
    """The narrow layers as presets."""
    longrope = replace(PRESETS["minicpm3-4b"].rope, original_max_position_embeddings=4096,
                       short_factor=(1.0,) * 8, long_factor=tuple(1.0 + 1.7 * i for i in range(8)))
    layers = {MODEL: narrow("deepseek-v3"), f"{MODEL}-1": narrow("deepseek-v3", num_attention_heads=1),
              f"{MODEL}-3": narrow("deepseek-v3", num_attention_heads=3, q_lora_rank=None),
              "narrow-glm": narrow("glm-4.7-flash"), "narrow-longrope": narrow("minicpm3-4b", rope=longrope)}
    with pytest.MonkeyPatch.context() as patch:
        for name, config in layers.items():
            patch.setitem(PRESETS, name, config)
        yield


@pytest.fixture(scope="module")
def make(presets: None, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports by their options, each made once."""
    exports: dict[str, Export] = {}

    def made(model: str = MODEL, tamper: Tamper | None = None, **options: Any) -> Export:
        key = repr((model, id(tamper), sorted(options.items())))
        if key not in exports:
            out = tmp_path_factory.mktemp("export") / "x"
            request = ExportRequest(model, out, **{"max_context": CONTEXT} | options)
            exports[key] = export(request, tamper=tamper)
        return exports[key]

    return made


SESSIONS = {
    "ort": lambda made, graph: OrtSession(made, graph, OrtOptions(threads=1)),
    "interpreter": InterpreterSession,
}
Opened = Callable[..., Session]


@pytest.fixture(scope="module")
def opened() -> Opened:
    """Sessions by graph and backend, each opened once."""
    sessions: dict[tuple[Path, str, str], Session] = {}

    def session(made: Export, graph: GraphEntry, backend: str = "ort") -> Session:
        key = made.folder, graph.name, backend
        if key not in sessions:
            sessions[key] = SESSIONS[backend](made, graph)
        return sessions[key]

    return session


def graph_of(make: Make, name: str, **options: Any) -> tuple[Export, GraphEntry]:
    """An export that holds the graph `name`, and the graph."""
    kind, formulation = name.split(".")
    made = make(prefill="expanded" if formulation.startswith("expanded") else "absorbed", **options)
    return made, made.graph(kind, formulation)


def draw(made: Export, *shape: int, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng([seed, 23]).standard_normal(shape, dtype=np.float32)
    return values.astype(LatentCache(made, 1).rows.dtype)


def hidden_of(made: Export, batch: int, tokens: int, seed: int = 0) -> np.ndarray:
    return draw(made, batch, tokens, made.config.hidden_size, seed=seed)


def held(made: Export, lengths: Sequence[int], *, tail: np.ndarray | float = 0.0, room: int = 8) -> LatentCache:
    """A cache whose sequences hold random rows of `lengths`, and `tail` where nothing was written."""
    batch, longest = len(lengths), max(lengths)
    cache = LatentCache(made, batch, min(CONTEXT, longest + room) if made.cache == "append" else None)
    rows = draw(made, batch, max(longest, 1), made.config.row_dim, seed=1)
    if made.cache == "concat":
        assert len(set(lengths)) == 1
        if longest == 0:
            rows[:] = tail  # the dummy row of an empty past
        cache.load(rows, np.array(lengths))
        return cache
    cache.rows[:] = tail
    for b, n in enumerate(lengths):
        cache.rows[b, :n] = rows[b, :n]
    cache.lengths[:] = lengths
    return cache


def step(session: Session, cache: LatentCache, hidden: np.ndarray, counts: Sequence[int] | None = None) -> Outputs:
    """One call; the rows of `counts` tokens are kept."""
    outputs = session.infer({"hidden_states": np.ascontiguousarray(hidden), **cache.feed()})
    cache.commit(outputs, hidden.shape[1] if counts is None else np.array(counts))
    return outputs


def valid_rows(cache: LatentCache) -> list[np.ndarray]:
    return [cache.rows[b, :n].copy() for b, n in enumerate(cache.lengths)]


def same_bits(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(a, b, strict=True))


# --- Faults to plant: masks that let everything through, positions that forget the past ------------------------------


def _let_through(suffix: str) -> Tamper:
    """Every mask whose node is named `suffix` becomes all true."""
    def plant(model: onnx.ModelProto) -> None:
        nodes = model.graph.node
        found = [i for i, n in enumerate(nodes) if n.name.endswith(suffix)]
        assert found, f"no node is called {suffix}"
        for i in reversed(found):
            output = nodes[i].output[0]
            nodes[i].output[0] = f"{output}_lost"
            nodes.insert(i + 1, helper.make_node("Not", [f"{output}_lost"], [f"{output}_not"], f"{output}_not"))
            nodes.insert(i + 2, helper.make_node("Or", [f"{output}_lost", f"{output}_not"], [output], f"{output}_all"))

    return Tamper(graph=plant)


def _forget_positions(model: onnx.ModelProto) -> None:
    """RoPE counts every call's tokens from 0."""
    nodes = model.graph.node
    i = next(i for i, n in enumerate(nodes) if n.name == "rope/position")
    model.graph.initializer.append(helper.make_tensor("fault/zero", TensorProto.INT64, [1], [0]))
    nodes.insert(i, helper.make_node("Mul", [nodes[i].input[0], "fault/zero"], ["fault/offset"], "fault/offset"))
    nodes[i + 1].input[0] = "fault/offset"


SEE_TAIL, SEE_FUTURE = _let_through("within_length"), _let_through("/causal")
FORGET = Tamper(graph=_forget_positions)


# --- Rule 1: rows beyond the length never matter ---------------------------------------------------------------------


def tail_is_ignored(session: Session, made: Export, tail: np.ndarray | float, tokens: int) -> bool:
    """Outputs, new rows and kept rows, bit for bit, with `tail` and with zeros where nothing was written."""
    def play(fill: np.ndarray | float) -> list[np.ndarray]:
        lengths = (0, 0, 0, 0) if made.cache == "concat" else LENGTHS
        cache = held(made, lengths, tail=fill)
        outputs = step(session, cache, hidden_of(made, 4, tokens))
        found = [outputs["attn_output"], *valid_rows(cache)]
        assert all(np.isfinite(x.astype(np.float32)).all() for x in found)
        return found

    return same_bits(play(tail), play(0.0))


def extremes(info: Any) -> np.ndarray:
    """One row of the largest and the smallest finite numbers: its scores are inf or NaN before the mask."""
    values = [float(info.max), float(info.min), float(info.smallest_subnormal), 0.0]
    return np.random.default_rng(5).choice(values, D_C + D_R)


@pytest.mark.parametrize("backend", ["ort", "interpreter"])
@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_rule_1_tail(make: Make, opened: Opened, name: str, cache: str, backend: str) -> None:
    made, graph = graph_of(make, name, cache=cache)
    session = opened(made, graph, backend)
    for tail in (1e4, -3e4, 1e30, extremes(np.finfo(np.float32))):
        assert tail_is_ignored(session, made, tail, 1 if graph.kind == "decode" else 3)


@pytest.mark.parametrize(("dtype", "backend"), [("fp16", "interpreter"), ("bf16", "interpreter"), ("fp16", "ort")])
@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", ["decode.kqt", "decode.qkt", "decode.attention", "prefill.expanded"])
def test_rule_1_tail_16_bit(make: Make, opened: Opened, name: str, cache: str, dtype: str, backend: str) -> None:
    made, graph = graph_of(make, name, cache=cache, dtype=dtype)
    for tail in (1e4, -3e4, extremes(ml_dtypes.finfo(LatentCache(made, 1).rows.dtype))):  # scores overflow float16
        assert tail_is_ignored(opened(made, graph, backend), made, tail, 2)


@pytest.mark.parametrize("name", ["decode.kqt", "decode.qkt", "decode.attention", "prefill.expanded"])
def test_rule_1_can_fail(make: Make, opened: Opened, name: str) -> None:
    made, graph = graph_of(make, name, tamper=SEE_TAIL)
    assert not tail_is_ignored(opened(made, graph), made, 3.0, 2)


@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", ["decode.kqt", "decode.qkt"])
def test_rows_within_the_length_do_matter(make: Make, opened: Opened, name: str, cache: str) -> None:
    """One number of the last valid row, changed, reaches that sequence's output and no other's."""
    made, graph = graph_of(make, name, cache=cache)
    found = []
    for change in (0.0, 0.5):
        rows = held(made, (7, 7, 7))
        rows.rows[1, 6, 3] += change
        found.append(step(opened(made, graph), rows, hidden_of(made, 3, 1))["attn_output"])
    assert [np.array_equal(a, b) for a, b in zip(*found, strict=True)] == [True, False, True]


# --- Rule 2: a ragged batch is its sequences -------------------------------------------------------------------------


def ragged_rel(session: Session, made: Export) -> float:
    """The largest rel, of outputs and rows, between a ragged batch (a prompt, two tokens) and each sequence alone."""
    together, rels = held(made, LENGTHS, tail=1e4), []
    first, second = hidden_of(made, 4, 5), hidden_of(made, 4, 2, seed=2)
    outputs = [step(session, together, first, COUNTS)["attn_output"], step(session, together, second)["attn_output"]]
    for b, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        alone = held(made, (length,))
        alone.rows[0, :length] = held(made, LENGTHS).rows[b, :length]
        for hidden, found in ((first[b:b + 1, :count], outputs[0][b, :count]), (second[b:b + 1], outputs[1][b])):
            rels.append(compare(found, step(session, alone, hidden)["attn_output"][0]).rel)
        assert len(valid_rows(alone)[0]) == length + count + 2
        rels.append(compare(valid_rows(together)[b], valid_rows(alone)[0]).rel)
    return max(rels)


@pytest.mark.parametrize("cache", ["append", "scatter"])
@pytest.mark.parametrize("name", GRAPHS)
def test_rule_2_ragged_equals_alone(make: Make, opened: Opened, name: str, cache: str) -> None:
    made, graph = graph_of(make, name, cache=cache)
    assert ragged_rel(opened(made, graph), made) <= REL


@pytest.mark.parametrize("name", GRAPHS)
def test_rule_2_can_fail(make: Make, opened: Opened, name: str) -> None:
    made, graph = graph_of(make, name, tamper=SEE_TAIL)
    assert ragged_rel(opened(made, graph), made) > BROKEN


# --- Rules 3 and 7: chunks of any size, by any graph, over one cache -------------------------------------------------

TOKENS = 29


def whole(made: Export, opened: Opened, graph: GraphEntry) -> tuple[np.ndarray, list[np.ndarray]]:
    cache = held(made, (0, 0), room=TOKENS)
    outputs = step(opened(made, graph), cache, hidden_of(made, 2, TOKENS))["attn_output"]
    return outputs, valid_rows(cache)


def chunked_rel(made: Export, opened: Opened, plan: Sequence[tuple[GraphEntry, int]]) -> float:
    """The largest rel, of outputs and rows, between `plan` and the default prefill in one piece."""
    expected, expected_rows = whole(made, opened, made.graph("prefill"))
    cache, hidden, start, rels = held(made, (0, 0), room=TOKENS), hidden_of(made, 2, TOKENS), 0, []
    for graph, size in plan:
        found = step(opened(made, graph), cache, hidden[:, start:start + size])["attn_output"]
        rels.append(compare(found, expected[:, start:start + size]).max_abs / float(expected.std()))
        start += size
    assert start == TOKENS
    assert cache.lengths.tolist() == [TOKENS, TOKENS]
    return max(rels + [compare(a, b).rel for a, b in zip(valid_rows(cache), expected_rows, strict=True)])


def random_plan(made: Export, seed: int) -> list[tuple[GraphEntry, int]]:
    """Chunks of random sizes, single tokens among them, each by a random graph of either kind."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, TOKENS), rng.integers(1, 9), replace=False))
    return [(made.graphs[rng.integers(len(made.graphs))], int(n)) for n in np.diff([0, *cuts, TOKENS])]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("cache", FORMS)
def test_rule_3_chunks_are_invisible(make: Make, opened: Opened, cache: str, prefill: str, seed: int) -> None:
    made = make(cache=cache, prefill=prefill)
    assert chunked_rel(made, opened, random_plan(made, seed)) <= REL


@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("cache", FORMS)
def test_rule_3_token_by_token(make: Make, opened: Opened, cache: str, prefill: str) -> None:
    made = make(cache=cache, prefill=prefill)
    for graph in made.graphs:
        assert chunked_rel(made, opened, [(graph, 1)] * TOKENS) <= REL, graph.name


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill"), ("decode", "decode")])
@pytest.mark.parametrize("prefill", PREFILL)
@pytest.mark.parametrize("cache", FORMS)
def test_rule_7_one_cache_for_both_kinds(make: Make, opened: Opened, cache: str, prefill: str,
                                         order: tuple[str, str]) -> None:
    made = make(cache=cache, prefill=prefill)
    for graph in made.graphs:  # each writes or reads what the other kind's default reads or wrote
        graphs = [graph if graph.kind == kind else made.graph(kind) for kind in order]
        assert chunked_rel(made, opened, list(zip(graphs, (17, 12), strict=True))) <= REL, graph.name
    first = whole(made, opened, made.graph("prefill"))[1]
    assert all(same_bits(first, whole(made, opened, graph)[1]) for graph in made.graphs)


@pytest.mark.parametrize("cache", FORMS)
def test_rules_3_and_7_can_fail(make: Make, opened: Opened, cache: str) -> None:
    made = make(cache=cache, tamper=FORGET)
    assert chunked_rel(made, opened, [(made.graph("prefill"), TOKENS)]) == 0
    assert chunked_rel(made, opened, [(made.graph("prefill"), 17), (made.graph("decode"), 12)]) > BROKEN


# --- Rule 4: causal among themselves, padding at the right -----------------------------------------------------------


def is_causal(session: Session, made: Export) -> bool:
    """Changing token 4 of 6 leaves what comes before it bit for bit; whether it does. (It must change the rest.)"""
    found = []
    for change in (0.0, 1.0):
        cache, hidden = held(made, (7, 7) if made.cache == "concat" else (7, 3)), hidden_of(made, 2, 6)
        hidden[:, 4:] += change
        outputs = step(session, cache, hidden)["attn_output"]
        found.append([outputs[:, :4], *[r[:-2] for r in valid_rows(cache)], outputs[:, 4:]])
    assert not np.isclose(found[0][-1], found[1][-1]).all(axis=-1).any()
    return same_bits(found[0][:-1], found[1][:-1])


@pytest.mark.parametrize("backend", ["ort", "interpreter"])
@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_rule_4_causal(make: Make, opened: Opened, name: str, cache: str, backend: str) -> None:
    made, graph = graph_of(make, name, cache=cache)
    assert is_causal(opened(made, graph, backend), made)


@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_rule_4_can_fail(make: Make, opened: Opened, name: str, cache: str) -> None:
    made, graph = graph_of(make, name, cache=cache, tamper=SEE_FUTURE)
    assert not is_causal(opened(made, graph), made)


def padding_is_ignored(session: Session, made: Export) -> bool:
    """Real tokens of a padded call, their rows, and a next step over what was kept: bit for bit, whatever pads."""
    found = []
    for padding in (0.0, 1.0, 1e3, -1e6):
        rows, hidden = held(made, LENGTHS), hidden_of(made, 4, 5)
        for b, n in enumerate(COUNTS):
            hidden[b, n:] = padding
        outputs = step(session, rows, hidden, COUNTS)["attn_output"]
        after = step(session, rows, hidden_of(made, 4, 1, seed=3))["attn_output"]
        found.append([after, *valid_rows(rows), *[outputs[b, :n] for b, n in enumerate(COUNTS)]])
    return all(same_bits(found[0], other) for other in found[1:])


@pytest.mark.parametrize(("fault", "ignored"), [(None, True), (SEE_FUTURE, False)], ids=["sound", "planted"])
@pytest.mark.parametrize("cache", ["append", "scatter"])
@pytest.mark.parametrize("name", GRAPHS)
def test_rule_4_padding(make: Make, opened: Opened, name: str, cache: str, fault: Tamper | None, ignored: bool) -> None:
    made, graph = graph_of(make, name, cache=cache, tamper=fault)
    assert padding_is_ignored(opened(made, graph), made) == ignored


# --- Rule 5: positions -----------------------------------------------------------------------------------------------

POSITIONS = (0, 1, 255, 256, 257, 4095, 4096, 32767, 163839)


@pytest.mark.parametrize("model", ["deepseek-v3", "deepseek-v2-lite", "kimi-k2", "minicpm3-4b", "glm-4.7-flash",
                                   "article", MODEL, "narrow-longrope", "narrow-glm"])
def test_rule_5_two_level_tables(model: str) -> None:
    """The addition theorem over float32 tables, computed in float32 as a graph does, against float64 angles."""
    inv_freq, factor = frequencies(PRESETS[model], max(POSITIONS) + 1)
    t, p = tables(inv_freq, factor, max(POSITIONS) + 1), np.array(POSITIONS)
    assert all(table.dtype == np.float32 for table in vars(t).values())
    cos_c, sin_c = t.cos_coarse[p // BLOCK], t.sin_coarse[p // BLOCK]
    cos_f, sin_f = t.cos_fine[p % BLOCK], t.sin_fine[p % BLOCK]
    angles = np.outer(p, inv_freq)
    assert np.abs(cos_c * cos_f - sin_c * sin_f - factor * np.cos(angles)).max() <= 4e-7
    assert np.abs(sin_c * cos_f + cos_c * sin_f - factor * np.sin(angles)).max() <= 4e-7
    single = np.outer(p.astype(np.float32), inv_freq.astype(np.float32))  # float32 angles stay far outside the bound
    assert factor * np.abs(np.cos(single) - np.cos(angles)).max() > 4e-5


def rows_at(session: Session, made: Export, positions: Sequence[int]) -> np.ndarray:
    """The row of one token at each position, [positions, R]."""
    hidden, rows = hidden_of(made, 1, 1), []
    for position in positions:
        past = np.zeros((1, max(position, 1), made.config.row_dim), np.float32)
        feed = {"hidden_states": hidden, "past_lengths": np.array([position]), "past_latent.0": past}
        rows.append(session.infer(feed)["new_latent.0"][0, 0])
    return np.stack(rows)


@pytest.mark.parametrize("model", [MODEL, "narrow-longrope", "narrow-glm"])
def test_rule_5_rope_columns_turn_and_latent_columns_stay(make: Make, opened: Opened, model: str) -> None:
    """Latent columns are one and the same at every position; rotary ones are position 0's, turned by float64 angles."""
    made = make(model, max_context=max(POSITIONS) + 1)
    rows = rows_at(opened(made, made.graph("decode")), made, POSITIONS)
    assert all(np.array_equal(row[:D_C], rows[0, :D_C]) for row in rows)
    inv_freq, factor = frequencies(made.config, made.max_context)
    assert factor == pytest.approx(1 if model != "narrow-longrope" else (1 + np.log(8) / np.log(4096)) ** 0.5)
    order = np.arange(D_R).reshape(2, -1).T if made.config.rope_layout == "half" else np.arange(D_R).reshape(-1, 2)
    pairs = rows[:, D_C:].astype(np.float64)[:, order]  # [positions, d_r / 2, 2]
    turned = (pairs[0, :, 0] + 1j * pairs[0, :, 1]) * np.exp(1j * np.outer(POSITIONS, inv_freq))
    size = np.abs(turned).max()
    assert np.abs(pairs[..., 0] + 1j * pairs[..., 1] - turned).max() <= 1e-6 * size
    assert all(np.abs(pairs[i] - pairs[i - 1]).max() > 1e-2 * size for i in range(1, len(POSITIONS)))


@pytest.mark.parametrize("graph", ["prefill", "decode"])
@pytest.mark.parametrize(("fault", "independent"), [(None, True), (FAULTS["rope-on-latent"].tamper, False)])
def test_rule_5_latent_columns_can_tell(make: Make, opened: Opened, fault: Tamper | None, independent: bool,
                                        graph: str) -> None:
    made = make(tamper=fault)
    rows = rows_at(opened(made, made.graph(graph)), made, range(9))
    assert all(np.array_equal(row[:D_C], rows[0, :D_C]) for row in rows) == independent
    assert not any(np.array_equal(a[D_C:], b[D_C:]) for a, b in zip(rows[1:], rows[:-1], strict=True))


# --- Determinism and shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ort", "interpreter"])
@pytest.mark.parametrize("cache", FORMS)
@pytest.mark.parametrize("name", GRAPHS)
def test_bitwise_deterministic(make: Make, name: str, cache: str, backend: str) -> None:
    """Twice in a session, and in another one; ONNX Runtime with as many threads as it likes."""
    made, graph = graph_of(make, name, cache=cache)
    lengths, found = (7, 7, 7, 7) if cache == "concat" else LENGTHS, []
    for _ in range(2):
        with BACKENDS[backend].open(made, graph) as session:
            for _ in range(2):
                rows = held(made, lengths)
                outputs = step(session, rows, hidden_of(made, 4, 3))["attn_output"]
                found.append([outputs, *valid_rows(rows)])
    assert all(same_bits(found[0], other) for other in found[1:])


@pytest.fixture(scope="module")
def maker(presets: None) -> Callable[[str], TraceMaker]:
    """The float64 references of a model, made once."""
    makers: dict[str, TraceMaker] = {}

    def made(model: str) -> TraceMaker:
        if model not in makers:
            tensors = load_tensors({"kind": "preset", "name": model, "seed": 0}, PRESETS[model])
            makers[model] = TraceMaker(PRESETS[model], tensors, max_context=CONTEXT, dtype="fp32", seed=0, causal=True)
        return makers[model]

    return made


def check_trace(make: Make, opened: Opened, trace: Trace, model: str, caches: Sequence[str]) -> None:
    """Every graph of the trace's kind against the reference's outputs and rows, with tails of 1e4."""
    for name, cache in product((g for g in GRAPHS if g.startswith(trace.kind)), caches):
        made, graph = graph_of(make, name, model=model, cache=cache)
        outputs, rows = replay(trace, {trace.kind: opened(made, graph)}, made, tail=1e4)
        assert compare(outputs[0], trace.steps[0].expected).rel <= TOLERANCES["fp32"].rel, (name, cache)
        for b, expected in enumerate(trace.rows):
            assert compare(rows.rows[b, :len(expected)], expected).rel <= TOLERANCES["fp32"].rel, (name, cache)


@pytest.mark.parametrize("tokens", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("heads", [1, 3])
def test_shapes_of_the_trusted_kernels(make: Make, opened: Opened, maker: Callable[[str], TraceMaker], heads: int,
                                       batch: int, tokens: int) -> None:
    """FlashMLA's and FlashInfer's cases: few and odd heads, queries, batches and lengths, some or all of them empty."""
    model, lengths = f"{MODEL}-{heads}", np.roll([0, 1, 3, 11, 17], tokens + batch)[:batch].tolist()
    for kind in ("prefill", "decode"):
        trace = maker(model).trace("shapes", kind, [(kind, tokens, None)], batch=batch, lengths=lengths)
        check_trace(make, opened, trace, model, ("append", "scatter"))


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_up_to_the_last_row(make: Make, opened: Opened, maker: Callable[[str], TraceMaker], kind: str) -> None:
    """Scatter fills S_max exactly, from empty and from nearly full."""
    for lengths, tokens in (([0, 0], CONTEXT), ([CONTEXT - 3] * 2, 3), ([CONTEXT - 3, 1], 3)):
        trace = maker(MODEL).trace("full", kind, [(kind, tokens, None)], batch=2, lengths=lengths)
        check_trace(make, opened, trace, MODEL, ("append", "scatter") if trace.ragged else FORMS)
