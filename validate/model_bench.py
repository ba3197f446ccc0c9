"""The suite model: a decode step of a whole model beside what users would pick instead, over contexts and batches.

All subjects get the same checkpoint, tokens, past and number of threads. Logits are compared before anything is timed;
then subjects take turns, since machines drift, and every figure is a median with its spread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from exporter.decoder_config import DecoderConfig
from exporter.errors import CheckError, InputError
from validate.bench_rows import DEFAULT, Row, Run
from validate.bench_subjects import (
    PLAIN,
    Compared,
    Workplace,
    ask,
    compare_on_tokens,
    judge,
    open_ours,
    opened,
    too_much,
)
from validate.bench_timing import Step, take_turns, watch
from validate.floor import Need, model_need
from validate.metrics import compare
from validate.peers import EQUAL, ModelShape, Ours, Past, Subject, Transformers

SPARE = 1.25  # of a cache's memory, while it is made of the past
SLOW_PEER_ROWS = 8192  # of all sequences together; transformers takes seconds a step there
RAGGED = 1024, (-4, -3, -2, -1, 1, 2, 3, 4)  # rows of a ragged batch on average, and each sequence's eighths from it


def bench_models(run: Run, place: Workplace, contexts: Sequence[int], batches: Sequence[int] = (1,),
                 ragged: bool = True) -> None:
    """Compare and time all subjects at all batches and contexts; then a ragged batch of ours."""
    openers = []
    for variant in place.decoding():
        made = place.ours(variant)
        forms = sorted((g for g in made.graphs if g.kind == "decode"), key=lambda g: not g.default)
        openers += [partial(open_ours, place, made, graph, variant)
                    for graph in (forms if variant is PLAIN else forms[:1])]
    with opened(place, openers) as subjects:
        compare_and_time(run, subjects, [s.name for s in subjects if isinstance(s, Ours)], place.shape,
                         place.decoder, contexts, batches)
        rows, eighths = RAGGED
        lengths = [rows + rows // 8 * e for e in eighths]
        for subject in subjects if ragged and max(lengths) <= place.max_context else ():
            if isinstance(subject, Ours) and subject.default and not subject.quantise:
                time_ragged(run, subject, place.decoder, lengths)


def compare_and_time(run: Run, subjects: Sequence[Subject], ours: Sequence[str], shape: ModelShape,
                     decoder: DecoderConfig, contexts: Sequence[int], batches: Sequence[int] = (1,)) -> None:
    """Rows of all subjects at all contexts. `ours` names our subjects, the default graph first."""
    run.probe.products(decoder.attention, decoder.intermediate_size)
    run.progress("comparing on real tokens")
    on_tokens = compare_on_tokens(subjects, ours, shape, run.result.not_run)
    alive = {s.name: s for s in subjects if s.name in on_tokens}
    exact = [name for name in ours if name.endswith(DEFAULT) and alive[name].tolerance <= EQUAL]
    two = {name: alive[name] for name in (exact if len(exact) > 1 else ours[:2])}  # they hold each other to account
    for batch in batches:
        more = between(contexts) if batch == 1 and len(two) > 1 else []
        for context in sorted([*contexts, *more]):
            who = two if context in more else alive
            _case(run, who, [n for n in ours if n in who], decoder, Past.draw(shape, batch, context))


def between(contexts: Sequence[int]) -> list[int]:
    """Powers of two between the contexts, which a straight line is fitted through as well."""
    found = (1 << n for n in range(min(contexts).bit_length(), max(contexts).bit_length()))
    return [c for c in found if min(contexts) < c < max(contexts) and c not in contexts]


def _case(run: Run, alive: Mapping[str, Subject], ours: Sequence[str], decoder: DecoderConfig, past: Past) -> None:
    """Everyone behind one past."""
    where, result = f"batch {past.batch}, context {past.length}", run.result
    run.progress(f"{where}: comparing")
    token = np.random.default_rng(past.length).integers(0, past.shape.vocabulary, (past.batch, 1))
    steps, found = hold_all(alive, ours, past, token, result.not_run)
    run.probe.working_sets(need_of(decoder, subject, past) for subject in alive.values())
    with watch(where, run.threads, result.load):
        timed = take_turns(steps, run.rounds, run.budget_s, between=run.sample, where=f"{where}, ",
                           progress=run.progress, lost=partial(run.left_out, ours, where))
    for name, t in timed.items():
        result.rows.append(Row.of(
            "model", name, t, context=past.length, batch=past.batch, tokens=1, ours_ms=timed[ours[0]].median,
            need=need_of(decoder, alive[name], past), outputs_equal=found[name].equal, rel=found[name].rel,
            cpu=t.cpu_per_wall, cache_bytes_per_token=alive[name].cache_bytes_per_token))


def need_of(decoder: DecoderConfig, subject: Subject, past: Past, tokens: int = 1) -> Need:
    """What a subject's step must do."""
    return model_need(decoder, past.batch, tokens, past.length, subject.dtype, subject.quantise, subject.cache_dtype)


def hold_all(alive: Mapping[str, Subject], ours: Sequence[str], past: Past, tokens: np.ndarray, not_run: list[str],
             prefill: bool = False) -> tuple[dict[str, Step], dict[str, Compared]]:
    """The steps that may be timed behind `past`, compared; the others go to `not_run`."""
    steps: dict[str, Step] = {}
    out: dict[str, str] = {}
    for name, subject in alive.items():
        if refused := _refused(subject, past, tokens.shape[1]):
            if name in ours:
                raise InputError(f"--context {past.length}: {refused}; choose shorter contexts")
            out[name] = refused

    def question(subject: Subject) -> np.ndarray:
        steps[subject.name] = subject.prefill(past, tokens) if prefill else subject.hold(past, tokens)
        return steps[subject.name]()

    answers, failed = ask({n: s for n, s in alive.items() if n not in out}, ours, question)
    behind = f"behind {past.length} rows"
    found, different = judge(answers, alive, ours, behind)
    out |= failed | different
    not_run += [f"{name} at batch {past.batch}, {behind.removeprefix('behind ')}: {why}" for name, why in out.items()]
    return {name: step for name, step in steps.items() if name not in out}, found


def _refused(subject: Subject, past: Past, tokens: int) -> str | None:
    """Why a subject is not run behind `past`."""
    rows = past.batch * past.length
    if subject.name == Transformers.name and rows > SLOW_PEER_ROWS:
        return f"seconds a step, run up to {SLOW_PEER_ROWS} rows only"
    together = min(tokens, subject.at_once or tokens)
    scores = 8 * past.batch * past.shape.heads * together * (past.length + tokens)  # and their softmax
    cache = subject.cache_bytes_per_token * (rows + past.batch * tokens)
    return too_much(SPARE * subject.working_caches * cache + scores)


def time_ragged(run: Run, subject: Ours, decoder: DecoderConfig, lengths: Sequence[int]) -> None:
    """Sequences of different lengths in one step beside one of their mean length alone: tokens per second."""
    batch, mean, shape = len(lengths), sum(lengths) // len(lengths), subject.shape
    past, token = Past.draw(shape, batch, max(lengths)), np.arange(batch)[:, None] % shape.vocabulary
    step = subject.hold(past, token, np.array(lengths, np.int64))
    together = step()

    def alone(b: int, rows: int) -> Step:
        return subject.hold(Past(shape, [np.ascontiguousarray(r[b:b + 1, :rows]) for r in past.rows]), token[b:b + 1])

    rel = max(compare(together[b:b + 1], alone(b, n)()).rel for b, n in enumerate(lengths))
    if rel > EQUAL:
        raise CheckError(f"{subject.name}: a ragged batch answers otherwise than its sequences alone: rel {rel:.1e}")
    where, need = f"ragged batch of {batch}", model_need(decoder, batch, 1, mean)
    run.probe.working_sets([need])
    with watch(where, run.threads, run.result.load):
        timed = take_turns({"ragged": step, "one": alone(0, mean)}, run.rounds, run.budget_s, between=run.sample,
                           where=f"{where}, ", progress=run.progress)
    row = Row.of("model", subject.name, timed["ragged"], context=mean, batch=batch, tokens=1, rel=rel,
                 need=need, cpu=timed["ragged"].cpu_per_wall, lengths=tuple(lengths),
                 cache_bytes_per_token=subject.cache_bytes_per_token)
    run.result.rows.append(replace(row, tokens_per_s_of_batch_1=1e3 / timed["one"].median))
