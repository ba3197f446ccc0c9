"""The C++ library's TensorRT side, run where there is no device: over a stand-in for TensorRT and CUDA's runtime.

The stand-in (`engines/cpp/tests/stand_in`) has the calls that the library makes, with ONNX Runtime as the engine, and
TensorRT's rules: work is done when a stream is synchronised and not before, device memory is full of NaN until it is
cleared, shapes stay in their profile, addresses are aligned and on their side, one step at a time uses a scratch.
What it cannot tell is whether TensorRT computes what ONNX Runtime does. That the same sources compile and link against
the real headers and library is test_cpp_programs.py's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import cache as memo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.build_options import BuildOptions
from exporter import manifest
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests import cpp_toolchain
from tests.model_checkpoints import VOCAB, tiny_checkpoint
from tests.test_cpp import ALIKE, RAGGED, compiled, in_python, opened, run, tokens_of

pytestmark = pytest.mark.cpp
MAX_CONTEXT = 512
DECODE, PREFILL = {"B": 3, "T": 1, "S": 512, "scratch": 4096}, {"B": 1, "T": 16, "S": 512, "scratch": 9999}
Make = Callable[..., Export]


def scenario(*steps: dict[str, Any]) -> list[Any]:
    done = run(compiled(cpp_toolchain.stand_in), stdin=json.dumps(steps))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    results: list[Any] = json.loads(done.stdout)
    return results


def engine_record(name: str, graph: str, serves: dict[str, str], profiles: list[dict[str, int]]) -> dict[str, Any]:
    ranges = [{size: [1, 1, profile[size]] for size in "BTS"} for profile in profiles]
    return {"engine": name, "graph": graph, "file": f"{name}.engine", "serves": serves, "profiles": ranges}


def write_engines(made: Export, layout: str, prefill: dict[str, int] = PREFILL) -> None:
    """Plans of the stand-in and their manifest, as `engines build` would leave them."""
    folder = made.folder / "engines" / "trt"
    folder.mkdir(parents=True)
    graphs = {kind: made.graph(kind).name for kind in ("decode", "prefill")}
    if layout == "unified":  # made of the prefill's graph, so that a decode step wants last_token
        records = [engine_record("unified", graphs["prefill"], graphs, [DECODE, prefill])]
    else:
        records = [engine_record(kind, graphs[kind], {kind: graphs[kind]}, [DECODE if kind == "decode" else prefill])
                   for kind in graphs]
    for record in records:
        profiles = [DECODE if kind == "decode" else prefill for kind in record["serves"]]
        (folder / record["file"]).write_text(json.dumps({
            "graph": str(made.folder / f"{record['graph']}.onnx"), "profiles": profiles, "host": ["past_lengths"]}))
    digest = hashlib.sha256((made.folder / manifest.NAME).read_bytes()).hexdigest()
    options = {k: str(v) if isinstance(v, Path) else v for k, v in asdict(BuildOptions()).items()}
    manifest.write(folder, {"engines_of": digest, "backend": "trt", "options": options, "builder": "stand-in",
                            "engines": records})


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Exports with engines of the stand-in, by layout and options, each made once."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("cpp") / "checkpoint", "v3")

    @memo
    def once(layout: str, options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("exports") / "export"
        given = dict(options)
        batch = given.pop("prefill_batch", 1)
        made = export(ExportRequest(str(checkpoint), folder, max_context=MAX_CONTEXT, **given))
        write_engines(made, layout, PREFILL | {"B": batch})
        return made

    return lambda layout, **options: once(layout, tuple(sorted(options.items())))


@pytest.mark.parametrize("layout", ["split", "unified"])
@pytest.mark.parametrize("options", [{}, {"cache": "scatter"}, {"cache": "concat", "prefill_batch": 3},
                                     {"prefill_batch": 2}, {"logits": "all"}, {"dtype": "fp16"}],
                         ids=lambda o: "-".join(map(str, o.values())) or "append")
def test_the_same_tokens_through_engines(layout: str, options: dict[str, Any], make: Make) -> None:
    """Prompts longer than a prefill step, batches wider than an engine: in chunks and groups within its limits."""
    made = make(layout, **options)
    prompts = ALIKE if made.cache == "concat" else RAGGED
    ask = {"op": "generate", "prompts": prompts, "max_new_tokens": 20}
    batch = {"batch": len(prompts)}
    results = scenario(opened(made, batch, batch | {"rows": 16, "bucket": 16}), ask, ask | {"context": 1}, ask,
                       opened(made, batch, share_scratch=False), ask)
    expected = in_python(made, prompts, 20)
    for answers in (*results[1:4], results[5]):
        assert tokens_of(answers) == expected


@pytest.mark.parametrize("shared", [True, False])
def test_threads_take_turns_in_one_scratch(shared: bool, make: Make) -> None:
    made = make("unified")
    draw = np.random.default_rng(3)
    prompts = [draw.integers(2, VOCAB, int(size)).tolist() for size in draw.integers(1, 40, 12)]
    answer = scenario(opened(made, share_scratch=shared),
                      {"op": "threads", "threads": 4, "prompts": prompts, "max_new_tokens": 8})[1]
    assert answer["errors"] == [""] * 4
    assert answer["tokens"] == [[in_python(made, [prompt], 8)[0] for prompt in prompts]] * 4


def test_slots_rows_and_limits_on_a_device(make: Make) -> None:
    made = make("split")
    prompt = RAGGED[2]
    results = scenario(
        opened(made, {"batch": 3, "rows": 8, "bucket": 256}, {}),
        {"op": "prefill", "tokens": [[], prompt, []]}, {"op": "fork", "slot": 1},  # all slots are taken
        {"op": "remove", "slot": 0}, {"op": "fork", "slot": 1}, {"op": "decode", "tokens": [-1, 7, 7]},
        {"op": "append_from", "context": 1, "from": 0, "from_slot": 2, "begin": 0, "end": len(prompt)},
        {"op": "decode", "context": 1, "tokens": [7]},
        {"op": "append_ones", "context": 1, "count": 5}, {"op": "truncate", "context": 1, "length": len(prompt)},
        {"op": "decode", "context": 1, "tokens": [7]}, {"op": "state", "context": 1},
        {"op": "reserve", "rows": 10_000_000})
    assert results[2]["error"].startswith("all 3 slots are taken")
    tokens = results[5]["tokens"]
    assert tokens[0] is None
    assert tokens[1] == tokens[2] == results[7]["tokens"][0] == results[10]["tokens"][0]
    assert results[11]["lengths"] == [len(prompt) + 1]
    assert results[12]["error"].startswith(f"10000000 rows are needed; this cache takes up to {MAX_CONTEXT}")


PLANTED = {
    "steps overlap in one scratch": ("trt_session.hpp", "if (shared_) turn = ", "if (false) turn = "),
    "a step is not waited for": ("trt_session.hpp", 'cudaStreamSynchronize(memory_->stream()), "a step"',
                                 'cudaSuccess, "a step"'),
    "memory is not cleared": ("trt_runtime.hpp", "cudaMemsetAsync(data, 0, bytes, stream_);", "cudaSuccess;"),
    "new rows land one off": ("cache.hpp", "memory_->copy_rows(row(i, first + b, lengths_[first + b]), 0, fresh_",
                              "memory_->copy_rows(row(i, first + b, lengths_[first + b] + 1), 0, fresh_")}


@pytest.mark.slow
@pytest.mark.parametrize("fault", PLANTED)
def test_planted_faults_are_caught(fault: str, make: Make, tmp_path: Path) -> None:
    """A library with one fault is compiled, and does not answer as Python does."""
    name, good, bad = PLANTED[fault]
    source = Path(shutil.copytree(cpp_toolchain.SOURCE, tmp_path / "cpp"))
    header = source / "include" / "mla" / name
    text = header.read_text()
    assert text.count(good) == 1
    header.write_text(text.replace(good, bad))
    program = compiled(lambda: cpp_toolchain.stand_in(source))
    made = make("split")
    ask = {"op": "generate", "prompts": RAGGED[:3], "max_new_tokens": 8}
    threads = {"op": "threads", "threads": 4, "prompts": RAGGED * 4, "max_new_tokens": 8}
    done = run(program, stdin=json.dumps([opened(made, {"batch": 3}), ask, threads]))
    if done.returncode == 0:
        answers = json.loads(done.stdout)
        expected = in_python(made, RAGGED, 8)
        alike = isinstance(answers[1], list) and tokens_of(answers[1]) == expected[:3]
        assert not (alike and answers[2]["tokens"] == [expected * 4] * 4)
    else:
        assert "stand-in: " in done.stderr or "Sanitizer" in done.stderr


def test_what_cannot_be_loaded_is_refused(make: Make, tmp_path: Path) -> None:
    made = make("split")
    folder = Path(shutil.copytree(made.folder, tmp_path / "export"))
    own = manifest.open_export(folder)
    cases = [(opened(own, {"batch": 4, "most": 511, "rows": 511}), "is not aligned to 256 bytes, as TensorRT demands"),
             (opened(own, formulation="qkt"), "formulation, map_weights, threads and operators are ONNX Runtime's")]
    first = scenario(cases[0][0], {"op": "prefill", "tokens": RAGGED}, cases[1][0])
    assert cases[0][1] in first[1]["error"]
    assert cases[1][1] in first[2]["error"]
    plan = folder / "engines" / "trt" / "decode.engine"
    text = plan.read_text()
    plan.write_text(text.replace("{", "[", 1))
    assert "SHA-256" in scenario(opened(own))[0]["error"]
    data = json.loads((plan.parent / manifest.NAME).read_text())
    data["files"][plan.name] = manifest.file_record(plan)
    (plan.parent / manifest.NAME).write_text(json.dumps(data))
    error = scenario(opened(own))[0]["error"]
    assert "decode.engine: built by trt stand-in; it cannot be loaded on this GPU (not a plan); rebuild with: " in error
    shutil.rmtree(plan.parent)
    assert "no manifest.json; expected engines of trt; make it with: python -m engines build " in (
        scenario(opened(own))[0]["error"])
