"""The ladder over every preset, cache form, formulation and dtype: narrow ones here, the published widths when slow."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.presets import PRESETS
from tests.conftest import DISTINCT
from tests.marks import fast, slow
from validate.metrics import TOLERANCES, Tolerance, compare
from validate.parity import Ladder, check_folder, check_model

NAMES = DISTINCT
OFTEN = ("article", "deepseek-v2-lite", "minicpm3-4b", "longcat-flash", "mistral-small-4", "youtu-llm-2b")
DTYPES = ("fp32", "fp16", "bf16")
CACHES = ("append", "scatter", "concat")


def failures(ladder: Ladder) -> list[str]:
    return [
        f"{r.name} {r.graph} {r.cache} {r.dtype}: rel {r.rel:.1e}" for r in ladder.rungs if r.counted and not r.passed
    ]


@pytest.mark.parametrize(("name", "seed"), [*fast([(name, 0) for name in NAMES], [(name, 0) for name in OFTEN]),
                                            ("deepseek-v3", 1), *slow([("article", 2)])])
def test_narrow_presets_fp32(narrow: list[str], name: str, seed: int) -> None:
    """All cache forms, both prefill forms; past the original context (4096, or longrope's 64)."""
    # the scatter form pays for S_max rows at every step: only one preset goes far with it
    contexts = {"append": 5000, "concat": 5000, "scatter": 5000 if name == "deepseek-v3" and not seed else 400}
    requests = [
        ExportRequest(
            f"narrow-{name}", Path("unused"), cache=cache, prefill=prefill, max_context=contexts[cache], seed=seed
        )
        for cache in CACHES
        for prefill in ("absorbed", "expanded")
    ]
    ladder = check_model(requests, seed, backends=["interpreter", "ort"])
    assert ladder.passed, failures(ladder)
    assert {r.cache for r in ladder.rungs} == set(CACHES)
    assert {r.formulation for r in ladder.rungs} == {"-", "kqt", "qkt", "attention", "expanded", "expanded-attention"}


@pytest.mark.parametrize(("name", "dtype"), fast(
    [(name, dtype) for name in NAMES for dtype in ("fp16", "bf16")],
    [*((name, "bf16") for name in OFTEN), ("deepseek-r1", "fp16"), ("minicpm3-4b", "fp16")]))
def test_narrow_presets_16_bit(narrow: list[str], name: str, dtype: str) -> None:
    requests = [
        ExportRequest(f"narrow-{name}", Path("unused"), cache=cache, prefill=prefill, dtype=dtype, max_context=400)
        for cache in CACHES
        for prefill in ("absorbed", "expanded")
    ]
    ladder = check_model(requests, backends=["interpreter"])
    assert ladder.passed, failures(ladder)
    assert all(r.counted for r in ladder.rungs)


@pytest.mark.parametrize("name", ["narrow-deepseek-v3", *slow(["narrow-deepseek-v2-lite", "narrow-article"])])
def test_folded_weights(narrow: list[str], name: str) -> None:
    for dtype in ("fp32", "fp16"):
        request = ExportRequest(name, Path("unused"), absorb="folded", dtype=dtype, max_context=300)
        ladder = check_model([request], backends=["interpreter", "ort"])
        assert ladder.passed, failures(ladder)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("prefill", ["absorbed", "expanded"])
def test_bidirectional(narrow: list[str], merge: bool, prefill: str) -> None:
    request = ExportRequest("narrow-article", Path("unused"), causal=False, merge_q=merge, prefill=prefill)
    ladder = check_model([request], backends=["interpreter", "ort"])
    assert ladder.passed, failures(ladder)
    assert any(r.name == "ort/bidirectional" for r in ladder.rungs)


def test_16_bit_on_ort_is_reported_and_never_counted(narrow: list[str]) -> None:
    request = ExportRequest("narrow-deepseek-v2-lite", Path("unused"), dtype="fp16", max_context=200)
    ladder = check_model([request], backends=["ort"])
    by_arithmetic = [r for r in ladder.rungs if r.name.startswith("ort/") and r.name != "ort/untouched"]
    assert by_arithmetic
    assert not any(r.counted for r in by_arithmetic)
    bf16 = check_model([ExportRequest("narrow-deepseek-v2-lite", Path("unused"), dtype="bf16", max_context=200)],
                       backends=["ort"])
    assert bf16.not_run == ["ort, bf16: not run: ONNX Runtime's CPU has no bfloat16 MatMul"]


def test_ladder_climbs_back_to_the_source(narrow: list[str], tmp_path: Path) -> None:
    """A weight changed in the exported file (its hash repaired) is a red rung: the reference reads the source."""
    from exporter import manifest

    out = tmp_path / "x"
    made = export(ExportRequest("narrow-deepseek-v2-lite", out, max_context=200))
    assert check_folder(out).passed
    weights = out / "weights.safetensors"
    raw = np.memmap(weights, np.float32, "r+", offset=8192)
    raw[: raw.size // 2] *= np.float32(1.01)
    raw.flush()
    data = dict(made.data)
    data["files"] = {n: manifest.file_record(out / n) for n in data["files"]}
    (out / manifest.NAME).write_text(json.dumps(data))
    ladder = check_folder(out)
    assert not ladder.passed
    assert "weights" in {r.name for r in ladder.rungs if not r.passed}


def test_changed_source_is_refused(tmp_path: Path) -> None:
    from tests.checkpoints import tiny_checkpoint

    folder = tiny_checkpoint(tmp_path / "ckpt", "deepseek_v3")
    export(ExportRequest(str(folder), tmp_path / "x", layer=1, max_context=64))
    assert check_folder(tmp_path / "x").passed
    (folder / "model.safetensors").touch()
    with pytest.raises(InputError, match="changed since the export"):
        check_folder(tmp_path / "x")


def test_compare_sees_masks_before_numbers() -> None:
    a, b = np.ones((2, 3)), np.ones((2, 3))
    a[1, 2] = np.nan
    assert not compare(a, b).within(Tolerance(1e9, 2))
    b[1, 2] = np.nan
    assert compare(a, b).within(TOLERANCES["fp32"])
    b[0, 0] = 1.5
    assert compare(a, b).worst == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_published_widths(name: str, dtype: str, cache: str) -> None:
    # the scatter form pays for S_max rows at every step; how far it reaches is tested narrow
    context = min(PRESETS[name].max_position_embeddings, 600 if cache == "scatter" else 5000)
    requests = [ExportRequest(name, Path("unused"), dtype=dtype, cache=cache, prefill=prefill, max_context=context)
                for prefill in ("absorbed", "expanded")]
    ladder = check_model(requests, backends=["interpreter", "ort"])
    assert ladder.passed, failures(ladder)
