"""Rungs that need torch alone: device facts, and eager MLA and MHA on the device for parity, memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from engines.roofline import attention_parameters
from exporter import console
from exporter.dtypes import DTYPES
from exporter.presets import preset_config
from validate.eager import FORMS, EagerStep, cache_bytes, weight_numbers
from validate.gpu_device import Device, sheet
from validate.gpu_rungs import NotRunError, Outcome, Report, Rung, Sizes
from validate.metrics import TOLERANCES, Difference, Tolerance, compare, worst_of
from validate.references import AbsorbedMLA, ComposedMHA, ExpandingMLA, Reference, load_tensors
from validate.traces import Trace, TraceMaker, far_position

TORCH_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
LAYERS: dict[str, type[Reference]] = {"absorbed": AbsorbedMLA, "expanding": ExpandingMLA, "mha": ComposedMHA}
TRACES = {"prefill": "a prefill of 37 tokens, batch 2",
          "ragged": "lengths 0, 1, 19, 203: a right-padded prefill of 5 tokens, then 2 decode steps",
          "far": "two sequences past the original context: 3 tokens, then a decode step"}
CACHE_OFF, CACHE_ROUNDING = 0.01, 4096  # share and bytes that an allocator and the positions may add to a cache
DEVICE = "device"


def rungs(sizes: Sizes, device: Device | None, report: Report) -> list[Rung]:
    """Facts, parity, memory, time, in this order."""
    bench = _Bench(sizes, device, report)
    c = preset_config(sizes.preset)
    found = [Rung(DEVICE, "name, capability, memory, versions; bandwidth of a copy", 20, bench.facts)]
    judge = f"against float64 on the CPU, {len(sizes.seeds)} seeds"
    found += [Rung(f"parity/{form}/{dtype}/{trace}", f"{what}; {judge}", 30, partial(bench.parity, form, dtype, trace))
              for trace, what in TRACES.items() for dtype in TOLERANCES for form in LAYERS]
    for dtype in sizes.memory_dtypes:
        found += [Rung(f"memory/{form}/{dtype}/{kind}/{rows}", _words(kind, batch, tokens, rows), 15,
                       partial(bench.memory, form, dtype, batch, tokens, rows))
                  for kind, batch, tokens in (("decode", sizes.batch, 1), ("prefill", 1, sizes.chunk))
                  for rows in sizes.contexts for form in FORMS]
    for dtype in sizes.time_dtypes:
        found += [Rung(f"time/{form}/{dtype}/{rows}", _words("decode", sizes.batch, 1, rows)
                       + f"; {console.size(cache_bytes(c, form, sizes.batch, rows, DTYPES[dtype].itemsize))} of cache",
                       8, partial(bench.time, form, dtype, rows))
                  for rows in sizes.contexts for form in FORMS]
    return found


def _words(kind: str, batch: int, tokens: int, rows: int) -> str:
    if kind == "decode":
        return f"a decode step, batch {batch}, {rows} rows of past"
    return f"a prefill chunk of {tokens} tokens, batch {batch}, {rows} rows of past"


def bandwidth(report: Report) -> tuple[float, str] | None:
    """GB/s that floors are counted with and whose figure it is: the data sheet's, else the measured copy's."""
    stated, measured = report.figure(DEVICE, "sheet_gbs"), report.figure(DEVICE, "copy_gbs")
    return (stated, "data sheet") if stated else (measured, "measured copy") if measured else None


def beside_floor(times: list[float], count: float, report: Report) -> dict[str, Any]:
    """The median and quartiles of a step's milliseconds beside the time that reading `count` bytes takes at least."""
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else times * 3
    figures: dict[str, Any] = {"ms": statistics.median(times), "ms_quartiles": [quartiles[0], quartiles[2]],
                               "steps": len(times), "floor_bytes": count}
    found = bandwidth(report)
    if found:
        floor = count / found[0] / 1e6
        figures |= {"floor_ms": floor, "ratio": figures["ms"] / floor, "bandwidth": found[1]}
    return figures


class _Questions:
    """Inputs rounded to bfloat16, which every dtype holds, and the float64 reference's answers: each asked once."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes, self.seed, self.config = sizes, seed, preset_config(sizes.preset)

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The source's hot weights, float32."""
        return load_tensors({"kind": "preset", "name": self.sizes.preset, "seed": self.seed}, self.config)

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """TRACES, answered."""
        maker = TraceMaker(self.config, self.tensors, max_context=self.sizes.parity_context, dtype="bf16",
                           seed=self.seed, causal=True)
        far = far_position(self.config, self.sizes.parity_context)
        step = ("decode", 1, None)
        return {t.name: t for t in (
            maker.trace("prefill", "prefill", [("prefill", 37, None)], batch=2),
            maker.trace("ragged", "decode", [("prefill", 5, [5, 3, 1, 4]), step, step], batch=4,
                        lengths=[0, 1, 19, 203]),
            maker.trace("far", "decode", [("prefill", 3, None), step], batch=2, lengths=[far, max(1, far - 774)]))}


class _Bench:
    """Does the rungs on one device."""

    def __init__(self, sizes: Sizes, device: Device | None, report: Report) -> None:
        self.sizes, self.report, self.config = sizes, report, preset_config(sizes.preset)
        self._device = device
        self._questions = {seed: _Questions(sizes, seed) for seed in sizes.seeds}
        self._expected: dict[tuple[str, int], np.ndarray] = {}  # of the first form timed, at a dtype and context

    @property
    def device(self) -> Device:
        """The device; a rung never runs without one."""
        assert self._device is not None
        return self._device

    # --- facts --------------------------------------------------------------------------------------------------------

    def facts(self, budget_s: float) -> Outcome:
        """What the device is, and how fast it copies; passes if the copy is equal."""
        found = self.device.facts()
        card = sheet(found["name"])
        gbs, equal = self.device.copy_bandwidth()
        self.device.release()
        stated = {"sheet_gbs": card.bandwidth_gbs, "sheet": card.source} if card else {}
        return Outcome(equal, {**found, "copy_gbs": gbs, **stated}, "" if equal else "a copy differs from its source")

    # --- parity -------------------------------------------------------------------------------------------------------

    def parity(self, form: str, dtype: str, name: str, budget_s: float) -> Outcome:
        """One eager layer on the device against the float64 reference on the CPU.

        rel is one element's: bfloat16 over hot scores has a tail of its own (0.10 to 0.16 over 8 seeds on a CPU). So
        the median of the seeds is held to its tolerance, and masks and cosine of every seed are.
        """
        found: list[Difference] = []
        for questions in self._questions.values():
            layer = LAYERS[form](self.config, questions.tensors, max_context=self.sizes.parity_context,
                                 dtype=TORCH_DTYPES[dtype], device=self.device.torch)
            found.append(worst_of(list(_replay(layer, questions.traces[name]))))
        rels, worst, tolerance = [d.rel for d in found], worst_of(found), TOLERANCES[dtype]
        judged = replace(worst, rel=statistics.median(rels))
        return Outcome(judged.within(tolerance), {
            "rel": judged.rel, "tolerance": tolerance.rel, "one_minus_cosine": 1 - worst.cosine,
            "cosine_tolerance": tolerance.cosine, "worst_rel": worst.rel, "rel_by_seed": rels})

    # --- memory and time ----------------------------------------------------------------------------------------------

    def _load(self, form: str, dtype: str, batch: int, tokens: int, rows: int) -> tuple[EagerStep, torch.Tensor, int]:
        """A loaded layer, its hidden states [B, T, D], and what its cache took, in bytes."""
        width = DTYPES[dtype].itemsize
        cache = cache_bytes(self.config, form, batch, rows + tokens, width)
        need = cache + FORMS[form].peak_bytes(self.config, batch, rows, tokens, width)
        free = self.device.free()
        if need > 0.9 * free:
            raise NotRunError(f"needs {console.size(need)}, the device has {console.size(free)} free")
        name = self.device.torch
        layer = FORMS[form](self.config, self._questions[self.sizes.seeds[0]].tensors, max_context=rows + tokens,
                            dtype=TORCH_DTYPES[dtype], device=name)
        draws = torch.Generator(device=name).manual_seed(self.sizes.seeds[0])

        def draw(*shape: int) -> torch.Tensor:
            """Hot values; the same for every form."""
            return torch.randn(shape, generator=draws, device=name)

        hidden = draw(batch, tokens, self.config.hidden_size).to(TORCH_DTYPES[dtype])
        before = self.device.allocated()
        layer.load(batch, rows, tokens, lambda count: draw(batch, count, self.config.row_dim))
        return layer, hidden, self.device.allocated() - before

    def memory(self, form: str, dtype: str, batch: int, tokens: int, rows: int, budget_s: float) -> Outcome:
        """Peak of one step beside the formula's: passes if the cache is what the formula says and the peak holds at
        least what must be alive together (a meter that sees less does not see the step)."""
        layer, hidden, cache = self._load(form, dtype, batch, tokens, rows)
        layer.step(hidden)  # libraries take their workspaces once
        before = self.device.allocated()
        self.device.reset_peak()
        layer.step(hidden)
        peak = self.device.peak() - before
        width = DTYPES[dtype].itemsize
        formula = FORMS[form].peak_bytes(self.config, batch, rows, tokens, width)
        stated = cache_bytes(self.config, form, batch, rows + tokens, width)
        weights = width * weight_numbers(self.config, form, attention_parameters(self.config))
        del layer
        self.device.release()
        figures = {"step_peak_bytes": peak, "formula_bytes": formula, "ratio": peak / formula, "cache_bytes": cache,
                   "cache_formula_bytes": stated, "weight_bytes": weights, "total_bytes": weights + cache + peak,
                   "batch": batch, "tokens": tokens, "rows": rows}
        wrong = []
        if abs(cache - stated) > CACHE_OFF * stated + CACHE_ROUNDING:
            wrong.append(f"the cache takes {console.size(cache)}, the formula says {console.size(stated)}")
        if peak < formula:
            wrong.append(f"a peak of {console.size(peak)} is less than what must be alive together, "
                         f"{console.size(formula)}")
        return Outcome(not wrong, figures, "; ".join(wrong))

    def time(self, form: str, dtype: str, rows: int, budget_s: float) -> Outcome:
        """A decode step's time beside its floor; passes if its output is the other forms', whatever the time."""
        layer, hidden, _ = self._load(form, dtype, self.sizes.batch, 1, rows)
        found = layer.step(hidden).float().cpu().numpy()
        expected = self._expected.setdefault((dtype, rows), found)
        difference, tolerance = compare(found, expected), _between(TOLERANCES[dtype])
        figures: dict[str, Any] = {"rel": difference.rel, "tolerance": tolerance.rel, "batch": self.sizes.batch,
                                   "rows": rows}
        if not difference.within(tolerance):
            return Outcome(False, figures, "its output differs from the other forms'; not timed")
        times = self.device.time(partial(layer.step, hidden), budget_s / 2)
        width = DTYPES[dtype].itemsize
        count = (width * weight_numbers(self.config, form, attention_parameters(self.config))
                 + cache_bytes(self.config, form, self.sizes.batch, rows, width))
        del layer
        self.device.release()
        return Outcome(True, figures | beside_floor(times, count, self.report))


def _between(tolerance: Tolerance) -> Tolerance:
    """Two results that each may be off by as much."""
    return Tolerance(2 * tolerance.rel, 4 * tolerance.cosine)


def _replay(layer: Reference, trace: Trace) -> Iterator[Difference]:
    """The outputs of real tokens against the answers, step by step, and an absorbed layer's rows at the end."""
    if trace.start_rows is None or trace.start_lengths is None:
        layer.reset(trace.batch)
    else:
        layer.seed_rows(torch.from_numpy(trace.start_rows.astype(np.float32)), trace.start_lengths.tolist())
    for step in trace.steps:
        counts = step.counts.tolist()
        out = layer.forward(torch.from_numpy(step.hidden.astype(np.float32)), counts).double().cpu().numpy()
        yield compare(np.concatenate([out[b, :n] for b, n in enumerate(counts)]),
                      np.concatenate([step.expected[b, :n] for b, n in enumerate(counts)]))
    if isinstance(layer, AbsorbedMLA):
        for b, rows in enumerate(trace.rows):
            yield compare(layer.rows(b).double().cpu().numpy(), rows)
