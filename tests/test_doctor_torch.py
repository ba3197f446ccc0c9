"""The doctor on attentions that torch.onnx exported from plain PyTorch: sound ones raise nothing, faults are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.marks import fast
from tests.torch_attentions import NOPE, RANK, ROPE, SCALE, Style, config_file, saved
from validate.__main__ import cli
from validate.doctor import DoctorRequest, examine
from validate.doctor_ailments import Report

pytestmark = pytest.mark.filterwarnings("ignore")  # of the exporters about themselves
MEASURED = ("RoPE's layout, measured", "RoPE's frequencies and factor, measured", "softmax scale of the rotary half")
YARN = {"type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}


def report_on(folder: Path, style: Style, dynamo: bool = False, **changed: Any) -> Report:
    path, config = saved(folder / "g.onnx", style, dynamo), config_file(folder, style, **changed)
    return examine(DoctorRequest(str(path), config=config))


def found(report: Report) -> set[tuple[str, str]]:
    return {(f.name, f.severity) for f in report.findings}


TORCHSCRIPT = [(scores, rope, False) for scores in ("sum", "query", "early", "joined")
               for rope in ("halves", "stacked", "sorted")]
DYNAMO = [("sum", "halves", True), ("sum", "stacked", True), ("joined", "stacked", True)]


@pytest.mark.parametrize(("scores", "rope", "dynamo"), fast(
    TORCHSCRIPT + DYNAMO, [*TORCHSCRIPT[::2], DYNAMO[1]]))  # every spelling of scores and of RoPE
def test_scale_wherever_it_was_put(scores: str, rope: str, dynamo: bool, tmp_path: Path) -> None:
    """The right one raises nothing, and was measured; another one is named, in the very same graph."""
    sound = report_on(tmp_path, Style(scores, rope), dynamo)
    assert found(sound) == set()
    assert all(any(words in line for line in sound.examined) for words in MEASURED), sound.not_examined
    wrong = report_on(tmp_path, Style(scores, rope, scale=(RANK + ROPE) ** -0.5), dynamo)
    assert found(wrong) == {("scale-from-rank", "fault")}
    assert f"the scores' scale is {(RANK + ROPE) ** -0.5:.5f}; expected {SCALE:.5f}" in wrong.findings[0].evidence


# a style, what its configuration says beside the usual, what must be found, and words of the evidence
FAULTS: dict[str, tuple[Style, dict[str, Any], tuple[str, str], str]] = {
    "from nope": (Style(scale=NOPE**-0.5), {}, ("scale-from-nope", "fault"), "it is 16^-1/2"),
    "missing": (Style(rope="stacked", scale=1.0), {}, ("scale-missing", "fault"), "no scale at all: right only if"),
    "twice": (Style(rope="stacked", scale=SCALE**2), {}, ("scale-twice", "fault"), "applied twice"),
    "no name": (Style(scale=0.9 * SCALE), {}, ("scale-wrong", "fault"), "is 0.18371; expected 0.20412"),
    "mscale": (Style(rope="stacked", stretch=(1, 0.5125, 0.025, 0.025)), {"rope_scaling": YARN},
               ("mscale-dropped", "fault"), "without mscale^2"),
    "halves for pairs": (Style(rope="halves"), {"rope_interleave": True}, ("rope-layout", "remark"), "turns half"),
    "pairs for halves": (Style(rope="stacked"), {"rope_interleave": False}, ("rope-layout", "remark"), "turns pairs"),
    "key in halves": (Style(rope="stacked", key_rope="halves"), {}, ("key-only-deinterleaved", "fault"),
                      "turns half of the key"),
    "key in sorted order": (Style(rope="stacked", key_rope="sorted"), {}, ("key-only-deinterleaved", "fault"),
                            "turns pairs of the key"),
    "another base": (Style(rope="stacked"), {"rope_theta": 5e4}, ("rope-theta", "fault"), "base 10000"),
    "unstretched": (Style(rope="stacked"), {"rope_scaling": YARN}, ("rope-unstretched", "fault"), "plain ones"),
    "other frequencies": (Style(rope="stacked", stretch=(1, 1, 1.3, 1)), {}, ("rope-frequencies", "fault"), "off by"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults(name: str, tmp_path: Path) -> None:
    style, changed, finding, words = FAULTS[name]
    report = report_on(tmp_path, style, **changed)
    assert finding in found(report)
    assert any(words in f.evidence for f in report.findings if f.name == finding[0]), report.findings


def test_key_and_query_differ_in_dynamo(tmp_path: Path) -> None:
    report = report_on(tmp_path, Style(rope="stacked", key_rope="halves"), dynamo=True)
    assert ("key-only-deinterleaved", "fault") in found(report)


def test_query_with_a_bias(tmp_path: Path) -> None:
    """What RoPE turns is the projection with its bias."""
    report = report_on(tmp_path, Style(rope="stacked", bias=True))
    assert found(report) == set()
    assert any(MEASURED[2] in line for line in report.examined)


def test_scores_that_do_not_follow_the_rows(tmp_path: Path) -> None:
    """Capped scores have no one scale: that is said, right or wrong, and no fault is made of it."""
    for scale in (SCALE, 1.0):
        report = report_on(tmp_path, Style("capped", scale=scale))
        assert found(report) == set()
        assert any(name.endswith("softmax scale") and "do not grow" in why for name, why in report.not_examined)


def test_headline_counts_what_was_not_examined(tmp_path: Path) -> None:
    """No finding is no pass of what could not be asked; the exit code is that of the findings."""
    path = saved(tmp_path / "g.onnx", Style())
    missed = report_on(tmp_path, Style()).not_examined
    shown = CliRunner().invoke(cli, ["doctor", str(path), "--config", str(tmp_path / "config.json")])
    assert shown.exit_code == 0
    headline = shown.stdout.splitlines()[0]
    assert headline == f"nothing found in what could be examined; {len(missed)} things could not be"
    assert shown.stdout.count("not examined:") == len(missed) > 1
