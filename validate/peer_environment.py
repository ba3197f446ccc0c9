"""A virtual environment of a peer's own, made on first use and kept: what a peer needs never meets what we need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from validate.peers import AbsentError

DEFAULT_CACHE = Path("build") / "peers"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.lower().startswith("error")]
    return (errors or lines or ["no message"])[-1][:200]


def variables(**more: str) -> dict[str, str]:
    """What a peer's processes find in their environment: ours without our imports, and no hub."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"} | more


def _call(words: Sequence[str], what: str, **more: str) -> None:
    """Run a command quietly; AbsentError with its last words if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, env=variables(**more))
    except OSError as error:
        raise AbsentError(f"{what}: {error.strerror}") from None
    if done.returncode:
        how = f"ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
        raise AbsentError(f"{what} {how}: {_last_line(done.stderr) or _last_line(done.stdout)}")


def install(peer: str, folder: Path, pins: Sequence[str], progress: Callable[..., None],
            **building: str) -> Path:
    """The Python of `folder`, an environment with `pins` installed in their order; made if it is not there or holds
    others. `building` are variables for what pip builds. AbsentError if that cannot be done here."""
    folder = folder.absolute()
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.is_file() and stamp.read_text().split() == list(pins):
        return python
    try:
        shutil.rmtree(folder, ignore_errors=True)  # half made, or of other pins
        folder.parent.mkdir(parents=True, exist_ok=True)
        progress(f"{peer}: a virtual environment in {folder}")
        _call([sys.executable, "-m", "venv", str(folder)], "making a virtual environment")
        for pin in pins:
            progress(f"{peer}: pip install {pin}")
            _call([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", pin],
                  f"pip install {pin}", **building)
        stamp.write_text("\n".join(pins))
    except OSError as error:
        raise AbsentError(f"cannot write {folder}: {error.strerror}") from None
    return python
