"""The suite export: the same checkpoint as graphs, by ours and by mobius-onnx: time, memory, bytes; and our starts.

Each export is a process of its own, its start included, in turns. A plain copy of the checkpoint's files, in the same
turns, is the floor of those that write weights; linked weights need none. Afterwards the graphs are asked real tokens
and their logits compared, and what one waits for before a first export and a first token is measured (startup_bench).
"""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, arguments
from exporter.manifest import open_export
from validate import child, mobius_peer
from validate.bench_rows import Row, Run
from validate.bench_subjects import Variant, Workplace, compare_on_tokens, open_ours, opened
from validate.bench_timing import Timed, watch
from validate.peers import US, AbsentError, Ours
from validate.startup_bench import bench_startup

REPOSITORY = Path(__file__).resolve().parent.parent
LINK = Variant("weights link", {"weights": "link"})
PLAIN = (LINK, Variant("weights copy"))
ROUNDS = 3


@dataclass
class Exports:
    """A subject's exports: their times, the most memory of a process, and the last folder."""

    timed: Timed = field(default_factory=Timed)
    peak_bytes: int = 0
    folder: Path | None = None

    def add(self, done: child.Done, folder: Path) -> None:
        """One more; the one before goes."""
        if self.folder is not None:
            shutil.rmtree(self.folder)
        self.timed.ms.append(1e3 * done.seconds)
        self.peak_bytes, self.folder = max(self.peak_bytes, done.peak_bytes), folder


def bench_export(run: Run, place: Workplace) -> None:
    """Export in turns, compare what was made, and say what it took."""
    ways = {f"{US}, {way.label}": way for way in (*PLAIN, *place.variants[1:])}
    with watch("export", 1, run.result.load):
        made, copied = _in_turns(run, place, ways)
    found = {name: open_export(made[name].folder or Path()) for name in ways}
    openers = [partial(open_ours, place, export, export.graph("decode"), ways[name]) for name, export in found.items()]
    with opened(place, openers) as subjects:
        ours = [s.name for s in subjects if isinstance(s, Ours)]
        compared = compare_on_tokens(subjects, ours, place.shape, run.result.not_run)
    base = made[f"{US}, {LINK.label}"].timed.median
    for name, exports in made.items():
        of = ours[list(ways).index(name)] if name in ways else name
        row = Row.of("export", name, exports.timed, ours_ms=base, peak_bytes=exports.peak_bytes,
                     bytes_written=written(exports.folder or Path()),
                     outputs_equal=compared[of].equal if of in compared else False)
        if not name.endswith(LINK.label):
            row = replace(row, floor_ms=copied.median, ratio_to_floor=row.ms / copied.median)
        run.result.rows.append(row)
    bench_startup(run, found[f"{US}, {LINK.label}"])


def _in_turns(run: Run, place: Workplace, ways: dict[str, Variant]) -> tuple[dict[str, Exports], Timed]:
    """Everyone's exports, and plain copies of the checkpoint. A peer that fails is absent."""
    made, copied = {name: Exports() for name in ways}, Timed()
    rounds = min(run.rounds, ROUNDS)
    for number in range(rounds):
        copied.ms.append(1e3 * _copy(place.folder, place.work / "copied"))
        for name, way in ways.items():
            run.progress(f"exporting, {number + 1} of {rounds}: {name}")
            options: dict[str, Any] = {"scope": "model", "max_context": place.max_context, **way.options}
            out = place.work / f"export-{way.label.replace(' ', '-')}-{number}"
            made[name].add(_export_ours(ExportRequest(str(place.folder), out, **options)), out)
        if place.mobius_python and mobius_peer.NAME not in place.absent:
            run.progress(f"exporting, {number + 1} of {rounds}: {mobius_peer.NAME}")
            out = place.work / f"mobius-{number}"
            try:
                done = mobius_peer.build(place.mobius_python, place.folder, out)
            except AbsentError as why:
                place.absent[mobius_peer.NAME] = str(why)
                continue
            made.setdefault(mobius_peer.NAME, Exports()).add(done, out)
            place.mobius_graph = out / "model.onnx"
    return made, copied


def _export_ours(request: ExportRequest) -> child.Done:
    """The export as its command makes it."""
    words = [sys.executable, "-m", "exporter", "export", *arguments(request), "--out", str(request.out), "--json"]
    done = child.run(words, cwd=REPOSITORY)
    if done.code:
        raise (InputError if done.code == 2 else CheckError)(done.last_line.removeprefix("error: "))
    return done


def _copy(folder: Path, to: Path) -> float:
    """Seconds that a plain copy of a checkpoint takes; it goes again."""
    start = time.perf_counter()
    shutil.copytree(folder, to)
    seconds = time.perf_counter() - start
    shutil.rmtree(to)
    return seconds


def written(folder: Path) -> int:
    """Bytes of files that are this folder's alone; a hard link costs nothing."""
    stats = (p.lstat() for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return sum(s.st_size for s in stats if s.st_nlink == 1)
