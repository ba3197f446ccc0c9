"""An export that is killed, interrupted or raced leaves its folder absent or complete, and the next run cleans up."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from exporter.errors import InputError
from exporter.manifest import open_export
from exporter.output import new_folder, remove_stale

REPOSITORY = Path(__file__).parent.parent
MODELS = {"deepseek-v2-lite": ["--dtype", "fp16"], "article": []}
LONGEST = 60.0  # seconds; nothing here takes more than a few


def arguments(model: str, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "exporter", "export", model, "--out", str(out), *MODELS[model], *options]


def slow_arguments(out: Path, *options: str) -> list[str]:
    """An export that still has a second or two to go when its first file appears."""
    return arguments("deepseek-v2-lite", out, "--absorb", "folded", *options)


def start(argv: list[str]) -> subprocess.Popen[str]:
    # a shell that runs pytest in the background makes its children ignore SIGINT, and Python keeps to that
    return subprocess.Popen(argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=LONGEST)
    return process.returncode, out, err


def run(argv: list[str]) -> tuple[int, str, str]:
    return finish(start(argv))


def partials(out: Path) -> list[Path]:
    return list(out.parent.glob(".*partial-*"))


def wait_for_partial(process: subprocess.Popen[str], out: Path) -> Path:
    """The folder being written, as soon as it holds a file."""
    end = time.monotonic() + LONGEST
    while process.poll() is None and time.monotonic() < end:
        for folder in partials(out):
            if any(folder.iterdir()):
                return folder
    raise AssertionError(f"no partial folder appeared: {process.communicate()}")


def absent_or_complete(out: Path) -> bool:
    """Whether the export is there; it must not be there in part."""
    if not out.exists():
        return False
    made = open_export(out)  # checks sizes and hashes
    data = json.loads((out / "manifest.json").read_text())
    assert {p.name for p in out.iterdir()} == set(data["files"]) | {"manifest.json"}
    assert {g.kind for g in made.graphs} == {"prefill", "decode"}
    return True


@cache
def run_time(model: str, scratch: Path) -> float:
    """Seconds of an undisturbed export, which stays at `scratch / model`."""
    begin = time.monotonic()
    code, _, err = run(arguments(model, scratch / model))
    assert (code, err) == (0, "")
    return time.monotonic() - begin


def next_run_is_clean(model: str, out: Path, complete: bool) -> None:
    code, _, err = run(arguments(model, out, *(["--overwrite"] if complete else [])))
    assert (code, err) == (0, "")
    assert absent_or_complete(out)
    assert partials(out) == []


def kill_at_random(kills: int, seed: int, folder: Path) -> dict[str, int]:
    """Kill exports at moments spread over their run time, half of them while they replace an earlier export."""
    draw, seen = random.Random(seed), {"absent": 0, "complete": 0, "with a partial": 0}
    for number in range(kills):
        model = list(MODELS)[number % 2]
        whole, out = run_time(model, folder), folder / f"{number}" / "out"
        replaces = number % 4 >= 2
        if replaces:
            shutil.copytree(folder / model, out)
        process = start(arguments(model, out, *(["--overwrite"] if replaces else [])))
        with suppress(subprocess.TimeoutExpired):
            process.wait(whole * (number + draw.random()) / kills)  # one moment in each stretch of the run time
        process.send_signal(signal.SIGKILL)
        finish(process)
        complete = absent_or_complete(out)
        seen["complete" if complete else "absent"] += 1
        seen["with a partial"] += bool(out.parent.exists() and partials(out))
        next_run_is_clean(model, out, complete)
        shutil.rmtree(out.parent)
    return seen


# --- SIGKILL ----------------------------------------------------------------------------------------------------------


def test_killed_at_random(tmp_path: Path) -> None:
    kill_at_random(4, 0, tmp_path)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path: Path) -> None:
    seen = kill_at_random(20, 1, tmp_path)
    assert seen["absent"], seen
    assert seen["complete"], seen


# Runs the program, and kills it at the WHICHth call of FUNCTION (before or after it).
_KILL_AT = """
import os, signal, sys
import exporter.__main__ as program, exporter.export, exporter.manifest, exporter.output
when, module, name, which, *argv = sys.argv[1:]
owner = eval(module)
real, calls = getattr(owner, name), 0

def kill(*args, **kwargs):
    global calls
    calls += 1
    last = calls == int(which)
    if last and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = real(*args, **kwargs)
    if last:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(owner, name, kill)
sys.argv = ["exporter", *argv]
program.console.main(program.cli, "python -m exporter")
"""

# step: (before or after which call, how an export that replaces another is found, how a first one is found, partials)
STEPS = {
    "folder made": ("after", "exporter.output.tempfile", "mkdtemp", 1, "old", "absent"),
    "graph checked": ("before", "exporter.export", "infer_and_check", 1, "old", "absent"),
    "manifest written": ("after", "exporter.manifest", "write", 1, "old", "absent"),
    "before the renames": ("before", "exporter.output", "_replace", 1, "old", "absent"),
    "first rename": ("after", "exporter.output.Path", "rename", 1, "absent", "new"),
    "all renames": ("after", "exporter.output", "_replace", 1, "new", "new"),
}


@pytest.mark.parametrize("replaces", [False, True], ids=["first export", "replacing"])
@pytest.mark.parametrize("step", STEPS)
def test_killed_at_step(step: str, replaces: bool, tmp_path: Path) -> None:
    when, module, name, which, after_replacing, after_first = STEPS[step]
    out, arguments_ = tmp_path / "out", ["export", "article", "--overwrite", "--seed", "7"]
    if replaces:
        shutil.copytree(earlier_export(tmp_path.parent), out)
    argv = [sys.executable, "-c", _KILL_AT, when, module, name, str(which), *arguments_, "--out", str(out)]
    assert run(argv)[0] == -signal.SIGKILL
    found = "absent"
    if absent_or_complete(out):
        found = "new" if open_export(out).data["source"]["seed"] == 7 else "old"
    assert found == (after_replacing if replaces else after_first)
    assert bool(partials(out)) == (found == "old" or (found == "absent"))
    # what the next run does first, and all that it does about leftovers
    remove_stale(out)
    assert partials(out) == []
    assert absent_or_complete(out) == (found != "absent")


@cache
def earlier_export(scratch: Path) -> Path:
    code, _, err = run(arguments("article", scratch / "earlier"))
    assert (code, err) == (0, "")
    return scratch / "earlier"


def test_next_run_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    out = tmp_path / "out [1]*"  # a name that means something to glob
    process = start(slow_arguments(out))
    left = wait_for_partial(process, out)
    process.kill()
    finish(process)
    assert left.is_dir()
    assert not out.exists()
    next_run_is_clean("article", out, complete=False)
    assert not left.exists()


# --- SIGINT -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaces", [False, True], ids=["first export", "replacing"])
def test_interrupted(replaces: bool, tmp_path: Path) -> None:
    out = tmp_path / "parents" / "out"
    if replaces:
        shutil.copytree(earlier_export(tmp_path.parent), out)
    process = start(slow_arguments(out, *(["--overwrite", "--json"] if replaces else [])))
    wait_for_partial(process, out)
    process.send_signal(signal.SIGINT)
    code, stdout, err = finish(process)
    assert (code, err.strip()) == (130, "error: interrupted; nothing was left behind")
    if replaces:
        assert json.loads(stdout) == {"error": "interrupted; nothing was left behind"}
        assert open_export(out).data["model"] == "article"
        assert [p.name for p in out.parent.iterdir()] == ["out"]
    else:
        assert stdout == ""
        assert list(tmp_path.iterdir()) == []


# --- Two at once ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "overwrite"), [("article", False), ("deepseek-v2-lite", True)])
def test_two_processes_one_folder(model: str, overwrite: bool, tmp_path: Path) -> None:
    out = tmp_path / "parents" / "out"
    argv = [arguments(model, out, "--seed", seed, *(["--overwrite"] if overwrite else [])) for seed in "12"]
    ends = [finish(p) for p in [start(a) for a in argv]]
    codes = [code for code, _, _ in ends]
    if overwrite:
        assert [(code, err) for code, _, err in ends] == [(0, "")] * 2, "the later one replaces the earlier"
    else:
        assert sorted(codes) == [0, 2], "the later one may not replace the earlier"
        assert re.fullmatch(r"error: .*/out is not empty; choose another place, or pass --overwrite to replace it\n",
                            ends[codes.index(2)][2])
        assert open_export(out).data["source"]["seed"] == 1 + codes.index(0)
    assert absent_or_complete(out)
    assert partials(out) == []


def fill(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)


def test_the_later_of_two_does_not_replace_the_earlier(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with new_folder(out) as later:
            fill(later, "later")
            with new_folder(out) as earlier:
                assert later.exists(), "the folder of a run that lives is no leftover"
                fill(earlier, "earlier")

    with pytest.raises(InputError, match="out is not empty; choose another place, or pass --overwrite"):
        write()
    assert (out / "manifest.json").read_text() == "earlier"
    assert partials(out) == []


def test_the_later_of_two_replaces_the_earlier_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with new_folder(out, overwrite=True) as later:
        fill(later, "later")
        with new_folder(out, overwrite=True) as earlier:
            fill(earlier, "earlier")
    assert (out / "manifest.json").read_text() == "later"
    assert partials(out) == []


def test_a_folder_that_a_stranger_fills_meanwhile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def write() -> None:
        with new_folder(out, overwrite=True) as folder:
            fill(folder, "mine")
            out.mkdir()
            (out / "thesis.txt").write_text("years of work")

    with pytest.raises(InputError, match=r"out holds no manifest.json, so it was not made by this tool"):
        write()
    assert (out / "thesis.txt").read_text() == "years of work"
    assert partials(out) == []


def test_old_export_returns_when_the_new_one_cannot_take_its_place(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    out, rename = tmp_path / "out", Path.rename
    with new_folder(out) as folder:
        fill(folder, "old")

    def fail_for_the_new_one(self: Path, target: Path) -> Path:
        if (self / "manifest.json").read_text() == "new":
            raise OSError(5, os.strerror(5))
        return rename(self, target)

    def write() -> None:
        with new_folder(out, overwrite=True) as folder:
            fill(folder, "new")
            monkeypatch.setattr(Path, "rename", fail_for_the_new_one)

    with pytest.raises(InputError, match="Input/output error"):
        write()
    assert (out / "manifest.json").read_text() == "old"
    assert partials(out) == []


# Makes the same folder again and again, without an export's cost: the races are in the making of folders.
_RACE = """
import sys
from pathlib import Path
from exporter.errors import InputError
from exporter.output import new_folder
won = 0
for turn in range(int(sys.argv[2])):
    try:
        with new_folder(Path(sys.argv[1]), overwrite=True) as folder:
            (folder / "manifest.json").write_text(f"{sys.argv[3]} {turn}")
        won += 1
    except InputError as error:
        sys.exit(str(error))
print(won)
"""


def test_many_turns_of_three_processes(tmp_path: Path) -> None:
    """A neighbour's clean-up between making a folder and locking it, renames that cross: all would be hit here."""
    out = tmp_path / "out"
    racers = [start([sys.executable, "-c", _RACE, str(out), "150", str(i)]) for i in range(3)]
    ends = [finish(p) for p in racers]
    assert all((code, err) == (0, "") for code, _, err in ends), ends
    assert [int(won) for _, won, _ in ends] == [150] * 3
    assert re.fullmatch(r"[0-2] \d+", (out / "manifest.json").read_text())
    assert partials(out) == []


def test_leftovers_that_are_no_folders_of_ours_stay(tmp_path: Path) -> None:
    """A file or a symlink that happens to be called like a leftover is neither followed nor an obstacle."""
    (tmp_path / ".out.partial-file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "mine").write_text("mine")
    (tmp_path / ".out.partial-link").symlink_to("elsewhere")
    (tmp_path / ".output.partial-other").mkdir()
    with new_folder(tmp_path / "out") as folder:
        fill(folder, "new")
    assert (tmp_path / ".out.partial-file").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "mine").read_text() == "mine"
    assert (tmp_path / ".output.partial-other").is_dir()
