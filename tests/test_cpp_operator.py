"""The library of mla::LatentAttention, compiled: against float64, for several processors, sanitized, with faults.

`make test-cpp` runs these.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper

from engines import operator_library
from engines.generate import Generator
from exporter.export import ExportRequest, export
from exporter.formulations import fused
from exporter.manifest import Export
from tests import cpp_toolchain
from tests.model_checkpoints import VOCAB, tiny_checkpoint
from tests.test_cpp import compiled, run, scenario, tokens_of
from validate import cpp
from validate.__main__ import cli as validate_cli
from validate.metrics import compare

pytestmark = pytest.mark.cpp
ARCHES = ("native", *(("x86-64-v3", "x86-64") if platform.machine() == "x86_64" else ()))
REL = 6e-5  # of float32 against float64, where scores reach 30: 4.1e-5 at most; NumPy in float32 1.7e-5


@dataclass(frozen=True)
class Call:
    """One call's sizes; `lengths` of the past, `rows` of it offered."""

    lengths: tuple[int, ...]
    rows: int
    tokens: int = 1
    heads: int = 16
    row: int = 576
    latent: int = 512
    seed: int = 0

    def feed(self) -> dict[str, np.ndarray]:
        """Hot numbers; rows that are not there are NaN."""
        rng, batch = np.random.default_rng(self.seed), len(self.lengths)
        past = rng.standard_normal((batch, self.rows, self.row), np.float32)
        for b, n in enumerate(self.lengths):
            past[b, n:] = np.nan
        queries = rng.standard_normal((batch, self.tokens * self.heads, self.row), np.float32)
        return {"queries": queries * np.float32(8 / self.row**0.5), "past": past,
                "past_lengths": np.array(self.lengths, np.int64),
                "new": rng.standard_normal((batch, self.tokens, self.row), np.float32)}

    def expected(self) -> np.ndarray:
        """In float64, query by query."""
        feed = {name: value.astype(np.float64) for name, value in self.feed().items()}
        mixed = np.empty((len(self.lengths), self.tokens * self.heads, self.latent))
        for b, n in enumerate(self.lengths):
            for i in range(self.tokens * self.heads):
                rows = np.concatenate([feed["past"][b, :n], feed["new"][b, :1 + i // self.heads]])
                weights = np.exp(scores := rows @ feed["queries"][b, i] - (rows @ feed["queries"][b, i]).max())
                assert scores.max() == 0
                mixed[b, i] = (weights / weights.sum()) @ rows[:, :self.latent]
        return mixed


def session(library: Path, latent: int, threads: int = 2) -> ort.InferenceSession:
    node = helper.make_node(fused.OPERATOR, ["queries", "past", "past_lengths", "new"], ["mixed"], domain=fused.DOMAIN,
                            latent=latent)
    of = helper.make_tensor_value_info
    graph = helper.make_graph([node], "operator", [
        of("queries", TensorProto.FLOAT, ["B", "Q", "R"]), of("past", TensorProto.FLOAT, ["B", "S", "R2"]),
        of("past_lengths", TensorProto.INT64, ["B2"]), of("new", TensorProto.FLOAT, ["B3", "T", "R3"])],
        [of("mixed", TensorProto.FLOAT, None)])
    model = helper.make_model(graph, ir_version=10, opset_imports=[
        helper.make_opsetid("", 21), helper.make_opsetid(fused.DOMAIN, 1)])
    settings = ort.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 4
    operator_library.load(settings, library)
    return ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])


def answer(library: Path, call: Call, threads: int = 2) -> np.ndarray:
    found: np.ndarray = session(library, call.latent, threads).run(None, call.feed())[0]
    return found


@pytest.fixture(scope="module")
def library() -> Path:
    return compiled(cpp_toolchain.latent_attention)


CALLS = (
    Call((1000,), 1000), Call((512, 513, 0, 1), 600), Call((2048, 63, 64, 65, 1500), 2100, seed=1),
    Call((40000,), 40000, heads=5), Call((300, 70), 300, tokens=3, seed=2), Call((130, 0), 130, tokens=70, heads=3),
    Call((700,), 700, heads=128), Call((513, 200), 520, heads=20, row=288, latent=256, seed=3),
    Call((1200, 1), 1200, heads=7, row=72, latent=40), Call((33,), 33, heads=1, row=7, latent=3, seed=4),
    Call((90,), 90, row=192, latent=192))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_against_float64(arch: str, call: Call) -> None:
    library = compiled(lambda: cpp_toolchain.latent_attention(arch))
    found = answer(library, call)
    assert np.isfinite(found).all()
    assert compare(found, call.expected()).rel <= REL


def test_the_same_whatever_the_threads_and_the_batch(library: Path) -> None:
    """Bit for bit, and so is every sequence of a batch as alone."""
    call = Call((2048, 700, 0, 5000), 5000)
    found = answer(library, call)
    for threads in (1, 3, 8):
        np.testing.assert_array_equal(answer(library, call, threads), found)
    feed, one = call.feed(), session(library, call.latent)
    for b, n in enumerate(call.lengths):
        alone = {name: value[b:b + 1] for name, value in feed.items()}
        alone["past"] = np.ascontiguousarray(alone["past"][:, :max(n, 1)])
        np.testing.assert_array_equal(one.run(None, alone)[0][0], found[b])


def test_scores_far_apart(library: Path) -> None:
    """One row beyond all others, late: what was mixed before it vanishes, exactly; and all rows alike."""
    call = Call((1500,), 1500)
    feed, one = call.feed(), session(library, call.latent)
    feed["past"][0, 1400] = 40 * feed["queries"][0, 0]
    feed["queries"][0, 1] = 0
    mixed = one.run(None, feed)[0][0]
    np.testing.assert_array_equal(mixed[0], feed["past"][0, 1400, :512])
    rows = np.concatenate([feed["past"][0], feed["new"][0]])[:, :512]
    np.testing.assert_allclose(mixed[1], rows.astype(np.float64).mean(0), atol=1e-6)


@pytest.mark.parametrize(("change", "words"), [
    ({"past": np.zeros((1, 4, 5), np.float32)}, "past [1, 4, 5]"),
    ({"past_lengths": np.array([4, 4])}, "past_lengths [2]"),
    ({"new": np.zeros((1, 3, 8), np.float32)}, "new [1, 3, 8]"),
    ({"queries": np.zeros((2, 2, 8), np.float32)}, "queries [2, 2, 8]")])
def test_shapes_that_do_not_fit_are_refused(library: Path, change: dict[str, np.ndarray], words: str) -> None:
    feed = Call((4,), 4, heads=2, row=8, latent=4).feed()
    one = session(library, 4)
    one.run(None, feed)
    with pytest.raises(Exception, match="mla::LatentAttention: ") as refused:
        one.run(None, feed | change)
    assert words in str(refused.value)
    with pytest.raises(Exception, match="latent up to R"):
        session(library, 9).run(None, feed)


def test_lengths_beyond_the_rows_are_all_of_them(library: Path) -> None:
    """As where a graph compares row numbers with lengths; a host's session refuses such a feed."""
    call = Call((90, 0), 90)
    feed = call.feed() | {"past_lengths": np.array([1 << 40, -7])}
    np.testing.assert_array_equal(session(library, call.latent).run(None, feed)[0], answer(library, call))


PLANTED = {
    "a query sees the token behind its own": ("/ call_.heads < at + r)", "/ call_.heads + 1 < at + r)"),
    "a piece begins one row late": ("const std::ptrdiff_t first = p * size(length),",
                                    "const std::ptrdiff_t first = p * size(length) + (p > 0),"),
    "what was mixed does not shrink": ("if (shrink[i] != 1.0f)", "if (shrink[i] > 1.0f)"),
    "sums do not shrink": ("Vector sum = load(sums) * shrink;", "Vector sum = load(sums);"),
    "pieces are joined by their own maxima": ("const float weight = std::exp(own[query] - top);",
                                              "const float weight = 1.0f;"),
    "the last head of a group is left out": ("for (; head < live; ++head)", "for (; head + 1 < live; ++head)"),
    "numbers beyond the vectors are left out": ("d = whole; d < latent; ++d", "d = whole; d + 1 < latent; ++d"),
    "the rows of another sequence": ("(b * call_.rows + first)", "(b / 2 * call_.rows + first)")}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_caught(fault: str, tmp_path: Path) -> None:
    good, bad = PLANTED[fault]
    source = Path(shutil.copytree(cpp_toolchain.SOURCE, tmp_path / "cpp"))
    header = source / "include" / "mla" / "latent_attention.hpp"
    assert header.read_text().count(good) == 1
    header.write_text(header.read_text().replace(good, bad))
    library = compiled(lambda: cpp_toolchain.latent_attention(source=source))
    library = Path(shutil.copy(library, tmp_path))  # a process keeps a library that it loaded, by its path
    rels = [compare(answer(library, call), call.expected()).rel for call in CALLS if call.rows < 10000]
    assert not max(rels) <= 50 * REL, rels


# --- In a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "v3", "v3")


@pytest.fixture(scope="module")
def exports(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Export]:
    made = {fused_decode: export(ExportRequest(str(checkpoint), tmp_path_factory.mktemp("exports") / "x",
                                               max_context=600, fused_decode=fused_decode))
            for fused_decode in (False, True)}
    return lambda fused_decode: made[fused_decode]


draw = np.random.default_rng(0)
PROMPTS = [draw.integers(2, VOCAB, size).tolist() for size in (1, 9, 40, 23)]


def generated(made: Export) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in PROMPTS]
    with Generator(made, threads=1) as generator:
        for step in generator.generate(PROMPTS, 40):
            for tokens, token in zip(found, step.tokens, strict=True):
                tokens += [] if token is None else [token]
    return found


def test_a_model_says_the_same_in_python_and_in_cpp(
        library: Path, exports: Callable[[bool], Export], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = generated(exports(False))
    monkeypatch.setenv(operator_library.VARIABLE, str(library))
    assert generated(exports(True)) == expected
    made = exports(True)
    generator = compiled(lambda: cpp_toolchain.program("mla-generate"))
    beside = cpp.run(cpp.CppRequest(made.folder, generator, context=20, new_tokens=12, rounds=1), lambda message: None)
    assert beside["same_tokens"]
    monkeypatch.delenv(operator_library.VARIABLE)
    lacking = run(generator, made.folder, "--tokens", "1,2")
    assert lacking.returncode == 2
    assert "decode.fused.onnx: needs the library of the operator mla::LatentAttention, and none is named" in (
        lacking.stderr)


def test_under_sanitizers(exports: Callable[[bool], Export]) -> None:
    library = compiled(lambda: cpp_toolchain.latent_attention(sanitize=True))
    opened: dict[str, Any] = {"op": "open", "folder": str(exports(True).folder), "operators": str(library),
                              "contexts": [{"batch": 4}, {"rows": 3}]}
    ask = {"op": "generate", "prompts": PROMPTS, "max_new_tokens": 40}
    answers = scenario(opened, ask, opened | {"operators": "/no/such.so"})
    assert tokens_of(answers[1]) == generated(exports(False))
    assert "/no/such.so is no file" in answers[2]["error"]


def test_it_is_measured_beside_the_others(library: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suites layer, model and profile, once the library is there; answers are compared before anything is timed."""
    monkeypatch.setenv(operator_library.VARIABLE, str(library))
    skip = [word for peer in ("mobius-onnx", "llama.cpp", "transformers") for word in ("--skip", peer)]
    small = ["--rounds", "1", "--budget", "0.05", "--threads", "1", "--context", "16,64", "--json"]
    shown = CliRunner().invoke(validate_cli, ["bench", "article", "--suite", "layer,model,profile", "--checkpoint",
                                              str(checkpoint), *skip, *small])
    assert shown.exit_code == 0, shown.output
    data = json.loads(shown.stdout)
    equal = {(r["suite"], r["subject"]): r["outputs_equal"] for r in data["rows"]}
    assert equal["layer", "ort, fused"]
    assert equal["layer", "ort, qkt (default)"]
    assert equal["model", "mla-export --fused-decode, fused (default)"]
    attend = [o for p in data["profile"] for o in p["operators"] if o["name"] == "LatentAttention"]
    assert len(attend) == 2  # at two contexts
    assert [f["subject"] for f in data["fits"]][:1] == ["mla-export, qkt (default)"]


def test_the_command_builds_it(tmp_path: Path) -> None:
    """`engines operator --build`, in a process of its own, where headers were fetched."""
    compiled(cpp_toolchain.latent_attention)
    environment = {name: value for name, value in os.environ.items() if name != operator_library.VARIABLE}
    done = subprocess.run([sys.executable, "-m", "engines", "operator", "--build", "--json"], capture_output=True,
                          text=True, check=False, env=environment, cwd=cpp_toolchain.SOURCE.parent.parent)
    assert done.returncode == 0, done.stderr
    assert Path(json.loads(done.stdout)["library"]).is_file()
