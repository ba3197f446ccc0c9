"""Bad input ends in exit code 2 and one line that says what arrived and what was expected, and leaves nothing behind.

Most cases run the command line in this process (through `exporter.console.main`, as the program does); a few run as
processes of their own. Warnings count as output: they would be more lines on stderr.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from exporter import console
from exporter.__main__ import cli
from tests.checkpoints import LAYERS, article_state_dict, tiny_checkpoint

REPOSITORY = Path(__file__).parent.parent
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ATTENTION = "model.layers.0.self_attn."
Damage = Callable[[Path], Any]


def tree(folder: Path) -> dict[str, str]:
    """Every path below `folder`, with a digest of what it holds."""
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "folder"
            for p in sorted(folder.rglob("*"))}


class Cli:
    """The command line in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self.monkeypatch, self.capsys, self.folder = monkeypatch, capsys, folder
        self.out = folder / "made" / "parents" / "out"

    def run(self, *argv: str | Path) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["exporter", *map(str, argv)])
        self.capsys.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            with pytest.raises(SystemExit) as end:
                console.main(cli, "python -m exporter")
        shown = [str(w.message) for w in caught if not issubclass(w.category, DeprecationWarning)]
        assert shown == [], "a warning would be a line on stderr"
        captured = self.capsys.readouterr()
        return int(end.value.code or 0), captured.out, captured.err

    def refused(self, pattern: str, *argv: str | Path, code: int = 2) -> None:
        """Both with and without --json: the exit code, one line that matches, and a folder tree as it was."""
        before = tree(self.folder)
        status, out, err = self.run(*argv)
        assert (status, out) == (code, ""), err
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert re.search(pattern, err), err
        status, out, err_json = self.run(*argv, "--json")
        assert status == code
        assert err_json == err
        assert {"error": err.removeprefix("error: ").rstrip("\n")} == json.loads(out)
        assert out.count("\n") == 1
        assert tree(self.folder) == before

    def refuses_model(self, pattern: str, model: str | Path, *options: str) -> None:
        self.refused(pattern, "export", model, "--out", self.out, *options)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Cli:
    return Cli(monkeypatch, capsys, tmp_path)


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("pristine")
    return {"v3": tiny_checkpoint(made / "v3"), "sharded": tiny_checkpoint(made / "sharded", sharded=True),
            "no_q_rank": tiny_checkpoint(made / "no_q_rank", q_lora_rank=None)}


@pytest.fixture
def checkpoint(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["v3"], tmp_path / "model"))


@pytest.fixture
def sharded(pristine: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pristine["sharded"], tmp_path / "model"))


# --- What is damaged in the cases below is sound before ---------------------------------------------------------------


@pytest.mark.parametrize("which", ["v3", "sharded", "no_q_rank", "article.safetensors", "article.pt"])
def test_undamaged_models_export(which: str, pristine: dict[str, Path], command: Cli, tmp_path: Path) -> None:
    model = pristine.get(which, tmp_path / which)
    if which == "article.safetensors":
        save_file(article_state_dict(), model)
    elif which == "article.pt":
        torch.save(article_state_dict(), model)
    code, out, err = command.run("export", model, "--out", command.out, "--json", "--allow-pickle")
    assert (code, err) == (0, "")
    assert json.loads(out)["folder"] == str(command.out)
    assert (command.out / "manifest.json").is_file()
    assert [p.name for p in command.out.parent.iterdir()] == ["out"]


# --- MODEL and options ------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[list[str], str]] = [
    (["--dtype", "fp8"], r"--dtype 'fp8': expected one of fp32, fp16, bf16"),
    (["--cache", "paged"], r"--cache 'paged': expected one of append, scatter, concat"),
    (["--target", "cuda"], r"--target 'cuda': expected one of ort, trt, trt-rtx"),
    (["--prefill", "flash"], r"--prefill 'flash': expected one of absorbed, expanded"),
    (["--absorb", "no"], r"--absorb 'no': expected one of factored, folded"),
    (["--causal", "maybe"], r"--causal 'maybe': expected on or off"),
    (["--cache", "scatter"], r"--cache scatter preallocates its rows: give their number with --max-context N"),
    (["--max-context", "0"], r"--max-context 0: expected 1 to 16777216"),
    (["--max-context", "-5"], r"--max-context -5: expected 1 to"),
    (["--max-context", "16777217"], r"--max-context 16777217: expected 1 to"),
    (["--max-context", "many"], r"'--max-context': 'many' is not a valid integer"),
    (["--max-batch", "0"], r"--max-batch 0: expected 1 to"),
    (["--seed", "-1"], r"--seed -1: expected a number from 0 up"),
    (["--layer", "1"], r"--layer 1 is out of range; article has layers 0 to 0"),
    (["--layer", "-1"], r"--layer -1 is out of range; article has layers 0 to 0"),
    (["--frobnicate"], r"No such option.*--frobnicate.*see python -m exporter export --help"),
    (["surplus"], r"unexpected extra argument.*surplus"),
]


@pytest.mark.parametrize(("options", "pattern"), OPTIONS, ids=[" ".join(o) for o, _ in OPTIONS])
def test_option(options: list[str], pattern: str, command: Cli) -> None:
    command.refuses_model(pattern, "article", *options)


@pytest.mark.parametrize(("argv", "pattern"), [
    ([], r"Missing command.*see python -m exporter --help"),
    (["exprot"], r"No such command 'exprot'"),
    (["export"], r"Missing argument 'MODEL'.*see python -m exporter export --help"),
    (["export", "article"], r"Missing option '--out'.*see python -m exporter export --help"),
    (["export", "article", "--out"], r"Option '--out' requires an argument.*see python -m exporter export --help"),
    (["inspect"], r"Missing argument 'WHAT'.*see python -m exporter inspect --help"),
], ids=["nothing", "unknown command", "no MODEL", "no --out", "--out of nothing", "nothing to inspect"])
def test_command_line(argv: list[str], pattern: str, command: Cli) -> None:
    code, out, err = command.run(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ")
    assert re.search(pattern, err), err


@pytest.mark.parametrize("command_name", ["export", "inspect"])
@pytest.mark.parametrize(("model", "pattern"), [
    ("deepseek-v9", r"MODEL 'deepseek-v9' is neither a preset nor an existing path; presets: .*deepseek-v2-lite, "),
    ("/nowhere/model", r"'/nowhere/model' does not exist; expected a checkpoint folder, a state_dict file or a preset"),
    ("model.safetensors", r"'model.safetensors' does not exist; expected"),
    ("x" * 300, r"File name too long"),
], ids=["preset", "folder", "file", "too long"])
def test_unknown_model(command_name: str, model: str, pattern: str, command: Cli) -> None:
    command.refused(pattern, command_name, model, *(["--out", command.out] if command_name == "export" else []))


# --- A checkpoint's config.json ---------------------------------------------------------------------------------------


def set_config(**changes: Any) -> Damage:
    """Change fields of config.json; None removes one."""
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({k: v for k, v in (config | changes).items() if v is not None}))
    return damage


def text_config(text: str) -> Damage:
    return lambda folder: (folder / "config.json").write_text(text)


CONFIGS: dict[str, tuple[Damage, str]] = {
    "no config.json": (lambda f: (f / "config.json").unlink(), r"model: no config.json; expected a Hugging Face"),
    "not JSON": (text_config('{"model_type": '), r"config.json: not valid JSON \("),
    "empty": (text_config(""), r"config.json: not valid JSON \("),
    "a list": (text_config("[1]"), r"config.json: expected a JSON object, got list"),
    "not UTF-8": (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), r"config.json: not valid JSON \("),
    "nested without end": (text_config("[" * 100_000), r"config.json: not valid JSON \("),
    "llama": (set_config(model_type="llama"), r"model_type 'llama' is not an MLA family known here; expected one of "
                                              r"deepseek_v2, deepseek_v3"),
    "no model_type": (set_config(model_type=None), r"model_type None is not an MLA family"),
    "no kv_lora_rank": (set_config(kv_lora_rank=None), r"an MLA config states hidden_size.*; missing: kv_lora_rank"),
    "kv_lora_rank a string": (set_config(kv_lora_rank="16"), r"kv_lora_rank is '16'; expected a positive integer"),
    "kv_lora_rank 0": (set_config(kv_lora_rank=0), r"kv_lora_rank is 0; expected a positive integer"),
    "odd rope": (set_config(qk_rope_head_dim=9), r"qk_rope_head_dim is 9; RoPE rotates pairs, so it must be even"),
    "unknown rope": (set_config(rope_parameters={"rope_type": "llama3"}), r"rope_type 'llama3' is not supported; exp"),
    "yarn without a factor": (set_config(rope_parameters={"rope_type": "yarn"}), r"rope factor is None; yarn expects"),
    "rope no object": (set_config(rope_parameters="yarn"), r"config.json: a field has the wrong type"),
    "positions infinite": (set_config(max_position_embeddings=float("inf")), r"a field has the wrong type \(cannot"),
    "positions beyond memory": (set_config(max_position_embeddings=10**13),
                                r"max_position_embeddings is 10000000000000, at most 16777216 .* --max-context N"),
    "quantised": (set_config(quantization_config={"quant_method": "fp8"}),
                  r"weights are quantised \(fp8\); expected fp32, fp16 or bf16 weights; dequantise the checkpoint"),
    "quantised somehow": (set_config(quantization_config={"bits": 4}), r"weights are quantised \(method not stated\)"),
    "quantised, a string": (set_config(quantization_config="awq"), r"weights are quantised \(awq\)"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_config(case: str, checkpoint: Path, command: Cli) -> None:
    damage, pattern = CONFIGS[case]
    damage(checkpoint)
    command.refuses_model(pattern, checkpoint)


@pytest.mark.parametrize("layer", [LAYERS, -1, 10**30])
def test_layer_out_of_range(layer: int, checkpoint: Path, command: Cli) -> None:
    command.refuses_model(rf"--layer {layer} is out of range; model has layers 0 to {LAYERS - 1}", checkpoint,
                          "--layer", str(layer))


def test_layer_that_only_the_config_has(checkpoint: Path, command: Cli) -> None:
    set_config(num_hidden_layers=LAYERS + 1)(checkpoint)
    command.refuses_model(rf"no tensor model.layers.{LAYERS}.self_attn.kv_a_proj_with_mqa.weight; expected an MLA "
                          "attention there$", checkpoint, "--layer", str(LAYERS))


# --- Its tensors ------------------------------------------------------------------------------------------------------


def set_tensors(**changes: torch.Tensor | Callable[[torch.Tensor], torch.Tensor] | None) -> Damage:
    """Rewrite model.safetensors: tensors of layer 0's attention by name (`__` for a dot); None removes one."""
    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE)
        for name, change in changes.items():
            full = ATTENTION + name.replace("__", ".")
            if change is None:
                del tensors[full]
            else:
                tensors[full] = change(tensors[full].clone()) if callable(change) else change
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    return damage


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[5] = value
        return tensor
    return change


TENSORS: dict[str, tuple[Damage, str]] = {
    "missing": (set_tensors(o_proj__weight=None),
                r"tensor o_proj.weight \[64, 48\] is missing; present: kv_a_layernorm.weight, "),
    "missing latent": (set_tensors(kv_a_proj_with_mqa__weight=None),
                       r"no tensor model.layers.0.self_attn.kv_a_proj_with_mqa.weight; expected an MLA attention there "
                       r"\(present: kv_a_layernorm.weight, "),
    "extra": (set_tensors(indexer__wk__weight=torch.zeros(3)),
              r"unknown tensor indexer.wk.weight; the graph would leave it out, so the export is refused"),
    "shape": (set_tensors(kv_b_proj__weight=torch.zeros(128, 15)),
              r"tensor kv_b_proj.weight has shape \[128, 15\]; the configuration expects \[128, 16\]"),
    "transposed": (set_tensors(q_a_proj__weight=lambda t: t.T.contiguous()),
                   r"tensor q_a_proj.weight has shape \[64, 24\]; the configuration expects \[24, 64\]"),
    "NaN": (set_tensors(kv_b_proj__weight=with_value(float("nan"))),
            r"1 of 2048 values of tensor kv_b_proj.weight are NaN or infinite; expected finite weights"),
    "infinite": (set_tensors(q_b_proj__weight=with_value(float("inf"))),
                 r"1 of 2880 values of tensor q_b_proj.weight are NaN or infinite; expected finite weights"),
    "infinite gain": (set_tensors(kv_a_layernorm__weight=with_value(float("-inf"))),
                      r"1 of 16 values of tensor kv_a_layernorm.weight are NaN or infinite"),
    "int8": (set_tensors(o_proj__weight=lambda t: t.to(torch.int8)),
             r"model.*o_proj.weight has dtype I8; expected one of F64, F32, F16, BF16; dequantise"),
    "fp8": (set_tensors(o_proj__weight=lambda t: t.to(torch.float8_e4m3fn)),
            r"model.*o_proj.weight has dtype F8_E4M3; expected one of F64, F32, F16, BF16; dequantise"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors(case: str, checkpoint: Path, command: Cli) -> None:
    damage, pattern = TENSORS[case]
    damage(checkpoint)
    command.refuses_model(pattern, checkpoint)


@pytest.mark.parametrize("options", [["--absorb", "folded"], ["--prefill", "expanded"], ["--dtype", "bf16"]],
                         ids=lambda o: " ".join(o))
def test_infinite_weights_under_every_plan(options: list[str], checkpoint: Path, command: Cli) -> None:
    set_tensors(kv_b_proj__weight=lambda t: t * float("inf"))(checkpoint)
    command.refuses_model(r"2048 of 2048 values of tensor kv_b_proj.weight are NaN or infinite", checkpoint, *options)


def test_fp16_overflow(checkpoint: Path, command: Cli) -> None:
    set_tensors(q_b_proj__weight=with_value(65520.0))(checkpoint)  # the first float32 that rounds to infinity
    pattern = r"q_b_proj.weight: 1 of 2880 values are too large for fp16; expected finite fp16 weights \(bf16 and fp32 "
    command.refuses_model("tensor model.layers.0.self_attn." + pattern, checkpoint, "--dtype", "fp16")
    command.refuses_model("tensor " + pattern, checkpoint, "--dtype", "fp16", "--layer", "0")
    assert command.run("export", checkpoint, "--out", command.out, "--dtype", "bf16")[0] == 0
    set_tensors(q_b_proj__weight=with_value(65519.0))(checkpoint)
    assert command.run("export", checkpoint, "--out", command.out, "--dtype", "fp16", "--overwrite")[0] == 0


def test_fp32_overflow_of_a_product(tmp_path: Path, command: Cli) -> None:
    state = article_state_dict()
    for name in ("fc.weight", "up_proj_v.weight"):
        state[name] *= 1e38
    save_file(state, tmp_path / "layer.safetensors")
    command.refuses_model(r"o_folded.weight: \d+ of \d+ values are too large for fp32; expected finite fp32 weights$",
                          tmp_path / "layer.safetensors", "--absorb", "folded")


# --- Its safetensors files, byte by byte ------------------------------------------------------------------------------


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:8 + length]), raw[8 + length:]


def write_raw(path: Path, header: bytes | dict[str, Any], data: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def edit_header(**changes: Any) -> Damage:
    """Change fields of the header's entry for layer 0's o_proj; None removes one."""
    def damage(folder: Path) -> None:
        header, data = read_raw(folder / SINGLE)
        entry = header[ATTENTION + "o_proj.weight"] | changes
        header[ATTENTION + "o_proj.weight"] = {k: v for k, v in entry.items() if v is not None}
        write_raw(folder / SINGLE, header, data)
    return damage


def shift_offsets(begin: int, end: int) -> Damage:
    def damage(folder: Path) -> None:
        header, _ = read_raw(folder / SINGLE)
        b, e = header[ATTENTION + "o_proj.weight"]["data_offsets"]
        edit_header(data_offsets=[b + begin, e + end])(folder)
    return damage


def raw(header: bytes, data: bytes = b"", length: int | None = None) -> Damage:
    return lambda folder: write_raw(folder / SINGLE, header, data, length)


def truncate(share: float) -> Damage:
    return lambda folder: os.truncate(folder / SINGLE, int((folder / SINGLE).stat().st_size * share))


_DAMAGED = r"; the file is damaged or not safetensors, fetch it again"
HEADERS: dict[str, tuple[Damage, str]] = {
    "truncated data": (truncate(0.9), r"tensor \S+ ends at byte \d+, the file has \d+ \(truncated\);"),
    "truncated header": (truncate(0.001), r"the header claims \d+ bytes, the file has \d+" + _DAMAGED),
    "empty": (truncate(0), r"the header claims 0 bytes, the file has 0" + _DAMAGED),
    "absurd length": (raw(b"{}", length=2**63), r"the header claims 9223372036854775808 bytes, the file has 10;"),
    "length past the end": (raw(b"{}", length=3), r"the header claims 3 bytes, the file has 10" + _DAMAGED),
    "not JSON": (raw(b"{'a': 1}"), r"the header is not JSON \(.*" + _DAMAGED),
    "not UTF-8": (raw(b'{"\xff": 1}'), r"the header is not JSON \(.*" + _DAMAGED),
    "a list": (raw(b"[]"), r"the header is not JSON \(not an object\)" + _DAMAGED),
    "nested without end": (raw(b"[" * 100_000), r"the header is not JSON \(.*" + _DAMAGED),
    "entry a number": (raw(b'{"a": 1}'), r"tensor a lacks dtype, shape or data_offsets" + _DAMAGED),
    "infinite shape": (raw(b'{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 0]}}'),
                       r"tensor a lacks dtype, shape or data_offsets" + _DAMAGED),
    "no offsets": (edit_header(data_offsets=None), r"o_proj.weight lacks dtype, shape or data_offsets" + _DAMAGED),
    "offsets against shape": (shift_offsets(0, -4),
                              r"o_proj.weight \[64, 48\] F32 needs 12288 bytes, its offsets are \[\d+, \d+\];"),
    "shape against offsets": (edit_header(shape=[64, 49]),
                              r"o_proj.weight \[64, 49\] F32 needs 12544 bytes, its offsets are \[\d+, \d+\];"),
    "offsets backwards": (edit_header(data_offsets=[12288, 0]), r"o_proj.weight .* its offsets are \[12288, 0\];"),
    "negative offsets": (edit_header(data_offsets=[-12288, 0]), r"o_proj.weight .* its offsets are \[-12288, 0\];"),
    "negative shape": (edit_header(shape=[-64, -48]), r"o_proj.weight \[-64, -48\] F32 needs 12288 bytes, "),
    "offsets past the end": (shift_offsets(1 << 40, 1 << 40), r"o_proj.weight ends at byte \d+, the file has \d+"),
    "unknown dtype": (edit_header(dtype="F4"), r"o_proj.weight has the unknown dtype F4" + _DAMAGED),
}


@pytest.mark.parametrize("case", HEADERS)
def test_safetensors_file(case: str, checkpoint: Path, command: Cli) -> None:
    damage, pattern = HEADERS[case]
    damage(checkpoint)
    command.refuses_model(re.escape(str(checkpoint / SINGLE)) + ": .*" + pattern, checkpoint)


# --- Its index --------------------------------------------------------------------------------------------------------

NAME = ATTENTION + "o_proj.weight"


def place(shard: Any) -> Damage:
    """Let the index place o_proj in `shard`."""
    def damage(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][NAME] = shard
        (folder / INDEX).write_text(json.dumps(index))
    return damage


def place_in_another(folder: Path) -> None:
    files = json.loads((folder / INDEX).read_text())["weight_map"]
    place(next(f for f in sorted(set(files.values())) if f != files[NAME]))(folder)


def unlink_shard(folder: Path) -> None:
    (folder / json.loads((folder / INDEX).read_text())["weight_map"][NAME]).unlink()


def place_in_parent(folder: Path) -> None:
    """Outside the folder, and there: only the rule about names refuses it."""
    save_file({NAME: torch.zeros(64, 48)}, folder.parent / "outside.safetensors")
    place("../outside.safetensors")(folder)


def place_absolutely(folder: Path) -> None:
    save_file({NAME: torch.zeros(64, 48)}, folder / "inside.safetensors")
    place(str(folder / "inside.safetensors"))(folder)


def text_index(text: str) -> Damage:
    return lambda folder: (folder / INDEX).write_text(text)


_PLAIN = r"; expected the plain name of a file in the folder"
INDEXES: dict[str, tuple[Damage, str]] = {
    "parent folder": (place_in_parent, r"the index names '../outside.safetensors'" + _PLAIN),
    "absolute path": (place_absolutely, r"the index names '/.*/inside.safetensors'" + _PLAIN),
    "dots": (place(".."), r"the index names '..'" + _PLAIN),
    "empty name": (place(""), r"the index names ''" + _PLAIN),
    "number": (place(7), r"the index names 7" + _PLAIN),
    "missing shard": (place("model-00009-of-00002.safetensors"),
                      r"the index names model-00009-of-00002.safetensors, which is not in the folder; fetch"),
    "deleted shard": (unlink_shard, r"the index names model-\S+, which is not in the folder; fetch the missing shard"),
    "another shard": (place_in_another, rf"model-\S+: lacks tensor {NAME}, which the index places there"),
    "not JSON": (text_index("{"), r"index.json: not valid JSON \("),
    "no weight_map": (text_index("{}"), r"index.json: expected an object `weight_map` \(tensor -> file\)"),
    "weight_map a list": (text_index('{"weight_map": []}'), r"index.json: expected an object `weight_map`"),
}


@pytest.mark.parametrize("case", INDEXES)
def test_index(case: str, sharded: Path, command: Cli) -> None:
    damage, pattern = INDEXES[case]
    damage(sharded)
    command.refuses_model(pattern, sharded)


def test_only_a_pickle(checkpoint: Path, command: Cli) -> None:
    torch.save(load_file(checkpoint / SINGLE), checkpoint / "pytorch_model.bin")
    (checkpoint / SINGLE).unlink()
    command.refuses_model(r"neither model.safetensors nor model.safetensors.index.json found \(pytorch_model.bin is a "
                          r"pickle: convert it", checkpoint)
    (checkpoint / "pytorch_model.bin").unlink()
    command.refuses_model(r"neither model.safetensors nor model.safetensors.index.json found$", checkpoint, "--layer",
                          "0")
    command.refuses_model(r"config.json alone, no weights; expected model.safetensors or its shards \(or --weights "
                          r"none, for the graphs alone\)$", checkpoint)


# --- The article's state_dict -----------------------------------------------------------------------------------------


def test_pickle_needs_leave(tmp_path: Path, command: Cli) -> None:
    torch.save(article_state_dict(), tmp_path / "layer.pt")
    command.refuses_model(r"layer.pt is a pickle; expected .safetensors \(or pass --allow-pickle for weights you",
                          tmp_path / "layer.pt")


class Evil:
    """A pickle that makes a folder when it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_malicious_pickle_runs_no_code(legacy: bool, tmp_path: Path, command: Cli) -> None:
    file, marker = tmp_path / "layer.pt", tmp_path / "code_was_run"
    torch.save(article_state_dict() | {"fc.weight": Evil(marker)}, file, _use_new_zipfile_serialization=not legacy)
    command.refuses_model(r"layer.pt: torch.load\(weights_only=True\) refused it \(UnpicklingError", file,
                          "--allow-pickle")
    assert not marker.exists()
    torch.load(file, weights_only=False)  # it does run code where code may run
    assert marker.exists()


def changed(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = article_state_dict() | {k.replace("__", "."): v for k, v in changes.items() if v is not None}
    return {k: v for k, v in state.items() if k.replace(".", "__") not in changes or v is changes[k.replace(".", "__")]}


ARTICLES: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "another layer": ({"q_proj.weight": torch.zeros(4, 4)}, r"not a state_dict of the article's MLALayer \("
                      r"'down_proj_kv.weight' is missing or misshapen\); expected down_proj_kv, up_proj_k"),
    "no tensors": ({}, r"not a state_dict of the article's MLALayer"),
    "no bias": (changed(fc__bias=None), r"tensor fc.bias \[512\] is missing; present: down_proj_kv.bias"),
    "extra": (changed(norm__weight=torch.ones(128)), r"unknown tensor norm.weight"),
    "shape": (changed(up_proj_v__weight=torch.ones(256, 64)),
              r"tensor up_proj_v.weight has shape \[256, 64\]; the configuration expects \[256, 128\]"),
    "rotary query": (changed(proj_qr__weight=torch.ones(200, 512)),
                     r"proj_qr \[200, 512\] must be rope_head_dim x heads, with rope_head_dim 26 from proj_kr"),
    "odd rope": (changed(proj_kr__weight=torch.ones(13, 512), proj_qr__weight=torch.ones(104, 512)),
                 r"qk_rope_head_dim is 13; RoPE rotates pairs, so it must be even"),
    "one-dimensional": (changed(down_proj_kv__weight=torch.ones(512)), r"not a state_dict of the article's MLALayer"),
    "no rotary rows": (changed(proj_kr__weight=torch.ones(0, 512)), r"not a state_dict of the article's MLALayer"),
    "no heads": (changed(proj_qr__weight=torch.ones(0, 512)), r"not a state_dict of the article's MLALayer"),
}


@pytest.mark.parametrize("case", ARTICLES)
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_article(case: str, suffix: str, tmp_path: Path, command: Cli) -> None:
    state, pattern = ARTICLES[case]
    file = tmp_path / f"layer.{suffix}"
    save_file(state, file) if suffix == "safetensors" else torch.save(state, file)
    command.refuses_model(pattern, file, *(["--allow-pickle"] if suffix == "pt" else []))


@pytest.mark.parametrize(("content", "pattern"), [
    (b"", r"layer.pt: torch.load\(weights_only=True\) refused it \(EOFError"),
    (b"hello", r"layer.pt: torch.load\(weights_only=True\) refused it \("),
    ([torch.zeros(2)], r"layer.pt: expected a plain state_dict \(name -> tensor\)"),
    ({"model": {"fc.weight": torch.zeros(2)}}, r"layer.pt: expected a plain state_dict \(name -> tensor\)"),
    (changed() | {1: torch.zeros(2)}, r"layer.pt: expected a plain state_dict \(name -> tensor\)"),
    (changed(fc__weight=torch.ones(512, 256, dtype=torch.int8)), r"fc.weight is torch.int8, .*expected dense floating"),
    (changed(fc__weight=torch.ones(512, 256, dtype=torch.complex64)), r"fc.weight is torch.complex64, .*expected"),
    (changed(fc__weight=torch.ones(512, 256).to_sparse()), r"fc.weight is .*sparse_coo; expected dense floating"),
], ids=["empty", "noise", "list", "nested", "number as a name", "int8", "complex", "sparse"])
def test_pickle_that_is_no_state_dict(content: Any, pattern: str, tmp_path: Path, command: Cli) -> None:
    file = tmp_path / "layer.pt"
    file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    command.refuses_model(pattern, file, "--allow-pickle")


def test_state_dict_holds_one_layer(tmp_path: Path, command: Cli) -> None:
    save_file(article_state_dict(), tmp_path / "layer.safetensors")
    command.refuses_model(r"--layer 1 given for layer.safetensors; a state_dict holds one layer, leave --layer out",
                          tmp_path / "layer.safetensors", "--layer", "1")


# --- Options that this model cannot take ------------------------------------------------------------------------------


def test_merge_q_on_a_normed_low_rank(checkpoint: Path, command: Cli) -> None:
    command.refuses_model(r"--merge-q: the query low rank has an RMS norm between its halves, so no single W_Q equals "
                          r"it; leave --merge-q out", checkpoint, "--merge-q", "--layer", "0")


def test_merge_q_without_a_low_rank(pristine: dict[str, Path], command: Cli) -> None:
    command.refuses_model(r"--merge-q: this attention has no query low rank to merge", pristine["no_q_rank"],
                          "--merge-q", "--layer", "0")


# --- The output folder ------------------------------------------------------------------------------------------------


def test_out_not_empty(command: Cli) -> None:
    command.out.mkdir(parents=True)
    (command.out / "mine.txt").write_text("keep")
    command.refuses_model(r"out is not empty; choose another place, or pass --overwrite to replace it", "article")
    command.refuses_model(r"out holds no manifest.json, so it was not made by this tool and --overwrite will not "
                          r"delete it; choose another place", "article", "--overwrite")


def test_overwrite_keeps_the_old_export_when_the_new_one_fails(checkpoint: Path, command: Cli) -> None:
    assert command.run("export", checkpoint, "--out", command.out)[0] == 0
    command.refuses_model(r"out is not empty; choose another place, or pass --overwrite", checkpoint)
    set_tensors(o_proj__weight=with_value(float("nan")))(checkpoint)
    command.refuses_model(r"NaN or infinite", checkpoint, "--overwrite")


def test_out_is_a_file(command: Cli) -> None:
    command.out.parent.mkdir(parents=True)
    command.out.write_text("mine")
    command.refuses_model(r"out exists and is not a folder; choose another place", "article")
    command.refuses_model(r"out exists and is not a folder; choose another place", "article", "--overwrite")


def test_out_is_a_symlink(command: Cli, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    command.out.parent.mkdir(parents=True)
    command.out.symlink_to(tmp_path / "elsewhere")
    command.refuses_model(r"out exists and is not a folder; choose another place", "article", "--overwrite")


def test_parent_is_a_file(command: Cli, tmp_path: Path) -> None:
    (tmp_path / "made").write_text("mine")
    command.refuses_model(r"cannot write beside .*out: Not a directory; choose another place", "article")


@pytest.mark.parametrize("length", [250, 300])  # the partial folder's name is too long; the name itself is
def test_out_name_too_long(length: int, command: Cli, tmp_path: Path) -> None:
    out = tmp_path / ("x" * length)
    command.refused(r"File name too long; choose another place", "export", "article", "--out", out)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody, not even root, makes a folder")
def test_parent_takes_no_folders(command: Cli) -> None:
    command.refused(r"cannot write beside /proc/out: .*; choose another place",
                    "export", "article", "--out", "/proc/out")


@pytest.mark.parametrize("step", ["sync", "rename"])
def test_disk_fills_up_late(step: str, command: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """With delayed allocation a full disk may show only at the fsync; and the last rename may fail."""
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if step == "sync":
        monkeypatch.setattr("exporter.output.os.fsync", full)
    else:
        monkeypatch.setattr("exporter.output.Path.rename", full)
    command.refuses_model(r"cannot write .*out: No space left on device; free space or choose another place", "article")


def test_progress_line_is_cleared_before_the_error(checkpoint: Path, command: Cli,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    set_tensors(o_proj__weight=with_value(1e5))(checkpoint)
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    code, _, err = command.run("export", checkpoint, "--out", command.out, "--dtype", "fp16")
    assert code == 2
    # the bar was drawn, and its line was cleared before the error's was written
    assert re.search(r"\x1b\[2Kerror: tensor model\.layers\.\d\.self_attn\.o_proj\.weight: 1 of .*\n$", err), err


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyboardInterrupt()], ids=["bug", "interrupt"])
def test_nothing_is_left_by_any_failure(error: BaseException, command: Cli, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        assert list(tmp_path.rglob(".out.partial-*/weights.safetensors"))  # late enough to have something to remove
        raise error

    monkeypatch.setattr("exporter.export.infer_and_check", fail)
    if isinstance(error, KeyboardInterrupt):
        code, out, err = command.run("export", "article", "--out", command.out)
        assert (code, out, err.strip()) == (130, "", "error: interrupted; nothing was left behind")
    else:
        monkeypatch.setattr(sys, "argv", ["exporter", "export", "article", "--out", str(command.out)])
        with pytest.raises(ValueError, match="a bug"):  # a bug keeps its traceback
            console.main(cli, "python -m exporter")
    assert tree(tmp_path) == {}


# --- As processes -----------------------------------------------------------------------------------------------------


def process(*argv: str | Path, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "exporter", *map(str, argv)], cwd=REPOSITORY, capture_output=True,
                          text=True, check=False, **kwargs)


@pytest.mark.parametrize(("case", "options"), [
    ("config", []), ("config", ["--json"]), ("pickle", ["--allow-pickle", "--json"]),
    ("infinite", ["--absorb", "folded"]),
], ids=lambda v: v if isinstance(v, str) else " ".join(v) or "plain")
def test_process(case: str, options: list[str], checkpoint: Path, tmp_path: Path) -> None:
    model = checkpoint
    if case == "config":
        set_config(model_type="llama")(checkpoint)
    elif case == "pickle":
        model = tmp_path / "layer.pt"
        torch.save({"fc.weight": Evil(tmp_path / "code_was_run")}, model)
    else:
        set_tensors(kv_b_proj__weight=lambda t: t * float("inf"))(checkpoint)
    before = tree(tmp_path)
    done = process("export", model, "--out", tmp_path / "made" / "out", *options)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    if "--json" in options:
        assert json.loads(done.stdout) == {"error": done.stderr.removeprefix("error: ").rstrip()}
    else:
        assert done.stdout == ""
    assert tree(tmp_path) == before


def test_disk_full(tmp_path: Path) -> None:
    """A limit on file sizes stands for a full disk: it needs no privilege, and writing fails in the same place."""
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))

    done = process("export", "article", "--out", tmp_path / "made" / "out", preexec_fn=limit)
    assert done.returncode == 2
    assert re.fullmatch(r"error: cannot write .*/made/out: File too large; free space or choose another place\n",
                        done.stderr)
    assert tree(tmp_path) == {}


# A process that gives its privileges away once it has imported what it needs (nobody may not read every Python).
_AS_NOBODY = """
import os, sys
import exporter.__main__ as program, exporter.export
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
program.console.main(program.cli, "python -m exporter")
"""


@pytest.mark.parametrize("mode", [0o555, 0o000], ids=["read-only parent", "unreadable parent"])
def test_parent_without_permission(mode: int) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as made:  # pytest's own folders are closed to other users
        Path(made).chmod(mode)
        done = subprocess.run([sys.executable, "-c", _AS_NOBODY, "export", "article", "--out", f"{made}/out"],
                              cwd=REPOSITORY, capture_output=True, text=True, check=False)
        Path(made).chmod(0o755)
        assert done.returncode == 2
        assert re.fullmatch(r"error: cannot write beside /tmp/.*/out: Permission denied; choose another place\n",
                            done.stderr)
        assert tree(Path(made)) == {}
