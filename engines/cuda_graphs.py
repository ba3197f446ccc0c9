"""CUDA graphs: which steps are worth one, and how a step of a TensorRT engine is captured, checked and replayed.

A graph is of fixed shapes and addresses. A step of few tokens that comes for the second time with the same ones is
captured. A capture that goes wrong, or whose first replay does, costs the graphs and not the answer: steps then run as
they did before, and the reason is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

FEW = 8  # new tokens of a sequence up to which a step is captured: more are computing, and launches hide behind that
SEEN = 256  # bindings that are remembered without being captured
MOST = 16  # graphs of a session, each with a context


class Repeats:
    """The latest bindings that came by."""

    def __init__(self) -> None:
        self._seen: OrderedDict[Hashable, None] = OrderedDict()

    def again(self, key: Hashable) -> bool:
        """Whether a binding was here before; it is from now on."""
        found = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > SEEN:
            self._seen.popitem(last=False)
        return found


@dataclass(frozen=True)
class Binding:
    """Shapes of a step's inputs and addresses of all its inputs and outputs, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    addresses: Mapping[str, int]

    @property
    def key(self) -> Hashable:
        """What tells it from others."""
        return tuple(self.shapes.items()), tuple(self.addresses.items())


class CapturedSteps:
    """Graphs of an engine's steps, each with a context of its own: a graph refers to what its context held.

    `context` makes one; `enqueue` binds a step to a context and puts it on `stream`; `outputs` gives, on the device,
    the bytes that the host reads of it, by which a replay is compared. The least recently used of more than MOST graphs
    goes. `refused`: why there are no graphs; None as long as there may be some.
    """

    def __init__(self, torch: Any, stream: Any, context: Callable[[], Any], enqueue: Callable[[Any, Binding], None],
                 outputs: Callable[[], Any], refused: str | None = None) -> None:
        self._torch, self._stream, self._context, self._enqueue = torch, stream, context, enqueue
        self._outputs, self.refused = outputs, refused
        self._repeats = Repeats()
        self._graphs: OrderedDict[Hashable, tuple[Any, Any]] = OrderedDict()  # graph and context

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, binding: Binding) -> bool:
        """Put a step on the stream by its graph, or in making one; False where the caller has to."""
        if self.refused is not None:
            return False
        key = binding.key  # hundreds of names: made once a step
        if key in self._graphs:
            self._graphs.move_to_end(key)
            with self._torch.cuda.stream(self._stream):
                self._graphs[key][0].replay()
            return True
        if not self._repeats.again(key):
            return False
        try:
            self._graphs[key] = self._captured(binding)
        except Exception as error:  # whatever TensorRT and CUDA make of it
            self._graphs.clear()
            self.refused = f"capture: {error}".splitlines()[0]
            return False
        if len(self._graphs) > MOST:
            self._graphs.popitem(last=False)
        return True

    def clear(self) -> None:
        """Free graphs and contexts."""
        self._graphs.clear()

    def _captured(self, binding: Binding) -> tuple[Any, Any]:
        """The step run once as it is, which TensorRT wants before a capture; then captured, replayed and compared."""
        context, graph = self._context(), self._torch.cuda.CUDAGraph()
        self._enqueue(context, binding)
        with self._torch.cuda.stream(self._stream):
            expected = self._outputs().clone()
            self._stream.synchronize()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._enqueue(context, binding)
            finally:
                graph.capture_end()
            graph.replay()
            if not self._torch.equal(expected, self._outputs()):
                raise RuntimeError("a replay gives other numbers than the step did")
        return graph, context
