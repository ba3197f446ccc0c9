"""The C++ library over ONNX Runtime, for real: the same tokens as Python for every cache form, and every refusal.

`make test-cpp` runs these; they compile (minutes, once) and say so where a compiler or a package cannot be had. Nearly
everything runs in the build with AddressSanitizer and UBSan, which end a program at the first finding.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache as memo
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.generate import Generator
from engines.model_sessions import require_model
from exporter import manifest
from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from exporter.tensor_parallel import export_ranks
from tests import cpp_toolchain
from tests.cpp_toolchain import Unavailable
from tests.model_checkpoints import VOCAB, tiny_checkpoint

pytestmark = pytest.mark.cpp
MAX_CONTEXT = 600
DENSE, MOE = "youtu", "v3"
FORMS = ("append", "scatter", "concat")
draw = np.random.default_rng(0)
RAGGED = [draw.integers(2, VOCAB, size).tolist() for size in (1, 9, 40, 23)]
ALIKE = [draw.integers(2, VOCAB, 17).tolist() for _ in range(3)]
Step = dict[str, Any]
Make = Callable[..., Export]
Answers = list[list[int]]


def compiled(make: Callable[[], Path]) -> Path:
    """A program, or a skip that says what is missing."""
    try:
        return make()
    except Unavailable as reason:
        pytest.skip(f"not run: {reason}")


def sanitized() -> dict[str, str]:
    known = cpp_toolchain.SOURCE / "tests" / "threads.supp"
    return os.environ | {"ASAN_OPTIONS": "detect_leaks=1:halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1",
                         "TSAN_OPTIONS": f"suppressions={known}:print_suppressions=0"}


def run(program: Path, *words: object, stdin: str | None = None,
        cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, words)], input=stdin, capture_output=True, text=True, check=False,
                          env=sanitized(), timeout=600, cwd=cwd)


def scenario(*steps: Step) -> list[Any]:
    """What came of each step, in one process of the sanitized program; anything on stderr is a finding."""
    done = run(compiled(lambda: cpp_toolchain.program("mla-scenario", "sanitized")), stdin=json.dumps(steps))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr[-4000:]
    results: list[Any] = json.loads(done.stdout)
    assert len(results) == len(steps)
    return results


def opened(made: Export, *contexts: Step, **options: Any) -> Step:
    return {"op": "open", "folder": str(made.folder), "contexts": list(contexts) or [{}], **options}


def tokens_of(answers: Any) -> Answers:
    """Each answer's tokens; an error in their place is shown."""
    assert isinstance(answers, list), answers
    return [answer["tokens"] for answer in answers]


def in_python(made: Export, prompts: Answers, count: int, stops: tuple[int, ...] = (), **options: Any) -> Answers:
    found: Answers = [[] for _ in prompts]
    with Generator(made, threads=1, **options) as generator:
        for step in generator.generate(prompts, count, stop_ids=stops):
            for tokens, token in zip(found, step.tokens, strict=True):
                tokens += [] if token is None else [token]
    return found


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @memo
    def once(name: str) -> Path:
        return tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / name, name)

    return once


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, checkpoint: Callable[[str], Path]) -> Make:
    """Exports of tiny checkpoints by name and options, each made once and never changed."""
    @memo
    def once(name: str, options: tuple[tuple[str, Any], ...]) -> Export:
        folder = tmp_path_factory.mktemp("exports") / "export"
        return export(ExportRequest(str(checkpoint(name)), folder, max_context=MAX_CONTEXT, **dict(options)))

    return lambda name, **options: once(name, tuple(sorted(options.items())))


@pytest.fixture
def copy(make: Make, tmp_path: Path) -> Path:
    """An export of one's own to damage."""
    return Path(shutil.copytree(make(DENSE).folder, tmp_path / "export"))


# --- The same tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [DENSE, MOE])
@pytest.mark.parametrize("form", FORMS)
def test_the_same_tokens_as_python(name: str, form: str, make: Make) -> None:
    made = make(name, cache=form)
    prompts = ALIKE if form == "concat" else RAGGED
    expected = in_python(made, prompts, 40)
    assert len({token for tokens in expected for token in tokens}) > 20  # no model that repeats itself
    ask = {"op": "generate", "prompts": prompts, "max_new_tokens": 40}
    batch = {"batch": len(prompts)}
    # one bucket, and buckets that grow in the middle of chunks; weights packed and mapped
    results = scenario(opened(made, batch, batch | {"rows": 3, "bucket": 5, "chunk": 7}, batch | {"chunk": 1}),
                       ask, ask | {"context": 1}, ask | {"context": 2}, ask,
                       opened(made, batch, map_weights=True), ask)
    for answers in (*results[1:5], results[6]):
        assert tokens_of(answers) == expected
        assert {answer["reason"] for answer in answers} == {"length"}
    alone = scenario(opened(made), *(ask | {"prompts": [prompt]} for prompt in prompts))[1:]
    assert [tokens_of(answer)[0] for answer in alone] == [in_python(made, [p], 40)[0] for p in prompts]


@pytest.mark.parametrize("options", [
    {"dtype": "fp16"}, {"dtype": "fp16", "cache": "scatter"}, {"dtype": "fp16", "cache": "concat"},
    {"cache_dtype": "int8"}, {"cache_dtype": "fp8"}, {"prefill": "expanded"}, {"logits": "all"}, {"weights": "link"},
    {"quantise": "int4"}], ids=lambda o: "-".join(o.values()))
def test_the_same_tokens_of_every_kind_of_export(options: dict[str, str], make: Make) -> None:
    made = make(MOE, **options)
    prompts = ALIKE if made.cache == "concat" else RAGGED
    found = scenario(opened(made, {"batch": len(prompts), "rows": 16, "bucket": 16, "chunk": 8}),
                     {"op": "generate", "prompts": prompts, "max_new_tokens": 24})[1]
    assert tokens_of(found) == in_python(made, prompts, 24)


def test_weights_on_another_disk_are_handed_over(checkpoint: Callable[[str], Path], make: Make, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)
        made = export(ExportRequest(str(checkpoint(MOE)), tmp_path / "x", max_context=MAX_CONTEXT, weights="link"))
    assert {record["how"] for record in made.data["weights"]["linked"].values()} == {"handed"}
    ask = {"op": "generate", "prompts": [RAGGED[2]], "max_new_tokens": 24}
    assert tokens_of(scenario(opened(made), ask)[1]) == in_python(make(MOE), [RAGGED[2]], 24)


@pytest.mark.parametrize("form", FORMS)
def test_stop_tokens(form: str, make: Make) -> None:
    """One sequence ends before the others, which go on as they would."""
    made = make(DENSE, cache=form)
    prompts = ALIKE if form == "concat" else RAGGED
    stop = in_python(made, prompts, 30)[2][7]
    results = scenario(opened(made, {"batch": len(prompts)}),
                       {"op": "generate", "prompts": prompts, "max_new_tokens": 30, "stops": [stop]})
    assert results[0]["stops"] == [1]
    assert tokens_of(results[1]) == in_python(made, prompts, 30, (stop,))
    assert len({len(answer["tokens"]) for answer in results[1]}) > 1
    assert [answer["reason"] for answer in results[1]].count("stop") >= 1
    assert len(results[1][2]["tokens"]) <= 8


def test_every_formulation(make: Make) -> None:
    made = make(MOE)
    for name in sorted({graph.formulation for graph in made.graphs}):
        found = scenario(opened(made, formulation=name), {"op": "generate", "prompts": [RAGGED[1]],
                                                          "max_new_tokens": 20})[1]
        assert tokens_of(found) == in_python(made, [RAGGED[1]], 20, formulation=name)


# --- Sequences that come, go and are copied ---------------------------------------------------------------------------


def follow(first: int, count: int, **step: Any) -> list[Step]:
    """Steps that decode given tokens one by one, in slot 0 of one."""
    return [{"op": "decode", "tokens": [(first + i) % VOCAB], **step} for i in range(count)]


@pytest.mark.parametrize("options", [{}, {"cache": "scatter"}, {"cache_dtype": "int8"}], ids=str)
def test_slots_are_added_removed_and_forked(options: dict[str, str], make: Make) -> None:
    """Each sequence goes on as it does alone, whatever its neighbours do."""
    made = make(MOE, **options)
    a, b, c = RAGGED[1], RAGGED[2], RAGGED[3]
    alone = scenario(opened(made, {}, {}, {}),
                     *({"op": "prefill", "tokens": [p], "context": i} for i, p in enumerate((a, b, c))),
                     *(s for i in range(3) for s in follow(5, 3, context=i)))
    single = [[r["tokens"][0] for r in (alone[1 + i], *alone[4 + 3 * i:7 + 3 * i])] for i in range(3)]
    mixed = scenario(
        opened(made, {"batch": 4, "rows": 4, "bucket": 4, "chunk": 6}),
        {"op": "remove", "slot": 3}, {"op": "remove", "slot": 2},
        {"op": "prefill", "tokens": [a, b]},  # 3
        {"op": "add"}, {"op": "prefill", "tokens": [[], [], c]},  # 5
        {"op": "decode", "tokens": [5, -1, 5]},  # 6
        {"op": "fork", "slot": 1},
        {"op": "decode", "tokens": [6, 5, 6, 5]},  # 8
        {"op": "remove", "slot": 0}, {"op": "state"},  # 10: [b', b, c]
        {"op": "decode", "tokens": [6, 6, 7]},  # 11
        {"op": "truncate", "slot": 2, "length": 0}, {"op": "truncate", "slot": 0, "length": len(b)},
        {"op": "prefill", "tokens": [[5, 6], [7], a]},  # 14
        {"op": "state"}, {"op": "add"}, {"op": "add"})
    assert mixed[3]["tokens"] == [single[0][0], single[1][0]]
    assert mixed[5]["tokens"] == [None, None, single[2][0]]
    assert mixed[6]["tokens"] == [single[0][1], None, single[2][1]]
    assert mixed[8]["tokens"] == [single[0][2], single[1][1], single[2][2], single[1][1]]
    assert (mixed[10]["lengths"][:3], mixed[10]["active"]) == ([len(b) + 1, len(b) + 1, len(c) + 2], 3)
    assert mixed[11]["tokens"] == [single[1][2], single[1][2], single[2][3]]
    assert mixed[14]["tokens"] == [single[1][2], single[1][3], single[0][0]]
    assert mixed[15]["lengths"][:3] == [len(b) + 2, len(b) + 3, len(a)]
    assert mixed[16] == {"slot": 3}
    assert mixed[17]["error"] == "all 4 slots are taken; remove a sequence, or make more slots"


@pytest.mark.parametrize("options", [{}, {"cache": "scatter"}, {"cache": "concat"}, {"cache_dtype": "fp8"}], ids=str)
def test_rows_of_another_context_are_appended(options: dict[str, str], make: Make) -> None:
    """A prefix computed elsewhere: the rows of one context, read and appended in two pieces, answer as it would."""
    made = make(MOE, **options)
    prompt = RAGGED[2]
    results = scenario(opened(made, {}, {"rows": 3, "bucket": 3}), {"op": "prefill", "tokens": [prompt]},
                       {"op": "append_from", "context": 1, "from": 0, "begin": 0, "end": 11},
                       {"op": "append_from", "context": 1, "from": 0, "begin": 11, "end": len(prompt)},
                       *follow(9, 4), *follow(9, 4, context=1), {"op": "state", "context": 1})
    assert results[4:8] == results[8:12]
    assert results[-1]["lengths"] == [len(prompt) + 4]


def test_what_a_failed_answer_left_never_returns(make: Make) -> None:
    """NaN rows of one sequence, truncated, do not reach the next one in their slot."""
    for options in ({}, {"cache": "scatter"}):
        made = make(DENSE, **options)
        ask = {"op": "generate", "prompts": [RAGGED[1], RAGGED[0]], "max_new_tokens": 12}
        results = scenario(opened(made, {"batch": 2}), ask, {"op": "append_ones", "slot": 0, "count": 60},
                           {"op": "decode", "tokens": [3, 3]}, {"op": "truncate", "slot": 0, "length": 0},
                           {"op": "truncate", "slot": 1, "length": 0},
                           {"op": "prefill", "tokens": [RAGGED[1], RAGGED[0]]}, ask)
        assert results[3]["kind"] == "CheckError"
        assert "are NaN or +infinity" in results[3]["error"]
        assert results[6]["tokens"] == [tokens[0] for tokens in tokens_of(results[1])]
        assert results[7] == results[1]


def test_a_cache_grows_by_bucket_and_holds_nothing_more(make: Make) -> None:
    made = make(DENSE)
    results = scenario(opened(made, {"batch": 2, "rows": 10, "bucket": 16}), {"op": "state"},
                       {"op": "prefill", "tokens": [RAGGED[2], RAGGED[0]]}, {"op": "state"},
                       {"op": "reserve", "rows": MAX_CONTEXT}, {"op": "state"},
                       {"op": "reserve", "rows": MAX_CONTEXT + 1})
    row = made.cache_bytes_per_token
    assert results[1]["row_bytes"] == row
    assert (results[1]["capacity"], results[1]["nbytes"]) == (16, 2 * 16 * row)
    assert (results[3]["capacity"], results[3]["nbytes"]) == (48, 2 * (48 + 40) * row)  # rows, and a step's new ones
    assert results[5]["capacity"] == MAX_CONTEXT
    assert results[6]["error"].startswith(f"{MAX_CONTEXT + 1} rows are needed; this cache takes up to {MAX_CONTEXT}")


# --- Threads ----------------------------------------------------------------------------------------------------------


def four_threads(made: Export, prompts: Answers, program: Path) -> subprocess.CompletedProcess[str]:
    """Every thread answers every prompt in a context of its own."""
    done = run(program, stdin=json.dumps([opened(made), {"op": "threads", "threads": 4, "prompts": prompts,
                                                         "max_new_tokens": 12}]))
    if "ThreadSanitizer: unexpected memory mapping" in done.stderr:
        pytest.skip("not run: ThreadSanitizer finds its addresses taken (lower the kernel's vm.mmap_rnd_bits to 28)")
    return done


def fifty_prompts() -> Answers:
    own = np.random.default_rng(1)
    return [own.integers(2, VOCAB, int(size)).tolist() for size in own.integers(1, 60, 50)]


@pytest.mark.parametrize("variant", ["sanitized", "threads", "release"])
def test_four_threads_answer_fifty_sequences_as_one_does(variant: str, make: Make) -> None:
    """Also under ThreadSanitizer, which sees this library's accesses, not those within ONNX Runtime."""
    made, prompts = make(MOE), fifty_prompts()
    done = four_threads(made, prompts, compiled(lambda: cpp_toolchain.program("mla-scenario", variant)))
    assert (done.returncode, done.stderr) == (0, "")
    answer = json.loads(done.stdout)[1]
    assert answer["errors"] == [""] * 4
    assert answer["tokens"] == [[in_python(made, [prompt], 12)[0] for prompt in prompts]] * 4


@pytest.mark.slow
def test_a_race_is_seen(make: Make, tmp_path: Path) -> None:
    """Contexts that share one buffer by mistake: ThreadSanitizer says so, and where."""
    source = Path(shutil.copytree(cpp_toolchain.SOURCE, tmp_path / "cpp"))
    header = source / "include" / "mla" / "model.hpp"
    good = "  std::vector<std::int64_t> ids_, counts_, last_;"
    assert header.read_text().count(good) == 1
    header.write_text(header.read_text().replace(good, "  inline static std::vector<std::int64_t> last_;\n"
                                                 "  std::vector<std::int64_t> ids_, counts_;"))
    done = four_threads(make(MOE), fifty_prompts()[:4],
                        compiled(lambda: cpp_toolchain.program("mla-scenario", "threads", source)))
    assert done.returncode != 0
    assert "ThreadSanitizer: data race" in done.stderr
    assert "model.hpp" in done.stderr


# --- Refusals ---------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_and_nothing_is_kept(make: Make) -> None:
    made = make(DENSE)
    long = [5] * MAX_CONTEXT
    cases: list[tuple[Step, str]] = [
        ({"op": "prefill", "tokens": [[1]]}, "1 lists of tokens; expected 2, one for each sequence"),
        ({"op": "prefill", "tokens": [[], []]}, "no tokens; expected at least one"),
        ({"op": "prefill", "tokens": [[1], [VOCAB]]}, f"sequence 1 holds token {VOCAB}; expected 0 to {VOCAB - 1}"),
        ({"op": "prefill", "tokens": [[1], [-1]]}, "sequence 1 holds token -1"),
        ({"op": "prefill", "tokens": [[1], [*long, 1]]}, f"{MAX_CONTEXT + 1} rows are needed"),
        ({"op": "decode", "tokens": [1]}, "1 tokens; expected 2"),
        ({"op": "decode", "tokens": [-1, -1]}, "every sequence is idle"),
        ({"op": "decode", "tokens": [1, -2]}, "sequence 1 holds token -2"),
        ({"op": "generate", "prompts": [[1]], "max_new_tokens": 1}, "1 prompts; expected 2"),
        ({"op": "generate", "prompts": [[1], []], "max_new_tokens": 1}, "prompt 1 has no tokens"),
        ({"op": "generate", "prompts": [[1], [1]], "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"op": "generate", "prompts": [[1], long], "max_new_tokens": 1}, f"prompt 1 has {MAX_CONTEXT} tokens"),
        ({"op": "truncate", "slot": 0, "length": 1}, "truncate to 1 rows; expected 0 to 0"),
        ({"op": "remove", "slot": 2}, "slot 2; expected 0 to 1"),
        ({"op": "commit", "counts": [1, 1]}, "2 counts after a feed of 0 slots"),
        ({"op": "append_from", "from": 0, "begin": 0, "end": 1}, "rows 0 to 1; expected some of the 0"),
        ({"op": "append_ones", "count": MAX_CONTEXT + 1}, f"{MAX_CONTEXT + 1} rows are needed")]
    results = scenario(opened(made, {"batch": 2}), *(step for step, _ in cases), {"op": "state"})
    for (_, expected), result in zip(cases, results[1:], strict=False):
        assert result.get("kind") == "InputError"
        assert result["error"].startswith(expected)
    assert results[-1]["lengths"] == [0, 0]


def test_concat_refuses_ragged_batches(make: Make) -> None:
    made = make(DENSE, cache="concat")
    results = scenario(opened(made, {"batch": 2}), {"op": "prefill", "tokens": [[1], [1, 2]]},
                       {"op": "prefill", "tokens": [[3, 1], [1, 2]]}, {"op": "decode", "tokens": [1, -1]},
                       {"op": "fork", "slot": 0}, {"op": "truncate", "slot": 0, "length": 1},
                       {"op": "remove", "slot": 0}, {"op": "add"}, {"op": "decode", "tokens": [4]},
                       {"op": "truncate", "slot": 0, "length": 2}, {"op": "decode", "tokens": [4]})
    assert "prompts of several lengths; the concat form keeps one length for all" in results[1]["error"]
    assert "concat keeps one length for all; new tokens [1, 0] differ" in results[3]["error"]
    for i, what in ((4, "fork"), (5, "truncate"), (7, "add")):
        assert results[i]["error"].startswith(f"{what}: the concat form keeps one length for all")
    alone = scenario(opened(made), {"op": "prefill", "tokens": [[1, 2]]}, {"op": "decode", "tokens": [4]})
    assert results[8] == results[10] == alone[2]


def test_options_are_checked(make: Make) -> None:
    made = make(DENSE)
    cases = [*(({"contexts": [{"batch": batch}]}, f"batch is {batch}; expected 1 to 65536, a slot for each sequence")
               for batch in (0, -1, 65537, -(1 << 63))),
             *(({"contexts": [{"rows": rows}]}, f"rows is {rows}; expected 1 to {MAX_CONTEXT}, the most that a")
               for rows in (-1, MAX_CONTEXT + 1)),
             ({"contexts": [{"rows": 11, "most": 10}]}, "rows is 11; expected 1 to 10"),
             *(({"contexts": [{"most": most}]}, f"most is {most} rows; expected 1 to {MAX_CONTEXT}, what this export")
               for most in (-1, MAX_CONTEXT + 1)),
             *(({"contexts": [{"bucket": bucket}]}, f"bucket is {bucket}; expected 1 to {1 << 31}")
               for bucket in (0, (1 << 63) - 1)),
             ({"contexts": [{"chunk": 0}]}, "chunk is 0"), ({"threads": -1}, "threads is -1"),
             ({"formulation": "none"}, "no decode graph of formulation none; present: [prefill.")]
    for (_, expected), result in zip(cases, scenario(*(opened(made) | case for case, _ in cases)), strict=True):
        assert expected in result["error"]


def test_a_scatter_cache_has_all_its_rows(make: Make) -> None:
    made = make(DENSE, cache="scatter")
    refused, whole = scenario(opened(made, {"most": 100}), opened(made, {"most": MAX_CONTEXT}))
    assert refused["error"].startswith(f"most is 100 rows; the scatter form's caches have all {MAX_CONTEXT}")
    assert whole == {"stops": [1]}


def test_a_context_begins_with_256_rows_or_what_there_is(make: Make) -> None:
    results = scenario(opened(make(DENSE), {}, {"most": 40}, {"rows": 300}),
                       *({"op": "state", "context": i} for i in range(3)))
    assert [result["capacity"] for result in results[1:]] == [256, 40, 512]


def test_logits_of_an_earlier_step_are_refused(make: Make) -> None:
    """Never another step's numbers, never memory that is gone; a refused step leaves them as they were."""
    made = make(DENSE)
    results = scenario(
        opened(made), {"op": "prefill", "tokens": [RAGGED[1]], "hold": True}, {"op": "held"},
        {"op": "decode", "tokens": [VOCAB]}, {"op": "held"}, {"op": "decode", "tokens": [5]}, {"op": "held"},
        {"op": "decode", "tokens": [5], "hold": True}, opened(made), {"op": "held"})  # model and context are others now
    assert results[2]["token"] == results[4]["token"] == results[1]["tokens"][0]
    assert results[6] == {"kind": "InputError", "error": "these logits are of an earlier step, and the context has "
                          "gone on; read them before its next step, or copy the rows"}
    assert results[9]["token"] == results[7]["tokens"][0]


def test_folders_that_run_elsewhere_are_advised_as_in_python(make: Make, checkpoint: Callable[[str], Path],
                                                             tmp_path: Path) -> None:
    """The same words for ranks, with all others or without them, checkpoints, layers, empty and absent folders."""
    split = export_ranks(ExportRequest(str(checkpoint(DENSE)), tmp_path / "two ranks", max_context=MAX_CONTEXT,
                                       tensor_parallel=2), lambda *_: None).folder
    alone = Path(shutil.copytree(split / "rank1", tmp_path / "rank1"))
    layer = export(ExportRequest(str(checkpoint(DENSE)), tmp_path / "layer", max_context=MAX_CONTEXT, scope="layer",
                                 layer=0)).folder
    (tmp_path / "empty").mkdir()
    (split / "rank2").mkdir()
    folders = {split: "a tensor-parallel export, which runs with: python -m engines parallel '",
               split / "rank0": "one rank of a tensor-parallel export, which runs with: python -m engines parallel '",
               alone: "python -m engines parallel DIR, the folder of all its ranks",
               split / "rank2": f"make it with: python -m exporter export {checkpoint(DENSE)} ",
               split / "rank3": " --tensor-parallel 2 ",
               checkpoint(DENSE): "a checkpoint, not an exported folder; export it first, to a folder of its own: ",
               layer: "holds one attention, not a model; export with --scope model",
               tmp_path / "empty": "make it with: python -m exporter export MODEL --out ",
               tmp_path / "absent": "make it with: python -m exporter export MODEL --out ",
               tmp_path / "rank1" / "rank0": "no manifest.json; expected an exported folder"}
    results = scenario(*({"op": "open", "folder": str(folder)} for folder in folders))
    for (folder, advice), result in zip(folders.items(), results, strict=True):
        with pytest.raises(InputError) as told:
            require_model(open_export(folder))
        assert advice in str(told.value)
        assert result == {"kind": "InputError", "error": str(told.value)}
    by_name = run(compiled(lambda: cpp_toolchain.program("mla-generate")), ".", "--tokens", 1, cwd=split / "rank0")
    assert f"which runs with: python -m engines parallel '{split}'" in by_name.stderr
    damaged = split / "rank0" / "weights.safetensors"
    damaged.write_bytes(damaged.read_bytes()[1:])
    error = scenario({"op": "open", "folder": str(split / "rank0")})[0]["error"]
    assert error.endswith(f"--tensor-parallel 2 --out '{split}' --overwrite")
    (alone / "weights.safetensors").write_bytes(b"")
    error = scenario({"op": "open", "folder": str(alone)})[0]["error"]
    assert error.endswith("--tensor-parallel 2 --out DIR")


def test_paths_that_cannot_be_looked_at_are_refused() -> None:
    result = scenario({"op": "open", "folder": "x" * 5000})[0]
    assert result["kind"] == "InputError"
    assert "no manifest.json; expected an exported folder" in result["error"]


def test_exports_that_generate_nothing_are_refused(make: Make, checkpoint: Callable[[str], Path],
                                                   tmp_path: Path) -> None:
    cases = [({"scope": "layer", "layer": 0}, "holds one attention, not a model; export with --scope model"),
             ({"layers": "0:1"}, "has no logits; expected input_ids to logits"),
             ({"weights": "none"}, "exported with --weights none"),
             ({"dtype": "bf16"}, "ONNX Runtime's CPU has no bfloat16 products")]
    for i, (options, expected) in enumerate(cases):
        made = export(ExportRequest(str(checkpoint(DENSE)), tmp_path / str(i), max_context=MAX_CONTEXT, **options))
        assert expected in scenario(opened(made))[0]["error"]


# --- Manifests: changed, hostile, cut short ---------------------------------------------------------------------------


def test_sha256_is_hashlibs(tmp_path: Path) -> None:
    files = []
    for size in (0, 1, 55, 56, 63, 64, 65, 1 << 20, (1 << 20) + 1):
        files.append(tmp_path / str(size))
        files[-1].write_bytes(np.random.default_rng(size).bytes(size))
    results = scenario(*({"op": "sha256", "path": str(file)} for file in files), {"op": "sha256", "path": "/nowhere"})
    assert [r["sha256"] for r in results[:-1]] == [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    assert results[-1]["error"] == "/nowhere: cannot be read: No such file or directory"


def test_changed_files_are_refused(make: Make, copy: Path) -> None:
    graph = copy / open_export(copy).graph("decode").file
    before = graph.read_bytes()
    again = rf"; rebuild with: python -m exporter export .* --max-context {MAX_CONTEXT} --out {copy} --overwrite"

    def refused() -> str:
        error: str = scenario({"op": "open", "folder": str(copy)})[0]["error"]
        return error

    graph.write_bytes(before[:-1])
    assert refused().startswith(f"{graph}: {len(before) - 1} bytes, the manifest says {len(before)}; rebuild with: ")
    graph.write_bytes(bytes([before[0] ^ 1]) + before[1:])
    assert f"{graph}: SHA-256 " in refused()
    graph.unlink()
    assert f"{copy}: {graph.name} is missing; rebuild with: python -m exporter export " in refused()
    assert refused().endswith(f" --out {copy} --overwrite"), again
    graph.write_bytes(before)
    assert scenario({"op": "open", "folder": str(copy)})[0] == {"stops": [1]}


def test_large_files_are_hashed_when_their_time_differs(copy: Path) -> None:
    """A weight file of 4 MiB and more: trusted while size and time stay, hashed after a copy, or when asked to."""
    data = json.loads((copy / manifest.NAME).read_text())
    big = copy / "more.safetensors"
    big.write_bytes(bytes(1 << 22))
    data["files"][big.name] = manifest.file_record(big)
    (copy / manifest.NAME).write_text(json.dumps(data))
    ask = {"op": "open", "folder": str(copy)}
    stat = big.stat()
    with big.open("r+b") as file:
        file.write(b"x")
    os.utime(big, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    trusted, verified = scenario(ask, ask | {"verify": True})
    assert (trusted, "it was changed" in verified["error"]) == ({"stops": [1]}, True)
    os.utime(big)
    assert "it was changed" in scenario(ask)[0]["error"]
    big.write_bytes(bytes(1 << 22))
    assert scenario(ask)[0] == {"stops": [1]}


def places_of(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value; of a list its first item, of records of files the first, stand for all."""
    found = [place] if place else []
    if isinstance(value, dict):
        for key, item in list(value.items())[:1] if place == ("files",) else value.items():
            found += places_of(item, (*place, key))
    elif isinstance(value, list) and value:
        found += places_of(value[0], (*place, 0))
    return found


READ = {"format", "files", "contract", "cache", "dtype", "max_context", "attentions", "graphs"}
UNREAD = {"prefill_form", "mtime_ns"}  # of a record: the time counts for large files only
WRONG = (None, [], "../x", -1, 1 << 63, 0.5, "leave out")


def wrong_manifests(text: str) -> Iterator[str]:
    """A manifest cut short, of another kind, and with every value that is read replaced by wrong ones or left out."""
    yield from (text[:cut] for cut in range(0, len(text), len(text) // 25))
    yield from ("[]", "null", "1", '"x"', "{}", "[" * 100_000, '{"format": 1, "files": ' + "[" * 100_000, "\xff", "")
    places = [p for p in places_of(json.loads(text)) if p[0] in READ and p[-1] not in UNREAD]
    for place in [*places, ("weights",), ("weights", "linked"), ("decoder",), ("decoder", "vocab_size")]:
        for value in WRONG:
            changed = json.loads(text)
            parent = changed
            for key in place[:-1]:
                parent = parent[key]
            if value == "leave out" and isinstance(parent, dict):
                del parent[place[-1]]
            else:
                parent[place[-1]] = value
            yield json.dumps(changed)


def test_wrong_manifests_are_refused(copy: Path) -> None:
    """Refused in one line or, where the value did not matter, opened; never a crash."""
    text = (copy / manifest.NAME).read_text()
    steps: list[Step] = []
    for i, content in enumerate(wrong_manifests(text)):
        folder = copy.parent / str(i)
        folder.mkdir()
        for file in copy.iterdir():
            if file.name != manifest.NAME:
                (folder / file.name).hardlink_to(file)
        (folder / manifest.NAME).write_text(content)
        steps.append({"op": "open", "folder": str(folder)})
    results = scenario(*steps)
    refused = [result for result in results if "error" in result]
    assert len(refused) > 200
    assert len(refused) > 0.85 * len(results)
    for result in refused:
        assert result["kind"] == "InputError"
        assert "\n" not in result["error"]


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/../../outside", ""])
def test_paths_out_of_the_folder_are_refused(name: str, copy: Path) -> None:
    data = json.loads((copy / manifest.NAME).read_text())
    data["files"][name] = {"size": 0, "mtime_ns": 0, "sha256": ""}
    (copy / manifest.NAME).write_text(json.dumps(data))
    assert "names a file outside its folder" in scenario({"op": "open", "folder": str(copy)})[0]["error"]


def test_a_graph_that_is_no_file_of_the_manifest_is_refused(copy: Path) -> None:
    data = json.loads((copy / manifest.NAME).read_text())
    data["graphs"][0]["file"] = "../export/" + data["graphs"][0]["file"]
    (copy / manifest.NAME).write_text(json.dumps(data))
    error = scenario({"op": "open", "folder": str(copy)})[0]["error"]
    assert "expected a file that the manifest has a record of" in error


# --- The programs -----------------------------------------------------------------------------------------------------


def test_the_generator_prints_what_python_prints(make: Make) -> None:
    made = make(MOE)
    program = compiled(lambda: cpp_toolchain.program("mla-generate"))
    words = [made.folder, "--tokens", "1,2,3", "--max-new-tokens", 16, "--ignore-eos", "--threads", 1]
    expected = in_python(made, [[1, 2, 3]], 16)[0]
    plain, as_json = run(program, *words), run(program, *words, "--json")
    assert plain.stdout == ",".join(map(str, expected)) + "\n"
    assert plain.stderr.startswith("first token ")
    data = json.loads(as_json.stdout)
    assert (data["answers"], as_json.stderr) == ([{"tokens": expected, "finish_reason": "length"}], "")
    assert data["decode_ms"] > 0
    for bad, message in (([], "no folder given"), ([made.folder], "no --tokens given"),
                         ([made.folder, "--tokens", "1,x"], "--tokens x: expected a whole number from 0 to"),
                         ([made.folder, "--tokens", "1,,2"], "--tokens '': expected a whole number from 0 to"),
                         ([made.folder, "--tokens", "-5"], "such as 1,2,3"),
                         *((["--max-new-tokens", value], f"--max-new-tokens {value}: expected a whole number from 1 to")
                           for value in ("-1", "0", "1.5", "99999999999999999999")),
                         (["--chunk", "0"], "--chunk 0: expected a whole number from 1 to"),
                         (["--threads", "-2"], "--threads -2: expected a whole number from 0 to 1024"),
                         ([made.folder, "--tokens"], "--tokens needs a value"),
                         ([made.folder, "--what"], "--what: no such option"),
                         ([made.folder.parent / "gone", "--tokens", 1], "no manifest.json; expected an export"),
                         ([made.folder, "--tokens", VOCAB], f"sequence 0 holds token {VOCAB}")):
        done = run(program, *bad)
        assert (done.returncode, done.stdout) == (2, "")
        assert message in done.stderr
        assert done.stderr.startswith("mla-generate: ")
        assert done.stderr.count("\n") == 1
    assert run(program, "--help").stdout.startswith("usage: mla-generate DIR")
