"""A whole exported model against its source: every graph and the reference under teacher forcing, then, for those that
differ, the reference with one known mistake after the other.

The reference answers once for all graphs, sound and with each mistake: a further graph costs its own runs alone.
Token sequences, traces and replays are the parity ladder's (model_traces.py, model_parity.py); what a wrong reference
answers to the same tokens is asked here. Where a router's choice could turn by the dtype's error the token is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from engines.backends import BACKENDS
from engines.session import Session
from exporter.decoder_config import DecoderConfig
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate import model_parity, weight_audit
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_hypotheses import HYPOTHESES, ChangedTensors, Hypothesis, plain
from validate.doctor_layer import Verdict, verdict_finding
from validate.metrics import TOLERANCES, Difference, compare, worst_of
from validate.model_parity import Found, replay
from validate.model_traces import Examiner, ModelTrace, Told
from validate.quantised_weights import judges_of
from validate.references import DecoderReference

Progress = Callable[..., None]
TOKENS = 20  # of each near sequence that a trace plays


def _traces(kind: str, told: list[Told]) -> list[ModelTrace]:
    """From an empty past in two steps, and behind a past beyond the original context."""
    found = [ModelTrace("near", kind, (0, 1), (0, 0), ((kind, TOKENS - 2, None), (kind, 2, None)))]
    if len(told) > 2:
        found.append(ModelTrace("far", kind, (2,), (0,), ((kind, 2, None), (kind, 2, None))))
    return found


class ModelExamination:
    """One model's export, and what the reference answers, sound and not."""

    def __init__(self, made: Export, report: Report, seed: int, progress: Progress) -> None:
        self.made, self.decoder, self.report, self.progress = made, made.decoder, report, progress
        self.examiner = Examiner(made, made.decoder, seed)
        self.told = self.examiner.sequences(lambda what: progress(f"float64 reference: {what}"))
        self.tolerance = model_parity.TOLERANCES[made.dtype]
        self._answers: dict[int, list[Told] | None] = {}

    def examine(self) -> None:
        """Every graph, then the weight file."""
        red, graphs = False, self.made.graphs
        for number, graph in enumerate(graphs):
            self.progress(f"{graph.name} against its source", number / len(graphs))
            said = self._said(graph)
            if said is None:
                continue
            sound = self._verdict(said, self.told, 0)
            if sound is None:
                self.report.skip(f"{graph.name} against its source", "a router could turn at every token")
                continue
            self.report.see(f"{graph.name}: outputs and the cache rows of every attention against the float64 "
                            f"reference of its source ({', '.join(t.name for t, _ in said)})")
            if not sound.within(self.tolerance):
                red = True
                self.report.add([self._explain(graph, said, sound)])
        self._weights(red)

    def _said(self, graph: GraphEntry) -> list[tuple[ModelTrace, Found]] | None:
        reasons = []
        for name in judges_of(self.made):
            why = model_parity.too_large(self.made, name)
            if why:
                reasons.append(f"{name}: {why}")
                continue
            try:
                with BACKENDS[name].open(self.made, graph) as session:
                    return [self._played(t, session) for t in _traces(graph.kind, self.told)]
            except Exception as error:  # whatever a runtime says of a graph it cannot run
                reasons.append(f"{name}: {(str(error).strip().splitlines() or [type(error).__name__])[0]}")
        self.report.skip(f"{graph.name} against its source", "; ".join(reasons))
        return None

    def _played(self, trace: ModelTrace, session: Session) -> tuple[ModelTrace, Found]:
        return trace, replay(trace, self.told, {session.graph.kind: session}, self.made)

    def _verdict(self, said: list[tuple[ModelTrace, Found]], told: list[Told], shift: int) -> Verdict | None:
        found = {trace.name: _apart(trace, f, told, self.made.attentions, shift) for trace, f in said}
        kept = {name: d for name, d in found.items() if d is not None}
        return Verdict(kept) if kept else None

    def _answer(self, number: int) -> list[Told] | None:
        """The same tokens, answered under a hypothesis."""
        if number not in self._answers:
            made = self._reference(HYPOTHESES[number])
            self._answers[number] = None if made is None else self.examiner.under(made, self.told)
        return self._answers[number]

    def _reference(self, hypothesis: Hypothesis) -> DecoderReference | None:
        decoder: DecoderConfig | None = self.decoder
        tensors = self.examiner.reference.tensors
        if hypothesis.attention is not None:
            first = plain(tensors.within(self.decoder.attention_scopes(self.examiner.layers.start)[0]))
            changed = hypothesis.attention(self.decoder.attention, first)
            if changed is None:
                return None
            tensors = ChangedTensors(tensors, self.decoder.attention, hypothesis.attention)
            decoder = replace(self.decoder, attention=changed[0])
        elif hypothesis.decoder is not None:
            decoder = hypothesis.decoder(self.decoder)
        if decoder is None:
            return None
        return hypothesis.reference(decoder, tensors, max_context=self.made.max_context, layers=self.examiner.layers)

    def _explain(self, graph: GraphEntry, said: list[tuple[ModelTrace, Found]], sound: Verdict) -> Finding:
        matches = []
        for number, hypothesis in enumerate(HYPOTHESES):
            self.progress(f"{graph.name}: {hypothesis.ailment}", number / len(HYPOTHESES))
            told = self._answer(number)
            verdict = None if told is None else self._verdict(said, told, hypothesis.shift)
            if verdict is not None:
                matches.append((verdict, hypothesis))
        return verdict_finding(graph.name, sound, matches, self.tolerance)

    def _weights(self, red: bool) -> None:
        if self.made.data["weights"].get("mode") == "none":
            self.report.skip("weight file", "exported with --weights none")
            return
        self.report.see("weight file: every tensor against the source, in float64")
        try:
            found = weight_audit.audit_model(self.made, self.decoder)
        except InputError as error:
            self.report.skip("weight file", str(error))
            return
        if not red and not found.wide.within(TOLERANCES[self.made.dtype]):
            self.report.add([AILMENTS["weights-differ"].found(
                f"worst: {found.worst_wide}, rel {found.wide.rel:.1e} (tolerance {TOLERANCES[self.made.dtype].rel:.0e})"
                "; outputs are sound", where="weight file")])


def _apart(trace: ModelTrace, found: Found, told: list[Told], attentions: int, shift: int) -> Difference | None:
    """The worse of outputs and rows, without what a router could turn; None where nothing is left."""
    differences = []
    pairs = [(v, told[s].outputs[max(0, t - shift)]) for v, (s, t) in zip(found.vectors, found.places, strict=True)
             if not told[s].unsure[max(0, t - shift):t + 1].any()]
    if pairs:
        differences.append(compare(*(np.stack(side) for side in zip(*pairs, strict=True))))
    for attention in range(attentions):
        ours, theirs = [], []
        for member, start, rows in zip(trace.members, trace.starts, found.rows, strict=True):
            part = slice(start, start + len(rows[attention]))
            sure = ~told[member].unsure_rows[attention, part]
            ours.append(rows[attention][sure])
            theirs.append(told[member].rows[attention, part][sure])
        if sum(map(len, ours)):
            differences.append(compare(np.concatenate(ours), np.concatenate(theirs)))
    return worst_of(differences) if differences else None

