"""A latent cache, on the host or a GPU, that feeds any cache form and keeps what a step returns.

One row of R numbers per token and attention, nothing per head; of a quantised cache its latent in 8 bits, its scale and
its rotary key. Rows beyond a sequence's length are zero until written. All attentions lie in one buffer [L, B, S, R],
so that a step's new rows of every attention and sequence are written by one copy.
"""

from __future__ import annotations

import math

import numpy as np

from engines.memory import HOST, Memory, address
from engines.session import Outputs
from exporter.dtypes import DTYPES, NUMPY_OF_NAME
from exporter.errors import InputError
from exporter.manifest import Export

ALL = slice(None)


class LatentCache:
    """`batch` sequences of up to `capacity` rows in every attention of an export.

    Without `capacity` there is room for the export's max-context.
    append: `feed` binds the first S rows of the buffers with no copy when batch is 1 or S is the capacity; of one
    sequence those that it has, rounded up to what the graphs (`row_multiple`) and the memory ask for.
    scatter: the buffers are the graph's own S_max rows, whatever `capacity` says, and are updated in place.
    concat: the present that a step returned is the next step's past; the buffers grow by the rows that are kept.
    `staging`: where steps write their new rows (`out`); without it they come as an array of each attention.
    `memory`: where the buffers lie; concat's, which every step makes anew, lie on the host.
    """

    def __init__(self, export: Export, batch: int, capacity: int | None = None, staging: Staging | None = None,
                 memory: Memory = HOST) -> None:
        if batch < 1:
            raise InputError(f"batch is {batch}; expected at least 1")
        if capacity is not None and not 1 <= capacity <= export.max_context:
            raise InputError(f"capacity is {capacity} rows; expected 1 to {export.max_context}, the export's "
                             "max-context")
        self.form, self.staging = export.cache, staging
        self.memory = HOST if self.form == "concat" else memory
        self._granule = math.lcm(self.memory.granule, export.row_multiple)
        self.capacity = export.max_context if capacity is None or self.form == "scatter" else capacity
        rows = self.capacity if self.form in ("append", "scatter") else 1  # concat: an empty past is one dummy row
        self.stacks = {part: self.memory.zeros((export.attentions, batch, rows, width), dtype)
                       for part, (width, dtype) in row_parts(export).items()}
        self.parts = {part: list(stack) for part, stack in self.stacks.items()}  # views; concat puts its own there
        self.lengths = np.zeros(batch, np.int64)

    @property
    def layers(self) -> list[np.ndarray]:
        """Each attention's buffer [B, S, R]; of a quantised cache its latents [B, S, d_c] in 8 bits."""
        return self.parts["latent"]

    @property
    def rows(self) -> np.ndarray:
        """The first attention's buffer (at layer scope the only one)."""
        return self.layers[0]

    @property
    def quantised(self) -> bool:
        """Whether a row is three: `parts` has `latent`, `scale` and `rope`, each by attention."""
        return len(self.parts) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        if self.form == "concat":
            return sum(rows.nbytes for layers in self.parts.values() for rows in layers)
        return sum(stack.nbytes for stack in self.stacks.values())

    def load(self, rows: np.ndarray, lengths: np.ndarray, attention: int = 0) -> None:
        """Start from rows [B, S, R] of which the first `lengths` [B] are valid. InputError for a quantised cache, whose
        rows only a graph makes: fill `parts`."""
        if self.quantised:
            raise InputError("load: the cache holds latents in 8 bits, which a graph makes of rows (commit); write "
                             "latents, scales and rotary keys into parts")
        batch, _, width = self.rows.shape
        if rows.ndim != 3 or rows.shape[::2] != (batch, width) or rows.shape[1] > self.capacity:
            raise InputError(f"rows have shape {list(rows.shape)}; expected [{batch}, S, {width}], S at most the "
                             f"capacity, {self.capacity}")
        if self.form == "concat":
            self.layers[attention] = np.ascontiguousarray(rows.astype(self.rows.dtype))
        else:
            self.layers[attention][:, : rows.shape[1]] = rows
        self.lengths[:] = lengths

    def feed(self, slots: slice = ALL) -> dict[str, np.ndarray]:
        """The cache inputs of one step, for all sequences or for some that lie side by side."""
        if self.form == "none":
            return {}
        lengths = self.lengths[slots].copy()
        feed = {"past_lengths": lengths}
        # batch 1: a prefix of the buffer is contiguous; more: the whole buffer, whose tail the lengths hide
        S = self.rows.shape[1]
        if len(lengths) == 1:
            S = min(-(-max(int(lengths.max()), 1) // self._granule) * self._granule, S)
        for part, layers in self.parts.items():
            for i, rows in enumerate(layers):
                if self.form == "scatter":
                    feed[f"latent_cache.{i}"] = rows[slots, None]
                else:
                    feed[f"past_{part}.{i}"] = rows if self.form == "concat" else rows[slots, :S]
        return feed

    def out(self, batch: int, tokens: int) -> dict[str, np.ndarray]:
        """Where a step of `batch` sequences and `tokens` new ones writes its rows; empty without `staging`, and where
        the graph writes them itself."""
        return {} if self.staging is None or self.form != "append" else self.staging.out(batch, tokens)

    def commit(self, outputs: Outputs, counts: np.ndarray | int, slots: slice = ALL) -> None:
        """Keep the first `counts` [B] new rows of each sequence (the rest was right padding), of those in `slots`.

        InputError, with nothing kept, where the step did not compute as many rows or the cache has no room for them.
        """
        lengths, given = self.lengths[slots], np.asarray(counts, np.int64)
        if given.ndim and given.shape != lengths.shape:
            raise InputError(f"counts have shape {list(given.shape)}; expected [{len(lengths)}], one per sequence")
        counts = np.broadcast_to(given, lengths.shape)
        made = self._new_rows(outputs)
        if counts.min() < 0 or (made is not None and counts.max() > made):
            raise InputError(f"{counts.tolist()} new rows to keep; expected 0 to {made}, the new tokens of the step")
        if int((lengths + counts).max()) > self.capacity:
            raise InputError(f"{lengths.tolist()} rows and {counts.tolist()} new ones exceed the capacity of "
                             f"{self.capacity}; make a cache of a larger capacity")
        if self.form == "concat" and (counts != counts[0]).any():
            raise InputError(f"concat keeps one length for all; new tokens {counts.tolist()} differ")
        if not counts.any():
            return  # concat's empty past keeps its dummy row: S is at least 1
        if self.form == "concat":
            self._join(outputs, int(counts[0]))
        elif self.form == "append":
            self._append(outputs, counts, np.arange(len(self.lengths))[slots])
        lengths += counts  # a view: the cache's own

    def truncate(self, sequence: int, rows: int) -> None:
        """Forget a sequence's rows from `rows` on. InputError for concat, and where it has fewer."""
        if self.form == "concat" or not 0 <= rows <= int(self.lengths[sequence]):
            raise InputError(f"truncate sequence {sequence} to {rows} rows: it has {int(self.lengths[sequence])} in "
                             f"the {self.form} form; expected append or scatter, and at most as many as it has")
        self.lengths[sequence] = rows

    def _join(self, outputs: Outputs, count: int) -> None:
        for i, layer in enumerate(self.layers):
            # new rows lie at S, so an empty past (S = 1, length 0) leaves its dummy row in front
            present, S = outputs[f"present_latent.{i}"], layer.shape[1]
            start = S if not self.lengths.any() else 0
            kept = count + (0 if start else S)
            self.layers[i] = np.ascontiguousarray(present[:, start:start + kept])

    def _append(self, outputs: Outputs, counts: np.ndarray, slots: np.ndarray) -> None:
        for part, stack in self.stacks.items():
            staged = None if self.staging is None else self.staging.filled(outputs, part)
            if staged is not None:
                self.memory.write_rows(stack, staged, slots, self.lengths[slots], counts)
                continue
            for i, layer in enumerate(stack):
                self.memory.write_rows(layer[None], outputs[f"new_{part}.{i}"][None], slots, self.lengths[slots],
                                       counts)

    def _new_rows(self, outputs: Outputs) -> int | None:
        """How many new tokens a step computed; None where its outputs do not tell (a scatter model's do not)."""
        for name in ("attn_output", "hidden_states_out", "new_latent.0"):
            if name in outputs:
                return int(outputs[name].shape[1])
        if self.form == "concat":
            return int(outputs["present_latent.0"].shape[1] - self.rows.shape[1])
        return None


class Staging:
    """One buffer [L, B, T, R] that a step's new rows of all attentions are written into, for any B · T up to `rows`.

    It is made once, so that a step allocates nothing, and serves any number of caches that run one after the other.
    """

    def __init__(self, export: Export, rows: int, memory: Memory = HOST) -> None:
        self._layers, self.rows = export.attentions, rows
        self._flat = {part: memory.zeros((export.attentions * rows * width,), dtype)
                      for part, (width, dtype) in row_parts(export).items()}
        self._widths = {part: width for part, (width, _) in row_parts(export).items()}
        self._given: dict[str, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return sum(flat.nbytes for flat in self._flat.values())

    def out(self, batch: int, tokens: int) -> dict[str, np.ndarray]:
        """`new_latent.{i}` [B, T, R] as views of the buffer, to hand to `infer`."""
        if batch * tokens > self.rows:
            raise InputError(f"{batch} sequences of {tokens} new tokens; the staging buffer has {self.rows} rows")
        self._given, out = {}, {}
        for part, flat in self._flat.items():
            shape = (self._layers, batch, tokens, self._widths[part])
            self._given[part] = flat[:math.prod(shape)].reshape(shape)
            out.update({f"new_{part}.{i}": rows for i, rows in enumerate(self._given[part])})
        return out

    def filled(self, outputs: Outputs, part: str) -> np.ndarray | None:
        """The rows [L, B, T, R] of a step that wrote into the latest `out`; None for any other outputs."""
        made, given = outputs[f"new_{part}.0"], self._given.get(part)
        same = given is not None and made.shape == given.shape[1:] and address(made) == address(given)
        return given if same else None


def row_parts(export: Export) -> dict[str, tuple[int, np.dtype]]:
    """(width, dtype) of what a row is made of: one `latent`, or a quantised latent, its scale and its rotary key."""
    c, wide = export.config, np.dtype(DTYPES[export.dtype].numpy)
    if not export.quantised_cache:
        return {"latent": (c.row_dim, wide)}
    return {"latent": (c.kv_lora_rank, np.dtype(NUMPY_OF_NAME[export.cache_dtype])), "scale": (1, wide),
            "rope": (c.qk_rope_head_dim, wide)}

