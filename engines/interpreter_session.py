"""The rounding interpreter behind the session contract: what the graph itself says, at its declared dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from engines.interpreter import Interpreter
from engines.session import Feed, Outputs, Session, into_caches, require_weights_beside
from exporter.manifest import Export, GraphEntry


class InterpreterSession(Session):
    """A graph evaluated node by node in torch, every tensor rounded to its dtype. Slow, and the judge of fp16, bf16."""

    def __init__(self, export: Export, graph: GraphEntry) -> None:
        super().__init__(export, graph)
        require_weights_beside(export, "the interpreter")
        self._interpreter = Interpreter(export.folder / graph.file)

    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        return into_caches(feed, self._interpreter.run(feed))
