"""How long our commands take to be ready, a process each, from its start to its end: rows of the suite export.

`exporter --help` is what every command pays before it begins. `linked model ready` is `engines generate` of two tokens
over linked weights: the export checked, both sessions opened, one prefill step and one decode step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engines.generate import Generator
from exporter.errors import CheckError
from exporter.manifest import Export
from validate import child
from validate.bench_rows import Row, Run
from validate.bench_timing import Timed, watch

REPOSITORY = Path(__file__).resolve().parent.parent
PROMPT, NEW = (5,), 2  # tokens: the second new one is a decode step's


@dataclass
class Start:
    """A command of ours, whether what it prints is right, and its starts so far."""

    subject: str
    words: Sequence[str]
    right: Callable[[str], bool]
    timed: Timed = field(default_factory=Timed)
    peak_bytes: int = 0

    def once(self) -> None:
        """One more. CheckError for one that fails or prints something else."""
        done = child.run([sys.executable, "-m", *self.words], cwd=REPOSITORY)
        if done.code or not self.right(done.out):
            raise CheckError(f"{self.subject}: {' '.join(self.words)} ended with {done.code}: {done.last_line}; "
                             "not timed")
        self.timed.ms.append(1e3 * done.seconds)
        self.peak_bytes = max(self.peak_bytes, done.peak_bytes)


def bench_startup(run: Run, linked: Export) -> None:
    """Start each command in turns, as often as subjects have rounds."""
    starts = [_help(), _ready(linked, run.threads)]
    with watch("starts", run.threads, run.result.load):
        for number in range(run.rounds):
            for start in starts:
                run.progress(f"starting, {number + 1} of {run.rounds}: {start.subject}")
                start.once()
    run.result.rows += [Row.of("export", s.subject, s.timed, peak_bytes=s.peak_bytes) for s in starts]


def _help() -> Start:
    return Start("exporter --help", ("exporter", "--help"), lambda out: out.startswith("Usage: "))


def _ready(linked: Export, threads: int) -> Start:
    """Right where it chooses the tokens that sessions in this process do."""
    with Generator(linked, threads=threads) as generator:
        expected = [step.tokens[0] for step in generator.generate([PROMPT], NEW)]
    words = ("engines", "generate", str(linked.folder), "--tokens", ",".join(map(str, PROMPT)), "--max-new-tokens",
             str(NEW), "--threads", str(threads), "--ignore-eos", "--json")
    return Start("linked model ready", words, lambda out: json.loads(out)["tokens"] == expected)
