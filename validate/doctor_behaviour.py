"""What a graph does with the batches that break servers: stale rows, rows of others, empty sequences, padding, ragged
lengths, chunks.

No reference is needed: each probe holds the graph against itself, asked otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_patient import Call, CannotRunError, Patient
from validate.metrics import BETWEEN_RUNS, Difference, Tolerance, compare
from validate.quantised_weights import ROUNDED_ACTIVATIONS

STALE = 1e4
ROWS, NEW = 6, 4  # rows of past of the longest sequence, and new tokens
TOLERANCE = {"float32": BETWEEN_RUNS, "float64": BETWEEN_RUNS, "float16": Tolerance(2e-2, 1e-4)}


def examine(patient: Patient, report: Report, seed: int) -> None:
    """Every probe that the graph's inputs allow; what they do not allow is said."""
    name = patient.path.name
    for title, probe in PROBES:
        why = _not_askable(patient, title)
        if why:
            report.skip(f"{name}: {title}", why)
            continue
        try:
            report.add(replace(f, where=name) for f in probe(patient, np.random.default_rng([seed, 13])))
            report.see(f"{name}: {title}")
        except (CannotRunError, ValueError, IndexError, KeyError) as error:  # a graph whose outputs are not as thought
            report.skip(f"{name}: {title}", str(error) or type(error).__name__)


def _not_askable(patient: Patient, title: str) -> str | None:
    """Why a probe cannot be made with these inputs."""
    batches = ("stale rows", "rows it does not own", "a ragged batch")
    if title in (*batches, "empty and padded sequences") and not patient.has_lengths:
        return "no input says how many rows are valid, so all are"
    if title in batches and patient.fixed_batch is not None:
        return f"the batch is fixed at {patient.fixed_batch}"
    if patient.fixed_tokens is not None:
        return f"new tokens are fixed at {patient.fixed_tokens}"
    if patient.fixed_rows is not None and patient.fixed_rows < ROWS + NEW:
        return f"{patient.fixed_rows} rows of cache are too few"
    return None


def _past(patient: Patient, rng: np.random.Generator, batch: int, valid: int, tail: float = 0.0,
          lengths: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Caches of random rows, of which those from each sequence's length on hold `tail`."""
    rows = patient.rows_for(valid)
    pasts = patient.empty(batch, rows)
    for cache in patient.roles.caches:
        drawn = rng.standard_normal(pasts[cache.name].shape)
        at = np.arange(rows).reshape([-1 if i == cache.axis else 1 for i in range(drawn.ndim)])
        ends = np.full(batch, valid) if lengths is None else lengths
        keep = at < ends.reshape([-1] + [1] * (drawn.ndim - 1))
        pasts[cache.name] = np.where(keep, drawn, tail).astype(pasts[cache.name].dtype)
    return pasts


def _tokens_of(patient: Patient, found: dict[str, np.ndarray]) -> np.ndarray:
    return found[patient.main_output()]


def _tolerance(found: np.ndarray, patient: Patient) -> Tolerance:
    if patient.rounds_activations:
        return ROUNDED_ACTIVATIONS
    cache = patient.empty(1, 1)[patient.roles.caches[0].name].dtype.name
    return TOLERANCE.get(cache if cache in TOLERANCE else found.dtype.name, TOLERANCE["float16"])


def _stale(patient: Patient, rng: np.random.Generator) -> Iterator[Finding]:
    """The same batch over tails of zeros and of STALE."""
    lengths, tokens = np.array([2, ROWS - 1]), patient.draw(rng, 2, NEW)
    state = rng.bit_generator.state
    found = []
    for tail in (0.0, STALE):
        rng.bit_generator.state = state
        call = Call(tokens, _past(patient, rng, 2, ROWS, tail, lengths), lengths)
        found.append(_tokens_of(patient, patient.run(call)))
    if found[0].tobytes() != found[1].tobytes():
        difference = compare(found[1], found[0])
        if not difference.within(_tolerance(found[0], patient)):
            yield AILMENTS["stale-rows"].found(
                f"rows beyond the lengths {lengths.tolist()} hold {STALE:.0e} in place of 0: {patient.main_output()} "
                f"{_moved(difference)}")


def _untouched(patient: Patient, rng: np.random.Generator) -> Iterator[Finding]:
    """Rows of the cache that comes out, other than those of the new tokens, bit for bit as they went in."""
    lengths, new = np.array([2, ROWS - 1]), 2
    pasts = _past(patient, rng, 2, ROWS, STALE, lengths)
    call = Call(patient.draw(rng, 2, new), pasts, lengths)
    found = patient.run(call)
    matches = patient.written(call, found)
    for cache in patient.roles.caches:
        old = np.moveaxis(pasts[cache.name], cache.axis, 1)
        name, rows = matches.get(cache.name, ""), np.arange(old.shape[1])
        if not name or found[name].shape[cache.axis] == new:  # new rows alone: nothing else was written
            continue
        now = np.moveaxis(found[name], cache.axis, 1)[:, :len(rows)]
        written = (rows >= lengths[:, None]) & (rows < lengths[:, None] + new)
        kept = ~written if patient.fixed_rows is not None else np.ones_like(written)
        changed = (now != old).reshape(*kept.shape, -1).any(axis=-1) & kept
        if changed.any():
            b, row = (int(i) for i in np.argwhere(changed)[0])
            yield AILMENTS["scatter-one-too-many"].found(
                f"{new} new tokens behind {lengths[b]} rows: row {row} of sequence {b} of {name} changed, "
                f"{int(changed.sum())} such rows in all")
            return


def _empty(patient: Patient, rng: np.random.Generator) -> Iterator[Finding]:
    """A sequence without past beside another; with a mask, padding at its front as well."""
    batch = patient.fixed_batch or 2
    lengths = np.array([0, ROWS][:batch] if batch <= 2 else [0] * batch)
    tokens = patient.draw(rng, batch, NEW)
    for padding in (0, 2) if patient.has_mask else (0,):
        call = Call(tokens, _past(patient, rng, batch, int(lengths.max()), 0.0, lengths), lengths, padding)
        found = patient.run(call)
        bad = {n: int((~np.isfinite(v)).sum()) for n, v in found.items() if v.dtype.kind == "f"}
        worst = max(bad, key=lambda n: bad[n], default="")
        if worst and bad[worst]:
            what = f"{padding} padded tokens in front" if padding else f"lengths {lengths.tolist()}"
            yield AILMENTS["empty-row-nan"].found(
                f"{what}: {bad[worst]} of {found[worst].size} numbers of {worst} are not finite")
            return


def _ragged(patient: Patient, rng: np.random.Generator) -> Iterator[Finding]:
    """Each sequence of a ragged batch against itself alone."""
    lengths, tokens = np.array([0, 3, ROWS]), patient.draw(rng, 3, NEW)
    pasts = _past(patient, rng, 3, ROWS, 0.0, lengths)
    together = _tokens_of(patient, patient.run(Call(tokens, pasts, lengths)))
    for b, length in enumerate(lengths):
        own = {c.name: np.take(pasts[c.name][b:b + 1], range(patient.rows_for(int(length))), c.axis)
               for c in patient.roles.caches}
        alone = _tokens_of(patient, patient.run(Call(tokens[b:b + 1], own, lengths[b:b + 1])))
        difference = compare(together[b:b + 1], alone)
        if not difference.within(_tolerance(alone, patient)):
            yield AILMENTS["ragged-differs"].found(
                f"sequence {b} of lengths {lengths.tolist()}: {patient.main_output()} {_moved(difference)} from what "
                "it is alone")
            return


def _chunked(patient: Patient, rng: np.random.Generator) -> Iterator[Finding]:
    """NEW + 2 tokens whole, and in two steps."""
    tokens, none = patient.draw(rng, 1, NEW + 2), np.array([0])
    whole = _tokens_of(patient, patient.run(Call(tokens, patient.empty(1, patient.rows_for(0)), none)))
    first = Call(tokens[:, :NEW], patient.empty(1, patient.rows_for(0)), none)
    pasts = patient.after(first, patient.run(first))
    second = _tokens_of(patient, patient.run(Call(tokens[:, NEW:], pasts, np.array([NEW]))))
    last, wanted = (second[:, -1], whole[:, -1]) if whole.ndim == 3 else (second, whole)
    difference = compare(last, wanted)
    if not difference.within(_tolerance(whole, patient)):
        yield AILMENTS["chunk-differs"].found(
            f"{NEW + 2} tokens as {NEW} + 2: the last token's {patient.main_output()} {_moved(difference)} from what "
            "it is in one piece")


def _moved(difference: Difference) -> str:
    if not difference.same_masks:
        return "has other NaN or infinite numbers, and differs"
    return f"moves by rel {difference.rel:.1e}"


PROBES = (("stale rows", _stale), ("rows it does not own", _untouched), ("empty and padded sequences", _empty),
          ("a ragged batch", _ragged), ("prefill in chunks", _chunked))
