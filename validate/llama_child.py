"""llama.cpp behind a pipe: run by `llama_peer.py` with the Python of the peer's own environment, never imported by us.

A request is a line of JSON, with `bytes` of raw array behind it where it has any; so is an answer. `write` makes a GGUF
file of a plan (gguf_plan.py), `open` loads it, `generate` takes tokens from an empty cache, `hold` puts given rows
into a cache through llama.cpp's own state of a sequence, `run` decodes tokens behind them. What it adds behind the held
rows it removes again, so a step can be repeated. Between requests no thread works.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 2048  # tokens handed over at once, llama.cpp's default; it works on them 512 at a time
PAD = 256  # it attends cells in blocks of so many
_MAGIC = 0xAF143CD8  # of a sequence's state, and then its layout as llama-kv-cache.cpp writes it
_STORED: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_CACHES: dict[int, Any] = {0: np.dtype("<f4"), 1: np.dtype("<f2")}  # by ggml's number


# -- a GGUF from a plan


def write(plan: dict[str, Any], path: Path) -> int:
    """Write the file, one tensor in memory at a time; its bytes."""
    gguf: Any = importlib.import_module("gguf")
    quants: Any = importlib.import_module("gguf.quants")
    architecture, types = plan["architecture"], {"f32": "F32", "f16": "F16", "q8_0": "Q8_0", "q4_0": "Q4_0"}
    writer = gguf.GGUFWriter(None, architecture)
    for name, value in plan["keys"].items():
        full = name if name.startswith(("general.", "tokenizer.")) else f"{architecture}.{name}"
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](full, value)
    writer.add_quantization_version(2)
    for entry in plan["tensors"]:
        kind = gguf.GGMLQuantizationType[types[entry["dtype"]]]
        shape = quants.quant_shape_to_byte_shape(entry["shape"], kind) if kind.name.startswith("Q") else entry["shape"]
        nbytes = int(np.prod(entry["shape"])) * gguf.GGML_QUANT_SIZES[kind][1] // gguf.GGML_QUANT_SIZES[kind][0]
        numpy_dtype = np.dtype({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8))
        writer.add_tensor_info(entry["name"], shape, numpy_dtype, nbytes, raw_dtype=kind)
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in plan["tensors"]:
        values = quants.quantize(taken(entry), gguf.GGMLQuantizationType[types[entry["dtype"]]])
        writer.write_tensor_data(values)
    writer.close()
    return path.stat().st_size


def taken(entry: dict[str, Any]) -> np.ndarray:
    """Values of one planned tensor, float32."""
    kind, shape = _STORED[entry["stored"]], tuple(entry["stored_shape"])
    raw = np.memmap(entry["file"], kind, "r", entry["offset"], shape)
    values = (raw.astype("<u4") << 16).view("<f4") if entry["stored"] == "BF16" else raw.astype("<f4")
    if entry["part"] == "paired":  # llama.cpp rotates neighbours; these columns rotate with those half a width on
        heads, rope = entry["heads"], entry["rope"]
        values = values.reshape(heads, -1, shape[-1]) if entry["heads"] > 1 else values[None]
        turned = values[:, -rope:].reshape(heads, 2, rope // 2, shape[-1]).swapaxes(1, 2)
        values = np.concatenate([values[:, :-rope], turned.reshape(heads, rope, shape[-1])], axis=1).reshape(shape)
    elif entry["part"] in ("keys", "values"):
        per_head, nope = values.reshape(entry["heads"], -1, shape[-1]), entry["nope"]
        values = per_head[:, :nope].swapaxes(1, 2) if entry["part"] == "keys" else per_head[:, nope:]
    return np.ascontiguousarray(values)


# -- a model that runs


class Model:
    """An opened file. `held` is a context with a past in it, and the past's length."""

    def __init__(self, path: str, threads: int, flash: bool, cache: str, repack: bool) -> None:
        self.api: Any = importlib.import_module("llama_cpp.llama_cpp")
        self.words: list[str] = []
        self._log = self.api.llama_log_callback(self._note)
        self.api.llama_log_set(self._log, None)
        self.api.llama_backend_init()
        self.path, self.threads, self.flash = path, threads, flash
        self.cache = {"f32": 0, "f16": 1}[cache]
        p = self.api.llama_model_default_params()
        p.use_extra_bufts = repack
        self.model = self.api.llama_model_load_from_file(path.encode(), p)
        self._require(self.model, "load the model")
        self.vocabulary = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        self.context: Any = None
        self.batch = self.length = 0

    def _note(self, level: int, text: bytes, _: Any) -> None:
        if level == 4:  # errors
            self.words.append(text.decode(errors="replace").strip())

    def _require(self, done: Any, what: str) -> None:
        if not done:
            raise RuntimeError(f"llama.cpp could not {what}" + (f": {self.words[0]}" if self.words else ""))

    def begin(self, batch: int, tokens: int) -> None:
        """An empty cache for `tokens` in each of `batch` sequences, in place of the one before."""
        self.release()
        p = self.api.llama_context_default_params()
        p.n_ctx, p.n_seq_max = batch * (-(-tokens // PAD) * PAD), batch
        p.n_batch, p.n_threads, p.n_threads_batch = max(BATCH, batch), self.threads, self.threads
        p.flash_attn_type, p.type_k, p.type_v = int(self.flash), self.cache, self.cache
        self.context = self.api.llama_init_from_model(self.model, p)
        self._require(self.context, f"make a context of {p.n_ctx} tokens")
        self.memory, self.batch, self.length = self.api.llama_get_memory(self.context), batch, 0

    def release(self) -> None:
        """Free the cache."""
        if self.context:
            self.api.llama_free(self.context)
        self.context = None

    def decode(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Take tokens [B, N] at positions from `start` on; the logits [B, V] behind the last."""
        found = np.empty((len(tokens), self.vocabulary), np.float32)
        most = max(1, BATCH // len(tokens))
        for at in range(0, tokens.shape[1], most):
            piece = tokens[:, at : at + most]
            self._decode(piece, start + at, found if at + most >= tokens.shape[1] else None)
        return found

    def _decode(self, piece: np.ndarray, start: int, found: np.ndarray | None) -> None:
        (batch, new), view = piece.shape, np.ctypeslib.as_array
        b = self.api.llama_batch_init(piece.size, 0, 1)
        try:
            b.n_tokens = piece.size
            view(b.token, (piece.size,))[:] = piece.reshape(-1)
            view(b.pos, (piece.size,))[:] = np.tile(np.arange(start, start + new), batch)
            view(b.n_seq_id, (piece.size,))[:] = 1
            wanted = view(b.logits, (piece.size,))
            wanted[:] = 0
            if found is not None:
                wanted[new - 1 :: new] = 1
            for i in range(piece.size):
                b.seq_id[i][0] = i // new
            self._require(self.api.llama_decode(self.context, b) == 0, f"decode {piece.size} tokens at {start}")
            if found is not None:
                for sequence in range(batch):
                    row = self.api.llama_get_logits_ith(self.context, sequence * new + new - 1)
                    found[sequence] = view(row, (self.vocabulary,))
        finally:
            self.api.llama_batch_free(b)

    def generate(self, prompt: np.ndarray, follow: np.ndarray) -> np.ndarray:
        """Logits [1 + N, B, V] behind the prompt [B, P] and behind each of the tokens [B, N] that follow."""
        length = prompt.shape[1]
        self.begin(len(prompt), length + follow.shape[1])
        return np.stack([self.decode(prompt, 0), *(self.decode(follow[:, i : i + 1], length + i)
                                                   for i in range(follow.shape[1]))])

    def hold(self, rows: np.ndarray, room: int) -> None:
        """Put rows [layers, B, S, latent + rope] in an empty cache, with room for as many tokens more."""
        _, batch, length, _ = rows.shape
        self.begin(batch, length + room)
        if length:
            self.decode(np.zeros((batch, 1), np.int64), 0)  # a cell of its own making shows how it lays out a state
            for sequence in range(batch):
                state = Layout(self._state(sequence)).write(rows[:, sequence], self._expand)
                source = (ctypes.c_uint8 * len(state)).from_buffer(state)
                done = self.api.llama_state_seq_set_data(self.context, source, len(state), sequence)
                self._require(done == len(state), f"take a past of {length} rows")
        self.length = length

    def _state(self, sequence: int) -> bytes:
        size = self.api.llama_state_seq_get_size(self.context, sequence)
        into = (ctypes.c_uint8 * size)()
        self._require(self.api.llama_state_seq_get_data(self.context, into, size, sequence) == size, "give its state")
        return bytes(into)

    def _expand(self, layer: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys [S, H (nope + rope)] and values [S, H v] of latent rows, as its own weights make them."""
        gguf: Any = importlib.import_module("gguf")
        quants: Any = importlib.import_module("gguf.quants")
        reader = gguf.GGUFReader(self.path)
        number = {name: int(reader.get_field(f"deepseek2.{name}").contents())
                  for name in ("attention.head_count", "attention.value_length", "attention.kv_lora_rank",
                               "rope.dimension_count")}
        heads, v, latent, rope = number.values()
        tensor = next(t for t in reader.tensors if t.name == f"blk.{layer}.attn_kv_b.weight")
        wide = rows[:, :latent] @ quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).T
        wide = wide.reshape(len(rows), heads, -1)
        keys = np.concatenate([wide[..., :-v], np.broadcast_to(rows[:, None, latent:], (len(rows), heads, rope))], -1)
        return keys.reshape(len(rows), -1), wide[..., -v:].reshape(len(rows), -1)

    def run(self, tokens: np.ndarray) -> np.ndarray:
        """Decode tokens [B, N] behind the held rows, which stay as they are: the logits."""
        found = self.decode(tokens, self.length)
        for sequence in range(self.batch):
            self.api.llama_memory_seq_rm(self.memory, sequence, self.length, -1)
        return found


class Layout:
    """How llama.cpp lays out the state of a sequence, learnt from one that it made; anything unexpected is an error.

    Keys come row by row, layer after layer; then values, or none where the latent is both. Values lie row by row, or
    transposed (without flash attention). Each layer has its dtype, by ggml's number, and its columns.
    """

    def __init__(self, state: bytes) -> None:
        """Read a state that holds one cell."""
        self.keys: list[tuple[int, int]] = []
        self.values: list[tuple[int, int]] = []
        self._state, self._at = state, 0
        try:
            understood = self._understand()
        except (struct.error, KeyError):
            understood = False
        if not understood:
            raise RuntimeError("llama.cpp lays out its state otherwise than this peer knows")

    def _understand(self) -> bool:
        magic, _, self.streams = self._read("IiI")
        self.stream = 0  # in which the sequence lies
        while not self._read("I")[0] and self.stream < self.streams:
            self.stream += 1
        self._read("iIi")  # the cell: its position, and the one sequence it belongs to
        self.transposed, layers = self._read("II")
        self.keys = [self._rows() for _ in range(layers)]
        behind = 4 * (self.streams - 1 - self.stream)  # the empty streams that follow
        if len(self._state) > self._at + behind:
            self.values = [self._columns() if self.transposed else self._rows() for _ in range(layers)]
        return bool(magic == _MAGIC and self._at + behind == len(self._state))

    def _read(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._state, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _rows(self) -> tuple[int, int]:
        kind, size = self._read("iQ")
        self._at += size
        return kind, size // _CACHES[kind].itemsize

    def _columns(self) -> tuple[int, int]:
        kind, item, columns = self._read("iII")
        self._at += item * columns
        return kind, columns

    def write(self, rows: np.ndarray, expand: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]) -> bytearray:
        """The state of a sequence that holds rows [layers, S, latent + rope], the first at position 0. `expand` gives a
        layer's keys and values where the cache holds those."""
        length, out = rows.shape[1], bytearray(struct.pack("<IiI", _MAGIC, 0, self.streams))
        out += bytes(4 * self.stream) + struct.pack("<I", length)
        cells = np.zeros((length, 3), "<i4")
        cells[:, 0], cells[:, 1] = np.arange(length), 1
        out += cells.tobytes() + struct.pack("<II", self.transposed, len(self.keys))
        values = []
        for layer, (kind, columns) in enumerate(self.keys):
            row = rows[layer]
            if self.values:
                row, value = expand(layer, row)
                values.append(value.astype(_CACHES[self.values[layer][0]]))
            if row.shape[1] != columns:
                raise RuntimeError(f"llama.cpp holds {columns} columns a key, {row.shape[1]} were given")
            out += struct.pack("<iQ", kind, columns * _CACHES[kind].itemsize) + row.astype(_CACHES[kind]).tobytes()
        for (kind, columns), value in zip(self.values, values, strict=True):
            if self.transposed:
                out += struct.pack("<iII", kind, _CACHES[kind].itemsize, columns) + value.T.tobytes()
            else:
                out += struct.pack("<iQ", kind, columns * _CACHES[kind].itemsize) + value.tobytes()
        return out + bytes(4 * (self.streams - 1 - self.stream))


# -- requests


def answer(model: Model | None, request: dict[str, Any], payload: bytes) -> tuple[Model | None, dict[str, Any], bytes]:
    """Do what a request asks: the model from now on, the answer, and its array."""
    op = request["op"]
    if op == "write":
        return model, {"bytes_written": write(json.loads(payload), Path(request["path"]))}, b""
    if op == "open":
        model = Model(request["path"], request["threads"], request["flash"], request["cache"], request["repack"])
        return model, {"system": model.api.llama_print_system_info().decode().strip()}, b""
    assert model is not None
    model.words.clear()
    array = np.frombuffer(payload, request["dtype"]).reshape(request["shape"])
    if op == "generate":
        logits = model.generate(array[:, : request["prompt"]], array[:, request["prompt"] :])
        return model, {"shape": logits.shape}, logits.tobytes()
    if op == "hold":
        model.hold(array, request["room"])
        return model, {}, b""
    assert op == "run"
    logits = model.run(array)
    return model, {"shape": logits.shape}, logits.tobytes()


def main() -> None:
    """Answer requests until the pipe is closed."""
    out = os.fdopen(os.dup(1), "wb")  # what llama.cpp prints goes elsewhere
    os.dup2(2, 1)
    model: Model | None = None
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        payload = sys.stdin.buffer.read(request.get("bytes", 0))
        try:
            model, found, data = answer(model, request, payload)
        except Exception as error:
            found, data = {"error": f"{type(error).__name__}: {error}"}, b""
        out.write(json.dumps({**found, "bytes": len(data)}).encode() + b"\n" + data)
        out.flush()


if __name__ == "__main__":
    main()
