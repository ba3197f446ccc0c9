"""The house stays as docs/architecture.md draws it: imports run one way, every file is on the page."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = ("exporter", "engines", "validate")
FILES = sorted(p for package in PACKAGES for p in (REPOSITORY / package).rglob("*.py"))
PAGE = (REPOSITORY / "docs" / "architecture.md").read_text()


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_imports_run_one_way(path: Path) -> None:
    rank = PACKAGES.index(path.relative_to(REPOSITORY).parts[0])
    for name in imported(ast.parse(path.read_text())):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert PACKAGES.index(top) <= rank, f"{path} imports {name}"
        assert top not in ("tests", "shared")


def test_exporter_does_without_torch_at_import() -> None:
    for path in FILES:
        if path.relative_to(REPOSITORY).parts[0] == "exporter":
            top_level = {n.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import)
                         for n in node.names}
            assert "torch" not in top_level, path


def test_tensorrt_has_one_door() -> None:
    """No file imports the modules: engines/trt.py loads the one asked for, and names `tensorrt` for its types."""
    for path in FILES:
        tree = ast.parse(path.read_text())
        if path == REPOSITORY / "engines" / "trt.py":
            tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
        assert not {name.split(".")[0] for name in imported(tree)} & {"tensorrt", "tensorrt_rtx"}, path


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPOSITORY)))
def test_file_says_what_it_is_for_and_is_on_the_page(path: Path) -> None:
    doc = ast.get_docstring(ast.parse(path.read_text()))
    assert doc, f"{path} has no docstring"
    if path.name != "__init__.py" and path.parent.name not in ("references", "formulations"):
        assert path.name in PAGE, f"{path.relative_to(REPOSITORY)} is not in docs/architecture.md"
    assert len(path.read_text().splitlines()) <= 450, f"{path}: one purpose each?"


def test_page_names_only_files_that_exist() -> None:
    known = {p.name for p in (*FILES, *(REPOSITORY / "tests").glob("*.py"))}
    for name in re.findall(r"\b(\w+\.py)\b", PAGE):
        assert name in known, name
