"""The ladder of a whole model: float64 reference -> transformers -> weights -> graph, rounded -> ORT -> engine.

Everything is compared with the float64 reference of the source that the manifest names: logits (or the hidden states of
a slice) under teacher forcing, and the cache rows of every attention. Where the source cannot be read so (a quantised
checkpoint, a folder that is gone), the rungs say it by name, and the graphs are held against each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from engines.backends import BACKENDS, default_graph
from engines.cache import LatentCache
from engines.measure import available_memory
from engines.session import Outputs, Session, external_places
from exporter.decoder_config import DecoderConfig
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry
from validate import network_rung, quantised_cache, transformers_rung, weight_audit
from validate.ladder import Ladder, ModelRung, Progress, Rung, check_source
from validate.metrics import BETWEEN_RUNS, EXACT, NEVER, Difference, Tolerance, compare, worst_of
from validate.model_traces import Examiner, ModelTrace, Told, make_traces
from validate.network_rung import NETWORK, beside
from validate.quantised_weights import rounds_activations, saved, scheme_of
from validate.untouched import Watch, watched

# In a hot model rel grows with depth and with every logit more that is compared: 2e-5, 0.09 and 0.7 were measured on
# sound ones of three layers (float32, float16, bfloat16). The cosine binds.
TOLERANCES = {"fp32": Tolerance(1e-4, 1e-7), "fp16": Tolerance(0.15, 3e-4), "bf16": Tolerance(1.0, 1e-2)}
# where ONNX Runtime rounds activations to int8 inside: twice and less the largest seen on hot families of two layers,
# without the tokens whose routers could turn (0.63, 2.6e-3)
ROUNDED_ACTIVATIONS = Tolerance(1.0, 6e-3)
TAIL = 1e4
AXES = ("sequence", "token", "column")  # of outputs: which of the sequences that were told, which of its tokens
REFERENCE = "float64 reference"


@dataclass(frozen=True)
class Answers:
    """The sequences that every rung replays, and who answered them. `quantisation`: outputs [T, V or D] of the first
    one with the weights that the export's codes mean, and with the source's; None where they are the same."""

    told: list[Told]
    traces: list[ModelTrace]
    judge: str
    quantisation: tuple[np.ndarray, np.ndarray] | None = None
    examiner: Examiner | None = None


@dataclass
class Found:
    """What a replay gave: vectors [n, V or D] of (member, token), and the rows of every attention by member: the new
    ones, and of a quantised cache those before them; all as numbers."""

    vectors: np.ndarray
    places: list[tuple[int, int]]  # (sequence, token) of each vector
    rows: list[list[np.ndarray]]  # [member][attention] -> [new tokens, R]
    past: list[list[np.ndarray]] = field(default_factory=list)


def output_name(graph: GraphEntry) -> str:
    """The output that is compared: logits, or a slice's hidden states."""
    return next(t.name for t in graph.outputs if t.name in ("logits", "hidden_states_out"))


def step_feed(graph: GraphEntry, inputs: np.ndarray, counts: np.ndarray, cache: LatentCache) -> dict[str, np.ndarray]:
    """One step's feed: padded inputs [B, T] or [B, T, D], and which token of each sequence is its last."""
    feed = {graph.inputs[0].name: inputs, **cache.feed()}
    if any(t.name == "last_token" for t in graph.inputs):
        feed["last_token"] = np.maximum(counts - 1, 0)
    return feed


def replay(trace: ModelTrace, told: Sequence[Told], sessions: dict[str, Session], made: Export,
           tail: float = 0.0, watch: Watch | None = None) -> Found:
    """Play a trace over a cache that starts with the reference's rows. `tail` fills the rows beyond each length;
    `watch` sees every step."""
    members = [told[m] for m in trace.members]
    lengths = np.array([t.start + s for t, s in zip(members, trace.starts, strict=True)], np.int64)
    capacity = min(int(lengths.max()) + trace.width + 8, made.max_context)
    cache = LatentCache(made, len(members), capacity if made.cache == "append" else None)
    _load(made, cache, members, trace.starts, lengths)
    if tail and made.cache != "concat":
        quantised_cache.spoil(cache, tail)
    at, vectors, places = np.array(trace.starts), list[np.ndarray](), list[tuple[int, int]]()
    for kind, tokens, given in trace.plan:
        counts = np.array(given if given is not None else [tokens] * len(members), np.int64)
        inputs = np.stack([_piece(t.inputs, int(a), tokens) for t, a in zip(members, at, strict=True)])
        feed = step_feed(sessions[kind].graph, inputs, counts, cache)
        found = watch.infer(sessions[kind], feed) if watch else sessions[kind].infer(feed)
        cache.commit(found, counts)
        _collect(found, sessions[kind].graph, counts, at, trace.members, vectors, places)
        at = at + counts
    layers = [quantised_cache.held(cache, attention) for attention in range(made.attentions)]
    kept = [[layer[b, lengths[b]:lengths[b] + at[b] - trace.starts[b]] for layer in layers]
            for b in range(len(members))]
    past = [[layer[b, :lengths[b]] for layer in layers] for b in range(len(members))] if cache.quantised else []
    return Found(np.stack(vectors), places, kept, past)


def _load(made: Export, cache: LatentCache, members: Sequence[Told], starts: Sequence[int], lengths: np.ndarray,
          ) -> None:
    if not lengths.any():
        return
    for attention in range(len(cache.layers)):
        past = np.zeros((len(members), int(lengths.max()), members[0].rows.shape[2]), DTYPES[made.dtype].numpy)
        for b, (told, start) in enumerate(zip(members, starts, strict=True)):
            if told.past is not None:
                past[b, :told.start] = told.past[attention]
            past[b, told.start:told.start + start] = told.rows[attention, :start]
        quantised_cache.load(made, cache, past, lengths, attention)


def _piece(inputs: np.ndarray, start: int, tokens: int) -> np.ndarray:
    """`tokens` inputs from `start` on; past the end the first ones again, as padding."""
    piece = inputs[start:start + tokens]
    return np.concatenate([piece, inputs[:tokens - len(piece)]]) if len(piece) < tokens else piece


def _collect(found: Outputs, graph: GraphEntry, counts: np.ndarray, at: np.ndarray, members: Sequence[int],
             vectors: list[np.ndarray], places: list[tuple[int, int]]) -> None:
    """Add the outputs of real tokens: of all, or of each sequence's last where the graph gives no others (without
    `last_token` that is the step's last, which may be padding)."""
    output, asked = found[output_name(graph)], any(t.name == "last_token" for t in graph.inputs)
    tokens = next(iter(found[t.name].shape[1] for t in graph.outputs if t.name.startswith("new_latent")), counts.max())
    for b, count in enumerate(counts):
        if output.ndim == 2:
            if not asked and count < tokens:
                continue
            vectors.append(output[b])
            places.append((members[b], int(at[b] + count - 1)))
        else:
            vectors.extend(output[b, :count])
            places += [(members[b], int(at[b]) + t) for t in range(count)]


def _softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    normed: np.ndarray = e / e.sum(axis=-1, keepdims=True)
    return normed


def top1_and_kl(found: np.ndarray, reference: np.ndarray) -> tuple[float | None, float | None]:
    """Share of tokens with the same best logit, and the mean KL(reference || found) in nats; None for what is not
    finite."""
    if not (np.isfinite(found).all() and np.isfinite(reference).all()):
        return None, None
    p, q = _softmax(reference), _softmax(found.astype(np.float64))
    kl = float((p * (np.log(np.maximum(p, 1e-300)) - np.log(np.maximum(q, 1e-300)))).sum(-1).mean())
    return float((found.argmax(-1) == reference.argmax(-1)).mean()), max(kl, 0.0)


def tolerance_of(made: Export, backend: str | None = None) -> Tolerance:
    """Of a model's graphs: the compute dtype's, unless `backend` rounds more than that."""
    return ROUNDED_ACTIVATIONS if backend == "ort" and rounds_activations(made) else TOLERANCES[made.dtype]


class _Climber:
    """Runs one export's graphs on one backend over the traces."""

    def __init__(self, made: Export, backend: str, ladder: Ladder, answers: Answers, progress: Progress) -> None:
        self.made, self.backend, self.ladder, self.answers, self.progress = made, backend, ladder, answers, progress
        self.tolerance = tolerance_of(made, backend)
        self.rounding = backend == "ort" and rounds_activations(made)
        # ONNX Runtime's CPU computes 16-bit products in float32: no judge of them
        self.counted = not (backend == "ort" and made.dtype != "fp32")

    def climb(self, graphs: Sequence[GraphEntry]) -> None:
        """Climb with each of `graphs`."""
        for graph in graphs:
            self.progress(f"{self.backend}: {self.made.dtype} {self.made.cache} {graph.name}")
            if self.backend == NETWORK and (refused := network_rung.refused(self.made, graph)):
                self.ladder.skip(refused)
                continue
            sessions: dict[str, Session] = {}
            try:
                sessions = {kind: BACKENDS[self.backend].open(self.made, g)
                            for kind, g in beside(self.made, graph, self.backend).items()}
            except InputError as error:
                reason = str(error).removeprefix("not run: ").removeprefix(f"{self.backend}: ")
                self.ladder.skip(f"{self.backend}, {self.made.dtype}: not run: {reason}")
                continue
            except Exception as error:
                self._broken("open", graph, error)
                continue
            for trace in self.answers.traces:
                if trace.kind == graph.kind and not (trace.ragged and self.made.cache == "concat"):
                    self._guarded(trace, graph, sessions)
            for session in sessions.values():
                session.close()

    def _guarded(self, trace: ModelTrace, graph: GraphEntry, sessions: dict[str, Session]) -> None:
        try:
            self._trace(trace, graph, sessions)
        except Exception as error:  # one rung that breaks says nothing of the next
            self._broken(trace.name, graph, error)

    def _broken(self, name: str, graph: GraphEntry, error: Exception) -> None:
        self.ladder.rungs.append(ModelRung.broken(f"{self.backend}/{name}", graph, self.made, error, self.counted))

    def _trace(self, trace: ModelTrace, graph: GraphEntry, sessions: dict[str, Session]) -> None:
        trace, told = slots(self.made, trace, self.answers.told)
        found = replay(trace, told, sessions, self.made)
        taught = teach(self.made, self.answers, trace, told, found)
        self._outputs(trace.name, graph, found, taught, self.tolerance)
        if self.made.quantised_cache:  # a model has no tolerance for it: reported
            self._outputs(f"{trace.name}/quantisation", graph, found, told, None)
        if self.rounding and trace.name in ("prefill", "decode"):
            self._lost(trace, graph, found)
        self._rows(trace, graph, found, taught)
        if watched(trace, self.answers.traces, self.made.cache):
            watch = Watch()
            dirty = replay(trace, told, sessions, self.made, TAIL, watch)
            if trace.name == "ragged":
                same = dirty.vectors.tobytes() == found.vectors.tobytes()
                self._add("tail", graph, compare(dirty.vectors, found.vectors).placed(AXES, found.places),
                          EXACT if same else NEVER, len(found.vectors), note="bit for bit")
            # places and not arithmetic: counted whatever the runtime
            self.ladder.rungs.append(ModelRung.of(f"{self.backend}/untouched", graph, self.made, watch.difference,
                                                  watch.tolerance, note=watch.note))
        if trace.name == "chunked" and self.made.dtype == "fp32":
            whole = next(t for t in self.answers.traces if t.name == "prefill")
            once = replay(whole, told, sessions, self.made)
            turned = sum(int((a != b).sum()) for one, other in zip(once.rows, found.rows, strict=True)
                         for a, b in zip(one, other, strict=True)) if self.made.quantised_cache else 0
            if turned:
                self.ladder.skip(f"{self.backend}/chunked/invisible, {graph.name}: not run: {turned} numbers of the "
                                 "quantised cache fell to the other side of a tie, and what follows differs")
                return
            at = dict(zip(found.places, found.vectors, strict=True))
            shared = [(at[p], v) for p, v in zip(once.places, once.vectors, strict=True) if p in at]
            pieces, whole_ones = (np.stack(side) for side in zip(*shared, strict=True))
            difference = compare(pieces, whole_ones).placed(AXES, [p for p in once.places if p in at])
            self._add("chunked/invisible", graph, difference, self.tolerance if self.rounding else BETWEEN_RUNS,
                      len(shared))

    def _add(self, name: str, graph: GraphEntry, difference: Difference, tolerance: Tolerance, tokens: int,
             excluded: int = 0, note: str = "", top1: float | None = None, kl: float | None = None,
             counted: bool = True) -> None:
        if excluded:
            note = "; ".join(filter(None, [note, f"{excluded} of {tokens + excluded} left out: a router could turn"]))
        self.ladder.rungs.append(ModelRung.of(
            f"{self.backend}/{name}", graph, self.made, difference, tolerance, counted=self.counted and counted,
            note=note, tokens=tokens, excluded=excluded, top1=top1, kl=kl))

    def _outputs(self, name: str, graph: GraphEntry, found: Found, told: Sequence[Told], tolerance: Tolerance | None
                 ) -> None:
        """Outputs against those of `told`; without a tolerance they are reported and not counted."""
        sure = np.array([not told[s].unsure[t] for s, t in found.places])
        expected = np.stack([told[s].outputs[t] for s, t in found.places])
        if not sure.any():
            self.ladder.skip(f"{self.backend}/{name}, {graph.name}: not run: a router could turn at every token")
            return
        ours, theirs = found.vectors[sure], expected[sure]
        top1, kl = top1_and_kl(ours, theirs) if output_name(graph) == "logits" else (None, None)
        note = "" if tolerance else "from a cache that is not quantised; reported"
        difference = compare(ours, theirs).placed(AXES, [p for p, kept in zip(found.places, sure, strict=True) if kept])
        self._add(name, graph, difference, tolerance or Tolerance(float("inf"), 2.0), int(sure.sum()),
                  int((~sure).sum()), note, top1, kl, counted=tolerance is not None)

    def _lost(self, trace: ModelTrace, graph: GraphEntry, found: Found) -> None:
        """What codes and rounded activations together did to the outputs of the first sequence: told, not counted."""
        assert self.answers.quantisation is not None
        at = [i for i, (member, _) in enumerate(found.places) if member == 0]
        ours = found.vectors[at]
        theirs = self.answers.quantisation[1][[found.places[i][1] for i in at]]
        top1, kl = top1_and_kl(ours, theirs) if output_name(graph) == "logits" else (None, None)
        self._add(f"{trace.name}/quantisation", graph, compare(ours, theirs), Tolerance(float("inf"), 2.0), len(at),
                  note="from the source's own weights, nothing rounded; reported", top1=top1, kl=kl, counted=False)

    def _rows(self, trace: ModelTrace, graph: GraphEntry, found: Found, taught: Sequence[Told]) -> None:
        """The new cache rows of every attention; the one that came closest to failing is named."""
        differences, excluded, tokens = {}, 0, 0
        for attention in range(self.made.attentions):
            ours, theirs, places = [], [], list[tuple[int, int]]()
            for b, (member, start) in enumerate(zip(trace.members, trace.starts, strict=True)):
                told, rows = taught[member], found.rows[b][attention]
                part = slice(start, start + len(rows))
                sure = ~told.unsure_rows[attention, part]
                ours.append(rows[sure])
                theirs.append(told.rows[attention, part][sure])
                places += [(member, told.start + start + int(t)) for t in np.flatnonzero(sure)]
                excluded, tokens = excluded + int((~sure).sum()), tokens + int(sure.sum())
            if sum(map(len, ours)):
                differences[attention] = compare(np.concatenate(ours), np.concatenate(theirs)).placed(
                    ("sequence", "row", "column"), places).behind("attention", attention)
        if not differences:
            self.ladder.skip(f"{self.backend}/{trace.name}/cache, {graph.name}: not run: a router could turn at every "
                             "token")
            return
        worst = max(differences, key=lambda a: differences[a].rel)
        each = self.made.attentions // len(range(*self.made.data["layers"]))
        layer = self.made.data["layers"][0] + worst // each
        note = f"worst: attention {worst} (layer {layer})"
        self._add(f"{trace.name}/cache", graph, worst_of(list(differences.values())), self.tolerance, tokens, excluded,
                  note)


def answers_of(made: Export, decoder: DecoderConfig, seed: int, progress: Progress) -> Answers:
    """Draw the sequences and let the float64 reference answer them."""
    examiner = Examiner(made, decoder, seed)
    told = examiner.sequences(lambda what: progress(f"float64 reference: {what}"))
    lost = examiner.quantisation(told[0]) if scheme_of(made) else None
    return Answers(told, make_traces(made.max_context, len(told) > 2), REFERENCE, lost, examiner)


def slots(made: Export, trace: ModelTrace, told: Sequence[Told]) -> tuple[ModelTrace, list[Told]]:
    """A trace and its sequences; with a quantised cache each place in the batch has one of its own, because what is
    answered there depends on the rows that were written there."""
    if not made.quantised_cache:
        return trace, list(told)
    return replace(trace, members=tuple(range(len(trace.members)))), [told[m] for m in trace.members]


def teach(made: Export, answers: Answers, trace: ModelTrace, told: list[Told], found: Found) -> list[Told]:
    """What a replay is held against: `told`, and with a quantised cache what the reference says when it attends the
    rows that were written. Its rows are then the best that those can be."""
    if not made.quantised_cache:
        return told
    assert answers.examiner is not None
    rows = [np.stack(each) for each in found.rows]  # [A, n, R]
    taught = answers.examiner.taught(told, trace.starts, [np.stack(each) for each in found.past], rows)
    return [replace(t, rows=np.concatenate([
        t.rows[:, :start], quantised_cache.admissible(made, r, t.rows[:, start:])], axis=1))
        for t, start, r in zip(taught, trace.starts, rows, strict=True)]


def answers_of_graphs(made: Export, decoder: DecoderConfig, seed: int) -> Answers:
    """Without a source that the reference reads: what the default decode graph answers, rounded, token by token."""
    graph = default_graph(made, "decode", "interpreter")
    rng, told = np.random.default_rng([seed, 11]), []
    with BACKENDS["interpreter"].open(made, graph) as session:
        for _ in range(2):
            whole = min(40, max(1, made.max_context // 2))
            length = whole + min(16, made.max_context - whole)
            hidden = (length, decoder.attention.hidden_size)
            inputs = (rng.integers(0, decoder.vocab_size, length) if graph.inputs[0].name == "input_ids" else
                      rng.standard_normal(hidden).astype(DTYPES[made.dtype].numpy))
            cache, outputs = LatentCache(made, 1, length if made.cache == "append" else None), []
            for t in range(length):
                found = session.infer(step_feed(graph, inputs[None, t:t + 1], np.array([1]), cache))
                cache.commit(found, 1)
                outputs.append(found[output_name(graph)].reshape(-1))
            rows = np.stack([layer[0, :length] for layer in cache.layers])
            told.append(Told(inputs, None, np.stack(outputs).astype(np.float64), rows.astype(np.float64),
                             np.zeros(length, bool), np.zeros(rows.shape[:2], bool)))
    return Answers(told, make_traces(made.max_context, False), "default decode graph in the interpreter")


def too_large(made: Export, backend: str) -> str | None:
    """Why a backend cannot hold this model here; None if it can. Both kinds of graph are open at once."""
    weights = int(made.data["weights"]["bytes"])
    # the interpreter widens 16-bit weights to float32, and maps float32 ones; others load what they open
    copies = {"interpreter": 0 if made.dtype == "fp32" else 2, NETWORK: 1 if made.dtype == "fp32" else 3}
    needed = 2 * weights * copies.get(backend, 1)
    free = available_memory()
    return f"needs about {needed >> 20} MiB, {free >> 20} MiB are free" if needed > 0.8 * free else None


def unrunnable(made: Export, backend: str, cuda: Callable[[], bool]) -> str | None:
    """Why a backend cannot judge this export at all; None if it can be tried."""
    if backend == "ort" and made.dtype == "bf16":
        return "ort, bf16: not run: ONNX Runtime's CPU has no bfloat16 MatMul"
    if backend == "ort-cuda" and not cuda():
        return "ort-cuda: not run: no CUDA device"
    if made.data["weights"].get("mode") == "none":
        return f"{backend}: not run: exported with --weights none, its graphs have no weights to run with"
    if backend == "interpreter" and external_places(made):
        place = next(iter(external_places(made).values()))
        return f"interpreter: not run: weights lie outside the folder, in {place}"
    if backend == NETWORK and (reason := network_rung.absent()):
        return reason
    large = too_large(made, backend)
    return f"{backend}: not run: {large}" if large else None


def check(made: Export, ladder: Ladder, seed: int, *, backends: Sequence[str], known: Sequence[str] = (),
          answers: Answers | None = None, decoder: DecoderConfig | None = None,
          progress: Progress = lambda message, share=None: None) -> Answers | None:
    """Climb the whole ladder for one model export; returns the answers for others like it.

    `decoder` is the true configuration where the export's was altered to plant a fault.
    """
    import torch

    decoder = decoder or made.decoder
    if answers is None:
        answers = _answers(made, decoder, seed, ladder, progress)
        if answers is not None and answers.quantisation is not None:
            ladder.skip("transformers: not run: the reference computes with the weights that the codes mean, and "
                        "transformers with the source's")
            ladder.rungs.append(_quantisation(made, *answers.quantisation))
        elif answers is not None and answers.judge == REFERENCE:
            transformers_rung.climb(made, decoder, answers.told, ladder, TOLERANCES["fp32"], progress)
    if answers is not None and answers.judge == REFERENCE:
        progress("weights")
        weight_audit.rungs(made, decoder, ladder)
    else:
        ladder.skip("weights: not run: the source cannot be read as floats")
    for backend in backends:
        reason = unrunnable(made, backend, torch.cuda.is_available)
        if reason:
            ladder.skip(reason)
        elif answers is not None:
            _Climber(made, backend, ladder, answers, progress).climb([g for g in made.graphs if g.name not in known])
    return answers


def _quantisation(made: Export, found: np.ndarray, expected: np.ndarray) -> Rung:
    """What quantising did to the outputs, in float64. Told, not counted: it grows with depth, and a router that chooses
    otherwise makes it any size."""
    logits = made.data["layers"][1] == made.decoder.layers
    top1, kl = top1_and_kl(found, expected) if logits else (None, None)
    return ModelRung.of("quantisation", None, made, compare(found, expected), Tolerance(float("inf"), 2.0),
                        counted=False, tokens=len(found), top1=top1, kl=kl,
                        note=f"{saved(made)}; float64, decoded weights against the source's")


def _answers(made: Export, decoder: DecoderConfig, seed: int, ladder: Ladder, progress: Progress) -> Answers | None:
    """The reference's answers; the graphs' own where there is no such source; None where those cannot run either."""
    try:
        check_source(made)
        return answers_of(made, decoder, seed, progress)
    except InputError as error:
        ladder.skip(f"float64 reference, transformers: not run: {error}")
    reason = unrunnable(made, "interpreter", lambda: False)
    if reason:
        return None
    if made.decoder.moe is not None and made.dtype != "fp32":
        ladder.skip(f"graphs against each other: not run: without the reference, nobody knows which tokens a router "
                    f"could turn at {made.dtype}")
        return None
    if made.quantised_cache:
        ladder.skip("graphs against each other: not run: with a quantised cache only the reference can follow the rows "
                    "that each graph writes")
        return None
    progress("interpreter: the default decode graph")
    ladder.skip("graphs: held against the default decode graph in the interpreter, in place of the reference")
    return answers_of_graphs(made, decoder, seed)
