"""One exported attention against its source: the same inputs to every graph and to the float64 reference, sound first,
then with one known mistake after the other, until one of them says what the graph says.

Three kinds of input, because some mistakes hide from the others: tokens from an empty past; tokens behind a past beyond
the original context; and tokens so quiet that a latent's mean square is near the epsilon of its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from engines.backends import BACKENDS
from engines.session import Session
from exporter.config import MLAConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate import quantised_cache, weight_audit
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_changes import Tensors
from validate.doctor_hypotheses import HYPOTHESES, Hypothesis, plain
from validate.metrics import TOLERANCES, Difference, Tolerance, compare, worst_of
from validate.parity import replay
from validate.quantised_weights import judges_of, meant_attention, scheme_of, tolerance_of
from validate.references import AbsorbedMLA, load_tensors
from validate.traces import Step, Trace, far_position

Progress = Callable[..., None]
NEAR, LATER, FAR = 12, 2, 3  # tokens: a first step from an empty past, a second one behind it, and behind a long past
QUIET_SQUARE = 3e-6  # mean square of a quiet latent: between the epsilons that families have


@dataclass(frozen=True)
class Asked:
    """Inputs [B, T, D] of each step of one graph kind, behind `rows` [B, S, R] of past or none."""

    name: str
    kind: str
    steps: tuple[np.ndarray, ...]
    rows: np.ndarray | None = None

    def trace(self) -> Trace:
        """As a replay wants it; nothing is expected."""
        batch = len(self.steps[0])
        lengths = None if self.rows is None else np.full(batch, self.rows.shape[1], np.int64)
        trace = Trace(self.name, self.kind, batch, self.rows, lengths)
        trace.steps = [Step(self.kind, x, np.full(batch, x.shape[1], np.int64), x) for x in self.steps]
        return trace


Said = tuple[np.ndarray, np.ndarray]  # outputs of all steps [B, T, D], and the new cache rows [B, T, R] (or none)


def questions(made: Export, tensors: Tensors, kind: str, seed: int) -> list[Asked]:
    """What is asked of every graph of a kind."""
    c, dtype, rng = made.config, DTYPES[made.dtype].numpy, np.random.default_rng([seed, 5])

    def tokens(batch: int, count: int, size: float = 1.0) -> np.ndarray:
        drawn: np.ndarray = (size * rng.standard_normal((batch, count, c.hidden_size))).astype(dtype)
        return drawn

    first = min(NEAR, max(1, made.max_context // 3))
    if made.cache == "none":
        return [Asked("near", kind, (tokens(2, first),))]
    asked = [Asked("near", kind, (tokens(2, first), tokens(2, min(LATER, made.max_context - first))))]
    if "kv_a_layernorm.weight" in tensors:  # a latent of standard deviation |row| under unit tokens
        rows = tensors["kv_a_proj_with_mqa.weight"][:c.kv_lora_rank].double()
        square = float(rows.square().sum(1).mean())
        asked.append(Asked("quiet", kind, (tokens(2, first, (QUIET_SQUARE / square) ** 0.5),)))
    length = far_position(c, made.max_context)
    if length > first and made.cache != "concat":
        gain = np.concatenate([rng.uniform(0.5, 1.5, c.kv_lora_rank), np.full(c.qk_rope_head_dim, 2.0)])
        past = (rng.standard_normal((1, length, c.row_dim), dtype=np.float32) * gain).astype(dtype)
        asked.append(Asked("far", kind, (tokens(1, FAR), tokens(1, 1)), past))
    return asked


def answer(asked: Asked, config: MLAConfig, tensors: Tensors, max_context: int, causal: bool) -> Said:
    """What the float64 reference of these says."""
    reference = AbsorbedMLA(config, tensors, max_context=max_context, causal=causal)
    batch = len(asked.steps[0])
    if causal:
        reference.reset(batch)
        if asked.rows is not None:
            reference.seed_rows(torch.from_numpy(asked.rows.astype(np.float64)), [asked.rows.shape[1]] * batch)
    outputs = [reference.forward(torch.from_numpy(x.astype(np.float64))).numpy() for x in asked.steps]
    start = 0 if asked.rows is None else asked.rows.shape[1]
    rows = np.stack([reference.rows(b).numpy()[start:] for b in range(batch)]) if causal else np.zeros((batch, 0, 1))
    return np.concatenate(outputs, axis=1), rows


def listen(asked: Asked, sessions: dict[str, Session], made: Export) -> Said:
    """What an export's graph says."""
    outputs, cache = replay(asked.trace(), sessions, made)
    start = 0 if asked.rows is None else asked.rows.shape[1]
    rows = np.zeros((len(asked.steps[0]), 0, 1)) if made.cache == "none" else quantised_cache.held(cache)
    return np.concatenate(outputs, axis=1), rows[:, start:start + sum(x.shape[1] for x in asked.steps)]


def apart(found: Said, expected: Said) -> Difference:
    """The worse of outputs and rows. Rotary keys and latents each by their own size would hide nothing more."""
    return worst_of([compare(f, e) for f, e in zip(found, expected, strict=True)])


@dataclass(frozen=True)
class Verdict:
    """How far one graph is from a reference at each kind of input, and the worst of them."""

    by_input: dict[str, Difference]

    @property
    def worst(self) -> Difference:
        """Over all inputs."""
        return worst_of(list(self.by_input.values()))

    def within(self, tolerance: Tolerance) -> bool:
        """Whether every kind of input agrees."""
        return all(d.within(tolerance) for d in self.by_input.values())


class LayerExamination:
    """One attention's export, its source, and what all graphs were asked."""

    def __init__(self, made: Export, report: Report, seed: int, progress: Progress) -> None:
        self.made, self.report, self.progress = made, report, progress
        tensors = load_tensors(made.data["source"], made.config)
        self.source = plain(tensors)
        self.meant = plain(meant_attention(made, tensors))
        self.tolerance = _tolerance(made)
        self.kinds = sorted({g.kind for g in made.graphs})
        self.asked = {kind: questions(made, self.source, kind, seed) for kind in self.kinds}
        self._answers: dict[tuple[str, int | None, int], Said | None] = {}

    def examine(self) -> None:
        """Every graph, then the weight file; findings go into the report."""
        red = False
        for graph in self.made.graphs:
            self.progress(f"{graph.name} against its source")
            said = self._said(graph)
            if said is None:
                continue
            self.report.see(f"{graph.name}: outputs and cache rows against the float64 reference of its source "
                            f"({', '.join(a.name for a in self.asked[graph.kind])})")
            sound = self._verdict(graph.kind, said, None)
            assert sound is not None
            if not sound.within(self.tolerance):
                red = True
                self.report.add([self._explain(graph, said, sound)])
        self._weights(red)

    def _said(self, graph: GraphEntry) -> list[Said] | None:
        """What a graph answers, in the first runtime that can run it; None, with the reasons in the report."""
        reasons = []
        for name in judges_of(self.made):
            try:
                with BACKENDS[name].open(self.made, graph) as session:
                    sessions = {graph.kind: session}
                    return [listen(a, sessions, self.made) for a in self.asked[graph.kind]]
            except Exception as error:  # whatever a runtime says of a graph it cannot run
                reasons.append(f"{name}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
        self.report.skip(f"{graph.name} against its source", "; ".join(reasons))
        return None

    def _answer(self, kind: str, number: int | None, question: int) -> Said | None:
        """The reference's answer to a question under a hypothesis (None: sound), once."""
        key = (kind, number, question)
        if key not in self._answers:
            changed = (self.made.config, self.meant) if number is None else _changed(
                HYPOTHESES[number], self.made.config, self.meant)
            self._answers[key] = None if changed is None else answer(
                self.asked[kind][question], *changed, self.made.max_context, self.made.cache != "none")
        return self._answers[key]

    def _verdict(self, kind: str, said: list[Said], number: int | None) -> Verdict | None:
        """The distance at every kind of input; a hypothesis that the first does not bear out is asked no more."""
        found: dict[str, Difference] = {}
        for question, (asked, heard) in enumerate(zip(self.asked[kind], said, strict=True)):
            expected = self._answer(kind, number, question)
            if expected is None:
                return None
            found[asked.name] = apart(heard, expected)
            if number is not None and not found[asked.name].within(self.tolerance):
                break
        return Verdict(found)

    def _explain(self, graph: GraphEntry, said: list[Said], sound: Verdict) -> Finding:
        """The known mistake that reproduces what a graph says."""
        matches = []
        for number, hypothesis in enumerate(HYPOTHESES):
            self.progress(f"{graph.name}: {hypothesis.ailment}", number / len(HYPOTHESES))
            verdict = self._verdict(graph.kind, said, number)
            if verdict is not None:
                matches.append((verdict, hypothesis))
        return verdict_finding(graph.name, sound, matches, self.tolerance)

    def _weights(self, red: bool) -> None:
        """The weight file against the source; where outputs are sound but it is not, the mistake that explains it."""
        made = self.made
        if made.data["weights"].get("mode") == "none":
            self.report.skip("weight file", "exported with --weights none")
            return
        self.report.see("weight file: every tensor against the source, in float64")
        found = _audited(made, made.config, self.source)
        if found is None or found[0].within(TOLERANCES[made.dtype]) or red:
            return
        for hypothesis in HYPOTHESES:
            changed = _changed(hypothesis, made.config, self.source)
            again = None if changed is None else _audited(made, *changed)
            if again is not None and again[0].within(TOLERANCES[made.dtype]):
                self.report.add([AILMENTS[hypothesis.ailment].found(
                    f"the weight file equals the source with {hypothesis.what} (rel {again[0].rel:.1e}), and not the "
                    f"sound one ({found[1]}); outputs are sound", where="weight file")])
                return
        self.report.add([AILMENTS["weights-differ"].found(
            f"worst: {found[1]}, rel {found[0].rel:.1e} (tolerance {TOLERANCES[made.dtype].rel:.0e}); outputs are "
            "sound", where="weight file")])


def verdict_finding(where: str, sound: Verdict, matches: list[tuple[Verdict, Hypothesis]], tolerance: Tolerance
                    ) -> Finding:
    """What a difference is called: the closest hypothesis within tolerance, or none."""
    differs = ", ".join(f"{name} {d.rel:.1e}" for name, d in sound.by_input.items() if not d.within(tolerance))
    against = f"differs from its source by rel {sound.worst.rel:.1e} (tolerance {tolerance.rel:.0e}; {differs})"
    matches = sorted(matches, key=lambda m: m[0].worst.rel)
    fitting = [m for m in matches if m[0].within(tolerance)]
    if fitting:
        verdict, hypothesis = fitting[0]
        others = sorted({h.ailment for _, h in fitting[1:]} - {hypothesis.ailment})
        also = f"; {' and '.join(others)} would look the same here" if others else ""
        return AILMENTS[hypothesis.ailment].found(
            f"{against}; equals the source with {hypothesis.what} (rel {verdict.worst.rel:.1e}){also}", where=where)
    nearest = f"; nearest: {matches[0][1].ailment}, rel {matches[0][0].worst.rel:.1e}" if matches else ""
    return AILMENTS["unexplained-difference"].found(f"{against}; {len(matches)} known mistakes tried{nearest}",
                                                    where=where)


def _tolerance(made: Export) -> Tolerance:
    """Of the export's dtype; of a quantised cache what its codes may do."""
    return quantised_cache.ERROR[made.cache_dtype] if made.quantised_cache else tolerance_of(made)


def _changed(hypothesis: Hypothesis, config: MLAConfig, tensors: Tensors) -> tuple[MLAConfig, Tensors] | None:
    return None if hypothesis.attention is None else hypothesis.attention(config, tensors)


def _audited(made: Export, config: MLAConfig, tensors: Tensors) -> tuple[Difference, str] | None:
    """The audit's worst difference of wide weights, and of which tensor; None where a source cannot be read so."""
    try:
        found = weight_audit.audit(replace(made, config=config), tensors)
    except InputError:
        return None
    if found.codes is not None and scheme_of(made) and not found.codes.within(weight_audit.HALF_STEP):
        return found.codes, found.worst_codes
    return found.wide, found.worst_wide
