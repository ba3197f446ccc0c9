"""What TensorRT's parser understood of a graph, held against the float64 reference and against ONNX Runtime.

A graph that TensorRT accepts may still mean something else there, and ONNX Runtime is blind to that. Here the network
that the parser made is run layer by layer on the CPU: a proof of an engine that needs no GPU. Two planted faults of the
field, which ONNX Runtime answers rightly, show that it sees.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
from onnx import helper, numpy_helper

from engines import trt
from engines.backends import BACKENDS
from engines.network_session import NetworkSession
from engines.onnx_ops import UnsupportedOperator
from engines.session import Session, external_places
from exporter import formulations, manifest
from exporter.errors import CheckError, InputError
from exporter.manifest import Export, GraphEntry, open_export
from validate import model_parity, parity, quantised_cache
from validate.ladder import Progress, check_source
from validate.metrics import Difference, Tolerance, compare, worst_of
from validate.model_traces import ModelTrace
from validate.quantised_weights import tolerance_of
from validate.traces import Trace

Pieces = list[np.ndarray]  # the outputs of real tokens and the cache rows that a trace left
NETWORK = "trt-network"
_NOTHING = Difference(float("inf"), float("inf"), 0.0, None, False)


@dataclass(frozen=True)
class Row:
    """One graph: its network, and how far that is from the reference and from another runtime of the same graph.

    `other` is ort, or interpreter where ONNX Runtime cannot run the dtype; `other_rel` says how far the network is from
    it, `other_reference_rel` how far it is itself from the reference. `judge` answered in the reference's place.
    """

    graph: str
    cache: str
    dtype: str
    judge: str
    layers: int = 0
    kinds: Mapping[str, int] | None = None
    rel: float | None = None
    cosine: float | None = None
    other: str = "-"
    other_rel: float | None = None
    other_reference_rel: float | None = None
    other_passed: bool | None = None
    tolerance: float = 0.0
    passed: bool = False
    note: str = ""
    max_abs: float | None = None
    mean_abs: float | None = None
    worst: dict[str, Any] | None = None
    masks: dict[str, Any] | None = None
    where: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON form: `pass` for `passed`."""
        data = asdict(self)
        data["pass"], data["other_pass"] = data.pop("passed"), data.pop("other_passed")
        return data


@dataclass(frozen=True)
class Result:
    """All graphs of a folder, and what was not run and why."""

    backend: str
    version: str
    rows: list[Row] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Every graph passed, and there was at least one."""
        return bool(self.rows) and all(r.passed for r in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        judge = self.rows[0].judge if self.rows else "-"
        return {"pass": self.passed, "backend": self.backend, "version": self.version, "judge": judge,
                "graphs": [r.to_dict() for r in self.rows], "not_run": self.not_run}

    @property
    def failure(self) -> str:
        """One line for a result that did not pass."""
        failed = [r for r in self.rows if not r.passed]
        if not failed:
            return f"no graph could be judged: {self.not_run[0] if self.not_run else 'the folder has none'}"
        first = failed[0].note or f"{failed[0].rel:.1e} from the reference, tolerance {failed[0].tolerance:.0e}"
        return f"{len(failed)} of {len(self.rows)} graphs mean something else to TensorRT: {failed[0].graph}: {first}"


class _Exam(Protocol):
    """What an export is asked, whatever its scope."""

    judge: str
    tolerance: Tolerance

    def traces(self, kind: str) -> Sequence[Any]:
        """The traces that examine a graph of this kind."""

    def play(self, trace: Any, sessions: dict[str, Session]) -> tuple[Pieces, Pieces]:
        """What the sessions answer, and what the judge answered in the same places."""


class _Layer:
    """The traces of one attention."""

    judge = model_parity.REFERENCE

    def __init__(self, made: Export, seed: int) -> None:
        check_source(made)
        self.made, self.tolerance = made, tolerance_of(made)
        self.answers = parity.Answers.of(made, seed)

    def traces(self, kind: str) -> list[Trace]:
        return [t for t in self.answers.traces if t.kind == kind and not (t.ragged and self.made.cache == "concat")]

    def play(self, trace: Trace, sessions: dict[str, Session]) -> tuple[Pieces, Pieces]:
        outputs, cache = parity.replay(trace, sessions, self.made)
        found = [_real(s.counts, o) for s, o in zip(trace.steps, outputs, strict=True)]
        if cache.quantised:
            taught, rows, admissible = quantised_cache.taught(self.made, trace, cache, self.answers.reference)
            return [*found, rows], [*(_real(s.counts, e) for s, e in zip(trace.steps, taught, strict=True)), admissible]
        expected = [_real(s.counts, s.expected) for s in trace.steps]
        found += [cache.rows[b, :len(r)] for b, r in enumerate(trace.rows) if len(r)]
        return found, expected + [r for r in trace.rows if len(r)]


def _real(counts: np.ndarray, output: np.ndarray) -> np.ndarray:
    """The outputs of real tokens, [sum of counts, D]."""
    return np.concatenate([output[b, :n] for b, n in enumerate(counts)])


class _Model:
    """The traces of a decoder. Tokens that the dtype's error could send to other experts are left out."""

    def __init__(self, made: Export, seed: int, progress: Progress) -> None:
        self.made, self.tolerance = made, model_parity.TOLERANCES[made.dtype]
        try:
            check_source(made)
            self.answers = model_parity.answers_of(made, made.decoder, seed, progress)
        except InputError as error:
            if made.quantised_cache:
                raise InputError(f"{made.folder}: {error}; without the reference, nobody can follow the rows that each "
                                 "graph writes into a quantised cache; export without --cache-dtype") from None
            if made.decoder.moe is not None and made.dtype != "fp32":
                raise InputError(f"{made.folder}: {error}; without the reference, nobody knows which tokens a router "
                                 f"could turn at {made.dtype}; export in fp32") from None
            self.answers = model_parity.answers_of_graphs(made, made.decoder, seed)
        self.judge = self.answers.judge

    def traces(self, kind: str) -> list[ModelTrace]:
        return [t for t in self.answers.traces if t.kind == kind and not (t.ragged and self.made.cache == "concat")]

    def play(self, trace: ModelTrace, sessions: dict[str, Session]) -> tuple[Pieces, Pieces]:
        trace, told = model_parity.slots(self.made, trace, self.answers.told)
        found = model_parity.replay(trace, told, sessions, self.made)
        told = model_parity.teach(self.made, self.answers, trace, told, found)
        sure = np.array([not told[member].unsure[token] for member, token in found.places])
        places = [place for place, kept in zip(found.places, sure, strict=True) if kept]
        ours, theirs = [found.vectors[sure]], [np.array([told[m].outputs[t] for m, t in places]).reshape(
            len(places), -1 if places else found.vectors.shape[1])]
        for a in range(self.made.attentions):
            for b, (member, start) in enumerate(zip(trace.members, trace.starts, strict=True)):
                rows, part = found.rows[b][a], slice(start, start + len(found.rows[b][a]))
                kept = ~told[member].unsure_rows[a, part]
                ours.append(rows[kept])
                theirs.append(told[member].rows[a, part][kept])
        return ours, theirs


class _Examiner:
    """Opens the graphs of an export and holds their answers against each other; sessions are opened once."""

    def __init__(self, made: Export, backend: str, exam: _Exam, progress: Progress) -> None:
        self.made, self.backend, self.exam, self.progress = made, backend, exam, progress
        # ONNX Runtime's CPU has no products of bfloat16
        self.other = "interpreter" if made.dtype == "bf16" else "ort"
        self._open: dict[tuple[str, str], Session] = {}

    def _session(self, runtime: str, graph: GraphEntry) -> Session:
        if (runtime, graph.name) not in self._open:
            made: Session = (NetworkSession(self.made, graph, self.backend) if runtime == NETWORK else
                             BACKENDS[runtime].open(self.made, graph))
            self._open[runtime, graph.name] = made
        return self._open[runtime, graph.name]

    def _sessions(self, runtime: str, graph: GraphEntry) -> dict[str, Session]:
        """The graph under test, and the default of the other kind, which fills the cache before it."""
        kinds = {g.kind for g in self.made.graphs}
        chosen = {kind: graph if kind == graph.kind else self.made.graph(kind) for kind in kinds}
        return {kind: self._session(runtime, g) for kind, g in chosen.items()}

    def row(self, graph: GraphEntry) -> Row:
        """Everything about one graph; what cannot be read or run is a row that says why and does not pass."""
        facts: dict[str, Any] = {"judge": self.exam.judge, "tolerance": self.exam.tolerance.rel}
        try:
            sessions = self._sessions(NETWORK, graph)
            session = sessions[graph.kind]
            assert isinstance(session, NetworkSession)
            network = session.network
            facts |= {"layers": len(network.layers), "kinds": network.kinds}
            facts |= self._compare(graph, sessions)
        except (UnsupportedOperator, CheckError) as error:
            facts["note"] = str(error)
        except InputError:
            raise
        except Exception as error:  # one graph that breaks says nothing of the next
            first = (str(error).strip().splitlines() or [""])[0]
            where = "; ".join(getattr(error, "__notes__", []))
            facts["note"] = f"{type(error).__name__}: {first} {where}".strip()
        return Row(graph.name, self.made.cache, self.made.dtype, **facts)

    def _compare(self, graph: GraphEntry, sessions: dict[str, Session]) -> dict[str, Any]:
        others, other_note = self._others(graph)
        ours, theirs, between = list[Difference](), list[Difference](), list[Difference]()
        for trace in self.exam.traces(graph.kind):
            self.progress(f"{graph.name}: {trace.name}")
            found, expected = self.exam.play(trace, sessions)
            ours += map(_difference, found, expected)
            if others is not None:
                told, asked = self.exam.play(trace, others)
                theirs += map(_difference, told, asked)
                between += map(_difference, found, told)
        if not ours:
            raise CheckError(f"no trace examines a {graph.kind} graph of the {self.made.cache} form")
        top, tolerance = worst_of(ours), self.exam.tolerance
        passed = top.within(tolerance)
        facts: dict[str, Any] = {"rel": top.rel, "cosine": top.cosine, "other": "-", "note": other_note,
                                 **top.figures(), "where": top.sentence}
        if between:
            facts |= {"other": self.other, "other_rel": worst_of(between).rel,
                      "other_reference_rel": worst_of(theirs).rel,
                      "other_passed": worst_of(theirs).within(tolerance)}
            # it rounds elsewhere in 16 bit, and to other codes at ties, where the reference judges alone
            alone = self.made.dtype != "fp32" or self.made.quantised_cache
            passed = passed and (alone or worst_of(between).within(tolerance))
            if not passed and facts["other_passed"]:
                name = "ONNX Runtime" if self.other == "ort" else "the interpreter"
                facts["note"] = (f"{name} answers the same graph rightly ({facts['other_reference_rel']:.1e}): "
                                 f"TensorRT's parser understood it otherwise ({top.rel:.1e})")
        return facts | {"passed": passed}

    def _others(self, graph: GraphEntry) -> tuple[dict[str, Session] | None, str]:
        try:
            return self._sessions(self.other, graph), ""
        except (InputError, UnsupportedOperator) as error:
            return None, f"{self.other}: not run: {error}"

    def close(self) -> None:
        for session in self._open.values():
            session.close()


def _difference(found: np.ndarray, expected: np.ndarray) -> Difference:
    return compare(found, expected) if found.shape == expected.shape else _NOTHING


def check(made: Export, *, backend: str = "trt-rtx", seed: int = 0, only: Sequence[str] = (),
          progress: Progress = lambda message, share=None: None) -> Result:
    """Every graph of an export (or those named in `only`) as the TensorRT of `backend` understands it."""
    if backend not in trt.MODULES:
        raise InputError(f"--backend {backend!r}: expected one of {', '.join(trt.MODULES)}")
    version = trt.load(backend).__version__
    external_places(made)  # says so where there are no weights
    result = Result(backend, version)
    graphs = []
    for graph in made.graphs:
        if refused := formulations.refused(graph.formulation, backend, made.dtype):
            result.not_run.append(f"{graph.name}: not run: {refused}")
        elif not only or graph.name in only:
            graphs.append(graph)
    if not graphs:
        return result
    if made.contract == "model" and (reason := model_parity.too_large(made, "interpreter")):
        result.not_run.append(f"{made.folder}: not run: {reason}")
        return result
    progress("references")
    exam: _Exam = _Model(made, seed, progress) if made.contract == "model" else _Layer(made, seed)
    examiner = _Examiner(made, backend, exam, progress)
    for graph in graphs:
        result.rows.append(examiner.row(graph))
    examiner.close()
    return result


# ---- planted faults


def _beyond() -> list[Any]:
    """Nodes: `fault/beyond` [B, 1, 1, S_max], the cache rows from `fault/lengths` on."""
    node = helper.make_node
    return [node("Squeeze", ["shapes/S_max"], ["fault/rows"]),
            node("Range", ["fault/zero", "fault/rows", "fault/one"], ["fault/row"]),
            node("Unsqueeze", ["fault/lengths", "fault/axes"], ["fault/length_4d"]),
            node("GreaterOrEqual", ["fault/row", "fault/length_4d"], ["fault/beyond"])]


def _nonpad(attend: Any, index: int) -> list[Any]:
    """The mask lets queries see unwritten rows, nonpad_kv_seqlen hides them: TensorRT's parser drops that input."""
    mask, wider = attend.input[3], f"fault/mask_{index}"
    del attend.input[3:]
    attend.input.extend([wider, "", "", "fault/lengths"])
    return [helper.make_node("Where", ["fault/beyond", "const/zero", mask], [wider])]


def _top_left(attend: Any, index: int) -> list[Any]:
    """The causal flag in place of the mask: aligned with the end of nonpad_kv_seqlen in ONNX, top-left in TensorRT."""
    del attend.input[3:]
    attend.input.extend(["", "", "", "fault/lengths"])
    attend.attribute.append(helper.make_attribute("is_causal", 1))
    return []


PLANTS: dict[str, Callable[[Any, int], list[Any]]] = {"nonpad": _nonpad, "top-left-causal": _top_left}


def plant(model: onnx.ModelProto, name: str) -> bool:
    """Plant a fault in every `Attention` node of a scatter graph, which stays right in ONNX; whether there was one."""
    graph = model.graph
    found = [i for i, n in enumerate(graph.node) if n.op_type == "Attention" and len(n.input) > 3]
    if not found or not any(i.name == "latent_cache.0" for i in graph.input):
        return False
    for key, value in (("zero", 0), ("one", 1), ("axes", [1, 2, 3])):
        graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), f"fault/{key}"))
    nodes: list[Any] = []
    for index, node in enumerate(graph.node):
        if index == found[0]:
            nodes += [helper.make_node("Add", ["past_lengths", "shapes/T"], ["fault/lengths"]), *_beyond()]
        nodes += [*(PLANTS[name](node, index) if index in found else ()), node]
    nodes = [onnx.NodeProto.FromString(n.SerializeToString()) for n in nodes]  # `del` would empty those of the graph
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def planted(made: Export, name: str, folder: Path) -> tuple[Export, list[str]]:
    """A copy of an export in `folder` with a fault planted, and the names of the graphs that have it."""
    if name not in PLANTS:
        raise InputError(f"--plant {name!r}: expected one of {', '.join(PLANTS)}")
    shutil.copytree(made.folder, folder, ignore=shutil.ignore_patterns("engines"))
    names = []
    for graph in made.graphs:
        model = onnx.load(folder / graph.file, load_external_data=False)
        if plant(model, name):
            (folder / graph.file).write_bytes(model.SerializeToString())
            names.append(graph.name)
    if not names:
        raise InputError(f"--plant {name}: {made.folder} has no graph with the fused Attention over a scatter cache; "
                         "export with --cache scatter --prefill expanded --target trt-rtx --dtype fp16")
    data = dict(made.data)
    data["files"] = {n: manifest.file_record(folder / n) for n in data["files"] if (folder / n).is_file()}
    manifest.rewrite(folder, data)
    return open_export(folder), names
