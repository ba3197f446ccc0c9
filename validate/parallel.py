"""The ranks of a tensor-parallel export, together, against the float64 reference of their source; and against the
single graph of the same model, token for token.

All ranks run in this process, in step (`engines.parallel.Lockstep`): the same graphs and weights as in as many
processes, which `engines parallel` starts. Every trace of a model's ladder is asked: in one piece, in chunks, step by
step, ragged, and far beyond the original context.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engines.backends import open_session
from engines.parallel import Lockstep, greedy, opener
from engines.session import Session
from exporter.errors import InputError
from exporter.manifest import Export, open_export
from exporter.tensor_parallel import Ranks, open_ranks
from validate.ladder import Ladder, ModelRung, Progress, check_source
from validate.metrics import Difference, Tolerance, compare, worst_of
from validate.model_parity import TOLERANCES, Answers, answers_of, replay, slots, teach, top1_and_kl
from validate.model_traces import ModelTrace

PROMPTS, NEW_TOKENS = 4, 24


def check_ranks(folder: Path, against: Path | None, backend: str, seed: int,
                progress: Progress = lambda message, share=None: None) -> Ladder:
    """The ladder of a tensor-parallel export: `against` is an export of the same model as one graph."""
    made, ladder = open_ranks(folder), Ladder()
    one = None if against is None else _single(against, made)
    open_segment = opener(backend, threads=1)
    check_source(made.ranks[0])
    answers = answers_of(made.ranks[0], made.decoder, seed, progress)
    sessions: dict[str, Session] = {}
    try:
        for kind in ("prefill", "decode"):
            progress(f"opening {len(made.ranks)} ranks, {kind}")
            sessions[kind] = Lockstep(made.ranks, kind, open_segment)
        # ONNX Runtime's CPU computes 16-bit products in float32: no judge of them
        counted = backend != "ort" or made.ranks[0].dtype == "fp32"
        for trace in answers.traces:
            if not (trace.ragged and made.ranks[0].cache == "concat"):
                progress(f"{len(made.ranks)} ranks: {trace.name}")
                try:
                    _climb(ladder, made, sessions, trace, answers, counted)
                except Exception as error:  # one rung that breaks says nothing of the next
                    graph = made.ranks[0].graph(trace.kind)
                    ladder.rungs.append(ModelRung.broken(f"ranks/{trace.name}", graph, made.ranks[0], error, counted))
        if one is not None:
            _same_tokens(ladder, made, one, sessions, backend, seed)
    finally:
        for session in sessions.values():
            session.close()
    _one_cache(ladder, made, sessions, backend)
    return ladder


def _single(folder: Path, made: Ranks) -> Export:
    """The single graph's export; InputError where it is of another source or configuration."""
    one = open_export(folder)
    for key in ("source", "decoder", "dtype", "cache", "cache_dtype", "max_context", "absorb"):
        mine, theirs = made.data.get(key), one.data.get(key)
        if mine != theirs:
            plain = all(isinstance(value, str | int) for value in (mine, theirs))
            found = f"{key} is {theirs}, that of {made.folder} is {mine}" if plain else (
                f"{key} differs from that of {made.folder}")
            raise InputError(f"--against {folder}: its {found}; both have to be exports of one model with the same "
                             "options, --max-context among them; export it again as the ranks were, without "
                             "--tensor-parallel")
    return one


def _climb(ladder: Ladder, made: Ranks, sessions: dict[str, Session], trace: ModelTrace, answers: Answers,
           counted: bool) -> None:
    """Logits and new cache rows of one trace against the reference's."""
    first = made.ranks[0]
    graph = first.graph(trace.kind)
    trace, asked = slots(first, trace, answers.told)
    found = replay(trace, asked, sessions, first)
    told = teach(first, answers, trace, asked, found)
    sure = np.array([not told[s].unsure[t] for s, t in found.places])
    if not sure.any():
        ladder.skip(f"ranks/{trace.name}: not run: a router could turn at every token")
        return
    theirs = np.stack([told[s].outputs[t] for s, t in found.places])[sure]
    top1, kl = top1_and_kl(found.vectors[sure], theirs)
    tolerance = TOLERANCES[first.dtype]
    ladder.rungs.append(ModelRung.of(
        f"ranks/{trace.name}", graph, first, compare(found.vectors[sure], theirs), tolerance, counted=counted,
        tokens=int(sure.sum()), excluded=int((~sure).sum()), top1=top1, kl=kl))
    rows = [compare(mine[keep], told[m].rows[a, part][keep])
            for b, (m, start) in enumerate(zip(trace.members, trace.starts, strict=True))
            for a, mine in enumerate(found.rows[b])
            for part in (slice(start, start + len(mine)),) for keep in (~told[m].unsure_rows[a, part],)]
    ladder.rungs.append(ModelRung.of(f"ranks/{trace.name}/cache", graph, first, worst_of(rows), tolerance,
                                     counted=counted, tokens=sum(map(len, found.rows[0][:1])) * len(found.rows)))


def _same_tokens(ladder: Ladder, made: Ranks, one: Export, sessions: dict[str, Session], backend: str, seed: int,
                 ) -> None:
    """Greedy tokens of random prompts, ranks against the single graph."""
    first, rng = made.ranks[0], np.random.default_rng([seed, 17])
    new = min(NEW_TOKENS, first.max_context // 2)
    prompts = [rng.integers(0, made.decoder.vocab_size, int(n)).tolist()
               for n in rng.integers(1, first.max_context - new + 1, PROMPTS).clip(1, 40)]
    with open_session(one, "prefill", backend) as prefill, open_session(one, "decode", backend) as decode:
        alone = np.array([greedy(prefill, decode, p, new) for p in prompts])
    ranks = np.array([greedy(sessions["prefill"], sessions["decode"], p, new) for p in prompts])
    same = bool((alone == ranks).all())
    ladder.rungs.append(ModelRung.of(
        "ranks = single graph, tokens", first.graph("decode"), first,
        Difference(0.0 if same else float("inf"), 0.0, 1.0 if same else 0.0, None, True), Tolerance(0.0, 0.0),
        tokens=alone.size, top1=float((alone == ranks).mean()), note=f"greedy, {PROMPTS} prompts"))


def _one_cache(ladder: Ladder, made: Ranks, sessions: dict[str, Session], backend: str) -> None:
    """The rows of all ranks are one cache, to the last bit on a CPU (kernels of a GPU may add up in any order)."""
    apart = max(session.rows_differ for session in sessions.values() if isinstance(session, Lockstep))
    ladder.rungs.append(ModelRung.of(
        "ranks hold one cache", None, made.ranks[0], Difference(apart, apart, 1.0, None, True), Tolerance(0.0, 0.0),
        counted=backend != "ort-cuda",
        note=f"largest difference between two ranks' new rows: {apart:g}"))
