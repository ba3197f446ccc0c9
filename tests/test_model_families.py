"""Whole models of every family, as transformers writes them, exported and run in ONNX Runtime, against transformers.

Up to position 256 the reference is transformers as it is; beyond, its rotary embedding is fed our angles. Token ids are
drawn such that no router sits on an edge: a chosen expert that flips is not an error, and would look like one.
Nothing of the exporter's reading of a family is shared with the reference, and every fault of the last section shows.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engines.backends import open_session
from engines.cache import LatentCache
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from exporter.rope import frequencies
from tests.model_checkpoints import (
    ALWAYS_MOE,
    DENSE_ONLY,
    GROUPS,
    HIDDEN,
    KV_RANK,
    MODELS,
    ORIGINAL_POSITIONS,
    ROPE,
    TOP_GROUPS,
    VOCAB,
    attentions,
    tiny_checkpoint,
    tiny_model,
)
from tests.transformers_oracle import FactorSet, Oracle
from validate.metrics import BETWEEN_RUNS, compare

transformers = pytest.importorskip("transformers")

REL = 1e-4
BROKEN = 1e-2  # what a fault must exceed
MARGIN = 2e-5  # of a router's scores: float32 noise is well below
STEPS = 4  # decode steps after a prompt
NEAR, FAR = 257, 600  # tokens of a sequence
GREEDY, PROMPT = 64, 40


@dataclass(frozen=True)
class Case:
    """One checkpoint, how it is made, how many tokens to run, and for how many rows it is exported."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    tokens: int = NEAR
    max_context: int = NEAR + 40
    factor_set: FactorSet | None = None


DENSE = ("v2", "v2-lite", "kimi-k25", "glm4", "mistral4", "axk1")
CASES = {n: Case(n) for n in MODELS if n != "minicpm3"} | {f"{n}-all-dense": Case(n, {"moe": False}) for n in DENSE} | {
    "minicpm3-short": Case("minicpm3", tokens=ORIGINAL_POSITIONS, max_context=ORIGINAL_POSITIONS, factor_set="short"),
    "minicpm3-long": Case("minicpm3", factor_set="long")}
STORED = {
    "v3": Case("v3", {"sharded": True, "dtype": torch.bfloat16}),
    "kimi-k25": Case("kimi-k25", {"sharded": True}),
    "longcat": Case("longcat", {"sharded": True, "dtype": torch.bfloat16}),
    "mistral4": Case("mistral4", {"sharded": True, "dtype": torch.bfloat16, "layers": 2}),
    "v2-lite-legacy": Case("v2-lite", {"legacy": True}),
    "mistral4-legacy": Case("mistral4", {"legacy": True}),
    "sarvam-current": Case("sarvam", {"legacy": False}),
    "transmla-no-q-rank": Case("transmla", {"q_lora_rank": None}),
    "axk1-no-choice-bias": Case("axk1", {"choice_bias": False}),
}


class Made:
    """Checkpoints, oracles, token ids and exports of cases, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._made, self._numbers = folder, dict[str, Any](), count()

    def _once(self, key: tuple[Any, ...], make: Callable[[Path], Any]) -> Any:
        name = repr(key)
        if name not in self._made:
            self._made[name] = make(self._folder / str(next(self._numbers)))
        return self._made[name]

    def checkpoint(self, case: Case) -> Path:
        key = ("checkpoint", case.model, sorted(case.options.items()))
        folder: Path = self._once(key, lambda path: tiny_checkpoint(path, case.model, **case.options))
        return folder

    def oracle(self, case: Case) -> Oracle:
        key = ("oracle", case.model, sorted(case.options.items()))
        oracle: Oracle = self._once(key, lambda _: Oracle(self.checkpoint(case)))
        return oracle

    def ids(self, case: Case, batch: int, tokens: int) -> np.ndarray:
        """[batch, tokens] such that no router of the model sits on an edge."""
        key = ("ids", case.model, sorted(case.options.items()), batch, tokens)
        ids: np.ndarray = self._once(key, lambda _: routed_clearly(self.oracle(case), batch, tokens))
        return ids

    def export(self, case: Case, **request: Any) -> Export:
        key = ("export", case, sorted(request.items()))
        made: Export = self._once(key, lambda path: export_model(self.checkpoint(case), path, case.max_context,
                                                                 **request))
        return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return Made(tmp_path_factory.mktemp("models"))


def export_model(folder: Path, out: Path, max_context: int, **request: Any) -> Export:
    return export(ExportRequest(model=str(folder), out=out, scope="model", max_context=max_context, **request))


def routed_clearly(oracle: Oracle, batch: int, tokens: int) -> np.ndarray:
    rows: list[np.ndarray] = []
    for seed in range(500):
        row = np.random.default_rng([seed, 7]).integers(0, VOCAB, (1, tokens))
        if oracle.router_margin(row) > MARGIN:
            rows.append(row)
        if len(rows) == batch:
            return np.concatenate(rows)
    raise AssertionError("no token ids keep every router off its edges")


def angles(made: Export) -> tuple[np.ndarray, float]:
    return frequencies(made.config, made.max_context)


@dataclass
class Run:
    """What a run gave: logits by sequence, a row for every position (`all`) or for the last token of a step."""

    logits: list[np.ndarray]
    cache: LatentCache


def play(made: Export, ids: np.ndarray, counts: Sequence[int], chunks: Sequence[int], steps: int = STEPS,
         prefill: str | None = None, decode: str | None = None) -> Run:
    """Prompts of `counts` tokens of ids [B, N], right-padded in `chunks`, then `steps` tokens, one each."""
    batch, longest = len(ids), max(counts)
    assert sum(chunks) == longest
    cache = LatentCache(made, batch, longest + steps if made.cache == "append" else None)
    found: list[list[np.ndarray]] = [[] for _ in counts]
    with open_session(made, "prefill", "ort", prefill) as first, open_session(made, "decode", "ort", decode) as second:
        start = 0
        for chunk in chunks:
            kept = np.clip(np.array(counts) - start, 0, chunk)
            feed = {"input_ids": np.ascontiguousarray(ids[:, start:start + chunk]), **cache.feed()}
            if has_last_token(made):
                feed["last_token"] = np.maximum(kept - 1, 0)
            collect(found, first, feed, cache, kept)
            start += chunk
        for step in range(steps):
            token = np.stack([ids[b, n + step] for b, n in enumerate(counts)])[:, None]
            collect(found, second, {"input_ids": token, **cache.feed()}, cache, np.ones(batch, np.int64))
    return Run([np.concatenate(pieces) for pieces in found], cache)


def has_last_token(made: Export) -> bool:
    return any(spec.name == "last_token" for spec in made.graph("prefill").inputs)


def collect(found: list[list[np.ndarray]], session: Any, feed: dict[str, np.ndarray], cache: LatentCache,
            kept: np.ndarray) -> None:
    outputs = session.infer(feed)
    cache.commit(outputs, kept)
    logits = outputs["logits"]
    assert logits.dtype == np.float32
    for b, n in enumerate(kept):
        if n:  # a sequence without a token in this chunk has no logits
            found[b].append(logits[b, :n] if logits.ndim == 3 else logits[b][None])


def rel(found: np.ndarray, reference: np.ndarray) -> float:
    return compare(found, reference).rel


def worst(run: Run, reference: np.ndarray) -> float:
    """The largest rel over sequences, all positions given."""
    return max(rel(found, want[:len(found)]) for found, want in zip(run.logits, reference, strict=True))


# --- The reference itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_model_is_the_model(made: Made, name: str) -> None:
    """save_pretrained and back, as its release looks, changes no bit; its own cache changes next to nothing."""
    ids = made.ids(Case(name), 2, 120)
    loaded, kinds = made.oracle(Case(name)), list[FactorSet | None]([None])
    for kind in ("short", "long") if name == "minicpm3" else kinds:
        built = Oracle(tiny_model(name)).logits(ids, kind)
        assert np.array_equal(loaded.logits(ids, kind), built)
        assert rel(loaded.cached_logits(ids, [50, 60, 1, 9], factor_set=kind), built) <= 5e-5
        assert 1 < built.std() < 3


@pytest.mark.parametrize("name", MODELS)
def test_margins_are_those_of_the_routers(made: Made, name: str) -> None:
    margin = made.oracle(Case(name)).router_margin(made.ids(Case(name), 1, 30))
    assert margin == float("inf") if name in DENSE_ONLY else MARGIN < margin < 0.1


# --- Every family against transformers --------------------------------------------------------------------------------


def check_near(made: Made, case: Case, **request: Any) -> None:
    ids = made.ids(case, 2, case.tokens)
    want = made.oracle(case).logits(ids, case.factor_set)
    exported = made.export(case, logits="all", **request)
    prompt = case.tokens - STEPS
    run = play(exported, ids, [prompt, prompt], [20, prompt // 2, prompt - prompt // 2 - 20])
    assert len(run.logits[0]) == case.tokens
    assert worst(run, want) <= REL


@pytest.mark.parametrize("name", CASES)
def test_logits(made: Made, name: str) -> None:
    check_near(made, CASES[name])


@pytest.mark.parametrize("name", STORED)
def test_logits_however_it_is_stored(made: Made, name: str) -> None:
    check_near(made, STORED[name])


@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
@pytest.mark.parametrize("cache", ["append", "scatter", "concat"])
@pytest.mark.parametrize("name", ["v3", "v2-lite", "longcat"])
def test_every_form(made: Made, name: str, cache: str, prefill: str) -> None:
    """Every graph of every cache form and prefill form, ragged where the form can be."""
    case = Case(name)
    ids = made.ids(case, 2, 120)
    want = made.oracle(case).logits(ids)
    exported = made.export(case, logits="all", cache=cache, prefill=prefill)
    counts = [100, 100] if cache == "concat" else [100, 73]
    prefills, decodes = ([g.formulation for g in exported.graphs if g.kind == kind] for kind in ("prefill", "decode"))
    for i in range(max(len(prefills), len(decodes))):
        run = play(exported, ids, counts, [30, 70], prefill=prefills[i % len(prefills)],
                   decode=decodes[i % len(decodes)])
        assert worst(run, want) <= REL, (prefills[i % len(prefills)], decodes[i % len(decodes)])


@pytest.mark.parametrize("name", [n for n in CASES if n != "minicpm3-short"])
def test_far_positions_with_our_angles(made: Made, name: str, record_property: Callable[[str, object], None]) -> None:
    case = Case(CASES[name].model, CASES[name].options, FAR, FAR + 40, CASES[name].factor_set)
    exported = made.export(case, logits="all")
    oracle, (inv_freq, factor) = made.oracle(case), angles(exported)
    ids = made.ids(case, 1, FAR)
    want = oracle.logits_with_angles(ids, inv_freq, factor)
    run = play(exported, ids, [FAR - STEPS], [256, FAR - STEPS - 256])
    assert worst(run, want) <= REL
    assert rel(run.logits[0], oracle.logits_with_angles(ids, inv_freq * 1.001, factor)[0]) > BROKEN
    record_property("rel drift of transformers' float32 angles", rel(oracle.logits(ids, case.factor_set), want))


@pytest.mark.parametrize("cache", ["append", "scatter"])
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.options])
def test_a_ragged_batch_equals_each_alone(made: Made, name: str, cache: str) -> None:
    """The middle sequence has no token in the first chunk: an empty past beside long ones."""
    case, steps = CASES[name], 3
    exported = made.export(case, cache=cache)
    first, counts = 30, [43, 13, 38]
    ids = made.ids(case, 3, 43 + steps)
    run = ragged(exported, ids, first, counts, steps)
    for b, n in enumerate(counts):
        past = 0 if b == 1 else first
        alone = play(exported, ids[b:b + 1], [n], [past, n - past] if past else [n], steps)
        assert rel(run[b], alone.logits[0][-1 - steps:]) <= BETWEEN_RUNS.rel


def ragged(exported: Export, ids: np.ndarray, first: int, counts: Sequence[int], steps: int) -> list[np.ndarray]:
    """Logits of the last prompt token and of each step, when the second sequence joins after `first` tokens."""
    cache, found = LatentCache(exported, 3, max(counts) + steps), [list[np.ndarray]() for _ in counts]
    starts = np.array([first, 0, first])
    with open_session(exported, "prefill", "ort") as prefill, open_session(exported, "decode", "ort") as decode:
        kept, feed = starts, {"input_ids": np.ascontiguousarray(ids[:, :first]), **cache.feed()}
        collect(found, prefill, {**feed, "last_token": np.maximum(kept - 1, 0)}, cache, kept)
        kept = np.array(counts) - starts
        width = int(kept.max())
        piece = np.stack([ids[b, s:s + width] if s + width <= ids.shape[1] else np.resize(ids[b, s:], width)
                          for b, s in enumerate(starts)])
        collect(found, prefill, {"input_ids": piece, **cache.feed(), "last_token": kept - 1}, cache, kept)
        for step in range(steps):
            token = np.stack([ids[b, n + step] for b, n in enumerate(counts)])[:, None]
            collect(found, decode, {"input_ids": token, **cache.feed()}, cache, np.ones(3, np.int64))
    return [np.concatenate(pieces)[-1 - steps:] for pieces in found]


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if n != "minicpm3-short"])
def test_greedy_tokens(made: Made, name: str) -> None:
    case = CASES[name]
    exported, prompt = made.export(case), made.ids(case, 1, PROMPT)
    want = made.oracle(case).greedy(prompt[0], GREEDY, factor_set=case.factor_set)
    cache, found = LatentCache(exported, 1, PROMPT + GREEDY), list[int]()
    with open_session(exported, "prefill", "ort") as prefill, open_session(exported, "decode", "ort") as decode:
        outputs = prefill.infer({"input_ids": prompt, "last_token": np.array([PROMPT - 1]), **cache.feed()})
        cache.commit(outputs, PROMPT)
        for _ in range(GREEDY):
            found.append(int(outputs["logits"][0].argmax()))
            outputs = decode.infer({"input_ids": np.array([[found[-1]]]), **cache.feed()})
            cache.commit(outputs, 1)
    assert found == want
    assert len(set(want)) > GREEDY // 4  # a model that repeats itself would prove little


@pytest.mark.parametrize("name", [n for n in CASES if n != "minicpm3-short"])
def test_cache_bytes_per_token(made: Made, name: str) -> None:
    case = CASES[name]
    exported = made.export(case)
    expected = attentions(case.model) * (KV_RANK + ROPE) * 4
    rows = [spec for spec in exported.graph("decode").inputs if spec.name.startswith("past_latent.")]
    assert exported.attentions == len(rows) == attentions(case.model)
    assert sum(int(spec.shape[-1]) * 4 for spec in rows) == expected
    assert LatentCache(exported, 1, 7).nbytes == 7 * expected
    assert made.oracle(case).cache_bytes_per_token() == expected


# --- The tests above can fail -----------------------------------------------------------------------------------------


def _routers(model: Any) -> list[Any]:
    return [part for part in model.modules() if type(part).__name__.endswith("TopkRouter")]


def _set(name: str, value: Any) -> Callable[[Any], None]:
    """A fault in every router: one attribute."""

    def plant(model: Any) -> None:
        assert _routers(model)
        for router in _routers(model):
            assert getattr(router, name) != value
            setattr(router, name, value)

    return plant


def _ungroup(model: Any) -> None:
    for router in _routers(model):
        router.num_group = router.topk_group = 1


def _group(model: Any) -> None:
    for router in _routers(model):
        router.topk_method, router.num_group, router.topk_group = "group_limited_greedy", GROUPS, TOP_GROUPS


def _weigh_with_bias(model: Any) -> None:
    """The choice's bias added to the weights as well."""
    for router in _routers(model):
        def forward(x: torch.Tensor, router: Any = router) -> Any:
            logits, _, chosen = type(router).forward(router, x)
            scores = logits.softmax(-1) if hasattr(router, "classifier") else logits.sigmoid()
            weights = (scores + router.e_score_correction_bias).gather(1, chosen)
            if getattr(router, "norm_topk_prob", False):
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights * router.routed_scaling_factor, chosen

        router.forward = forward


def _zero_bias(model: Any) -> None:
    for router in _routers(model):
        router.e_score_correction_bias.zero_()


def _no_shared(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "shared_experts"):
            part.shared_experts.down_proj.weight.zero_()


def _each_attention(name: str, value: float) -> Callable[[Any], None]:
    def plant(model: Any) -> None:
        found = [part for part in model.modules() if hasattr(part, name)]
        assert found
        for part in found:
            setattr(part, name, value)

    return plant


def _no_query_scale(model: Any) -> None:
    model.config.rope_parameters["llama_4_scaling_beta"] = 0.0


def _no_output_norm(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "post_mlp_layernorm"):
            part.post_mlp_layernorm = torch.nn.Identity()


def _no_identity_experts(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "identity_expert"):
            part.identity_expert.forward = torch.zeros_like


def _unscaled_embedding(model: Any) -> None:
    model.model.embed_tokens.embed_scale.fill_(1)


def _unscaled_head(model: Any) -> None:
    model.config.dim_model_base = HIDDEN


def _latent_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.kv_a_layernorm = torch.nn.RMSNorm(KV_RANK, eps=1e-6)


FAULTS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "v2: no routed scale": ("v2", _set("routed_scaling_factor", 1.0)),
    "v2: groups ignored": ("v2-grouped", _set("topk_method", "greedy")),
    "v2: groups where none are": ("v2", _group),
    "v2: no shared experts": ("v2-lite", _no_shared),
    "v3: no routed scale": ("v3", _set("routed_scaling_factor", 1.0)),
    "v3: weights not normalised": ("v3", _set("norm_topk_prob", False)),
    "v3: groups ignored": ("v3", _ungroup),
    "v3: choice bias ignored": ("v3", _zero_bias),
    "v3: choice bias as weight": ("v3", _weigh_with_bias),
    "v3: no shared experts": ("v3", _no_shared),
    "glm4: choice bias as weight": ("glm4", _weigh_with_bias),
    "sarvam: choice bias as weight": ("sarvam", _weigh_with_bias),
    "axk1: no output norm": ("axk1", _no_output_norm),
    "longcat: no query scale": ("longcat", _each_attention("mla_scale_q_lora", 1.0)),
    "longcat: no latent scale": ("longcat", _each_attention("mla_scale_kv_lora", 1.0)),
    "longcat: no routed scale": ("longcat", _set("routed_scaling_factor", 1.0)),
    "longcat: choice bias ignored": ("longcat", _zero_bias),
    "longcat: choice bias as weight": ("longcat", _weigh_with_bias),
    "longcat: identity experts give nothing": ("longcat", _no_identity_experts),
    "minicpm3: no residual scale": ("minicpm3", _each_attention("residual_scale", 1.0)),
    "minicpm3: no embedding scale": ("minicpm3", _unscaled_embedding),
    "minicpm3: no logits scale": ("minicpm3", _unscaled_head),
    "mistral4: no query scale": ("mistral4", _no_query_scale),
    "mistral4: weights not normalised": ("mistral4", _set("norm_topk_prob", False)),
    "mistral4: groups ignored": ("mistral4", _ungroup),
    "transmla: latent norms": ("transmla", _latent_norms),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_reference_shows(made: Made, fault: str) -> None:
    """The export is held against a transformers that computes wrongly: what is not read at all would agree with it."""
    name, plant = FAULTS[fault]
    case = CASES["minicpm3-long" if name == "minicpm3" else name]
    wrong = Oracle(made.checkpoint(case))
    with torch.no_grad():
        plant(wrong.model)
    ids = made.ids(case, 1, 120)
    run = play(made.export(case, logits="all"), ids, [120 - STEPS], [120 - STEPS])
    assert worst(run, made.oracle(case).logits(ids, case.factor_set)) <= REL
    assert worst(run, wrong.logits(ids, case.factor_set)) > BROKEN


MISREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "v2 without its routed scale": ("v2", {"routed_scaling_factor": 1.0}),
    "v2 without its groups": ("v2-grouped", {"topk_method": "greedy"}),
    "v3 without its routed scale": ("v3", {"routed_scaling_factor": 1.0}),
    "v3 without its groups": ("v3", {"n_group": 1, "topk_group": 1}),
    "v3 not normalised": ("v3", {"norm_topk_prob": False}),
    "v3 with one expert less": ("v3", {"num_experts_per_tok": 2}),
    "v3 with its columns in halves": ("v3", {"rope_interleave": False}),
    "kimi without its routed scale": ("kimi-k25", {"routed_scaling_factor": 1.0}),
    "longcat without its routed scale": ("longcat", {"routed_scaling_factor": 1.0}),
    "minicpm3 without its residual scale": ("minicpm3", {"scale_depth": 3**0.5}),
    "minicpm3 without its embedding scale": ("minicpm3", {"scale_emb": 1.0}),
    "minicpm3 without its logits scale": ("minicpm3", {"dim_model_base": HIDDEN}),
    "mistral4 without its query scale": ("mistral4", {"rope_parameters.llama_4_scaling_beta": 0.0}),
    "mistral4 without its mscale": ("mistral4", {"rope_parameters.mscale_all_dim": 0.0}),
}


@pytest.mark.parametrize("fault", MISREAD)
def test_a_misread_config_shows(made: Made, tmp_path: Path, fault: str) -> None:
    """The exporter is given a checkpoint whose config.json states another value than the model was made with."""
    name, fields = MISREAD[fault]
    case = CASES["minicpm3-long" if name == "minicpm3" else name]
    folder = tmp_path / "checkpoint"
    shutil.copytree(made.checkpoint(case), folder)
    raw = json.loads((folder / "config.json").read_text())
    for path, value in fields.items():
        *parents, last = path.split(".")
        place = raw.get("text_config", raw)
        for parent in parents:
            place = place[parent]
        assert place.get(last) != value
        place[last] = value
    (folder / "config.json").write_text(json.dumps(raw))
    ids = made.ids(case, 1, 120)
    run = play(export_model(folder, tmp_path / "x", case.max_context, logits="all"), ids, [120 - STEPS], [120 - STEPS])
    assert worst(run, made.oracle(case).logits(ids, case.factor_set)) > BROKEN


def test_names_of_this_file_are_models() -> None:
    assert set(DENSE) <= set(MODELS) - set(DENSE_ONLY) - set(ALWAYS_MOE)
    assert {name for name, _ in (*FAULTS.values(), *MISREAD.values())} <= set(MODELS)
