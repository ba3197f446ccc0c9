"""Ranks as processes: started here or by torchrun, joined by torch.distributed (gloo on CPUs, NCCL on GPUs), ended
together.

A rank that fails, dies or falls silent ends the run with one message: the others' collectives stop waiting after
`timeout` seconds, and whoever started the processes ends those that are left.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from engines.parallel import Collective, RankSession, greedy, opener
from engines.session import Session
from exporter.errors import CheckError, InputError
from exporter.tensor_parallel import Ranks, open_rank, open_ranks


@dataclass(frozen=True)
class ParallelRequest:
    """What `python -m engines parallel` was asked for; see its --help. `timeout` in seconds, of one collective."""

    folder: Path
    tokens: tuple[int, ...]
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    backend: str = "ort"
    threads: int = 1
    chunk: int = 512
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 1e6:
            raise InputError(f"--timeout {self.timeout:g}: expected seconds, more than 0")
        opener(self.backend, self.threads)


class _LostError(CheckError):
    """A rank waited for the others in vain: somebody else's fault."""


class ProcessGroup(Collective):
    """torch.distributed's default group. Values go through the GPU where the group is NCCL's."""

    def __init__(self, rank: int, ranks: int, device: str, timeout: float) -> None:
        self.rank, self.ranks, self.device, self.timeout = rank, ranks, device, timeout

    def _tensor(self, values: np.ndarray) -> Any:
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).clone().to(self.device)

    def _together(self, what: Any, *arguments: Any) -> None:
        try:
            what(*arguments)
        except RuntimeError as error:
            first = (str(error).splitlines() or [""])[0]
            raise _LostError(f"rank {self.rank}: the other ranks ended, or did not answer within {self.timeout:g} s "
                        f"({first[:120]})") from None

    def sum(self, values: np.ndarray) -> np.ndarray:
        import torch.distributed as dist

        tensor = self._tensor(values)
        self._together(dist.all_reduce, tensor)
        summed: np.ndarray = tensor.cpu().numpy()
        return summed

    def gather(self, values: np.ndarray) -> np.ndarray:
        import torch
        import torch.distributed as dist

        mine = self._tensor(values)
        parts = [torch.empty_like(mine) for _ in range(self.ranks)]
        self._together(dist.all_gather, parts, mine)
        gathered: np.ndarray = torch.cat(parts, dim=-1).cpu().numpy()
        return gathered


def run_rank(request: ParallelRequest, rank: int, ranks: int, local_rank: int, rendezvous: str) -> dict[str, Any]:
    """Be one rank: join the others at `rendezvous`, generate with them; every rank finds the same tokens."""
    import torch
    import torch.distributed as dist

    cuda = request.backend == "ort-cuda"
    if cuda:  # before CUDA starts: a rank sees its own device alone
        os.environ["CUDA_VISIBLE_DEVICES"] = str(local_rank)
    torch.set_num_threads(1)
    made = open_rank(request.folder, rank)
    joined = "nccl" if cuda else "gloo"
    with ExitStack() as stack:
        group = ProcessGroup(rank, ranks, "cuda" if cuda else "cpu", request.timeout)
        open_segment = opener(request.backend, request.threads)
        prefill = stack.enter_context(RankSession(made, "prefill", open_segment, group))
        kinds = {g.kind: g.formulation for g in made.graphs}
        # the same formulation: one set of segments does both, and the weights are in memory once
        decode = prefill if kinds["prefill"] == kinds["decode"] else (
            stack.enter_context(RankSession(made, "decode", open_segment, group)))
        group._together(lambda: dist.init_process_group(joined, init_method=rendezvous, rank=rank, world_size=ranks,
                                                        timeout=timedelta(seconds=request.timeout)))
        stack.callback(dist.destroy_process_group)
        return {"collective": joined} | _generated(request, prefill, decode, group)


def _generated(request: ParallelRequest, prefill: Session, decode: Session, group: ProcessGroup) -> dict[str, Any]:
    stamps = [time.perf_counter()]
    tokens = greedy(prefill, decode, request.tokens, request.max_new_tokens, request.stop, request.chunk,
                    lambda: stamps.append(time.perf_counter()))
    steps = np.diff(stamps)
    chunks = -(-len(request.tokens) // request.chunk)
    rest = steps[chunks:].tolist()
    return {"tokens": tokens, "steps": len(steps), "all_reduces": group.sums, "all_reduce_bytes": group.summed_bytes,
            "seconds_to_first_token": float(steps[:chunks].sum()),
            "tokens_per_second": 1 / statistics.median(rest) if rest else None}


def under_torchrun() -> bool:
    """Whether somebody started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_from_environment(request: ParallelRequest) -> tuple[int, dict[str, Any]]:
    """Be the rank that torchrun's environment says; its number, and what was found."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ranks = int(open_rank(request.folder, 0).data["tensor_parallel"]["ranks"])
    if world != ranks:
        raise InputError(f"{request.folder}: an export of {ranks} ranks, started as {world}; start it with: torchrun "
                         f"--nproc-per-node {ranks} -m engines parallel {request.folder} ...")
    local = int(os.environ.get("LOCAL_RANK", rank))
    return rank, run_rank(request, rank, world, local, "env://")


def run(request: ParallelRequest, progress: Callable[..., None] = lambda message, share=None: None) -> dict[str, Any]:
    """Start a process for each rank on this machine and wait for all; what they found. InputError and CheckError are
    those of the rank that failed first; nothing is left running."""
    made = open_ranks(request.folder)
    ranks, spawn = len(made.ranks), multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="mla-ranks-") as place:
        processes = [spawn.Process(target=_child, args=(rank, request, ranks, place), daemon=True)
                     for rank in range(ranks)]
        try:
            progress(f"{ranks} ranks")
            with _no_interrupts():
                for process in processes:
                    process.start()
            codes = _ended(processes)
            if any(codes):
                raise _failure(Path(place), codes)
        finally:
            for process in processes:
                if process.is_alive():  # its collective would wait for one that is gone
                    process.kill()
                if process.pid:
                    process.join()
        found: list[dict[str, Any]] = [json.loads((Path(place) / f"found-{r}").read_text()) for r in range(ranks)]
    if any(f["tokens"] != found[0]["tokens"] for f in found):
        raise CheckError(f"the ranks found different tokens: {[f['tokens'] for f in found]}")
    return _described(request, made, found[0])


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes that start in here leave Ctrl-C to the one that started them, who ends them: they inherit the mask. One
    that comes meanwhile waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(processes: Sequence[BaseProcess]) -> list[int | None]:
    """Exit codes when all processes have ended, or one has failed (None: still running)."""
    while True:
        codes = [p.exitcode for p in processes]
        if any(codes) or None not in codes:
            return codes
        connection.wait([p.sentinel for p, code in zip(processes, codes, strict=True) if code is None])


def _described(request: ParallelRequest, made: Ranks, found: dict[str, Any]) -> dict[str, Any]:
    figures = made.data["tensor_parallel"]
    return {"folder": str(request.folder), "ranks": figures["ranks"], "backend": request.backend, **found,
            "bytes": figures["bytes"], "whole_bytes": figures["whole_bytes"],
            "all_reduces_per_step": figures["all_reduces"],
            "all_reduce_bytes_per_token": figures["all_reduce_bytes_per_token"]}


def _child(rank: int, request: ParallelRequest, ranks: int, place: str) -> None:
    """A rank's process: what it found, or why it could not, goes into a file of its own."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this machine
    try:
        found = run_rank(request, rank, ranks, rank, f"file://{place}/rendezvous")
        (Path(place) / f"found-{rank}").write_text(json.dumps(found))
    except Exception as error:
        known = isinstance(error, InputError | CheckError)
        text = str(error) if known else f"rank {rank}: {type(error).__name__}: {error}"
        (Path(place) / f"error-{rank}").write_text(json.dumps(
            {"text": text, "lost": isinstance(error, _LostError), "input": isinstance(error, InputError)}))
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None


def _failure(place: Path, codes: list[int | None]) -> Exception:
    """Why a run failed, `codes` being the exit codes when that was seen: what a rank said of itself, else how it ended,
    else that others waited for it."""
    told = [json.loads(p.read_text()) for p in sorted(place.glob("error-*"), key=lambda p: p.stat().st_mtime_ns)]
    for error in (e for e in told if not e["lost"]):
        return (InputError if error["input"] else CheckError)(error["text"])
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            return CheckError(f"rank {rank} was ended by {signal.Signals(-code).name}; the other ranks were stopped")
    return CheckError(told[0]["text"] if told else f"the ranks ended with {codes}")
