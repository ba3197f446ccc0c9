"""docs/faults.md says of every fault in the tables who finds it, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from validate import model_faults
from validate.doctor_ailments import AILMENTS
from validate.faults import FAULTS
from validate.network import PLANTS

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "faults.md").read_text()
ROWS = re.findall(r"^\| `([a-z0-9-]+)` \| (.+) \|$", PAGE, re.MULTILINE)
PLANTED = [(n, f.what, f.red) for n, f in (*FAULTS.items(), *model_faults.FAULTS.items())]


@pytest.mark.parametrize(("name", "what", "red"), PLANTED)
def test_every_planted_fault_has_its_row(name: str, what: str, red: tuple[str, ...]) -> None:
    """With the rungs that its test demands to be red."""
    rungs = ", ".join(f"`{r}`" for r in red if not r.startswith("ort")) or "–"
    assert f"| `{name}` | {what} | {rungs} | " in PAGE


@pytest.mark.parametrize("name", AILMENTS)
def test_every_ailment_has_its_row(name: str) -> None:
    assert name in {n for n, _ in ROWS}


def test_the_page_names_nothing_else() -> None:
    assert {n for n, _ in ROWS} <= {*FAULTS, *model_faults.FAULTS, *AILMENTS}
    named = set(re.findall(r"`([a-z0-9]+(?:-[a-z0-9]+)+)`", PAGE))
    tools = {"control-flow", "ort-cuda"}
    assert named <= {*FAULTS, *model_faults.FAULTS, *AILMENTS, *tools}
    assert all(f"--plant {name}" in PAGE for name in PLANTS)


def test_the_articles_faults_are_listed() -> None:
    for number in range(1, 6):
        line = next(x for x in PAGE.splitlines() if x.startswith(f"| {number} | "))
        assert all(f"`{n}`" in line for n, a in AILMENTS.items() if a.article == number)
