"""The feeds that Polygraphy runs get, and what the float64 references make of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from exporter.manifest import Export, GraphEntry
from exporter.signature import NO_CACHE
from validate.model_traces import Examiner, Told
from validate.traces import TraceMaker

BATCH = 3
PAST = 100  # rows of past: every case lies in a file


@dataclass(frozen=True)
class Case:
    """One feed of a graph and what the reference makes of it, in float64."""

    name: str
    feed: dict[str, np.ndarray]
    golden: dict[str, np.ndarray]


def make_cases(made: Export, maker: TraceMaker, kind: str) -> list[Case]:
    """Feeds of one graph kind: an empty past, an ordinary one, and a batch (ragged where the cache form allows it).

    None has padding: outputs of padded tokens mean nothing, and Polygraphy compares every element.
    """
    if made.cache == NO_CACHE:
        tokens = min(24, made.max_context)
        return [_case(made, maker, "one", tokens, [0]), _case(made, maker, "batch", tokens, [0] * BATCH)]
    tokens = 1 if kind == "decode" else min(5, max(1, made.max_context // 2))
    past = min(PAST, made.max_context - tokens)
    cases = [_case(made, maker, "empty", tokens, [0])]
    if past:
        several = [past] * BATCH if made.cache == "concat" else [0, past // 3, past]
        cases += [_case(made, maker, "past", tokens, [past]), _case(made, maker, "batch", tokens, several)]
    return cases


def _case(made: Export, maker: TraceMaker, name: str, tokens: int, lengths: list[int]) -> Case:
    hidden = maker.hidden(len(lengths), tokens)
    wide = torch.from_numpy(hidden.astype(np.float64))
    if made.cache == NO_CACHE:
        output = maker.naive.forward(wide).numpy()
        return Case(name, {"hidden_states": hidden}, {"attn_output": output})
    used = max(1, *lengths)
    # rows beyond a length hold noise, in a ragged batch and in the scatter form's S_max: no output may depend on it
    rows = maker.random_rows(len(lengths), made.max_context if made.cache == "scatter" else used)
    for reference in (maker.naive, maker.absorbed):
        reference.seed_rows(torch.from_numpy(rows[:, :used].astype(np.float64)), lengths)
    output = maker.naive.forward(wide).numpy()
    maker.absorbed.forward(wide)
    new = np.stack([maker.absorbed.rows(b)[length:].numpy() for b, length in enumerate(lengths)])  # [B, T, R]
    feed = {"hidden_states": hidden, "past_lengths": np.array(lengths, np.int64)}
    if made.cache == "scatter":
        feed["latent_cache.0"], cache_output = rows[:, None], "latent_cache_out.0"
        cache = rows[:, None].astype(np.float64)
        for b, length in enumerate(lengths):
            cache[b, 0, length:length + tokens] = new[b]
    elif made.cache == "concat":
        feed["past_latent.0"], cache_output = rows, "present_latent.0"
        cache = np.concatenate([rows.astype(np.float64), new], axis=1)
    else:
        feed["past_latent.0"], cache_output, cache = rows, "new_latent.0", new
    return Case(name, feed, {"attn_output": output, cache_output: cache})


class ModelCases:
    """The same for whole models, or slices of one: their feeds and goldens, by kind of graph."""

    def __init__(self, made: Export, examiner: Examiner) -> None:
        self.made, self.examiner = made, examiner
        self.left_out: list[str] = []
        self._near = [examiner.told(min(16, made.max_context), None, lambda what: None, "near")]

    def make(self, graph: GraphEntry) -> list[Case]:
        """Cases as `make_cases` has them; one in which a router could turn at the graph's dtype is left out, and said.
        """
        made = self.made
        tokens = 1 if graph.kind == "decode" else min(5, max(1, made.max_context // 2))
        past = min(PAST, made.max_context - tokens)
        plans = {"empty": [0]}
        if past:
            plans |= {"past": [past], "batch": [past] * BATCH if made.cache == "concat" else [0, past // 3, past]}
        cases = []
        for name, lengths in plans.items():
            rows = self.examiner.past(self._near, made.max_context if made.cache == "scatter" else max(1, *lengths))
            told = [self.examiner.told(tokens, rows[:, :n] if n else None, lambda what: None, name) for n in lengths]
            if any(t.unsure.any() for t in told):
                self.left_out.append(f"case {name} of {graph.kind}: left out: a router could turn at {made.dtype}")
            else:
                cases.append(self._case(graph, name, rows, lengths, told))
        return cases

    def _case(self, graph: GraphEntry, name: str, rows: np.ndarray, lengths: list[int], told: list[Told]) -> Case:
        tokens, batch = len(told[0].inputs), len(lengths)
        feed = {graph.inputs[0].name: np.stack([t.inputs for t in told]), "past_lengths": np.array(lengths, np.int64)}
        if any(t.name == "last_token" for t in graph.inputs):
            feed["last_token"] = np.full(batch, tokens - 1, np.int64)
        out = next(t for t in graph.outputs if t.name in ("logits", "hidden_states_out"))
        outputs = np.stack([t.outputs if len(out.shape) == 3 else t.outputs[-1] for t in told])
        golden = {out.name: outputs}
        for i, past in enumerate(rows):
            shared = np.repeat(past[None], batch, axis=0)  # [B, S, R]
            new = np.stack([t.rows[i] for t in told])  # [B, T, R]
            if self.made.cache == "scatter":
                cache = shared.astype(np.float64)
                for b, length in enumerate(lengths):
                    cache[b, length:length + tokens] = new[b]
                feed[f"latent_cache.{i}"], key, value = shared[:, None], f"latent_cache_out.{i}", cache[:, None]
            elif self.made.cache == "concat":
                feed[f"past_latent.{i}"], key = shared, f"present_latent.{i}"
                value = np.concatenate([shared.astype(np.float64), new], axis=1)
            else:
                feed[f"past_latent.{i}"], key, value = shared, f"new_latent.{i}", new
            golden[key] = value
        return Case(name, feed, golden)
