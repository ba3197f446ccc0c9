"""The floor of a step on this CPU: what it must read and multiply, at rates measured in the same run, same threads.

The physics. A decode step of one sequence reads every weight that its token meets and every cached row once, and makes
about one multiply-add with each number that it reads: it is bytes. A prefill chunk of some hundred tokens uses every
weight that many times: it is products. Absorbed MLA lies between the two: a cached row of 576 numbers is read once and
meets all heads, 2 H (2 d_c + rope) operations for 4 (d_c + rope) bytes in float32, so that with 16 heads a row costs 15
operations a byte and with 128 heads 121; beyond what the cores can do per byte, decode over a long past is products
too. Hence the floor is a sum, bytes over bandwidth plus operations over the rate of products; runtimes that overlap
the two perfectly would take the larger of them, so rows hold both parts.

Bytes and operations are counted from shapes (engines.roofline), the same for all subjects of a dtype: the floor is the
step's, not the subject's. Rates are the best of many samples, taken between the subjects' rounds: what the machine can
do. Times are medians, and neighbours take from what it can do, so medians of the samples are kept as well: what it gave
in this run. A working set of which the last-level cache keeps some is read faster than memory, so it is measured as
well: a read of as many bytes, again and again, as decoding does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines import roofline
from engines.measure import available_memory
from exporter.config import MLAConfig
from exporter.decoder_config import DecoderConfig
from exporter.dtypes import DTYPES
from exporter.presets import source_shapes
from exporter.quantise import scheme_for

TOKENS = 512  # rows of a product: a prefill chunk
CACHES = 4  # a read is this many times the last-level cache
LEAST_READ, WINDOW, SAMPLE_S = 1 << 28, 1 << 27, 0.02
PRODUCTS = 3  # a sample


@dataclass(frozen=True)
class Need:
    """What a step must do at least."""

    bytes: float
    flops: float


@dataclass(frozen=True)
class Floor:
    """A step's least time, ms, and its two parts."""

    ms: float
    bytes_ms: float
    flops_ms: float


def model_need(d: DecoderConfig, batch: int, tokens: int, rows: int, dtype: str = "fp32",
               quantise: str | None = None, cache_dtype: str | None = None) -> Need:
    """A step of `batch` sequences, `tokens` new ones each over `rows` of past; logits of the last token only. In the
    form, absorbed or expanded, that multiplies less: they read the same."""
    forms, scheme = [], scheme_for(quantise, "ort") if quantise else None
    row = DTYPES[cache_dtype or dtype].itemsize * d.attention.row_dim
    for form in ("absorbed", "expanded"):
        costs = roofline.step(d, dtype, batch, tokens, rows, form, row, scheme)
        forms.append(Need(sum(c.bytes for c in costs), sum(c.flops for c in costs)))
    return min(forms, key=lambda need: need.flops)


def attention_need(c: MLAConfig, batch: int, tokens: int, rows: int, dtype: str = "fp32") -> Need:
    """The same of one attention alone, absorbed."""
    alone = DecoderConfig(replace(c, num_hidden_layers=1), 1, 1)
    core = next(cost for cost in roofline.step(alone, dtype, batch, tokens, rows) if "cache" in cost.part)
    weights = sum(prod(shape) for shape in source_shapes(c).values())
    return Need(DTYPES[dtype].itemsize * weights + core.bytes, 2 * batch * tokens * weights + core.flops)


@dataclass(frozen=True)
class Rates:
    """What the machine can do: bytes per second that are read from memory, operations per second of float32 products,
    and bytes per second of working sets (by their size) that were read again and again. The best of all samples, and
    their medians."""

    read: float
    read_median: float
    read_bytes: int
    flops: float
    flops_median: float
    product: str
    near: dict[int, float] = field(default_factory=dict)
    near_median: dict[int, float] = field(default_factory=dict)
    samples: int = 0
    cache_bytes: int = 0

    def floor(self, need: Need) -> Floor:
        """The least time of a step; it reads no slower than any larger working set was read."""
        return self.part_floor(need, need.bytes)

    def part_floor(self, need: Need, set_bytes: float) -> Floor:
        """The least time of a part of a step that reads `set_bytes` in all, which sets how fast it reads."""
        read = max(self.read, *(rate for size, rate in self.near.items() if size >= set_bytes), 0.0)
        parts = 1e3 * need.bytes / read, 1e3 * need.flops / self.flops
        return Floor(sum(parts), *parts)

    def at_medians(self) -> Rates:
        """The medians in the place of the best: what the machine gave in this run, to whatever it was shared with."""
        return replace(self, read=self.read_median, flops=self.flops_median, near=self.near_median)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


class Probe:
    """Measures the rates on `threads` threads, a sample at a time. A context manager: from the first sample on it holds
    a buffer of `read_bytes`, a multiple of the last-level cache unless told otherwise."""

    def __init__(self, threads: int, read_bytes: int | None = None) -> None:
        self.cache_bytes = last_level_cache()
        self.read_bytes = read_bytes or max(LEAST_READ, min(CACHES * self.cache_bytes, available_memory() // 4))
        self._pool, self._threads = ThreadPoolExecutor(threads), threads
        self._products: dict[str, tuple[float, Callable[[], object]]] = {}
        self._reads, self._samples = list[float](), 0
        self._near: dict[int, float] = {}
        self._near_medians: dict[int, list[float]] = {}  # one a sample
        self._now: list[int] = []
        self._flops: dict[str, list[float]] = {}
        self._turn = 0

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self.__dict__.pop("_buffer", None)

    @cached_property
    def _buffer(self) -> np.ndarray:
        return np.ones(self.read_bytes // 4, np.float32)

    def working_sets(self, needs: Iterable[Need]) -> None:
        """From now on also measure reads of as many bytes, of those that are no more than the buffer has."""
        sizes = {int(need.bytes) // 4 * 4 for need in needs}
        self._now = [size for size in sorted(sizes) if 0 < size <= self.read_bytes]

    def products(self, c: MLAConfig, intermediate: int | None = None) -> None:
        """Measure products as large as these weights make them: the attention's output, and an FFN's."""
        for columns in (c.num_attention_heads * c.v_head_dim, intermediate):
            if columns:
                self._products |= _products(columns, c.hidden_size, self._threads)

    def sample(self) -> None:
        """One read of memory, one of each working set of now, and the next of the products."""
        self._samples += 1
        self._reads += self._memory()
        for size in self._now:
            best, median = self._again(self._buffer[:size // 4])
            self._near[size] = max(self._near.get(size, 0.0), best)
            self._near_medians.setdefault(size, []).append(median)
        if not self._products:
            return
        name = list(self._products)[self._turn % len(self._products)]
        self._turn += 1
        operations, run = self._products[name]
        run()
        self._flops.setdefault(name, []).extend(operations / _seconds(run) for _ in range(PRODUCTS))

    def rates(self) -> Rates | None:
        """The best and the median of all samples; those of products that had no turn yet are taken now. None where no
        product was named: nothing that was timed multiplies."""
        if not self._products:
            return None
        while not self._reads or len(self._flops) < len(self._products):
            self.sample()
        product = max(self._flops, key=lambda name: max(self._flops[name]))
        best = self._flops[product]
        return Rates(max(self._reads), statistics.median(self._reads), self._buffer.nbytes, max(best),
                     statistics.median(best), product, dict(self._near),
                     {size: statistics.median(found) for size, found in self._near_medians.items()},
                     self._samples, self.cache_bytes)

    def _memory(self) -> list[float]:
        """Bytes per second of each window of the buffer, by the reduction that was quickest over all of it: a window is
        read when the others have driven it out of the cache, and is short enough to find a quiet moment."""
        step = min(WINDOW, self._buffer.nbytes) // 4
        windows = [self._buffer[i:i + step] for i in range(0, len(self._buffer) - step + 1, step)]
        readers = [self._readers(window) for window in windows]
        passes = [[window.nbytes / _seconds(read) for window, read in zip(windows, one, strict=True)]
                  for one in zip(*readers, strict=True)]
        return max(passes, key=statistics.median)

    def _again(self, part: np.ndarray) -> tuple[float, float]:
        """Bytes per second of a set that is read again and again, for SAMPLE_S a reduction: the best of all, and the
        median of the quickest reduction."""
        passes: list[list[float]] = []
        for read in self._readers(part):
            read()  # that it lies where a step before would have left it
            begin, found = time.perf_counter(), list[float]()
            while not found or time.perf_counter() - begin < SAMPLE_S:
                found.append(part.nbytes / _seconds(read))
            passes.append(found)
        return max(map(max, passes)), max(map(statistics.median, passes))

    def _readers(self, part: np.ndarray) -> tuple[Callable[[], object], ...]:
        """Reductions that read all of an array, a piece a thread; which is quickest depends on the processor."""
        pieces, whole = np.array_split(part, self._threads), torch.from_numpy(part)
        torch.set_num_threads(self._threads)
        return (lambda: list(self._pool.map(np.max, pieces)), lambda: list(self._pool.map(_sum_of_words, pieces)),
                whole.sum)


def _sum_of_words(part: np.ndarray) -> object:
    """As integers, whose sum needs no order and so waits for nothing but memory."""
    return part[:len(part) // 2 * 2].view(np.int64).sum()


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _products(columns: int, rows: int, threads: int) -> dict[str, tuple[float, Callable[[], object]]]:
    """[TOKENS, columns] x [columns, rows] in float32: operations, and how each library does it."""
    import onnx
    import onnxruntime as ort

    rng = np.random.default_rng(0)
    x = rng.standard_normal((TOKENS, columns), np.float32)
    w = rng.standard_normal((columns, rows), np.float32)
    sides = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [TOKENS, n])
             for name, n in (("x", columns), ("y", rows))]
    graph = onnx.helper.make_graph([onnx.helper.make_node("MatMul", ["x", "w"], ["y"])], "product", sides[:1],
                                   sides[1:], [onnx.numpy_helper.from_array(w, "w")])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
    settings = ort.SessionOptions()
    settings.log_severity_level, settings.intra_op_num_threads = 3, threads
    session: Any = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
    eager, weight = torch.from_numpy(x), torch.from_numpy(np.ascontiguousarray(w.T)).T  # as nn.Linear stores it

    def in_torch() -> object:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            return eager @ weight

    name, operations = f"[{TOKENS}, {columns}] x [{columns}, {rows}]", 2.0 * TOKENS * columns * rows
    return {f"{name}, ONNX Runtime": (operations, lambda: session.run(None, {"x": x})),
            f"{name}, torch": (operations, in_torch)}


def last_level_cache() -> int:
    """Bytes of the largest cache of a core; 32 MiB where the system does not say."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[text[-1]])
    return max(sizes, default=32 << 20)
