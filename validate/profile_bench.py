"""The suite profile: where a decode step of a whole model spends its time, by part of the model and by operator.

Our default graph is timed as in the suite model, and then once more in a session of its own that writes ONNX Runtime's
profile, which slows it by some microseconds a node; both must answer alike. Parts are told by the names of the graph's
nodes (validate.node_parts), and every part's matrix products are set beside what they must read and multiply.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from exporter.manifest import Export
from validate.bench_rows import Row, Run
from validate.bench_subjects import Variant, Workplace, open_ours
from validate.bench_timing import BURST, take_turns, watch
from validate.model_bench import hold_all, need_of
from validate.node_products import Products
from validate.peers import Ours, Past
from validate.step_profile import Profile, read_steps


def bench_profile(run: Run, place: Workplace, contexts: Sequence[int], batches: Sequence[int] = (1,)) -> None:
    """Time and profile the default decode graph of every variant at every batch and context."""
    run.probe.products(place.decoder.attention, place.decoder.intermediate_size)
    for variant in place.decoding():
        made = place.ours(variant)
        with closing(open_ours(place, made, made.graph("decode"), variant)) as timed:
            for batch in batches:
                for context in contexts:
                    _case(run, place, made, variant, timed, Past.draw(place.shape, batch, context))


def _case(run: Run, place: Workplace, made: Export, variant: Variant, timed: Ours, past: Past) -> None:
    where, graph = f"profile, batch {past.batch}, context {past.length}", made.graph("decode")
    token = np.random.default_rng(past.length).integers(0, past.shape.vocabulary, (past.batch, 1))
    need = need_of(place.decoder, timed, past)
    run.probe.working_sets([need])
    with tempfile.TemporaryDirectory(prefix="mla-profile-") as folder, closing(
            open_ours(place, made, graph, variant, Path(folder))) as profiled:
        profiled.name = f"{timed.name}, profiled"
        subjects = {s.name: s for s in (timed, profiled)}
        steps, compared = hold_all(subjects, list(subjects), past, token, run.result.not_run)
        with watch(where, run.threads, run.result.load):
            alone = take_turns({timed.name: steps[timed.name]}, run.rounds, run.budget_s, between=run.sample,
                               where=f"{where}, ", progress=run.progress)[timed.name]
            # in one turn, so that its last steps are those that were timed
            written = take_turns({profiled.name: steps[profiled.name]}, 1, run.budget_s, burst=BURST * run.rounds,
                                 where=f"{where}, ", progress=run.progress)[profiled.name]
        taken = read_steps(profiled.end_profile(), len(written.ms))
    same = compared[profiled.name]
    run.result.rows.append(Row.of(
        "profile", timed.name, alone, context=past.length, batch=past.batch, tokens=1, need=need,
        outputs_equal=same.equal, rel=same.rel, cpu=alone.cpu_per_wall,
        cache_bytes_per_token=timed.cache_bytes_per_token))
    run.result.profiles.append(Profile.of(taken, Products(made.folder / graph.file), timed.name, past.length,
                                          past.batch, alone.median, need))
