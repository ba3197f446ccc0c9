"""Size: what exports of the largest models take, measured in processes of their own.

Seconds are recorded, memory and structure are asserted: a busy machine is slow, but never larger.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest

from validate.synthetic import checkpoint_bytes, named_config, write_checkpoint

ROOT = Path(__file__).resolve().parent.parent
Record = Callable[[str, object], None]
# the kernel's high-water mark of this process image: ru_maxrss would start from the parent's
_CODE = """
import runpy, sys
module, sys.argv[1:] = sys.argv[1], sys.argv[2:]
try:
    runpy.run_module(module, run_name="__main__", alter_sys=True)
finally:
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            sys.stderr.write(f"peak {int(line.split()[1]) * 1024}")
"""


def child(module: str, *words: str) -> tuple[int, float, dict[str, Any]]:
    """Run `python -m MODULE words --json`; returns its peak memory in bytes, its seconds and its JSON."""
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _CODE, module, *words, "--json"], capture_output=True, text=True,
                          cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("peak ")[2]), time.perf_counter() - started, json.loads(done.stdout)


def shown(record: Record, what: str, seconds: float, peak: int) -> None:
    record(what, f"{seconds:.1f} s, peak {peak / 1e6:.0f} MB")
    print(f"{what}: {seconds:.1f} s, peak {peak / 1e6:.0f} MB")


def v3_parameters() -> int:
    """DeepSeek-V3 by hand, from the sizes in its report (arXiv 2412.19437, section 4.2), without its MTP module."""
    D, H, layers, dense, experts = 7168, 128, 61, 3, 256
    attention = (D * 1536 + 1536 + 1536 * H * 192 + D * 576 + 512 + 512 * H * 256 + H * 128 * D)
    sparse = 3 * D * 2048 * (experts + 1) + experts * D + experts
    return 2 * 129280 * D + D + layers * (attention + 2 * D) + dense * 3 * D * 18432 + (layers - dense) * sparse


def test_deepseek_v3_by_hand() -> None:
    assert round(v3_parameters() / 1e9, 2) == 671.03


@pytest.mark.parametrize("target", ["ort", "trt-rtx"])
def test_all_of_deepseek_v3_without_weights(target: str, tmp_path: Path, record_property: Record) -> None:
    peak, seconds, data = child("exporter", "export", "deepseek-v3", "--scope", "model", "--weights", "none",
                                "--target", target, "--dtype", "fp16", "--prefill", "expanded", "--out",
                                str(tmp_path / "x"))
    shown(record_property, f"deepseek-v3 for {target}", seconds, peak)
    assert peak < 3e9
    assert data["attentions"] == 61
    assert data["source_parameters"] == v3_parameters()
    assert data["cache_bytes_per_token"] == 61 * 576 * 2
    assert data["weights"]["written_bytes"] == 0
    for graph in data["graphs"]:
        caches = [t["name"] for t in graph["inputs"] if t["name"].startswith("past_latent.")]
        assert caches == [f"past_latent.{i}" for i in range(61)]
        assert [t["name"] for t in graph["outputs"]] == ["logits", *(f"new_latent.{i}" for i in range(61))]
    check_names(tmp_path / "x", data)
    again = child("exporter", "inspect", str(tmp_path / "x"))
    assert again[2]["source_parameters"] == v3_parameters()


def check_names(folder: Path, data: dict[str, Any]) -> None:
    """Every weight that the manifest counts is named by some graph, and every expert's parameters are counted."""
    named: set[str] = set()
    for graph in data["graphs"]:
        model = onnx.load(folder / graph["file"], load_external_data=False)
        ends = {}
        for i in model.graph.initializer:
            entry = {e.key: e.value for e in i.external_data}
            if entry:
                ends[i.name] = int(entry["offset"]) + int(entry["length"])
        named |= set(ends)
    counted = data["weights"]["parameters"]
    experts = {n: c for n, c in counted.items() if ".experts." in n}
    assert sum(experts.values()) == 58 * 256 * 3 * 7168 * 2048
    whole = {n.rpartition(".")[0] if n.rpartition(".")[2].replace("_", "").isdigit() else n for n in named}
    assert {n for n in counted if not n.startswith("rope.")} <= whole | named


@pytest.mark.parametrize("words", [["deepseek-v3"], ["deepseek-v3", "--scope", "model"]])
def test_inspect_counts_deepseek_v3(words: list[str], record_property: Record) -> None:
    peak, seconds, data = child("exporter", "inspect", *words)
    shown(record_property, "inspect deepseek-v3", seconds, peak)
    assert data["parameters"] == v3_parameters()
    active = v3_parameters() - 58 * (256 - 8) * 3 * 7168 * 2048
    assert data["active_parameters"] == active
    assert peak < 5e8


@pytest.fixture(scope="module")
def seven_gb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The synthetic checkpoint of 7 GB, away again after the last test."""
    dtype, config = named_config("v3-class-7gb")
    folder = write_checkpoint(tmp_path_factory.mktemp("scale") / "checkpoint", config, dtype)
    yield folder
    shutil.rmtree(folder)


def exported_by_child(checkpoint: Path, out: Path, what: str, record: Record, capsys: pytest.CaptureFixture[str],
                      *words: str) -> tuple[int, dict[str, Any]]:
    """Export, say what it took, and remove the written weights (a test's folder outlives it)."""
    peak, seconds, data = child("exporter", "export", str(checkpoint), "--out", str(out), *words)
    with capsys.disabled():
        print()
        shown(record, what, seconds, peak)
    shutil.rmtree(out)
    return peak, data["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["ort", "trt-rtx"])
def test_a_7_gb_checkpoint_is_linked(target: str, seven_gb: Path, tmp_path: Path, record_property: Record,
                                     capsys: pytest.CaptureFixture[str]) -> None:
    """bfloat16 as it is stored: the absorbed products are written, the rest stays."""
    dtype, config = named_config("v3-class-7gb")
    size = checkpoint_bytes(config, dtype)
    assert size > 6.9e9
    peak, weights = exported_by_child(seven_gb, tmp_path / "x", f"7 GB linked for {target}", record_property, capsys,
                                      "--weights", "link", "--dtype", dtype, "--target", target)
    assert peak < 1.5e9
    assert weights["bytes"] > 0.95 * size
    assert weights["written_bytes"] < 0.06 * size
    files = {p.name for p in seven_gb.glob("*.safetensors")}
    assert {Path(n).name for n in weights["linked"]} == files
    assert {r["how"] for r in weights["linked"].values()} == {"hardlink"}


@pytest.mark.slow
def test_a_7_gb_checkpoint_is_copied_tensor_by_tensor(seven_gb: Path, tmp_path: Path, record_property: Record,
                                                      capsys: pytest.CaptureFixture[str]) -> None:
    """Rounded to another dtype, at no more than some tensors in memory."""
    peak, weights = exported_by_child(seven_gb, tmp_path / "x", "7 GB copied as fp16", record_property, capsys,
                                      "--dtype", "fp16", "--target", "trt-rtx")
    assert peak < 2e9
    assert weights["written_bytes"] == weights["bytes"]
