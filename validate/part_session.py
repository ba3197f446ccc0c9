"""One cut part of a graph, running: its weights mapped where they lie, its other inputs made up from a step's sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from engines.session import external_places
from exporter.dtypes import DTYPES
from exporter.errors import InputError
from exporter.manifest import Export
from validate.quantised_weights import scheme_of

SMALL = 64 << 20  # bytes of weights below which threads cost more than they bring
RunPart = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]


def runtime_of(made: Export) -> str:
    """ONNX Runtime where it can judge, the interpreter for 16 bits and for weights in codes. InputError where there
    are no weights that it could read."""
    places = external_places(made)
    if made.dtype == "fp32" and scheme_of(made) is None:
        return "ort"
    if places:
        raise InputError(f"{made.folder}: the interpreter, which judges {made.dtype}, reads no weights outside the "
                         f"folder, and these lie in {next(iter(places.values()))}; export with --weights copy")
    return "interpreter"


@dataclass(frozen=True)
class Run:
    """A step that a part is run with: `tokens` [B, T], which of all tokens are new, behind `past` rows each."""

    tokens: np.ndarray
    past: int = 0

    def feed(self, made: Export, names: Sequence[str], attention: int, rows: np.ndarray | None
             ) -> dict[str, np.ndarray]:
        """Every input among `names` but the stream: `rows` [B, past, R] for the attention, zeros where only the size
        is read."""
        (B, T), dtype, R = self.tokens.shape, DTYPES[made.dtype].numpy, made.config.row_dim
        fed: dict[str, np.ndarray] = {}
        for name in names:
            part, _, index = name.partition(".")
            if name == "past_lengths":
                fed[name] = np.full(B, self.past, np.int64)
            elif name == "input_ids":
                fed[name] = np.zeros((B, T), np.int64)
            elif name == "last_token":
                fed[name] = self.last
            elif name == "hidden_states":
                fed[name] = np.zeros((B, T, made.config.hidden_size), dtype)
            elif part in ("past_latent", "latent_cache"):
                cache = np.zeros((B, made.max_context if part == "latent_cache" else max(1, self.past), R), dtype)
                if rows is not None and int(index) == attention:
                    cache[:, :self.past] = rows
                fed[name] = cache[:, None] if part == "latent_cache" else cache
        return fed

    @property
    def last(self) -> np.ndarray:
        """[B]: an index into the new tokens, another for every sequence."""
        B, T = self.tokens.shape
        chosen: np.ndarray = np.maximum(T - 1 - 2 * np.arange(B), 0)
        return chosen

    def new_rows(self, output: np.ndarray) -> np.ndarray:
        """The new rows [B * T, R] in the output that holds them, of any cache form."""
        B, T = self.tokens.shape
        rows: np.ndarray = output[:, 0, self.past:self.past + T] if output.ndim == 4 else output[:, -T:]
        return rows.reshape(B * T, -1)


class PartSession:
    """A cut part in `runtime` (`ort` or `interpreter`). A context manager; its weights go with it."""

    def __init__(self, made: Export, part: onnx.ModelProto, runtime: str) -> None:
        self.names = [i.name for i in part.graph.input]
        self._run = _ort(made, part) if runtime == "ort" else _interpreter(made, part)

    def run(self, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The part's outputs by name."""
        return self._run(feed)

    def __enter__(self) -> PartSession:
        return self

    def __exit__(self, *error: object) -> None:
        del self._run


def _ort(made: Export, part: onnx.ModelProto) -> RunPart:
    import onnxruntime as ort

    from engines import operator_library
    from engines.ort import CPU, hand_over

    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    stored = sum(int(e.value) for t in part.graph.initializer for e in t.external_data if e.key == "length")
    settings.intra_op_num_threads = 1 if stored < SMALL else 0
    locations = {e.value for t in part.graph.initializer for e in t.external_data if e.key == "location"}
    places = {name: made.folder / name for name in locations} | external_places(made)
    operator_library.register(settings, operator_library.needed_by(part))
    kept = hand_over(part, places, settings)
    session = ort.InferenceSession(part.SerializeToString(), settings, providers=[CPU])
    outputs = [o.name for o in part.graph.output]

    def run(feed: Mapping[str, np.ndarray], kept: object = kept) -> dict[str, np.ndarray]:
        return dict(zip(outputs, session.run(outputs, dict(feed)), strict=True))

    return run


def _interpreter(made: Export, part: onnx.ModelProto) -> RunPart:
    from engines.interpreter import Interpreter

    with tempfile.TemporaryDirectory(prefix="mla-part-") as temporary:
        path = Path(temporary) / "part.onnx"
        path.write_bytes(part.SerializeToString())
        return Interpreter(path, weights=made.folder).run
