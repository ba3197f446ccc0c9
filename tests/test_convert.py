"""`exporter convert`: exact at full rank against transformers' own classes, honest below it; refusals that say why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from transformers import Qwen2ForCausalLM

from engines.__main__ import cli as engines_cli
from exporter.__main__ import cli
from exporter.convert import RECORD, Conversion, ConvertRequest, convert_checkpoint, read_tokens, shape_of
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.llama import Llama
from exporter.low_rank import Moments, attend, choose, convert, principal_axes
from exporter.source import open_model, open_source
from tests.llama_checkpoints import LENGTH, SIZES, VOCABULARY, hot_model, language, saved, trained_model
from validate.absorption import audit
from validate.ladder import Ladder
from validate.parity import check_folder
from validate.references.decoder import DecoderReference, Prompt

FULL = 64  # the most positions that a float32 angle of transformers is good for at 1e-5
ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("llama", {"groups": 4}), "gqa": ("llama", {"groups": 2}), "mqa": ("llama", {"groups": 1}),
    "mha, biases": ("llama", {"groups": 4, "attention_bias": True}),
    "gqa, biases": ("llama", {"groups": 2, "attention_bias": True}),
    "qwen2, tied": ("qwen2", {"groups": 2, "tie_word_embeddings": True}),
    "wide heads": ("llama", {"groups": 2, "head_dim": 32}),
    **{rope: ("llama", {"groups": 2, "rope_parameters": stated}) for rope, stated in ROPES.items()},
}


def answers(folder: Path, sequences: np.ndarray) -> torch.Tensor:
    """Logits [B, T, V] of the float64 reference, which reads the checkpoint with a reader of its own."""
    source = open_model(str(folder))
    reference = DecoderReference(source.decoder, source.record, max_context=sequences.shape[1])
    return torch.stack([a.outputs for a in reference.run([Prompt(torch.from_numpy(s)) for s in sequences]).answers])


def perplexity(logits: torch.Tensor, ids: np.ndarray) -> float:
    wanted = torch.from_numpy(ids)[:, 1:].reshape(-1)
    return float(torch.nn.functional.cross_entropy(logits[:, :-1].reshape(len(wanted), -1).double(), wanted).exp())


def logits_of(model: Any, sequences: np.ndarray) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.double()(torch.from_numpy(sequences)).logits
    model.float()
    return found


def rel(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(trained_model(), tmp_path_factory.mktemp("trained") / "llama")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(hot_model(), tmp_path / "llama")


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"tokens": language(64, seed=5).tolist()}))
    return path


def converted(folder: Path, out: Path, rank: int, columns: int | None = None, tokens: Path | None = None) -> Conversion:
    return convert_checkpoint(ConvertRequest(folder, out, rank, columns, tokens))


def edited(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


# --- exact at full rank ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_full_rank_is_the_same_model(case: str, tmp_path: Path) -> None:
    kind, options = CASES[case]
    model = hot_model(kind, **options)
    made = converted(saved(model, tmp_path / "a"), tmp_path / "b", rank=options["groups"] * options.get("head_dim", 16))
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, FULL))
    assert made.exact
    assert rel(answers(tmp_path / "b", ids), logits_of(model, ids)) < 1e-5


def test_sharded_checkpoints_and_16_bit_weights(tmp_path: Path) -> None:
    saved(hot_model("qwen2").to(torch.bfloat16), tmp_path / "a", max_shard_size="40KB")
    model = Qwen2ForCausalLM.from_pretrained(tmp_path / "a", dtype=torch.float32)
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 2
    converted(tmp_path / "a", tmp_path / "b", rank=32)
    found = load_file_dtypes(tmp_path / "b" / "model.safetensors")
    assert found["model.layers.0.mlp.up_proj.weight"] == "BF16"  # copied as it is
    assert found["model.layers.1.self_attn.kv_b_proj.weight"] == "F32"  # made
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (1, FULL))
    assert rel(answers(tmp_path / "b", ids), logits_of(model, ids)) < 1e-5


def load_file_dtypes(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
    return {name: entry["dtype"] for name, entry in header.items()}


@pytest.mark.parametrize("rope", ROPES)
def test_configurations_of_before_transformers_5_say_the_same(rope: str, tmp_path: Path) -> None:
    """`rope_theta` beside `rope_scaling`, whose kind is called `type`: as most released checkpoints have it."""
    folder = saved(hot_model(rope_parameters=ROPES[rope]), tmp_path / "a")
    expected = Llama(folder).config
    stated = dict(ROPES[rope])
    scaling = None if rope == "theta" else {**stated, "type": stated["rope_type"]}
    for name in ("rope_theta", "rope_type"):
        (scaling or {}).pop(name, None)
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_parameters"]
    old = {**raw, "rope_theta": stated["rope_theta"], "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(old))
    found = Llama(folder).config
    assert np.array_equal(found.inv_freq, expected.inv_freq)
    assert found.rope_factor == expected.rope_factor
    plain = 1e4 ** (-np.arange(8) / 8)
    assert not np.allclose(found.inv_freq, plain, rtol=1e-3)  # or the two would agree on having read nothing


@pytest.mark.parametrize(("groups", "columns"), [(1, 16), (2, 32), (2, 30), (4, 64)])
def test_the_arithmetic_alone_in_float64(groups: int, columns: int, tmp_path: Path) -> None:
    """Without files between: all columns are exact to float64, and fewer are not."""
    llama = Llama(saved(hot_model(groups=groups, attention_bias=True), tmp_path / "a"))
    shape = shape_of(llama, 32 * groups - columns, columns)
    assert shape.rotary == columns
    assert shape.rank == shape.full_rank
    w, x = llama.attention(1), np.random.default_rng(0).standard_normal((40, 64))
    found = attend(convert(w, Moments.unknown(64), shape), w.o, w.o_bias, shape, x)
    error = np.abs(found - llama.attend(w, x)).max() / found.std()
    assert error < 1e-12 if columns == 16 * groups else 1e-3 < error < 1


def test_a_position_free_pair_costs_nothing_where_nothing_turns(tmp_path: Path) -> None:
    """With a theta so vast that all pairs but the first stand still, the columns of the first are all it takes."""
    model = hot_model(attention_bias=True, rope_parameters={"rope_type": "default", "rope_theta": 1e60})
    llama = Llama(saved(model, tmp_path / "a"))
    shape = shape_of(llama, 60, 4)
    assert shape.kept.tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    w, x = llama.attention(0), np.random.default_rng(0).standard_normal((50, 64))
    found = attend(convert(w, Moments.unknown(64), shape), w.o, w.o_bias, shape, x)
    assert np.abs(found - llama.attend(w, x)).max() < 1e-4 * found.std()


def test_the_configuration_says_what_it_was(tmp_path: Path) -> None:
    folder = saved(hot_model(rope_parameters=ROPES["yarn"], tie_word_embeddings=True), tmp_path / "a")
    converted(folder, tmp_path / "b", rank=32)
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["converted_from"]["rope_parameters"]["factor"] == 4.0
    assert raw["tie_word_embeddings"] is True
    c = open_source(str(tmp_path / "b"), layer=1).config
    assert (c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.rope.rope_type) == (32, 32, 1, "explicit")
    assert c.rope.attention_factor == pytest.approx(0.1 * np.log(4) + 1)
    assert type(c).from_dict(json.loads(json.dumps(c.to_dict()))) == c


# --- below full rank ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, 16])
def test_perplexity_falls_with_rank_on_a_trained_model(columns: int | None, trained: Path, tokens: Path, tmp_path: Path
                                                       ) -> None:
    made = [converted(trained, tmp_path / str(r), r, columns, tokens) for r in (2, 4, 8, 16, 24, 32)]
    after = [m.perplexity_after or 0 for m in made]
    before = made[0].perplexity_before or 0
    assert before < 3  # it has learnt
    assert after[0] > 2 * before
    for narrow, wide in pairwise(after):
        assert wide < 1.01 * narrow
    assert after[-1] == pytest.approx(before, rel=1e-6 if columns is None else 5e-3)
    shares = np.array([[layer["latent"] for layer in m.layers] for m in made])
    assert (np.diff(shares, axis=0) > 0).all()
    assert made[0].calibration_tokens == 48 * LENGTH
    assert made[0].held_out_tokens == 16 * (LENGTH - 1)


def test_perplexities_are_those_of_transformers_and_of_the_written_checkpoint(trained: Path, tokens: Path,
                                                                              tmp_path: Path) -> None:
    made = converted(trained, tmp_path / "b", 12, 16, tokens)
    ids = language(64, seed=5)[48:]
    assert made.perplexity_before == pytest.approx(perplexity(logits_of(trained_model(), ids), ids), rel=1e-5)
    assert made.perplexity_after == pytest.approx(perplexity(answers(tmp_path / "b", ids), ids), rel=1e-9)
    assert not made.exact
    assert json.loads((tmp_path / "b" / RECORD).read_text()) == asdict(made)


def test_calibration_helps_and_rotary_columns_do(trained: Path, tokens: Path, tmp_path: Path) -> None:
    ids = language(64, seed=5)[48:]
    calibrated = converted(trained, tmp_path / "a", 8, 16, tokens)
    converted(trained, tmp_path / "b", 8, 16)
    assert perplexity(answers(tmp_path / "b", ids), ids) > 1.1 * (calibrated.perplexity_after or 0)
    full = [converted(trained, tmp_path / f"r{c}", 64 - c, c, tokens) for c in (2, 8, 16, 30)]
    after = [m.perplexity_after or 0 for m in full]
    assert after == sorted(after, reverse=True)
    kept = [m.layers[0]["rotary"] for m in full]
    assert kept == sorted(kept)


def test_the_share_kept_is_the_error_of_the_values(trained: Path) -> None:
    """The latent's share, against the squared error of v over the tokens that calibrated (all columns rotary)."""
    llama = Llama(trained)
    x = llama.normed(0, llama.embed(language(32, seed=3).reshape(-1)))
    moments, shape = Moments.of(x), shape_of(llama, 10, None)
    w = llama.attention(0)
    made = convert(w, moments, shape)
    latent = x @ made.kv_a[:10].T
    v = (latent @ made.kv_b.T + made.kv_b_bias).reshape(len(x), 4, 17)[:, ::2, 1:]  # a head of each group, nope off
    wanted = w.v(x)
    lost = np.square(v - wanted).sum() / np.square(wanted - wanted.mean(axis=0)).sum()
    assert 1 - made.latent_share == pytest.approx(lost, rel=1e-4)
    assert np.abs((v - wanted).mean(axis=0)).max() < 1e-9  # the mean's error is in the bias


def test_axes_and_choice(trained: Path) -> None:
    llama = Llama(trained)
    axes = principal_axes(llama.attention(0), Moments.unknown(64), llama.config)
    gram = np.einsum("igu,igv->iuv", axes.vectors.conj(), axes.vectors)
    assert np.allclose(gram, np.eye(2), atol=1e-12)
    assert axes.need.sum() == pytest.approx(1)
    assert (np.diff(axes.need, axis=1) <= 0).all()
    assert choose(np.array([[5.0, 1], [4, 3], [2, 2]]), 4).tolist() == [1, 2, 1]
    need = sum(principal_axes(llama.attention(i), Moments.unknown(64), llama.config).need for i in range(2))
    assert shape_of(llama, 8, 10).kept.tolist() == choose(np.asarray(need), 5).tolist()


# --- what comes after -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "columns"), [(32, None), (20, 12)])
def test_export_passes_parity(rank: int, columns: int | None, tmp_path: Path) -> None:
    converted(saved(hot_model("qwen2"), tmp_path / "a"), tmp_path / "b", rank, columns)
    for options in ({"layer": 0}, {}):
        out = tmp_path / f"export {len(options)}"
        export(ExportRequest(str(tmp_path / "b"), out, max_context=96, prefill="expanded", **options))
        ladder: Ladder = check_folder(out, 0, lambda *_: None)
        assert ladder.passed
        assert any(r.graph.startswith("decode") for r in ladder.rungs)
        verdicts = audit(out)
        assert {v.judged for v in verdicts} == {"absorbed", "latent"}  # expanded prefills rebuild K and V, and say so
        assert all(v.passed for v in verdicts)


def test_a_scaled_rope_keeps_its_factor_in_both_parts(tmp_path: Path) -> None:
    """YaRN's factor on cos and sin reaches position-free columns too: where nothing turns they are exact."""
    rope = {**ROPES["yarn"], "rope_theta": 1e60, "beta_fast": 1e-9, "beta_slow": 1e-10}
    llama = Llama(saved(hot_model(rope_parameters=rope), tmp_path / "a"))
    assert llama.config.rope_factor > 1.1
    shape = shape_of(llama, 60, 4)
    w, x = llama.attention(0), np.random.default_rng(0).standard_normal((50, 64))
    found = attend(convert(w, Moments.unknown(64), shape), w.o, w.o_bias, shape, x)
    assert np.abs(found - llama.attend(w, x)).max() < 1e-3 * found.std()


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "lengths"), [
    (json.dumps(list(range(40))), [10, 10, 10, 10]), (json.dumps([[1] * 20, [2] * 30]), [20, 30]),
    (json.dumps({"tokens": [3] * 300}), [75] * 4), (" ".join(["7"] * 33), [9, 8, 8, 8]),
    ("\n".join([" ".join(["7"] * 20)] * 3), [20, 20, 20])])
def test_tokens_are_read(text: str, lengths: list[int], tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    assert [len(s) for s in read_tokens(path, 97, 128)] == lengths


@pytest.mark.parametrize(("text", "words"), [
    ("a b c", "holds something that is no token id"), ("[1, 2.5]", "no token id"), ('{"ids": [1]}', "no token id"),
    ("[[1, 2], 3]", "no token id"), ("1 2 3", "3 tokens; expected 32 at least"), ("", "0 tokens"),
    (json.dumps([96] * 31 + [97]), "ids from 96 to 97; expected 0 to 96"), (json.dumps([-1] * 40), "ids from -1"),
    (json.dumps([[1] * 129, [1]]), "a sequence of 129 tokens; expected at most max_position_embeddings = 128"),
    (json.dumps([[1] * 40, [1]]), "expected another, to measure perplexity on")])
def test_tokens_that_are_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        read_tokens(path, 97, 128)


def test_a_token_file_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected a text file of token ids"):
        converted(llama, tmp_path / "b", 8, tokens=tmp_path / "none")
    assert not (tmp_path / "b").exists()


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "columns", "words"), [
    (0, None, "--rank 0: expected 1 to 32, full rank with 32 rotary columns"), (33, None, "--rank 33: expected 1 to"),
    (57, 8, "--rank 57: expected 1 to 56"), (8, 0, "--rope-columns 0: expected an even number from 2 to 32"),
    (8, 7, "--rope-columns 7: expected an even"), (8, 34, "--rope-columns 34: expected an even number from 2 to 32")])
def test_sizes_that_are_refused(rank: int, columns: int | None, words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        converted(llama, tmp_path / "b", rank, columns)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(("changes", "words"), [
    ({"kv_lora_rank": 16}, "an MLA checkpoint already; export it as it is"),
    ({"model_type": "qwen3"}, r"'qwen3' is not converted: it norms every head's query and key \(qk-norm\)"),
    ({"model_type": "gemma2"}, "'gemma2' is not converted: its norms add 1"),
    ({"model_type": "bert"}, "'bert' is not a Llama-style checkpoint known here; expected one of llama, mistral"),
    ({"model_type": "mistral", "sliding_window": 64}, "window of 64 tokens below max_position_embeddings 256"),
    ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "a sliding window of 64 tokens"),
    ({"model_type": "mistral", "max_position_embeddings": 8192}, "a sliding window of 4096 tokens below"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has sliding_attention"),
    ({"quantization_config": {"quant_method": "awq"}}, "its weights are quantised"),
    ({"mlp_bias": True}, "mlp_bias is True; expected False"), ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic' is not converted"),
    ({"rope_parameters": {"rope_type": "linear"}}, "rope_type linear states no factor"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_type llama3 states no low_freq_factor"),
    ({"num_key_value_heads": "2"}, "a value of the wrong kind"), ({"rope_parameters": [1]}, "of the wrong kind"),
    ({"num_key_value_heads": 3}, "4 heads over 3 key/value heads"), ({"vocab_size": None}, "vocab_size is None"),
    ({"num_hidden_layers": 3}, r"tensor model.layers.2.input_layernorm.weight \[64\] is missing"),
    ({"head_dim": 8}, r"q_proj.weight has shape \[64, 64\]; config.json asks for \[32, 64\]"),
])
def test_checkpoints_that_are_refused(changes: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        converted(edited(llama, **changes), tmp_path / "b", 8)
    assert not (tmp_path / "b").exists()


def test_a_window_that_never_closes_is_no_window(llama: Path, tmp_path: Path) -> None:
    edited(llama, model_type="mistral", sliding_window=256)
    assert converted(llama, tmp_path / "b", 32).exact


def _qk_norm(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(16, np.float32)


def _nan(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 3] = np.nan


def _narrow_bias(tensors: dict[str, np.ndarray]) -> None:
    tensors["model.layers.0.self_attn.k_proj.bias"] = np.ones(8, np.float32)


@pytest.mark.parametrize(("fault", "words"), [
    (_qk_norm, r"unknown tensor model.layers.0.self_attn.q_norm.weight.*\(it norms query and key\)"),
    (_nan, "1 of 2048 values of tensor model.layers.1.self_attn.v_proj.weight are NaN"),
    (_narrow_bias, r"k_proj.bias has shape \[8\]; config.json asks for \[32\]")])
def test_weights_that_are_refused(fault: Callable[[dict[str, np.ndarray]], None], words: str, llama: Path,
                                  tmp_path: Path) -> None:
    tensors = {name: t.copy() for name, t in load_file(llama / "model.safetensors").items()}
    fault(tensors)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(InputError, match=words):
        converted(llama, tmp_path / "b", 8)
    assert not list(tmp_path.glob("*b*partial*"))
    assert not (tmp_path / "b").exists()


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(InputError, match=r"no config.json; expected a Hugging Face checkpoint folder"):
            converted(folder, tmp_path / "b", 8)


def test_a_converted_checkpoint_is_not_converted_again(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "b", 8)
    with pytest.raises(InputError, match="an MLA checkpoint already"):
        converted(tmp_path / "b", tmp_path / "c", 8)


def test_nothing_is_overwritten_unasked(llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "b", 8)
    with pytest.raises(InputError, match="is not empty"):
        converted(llama, tmp_path / "b", 16)
    assert convert_checkpoint(ConvertRequest(llama, tmp_path / "b", 16, overwrite=True)).rank == 16
    with pytest.raises(InputError, match=f"holds no {RECORD}"):  # the checkpoint itself, least of all
        convert_checkpoint(ConvertRequest(llama, llama, 16, overwrite=True))
    assert (llama / "model.safetensors").is_file()


@pytest.mark.parametrize(("rope", "words"), [
    ({"rope_type": "explicit"}, "inv_freq missing"),
    ({"rope_type": "default", "inv_freq": [1.0] * 16}, "inv_freq given"),
    ({"rope_type": "explicit", "inv_freq": [1.0] * 3}, "inv_freq has 3 entries; expected qk_rope_head_dim / 2 = 16"),
    ({"rope_type": "explicit", "inv_freq": [-1.0] * 16}, "a negative or infinite frequency")])
def test_explicit_frequencies_that_are_refused(rope: dict[str, Any], words: str, llama: Path, tmp_path: Path) -> None:
    converted(llama, tmp_path / "b", 32)
    edited(tmp_path / "b", rope_parameters=rope)
    with pytest.raises(InputError, match=words):
        open_source(str(tmp_path / "b"), layer=0)


# --- the commands ---------------------------------------------------------------------------------------------------


def test_the_command_prints_one_object_or_a_table(trained: Path, tokens: Path, tmp_path: Path) -> None:
    arguments = ["convert", str(trained), "--rank", "12", "--rope-columns", "16", "--tokens", str(tokens)]
    data = json.loads(CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "b"), "--json"]).stdout)
    assert data["cache_numbers_before"] == 64
    assert data["cache_numbers_after"] == 28
    assert [set(layer) for layer in data["layers"]] == [{"layer", "rotary", "latent"}] * 2
    text = " ".join(CliRunner().invoke(cli, [*arguments, "--out", str(tmp_path / "c")]).output.split())
    assert "rank 12 of 48, 16 rotary columns: lossy" in text
    assert f"{data['perplexity_before']:.4f} before, {data['perplexity_after']:.4f} after" in text
    assert "not measured without --tokens" in CliRunner().invoke(
        cli, ["convert", str(trained), "--rank", "32", "--out", str(tmp_path / "d")]).output


def test_text_becomes_tokens(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text("w3 w1 w4\nw1")
    call = CliRunner().invoke(engines_cli, ["tokenise", str(tmp_path), str(text)])
    assert call.stdout.split() == ["3", "1", "4", "1"]
    assert json.loads(CliRunner().invoke(engines_cli, ["tokenise", str(tmp_path), str(text), "--json"]).stdout) == {
        "tokens": [3, 1, 4, 1]}
    text.write_bytes(b"\xff")
    failed = CliRunner().invoke(engines_cli, ["tokenise", str(tmp_path), str(text)])
    assert "expected a text file in UTF-8" in str(failed.exception)
