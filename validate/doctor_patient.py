"""Any ONNX graph of an attention or a decoder over a cache, run in ONNX Runtime with any of its tensors given out.

What each input means is told by its name and shape: tokens, caches, lengths, positions, masks, the last token. A graph
with an input that none of these is cannot be fed, and that is said. Nothing is written beside the graph.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from engines.measure import available_memory
from validate.dataflow import Roles, number_in
from validate.graph_shapes import Graph

VOCABULARY = 32  # ids are drawn below this
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE}


@dataclass(frozen=True)
class Call:
    """One step: `tokens` [B, T] ids or [B, T, D]; `pasts` by cache input, as that input's shape says; `lengths` [B]
    valid rows of each sequence; the first `padding` new tokens are masked out where a mask is an input."""

    tokens: np.ndarray
    pasts: Mapping[str, np.ndarray]
    lengths: np.ndarray
    padding: int = 0

    @property
    def new(self) -> int:
        """T."""
        return int(self.tokens.shape[1])


class CannotRunError(Exception):
    """Why a graph cannot be run here."""


def _in_float32(model: onnx.ModelProto) -> bool:
    """Have ONNX Runtime multiply codes of four bits in float32, so that what is probed is the graph and no rounding
    inside a kernel; whether there is some left, of eight bits, which have no fast kernel of that kind."""
    left = False
    for node in model.graph.node:
        if node.op_type in ("MatMulNBits", "QMoE"):
            given = {a.name: a for a in node.attribute}
            bits = given["bits" if node.op_type == "MatMulNBits" else "expert_weight_bits"].i
            level = given.get("accuracy_level")
            if bits == 4 and level is not None:
                level.i = 1
            left |= bits == 8 and (node.op_type == "QMoE" or (level is not None and level.i == 4))
    return left


class Patient:
    """One graph file, the roles of its inputs, and runs of it."""

    def __init__(self, path: Path, graph: Graph, roles: Roles, handed: Mapping[str, Path] | None = None) -> None:
        self.path, self.graph, self.roles = path, graph, roles
        self._handed = handed or {}
        self._model = onnx.load(path, load_external_data=False)
        self.rounds_activations = _in_float32(self._model)
        self._sessions: dict[tuple[str, ...], Any] = {}
        self._check()

    # ---- what can be asked

    @property
    def has_lengths(self) -> bool:
        """Whether valid rows are told by an input of their own, so that rows beyond them may lie there."""
        return any(self._meaning(n) in ("lengths", "mask") for n in self.graph.inputs)

    @property
    def has_mask(self) -> bool:
        """Whether a mask [B, S + T] is an input."""
        return any(self._meaning(n) == "mask" and len(self.graph.dims(n)) == 2 for n in self.graph.inputs)

    @property
    def sets_positions(self) -> bool:
        """Whether a position can be told without as many rows of past."""
        return any(self._meaning(n) in ("lengths", "positions") for n in self.graph.inputs)

    @property
    def fixed_rows(self) -> int | None:
        """Rows of a preallocated cache; None where their number is free."""
        cache = self.roles.caches[0]
        size = self.graph.dims(cache.name)[cache.axis]
        return size if isinstance(size, int) else None

    @property
    def fixed_tokens(self) -> int | None:
        """New tokens of a step where the graph takes only so many."""
        dims = self.graph.dims(self.roles.tokens)
        return dims[1] if len(dims) > 1 and isinstance(dims[1], int) else None

    @property
    def fixed_batch(self) -> int | None:
        """Sequences of a step where the graph takes only so many."""
        size = self.graph.dims(self.roles.tokens)[0]
        return size if isinstance(size, int) else None

    @property
    def wide(self) -> bool:
        """Whether tokens are hidden states."""
        return bool(self.graph.dtype(self.roles.tokens) != TensorProto.INT64)

    @property
    def half(self) -> bool:
        """Whether caches are in 16 bits."""
        return bool(self.graph.dtype(self.roles.caches[0].name) == TensorProto.FLOAT16)

    def draw(self, rng: np.random.Generator, batch: int, tokens: int) -> np.ndarray:
        """Hot hidden states, or ids."""
        if not self.wide:
            return rng.integers(0, VOCABULARY, (batch, tokens))
        width = self.graph.dims(self.roles.tokens)[2]
        drawn: np.ndarray = rng.standard_normal((batch, tokens, int(width))).astype(self._numpy(self.roles.tokens))
        return drawn

    def empty(self, batch: int, rows: int) -> dict[str, np.ndarray]:
        """Caches of zeros."""
        return {c.name: np.zeros(self.cache_shape(c.name, batch, rows), self._numpy(c.name)) for c in self.roles.caches}

    def rows_for(self, count: int) -> int:
        """Rows of past that a step is given where `count` are valid: all of a preallocated cache; one at least where
        the graph is told how many are valid."""
        if self.fixed_rows is not None:
            return self.fixed_rows
        return max(1, count) if any(self._meaning(n) == "lengths" for n in self.graph.inputs) else count

    def after(self, call: Call, outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The caches behind a step of which every row and token was valid: new rows behind the old, or the cache as it
        was written. CannotRunError where no output is one."""
        found, matches = {}, self.written(call, outputs)
        for cache in self.roles.caches:
            past, valid = call.pasts[cache.name], int(call.lengths[0])
            if cache.name not in matches:
                raise CannotRunError(f"no output is {cache.name} with its new rows")
            made = outputs[matches[cache.name]]
            if self.fixed_rows is None or made.shape[cache.axis] != self.fixed_rows:
                new = np.take(made, range(made.shape[cache.axis] - call.new, made.shape[cache.axis]), cache.axis)
                made = np.concatenate([np.take(past, range(valid), cache.axis), new], cache.axis)
            found[cache.name] = made
        return found

    def written(self, call: Call, outputs: Mapping[str, np.ndarray]) -> dict[str, str]:
        """Which output each cache comes out as: of its shape but for the rows, and of its number, in their order."""
        found, free = {}, [n for n in map(str, self.graph.outputs) if n != self.main_output()]
        for cache in self.roles.caches:
            past = call.pasts[cache.name]
            rows = {call.new, past.shape[cache.axis] + call.new, self.fixed_rows}
            match = next((n for n in free if number_in(n) == cache.attention
                          and _fits(outputs[n].shape, past.shape, cache.axis, rows)), None)
            if match is not None:
                free.remove(match)
                found[cache.name] = match
        return found

    def cache_shape(self, name: str, batch: int, rows: int) -> tuple[int, ...]:
        """The shape of a cache input with so many rows."""
        axis = next(c.axis for c in self.roles.caches if c.name == name)
        shape = list(self.roles.sizes[min(self.roles.sizes)][name])
        shape[0], shape[axis] = batch, rows
        return tuple(shape)

    # ---- a run

    def run(self, call: Call, wanted: Sequence[str] = ()) -> dict[str, np.ndarray]:
        """The graph's outputs, and the tensors `wanted`, by name. CannotRunError with the runtime's first line."""
        session = self._open(tuple(dict.fromkeys(wanted)))
        names = [o.name for o in session.get_outputs()]
        try:
            values = session.run(names, self._feed(call))
        except CannotRunError:
            raise
        except Exception as error:
            raise CannotRunError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None
        return {n: np.asarray(v) for n, v in zip(names, values, strict=True)}

    def main_output(self) -> str:
        """Logits, or what the attention gives: the output that is no cache."""
        names = list(map(str, self.graph.outputs))
        main = [n for n in names if re.search(r"logits|attn_output|hidden_states|last_hidden", n)]
        return (main or [n for n in names if not re.search(r"past|present|cache|latent|key|value|rope", n)] or names)[0]

    def _open(self, wanted: tuple[str, ...]) -> Any:
        import onnxruntime as ort

        if wanted not in self._sessions:
            from engines import operator_library
            from engines.ort import hand_over

            model = onnx.ModelProto()
            model.CopyFrom(self._model)
            known = {o.name for o in model.graph.output}
            model.graph.output.extend(helper.make_empty_tensor_value_info(n) for n in wanted if n not in known)
            settings = ort.SessionOptions()
            settings.log_severity_level, settings.intra_op_num_threads = 4, 2
            settings.add_session_config_entry("session.model_external_initializers_file_folder_path",
                                              str(self.path.parent.resolve()))
            try:
                operator_library.register(settings, operator_library.needed_by(model))
                held = hand_over(self.path, self._handed, settings)
                session = ort.InferenceSession(model.SerializeToString(), settings, providers=["CPUExecutionProvider"])
            except Exception as error:
                raise CannotRunError((str(error).strip().splitlines() or [type(error).__name__])[0]) from None
            self._sessions = {wanted: session}  # one at a time: each holds the weights
            self._held = held
        return self._sessions[wanted]

    def _feed(self, call: Call) -> dict[str, np.ndarray]:
        feed = {}
        for name in self.graph.inputs:
            meaning = self._meaning(name)
            value = call.pasts[name] if meaning == "cache" else self._value(name, meaning, call)
            feed[name] = np.ascontiguousarray(value).astype(self._numpy(name), copy=False)
        return feed

    def _value(self, name: str, meaning: str | None, call: Call) -> np.ndarray:
        batch, new, rank = len(call.tokens), call.new, len(self.graph.dims(name))
        if meaning == "tokens":
            return call.tokens
        if meaning == "lengths":
            return call.lengths
        if meaning == "last":
            return np.full(batch, new - 1)
        positions = call.lengths[:, None] + np.arange(new)
        if meaning == "positions":
            return positions if rank == 2 else positions[0]
        rows = self._rows(call)
        visible = np.concatenate([np.arange(rows) < call.lengths[:, None], np.ones((batch, new), bool)], axis=1)
        visible[:, rows:rows + call.padding] = False
        if rank == 2:
            return visible
        causal = np.tril(np.ones((new, new), bool))
        seen = visible[:, None, None, :] & np.concatenate([np.ones((new, rows), bool), causal], axis=1)
        return seen if self.graph.dtype(name) == TensorProto.BOOL else np.where(seen, 0.0, -1e9)

    def _rows(self, call: Call) -> int:
        cache = self.roles.caches[0]
        return int(call.pasts[cache.name].shape[cache.axis])

    # ---- what inputs mean

    def _meaning(self, name: str) -> str | None:
        """tokens, cache, lengths, positions, mask, last; None for what is none of these."""
        if name == self.roles.tokens:
            return "tokens"
        if any(c.name == name for c in self.roles.caches):
            return "cache"
        dims, whole = self.graph.dims(name), self.graph.dtype(name) in (TensorProto.INT64, TensorProto.INT32)
        low = name.lower()
        if whole and len(dims) == 1 and "last_token" in low:
            return "last"
        if whole and len(dims) == 1 and re.search(r"len", low):
            return "lengths"
        if whole and len(dims) in (1, 2) and "posit" in low:
            return "positions"
        if "mask" in low and (len(dims) == 2 or (len(dims) == 4 and not whole)):
            return "mask"
        return None

    def _check(self) -> None:
        """CannotRunError for a graph that cannot be fed or held."""
        strange = [n for n in self.graph.inputs if self._meaning(n) is None]
        if strange:
            raise CannotRunError(f"input {strange[0]} is neither tokens, cache, lengths, positions nor mask")
        narrow = [n for n in self.graph.inputs if self._meaning(n) in ("tokens", "cache")
                  and self.graph.dtype(n) not in (*_FLOATS, TensorProto.INT64)]
        if narrow:
            kind = TensorProto.DataType.Name(self.graph.dtype(narrow[0])).lower()
            raise CannotRunError(f"input {narrow[0]} is {kind}, which is not run here")
        if self.wide and not isinstance(self.graph.dims(self.roles.tokens)[-1], int):
            raise CannotRunError(f"input {self.roles.tokens} does not say how wide it is")
        needed = 0
        for tensor in self._model.graph.initializer:
            entry = {e.key: e.value for e in tensor.external_data}
            needed += int(entry.get("length", len(tensor.raw_data)))
            place = entry.get("location")
            if place and place not in self._handed and not (self.path.parent / place).is_file():
                raise CannotRunError(f"no weights beside the graph ({place} is not there)")
        if needed > 0.4 * available_memory():  # files as large as that are mapped and copied
            raise CannotRunError(f"its weights take {needed >> 20} MiB, {available_memory() >> 20} MiB are free")

    def _numpy(self, name: str) -> np.dtype[Any]:
        found: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(self.graph.dtype(name)))
        return found


def _fits(shape: tuple[int, ...], like: tuple[int, ...], axis: int, rows: set[int | None]) -> bool:
    """Whether a shape is that of a cache with one of these numbers of rows."""
    return (len(shape) == len(like) and shape[axis] in rows
            and (*shape[:axis], *shape[axis + 1:]) == (*like[:axis], *like[axis + 1:]))


def outside_paths(path: Path) -> list[str]:
    """External data of a graph that an absolute path or `..` names, which runtimes refuse or read elsewhere."""
    model = onnx.load(path, load_external_data=False)
    places = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    return sorted(p for p in places if Path(p).is_absolute() or p.startswith("\\") or ":" in p or ".." in Path(p).parts)

