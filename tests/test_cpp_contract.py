"""What the C++ headers say of manifests and graphs is what Python writes: checked without a compiler."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from engines.build_options import BuildOptions
from engines.records import EngineRecord
from exporter import __version__, manifest
from exporter.dtypes import DTYPES
from exporter.export import ExportRequest, export
from exporter.manifest import Export
from exporter.signature import CACHE_DTYPES, NO_CACHE, TABLE
from tests.model_checkpoints import tiny_checkpoint

REPOSITORY = Path(__file__).resolve().parent.parent
CPP = REPOSITORY / "engines" / "cpp"
HEADERS = sorted((CPP / "include" / "mla").glob("*.hpp"))
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()


def header(name: str) -> str:
    return (CPP / "include" / "mla" / name).read_text()


def keys_read(text: str) -> set[str]:
    """The keys that a header asks a manifest for."""
    return set(re.findall(r'\b(?:at|has)\("(\w+)"\)', text))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Export:
    folder = tmp_path_factory.mktemp("cpp")
    return export(ExportRequest(str(tiny_checkpoint(folder / "checkpoint", "youtu")), folder / "export", max_context=64,
                                weights="link"))


def keys_of(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value).union(*map(keys_of, value.values()))
    return set().union(*map(keys_of, value)) if isinstance(value, list) else set()


def test_every_key_that_is_read_is_written(made: Export) -> None:
    read = keys_read(header("manifest.hpp"))
    assert {"format", "files", "graphs", "contract", "linked", "sha256"} <= read
    assert read <= keys_of(made.data)
    engines = keys_read(header("engines.hpp"))
    assert {"serves", "profiles", "engines_of"} <= engines
    manifest_keys = {"engines_of", "backend", "options", "builder", "engines", "files"}
    assert engines <= {f.name for f in fields(EngineRecord)} | manifest_keys | {"B", "T", "S"}
    options = re.search(r'for \(const char\* option : \{([^}]*)\}', header("engines.hpp"))
    assert options
    assert set(re.findall(r'"(\w+)"', options[1])) <= {f.name for f in fields(BuildOptions)}


def test_the_tensors_of_the_contract_are_those_of_the_layout() -> None:
    """Every input and output of a whole model's graphs, in each cache form, is one that layout.hpp binds."""
    text = header("layout.hpp")
    parts = re.search(r'const char\* names\[\] = \{([^}]*)\}', text)
    assert parts
    known = {"input_ids", "past_lengths", "last_token", "logits"}
    assert all(f'"{name}"' in text for name in known)
    for part in re.findall(r'"(\w+)"', parts[1]):
        known |= {f"past_{part}.{{i}}", f"new_{part}.{{i}}", f"present_{part}.{{i}}", f"{part}_cache.{{i}}",
                  f"{part}_cache_out.{{i}}"}
    of_models = {"tokens-in", "last-token", "last-logits", "all-logits"}
    for row in TABLE:
        if set(row.forms) != {NO_CACHE} and (not row.when or set(row.when) & of_models):
            assert row.name in known, row.name


def test_format_dtypes_and_version_agree() -> None:
    assert f"manifest_format = {manifest.FORMAT};" in header("manifest.hpp")
    names = re.search(r"dtype_names = \{([^}]*)\}", header("tensor.hpp"))
    assert names
    assert re.findall(r'"(\w+)"', names[1]) == [*DTYPES, *CACHE_DTYPES, "int64"]
    assert f"project(mla VERSION {__version__} " in (CPP / "CMakeLists.txt").read_text()


@pytest.mark.parametrize("path", [*HEADERS, *sorted(CPP.glob("*/*.cpp"))], ids=lambda p: p.name)
def test_every_file_says_its_purpose_and_is_on_the_page(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("// ")
    assert path.name in PAGE, f"{path.relative_to(REPOSITORY)} is not in docs/architecture.md"
    assert len(lines) <= 450
    assert max(map(len, lines)) <= 120, [line for line in lines if len(line) > 120]
    if path.suffix == ".hpp":
        assert "#pragma once" in lines[1:3] or "#pragma once" in lines
        if path.name != "mla.hpp":
            includes = re.findall(r'#include "mla/(\w+\.hpp)"', "\n".join(lines))
            assert set(includes) <= {p.name for p in HEADERS}
