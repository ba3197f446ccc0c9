"""Checkpoints as transformers writes them, exported and run in ONNX Runtime, against transformers' own attention.

The reference is `self_attn` of the model that transformers loads from the same folder: eager attention, its own rotary
embedding, its own latent cache. Below position 256 its float32 angles are good enough; beyond, it is fed ours (rule 5
of the contract) and what its own would have changed is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.cache import LatentCache
from engines.ort import OrtOptions, OrtSession
from engines.session import Session
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export, GraphEntry
from exporter.presets import preset_config
from exporter.rope import frequencies
from tests.checkpoints import HIDDEN, KV_RANK, ORIGINAL_POSITIONS, ROPE, tiny_checkpoint
from validate.faults import FAULTS
from validate.metrics import compare

transformers = pytest.importorskip("transformers")

REL = 1e-4
BROKEN = 1e-2  # what a fault must exceed
STEPS = 4  # decode steps after a prompt
CHUNK = 20  # first piece of a prompt, so that every prefill graph also meets a past
Embeddings = Any  # (cos, sin), or complex numbers for deepseek_v2
Checkpoint = Callable[..., Path]


@dataclass(frozen=True)
class Case:
    """One checkpoint, how many tokens to run, and for how many rows it is exported."""

    model_type: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = 150
    max_context: int = 200


CASES = {
    "v2": Case("deepseek_v2"),
    "v2-lite": Case("deepseek_v2", {"q_lora_rank": None}),
    "v3": Case("deepseek_v3"),
    "v3-half": Case("deepseek_v3", {"rope_interleave": False}),
    "v3-bias": Case("deepseek_v3", {"attention_bias": True}),
    "glm4": Case("glm4_moe_lite", {"yarn": False}),
    "minicpm3-short": Case("minicpm3", tokens=ORIGINAL_POSITIONS - 4, max_context=ORIGINAL_POSITIONS),
    "minicpm3-long": Case("minicpm3"),
}


def rope_order(columns: np.ndarray, interleaved: bool) -> np.ndarray:
    """Rotary columns in transformers' order: where the checkpoint's pairs are interleaved, it caches halves."""
    return np.concatenate([columns[..., 0::2], columns[..., 1::2]], axis=-1) if interleaved else columns


class Theirs:
    """transformers' own attention of one layer, with its rotary embedding and its latent cache."""

    def __init__(self, folder: Path, layer: int) -> None:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()
        self.config, self.layer = model.config, layer
        self.attention, self.rotary = model.model.layers[layer].self_attn, model.model.rotary_emb
        self.interleaved = getattr(model.config, "rope_interleave", False)  # the flag: columns come out as halves

    def embeddings(self, positions: torch.Tensor) -> Embeddings:
        """Its own angles, float32, of positions [T]."""
        return self.rotary(torch.zeros(1, 1, HIDDEN), positions[None])

    def embeddings_of(self, made: Export, positions: torch.Tensor) -> Embeddings:
        """Our angles, float64 and rounded once, in the form that its attention takes."""
        inv_freq, factor = frequencies(made.config, made.max_context)
        angles = torch.outer(positions.double(), torch.from_numpy(inv_freq))[None]
        if made.config.model_type == "deepseek_v2":
            return torch.polar(torch.full_like(angles, factor), angles).to(torch.complex64)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()

    def cache(self) -> Any:
        return transformers.DynamicCache(config=self.config)

    def forward(self, hidden: torch.Tensor, embeddings: Embeddings, cache: Any) -> np.ndarray:
        """[B, T, D] new tokens behind what `cache` holds, causal."""
        T, past = hidden.shape[1], cache.get_seq_length(self.layer)
        mask = torch.full((T, past + T), torch.finfo(torch.float32).min).triu(past + 1)[None, None]
        with torch.no_grad():
            output, _ = self.attention(hidden_states=hidden, attention_mask=mask, position_embeddings=embeddings,
                                       cache=cache)
        found: np.ndarray = output.numpy()
        return found

    def run(self, hidden: np.ndarray, pieces: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """All tokens [B, N, D] in `pieces`: outputs and cache rows [B, N, R]."""
        x, cache, outputs, start = torch.from_numpy(hidden), self.cache(), [], 0
        whole = self.embeddings(torch.arange(hidden.shape[1]))  # at once: longrope chooses its set by the longest
        for piece in pieces:
            outputs.append(self.forward(x[:, start:start + piece], cut(whole, start, start + piece), cache))
            start += piece
        return np.concatenate(outputs, axis=1), self.rows(cache)

    def rows(self, cache: Any) -> np.ndarray:
        stored = cache.layers[self.layer]
        return torch.cat([stored.keys, stored.values], dim=-1)[:, 0].numpy()


def cut(embeddings: Embeddings, start: int, stop: int) -> Embeddings:
    if isinstance(embeddings, tuple):
        return tuple(e[:, start:stop] for e in embeddings)
    return embeddings[:, start:stop]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 11]).standard_normal(shape, dtype=np.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Checkpoint folders, each made once."""
    made: dict[str, Path] = {}

    def make(model_type: str, **options: Any) -> Path:
        key = repr((model_type, sorted(options.items())))
        if key not in made:
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"), model_type, **options)
        return made[key]

    return make


@dataclass(frozen=True)
class Expected:
    """Input and what transformers made of it: outputs [B, N, D] and cache rows [B, N, R]."""

    theirs: Theirs
    hidden: np.ndarray
    outputs: np.ndarray
    rows: np.ndarray


@pytest.fixture(scope="module")
def expected(checkpoint: Checkpoint) -> Callable[..., Expected]:
    """Per case and layer: a prompt in one piece, then token by token through transformers' cache."""
    answered: dict[str, Expected] = {}

    def answer(case: Case, layer: int) -> Expected:
        key = repr((case, layer))
        if key not in answered:
            theirs = Theirs(checkpoint(case.model_type, **case.options), layer)
            hidden = draw(2, case.tokens, HIDDEN, seed=layer)
            answered[key] = Expected(theirs, hidden, *theirs.run(hidden, [case.tokens - STEPS] + [1] * STEPS))
        return answered[key]

    return answer


def open_ort(made: Export, graph: GraphEntry) -> Session:
    return OrtSession(made, graph, OrtOptions(threads=1))  # matrices this small only wait for a second thread


def pairs(made: Export) -> Iterator[tuple[GraphEntry, GraphEntry]]:
    """Prefill and decode graphs such that each is used."""
    kinds = [[g for g in made.graphs if g.kind == kind] for kind in ("prefill", "decode")]
    for prefill, decode in zip_longest(*kinds):
        yield prefill or kinds[0][0], decode or kinds[1][0]


def defaults(made: Export) -> tuple[GraphEntry, GraphEntry]:
    return made.graph("prefill"), made.graph("decode")


def play(made: Export, graphs: tuple[GraphEntry, GraphEntry], hidden: np.ndarray, counts: Sequence[int],
         ) -> tuple[list[np.ndarray], LatentCache]:
    """Prompts of `counts` [B] tokens in two right-padded pieces, then STEPS tokens: outputs per sequence, the cache."""
    prefill, decode = (open_ort(made, graph) for graph in graphs)
    longest, batch = max(counts), len(hidden)
    cache = LatentCache(made, batch, longest + STEPS if made.cache == "append" else None)
    found: list[list[np.ndarray]] = [[] for _ in counts]
    with prefill, decode:
        for start, stop in ((0, CHUNK), (CHUNK, longest)):
            kept = np.clip(np.array(counts) - start, 0, stop - start)
            outputs = prefill.infer({"hidden_states": np.ascontiguousarray(hidden[:, start:stop]), **cache.feed()})
            cache.commit(outputs, kept)
            for b, n in enumerate(kept):
                found[b].append(outputs["attn_output"][b, :n])
        for step in range(STEPS):
            token = np.stack([hidden[b, n + step] for b, n in enumerate(counts)])[:, None]
            outputs = decode.infer({"hidden_states": token, **cache.feed()})
            cache.commit(outputs, 1)
            for b in range(batch):
                found[b].append(outputs["attn_output"][b])
    return [np.concatenate(pieces) for pieces in found], cache


def worst(made: Export, want: Expected, graphs: tuple[GraphEntry, GraphEntry], counts: Sequence[int]) -> float:
    """The largest rel of all outputs and all cache rows."""
    outputs, cache = play(made, graphs, want.hidden, counts)
    rels = []
    for b, found in enumerate(outputs):
        rels.append(compare(found, want.outputs[b, :len(found)]).rel)
        latent, k_rope = np.split(cache.rows[b, :len(found)], [KV_RANK], axis=-1)
        rows = np.concatenate([latent, rope_order(k_rope, want.theirs.interleaved)], axis=-1)
        rels.append(compare(rows, want.rows[b, :len(found)]).rel)
    return max(rels)


# --- Every family, cache form and prefill form ------------------------------------------------------------------------


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
@pytest.mark.parametrize("name", CASES)
def test_prefill_then_decode(checkpoint: Checkpoint, expected: Callable[..., Expected], tmp_path: Path, name: str,
                             cache: str, prefill: str) -> None:
    case = CASES[name]
    made = export(ExportRequest(str(checkpoint(case.model_type, **case.options)), tmp_path / "x", layer=1, cache=cache,
                                prefill=prefill, max_context=case.max_context))
    longest = case.tokens - STEPS
    counts = [longest, longest] if cache == "concat" else [longest, longest - 23]
    want = expected(case, 1)
    rels = {f"{p.name}, {d.name}": worst(made, want, (p, d), counts) for p, d in pairs(made)}
    assert len(rels) == 3
    assert max(rels.values()) <= REL, rels


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("sharded", [False, True], ids=["one-file", "sharded"])
@pytest.mark.parametrize("name", ["v2", "v2-lite", "v3-bias", "minicpm3-long"])
def test_layers_and_shards(checkpoint: Checkpoint, expected: Callable[..., Expected], tmp_path: Path, name: str,
                           sharded: bool, layer: int) -> None:
    case = CASES[name]
    folder = checkpoint(case.model_type, sharded=sharded, **case.options)
    assert (folder / "model.safetensors.index.json").is_file() == sharded
    made = export(ExportRequest(str(folder), tmp_path / "x", layer=layer, max_context=case.max_context))
    assert worst(made, expected(case, layer), defaults(made), [100, 31]) <= REL
    assert worst(made, expected(case, 1 - layer), defaults(made), [100, 31]) > BROKEN  # the other layer's would not do


# --- The tests above can fail -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [f.name for f in FAULTS.values()
                                  if f.applies(preset_config("deepseek-v3")) and "interpreter/prefill" in f.red])
def test_a_planted_fault_disagrees(checkpoint: Checkpoint, expected: Callable[..., Expected], tmp_path: Path,
                                   name: str) -> None:
    made = export(ExportRequest(str(checkpoint("deepseek_v3")), tmp_path / "x", layer=1, max_context=200),
                  tamper=FAULTS[name].tamper)
    assert worst(made, expected(CASES["v3"], 1), defaults(made), [100, 31]) > BROKEN


@pytest.mark.parametrize("bias", ["q_a", "kv_a", "o"])
def test_every_bias_counts(checkpoint: Checkpoint, expected: Callable[..., Expected], tmp_path: Path,
                           bias: str) -> None:
    def drop(w: Any) -> None:
        getattr(w, bias).bias = None

    made = export(ExportRequest(str(checkpoint("deepseek_v3", attention_bias=True)), tmp_path / "x", layer=1,
                                max_context=200), tamper=Tamper(weights=drop))
    assert worst(made, expected(CASES["v3-bias"], 1), defaults(made), [100, 31]) > BROKEN


@pytest.mark.parametrize(("name", "max_context"), [("minicpm3-short", ORIGINAL_POSITIONS + 1),
                                                   ("minicpm3-long", ORIGINAL_POSITIONS)])
def test_longrope_set_follows_max_context(checkpoint: Checkpoint, expected: Callable[..., Expected], tmp_path: Path,
                                          name: str, max_context: int) -> None:
    """One row more or less of --max-context chooses the other factor set: the set that was right is now wrong."""
    made = export(ExportRequest(str(checkpoint("minicpm3")), tmp_path / "x", layer=1, max_context=max_context))
    assert worst(made, expected(CASES[name], 1), defaults(made), [50, 31]) > BROKEN


# --- Far positions ----------------------------------------------------------------------------------------------------

FAR = {"v2": CASES["v2"], "v3": CASES["v3"], "v3-half": CASES["v3-half"], "glm4": CASES["glm4"],
       "minicpm3": CASES["minicpm3-long"]}
PAST, NEW, ORIGINAL = 5000, 12, 4096


def far_checkpoint(folder: Path, case: Case) -> Path:
    """The case's checkpoint with the published original context and length in its config."""
    tiny_checkpoint(folder, case.model_type, **case.options)
    raw = json.loads((folder / "config.json").read_text())
    raw["max_position_embeddings"] = 40 * ORIGINAL
    if raw["rope_parameters"]["rope_type"] != "default":
        assert raw["rope_parameters"]["original_max_position_embeddings"] == ORIGINAL_POSITIONS
        raw["rope_parameters"]["original_max_position_embeddings"] = ORIGINAL
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def their_far_output(theirs: Theirs, hidden: np.ndarray, embeddings: Embeddings) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the last NEW tokens, and all cache rows. A row does not depend on others, so PAST comes in pieces."""
    x, full = torch.from_numpy(hidden), theirs.cache()
    for start in range(0, PAST, 250):
        piece = theirs.cache()
        theirs.forward(x[:, start:start + 250], cut(embeddings, start, start + 250), piece)
        full.update(piece.layers[theirs.layer].keys, piece.layers[theirs.layer].values, theirs.layer)
    outputs = theirs.forward(x[:, PAST:], cut(embeddings, PAST, PAST + NEW), full)
    return outputs, theirs.rows(full)


@pytest.mark.parametrize("name", FAR)
def test_far_positions_with_our_angles(tmp_path: Path, record_property: Callable[[str, object], None],
                                       name: str) -> None:
    folder = far_checkpoint(tmp_path / "checkpoint", FAR[name])
    theirs, hidden, positions = Theirs(folder, 1), draw(1, PAST + NEW, HIDDEN, seed=3), torch.arange(PAST + NEW)
    absorbed, expanded = (export(ExportRequest(str(folder), tmp_path / form, layer=1, prefill=form,
                                               max_context=PAST + 100)) for form in ("absorbed", "expanded"))
    want, want_rows = their_far_output(theirs, hidden, theirs.embeddings_of(absorbed, positions))
    wrong, _ = their_far_output(theirs, hidden, theirs.embeddings_of(absorbed, positions * 1.001))
    own, _ = their_far_output(theirs, hidden, theirs.embeddings(positions))

    rows = prefilled(absorbed, hidden)
    latent, k_rope = np.split(rows, [KV_RANK], axis=-1)
    found_rows = np.concatenate([latent, rope_order(k_rope, theirs.interleaved)], axis=-1)
    assert compare(found_rows, want_rows[:, :PAST]).rel <= REL
    for made, graph in [(m, g) for m in (absorbed, expanded) for g in m.graphs]:
        found = last_tokens(made, graph, rows, hidden)
        assert compare(found, want).rel <= REL, graph.name
        assert compare(found, wrong).rel > BROKEN, graph.name
    drift = compare(own, want).rel
    record_property(f"rel drift of transformers' float32 angles at {PAST}", drift)
    assert drift < 5e-2


def prefilled(made: Export, hidden: np.ndarray) -> np.ndarray:
    """Cache rows [1, PAST, R] as the default prefill graph writes them, chunk by chunk."""
    cache = LatentCache(made, 1, PAST)
    with open_ort(made, made.graph("prefill")) as session:
        for start in range(0, PAST, 500):
            outputs = session.infer({"hidden_states": hidden[:, start:start + 500], **cache.feed()})
            cache.commit(outputs, 500)
    assert cache.rows.shape == (1, PAST, KV_RANK + ROPE)
    return cache.rows


def last_tokens(made: Export, graph: GraphEntry, rows: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """The last NEW tokens behind `rows`: a prefill graph takes them at once, a decode graph one by one."""
    cache, pieces = LatentCache(made, 1, PAST + NEW), []
    cache.load(rows, np.array([PAST]))
    step = NEW if graph.kind == "prefill" else 1
    with open_ort(made, graph) as session:
        for start in range(PAST, PAST + NEW, step):
            outputs = session.infer({"hidden_states": hidden[:, start:start + step], **cache.feed()})
            cache.commit(outputs, step)
            pieces.append(outputs["attn_output"])
    return np.concatenate(pieces, axis=1)
