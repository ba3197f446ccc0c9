"""Folders that appear whole or not at all: written beside, synced, renamed; leftovers of a killed run are removed.

A partial folder is `.NAME.partial-XXXX` next to its target and is held by an flock while its writer lives, so the next
run can tell a dead leftover from a neighbour at work. Looking around and renaming happen one run at a time.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from exporter.errors import InputError

_PATIENCE = 10.0  # seconds to wait for a neighbour's turn, which takes milliseconds


def _lock(folder: Path, patience: float = 0.0) -> int | None:
    """An exclusive lock on a directory, or None if another process holds it for `patience` seconds, or if there is no
    such directory or no locking on its file system."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return None
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError as error:
            if not isinstance(error, BlockingIOError) or time.monotonic() >= end:
                os.close(handle)
                return None
            time.sleep(0.01)


@contextmanager
def _turn(parent: Path) -> Iterator[None]:
    """Among the runs that write into `parent`, one at a time looks at its folders and renames them."""
    handle = _lock(parent, _PATIENCE)
    try:
        yield  # without the lock if there is none to be had
    finally:
        if handle is not None:
            os.close(handle)


def remove_stale(target: Path) -> None:
    """Delete partial and replaced folders of `target` whose writer is gone."""
    for leftover in target.parent.glob(f".{glob.escape(target.name)}.partial-*"):
        handle = _lock(leftover)
        if handle is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(handle)


def _sync(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink() and (path.is_dir() or path.stat().st_nlink == 1):  # linked files were there before
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)


def write_file(target: Path, data: bytes | memoryview) -> None:
    """Replace or make one file at once: written beside, synced, renamed. OSError where that cannot be done."""
    handle, beside = tempfile.mkstemp(prefix=f".{target.name}.partial-", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, target)
    except BaseException:
        os.unlink(beside)
        raise


def _check_target(target: Path, overwrite: bool, marker: str) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError(f"{target} exists and is not a folder; choose another place")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise InputError(f"{target} is not empty; choose another place, or pass --overwrite to replace it")
        if not (target / marker).is_file():
            raise InputError(f"{target} holds no {marker}, so it was not made by this tool and --overwrite will not "
                             "delete it; choose another place")


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False, marker: str = "manifest.json") -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends well, and vanishes when it does not.

    `overwrite` replaces a folder only if it holds `marker`. A full or read-only disk becomes an InputError.
    """
    target = Path(os.path.abspath(target))
    made: list[Path] = []
    try:
        for parent in reversed([p for p in target.parents if not p.exists()]):
            parent.mkdir(exist_ok=True)
            made.append(parent)
        with _turn(target.parent):
            _check_target(target, overwrite, marker)
            remove_stale(target)
            partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
            handle = _lock(partial)
    except OSError as error:
        _remove_empty(made)
        raise InputError(f"cannot write beside {target}: {error.strerror}; choose another place") from None
    try:
        partial.chmod(0o777 & ~_umask())
        yield partial
        _sync(partial)
        with _turn(target.parent):
            _check_target(target, overwrite, marker)  # again: another run may have filled it meanwhile
            _replace(partial, target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}; free space or choose another place"
                         ) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if handle is not None:
            os.close(handle)
        if not target.exists():
            _remove_empty(made)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove_empty(folders: list[Path]) -> None:
    for folder in reversed(folders):
        with suppress(OSError):
            folder.rmdir()


def _replace(partial: Path, target: Path) -> None:
    if target.is_dir() and any(target.iterdir()):
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
        try:
            target.rename(old)  # over the empty folder just made
            partial.rename(target)
        except BaseException:
            if not target.exists():
                old.rename(target)  # back
            raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(target)
    handle = os.open(target.parent, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)
