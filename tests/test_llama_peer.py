"""llama.cpp as a peer: the plan of a GGUF, the file written from it, and llama.cpp's answers.

Plans need nothing that is not ours. Files and answers need the environment that the benchmark makes under build/peers
(or PEERS names another place); tests that need it are skipped by name where it was never made.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from exporter.errors import InputError
from tests.test_synthetic import tiny
from validate import llama_child, llama_peer, peer_environment
from validate.gguf_plan import matrix_bytes, plan
from validate.llama_peer import Llama, Variant
from validate.peers import AbsentError, ModelShape, Past, Transformers
from validate.synthetic import write_checkpoint

WIDTHS = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64, "q_lora_rank": 96}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707, "mscale_all_dim": 0.707}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {}, "halves": {"rope_interleave": False}, "yarn": {"rope_parameters": YARN},
    "tied": {"tie_word_embeddings": True}}


@pytest.fixture(scope="module")
def peer() -> Path:
    cache = Path(os.environ.get("PEERS", peer_environment.DEFAULT_CACHE))
    if not (cache / "llama" / ".installed").is_file():
        pytest.skip(f"{llama_peer.NAME} is not in {cache}: `validate bench --suite model` makes it")
    return llama_peer.install(cache)


def written(folder: Path, dtype: str = "fp32", **changes: Any) -> Path:
    return write_checkpoint(folder, tiny(**{**WIDTHS, **changes}), dtype)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("llama") / "tiny")


def weights(made: dict[str, Any]) -> dict[str, np.ndarray]:
    return {t["name"]: llama_child.taken(t) for t in made["tensors"]}


def test_a_plan_of_each_form(checkpoint: Path) -> None:
    absorbed, expanded = (plan(checkpoint, form, "f32") for form in ("absorbed", "expanded"))
    json.dumps(absorbed)
    keys = absorbed["keys"]
    assert keys["block_count"] == keys["leading_dense_block_count"] == 3
    assert [keys[f"attention.{name}"] for name in ("head_count_kv", "key_length", "value_length", "key_length_mla",
                                                   "value_length_mla")] == [1, 96, 64, 64, 64]
    assert [expanded["keys"][f"attention.{name}"] for name in ("head_count_kv", "key_length", "value_length")] == [
        4, 64, 64]
    assert not any("mla" in name for name in expanded["keys"])
    ours, theirs = weights(absorbed), weights(expanded)
    kv_b = theirs.pop("blk.1.attn_kv_b.weight").reshape(4, 96, 64)
    assert np.array_equal(ours.pop("blk.1.attn_k_b.weight"), kv_b[:, :32].swapaxes(1, 2))
    assert np.array_equal(ours.pop("blk.1.attn_v_b.weight"), kv_b[:, 32:])
    same = ours.keys() & theirs.keys()
    assert len(same) == len(theirs) - 2
    assert all(np.array_equal(ours[n], theirs[n]) for n in same)
    assert all(ours[t["name"]].shape == tuple(t["shape"]) for t in absorbed["tensors"] if t["name"] in ours)
    assert matrix_bytes(absorbed) == 4 * sum(int(np.prod(t["shape"])) for t in absorbed["tensors"])


def test_dtypes_of_a_plan(tmp_path: Path, checkpoint: Path) -> None:
    made = {t["name"]: t["dtype"] for t in plan(checkpoint, "absorbed", "q4_0")["tensors"]}
    assert made["blk.0.attn_norm.weight"] == "f32"
    assert made["blk.0.attn_q_b.weight"] == "q4_0"
    assert made["output.weight"] == made["token_embd.weight"] == "q8_0"
    narrow = {t["name"]: t["dtype"] for t in plan(written(tmp_path / "narrow", q_lora_rank=24), "absorbed",
                                                   "q8_0")["tensors"]}
    assert narrow["blk.0.attn_q_b.weight"] == "f16"  # 24 columns: no whole block
    assert narrow["blk.0.attn_q_a.weight"] == "q8_0"
    with pytest.raises(InputError, match="'q5_0': expected one of absorbed, expanded, and of f32"):
        plan(checkpoint, "absorbed", "q5_0")


def test_bfloat16_and_halves_are_read_right(tmp_path: Path) -> None:
    made = weights(plan(written(tmp_path / "pairs", "bf16"), "absorbed", "f32"))
    exact = weights(plan(written(tmp_path / "exact"), "absorbed", "f32"))
    assert all(np.allclose(made[n], exact[n], rtol=2**-8) for n in made)
    turned = weights(plan(written(tmp_path / "halves", rope_interleave=False), "absorbed", "f32"))
    row, moved = exact["blk.2.attn_kv_a_mqa.weight"], turned["blk.2.attn_kv_a_mqa.weight"]
    assert np.array_equal(row[:64], moved[:64])
    assert np.array_equal(moved[64::2], row[64:80])
    assert np.array_equal(moved[65::2], row[80:])
    query, moved = (w["blk.2.attn_q_b.weight"].reshape(4, 64, 96) for w in (exact, turned))
    assert np.array_equal(moved[:, 32::2], query[:, 32:48])
    assert np.array_equal(moved[:, :32], query[:, :32])


@pytest.mark.parametrize(("changes", "why"), [
    ({"first_k_dense_replace": 1}, "is written here for dense layers; layer 1 has experts"),
    ({"attention_bias": True}, r"has no place for tensor model\.layers\.0\.self_attn\.\w+\.bias"),
    ({"rope_parameters": {**YARN, "mscale": 1.0}}, r"this one has mscale 1\.0, mscale_all_dim 0\.707"),
    ({"num_hidden_layers": 26, "first_k_dense_replace": 26}, "this one has 26 layers and the query rank 96"),
    ({"q_lora_rank": None}, "this one has 3 layers and the query rank None"),
])
def test_what_llama_cpp_cannot_hold(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(AbsentError, match=f"llama.cpp's deepseek2 .*{why}"):
        plan(written(tmp_path / "made", **changes), "absorbed", "f32")


def test_without_a_compiler_it_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def refuse(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append((words[-1], options["env"].get("CMAKE_ARGS")))
        return subprocess.CompletedProcess(words, int(words[-1] == llama_peer.PACKAGE), "", "ERROR: no C++ compiler\n")

    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(AbsentError, match=r"^pip install llama-cpp-python==\S+ failed: ERROR: no C\+\+ compiler$"):
        llama_peer.install(tmp_path)
    assert [what for what, _ in asked] == [str(tmp_path / "llama"), *llama_peer.PINS]
    assert asked[-1][1] == llama_peer.BUILD["CMAKE_ARGS"]


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no such module' >&2\nexit 3\n")
    python.chmod(0o755)
    child = llama_peer.Child(python)
    with pytest.raises(RuntimeError, match=r"llama\.cpp ended in 'open' \(exit 3\): no such module"):
        child.ask("open")
    child.close()


def test_names_of_variants() -> None:
    assert [v.name for v in llama_peer.variants(("int4",))] == [
        *(f"llama.cpp f32, {form}, {flash}f16 cache" for form in ("absorbed", "expanded") for flash in ("flash, ", "")),
        "llama.cpp f32, absorbed, flash",
        *(f"llama.cpp {dtype}, absorbed, {flash}f16 cache" for dtype in ("f16", "q4_0") for flash in ("flash, ", ""))]


@contextmanager
def opened(peer: Path, checkpoint: Path, work: Path, *chosen: Variant) -> Iterator[list[Llama]]:
    found = llama_peer.subjects(peer, checkpoint, work, 2, chosen)
    try:
        yield found
    finally:
        for subject in found:
            subject.close()


def off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_it_answers_as_transformers_does(peer: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Real tokens, two sequences; then a step and a piece of prompt behind given rows."""
    folder = written(tmp_path / "made", **changes)
    reference, shape = Transformers(folder, 2), ModelShape.of(folder)
    rng = np.random.default_rng(0)
    prompt, follow = rng.integers(0, shape.vocabulary, (2, 200)), rng.integers(0, shape.vocabulary, (2, 4))
    past = Past.draw(shape, 2, 150)
    expected, behind = reference.generate(prompt, follow), reference.hold(past, follow[:, :1])()
    pieced = reference.hold(past, follow)()
    with opened(peer, folder, tmp_path, *llama_peer.variants()) as subjects:
        for subject in subjects:
            assert off(subject.generate(prompt, follow), expected) < subject.tolerance, subject.name
            step = subject.hold(past, follow[:, :1])
            assert off(step(), behind) < subject.tolerance, subject.name
            assert np.array_equal(step(), step())  # the past stays as it is
            assert off(subject.hold(past, follow)(), pieced) < subject.tolerance, subject.name
    assert sorted(p.stem for p in tmp_path.glob("*.gguf")) == ["absorbed-f16", "absorbed-f32", "expanded-f32"]


COARSER = [*(Variant(form, True, d, "f16") for d in ("q8_0", "q4_0") for form in ("absorbed", "expanded")),
           Variant("expanded", False, "f16", "f16")]


@pytest.mark.parametrize("variant", COARSER, ids=lambda v: v.name)
def test_coarser_weights_stay_within_their_tolerance(peer: Path, checkpoint: Path, tmp_path: Path,
                                                     variant: Variant) -> None:
    shape = ModelShape.of(checkpoint)
    prompt = np.random.default_rng(1).integers(0, shape.vocabulary, (1, 40))
    past, expected = Past.draw(shape, 1, 300), Transformers(checkpoint, 2)
    with opened(peer, checkpoint, tmp_path, variant) as (subject,):
        found = subject.generate(prompt, prompt[:, :2])
        assert 1e-6 < off(found, expected.generate(prompt, prompt[:, :2])) < subject.tolerance
        assert off(subject.hold(past, prompt[:, :1])(), expected.hold(past, prompt[:, :1])()) < subject.tolerance
        assert subject.cache_bytes_per_token == 2 * (shape.latent_floats if variant.form == "absorbed" else
                                                     shape.expanded_floats)


def test_what_it_cannot_do_is_one_line(peer: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"open: RuntimeError: llama\.cpp could not load the model: .*nothing\.gguf"):
        Llama(peer, tmp_path / "nothing.gguf", Variant(), 1, ModelShape(1, 1, 1, 1, 2, 1, 1, 1, True))
