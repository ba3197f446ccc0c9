"""One ONNX file examined: its structure by the absorption audit, its behaviour by runs, RoPE and softmax scale measured
and held against a configuration (its own metadata's, or the one given)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from exporter.config import MLAConfig
from validate import doctor_angles, doctor_behaviour, doctor_rotation, doctor_scale
from validate.absorption import Verdict, judge
from validate.absorption_checks import Finding as AuditFinding
from validate.absorption_costs import Sizes
from validate.absorption_parts import Attention, Parts
from validate.dataflow import FEW_ROWS, MANY_ROWS, Flow, find_roles
from validate.doctor_ailments import AILMENTS, Finding, Report
from validate.doctor_changes import scale_mistakes
from validate.doctor_patient import CannotRunError, Patient, outside_paths
from validate.graph_shapes import Graph
from validate.references.rope import inverse_frequencies, softmax_scale

FAR = 32768
ANGLES = 3e-5  # radians: a float64 angle's cos and sin in float32 are right to 1e-6, float32 angles off by 2e-3 at 32k
SHARE = 5e-3  # how near a measured scale is to the formula that explains it


@dataclass(frozen=True)
class Subject:
    """A graph to examine. `config` and `max_context` as the graph or its export say, or the command; `own`: a graph of
    this toolkit, whose columns are in the source's order; `handed`: weights that lie elsewhere."""

    path: Path
    config: MLAConfig | None = None
    max_context: int | None = None
    own: bool = False
    handed: Mapping[str, Path] | None = None


def structure(subject: Subject, report: Report) -> bool:
    """What a file says without being run: places of weights, cache and dataflow. Whether its weights may be read."""
    name = subject.path.name
    outside = outside_paths(subject.path)
    if outside:
        report.add([AILMENTS["path-outside"].found(f"{len(outside)} locations, such as {outside[0]!r}", where=name)])
    verdict = judge(subject.path, sizes=_sizes(subject.config))
    report.see(f"{name}: what is cached and attended, by shapes and dataflow")
    report.add(_of_audit(f, name) for f in verdict.findings)
    report.add(_branches(subject.path, verdict))
    return not outside


def examine(subject: Subject, report: Report, seed: int, progress: Callable[..., None]) -> None:
    """Everything that one file can be asked."""
    name = subject.path.name
    if not structure(subject, report):
        report.skip(f"{name}: runs", "its weights lie outside its folder, and are not read")
        return
    progress(name)
    graph = Graph(subject.path)
    roles = find_roles(graph)
    try:
        patient = Patient(subject.path, graph, roles, subject.handed)
        doctor_behaviour.examine(patient, report, seed)
    except CannotRunError as error:
        report.skip(f"{name}: runs (stale rows, empty and ragged batches, chunks, RoPE, softmax scale)", str(error))
        return
    parts = Parts(Flow(graph, roles, *(graph.shapes(roles.sizes[rows]) for rows in (FEW_ROWS, MANY_ROWS))))
    report.add(_half_scores(patient, parts, name))
    for a in parts.attentions[:1]:  # all attentions of a graph share angles and scale
        try:
            Measured(subject, report, patient, parts, a, seed).examine()
        except (ValueError, IndexError, KeyError, StopIteration) as error:  # a graph that is built otherwise
            report.skip(f"{name}: RoPE and softmax scale", f"not as expected ({type(error).__name__}: {error})")


def _sizes(config: MLAConfig | None) -> Sizes | None:
    return None if config is None else Sizes(config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim,
                                             config.qk_nope_head_dim, config.v_head_dim)


def _of_audit(found: AuditFinding, name: str) -> Finding:
    at = f" ({', '.join(found.nodes[:3])}{', …' if len(found.nodes) > 3 else ''})" if found.nodes else ""
    return AILMENTS[found.code].found(f"attention {found.where}: {found.text}{at}", where=name)


def _branches(path: Path, verdict: Verdict) -> list[Finding]:
    """Products inside an If, a Loop or a Scan, which TensorRT does not build."""
    def products(graph: onnx.GraphProto) -> int:
        return sum((n.op_type in ("MatMul", "Gemm", "Attention", "Softmax"))
                   + sum(products(a.g) for a in n.attribute if a.HasField("g")) for n in graph.node)

    model = onnx.load(path, load_external_data=False)
    found = [(n, sum(products(a.g) for a in n.attribute if a.HasField("g"))) for n in model.graph.node
             if n.op_type in ("If", "Loop", "Scan")]
    return [AILMENTS["attention-in-if"].found(f"{node.name or node.output[0]} ({node.op_type}) has {count} products "
                                              "and softmaxes inside", where=verdict.graph)
            for node, count in found if count]


def _half_scores(patient: Patient, parts: Parts, name: str) -> list[Finding]:
    """Scores in float16 of which the scale comes after the product: how large they are, and what is left to 65504."""
    if not patient.half:
        return []
    for a in parts.attentions:
        for p in a.scores:
            outside = doctor_scale.behind(parts.graph, p.node.outputs[0])
            if outside < 0.5:
                return [AILMENTS["unscaled-scores"].found(
                    f"{p.node.name}: float16 scores are multiplied by {outside:.4g} behind the product, so they are "
                    f"{1 / outside:.3g} times what the softmax sees: 65504 is reached at {65504 * outside:.4g}",
                    where=name)]
    return []


class Measured:
    """RoPE and softmax scale of one attention, against the configuration."""

    def __init__(self, subject: Subject, report: Report, patient: Patient, parts: Parts, a: Attention, seed: int
                 ) -> None:
        self.subject, self.report, self.patient, self.parts, self.a = subject, report, patient, parts, a
        self.name, self.config = subject.path.name, subject.config
        self.rng = np.random.default_rng([seed, 17])
        self.rotary = self._rotary()

    def _rotary(self) -> int | None:
        if self.config is not None:
            return self.config.qk_rope_head_dim
        pieces = [p for written in self.a.written.values() for p in written if p.turned_by]
        cached = sum(int(self.parts.flow.width(c.name) or 0) for c in self.a.caches)
        others = cached - sum(stop - start for _, start, stop in self.a.latent) if self.a.latent else 0
        return sum(p.width for p in pieces) or (others if others > 0 and others % 2 == 0 else None)

    def examine(self) -> None:
        """What can be measured; the rest is said."""
        if self.config is not None and self.config.rope.rope_type == "none":
            self.report.skip(f"{self.name}: RoPE", "the configuration has none (NoPE)")
            return
        if self.rotary is None:
            self.report.skip(f"{self.name}: RoPE and softmax scale", "the rotation of the key was not found")
            return
        turned = doctor_rotation.rotations(self.parts, self.a, self.rotary)
        angles = {side: found for side in ("key", "query")
                  if (found := self._angles(side, turned.get(side, []), self.rotary)) is not None}
        self._layouts(angles)
        if "key" in angles:
            self._frequencies(angles["key"], self.rotary)
        if "query" in angles:
            self._scale(angles["query"].turned, self.rotary)
        else:
            self.report.skip(f"{self.name}: softmax scale", "no rotation of the query to hold scores against")

    def _angles(self, side: str, candidates: list[doctor_angles.Turned], rotary: int) -> doctor_angles.Angles | None:
        """The first of them that is a rotation; what else was seen is said."""
        why = f"the rotation of the {side} was not found"
        for turned in candidates:
            try:
                found = doctor_angles.measure(self.patient, turned, self.rng, rotary)
            except CannotRunError as error:
                why = str(error)
                continue
            if found is not None:
                return found
            why = f"{turned.node} turns neither pairs nor halves"
        self.report.skip(f"{self.name}: RoPE of the {side}", why)
        return None

    def _layouts(self, angles: dict[str, doctor_angles.Angles]) -> None:
        """Key and query alike, and as the configuration says."""
        key, query = angles.get("key"), angles.get("query")
        if key is not None and query is not None and (key.layout, key.out) != (query.layout, query.out):
            self.report.add([AILMENTS["key-only-deinterleaved"].found(
                f"{key.turned.node} turns {key.layout} of the key, {query.turned.node} {query.layout} of the query",
                where=self.name)])
            return
        if key is None or self.config is None:
            return
        self.report.see(f"{self.name}: RoPE's layout, measured")
        if key.layout != self.config.rope_layout:
            evidence = (f"{key.turned.node} turns {key.layout} (left over under any other pairing), the configuration "
                        f"says {self.config.rope_layout}")
            if self.subject.own:
                self.report.add([AILMENTS["rope-layout"].found(evidence, where=self.name)])
            else:
                self.report.add([AILMENTS["rope-layout"].found(
                    f"{evidence}; right only if the exporter sorted the rotary rows of q and kv_a", where=self.name,
                    severity="remark")])

    def _frequencies(self, key: doctor_angles.Angles, rotary: int) -> None:
        """Radians per position, the factor, and both far out."""
        if self.config is None:
            self.report.skip(f"{self.name}: RoPE's frequencies and softmax scale",
                             "no configuration to hold them against; give --config config.json")
            return
        context = self.subject.max_context or self.config.max_position_embeddings
        right, factor = inverse_frequencies(self.config, context)
        self.report.see(f"{self.name}: RoPE's frequencies and factor, measured")
        off = _off(key.inv_freq, right.numpy(), key.noise)
        if off > SHARE:
            self._wrong_frequencies(key, off, context)
        if abs(key.factor / factor - 1) > SHARE:
            name = "rope-factor-twice" if key.factor > factor else "rope-factor-dropped"
            self.report.add([AILMENTS[name].found(
                f"{key.turned.node}: cos and sin carry {key.factor:.4f}; expected {factor:.4f}", where=self.name)])
        if off <= SHARE:
            self._far(key, rotary, right.numpy(), context)

    def _wrong_frequencies(self, key: doctor_angles.Angles, off: float, context: int) -> None:
        assert self.config is not None
        for name, (words, wrong) in doctor_angles.frequency_mistakes(self.config, context).items():
            if _off(key.inv_freq, wrong, key.noise) <= SHARE:
                self.report.add([AILMENTS[name].found(f"{key.turned.node}: the frequencies are {words}; those of the "
                                                      f"configuration are off by up to {off:.2g}", where=self.name)])
                return
        self.report.add([AILMENTS["rope-frequencies"].found(
            f"{key.turned.node}: radians per position {_short(key.inv_freq)}, off by up to {off:.2g} of what the "
            "configuration says", where=self.name)])

    def _far(self, key: doctor_angles.Angles, rotary: int, right: np.ndarray, context: int) -> None:
        """The angle far out, and at the last position of the declared context."""
        if not self.patient.sets_positions or self.patient.fixed_rows is not None:
            self.report.skip(f"{self.name}: RoPE far out", "positions follow from the number of rows")
            return
        for position in sorted({min(FAR, context - 1), context - 1}):
            try:
                error = doctor_angles.angle_error(self.patient, key, self.rng, rotary, position, right)
            except CannotRunError as problem:
                self._short_table(position, context, f"{problem}")
                return
            if error > 0.5 or not np.isfinite(error):
                self._short_table(position, context, f"the angle is off by {error:.2f} radians")
                return
            self.report.see(f"{self.name}: RoPE's angle at position {position}, off by {error:.0e} radians")
            if error > ANGLES + key.noise:
                self.report.add([AILMENTS["float32-angles"].found(
                    f"{key.turned.node}: at position {position} angles are off by up to {error:.1e} radians",
                    where=self.name, severity=None if self.subject.own else "remark")])
                return

    def _short_table(self, position: int, context: int, what: str) -> None:
        severity = None if self.subject.own else "remark"
        self.report.add([AILMENTS["rope-table-short"].found(
            f"position {position} of a context of {context}: {what}", where=self.name, severity=severity)])

    def _scale(self, query: doctor_angles.Turned, rotary: int) -> None:
        try:
            found = doctor_scale.measure(self.patient, self.parts, self.a, query, rotary, self.rng)
        except CannotRunError as error:
            self.report.skip(f"{self.name}: softmax scale", str(error))
            return
        if self.config is None:
            return
        self.report.see(f"{self.name}: softmax scale of the rotary half, measured at {found.node}")
        context = self.subject.max_context or self.config.max_position_embeddings
        factor = inverse_frequencies(self.config, context)[1]
        right = softmax_scale(self.config)
        if abs(found.value / (right * factor) - 1) <= SHARE:
            return
        evidence = f"{found.node}: the scores' scale is {found.value:.5f}; expected {right * factor:.5f}"
        for name, (words, wrong) in scale_mistakes(self.config).items():
            if abs(found.value / (wrong * factor) - 1) <= SHARE:
                folded = name == "scale-missing" and not self.subject.own  # weights do not tell what is in them
                words += ": right only if the exporter put it into the query's weights" if folded else ""
                self.report.add([AILMENTS[name.partition(":")[0]].found(f"{evidence}; it is {words}",
                                                                        where=self.name)])
                return
        self.report.add([AILMENTS["scale-wrong"].found(evidence, where=self.name)])


def _off(found: np.ndarray, wanted: np.ndarray, noise: float) -> float:
    """Largest error of frequencies, less what noise explains, relative to each, but to no less than a thousandth of a
    radian per position."""
    error = np.maximum(np.abs(found - wanted) - noise, 0)
    return float((error / np.maximum(np.abs(wanted), 1e-3)).max())


def _short(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{v:.4g}" for v in values[:3]) + (", …]" if len(values) > 3 else "]")
