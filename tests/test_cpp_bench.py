"""`python -m validate cpp` judges what a generator prints: the same tokens or a failed check, and the times of both."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import onnxruntime
import pytest

from engines import cpp_build
from exporter import console
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from tests.model_checkpoints import tiny_checkpoint
from validate.__main__ import cli

Validate = Callable[..., tuple[int, str, str]]
FAKE = """#!{python}
import json, sys
sys.path.insert(0, {repository!r})
from engines.generate import Generator
from exporter.manifest import open_export
words = dict(zip(sys.argv[2::2], sys.argv[3::2]))
prompt = [int(word) for word in words["--tokens"].split(",")]
with Generator(open_export(sys.argv[1]), threads=1) as generator:
    tokens = [step.tokens[0] for step in generator.generate([prompt], int(words["--max-new-tokens"]))]
{damage}
print(json.dumps({{"answers": [{{"tokens": tokens}}], "decode_ms": 0.5}}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("cpp")
    checkpoint = tiny_checkpoint(folder / "checkpoint", "youtu")
    return export(ExportRequest(str(checkpoint), folder / "export", max_context=64))


@pytest.fixture
def validate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Validate:
    """`python -m validate cpp` with some words: exit status, stdout, stderr."""
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["validate", "cpp", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            console.main(cli, "python -m validate")
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return run


def generator(folder: Path, damage: str = "") -> Path:
    """A stand-in for mla-generate that answers by Python, and is damaged at will."""
    program = folder / "mla-generate"
    program.write_text(FAKE.format(python=sys.executable, repository=str(Path(__file__).resolve().parent.parent),
                                   damage=damage))
    program.chmod(0o755)
    return program


def test_figures_and_verdict(made: Export, tmp_path: Path, validate: Validate) -> None:
    program = generator(tmp_path)
    code, out, _ = validate(made.folder, "--generator", program, "--context", 9, "--new-tokens", 6, "--rounds",
                            1, "--json")
    data = json.loads(out)
    assert (code, data["same_tokens"], data["cpp_step_ms"], data["tokens"]) == (0, True, 0.5, 6)
    assert 0 < data["python_session_ms"] < data["python_step_ms"]
    assert data["cpp_to_session"] == pytest.approx(0.5 / data["python_session_ms"])


def test_what_is_wrong_is_said(made: Export, tmp_path: Path, validate: Validate) -> None:
    few = ("--context", 9, "--new-tokens", 6, "--rounds", 1)
    for damage, code, message in (
            ("tokens[3] += 1", 1, "token 3 differs: C++ gave ["), ("tokens.pop()", 1, "token 5 differs: C++ gave []"),
            ("print('{')", 2, "expected what mla-generate --json prints"),
            ("sys.exit('mla-generate: broken')", 2, "ended with 1: mla-generate: broken")):
        found = validate(made.folder, "--generator", generator(tmp_path, damage), *few)
        assert found[:2] == (code, "")
        assert message in " ".join(found[2].split())
    for words, message in (((), "build/cpp/release/mla-generate: no such file; build it with: "),
                           (("--new-tokens", 1), "--new-tokens 1: expected at least 2"),
                           (("--rounds", 0), "--rounds 0: expected at least 1")):
        given = words or ("--generator", tmp_path / "build/cpp/release/mla-generate")
        found = validate(made.folder, *given)
        assert found[:2] == (2, "")
        assert message in " ".join(found[2].split())


def test_the_command_that_builds_names_an_onnx_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that the system has, one that was fetched, or a release; the line is one line of a shell."""
    monkeypatch.setattr(cpp_build.platform, "machine", lambda: "aarch64")
    source = cpp_build.shown(cpp_build.SOURCE)
    system, fetched, build = tmp_path / "usr", tmp_path / "the deps", tmp_path / "build"
    both = f"cmake --build {build} --target mla-generate"
    release = f"onnxruntime-linux-aarch64-{onnxruntime.__version__}"
    assert cpp_build.build_command(build, [system], fetched) == (
        f"mkdir -p {build} && curl -fL https://github.com/microsoft/onnxruntime/releases/download/"
        f"v{onnxruntime.__version__}/{release}.tgz | tar xz -C {build} && cmake -S {source} -B {build} "
        f"-DCMAKE_BUILD_TYPE=Release -DORT_ROOT={build / release} && {both}")
    include, root = fetched / "debian" / "usr" / "include" / "onnxruntime", fetched / "ort"
    for file in (include / "onnxruntime_cxx_api.h", root / "lib" / "libonnxruntime.so"):
        file.parent.mkdir(parents=True)
        file.touch()
    line = cpp_build.build_command(build, [system], fetched)
    assert line == (f"cmake -S {source} -B {build} -DCMAKE_BUILD_TYPE=Release '-DORT_ROOT={root}' "
                    f"'-DORT_INCLUDE={include}' '-DCMAKE_PREFIX_PATH={fetched / 'debian' / 'usr'}' && {both}")
    for file in (system / "include" / "onnxruntime" / "onnxruntime_cxx_api.h",
                 system / "lib" / "x86_64-linux-gnu" / "libonnxruntime.so"):
        file.parent.mkdir(parents=True)
        file.touch()
    assert cpp_build.build_command(build, [system], fetched) == (
        f"cmake -S {source} -B {build} -DCMAKE_BUILD_TYPE=Release && {both}")
