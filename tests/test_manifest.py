"""An export that was changed, truncated, or made by another version is refused; one that was only moved opens."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exporter.errors import InputError
from exporter.export import ExportRequest, export
from exporter.manifest import FORMAT, NAME, open_export
from exporter.weight_store import WEIGHT_FILE

REPOSITORY = Path(__file__).parent.parent
GRAPH = "decode.qkt.onnx"
HASHED = 1 << 22  # smaller files are hashed whenever an export is opened


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All its files are hashed."""
    return export(ExportRequest("article", tmp_path_factory.mktemp("small") / "export", max_context=64)).folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its weights are checked by size and mtime first."""
    folder = tmp_path_factory.mktemp("large") / "export"
    made = export(ExportRequest("deepseek-v2-lite", folder, dtype="fp16", max_context=64)).folder
    assert (made / WEIGHT_FILE).stat().st_size > HASHED
    return made


@pytest.fixture
def made(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "an export"))


@pytest.fixture
def heavy(large: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(large, tmp_path / "export"))


def flip_byte(path: Path, keep_time: bool, at: float = 0.5) -> None:
    """Change one byte, not the size; `keep_time` restores the mtime, else it differs."""
    stat = path.stat()
    with path.open("r+b") as f:
        f.seek(int(stat.st_size * at))
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + (0 if keep_time else 1)))
    assert path.stat().st_size == stat.st_size


def refused(folder: Path, *patterns: str) -> str:
    """The one-line refusal, which ends in the command that rebuilds the export."""
    with pytest.raises(InputError) as caught:
        open_export(folder)
    message = str(caught.value)
    assert "\n" not in message
    for pattern in patterns:
        assert re.search(pattern, message), message
    out = re.escape(shlex.quote(str(folder)))
    overwrite = " --overwrite" if folder.exists() else ""  # there is nothing to overwrite where there is nothing
    command = rf"python -m exporter export (MODEL|article|deepseek-v2-lite)( --\S+ \S+)* --out {out}{overwrite}"
    assert re.search(rf"; (make it|make one|rebuild) with: {command}$", message), message
    return message


# --- What opens -------------------------------------------------------------------------------------------------------


def test_manifest_lists_every_file(made: Path) -> None:
    data = json.loads((made / NAME).read_text())
    assert set(data["files"]) == {p.name for p in made.iterdir()} - {NAME}
    assert {g["file"] for g in data["graphs"]} <= set(data["files"])
    assert data["format"] == FORMAT


@pytest.mark.parametrize("which", ["small", "large"])
def test_copy_with_other_times_opens(which: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    original = request.getfixturevalue(which)
    copy = Path(shutil.copytree(original, tmp_path / "moved here", copy_function=shutil.copy))
    for path in copy.iterdir():
        os.utime(path, (1, 1))
    opened = open_export(copy)
    assert opened.folder == copy
    assert opened.config == open_export(original).config
    assert opened.graph("decode").file == GRAPH
    assert [g.to_dict() for g in opened.graphs] == json.loads((original / NAME).read_text())["graphs"]


def test_files_beside_the_export_do_not_matter(made: Path) -> None:
    (made / "notes.txt").write_text("mine")
    assert open_export(made).folder == made


# --- Changed files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_time", [True, False], ids=["same time", "new time"])
@pytest.mark.parametrize("at", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("file", [GRAPH, WEIGHT_FILE])
def test_changed_byte(file: str, at: float, keep_time: bool, made: Path) -> None:
    record = json.loads((made / NAME).read_text())["files"][file]
    flip_byte(made / file, keep_time, at)
    refused(made, rf"{file}: SHA-256 [0-9a-f]{{12}}…, the manifest says {record['sha256'][:12]}…; it was changed")


def test_every_file_is_checked(made: Path) -> None:
    for file in json.loads((made / NAME).read_text())["files"]:
        flip_byte(made / file, keep_time=True)
        refused(made, re.escape(file))
        flip_byte(made / file, keep_time=True)
    open_export(made)


def test_changed_weights_with_a_new_time(heavy: Path) -> None:
    flip_byte(heavy / WEIGHT_FILE, keep_time=False)
    refused(heavy, rf"{WEIGHT_FILE}: SHA-256 .*it was changed")


def test_changed_weights_with_the_old_time_are_not_seen(heavy: Path) -> None:
    """The stated limit (contract.md): hashing gigabytes at every start costs more than a forged mtime is likely."""
    flip_byte(heavy / WEIGHT_FILE, keep_time=True)
    assert open_export(heavy).folder == heavy
    flip_byte(heavy / GRAPH, keep_time=True)  # graphs are always hashed
    refused(heavy, GRAPH)


@pytest.mark.parametrize("which", ["small", "large"])
@pytest.mark.parametrize("change", [-1, 1, None], ids=["a byte less", "a byte more", "emptied"])
def test_weights_of_another_size(which: str, change: int | None, request: pytest.FixtureRequest,
                                 tmp_path: Path) -> None:
    folder = Path(shutil.copytree(request.getfixturevalue(which), tmp_path / "export"))
    stat = (folder / WEIGHT_FILE).stat()
    size = 0 if change is None else stat.st_size + change
    os.truncate(folder / WEIGHT_FILE, size)
    os.utime(folder / WEIGHT_FILE, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    refused(folder, rf"{WEIGHT_FILE}: {size} bytes, the manifest says {stat.st_size};")


@pytest.mark.parametrize("file", [GRAPH, WEIGHT_FILE])
@pytest.mark.parametrize("instead", ["nothing", "folder", "dangling symlink"])
def test_missing_file(file: str, instead: str, made: Path) -> None:
    (made / file).unlink()
    if instead == "folder":
        (made / file).mkdir()
    elif instead == "dangling symlink":
        (made / file).symlink_to("elsewhere")
    refused(made, rf"an export: {file} is missing;")


# --- The manifest itself ----------------------------------------------------------------------------------------------


def edited(**changes: Any) -> Callable[[dict[str, Any]], str]:
    """Change fields; a value of ... removes one."""
    return lambda data: json.dumps({k: v for k, v in (data | changes).items() if v is not ...})


def with_record(**changes: Any) -> Callable[[dict[str, Any]], str]:
    def edit(data: dict[str, Any]) -> str:
        record = {k: v for k, v in (data["files"][GRAPH] | changes).items() if v is not ...}
        return json.dumps(data | {"files": data["files"] | {GRAPH: record}})
    return edit


_FOREIGN = r"manifest.json: not a manifest of this toolkit;"
_CUT = r"manifest.json: no valid JSON, cut off or altered;"
MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], str | bytes], str]] = {
    "empty": (lambda d: "", _CUT),
    "cut off": (lambda d: json.dumps(d)[:-20], _CUT),
    "not UTF-8": (lambda d: b'{"format": "\xff"}', _CUT),
    "a list": (lambda d: "[]", _FOREIGN),
    "a number": (lambda d: "1", _FOREIGN),
    "nested without end": (lambda d: "[" * 100_000, _FOREIGN),
    "no format": (edited(format=...), _FOREIGN),
    "no files": (edited(files=...), _FOREIGN),
    "files a list": (edited(files=["a"]), _FOREIGN),
    "newer format": (edited(format=FORMAT + 1), rf"manifest.json: format {FORMAT + 1}, this version reads {FORMAT};"),
    "format a string": (edited(format="x"), rf"manifest.json: format x, this version reads {FORMAT};"),
    "no size": (with_record(size=...), r"manifest.json: a file's size, mtime_ns or sha256 is missing;"),
    "no hash": (with_record(sha256=..., mtime_ns=0), r"manifest.json: a file's size, mtime_ns or sha256 is missing;"),
    "another size": (with_record(size=1), rf"{GRAPH}: \d+ bytes, the manifest says 1;"),
    "another hash": (with_record(sha256="0" * 64), rf"{GRAPH}: SHA-256 .*, the manifest says 000000000000…"),
    "no graphs": (edited(graphs=...), r"manifest.json: not an export's manifest;"),
    "no config": (edited(config=...), r"manifest.json: not an export's manifest;"),
    "graphs malformed": (edited(graphs=[{"name": "decode"}]), r"manifest.json: malformed \(KeyError"),
    "graphs a number": (edited(graphs=1), r"manifest.json: malformed \(TypeError"),
    "config malformed": (edited(config={"rope": {}}), r"manifest.json: malformed \(TypeError"),
    "config a string": (edited(config="x"), r"manifest.json: malformed \(TypeError"),
}


@pytest.mark.parametrize("case", MANIFESTS)
def test_manifest(case: str, made: Path) -> None:
    edit, pattern = MANIFESTS[case]
    text = edit(json.loads((made / NAME).read_text()))
    (made / NAME).write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(made, pattern)


@pytest.mark.parametrize("folder", ["nowhere", "empty", "an export"])
def test_no_manifest(folder: str, made: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (made / NAME).unlink()
    refused(tmp_path / folder, r": no manifest.json; expected an exported folder;")


# --- What the message is good for -------------------------------------------------------------------------------------


def test_rebuild_command_rebuilds(made: Path) -> None:
    os.truncate(made / WEIGHT_FILE, 100)
    command = shlex.split(refused(made, WEIGHT_FILE).partition("rebuild with: ")[2])
    assert command[:3] == ["python", "-m", "exporter"]
    argv = [sys.executable, *command[1:]]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert open_export(made).folder == made


def test_inspect_refuses_as_one_line(made: Path) -> None:
    flip_byte(made / GRAPH, keep_time=True)
    argv = [sys.executable, "-m", "exporter", "inspect", str(made), "--json"]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    message = refused(made)
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")
    assert json.loads(done.stdout) == {"error": message}
