"""The sessions that generate with a whole-model export: its prefill and its decode graph, one session if it can be."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING

from engines.backends import backend as find_backend
from engines.backends import default_graph, open_session
from engines.memory import Memory
from engines.session import Session
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

if TYPE_CHECKING:
    from engines.trt_runtime import LoadOptions


class ModelSessions:
    """Sessions of a model by kind, opened by `open`. A context manager.

    `threads` 0 leaves the choice to ONNX Runtime. `formulation` is the decode graph's, and the prefill's where it has
    one of that name. `load`: how a GPU's backend loads them. What cannot be is an InputError before anything opens.
    """

    def __init__(self, export: Export, backend: str = "ort", threads: int = 0, formulation: str | None = None,
                 load: LoadOptions | None = None) -> None:
        require_model(export)
        if load is not None:
            load.check(find_backend(backend).name)
        if threads < 0:
            raise InputError(f"--threads {threads}: expected 0 (ONNX Runtime chooses) or a number of threads")
        if threads and find_backend(backend).name not in ("ort", "ort-cuda"):
            raise InputError(f"--threads {threads} with --backend {backend}: only ort and ort-cuda have threads to "
                             "set; leave --threads out")
        self.export = export
        self._backend, self._threads, self._formulation, self._load = backend, threads, formulation, load
        decode = export.graph("decode", formulation) if formulation else default_graph(export, "decode", backend)
        if not {"input_ids", "logits"} <= {spec.name for spec in (*decode.inputs, *decode.outputs)}:
            ends = f"{decode.inputs[0].name} to {decode.outputs[0].name}"
            raise InputError(f"{export.folder}: {decode.name} goes from {ends}; expected input_ids to logits, a whole "
                             "model and not some of its layers; export it again without --layers")
        self._sessions: dict[str, Session] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ModelSessions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def __getitem__(self, kind: str) -> Session:
        return self._sessions[kind]

    @property
    def memory(self) -> Memory:
        """Where the cache of these sessions should lie, once they are open."""
        return self._sessions["decode"].memory

    def open(self) -> None:
        """Open both; nothing where they are."""
        if self._sessions:
            return
        self._sessions["prefill"] = self._stack.enter_context(self._open("prefill"))
        self._sessions["decode"] = self._sessions["prefill"] if self._one_session() else (
            self._stack.enter_context(self._open("decode")))

    def _one_session(self) -> bool:
        """Whether the prefill's session decodes as well: the same mathematics, half the weights in memory. TensorRT's
        engines are planned for their number of tokens and stay apart."""
        graphs = [self._graph(kind) for kind in ("prefill", "decode")]
        return graphs[0].formulation == graphs[1].formulation and not find_backend(self._backend).tensorrt

    def _graph(self, kind: str) -> GraphEntry:
        has = any(g.kind == kind and g.formulation == self._formulation for g in self.export.graphs)
        return self.export.graph(kind, self._formulation if has else None)

    def _open(self, kind: str) -> Session:
        if not self._threads:
            formulation = self._formulation if self._graph(kind).formulation == self._formulation else None
            return open_session(self.export, kind, self._backend, formulation, self._load)
        from engines.ort import OrtOptions, OrtSession
        from engines.ort_cuda import CudaOrtSession

        options = OrtOptions(threads=self._threads)
        if self._backend == "ort":
            return OrtSession(self.export, self._graph(kind), options)
        return CudaOrtSession(self.export, self._graph(kind), options, self._load is None or self._load.cuda_graphs)


def require_model(export: Export) -> None:
    """InputError unless the export holds a whole model."""
    if export.data.get("contract") != "model":
        raise InputError(f"{export.folder}: holds one attention, not a model; export with --scope model")


def check_prompt(prompt: tuple[int, ...] | list[int], which: str, vocabulary: int) -> None:
    """InputError for a prompt without tokens, or with one that the model does not have."""
    if not prompt:
        raise InputError(f"{which} has no tokens; expected at least one")
    wrong = [token for token in prompt if not 0 <= token < vocabulary]
    if wrong:
        raise InputError(f"{which} holds token {wrong[0]}; expected 0 to {vocabulary - 1}, the model's vocabulary (is "
                         "this tokenizer the model's?)")
