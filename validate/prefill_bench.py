"""The suite prefill: tokens per second of a piece of prompt, at the start and behind a past, beside the peers.

Each subject takes a piece as its users would: ours in chunks with the logits of the last token alone, mobius-onnx and
transformers at once. A piece must make its products (validate.floor): absorbed or expanded, whichever multiplies less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from validate.bench_rows import Row, Run
from validate.bench_subjects import PLAIN, Workplace, compare_on_tokens, open_ours, opened
from validate.bench_timing import Timed, take_turns, watch
from validate.model_bench import hold_all, need_of
from validate.peers import Ours, Past, Subject

ROUNDS = 3  # of runs that take seconds to minutes


def bench_prefill(run: Run, place: Workplace, pieces: Sequence[tuple[int, int]]) -> None:
    """Compare and time the default absorbed and expanded prefill graphs, and the peers."""
    openers = []
    for variant in place.variants:
        for form in ("absorbed", "expanded") if variant is PLAIN else ("absorbed",):
            made = place.ours(variant, form)
            openers.append(partial(open_ours, place, made, made.graph("prefill"), variant))
    with opened(place, openers) as subjects:
        run.probe.products(place.decoder.attention, place.decoder.intermediate_size)
        ours = [s.name for s in subjects if isinstance(s, Ours)]
        on_tokens = compare_on_tokens(subjects, ours, place.shape, run.result.not_run)
        alive = {s.name: s for s in subjects if s.name in on_tokens}
        for number, (start, stop) in enumerate(pieces, 1):
            timed = _case(run, alive, ours, place, Past.draw(place.shape, 1, start), stop)
            for name, quickest in behind(timed, ours).items() if number < len(pieces) else ():
                del alive[name]
                run.result.not_run.append(f"{name}, prefill beyond {stop}: not run: {quickest} was quicker up to there")


def behind(timed: Mapping[str, Timed], ours: Sequence[str]) -> dict[str, str]:
    """Of a peer's ways with one precision and form (their names begin alike) all but the quickest, which alone goes on
    to longer pieces: name -> the quickest of its kind."""
    quickest: dict[str, str] = {}
    kinds = {name: ",".join(name.split(",")[:2]) for name in timed if name not in ours}
    for name in sorted(kinds, key=lambda n: timed[n].median):
        quickest.setdefault(kinds[name], name)
    return {name: quickest[kind] for name, kind in kinds.items() if quickest[kind] != name}


def _case(run: Run, alive: Mapping[str, Subject], ours: Sequence[str], place: Workplace, past: Past, stop: int,
          ) -> Mapping[str, Timed]:
    start, count = past.length, stop - past.length
    where = f"prefill of {start} to {stop}"
    run.progress(f"{where}: comparing")
    tokens = np.random.default_rng(start).integers(0, place.shape.vocabulary, (1, count))
    steps, found = hold_all(alive, ours, past, tokens, run.result.not_run, prefill=True)
    run.probe.working_sets(need_of(place.decoder, subject, past, count) for subject in alive.values())
    with watch(where, run.threads, run.result.load):
        # each was run once to be compared; a run takes long enough to need no settling
        timed = take_turns(steps, min(run.rounds, ROUNDS), run.budget_s, burst=1, settle_s=0, between=run.sample,
                           where=f"{where}, ", progress=run.progress, lost=partial(run.left_out, ours, where))
    for name, t in timed.items():
        compared, subject = found[name], alive[name]
        run.result.rows.append(Row.of(
            "prefill", name, t, context=start, batch=1, tokens=count, ours_ms=timed[ours[0]].median,
            need=need_of(place.decoder, subject, past, count), outputs_equal=compared.equal, rel=compared.rel,
            cpu=t.cpu_per_wall, at_once=subject.at_once, cache_bytes_per_token=subject.cache_bytes_per_token))
    return timed
