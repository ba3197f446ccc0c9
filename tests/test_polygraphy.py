"""Polygraphy reads what we write, runs and converts every graph, and says so when a golden is wrong or incomplete."""

from __future__ import annotations

import importlib
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from engines.session import check_feed
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import open_export
from validate import polygraphy_run
from validate.metrics import TOLERANCES, compare
from validate.polygraphy_run import REFERENCE, Job, Result, make_cases, run
from validate.references import load_tensors
from validate.traces import TraceMaker

pytest.importorskip("polygraphy", reason="Polygraphy is an extra: pip install -e '.[polygraphy]'")


def made(out: Path, **options: Any) -> Path:
    export(ExportRequest("article", out, **{"target": "trt-rtx", "max_context": 64, "max_batch": 2} | options))
    return out


def jobs(folder: Path, out: Path) -> list[Job]:
    """The jobs of an export, written to `out`, not run."""
    opened = open_export(folder)
    maker = TraceMaker(opened.config, load_tensors(opened.data["source"], opened.config), dtype=opened.dtype, seed=0,
                       max_context=opened.max_context, causal=opened.cache != "none")
    out.mkdir()
    found = [Job(opened, g, make_cases(opened, maker, g.kind), out, out) for g in opened.graphs]
    for job in found:
        job.write()
    polygraphy_run.write_comparator(out, opened)
    return found


def load(path: Path) -> Any:
    from polygraphy.json import load_json

    return load_json(str(path))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = made(tmp_path_factory.mktemp("fp32") / "export", prefill="expanded")
    return folder, run(folder)


def test_every_graph_passes_and_the_export_stays_valid(fp32: tuple[Path, Result]) -> None:
    folder, result = fp32
    names = [g.name for g in open_export(folder).graphs]
    assert result.passed
    assert [(g.graph, g.passed, g.counted, g.cases) for g in result.graphs] == [(n, True, True, 3) for n in names]
    data = result.to_dict()
    assert data["pass"] is True
    assert data["graphs"][0] == {"graph": names[0], "dtype": "fp32", "runner": "onnxrt", "cases": 3, "pass": True,
                                 "counted": True, "note": ""}
    assert data["folder"] == str(folder.resolve() / "polygraphy")
    assert not list(folder.glob(".*"))  # no partial folder is left
    assert not replace(result, graphs=(replace(result.graphs[0], passed=False), *result.graphs[1:])).passed


def test_files_are_polygraphys_own(fp32: tuple[Path, Result]) -> None:
    folder, result = fp32
    opened = open_export(folder)
    for graph in opened.graphs:
        feeds, golden = (load(result.folder / f"{what}.{graph.name}.json") for what in ("inputs", "golden"))
        past = 63 if graph.kind == "decode" else 59  # 64 rows less the new tokens
        assert [f["past_lengths"].tolist() for f in feeds] == [[0], [past], [0, past // 3, past]]
        assert feeds[0]["past_latent.0"].shape[1] == 1  # an empty past is S = 1 with length 0
        for feed, outputs in zip(feeds, golden[REFERENCE], strict=True):
            check_feed(opened, graph, feed)
            assert {n: a.dtype for n, a in outputs.items()} == {t.name: np.dtype(np.float32) for t in graph.outputs}


def test_commands_mention_every_graph_and_run_from_anywhere(fp32: tuple[Path, Result]) -> None:
    folder, result = fp32
    script = (result.folder / "commands.sh").read_text()
    for graph in open_export(folder).graphs:
        lines = {c.runner: c.to_dict() for c in result.commands if c.graph == graph.name}
        assert list(lines) == ["onnxrt", "convert", "trt-rtx", "trt"]
        assert all(line["line"].startswith(f"cd {result.folder} && ") for line in lines.values())
        assert "POLYGRAPHY_USE_TENSORRT_RTX=1 polygraphy run" in lines["trt-rtx"]["line"]
        assert "POLYGRAPHY" not in lines["trt"]["line"].removeprefix("cd ")
        assert "'hidden_states:[1,1,512]'" in lines["trt"]["line"]
        assert all(lines[r]["status"].startswith("not run: ") for r in ("trt-rtx", "trt"))
        assert torch.cuda.is_available() or lines["trt"]["status"] == "not run: no CUDA device"
        assert f"polygraphy run ../{graph.file} --trt" in script
    assert any("commands.sh trt-rtx" in reason for reason in result.not_run)
    assert subprocess.run(["sh", "-n", str(result.folder / "commands.sh")], check=False).returncode == 0
    wrong = subprocess.run(["sh", str(result.folder / "commands.sh"), "cuda"], cwd="/", capture_output=True, text=True,
                           check=False)
    assert wrong.returncode == 2
    assert "usage" in wrong.stderr


def test_conversion_yields_plans_without_tf32(fp32: tuple[Path, Result]) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    folder, result = fp32
    assert [c.graph for c in result.converted] == [g.name for g in open_export(folder).graphs]
    for converted in result.converted:
        assert converted.passed
        assert converted.file is not None
        assert converted.plan_bytes == (result.folder / converted.file).stat().st_size > 1 << 20
    assert "--trt-config-postprocess-script no_tf32.py" in (result.folder / "commands.sh").read_text()


def test_a_wrong_golden_fails_and_an_incomplete_one_does_not_pass(fp32: tuple[Path, Result], tmp_path: Path) -> None:
    from polygraphy.comparator import IterationResult, RunResults

    job = jobs(fp32[0], tmp_path / "out")[-1]
    path, command = job.folder / job.file("golden"), job.command("onnxrt")
    outputs = [dict(r.items()) for r in load(path)[REFERENCE]]
    spread = float(outputs[1]["attn_output"].std())

    def judge(changed: list[dict[str, np.ndarray]]) -> polygraphy_run.GraphRun:
        RunResults([(REFERENCE, [IterationResult(o, runner_name=REFERENCE) for o in changed])]).save(str(path))
        return job.run_onnxrt(command)

    wrong = outputs[1]["attn_output"].copy()
    wrong[0, 0, 7] += 10 * TOLERANCES["fp32"].rel * spread  # one element, a little outside
    failed = judge([outputs[0], outputs[1] | {"attn_output": wrong}, outputs[2]])
    assert not failed.passed
    assert failed.note.startswith("FAILED | Output: 'attn_output' | rel 0.0003")
    assert re.search(r"\(at most 3e-05\), .*worst at \[0, 0, 7\]", failed.note)
    poisoned = outputs[1]["attn_output"].copy()
    poisoned[0, 0, 3] = np.nan
    assert "'attn_output' | NaN differs at 1 of 512 elements, first at [0, 0, 3]" in judge(
        [outputs[0], outputs[1] | {"attn_output": poisoned}, outputs[2]]).note
    lacking = judge([outputs[0], {"new_latent.0": outputs[1]["new_latent.0"]}, outputs[2]])
    assert not lacking.passed
    assert lacking.note == "FAILED | Output: 'attn_output' | float64-reference has no such output"
    # Polygraphy itself ends with 0 here: the last case is simply not compared
    missing = judge(outputs[:2])
    assert not missing.passed
    assert missing.note.startswith("exit status 0, but over 3 cases it passed only attn_output 2 times")


@pytest.mark.slow
def test_fp16_is_run_and_not_counted(tmp_path: Path) -> None:
    folder = made(tmp_path / "export", dtype="fp16", causal=False)
    out = tmp_path / "elsewhere" / "made"
    result = run(folder, out)
    assert result.folder == out.resolve()
    assert [(g.passed, g.counted) for g in result.graphs] == [(True, False)] * len(open_export(folder).graphs)
    assert all("computes fp16 products in fp32" in g.note for g in result.graphs)
    assert result.passed is bool(result.converted)  # what is not counted proves nothing
    assert str(folder.resolve()) in (out / "commands.sh").read_text()  # it does not move with the export
    assert "no_tf32.py" not in (out / "commands.sh").read_text()  # TF32 concerns fp32 alone
    with pytest.raises(InputError, match=r"holds no commands\.sh"):
        run(folder, folder)


def test_bf16_is_written_in_torch_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polygraphy_run.trt, "available", lambda backend: False)
    folder = made(tmp_path / "export", dtype="bf16")
    result = run(folder)
    assert not result.passed
    assert result.graphs == result.converted == ()
    assert "onnxrt, decode.kqt: not run: ONNX Runtime's CPU has no bfloat16 Gemm or MatMul" in result.not_run
    assert any(r.startswith("convert, decode.kqt: not run: tensorrt_rtx is not installed") for r in result.not_run)
    feed, golden = (load(result.folder / f"{what}.decode.kqt.json") for what in ("inputs", "golden"))
    assert feed[0]["past_lengths"].dtype == torch.int64
    assert feed[0]["hidden_states"].dtype == golden[REFERENCE][0]["attn_output"].dtype == torch.bfloat16


@pytest.mark.parametrize(("cache", "output"), [("scatter", "latent_cache_out.0"), ("concat", "present_latent.0")])
def test_cache_goldens_match_what_onnx_runtime_returns(cache: str, output: str, tmp_path: Path) -> None:
    import onnxruntime as ort

    job = jobs(made(tmp_path / "export", cache=cache), tmp_path / "out")[-1]
    session = ort.InferenceSession(str(job.made.folder / job.graph.file))
    for feed, golden in zip(load(job.folder / job.file("inputs")), load(job.folder / job.file("golden"))[REFERENCE],
                            strict=True):
        check_feed(job.made, job.graph, feed)
        found = dict(zip([o.name for o in session.get_outputs()], session.run(None, dict(feed)), strict=True))
        assert set(found) == {"attn_output", output}
        assert all(compare(found[n], golden[n]).within(TOLERANCES["fp32"]) for n in found)


@pytest.mark.parametrize("options", [{"max_context": 1}, {"max_context": 2, "cache": "scatter"},
                                     {"max_context": 2, "cache": "concat"}])
def test_cases_fit_the_smallest_exports(options: dict[str, Any], tmp_path: Path,
                                        capfd: pytest.CaptureFixture[str]) -> None:
    for job in jobs(made(tmp_path / "export", **options), tmp_path / "out"):
        for case in job.cases:
            check_feed(job.made, job.graph, case.feed)
    assert capfd.readouterr().out == ""  # stdout belongs to --json; Polygraphy logs there


@pytest.mark.parametrize(("log", "reason"), [
    ("[I] a\n[E]     FAILED | Output: 'y' | Diff\n[E] FAILED | Runtime: 1s", "FAILED | Output: 'y' | Diff"),
    ("[E] In node 80: UNSUPPORTED_NODE\n[!] Could not parse", "In node 80: UNSUPPORTED_NODE; Could not parse"),
    ('[E]   File "loader.py", line 1\n       f()\n[!] not available', "not available"),
    ("[I] a\nTraceback\nFileNotFoundError: weights.safetensors\n\n", "FileNotFoundError: weights.safetensors"),
    ("", "Polygraphy printed nothing")])
def test_the_reason_is_the_line_that_says_why(log: str, reason: str) -> None:
    assert polygraphy_run._reason(log) == reason


def test_an_engine_that_ignores_an_input_is_a_failure(fp32: tuple[Path, Result], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is an extra: pip install -e '.[rtx]'")
    job = replace(jobs(fp32[0], tmp_path / "out")[-1], home=tmp_path / "out")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2]),
              helper.make_tensor_value_info("mask", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "deaf", inputs,
                              [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    onnx.save(model, tmp_path / "deaf.onnx")
    args = ("convert", str(tmp_path / "deaf.onnx"), "--convert-to", "trt", "-o", f"{job.graph.name}.engine")
    converted = job.convert(replace(job.command("convert"), args=args))
    assert (converted.passed, converted.file, converted.note) == (False, None, "Unused Input: mask")
    assert not list(job.folder.glob("*.engine"))


def test_bad_input_is_one_line(fp32: tuple[Path, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                               capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = fp32
    with pytest.raises(InputError, match="--seed -1"):
        run(folder, tmp_path / "out", seed=-1)
    with pytest.raises(InputError, match=r"no manifest\.json"):
        run(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, share=None: None)
    with pytest.raises(InputError, match=r"pip install -e '\.\[polygraphy\]' in the toolkit's checkout"):
        run(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().out == ""
