"""Triton repositories: the configuration suits the graph, every planted fault is found, and the README's own client
generates what the Generator does, over what Triton's documentation says of states."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engines import records, triton, triton_config
from engines.__main__ import cli
from engines.generate import Generator
from engines.records import EngineRecord, Engines
from engines.triton import TritonRequest, write_model
from exporter import console
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, open_export
from tests.model_checkpoints import tiny_checkpoint
from tests.triton_server import Server

CONTEXT, PROMPT, NEW = 64, [1, 2, 3], 16


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Export]:
    """Exports of one tiny MoE checkpoint, each made once."""
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "v2-lite", "v2-lite", layers=2)
    made: dict[tuple[tuple[str, Any], ...], Export] = {}

    def once(**options: Any) -> Export:
        key = tuple(sorted(options.items()))
        if key not in made:
            out = tmp_path_factory.mktemp("exports") / "export"
            made[key] = export(ExportRequest(str(checkpoint), out, max_context=CONTEXT, **options))
        return made[key]

    return once


def expected(made: Export, prompt: list[int]) -> list[int]:
    with Generator(made, threads=1) as generator:
        return [step.tokens[0] or 0 for step in generator.generate([prompt], NEW)]


def run_client(readme: str, server: Server, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The Python block of a README, run against `server` in place of tritonclient."""
    package, door = ModuleType("tritonclient"), ModuleType("tritonclient.grpc")
    door.InferInput, door.InferenceServerClient = server.InferInput, server.InferenceServerClient  # type: ignore[attr-defined]
    package.grpc = door  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", door)
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    with redirect_stdout(StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    tokens: list[int] = json.loads(printed.getvalue())
    return tokens


@pytest.mark.parametrize(("cache", "kind"), [("scatter", "decode"), ("scatter", "prefill"), ("append", "decode")])
def test_the_client_of_the_readme_generates(cache: str, kind: str, make: Callable[..., Export], tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(cache=cache)
    facts = write_model(TritonRequest(made.folder, tmp_path, name="m", kind=kind))
    assert facts["stateful"] == (cache == "scatter")
    assert facts["not_run"] == triton.NOT_RUN
    assert facts["not_run"] in (tmp_path / "m" / "README.md").read_text()
    server = Server(tmp_path)
    tokens = run_client((tmp_path / "m" / "README.md").read_text(), server, monkeypatch)
    assert tokens == expected(made, PROMPT)
    assert not server.models["m"].states, "the last request ends its sequence"


def test_sequences_in_turn_keep_their_states(make: Callable[..., Export], tmp_path: Path) -> None:
    import numpy as np

    made = make(cache="scatter")
    write_model(TritonRequest(made.folder, tmp_path, name="m", sequences=2))
    model = Server(tmp_path).models["m"]

    def ask(sequence: int, ids: list[int], length: int) -> int:
        inputs = [Server.InferInput("input_ids", [1, len(ids)], "INT64"),
                  Server.InferInput("past_lengths", [1, 1], "INT64")]
        for given, values in zip(inputs, ([ids], [[length]]), strict=True):
            given.set_data_from_numpy(np.array(values, np.int64))
        logits = model.infer(inputs, sequence_id=sequence, sequence_start=length == 0).as_numpy("logits")
        return int(logits[0].argmax())

    prompts = {1: [5, 6, 7, 8], 2: [9]}
    tokens = {s: list(p) for s, p in prompts.items()}
    lengths = dict.fromkeys(prompts, 0)
    for _ in range(NEW):
        for s, sent in tokens.items():
            sent.append(ask(s, sent[lengths[s]:], lengths[s]))
            lengths[s] = len(sent) - 1
    assert {s: sent[len(prompts[s]):] for s, sent in tokens.items()} == {s: expected(made, p)
                                                                       for s, p in prompts.items()}
    assert model.most == 2


def test_the_command_reports_and_links(make: Callable[..., Export], tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = make(cache="scatter")
    arguments = ["engines", "triton", str(made.folder), "--out", str(tmp_path / "repo"), "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        console.main(cli, "python -m engines")
    assert stop.value.code == 0
    facts = json.loads(capsys.readouterr().out)
    folder = tmp_path / "repo" / facts["name"]
    assert os.path.samefile(folder / "1" / "weights.safetensors", made.folder / "weights.safetensors")
    assert facts["files"]["1/weights.safetensors"]["how"] == "hard-linked"
    assert facts["state_bytes"] == made.attentions * CONTEXT * made.config.row_dim * 4
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as stop:
        console.main(cli, "python -m engines")
    assert stop.value.code == 2
    assert "is not empty" in json.loads(capsys.readouterr().out)["error"]


def test_weights_are_copied_where_they_cannot_be_linked(make: Callable[..., Export], tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    made = make()
    facts = write_model(TritonRequest(made.folder, tmp_path, name="m"))
    assert facts["files"]["1/weights.safetensors"]["how"] == "copied"
    assert (tmp_path / "m/1/weights.safetensors").read_bytes() == (made.folder / "weights.safetensors").read_bytes()


# --- The configuration ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stateful(make: Callable[..., Export]) -> tuple[str, Any]:
    made = make(cache="scatter")
    entry = made.graph("prefill")
    config = triton_config.model_config("m", "onnxruntime", entry, max_batch=8, sequences=8, idle_seconds=60)
    return triton_config.text(config), entry


def test_text_reads_back_as_it_was(stateful: tuple[str, Any], make: Callable[..., Export]) -> None:
    source, _ = stateful
    config = triton_config.parse(source)
    assert triton_config.text(config) == source
    assert config["max_batch_size"] == 1
    assert [s["input_name"] for s in config["sequence_batching"]["state"]] == ["latent_cache.0", "latent_cache.1"]
    assert triton_config.parse("# remark\nname:\"m\" input { name: \"a\" } input [ { dims: 3 dims: [4, -1] } ]") == {
        "name": "m", "input": [{"name": "a"}, {"dims": [3, 4, -1]}]}
    other = triton_config.model_config("m", "onnxruntime", make().graph("decode"), max_batch=8, sequences=8,
                                       idle_seconds=60, device="gpu")
    assert other["max_batch_size"] == 8
    assert "sequence_batching" not in other
    assert other["instance_group"] == [{"count": 1, "kind": "KIND_GPU"}]


def test_triton_own_definition_takes_it(stateful: tuple[str, Any]) -> None:
    if triton_config.official() is None:
        pytest.skip("tritonclient is not installed: pip install --no-deps tritonclient")
    source, entry = stateful
    assert any("Triton's own ModelConfig" in line for line in triton_config.check(source, entry))
    from google.protobuf import json_format, text_format

    module, _ = triton_config.official() or (None, "")
    message = text_format.Parse(source, module.ModelConfig())
    # read by two readers, the same: enumerations by name, sizes as numbers
    theirs = json_format.MessageToDict(message, preserving_proto_field_name=True)
    assert theirs["sequence_batching"]["state"][1]["data_type"] == "TYPE_FP32"
    assert message.sequence_batching.state[0].use_same_buffer_for_input_output
    assert list(message.sequence_batching.state[0].initial_state[0].dims) == [1, CONTEXT, 26]
    assert message.sequence_batching.oldest.max_candidate_sequences == 8
    assert list(message.input[1].dims) == [1]
    assert message.input[1].HasField("reshape")
    assert not message.input[1].reshape.shape


FAULTS = {
    "an unknown field": ("max_batch_size", "max_batch_sizes", "unknown field max_batch_sizes"),
    "a number as text": ("max_batch_size: 1", 'max_batch_size: "1"', "is no int"),
    "a field twice": ("max_batch_size: 1", "max_batch_size: 1 max_batch_size: 1", "given twice"),
    "an enumeration as text": ("TYPE_INT64", '"TYPE_INT64"', "is no enum"),
    "a bracket left open": ("version_policy {", "version_policy", "was expected"),
    "another type": ("TYPE_INT64", "TYPE_INT32", "input_ids is TYPE_INT32"),
    "another size": ("dims: [ 160 ]", "dims: [ 161 ]", "logits is TYPE_FP32 \\[161\\]"),
    "no reshape": ("reshape {\n      shape: [ ]\n    }", "", "past_lengths is TYPE_INT64 \\[1\\]"),
    "an input left out": ('name: "last_token"', 'name: "past_lengths"', "named twice.*last_token is missing"),
    "a state of another name": ('"latent_cache_out.1"', '"latent_cache_out.7"', "output latent_cache_out.1 is missing"),
    "a batch of states": ("max_batch_size: 1", "max_batch_size: 4", "must be 1"),
    "states that sort differently": ('"latent_cache_out.0"', '"latent_cache_out.9"', "would swap them"),
    "a first state of no size": ("[ 1, 64, 26 ]\n          zero_data", "[ -1, 64, 26 ]\n          zero_data",
                                 "its first state has dims"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, stateful: tuple[str, Any]) -> None:
    source, entry = stateful
    before, after, message = FAULTS[fault]
    assert before in source
    triton_config.check(source, entry)
    with pytest.raises(CheckError, match=message):
        triton_config.check(source.replace(before, after, 1), entry)


def test_it_says_so_where_triton_definition_is_absent(stateful: tuple[str, Any], monkeypatch: pytest.MonkeyPatch,
                                                      ) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in triton_config.check(*stateful)[-1]


# --- Plans, and what is refused ---------------------------------------------------------------------------------------


def test_a_plan_of_both_kinds(make: Callable[..., Export], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(cache="scatter", target="trt", dtype="fp16")
    prefill, decode = made.graph("prefill"), made.graph("decode")
    for export_folder in (made.folder, make(target="trt", dtype="fp16").folder):
        folder = export_folder / "engines" / "trt"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "unified.engine").write_bytes(b"a plan")
    ranges = [{"B": [1, 1, 8], "T": [1, 1, 1]}, {"B": [1, 1, 1], "T": [1, 16, 32]}]
    record = EngineRecord("unified", prefill.name, records.UNIFIED, prefill.formulation, True, "unified.engine", 1, [1],
                          1, 6, 1, {}, ranges, {"decode": decode.name, "prefill": prefill.name}, 0.1)
    monkeypatch.setattr(records, "open_engines", lambda export, name: Engines(folder, {}, (record,)))
    facts = write_model(TritonRequest(made.folder, tmp_path, backend="trt", name="m"))
    config = triton_config.parse((tmp_path / "m" / "config.pbtxt").read_text())
    assert (config["platform"], config["backend"]) == ("tensorrt_plan", "tensorrt")
    assert config["instance_group"] == [{"count": 1, "profile": ["0", "1"]}]
    assert {i["name"] for i in config["input"]} == {"input_ids", "past_lengths", "last_token"}
    assert (tmp_path / "m/1/model.plan").read_bytes() == b"a plan"
    assert facts["limits"]["T"] == 32
    assert "1, 2, 3], 16, 32" in (tmp_path / "m" / "README.md").read_text()
    assert any("expect TensorRT to refuse" in note for note in facts["notes"])
    append = make(target="trt", dtype="fp16")
    stateless = write_model(TritonRequest(append.folder, tmp_path, backend="trt", name="stateless"))
    assert stateless["max_batch_size"] == 1, "what both profiles take"
    with pytest.raises(InputError, match="profiles take up to 1 at once; build it with --max-batch 4"):
        write_model(TritonRequest(append.folder, tmp_path, backend="trt", name="four", sequences=4))
    dropped = replace(record, file=None)
    monkeypatch.setattr(records, "open_engines", lambda export, name: Engines(folder, {}, (dropped,)))
    with pytest.raises(InputError, match="no engine of decode was kept; build it with"):
        write_model(TritonRequest(made.folder, tmp_path, backend="trt", name="n"))


def test_refusals(make: Callable[..., Export], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"concat form cannot be Triton's state.*--cache scatter"):
        write_model(TritonRequest(make(cache="concat").folder, tmp_path))
    with pytest.raises(InputError, match="its cache is fp8"):
        write_model(TritonRequest(make(cache_dtype="fp8").folder, tmp_path))
    with pytest.raises(InputError, match=r"no manifest\.json; expected engines of trt"):
        write_model(TritonRequest(make(target="trt").folder, tmp_path, backend="trt"))
    for options, message in (({"backend": "trt-rtx"}, "not of TensorRT-RTX"), ({"kind": "both"}, "decode, prefill"),
                             ({"name": "../m"}, "a folder's name"), ({"sequences": 0}, "at least 1"),
                             ({"idle_seconds": 0}, "more than 0"), ({"device": "tpu"}, "auto, cpu, gpu")):
        with pytest.raises(InputError, match=message):
            TritonRequest(tmp_path, tmp_path, **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_folder_of_others_is_left_alone(make: Callable[..., Export], tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").write_text('name: "m"')
    for overwrite, message in ((False, "is not empty"), (True, "was not made by this tool")):
        with pytest.raises(InputError, match=message):
            write_model(TritonRequest(make().folder, tmp_path, name="m", overwrite=overwrite))
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_a_model_is_named_as_its_export(make: Callable[..., Export], tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """As `engines serve` names it: two exports of one checkpoint are two models."""
    made = make()
    assert write_model(TritonRequest(made.folder, tmp_path))["name"] == made.folder.name
    monkeypatch.chdir(made.folder)
    assert write_model(TritonRequest(Path(), tmp_path / "again"))["name"] == made.folder.name
    shutil.copytree(made.folder, tmp_path / "copies" / "_my model+")
    assert write_model(TritonRequest(tmp_path / "copies" / "_my model+", tmp_path))["name"] == "my-model-"
    shutil.copytree(made.folder, tmp_path / "copies" / "模型")
    with pytest.raises(InputError, match="the folder's name '模型' has no letter that a model's name may have; give "
                                         "one with --name"):
        write_model(TritonRequest(tmp_path / "copies" / "模型", tmp_path))


def test_a_repository_is_a_folder_of_its_own(make: Callable[..., Export], tmp_path: Path) -> None:
    made, other, repository = tmp_path / "one", tmp_path / "two", tmp_path / "repo"
    for folder in (made, other):
        shutil.copytree(make().folder, folder)
    before = sorted(tmp_path.rglob("*"))
    for out, name, message in (
            (made, None, rf"--out {made}: is the export {made}; expected a model repository, a folder of its own"),
            (made / "repo", None, rf"--out {made / 'repo'}: lies in the export {made}; expected a model repository"),
            (other, None, rf"--out {other}: holds an export \(manifest.json\); expected a model repository"),
            (tmp_path, None, rf"{made}: is the export that is to be written there; choose another repository with"),
            (tmp_path.parent, tmp_path.name, rf"{tmp_path}: holds the export that is to be written there; choose")):
        for overwrite in (False, True):
            with pytest.raises(InputError, match=message):
                write_model(TritonRequest(made, out, name=name, overwrite=overwrite))
    assert sorted(tmp_path.rglob("*")) == before
    write_model(TritonRequest(made, repository))
    with pytest.raises(InputError, match=rf"--out {repository / 'one'}: a model's folder; expected the repository that "
                                         rf"holds it, and the models beside it: {repository}$"):
        write_model(TritonRequest(other, repository / "one"))


def test_int8_caches_and_attentions_alone_are_served_without_a_client(make: Callable[..., Export], tmp_path: Path,
                                                                      ) -> None:
    write_model(TritonRequest(make(cache_dtype="int8").folder, tmp_path, name="int8"))
    layer = export(ExportRequest("article", tmp_path / "exported", cache="scatter", max_context=32))
    facts = write_model(TritonRequest(open_export(layer.folder).folder, tmp_path, name="layer"))
    assert facts["stateful"]
    for name in ("int8", "layer"):
        assert "```python" not in (tmp_path / name / "README.md").read_text()
