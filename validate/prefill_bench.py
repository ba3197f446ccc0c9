"""The suite prefill: tokens per second of a piece of prompt, at the start and behind a past, beside the peers.

Each subject takes a piece as its users would: ours in chunks with the logits of the last token alone, mobius-onnx and
transformers at once. A piece must make its products (validate.floor): absorbed or expanded, whichever multiplies less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from validate.bench_rows import Row, Run
from validate.bench_subjects import PLAIN, Compared, Workplace, compare_on_tokens, open_ours, opened
from validate.bench_timing import watch
from validate.model_bench import hold_all, need_of, turns_and_blocks
from validate.peers import BlockSubject, Candidate, Ours, Past, Subject

ROUNDS = 3  # of runs that take seconds to minutes


def bench_prefill(run: Run, place: Workplace, pieces: Sequence[tuple[int, int]]) -> None:
    """Compare and time the default absorbed and expanded prefill graphs, and the peers."""
    openers = []
    for variant in place.variants:
        for form in ("absorbed", "expanded") if variant is PLAIN else ("absorbed",):
            made = place.ours(variant, form)
            openers.append(partial(open_ours, place, made, made.graph("prefill"), variant))
    with opened(place, openers) as candidates:
        run.probe.products(place.decoder.attention, place.decoder.intermediate_size)
        ours = [c.name for c in candidates if isinstance(c, Ours)]
        on_tokens = compare_on_tokens(candidates, ours, place.shape, run.result.not_run)
        alive = {c.name: c for c in candidates if c.name in on_tokens}
        for start, stop in pieces:
            _case(run, alive, ours, place, Past.draw(place.shape, 1, start), stop, on_tokens)


def _case(run: Run, alive: Mapping[str, Candidate], ours: Sequence[str], place: Workplace, past: Past, stop: int,
          on_tokens: Mapping[str, Compared]) -> None:
    start, count = past.length, stop - past.length
    where = f"prefill of {start} to {stop}"
    run.progress(f"{where}: comparing")
    tokens = np.random.default_rng(start).integers(0, place.shape.vocabulary, (1, count))
    subjects = {n: c for n, c in alive.items() if isinstance(c, Subject)}
    blocks = {n: c for n, c in alive.items() if isinstance(c, BlockSubject)}
    steps, found = hold_all(subjects, ours, past, tokens, run.result.not_run, prefill=True)
    run.probe.working_sets(need_of(place.decoder, candidate, past, count) for candidate in alive.values())
    with watch(where, run.threads, run.result.load):
        # each was run once to be compared; a run takes long enough to need no settling
        timed = turns_and_blocks(run, steps, blocks,
                                 lambda block: [1e3 * count / rate for rate in block.prefill(start, stop)], where,
                                 min(run.rounds, ROUNDS), burst=1, settle_s=0)
    for name, t in timed.items():
        compared, candidate = found.get(name, on_tokens[name]), alive[name]
        run.result.rows.append(Row.of(
            "prefill", name, t, context=start, batch=1, tokens=count, ours_ms=timed[ours[0]].median,
            need=need_of(place.decoder, candidate, past, count), outputs_equal=compared.equal, rel=compared.rel,
            cpu=t.cpu_per_wall or None, at_once=candidate.at_once if isinstance(candidate, Subject) else None,
            cache_bytes_per_token=candidate.cache_bytes_per_token))
