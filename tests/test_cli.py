"""The command line that programs depend on: JSON keys, exit codes, one object on stdout, tables for people."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


def run(*words: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-m", *words], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def run_json(*words: str, code: int = 0) -> dict[str, Any]:
    """The one JSON object that a command prints; fails if there is anything else."""
    status, out, err = run(*words, "--json")
    assert status == code, err
    lines = out.splitlines()
    assert len(lines) == 1, out
    data = json.loads(lines[0])
    assert isinstance(data, dict)
    return data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 export for TensorRT-RTX, made by the command itself."""
    out = tmp_path_factory.mktemp("cli") / "export"
    run_json(
        "exporter",
        "export",
        "article",
        "--out",
        str(out),
        "--dtype",
        "fp16",
        "--target",
        "trt-rtx",
        "--max-context",
        "128",
        "--prefill",
        "expanded",
    )
    return out


def test_inspect_export(folder: Path) -> None:
    data = run_json("exporter", "inspect", str(folder))
    assert {"config", "cache", "graphs"} <= set(data)
    assert data["cache"] == "append"
    assert data["config"]["kv_lora_rank"] == 128
    for graph in data["graphs"]:
        assert set(graph) == {"name", "kind", "formulation", "prefill_form", "default", "file", "inputs", "outputs"}
        for tensor in (*graph["inputs"], *graph["outputs"]):
            assert set(tensor) == {"name", "shape", "dtype"}
    assert {g["kind"] for g in data["graphs"]} == {"prefill", "decode"}
    assert run("exporter", "inspect", str(folder), "--verify")[0] == 0


def test_presets_and_inspect_source() -> None:
    names = run_json("exporter", "presets")["presets"]
    assert list(names) == ["a.x-k1", "deepseek-r1", "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "glm-4.7-flash",
                           "kimi-k2.5", "kimi-k2", "longcat-flash", "minicpm3-4b", "mistral-small-4", "sarvam-105b",
                           "youtu-llm-2b", "article"]
    for options, attentions in ((["--layer", "0"], 1), ([], 61)):
        data = run_json("exporter", "inspect", "deepseek-v3", *options)
        found = data["latent_bytes_per_token"], data["expanded_bytes_per_token"]
        assert found == (1152 * attentions, 81920 * attentions)


def test_build_and_inspect_engines(folder: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    data = run_json("engines", "build", str(folder), "--backend", "trt-rtx", "--chunk", "64", "--overwrite")
    for engine in data["engines"]:
        assert {"graph", "kind", "formulation", "activation_bytes", "plan_bytes"} <= set(engine)
        assert engine["activation_bytes"] > 0
        assert engine["plan_bytes"] > 0
    shown = run_json("engines", "inspect", str(folder))["engines"]
    assert [e["graph"] for e in shown] == [e["graph"] for e in data["engines"]]


def test_memory(folder: Path) -> None:
    data = run_json("validate", "memory", str(folder), "--chunk", "32")
    assert (data["latent_bytes_per_token"], data["expanded_bytes_per_token"]) == (2 * 154, 2 * 8 * (58 + 32))
    assert data["mha_bytes_per_token"] == 1440
    assert data["ratio"] == pytest.approx(1440 / 308)
    assert data["article"]["mha_gib"] == 16.0
    assert data["article"]["latent_gib"] == 1.0
    assert data["article"]["latent_and_rope_gib"] == 1.125
    measured = {e["subject"]: e["bytes_per_token"] for e in data["eager"]}
    assert measured == {"MLA, absorbed (latent rows)": 308, "MLA, expanded K/V": 1440, "MHA, same width": 1440}
    assert all(r["activation_bytes"] >= 0 and r["io_bytes"] > 0 for r in data["ort"])
    for engine in data["engines"]:
        assert {"graph", "kind", "formulation", "activation_bytes", "plan_bytes"} <= set(engine)


def test_parity_passes_and_fails_by_exit_code(folder: Path) -> None:
    data = run_json("validate", "parity", str(folder), "--no-network")
    assert data["pass"] is True
    for rung in data["rungs"]:
        assert {"name", "graph", "cache", "formulation", "dtype", "rel", "cosine", "pass"} <= set(rung)
    assert {"eager-absorbed", "mha", "weights", "interpreter/decode"} <= {r["name"] for r in data["rungs"]}
    if not data["not_run"]:
        pytest.fail("without a GPU something must be reported as not run")
    planted = run_json(
        "validate",
        "parity",
        "article",
        "--dtype",
        "fp32",
        "--cache",
        "append",
        "--plant",
        "up-v-bias-lost",
        "--max-context",
        "64",
        code=1,
    )
    assert planted["pass"] is False


def test_failed_check_for_people() -> None:
    status, out, err = run("validate", "parity", "article", "--dtype", "fp32", "--cache", "append", "--plant",
                           "rope-on-latent", "--max-context", "64")
    assert status == 1
    assert "FAIL" in out
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_unknown_fault_is_bad_input() -> None:
    data = run_json("validate", "parity", "article", "--plant", "mscale-dropped", code=2)
    assert "expected one of kv-b-order" in data["error"]


@pytest.mark.parametrize("words", [("exporter",), ("engines",), ("validate",)])
def test_help(words: tuple[str, ...]) -> None:
    status, out, _ = run(*words, "--help")
    assert status == 0
    assert "Commands:" in out


def modules_after(module: str, *words: str) -> set[str]:
    """The modules that a command line has imported by its end."""
    code = (f"import runpy, sys\nsys.argv = ['x', *{list(words)!r}]\n"
            f"try: runpy.run_module({module!r}, run_name='__main__')\nexcept SystemExit: pass\nprint(*sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("module", ["exporter", "engines", "validate"])
def test_help_needs_no_heavy_import(module: str) -> None:
    assert not modules_after(module, "--help") & {"torch", "onnx", "onnxruntime", "numpy", "rich"}


def test_export_needs_no_torch(tmp_path: Path) -> None:
    assert "torch" not in modules_after("exporter", "export", "article", "--out", str(tmp_path / "x"), "--json")


@pytest.mark.slow
def test_activation_survey(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx")
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- activation:begin -->\nold\n<!-- activation:end -->\nb\n")
    data = run_json("validate", "activation", "--dtype", "fp16", "--heads", "4", "--update", str(page))
    cells = {(f["cache"], f["formulation"], f["limits"]["tokens"]): f["activation_bytes"] for f in data["figures"]}
    assert cells["append", "kqt", 1] < cells["append", "qkt", 1] / 5 < cells["concat", "expanded", 1] / 5
    text = page.read_text()
    assert text.startswith("a\n<!-- activation:begin -->\n| dtype | heads |")
    assert text.endswith("<!-- activation:end -->\nb\n")
    assert "old" not in text
