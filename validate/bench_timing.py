"""How the benchmark times: subjects take turns on pinned cores, while it watches whether those cores were its own."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

Step = Callable[[], np.ndarray]
Progress = Callable[..., None]
BURST = 6
SETTLE_S = 0.05  # a neighbour's threads spin on for some milliseconds
FOREIGN_CORES, WAITED = 0.15, 0.05  # what others may use, or our main thread may wait, before figures are doubted


def quiet(message: str, share: float | None = None) -> None:
    """Progress that nobody sees."""


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


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children, those that are gone and those that live."""
    t = os.times()  # of our own time it knows hundredths only
    return time.process_time() + t.children_user + t.children_system + _living_children_seconds()


def _living_children_seconds() -> float:
    """CPU seconds of the processes that this one started and that still run: a peer may live in one."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # the command's name may hold anything
        except OSError:
            continue  # it ended
        if int(fields[1]) == os.getpid():  # state, parent, ..., utime and stime
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
    """Append to `into` what the machine's cores did while the block ran."""
    start, cpu, machine, waited = time.perf_counter(), cpu_seconds(), _machine_cpu_seconds(), _waited_seconds()
    yield
    wall = max(time.perf_counter() - start, 1e-9)
    used, machine_end, waited_end = cpu_seconds() - cpu, _machine_cpu_seconds(), _waited_seconds()
    foreign = None if machine is None or machine_end is None else max(0.0, machine_end - machine - used) / wall
    share = None if waited is None or waited_end is None else (waited_end - waited) / wall
    into.append(Load(what, threads, os.cpu_count() or 1, wall, used / wall, os.getloadavg()[0], foreign, share))


@contextmanager
def pinned(threads: int) -> Iterator[tuple[int, ...]]:
    """Keep this process, and what it starts, on as many cores as it has threads; the cores. As they were where there
    are fewer. Threads that live already are moved as well."""
    before = os.sched_getaffinity(0)
    cores = set(sorted(before)[:threads])
    _move_all(cores)
    try:
        yield tuple(sorted(cores))
    finally:
        _move_all(before)


def _move_all(cores: set[int]) -> None:
    for thread in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


@dataclass
class Timed:
    """A subject's steps in ms, and the CPU seconds that they took together."""

    ms: list[float] = field(default_factory=list)
    cpu_s: float = 0.0

    @property
    def median(self) -> float:
        """ms."""
        return statistics.median(self.ms)

    @property
    def spread(self) -> float:
        """Half the interquartile range over the median; of fewer than 4 figures, half their range."""
        if len(self.ms) < 4:
            return (max(self.ms) - min(self.ms)) / 2 / self.median
        quartiles = statistics.quantiles(self.ms, n=4)
        return (quartiles[2] - quartiles[0]) / 2 / self.median

    @property
    def cpu_per_wall(self) -> float:
        """CPU seconds per second."""
        return 1e3 * self.cpu_s / sum(self.ms)


def take_turns(steps: Mapping[str, Step], rounds: int, budget_s: float, *, burst: int = BURST,
               settle_s: float = SETTLE_S, between: Callable[[int], None] = lambda number: None, where: str = "",
               progress: Progress = quiet,
               lost: Callable[[str, Exception], bool] = lambda name, error: False) -> dict[str, Timed]:
    """In each round every subject runs untimed for `settle_s` and then `burst` timed steps: decoding is one step after
    another, and a neighbour's spinning threads and cold caches would else be charged to whoever follows. A slow
    subject stops when `budget_s` is spent, after at least 3 timed steps. `between` is called after each round.
    `lost` hears of a subject that failed: True leaves it out, False lets its error through.
    """
    found = {name: Timed() for name in steps}
    for number in range(rounds):
        for name, step in steps.items():
            timed = found.get(name)
            if timed is None or _spent(timed.ms, budget_s):
                continue
            progress(f"{where}round {number + 1} of {rounds}: {name}")
            try:
                _turn(step, timed, burst, settle_s, budget_s)
            except Exception as error:
                if not lost(name, error):
                    raise
                del found[name]
        between(number)
    return found


def _turn(step: Step, timed: Timed, burst: int, settle_s: float, budget_s: float) -> None:
    settled = time.perf_counter() + settle_s
    while time.perf_counter() < settled:
        step()
    began = cpu_seconds()
    for _ in range(burst):
        if _spent(timed.ms, budget_s):
            break
        start = time.perf_counter()
        step()
        timed.ms.append(1e3 * (time.perf_counter() - start))
    timed.cpu_s += cpu_seconds() - began


def _spent(times: Sequence[float], budget_s: float) -> bool:
    return len(times) >= 3 and sum(times) > 1e3 * budget_s
