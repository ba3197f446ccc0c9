"""A whole model beside what users would pick instead: decode time, cache bytes and export time, in one run.

All subjects get the same checkpoint, tokens, past and number of threads. Logits are compared before anything is timed;
then subjects take turns, since machines drift, and every figure is a median with its spread. While they are timed the
benchmark watches whether the cores were its own, and says so when they were not.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from engines.measure import available_memory
from exporter import __version__
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, arguments
from exporter.manifest import open_export
from validate import mobius_peer
from validate.metrics import compare
from validate.peers import US, AbsentError, ModelShape, Ours, Past, Step, Subject, Transformers, installed
from validate.synthetic import named_config, write_checkpoint

Progress = Callable[..., None]
PEERS = (mobius_peer.NAME, Transformers.name)
PROMPT, FOLLOW = 24, 6  # real tokens of the comparison
EQUAL = 1e-3  # rel between float32 logits
SLOW_PEER_CONTEXT = 8192  # transformers takes seconds a step there
BURST, SETTLE_S = 6, 0.05  # as in validate.bench: a neighbour's threads spin on for some milliseconds
FOREIGN_CORES, WAITED = 0.15, 0.05  # what others may use, or our main thread may wait, before figures are doubted
NAMED = "v3-class"


@dataclass(frozen=True)
class Row:
    """One subject at one context. `ms` is the median of all timed steps, `spread` half the interquartile range over it,
    `min_ms` the best step; `ratio` is its time over that of our default graph in the same run. `rel` is its logits'
    difference there, `cpu` the CPU seconds per wall second."""

    suite: str
    subject: str
    context: int
    batch: int
    ms: float
    min_ms: float
    spread: float
    ratio: float
    outputs_equal: bool
    rel: float
    steps: int
    cpu: float
    cache_bytes_per_token: int


@dataclass(frozen=True)
class ExportRow:
    """Export of the checkpoint, a process each: wall seconds (median, half the range over it), bytes written anew."""

    subject: str
    seconds: float
    spread: float
    runs: int
    bytes_written: int


@dataclass
class Load:
    """What the cores did while something was timed. `foreign` is how many cores' worth of time others had (stolen time
    included), `waited` the share of time our main thread was ready and had no core; None where /proc does not say."""

    what: str
    threads: int
    cores: int
    wall_s: float
    cpu_per_wall: float
    load_average: float
    foreign: float | None
    waited: float | None

    def warning(self) -> str | None:
        """One line if the cores were not ours alone."""
        reasons = []
        if self.threads > self.cores:
            reasons.append(f"{self.threads} threads on {self.cores} cores")
        if self.foreign is not None and self.foreign > self.cores - self.threads + FOREIGN_CORES:
            reasons.append(f"others used {self.foreign:.1f} of {self.cores} cores")
        if self.waited is not None and self.waited > WAITED:
            reasons.append(f"this process waited for a core {100 * self.waited:.0f} % of the time")
        if self.foreign is None and self.load_average > self.cores + 0.5:
            reasons.append(f"{self.load_average:.1f} tasks were ready on {self.cores} cores")
        if not reasons:
            return None
        return (f"contention, {self.what}: {', '.join(reasons)} (load average {self.load_average:.1f}, "
                f"{self.cpu_per_wall:.1f} CPU seconds per second on {self.threads} threads); times are too long and "
                "ratios uncertain: run again on a quiet machine")


@dataclass
class Result:
    """All of one run."""

    checkpoint: str
    threads: int
    rows: list[Row] = field(default_factory=list)
    export: list[ExportRow] = field(default_factory=list)
    load: list[Load] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """Contention, part by part."""
        return [w for w in (load.warning() for load in self.load) if w]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {"suite": "model", **asdict(self), "warnings": self.warnings(), "prompt_tokens": PROMPT,
                "decoded_tokens": FOLLOW}


def _cpu_seconds() -> float:
    t = os.times()  # of our own time it knows hundredths only
    return time.process_time() + t.children_user + t.children_system


def _machine_cpu_seconds() -> float | None:
    """CPU seconds that all processes (and the hypervisor) had since boot."""
    try:
        with open("/proc/stat") as f:
            v = [int(x) for x in f.readline().split()[1:]]
    except (OSError, ValueError):
        return None
    # user nice system idle iowait irq softirq steal; guest time is in user already
    return (sum(v[:3]) + sum(v[5:8])) / os.sysconf("SC_CLK_TCK") if len(v) >= 8 else None


def _waited_seconds() -> float | None:
    """How long the main thread was ready to run and had no core."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


@contextmanager
def watch(what: str, threads: int, into: list[Load]) -> Iterator[None]:
    """Append to `into` what the cores did while the block ran."""
    start, cpu, machine, waited = time.perf_counter(), _cpu_seconds(), _machine_cpu_seconds(), _waited_seconds()
    yield
    wall = max(time.perf_counter() - start, 1e-9)
    used, machine_end, waited_end = _cpu_seconds() - cpu, _machine_cpu_seconds(), _waited_seconds()
    foreign = None if machine is None or machine_end is None else max(0.0, machine_end - machine - used) / wall
    share = None if waited is None or waited_end is None else (waited_end - waited) / wall
    into.append(Load(what, threads, len(os.sched_getaffinity(0)), wall, used / wall, os.getloadavg()[0], foreign,
                     share))


def _interleaved(steps: Mapping[str, Step], rounds: int, budget_s: float, where: str,
                 progress: Progress) -> dict[str, tuple[list[float], float]]:
    """Per subject its timings in ms and the CPU seconds per wall second of them. In a round every subject settles
    untimed and then has a burst; a slow one stops after 3 timed steps and `budget_s`."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    cpu = dict.fromkeys(steps, 0.0)
    for number in range(rounds):
        for name, step in steps.items():
            if _spent(times[name], budget_s):
                continue
            progress(f"{where}round {number + 1} of {rounds}: {name}")
            settled = time.perf_counter() + SETTLE_S
            while time.perf_counter() < settled:
                step()
            began = _cpu_seconds()
            for _ in range(BURST):
                if _spent(times[name], budget_s):
                    break
                start = time.perf_counter()
                step()
                times[name].append(1e3 * (time.perf_counter() - start))
            cpu[name] += _cpu_seconds() - began
    return {name: (values, 1e3 * cpu[name] / sum(values)) for name, values in times.items()}


def _spent(times: Sequence[float], budget_s: float) -> bool:
    return len(times) >= 3 and sum(times) > 1e3 * budget_s


def _difference(found: np.ndarray, expected: np.ndarray) -> tuple[float, bool]:
    """rel of two logits, and whether they choose the same tokens."""
    return compare(found, expected).rel, bool((found.argmax(-1) == expected.argmax(-1)).all())


def _check(answers: dict[str, np.ndarray], ours: Sequence[str], where: str) -> tuple[dict[str, float], dict[str, str]]:
    """Compare all answers with a reference (transformers, else our default graph): rel of each, and why some are out.

    A peer that answers otherwise is left out with the reason; ours answering otherwise is a CheckError.
    """
    reference = Transformers.name if Transformers.name in answers else ours[0]
    rels, out = {}, {}
    for name, answer in answers.items():
        rels[name], same = _difference(answer, answers[reference])
        if rels[name] <= EQUAL and same:
            continue
        why = (f"logits differ from {reference}'s {where}: rel {rels[name]:.1e}"
               + ("" if same else ", other tokens chosen") + "; not timed")
        if name in ours:
            raise CheckError(f"{name}: {why}")
        out[name] = why
    return rels, out


def compare_and_time(subjects: Sequence[Subject], ours: Sequence[str], shape: ModelShape, contexts: Sequence[int], *,
                     batch: int = 1, threads: int = 2, rounds: int = 5, budget_s: float = 10.0, seed: int = 0,
                     progress: Progress = lambda message, share=None: None) -> Result:
    """Rows of all subjects at all contexts. `ours` names our subjects, the default graph first."""
    result, alive = Result("", threads), {s.name: s for s in subjects}
    rng = np.random.default_rng(seed)
    prompt, follow, token = (rng.integers(0, shape.vocabulary, (batch, n)) for n in (PROMPT, FOLLOW, 1))
    progress("comparing on real tokens")
    answers, failed = _answers(alive, ours, lambda s: s.generate(prompt, follow))
    for name, why in (failed | _check(answers, ours, f"on {PROMPT} + {FOLLOW} tokens")[1]).items():
        result.not_run.append(f"{name}: {why}")
        del alive[name]
    for context in contexts:
        progress(f"context {context}: comparing")
        steps, rels = _hold_all(alive, ours, Past.draw(shape, batch, context, seed), token, result.not_run)
        with watch(f"context {context}", threads, result.load):
            timed = _interleaved(steps, rounds, budget_s, f"context {context}, ", progress)
        base = statistics.median(timed[ours[0]][0])
        for name, (values, cpu) in timed.items():
            median, quartiles = statistics.median(values), statistics.quantiles(values, n=4)
            result.rows.append(Row("model", name, context, batch, median, min(values),
                                   (quartiles[2] - quartiles[0]) / 2 / median, median / base, True, rels[name],
                                   len(values), cpu, alive[name].cache_bytes_per_token))
        del steps  # a longer past wants its memory
    return result


def _answers(subjects: Mapping[str, Subject], ours: Sequence[str],
             ask: Callable[[Subject], np.ndarray]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What subjects answer, and why peers did not: one that fails is no failure of the benchmark."""
    answers, failed = {}, {}
    for name, subject in subjects.items():
        try:
            answers[name] = ask(subject).copy()  # some write the next logits over these
        except Exception as error:
            if name in ours:
                raise
            failed[name] = f"failed: {' '.join(str(error).split())[:200]}"
    return answers, failed


def _hold_all(alive: Mapping[str, Subject], ours: Sequence[str], past: Past, token: np.ndarray,
              not_run: list[str]) -> tuple[dict[str, Step], dict[str, float]]:
    """The steps that may be timed behind `past`, compared: each with its rel; the others go to `not_run`."""
    steps: dict[str, Step] = {}
    out: dict[str, str] = {}
    for name, subject in alive.items():
        if refused := _too_much(subject, past):
            if name in ours:
                raise InputError(f"--context {past.length}: {refused}; choose shorter contexts")
            out[name] = refused

    def ask(subject: Subject) -> np.ndarray:
        steps[subject.name] = subject.hold(past, token)
        return steps[subject.name]()

    answers, failed = _answers({n: s for n, s in alive.items() if n not in out}, ours, ask)
    rels, different = _check(answers, ours, f"behind {past.length} rows")
    out |= failed | different
    not_run += [f"{name} at {past.length}: {why}" for name, why in out.items()]
    return {name: step for name, step in steps.items() if name not in out}, rels


def _too_much(subject: Subject, past: Past) -> str | None:
    """Why a subject is not run behind `past`."""
    if subject.name == Transformers.name and past.length > SLOW_PEER_CONTEXT:
        return f"seconds a step, run up to {SLOW_PEER_CONTEXT} only"
    need = subject.working_caches * subject.cache_bytes_per_token * past.batch * past.length
    have = available_memory() - (1 << 30)
    return f"its cache needs {need / 1e9:.1f} GB, {max(0, have) / 1e9:.1f} GB are free" if need > have else None


def _export_ours(request: ExportRequest) -> float:
    """The export as its command makes it; seconds of wall time, its start included."""
    words = [sys.executable, "-m", "exporter", "export", *arguments(request), "--out", str(request.out), "--json"]
    start = time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).resolve().parent.parent)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["killed"])[-1].removeprefix("error: ")
        raise (InputError if done.returncode == 2 else CheckError)(line)
    return time.perf_counter() - start


def _written(folder: Path) -> int:
    """Bytes of files that are this folder's alone; a hard link costs nothing."""
    stats = (p.lstat() for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    return sum(s.st_size for s in stats if s.st_nlink == 1)


@dataclass
class _Exports:
    """The last export of each subject, and how long each took."""

    folders: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def rows(self) -> list[ExportRow]:
        """One row a subject."""
        return [ExportRow(name, (median := statistics.median(s)), (max(s) - min(s)) / 2 / median, len(s),
                          _written(self.folders[name])) for name, s in self.seconds.items() if s]


def _export_all(checkpoint: Path, work: Path, rounds: int, max_context: int, mobius: Path | None,
                progress: Progress) -> _Exports:
    """Export in turns: ours with linked and with copied weights, and mobius where its Python is given."""
    made = _Exports()
    for number in range(rounds):
        for weights in ("link", "copy"):
            name, out = f"{US}, weights {weights}", work / f"ours-{weights}-{number}"
            progress(f"exporting, {number + 1} of {rounds}: {name}")
            options: dict[str, Any] = {"scope": "model", "weights": weights, "max_context": max_context}
            request = ExportRequest(str(checkpoint), out, **options)
            made.seconds.setdefault(name, []).append(_export_ours(request))
            made.folders[name] = out
        if mobius and not made.failed:
            name, out = mobius_peer.NAME, work / f"mobius-{number}"
            progress(f"exporting, {number + 1} of {rounds}: {name}")
            try:
                made.seconds.setdefault(name, []).append(mobius_peer.build(mobius, checkpoint, out))
                made.folders[name] = out
            except AbsentError as why:
                made.failed[name] = str(why)
    return made


def default_checkpoint(folder: Path, progress: Progress = lambda message, share=None: None) -> Path:
    """The v3-class checkpoint in `folder`, written on first use."""
    if not (folder / "config.json").is_file():
        dtype, config = named_config(NAMED)
        write_checkpoint(folder, config, dtype, progress=progress)
    return folder


def bench_models(checkpoint: Path | None = None, contexts: Sequence[int] = (1024, 8192, 32768), *, batch: int = 1,
                 threads: int = 2, rounds: int = 5, export_rounds: int = 2, budget_s: float = 10.0,
                 skip: Sequence[str] = (), peers: Path = mobius_peer.DEFAULT_CACHE,
                 progress: Progress = lambda message, share=None: None) -> Result:
    """Export, compare and time `checkpoint` (default: the v3-class one, made under build/bench).

    `skip` names peers to leave out; `peers` is where their virtual environments are kept.
    """
    if unknown := sorted(set(skip) - set(PEERS)):
        raise InputError(f"--skip {unknown[0]!r}: expected one of {', '.join(PEERS)}")
    folder = (checkpoint or default_checkpoint(Path("build") / "bench" / NAMED, progress)).absolute()
    shape, absent = ModelShape.of(folder), dict.fromkeys(skip, "skipped")
    if (most := max(*contexts, PROMPT + FOLLOW)) >= shape.positions:
        raise InputError(f"{folder.name}: max_position_embeddings is {shape.positions}; a step at {most} rows is "
                         "beyond it, choose shorter contexts")
    python = None
    if mobius_peer.NAME not in absent:
        try:
            python = mobius_peer.install(peers, progress)
        except AbsentError as why:
            absent[mobius_peer.NAME] = str(why)
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None  # hard links need the same file system
    with tempfile.TemporaryDirectory(prefix=".mla-bench-", dir=beside) as temporary:
        load: list[Load] = []
        with watch("export", 1, load):
            made = _export_all(folder, Path(temporary), export_rounds, most, python, progress)
        absent.update(made.failed)
        subjects, ours = _open(folder, shape, made, threads, absent, progress)
        try:
            result = compare_and_time(subjects, ours, shape, contexts, batch=batch, threads=threads, rounds=rounds,
                                      budget_s=budget_s, progress=progress)
        finally:
            for subject in subjects:
                subject.close()
        result.export, result.load = made.rows(), load + result.load
    result.checkpoint = str(checkpoint or NAMED)
    result.not_run = [f"{name}: {why}" for name, why in absent.items()] + result.not_run
    result.versions = _versions(absent)
    return result


def _open(folder: Path, shape: ModelShape, made: _Exports, threads: int, absent: dict[str, str],
          progress: Progress) -> tuple[list[Subject], list[str]]:
    """All subjects, ours first (the default graph before others), and the names of ours."""
    exported = open_export(made.folders[f"{US}, weights link"])
    forms = sorted((g for g in exported.graphs if g.kind == "decode"), key=lambda g: not g.default)
    subjects: list[Subject] = []
    for g in forms:
        progress(f"opening {g.name}")
        subjects.append(Ours(exported, g.formulation, threads, shape))
    ours = [s.name for s in subjects]
    openers: dict[str, Callable[[], Subject]] = {
        mobius_peer.NAME: lambda: mobius_peer.Mobius(folder, made.folders[mobius_peer.NAME] / "model.onnx", threads),
        Transformers.name: lambda: Transformers(folder, threads)}
    for name, opener in openers.items():
        if name not in absent:
            progress(f"opening {name}")
            try:
                subjects.append(opener())
            except AbsentError as why:
                absent[name] = str(why)
            except Exception as error:  # a peer that cannot take this model is no failure of the benchmark
                absent[name] = f"cannot open it: {' '.join(str(error).split())[:200]}"
    return subjects, ours


def _versions(absent: Mapping[str, str]) -> dict[str, str]:
    found = {US: __version__}
    if mobius_peer.NAME not in absent:
        found[mobius_peer.NAME] = mobius_peer.PACKAGE.partition("==")[2]
    found.update({name: v for name in ("onnxruntime", "torch", "transformers", "numpy") if (v := installed(name))})
    return found
