"""The session contract: every runtime runs a graph through `infer(feed) -> outputs`, behind one input check.

`open_session` is the door: it picks the backend's session from `engines.backends` and hands it a checked graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from engines.device_memory import DeviceArray
from engines.memory import HOST, Memory
from exporter.dtypes import NUMPY_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export, GraphEntry

Feed = Mapping[str, np.ndarray]
Outputs = dict[str, np.ndarray]


class Session(ABC):
    """One opened graph. A context manager; not safe for concurrent `infer` calls (open one per thread).

    `memory`: where a cache for its steps should lie. A session on a GPU takes NumPy arrays too, and uploads them.
    """

    memory: Memory = HOST

    def __init__(self, export: Export, graph: GraphEntry) -> None:
        self.export, self.graph = export, graph

    def infer(self, feed: Feed, out: Feed | None = None) -> Outputs:
        """Run one step. `feed` holds every input by name; outputs come back by name.

        `out`: arrays that some outputs are written into, and come back as: a server's step then allocates nothing.
        Arrays of `memory`, where that is a GPU's, stay there, in a feed and in `out`; other outputs come to the host.
        In the scatter form `latent_cache.{i}` is updated in place and returned as `latent_cache_out.{i}`.
        A feed, or an `out`, that breaks the contract is an InputError.
        """
        sizes = check_feed(self.export, self.graph, feed)
        if self.memory is HOST:
            _require_host(self.graph, {**feed, **(out or {})})
        if not out:
            return self._run(feed, sizes)
        check_out(self.graph, out, sizes)
        return self._run_into(feed, sizes, out)

    @abstractmethod
    def _run(self, feed: Feed, sizes: Mapping[str, int]) -> Outputs:
        """Run a checked feed; `sizes` gives B, T and S."""

    def _run_into(self, feed: Feed, sizes: Mapping[str, int], out: Feed) -> Outputs:
        """The same with places for outputs; here a copy behind `_run`, for runtimes that make their own arrays."""
        outputs = self._run(feed, sizes)
        for name, array in out.items():
            array[...] = outputs[name]
        return {**outputs, **out}

    def close(self) -> None:  # noqa: B027  (most sessions hold nothing)
        """Free what the session holds."""

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _require_host(graph: GraphEntry, arrays: Feed) -> None:
    for name, array in arrays.items():
        if isinstance(array, DeviceArray):
            raise InputError(f"{graph.name}: {name} lies on the GPU, and this session runs on the host; expected a "
                             "NumPy array (a cache for a session lies in the session's `memory`)")


def external_places(export: Export) -> dict[str, Path]:
    """Weight files that a graph names and its folder does not hold: location in the graph -> where the file really is.

    Empty for most exports. InputError for one without weights (`--weights none`).
    """
    weights = export.data["weights"]
    if weights.get("mode") == "none":
        raise InputError(f"{export.folder}: exported with --weights none, its graphs have no weights to run with; "
                         "export with --weights copy or link")
    return {name: Path(record["path"]) for name, record in (weights.get("linked") or {}).items()
            if record["how"] == "handed"}


def require_weights_beside(export: Export, who: str) -> None:
    """InputError where weights lie outside the export's folder, or nowhere, for those who read them there alone."""
    for place in external_places(export).values():
        raise InputError(f"{export.folder}: its weights lie in {place}, where {who} does not read them; export with "
                         "--weights copy, or keep export and checkpoint on one file system")


def into_caches(feed: Feed, outputs: Outputs) -> Outputs:
    """Write updated caches over the feed's own arrays and give those: what a runtime that works in place would do."""
    for name, value in outputs.items():
        if name.startswith("latent_cache_out."):
            cache = feed[name.replace("_out", "")]
            cache[...] = value
            outputs[name] = cache
    return outputs


def output_shape(shape: tuple[int | str, ...], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Numbers for a symbolic shape; `S+T` is the sum."""
    return tuple(d if isinstance(d, int) else sum(sizes[s] for s in d.split("+")) for d in shape)


def check_out(graph: GraphEntry, out: Feed, sizes: Mapping[str, int]) -> None:
    """InputError unless every array can take its output as it is: name, dtype, shape, contiguous, writeable."""
    specs = {spec.name: spec for spec in graph.outputs if not spec.name.startswith("latent_cache_out.")}
    for name, array in out.items():
        if name not in specs:
            raise InputError(f"{graph.name}: out has {name}; expected some of {', '.join(specs)}")
        shape, dtype = output_shape(specs[name].shape, sizes), NUMPY_OF_NAME[specs[name].dtype]
        if array.shape != shape or array.dtype != dtype:
            raise InputError(f"{graph.name}: out has {name} {list(array.shape)} of {array.dtype}; expected "
                             f"{list(shape)} of {dtype}")
        if not (array.contiguous if isinstance(array, DeviceArray) else array.flags.c_contiguous and
                array.flags.writeable):
            raise InputError(f"{graph.name}: out has a {name} that is read-only or not contiguous; the runtime writes "
                             "into it as it lies")


def check_feed(export: Export, graph: GraphEntry, feed: Feed) -> dict[str, int]:
    """Check names, dtypes, shapes and lengths against the signature; returns the sizes of B, T and S.

    What the contract asks of the host is checked here for every runtime alike, because a graph cannot: an engine that
    reads rows it was not given does not fail, it answers wrongly.
    """
    names = [t.name for t in graph.inputs]
    if set(feed) != set(names):
        raise InputError(f"{graph.name}: feed has {', '.join(sorted(feed))}; expected {', '.join(names)}")
    sizes: dict[str, int] = {}
    for spec in graph.inputs:
        array, dtype, expected = feed[spec.name], NUMPY_OF_NAME[spec.dtype], f"[{', '.join(map(str, spec.shape))}]"
        if not isinstance(array, np.ndarray if spec.dtype == "int64" else np.ndarray | DeviceArray):
            raise InputError(f"{graph.name}: {spec.name} is a {type(array).__name__}; expected a NumPy array "
                             f"{expected} of {dtype}")
        if array.dtype != dtype:
            raise InputError(f"{graph.name}: {spec.name} has dtype {array.dtype}; expected {dtype}")
        if array.ndim != len(spec.shape):
            raise InputError(f"{graph.name}: {spec.name} has shape {list(array.shape)}; expected {expected}")
        for size, dim in zip(array.shape, spec.shape, strict=True):
            known = sizes.setdefault(dim, size) if isinstance(dim, str) else dim
            if size != known:
                where = f" with {dim} = {known}" if isinstance(dim, str) else ""
                raise InputError(f"{graph.name}: {spec.name} has shape {list(array.shape)}; expected {expected}{where}")
            if size < 1:
                raise InputError(f"{graph.name}: {spec.name} has shape {list(array.shape)}; every size must be at "
                                 "least 1 (an empty past is S = 1 with length 0)")
    if sizes["T"] > export.max_context:
        raise InputError(f"{graph.name}: {sizes['T']} new tokens; this export takes up to {export.max_context}; use "
                         "smaller chunks or export again with a larger --max-context")
    if "past_lengths" in feed:
        _check_lengths(export, graph, feed, sizes)
    if "input_ids" in feed:
        _check_range(graph, "input_ids", feed["input_ids"], export.decoder.vocab_size - 1, "the vocabulary's ids")
    if "last_token" in feed:
        _check_range(graph, "last_token", feed["last_token"], sizes["T"] - 1, "an index into the T new tokens")
    for name in names:
        if not name.startswith("latent_cache.") or isinstance(feed[name], DeviceArray):
            continue
        if not feed[name].flags.writeable:
            raise InputError(f"{graph.name}: {name} is read-only; it is updated in place")
    return sizes


def _check_range(graph: GraphEntry, name: str, values: np.ndarray, most: int, what: str) -> None:
    """A gather past the end fails in one runtime and reads other memory in the next."""
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > most:
        raise InputError(f"{graph.name}: {name} reaches from {low} to {high}; expected 0 to {most}, {what}")


def _check_lengths(export: Export, graph: GraphEntry, feed: Feed, sizes: dict[str, int]) -> None:
    lengths = feed["past_lengths"]
    rows = sizes.get("S", export.max_context)
    low, high = int(lengths.min()), int(lengths.max())
    if low < 0 or high > rows:
        raise InputError(
            f"{graph.name}: past_lengths {lengths.tolist()}; expected 0 to {rows}, the rows of past offered"
        )
    if high > export.max_context:
        raise InputError(f"{graph.name}: {high} past rows; this export takes up to {export.max_context}; export again "
                         "with a larger --max-context")
    if export.cache == "scatter" and high + sizes["T"] > export.max_context:
        raise InputError(f"{graph.name}: {high} rows and {sizes['T']} new tokens exceed S_max {export.max_context}; "
                         "prefill in smaller chunks or export with a larger --max-context")
    if export.cache == "concat" and not (low == high and high in (0 if rows == 1 else rows, rows)):
        raise InputError(
            f"{graph.name}: past_lengths {lengths.tolist()} with S = {rows}; the concat form joins new rows "
            "at S, so every length must be S (or 0 with S = 1); use the append form for ragged batches"
        )
