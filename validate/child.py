"""A command in a process of its own: how long it took, start included, and the most memory that it had.

The kernel counts a process's peak from its fork, when it still shares its parent's memory, so the child of a large
process seems large. Hence a small process stands between: this file, run as a script, which needs the standard library
alone. Memory-mapped files count as far as they were touched.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Done:
    """A command that ended. `peak_bytes` is the largest of its own and of its children's processes."""

    code: int
    seconds: float
    peak_bytes: int
    out: str
    err: str

    @property
    def last_line(self) -> str:
        """The error it ended with, or the last that it said."""
        lines = [line.strip() for line in f"{self.out}\n{self.err}".splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        return (errors or lines or ["killed"])[-1][:200]


def run(words: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Done:
    """Run a command to its end. OSError where it cannot be started."""
    with tempfile.TemporaryDirectory(prefix="mla-child-") as folder:
        told = Path(folder) / "figures.json"
        done = subprocess.run([sys.executable, "-S", "-E", str(Path(__file__)), str(told), *words], cwd=cwd, env=env,
                              capture_output=True, text=True)
        if not told.is_file():
            raise OSError(done.returncode, f"cannot start {words[0]}", words[0])
        figures = json.loads(told.read_text())
    return Done(figures["code"], figures["seconds"], figures["peak_bytes"], done.stdout, done.stderr)


def _main(told: str, words: Sequence[str]) -> None:
    start = time.perf_counter()
    child = subprocess.Popen(words)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    Path(told).write_text(json.dumps({"code": os.waitstatus_to_exitcode(status), "seconds": seconds,
                                      "peak_bytes": 1024 * usage.ru_maxrss}))


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2:])
