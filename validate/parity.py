"""The parity ladder: float64 reference -> eager absorbed -> weights -> graph, rounded -> ONNX Runtime -> engine.

Every rung has a name. A rung that cannot run here is reported as not run with its reason, never as passed;
a result that proves nothing (ONNX Runtime's CPU computes fp16 products in fp32) is reported and not counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engines.backends import BACKENDS
from engines.cache import LatentCache
from engines.session import Session, external_places
from exporter.errors import InputError
from exporter.export import ExportRequest, Tamper, export
from exporter.manifest import Export, GraphEntry, open_export
from validate import layer_search, model_faults, model_parity, network_rung, quantised_cache, weight_audit
from validate.ladder import Ladder, Progress, Rung, check_source
from validate.metrics import BETWEEN_RUNS, EXACT, NEVER, TOLERANCES, Difference, Tolerance, compare, worst_of
from validate.model_faults import ModelFault
from validate.network_rung import NETWORK, beside
from validate.quantised_weights import (
    BOUNDS,
    TURNED_ACTIVATIONS,
    meant_attention,
    rounds_activations,
    saved,
    scheme_of,
    tolerance_of,
)
from validate.references import AbsorbedMLA, ComposedMHA, NaiveMLA, load_tensors
from validate.traces import Step, Trace, TraceMaker, make_traces
from validate.untouched import Watch, watched

TAIL = 1e4


def replay(
    trace: Trace, sessions: dict[str, Session], made: Export, tail: float = 0.0, watch: Watch | None = None
) -> tuple[list[np.ndarray], LatentCache]:
    """Play a trace: the outputs of every step, and the cache afterwards. `tail` fills the rows beyond each length;
    `watch` sees every step."""
    capacity = min(trace.capacity + 8, made.max_context)
    cache = LatentCache(made, trace.batch, capacity if made.cache == "append" else None)
    if trace.start_rows is not None and trace.start_lengths is not None:
        quantised_cache.load(made, cache, trace.start_rows, trace.start_lengths)
    if tail and made.cache != "concat":
        quantised_cache.spoil(cache, tail)
    outputs = []
    for step in trace.steps:
        session, feed = sessions[step.kind], {"hidden_states": step.hidden, **cache.feed()}
        found = watch.infer(session, feed) if watch else session.infer(feed)
        outputs.append(found["attn_output"])
        if made.cache != "none":
            cache.commit(found, step.counts)
    return outputs, cache


def _valid(step_counts: np.ndarray, output: np.ndarray) -> np.ndarray:
    """The outputs of real tokens, [sum of counts, D]."""
    return np.concatenate([output[b, :n] for b, n in enumerate(step_counts)])


def _compared(steps: Sequence[Step], found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> list[Difference]:
    """Step by step, the outputs of real tokens."""
    return [compare(_valid(s.counts, f), _valid(s.counts, e)).placed(
                ("sequence", "token", "column"), [(b, t) for b, n in enumerate(s.counts) for t in range(n)]
            ).behind("step", i) for i, (s, f, e) in enumerate(zip(steps, found, expected, strict=True))]


def _judge(trace: Trace, outputs: Sequence[np.ndarray], cache: LatentCache | None = None
           ) -> tuple[Difference, Difference | None]:
    """Outputs, and the rows that `cache` holds at last, against the reference's."""
    steps = _compared(trace.steps, outputs, [s.expected for s in trace.steps])
    rows = None
    if trace.rows and cache is not None:
        rows = worst_of([compare(cache.rows[b, :len(r)], r).placed(("row", "column")).behind("sequence", b)
                         for b, r in enumerate(trace.rows) if len(r)])
    return worst_of(steps), rows


class _Runner:
    """Runs one export's graphs on one backend over the traces."""

    def __init__(self, made: Export, backend: str, ladder: Ladder, answers: Answers, progress: Progress) -> None:
        self.made, self.backend, self.ladder, self.progress = made, backend, ladder, progress
        self.traces, self.reference = answers.traces, answers.reference
        self.tolerance = tolerance_of(made, backend)
        self.rounding = backend == "ort" and rounds_activations(made)
        # ONNX Runtime's CPU computes 16-bit products in float32: no judge of them
        self.counted = not (backend == "ort" and made.dtype != "fp32")

    def _open(self, graph: GraphEntry) -> dict[str, Session] | None:
        """Sessions for both kinds: the graph under test, and the default of the other kind."""
        try:
            graphs = beside(self.made, graph, self.backend)
            return {kind: BACKENDS[self.backend].open(self.made, g) for kind, g in graphs.items()}
        except InputError as error:
            reason = str(error).removeprefix("not run: ").removeprefix(f"{self.backend}: ")
            self.ladder.skip(f"{self.backend}, {self.made.dtype}: not run: {reason}")
        except Exception as error:
            self.ladder.rungs.append(Rung.broken(f"{self.backend}/open", graph, self.made, error, self.counted))
        return None

    def run(self, graphs: Sequence[GraphEntry]) -> None:
        """Climb with each of `graphs`."""
        for graph in graphs:
            self.progress(f"{self.backend}: {self.made.dtype} {self.made.cache} {graph.name}")
            if self.backend == NETWORK and (reason := network_rung.refused(self.made, graph)):
                self.ladder.skip(reason)
                continue
            sessions = self._open(graph)
            if sessions is None:
                continue
            for trace in self.traces:
                if trace.kind == graph.kind and not (trace.ragged and self.made.cache == "concat"):
                    self._guarded(trace, graph, sessions)
            for session in sessions.values():
                session.close()

    def _add(self, name: str, graph: GraphEntry, difference: Difference, tolerance: Tolerance, note: str = "",
             counted: bool | None = None) -> None:
        self.ladder.rungs.append(Rung.of(f"{self.backend}/{name}", graph, self.made, difference, tolerance,
                                         counted=self.counted if counted is None else counted, note=note))

    def _guarded(self, trace: Trace, graph: GraphEntry, sessions: dict[str, Session]) -> None:
        try:
            self._trace(trace, graph, sessions)
        except Exception as error:  # one rung that breaks says nothing of the next
            self.ladder.rungs.append(Rung.broken(f"{self.backend}/{trace.name}", graph, self.made, error, self.counted))

    def _trace(self, trace: Trace, graph: GraphEntry, sessions: dict[str, Session]) -> None:
        outputs, cache = replay(trace, sessions, self.made)
        judge = self._quantised if cache.quantised else self._plain
        difference, rows = judge(trace, graph, outputs, cache)
        self._add(trace.name, graph, difference, self.tolerance)
        if rows is not None:
            self._add(f"{trace.name}/cache", graph, rows, self.tolerance)
        if trace.name == "ragged":
            self._tail(trace, graph, sessions, outputs)
            self._alone(trace, graph, sessions, outputs, cache)
        elif watched(trace, self.traces, self.made.cache):
            watch = Watch()
            replay(trace, sessions, self.made, TAIL, watch)
            self._untouched(graph, watch)
        if trace.name == "chunked" and self.made.dtype == "fp32":
            whole = next(t for t in self.traces if t.name == "prefill")
            once, other = replay(whole, sessions, self.made)
            tolerance, note = self._between([(cache.rows[b, :n], other.rows[b, :n])
                                             for b, n in enumerate(cache.lengths)])
            difference = compare(np.concatenate(outputs, axis=1), once[0])
            self._add("chunked/invisible", graph, difference.placed(("sequence", "token", "column")), tolerance, note)

    def _untouched(self, graph: GraphEntry, watch: Watch) -> None:
        """Rows that no step had to write, bit for bit: a matter of places and not of arithmetic, so always counted."""
        self._add("untouched", graph, watch.difference, watch.tolerance, watch.note, counted=True)

    def _plain(self, trace: Trace, graph: GraphEntry, outputs: Sequence[np.ndarray], cache: LatentCache
               ) -> tuple[Difference, Difference | None]:
        return _judge(trace, outputs, cache)

    def _quantised(self, trace: Trace, graph: GraphEntry, outputs: Sequence[np.ndarray], cache: LatentCache
                   ) -> tuple[Difference, Difference | None]:
        """Outputs against the reference over the very rows that were written, and those rows against the exact ones;
        the distance from an unquantised cache as a rung of its own."""
        expected, rows, admissible = quantised_cache.taught(self.made, trace, cache, self.reference)
        places = [(i, b, t) for i, s in enumerate(trace.steps) for b, n in enumerate(s.counts) for t in range(n)]
        self._add(f"{trace.name}/quantisation", graph, _judge(trace, outputs)[0],
                  quantised_cache.ERROR[self.made.cache_dtype], note="from a cache that is not quantised")
        written = compare(rows, admissible).placed(("step", "sequence", "token", "column"), places)
        return worst_of(_compared(trace.steps, outputs, expected)), written

    def _between(self, written: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[Tolerance, str]:
        """What two runs that wrote these latents may differ by: more where a number was rounded to another code."""
        turned = sum(int((a != b).sum()) for a, b in written) if self.made.quantised_cache else 0
        if not turned and self.rounding:
            return TURNED_ACTIVATIONS, "an activation may round to another int8 code"
        if not turned:
            return BETWEEN_RUNS, ""
        return quantised_cache.ERROR[self.made.cache_dtype], f"{turned} numbers on the other side of a tie"

    def _tail(self, trace: Trace, graph: GraphEntry, sessions: dict[str, Session], clean: list[np.ndarray]) -> None:
        """Contract rule 1: rows beyond the lengths never matter, bit for bit."""
        watch = Watch()
        dirty, _ = replay(trace, sessions, self.made, TAIL, watch)
        same = all(_valid(s.counts, a).tobytes() == _valid(s.counts, b).tobytes()
                   for s, a, b in zip(trace.steps, clean, dirty, strict=True))
        difference = worst_of(_compared(trace.steps, dirty, clean))
        self._add("tail", graph, difference, EXACT if same else NEVER, note="bit for bit")
        self._untouched(graph, watch)

    def _alone(self, trace: Trace, graph: GraphEntry, sessions: dict[str, Session], together: list[np.ndarray],
               held: LatentCache) -> None:
        """Contract rule 2: a sequence in a ragged batch gives what it gives alone."""
        if self.made.dtype != "fp32" or trace.start_rows is None or trace.start_lengths is None:
            return
        differences, written = [], []
        for b, length in enumerate(trace.start_lengths):
            single = Trace(trace.name, trace.kind, 1, trace.start_rows[b:b + 1, :max(1, length)], np.array([length]))
            single.steps = [
                type(s)(s.kind, s.hidden[b : b + 1], s.counts[b : b + 1], s.expected[b : b + 1]) for s in trace.steps
            ]
            alone, cache = replay(single, sessions, self.made)
            written.append((held.rows[b, :cache.lengths[0]], cache.rows[0, :cache.lengths[0]]))
            differences += [compare(o[b, :s.counts[b]], a[0, :s.counts[b]]).placed(("token", "column"))
                            .behind("sequence", b).behind("step", i)
                            for i, (s, o, a) in enumerate(zip(trace.steps, together, alone, strict=True))]
        tolerance, note = self._between(written)
        self._add("ragged/alone", graph, worst_of(differences), tolerance, note)


@dataclass(frozen=True)
class Answers:
    """What the references said of one source at one dtype: their own rungs' comparisons, and the traces."""

    tensors: dict[str, torch.Tensor]
    references: list[tuple[str, Difference, Tolerance, str]]
    traces: list[Trace]
    reference: AbsorbedMLA

    @classmethod
    def of(cls, made: Export, seed: int) -> Answers:
        """Load the source afresh and let the references answer."""
        tensors = load_tensors(made.data["source"], made.config)
        # wiring is judged with the weights that the file holds; what quantising them did is a rung of its own
        meant = meant_attention(made, tensors)
        maker = TraceMaker(made.config, meant, max_context=made.max_context, dtype=made.dtype, seed=seed,
                           causal=made.cache != "none")
        return cls(tensors, _compare_references(made, maker, tensors, meant), make_traces(maker), maker.absorbed)


def _compare_references(made: Export, maker: TraceMaker, tensors: dict[str, torch.Tensor],
                        meant: dict[str, torch.Tensor]) -> list[tuple[str, Difference, Tolerance, str]]:
    """float64 naive against eager absorbed (float64 and float32), against an MHA with composed weights, and, where the
    export's weights are quantised, against itself with the weights that their codes mean."""
    results = []
    x = torch.from_numpy(maker.hidden(2, min(24, made.max_context)).astype(np.float64))
    options: dict[str, Any] = {"max_context": made.max_context, "causal": maker.causal}
    expected = NaiveMLA(made.config, tensors, **options).forward(x).numpy()
    for name, kind, dtype, tolerance in (
            ("eager-absorbed", AbsorbedMLA, torch.float64, Tolerance(1e-9, 1e-12)),
            ("eager-absorbed-fp32", AbsorbedMLA, torch.float32, TOLERANCES["fp32"]),
            ("mha", ComposedMHA, torch.float64, Tolerance(1e-5, 1e-7))):
        found = kind(made.config, tensors, dtype=dtype, **options).forward(x.to(dtype)).double().numpy()
        difference = compare(found, expected).placed(("sequence", "token", "column"))
        note = f"article's verdict: {verdict(difference.cosine)}" if name == "mha" else ""
        results.append((name, difference, tolerance, note))
    scheme = scheme_of(made)
    if scheme:
        found = NaiveMLA(made.config, meant, **options).forward(x).numpy()
        results.append(("quantisation", compare(found, expected), BOUNDS[scheme], f"{saved(made)}; float64, decoded "
                        "weights against the source's"))
    return results


def verdict(cosine: float) -> str:
    """The article's reading of the cosine similarity of MLA and MHA outputs."""
    if cosine >= 0.95:
        return "sound (cosine >= 0.95)"
    if cosine >= 0.9:
        return "weak (cosine 0.90 to 0.95)"
    return "unsound (cosine < 0.90): raise d_c (down_dim) or check the RoPE dimensions"


def check(made: Export, ladder: Ladder, answers: Answers, *, backends: Sequence[str],
          known: Sequence[str] = (), progress: Progress = lambda message, share=None: None) -> None:
    """Climb the whole ladder for one export, leaving out graphs that are `known` by name already."""
    for name, difference, tolerance, note in answers.references:
        ladder.rungs.append(Rung.of(name, None, made, difference, tolerance, note=note))
    weight_audit.rungs(made, answers.tensors, ladder)
    for name in backends:
        if name == "ort" and made.dtype == "bf16":
            ladder.skip("ort, bf16: not run: ONNX Runtime's CPU has no bfloat16 MatMul")
            continue
        if name == "ort-cuda" and not torch.cuda.is_available():
            ladder.skip("ort-cuda: not run: no CUDA device")
            continue
        if made.data["weights"].get("mode") == "none":
            ladder.skip(f"{name}: not run: exported with --weights none, its graphs have no weights to run with")
            continue
        if name == "interpreter" and external_places(made):
            ladder.skip("interpreter: not run: weights lie outside the folder, in "
                        f"{next(iter(external_places(made).values()))}")
            continue
        if name == NETWORK and (reason := network_rung.absent()):
            ladder.skip(reason)
            continue
        _Runner(made, name, ladder, answers, progress).run([g for g in made.graphs if g.name not in known])


def default_backends(made: Export, network: bool | None = None) -> list[str]:
    """The interpreter and ONNX Runtime always; CUDA and the engines of the folder are tried and report why they did not
    run; TensorRT's parsed network where it is asked for, or where the export is one for TensorRT."""
    names = ["interpreter", "ort", *([NETWORK] if network_rung.climbs(made, network) else []), "ort-cuda"]
    return names + sorted(p.name for p in (made.folder / "engines").glob("trt*"))


def check_folder(folder: Path, seed: int = 0, progress: Progress = lambda message, share=None: None,
                 network: bool | None = None, find_layer: bool = False) -> Ladder:
    """Parity of an exported folder. `find_layer` searches the layers of a model that fails."""
    made, ladder = open_export(folder), Ladder()
    backends = default_backends(made, network)
    if made.contract == "model":
        model_parity.check(made, ladder, seed, backends=backends, progress=progress)
        if find_layer:
            layer_search.after(made, ladder, ladder.rungs, seed=seed, progress=progress)
    else:
        progress("references")
        check_source(made)
        check(made, ladder, Answers.of(made, seed), backends=backends, progress=progress)
    if NETWORK not in backends and network is None:
        ladder.skip(f"{NETWORK}: not run: exported for ONNX Runtime; --network climbs with it as well")
    if not (folder / "engines").is_dir():
        ladder.skip("trt, trt-rtx: not run: no engines were built in this folder" if torch.cuda.is_available() else
                    "trt, trt-rtx: not run: no CUDA device, and no engines were built in this folder")
    return ladder


def check_model(requests: Sequence[ExportRequest], seed: int = 0, progress: Progress = lambda message, share=None: None,
                tamper: Tamper | None = None, backends: Sequence[str] | None = None,
                fault: ModelFault | None = None, network: bool = False, find_layer: bool = False) -> Ladder:
    """Parity of a source: every request is exported aside and climbed, with `network` by TensorRT's parsed network as
    well; `find_layer` searches the layers of the first model that fails. `tamper` plants a fault in each attention,
    `fault` in each whole model."""
    ladder = Ladder()
    answers: dict[tuple[Any, ...], Any] = {}
    # requests that differ in their prefill form have their decode in common
    climbed: dict[ExportRequest, list[str]] = {}
    for request in requests:
        known = climbed.setdefault(replace(request, prefill="absorbed"), [])
        with tempfile.TemporaryDirectory(prefix="mla-parity-") as temporary:
            out = Path(temporary) / "export"
            made = export(replace(request, out=out), progress, tamper)
            key = (str(made.data["source"]), made.dtype, made.max_context, request.causal, request.quantise)
            used = backends or default_backends(made, network)
            if made.contract == "model":
                made = model_faults.plant(made, fault) if fault else made
                before = len(ladder.rungs)
                answers = {key: model_parity.check(made, ladder, seed, backends=used, known=known, progress=progress,
                                                   answers=answers.get(key))}
                if find_layer:
                    layer_search.after(made, ladder, ladder.rungs[before:], seed=seed, progress=progress)
            else:
                if key not in answers:
                    progress(f"references: {made.dtype}")
                    answers = {key: Answers.of(made, seed)}  # one at a time: they are large at full width
                check(made, ladder, answers[key], backends=used, known=known, progress=progress)
            known += [g.name for g in made.graphs]
    if backends is None:
        ladder.skip("trt, trt-rtx: not run: a MODEL is exported aside, without engines; build them in an export, and "
                    "climb with that")
    return ladder
