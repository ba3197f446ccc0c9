"""The float64 decoder reference is what transformers computes, for every family, and reads what checkpoints hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter.errors import InputError
from exporter.source import ModelSource, open_model
from tests.model_checkpoints import GROUPS, MODELS, ORIGINAL_POSITIONS, VOCAB, tiny_checkpoint
from tests.transformers_oracle import FactorSet, Oracle
from validate.metrics import compare
from validate.references import DecoderReference, Prompt, QuantisedError
from validate.references.decoder_tensors import canonical_name, open_decoder_tensors

pytest.importorskip("transformers")
REL, TOKENS = 1e-4, 100
MARGIN = 2e-5  # of a router's scores: float32 noise is well below
BROKEN = 1e-2


def prompts(ids: np.ndarray) -> list[Prompt]:
    return [Prompt(torch.from_numpy(row)) for row in ids]


def logits(reference: DecoderReference, ids: np.ndarray) -> np.ndarray:
    return np.stack([a.outputs.numpy() for a in reference.run(prompts(ids)).answers])


def reference_of(source: ModelSource, max_context: int = 2 * TOKENS, **options: object) -> DecoderReference:
    return DecoderReference(source.decoder, source.record, max_context=max_context, **options)  # type: ignore[arg-type]


def clear_ids(oracle: Oracle, tokens: int = TOKENS) -> np.ndarray:
    for seed in range(300):
        ids = np.random.default_rng([seed, 5]).integers(0, VOCAB, (1, tokens))
        if oracle.router_margin(ids) > MARGIN:
            return ids
    raise AssertionError("no token ids keep every router off its edges")


CASES: dict[str, tuple[str, FactorSet | None]] = {n: (n, None) for n in MODELS if n != "minicpm3"} | {
    "minicpm3-short": ("minicpm3", "short"), "minicpm3-long": ("minicpm3", "long")}


@pytest.mark.parametrize("case", CASES)
def test_every_family_is_transformers(case: str, tmp_path: Path) -> None:
    name, kind = CASES[case]
    oracle, source = Oracle(tiny_checkpoint(tmp_path / "c", name)), open_model(str(tmp_path / "c"))
    tokens = ORIGINAL_POSITIONS if kind == "short" else TOKENS
    ids = clear_ids(oracle, tokens)
    reference = reference_of(source, tokens if kind == "short" else 2 * TOKENS)
    run = reference.run(prompts(ids))
    assert compare(oracle.logits(ids, kind)[0], run.answers[0].outputs.numpy()).rel <= REL
    margin = float(run.answers[0].margins.min()) if run.routings else float("inf")
    assert margin == pytest.approx(oracle.router_margin(ids), rel=0.6)  # groups: half the gap


@pytest.mark.parametrize("options", [{"sharded": True}, {"dtype": torch.bfloat16}, {"sharded": True, "layers": 2}])
@pytest.mark.parametrize("name", ["kimi-k25", "mistral4", "longcat"])
def test_however_it_is_stored(name: str, options: dict[str, object], tmp_path: Path) -> None:
    """Wrapped, fused and per-expert tensors, in shards, in bfloat16."""
    oracle = Oracle(tiny_checkpoint(tmp_path / "c", name, **options))  # type: ignore[arg-type]
    ids = clear_ids(oracle, 60)
    assert compare(oracle.logits(ids), logits(reference_of(open_model(str(tmp_path / "c"))), ids)).rel <= REL


FAULTS = {
    "routed scale": ("v3", {"routed_scaling_factor": 1.0}), "groups": ("v3", {"n_group": 1, "topk_group": 1}),
    "bias": ("v3", {"choice_bias": False}), "normalisation": ("v3", {"normalise": False}),
    "shared experts": ("v3", {"shared_intermediate_size": 0}), "scoring": ("longcat", {"scoring": "sigmoid"}),
    "group score": ("v3", {"group_score": "max"}), "output norm": ("axk1", {"output_norm": False})}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_depends_on_what_the_configuration_says(fault: str, tmp_path: Path) -> None:
    name, fields = FAULTS[fault]
    oracle, source = Oracle(tiny_checkpoint(tmp_path / "c", name)), open_model(str(tmp_path / "c"))
    ids, moe = clear_ids(oracle, 60), source.decoder.moe
    assert moe is not None
    wrong = replace(source.decoder, moe=replace(moe, **fields))  # type: ignore[arg-type]
    found = logits(DecoderReference(wrong, source.record, max_context=200), ids)
    assert compare(found, oracle.logits(ids)).rel > BROKEN


def test_a_past_is_what_the_tokens_would_have_left(tmp_path: Path) -> None:
    """Cache rows given as a past, and a slice continued from hidden states, answer as the whole sequence does."""
    tiny_checkpoint(tmp_path / "c", "longcat")
    source, ids = open_model(str(tmp_path / "c")), np.random.default_rng(0).integers(0, VOCAB, 30)
    whole = reference_of(source).run(prompts(ids[None])).answers[0]
    later = reference_of(source).run([Prompt(torch.from_numpy(ids[20:]), whole.rows[:, :20])]).answers[0]
    assert compare(later.outputs.numpy(), whole.outputs[20:].numpy()).rel < 1e-9
    assert compare(later.rows.numpy(), whole.rows[:, 20:].numpy()).rel < 1e-9
    first = reference_of(source, layers=range(1)).run(prompts(ids[None])).answers[0]
    second = reference_of(source, layers=range(1, 2)).run([Prompt(first.outputs)]).answers[0]
    assert compare(second.outputs.numpy(), whole.outputs.numpy()).rel < 1e-9
    assert torch.equal(first.rows, whole.rows[:2])
    assert first.margins.shape == (1, 30)


def test_sequences_side_by_side_do_not_meet(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "c", "v3")
    reference, rng = reference_of(open_model(str(tmp_path / "c"))), np.random.default_rng(0)
    several = [rng.integers(0, VOCAB, n) for n in (1, 17, 30)]
    together = reference.run([Prompt(torch.from_numpy(ids)) for ids in several]).answers
    for ids, answer in zip(several, together, strict=True):
        alone = reference.run(prompts(ids[None])).answers[0]
        assert compare(answer.outputs.numpy(), alone.outputs.numpy()).rel < 1e-9


def test_narrower_dtypes_show_their_own_error(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "c", "youtu")
    source, ids = open_model(str(tmp_path / "c")), np.random.default_rng(0).integers(0, VOCAB, (1, 40))
    exact = logits(reference_of(source), ids)
    rel = [compare(logits(reference_of(source, dtype=d), ids), exact).rel
           for d in (torch.float32, torch.float16, torch.bfloat16)]
    assert rel[0] < 1e-4 < rel[1] < 0.1 < 2 * rel[2] < 2


def test_groups_have_margins_of_their_own(tmp_path: Path) -> None:
    """A choice that is clear among experts may hang on the choice of groups."""
    tiny_checkpoint(tmp_path / "c", "v3")
    source = open_model(str(tmp_path / "c"))
    assert source.decoder.moe is not None
    assert source.decoder.moe.n_group == GROUPS
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 60))
    limited = reference_of(source).run(prompts(ids)).routings[0]
    free = replace(source.decoder, moe=replace(source.decoder.moe, n_group=1, topk_group=1))
    unlimited = DecoderReference(free, source.record, max_context=200).run(prompts(ids)).routings[0]
    assert torch.equal(limited.scores, unlimited.scores)
    assert not torch.equal(limited.margin, unlimited.margin)


def test_a_preset_is_drawn_layer_by_layer() -> None:
    source = open_model("youtu-llm-2b", seed=3)
    hidden = torch.randn(3, source.decoder.attention.hidden_size, dtype=torch.float64)
    run = DecoderReference(source.decoder, source.record, max_context=64, layers=range(5, 6)).run([Prompt(hidden)])
    assert run.answers[0].outputs.shape == hidden.shape
    assert torch.isfinite(run.answers[0].outputs).all()


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint(tmp_path / "c", "v3")
    source = open_model(str(folder))
    with pytest.raises(InputError, match=r"has no tensor model\.nothing"):
        open_decoder_tensors(source.record, source.decoder).get("model.nothing")
    with pytest.raises(InputError, match="source kind is 'article'"):
        open_decoder_tensors({"kind": "article"}, source.decoder)
    path, config = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(QuantisedError, match="float8_e4m3fn"):
        logits(reference_of(source), np.zeros((1, 3), np.int64))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(QuantisedError, match=r"is quantised \(fp8\)"):
        open_decoder_tensors(source.record, source.decoder)
    config.unlink()
    with pytest.raises(InputError, match=r"no readable config\.json"):
        open_decoder_tensors(source.record, source.decoder)


def test_wrappers_come_off() -> None:
    assert canonical_name("language_model.model.norm.weight", "language_model.") == "model.norm.weight"
    assert canonical_name("model.language_model.layers.0.x", "model.language_model.") == "model.layers.0.x"
    assert canonical_name("lm_head.weight", "language_model.") == "lm_head.weight"
