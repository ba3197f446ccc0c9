"""What bounds a build: a process of its own that can be stopped, the memory it needs, the folder that it alone writes.

TensorRT is native code: it may hang, be killed for memory, or abort. It runs in a child (`python -m engines.bounded`)
that takes one build after another, a JSON line each; when the child dies or overruns, that build fails with a reason
and the next one gets a new child.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from engines import trt
from engines.build_options import BuildOptions
from engines.handed import Places, weight_bytes
from engines.measure import available_memory
from engines.store import Figures
from exporter.console import size
from exporter.errors import CheckError, InputError
from exporter.signature import Profile

# A builder's own memory for each byte of weights, and besides: TensorRT-RTX 1.7.1 took 2.2 to 2.4 and 0.1 GB in builds
# of 262 to 778 MB (the weight file is mapped on top of that, and may be dropped from memory at any time).
BUILDER_COPIES, BUILDER_BYTES = 2.5, 300_000_000
_ERRORS = {"InputError": InputError, "CheckError": CheckError, "BuildError": trt.BuildError}


class Builder:
    """Builds in a child process. A context manager; not for concurrent use.

    `timeout`: seconds that one build may take; None: any time.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._child: subprocess.Popen[bytes] | None = None
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  (__exit__ closes it; what the library prints)

    def build(self, backend: str, path: Path, profiles: Sequence[Profile], options: BuildOptions, handed: Places,
              out: Path) -> Figures:
        """Build one engine into the file `out`.

        Errors are those of `trt.build`; a child that died or overran is a BuildError that names the graph.
        """
        timing = options.timing_cache
        options = replace(options, timing_cache=timing and timing.resolve())  # the child runs in another folder
        job = {"backend": backend, "path": str(path.resolve()), "profiles": list(profiles),
               "options": asdict(options), "out": str(out.resolve()),
               "handed": {name: str(place.resolve()) for name, place in handed.items()}}
        self._words.seek(0)
        self._words.truncate()
        child = self._child = self._child or self._start()
        assert child.stdin is not None
        with suppress(BrokenPipeError):
            child.stdin.write(json.dumps(job, default=str).encode() + b"\n")
            child.stdin.flush()
        reply = self._reply(child, path)
        if "error" in reply:
            raise _ERRORS[reply["error"]](reply["message"])
        return Figures(**reply)

    def _start(self) -> subprocess.Popen[bytes]:
        # a session of its own: an interrupt at the terminal reaches this process alone, which then stops the child
        return subprocess.Popen([sys.executable, "-m", "engines.bounded"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=self._words, start_new_session=True,
                                cwd=Path(__file__).resolve().parent.parent)

    def _reply(self, child: subprocess.Popen[bytes], path: Path) -> dict[str, Any]:
        assert child.stdout is not None
        ready, _, _ = select.select([child.stdout], [], [], self._timeout)
        line = child.stdout.readline() if ready else b""
        if line:
            reply: dict[str, Any] = json.loads(line)
            return reply
        if not ready:
            self.close()
            raise trt.BuildError(f"{path.name}: the builder was not done after {self._timeout:g} s and was stopped; "
                                 "allow more with --timeout")
        status = child.wait()
        self.close()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"
        self._words.seek(0)
        said = self._words.read().decode(errors="replace").strip().splitlines()
        hint = "; that is what a machine out of memory does" if status == -signal.SIGKILL else ""
        raise trt.BuildError(f"{path.name}: the builder's process {how}{hint}{f': {said[-1].strip()}' if said else ''}")

    def close(self) -> None:
        """Stop the child, whatever it does."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()

    def __enter__(self) -> Builder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self.close()
        self._words.close()


def _serve() -> None:
    """The child: builds until its input ends; it dies with its parent."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints to stdout as well
    for line in sys.stdin:
        print(json.dumps(_built(json.loads(line))), file=replies, flush=True)


def _built(job: Mapping[str, Any]) -> dict[str, Any]:
    timing = job["options"]["timing_cache"]
    options = BuildOptions(**{**job["options"], "sm": tuple(job["options"]["sm"]),
                              "timing_cache": Path(timing) if timing else None})
    profiles = [{name: (tuple(low), tuple(opt), tuple(high)) for name, (low, opt, high) in p.items()}
                for p in job["profiles"]]
    handed = {name: Path(place) for name, place in job["handed"].items()}
    try:
        plan = trt.build(job["backend"], Path(job["path"]), profiles, options, handed)
        with Path(job["out"]).open("wb") as file:
            file.write(plan.data)
    except (InputError, CheckError) as error:
        return {"error": type(error).__name__, "message": str(error)}
    except OSError as error:
        return {"error": "InputError", "message": f"{job['out']}: {error.strerror}; free space or choose another place"}
    return asdict(Figures(plan.activation_bytes, list(plan.profile_activation_bytes), plan.weight_bytes,
                          plan.plan_bytes, round(plan.seconds, 3), plan.version))


def require_memory(path: Path) -> None:
    """InputError where a build of this graph would need more memory than is free."""
    weights, free = weight_bytes(path), available_memory()
    needed = int(BUILDER_COPIES * weights) + BUILDER_BYTES
    if needed > free:
        raise InputError(f"{path.name}: TensorRT's builder needs about {size(needed)} of memory ({BUILDER_COPIES:g} x "
                         f"its {size(weights)} of weights, and {size(BUILDER_BYTES)}), {size(free)} are free; free "
                         "memory, build on a larger machine, or export fewer layers (--layers A:B)")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against other builds: InputError where one is at it, naming the lock and its holder.

    The lock is `.NAME.lock` beside the folder, held by flock: it ends with its process, however that ends.
    """
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = _hold(path)
    except OSError as error:
        raise InputError(f"cannot write beside {folder}: {error.strerror}; choose another place") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the lock ends: who opens it later makes a new one
        os.close(handle)
        with suppress(OSError):
            path.parent.rmdir()  # only where nothing was made


def _hold(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another process"
            os.close(handle)
            raise InputError(f"{path}: a build into this folder is at work ({holder}); wait for it, or stop it"
                             ) from None
        except OSError:
            return handle  # a file system without locks
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.truncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {os.uname().nodename} since "
                                 f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
                return handle
        os.close(handle)  # its holder removed it between open and lock


if __name__ == "__main__":
    _serve()
