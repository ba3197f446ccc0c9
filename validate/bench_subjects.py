"""What the suites of whole models share: one checkpoint, our exports of it, the peers, and answers compared."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engines import operator_library
from engines.measure import available_memory
from exporter.decoder_config import DecoderConfig
from exporter.errors import CheckError, InputError
from exporter.export import ExportRequest, export
from exporter.manifest import Export, GraphEntry
from exporter.quantise import schemes_of
from validate import llama_peer, mobius_peer
from validate.bench_timing import Progress, quiet
from validate.metrics import compare
from validate.peers import EQUAL, US, AbsentError, ModelShape, Ours, Subject, Transformers, installed
from validate.synthetic import named_config, write_checkpoint

PROMPT, FOLLOW = 24, 6  # real tokens of the comparison
NAMED = "v3-class"
LEAST_CONTEXT = 1536  # rows that our exports take where the model has the positions: a ragged batch needs them


@dataclass(frozen=True)
class Variant:
    """One way to export the model: what is told to the export beyond defaults, and how far its logits may be from
    those of the weights as they are."""

    label: str
    options: Mapping[str, Any] = field(default_factory=dict)
    quantise: str | None = None
    tolerance: float = EQUAL


PLAIN, FUSED = Variant(""), "--fused-decode"
# codes round every weight; two models with nothing in common are 6 and more apart
QUANTISED_TOLERANCE = {"int8": 0.2, "int4": 2.0}


def variants(quantise: Sequence[str]) -> tuple[Variant, ...]:
    """The weights as they are, and each scheme that was asked for."""
    for scheme in quantise:
        if scheme not in (known := schemes_of("ort")):
            raise InputError(f"--quantise {scheme}: expected one of {', '.join(known)}, ONNX Runtime's own")
    return (PLAIN, *(Variant(s, {"quantise": s}, s, QUANTISED_TOLERANCE[s]) for s in quantise))


@dataclass(frozen=True)
class Peer:
    """A row of PEERS: how a peer is opened over the workplace's checkpoint, once or in each of its variants."""

    name: str
    open: Callable[[Workplace], Sequence[Subject]]


@dataclass
class Workplace:
    """One checkpoint and what was made of it in this run. `absent`: peers that are not to be had, and why."""

    folder: Path
    work: Path
    shape: ModelShape
    decoder: DecoderConfig
    threads: int
    max_context: int
    variants: Sequence[Variant] = (PLAIN,)
    absent: dict[str, str] = field(default_factory=dict)
    mobius_python: Path | None = None
    progress: Progress = quiet
    _exports: dict[tuple[str, str], Export] = field(default_factory=dict)
    mobius_graph: Path | None = None
    llama_python: Path | None = None

    def decoding(self) -> tuple[Variant, ...]:
        """The variants, each followed by itself with the operator that decodes in one pass, where its library is."""
        if missing := operator_library.missing():
            self.absent[f"{US} {FUSED}"] = missing
            return tuple(self.variants)
        return tuple(way for v in self.variants for way in (
            v, replace(v, label=f"{v.label} {FUSED}".strip(), options={**v.options, "fused_decode": True})))

    def ours(self, variant: Variant = PLAIN, prefill: str = "absorbed") -> Export:
        """An export of ours with linked weights where it can be, made once."""
        key = variant.label, prefill
        if key not in self._exports:
            self.progress(f"exporting: {US} {variant.label or prefill}")
            options: dict[str, Any] = {"scope": "model", "max_context": self.max_context, "prefill": prefill,
                                       "weights": "copy" if variant.quantise else "link", **variant.options}
            out = self.work / f"ours-{variant.label or 'plain'}-{prefill}"
            self._exports[key] = export(ExportRequest(str(self.folder), out, **options))
        return self._exports[key]

    def mobius(self) -> Subject:
        """mobius-onnx's graph of the checkpoint, built once. AbsentError where it cannot be."""
        if self.mobius_python is None:
            raise AbsentError("is not installed")
        if self.mobius_graph is None:
            self.progress(f"exporting: {mobius_peer.NAME}")
            mobius_peer.build(self.mobius_python, self.folder, self.work / "mobius")
            self.mobius_graph = self.work / "mobius" / "model.onnx"
        return mobius_peer.Mobius(self.folder, self.mobius_graph, self.threads)

    def llama(self) -> Sequence[Subject]:
        """llama.cpp in its variants, over GGUF files written once. AbsentError where it cannot be."""
        if self.llama_python is None:
            raise AbsentError("is not installed")
        chosen = llama_peer.variants([v.quantise for v in self.variants if v.quantise])
        return llama_peer.subjects(self.llama_python, self.folder, self.work, self.threads, chosen, self.progress)


PEERS = (Peer(mobius_peer.NAME, lambda place: [place.mobius()]),
         Peer(llama_peer.NAME, lambda place: place.llama()),
         Peer(Transformers.name, lambda place: [Transformers(place.folder, place.threads)]))


def default_checkpoint(folder: Path, progress: Progress = quiet) -> Path:
    """The v3-class checkpoint in `folder`, written on first use."""
    if not (folder / "config.json").is_file():
        dtype, config = named_config(NAMED)
        write_checkpoint(folder, config, dtype, progress=progress)
    return folder


@contextmanager
def workplace(checkpoint: Path | None, threads: int, rows: int, *, quantise: Sequence[str] = (),
              skip: Sequence[str] = (), peers: Path = mobius_peer.DEFAULT_CACHE, progress: Progress = quiet,
              ) -> Iterator[Workplace]:
    """`checkpoint` (default: the v3-class one, made under build/bench) opened for `rows` of past; what is made of it
    goes when the block ends. `skip` names peers to leave out; `peers`: where their environments are kept."""
    known = [peer.name for peer in PEERS]
    if unknown := sorted(set(skip) - set(known)):
        raise InputError(f"--skip {unknown[0]!r}: expected one of {', '.join(known)}")
    chosen = variants(quantise)
    from exporter.source import open_model

    folder = (checkpoint or default_checkpoint(Path("build") / "bench" / NAMED, progress)).absolute()
    shape = ModelShape.of(folder)
    if (most := max(rows, PROMPT + FOLLOW)) >= shape.positions:
        raise InputError(f"{folder.name}: max_position_embeddings is {shape.positions}; a step at {most} rows is "
                         "beyond it, choose shorter contexts")
    decoder, absent = open_model(str(folder), weights=False).decoder, dict.fromkeys(skip, "skipped")
    pythons: dict[str, Path] = {}
    for name, install in ((mobius_peer.NAME, mobius_peer.install), (llama_peer.NAME, llama_peer.install)):
        if name not in absent:
            try:
                pythons[name] = install(peers, progress)
            except AbsentError as why:
                absent[name] = str(why)
    beside = folder.parent if os.access(folder.parent, os.W_OK) else None  # hard links need the same file system
    with tempfile.TemporaryDirectory(prefix=".mla-bench-", dir=beside) as temporary:
        context = max(most, min(LEAST_CONTEXT, shape.positions - 1))
        yield Workplace(folder, Path(temporary), shape, decoder, threads, context, chosen, absent,
                        pythons.get(mobius_peer.NAME), progress, llama_python=pythons.get(llama_peer.NAME))


@contextmanager
def opened(place: Workplace, openers: Sequence[Callable[[], Ours]]) -> Iterator[list[Subject]]:
    """Our subjects and then the peers, closed when the block ends; a peer that cannot be opened is absent."""
    found: list[Subject] = []
    try:
        for opener in openers:
            found.append(opener())
        for peer in PEERS:
            if peer.name in place.absent:
                continue
            place.progress(f"opening {peer.name}")
            try:
                found += peer.open(place)
            except AbsentError as why:
                place.absent[peer.name] = str(why)
            except Exception as error:  # a peer that cannot take this model is no failure of the benchmark
                place.absent[peer.name] = f"cannot open it: {one_line(error)}"
        yield found
    finally:
        for subject in found:
            subject.close()


def open_ours(place: Workplace, made: Export, graph: GraphEntry, variant: Variant = PLAIN,
              profile: Path | None = None) -> Ours:
    """One graph of ours; `profile` as in `OrtOptions`."""
    place.progress(f"opening {graph.name}")
    subject = Ours(made, graph, place.threads, place.shape, variant.label, profile)
    subject.quantise, subject.tolerance = variant.quantise, variant.tolerance
    return subject


def one_line(error: Exception) -> str:
    """An exception's words."""
    return " ".join(str(error).split())[:200] or type(error).__name__


@dataclass(frozen=True)
class Compared:
    """How far an answer was from the reference's, and whether it was equal to it."""

    rel: float | None
    equal: bool


def ask(subjects: Mapping[str, Subject], ours: Sequence[str], question: Callable[[Subject], np.ndarray],
        ) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """What subjects answer, and why peers did not: one that fails is no failure of the benchmark."""
    answers, failed = {}, {}
    for name, subject in subjects.items():
        try:
            answers[name] = question(subject).copy()  # some write the next logits over these
        except Exception as error:
            if name in ours:
                raise
            failed[name] = f"failed: {one_line(error)}"
    return answers, failed


def judge(answers: Mapping[str, np.ndarray], subjects: Mapping[str, Subject], ours: Sequence[str], where: str,
          ) -> tuple[dict[str, Compared], dict[str, str]]:
    """Compare all answers with a reference (transformers, else our default graph), and say why some are out.

    A peer that answers otherwise is left out with the reason; ours answering otherwise is a CheckError.
    """
    reference = Transformers.name if Transformers.name in answers else ours[0]
    found, out = {}, {}
    for name, answer in answers.items():
        expected, tolerance = answers[reference], subjects[name].tolerance
        rel, same = compare(answer, expected).rel, bool((answer.argmax(-1) == expected.argmax(-1)).all())
        found[name] = Compared(rel, rel <= EQUAL and same)
        if rel <= tolerance and (same or tolerance > EQUAL):
            continue
        why = (f"logits differ from {reference}'s {where}: rel {rel:.1e}"
               + ("" if same else ", other tokens chosen") + "; not timed")
        if name in ours:
            raise CheckError(f"{name}: {why}")
        out[name] = why
    return found, out


def compare_on_tokens(subjects: Sequence[Subject], ours: Sequence[str], shape: ModelShape, not_run: list[str],
                      ) -> dict[str, Compared]:
    """How each subject that may be timed answers one sequence of real tokens; the others go to `not_run`."""
    rng = np.random.default_rng(0)
    prompt, follow = (rng.integers(0, shape.vocabulary, (1, n)) for n in (PROMPT, FOLLOW))
    named = {s.name: s for s in subjects}
    answers, failed = ask(named, ours, lambda s: s.generate(prompt, follow))
    found, different = judge(answers, named, ours, f"on {PROMPT} + {FOLLOW} tokens")
    not_run += [f"{name}: {why}" for name, why in (failed | different).items()]
    return {name: compared for name, compared in found.items() if name not in different}


def too_much(need_bytes: float) -> str | None:
    """Why something that needs so much memory is not run."""
    have = available_memory() - (1 << 30)
    return f"needs {need_bytes / 1e9:.1f} GB, {max(0, have) / 1e9:.1f} GB are free" if need_bytes > have else None


def versions(absent: Mapping[str, str]) -> dict[str, str]:
    """The peers that ran, by version."""
    found = {mobius_peer.NAME: mobius_peer.PACKAGE.partition("==")[2],
             llama_peer.NAME: llama_peer.PACKAGE, Transformers.name: installed("transformers")}
    return {name: version for name, version in found.items() if name not in absent and version}
